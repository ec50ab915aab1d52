//! The queue in the place of one whose drive is not served any more. Every operation fails.

use std::os::fd::RawFd;
use std::sync::Arc;

use riopipe_media::{AlignedBuf, BlockDevice, Cause, Data, Done, IoError, Queue, Submitted};
use riopipe_order::block_device::Operation;
use riopipe_order::write_order::{EpochId, WriteOrder};

/// A queue without a drive.
pub(crate) struct RemovedDrive;

impl RemovedDrive {
    #[cold]
    fn refuse(what: Operation, lba: u64, blocks: u64) -> Submitted {
        let drive: Arc<str> = Arc::from("a removed namespace");
        let cause = Cause::Failed("the target does not serve it any more".into());
        Submitted::Done(Err(IoError::new(what, lba, blocks, &drive, cause)))
    }
}

impl BlockDevice for RemovedDrive {
    type Buf = AlignedBuf;

    fn write(&mut self, _: u64, lba: u64, _: Data<'_>) -> Submitted {
        Self::refuse(Operation::Write, lba, 0)
    }

    fn write_in_order(&mut self, _: u64, lba: u64, _: Data<'_>, _: WriteOrder) -> Submitted {
        Self::refuse(Operation::Write, lba, 0)
    }

    fn flush_epochs(&mut self, _: u64, _: EpochId) -> Submitted {
        Self::refuse(Operation::Flush, 0, 0)
    }

    fn start_stream(&mut self, _: u64, _: EpochId) -> Submitted {
        Self::refuse(Operation::Flush, 0, 0)
    }

    fn read(&mut self, _: u64, lba: u64, blocks: u64) -> Submitted {
        Self::refuse(Operation::Read, lba, blocks)
    }

    fn flush(&mut self, _: u64) -> Submitted {
        Self::refuse(Operation::Flush, 0, 0)
    }

    fn write_zeroes(&mut self, _: u64, lba: u64, blocks: u64) -> Submitted {
        Self::refuse(Operation::WriteZeroes, lba, blocks)
    }

    fn deallocate(&mut self, _: u64, lba: u64, blocks: u64) -> Submitted {
        Self::refuse(Operation::Deallocate, lba, blocks)
    }

    fn take_back(&mut self, _: u64) -> bool {
        false
    }

    fn kick(&mut self, _: u64) {}

    fn poll(&mut self, _: u64, _: &mut Vec<Done>) {}

    fn next_deadline(&self) -> Option<u64> {
        None
    }

    fn in_flight(&self) -> usize {
        0
    }
}

impl Queue for RemovedDrive {
    fn event_fd(&self) -> Option<RawFd> {
        None
    }
}
