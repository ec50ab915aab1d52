//! A volume's storage that measures what each `fsync` does with it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use riopipe_fs_core::block::BlockNo;
use riopipe_fs_core::storage::{
    Content, GroupSeq, Storage, StorageError, StreamMarks, StreamNo, WriteGroup,
};
use riopipe_platform::now_ns;

use crate::fsync_stages::{self, Call, FsyncTimes, Until};
use crate::storage::VolumeStorage;

/// The groups of a stream whose content is known: the last ones. An `fsync` waits for no older ones.
const GROUPS_KNOWN: usize = 1024;

/// A [`VolumeStorage`] that adds the calls within an `fsync` to its [`FsyncTimes`]. All other calls
/// are passed on.
#[derive(Debug)]
pub struct MeasuredStorage {
    storage: Arc<VolumeStorage>,
    times: Arc<FsyncTimes>,
    streams: Vec<Contents>,
}

impl MeasuredStorage {
    /// Measures `storage`.
    #[must_use]
    pub fn new(storage: Arc<VolumeStorage>) -> Self {
        let streams = (0..storage.streams()).map(|_| Contents::default()).collect();
        Self { storage, times: Arc::default(), streams }
    }

    /// The times of the calls of `fsync` so far.
    #[must_use]
    pub const fn fsync_times(&self) -> &Arc<FsyncTimes> {
        &self.times
    }

    fn wait(
        &self,
        stream: StreamNo,
        seq: GroupSeq,
        until: Until,
        wait: impl FnOnce() -> Result<(), StorageError>,
    ) -> Result<(), StorageError> {
        if !fsync_stages::is_running() {
            return wait();
        }
        let began = now_ns();
        let seen = self.storage.seen_marks(stream);
        let reached = match until {
            Until::Complete => seen.complete,
            Until::Durable => seen.durable,
        };
        let content = self.streams.get(usize::from(stream.0)).map(|contents| contents.of(seq));
        let result = wait();
        let content = content.unwrap_or_default();
        let call = Call::Wait { content, until, is_open: reached < seq };
        fsync_stages::on_call(&self.times, call, began);
        result
    }
}

impl Storage for MeasuredStorage {
    fn blocks(&self) -> u64 {
        self.storage.blocks()
    }

    fn streams(&self) -> u16 {
        self.storage.streams()
    }

    fn read(&self, first: BlockNo, into: &mut [u8]) -> Result<(), StorageError> {
        if !fsync_stages::is_running() {
            return self.storage.read(first, into);
        }
        let began = now_ns();
        let result = self.storage.read(first, into);
        fsync_stages::on_call(&self.times, Call::Read, began);
        result
    }

    fn submit(&self, stream: StreamNo, group: WriteGroup) -> Result<GroupSeq, StorageError> {
        let content = group.content;
        let seq = self.storage.submit(stream, group)?;
        if let Some(contents) = self.streams.get(usize::from(stream.0)) {
            contents.note(seq, content);
        }
        // A stage of a submission begins at the end of the call before.
        fsync_stages::on_call(&self.times, Call::Submit(content), 0);
        Ok(seq)
    }

    fn marks(&self, stream: StreamNo) -> StreamMarks {
        self.storage.marks(stream)
    }

    fn wait_complete(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.wait(stream, seq, Until::Complete, || self.storage.wait_complete(stream, seq))
    }

    fn wait_durable(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.wait(stream, seq, Until::Durable, || self.storage.wait_durable(stream, seq))
    }

    fn wait_released(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.storage.wait_released(stream, seq)
    }

    fn recovered(&self) -> Result<(), StorageError> {
        self.storage.recovered()
    }
}

/// The content of the last groups of a stream.
#[derive(Debug)]
struct Contents([AtomicU8; GROUPS_KNOWN]);

impl Default for Contents {
    fn default() -> Self {
        Self([const { AtomicU8::new(0) }; GROUPS_KNOWN])
    }
}

impl Contents {
    /// The contents by their numbers.
    const ALL: [Content; 5] =
        [Content::Data, Content::Record, Content::Journal, Content::Commit, Content::Home];

    fn note(&self, seq: GroupSeq, content: Content) {
        self.place(seq).store(content as u8, Ordering::Relaxed);
    }

    fn of(&self, seq: GroupSeq) -> Content {
        let number = usize::from(self.place(seq).load(Ordering::Relaxed));
        Self::ALL.get(number).copied().unwrap_or_default()
    }

    fn place(&self, seq: GroupSeq) -> &AtomicU8 {
        // The remainder is less than the length.
        &self.0[(seq.0 % GROUPS_KNOWN as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_content_of_the_last_groups_is_known() {
        let contents = Contents::default();
        for (seq, content) in (1..).zip(Contents::ALL) {
            assert_eq!(content as usize, seq as usize - 1, "{content:?}");
            contents.note(GroupSeq(seq), content);
        }
        assert_eq!(contents.of(GroupSeq(4)), Content::Commit);
        contents.note(GroupSeq(4 + GROUPS_KNOWN as u64), Content::Record);
        assert_eq!(contents.of(GroupSeq(4 + GROUPS_KNOWN as u64)), Content::Record);
        assert_eq!(contents.of(GroupSeq(5)), Content::Home);
    }
}
