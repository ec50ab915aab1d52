//! Setting up the association with a target again: the checks and commands, step by step.
//!
//! ```text
//! attached → check the controller → open the drives queue → read and check each label → claim
//! ```

use riopipe_nvme::command::Sqe;
use riopipe_order::engine::Cause;

use super::{AssociationManager, Failure, Step, UnreachableCause};
use crate::initiator::association::{
    AskError, AssociationError, AssociationState, ControlQueue, DrivesState,
};
use crate::initiator::known::Changed;
use crate::initiator::queue_pair::Data;
use crate::label::{LABEL_LEN, Label};
use crate::wire::{self, retry, status};

/// The number of copies of a label on a drive: one in each of the first blocks.
const LABEL_COPIES: u32 = 2;

impl<P: AsRef<[u8]> + Clone> AssociationManager<P> {
    /// Continues with `step` as far as the target has answered. Returns the step that the manager
    /// then waits for, which may be the same one; `None` after the last one.
    pub(super) fn next_step(&mut self, step: Step, now: u64) -> Result<Option<Step>, Failure> {
        let controller = match self.association.state() {
            AssociationState::Attaching => return Ok(Some(step)),
            AssociationState::Lost(error) => return Err(Failure::passing(error)),
            AssociationState::Attached => self.association.controller(),
        };
        match step {
            // Only the clock ends a pause.
            Step::Pause { .. } => Ok(Some(step)),
            Step::Attach => {
                if let Some(controller) = controller {
                    self.config.known.check(controller)?;
                }
                self.association.open_drives(now);
                Ok(Some(Step::OpenDrives))
            }
            Step::OpenDrives => match self.association.drives() {
                DrivesState::Ready => self.read_label(0, now),
                DrivesState::Failed(error) => Err(Failure::passing(error)),
                DrivesState::Closed | DrivesState::Opening => Ok(Some(step)),
            },
            Step::ReadLabel(index) => self.check_label_answer(index, now),
            Step::Claim => self.check_claim_answer(),
        }
    }

    /// Requests the label of the volume's drive with this index on this target. After the last
    /// drive, claims the volume.
    fn read_label(&mut self, index: usize, now: u64) -> Result<Option<Step>, Failure> {
        let Some(nsid) = self.config.known.namespaces().nth(index) else {
            return self.send_claim(now);
        };
        let read = Sqe::read(nsid, 0, LABEL_COPIES);
        let data = Data::Read(LABEL_COPIES * LABEL_LEN as u32);
        self.association.ask(ControlQueue::Drives, index as u64, read, data, now)?;
        Ok(Some(Step::ReadLabel(index)))
    }

    /// Checks the label of the drive with this index, if it has arrived, and requests the next one.
    fn check_label_answer(&mut self, index: usize, now: u64) -> Result<Option<Step>, Failure> {
        let Some(answer) = self.association.next_answer() else {
            return match self.association.drives() {
                DrivesState::Failed(error) => Err(Failure::passing(error)),
                _ => Ok(Some(Step::ReadLabel(index))),
            };
        };
        let status = answer.cqe.status();
        if !status.is_ok() {
            return Err(Failure::Passing(UnreachableCause::Label(status)));
        }
        let known = &self.config.known;
        if let Some(nsid) = known.namespaces().nth(index) {
            let (first, second) = answer.page.split_at(LABEL_LEN);
            let crc = self.association.config().crc;
            known.check_label(nsid, &Label::newest([first, second], crc))?;
        }
        self.read_label(index + 1, now)
    }

    /// Claims the volume. A target without the extension needs no claim.
    fn send_claim(&mut self, now: u64) -> Result<Option<Step>, Failure> {
        let Some(claim) = &self.config.claim else { return Ok(None) };
        let (command, data) = (wire::claim_command(), claim.encode());
        self.association.ask(ControlQueue::Admin, 0, command, Data::Bytes(&data), now)?;
        Ok(Some(Step::Claim))
    }

    /// Checks the answer to the claim, if it has arrived.
    fn check_claim_answer(&mut self) -> Result<Option<Step>, Failure> {
        let Some(answer) = self.association.next_answer() else { return Ok(Some(Step::Claim)) };
        let status = answer.cqe.status();
        if status.is_ok() {
            return Ok(None);
        }
        let why = UnreachableCause::Claim(status);
        if !retry::is_claim_passing(status) {
            return Err(Failure::Final { why, stream_cause: Cause::Status(status.code()) });
        }
        Err(Failure::Passing(why))
    }
}

impl Failure {
    fn passing(error: &AssociationError) -> Self {
        Self::Passing(error.clone().into())
    }
}

impl From<AskError> for Failure {
    fn from(error: AskError) -> Self {
        Self::Passing(error.into())
    }
}

impl From<Changed> for Failure {
    fn from(changed: Changed) -> Self {
        let stream_cause = match changed {
            Changed::TakenOver(_) => Cause::Status(status::STALE_GENERATION.code()),
            _ => Cause::Changed,
        };
        Self::Final { why: changed.into(), stream_cause }
    }
}
