//! The target environment of a simulated target: its drives, the log, the clock.

use std::sync::{Arc, Mutex, PoisonError};

use riopipe_session::target::{ConnId, Event, Message, Shared, TargetEnv};

use crate::crash_injector::CrashInjector;
use crate::drive_queue::DriveQueue;
use crate::log_store::LogPart;
use crate::machine::Tcp;

/// The reports of the parts of a machine, line by line, if they are wanted.
#[derive(Clone, Debug, Default)]
pub struct TraceLines {
    lines: Option<Arc<Mutex<Vec<String>>>>,
    /// The name of the part.
    part: String,
}

impl TraceLines {
    /// An empty report. Reports are dropped, unless `traced`.
    #[must_use]
    pub fn new(traced: bool) -> Self {
        Self { lines: traced.then(Arc::default), part: String::new() }
    }

    /// The same report for a part with this name.
    #[must_use]
    pub fn of(&self, part: &str) -> Self {
        Self { lines: self.lines.clone(), part: format!("{part}: ") }
    }

    /// Whether reports are wanted.
    #[must_use]
    pub const fn is_wanted(&self) -> bool {
        self.lines.is_some()
    }

    /// Adds a report.
    pub fn add(&self, what: impl FnOnce() -> String) {
        if let Some(lines) = &self.lines {
            let line = format!("{}{}", self.part, what());
            lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
        }
    }

    /// All lines since the last call.
    pub fn take(&self) -> Vec<String> {
        let lines = self.lines.as_ref();
        lines.map_or_else(Vec::new, |lines| {
            core::mem::take(&mut *lines.lock().unwrap_or_else(PoisonError::into_inner))
        })
    }
}

/// The [`TargetEnv`] of one target's cores.
pub struct SimEnv {
    /// The time, ns.
    pub now: u64,
    /// The state that the connections share; `None` while no process runs.
    pub shared: Option<Shared<LogPart>>,
    /// The machine's drives.
    pub drives: Vec<DriveQueue>,
    /// For each core, the messages that it has not read, oldest first.
    pub messages: Vec<Vec<Message<SimEnv, Tcp>>>,
    /// The core that runs now.
    pub core: usize,
    /// Controllers whose associations the target has ended since the last check.
    pub ended: Vec<u16>,
    /// The reports of sessions and drives.
    pub trace_lines: TraceLines,
    /// Stops the process in the middle of an effect.
    pub crash_injector: CrashInjector,
}

impl SimEnv {
    /// The environment of a machine with these drives.
    #[must_use]
    pub fn new(
        drives: Vec<DriveQueue>,
        crash_injector: CrashInjector,
        trace_lines: TraceLines,
    ) -> Self {
        let (messages, ended) = (Vec::new(), Vec::new());
        Self { now: 0, shared: None, drives, messages, core: 0, ended, trace_lines, crash_injector }
    }
}

impl TargetEnv for SimEnv {
    type Buf = Vec<u8>;
    type Device = DriveQueue;
    type Region = LogPart;

    fn now(&self) -> u64 {
        self.now
    }

    fn alloc(&mut self, len: usize) -> Option<Vec<u8>> {
        Some(vec![0; len])
    }

    fn device(&mut self, ns: usize) -> &mut DriveQueue {
        let drive = &mut self.drives[ns];
        drive.core = self.core;
        drive
    }

    fn with_shared<T>(&mut self, f: impl FnOnce(&mut Shared<LogPart>) -> T) -> T {
        f(self.shared.as_mut().expect("sessions run only while their process does"))
    }

    fn notify(&mut self, conn: ConnId) {
        for (core, message) in Message::notices(conn, self.messages.len()) {
            self.messages[core].push(message);
        }
    }

    fn log(&mut self, event: Event<'_>) {
        if let Event::Closed { cntlid: Some(cntlid), qid: 0, .. } = event {
            self.ended.push(cntlid);
        }
        self.trace_lines.add(|| format!("{event:?}"));
    }
}
