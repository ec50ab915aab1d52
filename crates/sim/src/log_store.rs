//! The log store of a target, and the data that each kind of store loses.
//!
//! - `file:` keeps all stores when the process dies. The kernel writes pages back at any time. A
//!   power cut returns each page to the state of its last write-back, or to its current state, or
//!   to a state between them, word by word (trap T24).
//! - `dax:` (and `pci:`) keep all stores when the process dies. After a power cut, each 8-byte word
//!   that was not fenced is old or new, or any value stored in between.
//! - `block:` is a drive behind a copy in memory. If the process is killed or the power is cut,
//!   writes in flight land in any order, block by block, or not at all.
//! - `cached` is a `block:` drive with a volatile cache that each fence flushes. If a process dies
//!   in a fence, the next process reads the data that was written. That data is lost in a power cut
//!   unless the next process flushes first.
//!
//! The product's own code (`riopipe-model`) decides when data is written back, fenced and flushed.
//! This module has only the effects.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riopipe_model::log::block::{self, BlockPart, Blocks, Durability, FlushFailure};
use riopipe_model::log::mapped::{self, MappedPart, Memory, Persist, words_of};
use riopipe_order::log_region::LogKind;
use riopipe_order::region::{Region, RegionError};
use serde::{Deserialize, Serialize};

use crate::block::BLOCK;
use crate::crash_injector::CrashInjector;
use crate::rng::Rng;
use crate::scenario::Corruption;

/// Words of a cache line.
const LINE: u32 = 8;

/// The kind of a log store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogStoreKind {
    /// A mapped file.
    File,
    /// Persistent memory.
    Dax,
    /// An ordinary drive with power-loss protection.
    Block,
    /// An ordinary drive without power-loss protection. Each fence flushes it.
    Cached,
}

impl LogStoreKind {
    /// The kind that the header of the region records.
    #[must_use]
    pub const fn log_kind(self) -> LogKind {
        match self {
            Self::File => LogKind::File,
            Self::Dax => LogKind::Dax,
            Self::Block | Self::Cached => LogKind::Block,
        }
    }
}

/// The value of a word before a store that is not durable.
#[derive(Clone, Copy, Debug)]
struct Undo {
    word: u32,
    old: u64,
    /// This process has begun to write back the cache line of the word.
    begun: bool,
}

/// A write of blocks that has begun and has not completed.
#[derive(Clone, Debug)]
struct Flight {
    /// Its place in the part, bytes.
    at: usize,
    bytes: Vec<u8>,
    /// It is durable by itself when it has completed.
    durable: bool,
    /// The process was stopped when the write began.
    cut: bool,
}

/// The outcome for the words of a cache line that no fence has covered.
#[derive(Clone, Copy, Debug)]
enum LineOutcome {
    Any,
    Kept,
    Lost,
    LostBut(u32),
    KeptBut(u32),
}

impl LineOutcome {
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

/// One part: the header, or the partition of a stream. Each part has its own fences, so that the
/// fence of one part does not hide a missing fence of another.
#[derive(Clone, Debug, Default)]
struct Part {
    bytes: Vec<u8>,
    /// Of a mapped file: the content that was written back last.
    disk: Vec<u8>,
    /// Of persistent memory: the stores that are not durable, also those of processes that have
    /// died. A fence waits for the lines that its own process has begun to write back, and for no
    /// others.
    undo: Vec<Undo>,
    /// Of a drive: the writes in flight.
    in_flight: Vec<Flight>,
    /// Of a drive: the old content of blocks whose writes are in its volatile cache and that no
    /// FLUSH has covered, oldest first.
    cached: Vec<(usize, Vec<u8>)>,
    /// The number of fences that succeed before one fails, plus one. 0: none fails.
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

    /// Counts a fence. Returns whether it fails, as planned.
    fn fails_fence(&mut self) -> bool {
        match self.fences_left {
            0 => false,
            1 => true,
            _ => {
                self.fences_left -= 1;
                false
            }
        }
    }

    /// Sets each word that no fence has covered to its old value, its new value, or one between.
    fn tear_words(&mut self, rng: &mut Rng) {
        let mut values: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        for Undo { word, old, .. } in self.undo.drain(..) {
            values.entry(word).or_default().push(old);
        }
        // The words of a cache line often have the same outcome.
        let (mut line, mut outcome) = (u32::MAX, LineOutcome::Any);
        for (word, older) in values {
            if word / LINE != line {
                (line, outcome) = (word / LINE, LineOutcome::draw(rng));
            }
            let lost = match outcome {
                LineOutcome::Any => rng.one_in(2),
                LineOutcome::Kept => false,
                LineOutcome::Lost => true,
                LineOutcome::LostBut(one) => word % LINE != one,
                LineOutcome::KeptBut(one) => word % LINE == one,
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

    /// Writes back the pages of a mapped file that `which` selects.
    fn write_back(&mut self, which: impl Fn(usize) -> bool) {
        self.disk.resize(self.bytes.len(), 0);
        for (_, page) in self.pages().enumerate().filter(|(number, _)| which(*number)) {
            self.disk[page.clone()].copy_from_slice(&self.bytes[page]);
        }
    }

    /// Applies a power cut to a mapped file: returns each page to a moment of its own.
    fn revert_pages(&mut self, rng: &mut Rng) {
        self.disk.resize(self.bytes.len(), 0);
        for page in self.pages() {
            match rng.below(4) {
                // The page was written back just now.
                0 => {}
                // The page was being written back.
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

    /// Lands the writes in flight, in any order. With `any`, only some blocks of each land, or
    /// none.
    fn land(&mut self, any: bool, is_volatile: bool, rng: &mut Rng) {
        while !self.in_flight.is_empty() {
            let Flight { at, bytes, durable, cut } =
                self.in_flight.swap_remove(rng.index(self.in_flight.len()));
            for (at, block) in (at..).step_by(BLOCK).zip(bytes.chunks_exact(BLOCK)) {
                if (any || cut) && rng.one_in(2) {
                    continue;
                }
                let place = &mut self.bytes[at..at + BLOCK];
                if is_volatile && (any || cut || !durable) {
                    self.cached.push((at, place.to_vec()));
                } else {
                    self.cached.retain(|(other, _)| *other != at);
                }
                place.copy_from_slice(block);
            }
        }
    }

    /// Applies a power cut to a volatile cache: returns each block to any moment since the last
    /// FLUSH.
    fn lose_cache(&mut self, rng: &mut Rng) {
        let mut older: BTreeMap<usize, Vec<Vec<u8>>> = BTreeMap::new();
        for (at, block) in self.cached.drain(..) {
            older.entry(at).or_default().push(block);
        }
        for (at, blocks) in older {
            if rng.one_in(2) {
                self.bytes[at..at + BLOCK].copy_from_slice(&blocks[rng.index(blocks.len())]);
            }
        }
    }
}

/// The store, and the faults of its process.
#[derive(Debug)]
struct State {
    parts: BTreeMap<usize, Part>,
    crash_injector: CrashInjector,
    /// The fence failure of this process.
    failure: FlushFailure,
    rng: Rng,
}

/// A machine's log store. It outlives the target's process.
#[derive(Clone, Debug)]
pub struct LogStore {
    kind: LogStoreKind,
    state: Arc<Mutex<State>>,
}

impl LogStore {
    /// A blank store.
    #[must_use]
    pub fn new(kind: LogStoreKind, crash_injector: CrashInjector, rng: Rng) -> Self {
        let (parts, failure) = (BTreeMap::new(), FlushFailure::default());
        Self { kind, state: Arc::new(Mutex::new(State { parts, crash_injector, failure, rng })) }
    }

    /// The kind of the store.
    #[must_use]
    pub const fn kind(&self) -> LogStoreKind {
        self.kind
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    const fn is_mapped(&self) -> bool {
        matches!(self.kind, LogStoreKind::File | LogStoreKind::Dax)
    }

    fn memory(&self, at: usize, len: usize) -> SimMemory {
        SimMemory { store: self.clone(), at, len, next: 0 }
    }

    /// The part of the store in this range of bytes.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> LogPart {
        let (at, len) = (range.start, range.len());
        let size = if self.is_mapped() { len } else { len.next_multiple_of(BLOCK) };
        self.lock().parts.entry(at).or_default().bytes.resize(size, 0);
        if self.is_mapped() {
            return LogPart::Mapped(MappedPart::new(self.memory(at, len)));
        }
        let blocks = SimBlocks { store: self.clone(), at };
        match BlockPart::read(blocks, range) {
            Ok(part) => LogPart::Blocks(part),
            Err(never) => match never {},
        }
    }

    /// Applies the death of the process. Its requests to a drive continue (assumption M4).
    pub fn process_died(&self, rng: &mut Rng) {
        self.ended(false, rng);
    }

    fn ended(&self, power: bool, rng: &mut Rng) {
        let is_volatile = self.kind == LogStoreKind::Cached;
        for part in self.lock().parts.values_mut() {
            part.undo.iter_mut().for_each(|undo| undo.begun = false);
            part.land(power, is_volatile, rng);
        }
    }

    /// Completes and persists all writes, as after a long time without requests.
    pub fn persist_all(&self) {
        for part in self.lock().parts.values_mut() {
            for Flight { at, bytes, .. } in part.in_flight.drain(..) {
                part.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            part.undo.clear();
            part.cached.clear();
        }
    }

    /// Writes back some pages of a mapped file, as the kernel may at any time.
    pub fn write_back_some(&self, rng: &mut Rng) {
        if self.kind == LogStoreKind::File && rng.one_in(16) {
            let all = rng.one_in(4);
            for part in self.lock().parts.values_mut() {
                let pages: Vec<bool> = part.pages().map(|_| all || rng.one_in(4)).collect();
                part.write_back(|page| pages[page]);
            }
        }
    }

    /// Writes back all of it, and waits for that.
    ///
    /// # Errors
    /// The disk has failed.
    pub fn sync(&self) -> Result<(), RegionError> {
        let mut all = self.lock();
        if !all.crash_injector.count_fence() {
            return Ok(());
        }
        if all.parts.values().any(|part| part.fences_left == 1) {
            return Err(RegionError::new("the store reported an error"));
        }
        all.parts.values_mut().for_each(|part| part.write_back(|_| true));
        Ok(())
    }

    /// A copy of the store, which can take its place later.
    #[must_use]
    pub fn copy(&self) -> KeptLog {
        KeptLog(self.lock().parts.clone())
    }

    /// Applies a power cut.
    pub fn power_cut(&self, rng: &mut Rng) {
        self.ended(true, rng);
        for part in self.lock().parts.values_mut() {
            match self.kind {
                LogStoreKind::File => part.revert_pages(rng),
                LogStoreKind::Dax => part.tear_words(rng),
                LogStoreKind::Block => {}
                LogStoreKind::Cached => part.lose_cache(rng),
            }
        }
    }

    /// Opens the store for a target.
    ///
    /// # Errors
    /// The content of the store could not be made durable.
    pub fn open(&self) -> Result<(), RegionError> {
        self.lock().failure = FlushFailure::default();
        if !self.is_mapped() {
            return block::make_content_durable(&SimBlocks { store: self.clone(), at: 0 });
        }
        let parts: Vec<(usize, usize)> =
            self.lock().parts.iter().map(|(at, part)| (*at, part.bytes.len())).collect();
        parts
            .into_iter()
            .try_for_each(|(at, len)| mapped::make_content_durable(&mut self.memory(at, len)))
    }

    /// Replaces the store by an empty one. Returns the old one.
    #[must_use]
    pub fn replace(&self) -> KeptLog {
        KeptLog(core::mem::take(&mut self.lock().parts))
    }

    /// Replaces the store by a copy. Returns the old one.
    #[must_use]
    pub fn replace_with(&self, copy: KeptLog) -> KeptLog {
        KeptLog(core::mem::replace(&mut self.lock().parts, copy.0))
    }

    /// Corrupts the store: flips one bit in both copies of the data that `how` names. `bit` selects
    /// the bit among those that have a meaning.
    pub fn corrupt(&self, how: Corruption, bit: u32) {
        let mut all = self.lock();
        let parts = &mut all.parts;
        let flip = |part: &mut Part, from: usize, bytes: usize, copies: [usize; 2]| {
            let bit = bit as usize % (8 * bytes);
            for copy in copies {
                part.bytes[copy + from + bit / 8] ^= 1 << (bit % 8);
            }
        };
        match how {
            Corruption::Header => {
                // The generation, state, counts, lease, place and owner of the first volume, and
                // the record of a log that was given up.
                if let Some(header) = parts.values_mut().next() {
                    flip(header, 128 + 16, 44, [0, BLOCK]);
                }
            }
            Corruption::Marks => {
                // All but the checksum, and the bits that mark it as a mark.
                let streams = parts.len().saturating_sub(1).max(1);
                if let Some(part) = parts.values_mut().nth(1 + bit as usize % streams) {
                    flip(part, 8, 48, [0, 128]);
                }
            }
            Corruption::Swapped => {
                let mut streams = parts.values_mut().skip(1);
                if let (Some(a), Some(b)) = (streams.next(), streams.next()) {
                    core::mem::swap(a, b);
                }
            }
        }
    }

    /// Puts the right store back.
    pub fn put_back(&self, store: KeptLog) {
        self.lock().parts = store.0;
    }

    /// Plans a failure: the next `fences` fences of each stream's part succeed, and the one after
    /// fails.
    pub fn fail_fence_after(&self, fences: u32) {
        for (_, part) in self.lock().parts.iter_mut().skip(1) {
            part.fences_left = fences + 1;
        }
    }

    /// Whether no fence has failed, and none is planned to fail.
    #[must_use]
    pub fn works(&self) -> bool {
        self.lock().parts.values().all(|part| part.fences_left == 0)
    }

    /// Removes all planned failures of fences.
    pub fn heal(&self) {
        self.lock().parts.values_mut().for_each(|part| part.fences_left = 0);
    }
}

/// The content of a log store that is kept outside of the machine's store: the right one, or a
/// copy.
#[derive(Clone, Debug)]
pub struct KeptLog(BTreeMap<usize, Part>);

impl KeptLog {
    /// Applies a power cut. A mapped file remains a file.
    pub fn power_cut(&mut self, kind: LogStoreKind, rng: &mut Rng) {
        if kind == LogStoreKind::File {
            self.0.values_mut().for_each(|part| part.revert_pages(rng));
        }
    }
}

/// A part of the store, as the target's code uses it.
#[derive(Debug)]
pub enum LogPart {
    /// Of a mapped file or persistent memory.
    Mapped(MappedPart<SimMemory>),
    /// Of a drive.
    Blocks(BlockPart<SimBlocks>),
}

/// The memory of a part, with the effects of a crash on it.
#[derive(Debug)]
pub struct SimMemory {
    store: LogStore,
    at: usize,
    len: usize,
    /// The word after the one that was stored last.
    next: usize,
}

impl SimMemory {
    fn with<T>(&self, f: impl FnOnce(&mut Part, &CrashInjector) -> T) -> T {
        let State { parts, crash_injector, .. } = &mut *self.store.lock();
        let blank = || Part { bytes: vec![0; self.len], ..Part::default() };
        f(parts.entry(self.at).or_insert_with(blank), crash_injector)
    }
}

impl Memory for SimMemory {
    fn persist(&self) -> Persist {
        match self.store.kind {
            LogStoreKind::Dax => Persist::Lines,
            _ => Persist::Stores,
        }
    }

    fn size(&self) -> usize {
        self.len
    }

    fn load(&self, offset: usize) -> u64 {
        self.with(|part, _| part.word(offset as u32 / 8))
    }

    fn load_all(&self, offset: usize, into: &mut [u8]) {
        self.with(|part, _| into.copy_from_slice(&part.bytes[offset..offset + into.len()]));
    }

    fn store(&mut self, offset: usize, value: u64) {
        self.store_all(offset, &value.to_le_bytes());
    }

    /// One call that stores into a cache line is one effect.
    fn store_all(&mut self, offset: usize, bytes: &[u8]) {
        let next = core::mem::replace(&mut self.next, offset + bytes.len());
        let loses_words = self.store.kind == LogStoreKind::Dax;
        self.with(|part, crash_injector| {
            for (word, value) in (offset as u32 / 8..).zip(words_of(bytes)) {
                let is_first = word as usize * 8 == offset;
                let continues_line = (!is_first || offset == next) && !word.is_multiple_of(LINE);
                if crash_injector.has_stopped() || !continues_line && !crash_injector.count_effect()
                {
                    continue;
                }
                if loses_words {
                    part.undo.push(Undo { word, old: part.word(word), begun: false });
                }
                part.put(word, value);
            }
        });
    }

    fn write_back_lines(&mut self, bytes: Range<usize>) {
        let line = |byte: usize| byte as u32 / 8 / LINE;
        let lines = line(bytes.start)..=line(bytes.end - 1);
        self.with(|part, crash_injector| {
            if !crash_injector.has_stopped() {
                let undos = part.undo.iter_mut().filter(|undo| lines.contains(&(undo.word / LINE)));
                undos.for_each(|undo| undo.begun = true);
            }
        });
    }

    fn drain(&mut self) {
        self.with(|part, crash_injector| {
            if crash_injector.count_fence() {
                part.undo.retain(|undo| !undo.begun);
            }
        });
    }

    fn order_stores(&mut self) {
        // These stores are in order, but the process may be stopped here.
        let _ = self.with(|_, crash_injector| crash_injector.count_fence());
    }

    /// Syncs this part alone. The product does not rely on syncing the other parts.
    fn sync(&mut self) -> Result<(), RegionError> {
        self.with(|part, crash_injector| {
            if !crash_injector.has_stopped() {
                part.write_back(|_| true);
            }
        });
        Ok(())
    }

    /// No kind of store here has a device behind a bus.
    fn read_back(&mut self) -> Result<(), RegionError> {
        self.drain();
        Ok(())
    }
}

/// The drive under a part.
#[derive(Clone, Debug)]
pub struct SimBlocks {
    store: LogStore,
    at: usize,
}

/// An error that never occurs.
#[derive(Debug)]
pub enum Never {}

impl Blocks for SimBlocks {
    type Mirror = Vec<u8>;
    type ReadError = Never;

    fn is_volatile(&self) -> bool {
        self.store.kind == LogStoreKind::Cached
    }

    fn read(&self, range: Range<usize>) -> Result<Vec<u8>, Never> {
        let state = self.store.lock();
        let bytes = state.parts.get(&self.at).map_or(&[][..], |part| &part.bytes);
        Ok(bytes[range.start - self.at..range.end - self.at].to_vec())
    }

    fn begin_write(
        &self,
        offset: usize,
        bytes: &[u8],
        durability: Durability,
    ) -> Result<(), RegionError> {
        let State { parts, crash_injector, .. } = &mut *self.store.lock();
        if crash_injector.has_stopped() {
            return Ok(());
        }
        let cut = !crash_injector.count_fence();
        if let Some(part) = parts.get_mut(&self.at) {
            let at = offset - self.at;
            let durable = durability == Durability::OnCompletion;
            part.in_flight.push(Flight { at, bytes: bytes.to_vec(), durable, cut });
        }
        Ok(())
    }

    fn complete(&self) -> Result<(), RegionError> {
        let State { parts, crash_injector, rng, .. } = &mut *self.store.lock();
        let Some(part) = parts.get_mut(&self.at).filter(|_| !crash_injector.has_stopped()) else {
            return Ok(());
        };
        let fails = part.fails_fence();
        part.land(fails, self.store.kind == LogStoreKind::Cached, rng);
        if fails { Err(RegionError::new("the store reported an error")) } else { Ok(()) }
    }

    fn flush(&self) -> Result<(), RegionError> {
        let State { parts, crash_injector, .. } = &mut *self.store.lock();
        if crash_injector.count_fence() {
            parts.values_mut().for_each(|part| part.cached.clear());
        }
        Ok(())
    }

    fn with_flush_lock<T>(&self, f: impl FnOnce(&mut FlushFailure) -> T) -> T {
        let mut failure = core::mem::take(&mut self.store.lock().failure);
        let done = f(&mut failure);
        self.store.lock().failure = failure;
        done
    }
}

impl LogPart {
    fn region(&self) -> &dyn Region {
        match self {
            Self::Mapped(part) => part,
            Self::Blocks(part) => part,
        }
    }

    fn region_mut(&mut self) -> &mut dyn Region {
        match self {
            Self::Mapped(part) => part,
            Self::Blocks(part) => part,
        }
    }

    /// Whether the next fence of mapped memory fails, as planned: its file is gone.
    fn is_gone(&self) -> bool {
        match self {
            Self::Mapped(part) => part
                .memory()
                .with(|part, crash_injector| !crash_injector.has_stopped() && part.fails_fence()),
            Self::Blocks(_) => false,
        }
    }
}

impl Region for LogPart {
    fn len(&self) -> usize {
        self.region().len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.region().read(offset, into);
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.region_mut().write(offset, bytes);
    }

    fn write_word(&mut self, offset: usize, value: u64) {
        self.region_mut().write_word(offset, value);
    }

    fn fence(&mut self) -> Result<(), RegionError> {
        if self.is_gone() {
            return Err(RegionError::new("its file has been deleted"));
        }
        self.region_mut().fence()
    }

    fn write_back(&mut self) -> Result<(), RegionError> {
        if self.is_gone() {
            return Err(RegionError::new("its file has been deleted"));
        }
        self.region_mut().write_back()
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(kind: LogStoreKind) -> (LogStore, LogPart) {
        let store = LogStore::new(kind, CrashInjector::default(), Rng::new(1));
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
    fn each_kind_loses_only_what_it_may() {
        let mut words = BTreeMap::new();
        for seed in 0..64 {
            let (store, part) = written(LogStoreKind::Dax);
            store.process_died(&mut Rng::new(seed));
            assert_eq!((word(&part, 8), word(&part, BLOCK)), (2, 3), "stored is stored");
            store.power_cut(&mut Rng::new(seed));
            assert_eq!(word(&part, 0), 1, "fenced");
            *words.entry((word(&part, 8), word(&part, 16), word(&part, BLOCK))).or_insert(0) += 1;

            let (store, _) = written(LogStoreKind::Block);
            store.process_died(&mut Rng::new(seed));
            let part = store.part(0..2 * BLOCK);
            assert_eq!((word(&part, 8), word(&part, BLOCK)), (1, 0), "only in memory");

            let (store, part) = written(LogStoreKind::File);
            store.process_died(&mut Rng::new(seed));
            assert_eq!((word(&part, 8), word(&part, BLOCK)), (2, 3));
        }
        assert_eq!(words.len(), 8, "each word on its own: {words:?}");
    }

    #[test]
    fn a_fence_covers_the_stores_of_its_own_process() {
        let mut seen = BTreeMap::new();
        for seed in 0..64 {
            let (store, mut part) = written(LogStoreKind::Dax);
            store.process_died(&mut Rng::new(seed));
            match seed % 3 {
                // In the next process: a store elsewhere, in one of the two lines, or in both.
                0 => part.write(BLOCK + 512, &[4; 8]),
                1 => part.write(32, &[4; 8]),
                _ => store.open().unwrap(),
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
    fn a_power_cut_reverts_a_mapped_store_page_by_page() {
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
        assert_eq!(seen.len(), 16, "each word of a page in write-back: {seen:?}");
    }

    #[test]
    fn a_block_store_stopped_in_a_fence_has_each_block_old_or_new() {
        let mut seen = BTreeMap::new();
        for seed in 0..64 {
            let (store, mut part) = written(LogStoreKind::Block);
            store.lock().crash_injector.plan_crash(0, true);
            part.fence().unwrap();
            store.process_died(&mut Rng::new(seed));
            let part = store.part(0..2 * BLOCK);
            let (first, second) = ((word(&part, 8), word(&part, 16)), word(&part, BLOCK));
            assert!(first == (1, 0) || first == (2, 2), "whole blocks: {first:?}");
            *seen.entry((first, second)).or_insert(0) += 1;
        }
        assert_eq!(seen.len(), 4, "{seen:?}");
    }

    #[test]
    fn a_volatile_cache_is_readable_and_lost_with_the_power_unless_flushed() {
        let mut seen = BTreeMap::new();
        for seed in 0..64 {
            let (store, mut part) = written(LogStoreKind::Cached);
            store.lock().crash_injector.plan_crash(0, true);
            part.fence().unwrap();
            store.process_died(&mut Rng::new(seed));
            store.lock().crash_injector.reset();
            let part = store.part(0..2 * BLOCK);
            let read = (word(&part, 16), word(&part, BLOCK));
            if seed % 2 == 0 {
                store.open().unwrap();
            }
            store.power_cut(&mut Rng::new(seed + 1));
            let part = store.part(0..2 * BLOCK);
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

    #[test]
    fn writes_of_a_drive_that_are_in_flight_together_land_in_any_order() {
        let mut seen = BTreeMap::new();
        for seed in 0..64 {
            let store = LogStore::new(LogStoreKind::Block, CrashInjector::default(), Rng::new(1));
            let part = store.part(0..BLOCK);
            let blocks = SimBlocks { store: store.clone(), at: 0 };
            for content in 1..=3 {
                blocks.begin_write(0, &[content; BLOCK], Durability::AfterFlush).unwrap();
            }
            if seed % 2 == 0 {
                // The process is killed. Its writes continue.
                store.process_died(&mut Rng::new(seed));
            } else {
                store.power_cut(&mut Rng::new(seed));
            }
            drop(part);
            *seen.entry((seed % 2, word(&store.part(0..BLOCK), 0))).or_insert(0) += 1;
        }
        assert_eq!(seen.len(), 3 + 4, "any of them, or none if the power was cut: {seen:?}");
    }
}
