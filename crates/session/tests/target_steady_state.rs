//! A warm connection serves writes without allocating, whether drives finish at once or later; and
//! the cost of the session itself per write, devices and sockets left out: `cargo test --release -p
//! riopipe-session --test target_steady_state -- --ignored --nocapture`

mod world;

use riopipe_testkit::{Counting, NullDrive, allocations, peer};

use peer::Digests;
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::block_device::{BlockDevice, Done};
use riopipe_order::log_region::{HEADER_BYTES, LogKind, LogRegion};
use riopipe_order::region::MemRegion;
use riopipe_session::outbox::Outbox;
use riopipe_session::target::{
    ConnId, Event, NamespaceConfig, Namespaces, OpId, Shared, Split, TargetConn, TargetEnv, Volumes,
};
use riopipe_session::wire;
use world::{BOOT, LOG_LEN, VOLUME, attribute, block, crc, ordered, riopipe_bytes};

#[global_allocator]
static COUNTING: Counting = Counting;

struct Sink {
    shared: Shared<MemRegion>,
    drive: NullDrive,
}

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
        &mut self.drive
    }
    fn with_shared<T>(&mut self, f: impl FnOnce(&mut Shared<MemRegion>) -> T) -> T {
        f(&mut self.shared)
    }
    fn notify(&mut self, _: ConnId) {}
    fn log(&mut self, _: Event<'_>) {}
}

struct Link(TargetConn<Sink>, Outbox<Vec<u8>>);

impl Link {
    fn send(&mut self, host: &mut Sink, bytes: &[u8]) {
        assert_eq!(self.0.receive(bytes, host, &mut self.1).unwrap(), bytes.len());
    }
    fn command(&mut self, host: &mut Sink, sqe: peer::Sqe, data: &[u8]) {
        self.send(host, &peer::capsule(Digests::default(), &sqe.0, data));
    }
}

fn connect(host: &mut Sink, id: u64, qid: u16, cntlid: u16) -> Link {
    let mut link = Link(TargetConn::new(ConnId(id), id, crc, 0), Outbox::new());
    link.send(host, &peer::icreq(Digests::default(), 0));
    let data = peer::connect_data(world::SUBNQN, peer::HOSTNQN, peer::HOSTID, cntlid);
    let entries = if qid == 0 { 31 } else { 200 };
    link.command(host, peer::connect(0, qid, entries, 0), &data);
    link
}

/// A connection to one namespace; bound to a stream if `is_ordered`.
fn warm(is_ordered: bool) -> (Sink, Link) {
    let header = MemRegion::new(HEADER_BYTES);
    let region = LogRegion::create(header, LOG_LEN, [3; 16], BOOT, LogKind::Dax, crc).unwrap();
    let split: Split<MemRegion> = Box::new(|range| Ok(MemRegion::new(range.len())));
    let (volumes, _) = Volumes::with_log(region, split, crc);
    let ns = NamespaceConfig {
        nsid: 1,
        blocks: 10_000,
        lba_size: Default::default(),
        ana_group: 1,
        nguid: [0; 16],
        uuid: [1; 16],
        volatile: false,
        order: riopipe_order::write_order::DriveOrder::None,
    };
    let namespaces = Namespaces::new(vec![ns]).unwrap();
    let shared = Shared::new(world::identity(), namespaces, volumes, world::NOW);
    let mut host = Sink { shared, drive: NullDrive::with_space(1024) };
    let claim = wire::Claim {
        create: true,
        slots: 4096,
        ..wire::Claim::plain(VOLUME, 1, 1, wire::in_order([1]))
    };
    let mut admin = connect(&mut host, 1, 0, 0xffff);
    admin.command(&mut host, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
    let sqe = riopipe_bytes(&wire::claim_command()).cid(50).inline(4096);
    admin.command(&mut host, sqe, &claim.encode());
    let mut io = connect(&mut host, 2, 1, 1);
    if is_ordered {
        let sqe = wire::bind_command(VOLUME, StreamId(0), 1, Seq(0));
        io.command(&mut host, riopipe_bytes(&sqe).cid(1), &[]);
    }
    io.1.clear();
    (host, io)
}

/// 32 writes in a row, the first of them the `from`th.
fn batch(is_ordered: bool, from: u64, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (cid, seq) in (0..32).zip(from..) {
        let lba = seq * 37 % 9000;
        let sqe = if is_ordered {
            ordered(cid, &attribute(seq, lba), seq.saturating_sub(33))
        } else {
            peer::write(cid, 1, lba, 1)
        };
        bytes.extend(peer::capsule(Digests::default(), &sqe.0, data));
    }
    bytes
}

#[test]
fn a_warm_connection_allocates_nothing() {
    let data = block(1);
    for (is_ordered, holds) in [(false, false), (false, true), (true, false), (true, true)] {
        let (mut host, mut io) = warm(is_ordered);
        host.drive.holds = holds;
        let mut done = Vec::with_capacity(1024);
        for round in 0..200u64 {
            let bytes = batch(is_ordered, 1 + round * 32, &data);
            let before = allocations();
            io.send(&mut host, &bytes);
            host.drive.poll(1, &mut done);
            for Done { op, result } in done.drain(..) {
                io.0.device_done(OpId(op), result, &mut host, &mut io.1);
            }
            io.0.batch_ended(&mut host, &mut io.1);
            assert_eq!(io.1.len_bytes(), 32 * 24);
            io.1.consume(32 * 24);
            let allocated = allocations() - before;
            assert!(
                round < 3 || allocated == 0,
                "{allocated} allocations in round {round}; ordered: {is_ordered}, later: {holds}"
            );
        }
    }
}
