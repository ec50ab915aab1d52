//! The header's bytes (`docs/log-format.md`, "Region header" and "Directory record").

use alloc::vec::Vec;

use super::{
    HEADER_BYTES, HEADER_COPY_BYTES, LogKind, MEMBERS_MAX, MemberNamespace, PARTITION_ALIGN,
    RegionHeader, VERSION, VOLUMES_MAX, VolumeRecord, VolumeState,
};
use crate::attribute::{Member, VolumeId};
use crate::bytes::{bytes_at, put, u16_at, u32_at, u64_at};
use crate::ordering_log::{SLOTS_MAX, SLOTS_MIN};
use crate::probe::{self, Plant};
use crate::region::Crc32c;

/// The first bytes of every header. In every version, the magic, the checksum and the version keep
/// their places, and the checksum covers all bytes behind itself. So an older program recognises a
/// newer log.
const MAGIC: [u8; 8] = *b"RIO LOG\0";

/// Byte offsets of the fields in a copy of the header.
mod header_at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const CHECKSUM: usize = 8;
    pub(super) const VERSION: usize = 12;
    pub(super) const NUMBER: usize = 16;
    pub(super) const UUID: usize = 24;
    pub(super) const BOOT: usize = 40;
    pub(super) const INCARNATION: usize = 56;
    pub(super) const KIND: usize = 60;
    pub(super) const VOLUME_COUNT: usize = 61;
    pub(super) const SYNCED: usize = 62;
    pub(super) const LEN: usize = 64;
    pub(super) const RECORDS: usize = 128;
}

/// Byte offsets of the fields in a directory record.
mod record_at {
    pub(super) const VOLUME: usize = 0;
    pub(super) const GENERATION: usize = 16;
    pub(super) const STATE: usize = 20;
    pub(super) const MEMBER_COUNT: usize = 21;
    pub(super) const STREAMS: usize = 22;
    pub(super) const SLOTS: usize = 24;
    pub(super) const LEASE_MS: usize = 28;
    pub(super) const OFFSET: usize = 32;
    pub(super) const OWNER: usize = 40;
    pub(super) const GIVEN_UP_GENERATION: usize = 56;
    pub(super) const MEMBERS: usize = 64;
}

/// Byte offsets of the fields in one member of a directory record.
mod member_at {
    pub(super) const MEMBER: usize = 0;
    pub(super) const NSID: usize = 4;
}

/// The checksum covers the bytes from here to the end of the copy.
const CHECKED_FROM: usize = header_at::CHECKSUM + 4;
const RECORD_BYTES: usize = 248;
const MEMBER_BYTES: usize = 8;

/// No real region is larger (256 TiB), and no real volume begins later.
const REGION_BYTES_MAX: u64 = 1 << 48;
/// No real header was written so many times. The bound keeps `number + 1` from overflowing.
const NUMBER_MAX: u64 = 1 << 62;

const _: () = assert!(header_at::RECORDS + VOLUMES_MAX * RECORD_BYTES == HEADER_COPY_BYTES);
const _: () = assert!(record_at::MEMBERS + MEMBERS_MAX * MEMBER_BYTES <= RECORD_BYTES);

/// The classes of content of one copy of the header.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HeaderCopy {
    /// Only zeroes.
    Blank,
    /// Bytes that no version of this program has written.
    Foreign,
    /// A header by its magic or its checksum, but torn or damaged.
    Torn,
    /// A header of another version.
    Newer { version: u32 },
    /// A whole header of this version.
    Whole(RegionHeader),
}

/// The bytes of one copy of the header.
pub(super) fn encode(header: &RegionHeader, crc: Crc32c) -> [u8; HEADER_COPY_BYTES] {
    debug_assert!(header.volumes.len() <= VOLUMES_MAX);
    let mut bytes = [0; HEADER_COPY_BYTES];
    put(&mut bytes, header_at::MAGIC, &MAGIC);
    put(&mut bytes, header_at::VERSION, &VERSION.to_le_bytes());
    put(&mut bytes, header_at::NUMBER, &header.number.to_le_bytes());
    put(&mut bytes, header_at::UUID, &header.uuid);
    put(&mut bytes, header_at::BOOT, &header.boot);
    put(&mut bytes, header_at::INCARNATION, &header.incarnation.to_le_bytes());
    bytes[header_at::KIND] = header.kind as u8;
    bytes[header_at::VOLUME_COUNT] = header.volumes.len() as u8;
    bytes[header_at::SYNCED] = u8::from(header.synced);
    put(&mut bytes, header_at::LEN, &header.len.to_le_bytes());
    let records = bytes[header_at::RECORDS..].chunks_exact_mut(RECORD_BYTES);
    for (volume, record) in header.volumes.iter().zip(records) {
        encode_record(volume, record);
    }
    let checksum = crc(0, &bytes[CHECKED_FROM..]);
    put(&mut bytes, header_at::CHECKSUM, &checksum.to_le_bytes());
    bytes
}

/// Writes the directory record of a volume into `record`, which is zeroed.
fn encode_record(volume: &VolumeRecord, record: &mut [u8]) {
    debug_assert!(volume.members.len() <= MEMBERS_MAX);
    put(record, record_at::VOLUME, &volume.id.0);
    put(record, record_at::GENERATION, &volume.generation.to_le_bytes());
    record[record_at::STATE] = volume.state as u8;
    record[record_at::MEMBER_COUNT] = volume.members.len() as u8;
    put(record, record_at::STREAMS, &volume.streams.to_le_bytes());
    put(record, record_at::SLOTS, &volume.slots.to_le_bytes());
    put(record, record_at::LEASE_MS, &volume.lease_ms.to_le_bytes());
    put(record, record_at::OFFSET, &volume.offset.to_le_bytes());
    put(record, record_at::OWNER, &volume.owner);
    put(record, record_at::GIVEN_UP_GENERATION, &volume.given_up_generation.to_le_bytes());
    let members = record[record_at::MEMBERS..].chunks_exact_mut(MEMBER_BYTES);
    for (namespace, bytes) in volume.members.iter().zip(members) {
        bytes[member_at::MEMBER] = namespace.member.0;
        put(bytes, member_at::NSID, &namespace.nsid.to_le_bytes());
    }
}

/// Reads one copy of the header.
pub(super) fn decode(bytes: &[u8; HEADER_COPY_BYTES], crc: Crc32c) -> HeaderCopy {
    if bytes.iter().all(|&byte| byte == 0) {
        return HeaderCopy::Blank;
    }
    let checksum_matches = crc(0, &bytes[CHECKED_FROM..]) == u32_at(bytes, header_at::CHECKSUM)
        || probe::is_bug_planted(Plant::T19HeaderUnchecked);
    if !bytes.starts_with(&MAGIC) {
        // If only the magic was damaged, the checksum still matches.
        return if checksum_matches { HeaderCopy::Torn } else { HeaderCopy::Foreign };
    }
    if !checksum_matches {
        return HeaderCopy::Torn;
    }
    let version = u32_at(bytes, header_at::VERSION);
    if version != VERSION {
        return HeaderCopy::Newer { version };
    }
    decode_fields(bytes).map_or(HeaderCopy::Torn, HeaderCopy::Whole)
}

/// Reads the fields of a header; `None` for values that no writer of this version writes.
fn decode_fields(bytes: &[u8; HEADER_COPY_BYTES]) -> Option<RegionHeader> {
    let len = u64_at(bytes, header_at::LEN);
    let volume_count = usize::from(bytes[header_at::VOLUME_COUNT]);
    let number = u64_at(bytes, header_at::NUMBER);
    let kind = LogKind::from_code(bytes[header_at::KIND])?;
    if volume_count > VOLUMES_MAX || len > REGION_BYTES_MAX || number >= NUMBER_MAX {
        return None;
    }
    let synced = match bytes[header_at::SYNCED] {
        0 => false,
        1 if !kind.survives_power_cut() => true,
        _ => return None,
    };
    Some(RegionHeader {
        number,
        uuid: bytes_at(bytes, header_at::UUID),
        boot: bytes_at(bytes, header_at::BOOT),
        incarnation: u32_at(bytes, header_at::INCARNATION),
        kind,
        synced,
        len,
        volumes: decode_directory(&bytes[header_at::RECORDS..], volume_count, len)?,
    })
}

/// Reads the directory; `None` unless its volumes are distinct, in order of offset, apart from each
/// other, and within the region of `region_len` bytes.
fn decode_directory(
    records: &[u8],
    volume_count: usize,
    region_len: u64,
) -> Option<Vec<VolumeRecord>> {
    let mut volumes: Vec<VolumeRecord> = Vec::with_capacity(volume_count);
    let mut used_up_to = HEADER_BYTES;
    for record in records.chunks_exact(RECORD_BYTES).take(volume_count) {
        let volume = decode_record(record)?;
        let offset = volume.offset as usize;
        let is_duplicate = volumes.iter().any(|other| other.id == volume.id);
        if offset < used_up_to || !offset.is_multiple_of(PARTITION_ALIGN) || is_duplicate {
            return None;
        }
        used_up_to = volume.extent().end;
        if used_up_to as u64 > region_len {
            return None;
        }
        volumes.push(volume);
    }
    Some(volumes)
}

/// Reads a directory record; `None` for values that no writer of this version writes.
fn decode_record(record: &[u8]) -> Option<VolumeRecord> {
    let member_count = usize::from(record[record_at::MEMBER_COUNT]);
    let streams = u16_at(record, record_at::STREAMS);
    let slots = u32_at(record, record_at::SLOTS);
    let offset = u64_at(record, record_at::OFFSET);
    if member_count > MEMBERS_MAX
        || streams == 0
        || !(SLOTS_MIN..=SLOTS_MAX).contains(&slots)
        || offset > REGION_BYTES_MAX
    {
        return None;
    }
    let members = record[record_at::MEMBERS..].chunks_exact(MEMBER_BYTES).take(member_count);
    Some(VolumeRecord {
        id: VolumeId(bytes_at(record, record_at::VOLUME)),
        generation: u32_at(record, record_at::GENERATION),
        state: VolumeState::from_code(record[record_at::STATE])?,
        owner: bytes_at(record, record_at::OWNER),
        given_up_generation: u32_at(record, record_at::GIVEN_UP_GENERATION),
        lease_ms: u32_at(record, record_at::LEASE_MS),
        streams,
        slots,
        offset,
        members: members.map(decode_member).collect(),
    })
}

/// Reads one member of a directory record.
fn decode_member(bytes: &[u8]) -> MemberNamespace {
    MemberNamespace {
        member: Member(bytes[member_at::MEMBER]),
        nsid: u32_at(bytes, member_at::NSID),
    }
}
