//! The targets of a volume, and attaching to them.

use std::sync::Arc;
use std::time::Duration;

use riopipe_net::{Socket, SocketOptions, connect};
use riopipe_nvme::discovery::Entry;
use riopipe_session::initiator::association::{Association, AssociationConfig, AssociationError};
use riopipe_session::initiator::volume::Associations;
use riopipe_session::initiator::volume::members::MemberPlace;

use crate::addr::{MemberAddr, TargetAddr};
use crate::call_error::AttachError;
use crate::identity::ConnectOptions;
use crate::signal::Signal;
use crate::sockets::Page;
use crate::target::Target;
use crate::time::nanos;

/// Number of requested I/O queues: one for labels and undo, the rest for streams.
const IO_QUEUES: u16 = 128;
/// Bytes of data that one read may ask for.
const DATA_MAX: u32 = 4 << 20;

/// The targets of a member list, to each of which one association is set up, and the place of each
/// member. The associations end when this is dropped, unless the volume has been opened.
#[derive(Debug)]
pub(crate) struct Targets {
    list: Vec<Ending>,
    /// The address of each target, as its first member gives it.
    pub(crate) addrs: Vec<MemberAddr>,
    pub(crate) places: Vec<MemberPlace>,
    pub(crate) signal: Arc<Signal>,
}

impl Targets {
    /// Begins to attach to the targets of `members`.
    pub(crate) fn start(
        members: &[MemberAddr],
        options: &ConnectOptions,
    ) -> Result<Self, AttachError> {
        let (places, addrs) = Self::places_of(members);
        let signal = Arc::default();
        let begin = |addr: &MemberAddr| {
            let machine = Association::new(config(addr.nqn.clone(), options));
            start(addr.target(), machine, options, &signal)
        };
        let list = addrs.iter().map(begin).collect::<Result<_, _>>()?;
        Ok(Self { list, addrs, places, signal })
    }

    /// The place of each member, and the address of each target as its first member gives it.
    pub(crate) fn places_of(members: &[MemberAddr]) -> (Vec<MemberPlace>, Vec<MemberAddr>) {
        let mut addrs: Vec<MemberAddr> = Vec::new();
        let place = |member: &MemberAddr| {
            let found = addrs.iter().position(|first| first.same_target(member));
            let target = found.unwrap_or_else(|| {
                addrs.push(member.clone());
                addrs.len() - 1
            });
            MemberPlace { target, nsid: member.nsid }
        };
        (members.iter().map(place).collect(), addrs)
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn get(&self, target: usize) -> &Arc<Target> {
        &self.list[target].0
    }

    /// A target's address for error messages.
    pub(crate) fn name(&self, target: usize) -> TargetAddr {
        self.addrs[target].target()
    }

    /// The namespaces that a target has, for error messages.
    pub(crate) fn nsids(&self, target: usize) -> Vec<u32> {
        let nsids = |association: &mut Association<Page>| {
            let namespaces = association.controller().map(|controller| &controller.namespaces);
            namespaces.into_iter().flatten().map(|namespace| namespace.nsid).collect()
        };
        self.get(target).with_association(nsids).unwrap_or_default()
    }

    /// Why some targets can't be used.
    pub(crate) fn attach_error(&self, failed: Vec<(usize, AssociationError)>) -> AttachError {
        let of = |(target, error)| self.get(target).attach_error(error);
        let mut failed: Vec<AttachError> = failed.into_iter().map(of).collect();
        if failed.len() == 1 { failed.remove(0) } else { AttachError::Several(failed) }
    }
}

impl Associations for &Targets {
    type Piece = Page;

    fn with<R>(&mut self, target: usize, f: impl FnOnce(&mut Association<Page>) -> R) -> R {
        let done = self.get(target).with_association(f);
        done.expect("no manager has the associations of a volume that is being opened or created")
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
    name: TargetAddr,
    machine: Association<Page>,
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
        report_ns: None,
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
    timeout: Duration,
) -> Result<Socket, riopipe_net::ConnectError> {
    connect(&member.socket(), timeout, &SocketOptions::default())
}

/// Lists the subsystems that the discovery service at `host:port` reports.
///
/// # Errors
/// [`AttachError`]: no connection could be made, or there is no discovery service at this address.
pub fn discover(
    host: &str,
    port: u16,
    options: &ConnectOptions,
) -> Result<Vec<Entry>, AttachError> {
    let machine = Association::discover(config(None, options));
    start(TargetAddr::new(host, port), machine, options, &Arc::default())?.0.discovered()
}
