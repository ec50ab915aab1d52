//! The reads that a stream's owner has submitted. Each has its memory here until its end is taken.

use std::any::Any;
use std::collections::VecDeque;
use std::time::Duration;

use riopipe_session::initiator::stream::ReadSlot;
use riopipe_session::initiator::stream_driver::{READS_MAX, ReadFailure};

use crate::BLOCK_BYTES;
use crate::error::ReadError;
use crate::failure::StreamFailure;

/// Memory that a [submitted read](crate::Stream::submit_read) fills. The stream has it until the end
/// of the read is [taken](crate::Stream::take_read).
pub trait ReadMemory: Any + Send {
    /// The length of the read, bytes: a multiple of 4096.
    fn length(&self) -> usize;

    /// Takes in bytes that have arrived, for `offset` bytes from the start. They lie within the
    /// length. The thread is the owner's in a call, or the volume's background thread.
    fn put(&mut self, offset: usize, bytes: &[u8]);
}

impl ReadMemory for Vec<u8> {
    fn length(&self) -> usize {
        self.len()
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        self[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

impl ReadMemory for Box<[u8]> {
    fn length(&self) -> usize {
        self.len()
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        self[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

/// The number of a submitted read. No other read of the stream has it, also after the stream was
/// [reopened](crate::Stream::reopen).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReadId(pub u64);

/// The end of a submitted read. Each read has exactly one.
pub struct ReadEnd {
    /// The number of the read.
    pub id: ReadId,
    /// The memory of the read. After an error its content is not defined.
    pub memory: Box<dyn ReadMemory>,
    /// Whether the data is there, or the error.
    pub result: Result<(), ReadError>,
}

impl ReadEnd {
    /// The memory, as the type with which the read was submitted, if it succeeded. `None` for another
    /// type.
    ///
    /// # Errors
    /// The error of the read. The memory is dropped.
    pub fn into_memory<M: ReadMemory>(self) -> Result<Option<M>, ReadError> {
        self.result?;
        let memory: Box<dyn Any> = self.memory;
        Ok(memory.downcast::<M>().ok().map(|memory| *memory))
    }
}

impl std::fmt::Debug for ReadEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { id, memory, result } = self;
        let mut debug = f.debug_struct("ReadEnd");
        debug.field("id", id).field("bytes", &memory.length()).field("result", result).finish()
    }
}

/// A read that was not submitted, and its memory.
#[derive(thiserror::Error)]
#[error("the read was not submitted: {error}")]
pub struct ReadNotSubmitted<M> {
    /// The reason.
    #[source]
    pub error: ReadError,
    /// The memory.
    pub memory: M,
}

impl<M> std::fmt::Debug for ReadNotSubmitted<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadNotSubmitted").field("error", &self.error).finish_non_exhaustive()
    }
}

/// A read that has not ended.
struct SubmittedRead {
    id: ReadId,
    lba: u64,
    timeout: Option<Duration>,
    length: usize,
    memory: Box<dyn ReadMemory>,
}

impl SubmittedRead {
    fn end(self, result: Result<(), ReadError>) -> ReadEnd {
        ReadEnd { id: self.id, memory: self.memory, result }
    }

    /// The error for a failure that the driver reports.
    fn error(&self, failure: ReadFailure) -> ReadError {
        match failure {
            ReadFailure::Deadline => ReadError::Deadline(self.timeout.unwrap_or_default()),
            ReadFailure::Status { offset, status } => {
                ReadError::Status { lba: self.lba + (offset / BLOCK_BYTES) as u64, status }
            }
        }
    }
}

/// The submitted reads of one stream, with their memory.
#[derive(Default)]
pub(crate) struct SubmittedReads {
    /// The reads that have not ended, by the driver's slot.
    in_flight: Vec<Option<SubmittedRead>>,
    in_flight_count: usize,
    /// The ends that the owner has not taken, in their order.
    ended: VecDeque<ReadEnd>,
    /// The number of the last read.
    last_id: u64,
}

impl SubmittedReads {
    /// Whether there is no read, and no end of one.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.in_flight_count == 0 && self.ended.is_empty()
    }

    /// The number of ends that the owner has not taken.
    #[inline]
    pub(crate) fn ended_count(&self) -> usize {
        self.ended.len()
    }

    /// Whether no other read may be submitted before an end is taken.
    pub(crate) fn is_full(&self) -> bool {
        self.in_flight_count + self.ended.len() >= READS_MAX
    }

    /// The number of the next read.
    fn next_id(&mut self) -> ReadId {
        self.last_id += 1;
        ReadId(self.last_id)
    }

    /// Adds a read that the driver has begun.
    pub(crate) fn add(
        &mut self,
        slot: ReadSlot,
        lba: u64,
        memory: Box<dyn ReadMemory>,
        timeout: Option<Duration>,
    ) -> ReadId {
        let index = usize::from(slot.0);
        if self.in_flight.len() <= index {
            self.in_flight.resize_with(index + 1, || None);
        }
        let id = self.next_id();
        let length = memory.length();
        self.in_flight[index] = Some(SubmittedRead { id, lba, timeout, length, memory });
        self.in_flight_count += 1;
        id
    }

    /// Adds a read without blocks, which has ended.
    pub(crate) fn add_ended(&mut self, memory: Box<dyn ReadMemory>) -> ReadId {
        let id = self.next_id();
        self.ended.push_back(ReadEnd { id, memory, result: Ok(()) });
        id
    }

    /// Takes in data of a read. Returns false if the slot has no submitted read. Bytes beyond the end
    /// of the read are dropped, because the target sent more than was requested.
    #[inline]
    pub(crate) fn put(&mut self, slot: ReadSlot, offset: usize, bytes: &[u8]) -> bool {
        let read = self.in_flight.get_mut(usize::from(slot.0));
        let Some(read) = read.and_then(Option::as_mut) else { return false };
        let end = offset.checked_add(bytes.len());
        if end.is_some_and(|end| end <= read.length) {
            read.memory.put(offset, bytes);
        }
        true
    }

    /// Ends the reads for which `step` returns how they have ended.
    pub(crate) fn end_some(
        &mut self,
        mut step: impl FnMut(ReadSlot) -> Option<Result<(), ReadFailure>>,
    ) {
        for (place, slot) in self.in_flight.iter_mut().zip(0..) {
            if place.is_none() {
                continue;
            }
            let Some(result) = step(ReadSlot(slot)) else { continue };
            let read = place.take().expect("checked above");
            let result = result.map_err(|failure| read.error(failure));
            self.in_flight_count -= 1;
            self.ended.push_back(read.end(result));
        }
    }

    /// Ends a read before its data has arrived. Returns its slot; `None` if it has ended before.
    pub(crate) fn cancel(&mut self, id: ReadId) -> Option<ReadSlot> {
        let mut places = self.in_flight.iter_mut().zip(0..);
        let (place, slot) =
            places.find(|(place, _)| place.as_ref().is_some_and(|read| read.id == id))?;
        let read = place.take().expect("found above");
        self.in_flight_count -= 1;
        self.ended.push_back(read.end(Err(ReadError::Cancelled)));
        Some(ReadSlot(slot))
    }

    /// Ends all reads with the failure of the stream. `give_up` gives up the read of a slot.
    pub(crate) fn fail(&mut self, failure: &StreamFailure, mut give_up: impl FnMut(ReadSlot)) {
        for (place, slot) in self.in_flight.iter_mut().zip(0..) {
            if let Some(read) = place.take() {
                give_up(ReadSlot(slot));
                self.in_flight_count -= 1;
                self.ended.push_back(read.end(Err(failure.clone().into())));
            }
        }
    }

    /// Takes the end of the read that has ended first.
    pub(crate) fn take_end(&mut self) -> Option<ReadEnd> {
        self.ended.pop_front()
    }

    /// Drops all reads and ends, with their memory.
    pub(crate) fn clear(&mut self) {
        *self = Self { last_id: self.last_id, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use riopipe_nvme::command::Status;

    fn added(reads: &mut SubmittedReads, slot: u16, lba: u64) -> ReadId {
        reads.add(ReadSlot(slot), lba, Box::new(vec![0_u8; 2 * BLOCK_BYTES]), None)
    }

    #[test]
    fn data_reaches_the_memory_of_its_read_and_nothing_beyond() {
        let mut reads = SubmittedReads::default();
        let first = added(&mut reads, 3, 7);
        let second = added(&mut reads, 0, 9);
        assert!(reads.put(ReadSlot(3), BLOCK_BYTES, &[1; 8]));
        assert!(reads.put(ReadSlot(0), 0, &[2; 8]));
        // A target that sends more than was requested: the bytes are dropped.
        assert!(reads.put(ReadSlot(3), 2 * BLOCK_BYTES - 4, &[3; 8]));
        assert!(reads.put(ReadSlot(3), usize::MAX, &[3; 8]));
        assert!(!reads.put(ReadSlot(1), 0, &[4; 8]), "the slot has no submitted read");
        assert!(!reads.put(ReadSlot(9), 0, &[4; 8]));
        reads.end_some(|slot| (slot == ReadSlot(3)).then_some(Ok(())));
        assert!(!reads.put(ReadSlot(3), 0, &[5; 8]), "the read has ended");
        let end = reads.take_end().unwrap();
        assert_eq!(end.id, first);
        let memory: Vec<u8> = end.into_memory().unwrap().unwrap();
        assert_eq!(memory[..BLOCK_BYTES], [0; BLOCK_BYTES]);
        assert_eq!(memory[BLOCK_BYTES..BLOCK_BYTES + 8], [1; 8]);
        assert_eq!(memory[2 * BLOCK_BYTES - 8..], [0; 8]);
        assert!(reads.take_end().is_none() && !reads.is_empty());
        assert_eq!(reads.cancel(second), Some(ReadSlot(0)));
        assert_eq!(reads.cancel(second), None);
        assert!(matches!(reads.take_end().unwrap().result, Err(ReadError::Cancelled)));
        assert!(reads.is_empty());
    }

    #[test]
    fn a_failure_names_the_block_of_its_read() {
        let mut reads = SubmittedReads::default();
        added(&mut reads, 0, 7);
        let status = Status::INTERNAL;
        let failure = ReadFailure::Status { offset: BLOCK_BYTES, status };
        reads.end_some(|_| Some(Err(failure)));
        let error = reads.take_end().unwrap().result.unwrap_err();
        assert!(matches!(error, ReadError::Status { lba: 8, .. }), "{error}");
    }
}
