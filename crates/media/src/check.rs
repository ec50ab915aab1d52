//! What every queue refuses before it touches anything.

use std::sync::Arc;

use crate::drive::{BLOCK_SIZE, BLOCKS_MAX, Geometry};
use crate::error::{Cause, IoError, Operation};

/// A drive's bounds and name.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    capacity: u64,
    name: Arc<str>,
}

impl Limits {
    pub(crate) fn new(geometry: &Geometry, name: &Arc<str>) -> Limits {
        Limits { capacity: geometry.blocks, name: Arc::clone(name) }
    }

    /// An operation that carries `bytes` of data.
    #[inline]
    pub(crate) fn data(&self, what: Operation, lba: u64, bytes: usize) -> Result<(), IoError> {
        if bytes == 0 || !bytes.is_multiple_of(BLOCK_SIZE) {
            let cause = Cause::BadLength { bytes: bytes as u64 };
            return Err(self.error(what, lba, (bytes / BLOCK_SIZE) as u64, cause));
        }
        self.blocks(what, lba, (bytes / BLOCK_SIZE) as u64)
    }

    /// An operation that carries `blocks` blocks of data.
    #[inline]
    pub(crate) fn blocks(&self, what: Operation, lba: u64, blocks: u64) -> Result<(), IoError> {
        if blocks > BLOCKS_MAX {
            let bytes = blocks.saturating_mul(BLOCK_SIZE as u64);
            return Err(self.error(what, lba, blocks, Cause::BadLength { bytes }));
        }
        self.extent(what, lba, blocks)
    }

    /// An operation on `blocks` blocks that carries no data.
    #[inline]
    pub(crate) fn extent(&self, what: Operation, lba: u64, blocks: u64) -> Result<(), IoError> {
        if blocks == 0 {
            return Err(self.error(what, lba, blocks, Cause::BadLength { bytes: 0 }));
        }
        match lba.checked_add(blocks) {
            Some(end) if end <= self.capacity => Ok(()),
            _ => {
                let capacity = self.capacity;
                Err(self.error(what, lba, blocks, Cause::OutOfRange { capacity }))
            }
        }
    }

    #[cold]
    pub(crate) fn error(&self, what: Operation, lba: u64, blocks: u64, cause: Cause) -> IoError {
        IoError::new(what, lba, blocks, &self.name, cause)
    }
}
