//! The keys of a file that a Rio target does not use.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::check::Problem;

/// The keys of an object that have no field, with their values.
pub(super) type Keys = BTreeMap<String, Value>;

/// Remarks on a file.
#[derive(Debug, Default)]
pub(super) struct Remarks(Vec<Problem>);

impl Remarks {
    /// Adds a remark.
    pub(super) fn add(
        &mut self,
        place: impl Into<String>,
        what: impl std::fmt::Display,
        advice: &str,
    ) {
        self.0.push(Problem::new(place, what, advice));
    }

    /// Adds a remark on the keys of an object that are not used, if any of them asks for something.
    pub(super) fn add_unused(&mut self, place: impl Into<String>, keys: &Keys) {
        let asking = keys.iter().filter(|(_, value)| !is_neutral(value));
        let names: Vec<&str> = asking.map(|(key, _)| key.as_str()).collect();
        if !names.is_empty() {
            self.add(place, format!("{}: no meaning for a Rio target", names.join(", ")), "");
        }
    }

    /// The remarks, in their order.
    pub(super) fn into_problems(self) -> Vec<Problem> {
        self.0
    }
}

/// Whether a key has the value that nvmetcli writes if it was not set.
fn is_neutral(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(keys) => keys.is_empty(),
        _ => false,
    }
}
