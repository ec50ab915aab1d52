//! The identity under which a target serves a drive: its NGUID and its UUID.
//!
//! A drive keeps its identity whatever address, port, namespace id, subsystem or machine it is
//! served from, and a copy of the drive does not get it (trap T27). So the target stores an
//! identity as a [`Record`] together with the [`Place`] of the drive: that which a copy does not
//! share with it. There are two stores:
//!
//! - an attribute of the file, for a drive in a file;
//! - block [`RECORD_BLOCK`] of a drive that has a label: that block is reserved there, and belongs
//!   to no plain host.
//!
//! [`choose`] decides which identity a drive gets, and [`adopt`] makes a drive that was moved the
//! owner of the identity that it carries. docs/label-format.md draws the record.

use core::fmt;

use alloc::vec::Vec;

use riopipe_nvme::digest::Crc32c;

use crate::label::{LABEL_LEN, Label, LabelError};
use crate::wire::{array_at, u32_at, u64_at};

/// The bytes of a [`Record`].
pub const RECORD_LEN: usize = 96;
/// The version of the record that this code writes and reads.
pub const RECORD_VERSION: u32 = 1;
/// The block of a drive with a label that has the drive's record.
pub const RECORD_BLOCK: u64 = 2;

const MAGIC: [u8; 8] = *b"RIODRIVE";
/// The places of the fields in a record, bytes. All numbers are little-endian.
mod offset {
    pub(super) const VERSION: usize = 8;
    /// CRC32C of all bytes after it.
    pub(super) const CHECKSUM: usize = 12;
    pub(super) const NGUID: usize = 16;
    pub(super) const UUID: usize = 32;
    pub(super) const PLACE: usize = 48;
    pub(super) const BIRTH: usize = 64;
    pub(super) const FILE_SYSTEM: usize = 72;
}

/// The identity of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriveId {
    /// The NGUID.
    pub nguid: [u8; 16],
    /// The UUID.
    pub uuid: [u8; 16],
}

impl DriveId {
    /// The identity with this NGUID. The UUID follows from it.
    #[must_use]
    pub fn with_nguid(nguid: [u8; 16]) -> Self {
        Self { nguid, uuid: derived_uuid(&[b"drive", &nguid]) }
    }

    /// The identity of a device with this identifier, which its hardware reports.
    #[must_use]
    pub fn of_device(identifier: &str) -> Self {
        Self::with_nguid(derived_uuid(&[b"device", identifier.as_bytes()]))
    }
}

/// That which a copy of a drive does not share with the drive: the inode of its file, or the
/// identifier of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// A hash of the inode's number, or of the device's identifier.
    key: [u8; 16],
    /// The time at which the file was made, ns since 1970: inode numbers are used again. 0 if the
    /// file system does not report it.
    birth_ns: u64,
    /// The id of the file system that has the file. 0 if it is not known.
    file_system: u64,
}

impl Place {
    /// The place of a drive in the file with this inode. `birth_ns` and `file_system`, which is an
    /// id that another file system does not have, are 0 if they are not known.
    #[must_use]
    pub fn of_file(inode: u64, birth_ns: u64, file_system: u64) -> Self {
        Self { key: derived_uuid(&[b"inode", &inode.to_le_bytes()]), birth_ns, file_system }
    }

    /// The place of a drive that is a device with this identifier.
    #[must_use]
    pub fn of_device(identifier: &str) -> Self {
        let key = derived_uuid(&[b"at device", identifier.as_bytes()]);
        Self { key, birth_ns: 0, file_system: 0 }
    }

    /// Whether both are one place for certain. The first files of any two file systems have the
    /// same inode numbers, so more than the number must be known of a file.
    fn is_same(self, other: Self, is_device: bool) -> bool {
        let is_certain = if self.birth_ns.min(other.birth_ns) > 0 {
            self.birth_ns == other.birth_ns
        } else {
            self.file_system.min(other.file_system) > 0 && self.file_system == other.file_system
        };
        self.key == other.key && (is_device || is_certain)
    }

    /// Whether the place of a file can be recognised again.
    fn is_recognisable(self) -> bool {
        self.birth_ns > 0 || self.file_system > 0
    }
}

/// A stored identity, with the place of the drive that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The identity.
    pub id: DriveId,
    /// The place of the drive when the record was written.
    pub place: Place,
}

/// Why a stored identity can't be used (trap T19).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The record has a later version than this code reads.
    #[error("the drive's identity has format version {0}, newer than this program reads")]
    Newer(u32),
    /// The record is damaged.
    #[error("the drive's stored identity is damaged")]
    Damaged,
}

impl Record {
    /// The bytes of the record.
    #[must_use]
    pub fn encode(&self, crc32c: Crc32c) -> [u8; RECORD_LEN] {
        let mut bytes = [0; RECORD_LEN];
        let mut put = |offset: usize, field: &[u8]| {
            bytes[offset..offset + field.len()].copy_from_slice(field);
        };
        put(0, &MAGIC);
        put(offset::VERSION, &RECORD_VERSION.to_le_bytes());
        put(offset::NGUID, &self.id.nguid);
        put(offset::UUID, &self.id.uuid);
        put(offset::PLACE, &self.place.key);
        put(offset::BIRTH, &self.place.birth_ns.to_le_bytes());
        put(offset::FILE_SYSTEM, &self.place.file_system.to_le_bytes());
        let checksum = crc32c(0, &bytes[offset::NGUID..]);
        bytes[offset::CHECKSUM..offset::NGUID].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads a record; `None` if `bytes` do not begin with one.
    ///
    /// # Errors
    /// The bytes begin like a record, and it can't be used.
    pub fn decode(bytes: &[u8], crc32c: Crc32c) -> Result<Option<Self>, RecordError> {
        if !is_record(bytes) {
            return Ok(None);
        }
        let bytes = bytes.get(..RECORD_LEN).ok_or(RecordError::Damaged)?;
        let version = u32_at(bytes, offset::VERSION);
        if version > RECORD_VERSION {
            return Err(RecordError::Newer(version));
        }
        let checksum = crc32c(0, &bytes[offset::NGUID..]);
        if version != RECORD_VERSION || checksum != u32_at(bytes, offset::CHECKSUM) {
            return Err(RecordError::Damaged);
        }
        let id =
            DriveId { nguid: array_at(bytes, offset::NGUID), uuid: array_at(bytes, offset::UUID) };
        let place = Place {
            key: array_at(bytes, offset::PLACE),
            birth_ns: u64_at(bytes, offset::BIRTH),
            file_system: u64_at(bytes, offset::FILE_SYSTEM),
        };
        Ok(Some(Self { id, place }))
    }
}

/// Whether a block begins with a record, valid or not.
#[must_use]
pub fn is_record(block: &[u8]) -> bool {
    block.starts_with(&MAGIC)
}

/// The first blocks of a drive that has a label and nothing else there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Block [`RECORD_BLOCK`].
    record_block: Vec<u8>,
}

impl Reserved {
    /// Searches the first three blocks of a drive for a label.
    ///
    /// Both copies must be labels of one volume, or one of them blank, and the reserved block must
    /// be blank or have a record. Else a plain host may have put something else there, such as a
    /// partition table, and left a copy of the label.
    #[must_use]
    pub fn find(blocks: &[u8], crc32c: Crc32c) -> Option<Self> {
        let [first, second, record_block] = [0, 1, 2]
            .map(|block| blocks.get(block * LABEL_LEN..(block + 1) * LABEL_LEN).unwrap_or(&[]));
        let copies = [first, second];
        let label = Label::newest(copies, crc32c).ok()?;
        let is_right = |copy: &&[u8]| match Label::decode(copy, crc32c) {
            Ok(other) => other.volume == label.volume,
            Err(LabelError::Blank) => is_zero(copy),
            Err(_) => false,
        };
        let has_room = is_zero(record_block) || is_record(record_block);
        if record_block.len() != LABEL_LEN || !has_room || !copies.iter().all(is_right) {
            return None;
        }
        Some(Self { record_block: record_block.into() })
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// All that is known of the identity of a drive before the target serves it.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The content of the file's attribute; `None` if it has none.
    pub attribute: Option<Vec<u8>>,
    /// Whether the drive is in a file that can have the attribute.
    pub takes_attribute: bool,
    /// The NGUID that the drive's label records for it; `None` without a valid copy of a label.
    pub labelled: Option<[u8; 16]>,
    /// The reserved block, if the target may write it.
    pub reserved: Option<Reserved>,
    /// The place of the drive; `None` if nothing distinguishes it from a copy.
    pub place: Option<Place>,
    /// The identity that the device's hardware gives.
    pub device: Option<DriveId>,
    /// The identity that follows from the NQN of the subsystem and the namespace id. Before drives
    /// had an identity of their own, it was the identity of every drive.
    pub position: DriveId,
    /// Whether the drive may have been served before: it has content.
    pub has_content: bool,
    /// A random NGUID.
    pub random: [u8; 16],
}

impl Facts {
    /// Whether this record belongs in the reserved block: only the identity that the label names
    /// counts there.
    #[must_use]
    pub fn takes_in_block(&self, record: &Record) -> bool {
        self.reserved.is_some() && self.labelled == Some(record.id.nguid)
    }

    /// Whether the reserved block has a record that is ignored: it is damaged, has a later version,
    /// or is not of the drive that the label names.
    #[must_use]
    pub fn has_ignored_record(&self, crc32c: Crc32c) -> bool {
        let mut blocks = self.reserved.iter().map(|reserved| &reserved.record_block);
        blocks.any(|block| is_record(block)) && self.record_in_block(crc32c).is_none()
    }

    /// The record in the reserved block. A plain host can write anything to its own drive, so
    /// nothing there is an error, and only the NGUID that the label names counts.
    fn record_in_block(&self, crc32c: Crc32c) -> Option<Record> {
        let record = Record::decode(&self.reserved.as_ref()?.record_block, crc32c).ok()??;
        (self.labelled == Some(record.id.nguid)).then_some(record)
    }
}

/// Where a drive's identity comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// The configuration gives it.
    Configured,
    /// It is stored with the drive.
    Stored,
    /// The device's hardware gives it.
    Device,
    /// The drive had none, and gets a new one.
    New,
    /// The drive had none. Its label names the identity that follows from NQN and namespace id, so
    /// it keeps that one.
    TakenOver,
    /// It follows from NQN and namespace id: the drive is in memory, or nothing can be stored with
    /// it.
    Position,
    /// The identity that is stored with the drive belongs to another file or device: this one is a
    /// copy, or was moved from another file system or device. So it has an identity of its own.
    Elsewhere,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Configured => "given by the configuration",
            Self::Stored => "stored with the drive",
            Self::Device => "from the device",
            Self::New => "new, stored with the drive",
            Self::TakenOver => "taken over from the drive's label",
            Self::Position => "from NQN and namespace id",
            Self::Elsewhere => "new: the stored one is another drive's",
        })
    }
}

/// An identity for a drive, and what has to be stored with the drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The identity.
    pub id: DriveId,
    /// Where it comes from.
    pub origin: Origin,
    /// The record to store before the drive is served, in all stores that the drive has.
    pub store: Option<Record>,
    /// The identity for the case that another drive of the target has this one, and its origin.
    /// `None`: the two drives can't be served together.
    pub otherwise: Option<(DriveId, Origin)>,
}

/// Decides which identity a drive gets that the configuration gives none.
///
/// # Errors
/// The stored identity can't be used.
pub fn choose(facts: &Facts, crc32c: Crc32c) -> Result<Choice, RecordError> {
    let chosen = |id, origin| Choice { id, origin, store: None, otherwise: None };
    let Some(place) = facts.place else {
        return Ok(chosen(facts.position, Origin::Position));
    };
    let own = match facts.device {
        Some(device) => (device, Origin::Device),
        None => (DriveId::with_nguid(facts.random), Origin::New),
    };
    let new =
        |id, origin| Choice { id, origin, store: Some(Record { id, place }), otherwise: Some(own) };
    if let Some((record, is_in_block)) = stored(facts, crc32c)? {
        if record.place.is_same(place, facts.device.is_some()) {
            // A plain host can write such a block to its own drive.
            let other = facts.device.unwrap_or_else(|| elsewhere(record.id, place));
            let otherwise = is_in_block.then_some((other, Origin::Elsewhere));
            return Ok(Choice { otherwise, ..chosen(record.id, Origin::Stored) });
        }
        if let Some(device) = facts.device {
            return Ok(chosen(device, Origin::Elsewhere));
        }
        let id = elsewhere(record.id, place);
        // Two copies of which too little is known may have one place.
        let otherwise = Some((DriveId::with_nguid(facts.random), Origin::Elsewhere));
        return Ok(Choice { otherwise, ..chosen(id, Origin::Elsewhere) });
    }
    if facts.device.is_none() && !place.is_recognisable() {
        return Ok(chosen(facts.position, Origin::Position));
    }
    if facts.labelled == Some(facts.position.nguid) {
        if facts.takes_attribute || facts.reserved.is_some() {
            return Ok(new(facts.position, Origin::TakenOver));
        }
        // The drive must not lose the volume that it has.
        let otherwise = facts.device.map(|device| (device, Origin::Device));
        return Ok(Choice { otherwise, ..chosen(facts.position, Origin::Position) });
    }
    if let Some(device) = facts.device {
        return Ok(chosen(device, Origin::Device));
    }
    if !facts.takes_attribute {
        return Ok(chosen(facts.position, Origin::Position));
    }
    let mut id = DriveId::with_nguid(facts.random);
    if facts.has_content {
        // Plain hosts may know the drive by this UUID. The NGUID is new even so: labels name it,
        // and another drive may get the same position.
        id.uuid = facts.position.uuid;
    }
    Ok(new(id, Origin::New))
}

/// The identity of a drive at this place that carries the identity of another one. It is the same
/// each time, so that nothing has to be stored: what is stored can still be adopted.
fn elsewhere(stored: DriveId, place: Place) -> DriveId {
    let Place { key, birth_ns, file_system } = place;
    let (birth, file_system) = (birth_ns.to_le_bytes(), file_system.to_le_bytes());
    let parts: [&[u8]; 5] = [b"elsewhere", &stored.nguid, &key, &birth, &file_system];
    DriveId::with_nguid(derived_uuid(&parts))
}

/// Makes the choices for the drives of one target distinct. A drive that gets an identity only now
/// does not get the NGUID or UUID of another one: it may be a copy with a label, at the position
/// where the original was.
///
/// # Errors
/// Two drives have the same identity; returns their numbers.
pub fn distinguish(choices: &mut [Choice]) -> Result<(), (usize, usize)> {
    for number in 0..choices.len() {
        let Choice { id, store, otherwise, .. } = choices[number];
        let has_same = |other: &Choice| other.id.uuid == id.uuid || other.id.nguid == id.nguid;
        let mut others = choices.iter().enumerate().filter(|(other, _)| *other != number);
        let Some((other, same)) = others.find(|(_, choice)| has_same(choice)) else { continue };
        // What was stored counts before what would be stored now.
        let stays = choices[number].origin == Origin::Stored
            && same.origin != Origin::Stored
            && same.otherwise.is_some();
        let Some((id, origin)) = otherwise.filter(|_| !stays) else {
            if same.otherwise.is_none() {
                return Err((number.min(other), number.max(other)));
            }
            // The other drive gives way.
            continue;
        };
        let store = store.filter(|_| origin == Origin::New).map(|old| Record { id, ..old });
        choices[number] = Choice { id, origin, store, otherwise: None };
    }
    Ok(())
}

/// The record that is stored with a drive, and whether it is in the reserved block. The attribute
/// counts before the block.
fn stored(facts: &Facts, crc32c: Crc32c) -> Result<Option<(Record, bool)>, RecordError> {
    if let Some(bytes) = &facts.attribute
        && let Some(record) = Record::decode(bytes, crc32c)?
    {
        return Ok(Some((record, false)));
    }
    Ok(facts.record_in_block(crc32c).map(|record| (record, true)))
}

/// Why a drive can't adopt the identity that it carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdoptError {
    /// It carries none.
    #[error("the drive carries no identity: it has no label, and none is stored with it")]
    Nothing,
    /// There is no place to store it in, or nothing distinguishes the drive from a copy.
    #[error("no identity can be stored with this drive")]
    NoStore,
    /// The drive has a label, but its reserved block may not be written.
    #[error(
        "no identity can be stored with this drive: its reserved block has other content, or a \
         copy of its label is damaged"
    )]
    Occupied,
    /// The stored identity can't be used, and there is no label.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// The record by which a drive becomes the owner of the identity that it carries: that of its
/// label, else the stored one. An operator decides this, after the drive was moved.
///
/// # Errors
/// There is nothing to adopt, or no store for it.
pub fn adopt(facts: &Facts, crc32c: Crc32c) -> Result<Record, AdoptError> {
    let place = facts.place.ok_or(AdoptError::NoStore)?;
    if facts.device.is_none() && !place.is_recognisable() {
        return Err(AdoptError::NoStore);
    }
    if !facts.takes_attribute && facts.reserved.is_none() {
        let is_labelled = facts.labelled.is_some();
        return Err(if is_labelled { AdoptError::Occupied } else { AdoptError::NoStore });
    }
    let stored = stored(facts, crc32c);
    let id = match facts.labelled {
        Some(nguid) => match stored {
            Ok(Some((record, _))) if record.id.nguid == nguid => record.id,
            _ => DriveId::with_nguid(nguid),
        },
        None => stored?.ok_or(AdoptError::Nothing)?.0.id,
    };
    Ok(Record { id, place })
}

/// A UUID of version 8 (custom) that is a hash of the parts: FNV-1a with 128 bits. The hash needs a
/// good distribution, not secrecy.
#[must_use]
pub fn derived_uuid(parts: &[&[u8]]) -> [u8; 16] {
    // The parameters of FNV-1a for 128 bits.
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    const OFFSET_BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    let mut hash = OFFSET_BASIS;
    for part in parts {
        // The separator 0 distinguishes ("ab", "c") from ("a", "bc").
        for byte in part.iter().chain(&[0]) {
            hash = (hash ^ u128::from(*byte)).wrapping_mul(PRIME);
        }
    }
    let mut bytes = hash.to_be_bytes();
    // The fields `ver` (version 8) and `var` of RFC 9562.
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    bytes
}

#[cfg(test)]
mod tests;
