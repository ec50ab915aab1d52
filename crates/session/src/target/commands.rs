//! The commands of one queue that are in flight, in a table of fixed size.
//!
//! A command has the same index everywhere: in this table, in the id of its device operation
//! ([`OpId`](super::ids::OpId)), as the transfer tag of its R2T, and as its ticket at the gate.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::Range;

use riopipe_nvme::command::{Sqe, Status, opcode};
use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq};
use riopipe_order::entry::Position;
use riopipe_order::gate::{self, Node};

use super::block_locks::LockTicket;
use super::copy::CopyProgress;
use super::flushes::{Doubt, Ticket};
use super::fused::Partner;
use super::lba::Trim;
use super::limits::{ABORTED_TRANSFERS_MAX, BLOCK_SIZE, CONNECTION_BYTES};
use super::modify::{Extent, Modifying};

/// How far a command has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The slot has no command.
    Free,
    /// The command waits until the connection may hold its buffer.
    Budget,
    /// The R2T of the command is sent, and its data arrives.
    Receiving,
    /// The command was aborted while its data arrived, and has been completed. Its slot, and with it
    /// the transfer tag, stays taken until the rest of the data has come: the host may have sent it
    /// before it received the completion.
    Aborted,
    /// The command is an ordered request. It has its data and waits for the gate.
    Gate,
    /// The command is half of a fused operation, and waits for the other half, or for its data. Or
    /// it waits until its connection has no exclusive lock of blocks any more.
    Paired,
    /// The command waits for its blocks, which another command has locked.
    Locked,
    /// A device operation is in flight.
    Device,
    /// A FLUSH that belongs to the command (FUA, ordered flush) is in flight.
    DeviceFlush,
    /// The FLUSH of the command has succeeded. Another FLUSH of the drive was in flight meanwhile
    /// and may have failed, so the success is in doubt (trap T29).
    InDoubt,
    /// The command is an admin command that is being carried out. A claim or a release waits in
    /// this stage for other connections.
    Fence,
}

/// One command.
#[derive(Debug)]
pub(super) struct Command<B> {
    pub(super) sqe: Sqe,
    pub(super) stage: Stage,
    /// Index of the namespace.
    pub(super) ns_index: u16,
    /// The data of the command: an R2T transfer, or a copy of the in-capsule data of a write that
    /// waits for the gate.
    pub(super) buf: Option<B>,
    /// Bytes of `buf` that count against the connection's budget.
    pub(super) charged_bytes: usize,
    /// How many bytes of data have been received by R2T.
    pub(super) received_bytes: u32,
    /// How many bytes of data the command transfers: by R2T, or as the data of a read. Of a command
    /// in pieces, the bytes of the current piece.
    pub(super) data_len: u32,
    /// How many bytes of the command's data are before the current piece.
    pub(super) piece_offset: u32,
    /// The bytes of the command's blocks that are not its own.
    pub(super) trim: Trim,
    /// How far the command has come in changing blocks of the drive in part.
    pub(super) modifying: Modifying,
    /// The status of the completion, if it is decided before the command ends.
    pub(super) early_status: Option<Status>,
    /// The command is an ordered request that the gate refused before its data arrived. The
    /// completion is sent when the data has arrived.
    pub(super) is_refused: bool,
    /// A fence waits for its device operation to come back.
    pub(super) awaited_by_fence: bool,
    /// A fence of blocks waits for its device operation to come back.
    pub(super) awaited_by_drain: bool,
    /// Dataset Management: how many ranges have been begun.
    pub(super) begun_range_count: u16,
    /// Dataset Management: how many blocks of the next range have been begun.
    pub(super) range_offset: u32,
    /// The command has an ordering attribute.
    pub(super) is_ordered: bool,
    /// The drive makes the command's data durable itself (FUA), so no FLUSH follows.
    pub(super) has_fua: bool,
    /// For a plain FLUSH: the drive's count of failed FLUSHes when the oldest write that the FLUSH
    /// covers was submitted. For a plain write: the count when its first piece was submitted. If the
    /// count is higher when the FLUSH succeeds, also that of a write with FUA, writes may be lost
    /// (trap T22).
    pub(super) failure_count_before: Option<u64>,
    /// For a plain FLUSH: like `failure_count_before`, of the writes that no FLUSH before it covers.
    pub(super) own_failure_count: Option<u64>,
    /// The ticket of the command's FLUSH while that FLUSH is at the drive.
    pub(super) flush_ticket: Option<Ticket>,
    /// The doubt of a command in [`Stage::InDoubt`]. In other stages the field has no meaning.
    pub(super) doubt: Option<Doubt>,
    /// The command's lock of its blocks, held or waited for.
    pub(super) lock: Option<HeldLock>,
    /// Copy: how far it has come, once its list of ranges is there.
    pub(super) copy: Option<Box<CopyProgress>>,
    /// The other half of a fused operation.
    pub(super) partner: Option<Partner>,
    /// Where the in-capsule data of an ordered write is in the receive buffer, in bytes. The range
    /// is empty if there is none. It is valid only while one receive buffer is processed.
    pub(super) capsule_range: Range<u32>,
    /// The entry of an ordered request. For other commands the field has no meaning.
    pub(super) entry: Entry,
}

/// The lock of a command that waits for its blocks or uses them.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldLock {
    pub(super) ticket: LockTicket,
    /// Shared lock: the command has used it for one operation.
    pub(super) is_used: bool,
    /// No other command may change the blocks meanwhile. A connection has at most one such lock.
    pub(super) is_exclusive: bool,
}

/// The entry of an ordered command at its stream's gate and in its log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) attribute: Attribute,
    /// The gate's state of the entry.
    node: Node,
    /// The entry's position in the log, once it is appended.
    pub(super) position: Position,
    pub(super) data_state: DataState,
    /// The gate has released the write, but the data of the write has not arrived yet.
    pub(super) write_waits_for_data: bool,
}

/// Where the data of an ordered request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataState {
    /// The data has been requested by R2T and has not arrived completely.
    Awaited,
    /// The data is in the command or in the receive buffer, or the request needs no data.
    Ready,
    /// The data was damaged in transit, or there was no memory for it.
    Bad,
}

impl Entry {
    const BLANK: Self = Self {
        attribute: Attribute {
            seq: Seq::ZERO,
            span: 1,
            num: 1,
            index: 0,
            ordinal: 0,
            member: Member(0),
            kind: Kind::Flush,
            flags: Flags(0),
            lba: 0,
            blocks: 0,
            tag: 0,
        },
        node: Node::FREE,
        position: Position(0),
        data_state: DataState::Ready,
        write_waits_for_data: false,
    };
}

/// How many 64-bit words have one bit for each of the 2¹⁶ command identifiers.
const CID_WORDS: usize = (1 << 16) / 64;

/// The table of commands.
#[derive(Debug)]
pub(super) struct Commands<B> {
    /// The slots. A command's index is the place of its slot.
    slots: Vec<Command<B>>,
    /// The indices of the slots without a command. The last one is used next.
    free_indices: Vec<u16>,
    /// The indices of further slots. One of them takes the place of the slot of a command that was
    /// aborted while its data arrived. So such commands leave the host as many as before.
    spare_indices: Vec<u16>,
    /// The most commands that are in flight at once.
    entries: usize,
    /// One bit for each command identifier in use. A table for no commands has none, so that a
    /// connection before Connect costs little (trap T28).
    used_cids: Option<Box<[u64; CID_WORDS]>>,
}

impl<B> Commands<B> {
    /// A table for `entries` commands.
    pub(super) fn new(entries: u16) -> Self {
        let used_cids = (entries > 0).then(|| {
            let words = alloc::vec![0u64; CID_WORDS].into_boxed_slice().try_into();
            words.unwrap_or_else(|_| unreachable!("the slice has CID_WORDS words"))
        });
        let slots = entries + ABORTED_TRANSFERS_MAX.min(entries);
        Self {
            slots: (0..slots).map(|_| Command::empty()).collect(),
            free_indices: (0..entries).rev().collect(),
            spare_indices: (entries..slots).collect(),
            entries: usize::from(entries),
            used_cids,
        }
    }

    /// Whether a command with this identifier is in flight.
    #[inline]
    pub(super) fn has_cid(&self, cid: u16) -> bool {
        let words = self.used_cids.as_ref();
        words.is_some_and(|words| words[usize::from(cid >> 6)] & 1 << (cid & 63) != 0)
    }

    /// The index that [`insert`](Self::insert) would give to the next command.
    #[inline]
    pub(super) fn next_index(&self) -> Option<u16> {
        self.free_indices.last().copied()
    }

    /// Puts a command into the table and returns its index. Returns `None` if the table is full,
    /// because the host has sent more commands than its queue has entries.
    #[inline]
    pub(super) fn insert(&mut self, sqe: &Sqe, stage: Stage, ns_index: usize) -> Option<u16> {
        let index = self.free_indices.pop()?;
        let command = &mut self.slots[usize::from(index)];
        command.sqe = *sqe;
        command.stage = stage;
        command.ns_index = ns_index as u16;
        let cid = sqe.cid();
        if let Some(words) = &mut self.used_cids {
            words[usize::from(cid >> 6)] |= 1 << (cid & 63);
        }
        Some(index)
    }

    /// Takes a command out of the table and drops its buffer. Returns how many bytes of the
    /// connection's budget become free.
    #[inline]
    pub(super) fn remove(&mut self, index: u16) -> usize {
        let command = &mut self.slots[usize::from(index)];
        let cid = command.sqe.cid();
        if let Some(words) = &mut self.used_cids {
            words[usize::from(cid >> 6)] &= !(1 << (cid & 63));
        }
        command.stage = Stage::Free;
        command.received_bytes = 0;
        command.data_len = 0;
        command.piece_offset = 0;
        command.trim = Trim::default();
        command.modifying = Modifying::No;
        command.early_status = None;
        command.is_refused = false;
        command.awaited_by_fence = false;
        command.awaited_by_drain = false;
        command.begun_range_count = 0;
        command.range_offset = 0;
        command.is_ordered = false;
        command.has_fua = false;
        command.failure_count_before = None;
        command.own_failure_count = None;
        command.lock = None;
        command.partner = None;
        command.copy = None;
        command.capsule_range = 0..0;
        self.free_indices.push(index);
        command.buf = None;
        core::mem::take(&mut command.charged_bytes)
    }

    /// Notes that a command was aborted while its data arrives: drops its buffer, and frees its
    /// identifier. Returns how many bytes of the connection's budget become free. Returns `None`,
    /// without a change, if there are [`ABORTED_TRANSFERS_MAX`] such commands already.
    pub(super) fn abort_transfer(&mut self, index: u16) -> Option<usize> {
        let spare = self.spare_indices.pop()?;
        let command = &mut self.slots[usize::from(index)];
        debug_assert_eq!(command.stage, Stage::Receiving);
        let (received_bytes, data_len) = (command.received_bytes, command.data_len);
        let piece_offset = command.piece_offset;
        let freed_bytes = self.remove(index);
        let command = &mut self.slots[usize::from(index)];
        command.stage = Stage::Aborted;
        (command.received_bytes, command.data_len) = (received_bytes, data_len);
        command.piece_offset = piece_offset;
        // `remove` has put the slot on the list.
        if let Some(last) = self.free_indices.last_mut() {
            *last = spare;
        }
        Some(freed_bytes)
    }

    /// Frees the slot of an aborted command whose data has come completely.
    pub(super) fn end_aborted_transfer(&mut self, index: u16) {
        let command = &mut self.slots[usize::from(index)];
        debug_assert_eq!(command.stage, Stage::Aborted);
        command.stage = Stage::Free;
        (command.received_bytes, command.data_len, command.piece_offset) = (0, 0, 0);
        self.spare_indices.push(index);
    }

    /// The index of the command with this identifier.
    pub(super) fn index_of(&self, cid: u16) -> Option<u16> {
        let is_it = |command: &Command<B>| {
            command.sqe.cid() == cid && !matches!(command.stage, Stage::Free | Stage::Aborted)
        };
        self.slots.iter().position(is_it).map(|index| index as u16)
    }

    /// The command with this index; `None` if the slot is free or does not exist.
    pub(super) fn get_used(&mut self, index: u16) -> Option<&mut Command<B>> {
        self.slots.get_mut(usize::from(index)).filter(|command| command.stage != Stage::Free)
    }

    /// All commands in flight, each with its index.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u16, &mut Command<B>)> {
        self.slots
            .iter_mut()
            .enumerate()
            .filter(|(_, command)| command.stage != Stage::Free)
            .map(|(index, command)| (index as u16, command))
    }

    /// All commands in flight.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Command<B>> {
        self.slots.iter().filter(|command| command.stage != Stage::Free)
    }

    /// Whether the condition holds for any command in flight.
    pub(super) fn any(&self, condition: impl Fn(&Command<B>) -> bool) -> bool {
        self.slots.iter().any(|command| command.stage != Stage::Free && condition(command))
    }

    /// The indices of the commands in flight for which the condition holds.
    pub(super) fn indices_where(&self, condition: impl Fn(&Command<B>) -> bool) -> Vec<u16> {
        let used =
            self.slots.iter().enumerate().filter(|(_, command)| command.stage != Stage::Free);
        used.filter(|(_, command)| condition(command)).map(|(index, _)| index as u16).collect()
    }

    /// Resets the gate's state of every entry, because another gate is about to begin.
    pub(super) fn reset_gate_nodes(&mut self) {
        for command in &mut self.slots {
            command.entry.node = Node::FREE;
        }
    }

    /// The number of commands in flight. Those that were aborted have ended.
    pub(super) fn in_use_count(&self) -> usize {
        self.entries - self.free_indices.len()
    }
}

impl<B> gate::Table for Commands<B> {
    #[inline(always)]
    fn node(&self, ticket: gate::Ticket) -> &Node {
        &self.slots[ticket.0 as usize].entry.node
    }

    #[inline(always)]
    fn node_mut(&mut self, ticket: gate::Ticket) -> &mut Node {
        &mut self.slots[ticket.0 as usize].entry.node
    }
}

impl<B> core::ops::Index<u16> for Commands<B> {
    type Output = Command<B>;
    #[inline]
    fn index(&self, index: u16) -> &Command<B> {
        &self.slots[usize::from(index)]
    }
}

impl<B> core::ops::IndexMut<u16> for Commands<B> {
    #[inline]
    fn index_mut(&mut self, index: u16) -> &mut Command<B> {
        &mut self.slots[usize::from(index)]
    }
}

impl<B: AsRef<[u8]>> Command<B> {
    /// The length of the command's data in memory, bytes.
    pub(super) fn buf_len(&self) -> usize {
        self.buf.as_ref().map_or(0, |buf| buf.as_ref().len())
    }
}

impl<B> Command<B> {
    fn empty() -> Self {
        Self {
            sqe: Sqe::default(),
            stage: Stage::Free,
            ns_index: 0,
            buf: None,
            charged_bytes: 0,
            received_bytes: 0,
            data_len: 0,
            piece_offset: 0,
            trim: Trim::default(),
            modifying: Modifying::No,
            early_status: None,
            is_refused: false,
            awaited_by_fence: false,
            awaited_by_drain: false,
            begun_range_count: 0,
            range_offset: 0,
            is_ordered: false,
            has_fua: false,
            failure_count_before: None,
            own_failure_count: None,
            flush_ticket: None,
            doubt: None,
            lock: None,
            copy: None,
            partner: None,
            capsule_range: 0..0,
            entry: Entry::BLANK,
        }
    }

    /// The most bytes of one piece of the command's data. A Compare holds each piece twice: as the
    /// host has sent it, and as it is on the drive. So does a command that has blocks of the drive in
    /// part, and its pieces end where those blocks do.
    pub(super) const fn piece_max(&self) -> u32 {
        match self.sqe.opcode() {
            _ if self.trim.is_some() => CONNECTION_BYTES as u32 / 2 - BLOCK_SIZE,
            opcode::COMPARE => CONNECTION_BYTES as u32 / 2,
            _ => CONNECTION_BYTES as u32,
        }
    }

    /// The bytes of the piece at `offset` of a read, write, compare or verify.
    #[inline]
    pub(super) fn piece_at(&self, offset: u32) -> u32 {
        let head = if offset == 0 { u32::from(self.trim.head) } else { 0 };
        (self.trim.data_len(&self.sqe) - offset).min(self.piece_max() - head)
    }

    /// The bytes of memory that the current piece needs.
    pub(super) const fn piece_memory(&self) -> usize {
        match self.sqe.opcode() {
            // The piece, and the blocks that it touches. A later piece is longer by the head of the
            // first one at most.
            _ if self.trim.is_some() => 2 * (self.data_len + BLOCK_SIZE) as usize,
            opcode::COMPARE => 2 * self.data_len as usize,
            _ => self.data_len as usize,
        }
    }

    /// The first block of the current piece of a read or write.
    pub(super) fn piece_lba(&self) -> u64 {
        self.sqe.slba() + u64::from((u32::from(self.trim.head) + self.piece_offset) / BLOCK_SIZE)
    }

    /// How many bytes of that block are before the piece.
    pub(super) fn piece_skip(&self) -> u32 {
        (u32::from(self.trim.head) + self.piece_offset) % BLOCK_SIZE
    }

    /// The number of blocks that the current piece touches.
    pub(super) fn piece_blocks(&self) -> u64 {
        (self.piece_skip() + self.data_len).div_ceil(BLOCK_SIZE).into()
    }

    /// The bytes of the drive that the command is about to write.
    pub(super) fn extent(&self) -> Extent {
        match &self.copy {
            Some(copy) => copy.destination(),
            None => Extent { lba: self.piece_lba(), skip: self.piece_skip(), len: self.data_len },
        }
    }

    /// Whether a device operation is in flight that may change some of these blocks. A FLUSH changes
    /// none, also the one that follows a write.
    pub(super) fn may_be_changing(&self, ns_index: usize, blocks: &Range<u64>) -> bool {
        if self.stage != Stage::Device || usize::from(self.ns_index) != ns_index {
            return false;
        }
        match self.sqe.opcode() {
            opcode::READ | opcode::COMPARE | opcode::VERIFY | opcode::FLUSH => false,
            // Its next write passes the guard, and waits for locked blocks.
            opcode::COPY if self.copy.as_ref().is_some_and(|copy| copy.is_reading()) => false,
            opcode::WRITE | opcode::WRITE_ZEROES => {
                let end = self.sqe.slba() + u64::from(self.sqe.nlb());
                self.sqe.slba() < blocks.end && blocks.start < end
            }
            // The blocks of the others are in their data.
            _ => true,
        }
    }

    /// Whether a device operation is in flight.
    pub(super) fn is_on_device(&self) -> bool {
        matches!(self.stage, Stage::Device | Stage::DeviceFlush)
    }
}
