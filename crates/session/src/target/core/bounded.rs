//! A core's queue to a drive, of bounded depth. Further operations wait their turn.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::ops::{Deref, DerefMut};

use riopipe_order::block_device::{BlockDevice, Data, Done, Submitted};
use riopipe_order::probe::{self, Rare};

/// A device that takes only a limited number of operations at once. Further ones wait in order, and
/// none overtakes another.
#[derive(Debug)]
pub struct BoundedDevice<D: BlockDevice + ?Sized> {
    depth: usize,
    /// Copies borrowed bytes into a buffer. The caller may use the bytes again after the call.
    copy: fn(&[u8]) -> D::Buf,
    /// Operations that were submitted while the device had as many as it may have.
    waiting: VecDeque<Waiting<D::Buf>>,
    device: Box<D>,
}

#[derive(Debug)]
struct Waiting<B> {
    op: u64,
    lba: u64,
    operation: Operation<B>,
}

#[derive(Debug)]
enum Operation<B> {
    Write(B),
    Read(u64),
    Flush,
    WriteZeroes(u64),
    Deallocate(u64),
}

impl<D: BlockDevice + ?Sized> BoundedDevice<D> {
    /// A device that takes at most `depth` operations at once. `copy` makes a buffer out of
    /// borrowed bytes that have to wait.
    #[must_use]
    pub const fn new(device: Box<D>, depth: usize, copy: fn(&[u8]) -> D::Buf) -> Self {
        Self { depth, copy, waiting: VecDeque::new(), device }
    }

    /// Forgets waiting operations, because their process has died.
    pub fn forget_waiting(&mut self) {
        self.waiting.clear();
    }

    /// The device, if it may take one more operation.
    #[inline]
    fn with_space(&mut self) -> Option<&mut D> {
        let is_free = self.waiting.is_empty() && self.device.in_flight() < self.depth;
        is_free.then_some(&mut *self.device)
    }

    #[cold]
    fn wait(&mut self, op: u64, lba: u64, operation: Operation<D::Buf>) -> Submitted<D::Buf> {
        probe::hit(Rare::DriveFull);
        self.waiting.push_back(Waiting { op, lba, operation });
        Submitted::Pending
    }

    /// Submits the operations that have waited for space. One that ends within the call is added to
    /// `done`.
    #[cold]
    fn submit_waiting(&mut self, done: &mut Vec<Done<D::Buf>>) {
        while self.device.in_flight() < self.depth {
            let Some(Waiting { op, lba, operation }) = self.waiting.pop_front() else { return };
            let submitted = match operation {
                Operation::Write(data) => self.device.write(op, lba, Data::Owned(data)),
                Operation::Read(blocks) => self.device.read(op, lba, blocks),
                Operation::Flush => self.device.flush(op),
                Operation::WriteZeroes(blocks) => self.device.write_zeroes(op, lba, blocks),
                Operation::Deallocate(blocks) => self.device.deallocate(op, lba, blocks),
            };
            if let Submitted::Done(result) = submitted {
                done.push(Done { op, result });
            }
        }
    }
}

impl<D: BlockDevice + ?Sized> BlockDevice for BoundedDevice<D> {
    type Buf = D::Buf;

    #[inline]
    fn write(&mut self, op: u64, lba: u64, data: Data<'_, D::Buf>) -> Submitted<D::Buf> {
        if let Some(device) = self.with_space() {
            return device.write(op, lba, data);
        }
        let data = match data {
            Data::Borrowed(bytes) => (self.copy)(bytes),
            Data::Owned(buf) => buf,
        };
        self.wait(op, lba, Operation::Write(data))
    }

    #[inline]
    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<D::Buf> {
        match self.with_space() {
            Some(device) => device.read(op, lba, blocks),
            None => self.wait(op, lba, Operation::Read(blocks)),
        }
    }

    fn flush(&mut self, op: u64) -> Submitted<D::Buf> {
        match self.with_space() {
            Some(device) => device.flush(op),
            None => self.wait(op, 0, Operation::Flush),
        }
    }

    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<D::Buf> {
        match self.with_space() {
            Some(device) => device.write_zeroes(op, lba, blocks),
            None => self.wait(op, lba, Operation::WriteZeroes(blocks)),
        }
    }

    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<D::Buf> {
        match self.with_space() {
            Some(device) => device.deallocate(op, lba, blocks),
            None => self.wait(op, lba, Operation::Deallocate(blocks)),
        }
    }

    fn kick(&mut self, now: u64) {
        self.device.kick(now);
    }

    fn poll(&mut self, now: u64, done: &mut Vec<Done<D::Buf>>) {
        self.device.poll(now, done);
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
