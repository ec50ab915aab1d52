//! Recovery of a volume after any crash: claims the volume, finds the prefix of each stream, and
//! undoes everything beyond the prefixes (Rio paper §4.4; T1, T8–T11, T19, T20).
//!
//! [`Opening`] is one state machine for four purposes ([`Mode`]):
//!
//! | mode | steps |
//! |---|---|
//! | open | Ask → Claim → AskAgain → *Claimed* → List → *Decided* → Undo → Flush → Settle → Over |
//! | reopen some streams | Ask → List → *Decided* → Undo → Flush → Settle → Over |
//! | dry run | Ask → List → Over |
//! | acknowledge in-place lists | List → Settle → Over |
//!
//! A [phase](Phase) begins only when all targets have ended the phase before. So the undo is done
//! and flushed on *all* targets before any log is shortened, and no stream starts before all logs
//! are shortened. A crash in between leaves logs from which the next recovery finds the same
//! prefixes (trap T9). The phases in italics are pauses: the driver does its own part and then
//! calls [`Opening::end_pause`].
//!
//! The driver takes each target's commands from [`Opening::next_command`], sends them in any order,
//! several at once, and passes each answer to [`Opening::on_answer`]. If a connection is lost, or a
//! target takes too long, the driver drops the machine and begins a new one, which finds the same
//! prefixes.

mod decision;
mod error;
mod jobs;
mod outcome;
mod pages;
mod phases;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::{StreamId, VolumeId};
use riopipe_order::entry::Position;
use riopipe_order::log_region::MemberNamespace;
use riopipe_order::probe::{self, Plant, Rare};

use crate::claim::Intent;
use crate::wire::list::SettleStream;
use crate::wire::{VolumeStatus, retry};
pub use error::OpeningError;
use jobs::Job;
pub use outcome::{Counts, Outcome, StreamOutcome};
use pages::Lists;
pub use phases::plan_opening;

/// Limit of commands in flight on an admin queue.
pub const ADMIN_COMMANDS_MAX: usize = 8;
/// Limit of commands in flight on an I/O queue.
pub const IO_COMMANDS_MAX: usize = 64;
/// Largest number of blocks of one Write Zeroes command: 8 MiB, so that no command occupies a drive
/// for long.
pub const UNDO_BLOCKS_MAX: u32 = 2048;
/// Largest number of blocks of a redirected update that are copied home at a time: every target
/// takes a block in a capsule.
pub const COPY_BLOCKS_MAX: u32 = 1;

/// A drive of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpeningMember {
    /// The member's number in the volume, and its namespace on its target.
    pub place: MemberNamespace,
    /// The first block of the data area. The labels lie before it.
    pub start: u64,
    /// The number of blocks of the data area.
    pub blocks: u64,
    /// The number of blocks of the prepare area, right before the data area; 0 if there is none.
    pub prepare_blocks: u32,
    /// Whether the drive has a volatile write cache.
    pub volatile: bool,
}

/// A target of the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpeningServer {
    /// Whether the target is reachable (trap T20).
    pub present: bool,
    /// Whether the target has Rio's extension. A target without it takes no part (trap T17).
    pub has_extension: bool,
    /// Whether the volume has partitions in the target's log by its labels, or gets new ones with
    /// the claim because the caller accepts that a log is lost.
    pub logged: bool,
    /// Whether the labels name a log there, and the target has none, and the caller accepts that. The
    /// volume then goes on without a log there (traps T19, T26).
    pub loses_log: bool,
    /// Whether the target has an ordering log.
    pub has_log: bool,
    /// Limit of the data of one command, bytes (MDTS).
    pub transfer_bytes_max: usize,
    /// The volume's drives there.
    pub members: Vec<OpeningMember>,
}

/// The volume and its targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpeningConfig {
    /// The volume.
    pub volume: VolumeId,
    /// *All* targets of the volume (trap T20), in the order in which the topology counts them.
    pub servers: Vec<OpeningServer>,
}

/// The purpose of an opening.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Claim the volume, and recover every stream that needs it.
    Open(Intent),
    /// Report the result that opening would have, and change nothing, not even a generation.
    DryRun(Intent),
    /// Recover some streams of a volume that is owned with this generation. Their connections
    /// are closed.
    Reopen {
        /// The owner's generation.
        generation: u32,
        /// The streams.
        streams: Vec<StreamId>,
    },
    /// Drop the in-place lists of some streams of a volume that is owned with this generation. The
    /// caller has acknowledged them.
    Acknowledge {
        /// The owner's generation.
        generation: u32,
        /// The streams.
        streams: Vec<StreamId>,
    },
}

/// The phase of an opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Asking every target for its state of the volume.
    Ask,
    /// Claiming the volume, target after target.
    Claim,
    /// Asking again, now that no other initiator writes.
    AskAgain,
    /// A pause: the volume is claimed, and the driver rewrites its labels.
    Claimed,
    /// Reading all logs.
    List,
    /// A pause: the recovered seq of every stream is known, and nothing has been undone.
    Decided,
    /// Zeroing fresh blocks beyond the prefix, and copying redirected updates inside it home.
    Undo,
    /// Flushing the zeroed and the copied blocks.
    Flush,
    /// Recording the prefix in all logs, and shortening them.
    Settle,
    /// All is done, and the streams may start.
    Over,
}

impl Phase {
    /// Whether the machine waits for [`Opening::end_pause`].
    #[must_use]
    pub const fn is_pause(self) -> bool {
        matches!(self, Self::Claimed | Self::Decided)
    }

    /// The action of this phase, for error messages.
    #[must_use]
    pub const fn action_name(self) -> &'static str {
        match self {
            Self::Ask | Self::AskAgain => "asking for the volume's state",
            Self::Claim | Self::Claimed => "claiming the volume",
            Self::List | Self::Decided => "reading the ordering log",
            Self::Undo => "zeroing the blocks beyond the prefix",
            Self::Flush => "flushing a drive",
            Self::Settle | Self::Over => "recording the prefix in the log",
        }
    }

    /// The name of the phase in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ask => "ask",
            Self::Claim => "claim",
            Self::AskAgain => "ask again",
            Self::Claimed => "claimed",
            Self::List => "list",
            Self::Decided => "decided",
            Self::Undo => "undo",
            Self::Flush => "flush",
            Self::Settle => "settle",
            Self::Over => "over",
        }
    }
}

/// The progress of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The phase.
    pub phase: Phase,
    /// The number of commands done (of [`Phase::List`]: partitions read).
    pub done: usize,
    /// The number of all commands of the phase (of [`Phase::List`]: all partitions).
    pub total: usize,
}

/// The identity of a command that [`Opening::next_command`] has returned.
///
/// The answers to commands of an abandoned opening may arrive during a later opening, over the same
/// connections. Each opening numbers its commands from 0. By the number of the attempt an opening
/// distinguishes its own answers from earlier ones (trap T23).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket {
    /// The attempt that was given to [`Opening::new`].
    pub attempt: u32,
    /// The number of the command in the attempt.
    pub number: u32,
}

impl Ticket {
    /// The ticket as one number, by which the caller identifies the command on a connection: the
    /// attempt in the upper 32 bits, the number in the lower 32 bits.
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        (self.attempt as u64) << 32 | self.number as u64
    }

    /// The ticket of which [`to_bits`](Self::to_bits) has made these bits.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self { attempt: (bits >> 32) as u32, number: bits as u32 }
    }
}

/// A command to be sent to a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// On the admin queue.
    Admin {
        /// The command.
        sqe: Sqe,
        /// The data to send with it; empty if there is none.
        send: Vec<u8>,
        /// The number of bytes that the target returns; 0 if none.
        receive: usize,
    },
    /// On an I/O queue of the owner.
    Io {
        /// The command.
        sqe: Sqe,
        /// The data to send with it; empty if there is none.
        send: Vec<u8>,
        /// The number of bytes that the target returns; 0 if none.
        receive: usize,
    },
}

/// A command that a target has put off, and that is to be sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutOff {
    /// The status of the target's last answer to it.
    pub status: Status,
    /// The number of times that the command has been put off.
    pub attempts: u32,
}

/// A command that has not been answered, and the number of times that it has been put off.
#[derive(Clone, Copy, Debug)]
struct Pending {
    job: Job,
    attempts: u32,
}

/// The commands for one target.
#[derive(Debug, Default)]
struct ServerQueue {
    /// The commands that have not been sent, or have been put off.
    waiting: VecDeque<Pending>,
    /// The number of commands in flight.
    in_flight: usize,
    /// The command that the target has put off with its last answer, if it has done so.
    put_off: Option<PutOff>,
}

/// Claiming and recovering a volume; see the [module](self).
#[derive(Debug)]
pub struct Opening {
    config: OpeningConfig,
    mode: Mode,
    phase: Phase,
    /// Whether an error was returned. No command is sent after that.
    failed: bool,
    /// The generation of the claim; 0 before it is known, and in a dry run.
    generation: u32,
    /// The number of the attempt.
    attempt: u32,
    /// The commands for each target.
    queues: Vec<ServerQueue>,
    /// Commands in flight, by number, with their targets.
    in_flight: BTreeMap<u32, (usize, Pending)>,
    /// The number of the next command.
    next_number: u32,
    /// The [progress](Progress) of the phase.
    commands_done: usize,
    commands_total: usize,
    /// The statuses of the volume that the targets have reported, by target.
    statuses: Vec<(usize, VolumeStatus)>,
    /// The lists of the logs, as far as they have been read.
    lists: Lists,
    /// Why a log can't be read. [`decide`](Self::decide) reports it, when no command is in flight.
    log_error: Option<OpeningError>,
    /// Whether the logs are not valid, and are given up with the claim (trap T26).
    logs_invalid: bool,
    /// The streams whose partitions are to be settled, from [`Phase::Decided`] on.
    streams_to_settle: Vec<SettleStream>,
    /// The data of redirected updates that was read, and is not written home yet.
    copied: BTreeMap<u32, Vec<u8>>,
    outcome: Outcome,
}

impl Opening {
    /// An opening whose first commands are ready. `attempt` must differ from the number of every
    /// earlier opening of which an answer may still arrive over the same connections. The owner of
    /// the connections counts the attempts (trap T23).
    ///
    /// # Errors
    /// A target of the volume is missing (trap T20).
    pub fn new(config: OpeningConfig, mode: Mode, attempt: u32) -> Result<Self, OpeningError> {
        if let Some(server) = config.servers.iter().position(|server| !server.present) {
            probe::count_rare(Rare::MemberMissing);
            if !probe::is_bug_planted(Plant::T20MissingServer) {
                return Err(OpeningError::Missing { server });
            }
        }
        let generation = match &mode {
            Mode::Open(_) | Mode::DryRun(_) => 0,
            Mode::Reopen { generation, .. } | Mode::Acknowledge { generation, .. } => *generation,
        };
        let queues = config.servers.iter().map(|_| ServerQueue::default()).collect();
        let logs_invalid = config.servers.iter().any(|server| server.loses_log);
        let mut opening = Self {
            config,
            mode,
            phase: Phase::Ask,
            failed: false,
            generation,
            attempt,
            queues,
            in_flight: BTreeMap::new(),
            next_number: 0,
            commands_done: 0,
            commands_total: 0,
            statuses: Vec::new(),
            lists: Lists::default(),
            log_error: None,
            logs_invalid,
            streams_to_settle: Vec::new(),
            copied: BTreeMap::new(),
            outcome: Outcome::default(),
        };
        opening.begin_first_phase()?;
        Ok(opening)
    }

    /// The next command for a target, if one may be sent now.
    pub fn next_command(&mut self, server: usize) -> Option<(Ticket, Call)> {
        if self.failed || self.phase.is_pause() {
            return None;
        }
        let queue = self.queues.get_mut(server)?;
        let limit = match queue.waiting.front()?.job {
            Job::Undo(_) | Job::ReadPrepared(_) | Job::WriteHome { .. } | Job::Flush(_) => {
                IO_COMMANDS_MAX
            }
            // A target remembers its position in one long list only.
            Job::List { from, .. } if from > Position(0) => 1,
            _ => ADMIN_COMMANDS_MAX,
        };
        if queue.in_flight >= limit {
            return None;
        }
        let pending = queue.waiting.pop_front()?;
        queue.in_flight += 1;
        let number = self.next_number;
        self.next_number = number.wrapping_add(1);
        self.in_flight.insert(number, (server, pending));
        let call = self.command_for(server, &pending.job);
        Some((Ticket { attempt: self.attempt, number }, call))
    }

    /// Takes the answer to a command: its data, or the status of its failure. The answer to a
    /// command of an earlier, abandoned attempt is dropped, because its content may be out of date
    /// (trap T23).
    ///
    /// After an error no further command is returned. Before [`Phase::Undo`] the lists on the
    /// targets are unchanged; after it, a new opening repeats what is not done.
    ///
    /// # Errors
    /// The reason why the volume or stream can't be claimed or recovered.
    pub fn on_answer(
        &mut self,
        ticket: Ticket,
        answer: Result<&[u8], Status>,
    ) -> Result<(), OpeningError> {
        if ticket.attempt != self.attempt {
            probe::count_rare(Rare::LateAnswer);
            if !probe::is_bug_planted(Plant::T23LateAnswers) {
                return Ok(());
            }
        }
        let Some((server, mut pending)) = self.in_flight.remove(&ticket.number) else {
            debug_assert!(ticket.attempt != self.attempt, "{ticket:?} is not in flight");
            return Ok(());
        };
        let queue = &mut self.queues[server];
        queue.in_flight -= 1;
        if self.failed {
            return Ok(());
        }
        if let Err(status) = answer
            && retry::is_passing(status)
        {
            pending.attempts += 1;
            self.outcome.counts.put_off += 1;
            queue.put_off = Some(PutOff { status, attempts: pending.attempts });
            queue.waiting.push_back(pending);
            return Ok(());
        }
        queue.put_off = None;
        let result =
            self.on_job_answer(server, pending.job, answer).and_then(|()| self.end_phase_if_done());
        self.failed = result.is_err();
        result
    }

    /// Ends a pause, and begins the next phase. Outside of a pause it does nothing.
    ///
    /// # Errors
    /// As [`on_answer`](Self::on_answer).
    pub fn end_pause(&mut self) -> Result<(), OpeningError> {
        if self.failed || !self.phase.is_pause() {
            return Ok(());
        }
        let result = self.end_phase();
        self.failed = result.is_err();
        result
    }

    /// The phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The progress of the phase.
    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress { phase: self.phase, done: self.commands_done, total: self.commands_total }
    }

    /// The number of the volume's targets.
    #[must_use]
    pub fn servers(&self) -> usize {
        self.queues.len()
    }

    /// The number of commands in flight to a target.
    #[must_use]
    pub fn in_flight(&self, server: usize) -> usize {
        self.queues.get(server).map_or(0, |queue| queue.in_flight)
    }

    /// The command that a target has put off with its last answer. The driver waits a moment before
    /// it calls [`next_command`](Self::next_command) for the target.
    #[must_use]
    pub fn put_off(&self, server: usize) -> Option<PutOff> {
        self.queues.get(server).and_then(|queue| queue.put_off)
    }

    /// The generation under which the volume is claimed; 0 before it is known, and in a dry run.
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The last status of the volume on each target that has the extension, by target; empty if no
    /// target was asked.
    #[must_use]
    pub fn statuses(&self) -> &[(usize, VolumeStatus)] {
        &self.statuses
    }

    /// The findings and actions so far; those of streams from [`Phase::Decided`] on.
    #[must_use]
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// The findings and actions.
    #[must_use]
    pub fn into_outcome(self) -> Outcome {
        self.outcome
    }
}
