//! The part of a connection that is an admin queue: NVMe's admin commands, and Rio's own.
//!
//! This file has the dispatch, the features, Keep Alive, and the event requests. `aborting.rs` has
//! Abort, `events.rs` the asynchronous events, `properties.rs` the controller's properties, `identify.rs` the pages that describe the target,
//! `ownership.rs` the commands claim, status and release, and `recovery.rs` the commands list and
//! settle.

mod aborting;
mod events;
mod identify;
mod ownership;
mod properties;
mod recovery;

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status, admin as opcode};
use riopipe_nvme::fabrics::{Cc, Csts};
use riopipe_nvme::feature::{self, QueueCounts};
use riopipe_nvme::identify::NSID_ALL;
use riopipe_nvme::reservation::MASK_BITS;

use self::aborting::WaitingAbort;
use self::ownership::WaitingCommand;
use super::closed::Closed;
use super::commands::Stage;
use super::context::{Context, is_in_capsule};
use super::env::TargetEnv;
use super::events::Events;
use super::identity::LocalAddress;
use super::limits::{ASYNC_EVENTS_MAX, IO_QUEUES_MAX, KEEP_ALIVE_STEP_MS};
use crate::outbox::Outbox;
use crate::wire;
use crate::wire::list::SETTLE_LEN;

/// The part of a connection that is an admin queue.
#[derive(Debug)]
pub(super) struct Admin {
    /// Whether the controller is a discovery controller. It then has no volumes and no namespaces.
    is_discovery: bool,
    /// The address of this target through which the host connected.
    local_address: Option<LocalAddress>,
    /// The property Controller Configuration.
    cc: Cc,
    /// The property Controller Status.
    csts: Csts,
    /// Keep Alive Timeout, milliseconds; 0 for none.
    pub(super) kato_ms: u32,
    /// The command ids of the Asynchronous Event Requests that wait for an event.
    event_request_cids: Vec<u16>,
    /// The events that the host has enabled (Asynchronous Event Configuration).
    event_config: u32,
    /// The features whose value the target stores for Get Features. The value has no other effect.
    stored_features: [StoredFeature; 4],
    /// Claims and releases that wait until other connections have acknowledged a fence.
    waiting_for_fence: Vec<WaitingCommand>,
    /// Abort commands that wait for the queue of the command to abort.
    waiting_aborts: Vec<WaitingAbort>,
}

/// A feature whose value is only stored.
#[derive(Clone, Copy, Debug)]
struct StoredFeature {
    /// The feature identifier.
    fid: u8,
    value: u32,
}

impl Admin {
    pub(super) fn new(
        is_discovery: bool,
        kato_ms: u32,
        local_address: Option<LocalAddress>,
    ) -> Self {
        Self {
            is_discovery,
            local_address,
            cc: Cc::default(),
            csts: Csts::default(),
            kato_ms,
            event_request_cids: Vec::new(),
            event_config: 0,
            stored_features: STORED_FEATURES,
            waiting_for_fence: Vec::new(),
            waiting_aborts: Vec::new(),
        }
    }

    /// Carries out a controller reset (the host has cleared CC.EN): drops the event requests, and
    /// sets the features to their first values.
    fn reset(&mut self) {
        self.event_request_cids.clear();
        self.event_config = 0;
        self.stored_features = STORED_FEATURES;
    }
}

/// The stored features and their values after a controller reset.
const STORED_FEATURES: [StoredFeature; 4] = [
    StoredFeature { fid: feature::ARBITRATION, value: 0 },
    StoredFeature { fid: feature::TEMPERATURE_THRESHOLD, value: NO_TEMPERATURE_THRESHOLD },
    StoredFeature { fid: feature::ERROR_RECOVERY, value: 0 },
    StoredFeature { fid: feature::WRITE_ATOMICITY, value: 0 },
];

/// The temperature threshold that is never exceeded, in kelvins.
const NO_TEMPERATURE_THRESHOLD: u32 = 0xffff;

impl Admin {
    /// Carries out an admin command that is no Fabrics command. `data` is its in-capsule data.
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
        let is_discovery = self.is_discovery;
        // The result of the completion, or the status with which the command fails.
        let outcome: Result<u64, Status> = match sqe.opcode() {
            opcode::IDENTIFY => return self.identify(context, sqe, env, outbox),
            opcode::GET_LOG_PAGE => {
                self.log_page(context, sqe, env, outbox)?;
                // The host may have read a part of a list, and is to read the rest.
                self.report_events(context, env, outbox);
                return Ok(());
            }
            opcode::KEEP_ALIVE => Ok(0),
            opcode::ASYNC_EVENT => match self.keep_event_request(cid) {
                Ok(()) => {
                    self.report_events(context, env, outbox);
                    return Ok(());
                }
                Err(status) => Err(status),
            },
            opcode::ABORT => return self.abort(context, sqe, env, outbox),
            opcode::SET_FEATURES => self.set_features(context, sqe, env),
            opcode::GET_FEATURES if sqe.fid() == feature::HOST_IDENTIFIER && !is_discovery => {
                return Self::host_identifier(context, sqe, env, outbox);
            }
            opcode::GET_FEATURES => self.get_features(context, sqe, env),
            wire::ADMIN_CLAIM | wire::ADMIN_SETTLE | wire::ADMIN_RELEASE
                if !is_discovery && is_nameless(context) =>
            {
                context.report_problem(
                    "a command about the ownership of a volume was refused: the host has sent no \
                     NQN when it connected, and an owner must have one",
                    env,
                );
                Err(Status::INVALID_FIELD.with_dnr())
            }
            wire::ADMIN_CLAIM if !is_discovery => {
                return self.execute_with_data(
                    context,
                    sqe,
                    wire::CLAIM_LEN as u32,
                    data,
                    env,
                    outbox,
                );
            }
            wire::ADMIN_SETTLE if !is_discovery => {
                return self.execute_with_data(context, sqe, SETTLE_LEN as u32, data, env, outbox);
            }
            wire::ADMIN_LIST if !is_discovery => {
                Self::list(context, sqe, env, outbox);
                return Ok(());
            }
            wire::ADMIN_STATUS if !is_discovery => {
                let status = Self::volume_status(context, sqe, env);
                let requested_len = sqe.dword(10).min(wire::STATUS_LEN as u32);
                context.send_page(sqe, &status[..requested_len as usize], outbox);
                return Ok(());
            }
            wire::ADMIN_DIRECTORY if !is_discovery => {
                let now = env.now();
                let directory = env.with_shared(|shared| shared.volumes.directory(now)).encode();
                let requested_len = sqe.dword(10).min(wire::DIRECTORY_LEN as u32);
                context.send_page(sqe, &directory[..requested_len as usize], outbox);
                return Ok(());
            }
            wire::ADMIN_RELEASE if !is_discovery => return self.release(context, sqe, env, outbox),
            _ => Err(Status::INVALID_OPCODE.with_dnr()),
        };
        match outcome {
            Ok(result) => context.send_completion(cid, Status::SUCCESS, result, outbox),
            Err(status) => context.send_completion(cid, status, 0, outbox),
        }
        Ok(())
    }

    /// Keeps an Asynchronous Event Request until there is an event.
    fn keep_event_request(&mut self, cid: u16) -> Result<(), Status> {
        if self.event_request_cids.contains(&cid) {
            return Err(Status::COMMAND_ID_CONFLICT.with_dnr());
        }
        if self.event_request_cids.len() >= ASYNC_EVENTS_MAX {
            return Err(Status::ASYNC_EVENT_LIMIT.with_dnr());
        }
        self.event_request_cids.push(cid);
        Ok(())
    }

    /// Reports the events of the controller, as far as there are event requests.
    pub(super) fn report_events<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let cntlid = context.queue.as_ref().map_or(0, |queue| queue.cntlid);
        while !self.event_request_cids.is_empty() && !context.is_closing {
            let next = env.with_shared(|shared| shared.controller_mut(cntlid)?.events.next());
            let Some(result) = next else { return };
            let cid = self.event_request_cids.remove(0);
            context.send_completion(cid, Status::SUCCESS, result, outbox);
        }
    }

    /// Carries out a command that has `data_len` bytes of data: at once if the data is in the
    /// capsule, otherwise after the data has arrived by R2T.
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

    /// Carries out a command whose data has arrived completely by R2T.
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

    /// Carries out a claim or a settle command, whose data is complete. No other admin command has
    /// data from the host.
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

    /// Carries out Set Features. Returns dword 0 of the completion.
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
        let has_volatile_cache = context.namespaces.any_volatile();
        match sqe.fid() {
            feature::KEEP_ALIVE_TIMER => {
                self.kato_ms = rounded_kato(value);
                Ok(0)
            }
            feature::ASYNC_EVENT_CONFIG => {
                self.event_config = value;
                change_events(context, env, |events| events.configure(value));
                Ok(0)
            }
            _ if self.is_discovery => Err(Status::INVALID_FIELD.with_dnr()),
            feature::NUMBER_OF_QUEUES => {
                let QueueCounts { submission, completion } = feature::queues_of(value);
                if submission > 0xffff || completion > 0xffff {
                    return Err(Status::INVALID_FIELD.with_dnr());
                }
                // The number is agreed on before the first I/O queue (Base §5.27.1.5).
                if has_io_queue(context, env) {
                    return Err(Status::SEQUENCE_ERROR.with_dnr());
                }
                let max = u32::from(io_queues_max(env));
                let granted_submission = submission.min(max) as u16;
                let granted_completion = completion.min(max) as u16;
                Ok(feature::queues(granted_submission, granted_completion).into())
            }
            // The cache is always enabled. A host may enable it again, but not disable it.
            feature::VOLATILE_WRITE_CACHE if has_volatile_cache && value & 1 == 1 => Ok(0),
            feature::VOLATILE_WRITE_CACHE if has_volatile_cache => {
                Err(Status::FEATURE_NOT_CHANGEABLE.with_dnr())
            }
            // There is only power state 0, in bits 4:0.
            feature::POWER_MANAGEMENT if value & 0x1f == 0 => Ok(0),
            // Reservations end with the target, so they can't persist through power loss.
            feature::RESERVATION_MASK if value & !MASK_BITS == 0 => {
                reservation_namespaces(context, sqe)?;
                let all = sqe.nsid() == NSID_ALL;
                let nsids: Vec<u32> =
                    context.namespaces.ids().filter(|nsid| all || *nsid == sqe.nsid()).collect();
                change_events(context, env, |events| {
                    nsids.iter().for_each(|nsid| events.mask_reservations(*nsid, value));
                });
                Ok(0)
            }
            feature::RESERVATION_PERSISTENCE if value & 1 == 0 => {
                reservation_namespaces(context, sqe).map(|()| 0)
            }
            feature::HOST_IDENTIFIER => Err(Status::SEQUENCE_ERROR.with_dnr()),
            fid => match self.stored_features.iter_mut().find(|stored| stored.fid == fid) {
                Some(stored) => {
                    stored.value = value;
                    Ok(0)
                }
                None => Err(Status::INVALID_FIELD.with_dnr()),
            },
        }
    }

    /// Carries out Get Features. Returns dword 0 of the completion: the value of the feature.
    fn get_features<E: TargetEnv>(
        &self,
        context: &Context<E>,
        sqe: &Sqe,
        env: &mut E,
    ) -> Result<u64, Status> {
        if sqe.feature_select() != 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let has_volatile_cache = context.namespaces.any_volatile();
        let max = io_queues_max(env);
        match sqe.fid() {
            feature::KEEP_ALIVE_TIMER => Ok(self.kato_ms.into()),
            feature::ASYNC_EVENT_CONFIG => Ok(self.event_config.into()),
            _ if self.is_discovery => Err(Status::INVALID_FIELD.with_dnr()),
            feature::NUMBER_OF_QUEUES => Ok(feature::queues(max, max).into()),
            feature::VOLATILE_WRITE_CACHE if has_volatile_cache => Ok(1),
            feature::POWER_MANAGEMENT => Ok(0),
            feature::RESERVATION_PERSISTENCE => context.namespace(sqe).map(|_| 0),
            feature::RESERVATION_MASK => {
                context.namespace(sqe)?;
                let cntlid = context.queue.as_ref().map_or(0, |queue| queue.cntlid);
                let mask = env.with_shared(|shared| {
                    shared.controller(cntlid).map(|other| other.events.reservation_mask(sqe.nsid()))
                });
                Ok(mask.unwrap_or(0).into())
            }
            fid => self
                .stored_features
                .iter()
                .find(|stored| stored.fid == fid)
                .map(|stored| stored.value.into())
                .ok_or(Status::INVALID_FIELD.with_dnr()),
        }
    }

    /// Carries out Get Features for the host identifier. The identifier is data, not a result.
    fn host_identifier<E: TargetEnv>(
        context: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let cntlid = context.queue.as_ref().map_or(0, |queue| queue.cntlid);
        let hostid = env.with_shared(|shared| {
            shared.controller(cntlid).map_or([0; 16], |controller| controller.hostid)
        });
        // EXHID (dword 11 bit 0): over Fabrics the identifier has 128 bits.
        if sqe.dword(11) & 1 == 0 {
            context.send_completion(sqe.cid(), Status::INVALID_FIELD.with_dnr(), 0, outbox);
        } else {
            context.send_page(sqe, &hostid, outbox);
        }
        Ok(())
    }
}

/// Checks the namespace id of a feature of reservations: FFFFFFFFh stands for all namespaces.
fn reservation_namespaces<E: TargetEnv>(context: &Context<E>, sqe: &Sqe) -> Result<(), Status> {
    match sqe.nsid() {
        NSID_ALL => Ok(()),
        _ => context.namespace(sqe).map(|_| ()),
    }
}

/// Changes the events of the controller.
pub(super) fn change_events<E: TargetEnv>(
    context: &Context<E>,
    env: &mut E,
    change: impl FnOnce(&mut Events),
) {
    let cntlid = context.queue.as_ref().map_or(0, |queue| queue.cntlid);
    env.with_shared(|shared| {
        if let Some(controller) = shared.controller_mut(cntlid) {
            change(&mut controller.events);
        }
    });
}

/// The most I/O queues that a controller grants.
fn io_queues_max<E: TargetEnv>(env: &mut E) -> u16 {
    env.with_shared(|shared| shared.identity().io_queues).clamp(1, IO_QUEUES_MAX)
}

/// Whether the host has sent an empty NQN when it connected. Such a host may use what every host may
/// use. It may not become the owner of a volume, nor end an ownership: other hosts and the
/// operator find the owner by its name (trap T8).
fn is_nameless<E: TargetEnv>(context: &Context<E>) -> bool {
    context.queue.as_ref().is_none_or(|queue| queue.hostnqn.is_empty())
}

/// Whether the controller has an I/O queue.
fn has_io_queue<E: TargetEnv>(context: &Context<E>, env: &mut E) -> bool {
    let Some(queue) = &context.queue else { return false };
    env.with_shared(|shared| {
        shared.controller(queue.cntlid).is_some_and(|controller| !controller.queues.is_empty())
    })
}

/// A keep-alive timeout that a host requests, rounded up to whole steps of the target (KAS).
const fn rounded_kato(ms: u32) -> u32 {
    match ms.checked_next_multiple_of(KEEP_ALIVE_STEP_MS) {
        Some(rounded) => rounded,
        None => u32::MAX,
    }
}
