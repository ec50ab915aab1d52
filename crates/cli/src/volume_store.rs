//! An ordered volume as the store of the file copy: one of its streams.

use riopipe::{
    Buf, BufError, EngineKind, Place, ReadError, Stream, StreamFailure, SubmitErrorKind, Until,
    Volume, WaitError,
};

use crate::file_copy::Store;

/// The stream for files.
pub const STREAM: u16 = 0;

/// A stream of an open volume.
#[derive(Debug)]
pub struct VolumeStore {
    stream: Stream,
    blocks: u64,
    engine: EngineKind,
}

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
    pub fn new(volume: &Volume, stream: Stream) -> Self {
        Self { stream, blocks: volume.blocks(), engine: volume.engine() }
    }

    /// Closes the stream in order: waits until all is durable.
    ///
    /// # Errors
    /// The stream has failed.
    pub fn close(self) -> Result<(), StreamFailure> {
        self.stream.close().map(|_| ())
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
        submitted.map_err(|error| error.kind)?;
        // Sends submitted groups and receives answers; the marks don't matter yet.
        self.stream.poll()?;
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
        self.submit_group(lba, buf, place, false)
    }

    fn submit_durable(&mut self, lba: u64, buf: Buf, place: Place) -> Result<(), StoreError> {
        self.submit_group(lba, buf, place, true)
    }

    fn settle(&mut self) -> Result<(), StoreError> {
        let last = self.stream.last();
        self.stream.wait(Until::Durable(last), None)?;
        Ok(())
    }

    fn read(&mut self, lba: u64, into: &mut [u8]) -> Result<(), StoreError> {
        Ok(self.stream.read(lba, into, None)?)
    }
}
