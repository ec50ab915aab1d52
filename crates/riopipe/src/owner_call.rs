//! One call of a stream's owner: it has the stream until it ends.

use std::ops::{Deref, DerefMut};

use riopipe_net::{Owned, Taken};

use crate::background::Background;
use crate::stream_handle::StreamHandle;
use crate::stream_shell::StreamShell;
use crate::waiters::wake_all;

/// See the [module](self). At its end it wakes the background thread if that must know that no call
/// has the stream any more: it has driven the stream before, or has requested it meanwhile. It also
/// wakes the waiters whose marks this call has reached.
pub(crate) struct OwnerCall<'a> {
    /// `Some` until the end of the call.
    shell: Option<Taken<'a, StreamShell>>,
    handle: &'a StreamHandle,
    background: &'a Background,
    wakes: bool,
}

impl<'a> OwnerCall<'a> {
    #[inline]
    pub(crate) fn begin(
        shell: &'a Owned<StreamShell>,
        handle: &'a StreamHandle,
        background: &'a Background,
    ) -> Self {
        let mut shell = shell.take();
        let wakes = shell.driver.owner_calls();
        Self { shell: Some(shell), handle, background, wakes }
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
        self.handle.watched.owner_called();
        let Some(mut shell) = self.shell.take() else { return };
        let due = shell.take_due_wakers();
        let asked = shell.end();
        if asked || self.wakes {
            self.background.wake();
        }
        if !due.is_empty() {
            wake_all(due);
        }
    }
}
