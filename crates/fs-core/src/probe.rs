//! Test-only switches, compiled in by the feature `probe`.
//!
//! A [`Plant`] removes the defence of one decision. The enumeration of crash states must then find
//! a broken promise. At most one is set in a process. Without the feature, [`is_bug_planted`] is
//! constantly false: not an instruction is left of it.

macro_rules! plants {
    ($($(#[$doc:meta])* $variant:ident,)*) => {
        /// A plant: the removed defence of a decision.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Plant {
            $($(#[$doc])* $variant,)*
        }

        impl Plant {
            /// All plants.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];
        }
    };
}

plants! {
    /// The record of a file goes to another stream than its data.
    RecordOnOtherStream,
    /// A main commit does not wait until its data is durable.
    CommitBeforeData,
    /// A record lacks the directories on the way that are not durable.
    RecordWithoutParents,
    /// A record lacks the changes that are in a commit in flight.
    RecordWithoutInFlight,
    /// A renamed, linked or unlinked inode may be in a record.
    InodeAlwaysFit,
    /// A name that a rename, link or unlink has used may be in a record.
    NameAlwaysFit,
    /// Records are written although a directory was moved.
    MovesIgnored,
    /// Blocks and inode numbers are used again before the commit that frees them.
    ReuseBeforeCommit,
    /// An overwrite is submitted as fresh.
    OverwriteFresh,
    /// The tail of the log moves before the checkpoint is durable.
    TailBeforeCheckpoint,
    /// Blocks are written home before their commit is durable.
    CheckpointBeforeCommit,
    /// Recovery empties the table of areas before its changes are durable.
    TableEmptyEarly,
    /// Records of other mounts count.
    EpochIgnored,
    /// The private bit is not set.
    NoPrivateBit,
    /// The private bit is cleared before everything is home.
    PrivateBitClearedEarly,
    /// A commit does not wait for the data that makes unwritten blocks written.
    ConvertedBeforeData,
    /// Recovery applies records that a durable commit has made obsolete.
    ObsoleteApplied,
    /// Freed metadata blocks are not revoked.
    RevokeForgotten,
    /// Records are applied in the reverse order of their ids.
    OlderIdWins,
    /// A record has the entry of a new file without its inode.
    EntryWithoutInode,
    /// An unlinked open file is not in the orphan list.
    OrphanForgotten,
    /// `fdatasync` forgets a size that grew without a new block.
    SizeForgotten,
    /// The data of an inode goes to another stream with each write.
    StreamPerWrite,
    /// Blocks are used again before the last writes to them are released.
    ReuseBeforeReleased,
    /// A directory that is there gets the first fields that a record has.
    DirectoryFieldsApplied,
    /// Recovery does not mark the blocks of records as in use.
    BlocksNotClaimed,
    /// A checkpoint is submitted as fresh.
    CheckpointFresh,
    /// A barrier is submitted although another stream has one that is not durable.
    BarrierNotHeld,
    /// An `fsync` does not wait for the barriers of other streams.
    BarrierNotAwaited,
    /// An overwrite does not wait for the barrier before it on its stream.
    OverwriteBeforeBarrier,
    /// In mode `ext4` the commit block does not wait for the FLUSH of the others.
    CommitBlockBeforeFlush,
    /// In mode `barrier` the commit block is in the group of the other blocks of its transaction.
    CommitBlockWithOthers,
    /// In mode `barrier` blocks are written home before the commit block is submitted.
    HomeBeforeCommitBlock,
    /// In mode `barrier` a commit is retired when it is submitted.
    RetiredBeforeDurable,
    /// In mode `barrier` a barrier submits the data only, and no commit.
    BarrierWithoutCommit,
    /// In mode `opimq` the main stream does not follow the data.
    DataWithoutFollower,
    /// A main commit is submitted when its data is complete, not durable.
    CommitWhenComplete,
    /// Changes after a barrier are submitted when the barrier is complete, not durable.
    BarrierWhenComplete,
}

impl Plant {
    /// Whether the removed defence only matters where a write may be complete and not durable: in
    /// the simulated cluster, not in the enumeration's model of a storage.
    #[must_use]
    pub const fn needs_cluster(self) -> bool {
        matches!(self, Self::CommitWhenComplete | Self::BarrierWhenComplete)
    }
}

#[cfg(feature = "probe")]
mod state {
    use super::Plant;
    use core::sync::atomic::{AtomicU32, Ordering};

    /// Index of the planted bug plus one; 0 for none.
    static PLANTED: AtomicU32 = AtomicU32::new(0);

    /// Whether this bug is planted.
    #[must_use]
    #[inline]
    pub fn is_bug_planted(plant: Plant) -> bool {
        PLANTED.load(Ordering::Relaxed) == plant as u32 + 1
    }

    /// Plants a bug in this process, or takes it out again.
    pub fn plant(plant: Option<Plant>) {
        PLANTED.store(plant.map_or(0, |plant| plant as u32 + 1), Ordering::Relaxed);
    }
}

#[cfg(not(feature = "probe"))]
mod state {
    use super::Plant;

    /// Whether this bug is planted: never, without the feature `probe`.
    #[must_use]
    #[inline(always)]
    pub const fn is_bug_planted(_: Plant) -> bool {
        false
    }
}

pub use state::*;
