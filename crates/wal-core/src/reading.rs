//! Reading: from blocks to records.
//!
//! [`locate`] finds the block with the first wanted byte. [`Assembler`] puts records together from
//! consecutive blocks. [`Walk`] does both, and reads the blocks when they are needed.

use alloc::vec::Vec;

use riopipe_order::probe::{Plant, is_bug_planted};

use crate::format::{BlockError, HEADER_BYTES, Header};
use crate::opening::Read;
use crate::record::{FRAME_BYTES, Frame, Kind};
use crate::ring::Ring;
use crate::{BLOCK_BYTES, Crc32c, Lsn};

/// A record that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its Lsn.
    pub lsn: Lsn,
    /// Its kind.
    pub kind: Kind,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// The reason why a log can't be read on. `E` is the error of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError<E> {
    /// A read failed.
    #[error(transparent)]
    Read(#[from] E),
    /// A block of the log is damaged.
    #[error("block {number} of the log: {error}")]
    Block {
        /// Number of the block.
        number: u64,
        /// The damage.
        error: BlockError,
    },
    /// A block is valid, but does not follow the one before it.
    #[error("block {number} of the log does not continue the one before it")]
    Chain {
        /// Number of the block.
        number: u64,
    },
    /// A record is damaged, though its blocks are valid.
    #[error("the record at {lsn} does not fit its checksum")]
    Record {
        /// Lsn of the record.
        lsn: Lsn,
    },
}

/// Finds the block of a log that holds the byte `lsn`, by a binary search over the block numbers
/// `blocks`. Returns the number of the last block that begins at or before `lsn`, or the first
/// number if no block does.
///
/// # Errors
/// [`ReadError`].
pub fn locate<E>(
    ring: Ring,
    log: u64,
    crc: Crc32c,
    lsn: Lsn,
    blocks: core::ops::Range<u64>,
    read: &mut Read<'_, E>,
) -> Result<u64, ReadError<E>> {
    // The block is in `low..high`.
    let (mut low, mut high) = (blocks.start, blocks.end);
    while high.saturating_sub(low) > 1 {
        let middle = low + (high - low) / 2;
        let mut block = [0; BLOCK_BYTES];
        read(middle % ring.blocks(), &mut block)?;
        let header = parse_header(&block, middle, log, crc)?;
        if header.lsn <= lsn { low = middle } else { high = middle }
    }
    Ok(low)
}

/// The header of block `number` of the log, which was read from the block's place.
fn parse_header<E>(
    block: &[u8],
    number: u64,
    log: u64,
    crc: Crc32c,
) -> Result<Header, ReadError<E>> {
    let header =
        Header::parse(block, log, crc).map_err(|error| ReadError::Block { number, error })?;
    if header.number == number { Ok(header) } else { Err(ReadError::Chain { number }) }
}

/// Assembles records from the consecutive blocks of a log.
#[derive(Debug)]
pub struct Assembler {
    log: u64,
    crc: Crc32c,
    /// Records that begin before this Lsn are not returned.
    from: Lsn,
    /// The header of the last block that was added.
    last: Option<Header>,
    /// Bytes from the begin of a record on.
    bytes: Vec<u8>,
    /// Number of bytes at the front of `bytes` that belong to records that were returned.
    consumed: usize,
    /// The Lsn of the first byte after the consumed ones; `None` until a record begins.
    next_record: Option<Lsn>,
}

impl Assembler {
    /// An assembler that returns the records that begin at `from` or later. Its first block is the
    /// one that holds the byte `from`.
    #[must_use]
    pub fn new(log: u64, crc: Crc32c, from: Lsn) -> Self {
        Self { log, crc, from, last: None, bytes: Vec::new(), consumed: 0, next_record: None }
    }

    /// Adds the next block.
    ///
    /// # Errors
    /// [`ReadError::Block`] and [`ReadError::Chain`]: the block is not the log's block `number`.
    pub fn add_block<E>(&mut self, number: u64, block: &[u8]) -> Result<(), ReadError<E>> {
        let header = parse_header(block, number, self.log, self.crc)?;
        if let Some(last) = &self.last
            && !header.comes_after(last)
        {
            return Err(ReadError::Chain { number });
        }
        let payload = &block[HEADER_BYTES..HEADER_BYTES + usize::from(header.used)];
        let comes_after_crash = self.last.is_some_and(|last| last.epoch != header.epoch)
            && !is_bug_planted(Plant::W2TornRecord);
        if comes_after_crash || self.next_record.is_none() {
            // The crash has cut the record that these bytes belong to, and it was never finished.
            // So the next record is the first one that begins in this block.
            self.bytes.clear();
            self.next_record = header.first.map(|first| header.lsn.plus(first.into()));
            let first = usize::from(header.first.unwrap_or(header.used));
            self.bytes.extend_from_slice(&payload[first..]);
        } else {
            self.bytes.drain(..self.consumed);
            self.bytes.extend_from_slice(payload);
        }
        self.consumed = 0;
        self.last = Some(header);
        Ok(())
    }

    /// The next complete record; `None` if the next record needs another block.
    ///
    /// # Errors
    /// [`ReadError::Record`].
    pub fn next_record<E>(&mut self) -> Result<Option<Record>, ReadError<E>> {
        while let Some(lsn) = self.next_record {
            let rest = &self.bytes[self.consumed..];
            let Some((frame, rest)) = rest.split_first_chunk::<FRAME_BYTES>() else { break };
            let frame = Frame::decode(frame).ok_or(ReadError::Record { lsn })?;
            let Some(record) = rest.get(..frame.len) else { break };
            self.consumed += frame.total();
            self.next_record = Some(lsn.plus(frame.total()));
            if lsn < self.from {
                continue;
            }
            if !frame.fits(record, lsn, self.crc) && !is_bug_planted(Plant::W2TornRecord) {
                return Err(ReadError::Record { lsn });
            }
            return Ok(Some(Record { lsn, kind: frame.kind, bytes: record.to_vec() }));
        }
        Ok(None)
    }
}

/// Number of blocks per read of a [`Walk`]: 128 KiB.
const READ_BLOCKS: u64 = 32;

/// The part of a log that a [`Walk`] reads.
#[derive(Clone, Debug)]
pub struct Span {
    /// The log's blocks.
    pub ring: Ring,
    /// The log's number.
    pub log: u64,
    /// The CRC32C implementation.
    pub crc: Crc32c,
    /// Records that begin before this Lsn are left out.
    pub from: Lsn,
    /// The numbers of the blocks to read.
    pub blocks: core::ops::Range<u64>,
}

/// Reads the records of a part of a log, in order. It reads blocks when they are needed.
#[derive(Debug)]
pub struct Walk {
    span: Span,
    assembler: Assembler,
    /// Number of the next block for the assembler; `None` before the first one is located.
    next_block: Option<u64>,
    /// Consecutive blocks that were read.
    blocks_read: Vec<u8>,
    /// Number of bytes at the front of `blocks_read` that the assembler has.
    assembled: usize,
}

impl Walk {
    /// A walk that has read nothing yet.
    #[must_use]
    pub fn new(span: Span) -> Self {
        let assembler = Assembler::new(span.log, span.crc, span.from);
        Self { span, assembler, next_block: None, blocks_read: Vec::new(), assembled: 0 }
    }

    /// The next record; `None` at the end. `read` is called for the blocks that it needs.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn next_record<E>(
        &mut self,
        read: &mut Read<'_, E>,
    ) -> Result<Option<Record>, ReadError<E>> {
        let Span { ring, log, crc, from, ref blocks } = self.span;
        loop {
            if let Some(record) = self.assembler.next_record()? {
                return Ok(Some(record));
            }
            let number = match self.next_block {
                Some(number) => number,
                None => locate(ring, log, crc, from, blocks.clone(), read)?,
            };
            self.next_block = Some(number);
            if number >= blocks.end {
                return Ok(None);
            }
            if self.assembled == self.blocks_read.len() {
                let place = number % ring.blocks();
                let run = READ_BLOCKS.min(blocks.end - number).min(ring.blocks() - place);
                self.blocks_read.resize(run as usize * BLOCK_BYTES, 0);
                self.assembled = 0;
                read(place, &mut self.blocks_read)?;
            }
            let block = &self.blocks_read[self.assembled..self.assembled + BLOCK_BYTES];
            self.assembler.add_block(number, block)?;
            self.assembled += BLOCK_BYTES;
            self.next_block = Some(number + 1);
        }
    }
}
