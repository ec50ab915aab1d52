//! A log region in memory, in parts. Each part loses at a power cut any of its unfenced stores. The
//! header loses none: it is written rarely and as a whole.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use riopipe_order::region::{MemRegion, Region, RegionError};

#[derive(Clone, Default)]
pub(crate) struct Parts(Arc<Mutex<BTreeMap<usize, MemRegion>>>);

pub(crate) struct Part {
    parts: Parts,
    at: usize,
}

impl Parts {
    pub(crate) fn part(&self, range: Range<usize>) -> Part {
        let made = || match range.start {
            0 => MemRegion::new(range.len()),
            _ => MemRegion::forgetful(range.len()),
        };
        self.0.lock().unwrap().entry(range.start).or_insert_with(made);
        Part { parts: self.clone(), at: range.start }
    }

    /// The region after a power cut.
    pub(crate) fn crash(&self, seed: u64) -> Self {
        let parts = self.0.lock().unwrap();
        let left = parts.iter().map(|(at, part)| (*at, part.crash(seed ^ *at as u64)));
        Self(Arc::new(Mutex::new(left.collect())))
    }
}

impl Part {
    fn with<T>(&self, f: impl FnOnce(&mut MemRegion) -> T) -> T {
        f(self.parts.0.lock().unwrap().get_mut(&self.at).unwrap())
    }
}

impl Region for Part {
    fn len(&self) -> usize {
        self.with(|part| part.len())
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        self.with(|part| part.read(offset, into));
    }
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.with(|part| part.write(offset, bytes));
    }
    fn write_word(&mut self, offset: usize, value: u64) {
        self.with(|part| part.write_word(offset, value));
    }
    fn fence(&mut self) -> Result<(), RegionError> {
        self.with(MemRegion::fence)
    }
}
