//! The permitted effects of each fault, and the streams affected. Any other failure breaks a
//! promise (promises P6, P9).
//!
//! - A write that fails affects its stream, until the stream is reopened or the volume recovered
//!   (trap T22).
//! - On a drive with a cache barrier, a write that fails ends the order of all streams there, as a
//!   FLUSH that fails does.
//! - A FLUSH that fails affects the streams with data on the drive that is not durable yet. It also
//!   affects the streams that write the drive before they learn of the failure (trap T22). Readers
//!   miss the data that the drive has lost.
//! - A log that is lost, replaced or failing affects every stream, until its target has been
//!   started with a log that works. It affects a stream that was open meanwhile until that is
//!   reopened.
//! - A drive that comes back changed affects the streams that are open then (trap T27), and those
//!   of an owner that is opening the volume at that time.

use super::{Drives, Group, Oracle, StreamHistory};
use crate::core::MS;
use crate::drive::DriveEvent;
use crate::scenario::Place;

/// The longest time until every stream has learned of a failed FLUSH, ns. In sum, connections
/// stall, and machines are unreachable, for no longer than that.
const LEARNED_NS: u64 = 500 * MS;

/// The faults that are present, or were a moment ago.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// Machines whose log is lost, replaced or failing.
    logs: Vec<usize>,
    /// Machines and drives with a failed FLUSH, and the time of the failure, ns.
    flushes: Vec<(usize, usize, u64)>,
    /// Machines with a replaced log or drive, and the time of the change, ns.
    changes: Vec<(usize, u64)>,
}

impl Failures {
    /// The machines whose faults may fail a stream that begins now. `began` is the time at which
    /// its owner has begun to open it, or the volume. The owner may have read a machine before a
    /// change there.
    pub(super) fn since(&self, began: u64) -> Vec<usize> {
        let changed = self.changes.iter().filter(|(_, at)| *at >= began);
        self.logs.iter().copied().chain(changed.map(|(machine, _)| *machine)).collect()
    }

    /// Removes the logs that work from the failing ones.
    pub(super) fn logs_that_work(&mut self, works: impl Fn(usize) -> bool) {
        self.logs.retain(|machine| !works(*machine));
    }
}

impl StreamHistory {
    fn affect(&mut self, machine: usize) {
        if !self.affected.contains(&machine) {
            self.affected.push(machine);
        }
    }
}

impl Oracle {
    /// Handles an event of a drive.
    pub fn drive_reports(
        &mut self,
        (machine, drive): (usize, usize),
        event: &DriveEvent,
        now: u64,
        drives: &Drives<'_>,
    ) {
        match event {
            DriveEvent::Completed(contents) => {
                self.check_turn(contents);
                self.check_commits(contents, drives);
                for content in contents {
                    if let Some(done) = self.completed.get_mut(*content as usize) {
                        *done = true;
                    }
                }
            }
            DriveEvent::WriteFailed(failed) => {
                let at = |lba: u32| (machine, drive, lba);
                let Self { blocks, eras, promised, .. } = self;
                for block in blocks {
                    let place = (block.at.machine, block.at.drive, block.at.lba);
                    let is_redirected = |lba: u32, content| {
                        promised.redirects()
                            && promised.is_in_area(lba)
                            && (machine, drive) == (place.0, place.1)
                            && block.writes.iter().any(|wr| wr.number == content)
                    };
                    let Some((_, content)) = failed
                        .iter()
                        .find(|(lba, content)| at(*lba) == place || is_redirected(*lba, *content))
                    else {
                        continue;
                    };
                    block.failures += 1;
                    for wr in &block.writes {
                        if wr.number == *content || wr.place == Place::Discard {
                            eras[wr.era][usize::from(wr.stream)].affect(machine);
                        }
                    }
                }
                if self.may_be_commit(failed) || self.keeps_one_sequence() {
                    self.flush_may_have_failed((machine, drive), now);
                }
            }
            DriveEvent::FlushFailed(lost) => {
                for block in &mut self.blocks {
                    let here = block.at.machine == machine && block.at.drive == drive;
                    let lost = here
                        && lost.iter().any(|(lba, content)| {
                            *lba == block.at.lba
                                || self.promised.is_in_area(*lba)
                                    && block.writes.iter().any(|wr| wr.number == *content)
                        });
                    block.failures += u32::from(lost);
                }
                self.flush_may_have_failed((machine, drive), now);
            }
        }
    }

    /// Notes that a FLUSH of a drive has failed, or a write with FUA. An initiator can't know
    /// whether the write or the FLUSH behind it has failed.
    fn flush_may_have_failed(&mut self, (machine, drive): (usize, usize), now: u64) {
        self.failures.flushes.push((machine, drive, now));
        let Self { blocks, eras, current, promised, .. } = self;
        for history in &mut eras[*current] {
            // Redirected updates are written home later, and the drive is flushed for that.
            let durable = if promised.redirects() { history.start } else { history.durable };
            let undurable = &history.groups[history.upto(durable)..];
            let there = |block: u32| {
                let at = blocks[block as usize].at;
                at.machine == machine && at.drive == drive
            };
            // A group without writes is only a FLUSH.
            let waits = |group: &Group| {
                group.writes.is_empty() || group.writes.iter().any(|(b, _)| there(*b))
            };
            if undurable.iter().any(waits) {
                history.affect(machine);
            }
        }
    }

    /// Whether a drive has completed the write with this number.
    #[must_use]
    pub fn is_completed(&self, number: u64) -> bool {
        self.completed.get(number as usize).copied().unwrap_or(false)
    }

    /// Notes that a stream has written these blocks. Earlier failed FLUSHes may affect it.
    pub(super) fn may_be_affected(
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
            if now < failed + LEARNED_NS && blocks.iter().any(|(block, _)| there(*block)) {
                self.eras[era][usize::from(stream)].affect(*machine);
            }
        }
    }

    /// Notes that a machine's log is lost, replaced or failing.
    pub fn log_fails(&mut self, machine: usize, now: u64) {
        self.logless[machine] = true;
        if !self.failures.logs.contains(&machine) {
            self.failures.logs.push(machine);
        }
        self.drive_changes(machine, now);
    }

    /// Notes that a machine's target has been started with a log that works.
    pub fn log_works(&mut self, machine: usize) {
        self.failures.logs_that_work(|other| other == machine);
    }

    /// Notes that another drive has replaced one of the volume's on a machine.
    pub fn drive_is_replaced(&mut self, machine: usize, now: u64) {
        self.replaced.retain(|(other, _)| *other != machine);
        self.replaced.push((machine, now));
        self.drive_changes(machine, now);
    }

    /// Notes that a machine comes back with a changed drive.
    pub fn drive_changes(&mut self, machine: usize, now: u64) {
        self.failures.changes.push((machine, now));
        for history in &mut self.eras[self.current] {
            history.affect(machine);
        }
    }
}
