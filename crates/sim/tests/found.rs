//! Replays of all failures that the simulator found. Each file in `found/` is a scenario that once
//! broke a promise, as small as possible. Its name has the number of the seed and the subject. The
//! seed alone is not enough, because its scenario changes.
//!
//! Most were faults of the product. These were faults of the simulator:
//! - A connection of a closed stream stalls (7700126203, 7700141327, 88000001003,
//!   53585816826652604; the runs never ended).
//! - An unreachable target is asked without a pause (7700131578, P8).
//! - An owner continues after its streams were fenced (four seeds that begin with 1010827032, P8).
//! - One acceptance covers two lost logs (6004165, P1).
//! - A stream gets a group before it is bound everywhere (265238472716414, P8).
//! - The write of a plain host arrives after the host has left (771000014798, P5).
//! - A fenced owner does not read the labels, as the program does (881000041571, P2).
//! - An owner asks a target that does not answer until its queue is full (90909000061320).
//! - A message of an owner was received again after its lease (31415926000040456, P5).
//! - A message of an owner was received before the owner had resumed (7300057561, P5).
//! - A power cut tore a durable label (905090110044477, P2).
//! - A discard counted as undone after a plain host had written over it (132278238373490, P3).
//! - A plain write was checked against the owner at its arrival, but a busy core handled it later
//!   (252133499934597, P8; 409822777595034, P5).
//! - A stream's connection came up and was lost within one round (252133499968377, P8).
//! - The target had ended an association whose connection still existed (409822778179368, P7).
//! - A reader missed the data that a drive without a log had lost with its power (409822777849367,
//!   P9).
//! - A fenced owner released the volume (119177029109668, P5).
//! - A FLUSH of a plain host, or the answer to its write, arrived when the volume had another owner
//!   (76967645889918, P5).
//! - A block that had failed kept a content that its drive had lost (96061337537901, P1).
//! - The commit block of a group that a follower waits for was not known as one (152997610573975,
//!   192420161265424, P6).
//! - A block had passed to another stream when its first stream began anew (84108309505023,
//!   251360287247912, P5).
//! - Recovery copied home what a plain host had written into the prepare area of a drive whose target
//!   had lost its log (191561862642991, P5).
//! - An attached volume was judged too strictly when its process had died in a replay: the documentation had
//!   promised that no block has older content then (46927744140237, 278173951345987,
//!   72258494374764, P2).
//! - A drive had failed a FLUSH, and a read came before its initiator learned of that (72258494349338, P9).
//! - A drive had failed a write, and lost the content of the block with its power (1099, P9).
//! - A device whose owner was fenced while it only read waited for ever (262573217996721, P8), and after that
//!   for longer than a run lasts (75698751278838, P8).
//!
//! Two were faults of the log of records: 134 (P8) and 274556666692902569 (P2).

use std::path::Path;

use riopipe_sim::attempt::{Bounded, RUN_LIMIT};
use riopipe_sim::draw::draw;
use riopipe_sim::scenario::Scenario;

#[test]
fn failures_found_once_do_not_return() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/found");
    let mut bounded = Bounded::new(RUN_LIMIT);
    let mut run = 0;
    for file in std::fs::read_dir(dir).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let scenario = Scenario::from_text(&text).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        let (_, fault) = bounded.run(&scenario, None);
        assert_eq!(fault, None, "{path:?}");
        run += 1;
    }
    assert!(run >= 10, "{run} scenarios were found");
}

#[test]
fn some_seeds_run_clean() {
    let mut bounded = Bounded::new(RUN_LIMIT);
    let (mut events, mut crashes) = (0, 0);
    for seed in 1..=60 {
        let (outcome, fault) = bounded.run(&draw(seed), None);
        assert_eq!(fault, None, "seed {seed}");
        events += outcome.events;
        crashes += outcome.crashes;
    }
    assert!(events > 60 * 300, "a seed has real work in it: {events} events");
    assert!(crashes > 60, "and a crash in most: {crashes}");
}
