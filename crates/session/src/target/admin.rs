//! The admin queue: the controller's properties, keep alive, events, and Rio's own commands.
//!
//! `properties.rs` has the properties, `identify.rs` the pages that describe the target,
//! `ownership.rs` the commands of ownership, and `recovery.rs` those of a recovery.

mod identify;
mod ownership;
mod properties;
mod recovery;

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status, admin as opcode};
use riopipe_nvme::fabrics::{Cc, Csts};
use riopipe_nvme::feature;

use self::ownership::Waiting;
use super::closed::Closed;
use super::commands::Stage;
use super::context::{Context, is_in_capsule};
use super::env::TargetEnv;
use super::identity::LocalAddress;
use super::limits::{ASYNC_EVENTS_MAX, IO_QUEUES_MAX, KEEP_ALIVE_STEP_MS};
use crate::outbox::Outbox;
use crate::wire;
use crate::wire::list::SETTLE_LEN;

/// The part of a connection that is an admin queue.
#[derive(Debug)]
pub(super) struct Admin {
    /// Whether this is a discovery controller.
    discovery: bool,
    /// The address through which the host connected.
    local: Option<LocalAddress>,
    cc: Cc,
    csts: Csts,
    /// Keep Alive Timeout, milliseconds; 0 for none.
    pub(super) kato_ms: u32,
    /// The command ids of the Asynchronous Event Requests that wait for an event.
    events: Vec<u16>,
    /// The events that the host has enabled (Asynchronous Event Configuration).
    event_config: u32,
    /// Features whose value is stored for Get Features and has no other effect: arbitration,
    /// temperature threshold, error recovery, write atomicity.
    stored_features: [(u8, u32); 4],
    /// Claims and releases that wait for other connections.
    waiting: Vec<Waiting>,
}

impl Admin {
    pub(super) fn new(discovery: bool, kato_ms: u32, local: Option<LocalAddress>) -> Self {
        Self {
            discovery,
            local,
            cc: Cc::default(),
            csts: Csts::default(),
            kato_ms,
            events: Vec::new(),
            event_config: 0,
            stored_features: STORED_FEATURES,
            waiting: Vec::new(),
        }
    }

    /// A controller reset (CC.EN cleared): drops the held event requests and the features.
    fn reset(&mut self) {
        self.events.clear();
        self.event_config = 0;
        self.stored_features = STORED_FEATURES;
    }
}

/// The stored features and their values after a controller reset.
const STORED_FEATURES: [(u8, u32); 4] = [
    (feature::ARBITRATION, 0),
    // Over-temperature: no threshold.
    (feature::TEMPERATURE_THRESHOLD, 0xffff),
    (feature::ERROR_RECOVERY, 0),
    (feature::WRITE_ATOMICITY, 0),
];

impl Admin {
    /// Carries out an admin command other than a Fabrics command. `data` is its in-capsule data.
    pub(super) fn execute<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let cid = sqe.cid();
        if !self.csts.ready() {
            context.send_completion(cid, Status::SEQUENCE_ERROR.with_dnr(), 0, outbox);
            return Ok(());
        }
        let discovery = self.discovery;
        let outcome: Result<u64, Status> = match sqe.opcode() {
            opcode::IDENTIFY => return self.identify(context, sqe, env, outbox),
            opcode::GET_LOG_PAGE => return self.log_page(context, sqe, env, outbox),
            opcode::KEEP_ALIVE => Ok(0),
            opcode::ASYNC_EVENT => {
                if self.events.contains(&cid) {
                    Err(Status::COMMAND_ID_CONFLICT.with_dnr())
                } else if self.events.len() < ASYNC_EVENTS_MAX {
                    // Held until there is an event.
                    self.events.push(cid);
                    return Ok(());
                } else {
                    Err(Status::ASYNC_EVENT_LIMIT.with_dnr())
                }
            }
            opcode::ABORT => {
                // Only event requests are held. Every other command ends by itself, and none is
                // aborted.
                let (sqid, aborted) = sqe.abort_target();
                let held = self.events.iter().position(|e| *e == aborted && sqid == 0);
                match held {
                    Some(at) => {
                        self.events.swap_remove(at);
                        context.send_completion(aborted, Status::ABORT_REQUESTED, 0, outbox);
                        Ok(0)
                    }
                    None => Ok(1),
                }
            }
            opcode::SET_FEATURES => self.set_features(context, sqe, env),
            opcode::GET_FEATURES if sqe.fid() == feature::HOST_IDENTIFIER && !discovery => {
                return Self::host_identifier(context, sqe, env, outbox);
            }
            opcode::GET_FEATURES => self.get_features(context, sqe, env),
            wire::ADMIN_CLAIM if !discovery => {
                return self.execute_with_data(
                    context,
                    sqe,
                    wire::CLAIM_LEN as u32,
                    data,
                    env,
                    outbox,
                );
            }
            wire::ADMIN_SETTLE if !discovery => {
                return self.execute_with_data(context, sqe, SETTLE_LEN as u32, data, env, outbox);
            }
            wire::ADMIN_LIST if !discovery => {
                Self::list(context, sqe, env, outbox);
                return Ok(());
            }
            wire::ADMIN_STATUS if !discovery => {
                let status = Self::volume_status(context, sqe, env);
                let wanted = sqe.dword(10).min(wire::STATUS_LEN as u32);
                let wanted = &status[..wanted as usize];
                context.send_page(sqe, wanted, outbox);
                return Ok(());
            }
            wire::ADMIN_RELEASE if !discovery => return self.release(context, sqe, env, outbox),
            _ => Err(Status::INVALID_OPCODE.with_dnr()),
        };
        match outcome {
            Ok(result) => context.send_completion(cid, Status::SUCCESS, result, outbox),
            Err(status) => context.send_completion(cid, status, 0, outbox),
        }
        Ok(())
    }

    /// Carries out a command that has `data_len` bytes of data: at once if they are in its capsule,
    /// else after they have come in by R2T.
    fn execute_with_data<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        data_len: u32,
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        match is_in_capsule(sqe, data_len, data) {
            Err(status) => context.send_completion(sqe.cid(), status, 0, outbox),
            Ok(true) => {
                let index = context.insert_command(sqe, Stage::Fence, 0)?;
                self.execute_data_command(context, index, data, env, outbox);
            }
            Ok(false) => context.insert_and_request_data(sqe, 0, data_len, env, outbox)?,
        }
        Ok(())
    }

    /// Carries out a command whose data has come in completely, by R2T.
    pub(super) fn on_data_ready<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let command = &mut context.commands[index];
        command.stage = Stage::Fence;
        match command.buf.take() {
            Some(buf) => self.execute_data_command(context, index, buf.as_ref(), env, outbox),
            None => context.complete_command(index, Status::INTERNAL, 0, outbox),
        }
    }

    /// Carries out a claim or a settlement, whose data is complete. No other command has data.
    fn execute_data_command<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        if context.commands[index].sqe.opcode() == wire::ADMIN_SETTLE {
            Self::settle_streams(context, index, data, env, outbox);
        } else {
            self.claim(context, index, data, env, outbox);
        }
    }

    /// Set Features. Returns dword 0 of the completion.
    fn set_features<E: TargetEnv>(
        &mut self,
        context: &Context<E>,
        sqe: &Sqe,
        env: &mut E,
    ) -> Result<u64, Status> {
        let value = sqe.dword(11);
        if sqe.feature_save() {
            return Err(Status::FEATURE_NOT_SAVEABLE.with_dnr());
        }
        let volatile = context.namespaces.any_volatile();
        match sqe.fid() {
            feature::KEEP_ALIVE_TIMER => {
                self.kato_ms = rounded_kato(value);
                Ok(0)
            }
            feature::ASYNC_EVENT_CONFIG => {
                self.event_config = value;
                Ok(0)
            }
            _ if self.discovery => Err(Status::INVALID_FIELD.with_dnr()),
            feature::NUMBER_OF_QUEUES => {
                let (submission, completion) = feature::queues_of(value);
                if submission > 0xffff || completion > 0xffff {
                    return Err(Status::INVALID_FIELD.with_dnr());
                }
                let most = u32::from(queues_max(env));
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
            fid => match self.stored_features.iter_mut().find(|(id, _)| *id == fid) {
                Some(kept) => {
                    kept.1 = value;
                    Ok(0)
                }
                None => Err(Status::INVALID_FIELD.with_dnr()),
            },
        }
    }

    /// Get Features. Returns dword 0 of the completion: the value.
    fn get_features<E: TargetEnv>(
        &self,
        context: &Context<E>,
        sqe: &Sqe,
        env: &mut E,
    ) -> Result<u64, Status> {
        if sqe.feature_select() != 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let volatile = context.namespaces.any_volatile();
        let most = queues_max(env);
        match sqe.fid() {
            feature::KEEP_ALIVE_TIMER => Ok(self.kato_ms.into()),
            feature::ASYNC_EVENT_CONFIG => Ok(self.event_config.into()),
            _ if self.discovery => Err(Status::INVALID_FIELD.with_dnr()),
            feature::NUMBER_OF_QUEUES => Ok(feature::queues(most, most).into()),
            feature::VOLATILE_WRITE_CACHE if volatile => Ok(1),
            feature::POWER_MANAGEMENT => Ok(0),
            fid => self
                .stored_features
                .iter()
                .find(|(id, _)| *id == fid)
                .map(|(_, value)| (*value).into())
                .ok_or(Status::INVALID_FIELD.with_dnr()),
        }
    }

    /// Get Features for the host identifier, which the answer has as data.
    fn host_identifier<E: TargetEnv>(
        context: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let cntlid = context.queue.as_ref().map_or(0, |q| q.cntlid);
        let hostid =
            env.with_shared(|shared| shared.controller(cntlid).map_or([0; 16], |c| c.hostid));
        // EXHID (dword 11 bit 0): over Fabrics the identifier has 128 bits.
        if sqe.dword(11) & 1 == 0 {
            context.send_completion(sqe.cid(), Status::INVALID_FIELD.with_dnr(), 0, outbox);
        } else {
            context.send_page(sqe, &hostid, outbox);
        }
        Ok(())
    }
}

/// The most I/O queues that a controller grants.
fn queues_max<E: TargetEnv>(env: &mut E) -> u16 {
    env.with_shared(|shared| shared.identity().io_queues).clamp(1, IO_QUEUES_MAX)
}

/// The timeout that a host requests, in whole steps (KAS).
const fn rounded_kato(ms: u32) -> u32 {
    match ms.checked_next_multiple_of(KEEP_ALIVE_STEP_MS) {
        Some(rounded) => rounded,
        None => u32::MAX,
    }
}
