//! The device as a drive of a target.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use riopipe_media::survival::{Kept, Survival};
use riopipe_media::{
    AlignedBuf, BLOCK_BYTES, BlockDevice, Cause, Data, Done, Drive, Geometry, IoError, OpenError,
    Operation, Queue, Submitted,
};
use riopipe_platform::EventFd;

use crate::inbox::{Inbox, Ticket};
use crate::shared::Shared;

/// A [`Device`](crate::Device) as a drive.
pub struct VolumeDrive {
    shared: Arc<Shared>,
}

impl VolumeDrive {
    pub(crate) const fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// A queue for one thread, with at most `depth` operations in flight.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn queue(&self, depth: usize) -> Result<VolumeQueue, OpenError> {
        let describe = &self.shared.geometry.describe;
        let inbox = Inbox::new().map_err(|source| OpenError::Os {
            path: describe.clone(),
            doing: "use it",
            source,
        })?;
        let shared = Arc::clone(&self.shared);
        Ok(VolumeQueue { shared, inbox: Arc::new(inbox), depth, in_flight: 0 })
    }
}

impl Drive for VolumeDrive {
    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    fn open_queue(&self, depth: usize) -> Result<Box<dyn Queue>, OpenError> {
        Ok(Box::new(self.queue(depth)?))
    }

    fn survives(&self) -> Survival {
        Survival {
            process_kill: Kept::Flushed,
            power_cut: Kept::Flushed,
            note: "as long as the drives of the volume keep what is flushed",
        }
    }
}

/// One thread's access to a [`VolumeDrive`].
///
/// Dropping a queue does not wait for its operations in flight: the volume is owned as long as its
/// streams are open, so they land before any other owner writes (trap T8).
pub struct VolumeQueue {
    shared: Arc<Shared>,
    inbox: Arc<Inbox>,
    depth: usize,
    in_flight: usize,
}

impl VolumeQueue {
    /// Checks an operation, and counts it.
    fn begin(
        &mut self,
        (op, what): (u64, Operation),
        (lba, blocks): (u64, u64),
        checked: Result<(), IoError>,
    ) -> Result<Ticket, IoError> {
        checked?;
        if self.in_flight >= self.depth {
            let cause = Cause::QueueFull { depth: self.depth };
            return Err(self.shared.limits.error(what, lba, blocks, cause));
        }
        self.in_flight += 1;
        Ok(Ticket { inbox: Arc::clone(&self.inbox), op, what, lba, blocks })
    }

    /// As [`write`](BlockDevice::write), with Force Unit Access if `is_fua`: the write is durable when it
    /// is done.
    pub fn write_through(&mut self, op: u64, lba: u64, data: Data<'_>, is_fua: bool) -> Submitted {
        let (what, len) = (Operation::Write, data.bytes().len());
        let checked = self.shared.limits.data(what, lba, len);
        let blocks = (len / BLOCK_BYTES) as u64;
        match self.begin((op, what), (lba, blocks), checked) {
            Err(error) => Submitted::Done(Err(error)),
            Ok(ticket) => {
                let data = Arc::new(match data {
                    Data::Owned(buf) => buf,
                    Data::Borrowed(bytes) => AlignedBuf::copy_of(bytes),
                });
                // At most `BLOCKS_MAX`.
                let blocks = blocks as u32;
                self.shared.decide(|device| device.write(ticket, lba, blocks, data, is_fua));
                Submitted::Pending
            }
        }
    }

    /// As [`write_zeroes`](BlockDevice::write_zeroes), with Force Unit Access if `is_fua`.
    pub fn zero_through(&mut self, op: u64, lba: u64, blocks: u64, is_fua: bool) -> Submitted {
        self.zero((op, Operation::WriteZeroes), (lba, blocks), is_fua)
    }

    /// As [`deallocate`](BlockDevice::deallocate), with Force Unit Access if `is_fua`.
    pub fn deallocate_through(
        &mut self,
        op: u64,
        lba: u64,
        blocks: u64,
        is_fua: bool,
    ) -> Submitted {
        self.zero((op, Operation::Deallocate), (lba, blocks), is_fua)
    }

    /// The descriptor of [`event_fd`](Queue::event_fd). A caller that clears it polls afterwards.
    pub(crate) fn event(&self) -> &EventFd {
        self.inbox.event()
    }

    fn zero(&mut self, operation: (u64, Operation), extent: (u64, u64), is_fua: bool) -> Submitted {
        let (lba, blocks) = extent;
        let checked = self.shared.limits.extent(operation.1, lba, blocks);
        match self.begin(operation, extent, checked) {
            Err(error) => Submitted::Done(Err(error)),
            Ok(ticket) => {
                self.shared.decide(|device| device.zero(ticket, lba, blocks, is_fua));
                Submitted::Pending
            }
        }
    }
}

impl BlockDevice for VolumeQueue {
    type Buf = AlignedBuf;

    fn write(&mut self, op: u64, lba: u64, data: Data<'_>) -> Submitted {
        self.write_through(op, lba, data, false)
    }

    fn has_fua(&self) -> bool {
        true
    }

    fn write_durably(&mut self, op: u64, lba: u64, data: Data<'_>) -> Submitted {
        self.write_through(op, lba, data, true)
    }

    fn zero_durably(&mut self, op: u64, lba: u64, blocks: u64, deallocate: bool) -> Submitted {
        match deallocate {
            true => self.deallocate_through(op, lba, blocks, true),
            false => self.zero_through(op, lba, blocks, true),
        }
    }

    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        let what = Operation::Read;
        let checked = self.shared.limits.blocks(what, lba, blocks);
        match self.begin((op, what), (lba, blocks), checked) {
            Err(error) => Submitted::Done(Err(error)),
            Ok(ticket) => {
                self.shared.read(ticket);
                Submitted::Pending
            }
        }
    }

    fn flush(&mut self, op: u64) -> Submitted {
        match self.begin((op, Operation::Flush), (0, 0), Ok(())) {
            Err(error) => Submitted::Done(Err(error)),
            Ok(ticket) => {
                self.shared.decide(|device| device.flush(ticket));
                Submitted::Pending
            }
        }
    }

    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.zero((op, Operation::WriteZeroes), (lba, blocks), false)
    }

    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.zero((op, Operation::Deallocate), (lba, blocks), false)
    }

    fn kick(&mut self, _now: u64) {}

    fn poll(&mut self, _now: u64, done: &mut Vec<Done>) {
        let before = done.len();
        self.inbox.take(done);
        self.in_flight -= done.len() - before;
    }

    fn next_deadline(&self) -> Option<u64> {
        None
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Queue for VolumeQueue {
    fn event_fd(&self) -> Option<RawFd> {
        Some(self.inbox.event().as_raw_fd())
    }
}
