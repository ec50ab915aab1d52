//! Which refused commands may succeed if they are sent again a little later.

use riopipe_nvme::command::Status;

use super::status::{LOG_FAILED, STREAM_BUSY, meaning};

/// Whether a command that was refused with `status` may succeed later.
pub(crate) fn is_passing(status: Status) -> bool {
    let passing = [
        STREAM_BUSY,
        Status::NAMESPACE_NOT_READY,
        Status::INTERRUPTED,
        Status::TRANSIENT_TRANSPORT,
        Status::CONNECT_BUSY,
    ];
    !status.dnr() && is_one_of(status, &passing)
}

/// Whether a Fabrics Connect that was refused with `status` may succeed later. With these statuses,
/// a target reports that the queue exists already or can't be made now: it has not noticed the end
/// of the queue's last connection yet.
pub(crate) fn is_connect_passing(status: Status) -> bool {
    let passing = [
        Status::CONNECT_INVALID,
        Status::SEQUENCE_ERROR,
        Status::QUEUE_ID_INVALID,
        Status::CONNECT_BUSY,
    ];
    is_one_of(status, &passing)
}

/// Whether a claim that was refused with `status` may succeed later.
///
/// A status of the extension reports a state of the volume that does not change by itself. There
/// are two exceptions: operations of the last connection are in flight (trap T8), or the target's
/// log store has failed and may be repaired.
#[must_use]
pub fn is_claim_passing(status: Status) -> bool {
    is_one_of(status, &[STREAM_BUSY, LOG_FAILED]) || !status.dnr() && meaning(status).is_none()
}

fn is_one_of(status: Status, list: &[Status]) -> bool {
    list.iter().any(|listed| status.is(*listed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::status::{OWNED, STALE_GENERATION};

    #[test]
    fn a_command_is_tried_again_unless_dnr_is_set() {
        for status in [STREAM_BUSY, Status::NAMESPACE_NOT_READY, Status::CONNECT_BUSY] {
            assert!(is_passing(status), "{status}");
            assert!(!is_passing(status.with_dnr()), "{status}");
        }
        assert!(!is_passing(Status::INTERNAL) && !is_passing(Status::INVALID_FIELD));
    }

    #[test]
    fn a_queue_that_still_exists_is_connected_again() {
        // Also if the target forbids a retry: it does not know that the connection is about to end.
        assert!(is_connect_passing(Status::CONNECT_INVALID.with_dnr()));
        assert!(!is_connect_passing(Status::CONNECT_INVALID_HOST));
    }

    #[test]
    fn t8_a_fenced_owner_does_not_try_again() {
        assert!(!is_claim_passing(STALE_GENERATION.with_dnr()));
        assert!(!is_claim_passing(OWNED));
        assert!(is_claim_passing(STREAM_BUSY));
        assert!(is_claim_passing(LOG_FAILED));
        assert!(is_claim_passing(Status::INTERNAL));
        assert!(!is_claim_passing(Status::INTERNAL.with_dnr()));
    }
}
