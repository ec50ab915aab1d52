//! Streams of engines whose targets keep no log, and the shared state of the streams of a volume.

mod stream_rig;

use peer::target::Command;
use riopipe_order::attribute::{Member, Seq};
use riopipe_order::engine::{Cause, EngineKind, Op, Place, Write};
use riopipe_testkit::peer;
use stream_rig::{MS, Rig, Shape, TIMEOUT, piece, shared, write};

const FLUSH: u8 = 0;
const WRITE: u8 = 1;

/// Media and data integrity: write fault.
const WRITE_FAULT: u16 = 0x280;

/// Three streams of a volume on two servers.
fn three(engine: EngineKind) -> [Rig; 3] {
    let shape = Shape { engine, ..Shape::of(2, true) };
    let (failures, barrier) = shared(&shape);
    [0, 1, 2].map(|stream| {
        let rig = Rig::on(shape.clone(), stream, &failures, &barrier);
        if engine == EngineKind::Rio { rig.bound(1) } else { rig }
    })
}

/// Writes a block that is not flushed yet. Returns the FLUSH, if the engine has sent it by itself.
fn wrote(rig: &mut Rig, lba: u64) -> Option<Command> {
    let server = (lba % 2) as usize;
    rig.submit(&[write(lba, 1)]);
    let sent = rig.take_one(server, WRITE);
    rig.answer(server, &sent, 0);
    assert_eq!(rig.marks().1, 0);
    rig.take(server).pop()
}

#[test]
fn t22_a_stream_that_has_written_to_a_drive_receives_its_failed_flush() {
    let cases = [
        (WRITE_FAULT, true),
        (0x286, true),
        (0x006, true),
        (0x081, true),
        (0x005, true),
        // These statuses mean nothing for the drive.
        (0x002, false),
        (0x004, false),
        (0x00b, false),
        (0x70a, false),
    ];
    for engine in [EngineKind::None, EngineKind::Sync, EngineKind::Linux] {
        for (answered, affects) in cases {
            let [mut a, mut b, mut c] = three(engine);
            wrote(&mut b, 0);
            wrote(&mut c, 1);
            let flush = wrote(&mut a, 2).unwrap_or_else(|| {
                let last = a.session.engine().last_admitted();
                a.session.ask_durable(last);
                a.take_one(0, FLUSH)
            });
            a.answer(0, &flush, answered);
            let why = a.session.poll().expect_err("its own").cause;
            assert_eq!(why, Cause::Status(answered), "{engine}");
            let reported = b.session.poll().err().map(|failure| (failure.member, failure.flush));
            assert_eq!(reported, affects.then_some((Member(0), true)), "{engine}: {answered:#x}");
            assert!(c.session.poll().is_ok(), "{engine}: it has written elsewhere");
        }
    }
}

/// The drive has dropped the data before it carried out the second FLUSH.
#[test]
fn t22_a_flush_that_succeeds_after_another_streams_failed_covers_nothing() {
    let [mut a, mut b, _] = three(EngineKind::Sync);
    let failing = wrote(&mut a, 2).unwrap();
    let late = wrote(&mut b, 0).unwrap();
    a.answer(0, &failing, WRITE_FAULT);
    b.answer(0, &late, 0);
    let failure = b.session.poll().expect_err("its data may be lost");
    assert_eq!((failure.member, failure.flush), (Member(0), true));
    assert_eq!(b.session.marks().durable, Seq(0), "P2");
}

/// Data of another write is damaged in transit: by that the stream loses its connection. The other
/// streams still learn of the FLUSH, which the drive reports once.
#[test]
fn t22_a_failed_flush_counts_also_on_a_connection_that_breaks() {
    const TRANSIENT_TRANSPORT: u16 = 0x022;
    let [mut a, mut b, _] = three(EngineKind::None);
    wrote(&mut b, 0);
    wrote(&mut a, 2);
    a.session.ask_durable(a.session.engine().last_admitted());
    let failing = a.take_one(0, FLUSH);
    a.submit(&[write(4, 1)]);
    let damaged = a.take_one(0, WRITE);
    a.scripts[0].answer(&damaged, TRANSIENT_TRANSPORT, 0);
    a.scripts[0].answer(&failing, WRITE_FAULT, 0);
    a.carry();
    assert!(a.session.poll().is_err());
    let failure = b.session.poll().expect_err("its data may be lost");
    assert_eq!((failure.member, failure.flush), (Member(0), true));
}

#[test]
fn t22_a_failed_write_is_its_streams_own() {
    for engine in [EngineKind::None, EngineKind::Sync, EngineKind::Linux, EngineKind::Rio] {
        let [mut a, mut b, _] = three(engine);
        wrote(&mut b, 0);
        a.submit(&[write(2, 1)]);
        let sent = a.take_one(0, WRITE);
        a.answer(0, &sent, WRITE_FAULT);
        assert!(a.session.poll().is_err(), "{engine}");
        assert!(b.session.poll().is_ok(), "{engine}");
    }
}

#[test]
fn t22_where_there_is_a_log_the_target_reports_failed_flushes() {
    let [mut a, mut b, _] = three(EngineKind::Rio);
    wrote(&mut b, 0);
    wrote(&mut a, 2);
    a.session.admit(&mut [], 0, true).unwrap();
    let flush = a.take_one(0, FLUSH);
    a.answer(0, &flush, WRITE_FAULT);
    assert!(a.session.poll().is_err());
    assert!(b.session.poll().is_ok(), "it knows whether the drive or the log has failed");
}

#[test]
fn t17_engines_without_a_log_send_no_marks_and_rest_when_idle() {
    for engine in [EngineKind::None, EngineKind::Sync, EngineKind::Linux] {
        let shape = Shape { engine, ..Shape::of(1, false) };
        let (failures, barrier) = shared(&shape);
        let mut rig = Rig::on(shape, 0, &failures, &barrier);
        rig.submit(&[write(1, 1)]);
        assert_eq!(rig.session.in_flight(0), 1);
        let sent = rig.take_one(0, WRITE);
        rig.answer(0, &sent, 0);
        assert_eq!(rig.marks(), (1, 1));
        assert_eq!(rig.session.in_flight(0), 0);
        assert_eq!(rig.session.deadline(rig.now), None, "{engine}");
        rig.now += 1000 * MS;
        assert_eq!(rig.take(0), [], "{engine}");
        rig.session.send_marks();
        assert_eq!(rig.take(0), [], "{engine}");
        assert_eq!(rig.session.marks_confirmed(), Ok(true));
    }
}

/// A target may carry out FUA as a FLUSH behind the write. If that fails, data of other streams may
/// be lost, and no other status reports that.
#[test]
fn t22_a_failed_write_with_fua_counts_as_a_failed_flush() {
    let [mut a, mut b, mut c] = three(EngineKind::Linux);
    wrote(&mut b, 0);
    wrote(&mut c, 1);
    a.session.admit(&mut [write(2, 1)], 0, true).unwrap();
    let commit = a.take_one(0, WRITE);
    assert_eq!(commit.sqe[51] & 0x40, 0x40, "FUA");
    a.answer(0, &commit, WRITE_FAULT);
    assert!(a.session.poll().expect_err("its own").flush);
    let failure = b.session.poll().expect_err("its data may be lost");
    assert_eq!(
        (failure.member, failure.flush, failure.cause),
        (Member(0), true, Cause::SharedFlush)
    );
    assert!(c.session.poll().is_ok(), "it has written elsewhere");
}

/// The owner does not call for longer than the time limit. The target has requested data meanwhile,
/// so it is the owner's turn, and the time of the answer begins when the data is sent.
#[test]
fn a_target_that_requests_data_is_alive() {
    let mut rig = Rig::new(Shape::of(1, false));
    // More than fits into a capsule.
    let op = Op::Write(Place::Fresh, piece(1, 3));
    rig.submit(&[Write { lba: 1, blocks: 3, op }]);
    let sent = rig.take(0);
    rig.scripts[0].ask_for_data(&sent[0], 3 * 4096);
    rig.now += 9 * TIMEOUT;
    rig.carry();
    assert_eq!(rig.session.stalled(rig.now), None);
    rig.now += TIMEOUT;
    assert_eq!(rig.session.stalled(rig.now), Some(0), "no answer to the data");
}
