//! Ordered writes to drives that keep an order by themselves (engines `barrier` and `opimq`).
//!
//! The commands are plain ones: no log and no gate takes part. The target only submits them so that
//! the drive learns the order in which the host sent them ([`ArrivedWrites`]).
//!
//! ```text
//! Write with an order -> check -> data is there, or R2T -> may it be submitted? -> drive
//! ```
//!
//! When an ordered write fails or is refused, the connection *stops* its ordered writes to that
//! drive: none behind it is carried out. A drive with a cache barrier has one sequence of epochs for
//! all its hosts. A write that fails there ends the sequence, so the connections of all hosts stop.
//! The next connection that begins with ordered writes lets the drive begin a new sequence.

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status, opcode};
use riopipe_order::block_device::{BlockDevice, Data, IoError, Submitted};
use riopipe_order::dispatch::arrivals::{ArrivedWrites, StoppedWrite};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::write_order::{DriveOrder, EpochId, WriteOrder};

use super::closed::Closed;
use super::commands::Stage;
use super::context::Context;
use super::env::{TargetEnv, status_of};
use super::ids::OpId;
use super::plain::{CheckedWrite, PlainIo};
use super::sync::{AtomicU64, Ordering};
use crate::outbox::Outbox;
use crate::wire;

/// The sequence of epochs of a drive with a cache barrier, as all cores share it.
#[derive(Debug, Default)]
pub(super) struct EpochSequence {
    /// The number of the sequence. It is odd after an ordered write has failed, until the drive has
    /// begun a new sequence.
    number: AtomicU64,
}

impl EpochSequence {
    /// The number of the sequence, and whether it goes on.
    fn current(&self) -> (u64, bool) {
        let number = self.number.load(Ordering::Acquire);
        (number, number.is_multiple_of(2))
    }

    /// Ends the sequence `number`, if it goes on.
    fn end(&self, number: u64) {
        let _ =
            self.number.compare_exchange(number, number + 1, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Notes that the drive has begun a new sequence after `ended`. Another core may have noted it
    /// before.
    fn begin_after(&self, ended: u64) {
        let _ = self.number.compare_exchange(ended, ended + 1, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// The ordered writes of one connection to one drive.
#[derive(Debug, Default)]
struct DriveWrites {
    arrived: ArrivedWrites<u16>,
    /// The drive's sequence of epochs in which the connection has begun.
    sequence: Option<u64>,
}

/// The ordered writes of a connection, by namespace index.
#[derive(Debug, Default)]
pub(super) struct OrderedWrites(Vec<DriveWrites>);

impl OrderedWrites {
    fn of(&mut self, ns_index: usize) -> &mut DriveWrites {
        if self.0.len() <= ns_index {
            self.0.resize_with(ns_index + 1, DriveWrites::default);
        }
        &mut self.0[ns_index]
    }
}

/// Whether a command is a write with a place in its drive's order.
pub(super) fn is_in_drive_order(sqe: &Sqe) -> bool {
    sqe.opcode() == opcode::WRITE
        && wire::order_of(sqe).is_some_and(|order| order != WriteOrder::Orderless)
}

impl PlainIo {
    /// Carries out a Write with a place in its drive's order.
    #[cold]
    pub(super) fn write_in_order<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let (checked, order) = match self.check_write_in_order(context, sqe, data, env) {
            Ok(checked) => checked,
            Err(status) => {
                if let Ok((ns_index, _)) = context.namespace(sqe) {
                    self.stop_writes(context, ns_index, outbox);
                }
                context.send_completion(sqe.cid(), status, 0, outbox);
                return Ok(());
            }
        };
        let CheckedWrite { ns_index, data_len, is_in_capsule } = checked;
        self.join_sequence(context, ns_index, env);
        let arrived = &mut self.ordered_writes.of(ns_index).arrived;
        if is_in_capsule && arrived.can_submit_at_once(order) {
            let index = context.insert_command(sqe, Stage::Device, ns_index)?;
            let data = Data::Borrowed(data);
            self.submit_in_order(context, index, order, data, env, outbox);
            return Ok(());
        }
        let stage = if is_in_capsule { Stage::Gate } else { Stage::Budget };
        let index = context.insert_command(sqe, stage, ns_index)?;
        arrived.push(index, order, is_in_capsule);
        if !is_in_capsule {
            if context.charge_or_enqueue(index, data_len, outbox) {
                self.request_ordered_data(context, index, env, outbox);
            }
            return Ok(());
        }
        probe::count_rare(Rare::ArrivalHeld);
        // The receive buffer is used again, so the data is copied.
        match env.alloc(data.len()) {
            Some(mut copy) => {
                copy.as_mut().copy_from_slice(data);
                context.commands[index].buf = Some(copy);
            }
            None => self.refuse_ordered(context, index, Status::INTERNAL, outbox),
        }
        Ok(())
    }

    /// Checks a Write with a place in its drive's order.
    fn check_write_in_order<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        data: &[u8],
        env: &mut E,
    ) -> Result<(CheckedWrite, WriteOrder), Status> {
        let checked = Self::check_write(context, sqe, data, env)?;
        let order = wire::order_of(sqe).ok_or(Status::INVALID_FIELD.with_dnr())?;
        let namespace = context.namespaces.at(checked.ns_index);
        // The host relies on the order. A drive that keeps none must not take the write (trap T17).
        // FUA would need a FLUSH behind each write, and has no place in an order.
        if !namespace.config.order.keeps(order) || sqe.fua() {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let (number, _) = namespace.state.sequence.current();
        let writes = self.ordered_writes.of(checked.ns_index);
        let has_ended = writes.sequence.is_some_and(|sequence| sequence != number);
        if (writes.arrived.is_stopped() || has_ended)
            && !probe::is_bug_planted(Plant::ArrivalNotStopped)
        {
            return Err(wire::status::POISONED.with_dnr());
        }
        let order = self.order_on_drive(context, checked.ns_index, order, env)?;
        Ok((checked, order))
    }

    /// Lets the connection take part in the drive's sequence of epochs, if it has not yet. If a
    /// write has ended the last sequence by its failure, the drive begins a new one.
    fn join_sequence<E: TargetEnv>(&mut self, context: &Context<E>, ns_index: usize, env: &mut E) {
        let writes = self.ordered_writes.of(ns_index);
        let namespace = context.namespaces.at(ns_index);
        if writes.sequence.is_some() || namespace.config.order != DriveOrder::Barrier {
            return;
        }
        let sequence = &namespace.state.sequence;
        let (number, goes_on) = sequence.current();
        writes.sequence = Some(number);
        if !goes_on {
            probe::count_rare(Rare::SequenceBegun);
            // The queue to the drive keeps the order, so the first write need not wait for this. A
            // write by another core may still reach the drive before. It then fails, and ends the
            // new sequence.
            let op = OpId::new(context.key, OpId::NO_COMMAND);
            let _ = env.device(ns_index).start_stream(op.0, EpochId { stream: 0, epoch: 0 });
            sequence.begin_after(number);
            writes.sequence = Some(number + 1);
        }
    }

    /// Requests the data of an ordered write. If there is no memory for it, the write is refused.
    pub(super) fn request_ordered_data<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        if !context.request_data(index, env, outbox) {
            self.refuse_ordered(context, index, Status::INTERNAL, outbox);
        }
    }

    /// Takes in the data of an ordered write, and submits all that may be submitted now.
    pub(super) fn on_ordered_data<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let command = &mut context.commands[index];
        command.stage = Stage::Gate;
        if let Some(status) = command.early_status {
            return self.refuse_ordered(context, index, status, outbox);
        }
        let ns_index = usize::from(command.ns_index);
        self.ordered_writes.of(ns_index).arrived.on_data(index);
        while let Some(index) = self.ordered_writes.of(ns_index).arrived.next_to_submit() {
            // Another host may have claimed the volume while the write waited (trap T21).
            if let Err(status) = context.guard(ns_index, env) {
                self.refuse_ordered(context, index, status, outbox);
                continue;
            }
            let command = &mut context.commands[index];
            let order = self.translated_order(&command.sqe, ns_index);
            let (Some(buf), Some(order)) = (command.buf.take(), order) else {
                debug_assert!(false, "a write that waits has its data");
                self.refuse_ordered(context, index, Status::INTERNAL, outbox);
                continue;
            };
            command.stage = Stage::Device;
            self.submit_in_order(context, index, order, Data::Owned(buf), env, outbox);
        }
    }

    /// Submits an ordered write to its drive.
    fn submit_in_order<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        order: WriteOrder,
        data: Data<'_, E::Buf>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let command = &context.commands[index];
        let (ns_index, lba) = (usize::from(command.ns_index), command.sqe.slba());
        self.note_plain_write(context, ns_index);
        let op = OpId::new(context.key, index);
        if let Submitted::Done(result) = env.device(ns_index).write_in_order(op.0, lba, data, order)
        {
            self.on_ordered_result(context, index, result.map(|_| ()), outbox);
        }
    }

    /// Takes in the drive's result of an ordered write.
    pub(super) fn on_ordered_result<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        result: Result<(), IoError>,
        outbox: &mut Outbox<E::Buf>,
    ) {
        match result {
            Ok(()) => context.complete_command(index, Status::SUCCESS, 0, outbox),
            Err(error) => {
                let ns_index = usize::from(context.commands[index].ns_index);
                let namespace = context.namespaces.at(ns_index);
                if let Some(number) = self.ordered_writes.of(ns_index).sequence {
                    namespace.state.sequence.end(number);
                }
                self.refuse_ordered(context, index, status_of(&error, false), outbox);
            }
        }
    }

    /// Completes an ordered write that was not carried out, and stops those behind it.
    fn refuse_ordered<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        status: Status,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let ns_index = usize::from(context.commands[index].ns_index);
        context.complete_command(index, status, 0, outbox);
        self.stop_writes(context, ns_index, outbox);
    }

    /// Stops the ordered writes of the connection to a drive. Those that wait are refused, each when
    /// its data has come.
    fn stop_writes<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        ns_index: usize,
        outbox: &mut Outbox<E::Buf>,
    ) {
        if probe::is_bug_planted(Plant::ArrivalNotStopped) {
            return;
        }
        for StoppedWrite { write: index, .. } in self.ordered_writes.of(ns_index).arrived.stop() {
            let Some(command) = context.commands.get_used(index) else { continue };
            let status = wire::status::POISONED.with_dnr();
            match command.stage {
                Stage::Budget | Stage::Receiving => command.early_status = Some(status),
                _ => context.complete_command(index, status, 0, outbox),
            }
        }
    }
}
