//! The writes of a workload for one thread: an endless sequence of groups.

use std::ops::Range;

use crate::{
    permutation::{Permutation, mix},
    workload::{BLOCK, Pattern, Shape, Workload},
};

/// The place of one write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First block on the volume.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u32,
}

/// The groups of one thread. The same workload, thread and area give the same groups.
#[derive(Clone, Debug)]
pub struct Generator {
    area: Range<u64>,
    writes: Writes,
    /// Index of the next write.
    next: u64,
}

#[derive(Clone, Debug)]
enum Writes {
    Uniform {
        blocks: u32,
        batch: u64,
        group: u32,
        /// Number of batches in the area.
        places: u64,
        /// Permutation of the batches; `None`: in order.
        walk: Option<Permutation>,
        /// The batch of the next write in this lap, and its place in the batch. They are counted:
        /// two divisions per write would affect the measurement.
        at: (u64, u64),
    },
    Journal {
        transactions: u64,
    },
}

impl Generator {
    /// The groups of a workload that passed [`Workload::check`], for thread `thread` and the area
    /// that [`Workload::area`] returned for it.
    ///
    /// # Panics
    /// If the area is smaller than one batch, which `Workload::area` never returns.
    #[must_use]
    pub fn new(workload: &Workload, thread: u32, area: Range<u64>) -> Self {
        let places = (area.end - area.start) / workload.unit_blocks();
        assert!(places > 0, "an area of {area:?} holds nothing");
        let writes = match workload.shape {
            Shape::Journal => Writes::Journal { transactions: places },
            Shape::Uniform { pattern, size, batch, group } => Writes::Uniform {
                blocks: size / BLOCK,
                batch: u64::from(batch),
                group,
                places,
                walk: (pattern == Pattern::Random)
                    .then(|| Permutation::new(places, mix(workload.seed) ^ u64::from(thread))),
                at: (0, 0),
            },
        };
        Self { area, writes, next: 0 }
    }

    /// Puts the writes of the next group, at least one, into `group` (cleared first).
    #[inline]
    pub fn next_group(&mut self, group: &mut Vec<Extent>) {
        group.clear();
        for _ in 0..self.writes_in_next_group() {
            group.push(self.next_write());
        }
    }

    /// The number of writes that [`next_group`](Generator::next_group) would return.
    #[must_use]
    pub fn writes_in_next_group(&self) -> u32 {
        match self.writes {
            Writes::Uniform { group, .. } => group,
            Writes::Journal { .. } => 1,
        }
    }

    /// Whether the last group ended a batch: no later write can be merged with it, so everything
    /// should be sent now.
    #[must_use]
    pub fn at_batch_end(&self) -> bool {
        match &self.writes {
            Writes::Uniform { at: (_, within), .. } => *within == 0,
            Writes::Journal { .. } => self.next.is_multiple_of(2),
        }
    }

    #[inline]
    fn next_write(&mut self) -> Extent {
        let i = self.next;
        self.next += 1;
        match &mut self.writes {
            Writes::Uniform { blocks, batch, places, walk, at, .. } => {
                let (place, within) = *at;
                *at = match (place + 1, within + 1) {
                    (_, within) if within < *batch => (place, within),
                    (place, _) if place < *places => (place, 0),
                    _ => (0, 0),
                };
                let place = walk.as_ref().map_or(place, |walk| walk.at(place));
                let write = place * *batch + within;
                Extent { lba: self.area.start + write * u64::from(*blocks), blocks: *blocks }
            }
            Writes::Journal { transactions } => {
                let start = self.area.start + i / 2 % *transactions * 3;
                if i.is_multiple_of(2) {
                    Extent { lba: start, blocks: 2 }
                } else {
                    Extent { lba: start + 2, blocks: 1 }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::access::Access;

    fn groups(workload: &Workload, thread: u32, blocks: u64, count: usize) -> Vec<Vec<Extent>> {
        workload.check().unwrap();
        let area = workload.area(thread, blocks).unwrap();
        let mut generator = Generator::new(workload, thread, area);
        (0..count)
            .map(|_| {
                let mut group = Vec::new();
                generator.next_group(&mut group);
                group
            })
            .collect()
    }

    fn uniform(pattern: Pattern, size: u32, batch: u32, group: u32) -> Workload {
        Workload {
            access: Access::Write,
            shape: Shape::Uniform { pattern, size, batch, group },
            queue_depth: group.max(4),
            threads: 2,
            seed: 42,
        }
    }

    #[test]
    fn the_papers_journal() {
        let workload = Workload::journal(2, 1);
        let extent = |lba, blocks| vec![Extent { lba, blocks }];
        // 13 blocks per thread hold four transactions.
        assert_eq!(
            groups(&workload, 1, 26, 9),
            [
                extent(13, 2),
                extent(15, 1),
                extent(16, 2),
                extent(18, 1),
                extent(19, 2),
                extent(21, 1),
                extent(22, 2),
                extent(24, 1),
                extent(13, 2),
            ]
        );
    }

    #[test]
    fn sequential_writes_touch_and_wrap() {
        let workload = uniform(Pattern::Sequential, 8192, 1, 2);
        let writes: Vec<_> = groups(&workload, 0, 20, 4).concat();
        let lbas: Vec<_> = writes.iter().map(|e| e.lba).collect();
        assert_eq!(lbas, [0, 2, 4, 6, 8, 0, 2, 4]);
        assert!(writes.iter().all(|e| e.blocks == 2));
    }

    #[test]
    fn writes_of_a_batch_are_adjacent_and_batches_are_scattered() {
        let workload = uniform(Pattern::Random, 4096, 4, 1);
        let writes: Vec<_> = groups(&workload, 0, 8000, 400).concat();
        for batch in writes.chunks(4) {
            assert!(batch.windows(2).all(|w| w[1].lba == w[0].lba + 1));
        }
        let touching = writes
            .chunks(4)
            .collect::<Vec<_>>()
            .windows(2)
            .filter(|w| w[1][0].lba == w[0][3].lba + 1)
            .count();
        assert!(touching < 5, "{touching} of 99 batches follow one another");
    }

    #[test]
    fn batch_ends_are_known() {
        let ends = |workload: &Workload| {
            let mut generator = Generator::new(workload, 0, workload.area(0, 6000).unwrap());
            let mut group = Vec::new();
            (0..4)
                .map(|_| {
                    generator.next_group(&mut group);
                    generator.at_batch_end()
                })
                .collect::<Vec<_>>()
        };
        let batches = uniform(Pattern::Random, 4096, 4, 2);
        assert_eq!(ends(&batches), [false, true, false, true]);
        let larger = uniform(Pattern::Random, 4096, 2, 4);
        assert_eq!(ends(&larger), [true; 4]);
        assert_eq!(ends(&Workload::journal(2, 1)), [false, true, false, true]);
    }

    #[test]
    fn seeds_and_threads_differ_and_repeat() {
        let one = uniform(Pattern::Random, 4096, 1, 1);
        let two = Workload { seed: 43, ..one };
        let of = |w, t| groups(w, t, 20_000, 50);
        assert_eq!(of(&one, 0), of(&one, 0));
        assert_ne!(of(&one, 0), of(&two, 0));
        let shifted: Vec<_> =
            of(&one, 1).concat().iter().map(|e| Extent { lba: e.lba - 10_000, ..*e }).collect();
        assert_ne!(of(&one, 0).concat(), shifted);
    }

    proptest! {
        /// Every write of every workload stays in its thread's area, and none overlaps one that may
        /// still be in flight (T12 has tests of its own).
        #[test]
        fn in_bounds_and_never_overlapping_in_flight(
            random in any::<bool>(),
            blocks in 1u32..5,
            batch_bits in 0u32..4,
            group_bits in 0u32..4,
            thread in 0u32..2,
            seed in any::<u64>(),
            volume in 2_000u64..4_000,
        ) {
            let pattern = if random { Pattern::Random } else { Pattern::Sequential };
            let mut workload =
                uniform(pattern, blocks * BLOCK, 1 << batch_bits, 1 << group_bits);
            workload.seed = seed;
            let area = workload.area(thread, volume).unwrap();
            let lap = (area.end - area.start) / u64::from(blocks);
            let writes: Vec<_> = groups(&workload, thread, volume, 300).concat();
            for write in &writes {
                prop_assert!(write.lba >= area.start);
                prop_assert!(write.lba + u64::from(write.blocks) <= area.end);
            }
            let window = (lap as usize).min(writes.len());
            let mut lbas: Vec<_> = writes[..window].iter().map(|w| w.lba).collect();
            lbas.sort_unstable();
            prop_assert!(lbas.windows(2).all(|w| w[1] >= w[0] + u64::from(blocks)));
            // A lap has as many whole batches as the area, and the next one is the same.
            let lap = (lap - lap % (1 << batch_bits)) as usize;
            let twice = groups(&workload, thread, volume, 2 * lap).concat();
            prop_assert_eq!(&twice[..lap], &twice[lap..2 * lap]);
        }
    }
}
