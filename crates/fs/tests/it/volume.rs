//! File systems on volumes of a target.

use std::process::Command;
use std::sync::Arc;

use riopipe::{
    CreateOptions, EngineKind, MemberAddr, OpenError, OpenOptions, ReaderOptions, Volume,
};
use riopipe_fs::backing::{Backing, FsOptions};
use riopipe_fs::fuse::now;
use riopipe_fs::mkfs::{MkfsError, MkfsOptions, find_e2fs_program, make_on_volume};
use riopipe_fs::storage::VolumeStorage;
use riopipe_fs_core::block::{BLOCK_BYTES, Block, BlockNo};
use riopipe_fs_core::storage::{BlockWrite, GroupSeq, Placement, Storage, StreamNo, WriteGroup};
use riopipe_target::{Config, Running, Target};

/// A target with drives, and a volume over all of them.
pub(crate) struct Scene {
    target: Running,
    members: Vec<MemberAddr>,
    /// The folder of the log, and of files that a test makes.
    dir: tempfile::TempDir,
}

impl Scene {
    fn new(drives: &[&str]) -> Self {
        Self::with_engine(drives, EngineKind::Rio)
    }

    pub(crate) fn with_engine(drives: &[&str], engine: EngineKind) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::on_loopback(drives);
        config.log = Some(format!("file:{}/log,size=1M", dir.path().display()));
        let target = Target::start(&config).unwrap();
        let address = target.addresses()[0];
        let member = |nsid| MemberAddr {
            host: address.ip().to_string(),
            port: address.port(),
            nqn: Some(target.subnqn().to_owned()),
            nsid,
        };
        let members: Vec<_> = (1..=drives.len() as u32).map(member).collect();
        let create = CreateOptions { engine: Some(engine), ..CreateOptions::default() };
        Volume::create("files", &members, &create).unwrap();
        Self { target, members, dir }
    }

    /// The volume, also after an owner that has not closed it.
    pub(crate) fn open(&self) -> Volume {
        let options = OpenOptions { take_over: true, ..OpenOptions::default() };
        self.try_open(&options).unwrap()
    }

    pub(crate) fn try_open(&self, options: &OpenOptions) -> Result<Volume, OpenError> {
        Volume::open("files", &self.members, options).map(|(volume, _)| volume)
    }

    pub(crate) fn stop(self) {
        self.target.stop().unwrap();
    }
}

/// Writes a block in place.
fn overwrite(storage: &VolumeStorage, stream: u16, at: u64, data: Block, flush: bool) -> GroupSeq {
    let data = Arc::new(data);
    let write = BlockWrite { at: BlockNo(at), data, placement: Placement::InPlace };
    let group = WriteGroup { writes: vec![write], flush, ..WriteGroup::default() };
    storage.submit(StreamNo(stream), group).unwrap()
}

#[test]
fn in_place_lists_stay_until_the_file_system_is_recovered() {
    let scene = Scene::new(&["ssd:flash,size=200M,lazy"]);
    let volume = scene.open();
    make_on_volume(&volume, &MkfsOptions::default(), &mut |_, _| ()).unwrap();
    volume.close().unwrap();
    let has_list = || {
        let volume = scene.open();
        let has_list = !volume.in_place(1).is_empty();
        volume.close().unwrap();
        has_list
    };

    // A crash, with an overwrite that is not durable, of a file system whose superblock is lost.
    let storage = VolumeStorage::new(scene.open()).unwrap();
    let mut superblock = [0; BLOCK_BYTES];
    storage.read(BlockNo(0), &mut superblock).unwrap();
    let seq = overwrite(&storage, 0, 0, [0; BLOCK_BYTES], true);
    storage.wait_durable(StreamNo(0), seq).unwrap();
    let free = storage.blocks() - 9;
    let seq = overwrite(&storage, 1, free, [7; BLOCK_BYTES], false);
    storage.wait_complete(StreamNo(1), seq).unwrap();
    drop(storage);
    assert!(has_list());

    // It can't be recovered, so nothing is forgotten.
    let backing = Backing::of_volume(scene.open()).unwrap();
    backing.mount(&FsOptions::default()).map(drop).unwrap_err();
    backing.close().unwrap();
    assert!(has_list());

    let storage = VolumeStorage::new(scene.open()).unwrap();
    let seq = overwrite(&storage, 0, 0, superblock, true);
    storage.wait_durable(StreamNo(0), seq).unwrap();
    storage.close().unwrap();
    assert!(has_list());
    // A read-only mount recovers nothing.
    let backing = Backing::of_volume(scene.open()).unwrap();
    let options = FsOptions { read_only: true, ..FsOptions::default() };
    backing.mount(&options).unwrap();
    backing.close().unwrap();
    assert!(has_list());

    let backing = Backing::of_volume(scene.open()).unwrap();
    let (fs, _) = backing.mount(&FsOptions::default()).unwrap();
    let seq = overwrite(backing.storage(), 1, free, [8; BLOCK_BYTES], true);
    backing.storage().wait_durable(StreamNo(1), seq).unwrap();
    fs.unmount(now()).unwrap();
    drop(fs);
    backing.close().unwrap();
    assert!(!has_list());
    scene.target.stop().unwrap();
}

#[test]
fn a_file_system_is_made_on_a_volume() {
    let scene = Scene::new(&["mem:100M,lazy", "mem:100M,lazy"]);
    let volume = scene.open();
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
    let copy = scene.dir.path().join("copy.img");
    std::fs::write(&copy, image).unwrap();
    let check = Command::new(find_e2fs_program("e2fsck").unwrap()).arg("-fn").arg(&copy).output();
    assert!(check.unwrap().status.success());
    drop(reader);
    volume.close().unwrap();
    scene.target.stop().unwrap();
}
