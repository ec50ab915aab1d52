//! The promises of a log of records: a list of records, without regard to blocks.
//!
//! - Each opening finds a prefix of the appended records: in order, byte for byte, without a hole,
//!   and without any part of another log.
//! - Every record that was confirmed is in it.
//! - A trim that a confirmed record follows stays in force. Only trims that were requested are ever
//!   found.
//! - The last checkpoint of the prefix is found.

use std::collections::BTreeSet;

use riopipe_order::probe::{self, Rare};

use super::Promise;

/// A record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its Lsn.
    pub lsn: u64,
    /// Whether it is a checkpoint.
    pub checkpoint: bool,
    /// Its bytes; those of a checkpoint begin with an Lsn.
    pub bytes: Vec<u8>,
}

/// Bytes in front of each record.
const FRAME: u64 = 8;

impl Record {
    fn end(&self) -> u64 {
        self.lsn + FRAME + self.bytes.len() as u64
    }
}

/// The result of an opening.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundLog {
    /// The Lsn of the next record.
    pub end: u64,
    /// The Lsn below which records are dropped.
    pub trim: u64,
    /// The last checkpoint.
    pub checkpoint: Option<Record>,
    /// All records from the trim on.
    pub records: Vec<Record>,
}

/// A broken promise.
type Broken = (Promise, String);

/// The history of one log.
#[derive(Clone, Debug, Default)]
pub struct LogHistory {
    /// The log was created, durably.
    pub is_created: bool,
    /// All records that count.
    records: Vec<Record>,
    end: u64,
    /// Records that begin below this Lsn were confirmed.
    durable: u64,
    /// All trims that were ever accepted.
    trims: BTreeSet<u64>,
    /// Trims that no confirmed record follows yet, each with the end of the log when it was
    /// accepted.
    waiting: Vec<(u64, u64)>,
    /// The least trim that must be found.
    trim_due: u64,
    /// For each opening, the Lsn up to which its records count. The last opening's records count
    /// without a limit.
    openings: Vec<u64>,
    /// Records that were ever appended.
    pub appended: u64,
}

impl LogHistory {
    /// Notes that an opening appends a record.
    pub fn append(&mut self, opening: Option<usize>, record: Record) {
        if self.is_last(opening) {
            self.end = record.end();
            self.records.push(record);
        }
    }

    fn is_last(&self, opening: Option<usize>) -> bool {
        opening.is_some_and(|opening| opening + 1 == self.openings.len())
    }

    /// Notes that an opening confirms all records that begin below an Lsn.
    pub fn confirm(&mut self, opening: Option<usize>, durable: u64) -> Result<(), Broken> {
        let Some(counts) = opening.map(|opening| self.openings[opening]) else { return Ok(()) };
        if !self.is_last(opening) {
            let what = format!(
                "a log confirms records below {durable} to an owner that another one has replaced, \
                 which found them up to {counts}"
            );
            return if durable > counts { Err((Promise::P2, what)) } else { Ok(()) };
        }
        if durable > self.end {
            let what = format!("a log confirms records below {durable} and ends at {}", self.end);
            return Err((Promise::P3, what));
        }
        self.durable = self.durable.max(durable);
        let Self { waiting, trim_due, .. } = self;
        waiting.retain(|(trim, since)| {
            let is_carried = durable > *since;
            if is_carried {
                *trim_due = (*trim_due).max(*trim);
            }
            !is_carried
        });
        Ok(())
    }

    /// Notes that a trim was accepted.
    pub fn trimmed(&mut self, opening: Option<usize>, trim: u64) -> Result<(), Broken> {
        if !self.is_last(opening) {
            return Ok(());
        }
        self.trims.insert(trim);
        self.waiting.push((trim, self.end));
        if trim > self.durable {
            let what = format!(
                "a log drops records below {trim}, and only those below {} are durable",
                self.durable
            );
            return Err((Promise::P2, what));
        }
        Ok(())
    }

    /// Checks records that were read from the open log, from an Lsn on.
    pub fn read(&self, opening: Option<usize>, from: u64, found: &[Record]) -> Result<(), Broken> {
        if !self.is_last(opening) {
            return Ok(());
        }
        let due = self.records.iter().filter(|record| record.lsn >= from);
        let confirmed = due.clone().filter(|record| record.lsn < self.durable).count();
        compare(found, &due.collect::<Vec<_>>(), confirmed)
    }

    /// Checks an opening of the log. Returns its number.
    pub fn opened(&mut self, found: &FoundLog) -> Result<usize, Broken> {
        let FoundLog { end, trim, .. } = *found;
        let broken = |promise, what: String| Err((promise, what));
        if end < self.durable {
            let durable = self.durable;
            let what = format!("a log ends at {end}, and records up to {durable} were confirmed");
            return broken(Promise::P2, what);
        }
        if end > self.end {
            return broken(Promise::P5, format!("a log ends at {end}, behind {}", self.end));
        }
        if trim > 0 && !self.trims.contains(&trim) {
            return broken(
                Promise::P5,
                format!("a log is trimmed to {trim}, which was not requested"),
            );
        }
        if trim < self.trim_due {
            let due = self.trim_due;
            let what = format!("records from {trim} on are there again, trimmed up to {due}");
            return broken(Promise::P5, what);
        }
        let kept = self.records.iter().filter(|record| record.end() <= end);
        let due: Vec<&Record> = kept.clone().filter(|record| record.lsn >= trim).collect();
        compare(&found.records, &due, due.len())?;
        let checkpoint = due.iter().rfind(|record| record.checkpoint);
        if found.checkpoint.as_ref() != checkpoint.copied() {
            let lsn = |record: Option<&Record>| record.map(|record| record.lsn);
            let what = format!(
                "a log is opened at checkpoint {:?}; the last one is {:?}",
                lsn(found.checkpoint.as_ref()),
                lsn(checkpoint.copied())
            );
            return broken(Promise::P1, what);
        }
        let count = kept.count();
        if self.records.get(count).is_some_and(|record| record.lsn < end) {
            probe::count_rare(Rare::RecordCut);
        }
        self.records.truncate(count);
        (self.end, self.durable, self.trim_due) = (end, end, trim);
        self.waiting.clear();
        if let Some(last) = self.openings.last_mut() {
            *last = end;
        }
        self.openings.push(u64::MAX);
        Ok(self.openings.len() - 1)
    }
}

/// Compares the records that were read with those that are due. The first `at_least` must be there.
fn compare(found: &[Record], due: &[&Record], at_least: usize) -> Result<(), Broken> {
    for (found, due) in found.iter().zip(due) {
        if found.lsn != due.lsn {
            let what = format!("a log returns a record at {}; the next is {}", found.lsn, due.lsn);
            return Err((Promise::P1, what));
        }
        if found != *due {
            let what = format!("the record at {} is not the one that was appended", due.lsn);
            return Err((Promise::P4, what));
        }
    }
    if found.len() > due.len() {
        let what = format!("a log returns a record at {} that is not in it", found[due.len()].lsn);
        return Err((Promise::P5, what));
    }
    if found.len() < at_least {
        let what = format!("a log does not return its record at {}", due[found.len()].lsn);
        return Err((Promise::P2, what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(lsn: u64, checkpoint: bool) -> Record {
        Record { lsn, checkpoint, bytes: vec![lsn as u8; 12] }
    }

    /// A log of four records, of which two are confirmed.
    fn history() -> LogHistory {
        let mut log = LogHistory::default();
        let first = log.opened(&FoundLog::default()).ok();
        for (nth, checkpoint) in [false, true, false, true].into_iter().enumerate() {
            log.append(first, record(20 * nth as u64, checkpoint));
        }
        assert_eq!(log.confirm(first, 40), Ok(()));
        log
    }

    fn found(end: u64) -> FoundLog {
        let all = history().records;
        let records: Vec<Record> = all.into_iter().filter(|record| record.end() <= end).collect();
        let checkpoint = records.iter().rfind(|record| record.checkpoint).cloned();
        FoundLog { end, trim: 0, checkpoint, records }
    }

    fn violation_of(found: &FoundLog) -> Option<Promise> {
        history().opened(found).err().map(|(promise, _)| promise)
    }

    #[test]
    fn any_prefix_with_all_confirmed_records_is_permitted() {
        for end in [40, 47, 60, 80] {
            assert_eq!(violation_of(&found(end)), None, "{end}");
        }
        assert_eq!(violation_of(&found(20)), Some(Promise::P2));
        assert_eq!(violation_of(&found(81)), Some(Promise::P5));
    }

    #[test]
    fn missing_torn_foreign_and_reordered_records_are_detected() {
        let all = found(60);
        let with = |change: &dyn Fn(&mut FoundLog)| {
            let mut other = all.clone();
            change(&mut other);
            violation_of(&other)
        };
        assert_eq!(with(&|it| drop(it.records.remove(1))), Some(Promise::P1));
        assert_eq!(with(&|it| drop(it.records.pop())), Some(Promise::P2));
        assert_eq!(with(&|it| it.records[1].bytes[3] ^= 1), Some(Promise::P4));
        assert_eq!(with(&|it| it.records.push(record(60, false))), Some(Promise::P5));
        assert_eq!(with(&|it| it.checkpoint = None), Some(Promise::P1));
        assert_eq!(with(&|it| it.trim = 20), Some(Promise::P5), "no trim was requested");
    }

    #[test]
    fn a_trim_before_a_confirmed_record_stays_in_force() {
        for (confirmed, due) in [(80, None), (100, Some(Promise::P5))] {
            let mut log = history();
            let opening = Some(0);
            assert_eq!(log.trimmed(opening, 20), Ok(()));
            log.append(opening, record(80, false));
            assert_eq!(log.confirm(opening, confirmed), Ok(()));
            let mut found = found(80);
            found.end = 100;
            found.records.push(record(80, false));
            assert_eq!(log.opened(&found).err().map(|(promise, _)| promise), due);
        }
        assert!(history().trimmed(Some(0), 41).is_err(), "it is not durable");
    }

    #[test]
    fn no_record_is_confirmed_to_a_fenced_owner() {
        let mut log = history();
        assert_eq!(log.opened(&found(60)), Ok(1));
        assert_eq!(log.confirm(Some(0), 60), Ok(()), "the records were durable when it was sent");
        assert!(log.confirm(Some(0), 61).is_err());
        log.append(Some(0), record(60, false));
        assert_eq!(log.end, 60, "this does not count");
    }
}
