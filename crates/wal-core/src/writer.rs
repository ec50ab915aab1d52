//! Writing: the begin of a group, its content, and its blocks.
//!
//! Each group begins with a new block. So no block is overwritten while a state to which the volume may
//! recover needs it. A block is overwritten only after the group with the trim beyond it is
//! *released* (T11).

use alloc::collections::VecDeque;

use riopipe_order::probe::{Plant, planted};

use crate::format::{HEADER_BYTES, Header, PAYLOAD_BYTES};
use crate::opening::End;
use crate::record::{FRAME_BYTES, Frame, Kind};
use crate::ring::{RESERVE, Ring};
use crate::{BLOCK_BYTES, Crc32c, Lsn};

/// The parameters of writing a log.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The log's number ([`Anchor::log`](crate::format::Anchor::log)).
    pub log: u64,
    /// The log's blocks.
    pub ring: Ring,
    /// A random number of this opening. Blocks that an earlier opening wrote beyond a hole have
    /// another one, so they never count as part of the log.
    pub epoch: u64,
    /// Whether completed writes are durable only after a FLUSH.
    pub volatile: bool,
    /// Number of groups that may be incomplete before records wait to be packed together, at least
    /// 1.
    pub groups: usize,
    /// Number of FLUSHes that may be in flight, at least 1. With that many in flight, records that
    /// are waited for are packed together, too.
    pub flushes: usize,
    /// Largest number of blocks of a group, at least 1.
    pub group_blocks: u64,
    /// The CRC32C implementation.
    pub crc: Crc32c,
}

/// The marks of the log's stream: the number of the last group for which each holds, as for all
/// groups before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// The group is complete.
    pub complete: u64,
    /// The group is durable.
    pub durable: u64,
    /// The group is released: it will not be undone or replayed.
    pub released: u64,
}

/// A group to be packed and submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Number of its first block.
    pub first: u64,
    /// Number of its blocks. 0: it only asks for a FLUSH.
    pub blocks: u64,
    /// Bytes of queued records in it.
    pub bytes: usize,
    /// Whether it is submitted with a FLUSH.
    pub flush: bool,
}

/// A submitted group that is not yet durable.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    /// The number of the group.
    seq: u64,
    /// Records that begin below this Lsn end in this group or an earlier one.
    whole: Lsn,
    /// Number of the block after its last one.
    head: u64,
    /// Whether it was submitted with a FLUSH.
    flush: bool,
}

/// The reason why records may not be dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrimError {
    /// The records are not durable.
    #[error("records up to {asked} are not durable; up to {durable} they are")]
    NotDurable {
        /// The Lsn below which they should be dropped.
        asked: Lsn,
        /// The Lsn below which records are durable.
        durable: Lsn,
    },
}

/// The writer of a log. It decides; the caller moves the bytes and submits the groups.
///
/// For each group: [`plan`](Self::plan), [`pack`](Self::pack), submit, then
/// [`submitted`](Self::submitted). [`marks`](Self::marks) reports the stream's progress.
#[derive(Debug)]
pub struct Writer {
    config: Config,
    /// The number of the next block, and the Lsn of its first byte.
    head: u64,
    end: Lsn,
    /// The epoch of the block before `head`.
    follows: u64,
    /// Begin and end of the last record that was packed, perhaps in part.
    last_record: Lsn,
    next_record: Lsn,
    /// The last checkpoint whose last byte is packed.
    checkpoint: Option<Lsn>,
    /// Begin and end of a checkpoint whose last byte is not packed.
    open_checkpoint: Option<(Lsn, Lsn)>,
    /// The Lsn below which records are durable, and the number below which blocks are.
    durable: Lsn,
    settled: u64,
    /// A requested FLUSH covers the records that begin below this Lsn, and the blocks below this
    /// number.
    flushed: Lsn,
    flushed_blocks: u64,
    /// The last FLUSH that is done covers the records that begin below this Lsn.
    flush_done: Lsn,
    /// Whether callers waited for the records of the last FLUSHes. A group is then submitted with
    /// its FLUSH, instead of one after it.
    is_waited_for: bool,
    /// The Lsn below which records are dropped.
    trim: Lsn,
    /// The block that holds `trim`.
    oldest: u64,
    /// The value of `oldest` in the last submitted group.
    oldest_submitted: u64,
    /// The value of `oldest` in the last released group.
    oldest_released: u64,
    /// Groups that are not complete.
    incomplete: VecDeque<u64>,
    /// Groups that are not durable.
    undurable: VecDeque<InFlight>,
    /// Groups that are not released, each with its value of `oldest`.
    unreleased: VecDeque<(u64, u64)>,
    /// The last group without records, which carries only a trim.
    trim_alone: Option<u64>,
    /// The first block of each untrimmed group of this opening, with its Lsn.
    starts: VecDeque<(u64, Lsn)>,
}

impl Writer {
    /// A writer that continues at the end of a log. All blocks before it are durable: if the
    /// volume's recovery has not made them so, opening the log has ([`End::unsettled`]).
    #[must_use]
    pub fn new(config: Config, end: &End) -> Self {
        Self {
            config,
            head: end.number,
            end: end.lsn,
            follows: end.epoch,
            last_record: end.lsn,
            next_record: end.lsn,
            checkpoint: end.checkpoint,
            open_checkpoint: None,
            durable: end.lsn,
            settled: end.number,
            flushed: end.lsn,
            flushed_blocks: end.number,
            flush_done: end.lsn,
            is_waited_for: false,
            trim: end.trim,
            oldest: end.oldest,
            oldest_submitted: end.oldest,
            oldest_released: end.oldest,
            incomplete: VecDeque::new(),
            undurable: VecDeque::new(),
            unreleased: VecDeque::new(),
            trim_alone: None,
            starts: VecDeque::new(),
        }
    }

    /// The Lsn of the byte after the last packed one.
    #[must_use]
    pub fn end(&self) -> Lsn {
        self.end
    }

    /// The Lsn below which records are durable.
    #[must_use]
    pub fn durable(&self) -> Lsn {
        self.durable
    }

    /// The number of the oldest block that is needed, and of the one after the last durable block.
    #[must_use]
    pub fn blocks(&self) -> core::ops::Range<u64> {
        self.oldest..self.settled
    }

    /// The Lsn below which records are dropped.
    #[must_use]
    pub fn trimmed(&self) -> Lsn {
        self.trim
    }

    /// Number of blocks that records may be packed into now, as far as the ring allows.
    #[must_use]
    pub fn free(&self) -> u64 {
        (self.write_limit() - self.head).saturating_sub(RESERVE)
    }

    /// Whether space will become free without another trim: a group with one is in flight, or is
    /// due.
    #[must_use]
    pub fn awaits_space(&self) -> bool {
        self.oldest > self.oldest_released
    }

    /// The block number below which blocks may be written.
    fn write_limit(&self) -> u64 {
        let early = planted(Plant::W3FreeEarly);
        (if early { self.oldest } else { self.oldest_released }) + self.config.ring.blocks()
    }

    /// Number of blocks that may be written before an older one has to become durable.
    fn window_left(&self) -> u64 {
        self.config.ring.window().saturating_sub(self.head - self.settled)
    }

    /// The next group, if one is due now. `queued` bytes of records wait. Callers wait until all
    /// records that begin below `awaited` are durable.
    #[must_use]
    pub fn plan(&self, queued: usize, awaited: Lsn) -> Option<Group> {
        let flushes = self.undurable.iter().filter(|group| group.flush).count();
        let may_flush = self.config.volatile && flushes < self.config.flushes;
        let is_awaited = awaited > self.flushed || self.is_waited_for;
        // The window would close soon: too many blocks are not durable.
        let is_due = 2 * (self.head - self.settled) >= self.config.ring.window();
        let due_group = |blocks: u64, bytes: usize, flush: bool| {
            Some(Group { first: self.head, blocks, bytes, flush })
        };
        if queued > 0 {
            let needed = queued.div_ceil(PAYLOAD_BYTES) as u64;
            let blocks =
                needed.min(self.config.group_blocks).min(self.free()).min(self.window_left());
            let is_full = blocks == self.config.group_blocks;
            // While no FLUSH may be submitted, another small group would not help the waiting
            // callers.
            let may_begin = self.incomplete.len() < self.config.groups
                && (may_flush || !self.config.volatile || !is_awaited);
            if blocks > 0 && (is_full || may_begin) {
                let bytes = queued.min(blocks as usize * PAYLOAD_BYTES);
                return due_group(blocks, bytes, may_flush && (is_awaited || is_due));
            }
            // The reserved blocks are for a group without records that carries a trim: the trim frees
            // at least one block.
            let frees_blocks = self.oldest > self.oldest_submitted && self.trim_alone.is_none();
            if self.free() == 0
                && frees_blocks
                && self.head < self.write_limit()
                && self.window_left() > 0
            {
                return due_group(1, 0, may_flush);
            }
        }
        // Records wait for space that only the release of a submitted trim frees, and only durable
        // groups are released. The log must not depend on a caller that waits for durable records.
        let is_starved =
            queued > 0 && self.free() == 0 && self.oldest_submitted > self.oldest_released;
        let needs_flush_alone = may_flush && (awaited > self.flushed || is_due || is_starved);
        if needs_flush_alone && self.head > self.flushed_blocks {
            due_group(0, 0, true)
        } else {
            None
        }
    }

    /// Fills the blocks of `group`. `queue` is all queued bytes from the first unpacked one on, as
    /// whole records; `parts` are the blocks, in the pieces of [`Ring::extents`].
    ///
    /// # Panics
    /// If the parts do not have the group's blocks, or `queue` has fewer bytes than the group.
    pub fn pack(&mut self, group: &Group, queue: &[u8], parts: [&mut [u8]; 2]) {
        let (base, until) = (self.end, self.end.plus(group.bytes));
        let blocks = parts.into_iter().flat_map(|part| part.chunks_exact_mut(BLOCK_BYTES));
        let mut packed = 0;
        for block in blocks {
            let taken = (self.end.0 - base.0) as usize;
            let used = (group.bytes - taken).min(PAYLOAD_BYTES);
            let payload = &mut block[HEADER_BYTES..HEADER_BYTES + used];
            payload.copy_from_slice(&queue[taken..taken + used]);
            let first = self.walk(self.end.plus(used), base, queue);
            let header = Header {
                log: self.config.log,
                number: self.head,
                epoch: self.config.epoch,
                follows: self.follows,
                lsn: self.end,
                used: used as u16,
                first,
                trim: self.trim,
                oldest: self.oldest,
                checkpoint: self.checkpoint,
                settled: self.settled,
            };
            header.seal(block, self.config.crc);
            if packed == 0 {
                self.starts.push_back((self.head, self.end));
            }
            packed += 1;
            self.head += 1;
            self.end = self.end.plus(used);
            self.follows = self.config.epoch;
        }
        assert_eq!((packed, self.end), (group.blocks, until), "a group is packed as planned");
        if group.blocks > 0 {
            self.oldest_submitted = self.oldest;
        }
        if group.flush {
            self.flushed = self.whole();
            self.flushed_blocks = self.head;
        }
    }

    /// The Lsn below which records are packed to their last byte.
    fn whole(&self) -> Lsn {
        if self.next_record > self.end { self.last_record } else { self.end }
    }

    /// Advances over the records that begin before `to`; returns the offset of the first of them in
    /// the block that ends there.
    fn walk(&mut self, to: Lsn, base: Lsn, queue: &[u8]) -> Option<u16> {
        let first = (self.next_record < to).then(|| (self.next_record.0 - self.end.0) as u16);
        if let Some((lsn, end)) = self.open_checkpoint
            && end <= to
        {
            self.checkpoint = Some(lsn);
            self.open_checkpoint = None;
        }
        while self.next_record < to {
            let lsn = self.next_record;
            let at = (lsn.0 - base.0) as usize;
            let mut bytes = [0; FRAME_BYTES];
            bytes.copy_from_slice(&queue[at..at + FRAME_BYTES]);
            let frame = Frame::decode(&bytes).expect("queued records were framed here");
            self.last_record = lsn;
            self.next_record = lsn.plus(frame.total());
            if frame.kind == Kind::Checkpoint {
                match self.next_record <= to || planted(Plant::W5CheckpointEarly) {
                    true => self.checkpoint = Some(lsn),
                    false => self.open_checkpoint = Some((lsn, self.next_record)),
                }
            }
        }
        first
    }

    /// Reports that the group packed last is group `seq` of the stream.
    pub fn submitted(&mut self, group: &Group, seq: u64) {
        let (whole, head) = (self.whole(), self.head);
        self.incomplete.push_back(seq);
        self.undurable.push_back(InFlight { seq, whole, head, flush: group.flush });
        self.unreleased.push_back((seq, self.oldest_submitted));
        if group.bytes == 0 && group.blocks > 0 {
            self.trim_alone = Some(seq);
        }
        if group.blocks == 0 {
            // The covered records could have been submitted with it.
            self.is_waited_for = true;
        }
    }

    /// Reports the stream's progress. A caller waits until all records that begin below `wanted`
    /// are durable.
    pub fn marks(&mut self, marks: Marks, awaited: Lsn) {
        while self.incomplete.front().is_some_and(|seq| *seq <= marks.complete) {
            self.incomplete.pop_front();
        }
        let confirmed =
            if planted(Plant::W1ConfirmComplete) { marks.complete } else { marks.durable };
        while let Some(group) = self.undurable.front().filter(|g| g.seq <= confirmed) {
            if group.flush {
                // It stays set only if a caller waited for the records that this FLUSH made
                // durable.
                self.is_waited_for &= awaited > self.flush_done;
                self.flush_done = group.whole;
            }
            self.durable = group.whole;
            self.settled = group.head;
            self.undurable.pop_front();
        }
        while let Some((seq, oldest)) = self.unreleased.front().filter(|g| g.0 <= marks.released) {
            self.oldest_released = *oldest;
            if self.trim_alone == Some(*seq) {
                self.trim_alone = None;
            }
            self.unreleased.pop_front();
        }
    }

    /// The block that holds the byte `lsn`, if this opening wrote it, or if it is not written yet.
    /// `None`: an earlier opening wrote it ([`locate`](crate::reading::locate) finds it), or it is
    /// dropped.
    #[must_use]
    pub fn block_of(&self, lsn: Lsn) -> Option<u64> {
        if lsn >= self.end {
            return Some(self.head);
        }
        let after = self.starts.partition_point(|(_, start)| *start <= lsn);
        let (number, start) = self.starts.get(after.checked_sub(1)?)?;
        // All blocks of a group but the last are full.
        Some(number + (lsn.0 - start.0) / PAYLOAD_BYTES as u64)
    }

    /// Checks that records below `lsn` may be dropped.
    ///
    /// # Errors
    /// [`TrimError`].
    pub fn may_trim(&self, lsn: Lsn) -> Result<(), TrimError> {
        if lsn <= self.durable {
            return Ok(());
        }
        Err(TrimError::NotDurable { asked: lsn, durable: self.durable })
    }

    /// Drops the records below `lsn`, which [must be allowed](Self::may_trim); block `oldest` holds
    /// the byte `lsn`. The next group carries the trim, and its release brings it into force.
    pub fn trim(&mut self, lsn: Lsn, oldest: u64) {
        if lsn <= self.trim {
            return;
        }
        self.trim = lsn;
        self.oldest = oldest.max(self.oldest);
        // The last group that begins at or before the first needed byte stays.
        while self.starts.get(1).is_some_and(|(_, start)| *start <= lsn) {
            self.starts.pop_front();
        }
    }
}
