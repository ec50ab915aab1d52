//! Making a volume.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;
use riopipe_order::log_region::{HEADER_BYTES, LogKind, LogRegion, NewVolume};
use riopipe_order::region::RegionError;
use riopipe_session::engine_choice::{Lack, Lacking};
use riopipe_session::initiator::association::{Association, AssociationError, ControlQueue};
use riopipe_session::initiator::volume::creation::foreign_content::ForeignContent;
use riopipe_session::initiator::volume::creation::{VolumeCreation, VolumeCreationConfig};
use riopipe_session::initiator::volume::error::{VolumeCreateError, VolumeOpenError};
use riopipe_session::initiator::volume::members::{MemberPlace, MembersError};
use riopipe_session::initiator::volume::opening::VolumeOpeningConfig;
use riopipe_session::label::{DATA_START, Label, LabelError, MEMBERS_MAX, NAME_MAX};
use riopipe_session::target::limits::{LOG_SLOTS_MAX, STREAM_SLOTS_MAX};
use riopipe_session::target::{Split, Volumes};
use riopipe_session::wire::{Extension, STATUS_LEN, VolumeStatus, in_order};

use crate::cluster::{Cluster, Wires, creating, opening};
use crate::opening::crash_with_a_gap;
use crate::peer::HOSTNQN;
use crate::world::{
    BLOCKS, BOOT, LOG_LEN, Part, Parts, TestHost, VOLUME, What, World, crc, identity,
};

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
fn a_name_and_members_are_allowed_up_to_their_bounds() {
    let named = |len| VolumeCreationConfig { name: "n".repeat(len), ..creating(1) };
    let with_members = |count: usize, targets: usize| {
        let place = |at| MemberPlace { target: at % targets, nsid: (at / targets) as u32 + 1 };
        let places = (0..count).map(place).collect();
        VolumeCreationConfig { places, targets, ..creating(1) }
    };
    for (allowed, refused) in [
        (named(1), named(0)),
        (named(NAME_MAX), named(NAME_MAX + 1)),
        (with_members(MEMBERS_MAX, 8), with_members(MEMBERS_MAX + 1, 8)),
        (with_members(16, 1), with_members(17, 1)),
    ] {
        assert_eq!(VolumeCreation::new(allowed).err(), None);
        assert!(VolumeCreation::new(refused).is_err());
    }
}

#[test]
fn a_drive_gives_a_volume_whole_stripe_units_and_at_least_one() {
    let with = |unit_blocks| VolumeCreationConfig { unit_blocks, ..creating(1) };
    let most = (BLOCKS - DATA_START) as u32;
    let error = Cluster::new(1).create(with(most + 1)).unwrap_err();
    let needed = BLOCKS + 1;
    assert_eq!(error, VolumeCreateError::TooSmall { member: 0, blocks: BLOCKS, needed });
    for (unit, blocks) in [(most, 9744), (16, 9744), (100, 9700)] {
        assert_eq!(Cluster::new(1).create(with(unit)).unwrap().data_blocks, blocks);
    }
}

/// Changes the data of the answers that wait at a target, and lets these answers go. Later answers
/// wait for the next call.
fn alter_waiting_answers(world: &mut World, alter: &mut dyn FnMut(&mut [u8])) {
    for at in 0..world.links.len() {
        let out = &mut world.links[at].out;
        let mut bytes: Vec<u8> = out.slices().flatten().copied().collect();
        out.consume(bytes.len());
        let mut rest = &mut bytes[..];
        while let Some(len) = rest.get(4..8) {
            let len = u32::from_le_bytes([len[0], len[1], len[2], len[3]]);
            let (pdu, after) = rest.split_at_mut(len as usize);
            let data_at = usize::from(pdu[3]);
            if pdu[0] == 0x07 {
                alter(&mut pdu[data_at..]);
            }
            rest = after;
        }
        if !bytes.is_empty() {
            out.push_payload(bytes);
        }
        world.resume_reading(at);
        world.links[at].reading = false;
    }
}

/// How many claims a target got, those that it has refused included.
fn claims(world: &World) -> usize {
    let is_claim = |event: &&String| event.starts_with("Claimed") || event.contains("refused");
    world.host.log.iter().filter(is_claim).count()
}

/// Creates a volume of a target that is not this project's: `alter` changes what it answers.
fn create_with_foreign(
    cluster: &mut Cluster,
    config: VolumeCreationConfig,
    alter: &mut dyn FnMut(&mut [u8]),
) -> Result<Label, VolumeCreateError> {
    let made = cluster.create_with(config, &mut |cluster, _, _| {
        cluster.worlds.iter_mut().for_each(|world| alter_waiting_answers(world, alter));
        true
    });
    made.expect("it ends")
}

#[test]
fn drives_with_other_blocks_or_with_metadata_are_refused() {
    // In Identify Namespace: the metadata bytes of the first format, and the power of its block
    // size.
    for (at, value, size) in [(128, 8, 4096), (130, 9, 512)] {
        let mut cluster = Cluster::new(1);
        let error = create_with_foreign(&mut cluster, creating(1), &mut |data| {
            let blocks = BLOCKS.to_le_bytes();
            if data.len() == 4096 && data[..8] == blocks && data[8..16] == blocks {
                data[at] = value;
            }
        });
        assert_eq!(error.unwrap_err(), VolumeCreateError::BlockSize { member: 0, size });
        assert!(!knows(&cluster, VOLUME));
    }
}

#[test]
fn t17_a_target_without_the_extension_gets_no_command_of_it() {
    let mut cluster = Cluster::new(1);
    let label = create_with_foreign(&mut cluster, creating(1), &mut |data| {
        if Extension::find(data).is_some() {
            data[3072..].fill(0);
        }
    });
    assert_eq!(label.unwrap().engine, EngineKind::Sync);
    assert_eq!(claims(&cluster.worlds[0]), 0);
}

#[test]
fn t13_a_target_that_chooses_too_few_slots_makes_no_volume() {
    for (slots, suffice) in [(3, false), (4, true)] {
        let mut cluster = Cluster::new(1);
        let config = VolumeCreationConfig { slots: 0, ..creating(1) };
        let result = create_with_foreign(&mut cluster, config, &mut |data| {
            if data.len() == STATUS_LEN
                && let Some(status) = VolumeStatus::decode(data)
            {
                data.copy_from_slice(&VolumeStatus { slots, ..status }.encode());
            }
        });
        let few = VolumeCreateError::TooFewSlots { target: 0, slots, needed: 4 };
        assert_eq!(result.err(), (!suffice).then_some(few));
        assert_eq!(knows(&cluster, VOLUME), suffice);
    }
}

#[test]
fn t17_the_reason_for_engine_sync_is_reported_once() {
    let mut cluster = Cluster::new(1);
    let world = cluster.worlds.remove(0);
    cluster.worlds.push(world.restarted_with_another_log(None));
    let unused = cluster.open(opening(1)).associations;
    let again = unused.iter().map(|association| Association::new(association.config().clone()));
    let (mut associations, mut wires) = (again.collect::<Vec<_>>(), Wires::default());
    let mut creation = VolumeCreation::new(creating(1)).unwrap();
    let made = loop {
        cluster.carry(0, &mut associations[0], &mut wires);
        creation.advance(cluster.now, &mut associations);
        if let Some(result) = creation.take_result() {
            break result.unwrap();
        }
    };
    assert_eq!(made.engine, EngineKind::Sync);
    let lacking = Lacking { target: 0, what: Lack::Log };
    assert_eq!([(); 2].map(|()| creation.take_fallback()), [Some(lacking), None]);
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
fn a_drive_whose_label_cannot_be_read_is_not_taken_for_a_free_one() {
    let mut cluster = Cluster::with_volume(1);
    cluster.worlds[0].host.drives[0].failing = true;
    let error = cluster.create(again(1)).unwrap_err();
    let doing = "reading the label";
    let right =
        matches!(error, VolumeCreateError::Call { target: 0, doing: at, .. } if at == doing);
    assert!(right, "{error}");
    assert!(!knows(&cluster, VolumeId([9; 16])));
}

#[test]
fn every_step_of_writing_a_label_is_done_once_and_made_durable_before_the_next() {
    let mut cluster = Cluster::new(1);
    cluster.worlds[0].host.drives[0].holds = true;
    let mut waited = 0;
    let made = cluster.create_with(creating(1), &mut |cluster, _, _| {
        let world = &mut cluster.worlds[0];
        assert!(world.host.drives[0].pending.len() <= 1, "one step at a time");
        waited += world.host.drives[0].pending.len();
        if waited == 3 {
            waited = 0;
            world.complete_all(0);
        }
        true
    });
    made.expect("it ends").unwrap();
    let step = |(lba, what): &(u64, What)| match what {
        What::Read(_) => None,
        What::Write(_) => Some(Some(*lba)),
        _ => Some(None),
    };
    let steps: Vec<_> = cluster.worlds[0].host.drives[0].history.iter().filter_map(step).collect();
    assert_eq!(steps, [Some(DATA_START), None, Some(1), None, Some(0), None]);
}

#[test]
fn no_label_is_written_before_every_target_has_reported_its_slots() {
    let mut cluster = Cluster::new(1);
    let mut rounds = 0;
    let made = cluster.create_with(creating(1), &mut |cluster, _, _| {
        rounds += usize::from(knows(cluster, VOLUME));
        let world = &mut cluster.worlds[0];
        match rounds {
            0 => {}
            // The admin queue's answers stay where they are.
            1..=3 => world.links[0].reading = false,
            4 => {
                let history = &world.host.drives[0].history;
                assert!(!history.iter().any(|(_, what)| matches!(what, What::Write(_))));
                world.resume_reading(0);
            }
            _ => {}
        }
        true
    });
    made.expect("it ends").unwrap();
}

/// The second initiator makes its volume while the first one waits, after each step of the first
/// one.
#[test]
fn of_two_initiators_that_use_the_same_drives_only_one_makes_a_volume() {
    let (mut first_made, mut second_made) = (0, 0);
    for step in 1.. {
        let mut cluster = Cluster::new(2);
        let mut second = None;
        let first = cluster.create_with(creating(2), &mut |cluster, _, round| {
            if round == step {
                second = Some(cluster.create(again(2)));
            }
            true
        });
        let Some(second) = second else { break };
        let name = match (first.expect("it ends"), second) {
            (Ok(label), Err(_)) => {
                first_made += 1;
                label.name
            }
            (Err(_), Ok(label)) => {
                second_made += 1;
                label.name
            }
            (first, second) => panic!("after {step}: {first:?}, {second:?}"),
        };
        cluster.open(named(&name, 2)).opened();
    }
    assert!(first_made > 3 && second_made > 1, "{first_made}, {second_made}");
}

/// The labels were read twice: the second time, another program's label is there.
#[test]
fn a_label_of_a_later_version_that_appears_meanwhile_is_not_overwritten() {
    let mut cluster = Cluster::new(1);
    let mut newer = cluster.worlds[0].host.drives[0].block(0);
    let mut changed = false;
    let result = cluster.create_with(creating(1), &mut |cluster, _, _| {
        if !changed && knows(cluster, VOLUME) {
            changed = true;
            let drive = &mut cluster.worlds[0].host.drives[0];
            newer[..8].copy_from_slice(b"RIOLABEL");
            newer[8..12].copy_from_slice(&77u32.to_le_bytes());
            drive.overwrite(0, newer.clone());
        }
        true
    });
    let error = result.expect("it ends").unwrap_err();
    let newer_label =
        VolumeCreateError::UnreadableLabel { member: 0, error: LabelError::Newer(77) };
    assert_eq!((changed, error), (true, newer_label));
    assert_eq!(cluster.worlds[0].host.drives[0].block(0), newer);
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

#[test]
fn an_old_volume_of_many_streams_is_dropped_where_the_space_of_all_of_them_is_needed() {
    let mut cluster = Cluster::new(1);
    for id in [20, 21] {
        let config = VolumeCreationConfig { streams: 16, slots: 800, ..forced(1, id) };
        cluster.create(config).unwrap();
        assert_eq!(known(&cluster), [[id]]);
    }
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

#[test]
fn t13_slots_are_enough_from_two_for_each_member_and_two_more_on() {
    let mut cluster = Cluster::new(1);
    let error = cluster.create(on(&[1, 2, 3], 20, 7)).unwrap_err();
    assert_eq!(error, VolumeCreateError::TooFewSlots { target: 0, slots: 7, needed: 8 });
    cluster.create(on(&[1, 2, 3], 20, 8)).unwrap();
}

/// The target decides about them. This one has less space.
#[test]
fn t28_as_many_slots_as_a_target_may_keep_can_be_requested() {
    for (streams, slots) in [(2, STREAM_SLOTS_MAX), (1024, (LOG_SLOTS_MAX / 1024) as u32)] {
        let mut cluster = Cluster::new(1);
        let config = VolumeCreationConfig { streams, slots, ..creating(1) };
        let error = cluster.create(config).unwrap_err();
        assert!(matches!(error, VolumeCreateError::LogTooSmall { target: 0, .. }), "{error}");
    }
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
fn an_old_volume_that_has_nothing_in_a_log_is_not_claimed() {
    let mut cluster = Cluster::new(1);
    let engine = Some(EngineKind::Sync);
    cluster.create(VolumeCreationConfig { engine, ..creating(1) }).unwrap();
    cluster.create(forced(1, 20)).unwrap();
    assert_eq!(claims(&cluster.worlds[0]), 2, "one for each new volume");
}

/// The target is started again and can't read the partitions of its volumes.
fn restarted_with_damaged_partitions(world: World) -> World {
    let TestHost { drives, parts, .. } = world.host;
    let header = parts.part(0..HEADER_BYTES);
    let region = LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap();
    let is_started = Arc::new(AtomicBool::new(false));
    let (readable, all) = (Arc::clone(&is_started), parts.clone());
    let split: Split<Part> = Box::new(move |range| match readable.load(Ordering::Relaxed) {
        true => Ok(all.part(range)),
        false => Err(RegionError::new("not read")),
    });
    let (volumes, problems) = Volumes::with_log(region, split, crc);
    assert!(!problems.is_empty());
    is_started.store(true, Ordering::Relaxed);
    let mut world = World::over(&[false; 3], identity(), parts, volumes);
    world.host.drives = drives;
    world
}

/// It cannot be claimed, and keeps the drives guarded.
#[test]
fn t19_an_old_volume_whose_log_is_lost_is_forgotten_first() {
    let mut cluster = Cluster::with_volume(1);
    let world = cluster.worlds.remove(0);
    cluster.worlds.push(restarted_with_damaged_partitions(world));
    cluster.create(forced(1, 20)).unwrap();
    assert_eq!(known(&cluster), [[20]]);
    cluster.open(named("data", 1)).opened();
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
fn t8_the_old_volume_that_has_an_owner_is_named() {
    let mut cluster = Cluster::new(1);
    cluster.create(on(&[1], 20, 64)).unwrap();
    let owned = VolumeCreationConfig { name: "owned".into(), ..on(&[2], 21, 64) };
    cluster.create(owned.clone()).unwrap();
    let places = owned.places;
    let _owner = cluster.open(VolumeOpeningConfig { places, ..named("owned", 1) }).opened();
    let error = cluster.create(on(&[1, 2], 22, 64)).unwrap_err();
    let (volume, owner) = ("owned".into(), HOSTNQN.into());
    assert_eq!(error, VolumeCreateError::Owned { member: 1, volume, owner });
}

/// Such a drive may belong to a volume that a later version has made.
#[test]
fn a_drive_whose_label_cannot_be_read_is_not_taken_without_force() {
    let mut cluster = Cluster::with_volume(1);
    let labels = |cluster: &Cluster| [0, 1].map(|lba| cluster.worlds[0].host.drives[0].block(lba));
    // The version is in bytes 8 to 11 of each copy of the label.
    for (lba, mut copy) in (0..).zip(labels(&cluster)) {
        copy[8..12].copy_from_slice(&77u32.to_le_bytes());
        cluster.worlds[0].host.drives[0].overwrite(lba, copy);
    }
    let before = labels(&cluster);
    let result = cluster.create_with(again(1), &mut |cluster, _, _| {
        assert!(!knows(cluster, VolumeId([9; 16])), "refused before any partition is made");
        true
    });
    let newer = VolumeCreateError::UnreadableLabel { member: 0, error: LabelError::Newer(77) };
    assert_eq!(result.expect("it ends").unwrap_err(), newer);
    assert_eq!(labels(&cluster), before);
    assert!(!knows(&cluster, VolumeId([9; 16])));
    let forced = VolumeCreationConfig { force: true, ..again(1) };
    assert_eq!(cluster.create(forced).unwrap().name, "data");
}

/// Drive 0 holds the superblock of an ext2 file system, and drive 1 the backup of a GPT.
fn cluster_with_foreign_drives() -> Cluster {
    let mut cluster = Cluster::new(2);
    let mut superblock = vec![0; 4096];
    superblock[1080..1082].copy_from_slice(&[0x53, 0xef]);
    cluster.worlds[0].host.drives[0].overwrite(0, superblock);
    let mut backup = vec![0; 4096];
    backup[3584..3592].copy_from_slice(b"EFI PART");
    cluster.worlds[1].host.drives[1].overwrite(BLOCKS - 1, backup);
    cluster
}

#[test]
fn a_drive_that_holds_anything_is_not_taken_without_force() {
    let mut cluster = cluster_with_foreign_drives();
    let ext2 = ForeignContent::Known("an ext2 file system");
    let error = cluster.create(creating(2)).unwrap_err();
    assert_eq!(error, VolumeCreateError::HoldsData { member: 0, content: ext2 });
    cluster.worlds[0].host.drives[0].overwrite(0, vec![0; 4096]);
    cluster.worlds[0].host.drives[0].overwrite(63, vec![1; 4096]);
    let error = cluster.create(creating(2)).unwrap_err();
    let unknown = ForeignContent::Unknown;
    assert_eq!(error, VolumeCreateError::HoldsData { member: 0, content: unknown });
    cluster.worlds[0].host.drives[0].overwrite(63, vec![0; 4096]);
    let error = cluster.create(creating(2)).unwrap_err();
    let gpt = ForeignContent::Known("a GPT partition table");
    assert_eq!(error, VolumeCreateError::HoldsData { member: 1, content: gpt });
    assert!(!knows(&cluster, VOLUME), "refused before any partition is made");
    let is_write = |(_, what): &(u64, What)| matches!(what, What::Write(_));
    assert!(!cluster.worlds.iter().any(|w| w.host.drives[0].history.iter().any(is_write)));
}

/// Else another program would take the drive of the volume for what it was before.
#[test]
fn the_signatures_of_what_a_drive_held_do_not_remain() {
    let mut cluster = cluster_with_foreign_drives();
    cluster.worlds[0].host.drives[0].overwrite(100, vec![7; 4096]);
    cluster.create(VolumeCreationConfig { force: true, ..creating(2) }).unwrap();
    for (target, drive) in [(0, 0), (1, 1)] {
        let block = |lba| cluster.worlds[target].host.drives[drive].block(lba);
        let is_zero = |lba: &u64| block(*lba).iter().all(|byte| *byte == 0);
        assert_eq!((0..BLOCKS).filter(|lba| !is_zero(lba)).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(&block(0)[..8], b"RIOLABEL");
    }
    cluster.open(opening(2)).opened();
}

/// No target has to forget anything, so the error is not delayed by one that answers no more.
#[test]
fn a_creation_that_has_made_no_partitions_fails_at_once() {
    let mut cluster = Cluster::with_volume(1);
    let (began, done_before) = (cluster.now, cluster.worlds[0].host.drives[0].history.len());
    let result = cluster.create_with(again(1), &mut |cluster, _, _| {
        let label_was_read = cluster.worlds[0].host.drives[0].history.len() > done_before;
        cluster.mute = label_was_read.then_some(0);
        true
    });
    let error = result.expect("it ends").unwrap_err();
    assert_eq!(error, VolumeCreateError::InUse { member: 0, volume: "logs".into() });
    assert_eq!(cluster.now, began);
}

/// The second target refuses the partitions after the first one has made them.
#[test]
fn partitions_of_a_volume_that_is_not_made_stay_on_no_target() {
    let mut cluster = Cluster::new(2);
    cluster.worlds[1] = with_slots_left(20);
    let error = cluster.create(creating(2)).unwrap_err();
    assert!(matches!(error, VolumeCreateError::TooManySlots { target: 1, .. }), "{error}");
    assert_eq!(known(&cluster), [vec![], vec![200, 201]]);
}

/// A target is lost after each step. As long as not all labels are written, the other target
/// forgets the volume. After that, the volume exists, and keeps its log.
#[test]
fn a_creation_that_fails_leaves_the_whole_volume_or_nothing() {
    let (mut nothing, mut whole) = (0, 0);
    for lost in 1.. {
        let mut cluster = Cluster::new(2);
        let mut was_lost = false;
        let result = cluster.create_with(creating(2), &mut |cluster, wires, round| {
            if round == lost {
                was_lost = true;
                cluster.cut_one(1, ControlQueue::Admin, wires);
            }
            true
        });
        if !was_lost {
            break;
        }
        let result = result.expect("it ends");
        match (cluster.open(opening(2)).result, result) {
            (Ok(_), Err(_)) => whole += 1,
            (Ok(_), Ok(_)) => {}
            (Err(_), Err(_)) => {
                nothing += 1;
                assert_eq!(known(&cluster)[0], [0; 0], "after {lost}");
            }
            (Err(error), Ok(_)) => panic!("after {lost}: {error}"),
        }
    }
    assert!(nothing > 3 && whole > 0, "{nothing}, {whole}");
}

#[test]
fn a_log_without_space_is_reported_with_numbers_and_nothing_stays() {
    let mut cluster = Cluster::new(2);
    let error = cluster
        .create(VolumeCreationConfig { streams: 1024, slots: 0, ..creating(2) })
        .unwrap_err();
    let VolumeCreateError::LogTooSmall { target: 0, need, free, .. } = error else {
        panic!("{error}")
    };
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

/// Its admin queue is connected by then.
#[test]
fn t20_a_target_whose_drives_queue_cannot_be_connected_counts_as_one_that_cannot_be_reached() {
    let mut cluster = Cluster::new(2);
    let result = cluster.create_with(creating(2), &mut |cluster, _, round| {
        cluster.down[1] = round > 0;
        true
    });
    let error = result.expect("it ends").unwrap_err();
    let VolumeCreateError::Attach(failed) = error else { panic!("{error}") };
    assert!(matches!(failed[..], [(1, AssociationError::Connect(_))]), "{failed:?}");
}

#[test]
fn a_volume_without_a_log_has_none_due() {
    let mut cluster = Cluster::new(1);
    let config = VolumeCreationConfig { engine: Some(EngineKind::None), ..creating(1) };
    let label = cluster.create(config).unwrap();
    assert_eq!((label.engine, label.members[0].region), (EngineKind::None, [0; 16]));
    assert!(!cluster.open(opening(1)).opened().volume.members.is_logged(0));
}
/// A volume whose target has an older copy of the log than the labels require, and the options of a
/// creation that gives the volume up. With `needs_space` the log has no space beside the old volume.
fn with_log_behind(needs_space: bool) -> (Cluster, VolumeCreationConfig) {
    let slots = if needs_space { 6000 } else { 64 };
    let mut cluster = Cluster::new(1);
    cluster.create(VolumeCreationConfig { slots, ..creating(1) }).unwrap();
    let earlier = cluster.worlds[0].host.parts.crash(0);
    let mut opened = cluster.open(opening(1)).opened();
    cluster.cut(&mut opened.wires);
    let world = cluster.worlds.remove(0);
    let mut restored = World::with(&[false; 3], identity(), earlier);
    restored.host.drives = world.host.drives;
    cluster.worlds.push(restored);
    (cluster, VolumeCreationConfig { slots, ..forced(1, 20) })
}

#[test]
fn t24_an_older_log_counts_as_the_newest_at_no_moment_of_a_forced_creation() {
    for needs_space in [true, false] {
        for rounds in 0.. {
            let (mut cluster, config) = with_log_behind(needs_space);
            let ended = cluster.create_until(config, rounds);
            assert!(cluster.open(opening(1)).result.is_err(), "cut off in round {rounds}");
            if let Some(ended) = ended {
                assert_eq!(ended.is_ok(), !needs_space, "the old volume keeps its space");
                break;
            }
        }
    }
}
