//! Which stream holds which block of the volume: the caller's duty of T11 and T15.

use riopipe_order::attribute::Seq;
use riopipe_order::probe::{self, Plant};

use crate::scenario::{Place, WriteOp};

/// Who wrote each block last, as long as that write is not released.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    holders: Vec<Option<(u16, Seq)>>,
    released: Vec<Seq>,
}

impl Ledger {
    /// Nobody holds anything; streams go on from these marks.
    #[must_use]
    pub(super) fn new(blocks: usize, released: Vec<Seq>) -> Self {
        Self { holders: vec![None; blocks], released }
    }

    /// A stream is released up to there.
    pub(super) fn released(&mut self, stream: u16, mark: Seq) {
        self.released[usize::from(stream)] = mark;
    }

    /// A stream has begun anew: nothing is held by it.
    pub(super) fn forget(&mut self, stream: u16, mark: Seq) {
        self.released[usize::from(stream)] = mark;
        for holder in &mut self.holders {
            if holder.is_some_and(|(by, _)| by == stream) {
                *holder = None;
            }
        }
    }

    fn holder(&self, block: u32) -> Option<u16> {
        let (stream, seq) = (*self.holders.get(block as usize)?)?;
        (seq > self.released[usize::from(stream)]).then_some(stream)
    }

    /// Cuts what a stream would like to write to what it may, and adds it to its group: blocks that
    /// others hold are left out, own blocks that are not released, or are in the group already,
    /// are written in place, not discarded.
    pub(super) fn stage(&self, stream: u16, wish: &WriteOp, parts: &mut Vec<(u32, u32, Place)>) {
        let WriteOp(first, blocks, wanted) = *wish;
        let staged = parts.len();
        let end = (first + blocks).min(self.holders.len() as u32);
        for block in first..end {
            let mut earlier = parts[..staged].iter();
            let again = earlier.any(|(at, len, _)| (*at..at + len).contains(&block));
            let holder = if again { Some(stream) } else { self.holder(block) };
            let place = match holder {
                Some(other) if other != stream => {
                    if !probe::planted(Plant::T15HandOverEarly) {
                        continue;
                    }
                    wanted
                }
                Some(_) if wanted == Place::Discard => continue,
                Some(_) => Place::InPlace,
                None => wanted,
            };
            match parts[staged..].last_mut() {
                Some((at, len, same)) if *at + *len == block && *same == place => *len += 1,
                _ => parts.push((block, 1, place)),
            }
        }
    }

    /// Notes a write that was admitted.
    pub(super) fn note(&mut self, stream: u16, first: u32, blocks: u32, seq: Seq) {
        for block in first..first + blocks {
            self.holders[block as usize] = Some((stream, seq));
        }
    }
}
