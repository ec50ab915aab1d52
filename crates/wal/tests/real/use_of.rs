//! The use of a log: append, wait, read, checkpoint, trim, close.

use riopipe::EngineKind;
use riopipe_wal::{AppendError, Lsn, Wal, WalOptions, WalPlace};

use crate::site::{Drive, PLACE, SOON, Site, options, read, reopen, soon};

fn record(number: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![number as u8; len.max(8)];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// With each engine, on drives with and without a volatile cache.
#[test]
fn records_are_there_after_a_close() {
    for drive in [Drive::Protected, Drive::Volatile] {
        for engine in [EngineKind::Rio, EngineKind::Sync] {
            let site = Site::new(drive, engine);
            let (volume, _) = site.open();
            let wal = Wal::create(&volume, PLACE, &options()).unwrap();
            // Empty, short, longer than a block, longer than a group.
            let lens = [0, 10, 4008, 9000, 300 << 10];
            let mut all = Vec::new();
            for (number, len) in lens.into_iter().enumerate() {
                let bytes = if len == 0 { Vec::new() } else { record(number as u64, len) };
                let lsn = wal.append(&bytes).unwrap();
                wal.wait_durable(lsn, Some(SOON)).unwrap();
                all.push((lsn, bytes));
            }
            assert!(read(&wal, Lsn(0)) == all, "{drive:?} {engine}");
            wal.close(Some(SOON)).unwrap();
            volume.close().unwrap();

            let (volume, recovery) = site.open();
            let (wal, _) = reopen(&volume, &recovery, PLACE);
            assert!(read(&wal, Lsn(0)) == all, "{drive:?} {engine}");
            // From any Lsn: the first record that begins there or later.
            for (number, (lsn, _)) in all.iter().enumerate() {
                assert!(read(&wal, *lsn) == all[number..]);
                assert!(read(&wal, Lsn(lsn.0 + 1)) == all[number + 1..]);
            }
            let lsn = wal.append(b"more").unwrap();
            wal.wait_durable(lsn, Some(SOON)).unwrap();
            all.push((lsn, b"more".to_vec()));
            assert!(read(&wal, Lsn(0)) == all);
            wal.close(Some(SOON)).unwrap();
            volume.close().unwrap();
        }
    }
}

/// Records that wait are packed into groups that the stream takes.
#[test]
fn a_stream_with_little_memory_gets_small_groups() {
    for engine in [EngineKind::Rio, EngineKind::Sync] {
        let site = Site::new(Drive::Protected, engine);
        let (volume, _) = site.open();
        let mut options = options();
        options.stream.kept_bytes_max = 64 << 10;
        let wal = Wal::create(&volume, PLACE, &options).unwrap();
        let mut all = Vec::new();
        // The second record alone is larger than the memory.
        for (number, len) in [(0, 3000), (1, 100 << 10), (2, 3000)] {
            let bytes = record(number, len);
            all.push((wal.append(&bytes).unwrap(), bytes));
        }
        wal.wait_durable(all[2].0, Some(SOON)).expect("the log goes on");
        assert!(read(&wal, Lsn(0)) == all, "{engine}");
        wal.close(Some(SOON)).unwrap();
        volume.close().unwrap();
    }
}

/// As above, with fewer slots in the ordering log than a large group has requests.
#[test]
fn a_stream_with_few_slots_gets_small_groups() {
    for drive in [Drive::Protected, Drive::Volatile] {
        let site = Site::with_slots(drive, EngineKind::Rio, 4);
        let (volume, _) = site.open();
        assert_eq!(volume.info().members[0].slots, 4);
        let options = WalOptions { group_bytes: 8 << 20, queue_bytes: 8 << 20, ..options() };
        let place = WalPlace { blocks: 8192, ..PLACE };
        let wal = Wal::create(&volume, place, &options).unwrap();
        let bytes = record(1, 6 << 20);
        let lsn = wal.append(&bytes).unwrap();
        wal.wait_durable(lsn, Some(SOON)).expect("the log goes on");
        assert!(read(&wal, Lsn(0)) == [(lsn, bytes)], "{drive:?}");
        wal.close(Some(SOON)).unwrap();
        volume.close().unwrap();
    }
}

#[test]
fn a_log_wraps_around_as_long_as_it_is_trimmed() {
    for drive in [Drive::Protected, Drive::Volatile] {
        let site = Site::new(drive, EngineKind::Rio);
        let (volume, mut recovery) = site.open();
        let place = WalPlace { blocks: 33, ..PLACE };
        let mut wal = Wal::create(&volume, place, &options()).unwrap();
        let mut lsns = Vec::new();
        for number in 0..400 {
            let lsn = wal.append(&record(number, 3000)).unwrap();
            wal.wait_durable(lsn, Some(SOON)).unwrap();
            lsns.push(lsn);
            if number % 10 == 9 {
                let keep = lsns[lsns.len() - 5];
                wal.checkpoint(keep, b"state").unwrap();
                wal.trim(keep).unwrap();
            }
            if number % 101 == 100 {
                // Also after a crash of its owner.
                drop(wal);
                let again = Wal::open(&volume, &recovery, place, &options()).unwrap();
                wal = again.0;
                assert_eq!(again.1.checkpoint.unwrap().bytes, b"state");
                recovery.streams.clear();
            }
        }
        let last = read(&wal, *lsns.last().unwrap());
        assert_eq!(last.first().unwrap().1, record(399, 3000));
        wal.close(Some(SOON)).unwrap();
    }
}

#[test]
fn a_full_log_is_reported_and_accepts_records_after_a_trim() {
    let site = Site::rio();
    let (volume, _) = site.open();
    let place = WalPlace { blocks: 17, ..PLACE };
    let options = WalOptions {
        queue_bytes: 8000,
        space_timeout: std::time::Duration::from_millis(20),
        ..options()
    };
    let wal = Wal::create(&volume, place, &options).unwrap();
    let mut last = Lsn(0);
    let error = loop {
        match wal.append(&record(1, 3000)) {
            Ok(lsn) => last = lsn,
            // A slow machine may fall behind for a while.
            Err(AppendError::Busy { .. }) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(error, AppendError::LogFull { .. }) && error.is_retryable(), "{error}");
    assert!(wal.stat().durable <= last, "waiting records are not durable");
    soon("space", || {
        wal.trim(wal.stat().durable).unwrap();
        wal.append(&record(2, 3000)).is_ok()
    });
    // Waiting records need space, too; a log that is being closed is trimmed as any other.
    soon("closed", || {
        let _ = wal.trim(wal.stat().durable);
        wal.close(Some(std::time::Duration::from_millis(20))).is_ok()
    });
}

/// Trimming records of an earlier opening reads blocks, which may fail for a while.
#[test]
fn a_trim_that_failed_can_be_repeated() {
    let site = Site::new(Drive::Volatile, EngineKind::Rio);
    let (volume, recovery) = site.open();
    let wal = Wal::create(&volume, PLACE, &options()).unwrap();
    let lsns: Vec<_> = (0..40).map(|_| wal.append(&[0xA7; 3000]).unwrap()).collect();
    wal.close(Some(SOON)).unwrap();
    let (wal, found) = reopen(&volume, &recovery, PLACE);
    site.damage(&[0xA7; 50]);
    wal.trim(lsns[30]).unwrap();
    // The log's thread trims before it reads.
    assert!(wal.records(Lsn(0)).next().unwrap().is_err(), "its blocks can't be read");
    assert_eq!(wal.stat().trimmed, found.trimmed);
    site.damage(&[0xA7; 50]);
    wal.trim(lsns[30]).unwrap();
    soon("the records are trimmed", || wal.stat().trimmed == lsns[30]);
    assert_eq!(read(&wal, Lsn(0)).len(), 10);
    wal.close(Some(SOON)).unwrap();
}

#[test]
fn a_checkpoint_has_its_place_among_the_records() {
    let site = Site::rio();
    let (volume, recovery) = site.open();
    let wal = Wal::create(&volume, PLACE, &options()).unwrap();
    let first = wal.append(b"first").unwrap();
    let second = wal.append(b"second").unwrap();
    let checkpoint = wal.checkpoint(second, &vec![7; 20_000]).unwrap();
    let third = wal.append(b"third").unwrap();
    assert!(first < second && second < checkpoint && checkpoint < third);
    wal.close(Some(SOON)).unwrap();

    let (wal, found) = reopen(&volume, &recovery, PLACE);
    let last = found.checkpoint.unwrap();
    assert_eq!((last.lsn, last.checkpoint), (checkpoint, Some(second)));
    assert_eq!(last.bytes, vec![7; 20_000]);
    let from_there: Vec<_> = read(&wal, second).into_iter().map(|(lsn, _)| lsn).collect();
    assert_eq!(from_there, [second, checkpoint, third]);
    // A trimmed checkpoint is not found.
    wal.trim(third).unwrap();
    let fourth = wal.append(b"fourth").unwrap();
    wal.wait_durable(fourth, Some(SOON)).unwrap();
    assert_eq!(read(&wal, Lsn(0)).len(), 2);
    wal.close(Some(SOON)).unwrap();
    let (wal, found) = reopen(&volume, &recovery, PLACE);
    assert_eq!((found.checkpoint, found.trimmed), (None, third));
    wal.close(Some(SOON)).unwrap();
}
