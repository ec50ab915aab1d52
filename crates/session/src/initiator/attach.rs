//! Attaching to a controller: everything between a fresh connection and knowing its namespaces.
//!
//! ```text
//! ICReq, Connect → CAP, VS → CC.EN=1 → CSTS.RDY → Identify Controller → Number of Queues
//!   → active namespaces → each one's Identify and identifiers → attached
//! ```
//!
//! The admin queue of the result serves for Keep Alive, events and Rio's admin commands.

use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::command::{Cqe, Sqe};
use riopipe_nvme::identify::{self, cns};
use riopipe_nvme::{fabrics, feature};

pub use super::bring_up::AttachError;
use super::bring_up::{BringUp, Reply};
use super::queue_pair::{QpConfig, QueuePair};
use crate::outbox::Outbox;
use crate::wire::Extension;

/// Limit of the namespaces of one controller.
pub const NAMESPACES_MAX: usize = 1024;

/// A controller, and its properties that matter here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Controller {
    /// Its identifier, for the I/O queues' Connect.
    pub cntlid: u16,
    /// NVMe version, as the VS property has it.
    pub version: u32,
    /// Its subsystem's name.
    pub subnqn: String,
    /// Its serial number.
    pub serial: String,
    /// Its model.
    pub model: String,
    /// Its firmware revision.
    pub firmware: String,
    /// The most data of one command, in bytes; `u32::MAX` if it states no limit.
    pub mdts_bytes: u32,
    /// The most data in an I/O command's capsule, in bytes.
    pub in_capsule_bytes: u32,
    /// Whether there is a volatile write cache: then FLUSH has an effect.
    pub vwc: bool,
    /// Granularity of the keep alive timer in 100 ms; 0: it has none.
    pub kas: u16,
    /// The most entries of an I/O queue.
    pub sqsize_max: u16,
    /// The number of I/O queues that were granted.
    pub queues: u16,
    /// The largest namespace identifier.
    pub nn: u32,
    /// Whether it has Write Zeroes.
    pub write_zeroes: bool,
    /// Whether it has Dataset Management.
    pub deallocate: bool,
    /// The Rio extension, if the target has the same version as this crate (T17).
    pub extension: Option<Extension>,
    /// Its active namespaces.
    pub namespaces: Vec<Namespace>,
}

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Its identifier on this controller.
    pub nsid: u32,
    /// The number of blocks.
    pub blocks: u64,
    /// The bytes of a block.
    pub block_size: u32,
    /// The bytes of metadata with each block; a namespace with metadata cannot be used here.
    pub metadata: u16,
    /// Whether it is write protected.
    pub read_only: bool,
    /// Globally unique identifier; zero: none.
    pub nguid: [u8; 16],
    /// UUID, if it states one.
    pub uuid: Option<[u8; 16]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The bring-up is running.
    Enable,
    /// The number of I/O queues has been requested.
    Queues,
    /// A page of the list of active namespaces has been requested.
    List,
    /// The Identify data of a namespace has been requested. The number is its index in `nsids`.
    Namespace(usize),
    /// Its list of identifiers (NGUID, UUID) has been requested.
    Descriptors(usize),
    Attached,
}

/// The bring-up of a [`Controller`]. The caller passes the arriving bytes and the time to it, and
/// sends its outbox.
#[derive(Debug)]
pub struct Attach<P> {
    /// The connection. The bring-up enables the controller over it; the later commands follow.
    bring_up: BringUp<P>,
    step: Step,
    /// The number of I/O queues to request.
    io_queues: u16,
    /// The identifiers of the active namespaces that are known so far, in ascending order.
    nsids: Vec<u32>,
    /// The result. Its namespaces are added one after the other.
    controller: Option<Controller>,
}

impl<P: AsRef<[u8]> + Clone> Attach<P> {
    /// Attaches to the subsystem of `config` (an admin queue's) and requests `io_queues` queues.
    #[must_use]
    pub fn new(config: QpConfig, io_queues: u16) -> Self {
        debug_assert_eq!(config.qid, 0);
        Self {
            bring_up: BringUp::new(config),
            step: Step::Enable,
            io_queues: io_queues.max(1),
            nsids: Vec::new(),
            controller: None,
        }
    }

    /// Begins the bring-up: sends the first PDU.
    pub fn start(&mut self, out: &mut Outbox<P>) {
        self.bring_up.start(out);
    }

    /// When [`Attach::tick`] has work to do, in nanoseconds of the caller's clock.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.bring_up.next_deadline()
    }

    /// Does the work that is due at `now`, ns.
    pub fn tick(&mut self, now: u64, out: &mut Outbox<P>) {
        self.bring_up.tick(now, out);
    }

    /// Takes the whole PDUs at the start of `buf`; returns their length in bytes.
    ///
    /// # Errors
    /// The controller cannot be used; the outbox may hold a last PDU to it.
    pub fn receive(
        &mut self,
        now: u64,
        buf: &[u8],
        out: &mut Outbox<P>,
    ) -> Result<usize, AttachError> {
        let (used, reply) = self.bring_up.receive(now, buf, out)?;
        if let Some(Reply::Done(cqe)) = reply {
            self.step(&cqe, out)?;
        }
        Ok(used)
    }

    /// The bytes that the next PDU in `buf` needs.
    #[must_use]
    pub fn need(&self, buf: &[u8]) -> usize {
        self.bring_up.exchange.qp.need(buf)
    }

    /// Whether the controller is attached.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.step == Step::Attached
    }

    /// The admin queue and the controller; `None` if it is not attached (yet).
    #[must_use]
    pub fn finish(self) -> Option<(QueuePair<P>, Controller)> {
        if !self.is_attached() {
            return None;
        }
        Some((self.bring_up.exchange.qp, self.controller?))
    }

    fn step(&mut self, cqe: &Cqe, out: &mut Outbox<P>) -> Result<(), AttachError> {
        match self.step {
            Step::Enable => {
                self.controller = Some(self.identified()?);
                self.step = Step::Queues;
                let wanted = feature::queues(self.io_queues, self.io_queues);
                let sqe = Sqe::set_features(feature::NUMBER_OF_QUEUES, wanted);
                self.bring_up.exchange.ask("asking for I/O queues", sqe, 0, out);
            }
            Step::Queues => {
                self.bring_up.exchange.succeeded(cqe)?;
                let counts = feature::queues_of(cqe.result() as u32);
                let granted =
                    counts.submission.min(counts.completion).min(u32::from(self.io_queues)) as u16;
                if let Some(controller) = &mut self.controller {
                    controller.queues = granted;
                }
                self.list(0, out);
            }
            Step::List => {
                self.bring_up.exchange.succeeded(cqe)?;
                let found = identify::namespaces_of(&self.bring_up.exchange.page)?;
                // A full page: there may be another one.
                let more = found.len() == identify::LEN / 4;
                if self.nsids.last().zip(found.first()).is_some_and(|(last, first)| first <= last) {
                    return Err(AttachError::Unusable("its namespace list does not ascend"));
                }
                self.nsids.extend(found);
                if self.nsids.len() > NAMESPACES_MAX {
                    return Err(AttachError::Unusable("it has more than 1024 namespaces"));
                }
                match self.nsids.last() {
                    Some(&last) if more => self.list(last, out),
                    _ => self.identify_namespace(0, out),
                }
            }
            Step::Namespace(i) => {
                self.bring_up.exchange.succeeded(cqe)?;
                let namespace = self.namespace(i)?;
                if let Some(controller) = &mut self.controller {
                    controller.namespaces.push(namespace);
                }
                // The identifiers came with NVMe 1.3.
                if self.bring_up.version < 0x0001_0300 {
                    self.identify_namespace(i + 1, out);
                } else {
                    self.step = Step::Descriptors(i);
                    let sqe = Sqe::identify(cns::NAMESPACE_DESCRIPTORS, self.nsids[i]);
                    self.identify("identifying a namespace's names", sqe, out);
                }
            }
            Step::Descriptors(i) => {
                // Not every controller has identifiers; a namespace without UUID can be used.
                if cqe.status().is_ok() {
                    let names = identify::Descriptors::decode(&self.bring_up.exchange.page)?;
                    let namespaces = self.controller.as_mut().map(|c| &mut c.namespaces);
                    if let Some(namespace) = namespaces.and_then(|n| n.last_mut()) {
                        namespace.uuid = names.uuid;
                        namespace.nguid = names.nguid.unwrap_or(namespace.nguid);
                    }
                }
                self.identify_namespace(i + 1, out);
            }
            Step::Attached => {}
        }
        Ok(())
    }

    fn identify(&mut self, what: &'static str, sqe: Sqe, out: &mut Outbox<P>) {
        self.bring_up.exchange.ask(what, sqe, identify::LEN as u32, out);
    }

    /// Requests the identifiers of the active namespaces above `after`.
    fn list(&mut self, after: u32, out: &mut Outbox<P>) {
        self.step = Step::List;
        let sqe = Sqe::identify(cns::ACTIVE_NAMESPACES, after);
        self.identify("listing the namespaces", sqe, out);
    }

    /// Identifies the namespace at index `i`. After the last one, the controller is attached.
    fn identify_namespace(&mut self, i: usize, out: &mut Outbox<P>) {
        match self.nsids.get(i) {
            Some(&nsid) => {
                self.step = Step::Namespace(i);
                let sqe = Sqe::identify(cns::NAMESPACE, nsid);
                self.identify("identify namespace", sqe, out);
            }
            None => self.step = Step::Attached,
        }
    }

    /// The controller that was identified, if it can be used over TCP.
    fn identified(&self) -> Result<Controller, AttachError> {
        let page = &self.bring_up.exchange.page;
        let id = identify::Controller::decode(page)?;
        let qp = &self.bring_up.exchange.qp;
        if id.cntlid != qp.cntlid() {
            return Err(AttachError::Unusable("it states another controller id than on connect"));
        }
        if id.cntrltype == identify::CNTRLTYPE_DISCOVERY
            || qp.config().subnqn == fabrics::DISCOVERY_NQN
        {
            return Err(AttachError::Unusable("it is a discovery controller, without namespaces"));
        }
        // Linux refuses such a controller, too: without these no data can be written over TCP.
        if id.sgls & 3 == 0 {
            return Err(AttachError::Unusable("it does not take SGLs"));
        }
        if id.ioccsz < 4 || id.iorcsz < 1 {
            return Err(AttachError::Unusable("its capsules are too small for an entry"));
        }
        if id.icdoff != 0 {
            return Err(AttachError::Unusable("its in-capsule data does not begin at 0"));
        }
        let entries = u32::from(self.bring_up.cap.mqes) + 1;
        // One entry stays free, so a queue of n + 1 entries has n commands in flight.
        let useful = match id.maxcmd {
            0 => u32::MAX,
            max => u32::from(max) + 1,
        };
        Ok(Controller {
            cntlid: id.cntlid,
            version: self.bring_up.version,
            mdts_bytes: id.mdts_bytes(self.bring_up.cap.mpsmin).unwrap_or(u32::MAX),
            in_capsule_bytes: id.in_capsule_bytes(),
            vwc: id.vwc & identify::VWC_PRESENT != 0,
            kas: id.kas,
            sqsize_max: entries.min(useful).min(u32::from(u16::MAX)) as u16,
            queues: 0,
            nn: id.nn,
            write_zeroes: id.oncs & identify::ONCS_WRITE_ZEROES != 0,
            deallocate: id.oncs & identify::ONCS_DSM != 0,
            extension: Extension::find(page),
            namespaces: Vec::new(),
            subnqn: id.subnqn,
            serial: id.serial,
            model: id.model,
            firmware: id.firmware,
        })
    }

    /// The namespace at index `i`, from its Identify data, if it can be used.
    fn namespace(&self, i: usize) -> Result<Namespace, AttachError> {
        let nsid = self.nsids[i];
        let id = identify::Namespace::decode(&self.bring_up.exchange.page)?;
        let unusable = |why| AttachError::Namespace { nsid, why };
        let block_size =
            id.block_size().ok_or(unusable("its block size is below 512 bytes or beyond 2 GiB"))?;
        if id.nsze == 0 {
            return Err(unusable("it has no blocks"));
        }
        if id.nsze.checked_mul(u64::from(block_size)).is_none() {
            return Err(unusable("it claims more than 2^64 bytes"));
        }
        Ok(Namespace {
            nsid,
            blocks: id.nsze,
            block_size,
            metadata: id.metadata,
            read_only: id.nsattr & 1 != 0,
            nguid: id.nguid,
            uuid: None,
        })
    }
}

#[cfg(test)]
mod tests;
