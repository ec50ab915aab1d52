//! Connections: two streams of bytes each, in order within one, with delays of their own.
//!
//! A connection may break for both ends, or for one while the other goes on believing in it; what
//! was on its way may still arrive, much later. A direction may stall for a while.

use std::collections::VecDeque;

use crate::rng::Rng;

/// The end of a connection at an initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientEnd {
    /// Which initiator.
    pub client: usize,
    /// In which of its lives.
    pub life: u32,
    /// What the connection is for.
    pub role: Role,
}

/// What an initiator has a connection for. Servers are counted as the volume's topology does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Admin queue.
    Admin(u16),
    /// The I/O queue of whoever recovers the volume.
    Undo(u16),
    /// A stream's queue.
    Stream {
        /// The stream.
        stream: u16,
        /// The server.
        server: u16,
    },
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To the target.
    Up,
    /// To the initiator.
    Down,
}

/// What travels.
#[derive(Debug, PartialEq, Eq)]
pub enum Chunk {
    /// Somebody wants to connect.
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
    /// When what was sent last arrives.
    last: u64,
    /// Nothing arrives before.
    stalled_until: u64,
    /// What is sent before a time arrives so much later than it would.
    lag: (u64, u64),
    /// Nothing that is sent from now on arrives.
    cut: bool,
}

/// One connection.
#[derive(Debug)]
pub struct Conn {
    /// Whoever opened it: what was sent may arrive when its end is gone.
    pub from: usize,
    /// The initiator's end, until it is told of the connection's end.
    pub client: Option<ClientEnd>,
    /// The machine whose target has its other end, once that is connected and until it is told of
    /// the end.
    pub server: Option<usize>,
    /// The machine that it leads to.
    pub machine: usize,
    up: Pipe,
    down: Pipe,
}

/// How long things take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct NetSpec {
    /// The least delay, ns.
    pub delay_min: u32,
    /// The longest usual delay, ns.
    pub delay_max: u32,
    /// Of 100 sends, how many arrive in two parts.
    pub split: u8,
}

/// All connections there ever were.
#[derive(Debug)]
pub struct Network {
    spec: NetSpec,
    rng: Rng,
    conns: Vec<Conn>,
    parted: Vec<Parted>,
    /// What is sent toward targets, before a time, on the connections that streams begin from now on
    /// arrives so much later.
    late_streams: (u64, u64),
}

/// Nothing passes between an initiator and a machine (any, if `None`) before `until`.
#[derive(Clone, Copy, Debug)]
struct Parted {
    client: usize,
    machine: Option<usize>,
    until: u64,
}

impl Network {
    /// No connections yet.
    #[must_use]
    pub const fn new(spec: NetSpec, rng: Rng) -> Self {
        Self { spec, rng, conns: Vec::new(), parted: Vec::new(), late_streams: (0, 0) }
    }

    /// A delay.
    pub fn delay(&mut self) -> u64 {
        let (min, max) = (u64::from(self.spec.delay_min), u64::from(self.spec.delay_max));
        let usual = self.rng.range(min, max.max(min));
        // Now and then something is much later than usual.
        if self.rng.one_in(64) { usual * 8 } else { usual }
    }

    /// A connection on its way to `machine`.
    pub fn open(&mut self, client: ClientEnd, machine: usize) -> usize {
        let apart =
            |p: &&Parted| p.client == client.client && p.machine.is_none_or(|m| m == machine);
        let until = self.parted.iter().filter(apart).map(|p| p.until).max().unwrap_or(0);
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

    /// How many connections there ever were.
    #[must_use]
    pub fn len(&self) -> usize {
        self.conns.len()
    }

    /// Whether there never was a connection.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.conns.is_empty()
    }

    /// Nothing passes between an initiator and a machine (any, if `None`) before `until`.
    pub fn part(&mut self, client: usize, machine: Option<usize>, until: u64) {
        self.parted.push(Parted { client, machine, until });
        for conn in 0..self.conns.len() {
            let there = &self.conns[conn];
            if there.client.is_some_and(|end| end.client == client)
                && machine.is_none_or(|machine| machine == there.machine)
            {
                self.stall(conn, Way::Up, until);
                self.stall(conn, Way::Down, until);
            }
        }
    }

    /// A connection.
    #[must_use]
    pub fn conn(&self, conn: usize) -> &Conn {
        &self.conns[conn]
    }

    /// A connection.
    pub fn conn_mut(&mut self, conn: usize) -> &mut Conn {
        &mut self.conns[conn]
    }

    /// The connections like this, by number.
    pub fn find<'a>(
        &'a self,
        like: impl Fn(&Conn) -> bool + 'a,
    ) -> impl Iterator<Item = usize> + 'a {
        self.conns.iter().enumerate().filter(move |(_, conn)| like(conn)).map(|(i, _)| i)
    }

    /// Sends bytes; when each part arrives is added to `at`.
    pub fn send(&mut self, conn: usize, way: Way, mut bytes: Vec<u8>, now: u64, at: &mut Vec<u64>) {
        if bytes.is_empty() || self.pipe(conn, way).cut {
            return;
        }
        if bytes.len() > 1 && self.rng.percent(u64::from(self.spec.split)) {
            let cut = 1 + self.rng.index(bytes.len() - 1);
            let rest = bytes.split_off(cut);
            at.push(self.put(conn, way, Chunk::Bytes(bytes), now));
            bytes = rest;
        }
        at.push(self.put(conn, way, Chunk::Bytes(bytes), now));
    }

    /// Ends one direction: what was sent before arrives first. When the other end learns of it;
    /// `None` if it never does.
    pub fn end(&mut self, conn: usize, way: Way, now: u64) -> Option<u64> {
        if self.pipe(conn, way).cut {
            return None;
        }
        let at = self.put(conn, way, Chunk::End, now);
        self.pipe(conn, way).cut = true;
        Some(at)
    }

    /// Puts something on its way; when it arrives.
    pub fn put(&mut self, conn: usize, way: Way, chunk: Chunk, now: u64) -> u64 {
        let delay = self.delay();
        let pipe = self.pipe(conn, way);
        let (until, by) = pipe.lag;
        let delay = if now < until { delay + by } else { delay };
        let at = (now + delay).max(pipe.last).max(pipe.stalled_until);
        pipe.last = at;
        pipe.queue.push_back(chunk);
        at
    }

    /// Says that nobody is there any more: when the initiator learns of it.
    pub fn refuse(&mut self, conn: usize, now: u64) -> u64 {
        let at = self.put(conn, Way::Down, Chunk::End, now);
        self.pipe(conn, Way::Down).cut = true;
        at
    }

    fn pipe(&mut self, conn: usize, way: Way) -> &mut Pipe {
        let conn = &mut self.conns[conn];
        match way {
            Way::Up => &mut conn.up,
            Way::Down => &mut conn.down,
        }
    }

    /// What arrives now; `Err` with a later time if the direction is stalled.
    ///
    /// # Errors
    /// When to ask again.
    pub fn arrive(&mut self, conn: usize, way: Way, now: u64) -> Result<Option<Chunk>, u64> {
        let pipe = self.pipe(conn, way);
        if now < pipe.stalled_until {
            return Err(pipe.stalled_until);
        }
        Ok(pipe.queue.pop_front())
    }

    /// Nothing arrives that way before `until`.
    pub fn stall(&mut self, conn: usize, way: Way, until: u64) {
        let pipe = self.pipe(conn, way);
        pipe.stalled_until = pipe.stalled_until.max(until);
    }

    /// What is sent that way before `until` arrives later by `by`, ns.
    pub fn lag(&mut self, conn: usize, way: Way, until: u64, by: u64) {
        self.pipe(conn, way).lag = (until, by);
    }

    /// What is sent toward targets before `until`, on the connections that streams begin from now
    /// on, arrives later by `by`, ns.
    pub const fn lag_streams(&mut self, until: u64, by: u64) {
        self.late_streams = (until, by);
    }

    /// Nothing is stalled or late any more.
    pub fn heal(&mut self) {
        self.late_streams = (0, 0);
        self.parted.clear();
        for pipe in self.conns.iter_mut().flat_map(|conn| [&mut conn.up, &mut conn.down]) {
            pipe.stalled_until = 0;
            pipe.lag = (0, 0);
        }
    }

    /// Nothing more is sent that way; of what is on its way, only the first parts arrive.
    pub fn cut(&mut self, conn: usize, way: Way) {
        let keep = {
            let len = self.pipe(conn, way).queue.len();
            if self.rng.one_in(2) { len } else { self.rng.index(len + 1) }
        };
        let pipe = self.pipe(conn, way);
        pipe.queue.truncate(keep);
        pipe.cut = true;
    }

    /// Like [`cut`](Self::cut), but the other end learns of it: when.
    pub fn reset(&mut self, conn: usize, way: Way, now: u64) -> Option<u64> {
        if self.pipe(conn, way).cut {
            return None;
        }
        self.cut(conn, way);
        self.pipe(conn, way).cut = false;
        self.end(conn, way, now)
    }
}
