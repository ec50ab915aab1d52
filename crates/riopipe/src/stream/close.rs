//! Closing a stream: the driver sends all groups with a FLUSH, waits until they are durable, and has the
//! targets drop the stream's log entries. A close that does not succeed leaves the stream usable.

use std::time::Duration;

use riopipe_net::now_ns;
use riopipe_order::attribute::Seq;

use super::Stream;
use crate::error::WaitError;
use crate::failure::{FailureCause, StreamFailure};
use crate::owner_call::OwnerCall;
use crate::time::deadline_after;

impl Stream {
    /// Sends all groups with a FLUSH and waits until they are durable, has the targets drop their log
    /// entries, and closes the connections. Returns the seq of the last group. There is no time limit:
    /// see [`close_within`](Self::close_within).
    ///
    /// # Errors
    /// The stream has failed; opening it again recovers it.
    pub fn close(mut self) -> Result<Seq, StreamFailure> {
        let last = self.run_close(None)?;
        Ok(last.expect("without a deadline it ends with a result"))
    }

    /// As [`close`](Self::close), for `timeout` at most. If the stream was not closed, the error
    /// contains it, and it can be used as before.
    ///
    /// # Errors
    /// [`StreamNotClosed`]: the time is up, or the stream has failed and may be
    /// [reopened](Self::reopen).
    pub fn close_within(mut self, timeout: Duration) -> Result<Seq, StreamNotClosed> {
        let error = match self.run_close(Some(deadline_after(timeout))) {
            Ok(Some(last)) => return Ok(last),
            Ok(None) => WaitError::Deadline(timeout),
            Err(failure) => WaitError::Failed(failure),
        };
        Err(StreamNotClosed { error, back: Box::new(self) })
    }

    /// Closes the stream, and returns the seq of the last group. Returns `None` if the stream was not
    /// closed at `deadline` (ns).
    fn run_close(&mut self, deadline: Option<u64>) -> Result<Option<Seq>, StreamFailure> {
        let Self { shell, handle, background, spin, .. } = self;
        let mut shell = OwnerCall::begin(shell, handle, background);
        shell.driver.begin_close();
        let closed = loop {
            let worked = shell.work(&mut |_, _| ());
            if let Err(failure) = shell.publish_marks() {
                shell.driver.give_up_close();
                return Err(failure);
            }
            match shell.driver.close_step() {
                Ok(Some(closed)) => break closed,
                Ok(None) if deadline.is_some_and(|deadline| now_ns() >= deadline) => {
                    shell.driver.give_up_close();
                    return Ok(None);
                }
                Ok(None) => shell.poll_again_or_sleep(spin, worked, deadline),
                Err(refused) => {
                    shell.driver.give_up_close();
                    let cause = FailureCause::Forget(refused.status);
                    return Err(shell.failure_at_server(refused.server, cause));
                }
            }
        };
        shell.close_connections();
        drop(shell);
        self.is_closed = true;
        self.volume.on_stream_closed(self.id, closed.released);
        Ok(Some(closed.last))
    }
}

/// A stream that was not closed in time, and the reason. The stream is as before the call.
#[derive(Debug, thiserror::Error)]
#[error("the stream was not closed: {error}")]
pub struct StreamNotClosed {
    /// The reason: [`WaitError::Deadline`] or [`WaitError::Failed`].
    #[source]
    pub error: WaitError,
    /// The stream.
    pub back: Box<Stream>,
}

impl StreamNotClosed {
    /// Whether the stream may be closed later, if only time passes. False: it has failed.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.error.is_retryable()
    }
}
