//! Questions to a volume's targets, and the matching of the answers to them.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use riopipe_nvme::command::{Cqe, Sqe};

use super::error::CallFailure;
use crate::initiator::association::{
    Answer, Association, AssociationError, AssociationState, ControlQueue, DrivesState,
};
use crate::initiator::attach::Controller;
use crate::initiator::queue_pair::Data;

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

/// The targets of a volume that is being opened or made, and the questions in flight to them. `Q`
/// is the purpose of a question.
#[derive(Debug)]
pub(super) struct Targets<Q> {
    len: usize,
    /// Questions without an answer, by name.
    questions: BTreeMap<u64, (usize, Q)>,
    /// The name of the next question. No name is used twice, so no answer is taken for that of
    /// another question (T23).
    next_name: u64,
}

/// A target that has failed, and the cause.
pub(super) type Failed = (usize, AssociationError);

impl<Q> Targets<Q> {
    pub(super) fn new(len: usize) -> Self {
        Self { len, questions: BTreeMap::new(), next_name: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Begins again, with new associations.
    pub(super) fn begin_again(&mut self, a: &mut impl Associations) {
        for target in 0..self.len {
            a.with(target, |association| {
                *association = Association::new(association.config().clone());
            });
        }
        self.questions.clear();
    }

    /// The result of the bring-ups of all targets; `None` as long as one runs. The caller waits for
    /// all, so that every failure is reported.
    pub(super) fn attached(
        &self,
        a: &mut impl Associations,
    ) -> Option<Result<Vec<Controller>, Vec<Failed>>> {
        let (mut controllers, mut failed) = (Vec::new(), Vec::new());
        for target in 0..self.len {
            let attached = a.with(target, |association| match association.state() {
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
    pub(super) fn lost(&self, a: &mut impl Associations) -> Option<Failed> {
        (0..self.len).find_map(|target| {
            a.with(target, |association| match association.state() {
                AssociationState::Lost(error) => Some((target, error.clone())),
                _ => None,
            })
        })
    }

    /// Opens the queues to the drives of all targets.
    pub(super) fn open_drives(&self, a: &mut impl Associations, now: u64) {
        (0..self.len).for_each(|target| a.with(target, |association| association.open_drives(now)));
    }

    /// Closes the queues to the drives of all targets.
    pub(super) fn close_drives(&self, a: &mut impl Associations) {
        (0..self.len).for_each(|target| a.with(target, Association::close_drives));
    }

    /// Whether a target's queue to its drives can be used.
    pub(super) fn is_ready(&self, a: &mut impl Associations, target: usize) -> bool {
        a.with(target, |association| association.drives() == DrivesState::Ready)
    }

    /// The first target whose queue to its drives could not be opened, or has ended.
    pub(super) fn drives_failed(&self, a: &mut impl Associations) -> Option<Failed> {
        (0..self.len).find_map(|target| {
            a.with(target, |association| match association.drives() {
                DrivesState::Failed(error) => Some((target, error.clone())),
                _ => None,
            })
        })
    }

    /// Asks a target; its answer comes with the purpose of the question.
    pub(super) fn ask<A: Associations>(
        &mut self,
        a: &mut A,
        (target, queue): (usize, ControlQueue),
        sqe: Sqe,
        data: Data<'_, A::Piece>,
        what: Q,
        now: u64,
    ) -> Result<(), CallFailure> {
        let name = self.next_name;
        let asked = a.with(target, |association| association.ask(queue, name, sqe, data, now));
        asked.map_err(CallFailure::of)?;
        self.next_name += 1;
        self.questions.insert(name, (target, what));
        Ok(())
    }

    /// The next answer: its target, the purpose of the question, its completion and its data.
    pub(super) fn answer(&mut self, a: &mut impl Associations) -> Option<(usize, Q, Cqe, Vec<u8>)> {
        for target in 0..self.len {
            while let Some(Answer { name, cqe, page, .. }) = a.with(target, Association::answer) {
                if let Some((target, what)) = self.questions.remove(&name) {
                    return Some((target, what, cqe, page));
                }
            }
        }
        None
    }

    /// Whether any question has no answer yet.
    pub(super) fn is_owed(&self) -> bool {
        !self.questions.is_empty()
    }

    /// Drops all questions so far: their answers are not needed any more.
    pub(super) fn forget(&mut self) {
        self.questions.clear();
    }

    /// Drops the questions to a lost target, which will never be answered.
    pub(super) fn forget_lost(&mut self, a: &mut impl Associations) {
        let attached = |target| a.with(target, |association| association.is_attached());
        let attached: Vec<bool> = (0..self.len).map(attached).collect();
        self.questions.retain(|_, (target, _)| attached[*target]);
    }

    /// Ends all associations.
    pub(super) fn hang_up(&mut self, a: &mut impl Associations) {
        (0..self.len).for_each(|target| a.with(target, Association::hang_up));
        self.questions.clear();
    }
}
