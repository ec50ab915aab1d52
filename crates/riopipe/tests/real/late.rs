//! A target whose answers come late: after the request was given up, and sent again (T23).

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use riopipe::{
    BLOCK_BYTES, CreateOptions, EngineKind, MemberAddr, OpenOptions, Place, ReadError,
    ReaderOptions, Seq, Stream, StreamOptions, Until, Volume,
};

use crate::crash::{Node, SOON, holds, put, soon, volume_on, with_loss_timeout};
use crate::site::{create_options, open_options};

/// A relay between an initiator and a target that can hold the target's answers.
pub(crate) struct Late {
    addr: SocketAddr,
    listener: TcpListener,
    /// The thread that accepts connections.
    accepting: Option<JoinHandle<()>>,
    held: Arc<(Mutex<Held>, Condvar)>,
}

/// How the relay handles a new connection.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Admission {
    /// It is connected to the target.
    #[default]
    Open,
    /// The next one is stopped; later ones are connected.
    StopsNext,
    /// One is stopped, until it is let go.
    Stopped,
}

#[derive(Default)]
struct Held {
    /// The number of connections to the target so far. They are numbered from 0.
    connections: usize,
    /// Connections with numbers from `from` on, and below `below`, are held.
    from: usize,
    below: usize,
    /// The number of Keep Alive commands that the initiator has sent.
    keep_alives: usize,
    /// Bytes that the initiator has sent on held connections.
    asked: usize,
    /// Bytes of the target that are held.
    waiting: usize,
    /// Bytes of these that may pass.
    free: usize,
    admission: Admission,
    /// The relay has ended.
    over: bool,
}

impl Held {
    fn holds(&self, number: usize) -> bool {
        (self.from..self.below).contains(&number)
    }
}

impl Late {
    pub(crate) fn to(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let held = Arc::new((Mutex::new(Held::default()), Condvar::new()));
        let own = Arc::clone(&held);
        let own_listener = listener.try_clone().unwrap();
        let accepting = std::thread::spawn(move || {
            for near in own_listener.incoming() {
                if own.0.lock().unwrap().over {
                    return;
                }
                let (Ok(near), own) = (near, Arc::clone(&own)) else { continue };
                std::thread::spawn(move || {
                    wait_for_admission(&own);
                    let Ok(far) = TcpStream::connect(to) else { return };
                    let mut state = own.0.lock().unwrap();
                    let number = state.connections;
                    state.connections += 1;
                    drop(state);
                    join(number, near, far, &own);
                });
            }
        });
        Self { addr, listener, accepting: Some(accepting), held }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) fn member(&self) -> MemberAddr {
        self.addr.to_string().parse().unwrap()
    }

    fn change(&self, change: impl FnOnce(&mut Held)) {
        change(&mut self.held.0.lock().unwrap());
        self.held.1.notify_all();
    }

    /// From now on holds all bytes that the target sends on the present connections.
    pub(crate) fn hold(&self) {
        self.change(|held| held.below = held.connections);
    }

    /// Holds all bytes that the target sends on connection number `number`, which may not exist yet.
    pub(crate) fn hold_only(&self, number: usize) {
        self.change(|held| (held.from, held.below) = (number, number + 1));
    }

    /// Stops the next connection: no byte on it reaches the target.
    fn stop_next(&self) {
        self.change(|held| held.admission = Admission::StopsNext);
    }

    fn has_stopped(&self) -> bool {
        self.read(|held| held.admission == Admission::Stopped)
    }

    /// Connects the stopped connection to the target that serves now.
    fn let_go(&self) {
        self.change(|held| held.admission = Admission::Open);
    }

    /// From now on new connections are neither made nor refused: the listener's queue is full. The
    /// present connections continue. Returns the connections in the queue.
    fn fill_queue(&mut self) -> Vec<TcpStream> {
        self.stop_accepting();
        // SAFETY: the descriptor is open, and a listener may listen again with a shorter queue.
        assert_eq!(unsafe { libc::listen(self.listener.as_raw_fd(), 0) }, 0);
        let connect = || TcpStream::connect_timeout(&self.addr, Duration::from_millis(300)).ok();
        std::iter::from_fn(connect).collect()
    }

    fn stop_accepting(&mut self) {
        let Some(accepting) = self.accepting.take() else { return };
        self.change(|held| held.over = true);
        // Wakes the listener.
        let _ = TcpStream::connect(self.addr);
        accepting.join().unwrap();
    }

    /// Lets the answers of connection number `number` pass, which is a new association's, until
    /// Identify Controller: the target has enabled a controller, and the initiator does not know its
    /// properties yet.
    fn stop_at_identify(&self, number: usize, start: impl FnOnce()) {
        self.hold_only(number);
        start();
        loop {
            soon("the target answers", || self.is_waited_for());
            if self.read(|held| held.waiting) >= 4096 {
                return;
            }
            let asked = self.read(|held| held.asked);
            self.let_through();
            soon("the next request", || self.read(|held| held.asked) > asked);
        }
    }

    fn connections(&self) -> usize {
        self.read(|held| held.connections)
    }

    /// Whether bytes of the target are held.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.read(|held| held.waiting > 0)
    }

    pub(crate) fn keep_alives(&self) -> usize {
        self.read(|held| held.keep_alives)
    }

    /// Lets the bytes pass that are held now, and none after them.
    fn let_through(&self) {
        self.change(|held| held.free = held.waiting);
    }

    pub(crate) fn open(&self) {
        self.change(|held| held.below = 0);
    }

    fn read<T>(&self, read: impl FnOnce(&Held) -> T) -> T {
        read(&self.held.0.lock().unwrap())
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        self.change(|held| (held.below, held.admission) = (0, Admission::Open));
        self.stop_accepting();
    }
}

fn join(number: usize, near: TcpStream, far: TcpStream, held: &Arc<(Mutex<Held>, Condvar)>) {
    let ends = [(&near, &far, false), (&far, &near, true)];
    for (from, to, down) in ends {
        let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
        to.set_nodelay(true).unwrap();
        let held = Arc::clone(held);
        std::thread::spawn(move || {
            let mut bytes = [0; 64 << 10];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                if down {
                    wait_for_leave(number, count, &held);
                } else {
                    let mut state = held.0.lock().unwrap();
                    state.asked += if state.holds(number) { count } else { 0 };
                    // The PDU type of a command capsule, and the opcode of a Keep Alive.
                    state.keep_alives += usize::from((bytes[0], bytes[8]) == (0x04, 0x18));
                }
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
        });
    }
}

/// Waits until a new connection may be made to the target.
fn wait_for_admission(held: &(Mutex<Held>, Condvar)) {
    let (state, changed) = held;
    let mut state = state.lock().unwrap();
    if state.admission != Admission::StopsNext {
        return;
    }
    state.admission = Admission::Stopped;
    while state.admission == Admission::Stopped {
        state = changed.wait(state).unwrap();
    }
}

/// Waits until `count` bytes of a connection may pass.
fn wait_for_leave(number: usize, count: usize, held: &(Mutex<Held>, Condvar)) {
    let (state, changed) = held;
    let mut state = state.lock().unwrap();
    state.waiting += count;
    while state.holds(number) && state.free < count {
        state = changed.wait(state).unwrap();
    }
    state.waiting -= count;
    state.free = state.free.saturating_sub(count);
}

fn stream_soon(volume: &Volume) -> Stream {
    let began = Instant::now();
    loop {
        match volume.stream(0, &StreamOptions::default()) {
            Ok(stream) => return stream,
            Err(error) => assert!(began.elapsed() < SOON, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn t23_a_list_that_comes_late_is_not_used_for_the_next_attempt() {
    let nodes = [Node::new(), Node::new()];
    let _ = volume_on(&nodes);
    let late = Late::to(nodes[1].addr());
    let members = [nodes[0].member(), late.member()];
    let mut options = with_loss_timeout(SOON);
    options.connect.timeout = Duration::from_millis(700);
    let (volume, _) = Volume::open("v", &members, &options).unwrap();
    // A stream is dropped after its groups are durable.
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    put(&mut stream, 0, 1, 1, Place::Fresh, true);
    let seq = put(&mut stream, 4, 1, 2, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    drop(stream);

    // The stream is opened again, and the second target's list comes too late.
    late.hold();
    assert!(volume.stream(0, &StreamOptions::default()).is_err(), "the answer is held");
    soon("the target has answered", || late.read(|held| held.waiting) > 0);
    // Once more: while this attempt waits, the first attempt's list comes, and its own list is held.
    let before = late.read(|held| (held.asked, held.connections));
    let second = std::thread::scope(|scope| {
        let second = scope.spawn(|| volume.stream(0, &StreamOptions::default()));
        soon("it sends a request", || {
            late.read(|held| held.asked) > before.0 || second.is_finished()
        });
        late.let_through();
        second.join().unwrap()
    });
    // Two connections are the stream's own. If there are more, the association was set up again
    // meanwhile, which may happen on a slow machine.
    let same = late.read(|held| held.connections) <= before.1 + 2;
    assert!(!same || second.is_err(), "the late answer was accepted");
    late.open();
    let mut stream = second.unwrap_or_else(|_| stream_soon(&volume));
    let written = [(8, 3), (12, 4), (9, 5)];
    for (lba, version) in written {
        put(&mut stream, lba, 1, version, Place::Fresh, true);
    }
    let last = stream.last();
    stream.wait(Until::Durable(last), Some(SOON)).unwrap();
    drop(stream);
    let mut stream = stream_soon(&volume);
    for (lba, version) in written {
        assert_eq!(holds(&mut stream, lba, 1, version), Some(true), "block {lba} was durable");
    }
}

/// A stream is being opened while its target dies and comes back with a drive without power-loss
/// protection. Its Connect reaches the new target when there is an association again, with the same
/// controller number, and the initiator has not identified that controller yet.
#[test]
fn t27_a_connect_from_before_the_targets_death_joins_no_later_association() {
    let mut node = Node::protected();
    let late = Late::to(node.addr());
    // With the subsystem's name, so that only the association takes a controller number.
    let member = format!("{},nqn={}", late.addr(), node.nqn());
    let members = [member.parse::<MemberAddr>().unwrap()];
    let create = CreateOptions { engine: Some(EngineKind::Sync), ..create_options() };
    Volume::create("v", &members, &create).unwrap();
    node.stop();
    node.start();
    let (volume, _) = Volume::open("v", &members, &with_loss_timeout(SOON)).unwrap();
    let before = late.connections();
    late.stop_next();
    // A group that the new drive has only in its cache may not be reported durable.
    let put_durably = || -> Result<Seq, String> {
        let mut stream = volume.stream(0, &StreamOptions::default()).map_err(|e| e.to_string())?;
        let buf = stream.buf(4096).unwrap();
        let group = stream.group().write(1, buf, Place::Fresh);
        let seq = group.submit_durable().map_err(|error| error.to_string())?;
        stream.wait(Until::Durable(seq), Some(SOON)).map_err(|error| error.to_string())?;
        Ok(seq)
    };
    let result = std::thread::scope(|scope| {
        let put = scope.spawn(put_durably);
        soon("the stream connects", || late.has_stopped());
        node.kill();
        node.lose_protection();
        // The next connection is the new association's.
        late.stop_at_identify(before, || node.start());
        late.let_go();
        wait_a_little(&put);
        late.open();
        put.join().unwrap()
    });
    let text = result.expect_err("a group in a volatile cache was reported durable");
    assert!(text.contains("volatile write cache"), "{text}");
}

/// Waits for a thread, but not long: enough for a bind and a write, if the Connect were accepted. On a
/// slow machine the test may check less, but it does not fail.
fn wait_a_little<T>(thread: &ScopedJoinHandle<'_, T>) {
    let began = Instant::now();
    while !thread.is_finished() && began.elapsed() < Duration::from_millis(500) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A stream is being reopened while its target dies and comes back. The thread that reopens it gets
/// the message that the association has ended, although a watch reads the marks all the time, for
/// which the background thread drives streams. Else it would go on with the Connect of before the
/// death, on which the new target takes no bind.
#[test]
fn t27_a_stream_that_is_reopened_learns_of_the_end_of_its_association() {
    let mut nodes = [Node::new()];
    volume_on(&nodes);
    let late = Late::to(nodes[0].addr());
    let member = format!("{},nqn={}", late.addr(), nodes[0].nqn());
    // With this engine a lost connection is a failure, and the volume stays this process's.
    let options = OpenOptions { engine: Some(EngineKind::None), ..open_options() };
    let (volume, _) = Volume::open("v", &[member.parse().unwrap()], &options).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let seq = put(&mut stream, 0, 1, 1, Place::Fresh, false);
    stream.wait(Until::Complete(seq), Some(SOON)).unwrap();
    nodes[0].kill();
    soon("the stream fails", || stream.poll().is_err());
    nodes[0].start();
    // A reader gets a connection when there is an association again.
    let reader = volume.reader(&ReaderOptions::default());
    soon("the target is back", || reader.read(0, &mut [0; BLOCK_BYTES], Some(SOON)).is_ok());
    drop(reader);

    let before = late.connections();
    late.stop_next();
    let (watch, done) = (stream.watch(), AtomicBool::new(false));
    let reopened = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                let _ = watch.marks();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let reopened = scope.spawn(|| {
            let reopened = stream.reopen();
            done.store(true, Ordering::SeqCst);
            reopened
        });
        soon("the stream connects", || late.has_stopped());
        nodes[0].kill();
        late.stop_at_identify(before, || nodes[0].start());
        late.let_go();
        wait_a_little(&reopened);
        late.open();
        reopened.join().unwrap()
    });
    reopened.expect("the stream connects again");
    let seq = put(&mut stream, 1, 1, 2, Place::Fresh, true);
    watch.wait_durable(seq, Some(SOON)).expect("the background thread drives it again");
    stream.close().unwrap();
    volume.close().unwrap();
}

/// A reader's first read makes a connection. Its time is part of the read's.
#[test]
fn p8_a_read_ends_at_its_deadline_while_a_connection_is_made() {
    let nodes = [Node::new()];
    volume_on(&nodes);
    let mut late = Late::to(nodes[0].addr());
    let options = open_options();
    let (volume, _) = Volume::open("v", &[late.member()], &options).unwrap();
    let reader = volume.reader(&ReaderOptions::default());
    let _queue = late.fill_queue();
    let (timeout, began) = (Duration::from_millis(100), Instant::now());
    let error = reader.read(0, &mut [0; BLOCK_BYTES], Some(timeout)).unwrap_err();
    assert!(matches!(error, ReadError::Deadline(after) if after == timeout), "{error}");
    let (took, limit) = (began.elapsed(), options.connect.timeout / 2);
    assert!(took < limit, "{took:?}");
    drop(reader);
    volume.close().unwrap();
}
