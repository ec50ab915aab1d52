//! The process of a target: its cores, and the state that the machine's kernel keeps for them.
//!
//! Like the threads of the real target, the cores take turns in an order that is not known in
//! advance. A core that is busy with other work receives later, and all at once: the results of its
//! drives, the messages of other cores, and the request to stop.

use std::collections::{BTreeMap, VecDeque};

use riopipe_order::block_device::{BlockDevice, Done};
use riopipe_session::target::{
    Action, ConnKey, CoreConfig, Input, Message, OpId, PendingLimits, Places, QueueCounts,
    TargetCore, Transport,
};

use super::Machine;
use crate::core::MS;
use crate::drive::Ended;
use crate::drive_queue::core_of;
use crate::env::SimEnv;
use crate::foreign::{self, Screen};
use riopipe_platform::crc32c;

/// The longest time for which a core is busy with other work, ns.
const BUSY_NS: u64 = 200_000;
/// The longest time until a socket whose buffer is full has space again, ns.
const FULL_NS: u64 = 100_000;
/// The maximum number of connections. No run comes near it.
const PLACES: usize = 1024;

/// An effect of a process outside of its machine. Connections have the network's numbers.
#[derive(Debug)]
pub enum Out {
    /// Sends these bytes over a connection.
    Send(usize, Vec<u8>),
    /// Ends the sending direction of a connection.
    End(usize),
    /// Closes a connection: the target has closed it.
    Close(usize),
    /// Refuses a connection: the target does not accept it any more.
    Refuse(usize),
    /// Wakes a core at a time.
    Wake(u64, usize),
    /// Polls a drive at a time.
    Poll(u64, usize),
    /// The socket of a connection has space again at a time.
    Space(u64, usize),
}

/// A core's part of a connection.
#[derive(Debug)]
pub struct Tcp {
    net: usize,
    input: Vec<u8>,
}

impl Transport for Tcp {
    fn input(&self) -> &[u8] {
        &self.input
    }

    fn consume(&mut self, bytes: usize) {
        self.input.drain(..bytes);
    }

    fn reserve(&mut self, _: usize) -> Result<(), String> {
        Ok(())
    }
}

/// The kernel's part of a connection.
#[derive(Debug, Default)]
struct Socket {
    /// Bytes that have arrived and were not received.
    unread: Vec<u8>,
    /// No more bytes arrive.
    has_ended: bool,
    /// The core that watches it, and the core's name for the connection.
    watched: Option<(usize, ConnKey)>,
    /// The filter that makes the target a foreign target, if it is one.
    screen: Option<Screen>,
}

/// A thread of the target.
struct Reactor {
    core: TargetCore<SimEnv, Tcp>,
    /// The results of its drive operations that it has not received yet.
    done: Vec<(OpId, Ended)>,
    /// It receives no input before this time, ns.
    busy_until: Option<u64>,
    /// The time at which its deadline wakes it next, ns.
    timer: Option<u64>,
    has_ended: bool,
}

/// The process of a target.
#[derive(Default)]
pub(super) struct Process {
    reactors: Vec<Reactor>,
    /// The sockets, by the network's numbers.
    sockets: BTreeMap<usize, Socket>,
    /// Connections that have not been accepted.
    backlog: VecDeque<usize>,
    /// The first core accepts connections.
    listens: bool,
    /// It was requested to stop (clean stop).
    stops: bool,
    /// Connections whose sockets have bytes or an end.
    readable: VecDeque<usize>,
}

impl Machine {
    /// Starts the target's process.
    pub(super) fn begin_process(&mut self) {
        self.env.ended.clear();
        let count = usize::from(self.spec.cores.max(1));
        let (places, queues) = (Places::new(PLACES), QueueCounts::new(count));
        let grace_ns = *self.rng.pick(&[0, MS, 100 * MS, 1000 * MS]);
        let reactor = |index| Reactor {
            core: TargetCore::new(CoreConfig {
                index,
                listens: index == 0,
                grace_ns,
                crc: crc32c,
                places: places.clone(),
                queues: queues.clone(),
                pending: PendingLimits::NONE,
            }),
            done: Vec::new(),
            busy_until: None,
            timer: None,
            has_ended: false,
        };
        let reactors = (0..count).map(reactor).collect();
        self.process = Process { reactors, ..Process::default() };
        self.env.messages = (0..count).map(|_| Vec::new()).collect();
        for core in 0..count {
            self.begin_round(core);
            self.finish_round(core);
        }
    }

    /// Whether new connections are accepted.
    #[must_use]
    pub const fn is_accepting(&self) -> bool {
        self.up && !self.process.stops
    }

    /// Requests a clean stop of the target.
    pub const fn stop(&mut self) {
        self.process.stops = true;
    }

    /// Whether a stop was requested, and all cores have stopped.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.up && self.process.stops && self.process.reactors.iter().all(|it| it.has_ended)
    }

    /// Receives a request to connect.
    pub fn open(&mut self, net: usize) {
        let screen = self.spec.foreign.then(Screen::default);
        self.process.sockets.insert(net, Socket { screen, ..Socket::default() });
        self.process.backlog.push_back(net);
    }

    /// Receives bytes of a connection.
    pub fn receive(&mut self, net: usize, bytes: Vec<u8>) {
        self.store.write_back_some(&mut self.rng);
        if let Some(socket) = self.process.sockets.get_mut(&net) {
            if let Some(screen) = &mut socket.screen {
                self.extension_sent = self.extension_sent.take().or(screen.check(&bytes));
            }
            if socket.unread.is_empty() {
                socket.unread = bytes;
            } else {
                socket.unread.extend(bytes);
            }
            self.process.readable.push_back(net);
        }
    }

    /// Handles the end of a connection.
    pub fn hang_up(&mut self, net: usize) {
        if let Some(socket) = self.process.sockets.get_mut(&net) {
            socket.has_ended = true;
            self.process.readable.push_back(net);
        }
    }

    /// Notes that the connection's socket has space again.
    pub fn has_space(&mut self, net: usize) {
        let watched = self.process.sockets.get(&net).and_then(|socket| socket.watched);
        if let Some((core, key)) = watched {
            self.begin_round(core);
            self.send(core, key);
            self.finish_round(core);
        }
    }

    /// Gives the drives the operations that were gathered for them.
    fn kick_drives(&mut self) {
        for (at, drive) in self.env.drives.iter_mut().enumerate() {
            drive.kick(self.env.now);
            if let Some(due) = drive.next_deadline()
                && self.polls[at].is_none_or(|poll| due < poll)
            {
                self.polls[at] = Some(due);
                self.out.push(Out::Poll(due, at));
            }
        }
    }

    /// Polls a drive, and passes its results to the cores.
    pub fn poll_drive(&mut self, drive: usize) {
        if self.polls[drive] != Some(self.env.now) {
            // It was polled before, because of an operation that was given to it later.
            return;
        }
        self.polls[drive] = None;
        let mut done = Vec::new();
        self.env.drives[drive].poll(self.env.now, &mut done);
        for Done { op, result } in done {
            let (core, op) = core_of(op);
            if let Some(reactor) = self.process.reactors.get_mut(core) {
                reactor.done.push((OpId(op), result));
            }
        }
    }

    /// Wakes a core.
    pub fn wake(&mut self, core: usize) {
        let now = self.env.now;
        let Some(reactor) = self.process.reactors.get_mut(core).filter(|it| !it.has_ended) else {
            return;
        };
        // A deadline, or input that it receives now.
        if reactor.timer.take_if(|at| *at <= now).is_some() {
            self.begin_round(core);
            self.finish_round(core);
        }
    }

    /// Runs the cores until they have nothing more to do now, and then the drives.
    pub fn work(&mut self) {
        self.work_cores();
        self.kick_drives();
    }

    fn work_cores(&mut self) {
        while self.up && !self.has_stopped() {
            if self.process.listens && !self.process.backlog.is_empty() {
                self.accept();
            } else if let Some(net) = self.process.readable.pop_front() {
                self.read(net);
            } else if let Some(core) = self.next_core() {
                self.turn(core);
            } else {
                return;
            }
        }
    }

    /// A core that has input and receives it now.
    fn next_core(&mut self) -> Option<usize> {
        let Self { env, process, rng, out, .. } = self;
        for (core, reactor) in process.reactors.iter_mut().enumerate() {
            let has_input = !env.messages[core].is_empty()
                || !reactor.done.is_empty()
                || process.stops && !reactor.core.is_stopping();
            if reactor.has_ended || !has_input || reactor.busy_until.is_some_and(|at| at > env.now)
            {
                continue;
            }
            if rng.one_in(4) {
                let until = env.now + 1 + rng.below(BUSY_NS);
                reactor.busy_until = Some(until);
                out.push(Out::Wake(until, core));
                continue;
            }
            return Some(core);
        }
        None
    }

    /// Runs one round of a core with its input.
    fn turn(&mut self, core: usize) {
        self.begin_round(core);
        let Self { env, process, rng, out, .. } = self;
        let reactor = &mut process.reactors[core];
        if process.stops {
            reactor.core.stop(env);
            if core == 0 {
                for net in process.backlog.drain(..) {
                    process.sockets.remove(&net);
                    out.push(Out::Refuse(net));
                }
            }
        }
        // A message that is sent to it after it has read its messages waits for the next round.
        if reactor.done.is_empty() || !rng.one_in(4) {
            for message in core::mem::take(&mut env.messages[core]) {
                reactor.core.message(message, env);
            }
        }
        for (op, result) in core::mem::take(&mut reactor.done) {
            reactor.core.device_done(op, result, env);
        }
        self.finish_round(core);
    }

    fn accept(&mut self) {
        self.begin_round(0);
        let Self { env, process, .. } = self;
        let core = &mut process.reactors[0].core;
        while !process.backlog.is_empty() {
            let Some(place) = core.place(env) else { break };
            let Some(net) = process.backlog.pop_front() else { break };
            core.accepted(place, Tcp { net, input: Vec::new() }, None, env);
        }
        self.finish_round(0);
    }

    /// Reads a socket that has bytes or an end.
    fn read(&mut self, net: usize) {
        let watched = self.process.sockets.get(&net).and_then(|socket| socket.watched);
        // While the connection moves from one core to another, its bytes wait for the other core.
        let Some((core, key)) = watched else { return };
        self.begin_round(core);
        let Self { env, process, .. } = self;
        let reactor = &mut process.reactors[core];
        if let Some(socket) = process.sockets.get_mut(&net) {
            match reactor.core.input(key) {
                Input::Wanted { transport: tcp, data_space } if !socket.unread.is_empty() => {
                    let data_bytes = data_space.len().min(socket.unread.len());
                    data_space[..data_bytes].copy_from_slice(&socket.unread[..data_bytes]);
                    socket.unread.drain(..data_bytes);
                    if tcp.input.is_empty() {
                        core::mem::swap(&mut tcp.input, &mut socket.unread);
                    } else {
                        tcp.input.append(&mut socket.unread);
                    }
                    reactor.core.received(key, data_bytes, env);
                    if socket.has_ended {
                        process.readable.push_back(net);
                    }
                }
                Input::Wanted { .. } | Input::Dropped(_) => {
                    socket.unread.clear();
                    if socket.has_ended {
                        reactor.core.closed(key, "the connection has ended", env);
                    }
                }
                Input::StaysInSocket => {}
            }
        }
        self.finish_round(core);
    }

    fn begin_round(&mut self, core: usize) {
        self.env.core = core;
        self.process.reactors[core].core.timeout(&mut self.env);
    }

    /// Carries out the effects of a core's round.
    fn finish_round(&mut self, core: usize) {
        self.act(core);
        if self.process.reactors[core].core.is_stopping() {
            // A round in which something has happened is followed by another round.
            self.begin_round(core);
            self.act(core);
        }
        let Self { env, process, out, .. } = self;
        let reactor = &mut process.reactors[core];
        if reactor.core.is_at_rest() {
            reactor.has_ended = true;
            let lost = env.messages[core].iter().any(|it| matches!(it, Message::Adopt(_)));
            assert!(!lost, "a core ended while a connection was being moved to it");
        } else if let Some(at) = reactor.core.deadline(env.now)
            && reactor.timer.is_none_or(|timer| at < timer)
        {
            reactor.timer = Some(at);
            out.push(Out::Wake(at, core));
        }
    }

    fn act(&mut self, core: usize) {
        loop {
            let Self { env, process, out, .. } = self;
            env.core = core;
            let reactor = &mut process.reactors[core];
            let Some(action) = reactor.core.next_action(env) else { return };
            match action {
                Action::Listen(on) => process.listens = on,
                Action::Send(key) => self.send(core, key),
                Action::FinishSending(key) => {
                    if let Some(tcp) =
                        reactor.core.transport(key).filter(|_| !env.crash_injector.has_stopped())
                    {
                        out.push(Out::End(tcp.net));
                    }
                }
                Action::Watch { key, is_new, .. } => {
                    if let Some(tcp) = reactor.core.transport(key).filter(|_| is_new)
                        && let Some(socket) = process.sockets.get_mut(&tcp.net)
                    {
                        socket.watched = Some((core, key));
                        process.readable.push_back(tcp.net);
                    }
                }
                Action::HandOver { core, connection } => {
                    if let Some(socket) = process.sockets.get_mut(&connection.transport().net) {
                        socket.watched = None;
                    }
                    assert!(
                        !process.reactors[core].has_ended,
                        "a connection is moved to a core that has ended"
                    );
                    env.messages[core].push(Message::Adopt(connection));
                }
                Action::EndMoves => {
                    for (to, message) in Message::moves_ended(core, process.reactors.len()) {
                        env.messages[to].push(message);
                    }
                }
                Action::Drop(connection) => {
                    let net = connection.transport().net;
                    process.sockets.remove(&net);
                    if !env.crash_injector.has_stopped() {
                        out.push(Out::Close(net));
                    }
                }
            }
        }
    }

    /// Sends as many bytes as a socket accepts: nearly always all.
    fn send(&mut self, core: usize, key: ConnKey) {
        let Self { env, process, out, rng, spec, .. } = self;
        env.core = core;
        let core = &mut process.reactors[core].core;
        while let Some((tcp, output)) = core.outgoing(key) {
            let (net, all) = (tcp.net, output.len_bytes());
            // Bytes that a filter changes are sent in one piece.
            let is_partial = !spec.foreign && rng.one_in(64);
            let len = if is_partial { rng.index(all + 1) } else { all };
            if len == 0 {
                out.push(Out::Space(env.now + 1 + rng.below(FULL_NS), net));
                return core.blocked(key, env);
            }
            let mut bytes = Vec::with_capacity(len);
            for slice in output.slices() {
                bytes.extend_from_slice(&slice[..slice.len().min(len - bytes.len())]);
            }
            if spec.foreign {
                foreign::hide(&mut bytes);
            }
            if env.crash_injector.count_effect() {
                out.push(Out::Send(net, bytes));
            }
            core.sent(key, len, env);
        }
        // It may now want the bytes that it has left in its socket.
        if let Some(tcp) = core.transport(key)
            && let Some(socket) = process.sockets.get(&tcp.net)
            && (socket.has_ended || !socket.unread.is_empty())
        {
            process.readable.push_back(tcp.net);
        }
    }
}
