//! The cost of the sessions per write, without sockets and drives: an initiator's stream and a
//! target's connection in one thread, in batches of a queue depth.
//!
//! ```text
//! cargo run --release -p riopipe-target --example cost -- [none|rio] [WRITES] [DEPTH]
//! valgrind --tool=callgrind … # counts instructions, which no busy machine disturbs
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use riopipe_order::attribute::{StreamId, VolumeId};
use riopipe_order::engine::{EngineKind, Limits, Op, Place, Write, engine};
use riopipe_order::log_region::{HEADER_BYTES, LogKind, LogRegion};
use riopipe_order::region::MemRegion;
use riopipe_order::topology::{MemberInfo, ServerInfo, Topology};
use riopipe_platform::crc32c as crc;
use riopipe_session::initiator::attach::Attach;
use riopipe_session::initiator::queue_pair::{Data as CommandData, QpConfig, QueuePair};
use riopipe_session::initiator::stream::{
    FlushFailures, ReadBarrier, StreamConfig, StreamQueue, StreamSession,
};
use riopipe_session::outbox::Outbox;
use riopipe_session::target::{
    ConnId, Event, Identity, NamespaceConfig, Namespaces, Shared, Split, TargetConn, TargetEnv,
    Volumes,
};
use riopipe_session::wire;
use riopipe_testkit::NullDrive;

const VOLUME: VolumeId = VolumeId([7; 16]);
const SUBNQN: &str = "nqn.2026-01.io.example:drives";
const HOSTNQN: &str = "nqn.2014-08.org.nvmexpress:uuid:1";
const BLOCKS: u64 = 1 << 20;
const SLOTS: u32 = 16384;

/// The environment of a target with one drive, which keeps nothing.
struct Sink(Shared<MemRegion>, NullDrive);

impl TargetEnv for Sink {
    type Buf = Vec<u8>;
    type Device = NullDrive;
    type Region = MemRegion;
    fn now(&self) -> u64 {
        1
    }
    fn alloc(&mut self, len: usize) -> Option<Vec<u8>> {
        Some(vec![0; len])
    }
    fn device(&mut self, _: usize) -> &mut NullDrive {
        &mut self.1
    }
    fn with_shared<T>(&mut self, f: impl FnOnce(&mut Shared<MemRegion>) -> T) -> T {
        f(&mut self.0)
    }
    fn notify(&mut self, _: ConnId) {}
    fn log(&mut self, _: Event<'_>) {}
}

/// A payload that is shared, never copied.
type Piece = Arc<[u8]>;

#[derive(Clone, Debug)]
struct Payload(Piece);

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl riopipe_order::engine::Payload for Payload {
    fn part(&self, _: u32, _: u32) -> Self {
        self.clone()
    }
}

/// Moves everything in an outbox into `into`, as it would be in a receive buffer.
fn carry<P: AsRef<[u8]>>(out: &mut Outbox<P>, into: &mut Vec<u8>) {
    into.clear();
    out.slices().for_each(|slice| into.extend_from_slice(slice));
    out.consume(into.len());
}

struct Target {
    conn: TargetConn<Sink>,
    out: Outbox<Vec<u8>>,
}

impl Target {
    fn new(id: u64) -> Self {
        Self { conn: TargetConn::new(ConnId(id), id, crc, 0), out: Outbox::new() }
    }

    fn take(&mut self, host: &mut Sink, bytes: &[u8]) {
        let used = self.conn.receive(bytes, host, &mut self.out);
        assert_eq!(used.expect("the initiator keeps to the protocol"), bytes.len());
    }
}

fn target() -> Sink {
    let header = MemRegion::new(HEADER_BYTES);
    let len = HEADER_BYTES + (SLOTS as usize + 64) * 64;
    let region = LogRegion::create(header, len, [3; 16], [4; 16], LogKind::File, crc);
    let split: Split<MemRegion> = Box::new(|range| Ok(MemRegion::new(range.len())));
    let (volumes, _) = Volumes::with_log(region.expect("a good shape"), split, crc);
    let drive = NamespaceConfig {
        nsid: 1,
        blocks: BLOCKS,
        lba_size: Default::default(),
        ana_group: 1,
        nguid: [0; 16],
        uuid: [1; 16],
        volatile: false,
        order: riopipe_order::write_order::DriveOrder::None,
    };
    let namespaces = Namespaces::new(vec![drive]).expect("one namespace");
    let shared = Shared::new(Identity::open_to_all(SUBNQN, "RIO0001"), namespaces, volumes, 0);
    Sink(shared, NullDrive::default())
}

fn main() {
    let mut args = std::env::args().skip(1);
    let kind = match args.next().as_deref() {
        Some("none") => EngineKind::None,
        None | Some("rio") => EngineKind::Rio,
        Some(other) => panic!("no engine {other:?}: none or rio"),
    };
    let writes: u64 = args.next().map_or(1 << 20, |n| n.parse().expect("a number of writes"));
    let depth: usize = args.next().map_or(32, |n| n.parse().expect("a queue depth"));

    let mut host = target();
    let config = QpConfig::admin(HOSTNQN.into(), [7; 16], SUBNQN.into(), crc);
    let mut out: Outbox<Payload> = Outbox::new();
    let (mut up, mut down) = (Vec::new(), Vec::new());

    // The association, and the volume.
    let mut admin = Target::new(1);
    let mut attach: Attach<Payload> = Attach::new(config.clone(), 32);
    attach.start(&mut out);
    while !attach.is_attached() {
        carry(&mut out, &mut up);
        admin.take(&mut host, &up);
        carry(&mut admin.out, &mut down);
        attach.receive(0, &down, &mut out).expect("the target keeps to the protocol");
    }
    let (mut queue, controller) = attach.finish().expect("attached");
    let claim = wire::Claim {
        create: true,
        slots: SLOTS,
        ..wire::Claim::plain(VOLUME, 1, 1, wire::in_order([1]))
    };
    queue
        .submit(wire::claim_command(), 1, CommandData::Bytes(&claim.encode()), &mut out)
        .expect("space");
    carry(&mut out, &mut up);
    admin.take(&mut host, &up);

    // A stream.
    let member =
        MemberInfo { server: 0, start: 0, blocks: BLOCKS, request_blocks_max: 64, volatile: false };
    let topology =
        Topology::new(vec![member], vec![ServerInfo { slots: SLOTS }], 16).expect("one drive");
    let stream = StreamConfig {
        volume: VOLUME,
        stream: StreamId(0),
        generation: 1,
        engine: kind,
        start: riopipe_order::attribute::Seq::ZERO,
        nsids: vec![1],
        queue_depth: depth,
        timeout_ns: u64::MAX,
        loss_ns: 1,
    };
    let mut io: StreamQueue<Payload> =
        QueuePair::new(config.io_queue(controller.cntlid, 1, depth as u16 + 9));
    io.set_in_capsule(controller.in_capsule_bytes);
    let limits = Limits { merge: false, ..Limits::default() };
    let engine = engine(kind, topology.clone(), limits);
    let failures = FlushFailures::new(1);
    let barrier = ReadBarrier::new(1);
    let mut session = StreamSession::new(stream, engine, topology, vec![io], failures, &barrier);
    let mut conn = Target::new(2);
    session.start(1);
    while !session.is_ready().expect("not refused") {
        session.pump(1);
        carry(session.outbox(0), &mut up);
        conn.take(&mut host, &up);
        carry(&mut conn.out, &mut down);
        session.receive(0, 1, &down, &mut |_, _, _| ()).expect("the target keeps to the protocol");
    }

    let payload = Payload(vec![1; 4096].into());
    let [mut submitting, mut serving, mut completing] = [Duration::ZERO; 3];
    let mut lba = 0;
    for _ in 0..writes / depth as u64 {
        let begun = Instant::now();
        for _ in 0..depth {
            lba = (lba + 7919) % BLOCKS;
            let op = Op::Write(Place::Fresh, payload.clone());
            session.admit(&mut [Write { lba, blocks: 1, op }], lba, false).expect("space");
        }
        session.pump(1);
        submitting += begun.elapsed();
        session.instant(1);
        carry(session.outbox(0), &mut up);

        let begun = Instant::now();
        conn.take(&mut host, &up);
        serving += begun.elapsed();
        carry(&mut conn.out, &mut down);
        conn.conn.sent(&mut host, &mut conn.out);

        let begun = Instant::now();
        session.receive(0, 1, &down, &mut |_, _, _| ()).expect("the target keeps to the protocol");
        let marks = session.poll().expect("nothing fails");
        completing += begun.elapsed();
        assert_eq!(marks.complete, session.engine().last_admitted());
    }
    let each = |time: Duration| time.as_nanos() as f64 / writes as f64;
    println!(
        "{kind:?}: submit {:.1} ns, serve {:.1} ns, complete {:.1} ns per write",
        each(submitting),
        each(serving),
        each(completing)
    );
}
