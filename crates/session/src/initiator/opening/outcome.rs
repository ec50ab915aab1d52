//! The findings and actions of an opening.

use alloc::vec::Vec;

use riopipe_order::recovery::StreamPlan;

/// The findings for one stream, and their consequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamOutcome {
    /// The prefix, the undone blocks and the lists.
    pub plan: StreamPlan,
    /// Whether its list of in-place updates waits to be acknowledged. Until then the stream can't
    /// start (trap T9).
    pub pending: bool,
}

/// The counters of a recovery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The number of live entries read from all logs.
    pub entries: u64,
    /// The number of torn slots.
    pub torn: u64,
    /// The number of pages read.
    pub pages: u64,
    /// The number of Write Zeroes commands that were done.
    pub undos: u64,
    /// The number of zeroed blocks.
    pub undone_blocks: u64,
    /// The number of blocks of redirected updates that were copied home.
    pub copied_blocks: u64,
    /// The number of flushed drives.
    pub flushes: u64,
    /// The number of settle commands that were done.
    pub settles: u64,
    /// The number of commands that a target has put off.
    pub put_off: u64,
}

/// The findings and actions of an opening.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Whether any log had entries to recover.
    pub needed: bool,
    /// Every stream that was examined, in order of number.
    pub streams: Vec<StreamOutcome>,
    /// The counters of a recovery.
    pub counts: Counts,
}
