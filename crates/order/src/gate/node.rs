//! The gate's state of an entry, and the caller's table of entries.

use super::step::Ticket;

/// The value of a ticket field that names no entry.
pub(super) const NONE: u32 = u32::MAX;

/// A table of entries, by ticket.
///
/// # Panics
/// Both functions panic if the ticket is beyond the table.
pub trait Table {
    /// The gate's state of an entry.
    fn node(&self, ticket: Ticket) -> &Node;

    /// The gate's state of an entry, to be changed.
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
    /// The place of the entry among the stream's entries on this server.
    pub(super) ordinal: u32,
    /// The entry before this one on the drive's list of unwritten entries, or [`NONE`].
    pub(super) before: u32,
    /// The entry after this one on that list, or [`NONE`].
    pub(super) after: u32,
    /// The number of earlier entries that overlap this one and whose write is not completed.
    pub(super) blockers: u32,
    /// The index of the drive at the gate.
    pub(super) drive: u8,
    /// Whether the entry has a write or a discard. An entry without one is a FLUSH only.
    pub(super) has_write: bool,
    /// Whether a FLUSH of the drive belongs to the entry.
    pub(super) has_flush: bool,
    pub(super) state: NodeState,
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
        has_write: false,
        has_flush: false,
        state: NodeState::Free,
    };

    /// Whether the two entries, of one drive, touch a common block.
    #[inline]
    pub(super) const fn overlaps(&self, other: &Self) -> bool {
        self.lba < other.end && other.lba < self.end
    }
}

/// The state of an entry at the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeState {
    /// The ticket is free.
    Free,
    /// The entry arrived before its predecessors, and waits for them.
    Early,
    /// The entry is admitted, and its write waits for an earlier write that overlaps it.
    Waiting,
    /// The caller has the step to write, and the write has not ended.
    Writing,
    /// The write has ended, or there is none. The FLUSH is due or in flight.
    Unflushed,
}
