//! A target's state of a volume, as it answers the status command.

use alloc::string::String;
use alloc::vec::Vec;

use riopipe_order::attribute::{Seq, VolumeId};

use super::{STREAMS_MAX, array_at, u32_at, u64_at};

/// A target's state of a volume, as the status command returns it.
///
/// | byte | field |
/// |---|---|
/// | 0–15 | volume id |
/// | 16–19 | generation on record |
/// | 20 | flags: bit 0 known, bit 1 owned, bit 2 unrecovered, bit 3 log lost, bit 4 unlogged, bit 5 owned by the asker, bit 6 in-place lists kept, bit 7 log damaged |
/// | 22–23 | streams |
/// | 24–27 | log slots per stream |
/// | 28–31 | log entries that wait for recovery |
/// | 32–255 | host NQN of the owner, NUL padded |
/// | 256–8447 | released mark of each stream, 8 bytes each |
/// | 8448–8451 | rest of the lease of an owner whose connection is lost, ms |
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeStatus {
    /// The requested volume.
    pub volume: VolumeId,
    /// The highest generation on record; 0 if none.
    pub generation: u32,
    /// Whether the target knows the volume at all.
    pub known: bool,
    /// Whether it has an owner that is connected, or whose lease runs.
    pub owned: bool,
    /// The rest of the lease of an owner whose connection is lost, milliseconds; 0 if the owner is
    /// connected (T25).
    pub lease_left_ms: u32,
    /// Whether the owner is the association that asks.
    pub own: bool,
    /// Whether the log holds entries beyond the released marks that no recovery has settled.
    pub unrecovered: bool,
    /// Whether the log holds lists of in-place updates that wait to be acknowledged (T9).
    pub kept: bool,
    /// Whether the log is of another boot and is not valid (T19).
    pub log_lost: bool,
    /// Whether that is because partitions of it can't be read: the initiator that claims the volume
    /// can give them up (T26).
    pub damaged: bool,
    /// Whether the volume has no log here.
    pub unlogged: bool,
    /// The number of streams of the volume.
    pub streams: u16,
    /// The number of log slots per stream.
    pub slots: u32,
    /// The number of entries in its partitions at rest that no recovery has settled.
    pub live_entries: u32,
    /// Host NQN of the owner, empty if none; cut at 223 bytes.
    pub owner: String,
    /// The released mark of each stream.
    pub released: Vec<Seq>,
}

/// Length of a [`VolumeStatus`] on the wire, bytes.
pub const STATUS_LEN: usize = LEASE_AT + 16;
/// The offset at which the marks of a [`VolumeStatus`] end and the rest of the lease begins, bytes.
const LEASE_AT: usize = 256 + 8 * STREAMS_MAX as usize;

impl VolumeStatus {
    /// The bytes of the status on the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut d = alloc::vec![0; STATUS_LEN];
        d[0..16].copy_from_slice(&self.volume.0);
        d[16..20].copy_from_slice(&self.generation.to_le_bytes());
        d[20] = u8::from(self.known)
            | u8::from(self.owned) << 1
            | u8::from(self.unrecovered) << 2
            | u8::from(self.log_lost) << 3
            | u8::from(self.unlogged) << 4
            | u8::from(self.own) << 5
            | u8::from(self.kept) << 6
            | u8::from(self.damaged) << 7;
        d[22..24].copy_from_slice(&self.streams.to_le_bytes());
        d[24..28].copy_from_slice(&self.slots.to_le_bytes());
        d[28..32].copy_from_slice(&self.live_entries.to_le_bytes());
        let owner = &self.owner.as_bytes()[..self.owner.len().min(223)];
        d[32..32 + owner.len()].copy_from_slice(owner);
        for (i, seq) in self.released.iter().take(usize::from(STREAMS_MAX)).enumerate() {
            d[256 + 8 * i..264 + 8 * i].copy_from_slice(&seq.0.to_le_bytes());
        }
        d[LEASE_AT..LEASE_AT + 4].copy_from_slice(&self.lease_left_ms.to_le_bytes());
        d
    }

    /// Reads a status; `None` if it is short or not valid (T18).
    #[must_use]
    pub fn decode(d: &[u8]) -> Option<Self> {
        if d.len() < STATUS_LEN {
            return None;
        }
        let streams = u16::from_le_bytes([d[22], d[23]]);
        if streams > STREAMS_MAX {
            return None;
        }
        // Only an unreachable owner, and so not the asker, has a lease that runs.
        let lease_left_ms = u32_at(d, LEASE_AT);
        if lease_left_ms > 0 && (d[20] & 2 == 0 || d[20] & 32 != 0) {
            return None;
        }
        let owner = &d[32..256];
        let end = owner.iter().position(|b| *b == 0).unwrap_or(owner.len());
        Some(Self {
            volume: VolumeId(array_at(d, 0)),
            generation: u32_at(d, 16),
            known: d[20] & 1 != 0,
            owned: d[20] & 2 != 0,
            unrecovered: d[20] & 4 != 0,
            log_lost: d[20] & 8 != 0,
            damaged: d[20] & 128 != 0,
            unlogged: d[20] & 16 != 0,
            own: d[20] & 32 != 0,
            kept: d[20] & 64 != 0,
            streams,
            slots: u32_at(d, 24),
            live_entries: u32_at(d, 28),
            lease_left_ms,
            owner: String::from_utf8_lossy(&owner[..end]).into_owned(),
            released: (0..usize::from(streams)).map(|i| Seq(u64_at(d, 256 + 8 * i))).collect(),
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
        let long = VolumeStatus { owner: "n".repeat(300), ..status.clone() };
        assert_eq!(VolumeStatus::decode(&long.encode()), Some(status.clone()), "cut");
        let more = VolumeStatus { streams: STREAMS_MAX + 1, ..status };
        assert_eq!(VolumeStatus::decode(&more.encode()), None);
        assert_eq!(VolumeStatus::decode(&good[..STATUS_LEN - 1]), None);
    }
}
