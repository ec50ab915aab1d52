//! A load of transactions on a new object store.

use std::collections::VecDeque;

use riopipe::{ConnectOptions, EngineKind, OpenOptions, Volume};
use riopipe_lab::{
    fs_load::FsLoad,
    harness::{self, SideCpu, Worker},
    latency::Latencies,
    sample::Sample,
};
use riopipe_store::{Store, StoreOptions, StorePlace, Ticket, Transaction};

use crate::{connect::open_failure, failure::Failure, own_targets::OwnTargets};

/// The objects of a thread. It replaces one after the other.
const OBJECTS: u64 = 64;
/// The transactions of a thread that may be in flight with `queue_transaction`.
const IN_FLIGHT: usize = 64;

/// Transactions that put one object each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Objects {
    /// Whether the thread waits until each is durable.
    pub(super) applies: bool,
    /// The bytes of an object.
    pub(super) bytes: usize,
}

impl Objects {
    /// The waits of a transaction, one after the other: for its record, and before that for its content
    /// if it has blocks of its own. With `queue_transaction` no thread waits for its own transaction.
    pub(super) fn serial_waits(self) -> u64 {
        match self.applies {
            true => 1 + u64::from(self.bytes > StoreOptions::default().inline_bytes),
            false => 0,
        }
    }

    /// Runs the load on a new store.
    pub(super) fn run(
        self,
        own: &OwnTargets,
        connect: &ConnectOptions,
        engine: EngineKind,
        load: &FsLoad,
        cpu: impl Fn() -> SideCpu,
    ) -> Result<Sample, Failure> {
        let options = OpenOptions {
            connect: connect.clone(),
            engine: Some(engine),
            ..OpenOptions::default()
        };
        let opened = Volume::open(own.volume(), own.members(), &options);
        let (volume, _) = opened.map_err(|error| open_failure(&error))?;
        let log_blocks = volume.blocks() / 4;
        let place = StorePlace {
            log_stream: 0,
            log_lba: 0,
            log_blocks,
            data_stream: 1,
            data_lba: log_blocks,
            data_blocks: volume.blocks() - log_blocks,
        };
        let mut options = StoreOptions::default();
        // The drives have the store of the run before.
        options.wal.overwrite = true;
        let store = Store::create(&volume, place, &options);
        let store = store.map_err(|error| Failure::storage(&error))?;
        let work = |thread: u32, worker: &Worker<'_>| self.put_all(&store, thread, worker);
        let result = harness::run(load.window, load.threads, cpu, work);
        let closed = store.close(None).map_err(|error| Failure::storage(&error));
        drop(store);
        let volume_closed = volume.close().map_err(|error| Failure::storage(&error));
        // The first failure is the cause.
        let sample = result?;
        closed?;
        volume_closed?;
        Ok(sample)
    }

    /// The work of one thread: an operation is one transaction. With `queue_transaction` it ends when
    /// the oldest one in flight is durable.
    fn put_all(
        self,
        store: &Store,
        thread: u32,
        worker: &Worker<'_>,
    ) -> Result<Latencies, Failure> {
        let content = vec![thread as u8; self.bytes];
        let mut in_flight: VecDeque<Ticket> = VecDeque::new();
        let mut number = 0;
        let latencies = worker.repeat(
            || Ok(()),
            || {
                let name = format!("{thread}-{}", number % OBJECTS);
                number += 1;
                let transaction = Transaction::new().put(&name, &content);
                if self.applies {
                    let applied = store.apply_transaction(transaction, None);
                    applied.map_err(|error| Failure::storage(&error))?;
                } else {
                    let queued = store.queue_transaction(transaction);
                    in_flight.push_back(queued.map_err(|error| Failure::storage(&error))?);
                    if in_flight.len() > IN_FLIGHT
                        && let Some(oldest) = in_flight.pop_front()
                    {
                        oldest.wait(None).map_err(|error| Failure::storage(&error))?;
                    }
                }
                Ok(self.bytes as u64)
            },
        )?;
        match in_flight.back() {
            Some(last) => {
                last.wait(None).map_err(|error| Failure::storage(&error)).map(|()| latencies)
            }
            None => Ok(latencies),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_content_is_waited_for_before_its_record() {
        let waits = |applies, kib: usize| Objects { applies, bytes: kib << 10 }.serial_waits();
        assert_eq!([waits(true, 4), waits(true, 64), waits(false, 64)], [1, 2, 0]);
    }
}
