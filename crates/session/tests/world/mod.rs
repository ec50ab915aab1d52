//! A target session's world in memory: drives that complete when the test asks for it, a log region
//! that forgets unfenced stores, a clock that the test moves, and scripted hosts.
#![allow(dead_code, reason = "each test file uses what it needs")]

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq, StreamId, VolumeId};
use riopipe_order::block_device::{self, BlockDevice, Data, Done, IoError, Operation, Submitted};
use riopipe_order::entry::PartitionId;
use riopipe_order::gate::Cause;
use riopipe_order::log_region::{HEADER_BYTES, LogKind, LogRegion};
use riopipe_order::ordering_log::{Scan, StreamLog};
use riopipe_order::region::{MemRegion, Region, RegionError};
use riopipe_order::write_order::{DriveOrder, EpochId, WriteOrder};
use riopipe_session::outbox::Outbox;
use riopipe_session::stages::Spent;
use riopipe_session::target::limits::H2C_DATA_BYTES_MAX;
use riopipe_session::target::{
    Closed, ConnId, Event, Identity, LbaSize, LocalAddress, NamespaceConfig, Namespaces, OpId,
    Shared, Split, TargetConn, TargetEnv, Volumes,
};
use riopipe_session::wire;
pub(crate) use riopipe_testkit::attribute;

pub(crate) mod recovery;

use crate::peer::{self, Completion, Digests, HOSTID, HOSTNQN, Received, Sqe};

pub(crate) const SUBNQN: &str = "nqn.2026-01.io.example:drives";
pub(crate) const VOLUME: VolumeId = VolumeId([7; 16]);
pub(crate) const BOOT: [u8; 16] = [9; 16];
/// Blocks of every drive.
pub(crate) const BLOCKS: u64 = 10_000;
pub(crate) const LOG_LEN: usize = 1 << 20;
/// When every target begins, ns.
pub(crate) const NOW: u64 = 1_000_000_000;

pub(crate) fn crc(crc: u32, data: &[u8]) -> u32 {
    riopipe_nvme::digest::soft(crc, data)
}

/// The parts of a log region, each with its own fences, so that a fence of one doesn't hide a
/// missing one of another.
#[derive(Clone, Default)]
pub(crate) struct Parts(Arc<Mutex<BTreeMap<usize, MemRegion>>>);

pub(crate) struct Part {
    parts: Parts,
    at: usize,
}

impl Parts {
    pub(crate) fn part(&self, range: Range<usize>) -> Part {
        let mut parts = self.0.lock().unwrap();
        parts.entry(range.start).or_insert_with(|| MemRegion::forgetful(range.len()));
        Part { parts: self.clone(), at: range.start }
    }

    /// The parts after a crash.
    pub(crate) fn crash(&self, seed: u64) -> Self {
        let parts = self.0.lock().unwrap();
        let left = parts.iter().map(|(at, region)| (*at, region.crash(seed ^ *at as u64)));
        Self(Arc::new(Mutex::new(left.collect())))
    }

    pub(crate) fn fail_fences_after(&self, at: usize, count: u64) {
        self.0.lock().unwrap().get_mut(&at).unwrap().fail_fences_after(count);
    }

    /// Fences of the partition that begins at `at`.
    pub(crate) fn fences(&self, at: usize) -> u64 {
        self.0.lock().unwrap()[&at].fences()
    }

    /// The log of a stream as a crash with this seed leaves it.
    pub(crate) fn scan(&self, at: usize, len: usize, stream: u16, seed: u64) -> Scan {
        let part = self.crash(seed).part(at..at + len);
        let id = PartitionId { volume: VOLUME, stream: StreamId(stream) };
        StreamLog::open(part, id, crc).unwrap().1
    }
}

impl Region for Part {
    fn len(&self) -> usize {
        self.parts.0.lock().unwrap()[&self.at].len()
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        self.parts.0.lock().unwrap()[&self.at].read(offset, into);
    }
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.parts.0.lock().unwrap().get_mut(&self.at).unwrap().write(offset, bytes);
    }
    fn write_word(&mut self, offset: usize, value: u64) {
        self.parts.0.lock().unwrap().get_mut(&self.at).unwrap().write_word(offset, value);
    }
    fn fence(&mut self) -> Result<(), RegionError> {
        self.parts.0.lock().unwrap().get_mut(&self.at).unwrap().fence()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Write(Vec<u8>),
    Read(u64),
    Flush,
    Zero { blocks: u64, deallocate: bool },
    StartStream,
}

/// An operation that a drive has not finished.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) op: OpId,
    pub(crate) lba: u64,
    pub(crate) what: What,
}

/// A drive.
#[derive(Default)]
pub(crate) struct Drive {
    blocks: BTreeMap<u64, Vec<u8>>,
    /// Keeps operations until the test completes them.
    pub(crate) holds: bool,
    pub(crate) pending: Vec<Pending>,
    /// Every operation ever begun.
    pub(crate) history: Vec<(u64, What)>,
    /// Fails the operations that finish within the call.
    pub(crate) failing: bool,
    /// The operations that it keeps wait in a queue before it.
    pub(crate) is_full: bool,
    pub(crate) on_write: Option<OnWrite>,
    /// The drive has FUA.
    pub(crate) has_fua: bool,
    /// The operations that it was to make durable itself.
    pub(crate) durable: usize,
}

impl Drive {
    pub(crate) fn block(&self, lba: u64) -> Vec<u8> {
        self.blocks.get(&lba).cloned().unwrap_or_else(|| vec![0; 4096])
    }

    /// Changes the content of a block, past the target.
    pub(crate) fn overwrite(&mut self, lba: u64, content: Vec<u8>) {
        self.blocks.insert(lba, content);
    }

    /// A power cut destroys a block that was not flushed.
    pub(crate) fn lose(&mut self, lba: u64) {
        self.blocks.remove(&lba);
    }

    fn apply(&mut self, lba: u64, what: &What) -> Option<Vec<u8>> {
        match what {
            What::Write(bytes) => {
                for (i, block) in bytes.chunks(4096).enumerate() {
                    self.blocks.insert(lba + i as u64, block.to_vec());
                }
                None
            }
            What::Read(count) => {
                Some((lba..lba + *count).flat_map(|lba| self.block(lba)).collect())
            }
            What::Flush | What::StartStream => None,
            What::Zero { blocks, .. } => {
                for lba in lba..lba + blocks {
                    self.blocks.remove(&lba);
                }
                None
            }
        }
    }
}

/// Called for each write that begins, with its first block, to check the conditions of that moment.
type OnWrite = Box<dyn FnMut(u64)>;

/// An operation failed for this reason.
pub(crate) fn io_error(cause: block_device::Cause) -> IoError {
    IoError::new(Operation::Write, 0, 1, &Arc::from("a drive"), cause)
}

fn failed() -> IoError {
    io_error(block_device::Cause::Failed("the test asked for it".into()))
}

/// The work of another core.
pub(crate) type OtherCore = Box<dyn FnOnce(&mut TestHost)>;

pub(crate) struct TestHost {
    pub(crate) shared: Shared<Part>,
    pub(crate) drives: Vec<Drive>,
    pub(crate) now: u64,
    pub(crate) notices: VecDeque<ConnId>,
    pub(crate) log: Vec<String>,
    pub(crate) parts: Parts,
    /// Counts the calls of `alloc`. The most bytes in use at once cannot be seen.
    pub(crate) allocs: usize,
    pub(crate) no_memory: bool,
    /// The number of ordered requests that the sessions report.
    pub(crate) ordered: u64,
    pub(crate) traced: Vec<Spent>,
    pub(crate) stopped: Vec<Cause>,
    /// How often the log's store was checked.
    pub(crate) watched: usize,
    /// Another core comes first when this one takes the lock next.
    pub(crate) before_lock: Option<OtherCore>,
}

impl Drive {
    fn begin(&mut self, op: u64, lba: u64, what: What) -> Submitted<Vec<u8>> {
        if matches!(what, What::Write(_))
            && let Some(check) = &mut self.on_write
        {
            check(lba);
        }
        self.history.push((lba, what.clone()));
        if self.holds {
            self.pending.push(Pending { op: OpId(op), lba, what });
            return Submitted::Pending;
        }
        if self.failing {
            return Submitted::Done(Err(failed()));
        }
        Submitted::Done(Ok(self.apply(lba, &what)))
    }
}

impl BlockDevice for Drive {
    type Buf = Vec<u8>;

    fn write(&mut self, op: u64, lba: u64, data: Data<'_, Vec<u8>>) -> Submitted<Vec<u8>> {
        self.begin(op, lba, What::Write(data.bytes().to_vec()))
    }
    fn write_in_order(
        &mut self,
        op: u64,
        lba: u64,
        data: Data<'_, Vec<u8>>,
        _: WriteOrder,
    ) -> Submitted<Vec<u8>> {
        self.write(op, lba, data)
    }
    fn has_fua(&self) -> bool {
        self.has_fua
    }
    fn write_durably(&mut self, op: u64, lba: u64, data: Data<'_, Vec<u8>>) -> Submitted<Vec<u8>> {
        self.durable += 1;
        self.write(op, lba, data)
    }
    fn zero_durably(
        &mut self,
        op: u64,
        lba: u64,
        blocks: u64,
        deallocate: bool,
    ) -> Submitted<Vec<u8>> {
        self.durable += 1;
        self.begin(op, lba, What::Zero { blocks, deallocate })
    }
    fn flush_epochs(&mut self, op: u64, _: EpochId) -> Submitted<Vec<u8>> {
        self.flush(op)
    }
    fn start_stream(&mut self, op: u64, _: EpochId) -> Submitted<Vec<u8>> {
        self.begin(op, 0, What::StartStream)
    }
    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Vec<u8>> {
        self.begin(op, lba, What::Read(blocks))
    }
    fn flush(&mut self, op: u64) -> Submitted<Vec<u8>> {
        self.begin(op, 0, What::Flush)
    }
    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Vec<u8>> {
        self.begin(op, lba, What::Zero { blocks, deallocate: false })
    }
    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted<Vec<u8>> {
        self.begin(op, lba, What::Zero { blocks, deallocate: true })
    }
    fn take_back(&mut self, op: u64) -> bool {
        let waiting = self.pending.iter().position(|pending| pending.op.0 == op);
        let taken = waiting.filter(|_| self.is_full).map(|at| self.pending.remove(at));
        taken.is_some()
    }
    fn kick(&mut self, _: u64) {}
    /// Oldest first.
    fn poll(&mut self, _: u64, done: &mut Vec<Done<Vec<u8>>>) {
        for Pending { op, lba, what } in std::mem::take(&mut self.pending) {
            done.push(Done { op: op.0, result: Ok(self.apply(lba, &what)) });
        }
    }
    fn next_deadline(&self) -> Option<u64> {
        None
    }
    fn in_flight(&self) -> usize {
        self.pending.len()
    }
}

impl TargetEnv for TestHost {
    type Buf = Vec<u8>;
    type Device = Drive;
    type Region = Part;

    fn now(&self) -> u64 {
        self.now
    }
    fn alloc(&mut self, len: usize) -> Option<Vec<u8>> {
        self.allocs += 1;
        (!self.no_memory).then(|| vec![0xee; len])
    }
    fn device(&mut self, ns: usize) -> &mut Drive {
        &mut self.drives[ns]
    }
    fn with_shared<T>(&mut self, f: impl FnOnce(&mut Shared<Part>) -> T) -> T {
        if let Some(other_core) = self.before_lock.take() {
            other_core(self);
        }
        f(&mut self.shared)
    }
    fn notify(&mut self, conn: ConnId) {
        self.notices.push_back(conn);
    }
    fn log(&mut self, event: Event<'_>) {
        self.log.push(format!("{event:?}"));
    }
    fn ordered(&mut self, requests: u64) {
        self.ordered += requests;
    }
    fn traced(&mut self, spent: &Spent) {
        self.traced.push(*spent);
    }
    fn watch_log(&mut self) {
        self.watched += 1;
    }
    fn stopped(&mut self, why: Cause) {
        self.stopped.push(why);
    }
}

/// A connection and the scripted host at its other end.
pub(crate) struct Link {
    pub(crate) conn: TargetConn<TestHost>,
    pub(crate) out: Outbox<Vec<u8>>,
    /// Received by the target, not consumed.
    input: Vec<u8>,
    /// Sent by the target, not read.
    answers: Vec<u8>,
    pub(crate) digests: Digests,
    pub(crate) hpda: u8,
    pub(crate) closed: Option<Closed>,
    /// The host takes its answers.
    pub(crate) reading: bool,
    /// The target receives data into the buffers of its commands, where that is possible.
    pub(crate) is_direct: bool,
}

/// Everything.
pub(crate) struct World {
    pub(crate) host: TestHost,
    pub(crate) links: Vec<Link>,
    /// Notices that connections leave for one another stay where they are.
    pub(crate) hold_mail: bool,
    /// The lease that owners ask for, ms.
    pub(crate) lease_ms: u32,
    /// The port through which hosts connect.
    pub(crate) port: u16,
}

pub(crate) fn identity() -> Identity {
    Identity::open_to_all(SUBNQN, "RIO0001")
}

impl World {
    /// Drives with or without a volatile cache, and an ordering log.
    pub(crate) fn new(volatile: &[bool]) -> Self {
        Self::with(volatile, identity(), Parts::default())
    }

    pub(crate) fn with(volatile: &[bool], identity: Identity, parts: Parts) -> Self {
        let header = parts.part(0..HEADER_BYTES);
        let blank = {
            let mut bytes = [0; 8];
            header.read(0, &mut bytes);
            bytes == [0; 8]
        };
        let region = if blank {
            LogRegion::create(header, LOG_LEN, [3; 16], BOOT, LogKind::Dax, crc).unwrap()
        } else {
            LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap()
        };
        let mine = parts.clone();
        let split: Split<Part> = Box::new(move |range| Ok(mine.part(range)));
        let (volumes, problems) = Volumes::with_log(region, split, crc);
        assert_eq!(problems, Vec::<String>::new());
        Self::over(volatile, identity, parts, volumes)
    }

    /// The target is started again, with the same drives, and with a new log if it is to have one.
    pub(crate) fn restarted_with_another_log(self, log: Option<[u8; 16]>) -> Self {
        let Self { host: TestHost { drives, shared, now, .. }, .. } = self;
        let volatile: Vec<bool> =
            shared.namespaces().iter().map(|namespace| namespace.config.volatile).collect();
        let parts = Parts::default();
        let volumes = match log {
            None => Volumes::without_log(crc),
            Some(uuid) => {
                let header = parts.part(0..HEADER_BYTES);
                let region = LogRegion::create(header, LOG_LEN, uuid, BOOT, LogKind::Dax, crc);
                let mine = parts.clone();
                let split: Split<Part> = Box::new(move |range| Ok(mine.part(range)));
                Volumes::with_log(region.unwrap(), split, crc).0
            }
        };
        let mut world = Self::over(&volatile, identity(), parts, volumes);
        (world.host.drives, world.host.now) = (drives, now);
        world
    }

    pub(crate) fn over(
        volatile: &[bool],
        identity: Identity,
        parts: Parts,
        volumes: Volumes<Part>,
    ) -> Self {
        Self::over_ordered(volatile, DriveOrder::None, identity, parts, volumes)
    }

    /// Drives that keep this order by themselves.
    pub(crate) fn over_ordered(
        volatile: &[bool],
        order: DriveOrder,
        identity: Identity,
        parts: Parts,
        volumes: Volumes<Part>,
    ) -> Self {
        Self::over_drives(volatile, order, LbaSize::default(), identity, parts, volumes)
    }

    /// Drives without a volatile cache whose namespaces have logical blocks of 512 bytes.
    pub(crate) fn with_small_blocks(drives: usize) -> Self {
        let (volatile, size) = (vec![false; drives], LbaSize::Bytes512);
        let volumes = Volumes::without_log(crc);
        let order = DriveOrder::None;
        Self::over_drives(&volatile, order, size, identity(), Parts::default(), volumes)
    }

    pub(crate) fn over_drives(
        volatile: &[bool],
        order: DriveOrder,
        lba_size: LbaSize,
        identity: Identity,
        parts: Parts,
        volumes: Volumes<Part>,
    ) -> Self {
        let namespaces = volatile.iter().zip(1..).map(|(volatile, nsid)| NamespaceConfig {
            nsid,
            blocks: BLOCKS,
            lba_size,
            ana_group: if nsid > 2 { 2 } else { 1 },
            nguid: [nsid as u8; 16],
            uuid: [0x10 + nsid as u8; 16],
            volatile: *volatile,
            order,
        });
        let namespaces = Namespaces::new(namespaces.collect()).unwrap();
        let host = TestHost {
            shared: Shared::new(identity, namespaces, volumes, NOW),
            drives: volatile.iter().map(|_| Drive::default()).collect(),
            now: NOW,
            notices: VecDeque::new(),
            log: Vec::new(),
            parts,
            allocs: 0,
            no_memory: false,
            ordered: 0,
            traced: Vec::new(),
            stopped: Vec::new(),
            watched: 0,
            before_lock: None,
        };
        Self { host, links: Vec::new(), hold_mail: false, lease_ms: 0, port: 1 }
    }

    /// A new connection, without any byte sent yet.
    pub(crate) fn accept(&mut self) -> usize {
        let at = self.links.len();
        let conn = TargetConn::new(ConnId(100 + at as u64), at as u64, crc, self.host.now);
        let local = LocalAddress { traddr: "192.0.2.1".into(), ipv6: false, portid: self.port };
        let conn = conn.with_local_address(Some(local));
        self.links.push(Link {
            conn,
            out: Outbox::new(),
            input: Vec::new(),
            answers: Vec::new(),
            digests: Digests::default(),
            hpda: 0,
            closed: None,
            reading: true,
            is_direct: true,
        });
        at
    }

    /// The host sends bytes; the target handles them.
    pub(crate) fn send(&mut self, at: usize, mut bytes: &[u8]) {
        let link = &mut self.links[at];
        if link.is_direct && link.input.is_empty() {
            let space = link.conn.data_space();
            let (data, rest) = bytes.split_at(space.len().min(bytes.len()));
            space[..data.len()].copy_from_slice(data);
            link.conn.data_arrived(data.len());
            bytes = rest;
        }
        link.input.extend_from_slice(bytes);
        self.turn(at);
        self.deliver();
    }

    fn turn(&mut self, at: usize) {
        let Self { host, links, .. } = self;
        let link = &mut links[at];
        loop {
            if link.closed.is_some() || !link.conn.wants_input(&link.out) {
                break;
            }
            match link.conn.receive(&link.input, host, &mut link.out) {
                Ok(consumed) => {
                    link.input.drain(..consumed);
                    if link.conn.input_waits() {
                        // Bytes must be sent first, unless the host takes none.
                        Self::carry(host, link);
                        if !link.reading {
                            link.conn.unsent(host.now);
                        }
                    } else if consumed == 0 {
                        break;
                    }
                }
                Err(closed) => Self::close(host, link, closed),
            }
        }
        Self::carry(host, link);
    }

    fn close(host: &mut TestHost, link: &mut Link, closed: Closed) {
        link.conn.close(&closed.to_string(), host);
        link.closed = Some(closed);
    }

    /// The network carries the target's bytes.
    fn carry(host: &mut TestHost, link: &mut Link) {
        while link.reading && !link.out.is_empty() {
            let bytes: Vec<u8> = link.out.slices().flatten().copied().collect();
            link.answers.extend_from_slice(&bytes);
            link.out.consume(bytes.len());
            link.conn.sent(host, &mut link.out);
        }
    }

    /// Carries notices between connections until there are none.
    pub(crate) fn deliver(&mut self) {
        while !self.hold_mail
            && let Some(id) = self.host.notices.pop_front()
        {
            let Self { host, links, .. } = self;
            let Some(link) = links.iter_mut().find(|link| link.conn.id() == id) else {
                continue;
            };
            if let Err(closed) = link.conn.noticed(host, &mut link.out)
                && link.closed.is_none()
            {
                Self::close(host, link, closed);
            }
            Self::carry(host, link);
        }
    }

    /// The host takes its answers again.
    pub(crate) fn resume_reading(&mut self, at: usize) {
        self.links[at].reading = true;
        Self::carry(&mut self.host, &mut self.links[at]);
        self.turn(at);
    }

    /// The host's socket dies.
    pub(crate) fn hang_up(&mut self, at: usize) {
        let Self { host, links, .. } = self;
        Self::close(host, &mut links[at], Closed::Ended("the socket died"));
        self.deliver();
    }

    pub(crate) fn tick(&mut self) {
        let Self { host, links, .. } = self;
        for link in links {
            if let Err(closed) = link.conn.tick(host.now, host, &mut link.out) {
                Self::close(host, link, closed);
            }
            Self::carry(host, link);
        }
        self.deliver();
    }

    pub(crate) fn command(&mut self, at: usize, sqe: Sqe, data: &[u8]) {
        let bytes = peer::capsule(self.links[at].digests, &sqe.0, data);
        self.send(at, &bytes);
    }

    /// All bytes that the target has sent and the test has not read.
    pub(crate) fn take_answers(&mut self, at: usize) -> Vec<u8> {
        std::mem::take(&mut self.links[at].answers)
    }

    /// The next PDU that the target has sent.
    pub(crate) fn next(&mut self, at: usize) -> Option<Received> {
        let link = &mut self.links[at];
        peer::parse(&mut link.answers, link.digests, link.hpda)
    }

    /// The completions that the target has sent.
    pub(crate) fn completions(&mut self, at: usize) -> Vec<Completion> {
        std::iter::from_fn(|| self.next(at)).map(|pdu| pdu.completion()).collect()
    }

    pub(crate) fn call(&mut self, at: usize, sqe: Sqe, data: &[u8]) -> Completion {
        self.command(at, sqe, data);
        self.next(at).expect("an answer").completion()
    }

    pub(crate) fn fetch(&mut self, at: usize, sqe: Sqe) -> (Vec<u8>, Completion) {
        self.command(at, sqe, &[]);
        let data = self.next(at).expect("data");
        assert_eq!(data.kind, 0x07, "C2HData: {data:x?}");
        (data.data, self.next(at).expect("an answer").completion())
    }

    /// A drive, with a volatile cache or without, and two I/O queues of a host.
    pub(crate) fn with_two_queues(volatile: bool) -> (Self, usize, usize) {
        let mut world = Self::new(&[volatile]);
        let (_, cntlid) = world.admin();
        let [first, second] = [1, 2].map(|qid| world.io(cntlid, qid));
        (world, first, second)
    }

    /// A plain FLUSH of drive 0 fails.
    pub(crate) fn fail_a_flush(&mut self, at: usize) {
        self.host.drives[0].failing = true;
        assert_eq!(self.call(at, peer::flush(1, 1), &[]).status, 0x280);
        self.host.drives[0].failing = false;
    }

    /// Sends the data that the next R2T of a command requests. Returns the offset and the length of
    /// this data.
    pub(crate) fn send_requested(&mut self, at: usize, cid: u16, whole: &[u8]) -> (u32, u32) {
        let r2t = self.next(at).expect("an R2T");
        assert_eq!((r2t.kind, r2t.u16(8)), (0x09, cid), "{r2t:?}");
        self.send_data(at, &r2t, whole)
    }

    /// Sends the data that an R2T requests, in PDUs of the largest size.
    pub(crate) fn send_data(&mut self, at: usize, r2t: &Received, whole: &[u8]) -> (u32, u32) {
        let (cid, tag, from, len) = (r2t.u16(8), r2t.u16(10), r2t.u32(12), r2t.u32(16));
        let digests = self.links[at].digests;
        for offset in (from..from + len).step_by(H2C_DATA_BYTES_MAX as usize) {
            let end = (offset + H2C_DATA_BYTES_MAX).min(from + len);
            let data = &whole[offset as usize..end as usize];
            self.send(at, &peer::h2c_data(digests, cid, tag, offset, data, end == from + len));
        }
        (from, len)
    }

    pub(crate) fn initialize(&mut self, digests: Digests, hpda: u8) -> usize {
        let at = self.accept();
        self.send(at, &peer::icreq(digests, hpda));
        let icresp = self.next(at).expect("an ICResp");
        assert_eq!(icresp.kind, 0x01);
        self.links[at].digests = digests;
        self.links[at].hpda = hpda;
        at
    }

    /// An enabled controller: its admin connection and id.
    pub(crate) fn admin(&mut self) -> (usize, u16) {
        self.admin_as(HOSTNQN, HOSTID, 0)
    }

    pub(crate) fn admin_as(
        &mut self,
        hostnqn: &str,
        hostid: [u8; 16],
        kato_ms: u32,
    ) -> (usize, u16) {
        let at = self.initialize(Digests::default(), 0);
        let data = peer::connect_data(SUBNQN, hostnqn, hostid, 0xffff);
        let done = self.call(at, peer::connect(0, 0, 31, kato_ms), &data);
        assert_eq!(done.status, 0);
        assert_eq!(self.call(at, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]).status, 0);
        (at, done.result as u16)
    }

    /// An I/O queue of the controller with 128 entries.
    pub(crate) fn io(&mut self, cntlid: u16, qid: u16) -> usize {
        self.io_as(HOSTNQN, HOSTID, cntlid, qid)
    }

    pub(crate) fn io_as(
        &mut self,
        hostnqn: &str,
        hostid: [u8; 16],
        cntlid: u16,
        qid: u16,
    ) -> usize {
        let at = self.initialize(Digests::default(), 0);
        let data = peer::connect_data(SUBNQN, hostnqn, hostid, cntlid);
        assert_eq!(self.call(at, peer::connect(0, qid, 127, 0), &data).status, 0);
        at
    }

    /// Claims [`VOLUME`] over all drives; the claim command's completion, if it came.
    pub(crate) fn claim(&mut self, admin: usize, claim: &wire::Claim) -> Option<Completion> {
        let sqe = riopipe_bytes(&wire::claim_command()).cid(50).inline(4096);
        self.command(admin, sqe, &claim.encode());
        self.next(admin).map(|pdu| pdu.completion())
    }

    /// A controller that owns [`VOLUME`] (generation 1, two streams) and a connection bound to
    /// stream 0.
    pub(crate) fn owner(&mut self) -> Owner {
        let (admin, cntlid) = self.admin();
        let claim = self.first_claim();
        assert_eq!(self.claim(admin, &claim).map(|c| c.status), Some(0));
        let io = self.io(cntlid, 1);
        assert_eq!(self.bind(io, 0, 1, 0).status, 0);
        Owner { admin, cntlid, io }
    }

    pub(crate) fn first_claim(&self) -> wire::Claim {
        let members = wire::in_order(1..=self.host.drives.len() as u32);
        wire::Claim {
            create: true,
            slots: 64,
            lease_ms: self.lease_ms,
            ..wire::Claim::plain(VOLUME, 1, 2, members)
        }
    }

    pub(crate) fn bind(
        &mut self,
        io: usize,
        stream: u16,
        generation: u32,
        released: u64,
    ) -> Completion {
        let sqe = wire::bind_command(VOLUME, StreamId(stream), generation, Seq(released));
        self.call(io, riopipe_bytes(&sqe).cid(60), &[])
    }

    /// Finishes the `i`th pending operation of a drive.
    pub(crate) fn complete(&mut self, ns: usize, i: usize) {
        self.finish(ns, i, None);
    }

    pub(crate) fn fail(&mut self, ns: usize, i: usize) {
        self.fail_with(ns, i, failed());
    }

    pub(crate) fn fail_with(&mut self, ns: usize, i: usize, error: IoError) {
        self.finish(ns, i, Some(error));
    }

    fn finish(&mut self, ns: usize, i: usize, error: Option<IoError>) {
        let Self { host, links, .. } = self;
        let Pending { op, lba, what } = host.drives[ns].pending.remove(i);
        let result = match error {
            None => Ok(host.drives[ns].apply(lba, &what)),
            Some(error) => Err(error),
        };
        let link = &mut links[op.key() as usize];
        link.conn.device_done(op, result, host, &mut link.out);
        link.conn.batch_ended(host, &mut link.out);
        Self::carry(host, link);
        self.deliver();
    }

    /// Finishes all pending operations of a drive, oldest first, also those that begin by that.
    pub(crate) fn complete_all(&mut self, ns: usize) {
        while !self.host.drives[ns].pending.is_empty() {
            self.complete(ns, 0);
        }
    }

    /// The place and the length of the log of a stream of [`VOLUME`].
    pub(crate) fn partition(&self, stream: u16) -> (usize, usize) {
        let header = self.host.parts.crash(0).part(0..HEADER_BYTES);
        let region = LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap();
        let range = region.volume(VOLUME).unwrap().partition(StreamId(stream)).unwrap();
        (range.start, range.len())
    }

    /// The log of a stream as a crash with this seed leaves it.
    pub(crate) fn scan(&self, stream: u16, seed: u64) -> Scan {
        let (at, len) = self.partition(stream);
        self.host.parts.scan(at, len, stream, seed)
    }
}

pub(crate) struct Owner {
    pub(crate) admin: usize,
    pub(crate) cntlid: u16,
    pub(crate) io: usize,
}

/// A Rio command, encoded by this project (docs/wire-format.md has no other implementation yet),
/// as the scripted host sends it.
pub(crate) fn riopipe_bytes(sqe: &riopipe_nvme::command::Sqe) -> Sqe {
    Sqe(sqe.0).byte(1, 0x40)
}

/// One block of a recognisable content.
pub(crate) fn block(seed: u8) -> Vec<u8> {
    (0..4096).map(|i| (i as u8).wrapping_mul(13) ^ seed).collect()
}

pub(crate) fn pattern(seed: u8, blocks: usize) -> Vec<u8> {
    (0..blocks).flat_map(|i| block(seed.wrapping_add(i as u8))).collect()
}

/// The request that carries an attribute: to namespace `member + 1`, released up to `released`.
pub(crate) fn ordered(cid: u16, a: &Attribute, released: u64) -> Sqe {
    use riopipe_nvme::command::Sqe as Rio;
    let nsid = u32::from(a.member.0) + 1;
    let mut sqe = match a.kind {
        Kind::Write => Rio::write(nsid, a.lba, a.blocks),
        Kind::Discard => Rio::write_zeroes(nsid, a.lba, a.blocks, true),
        Kind::Flush => Rio::flush(nsid),
    };
    wire::put_attribute(&mut sqe, a, Seq(released));
    let sqe = riopipe_bytes(&sqe).cid(cid);
    if a.kind == Kind::Write { sqe.inline(a.blocks * 4096) } else { sqe }
}

/// A flush entry without data of its own (T3).
pub(crate) fn flush_entry(seq: u64, member: u8) -> Attribute {
    Attribute {
        kind: Kind::Flush,
        flags: Flags::BOUNDARY.with(Flags::FLUSH),
        lba: 0,
        blocks: 0,
        member: Member(member),
        ..attribute(seq, 0)
    }
}
