//! Runs a scenario and survives a panic of the code under test.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use crate::scenario::Scenario;
use crate::world::{Outcome, run};

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs a scenario.
///
/// # Errors
/// The code under test panicked: what it said.
pub fn attempt(scenario: &Scenario, traced: bool) -> Result<Outcome, String> {
    be_quiet();
    QUIET.set(true);
    // Everything that the run touches is its own, but for counters that only ever grow.
    let result = panic::catch_unwind(AssertUnwindSafe(|| run(scenario, traced)));
    QUIET.set(false);
    result.map_err(|payload| match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(payload) => payload.downcast_ref::<&str>().map_or("a panic", |text| text).to_owned(),
    })
}

/// A panic inside a run is told with the run's outcome, not on standard error.
fn be_quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                before(info);
            }
        }));
    });
}
