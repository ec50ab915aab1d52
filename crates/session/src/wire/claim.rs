//! The data of a claim command, by which a host becomes the owner of a volume.

use alloc::vec::Vec;

use riopipe_order::attribute::{Member, VolumeId};
use riopipe_order::log_region::MemberNamespace;

use super::{array_at, u16_at, u32_at};

/// The data of a claim (4096 bytes on the wire).
///
/// | byte | field |
/// |---|---|
/// | 0–15 | volume id |
/// | 16–19 | generation |
/// | 20 | flags: bit 0 create, bit 1 take over, bit 2 unlogged, bit 3 resume, bit 4 give up |
/// | 21 | number of namespaces |
/// | 22–23 | number of streams |
/// | 24–27 | log slots per stream, with `create`; 0: the target chooses |
/// | 28–31 | lease, ms |
/// | 32– | for each namespace 8 bytes: namespace id (4), member number in the volume (1), 0 (3) |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The volume.
    pub volume: VolumeId,
    /// The owner's generation: higher than any on record (trap T8).
    pub generation: u32,
    /// Whether the target makes log partitions for the volume, which has none there.
    pub create: bool,
    /// Whether the content of the target's log for the volume is given up. The log records that,
    /// and then makes the partitions anew that can't be read; with `create`, all of them (trap
    /// T26).
    pub give_up: bool,
    /// Whether an owner that is connected, or whose lease runs, is fenced (trap T8).
    pub take_over: bool,
    /// Whether the volume gets an owner but no partitions, because its engine needs no ordering log
    /// (`none`, `sync`).
    pub unlogged: bool,
    /// Whether the same owner comes back after its association or the target has ended.
    /// `generation` is then the one on record, and the content of the logs stays (promise P7).
    pub resume: bool,
    /// The number of streams of the volume, 1 to [`STREAMS_MAX`].
    pub streams: u16,
    /// With `create`: the number of log slots per stream; 0 lets the target choose.
    pub slots: u32,
    /// How long the target keeps the volume for its owner, and guards it, after the loss of the
    /// owner's association, milliseconds (trap T25).
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

/// The places of the fields in a claim, bytes. [`Claim`] has the table.
const FLAGS_AT: usize = 20;
const NAMESPACE_COUNT_AT: usize = 21;
const NAMESPACES_AT: usize = 32;
/// The bytes of each namespace in a claim.
const NAMESPACE_LEN: usize = 8;

const FLAG_CREATE: u8 = 1;
const FLAG_TAKE_OVER: u8 = 1 << 1;
const FLAG_UNLOGGED: u8 = 1 << 2;
const FLAG_RESUME: u8 = 1 << 3;
const FLAG_GIVE_UP: u8 = 1 << 4;
const KNOWN_FLAGS: u8 = FLAG_CREATE | FLAG_TAKE_OVER | FLAG_UNLOGGED | FLAG_RESUME | FLAG_GIVE_UP;

/// Numbers these namespaces as the members 0, 1, … of a volume, in this order.
#[must_use]
pub fn in_order(nsids: impl IntoIterator<Item = u32>) -> Vec<MemberNamespace> {
    let numbered = nsids.into_iter().enumerate();
    numbered.map(|(number, nsid)| MemberNamespace { member: Member(number as u8), nsid }).collect()
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
        let mut bytes = alloc::vec![0; CLAIM_LEN];
        bytes[0..16].copy_from_slice(&self.volume.0);
        bytes[16..20].copy_from_slice(&self.generation.to_le_bytes());
        bytes[FLAGS_AT] = self.flags();
        bytes[NAMESPACE_COUNT_AT] = self.members.len() as u8;
        bytes[22..24].copy_from_slice(&self.streams.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.slots.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.lease_ms.to_le_bytes());
        let records = bytes[NAMESPACES_AT..].chunks_exact_mut(NAMESPACE_LEN);
        for (namespace, record) in self.members.iter().zip(records) {
            record[0..4].copy_from_slice(&namespace.nsid.to_le_bytes());
            record[4] = namespace.member.0;
        }
        bytes
    }

    fn flags(&self) -> u8 {
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        flag(self.create, FLAG_CREATE)
            | flag(self.take_over, FLAG_TAKE_OVER)
            | flag(self.unlogged, FLAG_UNLOGGED)
            | flag(self.resume, FLAG_RESUME)
            | flag(self.give_up, FLAG_GIVE_UP)
    }

    /// Reads a claim; `None` if it is short or not valid (trap T18).
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < CLAIM_LEN {
            return None;
        }
        let flags = bytes[FLAGS_AT];
        let namespace_count = usize::from(bytes[NAMESPACE_COUNT_AT]);
        let streams = u16_at(bytes, 22);
        if flags & !KNOWN_FLAGS != 0
            || namespace_count == 0
            || !(1..=STREAMS_MAX).contains(&streams)
        {
            return None;
        }
        let records = bytes[NAMESPACES_AT..].chunks_exact(NAMESPACE_LEN).take(namespace_count);
        Some(Self {
            volume: VolumeId(array_at(bytes, 0)),
            generation: u32_at(bytes, 16),
            create: flags & FLAG_CREATE != 0,
            give_up: flags & FLAG_GIVE_UP != 0,
            take_over: flags & FLAG_TAKE_OVER != 0,
            unlogged: flags & FLAG_UNLOGGED != 0,
            resume: flags & FLAG_RESUME != 0,
            streams,
            slots: u32_at(bytes, 24),
            lease_ms: u32_at(bytes, 28),
            members: records
                .map(|record| MemberNamespace {
                    nsid: u32_at(record, 0),
                    member: Member(record[4]),
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
