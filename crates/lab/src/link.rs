//! A modelled link: bytes that pass through it arrive later, in order.
//!
//! Loopback answers in a few microseconds, which no network does. So a relay, one thread in user
//! space, stands between initiator and target. It receives the bytes of each connection, holds each
//! piece until its arrival in the model, and sends it on:
//!
//! ```text
//! departs = max(now, the link is free) + bytes / bandwidth      each direction for itself
//! arrives = max(departs + rtt/2 ± jitter/2, the piece before it on this connection)
//! ```
//!
//! All connections through one link share its bandwidth, as they would share a network card.
//! Nothing is lost: TCP would repeat it, and the effect above TCP is jitter.
//!
//! **Its cost.** Each byte is received and sent once more, on a core that initiator and target
//! could use. When the next arrival is near, the relay polls instead of sleeping, unless another
//! thread needs its core. On a machine with fewer than three cores it takes its time from both
//! sides. So figures through a link (also those of the [`floor`](crate::floor), which uses the same
//! link) are only comparable with one another. It also cannot be more punctual than the scheduler.

use std::{
    collections::VecDeque,
    fmt,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use riopipe_net::{
    AdaptiveSpin, ConnectError, IdleStep, Interest, ListenError, Listener, Poller, PollerError,
    Received, Socket, SocketOptions, SpinPolicy, connect, now_ns,
};
use riopipe_platform::fine_timers;

use crate::permutation::mix;

/// The listener's token; connections have twice their index, and one more for the far side.
const LISTENER: u64 = u64::MAX - 1;
/// Longest sleep before the end of the link is checked, in ns.
const SLEEP_MAX_NS: u64 = 20_000_000;
/// A sleep ends late by about this time (ns), so the rest before an arrival is polled.
const AWAKE_NS: u64 = 60_000;
/// Largest receive in bytes: a piece arrives as a whole, so large pieces would distort the model.
const PIECE_BYTES: usize = 64 << 10;
/// Most bytes held in one direction of a connection; beyond that its sender has to wait.
const HELD_BYTES_MAX: usize = 256 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The properties of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkModel {
    /// Round-trip time of a piece without length, in ns.
    pub rtt_ns: u64,
    /// Largest deviation of a round trip, in ns.
    pub jitter_ns: u64,
    /// Bandwidth in each direction, in bits per second; 0: no limit.
    pub bits_per_s: u64,
}

impl LinkModel {
    /// Whether the link has no effect at all.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// Time for which `bytes` occupy the link, in ns.
    fn occupies_ns(&self, bytes: usize) -> u64 {
        if self.bits_per_s == 0 {
            return 0;
        }
        let ns = bytes as u128 * 8 * 1_000_000_000 / u128::from(self.bits_per_s);
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    /// One-way delay of the `n`-th piece, in ns.
    fn piece_delay_ns(&self, n: u64) -> u64 {
        let early = self.rtt_ns.saturating_sub(self.jitter_ns) / 2;
        // Jitter beyond the round trip can only make it longer.
        let late = (self.rtt_ns + self.jitter_ns) / 2;
        early + mix(n) % (late - early + 1)
    }
}

impl fmt::Display for LinkModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = |ns: u64| crate::units::time(ns as f64);
        write!(f, "round trip {}, jitter {}", us(self.rtt_ns), us(self.jitter_ns))?;
        match self.bits_per_s {
            0 => Ok(()),
            bits => write!(f, ", {}bit/s", crate::units::count(bits as f64)),
        }
    }
}

/// The reason why a link could not be started.
#[derive(Debug, thiserror::Error)]
pub enum LinkStartError {
    /// There is no port to listen on.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// No descriptors are left.
    #[error(transparent)]
    Poller(#[from] PollerError),
    /// No thread could be started.
    #[error("can't start the link's thread: {0}")]
    Thread(std::io::Error),
}

/// A running link to one address. Dropping it cuts all of its connections.
#[derive(Debug)]
pub struct Link {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Link {
    /// Starts a link to `far`.
    ///
    /// # Errors
    /// [`LinkStartError`].
    pub fn start(model: LinkModel, far: SocketAddr) -> Result<Self, LinkStartError> {
        let listener = Listener::bind("127.0.0.1:0")?;
        let address = listener.local_addr();
        let poller = Poller::new()?;
        poller.add(&listener, LISTENER, Interest::Read)?;
        let stop = Arc::new(AtomicBool::new(false));
        let relay = Relay {
            model,
            far,
            listener,
            poller,
            pairs: Vec::new(),
            wires: [Wire::default(), Wire::default()],
            buffer: vec![0; PIECE_BYTES],
        };
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("link".to_owned())
            .spawn(move || relay.run(&stopped))
            .map_err(LinkStartError::Thread)?;
        Ok(Self { address, stop, thread: Some(thread) })
    }

    /// Address of its near end, to connect to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed; the connections are gone in any case.
            let _ = thread.join();
        }
    }
}

/// One direction of the link, shared by its connections.
#[derive(Debug, Default)]
struct Wire {
    /// Time at which it has sent all of its bytes, in ns.
    free_at: u64,
    /// Number of pieces so far.
    pieces: u64,
}

impl Wire {
    /// The arrival of a piece received at `now`, without regard to its connection's order.
    fn arrival(&mut self, model: &LinkModel, now: u64, bytes: usize) -> u64 {
        self.free_at = now.max(self.free_at).saturating_add(model.occupies_ns(bytes));
        self.pieces += 1;
        self.free_at.saturating_add(model.piece_delay_ns(self.pieces))
    }
}

/// One direction of one connection.
#[derive(Debug, Default)]
struct Flow {
    /// Arrival time and bytes of each piece.
    pieces: VecDeque<(u64, Vec<u8>)>,
    /// Bytes of the first piece that are already sent on.
    sent: usize,
    held_bytes: usize,
    last_arrival: u64,
    /// The sender has closed its direction.
    ended: bool,
}

impl Flow {
    fn take(&mut self, arrival: u64, bytes: &[u8]) {
        // TCP delivers bytes in order: a piece that would overtake another waits.
        self.last_arrival = self.last_arrival.max(arrival);
        self.pieces.push_back((self.last_arrival, bytes.to_vec()));
        self.held_bytes += bytes.len();
    }

    /// Sends on the pieces that have arrived at `now`; returns whether there were any.
    fn pass_on(&mut self, now: u64, to: &Socket) -> Result<bool, ()> {
        let arrived = self.pieces.iter().take_while(|(arrival, _)| *arrival <= now);
        let mut skip = self.sent;
        let slices = arrived.map(|(_, bytes)| &bytes[std::mem::take(&mut skip)..]);
        let mut sent = to.send(slices).map_err(|_| ())?;
        let any = sent > 0;
        self.held_bytes -= sent;
        sent += self.sent;
        while let Some((_, bytes)) = self.pieces.front().filter(|(_, bytes)| bytes.len() <= sent) {
            sent -= bytes.len();
            self.pieces.pop_front();
        }
        self.sent = sent;
        Ok(any)
    }
}

/// A connection: the near and the far socket, and the bytes in transit in both directions.
#[derive(Debug)]
struct Pair {
    sockets: [Socket; 2],
    flows: [Flow; 2],
    /// The end of the sender was passed on.
    end_passed_on: [bool; 2],
}

struct Relay {
    model: LinkModel,
    far: SocketAddr,
    listener: Listener,
    poller: Poller,
    /// An ended pair leaves a gap: tokens are indices.
    pairs: Vec<Option<Pair>>,
    /// Both directions.
    wires: [Wire; 2],
    buffer: Vec<u8>,
}

impl Relay {
    fn run(mut self, stop: &AtomicBool) {
        fine_timers();
        let mut events = Vec::new();
        // It sleeps if another thread needs the core: a poll after a yield would be late.
        let mut spin = AdaptiveSpin::new(SpinPolicy { spin_ns: 2 * AWAKE_NS, steady: false });
        while !stop.load(Ordering::Relaxed) {
            let mut worked = self.accept();
            for place in 0..self.pairs.len() {
                if let Some(mut pair) = self.pairs[place].take() {
                    // A broken connection ends here: both ends notice the closing of their sockets.
                    if let Ok(any) = self.turn(&mut pair) {
                        worked |= any;
                        self.pairs[place] = Some(pair);
                    }
                }
            }
            if worked {
                spin.on_work();
                continue;
            }
            let now = now_ns();
            let mut wait_ns = self.next_arrival().map_or(SLEEP_MAX_NS, |at| at.saturating_sub(now));
            if wait_ns > AWAKE_NS {
                wait_ns -= AWAKE_NS;
            } else if spin.on_idle(now) == IdleStep::Poll {
                spin.relax();
                continue;
            }
            let wait_ns = wait_ns.min(SLEEP_MAX_NS);
            if self.poller.wait(&mut events, Some(Duration::from_nanos(wait_ns))).is_err() {
                return;
            }
        }
    }

    /// Accepts new connections; returns whether there were any. One that the far side refuses is
    /// closed.
    fn accept(&mut self) -> bool {
        let mut any = false;
        while let Ok(Some(near)) = self.listener.accept() {
            any = true;
            if let Ok(pair) = self.join(near) {
                self.pairs.push(Some(pair));
            }
        }
        any
    }

    fn join(&self, near: Socket) -> Result<Pair, ConnectError> {
        let far = connect(&self.far.to_string(), CONNECT_TIMEOUT, &SocketOptions::default())?;
        let token = 2 * self.pairs.len() as u64;
        for (socket, token) in [(&near, token), (&far, token + 1)] {
            // Without it the pair is only checked now and then, which is harmless.
            let _ = self.poller.add(socket, token, Interest::Read);
        }
        Ok(Pair { sockets: [near, far], flows: Default::default(), end_passed_on: [false; 2] })
    }

    /// Moves the bytes of one connection; returns whether there were any.
    fn turn(&mut self, pair: &mut Pair) -> Result<bool, ()> {
        let mut worked = false;
        for (side, wire) in self.wires.iter_mut().enumerate() {
            let (from, to) = (&pair.sockets[side], &pair.sockets[1 - side]);
            let flow = &mut pair.flows[side];
            if !flow.ended && flow.held_bytes < HELD_BYTES_MAX {
                match from.recv(&mut self.buffer).map_err(|_| ())? {
                    Received::Bytes(n) => {
                        let arrival = wire.arrival(&self.model, now_ns(), n);
                        flow.take(arrival, &self.buffer[..n]);
                        worked = true;
                    }
                    Received::WouldBlock => {}
                    Received::Closed => {
                        flow.ended = true;
                        // Readable for ever from now on, so it must not wake the poller.
                        let _ = self.poller.remove(from);
                    }
                }
            }
            worked |= flow.pass_on(now_ns(), to)?;
            if flow.ended && flow.pieces.is_empty() && !pair.end_passed_on[side] {
                to.finish_sending();
                pair.end_passed_on[side] = true;
            }
        }
        if pair.end_passed_on == [true; 2] { Err(()) } else { Ok(worked) }
    }

    fn next_arrival(&self) -> Option<u64> {
        let flows = self.pairs.iter().flatten().flat_map(|pair| &pair.flows);
        flows.filter_map(|flow| flow.pieces.front()).map(|(arrival, _)| *arrival).min()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
        time::Instant,
    };

    use super::*;

    const MS: u64 = 1_000_000;

    /// A server that sends everything back; each thread ends with its connection.
    fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                thread::spawn(move || std::io::copy(&mut stream.try_clone().unwrap(), &mut stream));
            }
        });
        address
    }

    fn round_trip(stream: &mut TcpStream, bytes: &[u8]) -> (Duration, Vec<u8>) {
        let begun = Instant::now();
        stream.write_all(bytes).unwrap();
        let mut back = vec![0; bytes.len()];
        stream.read_exact(&mut back).unwrap();
        (begun.elapsed(), back)
    }

    #[test]
    fn a_round_trip_takes_at_least_the_modelled_time() {
        let model = LinkModel { rtt_ns: 30 * MS, ..LinkModel::default() };
        let link = Link::start(model, echo()).unwrap();
        let mut stream = TcpStream::connect(link.address()).unwrap();
        for _ in 0..3 {
            // The upper bound depends on the machine.
            let (took, back) = round_trip(&mut stream, b"there and back");
            assert!(took >= Duration::from_millis(30), "{took:?}");
            assert_eq!(back, b"there and back");
        }
    }

    #[test]
    fn bytes_stay_in_order_and_bandwidth_is_shared() {
        // 1 MiB in both directions at 80 Mbit/s: 105 ms each, but overlapping.
        let model = LinkModel { rtt_ns: MS, jitter_ns: 4 * MS, bits_per_s: 80_000_000 };
        let link = Link::start(model, echo()).unwrap();
        let begun = Instant::now();
        thread::scope(|scope| {
            for seed in 0..2u8 {
                let address = link.address();
                scope.spawn(move || {
                    let mut stream = TcpStream::connect(address).unwrap();
                    let bytes: Vec<u8> =
                        (0..512 << 10).map(|i: u32| (i / 251) as u8 ^ seed).collect();
                    let mut sender = stream.try_clone().unwrap();
                    let copy = bytes.clone();
                    scope.spawn(move || sender.write_all(&copy).unwrap());
                    let mut back = vec![0; bytes.len()];
                    stream.read_exact(&mut back).unwrap();
                    assert!(back == bytes, "bytes came in another order");
                });
            }
        });
        assert!(begun.elapsed() >= Duration::from_millis(105), "{:?}", begun.elapsed());
    }

    #[test]
    fn an_end_is_passed_on_in_both_directions() {
        let link = Link::start(LinkModel::default(), echo()).unwrap();
        let mut stream = TcpStream::connect(link.address()).unwrap();
        stream.write_all(b"last words").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        assert_eq!(all, b"last words");
        // When the link ends, so do its connections.
        let mut stream = TcpStream::connect(link.address()).unwrap();
        round_trip(&mut stream, b"up");
        drop(link);
        assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)));
    }

    #[test]
    fn the_model_computes_delays_and_occupancy() {
        let model = LinkModel { rtt_ns: 100_000, jitter_ns: 10_000, bits_per_s: 25_000_000_000 };
        let delays: Vec<u64> = (0..1000).map(|n| model.piece_delay_ns(n)).collect();
        assert!(delays.iter().all(|delay| (45_000..=55_000).contains(delay)));
        assert!(delays.iter().min() < Some(&46_000) && delays.iter().max() > Some(&54_000));
        // 4 KiB at 25 Gbit/s.
        assert_eq!(model.occupies_ns(4096), 1310);
        let mut wire = Wire::default();
        let arrivals: Vec<u64> = (0..3).map(|_| wire.arrival(&model, 5_000, 4096)).collect();
        assert_eq!(wire.free_at, 5_000 + 3 * 1310);
        assert!(arrivals.iter().all(|at| *at >= 5_000 + 1310 + 45_000));
        assert!(LinkModel::default().is_nothing());
        assert_eq!(LinkModel { jitter_ns: 8, ..LinkModel::default() }.piece_delay_ns(3) / 8, 0);
        assert_eq!(model.to_string(), "round trip 100 µs, jitter 10.0 µs, 25.0 Gbit/s");
    }
}
