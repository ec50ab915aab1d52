//! The slots of a group: its blocks, or its inodes. A slot is free, in use, or blocked: free in the
//! bitmap that a commit writes, but not to be allocated yet.

use alloc::boxed::Box;

use crate::block::{BLOCK_BYTES, Block};

const WORDS: usize = BLOCK_BYTES / 8;
type Bits = Box<[u64; WORDS]>;

/// The slots of a group, numbered from 0.
#[derive(Debug)]
pub(super) struct Slots {
    /// The number of slots. The bits of `used` from here on are set.
    count: u32,
    used: Bits,
    /// The number of slots that are not in use.
    free_count: u32,
    /// Bits that are not in `used`; `None` if there are none.
    blocked: Option<Bits>,
    blocked_count: u32,
}

/// The words that have bits `start..start + len`, with a mask of those bits in each.
fn masks(start: u32, len: u32) -> impl Iterator<Item = (usize, u64)> {
    let end = start + len;
    let mut at = start;
    core::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let low = at % 64;
        let bits = (64 - low).min(end - at);
        let mask = if bits == 64 { u64::MAX } else { ((1 << bits) - 1) << low };
        let word = (at / 64) as usize;
        at += bits;
        Some((word, mask))
    })
}

impl Slots {
    /// `count` free slots, at most as many as a block has bits.
    pub(super) fn new(count: u32) -> Self {
        let count = count.min(8 * BLOCK_BYTES as u32);
        let mut slots = Self {
            count,
            used: Box::new([0; WORDS]),
            free_count: count,
            blocked: None,
            blocked_count: 0,
        };
        // The bits without a slot.
        for (word, mask) in masks(count, 8 * BLOCK_BYTES as u32 - count) {
            slots.used[word] |= mask;
        }
        slots
    }

    /// `count` slots, of which those with a bit in the bitmap are in use.
    pub(super) fn decode(bitmap: &Block, count: u32) -> Self {
        let mut slots = Self::new(count);
        for (word, bytes) in slots.used.iter_mut().zip(bitmap.as_chunks::<8>().0) {
            *word |= u64::from_le_bytes(*bytes);
        }
        slots.free_count = slots.used.iter().map(|word| word.count_zeros()).sum();
        slots
    }

    /// The bitmap that a commit writes.
    pub(super) fn encode(&self) -> Box<Block> {
        let mut bitmap = Box::new([0; BLOCK_BYTES]);
        for (word, bytes) in self.used.iter().zip(bitmap.as_chunks_mut::<8>().0) {
            *bytes = word.to_le_bytes();
        }
        bitmap
    }

    /// The number of slots that are not in use, blocked ones too.
    pub(super) const fn free_count(&self) -> u32 {
        self.free_count
    }

    /// The number of blocked slots.
    pub(super) const fn blocked_count(&self) -> u32 {
        self.blocked_count
    }

    /// Whether all slots of a range are in use.
    pub(super) fn are_used(&self, start: u32, len: u32) -> bool {
        masks(start, len).all(|(word, mask)| self.used[word] & mask == mask)
    }

    /// Whether no slot of a range is in use. Slots that do not exist are not counted.
    pub(super) fn are_free(&self, start: u32, len: u32) -> bool {
        let len = len.min(self.count.saturating_sub(start));
        masks(start, len).all(|(word, mask)| self.used[word] & mask == 0)
    }

    /// The last slot that is in use.
    pub(super) fn last_used(&self) -> Option<u32> {
        (0..self.count.div_ceil(64)).rev().find_map(|word| {
            let slots = (self.count - 64 * word).min(64);
            let bits = self.used[word as usize] & (u64::MAX >> (64 - slots));
            (bits != 0).then(|| 64 * word + bits.ilog2())
        })
    }

    /// Sets slots in use, whatever they were. Returns how many were free and not blocked, and how
    /// many were blocked.
    pub(super) fn take(&mut self, start: u32, len: u32) -> (u32, u32) {
        let blocked = self.unblock(start, len);
        let mut taken = 0;
        for (word, mask) in masks(start, len) {
            taken += (!self.used[word] & mask).count_ones();
            self.used[word] |= mask;
        }
        self.free_count -= taken;
        (taken - blocked, blocked)
    }

    /// Frees and blocks the slots of a range that are in use, and passes each run of them.
    pub(super) fn free_and_block(&mut self, start: u32, len: u32, mut run: impl FnMut(u32, u32)) {
        let end = start + len;
        let mut at = start;
        while at < end {
            let first = self.next(at, end, |slots, word| slots.used[word]);
            let after = self.next(first, end, |slots, word| !slots.used[word]);
            if first < after {
                let blocked = self.blocked.get_or_insert_with(|| Box::new([0; WORDS]));
                for (word, mask) in masks(first, after - first) {
                    self.used[word] &= !mask;
                    blocked[word] |= mask;
                }
                self.blocked_count += after - first;
                self.free_count += after - first;
                run(first, after - first);
            }
            at = after;
        }
    }

    /// Frees the slots of a range that are in use, without blocking them. Returns how many.
    pub(super) fn put_back(&mut self, start: u32, len: u32) -> u32 {
        let mut count = 0;
        for (word, mask) in masks(start, len) {
            count += (self.used[word] & mask).count_ones();
            self.used[word] &= !mask;
        }
        self.free_count += count;
        count
    }

    /// Lets the blocked slots of a range be allocated again. Returns how many.
    pub(super) fn unblock(&mut self, start: u32, len: u32) -> u32 {
        let Some(blocked) = &mut self.blocked else { return 0 };
        let mut count = 0;
        for (word, mask) in masks(start, len) {
            count += (blocked[word] & mask).count_ones();
            blocked[word] &= !mask;
        }
        self.blocked_count -= count;
        if self.blocked_count == 0 {
            self.blocked = None;
        }
        count
    }

    /// The number of slots from `start` on that can be allocated, up to `most`.
    pub(super) fn run_at(&self, start: u32, most: u32) -> u32 {
        let end = self.count.min(start.saturating_add(most));
        self.next(start, end, |slots, word| !slots.available(word)).saturating_sub(start)
    }

    /// A run of `want` slots that can be allocated: the first one from `from` on, and then from the
    /// start. If there is none, the longest run.
    pub(super) fn find(&self, from: u32, want: u32) -> Option<(u32, u32)> {
        let mut best: Option<(u32, u32)> = None;
        let from = if from < self.count { from } else { 0 };
        for (mut at, end) in [(from, self.count), (0, from)] {
            loop {
                let start = self.next(at, end, Self::available);
                if start >= end {
                    break;
                }
                let len = self.run_at(start, want);
                if len == want {
                    return Some((start, len));
                }
                if best.is_none_or(|(_, longest)| len > longest) {
                    best = Some((start, len));
                }
                at = start + len;
            }
        }
        best
    }

    /// The bits of a word whose slots can be allocated.
    fn available(&self, word: usize) -> u64 {
        !(self.used[word] | self.blocked.as_ref().map_or(0, |blocked| blocked[word]))
    }

    /// The first bit in `at..end` that `words` has; `end` if there is none.
    fn next(&self, at: u32, end: u32, words: impl Fn(&Self, usize) -> u64) -> u32 {
        masks(at, end.saturating_sub(at))
            .find_map(|(word, mask)| {
                let found = words(self, word) & mask;
                (found != 0).then(|| word as u32 * 64 + found.trailing_zeros())
            })
            .unwrap_or(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;
    use std::vec;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Slot {
        Free,
        Used,
        Blocked,
    }
    use Slot::{Blocked, Free, Used};

    proptest! {
        #[test]
        fn slots_do_as_a_list_does(
            count in 1u32..400,
            steps in proptest::collection::vec((0u8..6, 0u32..400, 0u32..130), 1..60),
        ) {
            let mut slots = Slots::new(count);
            let mut model = vec![Free; count as usize];
            for (step, start, len) in steps {
                let start = start % count;
                let len = len.min(count - start);
                let range = start as usize..(start + len) as usize;
                let number = |model: &[Slot], kind| {
                    model[range.clone()].iter().filter(|slot| **slot == kind).count() as u32
                };
                match step {
                    0 => {
                        let expected = (number(&model, Free), number(&model, Blocked));
                        prop_assert_eq!(slots.take(start, len), expected);
                        model[range].fill(Used);
                    }
                    1 => {
                        let mut freed = Vec::new();
                        slots.free_and_block(start, len, |at, n| freed.extend(at..at + n));
                        let expected: Vec<u32> =
                            (start..start + len).filter(|n| model[*n as usize] == Used).collect();
                        prop_assert_eq!(&freed, &expected);
                        for n in freed {
                            model[n as usize] = Blocked;
                        }
                    }
                    2 => {
                        prop_assert_eq!(slots.put_back(start, len), number(&model, Used));
                        for slot in &mut model[range] {
                            if *slot == Used {
                                *slot = Free;
                            }
                        }
                    }
                    3 => {
                        prop_assert_eq!(slots.unblock(start, len), number(&model, Blocked));
                        for slot in &mut model[range] {
                            if *slot == Blocked {
                                *slot = Free;
                            }
                        }
                    }
                    4 => {
                        let run = model[start as usize..].iter().take_while(|s| **s == Free);
                        prop_assert_eq!(slots.run_at(start, len), (run.count() as u32).min(len));
                    }
                    _ => {
                        let want = len.max(1);
                        let found = slots.find(start, want);
                        let is_run = |at: u32, n: u32| {
                            at + n <= count
                                && (at..at + n).all(|s| model[s as usize] == Free)
                        };
                        let all = (start..count).chain(0..start);
                        let first = all.clone().find(|at| is_run(*at, want));
                        if let Some(at) = first {
                            prop_assert_eq!(found, Some((at, want)));
                        } else if let Some((at, n)) = found {
                            prop_assert!(is_run(at, n));
                            prop_assert!(!(0..count).any(|at| is_run(at, n + 1)));
                        } else {
                            prop_assert!(model.iter().all(|slot| *slot != Free));
                        }
                    }
                }
                prop_assert_eq!(
                    slots.free_count() as usize,
                    model.iter().filter(|slot| **slot != Used).count()
                );
                prop_assert_eq!(
                    slots.blocked_count() as usize,
                    model.iter().filter(|slot| **slot == Blocked).count()
                );
                let last = model.iter().rposition(|slot| *slot == Used);
                prop_assert_eq!(slots.last_used().map(|last| last as usize), last);
                prop_assert_eq!(slots.are_used(0, count), model.iter().all(|s| *s == Used));
                prop_assert_eq!(slots.are_free(0, count), model.iter().all(|s| *s != Used));
            }
            let bitmap = slots.encode();
            prop_assert_eq!(Slots::decode(&bitmap, count).free_count(), slots.free_count());
            prop_assert_eq!(bitmap[BLOCK_BYTES - 1], 0xff);
        }
    }
}
