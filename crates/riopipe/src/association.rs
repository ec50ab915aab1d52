//! An attached target, and the questions that a volume's opening asks it, one at a time.

use std::sync::Arc;

use riopipe_net::{Socket, SocketOptions, connect};
use riopipe_nvme::command::{Cqe, Sqe};
use riopipe_nvme::discovery::Entry;
use riopipe_session::initiator::association::{
    Association as Machine, AssociationConfig, ControlQueue,
};
use riopipe_session::initiator::attach::Controller;
use riopipe_session::wire::{STATUS_LEN, VolumeStatus, status_command};

use crate::addr::{MemberAddr, socket};
use crate::error::{AttachError, CallError};
use crate::identity::ConnectOptions;
use crate::stream::nanos;
use crate::target::{CallData, Signal, Target};

/// I/O queues asked for: one for labels, the rest for streams.
const IO_QUEUES: u16 = 128;
/// Bytes of data that one read may ask for.
const DATA_MAX: u32 = 4 << 20;

/// An attached controller.
#[derive(Debug)]
pub(crate) struct Association {
    pub(crate) addr: MemberAddr,
    pub(crate) controller: Controller,
    target: Ending,
}

impl Association {
    /// Attaches to the target of `member`. What happens there is told to `signal`, too.
    pub(crate) fn attach(
        member: &MemberAddr,
        options: &ConnectOptions,
        signal: &Arc<Signal>,
    ) -> Result<Self, AttachError> {
        let machine = Machine::new(config(member.nqn.clone(), options));
        let ending = start(member.socket(), machine, options, signal)?;
        let (nqn, controller) = ending.0.attached()?;
        let addr = MemberAddr { nqn: Some(nqn), ..member.clone() };
        Ok(Self { addr, controller, target: ending })
    }

    /// Its connections.
    pub(crate) fn target(&self) -> &Arc<Target> {
        &self.target.0
    }

    /// Asks one command on the admin queue; returns its completion, whatever its status, and its
    /// data.
    pub(crate) fn ask(&self, sqe: Sqe, data: CallData<'_>) -> Result<(Cqe, Vec<u8>), CallError> {
        self.target().ask(ControlQueue::Admin, sqe, data)
    }

    /// Asks one command on the admin queue that has to succeed.
    pub(crate) fn call(&self, sqe: Sqe, data: CallData<'_>) -> Result<(Cqe, Vec<u8>), CallError> {
        self.target().call(ControlQueue::Admin, sqe, data)
    }

    /// What the target knows of a volume.
    pub(crate) fn volume_status(
        &self,
        volume: riopipe_order::attribute::VolumeId,
    ) -> Result<VolumeStatus, CallError> {
        let (_, page) = self.call(status_command(volume), CallData::Read(STATUS_LEN as u32))?;
        VolumeStatus::decode(&page).ok_or(CallError::Nonsense("a volume status that can't be read"))
    }

    /// The target's address for error messages.
    pub(crate) fn name(&self) -> String {
        self.addr.socket()
    }
}

/// Ends the target when it is dropped, unless the volume has been opened.
#[derive(Debug)]
struct Ending(Arc<Target>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.stop_unless_open();
    }
}

fn start(
    name: String,
    machine: Machine<crate::piece::Piece>,
    options: &ConnectOptions,
    signal: &Arc<Signal>,
) -> Result<Ending, AttachError> {
    let started = Target::start(name.clone(), machine, options.timeout, Arc::clone(signal));
    started.map(Ending).map_err(|source| AttachError::Target { target: name, nqn: None, source })
}

fn config(subnqn: Option<String>, options: &ConnectOptions) -> AssociationConfig {
    AssociationConfig {
        host_nqn: options.host_nqn.clone(),
        host_id: options.host_id,
        subnqn,
        keep_alive_ms: options.keep_alive_ms(),
        tell_ns: None,
        header_digest: options.header_digest,
        data_digest: options.data_digest,
        crc: crate::crc32c,
        data_max: DATA_MAX,
        io_queues: IO_QUEUES,
        answer_ns: nanos(options.timeout),
    }
}

pub(crate) fn open_socket(
    member: &MemberAddr,
    options: &ConnectOptions,
) -> Result<Socket, riopipe_net::ConnectError> {
    connect(&member.socket(), options.timeout, &SocketOptions::default())
}

/// Lists what a discovery service at `host:port` knows.
///
/// # Errors
/// No connection, or no discovery service there.
pub fn discover(
    host: &str,
    port: u16,
    options: &ConnectOptions,
) -> Result<Vec<Entry>, AttachError> {
    let machine = Machine::discover(config(None, options));
    start(socket(host, port), machine, options, &Arc::default())?.0.discovered()
}
