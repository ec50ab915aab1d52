//! A scripted host on real sockets.
#![allow(dead_code, reason = "each test file uses what it needs")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use riopipe_target::Running;
use riopipe_testkit::peer::{self, CC_ENABLE, Completion, Digests, HOSTID, HOSTNQN, Received, Sqe};

/// Longer than anything here can take on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// A queue of the scripted host.
pub(crate) struct Queue {
    pub(crate) stream: TcpStream,
    digests: Digests,
    input: Vec<u8>,
}

impl Queue {
    pub(crate) fn open(address: SocketAddr, digests: Digests) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut queue = Self { stream, digests: Digests::default(), input: Vec::new() };
        queue.send(&peer::icreq(digests, 0));
        let icresp = queue.next().expect("an ICResp");
        assert_eq!(icresp.kind, 0x01);
        assert_eq!(icresp.header[11], u8::from(digests.header) | u8::from(digests.data) << 1);
        queue.digests = digests;
        queue
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub(crate) fn command(&mut self, sqe: Sqe, data: &[u8]) {
        let bytes = peer::capsule(self.digests, &sqe.0, data);
        self.send(&bytes);
    }

    /// The next PDU; `None` when the target has closed.
    pub(crate) fn next(&mut self) -> Option<Received> {
        loop {
            if let Some(pdu) = peer::parse(&mut self.input, self.digests, 0) {
                return Some(pdu);
            }
            let mut buf = [0; 65536];
            match self.stream.read(&mut buf) {
                Ok(0) => return None,
                Ok(n) => self.input.extend_from_slice(&buf[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return None,
                // The io_uring of this thread may interrupt the call.
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => panic!("{e}"),
            }
        }
    }

    pub(crate) fn call(&mut self, sqe: Sqe, data: &[u8]) -> Completion {
        self.command(sqe, data);
        self.next().expect("an answer").completion()
    }

    /// A command that returns data.
    pub(crate) fn fetch(&mut self, sqe: Sqe) -> (Vec<u8>, Completion) {
        self.command(sqe, &[]);
        let data = self.next().expect("data");
        assert_eq!(data.kind, 0x07, "{data:?}");
        (data.data, self.next().expect("an answer").completion())
    }

    pub(crate) fn admin(target: &Running, digests: Digests) -> (Self, u16) {
        Self::enabled(target, Self::open(target.addresses()[0], digests))
    }

    /// The admin queue of a controller at this address.
    pub(crate) fn admin_at(target: &Running, address: SocketAddr) -> (Self, u16) {
        Self::enabled(target, Self::open(address, Digests::default()))
    }

    fn enabled(target: &Running, mut queue: Self) -> (Self, u16) {
        let data = peer::connect_data(target.subnqn(), HOSTNQN, HOSTID, 0xffff);
        let connected = queue.call(peer::connect(0, 0, 31, 0), &data);
        assert_eq!(connected.status, 0, "{connected:?}");
        assert_eq!(queue.call(peer::property_set(1, 0x14, CC_ENABLE), &[]).status, 0);
        assert_eq!(queue.call(peer::property_get(2, 0x1c, false), &[]).result & 1, 1);
        (queue, connected.result as u16)
    }

    pub(crate) fn io(target: &Running, digests: Digests, cntlid: u16, qid: u16) -> Self {
        Self::connected(target, Self::open(target.addresses()[0], digests), cntlid, qid)
    }

    /// An I/O queue at this address.
    pub(crate) fn io_at(target: &Running, address: SocketAddr, cntlid: u16, qid: u16) -> Self {
        Self::connected(target, Self::open(address, Digests::default()), cntlid, qid)
    }

    fn connected(target: &Running, mut queue: Self, cntlid: u16, qid: u16) -> Self {
        let data = peer::connect_data(target.subnqn(), HOSTNQN, HOSTID, cntlid);
        assert_eq!(queue.call(peer::connect(0, qid, 127, 0), &data).status, 0);
        queue
    }
}

pub(crate) fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31) ^ seed ^ (i >> 8) as u8).collect()
}

/// Waits for a condition that becomes true soon, if ever.
pub(crate) fn wait_until(mut condition: impl FnMut() -> bool, what: &str) {
    let give_up = std::time::Instant::now() + TIMEOUT;
    while !condition() {
        assert!(std::time::Instant::now() < give_up, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
