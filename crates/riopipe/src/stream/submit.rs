//! Submitting the staged group of a stream.

use std::time::Duration;

use riopipe_net::now_ns;
use riopipe_order::attribute::Seq;
use riopipe_order::engine::{self, Refusal};
use riopipe_session::initiator::stream_driver::{Until, WaitEnd};

use super::Stream;
use crate::error::{Bound, SubmitError, SubmitErrorKind};
use crate::failure::StreamFailure;
use crate::lock::lock;
use crate::owner_call::OwnerCall;
use crate::shared::Inner;
use crate::time::deadline_after;

impl Stream {
    /// Takes back the buffers that were staged and never submitted.
    #[inline]
    pub(crate) fn unstage(&mut self) {
        let staged = self.staged.get_mut();
        staged.writes.clear();
        while let Some(buf) = staged.bufs.pop() {
            self.pool.put_back(buf);
        }
    }

    /// The checks of a group before it is submitted.
    fn check(&mut self) -> Result<(), SubmitErrorKind> {
        let volume = self.volume.topology.blocks();
        let writes = &self.staged.get_mut().writes;
        for write in writes {
            let (lba, blocks) = (write.lba, write.blocks);
            let within = lba.checked_add(u64::from(blocks)).is_some_and(|end| end <= volume);
            if blocks == 0 || !within {
                return Err(SubmitErrorKind::OutOfRange { lba, blocks, volume });
            }
        }
        if let Some(ownership) = &self.volume.ownership {
            lock(ownership)
                .check(self.id, writes.iter().map(|w| (w.lba, w.blocks, w.op.is_fresh())))?;
        }
        Ok(())
    }

    /// Submits the staged group.
    pub(crate) fn admit(&mut self, tag: u64, durable: bool) -> Result<Seq, SubmitError> {
        self.try_admit(tag, durable).map_err(|kind| self.refused(kind))
    }

    /// Submits the staged group, and waits for space for `timeout` at most.
    pub(crate) fn admit_or_wait(
        &mut self,
        tag: u64,
        durable: bool,
        timeout: Option<Duration>,
    ) -> Result<Seq, SubmitError> {
        let deadline = timeout.map(deadline_after);
        loop {
            let kind = match self.try_admit(tag, durable) {
                Ok(seq) => return Ok(seq),
                // The space may not be enough yet: the deadline holds for all waits together.
                Err(kind @ SubmitErrorKind::Full(_))
                    if deadline.is_none_or(|deadline| now_ns() < deadline) =>
                {
                    match self.wait_for_space(deadline) {
                        Ok(true) => {
                            self.staged.get_mut().restage();
                            continue;
                        }
                        Ok(false) => kind,
                        Err(failure) => SubmitErrorKind::Poisoned(failure),
                    }
                }
                Err(kind) => kind,
            };
            return Err(self.refused(kind));
        }
    }

    /// Waits for space; false if there was none before the deadline.
    fn wait_for_space(&mut self, deadline: Option<u64>) -> Result<bool, StreamFailure> {
        let Self { shell, handle, background, waiter, pool, .. } = self;
        let mut shell = OwnerCall::begin(shell, handle, background);
        let end = loop {
            let worked = shell.work(&mut |_, _| ());
            shell.marks()?;
            if let Some(end) = shell.driver.wait_step_unwoken(Until::Space, deadline, now_ns) {
                break end;
            }
            shell.poll_again_or_sleep(waiter, worked, deadline);
        };
        shell.reclaim(pool);
        Ok(end == WaitEnd::Reached)
    }

    /// Submits the staged group; if it is refused, it stays staged.
    fn try_admit(&mut self, tag: u64, durable: bool) -> Result<Seq, SubmitErrorKind> {
        self.check()?;
        let Self { shell, handle, volume, background, staged, id, .. } = self;
        let mut shell = OwnerCall::begin(shell, handle, background);
        let traced_since = shell.driver.traces_next().then(now_ns);
        let staged = staged.get_mut();
        let seq =
            shell.driver.admit(&mut staged.writes, tag, durable).map_err(
                |refusal| match refusal {
                    Refusal::Full(bound) => SubmitErrorKind::Full(named(bound, volume)),
                    Refusal::TooLarge(bound) => SubmitErrorKind::TooLarge(named(bound, volume)),
                    Refusal::TooManyEntries => SubmitErrorKind::TooManyEntries,
                    Refusal::Empty => SubmitErrorKind::Empty,
                    Refusal::Poisoned(failure) => {
                        SubmitErrorKind::Poisoned(shell.record_failure(failure))
                    }
                },
            )?;
        if let Some(since) = traced_since {
            shell.driver.trace(seq, since, now_ns());
        }
        if let Some(ownership) = &volume.ownership {
            let writes = staged.writes.iter();
            lock(ownership).note(*id, writes.map(|w| (w.lba, w.blocks)), seq);
        }
        // Before anything else, while this thread has the stream: of a write that was split, a
        // piece is left here. The buffer counts that piece together with those in the driver, which
        // only one thread may do at a time.
        staged.writes.clear();
        shell.kept.keep(seq, staged.bufs.drain(..));
        if durable {
            handle.watched.publish_asked(seq);
        }
        if shell.driver.should_send() {
            shell.send();
        }
        Ok(seq)
    }

    /// Returns the staged buffers in the error; the pieces that point into them are dropped first.
    #[cold]
    fn refused(&mut self, kind: SubmitErrorKind) -> SubmitError {
        let staged = self.staged.get_mut();
        staged.writes.clear();
        SubmitError { kind, bufs: std::mem::take(&mut staged.bufs) }
    }
}

/// A bound, with the address of its target.
#[cold]
fn named(bound: engine::Bound, volume: &Inner) -> Bound {
    match bound {
        engine::Bound::Log { server } => {
            Bound::Log { target: volume.server_name(usize::from(server)) }
        }
        engine::Bound::Memory => Bound::Memory,
    }
}
