//! The volume's labels: read and judged before it is taken, rewritten once it is.

use riopipe_nvme::command::Status;
use riopipe_session::initiator::opening::Phase;
use riopipe_session::label::{AssembleError, Found, Label};
use riopipe_session::label_work::{self, LabelIo, Relabel};

use super::{Client, Refused};
use crate::core::{Core, MS};
use crate::crc::crc32c;
use crate::machine::nguid;

/// What an attempt to open the volume knows of its labels.
#[derive(Default)]
pub(super) struct Labels {
    begun: bool,
    found: Vec<Found>,
    /// What they say, once all have been read.
    head: Option<Label>,
    /// The largest generation on any.
    pub(super) generation: u32,
    work: Option<Relabel>,
    /// Something was asked of a drive.
    out: bool,
}

impl Client {
    /// Reads the labels of all members, over the associations that are there; whether that is done.
    pub(super) fn read_labels(&mut self, core: &mut Core) -> bool {
        if self.labels.head.is_some() {
            return true;
        }
        if !core::mem::replace(&mut self.labels.begun, true) {
            self.close_drives(core);
        }
        let member = self.labels.found.len();
        if member < core.scenario.volume.members.len() {
            self.label_io(&LabelIo::Read { member }, core);
            return false;
        }
        match label_work::judge(Some(core.name), &self.labels.found, self.accept_lost) {
            Ok(head) => {
                let labels = self.labels.found.iter().filter_map(|f| f.label.clone().ok());
                self.labels.generation = label_work::generation(&labels.collect::<Vec<_>>());
                self.labels.head = Some(head);
                true
            }
            Err(error) => {
                self.label_refused(&error, core);
                false
            }
        }
    }

    /// Writes the labels of the owner that this one has become; whether that is done.
    pub(super) fn rewrite_labels(&mut self, core: &mut Core) -> bool {
        let (Some(head), Some((opening, _))) = (&self.labels.head, &self.opening) else {
            return true;
        };
        let generation = opening.generation();
        let members = &core.scenario.volume.members;
        let work = self.labels.work.get_or_insert_with(|| {
            let nguids = members.iter().map(|(machine, drive)| nguid(*machine, *drive)).collect();
            let region = |machine: usize| {
                let extension = self.servers[machine].controller().and_then(|c| c.extension);
                extension.map_or([0; 16], |e| e.region)
            };
            let regions = members.iter().map(|(machine, _)| region(*machine));
            let regions = self.accept_lost.then(|| regions.collect());
            Relabel::new(head, nguids, generation, regions, crc32c)
        });
        let Some(io) = work.next() else { return true };
        self.label_io(&io, core);
        false
    }

    fn label_io(&mut self, io: &LabelIo, core: &mut Core) {
        let (LabelIo::Read { member } | LabelIo::Flush { member } | LabelIo::Write { member, .. }) =
            *io;
        let (machine, drive) = core.scenario.volume.members[member];
        let end = self.end();
        let server = &mut self.servers[machine];
        if !self.labels.out && server.is_ready_for_io(end, core) {
            self.labels.out = true;
            server.label_io(io, drive as u32 + 1, end, core);
        }
    }

    /// A drive has answered.
    pub(super) fn label_done(&mut self, answer: Result<Vec<u8>, Status>, core: &mut Core) {
        if !core::mem::take(&mut self.labels.out) {
            // Of an attempt that was given up (T23).
            return;
        }
        let read = match answer {
            Ok(read) => read,
            Err(status) => {
                core.trace(|| format!("initiator: a label can't be read or written: {status}"));
                return self.begin_again(core);
            }
        };
        if let Some(work) = &mut self.labels.work {
            if let Err(error) = work.done(&read) {
                self.label_refused(&error, core);
            }
            return;
        }
        let (machine, drive) = core.scenario.volume.members[self.labels.found.len()];
        let extension = self.servers[machine].controller().and_then(|c| c.extension);
        let region = extension.map(|extension| extension.region);
        self.labels.found.push(label_work::found(nguid(machine, drive), region, &read, crc32c));
    }

    fn label_refused(&mut self, error: &AssembleError, core: &mut Core) {
        core.trace(|| format!("initiator: the volume can't be opened: {error}"));
        self.refused = Some(match error {
            AssembleError::LogDue { given, .. } => {
                Refused::Log(core.scenario.volume.members[*given].0)
            }
            _ => Refused::Other,
        });
        self.begin_again(core);
    }

    fn begin_again(&mut self, core: &mut Core) {
        self.labels = Labels::default();
        self.opening = None;
        self.retry_at = core.now + 2 * MS;
    }

    /// A target is gone, and what was asked of its drives.
    pub(super) fn forget_labels(&mut self, core: &mut Core) {
        if core::mem::take(&mut self.labels).begun {
            self.retry_at = self.retry_at.max(core.now + 4 * MS);
        }
    }

    /// Whether labels have to be written before the opening goes on.
    pub(super) fn is_relabeling(&mut self, phase: Phase, core: &mut Core) -> bool {
        phase == Phase::Claimed && !self.rewrite_labels(core)
    }
}
