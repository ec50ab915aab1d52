//! The content of a log region's header: the region's own fields, and the directory of volumes.

use alloc::vec::Vec;
use core::ops::Range;

use super::PARTITION_ALIGN;
use crate::attribute::{Member, StreamId, VolumeId};
use crate::ordering_log::partition_bytes;

/// The kind of medium that the region is on. It decides which failures the region survives.
///
/// The header and the wire (`docs/wire-format.md`) use the same codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LogKind {
    /// A mapped file. It survives the end of the process, but not a power cut. Its content is valid
    /// only within the boot that wrote it, or if it was written back when service ended (trap T24).
    File = 1,
    /// Persistent memory.
    Dax = 2,
    /// A small drive with power-loss protection.
    Block = 3,
    /// A drive's persistent memory region.
    Pci = 4,
}

impl LogKind {
    /// Whether fenced bytes survive a power cut.
    #[must_use]
    pub const fn survives_power_cut(self) -> bool {
        !matches!(self, Self::File)
    }

    /// The name of the kind in the program and the library.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Dax => "dax",
            Self::Block => "block",
            Self::Pci => "pci",
        }
    }

    /// The kind with this code, or `None` for an unknown code.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::File),
            2 => Some(Self::Dax),
            3 => Some(Self::Block),
            4 => Some(Self::Pci),
            _ => None,
        }
    }
}

/// Whether an initiator may still need a volume's log. While it may, plain hosts must not write the
/// volume's drives (trap T21).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum VolumeState {
    /// Closed: there is nothing to recover, and plain hosts may write.
    Closed = 1,
    /// Owned, or its owner vanished. The volume must be recovered from its log before another
    /// initiator writes.
    Owned = 2,
}

impl VolumeState {
    pub(super) const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Closed),
            2 => Some(Self::Owned),
            _ => None,
        }
    }
}

/// A namespace of this server that is a member of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberNamespace {
    /// The number of the member in its volume.
    pub member: Member,
    /// The namespace identifier on this server.
    pub nsid: u32,
}

/// One volume in the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeRecord {
    /// The volume.
    pub id: VolumeId,
    /// The number of the current ownership. Each new owner raises it before it reads any list, so
    /// that the log refuses what the earlier owner still sends (trap T8).
    pub generation: u32,
    /// Whether the log of the volume may still be needed.
    pub state: VolumeState,
    /// Host identifier of the last owner, all zero if there was none.
    pub owner: [u8; 16],
    /// The generation of the last owner that gave up the content of the log; 0 for none. Groups of
    /// a stream that are older than this generation are in doubt, until the stream is started
    /// again (trap T26).
    pub given_up_generation: u32,
    /// The time for which the target keeps the volume for an owner whose connection it has lost,
    /// in milliseconds (trap T25).
    pub lease_ms: u32,
    /// The number of streams. Each stream has a partition of its own.
    pub streams: u16,
    /// The number of slots in each partition.
    pub slots: u32,
    /// The offset of the volume's first partition in the region, in bytes.
    pub offset: u64,
    /// The members of the volume on this server, at most [`MEMBERS_MAX`](super::MEMBERS_MAX).
    pub members: Vec<MemberNamespace>,
}

impl VolumeRecord {
    /// The byte range of a stream's partition in the region, or `None` if the volume has no such
    /// stream.
    #[must_use]
    pub fn partition(&self, stream: StreamId) -> Option<Range<usize>> {
        if stream.0 >= self.streams {
            return None;
        }
        let start = self.offset as usize + usize::from(stream.0) * partition_stride(self.slots);
        Some(start..start + partition_bytes(self.slots))
    }

    /// The byte range of all partitions of the volume in the region, padding included.
    #[must_use]
    pub fn extent(&self) -> Range<usize> {
        let start = self.offset as usize;
        start..start + usize::from(self.streams) * partition_stride(self.slots)
    }
}

/// The content of the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionHeader {
    /// How many times the header was written. The copy with the higher number is the newer one.
    pub number: u64,
    /// The identity of the region.
    pub uuid: [u8; 16],
    /// The boot in which the region was last opened for service.
    pub boot: [u8; 16],
    /// The target's incarnation. Every start of the target raises it, so that no entry covers an
    /// entry of an earlier incarnation (trap T4).
    pub incarnation: u32,
    /// The kind of medium on which the region was made.
    pub kind: LogKind,
    /// A clean stop has ended the service. All of the region was written back before this flag was
    /// set, so the region is whole in every later boot. Only a region whose fences do not survive a
    /// power cut has this flag.
    pub synced: bool,
    /// Size of the whole region in bytes.
    pub len: u64,
    /// The directory, in order of offset.
    pub volumes: Vec<VolumeRecord>,
}

/// The number of bytes from the start of one partition to the start of the next.
pub(super) const fn partition_stride(slots: u32) -> usize {
    partition_bytes(slots).next_multiple_of(PARTITION_ALIGN)
}
