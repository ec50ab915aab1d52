//! Where a target's ordering log rests, with what each kind of store loses.
//!
//! - `file:` keeps all that was stored when the process dies. The kernel writes its pages back when
//!   it likes; a power cut takes each page to what was written back last, or to now, or in between
//!   word by word (T24).
//! - `dax:` (and `pci:`) keep what was stored when the process dies; of what was not fenced, each
//!   8-byte word is old or new, or anything stored in between, after a power cut.
//! - `block:` is a drive behind a copy in memory: whoever kills the process or cuts the power
//!   before a fence finds each 4 KiB block as it was, and in the middle of a fence each as it was
//!   or as it was to become.
//! - `cached` is a `block:` drive with a volatile cache, flushed with each fence: what a process
//!   that died in a fence had written is read by the next one, and lost with the power unless that
//!   one flushes first.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riopipe_order::log_region::LogKind;
use riopipe_order::probe::{self, Plant};
use riopipe_order::region::{Region, RegionError};
use serde::{Deserialize, Serialize};

use crate::block::BLOCK;
use crate::fuse::Fuse;
use crate::rng::Rng;
use crate::scenario::Spoil;

/// Words of a cache line.
const LINE: u32 = 8;

/// What kind of store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogStoreKind {
    /// A mapped file.
    File,
    /// Persistent memory.
    Dax,
    /// An ordinary drive with power-loss protection.
    Block,
    /// One without, flushed with each fence.
    Cached,
}

impl LogStoreKind {
    /// What the region's header says of it.
    #[must_use]
    pub const fn log_kind(self) -> LogKind {
        match self {
            Self::File => LogKind::File,
            Self::Dax => LogKind::Dax,
            Self::Block | Self::Cached => LogKind::Block,
        }
    }
}

/// What was in a place before a store that no fence has covered.
#[derive(Clone, Copy, Debug)]
struct Undo {
    word: u32,
    old: u64,
}

/// What becomes of the words of a cache line that no fence has covered.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Any,
    Kept,
    Lost,
    LostBut(u32),
    KeptBut(u32),
}

impl Fate {
    fn draw(rng: &mut Rng) -> Self {
        match rng.below(6) {
            0 => Self::Any,
            1 => Self::Kept,
            2 => Self::Lost,
            3 => Self::LostBut(rng.below(8) as u32),
            4 => Self::KeptBut(rng.below(8) as u32),
            // The persist word.
            _ => Self::KeptBut(0),
        }
    }
}

/// One part: the header, or a stream's partition. Each has its own fences, so that one's fence
/// does not hide that another's is missing.
#[derive(Clone, Debug, Default)]
struct Part {
    bytes: Vec<u8>,
    /// Of a mapped file: what was written back last.
    disk: Vec<u8>,
    undo: Vec<Undo>,
    /// The same of what processes that have died stored in persistent memory. A fence waits for what
    /// its own process has begun to write back, and for nothing else.
    left: Vec<Undo>,
    /// The same of what a drive's volatile cache has taken in and no FLUSH has covered.
    cached: Vec<Undo>,
    /// Fences to succeed before one fails, plus one; 0: none fails.
    fences_left: u32,
}

impl Part {
    fn word(&self, word: u32) -> u64 {
        let at = word as usize * 8;
        u64::from_le_bytes(self.bytes[at..at + 8].try_into().expect("8 bytes were sliced"))
    }

    fn put(&mut self, word: u32, value: u64) {
        let at = word as usize * 8;
        self.bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    /// A fence has covered what this process has stored: whole cache lines of it.
    fn fenced(&mut self) {
        let undo = core::mem::take(&mut self.undo);
        if !self.left.is_empty() {
            self.left.retain(|old| undo.iter().all(|new| new.word / LINE != old.word / LINE));
        }
        self.cached.clear();
    }

    /// Each word that no fence has covered becomes what it was, is, or was in between.
    fn tear_words(&mut self, rng: &mut Rng) {
        let undo = self.left.drain(..).chain(self.undo.drain(..));
        let mut values: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        for Undo { word, old } in undo {
            values.entry(word).or_default().push(old);
        }
        // A cache line's words tend to go the same way.
        let (mut line, mut fate) = (u32::MAX, Fate::Any);
        for (word, older) in values {
            if word / LINE != line {
                (line, fate) = (word / LINE, Fate::draw(rng));
            }
            let lost = match fate {
                Fate::Any => rng.one_in(2),
                Fate::Kept => false,
                Fate::Lost => true,
                Fate::LostBut(one) => word % LINE != one,
                Fate::KeptBut(one) => word % LINE == one,
            };
            if lost {
                self.put(word, *rng.pick(&older));
            }
        }
    }

    /// The bytes of each page.
    fn pages(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let len = self.bytes.len();
        (0..len).step_by(BLOCK).map(move |at| at..(at + BLOCK).min(len))
    }

    /// A mapped file's pages, or some of them, are written back.
    fn write_back(&mut self, which: impl Fn(usize) -> bool) {
        self.disk.resize(self.bytes.len(), 0);
        for (_, page) in self.pages().enumerate().filter(|(number, _)| which(*number)) {
            self.disk[page.clone()].copy_from_slice(&self.bytes[page]);
        }
    }

    /// The power takes a mapped file back, each page to a moment of its own.
    fn take_back(&mut self, rng: &mut Rng) {
        self.undo.clear();
        self.disk.resize(self.bytes.len(), 0);
        for page in self.pages() {
            match rng.below(4) {
                // Written back just now.
                0 => {}
                // Being written back.
                1 => {
                    for word in page.step_by(8) {
                        if rng.one_in(2) {
                            self.bytes[word..word + 8].copy_from_slice(&self.disk[word..word + 8]);
                        }
                    }
                }
                _ => self.bytes[page.clone()].copy_from_slice(&self.disk[page]),
            }
        }
        self.disk.clone_from(&self.bytes);
    }

    /// Each 4 KiB block with something that no fence has covered becomes what it was, unless it
    /// was being written; then it may be in the drive's cache.
    fn tear_blocks(&mut self, fencing: bool, rng: &mut Rng) {
        let undo = core::mem::take(&mut self.undo);
        let written = self.revert(undo, fencing, rng);
        self.cached.extend(written);
    }

    /// Puts blocks back to what they were; with `any` only some of them. Returns those not put back.
    fn revert(&mut self, undo: Vec<Undo>, any: bool, rng: &mut Rng) -> Vec<Undo> {
        let mut blocks: BTreeMap<u32, bool> = BTreeMap::new();
        let mut left = Vec::new();
        for undo in undo.into_iter().rev() {
            let block = undo.word / (BLOCK as u32 / 8);
            if *blocks.entry(block).or_insert_with(|| any && rng.one_in(2)) {
                left.push(undo);
            } else {
                self.put(undo.word, undo.old);
            }
        }
        left.reverse();
        left
    }
}

#[derive(Debug, Default)]
struct Parts {
    parts: BTreeMap<usize, Part>,
    /// The part in whose fence the process was stopped.
    fencing: Option<usize>,
    fuse: Fuse,
}

/// A machine's log store. It outlives the target's process.
#[derive(Clone, Debug)]
pub struct LogStore {
    kind: LogStoreKind,
    parts: Arc<Mutex<Parts>>,
}

impl LogStore {
    /// A blank store.
    #[must_use]
    pub fn new(kind: LogStoreKind, fuse: Fuse) -> Self {
        Self { kind, parts: Arc::new(Mutex::new(Parts { fuse, ..Parts::default() })) }
    }

    /// What kind it is.
    #[must_use]
    pub const fn kind(&self) -> LogStoreKind {
        self.kind
    }

    fn lock(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The part of the store in this range of bytes.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> LogPart {
        let len = range.len();
        let blank = || Part::default();
        self.lock().parts.entry(range.start).or_insert_with(blank).bytes.resize(len, 0);
        LogPart { parts: Arc::clone(&self.parts), at: range.start, len }
    }

    /// The process has died.
    pub fn process_died(&self, rng: &mut Rng) {
        let mut all = self.lock();
        let fencing = all.fencing.take();
        if self.kind == LogStoreKind::Dax {
            for part in all.parts.values_mut() {
                part.left.append(&mut part.undo);
            }
        }
        if matches!(self.kind, LogStoreKind::Block | LogStoreKind::Cached) {
            for (at, part) in &mut all.parts {
                part.tear_blocks(fencing == Some(*at), rng);
                if self.kind == LogStoreKind::Block {
                    part.cached.clear();
                }
            }
        }
    }

    /// The kernel writes back what it likes of a mapped file.
    pub fn write_back_some(&self, rng: &mut Rng) {
        if self.kind == LogStoreKind::File && rng.one_in(16) {
            let all = rng.one_in(4);
            let mut parts = self.lock();
            for part in parts.parts.values_mut() {
                let pages: Vec<bool> = part.pages().map(|_| all || rng.one_in(4)).collect();
                part.write_back(|page| pages[page]);
            }
        }
    }

    /// All of it is written back, and waited for.
    ///
    /// # Errors
    /// The disk has failed.
    pub fn sync(&self) -> Result<(), RegionError> {
        let mut all = self.lock();
        if !all.fuse.burn_fence() {
            return Ok(());
        }
        if all.parts.values().any(|part| part.fences_left == 1) {
            return Err(RegionError::new("the store reported an error"));
        }
        all.parts.values_mut().for_each(|part| part.write_back(|_| true));
        Ok(())
    }

    /// A copy of it, to be put back later.
    #[must_use]
    pub fn copy(&self) -> SetAside {
        SetAside(self.lock().parts.clone())
    }

    /// The power was cut.
    pub fn power_cut(&self, rng: &mut Rng) {
        if self.kind == LogStoreKind::File {
            let mut all = self.lock();
            all.fencing = None;
            return all.parts.values_mut().for_each(|part| part.take_back(rng));
        }
        if self.kind == LogStoreKind::Dax {
            let mut all = self.lock();
            all.fencing = None;
            all.parts.values_mut().for_each(|part| part.tear_words(rng));
        } else {
            self.process_died(rng);
        }
        for part in self.lock().parts.values_mut() {
            let cached = core::mem::take(&mut part.cached);
            part.revert(cached, true, rng);
        }
    }

    /// A target opens it: persistent memory is written back, a volatile cache flushed, so that what
    /// is read stays.
    pub fn open(&self) {
        if self.kind != LogStoreKind::File && !probe::planted(Plant::T7TrustUnfenced) {
            for part in self.lock().parts.values_mut() {
                part.undo.clear();
                part.left.clear();
                part.cached.clear();
            }
        }
    }

    /// Somebody has put an empty store in its place; the other one is returned.
    #[must_use]
    pub fn replace(&self) -> SetAside {
        SetAside(core::mem::take(&mut self.lock().parts))
    }

    /// Somebody has put a copy in its place; what was there is returned.
    #[must_use]
    pub fn replace_with(&self, copy: SetAside) -> SetAside {
        SetAside(core::mem::replace(&mut self.lock().parts, copy.0))
    }

    /// Somebody has spoilt it: the `bit`th bit, of those that say something, is flipped in both
    /// copies of what `how` names.
    pub fn spoil(&self, how: Spoil, bit: u32) {
        let mut all = self.lock();
        let parts = &mut all.parts;
        let flip = |part: &mut Part, from: usize, bytes: usize, copies: [usize; 2]| {
            let bit = bit as usize % (8 * bytes);
            for copy in copies {
                part.bytes[copy + from + bit / 8] ^= 1 << (bit % 8);
            }
        };
        match how {
            Spoil::Header => {
                // The first volume's generation, state, counts, lease, place, owner and what was
                // given up.
                if let Some(header) = parts.values_mut().next() {
                    flip(header, 128 + 16, 44, [0, BLOCK]);
                }
            }
            Spoil::Marks => {
                // Everything but the checksum, and what says that it is a mark.
                let streams = parts.len().saturating_sub(1).max(1);
                if let Some(part) = parts.values_mut().nth(1 + bit as usize % streams) {
                    flip(part, 8, 48, [0, 128]);
                }
            }
            Spoil::Swapped => {
                let mut streams = parts.values_mut().skip(1);
                if let (Some(a), Some(b)) = (streams.next(), streams.next()) {
                    core::mem::swap(a, b);
                }
            }
        }
    }

    /// Puts the right one back.
    pub fn put_back(&self, store: SetAside) {
        self.lock().parts = store.0;
    }

    /// Lets `fences` more fences of each stream's part succeed; the one after fails.
    pub fn fail_fence_after(&self, fences: u32) {
        for (_, part) in self.lock().parts.iter_mut().skip(1) {
            part.fences_left = fences + 1;
        }
    }

    /// Whether no fence has failed, or is to fail.
    #[must_use]
    pub fn works(&self) -> bool {
        self.lock().parts.values().all(|part| part.fences_left == 0)
    }

    /// No fence fails any more.
    pub fn heal(&self) {
        self.lock().parts.values_mut().for_each(|part| part.fences_left = 0);
    }
}

/// A store that lies beside the machine.
#[derive(Clone, Debug)]
pub struct SetAside(BTreeMap<usize, Part>);

impl SetAside {
    /// The power was cut; a mapped file that lies aside is a file all the same.
    pub fn power_cut(&mut self, kind: LogStoreKind, rng: &mut Rng) {
        if kind == LogStoreKind::File {
            self.0.values_mut().for_each(|part| part.take_back(rng));
        }
    }
}

/// A part of the store, as the target's code sees it.
#[derive(Debug)]
pub struct LogPart {
    parts: Arc<Mutex<Parts>>,
    at: usize,
    len: usize,
}

impl LogPart {
    fn with<T>(&self, f: impl FnOnce(&mut Part, &Fuse) -> T) -> T {
        let mut all = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let Parts { parts, fuse, .. } = &mut *all;
        let blank = || Part { bytes: vec![0; self.len], ..Part::default() };
        f(parts.entry(self.at).or_insert_with(blank), fuse)
    }
}

impl Region for LogPart {
    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.with(|part, _| into.copy_from_slice(&part.bytes[offset..offset + into.len()]));
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.with(|part, fuse| {
            if !fuse.burn() {
                return;
            }
            for (word, value) in (offset as u32 / 8..).zip(bytes.chunks_exact(8)) {
                let value = u64::from_le_bytes(value.try_into().expect("chunks of 8 bytes"));
                part.undo.push(Undo { word, old: part.word(word) });
                part.put(word, value);
            }
        });
    }

    fn write_word(&mut self, offset: usize, value: u64) {
        self.write(offset, &value.to_le_bytes());
    }

    fn fence(&mut self) -> Result<(), RegionError> {
        let mut all = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let was_blown = all.fuse.is_blown();
        if !all.fuse.burn_fence() {
            if !was_blown {
                all.fencing = Some(self.at);
            }
            return Ok(());
        }
        let Some(part) = all.parts.get_mut(&self.at) else { return Ok(()) };
        match part.fences_left {
            0 => {}
            1 => return Err(RegionError::new("the store reported an error")),
            _ => part.fences_left -= 1,
        }
        part.fenced();
        Ok(())
    }

    /// Of this part alone: what is promised of the others is not relied on.
    fn write_back(&mut self) -> Result<(), RegionError> {
        self.fence()?;
        self.with(|part, fuse| {
            if !fuse.is_blown() {
                part.write_back(|_| true);
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(kind: LogStoreKind) -> (LogStore, LogPart) {
        let store = LogStore::new(kind, Fuse::default());
        let mut part = store.part(0..2 * BLOCK);
        part.write(0, &[1; 16]);
        part.fence().unwrap();
        part.write(8, &[2; 16]);
        part.write(BLOCK, &[3; 8]);
        (store, part)
    }

    fn word(part: &LogPart, at: usize) -> u8 {
        let mut bytes = [0; 8];
        part.read(at, &mut bytes);
        bytes[0]
    }

    #[test]
    fn each_kind_loses_what_it_may() {
        let mut words = BTreeMap::new();
        for seed in 0..64 {
            let (store, part) = written(LogStoreKind::Dax);
            store.process_died(&mut Rng::new(seed));
            assert_eq!((word(&part, 8), word(&part, BLOCK)), (2, 3), "stored is stored");
            store.power_cut(&mut Rng::new(seed));
            assert_eq!(word(&part, 0), 1, "fenced");
            *words.entry((word(&part, 8), word(&part, 16), word(&part, BLOCK))).or_insert(0) += 1;

            let (store, part) = written(LogStoreKind::Block);
            store.process_died(&mut Rng::new(seed));
            assert_eq!((word(&part, 8), word(&part, BLOCK)), (1, 0), "only in memory");

            let (store, part) = written(LogStoreKind::File);
            store.process_died(&mut Rng::new(seed));
            assert_eq!((word(&part, 8), word(&part, BLOCK)), (2, 3));
        }
        assert_eq!(words.len(), 8, "each word on its own: {words:?}");
    }

    #[test]
    fn a_fence_covers_what_its_own_process_has_stored() {
        let mut seen = BTreeMap::new();
        for seed in 0..64 {
            let (store, mut part) = written(LogStoreKind::Dax);
            store.process_died(&mut Rng::new(seed));
            match seed % 3 {
                // In the next life: elsewhere, in one of the two lines, or all of it.
                0 => part.write(BLOCK + 512, &[4; 8]),
                1 => part.write(32, &[4; 8]),
                _ => store.open(),
            }
            part.fence().unwrap();
            store.power_cut(&mut Rng::new(seed));
            let left = (word(&part, 8), word(&part, BLOCK));
            assert!(seed % 3 != 1 || left.0 == 2, "its line has been written back");
            assert!(seed % 3 != 2 || left == (2, 3), "all of it has been written back");
            *seen.entry((seed % 3, left)).or_insert(0) += 1;
        }
        assert_eq!(seen.len(), 4 + 2 + 1, "{seen:?}");
    }

    #[test]
    fn a_mapped_store_goes_back_page_by_page() {
        let mut seen = BTreeMap::new();
        for seed in 0..1024 {
            let (store, mut part) = written(LogStoreKind::File);
            if seed % 2 == 1 {
                part.write_back().unwrap();
                part.write(8, &[4; 16]);
                part.write(BLOCK, &[5; 8]);
            }
            store.power_cut(&mut Rng::new(seed));
            let found = (word(&part, 8), word(&part, 16), word(&part, BLOCK));
            *seen.entry((seed % 2, found)).or_insert(0) += 1;
            let old = if seed % 2 == 1 { [2, 2, 3] } else { [0; 3] };
            let new = if seed % 2 == 1 { [4, 4, 5] } else { [2, 2, 3] };
            let all = [found.0, found.1, found.2];
            assert!((0..3).all(|i| all[i] == old[i] || all[i] == new[i]), "{all:?}");
            store.sync().unwrap();
            store.power_cut(&mut Rng::new(seed));
            assert_eq!(found, (word(&part, 8), word(&part, 16), word(&part, BLOCK)), "synced");
        }
        assert_eq!(seen.len(), 16, "each word of a page that was on its way: {seen:?}");
    }

    #[test]
    fn a_block_store_stopped_in_a_fence_has_each_block_old_or_new() {
        let mut seen = BTreeMap::new();
        for seed in 0..64 {
            let (store, mut part) = written(LogStoreKind::Block);
            store.lock().fuse.light(0, true);
            part.fence().unwrap();
            store.process_died(&mut Rng::new(seed));
            let (first, second) = ((word(&part, 8), word(&part, 16)), word(&part, BLOCK));
            assert!(first == (1, 0) || first == (2, 2), "whole blocks: {first:?}");
            *seen.entry((first, second)).or_insert(0) += 1;
        }
        assert_eq!(seen.len(), 4, "{seen:?}");
    }

    #[test]
    fn what_a_volatile_cache_holds_is_read_and_lost_with_the_power_unless_flushed() {
        let mut seen = BTreeMap::new();
        for seed in 0..64 {
            let (store, mut part) = written(LogStoreKind::Cached);
            store.lock().fuse.light(0, true);
            part.fence().unwrap();
            store.process_died(&mut Rng::new(seed));
            let read = (word(&part, 16), word(&part, BLOCK));
            if seed % 2 == 0 {
                store.open();
            }
            store.power_cut(&mut Rng::new(seed + 1));
            let left = (word(&part, 16), word(&part, BLOCK));
            if seed % 2 == 0 {
                assert_eq!(left, read, "flushed");
            }
            assert!(left.0 <= read.0 && left.1 <= read.1);
            assert_eq!(word(&part, 0), 1, "fenced before");
            *seen.entry((read, left)).or_insert(0) += 1;
        }
        assert!(seen.len() > 6, "kept and lost, read and not: {seen:?}");
    }
}
