//! Fabrics commands: Connect, Property Get and Set, Disconnect (Base §3.3, §6).

use alloc::boxed::Box;
use alloc::string::String;

use riopipe_nvme::command::{Sgl, Sqe, Status, admin as opcode};
use riopipe_nvme::fabrics::{
    CATTR_NO_SQ_FLOW, CNTLID_ANY, CONNECT_DATA_LEN, Cap, Cc, ConnectData, ConnectInvalid, Csts,
    DISCOVERY_NQN, VERSION_2_0, fctype, property,
};

use super::admin::Admin;
use super::conn::{Closed, Queue, TargetConn, shared};
use super::env::{Event, TargetEnv};
use super::limits::{ADMIN_ENTRIES_MAX, IN_CAPSULE_BYTES, QUEUE_ENTRIES_MAX};
use super::shared::{AttachError, Attached};
use super::slots::Slots;
use crate::outbox::Outbox;

/// Why a Connect was refused, and what to answer.
struct Refusal {
    status: Status,
    result: u64,
    why: String,
}

impl From<ConnectInvalid> for Refusal {
    fn from(invalid: ConnectInvalid) -> Self {
        use alloc::string::ToString;
        Self {
            status: Status::CONNECT_INVALID.with_dnr(),
            result: invalid.result(),
            why: invalid.to_string(),
        }
    }
}

impl From<AttachError> for Refusal {
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
        sqe: &Sqe,
        data: &[u8],
        digest_ok: bool,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let cid = sqe.cid();
        if sqe.opcode() != opcode::FABRICS || sqe.fctype() != fctype::CONNECT {
            self.respond(cid, Status::SEQUENCE_ERROR.with_dnr(), 0, out);
            return Ok(());
        }
        if !digest_ok {
            self.respond(cid, Status::TRANSIENT_TRANSPORT, 0, out);
            return Ok(());
        }
        let data = match sqe.sgl() {
            Ok(Sgl::InCapsule { offset: 0, len }) if len as usize == CONNECT_DATA_LEN => data,
            Ok(Sgl::InCapsule { .. }) => &[],
            // The data of Connect comes in the capsule (Base §6.3).
            Ok(Sgl::Transport { .. }) => {
                self.respond(cid, Status::SGL_TYPE_INVALID.with_dnr(), 0, out);
                return Ok(());
            }
            Err(error) => {
                self.respond(cid, error.status(), 0, out);
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
                if self.queue.as_ref().is_some_and(|q| q.no_sq_flow) {
                    // SQHD FFFFh accepts that flow control is off (Base §3.3.1.2).
                    self.sqhd = 0xffff;
                }
                self.respond(cid, Status::SUCCESS, u64::from(cntlid), out);
                self.sqhd = 0;
            }
            Err(Refusal { status, result, why }) => {
                env.log(Event::Refused { hostnqn, subnqn, qid, why: &why, status });
                self.respond(cid, status, result, out);
            }
        }
        Ok(())
    }

    fn connect(&mut self, sqe: &Sqe, data: &ConnectData, env: &mut E) -> Result<u16, Refusal> {
        let fields = sqe.connect_fields();
        let invalid = |offset, in_data, why| Refusal::from(ConnectInvalid { offset, in_data, why });
        if fields.recfmt != 0 {
            return Err(Refusal {
                status: Status::CONNECT_FORMAT.with_dnr(),
                result: 0,
                why: "an unknown record format".into(),
            });
        }
        let (io, id) = (fields.qid != 0, self.id);
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
            return Err(Refusal {
                status: Status::CONNECT_INVALID_HOST.with_dnr(),
                result: 0,
                why: "the host is not on the list of allowed hosts".into(),
            });
        }
        let Attached { cntlid, assoc, heard, overtaken } = if io {
            shared(env, |s| {
                s.attach_io(id, data.cntlid, (fields.qid, entries), &data.hostnqn, data.hostid)
            })?
        } else {
            if data.cntlid != CNTLID_ANY {
                return Err(invalid(16, true, "controllers are dynamic: ask for FFFFh"));
            }
            let attached = env
                .with_shared(|s| s.attach_admin(id, &data.hostnqn, data.hostid, discovery, now))?;
            let mut admin = Admin::new(discovery);
            admin.kato_ms = fields.kato_ms;
            self.admin = Some(Box::new(admin));
            attached
        };
        self.namespaces = env.with_shared(|s| alloc::sync::Arc::clone(s.namespaces()));
        self.loan = env.with_shared(|s| s.loan());
        if io {
            self.rx.capsule_max = IN_CAPSULE_BYTES;
        }
        self.slots = Slots::new(entries);
        self.queue = Some(Queue {
            cntlid,
            assoc,
            qid: fields.qid,
            hostnqn: data.hostnqn.clone(),
            no_sq_flow: fields.cattr & CATTR_NO_SQ_FLOW != 0,
            entries,
            heard,
            overtaken,
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
        let cid = sqe.cid();
        let is_admin = self.admin.is_some();
        match sqe.fctype() {
            // A second Connect on one connection.
            fctype::CONNECT => self.respond(cid, Status::SEQUENCE_ERROR.with_dnr(), 0, out),
            fctype::PROPERTY_GET if is_admin => {
                let (status, value) = self.property_get(sqe);
                self.respond(cid, status, value, out);
            }
            fctype::PROPERTY_SET if is_admin => {
                let status = self.property_set(sqe, env);
                self.respond(cid, status, 0, out);
            }
            fctype::DISCONNECT if is_admin => {
                self.respond(cid, Status::INVALID_QUEUE_TYPE.with_dnr(), 0, out);
            }
            fctype::DISCONNECT => {
                if sqe.0[40] != 0 || sqe.0[41] != 0 {
                    self.respond(cid, Status::CONNECT_FORMAT.with_dnr(), 0, out);
                } else {
                    self.respond(cid, Status::SUCCESS, 0, out);
                    return Err(Closed::Ended("the host disconnected the queue"));
                }
            }
            _ => self.respond(cid, Status::INVALID_OPCODE.with_dnr(), 0, out),
        }
        Ok(())
    }

    fn property_get(&self, sqe: &Sqe) -> (Status, u64) {
        let Some(admin) = &self.admin else {
            return (Status::INVALID_FIELD.with_dnr(), 0);
        };
        let value = match (sqe.property_offset(), sqe.property_size()) {
            (property::CAP, Some(8)) => capabilities().value(),
            (property::VS, Some(4)) => u64::from(VERSION_2_0),
            (property::CC, Some(4)) => u64::from(admin.cc.0),
            (property::CSTS, Some(4)) => u64::from(admin.csts.0),
            (property::CRTO, Some(4)) => 1 << 16 | 1,
            _ => return (Status::INVALID_FIELD.with_dnr(), 0),
        };
        (Status::SUCCESS, value)
    }

    fn property_set(&mut self, sqe: &Sqe, env: &mut E) -> Status {
        let (Some(admin), Some(queue)) = (&mut self.admin, &self.queue) else {
            return Status::INVALID_FIELD.with_dnr();
        };
        if (sqe.property_offset(), sqe.property_size()) != (property::CC, Some(4)) {
            return Status::INVALID_FIELD.with_dnr();
        }
        let (old, new) = (admin.cc, Cc(sqe.property_value() as u32));
        admin.cc = new;
        let cntlid = queue.cntlid;
        if new.enabled() && !old.enabled() {
            let io = admin.discovery || (new.iosqes(), new.iocqes()) == (6, 4);
            // Command set: NVM (000b) or all that are supported (110b).
            if new.mps() != 0 || !matches!(new.css(), 0 | 6) || !io {
                admin.csts.0 |= Csts::FATAL;
                self.trouble("the host enabled the controller with settings it does not have", env);
                return Status::SUCCESS;
            }
            admin.csts = Csts(Csts::READY);
            shared(env, |s| {
                if let Some(c) = s.controller_mut(cntlid) {
                    c.enabled = true;
                }
            });
        }
        if new.shutdown() != 0 && old.shutdown() == 0 {
            // Nothing is kept back in the controller: what is completed is at the drives, and
            // a host flushes what it wants durable.
            self.disable(env);
            if let Some(admin) = &mut self.admin {
                admin.csts.0 |= Csts::SHUTDOWN_DONE;
            }
        } else if !new.enabled() && old.enabled() {
            self.disable(env);
            if let Some(admin) = &mut self.admin {
                admin.csts = Csts(0);
                admin.reset();
            }
        }
        Status::SUCCESS
    }

    /// Ends the controller's I/O queues.
    fn disable(&mut self, env: &mut E) {
        let Some(cntlid) = self.queue.as_ref().map(|q| q.cntlid) else {
            return;
        };
        shared(env, |s| {
            let Some(controller) = s.controller_mut(cntlid) else {
                return;
            };
            controller.enabled = false;
            let queues: alloc::vec::Vec<_> = controller.queues.values().copied().collect();
            for queue in queues {
                s.leave(queue, super::shared::Notice::Close("its controller was disabled"));
            }
        });
    }
}

/// Controller Capabilities: the NVM command set, 4 KiB pages, ready within 500 ms.
pub(super) const fn capabilities() -> Cap {
    Cap { mqes: QUEUE_ENTRIES_MAX - 1, timeout: 1, mpsmin: 0, css: 1 }
}
