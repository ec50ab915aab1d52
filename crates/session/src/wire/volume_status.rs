//! A target's state of a volume, as it answers the status command.

use alloc::string::String;
use alloc::vec::Vec;

use riopipe_order::attribute::{Seq, VolumeId};

use super::{STREAMS_MAX, array_at, u16_at, u32_at, u64_at};

/// A target's state of a volume, as the status command returns it.
///
/// | byte | field |
/// |---|---|
/// | 0–15 | volume id |
/// | 16–19 | generation on record |
/// | 20 | flags, see below |
/// | 22–23 | streams |
/// | 24–27 | log slots per stream |
/// | 28–31 | log entries that wait for recovery |
/// | 32–255 | host NQN of the owner, a NUL, address of the owner if it fits, NUL padded |
/// | 256–8447 | released mark of each stream, 8 bytes each |
/// | 8448–8451 | rest of the lease of an owner whose connection is lost, ms |
///
/// | flag | meaning |
/// |---|---|
/// | bit 0 | the target knows the volume |
/// | bit 1 | the volume has an owner |
/// | bit 2 | the log is not recovered |
/// | bit 3 | the log is lost |
/// | bit 4 | the volume has no log here |
/// | bit 5 | the owner is the association that sends the command |
/// | bit 6 | the log keeps lists of in-place updates |
/// | bit 7 | the log is lost because it is damaged |
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeStatus {
    /// The requested volume.
    pub volume: VolumeId,
    /// The highest generation on record; 0 if none.
    pub generation: u32,
    /// Whether the target knows the volume at all.
    pub known: bool,
    /// Whether the volume has an owner that is connected, or whose lease runs.
    pub owned: bool,
    /// The rest of the lease of an owner whose connection is lost, milliseconds; 0 if the owner is
    /// connected (trap T25).
    pub lease_left_ms: u32,
    /// Whether the owner is the association that has sent the status command.
    pub own: bool,
    /// Whether the log holds entries beyond the released marks that no recovery has settled.
    pub unrecovered: bool,
    /// Whether the log holds lists of in-place updates that wait to be acknowledged (trap T9).
    pub kept: bool,
    /// Whether the log is of another boot and is not valid (trap T19).
    pub log_lost: bool,
    /// Whether the log is not valid because partitions of it can't be read. A claim can give up
    /// their content (trap T26).
    pub damaged: bool,
    /// Whether the volume has no log here.
    pub unlogged: bool,
    /// The number of streams of the volume.
    pub streams: u16,
    /// The number of log slots per stream.
    pub slots: u32,
    /// The number of log entries that no recovery has settled. Streams that a connection carries do
    /// not count.
    pub live_entries: u32,
    /// The host NQN of the owner, cut at 223 bytes; empty if there is no owner.
    pub owner: String,
    /// The address from which the owner is connected, or was; empty if it is not known, or if the
    /// owner's NQN leaves no space for it.
    pub owner_address: String,
    /// The released mark of each stream.
    pub released: Vec<Seq>,
}

/// Length of a [`VolumeStatus`] on the wire, bytes.
pub const STATUS_LEN: usize = LEASE_AT + 16;
/// The places of the fields in a [`VolumeStatus`], bytes.
const FLAGS_AT: usize = 20;
const OWNER_AT: usize = 32;
const MARKS_AT: usize = 256;
const LEASE_AT: usize = MARKS_AT + MARK_LEN * STREAMS_MAX as usize;
/// The bytes of a released mark.
const MARK_LEN: usize = 8;
/// The most bytes of a host NQN (NVMe), without the NUL that ends it.
const OWNER_LEN_MAX: usize = 223;

const FLAG_KNOWN: u8 = 1;
const FLAG_OWNED: u8 = 1 << 1;
const FLAG_UNRECOVERED: u8 = 1 << 2;
const FLAG_LOG_LOST: u8 = 1 << 3;
const FLAG_UNLOGGED: u8 = 1 << 4;
const FLAG_OWN: u8 = 1 << 5;
const FLAG_KEPT: u8 = 1 << 6;
const FLAG_DAMAGED: u8 = 1 << 7;

impl VolumeStatus {
    /// The owner for an error message: its host NQN, and its address if it is known.
    #[must_use]
    pub fn owner_text(&self) -> String {
        match self.owner_address.as_str() {
            "" => self.owner.clone(),
            address => alloc::format!("{} at {address}", self.owner),
        }
    }

    /// The bytes of the status on the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = alloc::vec![0; STATUS_LEN];
        bytes[0..16].copy_from_slice(&self.volume.0);
        bytes[16..20].copy_from_slice(&self.generation.to_le_bytes());
        bytes[FLAGS_AT] = self.flags();
        bytes[22..24].copy_from_slice(&self.streams.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.slots.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.live_entries.to_le_bytes());
        let owner = &self.owner.as_bytes()[..self.owner.len().min(OWNER_LEN_MAX)];
        bytes[OWNER_AT..OWNER_AT + owner.len()].copy_from_slice(owner);
        // The last byte stays NUL. A reader that does not know the address reads up to the first.
        let address = self.owner_address.as_bytes();
        let address_at = OWNER_AT + owner.len() + 1;
        if !owner.is_empty() && address_at + address.len() < MARKS_AT {
            bytes[address_at..address_at + address.len()].copy_from_slice(address);
        }
        let marks = bytes[MARKS_AT..LEASE_AT].chunks_exact_mut(MARK_LEN);
        for (seq, mark) in self.released.iter().zip(marks) {
            mark.copy_from_slice(&seq.0.to_le_bytes());
        }
        bytes[LEASE_AT..LEASE_AT + 4].copy_from_slice(&self.lease_left_ms.to_le_bytes());
        bytes
    }

    fn flags(&self) -> u8 {
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        flag(self.known, FLAG_KNOWN)
            | flag(self.owned, FLAG_OWNED)
            | flag(self.unrecovered, FLAG_UNRECOVERED)
            | flag(self.log_lost, FLAG_LOG_LOST)
            | flag(self.unlogged, FLAG_UNLOGGED)
            | flag(self.own, FLAG_OWN)
            | flag(self.kept, FLAG_KEPT)
            | flag(self.damaged, FLAG_DAMAGED)
    }

    /// Reads a status; `None` if it is short or not valid (trap T18).
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < STATUS_LEN {
            return None;
        }
        let streams = u16_at(bytes, 22);
        if streams > STREAMS_MAX {
            return None;
        }
        let has_flag = |flag: u8| bytes[FLAGS_AT] & flag != 0;
        let lease_left_ms = u32_at(bytes, LEASE_AT);
        // A lease runs only for an owner whose connection is lost. Such an owner can't be the
        // association that has sent the command.
        let has_lost_owner = has_flag(FLAG_OWNED) && !has_flag(FLAG_OWN);
        if lease_left_ms > 0 && !has_lost_owner {
            return None;
        }
        let mut owner = bytes[OWNER_AT..MARKS_AT]
            .split(|byte| *byte == 0)
            .map(|text| String::from_utf8_lossy(text).into_owned());
        let marks = bytes[MARKS_AT..LEASE_AT].chunks_exact(MARK_LEN).take(usize::from(streams));
        Some(Self {
            volume: VolumeId(array_at(bytes, 0)),
            generation: u32_at(bytes, 16),
            known: has_flag(FLAG_KNOWN),
            owned: has_flag(FLAG_OWNED),
            unrecovered: has_flag(FLAG_UNRECOVERED),
            log_lost: has_flag(FLAG_LOG_LOST),
            damaged: has_flag(FLAG_DAMAGED),
            unlogged: has_flag(FLAG_UNLOGGED),
            own: has_flag(FLAG_OWN),
            kept: has_flag(FLAG_KEPT),
            streams,
            slots: u32_at(bytes, 24),
            live_entries: u32_at(bytes, 28),
            lease_left_ms,
            owner: owner.next().unwrap_or_default(),
            owner_address: owner.next().unwrap_or_default(),
            released: marks.map(|mark| Seq(u64_at(mark, 0))).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_survives_the_wire() {
        let status = VolumeStatus {
            volume: VolumeId([7; 16]),
            generation: 3,
            known: true,
            owned: true,
            lease_left_ms: 44_999,
            streams: 2,
            slots: 512,
            owner: "nqn.2014-08.org.nvmexpress:uuid:x".into(),
            owner_address: "[2001:db8::1]:40000".into(),
            released: alloc::vec![Seq(5), Seq(1 << 40)],
            ..VolumeStatus::default()
        };
        assert_eq!(VolumeStatus::decode(&status.encode()), Some(status));
        assert_eq!(VolumeStatus::decode(&[0; 10]), None);
    }

    #[test]
    fn every_flag_of_a_status_is_its_own() {
        let status = VolumeStatus {
            volume: VolumeId(core::array::from_fn(|i| i as u8)),
            generation: 0x8192_a3b4,
            streams: STREAMS_MAX,
            slots: 0x8877_6655,
            live_entries: 0x9988_7766,
            owner: "n".repeat(223),
            released: (0..u64::from(STREAMS_MAX)).map(|i| Seq(i << 50 | i)).collect(),
            ..VolumeStatus::default()
        };
        let good = status.encode();
        assert_eq!(good[28..33], [0x66, 0x77, 0x88, 0x99, b'n']);
        let flags: [fn(&mut VolumeStatus); 8] = [
            |s| s.known = true,
            |s| s.owned = true,
            |s| s.unrecovered = true,
            |s| s.log_lost = true,
            |s| s.unlogged = true,
            |s| s.own = true,
            |s| s.kept = true,
            |s| s.damaged = true,
        ];
        for (bit, set) in flags.iter().enumerate() {
            let mut status = status.clone();
            set(&mut status);
            let bytes = status.encode();
            assert_eq!(bytes[20], 1 << bit);
            assert_eq!(VolumeStatus::decode(&bytes), Some(status));
        }
        // The address is left out where the NQN leaves no space for it and a NUL.
        for (owner_len, kept) in [(211, "192.0.2.1:1"), (212, ""), (223, "")] {
            let owner = "n".repeat(owner_len);
            let with = |address: &str| VolumeStatus {
                owner: owner.clone(),
                owner_address: address.into(),
                ..status.clone()
            };
            assert_eq!(VolumeStatus::decode(&with("192.0.2.1:1").encode()), Some(with(kept)));
        }
        let long = VolumeStatus { owner: "n".repeat(300), ..status.clone() };
        assert_eq!(VolumeStatus::decode(&long.encode()), Some(status.clone()), "cut");
        let more = VolumeStatus { streams: STREAMS_MAX + 1, ..status };
        assert_eq!(VolumeStatus::decode(&more.encode()), None);
        assert_eq!(VolumeStatus::decode(&good[..STATUS_LEN - 1]), None);
    }
}
