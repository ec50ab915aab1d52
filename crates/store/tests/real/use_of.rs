//! Transactions, reads, checkpoints, and refused calls.

use std::collections::BTreeMap;

use riopipe::EngineKind;
use riopipe_store::{
    ApplyError, CreateError, OpenError, PlaceError, ReadError, Store, StoreOptions, StorePlace,
    Transaction, TransactionError,
};
use riopipe_testkit::Random;
use riopipe_wal::{Wal, WalOptions, WalPlace};

use crate::site::{ENGINES, PLACE, SOON, Site, create, reopen};

#[test]
fn objects_are_there_after_a_close_with_every_engine() {
    for engine in ENGINES {
        let site = Site::new(engine);
        let (volume, recovery) = site.open();
        let store = create(&volume);
        let large = vec![7; 100_000];
        let both = Transaction::new().put("small", b"one").put("large", &large);
        store.apply_transaction(both, Some(SOON)).unwrap();
        let change = Transaction::new().write("small", 3, b", two").write("large", 4090, &[9; 20]);
        store.queue_transaction(change).unwrap();
        store.queue_transaction(Transaction::new().put("gone", &large)).unwrap();
        store.queue_transaction(Transaction::new().remove("gone")).unwrap();
        let mut expected = large.clone();
        expected[4090..4110].fill(9);
        let check = |store: &Store| {
            assert_eq!(store.names(), ["large", "small"]);
            assert_eq!(store.get("small").unwrap(), b"one, two");
            assert!(store.get("large").unwrap() == expected, "{engine}");
            assert_eq!(store.read("large", 4089, 3).unwrap(), [7, 9, 9]);
            assert_eq!(store.size("large"), Some(100_000));
        };
        check(&store);
        store.close(Some(SOON)).unwrap();
        let store = reopen(&volume, &recovery);
        check(&store);
        store.checkpoint(Some(SOON)).unwrap();
        check(&store);
        store.close(Some(SOON)).unwrap();
        volume.close().unwrap();
        let (volume, recovery) = site.open();
        let store = reopen(&volume, &recovery);
        check(&store);
        store.close(Some(SOON)).unwrap();
    }
}

/// The log and the blocks are used again many times.
#[test]
fn a_long_run_fits_a_short_log_and_few_blocks() {
    for engine in [EngineKind::Rio, EngineKind::Linux] {
        let site = Site::new(engine);
        let (volume, recovery) = site.open();
        let place = StorePlace { log_blocks: 257, data_blocks: 300, ..PLACE };
        let store = Store::create(&volume, place, &StoreOptions::default()).unwrap();
        let mut random = Random(1);
        let mut model = BTreeMap::new();
        for _ in 0..600 {
            let name = format!("object{}", random.below(6));
            let len = if random.one_in(4) { 80_000 } else { 9000 };
            let bytes = vec![random.next() as u8; random.index(len)];
            store.queue_transaction(Transaction::new().put(&name, &bytes)).unwrap();
            model.insert(name, bytes);
        }
        assert!(store.stat().checkpoints > 2, "{:?}", store.stat());
        let content = |store: &Store| -> BTreeMap<_, _> {
            let read = |name: String| (name.clone(), store.get(&name).unwrap());
            store.names().into_iter().map(read).collect()
        };
        assert!(content(&store) == model);
        store.close(Some(SOON)).unwrap();
        let store = Store::open(&volume, &recovery, place, &StoreOptions::default()).unwrap();
        assert!(content(&store) == model, "{engine}");
        store.close(Some(SOON)).unwrap();
    }
}

#[test]
fn many_threads_write_and_read_whole_transactions() {
    let site = Site::new(EngineKind::Rio);
    let (volume, recovery) = site.open();
    let store = create(&volume);
    for thread in 0..4u8 {
        let name = format!("object{thread}");
        store.queue_transaction(Transaction::new().put(&name, &[0; 40_000])).unwrap();
    }
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let store = &store;
            scope.spawn(move || {
                for number in 0..60u8 {
                    let name = format!("object{thread}");
                    // Long ones and short ones in turn.
                    let bytes = vec![number; if number % 2 == 0 { 40_000 } else { 500 }];
                    let transaction = Transaction::new().put(&name, &bytes);
                    if number % 8 == 0 {
                        store.apply_transaction(transaction, Some(SOON)).unwrap();
                    } else {
                        store.queue_transaction(transaction).unwrap();
                    }
                    let other = store.get(&format!("object{}", (thread + 1) % 4)).unwrap();
                    assert!(other.iter().all(|byte| *byte == other[0]));
                    assert_eq!(store.get(&name).unwrap(), bytes);
                }
            });
        }
    });
    store.close(Some(SOON)).unwrap();
    let store = reopen(&volume, &recovery);
    assert_eq!(store.get("object3").unwrap(), [59; 500]);
    store.close(Some(SOON)).unwrap();
}

#[test]
fn wrong_calls_are_refused_and_change_nothing() {
    let site = Site::new(EngineKind::Rio);
    let (volume, recovery) = site.open();
    let options = StoreOptions::default();
    let create_in = |place| Store::create(&volume, place, &options).unwrap_err();
    let error = create_in(StorePlace { data_lba: 500, ..PLACE });
    assert!(matches!(error, CreateError::Place(PlaceError::Overlap)), "{error}");
    let error = create_in(StorePlace { data_stream: 0, ..PLACE });
    assert!(matches!(error, CreateError::Place(PlaceError::Overlap)), "{error}");
    let error = create_in(StorePlace { log_blocks: 256, ..PLACE });
    assert!(matches!(error, CreateError::Place(PlaceError::LogTooShort { .. })), "{error}");
    let error = create_in(StorePlace { data_blocks: 1 << 40, ..PLACE });
    assert!(matches!(error, CreateError::Place(PlaceError::OutOfRange { .. })), "{error}");

    let place = StorePlace { data_blocks: 8, ..PLACE };
    let store = Store::create(&volume, place, &options).unwrap();
    let apply = |transaction| store.apply_transaction(transaction, Some(SOON));
    let refused = |transaction| match apply(transaction) {
        Err(ApplyError::Refused(error)) => error,
        other => panic!("{other:?}"),
    };
    apply(Transaction::new().put("a", &[1; 20_000])).unwrap();
    let error = refused(Transaction::new().remove("b"));
    assert!(matches!(&error, TransactionError::Unknown { name } if name == "b"), "{error}");
    let error = refused(Transaction::new().write("a", 20_001, b"x"));
    assert!(matches!(error, TransactionError::Range { size: 20_000, .. }), "{error}");
    let error = refused(Transaction::new().put("", b"x"));
    assert!(matches!(error, TransactionError::Name { bytes: 0 }), "{error}");
    let error = refused(Transaction::new().put("b", &[1; 20_000]));
    assert!(matches!(error, TransactionError::Full { needed: 5, free: 3, .. }), "{error}");
    assert!(matches!(store.get("b"), Err(ReadError::Unknown { .. })));
    assert!(matches!(store.read("a", 19_999, 2), Err(ReadError::Range { .. })));
    // The blocks of a removed object are free when that is durable: the second call waits for it.
    store.queue_transaction(Transaction::new().remove("a")).unwrap();
    store.queue_transaction(Transaction::new().put("b", &[2; 20_000])).unwrap();
    assert_eq!(store.get("b").unwrap(), [2; 20_000]);
    store.close(Some(SOON)).unwrap();
    assert!(store.queue_transaction(Transaction::new()).is_err());

    let error = Store::open(&volume, &recovery, PLACE, &options).unwrap_err();
    assert!(matches!(error, OpenError::OtherPlace { lba: 512, blocks: 8 }), "{error}");
    let error = create_in(PLACE);
    assert!(matches!(error, CreateError::Log(riopipe_wal::CreateError::Exists { .. })), "{error}");
    // The log of another program.
    let log = WalPlace { stream: 2, lba: 5000, blocks: 300 };
    let wal = Wal::create(&volume, log, &WalOptions::default()).unwrap();
    wal.append(b"a record").unwrap();
    wal.close(Some(SOON)).unwrap();
    let place = StorePlace { log_stream: 2, log_lba: 5000, log_blocks: 300, ..PLACE };
    let error = Store::open(&volume, &recovery, place, &options).unwrap_err();
    assert!(matches!(error, OpenError::NoStore), "{error}");
}
