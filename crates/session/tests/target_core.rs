//! The decisions of a target's core between sockets and drives: batches, connections that move from
//! core to core, the sockets that are read, the checks of clocks, the end.

mod world;

use riopipe_testkit::peer;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use peer::{CC_ENABLE, Completion, Digests, HOSTID, HOSTNQN};
use riopipe_nvme::auth::GroupId;
use riopipe_nvme::command::Sqe;
use riopipe_nvme::dhchap_secret::DhchapSecret;
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::block_device::{BlockDevice, Data, Submitted};
use riopipe_order::write_order::{EpochId, EpochWrite, WriteOrder};
use riopipe_session::auth::controller::AuthRules;
use riopipe_session::auth::host::{HostAuth, HostSecrets, HostStep};
use riopipe_session::auth::tls::KeyOwner;
use riopipe_session::target::limits::{DATA_STALL_NS, SEND_FIRST_BYTES, STALL_NS};
use riopipe_session::target::{
    Access, Action, BoundedDevice, ConnKey, CoreConfig, HostAccess, Input, Interest, Message,
    PendingLimits, Places, QueueCounts, TargetCore, Transport,
};
use riopipe_session::wire;
use world::{
    Drive, Pending, SUBNQN, TestHost, VOLUME, What, World, attribute, block, crc, ordered,
    riopipe_bytes,
};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;
/// The interval of checks of clocks, the log's store and full places.
const CHECK_NS: u64 = 100 * MS;
const GRACE: u64 = 3 * SECOND;

/// A core's part of a connection: its number in the test, the bytes that have come in, and the list of
/// connections that are admitted.
struct Wire(usize, Vec<u8>, Arc<Mutex<Vec<usize>>>);

/// The IPv4 address of the peer of the connection with this number: ten connections each come from the
/// same one.
fn address_of(number: usize) -> [u8; 4] {
    [192, 0, 2, (number / 10) as u8]
}

impl Transport for Wire {
    fn input(&self) -> &[u8] {
        &self.1
    }
    fn consume(&mut self, bytes: usize) {
        self.1.drain(..bytes);
    }
    fn reserve(&mut self, _: usize) -> Result<(), String> {
        Ok(())
    }
    fn peer_address(&self) -> Option<IpAddr> {
        Some(address_of(self.0).into())
    }
    fn admit(&mut self) {
        self.2.lock().unwrap().push(self.0);
    }
}

/// Cores over the same drives, and the scripted hosts at the other ends of their connections.
struct Target {
    world: World,
    cores: Vec<TargetCore<TestHost, Wire>>,
    mail: Vec<VecDeque<Message<TestHost, Wire>>>,
    /// Connections: the core that has each, and its key there.
    places: BTreeMap<usize, (usize, ConnKey)>,
    answers: BTreeMap<usize, Vec<u8>>,
    /// The events for which each connection is watched.
    watched_for: BTreeMap<usize, Interest>,
    /// The actions besides sending, by connection.
    did: Vec<(&'static str, usize)>,
    /// Sockets take bytes.
    takes: bool,
    /// The most bytes that a connection had to send at once.
    largest_output: usize,
    /// The connections that have got the memory of a queue.
    admitted: Arc<Mutex<Vec<usize>>>,
}

fn target(cores: usize, places: usize) -> Target {
    target_with(cores, places, PendingLimits::NONE)
}

fn target_with(cores: usize, places: usize, pending: PendingLimits) -> Target {
    let (places, queues) = (Places::new(places), QueueCounts::new(cores));
    let core = |index| {
        TargetCore::new(CoreConfig {
            index,
            listens: index == 0,
            grace_ns: GRACE,
            crc,
            places: places.clone(),
            queues: queues.clone(),
            pending,
        })
    };
    let mut target = Target {
        world: World::new(&[false]),
        cores: (0..cores).map(core).collect(),
        mail: (0..cores).map(|_| VecDeque::new()).collect(),
        places: BTreeMap::new(),
        answers: BTreeMap::new(),
        watched_for: BTreeMap::new(),
        did: Vec::new(),
        takes: true,
        largest_output: 0,
        admitted: Arc::default(),
    };
    target.round();
    assert_eq!(target.did(), [("listen", 1)]);
    target
}

impl Target {
    fn env(&mut self) -> &mut TestHost {
        &mut self.world.host
    }

    /// The actions since the last call.
    fn did(&mut self) -> Vec<(&'static str, usize)> {
        std::mem::take(&mut self.did)
    }

    /// A round of each core, without its mail.
    fn round(&mut self) {
        for core in 0..self.cores.len() {
            self.cores[core].timeout(&mut self.world.host);
            self.act(core);
        }
    }

    fn act(&mut self, at: usize) {
        while let Some(action) = self.cores[at].next_action(&mut self.world.host) {
            let core = &mut self.cores[at];
            match action {
                Action::Listen(on) => self.did.push(("listen", on.into())),
                Action::Send(key) => self.send_answers(at, key),
                Action::FinishSending(key) => {
                    self.did.push(("finish", core.transport(key).unwrap().0));
                }
                Action::Watch { key, interest, is_new } => {
                    let number = core.transport(key).unwrap().0;
                    self.watched_for.insert(number, interest);
                    self.places.insert(number, (at, key));
                    self.did.push((if is_new { "watch" } else { "change" }, number));
                }
                Action::HandOver { core, connection } => {
                    self.did.push(("hand over", connection.transport().0));
                    self.mail[core].push_back(Message::Adopt(connection));
                }
                Action::EndMoves => {
                    self.did.push(("end moves", at));
                    for (to, message) in Message::moves_ended(at, self.mail.len()) {
                        self.mail[to].push_back(message);
                    }
                }
                Action::Drop(connection) => {
                    self.places.remove(&connection.transport().0);
                    self.did.push(("drop", connection.transport().0));
                }
            }
        }
        while let Some(conn) = self.world.host.notices.pop_front() {
            for (to, message) in Message::notices(conn, self.mail.len()) {
                self.mail[to].push_back(message);
            }
        }
    }

    /// A connection sends its answers, until the socket takes no more.
    fn send_answers(&mut self, at: usize, key: ConnKey) {
        let core = &mut self.cores[at];
        while let Some((wire, output)) = core.outgoing(key) {
            self.largest_output = self.largest_output.max(output.len_bytes());
            if !self.takes {
                core.blocked(key, &mut self.world.host);
                break;
            }
            let answers = self.answers.entry(wire.0).or_default();
            output.slices().for_each(|slice| answers.extend_from_slice(slice));
            let sent = output.len_bytes();
            core.sent(key, sent, &mut self.world.host);
        }
    }

    /// Sockets take bytes again, and the core of this connection learns it.
    fn takes_again(&mut self, number: usize) {
        self.takes = true;
        let (core, key) = self.places[&number];
        self.send_answers(core, key);
        self.act(core);
    }

    /// A core reads its mail.
    fn read_mail(&mut self, core: usize) {
        while let Some(message) = self.mail[core].pop_front() {
            self.cores[core].message(message, &mut self.world.host);
            self.act(core);
        }
    }

    fn accept(&mut self, number: usize) {
        let place = self.cores[0].place(&mut self.world.host).expect("a free place");
        self.cores[0].accepted(
            place,
            Wire(number, Vec::new(), Arc::clone(&self.admitted)),
            None,
            &mut self.world.host,
        );
        self.act(0);
    }

    fn receive(&mut self, number: usize, bytes: &[u8]) {
        let (core, key) = self.places[&number];
        let Input::Wanted { transport, data_space } = self.cores[core].input(key) else {
            panic!("nothing is wanted")
        };
        let data_bytes = data_space.len().min(bytes.len());
        data_space[..data_bytes].copy_from_slice(&bytes[..data_bytes]);
        transport.1.extend_from_slice(&bytes[data_bytes..]);
        self.cores[core].received(key, data_bytes, &mut self.world.host);
        self.act(core);
    }

    fn hang_up(&mut self, number: usize) {
        let (core, key) = self.places[&number];
        self.cores[core].closed(key, "the host closed the connection", &mut self.world.host);
        self.act(core);
    }

    fn next(&mut self, number: usize) -> Option<peer::Received> {
        peer::parse(self.answers.entry(number).or_default(), Digests::default(), 0)
    }

    fn send(&mut self, number: usize, sqe: peer::Sqe, data: &[u8]) {
        self.receive(number, &peer::capsule(Digests::default(), &sqe.0, data));
    }

    fn call(&mut self, number: usize, sqe: peer::Sqe, data: &[u8]) -> Completion {
        self.send(number, sqe, data);
        self.next(number).expect("an answer").completion()
    }

    fn open(&mut self, number: usize) {
        self.accept(number);
        self.receive(number, &peer::icreq(Digests::default(), 0));
        assert_eq!(self.next(number).expect("an ICResp").kind, 0x01);
    }

    fn connect(&mut self, number: usize, qid: u16, cntlid: u16) -> Completion {
        let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
        self.call(number, peer::connect(0, qid, 31, 0), &data)
    }

    /// An enabled controller: its id.
    fn admin(&mut self, number: usize) -> u16 {
        self.open(number);
        let connected = self.connect(number, 0, 0xffff);
        assert_eq!(connected.status, 0);
        assert_eq!(self.call(number, peer::property_set(1, 0x14, CC_ENABLE), &[]).status, 0);
        connected.result as u16
    }

    fn queue(&mut self, number: usize, qid: u16, cntlid: u16) {
        self.open(number);
        assert_eq!(self.connect(number, qid, cntlid).status, 0);
    }

    /// The operations that the drive keeps, by name.
    fn pending(&mut self) -> Vec<Pending> {
        std::mem::take(&mut self.world.host.drives[0].pending)
    }

    fn done(&mut self, core: usize, pending: &Pending) {
        self.cores[core].device_done(pending.op, Ok(None), &mut self.world.host);
    }

    fn deadline(&self, core: usize) -> Option<u64> {
        let now = self.world.host.now;
        self.cores[core].deadline(now).map(|at| at - now)
    }

    /// The number of messages that contain this.
    fn logged(&self, what: &str) -> usize {
        self.world.host.log.iter().filter(|line| line.contains(what)).count()
    }
}

#[test]
fn t7_nothing_of_a_batch_is_sent_before_its_one_fence() {
    let mut t = target(1, 9);
    let cntlid = t.admin(1);
    let claim = t.world.first_claim();
    let sqe = riopipe_bytes(&wire::claim_command()).cid(50).inline(4096);
    assert_eq!(t.call(1, sqe, &claim.encode()).status, 0);
    t.queue(2, 1, cntlid);
    let bind = wire::bind_command(VOLUME, StreamId(0), 1, Seq(0));
    assert_eq!(t.call(2, riopipe_bytes(&bind).cid(60), &[]).status, 0);
    t.env().drives[0].holds = true;
    for seq in 1..=3 {
        t.send(2, ordered(seq as u16, &attribute(seq, seq), 0), &block(seq as u8));
    }
    let (at, _) = t.world.partition(0);
    let fences = t.world.host.parts.fences(at);
    let (pending, key) = (t.pending(), t.places[&2].1);
    assert_eq!(pending.len(), 3);
    for pending in &pending {
        t.done(0, pending);
        assert!(t.cores[0].outgoing(key).is_none(), "the batch is not over");
        assert_eq!(t.world.host.parts.fences(at), fences);
    }
    t.act(0);
    assert_eq!(t.world.host.parts.fences(at), fences + 1, "one for all");
    for _ in 0..3 {
        assert_eq!(t.next(2).expect("an answer").completion().status, 0);
    }
}

#[test]
fn a_queue_is_given_to_the_core_with_the_fewest_once_its_answer_is_out() {
    let mut t = target(2, 9);
    let cntlid = t.admin(1);
    t.did();
    t.queue(2, 1, cntlid);
    assert_eq!(t.did(), [("watch", 2)], "the first stays");
    t.takes = false;
    t.open_and_connect_unread(3, cntlid);
    assert_eq!(t.did(), [("watch", 3), ("change", 3)], "its answer is still to be sent");
    assert_eq!(t.places[&3].0, 0);
    t.takes = true;
    // It stays for good, and is counted where it is: two are here, and the next two are not.
    for (number, qid) in [(4, 3), (5, 4)] {
        t.queue(number, qid, cntlid);
        assert_eq!(t.did(), [("watch", number), ("hand over", number)]);
        t.read_mail(1);
        assert_eq!(t.did(), [("watch", number)]);
        assert_eq!(t.places[&number].0, 1);
        assert_eq!(t.call(number, peer::write(1, 1, 0, 1), &block(1)).status, 0);
    }
    // A queue that ends makes space.
    t.hang_up(4);
    assert_eq!(t.did(), [("drop", 4)]);
    t.queue(6, 5, cntlid);
    assert_eq!(t.did(), [("watch", 6), ("hand over", 6)]);
}

impl Target {
    /// Connects an I/O queue whose host takes no answers.
    fn open_and_connect_unread(&mut self, number: usize, cntlid: u16) {
        self.accept(number);
        self.receive(number, &peer::icreq(Digests::default(), 0));
        let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
        let connect = peer::connect(0, 2, 31, 0);
        self.receive(number, &peer::capsule(Digests::default(), &connect.0, &data));
    }
}

#[test]
fn t8_a_notice_that_passes_a_connection_in_transit_is_read_when_it_arrives() {
    let mut t = target(2, 9);
    let cntlid = t.admin(1);
    t.queue(2, 1, cntlid);
    t.queue(3, 2, cntlid);
    let Some(adopted) = t.mail[1].pop_front() else { panic!("it is in transit") };
    // Its association ends. Both cores are informed, and neither has it.
    t.hang_up(1);
    (0..2).for_each(|core| t.read_mail(core));
    assert_eq!(t.logged("Closed"), 2);
    t.did();
    t.mail[1].push_back(adopted);
    t.read_mail(1);
    assert_eq!(t.logged("Closed"), 3, "it learns that its association has ended");
    assert_eq!(t.did(), [("finish", 3), ("watch", 3)]);
}

#[test]
fn last_words_go_out_and_the_peer_has_a_while_to_read_them() {
    for reads in [true, false] {
        let mut t = target(1, 9);
        t.accept(1);
        t.did();
        t.receive(1, &[0x80; 300]);
        assert_eq!(t.next(1).expect("last words").kind, 0x03);
        assert_eq!(t.did(), [("finish", 1)]);
        let key = t.places[&1].1;
        assert!(matches!(t.cores[0].input(key), Input::Dropped(_)));
        if reads {
            t.hang_up(1);
        } else {
            assert_eq!(t.deadline(0), Some(SECOND));
            t.env().now += SECOND - 1;
            t.round();
            assert_eq!(t.did(), []);
            t.env().now += CHECK_NS;
            t.round();
        }
        assert_eq!(t.did(), [("drop", 1)]);
        assert_eq!(t.deadline(0), None);
    }
}

#[test]
fn a_connection_that_waits_for_a_drive_wakes_no_thread() {
    let mut t = target(1, 9);
    let cntlid = t.admin(1);
    t.queue(2, 1, cntlid);
    t.env().drives[0].holds = true;
    t.send(2, peer::write(1, 1, 0, 1), &block(1));
    t.did();
    t.hang_up(2);
    t.env().now += 10 * SECOND;
    t.round();
    assert_eq!((t.did(), t.deadline(0)), (vec![], None), "its operation is in flight");
    let pending = t.pending();
    t.done(0, &pending[0]);
    t.act(0);
    assert_eq!(t.did(), [("drop", 2)]);
}

#[test]
fn clocks_and_log_are_checked_ten_times_a_second_at_most() {
    let mut t = target(1, 9);
    t.accept(1);
    assert_eq!(t.deadline(0), Some(STALL_NS));
    assert_eq!(t.world.host.watched, 1);
    t.env().now += STALL_NS - CHECK_NS / 2;
    t.round();
    assert_eq!(t.world.host.watched, 2);
    t.did();
    // A shell that woke up earlier would spin: nothing is checked before.
    assert_eq!(t.deadline(0), Some(CHECK_NS));
    t.env().now += CHECK_NS - 1;
    t.round();
    assert_eq!((t.did(), t.world.host.watched), (vec![], 2));
    t.env().now += 1;
    t.round();
    assert_eq!((t.did(), t.world.host.watched), (vec![("finish", 1)], 3));
}

#[test]
fn t28_a_peer_that_takes_no_answers_is_waited_for_so_long_and_not_read() {
    let mut t = target(1, 9);
    let cntlid = t.admin(1);
    t.queue(2, 1, cntlid);
    t.did();
    t.takes = false;
    t.send(2, peer::read(1, 1, 0, 1), &[]);
    assert_eq!(t.did(), [("change", 2)]);
    // No other event would wake the core.
    assert_eq!(t.deadline(0), Some(DATA_STALL_NS));
    t.env().now += DATA_STALL_NS;
    t.round();
    assert_eq!(t.logged("the host does not take what it is sent"), 1);
}

#[test]
fn t28_input_of_a_peer_that_takes_no_answers_waits_until_it_takes_them() {
    const COMMANDS: u16 = 600;
    let mut t = target(1, 9);
    t.env().shared.set_memory(0);
    t.admin(1);
    assert_eq!(t.watched_for[&1], Interest::Read);
    t.takes = false;
    t.send(1, peer::identify(1, 1, 0), &[]);
    assert_eq!(t.watched_for[&1], Interest::Both, "one answer is not much");
    let identify = |cid| peer::capsule(Digests::default(), &peer::identify(cid, 1, 0).0, &[]);
    let commands: Vec<u8> = (2..=COMMANDS).flat_map(identify).collect();
    t.receive(1, &commands);
    let key = t.places[&1].1;
    assert!(matches!(t.cores[0].input(key), Input::StaysInSocket));
    assert_eq!(t.watched_for[&1], Interest::Write, "input would wake the core in vain");
    // No further input arrives: the commands that have come already are carried out now.
    t.takes_again(1);
    let answers = std::iter::from_fn(|| t.next(1)).filter(|pdu| pdu.kind == 0x05);
    assert_eq!(answers.count(), usize::from(COMMANDS));
    assert!(matches!(t.cores[0].input(key), Input::Wanted { .. }));
    assert_eq!(t.watched_for[&1], Interest::Read);
}

/// Many reads arrive at once. As long as the socket takes bytes, each part of their data is sent before
/// the next is read. A socket that takes none stops no read before the limit.
#[test]
fn the_data_of_many_reads_is_sent_part_by_part() {
    const READS: u16 = 24;
    const BYTES: usize = 32 * 4096;
    let mut t = target(1, 4);
    let cntlid = t.admin(1);
    t.queue(2, 1, cntlid);
    let reads: Vec<u8> = (1..=READS)
        .flat_map(|cid| peer::capsule(Digests::default(), &peer::read(cid, 1, 0, 32).0, &[]))
        .collect();
    let read_bytes = |t: &mut Target| -> usize {
        std::iter::from_fn(|| t.next(2)).map(|pdu| pdu.data.len()).sum()
    };
    t.receive(2, &reads);
    assert_eq!(read_bytes(&mut t), usize::from(READS) * BYTES);
    assert!(t.largest_output < SEND_FIRST_BYTES + BYTES + 1024, "{}", t.largest_output);

    t.takes = false;
    t.largest_output = 0;
    t.receive(2, &reads);
    t.takes_again(2);
    assert_eq!(read_bytes(&mut t), usize::from(READS) * BYTES);
    assert!(t.largest_output > usize::from(READS) * BYTES, "{}", t.largest_output);
}

#[test]
fn t28_without_a_free_place_nothing_is_accepted_for_a_while() {
    let mut t = target(2, 2);
    t.admin(1);
    t.admin(2);
    t.did();
    for _ in 0..2 {
        assert!(t.cores[0].place(&mut t.world.host).is_none());
        t.act(0);
        assert_eq!(t.did(), [("listen", 0)]);
        let full = t.logged("Full { connections: 2 }");
        assert_eq!(full, 1, "at the first attempt, and not again");
        assert!(t.cores[0].place(&mut t.world.host).is_none());
        assert_eq!(t.deadline(0), Some(CHECK_NS));
        t.env().now += CHECK_NS;
        t.round();
        assert_eq!(t.did(), [("listen", 1)]);
    }
    t.hang_up(1);
    t.accept(3);
    assert!(t.cores[1].place(&mut t.world.host).is_none(), "it does not listen");
}

#[test]
fn t28_a_connection_that_is_not_admitted_gives_way_to_a_new_one() {
    let mut t = target_with(1, 99, PendingLimits { per_address: 3, total: 5 });
    // An admitted connection does not count, and never gives way.
    let cntlid = t.admin(10);
    for number in 11..=13 {
        t.open(number);
    }
    t.accept(20);
    t.did();
    t.accept(14);
    assert_eq!(t.did(), [("watch", 14), ("drop", 11)], "the oldest of its address");
    t.accept(30);
    assert_eq!(t.did(), [("watch", 30)]);
    t.accept(31);
    assert_eq!(t.did(), [("watch", 31), ("drop", 12)], "the oldest of the address with the most");
    assert_eq!(t.logged("Displaced"), 2);
    // Admitted in time, it leaves a place among those that are not.
    assert_eq!(t.connect(13, 1, cntlid).status, 0);
    t.did();
    t.accept(15);
    assert_eq!(t.did(), [("watch", 15)]);
    // One that has ended leaves its place, too.
    t.hang_up(20);
    t.did();
    t.accept(21);
    assert_eq!(t.did(), [("watch", 21)]);
}

#[test]
fn t28_without_a_free_place_a_connection_that_is_not_admitted_gives_way() {
    let mut t = target(1, 3);
    t.admin(1);
    t.accept(2);
    t.accept(3);
    t.did();
    assert!(t.cores[0].place(&mut t.world.host).is_none());
    t.act(0);
    assert_eq!(t.did(), [("drop", 2)]);
    // The connection that waits gets the place at once.
    t.admin(4);
    assert_eq!(t.logged("Full"), 0);
}

#[test]
fn t28_a_time_limit_has_passed_only_if_the_input_of_that_time_is_read() {
    let mut t = target(1, 9);
    t.accept(1);
    t.open(2);
    let begin = t.env().now;
    t.cores[0].input_read(begin);
    t.did();
    // The target was stopped for a long time. What the hosts have sent is not read yet.
    t.env().now += 100 * STALL_NS;
    t.round();
    assert_eq!(t.did(), []);
    // It is read now. The first host has sent nothing.
    assert_eq!(t.connect(2, 0, 0xffff).status, 0);
    let now = t.env().now;
    t.cores[0].input_read(now);
    t.env().now += CHECK_NS;
    t.round();
    assert_eq!(t.did(), [("finish", 1)]);
    assert_eq!(t.logged("NotAdmitted"), 1);
    assert_eq!(t.logged("no ICReq came in time"), 2, "the reason, and the end");
}

#[test]
fn t28_the_pause_of_accepting_is_never_shorter_than_it_should_be() {
    let mut t = target(2, 1);
    assert_eq!((t.cores[0].index(), t.cores[1].index()), (0, 1));
    t.admin(1);
    t.did();
    t.env().now += CHECK_NS / 2;
    assert!(t.cores[0].place(&mut t.world.host).is_none());
    t.env().now += CHECK_NS / 2;
    t.round();
    assert_eq!(t.did(), [("listen", 0)], "half of the pause is over");
    t.env().now += CHECK_NS;
    t.round();
    assert_eq!(t.did(), [("listen", 1)]);
}

#[test]
fn a_core_that_stops_lets_finish_what_is_in_flight_and_then_cuts_off() {
    for in_time in [true, false] {
        let mut t = target(1, 9);
        let cntlid = t.admin(1);
        t.queue(2, 1, cntlid);
        t.env().drives[0].holds = true;
        t.send(2, peer::write(1, 1, 0, 1), &block(1));
        t.did();
        t.cores[0].stop(&mut t.world.host);
        t.act(0);
        assert_eq!(t.did(), [("listen", 0), ("finish", 1), ("drop", 1), ("end moves", 0)]);
        assert!(t.cores[0].place(&mut t.world.host).is_none());
        assert!(!t.cores[0].is_at_rest());
        assert_eq!(t.deadline(0), Some(GRACE));
        let pending = t.pending();
        if !in_time {
            t.env().now += GRACE;
            t.round();
            assert_eq!(t.did(), [("finish", 2)], "its operation is still in flight");
            assert_eq!(t.deadline(0), None);
        }
        t.done(0, &pending[0]);
        t.act(0);
        t.round();
        assert_eq!(t.did().last(), Some(&("drop", 2)));
        assert_eq!(t.next(2).is_some(), in_time, "an answer");
        assert!(t.cores[0].is_at_rest());
    }
}

#[test]
fn a_core_that_stops_waits_for_what_is_in_transit_and_moves_nothing() {
    let mut t = target(2, 9);
    let cntlid = t.admin(1);
    t.queue(2, 1, cntlid);
    t.queue(3, 2, cntlid);
    t.open(4);
    // The second core stops first, while a connection is in transit to it.
    t.did();
    t.cores[1].stop(&mut t.world.host);
    t.act(1);
    assert_eq!(t.did(), [("end moves", 1)]);
    assert!(!t.cores[1].is_at_rest());
    t.cores[0].stop(&mut t.world.host);
    t.act(0);
    assert!(!t.did().contains(&("hand over", 4)));
    t.read_mail(0);
    assert!(t.cores[0].is_at_rest());
    t.read_mail(1);
    t.round();
    assert!(t.did().ends_with(&[("drop", 3)]));
    assert!(t.cores[1].is_at_rest());
}

#[test]
fn a_core_that_stops_waits_for_word_of_every_other_core() {
    let mut t = target(2, 9);
    assert!(t.cores.iter().all(|core| !core.is_stopping() && !core.is_at_rest()));
    t.cores[0].stop(&mut t.world.host);
    t.act(0);
    assert!(t.cores[0].is_stopping() && !t.cores[1].is_stopping());
    assert!(!t.cores[0].is_at_rest(), "the other core may still send it a connection");
    t.cores[1].stop(&mut t.world.host);
    t.act(1);
    t.read_mail(0);
    assert!(t.cores[0].is_at_rest());
}

#[test]
fn a_core_that_stops_keeps_a_queue_that_is_connected_meanwhile() {
    let mut t = target(2, 9);
    let cntlid = t.admin(1);
    t.queue(2, 1, cntlid);
    // Both are kept for now, because an answer is still to be sent.
    t.takes = false;
    t.send(1, peer::identify(1, 1, 0), &[]);
    t.send(2, peer::read(1, 1, 0, 1), &[]);
    t.accept(3);
    t.receive(3, &peer::icreq(Digests::default(), 0));
    t.did();
    t.cores[0].stop(&mut t.world.host);
    t.act(0);
    assert!(t.did().ends_with(&[("end moves", 0)]), "it has promised to move none");
    t.takes_again(3);
    assert_eq!(t.next(3).expect("an ICResp").kind, 0x01);
    assert_eq!(t.connect(3, 2, cntlid).status, 0);
    assert!(!t.did().contains(&("hand over", 3)));
}

#[test]
fn a_drive_never_has_more_operations_than_its_depth() {
    let mut bounded = BoundedDevice::new(Box::new(Drive::default()), 2, <[u8]>::to_vec);
    bounded.holds = true;
    for op in 0..7 {
        assert!(matches!(bounded.read(op, op, 1), Submitted::Pending));
    }
    let mut done = Vec::new();
    for waiting in [5, 3, 1, 0] {
        assert!(bounded.pending.len() <= 2);
        assert_eq!(bounded.in_flight() - bounded.pending.len(), waiting);
        bounded.poll(0, &mut done);
    }
    assert_eq!(done.iter().map(|done| done.op).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6]);
}

/// A drive may hold writes of epochs back until an earlier epoch arrives. They keep no other operation
/// waiting, which may have the place in the host's queue that the earlier epoch needs.
#[test]
fn what_a_drive_holds_back_for_an_epoch_leaves_its_depth_to_others() {
    let mut bounded = BoundedDevice::new(Box::new(Drive::default()), 2, <[u8]>::to_vec);
    bounded.holds = true;
    let epoch = |epoch| EpochId { stream: 1, epoch };
    for op in 0..3 {
        let own = epoch(op as u16 + 1);
        let order = WriteOrder::Epochs(EpochWrite { own, follower: None, barrier: true });
        let data = Data::Borrowed(&[0; 4096][..]);
        assert!(matches!(bounded.write_in_order(op, op, data, order), Submitted::Pending));
    }
    assert!(matches!(bounded.start_stream(3, epoch(0)), Submitted::Pending));
    // The same number again: these operations belong to no command.
    assert!(matches!(bounded.start_stream(3, epoch(0)), Submitted::Pending));
    for op in 4..7 {
        assert!(matches!(bounded.read(op, op, 1), Submitted::Pending));
    }
    assert_eq!((bounded.pending.len(), bounded.in_flight()), (7, 8), "two reads, one waits");
    let mut done = Vec::new();
    bounded.poll(0, &mut done);
    assert_eq!(done.iter().map(|done| done.op).collect::<Vec<_>>(), [0, 1, 2, 3, 3, 4, 5]);
    bounded.poll(0, &mut done);
    assert_eq!((bounded.in_flight(), done.len()), (0, 8));
    // As many as the depth again, and no more.
    for op in 0..3 {
        assert!(matches!(bounded.read(op, op, 1), Submitted::Pending));
    }
    assert_eq!((bounded.pending.len(), bounded.in_flight()), (2, 3));
}

/// A write with FUA that waits for a place in the drive's queue keeps its FUA.
#[test]
fn what_is_to_be_durable_stays_so_while_it_waits() {
    let mut bounded = BoundedDevice::new(Box::new(Drive::default()), 1, <[u8]>::to_vec);
    (bounded.holds, bounded.has_fua) = (true, true);
    assert!(bounded.has_fua(), "as the drive");
    assert!(matches!(bounded.write_durably(0, 0, Data::Borrowed(&block(1))), Submitted::Pending));
    assert!(matches!(bounded.write_durably(1, 1, Data::Borrowed(&block(2))), Submitted::Pending));
    assert!(matches!(bounded.zero_durably(2, 0, 1, true), Submitted::Pending));
    assert!(matches!(bounded.zero_durably(3, 7, 1, false), Submitted::Pending));
    assert!(bounded.take_back(3), "the drive has not been given it");
    let mut done = Vec::new();
    for _ in 0..3 {
        bounded.poll(0, &mut done);
    }
    assert_eq!(done.iter().map(|done| done.op).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!((bounded.durable, bounded.block(1)), (3, block(2)));
    assert_eq!(bounded.history.last(), Some(&(0, What::Zero { blocks: 1, deallocate: true })));
}

#[test]
fn what_a_drive_has_not_been_given_is_taken_back() {
    let mut bounded = BoundedDevice::new(Box::new(Drive::default()), 1, <[u8]>::to_vec);
    bounded.holds = true;
    assert!(matches!(bounded.write(0, 0, Data::Borrowed(&block(1))), Submitted::Pending));
    assert!(matches!(bounded.read(1, 1, 1), Submitted::Pending));
    assert!(matches!(bounded.write(2, 2, Data::Borrowed(&block(2))), Submitted::Pending));
    assert!(matches!(bounded.write_zeroes(3, 3, 1), Submitted::Pending));
    assert!(matches!(bounded.deallocate(4, 4, 1), Submitted::Pending));
    assert!(matches!(bounded.flush(5), Submitted::Pending));
    let ordered = WriteOrder::Ordered { barrier: false };
    let data = Data::Borrowed(&[0; 4096][..]);
    assert!(matches!(bounded.write_in_order(6, 6, data, ordered), Submitted::Pending));
    assert!(matches!(bounded.read(7, 7, 1), Submitted::Pending));
    assert!(!bounded.take_back(0), "the drive has it");
    assert!(!bounded.take_back(5), "a FLUSH");
    assert!(!bounded.take_back(6), "a write in an order");
    assert!(!bounded.take_back(99), "there is none");
    for op in [3, 1, 4, 2] {
        assert!(bounded.take_back(op));
        assert!(!bounded.take_back(op), "once");
    }
    assert_eq!(bounded.in_flight(), 4);
    let mut done = Vec::new();
    for _ in 0..4 {
        bounded.poll(0, &mut done);
    }
    assert_eq!(done.iter().map(|done| done.op).collect::<Vec<_>>(), [0, 5, 6, 7]);
    assert_eq!((bounded.in_flight(), bounded.block(2)), (0, vec![0; 4096]));
}

#[test]
fn a_drive_is_given_so_many_operations_at_once_and_the_rest_in_order() {
    let mut bounded = BoundedDevice::new(Box::new(Drive::default()), 2, <[u8]>::to_vec);
    bounded.holds = true;
    let bytes = [block(0), block(1), block(2)];
    for (op, bytes) in (0..).zip(&bytes) {
        let submitted = bounded.write(op, op, Data::Borrowed(bytes));
        assert!(matches!(submitted, Submitted::Pending));
    }
    // A later operation overtakes none, also once there is space.
    assert!(matches!(bounded.flush(3), Submitted::Pending));
    assert_eq!((bounded.pending.len(), bounded.in_flight()), (2, 4));
    let mut done = Vec::new();
    bounded.poll(0, &mut done);
    assert_eq!(done.iter().map(|done| done.op).collect::<Vec<_>>(), [0, 1]);
    let waited: Vec<_> = bounded.pending.iter().map(|pending| pending.op.0).collect();
    assert_eq!(waited, [2, 3]);
    bounded.poll(0, &mut done);
    assert_eq!(bounded.in_flight(), 0);
    assert_eq!(bounded.block(2), block(2), "the bytes were kept");
    // An operation that ends within the call ends with the poll.
    assert!(matches!(bounded.read(4, 2, 1), Submitted::Pending));
    assert!(matches!(bounded.read(5, 2, 1), Submitted::Pending));
    assert!(matches!(bounded.read(6, 2, 1), Submitted::Pending));
    bounded.holds = false;
    done.clear();
    bounded.poll(0, &mut done);
    assert_eq!(done.iter().map(|done| done.op).collect::<Vec<_>>(), [4, 5, 6]);
    // The process that asks dies.
    bounded.holds = true;
    for op in 7..10 {
        assert!(matches!(bounded.flush(op), Submitted::Pending));
    }
    bounded.forget_waiting();
    assert_eq!(bounded.in_flight(), 2);
}

/// The last step of an authentication may be the end of an exponentiation, which comes as a notice.
#[test]
fn t28_a_host_that_is_admitted_by_a_notice_counts_as_admitted() {
    let mut t = target_with(1, 99, PendingLimits { per_address: 1, total: 9 });
    let secret = DhchapSecret::new(&[7; 32], None).unwrap();
    let rules =
        AuthRules { groups: vec![GroupId::Ffdhe2048], ..AuthRules::new(|bytes| bytes.fill(9)) };
    let hosts = [(HOSTNQN.to_owned(), HostAccess::BySecret(secret.clone()))].into();
    let access = Access { hosts: Some(hosts), rules: Some(rules), ..Access::default() };
    t.env().shared.set_access(Arc::new(access));
    t.open(1);
    assert_eq!(t.connect(1, 0, 0xffff).status, 0);
    let secrets = HostSecrets { host: secret, controller: None, random: |bytes| bytes.fill(5) };
    let (mut host, mut message) = HostAuth::begin(Arc::new(secrets), HOSTNQN, SUBNQN);
    loop {
        let len = message.len() as u32;
        let send = riopipe_bytes(&Sqe::auth_send(len)).cid(1).inline(len);
        assert_eq!(t.call(1, send, &message).status, 0);
        t.send(1, riopipe_bytes(&Sqe::auth_receive(4096)).cid(2).transport(4096), &[]);
        assert!(t.next(1).is_none(), "it waits for the exponentiation");
        t.read_mail(0);
        let received = t.next(1).expect("a message").data;
        assert_eq!(t.next(1).expect("an answer").completion().status, 0);
        match host.on_received(&received) {
            Ok(HostStep::SendAndReceive(next)) => message = next,
            Ok(HostStep::Done) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(*t.admitted.lock().unwrap(), [1]);
    t.did();
    // It gives way to no other one.
    t.accept(2);
    assert_eq!(t.did(), [("watch", 2)]);
}

/// A key of TLS proves one host for one subsystem, and a host that has a key must use it.
#[test]
fn a_connection_is_for_the_owner_of_its_key_and_a_host_with_a_key_needs_one() {
    const OTHER: &str = "nqn.2026-01.io.example:other";
    const INVALID_HOST: u16 = 0x184;
    let owner = |hostnqn: &str, subnqn: &str| {
        Some(KeyOwner { hostnqn: hostnqn.to_owned(), subnqn: subnqn.to_owned() })
    };
    // The owner of the key by which the connection is secured; the host and the subsystem of Connect; whether it is
    // admitted.
    let cases = [
        (owner(HOSTNQN, SUBNQN), HOSTNQN, SUBNQN, true),
        (owner(HOSTNQN, SUBNQN), OTHER, SUBNQN, false),
        (owner(HOSTNQN, peer::DISCOVERY_NQN), HOSTNQN, SUBNQN, false),
        (owner(HOSTNQN, peer::DISCOVERY_NQN), HOSTNQN, peer::DISCOVERY_NQN, true),
        (owner(HOSTNQN, SUBNQN), HOSTNQN, peer::DISCOVERY_NQN, false),
        (owner(OTHER, SUBNQN), OTHER, SUBNQN, true),
        (None, HOSTNQN, SUBNQN, false),
        (None, HOSTNQN, peer::DISCOVERY_NQN, true),
        (None, OTHER, SUBNQN, true),
    ];
    for (number, (secured_by, hostnqn, subnqn, is_admitted)) in cases.into_iter().enumerate() {
        let mut t = target(1, 9);
        let hosts = [HOSTNQN, OTHER].map(|host| (host.to_owned(), HostAccess::ByName));
        let tls_hosts = [HOSTNQN.to_owned()].into();
        let access = Access { hosts: Some(hosts.into()), rules: None, tls_hosts };
        t.env().shared.set_access(Arc::new(access));
        t.accept(1);
        if let Some(owner) = secured_by {
            let (core, key) = t.places[&1];
            t.cores[core].secured(key, owner);
        }
        t.receive(1, &peer::icreq(Digests::default(), 0));
        assert_eq!(t.next(1).expect("an ICResp").kind, 0x01);
        let data = peer::connect_data(subnqn, hostnqn, HOSTID, 0xffff);
        let status = t.call(1, peer::connect(0, 0, 31, 0), &data).status;
        let refused = status & 0x7ff == INVALID_HOST;
        assert_eq!((status == 0, refused), (is_admitted, !is_admitted), "{number}: {status:#x}");
    }
}

/// A Connect that names the discovery subsystem proves nothing. So no I/O queue goes through it: it would be
/// one of a controller of another subsystem, with its rights.
#[test]
fn no_io_queue_is_connected_through_the_discovery_subsystem() {
    let mut t = target(1, 9);
    let cntlid = t.admin(1);
    t.queue(2, 1, cntlid);
    // A queue that the host has, and one that it has not.
    for (number, qid) in [(3, 1), (4, 2)] {
        t.open(number);
        let data = peer::connect_data(peer::DISCOVERY_NQN, HOSTNQN, HOSTID, cntlid);
        let refused = t.call(number, peer::connect(0, qid, 31, 0), &data);
        assert_eq!(refused.status & 0x7ff, 0x182, "Connect Invalid Parameters");
    }
    assert_eq!(t.logged("closed"), 0, "the queue that is there stays");
    const INVALID_OPCODE: u16 = 0x001;
    assert_eq!(t.call(2, peer::identify(1, 1, 0), &[]).status & 0x7ff, INVALID_OPCODE);
}
