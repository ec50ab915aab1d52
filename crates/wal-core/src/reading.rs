//! Reading: from blocks to records.

use alloc::vec::Vec;

use riopipe_order::probe::{Plant, planted};

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

/// The block of a log that holds the byte `lsn`: the last of `blocks` (numbers) that begins at or
/// before it, or the first of them if none does.
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
    let (mut at, mut beyond) = (blocks.start, blocks.end);
    while beyond.saturating_sub(at) > 1 {
        let middle = at + (beyond - at) / 2;
        let mut block = [0; BLOCK_BYTES];
        read(middle % ring.blocks(), &mut block)?;
        let header = header(&block, middle, log, crc)?;
        if header.lsn <= lsn { at = middle } else { beyond = middle }
    }
    Ok(at)
}

fn header<E>(block: &[u8], number: u64, log: u64, crc: Crc32c) -> Result<Header, ReadError<E>> {
    let header =
        Header::parse(block, log, crc).map_err(|error| ReadError::Block { number, error })?;
    if header.number == number { Ok(header) } else { Err(ReadError::Chain { number }) }
}

/// Assembles records from the consecutive blocks of a log.
#[derive(Debug)]
pub struct Assembler {
    log: u64,
    crc: Crc32c,
    from: Lsn,
    last: Option<Header>,
    /// Bytes from the beginning of a record on; the first `done` bytes belong to records that were
    /// returned.
    bytes: Vec<u8>,
    done: usize,
    /// The Lsn of the first byte after `done`; `None` until a record begins.
    at: Option<Lsn>,
}

impl Assembler {
    /// An assembler that returns the records that begin at `from` or later. Its first block is the
    /// one that holds the byte `from`.
    #[must_use]
    pub fn new(log: u64, crc: Crc32c, from: Lsn) -> Self {
        Self { log, crc, from, last: None, bytes: Vec::new(), done: 0, at: None }
    }

    /// Takes the next block.
    ///
    /// # Errors
    /// [`ReadError::Block`] and [`ReadError::Chain`]: the block is not the log's block `number`.
    pub fn block<E>(&mut self, number: u64, block: &[u8]) -> Result<(), ReadError<E>> {
        let header = header(block, number, self.log, self.crc)?;
        if let Some(last) = &self.last
            && !header.comes_after(last)
        {
            return Err(ReadError::Chain { number });
        }
        let payload = &block[HEADER_BYTES..HEADER_BYTES + usize::from(header.used)];
        let is_cut = self.last.is_some_and(|last| last.epoch != header.epoch)
            && !planted(Plant::W2TornRecord);
        if is_cut || self.at.is_none() {
            // There was a crash before this block: a record that it cut was never finished.
            self.bytes.clear();
            self.done = 0;
            self.at = header.first.map(|first| header.lsn.plus(first.into()));
            self.bytes
                .extend_from_slice(&payload[usize::from(header.first.unwrap_or(header.used))..]);
        } else {
            self.bytes.drain(..self.done);
            self.done = 0;
            self.bytes.extend_from_slice(payload);
        }
        self.last = Some(header);
        Ok(())
    }

    /// The next complete record; `None`: it needs another block.
    ///
    /// # Errors
    /// [`ReadError::Record`].
    pub fn record<E>(&mut self) -> Result<Option<Record>, ReadError<E>> {
        while let Some(lsn) = self.at {
            let rest = &self.bytes[self.done..];
            let Some((frame, rest)) = rest.split_first_chunk::<FRAME_BYTES>() else { break };
            let frame = Frame::decode(frame).ok_or(ReadError::Record { lsn })?;
            let Some(record) = rest.get(..frame.len) else { break };
            self.done += frame.total();
            self.at = Some(lsn.plus(frame.total()));
            if lsn < self.from {
                continue;
            }
            if !frame.fits(record, lsn, self.crc) && !planted(Plant::W2TornRecord) {
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
    /// Number of the next block, `None` before the first is found.
    next: Option<u64>,
    /// Blocks that were read; the first `given` bytes are processed.
    bytes: Vec<u8>,
    given: usize,
}

impl Walk {
    /// A walk that has read nothing yet.
    #[must_use]
    pub fn new(span: Span) -> Self {
        let assembler = Assembler::new(span.log, span.crc, span.from);
        Self { span, assembler, next: None, bytes: Vec::new(), given: 0 }
    }

    /// The next record; `None` at the end. `read` is called for the blocks that it needs.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn record<E>(&mut self, read: &mut Read<'_, E>) -> Result<Option<Record>, ReadError<E>> {
        let Span { ring, log, crc, from, ref blocks } = self.span;
        loop {
            if let Some(record) = self.assembler.record()? {
                return Ok(Some(record));
            }
            let next = match self.next {
                Some(next) => next,
                None => locate(ring, log, crc, from, blocks.clone(), read)?,
            };
            self.next = Some(next);
            if next >= blocks.end {
                return Ok(None);
            }
            if self.given == self.bytes.len() {
                let place = next % ring.blocks();
                let run = READ_BLOCKS.min(blocks.end - next).min(ring.blocks() - place);
                self.bytes.resize(run as usize * BLOCK_BYTES, 0);
                self.given = 0;
                read(place, &mut self.bytes)?;
            }
            let block = &self.bytes[self.given..self.given + BLOCK_BYTES];
            self.assembler.block(next, block)?;
            self.given += BLOCK_BYTES;
            self.next = Some(next + 1);
        }
    }
}
