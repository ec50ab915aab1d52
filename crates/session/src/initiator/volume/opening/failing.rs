//! The end of an attempt that has failed: its error, the release of the volume, and the wait for
//! the next attempt.

use super::super::calls::Associations;
use super::super::error::{CallFailure, VolumeOpenError};
use super::super::labels;
use super::{OpeningEvent, Purpose, Question, Step, VolumeOpening};
use crate::claim::ClaimError;
use crate::initiator::opening::{OpeningError, Phase};
use crate::initiator::queue_pair::Data;
use crate::wire::release_command;

impl VolumeOpening {
    /// The error that a lost or failing target causes at this step.
    pub(super) fn call_error(&self, server: usize, source: CallFailure) -> VolumeOpenError {
        let doing = match (&self.step, &self.driver) {
            (Step::Relabeling { work, .. }, _) => {
                work.next_step().as_ref().map_or(labels::WRITING, labels::action_name)
            }
            (Step::Saving { .. }, _) => return VolumeOpenError::Save { server, source },
            (Step::Recovering, Some(driver)) => driver.phase().action_name(),
            (Step::ReadingStatuses { .. }, _) => Phase::Ask.action_name(),
            _ => labels::READING,
        };
        VolumeOpenError::Call { server, doing, source }
    }

    /// Begins to release the volume, if it may have been claimed, after the attempt has failed with
    /// `error`. [`continue_release`](Self::continue_release) reports the error.
    pub(super) fn release_after_failure(
        &mut self,
        error: VolumeOpenError,
        now: u64,
        associations: &mut impl Associations,
    ) {
        self.targets.drop_pending_answers();
        if self.config.purpose == Purpose::Claim
            && let (Some(driver), Some(members)) = (&self.driver, &self.members)
        {
            let generation = driver.opening().generation();
            self.events.push_back(OpeningEvent::Releases { generation });
            let release = release_command(members.head.volume, false);
            for (server, controller) in members.controllers.iter().enumerate() {
                if controller.extension.is_some() {
                    // A target that can't get the command notices the end of the association when
                    // the connection closes.
                    let _ = self.targets.ask_admin(
                        associations,
                        server,
                        release,
                        Data::None,
                        Question::Release,
                        now,
                    );
                }
            }
        }
        self.step = Step::Releasing(error);
    }

    /// Ends the attempt, once every reachable target has answered the release. Then the opening
    /// waits for its next attempt, or ends with the error.
    pub(super) fn continue_release(&mut self, now: u64, associations: &mut impl Associations) {
        // The content of the answers does not matter.
        while self.targets.next_answer(associations).is_some() {}
        self.targets.drop_answers_of_lost_targets(associations);
        if self.targets.has_pending_answers() {
            return;
        }
        self.targets.close_associations(associations);
        let Step::Releasing(error) = core::mem::replace(&mut self.step, Step::Ended) else {
            return;
        };
        match self.time_of_next_attempt(&error, now) {
            Some(until) => self.step = Step::Waiting { until },
            None => self.result = Some(Err(error)),
        }
    }

    /// The time of the next attempt, ns, if this one has failed because the volume has an owner and
    /// the caller allows a longer wait (trap T25). Reports the wait as an event from time to time.
    pub(super) fn time_of_next_attempt(
        &mut self,
        error: &VolumeOpenError,
        now: u64,
    ) -> Option<u64> {
        let VolumeOpenError::Opening(OpeningError::Claim(ClaimError::Owned {
            target,
            owner,
            lease_left_ms,
        })) = error
        else {
            return None;
        };
        let waited = now.saturating_sub(self.opening_began);
        let left = self.config.wait.for_ns.saturating_sub(waited);
        if left == 0 {
            return None;
        }
        let is_report_due = |reported| now.saturating_sub(reported) >= self.config.wait.report_ns;
        if self.last_owned_report.is_none_or(is_report_due) {
            self.last_owned_report = Some(now);
            self.events.push_back(OpeningEvent::Owned {
                server: *target,
                owner: owner.clone(),
                lease_left_ms: *lease_left_ms,
                give_up_ns: left,
            });
        }
        Some(now.saturating_add(self.config.wait.ask_ns.min(left)))
    }
}

pub(super) fn label_error(
    server: usize,
    doing: &'static str,
    source: CallFailure,
) -> VolumeOpenError {
    VolumeOpenError::Call { server, doing, source }
}

pub(super) fn status_error(server: usize, source: CallFailure) -> VolumeOpenError {
    VolumeOpenError::Call { server, doing: Phase::Ask.action_name(), source }
}

pub(super) fn save_error(server: usize, source: CallFailure) -> VolumeOpenError {
    VolumeOpenError::Save { server, source }
}
