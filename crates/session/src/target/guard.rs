//! The guard: whether a connection may make plain writes to a namespace (T21).

use riopipe_nvme::command::Status;
use riopipe_order::probe::{self, Plant, Rare};

use super::context::{Context, Queue, fenced_owner};
use super::env::TargetEnv;
use crate::wire;

impl<E: TargetEnv> Context<E> {
    /// Checks whether this association may make plain writes to the namespace (T21).
    #[inline(always)]
    pub(super) fn guard(&mut self, ns_index: usize, env: &mut E) -> Result<(), Status> {
        let association = self.association();
        if self.may_write(ns_index, association, env) {
            return Ok(());
        }
        self.guarded(ns_index, association, env)
    }

    /// The answer to a read of the namespace on a queue that is bound to no stream, if the host may
    /// have lost the volume. The read could find blocks that the new owner has undone or writes
    /// (T8, P9).
    ///
    /// An association that has ended may have been fenced before, or may be fenced now. Its queues
    /// learn of its end late, one after the other. So none of them reads any more: the host is to
    /// connect again, and then learns whether it is the owner.
    #[inline]
    pub(super) fn refuses_read(&self, ns_index: usize) -> Option<Status> {
        let Queue { rights, .. } = self.queue.as_ref()?;
        if rights.is_good() {
            None
        } else if rights.has_ended() {
            (!probe::planted(Plant::T8EndedReads)).then_some(Status::QUEUE_DELETED)
        } else {
            (!self.namespaces.at(ns_index).state.is_of(self.association())).then(fenced_owner)
        }
    }

    #[inline]
    fn may_write(&mut self, ns_index: usize, association: u64, env: &mut E) -> bool {
        let Self { noted_namespaces, namespaces, id, is_fenced, queue, .. } = self;
        let state = &namespaces.at(ns_index).state;
        // The former owner must not write namespaces that another owner has taken over, even once
        // no owner has them any more and any plain host may write them (T8).
        let is_fenced_owner = || {
            queue.as_ref().is_some_and(|q: &Queue| !q.rights.is_good())
                && !state.is_of(association)
                && !probe::planted(Plant::T8FencedPlain)
        };
        let guard_allows = || {
            state.may_write(association) && !is_fenced_owner()
                || probe::planted(Plant::T21NoGuard)
                || probe::planted(Plant::T8StaleOwner) && *is_fenced
        };
        noted_namespaces.may_write(ns_index, guard_allows, || {
            env.with_shared(|shared| shared.note_writer(ns_index, *id))
        })
    }

    /// Decides about a write that the guard refuses. If the guard is for a lease that has run out,
    /// frees the volume and checks again (T25).
    #[cold]
    fn guarded(&mut self, ns_index: usize, association: u64, env: &mut E) -> Result<(), Status> {
        let rights = self.queue.as_ref().map(|queue| &queue.rights);
        if rights.is_some_and(|rights| rights.has_ended()) {
            // The write is correct. Its host is to connect again and send it again.
            return Err(Status::QUEUE_DELETED);
        }
        let (namespace, now) = (self.namespaces.at(ns_index), env.now());
        if namespace.state.lease_is_over(now) {
            let nsid = namespace.config.nsid;
            env.with_shared(|shared| shared.free_namespace(nsid, now));
            if self.may_write(ns_index, association, env) {
                return Ok(());
            }
        }
        probe::hit(Rare::Guarded);
        Err(wire::status::GUARDED.with_dnr())
    }
}
