//! The guard: the check whether a connection may make plain writes to a namespace (trap T21).
//!
//! A namespace of a volume is guarded while the volume has an owner or a log to recover: only the
//! association of the owner may make plain writes. The guard also stops a fenced owner, which may
//! not know yet that another owner has replaced it (trap T8).

use riopipe_nvme::command::Status;
use riopipe_order::probe::{self, Plant, Rare};

use super::context::{Context, Queue, fenced_owner};
use super::env::TargetEnv;
use crate::wire;

impl<E: TargetEnv> Context<E> {
    /// Checks whether this association may make plain writes to the namespace (trap T21).
    ///
    /// # Errors
    /// The status with which the write is refused.
    #[inline(always)]
    pub(super) fn guard(&mut self, ns_index: usize, env: &mut E) -> Result<(), Status> {
        // A host that may not write is not noted as a writer, so it can't make claims more expensive.
        self.check_reservation(ns_index)?;
        let association = self.association();
        if !self.may_write(ns_index, association, env) {
            self.check_guarded_write(ns_index, association, env)?;
        }
        // The access must be read after the connection is noted as a writer. Another host may have
        // acquired a reservation before the note, and then it does not wait for this connection
        // (trap T8).
        self.check_reservation(ns_index)
    }

    /// Checks whether reservations, and the ANA state of the port, allow the host to change blocks of
    /// the namespace. Unlike the guard, they concern every command that writes: also the ordered requests
    /// of an owner, and FLUSHes.
    ///
    /// # Errors
    /// The status of a reservation conflict, or that of the ANA state.
    #[inline(always)]
    pub(super) fn check_reservation(&self, ns_index: usize) -> Result<(), Status> {
        match &self.queue {
            Some(queue) if !queue.access.may_write(ns_index) => Err(queue.access.refusal(ns_index)),
            _ => Ok(()),
        }
    }

    /// Checks whether the ANA state of the port allows I/O commands of the namespace, for a command that
    /// neither reads nor writes blocks.
    ///
    /// # Errors
    /// The status of the ANA state.
    pub(super) fn check_path(&self, ns_index: usize) -> Result<(), Status> {
        let access = self.queue.as_ref().map(|queue| &queue.access);
        access.and_then(|access| access.path_refusal(ns_index)).map_or(Ok(()), Err)
    }

    /// The status with which a plain read of the namespace is refused; `None` if it is allowed.
    ///
    /// The read of a fenced owner is refused, because it could find blocks that the new owner has
    /// undone or has written (trap T8, promise P9). Every read of an association that has ended is
    /// refused, too: its queues notice the end one after the other, and a new owner may have fenced
    /// it meanwhile. The host must connect again, and then finds out whether it is still the owner.
    #[inline]
    pub(super) fn refuses_read(&self, ns_index: usize) -> Option<Status> {
        let Queue { rights, access, .. } = self.queue.as_ref()?;
        if !access.may_read(ns_index) {
            Some(access.refusal(ns_index))
        } else if rights.is_good() {
            None
        } else if rights.has_ended() {
            (!probe::is_bug_planted(Plant::T8EndedReads)).then_some(Status::QUEUE_DELETED)
        } else {
            (!self.namespaces.at(ns_index).state.is_guarded_for(self.association()))
                .then(fenced_owner)
        }
    }

    /// Like [`refuses_read`](Self::refuses_read), for a read that has not begun. It is also refused
    /// on a connection whose stream was fenced.
    #[inline]
    pub(super) fn refuses_new_read(&self, ns_index: usize) -> Option<Status> {
        if self.is_fenced { Some(fenced_owner()) } else { self.refuses_read(ns_index) }
    }

    /// The status with which an ordered write is refused that is behind a refused one. If the
    /// association has ended, nothing has failed: the host must connect again, as after any other
    /// command of this queue.
    #[cold]
    pub(super) fn status_of_stopped(&self) -> Status {
        match &self.queue {
            Some(queue) if queue.rights.has_ended() => Status::QUEUE_DELETED,
            _ => wire::status::POISONED.with_dnr(),
        }
    }

    /// Whether this association may make plain writes to the namespace. Notes the connection as a
    /// writer of the namespace before its first write.
    #[inline]
    fn may_write(&mut self, ns_index: usize, association: u64, env: &mut E) -> bool {
        let Self { noted_namespaces, namespaces, id, is_fenced, queue, .. } = self;
        let state = &namespaces.at(ns_index).state;
        // A fenced owner must not write the namespaces that another owner has taken over. This
        // holds even after the other owner has released them and any plain host may write them
        // (trap T8).
        let is_fenced_owner = || {
            queue.as_ref().is_some_and(|queue: &Queue| !queue.rights.is_good())
                && !state.is_guarded_for(association)
                && !probe::is_bug_planted(Plant::T8FencedPlain)
        };
        let guard_allows = || {
            state.may_write(association) && !is_fenced_owner()
                || probe::is_bug_planted(Plant::T21NoGuard)
                || probe::is_bug_planted(Plant::T8StaleOwner) && *is_fenced
        };
        noted_namespaces.may_write(ns_index, guard_allows, || {
            env.with_shared(|shared| shared.note_writer(ns_index, *id))
        })
    }

    /// Decides about a write that the guard does not allow. If the namespace is guarded for a lease
    /// that has run out, frees the volume and checks the guard again (trap T25).
    #[cold]
    fn check_guarded_write(
        &mut self,
        ns_index: usize,
        association: u64,
        env: &mut E,
    ) -> Result<(), Status> {
        let rights = self.queue.as_ref().map(|queue| &queue.rights);
        if rights.is_some_and(|rights| rights.has_ended()) {
            // The write itself is valid. The host must connect again and repeat it.
            return Err(Status::QUEUE_DELETED);
        }
        let (namespace, now) = (self.namespaces.at(ns_index), env.now());
        if namespace.state.is_lease_over(now) {
            let nsid = namespace.config.nsid;
            env.with_shared(|shared| shared.free_namespace(nsid, now));
            if self.may_write(ns_index, association, env) {
                return Ok(());
            }
        }
        probe::count_rare(Rare::Guarded);
        Err(wire::status::GUARDED.with_dnr())
    }
}
