//! The locks of blocks, as the commands of one connection use them ([`block_locks`] has their queue).
//!
//! [`block_locks`]: super::block_locks

use core::ops::Range;

use super::block_locks::LockTicket;
use super::commands::{HeldLock, Stage};
use super::context::{Context, update_shared};
use super::env::TargetEnv;

impl<E: TargetEnv> Context<E> {
    /// Whether a command must wait, because another command has locked some of the blocks that it is
    /// about to change. The command is in the table, and has passed the guard. When the blocks are
    /// free, it continues by [`PlainIo::on_blocks_locked`](super::plain::PlainIo).
    #[inline(always)]
    pub(super) fn must_wait_for_blocks(
        &mut self,
        index: u16,
        lba: u64,
        blocks: u64,
        env: &mut E,
    ) -> bool {
        let ns_index = usize::from(self.commands[index].ns_index);
        let has_locks = self.namespaces.at(ns_index).state.has_locks();
        (has_locks || self.commands[index].lock.is_some())
            && self.wait_for_blocks(index, ns_index, lba..lba + blocks, env)
    }

    #[cold]
    fn wait_for_blocks(
        &mut self,
        index: u16,
        ns_index: usize,
        blocks: Range<u64>,
        env: &mut E,
    ) -> bool {
        if let Some(lock) = &mut self.commands[index].lock {
            // The command has waited already, and goes on now.
            if !core::mem::replace(&mut lock.is_used, true) {
                return false;
            }
            // It had waited for its piece or range before this one.
            self.give_up_lock(index);
            self.release_locks(env);
        }
        let conn = self.id;
        let ticket = env.with_shared(|shared| shared.await_blocks(conn, ns_index, blocks));
        let Some(ticket) = ticket else { return false };
        let command = &mut self.commands[index];
        command.lock = Some(HeldLock { ticket, is_used: false, is_exclusive: false });
        command.stage = Stage::Locked;
        true
    }

    /// The command that waits with this ticket.
    pub(super) fn command_with_lock(&self, ticket: LockTicket) -> Option<u16> {
        let has_it = |lock: HeldLock| lock.ticket == ticket;
        self.commands.indices_where(|command| command.lock.is_some_and(has_it)).first().copied()
    }

    /// Gives up the lock of a command. It is released by [`release_locks`](Self::release_locks).
    #[cold]
    pub(super) fn give_up_lock(&mut self, index: u16) {
        let command = &mut self.commands[index];
        if let Some(HeldLock { ticket, .. }) = command.lock.take() {
            self.locks_to_release.push((usize::from(command.ns_index), ticket));
        }
    }

    /// Releases the locks that commands have given up.
    #[inline]
    pub(super) fn release_locks(&mut self, env: &mut E) {
        if self.locks_to_release.is_empty() {
            return;
        }
        let locks = core::mem::take(&mut self.locks_to_release);
        update_shared(env, |shared| {
            for (ns_index, ticket) in locks {
                shared.unlock_blocks(ns_index, ticket);
            }
        });
    }
}
