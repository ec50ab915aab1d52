use std::slice::from_ref;

use super::*;

fn roundtrip(spec: &str) {
    let log = open_log(spec).unwrap();
    let mut part = log.part(4096..8192).unwrap();
    assert_eq!(part.len(), 4096);
    part.write(64, &[7; 64]);
    part.write_word(128, 0x0102_0304_0506_0708);
    part.fence().unwrap();
    let mut bytes = [0; 80];
    part.read(56, &mut bytes);
    assert_eq!(&bytes[..8], &[0; 8]);
    assert_eq!(&bytes[8..72], &[7; 64]);
    assert_eq!(&bytes[72..], &[8, 7, 6, 5, 4, 3, 2, 1], "words are little endian");
}

#[test]
fn each_kind_keeps_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log").display().to_string();
    let specs = [
        format!("file:{path},size=64K"),
        format!("dax:{path}"),
        format!("block:{path}"),
        "mem:64K".into(),
    ];
    for spec in specs {
        roundtrip(&spec);
        if !spec.starts_with("mem") {
            // The file has the content of the mapping or the mirror.
            let bytes = std::fs::read(&path).unwrap();
            assert_eq!(&bytes[4096 + 64..4096 + 128], &[7; 64], "{spec}");
            std::fs::write(&path, [0; 65536]).unwrap();
        }
    }
}

#[test]
fn what_was_written_is_there_after_reopening() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log").display().to_string();
    for kind in ["file", "block"] {
        let log = open_log(&format!("{kind}:{path},size=8K")).unwrap();
        let mut part = log.part(0..64).unwrap();
        part.write(0, &[3; 64]);
        part.fence().unwrap();
        // Handed out once more, the part is read from the medium.
        drop(part);
        let mut bytes = [0; 64];
        log.part(0..64).unwrap().read(0, &mut bytes);
        assert_eq!(bytes, [3; 64], "{kind}");
        log.sync(from_ref(&(0..log.len()))).unwrap();
        drop(log);
        let log = open_log(&format!("{kind}:{path}")).unwrap();
        assert_eq!(log.len(), 8192);
        let mut bytes = [0; 64];
        log.part(0..64).unwrap().read(0, &mut bytes);
        assert_eq!(bytes, [3; 64], "{kind}");
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_block_log_is_written_by_its_fence_and_only_where_it_changed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let log = open_log(&format!("block:{},size=64K", path.display())).unwrap();
    let mut part = log.part(8192..8192 + 5 * 4096 + 64).unwrap();
    part.write(4096 - 64, &[1; 128]);
    part.write_word(5 * 4096 + 56, u64::MAX);
    assert_eq!(std::fs::read(&path).unwrap(), [0; 65536], "nothing before the fence");
    // Another writer's bytes in a block that the part has not touched stay.
    let other = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_at(&other, &[9; 4096], 0).unwrap();
    part.fence().unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let mut expected = vec![0; 65536];
    expected[..4096].fill(9);
    expected[8192 + 4096 - 64..][..128].fill(1);
    expected[8192 + 5 * 4096 + 56..][..8].fill(0xff);
    assert_eq!(bytes, expected);
}

#[test]
fn parts_of_a_block_log_share_no_block() {
    let dir = tempfile::tempdir().unwrap();
    let log = open_log(&format!("block:{},size=64K", dir.path().join("log").display())).unwrap();
    let first = log.part(8192..8192 + 128).unwrap();
    let next = 8192 + 128..16384;
    assert_eq!(
        log.part(next.clone()).err(),
        Some(PartError::InUse { part: next, in_use: 8192..8192 + 128 })
    );
    log.part(8192 + 4096..16384).unwrap();
    log.part(0..8192).unwrap();
    drop(first);
    log.part(8192 + 128..16384).unwrap();
}

#[test]
fn a_block_log_reports_what_it_survives() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log").display().to_string();
    let spec = format!("block:{path},size=64K");
    let before = survival_once_created(&spec).unwrap().unwrap();
    let log = open_log(&spec).unwrap();
    assert_eq!(log.survives(), before, "the prediction for a missing file was right");
    assert_eq!(log.survives().process_kill, Kept::Completed);
    assert_eq!(survival_once_created(&spec).unwrap(), None, "it is there now");
    // A file never counts as protected: a log stamped `block` is accepted after a power cut.
    assert!(log.describe().contains("in place of a device"), "{}", log.describe());
    let in_memory = log.survives().power_cut == Kept::Nothing;
    assert_eq!(log.kind(), if in_memory { LogKind::File } else { LogKind::Block });
    assert!(log.survives().note.contains(if in_memory { "tmpfs" } else { "no power-loss" }));
    if let Ok(dir) = tempfile::tempdir_in("/dev/shm") {
        let spec = format!("block:{},size=64K", dir.path().join("log").display());
        let before = survival_once_created(&spec).unwrap().unwrap();
        let log = open_log(&spec).unwrap();
        assert_eq!(log.survives(), before);
        assert_eq!((log.survives().power_cut, log.kind()), (Kept::Nothing, LogKind::File));
    }
}

#[test]
fn unusable_block_logs_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log").display().to_string();
    std::fs::write(&path, [0; 65536]).unwrap();
    for (spec, words) in [
        (format!("block:{path},plp"), "a file never counts"),
        (format!("block:{path},size=128K"), "leave size= out"),
        ("block:".to_owned(), "no path"),
        (format!("block:{path},fast"), "unknown option"),
        ("block:/dev/null".to_owned(), "not a block device"),
        ("block:/dev/null,size=64K".to_owned(), "size= is for a file"),
        (format!("block:{}/none", dir.path().display()), "No such file"),
        (format!("block:{}/none,plp,size=8K", dir.path().display()), "a file never counts"),
        (format!("block:{}", dir.path().display()), "not a block device"),
    ] {
        let text = open_log(&spec).err().unwrap().to_string();
        assert!(text.contains(words), "{spec}: {text}");
    }
}

#[test]
fn a_block_log_reports_a_deleted_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let log = open_log(&format!("block:{},size=64K", path.display())).unwrap();
    log.check().unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(log.check(), Err(Gone::Deleted));
}

#[test]
fn a_log_is_read_without_being_opened_for_service() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log").display().to_string();
    for kind in ["file", "block"] {
        let spec = format!("{kind}:{path},size=64K");
        let log = open_log(&spec).unwrap();
        let mut part = log.part(8192..16384).unwrap();
        part.write(8, &[7; 8]);
        part.fence().unwrap();
        let reader = read_log(&spec).unwrap();
        assert!(reader.is_served(), "{kind}");
        assert_eq!(reader.len(), 65536);
        assert_eq!(reader.read(8200..8224).unwrap()[..8], [7; 8], "{kind}");
        assert_eq!(reader.read(65528..70000).unwrap().len(), 8, "{kind}: as far as it is there");
        drop((log, part));
        assert!(!read_log(&spec).unwrap().is_served(), "{kind}");
        open_log(&spec).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(read_log(&spec), Err(OpenError::Os { .. })));
    }
    assert!(matches!(read_log("mem:2M"), Err(OpenError::Kind { .. })));
    assert!(matches!(read_log("file:/dev/null"), Err(OpenError::Kind { .. })));
}

#[test]
fn parts_never_overlap_and_come_back() {
    let log = open_log("mem:8K").unwrap();
    let first = log.part(0..4096).unwrap();
    assert_eq!(
        log.part(4088..8192).err(),
        Some(PartError::InUse { part: 4088..8192, in_use: 0..4096 })
    );
    let second = log.part(4096..8192).unwrap();
    std::thread::spawn(move || drop(second)).join().unwrap();
    drop(log.part(4096..8192).unwrap());
    drop(first);
    drop(log.part(0..8192).unwrap());
    for part in [4..64, 0..60, 64..64, 0..8200] {
        assert!(matches!(log.part(part), Err(PartError::OutOfRange { .. })));
    }
}

#[test]
#[should_panic(expected = "not aligned words of a part")]
fn nothing_outside_the_part_is_touched() {
    let log = open_log("mem:8K").unwrap();
    log.part(0..64).unwrap().write(8, &[0; 64]);
}

#[test]
fn a_log_is_locked_while_it_is_served() {
    // T8.
    let dir = tempfile::tempdir().unwrap();
    let spec = format!("file:{},size=8K", dir.path().join("log").display());
    let log = open_log(&spec).unwrap();
    let part = log.part(0..64).unwrap();
    assert!(matches!(open_log(&spec), Err(OpenError::Locked { .. })));
    drop(log);
    assert!(matches!(open_log(&spec), Err(OpenError::Locked { .. })), "a part is still in use");
    drop(part);
    open_log(&spec).unwrap();
}

#[test]
fn a_file_that_is_too_short_or_too_long_is_refused_and_one_that_goes_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log").display().to_string();
    assert!(matches!(open_log(&format!("file:{path}")), Err(OpenError::NoSuchFile { .. })));
    let log = open_log(&format!("file:{path},size=8K")).unwrap();
    log.check().unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(log.check(), Err(Gone::Deleted));
    drop(log);

    std::fs::write(&path, [0; 4096]).unwrap();
    let refused = open_log(&format!("file:{path},size=8K")).err().unwrap();
    assert!(matches!(refused, OpenError::Size { .. }), "{refused}");
    std::fs::write(&path, [0; 5000]).unwrap();
    assert!(matches!(open_log(&format!("file:{path}")), Err(OpenError::Size { .. })));
}

#[test]
fn only_persistent_memory_survives_the_power() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log").display().to_string();
    let log = open_log(&format!("file:{path},size=8K")).unwrap();
    assert_eq!(log.survives().process_kill, Kept::Completed);
    assert_eq!(log.survives().power_cut, Kept::Nothing);
    drop(log);
    let log = open_log(&format!("dax:{path}")).unwrap();
    if log.survives().power_cut != Kept::Completed {
        assert!(log.survives().note.contains("only as durable as memory"));
    }
}

#[test]
fn a_drive_s_memory_is_named_by_its_address_and_nothing_else() {
    for (spec, parts) in [
        ("pci:nvme0", &["\"nvme0\" is no PCI address", "lspci", "pci:ADDRESS"][..]),
        ("pci:", &["is no PCI address"]),
        ("pci:00:04.0,size=1M", &["used as a whole"]),
        ("pci:00:04.0,plp", &["unknown option \"plp\""]),
        ("pci:ffff:ff:1f.7", &["/sys/bus/pci/devices/ffff:ff:1f.7", "no such PCI device"]),
    ] {
        for error in [open_log(spec).err(), read_log(spec).err()] {
            let error = error.unwrap().to_string();
            for part in parts {
                assert!(error.contains(part), "{spec}: {part:?} in {error:?}");
            }
        }
    }
    assert_eq!(survival_once_created("pci:00:04.0").unwrap(), None, "nothing is created");
}

#[test]
fn boots_have_names() {
    let id = boot_id().unwrap();
    assert_eq!(id, boot_id().unwrap());
    assert_ne!(id, [0; 16]);
}

/// The bytes that this thread has made dirty so far, on file systems with a disk.
fn made_dirty() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/io").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    line.and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
}

#[test]
fn t24_a_sync_writes_again_only_what_is_used() {
    const LEN: usize = 16 << 20;
    // Not in /tmp, which may be memory.
    let test = std::env::current_exe().unwrap();
    let dir = tempfile::tempdir_in(test.parent().unwrap()).unwrap();
    let log = open_log(&format!("file:{},size=16M", dir.path().join("log").display())).unwrap();
    let sync = |used: &[Range<usize>]| {
        let before = made_dirty();
        log.sync(used).unwrap();
        made_dirty() - before
    };
    sync(from_ref(&(0..LEN)));
    if sync(from_ref(&(0..LEN))) < LEN as u64 {
        return eprintln!("not tested: this system does not count what is written");
    }
    let some = sync(&[0..8192, 1 << 20..(1 << 20) + 65536]);
    assert!((8192 + 65536..LEN as u64 / 2).contains(&some), "{some} bytes");
    assert!(sync(&[]) < LEN as u64 / 2);
}
