//! The refusal of a command about a volume.

use riopipe_nvme::command::Status;

/// Why a command about a volume was refused: the content of its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::target) struct Refusal {
    /// The status. Its bit DNR ("do not retry") is set if the same command would be refused again.
    pub(in crate::target) status: Status,
    /// The result of the completion: a number that belongs to the status, such as the generation of
    /// the owner; 0 if the status has none.
    pub(in crate::target) result: u64,
}

impl Refusal {
    /// The host need not send the command again: it would be refused again.
    pub(in crate::target) const fn do_not_retry(status: Status) -> Self {
        Self { status: status.with_dnr(), result: 0 }
    }

    /// The host may send the same command again later.
    pub(super) const fn retry_later(status: Status) -> Self {
        Self { status, result: 0 }
    }

    /// Adds the number that belongs to the status.
    pub(super) const fn with_result(self, result: u64) -> Self {
        Self { result, ..self }
    }
}
