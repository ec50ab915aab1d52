//! The orders that `ssd:` drives keep, through the queues of real drives.

use std::sync::Arc;
use std::time::Duration;

use riopipe_media::{BLOCK_BYTES, Cause, Data, Drive, Queue, Submitted, open_drive};
use riopipe_order::write_order::{DriveOrder, EpochId, EpochWrite, WriteOrder};
use riopipe_platform::now_ns;

const BARRIER: WriteOrder = WriteOrder::Ordered { barrier: true };

fn open(options: &str) -> Arc<dyn Drive> {
    open_drive(&format!("ssd:flash,size=1M,lazy{options}")).unwrap()
}

/// A write that is the last one of an epoch of stream 5.
fn last(epoch: u16) -> WriteOrder {
    let own = EpochId { stream: 5, epoch };
    WriteOrder::Epochs(EpochWrite { own, follower: None, barrier: true })
}

fn write(queue: &mut dyn Queue, op: u64, order: WriteOrder) {
    let block = [op as u8; BLOCK_BYTES];
    let submitted = queue.write_in_order(op, op, Data::Borrowed(&block), order);
    assert!(matches!(submitted, Submitted::Pending), "{submitted:?}");
}

/// Waits for the end of `count` operations. Returns their numbers, and whether each has succeeded.
/// A thread may sleep until the queue's next deadline.
fn wait(queue: &mut dyn Queue, count: usize) -> Vec<(u64, bool)> {
    let mut done = Vec::new();
    queue.kick(now_ns());
    while done.len() < count {
        let now = now_ns();
        queue.poll(now, &mut done);
        if done.len() < count {
            let deadline = queue.next_deadline().expect("operations are in flight");
            std::thread::sleep(Duration::from_nanos(deadline.saturating_sub(now)));
        }
    }
    let mut ends: Vec<_> = done.iter().map(|done| (done.op, done.result.is_ok())).collect();
    ends.sort_unstable();
    ends
}

#[test]
fn a_drive_reports_its_order_and_takes_only_such_writes() {
    for (options, order) in [
        ("", DriveOrder::None),
        (",order=barrier", DriveOrder::Barrier),
        (",order=op,penalty=0", DriveOrder::Epochs),
    ] {
        let drive = open(options);
        assert_eq!(drive.order(), order, "{options}");
        let mut queue = drive.open_queue(8).unwrap();
        write(queue.as_mut(), 1, WriteOrder::Orderless);
        write(queue.as_mut(), 2, BARRIER);
        write(queue.as_mut(), 3, last(0));
        let (barrier, epochs) = (order == DriveOrder::Barrier, order == DriveOrder::Epochs);
        let expected = [(1, true), (2, barrier), (3, epochs)];
        assert_eq!(wait(queue.as_mut(), 3), expected, "{options}");
    }
    // Other drives refuse within the call.
    let mut queue = open_drive("mem:1M").unwrap().open_queue(8).unwrap();
    let block = [1; BLOCK_BYTES];
    for refused in [
        queue.write_in_order(1, 0, Data::Borrowed(&block), BARRIER),
        queue.flush_epochs(2, EpochId { stream: 5, epoch: 0 }),
        queue.start_stream(3, EpochId { stream: 5, epoch: 0 }),
    ] {
        let Submitted::Done(Err(error)) = refused else { panic!("{refused:?}") };
        assert_eq!(error.cause(), &Cause::OrderNotKept);
        assert!(error.to_string().contains("order=op"), "{error}");
    }
    assert!(matches!(
        queue.write_in_order(4, 0, Data::Borrowed(&block), WriteOrder::Orderless),
        Submitted::Done(Ok(_)) | Submitted::Pending
    ));
}

/// A FLUSH of one queue waits for an epoch that comes over another one. The thread of the first
/// queue sleeps as long as the queue permits, and nothing wakes it.
#[test]
fn a_flush_waits_for_an_epoch_of_another_queue() {
    let drive = open(",order=op");
    let mut first = drive.open_queue(8).unwrap();
    let mut second = drive.open_queue(8).unwrap();
    let start = EpochId { stream: 5, epoch: 65_535 };
    assert!(matches!(second.start_stream(1, start), Submitted::Pending));
    assert_eq!(wait(second.as_mut(), 1), [(1, true)]);
    let flush = EpochId { stream: 5, epoch: 1 };
    assert!(matches!(first.flush_epochs(2, flush), Submitted::Pending));
    write(first.as_mut(), 3, last(0));
    assert_eq!(wait(first.as_mut(), 1), [(3, true)], "a write does not wait for earlier epochs");
    write(second.as_mut(), 4, last(65_535));
    assert_eq!(wait(second.as_mut(), 1), [(4, true)]);
    assert_eq!(wait(first.as_mut(), 1), [(2, true)]);
    for seed in 0..20 {
        assert_eq!(drive.power_cut(seed).unwrap().blocks_lost, 0, "all was flushed");
        drive.power_on();
    }
}

#[test]
fn a_queue_that_is_dropped_does_not_wait_for_what_never_comes() {
    let drive = open(",order=op");
    let mut queue = drive.open_queue(8).unwrap();
    assert!(matches!(queue.flush_epochs(1, EpochId { stream: 5, epoch: 9 }), Submitted::Pending));
    write(queue.as_mut(), 2, last(300));
    queue.kick(now_ns());
    assert_eq!(queue.in_flight(), 2);
    drop(queue);
    // The write that was never taken in has stopped its stream.
    let mut queue = drive.open_queue(8).unwrap();
    assert!(matches!(queue.flush_epochs(3, EpochId { stream: 5, epoch: 301 }), Submitted::Pending));
    assert_eq!(wait(queue.as_mut(), 1), [(3, false)]);
}

/// The order of epochs holds across a power cut, in memory and in a file.
#[test]
fn a_power_cut_leaves_a_prefix_of_epochs() {
    let folder = tempfile::tempdir().unwrap();
    let mut lost = 0;
    for (seed, kind) in (0..40).flat_map(|seed| [(seed, "barrier"), (seed, "op")]) {
        let file = format!("{}/{kind}-{seed}", folder.path().display());
        let options = if seed % 2 == 0 { String::new() } else { format!(",file={file}") };
        let drive = open(&format!(",order={kind}{options}"));
        let mut queue = drive.open_queue(32).unwrap();
        for op in 0..20 {
            write(queue.as_mut(), op, if kind == "op" { last(op as u16) } else { BARRIER });
        }
        assert!(wait(queue.as_mut(), 20).iter().all(|(_, ok)| *ok));
        drive.power_cut(seed);
        drive.power_on();
        assert!(matches!(queue.read(99, 0, 20), Submitted::Pending));
        queue.kick(now_ns());
        let mut done = Vec::new();
        while done.is_empty() {
            queue.poll(now_ns(), &mut done);
        }
        let buf = done.pop().unwrap().result.unwrap().unwrap();
        let found: Vec<u8> = buf.chunks_exact(BLOCK_BYTES).map(|block| block[0]).collect();
        // Block 0 has zeroes in either case.
        let kept = found.iter().skip(1).take_while(|byte| **byte != 0).count();
        let mut prefix: Vec<u8> = (0..=kept as u8).collect();
        prefix.resize(20, 0);
        assert_eq!(found, prefix, "{kind}, seed {seed}");
        lost += 19 - kept;
    }
    assert!(lost > 0);
}
