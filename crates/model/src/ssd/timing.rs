//! Completion times of the modelled drive, without its data.
//!
//! The completion time of an operation is computed at its submission, from the time, the earlier
//! operations and the seed. docs/media.md has the formulas, of which this file is the only
//! implementation.
//!
//! ```text
//! write: port (controller and link) ──▶ cache ──▶ completion
//!                                        └──▶ units of the medium, later
//! read:  port ──▶ units of the medium ──▶ completion
//! ```

use alloc::vec;
use alloc::vec::Vec;

use super::{Order, Profile};
use crate::seed::Seed;

/// The times at which each part of a drive is free again. All times are in ns on the caller's
/// clock, which must not decrease.
#[derive(Debug, Clone)]
pub struct Timing {
    profile: &'static Profile,
    /// The order of the drive, which makes writes slower.
    order: Order,
    /// Time at which controller and link are free. Commands use them one after the other.
    port_free: u64,
    /// Time at which all accepted blocks will have been programmed.
    cache_drained: u64,
    /// Time at which each part of the medium is free for a read.
    units_free: Vec<u64>,
    last_flush: FlushExecution,
    random: Seed,
}

/// The time from the begin of a FLUSH's execution to its completion.
#[derive(Debug, Clone, Copy, Default)]
struct FlushExecution {
    start: u64,
    end: u64,
}

impl Timing {
    /// An idle drive that keeps no order. `seed` determines the spread of write latencies.
    pub fn new(profile: &'static Profile, seed: u64) -> Timing {
        Self::with_order(profile, Order::NONE, seed)
    }

    /// An idle drive that keeps an order.
    pub fn with_order(profile: &'static Profile, order: Order, seed: u64) -> Timing {
        Timing {
            profile,
            order,
            port_free: 0,
            cache_drained: 0,
            units_free: vec![0; profile.units as usize],
            last_flush: FlushExecution::default(),
            random: Seed::new(seed),
        }
    }

    /// Time at which a write of `blocks` blocks that arrives at `now` completes.
    pub fn write(&mut self, now: u64, blocks: u64) -> u64 {
        let profile = self.profile;
        let drain_block_ns = self.order.penalized(profile.drain_block_ns());
        // The cache has space as soon as at most this number of earlier blocks is in it.
        let earlier_blocks_max = profile.cache_blocks.saturating_sub(blocks);
        let cache_has_space =
            self.cache_drained.saturating_sub(earlier_blocks_max * drain_block_ns);
        let start = now.max(self.port_free).max(cache_has_space);
        let transfer = profile.write_command_ns.max(blocks * profile.link_block_ns);
        let arrived = start + self.order.penalized(transfer);
        self.port_free = arrived;
        self.cache_drained = self.cache_drained.max(arrived) + blocks * drain_block_ns;
        let spread = self.random.below(profile.write_spread_ns.max(1));
        arrived + profile.write_latency_ns - profile.write_spread_ns / 2 + spread
    }

    /// Time at which a command that only changes the drive's tables (write zeroes, deallocate)
    /// completes.
    pub fn update_tables(&mut self, now: u64) -> u64 {
        let start = now.max(self.port_free);
        self.port_free = start + self.profile.write_command_ns;
        self.port_free + self.profile.write_latency_ns
    }

    /// Time at which a read of `blocks` blocks from `lba` on that arrives at `now` completes.
    pub fn read(&mut self, now: u64, lba: u64, blocks: u64) -> u64 {
        let profile = self.profile;
        let start = now.max(self.port_free);
        let accepted = start + profile.read_command_ns.max(blocks * profile.link_block_ns);
        self.port_free = accepted;
        let first_page = lba / profile.read_unit_blocks;
        let last_page = (lba + blocks - 1) / profile.read_unit_blocks;
        let mut read_end = accepted;
        for page in first_page..=last_page {
            // Adjacent pages are on adjacent units, because a flash translation layer stripes them.
            let unit_free = &mut self.units_free[(page % profile.units) as usize];
            *unit_free = (*unit_free).max(accepted) + profile.read_unit_ns;
            read_end = read_end.max(*unit_free);
        }
        read_end + profile.read_latency_ns
    }

    /// Time at which all blocks in the cache at `now` have been programmed.
    pub const fn drained(&self, now: u64) -> u64 {
        if self.cache_drained > now { self.cache_drained } else { now }
    }

    /// Time at which a FLUSH that arrives at `now` completes.
    ///
    /// The FLUSH waits for the FLUSH in execution. FLUSHes that wait together are executed
    /// together.
    pub fn flush(&mut self, now: u64) -> u64 {
        let profile = self.profile;
        if profile.plp {
            return now + profile.flush_base_ns;
        }
        let last_flush_waits = self.last_flush.start > now;
        let start = match last_flush_waits {
            true => self.last_flush.start,
            false => now.max(self.last_flush.end),
        };
        let end = start.max(self.cache_drained) + profile.flush_base_ns;
        self.last_flush = FlushExecution { start, end };
        if profile.flush_blocks_all {
            self.port_free = self.port_free.max(end);
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BinaryHeap;
    use core::cmp::Reverse;

    use super::*;
    use crate::ssd::{FLASH, OPTANE};

    const SECOND: u64 = 1_000_000_000;

    /// Operations per second of a loop that submits the next one when the one `depth` earlier
    /// has completed.
    fn rate(depth: usize, count: u64, mut submit: impl FnMut(u64, u64) -> u64) -> u64 {
        let mut ends = BinaryHeap::new();
        let mut now = 0;
        for i in 0..count {
            if ends.len() == depth {
                let Reverse(end) = ends.pop().unwrap();
                now = u64::max(now, end);
            }
            ends.push(Reverse(submit(now, i)));
        }
        while let Some(Reverse(end)) = ends.pop() {
            now = u64::max(now, end);
        }
        count * SECOND / now
    }

    fn near(value: u64, expected: u64) -> bool {
        value.abs_diff(expected) * 50 <= expected
    }

    #[test]
    fn rates_are_those_of_the_data_sheets() {
        for (profile, one, many) in [(&FLASH, 50_000, 450_000), (&OPTANE, 100_000, 488_000)] {
            let mut drive = Timing::new(profile, 1);
            let r = rate(1, 10_000, |now, _| drive.write(now, 1));
            assert!(near(r, one), "{} write, depth 1: {r}", profile.name);
            let mut drive = Timing::new(profile, 1);
            let r = rate(128, 1_000_000, |now, _| drive.write(now, 1));
            assert!(near(r, many), "{} write, depth 128: {r}", profile.name);
        }
        for (profile, one, many) in [(&FLASH, 15_000, 500_000), (&OPTANE, 112_000, 550_000)] {
            let mut drive = Timing::new(profile, 1);
            let r = rate(1, 10_000, |now, i| drive.read(now, i * 997, 1));
            assert!(near(r, one), "{} read, depth 1: {r}", profile.name);
            let mut drive = Timing::new(profile, 1);
            let r = rate(512, 1_000_000, |now, i| drive.read(now, i * 4, 1));
            assert!(near(r, many), "{} read, depth 512: {r}", profile.name);
        }
    }

    #[test]
    fn the_cache_takes_a_burst_at_link_speed_and_then_drains() {
        let blocks = 32;
        let burst = FLASH.cache_blocks / blocks;
        let mut drive = Timing::new(&FLASH, 1);
        let r = rate(8, burst, |now, _| drive.write(now, blocks)) * blocks * 4096 / 1_000_000;
        assert!(r > 3_000, "{r} MB/s");
        let mut drive = Timing::new(&FLASH, 1);
        let r = rate(8, 100 * burst, |now, _| drive.write(now, blocks)) * blocks * 4096 / 1_000_000;
        assert!(near(r, 2_400), "{r} MB/s");
    }

    #[test]
    fn large_reads_are_as_fast_as_the_link() {
        let blocks = 32;
        for (profile, expected) in [(&FLASH, 3_400), (&OPTANE, 2_400)] {
            let mut drive = Timing::new(profile, 1);
            let r = rate(64, 10_000, |now, i| drive.read(now, i * blocks, blocks));
            let r = r * blocks * 4096 / 1_000_000;
            assert!(near(r, expected), "{}: {r} MB/s", profile.name);
        }
    }

    #[test]
    fn a_read_occupies_only_the_units_that_have_its_blocks() {
        let page = FLASH.read_unit_blocks;
        let link_ns = page * FLASH.link_block_ns;
        let alone = FLASH.read_unit_ns + FLASH.read_latency_ns;
        let mut drive = Timing::new(&FLASH, 1);
        assert_eq!(drive.read(0, 0, page), link_ns + alone);
        // The next page is on a unit that is free.
        assert_eq!(drive.read(0, page, page), 2 * link_ns + alone);
        // The first block of the page after that, and the last one of the first page again.
        let accepted = 2 * link_ns + FLASH.read_command_ns;
        assert_eq!(drive.read(0, 2 * page, 1), accepted + alone);
        assert_eq!(drive.read(0, page - 1, 1), link_ns + FLASH.read_unit_ns + alone);
    }

    #[test]
    fn a_flush_takes_its_base_time_plus_the_dirty_blocks() {
        let mut drive = Timing::new(&FLASH, 1);
        assert_eq!(drive.flush(100), 100 + FLASH.flush_base_ns);

        let mut drive = Timing::new(&FLASH, 1);
        drive.write(0, 1000);
        let arrived = 1000 * FLASH.link_block_ns;
        let dirty = 1000 * FLASH.drain_block_ns();
        assert_eq!(drive.flush(arrived), arrived + dirty + FLASH.flush_base_ns);
    }

    #[test]
    fn a_flush_delays_later_commands_and_waiting_flushes_merge() {
        let mut drive = Timing::new(&FLASH, 1);
        let first = drive.flush(0);
        let second = drive.flush(10);
        let third = drive.flush(20);
        assert_eq!(second, first + FLASH.flush_base_ns);
        assert_eq!(third, second);
        assert!(drive.write(30, 1) > third);

        let mut drive = Timing::new(&FLASH, 1);
        let first = drive.flush(10);
        assert_eq!(drive.flush(10), first + FLASH.flush_base_ns, "the first one is in execution");

        let mut drive = Timing::new(&OPTANE, 1);
        let flush = drive.flush(0);
        assert_eq!(flush, OPTANE.flush_base_ns);
        assert!(drive.read(0, 0, 1) < flush);
    }

    /// A stream flushes before its log is full even without a request (trap T1): twice per 2 MiB of
    /// 64-byte entries. That must cost little.
    #[test]
    fn flushing_twice_per_log_leaves_most_of_the_rate() {
        let every = (2 << 20) / 64 / 2;
        let mut drive = Timing::new(&FLASH, 1);
        let r = rate(128, 1_000_000, |now, i| {
            if i % every == every - 1 {
                drive.flush(now);
            }
            drive.write(now, 1)
        });
        // every × 2.222 µs of writing to 1.72 ms of FLUSH.
        assert!(near(r, 450_000 * 955 / 1000), "{r}");
    }

    #[test]
    fn same_seed_same_times() {
        let times = |seed| {
            let mut drive = Timing::new(&FLASH, seed);
            (0..100).map(|i| drive.write(i * 3, 1)).collect::<Vec<_>>()
        };
        assert_eq!(times(7), times(7));
        assert_ne!(times(7), times(8));
        assert!(!times(7).is_sorted(), "writes complete out of order");
    }
}
