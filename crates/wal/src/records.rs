//! Reading a log.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use riopipe_wal_core::Lsn;
use riopipe_wal_core::opening::Read;
use riopipe_wal_core::reading::{self, Span, Walk};
use riopipe_wal_core::record::Kind;

use crate::error::{ReadError, WalFailure};
use crate::marks::Marks;
use crate::queue::{Queue, ReadRequest};

/// A record of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its Lsn.
    pub lsn: Lsn,
    /// The Lsn at which replay begins, if the record is a checkpoint.
    pub checkpoint: Option<Lsn>,
    /// The bytes that were appended.
    pub bytes: Vec<u8>,
}

impl Record {
    /// The record as its caller sees it; `None` if it is a checkpoint without its Lsn.
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

/// Lets the committer read blocks of the ring, from `place` in the ring on, and waits for them.
fn read_through_committer(queue: &Queue, place: u64, bytes: &mut [u8]) -> Result<(), ReadError> {
    let (reply, answer) = sync_channel(1);
    queue.request(|requests| {
        requests.reads.push(ReadRequest { place, bytes: bytes.len(), reply });
    })?;
    // The channel closes without an answer only if the log has ended meanwhile.
    let read = answer.recv().map_err(|_| WalFailure::Closed)??;
    bytes.copy_from_slice(&read);
    Ok(())
}

/// The next record of a walk; `None` at the end.
pub(crate) fn next_record(
    walk: &mut Walk,
    read: &mut Read<'_, ReadError>,
) -> Result<Option<Record>, reading::ReadError<ReadError>> {
    let Some(record) = walk.next_record(read)? else { return Ok(None) };
    let lsn = record.lsn;
    Ok(Some(Record::of(record).ok_or(reading::ReadError::Record { lsn })?))
}

/// The records of a log that were durable when this was made, in order. Blocks are read when they
/// are needed, by the log's own thread. An error ends the iteration.
#[derive(Debug)]
pub struct Records {
    walk: Walk,
    queue: Arc<Queue>,
    marks: Arc<Marks>,
    /// The Lsn at which the next record may begin.
    next_lsn: Lsn,
    /// Whether the iteration has ended.
    has_ended: bool,
}

impl Records {
    pub(crate) fn new(queue: Arc<Queue>, marks: Arc<Marks>, span: Span) -> Self {
        let next_lsn = span.from;
        Self { walk: Walk::new(span), queue, marks, next_lsn, has_ended: false }
    }
}

impl Iterator for Records {
    type Item = Result<Record, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_ended {
            return None;
        }
        let Self { walk, queue, .. } = self;
        match next_record(walk, &mut |place, bytes| read_through_committer(queue, place, bytes)) {
            Ok(Some(record)) => {
                self.next_lsn = record.lsn.plus(1);
                Some(Ok(record))
            }
            Ok(None) => {
                self.has_ended = true;
                None
            }
            Err(error) => {
                self.has_ended = true;
                let progress = self.marks.progress();
                let trim = (progress.trimmed, progress.oldest_block);
                Some(Err(ReadError::of(error, self.next_lsn, trim)))
            }
        }
    }
}
