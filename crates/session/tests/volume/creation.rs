//! Making a volume.

use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;
use riopipe_session::initiator::volume::creation::VolumeCreationConfig;
use riopipe_session::initiator::volume::error::VolumeCreateError;
use riopipe_session::initiator::volume::members::MemberPlace;
use riopipe_session::label::DATA_START;

use crate::cluster::{Cluster, creating, opening};
use crate::world::VOLUME;

fn again(targets: usize) -> VolumeCreationConfig {
    VolumeCreationConfig { volume: VolumeId([9; 16]), name: "data".into(), ..creating(targets) }
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
    assert_eq!(twice, VolumeCreateError::Twice { member: 1 });
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
