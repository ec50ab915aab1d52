//! The requests of the owner of an open volume to its targets beside its streams: to recover
//! streams, to drop lists of in-place updates, to release the volume.
//!
//! The targets' associations belong to their [`AssociationManager`]s. The program passes the
//! managers to [`advance`](StreamsRecovery::advance) when an answer has arrived from a target or a
//! deadline is due, and then sends the contents of the outboxes.

use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::VolumeId;

use super::error::CallFailure;
use super::recovery::{RecoveryDriver, RecoveryError, StepTimes, question};
use crate::initiator::association::{Answer, Association, ControlQueue, DrivesState};
use crate::initiator::manager::{AssociationManager, UnreachableCause};
use crate::initiator::opening::{Call, Opening, OpeningError, Outcome, Phase, Ticket};
use crate::initiator::queue_pair::Data;
use crate::wire::{release_command, status};

/// Why an open volume's targets could not do a request. `server` counts them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamsRecoveryError {
    /// A target is unreachable, or was unreachable meanwhile; its manager knows why.
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
    /// The state on the targets does not allow it.
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

/// An association, as it was when commands were sent over it.
#[derive(Clone, Copy, Debug, Default)]
struct Begun {
    /// Its [number](AssociationManager::number); `None` before the first call with the manager.
    number: Option<u32>,
}

impl Begun {
    /// The association, if it stands and is still the same; and whether this is the first call with
    /// it. Commands sent over an earlier one are never answered.
    fn association<'a, P: AsRef<[u8]> + Clone>(
        &mut self,
        manager: &'a mut AssociationManager<P>,
    ) -> Option<(&'a mut Association<P>, bool)> {
        let number = manager.number();
        let is_first_call = self.number.is_none();
        let is_same = *self.number.get_or_insert(number) == number;
        manager.association().filter(|_| is_same).map(|association| (association, is_first_call))
    }
}

/// The recovery of some streams of an open volume, or the acknowledgement of their lists; see the
/// [module](self).
#[derive(Debug)]
pub struct StreamsRecovery {
    driver: RecoveryDriver,
    begun: Vec<Begun>,
    /// Commands that went to targets, for programs that report them.
    sent: Vec<(usize, Call)>,
}

impl StreamsRecovery {
    /// An attempt that begins at `now`, ns. `attempt` is the number with which `opening` was made,
    /// and differs from that of every earlier attempt (T23). A target may leave a command without
    /// an answer for `timeout_ns` nanoseconds.
    #[must_use]
    pub fn new(opening: Opening, attempt: u32, timeout_ns: u64, now: u64) -> Self {
        let begun = alloc::vec![Begun::default(); opening.servers()];
        let driver = RecoveryDriver::new(opening, attempt, timeout_ns, now);
        Self { driver, begun, sent: Vec::new() }
    }

    /// Continues: takes in answers that have arrived from the targets, sends the commands that are
    /// due, and ends a pause. `with` calls its argument with the manager of a target.
    ///
    /// # Errors
    /// [`StreamsRecoveryError`]: the attempt has ended, and another may be begun.
    pub fn advance<P: AsRef<[u8]> + Clone>(
        &mut self,
        now: u64,
        mut with: impl FnMut(usize, &mut dyn FnMut(&mut AssociationManager<P>)),
    ) -> Result<(), StreamsRecoveryError> {
        if self.driver.phase().is_pause() {
            self.driver.go_on(now)?;
        }
        loop {
            let before = self.driver.phase();
            for server in 0..self.begun.len() {
                let mut worked = Ok(());
                with(server, &mut |manager| worked = self.work(server, manager, now));
                worked?;
            }
            self.driver.timeout(now)?;
            let phase = self.driver.phase();
            // After deciding the clock is read anew, so that its time is not the next step's.
            if phase == before || phase.is_pause() {
                return Ok(());
            }
        }
    }

    /// Continues with one target: takes in its answers, and sends it the commands that are due.
    fn work<P: AsRef<[u8]> + Clone>(
        &mut self,
        server: usize,
        manager: &mut AssociationManager<P>,
        now: u64,
    ) -> Result<(), StreamsRecoveryError> {
        let Some((association, is_first_call)) = self.begun[server].association(manager) else {
            return Err(StreamsRecoveryError::Unreachable { server });
        };
        if is_first_call {
            // The target accepts the queue again only when the zeroing of an earlier attempt has
            // come back (T8).
            association.close_drives();
        }
        while let Some(Answer { name, cqe, page, .. }) = association.answer() {
            let status = cqe.status();
            let answer = if status.is_ok() { Ok(&page[..]) } else { Err(status) };
            // It may be of an earlier attempt: the driver accepts only its own (T23).
            self.driver.done(server, Ticket::from_bits(name), answer, now)?;
        }
        let doing = self.driver.phase().doing();
        let failed = |source| StreamsRecoveryError::Call { server, doing, source };
        if self.driver.needs_drives() {
            match association.drives() {
                DrivesState::Ready => {}
                DrivesState::Failed(error) => return Err(failed(error.clone().into())),
                DrivesState::Opening => return Ok(()),
                DrivesState::Closed => {
                    association.open_drives(now);
                    return Ok(());
                }
            }
        }
        while let Some((ticket, call)) = self.driver.next(server, now) {
            let (queue, sqe, data) = question(&call);
            association
                .ask(queue, ticket.to_bits(), sqe, data, now)
                .map_err(|error| failed(CallFailure::of(error)))?;
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

    /// The attempt is over or has been given up: a target's queue to the drives is free again.
    pub fn leave<P: AsRef<[u8]> + Clone>(manager: &mut AssociationManager<P>) {
        if let Some(association) = manager.association() {
            association.close_drives();
        }
    }

    /// The findings, the actions and their times, once the attempt is over.
    #[must_use]
    pub fn finish(self) -> (Outcome, StepTimes) {
        let (opening, steps) = self.driver.finish();
        (opening.into_outcome(), steps)
    }
}

/// The name of the question that releases a volume: no ticket of an attempt is the same.
const RELEASE: u64 = u64::MAX;
const RELEASING: &str = "releasing the volume";

/// The release of an open volume on its targets; see the [module](self).
#[derive(Debug)]
pub struct VolumeRelease {
    volume: VolumeId,
    /// For each target, the [number](AssociationManager::number) of the association over which it
    /// was asked last.
    asked: Vec<Option<u32>>,
    /// For each target, whether its answer is missing.
    owed: Vec<bool>,
    refused: Option<(usize, Status)>,
    /// Targets that have released the volume, for programs that report them.
    given: Vec<usize>,
}

impl VolumeRelease {
    /// A release that [`advance`](Self::advance) begins. `speaks` has for each target whether it
    /// has the extension: no other target is asked.
    #[must_use]
    pub fn new(volume: VolumeId, speaks: Vec<bool>) -> Self {
        let asked = alloc::vec![None; speaks.len()];
        Self { volume, asked, owed: speaks, refused: None, given: Vec::new() }
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
        let mut all = Ok(());
        for server in 0..self.asked.len() {
            let mut worked = Ok(());
            with(server, &mut |manager| worked = self.work(server, manager, now));
            // An error of one target does not keep the others from being asked.
            all = all.and(worked);
        }
        all?;
        if self.owed.contains(&true) {
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
    pub fn owed(&self) -> Option<usize> {
        self.owed.iter().position(|owed| *owed)
    }

    /// The targets that have released the volume since the last call.
    pub fn take_given(&mut self) -> Vec<usize> {
        core::mem::take(&mut self.given)
    }

    /// Continues with one target: asks it, or takes in its answer.
    fn work<P: AsRef<[u8]> + Clone>(
        &mut self,
        server: usize,
        manager: &mut AssociationManager<P>,
        now: u64,
    ) -> Result<(), StreamsRecoveryError> {
        let absence = manager.absence().map(|absence| &absence.why);
        let has_no_owner = matches!(absence, Some(UnreachableCause::Claim(status))
            if status.is(status::LEASE_OVER));
        if has_no_owner && self.owed[server] {
            // The target has released the volume, and its answer was lost.
            manager.set_released();
            self.given.push(server);
        }
        if manager.is_released() {
            self.owed[server] = false;
        }
        if !self.owed[server] {
            return Ok(());
        }
        let number = Some(manager.number());
        let is_lost = manager.absence().is_some_and(|absence| absence.for_good);
        let Some(association) = manager.association() else {
            // When the target is back, the manager claims the volume there again. That claim is
            // then released like the first one.
            return if is_lost {
                Err(StreamsRecoveryError::Unreachable { server })
            } else {
                Ok(())
            };
        };
        if core::mem::replace(&mut self.asked[server], number) != number {
            let release = release_command(self.volume, false);
            association.ask(ControlQueue::Admin, RELEASE, release, Data::None, now).map_err(
                |error| {
                    let source = CallFailure::of(error);
                    StreamsRecoveryError::Call { server, doing: RELEASING, source }
                },
            )?;
        }
        let mut has_released = false;
        while let Some(Answer { name, cqe, .. }) = association.answer() {
            if name == RELEASE {
                self.owed[server] = false;
                let status = cqe.status();
                if status.is_ok() {
                    has_released = true;
                    self.given.push(server);
                } else if self.refused.is_none() {
                    self.refused = Some((server, status));
                }
            }
        }
        if has_released {
            manager.set_released();
        }
        Ok(())
    }
}
