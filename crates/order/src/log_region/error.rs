//! Why a log region was not made, opened or changed.

use super::{MEMBERS_MAX, VERSION, VOLUMES_MAX};
use crate::attribute::VolumeId;
use crate::ordering_log::{SLOTS_MAX, SLOTS_MIN};
use crate::region::RegionError;

/// Why a log region was not made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CreateError {
    /// Not enough bytes for the header and one page of partitions.
    #[error("log region of {have} bytes is too small: at least {need} bytes are needed")]
    TooSmall {
        /// Size in bytes.
        have: usize,
        /// Smallest size in bytes.
        need: usize,
    },
    /// The region failed.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Why a log region was not opened. The region is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Nothing was ever written there.
    #[error("log region is blank: create it, or, if it should have held a log, restore it")]
    Blank,
    /// The region holds something else.
    #[error("this is not a log region: it holds other data; check the path")]
    NotALog,
    /// A later version of the program wrote the region.
    #[error(
        "log region has format version {version}, this program knows {VERSION}: use the newer \
         program that made it"
    )]
    Newer {
        /// Its version.
        version: u32,
    },
    /// Neither copy of the header is usable.
    #[error(
        "log region is damaged: {what}; restore it, or give up what it knew with \
         accept_lost_log"
    )]
    Damaged {
        /// The damage.
        what: &'static str,
    },
    /// A `file:` log of another boot whose service was not ended by a clean stop (trap T24).
    #[error(
        "log region was last used before this system booted, and its target was not stopped in \
         good order: a file: log does not survive the power otherwise, so nothing may be undone \
         from it, and volume {volume} is refused; check its content and give up the log with \
         accept_lost_log"
    )]
    StaleBoot {
        /// A volume in it.
        volume: VolumeId,
    },
    /// The region failed.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Why a volume was not added to the directory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// The volume is in the directory already.
    #[error("volume {volume} is in the log region already")]
    AlreadyThere {
        /// The volume.
        volume: VolumeId,
    },
    /// The directory has no free record.
    #[error("log region holds {VOLUMES_MAX} volumes, which is all it can: remove one first")]
    DirectoryFull,
    /// No gap between the volumes is large enough.
    #[error(
        "log region is too small: the volume's partitions need {need} bytes, the largest gap has \
         {have}; use fewer streams, fewer slots or a larger region"
    )]
    TooSmall {
        /// The number of bytes needed in one piece.
        need: usize,
        /// The size of the largest gap in bytes.
        have: usize,
    },
    /// A count is out of range, or a member is listed twice.
    #[error(
        "volume with {streams} streams, {slots} slots per stream and {members} members on this \
         server cannot be logged: at least 1 stream, {SLOTS_MIN} to {SLOTS_MAX} slots, and 1 to \
         {MEMBERS_MAX} distinct members are possible"
    )]
    Shape {
        /// The requested number of streams.
        streams: u16,
        /// The requested number of slots for each stream.
        slots: u32,
        /// The number of members on this server.
        members: usize,
    },
    /// The region failed.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Why a volume's record was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// The volume is not in the directory.
    #[error("volume {volume} is not in the log region")]
    NoSuchVolume {
        /// The volume.
        volume: VolumeId,
    },
    /// The generation is not above the current one. Generations only rise, so that an earlier owner
    /// cannot take the volume back unnoticed (trap T8).
    #[error(
        "generation {given} of volume {volume} is not above {current}: another owner came first"
    )]
    Generation {
        /// The volume.
        volume: VolumeId,
        /// The generation that was asked for.
        given: u32,
        /// The current generation.
        current: u32,
    },
    /// The region failed.
    #[error(transparent)]
    Region(#[from] RegionError),
}
