//! Making a volume.

use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;
use riopipe_order::log_region::{HEADER_BYTES, LogKind, LogRegion, NewVolume};
use riopipe_order::region::RegionError;
use riopipe_session::initiator::association::ControlQueue;
use riopipe_session::initiator::volume::creation::VolumeCreationConfig;
use riopipe_session::initiator::volume::error::{VolumeCreateError, VolumeOpenError};
use riopipe_session::initiator::volume::members::{MemberPlace, MembersError};
use riopipe_session::initiator::volume::opening::VolumeOpeningConfig;
use riopipe_session::label::DATA_START;
use riopipe_session::target::limits::{LOG_SLOTS_MAX, STREAM_SLOTS_MAX};
use riopipe_session::target::{Split, Volumes};
use riopipe_session::wire::in_order;

use crate::cluster::{Cluster, creating, opening};
use crate::opening::crash_with_a_gap;
use crate::world::{BOOT, Part, Parts, VOLUME, World, crc, identity};

fn again(targets: usize) -> VolumeCreationConfig {
    VolumeCreationConfig { volume: VolumeId([9; 16]), name: "data".into(), ..creating(targets) }
}

fn named(name: &str, targets: usize) -> VolumeOpeningConfig {
    VolumeOpeningConfig { name: Some(name.into()), ..opening(targets) }
}

fn knows(cluster: &Cluster, volume: VolumeId) -> bool {
    cluster.worlds.iter().any(|w| w.host.shared.volumes().live_entries(volume).is_some())
}

#[test]
fn what_makes_no_volume_is_refused_before_any_target_is_asked() {
    let mut cluster = Cluster::new(1);
    let wrong: [(VolumeCreationConfig, &str); 5] = [
        (VolumeCreationConfig { name: "a\n".into(), ..creating(1) }, "control characters"),
        (VolumeCreationConfig { places: Vec::new(), ..creating(1) }, "1 to 120 members"),
        (VolumeCreationConfig { streams: 0, ..creating(1) }, "1 to 1024 streams"),
        (VolumeCreationConfig { unit_blocks: 1 << 21, ..creating(1) }, "stripe unit"),
        (
            VolumeCreationConfig {
                places: vec![MemberPlace { target: 0, nsid: 1 }; 17],
                ..creating(1)
            },
            "16 members on one target",
        ),
    ];
    for (config, what) in wrong {
        let error = cluster.create(config).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    }
    assert!(cluster.worlds[0].links.is_empty());
}

#[test]
fn drives_that_cannot_be_distinguished_or_are_too_small_are_refused() {
    let mut cluster = Cluster::new(2);
    let place = |target, nsid| MemberPlace { target, nsid };
    let with = |places| VolumeCreationConfig { places, ..creating(2) };
    let twice = cluster.create(with(vec![place(0, 1), place(0, 1)])).unwrap_err();
    assert_eq!(twice, VolumeCreateError::DuplicateMember { member: 1 });
    let same = cluster.create(with(vec![place(0, 1), place(1, 1)])).unwrap_err();
    assert_eq!(same, VolumeCreateError::SameNguid { member: 1 });
    let none = cluster.create(with(vec![place(0, 1), place(1, 7)])).unwrap_err();
    assert_eq!(none, VolumeCreateError::NoNamespace { member: 1 });
    let huge = VolumeCreationConfig { unit_blocks: 1 << 20, ..creating(2) };
    let small = cluster.create(huge).unwrap_err();
    assert!(matches!(small, VolumeCreateError::TooSmall { member: 0, .. }), "{small}");
    assert!(!knows(&cluster, VOLUME));
}

#[test]
fn a_volume_is_made_once_and_released() {
    let mut cluster = Cluster::with_volume(2);
    assert!(cluster.worlds.iter().all(|w| w.host.shared.volumes().owner(VOLUME).is_none()));
    let error = cluster.create(again(2)).unwrap_err();
    assert_eq!(error, VolumeCreateError::InUse { member: 0, volume: "logs".into() });
    assert!(!knows(&cluster, VolumeId([9; 16])));
}

#[test]
fn what_an_earlier_volume_kept_is_not_taken_for_the_new_ones() {
    let mut cluster = Cluster::with_volume(2);
    let config = VolumeCreationConfig { force: true, ..again(2) };
    assert_eq!(cluster.create(config).unwrap().volume, VolumeId([9; 16]));
    for (target, drive) in [(0, 0), (1, 1)] {
        assert_eq!(cluster.byte(target, drive, DATA_START), 0);
    }
}

/// Which volumes the targets know, by the first byte of their ids.
fn known(cluster: &Cluster) -> Vec<Vec<u8>> {
    let knows =
        |w: &World, id: u8| w.host.shared.volumes().live_entries(VolumeId([id; 16])).is_some();
    let of = |w: &World| (0..=u8::MAX).filter(|id| knows(w, *id)).collect();
    cluster.worlds.iter().map(of).collect()
}

fn forced(targets: usize, id: u8) -> VolumeCreationConfig {
    VolumeCreationConfig { volume: VolumeId([id; 16]), force: true, ..again(targets) }
}

#[test]
fn a_volume_that_is_given_up_leaves_nothing_in_the_logs() {
    let mut cluster = Cluster::with_volume(2);
    for id in 20..60 {
        cluster.create(forced(2, id)).unwrap();
        assert_eq!(known(&cluster), [[id], [id]]);
    }
    cluster.open(named("data", 2)).opened();
}

/// The old volume is dropped first where there is no space beside it.
#[test]
fn a_log_without_space_beside_the_old_volume_is_used_again() {
    let mut cluster = Cluster::new(2);
    let most = |id| VolumeCreationConfig { slots: 6000, ..forced(2, id) };
    for id in 20..24 {
        cluster.create(most(id)).unwrap();
        assert_eq!(known(&cluster), [[id], [id]]);
    }
    // A volume that does not fit at all is refused with numbers.
    let error = cluster.create(VolumeCreationConfig { slots: 60_000, ..forced(2, 24) });
    let error = error.unwrap_err();
    assert!(matches!(error, VolumeCreateError::LogTooSmall { target: 0, .. }), "{error}");
    assert_eq!(known(&cluster), [[23], [23]], "it costs the old volume nothing");
}

/// A volume with one stream on one target, forced.
fn on(nsids: &[u32], id: u8, slots: u32) -> VolumeCreationConfig {
    let places = nsids.iter().map(|nsid| MemberPlace { target: 0, nsid: *nsid }).collect();
    VolumeCreationConfig { places, streams: 1, slots, ..forced(1, id) }
}

/// The space beside the old volume lies in two pieces. Its own joins them.
#[test]
fn an_old_volume_between_two_gaps_is_dropped_where_all_three_are_needed() {
    let mut cluster = Cluster::new(1);
    for (nsid, id) in [(2, 20), (1, 21), (3, 22)] {
        cluster.create(on(&[nsid], id, 3100)).unwrap();
    }
    cluster.create(on(&[2, 3], 23, 6500)).unwrap();
    assert_eq!(known(&cluster), [[21, 23]]);
    cluster.create(on(&[1], 24, 9300)).unwrap();
    assert_eq!(known(&cluster), [[23, 24]]);
}

/// Two old volumes are clean, and the space of one is enough. The other stays until the new one is
/// made.
#[test]
fn no_more_old_volumes_are_dropped_first_than_the_log_needs() {
    let mut cluster = Cluster::new(1);
    cluster.create(on(&[1], 20, 6000)).unwrap();
    cluster.create(on(&[2], 21, 6000)).unwrap();
    let mut seen = Vec::new();
    let made = cluster.create_with(on(&[1, 2], 22, 5000), &mut |cluster, _, _| {
        seen.push(known(cluster).remove(0));
        true
    });
    made.expect("it ends").unwrap();
    seen.dedup();
    assert_eq!(seen[..3], [vec![20, 21], vec![21], vec![21, 22]]);
    assert_eq!(known(&cluster), [[22]]);
}

/// Only what waits for recovery keeps the drives guarded.
#[test]
fn a_clean_old_volume_is_not_dropped_with_one_that_waits_for_recovery() {
    let mut cluster = Cluster::with_volume(1);
    cluster.create(on(&[2], 20, 64)).unwrap();
    crash_with_a_gap(&mut cluster);
    let error = cluster.create(on(&[2, 1], 21, 60_000)).unwrap_err();
    assert!(matches!(error, VolumeCreateError::LogTooSmall { target: 0, .. }), "{error}");
    assert_eq!(known(&cluster), [[20]]);
}

/// Slots that no log gives are refused before an old volume that waits for recovery is claimed.
#[test]
fn slots_that_make_no_volume_cost_the_old_one_nothing() {
    let mut cluster = Cluster::with_volume(2);
    crash_with_a_gap(&mut cluster);
    let most = STREAM_SLOTS_MAX;
    let shared = (LOG_SLOTS_MAX / 1024) as u32;
    let few = VolumeCreateError::TooFewSlots { target: 0, slots: 3, needed: 4 };
    let many = |slots, most| VolumeCreateError::TooManySlots { target: 0, slots, most };
    for (streams, slots, expected) in [
        (2, 3, few),
        (2, most + 1, many(most + 1, most)),
        (1024, shared + 1, many(shared + 1, shared)),
    ] {
        let config = VolumeCreationConfig { streams, slots, ..forced(2, 20) };
        assert_eq!(cluster.create(config).unwrap_err(), expected);
        assert_eq!(known(&cluster), [[7], [7]]);
    }
    // Without a log the number has no meaning.
    let engine = Some(EngineKind::None);
    cluster.create(VolumeCreationConfig { slots: 3, engine, ..forced(2, 20) }).unwrap();
}

/// A target whose log is large, and that keeps only so many slots more. Other volumes, which can't
/// be read, have the rest.
fn with_slots_left(left: u64) -> World {
    let parts = Parts::default();
    let header = parts.part(0..HEADER_BYTES);
    let mut region =
        LogRegion::create(header, 1 << 40, [3; 16], BOOT, LogKind::Block, crc).unwrap();
    let slots = ((LOG_SLOTS_MAX - left) / 2) as u32;
    for id in [200, 201] {
        let members = in_order([3]);
        let volume = NewVolume { id: VolumeId([id; 16]), streams: 1, slots, members };
        region.add_volume(volume, |_, _| Ok(())).unwrap();
        // One that was never claimed is not kept.
        region.set_generation(VolumeId([id; 16]), 1, [1; 16], 0).unwrap();
    }
    let split: Split<Part> = Box::new(move |range| match range.len() {
        0..0x10_0000 => Ok(parts.part(range)),
        _ => Err(RegionError::new("not read")),
    });
    World::over(&[false; 3], identity(), Parts::default(), Volumes::with_log(region, split, crc).0)
}

#[test]
fn t28_an_old_volume_that_has_all_slots_of_the_target_is_dropped_first() {
    let with = |slots| VolumeCreationConfig { streams: 2, ..on(&[1], 21, slots) };
    for (slots, fits) in [(64, true), (74, true), (75, false), (0, true)] {
        let mut cluster = Cluster::new(1);
        cluster.worlds[0] = with_slots_left(2 * 64 + 20);
        cluster.create(creating(1)).unwrap();
        let result = cluster.create(with(slots));
        let stays = if fits { 21 } else { 7 };
        assert_eq!(known(&cluster), [[stays, 200, 201]], "{slots}");
        let refused = VolumeCreateError::TooManySlots { target: 0, slots, most: 10 };
        assert_eq!(result.err(), (!fits).then_some(refused));
    }
}

/// The error names the bound of the slots where only this bound is in the way, and not the space.
#[test]
fn t28_a_target_that_keeps_no_more_slots_does_not_call_its_log_too_small() {
    let mut cluster = Cluster::new(1);
    cluster.worlds[0] = with_slots_left(20);
    let error = |slots, cluster: &mut Cluster| {
        let config = VolumeCreationConfig { slots, ..creating(1) };
        cluster.create(config).unwrap_err()
    };
    let chosen = error(0, &mut cluster);
    assert_eq!(chosen, VolumeCreateError::TooManySlots { target: 0, slots: 0, most: 10 });
    assert_eq!(chosen.to_string(), "target 0 keeps at most 10 more log slots per stream");
    let text = error(64, &mut cluster).to_string();
    assert!(text.ends_with("10 more log slots per stream; 64 were requested"), "{text}");
}

#[test]
fn a_volume_that_waits_for_recovery_is_given_up_too() {
    let mut cluster = Cluster::with_volume(2);
    crash_with_a_gap(&mut cluster);
    cluster.create(forced(2, 20)).unwrap();
    assert_eq!(known(&cluster), [[20], [20]]);
    cluster.open(named("data", 2)).opened();
}

/// Also a drive that the new volume does not use belongs to the old one there.
#[test]
fn a_volume_of_which_only_some_drives_are_used_again_is_given_up_as_a_whole() {
    let mut cluster = Cluster::new(1);
    let on = |nsids: &[u32]| nsids.iter().map(|n| MemberPlace { target: 0, nsid: *n }).collect();
    cluster.create(VolumeCreationConfig { places: on(&[3, 1, 2]), ..creating(1) }).unwrap();
    cluster.create(VolumeCreationConfig { places: on(&[1]), ..forced(1, 20) }).unwrap();
    assert_eq!(known(&cluster), [[20]]);
}

#[test]
fn what_a_log_that_is_gone_had_of_the_old_volume_is_not_needed() {
    for (log, engine) in [(Some([8; 16]), EngineKind::Rio), (None, EngineKind::Sync)] {
        let mut cluster = Cluster::with_volume(2);
        let world = cluster.worlds.pop().unwrap();
        cluster.worlds.push(world.restarted_with_another_log(log));
        assert_eq!(cluster.create(forced(2, 20)).unwrap().engine, engine);
        assert!(!knows(&cluster, VOLUME));
        cluster.open(named("data", 2)).opened();
    }
}

#[test]
fn a_full_directory_is_reported_with_the_number_of_volumes() {
    let mut cluster = Cluster::new(1);
    cluster.worlds[0] = World::new(&[false; 17]);
    let one = |nsid, id| VolumeCreationConfig {
        places: vec![MemberPlace { target: 0, nsid }],
        streams: 1,
        volume: VolumeId([id; 16]),
        ..creating(1)
    };
    for nsid in 1..=16 {
        cluster.create(one(nsid, nsid as u8)).unwrap();
    }
    let error = cluster.create(one(17, 17)).unwrap_err();
    assert_eq!(error, VolumeCreateError::LogDirectoryFull { target: 0, volumes: 16 });
    assert!(error.to_string().contains("16 volumes"), "{error}");
    // The advice: the drive of one that is not needed.
    cluster.create(VolumeCreationConfig { force: true, ..one(5, 17) }).unwrap();
    assert!(!known(&cluster)[0].contains(&5) && known(&cluster)[0].contains(&17));
}

/// The initiator dies after each step. Then the old volume opens, or the new one. Only between two
/// labels there is neither, and the same command makes the new one.
#[test]
fn t9_a_crash_while_a_volume_is_replaced_leaves_one_of_the_two() {
    let (mut old, mut new, mut between) = (0, 0, 0);
    for rounds in 1.. {
        let mut cluster = Cluster::with_volume(2);
        let ended = cluster.create_until(forced(2, 20), rounds);
        match cluster.open(opening(2)).result {
            Ok(_) => old += 1,
            Err(VolumeOpenError::Members(MembersError::Assemble(_))) => {
                match cluster.open(named("data", 2)).result {
                    Ok(_) => new += 1,
                    Err(VolumeOpenError::Members(_)) => {
                        between += 1;
                        cluster.create(forced(2, 21)).unwrap();
                        cluster.open(named("data", 2)).opened();
                        assert_eq!(known(&cluster), [[21], [21]], "after {rounds}");
                    }
                    Err(error) => panic!("after {rounds}: {error}"),
                }
            }
            Err(error) => panic!("after {rounds}: {error}"),
        }
        if ended.is_some() {
            break;
        }
    }
    assert!(old > 5 && new > 3 && between > 0, "{old}, {new}, {between}");
}

/// A target that is lost while the old volume is dropped keeps what it has of it. The new volume is
/// made, and is reported so.
#[test]
fn a_target_that_is_lost_after_the_labels_does_not_undo_the_creation() {
    let mut made = 0;
    for lost in 1.. {
        let mut cluster = Cluster::with_volume(2);
        let mut was_lost = false;
        let result = cluster.create_with(forced(2, 20), &mut |cluster, wires, round| {
            if round == lost {
                was_lost = true;
                cluster.cut_one(1, ControlQueue::Admin, wires);
            }
            true
        });
        match result {
            _ if !was_lost => break,
            Some(Ok(_)) => {
                made += 1;
                cluster.open(named("data", 2)).opened();
            }
            Some(Err(error)) => assert_eq!(made, 0, "later steps do not fail: {error}"),
            None => unreachable!("the initiator lives"),
        }
    }
    assert!(made > 1, "{made}");
}

#[test]
fn t8_drives_of_a_volume_with_an_owner_are_not_given_up() {
    let mut cluster = Cluster::with_volume(2);
    let _owner = cluster.open(opening(2)).opened();
    let error = cluster.create(VolumeCreationConfig { force: true, ..again(2) }).unwrap_err();
    assert!(matches!(error, VolumeCreateError::Owned { member: 0, .. }), "{error}");
    assert!(knows(&cluster, VOLUME));
}

#[test]
fn a_log_without_space_is_reported_with_numbers_and_nothing_stays() {
    let mut cluster = Cluster::new(2);
    let error = cluster
        .create(VolumeCreationConfig { streams: 1024, slots: 0, ..creating(2) })
        .unwrap_err();
    let VolumeCreateError::LogTooSmall { target: 0, need, free } = error else { panic!("{error}") };
    assert!(need > free && free > 0);
    assert!(!knows(&cluster, VOLUME));
}

#[test]
fn t20_a_target_that_cannot_be_reached_makes_no_volume() {
    let mut cluster = Cluster::new(2);
    cluster.down[1] = true;
    let VolumeCreateError::Attach(failed) = cluster.create(creating(2)).unwrap_err() else {
        panic!()
    };
    assert_eq!(failed[0].0, 1);
    assert!(!knows(&cluster, VOLUME));
}

#[test]
fn a_volume_without_a_log_has_none_due() {
    let mut cluster = Cluster::new(1);
    let config = VolumeCreationConfig { engine: Some(EngineKind::None), ..creating(1) };
    let label = cluster.create(config).unwrap();
    assert_eq!((label.engine, label.members[0].region), (EngineKind::None, [0; 16]));
    assert!(!cluster.open(opening(1)).opened().volume.members.is_logged(0));
}
