//! The requests of a recovery to a target: valid lists, undo under guard, a settlement that lasts,
//! and a refusal for every host that is not the owner.

mod world;

use riopipe_order::attribute::{Attribute, Flags, GroupTag, Kind, Member, Seq, StreamId};
use riopipe_order::entry::{ENTRY_BYTES, Position};
use riopipe_order::log_region::{HEADER_BYTES, LogRegion, MemberNamespace};
use riopipe_order::ordering_log::partition_bytes;
use riopipe_order::recovery::{InPlace, ListedEntry, StreamList, StreamPlan, decide};
use riopipe_order::region::Region;
use riopipe_session::wire::list::Page;
use riopipe_session::wire::{self, Claim};
use riopipe_testkit::peer;
use world::recovery::{RIVAL, RIVAL_ID};
use world::{
    BOOT, LOG_LEN, Owner, VOLUME, World, attribute, block, crc, flush_entry, ordered, riopipe_bytes,
};

const THIRD: &str = "nqn.2014-08.org.nvmexpress:uuid:third";
const THIRD_ID: [u8; 16] = *b"scripted-host-03";

fn in_place(seq: u64, lba: u64) -> Attribute {
    let mut a = attribute(seq, lba);
    a.flags = a.flags.with(Flags::IN_PLACE);
    a
}

fn plan(page: &Page) -> StreamPlan {
    assert!(!page.more);
    let list = StreamList {
        in_doubt: false,
        server: 0,
        released: page.released,
        newest_tag: page.newest_tag,
        settled: page.settled,
        entries: page.entries.clone(),
    };
    decide(page.stream, &[list], |_| Some(0)).unwrap()
}

fn seqs(page: &Page) -> Vec<u64> {
    page.entries.iter().map(|e| e.attribute.seq.0).collect()
}

/// The groups that the list shows as durable.
fn durable(page: &Page) -> Vec<u64> {
    let durable = page.entries.iter().filter(|e| e.durable);
    durable.map(|e| e.attribute.seq.0).collect()
}

#[test]
fn a_new_owner_lists_undoes_settles_and_starts() {
    let mut w = World::abandoned();
    let (admin, io) = w.successor(2);
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
    assert_eq!(durable(&page), [1, 2], "T4: one flushed entry covers the earlier ones");
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
    assert_eq!((page.released, page.newest_tag), (Seq(2), GroupTag::new(Seq(2), 102)));
    let bound = w.bind(io, 0, 2, 2);
    assert_eq!((bound.status, bound.result as u32), (0, 64));
    let third = Attribute { ordinal: 1, ..attribute(3, 9) };
    assert_eq!(w.call(io, ordered(9, &third, 2), &block(9)).status, 0);
    let left = [1, 2, 3, 4, 9].map(|lba| w.host.drives[0].block(lba));
    assert_eq!(left, [block(1), block(2), vec![0; 4096], vec![0; 4096], block(9)]);
}

#[test]
fn t21_only_the_owner_undoes() {
    let mut w = World::abandoned();
    let (_, io) = w.successor(2);
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
    let take = Claim { take_over: true, ..w.next_claim(2) };
    assert_eq!(w.claim(rival, &take).unwrap().status, 0);
    let before = w.host.drives[0].history.len();
    assert_eq!(w.call(io, ordered(2, &attribute(2, 2), 0), &block(2)).status, 0x702);
    assert_eq!(w.call(io, peer::write(3, 1, 1, 1), &block(3)).status, 0x70a);
    assert_eq!(w.call(io, peer::write_zeroes(3, 1, 1, 1, false), &[]).status, 0x70a);
    // It would soon find undone blocks that were reported complete to it (P9).
    assert_eq!(w.call(io, peer::read(4, 1, 1, 1), &[]).status, 0x702);
    let mark = riopipe_bytes(&wire::mark_command(Seq(1), true)).cid(5);
    assert_eq!(w.call(io, mark, &[]).status, 0x702, "nothing of it is released any more");
    assert_eq!(w.own_list(io), Err(0x702));
    assert_eq!(w.bind(io, 0, 1, 0).status, 0x702);
    assert_eq!(w.bind_again(io, 0, 1, 0).status, 0x702);
    assert_eq!(w.bind(io, 0, 2, 0).status, 0x703, "knowing the number is not enough");
    assert_eq!(w.list(admin, 0), Err(0x703));
    assert_eq!(w.settle(admin, 1, &[(0, 1, false)]), 0x702);
    assert_eq!(w.settle(admin, 2, &[(0, 1, false)]), 0x703);
    let back = Claim { resume: true, ..w.next_claim(1) };
    assert_eq!(w.claim(admin, &back).unwrap().status, 0x702);
    let back = Claim { resume: true, ..w.next_claim(2) };
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
    let take = Claim { take_over: true, ..w.next_claim(2) };
    assert_eq!(w.claim(rival, &take), None, "a write is in flight");
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
    let mut w = World::abandoned();
    let (admin, io) = w.successor(2);
    w.host.drives[0].holds = true;
    // It zeroes, reaches its time limit, and begins again from the start: the first attempt must
    // not zero its later writes.
    w.command(io, peer::write_zeroes(7, 1, 3, 2, false), &[]);
    let again = w.next_claim(3);
    assert_eq!(w.claim(admin, &again), None, "its own queue has something in flight");
    w.complete(0, 0);
    assert_eq!(w.next(admin).unwrap().completion().status, 0);
    // And when the whole association is gone, too.
    w.command(io, peer::write_zeroes(8, 1, 3, 2, false), &[]);
    w.hang_up(admin);
    let (admin, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let again = Claim { resume: true, ..w.next_claim(3) };
    assert_eq!(w.claim(admin, &again), None, "the dead association's zeroing is in flight");
    w.complete(0, 0);
    assert_eq!(w.next(admin).unwrap().completion().status, 0);
}

#[test]
fn t8_only_the_last_claim_lets_its_owner_in() {
    let mut w = World::abandoned();
    let (admin, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let claim = w.next_claim(2);
    assert_eq!(w.claim(admin, &claim).map(|c| c.status), Some(0));
    let queues = [1, 2].map(|qid| w.io_as(RIVAL, RIVAL_ID, cntlid, qid));
    w.host.drives[0].holds = true;
    let again = |w: &mut World, generation, cid| {
        let sqe = riopipe_bytes(&wire::claim_command()).cid(cid).inline(4096);
        let claim = w.next_claim(generation);
        w.command(admin, sqe, &claim.encode());
    };
    w.command(queues[0], peer::write_zeroes(7, 1, 3, 1, false), &[]);
    again(&mut w, 3, 1);
    w.command(queues[1], peer::write_zeroes(8, 1, 4, 1, false), &[]);
    again(&mut w, 4, 2);
    assert_eq!(w.next(admin), None);
    w.complete(0, 0);
    assert_eq!(w.next(admin).unwrap().completion().cid, 1);
    assert_eq!(w.list(admin, 0), Err(0x709), "the second is still in flight");
    w.complete(0, 0);
    assert_eq!(w.next(admin).unwrap().completion().cid, 2);
    assert!(w.list(admin, 0).is_ok());
}

#[test]
fn lists_come_in_pages() {
    let mut w = World::new(&[false]);
    let Owner { admin, io, .. } = w.owner();
    for seq in 1..=20 {
        assert_eq!(w.call(io, ordered(1, &attribute(seq, seq), 0), &block(1)).status, 0);
    }
    w.hang_up(admin);
    let (admin, _) = w.successor(2);
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
    assert!(page.entries.is_empty() && page.more, "a header has no space for entries");
    assert_eq!((page.next, page.live), (Position(0), 20));
}

#[test]
fn a_list_that_is_being_read_does_not_outlive_what_it_lists() {
    let mut w = World::abandoned();
    let (admin, io) = w.successor(2);
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
    // The second drive loses unflushed blocks, the first does not; the volume numbers them in the
    // opposite order.
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
    // The owner, on the queue that carries the stream.
    let mut w = w.restart(1);
    let (admin, cntlid) = w.admin();
    let back = Claim { resume: true, create: false, ..claim.clone() };
    assert_eq!(w.claim(admin, &back).unwrap().status, 0);
    let io = w.io(cntlid, 1);
    assert_eq!(w.bind_again(io, 0, 1, 0).status, 0);
    assert_eq!(durable(&w.own_list(io).unwrap()), [2, 4]);
    w.hang_up(admin);
    // Its successor.
    let mut w = w.restart(1);
    let (admin, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let claim = Claim { generation: 2, create: false, ..claim };
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    let page = w.list(admin, 0).unwrap();
    let persisted: Vec<bool> = page.entries.iter().map(|e| e.persisted).collect();
    assert_eq!(persisted, [false, false, false, true]);
    assert_eq!(
        durable(&page),
        [2, 4],
        "without a cache each write is persisted, with one only a FLUSH is"
    );
    // A queue lists the stream that it carries in the same form.
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
fn without_an_owner_any_host_may_read_the_lists_and_nothing_changes() {
    let mut w = World::abandoned();
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
    // As soon as the volume has an owner, only the owner may read the list.
    let (admin, _) = w.successor(2);
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
    let (admin, io) = w.successor(2);
    let before = plan(&w.list(admin, 0).unwrap());
    assert_eq!((before.k, before.undone_blocks()), (Seq(1), 1));
    assert_eq!(before.in_place.len(), 1);
    assert_eq!(w.settle(admin, 2, &[(0, 1, true), (1, 0, true)]), 0);
    (w, admin, io)
}

/// The tail of a log is written again with one more record, and again. The owner is gone before the
/// second, or the third, is done.
#[test]
fn t11_an_extended_block_is_neither_zeroed_nor_kept_for_an_acknowledgement() {
    for confirmed in 1..=2_u64 {
        let mut w = World::new(&[true]);
        let Owner { admin, io, .. } = w.owner();
        for seq in 1..=3 {
            let mut a = attribute(seq, 40);
            if seq > 1 {
                a.flags = a.flags.with(Flags::EXTEND);
            }
            if seq <= confirmed {
                a.flags = a.flags.with(Flags::FLUSH);
            }
            assert_eq!(w.call(io, ordered(seq as u16, &a, 0), &block(seq as u8)).status, 0);
        }
        w.hang_up(admin);
        let (admin, io) = w.successor(2);
        let page = w.list(admin, 0).unwrap();
        let found = plan(&page);
        assert_eq!((found.k, found.found, found.dropped), (Seq(confirmed), 3, 3 - confirmed));
        assert_eq!((found.undo, found.in_place), (vec![], vec![]));
        assert_eq!(w.settle(admin, 2, &[(0, confirmed, false), (1, 0, false)]), 0);
        let s = w.status(admin);
        assert!(!s.unrecovered && !s.kept);
        assert_eq!(w.bind(io, 0, 2, confirmed).status, 0, "nothing has to be acknowledged");
        let (data, answer) = w.fetch(io, peer::read(9, 1, 40, 1));
        assert_eq!((answer.status, data), (0, block(3)));
    }
}

#[test]
fn t9_in_place_lists_stay_until_acknowledged() {
    let (mut w, admin, io) = kept();
    let s = w.status(admin);
    assert!(!s.unrecovered && s.kept, "what is kept is not to be recovered again");
    assert_eq!(s.live_entries, 0);
    let page = w.list(admin, 0).unwrap();
    assert!(page.settled);
    assert_eq!(
        (page.released, page.newest_tag, seqs(&page)),
        (Seq(1), GroupTag::new(Seq(1), 101), vec![2, 3])
    );
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
    let unlogged = Claim { unlogged: true, ..w.next_claim(3) };
    assert_eq!(w.claim(third, &unlogged).unwrap().status, 0x704);
    let (admin, io) = w.successor(3);
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
    let (admin, _) = w.successor(3);
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
    let (admin, io) = w.successor(2);
    let s = w.status(admin);
    assert!(s.unrecovered && s.live_entries == 1);
    let page = w.list(admin, 0).unwrap();
    assert_eq!((page.torn, page.live, page.entries.len()), (1, 0, 0));
    assert_eq!(w.bind(io, 0, 2, 0).status, 0x704);
    // There is nothing to keep, whichever flag is sent: the log is cleaned up.
    assert_eq!(w.settle(admin, 2, &[(0, 0, true)]), 0);
    let scan = w.scan(0, 1);
    assert!(scan.settled && scan.is_clean());
    assert!(!w.status(admin).unrecovered && !w.status(admin).kept);
    assert_eq!(w.bind(io, 0, 2, 0).status, 0);
}

#[test]
fn a_list_of_nothing_is_not_kept() {
    let mut w = World::abandoned();
    let (admin, io) = w.successor(2);
    assert_eq!(w.settle(admin, 2, &[(0, 4, true), (1, 0, true)]), 0);
    assert!(!w.status(admin).kept);
    assert_eq!(w.bind(io, 0, 2, 4).status, 0);
}

#[test]
fn t9_streams_start_when_all_of_them_are_settled() {
    let mut w = World::abandoned_by_two();
    let (admin, io) = w.successor(2);
    assert_eq!(w.settle(admin, 2, &[(0, 0, false)]), 0);
    assert_eq!(w.bind(io, 0, 2, 0).status, 0x704, "the other is not settled");
    assert_eq!(w.bind(io, 1, 2, 0).status, 0x704);
    // A crash in between: what was settled stays so.
    let mut w = w.restart(7);
    let (admin, io) = w.successor(3);
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
        let mut w = World::abandoned();
        let (admin, _) = w.successor(2);
        assert_eq!(w.settle(admin, 2, &[(0, 2, true), (1, 0, false)]), 0);
        let scan = w.scan(0, seed);
        assert!(scan.settled);
        assert_eq!(
            (scan.released, scan.newest_tag, scan.entries.len()),
            (Seq(2), GroupTag::new(Seq(2), 102), 2)
        );
        assert_eq!(w.settle(admin, 2, &[(0, 2, false)]), 0);
        let scan = w.scan(0, seed);
        assert!(scan.settled && scan.is_clean());
    }
}

#[test]
fn t9_a_mark_that_recovery_relied_on_is_durable_before_streams_start() {
    let mut w = World::new(&[false]);
    let Owner { cntlid, io, .. } = w.owner();
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    w.hang_up(io);
    // The owner comes back, and sends a mark: the target knows it, its log does not.
    let io = w.io(cntlid, 2);
    assert_eq!(w.bind_again(io, 0, 1, 1).status, 0);
    w.hang_up(io);
    assert_eq!(w.scan(0, 1).entries.len(), 1);
    let take_over = |w: &mut World, generation: u32, resume: bool| {
        let (admin, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
        let claim = Claim { take_over: !resume, resume, ..w.next_claim(generation) };
        assert_eq!(w.claim(admin, &claim).map(|c| c.status), Some(0));
        (admin, w.io_as(RIVAL, RIVAL_ID, cntlid, 1))
    };
    let (admin, io) = take_over(&mut w, 2, false);
    assert!(!w.status(admin).unrecovered, "there is nothing to recover");
    assert_eq!(w.bind(io, 1, 2, 0).status, 0, "one stream starts");
    // The target dies before the other stream has been settled.
    let mut w = w.restart(3);
    let (admin, io) = take_over(&mut w, 2, true);
    assert!(!w.status(admin).unrecovered, "and there still is nothing");
    assert_eq!(w.bind(io, 0, 2, 1).status, 0);
}

#[test]
fn a_settlement_that_the_log_does_not_take_is_none() {
    let mut w = World::abandoned();
    let (admin, io) = w.successor(2);
    let (at, _) = w.partition(0);
    w.host.parts.fail_fences_after(at, 0);
    assert_eq!(w.settle(admin, 2, &[(1, 0, false), (0, 2, false)]), 0x711);
    assert_eq!(w.bind(io, 1, 2, 0).status, 0x711, "nothing starts, and that is why");
    assert!(w.status(admin).unrecovered);
    // The log store is repaired: the finished part of the settlement counts, and the rest is done.
    let mut w = w.restart(2);
    let (admin, io) = w.successor(3);
    assert_eq!(w.list(admin, 0).unwrap().live, 4);
    assert_eq!(w.settle(admin, 3, &[(1, 0, false), (0, 2, false)]), 0);
    assert_eq!(w.bind(io, 0, 3, 2).status, 0);
}

/// A settlement of before the log was given up does not bind the recovery after it.
#[test]
fn t26_a_log_that_was_given_up_is_settled_anew_at_a_later_group() {
    let mut w = World::abandoned();
    let (admin, _) = w.successor(2);
    assert_eq!(w.settle(admin, 2, &[(0, 2, false), (1, 0, false)]), 0);
    assert_eq!(w.settle(admin, 2, &[(0, 4, false)]), 0x713, "it is settled");
    let give_up = Claim { give_up: true, ..w.next_claim(3) };
    assert_eq!(w.claim(admin, &give_up).unwrap().status, 0);
    assert_eq!(w.settle(admin, 3, &[(0, 4, false), (1, 0, false)]), 0);
    assert_eq!(w.list(admin, 0).map(|page| page.released), Ok(Seq(4)));
    let mut w = w.restart(1);
    let (admin, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    assert_eq!(w.list(admin, 0).map(|page| page.released), Ok(Seq(4)));
}

/// The log of a stream at rest changes while the target runs, so that it cannot be read any more.
#[test]
fn t26_a_claim_that_gives_up_the_log_makes_what_is_damaged_anew() {
    let mut w = World::abandoned();
    let (at, len) = w.partition(0);
    let mut part = w.host.parts.part(at..at + len);
    part.write(partition_bytes(0), &[0; ENTRY_BYTES]);
    let (third, _) = w.admin_as(THIRD, THIRD_ID, 0);
    assert_eq!(w.list(third, 0), Err(0x710), "an entry is missing");
    let (admin, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let give_up = Claim { give_up: true, ..w.next_claim(2) };
    assert_eq!(w.claim(admin, &give_up).unwrap().status, 0);
    let page = w.list(admin, 0).unwrap();
    assert_eq!((page.live, page.in_doubt), (0, true));
}

/// A log that could not be written is not damaged, and its entries may still be needed.
#[test]
fn t26_a_claim_that_gives_up_the_log_keeps_what_its_store_failed_to_take() {
    let mut w = World::abandoned();
    let (admin, _) = w.successor(2);
    let (at, _) = w.partition(0);
    w.host.parts.fail_fences_after(at, 0);
    assert_eq!(w.settle(admin, 2, &[(0, 2, false)]), 0x711);
    let give_up = Claim { give_up: true, ..w.next_claim(3) };
    assert_eq!(w.claim(admin, &give_up).unwrap().status, 0);
    assert_eq!(w.list(admin, 0), Err(0x711));
    let mut w = w.restart(2);
    let (admin, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    assert_eq!(w.list(admin, 0).map(|page| page.live), Ok(4));
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

/// The other stream writes its group `seq` and sends its released mark.
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
    assert_eq!(w.list(admin, 1), Err(0x709), "the owner that asks for a stream takes it back");
    assert_eq!(w.links[other].closed.as_ref().map(ToString::to_string).as_deref(), Some(ENDED));
}

const ENDED: &str = "its owner needs the stream elsewhere";

#[test]
fn p8_the_owner_gets_a_stream_back_from_a_connection_that_does_not_know() {
    // The host's end of a connection is gone, and the target has not noticed.
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
fn a_list_reader_takes_nothing_from_the_owner() {
    let mut w = World::new(&[true]);
    let Owner { io, .. } = w.owner();
    let (third, _) = w.admin_as(THIRD, THIRD_ID, 0);
    assert_eq!(w.list(third, 0), Err(0x703));
    assert_eq!(w.settle(third, 1, &[(0, 0, false)]), 0x703);
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
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
fn flush_entries_are_listed_and_cover_others() {
    let mut w = World::new(&[true, true]);
    let Owner { admin, io, .. } = w.owner();
    let two = |seq, member, lba| Attribute { member: Member(member), ..attribute(seq, lba) };
    assert_eq!(w.call(io, ordered(1, &two(1, 0, 1), 0), &block(1)).status, 0);
    assert_eq!(w.call(io, ordered(2, &two(2, 1, 1), 0), &block(2)).status, 0);
    assert_eq!(w.call(io, ordered(3, &flush_entry(3, 0), 0), &[]).status, 0);
    w.hang_up(admin);
    let (admin, _) = w.successor(2);
    let page = w.list(admin, 0).unwrap();
    assert_eq!(page.entries[2].attribute.kind, Kind::Flush);
    assert_eq!(durable(&page), [1, 3], "on its own drive only (T4)");
}

#[test]
fn what_a_mark_reports_durable_may_stay_in_the_log() {
    let order = |cid, a: &Attribute, prepared: Option<u32>| {
        let mut sqe = wire::order_command(1, a.kind, a.lba, a.blocks);
        wire::put_attribute(&mut sqe, a, Seq(0));
        if let Some(block) = prepared {
            wire::put_prepared_block(&mut sqe, block);
        }
        riopipe_bytes(&sqe).cid(cid)
    };
    let mut w = World::new(&[true]);
    let Owner { io, .. } = w.owner();
    let flags = Flags::BOUNDARY.with(Flags::IN_PLACE).with(Flags::REDIRECTED);
    let redirected = Attribute { flags, ..attribute(1, 1) };
    assert_eq!(w.call(io, order(1, &redirected, Some(0x8182_8384)), &[]).status, 0);
    assert_eq!(w.call(io, order(2, &attribute(2, 2), None), &[]).status, 0);
    assert_eq!(w.call(io, order(3, &attribute(3, 3), None), &[]).status, 0);
    let mark = riopipe_bytes(&wire::durable_command(Seq(2))).cid(4);
    assert_eq!(w.call(io, mark, &[]).status, 0);
    let found = w.scan(0, 7);
    assert_eq!(found.released, Seq(0), "nothing is released");
    let entries = found.entries.iter().map(|e| (e.attribute.seq.0, e.persisted));
    assert_eq!(entries.collect::<Vec<_>>(), [(1, true), (2, true), (3, false)]);
    assert_eq!(found.entries[0].attribute.prepared_block(), Some(0x8182_8384));
    // The released mark drops them.
    let mark = riopipe_bytes(&wire::mark_command(Seq(2), true)).cid(5);
    assert_eq!(w.call(io, mark, &[]).status, 0);
    let left: Vec<u64> = w.scan(0, 7).entries.iter().map(|e| e.attribute.seq.0).collect();
    assert_eq!(left, [3]);
    // Only the metadata of an update can be redirected.
    let fresh = Attribute { flags: Flags::REDIRECTED, ..attribute(4, 4) };
    assert_eq!(w.call(io, order(6, &fresh, Some(1)), &[]).status, 0x708);
}
