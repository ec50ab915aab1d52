//! Writing: the begin of a group, its content, and its blocks.
//!
//! For each group: [`plan`](Writer::plan) decides that the group is due, [`pack`](Writer::pack)
//! fills its blocks, the caller submits it, and [`on_submitted`](Writer::on_submitted) reports
//! that.
//!
//! ```text
//! blocks:  … freed │ oldest … settled … written │ free … reserved │ (the ring's end)
//!                  │         durable            └ next_block      └ write_limit
//! ```
//!
//! Each group begins with a new block, so no block with durable records is written again. A block
//! is overwritten only after a group with a trim beyond the block is *released*. Until then the
//! volume may recover to a state that needs the block (trap T11).

use alloc::collections::VecDeque;

use riopipe_order::probe::{Plant, is_bug_planted};

use crate::format::{HEADER_BYTES, Header, PAYLOAD_BYTES};
use crate::opening::End;
use crate::record::{FRAME_BYTES, Frame, Kind};
use crate::ring::{RESERVED_BLOCKS, Ring};
use crate::{BLOCK_BYTES, Crc32c, Lsn};

/// The parameters of writing a log.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The log's number ([`Anchor::log`](crate::format::Anchor::log)).
    pub log: u64,
    /// The log's blocks.
    pub ring: Ring,
    /// A random number of this opening. Blocks that an earlier opening wrote beyond a hole have
    /// another number, so they never count as part of the log.
    pub epoch: u64,
    /// Whether completed writes are durable only after a FLUSH.
    pub volatile: bool,
    /// Number of groups that may be incomplete before records wait to be packed together, at least
    /// 1.
    pub groups: usize,
    /// Number of FLUSHes that may be in flight, at least 1. While that many are in flight, records
    /// that callers wait for are packed together, too.
    pub flushes: usize,
    /// Largest number of blocks of a group, at least 1.
    pub group_blocks: u64,
    /// The CRC32C implementation.
    pub crc: Crc32c,
}

/// The marks of the log's stream. Each is the number of the last group that has the property
/// together with all groups before it.
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
    whole_records_end: Lsn,
    /// Number of the block after its last one.
    next_block: u64,
    /// Whether it was submitted with a FLUSH.
    flush: bool,
}

/// A submitted group that is not yet released.
#[derive(Clone, Copy, Debug)]
struct UnreleasedGroup {
    /// The number of the group.
    seq: u64,
    /// The oldest needed block, by the blocks of the group. Older blocks are free once the group is
    /// released.
    oldest: u64,
}

/// A checkpoint whose last byte is not packed.
#[derive(Clone, Copy, Debug)]
struct OpenCheckpoint {
    lsn: Lsn,
    /// The Lsn after its last byte.
    end: Lsn,
}

/// The begin of a group.
#[derive(Clone, Copy, Debug)]
struct GroupStart {
    /// Number of the group's first block.
    block: u64,
    /// The Lsn of the first byte of that block.
    lsn: Lsn,
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
/// [`on_submitted`](Self::on_submitted). [`on_marks`](Self::on_marks) reports the stream's
/// progress.
#[derive(Debug)]
pub struct Writer {
    config: Config,
    /// Number of the next block.
    next_block: u64,
    /// The Lsn of the first byte of the next block.
    end: Lsn,
    /// The epoch of the block before the next one.
    last_epoch: u64,
    /// The Lsn of the last record that was packed, perhaps in part.
    last_record: Lsn,
    /// The Lsn of the record after that one.
    next_record: Lsn,
    /// The last checkpoint whose last byte is packed.
    checkpoint: Option<Lsn>,
    /// The checkpoint that is packed in part, if there is one.
    open_checkpoint: Option<OpenCheckpoint>,
    /// The Lsn below which records are durable.
    durable: Lsn,
    /// The number below which blocks are durable.
    settled: u64,
    /// The last requested FLUSH covers the records that begin below this Lsn.
    flush_requested: Lsn,
    /// The last requested FLUSH covers the blocks below this number.
    flush_requested_block: u64,
    /// The last FLUSH that is done covers the records that begin below this Lsn.
    flush_done: Lsn,
    /// Whether callers waited for the records of the last FLUSHes. Callers will probably wait for
    /// the next group, too. So the group is submitted together with its FLUSH.
    is_waited_for: bool,
    /// The Lsn below which records are dropped.
    trim: Lsn,
    /// The block that holds the byte `trim`.
    oldest: u64,
    /// The value of `oldest` in the last submitted group.
    oldest_submitted: u64,
    /// The value of `oldest` in the last released group.
    oldest_released: u64,
    /// The numbers of the groups that are not complete.
    incomplete: VecDeque<u64>,
    /// The groups that are not durable.
    undurable: VecDeque<InFlight>,
    /// The groups that are not released.
    unreleased: VecDeque<UnreleasedGroup>,
    /// The number of a group that carries only a trim, until the group is released.
    trim_only_group: Option<u64>,
    /// The begin of each untrimmed group of this opening.
    group_starts: VecDeque<GroupStart>,
}

impl Writer {
    /// A writer that continues at the end of a log. All blocks before the end must be durable. If
    /// the volume's recovery has not made them durable, opening the log has ([`End::unsettled`]).
    #[must_use]
    pub fn new(config: Config, end: &End) -> Self {
        Self {
            config,
            next_block: end.number,
            end: end.lsn,
            last_epoch: end.epoch,
            last_record: end.lsn,
            next_record: end.lsn,
            checkpoint: end.checkpoint,
            open_checkpoint: None,
            durable: end.lsn,
            settled: end.number,
            flush_requested: end.lsn,
            flush_requested_block: end.number,
            flush_done: end.lsn,
            is_waited_for: false,
            trim: end.trim,
            oldest: end.oldest,
            oldest_submitted: end.oldest,
            oldest_released: end.oldest,
            incomplete: VecDeque::new(),
            undurable: VecDeque::new(),
            unreleased: VecDeque::new(),
            trim_only_group: None,
            group_starts: VecDeque::new(),
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

    /// The numbers of the blocks that are needed and durable.
    #[must_use]
    pub fn blocks(&self) -> core::ops::Range<u64> {
        self.oldest..self.settled
    }

    /// The Lsn below which records are dropped.
    #[must_use]
    pub fn trimmed(&self) -> Lsn {
        self.trim
    }

    /// Number of blocks of the ring that records may be packed into now.
    #[must_use]
    pub fn free_blocks(&self) -> u64 {
        (self.write_limit() - self.next_block).saturating_sub(RESERVED_BLOCKS)
    }

    /// Whether space will become free without another call of [`trim`](Self::trim), because a group
    /// with a trim is in flight, or is due.
    #[must_use]
    pub fn awaits_space(&self) -> bool {
        self.oldest > self.oldest_released
    }

    /// The block number below which blocks may be written.
    fn write_limit(&self) -> u64 {
        let oldest =
            if is_bug_planted(Plant::W3FreeEarly) { self.oldest } else { self.oldest_released };
        oldest + self.config.ring.blocks()
    }

    /// Number of blocks that may be written before an older one has to become durable.
    fn window_left(&self) -> u64 {
        self.config.ring.window().saturating_sub(self.next_block - self.settled)
    }

    /// The next group, if one is due now. `queued` bytes of records wait. Callers wait until all
    /// records that begin below `awaited` are durable.
    #[must_use]
    pub fn plan(&self, queued: usize, awaited: Lsn) -> Option<Group> {
        let flushes_in_flight = self.undurable.iter().filter(|group| group.flush).count();
        let may_flush = self.config.volatile && flushes_in_flight < self.config.flushes;
        if queued > 0 {
            let group = self.plan_records(queued, awaited, may_flush);
            let group = group.or_else(|| self.plan_trim(may_flush));
            if group.is_some() {
                return group;
            }
        }
        self.plan_flush(queued, awaited, may_flush)
    }

    /// The next group with records, if one is due now.
    fn plan_records(&self, queued: usize, awaited: Lsn, may_flush: bool) -> Option<Group> {
        let is_awaited = awaited > self.flush_requested || self.is_waited_for;
        let needed = queued.div_ceil(PAYLOAD_BYTES) as u64;
        let blocks =
            needed.min(self.config.group_blocks).min(self.free_blocks()).min(self.window_left());
        if blocks == 0 {
            return None;
        }
        let is_full = blocks == self.config.group_blocks;
        // While no FLUSH may be submitted, another small group would not help the waiting callers.
        let helps_callers = may_flush || !self.config.volatile || !is_awaited;
        let may_begin = self.incomplete.len() < self.config.groups && helps_callers;
        if !is_full && !may_begin {
            return None;
        }
        let bytes = queued.min(blocks as usize * PAYLOAD_BYTES);
        let flush = may_flush && (is_awaited || self.is_flush_due());
        Some(Group { first: self.next_block, blocks, bytes, flush })
    }

    /// A group of one block that carries only a trim, if records need the space that the trim
    /// frees. The reserved blocks are for such groups. The trim frees at least one block.
    fn plan_trim(&self, may_flush: bool) -> Option<Group> {
        let frees_blocks = self.oldest > self.oldest_submitted && self.trim_only_group.is_none();
        let has_block = self.next_block < self.write_limit() && self.window_left() > 0;
        if self.free_blocks() == 0 && frees_blocks && has_block {
            return Some(Group { first: self.next_block, blocks: 1, bytes: 0, flush: may_flush });
        }
        None
    }

    /// A FLUSH without blocks, if one is due now.
    fn plan_flush(&self, queued: usize, awaited: Lsn, may_flush: bool) -> Option<Group> {
        // Records wait for space that is freed only when the group with a submitted trim is
        // released, and only durable groups are released. The log must not depend on a caller that
        // waits for durable records.
        let is_starved =
            queued > 0 && self.free_blocks() == 0 && self.oldest_submitted > self.oldest_released;
        let is_needed = awaited > self.flush_requested || self.is_flush_due() || is_starved;
        let covers_blocks = self.next_block > self.flush_requested_block;
        if may_flush && is_needed && covers_blocks {
            return Some(Group { first: self.next_block, blocks: 0, bytes: 0, flush: true });
        }
        None
    }

    /// Whether so many blocks are not durable that the window would close soon.
    fn is_flush_due(&self) -> bool {
        2 * (self.next_block - self.settled) >= self.config.ring.window()
    }

    /// Fills the blocks of `group`. `queue` is all queued bytes from the first unpacked one on, as
    /// whole records. `parts` are the blocks, in the pieces of [`Ring::extents`].
    ///
    /// # Panics
    /// If the parts do not have the group's blocks, or `queue` has fewer bytes than the group.
    pub fn pack(&mut self, group: &Group, queue: &[u8], parts: [&mut [u8]; 2]) {
        let queue_start = self.end;
        let group_end = self.end.plus(group.bytes);
        let blocks = parts.into_iter().flat_map(|part| part.chunks_exact_mut(BLOCK_BYTES));
        let mut packed_blocks = 0;
        for block in blocks {
            let packed_bytes = (self.end.0 - queue_start.0) as usize;
            let used = (group.bytes - packed_bytes).min(PAYLOAD_BYTES);
            let payload = &mut block[HEADER_BYTES..HEADER_BYTES + used];
            payload.copy_from_slice(&queue[packed_bytes..packed_bytes + used]);
            let first = self.advance_records(self.end.plus(used), queue_start, queue);
            let header = Header {
                log: self.config.log,
                number: self.next_block,
                epoch: self.config.epoch,
                follows: self.last_epoch,
                lsn: self.end,
                used: used as u16,
                first,
                trim: self.trim,
                oldest: self.oldest,
                checkpoint: self.checkpoint,
                settled: self.settled,
            };
            header.seal(block, self.config.crc);
            if packed_blocks == 0 {
                self.group_starts.push_back(GroupStart { block: self.next_block, lsn: self.end });
            }
            packed_blocks += 1;
            self.next_block += 1;
            self.end = self.end.plus(used);
            self.last_epoch = self.config.epoch;
        }
        assert_eq!(
            (packed_blocks, self.end),
            (group.blocks, group_end),
            "a group is packed as planned"
        );
        if group.blocks > 0 {
            self.oldest_submitted = self.oldest;
        }
        if group.flush {
            self.flush_requested = self.whole_records_end();
            self.flush_requested_block = self.next_block;
        }
    }

    /// The Lsn below which records are packed to their last byte.
    fn whole_records_end(&self) -> Lsn {
        if self.next_record > self.end { self.last_record } else { self.end }
    }

    /// Advances over the records that begin in the next block, which ends at `block_end`. Returns
    /// the offset of the first of them in the block's payload. `queue` begins at the Lsn
    /// `queue_start`.
    fn advance_records(&mut self, block_end: Lsn, queue_start: Lsn, queue: &[u8]) -> Option<u16> {
        let first =
            (self.next_record < block_end).then(|| (self.next_record.0 - self.end.0) as u16);
        if let Some(OpenCheckpoint { lsn, end }) = self.open_checkpoint
            && end <= block_end
        {
            self.checkpoint = Some(lsn);
            self.open_checkpoint = None;
        }
        while self.next_record < block_end {
            let lsn = self.next_record;
            let offset = (lsn.0 - queue_start.0) as usize;
            let mut bytes = [0; FRAME_BYTES];
            bytes.copy_from_slice(&queue[offset..offset + FRAME_BYTES]);
            let frame = Frame::decode(&bytes).expect("queued records were framed here");
            let end = lsn.plus(frame.total());
            self.last_record = lsn;
            self.next_record = end;
            if frame.kind == Kind::Checkpoint {
                match end <= block_end || is_bug_planted(Plant::W5CheckpointEarly) {
                    true => self.checkpoint = Some(lsn),
                    false => self.open_checkpoint = Some(OpenCheckpoint { lsn, end }),
                }
            }
        }
        first
    }

    /// Reports that the group packed last is group `seq` of the stream.
    pub fn on_submitted(&mut self, group: &Group, seq: u64) {
        self.incomplete.push_back(seq);
        self.undurable.push_back(InFlight {
            seq,
            whole_records_end: self.whole_records_end(),
            next_block: self.next_block,
            flush: group.flush,
        });
        self.unreleased.push_back(UnreleasedGroup { seq, oldest: self.oldest_submitted });
        if group.bytes == 0 && group.blocks > 0 {
            self.trim_only_group = Some(seq);
        }
        if group.blocks == 0 {
            // The records that this FLUSH covers could have been submitted with it.
            self.is_waited_for = true;
        }
    }

    /// Reports the stream's progress. Callers wait until all records that begin below `awaited` are
    /// durable.
    pub fn on_marks(&mut self, marks: Marks, awaited: Lsn) {
        while self.incomplete.front().is_some_and(|seq| *seq <= marks.complete) {
            self.incomplete.pop_front();
        }
        let confirmed =
            if is_bug_planted(Plant::W1ConfirmComplete) { marks.complete } else { marks.durable };
        while let Some(group) = self.undurable.front()
            && group.seq <= confirmed
        {
            if group.flush {
                // `is_waited_for` stays set only if a caller waited for the records that this FLUSH
                // has made durable.
                self.is_waited_for &= awaited > self.flush_done;
                self.flush_done = group.whole_records_end;
            }
            self.durable = group.whole_records_end;
            self.settled = group.next_block;
            self.undurable.pop_front();
        }
        while let Some(group) = self.unreleased.front()
            && group.seq <= marks.released
        {
            self.oldest_released = group.oldest;
            if self.trim_only_group == Some(group.seq) {
                self.trim_only_group = None;
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
            return Some(self.next_block);
        }
        let groups_before = self.group_starts.partition_point(|start| start.lsn <= lsn);
        let start = self.group_starts.get(groups_before.checked_sub(1)?)?;
        // All blocks of a group but the last are full.
        Some(start.block + (lsn.0 - start.lsn.0) / PAYLOAD_BYTES as u64)
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

    /// Drops the records below `lsn`, which [must be allowed](Self::may_trim). Block `oldest` holds
    /// the byte `lsn`. The next group carries the trim. The space is free once that group is
    /// released.
    pub fn trim(&mut self, lsn: Lsn, oldest: u64) {
        if lsn <= self.trim {
            return;
        }
        self.trim = lsn;
        self.oldest = oldest.max(self.oldest);
        // The last group that begins at or before the first needed byte stays.
        while self.group_starts.get(1).is_some_and(|start| start.lsn <= lsn) {
            self.group_starts.pop_front();
        }
    }
}
