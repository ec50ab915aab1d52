//! A connection's FLUSHes, beside those of other connections on any core (T22, T29): see
//! [`flushes`](super::flushes).

use riopipe_order::block_device::{BlockDevice, Submitted};
use riopipe_order::probe::{self, Plant, Rare};

use super::commands::Stage;
use super::context::{Context, shared};
use super::env::TargetEnv;
use super::ids::OpId;

impl<E: TargetEnv> Context<E> {
    /// Submits the FLUSH of a command.
    pub(super) fn submit_flush_of(&mut self, index: u16, env: &mut E) -> Submitted<E::Buf> {
        let ns = usize::from(self.commands[index].ns);
        let namespace = self.namespaces.at(ns);
        // Without a volatile cache a FLUSH has nothing to lose.
        let ticket = namespace.config.volatile.then(|| namespace.state.flushes.begin());
        self.commands[index].flush = ticket;
        env.device(ns).flush(OpId::new(self.key, index).0)
    }

    /// Takes in the result of a command's FLUSH. Returns whether its success is in doubt. Then the
    /// command waits, and [`out_of_doubt`](Self::out_of_doubt) finds it later.
    pub(super) fn flush_ended(&mut self, index: u16, ok: bool, env: &mut E) -> bool {
        let command = &mut self.commands[index];
        let ns = usize::from(command.ns);
        let state = &self.namespaces.at(ns).state;
        if !ok {
            state.flushes.fail();
        }
        let Some(ticket) = command.flush.take() else { return false };
        let doubt = state.flushes.end(ticket, || shared(env, |s| s.flushes_accounted(ns)));
        command.doubt = doubt;
        // At the end of a connection there is no peer to answer, and its gate uses no result.
        let accepted = !ok || self.closing || probe::planted(Plant::T29AcceptAtOnce);
        if accepted || !self.is_in_doubt(index, env) {
            return false;
        }
        probe::hit(Rare::FlushInDoubt);
        self.commands[index].stage = Stage::InDoubt;
        true
    }

    /// Whether the success of a FLUSH is still in doubt. If so, the connection is woken later.
    fn is_in_doubt(&self, index: u16, env: &mut E) -> bool {
        let command = &self.commands[index];
        let (ns, conn) = (usize::from(command.ns), self.id);
        let flushes = &self.namespaces.at(ns).state.flushes;
        command
            .doubt
            .is_some_and(|doubt| flushes.wait(doubt, || shared(env, |s| s.await_flushes(ns, conn))))
    }

    /// Notes that FLUSHes of other connections have been accounted for. Returns the commands whose
    /// success is in doubt no more.
    pub(super) fn out_of_doubt(&mut self, env: &mut E) -> alloc::vec::Vec<u16> {
        let mut over = self.commands.indices(|command| command.stage == Stage::InDoubt);
        over.retain(|index| !self.is_in_doubt(*index, env));
        for index in &over {
            self.commands[*index].stage = Stage::Gate;
        }
        over
    }
}
