//! The phases of an opening: the commands of each phase, the handling of their answers, and the
//! choice of the next phase.
//!
//! ```text
//! begin_phase: queues the commands → on_job_answer, for each answer → end_phase: checks the answers
//!      ↑___________________________________________________________________|
//! ```

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::{Attribute, GroupTag, Kind, Member, Seq, StreamId};
use riopipe_order::entry::Position;
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::recovery::{self, DriveExtent, ListedEntry, StreamList, StreamPlan};

use super::pages::Lists;
use super::{
    Call, Mode, Opening, OpeningError, OpeningMember, Outcome, Pending, Phase, StreamOutcome,
    UNDO_BLOCKS_MAX,
};
use crate::claim::{ClaimError, Intent, Plan, is_behind, plan};
use crate::wire::list::{Page, SETTLE_STREAMS_MAX, Settle, SettleStream};
use crate::wire::{self, Claim, STATUS_LEN, VolumeStatus};

/// The purpose of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// Ask for the status of the volume.
    Ask,
    /// Claim the volume.
    Claim,
    /// List the entries in the partition of `stream`, from this position on.
    List { stream: StreamId, from: Position },
    /// Zero these blocks.
    Undo(DriveExtent),
    /// Flush this drive.
    Flush(Member),
    /// Record the prefixes of this batch of streams.
    Settle { batch: usize },
}

impl Opening {
    /// Begins the first phase of the mode.
    pub(super) fn begin_first_phase(&mut self) -> Result<(), OpeningError> {
        match self.mode {
            Mode::Open(_) | Mode::DryRun(_) | Mode::Reopen { .. } => self.begin_phase(Phase::Ask),
            Mode::Acknowledge { .. } => self.begin_phase(Phase::List),
        }
    }

    /// Ends the present phase if all its commands are done, and begins the next one. A pause is ended
    /// only by [`end_pause`](Self::end_pause).
    pub(super) fn end_phase_if_done(&mut self) -> Result<(), OpeningError> {
        let busy = self.queues.iter().any(|queue| queue.in_flight > 0 || !queue.waiting.is_empty());
        if busy || self.phase.is_pause() || self.phase == Phase::Over {
            return Ok(());
        }
        self.end_phase()
    }

    /// Begins a phase: queues its commands. A phase without commands ends at once.
    fn begin_phase(&mut self, phase: Phase) -> Result<(), OpeningError> {
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
            }
            Phase::Flush => {
                for (server, member) in self.drives_to_flush() {
                    self.queue_job(server, Job::Flush(member));
                }
            }
            Phase::Settle => {
                let batches = self.streams_to_settle.len().div_ceil(SETTLE_STREAMS_MAX);
                let mut servers = self.logged_servers();
                if probe::planted(Plant::T9RestartEarly) {
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
    fn queue_job(&mut self, server: usize, job: Job) {
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
            Phase::List => {
                match self.decide() {
                    Err(error) if self.may_give_up(&error) => {
                        self.logs_invalid = true;
                        if !matches!(self.mode, Mode::DryRun(_)) {
                            return self.claim_again();
                        }
                        self.decide()?;
                    }
                    decided => decided?,
                }
                match self.mode {
                    Mode::DryRun(_) => Phase::Over,
                    Mode::Acknowledge { .. } => Phase::Settle,
                    Mode::Open(_) | Mode::Reopen { .. } => Phase::Decided,
                }
            }
            Phase::Decided if self.streams_to_settle.is_empty() => Phase::Over,
            Phase::Decided if probe::planted(Plant::T9SettleEarly) => Phase::Settle,
            Phase::Decided => Phase::Undo,
            Phase::Undo => Phase::Flush,
            Phase::Flush if probe::planted(Plant::T9SettleEarly) => Phase::Over,
            Phase::Flush => Phase::Settle,
            Phase::Settle if probe::planted(Plant::T9SettleEarly) && !self.is_acknowledgement() => {
                Phase::Undo
            }
            Phase::Settle | Phase::Over => Phase::Over,
        };
        self.begin_phase(next)
    }

    /// Checks that no target knows a later owner. Without this check, a target would let a fenced
    /// owner read the lists while the later owner is unreachable, and the lists no longer show the
    /// fenced owner's state (T8).
    fn check_ownership(&mut self) -> Result<(), OpeningError> {
        let later = |(_, status): &&(usize, VolumeStatus)| status.generation > self.generation;
        if let Some((server, status)) = self.statuses.iter().find(later) {
            return Err(taken_over(*server, status));
        }
        // The statuses concern all streams, also those that run now. So they must not affect the
        // decision over the streams that are recovered.
        self.statuses.clear();
        Ok(())
    }

    /// Whether logs that don't fit together, or can't be read, may be given up (T26).
    fn may_give_up(&self, error: &OpeningError) -> bool {
        let accepts = self.intent().is_some_and(|intent| intent.accept_lost_log);
        let is_about_logs = match error {
            OpeningError::Decide(_) | OpeningError::Outside { .. } => true,
            OpeningError::Refused { status, .. } => status.is(wire::status::LOG_LOST),
            _ => false,
        };
        accepts && is_about_logs && !self.logs_invalid
    }

    /// Claims the volume once more with a higher generation, and reads all lists again. By this claim
    /// each log durably records that it is given up, before recovery uses its content (T26).
    fn claim_again(&mut self) -> Result<(), OpeningError> {
        self.generation = self.generation.checked_add(1).ok_or(ClaimError::Generations)?;
        self.lists = Lists::default();
        self.outcome = Outcome::default();
        self.begin_phase(Phase::Claim)
    }

    /// Whether the content of a target's log is given up with the claim.
    fn gives_up(&self, server: usize) -> bool {
        let accepts = self.intent().is_some_and(|intent| intent.accept_lost_log);
        let is_old = |status: &VolumeStatus| {
            self.intent().is_some_and(|intent| is_behind(status, intent.label_generation))
        };
        let is_invalid = |status: &VolumeStatus| {
            !status.known || status.unlogged || status.damaged || is_old(status)
        };
        accepts
            && self.config.servers[server].logged
            && (self.logs_invalid || self.status_of(server).is_some_and(is_invalid))
    }

    /// Whether the mode only drops lists that the caller has acknowledged (T9).
    fn is_acknowledgement(&self) -> bool {
        matches!(self.mode, Mode::Acknowledge { .. })
    }

    /// The intent of a mode that claims the volume, or would claim it.
    fn intent(&self) -> Option<&Intent> {
        match &self.mode {
            Mode::Open(intent) | Mode::DryRun(intent) => Some(intent),
            Mode::Reopen { .. } | Mode::Acknowledge { .. } => None,
        }
    }

    /// The reachable targets that have the extension.
    fn servers_with_extension(&self) -> Vec<usize> {
        let servers = self.config.servers.iter().enumerate();
        servers.filter(|(_, s)| s.present && s.has_extension).map(|(i, _)| i).collect()
    }

    /// The targets on which the labels name a log.
    fn logged_servers(&self) -> Vec<usize> {
        let servers = self.config.servers.iter().enumerate();
        servers.filter(|(_, s)| s.present && s.has_extension && s.logged).map(|(i, _)| i).collect()
    }

    /// The targets whose logs are read: all that have one (T20).
    fn servers_to_list(&self) -> Vec<usize> {
        let mut servers = self.logged_servers();
        if matches!(self.mode, Mode::DryRun(_)) {
            // A lost log that is given up is made anew only by the claim, so a dry run can't list it.
            servers.retain(|server| {
                self.status_of(*server)
                    .is_some_and(|status| status.known && !status.unlogged && !status.log_lost)
            });
        }
        if probe::planted(Plant::T20MissingServer) && servers.len() > 1 {
            servers.pop();
        }
        servers
    }

    /// The status of the volume that a target has reported.
    fn status_of(&self, server: usize) -> Option<&VolumeStatus> {
        self.statuses.iter().find(|(at, _)| *at == server).map(|(_, status)| status)
    }

    /// The streams that are recovered or acknowledged.
    fn streams(&self) -> Vec<StreamId> {
        match &self.mode {
            Mode::Open(intent) | Mode::DryRun(intent) => {
                (0..intent.streams).map(StreamId).collect()
            }
            Mode::Reopen { streams, .. } | Mode::Acknowledge { streams, .. } => streams.clone(),
        }
    }

    /// Checks by the statuses whether the volume may be claimed, and chooses the new generation.
    fn plan_claim(&self) -> Result<Plan, ClaimError> {
        let Some(intent) = self.intent() else {
            // The mode claims nothing.
            return Ok(Plan::default());
        };
        // A dry run fences no owner. While an owner is active, its writes change the result.
        let is_dry = matches!(self.mode, Mode::DryRun(_));
        let is_active = |status: &VolumeStatus| status.owned && status.lease_left_ms == 0;
        let take_over =
            intent.take_over && !(is_dry && self.statuses.iter().any(|(_, s)| is_active(s)));
        // To give up a log is to make a new one in its place. A target without a log region has no
        // place for it. So the volume is refused before any target is claimed.
        let lacks = |server: &usize| !self.config.servers[*server].has_log;
        if let Some(target) = self.logged_servers().into_iter().find(lacks) {
            probe::hit(Rare::LogRefused);
            return Err(ClaimError::NoLog { target });
        }
        let logged = |server: usize| self.config.servers[server].logged;
        plan(&Intent { take_over, ..*intent }, &self.statuses, logged)
    }

    /// The target of a member, and the member there.
    fn find_member(&self, member: Member) -> Option<(usize, &OpeningMember)> {
        self.config.servers.iter().enumerate().find_map(|(i, server)| {
            Some((i, server.members.iter().find(|m| m.place.member == member)?))
        })
    }

    /// The namespace of a member on its target.
    fn nsid(&self, member: Member) -> u32 {
        self.find_member(member).map_or(0, |(_, m)| m.place.nsid)
    }

    /// The command for a job.
    pub(super) fn command_for(&self, server: usize, job: &Job) -> Call {
        let volume = self.config.volume;
        let admin = |sqe: Sqe, send: Vec<u8>, receive| Call::Admin { sqe, send, receive };
        match *job {
            Job::Ask => admin(wire::status_command(volume), Vec::new(), STATUS_LEN),
            Job::Claim => admin(wire::claim_command(), self.claim_on(server).encode(), 0),
            Job::List { stream, from } => {
                let expected = self.status_of(server).map(|s| s.live_entries.min(s.slots) as usize);
                let most = self.config.servers[server].transfer_bytes_max;
                let len = self.lists.page_bytes(server as u16, stream, expected, most);
                admin(wire::list_command(volume, stream, from, len), Vec::new(), len)
            }
            Job::Settle { batch } => {
                let batches = self.streams_to_settle.chunks(SETTLE_STREAMS_MAX);
                let streams = batches.skip(batch).take(1).flatten().copied().collect();
                let settle = Settle { volume, generation: self.generation, streams };
                admin(wire::settle_command(), settle.encode(), 0)
            }
            // Without DEAC: deallocated blocks may read as anything (T10).
            Job::Undo(DriveExtent { member, lba, blocks }) => Call::Io {
                sqe: Sqe::write_zeroes(
                    self.nsid(member),
                    lba,
                    blocks as u32,
                    probe::planted(Plant::T10Deallocate),
                ),
            },
            Job::Flush(member) => Call::Io { sqe: Sqe::flush(self.nsid(member)) },
        }
    }

    /// The claim of the volume on a target.
    fn claim_on(&self, at: usize) -> Claim {
        let server = &self.config.servers[at];
        let intent = self.intent();
        let given_up =
            intent.is_some_and(|i| i.accept_lost_log) || probe::planted(Plant::T19BlankLog);
        Claim {
            volume: self.config.volume,
            generation: self.generation,
            // A log that is given up is made anew.
            create: given_up
                && server.logged
                && self.status_of(at).is_some_and(|s| !s.known || s.unlogged),
            give_up: self.gives_up(at),
            take_over: intent.is_some_and(|i| i.take_over),
            unlogged: !server.logged,
            resume: false,
            streams: intent.map_or(0, |i| i.streams),
            slots: 0,
            lease_ms: intent.map_or(0, |i| i.lease_ms),
            members: server.members.iter().map(|m| m.place).collect(),
        }
    }

    /// Handles the answer to the command of a job.
    pub(super) fn on_job_answer(
        &mut self,
        server: usize,
        job: Job,
        answer: Result<&[u8], Status>,
    ) -> Result<(), OpeningError> {
        if let Err(status) = answer
            && !matches!(job, Job::Ask | Job::Claim)
            && !matches!(self.mode, Mode::DryRun(_))
            && is_of_another_owner(status)
        {
            return Err(OpeningError::TakenOver { server, by: None });
        }
        let refused =
            |doing, stream| move |status| OpeningError::Refused { server, doing, stream, status };
        match job {
            Job::Ask => {
                let data = answer.map_err(refused("asking for the volume's state", None))?;
                let status = VolumeStatus::decode(data)
                    .filter(|status| status.volume == self.config.volume)
                    .ok_or(OpeningError::Nonsense {
                        server,
                        stream: None,
                        what: "the volume's state that the target reports is not valid",
                    })?;
                self.statuses.push((server, status));
                self.statuses.sort_by_key(|(server, _)| *server);
            }
            Job::Claim => {
                if let Err(status) = answer {
                    if status.is(wire::status::OWNED) {
                        let owner = "another host".into();
                        let lease_left_ms = 0;
                        return Err(
                            ClaimError::Owned { target: server, owner, lease_left_ms }.into()
                        );
                    }
                    return Err(refused("claiming the volume", None)(status));
                }
                // The targets are claimed one after the other, in the members' order, which is the
                // same for every initiator. So if two initiators claim the volume at the same time,
                // one of them gets all targets.
                if let Some(next) =
                    self.servers_with_extension().into_iter().find(|at| *at > server)
                {
                    self.queue_job(next, Job::Claim);
                }
            }
            Job::List { stream, from } => {
                let answer = answer.map_err(refused("reading a stream's log", Some(stream)));
                let data = match answer {
                    Err(error) if self.may_give_up(&error) => {
                        // `decide` handles the error, once no command is in flight any more.
                        self.log_error = Some(error);
                        self.commands_done += 1;
                        return Ok(());
                    }
                    answer => answer?,
                };
                if !self.add_page(server, stream, from, data)? {
                    return Ok(());
                }
            }
            Job::Undo(DriveExtent { member, lba, blocks }) => {
                if let Err(status) = answer {
                    let (member, blocks) = (member.0, blocks as u32);
                    return Err(OpeningError::Undo { server, member, lba, blocks, status });
                }
                probe::hit(Rare::Undo);
                self.outcome.counts.undos += 1;
                self.outcome.counts.undone_blocks += blocks;
            }
            Job::Flush(member) => {
                if let Err(status) = answer {
                    return Err(OpeningError::Flush { server, member: member.0, status });
                }
                self.outcome.counts.flushes += 1;
            }
            Job::Settle { .. } => {
                answer.map_err(refused("recording the prefix in the log", None))?;
                self.outcome.counts.settles += 1;
            }
        }
        self.commands_done += 1;
        Ok(())
    }

    /// Adds a page to the list of a partition. Requests the next page if there is one. Returns whether
    /// this was the last.
    fn add_page(
        &mut self,
        server: usize,
        stream: StreamId,
        from: Position,
        data: &[u8],
    ) -> Result<bool, OpeningError> {
        let nonsense = |what| OpeningError::Nonsense { server, stream: Some(stream), what };
        let page = Page::decode(data)
            .filter(|page| page.volume == self.config.volume)
            .ok_or(nonsense("a page of the log's list is not valid"))?;
        self.outcome.counts.pages += 1;
        match self.lists.add_page(server as u16, stream, from, page).map_err(nonsense)? {
            Some(from) => {
                let job = Job::List { stream, from };
                self.queues[server].waiting.push_front(Pending { job, attempts: 0 });
                Ok(false)
            }
            None => Ok(true),
        }
    }

    /// Whether an entry's blocks lie in its drive's data area. A member that does not exist counts as
    /// inside: [`plan_stream`](Self::plan_stream) reports it.
    fn is_inside(&self, a: &Attribute) -> bool {
        let inside = |m: &OpeningMember| {
            a.lba >= m.start && a.lba + u64::from(a.blocks) <= m.start + m.blocks
        };
        a.kind == Kind::Flush || self.find_member(a.member).is_none_or(|(_, m)| inside(m))
    }

    /// The lists of a stream from all targets.
    ///
    /// # Errors
    /// An entry's blocks lie outside of the data area. The labels lie there, and undo must never zero
    /// them (T19).
    fn lists_of(&self, stream: StreamId, servers: &[u16]) -> Result<Vec<StreamList>, OpeningError> {
        let mut lists = self.lists.lists_of(stream, servers);
        // A dry run gives no log up. To report the result of that, it treats such a log as in doubt.
        if matches!(self.mode, Mode::DryRun(_)) {
            for server in self.logged_servers().into_iter().filter(|server| self.gives_up(*server))
            {
                let server = server as u16;
                match lists.iter_mut().find(|list| list.server == server) {
                    Some(list) => list.in_doubt = true,
                    None => lists.push(StreamList {
                        server,
                        released: Seq::ZERO,
                        newest_tag: GroupTag::NONE,
                        settled: false,
                        in_doubt: true,
                        entries: Vec::new(),
                    }),
                }
            }
        }
        let in_doubt = lists.iter().any(|list| list.in_doubt);
        for list in &mut lists {
            if in_doubt {
                list.entries.retain(|entry| self.is_inside(&entry.attribute));
            }
            let outside = |entry: &&ListedEntry| !self.is_inside(&entry.attribute);
            if let Some(ListedEntry { attribute: a, .. }) = list.entries.iter().find(outside) {
                return Err(OpeningError::Outside {
                    server: usize::from(list.server),
                    stream,
                    seq: a.seq,
                    member: a.member.0,
                    lba: a.lba,
                    blocks: a.blocks,
                });
            }
        }
        Ok(lists)
    }

    /// Finds the recovered seq of every stream, and the partitions that have to be settled.
    fn decide(&mut self) -> Result<(), OpeningError> {
        if let Some(error) = self.log_error.take() {
            return Err(error);
        }
        let listed = self.servers_to_list();
        let servers: Vec<u16> = listed.iter().map(|server| *server as u16).collect();
        let (entries, torn) = self.lists.counts();
        (self.outcome.counts.entries, self.outcome.counts.torn) = (entries, torn);
        // A target may report that it is unrecovered although its lists show nothing to settle. Then
        // all its partitions are settled.
        let clears_all = listed.iter().any(|server| {
            self.status_of(*server).is_some_and(|status| status.unrecovered)
                && !self.streams().iter().any(|s| self.lists.is_unsettled(*s, *server as u16))
        });
        let mut streams = Vec::new();
        let mut settle = Vec::new();
        for stream in self.streams() {
            let lists = self.lists_of(stream, &servers)?;
            let plan = self.plan_stream(stream, &lists)?;
            let acknowledges = self.is_acknowledgement();
            let settled_everywhere = usize::from(plan.settled) == servers.len();
            if acknowledges && plan.settled == 0 {
                return Err(OpeningError::NotPending { stream });
            }
            if acknowledges && !settled_everywhere {
                return Err(OpeningError::NotRecovered { stream });
            }
            let has_findings = !plan.in_place.is_empty() || !plan.in_doubt.is_empty();
            let pending = has_findings && !acknowledges;
            let unsettled = servers.iter().any(|server| self.lists.is_unsettled(stream, *server));
            let has_kept_list = lists.iter().any(|list| list.settled && !list.entries.is_empty());
            if clears_all || unsettled || has_kept_list && !(pending && settled_everywhere) {
                let keep = pending && !probe::planted(Plant::T9ForgetInPlace);
                settle.push(SettleStream { stream, keep, k: plan.k, tag: plan.tag });
            }
            streams.push(StreamOutcome { plan, pending });
        }
        self.outcome.needed = !settle.is_empty();
        self.outcome.streams = streams;
        self.streams_to_settle = settle;
        Ok(())
    }

    /// Finds the recovered seq of one stream, and the blocks to undo.
    fn plan_stream(
        &self,
        stream: StreamId,
        lists: &[StreamList],
    ) -> Result<StreamPlan, OpeningError> {
        let server_of = |member| self.find_member(member).map(|(server, _)| server as u16);
        Ok(recovery::decide(stream, lists, server_of)?)
    }

    /// The extents to be zeroed, of all streams together: adjacent ones joined, then cut to the
    /// limit of one command.
    fn extents_to_undo(&self) -> Vec<DriveExtent> {
        let plans = self.outcome.streams.iter().map(|stream| &stream.plan);
        let all = plans.flat_map(|plan| plan.undo.iter().copied()).collect();
        let mut cut = Vec::new();
        for DriveExtent { member, mut lba, blocks } in recovery::join(all) {
            let end = lba + blocks;
            while lba < end {
                let blocks = (end - lba).min(u64::from(UNDO_BLOCKS_MAX));
                cut.push(DriveExtent { member, lba, blocks });
                lba += blocks;
            }
        }
        cut
    }

    /// The drives to be flushed: every volatile drive of the targets that have logs. A drive without
    /// anything to undo is flushed, too. Its cache may hold an in-place update of a dropped group, and
    /// the content that the caller reads before it acknowledges the update must not change again.
    fn drives_to_flush(&self) -> Vec<(usize, Member)> {
        if probe::planted(Plant::T9UndoNotFlushed) {
            return Vec::new();
        }
        let members = self.logged_servers().into_iter().flat_map(|server| {
            let members = &self.config.servers[server].members;
            members.iter().filter(|m| m.volatile).map(move |m| (server, m.place.member))
        });
        members.collect()
    }
}

/// The error that the volume has another owner, which `status` names.
fn taken_over(server: usize, status: &VolumeStatus) -> OpeningError {
    let by = (status.owned && !status.own).then(|| status.owner.clone());
    OpeningError::TakenOver { server, by }
}

/// Whether a target has refused a command with this status because another initiator is the owner
/// now (T8, T21).
fn is_of_another_owner(status: Status) -> bool {
    use wire::status::{GUARDED, NOT_OWNER, STALE_GENERATION};
    [NOT_OWNER, STALE_GENERATION, GUARDED].iter().any(|one| one.is(status))
}
