//! The permitted effects of each fault, and the streams affected. Any other failure breaks a
//! promise (promises P6, P9).
//!
//! - A write that fails affects its stream, until the stream is reopened or the volume recovered
//!   (trap T22).
//! - On a drive with a cache barrier, an ordered write that fails ends the order of all ordered
//!   streams there. One without an order affects its own stream only.
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
    /// FLUSHes that have failed, and writes that have ended the sequence of epochs of their drive.
    flushes: Vec<FailedFlush>,
    /// Machines with a replaced log or drive, and the time of the change, ns.
    changes: Vec<(usize, u64)>,
}

/// A failure that affects other streams.
#[derive(Clone, Copy, Debug)]
struct FailedFlush {
    machine: usize,
    drive: usize,
    /// The time of the failure, ns.
    at: u64,
    /// It affects only the streams of the drive's sequence of epochs.
    ends_sequence: bool,
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
                let ends_sequence = self.ends_sequence(failed);
                if self.may_be_commit(failed) || ends_sequence {
                    let at = now;
                    self.flush_may_have_failed(FailedFlush { machine, drive, at, ends_sequence });
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
                let (at, ends_sequence) = (now, false);
                self.flush_may_have_failed(FailedFlush { machine, drive, at, ends_sequence });
            }
        }
    }

    /// Notes that a FLUSH of a drive has failed, or a write with FUA, or one that ends the sequence
    /// of epochs. An initiator can't know whether a write with FUA or the FLUSH behind it has failed.
    fn flush_may_have_failed(&mut self, failed: FailedFlush) {
        self.failures.flushes.push(failed);
        let FailedFlush { machine, drive, ends_sequence, .. } = failed;
        let Self { blocks, eras, current, promised, .. } = self;
        for (stream, history) in (0..).zip(&mut eras[*current]) {
            if ends_sequence && !promised.is_in_sequence(stream) {
                continue;
            }
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
        for failed in &self.failures.flushes {
            let there = |block: u32| {
                let at = self.blocks[block as usize].at;
                at.machine == failed.machine && at.drive == failed.drive
            };
            let concerns = !failed.ends_sequence || self.promised.is_in_sequence(stream);
            if concerns
                && now < failed.at + LEARNED_NS
                && blocks.iter().any(|(block, _)| there(*block))
            {
                self.eras[era][usize::from(stream)].affect(failed.machine);
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
