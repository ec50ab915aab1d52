//! The clean stop of a core: it accepts nothing new, lets operations in flight finish for a while,
//! and ends its connections. It has stopped when no connection can reach it any more.

use alloc::vec::Vec;

use super::super::env::TargetEnv;
use super::TargetCore;
use super::connection::Transport;

/// The phase of a core with regard to its stop.
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
    grace_ends: Option<u64>,
    /// The other cores have been informed that this one moves no connection any more.
    has_informed: bool,
    /// By core: that core moves no connection to another core any more. Messages from one core to
    /// another keep their order. So no connection from that core is still in transit to this one.
    moves_ended: Vec<bool>,
}

impl Stopping {
    pub(super) fn new(cores: usize) -> Self {
        Self { grace_ends: None, has_informed: false, moves_ended: alloc::vec![false; cores] }
    }

    /// Whether the core has been asked to stop.
    pub(super) const fn is_asked(&self) -> bool {
        self.grace_ends.is_some()
    }

    /// The phase at time `now`.
    pub(super) fn phase(&self, now: u64) -> StopPhase {
        match self.grace_ends {
            None => StopPhase::Serving,
            Some(at) if at <= now => StopPhase::Over,
            Some(_) => StopPhase::Grace,
        }
    }

    /// The end of the grace time, if it is still to come.
    pub(super) fn deadline(&self, now: u64) -> Option<u64> {
        self.grace_ends.filter(|at| *at > now)
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
        let must_inform = self.is_asked() && !core::mem::replace(&mut self.has_informed, true);
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
    /// Begins a clean stop: commands in flight finish within the grace time, connections end. A
    /// second call changes nothing.
    pub fn stop(&mut self, env: &mut E) {
        if !self.stopping.is_asked() {
            self.stopping.grace_ends = Some(env.now().saturating_add(self.config.grace_ns));
            self.accept.paused_until = None;
            self.end_idle_connections(env);
        }
    }

    /// Whether it has been asked to stop.
    #[must_use]
    pub const fn is_stopping(&self) -> bool {
        self.stopping.is_asked()
    }

    /// Whether it has stopped: no connection is left, and none can come from another core.
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
                self.touch(at);
            }
        }
    }
}
