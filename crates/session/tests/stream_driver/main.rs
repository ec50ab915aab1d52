//! The decisions of a stream's driver between its owner's calls, its connections and the clock. The
//! targets are scripts.

mod reads;
#[path = "../stream_rig/mod.rs"]
mod stream_rig;

use std::sync::Arc;

use peer::target::{Command, Page, Script};
use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{Cause, EngineKind};
use riopipe_session::initiator::queue_pair::SessionError;
use riopipe_session::initiator::reconnect::ConnectRequest;
use riopipe_session::initiator::stream::ConnectionState;
use riopipe_session::initiator::stream_driver::{
    Closed, NotSubmitted, StartError, StartStep, StreamDriver, StreamEvent, StreamShared,
    StreamSpec, StreamStart, Until, WaitEnd,
};
use riopipe_session::stages::{ONE_IN, Stage};
use riopipe_testkit::peer;
use stream_rig::{BIND, LIST, LOSS, MARK, MS, Piece, Shape, TIMEOUT, all, log, new_queue};
use stream_rig::{status, write};

const FLUSH_NS: u64 = 1000 * MS;
const START_NS: u64 = 10_000 * MS;
const FLUSH: u8 = 0x00;
const READ: u8 = 0x02;

fn stream_shared(shape: &Shape) -> StreamShared {
    stream_rig::stream_shared(shape, &Arc::default())
}

fn start(shape: &Shape, now: u64) -> StreamStart<Piece> {
    let spec = StreamSpec {
        config: shape.config(3, 1),
        topology: shape.topology(),
        kept_bytes_max: 1 << 20,
        merge: shape.merge,
        merge_from: 0,
        qids: (0..shape.servers()).map(|server| 5 + server).collect(),
        reads_only: false,
    };
    StreamStart::new(spec, stream_shared(shape), START_NS, now)
}

/// Connects the start to every server.
fn connect(start: &mut StreamStart<Piece>, shape: &Shape, now: u64) {
    connect_from(0, start, shape, now);
}

/// The same, where `first` was the last server to connect.
fn connect_from(first: u16, start: &mut StreamStart<Piece>, shape: &Shape, now: u64) {
    let others = (0..shape.servers()).filter(|server| *server != first);
    for server in std::iter::once(first).chain(others) {
        let StartStep::Connect(request) = start.step(now) else { panic!("server {server}") };
        assert_eq!((request.server, request.qid, request.attempts), (server, 5 + server, 0));
        start.connected(server, new_queue(shape), now);
    }
}

/// Carries everything both ways until nothing moves.
fn carry(driver: &mut StreamDriver<Piece>, scripts: &mut [Script], read: &mut Vec<u8>, now: u64) {
    loop {
        driver.pump(now);
        let mut moved = false;
        for (server, script) in (0..).zip(scripts.iter_mut()) {
            let bytes = all(driver.outbox(server));
            script.take(&bytes);
            let input = std::mem::take(&mut script.output);
            moved |= !bytes.is_empty() || !input.is_empty();
            if driver.is_open(server) {
                let sink = &mut |_, at: usize, bytes: &[u8]| {
                    read.resize(read.len().max(at + bytes.len()), 0);
                    read[at..at + bytes.len()].copy_from_slice(bytes);
                };
                driver.received(server, now, &input, sink).unwrap();
            }
        }
        if !moved {
            return;
        }
    }
}

/// A stream that is bound everywhere, its targets, and a clock.
struct Rig {
    shape: Shape,
    driver: StreamDriver<Piece>,
    scripts: Vec<Script>,
    now: u64,
    read: Vec<u8>,
}

impl Rig {
    fn new(shape: Shape) -> Self {
        let now = 1 << 40;
        let mut start = start(&shape, now);
        connect(&mut start, &shape, now);
        let mut scripts: Vec<_> = (0..shape.servers()).map(|_| Script::default()).collect();
        carry(start.driver().unwrap(), &mut scripts, &mut vec![], now);
        for script in &mut scripts {
            for bind in std::mem::take(&mut script.commands) {
                assert_eq!((bind.opcode(), bind.dword(10)), (BIND, 3));
                script.answer(&bind, 0, u64::from(shape.slots) | 1 << 32);
            }
        }
        carry(start.driver().unwrap(), &mut scripts, &mut vec![], now);
        assert_eq!(start.step(now), StartStep::Ready);
        let driver = start.into_driver().unwrap();
        let mut rig = Self { shape, driver, scripts, now, read: vec![] };
        assert_eq!(rig.events(), []);
        rig
    }

    fn carry(&mut self) {
        carry(&mut self.driver, &mut self.scripts, &mut self.read, self.now);
    }

    fn events(&mut self) -> Vec<StreamEvent> {
        self.driver.pump(self.now);
        self.driver.check_connections(self.now);
        std::iter::from_fn(|| self.driver.next_event()).collect()
    }

    fn take(&mut self, server: usize) -> Vec<Command> {
        self.carry();
        std::mem::take(&mut self.scripts[server].commands)
    }

    fn take_one(&mut self, server: usize, opcode: u8) -> Command {
        let commands = self.take(server);
        assert_eq!(commands.len(), 1, "one command, not {commands:x?}");
        assert_eq!(commands[0].opcode(), opcode, "{commands:x?}");
        commands.into_iter().next().unwrap()
    }

    fn answer(&mut self, server: usize, command: &Command) {
        self.scripts[server].answer(command, 0, 0);
        self.carry();
    }

    fn submit(&mut self, lba: u64) -> Seq {
        self.driver.admit(&mut [write(lba, lba)], 0, false).unwrap()
    }

    /// Submits a group and has it completed.
    fn write(&mut self, lba: u64) -> Command {
        self.submit(lba);
        let command = self.take_one(0, 1);
        self.answer(0, &command);
        self.driver.marks().unwrap();
        command
    }

    fn background_due(&mut self) -> Option<u64> {
        self.carry();
        self.driver.marks().unwrap();
        self.driver.finish_background_rounds(false, FLUSH_NS, self.now)
    }
}

fn request(server: u16, attempts: u32) -> ConnectRequest {
    let stream = StreamId(3);
    ConnectRequest { stream, server, link: server, qid: 5 + server, depth: 24, attempts }
}

/// The list of the stream's log with these entries, of which none is released.
fn page(entries: Vec<[u8; 64]>) -> Page {
    let (volume, stream) = (stream_rig::VOLUME.0, 3);
    Page { volume, stream, more: false, settled: false, released: 0, next: 0, entries }
}

fn refused(status: Status) -> Option<SessionError> {
    Some(SessionError::Refused { qid: 5, subnqn: "nqn".into(), status, result: 0 })
}

#[test]
fn t8_a_start_waits_until_the_last_connection_has_come_to_its_end() {
    let shape = Shape::of(2, false);
    let mut start = start(&shape, 0);
    connect(&mut start, &shape, 0);
    assert_eq!(start.step(0), StartStep::Drive);
    assert!(start.driver().is_some());
    start.failed(1, refused(Status::CONNECT_BUSY), 7);
    assert!(start.driver().is_none());
    assert_eq!(start.step(8), StartStep::Pause(7 + 5 * MS));
    assert_eq!(start.deadline(8), 7 + 5 * MS);
    connect_from(1, &mut start, &shape, 7 + 5 * MS);
    assert_eq!(start.step(7 + 5 * MS), StartStep::Drive, "on new connections");
    // When the time is over the reason is reported.
    start.failed(1, refused(Status::CONNECT_BUSY), START_NS);
    let error = refused(Status::CONNECT_BUSY);
    let ended = StartStep::Failed(StartError::Ended { server: 1, error });
    assert_eq!(start.step(START_NS), ended);
    assert!(start.into_driver().is_none());
}

#[test]
fn a_start_over_an_association_that_has_ended_is_tried_again() {
    let shape = Shape::of(2, false);
    let mut start = start(&shape, 0);
    start.association_ended(0, 0);
    let StartStep::Connect(first) = start.step(0) else { panic!("nothing has begun there") };
    assert_eq!(first.server, 0);
    start.connected(0, new_queue(&shape), 0);
    start.association_ended(1, 0);
    let StartStep::Connect(second) = start.step(0) else { panic!("nothing has begun there") };
    assert_eq!(second.server, 1);
    start.association_ended(0, 3);
    assert_eq!(start.step(3), StartStep::Pause(3 + 5 * MS));
    connect(&mut start, &shape, 3 + 5 * MS);
    assert_eq!(start.step(3 + 5 * MS), StartStep::Drive);
    start.association_ended(1, 9 * MS);
    assert_eq!(start.step(9 * MS), StartStep::Pause(14 * MS));
    connect_from(1, &mut start, &shape, 14 * MS);
    start.association_ended(1, START_NS);
    let ended = StartError::Ended { server: 1, error: None };
    assert_eq!(start.step(START_NS), StartStep::Failed(ended));
}

#[test]
fn a_start_fails_when_a_connection_is_refused_for_good() {
    let shape = Shape::of(1, false);
    for error in [refused(Status::CONNECT_INVALID_HOST), Some(SessionError::Closed)] {
        let mut start = start(&shape, 0);
        connect(&mut start, &shape, 0);
        start.failed(0, error.clone(), 1);
        assert_eq!(start.step(1), StartStep::Failed(StartError::Ended { server: 0, error }));
    }
    let mut start = start(&shape, 0);
    connect(&mut start, &shape, 0);
    start.give_up(0);
    let ended = StartError::Ended { server: 0, error: None };
    assert_eq!(start.step(1), StartStep::Failed(ended));
}

#[test]
fn a_start_waits_for_an_unreachable_target_and_begins_with_it() {
    let shape = Shape::of(3, false);
    let mut start = start(&shape, 0);
    connect(&mut start, &shape, 0);
    // It has closed the connection without an answer, as a target does that dies.
    start.failed(2, None, 1);
    assert_eq!(start.deadline(1), 1, "the connections are to be closed at once");
    // However late the step is asked for, that comes first.
    assert_eq!(start.step(9 * MS), StartStep::Pause(1 + 5 * MS));
    let StartStep::Connect(request) = start.step(9 * MS) else { panic!("it is time") };
    assert_eq!(request.server, 2);
    start.put_off(2, 9 * MS);
    assert_eq!(start.step(9 * MS), StartStep::Pause(14 * MS));
    connect_from(2, &mut start, &shape, 14 * MS);
    assert_eq!(start.step(14 * MS), StartStep::Drive);
    start.failed(2, None, START_NS);
    let ended = StartError::Ended { server: 2, error: None };
    assert_eq!(start.step(START_NS), StartStep::Failed(ended));
}

#[test]
fn t27_an_error_on_an_association_that_has_ended_means_nothing_for_the_next() {
    let shape = Shape::of(2, false);
    let mut start = start(&shape, 0);
    connect(&mut start, &shape, 0);
    // The controller that it names is not there any more.
    start.failed(1, refused(Status::CONNECT_INVALID_HOST), 1);
    start.association_ended(1, 2);
    assert_eq!(start.step(2), StartStep::Pause(2 + 5 * MS));
    connect_from(1, &mut start, &shape, 2 + 5 * MS);
    start.failed(1, refused(Status::CONNECT_INVALID_HOST), 6 * MS);
    start.association_ended(0, 6 * MS);
    let error = refused(Status::CONNECT_INVALID_HOST);
    let ended = StartError::Ended { server: 1, error };
    assert_eq!(start.step(6 * MS), StartStep::Failed(ended), "it was met on another");
}

#[test]
fn t27_a_stream_is_not_handed_out_over_an_association_that_has_ended() {
    let shape = Shape::of(1, false);
    let mut start = start(&shape, 0);
    connect(&mut start, &shape, 0);
    let mut scripts = vec![Script::default()];
    carry(start.driver().unwrap(), &mut scripts, &mut vec![], 0);
    let bind = scripts[0].commands.remove(0);
    scripts[0].answer(&bind, 0, u64::from(shape.slots) | 1 << 32);
    carry(start.driver().unwrap(), &mut scripts, &mut vec![], 0);
    // The target's next incarnation binds it.
    start.association_ended(0, 7);
    assert_eq!(start.step(7), StartStep::Pause(7 + 5 * MS));
    assert!(start.into_driver().is_none());
}

#[test]
fn a_start_is_given_up_when_its_time_is_over_or_a_target_owes_an_answer() {
    let shape = Shape::of(2, false);
    let mut started = start(&shape, 5);
    let StartStep::Connect(_) = started.step(5) else { panic!() };
    let late = |server, after_ns| StartStep::Failed(StartError::TimedOut { server, after_ns });
    let mut one = start(&shape, 5);
    connect(&mut one, &shape, 5);
    assert_eq!(one.deadline(5), 5 + TIMEOUT);
    assert_eq!(one.step(4 + TIMEOUT), StartStep::Drive);
    assert_eq!(one.step(5 + TIMEOUT), late(0, TIMEOUT));
    // A target that is busy all the time answers, and that is all.
    let mut scripts = vec![Script::default(), Script::default()];
    let mut busy = start(&shape, 5);
    connect(&mut busy, &shape, 5);
    let mut now = 5;
    while now < START_NS {
        carry(busy.driver().unwrap(), &mut scripts, &mut vec![], now);
        for script in &mut scripts {
            for bind in std::mem::take(&mut script.commands) {
                script.answer(&bind, status::STREAM_BUSY, 0);
            }
        }
        carry(busy.driver().unwrap(), &mut scripts, &mut vec![], now);
        assert_eq!(busy.step(now), StartStep::Drive);
        now = busy.deadline(now);
    }
    assert_eq!(busy.step(now), late(0, START_NS));
}

#[test]
fn a_target_that_does_not_bind_the_stream_gives_the_reason() {
    let shape = Shape::of(1, false);
    let mut start = start(&shape, 0);
    connect(&mut start, &shape, 0);
    let mut scripts = vec![Script::default()];
    carry(start.driver().unwrap(), &mut scripts, &mut vec![], 0);
    let bind = scripts[0].commands.remove(0);
    scripts[0].answer(&bind, status::UNRECOVERED, 0);
    carry(start.driver().unwrap(), &mut scripts, &mut vec![], 0);
    let StartStep::Failed(StartError::Refused(refused)) = start.step(0) else { panic!() };
    assert_eq!((refused.server, refused.status.code()), (0, status::UNRECOVERED));
}

#[test]
fn a_start_waits_for_its_connections_until_the_time_is_over() {
    let mut start = start(&Shape::of(1, false), 5);
    let StartStep::Connect(_) = start.step(5) else { panic!("nothing is connected") };
    assert_eq!(start.step(4 + START_NS), StartStep::Drive);
    assert!(start.driver().is_none());
    let late = StartError::TimedOut { server: 0, after_ns: START_NS };
    assert_eq!(start.step(5 + START_NS), StartStep::Failed(late));
}

#[test]
fn a_stream_that_is_not_bound_yet_is_not_handed_out() {
    let shape = Shape::of(1, false);
    let mut start = start(&shape, 0);
    connect(&mut start, &shape, 0);
    assert!(start.driver().is_some());
    assert!(start.into_driver().is_none());
}

#[test]
fn t27_a_refusal_on_an_association_that_has_ended_is_asked_for_again() {
    let shape = Shape::of(2, false);
    for (ended, at, begins_again) in
        [(0, 7, true), (1, 7, false), (0, START_NS, false), (1, START_NS, false)]
    {
        let mut start = start(&shape, 0);
        connect(&mut start, &shape, 0);
        let mut scripts = vec![Script::default(), Script::default()];
        carry(start.driver().unwrap(), &mut scripts, &mut vec![], 0);
        let bind = scripts[0].commands.remove(0);
        scripts[0].answer(&bind, status::UNRECOVERED, 0);
        carry(start.driver().unwrap(), &mut scripts, &mut vec![], 0);
        let refused = start.step(0);
        assert!(matches!(refused, StartStep::Failed(StartError::Refused(_))), "{refused:?}");
        start.association_ended(ended, at);
        let expected = if begins_again { StartStep::Pause(at + 5 * MS) } else { refused };
        assert_eq!(start.step(at), expected, "association {ended} at {at}");
    }
    // The reason of a failure stays when there is no time for another attempt.
    let mut start = start(&shape, 0);
    connect(&mut start, &shape, 0);
    let error = refused(Status::CONNECT_INVALID_HOST);
    start.failed(1, error.clone(), 1);
    start.association_ended(1, START_NS);
    let ended = StartError::Ended { server: 1, error };
    assert_eq!(start.step(START_NS), StartStep::Failed(ended));
}

#[test]
fn p7_a_lost_connection_is_closed_and_asked_for_once() {
    let mut rig = Rig::new(Shape::of(2, false));
    let sent = rig.write(0);
    rig.driver.closed(0, rig.now);
    assert!(!rig.driver.is_open(0) && rig.driver.is_open(1));
    assert!(!rig.driver.connected(0, new_queue(&rig.shape), rig.now), "it has not asked yet");
    let over = StreamEvent::ConnectionEnded { link: 0 };
    assert_eq!(rig.events(), [over, StreamEvent::Connect(request(0, 0))]);
    assert_eq!(rig.events(), [], "once");
    rig.now += 3 * MS;
    assert!(!rig.driver.connected(1, new_queue(&rig.shape), rig.now), "that one is there");
    assert!(rig.driver.connected(0, new_queue(&rig.shape), rig.now));
    assert!(!rig.driver.connected(0, new_queue(&rig.shape), rig.now), "one is enough");
    // It comes to nothing: the next request waits longer.
    rig.driver.closed(0, rig.now);
    assert_eq!(rig.events(), [over, StreamEvent::Connect(request(0, 1))]);
    rig.scripts[0] = Script::default();
    assert!(rig.driver.connected(0, new_queue(&rig.shape), rig.now));
    let bind = rig.take_one(0, BIND);
    assert_eq!(rig.events(), [], "it is not back yet, and that is looked at again");
    rig.scripts[0].answer(&bind, 0, u64::from(rig.shape.slots) | 2 << 32);
    let list = rig.take_one(0, LIST);
    rig.scripts[0].answer_data(&list, page(log(&[(sent, true)])).encode());
    rig.carry();
    rig.carry();
    assert_eq!(rig.driver.connection(0), ConnectionState::Up);
    let back = StreamEvent::Back { server: 0, unreachable_ns: 3 * MS, replayed: 0 };
    assert_eq!(rig.events(), [back]);
    // From now on it counts anew.
    rig.driver.association_ended(0, rig.now);
    assert_eq!(rig.events(), [over, StreamEvent::Connect(request(0, 0))]);
    rig.driver.association_ended(0, rig.now);
    assert_eq!(rig.events(), [], "there is no connection of it");
}

#[test]
fn p6_a_server_that_is_given_up_fails_the_stream_and_the_failure_stays_the_same() {
    let mut rig = Rig::new(Shape::of(2, false));
    rig.write(0);
    rig.driver.closed(1, rig.now);
    assert_eq!(rig.events().len(), 2);
    rig.now += LOSS;
    assert_eq!(rig.events(), [], "a stream that has failed asks for nothing");
    let failure = rig.driver.marks().unwrap_err();
    assert_eq!((failure.seq, failure.cause), (Seq(2), Cause::Disconnected));
    rig.driver.give_up(0, Cause::Changed);
    assert_eq!(rig.events(), [StreamEvent::ConnectionEnded { link: 0 }]);
    assert_eq!(rig.driver.marks(), Err(failure));
    assert_eq!(rig.driver.delivered().complete, Seq(1));
    assert_eq!(rig.driver.finish_background_rounds(true, FLUSH_NS, rig.now), None);
    assert_eq!(rig.driver.deadline(rig.now), None);
}

/// The association notices a silence late. The stream's loss timeout has begun before that.
#[test]
fn p6_a_loss_counts_from_the_last_sign_of_life_of_the_target() {
    let mut rig = Rig::new(Shape::of(2, false));
    rig.write(0);
    let since = rig.now;
    rig.now += LOSS / 2;
    rig.driver.association_ended(1, since);
    assert_eq!(rig.events().len(), 2);
    assert_eq!(rig.driver.lost_since(1), Some(since));
    rig.now = since + LOSS - 1;
    assert_eq!(rig.events(), []);
    assert!(rig.driver.marks().is_ok());
    rig.now += 1;
    rig.events();
    assert_eq!(rig.driver.marks().unwrap_err().cause, Cause::Disconnected);
    assert_eq!(rig.driver.lost_since(1), Some(since), "for the message");
}

#[test]
fn a_target_that_owes_an_answer_is_lost_when_its_time_is_over() {
    let mut rig = Rig::new(Shape::of(1, false));
    rig.submit(0);
    rig.take_one(0, 1);
    assert_eq!(rig.driver.deadline(rig.now), Some(rig.now + TIMEOUT));
    rig.now += TIMEOUT - 1;
    rig.driver.timeout(rig.now);
    assert_eq!(rig.events(), []);
    rig.now += 1;
    rig.driver.timeout(rig.now);
    assert_eq!(rig.events().len(), 2, "closed, and asked for again");
}

#[test]
fn a_wait_is_for_what_was_submitted_and_asks_for_what_it_needs() {
    let mut rig = Rig::new(Shape::of(1, true));
    rig.write(0);
    let seq = Seq(2);
    for until in [Until::Complete(seq), Until::Durable(seq)] {
        let last = Seq(1);
        assert_eq!(rig.driver.begin_wait(until), Err(NotSubmitted { seq, last }));
    }
    assert_eq!(rig.driver.begin_wait(Until::Complete(Seq(1))), Ok(()));
    assert!(rig.driver.reached(Until::Complete(Seq(1))) && !rig.driver.wants_pump());
    assert!(rig.driver.reached(Until::Idle) && !rig.driver.reached(Until::Durable(Seq(1))));
    assert_eq!(rig.driver.begin_wait(Until::Durable(Seq(1))), Ok(()));
    assert!(rig.driver.wants_pump());
    assert_eq!(rig.driver.sleeps_until(rig.now), rig.now, "a round is due at once");
    let flush = rig.take_one(0, FLUSH);
    assert!(!rig.driver.reached(Until::Idle) && !rig.driver.reached(Until::Space));
    rig.answer(0, &flush);
    rig.driver.marks().unwrap();
    assert!(rig.driver.reached(Until::Durable(Seq(1))) && rig.driver.reached(Until::Space));
    rig.driver.reclaim();
    assert!(rig.driver.reached(Until::Space), "nothing is in flight");
}

#[test]
fn t1_a_close_makes_durable_and_sends_the_mark() {
    let mut rig = Rig::new(Shape::of(1, true));
    rig.write(0);
    rig.driver.begin_close();
    assert_eq!(rig.driver.close_step(), Ok(None));
    let flush = rig.take_one(0, FLUSH);
    rig.answer(0, &flush);
    let last = rig.driver.marks().unwrap().durable;
    assert_eq!(rig.driver.close_step(), Ok(None));
    assert!(rig.driver.wants_pump(), "the mark is to be sent");
    let mark = rig.take_one(0, MARK);
    assert_eq!(mark.mark(), last.0);
    assert_eq!(rig.driver.close_step(), Ok(None));
    rig.answer(0, &mark);
    assert_eq!(rig.driver.close_step(), Ok(Some(Closed { last, released: last })));
    assert_eq!(rig.driver.close_step(), Ok(None), "reported once");
}

#[test]
fn t1_a_stream_that_its_owner_has_left_is_flushed() {
    let mut rig = Rig::new(Shape::of(1, true));
    rig.write(0);
    let begun = rig.now;
    assert_eq!(rig.background_due(), Some(begun + FLUSH_NS));
    rig.now += FLUSH_NS / 2;
    // The owner is back for a moment: the time begins anew.
    rig.write(1);
    let left = rig.now;
    assert_eq!(rig.background_due(), Some(left + FLUSH_NS));
    rig.now = left + FLUSH_NS - 1;
    assert_eq!(rig.background_due(), Some(left + FLUSH_NS));
    assert_eq!(rig.take(0), []);
    rig.now = left + FLUSH_NS;
    assert_eq!(rig.background_due(), Some(rig.now), "a round is due at once");
    let flush = rig.take_one(0, FLUSH);
    assert!(rig.background_due().is_some_and(|next| next == rig.now + TIMEOUT), "it is in flight");
    rig.answer(0, &flush);
    let marks = rig.driver.marks().unwrap();
    assert!(marks.durable >= Seq(2), "{marks:?}");
    assert_eq!(rig.take_one(0, MARK).mark(), marks.durable.0, "and the log may forget it");
}

/// A flush that was asked for while another one used the reserve is put in when that one is
/// delivered: when the marks are read, after everything was sent.
#[test]
fn t1_a_flush_that_the_engine_puts_in_is_sent_at_once() {
    let mut rig = Rig::new(Shape::of(1, true));
    rig.write(0);
    rig.driver.begin_wait(Until::Durable(Seq(1))).unwrap();
    let first = rig.take_one(0, FLUSH);
    rig.write(1);
    let last = rig.driver.last();
    rig.driver.begin_wait(Until::Durable(last)).unwrap();
    assert_eq!(rig.take(0), [], "one at a time");
    rig.answer(0, &first);
    assert!(!rig.driver.wants_pump());
    rig.driver.marks().unwrap();
    assert!(rig.driver.wants_pump());
    assert_eq!(rig.driver.finish_background_rounds(false, FLUSH_NS, rig.now), Some(rig.now));
    let second = rig.take_one(0, FLUSH);
    rig.answer(0, &second);
    assert!(rig.driver.marks().unwrap().durable >= last);
}

#[test]
fn a_stream_without_a_log_or_with_nothing_undurable_is_not_flushed() {
    let mut rig = Rig::new(Shape::of(1, false));
    rig.write(0);
    let mark = rig.take(0);
    assert_eq!(mark.len(), 1, "the mark: with protection what is complete is durable");
    rig.answer(0, &mark[0]);
    assert_eq!(rig.background_due(), None);

    let shape = Shape { engine: EngineKind::None, ..Shape::of(1, true) };
    let mut start = start(&shape, 0);
    connect(&mut start, &shape, 0);
    let mut scripts = vec![Script::default()];
    carry(start.driver().unwrap(), &mut scripts, &mut vec![], 0);
    assert_eq!(start.step(0), StartStep::Ready);
    let mut driver = start.into_driver().unwrap();
    driver.admit(&mut [write(0, 1)], 0, false).unwrap();
    carry(&mut driver, &mut scripts, &mut vec![], 0);
    let sent = scripts[0].commands.remove(0);
    scripts[0].answer(&sent, 0, 0);
    carry(&mut driver, &mut scripts, &mut vec![], 0);
    assert_eq!(driver.marks().unwrap().complete, Seq(1));
    assert_eq!(driver.finish_background_rounds(false, FLUSH_NS, 0), None);
}

#[test]
fn many_groups_are_sent_without_being_asked_to() {
    let mut rig = Rig::new(Shape { slots: 256, ..Shape::of(1, false) });
    for lba in 0..64 {
        assert!(!rig.driver.should_send(), "{lba} groups");
        rig.submit(lba % 32);
    }
    assert!(rig.driver.should_send());
    rig.driver.pump(rig.now);
    assert!(!rig.driver.should_send());
}

#[test]
fn p8_a_durable_group_is_to_be_sent_at_once() {
    let mut rig = Rig::new(Shape::of(1, true));
    rig.submit(0);
    assert!(!rig.driver.should_send());
    rig.driver.admit(&mut [write(1, 1)], 0, true).unwrap();
    assert!(rig.driver.should_send());
    assert!(!rig.take(0).is_empty());
    assert!(!rig.driver.should_send());
}

#[test]
fn p8_what_other_threads_want_durable_is_flushed_once_it_is_submitted() {
    let mut rig = Rig::new(Shape::of(1, true));
    rig.driver.want_durable(Seq(1));
    assert!(!rig.driver.wants_pump(), "there is nothing yet");
    rig.submit(0);
    let opcodes = |rig: &mut Rig| {
        let commands = rig.take(0);
        commands.iter().for_each(|command| rig.answer(0, command));
        rig.driver.marks().unwrap();
        commands.iter().map(Command::opcode).filter(|opcode| *opcode != MARK).collect::<Vec<_>>()
    };
    assert_eq!(opcodes(&mut rig), [1, FLUSH]);
    assert!(rig.driver.delivered().durable >= Seq(1));
    rig.submit(1);
    assert_eq!(opcodes(&mut rig), [1], "later groups are not wanted");
    let last = rig.driver.last();
    rig.driver.want_durable(last);
    assert!(rig.driver.wants_pump(), "at once");
    assert_eq!(opcodes(&mut rig), [FLUSH]);
    assert!(rig.driver.delivered().durable >= last);
    rig.driver.want_durable(Seq::ZERO);
    rig.driver.want_durable(last);
    assert!(!rig.driver.wants_pump(), "asked for once");
}

#[test]
fn a_wait_ends_with_what_comes_first() {
    let mut rig = Rig::new(Shape::of(1, false));
    let (now, deadline) = (rig.now, Some(rig.now + 5));
    let step = |rig: &mut Rig, until, now| rig.driver.wait_step(until, deadline, || now);
    assert_eq!(step(&mut rig, Until::Woken, now), None);
    assert_eq!(step(&mut rig, Until::Woken, now + 5), Some(WaitEnd::Deadline));
    assert_eq!(rig.driver.wait_step(Until::Woken, None, || unreachable!()), None);
    // A call ends any wait, once, but counts less than what is waited for.
    rig.driver.wake();
    assert_eq!(step(&mut rig, Until::Idle, now + 5), Some(WaitEnd::Reached));
    assert_eq!(rig.driver.wait_step_unwoken(Until::Moved, deadline, || now), None);
    let ended = rig.driver.wait_step_unwoken(Until::Idle, deadline, || now);
    assert_eq!(ended, Some(WaitEnd::Reached));
    let ended = rig.driver.wait_step_unwoken(Until::Moved, deadline, || now + 5);
    assert_eq!(ended, Some(WaitEnd::Deadline));
    assert_eq!(step(&mut rig, Until::Moved, now + 5), Some(WaitEnd::Woken));
    assert_eq!(step(&mut rig, Until::Moved, now), None);
    rig.driver.wake();
    rig.driver.wake();
    assert_eq!(step(&mut rig, Until::Woken, now), Some(WaitEnd::Reached));
    assert_eq!(step(&mut rig, Until::Woken, now), None);
    // Any mark that has moved since the last report to the owner.
    rig.write(0);
    rig.driver.marks().unwrap();
    assert_eq!(step(&mut rig, Until::Moved, now), Some(WaitEnd::Reached));
    rig.driver.marks_reported();
    assert_eq!(step(&mut rig, Until::Moved, now), None);
}

#[test]
fn a_wait_for_space_ends_when_buffers_are_free_that_were_not_before() {
    let mut rig = Rig::new(Shape::of(1, false));
    rig.submit(0);
    rig.submit(1);
    let commands = rig.take(0);
    let has_space = |rig: &Rig| rig.driver.reached(Until::Space);
    assert!(!has_space(&rig));
    rig.answer(0, &commands[0]);
    rig.driver.marks().unwrap();
    assert!(has_space(&rig), "the first group is complete, the second is not");
    rig.driver.reclaim();
    assert!(!has_space(&rig), "its buffers have been reclaimed");
    rig.answer(0, &commands[1]);
    rig.driver.marks().unwrap();
    assert!(has_space(&rig));
}

#[test]
fn a_close_that_is_given_up_ends_nothing_later() {
    let mut rig = Rig::new(Shape::of(1, false));
    rig.write(0);
    rig.driver.begin_close();
    rig.driver.give_up_close();
    for _ in 0..3 {
        rig.driver.marks().unwrap();
        assert_eq!(rig.driver.close_step(), Ok(None));
        for command in rig.take(0) {
            rig.answer(0, &command);
        }
    }
    // What is submitted now is not part of a close.
    rig.write(1);
    assert_eq!(rig.driver.close_step(), Ok(None));
}

#[test]
fn a_close_that_is_given_up_leaves_the_stream_as_it_was() {
    let mut rig = Rig::new(Shape::of(1, false));
    rig.submit(0);
    let write = rig.take_one(0, 1);
    rig.driver.begin_close();
    assert_eq!(rig.driver.close_step(), Ok(None));
    rig.driver.give_up_close();
    rig.answer(0, &write);
    rig.driver.marks().unwrap();
    assert_eq!(rig.driver.close_step(), Ok(None), "it is not being closed");
    let mark = rig.take_one(0, MARK);
    rig.answer(0, &mark);
    rig.write(1);
    rig.driver.marks().unwrap();
    rig.driver.begin_close();
    assert_eq!(rig.driver.close_step(), Ok(None));
    let mark = rig.take_one(0, MARK);
    rig.answer(0, &mark);
    let closed = Closed { last: Seq(2), released: Seq(2) };
    assert_eq!(rig.driver.close_step(), Ok(Some(closed)));
}

#[test]
fn p7_the_requests_that_were_sent_again_are_counted() {
    let mut rig = Rig::new(Shape::of(1, false));
    assert_eq!(rig.driver.replayed(), 0);
    let mut logged = vec![];
    for sent_again in 1..3 {
        rig.submit(sent_again);
        rig.take_one(0, 1);
        rig.driver.closed(0, rig.now);
        rig.events();
        rig.scripts[0] = Script::default();
        assert!(rig.driver.connected(0, new_queue(&rig.shape), rig.now));
        let bind = rig.take_one(0, BIND);
        rig.scripts[0].answer(&bind, 0, u64::from(rig.shape.slots) | 2 << 32);
        let list = rig.take_one(0, LIST);
        rig.scripts[0].answer_data(&list, page(log(&logged)).encode());
        let again = rig.take_one(0, 1);
        assert_eq!(rig.driver.replayed(), sent_again);
        rig.answer(0, &again);
        let back = StreamEvent::Back { server: 0, unreachable_ns: 0, replayed: 1 };
        assert_eq!(rig.events(), [back], "the event counts those of this loss");
        logged.push((again, true));
    }
}

#[test]
fn t16_adjacent_writes_are_merged_up_to_the_data_of_a_capsule() {
    let shape = Shape { merge: true, in_capsule: 8192, ..Shape::of(1, false) };
    let mut rig = Rig::new(shape);
    rig.driver.admit(&mut [0, 1, 2, 3].map(|lba| write(lba, lba)), 0, false).unwrap();
    let blocks: Vec<_> = rig.take(0).iter().map(|write| write.data.len() / 4096).collect();
    assert_eq!(blocks, [2, 2]);
}

#[test]
fn the_driver_knows_its_stream() {
    assert_eq!(Rig::new(Shape::of(1, false)).driver.id(), StreamId(3));
}

#[test]
fn the_driver_reports_the_length_of_the_next_pdu() {
    let rig = Rig::new(Shape::of(1, false));
    // The header of a response capsule: its length is in bytes 4 to 7.
    assert_eq!(rig.driver.need(0, &[5, 0, 24, 0, 24, 0, 0, 0]), 24);
}

#[test]
fn the_driver_reports_the_time_of_traced_groups() {
    const ROUNDS: u64 = 40 * ONE_IN;
    let mut rig = Rig::new(Shape::of(1, false));
    let give_instant = |rig: &mut Rig| {
        if rig.driver.wants_instant() {
            rig.driver.instant(rig.now);
            assert!(!rig.driver.wants_instant());
        }
    };
    let mut traced = 0;
    for round in 0..ROUNDS {
        let since = rig.now;
        let is_traced = rig.driver.traces_next();
        rig.now += 5;
        let seq = rig.submit(round % 8);
        if is_traced {
            rig.driver.trace(seq, since, rig.now);
        }
        let command = rig.take_one(0, 1);
        give_instant(&mut rig);
        rig.now += 100;
        rig.answer(0, &command);
        give_instant(&mut rig);
        rig.driver.marks().unwrap();
        let now = rig.now;
        if let Some(spent) = rig.driver.traced(|| now) {
            let stages = Stage::INITIATOR.map(|stage| spent.of(stage));
            assert_eq!(stages, [5, 0, 100, 0], "admitted, sent at once, in transit");
            traced += 1;
        }
    }
    // With the first ones of the stream.
    assert!((20..380).contains(&traced), "{traced} of about 40, and the first ones");
}
