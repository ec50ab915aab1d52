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
        let asking = keys.iter().filter(|(key, value)| !is_neutral(key, value));
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
fn is_neutral(key: &str, value: &Value) -> bool {
    match (key, value) {
        (_, Value::Null) => true,
        (_, Value::Array(list)) if list.is_empty() => true,
        (_, Value::Object(keys)) if keys.is_empty() => true,
        ("ana_grpid", Value::Number(group)) => group.as_u64() == Some(1),
        ("ana_groups", Value::Array(groups)) => {
            groups.iter().all(|group| group["ana"]["state"] == "optimized")
        }
        _ => false,
    }
}
