//! The owner comes back, after a lost connection or the target's restart, and resumes (P7): the
//! conditions of the claim, the state that it finds, and the operations that it must wait for (T8).

mod world;

use peer::{HOSTID, HOSTNQN};
use riopipe_order::attribute::{Attribute, Flags, Seq, VolumeId};
use riopipe_order::log_region::{HEADER_BYTES, LogRegion, VolumeState};
use riopipe_order::ordering_log::Scan;
use riopipe_session::target::Volumes;
use riopipe_session::wire::list::Page;
use riopipe_session::wire::{self, Claim};
use riopipe_testkit::peer;
use world::recovery::{RIVAL, RIVAL_ID};
use world::{
    BOOT, LOG_LEN, Owner, Parts, SUBNQN, VOLUME, What, World, attribute, block, crc, flush_entry,
    identity, ordered, riopipe_bytes,
};

fn back(w: &World, generation: u32) -> Claim {
    Claim { create: false, resume: true, generation, ..w.first_claim() }
}

/// The `n`th entry of a binding.
fn nth(n: u32, a: Attribute) -> Attribute {
    Attribute { ordinal: n, ..a }
}

/// Why the target has closed a connection.
fn ended(w: &World, at: usize) -> Option<String> {
    w.links[at].closed.as_ref().map(ToString::to_string)
}

fn state(w: &World) -> (VolumeState, u32, [u8; 16]) {
    let header = w.host.parts.crash(0).part(0..HEADER_BYTES);
    let region = LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap();
    let record = region.volume(VOLUME).unwrap();
    (record.state, record.generation, record.owner)
}

/// Comes back after a restart: the admin connection and an I/O queue.
fn come_back(w: &mut World, generation: u32) -> (usize, usize) {
    let (admin, cntlid) = w.admin();
    let claim = back(w, generation);
    assert_eq!(w.claim(admin, &claim).map(|c| c.status), Some(0));
    (admin, w.io(cntlid, 1))
}

#[test]
fn p7_the_owner_goes_on_after_a_restart_with_a_full_log() {
    let mut w = World::new(&[true]);
    let Owner { io, .. } = w.owner();
    for seq in 1..=64 {
        let sqe = ordered(1, &attribute(seq, seq), 0);
        assert_eq!(w.call(io, sqe, &block(seq as u8)).status, 0);
    }
    let refused = w.call(io, ordered(1, &attribute(65, 65), 0), &block(65));
    assert_eq!(refused.status, 0x705, "the log is full");
    let mut w = w.restart(5);
    // None of it was flushed: the power cut has destroyed all of it.
    for lba in 1..=64 {
        w.host.drives[0].lose(lba);
    }

    let (third, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let s = w.status(third);
    assert!(s.known && !s.owned && s.unrecovered);
    assert_eq!((s.generation, s.live_entries), (1, 64));
    let plain = w.io_as(RIVAL, RIVAL_ID, cntlid, 1);
    assert_eq!(w.call(plain, peer::write(1, 1, 9, 1), &block(1)).status, 0x70a);

    let (admin, io) = come_back(&mut w, 1);
    let s = w.status(admin);
    assert!(s.own && s.unrecovered);
    assert_eq!(s.generation, 1, "no other has taken it");
    assert_eq!(w.bind(io, 0, 1, 0).status, 0x704, "what is there is not dropped");
    let bound = w.bind_again(io, 0, 1, 0);
    assert_eq!((bound.status, bound.result), (0, 64 | 2 << 32), "slots, incarnation");
    let page = w.own_list(io).unwrap();
    assert_eq!((page.live, page.released, page.settled), (64, Seq(0), false));
    assert!(page.entries.iter().all(|e| !e.durable && e.incarnation == 1));
    // All of it again, in the old order and shape.
    for seq in 1..=64 {
        let sqe = ordered(1, &attribute(seq, seq), 0);
        assert_eq!(w.call(io, sqe, &block(seq as u8)).status, 0, "T13: a full log takes it");
    }
    let scan = w.scan(0, 1);
    assert_eq!(scan.entries.len(), 64);
    assert!(
        scan.entries.iter().all(|e| e.origin.incarnation == 1),
        "nothing was logged again (T6)"
    );
    // A new entry needs space, and is of the new incarnation.
    let flush = flush_entry(65, 0);
    assert_eq!(w.call(io, ordered(1, &flush, 1), &[]).status, 0);
    let page = w.own_list(io).unwrap();
    assert_eq!((page.live, page.released), (64, Seq(1)));
    assert!(page.entries.iter().all(|e| e.durable), "one flush covers the replayed (T4)");
    assert_eq!(page.entries.last().map(|e| (e.persisted, e.incarnation)), Some((true, 2)));
    assert!((1..=64).all(|lba| w.host.drives[0].block(lba) == block(lba as u8)));
}

#[test]
fn p7_an_adopted_entry_is_persisted_where_it_stands() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    for seq in 1..=3 {
        w.command(io, ordered(seq as u16, &attribute(seq, seq), 0), &block(seq as u8));
    }
    // The second was done, and its completion got lost with the target.
    w.complete(0, 1);
    let mut w = w.restart(5);
    let (_, io) = come_back(&mut w, 1);
    assert_eq!(w.bind_again(io, 0, 1, 0).status, 0);
    let durable: Vec<bool> = w.own_list(io).unwrap().entries.iter().map(|e| e.durable).collect();
    assert_eq!(durable, [false, true, false]);
    // Durable entries are not sent: they could land over something newer.
    for (n, seq) in [(1, 1), (2, 3), (3, 4)] {
        let sqe = ordered(1, &nth(n, attribute(seq, seq)), 0);
        assert_eq!(w.call(io, sqe, &block(seq as u8)).status, 0);
    }
    for seed in 0..10 {
        let entries = w.scan(0, seed).entries;
        let found: Vec<_> = entries
            .iter()
            .map(|e| (e.attribute.seq.0, e.persisted, e.origin.incarnation))
            .collect();
        assert_eq!(found, [(1, true, 1), (2, true, 1), (3, true, 1), (4, true, 2)]);
    }
    // Another shape under a known number is no replay.
    let mut w = w.restart(6);
    let (_, io) = come_back(&mut w, 1);
    assert_eq!(w.bind_again(io, 0, 1, 0).status, 0);
    let other = nth(1, attribute(1, 9));
    assert_eq!(w.call(io, ordered(1, &other, 0), &block(9)).status, 0x707);
    assert_eq!(w.host.drives[0].block(9), vec![0; 4096]);
}

#[test]
fn t27_what_was_reported_durable_stays_so_when_the_drive_loses_its_protection() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    for seq in 1..=2 {
        w.command(io, ordered(seq as u16, &attribute(seq, 8), 0), &block(seq as u8));
    }
    // Both complete in one turn, the second over the first. The power goes before the fence of
    // their persist words, and takes only that of the first.
    let (at, _) = w.partition(0);
    w.host.parts.fail_fences_after(at, 0);
    w.host.drives[0].holds = false;
    w.complete(0, 0);
    let persisted = |scan: Scan| scan.entries.iter().map(|e| e.persisted).collect::<Vec<_>>();
    let seed = (0..1000).find(|&seed| persisted(w.scan(0, seed)) == [false, true]);
    let mut w = w.restart(seed.expect("a crash takes any of the words"));
    // The owner finds both durable, by the overlap (T12), and sends neither again.
    let (_, io) = come_back(&mut w, 1);
    assert_eq!(w.bind_again(io, 0, 1, 0).status, 0);
    let durable = |page: Page| page.entries.iter().map(|e| e.durable).collect::<Vec<_>>();
    assert_eq!(durable(w.own_list(io).unwrap()), [true, true]);
    let third = nth(1, attribute(3, 9));
    assert_eq!(w.call(io, ordered(1, &third, 0), &block(3)).status, 0);
    // Now the drive comes back without its protection. The durable entries stay durable for the
    // next opening of the volume.
    let mut w = w.restart_with(&[true], 1);
    let (admin, _) = w.successor(2);
    assert_eq!(durable(w.list(admin, 0).unwrap()), [true, true, true]);
    assert_eq!(w.host.drives[0].block(8), block(2));
}

#[test]
fn p7_a_lost_connection_is_made_good_within_the_association() {
    let mut w = World::new(&[true]);
    let Owner { admin, io, cntlid } = w.owner();
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    w.command(io, ordered(2, &attribute(2, 2), 0), &block(2));
    w.hang_up(io);
    let again = w.io(cntlid, 2);
    for _ in 0..2 {
        let busy = w.bind_again(again, 0, 1, 0);
        assert_eq!((busy.status, busy.dnr), (0x709, false), "T8: late writes are in flight");
        assert_eq!(w.list(admin, 0), Err(0x709));
        w.complete(0, 0);
    }
    assert_eq!(w.bind(again, 0, 1, 0).status, 0x704);
    assert_eq!(w.bind_again(again, 0, 1, 0).status, 0);
    assert_eq!(w.own_list(again).unwrap().live, 2);
    w.host.drives[0].holds = false;
    for seq in 1..=3 {
        assert_eq!(w.call(again, ordered(1, &attribute(seq, seq), 0), &block(7)).status, 0);
    }
    assert_eq!(w.scan(0, 1).entries.len(), 3);
    // The binding carries the mark of the groups that the owner has released meanwhile.
    w.hang_up(again);
    let again = w.io(cntlid, 3);
    assert_eq!(w.bind_again(again, 0, 1, 2).status, 0);
    let page = w.own_list(again).unwrap();
    assert_eq!((page.released, page.live), (Seq(2), 1));
}

#[test]
fn t8_a_connection_that_does_not_know_that_it_is_dead_is_ended() {
    let mut w = World::new(&[true]);
    let Owner { io, cntlid, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    let again = w.io(cntlid, 2);
    assert_eq!(ended(&w, io), None);
    let busy = w.bind_again(again, 0, 1, 0);
    assert_eq!((busy.status, busy.dnr), (0x709, false));
    assert_eq!(ended(&w, io).as_deref(), Some("its owner needs the stream elsewhere"));
    assert_eq!(w.bind_again(again, 0, 1, 0).status, 0x709, "its write has not come back");
    assert!(!w.links[io].conn.is_drained());
    w.complete(0, 0);
    assert_eq!(w.bind_again(again, 0, 1, 0).status, 0);
    assert_eq!(ended(&w, again), None);
    // The connection that carries it is not ended for itself.
    assert_eq!(w.bind_again(again, 0, 1, 0).status, 0x709);
    assert_eq!(ended(&w, again), None);
}

#[test]
fn t8_others_cannot_end_a_connection() {
    let mut w = World::new(&[true]);
    let Owner { io, .. } = w.owner();
    let (_, rival) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let theirs = w.io_as(RIVAL, RIVAL_ID, rival, 1);
    assert_eq!(w.bind_again(theirs, 0, 1, 0).status, 0x703);
    assert_eq!(w.bind_again(theirs, 0, 0, 0).status, 0x702);
    assert_eq!(ended(&w, io), None);
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
}

#[test]
fn p7_a_queue_that_is_connected_anew_replaces_the_old() {
    let mut w = World::new(&[true]);
    let Owner { io, cntlid, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    let at = w.initialize(peer::Digests::default(), 0);
    let connect = |w: &mut World, hostid| {
        let data = peer::connect_data(SUBNQN, HOSTNQN, hostid, cntlid);
        w.call(at, peer::connect(0, 1, 127, 0), &data).status
    };
    assert_ne!(connect(&mut w, RIVAL_ID), 0);
    assert_eq!(ended(&w, io), None, "only the host itself may");
    assert_eq!(connect(&mut w, HOSTID), 0x0c);
    assert_eq!(ended(&w, io).as_deref(), Some("its host has connected the queue anew"));
    assert_eq!(connect(&mut w, HOSTID), 0x0c, "a write of the old one is in flight");
    w.complete(0, 0);
    assert_eq!(connect(&mut w, HOSTID), 0);
    assert_eq!(w.bind_again(at, 0, 1, 0).status, 0);
}

#[test]
fn p7_a_new_association_of_the_owner_replaces_the_old() {
    let mut w = World::new(&[true]);
    let Owner { admin: old, io, cntlid } = w.owner();
    let spare = w.io(cntlid, 2);
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    w.command(spare, peer::write(1, 1, 9, 1), &block(9));
    let (admin, cntlid) = w.admin();
    // Not without the flag that it comes back.
    let plain = Claim { resume: false, ..back(&w, 2) };
    assert_eq!(w.claim(admin, &plain).unwrap().status, 0x701);
    let claim = back(&w, 1);
    assert_eq!(w.claim(admin, &claim), None, "T8: two writes are in flight");
    assert!([old, io, spare].iter().all(|at| w.links[*at].closed.is_some()));
    w.complete(0, 0);
    assert_eq!(w.next(admin), None);
    w.complete(0, 0);
    assert_eq!(w.next(admin).unwrap().completion().status, 0);
    assert!([old, io, spare].iter().all(|at| w.links[*at].conn.is_drained()));
    assert_eq!(w.host.shared.controllers().count(), 1);
    assert!(w.status(admin).own);
    w.host.drives[0].holds = false;
    let io = w.io(cntlid, 1);
    assert_eq!(w.bind_again(io, 0, 1, 0).status, 0);
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    // The same association may claim again: it is accepted again, and its streams are returned.
    let claim = back(&w, 1);
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    assert_eq!(w.call(io, ordered(2, &attribute(2, 2), 0), &block(2)).status, 0x702);
    assert_eq!(w.bind_again(io, 0, 1, 0).status, 0);
}

#[test]
fn t8_only_the_owner_on_record_comes_back() {
    let mut w = World::new(&[true]);
    let Owner { admin, io, .. } = w.owner();
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let refused = |w: &mut World, at: usize, change: &dyn Fn(&mut Claim)| {
        let mut claim = back(w, 1);
        change(&mut claim);
        w.claim(at, &claim).unwrap().status
    };
    assert_eq!(refused(&mut w, rival, &|_| ()), 0x703, "while it lives");
    w.hang_up(admin);
    assert_eq!(refused(&mut w, rival, &|_| ()), 0x703, "and when it is gone");
    let mut w = w.restart(3);
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    assert_eq!(refused(&mut w, rival, &|_| ()), 0x703, "and after a restart");
    let (admin, _) = w.admin();
    assert_eq!(refused(&mut w, admin, &|c| c.generation = 2), 0x710, "the log is older (T24)");
    assert_eq!(refused(&mut w, admin, &|c| c.generation = 0), 0x702);
    assert_eq!(refused(&mut w, admin, &|c| c.create = true), 0x02);
    assert_eq!(refused(&mut w, admin, &|c| c.take_over = true), 0x02);
    assert_eq!(refused(&mut w, admin, &|c| c.unlogged = true), 0x02);
    assert_eq!(refused(&mut w, admin, &|c| c.streams = 3), 0x02);
    assert_eq!(refused(&mut w, admin, &|c| c.volume = VolumeId([8; 16])), 0x70a);
    assert_eq!(refused(&mut w, admin, &|c| c.members[0].nsid = 2), 0x0b);
    assert!(!w.status(admin).owned);
    // Another host has owned it.
    let next = Claim { resume: false, ..back(&w, 2) };
    assert_eq!(w.claim(rival, &next).unwrap().status, 0);
    w.hang_up(rival);
    assert_eq!(refused(&mut w, admin, &|_| ()), 0x702);
    assert_eq!(refused(&mut w, admin, &|c| c.generation = 2), 0x703);
}

/// An older copy of the log was put in its place while the target was down. The entries that were
/// reported to the owner are not in there, and must not be replayed as if nothing else were
/// missing.
#[test]
fn t24_no_owner_comes_back_to_a_log_that_went_back_in_time() {
    let mut w = World::new(&[true]);
    let Owner { admin, .. } = w.owner();
    let older = w.host.parts.crash(1);
    let next = Claim { resume: false, ..back(&w, 2) };
    assert_eq!(w.claim(admin, &next).unwrap().status, 0);
    let mut w = World::with(&[true], identity(), older);
    let (admin, _) = w.admin();
    let claim = back(&w, 2);
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0x710);
    assert!(!w.status(admin).owned);
    let claim = back(&w, 1);
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0, "its own generation is");
}

#[test]
fn t9_a_recovery_that_a_restart_cut_off_is_not_taken_for_done() {
    let mut w = World::abandoned_by_two();
    let (admin, _) = w.admin();
    let next = Claim { resume: false, ..back(&w, 2) };
    assert_eq!(w.claim(admin, &next).unwrap().status, 0);
    assert_eq!(w.settle(admin, 2, &[(0, 0, false)]), 0);
    // The target is restarted, its owner comes back with the same generation.
    let mut w = w.restart(9);
    let (admin, io) = come_back(&mut w, 2);
    assert!(w.status(admin).unrecovered);
    assert_eq!(w.bind(io, 0, 2, 0).status, 0x704);
    assert_eq!(w.bind_again(io, 1, 2, 0).status, 0x704, "the entries are not its own");
    assert_eq!(w.settle(admin, 2, &[(1, 0, false)]), 0);
    assert_eq!(w.bind_again(io, 0, 2, 0).status, 0x713, "what was settled starts anew");
    assert_eq!(w.bind(io, 0, 2, 0).status, 0);
    // From here on the entries are its own.
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(3)).status, 0);
    let mut w = w.restart(10);
    let (_, io) = come_back(&mut w, 2);
    assert_eq!(w.bind_again(io, 0, 2, 0).status, 0);
    assert_eq!(w.own_list(io).unwrap().live, 1);
}

#[test]
fn t21_a_restarted_target_keeps_a_volume_for_its_owner() {
    let mut w = World::new(&[false]);
    w.lease_ms = 45_000;
    let Owner { io, .. } = w.owner();
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    let mark = riopipe_bytes(&wire::mark_command(Seq(1), true)).cid(5);
    assert_eq!(w.call(io, mark, &[]).status, 0);
    // Nothing in its log waits for recovery, but the owner is alive and will be back.
    let mut w = w.restart(3);
    let (rival, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let s = w.status(rival);
    assert!(s.owned && !s.unrecovered);
    let plain = w.io_as(RIVAL, RIVAL_ID, cntlid, 1);
    assert_eq!(w.call(plain, peer::write(1, 1, 1, 1), &block(9)).status, 0x70a);
    let other = Claim { volume: VolumeId([8; 16]), ..w.first_claim() };
    assert_eq!(w.claim(rival, &other).unwrap().status, 0x70a);
    let (admin, io) = come_back(&mut w, 1);
    assert_eq!(w.bind_again(io, 0, 1, 1).status, 0);
    assert_eq!(w.call(io, ordered(1, &nth(1, attribute(2, 2)), 1), &block(2)).status, 0);
    assert_eq!(w.host.drives[0].block(1), block(1));
    // Once it is closed, any host may claim it.
    assert_eq!(w.call(io, riopipe_bytes(&wire::mark_command(Seq(2), true)).cid(5), &[]).status, 0);
    let release = riopipe_bytes(&wire::release_command(VOLUME, false)).cid(9);
    assert_eq!(w.call(admin, release, &[]).status, 0);
    assert_eq!(w.call(plain, peer::write(1, 1, 1, 1), &block(9)).status, 0);
    let mut w = w.restart(4);
    let (_, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let plain = w.io_as(RIVAL, RIVAL_ID, cntlid, 1);
    assert_eq!(w.call(plain, peer::write(1, 1, 1, 1), &block(9)).status, 0);
}

#[test]
fn t25_an_owner_that_comes_back_finds_its_volume_open() {
    let mut w = World::new(&[false]);
    let Owner { admin, .. } = w.owner();
    assert_eq!(state(&w), (VolumeState::Owned, 1, HOSTID));
    w.hang_up(admin);
    assert_eq!(state(&w), (VolumeState::Owned, 1, HOSTID), "though there is nothing in its log");
    let (_, io) = come_back(&mut w, 1);
    assert_eq!(state(&w), (VolumeState::Owned, 1, HOSTID), "before anything is done");
    assert_eq!(w.bind_again(io, 0, 1, 0).status, 0);
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
}

#[test]
fn volumes_without_a_log_are_come_back_to_as_well() {
    let new = || World::over(&[false], identity(), Parts::default(), Volumes::without_log(crc));
    let mut w = new();
    let (old, _) = w.admin();
    let claim = Claim { unlogged: true, create: false, generation: 4, ..w.first_claim() };
    assert_eq!(w.claim(old, &claim).unwrap().status, 0);
    let again = Claim { resume: true, ..claim };
    let logged = Claim { unlogged: false, ..again.clone() };
    let (admin, cntlid) = w.admin();
    assert_eq!(w.claim(admin, &logged).unwrap().status, 0x706);
    assert_eq!(w.claim(admin, &again).unwrap().status, 0);
    assert!(w.links[old].closed.is_some());
    let io = w.io(cntlid, 1);
    assert_eq!(w.call(io, peer::write(1, 1, 0, 1), &block(1)).status, 0);
    // A restarted target knows nothing of it, so there is no host to ask.
    let mut w = new();
    let (admin, _) = w.admin();
    assert_eq!(w.claim(admin, &logged).unwrap().status, 0x706);
    assert_eq!(w.claim(admin, &again).unwrap().status, 0);
    assert_eq!(w.status(admin).generation, 4);
}

#[test]
fn t5_a_resumed_stream_widens_next_to_its_released_mark() {
    let near = (1u64 << 32) - 2;
    let mut w = World::new(&[true]);
    let (_, cntlid) = {
        let (admin, cntlid) = w.admin();
        let claim = w.first_claim();
        assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
        (admin, cntlid)
    };
    let io = w.io(cntlid, 1);
    assert_eq!(w.bind(io, 0, 1, near).status, 0);
    let groups = [near + 1, near + 2, near + 3, near + 4];
    for (n, seq) in groups.into_iter().enumerate() {
        let a = nth(n as u32 + 1, attribute(seq, n as u64));
        assert_eq!(w.call(io, ordered(1, &a, near), &block(n as u8)).status, 0);
    }
    let mut w = w.restart(2);
    let (_, io) = come_back(&mut w, 1);
    assert_eq!(w.bind_again(io, 0, 1, near).status, 0);
    for (n, seq) in groups.into_iter().enumerate() {
        let a = nth(n as u32 + 1, attribute(seq, n as u64));
        assert_eq!(w.call(io, ordered(1, &a, near), &block(n as u8)).status, 0);
    }
    let found: Vec<u64> = w.scan(0, 1).entries.iter().map(|e| e.attribute.seq.0).collect();
    assert_eq!(found, groups, "adopted, each once");
}

#[test]
fn the_pages_of_a_carried_stream_are_of_one_reading() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    let write = |w: &mut World, seq| {
        assert_eq!(w.call(io, ordered(1, &attribute(seq, seq), 0), &block(1)).status, 0);
    };
    (1..=5).for_each(|seq| write(&mut w, seq));
    let first = w.own_page(io, 0, 64 * 3).unwrap();
    assert_eq!((first.live, first.entries.len(), first.more), (5, 2, true));
    write(&mut w, 6);
    let second = w.own_page(io, first.next.0, 64 * 3).unwrap();
    assert_eq!((second.live, second.entries.len(), second.more), (5, 2, true));
    // From anywhere else, or from the start, it is another reading.
    assert_eq!(w.own_page(io, 1, 64 * 3).unwrap().live, 6);
    write(&mut w, 7);
    assert_eq!(w.own_page(io, 0, 64 * 3).unwrap().live, 7);
}

#[test]
fn t22_a_failed_flush_stops_its_own_stream_and_those_it_affects() {
    let mut w = World::new(&[true]);
    let Owner { io, cntlid, .. } = w.owner();
    let other = w.io(cntlid, 2);
    assert_eq!(w.bind(other, 1, 1, 0).status, 0);
    assert_eq!(w.call(other, ordered(1, &attribute(1, 50), 0), &block(1)).status, 0);
    let mut first = attribute(1, 1);
    first.flags = first.flags.with(Flags::FLUSH);
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &first, 0), &block(1));
    w.complete(0, 0);
    assert_eq!(w.host.drives[0].pending[0].what, What::Flush);
    w.fail(0, 0);
    w.host.drives[0].holds = false;
    assert_eq!(w.next(io).unwrap().completion().status, 0x280);
    assert_eq!(w.call(io, ordered(2, &attribute(2, 2), 0), &block(2)).status, 0x707);
    assert_eq!(w.call(other, ordered(2, &attribute(2, 51), 0), &block(2)).status, 0x707);
    // Resumed, both begin with a clean slate: the failure is not counted against them twice.
    w.hang_up(io);
    w.hang_up(other);
    let (io, other) = (w.io(cntlid, 3), w.io(cntlid, 4));
    assert_eq!((w.bind_again(io, 0, 1, 0).status, w.bind_again(other, 1, 1, 0).status), (0, 0));
    assert_eq!(w.call(io, ordered(1, &first, 0), &block(1)).status, 0);
    assert_eq!(w.call(other, ordered(1, &attribute(1, 50), 0), &block(1)).status, 0);
}

#[test]
fn t18_a_bind_with_unknown_bits_is_refused() {
    let mut w = World::new(&[true]);
    let Owner { cntlid, .. } = w.owner();
    let io = w.io(cntlid, 2);
    for word in [1 << 16 | 1, 1 << 30 | 1, 1 << 31 | 1 << 16, 1 << 31 | 2, u32::MAX] {
        let sqe = wire::bind_command(VOLUME, riopipe_order::attribute::StreamId(0), 1, Seq(0));
        let done = w.call(io, riopipe_bytes(&sqe).dword(10, word).cid(3), &[]);
        assert_eq!(done.status, 0x70e, "{word:#x}");
    }
    assert_eq!(w.bind_again(io, 1, 1, (1 << 62) + 1).status, 0x708);
}
