//! Everything the simulator ever found stays found: each file in `found/` is a scenario that broke
//! a promise once, as small as it could be made, under the seed's number and what it was about. A
//! seed alone would not do: what it draws changes.

use std::path::Path;

use riopipe_sim::attempt::attempt;
use riopipe_sim::draw::draw;
use riopipe_sim::scenario::Scenario;

#[test]
fn what_was_found_once_holds_now() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/found");
    let mut run = 0;
    for file in std::fs::read_dir(dir).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let scenario = Scenario::from_text(&text).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        let outcome = attempt(&scenario, false).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        assert_eq!(outcome.violation, None, "{path:?}");
        run += 1;
    }
    assert!(run >= 8, "{run} scenarios were found");
}

#[test]
fn some_seeds_run_clean() {
    let (mut events, mut crashes) = (0, 0);
    for seed in 1..=60 {
        let outcome = attempt(&draw(seed), false).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert_eq!(outcome.violation, None, "seed {seed}");
        events += outcome.events;
        crashes += outcome.crashes;
    }
    assert!(events > 60 * 300, "a seed has real work in it: {events} events");
    assert!(crashes > 60, "and a crash in most: {crashes}");
}
