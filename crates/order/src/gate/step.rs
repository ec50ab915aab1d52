//! The arguments and results of the gate: tickets, steps, causes.

use crate::attribute::Member;

/// The caller's name for an entry at the gate: an index below the gate's capacity. The caller may
/// use it again once the entry is completed or refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u32);

/// Whether a member drive has a volatile cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberCache {
    /// The drive's member number in the volume.
    pub member: Member,
    /// Whether completed writes may still be lost in a power cut: a volatile write cache without
    /// power-loss protection. Then only a FLUSH makes them durable (M3).
    pub volatile: bool,
}

/// An action for the caller. The caller carries out the actions in the order given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Append the entry's attribute to the ordering log. All `Append`s of a batch come in ordinal
    /// order; fence once after the last and before the first `Write` or `Flush` is submitted. Only
    /// [`Gate::arrive`](super::Gate::arrive) gives it.
    Append(Ticket),
    /// Submit the write or discard to the drive, then call [`Gate::written`](super::Gate::written).
    Write(Ticket),
    /// Submit a FLUSH to the entry's drive, then call [`Gate::flushed`](super::Gate::flushed).
    Flush(Ticket),
    /// Answer with success. The ticket is free.
    Complete {
        /// The ticket of the entry.
        ticket: Ticket,
        /// Set the entry's persist word and fence before answering (T7).
        persist: bool,
    },
    /// Answer with failure. The ticket is free.
    Refuse {
        /// The ticket of the entry.
        ticket: Ticket,
        /// The cause to answer with.
        why: Cause,
    },
}

/// The cause that stopped a stream. The first cause stays (P6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// A write of the stream failed.
    #[error("the write of entry {ordinal} on member {} failed", member.0)]
    WriteFailed {
        /// The drive.
        member: Member,
        /// The ordinal of the entry.
        ordinal: u32,
    },
    /// A FLUSH failed on a drive where the stream had unflushed writes: they may be lost, even
    /// if a later FLUSH succeeds (T22).
    #[error("a FLUSH of member {} failed while the stream had unflushed writes there", member.0)]
    FlushFailed {
        /// The drive.
        member: Member,
    },
    /// The ordering log is full: the initiator exceeded its credits (T13).
    #[error("the ordering log is full")]
    LogFull,
    /// The log region failed.
    #[error("the log region failed")]
    LogFailed,
    /// The connection is gone or its owner was fenced (T8).
    #[error("the connection was closed or its owner replaced")]
    Closed,
}

/// The reason why an arrival was not taken: the peer broke the protocol. The stream takes nothing
/// more on this connection (T18).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GateError {
    /// The ordinal has arrived before.
    #[error("entry {ordinal} arrived twice or too late: entry {expected} is next")]
    Duplicate {
        /// The ordinal that arrived.
        ordinal: u32,
        /// The next ordinal.
        expected: u32,
    },
    /// The ordinal is further ahead than there can be entries.
    #[error("entry {ordinal} is too far ahead: entry {expected} is next, the window is {window}")]
    TooFar {
        /// The ordinal that arrived.
        ordinal: u32,
        /// The next ordinal.
        expected: u32,
        /// How many entries may be at the gate at once.
        window: u32,
    },
    /// The volume has no such member here.
    #[error("entry {ordinal} is for member {}, which is not on this server", member.0)]
    UnknownMember {
        /// The ordinal that arrived.
        ordinal: u32,
        /// The unknown member.
        member: Member,
    },
}
