//! The modelled SSD as a simulated drive: the same model that `ssd:` drives run, over names of
//! contents.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use riopipe_model::ssd::{
    Command, ExchangeError, FLASH, Model, OPTANE, Order, PageList, Pages, Profile, QueueId, Tables,
};
use riopipe_order::block_device::{Cause, Done, IoError};
use riopipe_order::write_order::DriveOrder;
use serde::{Deserialize, Serialize};

use crate::block::{Content, ZERO};

/// The model of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// Flash without power-loss protection.
    Flash,
    /// Optane with power-loss protection.
    Optane,
    /// Flash with a cache barrier.
    FlashBarrier,
    /// Flash with an order-preserving FTL.
    FlashOp,
    /// Optane with a cache barrier.
    OptaneBarrier,
    /// Optane with an order-preserving FTL.
    OptaneOp,
    /// Flash with an order-preserving FTL whose tables are soon full.
    FlashOpSmall,
}

impl ModelKind {
    /// The profile of the model.
    #[must_use]
    pub const fn profile(self) -> &'static Profile {
        match self {
            Self::Flash | Self::FlashBarrier | Self::FlashOp | Self::FlashOpSmall => &FLASH,
            Self::Optane | Self::OptaneBarrier | Self::OptaneOp => &OPTANE,
        }
    }

    /// The order that the model keeps.
    #[must_use]
    pub const fn order(self) -> Order {
        match self {
            Self::Flash | Self::Optane => Order::NONE,
            Self::FlashBarrier | Self::OptaneBarrier => {
                Order::of(DriveOrder::Barrier, self.profile())
            }
            Self::FlashOp | Self::OptaneOp => Order::of(DriveOrder::Epochs, self.profile()),
            Self::FlashOpSmall => {
                let tables = Tables { streams: 128, epochs: 3, entries: 6 };
                Order { tables, ..Order::of(DriveOrder::Epochs, &FLASH) }
            }
        }
    }
}

/// The names of the contents of the blocks.
struct Names {
    blocks: Vec<Content>,
    /// The contents whose writes fail.
    failing: BTreeSet<Content>,
}

impl Pages for Names {
    type Page = Content;
    type Buf = Vec<Content>;
    const ZEROES: Content = ZERO;

    fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    fn exchange(
        &mut self,
        lba: u64,
        page: Content,
        _keep_old: bool,
    ) -> Result<Content, ExchangeError> {
        if self.failing.remove(&page) {
            return Err(ExchangeError::Medium(Cause::Failed("a broken block".into())));
        }
        Ok(core::mem::replace(&mut self.blocks[lba as usize], page))
    }

    fn release(&mut self, _page: Content) {}

    fn read(&self, lba: u64, blocks: u64) -> Result<Vec<Content>, Cause> {
        Ok(self.blocks[lba as usize..(lba + blocks) as usize].to_vec())
    }
}

/// An operation in flight.
struct InFlight {
    /// The name of the operation, for the core that asked. `None` once the process has died.
    op: Option<u64>,
    /// The contents of a write.
    contents: Vec<Content>,
    writes: bool,
}

/// A finished operation: its name, unless its process has died, its result, and whether it has
/// written.
pub(super) struct Finished {
    pub(super) op: Option<u64>,
    pub(super) writes: bool,
    /// The contents that a complete write has put there.
    pub(super) contents: Vec<Content>,
    pub(super) result: Result<Option<Vec<Content>>, IoError>,
}

/// A modelled drive and its operations.
pub(super) struct Modelled {
    model: Model<Names>,
    queue: QueueId,
    /// The operations in flight, by the model's numbers.
    in_flight: BTreeMap<u64, InFlight>,
    next: u64,
    gathered: Vec<(u64, Command<Content>)>,
    /// The results of operations that ended when they were submitted: the model has refused them.
    refused: Vec<Done<Vec<Content>>>,
    /// When the last operations were submitted, ns.
    submitted_at: u64,
    /// The time of the last call, ns.
    now: u64,
}

impl fmt::Debug for Modelled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Modelled").field("in_flight", &self.in_flight.len()).finish_non_exhaustive()
    }
}

impl Modelled {
    pub(super) fn new(kind: ModelKind, blocks: u32, seed: u64) -> Self {
        let names = Names { blocks: vec![ZERO; blocks as usize], failing: BTreeSet::new() };
        let mut model = Model::with_order(kind.profile(), kind.order(), names, seed);
        let queue = model.open_queue();
        let (in_flight, gathered, refused) = (BTreeMap::new(), Vec::new(), Vec::new());
        Self { model, queue, in_flight, next: 0, gathered, refused, submitted_at: 0, now: 0 }
    }

    /// Sets the content that a block holds from the start, durably.
    pub(super) fn preset(&mut self, lba: u32, content: Content) {
        self.model.pages_mut().blocks[lba as usize] = content;
    }

    pub(super) fn block(&self, lba: u32) -> Content {
        self.model.pages().blocks[lba as usize]
    }

    /// Lets the write of these contents fail when it completes.
    pub(super) fn fail(&mut self, contents: &[Content]) {
        self.model.pages_mut().failing.extend(contents);
    }

    /// The contents of a block before each write that a power cut may still undo, oldest first.
    pub(super) fn older(&self, lba: u32) -> impl Iterator<Item = Content> {
        self.model.older_contents(lba.into())
    }

    pub(super) fn submit(&mut self, op: u64, command: Command<Content>) {
        let (writes, contents) = match &command {
            Command::Write { pages, .. } => (true, pages.as_slice().to_vec()),
            Command::Zeroes { .. } => (true, Vec::new()),
            Command::Read { .. }
            | Command::Flush
            | Command::FlushEpochs { .. }
            | Command::StartStream { .. } => (false, Vec::new()),
        };
        self.next += 1;
        self.in_flight.insert(self.next, InFlight { op: Some(op), contents, writes });
        self.gathered.push((self.next, command));
    }

    pub(super) fn kick(&mut self, now: u64) {
        self.now = now;
        for (number, command) in self.gathered.drain(..) {
            self.model.submit(now, self.queue, number, command);
        }
        self.submitted_at = now;
        self.model.take_done(self.queue, &mut self.refused);
    }

    pub(super) fn poll(&mut self, now: u64) -> Vec<Finished> {
        self.now = now;
        self.model.advance(now);
        if self.in_flight.values().any(|in_flight| in_flight.op.is_none()) {
            // Writes of a dead process that have landed may wait for others, too.
            self.model.end_waiting_of(now, self.queue);
        }
        let mut done = core::mem::take(&mut self.refused);
        self.model.take_done(self.queue, &mut done);
        let failing = &mut self.model.pages_mut().failing;
        let ended = done.into_iter().filter_map(|Done { op, result }| {
            let InFlight { op, contents, writes } = self.in_flight.remove(&op)?;
            // Its blocks fail once. The drive may put one of its contents back into its place later.
            contents.iter().for_each(|content| {
                failing.remove(content);
            });
            Some(Finished { op, writes, contents, result })
        });
        ended.collect()
    }

    pub(super) fn next_deadline(&self) -> Option<u64> {
        match self.refused.is_empty() {
            true => self.model.next_due(),
            false => Some(self.submitted_at),
        }
    }

    /// The number of operations whose process still runs.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.values().filter(|in_flight| in_flight.op.is_some()).count()
    }

    /// Whether it works on any operation.
    pub(super) fn is_busy(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Continues the operations in flight after the process that asked for them has died. Those
    /// that wait for commands which the process has not sent end with its queue.
    pub(super) fn orphan(&mut self) {
        self.in_flight.values_mut().for_each(|in_flight| in_flight.op = None);
        self.model.end_waiting_of(self.now, self.queue);
        let mut done = Vec::new();
        self.model.take_done(self.queue, &mut done);
        // No poll is planned for the operations that have waited. They have failed.
        let (failed, complete): (Vec<_>, Vec<_>) =
            done.into_iter().partition(|done| done.result.is_err());
        for Done { op, .. } in failed {
            self.in_flight.remove(&op);
        }
        self.refused.extend(complete);
    }

    /// Resets the controller: all streams end, and begin with the epoch `first`.
    pub(super) fn reset_streams(&mut self, now: u64, first: u16) {
        self.model.reset_streams(now, first);
    }

    /// Cuts the power. It is back before the next operation.
    pub(super) fn power_cut(&mut self, now: u64, seed: u64) {
        self.gathered.clear();
        self.in_flight.clear();
        self.refused.clear();
        self.model.pages_mut().failing.clear();
        self.model.power_cut(now, seed);
        // The results of operations that failed with the power are dropped.
        self.model.take_done(self.queue, &mut Vec::new());
        self.model.power_on();
    }

    /// Makes all complete writes durable.
    pub(super) fn sync(&mut self) {
        self.model.make_all_durable();
    }
}

/// The contents of a write.
pub(super) fn pages(contents: Vec<Content>) -> PageList<Content> {
    match contents[..] {
        [one] => PageList::One(one),
        _ => PageList::Many(contents.into()),
    }
}

#[cfg(test)]
mod tests {
    use riopipe_order::write_order::WriteOrder;

    use super::*;

    fn write(lba: u64, contents: Vec<Content>) -> Command<Content> {
        Command::Write { lba, pages: pages(contents), order: WriteOrder::Orderless }
    }

    #[test]
    fn a_power_cut_undoes_unflushed_writes_unless_the_drive_is_protected() {
        for kind in
            [ModelKind::Flash, ModelKind::Optane, ModelKind::FlashBarrier, ModelKind::FlashOp]
        {
            for flushed in [false, true] {
                let mut lost = 0;
                for seed in 0..64 {
                    let mut drive = Modelled::new(kind, 8, seed);
                    drive.submit(1, write(2, vec![7]));
                    drive.kick(0);
                    let mut now = drive.next_deadline().unwrap();
                    let ended = drive.poll(now);
                    assert_eq!((ended[0].op, &ended[0].contents[..]), (Some(1), &[7][..]));
                    if flushed {
                        drive.submit(2, Command::Flush);
                        drive.kick(now);
                        now = drive.next_deadline().unwrap();
                        assert!(drive.poll(now)[0].result.is_ok());
                    }
                    let is_durable = flushed || kind == ModelKind::Optane;
                    assert_eq!(drive.older(2).collect::<Vec<_>>().is_empty(), is_durable);
                    drive.power_cut(now, seed);
                    lost += u32::from(drive.block(2) != 7);
                }
                assert_eq!(lost > 0, kind != ModelKind::Optane && !flushed, "{kind:?} {flushed}");
            }
        }
    }

    #[test]
    fn operations_of_a_dead_process_land_and_are_not_reported() {
        let mut drive = Modelled::new(ModelKind::Flash, 8, 1);
        drive.submit(1, write(0, vec![5, 6]));
        drive.kick(10);
        drive.orphan();
        assert!(drive.is_busy() && drive.in_flight() == 0);
        let ended = drive.poll(drive.next_deadline().unwrap());
        assert!(ended.len() == 1 && ended[0].op.is_none() && ended[0].writes);
        assert_eq!((drive.block(0), drive.block(1), drive.is_busy()), (5, 6, false));
    }
}
