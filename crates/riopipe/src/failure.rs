//! Why a stream has failed, and causes that several errors share.

use std::fmt;
use std::time::Duration;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::Cause;
use riopipe_session::initiator::manager::UnreachableCause;
use riopipe_session::wire::status;

use crate::addr::MemberAddr;

/// A status with its meaning, also of Rio's own codes.
pub(crate) struct StatusText(pub(crate) Status);

impl fmt::Display for StatusText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match status::meaning(self.0) {
            Some(meaning) => f.write_str(meaning),
            None => fmt::Display::fmt(&self.0, f),
        }
    }
}

/// What this process has run out of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Exhausted {
    /// File descriptors.
    #[error("this process has no descriptors left")]
    Descriptors,
    /// Threads.
    #[error("this process can start no more threads")]
    Threads,
}

/// The one clear error of a stream that has failed (P6): everything after `seq` stays unreported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "stream {stream} of volume \"{volume}\" failed at group {seq} on {target}: {cause}; groups before it are as \
     reported, nothing later will be"
)]
pub struct StreamFailure {
    /// The volume.
    pub volume: String,
    /// The stream.
    pub stream: StreamId,
    /// The first group that the failure touches.
    pub seq: Seq,
    /// The target and its namespace.
    pub target: Box<MemberAddr>,
    /// What happened.
    pub cause: FailureCause,
}

impl StreamFailure {
    /// Whether [`Stream::reopen`](crate::Stream::reopen) may bring the stream back, now or later, with
    /// nothing changed but time: the target was away, stalled, or a write or FLUSH failed. Other calls
    /// return this failure until then. False: the stream is lost to this owner; drop the volume, see
    /// what the cause says, and open the volume again.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.cause.is_retryable()
    }
}

/// Why a stream has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureCause {
    /// The target does not have this owner any more: another has the volume, or it is gone there.
    NotOwner(Status),
    /// A write ended with this status.
    Write(Status),
    /// A FLUSH ended with this status.
    Flush(Status),
    /// The connection is gone, and what keeps the target away, if that is known.
    Disconnected(Option<Box<Absence>>),
    /// The target owed an answer for longer than the stream waits, and what keeps it away, if that
    /// is known.
    TimedOut(Option<Box<Absence>>),
    /// Another stream's FLUSH of the same drive failed, so what this stream has not flushed there may
    /// be lost (T22).
    SharedFlush,
    /// The target's log is not what this stream has sent to it (T18, T19).
    LogMismatch,
    /// The target came back, and its log or a drive is not what it was (T27).
    Changed(Option<Box<UnreachableCause>>),
    /// The target could not be told that its log may forget the stream.
    Forget(Status),
}

/// How long a target has been away, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absence {
    /// What was met last.
    pub why: UnreachableCause,
    /// For how long it has been away.
    pub since: Duration,
    /// It is not tried again: the volume has to be opened anew.
    pub for_good: bool,
}

impl FailureCause {
    /// What the engine says of a failed request, and of a FLUSH or of a write.
    pub(crate) fn of(cause: Cause, flush: bool, absence: Option<Absence>) -> Self {
        let absence = absence.map(Box::new);
        match cause {
            Cause::Status(code) if is_about_owner(Status(code)) => Self::NotOwner(Status(code)),
            Cause::Status(code) if flush => Self::Flush(Status(code)),
            Cause::Status(code) => Self::Write(Status(code)),
            Cause::Disconnected => Self::Disconnected(absence),
            Cause::TimedOut => Self::TimedOut(absence),
            Cause::SharedFlush => Self::SharedFlush,
            Cause::LogMismatch => Self::LogMismatch,
            Cause::Changed => Self::Changed(absence.map(|absence| Box::new(absence.why))),
        }
    }

    /// See [`StreamFailure::is_retryable`].
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Write(_) | Self::Flush(_) | Self::SharedFlush | Self::Forget(_) => true,
            Self::Disconnected(absence) | Self::TimedOut(absence) => {
                !absence.as_ref().is_some_and(|absence| absence.for_good)
            }
            Self::NotOwner(_) | Self::LogMismatch | Self::Changed(_) => false,
        }
    }
}

impl fmt::Display for FailureCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let absence = |f: &mut fmt::Formatter<'_>, absence: &Option<Box<Absence>>| match absence {
            None => Ok(()),
            Some(absence) => {
                write!(f, " ({}; for {} ms now)", absence.why, absence.since.as_millis())
            }
        };
        match self {
            Self::NotOwner(status) => {
                write!(f, "the target does not have this owner any more: {}", StatusText(*status))
            }
            Self::Write(status) => write!(f, "a write ended with: {}", StatusText(*status)),
            Self::Flush(status) => write!(f, "a FLUSH ended with: {}", StatusText(*status)),
            Self::Disconnected(away) => {
                f.write_str("the connection is gone")?;
                absence(f, away)
            }
            Self::TimedOut(away) => {
                f.write_str("the target stalls: no answer in time")?;
                absence(f, away)
            }
            Self::SharedFlush => f.write_str(
                "another stream's FLUSH of the drive failed, so unflushed data there may be lost",
            ),
            Self::LogMismatch => f.write_str(
                "the target's log is not what this stream has sent to it: another log stands in \
                 its place, or it is damaged",
            ),
            Self::Changed(Some(why)) => fmt::Display::fmt(why, f),
            Self::Changed(None) => f.write_str("the target came back changed"),
            Self::Forget(status) => {
                write!(f, "forgetting the log failed: {}", StatusText(*status))
            }
        }
    }
}

/// Whether a status says that the volume is another's.
fn is_about_owner(status: Status) -> bool {
    [status::STALE_GENERATION, status::NOT_OWNER, status::OWNED, status::UNKNOWN_VOLUME]
        .iter()
        .any(|one| one.is(status))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn away(for_good: bool) -> Option<Absence> {
        let why = UnreachableCause::Claim(status::LEASE_OVER);
        Some(Absence { why, since: Duration::from_millis(1500), for_good })
    }

    #[test]
    fn causes_say_what_happened_and_for_how_long() {
        for (cause, flush, absence, text) in [
            (Cause::Status(0x281), true, None, "a FLUSH ended with: "),
            (Cause::Status(0x281), false, None, "a write ended with: "),
            (Cause::Status(0x702), false, None, "does not have this owner any more: a newer owner"),
            (Cause::Disconnected, false, away(false), "gone (the owner's lease is over"),
            (Cause::TimedOut, false, away(false), "no answer in time (the owner's"),
            (Cause::Disconnected, true, away(false), "open it again; for 1500 ms now)"),
            (Cause::Changed, false, away(true), "the owner's lease is over"),
            (Cause::Changed, false, None, "came back changed"),
            (Cause::SharedFlush, true, None, "another stream's FLUSH"),
        ] {
            let said = FailureCause::of(cause, flush, absence).to_string();
            assert!(said.contains(text), "{said}");
        }
    }

    #[test]
    fn a_stream_that_another_owner_has_fenced_is_not_reopened() {
        let of = |cause, absence| FailureCause::of(cause, false, absence).is_retryable();
        assert!(of(Cause::Status(0x281), None) && of(Cause::TimedOut, None));
        assert!(of(Cause::Disconnected, away(false)) && !of(Cause::Disconnected, away(true)));
        assert!(!of(Cause::Status(0x702), None) && !of(Cause::Changed, None));
        assert!(!of(Cause::LogMismatch, None) && of(Cause::SharedFlush, None));
    }
}
