//! Single rules of drives that keep an order.

use riopipe_model::ssd::{
    Command, FLASH, Model, OPTANE, Order, PageList, Profile, QueueId, Tables,
};
use riopipe_order::block_device::Cause;
use riopipe_order::write_order::{DriveOrder, EpochId, EpochWrite, WriteOrder};

use crate::names::Names;

const BLOCKS: u64 = 16;
/// Longer than any operation takes that does not wait for others.
const LONG: u64 = 1_000_000_000;

/// A drive with a queue.
struct Drive {
    model: Model<Names>,
    queue: QueueId,
    now: u64,
    next: u64,
}

/// The end of an operation.
type End = Result<(), Cause>;

impl Drive {
    fn new(profile: &'static Profile, order: Order, failing: Option<u64>) -> Self {
        let mut model = Model::with_order(profile, order, Names::new(BLOCKS, failing), 1);
        Self { queue: model.open_queue(), model, now: 0, next: 0 }
    }

    fn epochs(tables: Tables) -> Self {
        Self::new(&FLASH, Order { tables, ..Order::of(DriveOrder::Epochs, &FLASH) }, None)
    }

    /// Submits a command. Returns its number.
    fn submit(&mut self, command: Command<u32>) -> u64 {
        self.next += 1;
        self.model.submit(self.now, self.queue, self.next, command);
        self.next
    }

    fn write(&mut self, lba: u64, name: u32, order: WriteOrder) -> u64 {
        self.submit(Command::Write { lba, pages: PageList::One(name), order })
    }

    fn start(&mut self, stream: u16, epoch: u16) -> u64 {
        self.submit(Command::StartStream { first: EpochId { stream, epoch } })
    }

    fn flush(&mut self, stream: u16, epoch: u16) -> u64 {
        self.submit(Command::FlushEpochs { before: EpochId { stream, epoch } })
    }

    /// Waits for what can end. Returns the ends, by number.
    fn wait(&mut self) -> Vec<(u64, End)> {
        self.now += LONG;
        self.model.advance(self.now);
        self.take()
    }

    /// The operations that have ended.
    fn take(&mut self) -> Vec<(u64, End)> {
        let mut done = Vec::new();
        self.model.take_done(self.queue, &mut done);
        let end = |result: Result<_, riopipe_order::block_device::IoError>| {
            result.map(|_| ()).map_err(|error| error.cause().clone())
        };
        let mut ends: Vec<_> = done.into_iter().map(|done| (done.op, end(done.result))).collect();
        ends.sort_by_key(|(op, _)| *op);
        ends
    }

    fn block(&self, lba: usize) -> u32 {
        self.model.pages().blocks[lba]
    }
}

/// A write of an epoch, the last one of it.
fn last(stream: u16, epoch: u16) -> WriteOrder {
    write_of(stream, epoch, None, true)
}

/// A write of an epoch that others follow.
fn open(stream: u16, epoch: u16) -> WriteOrder {
    write_of(stream, epoch, None, false)
}

fn write_of(stream: u16, epoch: u16, follower: Option<EpochId>, barrier: bool) -> WriteOrder {
    WriteOrder::Epochs(EpochWrite { own: EpochId { stream, epoch }, follower, barrier })
}

#[test]
fn a_drive_refuses_an_order_that_it_does_not_keep() {
    for kind in [DriveOrder::None, DriveOrder::Barrier, DriveOrder::Epochs] {
        let mut drive = Drive::new(&FLASH, Order::of(kind, &FLASH), None);
        drive.write(0, 1, WriteOrder::Orderless);
        drive.write(0, 1, WriteOrder::Ordered { barrier: true });
        drive.write(0, 1, last(1, 0));
        drive.flush(1, 1);
        drive.start(2, 0);
        let kept: Vec<_> = drive.wait().into_iter().map(|(_, end)| end.is_ok()).collect();
        let expected = match kind {
            DriveOrder::None => [true, false, false, false, false],
            DriveOrder::Barrier => [true, true, false, false, true],
            DriveOrder::Epochs => [true, false, true, true, true],
        };
        assert_eq!(kept, expected, "{kind}");
    }
    let mut drive = Drive::new(&FLASH, Order::NONE, None);
    drive.write(0, 1, last(1, 0));
    assert_eq!(drive.take(), [(1, Err(Cause::OrderNotKept))]);
}

#[test]
fn an_order_costs_its_penalty_and_none_with_a_protected_cache() {
    let time = |order| {
        let mut drive = Drive::new(&FLASH, order, None);
        for _ in 0..10_000 {
            drive.write(0, 1, WriteOrder::Orderless);
        }
        while let Some(due) = drive.model.next_due() {
            drive.now = due;
            drive.model.advance(due);
        }
        drive.now
    };
    let without = time(Order::NONE);
    for (kind, penalty) in [(DriveOrder::Barrier, 500), (DriveOrder::Epochs, 105)] {
        let with = time(Order::of(kind, &FLASH));
        let expected = without + without * penalty / 10_000;
        assert!(with.abs_diff(expected) < without / 1_000, "{kind}: {without} and {with}");
    }
    assert_eq!(Order::of(DriveOrder::Barrier, &OPTANE).penalty, 0);
    assert_eq!(Order::of(DriveOrder::Epochs, &OPTANE).penalty, 105);
}

#[test]
fn streams_are_not_zero_and_differ() {
    let follower = |stream| Some(EpochId { stream, epoch: 0 });
    for (own, follower) in [(0, None), (0, follower(1)), (1, follower(0)), (1, follower(1))] {
        let mut drive = Drive::epochs(Tables::PUBLISHED);
        drive.write(0, 1, write_of(own, 0, follower, true));
        assert_eq!(drive.take(), [(1, Err(Cause::BadStream))], "{own} {follower:?}");
    }
}

#[test]
fn a_table_of_streams_that_is_full_refuses_another_one() {
    let mut drive = Drive::epochs(Tables { streams: 2, ..Tables::PUBLISHED });
    drive.write(0, 1, open(1, 0));
    drive.write(1, 2, open(2, 0));
    drive.write(2, 3, last(3, 0));
    assert_eq!(drive.take(), [(3, Err(Cause::StreamsFull { streams: 2 }))]);
    // A stream has an end when its epochs have.
    drive.write(0, 4, last(1, 0));
    drive.flush(1, 1);
    assert!(drive.wait().iter().all(|(_, end)| end.is_ok()));
    // The refused write has stopped its stream: a later epoch must not become durable without it.
    drive.write(2, 5, last(3, 1));
    assert_eq!(drive.take(), [(6, Err(Cause::StreamFailed { stream: 3 }))]);
    drive.start(3, 0);
    drive.write(2, 6, last(3, 0));
    drive.flush(3, 1);
    assert!(drive.wait().iter().all(|(_, end)| end.is_ok()));
    assert_eq!(drive.block(2), 6);
}

#[test]
fn any_number_of_streams_may_take_turns() {
    let mut drive = Drive::epochs(Tables { streams: 1, ..Tables::PUBLISHED });
    for stream in 1..=300 {
        drive.write(0, stream.into(), last(stream, 0));
        drive.flush(stream, 1);
        assert!(drive.wait().iter().all(|(_, end)| end.is_ok()), "stream {stream}");
    }
    // And each goes on where it was.
    drive.write(0, 301, last(7, 1));
    drive.flush(7, 2);
    assert!(drive.wait().iter().all(|(_, end)| end.is_ok()));
}

#[test]
fn epoch_numbers_wrap() {
    let mut drive = Drive::epochs(Tables::PUBLISHED);
    for epoch in 0..140_000_u32 {
        // An epoch that comes early, and the one before it.
        let order = epoch ^ 1;
        drive.write(0, order, last(1, order as u16));
        if epoch % 100 == 99 {
            drive.flush(1, (epoch + 1) as u16);
            assert!(drive.wait().iter().all(|(_, end)| end.is_ok()), "epoch {epoch}");
            assert_eq!(drive.block(0), epoch, "the later epoch is over the earlier one");
        }
    }
}

#[test]
fn a_write_behind_its_barrier_is_refused() {
    let mut drive = Drive::epochs(Tables::PUBLISHED);
    drive.write(0, 1, last(1, 0));
    drive.write(0, 2, open(1, 0));
    let ended = Cause::EpochEnded(EpochId { stream: 1, epoch: 0 });
    assert_eq!(drive.take(), [(2, Err(ended.clone()))]);
    assert_eq!(drive.wait(), [(1, Ok(()))]);
    // Also when the epoch is mapped.
    let mut drive = Drive::epochs(Tables::PUBLISHED);
    drive.write(0, 1, last(1, 0));
    drive.flush(1, 1);
    drive.wait();
    drive.write(0, 2, open(1, 0));
    assert_eq!(drive.take(), [(3, Err(ended))]);
}

#[test]
fn a_stream_that_starts_anew_ends_what_waits_and_loses_what_is_out_of_order() {
    let mut drive = Drive::epochs(Tables { epochs: 4, ..Tables::PUBLISHED });
    let follower = Some(EpochId { stream: 2, epoch: 0 });
    let in_order = drive.write(0, 1, open(1, 0));
    let out_of_order = drive.write(1, 2, last(1, 2));
    let dual = drive.write(2, 3, write_of(1, 1, follower, true));
    let of_another = drive.write(3, 4, last(3, 1));
    let completed = [in_order, out_of_order, dual, of_another].map(|op| (op, Ok(())));
    assert_eq!(drive.wait(), completed);
    let held_back = drive.write(4, 5, last(1, 9));
    let flush = drive.flush(1, 3);
    let in_flight = drive.write(5, 6, open(1, 0));
    let of_follower = drive.write(6, 7, last(2, 1));
    let start = drive.start(1, 100);
    let restarted = || Err(Cause::StreamRestarted { stream: 1 });
    let ended = [held_back, flush, in_flight].map(|op| (op, restarted()));
    assert_eq!(drive.take(), ended);
    assert_eq!(drive.wait(), [(of_follower, Ok(())), (start, Ok(()))]);
    assert_eq!(
        [0, 1, 2, 3, 4, 5, 6].map(|lba| drive.block(lba)),
        [1, 0, 0, 4, 0, 0, 7],
        "what was in order is kept, the rest of the stream is lost, and other streams go on"
    );
    // The stream that followed has lost a write, so it can't go on.
    let after = [drive.flush(2, 2), drive.write(7, 8, last(2, 2))];
    let failed = after.map(|op| (op, Err(Cause::StreamFailed { stream: 2 })));
    assert_eq!(drive.take(), failed);
    // The stream begins with the epoch that was named.
    let again = [drive.write(1, 9, last(1, 100)), drive.flush(1, 101)].map(|op| (op, Ok(())));
    assert_eq!(drive.wait(), again);
    drive.model.power_cut(drive.now, 7);
    assert_eq!([0, 1].map(|lba| drive.block(lba)), [1, 9]);
}

/// A write of streams 4 and 2 is lost when stream 4 starts anew. Then stream 2 fails at an earlier epoch,
/// which does not concern what stream 4 writes now.
#[test]
fn a_stream_that_started_anew_does_not_fail_with_its_old_writes() {
    let mut drive = Drive::epochs(Tables::PUBLISHED);
    let follower = |stream, epoch| Some(EpochId { stream, epoch });
    drive.write(0, 1, write_of(2, 0, follower(1, 0), true));
    drive.write(1, 2, write_of(4, 0, follower(2, 1), true));
    drive.start(4, 0);
    drive.start(1, 0);
    drive.wait();
    let flush = drive.flush(2, 1);
    assert_eq!(drive.wait(), [(flush, Err(Cause::StreamFailed { stream: 2 }))]);
    let again = [drive.write(1, 3, last(4, 0)), drive.flush(4, 1)].map(|op| (op, Ok(())));
    assert_eq!(drive.wait(), again);
}

#[test]
fn a_failed_write_stops_its_stream_and_those_that_follow_it() {
    let order = Order::of(DriveOrder::Epochs, &FLASH);
    let mut drive = Drive::new(&FLASH, order, Some(0));
    let broken = || Err(Cause::Failed("a broken block".into()));
    let write = drive.write(0, 1, last(1, 0));
    let follower = Some(EpochId { stream: 2, epoch: 0 });
    let dual = drive.write(1, 2, write_of(1, 1, follower, true));
    let flushes = [drive.flush(1, 1), drive.flush(2, 1)];
    let whole = drive.submit(Command::Flush);
    assert_eq!(
        drive.wait(),
        [
            (write, broken()),
            (dual, Ok(())),
            (flushes[0], Err(Cause::StreamFailed { stream: 1 })),
            (flushes[1], Err(Cause::StreamFailed { stream: 2 })),
            (whole, Ok(())),
        ]
    );
}

#[test]
fn a_failed_write_stops_a_cache_barrier_until_it_starts_anew() {
    let mut drive = Drive::new(&FLASH, Order::of(DriveOrder::Barrier, &FLASH), Some(0));
    let barrier = WriteOrder::Ordered { barrier: true };
    let failed = Err(Cause::StreamFailed { stream: 0 });
    let before = drive.write(1, 1, barrier);
    let broken = drive.write(0, 2, WriteOrder::Ordered { barrier: false });
    let beside = drive.write(2, 3, barrier);
    let behind = drive.write(3, 4, barrier);
    let orderless = drive.write(4, 5, WriteOrder::Orderless);
    let ends: Vec<_> = drive.wait().into_iter().map(|(op, end)| (op, end.is_ok())).collect();
    let expected =
        [(before, true), (broken, false), (beside, true), (behind, false), (orderless, true)];
    assert_eq!(ends, expected);
    let late = drive.write(3, 6, barrier);
    assert_eq!(drive.wait(), [(late, failed)]);
    let start = drive.start(0, 0);
    let again = drive.write(3, 7, barrier);
    assert_eq!(drive.wait(), [(start, Ok(())), (again, Ok(()))]);
    assert_eq!(drive.block(3), 7);
}

#[test]
fn a_new_sequence_of_epochs_does_not_save_writes_of_the_last_one() {
    let mut drive = Drive::new(&FLASH, Order::of(DriveOrder::Barrier, &FLASH), None);
    let barrier = WriteOrder::Ordered { barrier: true };
    let ordered = WriteOrder::Ordered { barrier: false };
    for name in [10, 20] {
        // It is refused at once, while those behind it are in flight.
        let refused = drive.write(BLOCKS, name, ordered);
        let beside = drive.write(1, name, barrier);
        let behind = [(2, ordered), (3, barrier), (5, barrier)]
            .map(|(lba, order)| drive.write(lba, name, order));
        let start = drive.start(0, 0);
        let again = drive.write(4, name, barrier);
        let ends: Vec<_> = drive.wait().into_iter().map(|(op, end)| (op, end.is_ok())).collect();
        let mut expected = vec![(refused, false), (beside, true)];
        expected.extend(behind.map(|op| (op, false)));
        expected.extend([(start, true), (again, true)]);
        assert_eq!(ends, expected);
        assert_eq!([1, 2, 3, 4, 5].map(|lba| drive.block(lba)), [name, 0, 0, name, 0]);
    }
}

#[test]
fn a_queue_that_closes_ends_what_waits() {
    let mut drive = Drive::epochs(Tables { epochs: 2, ..Tables::PUBLISHED });
    let flush = drive.flush(1, 1);
    let held_back = drive.write(0, 1, last(1, 5));
    assert_eq!(drive.wait(), []);
    assert!(drive.model.has_waiting() && drive.model.next_due().is_none());
    drive.model.end_waiting_of(drive.now, drive.queue);
    let ends = drive.take();
    assert_eq!(ends.iter().map(|(op, _)| *op).collect::<Vec<_>>(), [flush, held_back]);
    assert!(ends.iter().all(|(_, end)| end.is_err()) && !drive.model.has_waiting());
}
