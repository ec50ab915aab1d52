//! The plants of the target's session do what they promise: the simulator's oracle then reports
//! exactly the trap of the removed defence.
#![cfg(feature = "probe")]

mod world;

use riopipe_testkit::peer;
use std::sync::{Mutex, MutexGuard, PoisonError};

use riopipe_order::attribute::{Attribute, Flags, Seq};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_session::wire::Claim;
use world::recovery::{RIVAL, RIVAL_ID};
use world::{Owner, World, attribute, block, ordered};

/// One plant at a time in this process; taken out at the end.
struct Planted {
    _one: MutexGuard<'static, ()>,
}

fn plant(plant: Plant) -> Planted {
    static ONE: Mutex<()> = Mutex::new(());
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    probe::plant(Some(plant));
    Planted { _one: one }
}

impl Drop for Planted {
    fn drop(&mut self) {
        probe::plant(None);
    }
}

/// Whether this run counted a passage of a rare path.
fn counts(rare: Rare, f: impl FnOnce()) -> bool {
    let before = probe::counts()[rare as usize];
    f();
    probe::counts()[rare as usize] > before
}

/// An owner with one write done, not flushed.
fn with_one(volatile: bool) -> (World, Owner) {
    let mut w = World::new(&[volatile]);
    let owner = w.owner();
    assert_eq!(w.call(owner.io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    (w, owner)
}

/// A new owner of a volume whose first owner was fenced.
fn take_over(w: &mut World) -> (usize, usize) {
    let (rival, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let take = Claim { take_over: true, ..w.next_claim(2) };
    assert_eq!(w.claim(rival, &take).map(|c| c.status), Some(0));
    (rival, w.io_as(RIVAL, RIVAL_ID, cntlid, 1))
}

#[test]
fn t5_not_widened() {
    let near = 1 << 32;
    let bind_and_write = || {
        let mut w = World::new(&[true]);
        let (admin, cntlid) = w.admin();
        let claim = w.first_claim();
        assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
        let io = w.io(cntlid, 1);
        assert_eq!(w.bind(io, 0, 1, near).status, 0);
        let a = Attribute { ordinal: 1, ..attribute(near + 5, 1) };
        let wrote = w.call(io, ordered(1, &a, near), &block(1)).status;
        (wrote, w.own_list(io).unwrap().entries.first().map(|e| e.attribute.seq))
    };
    {
        let _planted = plant(Plant::T5NotWidened);
        assert_eq!(bind_and_write(), (0, None), "the entry is called group 5, released long ago");
    }
    let _none = plant(Plant::T1SmallestMark);
    assert_eq!(bind_and_write(), (0, Some(Seq(near + 5))));
}

#[test]
fn t7_answer_before_fence() {
    let _planted = plant(Plant::T7AnswerBeforeFence);
    let (w, _) = with_one(false);
    assert!((0..20).any(|seed| !w.scan(0, seed).entries[0].persisted));
}

#[test]
fn t7_write_before_fence() {
    let _planted = plant(Plant::T7WriteBeforeFence);
    let (w, _) = with_one(true);
    assert_eq!(w.host.drives[0].block(1), block(1));
    assert!((0..20).any(|seed| w.scan(0, seed).entries.is_empty()));
}

#[test]
fn t8_claim_no_wait() {
    let _planted = plant(Plant::T8ClaimNoWait);
    let (mut w, Owner { io, .. }) = with_one(true);
    w.host.drives[0].holds = true;
    w.command(io, ordered(2, &attribute(2, 2), 0), &block(2));
    assert!(counts(Rare::FenceWaited, || {
        let (rival, _) = take_over(&mut w);
        assert_eq!(w.list(rival, 0).unwrap().live, 2);
    }));
    assert_eq!(w.host.drives[0].pending.len(), 1, "and the old one's write is still to land");
    w.complete(0, 0);
    assert_eq!(w.host.drives[0].block(2), block(2));
}

#[test]
fn t8_stale_owner() {
    let _planted = plant(Plant::T8StaleOwner);
    let (mut w, Owner { io, .. }) = with_one(true);
    take_over(&mut w);
    assert_eq!(w.call(io, ordered(2, &attribute(2, 2), 0), &block(2)).status, 0);
    assert_eq!(w.host.drives[0].block(2), block(2));
    assert_eq!(w.call(io, peer::write_zeroes(3, 1, 1, 1, false), &[]).status, 0);
}

#[test]
fn t8_replay_no_wait() {
    let _planted = plant(Plant::T8ReplayNoWait);
    let (mut w, Owner { io, cntlid, .. }) = with_one(true);
    w.host.drives[0].holds = true;
    w.command(io, ordered(2, &attribute(2, 2), 0), &block(2));
    w.hang_up(io);
    let again = w.io(cntlid, 2);
    assert_eq!(w.bind_again(again, 0, 1, 0).status, 0, "the first copy is still to land");
    w.complete(0, 0);
    assert_eq!(w.own_list(again).unwrap().live, 2);
}

#[test]
fn t9_restart_early() {
    let _planted = plant(Plant::T9RestartEarly);
    let (mut w, _) = with_one(true);
    let (rival, io) = take_over(&mut w);
    assert_eq!(w.bind(io, 0, 2, 0).status, 0);
    w.hang_up(io);
    assert_eq!(w.list(rival, 0).unwrap().live, 0, "what was to be undone is forgotten");
}

#[test]
fn t9_forget_in_place() {
    let _planted = plant(Plant::T9ForgetInPlace);
    let mut w = World::new(&[true]);
    let Owner { io, .. } = w.owner();
    let mut a = attribute(1, 1);
    a.flags = a.flags.with(Flags::IN_PLACE);
    assert_eq!(w.call(io, ordered(1, &a, 0), &block(1)).status, 0);
    let (rival, _) = take_over(&mut w);
    assert_eq!(w.settle(rival, 2, &[(0, 0, true)]), 0);
    assert_eq!(w.list(rival, 0).unwrap().live, 0);
}

#[test]
fn t21_no_guard() {
    let _planted = plant(Plant::T21NoGuard);
    let (mut w, Owner { admin, .. }) = with_one(true);
    w.hang_up(admin);
    let (_, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let plain = w.io_as(RIVAL, RIVAL_ID, cntlid, 1);
    assert_eq!(w.call(plain, peer::write(1, 1, 1, 1), &block(9)).status, 0);
}

#[test]
fn t22_other_streams() {
    let _planted = plant(Plant::T22OtherStreams);
    let (mut w, Owner { io, cntlid, .. }) = with_one(true);
    let other = w.io(cntlid, 2);
    assert_eq!(w.bind(other, 1, 1, 0).status, 0);
    w.host.drives[0].holds = true;
    w.command(other, peer::flush(3, 1), &[]);
    w.fail(0, 0);
    w.host.drives[0].holds = false;
    let flush = Attribute { flags: Flags::BOUNDARY.with(Flags::FLUSH), ..attribute(2, 2) };
    assert_eq!(w.call(io, ordered(2, &flush, 0), &block(2)).status, 0, "it covers what is lost");
}

#[test]
fn rare_paths_are_counted_where_they_are_taken() {
    // Any plant that touches nothing here: it keeps the others out.
    let _none = plant(Plant::T1SmallestMark);
    let (mut w, Owner { cntlid, .. }) = with_one(true);
    let (_, third) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let plain = w.io_as(RIVAL, RIVAL_ID, third, 1);
    assert!(counts(Rare::Guarded, || {
        assert_eq!(w.call(plain, peer::write(1, 1, 1, 1), &block(9)).status, 0x70a);
    }));
    let other = w.io(cntlid, 2);
    assert!(counts(Rare::BindWaited, || assert_eq!(w.bind_again(other, 0, 1, 0).status, 0x709)));
    assert_eq!(w.bind_again(other, 0, 1, 0).status, 0);
    assert_eq!(w.call(other, ordered(2, &attribute(1, 1), 0), &block(1)).status, 0);
    assert!(counts(Rare::FlushFailedElsewhere, || {
        w.host.drives[0].failing = true;
        assert_eq!(w.call(plain, peer::flush(3, 1), &[]).status, 0x280);
        w.host.drives[0].failing = false;
        assert_eq!(w.call(other, ordered(2, &attribute(2, 2), 0), &block(2)).status, 0x707);
    }));
    w.hang_up(other);
    let again = w.io(cntlid, 3);
    assert_eq!(w.bind_again(again, 0, 1, 0).status, 0);
    assert!(counts(Rare::WriteFailed, || {
        w.host.drives[0].failing = true;
        assert_eq!(w.call(again, ordered(2, &attribute(1, 1), 0), &block(1)).status, 0x280);
        w.host.drives[0].failing = false;
    }));
    w.hang_up(again);
    let again = w.io(cntlid, 4);
    assert_eq!(w.bind_again(again, 0, 1, 0).status, 0);
    assert!(counts(Rare::FlushFailed, || {
        let flags = Flags::BOUNDARY.with(Flags::FLUSH);
        let flush = Attribute { flags, ordinal: 2, ..attribute(3, 3) };
        assert_eq!(w.call(again, ordered(2, &attribute(1, 1), 0), &block(1)).status, 0);
        w.host.drives[0].holds = true;
        w.command(again, ordered(2, &flush, 0), &block(2));
        w.complete(0, 0);
        w.fail(0, 0);
        w.host.drives[0].holds = false;
        assert_eq!(w.next(again).unwrap().completion().status, 0x280);
    }));
    w.hang_up(again);
    let again = w.io(cntlid, 5);
    assert_eq!(w.bind_again(again, 0, 1, 0).status, 0);
    assert!(counts(Rare::LogFailed, || {
        let (at, _) = w.partition(0);
        w.host.parts.fail_fences_after(at, 0);
        assert_eq!(w.call(again, ordered(2, &attribute(1, 1), 0), &block(1)).status, 0x711);
    }));
    assert!(counts(Rare::FencedOwner, || {
        take_over(&mut w);
        assert_eq!(w.call(again, ordered(2, &attribute(2, 2), 0), &block(2)).status, 0x702);
    }));
    assert!(counts(Rare::LogRefused, || {
        let (admin, _) = w.admin();
        let unknown = Claim {
            volume: riopipe_order::attribute::VolumeId([9; 16]),
            members: riopipe_session::wire::in_order([1]),
            ..w.next_claim(9)
        };
        assert_eq!(w.claim(admin, &unknown).unwrap().status, 0x70a, "its member is taken");
        let mut w = World::new(&[true]);
        let (admin, _) = w.admin();
        assert_eq!(w.claim(admin, &unknown).unwrap().status, 0x70c);
    }));
    assert!(counts(Rare::SeqWrap, || {
        let mut w = World::new(&[true]);
        let (admin, cntlid) = w.admin();
        let claim = w.first_claim();
        assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
        let io = w.io(cntlid, 1);
        let near = (1 << 32) - 1;
        assert_eq!(w.bind(io, 0, 1, near).status, 0);
        let a = Attribute { ordinal: 1, ..attribute(near + 1, 1) };
        assert_eq!(w.call(io, ordered(1, &a, near), &block(1)).status, 0);
    }));
}
