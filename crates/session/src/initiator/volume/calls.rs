//! Questions to a volume's targets, and the matching of the answers to them.
//!
//! A *question* is a command of the opening or the creation itself, beside the commands by which an
//! association attaches. Each has a purpose, which [`Targets::next_answer`] returns with its
//! answer.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use riopipe_nvme::command::{Cqe, Sqe};
use riopipe_order::attribute::VolumeId;

use super::error::CallFailure;
use crate::initiator::association::{
    Answer, Association, AssociationError, AssociationState, ControlQueue, DrivesState,
};
use crate::initiator::attach::Controller;
use crate::initiator::queue_pair::Data;
use crate::wire::{STATUS_LEN, status_command};

/// Access to the associations with a volume's targets, which the program owns.
pub trait Associations {
    /// A piece of a write's data.
    type Piece: AsRef<[u8]> + Clone + From<Vec<u8>>;

    /// Calls `f` with the association with a target.
    fn with<R>(&mut self, target: usize, f: impl FnOnce(&mut Association<Self::Piece>) -> R) -> R;
}

impl<P: AsRef<[u8]> + Clone + From<Vec<u8>>> Associations for Vec<Association<P>> {
    type Piece = P;

    fn with<R>(&mut self, target: usize, f: impl FnOnce(&mut Association<P>) -> R) -> R {
        f(&mut self[target])
    }
}

/// The targets of a volume that is being opened or created, and the questions in flight to them.
/// `Q` is the type of the purpose of a question.
#[derive(Debug)]
pub(super) struct Targets<Q> {
    /// The number of targets.
    len: usize,
    /// Questions without an answer, by number.
    pending: BTreeMap<u64, PendingQuestion<Q>>,
    /// The number of the next question. No number is used twice, so no late answer is taken for the
    /// answer to another question (trap T23).
    next_number: u64,
}

/// A question without an answer.
#[derive(Debug)]
struct PendingQuestion<Q> {
    target: usize,
    purpose: Q,
}

/// The answer of a target to a question.
#[derive(Debug)]
pub(super) struct TargetAnswer<Q> {
    pub(super) target: usize,
    /// The purpose with which the question was sent.
    pub(super) purpose: Q,
    pub(super) cqe: Cqe,
    /// The data of a read; else empty.
    pub(super) page: Vec<u8>,
}

/// A target that has failed, and its error.
pub(super) type FailedTarget = (usize, AssociationError);

impl<Q> Targets<Q> {
    /// `len` targets without questions.
    pub(super) fn new(len: usize) -> Self {
        Self { len, pending: BTreeMap::new(), next_number: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Replaces each association by a new one with the same configuration. No question so far will
    /// be answered.
    pub(super) fn replace_associations(&mut self, associations: &mut impl Associations) {
        for target in 0..self.len {
            associations.with(target, |association| {
                *association = Association::new(association.config().clone());
            });
        }
        self.pending.clear();
    }

    /// Every controller, or every target that could not be attached; `None` as long as one target
    /// is still being attached. The caller waits for all, so that it reports every failure.
    pub(super) fn attach_results(
        &self,
        associations: &mut impl Associations,
    ) -> Option<Result<Vec<Controller>, Vec<FailedTarget>>> {
        let (mut controllers, mut failed) = (Vec::new(), Vec::new());
        for target in 0..self.len {
            let attached = associations.with(target, |association| match association.state() {
                AssociationState::Attaching => None,
                AssociationState::Attached => association.controller().cloned().map(Ok),
                AssociationState::Lost(error) => Some(Err(error.clone())),
            });
            match attached? {
                Ok(controller) => controllers.push(controller),
                Err(error) => failed.push((target, error)),
            }
        }
        Some(if failed.is_empty() { Ok(controllers) } else { Err(failed) })
    }

    /// The first target whose association is lost.
    pub(super) fn first_lost(&self, associations: &mut impl Associations) -> Option<FailedTarget> {
        (0..self.len).find_map(|target| {
            associations.with(target, |association| match association.state() {
                AssociationState::Lost(error) => Some((target, error.clone())),
                _ => None,
            })
        })
    }

    /// Opens the drives queue of every target.
    pub(super) fn open_drives_queues(&self, associations: &mut impl Associations, now: u64) {
        (0..self.len).for_each(|target| {
            associations.with(target, |association| association.open_drives(now))
        });
    }

    /// Closes the drives queue of every target.
    pub(super) fn close_drives_queues(&self, associations: &mut impl Associations) {
        (0..self.len).for_each(|target| associations.with(target, Association::close_drives));
    }

    /// Whether a target's drives queue can be used.
    pub(super) fn is_drives_queue_ready(
        &self,
        associations: &mut impl Associations,
        target: usize,
    ) -> bool {
        associations.with(target, |association| association.drives() == DrivesState::Ready)
    }

    /// The first target whose drives queue could not be opened, or has ended.
    pub(super) fn first_failed_drives_queue(
        &self,
        associations: &mut impl Associations,
    ) -> Option<FailedTarget> {
        (0..self.len).find_map(|target| {
            associations.with(target, |association| match association.drives() {
                DrivesState::Failed(error) => Some((target, error.clone())),
                _ => None,
            })
        })
    }

    /// Sends a question to a target. [`next_answer`](Self::next_answer) returns its answer, with
    /// `purpose`.
    pub(super) fn ask<A: Associations>(
        &mut self,
        associations: &mut A,
        (target, queue): (usize, ControlQueue),
        sqe: Sqe,
        data: Data<'_, A::Piece>,
        purpose: Q,
        now: u64,
    ) -> Result<(), CallFailure> {
        let number = self.next_number;
        let sent =
            associations.with(target, |association| association.ask(queue, number, sqe, data, now));
        sent.map_err(CallFailure::of)?;
        self.next_number += 1;
        self.pending.insert(number, PendingQuestion { target, purpose });
        Ok(())
    }

    /// Sends a question to a target over its admin queue; else as [`ask`](Self::ask).
    pub(super) fn ask_admin<A: Associations>(
        &mut self,
        associations: &mut A,
        target: usize,
        sqe: Sqe,
        data: Data<'_, A::Piece>,
        purpose: Q,
        now: u64,
    ) -> Result<(), CallFailure> {
        self.ask(associations, (target, ControlQueue::Admin), sqe, data, purpose, now)
    }

    /// Asks a target for its status of a volume.
    pub(super) fn ask_status(
        &mut self,
        associations: &mut impl Associations,
        target: usize,
        volume: VolumeId,
        purpose: Q,
        now: u64,
    ) -> Result<(), CallFailure> {
        let data = Data::Read(STATUS_LEN as u32);
        self.ask_admin(associations, target, status_command(volume), data, purpose, now)
    }

    /// The next answer that has arrived. An answer to a question that was dropped is left out.
    pub(super) fn next_answer(
        &mut self,
        associations: &mut impl Associations,
    ) -> Option<TargetAnswer<Q>> {
        for target in 0..self.len {
            while let Some(Answer { question, cqe, page, .. }) =
                associations.with(target, Association::next_answer)
            {
                if let Some(PendingQuestion { target, purpose }) = self.pending.remove(&question) {
                    return Some(TargetAnswer { target, purpose, cqe, page });
                }
            }
        }
        None
    }

    /// Whether a question has no answer yet.
    pub(super) fn has_pending_answers(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Drops all questions so far: their answers are not needed any more.
    pub(super) fn drop_pending_answers(&mut self) {
        self.pending.clear();
    }

    /// Drops the questions to lost targets: no answer to them will arrive.
    pub(super) fn drop_answers_of_lost_targets(&mut self, associations: &mut impl Associations) {
        let attached = |target| associations.with(target, |association| association.is_attached());
        let attached: Vec<bool> = (0..self.len).map(attached).collect();
        self.pending.retain(|_, question| attached[question.target]);
    }

    /// Ends all associations, and drops all questions.
    pub(super) fn close_associations(&mut self, associations: &mut impl Associations) {
        (0..self.len).for_each(|target| associations.with(target, Association::close));
        self.pending.clear();
    }
}
