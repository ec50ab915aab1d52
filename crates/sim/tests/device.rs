//! A plain block device on the simulated volume: some seeds.

use riopipe_sim::attempt::{Bounded, RUN_LIMIT};
use riopipe_sim::core::Trace;
use riopipe_sim::device::DeviceCounts;
use riopipe_sim::draw::draw_device;
use riopipe_sim::world::run;

#[test]
fn some_seeds_run_clean() {
    let mut bounded = Bounded::new(RUN_LIMIT);
    let (mut all, mut crashes) = (DeviceCounts::default(), 0);
    for seed in 1..=120 {
        let (outcome, fault) = bounded.run(&draw_device(seed), None);
        assert_eq!(fault, None, "seed {seed}");
        all += outcome.device;
        crashes += outcome.crashes;
    }
    assert!(crashes > 120, "there are crashes: {crashes}");
    assert!(all.requests > 120 * 20 && all.reads > 100, "a host has real work: {all:?}");
    let rare = [all.full, all.failures, all.reads_in_doubt, all.cut, all.lived_on];
    assert!(rare.iter().all(|count| *count > 0), "all of this happens: {all:?}");
    assert!(all.attached > 120 * 2, "the volume is attached again: {all:?}");
}

#[test]
fn a_seed_is_always_the_same_run() {
    for seed in [3, 5, 8] {
        let scenario = draw_device(seed);
        let [one, other] = [(), ()].map(|()| {
            let trace = Trace::default();
            let outcome = run(&scenario, Some(trace.clone()));
            (trace.take(), outcome.events)
        });
        assert!(one.0.len() > 100 && one == other, "seed {seed}");
    }
}
