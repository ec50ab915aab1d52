//! Connections: two streams of bytes each. Each stream is in order, and each has its own delays.
//!
//! A connection may break for both ends, or for one end while the other still uses it. Bytes in
//! flight may still arrive, much later. A direction may stall for a while.

use std::collections::VecDeque;

use crate::rng::Rng;

/// The end of a connection at an initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientEnd {
    /// The initiator.
    pub client: usize,
    /// The number of the initiator's process.
    pub incarnation: u32,
    /// The purpose of the connection.
    pub role: Role,
}

/// The purpose for which an initiator has a connection. Servers are counted as in the volume's
/// topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Admin queue.
    Admin(u16),
    /// The drives queue of the initiator that recovers the volume.
    Undo(u16),
    /// A stream's queue.
    Stream {
        /// The stream.
        stream: u16,
        /// The server.
        server: u16,
    },
}

/// A direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the target.
    Up,
    /// To the initiator.
    Down,
}

/// One unit that travels over a connection.
#[derive(Debug, PartialEq, Eq)]
pub enum Chunk {
    /// A request to connect.
    Open,
    /// Some bytes.
    Bytes(Vec<u8>),
    /// The end of the stream.
    End,
}

/// One direction.
#[derive(Debug, Default)]
struct Pipe {
    queue: VecDeque<Chunk>,
    /// The time at which the unit that was sent last arrives.
    last: u64,
    /// The time before which nothing arrives.
    stalled_until: u64,
    /// The end of a lag, and its length: units sent before the end arrive later by the length.
    lag: (u64, u64),
    /// Units that are sent from now on do not arrive.
    cut: bool,
}

/// One connection.
#[derive(Debug)]
pub struct Conn {
    /// The initiator that opened it. Bytes may arrive after its end is gone.
    pub from: usize,
    /// The initiator's end, until it learns of the connection's end.
    pub client: Option<ClientEnd>,
    /// The machine whose target has the other end. It is set once that end is connected, and until
    /// the target learns of the connection's end.
    pub server: Option<usize>,
    /// The machine to which the connection leads.
    pub machine: usize,
    up: Pipe,
    down: Pipe,
}

/// The delays of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct NetSpec {
    /// The least delay, ns.
    pub delay_min: u32,
    /// The longest usual delay, ns.
    pub delay_max: u32,
    /// Of 100 sends, the number that arrive in two parts.
    pub split: u8,
}

/// All connections of a run, open and closed.
#[derive(Debug)]
pub struct Network {
    spec: NetSpec,
    rng: Rng,
    conns: Vec<Conn>,
    partitions: Vec<Partition>,
    /// A lag for the connections that streams begin from now on: its end, and its length. Units
    /// sent toward targets before the end arrive later by the length.
    late_streams: (u64, u64),
}

/// Nothing passes between an initiator and a machine (any, if `None`) before `until`.
#[derive(Clone, Copy, Debug)]
struct Partition {
    client: usize,
    machine: Option<usize>,
    until: u64,
}

impl Network {
    /// A network without connections.
    #[must_use]
    pub const fn new(spec: NetSpec, rng: Rng) -> Self {
        Self { spec, rng, conns: Vec::new(), partitions: Vec::new(), late_streams: (0, 0) }
    }

    /// Draws a delay, ns.
    pub fn delay(&mut self) -> u64 {
        let (min, max) = (u64::from(self.spec.delay_min), u64::from(self.spec.delay_max));
        let usual = self.rng.range(min, max.max(min));
        // Sometimes a delay is much longer than usual.
        if self.rng.one_in(64) { usual * 8 } else { usual }
    }

    /// Opens a connection to `machine`. Returns its number.
    pub fn open(&mut self, client: ClientEnd, machine: usize) -> usize {
        let is_between =
            |p: &&Partition| p.client == client.client && p.machine.is_none_or(|m| m == machine);
        let until = self.partitions.iter().filter(is_between).map(|p| p.until).max().unwrap_or(0);
        let is_stream = matches!(client.role, Role::Stream { .. });
        let lag = if is_stream { self.late_streams } else { (0, 0) };
        let pipe = || Pipe { stalled_until: until, ..Pipe::default() };
        self.conns.push(Conn {
            from: client.client,
            client: Some(client),
            server: None,
            machine,
            up: Pipe { lag, ..pipe() },
            down: pipe(),
        });
        self.conns.len() - 1
    }

    /// The number of all connections of the run, open and closed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.conns.len()
    }

    /// Whether the run has had no connection yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.conns.is_empty()
    }

    /// Stops everything between an initiator and a machine (any, if `None`) before `until`.
    pub fn partition(&mut self, client: usize, machine: Option<usize>, until: u64) {
        self.partitions.push(Partition { client, machine, until });
        for conn in 0..self.conns.len() {
            let connection = &self.conns[conn];
            if connection.client.is_some_and(|end| end.client == client)
                && machine.is_none_or(|machine| machine == connection.machine)
            {
                self.stall(conn, Direction::Up, until);
                self.stall(conn, Direction::Down, until);
            }
        }
    }

    /// A connection, by number.
    #[must_use]
    pub fn conn(&self, conn: usize) -> &Conn {
        &self.conns[conn]
    }

    /// A connection, by number.
    pub fn conn_mut(&mut self, conn: usize) -> &mut Conn {
        &mut self.conns[conn]
    }

    /// The numbers of the connections that match `like`.
    pub fn find<'a>(
        &'a self,
        like: impl Fn(&Conn) -> bool + 'a,
    ) -> impl Iterator<Item = usize> + 'a {
        self.conns.iter().enumerate().filter(move |(_, conn)| like(conn)).map(|(i, _)| i)
    }

    /// Sends bytes. Adds the arrival time of each part to `at`.
    pub fn send(
        &mut self,
        conn: usize,
        direction: Direction,
        mut bytes: Vec<u8>,
        now: u64,
        at: &mut Vec<u64>,
    ) {
        if bytes.is_empty() || self.pipe(conn, direction).cut {
            return;
        }
        if bytes.len() > 1 && self.rng.percent(u64::from(self.spec.split)) {
            let cut = 1 + self.rng.index(bytes.len() - 1);
            let rest = bytes.split_off(cut);
            at.push(self.put(conn, direction, Chunk::Bytes(bytes), now));
            bytes = rest;
        }
        at.push(self.put(conn, direction, Chunk::Bytes(bytes), now));
    }

    /// Ends one direction. Bytes that were sent before arrive first. Returns the time at which the
    /// other end learns of it; `None` if it never does.
    pub fn end(&mut self, conn: usize, direction: Direction, now: u64) -> Option<u64> {
        if self.pipe(conn, direction).cut {
            return None;
        }
        let at = self.put(conn, direction, Chunk::End, now);
        self.pipe(conn, direction).cut = true;
        Some(at)
    }

    /// Sends one unit. Returns the time at which it arrives.
    pub fn put(&mut self, conn: usize, direction: Direction, chunk: Chunk, now: u64) -> u64 {
        let delay = self.delay();
        let pipe = self.pipe(conn, direction);
        let (until, by) = pipe.lag;
        let delay = if now < until { delay + by } else { delay };
        let at = (now + delay).max(pipe.last).max(pipe.stalled_until);
        pipe.last = at;
        pipe.queue.push_back(chunk);
        at
    }

    /// Refuses a connection. Returns the time at which the initiator learns of it.
    pub fn refuse(&mut self, conn: usize, now: u64) -> u64 {
        let at = self.put(conn, Direction::Down, Chunk::End, now);
        self.pipe(conn, Direction::Down).cut = true;
        at
    }

    fn pipe(&mut self, conn: usize, direction: Direction) -> &mut Pipe {
        let conn = &mut self.conns[conn];
        match direction {
            Direction::Up => &mut conn.up,
            Direction::Down => &mut conn.down,
        }
    }

    /// The unit that arrives now; `Err` with a later time if the direction is stalled.
    ///
    /// # Errors
    /// The time at which to ask again.
    pub fn arrive(
        &mut self,
        conn: usize,
        direction: Direction,
        now: u64,
    ) -> Result<Option<Chunk>, u64> {
        let pipe = self.pipe(conn, direction);
        if now < pipe.stalled_until {
            return Err(pipe.stalled_until);
        }
        Ok(pipe.queue.pop_front())
    }

    /// Stalls a direction until `until`.
    pub fn stall(&mut self, conn: usize, direction: Direction, until: u64) {
        let pipe = self.pipe(conn, direction);
        pipe.stalled_until = pipe.stalled_until.max(until);
    }

    /// Makes the units that are sent in a direction before `until` arrive later by `by`, ns.
    pub fn lag(&mut self, conn: usize, direction: Direction, until: u64, by: u64) {
        self.pipe(conn, direction).lag = (until, by);
    }

    /// Makes the units that are sent toward targets before `until`, on the connections that streams
    /// begin from now on, arrive later by `by`, ns.
    pub const fn lag_streams(&mut self, until: u64, by: u64) {
        self.late_streams = (until, by);
    }

    /// Ends all stalls and lags.
    pub fn heal(&mut self) {
        self.late_streams = (0, 0);
        self.partitions.clear();
        for pipe in self.conns.iter_mut().flat_map(|conn| [&mut conn.up, &mut conn.down]) {
            pipe.stalled_until = 0;
            pipe.lag = (0, 0);
        }
    }

    /// Stops a direction. Of the units in flight, only the first ones arrive.
    pub fn cut(&mut self, conn: usize, direction: Direction) {
        let keep = {
            let len = self.pipe(conn, direction).queue.len();
            if self.rng.one_in(2) { len } else { self.rng.index(len + 1) }
        };
        let pipe = self.pipe(conn, direction);
        pipe.queue.truncate(keep);
        pipe.cut = true;
    }

    /// Does the same as [`cut`](Self::cut), but the other end learns of it. Returns the time of
    /// that.
    pub fn reset(&mut self, conn: usize, direction: Direction, now: u64) -> Option<u64> {
        if self.pipe(conn, direction).cut {
            return None;
        }
        self.cut(conn, direction);
        self.pipe(conn, direction).cut = false;
        self.end(conn, direction, now)
    }
}
