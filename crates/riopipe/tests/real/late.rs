//! A target whose answers come late: after whoever asked has given up, and asks again (T23).

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use riopipe::{
    CreateOptions, EngineKind, MemberAddr, Place, Seq, Stream, StreamOptions, Until, Volume,
};

use crate::crash::{Node, SOON, holds, put, soon, volume_on, with_loss_timeout};
use crate::site::create_options;

/// What stands between an initiator and a target, and can keep back what the target answers on
/// the connections that are there.
pub(crate) struct Late {
    addr: SocketAddr,
    held: Arc<(Mutex<Held>, Condvar)>,
}

/// What becomes of a new connection.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Way {
    /// It is made to the target.
    #[default]
    Open,
    /// It is stopped, and those after it are made.
    StopsNext,
    /// One is stopped, until it is let go.
    Stopped,
}

#[derive(Default)]
struct Held {
    /// Made to the target so far; they are numbered from 0.
    connections: usize,
    /// Connections from this number on, and below that one, are held.
    from: usize,
    below: usize,
    /// Keep Alive commands that the initiator has sent.
    keep_alives: usize,
    /// Bytes that the initiator has sent there.
    asked: usize,
    /// Bytes that wait there, and bytes that may go.
    waiting: usize,
    free: usize,
    way: Way,
    /// Nothing is passed on any more.
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
        std::thread::spawn(move || {
            for near in listener.incoming() {
                if own.0.lock().unwrap().over {
                    return;
                }
                let (Ok(near), own) = (near, Arc::clone(&own)) else { continue };
                std::thread::spawn(move || {
                    wait_for_way(&own);
                    let Ok(far) = TcpStream::connect(to) else { return };
                    let mut state = own.0.lock().unwrap();
                    let number = state.connections;
                    state.connections += 1;
                    drop(state);
                    join(number, near, far, &own);
                });
            }
        });
        Self { addr, held }
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

    /// From now on nothing passes that the target says on the connections that are there.
    pub(crate) fn hold(&self) {
        self.change(|held| held.below = held.connections);
    }

    /// Nothing passes that the target says on its connection number `number`, also if that is still
    /// to come.
    pub(crate) fn hold_only(&self, number: usize) {
        self.change(|held| (held.from, held.below) = (number, number + 1));
    }

    /// The next connection does not get to the target, whatever is said on it.
    fn stop_next(&self) {
        self.change(|held| held.way = Way::StopsNext);
    }

    fn has_stopped(&self) -> bool {
        self.read(|held| held.way == Way::Stopped)
    }

    /// Lets the stopped connection go on to whatever is there now.
    fn let_go(&self) {
        self.change(|held| held.way = Way::Open);
    }

    fn connections(&self) -> usize {
        self.read(|held| held.connections)
    }

    /// Whether the target has said something that is held.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.read(|held| held.waiting > 0)
    }

    pub(crate) fn keep_alives(&self) -> usize {
        self.read(|held| held.keep_alives)
    }

    /// What waits now passes, and nothing that comes after.
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
        self.change(|held| (held.over, held.below, held.way) = (true, 0, Way::Open));
        // Wakes the listener.
        let _ = TcpStream::connect(self.addr);
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
                    // A command capsule of its own, and the opcode in it.
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
fn wait_for_way(held: &(Mutex<Held>, Condvar)) {
    let (state, changed) = held;
    let mut state = state.lock().unwrap();
    if state.way != Way::StopsNext {
        return;
    }
    state.way = Way::Stopped;
    while state.way == Way::Stopped {
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
fn t23_a_list_that_comes_late_is_not_taken_for_the_next_attempts() {
    let nodes = [Node::new(), Node::new()];
    let _ = volume_on(&nodes);
    let late = Late::to(nodes[1].addr());
    let members = [nodes[0].member(), late.member()];
    let mut options = with_loss_timeout(SOON);
    options.connect.timeout = Duration::from_millis(700);
    let (volume, _) = Volume::open("v", &members, &options).unwrap();
    // A stream whose owner leaves it; its logs come to rest.
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    put(&mut stream, 0, 1, 1, Place::Fresh, true);
    let seq = put(&mut stream, 4, 1, 2, Place::Fresh, true);
    stream.wait(Until::Durable(seq), Some(SOON)).unwrap();
    drop(stream);

    // It is opened again, and the second target's list comes too late.
    late.hold();
    assert!(volume.stream(0, &StreamOptions::default()).is_err(), "the answer is held");
    soon("the target has answered", || late.read(|held| held.waiting) > 0);
    // Again: while it waits, the first attempt's list comes, and its own is held.
    let before = late.read(|held| (held.asked, held.connections));
    let second = std::thread::scope(|scope| {
        let second = scope.spawn(|| volume.stream(0, &StreamOptions::default()));
        soon("it asks", || late.read(|held| held.asked) > before.0 || second.is_finished());
        late.let_through();
        second.join().unwrap()
    });
    // Two connections are the stream's own. More: the association was made anew meanwhile, which
    // a slow machine may bring about.
    let same = late.read(|held| held.connections) <= before.1 + 2;
    assert!(!same || second.is_err(), "the late answer was believed");
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
/// protection. Its Connect gets to the new target when that one has an association again, with the
/// same controller number, that nobody has looked at yet.
#[test]
fn t27_a_connect_from_before_the_targets_death_gets_nobody_into_the_next_association() {
    let mut node = Node::protected();
    let late = Late::to(node.addr());
    // With its name, so that nothing but the association takes a controller's number.
    let member = format!("{},nqn={}", late.addr(), node.nqn());
    let members = [member.parse::<MemberAddr>().unwrap()];
    let create = CreateOptions { engine: Some(EngineKind::Sync), ..create_options() };
    Volume::create("v", &members, &create).unwrap();
    node.stop();
    node.start();
    let (volume, _) = Volume::open("v", &members, &with_loss_timeout(SOON)).unwrap();
    let before = late.connections();
    late.stop_next();
    // Nothing may be called durable that the new drive has only in its cache.
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
        // The next connection is the new association's. It gets as far as Identify Controller: the
        // target has enabled a controller, and the initiator does not know yet what it is.
        late.hold_only(before);
        node.start();
        loop {
            soon("the target answers", || late.is_waited_for());
            if late.read(|held| held.waiting) >= 4096 {
                break;
            }
            let asked = late.read(|held| held.asked);
            late.let_through();
            soon("the next question", || late.read(|held| held.asked) > asked);
        }
        late.let_go();
        // Time enough for a write, were it taken; however slow the machine, none must be.
        let began = Instant::now();
        while !put.is_finished() && began.elapsed() < Duration::from_millis(500) {
            std::thread::sleep(Duration::from_millis(1));
        }
        late.open();
        put.join().unwrap()
    });
    let said = result.expect_err("what is in a volatile cache was called durable");
    assert!(said.contains("volatile write cache"), "{said}");
}
