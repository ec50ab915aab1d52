//! How a mount keeps order: each mode is one line of a table, and the rest of the file system asks
//! the table.

use super::MAIN_STREAM;
use crate::probe::{Plant, is_bug_planted};
use crate::storage::StreamNo;

/// How `fsync` keeps order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JournalMode {
    /// As ext4 with jbd2: a main commit for each `fsync`.
    Ext4,
    /// As [`Rio`](Self::Rio), on streams of engine `horae`: the file system that the Rio paper calls
    /// HoraeFS (§6.3), which has the same journals for each core. The streams keep what those of
    /// engine `rio` keep, so the file system waits at the same places.
    Horae,
    /// As BarrierFS (FAST '18), on streams of engine `barrier`: the main commit of ext4, whose parts
    /// are dispatched in order without a wait. Several commits may be in flight.
    Barrier,
    /// As OPEXT4 (OPIMQ, FAST '25), on streams of engine `opimq`: as [`Barrier`](Self::Barrier), and
    /// the data of each inode is on a stream of its own, which the main stream follows.
    Opimq,
    /// File-level transactions on ordered streams.
    #[default]
    Rio,
}

/// The behaviour of a mode at each place where order is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeepOrder {
    /// Where the data of files goes.
    pub(super) data: DataStreams,
    /// Whether an `fsync` may be a file-level transaction. It needs an area in the journal for each
    /// data stream, and the private bit.
    pub(super) file_level: bool,
    /// The state of a transaction's data before its blocks go to the journal.
    pub(super) before_journal: DataState,
    /// How the commit block follows the other blocks of its transaction.
    pub(super) commit_block: CommitBlock,
    /// Whether a commit may begin before the one before it is durable.
    pub(super) commits: Commits,
    /// The way in which `fbarrier` orders a file.
    pub(super) barriers: FileBarrier,
}

/// Where the data of files goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataStreams {
    /// The main stream. So a FLUSH of jbd2 covers it, and the journal's blocks come after it.
    Main,
    /// A data stream for each inode, by its number.
    OfInode,
    /// As [`OfInode`](Self::OfInode), and the main stream follows each group: the journal's blocks
    /// come after it.
    OfInodeFollowedByMain,
}

impl DataStreams {
    /// The stream that follows the groups of data.
    pub(super) fn follower(self) -> Option<StreamNo> {
        let is_followed =
            self == Self::OfInodeFollowedByMain && !is_bug_planted(Plant::DataWithoutFollower);
        is_followed.then_some(MAIN_STREAM)
    }
}

/// The state of data that something later waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataState {
    /// It was submitted. What comes later on the same stream, or on the one that follows it, is never
    /// there without it.
    Submitted,
    /// The drive has completed it. A FLUSH that comes later makes it durable.
    Complete,
    /// It is durable. The recovery of streams zeroes fresh blocks beyond a prefix, so nothing that
    /// leads to data of *another* stream may be there before.
    Durable,
}

/// How the commit block follows the other blocks of its transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommitBlock {
    /// As the next group of the stream, at once.
    NextGroup,
    /// After the others are complete, and a FLUSH has made them durable.
    AfterFlush,
}

/// How many commits are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Commits {
    /// One: the next one begins when it is durable.
    One,
    /// Any number: the next one begins when the commit block is submitted. A thread that needs the
    /// commit durable waits for that.
    Several,
}

/// The way in which `fbarrier` orders a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileBarrier {
    /// An `fsync`.
    Fsync,
    /// It submits a file-level transaction. If that has to come after a barrier of another stream,
    /// the file is held.
    Record,
    /// It submits a main commit: all is on one stream, or the main stream follows the others. In the
    /// latter case an overwrite on another stream waits until the barrier is durable: the data streams
    /// do not follow the main stream.
    Commit,
}

impl JournalMode {
    /// Its name on command lines and in figures.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Horae => "horae",
            Self::Barrier => "barrier",
            Self::Opimq => "opimq",
            Self::Rio => "rio",
        }
    }

    /// The line of the mode in the table.
    pub(super) const fn keep_order(self) -> KeepOrder {
        match self {
            Self::Ext4 => KeepOrder {
                data: DataStreams::Main,
                file_level: false,
                before_journal: DataState::Complete,
                commit_block: CommitBlock::AfterFlush,
                commits: Commits::One,
                barriers: FileBarrier::Fsync,
            },
            Self::Barrier => KeepOrder {
                data: DataStreams::Main,
                file_level: false,
                before_journal: DataState::Submitted,
                commit_block: CommitBlock::NextGroup,
                commits: Commits::Several,
                barriers: FileBarrier::Commit,
            },
            Self::Opimq => {
                KeepOrder { data: DataStreams::OfInodeFollowedByMain, ..Self::Barrier.keep_order() }
            }
            Self::Horae | Self::Rio => KeepOrder {
                data: DataStreams::OfInode,
                file_level: true,
                before_journal: DataState::Durable,
                commit_block: CommitBlock::NextGroup,
                commits: Commits::One,
                barriers: FileBarrier::Record,
            },
        }
    }
}
