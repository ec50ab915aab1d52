//! The Fabrics commands (Base §3.3, §6). Connect makes a connection an admin queue or an I/O queue.
//! Disconnect ends an I/O queue. The admin queue carries out the commands for properties.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;

use riopipe_nvme::command::{Sgl, Sqe, Status, admin as opcode};
use riopipe_nvme::fabrics::{
    CATTR_NO_SQ_FLOW, CNTLID_ANY, CONNECT_DATA_LEN, Connect, ConnectData, ConnectInvalid,
    DISCOVERY_NQN, fctype,
};

use super::TargetConn;
use super::authentication::{Authentication, AwaitedConnect, is_auth, result_with_auth};
use crate::auth::tls::KeyOwner;
use crate::outbox::Outbox;
use crate::target::access::Admission;
use crate::target::admin::Admin;
use crate::target::capsule::Capsule;
use crate::target::closed::Closed;
use crate::target::commands::Commands;
use crate::target::context::{Context, Queue, update_shared};
use crate::target::env::{Event, TargetEnv};
use crate::target::limits::{ADMIN_ENTRIES_MAX, IN_CAPSULE_BYTES, QUEUE_ENTRIES_MAX};
use crate::target::shared::{AttachError, Attached, IoQueue};

/// The SQHD by which the completion of Connect accepts that the host has switched submission queue
/// flow control off (Base §3.3.1.2).
const SQHD_NO_FLOW_CONTROL: u16 = 0xffff;

/// A field of Connect that may be invalid.
#[derive(Clone, Copy)]
struct ConnectField {
    /// The offset of the field, bytes.
    offset: u16,
    /// Whether the field is in the data of the command. Otherwise it is in the command itself.
    in_data: bool,
}

impl ConnectField {
    const QUEUE_ID: Self = Self { offset: 42, in_data: false };
    const QUEUE_SIZE: Self = Self { offset: 44, in_data: false };
    const CONTROLLER_ID: Self = Self { offset: 16, in_data: true };
    const SUBSYSTEM_NQN: Self = Self { offset: 256, in_data: true };

    const fn invalid(self, why: &'static str) -> ConnectInvalid {
        ConnectInvalid { offset: self.offset, in_data: self.in_data, why }
    }
}

/// Why a Connect was refused.
pub(super) struct ConnectRefusal {
    /// The status of the completion.
    pub(super) status: Status,
    /// The result of the completion: for an invalid parameter, its place in the command or in the
    /// data; otherwise 0.
    pub(super) result: u64,
    /// The reason, for the operator.
    pub(super) why: String,
}

impl From<ConnectInvalid> for ConnectRefusal {
    fn from(invalid: ConnectInvalid) -> Self {
        use alloc::string::ToString;
        Self {
            status: Status::CONNECT_INVALID.with_dnr(),
            result: invalid.result(),
            why: invalid.to_string(),
        }
    }
}

impl From<AttachError> for ConnectRefusal {
    fn from(error: AttachError) -> Self {
        use alloc::string::ToString;
        // `ConnectRefusal::why` has the reason.
        let invalid = |field: ConnectField| field.invalid("").result();
        let (status, result) = match error {
            AttachError::Full
            | AttachError::Memory
            | AttachError::Draining
            | AttachError::PortRemoved => (Status::CONNECT_BUSY, 0),
            AttachError::NoController | AttachError::OtherPort { .. } => {
                (Status::CONNECT_INVALID.with_dnr(), invalid(ConnectField::CONTROLLER_ID))
            }
            AttachError::OtherHost | AttachError::NotAllowed => {
                (Status::CONNECT_INVALID_HOST.with_dnr(), 0)
            }
            AttachError::NotEnabled | AttachError::Taken => (Status::SEQUENCE_ERROR.with_dnr(), 0),
            AttachError::Discovery | AttachError::QueueId => {
                (Status::CONNECT_INVALID.with_dnr(), invalid(ConnectField::QUEUE_ID))
            }
        };
        Self { status, result, why: error.to_string() }
    }
}

impl<E: TargetEnv> TargetConn<E> {
    /// Carries out a command on a connection that is no queue yet. Only Connect is allowed.
    pub(super) fn execute_before_connect(
        &mut self,
        capsule: Capsule<'_>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        if self.authentication.is_some() {
            return self.execute_before_authentication(capsule, env, outbox);
        }
        let Capsule { sqe, data, is_digest_valid, .. } = capsule;
        let cid = sqe.cid();
        if sqe.opcode() != opcode::FABRICS || sqe.fctype() != fctype::CONNECT {
            self.context.send_completion(cid, Status::SEQUENCE_ERROR.with_dnr(), 0, outbox);
            return Ok(());
        }
        if !is_digest_valid {
            self.context.send_completion(cid, Status::TRANSIENT_TRANSPORT, 0, outbox);
            return Ok(());
        }
        if sqe.fuse() != 0 {
            self.context.send_completion(cid, Status::INVALID_FIELD.with_dnr(), 0, outbox);
            return Ok(());
        }
        let data = match sqe.sgl() {
            Ok(Sgl::InCapsule { offset: 0, len }) if len as usize == CONNECT_DATA_LEN => data,
            Ok(Sgl::InCapsule { .. }) => &[],
            // The data of Connect comes in the capsule (Base §6.3).
            Ok(Sgl::Transport { .. }) => {
                self.context.send_completion(cid, Status::SGL_TYPE_INVALID.with_dnr(), 0, outbox);
                return Ok(());
            }
            Err(error) => {
                self.context.send_completion(cid, error.status(), 0, outbox);
                return Ok(());
            }
        };
        let connect_data = ConnectData::decode(data);
        let (hostnqn, subnqn) = connect_data
            .as_ref()
            .map_or(("", ""), |data| (data.hostnqn.as_str(), data.subnqn.as_str()));
        let qid = sqe.connect_fields().qid;
        let outcome = match &connect_data {
            Ok(data) => self.connect(sqe, data, env),
            Err(invalid) => Err((*invalid).into()),
        };
        match outcome {
            Ok(result) => {
                if sqe.connect_fields().cattr & CATTR_NO_SQ_FLOW != 0 {
                    self.context.sqhd = SQHD_NO_FLOW_CONTROL;
                }
                self.context.send_completion(cid, Status::SUCCESS, result, outbox);
                self.context.sqhd = 0;
            }
            Err(ConnectRefusal { status, result, why }) => {
                let peer = &self.context.peer;
                env.log(Event::Refused { peer, hostnqn, subnqn, qid, why: &why, status });
                self.context.send_completion(cid, status, result, outbox);
            }
        }
        Ok(())
    }

    /// Carries out Connect: makes this connection a queue, or waits with that until the host is
    /// authenticated. Returns the result of the completion.
    fn connect(
        &mut self,
        sqe: &Sqe,
        data: &ConnectData,
        env: &mut E,
    ) -> Result<u64, ConnectRefusal> {
        let fields = sqe.connect_fields();
        let entries = check_queue_size(&fields)?;
        let must_authenticate = check_names(fields.qid, data, self.secured_by.as_deref(), env)?;
        let cntlid = if fields.qid != 0 {
            data.cntlid
        } else if data.cntlid == CNTLID_ANY {
            env.with_shared(|shared| shared.choose_cntlid())
        } else {
            let why = "controllers are dynamic: ask for FFFFh";
            return Err(ConnectField::CONTROLLER_ID.invalid(why).into());
        };
        let awaited = AwaitedConnect { fields, data: data.clone(), entries, cntlid };
        if must_authenticate {
            self.context.awaited_qid = fields.qid;
            self.authentication = Some(Box::new(Authentication::new(data, awaited, env.now())));
            return Ok(result_with_auth(cntlid));
        }
        self.attach(&awaited, env)?;
        Ok(u64::from(cntlid))
    }

    /// Does what a Connect has asked for: makes this connection a queue.
    pub(super) fn attach(
        &mut self,
        connect: &AwaitedConnect,
        env: &mut E,
    ) -> Result<(), ConnectRefusal> {
        let AwaitedConnect { fields, data, entries, cntlid } = connect;
        let (conn, now) = (self.context.id, env.now());
        let is_io_queue = fields.qid != 0;
        // A connection without an address is one through the first port.
        let port = self.local_address.as_ref().map_or(1, |local| local.portid);
        let attached = if is_io_queue {
            let queue = IoQueue { qid: fields.qid, entries: *entries, port };
            update_shared(env, |shared| {
                shared.attach_io(conn, *cntlid, queue, &data.hostnqn, data.hostid)
            })?
        } else {
            let is_discovery = data.subnqn == DISCOVERY_NQN;
            let attached = env.with_shared(|shared| {
                let host = (&data.hostnqn[..], data.hostid);
                shared.attach_admin(conn, *cntlid, host, (port, is_discovery), now)
            })?;
            let admin = Admin::new(is_discovery, fields.kato_ms, self.local_address.take());
            self.admin = Some(Box::new(admin));
            attached
        };
        if is_io_queue {
            self.rx.capsule_max = IN_CAPSULE_BYTES;
        }
        let Attached { cntlid, association, last_received, rights, access } = attached;
        let context = &mut self.context;
        context.namespaces = env.with_shared(|shared| alloc::sync::Arc::clone(shared.namespaces()));
        context.reservation = env.with_shared(|shared| shared.reservation());
        context.commands = Commands::new(*entries);
        context.queue = Some(Queue {
            cntlid,
            association,
            qid: fields.qid,
            hostnqn: data.hostnqn.clone(),
            no_sq_flow: fields.cattr & CATTR_NO_SQ_FLOW != 0,
            entries: *entries,
            last_received,
            rights,
            access,
            hostid: data.hostid,
        });
        let ConnectData { hostnqn, subnqn, .. } = data;
        let peer = &self.context.peer;
        env.log(Event::Connected { peer, hostnqn, subnqn, cntlid, qid: fields.qid });
        Ok(())
    }

    /// Carries out a Fabrics command on a connection that is a queue.
    pub(super) fn execute_fabrics(
        &mut self,
        capsule: Capsule<'_>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let sqe = capsule.sqe;
        if is_auth(sqe) && self.authentication.is_some() {
            return self.execute_auth(capsule, env, outbox);
        }
        let Self { context, admin, .. } = self;
        let cid = sqe.cid();
        match (sqe.fctype(), admin) {
            // A connection can be connected only once.
            (fctype::CONNECT, Some(_)) => {
                context.send_completion(cid, Status::SEQUENCE_ERROR.with_dnr(), 0, outbox)
            }
            (fctype::PROPERTY_GET, Some(admin)) => {
                let (status, value) = admin.property_get(sqe);
                context.send_completion(cid, status, value, outbox);
            }
            (fctype::PROPERTY_SET, Some(admin)) => {
                let status = admin.property_set(context, sqe, env);
                context.send_completion(cid, status, 0, outbox);
            }
            (fctype::DISCONNECT, Some(_)) => {
                context.send_completion(cid, Status::INVALID_QUEUE_TYPE.with_dnr(), 0, outbox);
            }
            // After Connect this is the only Fabrics command of an I/O queue. All others are refused as
            // unknown, a second Connect, too.
            (fctype::DISCONNECT, None) => return disconnect(context, sqe, outbox),
            _ => context.send_completion(cid, Status::INVALID_OPCODE.with_dnr(), 0, outbox),
        }
        Ok(())
    }
}

/// Checks the record format and the queue size of Connect. Returns the number of queue entries.
fn check_queue_size(fields: &Connect) -> Result<u16, ConnectRefusal> {
    if fields.recfmt != 0 {
        return Err(ConnectRefusal {
            status: Status::CONNECT_FORMAT.with_dnr(),
            result: 0,
            why: "an unknown record format".into(),
        });
    }
    let entries_max = if fields.qid != 0 { QUEUE_ENTRIES_MAX } else { ADMIN_ENTRIES_MAX };
    // SQSIZE is the number of entries minus 1.
    if fields.sqsize == 0 || fields.sqsize >= entries_max {
        let why = "a submission queue of a size that is not supported";
        return Err(ConnectField::QUEUE_SIZE.invalid(why).into());
    }
    Ok(fields.sqsize + 1)
}

/// Checks that the subsystem exists here, and that the host may use it. Every host may use the
/// discovery subsystem. Returns whether the host must authenticate.
fn check_names<E: TargetEnv>(
    qid: u16,
    data: &ConnectData,
    secured_by: Option<&KeyOwner>,
    env: &mut E,
) -> Result<bool, ConnectRefusal> {
    // The controllers of the discovery subsystem have no I/O queues. One that named it would become a queue
    // of another subsystem's controller, without the proofs that this subsystem demands.
    if qid != 0 && data.subnqn == DISCOVERY_NQN {
        return Err(AttachError::Discovery.into());
    }
    let access = env.with_shared(|shared| Arc::clone(shared.access()));
    access.check_channel(secured_by, &data.hostnqn, &data.subnqn).map_err(|why| {
        ConnectRefusal { status: Status::CONNECT_INVALID_HOST.with_dnr(), result: 0, why }
    })?;
    if data.subnqn == DISCOVERY_NQN {
        return Ok(false);
    }
    let (is_known, is_allowed, must_authenticate) = env.with_shared(|shared| {
        let admission = shared.access().admission(&data.hostnqn);
        (
            data.subnqn == shared.identity().subnqn,
            !matches!(admission, Admission::Refused),
            matches!(admission, Admission::Authenticates(..)),
        )
    });
    if !is_known {
        return Err(ConnectField::SUBSYSTEM_NQN.invalid("no such subsystem here").into());
    }
    if !is_allowed {
        return Err(ConnectRefusal {
            status: Status::CONNECT_INVALID_HOST.with_dnr(),
            result: 0,
            why: "the host is not on the list of allowed hosts".into(),
        });
    }
    Ok(must_authenticate)
}

/// Carries out Disconnect: ends an I/O queue after the completion.
fn disconnect<E: TargetEnv>(
    context: &mut Context<E>,
    sqe: &Sqe,
    outbox: &mut Outbox<E::Buf>,
) -> Result<(), Closed> {
    let cid = sqe.cid();
    let record_format = [sqe.0[40], sqe.0[41]];
    if record_format != [0, 0] {
        context.send_completion(cid, Status::CONNECT_FORMAT.with_dnr(), 0, outbox);
        return Ok(());
    }
    context.send_completion(cid, Status::SUCCESS, 0, outbox);
    Err(Closed::Ended("the host disconnected the queue"))
}
