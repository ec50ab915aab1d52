//! The moment at which a mount lets the storage forget a crash: its own recovery is durable then.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use riopipe_fs_core::file_journal::record::{Dependency, Record, RecordId};
use riopipe_fs_core::format::superblock::Superblock;
use riopipe_fs_core::fs::{Fs, MountError, MountOptions, MountReport};
use riopipe_fs_core::storage::StreamNo;
use riopipe_fs_core::{BlockNo, Ino};
use riopipe_nvme::digest::soft;

use crate::calls::{Mounted, NOW, dir, file, options, root};
use crate::hooked::{Hooked, Hooks};
use crate::memory::{Image, Memory, check_clean, image_of};

const BLOCKS: u64 = 65_536;

/// Keeps the worst state after a crash at each moment at which the storage may forget one, and
/// counts the reads.
#[derive(Default)]
struct Watch {
    moments: Mutex<Vec<Image>>,
    reads: AtomicU64,
}

impl Hooks for Watch {
    fn on_read(&self, _: BlockNo, _: &mut [u8]) {
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    fn on_recovered(&self, memory: &Memory) {
        self.moments.lock().unwrap().push(memory.durable_image());
    }
}

fn watched(image: Image) -> Arc<Hooked<Watch>> {
    Hooked::new(image, BLOCKS)
}

#[test]
fn the_storage_may_forget_a_crash_once_the_recovery_is_durable() {
    let m = Mounted::of(image_of(BLOCKS, &[]), BLOCKS);
    let fs = &m.fs;
    // A transaction, a file without a name, and records.
    let f = fs.create(&root(), Ino::ROOT, b"orphan", &file(0o600), NOW).unwrap();
    fs.unlink(&root(), Ino::ROOT, b"orphan", NOW).unwrap();
    fs.sync(NOW).unwrap();
    assert!(fs.attr(f.ino).is_ok(), "the kernel still refers to it");
    for name in [b"a", b"b"] {
        let f = fs.create(&root(), Ino::ROOT, name, &file(0o600), NOW).unwrap();
        fs.write(&root(), f.ino, 0, b"data", NOW).unwrap();
        fs.fsync(f.ino, false, NOW).unwrap();
    }
    let storage = watched(m.memory.durable_image());
    let (_, report) = Fs::mount(storage.clone(), options(), NOW).unwrap();
    let all = MountReport { records: 2, orphans: 1, ..report };
    assert!(report.replayed > 0 && report == all, "{report:?}");

    let moments = std::mem::take(&mut *storage.hooks.moments.lock().unwrap());
    let [moment] = moments.try_into().expect("once for a mount");
    let storage = watched(moment);
    let (fs, report) = Fs::mount(storage.clone(), options(), NOW).unwrap();
    assert_eq!(report, MountReport::default(), "nothing is left to recover");
    for name in [b"a", b"b"] {
        fs.lookup(&root(), Ino::ROOT, name).unwrap();
    }
    fs.unmount(NOW).unwrap();

    let storage = watched(storage.memory.image());
    let options = MountOptions { read_only: true, ..options() };
    Fs::mount(storage.clone(), options, NOW).unwrap();
    assert!(storage.hooks.moments.lock().unwrap().is_empty(), "a read-only mount recovers nothing");
}

/// No record needs another one today. The field is for later versions, and this one can't honour it.
#[test]
fn a_record_that_needs_another_one_is_refused() {
    let m = Mounted::of(image_of(BLOCKS, &[]), BLOCKS);
    let f = m.fs.create(&root(), Ino::ROOT, b"f", &file(0o600), NOW).unwrap();
    m.fs.fsync(f.ino, false, NOW).unwrap();
    let mut image = m.memory.durable_image();
    let layout = Superblock::decode(&image.read(0), soft).unwrap().layout(soft).unwrap();
    let decode = |block| Record::decode(&layout, block, &mut |_| None);
    let found = image.blocks().find_map(|(at, block)| Some((at, decode(block)?.0)));
    let (at, mut record) = found.unwrap();
    record.dependencies.push(Dependency { stream: StreamNo(2), id: RecordId(77) });
    let [block] = record.encode(&layout).try_into().unwrap();
    image.write(at, Arc::new(block));

    let mount = |options| Fs::mount(watched(image.clone()), options, NOW);
    let error = mount(options()).unwrap_err();
    let RecordId(id) = record.header.id;
    let StreamNo(stream) = record.header.stream;
    assert_eq!(error, MountError::DependentRecord { stream, id });
    for words in ["needs", "--accept-lost-log", &format!("number {id} of stream {stream}")] {
        assert!(error.to_string().contains(words), "{error}");
    }
    let (fs, report) = mount(MountOptions { accept_lost_records: true, ..options() }).unwrap();
    assert_eq!(report.records, 0);
    fs.lookup(&root(), Ino::ROOT, b"f").unwrap_err();
    fs.unmount(NOW).unwrap();
}

/// One read for each block made the recovery of a full journal of 1 GiB take half a minute.
#[test]
fn the_log_is_read_many_blocks_at_a_time() {
    let m = Mounted::of(image_of(BLOCKS, &[]), BLOCKS);
    let d = m.fs.create(&root(), Ino::ROOT, b"d", &dir(0o700), NOW).unwrap();
    for n in 0..6000 {
        let name = format!("{n:0>100}");
        m.fs.create(&root(), d.ino, name.as_bytes(), &file(0o600), NOW).unwrap();
    }
    m.fs.sync(NOW).unwrap();
    let used = m.fs.load().journal.used;
    assert!(used > 300, "{used} blocks");
    let image = m.memory.durable_image();
    let storage = watched(image.clone());
    let (fs, report) = Fs::mount(storage.clone(), options(), NOW).unwrap();
    assert!(report.replayed > 0);
    let reads = storage.hooks.reads.load(Ordering::Relaxed);
    assert!(reads < used / 2, "{reads} reads for {used} blocks");
    let d = fs.lookup(&root(), Ino::ROOT, b"d").unwrap();
    fs.lookup(&root(), d.ino, format!("{:0>100}", 5999).as_bytes()).unwrap();
    fs.unmount(NOW).unwrap();
    check_clean(&storage.memory.image(), BLOCKS);
}
