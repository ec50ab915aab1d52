//! Reading a log.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use riopipe::{BLOCK_BYTES, crc32c};
use riopipe_wal_core::Lsn;
use riopipe_wal_core::reading::{self, Assembler, locate};
use riopipe_wal_core::record::Kind;
use riopipe_wal_core::ring::Ring;

use crate::error::{ReadError, WalFailure};
use crate::marks::Marks;
use crate::queue::{Queue, ReadRequest};

/// Number of blocks per read: 128 KiB.
const READ_BLOCKS: u64 = 32;

/// A record of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its Lsn.
    pub lsn: Lsn,
    /// Of a checkpoint: the Lsn at which replay begins.
    pub checkpoint: Option<Lsn>,
    /// The bytes that were appended.
    pub bytes: Vec<u8>,
}

impl Record {
    pub(crate) fn of(record: reading::Record) -> Option<Self> {
        let reading::Record { lsn, kind, mut bytes } = record;
        let checkpoint = match kind {
            Kind::Data => None,
            Kind::Checkpoint => {
                let from = bytes.first_chunk::<8>().copied()?;
                bytes.drain(..8);
                Some(Lsn(u64::from_le_bytes(from)))
            }
        };
        Some(Self { lsn, checkpoint, bytes })
    }
}

/// Reads blocks of the ring, from a place in it on, into `bytes`.
pub(crate) trait Blocks {
    fn read(&mut self, place: u64, bytes: &mut [u8]) -> Result<(), ReadError>;
}

/// Reads through the committer.
#[derive(Debug)]
pub(crate) struct Remote(pub(crate) Arc<Queue>);

impl Blocks for Remote {
    fn read(&mut self, place: u64, bytes: &mut [u8]) -> Result<(), ReadError> {
        let (reply, answer) = sync_channel(1);
        self.0.ask(|requests| {
            requests.reads.push(ReadRequest { place, bytes: bytes.len(), reply });
        })?;
        // The channel closes without an answer only if the log has ended meanwhile.
        let read = answer.recv().map_err(|_| WalFailure::Closed)??;
        bytes.copy_from_slice(&read);
        Ok(())
    }
}

/// The part of a log that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) ring: Ring,
    pub(crate) log: u64,
    /// Records from this Lsn on.
    pub(crate) from: Lsn,
    /// The numbers of its blocks.
    pub(crate) blocks: (u64, u64),
}

/// Turns blocks into records.
#[derive(Debug)]
pub(crate) struct Walk<B> {
    blocks: B,
    span: Span,
    assembler: Assembler,
    /// Number of the next block, `None` before the first is found.
    next: Option<u64>,
    /// Blocks that were read; the first `given` bytes are processed.
    bytes: Vec<u8>,
    given: usize,
}

impl<B: Blocks> Walk<B> {
    pub(crate) fn new(blocks: B, span: Span) -> Self {
        let assembler = Assembler::new(span.log, crc32c, span.from);
        Self { blocks, span, assembler, next: None, bytes: Vec::new(), given: 0 }
    }

    /// The next record; `None` at the end.
    pub(crate) fn record(&mut self) -> Result<Option<Record>, reading::ReadError<ReadError>> {
        let Span { ring, log, from, blocks: (first, end) } = self.span;
        loop {
            if let Some(record) = self.assembler.record()? {
                let lsn = record.lsn;
                let record = Record::of(record).ok_or(reading::ReadError::Record { lsn })?;
                return Ok(Some(record));
            }
            let next = match self.next {
                Some(next) => next,
                None => {
                    let mut read = |place: u64, bytes: &mut [u8]| self.blocks.read(place, bytes);
                    locate(ring, log, crc32c, from, first..end, &mut read)?
                }
            };
            self.next = Some(next);
            if next >= end {
                return Ok(None);
            }
            if self.given == self.bytes.len() {
                let place = next % ring.blocks();
                let run = READ_BLOCKS.min(end - next).min(ring.blocks() - place);
                self.bytes.resize(run as usize * BLOCK_BYTES, 0);
                self.given = 0;
                self.blocks.read(place, &mut self.bytes)?;
            }
            let block = &self.bytes[self.given..self.given + BLOCK_BYTES];
            self.assembler.block(next, block)?;
            self.given += BLOCK_BYTES;
            self.next = Some(next + 1);
        }
    }
}

/// The records of a log that were durable when this was made, in order. Blocks are read when they
/// are needed, by the log's own thread. An error ends the iteration.
#[derive(Debug)]
pub struct Records {
    walk: Walk<Remote>,
    marks: Arc<Marks>,
    /// The Lsn at which the next record may begin.
    at: Lsn,
    is_over: bool,
}

impl Records {
    pub(crate) fn new(queue: Arc<Queue>, marks: Arc<Marks>, span: Span) -> Self {
        Self { walk: Walk::new(Remote(queue), span), marks, at: span.from, is_over: false }
    }
}

impl Iterator for Records {
    type Item = Result<Record, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        match self.walk.record() {
            Ok(Some(record)) => {
                self.at = record.lsn.plus(1);
                Some(Ok(record))
            }
            Ok(None) => {
                self.is_over = true;
                None
            }
            Err(error) => {
                self.is_over = true;
                Some(Err(ReadError::of(error, self.at, self.marks.progress().trimmed)))
            }
        }
    }
}
