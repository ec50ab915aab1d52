//! Not a test: what the target costs, without an initiator of any weight.
//! `cargo test --release -p riopipe-target --test speed -- --ignored --nocapture`

#[path = "../../session/tests/peer/mod.rs"]
mod peer;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use peer::{CC_ENABLE, Digests, HOSTID, HOSTNQN};
use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq, StreamId, VolumeId};
use riopipe_session::wire;
use riopipe_target::{Config, Running, Target};

const VOLUME: VolumeId = VolumeId([7; 16]);

fn open(target: &Running, qid: u16, cntlid: u16, entries: u16) -> (TcpStream, u16) {
    let mut stream = TcpStream::connect(target.addresses()[0]).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.write_all(&peer::icreq(Digests::default(), 0)).unwrap();
    let mut icresp = [0; 128];
    stream.read_exact(&mut icresp).unwrap();
    let data = peer::connect_data(target.subnqn(), HOSTNQN, HOSTID, cntlid);
    let cqe = call(&mut stream, peer::connect(0, qid, entries - 1, 0).0, &data);
    (stream, u16::from_le_bytes([cqe[0], cqe[1]]))
}

fn call(stream: &mut TcpStream, sqe: [u8; 64], data: &[u8]) -> [u8; 16] {
    stream.write_all(&peer::capsule(Digests::default(), &sqe, data)).unwrap();
    let mut answer = [0; 24];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(u16::from_le_bytes([answer[22], answer[23]]) >> 1, 0, "{answer:x?}");
    answer[8..].try_into().unwrap()
}

/// Writes of 4 KiB at random blocks, `depth` outstanding; per second.
fn run(stream: &mut TcpStream, depth: usize, ordered: bool, seq: &mut u64, time: Duration) -> f64 {
    const BLOCKS: u64 = 200_000;
    let message = 72 + 4096;
    let mut out = vec![0x5au8; message * depth];
    let mut input = vec![0u8; 1 << 20];
    let (mut have, mut credit, mut done) = (0, depth, 0u64);
    let mut cid = 0u16;
    let mut random = 12345u64;
    let mut released = *seq;
    let start = Instant::now();
    while start.elapsed() < time || credit < depth {
        let stop = start.elapsed() >= time;
        let count = if stop { 0 } else { credit };
        for slot in 0..count {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let lba = (random >> 33) % BLOCKS;
            cid = (cid + 1) % 4096;
            let mut sqe = peer::write(cid, 1, lba, 1);
            if ordered {
                *seq += 1;
                let a = Attribute {
                    seq: Seq(*seq),
                    span: 1,
                    num: 1,
                    index: 0,
                    ordinal: *seq as u32,
                    member: Member(0),
                    kind: Kind::Write,
                    flags: Flags::BOUNDARY,
                    lba,
                    blocks: 1,
                    tag: 0,
                };
                let mut rio = riopipe_nvme::command::Sqe(sqe.0);
                wire::put_attribute(&mut rio, &a, Seq(released));
                sqe.0 = rio.0;
            }
            let p = &mut out[slot * message..];
            p[..8].copy_from_slice(&[0x04, 0, 72, 72, 0x48, 0x10, 0, 0]);
            p[8..72].copy_from_slice(&sqe.0);
        }
        if count > 0 {
            let mut rest = &out[..count * message];
            while !rest.is_empty() {
                match stream.write(rest) {
                    Ok(n) => rest = &rest[n..],
                    Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                    Err(e) => panic!("{e}"),
                }
            }
            credit -= count;
        }
        // Spin: this side must not sleep.
        let n = loop {
            match stream.read(&mut input[have..]) {
                Ok(n) => break n,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(e) => panic!("{e}"),
            }
        };
        assert!(n > 0);
        have += n;
        let whole = have / 24;
        for i in 0..whole {
            let status = u16::from_le_bytes([input[24 * i + 22], input[24 * i + 23]]) >> 1;
            assert_eq!(status, 0, "status {status:#x} after {done}");
        }
        input.copy_within(whole * 24..have, 0);
        have -= whole * 24;
        credit += whole;
        done += whole as u64;
        released += whole as u64;
    }
    done as f64 / start.elapsed().as_secs_f64()
}

#[test]
#[ignore = "a measurement"]
fn writes_per_second() {
    let dir = std::path::Path::new("/dev/shm/rio-speed-log");
    let _ = std::fs::remove_file(dir);
    for log in ["file", "dax"] {
        let _ = std::fs::remove_file(dir);
        let config = Config {
            log: Some(format!("{log}:{},size=2M", dir.display())),
            reactors: Some(1),
            cores: vec![0],
            ..Config::on_loopback(&["mem:1G"])
        };
        let target = Target::start(&config).unwrap();
        riopipe_net::pin_to_core(1).unwrap();
        let (mut admin, cntlid) = open(&target, 0, 0xffff, 32);
        call(&mut admin, peer::property_set(1, 0x14, CC_ENABLE).0, &[]);
        let claim = wire::Claim {
            volume: VOLUME,
            generation: 1,
            create: true,
            take_over: false,
            unlogged: false,
            streams: 1,
            slots: 16384,
            members: wire::in_order([1]),
        };
        let sqe = peer::Sqe(wire::claim_command().0).inline(4096);
        call(&mut admin, sqe.0, &claim.encode());
        let (mut plain, _) = open(&target, 1, cntlid, 200);
        let (mut ordered, _) = open(&target, 2, cntlid, 200);
        call(&mut ordered, wire::bind_command(VOLUME, StreamId(0), 1, Seq(0)).0, &[]);
        // This side never sleeps.
        plain.set_nonblocking(true).unwrap();
        ordered.set_nonblocking(true).unwrap();
        let mut seq = 0;
        for depth in [1usize, 32, 128] {
            let (mut a, mut b) = (Vec::new(), Vec::new());
            for _ in 0..5 {
                let mut none = 0;
                a.push(run(&mut plain, depth, false, &mut none, Duration::from_millis(300)));
                b.push(run(&mut ordered, depth, true, &mut seq, Duration::from_millis(300)));
            }
            a.sort_by(f64::total_cmp);
            b.sort_by(f64::total_cmp);
            println!(
                "log {log} QD {depth}: plain {:.0} k/s, ordered {:.0} k/s ({:.3})",
                a[2] / 1e3,
                b[2] / 1e3,
                b[2] / a[2]
            );
        }
        drop((admin, plain, ordered));
        target.stop().unwrap();
    }
    let _ = std::fs::remove_file(dir);
}
