//! The bytes of a write, counted while any part of the program holds them (trap T14).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use riopipe_order::engine;

use crate::block::{self, BLOCK, Content};

#[derive(Debug)]
struct Bytes {
    bytes: Vec<u8>,
    held: Arc<AtomicU64>,
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes.len() as u64, Ordering::Relaxed);
    }
}

/// A write's payload, or a part of it.
#[derive(Clone, Debug)]
pub struct Payload {
    bytes: Arc<Bytes>,
    from: usize,
    len: usize,
}

impl Payload {
    /// Blocks with these contents. `held` counts their bytes while any part of the program holds
    /// them.
    #[must_use]
    pub fn new(contents: &[Content], held: &Arc<AtomicU64>) -> Self {
        let bytes = block::bytes(contents);
        let len = bytes.len();
        held.fetch_add(len as u64, Ordering::Relaxed);
        Self { bytes: Arc::new(Bytes { bytes, held: Arc::clone(held) }), from: 0, len }
    }
}

impl From<Vec<u8>> for Payload {
    /// Bytes that are not counted.
    fn from(bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        let held = Arc::new(AtomicU64::new(len as u64));
        Self { bytes: Arc::new(Bytes { bytes, held }), from: 0, len }
    }
}

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        &self.bytes.bytes[self.from..self.from + self.len]
    }
}

impl engine::Payload for Payload {
    fn part(&self, first_block: u32, blocks: u32) -> Self {
        let from = self.from + first_block as usize * BLOCK;
        let len = blocks as usize * BLOCK;
        debug_assert!(from + len <= self.from + self.len);
        Self { bytes: Arc::clone(&self.bytes), from, len }
    }
}
