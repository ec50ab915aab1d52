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
//! The next connection that begins with ordered writes lets the drive begin a new sequence, once no
//! write of the old one is in flight.

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status, opcode};
use riopipe_order::block_device::{BlockDevice, Data, IoError, Submitted};
use riopipe_order::dispatch::arrivals::{ArrivedWrites, StoppedWrite};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::write_order::{DriveOrder, EpochId, WriteOrder};

use super::closed::Closed;
use super::commands::Stage;
use super::context::{Context, update_shared};
use super::env::{TargetEnv, status_of};
use super::ids::OpId;
use super::lba::Trim;
use super::plain::{CheckedWrite, PlainIo, note_failures_before};
use super::shared::DriveChange;
use super::sync::{AtomicU64, Ordering};
use crate::outbox::Outbox;
use crate::wire;

/// The sequence of epochs of a drive with a cache barrier, as all cores share it.
///
/// One atomic word has the number of the sequence in its upper half, and in its lower half the
/// number of writes that are in flight to the drive or in it. The two lowest bits of the number are
/// the phase.
///
/// ```text
/// RUNS --a write fails--> ENDED --no write is in flight--> STARTING --the drive has begun--> RUNS
/// ```
///
/// A write is counted before it goes to the drive, and until its result is known. So no write of
/// the old sequence gets into the new one, whichever core it comes from.
#[derive(Debug, Default)]
pub(super) struct EpochSequence {
    word: AtomicU64,
}

/// The width of the count of writes.
const COUNT_BITS: u32 = 32;
/// The phases.
const RUNS: u64 = 0;
const ENDED: u64 = 1;
const STARTING: u64 = 2;
const PHASES: u64 = 4;

/// The answer to a write that wants to go to its drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    /// It is counted, and belongs to the sequence with this number.
    Entered(u64),
    /// The drive must begin a new sequence first. The caller starts it.
    MustStart,
    /// The write must wait: writes of the old sequence are in flight, or another connection starts a
    /// new one.
    MustWait,
    /// The write must be refused: its sequence has ended.
    Refused,
}

impl EpochSequence {
    /// Lets in a write of a connection that has begun in the sequence `joined`, or has not begun.
    /// Without `may_start` a write that would have to start a new sequence must wait.
    fn enter(&self, joined: Option<u64>, may_start: bool) -> Entry {
        // Only a plant forgets where the connection has begun.
        let joined = joined.filter(|_| !probe::is_bug_planted(Plant::ArrivalNotStopped));
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            let (number, count) = (word >> COUNT_BITS, word & ((1 << COUNT_BITS) - 1));
            let (next, entry) = match (number % PHASES, joined) {
                (RUNS, None) => (word + 1, Entry::Entered(number)),
                (RUNS, Some(joined)) if joined == number => (word + 1, Entry::Entered(number)),
                (ENDED, None) if count == 0 && may_start => {
                    ((number - ENDED + STARTING) << COUNT_BITS, Entry::MustStart)
                }
                (_, None) => return Entry::MustWait,
                (_, Some(_)) => return Entry::Refused,
            };
            match self.word.compare_exchange(word, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return entry,
                Err(now) => word = now,
            }
        }
    }

    /// Whether ordered writes are in flight.
    fn has_writes(&self) -> bool {
        self.word.load(Ordering::Relaxed) & ((1 << COUNT_BITS) - 1) > 0
    }

    /// Whether a write of a connection that has not begun must wait now.
    fn is_between_sequences(&self) -> bool {
        let word = self.word.load(Ordering::Acquire);
        let (number, count) = (word >> COUNT_BITS, word & ((1 << COUNT_BITS) - 1));
        number % PHASES == STARTING || number % PHASES == ENDED && count > 0
    }

    /// Notes the result of a write that was let in. If it has failed, its sequence ends. Returns
    /// whether the sequence has ended, and no write of it is in flight any more.
    fn leave(&self, joined: Option<u64>, has_failed: bool) -> bool {
        if has_failed && let Some(joined) = joined {
            self.end_if(|number| number == joined);
        }
        // The failure is noted before the write counts no more.
        let word = self.word.fetch_sub(1, Ordering::AcqRel) - 1;
        (word >> COUNT_BITS) % PHASES == ENDED && word & ((1 << COUNT_BITS) - 1) == 0
    }

    /// Ends the sequence, if there is one: a FLUSH has failed, and the drive may have lost writes of
    /// it (trap T22).
    pub(super) fn end(&self) {
        self.end_if(|number| number % PHASES == RUNS);
    }

    /// Ends the sequence if its number is this one.
    fn end_if(&self, is_it: impl Fn(u64) -> bool) {
        let mut word = self.word.load(Ordering::Acquire);
        while is_it(word >> COUNT_BITS) {
            let ended = word + (ENDED << COUNT_BITS);
            match self.word.compare_exchange(word, ended, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(now) => word = now,
            }
        }
    }

    /// Notes the result of the start. Returns the number of the new sequence, which has begun with
    /// one write in flight; `None` if the drive has not begun one.
    fn on_started(&self, has_begun: bool) -> Option<u64> {
        // Nothing else changes the word in this phase.
        let number = self.word.load(Ordering::Acquire) >> COUNT_BITS;
        debug_assert_eq!(number % PHASES, STARTING);
        let (next, new_writes) = match has_begun {
            true => (number - STARTING + PHASES, 1),
            false => (number - STARTING + ENDED, 0),
        };
        let change = (next.wrapping_sub(number) << COUNT_BITS).wrapping_add(new_writes);
        self.word.fetch_add(change, Ordering::AcqRel);
        has_begun.then_some(next)
    }
}

/// The ordered writes of one connection to one drive.
#[derive(Debug, Default)]
struct DriveWrites {
    arrived: ArrivedWrites<u16>,
    /// The drive's sequence of epochs in which the connection has begun.
    sequence: Option<u64>,
    /// The write for which the drive begins a new sequence. All others wait until it has.
    starting: Option<u16>,
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

/// Counts a write without an order that passes ordered ones. Nothing holds it back: it belongs to no
/// epoch.
pub(super) fn count_crossing<E: TargetEnv>(context: &Context<E>, ns_index: usize) {
    let namespace = context.namespaces.at(ns_index);
    if namespace.config.order == DriveOrder::Barrier && namespace.state.sequence.has_writes() {
        probe::count_rare(Rare::OrderlessCrossed);
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
        let stage = if is_in_capsule { Stage::Gate } else { Stage::Budget };
        let index = context.insert_command(sqe, stage, ns_index)?;
        if is_in_capsule
            && self.ordered_writes.of(ns_index).arrived.can_submit_at_once(order)
            // A start takes time. The write then waits with the others.
            && matches!(self.enter(context, ns_index, false), Entry::Entered(_))
        {
            context.commands[index].stage = Stage::Device;
            let data = Data::Borrowed(data);
            self.submit_in_order(context, index, order, data, env, outbox);
            return Ok(());
        }
        self.ordered_writes.of(ns_index).arrived.push(index, order, is_in_capsule);
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
                self.submit_waiting(context, ns_index, env, outbox);
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
        let checked = Self::check_write(context, (sqe, Trim::default()), data, env)?;
        let order = wire::order_of(sqe).ok_or(Status::INVALID_FIELD.with_dnr())?;
        let namespace = context.namespaces.at(checked.ns_index);
        // The host relies on the order. A drive that keeps none must not take the write (trap T17).
        // FUA would need a FLUSH behind each write, and has no place in an order.
        if !namespace.config.order.keeps(order)
            || sqe.fua()
            || checked.data_len > wire::ORDERED_BYTES_MAX
        {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        if self.ordered_writes.of(checked.ns_index).arrived.is_stopped() {
            return Err(context.status_of_stopped());
        }
        let order = self.order_on_drive(context, checked.ns_index, order, env)?;
        Ok((checked, order))
    }

    /// Lets a write into the drive's sequence of epochs; see [`EpochSequence::enter`].
    fn enter<E: TargetEnv>(
        &mut self,
        context: &Context<E>,
        ns_index: usize,
        may_start: bool,
    ) -> Entry {
        let namespace = context.namespaces.at(ns_index);
        if namespace.config.order != DriveOrder::Barrier {
            return Entry::Entered(0);
        }
        let writes = self.ordered_writes.of(ns_index);
        let entry = namespace.state.sequence.enter(writes.sequence, may_start);
        if let Entry::Entered(number) = entry {
            writes.sequence = Some(number);
        }
        entry
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
        self.submit_waiting(context, ns_index, env, outbox);
    }

    /// Submits the writes that wait and may be submitted now.
    fn submit_waiting<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        ns_index: usize,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        while self.ordered_writes.of(ns_index).starting.is_none()
            && let Some(index) = self.ordered_writes.of(ns_index).arrived.next_to_submit()
        {
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
            let entry = self.enter(context, ns_index, true);
            let command = &mut context.commands[index];
            match entry {
                Entry::Entered(_) => {
                    command.stage = Stage::Device;
                    self.submit_in_order(context, index, order, Data::Owned(buf), env, outbox);
                }
                Entry::MustStart => {
                    probe::count_rare(Rare::SequenceBegun);
                    (command.buf, command.stage) = (Some(buf), Stage::Device);
                    self.ordered_writes.of(ns_index).starting = Some(index);
                    let op = OpId::new(context.key, index);
                    let first = EpochId { stream: 0, epoch: 0 };
                    if let Submitted::Done(result) = env.device(ns_index).start_stream(op.0, first)
                    {
                        let result = result.map(|_| ());
                        self.on_sequence_started(context, index, result, env, outbox);
                    }
                }
                Entry::MustWait => {
                    command.buf = Some(buf);
                    self.ordered_writes.of(ns_index).arrived.put_back(index, order);
                    if context.awaits_sequence(ns_index, env) {
                        probe::count_rare(Rare::SequenceAwaited);
                        return;
                    }
                }
                Entry::Refused => {
                    let status = wire::status::POISONED.with_dnr();
                    self.refuse_ordered(context, index, status, outbox);
                }
            }
        }
    }

    /// Submits the writes that have waited for the sequence of another connection.
    pub(super) fn on_sequence_changed<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        for ns_index in 0..self.ordered_writes.0.len() {
            if !context.is_closing {
                self.submit_waiting(context, ns_index, env, outbox);
            }
        }
    }

    /// Takes in the result of the start of a new sequence, and submits the write that has waited for
    /// it.
    fn on_sequence_started<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        result: Result<(), IoError>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let ns_index = usize::from(context.commands[index].ns_index);
        let sequence = &context.namespaces.at(ns_index).state.sequence;
        let begun = sequence.on_started(result.is_ok());
        update_shared(env, |shared| shared.drive_changed(ns_index, DriveChange::Sequence));
        let writes = self.ordered_writes.of(ns_index);
        (writes.starting, writes.sequence) = (None, begun);
        if begun.is_none() {
            let status = wire::status::POISONED.with_dnr();
            return self.refuse_ordered(context, index, status, outbox);
        }
        let refusal = match context.is_closing {
            true => Some(Status::ABORT_REQUESTED),
            false => context.guard(ns_index, env).err(),
        };
        let command = &mut context.commands[index];
        let order = wire::order_of(&command.sqe).unwrap_or_default();
        match (refusal, command.buf.take()) {
            (None, Some(buf)) => {
                self.submit_in_order(context, index, order, Data::Owned(buf), env, outbox);
                self.submit_waiting(context, ns_index, env, outbox);
            }
            (refusal, _) => {
                context.leave_sequence(ns_index, begun, false, env);
                let status = refusal.unwrap_or(Status::INTERNAL);
                self.refuse_ordered(context, index, status, outbox);
            }
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
        let failures = self.note_plain_write(context, ns_index);
        note_failures_before(&mut context.commands[index], failures);
        let op = OpId::new(context.key, index);
        if let Submitted::Done(result) = env.device(ns_index).write_in_order(op.0, lba, data, order)
        {
            self.on_ordered_result(context, index, result.map(|_| ()), env, outbox);
        }
    }

    /// Takes in the drive's result of an ordered write, or of the start that it has waited for.
    pub(super) fn on_ordered_result<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        index: u16,
        result: Result<(), IoError>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let ns_index = usize::from(context.commands[index].ns_index);
        let writes = self.ordered_writes.of(ns_index);
        if writes.starting == Some(index) {
            return self.on_sequence_started(context, index, result, env, outbox);
        }
        if context.namespaces.at(ns_index).config.order == DriveOrder::Barrier {
            context.leave_sequence(ns_index, writes.sequence, result.is_err(), env);
        }
        match result {
            Ok(()) => context.complete_command(index, Status::SUCCESS, 0, outbox),
            Err(error) => {
                self.refuse_ordered(context, index, status_of(&error, false), outbox);
            }
        }
    }

    /// Stops the ordered writes behind a command that was refused before it was read.
    pub(super) fn on_unread_command<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        outbox: &mut Outbox<E::Buf>,
    ) {
        if is_in_drive_order(sqe)
            && let Ok((ns_index, _)) = context.namespace(sqe)
        {
            self.stop_writes(context, ns_index, outbox);
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
            let status = context.status_of_stopped();
            let Some(command) = context.commands.get_used(index) else { continue };
            match command.stage {
                Stage::Budget | Stage::Receiving => command.early_status = Some(status),
                _ => context.complete_command(index, status, 0, outbox),
            }
        }
    }
}

impl<E: TargetEnv> Context<E> {
    /// Notes the result of a write that was let into a drive's sequence. Wakes the connections that
    /// wait for the end of an old one.
    fn leave_sequence(&self, ns_index: usize, joined: Option<u64>, has_failed: bool, env: &mut E) {
        if self.namespaces.at(ns_index).state.sequence.leave(joined, has_failed) {
            update_shared(env, |shared| shared.drive_changed(ns_index, DriveChange::Sequence));
        }
    }

    /// Registers the connection to be woken when the drive's sequence changes. Returns false if it
    /// need not wait any more.
    fn awaits_sequence(&self, ns_index: usize, env: &mut E) -> bool {
        let conn = self.id;
        update_shared(env, |shared| shared.await_change(ns_index, DriveChange::Sequence, conn));
        // The change may have come before the connection was registered.
        self.namespaces.at(ns_index).state.sequence.is_between_sequences()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_sequence_begins_when_no_write_of_the_old_one_is_in_flight() {
        let sequence = EpochSequence::default();
        assert_eq!(sequence.enter(None, true), Entry::Entered(0));
        assert_eq!(sequence.enter(Some(0), true), Entry::Entered(0));
        assert!(!sequence.leave(Some(0), true), "another one is in flight");
        assert_eq!(sequence.enter(Some(0), true), Entry::Refused, "its sequence has ended");
        assert_eq!(sequence.enter(None, true), Entry::MustWait, "a write is in flight");
        assert!(sequence.is_between_sequences());
        assert!(sequence.leave(Some(0), true), "the last one");
        assert!(!sequence.is_between_sequences());
        assert_eq!(sequence.enter(None, false), Entry::MustWait, "it may not start one");
        assert_eq!(sequence.enter(None, true), Entry::MustStart);
        assert_eq!(sequence.enter(None, true), Entry::MustWait, "another connection starts it");
        assert!(sequence.is_between_sequences());
        assert_eq!(sequence.on_started(false), None, "the drive has lost its power, say");
        assert_eq!(sequence.enter(None, true), Entry::MustStart);
        let begun = sequence.on_started(true);
        assert_eq!(begun, Some(PHASES));
        assert_eq!(sequence.enter(Some(0), true), Entry::Refused);
        assert_eq!(sequence.enter(None, true), Entry::Entered(PHASES));
        sequence.leave(begun, false);
        // A late failure in an old sequence does not end the new one.
        sequence.leave(Some(0), true);
        assert_eq!(sequence.enter(begun, true), Entry::Entered(PHASES));
    }
}
