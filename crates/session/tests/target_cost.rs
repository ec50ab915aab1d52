//! Not a test: what the session itself costs per write, devices and sockets left out.
//! `cargo test --release -p riopipe-session --test target_cost -- --ignored --nocapture`

mod peer;
mod world;

use std::time::Instant;

use peer::Digests;
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::log_region::{HEADER_BYTES, LogKind, LogRegion};
use riopipe_order::region::MemRegion;
use riopipe_session::outbox::Outbox;
use riopipe_session::target::{
    ConnId, DeviceError, Event, Host, NamespaceConfig, Namespaces, OpId, Shared, Split, Submitted,
    TargetConn, Volumes, WriteData,
};
use riopipe_session::wire;
use world::{BOOT, LOG_LEN, VOLUME, attribute, block, crc, ordered, riopipe_bytes};

/// A host whose drives take everything at once and keep nothing.
struct Sink(Shared<MemRegion>);

impl Host for Sink {
    type Buf = Vec<u8>;
    type Region = MemRegion;
    fn now(&self) -> u64 {
        1
    }
    fn alloc(&mut self, len: usize) -> Option<Vec<u8>> {
        Some(vec![0; len])
    }
    fn write(
        &mut self,
        _: usize,
        _: OpId,
        _: u64,
        _: WriteData<'_, Vec<u8>>,
    ) -> Submitted<Vec<u8>> {
        Submitted::Done(Ok(None))
    }
    fn read(&mut self, _: usize, _: OpId, _: u64, _: u32) -> Submitted<Vec<u8>> {
        Submitted::Done(Err(DeviceError::Failed))
    }
    fn flush(&mut self, _: usize, _: OpId) -> Submitted<Vec<u8>> {
        Submitted::Done(Ok(None))
    }
    fn zero(&mut self, _: usize, _: OpId, _: u64, _: u64, _: bool) -> Submitted<Vec<u8>> {
        Submitted::Done(Ok(None))
    }
    fn with_shared<T>(&mut self, f: impl FnOnce(&mut Shared<MemRegion>) -> T) -> T {
        f(&mut self.0)
    }
    fn notify(&mut self, _: ConnId) {}
    fn log(&mut self, _: Event<'_>) {}
}

struct Link(TargetConn<Sink>, Outbox<Vec<u8>>);

impl Link {
    fn say(&mut self, host: &mut Sink, bytes: &[u8]) {
        assert_eq!(self.0.receive(bytes, host, &mut self.1).unwrap(), bytes.len());
    }
    fn command(&mut self, host: &mut Sink, sqe: peer::Sqe, data: &[u8]) {
        self.say(host, &peer::capsule(Digests::default(), &sqe.0, data));
    }
}

fn connect(host: &mut Sink, id: u64, qid: u16, cntlid: u16) -> Link {
    let mut link = Link(TargetConn::new(ConnId(id), id, crc, 0), Outbox::new());
    link.say(host, &peer::icreq(Digests::default(), 0));
    let data = peer::connect_data(world::SUBNQN, peer::HOSTNQN, peer::HOSTID, cntlid);
    let entries = if qid == 0 { 31 } else { 200 };
    link.command(host, peer::connect(0, qid, entries, 0), &data);
    link
}

#[test]
#[ignore = "a measurement"]
fn cost_per_write() {
    let header = MemRegion::new(HEADER_BYTES);
    let region = LogRegion::create(header, LOG_LEN, [3; 16], BOOT, LogKind::Dax, crc).unwrap();
    let split: Split<MemRegion> = Box::new(|range| Ok(MemRegion::new(range.len())));
    let (volumes, _) = Volumes::with_log(region, split, crc);
    let ns =
        NamespaceConfig { nsid: 1, blocks: 10_000, nguid: [0; 16], uuid: [1; 16], volatile: false };
    let namespaces = Namespaces::new(vec![ns]).unwrap();
    let mut host = Sink(Shared::new(world::identity(), namespaces, volumes));
    let claim = wire::Claim {
        volume: VOLUME,
        generation: 1,
        create: true,
        take_over: false,
        unlogged: false,
        streams: 1,
        slots: 4096,
        namespaces: vec![1],
    };
    let mut admin = connect(&mut host, 1, 0, 0xffff);
    admin.command(&mut host, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
    let sqe = riopipe_bytes(&wire::claim_command()).cid(50).inline(4096);
    admin.command(&mut host, sqe, &claim.encode());
    for (what, is_ordered) in [("plain", false), ("ordered", true)] {
        let mut io =
            connect(&mut host, if is_ordered { 3 } else { 2 }, if is_ordered { 2 } else { 1 }, 1);
        if is_ordered {
            let sqe = wire::bind_command(VOLUME, StreamId(0), 1, Seq(0));
            io.command(&mut host, riopipe_bytes(&sqe).cid(1), &[]);
        }
        io.1.clear();
        let data = block(1);
        let mut seq = 0;
        let mut best = f64::MAX;
        for _ in 0..2000 {
            let mut batch = Vec::new();
            for i in 0..32u16 {
                seq += 1;
                let lba = seq * 37 % 9000;
                let sqe = if is_ordered {
                    ordered(i, &attribute(seq, lba), seq.saturating_sub(33))
                } else {
                    peer::write(i, 1, lba, 1)
                };
                batch.extend(peer::capsule(Digests::default(), &sqe.0, &data));
            }
            let start = Instant::now();
            io.say(&mut host, &batch);
            best = best.min(start.elapsed().as_nanos() as f64 / 32.0);
            assert_eq!(io.1.len_bytes(), 32 * 24);
            io.1.clear();
        }
        println!("{what}: {best:.1} ns per write");
    }
}
