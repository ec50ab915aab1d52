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
use crate::target::context::{Context, Queue, shared};
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
    pub(super) fn before_connect(
        &mut self,
        capsule: Capsule<'_>,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let Capsule { sqe, data, digest_ok, .. } = capsule;
        let cid = sqe.cid();
        if sqe.opcode() != opcode::FABRICS || sqe.fctype() != fctype::CONNECT {
            self.cx.respond(cid, Status::SEQUENCE_ERROR.with_dnr(), 0, out);
            return Ok(());
        }
        if !digest_ok {
            self.cx.respond(cid, Status::TRANSIENT_TRANSPORT, 0, out);
            return Ok(());
        }
        let data = match sqe.sgl() {
            Ok(Sgl::InCapsule { offset: 0, len }) if len as usize == CONNECT_DATA_LEN => data,
            Ok(Sgl::InCapsule { .. }) => &[],
            // The data of Connect comes in the capsule (Base §6.3).
            Ok(Sgl::Transport { .. }) => {
                self.cx.respond(cid, Status::SGL_TYPE_INVALID.with_dnr(), 0, out);
                return Ok(());
            }
            Err(error) => {
                self.cx.respond(cid, error.status(), 0, out);
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
                if self.cx.queue.as_ref().is_some_and(|q| q.no_sq_flow) {
                    // SQHD FFFFh accepts that flow control is off (Base §3.3.1.2).
                    self.cx.sqhd = 0xffff;
                }
                self.cx.respond(cid, Status::SUCCESS, u64::from(cntlid), out);
                self.cx.sqhd = 0;
            }
            Err(ConnectRefusal { status, result, why }) => {
                env.log(Event::Refused { hostnqn, subnqn, qid, why: &why, status });
                self.cx.respond(cid, status, result, out);
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
        let (io, id) = (fields.qid != 0, self.cx.id);
        let entries_max = if io { QUEUE_ENTRIES_MAX } else { ADMIN_ENTRIES_MAX };
        if fields.sqsize == 0 || fields.sqsize >= entries_max {
            return Err(invalid(44, false, "a submission queue of a size that is not supported"));
        }
        let entries = fields.sqsize + 1;
        let now = env.now();
        let discovery = data.subnqn == DISCOVERY_NQN;
        let (known, allowed) = env.with_shared(|s| {
            let known = discovery || data.subnqn == s.identity().subnqn;
            (known, discovery || s.allows(&data.hostnqn))
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
        let Attached { cntlid, assoc, last_received, rights } = if io {
            shared(env, |s| {
                s.attach_io(id, data.cntlid, (fields.qid, entries), &data.hostnqn, data.hostid)
            })?
        } else {
            if data.cntlid != CNTLID_ANY {
                return Err(invalid(16, true, "controllers are dynamic: ask for FFFFh"));
            }
            let attached = env
                .with_shared(|s| s.attach_admin(id, &data.hostnqn, data.hostid, discovery, now))?;
            self.admin = Some(Box::new(Admin::new(discovery, fields.kato_ms, self.local.take())));
            attached
        };
        if io {
            self.rx.capsule_max = IN_CAPSULE_BYTES;
        }
        let cx = &mut self.cx;
        cx.namespaces = env.with_shared(|s| alloc::sync::Arc::clone(s.namespaces()));
        cx.reservation = env.with_shared(|s| s.reservation());
        cx.commands = Commands::new(entries);
        cx.queue = Some(Queue {
            cntlid,
            assoc,
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
    pub(super) fn fabrics(
        &mut self,
        sqe: &Sqe,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let Self { cx, admin, .. } = self;
        let cid = sqe.cid();
        match (sqe.fctype(), admin) {
            // A second Connect on one connection.
            (fctype::CONNECT, _) => cx.respond(cid, Status::SEQUENCE_ERROR.with_dnr(), 0, out),
            (fctype::PROPERTY_GET, Some(admin)) => {
                let (status, value) = admin.property_get(sqe);
                cx.respond(cid, status, value, out);
            }
            (fctype::PROPERTY_SET, Some(admin)) => {
                let status = admin.property_set(cx, sqe, env);
                cx.respond(cid, status, 0, out);
            }
            (fctype::DISCONNECT, Some(_)) => {
                cx.respond(cid, Status::INVALID_QUEUE_TYPE.with_dnr(), 0, out);
            }
            (fctype::DISCONNECT, None) => return disconnect(cx, sqe, out),
            _ => cx.respond(cid, Status::INVALID_OPCODE.with_dnr(), 0, out),
        }
        Ok(())
    }
}

fn disconnect<E: TargetEnv>(
    cx: &mut Context<E>,
    sqe: &Sqe,
    out: &mut Outbox<E::Buf>,
) -> Result<(), Closed> {
    let cid = sqe.cid();
    if sqe.0[40] != 0 || sqe.0[41] != 0 {
        cx.respond(cid, Status::CONNECT_FORMAT.with_dnr(), 0, out);
        return Ok(());
    }
    cx.respond(cid, Status::SUCCESS, 0, out);
    Err(Closed::Ended("the host disconnected the queue"))
}
