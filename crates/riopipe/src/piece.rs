//! Buffers, and counted references to parts of them while they are under way.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use riopipe_media::AlignedBuf;
use riopipe_order::engine::Payload;

use crate::BLOCK_BYTES;

/// A buffer for writes: whole blocks, aligned to 4 KiB. It is moved into the write, because a
/// replay needs the bytes until they are durable; the stream reuses it afterwards.
pub struct Buf(Arc<AlignedBuf>);

impl Buf {
    /// A zeroed buffer of `len` bytes.
    pub(crate) fn zeroed(len: usize) -> Self {
        Self(Arc::new(AlignedBuf::zeroed(len)))
    }

    /// Its length in blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        (self.0.len() / BLOCK_BYTES) as u32
    }

    /// A reference to all its bytes.
    pub(crate) fn piece(&self) -> Piece {
        Piece { buf: Some(Arc::clone(&self.0)), first: 0, blocks: self.blocks() }
    }

    /// Whether no piece of it is left anywhere: it may be handed out again.
    pub(crate) fn is_unique(&mut self) -> bool {
        // Nobody makes weak references, and who holds the only reference makes no second one
        // meanwhile. What others did with theirs happens before.
        let unique = Arc::strong_count(&self.0) == 1;
        fence(Ordering::Acquire);
        unique
    }
}

impl Deref for Buf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // A buffer leaves the caller's hands when a group is staged with it, and comes back only
        // once its pieces are gone.
        Arc::get_mut(&mut self.0).expect("a buffer in the caller's hands has no pieces")
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.0.len())
    }
}

/// Whole blocks of a [`Buf`]. Holding one keeps the bytes alive and unchanged, so not even a
/// target that answers before it was sent everything can make the stream send other bytes (T18).
#[derive(Clone)]
pub(crate) struct Piece {
    /// `None` once it was taken.
    buf: Option<Arc<AlignedBuf>>,
    first: u32,
    blocks: u32,
}

impl Payload for Piece {
    fn part(&self, first_block: u32, blocks: u32) -> Self {
        debug_assert!(first_block + blocks <= self.blocks, "a part lies within its piece");
        Self { buf: self.buf.clone(), first: self.first + first_block, blocks }
    }

    fn take(&mut self, blocks: u32) -> Self {
        debug_assert_eq!(blocks, self.blocks, "all of it is taken");
        Self { buf: self.buf.take(), first: self.first, blocks: std::mem::take(&mut self.blocks) }
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        let start = self.first as usize * BLOCK_BYTES;
        self.buf.as_ref().map_or(&[], |buf| &buf[start..start + self.blocks as usize * BLOCK_BYTES])
    }
}

impl fmt::Debug for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Piece({}+{} blocks)", self.first, self.blocks)
    }
}

/// Buffers ready to be handed out again, by length.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    classes: Vec<(usize, Vec<Buf>)>,
    bytes: u64,
    bytes_max: u64,
}

impl Pool {
    /// A pool that keeps at most `bytes_max` bytes.
    pub(crate) fn new(bytes_max: u64) -> Self {
        Self { bytes_max, ..Self::default() }
    }

    /// A buffer of `len` bytes: zeroed if new, else with what its last user left in it.
    pub(crate) fn take(&mut self, len: usize) -> Buf {
        if let Some((_, list)) = self.classes.iter_mut().find(|(size, _)| *size == len)
            && let Some(buf) = list.pop()
        {
            self.bytes -= len as u64;
            return buf;
        }
        Buf::zeroed(len)
    }

    /// Takes a buffer back, if nothing refers to it and there is room.
    pub(crate) fn give(&mut self, mut buf: Buf) {
        let len = buf.len();
        if self.bytes + len as u64 > self.bytes_max || !buf.is_unique() {
            return;
        }
        self.bytes += len as u64;
        match self.classes.iter_mut().find(|(size, _)| *size == len) {
            Some((_, list)) => list.push(buf),
            None => self.classes.push((len, vec![buf])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_bytes_they_name() {
        let mut buf = Buf::zeroed(4 * BLOCK_BYTES);
        for (i, byte) in buf.iter_mut().enumerate() {
            *byte = (i / BLOCK_BYTES) as u8;
        }
        let part = buf.piece().part(1, 2).part(1, 1);
        assert_eq!(part.as_ref(), [2; BLOCK_BYTES]);
    }

    #[test]
    fn t18_a_buffer_that_is_still_referred_to_is_not_handed_out() {
        let mut pool = Pool::new(1 << 20);
        let buf = pool.take(BLOCK_BYTES);
        let (address, piece) = (buf.as_ptr(), buf.piece());
        pool.give(buf);
        assert_ne!(pool.take(BLOCK_BYTES).as_ptr(), address, "a piece of it is left");
        drop(piece);
        let buf = pool.take(BLOCK_BYTES);
        let address = buf.as_ptr();
        pool.give(buf);
        assert_eq!(pool.take(BLOCK_BYTES).as_ptr(), address, "reused");
    }

    #[test]
    fn the_pool_is_bounded() {
        let mut pool = Pool::new(3 * BLOCK_BYTES as u64);
        for _ in 0..5 {
            pool.give(Buf::zeroed(BLOCK_BYTES));
        }
        assert_eq!(pool.bytes, 3 * BLOCK_BYTES as u64);
    }
}
