//! The host's halves of the orders that drives keep, against oracles that know only what was asked
//! for.

mod pinning;
mod scheduler;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn the_scheduler_keeps_epochs_in_order(seed: u64) {
        prop_assert_eq!(scheduler::check(seed), Ok(()));
    }

    #[test]
    fn epochs_stay_in_one_queue_and_keep_their_order(seed: u64) {
        prop_assert_eq!(pinning::check(seed), Ok(()));
    }
}
