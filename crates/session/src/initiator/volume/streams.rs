//! The requests of an open volume's owner that concern whole streams or the volume: to recover
//! streams, to drop lists of in-place updates, to release the volume.
//!
//! The targets' associations belong to their [`AssociationManager`]s. The program passes the
//! managers to [`advance`](StreamsRecovery::advance) when an answer has arrived from a target or a
//! deadline is due, and then sends the contents of the outboxes.

use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::VolumeId;

use super::error::CallFailure;
use super::recovery::{RecoveryDriver, RecoveryError, StepTimes, command_of};
use crate::initiator::association::{Answer, Association, DrivesState};
use crate::initiator::manager::{AssociationManager, UnreachableCause};
use crate::initiator::opening::{Call, Opening, OpeningError, Outcome, Phase, Ticket};
use crate::wire::status;

/// Why a request failed. `server` counts the volume's targets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamsRecoveryError {
    /// A target is unreachable, or was unreachable since the request began. Its association manager
    /// knows why.
    #[error("target {server} is unreachable")]
    Unreachable {
        /// The target.
        server: usize,
    },
    /// A target refused or failed.
    #[error("target {server}: {doing} failed: {source}")]
    Call {
        /// The target.
        server: usize,
        /// The action that failed.
        doing: &'static str,
        /// The error.
        source: CallFailure,
    },
    /// The state of the volume on the targets does not allow the request.
    #[error(transparent)]
    Opening(#[from] OpeningError),
}

impl From<RecoveryError> for StreamsRecoveryError {
    fn from(error: RecoveryError) -> Self {
        match error {
            RecoveryError::Opening(error) => Self::Opening(error),
            RecoveryError::TimedOut { server, doing } => {
                Self::Call { server, doing, source: CallFailure::TimedOut }
            }
            RecoveryError::PutOff { server, doing, status } => {
                Self::Call { server, doing, source: CallFailure::Status(status) }
            }
        }
    }
}

/// The association with a target at the first call of a request. All commands of the request go
/// over this association: answers to commands that were sent over an earlier one never arrive.
#[derive(Clone, Copy, Debug, Default)]
struct PinnedAssociation {
    /// Its [number](AssociationManager::number); `None` before the first call with the manager.
    number: Option<u32>,
}

impl PinnedAssociation {
    /// The association, and whether this is the first call with it; `None` if it is lost, also if
    /// another one has replaced it.
    fn association<'a, P: AsRef<[u8]> + Clone>(
        &mut self,
        manager: &'a mut AssociationManager<P>,
    ) -> Option<(&'a mut Association<P>, bool)> {
        let number = manager.association_number();
        let is_first_call = self.number.is_none();
        let is_same = *self.number.get_or_insert(number) == number;
        manager.association().filter(|_| is_same).map(|association| (association, is_first_call))
    }
}

/// The recovery of some streams of an open volume, or the acknowledgement of their lists of
/// in-place updates; see the [module](self).
#[derive(Debug)]
pub struct StreamsRecovery {
    driver: RecoveryDriver,
    /// The association with each target.
    pinned: Vec<PinnedAssociation>,
    /// Commands that went to targets since the last [`take_sent`](Self::take_sent).
    sent: Vec<(usize, Call)>,
}

impl StreamsRecovery {
    /// An attempt that begins at `now`, ns. `attempt` is the number with which `opening` was made,
    /// and differs from that of every earlier attempt (trap T23). A target may leave a command
    /// without an answer for `timeout_ns` nanoseconds.
    #[must_use]
    pub fn new(opening: Opening, attempt: u32, timeout_ns: u64, now: u64) -> Self {
        let pinned = alloc::vec![PinnedAssociation::default(); opening.servers()];
        let driver = RecoveryDriver::new(opening, attempt, timeout_ns, now);
        Self { driver, pinned, sent: Vec::new() }
    }

    /// Continues: takes in answers that have arrived from the targets, sends the commands that are
    /// due, and ends a pause. `with` calls its argument with the manager of a target.
    ///
    /// # Errors
    /// [`StreamsRecoveryError`]: the attempt has failed, and another may begin.
    pub fn advance<P: AsRef<[u8]> + Clone>(
        &mut self,
        now: u64,
        mut with: impl FnMut(usize, &mut dyn FnMut(&mut AssociationManager<P>)),
    ) -> Result<(), StreamsRecoveryError> {
        if self.driver.phase().is_pause() {
            self.driver.end_pause(now)?;
        }
        loop {
            let before = self.driver.phase();
            for server in 0..self.pinned.len() {
                let mut result = Ok(());
                with(server, &mut |manager| {
                    result = self.continue_with_target(server, manager, now)
                });
                result?;
            }
            self.driver.check_timeouts(now)?;
            let phase = self.driver.phase();
            // A pause ends only in the next call, which has a new clock value. So the time of the
            // decision does not count to the next step.
            if phase == before || phase.is_pause() {
                return Ok(());
            }
        }
    }

    /// Continues with one target: takes in its answers, and sends it the commands that are due.
    fn continue_with_target<P: AsRef<[u8]> + Clone>(
        &mut self,
        server: usize,
        manager: &mut AssociationManager<P>,
        now: u64,
    ) -> Result<(), StreamsRecoveryError> {
        let Some((association, is_first_call)) = self.pinned[server].association(manager) else {
            return Err(StreamsRecoveryError::Unreachable { server });
        };
        if is_first_call {
            // An earlier attempt may have left commands on this queue. The target accepts the queue
            // again only when those have come back from the drives (trap T8).
            association.close_drives();
        }
        while let Some(Answer { question, cqe, page, .. }) = association.next_answer() {
            let status = cqe.status();
            let answer = if status.is_ok() { Ok(&page[..]) } else { Err(status) };
            // The answer may belong to an earlier attempt. The driver drops such an answer (trap
            // T23).
            self.driver.on_answer(server, Ticket::from_bits(question), answer, now)?;
        }
        let doing = self.driver.phase().action_name();
        let call_error = |source| StreamsRecoveryError::Call { server, doing, source };
        if self.driver.needs_drives() {
            match association.drives() {
                DrivesState::Ready => {}
                DrivesState::Failed(error) => return Err(call_error(error.clone().into())),
                DrivesState::Opening => return Ok(()),
                DrivesState::Closed => {
                    association.open_drives(now);
                    return Ok(());
                }
            }
        }
        while let Some((ticket, call)) = self.driver.next_command(server, now) {
            let (queue, sqe, data) = command_of(&call);
            association
                .ask(queue, ticket.to_bits(), sqe, data, now)
                .map_err(|error| call_error(CallFailure::of(error)))?;
            self.sent.push((server, call));
        }
        Ok(())
    }

    /// When [`advance`](Self::advance) is due at the latest, ns.
    #[must_use]
    pub fn deadline(&self, now: u64) -> Option<u64> {
        if self.driver.phase().is_pause() { Some(now) } else { self.driver.deadline(now) }
    }

    /// Whether the attempt is done.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.driver.phase() == Phase::Over
    }

    /// The driver of the attempt.
    #[must_use]
    pub fn driver(&self) -> &RecoveryDriver {
        &self.driver
    }

    /// The commands that have gone to targets since the last call.
    pub fn take_sent(&mut self) -> Vec<(usize, Call)> {
        core::mem::take(&mut self.sent)
    }

    /// Closes a target's drives queue, after the attempt has ended or has been given up. The next
    /// user of the queue opens it again.
    pub fn close_drives_queue<P: AsRef<[u8]> + Clone>(manager: &mut AssociationManager<P>) {
        if let Some(association) = manager.association() {
            association.close_drives();
        }
    }

    /// The findings, the actions and their times, once the attempt is over.
    #[must_use]
    pub fn finish(self) -> (Outcome, StepTimes) {
        let (opening, steps) = self.driver.into_parts();
        (opening.into_outcome(), steps)
    }
}

const RELEASING: &str = "releasing the volume";

/// The release of an open volume on its targets; see the [module](self).
#[derive(Debug)]
pub struct VolumeRelease {
    volume: VolumeId,
    /// For each target, whether this release has asked it.
    asked: Vec<bool>,
    /// For each target, whether it still has to release the volume, or to refuse that.
    unanswered: Vec<bool>,
    /// The first target that has refused, and the status that it answered.
    refused: Option<(usize, Status)>,
    /// Targets that have released the volume since the last [`take_released`](Self::take_released).
    released: Vec<usize>,
}

impl VolumeRelease {
    /// A release that [`advance`](Self::advance) begins. `has_extension` has one item for each
    /// target. Only targets that have the extension are asked.
    #[must_use]
    pub fn new(volume: VolumeId, has_extension: Vec<bool>) -> Self {
        let asked = alloc::vec![false; has_extension.len()];
        Self { volume, asked, unanswered: has_extension, refused: None, released: Vec::new() }
    }

    /// Continues: asks the targets, and takes in their answers. `with` calls its argument with the
    /// manager of a target. Returns whether every target has answered. A target that is unreachable
    /// is asked when it is back, and one that was lost before it answered is asked again.
    ///
    /// # Errors
    /// A target will not come back, can't be asked, or does not release the volume. The targets
    /// that have answered otherwise have released it.
    pub fn advance<P: AsRef<[u8]> + Clone>(
        &mut self,
        now: u64,
        mut with: impl FnMut(usize, &mut dyn FnMut(&mut AssociationManager<P>)),
    ) -> Result<bool, StreamsRecoveryError> {
        let mut first_error = Ok(());
        for server in 0..self.asked.len() {
            let mut result = Ok(());
            with(server, &mut |manager| result = self.continue_with_target(server, manager, now));
            // After an error of one target the others are still asked.
            first_error = first_error.and(result);
        }
        first_error?;
        if self.unanswered.contains(&true) {
            return Ok(false);
        }
        match self.refused {
            None => Ok(true),
            Some((server, status)) => {
                let source = CallFailure::Status(status);
                Err(StreamsRecoveryError::Call { server, doing: RELEASING, source })
            }
        }
    }

    /// The first target that has not answered.
    #[must_use]
    pub fn first_unanswered(&self) -> Option<usize> {
        self.unanswered.iter().position(|unanswered| *unanswered)
    }

    /// The targets that have released the volume since the last call.
    pub fn take_released(&mut self) -> Vec<usize> {
        core::mem::take(&mut self.released)
    }

    /// Continues with one target: asks it, or takes in its answer.
    fn continue_with_target<P: AsRef<[u8]> + Clone>(
        &mut self,
        server: usize,
        manager: &mut AssociationManager<P>,
        now: u64,
    ) -> Result<(), StreamsRecoveryError> {
        let cause = manager.absence().map(|absence| &absence.why);
        let has_no_owner = matches!(cause, Some(UnreachableCause::Claim(status))
            if status.is(status::LEASE_OVER));
        if !self.unanswered[server] {
            return Ok(());
        }
        if has_no_owner {
            // The target has released the volume before, and the answer was lost.
            manager.set_released();
        }
        if manager.is_released() {
            self.unanswered[server] = false;
            self.released.push(server);
            return Ok(());
        }
        // A refusal that comes before the question belongs to an earlier release, which was given
        // up (trap T23).
        let refusal = manager.take_release_refusal();
        if let Some(status) = refusal.filter(|_| self.asked[server]) {
            self.unanswered[server] = false;
            if self.refused.is_none() {
                self.refused = Some((server, status));
            }
            return Ok(());
        }
        if let Some(absence) = manager.absence() {
            // If the target comes back, the manager claims the volume there again. Then the release
            // is sent again over the new association.
            return if absence.for_good || absence.given_up {
                Err(StreamsRecoveryError::Unreachable { server })
            } else {
                Ok(())
            };
        }
        self.asked[server] = true;
        manager.request_release(self.volume, now).map_err(|error| {
            let source = CallFailure::of(error);
            StreamsRecoveryError::Call { server, doing: RELEASING, source }
        })
    }
}
