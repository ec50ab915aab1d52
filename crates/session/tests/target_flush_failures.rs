//! A failed FLUSH on a drive with a volatile cache may lose writes of every connection. Each FLUSH that
//! covers such a write answers for it (T22), also beside writes in pieces and writes with FUA.

mod world;

use riopipe_order::write_order::{DriveOrder, EpochId};
use riopipe_session::target::Volumes;
use riopipe_session::target::limits::CONNECTION_BYTES;
use riopipe_session::wire;
use riopipe_testkit::peer;
use world::{Parts, World, block, crc, identity, pattern, riopipe_bytes};

/// Blocks of a transfer of four pieces.
const BLOCKS: u32 = 4 * (CONNECTION_BYTES / 4096) as u32;

/// The completions that have come: the command and the status of each.
fn statuses(w: &mut World, at: usize) -> Vec<(u16, u16)> {
    w.completions(at).iter().map(|done| (done.cid, done.status)).collect()
}

/// The error of a write with FUA concerns its own block alone. The FLUSH behind it must still report
/// the other writes that are lost.
#[test]
fn t22_a_failed_write_with_fua_does_not_hide_what_its_queue_has_lost() {
    let (mut w, io, other) = World::with_two_queues(true);
    assert_eq!(w.call(io, peer::write(1, 1, 50, 1), &block(1)).status, 0);
    w.host.drives[0].holds = true;
    w.command(io, peer::write(2, 1, 60, 1).byte(51, 0x40), &block(2));
    w.host.drives[0].holds = false;
    w.fail_a_flush(other); // block 50 may be lost
    w.complete_all(0);
    let fua = w.next(io).unwrap().completion();
    assert_eq!((fua.cid, fua.status), (2, 0x280));
    assert_eq!(w.call(io, peer::flush(3, 1), &[]).status, 0x280, "block 50 is lost");
}

/// A FLUSH of the host's own queue fails between two pieces of a write.
#[test]
fn t22_an_own_flush_that_fails_between_pieces() {
    let (mut w, io, _) = World::with_two_queues(true);
    let data = pattern(1, BLOCKS as usize);
    w.command(io, peer::write_r2t(1, 1, 0, BLOCKS), &[]);
    w.send_requested(io, 1, &data);
    let r2t = w.next(io).unwrap();
    w.host.drives[0].failing = true;
    assert_eq!(w.call(io, peer::flush(2, 1), &[]).status, 0x280); // piece 0 may be lost
    w.host.drives[0].failing = false;
    w.send_data(io, &r2t, &data);
    w.send_requested(io, 1, &data);
    w.send_requested(io, 1, &data);
    assert_eq!(w.next(io).unwrap().completion().status, 0, "the write");
    // The first FLUSH was answered before the write: it covers nothing of it.
    assert_eq!(w.call(io, peer::flush(3, 1), &[]).status, 0x280, "piece 0 is lost");
}

/// The same with a write that is in one piece, held by the drive: right already.
#[test]
fn t22_an_own_flush_that_fails_while_a_write_is_at_the_drive() {
    let (mut w, io, _) = World::with_two_queues(true);
    w.host.drives[0].holds = true;
    w.command(io, peer::write(1, 1, 50, 1), &block(1));
    w.host.drives[0].holds = false;
    w.host.drives[0].failing = true;
    assert_eq!(w.call(io, peer::flush(2, 1), &[]).status, 0x280);
    w.host.drives[0].failing = false;
    w.complete_all(0);
    assert_eq!(w.next(io).unwrap().completion().status, 0, "the write");
    assert_eq!(w.call(io, peer::flush(3, 1), &[]).status, 0x280);
}

/// A successful FLUSH between two pieces; then a FLUSH of another queue fails.
#[test]
fn t22_a_good_flush_between_pieces_then_a_failure_elsewhere() {
    let (mut w, io, other) = World::with_two_queues(true);
    let data = pattern(1, BLOCKS as usize);
    w.command(io, peer::write_r2t(1, 1, 0, BLOCKS), &[]);
    w.send_requested(io, 1, &data);
    let r2t = w.next(io).unwrap();
    assert_eq!(w.call(io, peer::flush(2, 1), &[]).status, 0);
    w.send_data(io, &r2t, &data); // piece 1, not flushed
    w.fail_a_flush(other);
    w.send_requested(io, 1, &data);
    w.send_requested(io, 1, &data);
    assert_eq!(w.next(io).unwrap().completion().status, 0, "the write");
    assert_eq!(w.call(io, peer::flush(3, 1), &[]).status, 0x280, "piece 1 is lost");
}

/// A FLUSH of another queue fails between two pieces; a FLUSH of the own queue, sent before the
/// write has ended, reports it. The next FLUSH, behind the write, is the only one that covers it.
#[test]
fn t22_a_reported_failure_does_not_hide_the_loss_of_a_piece() {
    let (mut w, io, other) = World::with_two_queues(true);
    let data = pattern(1, BLOCKS as usize);
    w.command(io, peer::write_r2t(1, 1, 0, BLOCKS), &[]);
    w.send_requested(io, 1, &data);
    w.fail_a_flush(other); // piece 0 may be lost
    let r2t = w.next(io).unwrap();
    assert_eq!(w.call(io, peer::flush(2, 1), &[]).status, 0x280);
    w.send_data(io, &r2t, &data);
    w.send_requested(io, 1, &data);
    w.send_requested(io, 1, &data);
    assert_eq!(w.next(io).unwrap().completion().status, 0, "the write");
    assert_eq!(w.call(io, peer::flush(3, 1), &[]).status, 0x280, "piece 0 is lost");
}

/// A FLUSH in flight reports a failure. It was sent before a write that is lost, too, so the host
/// may not conclude anything about that write. The FLUSH behind the write must report it.
#[test]
fn t22_a_flush_does_not_answer_for_a_write_behind_it() {
    let (mut w, io, other) = World::with_two_queues(true);
    assert_eq!(w.call(io, peer::write(1, 1, 50, 1), &block(1)).status, 0);
    w.host.drives[0].holds = true;
    w.command(io, peer::flush(2, 1), &[]);
    w.host.drives[0].holds = false;
    assert_eq!(w.call(io, peer::write(3, 1, 60, 1), &block(3)).status, 0);
    w.fail_a_flush(other); // blocks 50 and 60 may be lost
    w.complete_all(0);
    let flush = w.next(io).unwrap().completion();
    assert_eq!((flush.cid, flush.status), (2, 0x280));
    assert_eq!(w.call(io, peer::flush(4, 1), &[]).status, 0x280, "block 60 is lost");
    // Reported, and not again.
    assert_eq!(w.call(io, peer::flush(5, 1), &[]).status, 0);
}

/// The same, with the write at the drive when the failure is reported.
#[test]
fn t22_a_flush_does_not_answer_for_a_write_in_flight() {
    let (mut w, io, other) = World::with_two_queues(true);
    w.host.drives[0].holds = true;
    w.command(io, peer::write(1, 1, 60, 1), &block(3));
    w.host.drives[0].holds = false;
    w.fail_a_flush(other); // block 60 may be lost
    assert_eq!(w.call(io, peer::flush(2, 1), &[]).status, 0x280);
    w.complete_all(0);
    assert_eq!(w.next(io).unwrap().completion().status, 0, "the write");
    assert_eq!(w.call(io, peer::flush(4, 1), &[]).status, 0x280, "block 60 is lost");
    assert_eq!(w.call(io, peer::flush(5, 1), &[]).status, 0);
}

/// A FLUSH of a stream's epochs covers no write without an order, so it does not answer for one.
#[test]
fn t22_a_flush_of_epochs_does_not_hide_the_loss_of_a_plain_write() {
    let volumes = Volumes::without_log(crc);
    let mut w =
        World::over_ordered(&[true], DriveOrder::Epochs, identity(), Parts::default(), volumes);
    let (_, cntlid) = w.admin();
    let [io, other] = [w.io(cntlid, 1), w.io(cntlid, 2)];
    let flush_epochs = |cid| {
        let mut sqe = riopipe_nvme::command::Sqe::flush(1);
        wire::put_flush_before(&mut sqe, EpochId { stream: 1, epoch: 5 });
        riopipe_bytes(&sqe).cid(cid)
    };
    assert_eq!(w.call(io, flush_epochs(1), &[]).status, 0);
    assert_eq!(w.call(io, peer::write(2, 1, 50, 1), &block(1)).status, 0);
    w.fail_a_flush(other); // block 50 may be lost
    assert_eq!(w.call(io, flush_epochs(3), &[]).status, 0x280, "its epochs may be lost");
    assert_eq!(w.call(io, peer::flush(4, 1), &[]).status, 0x280, "block 50 is lost");
}

/// Two FLUSHes of a connection are in flight when one of another connection fails. Both cover the
/// writes that may be lost, whichever is answered first.
#[test]
fn t22_each_plain_flush_in_flight_with_a_failed_one_answers_for_it() {
    for first in [0, 1] {
        let (mut w, io, other) = World::with_two_queues(true);
        assert_eq!(w.call(io, peer::write(1, 1, 50, 1), &block(1)).status, 0);
        w.fail_a_flush(other);
        w.host.drives[0].holds = true;
        w.command(io, peer::flush(2, 1), &[]);
        w.command(io, peer::flush(3, 1), &[]);
        w.complete(0, first);
        w.host.drives[0].holds = false;
        w.complete_all(0);
        let mut answers = statuses(&mut w, io);
        answers.sort_unstable();
        assert_eq!(answers, [(2, 0x280), (3, 0x280)], "{first}");
        // The host knows now. It writes and flushes again.
        assert_eq!(w.call(io, peer::write(4, 1, 50, 1), &block(1)).status, 0);
        assert_eq!(w.call(io, peer::flush(5, 1), &[]).status, 0);
    }
}

/// A FLUSH that begins behind the report of a failure does not report it again, also while one
/// before that report is in flight. Otherwise FLUSHes without a pause would fail for ever.
#[test]
fn t22_a_plain_flush_behind_the_report_of_a_failure_succeeds() {
    let (mut w, io, other) = World::with_two_queues(true);
    assert_eq!(w.call(io, peer::write(1, 1, 50, 1), &block(1)).status, 0);
    w.fail_a_flush(other);
    w.host.drives[0].holds = true;
    w.command(io, peer::flush(2, 1), &[]);
    w.command(io, peer::flush(3, 1), &[]);
    w.complete(0, 0);
    assert_eq!(statuses(&mut w, io), [], "in doubt, because the other one may fail");
    w.command(io, peer::flush(4, 1), &[]);
    w.complete(0, 0);
    assert_eq!(statuses(&mut w, io)[0], (2, 0x280));
    w.command(io, peer::flush(5, 1), &[]);
    w.host.drives[0].holds = false;
    w.complete_all(0);
    let answers = statuses(&mut w, io);
    assert!(answers.contains(&(4, 0x280)) && answers.contains(&(5, 0)), "{answers:?}");
}

/// A FLUSH fails while a write with FUA is at the drive or waits for its next piece. The FLUSH of the
/// write makes nothing durable that was lost, also where another FLUSH of the queue has reported it.
#[test]
fn t22_a_write_with_fua_answers_for_what_a_failed_flush_has_lost() {
    for (blocks, in_pieces) in [(1, false), (BLOCKS, true)] {
        for is_told in [false, true] {
            let (mut w, io, other) = World::with_two_queues(true);
            let data = pattern(1, blocks as usize);
            if in_pieces {
                w.command(io, peer::write_r2t(1, 1, 0, blocks).byte(51, 0x40), &[]);
                w.send_requested(io, 1, &data);
            } else {
                w.host.drives[0].holds = true;
                w.command(io, peer::write(1, 1, 0, 1).byte(51, 0x40), &data);
                w.host.drives[0].holds = false;
            }
            w.fail_a_flush(other);
            if is_told {
                let r2t = in_pieces.then(|| w.next(io).unwrap());
                assert_eq!(w.call(io, peer::flush(9, 1), &[]).status, 0x280);
                if let Some(r2t) = r2t {
                    w.send_data(io, &r2t, &data);
                }
            }
            if in_pieces {
                for _ in usize::from(is_told) + 1..4 {
                    w.send_requested(io, 1, &data);
                }
            } else {
                w.complete_all(0);
            }
            assert_eq!(w.next(io).unwrap().completion().status, 0x280, "{blocks} {is_told}");
        }
    }
}
