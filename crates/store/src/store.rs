//! The public type of a store.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use riopipe::{BLOCK_BYTES, ReadExtent, Reader, ReaderOptions, Recovery, StreamOptions, Volume};
use riopipe_wal::{Wal, WalOptions, WalPlace};

use crate::error::{
    ApplyError, CreateError, OpenError, PlaceError, ReadError, StoreFailure, TransactionError,
    WaitError,
};
use crate::orderer::Orderer;
use crate::shared::{Locked, Shared, Ticket};
use crate::state::{Limits, Op, Part, ReadRefused, Refused, State};

/// The part of a volume that a store uses: two streams, and two ranges of blocks, which nothing
/// else uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorePlace {
    /// The stream of the log.
    pub log_stream: u16,
    /// First block of the log, in volume blocks.
    pub log_lba: u64,
    /// Number of blocks of the log, at least 257. An eighth of it bounds the table of objects and
    /// the longest transaction.
    pub log_blocks: u64,
    /// The stream of the data.
    pub data_stream: u16,
    /// First block of the data, in volume blocks.
    pub data_lba: u64,
    /// Number of blocks of the data.
    pub data_blocks: u64,
}

/// The fewest blocks of a log.
const LOG_BLOCKS_MIN: u64 = 257;

/// The options of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreOptions {
    /// The options of its data stream.
    pub stream: StreamOptions,
    /// The options of its log. Its `queue_bytes` is a sixteenth of the log at most, and its
    /// `space_timeout` is not used.
    pub wal: WalOptions,
    /// A change with this many bytes at most is in the record of its transaction. Longer content is
    /// written to its own blocks before the record.
    pub inline_bytes: usize,
    /// Bytes of transactions that may wait in the ordering queue.
    pub queue_bytes: usize,
    /// Longest time that a transaction waits for space.
    pub space_timeout: Duration,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            stream: StreamOptions::default(),
            wal: WalOptions::default(),
            inline_bytes: 16 << 10,
            queue_bytes: 64 << 20,
            space_timeout: Duration::from_secs(30),
        }
    }
}

/// Changes of objects that are there together or not at all. They take effect in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "a transaction does nothing before it is queued or applied"]
pub struct Transaction {
    ops: Vec<Op>,
}

impl Transaction {
    /// A transaction without changes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an object with this content, or replaces its whole content.
    pub fn put(mut self, name: &str, bytes: &[u8]) -> Self {
        self.ops.push(Op::Put { name: name.into(), bytes: bytes.into() });
        self
    }

    /// Overwrites bytes of an object from `offset` on. The object grows if they end beyond its end.
    /// They may not begin beyond it.
    pub fn write(mut self, name: &str, offset: u64, bytes: &[u8]) -> Self {
        self.ops.push(Op::Write { name: name.into(), offset, bytes: bytes.into() });
        self
    }

    /// Removes an object.
    pub fn remove(mut self, name: &str) -> Self {
        self.ops.push(Op::Remove { name: name.into() });
        self
    }
}

/// The progress of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreStat {
    /// Number of objects.
    pub objects: usize,
    /// Free blocks of the data place.
    pub free_blocks: u64,
    /// Blocks that become free when earlier transactions are durable.
    pub pending_blocks: u64,
    /// Checkpoints since the store was opened.
    pub checkpoints: u64,
}

/// An object store. Any thread may make any call.
///
/// Dropping it without [`close`](Self::close) is a crash of the store: opening it again finds a
/// prefix of its transactions, with all durable ones.
#[derive(Debug)]
pub struct Store {
    shared: Arc<Shared>,
    reader: Reader,
    space_timeout: Duration,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Blocks of a group of the data stream at most.
const GROUP_BLOCKS_MAX: usize = 256;

/// How often a read that other transactions disturb is tried before it holds the lock.
const UNLOCKED_READS: usize = 4;

/// Longest wait of a call for space before it checks again. Only a full store waits so.
const SPACE_ROUND: Duration = Duration::from_millis(1);

impl Store {
    /// Creates a store without objects in `place`, and opens it.
    ///
    /// # Errors
    /// [`CreateError`]. A log that is there is not touched, unless
    /// [`WalOptions::overwrite`] is set.
    pub fn create(
        volume: &Volume,
        place: StorePlace,
        options: &StoreOptions,
    ) -> Result<Self, CreateError> {
        check(volume, place)?;
        let data = volume.stream(place.data_stream, &options.stream)?;
        let wal = Wal::create(volume, log_place(place), &wal_options(place, options))?;
        let limits = limits(volume, &wal, place, options);
        let mut state = State::new(place.data_lba, place.data_blocks, limits);
        state.checkpoint();
        if let Some((_, crate::state::Entry::Checkpoint(snapshot))) = state.next_record() {
            let lsn = wal.checkpoint(wal.stat().end, &snapshot)?;
            wal.wait_durable(lsn, None)?;
        }
        Ok(Self::start(volume, data, wal, state, options)?)
    }

    /// Opens the store in `place`, after any crash. `recovery` is the result of opening the volume.
    ///
    /// # Errors
    /// [`OpenError`]; a second attempt finds the same store.
    pub fn open(
        volume: &Volume,
        recovery: &Recovery,
        place: StorePlace,
        options: &StoreOptions,
    ) -> Result<Self, OpenError> {
        check(volume, place)?;
        // Its recovery may zero blocks. It is over before any block is read.
        let data = volume.stream(place.data_stream, &options.stream)?;
        let wal_options = wal_options(place, options);
        let (wal, found) = Wal::open(volume, recovery, log_place(place), &wal_options)?;
        let snapshot = found.checkpoint.ok_or(OpenError::NoStore)?;
        let limits = limits(volume, &wal, place, options);
        let mut state =
            State::of_snapshot(&snapshot.bytes, limits).map_err(|_| OpenError::NoStore)?;
        let (lba, blocks) = state.place();
        if (lba, blocks) != (place.data_lba, place.data_blocks) {
            return Err(OpenError::OtherPlace { lba, blocks });
        }
        for record in wal.records(snapshot.lsn) {
            let record = record?;
            if record.checkpoint.is_none() {
                let lsn = record.lsn;
                state.replay(&record.bytes).map_err(|_| OpenError::Record { lsn })?;
            }
        }
        Ok(Self::start(volume, data, wal, state, options)?)
    }

    fn start(
        volume: &Volume,
        data: riopipe::Stream,
        wal: Wal,
        state: State,
        options: &StoreOptions,
    ) -> std::io::Result<Self> {
        let locked = Locked {
            state,
            lsns: VecDeque::new(),
            is_checkpointing: false,
            checkpoint: None,
            checkpoints: 0,
            failure: None,
            close: false,
            abandon: false,
            has_ended: false,
        };
        let (locked, moved, waker) = (Mutex::new(locked), Condvar::new(), data.waker());
        let shared = Arc::new(Shared { locked, moved, wal, waker });
        let orderer = Orderer::new(data, Arc::clone(&shared));
        let builder = std::thread::Builder::new().name("riopipe-store".into());
        let thread = Mutex::new(Some(builder.spawn(move || orderer.run())?));
        let reader = volume.reader(&ReaderOptions::default());
        Ok(Self { shared, reader, space_timeout: options.space_timeout, thread })
    }

    /// Queues a transaction. From now on reads return its content. After a crash it is there only
    /// if all earlier transactions of this store are.
    ///
    /// It does not wait for any write. It waits in two cases only: a write begins or ends inside of
    /// a block that is on the drive alone, so the block is read; or there is no space, at most for
    /// [`StoreOptions::space_timeout`].
    ///
    /// # Errors
    /// [`TransactionError`]; nothing has changed.
    pub fn queue_transaction(&self, transaction: Transaction) -> Result<Ticket, TransactionError> {
        let since = Instant::now();
        let shared = &self.shared;
        let mut locked = shared.lock();
        loop {
            if let Some(failure) = &locked.failure {
                return Err(failure.clone().into());
            }
            let state = &mut locked.state;
            state.on_log_durable(shared.wal.stat().durable.0);
            let log = shared.log_space();
            let mut read = |lba, block: &mut [u8]| self.reader.read(lba, block, None);
            let prepared = state.prepare(&transaction.ops, log, &mut read);
            let waited = since.elapsed();
            let left = self.space_timeout.saturating_sub(waited);
            let refused = match prepared {
                Ok(number) => {
                    let lsn = Arc::new(OnceLock::new());
                    locked.lsns.push_back((number, Arc::clone(&lsn)));
                    self.advance(&mut locked, log.free < log.blocks / 2)?;
                    return Ok(Ticket { shared: Arc::clone(shared), lsn, number });
                }
                Err(refused) => refused,
            };
            let is_log = matches!(refused, Refused::Log);
            match refused {
                Refused::Unknown { name } => return Err(TransactionError::Unknown { name }),
                Refused::Range { name, offset, len, size } => {
                    return Err(TransactionError::Range { name, offset, len, size });
                }
                Refused::Name { bytes } => return Err(TransactionError::Name { bytes }),
                Refused::TooLarge { bytes, max } => {
                    return Err(TransactionError::TooLarge { bytes, max });
                }
                Refused::TableFull { bytes, max } => {
                    return Err(TransactionError::TableFull { bytes, max });
                }
                Refused::Read(error) => return Err(error.into()),
                Refused::Space { needed, free, pending } => {
                    if needed > free + pending || left.is_zero() {
                        return Err(TransactionError::Full { needed, free, waited });
                    }
                }
                Refused::Log | Refused::Busy if left.is_zero() => {
                    return Err(TransactionError::Busy { waited });
                }
                Refused::Log | Refused::Busy => {}
            }
            self.advance(&mut locked, log.free < log.blocks / 2)?;
            let round = left.min(SPACE_ROUND);
            if let Some(lsn) = locked.state.frees_at()
                && !is_log
            {
                // It also requests the FLUSH that the record needs.
                drop(locked);
                let _ = shared.wal.wait_durable(riopipe_wal::Lsn(lsn), Some(round));
                locked = shared.lock();
            } else {
                locked = shared.wait(locked, round);
            }
        }
    }

    /// Appends all records whose turn it is, begins a checkpoint if it is due, and wakes the
    /// store's thread if it has something to do.
    fn advance(&self, locked: &mut Locked, is_checkpoint_due: bool) -> Result<(), StoreFailure> {
        let shared = &self.shared;
        if is_checkpoint_due {
            shared.begin_checkpoint(locked);
        }
        let appended = shared.append(locked);
        if let Err(failure) = &appended {
            shared.fail(locked, failure.clone());
        }
        if locked.state.has_groups() || locked.checkpoint.is_some() || appended.is_err() {
            shared.waker.wake();
        }
        appended
    }

    /// As [`queue_transaction`](Self::queue_transaction), and waits until the transaction and all
    /// earlier ones are durable, at most for `timeout`.
    ///
    /// # Errors
    /// [`ApplyError`].
    pub fn apply_transaction(
        &self,
        transaction: Transaction,
        timeout: Option<Duration>,
    ) -> Result<(), ApplyError> {
        Ok(self.queue_transaction(transaction)?.wait(timeout)?)
    }

    /// Writes the content that only the log has to its blocks, and a snapshot of the table to the
    /// log; drops the older records. It waits until that is done, at most for `timeout`. The store
    /// makes checkpoints by itself when half of the log is used.
    ///
    /// # Errors
    /// [`WaitError`].
    pub fn checkpoint(&self, timeout: Option<Duration>) -> Result<(), WaitError> {
        let since = Instant::now();
        let mut locked = self.shared.lock();
        // One that has begun does not cover all transactions.
        let target = locked.checkpoints + 1 + u64::from(locked.is_checkpointing);
        while locked.checkpoints < target {
            if let Some(failure) = &locked.failure {
                return Err(failure.clone().into());
            }
            self.advance(&mut locked, true)?;
            let waited = since.elapsed();
            let left = timeout.map_or(SPACE_ROUND, |limit| limit.saturating_sub(waited));
            if left.is_zero() {
                return Err(WaitError::Deadline { waited });
            }
            locked = self.shared.wait(locked, left.min(SPACE_ROUND));
        }
        Ok(())
    }

    /// Size of an object in bytes; `None` if there is none of this name.
    #[must_use]
    pub fn size(&self, name: &str) -> Option<u64> {
        self.shared.lock().state.size(name)
    }

    /// The names of all objects, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.shared.lock().state.objects().map(|(name, _)| name.to_owned()).collect()
    }

    /// The whole content of an object.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn get(&self, name: &str) -> Result<Vec<u8>, ReadError> {
        self.read_range(name, None)
    }

    /// Bytes of an object, with all transactions that were queued before this call.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn read(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>, ReadError> {
        self.read_range(name, Some((offset, len)))
    }

    fn read_range(&self, name: &str, range: Option<(u64, usize)>) -> Result<Vec<u8>, ReadError> {
        let mut attempts = 0;
        loop {
            let locked = self.shared.lock();
            let plan = locked.state.plan_read(name, range).map_err(|refused| match refused {
                ReadRefused::Unknown => ReadError::Unknown { name: name.into() },
                ReadRefused::Range { offset, len, size } => {
                    ReadError::Range { name: name.into(), offset, len, size }
                }
            })?;
            attempts += 1;
            let held = (attempts > UNLOCKED_READS).then_some(locked);
            let mut bytes = vec![0; plan.parts.len() * BLOCK_BYTES];
            let reads_drive = self.read_parts(&plan.parts, &mut bytes)?;
            let is_done =
                held.is_some() || !reads_drive || self.shared.lock().state.is_current(name, &plan);
            if is_done {
                bytes.drain(..plan.skip);
                bytes.truncate(plan.len);
                return Ok(bytes);
            }
        }
    }

    /// Reads blocks. Returns whether any is on the drive only.
    fn read_parts(&self, parts: &[Part], into: &mut [u8]) -> Result<bool, riopipe::ReadError> {
        let mut extents = Vec::new();
        let (mut rest, mut at) = (into, 0);
        while at < parts.len() {
            let count = match &parts[at] {
                Part::Held(_) => 1,
                Part::Home(lba) => {
                    let is_next = |(part, next): &(&Part, u64)| matches!(part, Part::Home(lba) if lba == next);
                    parts[at..].iter().zip(*lba..).take_while(is_next).count()
                }
            };
            let (blocks, after) = rest.split_at_mut(count * BLOCK_BYTES);
            match &parts[at] {
                Part::Held(held) => held.copy(0, blocks),
                Part::Home(lba) => extents.push(ReadExtent { lba: *lba, into: blocks }),
            }
            (rest, at) = (after, at + count);
        }
        if extents.is_empty() {
            return Ok(false);
        }
        self.reader.read_many(&mut extents, None)?;
        Ok(true)
    }

    /// The progress of the store.
    #[must_use]
    pub fn stat(&self) -> StoreStat {
        let locked = self.shared.lock();
        let (free_blocks, pending_blocks) = locked.state.free_blocks();
        let (objects, checkpoints) = (locked.state.objects().count(), locked.checkpoints);
        StoreStat { objects, free_blocks, pending_blocks, checkpoints }
    }

    /// Takes no more transactions, waits until all are durable, at most for `timeout`, and closes
    /// both streams. After a [`Deadline`](WaitError::Deadline) this may be called again.
    ///
    /// # Errors
    /// [`WaitError`].
    pub fn close(&self, timeout: Option<Duration>) -> Result<(), WaitError> {
        let since = Instant::now();
        let left = || timeout.map(|timeout| timeout.saturating_sub(since.elapsed()));
        let mut locked = self.shared.lock();
        locked.close = true;
        let _ = locked.failure.get_or_insert(StoreFailure::Closed);
        self.shared.waker.wake();
        while !locked.has_ended {
            let limit = left().unwrap_or(Duration::from_secs(60));
            if limit.is_zero() {
                return Err(WaitError::Deadline { waited: since.elapsed() });
            }
            locked = self.shared.wait(locked, limit);
        }
        let failure = locked.failure.clone();
        drop(locked);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The thread has reported its end, also after a panic.
            let _ = thread.join();
        }
        if let Some(failure) = failure
            && !matches!(failure, StoreFailure::Closed)
        {
            return Err(failure.into());
        }
        self.shared.wal.close(left()).map_err(|error| match error {
            riopipe_wal::CloseError::Deadline { waited, .. } => WaitError::Deadline { waited },
            error => StoreFailure::Other(error.to_string()).into(),
        })
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(thread) = thread else { return };
        self.shared.lock().abandon = true;
        self.shared.waker.wake();
        // After the wait, the store can be opened again at once.
        let _ = thread.join();
    }
}

fn check(volume: &Volume, place: StorePlace) -> Result<(), PlaceError> {
    let StorePlace { log_stream, log_lba, log_blocks, data_stream, data_lba, data_blocks } = place;
    let end = data_lba.checked_add(data_blocks).filter(|end| *end <= volume.blocks());
    let Some(data_end) = end.filter(|_| data_blocks > 0) else {
        let (lba, blocks, volume) = (data_lba, data_blocks, volume.blocks());
        return Err(PlaceError::OutOfRange { lba, blocks, volume });
    };
    let log_end = log_lba.saturating_add(log_blocks);
    if log_stream == data_stream || (log_lba < data_end && data_lba < log_end) {
        return Err(PlaceError::Overlap);
    }
    if log_blocks < LOG_BLOCKS_MIN {
        return Err(PlaceError::LogTooShort { blocks: log_blocks, min: LOG_BLOCKS_MIN });
    }
    Ok(())
}

fn log_place(place: StorePlace) -> WalPlace {
    WalPlace { stream: place.log_stream, lba: place.log_lba, blocks: place.log_blocks }
}

/// The log keeps a part of its ring for what waits in its queue, so the queue is short.
fn wal_options(place: StorePlace, options: &StoreOptions) -> WalOptions {
    let bytes = usize::try_from(place.log_blocks).unwrap_or(usize::MAX);
    let queue_bytes = options.wal.queue_bytes.min(bytes.saturating_mul(BLOCK_BYTES) / 16);
    // The store reserves space before it appends. An append waits only while a target is
    // unreachable, and ends with the log's stream.
    let space_timeout = Duration::from_secs(24 * 3600);
    WalOptions { queue_bytes, space_timeout, ..options.wal.clone() }
}

fn limits(volume: &Volume, wal: &Wal, place: StorePlace, options: &StoreOptions) -> Limits {
    let bytes = usize::try_from(place.log_blocks).unwrap_or(usize::MAX);
    let eighth = (bytes.saturating_mul(BLOCK_BYTES) / 8).min(wal.record_bytes_max() / 2);
    let StoreOptions { inline_bytes: inline, queue_bytes: queue, .. } = *options;
    let log_queue = wal_options(place, options).queue_bytes / 2;
    let group = group_blocks(volume, options);
    Limits { inline, record: eighth, snapshot: eighth, queue, log_queue, group }
}

/// Blocks of a group of the data stream: so few that the stream never refuses one as too large.
fn group_blocks(volume: &Volume, options: &StoreOptions) -> usize {
    let kept = usize::try_from(options.stream.kept_bytes_max).unwrap_or(usize::MAX);
    let mut blocks = GROUP_BLOCKS_MAX.min(kept / 4 / BLOCK_BYTES);
    if volume.engine().capabilities().keeps_log {
        // Each block may need a slot of the ordering log. FLUSHes need further ones.
        for member in &volume.info().members {
            blocks = blocks.min(member.slots as usize / 4);
        }
    }
    blocks.max(1)
}
