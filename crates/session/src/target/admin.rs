//! The admin queue: what a controller says of itself, keep alive, events, and Rio's claims.

use alloc::vec::Vec;

use riopipe_nvme::command::{Sgl, Sqe, Status, admin as opcode};
use riopipe_nvme::fabrics::{Cc, Csts};
use riopipe_nvme::feature;
use riopipe_nvme::pdu::DataHdr;

use super::conn::{Closed, TargetConn};
use super::env::TargetEnv;
use super::limits::{ASYNC_EVENTS_MAX, IO_QUEUES_MAX, KEEP_ALIVE_STEP_MS, TRANSFER_BYTES_MAX};
use super::slots::Stage;
use super::stream::Waiting;
use crate::outbox::Outbox;
use crate::wire;
use crate::wire::list::SETTLE_LEN;

/// What an admin queue remembers.
#[derive(Debug)]
pub(super) struct Admin {
    pub(super) discovery: bool,
    pub(super) cc: Cc,
    pub(super) csts: Csts,
    /// Keep Alive Timeout, milliseconds; 0 for none.
    pub(super) kato_ms: u32,
    /// Asynchronous Event Requests held.
    events: Vec<u16>,
    event_config: u32,
    /// Features that are kept and change nothing: arbitration, temperature threshold, error
    /// recovery, write atomicity.
    idle_features: [(u8, u32); 4],
    /// Claims and releases that wait for other connections.
    pub(super) waiting: Vec<Waiting>,
}

impl Admin {
    pub(super) fn new(discovery: bool) -> Self {
        Self {
            discovery,
            cc: Cc::default(),
            csts: Csts::default(),
            kato_ms: 0,
            events: Vec::new(),
            event_config: 0,
            idle_features: IDLE_FEATURES,
            waiting: Vec::new(),
        }
    }

    /// A controller reset (CC.EN cleared): held event requests and features are gone.
    pub(super) fn reset(&mut self) {
        self.events.clear();
        self.event_config = 0;
        self.idle_features = IDLE_FEATURES;
    }
}

const IDLE_FEATURES: [(u8, u32); 4] = [
    (feature::ARBITRATION, 0),
    // Over temperature: no threshold.
    (feature::TEMPERATURE_THRESHOLD, 0xffff),
    (feature::ERROR_RECOVERY, 0),
    (feature::WRITE_ATOMICITY, 0),
];

impl<E: TargetEnv> TargetConn<E> {
    /// A command on the admin queue, with its in-capsule data.
    pub(super) fn admin_command(
        &mut self,
        sqe: &Sqe,
        data: &[u8],
        digest_ok: bool,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let cid = sqe.cid();
        if !digest_ok {
            self.respond(cid, Status::TRANSIENT_TRANSPORT, 0, out);
            return Ok(());
        }
        if sqe.opcode() == opcode::FABRICS {
            return self.fabrics(sqe, env, out);
        }
        let Some(admin) = &mut self.admin else {
            self.respond(cid, Status::INTERNAL, 0, out);
            return Ok(());
        };
        if !admin.csts.ready() {
            self.respond(cid, Status::SEQUENCE_ERROR.with_dnr(), 0, out);
            return Ok(());
        }
        let discovery = admin.discovery;
        let answer: Result<u64, Status> = match sqe.opcode() {
            opcode::IDENTIFY => return self.identify(sqe, env, out),
            opcode::GET_LOG_PAGE => return self.log_page(sqe, env, out),
            opcode::KEEP_ALIVE => Ok(0),
            opcode::ASYNC_EVENT => {
                if admin.events.contains(&cid) {
                    Err(Status::COMMAND_ID_CONFLICT.with_dnr())
                } else if admin.events.len() < ASYNC_EVENTS_MAX {
                    // Held until there is an event.
                    admin.events.push(cid);
                    return Ok(());
                } else {
                    Err(Status::ASYNC_EVENT_LIMIT.with_dnr())
                }
            }
            opcode::ABORT => {
                // Only event requests ever wait for long; all else is answered by the drives.
                let (sqid, aborted) = sqe.abort_target();
                let held = admin.events.iter().position(|e| *e == aborted && sqid == 0);
                match held {
                    Some(at) => {
                        admin.events.swap_remove(at);
                        self.respond(aborted, Status::ABORT_REQUESTED, 0, out);
                        Ok(0)
                    }
                    None => Ok(1),
                }
            }
            opcode::SET_FEATURES => self.set_features(sqe, env),
            opcode::GET_FEATURES if sqe.fid() == feature::HOST_IDENTIFIER && !discovery => {
                return self.host_identifier(sqe, env, out);
            }
            opcode::GET_FEATURES => self.get_features(sqe, env),
            wire::ADMIN_CLAIM if !discovery => {
                return self.with_data(sqe, wire::CLAIM_LEN as u32, data, env, out);
            }
            wire::ADMIN_SETTLE if !discovery => {
                return self.with_data(sqe, SETTLE_LEN as u32, data, env, out);
            }
            wire::ADMIN_LIST if !discovery => {
                self.list(sqe, env, out);
                return Ok(());
            }
            wire::ADMIN_STATUS if !discovery => {
                let status = self.volume_status(sqe, env);
                let wanted = sqe.dword(10).min(wire::STATUS_LEN as u32);
                let wanted = &status[..wanted as usize];
                self.send_page(sqe, wanted, out);
                return Ok(());
            }
            wire::ADMIN_RELEASE if !discovery => return self.release(sqe, env, out),
            _ => Err(Status::INVALID_OPCODE.with_dnr()),
        };
        match answer {
            Ok(result) => self.respond(cid, Status::SUCCESS, result, out),
            Err(status) => self.respond(cid, status, 0, out),
        }
        Ok(())
    }

    /// A command with `want` bytes of data, in its capsule or to be asked for.
    fn with_data(
        &mut self,
        sqe: &Sqe,
        want: u32,
        data: &[u8],
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        match Self::in_capsule(sqe, want, data) {
            Err(status) => self.respond(sqe.cid(), status, 0, out),
            Ok(true) => {
                let index = self.next_slot()?;
                self.slots.take(sqe, Stage::Fence, 0);
                self.data_there(index, data, env, out);
            }
            Ok(false) => {
                self.ask_for_data(sqe, 0, want, env, out)?;
            }
        }
        Ok(())
    }

    /// The data of an admin command has come in by R2T.
    pub(super) fn admin_gathered(&mut self, index: u16, env: &mut E, out: &mut Outbox<E::Buf>) {
        let slot = &mut self.slots[index];
        slot.stage = Stage::Fence;
        match slot.buf.take() {
            Some(buf) => self.data_there(index, buf.as_ref(), env, out),
            None => self.answer(index, Status::INTERNAL, 0, out),
        }
    }

    /// Only claims and settlements bring data.
    fn data_there(&mut self, index: u16, data: &[u8], env: &mut E, out: &mut Outbox<E::Buf>) {
        if self.slots[index].sqe.opcode() == wire::ADMIN_SETTLE {
            self.settle_streams(index, data, env, out);
        } else {
            self.claim(index, data, env, out);
        }
    }

    /// Sends a page of data and completes the command. The host's buffer must have room for it.
    pub(super) fn send_page(&mut self, sqe: &Sqe, page: &[u8], out: &mut Outbox<E::Buf>) {
        let cid = sqe.cid();
        let status = match sqe.sgl() {
            Ok(Sgl::Transport { len }) if len as usize >= page.len() => Status::SUCCESS,
            Ok(Sgl::Transport { .. }) => Status::SGL_LENGTH_INVALID.with_dnr(),
            Ok(Sgl::InCapsule { .. }) => Status::SGL_TYPE_INVALID.with_dnr(),
            Err(error) => error.status(),
        };
        if status.is_ok() && !page.is_empty() {
            let header = DataHdr {
                cccid: cid,
                ttag: 0,
                datao: 0,
                datal: page.len() as u32,
                last: true,
                success: false,
            };
            let tx = &self.tx;
            out.push_bytes(|v| {
                tx.c2h_data(&header, v);
                v.extend_from_slice(page);
                tx.data_digest([page], v);
            });
        }
        self.respond(cid, status, 0, out);
    }

    fn set_features(&mut self, sqe: &Sqe, env: &mut E) -> Result<u64, Status> {
        let value = sqe.dword(11);
        if sqe.feature_save() {
            return Err(Status::FEATURE_NOT_SAVEABLE.with_dnr());
        }
        let volatile = self.namespaces.any_volatile();
        let Some(admin) = &mut self.admin else {
            return Err(Status::INTERNAL);
        };
        match sqe.fid() {
            feature::KEEP_ALIVE_TIMER => {
                admin.kato_ms = rounded_kato(value);
                Ok(0)
            }
            feature::ASYNC_EVENT_CONFIG => {
                admin.event_config = value;
                Ok(0)
            }
            _ if admin.discovery => Err(Status::INVALID_FIELD.with_dnr()),
            feature::NUMBER_OF_QUEUES => {
                let (submission, completion) = feature::queues_of(value);
                if submission > 0xffff || completion > 0xffff {
                    return Err(Status::INVALID_FIELD.with_dnr());
                }
                let most = u32::from(self.queues_max(env));
                let granted = (submission.min(most) as u16, completion.min(most) as u16);
                Ok(feature::queues(granted.0, granted.1).into())
            }
            feature::VOLATILE_WRITE_CACHE if volatile && value & 1 == 1 => Ok(0),
            feature::VOLATILE_WRITE_CACHE if volatile => {
                Err(Status::FEATURE_NOT_CHANGEABLE.with_dnr())
            }
            // There is one power state.
            feature::POWER_MANAGEMENT if value & 0x1f == 0 => Ok(0),
            feature::HOST_IDENTIFIER => Err(Status::SEQUENCE_ERROR.with_dnr()),
            fid => match admin.idle_features.iter_mut().find(|(id, _)| *id == fid) {
                Some(kept) => {
                    kept.1 = value;
                    Ok(0)
                }
                None => Err(Status::INVALID_FIELD.with_dnr()),
            },
        }
    }

    fn get_features(&mut self, sqe: &Sqe, env: &mut E) -> Result<u64, Status> {
        if sqe.feature_select() != 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let volatile = self.namespaces.any_volatile();
        let most = self.queues_max(env);
        let Some(admin) = &self.admin else {
            return Err(Status::INTERNAL);
        };
        match sqe.fid() {
            feature::KEEP_ALIVE_TIMER => Ok(admin.kato_ms.into()),
            feature::ASYNC_EVENT_CONFIG => Ok(admin.event_config.into()),
            _ if admin.discovery => Err(Status::INVALID_FIELD.with_dnr()),
            feature::NUMBER_OF_QUEUES => Ok(feature::queues(most, most).into()),
            feature::VOLATILE_WRITE_CACHE if volatile => Ok(1),
            feature::POWER_MANAGEMENT => Ok(0),
            fid => admin
                .idle_features
                .iter()
                .find(|(id, _)| *id == fid)
                .map(|(_, value)| (*value).into())
                .ok_or(Status::INVALID_FIELD.with_dnr()),
        }
    }

    fn host_identifier(
        &mut self,
        sqe: &Sqe,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let cntlid = self.queue.as_ref().map_or(0, |q| q.cntlid);
        let hostid = env.with_shared(|s| s.controller(cntlid).map_or([0; 16], |c| c.hostid));
        // EXHID (dword 11 bit 0): over fabrics the identifier has 128 bits.
        if sqe.dword(11) & 1 == 0 {
            self.respond(sqe.cid(), Status::INVALID_FIELD.with_dnr(), 0, out);
        } else {
            self.send_page(sqe, &hostid, out);
        }
        Ok(())
    }

    fn queues_max(&self, env: &mut E) -> u16 {
        env.with_shared(|s| s.identity().io_queues).clamp(1, IO_QUEUES_MAX)
    }

    /// The bytes that a log page or the like may have at most.
    pub(super) const fn page_bytes_max() -> u64 {
        TRANSFER_BYTES_MAX as u64
    }
}

/// The timeout that a host asks for, in whole steps (KAS).
pub(super) const fn rounded_kato(ms: u32) -> u32 {
    match ms.checked_next_multiple_of(KEEP_ALIVE_STEP_MS) {
        Some(rounded) => rounded,
        None => u32::MAX,
    }
}
