//! From a fresh connection to an enabled controller: the part that attaching and discovery share
//! (Base §3.5.2).

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
    /// A command of the bring-up failed.
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
    /// A structure was shorter than requested.
    #[error(transparent)]
    Short(#[from] ShortData),
}

/// The pause before CSTS is read again, in nanoseconds.
const POLL_NS: u64 = 1_000_000;

/// The reply to the one command in flight.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reply {
    /// The queue exists.
    Connected,
    /// The command is done.
    Done(Cqe),
}

/// An exchange of one command at a time.
#[derive(Debug)]
pub(super) struct Exchange<P> {
    pub(super) qp: QueuePair<P>,
    /// Data of the last read.
    pub(super) page: Vec<u8>,
    what: &'static str,
}

impl<P: AsRef<[u8]> + Clone> Exchange<P> {
    /// Sends a command that reads `len` bytes (0: none); `what` names it in errors.
    pub(super) fn ask(&mut self, what: &'static str, sqe: Sqe, len: u32, out: &mut Outbox<P>) {
        self.what = what;
        self.page.clear();
        self.page.resize(len as usize, 0);
        let data = if len == 0 { Data::None } else { Data::Read(len) };
        // The queue is ready and empty, and no structure is longer than the limit of one read.
        let sent = self.qp.submit(sqe, 0, data, out);
        debug_assert!(sent.is_ok(), "{what}: {sent:?}");
    }

    fn receive(
        &mut self,
        buf: &[u8],
        out: &mut Outbox<P>,
    ) -> Result<(usize, Option<Reply>), SessionError> {
        let mut reply = None;
        let page = &mut self.page;
        let used = self.qp.receive(buf, out, |event| match event {
            Event::Ready { .. } => reply = Some(Reply::Connected),
            Event::Done { cqe, .. } => reply = Some(Reply::Done(cqe)),
            Event::Data { offset, bytes, .. } => {
                // The queue pair lets no byte through beyond the requested ones.
                let at = offset as usize;
                page[at..at + bytes.len()].copy_from_slice(bytes);
            }
        })?;
        Ok((used, reply))
    }

    /// The completion, if it is a success.
    pub(super) fn succeeded(&self, cqe: &Cqe) -> Result<(), AttachError> {
        if cqe.status().is_ok() {
            return Ok(());
        }
        Err(AttachError::Failed { what: self.what, status: cqe.status() })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Connect,
    Cap,
    Version,
    Enable,
    Status,
    Identify,
    Done,
}

/// Connect, CAP, VS, CC.EN, CSTS.RDY, Identify Controller.
#[derive(Debug)]
pub(super) struct BringUp<P> {
    pub(super) exchange: Exchange<P>,
    step: Step,
    pub(super) cap: Cap,
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
            exchange: Exchange { qp: QueuePair::new(config), page: Vec::new(), what: "connect" },
            step: Step::Connect,
            cap: Cap::default(),
            version: 0,
            ready_by: 0,
            poll_at: None,
        }
    }

    pub(super) fn start(&mut self, out: &mut Outbox<P>) {
        self.exchange.qp.start(out);
    }

    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.poll_at
    }

    pub(super) fn tick(&mut self, now: u64, out: &mut Outbox<P>) {
        if self.poll_at.is_some_and(|at| at <= now) {
            self.poll_at = None;
            self.read_status(out);
        }
    }

    /// Takes bytes that have arrived. A reply that is not part of the bring-up is returned.
    pub(super) fn receive(
        &mut self,
        now: u64,
        buf: &[u8],
        out: &mut Outbox<P>,
    ) -> Result<(usize, Option<Reply>), AttachError> {
        let (used, reply) = self.exchange.receive(buf, out)?;
        let Some(reply) = reply else { return Ok((used, None)) };
        if self.step == Step::Done {
            return Ok((used, Some(reply)));
        }
        let done = self.step(now, reply, out)?;
        // The last reply of the bring-up is the first one for the next step.
        Ok((used, done.then_some(reply)))
    }

    fn step(&mut self, now: u64, reply: Reply, out: &mut Outbox<P>) -> Result<bool, AttachError> {
        let result = match reply {
            Reply::Connected => 0,
            Reply::Done(cqe) => {
                self.exchange.succeeded(&cqe)?;
                cqe.result()
            }
        };
        match self.step {
            Step::Connect => {
                self.step = Step::Cap;
                let sqe = Sqe::property_get(property::CAP, true);
                self.exchange.ask("reading the capabilities (CAP)", sqe, 0, out);
            }
            Step::Cap => {
                self.cap = Cap::from_value(result);
                if self.cap.css & 1 == 0 && self.cap.css & 0x40 == 0 {
                    return Err(AttachError::Unusable("it has no NVM command set"));
                }
                self.step = Step::Version;
                let sqe = Sqe::property_get(property::VS, false);
                self.exchange.ask("reading the version (VS)", sqe, 0, out);
            }
            Step::Version => {
                self.version = result as u32;
                self.step = Step::Enable;
                let sqe = Sqe::property_set(property::CC, false, u64::from(Cc::ENABLE.0));
                self.exchange.ask("enabling the controller (CC.EN)", sqe, 0, out);
            }
            Step::Enable => {
                self.step = Step::Status;
                self.ready_by = now.saturating_add(self.ready_ms() * 1_000_000);
                self.read_status(out);
            }
            Step::Status => {
                let csts = Csts(result as u32);
                if csts.fatal() {
                    return Err(AttachError::Fatal);
                }
                if csts.ready() {
                    self.step = Step::Identify;
                    let sqe = Sqe::identify(identify::cns::CONTROLLER, 0);
                    self.exchange.ask("identify controller", sqe, identify::LEN as u32, out);
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

    /// CAP.TO in milliseconds; 0 is taken as its unit, 500 ms.
    fn ready_ms(&self) -> u64 {
        u64::from(self.cap.timeout.max(1)) * 500
    }

    fn read_status(&mut self, out: &mut Outbox<P>) {
        let sqe = Sqe::property_get(property::CSTS, false);
        self.exchange.ask("reading the status (CSTS)", sqe, 0, out);
    }
}
