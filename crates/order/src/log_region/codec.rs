//! The header's bytes (`docs/log-format.md`, "Region header" and "Directory record").

use alloc::vec::Vec;

use super::{
    HEADER_BYTES, HEADER_COPY_BYTES, LogKind, MEMBERS_MAX, MemberNamespace, PARTITION_ALIGN,
    RegionHeader, VERSION, VOLUMES_MAX, VolumeRecord, VolumeState,
};
use crate::attribute::{Member, VolumeId};
use crate::entry::{u16_at, u32_at, u64_at};
use crate::ordering_log::{SLOTS_MAX, SLOTS_MIN};
use crate::probe::{self, Plant};
use crate::region::Crc32c;

/// In every version: magic at 0, checksum of bytes 12..4096 at 8, version at 12.
const MAGIC: [u8; 8] = *b"RIO LOG\0";
const RECORDS_AT: usize = 128;
const RECORD_BYTES: usize = 248;
const MEMBERS_AT: usize = 64;
const MEMBER_BYTES: usize = 8;

const _: () = assert!(RECORDS_AT + VOLUMES_MAX * RECORD_BYTES == HEADER_COPY_BYTES);
const _: () = assert!(MEMBERS_AT + MEMBERS_MAX * MEMBER_BYTES <= RECORD_BYTES);

/// The classes of content of one copy of the header.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Copy {
    Blank,
    /// Not ours at all.
    Foreign,
    /// Ours by its magic, but torn or damaged.
    Torn,
    Newer {
        version: u32,
    },
    Whole(RegionHeader),
}

pub(super) fn encode(header: &RegionHeader, crc: Crc32c) -> [u8; HEADER_COPY_BYTES] {
    debug_assert!(header.volumes.len() <= VOLUMES_MAX);
    let mut bytes = [0; HEADER_COPY_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[12..16].copy_from_slice(&VERSION.to_le_bytes());
    bytes[16..24].copy_from_slice(&header.number.to_le_bytes());
    bytes[24..40].copy_from_slice(&header.uuid);
    bytes[40..56].copy_from_slice(&header.boot);
    bytes[56..60].copy_from_slice(&header.incarnation.to_le_bytes());
    bytes[60] = header.kind as u8;
    bytes[61] = header.volumes.len() as u8;
    bytes[62] = u8::from(header.synced);
    bytes[64..72].copy_from_slice(&header.len.to_le_bytes());
    let records = bytes[RECORDS_AT..].chunks_exact_mut(RECORD_BYTES);
    for (volume, record) in header.volumes.iter().zip(records) {
        debug_assert!(volume.members.len() <= MEMBERS_MAX);
        record[..16].copy_from_slice(&volume.id.0);
        record[16..20].copy_from_slice(&volume.generation.to_le_bytes());
        record[20] = volume.state as u8;
        record[21] = volume.members.len() as u8;
        record[22..24].copy_from_slice(&volume.streams.to_le_bytes());
        record[24..28].copy_from_slice(&volume.slots.to_le_bytes());
        record[28..32].copy_from_slice(&volume.lease_ms.to_le_bytes());
        record[32..40].copy_from_slice(&volume.offset.to_le_bytes());
        record[40..56].copy_from_slice(&volume.owner);
        record[56..60].copy_from_slice(&volume.given_up.to_le_bytes());
        let members = record[MEMBERS_AT..].chunks_exact_mut(MEMBER_BYTES);
        for (member, at) in volume.members.iter().zip(members) {
            at[0] = member.member.0;
            at[4..8].copy_from_slice(&member.nsid.to_le_bytes());
        }
    }
    let check = crc(0, &bytes[12..]);
    bytes[8..12].copy_from_slice(&check.to_le_bytes());
    bytes
}

pub(super) fn decode(bytes: &[u8; HEADER_COPY_BYTES], crc: Crc32c) -> Copy {
    if bytes.iter().all(|&byte| byte == 0) {
        return Copy::Blank;
    }
    let checked =
        crc(0, &bytes[12..]) == u32_at(bytes, 8) || probe::planted(Plant::T19HeaderUnchecked);
    if bytes[..8] != MAGIC {
        // If only the magic was damaged, the checksum is still right.
        return if checked { Copy::Torn } else { Copy::Foreign };
    }
    if !checked {
        return Copy::Torn;
    }
    let version = u32_at(bytes, 12);
    if version != VERSION {
        return Copy::Newer { version };
    }
    whole(bytes).map_or(Copy::Torn, Copy::Whole)
}

/// Reads the fields; `None` for values that no writer of this version writes.
fn whole(bytes: &[u8; HEADER_COPY_BYTES]) -> Option<RegionHeader> {
    let len = u64_at(bytes, 64);
    let count = usize::from(bytes[61]);
    let number = u64_at(bytes, 16);
    let kind = LogKind::from_code(bytes[60])?;
    if count > VOLUMES_MAX || len > 1 << 48 || number >= 1 << 62 {
        return None;
    }
    let synced = match bytes[62] {
        0 => false,
        1 if !kind.survives_power_cut() => true,
        _ => return None,
    };
    let mut volumes: Vec<VolumeRecord> = Vec::with_capacity(count);
    let mut free = HEADER_BYTES;
    for record in bytes[RECORDS_AT..].chunks_exact(RECORD_BYTES).take(count) {
        let volume = volume(record)?;
        let offset = volume.offset as usize;
        let twice = volumes.iter().any(|other| other.id == volume.id);
        if offset < free || !offset.is_multiple_of(PARTITION_ALIGN) || twice {
            return None;
        }
        free = volume.extent().end;
        if free as u64 > len {
            return None;
        }
        volumes.push(volume);
    }
    Some(RegionHeader {
        number,
        uuid: bytes[24..40].try_into().ok()?,
        boot: bytes[40..56].try_into().ok()?,
        incarnation: u32_at(bytes, 56),
        kind,
        synced,
        len,
        volumes,
    })
}

fn volume(record: &[u8]) -> Option<VolumeRecord> {
    let members = record[MEMBERS_AT..].chunks_exact(MEMBER_BYTES);
    let count = usize::from(record[21]);
    let (streams, slots) = (u16_at(record, 22), u32_at(record, 24));
    let offset = u64_at(record, 32);
    if count > MEMBERS_MAX
        || streams == 0
        || !(SLOTS_MIN..=SLOTS_MAX).contains(&slots)
        || offset > 1 << 48
    {
        return None;
    }
    Some(VolumeRecord {
        id: VolumeId(record[..16].try_into().ok()?),
        generation: u32_at(record, 16),
        state: VolumeState::from_code(record[20])?,
        owner: record[40..56].try_into().ok()?,
        given_up: u32_at(record, 56),
        lease_ms: u32_at(record, 28),
        streams,
        slots,
        offset,
        members: members
            .take(count)
            .map(|at| MemberNamespace { member: Member(at[0]), nsid: u32_at(at, 4) })
            .collect(),
    })
}
