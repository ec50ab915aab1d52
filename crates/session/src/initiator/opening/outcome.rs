//! The findings and actions of an opening.

use alloc::vec::Vec;

use riopipe_order::recovery::StreamPlan;

/// The findings for one stream, and their consequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamOutcome {
    /// The prefix, the undone blocks and the lists.
    pub plan: StreamPlan,
    /// Whether its in-place list waits to be acknowledged: until then the stream can't start
    /// (T9).
    pub pending: bool,
}

/// The numbers of things that were read and sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Live entries read from all logs.
    pub entries: u64,
    /// Slots with bytes that are no whole entry: torn by a crash.
    pub torn: u64,
    /// Pages read.
    pub pages: u64,
    /// Write Zeroes commands that were done.
    pub undos: u64,
    /// Blocks zeroed.
    pub undone_blocks: u64,
    /// Drives flushed.
    pub flushes: u64,
    /// Settle commands that were done.
    pub settles: u64,
    /// Commands that a target has put off.
    pub put_off: u64,
}

/// The findings and actions of an opening.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Whether any log had something to recover.
    pub needed: bool,
    /// Every stream that was examined, in order of number.
    pub streams: Vec<StreamOutcome>,
    /// The numbers of things that were read and sent.
    pub counts: Counts,
}
