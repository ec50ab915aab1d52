//! Refused calls and their errors.

use riopipe::EngineKind;
use riopipe_wal::{
    AppendError, BlockError, CreateError, DurableError, Lsn, OpenError, PlaceError, TrimError, Wal,
    WalPlace,
};

use crate::site::{Drive, PLACE, SOON, Site, options};

#[test]
fn a_log_opens_only_at_its_own_place() {
    let site = Site::rio();
    let (volume, recovery) = site.open();
    let open = |place: WalPlace| Wal::open(&volume, &recovery, place, &options());
    assert!(matches!(open(PLACE), Err(OpenError::NoLog { lba: 0, .. })));
    let wal = Wal::create(&volume, PLACE, &options()).unwrap();
    wal.append(b"kept").unwrap();
    wal.close(Some(SOON)).unwrap();
    let shorter = WalPlace { blocks: 500, ..PLACE };
    let error = open(shorter).unwrap_err();
    assert!(matches!(error, OpenError::OtherPlace { start: 0, blocks: 1024, .. }), "{error}");
    assert!(!error.is_retryable());
    // It is overwritten only on request.
    let error = Wal::create(&volume, shorter, &options()).unwrap_err();
    assert!(matches!(error, CreateError::Exists { lba: 0 }), "{error}");
    let (wal, found) = open(PLACE).unwrap();
    assert!(found.end > Lsn(0));
    wal.close(Some(SOON)).unwrap();
    volume.close().unwrap();
    // The recovery result describes the old log, and must not apply to the new one.
    let (volume, recovery) = site.open();
    let open = |place: WalPlace| Wal::open(&volume, &recovery, place, &options());
    let overwrite = riopipe_wal::WalOptions { overwrite: true, ..options() };
    let wal = Wal::create(&volume, shorter, &overwrite).unwrap();
    assert_eq!(wal.records(Lsn(0)).count(), 0, "no record of the old one is left");
    wal.close(Some(SOON)).unwrap();
    let (wal, found) = open(shorter).unwrap();
    assert_eq!(found.end, Lsn(0));
    wal.close(Some(SOON)).unwrap();
}

#[test]
fn a_log_that_cannot_be_read_is_not_taken_for_a_free_place() {
    const ANCHOR: &[u8] = b"RWLA";
    const BLOCK: &[u8] = b"RWLB";
    let site = Site::new(Drive::Volatile, EngineKind::Sync);
    let (volume, recovery) = site.open();
    let open = || Wal::open(&volume, &recovery, PLACE, &options()).map(drop);
    let create = || Wal::create(&volume, PLACE, &options()).map(drop);
    let wal = Wal::create(&volume, PLACE, &options()).unwrap();
    wal.close(Some(SOON)).unwrap();
    // A damaged anchor, and one of another version.
    for (at, expected) in [(24, BlockError::Torn), (5, BlockError::Version(257))] {
        site.damage_at(ANCHOR, at);
        let error = open().unwrap_err();
        assert!(matches!(error, OpenError::NoLog { source, .. } if source == expected), "{error}");
        let error = create().unwrap_err();
        let CreateError::Unreadable { lba: 0, source } = error else { panic!("{error}") };
        assert_eq!(source, expected);
        site.damage_at(ANCHOR, at);
    }
    open().unwrap();
    // All of its blocks are damaged, and then gone, as if its creation had been interrupted.
    site.damage_at(BLOCK, 24);
    assert!(matches!(open(), Err(OpenError::Lost { lba: 0 })));
    site.damage_at(BLOCK, 24);
    site.damage(BLOCK);
    assert!(matches!(open(), Err(OpenError::CreationCut { lba: 0 })));
    assert!(matches!(create(), Err(CreateError::Exists { lba: 0 })));
    let overwrite = riopipe_wal::WalOptions { overwrite: true, ..options() };
    Wal::create(&volume, PLACE, &overwrite).unwrap().close(Some(SOON)).unwrap();
    open().unwrap();
}

#[test]
fn unusable_places_are_reported() {
    let site = Site::rio();
    let (volume, _) = site.open();
    let create = |place| match Wal::create(&volume, place, &options()) {
        Err(CreateError::Place(error)) => error,
        other => panic!("{other:?}"),
    };
    let few = create(WalPlace { blocks: 16, ..PLACE });
    assert_eq!(few, PlaceError::TooFew { blocks: 16 });
    assert_eq!(few.to_string(), "a log needs at least 17 blocks, not 16");
    let beyond = create(WalPlace { lba: u64::MAX - 5, ..PLACE });
    assert!(matches!(beyond, PlaceError::OutOfRange { .. }));
    drop(volume);

    let site = Site::new(Drive::Protected, EngineKind::None);
    let (volume, _) = site.open();
    let error = Wal::create(&volume, PLACE, &options()).unwrap_err();
    assert!(matches!(error, CreateError::Place(PlaceError::Engine(EngineKind::None))), "{error}");
}

#[test]
fn a_log_is_not_put_on_a_stream_without_an_order() {
    let site = Site::new(Drive::Barrier, EngineKind::Barrier);
    let (volume, _) = site.open();
    let mut orderless = options();
    orderless.stream.orderless = true;
    let error = Wal::create(&volume, PLACE, &orderless).map(drop).unwrap_err();
    assert!(matches!(error, CreateError::Place(_)), "{error}");
}

#[test]
fn wrong_calls_are_reported() {
    let site = Site::rio();
    let (volume, _) = site.open();
    let wal = Wal::create(&volume, WalPlace { blocks: 33, ..PLACE }, &options()).unwrap();
    let error = wal.append(&vec![0; 65_000]).unwrap_err();
    let AppendError::TooLarge { bytes: 65_000, max } = error else { panic!("{error}") };
    let lsn = wal.append(&vec![0; max]).unwrap();
    wal.wait_durable(lsn, Some(SOON)).unwrap();
    let end = wal.stat().end;
    assert_eq!(wal.wait_durable(end, None), Err(DurableError::NotAppended { lsn: end, end }));
    let beyond = Lsn(end.0 + 1);
    let error = wal.trim(beyond).unwrap_err();
    assert_eq!(error, TrimError::NotDurable { asked: beyond, durable: end });
    wal.trim(end).unwrap();
    wal.close(Some(SOON)).unwrap();
    wal.close(None).unwrap();
}
