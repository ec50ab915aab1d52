//! Opening a volume.

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::EngineKind;
use riopipe_session::claim::ClaimError;
use riopipe_session::engine_choice::{Hindrance, Lack, Lacking};
use riopipe_session::initiator::association::{AssociationError, ControlQueue, DrivesState};
use riopipe_session::initiator::endpoint::Endpoint;
use riopipe_session::initiator::opening::{OpeningError, Phase};
use riopipe_session::initiator::volume::creation::VolumeCreationConfig;
use riopipe_session::initiator::volume::error::VolumeOpenError;
use riopipe_session::initiator::volume::members::{Layout, MemberPlace, MembersError};
use riopipe_session::initiator::volume::opening::{
    OpeningEvent, OwnerWait, Purpose, VolumeChange, VolumeOpeningConfig,
};
use riopipe_session::initiator::volume::ranges::BlockRange;
use riopipe_session::initiator::volume::saving::{SaveStep, UndoneExtent};
use riopipe_session::label::{AssembleError, DATA_START, Label};
use riopipe_session::wire::{ORDERED_BYTES_MAX, VolumeStatus};

use crate::cluster::{Cluster, Opened, S, TIMEOUT, creating, opening, places, rival};
use crate::world::{BLOCKS, VOLUME, What, World, attribute, block, crc, ordered};

/// An owner writes groups 1 and 3 of stream 0 to blocks 0 and 2 of the first drive, and dies.
pub(crate) fn crash_with_a_gap(cluster: &mut Cluster) {
    let mut opened = cluster.open(opening(cluster.worlds.len())).opened();
    let world = &mut cluster.worlds[0];
    let cntlid = opened.associations[0].controller().expect("attached").cntlid;
    let io = world.io(cntlid, 2);
    assert_eq!(world.bind(io, 0, opened.volume.generation, 0).status, 0);
    for (ordinal, seq) in [(1, 1), (2, 3)] {
        let mut write = attribute(seq, DATA_START + seq - 1);
        write.ordinal = ordinal;
        let sqe = ordered(seq as u16, &write, 0);
        assert_eq!(world.call(io, sqe, &block(seq as u8)).status, 0);
    }
    world.hang_up(io);
    cluster.cut(&mut opened.wires);
}

fn phases(events: &[OpeningEvent]) -> Vec<Phase> {
    let of = |event: &OpeningEvent| match event {
        OpeningEvent::Progress(progress) => Some(progress.phase),
        _ => None,
    };
    let mut phases: Vec<Phase> = events.iter().filter_map(of).collect();
    phases.dedup();
    phases
}

/// The volume's owners, as the targets have them.
fn owned(cluster: &Cluster) -> Vec<bool> {
    let owner = |w: &World| w.host.shared.volumes().owner(VOLUME).is_some();
    cluster.worlds.iter().map(owner).collect()
}

#[test]
fn a_volume_is_taken_on_all_targets_and_its_labels_show_it() {
    let mut cluster = Cluster::with_volume(2);
    let run = cluster.open(opening(2));
    assert!(run.events.contains(&OpeningEvent::Claimed { generation: 2 }));
    assert_eq!(phases(&run.events).last(), Some(&Phase::Over));
    let Opened { volume: opened, associations, .. } = run.opened();
    assert_eq!((opened.generation, opened.engine, opened.fallback), (2, EngineKind::Rio, None));
    assert!(opened.members.labels.iter().all(|label| label.generation == 2));
    assert!(!opened.outcome.needed && opened.topology.members().len() == 2);
    assert_eq!(owned(&cluster), [true, true]);
    for (target, association) in associations.iter().enumerate() {
        let claim = opened.resume_claim(target).expect("it speaks the extension");
        assert!(claim.resume && !claim.unlogged && claim.generation == 2);
        let controller = association.controller().expect("attached");
        assert_eq!(opened.known_target(target).check(controller), Ok(()));
        assert!(association.is_attached(), "kept alive for its manager");
        assert!(matches!(association.drives(), DrivesState::Closed), "no queue is left over");
    }
}

#[test]
fn inspecting_a_volume_changes_nothing_and_needs_no_name() {
    let mut cluster = Cluster::with_volume(2);
    let _owner = cluster.open(opening(2)).opened();
    let inspect = VolumeOpeningConfig { purpose: Purpose::Inspect, name: None, ..opening(2) };
    let Opened { volume: seen, associations, .. } = cluster.open(rival(inspect)).opened();
    assert_eq!((seen.generation, seen.members.label_generation()), (0, 2));
    assert!(seen.statuses.iter().all(|(_, status)| status.owned && !status.own));
    assert_eq!(seen.statuses.len(), 2);
    assert!(seen.topology.blocks() > 0);
    assert!(!associations[0].is_attached(), "nothing is left of it");
}

#[test]
fn t1_what_lies_beyond_the_prefix_is_zeroed_before_the_volume_is_open() {
    let mut cluster = Cluster::with_volume(2);
    crash_with_a_gap(&mut cluster);
    assert_eq!(cluster.byte(0, 0, DATA_START + 2), block(3)[0]);
    let opened = cluster.open(opening(2)).opened().volume;
    let plan = &opened.outcome.streams[0].plan;
    assert_eq!((plan.stream, plan.k, plan.found), (StreamId(0), Seq(1), 2));
    assert_eq!(cluster.byte(0, 0, DATA_START), block(1)[0]);
    assert_eq!(cluster.byte(0, 0, DATA_START + 2), 0);
}

#[test]
fn a_dry_run_reports_what_would_be_done_and_does_nothing() {
    let mut cluster = Cluster::with_volume(2);
    crash_with_a_gap(&mut cluster);
    let dry = VolumeOpeningConfig { purpose: Purpose::DryRun, save_undone: true, ..opening(2) };
    let run = cluster.open(dry);
    let range = BlockRange { lba: 2, blocks: 1 };
    let extents = vec![UndoneExtent { stream: StreamId(0), seq: Seq(3), range }];
    let (volume, name, generation) = (VOLUME, "logs".into(), 0);
    assert_eq!(run.saved[0], SaveStep::Begin { volume, name, generation, extents });
    assert_eq!(run.saved[1..], [SaveStep::Blocks(block(3)), SaveStep::Finish]);
    let seen = run.opened().volume;
    assert_eq!(seen.outcome.streams[0].plan.undone_blocks(), 1);
    assert_eq!(cluster.byte(0, 0, DATA_START + 2), block(3)[0]);
    assert_eq!(owned(&cluster), [false, false]);
    assert!(cluster.open(opening(2)).opened().volume.generation == 3, "no generation was used");
}

#[test]
fn what_is_zeroed_is_kept_before_if_that_is_wanted() {
    let mut cluster = Cluster::with_volume(2);
    crash_with_a_gap(&mut cluster);
    let run = cluster.open(VolumeOpeningConfig { save_undone: true, ..opening(2) });
    assert_eq!(run.saved.len(), 3);
    assert_eq!(run.saved[1], SaveStep::Blocks(block(3)));
    run.opened();
    assert_eq!(cluster.byte(0, 0, DATA_START + 2), 0);
}

#[test]
fn what_cannot_be_kept_is_not_zeroed_and_the_volume_is_released() {
    let mut cluster = Cluster::with_volume(2);
    crash_with_a_gap(&mut cluster);
    let config = VolumeOpeningConfig { save_undone: true, ..opening(2) };
    // The disk is full.
    let run = cluster.open_with(config, &mut |_, _, _| false);
    assert_eq!(run.saved.len(), 2, "nothing is asked for after the failure");
    assert_eq!(run.error(), VolumeOpenError::NotSaved);
    assert_eq!(cluster.byte(0, 0, DATA_START + 2), block(3)[0]);
    assert_eq!(owned(&cluster), [false, false]);
    assert_eq!(cluster.open(opening(2)).opened().volume.outcome.streams[0].plan.k, Seq(1));
}

#[test]
fn t8_a_volume_with_a_living_owner_is_refused_at_once() {
    let mut cluster = Cluster::with_volume(2);
    let _owner = cluster.open(opening(2)).opened();
    let error = cluster.open(rival(opening(2))).error();
    let VolumeOpenError::Opening(OpeningError::Claim(ClaimError::Owned { owner, .. })) = error
    else {
        panic!("{error}");
    };
    assert!(owner.contains("uuid"), "{owner}");
    assert_eq!(owned(&cluster), [true, true], "what another has is not released");
}

#[test]
fn t25_an_owned_volume_is_asked_for_again_until_its_owner_goes() {
    let mut cluster = Cluster::with_volume(2);
    let mut owner = cluster.open(opening(2)).opened();
    let waiting = rival(VolumeOpeningConfig { wait: OwnerWait::of(60 * S), ..opening(2) });
    let began = cluster.now;
    let mut reported = 0;
    let run = cluster.open_with(waiting, &mut |cluster, _, event| {
        if matches!(event, OpeningEvent::Owned { .. }) {
            reported += 1;
        }
        if reported == 3 {
            cluster.cut(&mut owner.wires);
        }
        true
    });
    let waited = cluster.now - began;
    assert!(
        (10 * S..12 * S).contains(&waited),
        "reported each 5 s, then asked within 0.5 s: {waited}"
    );
    assert_eq!(run.opened().volume.generation, 3);
}

#[test]
fn t25_the_wait_for_an_owner_ends() {
    let mut cluster = Cluster::with_volume(2);
    let Opened { mut associations, mut wires, .. } = cluster.open(opening(2)).opened();
    let waiting = rival(VolumeOpeningConfig { wait: OwnerWait::of(2 * S), ..opening(2) });
    let began = cluster.now;
    // The owner runs meanwhile.
    let run = cluster.open_with(waiting, &mut |cluster, _, _| {
        for (target, association) in associations.iter_mut().enumerate() {
            association.timeout(cluster.now);
            cluster.carry(target, association, &mut wires);
        }
        true
    });
    assert!(run.events.iter().any(|event| matches!(event, OpeningEvent::Owned { .. })));
    assert!(matches!(run.error(), VolumeOpenError::Opening(OpeningError::Claim(_))));
    assert_eq!(cluster.now - began, 2 * S);
}

#[test]
fn t20_every_target_that_cannot_be_reached_is_reported_and_nothing_is_taken() {
    let mut cluster = Cluster::with_volume(3);
    cluster.down = vec![true, false, true];
    let VolumeOpenError::Attach(failures) = cluster.open(opening(3)).error() else { panic!() };
    let targets: Vec<usize> = failures.iter().map(|(target, _)| *target).collect();
    assert_eq!(targets, [0, 2]);
    assert!(failures.iter().all(|(_, e)| matches!(e, AssociationError::Connect(_))));
    assert_eq!(owned(&cluster), [false; 3]);
}

#[test]
fn a_target_that_stops_answering_ends_the_attempt_and_the_others_have_the_volume_back() {
    let mut cluster = Cluster::with_volume(2);
    let began = cluster.now;
    let run = cluster.open_with(opening(2), &mut |cluster, _, event| {
        if matches!(event, OpeningEvent::Claimed { .. }) {
            cluster.mute = Some(1);
        }
        true
    });
    assert!(run.events.contains(&OpeningEvent::Releases { generation: 2 }));
    let error = run.error();
    let VolumeOpenError::Call { server: 1, .. } = error else { panic!("{error}") };
    assert!(cluster.now - began <= 2 * TIMEOUT, "{}", cluster.now - began);
    cluster.mute = None;
    assert_eq!(owned(&cluster), [false, false]);
    assert_eq!(cluster.open(opening(2)).opened().volume.generation, 3);
}

#[test]
fn p8_a_queue_to_the_drives_that_ends_ends_the_attempt() {
    // While the labels are read again, and while the blocks to be zeroed are kept.
    for save_undone in [false, true] {
        let mut cluster = Cluster::with_volume(2);
        crash_with_a_gap(&mut cluster);
        let began = cluster.now;
        let config = VolumeOpeningConfig { save_undone, ..opening(2) };
        let run = cluster.open_with(config, &mut |cluster, wires, event| {
            let now = match event {
                OpeningEvent::Claimed { .. } => !save_undone,
                OpeningEvent::Progress(progress) => save_undone && progress.phase == Phase::Decided,
                _ => false,
            };
            if now {
                cluster.cut_one(0, ControlQueue::Drives, wires);
            }
            true
        });
        let error = run.error();
        let right = matches!(
            error,
            VolumeOpenError::Call { server: 0, .. } | VolumeOpenError::Save { server: 0, .. }
        );
        assert!(right, "{error}");
        assert_eq!(cluster.now, began, "at once");
        assert_eq!(owned(&cluster), [false, false]);
    }
}

#[test]
fn drives_that_are_not_the_volume_are_refused_by_name() {
    let mut cluster = Cluster::with_volume(2);
    let assemble = |error| match error {
        VolumeOpenError::Members(MembersError::Assemble(error)) => error,
        error => panic!("{error}"),
    };
    let config = VolumeOpeningConfig { name: Some("data".into()), ..opening(2) };
    let error = assemble(cluster.open(config).error());
    assert!(matches!(error, AssembleError::OtherName { .. }), "{error}");
    let reversed = places(2).into_iter().rev().collect();
    let error =
        assemble(cluster.open(VolumeOpeningConfig { places: reversed, ..opening(2) }).error());
    assert!(matches!(error, AssembleError::Order { .. }), "{error}");
    let error =
        assemble(cluster.open(VolumeOpeningConfig { places: places(1), ..opening(2) }).error());
    assert!(matches!(error, AssembleError::Count { needed: 2, given: 1 }), "{error}");
    let missing = vec![MemberPlace { target: 0, nsid: 1 }, MemberPlace { target: 1, nsid: 9 }];
    let error = cluster.open(VolumeOpeningConfig { places: missing, ..opening(2) }).error();
    assert_eq!(error, VolumeOpenError::NoNamespace { member: 1 });
}

fn inspecting(layout: Layout) -> VolumeOpeningConfig {
    VolumeOpeningConfig { purpose: Purpose::Inspect, layout, ..opening(1) }
}

#[test]
fn t19_a_drive_that_is_smaller_than_its_label_requires_is_refused() {
    let mut cluster = Cluster::new(1);
    let config = VolumeCreationConfig { unit_blocks: 100, ..creating(1) };
    let label = cluster.create(config).unwrap();
    let last_start = BLOCKS - label.data_blocks;
    assert!(last_start > DATA_START, "the drive has blocks to spare");
    let at = |start| inspecting(Layout { start, ..Layout::default() });
    for start in [DATA_START, last_start] {
        cluster.open(at(start)).opened();
    }
    let shrunk = MembersError::Shrunk { member: 0, blocks: BLOCKS, needed: BLOCKS + 1 };
    assert_eq!(cluster.open(at(last_start + 1)).error(), VolumeOpenError::Members(shrunk));
}

#[test]
fn no_request_is_larger_than_the_target_and_the_layout_allow() {
    let mut cluster = Cluster::with_volume(1);
    let most = ORDERED_BYTES_MAX / 4096;
    for (allowed, expected) in [(0, 1), (32, 32), (most + 1, most)] {
        let layout = Layout { request_blocks_max: allowed, ..Layout::default() };
        let opened = cluster.open(inspecting(layout)).opened().volume;
        assert_eq!(opened.topology.members()[0].request_blocks_max, expected);
    }
}

#[test]
fn t19_t24_a_log_that_is_gone_or_older_than_the_labels_is_lost() {
    for engine in [EngineKind::Rio, EngineKind::Sync] {
        let mut cluster = Cluster::new(1);
        let config = VolumeCreationConfig { engine: Some(engine), ..creating(1) };
        cluster.create(config).unwrap();
        let members = cluster.open(inspecting(Layout::default())).opened().volume.members;
        let generation = members.label_generation();
        let current = VolumeStatus { known: true, generation, ..VolumeStatus::default() };
        let older = VolumeStatus { generation: generation - 1, ..current.clone() };
        let gone = VolumeStatus { log_lost: true, ..current.clone() };
        let is_lost = [current, older, gone].map(|status| members.is_log_lost(0, &status));
        // A volume without a log has none that could be older.
        assert_eq!(is_lost, [false, engine == EngineKind::Rio, true], "{engine}");
    }
}

#[test]
fn p8_a_target_that_owes_recovery_an_answer_ends_the_attempt_when_the_time_is_up() {
    let mut cluster = Cluster::with_volume(2);
    let (began, mut ended) = (cluster.now, None);
    let config = VolumeOpeningConfig { timeout_ns: S, ..opening(2) };
    let run = cluster.open_with(config, &mut |cluster, _, event| {
        match event {
            OpeningEvent::Progress(_) => cluster.mute = Some(1),
            OpeningEvent::Releases { .. } => ended = Some(cluster.now - began),
            _ => {}
        }
        true
    });
    assert_eq!(ended, Some(S + 1), "no sooner and no later");
    let error = run.error();
    assert!(matches!(error, VolumeOpenError::Call { server: 1, .. }), "{error}");
}

#[test]
fn t17_an_engine_that_the_volume_was_not_made_for_is_refused() {
    let mut cluster = Cluster::new(1);
    let sync = EngineKind::Sync;
    cluster.create(VolumeCreationConfig { engine: Some(sync), ..creating(1) }).unwrap();
    let config = VolumeOpeningConfig { engine: Some(EngineKind::Rio), ..opening(1) };
    let hindrance = Hindrance::MadeFor(sync);
    let error = VolumeOpenError::Engine { engine: EngineKind::Rio, hindrance };
    assert_eq!(cluster.open(config).error(), error);
    let opened = cluster.open(opening(1)).opened().volume;
    assert_eq!((opened.engine, opened.lease_ms), (sync, 0));
    assert!(opened.resume_claim(0).is_some_and(|claim| claim.unlogged));
}

/// The advice is followed to its end: each refusal names the next step, and each step opens.
#[test]
fn t19_a_lost_log_is_given_up_with_a_new_one_or_without_one() {
    let mut cluster = Cluster::with_volume(2);
    crash_with_a_gap(&mut cluster);
    let restart = |cluster: &mut Cluster, log| {
        let world = cluster.worlds.pop().unwrap();
        cluster.worlds.push(world.restarted_with_another_log(log));
    };
    let accepting = || VolumeOpeningConfig { accept_lost_log: true, ..opening(2) };

    restart(&mut cluster, None);
    let error = cluster.open(opening(2)).error();
    let due = AssembleError::LogDue { given: 1, blank: true };
    assert_eq!(error, VolumeOpenError::Members(due.into()));
    assert!(error.to_string().contains("accept_lost_log"), "{error}");
    let shown = cluster.open(VolumeOpeningConfig { purpose: Purpose::Inspect, ..opening(2) });
    assert_eq!(shown.opened().volume.outlook, Some(Err(error)));
    // A dry run reports what accepting the loss does, and changes nothing.
    let purpose = Purpose::DryRun;
    let dry = cluster.open(VolumeOpeningConfig { purpose, ..accepting() }).opened().volume;
    assert!(dry.outcome.streams.iter().all(|s| s.plan.log_given_up && s.plan.undo.is_empty()));

    // Without a new log, the volume goes on without one there.
    let mut opened = cluster.open(accepting()).opened();
    assert_eq!(
        opened.volume.outcome.streams[0].plan.in_doubt,
        dry.outcome.streams[0].plan.in_doubt
    );
    let lacking = Lacking { target: 1, what: Lack::Log };
    let without = (EngineKind::Sync, Some(Hindrance::Target(lacking)));
    assert_eq!((opened.volume.engine, opened.volume.fallback), without);
    assert!(opened.volume.outcome.streams[0].plan.log_given_up);
    assert_eq!(cluster.byte(0, 0, DATA_START + 2), 3, "nothing is undone (T26)");
    assert_eq!(opened.volume.members.labels[1].members[1].region, [0; 16]);
    assert!(opened.volume.resume_claim(1).is_some_and(|claim| claim.unlogged));
    cluster.cut(&mut opened.wires);
    // From now on it needs no acceptance, and still nothing is undone.
    let mut again = cluster.open(opening(2)).opened();
    assert_eq!((again.volume.engine, again.volume.fallback), without);
    assert!(again.volume.outcome.streams[0].plan.log_given_up);
    assert_eq!(cluster.byte(0, 0, DATA_START + 2), 3, "nothing is undone (T26)");
    cluster.cut(&mut again.wires);

    // A new log there is used once that is accepted.
    restart(&mut cluster, Some([9; 16]));
    let mut sync = cluster.open(opening(2)).opened();
    let given_up = Hindrance::LogGivenUp { target: 1 };
    assert_eq!((sync.volume.engine, sync.volume.fallback), (EngineKind::Sync, Some(given_up)));
    cluster.cut(&mut sync.wires);
    let mut rio = cluster.open(accepting()).opened();
    assert_eq!((rio.volume.engine, rio.volume.fallback), (EngineKind::Rio, None));
    assert_eq!(rio.volume.members.labels[1].members[1].region, [9; 16]);
    cluster.cut(&mut rio.wires);

    // With a new log at once.
    restart(&mut cluster, Some([8; 16]));
    let error = cluster.open(opening(2)).error();
    let due = AssembleError::LogDue { given: 1, blank: false };
    assert_eq!(error, VolumeOpenError::Members(due.into()));
    let mut opened = cluster.open(accepting()).opened();
    assert_eq!((opened.volume.engine, opened.volume.fallback), (EngineKind::Rio, None));
    assert!(opened.volume.outcome.streams[0].plan.log_given_up);
    assert_eq!(cluster.byte(0, 0, DATA_START + 2), 3, "nothing is undone (T26)");
    cluster.cut(&mut opened.wires);
    let again = cluster.open(opening(2)).opened();
    assert_eq!(again.volume.members.labels[1].members[1].region, [8; 16]);
}

#[test]
fn t24_labels_are_durable_on_all_drives_before_the_logs_are_read() {
    let mut cluster = Cluster::with_volume(2);
    let mut listed_with = Vec::new();
    cluster
        .open_with(opening(2), &mut |cluster, _, event| {
            if let OpeningEvent::Progress(progress) = event
                && progress.phase == Phase::List
            {
                let written = |w: &World, drive: usize| {
                    let history = &w.host.drives[drive].history;
                    history.iter().rev().take(2).any(|(_, what)| *what == What::Flush)
                };
                listed_with.push(written(&cluster.worlds[0], 0) && written(&cluster.worlds[1], 1));
            }
            true
        })
        .opened();
    assert!(!listed_with.is_empty() && listed_with.iter().all(|done| *done), "{listed_with:?}");
}

fn changing(change: VolumeChange) -> VolumeOpeningConfig {
    VolumeOpeningConfig { change, ..opening(2) }
}

/// Opens until the drives have done so many operations; then the initiator dies. Returns whether the
/// opening ended before.
fn open_for(cluster: &mut Cluster, config: VolumeOpeningConfig, operations: usize) -> bool {
    let done = |cluster: &Cluster| -> usize {
        let drives = cluster.worlds.iter().flat_map(|world| &world.host.drives);
        drives.map(|drive| drive.history.len()).sum()
    };
    let before = done(cluster);
    cluster.open_until(config, &mut |cluster| done(cluster) - before < operations)
}

#[test]
fn a_renamed_volume_has_the_new_name_and_a_cut_leaves_one_of_both() {
    let renaming = || changing(VolumeChange { name: Some("new".into()), grow: false });
    let mut cluster = Cluster::with_volume(2);
    let opened = cluster.open(renaming()).opened();
    assert_eq!(opened.volume.members.head.name, "new");
    drop(opened);
    let mut was_new = false;
    let mut steps = 1;
    loop {
        let mut cluster = Cluster::with_volume(2);
        let has_ended = open_for(&mut cluster, renaming(), steps);
        let any = || VolumeOpeningConfig { name: None, take_over: true, ..opening(2) };
        let opened = cluster.open(rival(any())).opened();
        let name = opened.volume.members.head.name.clone();
        assert!(name == "new" || name == "logs" && !was_new, "{name} after {steps}");
        was_new = name == "new";
        let names = opened.volume.members.labels.iter().map(|label| label.name.clone());
        assert!(names.eq([name.clone(), name]), "every label has the same");
        if has_ended {
            break;
        }
        steps += 1;
    }
    assert!(was_new && steps > 4);
    let bad = changing(VolumeChange { name: Some("a\n".into()), grow: false });
    assert_eq!(Cluster::with_volume(2).open(bad).error(), VolumeOpenError::Name);
}

#[test]
fn a_volume_grows_by_whole_stripe_units_and_keeps_its_blocks() {
    let growing = || changing(VolumeChange { name: None, grow: true });
    let mut cluster = Cluster::with_volume(2);
    let used = (BLOCKS - DATA_START) / 16 * 16;
    let (needed, blocks) = (DATA_START + used + 16, BLOCKS);
    let nothing = MembersError::NothingToGrow { member: 0, blocks, needed };
    let error = cluster.open(growing()).error();
    assert_eq!(error, VolumeOpenError::Members(nothing));
    // Labels of smaller drives: as if both drives had become larger.
    for (target, drive) in [(0, 0), (1, 1)] {
        for lba in [0, 1] {
            let block = cluster.worlds[target].host.drives[drive].block(lba);
            let mut label = Label::decode(&block, crc).unwrap();
            label.data_blocks = 160;
            cluster.worlds[target].host.drives[drive].overwrite(lba, label.encode(crc));
        }
    }
    let before = cluster.open(VolumeOpeningConfig { purpose: Purpose::Inspect, ..opening(2) });
    assert_eq!(before.result.unwrap().topology.blocks(), 2 * 160);
    let opened = cluster.open(growing()).opened();
    assert_eq!(opened.volume.topology.blocks(), 2 * used);
    let labels = opened.volume.members.labels.iter();
    assert!(labels.map(|label| label.data_blocks).eq([used, used]));
}
