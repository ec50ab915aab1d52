//! A drive that keeps nothing.

use std::hint::black_box;

use riopipe_order::block_device::{BLOCK_BYTES, BlockDevice, Data, Done, Submitted};

/// A drive that keeps nothing, and reads as zeroes. Its operations end at once; its writes do so
/// when asked, if it [`holds`](Self::holds) them.
#[derive(Debug, Default)]
pub struct NullDrive {
    /// Writes stay in flight until [`poll`](BlockDevice::poll), which ends the newest first.
    pub holds: bool,
    pending: Vec<u64>,
}

impl NullDrive {
    /// A drive that holds nothing, with memory for `held` writes.
    #[must_use]
    pub fn with_space(held: usize) -> Self {
        Self { holds: false, pending: Vec::with_capacity(held) }
    }
}

impl BlockDevice for NullDrive {
    type Buf = Vec<u8>;
    #[inline]
    fn write(&mut self, op: u64, _: u64, data: Data<'_, Vec<u8>>) -> Submitted<Vec<u8>> {
        // The compiler must not remove the data that a benchmark sends.
        black_box(&data);
        if self.holds {
            self.pending.push(op);
            return Submitted::Pending;
        }
        Submitted::Done(Ok(None))
    }
    fn read(&mut self, _: u64, _: u64, blocks: u64) -> Submitted<Vec<u8>> {
        Submitted::Done(Ok(Some(vec![0; blocks as usize * BLOCK_BYTES])))
    }
    fn flush(&mut self, _: u64) -> Submitted<Vec<u8>> {
        Submitted::Done(Ok(None))
    }
    fn write_zeroes(&mut self, _: u64, _: u64, _: u64) -> Submitted<Vec<u8>> {
        Submitted::Done(Ok(None))
    }
    fn deallocate(&mut self, _: u64, _: u64, _: u64) -> Submitted<Vec<u8>> {
        Submitted::Done(Ok(None))
    }
    fn kick(&mut self, _: u64) {}
    fn poll(&mut self, _: u64, done: &mut Vec<Done<Vec<u8>>>) {
        done.extend(self.pending.drain(..).rev().map(|op| Done { op, result: Ok(None) }));
    }
    fn next_deadline(&self) -> Option<u64> {
        None
    }
    fn in_flight(&self) -> usize {
        self.pending.len()
    }
}
