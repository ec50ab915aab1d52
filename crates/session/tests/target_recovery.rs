//! What recovery asks of a target: lists that can be trusted, undo under guard, a settlement that
//! lasts, and nothing for those who are not entitled to it.

mod peer;
mod world;

use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq, StreamId, VolumeId};
use riopipe_order::entry::Position;
use riopipe_order::log_region::{Class, HEADER_BYTES, LogRegion, MemberNamespace, inspect};
use riopipe_order::recovery::{InPlace, ListedEntry, StreamList, StreamPlan, decide};
use riopipe_order::region::Region;
use riopipe_session::target::Volumes;
use riopipe_session::wire::list::{PAGE_BYTES_MAX, Page, SETTLE_LEN, Settle, SettleStream};
use riopipe_session::wire::{self, Claim};
use world::{
    BOOT, LOG_LEN, Owner, VOLUME, World, attribute, block, crc, flush_entry, identity, ordered,
    riopipe_bytes,
};

const RIVAL: &str = "nqn.2014-08.org.nvmexpress:uuid:rival";
const RIVAL_ID: [u8; 16] = *b"scripted-host-02";
const THIRD: &str = "nqn.2014-08.org.nvmexpress:uuid:third";
const THIRD_ID: [u8; 16] = *b"scripted-host-03";

fn next_claim(w: &World, generation: u32) -> Claim {
    Claim { create: false, generation, ..w.first_claim() }
}

/// A new owner with this generation: its admin connection and an I/O queue.
fn successor(w: &mut World, generation: u32) -> (usize, usize) {
    let (admin, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let claim = next_claim(w, generation);
    assert_eq!(w.claim(admin, &claim).map(|c| c.status), Some(0));
    let io = w.io_as(RIVAL, RIVAL_ID, cntlid, 1);
    (admin, io)
}

fn in_place(seq: u64, lba: u64) -> Attribute {
    let mut a = attribute(seq, lba);
    a.flags = a.flags.with(Flags::IN_PLACE);
    a
}

fn plan(page: &Page) -> StreamPlan {
    assert!(!page.more);
    let list = StreamList {
        server: 0,
        released: page.released,
        tag: page.tag,
        settled: page.settled,
        entries: page.entries.clone(),
    };
    decide(page.stream, &[list], |_| Some(0)).unwrap()
}

fn seqs(page: &Page) -> Vec<u64> {
    page.entries.iter().map(|e| e.attribute.seq.0).collect()
}

/// Which groups the list calls durable.
fn durable(page: &Page) -> Vec<u64> {
    let durable = page.entries.iter().filter(|e| e.durable);
    durable.map(|e| e.attribute.seq.0).collect()
}

/// An owner that died with unreleased groups: 1 and 2 flushed, 3 and 4 not, in stream 0.
fn abandoned() -> World {
    let mut w = World::new(&[true]);
    let Owner { admin, io, .. } = w.owner();
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    let mut second = attribute(2, 2);
    second.flags = second.flags.with(Flags::FLUSH);
    second.tag = 77;
    assert_eq!(w.call(io, ordered(2, &second, 0), &block(2)).status, 0);
    assert_eq!(w.call(io, ordered(3, &attribute(3, 3), 0), &block(3)).status, 0);
    assert_eq!(w.call(io, ordered(4, &attribute(4, 4), 0), &block(4)).status, 0);
    w.hang_up(admin);
    w
}

#[test]
fn a_new_owner_lists_undoes_settles_and_starts() {
    let mut w = abandoned();
    let (admin, io) = successor(&mut w, 2);
    let s = w.status(admin);
    assert!(s.own && s.unrecovered && !s.kept);
    assert_eq!(s.live_entries, 4);
    assert_eq!(w.bind(io, 0, 2, 0).status, 0x704);
    assert_eq!(w.bind(io, 1, 2, 0).status, 0x704, "no stream before all are recovered (T20)");
    assert_eq!(w.bind_again(io, 0, 2, 0).status, 0x704, "another's work is not gone on with");

    let page = w.list(admin, 0).unwrap();
    assert_eq!((page.volume, page.stream, page.live, page.torn), (VOLUME, StreamId(0), 4, 0));
    assert!(!page.more && !page.settled);
    assert_eq!(seqs(&page), [1, 2, 3, 4]);
    assert_eq!(durable(&page), [1, 2], "T4: one flushed entry vouches for what came before");
    let persisted: Vec<bool> = page.entries.iter().map(|e| e.persisted).collect();
    assert_eq!(persisted, [false, true, false, false]);
    let second = ListedEntry {
        position: Position(1),
        attribute: Attribute {
            flags: Flags::BOUNDARY.with(Flags::FLUSH),
            tag: 77,
            ..attribute(2, 2)
        },
        incarnation: 1,
        persisted: true,
        durable: true,
    };
    assert_eq!(page.entries[1], second);
    assert!(w.list(admin, 1).unwrap().entries.is_empty());

    let plan = plan(&page);
    assert_eq!((plan.k, plan.tag, plan.undone_blocks()), (Seq(2), 77, 2));
    for extent in &plan.undo {
        let zeroes = peer::write_zeroes(7, 1, extent.lba, extent.blocks as u32, false);
        assert_eq!(w.call(io, zeroes, &[]).status, 0, "undo is the owner's plain write");
    }
    assert_eq!(w.call(io, peer::flush(8, 1), &[]).status, 0);
    assert_eq!(w.settle(admin, 2, &[(0, 2, false), (1, 0, false)]), 0);
    let s = w.status(admin);
    assert!(!s.unrecovered && !s.kept);
    assert_eq!((s.live_entries, &s.released[..]), (0, &[Seq(2), Seq(0)][..]));
    let page = w.list(admin, 0).unwrap();
    assert!(page.settled && page.entries.is_empty());
    assert_eq!((page.released, page.tag), (Seq(2), (Seq(2), 102)));
    let bound = w.bind(io, 0, 2, 2);
    assert_eq!((bound.status, bound.result as u32), (0, 64));
    let third = Attribute { ordinal: 1, ..attribute(3, 9) };
    assert_eq!(w.call(io, ordered(9, &third, 2), &block(9)).status, 0);
    let left = [1, 2, 3, 4, 9].map(|lba| w.host.drives[0].block(lba));
    assert_eq!(left, [block(1), block(2), vec![0; 4096], vec![0; 4096], block(9)]);
}

#[test]
fn t21_only_the_owner_undoes() {
    let mut w = abandoned();
    let (_, io) = successor(&mut w, 2);
    let (_, third) = w.admin_as(THIRD, THIRD_ID, 0);
    let third = w.io_as(THIRD, THIRD_ID, third, 1);
    let zeroes = peer::write_zeroes(1, 1, 3, 2, false);
    assert_eq!(w.call(third, zeroes, &[]).status, 0x70a);
    assert_eq!(w.host.drives[0].block(3), block(3));
    assert_eq!(w.call(io, zeroes, &[]).status, 0);
    assert_eq!(w.host.drives[0].block(3), vec![0; 4096]);
}

#[test]
fn t8_a_stale_owner_can_do_nothing_while_another_recovers() {
    let mut w = World::new(&[true]);
    let Owner { admin, io, .. } = w.owner();
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let take = Claim { take_over: true, ..next_claim(&w, 2) };
    assert_eq!(w.claim(rival, &take).unwrap().status, 0);
    let before = w.host.drives[0].history.len();
    assert_eq!(w.call(io, ordered(2, &attribute(2, 2), 0), &block(2)).status, 0x702);
    assert_eq!(w.call(io, peer::write(3, 1, 1, 1), &block(3)).status, 0x70a);
    assert_eq!(w.call(io, peer::write_zeroes(3, 1, 1, 1, false), &[]).status, 0x70a);
    let mark = riopipe_bytes(&wire::mark_command(Seq(1), true)).cid(5);
    assert_eq!(w.call(io, mark, &[]).status, 0x702, "nothing of it is released any more");
    assert_eq!(w.own_list(io), Err(0x702));
    assert_eq!(w.bind(io, 0, 1, 0).status, 0x702);
    assert_eq!(w.bind_again(io, 0, 1, 0).status, 0x702);
    assert_eq!(w.bind(io, 0, 2, 0).status, 0x703, "knowing the number is not enough");
    assert_eq!(w.list(admin, 0), Err(0x703));
    assert_eq!(w.settle(admin, 1, &[(0, 1, false)]), 0x702);
    assert_eq!(w.settle(admin, 2, &[(0, 1, false)]), 0x703);
    let back = Claim { resume: true, ..next_claim(&w, 1) };
    assert_eq!(w.claim(admin, &back).unwrap().status, 0x702);
    let back = Claim { resume: true, ..next_claim(&w, 2) };
    assert_eq!(w.claim(admin, &back).unwrap().status, 0x703);
    assert_eq!(w.host.drives[0].history.len(), before);
    assert_eq!(seqs(&w.list(rival, 0).unwrap()), [1], "nor has it changed what is there");
}

#[test]
fn t8_nothing_is_read_or_started_before_the_claim_is_answered() {
    let mut w = World::new(&[true]);
    let Owner { io, .. } = w.owner();
    w.host.drives[0].holds = true;
    w.command(io, ordered(1, &attribute(1, 1), 0), &block(1));
    let (rival, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let theirs = w.io_as(RIVAL, RIVAL_ID, cntlid, 1);
    let take = Claim { take_over: true, ..next_claim(&w, 2) };
    assert_eq!(w.claim(rival, &take), None, "a write is under way");
    let early = [w.bind(theirs, 1, 2, 0), w.bind_again(theirs, 0, 2, 0)];
    assert_eq!(early.map(|c| (c.status, c.dnr)), [(0x709, false); 2]);
    assert_eq!((w.list(rival, 0), w.list(rival, 1)), (Err(0x709), Err(0x709)));
    assert_eq!(w.settle(rival, 2, &[(1, 0, false)]), 0x709);
    w.complete(0, 0);
    assert_eq!(w.next(rival).unwrap().completion().status, 0);
    assert_eq!(seqs(&w.list(rival, 0).unwrap()), [1]);
}

#[test]
fn t8_a_claim_waits_for_an_earlier_recoverys_own_zeroing() {
    let mut w = abandoned();
    let (admin, io) = successor(&mut w, 2);
    w.host.drives[0].holds = true;
    // It zeroes, loses patience, and begins again from the start: what it will write must not be
    // zeroed by the first attempt.
    w.command(io, peer::write_zeroes(7, 1, 3, 2, false), &[]);
    let again = next_claim(&w, 3);
    assert_eq!(w.claim(admin, &again), None, "its own queue has something under way");
    w.complete(0, 0);
    assert_eq!(w.next(admin).unwrap().completion().status, 0);
    // And when the whole association is gone, too.
    w.command(io, peer::write_zeroes(8, 1, 3, 2, false), &[]);
    w.hang_up(admin);
    let (admin, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let again = Claim { resume: true, ..next_claim(&w, 3) };
    assert_eq!(w.claim(admin, &again), None, "the dead association's zeroing is under way");
    w.complete(0, 0);
    assert_eq!(w.next(admin).unwrap().completion().status, 0);
}

#[test]
fn lists_come_in_pages() {
    let mut w = World::new(&[false]);
    let Owner { admin, io, .. } = w.owner();
    for seq in 1..=20 {
        assert_eq!(w.call(io, ordered(1, &attribute(seq, seq), 0), &block(1)).status, 0);
    }
    w.hang_up(admin);
    let (admin, _) = successor(&mut w, 2);
    let whole = w.list(admin, 0).unwrap();
    assert_eq!((whole.entries.len(), whole.live, whole.more), (20, 20, false));
    let (mut from, mut sizes, mut entries) = (0, Vec::new(), Vec::new());
    loop {
        let page = w.page(admin, 0, from, 64 * 7).unwrap();
        assert_eq!((page.live, page.released), (20, Seq(0)));
        sizes.push(page.entries.len());
        entries.extend(page.entries);
        from = page.next.0;
        if !page.more {
            break;
        }
    }
    assert_eq!((sizes, entries), (vec![6, 6, 6, 2], whole.entries.clone()));
    // Pages may be asked for in any order, and in between.
    let page = w.page(admin, 0, 13, 64 * 3).unwrap();
    assert_eq!((seqs(&page), page.more, page.next), (vec![14, 15], true, Position(15)));
    let other = w.page(admin, 1, 15, 64 * 3).unwrap();
    assert_eq!((other.stream, other.live), (StreamId(1), 0));
    let page = w.page(admin, 0, 15, 64 * 3).unwrap();
    assert_eq!(seqs(&page), [16, 17]);
    let page = w.page(admin, 0, 20, 64 * 3).unwrap();
    assert!(page.entries.is_empty() && !page.more);
    let page = w.page(admin, 0, u64::MAX, 64 * 3).unwrap();
    assert!(page.entries.is_empty() && !page.more);
    let page = w.page(admin, 0, 0, 64).unwrap();
    assert!(page.entries.is_empty() && page.more, "a header has no room for entries");
    assert_eq!((page.next, page.live), (Position(0), 20));
}

#[test]
fn a_list_that_is_being_read_does_not_outlive_what_it_lists() {
    let mut w = abandoned();
    let (admin, io) = successor(&mut w, 2);
    let first = w.page(admin, 0, 0, 64 * 2).unwrap();
    assert!(first.more);
    assert_eq!(w.settle(admin, 2, &[(0, 2, false), (1, 0, false)]), 0);
    let rest = w.page(admin, 0, first.next.0, 64 * 2).unwrap();
    assert!(rest.settled && rest.entries.is_empty() && !rest.more);
    assert_eq!(w.bind(io, 0, 2, 2).status, 0);
    assert_eq!(w.page(admin, 0, first.next.0, 64 * 2), Err(0x709));
}

#[test]
fn t4_lists_go_by_the_volumes_numbers_of_drives() {
    // The second drive forgets what is not flushed, the first doesn't; the volume counts them the
    // other way around.
    let mut w = World::new(&[false, true]);
    let place = |nsid, member| MemberNamespace { nsid, member: Member(member) };
    let members = vec![place(1, 1), place(2, 0)];
    let (admin, cntlid) = w.admin();
    let claim = Claim { members: members.clone(), ..w.first_claim() };
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    let io = w.io(cntlid, 1);
    assert_eq!(w.bind(io, 0, 1, 0).status, 0);
    // Two writes over each other on either drive.
    for (seq, nsid, member) in [(1, 2, 0), (2, 1, 1), (3, 2, 0), (4, 1, 1)] {
        let a = Attribute { member: Member(member), ..attribute(seq, 8) };
        let mut sqe = riopipe_nvme::command::Sqe::write(nsid, 8, 1);
        wire::put_attribute(&mut sqe, &a, Seq(0));
        let sqe = riopipe_bytes(&sqe).cid(seq as u16).inline(4096);
        assert_eq!(w.call(io, sqe, &block(seq as u8)).status, 0);
    }
    w.hang_up(admin);
    // The crash has taken the persist word of the second.
    let (at, len) = w.partition(0);
    let mut part = w.host.parts.part(at..at + len);
    part.write_word(len - 64 * 64 + 64, 0);
    part.fence().unwrap();
    let mut w = w.restart(1);
    let (admin, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let claim = Claim { generation: 2, create: false, ..claim };
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    let page = w.list(admin, 0).unwrap();
    let persisted: Vec<bool> = page.entries.iter().map(|e| e.persisted).collect();
    assert_eq!(persisted, [false, false, false, true]);
    assert_eq!(durable(&page), [2, 4], "T12 vouches where completed is durable, and only there");
    // A queue sees the stream that it carries the same way.
    let mut w = w.restart(1);
    let (admin, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let back = Claim { resume: true, ..claim };
    assert_eq!(w.claim(admin, &back).unwrap().status, 0);
    assert_eq!(w.settle(admin, 2, &[(0, 0, false), (1, 0, false)]), 0);
    let io = w.io_as(RIVAL, RIVAL_ID, cntlid, 1);
    assert_eq!(w.bind(io, 0, 2, 0).status, 0);
    for (seq, nsid, member) in [(1, 2, 0), (2, 1, 1)] {
        let a = Attribute { member: Member(member), ..attribute(seq, 8) };
        let mut sqe = riopipe_nvme::command::Sqe::write(nsid, 8, 1);
        wire::put_attribute(&mut sqe, &a, Seq(0));
        let sqe = riopipe_bytes(&sqe).cid(seq as u16).inline(4096);
        assert_eq!(w.call(io, sqe, &block(seq as u8)).status, 0);
    }
    assert_eq!(durable(&w.own_list(io).unwrap()), [2]);
}

#[test]
fn without_an_owner_anyone_may_look_and_nothing_changes() {
    let mut w = abandoned();
    let (third, cntlid) = w.admin_as(THIRD, THIRD_ID, 0);
    let (at, _) = w.partition(0);
    let fences = (w.host.parts.fences(0), w.host.parts.fences(at));
    let s = w.status(third);
    assert!(s.known && !s.owned && s.unrecovered);
    let page = w.list(third, 0).unwrap();
    assert_eq!((durable(&page), plan(&page).k), (vec![1, 2], Seq(2)));
    assert!(w.list(third, 1).unwrap().entries.is_empty());
    assert_eq!(w.settle(third, 1, &[(0, 2, false)]), 0x703, "but not touch");
    assert_eq!(w.settle(third, 0, &[(0, 2, false)]), 0x702);
    let io = w.io_as(THIRD, THIRD_ID, cntlid, 1);
    assert_eq!(w.call(io, peer::write_zeroes(1, 1, 3, 1, false), &[]).status, 0x70a);
    assert_eq!(w.status(third), s);
    assert_eq!((w.host.parts.fences(0), w.host.parts.fences(at)), fences);
    // As soon as somebody owns it, it is theirs alone.
    let (admin, _) = successor(&mut w, 2);
    assert_eq!(w.list(third, 0), Err(0x703));
    assert!(w.list(admin, 0).is_ok());
}

/// An abandoned volume whose stream 0 has an in-place update and a fresh write beyond its prefix;
/// the new owner has undone the fresh one and keeps the list.
fn kept() -> (World, usize, usize) {
    let mut w = World::new(&[true]);
    let Owner { admin, io, .. } = w.owner();
    let mut first = attribute(1, 1);
    first.flags = first.flags.with(Flags::FLUSH);
    assert_eq!(w.call(io, ordered(1, &first, 0), &block(1)).status, 0);
    assert_eq!(w.call(io, ordered(2, &in_place(2, 40), 0), &block(2)).status, 0);
    assert_eq!(w.call(io, ordered(3, &attribute(3, 41), 0), &block(3)).status, 0);
    w.hang_up(admin);
    let (admin, io) = successor(&mut w, 2);
    let before = plan(&w.list(admin, 0).unwrap());
    assert_eq!((before.k, before.undone_blocks()), (Seq(1), 1));
    assert_eq!(before.in_place.len(), 1);
    assert_eq!(w.settle(admin, 2, &[(0, 1, true), (1, 0, true)]), 0);
    (w, admin, io)
}

#[test]
fn t9_in_place_lists_stay_until_acknowledged() {
    let (mut w, admin, io) = kept();
    let s = w.status(admin);
    assert!(!s.unrecovered && s.kept, "what is kept is not to be recovered again");
    assert_eq!(s.live_entries, 0);
    let page = w.list(admin, 0).unwrap();
    assert!(page.settled);
    assert_eq!((page.released, page.tag, seqs(&page)), (Seq(1), (Seq(1), 101), vec![2, 3]));
    let listed = plan(&page);
    let extent = riopipe_order::recovery::DriveExtent { member: Member(0), lba: 40, blocks: 1 };
    assert_eq!(listed.in_place, [InPlace { seq: Seq(2), extent }]);
    assert_eq!((listed.k, listed.undone_blocks()), (Seq(1), 0), "and nothing is undone twice");
    let refused = w.bind(io, 0, 2, 1);
    assert_eq!((refused.status, refused.dnr), (0x712, true));
    assert_eq!(w.bind_again(io, 0, 2, 1).status, 0x712);
    assert_eq!(w.bind(io, 1, 2, 0).status, 0, "the other stream may go on");
    assert_eq!(w.settle(admin, 2, &[(0, 1, true)]), 0, "to keep it again changes nothing");
    assert_eq!(w.list(admin, 0).unwrap(), page);

    // It outlives owners and the target, and guards its blocks meanwhile.
    w.hang_up(admin);
    let mut w = w.restart(4);
    let (third, cntlid) = w.admin_as(THIRD, THIRD_ID, 0);
    let s = w.status(third);
    assert!(!s.unrecovered && s.kept && !s.owned);
    let plain = w.io_as(THIRD, THIRD_ID, cntlid, 1);
    assert_eq!(w.call(plain, peer::write(1, 1, 40, 1), &block(9)).status, 0x70a);
    assert_eq!(seqs(&w.list(third, 0).unwrap()), [2, 3]);
    let unlogged = Claim { unlogged: true, ..next_claim(&w, 3) };
    assert_eq!(w.claim(third, &unlogged).unwrap().status, 0x704);
    let (admin, io) = successor(&mut w, 3);
    assert_eq!(w.bind(io, 0, 3, 1).status, 0x712);
    assert_eq!(w.settle(admin, 3, &[(0, 2, false)]), 0x713, "another k is another recovery");
    assert_eq!(w.settle(admin, 3, &[(0, 0, false)]), 0x713);
    assert_eq!(seqs(&w.list(admin, 0).unwrap()), [2, 3]);
    for _ in 0..2 {
        assert_eq!(w.settle(admin, 3, &[(0, 1, false)]), 0, "acknowledged, as often as you like");
        let page = w.list(admin, 0).unwrap();
        assert!(page.settled && page.entries.is_empty() && !w.status(admin).kept);
    }
    assert_eq!(w.bind(io, 0, 3, 1).status, 0);
}

#[test]
fn t9_a_volume_with_a_list_to_acknowledge_is_not_closed() {
    let (mut w, admin, _) = kept();
    let release = riopipe_bytes(&wire::release_command(VOLUME, false)).cid(9);
    assert_eq!(w.call(admin, release, &[]).status, 0);
    let state = |w: &World| {
        let header = w.host.parts.crash(0).part(0..HEADER_BYTES);
        let region = LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap();
        region.volume(VOLUME).unwrap().state
    };
    use riopipe_order::log_region::VolumeState::{Closed, Owned};
    assert_eq!(state(&w), Owned);
    let (admin, _) = successor(&mut w, 3);
    assert_eq!(w.settle(admin, 3, &[(0, 1, false)]), 0);
    assert_eq!(w.call(admin, release, &[]).status, 0);
    assert_eq!(state(&w), Closed);
}

#[test]
fn t7_traces_of_a_torn_append_wait_for_recovery_too() {
    let mut w = World::new(&[true]);
    w.owner();
    let (at, len) = w.partition(0);
    let mut part = w.host.parts.part(at..at + len);
    part.write(len - 64 * 64, &[0xa5; 32]);
    part.fence().unwrap();
    let mut w = w.restart(1);
    let (admin, io) = successor(&mut w, 2);
    let s = w.status(admin);
    assert!(s.unrecovered && s.live_entries == 1);
    let page = w.list(admin, 0).unwrap();
    assert_eq!((page.torn, page.live, page.entries.len()), (1, 0, 0));
    assert_eq!(w.bind(io, 0, 2, 0).status, 0x704);
    // There is nothing to keep, whatever is said: the log is cleaned up.
    assert_eq!(w.settle(admin, 2, &[(0, 0, true)]), 0);
    let scan = w.scan(0, 1);
    assert!(scan.settled && scan.is_clean());
    assert!(!w.status(admin).unrecovered && !w.status(admin).kept);
    assert_eq!(w.bind(io, 0, 2, 0).status, 0);
}

#[test]
fn a_list_of_nothing_is_not_kept() {
    let mut w = abandoned();
    let (admin, io) = successor(&mut w, 2);
    assert_eq!(w.settle(admin, 2, &[(0, 4, true), (1, 0, true)]), 0);
    assert!(!w.status(admin).kept);
    assert_eq!(w.bind(io, 0, 2, 4).status, 0);
}

#[test]
fn t9_streams_start_when_all_of_them_are_settled() {
    let mut w = World::new(&[true]);
    let Owner { admin, io, cntlid } = w.owner();
    let other = w.io(cntlid, 2);
    assert_eq!(w.bind(other, 1, 1, 0).status, 0);
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    assert_eq!(w.call(other, ordered(1, &attribute(1, 2), 0), &block(2)).status, 0);
    w.hang_up(admin);
    let (admin, io) = successor(&mut w, 2);
    assert_eq!(w.settle(admin, 2, &[(0, 0, false)]), 0);
    assert_eq!(w.bind(io, 0, 2, 0).status, 0x704, "the other is not settled");
    assert_eq!(w.bind(io, 1, 2, 0).status, 0x704);
    // A crash in between: what was settled stays so.
    let mut w = w.restart(7);
    let (admin, io) = successor(&mut w, 3);
    assert_eq!(w.bind(io, 0, 3, 0).status, 0x704);
    let first = w.list(admin, 0).unwrap();
    assert!(first.settled && first.entries.is_empty());
    assert!(!w.list(admin, 1).unwrap().settled);
    assert_eq!(w.settle(admin, 3, &[(0, 0, false), (1, 0, false)]), 0);
    assert_eq!(w.bind(io, 0, 3, 0).status, 0);
}

#[test]
fn t9_a_settlement_is_durable_when_it_is_answered() {
    for seed in 0..20 {
        let mut w = abandoned();
        let (admin, _) = successor(&mut w, 2);
        assert_eq!(w.settle(admin, 2, &[(0, 2, true), (1, 0, false)]), 0);
        let scan = w.scan(0, seed);
        assert!(scan.settled);
        assert_eq!((scan.released, scan.tag, scan.entries.len()), (Seq(2), (Seq(2), 102), 2));
        assert_eq!(w.settle(admin, 2, &[(0, 2, false)]), 0);
        let scan = w.scan(0, seed);
        assert!(scan.settled && scan.is_clean());
    }
}

#[test]
fn a_settlement_that_the_log_does_not_take_is_none() {
    let mut w = abandoned();
    let (admin, io) = successor(&mut w, 2);
    let (at, _) = w.partition(0);
    w.host.parts.fail_fences_after(at, 0);
    assert_eq!(w.settle(admin, 2, &[(1, 0, false), (0, 2, false)]), 0x711);
    assert_eq!(w.bind(io, 1, 2, 0).status, 0x704, "nothing starts");
    assert!(w.status(admin).unrecovered);
    // The log store is mended: what was done of it counts, and the rest is done.
    let mut w = w.restart(2);
    let (admin, io) = successor(&mut w, 3);
    assert_eq!(w.list(admin, 0).unwrap().live, 4);
    assert_eq!(w.settle(admin, 3, &[(1, 0, false), (0, 2, false)]), 0);
    assert_eq!(w.bind(io, 0, 3, 2).status, 0);
}

/// Two streams run; the first has failed.
fn one_of_two_failed() -> (World, Owner, usize) {
    let mut w = World::new(&[true]);
    let owner = w.owner();
    let other = w.io(owner.cntlid, 2);
    assert_eq!(w.bind(other, 1, 1, 0).status, 0);
    assert_eq!(w.call(owner.io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    assert_eq!(w.call(other, ordered(1, &attribute(1, 51), 0), &block(1)).status, 0);
    w.host.drives[0].failing = true;
    assert_eq!(w.call(owner.io, ordered(2, &attribute(2, 2), 0), &block(2)).status, 0x280);
    w.host.drives[0].failing = false;
    assert_eq!(w.call(owner.io, ordered(3, &attribute(3, 3), 0), &block(3)).status, 0x707);
    (w, owner, other)
}

/// The other stream writes its group `seq` and says what is released.
fn goes_on(w: &mut World, other: usize, seq: u64) {
    let a = attribute(seq, 50 + seq);
    assert_eq!(w.call(other, ordered(7, &a, seq - 1), &block(seq as u8)).status, 0);
    let mark = riopipe_bytes(&wire::mark_command(Seq(seq), true)).cid(8);
    assert_eq!(w.call(other, mark, &[]).status, 0);
}

#[test]
fn a_failed_stream_is_reopened_while_others_run() {
    let (mut w, Owner { admin, io, cntlid }, other) = one_of_two_failed();
    goes_on(&mut w, other, 2);
    w.hang_up(io);
    let page = w.list(admin, 0).unwrap();
    assert_eq!((seqs(&page), durable(&page)), (vec![1, 2], vec![]));
    goes_on(&mut w, other, 3);
    let again = w.io(cntlid, 3);
    assert_eq!(w.bind(again, 0, 1, 0).status, 0x704, "it has something to undo");
    let zeroes = peer::write_zeroes(7, 1, 1, 2, false);
    assert_eq!(w.call(again, zeroes, &[]).status, 0);
    assert_eq!(w.settle(admin, 1, &[(0, 0, false)]), 0);
    goes_on(&mut w, other, 4);
    assert_eq!(w.bind(again, 0, 1, 0).status, 0, "the same generation");
    assert_eq!(w.call(again, ordered(1, &attribute(1, 1), 0), &block(9)).status, 0);
    goes_on(&mut w, other, 5);
    assert_eq!(w.list(admin, 1), Err(0x709), "whoever asks for a stream takes it back");
    assert_eq!(w.links[other].closed.as_ref().map(ToString::to_string).as_deref(), Some(ENDED));
}

const ENDED: &str = "its owner needs the stream elsewhere";

#[test]
fn p8_the_owner_gets_a_stream_back_from_a_connection_that_does_not_know() {
    // The host's end of a connection is gone, and nobody has told the target.
    let (mut w, Owner { admin, io, .. }, other) = one_of_two_failed();
    w.host.drives[0].holds = true;
    w.command(other, ordered(2, &attribute(2, 52), 0), &block(2));
    assert_eq!(w.settle(admin, 1, &[(0, 0, false), (1, 0, false)]), 0x709);
    assert_eq!((w.list(admin, 0).map(|p| p.live), w.list(admin, 1)), (Ok(2), Err(0x709)));
    let closed = [io, other].map(|at| w.links[at].closed.as_ref().map(ToString::to_string));
    assert_eq!(closed, [Some(ENDED.into()), Some(ENDED.into())]);
    w.complete(0, 0);
    assert_eq!(w.list(admin, 1).map(|p| p.live), Ok(2));
}

#[test]
fn a_list_reader_does_not_take_anything_from_anybody() {
    let mut w = World::new(&[true]);
    let Owner { io, .. } = w.owner();
    let (third, _) = w.admin_as(THIRD, THIRD_ID, 0);
    assert_eq!(w.list(third, 0), Err(0x703));
    assert_eq!(w.settle(third, 1, &[(0, 0, false)]), 0x703);
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
}

#[test]
fn t18_lists_that_make_no_sense_are_refused() {
    let mut w = abandoned();
    let (admin, io) = successor(&mut w, 2);
    for len in [0, 1, 63, 65, 100, PAGE_BYTES_MAX + 64, 1 << 31, u32::MAX as usize] {
        assert_eq!(w.page(admin, 0, 0, len), Err(0x02), "{len} bytes");
        let own = wire::own_list_command(Position(0), len);
        let sqe = riopipe_bytes(&own).cid(1).transport(len as u32);
        assert_eq!(w.ask(io, sqe), Err(0x70f), "an unbound queue has no list");
    }
    assert_eq!(w.page(admin, 2, 0, 4096), Err(0x70e));
    assert_eq!(w.page(admin, u16::MAX, 0, 4096), Err(0x70e));
    let list = |volume, stream: u32, sgl: u32| {
        let sqe = wire::list_command(volume, StreamId(0), Position(0), 4096);
        riopipe_bytes(&sqe).dword(11, stream).cid(1).transport(sgl)
    };
    assert_eq!(w.ask(admin, list(VOLUME, 1 << 16, 4096)), Err(0x70e), "no stream is cut to 0");
    assert_eq!(w.ask(admin, list(VolumeId([8; 16]), 0, 4096)), Err(0x70c));
    assert_eq!(w.ask(admin, list(VOLUME, 0, 4032)), Err(0x0f), "the host's buffer is shorter");
    assert_eq!(w.ask(admin, list(VOLUME, 0, 4096).inline(4096)), Err(0x11));
    assert!(w.ask(admin, list(VOLUME, 0, 8192)).is_ok());
    // On the wrong queue.
    assert_eq!(w.ask(io, list(VOLUME, 0, 4096)), Err(0x01));
    let own = riopipe_bytes(&wire::own_list_command(Position(0), 4096)).cid(1).transport(4096);
    assert_eq!(w.ask(admin, own), Err(0x01));
    // On a bound queue.
    assert_eq!(w.settle(admin, 2, &[(0, 2, false), (1, 0, false)]), 0);
    assert_eq!(w.bind(io, 0, 2, 2).status, 0);
    for len in [0, 63, PAGE_BYTES_MAX + 64] {
        let own = wire::own_list_command(Position(u64::MAX), len);
        assert_eq!(w.ask(io, riopipe_bytes(&own).cid(1).transport(len as u32)), Err(0x02));
    }
    assert_eq!(w.own_list(io).unwrap().entries, []);
}

#[test]
fn t18_settlements_that_make_no_sense_are_refused() {
    let mut w = abandoned();
    let (admin, io) = successor(&mut w, 2);
    assert_eq!(w.settle(admin, 2, &[(2, 0, false)]), 0x70e);
    assert_eq!(w.settle(admin, 2, &[(0, 2, false), (700, 0, false)]), 0x70e);
    assert_eq!(w.settle(admin, 2, &[(0, 2, false), (0, 3, false)]), 0x02, "one stream twice");
    assert_eq!(w.settle(admin, 2, &[(0, 1 << 63, false)]), 0x02, "beyond all groups");
    assert_eq!(w.settle(admin, 1, &[(0, 2, false)]), 0x702);
    assert_eq!(w.settle(admin, 3, &[(0, 2, false)]), 0x702);
    let with = |change: fn(&mut Vec<u8>)| {
        let streams = vec![SettleStream { stream: StreamId(0), keep: false, k: Seq(2), tag: 0 }];
        let mut data = Settle { volume: VOLUME, generation: 2, streams }.encode();
        change(&mut data);
        data
    };
    let sqe = riopipe_bytes(&wire::settle_command()).cid(9).inline(SETTLE_LEN as u32);
    assert_eq!(w.call(admin, sqe, &with(|d| d[0] ^= 1)).status, 0x70c, "another volume");
    assert_eq!(w.call(admin, sqe, &with(|d| d[20] = 161)).status, 0x02, "more than fit");
    assert_eq!(w.call(admin, sqe, &with(|d| d[21] = 0xff)).status, 0x02);
    assert_eq!(w.call(admin, sqe, &with(|d| d[34] = 2)).status, 0x02, "unknown flags");
    assert_eq!(w.call(admin, sqe, &[0xff; SETTLE_LEN]).status, 0x02);
    assert_eq!(w.call(admin, sqe.inline(64), &[0; 64]).status, 0x0f);
    assert_eq!(w.call(io, sqe, &with(|_| ())).status, 0x01, "not on an I/O queue");
    assert_eq!(w.list(admin, 0).unwrap().live, 4, "none has changed anything");
    assert!(!w.list(admin, 0).unwrap().settled);
    // Released groups are never undone.
    assert_eq!(w.settle(admin, 2, &[(0, 2, true), (1, 0, false)]), 0);
    assert_eq!(w.settle(admin, 2, &[(0, 2, false)]), 0);
    assert_eq!(w.bind(io, 0, 2, 2).status, 0);
    let third = Attribute { ordinal: 1, ..attribute(3, 3) };
    assert_eq!(w.call(io, ordered(1, &third, 2), &block(3)).status, 0);
    w.hang_up(io);
    assert_eq!(w.settle(admin, 2, &[(0, 1, false)]), 0x02);
    assert_eq!(w.settle(admin, 2, &[(0, 3, false)]), 0);
    // The data may come on request, too.
    let mut again = with(|_| ());
    again[40] = 3;
    w.command(admin, sqe.transport(SETTLE_LEN as u32), &[]);
    let r2t = w.next(admin).unwrap();
    assert_eq!((r2t.kind, r2t.u32(16)), (0x09, SETTLE_LEN as u32));
    let data = peer::h2c_data(peer::Digests::default(), 9, r2t.u16(10), 0, &again, true);
    w.send(admin, &data);
    assert_eq!(w.next(admin).unwrap().completion().status, 0);
}

#[test]
fn t19_what_is_lost_is_neither_listed_nor_settled() {
    let w = abandoned();
    let parts = w.host.parts.crash(1);
    let header = match inspect(&parts.part(0..HEADER_BYTES), LOG_LEN, BOOT, crc) {
        Class::Ours(header) => header,
        other => panic!("{other:?}"),
    };
    let (at, len) = w.partition(1);
    let lost = Volumes::with_lost_log(header, crc);
    let mut w = World::over(&[true], identity(), parts.clone(), lost);
    let (third, _) = w.admin_as(THIRD, THIRD_ID, 0);
    assert_eq!(w.list(third, 0), Err(0x710));
    let back = Claim { resume: true, ..next_claim(&w, 1) };
    let (admin, _) = w.admin();
    assert_eq!(w.claim(admin, &back).unwrap().status, 0x710, "nor is it gone on with");

    // One partition is blank where it must not be.
    let mut part = parts.part(at..at + len);
    part.write(0, &vec![0; len]);
    part.fence().unwrap();
    let header = parts.part(0..HEADER_BYTES);
    let region = LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap();
    let mine = parts.clone();
    let split = Box::new(move |range: std::ops::Range<usize>| Ok(mine.part(range)));
    let (volumes, problems) = Volumes::with_log(region, split, crc);
    assert_eq!(problems.len(), 1);
    let mut w = World::over(&[true], identity(), parts, volumes);
    let (admin, _) = w.admin();
    assert_eq!((w.list(admin, 0), w.list(admin, 1)), (Err(0x710), Err(0x710)));
    assert_eq!(w.claim(admin, &back).unwrap().status, 0x710);
}

#[test]
fn volumes_without_a_log_have_nothing_to_list() {
    let mut w = World::new(&[true]);
    let (admin, _) = w.admin();
    let claim = Claim { unlogged: true, create: false, ..w.first_claim() };
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    assert_eq!(w.list(admin, 0), Err(0x706));
    assert_eq!(w.settle(admin, 1, &[(0, 0, false)]), 0x706);
}

#[test]
fn flush_entries_are_listed_and_vouch() {
    let mut w = World::new(&[true, true]);
    let Owner { admin, io, .. } = w.owner();
    let two = |seq, member, lba| Attribute { member: Member(member), ..attribute(seq, lba) };
    assert_eq!(w.call(io, ordered(1, &two(1, 0, 1), 0), &block(1)).status, 0);
    assert_eq!(w.call(io, ordered(2, &two(2, 1, 1), 0), &block(2)).status, 0);
    assert_eq!(w.call(io, ordered(3, &flush_entry(3, 0), 0), &[]).status, 0);
    w.hang_up(admin);
    let (admin, _) = successor(&mut w, 2);
    let page = w.list(admin, 0).unwrap();
    assert_eq!(page.entries[2].attribute.kind, Kind::Flush);
    assert_eq!(durable(&page), [1, 3], "on its own drive only (T4)");
}

/// Words that look like commands but are dice.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.roll() as usize % from.len()]
    }
}

#[test]
fn t18_random_vendor_commands_are_answered_once_each() {
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    let mut answers = [0u32; 2];
    for _ in 0..300 {
        let mut w = abandoned();
        let (admin, cntlid) = w.admin();
        let queues = [admin, w.io(cntlid, 1), w.io(cntlid, 2)];
        for _ in 0..30 {
            let at = dice.pick(&queues);
            if w.links[at].closed.is_some() {
                continue;
            }
            let opcode = dice.pick(&[0xc1, 0xc2, 0xc4, 0xc6, 0xc6, 0xc9, 0xc9, 0x84, 0x88, 0x8a]);
            let mut sqe = peer::Sqe::new(opcode, 9, 1);
            let nearly = !dice.roll().is_multiple_of(4);
            for dword in [2, 3, 10, 11, 12, 13, 14, 15] {
                let value = match (dword, nearly) {
                    (12.., true) => u32::from_le_bytes([7; 4]),
                    (10, true) => dice.pick(&[0, 1, 64, 128, 4096, 1 << 31, 1 << 31 | 1]),
                    (11, true) => dice.pick(&[0, 1, 2, 3, 4]),
                    (_, true) => dice.pick(&[0, 1, 2, u32::MAX]),
                    _ => dice.roll() as u32,
                };
                sqe = sqe.dword(dword, value);
            }
            let data: Vec<u8> = match opcode {
                0xc1 => {
                    let mut claim = next_claim(&w, dice.pick(&[1, 2, 3, 9]));
                    claim.take_over = dice.roll().is_multiple_of(2);
                    claim.resume = dice.roll().is_multiple_of(2);
                    claim.encode()
                }
                0xc9 => {
                    let one = |dice: &mut Dice| SettleStream {
                        stream: StreamId(dice.pick(&[0, 1, 1, 2])),
                        keep: dice.roll().is_multiple_of(2),
                        k: Seq(dice.pick(&[0, 1, 2, 3, 4, 5])),
                        tag: 5,
                    };
                    let streams = (0..dice.roll() % 4).map(|_| one(&mut dice)).collect();
                    let generation = dice.pick(&[1, 2, 3, 9]);
                    Settle { volume: VOLUME, generation, streams }.encode()
                }
                _ => Vec::new(),
            };
            let mut data = data;
            if !nearly && !data.is_empty() {
                let at = dice.roll() as usize % 64;
                data[at] ^= 1 << (dice.roll() % 8);
            }
            sqe = if data.is_empty() {
                sqe.transport(sqe_len(&sqe))
            } else {
                sqe.inline(data.len() as u32)
            };
            w.command(at, sqe, &data);
            let mut completions = Vec::new();
            while let Some(pdu) = w.next(at) {
                if pdu.kind != 0x07 {
                    completions.push(pdu.completion());
                }
            }
            assert_eq!(completions.len(), 1, "{:x?}", &sqe.0);
            assert_eq!(completions[0].cid, 9);
            answers[usize::from(completions[0].status == 0)] += 1;
        }
        for at in queues {
            w.hang_up(at);
            assert!(w.links[at].conn.is_drained());
        }
    }
    assert!(answers.iter().all(|n| *n > 500), "refused and taken: {answers:?}");
}

/// The length that a command says in its dword 10.
fn sqe_len(sqe: &peer::Sqe) -> u32 {
    u32::from_le_bytes([sqe.0[40], sqe.0[41], sqe.0[42], sqe.0[43]])
}
