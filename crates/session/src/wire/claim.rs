//! The data of a claim: which host wants a volume, and how.

use alloc::vec::Vec;

use riopipe_order::attribute::{Member, VolumeId};
use riopipe_order::log_region::MemberNamespace;

use super::{array_at, u32_at};

/// The data of a claim (4096 bytes on the wire).
///
/// | byte | field |
/// |---|---|
/// | 0–15 | volume id |
/// | 16–19 | generation |
/// | 20 | flags: bit 0 create, bit 1 take over, bit 2 no log needed, bit 3 resume, bit 4 give up |
/// | 21 | number of namespaces |
/// | 22–23 | streams |
/// | 24–27 | log slots per stream (create; 0 = what fits) |
/// | 28–31 | lease, ms |
/// | 32– | for each namespace: its id (4 bytes), its member number in the volume (1), 0 (3) |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The volume.
    pub volume: VolumeId,
    /// The owner's generation: higher than any on record (T8).
    pub generation: u32,
    /// Make log partitions for a volume that the target doesn't know yet.
    pub create: bool,
    /// The content of this log for the volume is given up: the log records that, then partitions
    /// that can't be read are begun anew; with `create`, all of them (T26).
    pub give_up: bool,
    /// Fence an owner that is connected (T8).
    pub take_over: bool,
    /// The volume's engine needs no ordering log (`none`, `sync`): owned, but without partitions.
    pub unlogged: bool,
    /// The same owner comes back after its association or the target died: `generation` is the one
    /// on record, and the content of the logs stays (P7).
    pub resume: bool,
    /// The number of streams of the volume, at most 1024.
    pub streams: u16,
    /// The number of log slots per stream when creating; 0 lets the target choose.
    pub slots: u32,
    /// The time for which the volume stays the owner's, and guarded, when the target loses its
    /// association, milliseconds (T25).
    pub lease_ms: u32,
    /// The member namespaces on this target, with the volume's numbers for them.
    pub members: Vec<MemberNamespace>,
}

/// Length of a [`Claim`] on the wire, bytes.
pub const CLAIM_LEN: usize = 4096;
/// The most namespaces that one claim names.
pub const CLAIM_NAMESPACES_MAX: usize = 255;
/// The most streams of a volume.
pub const STREAMS_MAX: u16 = 1024;

/// The namespaces, as members 0, 1, … in this order.
#[must_use]
pub fn in_order(nsids: impl IntoIterator<Item = u32>) -> Vec<MemberNamespace> {
    let numbered = nsids.into_iter().enumerate();
    numbered.map(|(i, nsid)| MemberNamespace { member: Member(i as u8), nsid }).collect()
}

impl Claim {
    /// A claim of a volume that the target knows and that has no owner: it gives up no log, takes
    /// over from no owner, and requests no lease.
    #[must_use]
    pub const fn plain(
        volume: VolumeId,
        generation: u32,
        streams: u16,
        members: Vec<MemberNamespace>,
    ) -> Self {
        Self {
            volume,
            generation,
            create: false,
            give_up: false,
            take_over: false,
            unlogged: false,
            resume: false,
            streams,
            slots: 0,
            lease_ms: 0,
            members,
        }
    }

    /// The bytes of the claim on the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        debug_assert!(self.members.len() <= CLAIM_NAMESPACES_MAX);
        let mut d = alloc::vec![0; CLAIM_LEN];
        d[0..16].copy_from_slice(&self.volume.0);
        d[16..20].copy_from_slice(&self.generation.to_le_bytes());
        d[20] = u8::from(self.create)
            | u8::from(self.take_over) << 1
            | u8::from(self.unlogged) << 2
            | u8::from(self.resume) << 3
            | u8::from(self.give_up) << 4;
        d[21] = self.members.len() as u8;
        d[22..24].copy_from_slice(&self.streams.to_le_bytes());
        d[24..28].copy_from_slice(&self.slots.to_le_bytes());
        d[28..32].copy_from_slice(&self.lease_ms.to_le_bytes());
        for (i, place) in self.members.iter().enumerate() {
            let at = 32 + 8 * i;
            d[at..at + 4].copy_from_slice(&place.nsid.to_le_bytes());
            d[at + 4] = place.member.0;
        }
        d
    }

    /// Reads a claim; `None` if it is short or not valid (T18).
    #[must_use]
    pub fn decode(d: &[u8]) -> Option<Self> {
        if d.len() < CLAIM_LEN || d[20] & !0b1_1111 != 0 {
            return None;
        }
        let streams = u16::from_le_bytes([d[22], d[23]]);
        if streams == 0 || streams > STREAMS_MAX || d[21] == 0 {
            return None;
        }
        Some(Self {
            volume: VolumeId(array_at(d, 0)),
            generation: u32_at(d, 16),
            create: d[20] & 1 != 0,
            give_up: d[20] & 16 != 0,
            take_over: d[20] & 2 != 0,
            unlogged: d[20] & 4 != 0,
            resume: d[20] & 8 != 0,
            streams,
            slots: u32_at(d, 24),
            lease_ms: u32_at(d, 28),
            members: (0..usize::from(d[21]))
                .map(|i| MemberNamespace {
                    nsid: u32_at(d, 32 + 8 * i),
                    member: Member(d[36 + 8 * i]),
                })
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_survives_the_wire() {
        let claim = Claim {
            volume: VolumeId([7; 16]),
            generation: 3,
            create: true,
            give_up: false,
            take_over: false,
            unlogged: false,
            resume: true,
            streams: 24,
            slots: 512,
            lease_ms: 45_000,
            members: alloc::vec![
                MemberNamespace { member: Member(0), nsid: 1 },
                MemberNamespace { member: Member(5), nsid: 9 },
            ],
        };
        assert_eq!(Claim::decode(&claim.encode()), Some(claim));
        assert_eq!(Claim::decode(&[0; CLAIM_LEN]), None);
    }

    #[test]
    fn every_flag_of_a_claim_is_its_own() {
        let claim = Claim {
            volume: VolumeId(core::array::from_fn(|i| i as u8)),
            generation: 0x8192_a3b4,
            create: false,
            give_up: false,
            take_over: false,
            unlogged: false,
            resume: false,
            streams: STREAMS_MAX,
            slots: 0x8877_6655,
            lease_ms: 0x9796_9594,
            members: in_order((0..CLAIM_NAMESPACES_MAX as u32).map(|i| 0x8070_6000 + i)),
        };
        let good = claim.encode();
        assert_eq!(good[16..28], [0xb4, 0xa3, 0x92, 0x81, 0, 255, 0, 4, 0x55, 0x66, 0x77, 0x88]);
        assert_eq!(good[28..32], [0x94, 0x95, 0x96, 0x97]);
        assert_eq!(good[32 + 8..32 + 16], [1, 0x60, 0x70, 0x80, 1, 0, 0, 0]);
        let flags: [fn(&mut Claim); 5] = [
            |c| c.create = true,
            |c| c.take_over = true,
            |c| c.unlogged = true,
            |c| c.resume = true,
            |c| c.give_up = true,
        ];
        for (bit, set) in flags.iter().enumerate() {
            let mut claim = claim.clone();
            set(&mut claim);
            let bytes = claim.encode();
            assert_eq!(bytes[20], 1 << bit);
            assert_eq!(Claim::decode(&bytes), Some(claim));
        }
        let refused = |at: usize, bytes: &[u8]| {
            let mut bad = good.clone();
            bad[at..at + bytes.len()].copy_from_slice(bytes);
            assert_eq!(Claim::decode(&bad), None, "{at}: {bytes:x?}");
        };
        refused(20, &[32]); // an unknown flag
        refused(21, &[0]); // no namespaces
        refused(22, &[0, 0]); // no streams
        refused(22, &[1, 4]); // too many
        assert_eq!(Claim::decode(&good), Some(claim));
        assert_eq!(Claim::decode(&good[..CLAIM_LEN - 1]), None);
    }
}
