//! Submitting the staged group of a stream.
//!
//! 1. Check the writes: range, and ownership of the blocks ([`Stream::check_staged`]).
//! 2. Admit the group into the driver, whole or not at all ([`Stream::try_submit`]).
//! 3. Keep its buffers until no replay needs them.
//! 4. Send it, if it is durable or if many groups have gathered.
//!
//! If the group is refused, it stays staged until the error takes its buffers.

use std::time::Duration;

use riopipe_net::now_ns;
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{self, Refusal};
use riopipe_session::initiator::stream_driver::{Until, WaitEnd};

use super::Stream;
use crate::error::{Bound, SubmitError, SubmitErrorKind};
use crate::failure::StreamFailure;
use crate::lock::lock;
use crate::open_volume::OpenVolume;
use crate::owner_call::OwnerCall;
use crate::stream_shell::StreamShell;
use crate::time::deadline_after;

impl Stream {
    /// Drops the staged writes of a group that was never submitted. Their buffers go to the pool.
    #[inline]
    pub(crate) fn unstage(&mut self) {
        let staged = self.staged.get_mut();
        staged.writes.clear();
        while let Some(buf) = staged.bufs.pop() {
            self.buf_pool.put_back(buf);
        }
    }

    /// Checks the staged group: each write must lie in the volume. If there is an ownership checker, the
    /// group must also keep the caller's declarations about blocks.
    fn check_staged(&mut self) -> Result<(), SubmitErrorKind> {
        let writes = &self.staged.get_mut().writes;
        for write in writes {
            check_range(&self.volume, write.lba, write.blocks)?;
        }
        if let Some(checker) = &self.volume.ownership_checker {
            let extents = writes.iter().map(|write| (write.lba, write.blocks, write.op.is_fresh()));
            lock(checker).check(self.id, extents)?;
        }
        Ok(())
    }

    /// Checks whether the stream can take a group of one write of `blocks` blocks at volume block
    /// `lba`, once all earlier groups are released: whether the group fits into the targets' logs
    /// and into [`kept_bytes_max`](crate::StreamOptions::kept_bytes_max). With `durable`, the group
    /// is submitted as durable, and each drive may need a FLUSH. Nothing is submitted or waited
    /// for, so a program can check all of its groups before it overwrites anything.
    ///
    /// # Errors
    /// The error of [`Group::submit`](crate::Group::submit) for such a group; never
    /// [`SubmitErrorKind::Full`].
    pub fn check_write(
        &mut self,
        lba: u64,
        blocks: u32,
        durable: bool,
    ) -> Result<(), SubmitErrorKind> {
        check_range(&self.volume, lba, blocks)?;
        let Self { shell, handle, volume, background, .. } = self;
        let mut shell = OwnerCall::begin(shell, handle, background);
        let checked = shell.driver.check_write(lba, blocks, durable);
        checked.map_err(|refusal| submit_error(refusal, &mut shell, volume))
    }

    /// Submits the staged group, which another stream may follow. `durable` requests a FLUSH after
    /// it.
    pub(crate) fn submit_staged(
        &mut self,
        tag: u64,
        follower: Option<StreamId>,
        durable: bool,
    ) -> Result<Seq, SubmitError> {
        self.try_submit(tag, follower, durable).map_err(|kind| self.unstaged_error(kind))
    }

    /// As [`submit_staged`](Self::submit_staged), but waits for space for `timeout` at most.
    pub(crate) fn submit_staged_or_wait(
        &mut self,
        tag: u64,
        follower: Option<StreamId>,
        durable: bool,
        timeout: Option<Duration>,
    ) -> Result<Seq, SubmitError> {
        // One wait may not give enough space for the group. The deadline is for all waits together.
        let deadline = timeout.map(deadline_after);
        loop {
            let kind = match self.try_submit(tag, follower, durable) {
                Ok(seq) => return Ok(seq),
                Err(kind) => kind,
            };
            let is_before_deadline = || deadline.is_none_or(|deadline| now_ns() < deadline);
            let may_wait = matches!(kind, SubmitErrorKind::Full(_)) && is_before_deadline();
            if !may_wait {
                return Err(self.unstaged_error(kind));
            }
            match self.wait_for_space(deadline) {
                Ok(true) => self.staged.get_mut().restage(),
                Ok(false) => return Err(self.unstaged_error(kind)),
                Err(failure) => {
                    return Err(self.unstaged_error(SubmitErrorKind::Poisoned(failure)));
                }
            }
        }
    }

    /// Waits for space. Returns whether there is some: false if there was none before the deadline.
    fn wait_for_space(&mut self, deadline: Option<u64>) -> Result<bool, StreamFailure> {
        let Self { shell, handle, background, spin, buf_pool, .. } = self;
        let mut shell = OwnerCall::begin(shell, handle, background);
        let end = loop {
            let worked = shell.work(&mut |_, _| ());
            shell.publish_marks()?;
            if let Some(end) = shell.driver.wait_step_unwoken(Until::Space, deadline, now_ns) {
                break end;
            }
            shell.poll_again_or_sleep(spin, worked, deadline);
        };
        shell.reclaim_bufs(buf_pool);
        Ok(end == WaitEnd::Reached)
    }

    /// Submits the staged group. If it is refused, it stays staged.
    fn try_submit(
        &mut self,
        tag: u64,
        follower: Option<StreamId>,
        durable: bool,
    ) -> Result<Seq, SubmitErrorKind> {
        self.check_staged()?;
        let Self { shell, handle, volume, background, staged, id, .. } = self;
        let mut shell = OwnerCall::begin(shell, handle, background);
        let trace_begin = shell.driver.traces_next().then(now_ns);
        let staged = staged.get_mut();
        let admitted = match follower {
            None => shell.driver.admit(&mut staged.writes, tag, durable),
            Some(follower) => {
                let writes = &mut staged.writes;
                shell.driver.admit_followed(writes, tag, durable, follower).map(|(seq, _)| seq)
            }
        };
        let seq = admitted.map_err(|refusal| match (refusal, follower) {
            (Refusal::NoFollower, Some(stream)) => SubmitErrorKind::NoFollower { stream },
            (refusal, _) => submit_error(refusal, &mut shell, volume),
        })?;
        if let Some(trace_begin) = trace_begin {
            shell.driver.trace(seq, trace_begin, now_ns());
        }
        if let Some(checker) = &volume.ownership_checker {
            let extents = staged.writes.iter().map(|write| (write.lba, write.blocks));
            lock(checker).note(*id, extents, seq);
        }
        // The driver has taken the pieces of all writes, except that it leaves one piece of a write that
        // it splits. That piece must be dropped while this thread has the stream, because only one
        // thread at a time may count the pieces of a buffer.
        staged.writes.clear();
        shell.kept_bufs.keep(seq, staged.bufs.drain(..));
        if durable {
            handle.published_marks.publish_durable_requested(seq);
        }
        if shell.driver.should_send() {
            shell.send();
        }
        Ok(seq)
    }

    /// The error for a group that was refused, with the staged buffers. The staged writes are dropped
    /// first, because their pieces point into the buffers.
    #[cold]
    fn unstaged_error(&mut self, kind: SubmitErrorKind) -> SubmitError {
        let staged = self.staged.get_mut();
        staged.writes.clear();
        SubmitError { kind, bufs: std::mem::take(&mut staged.bufs) }
    }
}

/// Checks whether a write lies within the volume.
fn check_range(volume: &OpenVolume, lba: u64, blocks: u32) -> Result<(), SubmitErrorKind> {
    let volume = volume.topology.blocks();
    let is_in_volume = lba.checked_add(u64::from(blocks)).is_some_and(|end| end <= volume);
    match blocks > 0 && is_in_volume {
        true => Ok(()),
        false => Err(SubmitErrorKind::OutOfRange { lba, blocks, volume }),
    }
}

/// The error for a refusal of the driver.
#[cold]
fn submit_error(refusal: Refusal, shell: &mut StreamShell, volume: &OpenVolume) -> SubmitErrorKind {
    match refusal {
        Refusal::Full(bound) => SubmitErrorKind::Full(bound_with_address(bound, volume)),
        Refusal::TooLarge(bound) => SubmitErrorKind::TooLarge(bound_with_address(bound, volume)),
        Refusal::TooManyEntries => SubmitErrorKind::TooManyEntries,
        // The caller handles the refusal of a follower.
        Refusal::Empty | Refusal::NoFollower => SubmitErrorKind::Empty,
        Refusal::Poisoned(failure) => SubmitErrorKind::Poisoned(shell.record_failure(failure)),
    }
}

/// A bound of the engine, with the address of its target.
#[cold]
fn bound_with_address(bound: engine::Bound, volume: &OpenVolume) -> Bound {
    match bound {
        engine::Bound::Log { server } => {
            Bound::Log { target: volume.server_name(usize::from(server)) }
        }
        engine::Bound::Memory => Bound::Memory,
        engine::Bound::PrepareArea { member } => Bound::PrepareArea { member: member.0.into() },
        engine::Bound::Followed => Bound::Followed,
    }
}
