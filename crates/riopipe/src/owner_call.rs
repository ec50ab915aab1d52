//! One call of a stream's owner. It takes the stream at its beginning, and releases the stream at its
//! end.

use std::ops::{Deref, DerefMut};

use riopipe_net::{Owned, Taken};

use crate::background::BackgroundThread;
use crate::stream_handle::StreamHandle;
use crate::stream_shell::StreamShell;
use crate::waiters::wake_all;

/// See the [module](self). The end of the call also wakes the waiters whose marks the call has reached.
/// It wakes the background thread in three cases:
///
/// - The background thread drove the stream before the call. It must check again when the owner stops
///   calling.
/// - The background thread has left a request for the stream during the call.
/// - Another stream waits for what this one has not sent.
pub(crate) struct OwnerCall<'a> {
    /// `Some` until the end of the call.
    shell: Option<Taken<'a, StreamShell>>,
    handle: &'a StreamHandle,
    background: &'a BackgroundThread,
    /// Whether the background thread drove the stream before the call.
    was_driven_in_background: bool,
}

impl<'a> OwnerCall<'a> {
    #[inline]
    pub(crate) fn begin(
        shell: &'a Owned<StreamShell>,
        handle: &'a StreamHandle,
        background: &'a BackgroundThread,
    ) -> Self {
        let mut shell = shell.take();
        let was_driven_in_background = shell.driver.owner_calls();
        Self { shell: Some(shell), handle, background, was_driven_in_background }
    }
}

impl Deref for OwnerCall<'_> {
    type Target = StreamShell;

    #[inline]
    fn deref(&self) -> &StreamShell {
        self.shell.as_ref().expect("it is taken only at the end of the call")
    }
}

impl DerefMut for OwnerCall<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut StreamShell {
        self.shell.as_mut().expect("it is taken only at the end of the call")
    }
}

impl Drop for OwnerCall<'_> {
    #[inline]
    fn drop(&mut self) {
        self.handle.published_marks.on_owner_call_end();
        let Some(mut shell) = self.shell.take() else { return };
        let due_wakers = shell.take_due_wakers();
        let is_needed = shell.driver.owner_call_ends();
        let is_requested = shell.end();
        if is_requested || is_needed || self.was_driven_in_background {
            self.background.wake();
        }
        if !due_wakers.is_empty() {
            wake_all(due_wakers);
        }
    }
}
