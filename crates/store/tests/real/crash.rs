//! Owners and targets that die: applied transactions are there, and queued ones are a prefix.

use std::collections::BTreeMap;
use std::time::Duration;

use riopipe::{ConnectOptions, EngineKind};
use riopipe_store::{Store, Transaction};
use riopipe_testkit::Random;

use crate::site::{ENGINES, SOON, Site, connect, create, reopen};

type Model = BTreeMap<String, Vec<u8>>;

/// Random transactions on a store, and the model after each.
struct Load {
    random: Random,
    models: Vec<Model>,
    /// The last transaction that is durable.
    applied: usize,
}

impl Load {
    fn new(seed: u64) -> Self {
        Self { random: Random(seed), models: vec![Model::new()], applied: 0 }
    }

    /// The next transaction. It also writes its number, by which the prefix is recognised.
    fn next(&mut self) -> Transaction {
        let number = self.models.len();
        let mut model = self.models[number - 1].clone();
        let mut transaction = Transaction::new();
        for _ in 0..2 {
            let name = format!("object{}", self.random.below(6));
            let len = if self.random.one_in(3) { 60_000 } else { 3000 };
            let bytes = vec![number as u8; 1 + self.random.index(len)];
            match model.get_mut(&name) {
                Some(_) if self.random.one_in(5) => {
                    transaction = transaction.remove(&name);
                    model.remove(&name);
                }
                Some(object) if self.random.one_in(2) => {
                    let at = self.random.index(object.len() + 1);
                    object.resize(object.len().max(at + bytes.len()), 0);
                    object[at..at + bytes.len()].copy_from_slice(&bytes);
                    transaction = transaction.write(&name, at as u64, &bytes);
                }
                _ => {
                    transaction = transaction.put(&name, &bytes);
                    model.insert(name, bytes);
                }
            }
        }
        let last = number.to_string().into_bytes();
        transaction = transaction.put("number", &last);
        model.insert("number".into(), last);
        self.models.push(model);
        transaction
    }

    fn run(&mut self, store: &Store, transactions: usize) {
        for _ in 0..transactions {
            let transaction = self.next();
            let ticket = store.queue_transaction(transaction).unwrap();
            if self.random.one_in(10) {
                ticket.wait(Some(SOON)).unwrap();
                self.applied = self.models.len() - 1;
            }
        }
    }

    /// Checks the store, and goes on from the prefix that it holds. Returns the length of the
    /// prefix.
    fn check(&mut self, store: &Store) -> usize {
        let last = match store.size("number") {
            None => 0,
            Some(_) => {
                String::from_utf8(store.get("number").unwrap()).unwrap().parse::<usize>().unwrap()
            }
        };
        assert!((self.applied..self.models.len()).contains(&last), "{last}, {}", self.applied);
        let read = |name: String| (name.clone(), store.get(&name).unwrap());
        let found: Model = store.names().into_iter().map(read).collect();
        assert!(found == self.models[last], "prefix of {last}");
        self.models.truncate(last + 1);
        self.applied = last;
        last
    }
}

#[test]
fn after_the_owner_dies_its_store_holds_a_prefix_with_every_engine() {
    for engine in ENGINES {
        let site = Site::new(engine);
        let mut load = Load::new(3);
        let (mut volume, mut recovery) = site.open();
        let mut store = create(&volume);
        for round in 0..6 {
            load.run(&store, 40);
            drop(store);
            if round % 2 == 0 {
                drop(volume);
                (volume, recovery) = site.open();
            }
            store = reopen(&volume, &recovery);
            load.check(&store);
            if round == 3 {
                store.checkpoint(Some(SOON)).unwrap();
            }
        }
        store.close(Some(SOON)).unwrap();
    }
}

#[test]
fn after_its_target_dies_a_store_holds_a_prefix_with_every_engine() {
    for engine in ENGINES {
        let mut site = Site::new(engine);
        let mut load = Load::new(4);
        // No time for a lost target to come back.
        let no_retries = || ConnectOptions { loss_timeout: Duration::ZERO, ..connect() };
        let (mut volume, mut recovery) = site.open_with(no_retries());
        let mut store = create(&volume);
        for _ in 0..3 {
            load.run(&store, 30);
            site.kill();
            // The store may or may not have noticed by now.
            let lost = load.next();
            let result = store.apply_transaction(lost, Some(SOON));
            assert!(result.is_err(), "{engine}");
            assert!(store.close(Some(SOON)).is_err());
            drop((store, volume));
            site.start();
            (volume, recovery) = site.open_with(no_retries());
            store = reopen(&volume, &recovery);
            load.check(&store);
        }
        load.run(&store, 20);
        store.close(Some(SOON)).unwrap();
        store = reopen(&volume, &recovery);
        assert_eq!(load.check(&store), load.models.len() - 1);
        store.close(Some(SOON)).unwrap();
    }
}

#[test]
fn a_target_that_dies_and_comes_back_costs_time_and_no_transaction() {
    let mut site = Site::new(EngineKind::Rio);
    let (volume, recovery) = site.open();
    let mut load = Load::new(5);
    let store = create(&volume);
    for _ in 0..3 {
        load.run(&store, 20);
        site.kill();
        for _ in 0..5 {
            let transaction = load.next();
            store.queue_transaction(transaction).unwrap();
        }
        site.start();
        load.run(&store, 10);
    }
    let transaction = load.next();
    store.apply_transaction(transaction, Some(SOON)).unwrap();
    assert_eq!(load.check(&store), load.models.len() - 1);
    drop(store);
    let store = reopen(&volume, &recovery);
    assert_eq!(load.check(&store), load.models.len() - 1);
    store.close(Some(SOON)).unwrap();
}
