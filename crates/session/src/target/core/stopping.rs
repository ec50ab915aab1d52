//! The clean stop of a core: it accepts nothing new, lets operations in flight finish for a while,
//! and ends its connections. It has stopped when no connection can reach it any more.

use alloc::vec::Vec;

use super::super::env::TargetEnv;
use super::TargetCore;
use super::connection::Transport;

/// The progress of the stop of a core.
#[derive(Debug)]
pub(super) struct Stopping {
    /// Asked to stop: at this time everything that is left is cut off.
    cut_off_at: Option<u64>,
    /// The other cores have been informed.
    has_informed: bool,
    /// By core: it moves no connection to another core any more. Messages from one core to another
    /// keep their order. So no connection that it moved before is still in transit to this core.
    moves_ended: Vec<bool>,
}

impl Stopping {
    pub(super) fn new(cores: usize) -> Self {
        Self { cut_off_at: None, has_informed: false, moves_ended: alloc::vec![false; cores] }
    }

    /// Whether the core has been asked to stop.
    pub(super) const fn is_asked(&self) -> bool {
        self.cut_off_at.is_some()
    }

    /// If the core stops, whether its time is over.
    pub(super) fn cut_off(&self, now: u64) -> Option<bool> {
        self.cut_off_at.map(|at| at <= now)
    }

    /// When its time will be over.
    pub(super) fn deadline(&self, now: u64) -> Option<u64> {
        self.cut_off_at.filter(|at| *at > now)
    }

    /// Notes that a core moves no connection to another core any more.
    pub(super) fn moves_ended(&mut self, core: usize) {
        if let Some(moves_ended) = self.moves_ended.get_mut(core) {
            *moves_ended = true;
        }
    }

    /// Whether the other cores are to be informed now. True once.
    pub(super) fn informs_now(&mut self, index: usize) -> bool {
        let informs = self.is_asked() && !core::mem::replace(&mut self.has_informed, true);
        if informs {
            self.moves_ended(index);
        }
        informs
    }

    /// Whether no core moves a connection any more.
    fn is_everywhere(&self) -> bool {
        self.moves_ended.iter().all(|moves_ended| *moves_ended)
    }
}

impl<E: TargetEnv, T: Transport> TargetCore<E, T> {
    /// Begins a clean stop: commands in flight finish within the grace time, connections end. A
    /// second call changes nothing.
    pub fn stop(&mut self, env: &mut E) {
        if !self.stopping.is_asked() {
            self.stopping.cut_off_at = Some(env.now().saturating_add(self.config.grace_ns));
            self.accept.paused_until = None;
            self.wind_up(env);
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
            && self.stopping.is_everywhere()
            && self.connections.iter().all(Option::is_none)
    }

    /// Ends the connections that have nothing in flight, or all of them if the time is over.
    pub(super) fn wind_up(&mut self, env: &mut E) {
        let cut_off = self.stopping.cut_off(env.now()) == Some(true);
        for at in 0..self.connections.len() as u32 {
            let Some(connection) = self.get(at) else { continue };
            if !connection.is_ending() && (cut_off || connection.is_quiet()) {
                connection.end("the target stops", env);
            }
            if connection.is_ending() {
                self.touch(at);
            }
        }
    }
}
