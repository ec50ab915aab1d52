//! What a fault may do, and to whom: what fails beyond that breaks a promise (P6, P9).
//!
//! - A write that fails harms the stream that it is of, until that is reopened or the volume
//!   recovered (T22).
//! - A FLUSH that fails harms the streams with something on the drive that is not durable yet, also
//!   if they write it before they hear of the failure (T22). What the drive has lost, readers miss.
//! - A log that is lost, mislaid or failing harms every stream, until its target has been started
//!   with a log that works; a stream that was open meanwhile, until it is reopened.
//! - A drive that comes back changed harms the streams that are open then (T27), and those of an
//!   owner that is just opening the volume.

use super::{Group, Oracle, StreamHistory};
use crate::core::MS;
use crate::drive::Told;
use crate::scenario::Place;

/// A failed FLUSH is heard of by every stream after so long at the latest, ns: connections stall, and
/// machines can't be reached, for no longer than that in sum.
const HEARD_NS: u64 = 500 * MS;

/// What fails, or has failed a moment ago.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// Machines whose log is lost, mislaid or failing.
    logs: Vec<usize>,
    /// Machines, drives, and when a FLUSH failed there.
    flushes: Vec<(usize, usize, u64)>,
    /// Machines, and when a log or drive of theirs was another all at once.
    changes: Vec<(usize, u64)>,
}

impl Failures {
    /// The machines whose faults a stream may die of that begins now. Its owner has begun to open it,
    /// or the volume, at a time, and may have looked at a machine before something there changed.
    pub(super) fn since(&self, began: u64) -> Vec<usize> {
        let changed = self.changes.iter().filter(|(_, at)| *at >= began);
        self.logs.iter().copied().chain(changed.map(|(machine, _)| *machine)).collect()
    }

    /// Logs that are found to work.
    pub(super) fn logs_that_work(&mut self, works: impl Fn(usize) -> bool) {
        self.logs.retain(|machine| !works(*machine));
    }
}

impl StreamHistory {
    fn harm(&mut self, machine: usize) {
        if !self.harmed.contains(&machine) {
            self.harmed.push(machine);
        }
    }
}

impl Oracle {
    /// What a drive has to tell.
    pub fn told(&mut self, machine: usize, drive: usize, told: &Told, now: u64) {
        match told {
            Told::Completed(contents) => {
                self.check_turn(contents);
                for content in contents {
                    if let Some(done) = self.completed.get_mut(*content as usize) {
                        *done = true;
                    }
                }
            }
            Told::WriteFailed(failed) => {
                let at = |lba: u32| (machine, drive, lba);
                let Self { blocks, eras, .. } = self;
                for block in blocks {
                    let place = (block.at.machine, block.at.drive, block.at.lba);
                    let Some((_, content)) = failed.iter().find(|(lba, _)| at(*lba) == place)
                    else {
                        continue;
                    };
                    block.shakes += 1;
                    for wr in &block.writes {
                        if wr.number == *content || wr.place == Place::Discard {
                            eras[wr.era][usize::from(wr.stream)].harm(machine);
                        }
                    }
                }
            }
            Told::FlushFailed(lost) => {
                for block in &mut self.blocks {
                    let here = block.at.machine == machine && block.at.drive == drive;
                    let lost = here && lost.iter().any(|(lba, _)| *lba == block.at.lba);
                    block.shakes += u32::from(lost);
                }
                self.failures.flushes.push((machine, drive, now));
                let Self { blocks, eras, current, .. } = self;
                for history in &mut eras[*current] {
                    let undurable = &history.groups[history.upto(history.durable)..];
                    let there = |block: u32| {
                        let at = blocks[block as usize].at;
                        at.machine == machine && at.drive == drive
                    };
                    // A group with nothing in it is a FLUSH and nothing else.
                    let waits = |group: &Group| {
                        group.writes.is_empty() || group.writes.iter().any(|(b, _)| there(*b))
                    };
                    if undurable.iter().any(waits) {
                        history.harm(machine);
                    }
                }
            }
        }
    }

    /// A stream has written these blocks.
    pub(super) fn may_be_harmed(
        &mut self,
        era: usize,
        stream: u16,
        blocks: &[(u32, u64)],
        now: u64,
    ) {
        for (machine, drive, failed) in &self.failures.flushes {
            let there = |block: u32| {
                let at = self.blocks[block as usize].at;
                at.machine == *machine && at.drive == *drive
            };
            if now < failed + HEARD_NS && blocks.iter().any(|(block, _)| there(*block)) {
                self.eras[era][usize::from(stream)].harm(*machine);
            }
        }
    }

    /// A machine's log is lost, mislaid or failing.
    pub fn log_fails(&mut self, machine: usize, now: u64) {
        self.logless[machine] = true;
        if !self.failures.logs.contains(&machine) {
            self.failures.logs.push(machine);
        }
        self.drive_changes(machine, now);
    }

    /// A machine's target has been started with a log that works.
    pub fn log_works(&mut self, machine: usize) {
        self.failures.logs_that_work(|other| other == machine);
    }

    /// A machine has another drive in the place of one of the volume's.
    pub fn drive_is_replaced(&mut self, machine: usize, now: u64) {
        self.replaced.retain(|(other, _)| *other != machine);
        self.replaced.push((machine, now));
        self.drive_changes(machine, now);
    }

    /// A machine comes back with a drive that is not what it was.
    pub fn drive_changes(&mut self, machine: usize, now: u64) {
        self.failures.changes.push((machine, now));
        for history in &mut self.eras[self.current] {
            history.harm(machine);
        }
    }
}
