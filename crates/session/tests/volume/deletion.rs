//! Surveying targets, and deleting volumes.

use riopipe_order::attribute::VolumeId;
use riopipe_session::initiator::volume::creation::VolumeCreationConfig;
use riopipe_session::initiator::volume::deletion::{
    Deleted, DeletionSubject, VolumeDeleteError, VolumeDeletion, VolumeDeletionConfig,
};
use riopipe_session::initiator::volume::members::MemberPlace;
use riopipe_session::initiator::volume::survey::{Survey, VolumeSurvey};
use riopipe_session::label::{Label, LabelError};
use riopipe_session::wire::{Claim, claim_command};

use crate::cluster::{Cluster, creating, opening, rival};
use crate::opening::crash_with_a_gap;
use crate::world::{VOLUME, crc, riopipe_bytes};

fn deleting(targets: usize) -> VolumeDeletionConfig {
    let subject = DeletionSubject::Volume("logs".into());
    VolumeDeletionConfig { subject, targets, force: false, crc32c: crc }
}

fn forced(targets: usize) -> VolumeDeletionConfig {
    VolumeDeletionConfig { force: true, ..deleting(targets) }
}

fn survey(cluster: &mut Cluster) -> Survey {
    let targets = cluster.worlds.len();
    let mut survey = VolumeSurvey::new(targets, crc);
    let found = cluster.run(targets, usize::MAX, &mut |now, associations| {
        survey.advance(now, associations);
        survey.take_result()
    });
    found.expect("it ends").expect("the targets answer")
}

/// Deletes; `None` if the initiator dies before, after so many rounds.
fn delete_until(
    cluster: &mut Cluster,
    config: VolumeDeletionConfig,
    rounds: usize,
) -> Option<Result<Deleted, VolumeDeleteError>> {
    let targets = config.targets;
    let mut deletion = VolumeDeletion::new(config);
    cluster.run(targets, rounds, &mut |now, associations| {
        deletion.advance(now, associations);
        deletion.take_result()
    })
}

fn delete(
    cluster: &mut Cluster,
    config: VolumeDeletionConfig,
) -> Result<Deleted, VolumeDeleteError> {
    delete_until(cluster, config, usize::MAX).expect("it ends")
}

/// Nothing of the volume is left, and a volume is made of its drives without force.
fn assert_gone(cluster: &mut Cluster) {
    let found = survey(cluster);
    assert_eq!(found.volumes(), []);
    let logs = found.logs.iter().flatten();
    assert!(logs.clone().count() > 0 && logs.clone().all(|log| log.free_bytes == log.gap_bytes));
    let targets = cluster.worlds.len();
    cluster.create(creating(targets)).expect("the drives and the logs are free");
}

#[test]
fn a_deleted_volume_leaves_free_drives_and_logs() {
    let mut cluster = Cluster::with_volume(2);
    let before = survey(&mut cluster);
    let [volume] = &before.volumes()[..] else { panic!("{before:?}") };
    assert_eq!((volume.id, volume.missing().len(), volume.logs.len()), (VOLUME, 0, 2));
    assert!(!volume.is_owned());
    let deleted = delete(&mut cluster, deleting(2)).unwrap();
    assert_eq!((deleted.id, &deleted.name[..], deleted.drives.len()), (VOLUME, "logs", 2));
    let bytes = volume.logs.iter().map(|(target, log)| (*target, log.bytes));
    assert!(bytes.eq(deleted.logs.iter().copied()));
    assert_gone(&mut cluster);
    assert_eq!(
        delete_until(
            &mut cluster,
            VolumeDeletionConfig {
                subject: DeletionSubject::Volume("other".into()),
                ..deleting(2)
            },
            usize::MAX
        ),
        Some(Err(VolumeDeleteError::Unknown("other".into())))
    );
}

/// Whatever is left after a crash of the initiator is deleted by the same command.
#[test]
fn a_deletion_that_was_cut_off_may_be_repeated() {
    let mut rounds = 0;
    loop {
        let mut cluster = Cluster::with_volume(2);
        crash_with_a_gap(&mut cluster);
        let is_cut = delete_until(&mut cluster, deleting(2), rounds).is_none();
        match delete(&mut cluster, deleting(2)) {
            Ok(_) => {}
            // The first one has done it all.
            Err(VolumeDeleteError::Unknown(_)) => {}
            Err(error) => panic!("after {rounds} rounds: {error}"),
        }
        assert_gone(&mut cluster);
        if !is_cut {
            break;
        }
        rounds += 1;
    }
    assert!(rounds > 8, "{rounds}");
}

#[test]
fn t8_an_owner_is_displaced_by_force_only() {
    let mut cluster = Cluster::with_volume(2);
    let owner = cluster.open(rival(opening(2))).opened();
    let error = delete(&mut cluster, deleting(2)).unwrap_err();
    assert!(matches!(error, VolumeDeleteError::Owned { target: 0, .. }), "{error}");
    assert!(survey(&mut cluster).volume(VOLUME).is_owned());
    let deleted = delete(&mut cluster, forced(2)).unwrap();
    assert_eq!((deleted.drives.len(), deleted.logs.len()), (2, 2));
    drop(owner);
    assert_gone(&mut cluster);
}

#[test]
fn t20_a_volume_of_which_a_member_is_missing_is_deleted_by_force_only() {
    let mut cluster = Cluster::with_volume(2);
    for lba in [0, 1] {
        cluster.worlds[1].host.drives[1].overwrite(lba, vec![0; 4096]);
    }
    // The drive is there, with its identity: a deletion that was cut off leaves that.
    assert_eq!(survey(&mut cluster).volume(VOLUME).missing(), []);
    // The drives of one number have the same identity on all targets of these tests. A damaged label
    // keeps this one from being taken for the missing member.
    let mut damaged = b"RIOLABEL".to_vec();
    damaged.resize(4096, 0);
    cluster.worlds[0].host.drives[1].overwrite(0, damaged);
    let error = delete(&mut cluster, deleting(1)).unwrap_err();
    assert_eq!(error, VolumeDeleteError::Missing { members: vec![1] });
    let deleted = delete(&mut cluster, forced(1)).unwrap();
    assert_eq!((deleted.missing, deleted.logs.len()), (vec![1], 1));
    // Its partitions in the other log have no label any more. They are freed by the id.
    let left = survey(&mut cluster);
    let volume = left.volume(VOLUME);
    assert_eq!((volume.label, volume.logs.len(), volume.logs[0].0), (None, 1, 1));
    let by_id = |force| VolumeDeletionConfig {
        subject: DeletionSubject::Volume(VOLUME.to_string()),
        force,
        ..deleting(2)
    };
    let error = delete(&mut cluster, by_id(false)).unwrap_err();
    assert_eq!(error, VolumeDeleteError::Missing { members: Vec::new() });
    assert_eq!(delete(&mut cluster, by_id(true)).unwrap().logs.len(), 1);
    assert_gone(&mut cluster);
}

#[test]
fn of_two_volumes_with_one_name_none_is_deleted_by_it() {
    let mut cluster = Cluster::with_volume(1);
    let other = VolumeCreationConfig {
        volume: VolumeId([9; 16]),
        places: vec![MemberPlace { target: 0, nsid: 2 }],
        ..creating(1)
    };
    cluster.create(other).unwrap();
    let error = delete(&mut cluster, deleting(1)).unwrap_err();
    assert_eq!(error, VolumeDeleteError::Ambiguous("logs".into()));
    let subject = DeletionSubject::Volume(VolumeId([9; 16]).to_string());
    delete(&mut cluster, VolumeDeletionConfig { subject, ..deleting(1) }).unwrap();
    assert_eq!(survey(&mut cluster).volumes().len(), 1);
    delete(&mut cluster, deleting(1)).unwrap();
    assert_gone(&mut cluster);
}

#[test]
fn only_a_left_over_label_is_erased_without_force() {
    let mut cluster = Cluster::with_volume(1);
    let at = |nsid| MemberPlace { target: 0, nsid };
    let wipe = |places: &[MemberPlace], force| VolumeDeletionConfig {
        subject: DeletionSubject::Labels(places.to_vec()),
        force,
        ..deleting(1)
    };
    let in_use = VolumeDeleteError::InUse { drive: 0, volume: "logs".into() };
    assert_eq!(delete(&mut cluster, wipe(&[at(1)], false)), Err(in_use));
    let unlabelled = Err(VolumeDeleteError::NoLabel(1));
    assert_eq!(delete(&mut cluster, wipe(&[at(1), at(2)], true)), unlabelled);
    let unknown = Err(VolumeDeleteError::NoNamespace(0));
    assert_eq!(delete(&mut cluster, wipe(&[at(9)], true)), unknown);
    for lba in [0, 1] {
        let mut copy = cluster.worlds[0].host.drives[0].block(lba);
        copy[200] ^= 1;
        cluster.worlds[0].host.drives[1].overwrite(lba, copy);
    }
    let (drive, error) = (0, LabelError::Damaged);
    let damaged = Err(VolumeDeleteError::UnreadableLabel { drive, error });
    assert_eq!(delete(&mut cluster, wipe(&[at(2)], false)), damaged);
    let wiped = delete(&mut cluster, wipe(&[at(1), at(2)], true)).unwrap();
    assert_eq!((wiped.drives, wiped.logs), (vec![at(1), at(2)], Vec::new()));
    let left = survey(&mut cluster);
    assert!(left.drives.iter().all(|drive| drive.label == Err(LabelError::Blank)));
    assert_eq!(left.volume(VOLUME).logs.len(), 1, "the log is as it was");
}

fn label_of(cluster: &Cluster, drive: usize) -> Label {
    let copies = [0, 1].map(|lba| cluster.worlds[0].host.drives[drive].block(lba));
    Label::newest([&copies[0], &copies[1]], crc).unwrap()
}

fn put_label(drive: &mut crate::world::Drive, label: &Label) {
    for sequence in [label.sequence + 1, label.sequence + 2] {
        let copy = Label { sequence, ..label.clone() };
        drive.overwrite(Label::block_of(sequence), copy.encode(crc));
    }
}

fn erasing(nsid: u32) -> VolumeDeletionConfig {
    let subject = DeletionSubject::Labels(vec![MemberPlace { target: 0, nsid }]);
    VolumeDeletionConfig { subject, ..deleting(1) }
}

#[test]
fn t20_a_copied_label_counts_for_no_volume() {
    let mut cluster = Cluster::with_volume(1);
    let copy = Label { name: "mine".into(), generation: 1_000, ..label_of(&cluster, 0) };
    put_label(&mut cluster.worlds[0].host.drives[1], &copy);
    let found = survey(&mut cluster);
    assert_eq!(found.volume(VOLUME).label.map(|label| &label.name[..]), Some("logs"));
    let copied: Vec<bool> = found.drives.iter().map(|drive| drive.has_copied_label()).collect();
    assert_eq!(copied, [false, true, false]);
    let mine = DeletionSubject::Volume("mine".into());
    let error = delete(&mut cluster, VolumeDeletionConfig { subject: mine, ..deleting(1) });
    assert_eq!(error, Err(VolumeDeleteError::Unknown("mine".into())));
    // The backup stays when the volume goes, and is erased without force.
    let deleted = delete(&mut cluster, deleting(1)).unwrap();
    assert_eq!(deleted.drives, [MemberPlace { target: 0, nsid: 1 }]);
    assert_eq!(label_of(&cluster, 1).name, "mine");
    delete(&mut cluster, erasing(2)).unwrap();
    assert_gone(&mut cluster);
}

/// A forged label has the NGUID of its own drive, but then it contradicts the label of the volume.
#[test]
fn t20_a_forged_label_does_not_rename_a_volume() {
    let mut cluster = Cluster::with_volume(1);
    let mut forged = Label { name: "mine".into(), generation: 1_000, ..label_of(&cluster, 0) };
    forged.members.push(forged.members[0]);
    (forged.members[1].nguid, forged.index) = ([2; 16], 1);
    put_label(&mut cluster.worlds[0].host.drives[1], &forged);
    let mine = DeletionSubject::Volume("mine".into());
    let error = delete(&mut cluster, VolumeDeletionConfig { subject: mine, ..forced(1) });
    assert!(matches!(error, Err(VolumeDeleteError::Contradiction(_))), "{error:?}");
    assert_eq!(label_of(&cluster, 0).name, "logs");
    delete(&mut cluster, VolumeDeletionConfig { force: true, ..erasing(2) }).unwrap();
    delete(&mut cluster, deleting(1)).unwrap();
    assert_gone(&mut cluster);
}

/// Another program makes a volume of the drive while a deletion runs. Only in the moment between the
/// last reading of the label and the erasing is that not noticed.
#[test]
fn a_label_that_was_written_meanwhile_is_not_erased() {
    for subject in [deleting(1), VolumeDeletionConfig { force: true, ..erasing(1) }] {
        let (mut erased, mut noticed, mut written_at) = (0, 0, 0);
        loop {
            let mut cluster = Cluster::with_volume(1);
            let other = Label { volume: VolumeId([0x5a; 16]), ..label_of(&cluster, 0) };
            let mut deletion = VolumeDeletion::new(subject.clone());
            let mut round = 0;
            let result = cluster.run_beside(1, usize::MAX, &mut |now, attached, worlds| {
                if round == written_at {
                    put_label(&mut worlds[0].host.drives[0], &other);
                }
                round += 1;
                deletion.advance(now, attached);
                deletion.take_result()
            });
            if round <= written_at {
                break;
            }
            let place = MemberPlace { target: 0, nsid: 1 };
            noticed += usize::from(result == Some(Err(VolumeDeleteError::Changed(place))));
            let is_there = survey(&mut cluster).drives[0].label.is_ok();
            // Before the survey, the new volume is chosen.
            let was_chosen = matches!(&result, Some(Ok(deleted)) if deleted.id == VOLUME);
            erased += usize::from(!is_there && was_chosen);
            written_at += 1;
        }
        assert!(erased <= 1 && noticed > 0, "{erased} erased, {noticed} noticed");
    }
}

#[test]
fn a_label_of_a_volume_that_may_be_elsewhere_is_erased_by_force_only() {
    let mut cluster = Cluster::with_volume(1);
    let mut label = Label { volume: VolumeId([0x5a; 16]), ..label_of(&cluster, 0) };
    label.members.push(label.members[0]);
    (label.members[1].nguid, label.index) = ([2; 16], 1);
    label.members[0].nguid = [9; 16];
    put_label(&mut cluster.worlds[0].host.drives[1], &label);
    let in_use = VolumeDeleteError::InUse { drive: 0, volume: "logs".into() };
    assert_eq!(delete(&mut cluster, erasing(2)), Err(in_use));
    // Here, the other member is there, and has no label of this volume.
    label.members[0].nguid = [3; 16];
    put_label(&mut cluster.worlds[0].host.drives[1], &label);
    delete(&mut cluster, erasing(2)).unwrap();
    assert_eq!(survey(&mut cluster).volumes().len(), 1);
}

#[test]
fn a_drive_that_cannot_be_read_hides_no_other_volume() {
    let mut cluster = Cluster::with_volume(1);
    cluster.worlds[0].host.drives[1].failing = true;
    let found = survey(&mut cluster);
    assert_eq!(found.drives[1].label, Err(LabelError::ReadFailed));
    let (drive, error) = (0, LabelError::ReadFailed);
    let unreadable = VolumeDeleteError::UnreadableLabel { drive, error };
    assert_eq!(delete(&mut cluster, erasing(2)), Err(unreadable));
    delete(&mut cluster, deleting(1)).unwrap();
    cluster.worlds[0].host.drives[0].failing = true;
    let error = delete(&mut cluster, deleting(1)).unwrap_err();
    assert_eq!(error, VolumeDeleteError::Unknown("logs".into()));
}

#[test]
fn a_label_whose_name_has_control_characters_is_damaged() {
    let mut cluster = Cluster::with_volume(1);
    let label = Label { name: "a\u{1b}[2J".into(), ..label_of(&cluster, 0) };
    put_label(&mut cluster.worlds[0].host.drives[1], &label);
    assert_eq!(survey(&mut cluster).drives[1].label, Err(LabelError::Damaged));
}

/// Another program claims the volume on one target while a deletion runs. Then the log of the other
/// target stays, too.
#[test]
fn t8_a_volume_that_is_claimed_meanwhile_is_not_forgotten_in_part() {
    let (mut owned, mut claimed_at) = (0, 0);
    loop {
        let mut cluster = Cluster::with_volume(2);
        let found = survey(&mut cluster);
        let log = found.volume(VOLUME).logs[1].1.clone();
        let claim = Claim::plain(VOLUME, 50, log.streams, log.members).encode();
        let mut deletion = VolumeDeletion::new(deleting(2));
        let mut round = 0;
        let result = cluster.run_beside(2, usize::MAX, &mut |now, attached, worlds| {
            if round == claimed_at {
                let (admin, _) = worlds[1].admin();
                let sqe = riopipe_bytes(&claim_command()).cid(50).inline(4096);
                worlds[1].command(admin, sqe, &claim);
            }
            round += 1;
            deletion.advance(now, attached);
            deletion.take_result()
        });
        if round <= claimed_at {
            break;
        }
        if matches!(result, Some(Err(VolumeDeleteError::Owned { target: 1, .. }))) {
            owned += 1;
            let left = survey(&mut cluster);
            let logs: Vec<usize> = left.volume(VOLUME).logs.iter().map(|(at, _)| *at).collect();
            assert_eq!(logs, [0, 1], "after {claimed_at} rounds");
        }
        claimed_at += 1;
    }
    assert!(owned > 0);
}
