//! Other threads, async code and event loops that wait for a stream, and calls with a time limit.

use std::future::Future;
use std::os::fd::AsFd;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use riopipe::{
    BLOCK_BYTES, CloseError, Marks, Place, Seq, Stream, StreamOptions, SubmitErrorKind, Until,
    Volume, WaitError,
};
use riopipe_net::wait_readable;

use crate::crash::{Node, SOON, open_soon, put, soon, volume_on, with_loss_timeout};
use crate::site::open_options;

#[path = "../../examples/group_commit.rs"]
mod group_commit;

/// Less than the time after which the background thread takes over a stream without a watch.
const BEFORE_ANY_TIMER: Duration = Duration::from_millis(40);
/// The number of attempts to be faster than that: on a busy machine some may be slow.
const ATTEMPTS: u64 = 50;
/// The time limit of waits that must not succeed.
const SHORT: Duration = Duration::from_millis(30);

fn volume(nodes: &[Node]) -> Volume {
    open_soon(&volume_on(nodes), &open_options()).0
}

fn stream(volume: &Volume) -> Stream {
    volume.stream(0, &StreamOptions::default()).unwrap()
}

/// A minimal async runtime.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// Counts how often it is woken.
#[derive(Default)]
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// The time from a submission until `visible` returns: the shortest of many attempts.
fn fastest(stream: &mut Stream, durable: bool, visible: impl Fn(&Stream, Seq)) -> Duration {
    let attempt = |number| {
        let begun = Instant::now();
        let seq = put(stream, number, 1, number, Place::InPlace, durable);
        visible(stream, seq);
        begun.elapsed()
    };
    (1..=ATTEMPTS).map(attempt).min().unwrap()
}

/// The owner submits and then only watches: no wait depends on the background thread's timer.
#[test]
fn p8_submitted_groups_are_visible_to_watchers_without_a_timer() {
    let nodes = [Node::new()];
    let volume = volume(&nodes);
    let mut stream = stream(&volume);
    let took = fastest(&mut stream, true, |stream, seq| {
        stream.watch().wait_durable(seq, Some(SOON)).unwrap();
    });
    assert!(took < BEFORE_ANY_TIMER, "waiting for a durable group took {took:?}");
    let took = fastest(&mut stream, false, |stream, seq| {
        stream.watch().wait_complete(seq, Some(SOON)).unwrap();
    });
    assert!(took < BEFORE_ANY_TIMER, "waiting for a group that was not sent took {took:?}");
    let took = fastest(&mut stream, false, |stream, seq| {
        let marks = stream.watch().wait_durable(seq, Some(SOON)).unwrap();
        assert!(marks.durable >= seq);
    });
    assert!(took < BEFORE_ANY_TIMER, "having a group flushed took {took:?}");
    let took = fastest(&mut stream, true, |stream, seq| {
        let watch = stream.watch();
        soon("it is durable", || watch.marks().durable >= seq);
    });
    assert!(took < BEFORE_ANY_TIMER, "reading the marks took {took:?}");
    stream.close().unwrap();
    volume.close().unwrap();
}

/// Threads wait while the owner sleeps in a call, and while it is not calling.
#[test]
fn p8_many_threads_wait_for_one_stream() {
    const THREADS: u64 = 4;
    const EACH: u64 = 25;
    let nodes = [Node::new()];
    let volume = volume(&nodes);
    let mut stream = stream(&volume);
    let (watch, waker) = (stream.watch(), stream.waker());
    let (queue, requests) = mpsc::channel::<(u64, mpsc::Sender<Seq>)>();
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (queue, watch, waker) = (queue.clone(), watch.clone(), waker.clone());
            scope.spawn(move || {
                for round in 0..EACH {
                    let (reply, answer) = mpsc::channel();
                    queue.send((number * EACH + round, reply)).unwrap();
                    waker.wake();
                    let seq = answer.recv().unwrap();
                    let marks = match round % 3 {
                        0 => watch.wait_durable(seq, Some(SOON)).unwrap(),
                        1 => block_on(watch.durable(seq)).unwrap(),
                        _ => watch.wait_complete(seq, Some(SOON)).unwrap(),
                    };
                    assert!(marks.complete >= seq);
                }
            });
        }
        drop(queue);
        let mut left = THREADS * EACH;
        while left > 0 {
            // By turns the owner sleeps on its stream, and on its queue alone.
            let first = match left % 2 {
                0 => {
                    match stream.wait(Until::Woken, Some(SHORT)) {
                        Ok(_) | Err(WaitError::Deadline(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                    None
                }
                _ => Some(requests.recv().unwrap()),
            };
            for (lba, reply) in first.into_iter().chain(requests.try_iter()) {
                let seq = put(&mut stream, lba, 1, lba + 1, Place::InPlace, lba % 2 == 0);
                reply.send(seq).unwrap();
                left -= 1;
            }
        }
    });
    stream.close().unwrap();
    volume.close().unwrap();
}

#[test]
fn a_future_wakes_its_last_poller_and_may_be_polled_and_dropped_at_any_time() {
    let nodes = [Node::new()];
    let volume = volume(&nodes);
    let mut stream = stream(&volume);
    let watch = stream.watch();
    let next = Seq(stream.last().0 + 1);
    let (first, second) = (Arc::new(Count::default()), Arc::new(Count::default()));
    let wakers = [Waker::from(Arc::clone(&first)), Waker::from(Arc::clone(&second))];
    let mut future = pin!(watch.durable(next));
    let mut dropped = Box::pin(watch.complete(next));
    for waker in &wakers {
        // The group is not submitted yet, and a wait for it may begin.
        assert!(future.as_mut().poll(&mut Context::from_waker(waker)).is_pending());
    }
    assert!(dropped.as_mut().poll(&mut Context::from_waker(&wakers[0])).is_pending());
    assert_eq!(Arc::strong_count(&first), 3, "the one that is in the list has a clone");
    drop(dropped);
    assert_eq!(Arc::strong_count(&first), 2, "it has left the list");
    assert_eq!(put(&mut stream, 1, 1, 1, Place::Fresh, false), next);
    soon("the future is woken", || second.0.load(Ordering::SeqCst) > 0);
    assert_eq!(first.0.load(Ordering::SeqCst), 0, "the first waker has been replaced");
    let Poll::Ready(Ok(Marks { durable, .. })) =
        future.as_mut().poll(&mut Context::from_waker(&wakers[0]))
    else {
        panic!("it was woken, so the group is durable")
    };
    assert!(durable >= next);
    assert_eq!(second.0.load(Ordering::SeqCst), 1, "woken once");
    assert!(block_on(watch.durable(next)).is_ok(), "a reached mark needs no wait");
    stream.close().unwrap();
    volume.close().unwrap();
}

#[test]
fn a_waker_ends_a_wait_before_and_during_it() {
    let nodes = [Node::new()];
    let volume = volume(&nodes);
    let mut stream = stream(&volume);
    let waker = stream.waker();
    waker.wake();
    waker.wake();
    stream.poll().unwrap();
    stream.wait(Until::Woken, Some(SOON)).expect("a call before the wait is not lost");
    let again = stream.wait(Until::Woken, Some(SHORT));
    assert!(matches!(again, Err(WaitError::Deadline(_))), "several calls count as one");
    for _ in 0..20 {
        let other = waker.clone();
        thread::scope(|scope| {
            scope.spawn(move || other.wake());
            stream.wait(Until::Woken, Some(SOON)).unwrap();
        });
    }
    // A call interrupts another wait, and the mark still moves later.
    waker.wake();
    let error = stream.wait(Until::Moved, Some(SOON)).unwrap_err();
    assert!(matches!(error, WaitError::Woken) && error.is_retryable(), "{error}");
    let seq = put(&mut stream, 1, 1, 1, Place::Fresh, true);
    assert!(stream.wait(Until::Moved, Some(SOON)).unwrap().complete >= seq);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    // If a wait succeeds, a call is kept for the next one. Reads are not interrupted.
    waker.wake();
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    stream.read(1, &mut [0; BLOCK_BYTES], Some(SOON)).unwrap();
    stream.wait(Until::Woken, Some(SOON)).unwrap();
    stream.close().unwrap();
    volume.close().unwrap();
    waker.wake();
}

/// No wait outlasts its stream.
#[test]
fn p8_the_end_of_a_stream_ends_all_waits() {
    let mut nodes = [Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &with_loss_timeout(Duration::from_millis(100)));
    let never = Seq(1 << 40);
    // Closed.
    let mut one = stream(&volume);
    let last = put(&mut one, 1, 1, 1, Place::Fresh, false);
    let watch = one.watch();
    thread::scope(|scope| {
        let waits = [scope.spawn(|| watch.wait_durable(never, Some(SOON)))];
        let future = scope.spawn(|| block_on(watch.complete(never)));
        assert!(one.close().unwrap() >= last);
        for ended in waits.into_iter().chain([future]) {
            let error = ended.join().unwrap().unwrap_err();
            assert!(matches!(error, WaitError::Closed { .. }), "{error}");
        }
    });
    assert!(watch.wait_durable(last, None).is_ok(), "a mark that was reached counts");
    assert!(matches!(watch.wait_complete(never, None), Err(WaitError::Closed { .. })));
    // Dropped.
    let two = stream(&volume);
    let watch = two.watch();
    thread::scope(|scope| {
        let waits = scope.spawn(|| watch.wait_durable(never, Some(SOON)));
        drop(two);
        let error = waits.join().unwrap().unwrap_err();
        assert!(matches!(error, WaitError::Dropped { seq } if seq == never), "{error}");
    });
    // Failed, while the owner is not calling.
    let mut three = stream(&volume);
    let kept = put(&mut three, 1, 1, 2, Place::InPlace, true);
    let watch = three.watch();
    watch.wait_durable(kept, Some(SOON)).unwrap();
    nodes[0].kill();
    let lost = put(&mut three, 1, 1, 3, Place::InPlace, true);
    let error = watch.wait_durable(lost, Some(SOON)).unwrap_err();
    let WaitError::Failed(failure) = error else { panic!("{error}") };
    assert_eq!(three.poll().unwrap_err(), failure, "the same error everywhere (P6)");
    assert!(block_on(watch.durable(kept)).is_ok());
    assert!(matches!(block_on(watch.complete(lost)), Err(WaitError::Failed(_))));
    // A close that fails returns the stream: it may be reopened, and waits work again.
    let mut three = three.close_within(SOON).unwrap_err().back;
    nodes[0].start();
    three.waker().wake();
    soon("the stream is reopened", || three.reopen().is_ok());
    three.wait(Until::Woken, Some(SOON)).expect("a call before the reopening is kept");
    let seq = put(&mut three, 1, 1, 4, Place::InPlace, true);
    watch.wait_durable(seq, Some(SOON)).unwrap();
    three.close().unwrap();
    volume.close().unwrap();
}

/// The descriptor may be held while the stream is used. It is also readable when the background thread
/// has moved a mark.
#[test]
fn an_event_loop_waits_for_the_descriptor() {
    let nodes = [Node::new()];
    let volume = volume(&nodes);
    let mut stream = stream(&volume);
    let fd = stream.event_fd().unwrap();
    let mut seq = Seq::ZERO;
    for number in 1..=20 {
        seq = put(&mut stream, number, 1, number, Place::Fresh, true);
        while stream.poll().unwrap().durable < seq {
            let left = stream.next_deadline().map_or(SOON, |at| at - Instant::now());
            assert!(wait_readable(fd.as_fd(), left.min(SOON)).unwrap() || left < SOON);
        }
    }
    // Another thread reads the mark first, with the background thread's help.
    let watch = stream.watch();
    assert_eq!(stream.poll().unwrap().durable, seq);
    let seq = put(&mut stream, 30, 1, 1, Place::Fresh, true);
    watch.wait_durable(seq, Some(SOON)).unwrap();
    assert!(wait_readable(fd.as_fd(), SOON).unwrap(), "the event loop is woken");
    assert_eq!(stream.poll().unwrap().durable, seq);
    stream.close().unwrap();
    volume.close().unwrap();
    drop(fd);
}

#[test]
fn t14_a_submission_waits_for_space_and_returns_its_buffers() {
    let mut nodes = [Node::new()];
    let volume = volume(&nodes);
    let options =
        StreamOptions { kept_bytes_max: 8 * BLOCK_BYTES as u64, ..StreamOptions::default() };
    let mut stream = volume.stream(0, &options).unwrap();
    for number in 0..100 {
        let mut buf = stream.buf(2 * BLOCK_BYTES).unwrap();
        buf[..8].copy_from_slice(&u64::to_le_bytes(number));
        let group = stream.group().write(2 * number, buf, Place::Fresh);
        match number % 2 {
            0 => group.submit_or_wait(Some(SOON)).unwrap(),
            _ => group.submit_durable_or_wait(None).unwrap(),
        };
    }
    stream.wait(Until::Durable(stream.last()), Some(SOON)).unwrap();
    // No group completes any more, so there is no space.
    nodes[0].kill();
    stream.waker().wake();
    let error = loop {
        let buf = stream.buf(4 * BLOCK_BYTES).unwrap();
        if let Err(error) =
            stream.group().write(300, buf, Place::InPlace).submit_or_wait(Some(SHORT))
        {
            break error;
        }
    };
    assert!(matches!(error.kind, SubmitErrorKind::Full(_)) && error.is_retryable(), "{error}");
    assert_eq!(error.bufs.len(), 1);
    stream.wait(Until::Woken, Some(SOON)).expect("the call is kept for a wait");
    // A close fails, too, and returns the stream.
    let back = stream.close_within(SHORT).unwrap_err();
    assert!(matches!(back.error, WaitError::Deadline(_)) && back.is_retryable(), "{back}");
    let mut stream = *back.back;
    nodes[0].start();
    let seq = stream
        .group()
        .write(300, error.bufs.into_iter().next().unwrap(), Place::InPlace)
        .submit_durable_or_wait(Some(SOON))
        .unwrap();
    let mut found = vec![0; BLOCK_BYTES];
    stream.read(2 * 99, &mut found, Some(SOON)).unwrap();
    assert_eq!(found[..8], 99_u64.to_le_bytes());
    assert!(stream.close_within(SOON).unwrap() >= seq);
    volume.close_within(SOON).unwrap();
}

#[test]
fn a_volume_that_is_not_closed_is_returned() {
    let nodes = [Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = stream(&volume);
    let refused = volume.close().unwrap_err();
    assert!(matches!(refused.error, CloseError::StreamsOpen(1)) && !refused.is_retryable());
    let volume = refused.back;
    let seq = put(&mut stream, 1, 1, 1, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).expect("the volume still works");
    stream.close().unwrap();
    volume.close_within(SOON).unwrap();
    let (volume, recovery) = open_soon(&members, &open_options());
    assert!(recovery.is_nothing(), "{recovery}");
    volume.close().unwrap();
}

/// One target has released the volume when the first attempt ends. It is not claimed again (T25).
#[test]
fn a_close_that_timed_out_can_be_repeated() {
    let mut nodes = [Node::new(), Node::new()];
    let members = volume_on(&nodes);
    let (volume, _) = open_soon(&members, &open_options());
    let mut stream = stream(&volume);
    let seq = put(&mut stream, 1, 1, 1, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    stream.close().unwrap();
    nodes[1].kill();
    let mut volume = volume;
    for _ in 0..2 {
        let refused = volume.close_within(SHORT).unwrap_err();
        assert!(refused.is_retryable(), "{refused}");
        volume = refused.back;
    }
    nodes[1].start();
    volume.close_within(SOON).unwrap();
    let (volume, recovery) = open_soon(&members, &open_options());
    assert!(recovery.is_nothing(), "{recovery}");
    volume.close().unwrap();
}

#[test]
fn the_example_commits_in_groups() {
    let nodes = [Node::new()];
    let (records, groups) = group_commit::run("v", &volume_on(&nodes)).unwrap();
    assert!((1..=records).contains(&groups), "{groups} groups for {records} records");
}
