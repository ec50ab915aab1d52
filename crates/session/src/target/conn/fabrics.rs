//! Fabrics commands: Connect and Disconnect (Base §3.3, §6). The admin queue handles properties.

use alloc::boxed::Box;
use alloc::string::String;

use riopipe_nvme::command::{Sgl, Sqe, Status, admin as opcode};
use riopipe_nvme::fabrics::{
    CATTR_NO_SQ_FLOW, CNTLID_ANY, CONNECT_DATA_LEN, ConnectData, ConnectInvalid, DISCOVERY_NQN,
    fctype,
};

use super::TargetConn;
use crate::outbox::Outbox;
use crate::target::admin::Admin;
use crate::target::capsule::Capsule;
use crate::target::closed::Closed;
use crate::target::commands::Commands;
use crate::target::context::{Context, Queue, update_shared};
use crate::target::env::{Event, TargetEnv};
use crate::target::limits::{ADMIN_ENTRIES_MAX, IN_CAPSULE_BYTES, QUEUE_ENTRIES_MAX};
use crate::target::shared::{AttachError, Attached};

/// Why a Connect was refused.
struct ConnectRefusal {
    /// The status of the completion.
    status: Status,
    /// The result of the completion: for an invalid parameter, its place in the command or the data.
    result: u64,
    /// The reason, for the target's log.
    why: String,
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
        let invalid = |offset, in_data| ConnectInvalid { offset, in_data, why: "" }.result();
        let (status, result) = match error {
            AttachError::Full | AttachError::Memory => (Status::CONNECT_BUSY, 0),
            AttachError::NoController => (Status::CONNECT_INVALID.with_dnr(), invalid(16, true)),
            AttachError::OtherHost => (Status::CONNECT_INVALID_HOST.with_dnr(), 0),
            AttachError::NotEnabled | AttachError::Taken => (Status::SEQUENCE_ERROR.with_dnr(), 0),
            AttachError::Discovery | AttachError::QueueId => {
                (Status::CONNECT_INVALID.with_dnr(), invalid(42, false))
            }
        };
        Self { status, result, why: error.to_string() }
    }
}

impl<E: TargetEnv> TargetConn<E> {
    /// A command on a connection that is no queue yet: only Connect may come.
    pub(super) fn execute_before_connect(
        &mut self,
        capsule: Capsule<'_>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let Capsule { sqe, data, digest_ok, .. } = capsule;
        let cid = sqe.cid();
        if sqe.opcode() != opcode::FABRICS || sqe.fctype() != fctype::CONNECT {
            self.context.send_completion(cid, Status::SEQUENCE_ERROR.with_dnr(), 0, outbox);
            return Ok(());
        }
        if !digest_ok {
            self.context.send_completion(cid, Status::TRANSIENT_TRANSPORT, 0, outbox);
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
        let names = ConnectData::decode(data);
        let (hostnqn, subnqn) =
            names.as_ref().map_or(("", ""), |d| (d.hostnqn.as_str(), d.subnqn.as_str()));
        let qid = sqe.connect_fields().qid;
        let outcome = match &names {
            Ok(data) => self.connect(sqe, data, env),
            Err(invalid) => Err((*invalid).into()),
        };
        match outcome {
            Ok(cntlid) => {
                env.log(Event::Connected { hostnqn, subnqn, cntlid, qid });
                if self.context.queue.as_ref().is_some_and(|q| q.no_sq_flow) {
                    // SQHD FFFFh accepts that flow control is off (Base §3.3.1.2).
                    self.context.sqhd = 0xffff;
                }
                self.context.send_completion(cid, Status::SUCCESS, u64::from(cntlid), outbox);
                self.context.sqhd = 0;
            }
            Err(ConnectRefusal { status, result, why }) => {
                env.log(Event::Refused { hostnqn, subnqn, qid, why: &why, status });
                self.context.send_completion(cid, status, result, outbox);
            }
        }
        Ok(())
    }

    fn connect(
        &mut self,
        sqe: &Sqe,
        data: &ConnectData,
        env: &mut E,
    ) -> Result<u16, ConnectRefusal> {
        let fields = sqe.connect_fields();
        let invalid =
            |offset, in_data, why| ConnectRefusal::from(ConnectInvalid { offset, in_data, why });
        if fields.recfmt != 0 {
            return Err(ConnectRefusal {
                status: Status::CONNECT_FORMAT.with_dnr(),
                result: 0,
                why: "an unknown record format".into(),
            });
        }
        let (io, id) = (fields.qid != 0, self.context.id);
        let entries_max = if io { QUEUE_ENTRIES_MAX } else { ADMIN_ENTRIES_MAX };
        if fields.sqsize == 0 || fields.sqsize >= entries_max {
            return Err(invalid(44, false, "a submission queue of a size that is not supported"));
        }
        let entries = fields.sqsize + 1;
        let now = env.now();
        let discovery = data.subnqn == DISCOVERY_NQN;
        let (known, allowed) = env.with_shared(|shared| {
            let known = discovery || data.subnqn == shared.identity().subnqn;
            (known, discovery || shared.allows(&data.hostnqn))
        });
        if !known {
            return Err(invalid(256, true, "no such subsystem here"));
        }
        if !allowed {
            return Err(ConnectRefusal {
                status: Status::CONNECT_INVALID_HOST.with_dnr(),
                result: 0,
                why: "the host is not on the list of allowed hosts".into(),
            });
        }
        let Attached { cntlid, association, last_received, rights } = if io {
            update_shared(env, |shared| {
                shared.attach_io(id, data.cntlid, (fields.qid, entries), &data.hostnqn, data.hostid)
            })?
        } else {
            if data.cntlid != CNTLID_ANY {
                return Err(invalid(16, true, "controllers are dynamic: ask for FFFFh"));
            }
            let attached = env.with_shared(|shared| {
                shared.attach_admin(id, &data.hostnqn, data.hostid, discovery, now)
            })?;
            self.admin = Some(Box::new(Admin::new(discovery, fields.kato_ms, self.local.take())));
            attached
        };
        if io {
            self.rx.capsule_max = IN_CAPSULE_BYTES;
        }
        let context = &mut self.context;
        context.namespaces = env.with_shared(|shared| alloc::sync::Arc::clone(shared.namespaces()));
        context.reservation = env.with_shared(|shared| shared.reservation());
        context.commands = Commands::new(entries);
        context.queue = Some(Queue {
            cntlid,
            association,
            qid: fields.qid,
            hostnqn: data.hostnqn.clone(),
            no_sq_flow: fields.cattr & CATTR_NO_SQ_FLOW != 0,
            entries,
            last_received,
            rights,
        });
        Ok(cntlid)
    }

    /// Fabrics commands on a connected queue.
    pub(super) fn execute_fabrics(
        &mut self,
        sqe: &Sqe,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let Self { context, admin, .. } = self;
        let cid = sqe.cid();
        match (sqe.fctype(), admin) {
            // A second Connect on one connection.
            (fctype::CONNECT, _) => {
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
            (fctype::DISCONNECT, None) => return disconnect(context, sqe, outbox),
            _ => context.send_completion(cid, Status::INVALID_OPCODE.with_dnr(), 0, outbox),
        }
        Ok(())
    }
}

fn disconnect<E: TargetEnv>(
    context: &mut Context<E>,
    sqe: &Sqe,
    outbox: &mut Outbox<E::Buf>,
) -> Result<(), Closed> {
    let cid = sqe.cid();
    if sqe.0[40] != 0 || sqe.0[41] != 0 {
        context.send_completion(cid, Status::CONNECT_FORMAT.with_dnr(), 0, outbox);
        return Ok(());
    }
    context.send_completion(cid, Status::SUCCESS, 0, outbox);
    Err(Closed::Ended("the host disconnected the queue"))
}
