//! T18 on a stable toolchain: the body of the initiator's fuzz target over damaged streams of a
//! target, from a fixed seed. (The unit tests of the queue pair judge each lie by itself.)

#[allow(unreachable_pub, reason = "public for the fuzz crate")]
#[path = "../../../fuzz/src/session.rs"]
mod bodies;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// What an honest target sends, without digests.
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
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let (mut survived, mut ended) = (0, 0);
    for _ in 0..30_000 {
        let mut pdus = honest();
        for _ in 0..next() % 3 {
            let (a, b) = (next() as usize % pdus.len(), next() as usize % pdus.len());
            match next() % 3 {
                0 => pdus.swap(a, b),
                1 => pdus[a] = pdus[b].clone(),
                _ => drop(pdus.remove(a)),
            }
        }
        // Digests are mostly off, or nothing would get beyond them.
        let mut bytes = vec![next() as u8 & if next() % 8 == 0 { 0xff } else { 0xfc }];
        bytes.extend(pdus.concat());
        for _ in 0..next() % 3 {
            let at = 1 + next() as usize % (bytes.len() - 1);
            bytes[at] ^= 1 << (next() % 8);
        }
        if bodies::queue_pair(&bytes) {
            survived += 1;
        } else {
            ended += 1;
        }
    }
    assert!(survived > 3_000 && ended > 5_000, "{survived} survived, {ended} ended");
}
