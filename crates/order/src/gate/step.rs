//! The types that the gate and its caller exchange: tickets, steps, causes and errors.

use crate::attribute::Member;

/// The caller's name for an entry at the gate: an index into the caller's table. The caller may use a
/// ticket again when its entry is completed or refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u32);

/// Whether a member drive has a volatile cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberCache {
    /// The drive's member number in the volume.
    pub member: Member,
    /// Whether a power cut can destroy completed writes, because the drive has a volatile write
    /// cache without power-loss protection. On such a drive only a FLUSH makes a write durable
    /// (assumption M3).
    pub volatile: bool,
}

/// An action for the caller. The caller carries out the actions in the order given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Append the entry's attribute to the ordering log. All `Append`s of a batch come in ordinal
    /// order. Fence the log once, after the last `Append` and before the first `Write` or `Flush`
    /// is submitted. Only [`Gate::on_arrival`](super::Gate::on_arrival) adds this step.
    Append(Ticket),
    /// Submit the write or discard to the drive. When it has ended, call
    /// [`Gate::on_write_done`](super::Gate::on_write_done).
    Write(Ticket),
    /// Submit a FLUSH to the entry's drive. When it has ended, call
    /// [`Gate::on_flush_done`](super::Gate::on_flush_done).
    Flush(Ticket),
    /// Answer with success. The ticket is free.
    Complete {
        /// The ticket of the entry.
        ticket: Ticket,
        /// Whether to set the entry's persist word, and to fence the log, before the answer.
        /// Otherwise the initiator could learn of a durable write that the log does not show (trap
        /// T7).
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

/// The cause that stopped a stream. The first cause stays, whatever fails later.
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
    /// A FLUSH failed on a drive where the stream had unflushed writes. They may be lost, even if a
    /// later FLUSH succeeds (trap T22).
    #[error("a FLUSH of member {} failed while the stream had unflushed writes there", member.0)]
    FlushFailed {
        /// The drive.
        member: Member,
    },
    /// The ordering log is full: the initiator sent more entries than its credits allow.
    #[error("the ordering log is full")]
    LogFull,
    /// The log region failed.
    #[error("the log region failed")]
    LogFailed,
    /// The connection is gone, or another owner has replaced its owner.
    #[error("the connection was closed or its owner replaced")]
    Closed,
}

/// The reason why an arrival was not accepted: the peer broke the protocol. The stream accepts
/// nothing more on this connection, because what the peer sends is not reliable (trap T18).
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
