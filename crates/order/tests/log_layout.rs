//! The bytes are the ones of `docs/log-format.md`, composed here by hand: a log written by
//! one build is read by all later ones.

mod common;

use common::{ID, crc32c};
use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq, VolumeId};
use riopipe_order::entry::Origin;
use riopipe_order::log_region::{
    HEADER_BYTES, HEADER_COPY_BYTES, LogKind, LogRegion, MemberNamespace, NewVolume,
};
use riopipe_order::ordering_log::{StreamLog, partition_bytes};
use riopipe_order::region::MemRegion;

/// Writes integers at offsets, little endian.
struct Bytes(Vec<u8>);

impl Bytes {
    fn at(mut self, offset: usize, bytes: &[u8]) -> Self {
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
        self
    }

    /// Puts the checksum of everything from `from` on at `offset`.
    fn checked(self, offset: usize, from: usize, seed: u32) -> Self {
        let check = crc32c(seed, &self.0[from..]);
        self.at(offset, &check.to_le_bytes())
    }
}

fn mix(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

#[test]
fn a_partition_is_laid_out_as_documented() {
    let region = MemRegion::new(partition_bytes(4));
    let mut log = StreamLog::format(region, ID, 1, crc32c).unwrap();
    log.start(Origin { generation: 0x0102_0304, incarnation: 0x0506_0708 }, Seq(0x11)).unwrap();
    let write = Attribute {
        seq: Seq(0x1112_1314_1516_1718),
        span: 256,
        num: 1,
        index: 0,
        ordinal: 0x2122_2324,
        member: Member(0x31),
        kind: Kind::Discard,
        flags: Flags::BOUNDARY.with(Flags::IN_PLACE),
        lba: 0x4142_4344_4546,
        blocks: 0x5153,
        tag: 0x6162_6364_6566_6768,
    };
    let flush = Attribute {
        num: 0x7173,
        index: 0x7172,
        span: 1,
        kind: Kind::Flush,
        flags: Flags::FLUSH.with(Flags::SPLIT),
        lba: 0,
        blocks: 0,
        ..write
    };
    let first = log.append(&write).unwrap();
    log.append(&flush).unwrap();
    log.fence().unwrap();
    log.persist(first);
    log.fence().unwrap();
    let found = log.into_region().bytes().to_vec();

    let seed = crc32c(0, &[&ID.volume.0[..], &3_u16.to_le_bytes()].concat());
    let position = 0;
    let stamp = mix(position ^ mix(0x0102_0304_0506_0708));
    let first = Bytes(vec![0; 64])
        .at(12, &[4, 3, 2, 1]) // generation
        .at(16, &[0; 8]) // position
        .at(24, &[0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11])
        .at(32, &[0x68, 0x67, 0x66, 0x65, 0x64, 0x63, 0x62, 0x61])
        .at(40, &[0x46, 0x45, 0x44, 0x43, 0x42, 0x41])
        .at(46, &[0x31, 0x02]) // member; nothing unfenced, discard
        .at(48, &[0x24, 0x23, 0x22, 0x21])
        .at(52, &[1, 0, 0, 0]) // num, index
        .at(56, &[0x52, 0x51, 255, 0b0101]) // blocks - 1, span - 1, flags
        .at(60, &[8, 7, 6, 5]) // incarnation
        .checked(8, 12, seed)
        .at(0, &stamp.to_le_bytes());
    let second = Bytes(first.0.clone())
        .at(0, &[0; 8])
        .at(16, &[1])
        .at(40, &[0; 6])
        .at(46, &[0x31, 0x13]) // one unfenced: u = 1, flush
        .at(52, &[0x73, 0x71, 0x72, 0x71])
        .at(56, &[0, 0, 0, 0b1010])
        .checked(8, 12, seed);
    let mark = Bytes(vec![0; 128])
        .at(4, &[1, 0, 3, 0]) // version, stream
        .at(8, &[4]) // two by the formatting, two by the binding
        .at(16, &[0x11]) // released
        .at(32, &[4, 3, 2, 1, 8, 7, 6, 5])
        .at(40, &[7; 16])
        .at(56, &[4, 0, 0, 0])
        .at(60, b"RIOm")
        .checked(0, 4, 0);
    let older = Bytes(mark.0.clone()).at(8, &[3]).checked(0, 4, 0);
    let blank = vec![0; 2 * 64];
    let expected = [mark.0, older.0, first.0, second.0, blank].concat();
    for (i, (found, expected)) in found.chunks(64).zip(expected.chunks(64)).enumerate() {
        assert_eq!(found, expected, "line {i}");
    }
    assert_eq!(found.len(), expected.len());
}

#[test]
fn a_settled_mark_is_laid_out_as_documented() {
    let region = MemRegion::new(partition_bytes(4));
    let mut log = StreamLog::format(region, ID, 1, crc32c).unwrap();
    log.start(Origin { generation: 1, incarnation: 2 }, Seq(0x11)).unwrap();
    log.settle(Seq(0x1112_1314_1516_1718), 0x2122_2324_2526_2728).unwrap();
    let found = log.into_region().bytes()[..256].to_vec();
    let mark = Bytes(vec![0; 128])
        .at(4, &[1, 0, 3, 0])
        .at(8, &[6]) // two by the formatting, two by the binding, two by the settling
        .at(16, &[0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11])
        .at(32, &[1, 0, 0, 0, 2])
        .at(40, &[7; 16])
        .at(56, &[4])
        .at(60, b"RIOm")
        .at(64, &[0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11]) // the tag's group
        .at(72, &[0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21])
        .at(80, &[1]) // settled
        .checked(0, 4, 0);
    let older = Bytes(mark.0.clone()).at(8, &[5]).checked(0, 4, 0);
    assert_eq!(found, [mark.0, older.0].concat());
}

#[test]
fn a_header_is_laid_out_as_documented() {
    let region = MemRegion::new(HEADER_BYTES);
    let mut log =
        LogRegion::create(region, 0x10_0000, [1; 16], [2; 16], LogKind::Block, crc32c).unwrap();
    let members = [(3, 0x0a0b_0c0d), (0, 1)]
        .map(|(member, nsid)| MemberNamespace { member: Member(member), nsid });
    for id in [8, 9] {
        let id = VolumeId([id; 16]);
        let volume = NewVolume { id, streams: 2, slots: 100, members: members.into() };
        log.add_volume(volume, |_, _| Ok(())).unwrap();
    }
    log.set_generation(VolumeId([9; 16]), 0x0102_0304, [5; 16], 0x0506_0708).unwrap();
    let found = log.into_region().bytes().to_vec();

    let record = |id: u8, offset: u64| {
        Bytes(vec![0; 248])
            .at(0, &[id; 16])
            .at(20, &[1, 2, 2, 0]) // closed, two members, two streams
            .at(24, &[100, 0, 0, 0])
            .at(32, &offset.to_le_bytes())
            .at(64, &[3, 0, 0, 0, 0x0d, 0x0c, 0x0b, 0x0a])
            .at(72, &[0, 0, 0, 0, 1])
    };
    let owned =
        record(9, 8192 + 2 * 8192).at(16, &[4, 3, 2, 1, 2]).at(28, &[8, 7, 6, 5]).at(40, &[5; 16]);
    let copy = Bytes(vec![0; HEADER_COPY_BYTES])
        .at(0, b"RIO LOG\0")
        .at(12, &[1, 0, 0, 0]) // version
        .at(16, &[4]) // written four times
        .at(24, &[1; 16])
        .at(40, &[2; 16])
        .at(56, &[1, 0, 0, 0, 3, 2]) // incarnation, kind, volumes
        .at(64, &[0, 0, 0x10])
        .at(128, &record(8, 8192).0)
        .at(128 + 248, &owned.0)
        .checked(8, 12, 0);
    assert_eq!(found[..HEADER_COPY_BYTES], copy.0[..]);
    assert_eq!(found[HEADER_COPY_BYTES..], copy.0[..]);
}
