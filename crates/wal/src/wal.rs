//! The public type of a log.

use std::fs::File;
use std::io::Read;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use riopipe::{
    BLOCK_BYTES, InPlaceRange, MemberInfo, Place, ReaderOptions, Recovery, Stream, StreamOptions,
    Until, Volume, crc32c,
};
use riopipe_wal_core::Lsn;
use riopipe_wal_core::format::{Anchor, BlockError, PAYLOAD_BYTES, begin};
use riopipe_wal_core::opening::{End, Settling, find_end};
use riopipe_wal_core::reading::{Span, Walk};
use riopipe_wal_core::record::Kind;
use riopipe_wal_core::ring::Ring;
use riopipe_wal_core::writer::{Config, Writer};

use crate::committer::{Committer, END_TIMEOUT};
use crate::durable::Durable;
use crate::error::{
    AppendError, CloseError, CreateError, OpenError, PlaceError, ReadError, SettleError, TrimError,
    WalFailure,
};
use crate::lock::lock;
use crate::marks::Marks;
use crate::queue::{Bounds, Queue};
use crate::records::{Record, Records, next_record};

/// The part of a volume that a log uses. Each log of a volume has a stream and blocks of its own,
/// which nothing else uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalPlace {
    /// The stream.
    pub stream: u16,
    /// First block of the place, in volume blocks.
    pub lba: u64,
    /// Number of blocks, at least 17: one for the anchor, the rest is the ring.
    pub blocks: u64,
}

/// The options of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WalOptions {
    /// The options of its stream.
    pub stream: StreamOptions,
    /// Bytes of records that may wait to be written; beyond that, appenders wait.
    pub queue_bytes: usize,
    /// Largest size of a group in bytes, at least 4096. Groups are smaller if the stream does not
    /// take such large ones: see [`StreamOptions::kept_bytes_max`] and [`CreateOptions::slots`].
    ///
    /// [`CreateOptions::slots`]: riopipe::CreateOptions::slots
    pub group_bytes: usize,
    /// Number of groups that may be incomplete before further records wait to be written together,
    /// at least 1. A lower number makes larger groups, a higher one makes a single record faster.
    pub groups: usize,
    /// Number of FLUSHes of drives with a volatile cache that may be in flight, at least 1. A drive
    /// usually executes them one after another; over a slow network a second one saves a round
    /// trip.
    pub flushes: usize,
    /// Longest time that [`Wal::append`] waits for space.
    pub space_timeout: Duration,
    /// Whether [`Wal::create`] may overwrite an existing log.
    pub overwrite: bool,
}

impl Default for WalOptions {
    fn default() -> Self {
        Self {
            stream: StreamOptions::default(),
            queue_bytes: 4 << 20,
            group_bytes: 256 << 10,
            groups: 2,
            flushes: 1,
            space_timeout: Duration::from_secs(30),
            overwrite: false,
        }
    }
}

/// The state of a log when it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The end of the log: the Lsn of the next record.
    pub end: Lsn,
    /// Records below this Lsn are dropped.
    pub trimmed: Lsn,
    /// The last checkpoint, unless it is dropped: its [`checkpoint`](Record::checkpoint) is the Lsn
    /// at which replay begins.
    pub checkpoint: Option<Record>,
    /// Writes of the log's stream that were in doubt because an ordering log of the volume was lost
    /// (trap T26). The log checks its own blocks, so it has acknowledged them.
    pub in_doubt: Vec<InPlaceRange>,
}

/// The progress of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalStat {
    /// The Lsn of the next record.
    pub end: Lsn,
    /// The Lsn below which records are durable.
    pub durable: Lsn,
    /// The Lsn below which records are dropped.
    pub trimmed: Lsn,
    /// Bytes of records that wait to be written.
    pub queued_bytes: usize,
    /// Number of blocks that can be written before a trim is needed.
    pub free_blocks: u64,
    /// Length of the ring in blocks.
    pub blocks: u64,
}

/// A log of byte records. Any thread may make any call; one thread of the log's own writes.
///
/// Dropping it without [`close`](Self::close) is a crash of the log: opening it again finds the
/// durable records.
#[derive(Debug)]
pub struct Wal {
    queue: Arc<Queue>,
    marks: Arc<Marks>,
    ring: Ring,
    log: u64,
    space_timeout: Duration,
    committer: Mutex<Option<JoinHandle<()>>>,
}

impl Wal {
    /// Creates a log in `place`, and opens it.
    ///
    /// # Errors
    /// [`CreateError`]. An existing log is not touched, unless [`WalOptions::overwrite`] is set;
    /// neither is one that this version can't read. Other content of the place is overwritten.
    pub fn create(
        volume: &Volume,
        place: WalPlace,
        options: &WalOptions,
    ) -> Result<Self, CreateError> {
        let ring = checked_ring(volume, place, options)?;
        let mut stream = volume.stream(place.stream, &options.stream)?;
        let mut block = vec![0; BLOCK_BYTES];
        stream.read(place.lba, &mut block, None)?;
        let lba = place.lba;
        let exists = match Anchor::parse(&block, crc32c) {
            _ if options.overwrite => None,
            Err(BlockError::Blank) => None,
            Ok(_) => Some(CreateError::Exists { lba }),
            Err(source) => Some(CreateError::Unreadable { lba, source }),
        };
        if let Some(exists) = exists {
            stream.close().map_err(riopipe::WaitError::Failed)?;
            return Err(exists);
        }
        let (log, epoch) = (random()?, random()?);
        let anchor = Anchor { log, start: place.lba, blocks: place.blocks };
        let mut first = stream.buf(2 * BLOCK_BYTES)?;
        begin(&anchor, epoch, crc32c, &mut first);
        let end = End::of_new(epoch);
        let group = stream.group().write(place.lba, first, Place::Fresh).tag(end.number);
        let seq = group.submit_durable()?;
        stream.wait(Until::Durable(seq), None)?;
        Ok(Self::start(volume, stream, ring, log, epoch, &end, options)?)
    }

    /// Opens the log in `place`, after any crash. `recovery` is the result of opening the volume.
    ///
    /// # Errors
    /// [`OpenError`]; a second attempt finds the same log. Only writes in doubt are not found again
    /// once they are acknowledged: [`OpenError::Acknowledged`] lists them.
    pub fn open(
        volume: &Volume,
        recovery: &Recovery,
        place: WalPlace,
        options: &WalOptions,
    ) -> Result<(Self, Found), OpenError> {
        let ring = checked_ring(volume, place, options)?;
        let in_doubt = acknowledge(volume, place)?;
        match Self::open_acknowledged(volume, recovery, place, ring, options) {
            Ok((wal, found)) => Ok((wal, Found { in_doubt, ..found })),
            Err(error) if in_doubt.is_empty() => Err(error),
            Err(source) => Err(OpenError::Acknowledged { in_doubt, source: Box::new(source) }),
        }
    }

    /// As [`open`](Self::open), when nothing of the log's stream is in doubt any more.
    fn open_acknowledged(
        volume: &Volume,
        recovery: &Recovery,
        place: WalPlace,
        ring: Ring,
        options: &WalOptions,
    ) -> Result<(Self, Found), OpenError> {
        let mut stream = volume.stream(place.stream, &options.stream)?;
        let log = read_log_number(place, &mut |block| stream.read(place.lba, block, None))?;
        let lba = place.lba;
        // The stream's own recovery is newer than the volume's. Without ordering logs there is
        // neither of them.
        let recovered = stream.recovery().or_else(|| recovery.stream(place.stream));
        // The tag is that of the recovered group. Later writes of the stream make it obsolete.
        let recovered = recovered.filter(|found| found.last == stream.last());
        let tag = recovered.map(|found| found.tag).filter(|tag| *tag > 0);
        let mut read = |place: u64, bytes: &mut [u8]| stream.read(ring.lba(place), bytes, None);
        let end = find_end(ring, log, crc32c, tag, &mut read)
            .map_err(|error| OpenError::find(error, ring.lba(0), lba, ring.blocks()))?;
        if !volume.engine().capabilities().keeps_log {
            settle(&mut stream, place.lba, log, ring, &end)?;
        }
        let checkpoint = match end.checkpoint {
            None => None,
            Some(from) => {
                let blocks = end.oldest..end.number;
                let mut walk = Walk::new(Span { ring, log, crc: crc32c, from, blocks });
                let mut read =
                    |place: u64, bytes: &mut [u8]| Ok(stream.read(ring.lba(place), bytes, None)?);
                next_record(&mut walk, &mut read)
                    .map_err(|error| ReadError::of(error, from, (end.trim, end.oldest)))?
            }
        };
        let in_doubt = Vec::new();
        let found = Found { end: end.lsn, trimmed: end.trim, checkpoint, in_doubt };
        let wal = Self::start(volume, stream, ring, log, random()?, &end, options)?;
        Ok((wal, found))
    }

    /// Starts the log's thread on a log that ends at `end`.
    fn start(
        volume: &Volume,
        stream: Stream,
        ring: Ring,
        log: u64,
        epoch: u64,
        end: &End,
        options: &WalOptions,
    ) -> std::io::Result<Self> {
        let volatile = !volume.engine().capabilities().completes_durable
            && volume.info().members.iter().any(|member| member.volatile);
        let group_blocks = group_blocks(volume, options);
        let config = Config {
            log,
            ring,
            epoch,
            volatile,
            groups: options.groups,
            flushes: options.flushes,
            group_blocks,
            crc: crc32c,
        };
        let bounds =
            Bounds { queue_bytes: options.queue_bytes, record_bytes: ring.record_bytes_max() };
        let queue = Arc::new(Queue::new(stream.waker(), end.lsn, bounds, volatile));
        let marks = Arc::new(Marks::default());
        let committer = Committer {
            stream,
            ring,
            log,
            writer: Writer::new(config, end),
            queue: Arc::clone(&queue),
            marks: Arc::clone(&marks),
            records: Vec::new(),
            packed_bytes: 0,
            group_bytes: group_blocks as usize * PAYLOAD_BYTES,
            refused_group: None,
            awaited: end.lsn,
        };
        committer.publish();
        let builder = std::thread::Builder::new().name("riopipe-wal".into());
        let thread = builder.spawn(move || committer.run())?;
        let space_timeout = options.space_timeout;
        Ok(Self { queue, marks, ring, log, space_timeout, committer: Mutex::new(Some(thread)) })
    }

    /// Appends a record, and returns its Lsn. After a crash the log holds a prefix of the records
    /// in the order of their Lsns.
    ///
    /// The log's thread writes the record as soon as fewer than [`WalOptions::groups`] groups are
    /// incomplete, together with all others that wait then. Each group takes whole blocks of 4096
    /// bytes. On drives with a volatile cache, a FLUSH must follow. It is requested when a caller
    /// waits for this record or for a later one ([`durable`](Self::durable),
    /// [`wait_durable`](Self::wait_durable), [`close`](Self::close)), when much of the log is not
    /// durable, and with engine `rio` about a second after the log has become idle. Until then a
    /// power cut may lose the record.
    ///
    /// The longest record has [`record_bytes_max`](Self::record_bytes_max) bytes.
    ///
    /// It waits only for space, at most for [`WalOptions::space_timeout`].
    ///
    /// # Errors
    /// [`AppendError`]; nothing was appended.
    pub fn append(&self, record: &[u8]) -> Result<Lsn, AppendError> {
        self.queue.append(Kind::Data, [record, &[]], self.space_timeout, &self.marks)
    }

    /// As [`append`](Self::append), without waiting for space.
    ///
    /// # Errors
    /// [`AppendError`]; nothing was appended.
    pub fn try_append(&self, record: &[u8]) -> Result<Lsn, AppendError> {
        self.queue.append(Kind::Data, [record, &[]], Duration::ZERO, &self.marks)
    }

    /// Appends a checkpoint: the content of records below `from` is durable elsewhere, so that
    /// replay begins at `from`. `state` is the caller's. Opening the log returns the last
    /// checkpoint at once. It has its place among the records: after a crash it exists only if all
    /// records before it do. Only [`trim`](Self::trim) drops records.
    ///
    /// # Errors
    /// [`AppendError`]; nothing was appended.
    pub fn checkpoint(&self, from: Lsn, state: &[u8]) -> Result<Lsn, AppendError> {
        let parts = [&from.0.to_le_bytes()[..], state];
        self.queue.append(Kind::Checkpoint, parts, self.space_timeout, &self.marks)
    }

    /// A waiter for the record at `lsn` and all before it to be durable. Its first poll requests
    /// the FLUSH that they need, on drives with a volatile cache.
    pub fn durable(&self, lsn: Lsn) -> Durable {
        Durable::new(Arc::clone(&self.marks), Arc::clone(&self.queue), lsn)
    }

    /// Blocks until the record at `lsn` and all before it are durable, at most for `timeout`.
    ///
    /// # Errors
    /// [`DurableError`](crate::DurableError).
    pub fn wait_durable(
        &self,
        lsn: Lsn,
        timeout: Option<Duration>,
    ) -> Result<(), crate::DurableError> {
        self.durable(lsn).wait(timeout)
    }

    /// Declares that no record below `lsn` is needed any more. Their space is used again once a
    /// later group with this trim is written and released (trap T11); if the log is full, one is
    /// written for that alone. A crash before that may leave the records.
    ///
    /// The log's thread may have to read blocks first. If it can't, nothing is dropped: this call
    /// has returned before. [`WalStat::trimmed`] does not move then; call this again.
    ///
    /// # Errors
    /// [`TrimError`]: the records are not durable, or the log has ended.
    pub fn trim(&self, lsn: Lsn) -> Result<(), TrimError> {
        let durable = self.marks.progress().durable;
        if lsn > durable {
            return Err(TrimError::NotDurable { asked: lsn, durable });
        }
        self.queue.request(|requests| requests.trim = requests.trim.max(Some(lsn)))?;
        Ok(())
    }

    /// The length of the longest record that this log takes, in bytes: about half of its ring.
    #[must_use]
    pub fn record_bytes_max(&self) -> usize {
        self.ring.record_bytes_max()
    }

    /// The records that begin at `from` or later and are durable now, in order. Trimmed ones are
    /// left out.
    ///
    /// The log's own thread reads the blocks, between its groups: a record that is appended
    /// meanwhile waits for one read more. While a target is unreachable, reading waits as long as
    /// the stream does ([`ConnectOptions::loss_timeout`]).
    ///
    /// [`ConnectOptions::loss_timeout`]: riopipe::ConnectOptions::loss_timeout
    #[must_use]
    pub fn records(&self, from: Lsn) -> Records {
        let progress = self.marks.progress();
        let from = from.max(progress.trimmed);
        let (ring, log, blocks) =
            (self.ring, self.log, progress.oldest_block..progress.durable_blocks_end);
        let span = Span { ring, log, crc: crc32c, from, blocks };
        Records::new(Arc::clone(&self.queue), Arc::clone(&self.marks), span)
    }

    /// The progress of the log.
    #[must_use]
    pub fn stat(&self) -> WalStat {
        let progress = self.marks.progress();
        WalStat {
            end: self.queue.end(),
            durable: progress.durable,
            trimmed: progress.trimmed,
            queued_bytes: self.queue.len() + progress.unpacked_bytes,
            free_blocks: progress.free_blocks,
            blocks: self.ring.blocks(),
        }
    }

    /// The reason why the log has ended, if it has.
    #[must_use]
    pub fn failure(&self) -> Option<WalFailure> {
        self.marks.end_reason()
    }

    /// Accepts no more records, waits until all are durable, and closes the stream. After a
    /// [`Deadline`](CloseError::Deadline) the log continues closing, and this may be called again.
    ///
    /// # Errors
    /// [`CloseError`].
    pub fn close(&self, timeout: Option<Duration>) -> Result<(), CloseError> {
        let since = Instant::now();
        // An error means that the log has ended already; the reason is read below.
        let _ = self.queue.request(|requests| requests.close = true);
        if !self.marks.wait_for_end(timeout) {
            let queued = self.stat().queued_bytes;
            return Err(CloseError::Deadline { waited: since.elapsed(), queued });
        }
        if let Some(thread) = lock(&self.committer).take() {
            // The thread has reported its end, also after a panic.
            let _ = thread.join();
        }
        match self.marks.end_reason() {
            None | Some(WalFailure::Closed) => Ok(()),
            Some(failure) => Err(failure.into()),
        }
    }
}

impl Drop for Wal {
    fn drop(&mut self) {
        let Some(thread) = lock(&self.committer).take() else { return };
        let _ = self.queue.request(|requests| requests.abandon = true);
        // A waker that the log's thread calls may drop the log. The thread can't wait for its own
        // end.
        if thread.thread().id() == std::thread::current().id() {
            return;
        }
        // After the wait, the stream can be opened again at once.
        if self.marks.wait_for_end(Some(END_TIMEOUT)) {
            let _ = thread.join();
        }
    }
}

/// Checks the place and the options of a log, and returns the log's ring.
fn checked_ring(
    volume: &Volume,
    place: WalPlace,
    options: &WalOptions,
) -> Result<Ring, PlaceError> {
    let WalPlace { lba, blocks, .. } = place;
    if !volume.engine().capabilities().keeps_order {
        return Err(PlaceError::Engine(volume.engine()));
    }
    if options.stream.orderless {
        return Err(PlaceError::Orderless);
    }
    if options.group_bytes < BLOCK_BYTES {
        return Err(PlaceError::GroupBytes);
    }
    if options.groups == 0 || options.flushes == 0 {
        return Err(PlaceError::InFlight);
    }
    let volume = volume.blocks();
    if lba.checked_add(blocks).is_none_or(|end| end > volume) {
        return Err(PlaceError::OutOfRange { lba, blocks, volume });
    }
    let ring = blocks.checked_sub(1).and_then(|ring| Ring::new(lba + 1, ring));
    ring.ok_or(PlaceError::TooFew { blocks })
}

/// Largest number of requests of a group. The stream refuses one with more.
const GROUP_REQUESTS_MAX: u64 = 65_535;

/// The largest number of blocks of a group, so that the stream never refuses one as too large.
fn group_blocks(volume: &Volume, options: &WalOptions) -> u64 {
    let bytes = (options.group_bytes as u64).min(options.stream.kept_bytes_max);
    let members = &volume.info().members;
    // Each request has at least one block. Further requests of the group flush the members.
    let mut requests = GROUP_REQUESTS_MAX.saturating_sub(members.len() as u64);
    if volume.engine().capabilities().keeps_log {
        for member in members {
            let is_on_same_target = |other: &&MemberInfo| other.nqn == member.nqn;
            let flushes = members.iter().filter(is_on_same_target).count() as u64;
            // The stream reserves the same number of slots for flushes that it needs itself.
            requests = requests.min(u64::from(member.slots).saturating_sub(2 * flushes));
        }
    }
    (bytes / BLOCK_BYTES as u64).min(requests).max(1)
}

/// Acknowledges the writes in doubt of the log's stream, if all of them are in the log, and returns
/// their list. This does not accept their content, because reading the log checks each block.
fn acknowledge(volume: &Volume, place: WalPlace) -> Result<Vec<InPlaceRange>, OpenError> {
    let in_doubt = volume.in_place(place.stream);
    let (start, end) = (place.lba, place.lba + place.blocks);
    let is_ours = |write: &&InPlaceRange| {
        write.range.lba >= start && write.range.lba + write.range.blocks <= end
    };
    let others = in_doubt.len() - in_doubt.iter().filter(is_ours).count();
    if others > 0 {
        return Err(OpenError::NotOurs { stream: place.stream, others });
    }
    if !in_doubt.is_empty() {
        // A wrong place must not acknowledge anything, so the anchor is checked first. The stream
        // can't be opened before its writes are acknowledged, so a reader of the volume reads the
        // anchor.
        let reader = volume.reader(&ReaderOptions::default());
        read_log_number(place, &mut |block| reader.read(place.lba, block, None))?;
        volume.acknowledge(place.stream)?;
    }
    Ok(in_doubt)
}

/// The number of the log in `place`, from the log's anchor. `read` reads the anchor's block.
fn read_log_number(
    place: WalPlace,
    read: &mut dyn FnMut(&mut [u8]) -> Result<(), riopipe::ReadError>,
) -> Result<u64, OpenError> {
    let lba = place.lba;
    let mut block = vec![0; BLOCK_BYTES];
    read(&mut block).map_err(ReadError::Drive)?;
    let anchor = Anchor::parse(&block, crc32c)
        .map_err(|source: BlockError| OpenError::NoLog { lba, source })?;
    let Anchor { log, start, blocks } = anchor;
    if (start, blocks) != (place.lba, place.blocks) {
        return Err(OpenError::OtherPlace { lba, start, blocks });
    }
    Ok(log)
}

/// Makes the blocks of a log durable that a crash has left. `anchor_lba` is the block of the log's
/// anchor, `log` the log's number.
///
/// Without ordering logs, opening a volume flushes nothing. So the blocks of the last groups may be
/// in the caches of drives only. They are written again, and flushed, before any other block.
fn settle(
    stream: &mut Stream,
    anchor_lba: u64,
    log: u64,
    ring: Ring,
    end: &End,
) -> Result<(), OpenError> {
    let mut settling = Settling::new(*end, log, crc32c);
    let mut last = None;
    for unsettled in end.to_settle() {
        let lba = unsettled.lba(anchor_lba, ring);
        let mut block = stream.buf(BLOCK_BYTES).map_err(SettleError::from)?;
        stream.read(lba, &mut block, None).map_err(SettleError::from)?;
        settling.check(unsettled, &block)?;
        let group = stream.group().write(lba, block, Place::InPlace);
        last = Some(group.submit_or_wait(None).map_err(SettleError::from)?);
    }
    if let Some(seq) = last {
        stream.wait(Until::Durable(seq), None).map_err(SettleError::from)?;
    }
    Ok(())
}

/// A random number from the kernel.
fn random() -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}
