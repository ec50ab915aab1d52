//! The submission of a connection's FLUSHes, and their results. The success of a FLUSH may be in
//! doubt because of FLUSHes of other connections, on any core: [`flushes`](super::flushes) explains
//! it (traps T22, T29).

use riopipe_order::block_device::{BlockDevice, Submitted};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::write_order::{DriveOrder, EpochId};

use super::commands::Stage;
use super::context::{Context, update_shared};
use super::env::TargetEnv;
use super::ids::OpId;
use super::shared::DriveChange;

impl<E: TargetEnv> Context<E> {
    /// Submits the FLUSH of a command: of all epochs of a stream before this one, or of all that has
    /// completed.
    pub(super) fn submit_flush_of(
        &mut self,
        index: u16,
        before: Option<EpochId>,
        env: &mut E,
    ) -> Submitted<E::Buf> {
        let ns_index = usize::from(self.commands[index].ns_index);
        let namespace = self.namespaces.at(ns_index);
        // A drive without a volatile cache loses no data when a FLUSH fails, so its FLUSHes are not
        // counted.
        let ticket = namespace.config.volatile.then(|| namespace.state.flushes.begin());
        self.commands[index].flush_ticket = ticket;
        let op = OpId::new(self.key, index).0;
        match before {
            Some(before) => env.device(ns_index).flush_epochs(op, before),
            None => env.device(ns_index).flush(op),
        }
    }

    /// Takes in the result of a command's FLUSH. Returns whether the success of the FLUSH is in
    /// doubt. A command in doubt waits, and [`resolve_doubts`](Self::resolve_doubts) returns it
    /// later. `is_loss`: it has failed, and the drive may have lost writes.
    pub(super) fn on_flush_ended(
        &mut self,
        index: u16,
        has_succeeded: bool,
        is_loss: bool,
        env: &mut E,
    ) -> bool {
        let command = &mut self.commands[index];
        let ns_index = usize::from(command.ns_index);
        let namespace = self.namespaces.at(ns_index);
        let state = &namespace.state;
        if is_loss {
            state.flushes.count_failure();
            if namespace.config.order == DriveOrder::Barrier {
                state.sequence.end();
            }
        }
        let Some(ticket) = command.flush_ticket.take() else { return false };
        let doubt = state.flushes.end(ticket, || {
            update_shared(env, |shared| shared.drive_changed(ns_index, DriveChange::FlushRound))
        });
        command.doubt = doubt;
        // Only a success may be in doubt. On a connection that ends, no completion is sent, and the
        // gate ignores the result.
        let is_certain =
            !has_succeeded || self.is_closing || probe::is_bug_planted(Plant::T29AcceptAtOnce);
        if is_certain || !self.is_in_doubt(index, env) {
            return false;
        }
        probe::count_rare(Rare::FlushInDoubt);
        self.commands[index].stage = Stage::InDoubt;
        true
    }

    /// Whether the success of a command's FLUSH is still in doubt. If it is, registers the
    /// connection to be woken when the current round of FLUSHes ends.
    fn is_in_doubt(&self, index: u16, env: &mut E) -> bool {
        let command = &self.commands[index];
        let Some(doubt) = command.doubt else { return false };
        let (ns_index, conn) = (usize::from(command.ns_index), self.id);
        let register = || {
            update_shared(env, |shared| {
                shared.await_change(ns_index, DriveChange::FlushRound, conn)
            })
        };
        self.namespaces.at(ns_index).state.flushes.is_still_in_doubt(doubt, register)
    }

    /// Checks all commands in doubt again, because a round of FLUSHes has ended. Returns the
    /// indices of the commands whose success is certain now.
    pub(super) fn resolve_doubts(&mut self, env: &mut E) -> alloc::vec::Vec<u16> {
        let mut resolved = self.commands.indices_where(|command| command.stage == Stage::InDoubt);
        resolved.retain(|index| !self.is_in_doubt(*index, env));
        for index in &resolved {
            self.commands[*index].stage = Stage::Gate;
        }
        resolved
    }
}
