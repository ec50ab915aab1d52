//! The entries of older bindings that a resumed log remembers, so that a replayed one is not
//! appended twice, and the incarnation in which each was appended (P7, T6, T13).

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::error::AppendError;
use super::scan::LoggedEntry;
use crate::attribute::{Attribute, Seq};
use crate::entry::{Origin, Position};
use crate::group::has_same_shape;

/// The entries of older bindings that are not released yet.
#[derive(Debug, Default)]
pub(super) struct Adoption {
    /// The entries by group and index in it (T6).
    entries: BTreeMap<(Seq, u16), (Position, Attribute)>,
    /// The first position of each binding, and its owner and incarnation, in order.
    origins: Vec<(Position, Origin)>,
}

impl Adoption {
    /// Remembers these entries. They are in order of position.
    pub(super) fn of(entries: &[LoggedEntry]) -> Self {
        let mut origins: Vec<(Position, Origin)> = Vec::new();
        for entry in entries {
            if origins.last().is_none_or(|&(_, origin)| origin != entry.origin) {
                origins.push((entry.position, entry.origin));
            }
        }
        let by_identity =
            |e: &LoggedEntry| ((e.attribute.seq, e.attribute.index), (e.position, e.attribute));
        Self { entries: entries.iter().map(by_identity).collect(), origins }
    }

    /// The old position of a replayed entry; `None` if the log does not have it.
    pub(super) fn find(&self, replayed: &Attribute) -> Option<Result<Position, AppendError>> {
        let Attribute { seq, index, .. } = *replayed;
        let (position, known) = self.entries.get(&(seq, index))?;
        let same = has_same_shape(known, replayed);
        Some(if same { Ok(*position) } else { Err(AppendError::OtherShape { seq, index }) })
    }

    /// The owner and incarnation that appended the entry at a position of an older binding.
    pub(super) fn origin_of(&self, position: Position) -> Option<Origin> {
        let after = self.origins.partition_point(|&(first, _)| first <= position);
        Some(self.origins[after.checked_sub(1)?].1)
    }

    /// Drops the entries of groups up to `mark`.
    pub(super) fn release(&mut self, mark: Seq) {
        while let Some(first) = self.entries.first_entry()
            && first.get().1.seq_end() <= mark
        {
            first.remove();
        }
    }

    /// The last group that has entries here, or 0.
    pub(super) fn last(&self) -> Seq {
        self.entries.last_key_value().map_or(Seq::ZERO, |(&(seq, _), _)| seq)
    }
}
