//! A real volume as the file copy sees it: one stream of it.

use riopipe::{
    Buf, EngineKind, Place, ReadError, Stream, StreamFailure, SubmitError, Until, Volume,
    WaitError, Why,
};

use crate::file_copy::Store;

/// The stream that files travel on.
pub const STREAM: u16 = 0;

/// A stream of an open volume.
#[derive(Debug)]
pub struct VolumeStore {
    stream: Stream,
    blocks: u64,
    engine: EngineKind,
}

/// Why it failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A group was refused.
    #[error(transparent)]
    Submit(#[from] Why),
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
    /// This stream of this volume.
    #[must_use]
    pub fn new(volume: &Volume, stream: Stream) -> Self {
        Self { stream, blocks: volume.blocks(), engine: volume.engine() }
    }

    /// Ends the stream in order: waits until all is durable.
    ///
    /// # Errors
    /// If it has failed.
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
        let mut buf = Some(buf);
        while let Some(bytes) = buf.take() {
            let group = self.stream.group().write(lba, bytes, place);
            match if durable { group.submit_durable() } else { group.submit() } {
                Ok(_) => {}
                Err(SubmitError { why: Why::Full(_), mut bufs }) => {
                    // The stream's own timeout bounds this wait: a target that stalls fails it.
                    self.stream.wait(Until::Room, None)?;
                    buf = bufs.pop();
                }
                Err(SubmitError { why, .. }) => return Err(why.into()),
            }
        }
        // Sends what was submitted and takes in what has arrived; the marks don't matter yet.
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
        self.engine != EngineKind::None
    }

    fn buf(&mut self, len: usize) -> Buf {
        self.stream.buf(len)
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
        Ok(self.stream.read(lba, into)?)
    }
}
