//! Wakers that run any code, and waiters that outlive their stream or their group.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use riopipe::{Place, Seq, Stream, StreamError, StreamFd, StreamOptions, Until, Volume, WaitError};
use riopipe_net::wait_readable;
use riopipe_testkit::{Flag, Panicking, Task, poll};

use crate::crash::{Node, SOON, open_soon, put, soon, volume_on, with_loss_timeout};
use crate::site::open_options;

/// The time limit of waits that must not succeed.
const SHORT: Duration = Duration::from_millis(30);

fn volume(nodes: &[Node]) -> Volume {
    open_soon(&volume_on(nodes), &open_options()).0
}

fn stream(volume: &Volume, id: u16) -> Stream {
    volume.stream(id, &StreamOptions::default()).unwrap()
}

fn next(stream: &Stream) -> Seq {
    Seq(stream.last().0 + 1)
}

/// The seq of a lost group is used again. A wait for the lost group does not end when the later group
/// is durable.
#[test]
fn p2_a_wait_for_a_lost_group_does_not_end_with_the_next_one_of_that_seq() {
    let mut nodes = [Node::new()];
    let options = with_loss_timeout(Duration::from_millis(200));
    let (volume, _) = open_soon(&volume_on(&nodes), &options);
    let mut stream = stream(&volume, 0);
    let kept = put(&mut stream, 1, 1, 1, Place::InPlace, true);
    stream.wait(Until::Durable(kept), Some(SOON)).unwrap();
    let watch = stream.watch();
    let flag = Arc::new(Flag::default());
    let waker = Waker::from(Arc::clone(&flag));
    let mut begun = watch.durable(kept);
    let mut lost = [watch.durable(next(&stream)), watch.complete(next(&stream))];
    assert!(poll(&mut lost[0], &waker).is_pending());
    nodes[0].kill();
    let seq = put(&mut stream, 1, 1, 2, Place::InPlace, true);
    assert_eq!(seq, Seq(kept.0 + 1));
    soon("the stream fails", || stream.poll().is_err());
    assert!(flag.is_set());
    nodes[0].start();
    let mut recovery = None;
    soon("the stream is reopened", || {
        recovery = stream.reopen().ok();
        recovery.is_some()
    });
    assert!(recovery.unwrap().last < seq, "it never reached the target");
    while put(&mut stream, 2, 1, 3, Place::InPlace, true) < seq {}
    let marks = stream.wait(Until::Durable(stream.last()), Some(SOON)).unwrap();
    assert!(marks.durable >= seq);
    for lost in &mut lost {
        let polled = poll(lost, Waker::noop());
        assert!(matches!(polled, Poll::Ready(Err(WaitError::Failed(_)))), "{polled:?}");
    }
    assert!(matches!(poll(&mut begun, Waker::noop()), Poll::Ready(Ok(_))), "it was kept");
    watch.wait_durable(seq, Some(SOON)).expect("a wait that begins now is for the new one");
    stream.close().unwrap();
    volume.close().unwrap();
}

/// The number of other pollers of this process that watch the same stream as this descriptor.
fn watchers_of(fd: &StreamFd) -> usize {
    let own = fd.as_raw_fd();
    let watched = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        (words.first() == Some(&"tfd:")).then(|| (words[1].to_owned(), words[5].to_owned()))
    };
    let lines = fs::read_to_string(format!("/proc/self/fdinfo/{own}")).unwrap();
    let (stream, _) = lines.lines().filter_map(watched).find(|(_, token)| token == "0").unwrap();
    let others = fs::read_dir("/proc/self/fdinfo").unwrap().filter_map(|entry| {
        let path = entry.ok()?.path();
        let other = path.file_name()?.to_str()? != own.to_string();
        other.then(|| fs::read_to_string(path).ok()).flatten()
    });
    let watches = |lines: &String| lines.lines().filter_map(watched).any(|(fd, _)| fd == stream);
    others.filter(watches).count()
}

/// A descriptor or a waker may outlive the stream. The background thread does not watch the rest of
/// such a stream: a call of the waker would keep the thread awake for ever.
#[test]
fn a_dropped_stream_is_not_watched_while_its_descriptor_is_held() {
    let nodes = [Node::new()];
    let volume = volume(&nodes);
    for has_other in [true, false] {
        let other = has_other.then(|| stream(&volume, 1));
        let mut dropped = stream(&volume, 0);
        let (fd, waker) = (dropped.event_fd().unwrap(), dropped.waker());
        let seq = put(&mut dropped, 1, 1, 1, Place::InPlace, true);
        dropped.watch().wait_durable(seq, Some(SOON)).unwrap();
        soon("the background thread watches it", || watchers_of(&fd) == 1);
        drop(dropped);
        waker.wake();
        soon("the background thread watches it no more", || watchers_of(&fd) == 0);
        if let Some(other) = other {
            other.close().unwrap();
        }
    }
    stream(&volume, 0).close().unwrap();
    volume.close().unwrap();
}

/// Dropping a waker may drop any value: also another wait for the same stream.
#[test]
fn p8_a_waker_that_is_dropped_may_drop_other_waits() {
    let nodes = [Node::new()];
    let volume = volume(&nodes);
    let stream = stream(&volume, 0);
    let (watch, never) = (stream.watch(), Seq(1 << 40));
    let (done, is_done) = mpsc::channel();
    let task = move || {
        let mut waits = vec![watch.durable(never), watch.complete(never)];
        for wait in &mut waits {
            assert!(poll(wait, Waker::noop()).is_pending());
        }
        Task::waker(Mutex::new(waits))
    };
    let watch = stream.watch();
    thread::spawn(move || {
        let mut wait = watch.durable(never);
        assert!(poll(&mut wait, &task()).is_pending());
        assert!(poll(&mut wait, &task()).is_pending(), "the first task is dropped");
        drop(wait);
        done.send(()).unwrap();
    });
    is_done.recv_timeout(SOON).expect("no wait hangs");
    stream.close().unwrap();
    volume.close().unwrap();
}

/// A task of a runtime that has ended: when it is woken, it drops itself and its stream.
#[derive(Default)]
struct Dropping {
    stream: Mutex<Option<Stream>>,
    dropped: AtomicBool,
}

impl Wake for Dropping {
    fn wake(self: Arc<Self>) {
        drop(self.stream.lock().unwrap().take());
        self.dropped.store(true, Ordering::SeqCst);
    }
}

/// The background thread calls wakers while it has taken no stream: they may use any stream.
#[test]
fn p8_a_waker_may_drop_the_stream() {
    let nodes = [Node::new()];
    let volume = volume(&nodes);
    let mut other = stream(&volume, 1);
    loop {
        let mut dropped = stream(&volume, 0);
        let watch = dropped.watch();
        let seq = put(&mut dropped, 1, 1, 1, Place::InPlace, true);
        let task = Arc::new(Dropping::default());
        *task.stream.lock().unwrap() = Some(dropped);
        let mut wait = watch.durable(seq);
        if poll(&mut wait, &Waker::from(Arc::clone(&task))).is_pending() {
            soon("the stream is dropped", || task.dropped.load(Ordering::SeqCst));
            assert!(matches!(poll(&mut wait, Waker::noop()), Poll::Ready(Ok(_))));
            break;
        }
    }
    let seq = put(&mut other, 2, 1, 1, Place::InPlace, true);
    other.watch().wait_durable(seq, Some(SOON)).expect("the background thread still runs");
    other.close().unwrap();
    stream(&volume, 0).close().unwrap();
    volume.close().unwrap();
}

/// A task that opens the stream again when it is woken.
struct Opening {
    volume: Arc<Volume>,
    opened: Mutex<Option<Result<Stream, StreamError>>>,
}

impl Wake for Opening {
    fn wake(self: Arc<Self>) {
        let opened = self.volume.stream(0, &StreamOptions::default());
        *self.opened.lock().unwrap() = Some(opened);
    }
}

/// A waiter that learns that its stream was dropped may open the stream again at once.
#[test]
fn p8_a_waker_may_open_the_dropped_stream_again() {
    let nodes = [Node::new()];
    let volume = Arc::new(volume(&nodes));
    let dropped = stream(&volume, 0);
    let mut wait = dropped.watch().durable(Seq(1 << 40));
    let task = Arc::new(Opening { volume: Arc::clone(&volume), opened: Mutex::default() });
    assert!(poll(&mut wait, &Waker::from(Arc::clone(&task))).is_pending());
    drop(dropped);
    let polled = poll(&mut wait, Waker::noop());
    assert!(matches!(polled, Poll::Ready(Err(WaitError::Dropped { .. }))), "{polled:?}");
    let mut opened = task.opened.lock().unwrap().take().expect("the drop wakes the task").unwrap();
    let seq = put(&mut opened, 1, 1, 1, Place::InPlace, true);
    opened.wait(Until::Durable(seq), Some(SOON)).unwrap();
    opened.close().unwrap();
}

/// A waker that panics affects neither other waiters nor the thread that drives the stream.
#[test]
fn p8_a_waker_that_panics_affects_no_other_waiter() {
    let nodes = [Node::new()];
    let volume = volume(&nodes);
    let mut stream = stream(&volume, 0);
    let watch = stream.watch();
    let panicking = Waker::from(Arc::new(Panicking));
    let waits = |seq| {
        let mut waits = [watch.durable(seq), watch.durable(seq)];
        let flag = Arc::new(Flag::default());
        assert!(poll(&mut waits[0], &panicking).is_pending());
        assert!(poll(&mut waits[1], &Waker::from(Arc::clone(&flag))).is_pending());
        (waits, flag)
    };
    // First the background thread calls the waker, then the owner's wait does, then the close.
    let (_waits, flag) = waits(next(&stream));
    put(&mut stream, 1, 1, 1, Place::InPlace, true);
    soon("the other waiter is woken", || flag.is_set());
    let (_waits, flag) = waits(next(&stream));
    let seq = put(&mut stream, 1, 1, 1, Place::InPlace, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    soon("the other waiter is woken", || flag.is_set());
    let (_waits, flag) = waits(Seq(1 << 40));
    stream.close().unwrap();
    assert!(flag.is_set());
    volume.close().unwrap();
}

/// The background thread may receive a call before the event loop polls.
#[test]
fn p8_a_call_of_the_owner_makes_its_descriptor_readable() {
    let nodes = [Node::new()];
    let volume = volume(&nodes);
    let mut stream = stream(&volume, 0);
    let (fd, waker) = (stream.event_fd().unwrap(), stream.waker());
    soon("the background thread drives it", || watchers_of(&fd) == 1);
    stream.poll().unwrap();
    soon("the background thread drives it again", || watchers_of(&fd) == 1);
    waker.wake();
    // The background thread has received the call by now, or this test checks nothing.
    thread::sleep(10 * SHORT);
    assert!(wait_readable(fd.as_fd(), Duration::ZERO).unwrap());
    stream.poll().unwrap();
    assert!(!wait_readable(fd.as_fd(), SHORT).unwrap(), "the poll has cleared it");
    stream.wait(Until::Woken, Some(SOON)).expect("the call is kept for a wait");
    stream.close().unwrap();
    volume.close().unwrap();
}

/// A wait for a group that has not been submitted does not cause a FLUSH of earlier groups.
#[test]
fn a_wait_for_a_later_group_flushes_no_earlier_one() {
    let nodes = [Node::new()];
    let volume = volume(&nodes);
    let mut stream = stream(&volume, 0);
    let watch = stream.watch();
    let mut far = watch.durable(Seq(1 << 40));
    assert!(poll(&mut far, Waker::noop()).is_pending());
    // On a slow machine an idle stream is flushed anyway, so there are several attempts.
    let is_left = (1..5).any(|lba| {
        let flushes = nodes[0].flushes();
        let seq = put(&mut stream, lba, 1, 1, Place::Fresh, false);
        watch.wait_complete(seq, Some(SOON)).unwrap();
        thread::sleep(SHORT);
        nodes[0].flushes() == flushes
    });
    assert!(is_left, "no thread waits for these groups to be durable");
    // Now a thread waits for one.
    let seq = put(&mut stream, 60, 1, 1, Place::Fresh, false);
    watch.wait_durable(seq, Some(SOON)).unwrap();
    stream.close().unwrap();
    volume.close().unwrap();
}

/// A blocking wait does not consume the token by which other code unparks its thread.
#[test]
fn p8_a_blocking_wait_takes_no_unpark_of_other_code() {
    let nodes = [Node::new()];
    let volume = volume(&nodes);
    let stream = stream(&volume, 0);
    thread::current().unpark();
    let error = stream.watch().wait_durable(Seq(1 << 40), Some(SHORT)).unwrap_err();
    assert!(matches!(error, WaitError::Deadline(_)), "{error}");
    let since = Instant::now();
    thread::park_timeout(SOON / 4);
    assert!(since.elapsed() < SOON / 4, "the token was lost");
    stream.close().unwrap();
    volume.close().unwrap();
}

/// A panic's payload that panics again when it is dropped: no library catches that.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("a payload that panics on purpose");
    }
}

/// A task whose waker ends the background thread by a panic.
#[derive(Default)]
struct Fatal {
    woken_by: Mutex<Option<String>>,
}

impl Wake for Fatal {
    fn wake(self: Arc<Self>) {
        let thread = thread::current().name().unwrap_or_default().to_owned();
        let is_background = thread == "riopipe-bg";
        *self.woken_by.lock().unwrap() = Some(thread);
        if is_background {
            std::panic::panic_any(Bomb);
        }
    }
}

/// The background thread ends by a panic. Another one drives the streams after it.
#[test]
fn p8_after_a_panic_of_the_background_thread_streams_are_driven_again() {
    let nodes = [Node::new()];
    let volume = volume(&nodes);
    let mut other = stream(&volume, 1);
    let mut stream = stream(&volume, 0);
    let watch = stream.watch();
    loop {
        let task = Arc::new(Fatal::default());
        let mut wait = watch.durable(next(&stream));
        assert!(poll(&mut wait, &Waker::from(Arc::clone(&task))).is_pending());
        put(&mut stream, 1, 1, 1, Place::InPlace, true);
        soon("the task is woken", || task.woken_by.lock().unwrap().is_some());
        if task.woken_by.lock().unwrap().as_deref() == Some("riopipe-bg") {
            break;
        }
    }
    for stream in [&mut stream, &mut other] {
        let seq = put(stream, 2, 1, 1, Place::InPlace, true);
        stream.watch().wait_durable(seq, Some(SOON)).expect("a thread drives it");
    }
    stream.close().unwrap();
    other.close().unwrap();
    volume.close().unwrap();
}
