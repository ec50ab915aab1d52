//! The shared state of a target's reactors, under a model checker: every interleaving of messages,
//! of connections that move, of shutdown requests, and of sessions that wait for one another. The
//! files under test are compiled unchanged, with the checker's locks and atomics; the cores are the
//! product's.

#[path = "../src/control.rs"]
mod control;
#[allow(dead_code, reason = "the reactor uses the rest")]
#[path = "../src/mail.rs"]
mod mail;
#[allow(dead_code, unreachable_pub, reason = "pollers use the rest")]
#[path = "../../net/src/wake.rs"]
mod wake;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, Ordering};
    use loom::sync::{Arc, Condvar};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use std::sync::PoisonError;

    use crate::wake::Wake;

    /// An event on which a thread can sleep; in the product a descriptor in an epoll instance.
    #[derive(Debug)]
    pub(crate) struct Event(Mutex<bool>, Condvar);

    impl Event {
        fn new() -> Self {
            Self(Mutex::new(false), Condvar::new())
        }

        pub(crate) fn signal(&self) {
            *self.0.lock().unwrap() = true;
            self.1.notify_one();
        }

        pub(crate) fn clear(&self) {
            *self.0.lock().unwrap() = false;
        }

        fn wait(&self) {
            let mut signalled = self.0.lock().unwrap();
            while !*signalled {
                signalled = self.1.wait(signalled).unwrap();
            }
        }
    }

    /// Wakes a reactor.
    #[derive(Clone)]
    pub(crate) struct Waker(Arc<Wake>);

    impl Waker {
        pub(crate) fn new() -> Self {
            Self(Arc::new(Wake::new(Event::new())))
        }

        pub(crate) fn wake(&self) {
            self.0.notify();
        }

        /// Sleeps until it is notified, as a reactor does: it reads its messages after that.
        pub(crate) fn sleep(&self) {
            self.0.event().wait();
            self.0.receive();
        }
    }
}

use riopipe_testkit::peer;
use std::collections::BTreeMap;

use control::{Control, Shutdown};
use loom::sync::Arc;
use loom::thread;
use mail::Mailboxes;
use peer::Digests;
use riopipe_order::attribute::VolumeId;
use riopipe_order::block_device::{BlockDevice, Data, Done, IoError, Submitted};
use riopipe_order::region::MemRegion;
use riopipe_order::write_order::DriveOrder;
use riopipe_session::target::{
    Action, ConnId, ConnKey, CoreConfig, Event, Identity, Input, Message, NamespaceConfig,
    Namespaces, OpId, PendingLimits, Places, QueueCounts, Shared, TargetCore, TargetEnv, Transport,
    Volumes,
};
use riopipe_session::wire;
use sync::{AtomicBool, Mutex, MutexGuard, Ordering, Waker};

fn bounded(check: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(check);
}

const SUBNQN: &str = "nqn.2026-01.io.example:drives";

type Mail = Mailboxes<Message<Devices, Wire>>;

/// The environment of a reactor's core.
struct Devices {
    shared: Arc<Mutex<Shared<MemRegion>>>,
    mail: Arc<Mail>,
    drive: Drive,
}

impl Devices {
    fn lock(&self) -> MutexGuard<'_, Shared<MemRegion>> {
        self.shared.lock().unwrap()
    }
}

/// A drive that keeps its operations until the test completes them.
struct Drive {
    pending: Vec<OpId>,
    /// Writes complete at once.
    quick: bool,
}

impl Drive {
    fn keep(&mut self, op: u64) -> Submitted<Vec<u8>> {
        self.pending.push(OpId(op));
        Submitted::Pending
    }
}

impl BlockDevice for Drive {
    type Buf = Vec<u8>;

    fn write(&mut self, op: u64, _: u64, _: Data<'_, Vec<u8>>) -> Submitted<Vec<u8>> {
        if self.quick { Submitted::Done(Ok(None)) } else { self.keep(op) }
    }
    fn read(&mut self, op: u64, _: u64, _: u64) -> Submitted<Vec<u8>> {
        self.keep(op)
    }
    fn flush(&mut self, op: u64) -> Submitted<Vec<u8>> {
        self.keep(op)
    }
    fn write_zeroes(&mut self, op: u64, _: u64, _: u64) -> Submitted<Vec<u8>> {
        self.keep(op)
    }
    fn deallocate(&mut self, op: u64, _: u64, _: u64) -> Submitted<Vec<u8>> {
        self.keep(op)
    }
    fn kick(&mut self, _: u64) {}
    fn poll(&mut self, _: u64, _: &mut Vec<Done<Vec<u8>>>) {}
    fn next_deadline(&self) -> Option<u64> {
        None
    }
    fn in_flight(&self) -> usize {
        self.pending.len()
    }
}

impl TargetEnv for Devices {
    type Buf = Vec<u8>;
    type Device = Drive;
    type Region = MemRegion;

    fn now(&self) -> u64 {
        1
    }
    fn alloc(&mut self, len: usize) -> Option<Vec<u8>> {
        Some(vec![0; len])
    }
    fn device(&mut self, _: usize) -> &mut Drive {
        &mut self.drive
    }
    fn with_shared<T>(&mut self, f: impl FnOnce(&mut Shared<MemRegion>) -> T) -> T {
        f(&mut self.lock())
    }
    fn notify(&mut self, conn: ConnId) {
        self.mail.notify(conn);
    }
    fn log(&mut self, _: Event<'_>) {}
}

fn shared(volatile: bool) -> Arc<Mutex<Shared<MemRegion>>> {
    let identity = Identity { io_queues: 4, ..Identity::open_to_all(SUBNQN, "1") };
    let drive = NamespaceConfig {
        nsid: 1,
        blocks: 100,
        lba_size: Default::default(),
        ana_group: 1,
        nguid: [1; 16],
        uuid: [2; 16],
        volatile,
        order: DriveOrder::None,
    };
    let volumes = Volumes::without_log(riopipe_platform::crc32c);
    Arc::new(Mutex::new(Shared::new(identity, Namespaces::new(vec![drive]).unwrap(), volumes, 0)))
}

/// A reactor's part of a connection: its number, and the received bytes.
struct Wire {
    number: usize,
    input: Vec<u8>,
}

impl Transport for Wire {
    fn input(&self) -> &[u8] {
        &self.input
    }
    fn consume(&mut self, bytes: usize) {
        self.input.drain(..bytes);
    }
    fn reserve(&mut self, _: usize) -> Result<(), String> {
        Ok(())
    }
}

/// The state that the reactors of a model share.
struct Common {
    shared: Arc<Mutex<Shared<MemRegion>>>,
    mail: Arc<Mail>,
    control: Arc<Control>,
}

/// A reactor: the product's core, with the checker's mailboxes.
struct Reactor {
    core: TargetCore<Devices, Wire>,
    devices: Devices,
    control: Arc<Control>,
    waker: Waker,
    /// Its connections, by their numbers.
    keys: BTreeMap<usize, ConnKey>,
    answers: BTreeMap<usize, Vec<u8>>,
    /// Number of connections that have ended here.
    ended: usize,
}

fn reactors(volatile: bool) -> (Common, [Reactor; 2]) {
    let wakers = [Waker::new(), Waker::new()];
    let common = Common {
        shared: shared(volatile),
        mail: Arc::new(Mailboxes::new(wakers.to_vec())),
        control: Arc::new(Control::new()),
    };
    let (places, queues) = (Places::new(8), QueueCounts::new(2));
    let reactors = [0, 1].map(|index| Reactor {
        core: TargetCore::new(CoreConfig {
            index,
            listens: true,
            grace_ns: 0,
            crc: riopipe_platform::crc32c,
            places: places.clone(),
            queues: queues.clone(),
            pending: PendingLimits::NONE,
        }),
        devices: Devices {
            shared: Arc::clone(&common.shared),
            mail: Arc::clone(&common.mail),
            drive: Drive { pending: Vec::new(), quick: true },
        },
        control: Arc::clone(&common.control),
        waker: wakers[index].clone(),
        keys: BTreeMap::new(),
        answers: BTreeMap::new(),
        ended: 0,
    });
    (common, reactors)
}

impl Reactor {
    /// Opens a new, initialized connection.
    fn accept(&mut self, number: usize) {
        let place = self.core.place(&mut self.devices).expect("a free place");
        let wire = Wire { number, input: Vec::new() };
        self.core.accepted(place, wire, None, &mut self.devices);
        self.act();
        self.receive(number, &peer::icreq(Digests::default(), 0));
        assert_eq!(self.next(number).expect("an ICResp").kind, 0x01);
    }

    fn receive(&mut self, number: usize, bytes: &[u8]) {
        let key = self.keys[&number];
        let Input::Wanted { transport: wire, .. } = self.core.input(key) else {
            panic!("nothing is wanted")
        };
        wire.input.extend_from_slice(bytes);
        self.core.received(key, 0, &mut self.devices);
        self.act();
    }

    fn send(&mut self, number: usize, sqe: peer::Sqe, data: &[u8]) {
        self.receive(number, &peer::capsule(Digests::default(), &sqe.0, data));
    }

    fn next(&mut self, number: usize) -> Option<peer::Received> {
        peer::parse(self.answers.entry(number).or_default(), Digests::default(), 0)
    }

    fn call(&mut self, number: usize, sqe: peer::Sqe, data: &[u8]) -> peer::Completion {
        self.send(number, sqe, data);
        self.next(number).expect("an answer").completion()
    }

    fn connect(&mut self, number: usize, cntlid: u16, qid: u16) -> peer::Completion {
        let data = peer::connect_data(SUBNQN, peer::HOSTNQN, peer::HOSTID, cntlid);
        self.call(number, peer::connect(0, qid, 7, 0), &data)
    }

    /// Opens the admin connection of an enabled controller.
    fn admin(&mut self, number: usize) -> u16 {
        self.accept(number);
        let connected = self.connect(number, 0xffff, 0);
        assert_eq!(connected.status, 0);
        let enable = peer::property_set(1, 0x14, peer::CC_ENABLE);
        assert_eq!(self.call(number, enable, &[]).status, 0);
        connected.result as u16
    }

    fn queue(&mut self, number: usize, cntlid: u16, qid: u16) {
        self.accept(number);
        assert_eq!(self.connect(number, cntlid, qid).status, 0);
    }

    /// Completes an operation that the drive has kept.
    fn drive_done(&mut self, result: Result<(), IoError>) {
        let op = self.devices.drive.pending.pop().expect("an operation at the drive");
        self.core.device_done(op, result.map(|()| None), &mut self.devices);
        self.act();
    }

    /// Executes the actions of the core, as the product's reactor does.
    fn act(&mut self) {
        while let Some(action) = self.core.next_action(&mut self.devices) {
            match action {
                Action::Send(key) => {
                    while let Some((wire, output)) = self.core.outgoing(key) {
                        let answers = self.answers.entry(wire.number).or_default();
                        output.slices().for_each(|slice| answers.extend_from_slice(slice));
                        let sent = output.len_bytes();
                        self.core.sent(key, sent, &mut self.devices);
                    }
                }
                Action::Watch { key, .. } => {
                    let wire = self.core.transport(key).expect("it is there");
                    self.keys.insert(wire.number, key);
                }
                Action::HandOver { core, connection } => {
                    self.keys.remove(&connection.transport().number);
                    self.devices.mail.send(core, Message::Adopt(connection));
                }
                Action::EndMoves => self.devices.mail.announce_end(self.core.index()),
                Action::Drop(connection) => {
                    self.keys.remove(&connection.transport().number);
                    self.ended += 1;
                }
                Action::Listen(_) | Action::FinishSending(_) => {}
            }
        }
    }

    /// The peer closes its connection.
    fn close(&mut self, number: usize) {
        self.core.closed(self.keys[&number], "the host closed the connection", &mut self.devices);
        self.act();
    }

    /// Sleeps until it is woken, and reads its messages.
    fn sleep(&mut self) {
        self.waker.sleep();
        for message in self.devices.mail.take(self.core.index()) {
            self.core.message(message, &mut self.devices);
        }
        self.act();
        // The peer of a connection that is being closed confirms the end.
        for (number, key) in self.keys.clone() {
            if matches!(self.core.input(key), Input::Dropped(_)) {
                self.close(number);
            }
        }
    }

    /// The loop of a reactor until it is asked to stop and has nothing in flight; returns the number
    /// of connections that have ended here.
    fn run(mut self) -> usize {
        loop {
            self.core.timeout(&mut self.devices);
            if self.control.shutdown() == Shutdown::Graceful {
                self.core.stop(&mut self.devices);
                self.act();
                if self.core.is_at_rest() {
                    return self.ended;
                }
            }
            self.sleep();
        }
    }
}

/// A notice finds its connection anywhere, also between two reactors: the association ends on one
/// of them while a queue of it is in transit from the other.
#[test]
fn t8_a_moving_connection_gets_its_notices() {
    bounded(|| {
        let (common, [mut first, mut second]) = reactors(false);
        let cntlid = second.admin(1);
        // The first one has a queue already, so the next goes to the second.
        first.queue(2, cntlid, 2);
        first.accept(3);
        let mover = thread::spawn(move || {
            let data = peer::connect_data(SUBNQN, peer::HOSTNQN, peer::HOSTID, cntlid);
            first.send(3, peer::connect(0, 1, 7, 0), &data);
            let status = first.next(3).expect("an answer").completion().status;
            if status != 0 {
                // The association has ended before.
                first.close(3);
                first.control.request(Shutdown::Graceful, &first.devices.mail);
            }
            while !first.keys.is_empty() {
                first.sleep();
            }
        });
        second.close(1);
        assert_eq!(second.ended, 1);
        while second.ended < 2 && common.control.shutdown() == Shutdown::None {
            second.sleep();
        }
        mover.join().unwrap();
    });
}

/// A shutdown request reaches sleeping reactors, and none ends while a connection may be in transit
/// to it.
#[test]
fn t8_no_connection_is_lost_between_reactors_that_stop() {
    bounded(|| {
        let (common, [mut first, mut second]) = reactors(false);
        let cntlid = second.admin(1);
        first.queue(2, cntlid, 2);
        first.accept(3);
        let second = thread::spawn(move || second.run());
        let first = thread::spawn(move || {
            let data = peer::connect_data(SUBNQN, peer::HOSTNQN, peer::HOSTID, cntlid);
            first.send(3, peer::connect(0, 1, 7, 0), &data);
            first.run()
        });
        common.control.request(Shutdown::Graceful, &common.mail);
        let ended = first.join().unwrap() + second.join().unwrap();
        assert_eq!(ended, 3, "a connection was lost in transit");
    });
}

/// A claim is answered once every operation of other connections has come back, on any reactor. The
/// connection that acknowledges the fence last wakes the claimant, and the wake-up is not missed.
#[test]
fn t8_a_claim_is_answered_when_all_reactors_have_drained() {
    bounded(|| {
        let (common, [mut first, mut second]) = reactors(false);
        let cntlid = first.admin(1);
        // One queue on each reactor suffices; both connect on the second.
        second.accept(2);
        second.accept(3);
        assert_eq!(second.connect(2, cntlid, 1).status, 0);
        // The first reactor had the fewest queues, so this one is there now.
        first.sleep();
        assert_eq!(second.connect(3, cntlid, 2).status, 0);
        second.devices.drive.quick = false;
        second.send(3, peer::write(1, 1, 5, 1), &[7; 4096]);
        let written = Arc::new(AtomicBool::new(false));
        let other = {
            let written = Arc::clone(&written);
            thread::spawn(move || {
                // Released with the acknowledgement, by the lock of the shared state.
                written.store(true, Ordering::Relaxed);
                second.drive_done(Ok(()));
                while second.control.shutdown() == Shutdown::None {
                    second.sleep();
                }
            })
        };
        let claim = wire::Claim {
            unlogged: true,
            ..wire::Claim::plain(VolumeId([7; 16]), 1, 1, wire::in_order([1]))
        };
        let sqe = peer::Sqe(wire::claim_command().0).byte(1, 0x40).inline(4096);
        first.send(1, sqe, &claim.encode());
        let status = loop {
            if let Some(pdu) = first.next(1) {
                break pdu.completion().status;
            }
            first.sleep();
        };
        assert_eq!(status, 0);
        assert!(written.load(Ordering::Relaxed), "a write is still in flight (T8)");
        common.control.request(Shutdown::Graceful, &common.mail);
        other.join().unwrap();
    });
}
