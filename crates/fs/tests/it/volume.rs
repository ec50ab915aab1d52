//! File systems on volumes of a target.

use std::process::Command;

use riopipe::{CreateOptions, EngineKind, MemberAddr, OpenOptions, ReaderOptions, Volume};
use riopipe_fs::mkfs::{MkfsError, MkfsOptions, find_e2fs_program, make_on_volume};
use riopipe_target::{Config, Target};

#[test]
fn a_file_system_is_made_on_a_volume() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::on_loopback(&["mem:100M,lazy", "mem:100M,lazy"]);
    config.log = Some(format!("file:{}/log,size=1M", dir.path().display()));
    let target = Target::start(&config).unwrap();
    let address = target.addresses()[0];
    let member = |nsid| MemberAddr {
        host: address.ip().to_string(),
        port: address.port(),
        nqn: Some(target.subnqn().to_owned()),
        nsid,
    };
    let members = [member(1), member(2)];
    let create = CreateOptions { engine: Some(EngineKind::Rio), ..CreateOptions::default() };
    Volume::create("files", &members, &create).unwrap();
    let (volume, _) = Volume::open("files", &members, &OpenOptions::default()).unwrap();
    let mut options = MkfsOptions::default();
    let made = make_on_volume(&volume, &options, &mut |_, _| ()).unwrap();
    assert_eq!(made.bytes, volume.blocks() * 4096);

    let refused = make_on_volume(&volume, &options, &mut |_, _| ()).unwrap_err();
    assert!(matches!(refused, MkfsError::HasContent { .. }), "{refused}");
    options.force = true;
    let mut steps = Vec::new();
    make_on_volume(&volume, &options, &mut |done, all| steps.push((done, all))).unwrap();
    assert!(steps.is_sorted() && steps.last().is_some_and(|(done, all)| done == all));

    let mut image = vec![0; volume.blocks() as usize * 4096];
    let reader = volume.reader(&ReaderOptions::default());
    for (at, part) in (0..).step_by(256).zip(image.chunks_mut(256 * 4096)) {
        reader.read(at, part, None).unwrap();
    }
    let copy = dir.path().join("copy.img");
    std::fs::write(&copy, image).unwrap();
    let check = Command::new(find_e2fs_program("e2fsck").unwrap()).arg("-fn").arg(&copy).output();
    assert!(check.unwrap().status.success());
    drop(reader);
    volume.close().unwrap();
    target.stop().unwrap();
}
