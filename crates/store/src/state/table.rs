//! The objects and their blocks.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

use super::BLOCK;
use super::record::{Change, object_bytes};

/// An object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Object {
    /// Its size in bytes.
    pub(crate) size: u64,
    /// The volume block of each of its blocks.
    pub(crate) lbas: Vec<u64>,
    /// The number of the last transaction that changed it.
    pub(crate) changed: u64,
}

/// The objects, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) objects: BTreeMap<String, Object>,
    /// Bytes of all objects in a snapshot.
    pub(crate) bytes: usize,
}

impl Table {
    pub(crate) fn get(&self, name: &str) -> Option<&Object> {
        self.objects.get(name)
    }

    /// Adds or replaces an object; returns the old one.
    pub(crate) fn insert(&mut self, name: String, object: Object) -> Option<Object> {
        self.bytes += object_bytes(&name, &object.lbas);
        let bytes_of_name = name.len();
        let old = self.objects.insert(name, object);
        if let Some(old) = &old {
            // The length of the name counts, not its bytes.
            self.bytes -= object_bytes("", &old.lbas) + bytes_of_name;
        }
        old
    }

    pub(crate) fn remove(&mut self, name: &str) -> Option<Object> {
        let old = self.objects.remove(name)?;
        self.bytes -= object_bytes(name, &old.lbas);
        Some(old)
    }

    /// Applies a change of transaction `number`. Returns the blocks that no object has any more.
    /// `None`: the change does not fit the table, which is as before.
    pub(crate) fn apply(&mut self, number: u64, change: &Change) -> Option<Vec<u64>> {
        let (name, size, first, is_last, new) = match change {
            Change::Remove { name } => return self.remove(name).map(|old| old.lbas),
            Change::Store { name, size, first, is_last, lbas, .. } => {
                (name, *size, usize::try_from(*first).ok()?, *is_last, lbas)
            }
        };
        let old = self.get(name).map_or(&[][..], |object| &object.lbas);
        let end = first.checked_add(new.len())?;
        let rest = if is_last { &[][..] } else { old.get(end..).unwrap_or(&[]) };
        let kept = old.get(..first)?;
        let mut freed = old[first..].to_vec();
        freed.truncate(old.len() - first - rest.len());
        let lbas = [kept, new, rest].concat();
        if lbas.len() as u64 != size.div_ceil(BLOCK as u64) {
            return None;
        }
        self.insert(name.clone(), Object { size, lbas, changed: number });
        Some(freed)
    }
}
