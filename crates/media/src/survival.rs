//! Survival of failures: the table of docs/media.md, computed for the given media.

use std::fmt;

/// The content that remains after a failure, from the least to the most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kept {
    /// Nothing.
    Nothing,
    /// All flushed writes; of the others, any subset of blocks.
    Flushed,
    /// All completed writes (M3, with power-loss protection).
    Completed,
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kept::Nothing => "nothing",
            Kept::Flushed => "what was flushed",
            Kept::Completed => "what had completed",
        })
    }
}

/// The survival of a medium's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Survival {
    /// After the serving process was killed.
    pub process_kill: Kept,
    /// After the machine lost power (or its kernel crashed).
    pub power_cut: Kept,
    /// A remark for the user; empty if there is none.
    pub note: &'static str,
}

/// The combination of a drive and a log: one row of the table printed at start-up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The content that remains of an ordered volume after its target was killed.
    pub process_kill: &'static str,
    /// The content that remains of it after a power cut.
    pub power_cut: &'static str,
    /// The gain that ordered writes have on these media.
    pub gain: &'static str,
}

/// The row for a data drive and the log of its writes. `volatile_cache`: the drive has a volatile
/// cache.
pub fn row(drive: Survival, volatile_cache: bool, log: Survival) -> Row {
    let process_kill = match (drive.process_kill, log.process_kill) {
        (Kept::Nothing, _) => "nothing: the drive is this process's memory",
        (_, Kept::Nothing) => "blocks without order: the log is this process's memory",
        _ => "all promises",
    };
    let power_cut = match (drive.power_cut, log.power_cut) {
        (Kept::Nothing, _) => "nothing: the drive is memory",
        (_, Kept::Nothing) => {
            "blocks without order: the log is gone, streams can't be recovered \
             (what was flushed is still on the drive)"
        }
        (_, Kept::Flushed) => {
            "what was flushed, without order beyond it: the log is only as durable as its file, \
             and after another boot nothing is undone from it"
        }
        (_, Kept::Completed) => "all promises",
    };
    let gain = match volatile_cache {
        true => "large: order without a FLUSH for every group",
        false => "order without a round trip for every group; FLUSH is cheap here",
    };
    Row { process_kill, power_cut, gain }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn survival(process_kill: Kept, power_cut: Kept) -> Survival {
        Survival { process_kill, power_cut, note: "" }
    }

    #[test]
    fn all_promises_need_a_log_and_a_drive_that_outlive_power() {
        let drive = survival(Kept::Completed, Kept::Flushed);
        let memory = survival(Kept::Nothing, Kept::Nothing);
        let file_log = survival(Kept::Completed, Kept::Flushed);
        let dax_log = survival(Kept::Completed, Kept::Completed);
        assert_eq!(row(drive, true, dax_log).power_cut, "all promises");
        assert_eq!(row(drive, true, file_log).process_kill, "all promises");
        assert_ne!(row(drive, true, file_log).power_cut, "all promises");
        for log in [memory, file_log, dax_log] {
            assert_ne!(row(memory, false, log).process_kill, "all promises");
            assert_ne!(row(memory, false, log).power_cut, "all promises");
        }
    }
}
