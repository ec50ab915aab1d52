//! The commands of one queue that are in flight: one table of fixed size, found by index.
//!
//! The index is the operation's at the drives ([`OpId`](super::ids::OpId)), the tag of an R2T, and
//! the gate's ticket.

use alloc::boxed::Box;
use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq};
use riopipe_order::entry::Position;
use riopipe_order::gate::{self, Node};

use super::flushes::{Doubt, Ticket};

/// The progress of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// No command.
    Free,
    /// Waiting for a share of the connection's memory, for its buffer.
    Budget,
    /// Its R2T is sent; data arrives.
    Receiving,
    /// An ordered entry that has its data, waiting for the gate.
    Gate,
    /// A device operation is in flight.
    Device,
    /// A FLUSH that belongs to the command (FUA, ordered flush) is in flight.
    DeviceFlush,
    /// Its FLUSH has succeeded, but others that were in flight meanwhile may have failed (T29).
    InDoubt,
    /// An admin command that is being carried out, such as a claim or a release that waits for
    /// other connections.
    Fence,
}

/// One command.
#[derive(Debug)]
pub(super) struct Command<B> {
    pub(super) sqe: Sqe,
    pub(super) stage: Stage,
    /// Index of the namespace.
    pub(super) ns_index: u16,
    /// The command's data: an R2T transfer, or a copy of the data that the gate holds.
    pub(super) buf: Option<B>,
    /// Bytes of `buf` that count against the connection's budget.
    pub(super) charged_bytes: usize,
    /// How many bytes of data have been received by R2T.
    pub(super) received_bytes: u32,
    /// How many bytes of data the command has: those to receive by R2T, or to read.
    pub(super) data_len: u32,
    /// The status of the answer, if it is decided before the command ends.
    pub(super) early_status: Option<Status>,
    /// An ordered request that the gate refused before its data arrived. It is answered when the
    /// data has come.
    pub(super) is_refused: bool,
    /// A fence waits for its device operation to come back.
    pub(super) awaited_by_fence: bool,
    /// Dataset Management: how many ranges have been begun.
    pub(super) begun_range_count: u16,
    /// Carries an ordering attribute.
    pub(super) is_ordered: bool,
    /// For a plain FLUSH: the drive's count of failed FLUSHes when the oldest write that the FLUSH
    /// covers was submitted. If the count is higher when the FLUSH succeeds, writes may be lost (T22).
    pub(super) failure_count_before: Option<u64>,
    /// The ticket of its FLUSH, from submission until it has come back.
    pub(super) flush_ticket: Option<Ticket>,
    /// For a FLUSH in doubt: the doubt, with the rounds after which it is resolved. Otherwise without
    /// meaning.
    pub(super) doubt: Option<Doubt>,
    /// The in-capsule data of an ordered write: the first byte in the receive buffer, and the one
    /// after the last; (0, 0) for none. Valid only within one `receive`.
    pub(super) inline: (u32, u32),
    /// For an ordered request: its entry. Otherwise without meaning.
    pub(super) entry: Entry,
}

/// The entry of an ordered command at its stream's gate and in its log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) attribute: Attribute,
    /// The gate's state of the entry.
    node: Node,
    /// Its position in the log, once it is appended.
    pub(super) position: Position,
    pub(super) data_state: DataState,
    /// The gate has allowed its write, but its data has not arrived yet.
    pub(super) write_waits_for_data: bool,
}

/// Where the data of an ordered request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataState {
    /// Asked for by R2T.
    Awaited,
    /// In the command or the receive buffer, or none needed.
    Ready,
    /// Damaged in transit.
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

/// The table of commands.
#[derive(Debug)]
pub(super) struct Commands<B> {
    list: Vec<Command<B>>,
    free: Vec<u16>,
    /// One bit for each command identifier in use.
    cids: Box<[u64; 1024]>,
}

impl<B> Commands<B> {
    /// A table for `entries` commands.
    pub(super) fn new(entries: u16) -> Self {
        let cids = alloc::vec![0u64; 1024].into_boxed_slice().try_into();
        Self {
            list: (0..entries).map(|_| Command::empty()).collect(),
            free: (0..entries).rev().collect(),
            cids: cids.unwrap_or_else(|_| unreachable!("the slice has 1024 words")),
        }
    }

    /// Whether a command with this identifier is in flight.
    #[inline]
    pub(super) fn has_cid(&self, cid: u16) -> bool {
        self.cids[usize::from(cid >> 6)] & 1 << (cid & 63) != 0
    }

    /// The index that [`Commands::take`] would give.
    #[inline]
    pub(super) fn next_index(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// Puts a command into the table; `None` if the host overran its queue.
    #[inline]
    pub(super) fn insert(&mut self, sqe: &Sqe, stage: Stage, ns_index: usize) -> Option<u16> {
        let index = self.free.pop()?;
        let command = &mut self.list[usize::from(index)];
        command.sqe = *sqe;
        command.stage = stage;
        command.ns_index = ns_index as u16;
        let cid = sqe.cid();
        self.cids[usize::from(cid >> 6)] |= 1 << (cid & 63);
        Some(index)
    }

    /// Forgets a command. Returns its buffer, and the bytes to free in the budget.
    #[inline]
    pub(super) fn remove(&mut self, index: u16) -> (Option<B>, usize) {
        let command = &mut self.list[usize::from(index)];
        let cid = command.sqe.cid();
        self.cids[usize::from(cid >> 6)] &= !(1 << (cid & 63));
        command.stage = Stage::Free;
        command.received_bytes = 0;
        command.data_len = 0;
        command.early_status = None;
        command.is_refused = false;
        command.awaited_by_fence = false;
        command.begun_range_count = 0;
        command.is_ordered = false;
        command.failure_count_before = None;
        command.inline = (0, 0);
        self.free.push(index);
        (command.buf.take(), core::mem::take(&mut command.charged_bytes))
    }

    /// The command with this index, if there is one.
    pub(super) fn get_used(&mut self, index: u16) -> Option<&mut Command<B>> {
        self.list.get_mut(usize::from(index)).filter(|command| command.stage != Stage::Free)
    }

    /// All commands.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u16, &mut Command<B>)> {
        self.list
            .iter_mut()
            .enumerate()
            .filter(|(_, command)| command.stage != Stage::Free)
            .map(|(index, command)| (index as u16, command))
    }

    /// Whether the test holds for any command.
    pub(super) fn any(&self, test: impl Fn(&Command<B>) -> bool) -> bool {
        self.list.iter().any(|command| command.stage != Stage::Free && test(command))
    }

    /// The indices of the commands for which the test holds.
    pub(super) fn indices_where(&self, test: impl Fn(&Command<B>) -> bool) -> Vec<u16> {
        let used = self.list.iter().enumerate().filter(|(_, command)| command.stage != Stage::Free);
        used.filter(|(_, command)| test(command)).map(|(index, _)| index as u16).collect()
    }

    /// Resets the gate's state of every entry, because another gate is about to begin.
    pub(super) fn reset_gate_nodes(&mut self) {
        for command in &mut self.list {
            command.entry.node = Node::FREE;
        }
    }

    /// The number of commands in flight.
    pub(super) fn in_use_count(&self) -> usize {
        self.list.len() - self.free.len()
    }
}

impl<B> gate::Table for Commands<B> {
    #[inline(always)]
    fn node(&self, ticket: gate::Ticket) -> &Node {
        &self.list[ticket.0 as usize].entry.node
    }

    #[inline(always)]
    fn node_mut(&mut self, ticket: gate::Ticket) -> &mut Node {
        &mut self.list[ticket.0 as usize].entry.node
    }
}

impl<B> core::ops::Index<u16> for Commands<B> {
    type Output = Command<B>;
    #[inline]
    fn index(&self, index: u16) -> &Command<B> {
        &self.list[usize::from(index)]
    }
}

impl<B> core::ops::IndexMut<u16> for Commands<B> {
    #[inline]
    fn index_mut(&mut self, index: u16) -> &mut Command<B> {
        &mut self.list[usize::from(index)]
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
            early_status: None,
            is_refused: false,
            awaited_by_fence: false,
            begun_range_count: 0,
            is_ordered: false,
            failure_count_before: None,
            flush_ticket: None,
            doubt: None,
            inline: (0, 0),
            entry: Entry::BLANK,
        }
    }

    /// Whether a device operation is in flight.
    pub(super) fn is_on_device(&self) -> bool {
        matches!(self.stage, Stage::Device | Stage::DeviceFlush)
    }
}
