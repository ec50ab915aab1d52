//! Why a partition was not made, opened, bound or appended to.

use super::mark::VERSION;
use crate::attribute::{Seq, StreamId, VolumeId};
use crate::entry::{PartitionId, Position};
use crate::region::RegionError;

/// Why a partition cannot be used. The caller must not go on as if there were nothing to undo,
/// because then the undo of a crash would be missing (trap T19).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// The byte range cannot hold a partition.
    #[error("log partition of {have} bytes is too small: {need} bytes are needed at least")]
    TooSmall {
        /// Size in bytes.
        have: usize,
        /// Smallest usable size in bytes.
        need: usize,
    },
    /// The place of the partition in the directory is blank.
    #[error(
        "log partition of volume {} stream {} is blank though its volume is listed: the log was \
         erased or replaced; restore it, or give up what it knew with accept_lost_log",
        id.volume, id.stream
    )]
    Blank {
        /// The partition that was expected.
        id: PartitionId,
    },
    /// The partition belongs to another stream or volume.
    #[error(
        "log partition belongs to volume {} stream {}, not to volume {} stream {}: the log region \
         was swapped; serve the right one, or give up what it knew with accept_lost_log",
        found.volume, found.stream, expected.volume, expected.stream
    )]
    Foreign {
        /// The partition that was found.
        found: PartitionId,
        /// The partition that was expected.
        expected: PartitionId,
    },
    /// The mark has another number of slots than the byte range.
    #[error(
        "log partition records {found} slots, but its place has space for {expected}: the log region \
         was moved or resized; serve the original one, or give up what it knew with \
         accept_lost_log"
    )]
    Resized {
        /// Slots according to the mark.
        found: u32,
        /// Slots according to the byte range.
        expected: u32,
    },
    /// A later version of the program wrote the partition.
    #[error(
        "log partition has format version {version}, this program knows {VERSION}: use the newer \
         program that wrote it"
    )]
    Newer {
        /// Its version.
        version: u16,
    },
    /// An entry of a kind or with a flag that only a later version knows.
    #[error(
        "log entry {} has kind {kind} and flags {flags:#04x}, which this program does not know: \
         use the newer program that wrote it", position.0
    )]
    NewerEntry {
        /// The position of the entry.
        position: Position,
        /// Its kind code.
        kind: u8,
        /// Its flags.
        flags: u8,
    },
    /// A part of the partition is unreadable, although it was durable once.
    #[error(
        "log partition of volume {volume} stream {stream} is damaged: {what}; restore the log \
         region, or give up what it knew with accept_lost_log"
    )]
    Damaged {
        /// The volume.
        volume: VolumeId,
        /// The stream.
        stream: StreamId,
        /// The damage.
        what: Damage,
    },
    /// The region has failed. The next read may find other bytes than this one.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// The part of a partition that is unreadable although it was durable once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// Neither copy of the mark is whole.
    #[error("neither copy of its mark is readable")]
    NoMark,
    /// An entry proves that a later mark had been durable.
    #[error("entry {} is newer than the mark allows, so the last mark is lost", .0.0)]
    MarkLost(Position),
    /// An entry that later ones prove durable is not readable.
    #[error("entry {} is unreadable, though later ones prove that it was durable", .0.0)]
    EntryLost(Position),
    /// The persist word of an entry that later ones prove durable is neither unset nor its own.
    #[error("the persist word of entry {} is none that was ever stored", .0.0)]
    PersistWord(Position),
}

/// Why a partition was not made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Not enough bytes.
    #[error("log partition of {have} bytes is too small: {need} bytes are needed at least")]
    TooSmall {
        /// Size in bytes.
        have: usize,
        /// Smallest usable size in bytes.
        need: usize,
    },
    /// The region failed.
    #[error(transparent)]
    Region(#[from] RegionError),
}

pub(super) struct TooSmall {
    pub(super) have: usize,
    pub(super) need: usize,
}

impl From<TooSmall> for FormatError {
    fn from(TooSmall { have, need }: TooSmall) -> Self {
        Self::TooSmall { have, need }
    }
}

impl From<TooSmall> for LogError {
    fn from(TooSmall { have, need }: TooSmall) -> Self {
        Self::TooSmall { have, need }
    }
}

/// Why an attribute was not appended. Nothing was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// No slot is free, although all released slots are used again. The initiator sent more entries
    /// than its credits allow.
    #[error(
        "ordering log is full: all {slots} slots hold entries beyond the released group \
         {released}; release (flush) before appending"
    )]
    Full {
        /// Slots in the partition.
        slots: u32,
        /// The released mark.
        released: Seq,
    },
    /// The attribute does not fit the entry's fields; see
    /// [`loggable`](crate::entry::loggable).
    #[error("attribute of group {seq} cannot be logged: a field is out of range")]
    Unloggable {
        /// Its group.
        seq: Seq,
    },
    /// The log has this entry already, but with another shape. A replay must not change an entry,
    /// because recovery would count both as different.
    #[error(
        "entry {index} of group {seq} is in the log with another shape: a replayed request must be \
         the one that was sent before"
    )]
    OtherShape {
        /// Its group.
        seq: Seq,
        /// Its index in the group.
        index: u16,
    },
    /// The log was opened, but neither [`start`](super::StreamLog::start) nor
    /// [`resume`](super::StreamLog::resume) was called.
    #[error("ordering log is not bound to an owner: start or resume it first")]
    Unbound,
    /// The region failed, now or before: nothing more is appended.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Why a binding was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// The generation is not that of the log: another owner has taken the volume over.
    #[error(
        "generation {given} is not current: the log is at generation {current}; another owner has \
         taken the volume over"
    )]
    Generation {
        /// The generation that was asked for.
        given: u32,
        /// The generation of the log.
        current: u32,
    },
    /// The incarnation is older than the log's. Incarnations only rise.
    #[error(
        "incarnation {given} is older than {current}, the log's last one: the log region's \
         header was replaced by an older one"
    )]
    Incarnation {
        /// The incarnation that was asked for.
        given: u32,
        /// The last incarnation of the log.
        current: u32,
    },
    /// Recovery has [settled](super::StreamLog::settle) the log, so it cannot be resumed: its
    /// entries have been undone, and nothing may be replayed.
    #[error(
        "recovery has settled the log at group {released}: nothing can be replayed; start the \
         stream anew"
    )]
    Settled {
        /// The last group of the prefix that the recovery has found (the recovered seq).
        released: Seq,
    },
    /// The region failed.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Why a log was not settled. It is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettleError {
    /// The recovery would end before a released group. Released groups are never undone.
    #[error("group {k} cannot be the last: groups up to {released} are released")]
    Released {
        /// The group that was asked for.
        k: Seq,
        /// The released mark.
        released: Seq,
    },
    /// An earlier recovery has come to another result. One of the two had lists that are not all of
    /// this volume.
    #[error("group {k} cannot be the last: an earlier recovery has settled the log at {settled}")]
    Settled {
        /// The group that was asked for.
        k: Seq,
        /// The group of the earlier recovery.
        settled: Seq,
    },
    /// The region failed.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Why a log was not emptied. It is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForgetError {
    /// The log is not settled, so another recovery may still need its entries.
    #[error("ordering log is not settled: what it lists has not been undone everywhere")]
    NotSettled,
    /// The region failed.
    #[error(transparent)]
    Region(#[from] RegionError),
}
