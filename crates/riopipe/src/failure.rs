//! Why a stream has failed, and causes that several errors share.

use std::fmt;
use std::time::Duration;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::Cause;
use riopipe_session::initiator::manager::UnreachableCause;
use riopipe_session::rounded::Rounded;
use riopipe_session::wire::status;

use crate::addr::MemberAddr;

/// Shows a status with its meaning, also for Rio's own codes.
pub(crate) struct StatusText(pub(crate) Status);

impl fmt::Display for StatusText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match status::meaning(self.0) {
            Some(meaning) => f.write_str(meaning),
            None if self.0.code() == Status::CAPACITY_EXCEEDED.code() => write!(
                f,
                "{}: the target has no space left for the drive (its file system or a quota is \
                 full): free space there",
                self.0
            ),
            None => fmt::Display::fmt(&self.0, f),
        }
    }
}

/// The resource that this process has run out of.
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

/// The error of a stream that has failed (promise P6). Each later call of the stream returns the
/// same one. Groups before `seq` are as they were reported; nothing later is reported complete.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{}; groups before it are as reported, later ones are not reported; {}",
    self.summary(),
    remedy(.cause)
)]
pub struct StreamFailure {
    /// The name of the volume.
    pub volume: String,
    /// The stream.
    pub stream: StreamId,
    /// The first group that the failure affects.
    pub seq: Seq,
    /// The target and its namespace.
    pub target: Box<MemberAddr>,
    /// The cause of the failure.
    pub cause: FailureCause,
}

/// The remedy of a failure with this cause, as text.
fn remedy(cause: &FailureCause) -> &'static str {
    match cause.is_retryable() {
        true => "reopen the stream",
        false => "remove the cause, and open the volume again",
    }
}

impl StreamFailure {
    /// The failure without a remedy, for a program whose users know no streams. The program has a remedy of
    /// its own.
    #[must_use]
    pub fn summary(&self) -> String {
        let Self { volume, stream, seq, target, cause } = self;
        format!("stream {stream} of volume \"{volume}\" failed at group {seq} on {target}: {cause}")
    }

    /// Whether [`Stream::reopen`](crate::Stream::reopen) may restart the stream, now or later, if
    /// only time passes: the target was unreachable, it stalled, or a write or FLUSH failed. Until
    /// then all other calls return this failure. False: the stream is lost to this owner. Drop the
    /// volume, remove the cause, and open the volume again.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.cause.is_retryable()
    }
}

/// Why a stream has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureCause {
    /// The target refused the stream with this status: the volume has another owner there, or none,
    /// or the target does not know the volume any more.
    NotOwner(Status),
    /// A write ended with this status.
    Write(Status),
    /// A FLUSH ended with this status.
    Flush(Status),
    /// The connection was lost. The value is why the target is unreachable, if that is known.
    Disconnected(Option<Box<Absence>>),
    /// The target owed an answer for longer than
    /// [`StreamOptions::timeout`](crate::StreamOptions::timeout). The value is why the target is
    /// unreachable, if that is known.
    TimedOut(Option<Box<Absence>>),
    /// Another stream's FLUSH of the same drive failed, so the unflushed writes of this stream on
    /// that drive may be lost (trap T22).
    SharedFlush,
    /// A stream has failed with which this one shares a group that was not durable: one of the two
    /// [follows](crate::Group::follower) the group of the other.
    OtherStream,
    /// The target's log does not match the entries that this stream has sent to it (traps T18,
    /// T19).
    LogMismatch,
    /// The target came back, and its log or a drive has changed (trap T27).
    Changed(Option<Box<UnreachableCause>>),
    /// The target refused to drop the stream's log entries at its close, with this status.
    Forget(Status),
}

/// How long a target has been unreachable, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absence {
    /// The error of the last attempt to reach it.
    pub why: UnreachableCause,
    /// How long it has been unreachable.
    pub since: Duration,
    /// Whether the initiator has given the target up: the volume must be opened again.
    pub for_good: bool,
}

impl FailureCause {
    /// The cause of a failed request, from the engine's report. `is_flush` is whether the request
    /// was a FLUSH. `absence` is why the target is unreachable, if it is.
    pub(crate) fn of(cause: Cause, is_flush: bool, absence: Option<Absence>) -> Self {
        let absence = absence.map(Box::new);
        match cause {
            Cause::Status(code) if is_owner_error(Status(code)) => Self::NotOwner(Status(code)),
            Cause::Status(code) if is_flush => Self::Flush(Status(code)),
            Cause::Status(code) => Self::Write(Status(code)),
            Cause::Disconnected => Self::Disconnected(absence),
            Cause::TimedOut => Self::TimedOut(absence),
            Cause::SharedFlush => Self::SharedFlush,
            Cause::OtherStream => Self::OtherStream,
            Cause::LogMismatch => Self::LogMismatch,
            Cause::Changed => Self::Changed(absence.map(|absence| Box::new(absence.why))),
        }
    }

    /// See [`StreamFailure::is_retryable`].
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Write(_)
            | Self::Flush(_)
            | Self::SharedFlush
            | Self::OtherStream
            | Self::Forget(_) => true,
            Self::Disconnected(absence) | Self::TimedOut(absence) => {
                let is_lost_for_good = absence.as_ref().is_some_and(|absence| absence.for_good);
                !is_lost_for_good
            }
            Self::NotOwner(_) | Self::LogMismatch | Self::Changed(_) => false,
        }
    }
}

impl fmt::Display for FailureCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotOwner(status) => {
                write!(f, "the target does not accept this owner any more: {}", StatusText(*status))
            }
            Self::Write(status) => write!(f, "a write ended with: {}", StatusText(*status)),
            Self::Flush(status) => write!(f, "a FLUSH ended with: {}", StatusText(*status)),
            Self::Disconnected(absence) => {
                f.write_str("the connection is lost")?;
                write_absence(f, absence)
            }
            Self::TimedOut(absence) => {
                f.write_str("the target stalls: no answer in time")?;
                write_absence(f, absence)
            }
            Self::SharedFlush => f.write_str(
                "another stream's FLUSH of the drive failed, so unflushed data there may be lost",
            ),
            Self::OtherStream => f.write_str(
                "another stream has failed, which follows a group of this one, or has a group that \
                 this one follows",
            ),
            Self::LogMismatch => f.write_str(
                "the target's log does not match the entries that this stream has sent to it: it is \
                 another log, or it is damaged",
            ),
            Self::Changed(Some(why)) => fmt::Display::fmt(why, f),
            Self::Changed(None) => {
                f.write_str("the target came back, and its log or a drive has changed")
            }
            Self::Forget(status) => {
                write!(f, "dropping the stream's log entries failed: {}", StatusText(*status))
            }
        }
    }
}

/// Writes why and for how long a target has been unreachable, in brackets.
fn write_absence(f: &mut fmt::Formatter<'_>, absence: &Option<Box<Absence>>) -> fmt::Result {
    match absence {
        Some(absence) => {
            write!(f, " ({}; for {} now)", absence.why, Rounded(absence.since))
        }
        None => Ok(()),
    }
}

/// Whether a status means that the volume belongs to another owner, or to none.
fn is_owner_error(status: Status) -> bool {
    let owner_errors =
        [status::STALE_GENERATION, status::NOT_OWNER, status::OWNED, status::UNKNOWN_VOLUME];
    owner_errors.iter().any(|error| error.is(status))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unreachable(for_good: bool) -> Option<Absence> {
        let why = UnreachableCause::Claim(status::LEASE_OVER);
        Some(Absence { why, since: Duration::from_millis(1500), for_good })
    }

    #[test]
    fn causes_show_the_failure_and_its_time() {
        for (cause, flush, absence, text) in [
            (Cause::Status(0x281), true, None, "a FLUSH ended with: "),
            (Cause::Status(0x281), false, None, "a write ended with: "),
            (Cause::Status(0x702), false, None, "not accept this owner any more: a newer owner"),
            (Cause::Disconnected, false, unreachable(false), "lost (the owner's lease is over"),
            (Cause::TimedOut, false, unreachable(false), "no answer in time (the owner's"),
            (Cause::Disconnected, true, unreachable(false), "open it again; for 1.5 s now)"),
            (Cause::Changed, false, unreachable(true), "the owner's lease is over"),
            (Cause::Changed, false, None, "a drive has changed"),
            (Cause::SharedFlush, true, None, "another stream's FLUSH"),
        ] {
            let shown = FailureCause::of(cause, flush, absence).to_string();
            assert!(shown.contains(text), "{shown}");
        }
    }

    #[test]
    fn a_stream_that_another_owner_has_fenced_is_not_reopened() {
        let of = |cause, absence| FailureCause::of(cause, false, absence).is_retryable();
        assert!(of(Cause::Status(0x281), None) && of(Cause::TimedOut, None));
        assert!(of(Cause::Disconnected, unreachable(false)));
        assert!(!of(Cause::Disconnected, unreachable(true)));
        assert!(!of(Cause::Status(0x702), None) && !of(Cause::Changed, None));
        assert!(!of(Cause::LogMismatch, None) && of(Cause::SharedFlush, None));
    }
}
