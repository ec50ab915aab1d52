//! Which writes a power cut may lose, and which it loses.

use super::*;
use crate::ssd::names::{Names, no_space};

/// The blocks below `count` for which a power cut may restore an older content.
fn losable_blocks(store: &Store<Names>, count: u64) -> Vec<u64> {
    (0..count).filter(|lba| store.older_contents(*lba).next().is_some()).collect()
}

#[test]
fn as_many_writes_can_be_lost_as_the_profile_allows() {
    let mut store = Store::new(Names::zeroes(6), 3);
    for (lba, losable) in
        [&[0][..], &[0, 1], &[0, 1, 2], &[1, 2, 3], &[2, 3, 4], &[3, 4, 5]].into_iter().enumerate()
    {
        store.put(lba as u64, 7).unwrap();
        assert_eq!(losable_blocks(&store, 6), losable);
    }
}

#[test]
fn the_oldest_writes_become_durable_when_no_page_is_left() {
    let mut store = Store::new(Names::with_pages(&[1, 2, 3, 4], 2), 100);
    for lba in 0..4 {
        store.put(lba, 7).unwrap();
    }
    assert_eq!(store.pages().blocks, [7; 4]);
    assert_eq!(losable_blocks(&store, 4), [2, 3]);
}

#[test]
fn a_flush_leaves_later_writes_losable() {
    let mut store = Store::new(Names::zeroes(5), 100);
    store.put(0, 7).unwrap();
    store.put(1, 7).unwrap();
    let before = store.position();
    store.put(2, 7).unwrap();
    store.put(3, 7).unwrap();
    let between = store.position();
    store.put(4, 7).unwrap();
    store.make_durable(before);
    assert_eq!(losable_blocks(&store, 5), [2, 3, 4]);
    store.make_durable(between);
    store.make_durable(before);
    assert_eq!(losable_blocks(&store, 5), [4]);
}

/// The number of blocks of each kind in the next test.
const KIND: usize = 32;

/// Cuts the power with `seed`. Of the blocks, as many have
///
/// - a durable content (1), a completed write (2) and two in flight (3 and 4),
/// - zeroes and the same writes in flight.
///
/// Checks that the report of the cut agrees with the contents, and returns these.
fn cut_power(seed: u64) -> Vec<u32> {
    let mut contents = vec![1; KIND];
    contents.resize(2 * KIND, 0);
    let mut store = Store::new(Names::with_pages(&contents, 1000), 100);
    for lba in 0..KIND {
        store.put(lba as u64, 2).unwrap();
    }
    let written = |page| (0..2 * KIND as u64).map(move |lba| InFlightBlock { lba, page });
    let in_flight: Vec<_> = written(3).chain(written(4)).collect();
    let cut = store.power_cut(&in_flight, seed);
    let after = store.pages().blocks.clone();
    let count = |kept: &dyn Fn(u32) -> bool| after.iter().filter(|name| kept(**name)).count();
    assert_eq!(cut.blocks_lost, count(&|name| name == 1) as u64);
    assert_eq!(cut.blocks_kept, count(&|name| name == 2) as u64);
    assert_eq!(cut.blocks_landed, count(&|name| name > 2) as u64);
    assert!(losable_blocks(&store, 2 * KIND as u64).is_empty(), "what was kept is durable");
    after
}

#[test]
fn a_power_cut_reports_what_it_did_and_is_often_extreme() {
    let mut all = [0; 3];
    let mut mixed = 0;
    for seed in 0..400 {
        let after = cut_power(seed);
        let (completed, in_flight_only) = after.split_at(KIND);
        let extremes = [(1, 0), (2, 0), (4, 4)];
        let extreme = extremes.iter().position(|(first, second)| {
            completed.iter().all(|name| name == first)
                && in_flight_only.iter().all(|name| name == second)
        });
        match extreme {
            Some(extreme) => all[extreme] += 1,
            None => mixed += 1,
        }
    }
    // Each extreme is one of eight cases.
    assert!(all.iter().all(|count| (25..=75).contains(count)), "{all:?}");
    assert!((200..=300).contains(&mixed), "{mixed}");
}

#[test]
fn a_block_keeps_its_newest_content_by_the_severity() {
    let mut random = Seed::new(1);
    for keep_quarters in 0..4 {
        let severity = Severity::Each { keep_quarters };
        let mut picked = [0; 4];
        for _ in 0..16_000 {
            picked[severity.pick(&mut random, 4, 1)] += 1;
        }
        // Of 16,000 blocks this many keep their content, and the others get any of the four.
        let kept = keep_quarters * 4_000;
        let any = (16_000 - kept) / 4;
        for (index, count) in (0..).zip(picked) {
            let expected = if index == 1 { kept + any } else { any };
            assert!(expected.abs_diff(count) < 300, "{keep_quarters} quarters: {picked:?}");
        }
    }
}

#[test]
fn a_write_that_replaces_a_content_without_a_page_is_durable() {
    for seed in 0..50 {
        let mut store = Store::new(Names::with_pages(&[5], 0), 100);
        store.put(0, 7).unwrap();
        assert!(losable_blocks(&store, 1).is_empty());
        assert_eq!(store.power_cut(&[], seed), PowerCut::default());
        assert_eq!(store.pages().blocks, [7]);
    }
}

#[test]
fn a_block_that_fails_keeps_its_content_and_no_page_is_lost() {
    for losable_max in [0, 100] {
        let mut store = Store::new(Names::with_pages(&[1, 2], 9), losable_max);
        store.pages_mut().failing = Some(1);
        assert_eq!(store.put(1, 7), Err(no_space()));
        assert_eq!(store.pages().blocks, [1, 2]);
        assert_eq!(store.pages().free_pages, 10, "the page of the write is free again");
        store.put(0, 7).unwrap();
        assert_eq!(losable_blocks(&store, 2).len(), usize::from(losable_max > 0));
    }
}
