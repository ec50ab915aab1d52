//! Ordered writes at the target: the gate, the log, and the moments at which data must be durable.

mod world;

use peer::Digests;
use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq};
use riopipe_order::ordering_log::Scan;
use riopipe_session::target::limits::TRANSFER_BUDGET;
use riopipe_session::wire::{self, ORDERED_BYTES_MAX};
use riopipe_testkit::peer;
use world::{
    LOG_LEN, Owner, VOLUME, What, World, attribute, block, flush_entry, ordered, pattern,
    riopipe_bytes,
};

/// Crashes tried where any subset of unfenced words may be lost.
const SEEDS: u64 = 64;

fn statuses(w: &mut World, at: usize) -> Vec<(u16, u16)> {
    w.completions(at).iter().map(|c| (c.cid, c.status)).collect()
}

fn persisted(scan: &Scan) -> Vec<(u64, bool)> {
    scan.entries.iter().map(|e| (e.attribute.seq.0, e.persisted)).collect()
}

#[test]
fn an_ordered_write_is_logged_written_and_persisted() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    for seq in 1..=3 {
        let done = w.call(io, ordered(seq as u16, &attribute(seq, 10 + seq), 0), &block(seq as u8));
        assert_eq!((done.cid, done.status), (seq as u16, 0));
    }
    assert_eq!(w.host.drives[0].block(12), block(2));
    assert_eq!(persisted(&w.scan(0, 0)), [(1, true), (2, true), (3, true)]);
    // A released group's entry may go.
    assert_eq!(w.call(io, ordered(4, &attribute(4, 20), 3), &block(4)).status, 0);
    let mark = wire::mark_command(Seq(4), true);
    assert_eq!(w.call(io, riopipe_bytes(&mark).cid(5), &[]).status, 0);
    assert!(w.scan(0, 1).is_clean(), "a durable mark leaves nothing behind");
}

#[test]
fn a_batch_has_one_fence_before_its_writes_and_one_before_its_answers() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    let (at, _) = w.partition(0);
    let before = w.host.parts.fences(at);
    let mut bytes = Vec::new();
    for seq in 1..=16u64 {
        let sqe = ordered(seq as u16, &attribute(seq, seq), 0);
        bytes.extend(peer::capsule(Digests::default(), &sqe.0, &block(seq as u8)));
    }
    w.send(io, &bytes);
    assert_eq!(w.completions(io).len(), 16);
    assert_eq!(w.host.parts.fences(at) - before, 2);
}

#[test]
fn the_attribute_is_durable_before_its_write_begins() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    let (at, len) = w.partition(0);
    let parts = w.host.parts.clone();
    w.host.drives[0].on_write = Some(Box::new(move |lba| {
        for seed in 0..SEEDS {
            let scan = parts.scan(at, len, 0, seed);
            assert!(
                scan.entries.iter().any(|e| e.attribute.lba == lba),
                "a crash now would forget the write of block {lba} (seed {seed})"
            );
        }
    }));
    let mut bytes = Vec::new();
    for seq in 1..=8u64 {
        let sqe = ordered(seq as u16, &attribute(seq, 100 + seq), 0);
        bytes.extend(peer::capsule(Digests::default(), &sqe.0, &block(seq as u8)));
    }
    w.send(io, &bytes);
    assert_eq!(w.completions(io).len(), 8);
    // And with its data on request.
    let large = Attribute { blocks: 20, ..attribute(9, 300) };
    w.command(io, ordered(9, &large, 0).transport(20 * 4096), &[]);
    let ttag = w.next(io).unwrap().u16(10);
    w.send(io, &peer::h2c_data(Digests::default(), 9, ttag, 0, &pattern(1, 20), true));
    assert_eq!(statuses(&mut w, io), [(9, 0)]);
}

#[test]
fn t7_the_persist_word_is_durable_before_the_response() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    // Finishing within the call, and later.
    for (seq, holds) in [(1u64, false), (2, true)] {
        w.host.drives[0].holds = holds;
        w.command(io, ordered(seq as u16, &attribute(seq, seq), 0), &block(1));
        w.complete_all(0);
        assert_eq!(statuses(&mut w, io), [(seq as u16, 0)]);
        for seed in 0..SEEDS {
            let entries = w.scan(0, seed).entries;
            let entry = entries.iter().find(|e| e.attribute.seq.0 == seq).expect("logged");
            assert!(entry.persisted, "answered, but a crash would undo it (seed {seed})");
        }
    }
}

#[test]
fn t4_only_a_good_flush_covers_on_a_volatile_drive() {
    let mut w = World::new(&[true]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    w.complete(0, 0);
    assert_eq!(statuses(&mut w, io), [(1, 0)], "complete, not durable");
    assert_eq!(persisted(&w.scan(0, 0)), [(1, false)]);
    let mut flushed = attribute(2, 2);
    flushed.flags = Flags::BOUNDARY.with(Flags::FLUSH);
    w.command(io, ordered(2, &flushed, 0), &block(2));
    w.complete(0, 0);
    assert_eq!(statuses(&mut w, io), [], "written, not flushed");
    assert_eq!(w.host.drives[0].pending[0].what, What::Flush);
    assert_eq!(persisted(&w.scan(0, 0)), [(1, false), (2, false)]);
    w.complete(0, 0);
    assert_eq!(statuses(&mut w, io), [(2, 0)]);
    assert_eq!(persisted(&w.scan(0, 0)), [(1, false), (2, true)]);
}

#[test]
fn t4_after_a_failed_write_no_flush_covers_it() {
    let mut w = World::new(&[true]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    w.command(io, ordered(2, &flush_entry(2, 0), 0), &[]);
    w.fail(0, 0);
    w.complete_all(0);
    let mut got = statuses(&mut w, io);
    got.sort_unstable();
    assert_eq!(got, [(1, 0x280), (2, 0x707)], "a write fault, and poison for what follows");
    assert_eq!(persisted(&w.scan(0, 0)), [(1, false), (2, false)]);
    assert_eq!(w.call(io, ordered(3, &attribute(3, 3), 0), &block(3)).status, 0x707);
}

#[test]
fn t2_a_flush_waits_for_earlier_writes_and_they_for_nothing() {
    let mut w = World::new(&[true, true]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.host.drives[1].holds = true;
    for seq in 1..=3 {
        w.command(io, ordered(seq as u16, &attribute(seq, seq), 0), &block(1));
    }
    w.command(io, ordered(4, &flush_entry(4, 0), 0), &[]);
    let mut other = attribute(5, 5);
    other.member = Member(1);
    w.command(io, ordered(5, &other, 0), &block(1));
    assert_eq!(w.host.drives[0].pending.len(), 3, "all in flight together");
    assert_eq!(w.host.drives[1].pending.len(), 1, "another drive is not held up");
    w.complete(0, 2);
    w.complete(0, 0);
    assert!(w.host.drives[0].pending.iter().all(|p| p.what != What::Flush), "one is missing");
    w.complete(0, 0);
    assert_eq!(w.host.drives[0].pending.len(), 1);
    assert_eq!(w.host.drives[0].pending[0].what, What::Flush);
    assert_eq!(statuses(&mut w, io), [(3, 0), (1, 0), (2, 0)]);
    w.complete(0, 0);
    assert_eq!(statuses(&mut w, io), [(4, 0)]);
}

#[test]
fn t2_data_still_in_transit_holds_the_flush() {
    let mut w = World::new(&[true]);
    let Owner { io, .. } = w.owner();
    let large = Attribute { blocks: 20, ..attribute(1, 0) };
    w.command(io, ordered(1, &large, 0).transport(20 * 4096), &[]);
    let ttag = w.next(io).unwrap().u16(10);
    w.command(io, ordered(2, &flush_entry(2, 0), 0), &[]);
    w.command(io, ordered(3, &attribute(3, 50), 0), &block(3));
    assert_eq!(statuses(&mut w, io), [(3, 0)], "a later write needs no earlier one");
    assert_eq!(w.host.drives[0].history.len(), 1);
    w.send(io, &peer::h2c_data(Digests::default(), 1, ttag, 0, &pattern(1, 20), true));
    assert_eq!(statuses(&mut w, io), [(1, 0), (2, 0)]);
    let order: Vec<&What> = w.host.drives[0].history.iter().map(|(_, what)| what).collect();
    assert!(matches!(order[..], [What::Write(_), What::Write(_), What::Flush]), "{order:?}");
}

#[test]
fn t12_a_later_write_to_the_same_block_waits() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    let mut bytes = Vec::new();
    for (seq, lba) in [(1, 7), (2, 8), (3, 7)] {
        let sqe = ordered(seq as u16, &attribute(seq, lba), 0);
        bytes.extend(peer::capsule(Digests::default(), &sqe.0, &block(seq as u8)));
    }
    w.send(io, &bytes);
    let lbas = |w: &World| w.host.drives[0].pending.iter().map(|p| p.lba).collect::<Vec<_>>();
    assert_eq!(lbas(&w), [7, 8], "the second write of block 7 is held");
    // The receive buffer is used again meanwhile: the held data must not have stayed there.
    w.command(io, ordered(9, &attribute(4, 30), 0), &block(9));
    w.complete(0, 0);
    assert_eq!(lbas(&w), [8, 30, 7]);
    w.complete_all(0);
    assert_eq!(w.host.drives[0].block(7), block(3), "the later content wins");
    assert_eq!(w.completions(io).len(), 4);
}

#[test]
fn t7_an_entry_that_waits_at_the_gate_is_fenced_with_its_batch() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    let (at, _) = w.partition(0);
    let before = w.host.parts.fences(at);
    // Nothing is to be done for it but that it be on record.
    w.command(io, ordered(2, &attribute(2, 1), 0), &block(2));
    assert_eq!(w.host.parts.fences(at) - before, 1);
    assert_eq!(w.scan(0, 7).entries.len(), 2, "whatever a power cut loses");
}

#[test]
fn entries_that_come_out_of_turn_are_all_logged_before_they_wait() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    // The second closes the gap before the third; both wait for the first.
    for seq in [1, 3, 2] {
        w.command(io, ordered(seq as u16, &attribute(seq, 7), 0), &block(seq as u8));
    }
    assert_eq!(persisted(&w.scan(0, 0)), [(1, false), (2, false), (3, false)]);
    w.complete_all(0);
    assert_eq!(w.host.drives[0].block(7), block(3));
    assert_eq!(persisted(&w.scan(0, 0)), [(1, true), (2, true), (3, true)]);
}

#[test]
fn only_data_that_the_gate_holds_is_copied() {
    let mut w = World::new(&[true]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    w.host.drives[0].holds = false;
    let mut flushed = attribute(2, 2);
    flushed.flags = flushed.flags.with(Flags::FLUSH);
    w.command(io, ordered(2, &flushed, 0), &block(2));
    assert_eq!(w.host.drives[0].block(2), block(2), "only its FLUSH waits for the first");
    assert_eq!(w.host.allocs, 0);
    w.command(io, ordered(3, &attribute(3, 1), 0), &block(3));
    assert_eq!(w.host.allocs, 1, "the first is still to be written there");
}

#[test]
fn t12_writes_that_finish_at_once_overlap_in_order_too() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    let mut bytes = Vec::new();
    for seq in 1..=3u64 {
        let sqe = ordered(seq as u16, &attribute(seq, 7), 0);
        bytes.extend(peer::capsule(Digests::default(), &sqe.0, &block(seq as u8)));
    }
    w.send(io, &bytes);
    assert_eq!(w.completions(io).len(), 3);
    assert_eq!(w.host.drives[0].block(7), block(3));
    assert_eq!(persisted(&w.scan(0, 0)).len(), 3);
}

#[test]
fn t13_a_full_log_refuses_and_releases_free_space() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    for seq in 1..=64u64 {
        assert_eq!(w.call(io, ordered(1, &attribute(seq, seq), 0), &block(1)).status, 0);
    }
    // All 64 slots hold live entries; the next request brings the mark that frees some.
    assert_eq!(w.call(io, ordered(1, &attribute(65, 65), 32), &block(1)).status, 0);
    for seq in 66..=96u64 {
        assert_eq!(w.call(io, ordered(1, &attribute(seq, seq), 32), &block(1)).status, 0);
    }
    let refused = w.call(io, ordered(1, &attribute(97, 97), 32), &block(1));
    assert_eq!(refused.status, 0x705, "more than its credits");
    assert_eq!(w.host.drives[0].block(97), vec![0; 4096], "nothing unlogged is written");
    assert_eq!(w.call(io, ordered(1, &attribute(98, 98), 90), &block(1)).status, 0x705, "stopped");
}

#[test]
fn t1_only_a_mark_that_is_to_be_durable_costs_a_fence() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    for seq in 1..=2 {
        assert_eq!(w.call(io, ordered(1, &attribute(seq, seq), 0), &block(1)).status, 0);
    }
    let (at, _) = w.partition(0);
    let before = w.host.parts.fences(at);
    let mark = |w: &mut World, seq, durable| {
        let sqe = riopipe_bytes(&wire::mark_command(Seq(seq), durable));
        assert_eq!(w.call(io, sqe.cid(5), &[]).status, 0);
        w.host.parts.fences(at) - before
    };
    assert_eq!(mark(&mut w, 1, false), 0);
    assert!(mark(&mut w, 2, true) > 0);
}

#[test]
fn t5_numbers_are_widened_next_to_the_last_one_seen() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    // Steps of less than half of the range that the wire's 32 bits distinguish.
    let steps = (1..=8).map(|n| n << 30);
    let mut ordinals = 1..;
    let mut write = |w: &mut World, seq: u64| {
        let ordinal = ordinals.next().unwrap();
        let a = Attribute { ordinal, ..attribute(seq, u64::from(ordinal)) };
        assert_eq!(w.call(io, ordered(1, &a, seq - 1), &block(1)).status, 0, "{seq:#x}");
        let logged = w.scan(0, 0).entries.last().map(|e| e.attribute.seq);
        assert_eq!(logged, Some(Seq(seq)), "{seq:#x}");
    };
    let mark = |w: &mut World, seq| {
        let sqe = riopipe_bytes(&wire::mark_command(Seq(seq), false));
        assert_eq!(w.call(io, sqe.cid(5), &[]).status, 0);
    };
    for seq in steps {
        write(&mut w, seq);
    }
    // A mark moves the place, too, but never back.
    let far = 1 << 40;
    mark(&mut w, far);
    mark(&mut w, 1 << 33);
    write(&mut w, far + 1);
    // Nor does an entry of an earlier group.
    write(&mut w, far + (1 << 30));
    let a = Attribute { ordinal: 11, ..attribute(far + 2, 90) };
    assert_eq!(w.call(io, ordered(1, &a, far + 1), &block(1)).status, 0);
    let mut a = attribute(far + (1 << 30) + (1 << 31) - 1, 91);
    a.ordinal = 12;
    assert_eq!(w.call(io, ordered(1, &a, a.seq.0 - 1), &block(1)).status, 0);
    assert_eq!(w.scan(0, 0).entries.last().map(|e| e.attribute.seq), Some(a.seq));
}

#[test]
fn t17_without_a_binding_the_fields_are_refused_not_ignored() {
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0x70f);
    let mark = wire::mark_command(Seq(4), true);
    assert_eq!(w.call(io, riopipe_bytes(&mark).cid(5), &[]).status, 0x70f);
    assert!(w.host.drives[0].history.is_empty());
    // A read knows no directives: the bits mean nothing there.
    assert_eq!(w.fetch(io, peer::read(2, 1, 0, 1).byte(50, 0xf0)).1.status, 0);
    // On the admin queue of a discovery controller there is no such thing as a claim.
    let at = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(peer::DISCOVERY_NQN, peer::HOSTNQN, peer::HOSTID, 0xffff);
    w.call(at, peer::connect(0, 0, 31, 0), &data);
    w.call(at, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
    let claim = w.first_claim();
    assert_eq!(w.claim(at, &claim).unwrap().status, 0x01);
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
}

#[test]
fn t18_senseless_ordered_requests_stop_their_stream_only() {
    let ordinary = || ordered(1, &attribute(1, 1), 0);
    let mut outside = attribute(1, world::BLOCKS);
    outside.blocks = 1;
    let mut twice = attribute(1, 1);
    twice.ordinal = 0;
    let mut ahead = attribute(1, 1);
    ahead.ordinal = 1_000_000;
    let mut other = attribute(1, 1);
    other.index = 3;
    let discard = Attribute { kind: Kind::Discard, ..attribute(1, 1) };
    let blocks = ORDERED_BYTES_MAX / 4096 + 1;
    let huge = ordered(1, &Attribute { blocks, ..attribute(1, 1) }, 0).transport(blocks * 4096);
    type Case = (&'static str, peer::Sqe, Vec<u8>, u16);
    let cases: Vec<Case> = vec![
        ("released ahead of itself", ordered(1, &attribute(1, 1), 1), block(1), 0x708),
        ("index beyond num", ordered(1, &other, 0), block(1), 0x708),
        ("unknown flags", ordinary().byte(54, 0x80), block(1), 0x708),
        ("flags of a later version", ordinary().byte(54, 0x20), block(1), 0x708),
        ("in place and extending", ordinary().byte(54, 0x14), block(1), 0x708),
        ("a discard that extends", ordered(1, &discard, 0).byte(54, 0x10), vec![], 0x708),
        ("ordinal before the first", ordered(1, &twice, 0), block(1), 0x708),
        ("ordinal far ahead", ordered(1, &ahead, 0), block(1), 0x708),
        ("beyond the end", ordered(1, &outside, 0), block(1), 0x80),
        ("another namespace", ordinary().byte(4, 9), block(1), 0x0b),
        ("FUA", ordinary().byte(51, 0x40), block(1), 0x02),
        ("more than a transfer", huge, vec![], 0x02),
        ("too little data", ordinary().inline(512), block(1)[..512].to_vec(), 0x0f),
        ("flush with data", ordered(1, &flush_entry(1, 0), 0).inline(4096), block(1), 0x0f),
    ];
    for (what, sqe, data, status) in cases {
        let mut w = World::new(&[false]);
        let Owner { io, cntlid, .. } = w.owner();
        assert_eq!(w.call(io, sqe, &data).status, status, "{what}");
        assert!(w.host.drives[0].history.is_empty(), "{what}");
        // The later entry has lost its predecessor.
        assert_eq!(w.call(io, ordinary(), &block(1)).status, 0x707, "{what}");
        // Another stream goes on.
        let other = w.io(cntlid, 2);
        assert_eq!(w.bind(other, 1, 1, 0).status, 0, "{what}");
        assert_eq!(w.call(other, ordered(1, &attribute(1, 5), 0), &block(1)).status, 0, "{what}");
    }
}

#[test]
fn t18_numbers_that_would_wrap_are_refused() {
    let mut w = World::new(&[false]);
    let Owner { io, cntlid, .. } = w.owner();
    let other = w.io(cntlid, 2);
    for far in [u64::MAX, u64::MAX - 1, (1 << 62) + 1] {
        assert_eq!(w.bind(other, 1, 1, far).status, 0x708);
        let mark = wire::mark_command(Seq(far), far & 1 == 0);
        assert_eq!(w.call(io, riopipe_bytes(&mark).cid(5), &[]).status, 0x708);
    }
    assert_eq!(w.bind(other, 1, 1, 1 << 62).status, 0);
    let mut a = attribute((1 << 62) + 1, 1);
    a.ordinal = 1;
    assert_eq!(w.call(other, ordered(1, &a, 1 << 62), &block(1)).status, 0);
    let mark = wire::mark_command(Seq(1 << 62), true);
    assert_eq!(w.call(other, riopipe_bytes(&mark).cid(5), &[]).status, 0);
}

#[test]
fn t18_a_member_number_belongs_to_one_namespace() {
    // The first request makes member 1 namespace 2. Then neither may another namespace have the
    // number, nor the namespace another number.
    for (member, nsid) in [(1, 1), (0, 2)] {
        let mut w = World::new(&[false, false]);
        let Owner { io, .. } = w.owner();
        let mut a = attribute(1, 1);
        a.member = Member(1);
        assert_eq!(w.call(io, ordered(1, &a, 0), &block(1)).status, 0);
        let mut b = attribute(2, 1);
        b.member = Member(member);
        let sqe = ordered(2, &b, 0).byte(4, nsid);
        assert_eq!(w.call(io, sqe, &block(1)).status, 0x708, "member {member} at {nsid}");
    }
}

#[test]
fn a_damaged_ordered_write_stops_its_stream() {
    let mut w = World::new(&[false]);
    let Owner { cntlid, .. } = w.owner();
    let io = w.initialize(Digests { header: false, data: true }, 0);
    let data = peer::connect_data(world::SUBNQN, peer::HOSTNQN, peer::HOSTID, cntlid);
    w.call(io, peer::connect(0, 2, 31, 0), &data);
    assert_eq!(w.bind(io, 1, 1, 0).status, 0);
    let digests = w.links[io].digests;
    // On request: the attribute is in the log by the time the damage shows.
    let large = Attribute { blocks: 20, ..attribute(1, 0) };
    w.command(io, ordered(1, &large, 0).transport(20 * 4096), &[]);
    let ttag = w.next(io).unwrap().u16(10);
    w.command(io, ordered(2, &attribute(2, 50), 0), &block(2));
    assert_eq!(statuses(&mut w, io), [(2, 0)], "in flight with the first");
    let mut bytes = peer::h2c_data(digests, 1, ttag, 0, &pattern(1, 20), true);
    *bytes.last_mut().unwrap() ^= 1;
    w.send(io, &bytes);
    assert_eq!(statuses(&mut w, io), [(1, 0x22)]);
    assert_eq!(w.host.drives[0].block(0), vec![0; 4096]);
    assert_eq!(w.call(io, ordered(3, &attribute(3, 60), 0), &block(3)).status, 0x707);
    assert_eq!(persisted(&w.scan(1, 0)), [(1, false), (2, true)]);
}

#[test]
fn t22_a_failed_flush_stops_every_stream_with_unflushed_writes_on_that_drive() {
    for flusher in ["a plain host", "the other stream"] {
        let mut w = World::new(&[true, true]);
        let Owner { io: affected, cntlid, .. } = w.owner();
        let elsewhere = w.io(cntlid, 2);
        assert_eq!(w.bind(elsewhere, 1, 1, 0).status, 0);
        assert_eq!(w.call(affected, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
        // Stream 1 has written to drive 1 only.
        let mut a = attribute(1, 1);
        a.member = Member(1);
        assert_eq!(w.call(elsewhere, ordered(1, &a, 0), &block(1)).status, 0);
        // A FLUSH of drive 0 by another queue fails; the drive then forgets that it did.
        w.host.drives[0].failing = true;
        let status = if flusher == "a plain host" {
            let plain = w.io(cntlid, 3);
            w.call(plain, peer::flush(1, 1), &[]).status
        } else {
            w.call(elsewhere, ordered(2, &flush_entry(2, 0), 0), &[]).status
        };
        assert_eq!(status, 0x280, "{flusher}");
        w.host.drives[0].failing = false;
        // The affected stream's own FLUSH would succeed now, and cover lost writes.
        let done = w.call(affected, ordered(2, &flush_entry(2, 0), 0), &[]);
        assert_eq!(done.status, 0x707, "{flusher}");
        assert_eq!(persisted(&w.scan(0, 0))[0], (1, false), "{flusher}");
        if flusher == "a plain host" {
            let mut b = flush_entry(2, 1);
            b.ordinal = 2;
            assert_eq!(w.call(elsewhere, ordered(2, &b, 0), &[]).status, 0, "unharmed");
        }
    }
}

#[test]
fn t22_a_plain_flush_answers_for_what_a_failed_one_has_lost() {
    let mut w = World::new(&[true]);
    let Owner { io, cntlid, .. } = w.owner();
    let [undoing, other] = [w.io(cntlid, 2), w.io(cntlid, 3)];
    let zeroes = |cid| peer::write_zeroes(cid, 1, 5, 1, false);
    assert_eq!(w.call(undoing, zeroes(1), &[]).status, 0);
    // The stream's FLUSH fails. The unflushed blocks of the drive, the zeroes too, may be gone.
    w.host.drives[0].failing = true;
    assert_ne!(w.call(io, ordered(1, &flush_entry(1, 0), 0), &[]).status, 0);
    w.host.drives[0].failing = false;
    assert_eq!(w.call(other, peer::flush(1, 1), &[]).status, 0, "it has written nothing");
    assert_eq!(w.call(undoing, peer::flush(2, 1), &[]).status, 0x280, "its zeroes are gone");
    // Reported once. A host that writes again and flushes again has its data.
    assert_eq!(w.call(undoing, zeroes(3), &[]).status, 0);
    assert_eq!(w.call(undoing, peer::flush(4, 1), &[]).status, 0);
}

#[test]
fn t22_a_plain_flush_covers_what_was_complete_and_nothing_else() {
    for in_flight in ["its own write", "a read", "another drive's write", "an ordered write"] {
        let mut w = World::new(&[true, true]);
        let Owner { io, cntlid, .. } = w.owner();
        let other = w.io(cntlid, 2);
        assert_eq!(w.call(io, peer::write(1, 1, 50, 1), &block(1)).status, 0);
        let drive = usize::from(in_flight == "another drive's write");
        w.host.drives[drive].holds = true;
        match in_flight {
            "its own write" => w.command(io, peer::write(2, 1, 51, 1), &block(2)),
            "a read" => w.command(io, peer::read(2, 1, 51, 1), &[]),
            "an ordered write" => w.command(io, ordered(2, &attribute(1, 1), 0), &block(2)),
            _ => w.command(io, peer::write(2, 2, 51, 1), &block(2)),
        }
        // Its first write is flushed, whichever operations are in flight.
        w.command(io, peer::flush(3, 1), &[]);
        w.host.drives[drive].holds = false;
        w.complete_all(drive);
        assert!(std::iter::from_fn(|| w.next(io)).count() >= 2);
        // A FLUSH of another queue fails: only this queue's unflushed writes may be gone.
        w.host.drives[0].failing = true;
        assert_eq!(w.call(other, peer::flush(1, 1), &[]).status, 0x280);
        w.host.drives[0].failing = false;
        let status = if in_flight == "its own write" { 0x280 } else { 0 };
        assert_eq!(w.call(io, peer::flush(4, 1), &[]).status, status, "{in_flight}");
    }
}

#[test]
fn t22_a_flush_that_fails_meanwhile_counts() {
    let mut w = World::new(&[true]);
    let Owner { io, cntlid, .. } = w.owner();
    let plain = w.io(cntlid, 2);
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    w.host.drives[0].holds = true;
    w.command(plain, peer::flush(1, 1), &[]);
    w.command(io, ordered(2, &flush_entry(2, 0), 0), &[]);
    w.fail(0, 0);
    w.complete(0, 0);
    assert_eq!(statuses(&mut w, io), [(2, 0x707)], "its own FLUSH was good, and proves nothing");
    assert_eq!(persisted(&w.scan(0, 0)), [(1, false), (2, false)]);
}

#[test]
fn a_log_that_fails_stops_the_stream_and_nothing_unlogged_is_written() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    let (at, _) = w.partition(0);
    w.host.parts.fail_fences_after(at, 0);
    assert_eq!(w.call(io, ordered(2, &attribute(2, 2), 0), &block(2)).status, 0x711);
    assert_eq!(w.host.drives[0].block(2), vec![0; 4096]);
    assert_eq!(w.call(io, ordered(3, &attribute(3, 3), 0), &block(3)).status, 0x711);
    // At rest it cannot be read any more: its unknown entries wait for recovery.
    w.hang_up(io);
    assert_eq!(w.host.shared.volumes().live_entries(world::VOLUME), Some(2));

    // The second fence, before the answer: the write is done, but no host may receive a success.
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    let (at, _) = w.partition(0);
    w.host.parts.fail_fences_after(at, 1);
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0x711);
    assert_eq!(w.host.drives[0].block(1), block(1));
}

#[test]
fn discards_are_ordered_too_and_read_as_zeroes() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    assert_eq!(w.call(io, ordered(1, &attribute(1, 5), 0), &block(1)).status, 0);
    let discard = Attribute { kind: Kind::Discard, blocks: 4, ..attribute(2, 4) };
    assert_eq!(w.call(io, ordered(2, &discard, 0), &[]).status, 0);
    assert_eq!(w.host.drives[0].history[1], (4, What::Zero { blocks: 4, deallocate: true }));
    assert_eq!(w.host.drives[0].block(5), vec![0; 4096]);
    let scan = w.scan(0, 0);
    assert_eq!((scan.entries[1].attribute.kind, scan.entries[1].persisted), (Kind::Discard, true));
}

#[test]
fn no_memory_for_held_data_fails_the_write_and_its_stream() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.host.no_memory = true;
    w.command(io, ordered(1, &attribute(1, 7), 0), &block(1));
    w.command(io, ordered(2, &attribute(2, 7), 0), &block(2));
    w.complete_all(0);
    assert_eq!(statuses(&mut w, io), [(1, 0), (2, 0x06)]);
    assert_eq!(w.call(io, ordered(3, &attribute(3, 8), 0), &block(3)).status, 0x707);
    let large = Attribute { blocks: 20, ..attribute(4, 0) };
    let done = w.call(io, ordered(4, &large, 0).transport(20 * 4096), &[]);
    assert_eq!(done.status, 0x707, "refused without asking for its data");
}

#[test]
fn no_memory_for_data_on_request_fails_the_write_and_its_stream() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    w.host.no_memory = true;
    let large = Attribute { blocks: ORDERED_BYTES_MAX / 4096, ..attribute(1, 0) };
    let sqe = ordered(1, &large, 0).transport(ORDERED_BYTES_MAX);
    assert_eq!(w.call(io, sqe, &[]).status, 0x06);
    assert_eq!(w.call(io, ordered(2, &attribute(2, 500), 0), &block(2)).status, 0x707);
    // Later, when the budget would allow it.
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    let asked = take_the_budget(&mut w, io);
    let sqe = ordered(1, &large, 0).transport(ORDERED_BYTES_MAX);
    w.command(io, sqe, &[]);
    assert_eq!(w.next(io), None);
    w.host.no_memory = true;
    serve(&mut w, io, &asked[0]);
    let mut got = statuses(&mut w, io);
    got.sort_unstable();
    assert_eq!(got, [(1, 0x06), (asked[0].u16(8), 0)]);
    assert_eq!(w.call(io, ordered(2, &attribute(2, 500), 0), &block(2)).status, 0x707);
}

/// Plain writes of as much as a connection may hold; the R2Ts for them.
fn take_the_budget(w: &mut World, io: usize) -> Vec<peer::Received> {
    let blocks = ORDERED_BYTES_MAX / 4096;
    let writes = (TRANSFER_BUDGET / ORDERED_BYTES_MAX as usize) as u16;
    for cid in 100..100 + writes {
        w.command(io, peer::write_r2t(cid, 1, 1000, blocks), &[]);
    }
    let asked: Vec<_> = std::iter::from_fn(|| w.next(io)).collect();
    assert_eq!(asked.len(), usize::from(writes));
    asked
}

/// Sends the data that one of them asks for.
fn serve(w: &mut World, io: usize, r2t: &peer::Received) {
    assert_eq!((r2t.kind, r2t.u32(16)), (0x09, ORDERED_BYTES_MAX));
    let piece = 128 * 1024;
    for at in (0..ORDERED_BYTES_MAX).step_by(piece) {
        let last = at + piece as u32 == ORDERED_BYTES_MAX;
        let digests = Digests::default();
        let bytes = peer::h2c_data(digests, r2t.u16(8), r2t.u16(10), at, &vec![1; piece], last);
        w.send(io, &bytes);
    }
}

#[test]
fn a_refused_write_is_answered_when_its_data_has_come() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 0), 0), &block(1));
    // The second must wait for the first; its data comes meanwhile.
    let large = Attribute { blocks: 20, ..attribute(2, 0) };
    w.command(io, ordered(2, &large, 0).transport(20 * 4096), &[]);
    let ttag = w.next(io).unwrap().u16(10);
    w.fail(0, 0);
    assert_eq!(statuses(&mut w, io), [(1, 0x280)], "the second's data is in transit");
    w.send(io, &peer::h2c_data(Digests::default(), 2, ttag, 0, &pattern(1, 20), true));
    assert_eq!(statuses(&mut w, io), [(2, 0x707)]);
    assert_eq!(w.host.drives[0].history.len(), 1);
    assert_eq!(w.links[io].closed, None);
}

#[test]
fn a_refused_write_that_waits_for_memory_holds_up_no_other() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    let asked = take_the_budget(&mut w, io);
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 0), 0), &block(1));
    let large = Attribute { blocks: 20, ..attribute(2, 0) };
    w.command(io, ordered(2, &large, 0).transport(20 * 4096), &[]);
    w.command(io, peer::write_r2t(3, 1, 2000, ORDERED_BYTES_MAX / 4096), &[]);
    w.fail(0, 0);
    let mut got = statuses(&mut w, io);
    got.sort_unstable();
    assert_eq!(got, [(1, 0x280), (2, 0x707)]);
    // The command behind it gets the memory that it has waited for.
    w.host.drives[0].holds = false;
    serve(&mut w, io, &asked[0]);
    let answers: Vec<_> = std::iter::from_fn(|| w.next(io)).collect();
    let r2t = answers.iter().find(|pdu| pdu.kind == 0x09).expect("an R2T");
    assert_eq!((answers.len(), r2t.u16(8)), (2, 3));
    serve(&mut w, io, r2t);
    assert_eq!(statuses(&mut w, io), [(3, 0)]);
}

#[test]
fn a_plain_read_beside_a_stream_is_carried_out_when_its_memory_is_free() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    let asked = take_the_budget(&mut w, io);
    w.command(io, peer::read(3, 1, 2000, ORDERED_BYTES_MAX / 4096), &[]);
    assert_eq!(w.next(io), None, "it waits");
    serve(&mut w, io, &asked[0]);
    let mut kinds: Vec<u8> = std::iter::from_fn(|| w.next(io)).map(|pdu| pdu.kind).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, [0x05, 0x05, 0x07], "two completions, and the data of the read");
}

#[test]
fn the_fill_of_a_log_is_seen_while_a_connection_has_it() {
    let mut w = World::new(&[false]);
    let owner = w.owner();
    let used = |w: &World| {
        let fill = w.host.shared.volumes().log_fill();
        assert_eq!((fill.bytes, fill.volumes.len()), (LOG_LEN as u64, 1));
        let volume = &fill.volumes[0];
        assert_eq!((volume.id, volume.slots, volume.stream_slots), (VOLUME, 128, 64));
        assert_eq!(volume.used_slots, u64::from(volume.fullest_stream_slots));
        volume.used_slots
    };
    assert_eq!(used(&w), 0);
    for seq in 1..=5u64 {
        let mut write = attribute(seq, seq);
        write.ordinal = seq as u32;
        let sqe = ordered(seq as u16, &write, 0);
        assert_eq!(w.call(owner.io, sqe, &block(seq as u8)).status, 0);
        assert_eq!(used(&w), seq);
    }
    w.hang_up(owner.io);
    assert_eq!(used(&w), 5, "the log is at rest again");
}
