//! The phases of an opening: the commands of each phase, and the choice of the next phase.
//!
//! ```text
//! begin_phase: queues the commands → on_job_answer, for each answer → end_phase: checks the answers
//!      ↑___________________________________________________________________|
//! ```

use alloc::vec::Vec;

use riopipe_order::attribute::{Member, StreamId};
use riopipe_order::entry::Position;
use riopipe_order::probe::{self, Plant, Rare};

use super::jobs::Job;
use super::pages::Lists;
use super::{
    Mode, Opening, OpeningConfig, OpeningError, OpeningMember, OpeningServer, Outcome, Pending,
    Phase, ServerQueue,
};
use crate::claim::{ClaimError, Intent, Plan, is_behind, plan};
use crate::wire::list::SETTLE_STREAMS_MAX;
use crate::wire::{self, VolumeStatus};

impl Opening {
    /// Begins the first phase of the mode.
    pub(super) fn begin_first_phase(&mut self) -> Result<(), OpeningError> {
        match self.mode {
            Mode::Open(_) | Mode::DryRun(_) | Mode::Reopen { .. } => self.begin_phase(Phase::Ask),
            Mode::Acknowledge { .. } => self.begin_phase(Phase::List),
        }
    }

    /// Ends the present phase if all its commands are done, and begins the next one. A pause is
    /// ended only by [`end_pause`](Self::end_pause).
    pub(super) fn end_phase_if_done(&mut self) -> Result<(), OpeningError> {
        let is_busy = |queue: &ServerQueue| queue.in_flight > 0 || !queue.waiting.is_empty();
        if self.queues.iter().any(is_busy) || self.phase.is_pause() || self.phase == Phase::Over {
            return Ok(());
        }
        self.end_phase()
    }

    /// Begins a phase: queues its commands. A phase without commands ends at once.
    pub(super) fn begin_phase(&mut self, phase: Phase) -> Result<(), OpeningError> {
        self.phase = phase;
        self.commands_done = 0;
        match phase {
            Phase::Ask | Phase::AskAgain => {
                self.statuses.clear();
                for server in self.servers_with_extension() {
                    self.queue_job(server, Job::Ask);
                }
            }
            Phase::Claim => {
                if let Some(first) = self.servers_with_extension().first() {
                    self.queue_job(*first, Job::Claim);
                }
            }
            Phase::List => {
                for stream in self.streams() {
                    for server in self.servers_to_list() {
                        self.queue_job(server, Job::List { stream, from: Position(0) });
                    }
                }
            }
            Phase::Undo => {
                for extent in self.extents_to_undo() {
                    if let Some((server, _)) = self.find_member(extent.member) {
                        self.queue_job(server, Job::Undo(extent));
                    }
                }
                for redirected in self.updates_to_copy() {
                    if let Some((server, _)) = self.find_member(redirected.home.member) {
                        self.queue_job(server, Job::ReadPrepared(redirected));
                    }
                }
            }
            Phase::Flush => {
                for (server, member) in self.drives_to_flush() {
                    self.queue_job(server, Job::Flush(member));
                }
            }
            Phase::Settle => {
                let batches = self.streams_to_settle.len().div_ceil(SETTLE_STREAMS_MAX);
                let mut servers = self.logged_servers();
                if probe::is_bug_planted(Plant::T9RestartEarly) {
                    servers.truncate(1);
                }
                for server in servers {
                    for batch in 0..batches {
                        self.queue_job(server, Job::Settle { batch });
                    }
                }
            }
            Phase::Claimed | Phase::Decided | Phase::Over => {}
        }
        self.commands_total = match phase {
            Phase::Claim => self.servers_with_extension().len(),
            _ => self.queues.iter().map(|queue| queue.waiting.len()).sum(),
        };
        self.end_phase_if_done()
    }

    /// Queues a command for a target.
    pub(super) fn queue_job(&mut self, server: usize, job: Job) {
        self.queues[server].waiting.push_back(Pending { job, attempts: 0 });
    }

    /// Ends the present phase: checks the answers of its commands, and begins the next phase.
    pub(super) fn end_phase(&mut self) -> Result<(), OpeningError> {
        let next = match self.phase {
            Phase::Ask if matches!(self.mode, Mode::Reopen { .. }) => {
                self.check_ownership()?;
                Phase::List
            }
            Phase::Ask => {
                let Plan { generation, .. } = self.plan_claim()?;
                if matches!(self.mode, Mode::DryRun(_)) {
                    Phase::List
                } else {
                    self.generation = generation;
                    Phase::Claim
                }
            }
            Phase::Claim => Phase::AskAgain,
            Phase::AskAgain => {
                let other = self.statuses.iter().find(|(_, status)| !status.own);
                if let Some((server, status)) = other {
                    return Err(taken_over(*server, status));
                }
                self.plan_claim()?;
                Phase::Claimed
            }
            Phase::Claimed => Phase::List,
            Phase::List => match self.decide() {
                Err(error) if self.may_give_up(&error) => {
                    self.logs_invalid = true;
                    if !matches!(self.mode, Mode::DryRun(_)) {
                        return self.claim_again();
                    }
                    self.decide()?;
                    Phase::Over
                }
                decided => {
                    decided?;
                    self.phase_after_decision()
                }
            },
            Phase::Decided if self.streams_to_settle.is_empty() => Phase::Over,
            Phase::Decided if probe::is_bug_planted(Plant::T9SettleEarly) => Phase::Settle,
            Phase::Decided => Phase::Undo,
            Phase::Undo => Phase::Flush,
            Phase::Flush if probe::is_bug_planted(Plant::T9SettleEarly) => Phase::Over,
            Phase::Flush => Phase::Settle,
            Phase::Settle
                if probe::is_bug_planted(Plant::T9SettleEarly) && !self.is_acknowledgement() =>
            {
                Phase::Undo
            }
            Phase::Settle | Phase::Over => Phase::Over,
        };
        self.begin_phase(next)
    }

    /// The phase that follows the decision over all streams.
    fn phase_after_decision(&self) -> Phase {
        match self.mode {
            Mode::DryRun(_) => Phase::Over,
            Mode::Acknowledge { .. } => Phase::Settle,
            Mode::Open(_) | Mode::Reopen { .. } => Phase::Decided,
        }
    }

    /// Checks that no target knows a later owner. Without this check, a target would let a fenced
    /// owner read the lists while the later owner is unreachable, and the lists no longer show the
    /// fenced owner's state (trap T8).
    pub(super) fn check_ownership(&mut self) -> Result<(), OpeningError> {
        let later = |(_, status): &&(usize, VolumeStatus)| status.generation > self.generation;
        if let Some((server, status)) = self.statuses.iter().find(later) {
            return Err(taken_over(*server, status));
        }
        // The statuses concern all streams, also those that run now. So they must not affect the
        // decision over the streams that are recovered.
        self.statuses.clear();
        Ok(())
    }

    /// Whether logs that don't fit together, or can't be read, may be given up (trap T26).
    pub(super) fn may_give_up(&self, error: &OpeningError) -> bool {
        let accepts = self.intent().is_some_and(|intent| intent.accept_lost_log);
        let is_about_logs = match error {
            OpeningError::Decide(_) | OpeningError::Outside { .. } => true,
            OpeningError::Refused { status, .. } => status.is(wire::status::LOG_LOST),
            _ => false,
        };
        accepts && is_about_logs && !self.logs_invalid
    }

    /// Claims the volume once more with a higher generation, and reads all lists again. By this
    /// claim each log durably records that it is given up, before recovery uses its content (trap
    /// T26).
    pub(super) fn claim_again(&mut self) -> Result<(), OpeningError> {
        self.generation = self.generation.checked_add(1).ok_or(ClaimError::Generations)?;
        self.lists = Lists::default();
        self.outcome = Outcome::default();
        self.begin_phase(Phase::Claim)
    }

    /// Whether the content of a target's log is given up with the claim. If the volume goes on without
    /// one of its logs, all others are given up, too: each records durably that the order is not
    /// known as a whole, so that no later recovery undoes anything (trap T26).
    pub(super) fn gives_up(&self, server: usize) -> bool {
        let Some(intent) = self.intent() else { return false };
        if !intent.accept_lost_log || !self.config.servers[server].logged {
            return false;
        }
        let is_invalid = |status: &VolumeStatus| {
            !status.known
                || status.unlogged
                || status.damaged
                || is_behind(status, intent.label_generation)
        };
        self.logs_invalid || self.status_of(server).is_some_and(is_invalid)
    }

    /// Whether the mode only drops lists that the caller has acknowledged (trap T9).
    pub(super) fn is_acknowledgement(&self) -> bool {
        matches!(self.mode, Mode::Acknowledge { .. })
    }

    /// The intent of a mode that claims the volume, or would claim it.
    pub(super) fn intent(&self) -> Option<&Intent> {
        match &self.mode {
            Mode::Open(intent) | Mode::DryRun(intent) => Some(intent),
            Mode::Reopen { .. } | Mode::Acknowledge { .. } => None,
        }
    }

    /// The reachable targets that have the extension.
    pub(super) fn servers_with_extension(&self) -> Vec<usize> {
        let servers = self.config.servers.iter().enumerate();
        let usable = servers.filter(|(_, server)| server.present && server.has_extension);
        usable.map(|(server, _)| server).collect()
    }

    /// The targets on which the labels name a log.
    pub(super) fn logged_servers(&self) -> Vec<usize> {
        let mut servers = self.servers_with_extension();
        servers.retain(|server| self.config.servers[*server].logged);
        servers
    }

    /// The targets whose logs are read: all that have one (trap T20).
    pub(super) fn servers_to_list(&self) -> Vec<usize> {
        let mut servers = self.logged_servers();
        if matches!(self.mode, Mode::DryRun(_)) {
            // A lost log that is given up is made anew only by the claim, so a dry run can't list
            // it.
            servers.retain(|server| {
                self.status_of(*server)
                    .is_some_and(|status| status.known && !status.unlogged && !status.log_lost)
            });
        }
        if probe::is_bug_planted(Plant::T20MissingServer) && servers.len() > 1 {
            servers.pop();
        }
        servers
    }

    /// The status of the volume that a target has reported.
    pub(super) fn status_of(&self, server: usize) -> Option<&VolumeStatus> {
        self.statuses.iter().find(|(at, _)| *at == server).map(|(_, status)| status)
    }

    /// The streams that are recovered or acknowledged.
    pub(super) fn streams(&self) -> Vec<StreamId> {
        match &self.mode {
            Mode::Open(intent) | Mode::DryRun(intent) => {
                (0..intent.streams).map(StreamId).collect()
            }
            Mode::Reopen { streams, .. } | Mode::Acknowledge { streams, .. } => streams.clone(),
        }
    }

    /// Checks by the statuses whether the volume may be claimed, and chooses the new generation.
    pub(super) fn plan_claim(&self) -> Result<Plan, ClaimError> {
        let Some(intent) = self.intent() else {
            // The mode claims nothing.
            return Ok(Plan::default());
        };
        // A dry run fences no owner. While an owner is active, its writes change the result.
        let is_dry_run = matches!(self.mode, Mode::DryRun(_));
        let mut statuses = self.statuses.iter().map(|(_, status)| status);
        let has_active_owner = statuses.any(|status| status.owned && status.lease_left_ms == 0);
        let take_over = intent.take_over && !(is_dry_run && has_active_owner);
        plan_opening(&self.config, &Intent { take_over, ..*intent }, &self.statuses)
    }

    /// The target of a member, and the member there.
    pub(super) fn find_member(&self, member: Member) -> Option<(usize, &OpeningMember)> {
        self.config.servers.iter().enumerate().find_map(|(server, config)| {
            let mut members = config.members.iter();
            Some((server, members.find(|found| found.place.member == member)?))
        })
    }

    /// The namespace of a member on its target.
    pub(super) fn nsid(&self, member: Member) -> u32 {
        self.find_member(member).map_or(0, |(_, found)| found.place.nsid)
    }
}

/// Decides by the statuses whether the volume may be claimed with this intent, and with which
/// generation. `statuses` has the number and the status of each target that has the extension.
///
/// # Errors
/// The first reason found for which the volume can't be claimed. No target was asked to do anything.
pub fn plan_opening(
    config: &OpeningConfig,
    intent: &Intent,
    statuses: &[(usize, VolumeStatus)],
) -> Result<Plan, ClaimError> {
    // The volume is refused before any target is claimed.
    let mut servers = config.servers.iter();
    let lacks_log = |server: &OpeningServer| {
        server.present && server.has_extension && server.logged && !server.has_log
    };
    if let Some(target) = servers.position(lacks_log) {
        probe::count_rare(Rare::LogRefused);
        return Err(ClaimError::NoLog { target });
    }
    plan(intent, statuses, |server| config.servers[server].logged)
}

/// The error that the volume has another owner, which `status` names.
fn taken_over(server: usize, status: &VolumeStatus) -> OpeningError {
    let by = (status.owned && !status.own).then(|| status.owner.clone());
    OpeningError::TakenOver { server, by }
}
