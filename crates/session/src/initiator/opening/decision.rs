//! The decision of an opening: the recovered seq of each stream, the blocks to be undone, and the
//! partitions to be settled. The rule itself is in [`recovery::decide`].

use alloc::vec::Vec;

use riopipe_order::attribute::{Attribute, Kind, Member, StreamId};
use riopipe_order::probe::{self, Plant};
use riopipe_order::recovery::{self, DriveExtent, Redirected, StreamList, StreamPlan};

use super::{COPY_BLOCKS_MAX, Mode, Opening, OpeningError, StreamOutcome, UNDO_BLOCKS_MAX};
use crate::wire::list::SettleStream;

impl Opening {
    /// Finds the recovered seq of every stream, and the partitions that have to be settled.
    pub(super) fn decide(&mut self) -> Result<(), OpeningError> {
        if let Some(error) = self.log_error.take() {
            return Err(error);
        }
        let servers: Vec<u16> =
            self.servers_to_list().iter().map(|server| *server as u16).collect();
        let (entries, torn) = self.lists.counts();
        (self.outcome.counts.entries, self.outcome.counts.torn) = (entries, torn);
        let settle_all = servers.iter().any(|server| self.is_unrecovered_without_cause(*server));
        let (mut outcomes, mut streams_to_settle) = (Vec::new(), Vec::new());
        for stream in self.streams() {
            let lists = self.lists_of(stream, &servers)?;
            let plan = self.plan_stream(stream, &lists)?;
            let is_settled_everywhere = usize::from(plan.settled) == servers.len();
            if self.is_acknowledgement() {
                check_acknowledged(stream, &plan, is_settled_everywhere)?;
            }
            let has_findings = !plan.in_place.is_empty() || !plan.in_doubt.is_empty();
            // Findings are kept in the log until the caller has acknowledged them.
            let pending = has_findings && !self.is_acknowledgement();
            let is_unsettled =
                servers.iter().any(|server| self.lists.is_unsettled(stream, *server));
            let has_kept_list = lists.iter().any(|list| list.settled && !list.entries.is_empty());
            let is_kept_list_due = has_kept_list && !(pending && is_settled_everywhere);
            if settle_all || is_unsettled || is_kept_list_due {
                let keep = pending && !probe::is_bug_planted(Plant::T9ForgetInPlace);
                streams_to_settle.push(SettleStream { stream, keep, k: plan.k, tag: plan.tag });
            }
            outcomes.push(StreamOutcome { plan, pending });
        }
        self.outcome.needed = !streams_to_settle.is_empty();
        self.outcome.streams = outcomes;
        self.streams_to_settle = streams_to_settle;
        Ok(())
    }

    /// Whether a target reports that it is unrecovered although its lists show nothing to settle.
    /// Then all its partitions are settled.
    fn is_unrecovered_without_cause(&self, server: u16) -> bool {
        let status = self.status_of(usize::from(server));
        let is_unrecovered = status.is_some_and(|status| status.unrecovered);
        let mut streams = self.streams().into_iter();
        is_unrecovered && !streams.any(|stream| self.lists.is_unsettled(stream, server))
    }

    /// The lists of a stream from all targets.
    ///
    /// # Errors
    /// An entry's blocks lie outside of the data area. The labels lie there, and undo must never
    /// zero them (trap T19).
    fn lists_of(&self, stream: StreamId, servers: &[u16]) -> Result<Vec<StreamList>, OpeningError> {
        let mut lists = self.lists.lists_of(stream, servers);
        if matches!(self.mode, Mode::DryRun(_)) {
            self.mark_logs_to_give_up(&mut lists);
        }
        let losing = self.config.servers.iter().position(|server| server.loses_log);
        lists.extend(losing.map(|server| StreamList::of_lost_log(server as u16)));
        // If a log is in doubt, nothing is undone. Then an entry outside of the data area is only
        // left out.
        if lists.iter().any(|list| list.in_doubt) {
            for list in &mut lists {
                list.entries.retain(|entry| self.is_inside(&entry.attribute));
            }
        }
        for list in &lists {
            let mut entries = list.entries.iter().map(|entry| &entry.attribute);
            if let Some(outside) = entries.find(|attribute| !self.is_inside(attribute)) {
                return Err(OpeningError::Outside {
                    server: usize::from(list.server),
                    stream,
                    seq: outside.seq,
                    member: outside.member.0,
                    lba: outside.lba,
                    blocks: outside.blocks,
                });
            }
        }
        Ok(lists)
    }

    /// Marks the lists of logs that an opening would give up as in doubt. A dry run gives no log
    /// up, but it reports the result that this would have.
    fn mark_logs_to_give_up(&self, lists: &mut Vec<StreamList>) {
        for server in self.logged_servers() {
            if !self.gives_up(server) {
                continue;
            }
            let server = server as u16;
            match lists.iter_mut().find(|list| list.server == server) {
                Some(list) => list.in_doubt = true,
                None => lists.push(StreamList::of_lost_log(server)),
            }
        }
    }

    /// Whether an entry's blocks lie in its drive's data area. An entry of a FLUSH has no blocks. A
    /// member that does not exist counts as inside: [`plan_stream`](Self::plan_stream) reports it.
    fn is_inside(&self, attribute: &Attribute) -> bool {
        if attribute.kind == Kind::Flush {
            return true;
        }
        let Some((_, member)) = self.find_member(attribute.member) else { return true };
        let end = attribute.lba + u64::from(attribute.blocks);
        let is_in_data_area = attribute.lba >= member.start && end <= member.start + member.blocks;
        let prepared_end =
            attribute.prepared_block().map(|first| u64::from(first) + u64::from(attribute.blocks));
        is_in_data_area && prepared_end.is_none_or(|end| end <= u64::from(member.prepare_blocks))
    }

    /// Finds the recovered seq of one stream, and the blocks to undo.
    pub(super) fn plan_stream(
        &self,
        stream: StreamId,
        lists: &[StreamList],
    ) -> Result<StreamPlan, OpeningError> {
        let server_of = |member| self.find_member(member).map(|(server, _)| server as u16);
        Ok(recovery::decide(stream, lists, server_of)?)
    }

    /// The extents to be zeroed, of all streams together: adjacent ones joined, then cut to the
    /// limit of one command.
    pub(super) fn extents_to_undo(&self) -> Vec<DriveExtent> {
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

    /// The redirected updates to be copied home, of all streams, cut to the limit of one command.
    pub(super) fn updates_to_copy(&self) -> Vec<Redirected> {
        let plans = self.outcome.streams.iter().map(|stream| &stream.plan);
        let mut cut = Vec::new();
        for Redirected { mut home, mut prepared_block } in
            plans.flat_map(|plan| plan.redirected.iter().copied())
        {
            while home.blocks > 0 {
                let blocks = home.blocks.min(COPY_BLOCKS_MAX.into());
                cut.push(Redirected { home: DriveExtent { blocks, ..home }, prepared_block });
                home.lba += blocks;
                home.blocks -= blocks;
                prepared_block += blocks as u32;
            }
        }
        cut
    }

    /// The drives to be flushed: every volatile drive of the targets that have or lose logs. A drive
    /// without anything to undo is flushed, too. Its cache may hold an in-place update of a dropped
    /// group, and the content that the caller reads before it acknowledges the update must not
    /// change again.
    pub(super) fn drives_to_flush(&self) -> Vec<(usize, Member)> {
        if probe::is_bug_planted(Plant::T9UndoNotFlushed) {
            return Vec::new();
        }
        let losing = |server: &usize| self.config.servers[*server].loses_log;
        let losing = (0..self.config.servers.len()).filter(losing);
        let members = self.logged_servers().into_iter().chain(losing).flat_map(|server| {
            let members = &self.config.servers[server].members;
            let volatile = members.iter().filter(|member| member.volatile);
            volatile.map(move |member| (server, member.place.member))
        });
        members.collect()
    }
}

/// Checks that a stream's lists may be dropped, because the caller has acknowledged them.
///
/// # Errors
/// No list is kept for the stream, or the stream has not been recovered on every target.
fn check_acknowledged(
    stream: StreamId,
    plan: &StreamPlan,
    is_settled_everywhere: bool,
) -> Result<(), OpeningError> {
    if plan.settled == 0 {
        return Err(OpeningError::NotPending { stream });
    }
    if !is_settled_everywhere {
        return Err(OpeningError::NotRecovered { stream });
    }
    Ok(())
}
