//! Asymmetric Namespace Access: the states of the ports (Base §8.1).
//!
//! ```text
//! state of (port, group) set ─→ access of the controllers of the port ─→ every I/O command
//!                            └→ event ─→ the host reads log page 0Ch
//! ```
//!
//! A controller belongs to the port through which its admin queue was connected, and a queue that a host
//! connects through another port is refused. So the states of that port count for all of its queues.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use riopipe_nvme::ana::{AnaGroup, AnaState};

use super::namespace::Namespaces;

/// The highest number of an ANA group (ANAGRPMAX), and how many groups there are at most (NANAGRPID).
pub const ANA_GROUP_MAX: u32 = 128;
/// The time after which a state *change* has ended, in seconds (ANATT). A host gives the controller up
/// that stays in this state for longer.
pub(super) const ANA_TRANSITION_S: u8 = 60;

/// The state of one ANA group at one port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortState {
    /// The port.
    pub port: u16,
    /// The group, 1 to [`ANA_GROUP_MAX`].
    pub group: u32,
    /// The state.
    pub state: AnaState,
}

/// The states of all groups at all ports.
#[derive(Debug, Default)]
pub(super) struct AnaStates {
    /// By port and group: the state, and how often it has changed. What is missing is *optimized*, and
    /// has not changed.
    states: BTreeMap<(u16, u32), (AnaState, u64)>,
    /// By port: how often its log page has changed.
    changes: BTreeMap<u16, u64>,
}

impl AnaStates {
    /// The state of a group at a port.
    pub(super) fn get(&self, port: u16, group: u32) -> AnaState {
        self.states.get(&(port, group)).map_or(AnaState::default(), |(state, _)| *state)
    }

    /// Sets the state of a group at a port. Returns whether that is a change.
    pub(super) fn set(&mut self, PortState { port, group, state }: PortState) -> bool {
        let known = self.states.entry((port, group)).or_default();
        let is_change = known.0 != state;
        if is_change {
            *known = (state, known.1 + 1);
            self.note_change(port);
        }
        is_change
    }

    /// Notes that the log page of a port has changed.
    pub(super) fn note_change(&mut self, port: u16) {
        *self.changes.entry(port).or_default() += 1;
    }

    /// The states that are not *optimized*.
    pub(super) fn not_optimized(&self) -> Vec<PortState> {
        let all = self.states.iter().map(|(&(port, group), &(state, _))| PortState {
            port,
            group,
            state,
        });
        all.filter(|of| of.state != AnaState::Optimized).collect()
    }

    /// The log page of a port: how often it has changed, and the groups that have namespaces.
    pub(super) fn page(&self, port: u16, namespaces: &Namespaces) -> (u64, Vec<AnaGroup>) {
        let mut groups: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for nsid in namespaces.ids() {
            if let Some((_, namespace)) = namespaces.find(nsid) {
                groups.entry(namespace.config.ana_group).or_default().push(nsid);
            }
        }
        let group = |(id, nsids)| {
            let (state, change_count) = self.states.get(&(port, id)).copied().unwrap_or_default();
            AnaGroup { id, change_count, state, nsids }
        };
        let changes = self.changes.get(&port).copied().unwrap_or_default();
        (changes + 1, groups.into_iter().map(group).collect())
    }
}
