//! The bring-up of a controller: from a fresh connection to an enabled controller (Base §3.5.2).
//!
//! ```text
//! Connect → read CAP → read VS → set CC.EN → read CSTS until ready → Identify Controller → done
//! ```
//!
//! [`Attach`](super::attach::Attach) and [`Discover`](super::discover::Discover) both begin with
//! it, and send their own commands over the same [`Exchange`].

use alloc::vec::Vec;

use riopipe_nvme::ShortData;
use riopipe_nvme::command::{Cqe, Sqe, Status};
use riopipe_nvme::fabrics::{Cap, Cc, Csts, property};
use riopipe_nvme::identify;

use super::queue_pair::{Data, Event, QpConfig, QueuePair, SessionError};
use crate::outbox::Outbox;

/// Why a controller could not be brought up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The connection ended.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// A command failed.
    #[error("{what} failed: {status}")]
    Failed {
        /// The command.
        what: &'static str,
        /// Its status.
        status: Status,
    },
    /// The controller reports that it failed for good (CSTS.CFS).
    #[error("the controller reports a fatal failure (CSTS.CFS)")]
    Fatal,
    /// The controller did not become ready within the time it states itself (CAP.TO).
    #[error("the controller was not ready after {ms} ms, the time it states for that")]
    NotReady {
        /// The time, in milliseconds.
        ms: u64,
    },
    /// A property that a controller must have over TCP is missing or not valid.
    #[error("the controller is not usable: {0}")]
    Unusable(&'static str),
    /// A namespace with a property that is not valid.
    #[error("namespace {nsid} is not usable: {why}")]
    Namespace {
        /// The namespace.
        nsid: u32,
        /// The error.
        why: &'static str,
    },
    /// The discovery log kept changing while it was read.
    #[error("the discovery log changed {0} times while it was read; try again")]
    Unstable(u32),
    /// A structure that the controller sent is too short.
    #[error(transparent)]
    Short(#[from] ShortData),
}

/// The pause before CSTS is read again, in nanoseconds.
const POLL_NS: u64 = 1_000_000;
/// CAP.TO counts units of this many milliseconds.
const READY_UNIT_MS: u64 = 500;
/// CAP.CSS, bit 0: the controller has the NVM command set.
const CSS_NVM: u8 = 1 << 0;
/// CAP.CSS, bit 6: the controller has one or more I/O command sets.
const CSS_IO_COMMAND_SETS: u8 = 1 << 6;

/// The reply to the one command in flight.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reply {
    /// The queue exists.
    Connected,
    /// The command is done.
    Done(Cqe),
}

/// The result of taking in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Received {
    /// The number of bytes that were used up.
    pub(super) used: usize,
    /// The reply among them, if there is one for the caller.
    pub(super) reply: Option<Reply>,
}

/// A queue pair with one command in flight at a time.
#[derive(Debug)]
pub(super) struct Exchange<P> {
    pub(super) queue_pair: QueuePair<P>,
    /// The data that the last command has read.
    pub(super) page: Vec<u8>,
    /// The name of the last command, for errors.
    command_name: &'static str,
}

impl<P: AsRef<[u8]> + Clone> Exchange<P> {
    /// Sends a command that reads `read_bytes` bytes (0: it reads nothing). `name` is its name in
    /// errors.
    pub(super) fn send_command(
        &mut self,
        name: &'static str,
        sqe: Sqe,
        read_bytes: u32,
        outbox: &mut Outbox<P>,
    ) {
        self.command_name = name;
        self.page.clear();
        self.page.resize(read_bytes as usize, 0);
        let data = if read_bytes == 0 { Data::None } else { Data::Read(read_bytes) };
        // The queue is ready and empty, and no structure is longer than the limit of one read.
        let sent = self.queue_pair.submit(sqe, 0, data, outbox);
        debug_assert!(sent.is_ok(), "{name}: {sent:?}");
    }

    /// Takes the whole PDUs at the start of `buf`.
    fn receive(&mut self, buf: &[u8], outbox: &mut Outbox<P>) -> Result<Received, SessionError> {
        let mut reply = None;
        let page = &mut self.page;
        let used = self.queue_pair.receive(buf, outbox, |event| match event {
            Event::Ready { .. } => reply = Some(Reply::Connected),
            Event::Done { cqe, .. } => reply = Some(Reply::Done(cqe)),
            Event::Data { offset, bytes, .. } => {
                // The queue pair drops bytes beyond the requested ones, so the range is in the
                // page.
                let start = offset as usize;
                page[start..start + bytes.len()].copy_from_slice(bytes);
            }
        })?;
        Ok(Received { used, reply })
    }

    /// Checks that the last command has succeeded.
    pub(super) fn check_success(&self, cqe: &Cqe) -> Result<(), AttachError> {
        if cqe.status().is_ok() {
            return Ok(());
        }
        Err(AttachError::Failed { what: self.command_name, status: cqe.status() })
    }
}

/// The command of the bring-up that is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Fabrics Connect.
    Connect,
    /// Property Get of the capabilities (CAP).
    ReadCapabilities,
    /// Property Get of the version (VS).
    ReadVersion,
    /// Property Set of CC.EN.
    Enable,
    /// Property Get of the status (CSTS), or a pause before it.
    ReadStatus,
    /// Identify Controller.
    Identify,
    /// The bring-up has ended.
    Done,
}

/// The bring-up of a controller; see the [module](self).
#[derive(Debug)]
pub(super) struct BringUp<P> {
    pub(super) exchange: Exchange<P>,
    step: Step,
    /// The controller's capabilities (CAP).
    pub(super) cap: Cap,
    /// The NVMe version, as the VS property has it.
    pub(super) version: u32,
    /// When the controller must be ready, ns.
    ready_by: u64,
    /// When to read CSTS again, ns, if the controller is not ready.
    poll_at: Option<u64>,
}

impl<P: AsRef<[u8]> + Clone> BringUp<P> {
    pub(super) fn new(mut config: QpConfig) -> Self {
        // Every structure that the bring-up reads has one page.
        config.data_max = config.data_max.max(identify::LEN as u32);
        Self {
            exchange: Exchange {
                queue_pair: QueuePair::new(config),
                page: Vec::new(),
                command_name: "connect",
            },
            step: Step::Connect,
            cap: Cap::default(),
            version: 0,
            ready_by: 0,
            poll_at: None,
        }
    }

    pub(super) fn start(&mut self, outbox: &mut Outbox<P>) {
        self.exchange.queue_pair.start(outbox);
    }

    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.poll_at
    }

    /// Reads CSTS again if that is due at `now`, ns.
    pub(super) fn tick(&mut self, now: u64, outbox: &mut Outbox<P>) {
        if self.poll_at.is_some_and(|at| at <= now) {
            self.poll_at = None;
            self.read_status(outbox);
        }
    }

    /// Takes in bytes that have arrived. Returns a reply that is for the caller: the last one of
    /// the bring-up, and all later ones.
    pub(super) fn receive(
        &mut self,
        now: u64,
        buf: &[u8],
        outbox: &mut Outbox<P>,
    ) -> Result<Received, AttachError> {
        let received = self.exchange.receive(buf, outbox)?;
        let Some(reply) = received.reply else { return Ok(received) };
        if self.step == Step::Done {
            return Ok(received);
        }
        let is_done = self.handle_reply(now, reply, outbox)?;
        // The last reply of the bring-up starts the caller's own commands.
        Ok(Received { used: received.used, reply: is_done.then_some(reply) })
    }

    /// Handles the reply to the command of the present step, and sends the next command. Returns
    /// whether the bring-up has ended.
    fn handle_reply(
        &mut self,
        now: u64,
        reply: Reply,
        outbox: &mut Outbox<P>,
    ) -> Result<bool, AttachError> {
        let result = match reply {
            Reply::Connected => 0,
            Reply::Done(cqe) => {
                self.exchange.check_success(&cqe)?;
                cqe.result()
            }
        };
        match self.step {
            Step::Connect => {
                self.step = Step::ReadCapabilities;
                let sqe = Sqe::property_get(property::CAP, true);
                self.exchange.send_command("reading the capabilities (CAP)", sqe, 0, outbox);
            }
            Step::ReadCapabilities => {
                self.cap = Cap::from_value(result);
                if self.cap.css & (CSS_NVM | CSS_IO_COMMAND_SETS) == 0 {
                    return Err(AttachError::Unusable("it has no NVM command set"));
                }
                self.step = Step::ReadVersion;
                let sqe = Sqe::property_get(property::VS, false);
                self.exchange.send_command("reading the version (VS)", sqe, 0, outbox);
            }
            Step::ReadVersion => {
                self.version = result as u32;
                self.step = Step::Enable;
                let sqe = Sqe::property_set(property::CC, false, u64::from(Cc::ENABLE.0));
                self.exchange.send_command("enabling the controller (CC.EN)", sqe, 0, outbox);
            }
            Step::Enable => {
                self.step = Step::ReadStatus;
                self.ready_by = now.saturating_add(self.ready_ms() * 1_000_000);
                self.read_status(outbox);
            }
            Step::ReadStatus => {
                let csts = Csts(result as u32);
                if csts.fatal() {
                    return Err(AttachError::Fatal);
                }
                if csts.ready() {
                    self.step = Step::Identify;
                    let sqe = Sqe::identify(identify::cns::CONTROLLER, 0);
                    self.exchange.send_command(
                        "identify controller",
                        sqe,
                        identify::LEN as u32,
                        outbox,
                    );
                } else if now >= self.ready_by {
                    return Err(AttachError::NotReady { ms: self.ready_ms() });
                } else {
                    self.poll_at = Some(now.saturating_add(POLL_NS));
                }
            }
            Step::Identify => {
                self.step = Step::Done;
                return Ok(true);
            }
            Step::Done => {}
        }
        Ok(false)
    }

    /// The time within which the controller must become ready (CAP.TO), in milliseconds; at least
    /// one unit.
    fn ready_ms(&self) -> u64 {
        u64::from(self.cap.timeout.max(1)) * READY_UNIT_MS
    }

    /// Reads the status of the controller (CSTS).
    fn read_status(&mut self, outbox: &mut Outbox<P>) {
        let sqe = Sqe::property_get(property::CSTS, false);
        self.exchange.send_command("reading the status (CSTS)", sqe, 0, outbox);
    }
}
