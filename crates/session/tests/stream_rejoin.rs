//! A stream whose connection is lost goes on with the next one, or reports clearly that it cannot
//! (P6, P7, P9). The targets are scripts; the test reads the bytes that are sent to them.

mod stream_rig;

use peer::target::{Command, Page, listed};
use riopipe_order::attribute::{Member, Seq};
use riopipe_order::engine::{Cause, EngineKind, Failure};
use riopipe_session::initiator::stream::{ConnectionState, ReadExtent, ReadSlot};
use riopipe_testkit::peer;
use stream_rig::{LIST, LOSS, MARK, MS, Rig, Shape, TIMEOUT, block, log, shared, status, write};

/// The slot of the reads of these tests.
const SLOT: ReadSlot = ReadSlot(0);

fn shapes(commands: &[Command]) -> Vec<Command> {
    commands.iter().map(Command::shape).collect()
}

fn names(commands: &[Command]) -> Vec<(u32, u16)> {
    commands.iter().map(Command::name).collect()
}

fn ordinals(commands: &[Command]) -> Vec<u32> {
    commands.iter().map(Command::ordinal).collect()
}

/// The failure that the stream reports.
fn failure(rig: &mut Rig) -> Failure {
    rig.session.poll().expect_err("the stream has failed")
}

#[test]
fn p7_what_the_target_lacks_is_sent_again_in_order_and_nothing_else() {
    let mut rig = Rig::new(Shape::of(1, false));
    for seq in 1..=5 {
        assert_eq!(rig.submit(&[write(seq, 100 * seq)]), seq);
    }
    let sent = rig.take(0);
    assert_eq!(ordinals(&sent), [1, 2, 3, 4, 5]);
    rig.answer(0, &sent[1], 0);
    assert_eq!(rig.marks(), (0, 0), "2 waits for 1");
    rig.cut(0);
    assert_eq!(rig.session.connection(0), ConnectionState::Down);
    assert!(rig.session.is_lost(0));
    // Groups are taken while the server is unreachable.
    rig.submit(&[write(9, 600)]);
    assert_eq!(rig.marks(), (0, 0));

    let bind = rig.rejoin(0);
    assert_eq!((bind.dword(10), bind.dword(11), bind.mark()), (1 << 31, 1, 0));
    assert_eq!(bind.sqe[48..64], [7; 16]);
    rig.bind_ok(0, &bind, 2);
    let list = rig.take_one(0, LIST);
    assert_eq!((list.mark(), list.dword(10)), (0, 64 * 65), "as much as the log can hold");
    // 1 and 2 are durable there though 1's completion was lost, 3 is there in part, 4 is lost.
    let had = [
        (sent[0].clone(), true),
        (sent[1].clone(), true),
        (sent[2].clone(), false),
        (sent[4].clone(), true),
    ];
    let page = rig.page(log(&had));
    rig.scripts[0].answer_data(&list, page.encode());
    let again = rig.take(0);
    assert_eq!(names(&again), [(3, 0), (4, 0), (6, 0)], "then what is new");
    assert_eq!(ordinals(&again), [1, 2, 3], "counted anew in each binding");
    assert_eq!(shapes(&again)[..2], [sent[2].shape(), sent[3].shape()]);
    assert_eq!(rig.session.connection(0), ConnectionState::Replaying);
    assert_eq!(rig.marks(), (2, 2), "the list makes up for a lost completion");
    for command in &again {
        rig.answer(0, command, 0);
    }
    assert_eq!(rig.session.connection(0), ConnectionState::Up);
    assert_eq!(rig.marks(), (6, 6));
}

#[test]
fn p7_without_plp_what_was_complete_is_sent_again_too() {
    let mut rig = Rig::new(Shape::of(1, true));
    for seq in 1..=2 {
        rig.submit(&[write(seq, 100 * seq)]);
    }
    let sent = rig.take(0);
    for command in &sent {
        rig.answer(0, command, 0);
    }
    assert_eq!(rig.marks(), (2, 0), "complete, not flushed");
    rig.cut(0);
    rig.back(0, 2, log(&[(sent[0].clone(), false), (sent[1].clone(), false)]));
    let again = rig.take(0);
    assert_eq!(shapes(&again), shapes(&sent));
    assert_eq!(rig.marks(), (2, 0), "P3: reported once, it stays reported");
    for command in &again {
        rig.answer(0, command, 0);
    }
    assert_eq!(rig.marks(), (2, 0));
    let seq = rig.session.admit(&mut [], 0, true).unwrap();
    let flush = rig.take_one(0, 0);
    assert_eq!(flush.ordinal(), 3, "behind the replays");
    rig.answer(0, &flush, 0);
    assert_eq!(rig.marks(), (seq.0, seq.0));
}

#[test]
fn t18_a_target_that_comes_back_with_a_smaller_queue_gets_fewer_at_once() {
    let mut rig = Rig::new(Shape::of(1, false));
    for seq in 1..=16 {
        rig.submit(&[write(seq, 100 * seq)]);
    }
    assert_eq!(rig.take(0).len(), 16);
    rig.cut(0);
    rig.shape.depth = 2;
    rig.back(0, 2, log(&[]));
    let mut again = vec![];
    while again.len() < 16 {
        let some = rig.take(0);
        assert_eq!(some.len(), 2, "as many as the queue has space for, after {again:?}");
        some.iter().for_each(|command| rig.answer(0, command, 0));
        again.extend(ordinals(&some));
    }
    assert_eq!(again, (1..=16).collect::<Vec<_>>(), "none is lost");
    assert_eq!(rig.marks(), (16, 16));
}

#[test]
fn t8_a_busy_target_is_asked_again_after_a_longer_time_each_time() {
    let mut rig = Rig::new(Shape::of(1, false));
    rig.submit(&[write(1, 1)]);
    rig.take(0);
    rig.cut(0);
    let mut bind = rig.rejoin(0);
    let mut waits = vec![];
    while waits.len() < 9 {
        rig.answer(0, &bind, status::STREAM_BUSY);
        let due = rig.session.deadline(rig.now).unwrap();
        assert_eq!(rig.session.stalled(due), None, "it is not the target's turn");
        waits.push((due - rig.now) / MS);
        rig.now = due - 1;
        assert_eq!(rig.take(0), [], "not before");
        rig.now = due;
        bind = rig.take_one(0, stream_rig::BIND);
    }
    assert_eq!(waits, [2, 4, 8, 16, 32, 64, 100, 100, 100]);
    rig.bind_ok(0, &bind, 1);
    assert_eq!(rig.take_one(0, LIST).mark(), 0);
}

#[test]
fn t8_the_first_bind_waits_for_a_busy_target_too() {
    let shape = Shape::of(1, false);
    let (failures, barrier) = shared(&shape);
    let mut rig = Rig::on(shape, 3, &failures, &barrier);
    let bind = rig.take_one(0, stream_rig::BIND);
    rig.answer(0, &bind, status::STREAM_BUSY);
    assert_eq!(rig.session.is_ready(), Ok(false));
    let due = rig.session.deadline(rig.now).unwrap();
    assert_eq!(due, rig.now + 2 * MS);
    rig.now = due;
    let bind = rig.take_one(0, stream_rig::BIND);
    assert_eq!(bind.dword(10), 3, "no resume: nothing was there before");
    rig.answer(0, &bind, status::UNRECOVERED);
    let refused = rig.session.is_ready().unwrap_err();
    assert_eq!((refused.server, refused.status.code()), (0, status::UNRECOVERED));
}

#[test]
fn a_connection_lost_before_its_first_bind_starts_anew() {
    let shape = Shape::of(1, false);
    let (failures, barrier) = shared(&shape);
    let mut rig = Rig::on(shape, 0, &failures, &barrier);
    rig.take_one(0, stream_rig::BIND);
    rig.cut(0);
    assert_eq!(rig.session.is_ready(), Ok(false));
    let queue = stream_rig::new_queue(&rig.shape);
    rig.session.rejoin(0, queue, rig.now);
    let mut rig = rig.bound(1);
    rig.submit(&[write(1, 1)]);
    let sent = rig.take(0);
    assert_eq!(ordinals(&sent), [1]);
}

#[test]
fn p6_a_target_that_will_not_have_the_stream_back_ends_it_with_its_reason() {
    use status::{LOG_LOST, NO_SUCH_STREAM, STALE_GENERATION, UNRECOVERED};
    for answered in [STALE_GENERATION, LOG_LOST, UNRECOVERED, NO_SUCH_STREAM] {
        for at_list in [false, true] {
            if at_list && answered == STALE_GENERATION {
                continue;
            }
            let mut rig = Rig::new(Shape::of(2, false));
            rig.submit(&[write(0, 1)]);
            rig.submit(&[write(1, 2)]);
            let first = rig.take(0);
            rig.answer(0, &first[0], 0);
            assert_eq!(rig.marks().0, 1);
            rig.cut(1);
            let bind = rig.rejoin(1);
            if at_list {
                rig.bind_ok(1, &bind, 1);
                let list = rig.take_one(1, LIST);
                rig.answer(1, &list, answered);
            } else {
                rig.answer(1, &bind, answered);
            }
            let cause = Cause::Status(answered);
            let expected = Failure { seq: Seq(2), member: Member(1), flush: false, cause };
            assert_eq!(failure(&mut rig), expected);
            assert_eq!(rig.session.connection(1), ConnectionState::Dead);
            assert_eq!(rig.session.wants_rejoin().count(), 0);
            assert_eq!(rig.session.deadline(rig.now), None);
            assert!(rig.session.admit(&mut [write(5, 5)], 0, false).is_err());
        }
    }
}

#[test]
fn p6_time_runs_from_the_first_loss_until_the_replay_begins() {
    // Each stage of resuming may be cut short.
    for stage in 0..4 {
        let mut rig = Rig::new(Shape::of(2, false));
        rig.submit(&[write(1, 1)]);
        let sent = rig.take(1);
        rig.cut(1);
        let lost = rig.now;
        assert_eq!(rig.session.deadline(rig.now), Some(lost + LOSS));
        rig.now += LOSS / 2;
        if stage > 0 {
            let bind = rig.rejoin(1);
            match stage {
                1 => rig.answer(1, &bind, status::STREAM_BUSY),
                2 => rig.bind_ok(1, &bind, 2),
                _ => {
                    rig.bind_ok(1, &bind, 2);
                    let list = rig.take_one(1, LIST);
                    let page = rig.page(log(&[(sent[0].clone(), false)]));
                    rig.scripts[1].answer_data(&list, page.encode());
                    rig.carry();
                }
            }
            rig.cut(1);
        }
        let since = if stage < 3 { lost } else { rig.now };
        rig.now = since + LOSS - 1;
        rig.carry();
        assert!(rig.session.poll().is_ok());
        assert_eq!(rig.session.deadline(rig.now), Some(rig.now + 1));
        rig.now += 1;
        rig.carry();
        let Failure { seq, member, cause, .. } = failure(&mut rig);
        assert_eq!((seq, member, cause), (Seq(1), Member(1), Cause::Disconnected), "stage {stage}");
    }
}

#[test]
fn p6_a_busy_target_is_not_waited_for_for_ever() {
    let mut rig = Rig::new(Shape::of(1, false));
    rig.submit(&[write(1, 1)]);
    rig.take(0);
    rig.cut(0);
    let lost = rig.now;
    let mut bind = rig.rejoin(0);
    loop {
        rig.answer(0, &bind, status::STREAM_BUSY);
        rig.now = rig.session.deadline(rig.now).unwrap();
        match rig.take(0).pop() {
            Some(next) => bind = next,
            None => break,
        }
    }
    assert_eq!(rig.now, lost + LOSS);
    assert_eq!(failure(&mut rig).cause, Cause::Status(status::STREAM_BUSY), "what kept it");
}

#[test]
fn without_time_to_come_back_a_lost_connection_is_the_end() {
    let with = |engine, loss_ns| Shape { engine, loss_ns, ..Shape::of(1, false) };
    let mut rig = Rig::new(with(EngineKind::Rio, 0));
    rig.submit(&[write(1, 1)]);
    rig.cut(0);
    assert_eq!(failure(&mut rig).cause, Cause::Disconnected);
    assert_eq!(rig.session.wants_rejoin().count(), 0);
    for engine in [EngineKind::Sync, EngineKind::None] {
        let shape = with(engine, LOSS);
        let (failures, barrier) = shared(&shape);
        let mut rig = Rig::on(shape, 0, &failures, &barrier);
        assert_eq!(rig.session.is_ready(), Ok(true));
        rig.submit(&[write(1, 1)]);
        rig.cut(0);
        assert_eq!(
            failure(&mut rig).cause,
            Cause::Disconnected,
            "{engine}: nothing to replay from"
        );
        assert_eq!(rig.session.connection(0), ConnectionState::Dead);
    }
}

#[test]
fn without_time_to_come_back_a_refusal_is_final() {
    let mut rig = Rig::new(Shape { loss_ns: 0, ..Shape::of(1, false) });
    rig.submit(&[write(1, 1)]);
    rig.submit(&[write(2, 2)]);
    let sent = rig.take(0);
    rig.answer(0, &sent[1], status::STALE_GENERATION);
    let why = failure(&mut rig);
    assert_eq!((why.seq.0, why.cause), (2, Cause::Status(status::STALE_GENERATION)));
    // A mark that was not taken affects nothing that is complete.
    let mut rig = Rig::new(Shape { loss_ns: 0, ..Shape::of(1, false) });
    rig.submit(&[write(1, 1)]);
    let sent = rig.take_one(0, 1);
    rig.answer(0, &sent, 0);
    assert_eq!(rig.marks(), (1, 1));
    let mark = rig.take_one(0, MARK);
    rig.answer(0, &mark, status::STALE_GENERATION);
    let refused = rig.session.marks_confirmed().unwrap_err();
    assert_eq!(refused.status.code(), status::STALE_GENERATION);
    assert_eq!(rig.marks(), (1, 1));
}

#[test]
fn p8_a_close_asks_each_target_again_that_refused_the_mark() {
    let mut rig = Rig::new(Shape::of(2, false));
    rig.submit(&[write(0, 1)]);
    let sent = rig.take_one(0, 1);
    rig.answer(0, &sent, 0);
    rig.marks();
    rig.session.send_marks();
    for server in 0..2 {
        let mark = rig.take_one(server, MARK);
        rig.answer(server, &mark, 0x711);
    }
    assert_eq!(rig.session.marks_confirmed().unwrap_err().status.code(), 0x711);
    rig.session.give_up_marks();
    // Another close.
    rig.session.send_marks();
    for server in 0..2 {
        assert_eq!(rig.session.marks_confirmed(), Ok(false));
        let mark = rig.take_one(server, MARK);
        assert_eq!((mark.mark(), mark.dword(10)), (1, 1), "durably");
        rig.answer(server, &mark, 0);
    }
    assert_eq!(rig.session.marks_confirmed(), Ok(true));
}

#[test]
fn p7_a_replay_that_is_cut_short_is_done_again() {
    let mut rig = Rig::new(Shape::of(1, true));
    for seq in 1..=3 {
        rig.submit(&[write(seq, seq)]);
    }
    let sent = rig.take(0);
    rig.answer(0, &sent[0], 0);
    rig.cut(0);
    rig.back(0, 2, log(&[(sent[0].clone(), false)]));
    let again = rig.take(0);
    assert_eq!(shapes(&again), shapes(&sent));
    rig.answer(0, &again[0], 0);
    rig.answer(0, &again[1], 0);
    assert_eq!(rig.marks(), (2, 0));
    rig.cut(0);
    assert_eq!(rig.session.connection(0), ConnectionState::Down);
    let all: Vec<_> = sent.iter().map(|command| (command.clone(), false)).collect();
    rig.back(0, 3, log(&all));
    let again = rig.take(0);
    assert_eq!(shapes(&again), shapes(&sent), "nothing of it is durable yet");
    assert_eq!(ordinals(&again), [1, 2, 3]);
    for command in &again {
        rig.answer(0, command, 0);
    }
    assert_eq!(rig.marks(), (3, 0));
}

#[test]
fn p7_a_long_list_comes_in_pages() {
    // Space for two entries in a page, or for three, and for no more than these in the log.
    let twos = [(0, 2, 7), (2, 4, 9), (4, 5, 0)];
    let threes = [(0, 3, 7), (3, 5, 0)];
    for (data_max, pages) in [(192, &twos[..]), (256, &threes)] {
        let mut rig = Rig::new(Shape { data_max, slots: 5, ..Shape::of(1, false) });
        for seq in 1..=5 {
            rig.submit(&[write(seq, seq)]);
        }
        let sent = rig.take(0);
        rig.cut(0);
        let bind = rig.rejoin(0);
        rig.bind_ok(0, &bind, 1);
        let mut at = 0;
        for &(from, to, next) in pages {
            let list = rig.take_one(0, LIST);
            assert_eq!((list.mark(), list.dword(10)), (at, data_max));
            let entries: Vec<_> = (from..to).map(|i| listed(&sent[i], i as u64, i != 3)).collect();
            let page = Page { more: next > 0, next, ..rig.page(entries) };
            rig.scripts[0].answer_data(&list, page.encode());
            rig.carry();
            at = next;
        }
        assert_eq!(names(&rig.take(0)), [(4, 0)]);
        assert_eq!(rig.marks(), (3, 3));
    }
}

/// A stream that has sent three groups, of which the first is released, has lost its connection and
/// gets this page from a target. Returns its failure, if it does not accept the page.
fn listed_to(change: impl Fn(&mut Page, &[Command])) -> Option<Cause> {
    let mut rig = Rig::new(Shape::of(1, false));
    rig.submit(&[write(1, 1)]);
    let first = rig.take_one(0, 1);
    rig.answer(0, &first, 0);
    assert_eq!(rig.marks(), (1, 1));
    let mark = rig.take_one(0, MARK);
    rig.answer(0, &mark, 0);
    rig.submit(&[write(2, 2)]);
    rig.submit(&[write(3, 3), write(4, 4)]);
    let mut sent = rig.take(0);
    sent.insert(0, first);
    rig.cut(0);
    let bind = rig.rejoin(0);
    assert_eq!(bind.mark(), 1, "the released mark goes along");
    rig.bind_ok(0, &bind, 2);
    let list = rig.take_one(0, LIST);
    let mut page = rig.page(log(&[(sent[1].clone(), true), (sent[2].clone(), false)]));
    page.released = 1;
    change(&mut page, &sent);
    rig.scripts[0].answer_data(&list, page.encode());
    rig.carry();
    rig.session.poll().err().map(|failure| failure.cause)
}

#[test]
fn t19_a_log_that_is_not_this_streams_is_refused() {
    assert_eq!(listed_to(|_, _| ()), None);
    assert_eq!(listed_to(|page, _| page.released = 0), None, "a mark that was lost");
    let old = |page: &mut Page, sent: &[Command]| {
        page.released = 0;
        page.entries.insert(0, listed(&sent[0], 0, false));
    };
    assert_eq!(listed_to(old), None, "what is released is of no interest");
    let twice = |page: &mut Page, sent: &[Command]| page.entries.push(listed(&sent[1], 9, false));
    assert_eq!(listed_to(twice), None, "T6: an entry that is there twice");

    let refused = |change: fn(&mut Page, &[Command])| {
        assert_eq!(listed_to(change), Some(Cause::LogMismatch));
    };
    refused(|page, _| page.volume[3] = 1);
    refused(|page, _| page.stream = 1);
    refused(|page, _| page.settled = true);
    refused(|page, _| page.released = 2);
    // Never sent: a later group, a third entry of the last one.
    refused(|page, sent| {
        let mut entry = listed(&sent[3], 9, true);
        entry[8] = 4;
        page.entries.push(entry);
    });
    // Other shapes: block, length, place, tag, member, size of the group.
    refused(|page, _| page.entries[0][24] += 1);
    refused(|page, _| page.entries[0][36] += 1);
    refused(|page, _| page.entries[0][48] ^= 4);
    refused(|page, _| page.entries[0][16] = 1);
    refused(|page, _| page.entries[0][46] = 1);
    refused(|page, _| page.entries[1][40] = 3);
}

#[test]
fn t18_a_list_that_makes_no_sense_is_refused() {
    let refused = |change: fn(&mut Page, &[Command])| {
        assert_eq!(listed_to(change), Some(Cause::LogMismatch));
    };
    // Unknown kind; a list that never ends, or gets nowhere; more than the log can hold.
    refused(|page, _| page.entries[0][47] = 9);
    refused(|page, _| (page.more, page.next) = (true, 0));
    refused(|page, _| {
        (page.more, page.next) = (true, 5);
        page.entries.clear();
    });
    let mut rig = Rig::new(Shape { data_max: 192, slots: 4, ..Shape::of(1, false) });
    rig.submit(&[write(1, 1)]);
    let sent = rig.take(0);
    rig.cut(0);
    let bind = rig.rejoin(0);
    rig.bind_ok(0, &bind, 1);
    for next in 1..=3 {
        let list = rig.take_one(0, LIST);
        let entries = vec![listed(&sent[0], 0, false); 2];
        let page = Page { more: true, next, ..rig.page(entries) };
        rig.scripts[0].answer_data(&list, page.encode());
        rig.carry();
    }
    assert_eq!(failure(&mut rig).cause, Cause::LogMismatch);
}

#[test]
fn p6_a_fenced_owner_learns_it_from_the_next_bind() {
    for answered in [status::STALE_GENERATION, status::NOT_BOUND] {
        // The old connections of an owner that came back by another association are fenced as well.
        // That alone is no reason to fail.
        let mut rig = Rig::new(Shape::of(1, false));
        rig.submit(&[write(1, 1)]);
        rig.submit(&[write(2, 2)]);
        let sent = rig.take(0);
        rig.answer(0, &sent[0], 0);
        rig.answer(0, &sent[1], answered);
        assert_eq!(rig.marks(), (1, 1));
        assert_eq!(rig.session.connection(0), ConnectionState::Down);
        rig.back(0, 1, log(&[(sent[0].clone(), true)]));
        assert_eq!(names(&rig.take(0)), [(2, 0)]);
        rig.cut(0);
        let bind = rig.rejoin(0);
        rig.answer(0, &bind, status::STALE_GENERATION);
        let expected = Cause::Status(status::STALE_GENERATION);
        assert_eq!((failure(&mut rig).cause, failure(&mut rig).seq), (expected, Seq(2)));
    }
    // Without time to come back, at once.
    let mut rig = Rig::new(Shape { loss_ns: 0, ..Shape::of(1, false) });
    rig.submit(&[write(1, 1)]);
    let sent = rig.take(0);
    rig.answer(0, &sent[0], status::STALE_GENERATION);
    assert_eq!(failure(&mut rig).cause, Cause::Status(status::STALE_GENERATION));
}

#[test]
fn data_damaged_in_transit_is_sent_again() {
    let mut rig = Rig::new(Shape::of(1, false));
    for seq in 1..=3 {
        rig.submit(&[write(seq, seq)]);
    }
    let sent = rig.take(0);
    // The target stops the stream there: the later writes have lost their predecessor.
    rig.scripts[0].answer(&sent[0], 0, 0);
    rig.scripts[0].answer(&sent[1], status::TRANSIENT_TRANSPORT, 0);
    rig.scripts[0].answer(&sent[2], status::POISONED, 0);
    rig.carry();
    assert_eq!(rig.marks(), (1, 1));
    assert_eq!(rig.session.connection(0), ConnectionState::Down);
    rig.back(0, 1, log(&[(sent[0].clone(), true)]));
    assert_eq!(shapes(&rig.take(0)), shapes(&sent[1..]));
}

#[test]
fn an_association_that_owns_nothing_any_more_wants_another_connection() {
    let mut rig = Rig::new(Shape::of(1, false));
    rig.submit(&[write(1, 1)]);
    let sent = rig.take(0);
    rig.cut(0);
    let lost = rig.now;
    let bind = rig.rejoin(0);
    rig.answer(0, &bind, status::NOT_OWNER);
    assert_eq!(
        rig.session.connection(0),
        ConnectionState::Down,
        "the owner comes back by another association"
    );
    rig.back(0, 1, vec![]);
    assert_eq!(shapes(&rig.take(0)), shapes(&sent));
    rig.cut(0);
    let bind = rig.rejoin(0);
    rig.answer(0, &bind, status::NOT_OWNER);
    rig.now = lost + LOSS;
    rig.carry();
    assert_eq!(failure(&mut rig).cause, Cause::Status(status::NOT_OWNER), "but not for ever");
}

#[test]
fn p6_other_servers_go_on_and_failures_while_one_is_unreachable_are_reported() {
    let mut rig = Rig::new(Shape::of(2, false));
    rig.submit(&[write(0, 1)]);
    rig.submit(&[write(2, 2)]);
    rig.submit(&[write(1, 3)]);
    let (first, second) = (rig.take(0), rig.take(1));
    rig.cut(1);
    rig.answer(0, &first[0], 0);
    rig.answer(0, &first[1], 0);
    assert_eq!(rig.marks(), (2, 2), "nothing of these is on the unreachable server");
    rig.submit(&[write(4, 4)]);
    let third = rig.take(0);
    let third = third.iter().find(|command| command.is_ordered()).unwrap();
    rig.answer(0, third, status::POISONED);
    let reported = failure(&mut rig);
    assert_eq!(
        (reported.seq, reported.member, reported.cause),
        (Seq(4), Member(0), Cause::Status(status::POISONED))
    );
    assert_eq!(
        rig.session.wants_rejoin().count(),
        0,
        "a failed stream has nothing to come back for"
    );
    assert_eq!(rig.session.connection(1), ConnectionState::Dead);
    drop(second);
}

#[test]
fn a_target_that_does_not_answer_is_noticed_at_every_stage() {
    let mut rig = Rig::new(Shape { loss_ns: 100 * TIMEOUT, ..Shape::of(1, false) });
    rig.submit(&[write(1, 1)]);
    let sent = rig.take(0);
    let mut stages = 0;
    let stall = |rig: &mut Rig| {
        assert_eq!(rig.session.deadline(rig.now), Some(rig.now + TIMEOUT));
        assert_eq!(rig.session.stalled(rig.now + TIMEOUT - 1), None);
        assert_eq!(rig.session.stalled(rig.now + TIMEOUT), Some(0));
        rig.now += TIMEOUT;
        rig.session.lost(0, Cause::TimedOut, rig.now);
        assert_eq!(
            rig.session.stalled(rig.now + 9 * TIMEOUT),
            None,
            "there is no server to wait for"
        );
    };
    for stage in 0..5 {
        match stage {
            0 => {}
            1 => {
                let queue = stream_rig::new_queue(&rig.shape);
                rig.session.rejoin(0, queue, rig.now);
            }
            2 => drop(rig.rejoin(0)),
            3 => {
                let bind = rig.rejoin(0);
                rig.bind_ok(0, &bind, 1);
            }
            _ => rig.back(0, 1, log(&[(sent[0].clone(), false)])),
        }
        stall(&mut rig);
        stages += 1;
    }
    assert_eq!(stages, 5);
    assert!(rig.session.poll().is_ok());
}

#[test]
fn a_target_that_answers_something_is_alive() {
    let mut rig = Rig::new(Shape::of(1, false));
    rig.submit(&[write(1, 1)]);
    rig.submit(&[write(2, 2)]);
    let sent = rig.take(0);
    rig.now += TIMEOUT - 1;
    rig.answer(0, &sent[0], 0);
    rig.now += TIMEOUT - 1;
    assert_eq!(rig.session.stalled(rig.now), None);
    // A read of the socket without data is no sign that the target is alive.
    rig.now += 1;
    rig.carry();
    assert_eq!(rig.session.stalled(rig.now), Some(0));
}

#[test]
fn a_read_gets_what_was_asked_for_last_and_each_piece_in_its_place() {
    let mut rig = Rig::new(Shape { members: vec![(0, false); 2], ..Shape::of(1, false) });
    rig.session.start_read(SLOT, &[ReadExtent { lba: 4, blocks: 1 }]);
    let given_up = rig.take_one(0, 2);
    rig.session.start_read(SLOT, &[ReadExtent { lba: 0, blocks: 4 }]);
    let parts = rig.take(0);
    assert_eq!(parts.len(), 4, "one for each stripe");
    rig.scripts[0].answer_data(&given_up, block(9));
    rig.carry();
    assert!(
        rig.session.is_reading(SLOT) && rig.read.is_empty(),
        "no caller waits for that any more"
    );
    for (part, content) in parts.iter().zip(0..) {
        rig.scripts[0].answer_pieces(part, &block(content), 3000);
    }
    rig.carry();
    assert_eq!(rig.session.read_result(SLOT), Ok(()));
    assert!(!rig.session.is_reading(SLOT));
    assert_eq!(rig.read, (0..4).flat_map(block).collect::<Vec<u8>>());
    assert_eq!(rig.session.deadline(rig.now), None, "at rest");
}

#[test]
fn a_read_waits_for_its_server_without_asking_the_clock() {
    let mut rig = Rig::new(Shape::of(1, false));
    rig.cut(0);
    let lost = rig.now;
    rig.session.start_read(SLOT, &[ReadExtent { lba: 0, blocks: 1 }]);
    rig.now += MS;
    rig.carry();
    assert_eq!(rig.session.deadline(rig.now), Some(lost + LOSS));
}

#[test]
fn p9_a_read_in_flight_is_asked_again_once_the_replay_is_over() {
    let mut rig = Rig::new(Shape::of(2, true));
    rig.submit(&[write(1, 7)]);
    let sent = rig.take_one(1, 1);
    rig.answer(1, &sent, 0);
    assert_eq!(rig.marks().0, 1);
    rig.session.start_read(SLOT, &[ReadExtent { lba: 0, blocks: 2 }]);
    let (first, second) = (rig.take_one(0, 2), rig.take_one(1, 2));
    rig.cut(1);
    assert_eq!(rig.take(0), [], "there is an answer still to come");
    rig.scripts[0].answer_data(&first, block(0));
    rig.carry();
    assert!(rig.session.is_reading(SLOT));
    rig.back(1, 2, log(&[(sent.clone(), false)]));
    let again = rig.take_one(1, 1);
    assert_eq!(again.shape(), sent.shape(), "no read while the drive may lack what was delivered");
    assert!(rig.session.deadline(rig.now).is_some());
    rig.answer(1, &again, 0);
    let read = rig.take_one(1, 2);
    assert_eq!(read.shape(), second.shape());
    rig.scripts[1].answer_data(&read, block(7));
    rig.carry();
    assert!(!rig.session.is_reading(SLOT));
    assert_eq!(rig.session.read_result(SLOT), Ok(()));
    assert_eq!(rig.read, [block(0), block(7)].concat());
    // Given up in the end, it fails.
    rig.session.start_read(SLOT, &[ReadExtent { lba: 1, blocks: 1 }]);
    rig.take_one(1, 2);
    rig.session.give_up(1, Cause::Disconnected);
    assert!(!rig.session.is_reading(SLOT));
    assert!(rig.session.read_result(SLOT).is_err());
    rig.session.start_read(SLOT, &[ReadExtent { lba: 1, blocks: 1 }]);
    assert!(!rig.session.is_reading(SLOT), "at once, from then on");
}

#[test]
fn p9_other_streams_reads_wait_until_a_stream_has_replayed() {
    let shape = Shape::of(1, true);
    let (failures, barrier) = shared(&shape);
    let mut a = Rig::on(shape.clone(), 0, &failures, &barrier).bound(1);
    let mut b = Rig::on(shape.clone(), 1, &failures, &barrier).bound(1);
    a.submit(&[write(1, 7)]);
    let sent = a.take_one(0, 1);
    a.answer(0, &sent, 0);
    assert_eq!(a.marks().0, 1);
    let reads = |rig: &mut Rig| {
        rig.session.start_read(SLOT, &[ReadExtent { lba: 1, blocks: 1 }]);
        let commands = rig.take(0);
        assert!(commands.iter().all(|command| command.opcode() == 2));
        if let Some(read) = commands.first() {
            rig.scripts[0].answer_data(read, block(7));
            rig.carry();
        } else {
            let due = rig.session.deadline(rig.now).expect("it checks again by and by");
            assert!(due <= rig.now + 10 * MS);
        }
        !commands.is_empty()
    };
    assert!(reads(&mut b));
    a.cut(0);
    assert!(!reads(&mut b), "a has lost its connection");
    a.back(0, 1, log(&[(sent.clone(), false)]));
    let again = a.take_one(0, 1);
    assert!(!reads(&mut b), "a replays");
    a.answer(0, &again, 0);
    assert!(reads(&mut b));

    // The target has restarted, and b notices first.
    b.cut(0);
    assert!(!reads(&mut a));
    b.back(0, 2, vec![]);
    assert_eq!(b.session.connection(0), ConnectionState::Up);
    assert!(!reads(&mut b), "what a has delivered may be gone");
    a.cut(0);
    assert!(!reads(&mut b));
    a.back(0, 2, log(&[(sent.clone(), false)]));
    assert!(!reads(&mut b));
    let again = a.take(0);
    let again = again.iter().find(|command| command.is_ordered()).unwrap();
    a.answer(0, again, 0);
    assert!(reads(&mut b));
    assert!(reads(&mut a));

    // A stream that fails, or is dropped, is waited for no longer.
    a.cut(0);
    assert!(!reads(&mut b));
    a.session.give_up(0, Cause::Disconnected);
    assert!(reads(&mut b));
    let mut c = Rig::on(shape, 2, &failures, &barrier).bound(2);
    c.cut(0);
    assert!(!reads(&mut b));
    drop(c);
    assert!(reads(&mut b));
    // Nor is one that fails by itself.
    let mut d = Rig::on(b.shape.clone(), 3, &failures, &barrier).bound(2);
    d.submit(&[write(5, 5)]);
    let sent = d.take_one(0, 1);
    d.answer(0, &sent, status::POISONED);
    failure(&mut d);
    d.cut(0);
    assert!(reads(&mut b));
}

#[test]
fn p9_a_replay_waits_for_reads_in_flight() {
    let shape = Shape::of(1, true);
    let (failures, barrier) = shared(&shape);
    let mut a = Rig::on(shape.clone(), 0, &failures, &barrier).bound(1);
    let mut b = Rig::on(shape, 1, &failures, &barrier).bound(1);
    a.submit(&[write(1, 7)]);
    let sent = a.take_one(0, 1);
    b.session.start_read(SLOT, &[ReadExtent { lba: 1, blocks: 1 }]);
    let read = b.take_one(0, 2);
    a.cut(0);
    a.back(0, 1, log(&[(sent.clone(), false)]));
    assert_eq!(a.take(0), [], "b might see older blocks over newer ones");
    assert!(a.session.deadline(a.now).unwrap() <= a.now + 10 * MS);
    b.scripts[0].answer_data(&read, block(7));
    b.carry();
    assert_eq!(a.take_one(0, 1).shape(), sent.shape());
    // A reader that loses its connection, or is dropped, reads no more.
    for lose in [true, false] {
        a.cut(0);
        a.back(0, 1, log(&[(sent.clone(), false)]));
        let again = a.take_one(0, 1);
        a.answer(0, &again, 0);
        if lose {
            b.session.start_read(SLOT, &[ReadExtent { lba: 1, blocks: 1 }]);
            b.take_one(0, 2);
            a.cut(0);
            b.cut(0);
        } else {
            b.back(0, 1, vec![]);
            let read = b.take_one(0, 2);
            a.cut(0);
            assert_eq!(read.opcode(), 2);
        }
        a.back(0, 1, log(&[(sent.clone(), false)]));
        if !lose {
            assert_eq!(a.take(0), []);
            break;
        }
        assert_eq!(a.take_one(0, 1).shape(), sent.shape());
        a.cut(0);
        a.back(0, 1, log(&[(sent.clone(), true)]));
        a.carry();
    }
    drop(b);
    assert_eq!(a.take_one(0, 1).shape(), sent.shape());
}

/// Nothing is sent then, so nothing will come, and no event would cause another check.
#[test]
fn p8_a_stream_with_nothing_to_replay_is_up_as_soon_as_no_stream_reads() {
    let shape = Shape::of(1, true);
    let (failures, barrier) = shared(&shape);
    let mut a = Rig::on(shape.clone(), 0, &failures, &barrier).bound(1);
    let mut b = Rig::on(shape, 1, &failures, &barrier).bound(1);
    b.session.start_read(SLOT, &[ReadExtent { lba: 1, blocks: 1 }]);
    let read = b.take_one(0, 2);
    a.cut(0);
    a.back(0, 1, vec![]);
    assert_eq!(a.session.connection(0), ConnectionState::Joining);
    b.scripts[0].answer_data(&read, block(7));
    b.carry();
    a.now = a.session.deadline(a.now).expect("it checks again by and by");
    a.session.pump(a.now);
    assert_eq!(a.session.connection(0), ConnectionState::Up);
    assert!(barrier.readable(0));
}

#[test]
fn p9_a_read_that_does_not_fit_the_queue_counts_like_the_rest_of_it() {
    // More drives than there are places for reads.
    let shape = Shape { members: vec![(0, true); 16], depth: 2, ..Shape::of(1, true) };
    let (failures, barrier) = shared(&shape);
    let mut a = Rig::on(shape.clone(), 0, &failures, &barrier).bound(1);
    let mut b = Rig::on(shape, 1, &failures, &barrier).bound(1);
    a.submit(&[write(1, 7)]);
    let sent = a.take_one(0, 1);
    b.session.start_read(SLOT, &[ReadExtent { lba: 0, blocks: 16 }]);
    let mut reads = b.take(0);
    assert_eq!(reads.len(), 2, "the queue depth bounds the reads");
    a.cut(0);
    a.back(0, 1, log(&[(sent.clone(), false)]));
    assert_eq!(a.take(0), [], "b reads");
    // A request that could not be sent waits for the replay now.
    let last = reads.pop().unwrap();
    for read in &reads {
        b.scripts[0].answer_data(read, block(0));
    }
    b.carry();
    assert_eq!(a.take(0), []);
    b.scripts[0].answer_data(&last, block(0));
    b.carry();
    assert_eq!(b.take(0), []);
    let again = a.take_one(0, 1);
    assert_eq!(again.shape(), sent.shape());
    assert_eq!(b.take(0), []);
    a.answer(0, &again, 0);
    assert!(!b.take(0).is_empty());
}

#[test]
fn a_stream_that_is_idle_but_not_flushed_has_no_mark_to_send() {
    let mut rig = Rig::new(Shape::of(1, true));
    rig.session.admit(&mut [write(0, 1)], 0, true).unwrap();
    let sent = rig.take_one(0, 1);
    rig.answer(0, &sent, 0);
    rig.submit(&[write(1, 2)]);
    let sent = rig.take_one(0, 1);
    rig.answer(0, &sent, 0);
    assert_eq!(rig.marks(), (2, 1));
    rig.now += 1000 * MS;
    assert_eq!(rig.take(0), []);
    assert_eq!(rig.session.deadline(rig.now), None, "and none that it would wait for");
}

#[test]
fn t1_an_idle_stream_sends_its_mark_again_after_a_loss() {
    let mut rig = Rig::new(Shape::of(2, false));
    rig.submit(&[write(0, 1)]);
    let sent = rig.take_one(0, 1);
    rig.answer(0, &sent, 0);
    assert_eq!(rig.marks(), (1, 1));
    let (mark, other) = (rig.take_one(0, MARK), rig.take_one(1, MARK));
    assert_eq!((mark.mark(), mark.dword(10)), (1, 1), "durably");
    rig.answer(1, &other, 0);
    assert_eq!(rig.session.marks_confirmed(), Ok(false));
    rig.cut(0);
    rig.back(0, 2, vec![]);
    let mark = rig.take_one(0, MARK);
    assert_eq!(mark.mark(), 1, "the first may never have got there");
    rig.answer(0, &mark, 0);
    assert_eq!(rig.session.marks_confirmed(), Ok(true));
    assert_eq!(rig.session.deadline(rig.now), None, "at rest");
    // Between two idle moments some time must pass.
    rig.submit(&[write(0, 2)]);
    let sent = rig.take_one(0, 1);
    rig.answer(0, &sent, 0);
    rig.marks();
    assert_eq!(rig.take(0), []);
    let due = rig.session.deadline(rig.now).unwrap();
    assert_eq!(due, rig.now + 50 * MS);
    rig.now = due;
    assert_eq!(rig.take_one(0, MARK).mark(), 2);
}

#[test]
fn a_close_that_loses_a_connection_sends_the_mark_on_the_next() {
    let mut rig = Rig::new(Shape::of(1, false));
    rig.submit(&[write(0, 1)]);
    let sent = rig.take_one(0, 1);
    rig.answer(0, &sent, 0);
    rig.marks();
    rig.take_one(0, MARK);
    rig.submit(&[write(0, 1)]);
    let sent = rig.take_one(0, 1);
    rig.answer(0, &sent, 0);
    rig.marks();
    rig.session.send_marks();
    assert_eq!(rig.session.marks_confirmed(), Ok(false));
    assert_eq!(rig.take_one(0, MARK).mark(), 2, "no need to wait");
    rig.cut(0);
    assert_eq!(rig.session.marks_confirmed(), Ok(false));
    rig.back(0, 2, vec![]);
    let mark = rig.take_one(0, MARK);
    rig.answer(0, &mark, 0);
    assert_eq!(rig.session.marks_confirmed(), Ok(true));
    // A target that will not take it reports that.
    let mut rig = Rig::new(Shape::of(1, false));
    rig.submit(&[write(0, 1)]);
    let sent = rig.take_one(0, 1);
    rig.answer(0, &sent, 0);
    rig.marks();
    rig.session.send_marks();
    let mark = rig.take_one(0, MARK);
    rig.answer(0, &mark, 0x711);
    assert_eq!(rig.session.marks_confirmed().unwrap_err().status.code(), 0x711);
    // Asked again on another connection, it may.
    rig.cut(0);
    rig.back(0, 2, vec![]);
    let mark = rig.take_one(0, MARK);
    rig.answer(0, &mark, 0);
    assert_eq!(rig.session.marks_confirmed(), Ok(true));
    // A stream that another connection has meanwhile taken over loses this one.
    rig.submit(&[write(0, 1)]);
    let sent = rig.take_one(0, 1);
    rig.answer(0, &sent, 0);
    rig.marks();
    let mark = rig.take_one(0, MARK);
    rig.answer(0, &mark, status::STALE_GENERATION);
    assert_eq!(rig.session.connection(0), ConnectionState::Down);
}

#[test]
fn nothing_of_a_lost_connection_is_sent_or_accepted() {
    let mut rig = Rig::new(Shape { in_capsule: 0, ..Shape::of(1, false) });
    assert_eq!(rig.session.need(0, &[5, 0, 24, 0, 24, 0, 0, 0]), 24);
    rig.session.admit(&mut [write(1, 5)], 0, false).unwrap();
    rig.session.pump(rig.now);
    assert!(!rig.session.outbox(0).is_empty());
    rig.cut(0);
    assert!(rig.session.outbox(0).is_empty());
    assert_eq!(rig.session.in_flight(0), 0);
    assert!(rig.session.receive(0, rig.now, &[0; 8], &mut |_, _, _| ()).is_err());
    rig.cut(0);
    assert_eq!(rig.session.wants_rejoin().collect::<Vec<_>>(), [0], "twice is once");
}
