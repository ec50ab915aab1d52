//! The findings of the recovery of a file system.

use riopipe_fs::MountReport;
use serde::Serialize;

/// A recovery of a file system.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Recovered {
    /// Main transactions that were replayed.
    transactions: u64,
    /// File-level records that were applied.
    records: u64,
    /// Deleted files that were still open.
    orphans: u64,
}

impl Recovered {
    pub(super) fn of(report: &MountReport) -> Self {
        Self { transactions: report.replayed, records: report.records, orphans: report.orphans }
    }

    pub(super) fn text(&self) -> String {
        match (self.transactions, self.records, self.orphans) {
            (0, 0, 0) => "nothing to recover".to_owned(),
            (transactions, records, orphans) => format!(
                "recovered: {transactions} transactions, {records} files, {orphans} deleted files"
            ),
        }
    }
}
