//! The queue between a target's cores and a drive.

use std::ops::{Deref, DerefMut};

use riopipe_order::block_device::{BlockDevice, Data, Done, Submitted};
use riopipe_order::write_order::{EpochId, WriteOrder};
use riopipe_session::target::BoundedDevice;

use crate::drive::Drive;

/// In the name of an operation, the number of the core that asked is above this bit. A core has 48
/// bits for its connections and needs far fewer.
const CORE_SHIFT: u32 = 56;

/// A drive with the bounded queue from the target's cores to it. Each core receives the results of
/// its own operations.
#[derive(Debug)]
pub struct DriveQueue {
    /// The core that submits the next operation.
    pub core: usize,
    queue: BoundedDevice<Drive>,
}

/// The core that asked for an operation, and the core's own name for it.
#[must_use]
pub const fn core_of(op: u64) -> (usize, u64) {
    ((op >> CORE_SHIFT) as usize, op & ((1 << CORE_SHIFT) - 1))
}

impl DriveQueue {
    /// A drive that gets at most `depth` operations at once.
    #[must_use]
    pub fn new(drive: Drive, depth: usize) -> Self {
        Self { core: 0, queue: BoundedDevice::new(Box::new(drive), depth, <[u8]>::to_vec) }
    }

    /// Notes that the target's process has died. The operations that the drive was given continue,
    /// and their results are dropped.
    pub fn orphan(&mut self) {
        self.queue.forget_waiting();
        self.queue.orphan();
    }

    const fn name(&self, op: u64) -> u64 {
        op | (self.core as u64) << CORE_SHIFT
    }
}

impl BlockDevice for DriveQueue {
    type Buf = Vec<u8>;

    fn write(&mut self, op: u64, lba: u64, data: Data<'_, Vec<u8>>) -> Submitted<Vec<u8>> {
        self.queue.write(self.name(op), lba, data)
    }

    fn write_in_order(
        &mut self,
        op: u64,
        lba: u64,
        data: Data<'_, Vec<u8>>,
        order: WriteOrder,
    ) -> Submitted<Vec<u8>> {
        self.queue.write_in_order(self.name(op), lba, data, order)
    }

    fn flush_epochs(&mut self, op: u64, before: EpochId) -> Submitted<Vec<u8>> {
        self.queue.flush_epochs(self.name(op), before)
    }

    fn start_stream(&mut self, op: u64, first: EpochId) -> Submitted<Vec<u8>> {
        self.queue.start_stream(self.name(op), first)
    }

    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Vec<u8>> {
        self.queue.read(self.name(op), lba, blocks)
    }

    fn flush(&mut self, op: u64) -> Submitted<Vec<u8>> {
        self.queue.flush(self.name(op))
    }

    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Vec<u8>> {
        self.queue.write_zeroes(self.name(op), lba, blocks)
    }

    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Vec<u8>> {
        self.queue.deallocate(self.name(op), lba, blocks)
    }

    fn take_back(&mut self, op: u64) -> bool {
        self.queue.take_back(self.name(op))
    }

    fn kick(&mut self, now: u64) {
        self.queue.kick(now);
    }

    fn poll(&mut self, now: u64, done: &mut Vec<Done<Vec<u8>>>) {
        self.queue.poll(now, done);
    }

    fn next_deadline(&self) -> Option<u64> {
        self.queue.next_deadline()
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }
}

impl Deref for DriveQueue {
    type Target = Drive;

    fn deref(&self) -> &Drive {
        &self.queue
    }
}

impl DerefMut for DriveQueue {
    fn deref_mut(&mut self) -> &mut Drive {
        &mut self.queue
    }
}
