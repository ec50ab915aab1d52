//! Once warm, an engine allocates nothing per request, although it keeps every request until it is
//! released. Tested with and without volatile caches, merged and not, with flushes asked for and
//! put in.

use riopipe_order::engine::{Engine, EngineKind, Limits, Op, Payload, Place, Write, engine};
use riopipe_order::topology::{MemberInfo, ServerInfo, Topology};
use riopipe_testkit::Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

#[derive(Clone, Debug)]
struct Bytes;

impl Payload for Bytes {
    fn part(&self, _: u32, _: u32) -> Self {
        Self
    }
}

/// The most allocations in one of the warm rounds. A round has 64 attempts to submit.
fn allocations(kind: EngineKind, volatile: bool, merge: bool, flush_every: u64) -> u64 {
    let member =
        |server| MemberInfo { server, start: 8, blocks: 1 << 16, request_blocks_max: 32, volatile };
    let servers = vec![ServerInfo { slots: 100 }; 2];
    let topology = Topology::new(vec![member(0), member(1)], servers, 16).unwrap();
    let limits = Limits { merge, kept_bytes_max: 150 * 4096, ..Limits::default() };
    let mut engine: Box<dyn Engine<Bytes>> = engine(kind, topology, limits);
    let mut out = Vec::with_capacity(1 << 12);
    let mut most = 0;
    let mut admitted = 0;
    for round in 0..200 {
        let before = riopipe_testkit::allocations();
        for step in 0..64 {
            let op = |place| Op::Write(place, Bytes);
            let lba = admitted * 3 % 60_000;
            let mut group = [
                Write { lba, blocks: 1, op: op(Place::Fresh) },
                Write { lba: lba + 20, blocks: 1, op: op(Place::InPlace) },
            ];
            let writes = 1 + admitted as usize % 2;
            let durable = flush_every > 0 && admitted % flush_every == 0;
            admitted += u64::from(engine.admit(&mut group[..writes], 0, durable).is_ok());
            for server in 0..2 * engine.queues_per_server() {
                // Leaves something in the queues to be merged with.
                while step % 3 == 0
                    && let Some(dispatch) = engine.next_request(server)
                {
                    out.push(dispatch.id);
                }
            }
            if out.len() > 20 || step == 63 {
                for id in out.drain(..) {
                    engine.on_request_done(id, Ok(()));
                }
                engine.poll();
            }
        }
        if round >= 100 {
            most = most.max(riopipe_testkit::allocations() - before);
        }
    }
    assert!(admitted > 150, "{kind}: {admitted} groups");
    most
}

#[test]
fn nothing_is_allocated_per_request() {
    let before = riopipe_testkit::allocations();
    drop(std::hint::black_box(Box::new(1)));
    assert!(riopipe_testkit::allocations() > before, "the counter counts");
    for kind in EngineKind::ALL {
        for volatile in [false, true] {
            for merge in [false, true] {
                for flush_every in [0, 17] {
                    let count = allocations(kind, volatile, merge, flush_every);
                    assert_eq!(count, 0, "{kind}, {volatile}, {merge}, {flush_every}");
                }
            }
        }
    }
}
