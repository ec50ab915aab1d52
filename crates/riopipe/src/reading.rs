//! Reads of volume blocks into the caller's buffers, by a stream or by a reader of the volume.
//!
//! One call may read several extents. The driver reads them as one sequence of bytes, and reports each
//! piece of data by its offset in that sequence. [`Reads`] finds the extent of an offset, and copies the
//! data into the buffer of the extent.

use std::time::Duration;

use riopipe_net::{AdaptiveSpin, now_ns};
use riopipe_session::initiator::stream::ReadExtent as DriverExtent;
use riopipe_session::initiator::stream_driver::ReadFailure;

use crate::BLOCK_BYTES;
use crate::error::ReadError;
use crate::stream_shell::StreamShell;
use crate::time::nanos;

/// An extent of a read: consecutive blocks, and the buffer for their content.
#[derive(Debug)]
pub struct ReadExtent<'a> {
    /// The first volume block of the extent.
    pub lba: u64,
    /// The buffer for the content. Its length is a multiple of 4096 bytes, and is the length of the
    /// extent.
    pub into: &'a mut [u8],
}

/// The extents of one call, checked. Extents without blocks are left out.
#[derive(Debug)]
pub(crate) struct Reads<'a> {
    /// The extents, in the form that the driver needs.
    extents: Vec<DriverExtent>,
    /// The buffer of each extent.
    buffers: Vec<ExtentBuffer<'a>>,
}

/// The buffer of an extent.
#[derive(Debug)]
struct ExtentBuffer<'a> {
    /// The offset of the extent in the bytes of the whole call.
    offset: usize,
    bytes: &'a mut [u8],
}

/// The place of a byte of the whole call.
struct BytePlace {
    /// The index of the extent.
    extent: usize,
    /// The offset in the extent.
    offset: usize,
}

impl<'a> Reads<'a> {
    /// Checks the extents of a call, each a first block and a buffer. The volume has `volume_blocks`
    /// blocks.
    pub(crate) fn new(
        extents: impl IntoIterator<Item = (u64, &'a mut [u8])>,
        volume_blocks: u64,
    ) -> Result<Self, ReadError> {
        let mut reads = Self { extents: Vec::new(), buffers: Vec::new() };
        let mut offset = 0;
        for (lba, buffer) in extents {
            let len = buffer.len();
            let Some(blocks) = blocks_in_volume(lba, len, volume_blocks) else {
                return Err(ReadError::OutOfRange { lba, bytes: len, volume: volume_blocks });
            };
            if blocks > 0 {
                reads.extents.push(DriverExtent { lba, blocks });
                reads.buffers.push(ExtentBuffer { offset, bytes: buffer });
                offset += len;
            }
        }
        Ok(reads)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// Copies received bytes into the buffer of their extent. `offset` is their place in the whole call.
    /// Bytes beyond the end of the extent are dropped, because the target sent more than was requested.
    fn copy_received(&mut self, offset: usize, bytes: &[u8]) {
        let place = self.place_of(offset);
        let Some(buffer) = self.buffers.get_mut(place.extent) else { return };
        let destination = buffer.bytes.get_mut(place.offset..place.offset + bytes.len());
        if let Some(destination) = destination {
            destination.copy_from_slice(bytes);
        }
    }

    /// The place of the byte at `offset` of the whole call.
    fn place_of(&self, offset: usize) -> BytePlace {
        // The extents are sorted by their offsets, so the last one that begins at or before `offset` has
        // the byte.
        let begun_count = self.buffers.partition_point(|buffer| buffer.offset <= offset);
        let extent = begun_count.saturating_sub(1);
        let extent_offset = self.buffers.get(extent).map_or(0, |buffer| buffer.offset);
        BytePlace { extent, offset: offset - extent_offset }
    }

    /// The error of the call for a failure that the driver reports.
    fn read_error(&self, failure: ReadFailure, timeout: Option<Duration>) -> ReadError {
        match failure {
            ReadFailure::Deadline => ReadError::Deadline(timeout.unwrap_or_default()),
            ReadFailure::Status { offset, status } => {
                let place = self.place_of(offset);
                let first_lba = self.extents.get(place.extent).map_or(0, |extent| extent.lba);
                let lba = first_lba + (place.offset / BLOCK_BYTES) as u64;
                ReadError::Status { lba, status }
            }
        }
    }

    /// Reads all extents at once, through a stream that this thread has taken. Waits for `timeout` at
    /// most.
    pub(crate) fn run(
        &mut self,
        shell: &mut StreamShell,
        spin: &mut AdaptiveSpin,
        timeout: Option<Duration>,
    ) -> Result<(), ReadError> {
        shell.publish_marks()?;
        if self.is_empty() {
            return Ok(());
        }
        let now = now_ns();
        let deadline = timeout.map(|timeout| now.saturating_add(nanos(timeout)));
        let slot = shell.driver.begin_read(&self.extents, deadline, now);
        let result = loop {
            // Only a deadline needs the exact time. Otherwise the time of the last round saves reading
            // the clock.
            let now = if deadline.is_some() { now_ns() } else { shell.round_begun_ns };
            if let Some(result) = shell.driver.read_step(slot, now) {
                break result.map_err(|failure| self.read_error(failure, timeout));
            }
            let worked = shell.work(&mut |offset, bytes| self.copy_received(offset, bytes));
            if let Err(failure) = shell.publish_marks() {
                break Err(failure.into());
            }
            if shell.driver.read_waits(slot) {
                shell.poll_again_or_sleep(spin, worked, None);
            }
        };
        // The call returns the buffers to the caller. So the driver must drop data that arrives later.
        shell.driver.give_up_read(slot);
        result
    }
}

/// The number of blocks of `len` bytes at block `lba`. `None` if these are not whole blocks, or do not
/// lie in a volume of `volume_blocks` blocks.
pub(crate) fn blocks_in_volume(lba: u64, len: usize, volume_blocks: u64) -> Option<u32> {
    if !len.is_multiple_of(BLOCK_BYTES) {
        return None;
    }
    let blocks = u32::try_from(len / BLOCK_BYTES).ok()?;
    let end = lba.checked_add(u64::from(blocks))?;
    (end <= volume_blocks).then_some(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use riopipe_nvme::command::Status;

    #[test]
    fn bytes_find_their_extent_and_failures_their_block() {
        let (mut a, mut b, mut none) = ([0; 2 * BLOCK_BYTES], [0; BLOCK_BYTES], [0; 0]);
        let extents = [(7, &mut a[..]), (100, &mut none[..]), (3, &mut b[..])];
        let mut reads = Reads::new(extents, 100).unwrap();
        reads.copy_received(BLOCK_BYTES, &[1; BLOCK_BYTES]);
        reads.copy_received(2 * BLOCK_BYTES + 8, &[2; 8]);
        // Bytes beyond the requested ones are dropped.
        reads.copy_received(2 * BLOCK_BYTES + 8, &[3; BLOCK_BYTES]);
        let at = |offset| {
            let failure = ReadFailure::Status { offset, status: Status::INTERNAL };
            match reads.read_error(failure, None) {
                ReadError::Status { lba, .. } => lba,
                error => panic!("{error}"),
            }
        };
        assert_eq!([at(0), at(BLOCK_BYTES), at(2 * BLOCK_BYTES)], [7, 8, 3]);
        assert_eq!((a[0], a[BLOCK_BYTES], b[0], b[8], b[16]), (0, 1, 0, 2, 0));
    }

    #[test]
    fn extents_are_whole_blocks_of_the_volume() {
        for (lba, bytes) in [(0, 100), (99, 2 * BLOCK_BYTES), (u64::MAX, BLOCK_BYTES)] {
            let mut into = vec![0; bytes];
            let error = Reads::new([(lba, &mut into[..])], 100).unwrap_err();
            assert!(matches!(error, ReadError::OutOfRange { volume: 100, .. }), "{error}");
        }
        assert!(Reads::new([(100, &mut [][..])], 100).unwrap().is_empty());
    }
}
