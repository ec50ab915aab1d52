//! The log of a target after a restart: closed, unrecovered, cut off in a creation, or lost.

mod world;

use riopipe_order::attribute::{Seq, VolumeId};
use riopipe_order::log_region::opening::Place;
use riopipe_order::log_region::{
    Class, HEADER_BYTES, LogKind, LogRegion, NewVolume, RegionHeader, VolumeState, inspect,
};
use riopipe_session::target::{Found, Volumes};
use riopipe_session::wire;
use riopipe_testkit::peer;
use world::{
    BOOT, LOG_LEN, Owner, VOLUME, World, attribute, block, crc, identity, ordered, riopipe_bytes,
};

const OTHER: VolumeId = VolumeId([8; 16]);

#[test]
fn t21_an_unrecovered_volume_is_guarded_even_after_a_restart() {
    let mut w = World::new(&[true]);
    let Owner { io, .. } = w.owner();
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    // The target is killed and started again.
    let mut w = World::with(&[true], identity(), w.host.parts.crash(3));
    let (admin, cntlid) = w.admin();
    let s = w.status(admin);
    assert!(s.known && !s.owned && s.unrecovered);
    assert_eq!((s.generation, s.live_entries), (1, 1));
    let plain = w.io(cntlid, 1);
    assert_eq!(w.call(plain, peer::write(1, 1, 0, 1), &block(1)).status, 0x70a);
    let stale = w.next_claim(1);
    assert_eq!(w.claim(admin, &stale).unwrap().status, 0x702, "generations outlive the target");
    let unlogged = wire::Claim { unlogged: true, ..w.next_claim(2) };
    assert_eq!(
        w.claim(admin, &unlogged).unwrap().status,
        0x704,
        "another engine does not avoid that"
    );
    let claim = w.next_claim(2);
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    assert_eq!(w.bind(plain, 0, 2, 0).status, 0x704);
    assert_eq!(w.bind(plain, 1, 2, 0).status, 0x704, "no stream before all are recovered (T20)");
}

#[test]
fn a_cleanly_closed_volume_opens_again_after_a_restart() {
    let mut w = World::new(&[false]);
    let Owner { admin, io, .. } = w.owner();
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    let mark = wire::mark_command(Seq(1), true);
    assert_eq!(w.call(io, riopipe_bytes(&mark).cid(5), &[]).status, 0);
    w.hang_up(io);
    assert_eq!(w.release(admin, false), 0);
    let mut w = World::with(&[false], identity(), w.host.parts.crash(3));
    let (admin, cntlid) = w.admin();
    let plain = w.io(cntlid, 1);
    assert_eq!(w.call(plain, peer::write(1, 1, 9, 1), &block(1)).status, 0, "not guarded");
    let claim = w.next_claim(2);
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    let bound = w.bind(plain, 0, 2, 1);
    assert_eq!((bound.status, bound.result >> 32), (0, 2), "a new incarnation");
    assert_eq!(
        w.call(
            plain,
            ordered(
                1,
                &{
                    let mut a = attribute(2, 3);
                    a.ordinal = 1;
                    a
                },
                1
            ),
            &block(5)
        )
        .status,
        0
    );
}

/// Blank partitions of a volume that was never claimed are not the volume's log.
#[test]
fn t24_a_creation_that_a_crash_cut_off_is_forgotten() {
    let mut w = World::new(&[false]);
    let _ = w.owner();
    let parts = w.host.parts.crash(1);
    let header = parts.part(0..HEADER_BYTES);
    let mut region = LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap();
    let members = wire::in_order([1]);
    let new = NewVolume { id: OTHER, streams: 1, slots: 4, members };
    region.add_volume(new, |_, _| Ok(())).unwrap();
    let w = World::with(&[false], identity(), parts);
    assert!(w.host.shared.volumes().live_entries(OTHER).is_none(), "never claimed");
    assert!(w.host.shared.volumes().live_entries(VOLUME).is_some());
    let header = w.host.parts.crash(2).part(0..HEADER_BYTES);
    let region = LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap();
    assert_eq!(region.header().volumes.len(), 1, "and its place is free");
}

#[test]
fn t19_a_lost_log_is_refused_until_given_up() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    let parts = w.host.parts.crash(1);
    let header = match inspect(&parts.part(0..HEADER_BYTES), LOG_LEN, BOOT, crc) {
        Class::Ours(header) => header,
        other => panic!("{other:?}"),
    };
    let mut w = World::over(&[false], identity(), parts, Volumes::with_lost_log(header, crc));
    let (admin, cntlid) = w.admin();
    let s = w.status(admin);
    assert!(s.known && s.log_lost && !s.damaged && !s.owned);
    assert!(!w.host.shared.volumes().lost_log_given_up());
    let plain = w.io(cntlid, 1);
    assert_eq!(w.call(plain, peer::write(1, 1, 0, 1), &block(1)).status, 0x70a);
    let claim = w.next_claim(9);
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0x710);
    assert_eq!(w.release(admin, false), 0x703);
    assert_eq!(w.release(admin, true), 0, "given up by name");
    assert!(!w.status(admin).known);
    assert_eq!(w.call(plain, peer::write(1, 1, 0, 1), &block(1)).status, 0);
    assert!(w.host.shared.volumes().lost_log_given_up());
}

/// Only the lost log's header knows how much of the log each volume had. If the first volume to
/// come back got all of it, the next would find no space.
#[test]
fn t19_after_a_loss_each_volume_gets_the_slots_it_had() {
    let claims = |w: &World| {
        let claim = |volume, slots, nsid| wire::Claim {
            volume,
            slots,
            streams: 8,
            members: wire::in_order([nsid]),
            ..w.first_claim()
        };
        [claim(VOLUME, 900, 1), claim(OTHER, 1000, 2)]
    };
    let mut w = World::new(&[false, false]);
    let (admin, _) = w.admin();
    for claim in claims(&w) {
        assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    }
    let mut lost = w.lost_header();
    let slots = |again: [usize; 2], lost: RegionHeader, stay: bool| {
        let mut w = World::after_loss(lost);
        let mut given = [0; 2];
        for (nth, at) in again.into_iter().enumerate() {
            if nth == 1 && !stay {
                // The target's memory of the lost log ends with it.
                w = World::with(&[false; 2], identity(), w.host.parts.crash(2));
            }
            let (admin, _) = w.admin();
            let claim = claims(&w)[at].clone();
            let claim = wire::Claim { generation: 2, give_up: true, slots: 0, ..claim };
            assert_eq!(w.claim(admin, &claim).unwrap().status, 0, "{again:?}");
            given[at] = w.status_of(admin, claim.volume).slots;
        }
        given
    };
    assert_eq!(slots([0, 1], lost.clone(), true), [900, 1000]);
    assert_eq!(slots([1, 0], lost.clone(), true), [900, 1000]);
    // A volume that comes later finds space all the same.
    assert_eq!(slots([0, 1], lost.clone(), false)[0], 900);
    assert_eq!(slots([1, 0], lost.clone(), false)[1], 1000);
    lost.volumes.clear();
    let [first, second] = slots([0, 1], lost.clone(), true);
    assert!(first > 400 && second > 200, "of an unknown log: {first}, {second}");
}

/// The undo that the lost log required is unknown, even if the header calls the volume closed.
#[test]
fn t19_the_drives_of_a_closed_volume_are_guarded_if_its_log_is_lost() {
    let mut w = World::new(&[false]);
    let Owner { admin, .. } = w.owner();
    assert_eq!(w.release(admin, false), 0);
    let plain_write = |w: &mut World| {
        let (_, cntlid) = w.admin();
        let io = w.io(cntlid, 1);
        w.call(io, peer::write(1, 1, 0, 1), &block(1)).status
    };
    assert_eq!(plain_write(&mut w), 0, "it is closed");
    let mut w = w.restart_with_lost_log(1);
    assert_eq!(plain_write(&mut w), 0x70a);
}

/// Entries that need recovery guard the drives, even if the header calls the volume closed.
#[test]
fn t21_entries_to_recover_guard_the_drives_of_any_volume() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    let header = w.host.parts.part(0..HEADER_BYTES);
    let mut region = LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap();
    region.set_state(VOLUME, VolumeState::Closed).unwrap();
    let mut w = w.restart(1);
    let (admin, cntlid) = w.admin();
    let s = w.status(admin);
    assert!(!s.owned && s.unrecovered && !s.log_lost);
    let io = w.io(cntlid, 1);
    assert_eq!(w.call(io, peer::write(1, 1, 1, 1), &block(2)).status, 0x70a);
}

/// The space of a volume that was forgotten is not kept for it, and the space of others is.
#[test]
fn t19_after_a_loss_a_forgotten_volume_leaves_the_others_their_slots() {
    let mut w = World::new(&[false, false]);
    let (admin, _) = w.admin();
    let claim = |w: &World, volume, slots, nsid| wire::Claim {
        volume,
        slots,
        streams: 8,
        members: wire::in_order([nsid]),
        ..w.first_claim()
    };
    let claims = [claim(&w, VOLUME, 900, 1), claim(&w, OTHER, 1000, 2)];
    for claim in &claims {
        assert_eq!(w.claim(admin, claim).unwrap().status, 0);
    }
    let lost = w.lost_header();
    let mut w = World::after_loss(lost);
    let (admin, _) = w.admin();
    let again = claims.map(|claim| wire::Claim { generation: 2, give_up: true, slots: 0, ..claim });
    assert_eq!(w.claim(admin, &again[0]).unwrap().status, 0);
    assert_eq!(w.release(admin, true), 0);
    assert_eq!(w.claim(admin, &again[1]).unwrap().status, 0);
    assert_eq!(w.status_of(admin, OTHER).slots, 1000);
}

#[test]
fn an_opened_log_is_reported_with_what_was_found_there() {
    let parts = world::Parts::default();
    let open = |parts: &world::Parts, accept_lost| {
        let header = parts.part(0..HEADER_BYTES);
        let mine = parts.clone();
        let split = Box::new(move |range: std::ops::Range<usize>| Ok(mine.part(range)));
        let place = Place { len: LOG_LEN, kind: LogKind::Dax, boot: BOOT, is_restored: true };
        Volumes::open(header, split, place, accept_lost, [4; 16], crc).unwrap()
    };
    assert_eq!(open(&parts, false).found, Found::Nothing);
    let opened = open(&parts, false);
    assert_eq!(opened.found, Found::Log { has_volumes: false });
    let mut w = World::over(&[false], identity(), parts.clone(), opened.volumes);
    let (admin, _) = w.admin();
    let claim = w.first_claim();
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    drop(w);
    assert_eq!(open(&parts, false).found, Found::Log { has_volumes: true });
}
