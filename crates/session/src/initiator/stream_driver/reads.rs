//! The reads of a stream: those of the owner's calls, and those that the owner has submitted and
//! goes on without.
//!
//! A read has a slot from [`begin_read`](StreamDriver::begin_read) on, until
//! [`read_step`](StreamDriver::read_step) has returned how it ended, or until it is given up. The
//! memory of the read is the shell's. It gets the data by the slot.

use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::Seq;
use riopipe_order::engine::Payload;

use super::StreamDriver;
use crate::initiator::stream::{ReadExtent, ReadPartFailure, ReadSlot};

/// The number of reads that an owner may have submitted at a time. An owner that submits more must
/// take ends first, so that the memory of the reads is bounded.
pub const READS_MAX: usize = 1024;

/// Why a read has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadFailure {
    /// A target has answered with an error, or was given up.
    Status {
        /// The place of the first part that failed: bytes from the start of the read.
        offset: usize,
        /// The status that the target sent.
        status: Status,
    },
    /// The answer did not come in time.
    Deadline,
}

/// The read of a slot.
#[derive(Debug, Default)]
struct Read {
    /// The extents of a read that has not been started, because writes of this stream to them are
    /// not complete. Empty once the read has been started.
    unstarted: Vec<ReadExtent>,
    /// The last group that was submitted before the read. The read waits for no later one.
    after: Seq,
    /// Whether the read has begun and not ended.
    in_flight: bool,
    /// When the read is given up, ns.
    deadline: Option<u64>,
}

/// The reads of a stream, by slot.
#[derive(Debug, Default)]
pub(super) struct Reads {
    slots: Vec<Read>,
    /// The number of reads that have not been started.
    unstarted_count: usize,
    /// The number of reads with a deadline.
    deadline_count: usize,
    /// The number of reads that have not ended.
    pub(super) in_flight_count: usize,
    /// The number of reads of the session that had ended at the last check.
    seen_ended: u64,
    /// The number of submitted reads whose end the owner has not taken yet.
    pub(super) untaken_ends: usize,
}

impl Reads {
    /// Adds a read, in the first free slot. There are fewer than 65536 reads: see [`READS_MAX`].
    fn add(&mut self, extents: &[ReadExtent], after: Seq, deadline: Option<u64>) -> ReadSlot {
        let free = self.slots.iter().position(|read| !read.in_flight);
        let index = free.unwrap_or_else(|| {
            self.slots.push(Read::default());
            self.slots.len() - 1
        });
        let read = &mut self.slots[index];
        read.unstarted.extend_from_slice(extents);
        read.after = after;
        read.deadline = deadline;
        read.in_flight = true;
        self.in_flight_count += 1;
        self.unstarted_count += 1;
        self.deadline_count += usize::from(deadline.is_some());
        ReadSlot(index as u16)
    }

    /// Takes the extents of a read that is started now.
    fn start(&mut self, slot: ReadSlot) -> Vec<ReadExtent> {
        self.unstarted_count -= 1;
        core::mem::take(&mut self.slots[usize::from(slot.0)].unstarted)
    }

    /// Frees a slot. Returns false if it had no read.
    fn free(&mut self, slot: ReadSlot) -> bool {
        let read = self.slots.get_mut(usize::from(slot.0)).filter(|read| read.in_flight);
        let Some(read) = read else { return false };
        self.in_flight_count -= 1;
        self.unstarted_count -= usize::from(!read.unstarted.is_empty());
        self.deadline_count -= usize::from(read.deadline.is_some());
        read.unstarted.clear();
        read.deadline = None;
        read.in_flight = false;
        true
    }

    fn get(&self, slot: ReadSlot) -> Option<&Read> {
        self.slots.get(usize::from(slot.0)).filter(|read| read.in_flight)
    }
}

impl<P: Payload + AsRef<[u8]>> StreamDriver<P> {
    /// Begins a read of some extents, none of them empty. The caller has checked that they lie on
    /// the volume. The read is given up at `deadline`. The caller then drives the stream and calls
    /// [`read_step`](Self::read_step). It has fewer than [`READS_MAX`] reads, or one more for a call.
    pub fn begin_read(
        &mut self,
        extents: &[ReadExtent],
        deadline: Option<u64>,
        now: u64,
    ) -> ReadSlot {
        debug_assert!(!extents.is_empty(), "a read has blocks");
        self.session.begin_read(now);
        self.reads.add(extents, self.last(), deadline)
    }

    /// Counts a read that the owner goes on without. It leaves like a group that is not durable; see
    /// [`should_send`](Self::should_send).
    pub fn count_submitted_read(&mut self) {
        self.count_admitted(false);
        self.has_unsent = true;
    }

    /// Sets the number of submitted reads whose end the owner has not taken yet; see
    /// [`Until::ReadEnded`](super::Until::ReadEnded).
    pub fn set_untaken_ends(&mut self, count: usize) {
        self.reads.untaken_ends = count;
    }

    /// Gives up the read of a slot, if there is one. Data that still arrives for it is dropped.
    pub fn give_up_read(&mut self, slot: ReadSlot) {
        if self.reads.free(slot) {
            self.session.give_up_read(slot);
        }
    }

    /// Whether a read command has no answer yet, also one of a read that was given up. A stream
    /// that only reads must be driven until then, because no stream can replay before the answer
    /// (promise P9).
    #[must_use]
    pub fn has_unanswered_reads(&self) -> bool {
        self.session.has_unanswered_reads()
    }

    /// Whether a read must wait for writes of this stream. It does not wait for groups that were
    /// submitted after it, so that an owner that writes a block again and again can read it.
    fn read_must_wait(&self, read: &Read) -> bool {
        let must_wait =
            |extent: &ReadExtent| self.session.read_must_wait(extent.lba, extent.blocks);
        self.session.marks().complete < read.after && read.unstarted.iter().any(must_wait)
    }

    /// The first time at which a read is given up, ns; `None`: no read has a deadline.
    pub(super) fn read_deadline(&self) -> Option<u64> {
        if self.reads.deadline_count == 0 {
            return None;
        }
        self.reads.slots.iter().filter_map(|read| read.deadline).min()
    }

    /// Whether a read may have ended since the last call of this function, or its deadline has
    /// passed. [`read_step`](Self::read_step) returns which one.
    #[inline]
    pub fn may_have_ended_reads(&mut self, now: u64) -> bool {
        let ended = self.session.ended_reads();
        let has_ended = core::mem::replace(&mut self.reads.seen_ended, ended) != ended;
        has_ended || self.read_deadline().is_some_and(|deadline| now >= deadline)
    }

    /// Whether a read has not been started that can be.
    pub(super) fn can_start_read(&self) -> bool {
        let can_start = |read: &Read| !read.unstarted.is_empty() && !self.read_must_wait(read);
        self.reads.unstarted_count > 0 && self.reads.slots.iter().any(can_start)
    }

    /// Starts the reads for which no write of this stream must be awaited any more (promise P9).
    pub(super) fn start_reads(&mut self) {
        if self.reads.unstarted_count == 0 {
            return;
        }
        for index in 0..self.reads.slots.len() as u16 {
            self.start_read(ReadSlot(index));
        }
    }

    /// Starts the read of a slot if it was not started, and if all writes of this stream to its
    /// blocks are complete (promise P9).
    fn start_read(&mut self, slot: ReadSlot) {
        let Some(read) = self.reads.get(slot) else { return };
        if !read.unstarted.is_empty() && !self.read_must_wait(read) {
            let extents = self.reads.start(slot);
            self.session.start_read(slot, &extents);
            self.has_unsent = true;
        }
    }

    /// Continues a read. The caller calls this once after [`begin_read`](Self::begin_read) and
    /// after each round. Returns how the read ended, if it has. The slot is free then.
    pub fn read_step(&mut self, slot: ReadSlot, now: u64) -> Option<Result<(), ReadFailure>> {
        self.start_read(slot);
        let read = self.reads.get(slot)?;
        if read.unstarted.is_empty() && !self.session.is_reading(slot) {
            self.reads.free(slot);
            let read_failure = |part: ReadPartFailure| ReadFailure::Status {
                offset: part.offset,
                status: part.status,
            };
            return Some(self.session.read_result(slot).map_err(read_failure));
        }
        if read.deadline.is_some_and(|deadline| now >= deadline) {
            self.give_up_read(slot);
            return Some(Err(ReadFailure::Deadline));
        }
        None
    }

    /// Whether a read can continue only after an answer arrives.
    #[must_use]
    pub fn read_waits(&self, slot: ReadSlot) -> bool {
        match self.reads.get(slot) {
            Some(read) if read.unstarted.is_empty() => self.session.is_reading(slot),
            Some(read) => self.read_must_wait(read),
            None => false,
        }
    }
}
