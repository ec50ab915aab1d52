//! The thread of a stream: it carries out what the device has decided.

use std::sync::Arc;
use std::time::Duration;

use riopipe::{
    BLOCK_BYTES, Place, Stream, StreamFailure, SubmitError, SubmitErrorKind, Until, WaitError,
};
use riopipe_media::AlignedBuf;
use riopipe_session::initiator::plain_device::{Content, Part, Work};

use crate::shared::Shared;

/// The time after which a stream without space is tried again, if its marks do not move before. A log
/// may have space again although no mark has moved.
const SPACE_CHECK: Duration = Duration::from_millis(10);

/// Runs a stream until the device ends. Then closes it, unless the device is dropped.
///
/// # Errors
/// The stream was not closed. If the device has failed, it is dropped without a close.
pub(crate) fn run(shared: &Shared, index: usize, mut stream: Stream) -> Result<(), String> {
    let _fail_on_panic = FailOnPanic(shared);
    let mut worker = Worker { shared, index, is_full: false };
    if let Err(failure) = worker.serve(&mut stream) {
        shared.fail(failure);
        // The others still need this stream's connections closed in the end, and nothing else.
        return Err(shared.failure().unwrap_or_default().to_owned());
    }
    match shared.failure() {
        Some(why) => Err(why.to_owned()),
        None if shared.is_abandoned() => Ok(()),
        None => stream.close().map(drop).map_err(|failure| failure.summary()),
    }
}

/// Fails the device if its thread panics: nothing would end the requests of the stream (promise P8).
struct FailOnPanic<'a>(&'a Shared);

impl Drop for FailOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail("the thread of a stream has panicked; the log has the reason".to_owned());
        }
    }
}

/// The reason for the end of a wait. It has no remedy: that of a caller of the library does not fit a host.
fn why(error: &WaitError) -> String {
    match error {
        WaitError::Failed(failure) => failure.summary(),
        error => error.to_string(),
    }
}

struct Worker<'a> {
    shared: &'a Shared,
    index: usize,
    /// The stream had no space for the last part.
    is_full: bool,
}

impl Worker<'_> {
    /// Works until the device ends.
    fn serve(&mut self, stream: &mut Stream) -> Result<(), String> {
        loop {
            while let Some(work) = self.shared.decide(|device| device.next_work(self.index)) {
                self.carry_out(work, stream)?;
            }
            self.report_marks(stream)?;
            if self.shared.is_ending() {
                return Ok(());
            }
            // A wake-up since the last check for work ends this at once.
            match stream.wait(Until::Moved, self.is_full.then_some(SPACE_CHECK)) {
                Ok(_) | Err(WaitError::Woken | WaitError::Deadline(_)) => {}
                Err(error) => return Err(why(&error)),
            }
            self.report_marks(stream)?;
            if std::mem::take(&mut self.is_full) {
                self.shared.decide(|device| device.on_space(self.index));
            }
        }
    }

    fn carry_out(
        &mut self,
        work: Work<Arc<AlignedBuf>>,
        stream: &mut Stream,
    ) -> Result<(), String> {
        match work {
            // This asks for the flush, and does not wait for it.
            Work::MakeDurable(seq) => {
                match stream.wait(Until::Durable(seq), Some(Duration::ZERO)) {
                    Ok(_) | Err(WaitError::Woken | WaitError::Deadline(_)) => Ok(()),
                    Err(error) => Err(why(&error)),
                }
            }
            Work::Submit(part) => self.submit(part, stream),
        }
    }

    fn submit(&mut self, part: Part<Arc<AlignedBuf>>, stream: &mut Stream) -> Result<(), String> {
        let (lba, blocks) = (part.lba, part.blocks);
        let group = match &part.content {
            Content::Zeroes => stream.group().discard(lba, blocks),
            Content::Data { data, first_block } => {
                let (from, len) =
                    (*first_block as usize * BLOCK_BYTES, blocks as usize * BLOCK_BYTES);
                let mut buf = stream.buf(len).map_err(|error| error.to_string())?;
                buf.copy_from_slice(&data[from..from + len]);
                // A host overwrites what it still needs.
                stream.group().write(lba, buf, Place::InPlace)
            }
        };
        let submitted = match part.is_durable {
            true => group.submit_durable(),
            false => group.submit(),
        };
        match submitted {
            Ok(seq) => self.shared.decide(|device| device.on_submitted(self.index, seq)),
            Err(SubmitError { kind: SubmitErrorKind::Full(_), bufs }) => {
                for buf in bufs {
                    stream.recycle(buf);
                }
                self.is_full = true;
                self.shared.decide(|device| device.on_no_space(self.index, part));
            }
            Err(SubmitError { kind: SubmitErrorKind::Poisoned(failure), .. }) => {
                return Err(failure.summary());
            }
            Err(error) => return Err(error.kind.to_string()),
        }
        Ok(())
    }

    /// Sends what was submitted, and reports the marks to the device.
    fn report_marks(&self, stream: &mut Stream) -> Result<(), String> {
        let marks = stream.poll().map_err(|failure: StreamFailure| failure.summary())?;
        let released = stream.released();
        self.shared.decide(|device| device.on_marks(self.index, marks, released));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use riopipe_media::{Geometry, Operation};
    use riopipe_order::attribute::Seq;
    use riopipe_session::initiator::plain_device::{Layout, PlainDevice};

    use super::*;
    use crate::inbox::{Inbox, Ticket};

    #[test]
    fn p8_a_panic_in_a_stream_thread_ends_its_requests() {
        let mut decisions = PlainDevice::new(Layout::new(1, 1, 1).unwrap(), [Seq(0)]);
        let inbox = Arc::new(Inbox::new().unwrap());
        let (what, lba, blocks) = (Operation::Write, 0, 1);
        let ticket = Ticket { inbox: Arc::clone(&inbox), op: 7, what, lba, blocks };
        decisions.write(ticket, lba, 1, Arc::new(AlignedBuf::zeroed(BLOCK_BYTES)), false);
        decisions.take_to_wake();
        let geometry = Geometry {
            block_size: BLOCK_BYTES as u32,
            blocks: 1,
            volatile_cache: true,
            atomic_block: true,
            describe: "volume".to_owned(),
        };
        let shared = Shared::new(decisions, Vec::new(), geometry);
        let run = || {
            let _fail_on_panic = FailOnPanic(&shared);
            shared.decide(|_| panic!("as if a decision were wrong"));
        };
        assert!(std::thread::scope(|scope| scope.spawn(run).join()).is_err());
        let mut done = Vec::new();
        inbox.take(&mut done);
        assert_eq!(done.len(), 1);
        assert!(done[0].result.as_ref().unwrap_err().to_string().contains("panicked"));
    }
}
