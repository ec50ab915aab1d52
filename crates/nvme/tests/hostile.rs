//! T18 without a fuzzer: the bodies of the fuzz targets over damaged valid input, from a fixed
//! seed.

#[allow(unreachable_pub, reason = "public for the fuzz crate")]
#[path = "../../../fuzz/src/nvme.rs"]
mod bodies;

use riopipe_testkit::{Random, hex};

/// One valid PDU of each kind, some with digests, from the specification.
fn pdus() -> Vec<Vec<u8>> {
    const WRITE: &str = "01 40 0500 01000000 00000000 00000000 0000000000000000
        0000000000000000 08000000 000000 01
        44332211 00000000 00000000 00000000 00000000 00000000";
    let ic = |kind: &str| {
        let mut b = hex(kind);
        b.resize(128, 0);
        b
    };
    vec![
        ic("00 00 80 00 80000000 0000 00 03 00000000"),
        ic("01 00 80 00 80000000 0000 00 03 00000200"),
        hex("02 00 18 00 20000000 0100 02000000 00000000000000000000 0900180018000000"),
        hex("03 00 18 00 18000000 0200 00000000 00000000000000000000"),
        hex(&format!("04 00 48 48 50000000 {WRITE} 6162636465666768")),
        hex(&format!("04 00 48 00 48000000 {WRITE}")),
        hex(&format!("04 03 48 50 5c000000 {WRITE} c0baed25 00000000 6162636465666768 b721940a")),
        hex("05 00 18 00 18000000 78563412 00000000 0700 0100 2a00 0000"),
        hex("05 01 18 00 1c000000 78563412 00000000 0700 0100 2a00 0000 07e9fb8f"),
        hex("06 04 18 18 1c000000 0300 0700 10000000 04000000 00000000 01020304"),
        hex("07 0c 18 18 1c000000 0300 0000 10000000 04000000 00000000 01020304"),
        hex("07 0f 18 1c 24000000 0900 0000 00100000 04000000 00000000 499c89db 01020304 f48c3029"),
        hex("09 00 18 00 18000000 0300 0700 00200000 00100000 00000000"),
    ]
}

/// Changes a few bytes, mostly in the first `hot` bytes, which the decoders branch on.
fn damage(bytes: &mut Vec<u8>, hot: usize, rng: &mut Random) {
    const ODD: [u8; 8] = [0x00, 0x01, 0x7f, 0x80, 0xff, 0x18, 0x48, 0x20];
    for _ in 0..=rng.index(4) {
        let range = if rng.index(3) > 0 { hot.min(bytes.len()) } else { bytes.len() };
        let at = rng.index(range);
        match rng.index(6) {
            0 | 1 => bytes[at] ^= 1 << rng.index(8),
            2 => bytes[at] = ODD[rng.index(ODD.len())],
            3 => bytes[at] = rng.next() as u8,
            4 => bytes.truncate(hot.max(rng.index(bytes.len() + 1))),
            _ => bytes.resize(bytes.len() + rng.index(64), rng.next() as u8),
        }
    }
}

#[test]
fn t18_a_hundred_thousand_damaged_pdus() {
    let corpus = pdus();
    let mut rng = Random(0x9e37_79b9_7f4a_7c15);
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..150_000 {
        let mut bytes = vec![rng.next() as u8];
        bytes.extend(&corpus[rng.index(corpus.len())]);
        damage(&mut bytes, 9, &mut rng);
        if bodies::pdu(&bytes) {
            taken += 1;
        } else {
            refused += 1;
        }
    }
    assert!(taken > 3_000 && refused > 50_000, "{taken} taken, {refused} refused");
}

#[test]
fn t18_damaged_commands() {
    let mut rng = Random(0x2545_f491_4f6c_dd1d);
    let valid = &pdus()[4][8..72];
    let mut taken = 0;
    for _ in 0..100_000 {
        let mut bytes = valid.to_vec();
        damage(&mut bytes, 64, &mut rng);
        taken += u32::from(bodies::command(&bytes));
    }
    assert!((1_000..100_000).contains(&taken), "{taken}");
}

#[test]
fn t18_damaged_structures() {
    let mut connect = vec![0; 1024];
    connect[256..285].copy_from_slice(b"nqn.2026-01.io.example:drives");
    connect[512..545].copy_from_slice(b"nqn.2014-08.org.nvmexpress:uuid:1");
    let mut rng = Random(0xd1b5_4a32_d192_ed03);
    let mut taken = 0;
    for round in 0..3_000 {
        let mut bytes = match round % 3 {
            0 => connect.clone(),
            1 => (0..4096).map(|_| rng.next() as u8).collect(),
            _ => (0..4096).map(|i| (i as u8) & rng.next() as u8 & 0x13).collect(),
        };
        let len = bytes.len();
        damage(&mut bytes, len, &mut rng);
        taken += u32::from(bodies::structures(&bytes));
    }
    assert!(taken > 100, "{taken}");
}
