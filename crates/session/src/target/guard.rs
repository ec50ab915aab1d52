//! The guard: whether a connection may make plain writes to a namespace (T21).

use riopipe_nvme::command::Status;
use riopipe_order::probe::{self, Plant, Rare};

use super::context::{Context, Queue};
use super::env::TargetEnv;
use crate::wire;

impl<E: TargetEnv> Context<E> {
    /// Checks whether this association may make plain writes to the namespace (T21).
    #[inline(always)]
    pub(super) fn guard(&mut self, ns: usize, env: &mut E) -> Result<(), Status> {
        let assoc = self.assoc();
        if self.may_write(ns, assoc, env) {
            return Ok(());
        }
        self.guarded(ns, assoc, env)
    }

    /// Whether a read of the namespace comes from a fenced owner, on a queue that is bound to no
    /// stream. It would find blocks that the new owner has undone or writes (T8, P9).
    pub(super) fn reads_fenced(&self, ns: usize) -> bool {
        let is_fenced_owner = |queue: &Queue| queue.write_rights.is_fenced_owner();
        self.queue.as_ref().is_some_and(is_fenced_owner)
            && !self.namespaces.at(ns).state.is_of(self.assoc())
    }

    #[inline]
    fn may_write(&mut self, ns: usize, assoc: u64, env: &mut E) -> bool {
        let Self { noted, namespaces, id, is_fenced, queue, .. } = self;
        let state = &namespaces.at(ns).state;
        // The former owner must not write namespaces that another owner has taken over, even once
        // no owner has them any more and any plain host may write them (T8).
        let is_fenced_owner = || {
            queue.as_ref().is_some_and(|q: &Queue| !q.write_rights.is_good())
                && !state.is_of(assoc)
                && !probe::planted(Plant::T8FencedPlain)
        };
        let guard_allows = || {
            state.may_write(assoc) && !is_fenced_owner()
                || probe::planted(Plant::T21NoGuard)
                || probe::planted(Plant::T8StaleOwner) && *is_fenced
        };
        noted.may_write(ns, guard_allows, || env.with_shared(|s| s.note_writer(ns, *id)))
    }

    /// Decides about a write that the guard refuses. If the guard is for a lease that has run out,
    /// frees the volume and checks again (T25).
    #[cold]
    fn guarded(&mut self, ns: usize, assoc: u64, env: &mut E) -> Result<(), Status> {
        let write_rights = self.queue.as_ref().map(|queue| &queue.write_rights);
        if write_rights.is_some_and(|rights| rights.has_ended()) {
            // The write is correct. Its host is to connect again and send it again.
            return Err(Status::QUEUE_DELETED);
        }
        let (namespace, now) = (self.namespaces.at(ns), env.now());
        if namespace.state.lease_is_over(now) {
            let nsid = namespace.config.nsid;
            env.with_shared(|s| s.free_namespace(nsid, now));
            if self.may_write(ns, assoc, env) {
                return Ok(());
            }
        }
        probe::hit(Rare::Guarded);
        Err(wire::status::GUARDED.with_dnr())
    }
}
