//! The resources that peers may use at a target have bounds, with any bytes that they send or leave
//! open (T28).

mod world;

use riopipe_order::attribute::VolumeId;
use riopipe_order::log_region::{HEADER_BYTES, LogKind, LogRegion};
use riopipe_session::target::Volumes;
use riopipe_session::target::limits::{
    CONNECT_NS, CONNECTION_BYTES, FENCES_MAX, LEASE_MS_MAX, STALL_NS, STREAM_SLOTS_MAX,
};
use riopipe_session::wire::{self, Claim};
use riopipe_testkit::peer;
use world::recovery::{RIVAL, RIVAL_ID};
use world::{BOOT, LOG_LEN, Owner, Parts, VOLUME, World, block, crc, identity, riopipe_bytes};

const OWNED: u16 = 0x701;
const STALE: u16 = 0x702;
const BUSY: u16 = 0x709;
const GUARDED: u16 = 0x70a;
const LOG_FAILED: u16 = 0x711;
const LEASE_OVER: u16 = 0x714;
const LEASE_TOO_LONG: u16 = 0x715;
const TOO_MANY_SLOTS: u16 = 0x716;
const LOG_DIRECTORY_FULL: u16 = 0x717;

fn without_log(drives: usize) -> World {
    World::over(&vec![false; drives], identity(), Parts::default(), Volumes::without_log(crc))
}

/// A target whose log device has so many bytes.
fn with_log_of(len: usize) -> World {
    let parts = Parts::default();
    let header = parts.part(0..HEADER_BYTES);
    let region = LogRegion::create(header, len, [3; 16], BOOT, LogKind::Block, crc).unwrap();
    let mine = parts.clone();
    let (volumes, _) = Volumes::with_log(region, Box::new(move |at| Ok(mine.part(at))), crc);
    World::over(&[false], identity(), parts, volumes)
}

fn volume(i: u32) -> VolumeId {
    let mut id = [0; 16];
    id[..4].copy_from_slice(&(i + 1).to_le_bytes());
    VolumeId(id)
}

/// A claim of a volume without a log, with namespace `nsid` alone.
fn unlogged(w: &World, volume: VolumeId, nsid: u32) -> Claim {
    let members = wire::in_order([nsid]);
    Claim { volume, members, create: false, unlogged: true, slots: 0, ..w.first_claim() }
}

fn release(w: &mut World, admin: usize, volume: VolumeId) -> u16 {
    w.call(admin, riopipe_bytes(&wire::release_command(volume, false)).cid(52), &[]).status
}

fn claim(w: &mut World, admin: usize, claim: &Claim) -> u16 {
    w.claim(admin, claim).unwrap().status
}

/// The log has neither a record nor space left. More space would not help, so the answer is about the
/// records.
#[test]
fn a_log_with_all_its_volumes_is_not_reported_as_too_small() {
    let mut w = World::new(&[false; 17]);
    let (admin, _) = w.admin();
    let logged = |w: &World, i: u32, slots| {
        let members = wire::in_order([i]);
        Claim { volume: volume(i), members, streams: 1, slots, ..w.first_claim() }
    };
    for i in 1..=15 {
        let one = logged(&w, i, 16);
        assert_eq!(claim(&mut w, admin, &one), 0, "{i}");
    }
    let left = LOG_LEN - HEADER_BYTES - 15 * 4096;
    let all_that_is_left = logged(&w, 16, (left as u32 - 256) / 64);
    assert_eq!(claim(&mut w, admin, &all_that_is_left), 0);
    for slots in [0, 16] {
        let one_more = logged(&w, 17, slots);
        let done = w.claim(admin, &one_more).unwrap();
        assert_eq!((done.status, done.result), (LOG_DIRECTORY_FULL, 16), "{slots} slots");
    }
}

#[test]
fn t28_volumes_without_a_log_are_not_remembered_without_bound() {
    for mut w in [without_log(2), World::new(&[false, false])] {
        let (admin, _) = w.admin();
        for i in 0..1000 {
            let nsid = i % 2 + 1;
            let one = unlogged(&w, volume(i), nsid);
            assert_eq!(claim(&mut w, admin, &one), 0);
            let remembered = w.host.shared.volumes().remembered();
            assert_eq!(remembered, 2.min(i as usize + 1), "after {i}");
            assert_eq!(release(&mut w, admin, volume(i)), 0);
        }
        assert!(w.host.shared.volumes().live_entries(volume(0)).is_none());
        assert!(w.host.shared.volumes().live_entries(volume(999)).is_some());
    }
}

/// A target that has lost its log still serves volumes without a log.
#[test]
fn t28_volumes_without_a_log_beside_a_lost_log_have_the_same_bound() {
    let mut w = World::new(&[false, false]);
    let (admin, _) = w.admin();
    let logged = Claim { members: wire::in_order([1]), ..w.first_claim() };
    assert_eq!(claim(&mut w, admin, &logged), 0);
    let mut w = w.restart_with_lost_log(1);
    let (admin, _) = w.admin();
    for i in 0..10 {
        let one = unlogged(&w, volume(i), 2);
        assert_eq!(claim(&mut w, admin, &one), 0);
        assert_eq!(release(&mut w, admin, volume(i)), 0);
        assert_eq!(w.host.shared.volumes().remembered(), 2, "after {i}");
    }
    assert!(w.status(admin).log_lost, "the volume of the lost log is known");
}

#[test]
fn t28_a_volume_of_no_namespace_is_refused() {
    const INVALID_FIELD: u16 = 0x002;
    let mut w = without_log(1);
    let (admin, _) = w.admin();
    let none = Claim { members: Vec::new(), ..unlogged(&w, volume(1), 1) };
    assert_eq!(claim(&mut w, admin, &none), INVALID_FIELD);
    assert_eq!(w.host.shared.volumes().remembered(), 0);
}

#[test]
fn t28_volumes_without_a_log_that_are_left_behind_have_the_same_bound() {
    let mut w = without_log(3);
    for i in 0..300 {
        let (admin, _) = w.admin();
        // With and without a lease that is over when the next one comes.
        let lease_ms = if i % 2 == 0 { 0 } else { 1000 };
        let one = Claim { lease_ms, ..unlogged(&w, volume(i), i % 3 + 1) };
        assert_eq!(claim(&mut w, admin, &one), 0);
        w.hang_up(admin);
        assert!(w.host.shared.volumes().remembered() <= 3, "after {i}");
        w.host.now += 1_000_000_000;
    }
}

/// Hosts claim a volume and disconnect, while an operation on its drive does not come back.
#[test]
fn t28_claims_that_wait_for_a_drive_have_a_bound() {
    let mut w = without_log(1);
    let (_, cntlid) = w.admin();
    let plain = w.io(cntlid, 1);
    // Only connections that have written are waited for.
    assert_eq!(w.call(plain, peer::write(2, 1, 1, 1), &block(9)).status, 0);
    w.host.drives[0].holds = true;
    w.command(plain, peer::read(1, 1, 1, 1), &[]);
    let mut busy = None;
    for generation in 1..=FENCES_MAX as u32 + 1 {
        let (admin, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
        let next = Claim { generation, take_over: true, ..unlogged(&w, volume(1), 1) };
        busy = w.claim(admin, &next).map(|done| done.status);
        w.hang_up(admin);
    }
    assert_eq!(busy, Some(BUSY), "it may try again");
    w.host.drives[0].holds = false;
    w.complete(0, 0);
    let (admin, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let next = Claim { generation: 1000, take_over: true, ..unlogged(&w, volume(1), 1) };
    assert_eq!(claim(&mut w, admin, &next), 0);
}

/// Any host may have a volume forgotten whose log is lost. That waits for operations in flight.
#[test]
fn t28_commands_to_forget_a_volume_that_wait_for_a_drive_have_a_bound() {
    let mut w = World::new(&[false]);
    let (theirs, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let plain = w.io_as(RIVAL, RIVAL_ID, cntlid, 1);
    assert_eq!(w.call(plain, peer::write(2, 1, 1, 1), &block(9)).status, 0);
    let Owner { admin, io, .. } = w.owner();
    w.hang_up(io);
    w.hang_up(admin);
    let at = w.partition(1).0;
    w.host.parts.fail_fences_after(at, 0);
    let give_up = Claim { give_up: true, take_over: true, create: true, ..w.next_claim(2) };
    assert_eq!(claim(&mut w, theirs, &give_up), LOG_FAILED, "now its log is lost");
    w.host.drives[0].holds = true;
    w.command(plain, peer::read(1, 1, 1, 1), &[]);
    let mut busy = None;
    for _ in 0..=FENCES_MAX {
        let (admin, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
        w.command(admin, riopipe_bytes(&wire::release_command(VOLUME, true)).cid(52), &[]);
        busy = w.next(admin).map(|pdu| pdu.completion().status);
        w.hang_up(admin);
    }
    assert_eq!(busy, Some(BUSY));
}

#[test]
fn t28_what_is_owned_leased_or_logged_is_not_forgotten() {
    let mut w = World::new(&[false, false]);
    let (admin, _) = w.admin();
    let logged = Claim { members: wire::in_order([2]), ..w.first_claim() };
    assert_eq!(claim(&mut w, admin, &logged), 0);
    assert_eq!(release(&mut w, admin, VOLUME), 0);
    let first = Claim { lease_ms: 1000, ..unlogged(&w, volume(1), 1) };
    assert_eq!(claim(&mut w, admin, &first), 0);
    let (theirs, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    for nsid in [1, 2] {
        let other = unlogged(&w, volume(2 + nsid), nsid);
        assert_eq!(claim(&mut w, theirs, &other), if nsid == 1 { GUARDED } else { 0 });
    }
    w.hang_up(admin);
    let other = unlogged(&w, volume(5), 1);
    assert_eq!(claim(&mut w, theirs, &other), GUARDED, "its lease runs (T25)");
    assert!(w.host.shared.volumes().live_entries(volume(1)).is_some());
    assert!(w.host.shared.volumes().live_entries(VOLUME).is_some(), "the log knows it");
}

#[test]
fn t28_a_forgotten_owner_does_not_come_back_unaware() {
    let mut w = without_log(1);
    let (admin, _) = w.admin();
    let first = Claim { generation: 3, ..unlogged(&w, volume(1), 1) };
    assert_eq!(claim(&mut w, admin, &first), 0);
    w.hang_up(admin);
    let (theirs, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let second = unlogged(&w, volume(2), 1);
    assert_eq!(claim(&mut w, theirs, &second), 0);
    assert!(w.host.shared.volumes().live_entries(volume(1)).is_none());
    let (admin, _) = w.admin();
    let back = Claim { resume: true, ..first };
    assert_eq!(claim(&mut w, admin, &back), GUARDED, "while the other has it");
    assert_eq!(release(&mut w, theirs, volume(2)), 0);
    assert_eq!(claim(&mut w, admin, &back), LEASE_OVER, "and after that (T25)");
    let forget = riopipe_bytes(&wire::release_command(volume(2), true)).cid(52);
    let again = Claim { generation: 2, ..second };
    assert_eq!(claim(&mut w, theirs, &again), 0);
    assert_eq!(w.call(theirs, forget, &[]).status, 0);
    assert_eq!(w.host.shared.volumes().remembered(), 0);
    assert_eq!(claim(&mut w, admin, &back), LEASE_OVER);
    let anew = Claim { resume: false, generation: 4, ..back };
    assert_eq!(claim(&mut w, admin, &anew), 0, "opened anew");
    assert_eq!(claim(&mut w, theirs, &Claim { generation: 4, ..anew.clone() }), OWNED);
    assert_eq!(release(&mut w, admin, volume(1)), 0);
    assert_eq!(claim(&mut w, theirs, &Claim { generation: 4, ..anew }), STALE, "T8");
}

#[test]
fn t28_a_lease_has_a_longest_length() {
    let mut w = World::new(&[false]);
    let (admin, _) = w.admin();
    let long = Claim { lease_ms: LEASE_MS_MAX + 1, ..w.first_claim() };
    let refused = w.claim(admin, &long).unwrap();
    assert_eq!((refused.status, refused.result), (LEASE_TOO_LONG, LEASE_MS_MAX.into()));
    assert!(w.host.shared.volumes().live_entries(VOLUME).is_none(), "nothing was made");
    let longest = Claim { lease_ms: LEASE_MS_MAX, ..long };
    assert_eq!(claim(&mut w, admin, &longest), 0);
    w.hang_up(admin);
    w.host.now += u64::from(LEASE_MS_MAX) * 1_000_000;
    let (_, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let plain = w.io_as(RIVAL, RIVAL_ID, cntlid, 1);
    assert_eq!(w.call(plain, peer::write(1, 1, 1, 1), &block(9)).status, 0);
}

/// A log device may be far larger than the memory, and the log's slots are in memory.
#[test]
fn t28_the_slots_that_a_claim_asks_for_have_a_bound() {
    let mut w = with_log_of(1 << 40);
    let (admin, _) = w.admin();
    let asks = |slots| Claim { slots, ..w.first_claim() };
    let (many, chosen) = (asks(1 << 24), asks(0));
    let refused = w.claim(admin, &many).unwrap();
    assert_eq!((refused.status, refused.result), (TOO_MANY_SLOTS, STREAM_SLOTS_MAX.into()));
    assert!(w.host.shared.volumes().live_entries(VOLUME).is_none(), "nothing was made");
    assert_eq!(claim(&mut w, admin, &chosen), 0);
}

/// The connections that have an unread notice.
fn asked(w: &World) -> Vec<usize> {
    let at = |id| w.links.iter().position(|link| link.conn.id() == id).expect("it is there");
    w.host.notices.iter().map(|id| at(*id)).collect()
}

/// A claim asks only connections that may have writes in flight in its namespaces. Its cost does
/// not grow with all connections.
#[test]
fn t28_a_claim_asks_only_connections_that_write_to_its_namespaces() {
    let mut w = World::new(&[false, false]);
    let (_, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let queues: Vec<usize> = (1..=6).map(|qid| w.io_as(RIVAL, RIVAL_ID, cntlid, qid)).collect();
    let [reader, here, there, both, zeroes, discards] = queues[..] else { unreachable!("six") };
    assert_eq!(w.fetch(reader, peer::read(1, 1, 0, 1)).1.status, 0);
    assert_eq!(w.call(reader, peer::flush(2, 1), &[]).status, 0);
    for (queue, nsid) in [(here, 1), (there, 2), (both, 1), (both, 2)] {
        assert_eq!(w.call(queue, peer::write(3, nsid, 0, 1), &block(1)).status, 0);
    }
    assert_eq!(w.call(zeroes, peer::write_zeroes(4, 1, 0, 1, false), &[]).status, 0);
    let deallocate = peer::Sqe::new(0x09, 5, 1).inline(16).dword(11, 4);
    assert_eq!(w.call(discards, deallocate, &[0; 16]).status, 0);
    let (admin, cntlid) = w.admin();
    let mine = w.io(cntlid, 1);
    w.hold_mail = true;
    let first = Claim { members: wire::in_order([1]), ..w.first_claim() };
    assert!(w.claim(admin, &first).is_none(), "it waits for the answers");
    assert_eq!(asked(&w), [here, both, zeroes, discards]);
    w.hold_mail = false;
    w.deliver();
    assert_eq!(w.next(admin).unwrap().completion().status, 0);
    // A connection that was kept out is not asked the next time. One that carries a stream is
    // asked.
    assert_eq!(w.call(reader, peer::write(6, 1, 0, 1), &block(2)).status, GUARDED);
    assert_eq!(w.bind(mine, 0, 1, 0).status, 0);
    w.hang_up(here);
    w.hold_mail = true;
    let again = Claim { generation: 2, create: false, ..first };
    assert!(w.claim(admin, &again).is_none());
    assert_eq!(asked(&w), [both, zeroes, discards, mine]);
    w.hold_mail = false;
    w.deliver();
    assert_eq!(w.next(admin).unwrap().completion().status, 0);
}

/// R2Ts that have come for a connection: the slots that they name, and the command ids.
fn asked_for(w: &mut World, at: usize) -> Vec<(u16, u16)> {
    let mut asked = Vec::new();
    while let Some(pdu) = w.next(at) {
        assert_eq!(pdu.kind, 0x09, "{pdu:?}");
        asked.push((pdu.u16(8), pdu.u16(10)));
    }
    asked
}

/// The data of the largest write that is not in pieces.
fn send_data(w: &mut World, at: usize, cid: u16, tag: u16) {
    const PIECE: usize = 128 * 1024;
    let data = vec![7; CONNECTION_BYTES];
    let last = data.len() / PIECE - 1;
    for (i, piece) in data.chunks(PIECE).enumerate() {
        let offset = (i * PIECE) as u32;
        let digests = peer::Digests::default();
        w.send(at, &peer::h2c_data(digests, cid, tag, offset, piece, i == last));
    }
}

/// All connections together hold what the budget reserves for them and one command each. A
/// connection that waits goes on when one of its own commands ends, though another keeps the whole
/// budget.
#[test]
fn t28_connections_share_one_budget_and_none_is_starved() {
    const BLOCKS: u32 = (CONNECTION_BYTES / 4096) as u32;
    let mut w = World::new(&[false]);
    w.host.shared.set_memory(4 << 20);
    let (_, cntlid) = w.admin();
    let queues = [w.io(cntlid, 1), w.io(cntlid, 2), w.io(cntlid, 3), w.io(cntlid, 4)];
    let mut held = Vec::new();
    for &queue in &queues {
        for cid in 1..=8 {
            w.command(queue, peer::write_r2t(cid, 1, 0, BLOCKS), &[]);
        }
        held.push(asked_for(&mut w, queue));
    }
    let counts: Vec<usize> = held.iter().map(Vec::len).collect();
    assert_eq!(counts, [5, 1, 1, 1], "four are reserved, and each connection has one of its own");
    // The first never sends the requested data; the last does, eight times.
    let mut open = held[3].clone();
    let mut done = 0;
    while let Some((cid, tag)) = open.pop() {
        send_data(&mut w, queues[3], cid, tag);
        while let Some(pdu) = w.next(queues[3]) {
            if pdu.kind == 0x09 {
                open.push((pdu.u16(8), pdu.u16(10)));
            } else {
                assert_eq!(pdu.completion().status, 0);
                done += 1;
            }
        }
    }
    assert_eq!(done, 8);
    // The memory that the first has reserved is free for others when it is gone.
    w.hang_up(queues[0]);
    let (cid, tag) = held[1][0];
    send_data(&mut w, queues[1], cid, tag);
    let kinds: Vec<u8> = std::iter::from_fn(|| w.next(queues[1])).map(|pdu| pdu.kind).collect();
    assert_eq!(kinds.iter().filter(|kind| **kind == 0x05).count(), 1);
    assert_eq!(kinds.iter().filter(|kind| **kind == 0x09).count(), 5);
}

/// Answers that no host takes count, too, whether their commands come one by one or together.
#[test]
fn t28_answers_that_are_not_taken_share_the_budget() {
    for together in [1, 600] {
        answers_share_the_budget(together);
    }
}

fn answers_share_the_budget(together: usize) {
    let mut w = World::new(&[false]);
    w.host.shared.set_memory(2 << 20);
    let hosts: Vec<usize> = (0..4).map(|_| w.admin().0).collect();
    let command = peer::capsule(peer::Digests::default(), &peer::identify(1, 1, 0).0, &[]);
    for &host in &hosts {
        w.links[host].reading = false;
        for _ in 0..600 / together {
            w.send(host, &command.repeat(together));
        }
    }
    let unsent: Vec<usize> = hosts.iter().map(|host| w.links[*host].out.len_bytes()).collect();
    let most = 4 * CONNECTION_BYTES + (2 << 20) + 4 * 8192;
    assert!(unsent.iter().sum::<usize>() <= most, "{unsent:?}");
    assert!(unsent.iter().all(|bytes| *bytes >= CONNECTION_BYTES), "{unsent:?}");
    for &host in &hosts {
        w.resume_reading(host);
        for _ in 0..20 {
            w.send(host, &[]);
        }
        let pdus = std::iter::from_fn(|| w.next(host));
        assert_eq!(pdus.filter(|pdu| pdu.kind == 0x05).count(), 600, "all are answered in the end");
    }
}

/// Queues whose commands could bring more in their capsules than there is space for are refused.
#[test]
fn t28_space_for_capsules_is_set_aside_at_connect() {
    const BUSY: u16 = 0x181;
    let mut w = World::new(&[false]);
    // Four times that for capsules: two queues of 128 entries.
    w.host.shared.set_memory(2 << 20);
    let (_, cntlid) = w.admin();
    let first = w.io(cntlid, 1);
    let _second = w.io(cntlid, 2);
    let data = peer::connect_data(world::SUBNQN, peer::HOSTNQN, peer::HOSTID, cntlid);
    let third = w.initialize(peer::Digests::default(), 0);
    let refused = w.call(third, peer::connect(0, 3, 127, 0), &data);
    assert_eq!((refused.status, refused.dnr), (BUSY, false), "it may try again");
    w.hang_up(first);
    let third = w.initialize(peer::Digests::default(), 0);
    assert_eq!(w.call(third, peer::connect(0, 3, 127, 0), &data).status, 0);
}

/// A peer whose Connect is refused again and again does not keep its connection.
#[test]
fn t28_refused_connects_do_not_keep_a_connection_open() {
    let mut w = World::new(&[false]);
    let at = w.initialize(peer::Digests::default(), 0);
    let accepted = w.host.now;
    let data = peer::connect_data("nqn.2026-01.example:other", peer::HOSTNQN, peer::HOSTID, 0xffff);
    let mut refused = 0;
    while w.links[at].closed.is_none() {
        assert!(w.host.now - accepted <= CONNECT_NS, "it is still open");
        assert_ne!(w.call(at, peer::connect(0, 0, 31, 0), &data).status, 0);
        refused += 1;
        w.host.now += STALL_NS / 2;
        w.tick();
    }
    assert_eq!(refused, 6, "it is closed when the time is over, and not before");
}
