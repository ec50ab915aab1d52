//! T18 on a stable toolchain: the bodies of the session's fuzz targets over damaged streams of a
//! target and damaged structures, from a fixed seed. (The unit tests of the queue pair check each
//! false answer by itself.)

#[allow(unreachable_pub, reason = "public for the fuzz crate")]
#[path = "../../../fuzz/src/session.rs"]
mod bodies;

use riopipe_testkit::{Random, hex};

/// The bytes of an honest target, without digests.
fn honest() -> Vec<Vec<u8>> {
    vec![
        hex("07 00 18 18 20000000 0400 0000 00000000 08000000 00000000 0001020304050607"),
        hex("07 0c 18 18 20000000 0400 0000 08000000 08000000 00000000 0001020304050607"),
        hex("09 00 18 00 18000000 0100 0300 00000000 401f0000 00000000"),
        hex("09 00 18 00 18000000 0100 0400 401f0000 e8030000 00000000"),
        hex("05 00 18 00 18000000 00000000 00000000 0000 0000 0100 0000"),
        hex("05 00 18 00 18000000 00000000 00000000 0000 0000 0200 0000"),
    ]
}

#[test]
fn the_honest_stream_is_taken_whole() {
    for cut in [0x00, 0x04, 0x0c, 0xfc] {
        let mut bytes = vec![cut];
        bytes.extend(honest().concat());
        assert!(bodies::queue_pair(&bytes));
    }
}

#[test]
fn t18_damaged_streams() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut survived, mut ended) = (0, 0);
    for _ in 0..30_000 {
        let mut pdus = honest();
        for _ in 0..random.below(3) {
            let (a, b) = (random.index(pdus.len()), random.index(pdus.len()));
            match random.below(3) {
                0 => pdus.swap(a, b),
                1 => pdus[a] = pdus[b].clone(),
                _ => drop(pdus.remove(a)),
            }
        }
        // Digests are mostly off, or nothing would get beyond them.
        let mut bytes = vec![random.next() as u8 & if random.one_in(8) { 0xff } else { 0xfc }];
        bytes.extend(pdus.concat());
        for _ in 0..random.below(3) {
            let at = 1 + random.index(bytes.len() - 1);
            bytes[at] ^= 1 << random.below(8);
        }
        if bodies::queue_pair(&bytes) {
            survived += 1;
        } else {
            ended += 1;
        }
    }
    assert!(survived > 3_000 && ended > 5_000, "{survived} survived, {ended} ended");
}

#[test]
fn t18_damaged_structures_of_the_extension() {
    use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq, StreamId, VolumeId};
    use riopipe_order::entry::Position;
    use riopipe_order::recovery::ListedEntry;
    use riopipe_session::wire::list::{Page, Settle, SettleStream};
    use riopipe_session::wire::{Claim, in_order};

    let attribute = |seq: u64| Attribute {
        seq: Seq(seq),
        span: 1,
        num: 2,
        index: 1,
        ordinal: seq as u32,
        member: Member(0),
        kind: Kind::Write,
        flags: Flags::BOUNDARY,
        lba: seq,
        blocks: 1,
        tag: seq,
    };
    let entry = |seq: u64| ListedEntry {
        position: Position(seq),
        attribute: attribute(seq),
        incarnation: 1,
        persisted: true,
        durable: true,
    };
    let page = Page { live: 3, entries: (1..=3).map(entry).collect(), ..Page::default() };
    let stream = SettleStream { stream: StreamId(1), keep: true, k: Seq(4), tag: 9 };
    let settle = Settle { volume: VolumeId([1; 16]), generation: 2, streams: vec![stream; 3] };
    let claim = Claim {
        resume: true,
        slots: 64,
        lease_ms: 45_000,
        ..Claim::plain(VolumeId([1; 16]), 2, 2, in_order([1, 2]))
    };
    let honest = [page.encode(256), settle.encode(), claim.encode()];
    let honest: Vec<Vec<u8>> =
        honest.iter().zip(0..).map(|(bytes, kind)| [&[kind], &bytes[..]].concat()).collect();
    assert!(honest.iter().all(|bytes| bodies::extension(bytes)));
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..20_000 {
        let mut bytes = honest[random.index(honest.len())].clone();
        bytes.truncate(if random.one_in(8) { random.index(300) } else { 256 });
        for _ in 0..=random.below(3) {
            if bytes.len() > 1 {
                let at = 1 + random.index(bytes.len() - 1);
                bytes[at] ^= 1 << random.below(8);
            }
        }
        if bodies::extension(&bytes) {
            taken += 1;
        } else {
            refused += 1;
        }
    }
    assert!(taken > 2_000 && refused > 500, "{taken} taken, {refused} refused");
}
