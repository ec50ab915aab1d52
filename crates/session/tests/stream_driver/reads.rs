//! Reads: of the owner's calls, and several at once.

use riopipe_order::attribute::Seq;
use riopipe_order::engine::EngineKind;
use riopipe_session::initiator::stream::ReadExtent;
use riopipe_session::initiator::stream_driver::{
    ReadFailure, StartStep, StreamEvent, StreamSpec, StreamStart, Until,
};

use super::peer::target::Script;
use super::stream_rig::{LOSS, MS, Shape, block, new_queue};
use super::{READ, Rig, START_NS, carry, connect, stream_shared};

#[test]
fn several_extents_are_asked_for_at_once_and_put_in_the_callers_order() {
    let mut rig = Rig::new(Shape::of(2, false));
    let extents = [9, 0, 4].map(|lba| ReadExtent { lba, blocks: 1 });
    let slot = rig.driver.begin_read(&extents, None, rig.now);
    assert_eq!(rig.driver.read_step(slot, rig.now), None);
    rig.carry();
    let mut asked = Vec::new();
    for (server, script) in rig.scripts.iter_mut().enumerate() {
        asked.extend(script.commands.drain(..).map(|command| (server, command)));
    }
    assert_eq!(asked.len(), 3, "all are out before any is answered");
    for (n, (server, command)) in asked.into_iter().enumerate().rev() {
        assert_eq!(command.opcode(), READ);
        rig.scripts[server].answer_data(&command, block(n as u64));
    }
    rig.carry();
    assert_eq!(rig.driver.read_step(slot, rig.now), Some(Ok(())));
    let mut found: Vec<_> = rig.read.chunks(block(0).len()).map(<[u8]>::to_vec).collect();
    found.sort();
    let mut all = [0, 1, 2].map(block);
    all.sort();
    assert_eq!(found, all);
}

/// Several reads are in flight at once. Each ends with its own answers, in any order.
#[test]
fn reads_end_independently_of_each_other() {
    let mut rig = Rig::new(Shape::of(2, false));
    let slots = [0, 4, 9].map(|lba| {
        let slot = rig.driver.begin_read(&[ReadExtent { lba, blocks: 1 }], None, rig.now);
        assert_eq!(rig.driver.read_step(slot, rig.now), None);
        slot
    });
    assert!(slots[0] != slots[1] && slots[1] != slots[2] && slots[0] != slots[2]);
    rig.carry();
    assert!(!rig.driver.may_have_ended_reads(rig.now));
    let mut asked = Vec::new();
    for (server, script) in rig.scripts.iter_mut().enumerate() {
        asked.extend(script.commands.drain(..).map(|command| (server, command)));
    }
    assert_eq!(asked.len(), 3, "all are out before any is answered");
    let mut ended = Vec::new();
    for (server, command) in asked.into_iter().rev() {
        rig.scripts[server].answer_data(&command, block(3));
        rig.carry();
        assert!(rig.driver.may_have_ended_reads(rig.now));
        assert!(!rig.driver.may_have_ended_reads(rig.now), "each end is reported once");
        let now = rig.now;
        let found = slots.iter().filter(|slot| !ended.contains(*slot));
        let found: Vec<_> =
            found.filter(|slot| rig.driver.read_step(**slot, now).is_some()).copied().collect();
        assert_eq!(found.len(), 1, "one answer ends one read");
        ended.extend(found);
    }
    // The slots are used again.
    let again = rig.driver.begin_read(&[ReadExtent { lba: 1, blocks: 1 }], None, rig.now);
    assert!(slots.contains(&again));
}

/// A read that is given up leaves the others as they are, and its late answer reaches no other one.
#[test]
fn a_read_that_is_given_up_leaves_the_others() {
    let mut rig = Rig::new(Shape::of(1, false));
    let begin = |rig: &mut Rig, lba| {
        let slot = rig.driver.begin_read(&[ReadExtent { lba, blocks: 1 }], None, rig.now);
        assert_eq!(rig.driver.read_step(slot, rig.now), None);
        (slot, rig.take_one(0, READ))
    };
    let (given_up, late) = begin(&mut rig, 4);
    let (kept, own) = begin(&mut rig, 5);
    rig.driver.give_up_read(given_up);
    let (next, other) = begin(&mut rig, 6);
    assert_eq!(next, given_up, "the slot is used again");
    rig.scripts[0].answer_data(&late, block(7));
    rig.carry();
    assert!(rig.read.is_empty(), "the late answer is dropped");
    assert_eq!(rig.driver.read_step(next, rig.now), None);
    rig.scripts[0].answer_data(&own, block(8));
    rig.carry();
    assert_eq!((rig.driver.read_step(kept, rig.now), rig.read.clone()), (Some(Ok(())), block(8)));
    rig.scripts[0].answer_data(&other, block(9));
    rig.carry();
    assert_eq!((rig.driver.read_step(next, rig.now), rig.read.clone()), (Some(Ok(())), block(9)));
}

/// Reads and writes share the queue depth. Many submitted reads keep no write waiting, and many
/// writes do not keep all reads waiting (promise P8).
#[test]
fn p8_reads_and_writes_do_not_keep_each_other_waiting() {
    let mut rig = Rig::new(Shape::of(1, false));
    let depth = rig.driver.config().queue_depth;
    let extent = [ReadExtent { lba: 9, blocks: 1 }];
    let slots: Vec<_> =
        (0..depth + 4).map(|_| rig.driver.begin_read(&extent, None, rig.now)).collect();
    let mut reads = rig.take(0);
    assert_eq!(reads.len(), depth, "the queue depth bounds the reads");
    rig.submit(0);
    assert_eq!(rig.take(0), [], "no space");
    // The next free place is the write's.
    let first = reads.remove(0);
    rig.scripts[0].answer_data(&first, block(1));
    let write = rig.take_one(0, 1);
    rig.answer(0, &write);
    for read in std::mem::take(&mut reads) {
        rig.scripts[0].answer_data(&read, block(1));
    }
    for read in rig.take(0) {
        assert_eq!(read.opcode(), READ);
        rig.scripts[0].answer_data(&read, block(1));
    }
    rig.carry();
    for read in rig.take(0) {
        rig.scripts[0].answer_data(&read, block(1));
    }
    rig.carry();
    for slot in slots {
        assert_eq!(rig.driver.read_step(slot, rig.now), Some(Ok(())));
    }
    // And the other way round: writes fill the queue, and a read is sent.
    for lba in 0..depth as u64 + 4 {
        rig.submit(10 + 2 * lba);
    }
    let writes = rig.take(0);
    assert_eq!(writes.len(), depth, "the queue depth bounds the writes");
    let slot = rig.driver.begin_read(&extent, None, rig.now);
    let read = rig.take_one(0, READ);
    rig.scripts[0].answer_data(&read, block(1));
    rig.carry();
    assert_eq!(rig.driver.read_step(slot, rig.now), Some(Ok(())));
}

/// A read waits for the writes that were submitted before it, and not for later ones of the block, of
/// which there may always be some.
#[test]
fn p8_a_read_does_not_wait_for_later_writes() {
    let mut rig = Rig::new(Shape::of(1, false));
    rig.submit(4);
    let slot = rig.driver.begin_read(&[ReadExtent { lba: 4, blocks: 1 }], None, rig.now);
    let first = rig.take_one(0, 1);
    rig.submit(4);
    assert_eq!(rig.take(0).iter().filter(|command| command.opcode() == READ).count(), 0);
    rig.scripts[0].answer(&first, 0, 0);
    rig.carry();
    rig.driver.marks().unwrap();
    let sent = rig.take(0);
    let read = sent.iter().find(|command| command.opcode() == READ).expect("it is sent");
    rig.scripts[0].answer_data(read, block(1));
    rig.carry();
    assert_eq!(rig.driver.read_step(slot, rig.now), Some(Ok(())));
}

/// A wait for the end of a read ends with it, and does not wait if none is in flight.
#[test]
fn a_wait_for_a_read_ends_with_it() {
    let mut rig = Rig::new(Shape::of(1, false));
    assert!(rig.driver.reached(Until::ReadEnded), "none is in flight");
    let slot = rig.driver.begin_read(&[ReadExtent { lba: 4, blocks: 1 }], None, rig.now);
    rig.driver.count_submitted_read();
    assert!(rig.driver.wants_pump(), "it is to be sent");
    assert!(!rig.driver.reached(Until::ReadEnded) && !rig.driver.reached(Until::Moved));
    let read = rig.take_one(0, READ);
    rig.scripts[0].answer_data(&read, block(1));
    rig.carry();
    assert_eq!(rig.driver.read_step(slot, rig.now), Some(Ok(())));
    rig.driver.set_untaken_ends(1);
    assert!(rig.driver.reached(Until::ReadEnded) && rig.driver.reached(Until::Moved));
    rig.driver.set_untaken_ends(0);
    assert!(!rig.driver.reached(Until::Moved), "the owner has taken it");
}

#[test]
fn a_read_is_given_up_at_its_deadline_and_what_comes_late_is_dropped() {
    let mut rig = Rig::new(Shape::of(1, false));
    let (now, extent) = (rig.now, ReadExtent { lba: 4, blocks: 1 });
    let slot = rig.driver.begin_read(&[extent], Some(now + 5 * MS), now);
    assert_eq!(rig.driver.read_step(slot, now), None);
    let late = rig.take_one(0, READ);
    assert_eq!(rig.driver.read_step(slot, now + 5 * MS - 1), None);
    assert!(rig.driver.sleeps_until(now) <= now + 5 * MS);
    assert_eq!(rig.driver.read_step(slot, now + 5 * MS), Some(Err(ReadFailure::Deadline)));
    assert!(rig.driver.has_unanswered_reads(), "no stream replays to the target meanwhile");
    // The next read has another number.
    let slot = rig.driver.begin_read(&[extent], Some(now + 9 * MS), now);
    assert_eq!(rig.driver.read_step(slot, now), None);
    let own = rig.take_one(0, READ);
    rig.scripts[0].answer_data(&late, block(7));
    rig.carry();
    assert!(rig.read.is_empty(), "the late answer is dropped");
    assert_eq!(rig.driver.read_step(slot, now), None);
    rig.scripts[0].answer_data(&own, block(8));
    rig.carry();
    // Data that has come in time is no failure, however late it is read.
    assert_eq!(rig.driver.read_step(slot, now + 99 * MS), Some(Ok(())));
    assert_eq!((rig.read.clone(), rig.driver.has_unanswered_reads()), (block(8), false));
}

#[test]
fn a_reader_binds_nothing_and_asks_again_on_its_next_connection() {
    let shape = Shape::of(1, false);
    let mut now = 1 << 40;
    let mut config = shape.config(1 << 15, 1);
    (config.engine, config.start) = (EngineKind::None, Seq::ZERO);
    let spec = StreamSpec {
        config,
        topology: shape.topology(),
        kept_bytes_max: 1 << 20,
        merge: false,
        merge_from: 0,
        qids: vec![5],
        reads_only: true,
    };
    let shared = stream_shared(&shape);
    let mut start = StreamStart::new(spec, shared, START_NS, now);
    connect(&mut start, &shape, now);
    let (mut scripts, mut read) = (vec![Script::default()], vec![]);
    carry(start.driver().unwrap(), &mut scripts, &mut read, now);
    assert_eq!(start.step(now), StartStep::Ready);
    let mut driver = start.into_driver().unwrap();
    let slot = driver.begin_read(&[ReadExtent { lba: 4, blocks: 1 }], None, now);
    assert_eq!(driver.read_step(slot, now), None);
    carry(&mut driver, &mut scripts, &mut read, now);
    assert_eq!(scripts[0].commands.remove(0).opcode(), READ, "and no Bind before");
    for _ in 0..2 {
        // As often as it may be, within the loss time-out each.
        now += LOSS - 1;
        driver.closed(0, now);
        driver.check_connections(now);
        assert_eq!(driver.next_event(), Some(StreamEvent::ConnectionEnded { link: 0 }));
        assert!(matches!(driver.next_event(), Some(StreamEvent::Connect(_))));
        assert_eq!(driver.read_step(slot, now), None);
        assert!(driver.marks().is_ok());
        assert!(driver.connected(0, new_queue(&shape), now));
        scripts[0] = Script::default();
        carry(&mut driver, &mut scripts, &mut read, now);
        driver.check_connections(now);
        while driver.next_event().is_some() {}
        carry(&mut driver, &mut scripts, &mut read, now);
    }
    let again = scripts[0].commands.remove(0);
    assert_eq!(again.opcode(), READ);
    scripts[0].answer_data(&again, block(3));
    carry(&mut driver, &mut scripts, &mut read, now);
    assert_eq!((driver.read_step(slot, now), read), (Some(Ok(())), block(3)));
    // At rest it is not driven, for longer than the loss time-out.
    driver.closed(0, now);
    now += 2 * LOSS;
    let slot = driver.begin_read(&[ReadExtent { lba: 4, blocks: 1 }], None, now);
    assert_eq!(driver.read_step(slot, now), None);
    driver.pump(now);
    assert!(driver.marks().is_ok(), "it has not waited for the target");
}

#[test]
fn p9_a_read_waits_for_its_own_writes_and_for_nothing_else() {
    let mut rig = Rig::new(Shape::of(1, false));
    rig.submit(4);
    let slot = rig.driver.begin_read(&[ReadExtent { lba: 4, blocks: 1 }], None, rig.now);
    assert_eq!(rig.driver.read_step(slot, 0), None);
    assert!(rig.driver.read_waits(slot));
    let sent = rig.take_one(0, 1);
    assert_eq!(rig.driver.read_step(slot, 0), None);
    rig.scripts[0].answer(&sent, 0, 0);
    let bytes = std::mem::take(&mut rig.scripts[0].output);
    rig.driver.received(0, rig.now, &bytes, &mut |_, _, _| ()).unwrap();
    assert!(!rig.driver.read_waits(slot), "it can go on, though nothing will come");
    assert!(rig.driver.wants_pump(), "the next round starts it");
    assert_eq!(rig.driver.read_step(slot, 0), None);
    assert!(rig.driver.wants_pump() && rig.driver.read_waits(slot));
    let read = rig.take_one(0, READ);
    rig.scripts[0].answer_data(&read, block(9));
    rig.carry();
    assert!(!rig.driver.read_waits(slot));
    assert_eq!(rig.driver.read_step(slot, 0), Some(Ok(())));
    assert_eq!(rig.read, block(9));
}
