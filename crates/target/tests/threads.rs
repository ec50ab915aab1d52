//! What crosses the reactors of a target, under a model checker: every interleaving of the mail, of
//! connections that move, of the order to stop, and of sessions that wait for one another. The files
//! under test are compiled as they are, with the checker's locks and atomics; the sessions are the
//! product's own.

#[path = "../src/control.rs"]
mod control;
#[allow(dead_code, reason = "the rest is the reactor's")]
#[path = "../src/mail.rs"]
mod mail;
#[path = "../../session/tests/peer/mod.rs"]
mod peer;
#[allow(dead_code, unreachable_pub, reason = "the rest is for listeners that poll")]
#[path = "../../net/src/wake.rs"]
mod wake;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
    use loom::sync::{Arc, Condvar};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use std::sync::PoisonError;

    use crate::wake::Wake;

    /// An event that a thread can sleep on; a descriptor in an epoll instance, else.
    #[derive(Debug)]
    pub(crate) struct Event(Mutex<bool>, Condvar);

    impl Event {
        fn new() -> Self {
            Self(Mutex::new(false), Condvar::new())
        }

        pub(crate) fn ring(&self) {
            *self.0.lock().unwrap() = true;
            self.1.notify_one();
        }

        pub(crate) fn silence(&self) {
            *self.0.lock().unwrap() = false;
        }

        fn wait(&self) {
            let mut rings = self.0.lock().unwrap();
            while !*rings {
                rings = self.1.wait(rings).unwrap();
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
            self.0.call();
        }

        /// Sleeps until somebody has called, as a reactor does: it reads its mail after that.
        pub(crate) fn sleep(&self) {
            self.0.event().wait();
            self.0.hear();
        }
    }
}

/// A connection in a reactor.
mod link {
    use riopipe_session::target::ConnId;

    pub(crate) struct Link {
        pub(crate) id: ConnId,
    }
}

use control::{Control, Order};
use link::Link;
use loom::sync::Arc;
use loom::thread;
use mail::{Mail, Mailboxes, Reader};
use peer::Digests;
use riopipe_order::attribute::VolumeId;
use riopipe_order::block_device::{BlockDevice, Data, Done, IoError, Submitted};
use riopipe_order::region::MemRegion;
use riopipe_session::outbox::Outbox;
use riopipe_session::target::{
    ConnId, Event, Identity, NamespaceConfig, Namespaces, OpId, Shared, TargetConn, TargetEnv,
    Volumes,
};
use riopipe_session::wire;
use sync::{AtomicBool, Mutex, MutexGuard, Ordering, Waker};

fn bounded(check: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(check);
}

/// What the reactors of a model share.
struct Reactors {
    mail: Arc<Mailboxes>,
    control: Arc<Control>,
    wakers: Vec<Waker>,
}

fn reactors(count: usize) -> Reactors {
    let wakers: Vec<Waker> = (0..count).map(|_| Waker::new()).collect();
    let mail = Arc::new(Mailboxes::new(wakers.clone()));
    Reactors { mail, control: Arc::new(Control::new()), wakers }
}

/// A reactor with connections that end when they have seen what was left for them.
struct Desk {
    index: usize,
    links: Vec<Link>,
    left: Arc<Mutex<Vec<ConnId>>>,
    ended: usize,
}

impl Reader for Desk {
    fn adopt(&mut self, link: Box<Link>) -> ConnId {
        let id = link.id;
        self.links.push(*link);
        id
    }

    fn notice(&mut self, id: ConnId) {
        if let Some(at) = self.links.iter().position(|link| link.id == id) {
            let mut left = self.left.lock().unwrap();
            if let Some(notice) = left.iter().position(|other| *other == id) {
                left.remove(notice);
                self.links.remove(at);
                self.ended += 1;
            }
        }
    }
}

impl Desk {
    /// The loop of a reactor; gives its connection to another, if it is to, before it winds up.
    fn run(
        mut self,
        mail: &Mailboxes,
        control: &Control,
        waker: &Waker,
        mut gives_to: Option<usize>,
    ) -> usize {
        let mut winds_up = false;
        loop {
            if control.order() == Order::Run {
                if let Some(other) = gives_to.take()
                    && let Some(link) = self.links.pop()
                {
                    assert_eq!(mail.place_queue(), other, "it has fewer queues");
                    mail.send(other, Mail::Adopt(Box::new(link)));
                }
            } else {
                if !winds_up {
                    winds_up = true;
                    control.winds_up(mail);
                }
                let all = control.all_wind_up(mail);
                mail.read(self.index, &mut self);
                if all && self.links.is_empty() {
                    return self.ended;
                }
            }
            waker.sleep();
            mail.read(self.index, &mut self);
        }
    }
}

/// A notice finds its connection wherever it is, and also between two reactors; an order to stop
/// reaches reactors that sleep; and none ends while a connection may be on its way to it.
#[test]
fn t8_a_connection_that_moves_hears_what_is_left_for_it_and_all_come_to_an_end() {
    bounded(|| {
        let Reactors { mail, control, wakers } = reactors(2);
        let left = Arc::new(Mutex::new(Vec::new()));
        // The first has a queue already that it counts: the new one goes to the second.
        assert_eq!(mail.place_queue(), 0);
        let desks: Vec<_> = (0..2)
            .map(|index| {
                let links = if index == 0 { vec![Link { id: ConnId(7) }] } else { vec![] };
                let desk = Desk { index, links, left: Arc::clone(&left), ended: 0 };
                let (mail, control) = (Arc::clone(&mail), Arc::clone(&control));
                let waker = wakers[index].clone();
                let gives_to = (index == 0).then_some(1);
                thread::spawn(move || desk.run(&mail, &control, &waker, gives_to))
            })
            .collect();
        left.lock().unwrap().push(ConnId(7));
        mail.notify(ConnId(7));
        control.give(Order::Finish, &mail);
        let ended: usize = desks.into_iter().map(|desk| desk.join().unwrap()).sum();
        assert_eq!(ended, 1, "the connection was lost on its way");
    });
}

const SUBNQN: &str = "nqn.2026-01.io.example:drives";

/// The world of a reactor's sessions.
struct Devices {
    shared: Arc<Mutex<Shared<MemRegion>>>,
    mail: Arc<Mailboxes>,
    drive: Drive,
}

impl Devices {
    fn lock(&self) -> MutexGuard<'_, Shared<MemRegion>> {
        self.shared.lock().unwrap()
    }
}

/// A drive that keeps what it is asked for until the test ends it.
struct Drive {
    pending: Vec<OpId>,
    /// Writes are done at once.
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

/// One connection, with the reactor that has it.
struct Session {
    conn: TargetConn<Devices>,
    devices: Devices,
    out: Outbox<Vec<u8>>,
    answers: Vec<u8>,
}

impl Reader for Session {
    fn adopt(&mut self, link: Box<Link>) -> ConnId {
        panic!("nothing moves here: {:?}", link.id);
    }

    fn notice(&mut self, id: ConnId) {
        if self.conn.id() == id {
            self.conn.noticed(&mut self.devices, &mut self.out).unwrap();
        }
    }
}

impl Session {
    fn new(id: u64, shared: &Arc<Mutex<Shared<MemRegion>>>, mail: &Arc<Mailboxes>) -> Self {
        let devices = Devices {
            shared: Arc::clone(shared),
            mail: Arc::clone(mail),
            drive: Drive { pending: Vec::new(), quick: true },
        };
        let conn = TargetConn::new(ConnId(id), 0, riopipe_target::crc32c, 1);
        let mut session = Self { conn, devices, out: Outbox::new(), answers: Vec::new() };
        session.receive(&peer::icreq(Digests::default(), 0));
        let icresp = session.next().expect("an ICResp");
        assert_eq!(icresp.kind, 0x01);
        session
    }

    fn receive(&mut self, bytes: &[u8]) {
        let used = self.conn.receive(bytes, &mut self.devices, &mut self.out).unwrap();
        assert_eq!(used, bytes.len());
    }

    fn next(&mut self) -> Option<peer::Received> {
        let sent: Vec<u8> = self.out.slices().flatten().copied().collect();
        self.out.consume(sent.len());
        self.answers.extend(sent);
        peer::parse(&mut self.answers, Digests::default(), 0)
    }

    fn send(&mut self, sqe: peer::Sqe, data: &[u8]) {
        self.receive(&peer::capsule(Digests::default(), &sqe.0, data));
    }

    fn call(&mut self, sqe: peer::Sqe, data: &[u8]) -> peer::Completion {
        self.send(sqe, data);
        self.next().expect("an answer").completion()
    }

    fn connect(&mut self, cntlid: u16, qid: u16) -> u16 {
        let data = peer::connect_data(SUBNQN, peer::HOSTNQN, peer::HOSTID, cntlid);
        let done = self.call(peer::connect(0, qid, 7, 0), &data);
        assert_eq!(done.status, 0);
        done.result as u16
    }

    /// What it keeps at the drive has come back.
    fn drive_done(&mut self, result: Result<(), IoError>) {
        let op = self.devices.drive.pending.pop().expect("an operation at the drive");
        let result = result.map(|()| None);
        self.conn.device_done(op, result, &mut self.devices, &mut self.out);
        self.conn.settled(&mut self.devices, &mut self.out);
    }

    /// Reads its reactor's mail until there is an answer.
    fn answer(&mut self, mail: &Mailboxes, reactor: usize, waker: &Waker) -> u16 {
        loop {
            if let Some(pdu) = self.next() {
                return pdu.completion().status;
            }
            waker.sleep();
            mail.read(reactor, self);
        }
    }
}

fn shared(volatile: bool) -> Arc<Mutex<Shared<MemRegion>>> {
    let identity = Identity {
        subnqn: SUBNQN.into(),
        serial: "1".into(),
        model: "Rio target".into(),
        firmware: "0.1".into(),
        allowed_hosts: None,
        require_header_digest: false,
        require_data_digest: false,
        ports: Vec::new(),
        io_queues: 4,
    };
    let drive = NamespaceConfig { nsid: 1, blocks: 100, nguid: [1; 16], uuid: [2; 16], volatile };
    let volumes = Volumes::without_log(riopipe_target::crc32c);
    Arc::new(Mutex::new(Shared::new(identity, Namespaces::new(vec![drive]).unwrap(), volumes, 0)))
}

/// An enabled controller's admin connection, and two of its queues.
fn sessions(volatile: bool, mail: &Arc<Mailboxes>) -> (Session, [Session; 2]) {
    let shared = shared(volatile);
    let mut admin = Session::new(1, &shared, mail);
    let cntlid = admin.connect(0xffff, 0);
    assert_eq!(admin.call(peer::property_set(1, 0x14, peer::CC_ENABLE), &[]).status, 0);
    let queues = [(2, 1), (3, 2)].map(|(id, qid)| {
        let mut queue = Session::new(id, &shared, mail);
        queue.connect(cntlid, qid);
        queue
    });
    (admin, queues)
}

/// A claim is answered once every operation of other connections has come back, on whichever
/// reactor, and it is answered: whoever acknowledges the fence last wakes the claimant.
#[test]
fn t8_a_claim_is_answered_when_all_reactors_have_drained_and_never_overslept() {
    bounded(|| {
        let Reactors { mail, control, wakers } = reactors(2);
        let (mut admin, [mut queue, idle]) = sessions(false, &mail);
        queue.devices.drive.quick = false;
        queue.send(peer::write(1, 1, 5, 1), &[7; 4096]);
        let written = Arc::new(AtomicBool::new(false));
        let other = {
            let (mail, control) = (Arc::clone(&mail), Arc::clone(&control));
            let (written, waker) = (Arc::clone(&written), wakers[1].clone());
            thread::spawn(move || {
                // Released with the acknowledgement, through the lock of what is shared.
                written.store(true, Ordering::Relaxed);
                queue.drive_done(Ok(()));
                let mut both = Both(queue, idle);
                while control.order() == Order::Run {
                    waker.sleep();
                    mail.read(1, &mut both);
                }
            })
        };
        let claim = wire::Claim {
            volume: VolumeId([7; 16]),
            generation: 1,
            create: false,
            take_over: false,
            unlogged: true,
            give_up: false,
            resume: false,
            streams: 1,
            slots: 0,
            lease_ms: 0,
            members: wire::in_order(1..=1),
        };
        let sqe = peer::Sqe(wire::claim_command().0).byte(1, 0x40).inline(4096);
        admin.send(sqe, &claim.encode());
        assert_eq!(admin.answer(&mail, 0, &wakers[0]), 0);
        assert!(written.load(Ordering::Relaxed), "a write is still under way (T8)");
        control.give(Order::Finish, &mail);
        other.join().unwrap();
    });
}

/// Two connections of one reactor.
struct Both(Session, Session);

impl Reader for Both {
    fn adopt(&mut self, link: Box<Link>) -> ConnId {
        self.0.adopt(link)
    }

    fn notice(&mut self, id: ConnId) {
        self.0.notice(id);
        self.1.notice(id);
    }
}
