//! The volumes in a target's ordering log, as it answers the directory command.

use alloc::vec::Vec;

use riopipe_order::attribute::{Member, VolumeId};
use riopipe_order::log_region::{MEMBERS_MAX, MemberNamespace, VOLUMES_MAX};

use super::{array_at, u16_at, u32_at, u64_at};

/// The volumes in a target's ordering log, and the space in it.
///
/// | byte | field |
/// |---|---|
/// | 0–7 | bytes of the log region; 0 if the target has no log |
/// | 8–15 | bytes that no volume has |
/// | 16–23 | bytes of the largest adjacent part of these |
/// | 24 | number of volumes that follow, at most 16 |
/// | 32 + 240·i | a volume, see [`LogVolume`] |
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogDirectory {
    /// The size of the log region, bytes; 0 if the target has no log.
    pub region_bytes: u64,
    /// The space that no volume has, bytes.
    pub free_bytes: u64,
    /// The largest adjacent part of the free space, bytes. A new volume needs adjacent space.
    pub gap_bytes: u64,
    /// The volumes that have partitions.
    pub volumes: Vec<LogVolume>,
}

/// A volume in a target's ordering log.
///
/// | byte | field |
/// |---|---|
/// | 0–15 | volume id |
/// | 16–19 | generation on record |
/// | 20 | flags, with the meaning that they have in [`VolumeStatus`](super::VolumeStatus): bits 1, 2, 3 and 6 |
/// | 21 | number of members on this target, at most 16 |
/// | 22–23 | streams |
/// | 24–27 | log slots per stream |
/// | 28–31 | log entries that wait for recovery |
/// | 32–39 | bytes of its partitions |
/// | 64 + 8·i | member: namespace id (4 bytes), its number in the volume (1), 0 (3) |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogVolume {
    /// The volume.
    pub id: VolumeId,
    /// The generation on record.
    pub generation: u32,
    /// Whether the volume has an owner that is connected, or whose lease runs.
    pub owned: bool,
    /// Whether the log holds entries that no recovery has settled.
    pub unrecovered: bool,
    /// Whether the log holds lists of in-place updates that wait to be acknowledged.
    pub kept: bool,
    /// Whether the log is lost or damaged.
    pub log_lost: bool,
    /// The number of streams.
    pub streams: u16,
    /// The number of log slots per stream.
    pub slots: u32,
    /// The number of log entries that no recovery has settled.
    pub live_entries: u32,
    /// The size of its partitions, bytes.
    pub bytes: u64,
    /// Its members on this target.
    pub members: Vec<MemberNamespace>,
}

/// Length of a [`LogDirectory`] on the wire, bytes.
pub const DIRECTORY_LEN: usize = 4096;
const VOLUMES_AT: usize = 32;
const VOLUME_LEN: usize = 240;
const MEMBERS_AT: usize = 64;
const MEMBER_LEN: usize = 8;

const FLAG_OWNED: u8 = 1 << 1;
const FLAG_UNRECOVERED: u8 = 1 << 2;
const FLAG_LOG_LOST: u8 = 1 << 3;
const FLAG_KEPT: u8 = 1 << 6;

impl LogDirectory {
    /// The bytes of the directory on the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = alloc::vec![0; DIRECTORY_LEN];
        bytes[0..8].copy_from_slice(&self.region_bytes.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.free_bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.gap_bytes.to_le_bytes());
        bytes[24] = self.volumes.len().min(VOLUMES_MAX) as u8;
        let places = bytes[VOLUMES_AT..].chunks_exact_mut(VOLUME_LEN).take(VOLUMES_MAX);
        for (volume, place) in self.volumes.iter().zip(places) {
            volume.encode(place);
        }
        bytes
    }

    /// Reads a directory; `None` if it is short or not valid (trap T18).
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < DIRECTORY_LEN || usize::from(bytes[24]) > VOLUMES_MAX {
            return None;
        }
        let records = bytes[VOLUMES_AT..].chunks_exact(VOLUME_LEN).take(usize::from(bytes[24]));
        Some(Self {
            region_bytes: u64_at(bytes, 0),
            free_bytes: u64_at(bytes, 8),
            gap_bytes: u64_at(bytes, 16),
            volumes: records.map(LogVolume::decode).collect::<Option<_>>()?,
        })
    }
}

impl LogVolume {
    fn encode(&self, bytes: &mut [u8]) {
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        bytes[0..16].copy_from_slice(&self.id.0);
        bytes[16..20].copy_from_slice(&self.generation.to_le_bytes());
        bytes[20] = flag(self.owned, FLAG_OWNED)
            | flag(self.unrecovered, FLAG_UNRECOVERED)
            | flag(self.log_lost, FLAG_LOG_LOST)
            | flag(self.kept, FLAG_KEPT);
        bytes[21] = self.members.len().min(MEMBERS_MAX) as u8;
        bytes[22..24].copy_from_slice(&self.streams.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.slots.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.live_entries.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.bytes.to_le_bytes());
        let places = bytes[MEMBERS_AT..].chunks_exact_mut(MEMBER_LEN).take(MEMBERS_MAX);
        for (member, place) in self.members.iter().zip(places) {
            place[..4].copy_from_slice(&member.nsid.to_le_bytes());
            place[4] = member.member.0;
        }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let has_flag = |flag: u8| bytes[20] & flag != 0;
        let member_count = usize::from(bytes[21]);
        if member_count > MEMBERS_MAX {
            return None;
        }
        let members = bytes[MEMBERS_AT..].chunks_exact(MEMBER_LEN).take(member_count);
        Some(Self {
            id: VolumeId(array_at(bytes, 0)),
            generation: u32_at(bytes, 16),
            owned: has_flag(FLAG_OWNED),
            unrecovered: has_flag(FLAG_UNRECOVERED),
            kept: has_flag(FLAG_KEPT),
            log_lost: has_flag(FLAG_LOG_LOST),
            streams: u16_at(bytes, 22),
            slots: u32_at(bytes, 24),
            live_entries: u32_at(bytes, 28),
            bytes: u64_at(bytes, 32),
            members: members
                .map(|place| MemberNamespace { member: Member(place[4]), nsid: u32_at(place, 0) })
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t18_a_full_directory_is_read_back_and_a_wrong_one_refused() {
        let volume = |id: u8| LogVolume {
            id: VolumeId([id; 16]),
            generation: 0x8182_8384,
            owned: id & 1 != 0,
            unrecovered: id & 2 != 0,
            kept: id & 4 != 0,
            log_lost: id & 8 != 0,
            streams: 0x9192,
            slots: 0xa1a2_a3a4,
            live_entries: 0xb1b2_b3b4,
            bytes: 0xc1c2_c3c4_c5c6_c7c8,
            members: (0..id).map(|m| MemberNamespace { member: Member(m), nsid: 0xd1 }).collect(),
        };
        let directory = LogDirectory {
            region_bytes: 1 << 40,
            free_bytes: 7,
            gap_bytes: 5,
            volumes: (1..=VOLUMES_MAX as u8).map(volume).collect(),
        };
        let bytes = directory.encode();
        assert_eq!(LogDirectory::decode(&bytes), Some(directory));
        assert_eq!(LogDirectory::decode(&bytes[1..]), None);
        for (at, count) in [(24, 17), (VOLUMES_AT + 21, 17)] {
            let mut wrong = bytes.clone();
            wrong[at] = count;
            assert_eq!(LogDirectory::decode(&wrong), None);
        }
        let none = LogDirectory::default();
        assert_eq!(LogDirectory::decode(&none.encode()), Some(none));
    }
}
