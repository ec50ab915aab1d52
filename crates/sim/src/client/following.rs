//! The state that the streams of a process share about the groups that they follow.

use std::sync::{Arc, Mutex, PoisonError};

use riopipe_order::attribute::StreamId;
use riopipe_order::following::{Following, FollowingShell};

/// The streams whose threads must be woken.
#[derive(Clone, Debug, Default)]
pub(super) struct WokenStreams(Arc<Mutex<Vec<StreamId>>>);

impl WokenStreams {
    /// Takes the streams.
    pub(super) fn take(&self) -> Vec<StreamId> {
        core::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn add(&self, stream: StreamId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
    }
}

/// The shared state of the streams of an open volume.
#[derive(Debug)]
pub(super) struct FollowingState {
    following: Mutex<Following>,
    woken: WokenStreams,
}

impl FollowingState {
    pub(super) fn new(woken: &WokenStreams) -> Self {
        Self { following: Mutex::default(), woken: woken.clone() }
    }
}

impl FollowingShell for FollowingState {
    fn with(&self, act: &mut dyn FnMut(&mut Following)) {
        act(&mut self.following.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn wake(&self, stream: StreamId) {
        self.woken.add(stream);
    }
}
