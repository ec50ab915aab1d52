//! An ordered volume as the store of the file copy: one of its streams.

use std::{collections::VecDeque, time::Duration};

use riopipe::{
    Buf, BufError, EngineKind, Marks, Place, ReadError, Seq, Stream, StreamFailure,
    SubmitErrorKind, Until, Volume, WaitError,
};

use crate::{file_copy::Store, interrupt::Interrupt};

/// The stream for files.
pub const STREAM: u16 = 0;

/// A stream of an open volume.
#[derive(Debug)]
pub struct VolumeStore {
    stream: Stream,
    blocks: u64,
    engine: EngineKind,
    /// The groups that are not durable yet, and the bytes of data up to the end of each.
    pending: VecDeque<(Seq, u64)>,
    /// The bytes of data that were submitted, and those that are durable.
    submitted: u64,
    durable: u64,
    /// Knows what is not durable yet, for its note.
    interrupt: Interrupt,
}

/// Interval in which a wait reports how much is durable.
const REPORT_INTERVAL: Duration = Duration::from_millis(250);

/// The error of an operation.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No group can take a buffer.
    #[error(transparent)]
    Buf(#[from] BufError),
    /// A group was refused.
    #[error(transparent)]
    Submit(#[from] SubmitErrorKind),
    /// A wait ended early.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// A read failed.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The stream failed.
    #[error(transparent)]
    Stream(#[from] StreamFailure),
}

impl VolumeStore {
    /// A store on this stream of this volume.
    #[must_use]
    pub fn new(volume: &Volume, stream: Stream, interrupt: Interrupt) -> Self {
        let (blocks, engine) = (volume.blocks(), volume.engine());
        let pending = VecDeque::new();
        Self { stream, blocks, engine, pending, submitted: 0, durable: 0, interrupt }
    }

    /// Closes the stream in order: waits until all is durable.
    ///
    /// # Errors
    /// The stream has failed.
    pub fn close(mut self) -> Result<(), StreamFailure> {
        // This wait counts what is not durable yet, for the note about an interrupt. If the stream has
        // failed, the close returns the failure, too.
        let _ = self.settle(&mut |_| ());
        self.stream.close().map(|_| ())
    }

    /// Takes in how far the stream is durable.
    fn note_marks(&mut self, marks: Marks) {
        while let Some((seq, end)) = self.pending.front()
            && *seq <= marks.durable
        {
            self.durable = *end;
            self.pending.pop_front();
        }
        self.interrupt.set_backlog(self.submitted - self.durable);
    }

    fn submit_group(
        &mut self,
        lba: u64,
        buf: Buf,
        place: Place,
        durable: bool,
    ) -> Result<(), StoreError> {
        let group = self.stream.group().write(lba, buf, place);
        // The stream's own timeout bounds the wait for space: a target that stalls makes it fail.
        let submitted = match durable {
            true => group.submit_durable_or_wait(None),
            false => group.submit_or_wait(None),
        };
        let seq = submitted.map_err(|error| error.kind)?;
        self.pending.push_back((seq, self.submitted));
        // Sends submitted groups and receives answers.
        let marks = self.stream.poll()?;
        self.note_marks(marks);
        Ok(())
    }
}

impl Store for VolumeStore {
    type Buf = Buf;
    type Error = StoreError;

    fn blocks(&self) -> u64 {
        self.blocks
    }

    fn keeps_order(&self) -> bool {
        self.engine.capabilities().keeps_order
    }

    fn check(&mut self, lba: u64, blocks: u32, durable: bool) -> Result<(), StoreError> {
        Ok(self.stream.check_write(lba, blocks, durable)?)
    }

    fn buf(&mut self, len: usize) -> Result<Buf, StoreError> {
        Ok(self.stream.buf(len)?)
    }

    fn submit(&mut self, lba: u64, buf: Buf, place: Place) -> Result<(), StoreError> {
        self.submitted += buf.len() as u64;
        self.submit_group(lba, buf, place, false)
    }

    fn submit_durable(&mut self, lba: u64, buf: Buf, place: Place) -> Result<(), StoreError> {
        self.submit_group(lba, buf, place, true)
    }

    fn durable_bytes(&self) -> u64 {
        self.durable
    }

    fn settle(&mut self, progress: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
        let last = self.stream.last();
        loop {
            let marks = match self.stream.wait(Until::Durable(last), Some(REPORT_INTERVAL)) {
                Ok(marks) => marks,
                Err(WaitError::Deadline(_)) => self.stream.poll()?,
                Err(error) => return Err(error.into()),
            };
            self.note_marks(marks);
            progress(self.durable);
            if marks.durable >= last {
                return Ok(());
            }
        }
    }

    fn read(&mut self, lba: u64, into: &mut [u8]) -> Result<(), StoreError> {
        Ok(self.stream.read(lba, into, None)?)
    }
}
