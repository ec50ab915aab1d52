//! Reads of volume blocks into the caller's buffers, by a stream or by a reader of the volume.

use std::time::Duration;

use riopipe_net::{Waiter, now_ns};
use riopipe_session::initiator::stream::ReadExtent as Extent;
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

/// The extents of one call, checked, and the offset of each in the bytes of the whole call.
#[derive(Debug)]
pub(crate) struct Reads<'a> {
    extents: Vec<Extent>,
    parts: Vec<(usize, &'a mut [u8])>,
}

impl<'a> Reads<'a> {
    /// The extents of a call on a volume of `volume` blocks. Empty ones are left out.
    pub(crate) fn new(
        extents: impl IntoIterator<Item = (u64, &'a mut [u8])>,
        volume: u64,
    ) -> Result<Self, ReadError> {
        let mut reads = Self { extents: Vec::new(), parts: Vec::new() };
        let mut before = 0;
        for (lba, into) in extents {
            let bytes = into.len();
            let blocks = u32::try_from(bytes / BLOCK_BYTES).ok().filter(|blocks| {
                let end = lba.checked_add(u64::from(*blocks));
                bytes.is_multiple_of(BLOCK_BYTES) && end.is_some_and(|end| end <= volume)
            });
            let blocks = blocks.ok_or(ReadError::OutOfRange { lba, bytes, volume })?;
            if blocks > 0 {
                reads.extents.push(Extent { lba, blocks });
                reads.parts.push((before, into));
                before += bytes;
            }
        }
        Ok(reads)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// Copies received bytes of one extent, by their offset in the whole call.
    fn put(&mut self, offset: usize, bytes: &[u8]) {
        let (index, at) = self.place(offset);
        if let Some((_, into)) = self.parts.get_mut(index)
            && let Some(part) = into.get_mut(at..at + bytes.len())
        {
            part.copy_from_slice(bytes);
        }
    }

    /// The extent in which an offset of the whole call lies, and the offset in that extent.
    fn place(&self, offset: usize) -> (usize, usize) {
        let index = self.parts.partition_point(|(start, _)| *start <= offset).saturating_sub(1);
        (index, offset - self.parts.get(index).map_or(0, |(start, _)| *start))
    }

    fn error(&self, failure: ReadFailure, timeout: Option<Duration>) -> ReadError {
        match failure {
            ReadFailure::Deadline => ReadError::Deadline(timeout.unwrap_or_default()),
            ReadFailure::Status { offset, status } => {
                let (index, at) = self.place(offset);
                let lba = self.extents.get(index).map_or(0, |extent| extent.lba);
                ReadError::Status { lba: lba + (at / BLOCK_BYTES) as u64, status }
            }
        }
    }

    /// Reads all extents at once, through a stream that this thread owns; gives up after `timeout`.
    pub(crate) fn run(
        &mut self,
        shell: &mut StreamShell,
        waiter: &mut Waiter,
        timeout: Option<Duration>,
    ) -> Result<(), ReadError> {
        shell.marks()?;
        if self.is_empty() {
            return Ok(());
        }
        let now = now_ns();
        let deadline = timeout.map(|timeout| now.saturating_add(nanos(timeout)));
        shell.driver.begin_read(&self.extents, deadline, now);
        let result = loop {
            // Without a deadline, the time of the last round is exact enough.
            let now = if deadline.is_some() { now_ns() } else { shell.now };
            if let Some(result) = shell.driver.read_step(now) {
                break result.map_err(|failure| self.error(failure, timeout));
            }
            let worked = shell.work(&mut |offset, bytes| self.put(offset, bytes));
            if let Err(failure) = shell.marks() {
                break Err(failure.into());
            }
            if shell.driver.read_waits() {
                shell.poll_again_or_sleep(waiter, worked, None);
            }
        };
        // After this, no byte of a read that has not ended may get into the caller's buffers.
        shell.driver.give_up_read();
        result
    }
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
        reads.put(BLOCK_BYTES, &[1; BLOCK_BYTES]);
        reads.put(2 * BLOCK_BYTES + 8, &[2; 8]);
        // Bytes beyond the requested ones are dropped.
        reads.put(2 * BLOCK_BYTES + 8, &[3; BLOCK_BYTES]);
        let at = |offset| {
            let failure = ReadFailure::Status { offset, status: Status::INTERNAL };
            match reads.error(failure, None) {
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
