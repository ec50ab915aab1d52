//! The moment at which a mount lets the storage forget a crash: its own recovery is durable then.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use riopipe_fs_core::file_journal::record::{Dependency, Record, RecordId};
use riopipe_fs_core::format::superblock::{State, Superblock};
use riopipe_fs_core::fs::{Fs, MountError, MountOptions, MountReport, give_up_recovery};
use riopipe_fs_core::journal::format::{Header, block_type};
use riopipe_fs_core::storage::StreamNo;
use riopipe_fs_core::{Block, BlockNo, Ino};
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

/// Whether a block is the one that is meant.
type Meant<'a> = &'a dyn Fn(u64, &Block) -> bool;

/// Damages the only block of an image that `is_meant` finds.
fn damage(image: &mut Image, is_meant: impl Fn(u64, &Block) -> bool) {
    let found = image.blocks().filter(|&(at, block)| is_meant(at, block));
    let found: Vec<_> = found.map(|(at, block)| (at, *block)).collect();
    let [(at, mut block)] = found.try_into().expect("one block");
    block[24] ^= 1;
    image.write(at, Arc::new(block));
}

/// e2fsck refuses a file system with the private bit. So the message must not send the user there.
#[test]
fn a_recovery_that_damage_makes_impossible_can_be_given_up() {
    let m = Mounted::of(image_of(BLOCKS, &[]), BLOCKS);
    for name in [b"a", b"b", b"f"] {
        m.fs.create(&root(), Ino::ROOT, name, &file(0o600), NOW).unwrap();
        m.fs.sync(NOW).unwrap();
    }
    let f = m.fs.lookup(&root(), Ino::ROOT, b"f").unwrap();
    m.fs.write(&root(), f.ino, 0, b"data", NOW).unwrap();
    m.fs.fsync(f.ino, false, NOW).unwrap();
    let left = m.memory.durable_image();
    let accepting = || MountOptions { accept_lost_records: true, ..options() };
    let saved = |left: &Image| {
        let image = crate::image::Image::new(BLOCKS >> 8, &[]);
        left.save(&image.path(), BLOCKS);
        image
    };
    let is_refused = |left: &Image, options| {
        let error = Fs::mount(watched(left.clone()), options, NOW).unwrap_err();
        assert!(error.is_damage());
        let text = error.to_string();
        assert!(text.contains("`rio fs fsck --accept-lost-log`"), "{text}");
        assert!(!text.contains("run e2fsck"), "{text}");
        assert_eq!(saved(left).repair().code, 8, "e2fsck refuses it");
    };

    // Without the table no record can be read, but the rest is recovered.
    let mut no_table = left.clone();
    damage(&mut no_table, |_, block| block.starts_with(b"RIOFSTAB"));
    is_refused(&no_table, options());
    let (fs, report) = Fs::mount(watched(no_table), accepting(), NOW).unwrap();
    assert_eq!(report.records, 0);
    assert!(report.replayed > 0);
    fs.unmount(NOW).unwrap();

    // Without one of these nothing is recovered.
    let is_journal = |_: u64, block: &Block| {
        let header = Header::decode(block);
        header.is_some_and(|header| header.block_type == block_type::SUPERBLOCK_V2)
    };
    let is_descriptors = |at: u64, _: &Block| at == 1;
    // Before the damaged transaction comes one that has a superblock with the private bit.
    let transactions = left.blocks().filter_map(|(_, block)| Header::decode(block));
    let commits = transactions.filter(|header| header.block_type == block_type::COMMIT);
    let first = commits.map(|header| header.sequence).min().unwrap();
    let second = Header { block_type: block_type::DESCRIPTOR, sequence: first + 1 };
    let is_second = |_: u64, block: &Block| Header::decode(block) == Some(second);
    let meant: [(Meant<'_>, _); 3] =
        [(&is_journal, false), (&is_descriptors, true), (&is_second, true)];
    for (is_meant, has_first) in meant {
        let mut damaged = left.clone();
        damage(&mut damaged, is_meant);
        is_refused(&damaged, options());
        is_refused(&damaged, accepting());

        let storage = watched(damaged);
        give_up_recovery(&*storage, soft).unwrap();
        let damaged = storage.memory.durable_image();
        // The log is empty now, up to the damage.
        if let Err(error) = Fs::mount(watched(damaged.clone()), accepting(), NOW) {
            assert!(error.to_string().ends_with(": run e2fsck"), "{error}");
        }
        let image = saved(&damaged);
        let state = image.superblock().state();
        assert!(state.contains(State::ERROR), "e2fsck shall check everything");
        let repaired = image.repair();
        assert!(matches!(repaired.code, 0 | 1), "{}", repaired.output);
        image.assert_clean();
        let (fs, _) = Fs::mount(watched(Image::of_file(&image.path())), options(), NOW).unwrap();
        let first = fs.lookup(&root(), Ino::ROOT, b"a");
        assert_eq!(first.is_ok(), has_first, "what was before the damage is there");
        fs.unmount(NOW).unwrap();
    }
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
