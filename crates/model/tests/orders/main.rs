//! Drives that keep an order, against an oracle that knows only the commands: every power cut, at
//! every step.

mod names;
mod oracle;
mod rules;
mod scenario;
mod world;

use proptest::prelude::*;
use riopipe_order::write_order::DriveOrder;
use world::Seen;

/// Checks the scenario of a seed.
fn check(kind: DriveOrder, seed: u64) -> Seen {
    let scenario = scenario::draw(kind, seed);
    world::check(&scenario).unwrap_or_else(|error| panic!("seed {seed}: {error}\n{scenario:#?}"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn a_cache_barrier_is_kept_by_every_power_cut(seed: u64) {
        check(DriveOrder::Barrier, seed);
    }

    #[test]
    fn epochs_are_kept_by_every_power_cut(seed: u64) {
        check(DriveOrder::Epochs, seed);
    }
}

#[test]
fn power_cuts_lose_keep_and_land_and_operations_wait() {
    for kind in [DriveOrder::Barrier, DriveOrder::Epochs] {
        let mut seen = Seen::default();
        for seed in 0..60 {
            seen.add(check(kind, seed));
        }
        assert!(seen.lost > 0 && seen.kept > 0 && seen.landed > 0 && seen.failed > 0, "{seen:?}");
        assert_eq!(seen.waited > 0, kind == DriveOrder::Epochs, "{seen:?}");
    }
}
