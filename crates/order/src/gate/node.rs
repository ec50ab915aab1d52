//! The gate's part of an entry, and the table of these parts.

use super::step::Ticket;

/// No ticket.
pub(super) const NONE: u32 = u32::MAX;

/// A table of entries, by ticket.
///
/// # Panics
/// Both functions panic if the ticket is beyond the table.
pub trait Table {
    /// The gate's part of an entry.
    fn node(&self, ticket: Ticket) -> &Node;

    /// The gate's part of an entry, to be changed.
    fn node_mut(&mut self, ticket: Ticket) -> &mut Node;
}

/// The gate's state of an entry. It stays in the caller's table, beside the caller's own state of
/// the entry.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    /// The first block.
    pub(super) lba: u64,
    /// The block after the last.
    pub(super) end: u64,
    pub(super) ordinal: u32,
    /// The entry before it on the drive's list, or [`NONE`].
    pub(super) before: u32,
    /// The entry after it on the drive's list, or [`NONE`].
    pub(super) after: u32,
    /// How many earlier entries that are not completed overlap this one.
    pub(super) blockers: u32,
    /// The index of its drive at the gate.
    pub(super) drive: u8,
    /// Whether it is a write or a discard. An entry that is neither is a flush only.
    pub(super) writes: bool,
    /// Whether a FLUSH of the drive belongs to it.
    pub(super) flush: bool,
    pub(super) state: State,
}

impl Node {
    /// The node of a free ticket.
    pub const FREE: Self = Self {
        lba: 0,
        end: 0,
        ordinal: 0,
        before: NONE,
        after: NONE,
        blockers: 0,
        drive: 0,
        writes: false,
        flush: false,
        state: State::Free,
    };

    #[inline]
    pub(super) const fn overlaps(&self, other: &Self) -> bool {
        self.lba < other.end && other.lba < self.end
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The ticket is free.
    Free,
    /// Arrived before its predecessors.
    Early,
    /// Admitted, but its write would overlap one in flight.
    Waiting,
    /// The step to write was given, and the write has not come back.
    Writing,
    /// Written (or with nothing to write). Its FLUSH is to come or in flight.
    Unflushed,
}
