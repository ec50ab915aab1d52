//! The promises of the drive to its queues.

use core::iter;

use riopipe_order::write_order::EpochWrite;

use super::*;
use crate::ssd::names::{Names, no_space};
use crate::ssd::{FLASH, OPTANE, Order};

/// Later than the completion of every operation in a test.
const END: u64 = 1_000_000_000;

/// The operations that have completed on `queue`, in the order of their completions.
fn completed_ops(model: &mut Model<Names>, queue: QueueId) -> Vec<u64> {
    let mut done = Vec::new();
    model.take_done(queue, &mut done);
    done.into_iter().map(|done| done.op).collect()
}

fn write(lba: u64, page: u32) -> Command<u32> {
    Command::Write { lba, pages: PageList::One(page), order: WriteOrder::Orderless }
}

#[test]
fn a_new_queue_has_no_completions_of_a_closed_one() {
    let mut model = Model::new(&FLASH, Names::zeroes(4), 1);
    let first = model.open_queue();
    let second = model.open_queue();
    assert_ne!(first, second);
    model.submit(0, first, 1, write(0, 7));
    model.submit(0, second, 2, write(1, 7));
    model.advance(END);
    model.close_queue(first);
    let third = model.open_queue();
    assert_eq!(third, first, "the place of a closed queue is used again");
    assert!(completed_ops(&mut model, third).is_empty());
    assert_eq!(completed_ops(&mut model, second), [2]);
    model.submit(END, third, 3, write(2, 7));
    model.advance(2 * END);
    assert_eq!(completed_ops(&mut model, third), [3]);
}

#[test]
fn operations_that_are_due_together_complete_in_the_order_of_submission() {
    let mut model = Model::new(&OPTANE, Names::zeroes(4), 1);
    let queue = model.open_queue();
    for (now, ops) in [(0, [1, 2, 3]), (END, [4, 5, 6]), (2 * END, [7, 8, 9])] {
        for op in ops {
            model.submit(now, queue, op, Command::Flush);
        }
        assert_eq!(model.next_due(), Some(now + OPTANE.flush_base_ns));
        model.advance(now + OPTANE.flush_base_ns);
        assert_eq!(completed_ops(&mut model, queue), ops);
    }
}

#[test]
fn no_power_cut_takes_a_content_that_was_made_durable() {
    let mut taken_otherwise = 0;
    for (seed, durable) in (0..50).flat_map(|seed| iter::zip([seed; 2], [true, false])) {
        let mut model = Model::new(&FLASH, Names::zeroes(4), seed);
        let queue = model.open_queue();
        model.submit(0, queue, 1, write(0, 7));
        model.submit(0, queue, 2, write(1, 8));
        model.advance(END);
        if durable {
            model.make_all_durable();
        }
        let cut = model.power_cut(END, seed);
        if durable {
            assert_eq!(cut, PowerCut::default());
            assert_eq!(model.pages().blocks, [7, 8, 0, 0]);
        } else {
            taken_otherwise += cut.blocks_lost;
        }
    }
    assert!(taken_otherwise > 0);
}

#[test]
fn an_operation_on_a_block_that_fails_returns_the_cause() {
    let mut model = Model::new(&OPTANE, Names::with_pages(&[1, 2, 3, 4], 0), 1);
    let queue = model.open_queue();
    model.pages_mut().failing = Some(2);
    let pages = PageList::Many([7, 7, 7, 7].into());
    model.submit(0, queue, 1, Command::Write { lba: 0, pages, order: WriteOrder::Orderless });
    model.submit(
        END,
        queue,
        2,
        Command::Zeroes { what: Operation::WriteZeroes, lba: 2, blocks: 1 },
    );
    model.submit(2 * END, queue, 3, Command::Read { lba: 0, blocks: 4 });
    model.submit(3 * END, queue, 4, Command::Read { lba: 0, blocks: 2 });
    model.submit(4 * END, queue, 5, Command::Flush);
    model.advance(5 * END);
    let mut done = Vec::new();
    model.take_done(queue, &mut done);
    let failed = |done: &Done<Vec<u32>>| match &done.result {
        Ok(_) => None,
        Err(error) => Some((done.op, error.operation(), error.cause().clone())),
    };
    let failures: Vec<_> = done.iter().filter_map(failed).collect();
    let expected = [(1, Operation::Write), (2, Operation::WriteZeroes), (3, Operation::Read)];
    assert_eq!(failures, expected.map(|(op, what)| (op, what, no_space())));
    assert_eq!(done[3].result.as_ref().unwrap().as_deref(), Some(&[7, 7][..]));
    assert_eq!(model.pages().blocks, [7, 7, 3, 4], "the blocks behind the failure are not written");
    assert_eq!(model.pages().free_pages, 2, "the pages of these blocks are free again");
}

#[test]
fn a_drive_without_pages_for_old_contents_writes_its_cache_back() {
    for kind in [DriveOrder::None, DriveOrder::Barrier, DriveOrder::Epochs] {
        let names = Names::with_pages(&[1, 2, 3, 4], 1);
        let mut model = Model::with_order(&FLASH, Order::of(kind, &FLASH), names, 1);
        let queue = model.open_queue();
        for lba in 0..4 {
            model.submit(0, queue, lba, write(lba, 7));
        }
        model.advance(END);
        let mut done = Vec::new();
        model.take_done(queue, &mut done);
        assert!(done.iter().all(|done| done.result.is_ok()), "{kind}");
        assert_eq!(model.pages().blocks, [7; 4], "{kind}");
        let losable = (0..4).filter(|lba| model.older_contents(*lba).next().is_some()).count();
        assert_eq!(losable, 1, "{kind}: there is one page");
    }
}

#[test]
fn a_write_fails_if_its_order_keeps_the_cache_from_being_written_back() {
    let names = Names::with_pages(&[1, 2], 1);
    let order = Order::of(DriveOrder::Epochs, &FLASH);
    let mut model = Model::with_order(&FLASH, order, names, 1);
    let queue = model.open_queue();
    for lba in 0..2 {
        // Epoch 0 never comes.
        let own = EpochId { stream: 1, epoch: 1 };
        let order = WriteOrder::Epochs(EpochWrite { own, follower: None, barrier: false });
        model.submit(0, queue, lba, Command::Write { lba, pages: PageList::One(7), order });
    }
    model.advance(END);
    let mut done = Vec::new();
    model.take_done(queue, &mut done);
    let failed: Vec<_> = done.iter().map(|done| done.result.is_err()).collect();
    assert_eq!(failed, [false, true]);
    model.power_cut(END, 1);
    assert_eq!(model.pages().blocks, [1, 2]);
}

#[test]
fn a_reset_ends_all_streams_and_what_they_hold_back() {
    let order = Order::of(DriveOrder::Epochs, &FLASH);
    let mut model = Model::with_order(&FLASH, order, Names::zeroes(4), 1);
    let queue = model.open_queue();
    let write = |lba, page, epoch| {
        let own = EpochId { stream: 3, epoch };
        let order = WriteOrder::Epochs(EpochWrite { own, follower: None, barrier: true });
        Command::Write { lba, pages: PageList::One(page), order }
    };
    let flush = |stream, epoch| Command::FlushEpochs { before: EpochId { stream, epoch } };
    model.submit(0, queue, 1, write(0, 7, 0));
    model.submit(0, queue, 2, write(1, 8, 2)); // epoch 1 does not arrive
    model.submit(0, queue, 3, flush(3, 3));
    model.submit(0, queue, 4, flush(9, 1));
    model.advance(END);
    assert_eq!(completed_ops(&mut model, queue), [1, 2]);
    assert!(model.has_waiting());

    model.reset_streams(END, 65_535);
    let mut done = Vec::new();
    model.take_done(queue, &mut done);
    assert!(done.len() == 2 && done.iter().all(|done| done.result.is_err()), "{done:?}");
    assert!(!model.has_waiting());
    assert_eq!(model.pages().read(0, 2).unwrap(), [7, 0], "what was in order stays");

    model.submit(END, queue, 5, write(2, 9, 65_535));
    model.submit(END, queue, 6, write(3, 10, 0));
    model.submit(END, queue, 7, flush(3, 1));
    model.advance(2 * END);
    let mut completed = completed_ops(&mut model, queue);
    completed.sort_unstable();
    assert_eq!(completed, [5, 6, 7]);
    model.power_cut(2 * END, 1);
    assert_eq!(model.pages().read(0, 4).unwrap(), [7, 0, 9, 10]);
}
