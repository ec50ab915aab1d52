//! The promises of a drive that keeps an order, by the commands alone: no table, no list, no page.

use std::collections::BTreeMap;

use crate::scenario::{Scenario, Write};

/// A write in the oracle's books. Its name is its place there plus one.
struct Written {
    write: Write,
    /// The moments of its submission and of its completion.
    submitted: Option<usize>,
    completed: Option<usize>,
    failed: bool,
    /// It must survive a power cut.
    durable: bool,
}

/// A FLUSH in flight: the writes that it covers.
struct Flush {
    covered: Vec<usize>,
    /// The covered writes must have been submitted when it completes.
    awaits_all: bool,
}

/// The books.
pub(crate) struct Oracle {
    plp: bool,
    /// The block that can't be written.
    failing: Option<u64>,
    writes: Vec<Written>,
    flushes: BTreeMap<u64, Flush>,
    /// Number of events so far.
    moment: usize,
    /// `before[x][y]`: the order of the drive has write `y` before write `x`.
    before: Vec<Vec<bool>>,
}

impl Oracle {
    /// The books of a scenario before it begins. They know all writes, also those to come.
    pub(crate) fn new(scenario: &Scenario, writes: Vec<Write>) -> Self {
        let shares = |earlier: &Write, later: &Write| {
            let later_in = |stream: u16, epoch: u64| {
                later.epochs.iter().any(|other| other.0 == stream && other.1 > epoch)
            };
            earlier.epochs.iter().any(|&(stream, epoch)| later_in(stream, epoch))
        };
        let mut before: Vec<Vec<bool>> = writes
            .iter()
            .map(|later| writes.iter().map(|earlier| shares(earlier, later)).collect())
            .collect();
        // What is before an earlier one is before, too.
        for middle in 0..writes.len() {
            let before_middle = before[middle].clone();
            for before in before.iter_mut().filter(|before| before[middle]) {
                for (is_before, is_before_middle) in before.iter_mut().zip(&before_middle) {
                    *is_before |= is_before_middle;
                }
            }
        }
        let written = |write| Written {
            write,
            submitted: None,
            completed: None,
            failed: false,
            durable: false,
        };
        Self {
            plp: scenario.profile.plp,
            failing: scenario.failing,
            writes: writes.into_iter().map(written).collect(),
            flushes: BTreeMap::new(),
            moment: 0,
            before,
        }
    }

    fn tick(&mut self) -> usize {
        self.moment += 1;
        self.moment
    }

    pub(crate) fn submit_write(&mut self, index: usize) {
        let moment = self.tick();
        self.writes[index].submitted = Some(moment);
    }

    pub(crate) fn submit_flush(&mut self, op: u64, epochs: Option<(u16, u64)>) {
        let is_covered = |written: &Written| match epochs {
            Some((stream, before)) => {
                written.write.epochs.iter().any(|own| own.0 == stream && own.1 < before)
            }
            None => written.completed.is_some() && !written.failed,
        };
        let covered = (0..self.writes.len()).filter(|i| is_covered(&self.writes[*i])).collect();
        self.flushes.insert(op, Flush { covered, awaits_all: epochs.is_some() });
    }

    pub(crate) fn complete_write(&mut self, index: usize, failed: bool) {
        let moment = self.tick();
        let durable = self.plp && !failed;
        let written = &mut self.writes[index];
        (written.completed, written.failed) = (Some(moment), failed);
        written.durable |= durable;
    }

    /// Whether a failed write is before this one.
    fn is_behind_failure(&self, index: usize) -> bool {
        (0..self.writes.len()).any(|other| self.before[index][other] && self.writes[other].failed)
    }

    pub(crate) fn complete_flush(&mut self, op: u64, failed: bool) -> Result<(), String> {
        let Some(Flush { covered, awaits_all }) = self.flushes.remove(&op) else {
            return Err(format!("FLUSH {op} completes twice"));
        };
        if failed {
            return Ok(());
        }
        for index in covered {
            if self.writes[index].submitted.is_none() {
                return Err(format!("a FLUSH completes before write {} has come", index + 1));
            }
            // What is behind a failed write was reported by that, unless the FLUSH names it.
            if awaits_all || !self.is_behind_failure(index) {
                self.writes[index].durable = true;
            }
        }
        Ok(())
    }

    /// Whether the content of a block is from before this write.
    fn is_older(&self, content: u32, than: usize) -> bool {
        let Some(index) = (content as usize).checked_sub(1) else { return true };
        if index == than || self.before[index][than] {
            return false;
        }
        let (this, that) = (&self.writes[index], &self.writes[than]);
        self.before[than][index]
            || matches!((this.completed, that.submitted), (Some(end), Some(begin)) if end < begin)
    }

    /// Checks that a write, or something later, is in all of its blocks.
    fn check_present(&self, index: usize, blocks: &[u32], why: &str) -> Result<(), String> {
        let Write { lba, blocks: count, .. } = self.writes[index].write;
        // A write in flight can't land on a block that fails.
        let can_land =
            |lba: &u64| self.failing != Some(*lba) || self.writes[index].completed.is_some();
        let mut written = (lba..lba + count).filter(can_land);
        match written.find(|lba| self.is_older(blocks[*lba as usize], index)) {
            None => Ok(()),
            Some(lba) => Err(format!(
                "{why}: write {} is not in block {lba}, which has {}",
                index + 1,
                blocks[lba as usize]
            )),
        }
    }

    /// Checks the contents after a power cut.
    pub(crate) fn check_cut(&self, blocks: &[u32]) -> Result<(), String> {
        for (lba, content) in (0..).zip(blocks) {
            let Some(index) = (*content as usize).checked_sub(1) else { continue };
            let written = &self.writes[index];
            let extent = written.write.lba..written.write.lba + written.write.blocks;
            if written.submitted.is_none() || !extent.contains(&lba) {
                return Err(format!("block {lba} has {content}, which nothing has written there"));
            }
            for earlier in (0..self.writes.len()).filter(|other| self.before[index][*other]) {
                let why = format!("block {lba} has {content}");
                if self.writes[earlier].submitted.is_none() {
                    return Err(format!("{why}, but write {} has never come", earlier + 1));
                }
                self.check_present(earlier, blocks, &why)?;
            }
        }
        for index in (0..self.writes.len()).filter(|index| self.writes[*index].durable) {
            self.check_present(index, blocks, "it was durable")?;
        }
        Ok(())
    }

    /// Checks the contents when everything has completed.
    pub(crate) fn check_end(&self, blocks: &[u32]) -> Result<(), String> {
        for (index, written) in self.writes.iter().enumerate() {
            if written.completed.is_none() {
                return Err(format!("write {} never completes", index + 1));
            }
            if !self.writes.iter().any(|written| written.failed) {
                self.check_present(index, blocks, "all has completed")?;
            }
        }
        match self.flushes.is_empty() {
            true => Ok(()),
            false => Err("a FLUSH never completes".into()),
        }
    }
}
