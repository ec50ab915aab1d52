//! The label on every drive of a volume: the members of the volume, their order, and the log that
//! is due (docs/label-format.md draws the bytes).
//!
//! Two copies lie in the drive's first two blocks and are written alternately, so that a torn
//! write leaves the other; the one with the higher `sequence` counts. The data area starts at
//! [`DATA_START`].

use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::digest::Crc32c;
use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;
use riopipe_order::probe::{self, Plant};

/// Bytes of a label: one block.
pub const LABEL_LEN: usize = 4096;
/// The version that this code writes and reads.
pub const LABEL_VERSION: u32 = 1;
/// First block of the data area on every member.
pub const DATA_START: u64 = 256;
/// The most members of a volume: a label has no space for more.
pub const MEMBERS_MAX: usize = 120;
/// The most bytes of a volume's name.
pub const NAME_MAX: usize = 64;

const MAGIC: [u8; 8] = *b"RIOLABEL";
/// The place of the list of members in a label.
const MEMBERS_AT: usize = 256;
/// The bytes of a member in this list.
const MEMBER_LEN: usize = 32;

/// The identity of a member, as a label records it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemberId {
    /// The namespace's NGUID.
    pub nguid: [u8; 16],
    /// The log region of the target that serves it; zero if none is due.
    pub region: [u8; 16],
}

/// A drive's label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// The volume.
    pub volume: VolumeId,
    /// The name of the volume.
    pub name: String,
    /// The bytes of a block.
    pub block_size: u32,
    /// The blocks of a stripe unit.
    pub unit_blocks: u32,
    /// The number of blocks of this member's data area.
    pub data_blocks: u64,
    /// The number of streams.
    pub streams: u16,
    /// The engine that the volume was made for.
    pub engine: EngineKind,
    /// The number of the member that this drive is.
    pub index: u16,
    /// The owner's generation when the label was written.
    pub generation: u32,
    /// The number of rewrites of the label.
    pub sequence: u32,
    /// All members, in order.
    pub members: Vec<MemberId>,
}

/// Why a block is no valid label (T19).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LabelError {
    /// Neither copy has a label's magic number.
    #[error("no Rio label: the drive belongs to no volume")]
    Blank,
    /// A label of a later version of Rio.
    #[error("a label of version {0}, newer than this program reads: upgrade rio")]
    Newer(u32),
    /// A damaged label: in both copies the checksum or a field is wrong.
    #[error("a damaged label: both copies fail their checks")]
    Damaged,
}

impl Label {
    /// The bytes of the label, as they lie in a block.
    ///
    /// The caller must refuse a name longer than [`NAME_MAX`] bytes, and more than [`MEMBERS_MAX`]
    /// members.
    #[must_use]
    pub fn encode(&self, crc32c: Crc32c) -> Vec<u8> {
        debug_assert!(self.name.len() <= NAME_MAX && self.members.len() <= MEMBERS_MAX);
        let mut b = alloc::vec![0; LABEL_LEN];
        b[0..8].copy_from_slice(&MAGIC);
        b[8..12].copy_from_slice(&LABEL_VERSION.to_le_bytes());
        b[16..32].copy_from_slice(&self.volume.0);
        b[32..32 + self.name.len()].copy_from_slice(self.name.as_bytes());
        b[96..100].copy_from_slice(&self.block_size.to_le_bytes());
        b[100..104].copy_from_slice(&self.unit_blocks.to_le_bytes());
        b[104..112].copy_from_slice(&DATA_START.to_le_bytes());
        b[112..120].copy_from_slice(&self.data_blocks.to_le_bytes());
        b[120..122].copy_from_slice(&self.streams.to_le_bytes());
        b[122] = engine_code(self.engine);
        b[124..126].copy_from_slice(&self.index.to_le_bytes());
        b[126..128].copy_from_slice(&(self.members.len() as u16).to_le_bytes());
        b[128..132].copy_from_slice(&self.generation.to_le_bytes());
        b[132..136].copy_from_slice(&self.sequence.to_le_bytes());
        for (i, member) in self.members.iter().enumerate() {
            let at = MEMBERS_AT + MEMBER_LEN * i;
            b[at..at + 16].copy_from_slice(&member.nguid);
            b[at + 16..at + 32].copy_from_slice(&member.region);
        }
        let crc = crc32c(0, &b[16..]);
        b[12..16].copy_from_slice(&crc.to_le_bytes());
        b
    }

    /// Reads one copy of a label.
    ///
    /// # Errors
    /// [`LabelError`]; a copy without a label's magic number is [`LabelError::Blank`].
    pub fn decode(b: &[u8], crc32c: Crc32c) -> Result<Self, LabelError> {
        if b.len() < LABEL_LEN || b[0..8] != MAGIC {
            return Err(LabelError::Blank);
        }
        let u16_at = |at: usize| u16::from_le_bytes([b[at], b[at + 1]]);
        let u32_at = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let array_at = |at: usize| {
            let mut a = [0; 16];
            a.copy_from_slice(&b[at..at + 16]);
            a
        };
        let version = u32_at(8);
        let accepts_newer = probe::planted(Plant::T19NewerLabel) && version > LABEL_VERSION;
        if version > LABEL_VERSION && !accepts_newer {
            return Err(LabelError::Newer(version));
        }
        if crc32c(0, &b[16..LABEL_LEN]) != u32_at(12) {
            return Err(LabelError::Damaged);
        }
        let name = &b[32..96];
        let name = &name[..name.iter().position(|c| *c == 0).unwrap_or(NAME_MAX)];
        let members = usize::from(u16_at(126));
        let is_valid = (version == LABEL_VERSION || accepts_newer)
            && u64_at(104) == DATA_START
            && u32_at(96) == 4096
            && u32_at(100) > 0
            && (1..=crate::wire::STREAMS_MAX).contains(&u16_at(120))
            && (1..=MEMBERS_MAX).contains(&members)
            && usize::from(u16_at(124)) < members;
        let (true, Some(engine), Ok(name)) =
            (is_valid, engine_of(b[122]), core::str::from_utf8(name))
        else {
            return Err(LabelError::Damaged);
        };
        Ok(Self {
            volume: VolumeId(array_at(16)),
            name: name.into(),
            block_size: u32_at(96),
            unit_blocks: u32_at(100),
            data_blocks: u64_at(112),
            streams: u16_at(120),
            engine,
            index: u16_at(124),
            generation: u32_at(128),
            sequence: u32_at(132),
            members: (0..members)
                .map(|i| MemberId {
                    nguid: array_at(MEMBERS_AT + MEMBER_LEN * i),
                    region: array_at(MEMBERS_AT + MEMBER_LEN * i + 16),
                })
                .collect(),
        })
    }

    /// The label of a drive from its first two blocks: the newer valid copy.
    ///
    /// # Errors
    /// Neither copy is valid, or one of them has a newer version.
    pub fn newest(copies: [&[u8]; 2], crc32c: Crc32c) -> Result<Self, LabelError> {
        match copies.map(|copy| Self::decode(copy, crc32c)) {
            [Ok(a), Ok(b)] => Ok(if b.sequence > a.sequence { b } else { a }),
            [Err(LabelError::Newer(v)), _] | [_, Err(LabelError::Newer(v))] => {
                Err(LabelError::Newer(v))
            }
            [Ok(label), Err(_)] | [Err(_), Ok(label)] => Ok(label),
            [Err(LabelError::Blank), Err(LabelError::Blank)] => Err(LabelError::Blank),
            _ => Err(LabelError::Damaged),
        }
    }

    /// The label for the volume's next owner, to be written over the copy that is older. `region`
    /// is the log that is due on the member's target from now on, if that changes.
    ///
    /// The copy that stays must be durable before the other is overwritten: the content that was
    /// read may be in a volatile cache only, and then the drive would fall back to the older copy
    /// (T24).
    #[must_use]
    pub fn for_owner(&self, generation: u32, region: Option<[u8; 16]>) -> Self {
        let mut label = self.clone();
        label.generation = generation.max(label.generation);
        label.sequence = label.sequence.wrapping_add(1);
        if let Some(region) = region
            && log_due(&label).is_some()
        {
            let own = usize::from(label.index);
            label.members[own].region = region;
        }
        label
    }

    /// The block that the next rewrite goes to: the copy that is older.
    #[must_use]
    pub const fn block_of(sequence: u32) -> u64 {
        sequence as u64 % 2
    }
}

const fn engine_code(engine: EngineKind) -> u8 {
    match engine {
        EngineKind::None => 1,
        EngineKind::Sync => 2,
        EngineKind::Rio => 3,
    }
}

fn engine_of(code: u8) -> Option<EngineKind> {
    EngineKind::ALL.into_iter().find(|kind| engine_code(*kind) == code)
}

/// The drive found at the place of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The namespace's NGUID.
    pub nguid: [u8; 16],
    /// The log region of its target, if it has one.
    pub region: Option<[u8; 16]>,
    /// Its label.
    pub label: Result<Label, LabelError>,
}

/// Why drives don't make the volume (T19, T20). Members are counted from 0, as given.
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
    #[error("member {given}: the label is another drive's (its NGUID differs): was it copied?")]
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
    /// The target serves the drive with another log than the one that is due by the label (T19).
    #[error(
        "member {given}: its target has {}; start the target with the volume's log, or {}open with \
         the loss accepted (accept_lost_log)",
        if *.blank {
            "no ordering log where one is due by the label"
        } else {
            "another ordering log than the one that is due by the label"
        },
        if *.blank { "start it with a new log and then " } else { "" }
    )]
    LogDue {
        /// The number of the member, as given.
        given: usize,
        /// Whether the target has no ordering log at all.
        blank: bool,
    },
}

/// Checks that the drives found make the volume called `name` (or, without a name, any one volume),
/// complete and in order. [`logs_due`] checks their logs.
///
/// # Errors
/// The first error found.
pub fn assemble(name: Option<&str>, found: &[Found]) -> Result<Label, AssembleError> {
    let mut first: Option<&Label> = None;
    for (given, drive) in found.iter().enumerate() {
        let label =
            drive.label.as_ref().map_err(|error| AssembleError::Label { given, error: *error })?;
        let head = *first.get_or_insert(label);
        if label.volume != head.volume && !probe::planted(Plant::T19OtherVolume) {
            let (name, volume) = (label.name.clone(), label.volume);
            return Err(AssembleError::Foreign { given, name, volume });
        }
        let is_same_drive = |(a, b): (&MemberId, &MemberId)| a.nguid == b.nguid;
        if label.members.len() != head.members.len()
            || !label.members.iter().zip(&head.members).all(is_same_drive)
            || label.unit_blocks != head.unit_blocks
            || label.streams != head.streams
            || label.name != head.name
        {
            return Err(AssembleError::Contradiction { given });
        }
    }
    let first = first.ok_or(AssembleError::NoMembers)?;
    if let Some(wanted) = name.filter(|name| *name != first.name) {
        return Err(AssembleError::OtherName { wanted: wanted.into(), found: first.name.clone() });
    }
    for (given, drive) in found.iter().enumerate() {
        let Ok(label) = &drive.label else { continue };
        if usize::from(label.index) != given {
            return Err(AssembleError::Order { given, is: label.index });
        }
    }
    if found.len() != first.members.len() {
        return Err(AssembleError::Count { needed: first.members.len(), given: found.len() });
    }
    for (given, (drive, member)) in found.iter().zip(&first.members).enumerate() {
        if drive.nguid != member.nguid {
            return Err(AssembleError::Copied { given });
        }
    }
    Ok(first.clone())
}

/// The log region that is due for the member that carries this label; `None` if none is.
#[must_use]
pub fn log_due(label: &Label) -> Option<[u8; 16]> {
    let member = label.members.get(usize::from(label.index))?;
    Some(member.region).filter(|region| *region != [0; 16])
}

/// Checks that each drive is served with the log that is due by its label (T19).
///
/// # Errors
/// The first drive without its log.
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
        newer[8] = 2;
        assert_eq!(Label::newest([&good, &newer], crc), Err(LabelError::Newer(2)));
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
        let mut unlogged = label(2);
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
            ("an unknown engine", 122, &[4]),
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
        assert_eq!(with(|l| l.streams = 9), contradiction);
        assert_eq!(with(|l| l.name = "log".into()), contradiction);
        assert_eq!(with(|l| l.members[2].nguid = [9; 16]), contradiction);
        assert_eq!(with(|l| l.members.truncate(2)), contradiction);
        assert!(with(|l| (l.generation, l.sequence) = (9, 9)).is_ok(), "rewritten one by one");
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
