//! e2fsck as the judge of many images: each has a file that stays, and only the blocks of a state
//! are written.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use riopipe_fs_core::BLOCK_BYTES;

use super::recorder::{Base, Content, Overlay};

/// A file with a base image, on which e2fsck judges one state after the other.
pub(crate) struct Judge {
    _dir: tempfile::TempDir,
    path: PathBuf,
    file: File,
    /// How many states it has judged.
    judged: u64,
}

impl Judge {
    pub(crate) fn new(base: &Base) -> Self {
        // A file system in memory, if there is one.
        let memory = std::path::Path::new("/dev/shm");
        let dir = tempfile::TempDir::new_in(memory).or_else(|_| tempfile::TempDir::new()).unwrap();
        let path = dir.path().join("image");
        Overlay::default().save(base, &path);
        let file = File::options().read(true).write(true).open(&path).unwrap();
        Self { _dir: dir, path, file, judged: 0 }
    }

    fn write(&self, base: &Base, state: &Overlay, at: u64) {
        self.file.write_all_at(state.read(base, at), at * BLOCK_BYTES as u64).unwrap();
    }

    /// `e2fsck -fy` finds nothing to repair.
    pub(crate) fn is_clean(&mut self, base: &Base, state: &Overlay) -> Result<(), String> {
        state.places().for_each(|at| self.write(base, state, at));
        let path = self.path.to_str().unwrap();
        let ended = crate::image::run("e2fsck", &["-f", "-y", path], None);
        if ended.code != 0 {
            *self = Self::new(base);
            return Err(format!("e2fsck: {}", ended.output));
        }
        // It has noted in the superblock that it ran, and may shorten the inode table that is in use.
        state.places().chain([0, 1]).for_each(|at| self.write(base, &Overlay::default(), at));
        self.judged += 1;
        if self.judged == 1 {
            assert_eq!(self.changed(base).places().next(), None, "e2fsck has changed more");
        }
        Ok(())
    }

    /// The state that `e2fsck -fy` leaves. It replays the log and deletes orphans, and must find
    /// nothing else to repair.
    pub(crate) fn replayed(&mut self, base: &Base, state: &Overlay) -> Result<Overlay, String> {
        state.places().for_each(|at| self.write(base, state, at));
        let path = self.path.to_str().unwrap();
        let ended = crate::image::run("e2fsck", &["-f", "-y", path], None);
        let left = self.changed(base);
        left.places().for_each(|at| self.write(base, &Overlay::default(), at));
        // 1: it was modified.
        let is_clean = ended.code <= 1 && !ended.output.contains("? yes");
        if is_clean { Ok(left) } else { Err(format!("e2fsck: {}", ended.output)) }
    }

    /// The blocks that differ from the base image.
    fn changed(&self, base: &Base) -> Overlay {
        let mut found = Overlay::default();
        for at in 0..base.blocks() {
            let mut block = [0; BLOCK_BYTES];
            self.file.read_exact_at(&mut block, at * BLOCK_BYTES as u64).unwrap();
            found.write(base, at, &Content::new(std::sync::Arc::new(block)));
        }
        found
    }
}
