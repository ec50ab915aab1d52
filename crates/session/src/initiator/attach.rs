//! Attaching to a controller: all commands from a fresh connection until its namespaces are known.
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
use riopipe_order::write_order::DriveOrder;

pub use super::bring_up::AttachError;
use super::bring_up::{BringUp, Received, Reply};
use super::queue_pair::{QpConfig, QueuePair, SessionError};
use crate::outbox::Outbox;
use crate::wire::{self, Extension};

/// Limit of the namespaces of one controller.
pub const NAMESPACES_MAX: usize = 1024;

/// A controller, with the properties that an initiator needs.
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
    /// The granularity of the keep-alive timer (KAS), in units of 100 ms; 0: there is no timer.
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
    /// The Rio extension, if the target has the same version as this crate (trap T17).
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
    /// The bytes of metadata with each block. A namespace with metadata cannot be part of a volume.
    pub metadata: u16,
    /// Whether it is write protected.
    pub read_only: bool,
    /// The order among writes that its drive keeps by itself.
    pub order: DriveOrder,
    /// Globally unique identifier; zero: none.
    pub nguid: [u8; 16],
    /// UUID, if it states one.
    pub uuid: Option<[u8; 16]>,
}

/// The command of attaching that is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Those of the bring-up.
    BringUp,
    /// Set Features: the number of I/O queues.
    RequestQueues,
    /// Identify: a page of the list of active namespaces.
    ListNamespaces,
    /// Identify: the namespace with this index in `nsids`.
    IdentifyNamespace(usize),
    /// Identify: the list of identifiers (NGUID, UUID) of the namespace with this index.
    ReadIdentifiers(usize),
    /// The controller is attached. No command is in flight.
    Attached,
}

/// The controller must have SGLs: one of these bits of SGLS, in Identify Controller.
const SGLS_SUPPORTED: u32 = 0b11;
/// The smallest IOCCSZ, in units of 16 bytes: a capsule with a submission queue entry of 64 bytes.
const IOCCSZ_MIN: u32 = 4;
/// The smallest IORCSZ, in units of 16 bytes: a capsule with a completion queue entry of 16 bytes.
const IORCSZ_MIN: u32 = 1;
/// NSATTR, bit 0: the namespace is write protected.
const NSATTR_WRITE_PROTECTED: u8 = 1 << 0;
/// NVMe 1.3, as the VS property has it. Namespaces have lists of identifiers since this version.
const VERSION_1_3: u32 = 0x0001_0300;
/// The number of namespace identifiers in a full page of the list.
const NSIDS_PER_PAGE: usize = identify::LEN / 4;

/// Attaches to a [`Controller`]. The caller passes the bytes that arrive and the time, and sends
/// the contents of the outbox.
#[derive(Debug)]
pub struct Attach<P> {
    /// The bring-up, and the admin queue over which the later commands are sent, too.
    bring_up: BringUp<P>,
    step: Step,
    /// The number of I/O queues to request.
    io_queues: u16,
    /// The identifiers of the active namespaces that are known so far, in ascending order.
    nsids: Vec<u32>,
    /// The result, once the controller is identified. Its namespaces are added one after the other.
    controller: Option<Controller>,
}

impl<P: AsRef<[u8]> + Clone> Attach<P> {
    /// Attaches to the subsystem of `config` (an admin queue's) and requests `io_queues` queues.
    #[must_use]
    pub fn new(config: QpConfig, io_queues: u16) -> Self {
        debug_assert_eq!(config.qid, 0);
        Self {
            bring_up: BringUp::new(config),
            step: Step::BringUp,
            io_queues: io_queues.max(1),
            nsids: Vec::new(),
            controller: None,
        }
    }

    /// Begins the bring-up: sends the first PDU.
    pub fn start(&mut self, outbox: &mut Outbox<P>) {
        self.bring_up.start(outbox);
    }

    /// When [`Attach::tick`] has work to do, in nanoseconds of the caller's clock.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.bring_up.next_deadline()
    }

    /// Does the work that is due at `now`, ns.
    pub fn tick(&mut self, now: u64, outbox: &mut Outbox<P>) {
        self.bring_up.tick(now, outbox);
    }

    /// Takes the whole PDUs at the start of `buf`; returns their length in bytes.
    ///
    /// # Errors
    /// The controller cannot be used; the outbox may hold a last PDU to it.
    pub fn receive(
        &mut self,
        now: u64,
        buf: &[u8],
        outbox: &mut Outbox<P>,
    ) -> Result<usize, AttachError> {
        let Received { used, reply } = self.bring_up.receive(now, buf, outbox)?;
        if let Some(Reply::Done(cqe)) = reply {
            self.handle_completion(&cqe, outbox)?;
        }
        Ok(used)
    }

    /// The bytes that the next PDU in `buf` needs.
    #[must_use]
    pub fn need(&self, buf: &[u8]) -> usize {
        self.bring_up.exchange.queue_pair.need(buf)
    }

    /// The error of an authentication that the end of the connection has cut short; `None` if none is under
    /// way.
    #[must_use]
    pub fn unfinished_authentication(&self) -> Option<SessionError> {
        self.bring_up.exchange.queue_pair.unfinished_authentication()
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
        Some((self.bring_up.exchange.queue_pair, self.controller?))
    }

    /// Handles the completion of the command of the present step, and sends the next command.
    fn handle_completion(&mut self, cqe: &Cqe, outbox: &mut Outbox<P>) -> Result<(), AttachError> {
        // A controller need not have identifiers of namespaces. All other commands must succeed.
        // The bring-up has checked its commands itself.
        if !matches!(self.step, Step::BringUp | Step::ReadIdentifiers(_) | Step::Attached) {
            self.bring_up.exchange.check_success(cqe)?;
        }
        match self.step {
            Step::BringUp => {
                self.controller = Some(self.decode_controller()?);
                self.request_queues(outbox);
            }
            Step::RequestQueues => {
                self.record_granted_queues(cqe);
                self.list_namespaces(0, outbox);
            }
            Step::ListNamespaces => self.on_namespace_list(outbox)?,
            Step::IdentifyNamespace(index) => self.on_namespace(index, outbox)?,
            Step::ReadIdentifiers(index) => {
                if cqe.status().is_ok() {
                    self.record_identifiers()?;
                }
                self.identify_namespace(index + 1, outbox);
            }
            Step::Attached => {}
        }
        Ok(())
    }

    /// Requests the I/O queues.
    fn request_queues(&mut self, outbox: &mut Outbox<P>) {
        self.step = Step::RequestQueues;
        // One completion queue for each submission queue.
        let counts = feature::queues(self.io_queues, self.io_queues);
        let sqe = Sqe::set_features(feature::NUMBER_OF_QUEUES, counts);
        self.bring_up.exchange.send_command("asking for I/O queues", sqe, 0, outbox);
    }

    /// Records the number of I/O queues that the controller has granted. It may be lower than the
    /// requested number, or higher.
    fn record_granted_queues(&mut self, cqe: &Cqe) {
        let counts = feature::queues_of(cqe.result() as u32);
        let granted = counts.submission.min(counts.completion).min(u32::from(self.io_queues));
        if let Some(controller) = &mut self.controller {
            controller.queues = granted as u16;
        }
    }

    /// Sends an Identify command. `name` is its name in errors.
    fn send_identify(&mut self, name: &'static str, sqe: Sqe, outbox: &mut Outbox<P>) {
        self.bring_up.exchange.send_command(name, sqe, identify::LEN as u32, outbox);
    }

    /// Requests the identifiers of the active namespaces above `after`.
    fn list_namespaces(&mut self, after: u32, outbox: &mut Outbox<P>) {
        self.step = Step::ListNamespaces;
        let sqe = Sqe::identify(cns::ACTIVE_NAMESPACES, after);
        self.send_identify("listing the namespaces", sqe, outbox);
    }

    /// Handles a page of the list of active namespaces. After the last page, identifies the first
    /// namespace.
    fn on_namespace_list(&mut self, outbox: &mut Outbox<P>) -> Result<(), AttachError> {
        let listed = identify::namespaces_of(&self.bring_up.exchange.page)?;
        let is_full_page = listed.len() == NSIDS_PER_PAGE;
        if let (Some(last_known), Some(first_listed)) = (self.nsids.last(), listed.first())
            && first_listed <= last_known
        {
            return Err(AttachError::Unusable("its namespace list does not ascend"));
        }
        self.nsids.extend(listed);
        if self.nsids.len() > NAMESPACES_MAX {
            return Err(AttachError::Unusable("it has more than 1024 namespaces"));
        }
        match self.nsids.last() {
            // After a full page there may be another one.
            Some(&last) if is_full_page => self.list_namespaces(last, outbox),
            _ => self.identify_namespace(0, outbox),
        }
        Ok(())
    }

    /// Handles the Identify data of the namespace with this index.
    fn on_namespace(&mut self, index: usize, outbox: &mut Outbox<P>) -> Result<(), AttachError> {
        let namespace = self.decode_namespace(index)?;
        if let Some(controller) = &mut self.controller {
            controller.namespaces.push(namespace);
        }
        if self.bring_up.version < VERSION_1_3 {
            self.identify_namespace(index + 1, outbox);
        } else {
            self.step = Step::ReadIdentifiers(index);
            let sqe = Sqe::identify(cns::NAMESPACE_DESCRIPTORS, self.nsids[index]);
            self.send_identify("identifying a namespace's names", sqe, outbox);
        }
        Ok(())
    }

    /// Records the identifiers of the namespace that was added last.
    fn record_identifiers(&mut self) -> Result<(), AttachError> {
        let identifiers = identify::Descriptors::decode(&self.bring_up.exchange.page)?;
        let namespaces = self.controller.as_mut().map(|controller| &mut controller.namespaces);
        if let Some(namespace) = namespaces.and_then(|namespaces| namespaces.last_mut()) {
            namespace.uuid = identifiers.uuid;
            namespace.nguid = identifiers.nguid.unwrap_or(namespace.nguid);
        }
        Ok(())
    }

    /// Identifies the namespace with this index. After the last one, the controller is attached.
    fn identify_namespace(&mut self, index: usize, outbox: &mut Outbox<P>) {
        match self.nsids.get(index) {
            Some(&nsid) => {
                self.step = Step::IdentifyNamespace(index);
                let sqe = Sqe::identify(cns::NAMESPACE, nsid);
                self.send_identify("identify namespace", sqe, outbox);
            }
            None => self.step = Step::Attached,
        }
    }

    /// Decodes the Identify data of the controller.
    ///
    /// # Errors
    /// The controller cannot be used over TCP, or has no namespaces.
    fn decode_controller(&self) -> Result<Controller, AttachError> {
        let page = &self.bring_up.exchange.page;
        let id = identify::Controller::decode(page)?;
        let queue_pair = &self.bring_up.exchange.queue_pair;
        if id.cntlid != queue_pair.cntlid() {
            return Err(AttachError::Unusable("it states another controller id than on connect"));
        }
        if id.cntrltype == identify::CNTRLTYPE_DISCOVERY
            || queue_pair.config().subnqn == fabrics::DISCOVERY_NQN
        {
            return Err(AttachError::Unusable("it is a discovery controller, without namespaces"));
        }
        // Data can be written over TCP only with SGLs. Linux refuses such a controller, too.
        if id.sgls & SGLS_SUPPORTED == 0 {
            return Err(AttachError::Unusable("it does not take SGLs"));
        }
        if id.ioccsz < IOCCSZ_MIN || id.iorcsz < IORCSZ_MIN {
            return Err(AttachError::Unusable("its capsules are too small for an entry"));
        }
        if id.icdoff != 0 {
            return Err(AttachError::Unusable("its in-capsule data does not begin at 0"));
        }
        let entries_max = u32::from(self.bring_up.cap.mqes) + 1;
        // One entry of a queue stays free. So MAXCMD commands in flight need one entry more.
        let useful_entries = match id.maxcmd {
            0 => u32::MAX,
            maxcmd => u32::from(maxcmd) + 1,
        };
        Ok(Controller {
            cntlid: id.cntlid,
            version: self.bring_up.version,
            mdts_bytes: id.mdts_bytes(self.bring_up.cap.mpsmin).unwrap_or(u32::MAX),
            in_capsule_bytes: id.in_capsule_bytes(),
            vwc: id.vwc & identify::VWC_PRESENT != 0,
            kas: id.kas,
            sqsize_max: entries_max.min(useful_entries).min(u32::from(u16::MAX)) as u16,
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

    /// Decodes the Identify data of the namespace with this index.
    ///
    /// # Errors
    /// The namespace cannot be used.
    fn decode_namespace(&self, index: usize) -> Result<Namespace, AttachError> {
        let nsid = self.nsids[index];
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
            order: wire::drive_order_of(&self.bring_up.exchange.page),
            read_only: id.nsattr & NSATTR_WRITE_PROTECTED != 0,
            nguid: id.nguid,
            uuid: None,
        })
    }
}

#[cfg(test)]
mod tests;
