//! The state that the streams of an open volume share about the groups that they follow, and the
//! wakers of their threads.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use riopipe_net::Waker;
use riopipe_order::attribute::StreamId;
use riopipe_order::following::{Following, FollowingShell, SharedFollowing};

use crate::lock::lock;
use crate::stream_handle::StreamHandle;

/// The handles of the streams, by which one stream wakes another.
#[derive(Clone, Debug, Default)]
pub(crate) struct StreamHandles(Arc<Mutex<BTreeMap<StreamId, Weak<StreamHandle>>>>);

impl StreamHandles {
    /// Adds a stream that is started. It replaces an earlier one with the same id.
    pub(crate) fn add(&self, stream: StreamId, handle: &Arc<StreamHandle>) {
        lock(&self.0).insert(stream, Arc::downgrade(handle));
    }
}

#[derive(Debug)]
struct FollowingState {
    following: Mutex<Following>,
    handles: StreamHandles,
    background: Waker,
}

impl FollowingShell for FollowingState {
    fn with(&self, act: &mut dyn FnMut(&mut Following)) {
        act(&mut lock(&self.following));
    }

    fn wake(&self, stream: StreamId) {
        let handle = lock(&self.handles.0).get(&stream).and_then(Weak::upgrade);
        if let Some(handle) = handle {
            handle.waker().wake();
            self.background.wake();
        }
    }
}

/// The shared state of a volume without open streams. `background` wakes its background thread.
pub(crate) fn shared_following(
    handles: &StreamHandles,
    background: &Waker,
) -> Arc<SharedFollowing> {
    let state = FollowingState {
        following: Mutex::default(),
        handles: handles.clone(),
        background: background.clone(),
    };
    Arc::new(SharedFollowing::new(Box::new(state)))
}
