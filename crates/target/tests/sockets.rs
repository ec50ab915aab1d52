//! A running target on real sockets, talked to by the scripted host.

#[path = "../../session/tests/peer/mod.rs"]
mod peer;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use peer::{CC_ENABLE, Completion, Digests, HOSTID, HOSTNQN, Received, Sqe};
use riopipe_target::{Config, Running, Target};

/// Longer than anything here can take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// A queue of the scripted host.
struct Queue {
    stream: TcpStream,
    digests: Digests,
    input: Vec<u8>,
}

impl Queue {
    fn open(address: SocketAddr, digests: Digests) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut queue = Self { stream, digests: Digests::default(), input: Vec::new() };
        queue.send(&peer::icreq(digests, 0));
        let icresp = queue.next().expect("an ICResp");
        assert_eq!(icresp.kind, 0x01);
        assert_eq!(icresp.header[11], u8::from(digests.header) | u8::from(digests.data) << 1);
        queue.digests = digests;
        queue
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    fn command(&mut self, sqe: Sqe, data: &[u8]) {
        let bytes = peer::capsule(self.digests, &sqe.0, data);
        self.send(&bytes);
    }

    /// The next PDU; `None` when the target has closed.
    fn next(&mut self) -> Option<Received> {
        loop {
            if let Some(pdu) = peer::parse(&mut self.input, self.digests, 0) {
                return Some(pdu);
            }
            let mut buf = [0; 65536];
            match self.stream.read(&mut buf) {
                Ok(0) => return None,
                Ok(n) => self.input.extend_from_slice(&buf[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(e) => panic!("{e}"),
            }
        }
    }

    fn call(&mut self, sqe: Sqe, data: &[u8]) -> Completion {
        self.command(sqe, data);
        self.next().expect("an answer").completion()
    }

    /// A command that brings data.
    fn fetch(&mut self, sqe: Sqe) -> (Vec<u8>, Completion) {
        self.command(sqe, &[]);
        let data = self.next().expect("data");
        assert_eq!(data.kind, 0x07, "{data:?}");
        (data.data, self.next().expect("an answer").completion())
    }

    fn admin(target: &Running, digests: Digests) -> (Self, u16) {
        let mut queue = Self::open(target.addresses()[0], digests);
        let data = peer::connect_data(target.subnqn(), HOSTNQN, HOSTID, 0xffff);
        let connected = queue.call(peer::connect(0, 0, 31, 0), &data);
        assert_eq!(connected.status, 0, "{connected:?}");
        assert_eq!(queue.call(peer::property_set(1, 0x14, CC_ENABLE), &[]).status, 0);
        assert_eq!(queue.call(peer::property_get(2, 0x1c, false), &[]).result & 1, 1);
        (queue, connected.result as u16)
    }

    fn io(target: &Running, digests: Digests, cntlid: u16, qid: u16) -> Self {
        let mut queue = Self::open(target.addresses()[0], digests);
        let data = peer::connect_data(target.subnqn(), HOSTNQN, HOSTID, cntlid);
        assert_eq!(queue.call(peer::connect(0, qid, 127, 0), &data).status, 0);
        queue
    }
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31) ^ seed ^ (i >> 8) as u8).collect()
}

#[test]
fn writes_are_read_back_with_and_without_digests() {
    let target = Target::start(&Config::on_loopback(&["mem:64M"])).unwrap();
    for (header, data) in [(false, false), (true, false), (true, true)] {
        let digests = Digests { header, data };
        let (_admin, cntlid) = Queue::admin(&target, digests);
        let mut io = Queue::io(&target, digests, cntlid, 1);
        // In the capsule.
        let bytes = pattern(1, 4096);
        assert_eq!(io.call(peer::write(1, 1, 7, 1), &bytes).status, 0);
        let (read, done) = io.fetch(peer::read(2, 1, 7, 1));
        assert_eq!(done.status, 0);
        assert!(read == bytes);
        // On request, in two pieces.
        let bytes = pattern(2, 200 * 1024);
        io.command(peer::write_r2t(3, 1, 100, 50), &[]);
        let r2t = io.next().unwrap();
        assert_eq!((r2t.kind, r2t.u16(8), r2t.u32(12), r2t.u32(16)), (0x09, 3, 0, 200 * 1024));
        let (one, two) = bytes.split_at(128 * 1024);
        io.send(&peer::h2c_data(digests, 3, r2t.u16(10), 0, one, false));
        io.send(&peer::h2c_data(digests, 3, r2t.u16(10), one.len() as u32, two, true));
        assert_eq!(io.next().unwrap().completion().status, 0);
        let (read, _) = io.fetch(peer::read(4, 1, 100, 50));
        assert!(read == bytes);
    }
    target.stop().unwrap();
}
