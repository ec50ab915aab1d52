//! Targets that die, and streams that fail.

use std::time::Duration;

use riopipe::{BLOCK_BYTES, ConnectOptions, EngineKind, OpenOptions, Place, StreamOptions, Until};
use riopipe_wal::{AppendError, DurableError, Lsn, OpenError, Wal, WalFailure, WalPlace};

use crate::site::{Drive, PLACE, SOON, Site, connect, options, read, reopen};

#[test]
fn a_target_that_dies_and_comes_back_costs_time_and_no_record() {
    let mut site = Site::new(Drive::Volatile, EngineKind::Rio);
    let (volume, recovery) = site.open();
    let wal = Wal::create(&volume, PLACE, &options()).unwrap();
    let mut all = Vec::new();
    for number in 0..60u64 {
        all.push((wal.append(&number.to_le_bytes()).unwrap(), number.to_le_bytes().to_vec()));
        if number % 20 == 10 {
            site.kill();
            site.start();
        }
    }
    wal.wait_durable(all.last().unwrap().0, Some(SOON)).unwrap();
    assert!(read(&wal, Lsn(0)) == all);
    drop(wal);
    let (wal, _) = reopen(&volume, &recovery, PLACE);
    assert!(read(&wal, Lsn(0)) == all);
    wal.close(Some(SOON)).unwrap();
}

/// Only its blocks show the end of the log.
#[test]
fn t26_records_are_found_without_the_ordering_log() {
    let mut site = Site::rio();
    let (volume, _) = site.open();
    let wal = Wal::create(&volume, PLACE, &options()).unwrap();
    let mut all = Vec::new();
    for number in 0..200u64 {
        let bytes = vec![number as u8; 3000];
        all.push((wal.append(&bytes).unwrap(), bytes));
    }
    wal.wait_durable(all.last().unwrap().0, Some(SOON)).unwrap();
    drop((wal, volume));
    site.kill();
    site.lose_log();
    site.start();
    let (volume, recovery) = site.open_with(&OpenOptions {
        accept_lost_log: true,
        take_over: true,
        connect: connect(),
        ..OpenOptions::default()
    });
    let (wal, _) = reopen(&volume, &recovery, PLACE);
    assert!(read(&wal, Lsn(0)) == all);
    let lsn = wal.append(b"goes on").unwrap();
    wal.wait_durable(lsn, Some(SOON)).unwrap();
    wal.close(Some(SOON)).unwrap();
}

/// The list of writes in doubt is not lost when opening the log fails.
#[test]
fn t26_writes_in_doubt_are_listed_also_if_the_log_does_not_open() {
    let site = Site::new(Drive::Volatile, EngineKind::Rio);
    let (mut volume, _) = site.open();
    let wal = Wal::create(&volume, PLACE, &options()).unwrap();
    for _ in 0..20 {
        wal.append(&[0xA7; 3000]).unwrap();
    }
    wal.close(Some(SOON)).unwrap();
    // An update in place that is complete and not durable, of an unused block. On a slow machine it
    // may have been flushed.
    let (recovery, listed) = loop {
        let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
        let mut block = stream.buf(BLOCK_BYTES).unwrap();
        block.fill(0);
        let seq = stream.group().write(900, block, Place::InPlace).submit().unwrap();
        stream.wait(Until::Complete(seq), Some(SOON)).unwrap();
        drop((stream, volume));
        let recovery;
        (volume, recovery) = site.open_again();
        let listed = volume.in_place(0);
        if !listed.is_empty() {
            break (recovery, listed);
        }
    };
    let open = |place| Wal::open(&volume, &recovery, place, &options());
    // A wrong place acknowledges nothing.
    let error = open(WalPlace { blocks: 2000, ..PLACE }).unwrap_err();
    assert!(matches!(error, OpenError::OtherPlace { .. }), "{error}");
    assert_eq!(volume.in_place(0), listed);
    // The anchor is good, the blocks are not.
    site.damage(&[0xA7; 50]);
    let error = open(PLACE).unwrap_err();
    let OpenError::Acknowledged { in_doubt, source } = error else { panic!("{error}") };
    assert_eq!(in_doubt, listed);
    assert!(!source.is_retryable(), "{source}");
    site.damage(&[0xA7; 50]);
    let (wal, found) = reopen(&volume, &recovery, PLACE);
    assert_eq!(found.in_doubt, []);
    assert_eq!(read(&wal, Lsn(0)).len(), 20);
    wal.close(Some(SOON)).unwrap();
}

#[test]
fn a_failed_log_reports_to_all_callers_and_opens_with_its_durable_records() {
    let mut site = Site::rio();
    // No time for a lost target to come back.
    let no_retries = ConnectOptions { loss_timeout: Duration::ZERO, ..connect() };
    let (volume, _) =
        site.open_with(&OpenOptions { connect: no_retries, ..OpenOptions::default() });
    let wal = Wal::create(&volume, PLACE, &options()).unwrap();
    let first = wal.append(b"durable").unwrap();
    wal.wait_durable(first, Some(SOON)).unwrap();
    site.kill();
    // The log may or may not have noticed by now.
    let error = match wal.append(b"lost") {
        Ok(lsn) => wal.wait_durable(lsn, Some(SOON)).unwrap_err(),
        Err(AppendError::Over(over)) => over.into(),
        Err(error) => panic!("{error}"),
    };
    let DurableError::Over(WalFailure::Stream(failure)) = error else { panic!("{error}") };
    assert_eq!(failure.volume, "logs");
    // All later calls return the same; durable records remain.
    assert_eq!(wal.append(b"no").unwrap_err(), WalFailure::Stream(failure.clone()).into());
    assert_eq!(wal.trim(first), Err(WalFailure::Stream(failure.clone()).into()));
    assert_eq!(wal.failure(), Some(WalFailure::Stream(failure)));
    wal.wait_durable(first, None).unwrap();
    assert!(wal.records(Lsn(0)).next().unwrap().is_err());
    assert!(wal.close(Some(SOON)).is_err());
    drop((wal, volume));

    site.start();
    let (volume, recovery) = site.open();
    let (wal, _) = reopen(&volume, &recovery, PLACE);
    let records = read(&wal, Lsn(0));
    assert_eq!(records[0], (first, b"durable".to_vec()));
    wal.close(Some(SOON)).unwrap();
}
