//! A volume as the storage of a file system: its streams, shared by all threads, and a reader.

use std::sync::{Mutex, OnceLock, PoisonError};

use riopipe::{
    BLOCK_BYTES, EngineKind, Reader, ReaderOptions, StreamError, StreamOptions, TargetStat, Volume,
};
use riopipe_fs_core::block::BlockNo;
use riopipe_fs_core::storage::{
    GroupSeq, Storage, StorageError, StreamMarks, StreamNo, WriteGroup, streams_used,
};

use crate::shared_stream::SharedStream;

/// The time between two polls of a stream that is being replayed.
const RELEASE_POLL: std::time::Duration = std::time::Duration::from_millis(1);
/// How many reads run at the same time; more wait for one of them.
const CONCURRENT_READS: usize = 16;

/// An open volume, whose block n is block n of the file system. It must be
/// [closed](Self::close): dropping it is a crash, after which the volume is recovered.
///
/// After a crash a stream may have a *list* of in-place updates that may be there or not. The
/// journals of the file system contain them, and its recovery writes them again. The list is
/// acknowledged once that is durable ([`recovered`](Storage::recovered)). Until then it shows which
/// blocks may be damaged, if the recovery fails. A stream with a list can't be opened (trap T9), so
/// a stream on which the recovery itself writes is acknowledged before its first group.
#[derive(Debug)]
pub struct VolumeStorage {
    /// Those with a list are not open at first.
    streams: Vec<OnceLock<SharedStream>>,
    reader: Reader,
    blocks: u64,
    /// `None` once it is closed. The streams are closed before it.
    volume: Mutex<Option<Volume>>,
}

/// Why a volume can't be used by a file system, or could not be closed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VolumeStorageError {
    /// The volume has too few streams.
    #[error(
        "the volume has {streams} stream, and a file system needs at least 2, better one more than \
         there are cores: create the volume with --streams"
    )]
    TooFewStreams {
        /// The streams of the volume.
        streams: u16,
    },
    /// The engine keeps no order.
    #[error("the volume runs engine none, which keeps no order: a crash would damage the files")]
    NoOrder,
    /// A stream can't be opened.
    #[error("stream {stream}: {source}")]
    Stream {
        /// The stream.
        stream: u16,
        /// The reason.
        source: StreamError,
    },
    /// The list of in-place updates of a stream can't be acknowledged.
    #[error("stream {stream}: {source}")]
    Acknowledge {
        /// The stream.
        stream: u16,
        /// The reason.
        source: riopipe::AcknowledgeError,
    },
    /// Streams or the volume were not closed. The volume must be recovered.
    #[error("the volume was not closed: {0}; it is recovered when it is opened again")]
    NotClosed(String),
}

impl VolumeStorage {
    /// Opens the streams of a volume that this process has opened, apart from those with a list.
    ///
    /// # Errors
    /// [`VolumeStorageError`].
    pub fn new(volume: Volume) -> Result<Self, VolumeStorageError> {
        if volume.engine() == EngineKind::None {
            return Err(VolumeStorageError::NoOrder);
        }
        let streams = volume.info().streams;
        let count = streams_used(streams).ok_or(VolumeStorageError::TooFewStreams { streams })?;
        let options = ReaderOptions { concurrent: CONCURRENT_READS, ..ReaderOptions::default() };
        let storage = Self {
            streams: (0..count).map(|_| OnceLock::new()).collect(),
            reader: volume.reader(&options),
            blocks: volume.blocks(),
            volume: Mutex::new(None),
        };
        for stream in 0..count {
            if volume.in_place(stream).is_empty() {
                storage.open(&volume, stream)?;
            }
        }
        *storage.volume.lock().unwrap_or_else(PoisonError::into_inner) = Some(volume);
        Ok(storage)
    }

    /// Opens a stream. The caller has the lock of the volume, or is the only one.
    fn open(&self, volume: &Volume, stream: u16) -> Result<(), VolumeStorageError> {
        let Some(place) = self.streams.get(usize::from(stream)) else { return Ok(()) };
        if place.get().is_some() {
            return Ok(());
        }
        if !volume.in_place(stream).is_empty() {
            let acknowledged = volume.acknowledge(stream);
            acknowledged.map_err(|source| VolumeStorageError::Acknowledge { stream, source })?;
        }
        let opened = volume.stream(stream, &StreamOptions::default());
        let opened = opened.map_err(|source| VolumeStorageError::Stream { stream, source })?;
        // Only one thread has the volume.
        let _ = place.set(SharedStream::new(opened));
        Ok(())
    }

    /// Makes all groups durable, and closes the streams and the volume. Later calls fail. The
    /// second close does nothing.
    ///
    /// # Errors
    /// [`VolumeStorageError::NotClosed`].
    pub fn close(&self) -> Result<(), VolumeStorageError> {
        let volume = self.volume.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(volume) = volume else { return Ok(()) };
        let mut failed = None;
        for stream in self.streams.iter().filter_map(OnceLock::get) {
            // A stream that has failed does not keep the others from being closed.
            if let Err(error) = stream.close() {
                failed.get_or_insert(error);
            }
        }
        if let Some(StorageError(text)) = failed {
            return Err(VolumeStorageError::NotClosed(text));
        }
        volume.close().map_err(|error| VolumeStorageError::NotClosed(error.to_string()))
    }

    /// The marks of a stream that any call has seen so far. Unlike [`marks`](Storage::marks) it
    /// receives no answers.
    pub(crate) fn seen_marks(&self, stream: StreamNo) -> StreamMarks {
        self.opened(stream).map(SharedStream::seen_marks).unwrap_or_default()
    }

    /// The targets of the volume, and whether they are connected; none once it is closed.
    #[must_use]
    pub fn targets(&self) -> Vec<TargetStat> {
        let volume = self.volume.lock().unwrap_or_else(PoisonError::into_inner);
        volume.as_ref().map_or_else(Vec::new, |volume| volume.stat().targets)
    }

    /// The stream, if it is open.
    fn opened(&self, stream: StreamNo) -> Option<&SharedStream> {
        self.streams.get(usize::from(stream.0))?.get()
    }

    /// The stream, which is opened if it is not open, or the error of a number that no stream has.
    fn stream(&self, stream: StreamNo) -> Result<&SharedStream, StorageError> {
        if let Some(opened) = self.opened(stream) {
            return Ok(opened);
        }
        self.with_volume(|volume| self.open(volume, stream.0))?;
        let opened = self.opened(stream);
        opened.ok_or_else(|| StorageError(format!("there is no stream {}", stream.0)))
    }

    /// Does something with the volume, which is not closed yet.
    fn with_volume(
        &self,
        action: impl FnOnce(&Volume) -> Result<(), VolumeStorageError>,
    ) -> Result<(), StorageError> {
        let volume = self.volume.lock().unwrap_or_else(PoisonError::into_inner);
        let volume = volume.as_ref().ok_or_else(|| StorageError("the volume is closed".into()))?;
        action(volume).map_err(|error| StorageError(error.to_string()))
    }
}

impl Storage for VolumeStorage {
    fn blocks(&self) -> u64 {
        self.blocks
    }

    fn streams(&self) -> u16 {
        self.streams.len() as u16
    }

    fn read(&self, first: BlockNo, into: &mut [u8]) -> Result<(), StorageError> {
        if !into.len().is_multiple_of(BLOCK_BYTES) {
            let bytes = into.len();
            return Err(StorageError(format!("a read of {bytes} bytes is not of whole blocks")));
        }
        let read = self.reader.read(first.0, into, None);
        read.map_err(|error| StorageError(format!("block {first} can't be read: {error}")))
    }

    fn submit(&self, stream: StreamNo, group: WriteGroup) -> Result<GroupSeq, StorageError> {
        if let Some(follower) = group.follower {
            // A stream that has failed can't follow. Its own failure has the reason.
            self.stream(follower)?.check()?;
        }
        self.stream(stream)?.submit(&group)
    }

    fn marks(&self, stream: StreamNo) -> StreamMarks {
        self.opened(stream).map(SharedStream::marks).unwrap_or_default()
    }

    fn wait_complete(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.stream(stream)?.wait_complete(seq)
    }

    fn wait_durable(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.stream(stream)?.wait_durable(seq)
    }

    fn wait_released(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        let stream = self.stream(stream)?;
        stream.wait_durable(seq)?;
        // What is durable is released, unless a target is being replayed, or engine `horae` has not
        // written an update home. That ends soon, or the stream fails.
        while stream.marks().released < seq {
            stream.check()?;
            std::thread::sleep(RELEASE_POLL);
        }
        Ok(())
    }

    fn recovered(&self) -> Result<(), StorageError> {
        self.with_volume(|volume| (0..self.streams()).try_for_each(|n| self.open(volume, n)))
    }
}
