//! The targets of a volume, and attaching to them. Opening, creating and inspecting a volume begin here:
//! each starts one [`Target`] for each target address in the member list.

use std::sync::Arc;

use riopipe_net::Socket;
use riopipe_nvme::discovery::Entry;
use riopipe_session::initiator::association::{Association, AssociationConfig, AssociationError};
use riopipe_session::initiator::volume::Associations;
use riopipe_session::initiator::volume::members::MemberPlace;

use crate::addr::{MemberAddr, TargetAddr};
use crate::call_error::AttachError;
use crate::dial::Dialer;
use crate::identity::{ConnectOptions, Dhchap};
use crate::signal::Signal;
use crate::sockets::Page;
use crate::target::Target;
use crate::time::nanos;

/// The number of I/O queues that the initiator requests from each target: one for labels and undo, the
/// rest for streams and readers.
const IO_QUEUE_COUNT: u16 = 128;
/// The largest read that the initiator requests, bytes.
pub(crate) const READ_BYTES_MAX: u32 = 4 << 20;

/// The targets of a member list, to each of which one association is set up, and the place of each
/// member. The associations end when this is dropped, unless the volume has been opened.
#[derive(Debug)]
pub(crate) struct Targets {
    targets: Vec<StopOnDrop>,
    /// The address of each target, from the first member on it.
    pub(crate) addrs: Vec<MemberAddr>,
    /// For each member, its target and its namespace.
    pub(crate) places: Vec<MemberPlace>,
    /// Is notified when one of the associations changes.
    pub(crate) signal: Arc<Signal>,
}

impl Targets {
    /// Starts the thread of each target of `members`, which sets up the association.
    pub(crate) fn start(
        members: &[MemberAddr],
        options: &ConnectOptions,
    ) -> Result<Self, AttachError> {
        let (places, addrs) = Self::places_of(members);
        let signal = Arc::default();
        let start = |addr: &MemberAddr| {
            let association = Association::new(config(addr.nqn.clone(), options));
            start_target(addr.target(), association, options, &signal)
        };
        let targets = addrs.iter().map(start).collect::<Result<_, _>>()?;
        Ok(Self { targets, addrs, places, signal })
    }

    /// Numbers the targets in the order of the members. Returns the place of each member, and the
    /// address of each target, from the first member on it.
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
        self.targets.len()
    }

    pub(crate) fn get(&self, target: usize) -> &Arc<Target> {
        &self.targets[target].0
    }

    /// A target's address for error messages.
    pub(crate) fn name(&self, target: usize) -> TargetAddr {
        self.addrs[target].target()
    }

    /// The address of a drive.
    pub(crate) fn member_at(&self, place: MemberPlace) -> MemberAddr {
        MemberAddr { nsid: place.nsid, ..self.addrs[place.target].clone() }
    }

    /// The namespaces that a target has, for error messages.
    pub(crate) fn nsids(&self, target: usize) -> Vec<u32> {
        let nsids = |association: &mut Association<Page>| {
            let namespaces = association.controller().map(|controller| &controller.namespaces);
            namespaces.into_iter().flatten().map(|namespace| namespace.nsid).collect()
        };
        self.get(target).with_association(nsids).unwrap_or_default()
    }

    /// The error for targets that can't be used. `failed` has their numbers and the reasons.
    pub(crate) fn attach_error(&self, failed: Vec<(usize, AssociationError)>) -> AttachError {
        let attach_error = |(target, error)| self.get(target).attach_error(error);
        let mut errors: Vec<AttachError> = failed.into_iter().map(attach_error).collect();
        if errors.len() == 1 { errors.remove(0) } else { AttachError::Several(errors) }
    }
}

impl Associations for &Targets {
    type Piece = Page;

    fn with<R>(&mut self, target: usize, action: impl FnOnce(&mut Association<Page>) -> R) -> R {
        let result = self.get(target).with_association(action);
        result.expect("no manager has the associations of a volume that is being opened or created")
    }
}

/// Stops the target when it is dropped, unless the volume has been opened.
#[derive(Debug)]
struct StopOnDrop(Arc<Target>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop_unless_open();
    }
}

fn start_target(
    name: TargetAddr,
    association: Association<Page>,
    options: &ConnectOptions,
    signal: &Arc<Signal>,
) -> Result<StopOnDrop, AttachError> {
    let dialer = Dialer::new(options);
    match Target::start(name.clone(), association, dialer, Arc::clone(signal)) {
        Ok(target) => Ok(StopOnDrop(target)),
        Err(source) => Err(AttachError::Target { target: name, nqn: None, source }),
    }
}

fn config(subnqn: Option<String>, options: &ConnectOptions) -> AssociationConfig {
    AssociationConfig {
        host_nqn: options.host_nqn.clone(),
        host_id: options.host_id,
        secrets: options.dhchap.as_ref().map(Dhchap::for_session),
        subnqn,
        keep_alive_ms: options.keep_alive_ms(),
        report_ns: None,
        header_digest: options.header_digest,
        data_digest: options.data_digest,
        crc: crate::crc32c,
        data_max: READ_BYTES_MAX,
        io_queues: IO_QUEUE_COUNT,
        answer_ns: nanos(options.timeout),
    }
}

/// Connects to the target of `member`, whose subsystem is known, for a stream.
pub(crate) fn open_socket(
    member: &MemberAddr,
    dialer: &Dialer,
) -> Result<Socket, riopipe_net::ConnectError> {
    dialer.dial(&member.socket(), member.nqn.as_deref().unwrap_or_default())
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
    let association = Association::discover(config(None, options));
    let target = start_target(TargetAddr::new(host, port), association, options, &Arc::default())?;
    target.0.wait_for_discovery()
}
