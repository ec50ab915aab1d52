//! Asymmetric Namespace Access (ANA; Base §8.1): how well a port reaches the namespaces.
//!
//! Each namespace is in an ANA group. A controller reports a state for each group, in the log page
//! Asymmetric Namespace Access (Base §5.16.1.13). A host with several paths uses the best one.

use alloc::vec::Vec;

use crate::bytes::{put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};
use crate::status::Status;

/// Length of the header of the log page in bytes.
pub const HEADER_LEN: usize = 16;
/// Length of a group's descriptor in bytes, without its list of namespaces.
pub const DESCRIPTOR_LEN: usize = 32;

/// CMIC bit: the controller reports ANA states.
pub const CMIC_ANA: u8 = 1 << 3;
/// CMIC bit: the subsystem has several ports.
pub const CMIC_SEVERAL_PORTS: u8 = 1 << 0;
/// ANACAP bits 4:0: all states may be reported.
pub const ANACAP_ALL_STATES: u8 = 0x1f;
/// ANACAP bit: the group of a namespace does not change while the namespace is attached.
pub const ANACAP_FIXED_GROUPS: u8 = 1 << 6;
/// ANACAP bit: Identify Namespace has the group.
pub const ANACAP_GROUP_IDS: u8 = 1 << 7;

/// How well a controller reaches the namespaces of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum AnaState {
    /// As well as any other one.
    #[default]
    Optimized,
    /// Not as well as others: hosts use it if no other one is left.
    NonOptimized,
    /// Not now. No I/O command is carried out.
    Inaccessible,
    /// Not any more, for this controller. No I/O command is carried out.
    PersistentLoss,
    /// The state changes. No I/O command is carried out.
    Change,
}

impl AnaState {
    /// All states.
    pub const ALL: [Self; 5] = [
        Self::Optimized,
        Self::NonOptimized,
        Self::Inaccessible,
        Self::PersistentLoss,
        Self::Change,
    ];

    /// The number of the state in the log page (Base Figure 219).
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Optimized => 0x1,
            Self::NonOptimized => 0x2,
            Self::Inaccessible => 0x3,
            Self::PersistentLoss => 0x4,
            Self::Change => 0xf,
        }
    }

    /// The state with this number.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.code() == code)
    }

    /// The name of the state, as nvme-cli and Linux write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Optimized => "optimized",
            Self::NonOptimized => "non-optimized",
            Self::Inaccessible => "inaccessible",
            Self::PersistentLoss => "persistent-loss",
            Self::Change => "change",
        }
    }

    /// The state with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }

    /// The status of an I/O command in this state (Base §8.1.3); `None` if it is carried out.
    #[must_use]
    pub const fn refusal(self) -> Option<Status> {
        match self {
            Self::Optimized | Self::NonOptimized => None,
            Self::Inaccessible => Some(Status::ANA_INACCESSIBLE),
            Self::PersistentLoss => Some(Status::ANA_PERSISTENT_LOSS),
            Self::Change => Some(Status::ANA_TRANSITION),
        }
    }
}

/// A group in the log page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnaGroup {
    /// ANA group identifier (ANAGRPID), 1 or more.
    pub id: u32,
    /// How often the state of the group has changed.
    pub change_count: u64,
    /// The state.
    pub state: AnaState,
    /// The namespaces of the group, in ascending order.
    pub nsids: Vec<u32>,
}

/// The log page: how often it has changed, and the groups in ascending order. With `groups_only`
/// (RGO), without the lists of namespaces.
#[must_use]
pub fn encode(change_count: u64, groups: &[AnaGroup], groups_only: bool) -> Vec<u8> {
    let mut page = alloc::vec![0; HEADER_LEN];
    put_u64(&mut page, 0, change_count);
    put_u16(&mut page, 8, groups.len() as u16);
    for group in groups {
        let at = page.len();
        page.resize(at + DESCRIPTOR_LEN, 0);
        let nsids: &[u32] = if groups_only { &[] } else { &group.nsids };
        put_u32(&mut page, at, group.id);
        put_u32(&mut page, at + 4, nsids.len() as u32);
        put_u64(&mut page, at + 8, group.change_count);
        page[at + 16] = group.state.code();
        for nsid in nsids {
            page.extend_from_slice(&nsid.to_le_bytes());
        }
    }
    page
}

/// Reads the log page: how often it has changed, and the groups. `None` if it is not whole, or has a
/// state that does not exist.
#[must_use]
pub fn decode(page: &[u8]) -> Option<(u64, Vec<AnaGroup>)> {
    let header = page.get(..HEADER_LEN)?;
    let mut groups = Vec::new();
    let mut at = HEADER_LEN;
    for _ in 0..u16_at(header, 8) {
        let descriptor = page.get(at..at + DESCRIPTOR_LEN)?;
        at += DESCRIPTOR_LEN;
        let len = (u32_at(descriptor, 4) as usize).checked_mul(4)?;
        let list = page.get(at..at.checked_add(len)?)?;
        at += len;
        groups.push(AnaGroup {
            id: u32_at(descriptor, 0),
            change_count: u64_at(descriptor, 8),
            state: AnaState::from_code(descriptor[16] & 0xf)?,
            nsids: list.as_chunks().0.iter().map(|nsid| u32::from_le_bytes(*nsid)).collect(),
        });
    }
    Some((u64_at(header, 0), groups))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_that_of_the_specification() {
        let groups = [
            AnaGroup {
                id: 1,
                change_count: 7,
                state: AnaState::Inaccessible,
                nsids: alloc::vec![1, 3],
            },
            AnaGroup { id: 9, change_count: 0, state: AnaState::Change, nsids: alloc::vec![2] },
        ];
        let page = encode(0x0102, &groups, false);
        assert_eq!(page.len(), 16 + 32 + 8 + 32 + 4);
        assert_eq!(page[..16], [2, 1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(page[16..24], [1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!((page[24], page[32]), (7, 3));
        assert_eq!(page[48..56], [1, 0, 0, 0, 3, 0, 0, 0]);
        assert_eq!((page[56], page[60], page[72], page[88]), (9, 1, 0xf, 2));
        assert_eq!(decode(&page), Some((0x0102, groups.to_vec())));
        let short = encode(1, &groups, true);
        assert_eq!((short.len(), short[20]), (16 + 64, 0));
        for len in 0..page.len() {
            assert_eq!(decode(&page[..len]), None);
        }
        let mut hostile = page.clone();
        hostile[20..24].fill(0xff);
        assert_eq!(decode(&hostile), None);
        for state in AnaState::ALL {
            assert_eq!(AnaState::from_name(state.name()), Some(state));
            assert_eq!(state.refusal().is_none(), state.code() < 3);
        }
    }
}
