//! Ownership is a lease: an owner that is not calling for a moment keeps its volume, and its drives
//! are kept from others, until the lease has run out (T25).

mod world;

use peer::HOSTNQN;
use riopipe_order::attribute::{Attribute, Member, Seq, VolumeId};
use riopipe_order::log_region::{HEADER_BYTES, LogRegion, MemberNamespace, VolumeState};
use riopipe_session::target::Volumes;
use riopipe_session::wire::{self, Claim};
use riopipe_testkit::peer;
use world::recovery::{RIVAL, RIVAL_ID};
use world::{
    BOOT, LOG_LEN, Owner, VOLUME, World, attribute, block, crc, identity, ordered, riopipe_bytes,
};

const THIRD: &str = "nqn.2014-08.org.nvmexpress:uuid:third";
const THIRD_ID: [u8; 16] = *b"scripted-host-03";
const LEASE_MS: u32 = 45_000;
const LEASE_NS: u64 = 45_000_000_000;
const OWNED: u16 = 0x701;
const STALE: u16 = 0x702;
const NOT_OWNER: u16 = 0x703;
const GUARDED: u16 = 0x70a;
const UNRECOVERED: u16 = 0x704;
const BUSY: u16 = 0x709;
const LOG_LOST: u16 = 0x710;
const LOG_FAILED: u16 = 0x711;
const LEASE_OVER: u16 = 0x714;

fn leased(w: &World, generation: u32) -> Claim {
    Claim { lease_ms: LEASE_MS, ..w.next_claim(generation) }
}

/// An owner with a lease whose first group, in block 1, is written and released: its log is at
/// rest and empty.
fn idle_owner(w: &mut World) -> Owner {
    let (admin, cntlid) = w.admin();
    let claim = Claim { lease_ms: LEASE_MS, ..w.first_claim() };
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    let io = w.io(cntlid, 1);
    assert_eq!(w.bind(io, 0, 1, 0).status, 0);
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    let mark = riopipe_bytes(&wire::mark_command(Seq(1), true)).cid(5);
    assert_eq!(w.call(io, mark, &[]).status, 0);
    Owner { admin, cntlid, io }
}

/// Another host: its admin connection and an I/O queue.
fn rival(w: &mut World) -> (usize, usize) {
    let (admin, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    (admin, w.io_as(RIVAL, RIVAL_ID, cntlid, 1))
}

fn plain_write(w: &mut World, io: usize) -> u16 {
    w.call(io, peer::write(77, 1, 1, 1), &block(9)).status
}

fn claim(w: &mut World, admin: usize, generation: u32) -> u16 {
    let claim = leased(w, generation);
    w.claim(admin, &claim).unwrap().status
}

/// The owner's new association claims with generation 1 to go on.
fn resume(w: &mut World) -> (u16, u16) {
    let (admin, cntlid) = w.admin();
    let claim = Claim { resume: true, ..leased(w, 1) };
    (w.claim(admin, &claim).unwrap().status, cntlid)
}

fn state(w: &World) -> VolumeState {
    let header = w.host.parts.crash(5).part(0..HEADER_BYTES);
    LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap().volume(VOLUME).unwrap().state
}

#[test]
fn t25_an_idle_owner_that_is_not_calling_keeps_its_volume_and_its_guard() {
    let mut w = World::new(&[false]);
    let Owner { admin, .. } = idle_owner(&mut w);
    let (theirs, plain) = rival(&mut w);
    assert_eq!(w.status(theirs).lease_left_ms, 0, "it is there");
    w.hang_up(admin);
    for passed in [0, LEASE_NS / 2, LEASE_NS - 1] {
        w.host.now = world::NOW + passed;
        let s = w.status(theirs);
        let left = (LEASE_NS - passed).div_ceil(1_000_000) as u32;
        assert_eq!((s.owned, s.own, &s.owner[..]), (true, false, HOSTNQN));
        assert_eq!(s.lease_left_ms, left);
        assert_eq!(claim(&mut w, theirs, 2), OWNED, "T8");
        assert_eq!(plain_write(&mut w, plain), GUARDED, "T21");
        assert_eq!(state(&w), VolumeState::Owned);
    }
    let (status, cntlid) = resume(&mut w);
    assert_eq!(status, 0);
    let io = w.io(cntlid, 1);
    assert_eq!(w.bind_again(io, 0, 1, 1).status, 0);
    let second = Attribute { ordinal: 1, ..attribute(2, 2) };
    assert_eq!(w.call(io, ordered(1, &second, 1), &block(2)).status, 0);
    assert_eq!(w.host.drives[0].block(1), block(1), "P5");
    // The lease begins anew with the next loss only.
    w.host.now += 2 * LEASE_NS;
    assert_eq!(claim(&mut w, theirs, 2), OWNED);
    assert_eq!(w.status(theirs).lease_left_ms, 0);
}

#[test]
fn t25_after_the_lease_a_plain_claim_wins() {
    let mut w = World::new(&[false]);
    let Owner { admin, .. } = idle_owner(&mut w);
    let (theirs, _) = rival(&mut w);
    w.hang_up(admin);
    w.host.now += LEASE_NS;
    let s = w.status(theirs);
    assert!(!s.owned && s.lease_left_ms == 0);
    assert_eq!(claim(&mut w, theirs, 2), 0);
    assert_eq!(resume(&mut w).0, STALE);
    assert!(w.status(theirs).own);
}

#[test]
fn t25_after_the_lease_a_plain_host_may_write_and_the_old_owner_may_not() {
    let mut w = World::new(&[false]);
    let Owner { admin, .. } = idle_owner(&mut w);
    let (theirs, plain) = rival(&mut w);
    w.hang_up(admin);
    w.host.now += LEASE_NS;
    assert_eq!(state(&w), VolumeState::Owned, "until another host has a use for it");
    assert_eq!(plain_write(&mut w, plain), 0);
    assert_eq!(state(&w), VolumeState::Closed);
    assert_eq!(resume(&mut w).0, LEASE_OVER, "its blocks are not as it left them");
    let mut w = w.restart(3);
    assert_eq!(resume(&mut w).0, LEASE_OVER);
    let _ = theirs;
}

#[test]
fn t25_an_owner_may_come_back_late_if_no_other_was_there_before() {
    let mut w = World::new(&[false]);
    let Owner { admin, .. } = idle_owner(&mut w);
    let (theirs, plain) = rival(&mut w);
    w.hang_up(admin);
    w.host.now += 2 * LEASE_NS;
    assert!(!w.status(theirs).owned, "reading changes nothing");
    assert_eq!(resume(&mut w).0, 0);
    assert_eq!(plain_write(&mut w, plain), GUARDED);
    assert_eq!(claim(&mut w, theirs, 2), OWNED);
}

#[test]
fn t25_a_restarted_target_counts_the_lease_from_its_start() {
    let mut w = World::new(&[false]);
    idle_owner(&mut w);
    let mut w = w.restart(3);
    let (theirs, plain) = rival(&mut w);
    let s = w.status(theirs);
    assert!(s.owned && s.owner.starts_with("the host with id "), "{}", s.owner);
    assert_eq!(s.lease_left_ms, LEASE_MS);
    w.host.now += LEASE_NS - 1;
    assert_eq!(claim(&mut w, theirs, 2), OWNED, "with an empty log, too");
    assert_eq!(plain_write(&mut w, plain), GUARDED);
    // Another restart: it counts anew.
    let mut w = w.restart(4);
    let (theirs, plain) = rival(&mut w);
    w.host.now += LEASE_NS - 1;
    assert_eq!(claim(&mut w, theirs, 2), OWNED);
    assert_eq!(resume(&mut w).0, 0);
    assert_eq!(plain_write(&mut w, plain), GUARDED);
    let mut w = w.restart(5);
    let (theirs, plain) = rival(&mut w);
    w.host.now += LEASE_NS;
    assert_eq!(plain_write(&mut w, plain), 0);
    assert_eq!(claim(&mut w, theirs, 2), 0);
}

#[test]
fn t25_what_waits_for_recovery_is_guarded_beyond_the_lease() {
    let mut w = World::new(&[true]);
    let Owner { admin, io, .. } = idle_owner(&mut w);
    assert_eq!(w.call(io, ordered(1, &attribute(2, 2), 1), &block(2)).status, 0);
    let (theirs, plain) = rival(&mut w);
    w.hang_up(admin);
    w.host.now += 2 * LEASE_NS;
    let s = w.status(theirs);
    assert!(!s.owned && s.unrecovered);
    assert_eq!(plain_write(&mut w, plain), GUARDED);
    assert_eq!(claim(&mut w, theirs, 2), 0, "no take-over is needed");
    assert_eq!(plain_write(&mut w, plain), 0, "its own");
    assert_eq!(resume(&mut w).0, STALE);
}

#[test]
fn t25_within_the_lease_a_take_over_is_explicit() {
    let mut w = World::new(&[false]);
    let Owner { admin, .. } = idle_owner(&mut w);
    let (theirs, _) = rival(&mut w);
    w.hang_up(admin);
    let take = Claim { take_over: true, ..leased(&w, 2) };
    assert_eq!(w.claim(theirs, &take).unwrap().status, 0);
    assert_eq!(resume(&mut w).0, STALE);
}

#[test]
fn t25_the_guard_stays_while_a_write_of_the_lost_owner_is_in_flight() {
    let mut w = World::new(&[false]);
    let Owner { admin, cntlid, .. } = idle_owner(&mut w);
    let label = w.io(cntlid, 2);
    let (theirs, plain) = rival(&mut w);
    w.host.drives[0].holds = true;
    w.command(label, peer::write(1, 1, 1, 1), &block(3));
    w.hang_up(admin);
    w.host.now += 2 * LEASE_NS;
    assert_eq!(plain_write(&mut w, plain), GUARDED, "it could land over what is written now");
    w.host.drives[0].holds = false;
    w.complete(0, 0);
    assert_eq!(plain_write(&mut w, plain), 0);
    assert_eq!(w.host.drives[0].block(1), block(9));
    let _ = theirs;
}

#[test]
fn t25_an_owner_that_sends_nothing_is_lost_when_its_keep_alive_runs_out() {
    let mut w = World::new(&[false]);
    let (admin, _) = w.admin_as(HOSTNQN, peer::HOSTID, 15_000);
    let first = Claim { lease_ms: LEASE_MS, ..w.first_claim() };
    assert_eq!(w.claim(admin, &first).unwrap().status, 0);
    w.host.now += 14_999_000_000;
    w.tick();
    let (theirs, plain) = rival(&mut w);
    assert_eq!(w.status(theirs).lease_left_ms, 0);
    w.host.now += 1_000_000;
    w.tick();
    assert!(w.links[admin].closed.is_some());
    assert_eq!(w.status(theirs).lease_left_ms, LEASE_MS);
    assert_eq!(claim(&mut w, theirs, 2), OWNED);
    w.host.now += LEASE_NS;
    assert_eq!(plain_write(&mut w, plain), 0);
}

#[test]
fn t25_a_release_ends_the_lease_at_once_even_if_its_answer_gets_lost() {
    let mut w = World::new(&[false]);
    let Owner { admin, io, .. } = idle_owner(&mut w);
    let (theirs, plain) = rival(&mut w);
    w.host.drives[0].holds = true;
    w.command(io, peer::write(1, 1, 1, 1), &block(3));
    let release = riopipe_bytes(&wire::release_command(VOLUME, false)).cid(52);
    w.command(admin, release, &[]);
    assert_eq!(w.next(admin), None, "its writes come back first");
    w.hang_up(admin);
    assert_eq!(plain_write(&mut w, plain), GUARDED);
    w.host.drives[0].holds = false;
    w.complete(0, 0);
    assert!(!w.status(theirs).owned);
    assert_eq!(plain_write(&mut w, plain), 0);
    assert_eq!(claim(&mut w, theirs, 2), 0);
}

#[test]
fn t25_a_release_ends_the_lease_of_no_other_volume() {
    const OTHER: VolumeId = VolumeId([8; 16]);
    let mut w = World::new(&[false, false]);
    let (admin, cntlid) = w.admin();
    for (volume, nsid) in [(VOLUME, 1), (OTHER, 2)] {
        let members = wire::in_order([nsid]);
        let first = Claim { volume, members, lease_ms: LEASE_MS, ..w.first_claim() };
        assert_eq!(w.claim(admin, &first).unwrap().status, 0);
    }
    let io = w.io(cntlid, 1);
    let (theirs, _) = rival(&mut w);
    w.host.drives[1].holds = true;
    w.command(io, peer::write(1, 2, 1, 1), &block(3));
    w.command(admin, riopipe_bytes(&wire::release_command(OTHER, false)).cid(52), &[]);
    assert_eq!(w.next(admin), None, "its writes come back first");
    w.hang_up(admin);
    w.complete(1, 0);
    assert!(!w.status_of(theirs, OTHER).owned);
    assert_eq!(w.status(theirs).lease_left_ms, LEASE_MS);
}

#[test]
fn t25_an_owner_that_closed_the_volume_does_not_go_on_with_it() {
    let mut w = World::new(&[false]);
    let Owner { admin, .. } = idle_owner(&mut w);
    let release = riopipe_bytes(&wire::release_command(VOLUME, false)).cid(52);
    assert_eq!(w.call(admin, release, &[]).status, 0);
    assert_eq!(resume(&mut w).0, LEASE_OVER);
    let (theirs, _) = rival(&mut w);
    let back = Claim { resume: true, ..leased(&w, 1) };
    assert_eq!(w.claim(theirs, &back).unwrap().status, NOT_OWNER);
}

#[test]
fn t25_another_volume_gets_a_drive_only_when_the_lease_is_over() {
    let mut w = World::new(&[false]);
    let Owner { admin, .. } = idle_owner(&mut w);
    let (theirs, _) = rival(&mut w);
    w.hang_up(admin);
    let other = riopipe_order::attribute::VolumeId([8; 16]);
    let other = Claim { volume: other, lease_ms: LEASE_MS, ..w.first_claim() };
    assert_eq!(w.claim(theirs, &other).unwrap().status, GUARDED);
    w.host.now += LEASE_NS;
    assert_eq!(w.claim(theirs, &other).unwrap().status, 0);
    assert_eq!(resume(&mut w).0, GUARDED);
}

#[test]
fn t25_a_clean_stop_closes_volumes_without_a_lease() {
    for (passed, expected) in [(LEASE_NS - 1, VolumeState::Owned), (LEASE_NS, VolumeState::Closed)]
    {
        let mut w = World::new(&[false]);
        let Owner { admin, .. } = idle_owner(&mut w);
        w.hang_up(admin);
        let now = w.host.now + passed;
        w.host.shared.end_service(now, || Ok(())).unwrap();
        assert_eq!(state(&w), expected);
    }
}

#[test]
fn t25_an_owner_without_replay_asks_for_no_lease() {
    let mut w =
        World::over(&[false], identity(), world::Parts::default(), Volumes::without_log(crc));
    let (admin, _) = w.admin();
    let unlogged = Claim { unlogged: true, create: false, lease_ms: 0, ..w.first_claim() };
    assert_eq!(w.claim(admin, &unlogged).unwrap().status, 0);
    let (theirs, plain) = rival(&mut w);
    w.hang_up(admin);
    assert!(!w.status(theirs).owned);
    // No other host has been there yet: the owner may have it back, to open its streams anew.
    let back = Claim { resume: true, ..unlogged.clone() };
    let (admin, _) = w.admin();
    assert_eq!(w.claim(admin, &back).unwrap().status, 0);
    w.hang_up(admin);
    assert_eq!(plain_write(&mut w, plain), 0);
    let (admin, _) = w.admin();
    assert_eq!(w.claim(admin, &back).unwrap().status, LEASE_OVER);
}

/// How an owner ends that has taken a volume over, while its claim waits for a late operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Lost,
    Released,
}

impl End {
    fn of(self, w: &mut World, admin: usize) {
        match self {
            Self::Lost => w.hang_up(admin),
            Self::Released => assert_eq!(release(w, admin, false).unwrap(), 0),
        }
    }
}

fn release(w: &mut World, admin: usize, forget: bool) -> Option<u16> {
    w.command(admin, riopipe_bytes(&wire::release_command(VOLUME, forget)).cid(52), &[]);
    w.completions(admin).last().map(|done| done.status)
}

fn plain_host(w: &mut World) -> usize {
    let (_, cntlid) = w.admin_as(THIRD, THIRD_ID, 0);
    w.io_as(THIRD, THIRD_ID, cntlid, 1)
}

#[test]
fn t21_the_guard_stays_while_a_write_of_the_owner_before_the_last_one_is_in_flight() {
    for case in 0..8 {
        let (has_log, first_is_lost) = (case & 1 != 0, case & 2 != 0);
        let end = if case & 4 != 0 { End::Lost } else { End::Released };
        let mut w = match has_log {
            true => World::new(&[false]),
            false => {
                let without_log = Volumes::without_log(crc);
                World::over(&[false], identity(), world::Parts::default(), without_log)
            }
        };
        let (admin, cntlid) = w.admin();
        let first = Claim { unlogged: !has_log, create: has_log, lease_ms: 0, ..w.first_claim() };
        assert_eq!(w.claim(admin, &first).unwrap().status, 0);
        let io = w.io(cntlid, 1);
        let (next_owner, _) = rival(&mut w);
        let plain = plain_host(&mut w);
        w.host.drives[0].holds = true;
        // An owner of a volume with a log makes plain writes, too: labels, and with engine `sync` all.
        w.command(io, peer::write(1, 1, 1, 1), &block(3));
        if first_is_lost {
            w.hang_up(admin);
        }
        let take_over = Claim { take_over: true, create: false, generation: 2, ..first };
        assert_eq!(w.claim(next_owner, &take_over), None, "it waits for the write");
        end.of(&mut w, next_owner);
        let why = "the first owner's write could land over what is written now";
        let case = (has_log, first_is_lost, end);
        assert_eq!(plain_write(&mut w, plain), GUARDED, "{why} {case:?}");
        if has_log && end == End::Lost {
            assert_eq!(state(&w), VolumeState::Owned, "nobody else has written, {case:?}");
        }
        w.host.drives[0].holds = false;
        w.complete(0, 0);
        assert_eq!(plain_write(&mut w, plain), 0, "{case:?}");
        assert_eq!(w.host.drives[0].block(1), block(9));
        if has_log {
            assert_eq!(state(&w), VolumeState::Closed, "before others write, {case:?}");
        }
    }
}

#[test]
fn t21_the_guard_stays_while_a_fenced_owner_carries_a_stream() {
    for (end, needs_recovery) in
        [(End::Released, false), (End::Released, true), (End::Lost, false), (End::Lost, true)]
    {
        let mut w = World::new(&[false]);
        let Owner { io, .. } = idle_owner(&mut w);
        let (theirs, _) = rival(&mut w);
        let plain = plain_host(&mut w);
        w.host.drives[0].holds = true;
        match needs_recovery {
            true => w.command(io, ordered(2, &attribute(2, 1), 1), &block(2)),
            false => w.command(io, peer::read(2, 1, 1, 1), &[]),
        }
        let take_over = Claim { take_over: true, lease_ms: 0, ..leased(&w, 2) };
        assert_eq!(w.claim(theirs, &take_over), None, "it waits for the operation");
        end.of(&mut w, theirs);
        assert_eq!(plain_write(&mut w, plain), GUARDED, "recovery could undo the write");
        let (third, _) = w.admin_as(THIRD, THIRD_ID, 0);
        let unlogged = Claim { unlogged: true, ..leased(&w, 3) };
        assert_eq!(w.claim(third, &unlogged).unwrap().status, UNRECOVERED);
        w.host.drives[0].holds = false;
        w.complete(0, 0);
        w.deliver();
        let (expected, record) = match needs_recovery {
            true => (GUARDED, VolumeState::Owned),
            false => (0, VolumeState::Closed),
        };
        assert_eq!(plain_write(&mut w, plain), expected, "{end:?}");
        assert_eq!(state(&w), record, "{end:?}");
    }
}

/// Nothing would be known of an operation that is in flight to a volume that is forgotten.
#[test]
fn t21_a_volume_is_forgotten_once_nothing_of_it_is_in_flight() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = idle_owner(&mut w);
    let (theirs, _) = rival(&mut w);
    let plain = plain_host(&mut w);
    w.host.drives[0].holds = true;
    w.command(io, ordered(2, &attribute(2, 1), 1), &block(2));
    let take_over = Claim { take_over: true, ..leased(&w, 2) };
    assert_eq!(w.claim(theirs, &take_over), None, "it waits for the write");
    assert_eq!(release(&mut w, theirs, true), None, "it waits, too");
    assert_eq!(plain_write(&mut w, plain), GUARDED);
    w.host.drives[0].holds = false;
    w.complete(0, 0);
    assert_eq!(plain_write(&mut w, plain), 0);
    assert!(w.completions(theirs).iter().all(|done| done.status == 0), "the claim, the release");
    assert!(!w.status(theirs).known);
}

#[test]
fn t21_a_volume_is_not_forgotten_while_a_stream_of_it_is_bound() {
    let mut w = World::new(&[false]);
    let Owner { admin, cntlid, io } = idle_owner(&mut w);
    let second = w.io(cntlid, 2);
    let plain = plain_host(&mut w);
    w.host.drives[0].holds = true;
    w.command(io, ordered(2, &attribute(2, 1), 1), &block(2));
    assert_eq!(release(&mut w, admin, true), None, "it waits for the write");
    assert_eq!(w.bind(second, 1, 1, 0).status, 0, "it is the owner still");
    w.host.drives[0].holds = false;
    w.complete(0, 0);
    assert_eq!(w.completions(admin).last().unwrap().status, BUSY);
    assert_eq!(plain_write(&mut w, plain), GUARDED);
    assert_eq!(release(&mut w, admin, true), Some(0), "the stream was taken back");
    assert_eq!(plain_write(&mut w, plain), 0);
}

#[test]
fn t21_an_owner_keeps_a_volume_whose_log_fails_at_the_release() {
    let mut w = World::new(&[false]);
    let Owner { admin, io, .. } = idle_owner(&mut w);
    let plain = plain_host(&mut w);
    w.hang_up(io);
    w.host.parts.fail_fences_after(0, 0);
    assert_eq!(release(&mut w, admin, false), Some(LOG_FAILED));
    assert_eq!(plain_write(&mut w, plain), GUARDED, "the log says that it is owned");
    assert!(w.status(admin).own);
}

/// The zeroing of a recovery that was given up can arrive after its owner has released the volume.
#[test]
fn t8_a_late_plain_write_of_an_owner_that_has_released_is_refused() {
    for forget in [false, true] {
        let mut w = World::new(&[false]);
        let Owner { admin, cntlid, io } = idle_owner(&mut w);
        assert_eq!(w.call(io, ordered(2, &attribute(2, 1), 1), &block(2)).status, 0);
        let drives = w.io(cntlid, 2);
        assert_eq!(plain_write(&mut w, drives), 0, "as owner");
        w.hang_up(io);
        assert_eq!(release(&mut w, admin, forget), Some(0));
        let (theirs, plain) = rival(&mut w);
        if !forget {
            assert_eq!(plain_write(&mut w, plain), GUARDED, "there is an entry to recover");
            let unguarded = Claim { lease_ms: 0, ..leased(&w, 2) };
            assert_eq!(w.claim(theirs, &unguarded).unwrap().status, 0, "without a take-over");
            assert_eq!(release(&mut w, theirs, true), Some(0));
        }
        assert_ne!(plain_write(&mut w, drives), 0, "forget: {forget}");
        let third = plain_host(&mut w);
        assert_eq!(plain_write(&mut w, third), 0);
    }
}

#[test]
fn t25_a_release_ends_the_lease_also_for_the_next_incarnation() {
    let mut w = World::new(&[false]);
    let Owner { admin, io, .. } = idle_owner(&mut w);
    assert_eq!(w.call(io, ordered(2, &attribute(2, 1), 1), &block(2)).status, 0);
    w.hang_up(io);
    assert_eq!(release(&mut w, admin, false), Some(0));
    let header = w.host.parts.crash(5).part(0..HEADER_BYTES);
    let region = LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap();
    let record = region.volume(VOLUME).unwrap();
    assert_eq!((record.state, record.lease_ms), (VolumeState::Owned, 0));
}

/// The last stream of a volume without an owner comes home, and no fence waits for it.
#[test]
fn t21_the_guard_opens_when_the_last_stream_of_a_released_volume_ends() {
    let mut w = World::new(&[false]);
    let Owner { admin, cntlid, .. } = idle_owner(&mut w);
    let (slow, second) = (w.io(cntlid, 2), w.io(cntlid, 3));
    let plain = plain_host(&mut w);
    w.host.drives[0].holds = true;
    w.command(slow, peer::write(2, 1, 1, 1), &block(2));
    assert_eq!(release(&mut w, admin, false), None, "it waits for the write");
    assert_eq!(w.bind(second, 1, 1, 0).status, 0, "it is the owner still");
    w.host.drives[0].holds = false;
    w.complete(0, 0);
    assert_eq!(w.completions(admin).last().unwrap().status, 0);
    assert_eq!(plain_write(&mut w, plain), GUARDED, "a stream is bound");
    w.hang_up(second);
    assert_eq!(plain_write(&mut w, plain), 0);
}

#[test]
fn t18_only_its_owner_has_a_volume_forgotten_while_there_is_one() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = idle_owner(&mut w);
    let (theirs, _) = rival(&mut w);
    w.hang_up(io);
    let at = w.partition(1).0;
    w.host.parts.fail_fences_after(at, 0);
    let give_up = Claim { give_up: true, take_over: true, create: true, ..leased(&w, 2) };
    assert_eq!(w.claim(theirs, &give_up).unwrap().status, LOG_FAILED);
    assert_eq!(release(&mut w, theirs, true), Some(NOT_OWNER));
    // The log was begun anew in part: no claim relies on it before it is given up as a whole (T26).
    let take_over = Claim { take_over: true, ..leased(&w, 3) };
    assert_eq!(w.claim(theirs, &take_over).unwrap().status, LOG_LOST);
}

/// A host that always reads delays no claim: each waits only for the reads that were there before.
#[test]
fn t28_a_fence_does_not_wait_for_operations_that_began_after_it() {
    let without_log = Volumes::without_log(crc);
    let mut w = World::over(&[false, false], identity(), world::Parts::default(), without_log);
    let plain = plain_host(&mut w);
    for nsid in [1, 2] {
        assert_eq!(w.call(plain, peer::write(nsid as u16, nsid, 1, 1), &block(9)).status, 0);
    }
    let claims = [1, 2].map(|nsid| {
        let members = vec![MemberNamespace { nsid, member: Member(0) }];
        let volume = riopipe_order::attribute::VolumeId([nsid as u8; 16]);
        let unlogged = Claim { unlogged: true, create: false, ..w.first_claim() };
        Claim { volume, members, ..unlogged }
    });
    let (admin, _) = w.admin();
    let (theirs, _) = rival(&mut w);
    w.host.drives[0].holds = true;
    w.command(plain, peer::read(11, 1, 1, 1), &[]);
    assert_eq!(w.claim(admin, &claims[0]), None, "it waits for the first read");
    w.command(plain, peer::read(12, 1, 1, 1), &[]);
    assert_eq!(w.claim(theirs, &claims[1]), None, "it waits for both");
    w.complete(0, 0);
    assert_eq!(w.completions(admin).last().map(|done| done.status), Some(0));
    assert_eq!(w.completions(theirs).len(), 0);
    w.complete(0, 0);
    assert_eq!(w.completions(theirs).last().map(|done| done.status), Some(0));
}
