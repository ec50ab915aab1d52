//! Writes with a place in the order that their drive keeps (engine `barrier`): the target submits
//! them so that none passes one that it must follow.

mod world;

use riopipe_order::block_device::{BlockDevice, Data, Done, Submitted};
use riopipe_order::write_order::{DriveOrder, WriteOrder};
use riopipe_session::target::{BoundedDevice, Volumes};
use riopipe_session::wire;
use riopipe_testkit::peer::{self, Digests, HOSTID, HOSTNQN, Sqe};
use world::{Drive, Parts, SUBNQN, What, World, block, crc, identity};

const POISONED: u16 = 0x707;

/// A write of the drive's one sequence of epochs, with its data in the capsule.
fn write(cid: u16, lba: u64, barrier: bool) -> Sqe {
    in_order(peer::write(cid, 1, lba, 1), barrier)
}

fn in_order(sqe: Sqe, barrier: bool) -> Sqe {
    let mut command = riopipe_nvme::command::Sqe(sqe.0);
    wire::put_order(&mut command, WriteOrder::Ordered { barrier });
    Sqe(command.0)
}

/// A target with one drive that keeps this order.
fn world(order: DriveOrder) -> (World, u16) {
    let volumes = Volumes::without_log(crc);
    let mut w = World::over_ordered(&[true], order, identity(), Parts::default(), volumes);
    let (_, cntlid) = w.admin();
    (w, cntlid)
}

/// The blocks that were written, in the order of their submission.
fn submitted(w: &World) -> Vec<u64> {
    let history = &w.host.drives[0].history;
    let writes = history.iter().filter(|(_, what)| matches!(what, What::Write(_)));
    writes.map(|(lba, _)| *lba).collect()
}

fn starts(w: &World) -> usize {
    w.host.drives[0].history.iter().filter(|(_, what)| *what == What::StartStream).count()
}

/// The statuses of the completions that have come, by command.
fn ends(w: &mut World, io: usize) -> Vec<(u16, u16)> {
    w.completions(io).iter().map(|done| (done.cid, done.status)).collect()
}

#[test]
fn a_barrier_waits_for_data_that_is_still_to_come_and_all_behind_it_wait_for_the_barrier() {
    let (mut w, cntlid) = world(DriveOrder::Barrier);
    let io = w.io(cntlid, 1);
    w.command(io, in_order(peer::write_r2t(1, 1, 10, 1), false), &[]);
    let ttag = w.next(io).unwrap().u16(10);
    w.command(io, write(2, 11, false), &block(2));
    w.command(io, write(3, 12, true), &block(3));
    w.command(io, write(4, 13, false), &block(4));
    assert_eq!(submitted(&w), [11], "one epoch has no order");
    w.send(io, &peer::h2c_data(Digests::default(), 1, ttag, 0, &block(1), true));
    assert_eq!(submitted(&w), [11, 10, 12, 13]);
    assert_eq!(ends(&mut w, io), [(2, 0), (1, 0), (3, 0), (4, 0)]);
    assert_eq!(w.host.drives[0].block(12), block(3), "the held data is the right one");
}

#[test]
fn a_write_without_an_order_passes_barriers_that_wait_and_the_end_of_the_sequence() {
    let (mut w, cntlid) = world(DriveOrder::Barrier);
    let [io, other] = [1, 2].map(|qid| w.io(cntlid, qid));
    w.command(io, in_order(peer::write_r2t(1, 1, 10, 1), true), &[]);
    let ttag = w.next(io).unwrap().u16(10);
    w.command(io, write(2, 11, true), &block(2));
    w.command(io, peer::write(3, 1, 12, 1), &block(3));
    w.command(other, peer::write(1, 1, 13, 1), &block(4));
    assert_eq!(submitted(&w), [12, 13]);
    w.host.drives[0].holds = true;
    w.send(io, &peer::h2c_data(Digests::default(), 1, ttag, 0, &block(1), true));
    w.fail(0, 0);
    w.command(other, peer::write(2, 1, 14, 1), &block(5));
    w.complete_all(0);
    assert_eq!(submitted(&w)[..2], [12, 13]);
    assert_eq!(submitted(&w).last(), Some(&14), "it belongs to no sequence of epochs");
    assert_eq!(ends(&mut w, other), [(1, 0), (2, 0)]);
}

#[test]
fn a_write_that_is_refused_before_it_is_read_stops_those_behind_it() {
    for what in ["damaged data", "fused", "a command identifier in use"] {
        let (mut w, cntlid) = world(DriveOrder::Barrier);
        let io = w.initialize(Digests { header: true, data: true }, 0);
        let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
        w.call(io, peer::connect(0, 1, 31, 0), &data);
        w.host.drives[0].holds = true;
        w.command(io, write(7, 9, true), &block(0));
        let digests = w.links[io].digests;
        let capsule = |cid, byte_1: u8| {
            let sqe = write(cid, 10, true).byte(1, byte_1);
            peer::capsule(digests, &sqe.0, &block(1))
        };
        let bytes = match what {
            "damaged data" => {
                let mut bytes = capsule(1, 0x40);
                *bytes.last_mut().unwrap() ^= 1;
                bytes
            }
            "fused" => capsule(1, 0x41),
            _ => capsule(7, 0x40),
        };
        w.send(io, &bytes);
        w.command(io, write(2, 11, true), &block(2));
        let statuses: Vec<u16> = ends(&mut w, io).iter().map(|(_, status)| *status).collect();
        assert!(statuses[0] != 0 && statuses[1] == POISONED, "{what}: {statuses:x?}");
        assert_eq!(submitted(&w), [9], "{what}: nothing passes the write that is missing");
    }
}

#[test]
fn a_failed_write_ends_the_sequence_and_a_new_one_begins_when_the_old_one_is_over() {
    let (mut w, cntlid) = world(DriveOrder::Barrier);
    let [one, other, third, fourth] = [1, 2, 3, 4].map(|qid| w.io(cntlid, qid));
    w.host.drives[0].holds = true;
    w.command(one, write(1, 10, true), &block(1));
    w.command(other, write(1, 20, true), &block(2));
    w.fail(0, 0);
    assert_eq!(ends(&mut w, one), [(1, 0x280)]);
    w.command(one, write(2, 11, true), &block(1));
    assert_eq!(ends(&mut w, one), [(2, POISONED)]);
    w.command(third, write(1, 30, true), &block(3));
    w.command(third, write(2, 31, false), &block(3));
    assert_eq!((submitted(&w), starts(&w)), (vec![10, 20], 0), "one of the old sequence is there");
    w.fail(0, 0);
    w.command(other, write(2, 21, true), &block(2));
    assert_eq!(ends(&mut w, other), [(1, 0x280), (2, POISONED)]);
    // A connection that has not begun lets the drive begin anew. Its writes wait for that, and those
    // of another one.
    assert_eq!((submitted(&w), starts(&w)), (vec![10, 20], 1));
    w.command(fourth, write(1, 40, false), &block(4));
    w.command(fourth, write(2, 41, true), &block(5));
    assert_eq!((submitted(&w), starts(&w)), (vec![10, 20], 1));
    w.complete_all(0);
    assert_eq!((submitted(&w), starts(&w)), (vec![10, 20, 30, 31, 40, 41], 1));
    assert_eq!(ends(&mut w, third), [(1, 0), (2, 0)]);
    assert_eq!(ends(&mut w, fourth), [(1, 0), (2, 0)]);
    w.command(one, write(3, 12, true), &block(1));
    assert_eq!(ends(&mut w, one), [(3, POISONED)], "it has a hole");
}

/// The drive does not begin a new sequence for a connection, or this connection closes. The one that
/// waits for it starts one then.
#[test]
fn a_connection_that_waits_for_another_ones_sequence_starts_one_if_that_fails() {
    for way in ["refused", "closed"] {
        let (mut w, cntlid) = world(DriveOrder::Barrier);
        let [one, starting, waiting] = [1, 2, 3].map(|qid| w.io(cntlid, qid));
        w.host.drives[0].holds = true;
        w.command(one, write(1, 10, true), &block(1));
        w.fail(0, 0);
        w.command(starting, write(1, 20, true), &block(2));
        w.command(waiting, write(1, 30, true), &block(3));
        assert_eq!((submitted(&w), starts(&w)), (vec![10], 1), "{way}");
        match way {
            "refused" => w.fail(0, 0),
            _ => w.hang_up(starting),
        }
        w.complete_all(0);
        assert_eq!(ends(&mut w, waiting), [(1, 0)], "{way}");
        let written = submitted(&w);
        assert!(written == [10, 30] || way == "closed" && written.ends_with(&[30]), "{written:?}");
    }
}

/// A connection that waits for a sequence closes, and is neither kept nor woken.
#[test]
fn a_connection_that_waits_for_a_sequence_can_close() {
    let (mut w, cntlid) = world(DriveOrder::Barrier);
    let [one, starting, waiting] = [1, 2, 3].map(|qid| w.io(cntlid, qid));
    w.host.drives[0].holds = true;
    w.command(one, write(1, 10, true), &block(1));
    w.fail(0, 0);
    w.command(starting, write(1, 20, true), &block(2));
    w.command(waiting, write(1, 30, true), &block(3));
    w.hang_up(waiting);
    assert!(w.links[waiting].conn.is_drained());
    w.complete_all(0);
    assert_eq!(ends(&mut w, starting), [(1, 0)]);
    assert_eq!(submitted(&w), [10, 20]);
}

#[test]
fn t22_behind_a_failed_flush_no_ordered_write_of_a_stream_with_unflushed_ones_is_carried_out() {
    let (mut w, cntlid) = world(DriveOrder::Barrier);
    let [io, other] = [1, 2].map(|qid| w.io(cntlid, qid));
    w.command(io, write(1, 10, true), &block(1));
    assert_eq!(ends(&mut w, io), [(1, 0)]);
    // The drive may have dropped the first epoch.
    w.host.drives[0].holds = true;
    w.command(other, peer::flush(1, 1), &[]);
    w.fail(0, 0);
    w.host.drives[0].holds = false;
    w.command(io, write(2, 11, true), &block(2));
    assert_eq!(ends(&mut w, io), [(2, POISONED)]);
    assert_eq!(submitted(&w), [10], "a crash would leave the second epoch without the first");
}

#[test]
fn a_failed_write_without_an_order_ends_no_sequence() {
    let (mut w, cntlid) = world(DriveOrder::Barrier);
    let [io, other] = [1, 2].map(|qid| w.io(cntlid, qid));
    w.host.drives[0].holds = true;
    w.command(io, write(1, 10, true), &block(1));
    w.command(other, peer::write(1, 1, 13, 1), &block(4));
    w.fail(0, 1);
    w.command(io, write(2, 11, true), &block(2));
    w.complete_all(0);
    assert_eq!(ends(&mut w, io), [(1, 0), (2, 0)]);
    assert_eq!(starts(&w), 0);
}

#[test]
fn t17_a_drive_takes_only_the_order_that_it_keeps() {
    for order in [DriveOrder::None, DriveOrder::Epochs] {
        let (mut w, cntlid) = world(order);
        let io = w.io(cntlid, 1);
        assert_eq!(w.call(io, write(1, 10, true), &block(1)).status, 0x002, "{order}");
        assert_eq!(w.call(io, peer::write(2, 1, 10, 1), &block(1)).status, 0, "{order}");
    }
}

#[test]
fn a_write_that_a_full_queue_refuses_later_stops_those_behind_it_in_the_queue() {
    let ordered = WriteOrder::Ordered { barrier: true };
    let mut drive = Box::<Drive>::default();
    drive.holds = true;
    let mut queue = BoundedDevice::new(drive, 1, <[u8]>::to_vec);
    for op in 1..=3 {
        let data = Data::Borrowed(&[0; 4096]);
        assert!(matches!(queue.write_in_order(op, op, data, ordered), Submitted::Pending));
    }
    assert!(matches!(queue.flush(4), Submitted::Pending));
    (queue.holds, queue.failing) = (false, true);
    let mut done = Vec::new();
    queue.poll(0, &mut done);
    let mut ends: Vec<_> = done.iter().map(|Done { op, result }| (*op, result.is_ok())).collect();
    ends.sort_unstable();
    assert_eq!(ends, [(1, true), (2, false), (3, false), (4, false)]);
    let writes = queue.history.iter().filter(|(_, what)| matches!(what, What::Write(_)));
    assert_eq!(writes.map(|(lba, _)| *lba).collect::<Vec<_>>(), [1, 2], "the third was not tried");
}
