//! The entries that a resumed log has already, from older bindings.
//!
//! The owner of a resumed stream sends entries again. The log *adopts* such an entry: it returns
//! the old position, and appends nothing. So recovery never counts an entry twice, and a full log
//! can be replayed. The persist word of an adopted entry must match the binding that appended the
//! entry. So the origin of each entry is kept, too.

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
    /// The entries, by group and index in the group.
    entries: BTreeMap<(Seq, u16), AdoptableEntry>,
    /// The older bindings, in order of position.
    bindings: Vec<OldBinding>,
}

/// An entry that is in the log already.
#[derive(Clone, Copy, Debug)]
struct AdoptableEntry {
    position: Position,
    attribute: Attribute,
}

/// The entries that one owner has appended in one incarnation of the target.
#[derive(Clone, Copy, Debug)]
struct OldBinding {
    first_position: Position,
    origin: Origin,
}

impl Adoption {
    /// The entries that may be adopted. `entries` are in order of position.
    pub(super) fn new(entries: &[LoggedEntry]) -> Self {
        let mut adoption = Self::default();
        for &LoggedEntry { position, attribute, origin, .. } in entries {
            if adoption.bindings.last().is_none_or(|binding| binding.origin != origin) {
                adoption.bindings.push(OldBinding { first_position: position, origin });
            }
            let key = (attribute.seq, attribute.index);
            adoption.entries.insert(key, AdoptableEntry { position, attribute });
        }
        adoption
    }

    /// The old position of a replayed entry; `None` if the log does not have this entry. An entry
    /// with another shape than the one in the log is an error, because a replay changes no entry.
    pub(super) fn find(&self, replayed: &Attribute) -> Option<Result<Position, AppendError>> {
        let Attribute { seq, index, .. } = *replayed;
        let known = self.entries.get(&(seq, index))?;
        if has_same_shape(&known.attribute, replayed) {
            Some(Ok(known.position))
        } else {
            Some(Err(AppendError::OtherShape { seq, index }))
        }
    }

    /// The owner and the incarnation that appended the entry at a position of an older binding.
    pub(super) fn origin_of(&self, position: Position) -> Option<Origin> {
        let begun = self.bindings.partition_point(|binding| binding.first_position <= position);
        Some(self.bindings[..begun].last()?.origin)
    }

    /// Removes the entries of groups up to `mark`.
    pub(super) fn remove_released(&mut self, mark: Seq) {
        while let Some(first) = self.entries.first_entry()
            && first.get().attribute.seq_end() <= mark
        {
            first.remove();
        }
    }

    /// The last group that has entries here; 0 if there are none.
    pub(super) fn last_group(&self) -> Seq {
        self.entries.last_key_value().map_or(Seq::ZERO, |(&(seq, _), _)| seq)
    }
}
