//! The jobs of an opening: the command of each job, and the handling of its answer.

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::{Member, StreamId};
use riopipe_order::entry::Position;
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::recovery::{DriveExtent, Redirected};

use super::{Call, Mode, Opening, OpeningError, Pending};
use crate::claim::ClaimError;
use crate::wire::list::{Page, SETTLE_STREAMS_MAX, Settle};
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
    /// Read these blocks of a redirected update in the prepare area.
    ReadPrepared(Redirected),
    /// Write them home. `copy` is the number of their data.
    WriteHome { home: DriveExtent, copy: u32 },
    /// Flush this drive.
    Flush(Member),
    /// Record the prefixes of this batch of streams.
    Settle { batch: usize },
}

impl Opening {
    /// The command for a job.
    pub(super) fn command_for(&self, server: usize, job: &Job) -> Call {
        let volume = self.config.volume;
        let admin = |sqe: Sqe, send: Vec<u8>, receive| Call::Admin { sqe, send, receive };
        let io = |sqe: Sqe| Call::Io { sqe, send: Vec::new(), receive: 0 };
        match *job {
            Job::Ask => admin(wire::status_command(volume), Vec::new(), STATUS_LEN),
            Job::Claim => admin(wire::claim_command(), self.claim_on(server).encode(), 0),
            Job::List { stream, from } => {
                let expected = self
                    .status_of(server)
                    .map(|status| status.live_entries.min(status.slots) as usize);
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
            // Without DEAC: deallocated blocks may read as anything (trap T10).
            Job::Undo(DriveExtent { member, lba, blocks }) => io(Sqe::write_zeroes(
                self.nsid(member),
                lba,
                blocks as u32,
                probe::is_bug_planted(Plant::T10Deallocate),
            )),
            Job::ReadPrepared(Redirected { home, prepared_block }) => {
                let area = self.find_member(home.member).map_or(0, |(_, member)| {
                    member.start.saturating_sub(u64::from(member.prepare_blocks))
                });
                let lba = area + u64::from(prepared_block);
                let sqe = Sqe::read(self.nsid(home.member), lba, home.blocks as u32);
                let receive = home.blocks as usize * wire::BLOCK_BYTES;
                Call::Io { sqe, send: Vec::new(), receive }
            }
            Job::WriteHome { home, copy } => {
                let sqe = Sqe::write(self.nsid(home.member), home.lba, home.blocks as u32);
                let send = self.copied.get(&copy).cloned().unwrap_or_default();
                Call::Io { sqe, send, receive: 0 }
            }
            Job::Flush(member) => io(Sqe::flush(self.nsid(member))),
        }
    }

    /// Takes the data of a redirected update that was read, and queues the write of it home.
    fn write_home(&mut self, server: usize, home: DriveExtent, data: &[u8]) {
        let copy = self.copied.last_key_value().map_or(0, |(last, _)| last.wrapping_add(1));
        self.copied.insert(copy, data.to_vec());
        self.queues[server]
            .waiting
            .push_front(Pending { job: Job::WriteHome { home, copy }, attempts: 0 });
    }

    /// The claim of the volume on a target.
    pub(super) fn claim_on(&self, at: usize) -> Claim {
        let server = &self.config.servers[at];
        let intent = self.intent();
        let accepts_loss = intent.is_some_and(|intent| intent.accept_lost_log)
            || probe::is_bug_planted(Plant::T19BlankLog);
        let has_partitions = |status: &VolumeStatus| status.known && !status.unlogged;
        let lacks_partitions = self.status_of(at).is_some_and(|status| !has_partitions(status));
        Claim {
            volume: self.config.volume,
            generation: self.generation,
            // A log that is given up is made anew.
            create: accepts_loss && server.logged && lacks_partitions,
            give_up: self.gives_up(at),
            take_over: intent.is_some_and(|intent| intent.take_over),
            unlogged: !server.logged,
            resume: false,
            streams: intent.map_or(0, |intent| intent.streams),
            slots: 0,
            lease_ms: intent.map_or(0, |intent| intent.lease_ms),
            members: server.members.iter().map(|member| member.place).collect(),
        }
    }

    /// Handles the answer to the command of a job.
    pub(super) fn on_job_answer(
        &mut self,
        server: usize,
        job: Job,
        answer: Result<&[u8], Status>,
    ) -> Result<(), OpeningError> {
        if let Err(status) = answer {
            self.check_still_owner(server, job, status)?;
        }
        let refused =
            |doing| move |status| OpeningError::Refused { server, doing, stream: None, status };
        match job {
            Job::Ask => {
                let data = answer.map_err(refused("asking for the volume's state"))?;
                self.add_status(server, data)?;
            }
            Job::Claim => self.on_claim_answer(server, answer.err())?,
            Job::List { stream, from } => {
                let is_complete = self.on_list_answer(server, stream, from, answer)?;
                if !is_complete {
                    return Ok(());
                }
            }
            Job::Undo(DriveExtent { member, lba, blocks }) => {
                if let Err(status) = answer {
                    let (member, blocks) = (member.0, blocks as u32);
                    return Err(OpeningError::Undo { server, member, lba, blocks, status });
                }
                probe::count_rare(Rare::Undo);
                self.outcome.counts.undos += 1;
                self.outcome.counts.undone_blocks += blocks;
            }
            Job::ReadPrepared(Redirected { home, .. }) => {
                let data = answer.map_err(copy_error(server, home))?;
                if data.len() != home.blocks as usize * wire::BLOCK_BYTES {
                    let what = "a read of the prepare area has another length than asked for";
                    return Err(OpeningError::Nonsense { server, stream: None, what });
                }
                self.write_home(server, home, data);
                return Ok(());
            }
            Job::WriteHome { home, copy } => {
                answer.map_err(copy_error(server, home))?;
                self.copied.remove(&copy);
                probe::count_rare(Rare::RedirectedCopied);
                self.outcome.counts.copied_blocks += home.blocks;
            }
            Job::Flush(member) => {
                if let Err(status) = answer {
                    return Err(OpeningError::Flush { server, member: member.0, status });
                }
                self.outcome.counts.flushes += 1;
            }
            Job::Settle { .. } => {
                answer.map_err(refused("recording the prefix in the log"))?;
                self.outcome.counts.settles += 1;
            }
        }
        self.commands_done += 1;
        Ok(())
    }

    /// Checks that a command has not failed because another initiator owns the volume by now. Such
    /// an error is expected while the volume is not claimed, and in a dry run.
    fn check_still_owner(
        &self,
        server: usize,
        job: Job,
        status: Status,
    ) -> Result<(), OpeningError> {
        let is_after_claim = !matches!(job, Job::Ask | Job::Claim);
        let is_dry_run = matches!(self.mode, Mode::DryRun(_));
        if is_after_claim && !is_dry_run && is_of_another_owner(status) {
            return Err(OpeningError::TakenOver { server, by: None });
        }
        Ok(())
    }

    /// Stores the status of the volume that a target has reported.
    fn add_status(&mut self, server: usize, data: &[u8]) -> Result<(), OpeningError> {
        let status = VolumeStatus::decode(data)
            .filter(|status| status.volume == self.config.volume)
            .ok_or(OpeningError::Nonsense {
                server,
                stream: None,
                what: "the volume's state that the target reports is not valid",
            })?;
        self.statuses.push((server, status));
        self.statuses.sort_by_key(|(server, _)| *server);
        Ok(())
    }

    /// After a target was claimed, queues the claim of the next one. `refusal` is the status with
    /// which the target has refused the claim, if it has.
    ///
    /// The targets are claimed one after the other, in the members' order, which is the same for
    /// every initiator. So if two initiators claim the volume at the same time, one of them gets
    /// all targets.
    fn on_claim_answer(
        &mut self,
        server: usize,
        refusal: Option<Status>,
    ) -> Result<(), OpeningError> {
        if let Some(status) = refusal {
            return Err(refused_claim(server, status));
        }
        let mut servers = self.servers_with_extension().into_iter();
        if let Some(next) = servers.find(|next| *next > server) {
            self.queue_job(next, Job::Claim);
        }
        Ok(())
    }

    /// Handles the answer to a request for a page of a partition's list. Returns whether no further
    /// page is needed.
    fn on_list_answer(
        &mut self,
        server: usize,
        stream: StreamId,
        from: Position,
        answer: Result<&[u8], Status>,
    ) -> Result<bool, OpeningError> {
        let doing = "reading a stream's log";
        let refused =
            |status| OpeningError::Refused { server, doing, stream: Some(stream), status };
        match answer.map_err(refused) {
            Ok(data) => self.add_page(server, stream, from, data),
            Err(error) if self.may_give_up(&error) => {
                // `decide` handles the error, once no command is in flight any more.
                self.log_error = Some(error);
                Ok(true)
            }
            Err(error) => Err(error),
        }
    }

    /// Adds a page to the list of a partition. Requests the next page if there is one. Returns
    /// whether this was the last.
    pub(super) fn add_page(
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
}

/// The error that a redirected update could not be copied home.
fn copy_error(server: usize, home: DriveExtent) -> impl Fn(Status) -> OpeningError {
    let DriveExtent { member, lba, blocks } = home;
    move |status| OpeningError::Copy {
        server,
        member: member.0,
        lba,
        blocks: blocks as u32,
        status,
    }
}

/// The error that a target has refused the claim.
fn refused_claim(server: usize, status: Status) -> OpeningError {
    if status.is(wire::status::OWNED) {
        // The status does not name the owner. The target was claimed after it had been asked.
        let (owner, lease_left_ms) = ("another host".into(), 0);
        return ClaimError::Owned { target: server, owner, lease_left_ms }.into();
    }
    OpeningError::Refused { server, doing: "claiming the volume", stream: None, status }
}

/// Whether a target has refused a command with this status because another initiator is the owner
/// now (traps T8, T21).
fn is_of_another_owner(status: Status) -> bool {
    use wire::status::{GUARDED, NOT_OWNER, STALE_GENERATION};
    [NOT_OWNER, STALE_GENERATION, GUARDED].iter().any(|one| one.is(status))
}
