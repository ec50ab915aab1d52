//! The commands of reservations: Register, Acquire, Release and Report (Base §7.2 to §7.5).
//!
//! A command that takes access from other hosts completes only when none of their operations that had
//! begun before can change a block any more (trap T8). So a host that has preempted another one may
//! rely on what it reads. Every later command about reservations of the namespace waits for that, too,
//! whatever its result is. The commands of the other host that wait for data, memory or blocks fail
//! with Reservation Conflict when they go on. That is also all that Preempt and Abort has to do.

use riopipe_nvme::command::{Sqe, Status, opcode};
use riopipe_nvme::reservation::{self, Keys, Kind};

use super::closed::Closed;
use super::commands::{HeldLock, Stage};
use super::context::{Context, InsertedCommand, is_in_capsule, update_shared};
use super::env::TargetEnv;
use super::limits::CONNECTION_BYTES;
use super::plain::PlainIo;
use super::reservations::Change;
use crate::outbox::Outbox;

/// Whether the command changes reservations.
pub(super) const fn changes_reservations(code: u8) -> bool {
    matches!(
        code,
        opcode::RESERVATION_REGISTER | opcode::RESERVATION_ACQUIRE | opcode::RESERVATION_RELEASE
    )
}

impl PlainIo {
    /// Carries out a command that changes reservations, once its keys are there.
    pub(super) fn reserve<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let data_len = match sqe.opcode() {
            opcode::RESERVATION_RELEASE => Keys::RELEASE_LEN,
            _ => Keys::LEN,
        };
        let checked = context.namespace(sqe).and_then(|(ns_index, _)| {
            change_of(sqe)?;
            context.check_path(ns_index)?;
            Ok((ns_index, is_in_capsule(sqe, data_len, data)?))
        });
        match checked {
            Err(status) => context.send_completion(sqe.cid(), status, 0, outbox),
            Ok((ns_index, false)) => {
                return context.insert_and_request_data(sqe, ns_index, data_len, env, outbox);
            }
            Ok((ns_index, true)) => {
                let index = context.insert_command(sqe, Stage::Locked, ns_index)?;
                change_reservations(context, index, data, env, outbox);
            }
        }
        Ok(())
    }

    /// Carries out a command whose keys have arrived by R2T.
    pub(super) fn on_reservation_keys<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        match context.commands[index].buf.take() {
            Some(keys) => change_reservations(context, index, keys.as_ref(), env, outbox),
            None => context.complete_command(index, Status::INTERNAL, 0, outbox),
        }
    }
}

/// Carries out a Reservation Report.
pub(super) fn report_reservations<E: TargetEnv>(
    context: &mut Context<E>,
    sqe: &Sqe,
    env: &mut E,
    outbox: &mut Outbox<E::Buf>,
) -> Result<(), Closed> {
    let checked = match context.namespace(sqe) {
        Err(status) => Err(status),
        // Hosts have identifiers of 128 bits, which only the extended structure can hold.
        Ok(_) if !sqe.report_is_extended() => Err(Status::HOST_ID_FORMAT.with_dnr()),
        Ok(_) if sqe.report_len() > CONNECTION_BYTES as u64 => {
            Err(Status::INVALID_FIELD.with_dnr())
        }
        Ok((ns_index, _)) => context.check_path(ns_index).map(|()| ns_index),
    };
    if let Some(InsertedCommand { index, .. }) =
        context.insert_or_refuse(sqe, Stage::Locked, checked, outbox)?
    {
        report_when_drained(context, index, env, outbox);
    }
    Ok(())
}

/// Sends a Reservation Report, as soon as no host that has lost access has an operation in flight.
fn report_when_drained<E: TargetEnv>(
    context: &mut Context<E>,
    index: u16,
    env: &mut E,
    outbox: &mut Outbox<E::Buf>,
) {
    let command = &context.commands[index];
    let (sqe, ns_index, conn) = (command.sqe, usize::from(command.ns_index), context.id);
    // Another host may have lost access while the command waited. So it may wait again.
    let report = env.with_shared(|shared| match shared.await_reservations(conn, ns_index) {
        Some(ticket) => Err(ticket),
        None => Ok(shared.reservation_report(ns_index)),
    });
    match report {
        Err(ticket) => {
            context.commands[index].lock =
                Some(HeldLock { ticket, is_used: false, is_exclusive: false });
        }
        Ok((generation, kind, registrants)) => {
            let len = sqe.report_len() as usize;
            let page = reservation::report(generation, kind, &registrants, len);
            context.remove_command(index);
            context.send_page(&sqe, &page, outbox);
        }
    }
}

/// Completes a command that has waited until no host which has lost access has an operation in
/// flight.
pub(super) fn on_reservations_drained<E: TargetEnv>(
    context: &mut Context<E>,
    index: u16,
    env: &mut E,
    outbox: &mut Outbox<E::Buf>,
) {
    let command = &context.commands[index];
    if command.sqe.opcode() == opcode::RESERVATION_REPORT {
        return report_when_drained(context, index, env, outbox);
    }
    let status = command.early_status.unwrap_or(Status::SUCCESS);
    context.complete_command(index, status, 0, outbox);
}

/// Changes the reservations. Completes the command when no host that has lost access has an operation
/// in flight, by this command or by an earlier one.
fn change_reservations<E: TargetEnv>(
    context: &mut Context<E>,
    index: u16,
    keys: &[u8],
    env: &mut E,
    outbox: &mut Outbox<E::Buf>,
) {
    let command = &context.commands[index];
    let (sqe, ns_index) = (command.sqe, usize::from(command.ns_index));
    let host = context.queue.as_ref().map_or([0; 16], |queue| queue.hostid);
    let (changed, ticket) = match (change_of(&sqe), Keys::decode(keys)) {
        (Err(status), _) => (Err(status), None),
        (Ok(_), None) => (Err(Status::INTERNAL), None),
        // Hosts without an identifier can't be distinguished (Base §5.27.1.25).
        (Ok(_), _) if host == [0; 16] => (Err(Status::SEQUENCE_ERROR.with_dnr()), None),
        (Ok(change), Some(keys)) => {
            let (conn, now) = (context.id, env.now());
            update_shared(env, |shared| {
                shared.change_reservations(conn, ns_index, (change, keys), now)
            })
        }
    };
    let Some(ticket) = ticket else {
        let status = changed.err().unwrap_or(Status::SUCCESS);
        return context.complete_command(index, status, 0, outbox);
    };
    let command = &mut context.commands[index];
    command.stage = Stage::Locked;
    command.lock = Some(HeldLock { ticket, is_used: false, is_exclusive: false });
    command.early_status = changed.err();
    // The change is made already, so the command can't be aborted.
    command.begun_range_count = 1;
}

/// The change that a command requests.
fn change_of(sqe: &Sqe) -> Result<Change, Status> {
    let invalid = Status::INVALID_FIELD.with_dnr();
    let any_key = sqe.ignores_existing_key();
    let kind = || Kind::from_code(sqe.reservation_type()).ok_or(invalid);
    match (sqe.opcode(), sqe.reservation_action()) {
        // CPTPL 11b asks for reservations that persist through power loss. 01b is reserved.
        (opcode::RESERVATION_REGISTER, _) if sqe.changes_persistence() & 1 != 0 => Err(invalid),
        (opcode::RESERVATION_REGISTER, 0) => Ok(Change::Register),
        (opcode::RESERVATION_REGISTER, 1) => Ok(Change::Unregister { any_key }),
        (opcode::RESERVATION_REGISTER, 2) => Ok(Change::Replace { any_key }),
        // RESCAP bit 7: the field is not used by the others.
        (_, _) if any_key => Err(invalid),
        (opcode::RESERVATION_ACQUIRE, 0) => Ok(Change::Acquire(kind()?)),
        (opcode::RESERVATION_ACQUIRE, 1 | 2) => Ok(Change::Preempt(kind()?)),
        (opcode::RESERVATION_RELEASE, 0) => Ok(Change::Release(kind()?)),
        (opcode::RESERVATION_RELEASE, 1) => Ok(Change::Clear),
        _ => Err(invalid),
    }
}
