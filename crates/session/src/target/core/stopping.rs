//! The clean stop of a core, in these steps:
//!
//! 1. The core accepts no connection any more, and moves none to another core. It informs the
//!    others.
//! 2. Commands in flight may finish within the grace time. Each connection ends when it has none.
//! 3. The grace time is over: all connections end.
//! 4. The core has no connection, and no other core moves connections any more: it has stopped.

use alloc::vec::Vec;

use super::super::env::TargetEnv;
use super::TargetCore;
use super::connection::Transport;

/// The phase of the stop of a core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopPhase {
    /// The core has not been asked to stop.
    Serving,
    /// The core has been asked to stop. Operations in flight may still finish.
    Grace,
    /// The grace time is over: all connections end.
    Over,
}

/// The progress of the stop of a core.
#[derive(Debug)]
pub(super) struct Stopping {
    /// The end of the grace time, ns; `None` if the core has not been asked to stop.
    grace_end_ns: Option<u64>,
    /// The other cores have been informed that this one moves no connection any more.
    has_informed_others: bool,
    /// By core index: whether that core moves no connection to another core any more. Messages from
    /// one core to another keep their order, so no connection from that core is in transit to this
    /// one.
    moves_ended: Vec<bool>,
}

impl Stopping {
    pub(super) fn new(cores: usize) -> Self {
        Self {
            grace_end_ns: None,
            has_informed_others: false,
            moves_ended: alloc::vec![false; cores],
        }
    }

    /// Whether the core has been asked to stop.
    pub(super) const fn is_asked(&self) -> bool {
        self.grace_end_ns.is_some()
    }

    /// The phase at time `now`.
    pub(super) fn phase(&self, now: u64) -> StopPhase {
        match self.grace_end_ns {
            None => StopPhase::Serving,
            Some(grace_end_ns) if grace_end_ns <= now => StopPhase::Over,
            Some(_) => StopPhase::Grace,
        }
    }

    /// The end of the grace time, if it is still to come.
    pub(super) fn deadline(&self, now: u64) -> Option<u64> {
        self.grace_end_ns.filter(|grace_end_ns| *grace_end_ns > now)
    }

    /// Notes that a core moves no connection to another core any more.
    pub(super) fn moves_ended(&mut self, core: usize) {
        if let Some(moves_ended) = self.moves_ended.get_mut(core) {
            *moves_ended = true;
        }
    }

    /// Whether the other cores must be informed now that this one moves no connection any more.
    /// Returns true only once.
    pub(super) fn must_inform_others(&mut self, index: usize) -> bool {
        let must_inform =
            self.is_asked() && !core::mem::replace(&mut self.has_informed_others, true);
        if must_inform {
            self.moves_ended(index);
        }
        must_inform
    }

    /// Whether no core moves a connection any more.
    fn have_all_moves_ended(&self) -> bool {
        self.moves_ended.iter().all(|moves_ended| *moves_ended)
    }
}

impl<E: TargetEnv, T: Transport> TargetCore<E, T> {
    /// Begins a clean stop: commands in flight may finish within the grace time, and then
    /// connections end. A second call changes nothing.
    pub fn stop(&mut self, env: &mut E) {
        if !self.stopping.is_asked() {
            self.stopping.grace_end_ns = Some(env.now().saturating_add(self.config.grace_ns));
            self.accept.paused_until_ns = None;
            self.end_idle_connections(env);
        }
    }

    /// Whether the core has been asked to stop.
    #[must_use]
    pub const fn is_stopping(&self) -> bool {
        self.stopping.is_asked()
    }

    /// Whether the core has stopped: no connection is left, and none can come from another core.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        self.stopping.is_asked()
            && self.stopping.have_all_moves_ended()
            && self.connections.iter().all(Option::is_none)
    }

    /// Ends the connections that have nothing in flight, or all of them if the grace time is over.
    pub(super) fn end_idle_connections(&mut self, env: &mut E) {
        let is_over = self.stopping.phase(env.now()) == StopPhase::Over;
        for at in 0..self.connections.len() as u32 {
            let Some(connection) = self.get(at) else { continue };
            if !connection.is_ending() && (is_over || connection.is_quiet()) {
                connection.end("the target stops", env);
            }
            if connection.is_ending() {
                self.mark_changed(at);
            }
        }
    }
}
