//! Data that an R2T has requested goes straight to the buffer of its command, as soon as the head of
//! its PDU has come.

mod world;

use riopipe_session::target::limits::STALL_NS;
use riopipe_testkit::peer::{self, Digests, HOSTID, HOSTNQN, Sqe};
use world::{SUBNQN, World, block, pattern};

const BLOCKS: u32 = 2;
const LEN: usize = BLOCKS as usize * 4096;
const ABORT_REQUESTED: u16 = 0x07;
const TRANSIENT_TRANSPORT: u16 = 0x22;

/// A host with one I/O queue, whose PDUs have these digests. `is_direct`: the target receives data
/// in the memory that it names, instead of in its receive buffer.
fn host(w: &mut World, digests: Digests, is_direct: bool) -> usize {
    let (_, cntlid) = w.admin();
    let io = w.initialize(digests, 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    assert_eq!(w.call(io, peer::connect(0, 1, 127, 0), &data).status, 0);
    w.links[io].is_direct = is_direct;
    io
}

/// Begins a write of [`BLOCKS`] blocks, and returns the transfer tag of its R2T.
fn begin(w: &mut World, io: usize, cid: u16) -> u16 {
    w.command(io, peer::write_r2t(cid, 1, 7, BLOCKS), &[]);
    let r2t = w.next(io).expect("an R2T");
    assert_eq!((r2t.kind, r2t.u16(8)), (0x09, cid));
    r2t.u16(10)
}

fn content(w: &World) -> Vec<u8> {
    (7..7 + u64::from(BLOCKS)).flat_map(|lba| w.host.drives[0].block(lba)).collect()
}

#[test]
fn data_is_exact_however_its_pdu_is_cut() {
    for (header, data_digest) in [(false, false), (true, true), (false, true)] {
        for is_direct in [false, true] {
            let digests = Digests { header, data: data_digest };
            let mut w = World::new(&[false]);
            let io = host(&mut w, digests, is_direct);
            let head = if header { 28 } else { 24 };
            let end = head + LEN;
            let cuts = [1, 8, 23, head - 1, head, head + 1, head + 4096, end - 1, end, end + 1];
            for (nth, cut) in cuts.into_iter().enumerate() {
                for second in [1, 2, 4096, LEN] {
                    let data = pattern(nth as u8 ^ second as u8, BLOCKS as usize);
                    let ttag = begin(&mut w, io, 3);
                    let mut bytes = peer::h2c_data(digests, 3, ttag, 0, &data, true);
                    // A command follows in the same input.
                    bytes.extend(peer::capsule(digests, &peer::flush(4, 1).0, &[]));
                    let cut = cut.min(bytes.len());
                    let second = (cut + second).min(bytes.len());
                    for part in [&bytes[..cut], &bytes[cut..second], &bytes[second..]] {
                        w.send(io, part);
                    }
                    let done: Vec<_> =
                        w.completions(io).iter().map(|done| (done.cid, done.status)).collect();
                    assert_eq!(done, [(3, 0), (4, 0)], "{cut} {second}");
                    assert!(content(&w) == data, "{cut} {second} {is_direct} {digests:?}");
                }
            }
        }
    }
}

/// The memory for data is that of the command, and no more than the rest of the PDU.
#[test]
fn the_memory_for_data_ends_with_its_pdu() {
    let mut w = World::new(&[false]);
    let io = host(&mut w, Digests::default(), true);
    assert!(w.links[io].conn.data_space().is_empty(), "nothing is requested");
    let ttag = begin(&mut w, io, 1);
    assert!(w.links[io].conn.data_space().is_empty(), "no PDU has begun");
    let data = pattern(1, BLOCKS as usize);
    let first = peer::h2c_data(Digests::default(), 1, ttag, 0, &data[..4096], false);
    w.send(io, &first[..100]);
    assert_eq!(w.links[io].conn.data_space().len(), first.len() - 100);
    w.send(io, &first[100..]);
    assert!(w.links[io].conn.data_space().is_empty(), "the PDU is complete");
    let second = peer::h2c_data(Digests::default(), 1, ttag, 4096, &data[4096..], true);
    w.send(io, &second[..24]);
    assert_eq!(w.links[io].conn.data_space().len(), 4096);
    w.send(io, &second[24..]);
    assert_eq!(w.next(io).unwrap().completion().status, 0);
    assert!(content(&w) == data);
}

#[test]
fn a_wrong_digest_fails_the_command_and_is_reported() {
    for is_direct in [false, true] {
        let digests = Digests { header: false, data: true };
        let mut w = World::new(&[false]);
        let io = host(&mut w, digests, is_direct);
        let ttag = begin(&mut w, io, 1);
        let mut bytes = peer::h2c_data(digests, 1, ttag, 0, &pattern(1, BLOCKS as usize), true);
        bytes[1000] ^= 1;
        w.send(io, &bytes[..500]);
        w.send(io, &bytes[500..]);
        assert_eq!(w.next(io).unwrap().completion().status, TRANSIENT_TRANSPORT);
        assert!(content(&w) == [0; LEN], "nothing is written");
        let reports = w.host.log.iter().filter(|event| event.contains("DigestError"));
        assert_eq!(reports.count(), 1);
    }
}

/// An error in the head of a data PDU is found before its data has come.
#[test]
fn a_wrong_head_ends_the_connection_before_its_data() {
    let data = pattern(1, BLOCKS as usize);
    for (cid, tag, offset, len, last) in [
        (2, 0, 0, LEN, true),     // of another command
        (1, 9, 0, LEN, true),     // of no transfer
        (1, 0, 4096, 4096, true), // not where the data begins
        (1, 0, 0, 4096, true),    // not the last
        (1, 0, 0, LEN, false),    // the last
    ] {
        let mut w = World::new(&[false]);
        let io = host(&mut w, Digests::default(), true);
        let ttag = begin(&mut w, io, 1);
        let tag = ttag + tag;
        let bytes = peer::h2c_data(Digests::default(), cid, tag, offset, &data[..len], last);
        w.send(io, &bytes[..200]);
        assert!(w.links[io].closed.is_some(), "{cid} {tag} {offset} {len} {last}");
        assert!(w.links[io].conn.is_drained());
    }
}

/// The command is aborted in the middle of its data. The rest is dropped, and nothing else is.
#[test]
fn the_data_of_an_aborted_command_is_dropped() {
    for is_direct in [false, true] {
        for cut in [24, 100, 24 + LEN - 1, 24 + LEN + 3] {
            let digests = Digests { header: false, data: true };
            let mut w = World::new(&[false]);
            let (admin, cntlid) = w.admin();
            let io = w.initialize(digests, 0);
            let connect = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
            assert_eq!(w.call(io, peer::connect(0, 1, 127, 0), &connect).status, 0);
            w.links[io].is_direct = is_direct;
            let ttag = begin(&mut w, io, 1);
            let bytes = peer::h2c_data(digests, 1, ttag, 0, &pattern(1, BLOCKS as usize), true);
            w.send(io, &bytes[..cut]);
            let abort = Sqe::new(0x08, 9, 0).dword(10, 1 << 16 | 1);
            assert_eq!(w.call(admin, abort, &[]).result, 0, "it is aborted");
            assert_eq!(w.next(io).unwrap().completion().status, ABORT_REQUESTED);
            assert!(w.links[io].conn.data_space().is_empty(), "its buffer is free");
            // The host uses the command's identifier again, before the rest of the data.
            let (first, rest) = bytes[cut..].split_at((bytes.len() - cut) / 2);
            w.send(io, first);
            w.send(io, rest);
            assert_eq!(w.call(io, peer::write(1, 1, 7, 1), &block(5)).status, 0);
            assert!(content(&w)[..4096] == block(5) && content(&w)[4096..] == [0; 4096]);
            assert!(w.links[io].conn.is_quiet());
        }
    }
}

/// A peer that sends the data byte by byte has no more time than one that sends nothing.
#[test]
fn t28_parts_of_a_pdu_do_not_extend_its_time_limit() {
    for is_direct in [false, true] {
        let mut w = World::new(&[false]);
        let io = host(&mut w, Digests::default(), is_direct);
        let ttag = begin(&mut w, io, 1);
        let data = pattern(1, BLOCKS as usize);
        let bytes = peer::h2c_data(Digests::default(), 1, ttag, 0, &data, true);
        w.send(io, &bytes[..30]);
        for at in 30..50 {
            assert!(w.links[io].closed.is_none(), "{at}");
            w.host.now += STALL_NS / 20;
            w.send(io, &bytes[at..=at]);
            w.tick();
        }
        assert!(w.links[io].closed.is_some(), "{is_direct}");
    }
}

/// A slow peer that keeps to the limit for each PDU is not cut off.
#[test]
fn each_pdu_has_its_own_time() {
    let mut w = World::new(&[false]);
    let io = host(&mut w, Digests::default(), true);
    let ttag = begin(&mut w, io, 1);
    let data = pattern(1, BLOCKS as usize);
    for (offset, last) in [(0, false), (4096, true)] {
        let part = &data[offset..offset + 4096];
        let bytes = peer::h2c_data(Digests::default(), 1, ttag, offset as u32, part, last);
        w.host.now += STALL_NS * 2 / 3;
        w.tick();
        w.send(io, &bytes[..100]);
        w.host.now += STALL_NS * 2 / 3;
        w.tick();
        w.send(io, &bytes[100..]);
    }
    assert_eq!(w.next(io).unwrap().completion().status, 0);
    assert!(content(&w) == data);
}
