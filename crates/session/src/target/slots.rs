//! The commands of one queue that are under way: a table of fixed size, found by index.

use alloc::boxed::Box;
use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};

use super::flushes::{Doubt, Ticket};

/// How far a command has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// No command.
    Free,
    /// Waiting until the connection may hold its buffer.
    Budget,
    /// Its R2T is out; data comes in.
    Receiving,
    /// An ordered entry with its data at hand, waiting for the gate.
    Gate,
    /// A device operation is under way.
    Device,
    /// A FLUSH that belongs to the command (FUA, ordered flush) is under way.
    DeviceFlush,
    /// Its FLUSH has succeeded, but others that were under way meanwhile may have failed (T29).
    InDoubt,
    /// A claim or release that waits for other connections.
    Fence,
}

/// One command.
#[derive(Debug)]
pub(super) struct Slot<B> {
    pub(super) sqe: Sqe,
    pub(super) stage: Stage,
    /// Index of the namespace.
    pub(super) ns: u16,
    /// The command's data: an R2T transfer, or a copy of what the gate holds.
    pub(super) buf: Option<B>,
    /// Bytes of `buf` that count against the connection's budget.
    pub(super) charged: usize,
    /// Data received, and data wanted.
    pub(super) got: u32,
    pub(super) want: u32,
    /// What it will be answered with, if that is decided already.
    pub(super) verdict: Option<Status>,
    /// An ordered request that the gate refused while its data was under way: answered once
    /// that has come.
    pub(super) refused: bool,
    /// A fence waits for this slot's device operation.
    pub(super) fenced: bool,
    /// Dataset Management: the range under way.
    pub(super) step: u16,
    /// Carries an ordering attribute.
    pub(super) ordered: bool,
    /// Of a FLUSH: how many of the drive's had failed when the first write that it covers was
    /// submitted (T22).
    pub(super) since: Option<u64>,
    /// Its FLUSH, from submission until it has come back.
    pub(super) flush: Option<Ticket>,
    /// Of a FLUSH that is in doubt: until when. Without meaning otherwise.
    pub(super) doubt: Option<Doubt>,
    /// In-capsule data of an ordered write in the receive buffer; only within one `receive`.
    pub(super) inline: (u32, u32),
}

/// The table.
#[derive(Debug)]
pub(super) struct Slots<B> {
    list: Vec<Slot<B>>,
    free: Vec<u16>,
    /// One bit for each command identifier in use.
    cids: Box<[u64; 1024]>,
}

impl<B> Slots<B> {
    /// A table for `entries` commands.
    pub(super) fn new(entries: u16) -> Self {
        let cids = alloc::vec![0u64; 1024].into_boxed_slice().try_into();
        Self {
            list: (0..entries).map(|_| Slot::empty()).collect(),
            free: (0..entries).rev().collect(),
            cids: cids.unwrap_or_else(|_| unreachable!("the slice has 1024 words")),
        }
    }

    /// Whether a command with this identifier is under way.
    #[inline]
    pub(super) fn has_cid(&self, cid: u16) -> bool {
        self.cids[usize::from(cid >> 6)] & 1 << (cid & 63) != 0
    }

    /// The slot that [`Slots::take`] would give.
    #[inline]
    pub(super) fn next(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// Puts a command into the table; `None` if the host overran its queue.
    #[inline]
    pub(super) fn take(&mut self, sqe: &Sqe, stage: Stage, ns: usize) -> Option<u16> {
        let index = self.free.pop()?;
        let slot = &mut self.list[usize::from(index)];
        slot.sqe = *sqe;
        slot.stage = stage;
        slot.ns = ns as u16;
        let cid = sqe.cid();
        self.cids[usize::from(cid >> 6)] |= 1 << (cid & 63);
        Some(index)
    }

    /// Forgets a command; returns its buffer, and the bytes to give back to the budget.
    #[inline]
    pub(super) fn release(&mut self, index: u16) -> (Option<B>, usize) {
        let slot = &mut self.list[usize::from(index)];
        let cid = slot.sqe.cid();
        self.cids[usize::from(cid >> 6)] &= !(1 << (cid & 63));
        slot.stage = Stage::Free;
        slot.got = 0;
        slot.want = 0;
        slot.verdict = None;
        slot.refused = false;
        slot.fenced = false;
        slot.step = 0;
        slot.ordered = false;
        slot.since = None;
        slot.inline = (0, 0);
        self.free.push(index);
        (slot.buf.take(), core::mem::take(&mut slot.charged))
    }

    /// The slot with this index, if there is one with a command in it.
    pub(super) fn used(&mut self, index: u16) -> Option<&mut Slot<B>> {
        self.list.get_mut(usize::from(index)).filter(|slot| slot.stage != Stage::Free)
    }

    /// All slots with a command.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u16, &mut Slot<B>)> {
        self.list
            .iter_mut()
            .enumerate()
            .filter(|(_, slot)| slot.stage != Stage::Free)
            .map(|(index, slot)| (index as u16, slot))
    }

    /// Whether any command's slot is like this.
    pub(super) fn any(&self, test: impl Fn(&Slot<B>) -> bool) -> bool {
        self.list.iter().any(|slot| slot.stage != Stage::Free && test(slot))
    }

    /// The slots of commands that are like this.
    pub(super) fn indices(&self, test: impl Fn(&Slot<B>) -> bool) -> Vec<u16> {
        let used = self.list.iter().enumerate().filter(|(_, slot)| slot.stage != Stage::Free);
        used.filter(|(_, slot)| test(slot)).map(|(index, _)| index as u16).collect()
    }

    /// Commands under way.
    pub(super) fn in_use(&self) -> usize {
        self.list.len() - self.free.len()
    }
}

impl<B> core::ops::Index<u16> for Slots<B> {
    type Output = Slot<B>;
    #[inline]
    fn index(&self, index: u16) -> &Slot<B> {
        &self.list[usize::from(index)]
    }
}

impl<B> core::ops::IndexMut<u16> for Slots<B> {
    #[inline]
    fn index_mut(&mut self, index: u16) -> &mut Slot<B> {
        &mut self.list[usize::from(index)]
    }
}

impl<B> Slot<B> {
    fn empty() -> Self {
        Self {
            sqe: Sqe::default(),
            stage: Stage::Free,
            ns: 0,
            buf: None,
            charged: 0,
            got: 0,
            want: 0,
            verdict: None,
            refused: false,
            fenced: false,
            step: 0,
            ordered: false,
            since: None,
            flush: None,
            doubt: None,
            inline: (0, 0),
        }
    }

    /// Whether a device operation is under way.
    pub(super) fn on_device(&self) -> bool {
        matches!(self.stage, Stage::Device | Stage::DeviceFlush)
    }
}
