//! The ownership of a volume: claims, take-over, fencing, and other hosts that write.

mod world;

use peer::{Digests, HOSTID, HOSTNQN};
use riopipe_nvme::command::Sqe;
use riopipe_order::attribute::{Seq, VolumeId};
use riopipe_order::log_region::{HEADER_BYTES, LogRegion, MEMBERS_MAX};
use riopipe_session::target::limits::{H2C_DATA_BYTES_MAX, TRANSFER_BUDGET};
use riopipe_session::target::{Closed, Volumes};
use riopipe_session::wire::{self, ORDERED_BYTES_MAX};
use riopipe_testkit::peer;
use world::recovery::{RIVAL, RIVAL_ID};
use world::{
    BOOT, LOG_LEN, Owner, VOLUME, What, World, attribute, block, crc, identity, ordered, pattern,
    riopipe_bytes,
};

/// Command Aborted due to SQ Deletion (Base, figure "Generic Command Status Values").
const QUEUE_DELETED: u16 = 0x008;
const OTHER: VolumeId = VolumeId([8; 16]);

#[test]
fn a_volume_is_claimed_described_released_and_forgotten() {
    let mut w = World::new(&[false, false]);
    let (admin, cntlid) = w.admin();
    assert!(!w.status(admin).known);
    let claim = w.next_claim(1);
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0x70c, "not without creating it");
    let claim = w.first_claim();
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    let s = w.status(admin);
    assert!(s.known && s.owned && s.own && !s.unrecovered && !s.unlogged);
    assert!(!s.log_lost && !s.damaged);
    assert_eq!((s.generation, s.streams, s.slots, &s.owner[..]), (1, 2, 64, HOSTNQN));
    let volumes = w.host.shared.volumes();
    assert_eq!(volumes.owner(VOLUME).map(|o| (o.cntlid, &o.hostnqn[..])), Some((cntlid, HOSTNQN)));
    assert_eq!(volumes.live_entries(VOLUME), Some(0));
    assert_eq!((volumes.owner(OTHER), volumes.live_entries(OTHER)), (None, None));
    let again = wire::Claim { generation: 2, ..w.first_claim() };
    assert_eq!(w.claim(admin, &again).unwrap().status, 0x70d, "it exists");
    let io = w.io(cntlid, 1);
    let bound = w.bind(io, 1, 1, 5);
    assert_eq!((bound.status, bound.result), (0, 64 | 1 << 32), "slots, incarnation");
    assert_eq!(w.bind(io, 0, 1, 0).status, 0x709, "one stream per queue");
    let other = w.io(cntlid, 2);
    assert_eq!(w.bind(other, 1, 1, 0).status, 0x709, "one queue per stream");
    assert_eq!(w.bind(other, 2, 1, 0).status, 0x70e, "two streams");
    assert_eq!(w.bind(other, 0, 2, 0).status, 0x702, "another generation");
    assert_eq!(w.release(admin, false), 0);
    let s = w.status(admin);
    assert!(s.known && !s.owned && !s.unrecovered);
    assert_eq!(s.released, [Seq(0), Seq(5)]);
    assert_eq!(w.bind(other, 0, 1, 0).status, 0x703, "no volume's");
    let claim = w.next_claim(2);
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    assert_eq!(w.release(admin, true), 0);
    assert!(!w.status(admin).known);
    assert_eq!(w.release(admin, true), 0x70c);
}

#[test]
fn claims_that_make_no_sense_are_refused() {
    let mut w = World::new(&[false]);
    let (admin, _) = w.admin();
    let good = w.first_claim();
    let with = |change: fn(&mut wire::Claim)| {
        let mut claim = good.clone();
        change(&mut claim);
        claim
    };
    let mut refused = |change| {
        let done = w.claim(admin, &with(change)).unwrap();
        (done.status, done.result)
    };
    assert_eq!(refused(|c| c.members = wire::in_order([2])).0, 0x0b);
    assert_eq!(refused(|c| c.members = wire::in_order([1, 1])).0, 0x02);
    assert_eq!(refused(|c| c.members = wire::in_order(1..100)).0, 0x02);
    assert_eq!(refused(|c| c.slots = 1).0, 0x02);
    assert_eq!(refused(|c| c.generation = 0).0, 0x702);
    let (status, result) = refused(|c| c.slots = 1 << 17);
    assert_eq!(status, 0x70b, "the log is too small");
    assert!(result as u32 >= 2 * (8 << 20), "{result:#x}");
    let have = (result >> 32) as usize;
    assert!(have > LOG_LEN / 2 && have < LOG_LEN, "{have}");
    let (status, result) = refused(|c| (c.slots, c.streams) = (0, 1000));
    assert_eq!((status, result as u32), (0x70b, 1000 * 4096));
    let nonsense = riopipe_bytes(&wire::claim_command()).cid(9).inline(4096);
    assert_eq!(w.call(admin, nonsense, &[0xff; 4096]).status, 0x02);
    assert_eq!(w.call(admin, nonsense.inline(64), &[0; 64]).status, 0x0f);
    // The refused claims have left nothing behind; the target may choose the slots.
    let claim = with(|c| c.slots = 0);
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    let slots = status_slots(&mut w, admin);
    assert!(slots > 1000, "{slots}");
}

fn status_slots(w: &mut World, admin: usize) -> u32 {
    w.status(admin).slots
}

#[test]
fn t20_a_volume_keeps_its_streams_and_its_members() {
    let mut w = World::new(&[false; MEMBERS_MAX + 1]);
    let (admin, _) = w.admin();
    let mut claim = w.first_claim();
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0x02, "more than a log has space for");
    claim.members.pop();
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    let again = wire::Claim { create: false, generation: 2, ..claim };
    for resume in [false, true] {
        let generation = if resume { 1 } else { 2 };
        let claim = wire::Claim { resume, generation, ..again.clone() };
        let streams = wire::Claim { streams: 3, ..claim.clone() };
        let members = wire::Claim { members: claim.members[1..].to_vec(), ..claim.clone() };
        let mut other = claim.clone();
        other.members[0].nsid = MEMBERS_MAX as u32 + 1;
        for wrong in [streams, members, other] {
            assert_eq!(w.claim(admin, &wrong).unwrap().status, 0x02, "{wrong:?}");
        }
    }
    assert_eq!(w.claim(admin, &again).unwrap().status, 0);
}

#[test]
fn a_volume_that_has_done_without_a_log_gets_one_where_it_is_asked_for() {
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin();
    let claim = wire::Claim { unlogged: true, create: false, ..w.first_claim() };
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    let io = w.io(cntlid, 1);
    assert_eq!(w.bind(io, 0, 1, 0).status, 0x706);
    let logged = w.next_claim(2);
    assert_eq!(w.claim(admin, &logged).unwrap().status, 0x706, "not behind its owner's back");
    let claim = wire::Claim { generation: 2, ..w.first_claim() };
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    assert_eq!(w.bind(io, 0, 2, 0).status, 0);
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    assert_eq!(w.scan(0, 0).entries.len(), 1);
}

#[test]
fn a_volume_leaves_space_in_the_log_for_another() {
    let mut w = World::new(&[false, false]);
    let (admin, _) = w.admin();
    let claim = |volume, nsid, w: &World| wire::Claim {
        volume,
        slots: 0,
        members: wire::in_order([nsid]),
        ..w.first_claim()
    };
    let first = claim(VOLUME, 1, &w);
    assert_eq!(w.claim(admin, &first).unwrap().status, 0);
    let second = claim(OTHER, 2, &w);
    assert_eq!(w.claim(admin, &second).unwrap().status, 0);
}

#[test]
fn a_claim_may_bring_its_data_on_request() {
    let mut w = World::new(&[false]);
    let (admin, _) = w.admin();
    let claim = w.first_claim().encode();
    w.command(admin, riopipe_bytes(&wire::claim_command()).cid(9).transport(4096), &[]);
    let r2t = w.next(admin).unwrap();
    assert_eq!((r2t.kind, r2t.u32(16)), (0x09, 4096));
    w.send(admin, &peer::h2c_data(Digests::default(), 9, r2t.u16(10), 0, &claim, true));
    assert_eq!(w.next(admin).unwrap().completion().status, 0);
}

#[test]
fn t8_a_second_owner_is_refused_while_the_first_lives() {
    let mut w = World::new(&[false]);
    let Owner { admin, .. } = w.owner();
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let claim = w.next_claim(2);
    assert_eq!(w.claim(rival, &claim).unwrap().status, 0x701);
    assert_eq!(w.release(rival, true), 0x703);
    let s = w.status(rival);
    assert!(s.owned && !s.own);
    assert_eq!(s.owner, HOSTNQN);
    w.hang_up(admin);
    assert_eq!(w.claim(rival, &claim).unwrap().status, 0, "once it is gone");
}

#[test]
fn t8_a_take_over_needs_a_higher_generation_and_fences_the_old_owner() {
    let mut w = World::new(&[false]);
    let Owner { admin, io, cntlid } = w.owner();
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    let (rival, rival_id) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let take = |generation| wire::Claim {
        take_over: true,
        generation,
        ..World::new(&[false]).next_claim(0)
    };
    assert_eq!(w.claim(rival, &take(1)).unwrap().status, 0x702);
    assert_eq!(w.claim(rival, &take(7)).unwrap().status, 0);
    // The old owner: nothing goes through any more, and it learns why.
    assert_eq!(w.call(io, ordered(2, &attribute(2, 2), 1), &block(2)).status, 0x702);
    assert_eq!(w.host.drives[0].block(2), vec![0; 4096]);
    assert_eq!(w.bind(io, 0, 1, 1).status, 0x702);
    assert_eq!(w.call(io, peer::write(3, 1, 9, 1), &block(3)).status, 0x70a, "nor plainly (T21)");
    assert_eq!(w.release(admin, false), 0x703);
    let back = w.next_claim(7);
    assert_eq!(w.claim(admin, &back).unwrap().status, 0x701);
    // The new owner finds the log as it was left.
    let s = w.status(rival);
    assert!(s.own && s.unrecovered);
    assert_eq!((s.generation, s.live_entries), (7, 1));
    let theirs = w.io_as(RIVAL, RIVAL_ID, rival_id, 1);
    assert_eq!(w.bind(theirs, 0, 7, 1).status, 0x704, "undoing comes with recovery");
    // And the old one back in the role of a rival.
    let back = wire::Claim { take_over: true, ..w.next_claim(8) };
    assert_eq!(w.claim(admin, &back).unwrap().status, 0);
    let _ = cntlid;
}

/// The next claim of the volume, which has no log here.
fn unlogged(w: &World, generation: u32) -> wire::Claim {
    wire::Claim { unlogged: true, slots: 0, ..w.next_claim(generation) }
}

#[test]
fn t8_without_a_log_the_association_of_a_fenced_owner_ends() {
    let mut w = World::new(&[false]);
    let (old, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    let first = unlogged(&w, 1);
    assert_eq!(w.claim(old, &first).unwrap().status, 0);
    assert_eq!(w.call(io, peer::write(1, 1, 3, 1), &block(1)).status, 0);
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let second = unlogged(&w, 2);
    assert_eq!(w.claim(rival, &second).unwrap().status, 0x701, "it is owned");
    w.host.drives[0].holds = true;
    w.command(io, peer::write(2, 1, 3, 1), &block(2));
    let take = wire::Claim { take_over: true, ..second };
    assert_eq!(w.claim(rival, &take), None, "a write is in flight");
    assert!([old, io].iter().all(|at| w.links[*at].closed.is_some()));
    w.complete(0, 0);
    assert_eq!(w.next(rival).unwrap().completion().status, 0);
    assert!([old, io].iter().all(|at| w.links[*at].conn.is_drained()));
    // Once the volume is released, any plain host may write. A fenced owner is none, and learns
    // that it was fenced.
    assert_eq!(w.release(rival, false), 0);
    let (again, _) = w.admin();
    let resume = wire::Claim { resume: true, ..unlogged(&w, 1) };
    assert_eq!(w.claim(again, &resume).unwrap().status, 0x702);
}

#[test]
fn t8_a_fenced_owner_is_no_plain_host_when_the_volume_is_released() {
    let mut w = World::new(&[false]);
    let Owner { io, cntlid, .. } = w.owner();
    let spare = w.io(cntlid, 2);
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let take = wire::Claim { take_over: true, ..w.next_claim(2) };
    assert_eq!(w.claim(rival, &take).unwrap().status, 0);
    assert_eq!(w.release(rival, false), 0);
    assert!(!w.status(rival).owned);
    // The blocks that its recovery was about to zero, and those that an engine without a log would
    // write.
    let late = w.io(cntlid, 3);
    for at in [io, spare, late] {
        assert_eq!(w.call(at, peer::write(3, 1, 9, 1), &block(3)).status, 0x70a);
        let zero = riopipe_bytes(&Sqe::write_zeroes(1, 9, 1, false)).cid(4);
        assert_eq!(w.call(at, zero, &[]).status, 0x70a);
    }
    let (_, plain) = w.admin_as("nqn.2014-08.org.nvmexpress:uuid:plain", [9; 16], 0);
    let plain = w.io_as("nqn.2014-08.org.nvmexpress:uuid:plain", [9; 16], plain, 1);
    assert_eq!(w.call(plain, peer::write(3, 1, 9, 1), &block(4)).status, 0);
    assert_eq!(w.host.drives[0].block(9), block(4));
    // As an owner it is welcome again.
    let (again, cntlid) = w.admin();
    let claim = w.next_claim(3);
    assert_eq!(w.claim(again, &claim).unwrap().status, 0);
    let io = w.io(cntlid, 1);
    assert_eq!(w.call(io, peer::write(3, 1, 9, 1), &block(5)).status, 0);
}

/// A claim of one namespace, for a volume that is new here.
fn claim_of(w: &World, volume: VolumeId, nsid: u32) -> wire::Claim {
    wire::Claim { volume, members: wire::in_order([nsid]), ..w.first_claim() }
}

/// The owner of [`VOLUME`] on the first drive has bound its stream on the connection returned, and
/// has also written plainly to the second drive there.
fn stream_beside_a_plain_write(w: &mut World) -> usize {
    let (admin, cntlid) = w.admin();
    let claim = claim_of(w, VOLUME, 1);
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    let io = w.io(cntlid, 1);
    assert_eq!(w.bind(io, 0, 1, 0).status, 0);
    assert_eq!(w.call(io, peer::write(1, 2, 9, 1), &block(1)).status, 0);
    io
}

#[test]
fn t8_an_owner_that_is_fenced_from_one_volume_keeps_the_other() {
    let mut w = World::new(&[false, false]);
    let (admin, cntlid) = w.admin();
    for (volume, nsid) in [(VOLUME, 1), (OTHER, 2)] {
        let claim = claim_of(&w, volume, nsid);
        assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    }
    let io = w.io(cntlid, 1);
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let take = claim_of(&w, VOLUME, 1);
    let take = wire::Claim { create: false, take_over: true, generation: 2, ..take };
    assert_eq!(w.claim(rival, &take).unwrap().status, 0);
    let late = w.io(cntlid, 2);
    for at in [io, late] {
        assert_eq!(w.call(at, peer::write(3, 1, 9, 1), &block(3)).status, 0x70a);
        assert_eq!(w.call(at, peer::read(4, 1, 9, 1), &[]).status, 0x702);
        assert_eq!(w.call(at, peer::write(5, 2, 9, 1), &block(5)).status, 0, "it owns this one");
        let (data, done) = w.fetch(at, peer::read(6, 2, 9, 1));
        assert_eq!((data, done.status), (block(5), 0));
    }
}

/// The claim of another volume asks the connection, because it has written there.
#[test]
fn the_claim_of_another_volume_ends_no_stream() {
    let mut w = World::new(&[false, false]);
    let io = stream_beside_a_plain_write(&mut w);
    w.host.drives[0].holds = true;
    w.command(io, ordered(2, &attribute(1, 1), 0), &block(2));
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let claim = claim_of(&w, OTHER, 2);
    assert_eq!(w.claim(rival, &claim), None, "it waits for all that is in flight");
    w.complete(0, 0);
    assert_eq!(w.next(rival).unwrap().completion().status, 0);
    assert_eq!(w.next(io).unwrap().completion().status, 0);
    w.host.drives[0].holds = false;
    assert_eq!(w.call(io, ordered(3, &attribute(2, 2), 0), &block(3)).status, 0);
}

/// The connection acknowledges the fence of another volume while its own stream has ended and a
/// write of that stream is still out.
#[test]
fn t8_the_end_of_an_earlier_fence_returns_no_stream_with_a_write_in_flight() {
    let mut w = World::new(&[false, false]);
    let io = stream_beside_a_plain_write(&mut w);
    for drive in &mut w.host.drives {
        drive.holds = true;
    }
    w.command(io, peer::read(2, 2, 9, 1), &[]);
    let [first, second] = [(); 2].map(|()| w.admin_as(RIVAL, RIVAL_ID, 0).0);
    let other = claim_of(&w, OTHER, 2);
    assert_eq!(w.claim(first, &other), None, "the read is in flight");
    w.command(io, ordered(3, &attribute(1, 1), 0), &block(3));
    let claim = claim_of(&w, VOLUME, 1);
    let take = wire::Claim { create: false, take_over: true, generation: 2, ..claim };
    assert_eq!(w.claim(second, &take), None, "the write is in flight");
    w.complete(1, 0);
    assert_eq!(w.next(first).unwrap().completion().status, 0);
    assert_eq!(w.next(second), None, "the write is still in flight");
    w.complete(0, 0);
    assert_eq!(w.next(second).unwrap().completion().status, 0);
    assert_eq!(w.list(second, 0).unwrap().live, 1);
}

#[test]
fn a_request_keeps_the_status_with_which_its_stream_has_refused_it() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 0), 0), &block(1));
    let large = riopipe_order::attribute::Attribute { blocks: 20, ..attribute(2, 0) };
    w.command(io, ordered(2, &large, 0).transport(20 * 4096), &[]);
    let ttag = w.next(io).unwrap().u16(10);
    w.fail(0, 0);
    assert_eq!(w.next(io).unwrap().completion().status, 0x280);
    // The new owner comes while the data of the refused write is in transit.
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let take = wire::Claim { take_over: true, ..w.next_claim(2) };
    assert_eq!(w.claim(rival, &take).unwrap().status, 0);
    w.send(io, &peer::h2c_data(Digests::default(), 2, ttag, 0, &pattern(1, 20), true));
    assert_eq!(w.next(io).unwrap().completion().status, 0x707, "the write before it has failed");
}

#[test]
fn t8_a_lost_owners_queue_begins_nothing_when_the_volume_is_released() {
    let mut w = World::new(&[false]);
    let (old, cntlid) = w.admin();
    // It has not written yet, so no claim asks it (T28).
    let io = w.io(cntlid, 1);
    let first = unlogged(&w, 1);
    assert_eq!(w.claim(old, &first).unwrap().status, 0);
    // The owner dies. Its other connection is on a core that is busy: it has not seen its notice.
    w.hold_mail = true;
    w.hang_up(old);
    w.host.notices.clear();
    w.hold_mail = false;
    let (rival, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let second = unlogged(&w, 2);
    assert_eq!(w.claim(rival, &second).unwrap().status, 0, "it has no lease");
    let theirs = w.io_as(RIVAL, RIVAL_ID, cntlid, 1);
    assert_eq!(w.call(theirs, peer::write(1, 1, 9, 1), &block(2)).status, 0);
    assert_eq!(w.release(rival, false), 0);
    // The last command of the dead owner is in that connection's socket.
    w.command(io, peer::write(3, 1, 9, 1), &block(1));
    assert_eq!(w.host.drives[0].block(9), block(2), "a late write of the old owner");
    assert_eq!(w.next(io).unwrap().completion().status, QUEUE_DELETED);
}

/// The admin connection of an owner is lost, and another queue of it has not seen its notice.
#[test]
fn t8_a_queue_of_a_lost_owner_begins_no_write() {
    let mut w = World::new(&[false]);
    let Owner { admin, cntlid, .. } = w.owner();
    let queue = w.io(cntlid, 2);
    w.hold_mail = true;
    w.hang_up(admin);
    assert_eq!(w.call(queue, peer::write(3, 1, 9, 1), &block(3)).status, QUEUE_DELETED);
    assert_eq!(w.host.drives[0].history, []);
}

/// An owner of two volumes loses one to a take-over that ends its association. Its queues end one
/// after the other, and the admin queue is the last one.
#[test]
fn t8_the_end_of_an_association_begins_the_leases_of_all_its_volumes() {
    let parts = world::Parts::default();
    let mut w = World::over(&[false, false], identity(), parts, Volumes::without_log(crc));
    let (old, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    let of = |w: &World, volume, nsid, generation| wire::Claim {
        volume,
        members: wire::in_order([nsid]),
        ..unlogged(w, generation)
    };
    for (volume, nsid) in [(VOLUME, 1), (OTHER, 2)] {
        let first = of(&w, volume, nsid, 1);
        assert_eq!(w.claim(old, &first).unwrap().status, 0);
    }
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let take = wire::Claim { take_over: true, ..of(&w, VOLUME, 1, 2) };
    assert_eq!(w.claim(rival, &take).unwrap().status, 0);
    assert!([old, io].iter().all(|at| w.links[*at].conn.is_drained()));
    assert_eq!(w.host.shared.volumes().owner(OTHER), None);
    assert!(!w.status_of(rival, OTHER).owned, "it had no lease");
    let next = of(&w, OTHER, 2, 2);
    assert_eq!(w.claim(rival, &next).unwrap().status, 0);
}

/// An owner has a queue without a stream, for reads. No fence waits for a read there. The owner's
/// admin connection breaks, and that queue is on a core that is busy: it has not seen its notice.
#[test]
fn t8_an_owner_that_is_fenced_and_lost_reads_nothing_of_the_next() {
    for (in_flight, lost_first) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut w = World::new(&[false]);
        let Owner { admin, cntlid, .. } = w.owner();
        let reader = w.io(cntlid, 2);
        let read = peer::read(3, 1, 9, 1);
        if in_flight {
            w.host.drives[0].holds = true;
            w.command(reader, read, &[]);
        }
        let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
        let take = wire::Claim { take_over: true, ..w.next_claim(2) };
        for lost in [lost_first, !lost_first] {
            if lost {
                w.hold_mail = true;
                w.hang_up(admin);
                w.host.notices.clear();
                w.hold_mail = false;
            } else {
                assert_eq!(w.claim(rival, &take).unwrap().status, 0);
            }
        }
        match in_flight {
            true => w.complete(0, 0),
            false => w.command(reader, read, &[]),
        }
        let answer = w.next(reader).unwrap().completion();
        let case = (in_flight, lost_first);
        assert_eq!((answer.status, answer.dnr), (QUEUE_DELETED, false), "{case:?}");
    }
}

#[test]
fn t21_a_plain_host_that_is_lost_does_not_learn_that_a_drive_has_an_owner() {
    const PLAIN: &str = "nqn.2014-08.org.nvmexpress:uuid:plain";
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin_as(PLAIN, [9; 16], 0);
    let io = w.io_as(PLAIN, [9; 16], cntlid, 1);
    assert_eq!(w.call(io, peer::write(1, 1, 9, 1), &block(1)).status, 0);
    // Its admin connection breaks; the other one's core is busy.
    w.hold_mail = true;
    w.hang_up(admin);
    w.host.notices.clear();
    w.hold_mail = false;
    w.command(io, peer::write(2, 1, 9, 1), &block(2));
    // It may send the write again, on a new connection.
    let answer = w.next(io).unwrap().completion();
    assert_eq!((answer.status, answer.dnr), (QUEUE_DELETED, false));
    assert_eq!(w.host.drives[0].block(9), block(1));
}

#[test]
fn t8_a_take_over_is_answered_only_when_all_old_writes_have_come_back() {
    let mut w = World::new(&[false, false]);
    let Owner { io, cntlid, .. } = w.owner();
    let second = w.io(cntlid, 2);
    assert_eq!(w.bind(second, 1, 1, 0).status, 0);
    for drive in &mut w.host.drives {
        drive.holds = true;
    }
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    w.command(second, ordered(1, &attribute(1, 2), 0), &block(1));
    // A plain write of the owner, and one that waits for its predecessor.
    w.command(second, peer::write(2, 2, 5, 1), &block(2));
    w.command(io, ordered(2, &attribute(2, 1), 0), &block(3));
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let take = wire::Claim { take_over: true, ..w.next_claim(2) };
    assert_eq!(w.claim(rival, &take), None, "three writes are still in flight");
    // The generation is durable already: no list may be read before.
    let header = w.host.parts.crash(5).part(0..HEADER_BYTES);
    let region = LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap();
    assert_eq!(region.volume(VOLUME).unwrap().generation, 2);
    w.complete(0, 0);
    w.complete(1, 0);
    assert_eq!(w.next(rival), None, "one is left");
    w.complete(0, 0);
    assert_eq!(w.next(rival).unwrap().completion().status, 0);
    assert!(w.host.drives[0].pending.is_empty(), "what was held never went out");
    let held: Vec<_> = w.completions(io).iter().map(|c| (c.cid, c.status)).collect();
    assert_eq!(held, [(2, 0x702), (1, 0x702)]);
}

#[test]
fn t8_a_fenced_stream_is_closed_to_its_old_owner_while_its_last_write_is_out() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let take = wire::Claim { take_over: true, ..w.next_claim(2) };
    assert_eq!(w.claim(rival, &take), None);
    assert_eq!(w.own_list(io), Err(0x702));
    for durable in [false, true] {
        let mark = riopipe_bytes(&wire::mark_command(Seq(1), durable)).cid(5);
        assert_eq!(
            w.call(io, mark, &[]).status,
            0x702,
            "what it calls released is for the new one"
        );
    }
    w.complete(0, 0);
    assert_eq!(w.next(rival).unwrap().completion().status, 0);
    assert_eq!(w.list(rival, 0).unwrap().live, 1);
}

#[test]
fn t8_data_that_arrives_after_the_take_over_goes_nowhere() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    let large = riopipe_order::attribute::Attribute { blocks: 20, ..attribute(1, 0) };
    w.command(io, ordered(1, &large, 0).transport(20 * 4096), &[]);
    let ttag = w.next(io).unwrap().u16(10);
    w.command(io, peer::write_r2t(2, 1, 40, 20), &[]);
    let plain = w.next(io).unwrap().u16(10);
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let take = wire::Claim { take_over: true, ..w.next_claim(2) };
    assert_eq!(w.claim(rival, &take).unwrap().status, 0);
    w.send(io, &peer::h2c_data(Digests::default(), 1, ttag, 0, &pattern(1, 20), true));
    w.send(io, &peer::h2c_data(Digests::default(), 2, plain, 0, &pattern(1, 20), true));
    let statuses: Vec<u16> = w.completions(io).iter().map(|c| c.status).collect();
    assert_eq!(statuses, [0x702, 0x70a]);
    assert!(w.host.drives[0].history.is_empty(), "{:?}", w.host.drives[0].history.len());
}

#[test]
fn t8_late_data_of_a_fenced_stream_is_answered_though_another_is_bound() {
    let mut w = World::new(&[false]);
    let Owner { admin, io, .. } = w.owner();
    // Data is requested as far as the budget allows, and two commands wait for their turn. Of each
    // pair on the same blocks the first may go to the drive, the second waits at the gate.
    let (blocks, fitting) =
        (ORDERED_BYTES_MAX / 4096, TRANSFER_BUDGET / ORDERED_BYTES_MAX as usize);
    for n in 1..=fitting as u64 + 2 {
        let lba = n / 2 * u64::from(blocks);
        let large = riopipe_order::attribute::Attribute { blocks, ..attribute(n, lba) };
        w.command(io, ordered(n as u16, &large, 0).transport(ORDERED_BYTES_MAX), &[]);
    }
    let tags: Vec<u16> = std::iter::from_fn(|| w.next(io)).map(|pdu| pdu.u16(10)).collect();
    assert_eq!(tags.len(), fitting);
    assert_eq!(w.claim(admin, &w.next_claim(2)).unwrap().status, 0);
    // Requests that waited at the gate, and whose data had not been requested.
    let mut answers = w.completions(io);
    assert_eq!(w.settle(admin, 2, &[(0, 0, false), (1, 0, false)]), 0);
    assert_eq!(w.bind(io, 0, 2, 0).status, 0, "the same connection, the new generation");
    let data = pattern(1, blocks as usize);
    for (cid, ttag) in (1..).zip(tags) {
        for (i, piece) in data.chunks(H2C_DATA_BYTES_MAX as usize).enumerate() {
            let offset = i as u32 * H2C_DATA_BYTES_MAX;
            let last = offset + H2C_DATA_BYTES_MAX == ORDERED_BYTES_MAX;
            w.send(io, &peer::h2c_data(Digests::default(), cid, ttag, offset, piece, last));
        }
    }
    answers.extend(w.completions(io));
    let mut answers: Vec<_> = answers.iter().map(|c| (c.cid, c.status)).collect();
    answers.sort();
    let all: Vec<_> = (1..=fitting as u16 + 2).map(|cid| (cid, 0x702)).collect();
    assert_eq!(answers, all);
    // The new stream is not touched, and nothing reached the drive.
    assert!(w.host.drives[0].history.is_empty());
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    assert_eq!(w.host.drives[0].history, [(1, What::Write(block(1)))]);
}

#[test]
fn t8_not_even_a_failed_streams_late_data_goes_anywhere() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    let large = riopipe_order::attribute::Attribute { blocks: 20, ..attribute(1, 0) };
    w.command(io, ordered(1, &large, 0).transport(20 * 4096), &[]);
    let ttag = w.next(io).unwrap().u16(10);
    w.command(io, ordered(2, &attribute(2, 40), 0), &block(2));
    w.command(io, ordered(3, &attribute(3, 50), 0), &block(3));
    // The third fails: the first, which came before it, still may complete.
    w.fail(0, 1);
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let take = wire::Claim { take_over: true, ..w.next_claim(2) };
    assert_eq!(w.claim(rival, &take), None, "the second is in flight");
    // But not for this owner any more.
    w.send(io, &peer::h2c_data(Digests::default(), 1, ttag, 0, &pattern(1, 20), true));
    assert_eq!(w.host.drives[0].pending.len(), 1);
    w.complete(0, 0);
    assert_eq!(w.next(rival).unwrap().completion().status, 0);
    assert_eq!(w.completions(io).len(), 3);
    assert_eq!(w.host.drives[0].block(0), vec![0; 4096]);
}

#[test]
fn t8_the_claim_of_a_dead_owner_is_free_when_its_writes_have_come_back() {
    let mut w = World::new(&[false]);
    let Owner { admin, io, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    // The process is killed: both sockets die.
    w.hang_up(admin);
    assert_eq!(w.links[io].closed, Some(Closed::Ended("its association has ended")));
    assert!(!w.links[io].conn.is_drained());
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    assert!(!w.status(rival).owned, "it asked for no lease");
    // A dead owner needs no take-over, but the claim must wait: its write is still in flight.
    let claim = w.next_claim(2);
    assert_eq!(w.claim(rival, &claim), None);
    w.complete(0, 0);
    assert_eq!(w.next(rival).unwrap().completion().status, 0);
    assert!(w.links[io].conn.is_drained());
    assert!(w.status(rival).own);
}

#[test]
fn t8_a_stream_whose_connection_died_is_busy_until_its_writes_are_back() {
    let mut w = World::new(&[false]);
    let Owner { io, cntlid, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    w.hang_up(io);
    let again = w.io(cntlid, 2);
    assert_eq!(w.bind(again, 0, 1, 0).status, 0x709, "a late write may still land");
    w.complete(0, 0);
    assert_eq!(w.bind(again, 0, 1, 0).status, 0x704, "and then it is to be recovered");
}

#[test]
fn t21_plain_hosts_are_kept_off_owned_members() {
    let mut w = World::new(&[false, false]);
    let (plain_admin, plain_id) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let plain = w.io_as(RIVAL, RIVAL_ID, plain_id, 1);
    assert_eq!(w.call(plain, peer::write(1, 1, 0, 1), &block(1)).status, 0);
    let (admin, cntlid) = w.admin();
    let claim = wire::Claim { members: wire::in_order([1]), ..w.first_claim() };
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    let dsm = peer::Sqe::new(0x09, 5, 1).inline(16).dword(11, 4);
    for (sqe, data) in [
        (peer::write(1, 1, 0, 1), block(2)),
        (peer::write_zeroes(1, 1, 0, 1, false), vec![]),
        (dsm, vec![0; 16]),
    ] {
        let done = w.call(plain, sqe, &data);
        assert_eq!((done.status, done.dnr), (0x70a, true));
    }
    assert_eq!(w.host.drives[0].block(0), block(1));
    assert_eq!(w.fetch(plain, peer::read(1, 1, 0, 1)).1.status, 0, "reading affects no other");
    assert_eq!(w.call(plain, peer::flush(1, 1), &[]).status, 0);
    assert_eq!(w.call(plain, peer::write(1, 2, 0, 1), &block(2)).status, 0, "no member");
    let own = w.io(cntlid, 1);
    assert_eq!(w.call(own, peer::write(1, 1, 0, 1), &block(3)).status, 0, "labels are the owner's");
    // Another volume over the same drive.
    let other = wire::Claim { volume: OTHER, ..claim.clone() };
    assert_eq!(w.claim(plain_admin, &other).unwrap().status, 0x70a);
    assert_eq!(w.release(admin, false), 0);
    assert_eq!(w.call(plain, peer::write(1, 1, 0, 1), &block(4)).status, 0, "after the release");
}

#[test]
fn t21_a_claim_waits_for_plain_writes_in_flight() {
    let mut w = World::new(&[false]);
    let (_, plain_id) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let plain = w.io_as(RIVAL, RIVAL_ID, plain_id, 1);
    w.host.drives[0].holds = true;
    w.command(plain, peer::write(1, 1, 0, 1), &block(1));
    let (admin, _) = w.admin();
    let claim = w.first_claim();
    assert_eq!(w.claim(admin, &claim), None, "it could land over the owner's data");
    w.complete(0, 0);
    assert_eq!(w.next(admin).unwrap().completion().status, 0);
    assert_eq!(w.next(plain).unwrap().completion().status, 0);
}

#[test]
fn volumes_without_a_log_are_owned_all_the_same() {
    let mut w =
        World::over(&[false], identity(), world::Parts::default(), Volumes::without_log(crc));
    let (admin, cntlid) = w.admin();
    let (id, _) = w.fetch(admin, peer::identify(1, 1, 0));
    assert_eq!((&id[3072..3080], id[3082]), (&b"RIOPIPE\x01"[..], 0), "no log");
    let claim = w.first_claim();
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0x706);
    let claim = wire::Claim { unlogged: true, create: false, ..claim };
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    let s = w.status(admin);
    assert!(s.known && s.own && s.unlogged);
    let io = w.io(cntlid, 1);
    assert_eq!(w.bind(io, 0, 1, 0).status, 0x706);
    let (rival, rival_id) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let theirs = w.io_as(RIVAL, RIVAL_ID, rival_id, 1);
    assert_eq!(w.call(theirs, peer::write(1, 1, 0, 1), &block(1)).status, 0x70a);
    let next = wire::Claim { generation: 2, ..claim };
    assert_eq!(w.claim(rival, &next).unwrap().status, 0x701);
    w.hang_up(admin);
    assert_eq!(w.claim(rival, &next).unwrap().status, 0);
    assert_eq!(w.call(theirs, peer::write(1, 1, 0, 1), &block(1)).status, 0);
}

#[test]
fn a_release_waits_for_the_owners_own_streams() {
    let mut w = World::new(&[false]);
    let Owner { admin, io, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    // And for no other host's.
    let (_, rival_id) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let theirs = w.io_as(RIVAL, RIVAL_ID, rival_id, 1);
    w.command(theirs, peer::read(1, 1, 0, 1), &[]);
    w.command(admin, riopipe_bytes(&wire::release_command(VOLUME, false)).cid(52), &[]);
    assert_eq!(w.next(admin), None);
    w.complete(0, 0);
    assert_eq!(w.next(admin).unwrap().completion().status, 0);
    let s = w.status(admin);
    assert!(!s.owned && s.unrecovered, "released with a group that was not released");
}

#[test]
fn an_owner_that_claims_again_starts_its_streams_anew() {
    let mut w = World::new(&[false]);
    let Owner { admin, io, .. } = w.owner();
    let claim = w.next_claim(2);
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0x702);
    assert_eq!(w.bind(io, 0, 2, 0).status, 0, "the same connection, the new generation");
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    assert_eq!(w.host.drives[0].history, [(1, What::Write(block(1)))]);
    let _ = HOSTID;
}

/// Partitions of a volume whose drives are gone can be freed in no other way: a claim needs them.
#[test]
fn t8_a_volume_without_an_owner_is_discarded_and_no_other() {
    let mut w = World::new(&[false, false]);
    let owner = w.owner();
    let (theirs, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let discard = |w: &mut World| {
        w.call(theirs, riopipe_bytes(&wire::discard_command(VOLUME)).cid(52), &[]).status & 0x7ff
    };
    let directory = |w: &mut World| {
        let sqe = riopipe_bytes(&wire::directory_command()).cid(53);
        let sqe = sqe.transport(wire::DIRECTORY_LEN as u32);
        let (page, done) = w.fetch(theirs, sqe);
        assert_eq!(done.status, 0);
        wire::LogDirectory::decode(&page).unwrap()
    };
    let before = directory(&mut w);
    let [volume] = &before.volumes[..] else { panic!("{before:?}") };
    assert_eq!((volume.id, volume.owned, volume.generation), (VOLUME, true, 1));
    assert_eq!((volume.streams, volume.slots, volume.members.len()), (2, 64, 2));
    assert_eq!(before.region_bytes, LOG_LEN as u64);
    assert_eq!(before.free_bytes, LOG_LEN as u64 - HEADER_BYTES as u64 - volume.bytes);
    assert_eq!(before.gap_bytes, before.free_bytes);
    assert_eq!(discard(&mut w), 0x701, "its owner is there");
    assert!(w.status(owner.admin).known);
    w.hang_up(owner.io);
    assert_eq!(w.release(owner.admin, false), 0);
    assert!(!directory(&mut w).volumes[0].owned);
    w.command(theirs, riopipe_bytes(&wire::release_command(VOLUME, true)).cid(54), &[]);
    assert_eq!(w.completions(theirs).last().unwrap().status & 0x7ff, 0x703, "unless it says so");
    assert_eq!(discard(&mut w), 0);
    let after = directory(&mut w);
    assert_eq!(
        (after.volumes.len(), after.free_bytes),
        (0, before.free_bytes + before.volumes[0].bytes)
    );
    assert_eq!(discard(&mut w), 0x70c);
}
