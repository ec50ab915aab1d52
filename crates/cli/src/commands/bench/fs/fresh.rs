//! A new file system on the volume of own targets, mounted in this process.

use std::sync::Arc;

use riopipe::{ConnectOptions, EngineKind, OpenOptions, Volume};
use riopipe_fs::{
    Fs, JournalMode,
    backing::{Backing, FsOptions, engine_of},
    fsync_stages::FsyncTimesSnapshot,
    mkfs::{MkfsOptions, make_on_volume},
};

use crate::{connect::open_failure, failure::Failure, own_targets::OwnTargets};

/// The commands that the drives got.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::commands) struct DriveCounts {
    pub(in crate::commands) writes: u64,
    pub(in crate::commands) written_bytes: u64,
    pub(in crate::commands) flushes: u64,
}

impl DriveCounts {
    pub(in crate::commands) fn of(own: &OwnTargets) -> Self {
        let mut all = Self::default();
        for target in own.targets() {
            let counters = target.stat().counters;
            let count = |name| counters.get(name).copied().unwrap_or(0);
            all.writes += count("writes");
            all.written_bytes += count("written_bytes");
            all.flushes += count("flushes");
        }
        all
    }

    pub(in crate::commands) const fn since(self, before: Self) -> Self {
        Self {
            writes: self.writes.saturating_sub(before.writes),
            written_bytes: self.written_bytes.saturating_sub(before.written_bytes),
            flushes: self.flushes.saturating_sub(before.flushes),
        }
    }
}

/// Opens the volume of own targets.
pub(super) fn open(
    own: &OwnTargets,
    connect: &ConnectOptions,
    engine: Option<EngineKind>,
) -> Result<Volume, Failure> {
    let options = OpenOptions { connect: connect.clone(), engine, ..OpenOptions::default() };
    let opened = Volume::open(own.volume(), own.members(), &options);
    opened.map(|(volume, _)| volume).map_err(|error| open_failure(&error))
}

/// A new file system.
pub(in crate::commands) struct Fresh {
    backing: Backing,
    fs: Arc<Fs>,
}

impl Fresh {
    /// Makes the file system, and mounts it.
    pub(in crate::commands) fn make(
        own: &OwnTargets,
        connect: &ConnectOptions,
        mode: JournalMode,
    ) -> Result<Self, Failure> {
        let volume = open(own, connect, engine_of(mode))?;
        let fresh = MkfsOptions { force: true, ..MkfsOptions::default() };
        make_on_volume(&volume, &fresh, &mut |_, _| ())
            .map_err(|error| Failure::storage(&error))?;
        let backing = Backing::of_volume(volume).map_err(|error| Failure::storage(&error))?;
        let options = FsOptions { mode, ..FsOptions::default() };
        let (fs, _) = backing.mount(&options).map_err(|error| Failure::storage(&error))?;
        Ok(Self { backing, fs })
    }

    pub(in crate::commands) fn fs(&self) -> &Arc<Fs> {
        &self.fs
    }

    /// The calls of `fsync` so far.
    pub(in crate::commands) fn fsyncs(&self) -> FsyncTimesSnapshot {
        self.backing.fsync_times().snapshot()
    }

    /// Closes the volume. The file system has been unmounted before.
    pub(in crate::commands) fn close(self) -> Result<(), Failure> {
        drop(self.fs);
        self.backing.close().map_err(|error| Failure::storage(&error))
    }
}
