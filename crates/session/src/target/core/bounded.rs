//! The queue of one core to one drive. It has a bounded depth: further operations wait in order.

use alloc::boxed::Box;
use alloc::collections::btree_map::Entry;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::ops::{Deref, DerefMut};

use riopipe_order::block_device::{BlockDevice, Data, Done, IoError, Submitted};
use riopipe_order::probe::{self, Rare};
use riopipe_order::write_order::{EpochId, WriteOrder};

/// A device that takes only a limited number of operations at once. Further operations wait, and
/// are submitted in their order.
///
/// The limit does not hold for operations on streams of epochs, and does not count them. The device
/// may hold such an operation back until another one arrives
/// ([`EpochWrite`](riopipe_order::write_order::EpochWrite)). If that one waited here, both would wait
/// for ever. So would a read that waits here for the first one, if it has the place in the host's
/// queue that the other one needs. Each belongs to a command, so their number is bounded all the same.
#[derive(Debug)]
pub struct BoundedDevice<D: BlockDevice + ?Sized> {
    /// The most operations that the device may have at once, without those on streams of epochs.
    depth: usize,
    /// The operations on streams of epochs that the device has, by their numbers, and how often it has
    /// each number.
    epoch_operations: BTreeMap<u64, usize>,
    /// The number of these operations.
    epoch_operation_count: usize,
    /// Copies the borrowed bytes of a write that waits, because the caller may change the bytes
    /// after the call.
    copy: fn(&[u8]) -> D::Buf,
    /// The operations that wait until the device has fewer than `depth`.
    waiting: VecDeque<WaitingOperation<D::Buf>>,
    device: Box<D>,
}

/// An operation that waits for the device.
#[derive(Debug)]
struct WaitingOperation<B> {
    /// The number of the operation, which is returned with its result.
    op: u64,
    /// The first block.
    lba: u64,
    kind: OperationKind<B>,
}

#[derive(Debug)]
enum OperationKind<B> {
    Write { data: B, order: WriteOrder },
    Read { blocks: u64 },
    Flush,
    StartStream { first: EpochId },
    WriteZeroes { blocks: u64 },
    Deallocate { blocks: u64 },
    WriteDurably { data: B },
    ZeroDurably { blocks: u64, deallocate: bool },
}

impl<B> WaitingOperation<B> {
    /// Whether nothing else depends on it: it is a read, or writes without an order.
    fn is_free(&self) -> bool {
        match &self.kind {
            OperationKind::Write { order, .. } => *order == WriteOrder::Orderless,
            OperationKind::Read { .. }
            | OperationKind::WriteZeroes { .. }
            | OperationKind::Deallocate { .. }
            | OperationKind::WriteDurably { .. }
            | OperationKind::ZeroDurably { .. } => true,
            OperationKind::Flush | OperationKind::StartStream { .. } => false,
        }
    }

    /// Whether it is a write with a place in the drive's order.
    fn is_ordered(&self) -> bool {
        matches!(&self.kind, OperationKind::Write { order, .. } if *order != WriteOrder::Orderless)
    }
}

impl<D: BlockDevice + ?Sized> BoundedDevice<D> {
    /// A device that takes at most `depth` operations at once. `copy` makes a buffer of the
    /// borrowed bytes of a write that must wait.
    #[must_use]
    pub const fn new(device: Box<D>, depth: usize, copy: fn(&[u8]) -> D::Buf) -> Self {
        Self {
            depth,
            epoch_operations: BTreeMap::new(),
            epoch_operation_count: 0,
            copy,
            waiting: VecDeque::new(),
            device,
        }
    }

    /// Drops the waiting operations, because the process that has submitted them has died.
    pub fn forget_waiting(&mut self) {
        self.waiting.clear();
        self.epoch_operations.clear();
        self.epoch_operation_count = 0;
    }

    /// Whether the device may take one more operation.
    #[inline]
    fn has_space(&self) -> bool {
        self.device.in_flight().saturating_sub(self.epoch_operation_count) < self.depth
    }

    /// Notes whether the device has an operation on a stream of epochs.
    fn note_epoch_operation(&mut self, op: u64, submitted: &Submitted<D::Buf>) {
        if matches!(submitted, Submitted::Pending) {
            *self.epoch_operations.entry(op).or_default() += 1;
            self.epoch_operation_count += 1;
        }
    }

    /// Notes that the device has ended operations.
    fn note_ended(&mut self, done: &[Done<D::Buf>]) {
        for Done { op, .. } in done {
            if let Entry::Occupied(mut operations) = self.epoch_operations.entry(*op) {
                self.epoch_operation_count -= 1;
                *operations.get_mut() -= 1;
                if *operations.get() == 0 {
                    operations.remove();
                }
            }
        }
    }

    /// The device, if it may take one more operation.
    #[inline]
    fn device_with_space(&mut self) -> Option<&mut D> {
        let has_space = self.waiting.is_empty() && self.has_space();
        has_space.then_some(&mut *self.device)
    }

    /// Puts an operation at the end of the waiting ones.
    #[cold]
    fn enqueue(&mut self, op: u64, lba: u64, kind: OperationKind<D::Buf>) -> Submitted<D::Buf> {
        probe::count_rare(Rare::DriveFull);
        self.waiting.push_back(WaitingOperation { op, lba, kind });
        Submitted::Pending
    }

    /// Puts a write at the end of the waiting operations.
    fn enqueue_write(
        &mut self,
        op: u64,
        lba: u64,
        data: Data<'_, D::Buf>,
        order: WriteOrder,
    ) -> Submitted<D::Buf> {
        let data = match data {
            Data::Borrowed(bytes) => (self.copy)(bytes),
            Data::Owned(buf) => buf,
        };
        self.enqueue(op, lba, OperationKind::Write { data, order })
    }

    /// Submits the waiting operations for which the device has space. The result of an operation
    /// that ends within the call is added to `done`.
    #[cold]
    fn submit_waiting(&mut self, done: &mut Vec<Done<D::Buf>>) {
        while self.has_space() {
            let Some(waiting) = self.waiting.pop_front() else { return };
            let is_ordered = waiting.is_ordered();
            let WaitingOperation { op, lba, kind } = waiting;
            let submitted = match kind {
                OperationKind::Write { data, order } => {
                    self.device.write_in_order(op, lba, Data::Owned(data), order)
                }
                OperationKind::Read { blocks } => self.device.read(op, lba, blocks),
                OperationKind::Flush => self.device.flush(op),
                OperationKind::StartStream { first } => self.device.start_stream(op, first),
                OperationKind::WriteZeroes { blocks } => self.device.write_zeroes(op, lba, blocks),
                OperationKind::Deallocate { blocks } => self.device.deallocate(op, lba, blocks),
                OperationKind::WriteDurably { data } => {
                    self.device.write_durably(op, lba, Data::Owned(data))
                }
                OperationKind::ZeroDurably { blocks, deallocate } => {
                    self.device.zero_durably(op, lba, blocks, deallocate)
                }
            };
            let Submitted::Done(result) = submitted else { continue };
            if let Err(error) = &result
                && is_ordered
            {
                self.refuse_ordered(error, done);
            }
            done.push(Done { op, result });
        }
    }

    /// Refuses the writes with an order that wait, because one before them was refused with this
    /// error. Their submitters learn of it only after this call, so they would pass it.
    fn refuse_ordered(&mut self, error: &IoError, done: &mut Vec<Done<D::Buf>>) {
        self.waiting.retain(|waiting| {
            let is_ordered = waiting.is_ordered();
            if is_ordered {
                done.push(Done { op: waiting.op, result: Err(error.clone()) });
            }
            !is_ordered
        });
    }
}

impl<D: BlockDevice + ?Sized> BlockDevice for BoundedDevice<D> {
    type Buf = D::Buf;

    #[inline]
    fn write(&mut self, op: u64, lba: u64, data: Data<'_, D::Buf>) -> Submitted<D::Buf> {
        if let Some(device) = self.device_with_space() {
            return device.write(op, lba, data);
        }
        self.enqueue_write(op, lba, data, WriteOrder::Orderless)
    }

    #[inline]
    fn write_in_order(
        &mut self,
        op: u64,
        lba: u64,
        data: Data<'_, D::Buf>,
        order: WriteOrder,
    ) -> Submitted<D::Buf> {
        if let WriteOrder::Epochs(_) = order {
            let submitted = self.device.write_in_order(op, lba, data, order);
            self.note_epoch_operation(op, &submitted);
            return submitted;
        }
        match self.device_with_space() {
            Some(device) => device.write_in_order(op, lba, data, order),
            None => self.enqueue_write(op, lba, data, order),
        }
    }

    fn has_fua(&self) -> bool {
        self.device.has_fua()
    }

    fn write_durably(&mut self, op: u64, lba: u64, data: Data<'_, D::Buf>) -> Submitted<D::Buf> {
        if let Some(device) = self.device_with_space() {
            return device.write_durably(op, lba, data);
        }
        let data = match data {
            Data::Borrowed(bytes) => (self.copy)(bytes),
            Data::Owned(buf) => buf,
        };
        self.enqueue(op, lba, OperationKind::WriteDurably { data })
    }

    fn zero_durably(
        &mut self,
        op: u64,
        lba: u64,
        blocks: u64,
        deallocate: bool,
    ) -> Submitted<D::Buf> {
        match self.device_with_space() {
            Some(device) => device.zero_durably(op, lba, blocks, deallocate),
            None => self.enqueue(op, lba, OperationKind::ZeroDurably { blocks, deallocate }),
        }
    }

    fn flush_epochs(&mut self, op: u64, before: EpochId) -> Submitted<D::Buf> {
        let submitted = self.device.flush_epochs(op, before);
        self.note_epoch_operation(op, &submitted);
        submitted
    }

    fn start_stream(&mut self, op: u64, first: EpochId) -> Submitted<D::Buf> {
        // The one sequence of a drive with a cache barrier has no number.
        if first.stream > 0 {
            let submitted = self.device.start_stream(op, first);
            self.note_epoch_operation(op, &submitted);
            return submitted;
        }
        match self.device_with_space() {
            Some(device) => device.start_stream(op, first),
            None => self.enqueue(op, 0, OperationKind::StartStream { first }),
        }
    }

    #[inline]
    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<D::Buf> {
        match self.device_with_space() {
            Some(device) => device.read(op, lba, blocks),
            None => self.enqueue(op, lba, OperationKind::Read { blocks }),
        }
    }

    fn flush(&mut self, op: u64) -> Submitted<D::Buf> {
        match self.device_with_space() {
            Some(device) => device.flush(op),
            None => self.enqueue(op, 0, OperationKind::Flush),
        }
    }

    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<D::Buf> {
        match self.device_with_space() {
            Some(device) => device.write_zeroes(op, lba, blocks),
            None => self.enqueue(op, lba, OperationKind::WriteZeroes { blocks }),
        }
    }

    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<D::Buf> {
        match self.device_with_space() {
            Some(device) => device.deallocate(op, lba, blocks),
            None => self.enqueue(op, lba, OperationKind::Deallocate { blocks }),
        }
    }

    fn take_back(&mut self, op: u64) -> bool {
        let is_it = |waiting: &WaitingOperation<D::Buf>| waiting.op == op && waiting.is_free();
        let Some(at) = self.waiting.iter().position(is_it) else { return false };
        self.waiting.remove(at);
        true
    }

    fn kick(&mut self, now: u64) {
        self.device.kick(now);
    }

    fn poll(&mut self, now: u64, done: &mut Vec<Done<D::Buf>>) {
        let ended_before = done.len();
        self.device.poll(now, done);
        if self.epoch_operation_count > 0 {
            self.note_ended(&done[ended_before..]);
        }
        if !self.waiting.is_empty() {
            self.submit_waiting(done);
        }
    }

    fn next_deadline(&self) -> Option<u64> {
        self.device.next_deadline()
    }

    fn in_flight(&self) -> usize {
        self.device.in_flight() + self.waiting.len()
    }
}

impl<D: BlockDevice + ?Sized> Deref for BoundedDevice<D> {
    type Target = D;

    fn deref(&self) -> &D {
        &self.device
    }
}

impl<D: BlockDevice + ?Sized> DerefMut for BoundedDevice<D> {
    fn deref_mut(&mut self) -> &mut D {
        &mut self.device
    }
}
