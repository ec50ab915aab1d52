//! T18: to any bytes of a host, the target answers as the specification demands, or ends that one
//! connection. It never panics, never hangs, and holds no more than its bounds.

mod world;

use peer::{Digests, HOSTID, HOSTNQN, Sqe};
use riopipe_session::target::Closed;
use riopipe_session::target::limits::{
    CONNECTION_BYTES, DATA_STALL_NS, IN_CAPSULE_BYTES, STALL_NS, TRANSFER_BUDGET, UNSENT_BYTES_MAX,
};
use riopipe_testkit::{Random, peer};
use world::{Owner, SUBNQN, World, attribute, block, ordered, pattern};

/// Fatal Error Status of a termination request (TCP Figure 27).
mod fes {
    pub(crate) const HEADER: u16 = 1;
    pub(crate) const SEQUENCE: u16 = 2;
    pub(crate) const DIGEST: u16 = 3;
    pub(crate) const RANGE: u16 = 4;
    pub(crate) const LIMIT: u16 = 5;
    pub(crate) const UNSUPPORTED: u16 = 6;
}

/// The target ended the connection with this status and information.
#[track_caller]
fn terminated(w: &mut World, at: usize) -> (u16, u32) {
    let term = std::iter::from_fn(|| w.next(at)).last().expect("last words");
    assert_eq!((term.kind, term.header[1], term.header[2]), (0x03, 0, 24), "{term:?}");
    assert!(term.data.len() <= 128, "a copy of the header at most");
    assert!(matches!(w.links[at].closed, Some(Closed::Protocol(_))));
    (term.u16(8), term.u32(10))
}

fn io_queue(w: &mut World) -> usize {
    let (_, cntlid) = w.admin();
    w.io(cntlid, 1)
}

#[test]
fn t18_a_broken_header_ends_the_connection() {
    let capsule = || peer::capsule(Digests::default(), &peer::write(1, 1, 0, 1).0, &block(1));
    let with = |at: usize, byte: u8| {
        let mut p = capsule();
        p[at] = byte;
        p
    };
    let plen = |len: u32| {
        let mut p = capsule();
        p[4..8].copy_from_slice(&len.to_le_bytes());
        p
    };
    let cases: Vec<(&str, Vec<u8>, u16, u32)> = vec![
        ("unknown type", with(0, 0x0b), fes::HEADER, 0),
        ("header length", with(2, 71), fes::HEADER, 2),
        ("digest that was not agreed", with(1, 1), fes::HEADER, 1),
        ("data offset inside the header", with(3, 8), fes::HEADER, 3),
        ("shorter than its header", plen(20), fes::HEADER, 4),
        ("nothing at all", plen(0), fes::HEADER, 4),
        ("a PDU for hosts", with(0, 0x05), fes::SEQUENCE, 0),
        ("ICReq again", peer::icreq(Digests::default(), 0), fes::SEQUENCE, 0),
    ];
    for (what, bytes, status, information) in cases {
        let mut w = World::new(&[false]);
        let io = io_queue(&mut w);
        w.send(io, &bytes);
        assert_eq!(terminated(&mut w, io), (status, information), "{what}");
        assert!(w.host.drives[0].history.is_empty(), "{what}");
        assert!(w.links[io].conn.is_drained(), "{what}");
    }
}

#[test]
fn t18_a_pdu_that_claims_too_much_is_refused_on_its_first_bytes() {
    for claimed in [72 + IN_CAPSULE_BYTES + 4, 1 << 20, u32::MAX] {
        let mut w = World::new(&[false]);
        let io = io_queue(&mut w);
        let mut head = vec![0x04, 0, 72, 72];
        head.extend_from_slice(&claimed.to_le_bytes());
        w.send(io, &head);
        let (status, _) = terminated(&mut w, io);
        assert!(matches!(status, fes::HEADER | fes::LIMIT | fes::RANGE), "{status}");
    }
    // Before Connect not even that much.
    let mut w = World::new(&[false]);
    let at = w.initialize(Digests::default(), 0);
    let mut head = vec![0x04, 0, 72, 72];
    head.extend_from_slice(&(72u32 + 16384).to_le_bytes());
    w.send(at, &head);
    terminated(&mut w, at);
}

#[test]
fn t18_nothing_comes_before_the_handshake() {
    let bad_icreq = |at: usize, byte: u8| {
        let mut p = peer::icreq(Digests::default(), 0);
        p[at] = byte;
        p
    };
    let cases: Vec<(&str, Vec<u8>, u16, u32)> = vec![
        (
            "a command",
            peer::capsule(Digests::default(), &peer::write(1, 1, 0, 1).0, &block(1)),
            fes::SEQUENCE,
            0,
        ),
        ("another format version", bad_icreq(8, 1), fes::UNSUPPORTED, 8),
        ("alignment beyond 128", bad_icreq(10, 32), fes::HEADER, 10),
        ("length", bad_icreq(4, 129), fes::HEADER, 4),
        ("garbage", b"GET / HTTP/1.1\r\nHost: target\r\n\r\n".to_vec(), fes::HEADER, 0),
    ];
    for (what, bytes, status, information) in cases {
        let mut w = World::new(&[false]);
        let at = w.accept();
        w.send(at, &bytes);
        assert_eq!(terminated(&mut w, at), (status, information), "{what}");
    }
}

#[test]
fn t18_a_wrong_header_digest_is_fatal() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.initialize(Digests { header: true, data: false }, 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    w.call(io, peer::connect(0, 1, 31, 0), &data);
    let mut bytes = peer::capsule(w.links[io].digests, &peer::write(1, 1, 0, 1).0, &block(1));
    bytes[72] ^= 1;
    let digest = u32::from_le_bytes(bytes[72..76].try_into().unwrap());
    w.send(io, &bytes);
    assert_eq!(terminated(&mut w, io), (fes::DIGEST, digest));
    assert!(w.host.drives[0].history.is_empty());
}

#[test]
fn t18_data_that_was_not_requested_is_fatal() {
    let plain = Digests::default();
    let one = block(1);
    type Case<'a> = (&'a str, Box<dyn Fn(u16) -> Vec<u8>>, u16, u32);
    let send =
        |cid: u16, tag: u16, at: u32, data: Vec<u8>, last: bool| -> Box<dyn Fn(u16) -> Vec<u8>> {
            Box::new(move |ttag| peer::h2c_data(plain, cid, ttag ^ tag, at, &data, last))
        };
    let cases: Vec<Case<'_>> = vec![
        ("another tag", send(8, 1, 0, one.clone(), false), fes::HEADER, 10),
        ("no such tag", send(8, 0xffff, 0, one.clone(), false), fes::HEADER, 10),
        ("another command", send(9, 0, 0, one.clone(), false), fes::HEADER, 8),
        ("a gap", send(8, 0, 4096, one.clone(), false), fes::HEADER, 12),
        ("too much", send(8, 0, 0, pattern(1, 21), true), fes::RANGE, 0),
        ("an early end", send(8, 0, 0, one.clone(), true), fes::HEADER, 1),
        ("no end", send(8, 0, 0, pattern(1, 20), false), fes::HEADER, 1),
        ("nothing", send(8, 0, 0, vec![], false), fes::HEADER, 16),
    ];
    for (what, bytes, status, information) in cases {
        let mut w = World::new(&[false]);
        let io = io_queue(&mut w);
        w.command(io, peer::write_r2t(8, 1, 0, 20), &[]);
        let ttag = w.next(io).unwrap().u16(10);
        w.send(io, &bytes(ttag));
        let got = terminated(&mut w, io);
        assert_eq!(got.0, status, "{what}: {got:?}");
        if status == fes::HEADER {
            assert_eq!(got.1, information, "{what}");
        }
        assert!(w.host.drives[0].history.is_empty(), "{what}");
    }
    // More than is left.
    let mut w = World::new(&[false]);
    let io = io_queue(&mut w);
    w.command(io, peer::write_r2t(8, 1, 0, 20), &[]);
    let ttag = w.next(io).unwrap().u16(10);
    w.send(io, &peer::h2c_data(plain, 8, ttag, 0, &pattern(1, 12), false));
    w.send(io, &peer::h2c_data(plain, 8, ttag, 12 * 4096, &pattern(1, 12), false));
    assert_eq!(terminated(&mut w, io).0, fes::RANGE);
    // More in one PDU than MAXH2CDATA.
    let mut w = World::new(&[false]);
    let io = io_queue(&mut w);
    w.command(io, peer::write_r2t(8, 1, 0, 100), &[]);
    let ttag = w.next(io).unwrap().u16(10);
    w.send(io, &peer::h2c_data(plain, 8, ttag, 0, &pattern(1, 33), false));
    let (status, _) = terminated(&mut w, io);
    assert!(matches!(status, fes::LIMIT | fes::RANGE), "{status}");
    // Without any command.
    let mut w = World::new(&[false]);
    let io = io_queue(&mut w);
    w.send(io, &peer::h2c_data(plain, 1, 0, 0, &one, true));
    assert_eq!(terminated(&mut w, io).0, fes::HEADER);
}

#[test]
fn t18_a_host_that_overruns_its_queue_is_cut_off() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    assert_eq!(w.call(io, peer::connect(0, 1, 3, 0), &data).status, 0);
    w.host.drives[0].holds = true;
    for cid in 1..=4 {
        w.command(io, peer::write(cid, 1, u64::from(cid), 1), &block(1));
        assert_eq!(w.links[io].closed, None);
    }
    w.command(io, peer::write(5, 1, 5, 1), &block(1));
    assert_eq!(terminated(&mut w, io).0, fes::SEQUENCE);
    assert!(!w.links[io].conn.is_drained(), "four writes are in flight");
    w.complete_all(0);
    assert!(w.links[io].conn.is_drained());
    assert_eq!(w.next(io), None, "no host gets an answer");
}

#[test]
fn t18_a_command_id_in_use_is_refused() {
    let mut w = World::new(&[false]);
    let io = io_queue(&mut w);
    w.host.drives[0].holds = true;
    w.command(io, peer::write(7, 1, 0, 1), &block(1));
    assert_eq!(w.call(io, peer::write(7, 1, 1, 1), &block(2)).status, 0x03);
    w.complete_all(0);
    assert_eq!(w.next(io).unwrap().completion().status, 0);
    w.host.drives[0].holds = false;
    assert_eq!(w.call(io, peer::write(7, 1, 1, 1), &block(2)).status, 0, "free again");
}

#[test]
fn t18_a_termination_request_ends_the_connection() {
    let mut w = World::new(&[false]);
    let io = io_queue(&mut w);
    let mut term = vec![0x02, 0, 24, 0, 24, 0, 0, 0];
    term.resize(24, 0);
    term[8] = 4;
    w.send(io, &term);
    assert!(matches!(w.links[io].closed, Some(Closed::ByHost(t)) if t.fes == 4));
    assert_eq!(w.next(io), None, "no answer to that");
}

#[test]
fn t18_what_a_connection_holds_is_bounded() {
    let mut w = World::new(&[false]);
    let io = io_queue(&mut w);
    // 100 writes of 1 MiB: data is requested only as far as the budget allows.
    for cid in 1..=100 {
        w.command(io, peer::write_r2t(cid, 1, 0, 256), &[]);
    }
    let asked =
        std::iter::from_fn(|| w.next(io)).inspect(|p| assert_eq!(p.kind, 0x09)).collect::<Vec<_>>();
    assert_eq!(asked.len(), TRANSFER_BUDGET / CONNECTION_BYTES);
    // Each finished write makes space for another; in the end all are served.
    let mut queue: std::collections::VecDeque<_> = asked.into();
    let mut done = 0;
    while let Some(r2t) = queue.pop_front() {
        for (i, piece) in pattern(1, 256).chunks(128 * 1024).enumerate() {
            let at = (i * 128 * 1024) as u32;
            let bytes =
                peer::h2c_data(Digests::default(), r2t.u16(8), r2t.u16(10), at, piece, i == 7);
            w.send(io, &bytes);
        }
        while let Some(pdu) = w.next(io) {
            match pdu.kind {
                0x09 => queue.push_back(pdu),
                _ => {
                    assert_eq!(pdu.completion().status, 0);
                    done += 1;
                }
            }
        }
    }
    assert_eq!(done, 100);
}

#[test]
fn t18_answers_that_are_not_taken_count_with_data_that_is_to_come() {
    let mut w = World::new(&[false]);
    let io = io_queue(&mut w);
    let half = (TRANSFER_BUDGET / CONNECTION_BYTES / 2) as u16;
    for cid in 0..half {
        w.command(io, peer::write_r2t(cid, 1, 0, 256), &[]);
    }
    w.links[io].reading = false;
    for cid in half..4 * half {
        w.command(io, peer::read(cid, 1, 0, 256), &[]);
    }
    assert_eq!(w.host.drives[0].history.len(), usize::from(half) - 1, "headers take space, too");
}

#[test]
fn t18_a_host_that_does_not_take_its_answers_is_not_served_further() {
    let mut w = World::new(&[false]);
    let io = io_queue(&mut w);
    w.links[io].reading = false;
    for cid in 1..=120 {
        w.command(io, peer::read(cid, 1, 0, 256), &[]);
    }
    let waiting = w.links[io].out.len_bytes();
    assert!(waiting <= UNSENT_BYTES_MAX + CONNECTION_BYTES, "{waiting} bytes");
    let reads = w.host.drives[0].history.len();
    assert!(reads <= TRANSFER_BUDGET / CONNECTION_BYTES + 1, "{reads} reads begun");
    // Small answers alone are bounded as well: input stops.
    let mut w2 = World::new(&[false]);
    let at = w2.initialize(Digests::default(), 0);
    w2.links[at].reading = false;
    let refused = peer::capsule(Digests::default(), &Sqe::new(0x06, 1, 0).0, &[]);
    let many = refused.repeat(1000);
    for _ in 0..UNSENT_BYTES_MAX / 24 / 1000 + 50 {
        w2.send(at, &many);
    }
    assert!(!w2.links[at].conn.wants_input(&w2.links[at].out));
    assert!(w2.links[at].out.len_bytes() <= UNSENT_BYTES_MAX + 24);
    // So are the answers to commands that arrive together.
    let (at, _) = w2.admin();
    w2.links[at].reading = false;
    let identify = peer::capsule(Digests::default(), &peer::identify(1, 1, 0).0, &[]);
    w2.send(at, &identify.repeat(UNSENT_BYTES_MAX / 4096 + 100));
    assert!(w2.links[at].out.len_bytes() <= UNSENT_BYTES_MAX + 8192);
    // Once it reads again, everything comes.
    w.resume_reading(io);
    let mut data = 0;
    while let Some(pdu) = w.next(io) {
        data += usize::from(pdu.kind == 0x07);
    }
    assert_eq!(data, 120);
}

#[test]
fn t18_stalled_hosts_are_timed_out() {
    let stalled = |w: &World, at: usize| matches!(w.links[at].closed, Some(Closed::Stalled(_)));
    // No bytes sent at all.
    let mut w = World::new(&[false]);
    let at = w.accept();
    w.host.now += STALL_NS - 1;
    w.tick();
    assert!(!stalled(&w, at));
    assert_eq!(w.links[at].conn.next_deadline(), Some(w.host.now + 1));
    w.host.now += 1;
    w.tick();
    assert!(stalled(&w, at));
    // A handshake without Connect.
    let at = w.initialize(Digests::default(), 0);
    w.host.now += STALL_NS;
    w.tick();
    assert!(stalled(&w, at));
    // The beginning of a PDU.
    let io = io_queue(&mut w);
    let bytes = peer::capsule(Digests::default(), &peer::write(1, 1, 0, 1).0, &block(1));
    w.host.now += 100 * STALL_NS;
    w.tick();
    assert!(!stalled(&w, io), "an idle connection may stay");
    w.send(io, &bytes[..2000]);
    w.host.now += STALL_NS;
    w.tick();
    assert!(stalled(&w, io));
    // Requested data.
    let mut w = World::new(&[false]);
    let io = io_queue(&mut w);
    w.command(io, peer::write_r2t(1, 1, 0, 20), &[]);
    w.host.now += DATA_STALL_NS;
    w.tick();
    assert!(stalled(&w, io));
    // Answers that are not taken.
    let mut w = World::new(&[false]);
    let io = io_queue(&mut w);
    w.links[io].reading = false;
    w.command(io, peer::read(1, 1, 0, 1), &[]);
    w.tick();
    w.host.now += DATA_STALL_NS;
    w.tick();
    assert!(stalled(&w, io));
}

#[test]
fn t18_a_slow_drive_is_not_the_hosts_fault() {
    let mut w = World::new(&[false]);
    let io = io_queue(&mut w);
    w.host.drives[0].holds = true;
    w.command(io, peer::write(1, 1, 0, 1), &block(1));
    w.host.now += 100 * DATA_STALL_NS;
    w.tick();
    assert_eq!(w.links[io].closed, None);
    w.complete_all(0);
    assert_eq!(w.next(io).unwrap().completion().status, 0);
}

/// Valid commands, damaged at random, cut at random, on drives that finish at random. Nothing may
/// panic, every device operation comes back to its connection, and every connection can be drained.
#[test]
fn t18_damaged_sessions_never_panic_and_always_drain() {
    for seed in 0..400 {
        let mut dice = Random(seed);
        let mut w = World::new(&[false, true]);
        let Owner { admin, io, cntlid } = w.owner();
        let plain = w.io(cntlid, 2);
        let mut seq = 0;
        for _ in 0..60 {
            w.host.drives[0].holds = dice.below(2) == 0;
            w.host.drives[1].holds = dice.below(2) == 0;
            w.host.drives[1].failing = dice.below(20) == 0;
            w.host.no_memory = dice.below(20) == 0;
            let at = [admin, io, io, io, plain, plain][dice.below(6) as usize];
            if w.links[at].closed.is_some() {
                continue;
            }
            let cid = dice.below(40) as u16;
            let nsid = dice.below(3) as u32;
            let (sqe, data) = match dice.below(12) {
                0 => {
                    (peer::read(cid, nsid, dice.below(10_100), 1 + dice.below(300) as u32), vec![])
                }
                1 => (peer::write(cid, nsid, dice.below(20), 1), block(1)),
                2 => (peer::write_r2t(cid, nsid, dice.below(20), 1 + dice.below(3) as u32), vec![]),
                3 => (peer::write_zeroes(cid, nsid, dice.below(20), 5, true), vec![]),
                4 => (peer::flush(cid, nsid), vec![]),
                5 => (peer::identify(cid, dice.below(32) as u8, nsid), vec![]),
                6 => (
                    peer::get_log(cid, dice.below(8) as u8, dice.below(64) as u32 * 4, 512),
                    vec![],
                ),
                7 => (
                    Sqe::new(dice.next() as u8, cid, nsid).transport(dice.below(9000) as u32),
                    vec![],
                ),
                _ => {
                    seq += 1;
                    let mut a = attribute(seq, dice.below(8));
                    a.member.0 = dice.below(2) as u8;
                    (ordered(cid, &a, seq.saturating_sub(1 + dice.below(9))), block(seq as u8))
                }
            };
            let mut bytes = peer::capsule(Digests::default(), &sqe.0, &data);
            if dice.below(4) == 0 {
                let at = dice.below(80.min(bytes.len() as u64)) as usize;
                bytes[at] ^= 1 << dice.below(8);
            }
            if dice.below(30) == 0 {
                bytes.truncate(dice.below(bytes.len() as u64) as usize);
            }
            w.send(at, &bytes);
            while let Some(pdu) = w.next(at) {
                if pdu.kind == 0x09 && dice.below(8) != 0 {
                    let data = vec![9; pdu.u32(16) as usize];
                    let bytes =
                        peer::h2c_data(Digests::default(), pdu.u16(8), pdu.u16(10), 0, &data, true);
                    w.send(at, &bytes);
                }
            }
            for ns in 0..2 {
                let pending = w.host.drives[ns].pending.len() as u64;
                if pending > 0 && dice.below(2) == 0 {
                    let i = dice.below(pending) as usize;
                    if dice.below(10) == 0 { w.fail(ns, i) } else { w.complete(ns, i) }
                }
            }
        }
        for at in 0..w.links.len() {
            if w.links[at].closed.is_none() {
                w.hang_up(at);
            }
        }
        for ns in 0..2 {
            w.complete_all(ns);
        }
        for (at, link) in w.links.iter().enumerate() {
            assert!(link.conn.is_drained(), "connection {at} of seed {seed}");
        }
        assert_eq!(w.host.shared.connections(), 0, "seed {seed}");
        assert_eq!(w.host.shared.controllers().count(), 0, "seed {seed}");
        assert!(w.host.shared.volumes().owner(world::VOLUME).is_none(), "seed {seed}");
    }
}

#[test]
fn t18_pure_noise_never_panics() {
    for seed in 0..2000 {
        let mut dice = Random(seed ^ 0xabcd);
        let mut w = World::new(&[false]);
        let at = w.accept();
        if dice.below(2) == 0 {
            w.send(at, &peer::icreq(Digests::default(), 0));
            w.next(at);
        }
        let mut noise: Vec<u8> = (0..200 + dice.below(400)).map(|_| dice.next() as u8).collect();
        if dice.below(2) == 0 {
            // The header of a command.
            noise[..8].copy_from_slice(&[0x04, 0, 72, 72, 100, 0, 0, 0]);
        }
        w.send(at, &noise);
        while w.next(at).is_some() {}
        if w.links[at].closed.is_none() {
            w.hang_up(at);
        }
        assert!(w.links[at].conn.is_drained());
    }
}
