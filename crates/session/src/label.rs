//! The label on every drive of a volume. It names the members of the volume, their order, and the
//! ordering log of each member's target. docs/label-format.md draws the bytes.
//!
//! ```text
//! block 0        block 1        …    DATA_START
//! copy of label  copy of label       data area
//! ```
//!
//! The first two blocks of a drive have one copy of the label each. The copies are written
//! alternately, so that a torn write leaves the other copy valid. The copy with the higher
//! `sequence` counts.
//!
//! [`assemble`] checks that the labels of some drives form a volume, and [`logs_due`] that their
//! targets have the right logs.

use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::digest::Crc32c;
use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;
use riopipe_order::probe::{self, Plant};

use crate::wire::{array_at, u16_at, u32_at, u64_at};

/// The bytes of a label: one block.
pub const LABEL_LEN: usize = 4096;
/// The version of the label format that this code writes and reads.
pub const LABEL_VERSION: u32 = 2;
/// The version of the labels of a volume without a prepare area. Programs that know no prepare area
/// read these labels, too.
const LABEL_VERSION_PLAIN: u32 = 1;
/// The first block of the data area on every member.
pub const DATA_START: u64 = 256;
/// The most members of a volume, because a label has no space for more.
pub const MEMBERS_MAX: usize = 120;
/// The most bytes of a volume's name.
pub const NAME_MAX: usize = 64;

const MAGIC: [u8; 8] = *b"RIOLABEL";
/// The places of the fields in a label, bytes. All numbers are little-endian.
mod offset {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 8;
    /// CRC32C of all bytes after it.
    pub(super) const CHECKSUM: usize = 12;
    pub(super) const VOLUME: usize = 16;
    /// The name of the volume, filled up with NUL.
    pub(super) const NAME: usize = 32;
    pub(super) const BLOCK_SIZE: usize = 96;
    pub(super) const UNIT_BLOCKS: usize = 100;
    pub(super) const DATA_START: usize = 104;
    pub(super) const DATA_BLOCKS: usize = 112;
    pub(super) const STREAMS: usize = 120;
    pub(super) const ENGINE: usize = 122;
    pub(super) const INDEX: usize = 124;
    pub(super) const MEMBER_COUNT: usize = 126;
    pub(super) const GENERATION: usize = 128;
    pub(super) const SEQUENCE: usize = 132;
    /// Since version 2.
    pub(super) const PREPARE_BLOCKS: usize = 136;
    /// The list of members: for each its NGUID, and the id of its log region.
    pub(super) const MEMBERS: usize = 256;
}
/// The bytes of each member in the list of members.
const MEMBER_LEN: usize = 32;
/// The only block size that a label may have, bytes.
const BLOCK_SIZE: u32 = 4096;

/// The identity of a member, as a label records it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemberId {
    /// The NGUID of the member's namespace.
    pub nguid: [u8; 16],
    /// The id of the log region of the member's target; zero if the volume has no log there.
    pub region: [u8; 16],
}

/// A drive's label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// The volume.
    pub volume: VolumeId,
    /// The name of the volume.
    pub name: String,
    /// The size of a block, bytes.
    pub block_size: u32,
    /// The number of blocks of a stripe unit.
    pub unit_blocks: u32,
    /// The number of blocks of this member's data area.
    pub data_blocks: u64,
    /// The number of blocks of this member's prepare area, which lies right before the data area; 0
    /// if the volume has none.
    pub prepare_blocks: u32,
    /// The number of streams.
    pub streams: u16,
    /// The engine for which the volume was created.
    pub engine: EngineKind,
    /// The number of this drive among the members.
    pub index: u16,
    /// The generation of the owner that has written the label.
    pub generation: u32,
    /// The number of this label among the labels that were written to the drive. Its last bit is
    /// the block of the label.
    pub sequence: u32,
    /// All members, in order.
    pub members: Vec<MemberId>,
}

/// Why a block is no valid label (trap T19).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LabelError {
    /// Neither copy has a label's magic number.
    #[error("no Rio label: the drive belongs to no volume")]
    Blank,
    /// The label has a later version than this code reads.
    #[error("a label of version {0}, newer than this program reads: upgrade rio")]
    Newer(u32),
    /// The label is damaged: in both copies the checksum or a field is wrong.
    #[error("a damaged label: both copies fail their checks")]
    Damaged,
    /// The drive does not return the blocks of the label.
    #[error("a label that can't be read: the drive reports an error")]
    ReadFailed,
}

impl Label {
    /// The bytes of the label, as they lie in a block.
    ///
    /// The caller must refuse a name longer than [`NAME_MAX`] bytes, and more than [`MEMBERS_MAX`]
    /// members.
    #[must_use]
    pub fn encode(&self, crc32c: Crc32c) -> Vec<u8> {
        debug_assert!(self.name.len() <= NAME_MAX && self.members.len() <= MEMBERS_MAX);
        let mut bytes = alloc::vec![0; LABEL_LEN];
        let mut put = |offset: usize, field: &[u8]| {
            bytes[offset..offset + field.len()].copy_from_slice(field);
        };
        put(offset::MAGIC, &MAGIC);
        put(offset::VERSION, &version_of(self.prepare_blocks > 0).to_le_bytes());
        put(offset::PREPARE_BLOCKS, &self.prepare_blocks.to_le_bytes());
        put(offset::VOLUME, &self.volume.0);
        put(offset::NAME, self.name.as_bytes());
        put(offset::BLOCK_SIZE, &self.block_size.to_le_bytes());
        put(offset::UNIT_BLOCKS, &self.unit_blocks.to_le_bytes());
        put(offset::DATA_START, &DATA_START.to_le_bytes());
        put(offset::DATA_BLOCKS, &self.data_blocks.to_le_bytes());
        put(offset::STREAMS, &self.streams.to_le_bytes());
        put(offset::ENGINE, &[engine_code(self.engine)]);
        put(offset::INDEX, &self.index.to_le_bytes());
        put(offset::MEMBER_COUNT, &(self.members.len() as u16).to_le_bytes());
        put(offset::GENERATION, &self.generation.to_le_bytes());
        put(offset::SEQUENCE, &self.sequence.to_le_bytes());
        for (number, member) in self.members.iter().enumerate() {
            let member_offset = offset::MEMBERS + MEMBER_LEN * number;
            put(member_offset, &member.nguid);
            put(member_offset + member.nguid.len(), &member.region);
        }
        let checksum = crc32c(0, &bytes[offset::VOLUME..]);
        bytes[offset::CHECKSUM..offset::VOLUME].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads one copy of a label.
    ///
    /// # Errors
    /// The copy is not a valid label. A copy without a label's magic number is
    /// [`LabelError::Blank`].
    pub fn decode(bytes: &[u8], crc32c: Crc32c) -> Result<Self, LabelError> {
        if bytes.len() < LABEL_LEN || bytes[..MAGIC.len()] != MAGIC {
            return Err(LabelError::Blank);
        }
        let version = u32_at(bytes, offset::VERSION);
        let accepts_newer = probe::is_bug_planted(Plant::T19NewerLabel) && version > LABEL_VERSION;
        if version > LABEL_VERSION && !accepts_newer {
            return Err(LabelError::Newer(version));
        }
        let checksum = crc32c(0, &bytes[offset::VOLUME..LABEL_LEN]);
        let has_area = u32_at(bytes, offset::PREPARE_BLOCKS) > 0;
        let is_version_valid = version == version_of(has_area) || accepts_newer;
        if checksum != u32_at(bytes, offset::CHECKSUM) || !is_version_valid {
            return Err(LabelError::Damaged);
        }
        Self::decode_fields(bytes).ok_or(LabelError::Damaged)
    }

    /// Reads the fields of a label whose checksum is right; `None` if a field is not valid.
    fn decode_fields(bytes: &[u8]) -> Option<Self> {
        let streams = u16_at(bytes, offset::STREAMS);
        let index = u16_at(bytes, offset::INDEX);
        let unit_blocks = u32_at(bytes, offset::UNIT_BLOCKS);
        let member_count = usize::from(u16_at(bytes, offset::MEMBER_COUNT));
        let is_valid = u64_at(bytes, offset::DATA_START) == DATA_START
            && u32_at(bytes, offset::BLOCK_SIZE) == BLOCK_SIZE
            && unit_blocks > 0
            && (1..=crate::wire::STREAMS_MAX).contains(&streams)
            && (1..=MEMBERS_MAX).contains(&member_count)
            && usize::from(index) < member_count;
        if !is_valid {
            return None;
        }
        let padded_name = &bytes[offset::NAME..offset::NAME + NAME_MAX];
        let name_len = padded_name.iter().position(|byte| *byte == 0).unwrap_or(NAME_MAX);
        // A name is printed, so it must not have control characters.
        let name = core::str::from_utf8(&padded_name[..name_len]).ok()?;
        if !is_valid_name(name) {
            return None;
        }
        let members = bytes[offset::MEMBERS..].chunks_exact(MEMBER_LEN).take(member_count);
        Some(Self {
            volume: VolumeId(array_at(bytes, offset::VOLUME)),
            name: name.into(),
            block_size: BLOCK_SIZE,
            unit_blocks,
            data_blocks: u64_at(bytes, offset::DATA_BLOCKS),
            prepare_blocks: u32_at(bytes, offset::PREPARE_BLOCKS),
            streams,
            engine: engine_of(bytes[offset::ENGINE])?,
            index,
            generation: u32_at(bytes, offset::GENERATION),
            sequence: u32_at(bytes, offset::SEQUENCE),
            members: members
                .map(|member| MemberId { nguid: array_at(member, 0), region: array_at(member, 16) })
                .collect(),
        })
    }

    /// Reads the label of a drive from the two copies in its first two blocks: the newer valid
    /// copy.
    ///
    /// # Errors
    /// Neither copy is valid, or one of them has a newer version.
    pub fn newest(copies: [&[u8]; 2], crc32c: Crc32c) -> Result<Self, LabelError> {
        match copies.map(|copy| Self::decode(copy, crc32c)) {
            [Ok(first), Ok(second)] => {
                Ok(if second.sequence > first.sequence { second } else { first })
            }
            [Err(LabelError::Newer(version)), _] | [_, Err(LabelError::Newer(version))] => {
                Err(LabelError::Newer(version))
            }
            [Ok(label), Err(_)] | [Err(_), Ok(label)] => Ok(label),
            [Err(LabelError::Blank), Err(LabelError::Blank)] => Err(LabelError::Blank),
            _ => Err(LabelError::Damaged),
        }
    }

    /// The label for the next owner of the volume, which must be written over the older copy.
    /// `region` is the log region that the member's target has from now on, zero if it has none;
    /// `None` if it stays the same. The label of a volume whose engine keeps no log names none.
    ///
    /// The newer copy must be durable before the older one is overwritten. The newer copy may have
    /// been read from a volatile cache only, and a power cut could then destroy both copies (trap
    /// T24).
    #[must_use]
    pub fn for_owner(&self, generation: u32, region: Option<[u8; 16]>) -> Self {
        let mut label = self.clone();
        label.generation = generation.max(label.generation);
        label.sequence = label.sequence.wrapping_add(1);
        if let Some(region) = region
            && label.engine.capabilities().keeps_log
        {
            let own_number = usize::from(label.index);
            label.members[own_number].region = region;
        }
        label
    }

    /// Whether the label was written for the drive whose namespace has this NGUID.
    #[must_use]
    pub fn is_of(&self, nguid: [u8; 16]) -> bool {
        self.members.get(usize::from(self.index)).is_some_and(|member| member.nguid == nguid)
    }

    /// Whether both labels list the same drives.
    #[must_use]
    pub fn has_members_of(&self, other: &Self) -> bool {
        let nguids = |label: &Self| label.members.iter().map(|member| member.nguid).collect();
        let (own, others): (Vec<_>, Vec<_>) = (nguids(self), nguids(other));
        own == others
    }

    /// The block of the copy with this sequence number.
    #[must_use]
    pub const fn block_of(sequence: u32) -> u64 {
        sequence as u64 % 2
    }
}

/// The version of the labels of a volume with or without a prepare area.
const fn version_of(has_area: bool) -> u32 {
    if has_area { LABEL_VERSION } else { LABEL_VERSION_PLAIN }
}

/// Whether a volume may have this name: 1 to [`NAME_MAX`] bytes without control characters.
#[must_use]
pub fn is_valid_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= NAME_MAX && !name.chars().any(char::is_control)
}

/// The number of an engine in a label.
const fn engine_code(engine: EngineKind) -> u8 {
    match engine {
        EngineKind::None => 1,
        EngineKind::Sync => 2,
        EngineKind::Rio => 3,
        EngineKind::Linux => 4,
        EngineKind::Horae => 5,
        EngineKind::Barrier => 6,
        EngineKind::Opimq => 7,
    }
}

/// The engine with this number in a label.
fn engine_of(code: u8) -> Option<EngineKind> {
    EngineKind::ALL.into_iter().find(|kind| engine_code(*kind) == code)
}

/// A drive that is to be a member of a volume, as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The NGUID of the drive's namespace.
    pub nguid: [u8; 16],
    /// The id of the log region of the drive's target; `None` if the target has no log.
    pub region: Option<[u8; 16]>,
    /// The label of the drive.
    pub label: Result<Label, LabelError>,
}

/// Why drives don't form the volume (traps T19, T20). `given` is the number of a drive, counted
/// from 0, in the order in which the caller has named the drives.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AssembleError {
    /// No members were given.
    #[error("no members given")]
    NoMembers,
    /// A drive without a valid label.
    #[error("member {given}: {error}")]
    Label {
        /// The number of the member, as given.
        given: usize,
        /// The error.
        error: LabelError,
    },
    /// A drive of another volume.
    #[error("member {given} belongs to volume \"{name}\" ({volume}), not to this one")]
    Foreign {
        /// The number of the member, as given.
        given: usize,
        /// The volume it belongs to.
        name: String,
        /// Its id.
        volume: VolumeId,
    },
    /// The volume is not the requested one.
    #[error("these drives are volume \"{found}\", not \"{wanted}\"")]
    OtherName {
        /// The requested name.
        wanted: String,
        /// The name on the labels.
        found: String,
    },
    /// The right drives in another order.
    #[error("member {given} is the volume's member {is}: give the members in the volume's order")]
    Order {
        /// The number of the member, as given.
        given: usize,
        /// The number of the member in the volume.
        is: u16,
    },
    /// Too few or too many drives.
    #[error("the volume has {needed} members, {given} were given: all are needed")]
    Count {
        /// The number of members of the volume.
        needed: usize,
        /// The number of members given.
        given: usize,
    },
    /// A label copied from another drive.
    #[error(
        "member {given}: the label is another drive's (its NGUID differs): this drive is a copy of \
         it, or was moved from another file system or device"
    )]
    Copied {
        /// The number of the member, as given.
        given: usize,
    },
    /// Labels that contradict each other.
    #[error("member {given}: its label contradicts member 0's")]
    Contradiction {
        /// The number of the member, as given.
        given: usize,
    },
    /// The target serves the drive with another log than the one that is due by the label (trap
    /// T19).
    #[error(
        "member {given}: its target has {}; start the target with the volume's log, or, if that log \
         is lost, open with the loss accepted (accept_lost_log){}",
        if *.blank {
            "no ordering log where one is due by the label"
        } else {
            "another ordering log than the one that is due by the label"
        },
        if *.blank {
            ": then the volume has no log there, and its engine is sync; to keep its engine, start the \
             target with a new log first"
        } else {
            ""
        }
    )]
    LogDue {
        /// The number of the member, as given.
        given: usize,
        /// Whether the target has no ordering log at all.
        blank: bool,
    },
}

/// Checks by their labels that the drives are exactly the members of one volume, in the right
/// order. If there is a `name`, the volume must have this name. Returns the label of the first
/// drive, with the volume's name. The function [`logs_due`] checks the logs.
///
/// # Errors
/// The first error found.
pub fn assemble(name: Option<&str>, found: &[Found]) -> Result<Label, AssembleError> {
    let mut head = check_same_volume(found)?.clone();
    // A change of the name is written to one label after the other, so after a crash the newest
    // label has the name.
    let labels = found.iter().filter_map(|drive| drive.label.as_ref().ok());
    if let Some(newest) = labels.max_by_key(|label| label.generation) {
        head.name.clone_from(&newest.name);
    }
    if let Some(wanted) = name.filter(|name| *name != head.name) {
        return Err(AssembleError::OtherName { wanted: wanted.into(), found: head.name });
    }
    for (given, drive) in found.iter().enumerate() {
        let Ok(label) = &drive.label else { continue };
        if usize::from(label.index) != given {
            return Err(AssembleError::Order { given, is: label.index });
        }
    }
    if found.len() != head.members.len() {
        return Err(AssembleError::Count { needed: head.members.len(), given: found.len() });
    }
    for (given, (drive, member)) in found.iter().zip(&head.members).enumerate() {
        if drive.nguid != member.nguid {
            return Err(AssembleError::Copied { given });
        }
    }
    Ok(head)
}

/// Checks that all labels are valid, are of one volume, and agree about it. Returns the label of
/// the first drive.
fn check_same_volume(found: &[Found]) -> Result<&Label, AssembleError> {
    let mut first: Option<&Label> = None;
    for (given, drive) in found.iter().enumerate() {
        let label =
            drive.label.as_ref().map_err(|error| AssembleError::Label { given, error: *error })?;
        let head = *first.get_or_insert(label);
        if label.volume != head.volume && !probe::is_bug_planted(Plant::T19OtherVolume) {
            let (name, volume) = (label.name.clone(), label.volume);
            return Err(AssembleError::Foreign { given, name, volume });
        }
        if !describes_same_volume(label, head) {
            return Err(AssembleError::Contradiction { given });
        }
    }
    first.ok_or(AssembleError::NoMembers)
}

/// Whether two labels agree about the properties of the volume. The generations, the sequence
/// numbers, the log regions and the size of the data area may differ, because labels are rewritten
/// one after the other. So may the name, but a new name comes with a new generation.
fn describes_same_volume(label: &Label, other: &Label) -> bool {
    let nguids_of_label = label.members.iter().map(|member| member.nguid);
    let nguids_of_other = other.members.iter().map(|member| member.nguid);
    nguids_of_label.eq(nguids_of_other)
        && label.unit_blocks == other.unit_blocks
        && label.prepare_blocks == other.prepare_blocks
        && label.streams == other.streams
        && (label.name == other.name || label.generation != other.generation)
}

/// The id of the log region that this label names for its own drive's target; `None` if the volume
/// has no log there.
#[must_use]
pub fn log_due(label: &Label) -> Option<[u8; 16]> {
    let member = label.members.get(usize::from(label.index))?;
    Some(member.region).filter(|region| *region != [0; 16])
}

/// Checks that the target of each drive has the log region that the drive's label names (trap T19).
///
/// # Errors
/// The first drive whose target has no log or another log.
pub fn logs_due(found: &[Found]) -> Result<(), AssembleError> {
    for (given, drive) in found.iter().enumerate() {
        let due = drive.label.as_ref().ok().and_then(log_due);
        if due.is_some() && drive.region != due {
            return Err(AssembleError::LogDue { given, blank: drive.region.is_none() });
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use riopipe_nvme::digest;

    pub(crate) fn crc(a: u32, d: &[u8]) -> u32 {
        digest::soft(a, d)
    }

    /// The label of a drive of a volume of three.
    pub(crate) fn label(index: u16) -> Label {
        Label {
            volume: VolumeId([9; 16]),
            name: "logs".into(),
            block_size: 4096,
            unit_blocks: 16,
            data_blocks: 1000,
            prepare_blocks: 0,
            streams: 8,
            engine: EngineKind::Rio,
            index,
            generation: 1,
            sequence: 4,
            members: (0..3).map(|i| MemberId { nguid: [i; 16], region: [i + 100; 16] }).collect(),
        }
    }

    fn found(index: u16) -> Found {
        Found {
            nguid: [index as u8; 16],
            region: Some([index as u8 + 100; 16]),
            label: Ok(label(index)),
        }
    }

    #[test]
    fn t19_a_label_is_input_too() {
        let good = label(1).encode(crc);
        assert_eq!(Label::decode(&good, crc), Ok(label(1)));
        for at in (8..LABEL_LEN).step_by(7) {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert!(Label::decode(&bad, crc).is_err(), "a flipped bit at {at}");
        }
        assert_eq!(Label::decode(&[0; LABEL_LEN], crc), Err(LabelError::Blank));
        let mut newer = good.clone();
        newer[8] = 3;
        assert_eq!(Label::newest([&good, &newer], crc), Err(LabelError::Newer(3)));
        let mut torn = good.clone();
        torn[200] ^= 1;
        assert_eq!(Label::newest([&torn, &good], crc), Ok(label(1)), "the other copy counts");
        assert_eq!(Label::newest([&torn, &torn], crc), Err(LabelError::Damaged));
        assert_eq!(Label::newest([&torn, &[0; LABEL_LEN]], crc), Err(LabelError::Damaged));
        assert_eq!(Label::newest([&[0; LABEL_LEN]; 2], crc), Err(LabelError::Blank));
        assert_eq!([4, 5, u32::MAX].map(Label::block_of), [0, 1, 1]);
        let mut later = label(1);
        later.sequence = 5;
        assert_eq!(Label::newest([&good, &later.encode(crc)], crc), Ok(later));
    }

    #[test]
    fn t24_an_owner_writes_the_older_copy_and_never_a_lower_generation() {
        let next = label(2).for_owner(7, None);
        assert_eq!((next.generation, next.sequence), (7, 5));
        assert_ne!(Label::block_of(next.sequence), Label::block_of(label(2).sequence));
        assert_eq!(next.members, label(2).members);
        assert_eq!(label(2).for_owner(0, None).generation, 1);
        let given_up = label(2).for_owner(7, Some([77; 16]));
        assert_eq!(given_up.members[2].region, [77; 16]);
        assert_eq!(given_up.members[..2], label(2).members[..2]);
        // A log that was lost without another one, and one that comes after it.
        let without = label(2).for_owner(7, Some([0; 16]));
        assert_eq!(log_due(&without), None);
        assert_eq!(log_due(&without.for_owner(8, None)), None);
        assert_eq!(log_due(&without.for_owner(8, Some([77; 16]))), Some([77; 16]));
        // A volume whose engine keeps no log.
        let mut unlogged = Label { engine: EngineKind::Sync, ..label(2) };
        unlogged.members[2].region = [0; 16];
        assert_eq!(unlogged.for_owner(7, Some([77; 16])).members, unlogged.members);
    }

    #[test]
    fn a_label_survives_the_drive_to_the_last_bit() {
        let odd = Label {
            volume: VolumeId(core::array::from_fn(|i| 0x80 + i as u8)),
            name: "n".repeat(NAME_MAX),
            unit_blocks: 0x8001_0203,
            data_blocks: 0x8182_8384_8586_8788,
            prepare_blocks: 0,
            streams: 0x0304,
            engine: EngineKind::Sync,
            index: 0x0067,
            generation: 0x9192_9394,
            sequence: 0xa1a2_a3a4,
            members: (0..MEMBERS_MAX as u8)
                .map(|i| MemberId { nguid: [i; 16], region: [0xff - i; 16] })
                .collect(),
            ..label(0)
        };
        let bytes = odd.encode(crc);
        assert_eq!(Label::decode(&bytes, crc), Ok(odd));
        // As docs/label-format.md draws it.
        assert_eq!(bytes[..12], *b"RIOLABEL\x01\0\0\0");
        assert_eq!((bytes[16], bytes[31], bytes[32], bytes[95]), (0x80, 0x8f, b'n', b'n'));
        assert_eq!(bytes[96..112], [0, 0x10, 0, 0, 3, 2, 1, 0x80, 0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[112..120], [0x88, 0x87, 0x86, 0x85, 0x84, 0x83, 0x82, 0x81]);
        assert_eq!(bytes[120..128], [4, 3, 2, 0, 0x67, 0, 120, 0]);
        assert_eq!(bytes[128..136], [0x94, 0x93, 0x92, 0x91, 0xa4, 0xa3, 0xa2, 0xa1]);
        assert_eq!((bytes[256 + 32], bytes[256 + 47], bytes[272 + 32]), (1, 1, 0xfe));
    }

    #[test]
    fn a_label_with_a_prepare_area_has_the_version_that_earlier_programs_refuse() {
        let with_area = Label { prepare_blocks: 0x8182_8384, ..label(1) };
        let mut bytes = with_area.encode(crc);
        assert_eq!((bytes[8], &bytes[136..140]), (2, &[0x84, 0x83, 0x82, 0x81][..]));
        assert_eq!(Label::decode(&bytes, crc), Ok(with_area));
        bytes[8] = 1;
        assert_eq!(Label::decode(&bytes, crc), Err(LabelError::Damaged));
        assert_eq!(label(1).encode(crc)[8], 1);
    }

    #[test]
    fn t19_a_label_is_judged_by_each_of_its_fields() {
        let sealed = |change: &dyn Fn(&mut [u8])| {
            let mut bytes = label(1).encode(crc);
            change(&mut bytes);
            let sum = crc(0, &bytes[16..]);
            bytes[12..16].copy_from_slice(&sum.to_le_bytes());
            Label::decode(&bytes, crc)
        };
        assert_eq!(sealed(&|_| ()), Ok(label(1)));
        let wrong: [(&str, usize, &[u8]); 13] = [
            ("version 0", 8, &[0]),
            ("a name that is no text", 32, &[0xff]),
            ("blocks of 512 bytes", 96, &[0, 2]),
            ("no stripe unit", 100, &[0; 4]),
            ("data that starts elsewhere", 104, &[1]),
            ("data that starts far away", 108, &[1]),
            ("no streams", 120, &[0, 0]),
            ("too many streams", 120, &[1, 4]),
            ("no engine", 122, &[0]),
            ("an unknown engine", 122, &[99]),
            ("a member that there is not", 124, &[3, 0]),
            ("no members", 124, &[0; 4]),
            ("too many members", 126, &[121, 0]),
        ];
        for (what, at, bytes) in wrong {
            let got = sealed(&|b| b[at..at + bytes.len()].copy_from_slice(bytes));
            assert_eq!(got, Err(LabelError::Damaged), "{what}");
        }
        assert!(sealed(&|b| b[120..122].copy_from_slice(&[0, 4])).is_ok(), "1024 streams");
        assert_eq!(Label::decode(&label(1).encode(crc)[..4095], crc), Err(LabelError::Blank));
    }

    #[test]
    fn t20_labels_that_contradict_each_other_make_no_volume() {
        let with = |change: fn(&mut Label)| {
            let mut all = [found(0), found(1), found(2)];
            change(all[1].label.as_mut().unwrap());
            assemble(None, &all)
        };
        let contradiction = Err(AssembleError::Contradiction { given: 1 });
        assert_eq!(with(|l| l.unit_blocks = 8), contradiction);
        assert_eq!(with(|l| l.prepare_blocks = 8), contradiction);
        assert_eq!(with(|l| l.streams = 9), contradiction);
        assert_eq!(with(|l| l.name = "log".into()), contradiction);
        assert_eq!(with(|l| l.members[2].nguid = [9; 16]), contradiction);
        assert_eq!(with(|l| l.members.truncate(2)), contradiction);
        assert!(with(|l| (l.generation, l.sequence) = (9, 9)).is_ok(), "rewritten one by one");
        let renamed = with(|l| (l.generation, l.name) = (9, "new".into())).unwrap();
        assert_eq!((&renamed.name[..], renamed.index), ("new", 0), "the newest name counts");
        assert!(with(|l| (l.generation, l.data_blocks) = (9, 2000)).is_ok());
        assert_eq!(assemble(None, &[]), Err(AssembleError::NoMembers));
    }

    #[test]
    fn t20_all_members_or_none() {
        let all = [found(0), found(1), found(2)];
        assert!(assemble(Some("logs"), &all).is_ok());
        assert_eq!(assemble(None, &all[..2]), Err(AssembleError::Count { needed: 3, given: 2 }));
        let swapped = [found(0), found(2), found(1)];
        assert_eq!(assemble(None, &swapped), Err(AssembleError::Order { given: 1, is: 2 }));
        let mut foreign = all.clone();
        foreign[2].label.as_mut().unwrap().volume = VolumeId([1; 16]);
        assert!(matches!(assemble(None, &foreign), Err(AssembleError::Foreign { given: 2, .. })));
        let mut copied = all.clone();
        copied[1].nguid = [77; 16];
        assert_eq!(assemble(None, &copied), Err(AssembleError::Copied { given: 1 }));
        let mut blank = all.clone();
        blank[0].label = Err(LabelError::Blank);
        assert!(matches!(assemble(None, &blank), Err(AssembleError::Label { given: 0, .. })));
        assert!(matches!(assemble(Some("x"), &all), Err(AssembleError::OtherName { .. })));
    }

    #[test]
    fn t19_the_log_that_is_due_must_be_there() {
        let mut all = [found(0), found(1), found(2)];
        assert_eq!(logs_due(&all), Ok(()));
        all[1].region = None;
        assert_eq!(logs_due(&all), Err(AssembleError::LogDue { given: 1, blank: true }));
        all[1].region = Some([1; 16]);
        assert_eq!(logs_due(&all), Err(AssembleError::LogDue { given: 1, blank: false }));
        assert_eq!(log_due(&label(2)), Some([102; 16]));
        // A member of a server without a log.
        all[1].label.as_mut().unwrap().members[1].region = [0; 16];
        assert_eq!(logs_due(&all), Ok(()));
        let mut beyond = label(2);
        beyond.members.pop();
        assert_eq!(log_due(&beyond), None);
    }
}
