//! Buffers, and references to parts of them while they are in flight.
//!
//! A buffer belongs to one stream for as long as it is in flight, and a stream to one thread at a
//! time. So its references are counted without locked instructions. A write would need six of
//! those, and each waits until the stores before it have left the processor.

use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use riopipe_media::AlignedBuf;
use riopipe_order::attribute::Seq;
use riopipe_order::engine::Payload;

use crate::BLOCK_BYTES;

/// The bytes of a buffer, and the number of pieces that refer to them.
struct Shared {
    bytes: AlignedBuf,
    /// Written with plain stores, by the thread that has the pieces; others only check whether it
    /// is 0.
    pieces: AtomicUsize,
}

/// A buffer for writes: whole blocks, aligned to 4 KiB. It is moved into the write, because a
/// replay needs the bytes until they are durable; the stream reuses it afterwards.
pub struct Buf(NonNull<Shared>);

// SAFETY: a buffer owns its bytes. It shares with pieces on another thread only the count, which is
// atomic, and the bytes, which no thread writes while there are pieces.
unsafe impl Send for Buf {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buf {}

impl Buf {
    /// A zeroed buffer of `len` bytes; `None` if there is not so much memory.
    pub(crate) fn zeroed(len: usize) -> Option<Self> {
        // The blocks of a buffer are counted in 32 bits.
        u32::try_from(len / BLOCK_BYTES).ok()?;
        let bytes = AlignedBuf::try_zeroed(len)?;
        let shared = Shared { bytes, pieces: AtomicUsize::new(0) };
        Some(Self(NonNull::from(Box::leak(Box::new(shared)))))
    }

    fn shared(&self) -> &Shared {
        // SAFETY: it lives until this is dropped; no code makes a `&mut` to all of it.
        unsafe { self.0.as_ref() }
    }

    /// Its length in blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        (self.len() / BLOCK_BYTES) as u32
    }

    /// The first piece of it: all its bytes. The others come from that one.
    ///
    /// # Panics
    /// If there are pieces of it already.
    pub(crate) fn piece(&mut self) -> Piece {
        assert!(self.is_unique(), "the pieces of a buffer descend from one");
        self.shared().pieces.store(1, Ordering::Relaxed);
        let bytes: &[u8] = self;
        // The pointer comes from a slice of all bytes, so it is valid for all of them. It is only used
        // for reads.
        let first = NonNull::from(bytes).cast();
        Piece { bytes: Some(Bytes { shared: self.0, first }), blocks: self.blocks() }
    }

    /// Whether no piece of it is left: it may then be written to, and reused.
    pub(crate) fn is_unique(&self) -> bool {
        // All accesses of other threads through their pieces happen before.
        self.shared().pieces.load(Ordering::Acquire) == 0
    }
}

impl Deref for Buf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.shared().bytes
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // A buffer leaves the caller's hands when a group is staged with it, and comes back only
        // once its pieces are gone.
        assert!(self.is_unique(), "a buffer in the caller's hands has no pieces");
        // SAFETY: there are no pieces. `&mut self` prevents that new ones are made, and that other
        // code reads the bytes.
        unsafe { &mut (*self.0.as_ptr()).bytes }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        if self.is_unique() {
            // SAFETY: made by `Box::leak`, and no piece is left that could refer to it.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        } else {
            // Pieces without their buffer would point nowhere, so they must not exist. The owner of
            // both drops the pieces first.
            debug_assert!(std::thread::panicking(), "a buffer outlives its pieces");
        }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len())
    }
}

/// Whole blocks of a [`Buf`]. While there is a piece, the bytes neither move nor change. So even if a
/// target answers before it has received all bytes, the stream sends no other bytes (T18).
///
/// Not `Send`: the pieces of a buffer are counted by one thread at a time. They go to another
/// thread only together, with the owner of them all. That is a stream: while it stages them
/// ([`Staged`](crate::staged::Staged)), then while they are in flight
/// ([`StreamShell`](crate::stream_shell::StreamShell)).
pub(crate) struct Piece {
    /// `None` once it was taken.
    bytes: Option<Bytes>,
    blocks: u32,
}

/// The place of a piece's bytes.
#[derive(Clone, Copy)]
struct Bytes {
    /// The buffer.
    shared: NonNull<Shared>,
    /// The first byte of the piece.
    first: NonNull<u8>,
}

impl Piece {
    /// Another reference, to `blocks` blocks from `first_block`.
    fn new_reference(&self, first_block: u32, blocks: u32) -> Self {
        let end = first_block.checked_add(blocks);
        assert!(end.is_some_and(|end| end <= self.blocks), "a part lies within its piece");
        let bytes = self.bytes.map(|Bytes { shared, first }| {
            // SAFETY: the buffer outlives its pieces, of which this is one.
            let pieces = unsafe { &shared.as_ref().pieces };
            // One thread has all the pieces. The count can't wrap, because each piece takes more
            // than one byte of memory.
            pieces.store(pieces.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            // SAFETY: within the piece, as was checked above.
            Bytes { shared, first: unsafe { first.add(first_block as usize * BLOCK_BYTES) } }
        });
        Self { bytes, blocks }
    }
}

impl Clone for Piece {
    fn clone(&self) -> Self {
        self.new_reference(0, self.blocks)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Some(Bytes { shared, .. }) = self.bytes {
            // SAFETY: as in `new_reference`. After the store the buffer may have been freed.
            let pieces = unsafe { &shared.as_ref().pieces };
            pieces.store(pieces.load(Ordering::Relaxed) - 1, Ordering::Release);
        }
    }
}

impl Payload for Piece {
    fn part(&self, first_block: u32, blocks: u32) -> Self {
        self.new_reference(first_block, blocks)
    }

    fn take(&mut self, blocks: u32) -> Self {
        debug_assert_eq!(blocks, self.blocks, "all of it is taken");
        Self { bytes: self.bytes.take(), blocks: std::mem::take(&mut self.blocks) }
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref().map_or(&[], |bytes| {
            // SAFETY: these bytes are in the buffer, which lives as long as this does; no thread
            // writes to it while there are pieces.
            unsafe {
                std::slice::from_raw_parts(bytes.first.as_ptr(), self.blocks as usize * BLOCK_BYTES)
            }
        })
    }
}

impl fmt::Debug for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Piece({} blocks)", self.blocks)
    }
}

/// A value that is only reached through `&mut`: it may be shared, since a shared reference shows
/// nothing of it. Data that a stream stages is such a value. With it a stream is `Sync`, so that a
/// future with a reference to the stream may move to another thread.
#[derive(Default)]
pub(crate) struct Exclusive<T>(T);

// SAFETY: a shared reference gives no access to the value in it.
unsafe impl<T: Send> Sync for Exclusive<T> {}

impl<T> Exclusive<T> {
    pub(crate) fn get_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// Buffers ready for reuse, by length.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// For each length, the buffers of it.
    by_length: Vec<(usize, Vec<Buf>)>,
    /// The bytes of all buffers in the pool, and the limit for them.
    bytes: u64,
    bytes_max: u64,
}

impl Pool {
    /// A pool that keeps at most `bytes_max` bytes.
    pub(crate) fn new(bytes_max: u64) -> Self {
        Self { bytes_max, ..Self::default() }
    }

    /// A buffer of `len` bytes: zeroed if new, else with the content of its last use. `None` if
    /// there is not so much memory.
    pub(crate) fn take(&mut self, len: usize) -> Option<Buf> {
        if let Some((_, list)) = self.by_length.iter_mut().find(|(size, _)| *size == len)
            && let Some(buf) = list.pop()
        {
            self.bytes -= len as u64;
            return Some(buf);
        }
        Buf::zeroed(len)
    }

    /// Accepts a buffer for reuse if no piece refers to it and the pool has space.
    pub(crate) fn put_back(&mut self, buf: Buf) {
        let len = buf.len();
        if self.bytes + len as u64 > self.bytes_max || !buf.is_unique() {
            return;
        }
        self.bytes += len as u64;
        match self.by_length.iter_mut().find(|(size, _)| *size == len) {
            Some((_, list)) => list.push(buf),
            None => self.by_length.push((len, vec![buf])),
        }
    }
}

/// Buffers whose bytes may have to be sent again, or are being sent. They are dropped after the
/// pieces.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// The buffers, each with the group that it was written in, oldest first.
    bufs: VecDeque<(Seq, Buf)>,
    /// Buffers that are no longer needed, but are still being sent, because a target has answered
    /// before it received all bytes (T18).
    still_sending: Vec<Buf>,
}

impl Kept {
    /// Keeps the buffers of a group.
    pub(crate) fn keep(&mut self, seq: Seq, bufs: impl Iterator<Item = Buf>) {
        self.bufs.extend(bufs.map(|buf| (seq, buf)));
    }

    /// Returns the buffers of groups up to `last_unneeded` to the pool.
    pub(crate) fn recycle(&mut self, last_unneeded: Seq, pool: &mut Pool) {
        if !self.still_sending.is_empty() {
            for buf in self.still_sending.extract_if(.., |buf| buf.is_unique()) {
                pool.put_back(buf);
            }
        }
        while self.bufs.front().is_some_and(|(seq, _)| *seq <= last_unneeded) {
            let Some((_, buf)) = self.bufs.pop_front() else { break };
            match buf.is_unique() {
                true => pool.put_back(buf),
                false => self.still_sending.push(buf),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use riopipe_order::engine::{Op, Place, Write};

    use super::*;
    use crate::staged::Staged;
    use crate::stream_shell::StreamShell;

    #[test]
    fn parts_are_the_bytes_they_name() {
        let mut buf = Buf::zeroed(4 * BLOCK_BYTES).unwrap();
        for (i, byte) in buf.iter_mut().enumerate() {
            *byte = (i / BLOCK_BYTES) as u8;
        }
        let mut whole = buf.piece();
        let part = whole.part(1, 2).part(1, 1);
        assert_eq!(part.as_ref(), [2; BLOCK_BYTES]);
        let taken = whole.take(4);
        assert_eq!((taken.as_ref(), whole.as_ref()), (&buf[..], &[][..]));
        drop((part, whole));
        assert!(!buf.is_unique());
        drop(taken);
        assert!(buf.is_unique());
    }

    #[test]
    #[should_panic = "within its piece"]
    fn a_part_beyond_its_piece_is_refused() {
        let mut buf = Buf::zeroed(2 * BLOCK_BYTES).unwrap();
        // The piece is dropped before the buffer, also when a panic unwinds.
        let _part = buf.piece().part(1, 1).part(1, 1);
    }

    #[test]
    #[should_panic = "descend from one"]
    fn there_is_one_first_piece() {
        let mut buf = Buf::zeroed(BLOCK_BYTES).unwrap();
        let _piece = buf.piece();
        let _second = buf.piece();
    }

    #[test]
    #[should_panic = "has no pieces"]
    fn bytes_in_flight_are_not_written_to() {
        let mut buf = Buf::zeroed(BLOCK_BYTES).unwrap();
        let _piece = buf.piece();
        buf[0] = 1;
    }

    #[test]
    fn t18_a_buffer_that_is_still_referred_to_is_not_handed_out() {
        let (mut pool, mut kept) = (Pool::new(1 << 20), Kept::default());
        let mut buf = pool.take(BLOCK_BYTES).unwrap();
        let (address, piece) = (buf.as_ptr(), buf.piece());
        let sending = piece.clone();
        kept.keep(Seq(7), [buf].into_iter());
        drop(piece);
        kept.recycle(Seq(6), &mut pool);
        assert_eq!((kept.bufs.len(), kept.still_sending.len()), (1, 0), "it may be replayed");
        kept.recycle(Seq(7), &mut pool);
        assert_ne!(pool.take(BLOCK_BYTES).unwrap().as_ptr(), address, "a piece of it is left");
        drop(sending);
        kept.recycle(Seq(7), &mut pool);
        assert_eq!((kept.bufs.len(), kept.still_sending.len()), (0, 0));
        assert_eq!(pool.take(BLOCK_BYTES).unwrap().as_ptr(), address, "reused");
    }

    #[test]
    fn streams_go_from_thread_to_thread_and_may_be_shared() {
        fn is_send<T: Send>() {}
        fn is_shared<T: Send + Sync>() {}
        is_send::<Staged>();
        is_send::<StreamShell>();
        is_shared::<Buf>();
        is_shared::<crate::Stream>();
        is_shared::<crate::Reader>();
    }

    #[test]
    fn a_buffer_that_is_too_large_is_refused() {
        // 16 TiB have one block more than 32 bits count.
        for len in [1 << 44, 1 << 60, usize::MAX - (BLOCK_BYTES - 1)] {
            assert!(Pool::new(u64::MAX).take(len).is_none(), "{len}");
        }
    }

    #[test]
    fn the_pool_is_bounded() {
        let mut pool = Pool::new(3 * BLOCK_BYTES as u64);
        for _ in 0..5 {
            pool.put_back(Buf::zeroed(BLOCK_BYTES).unwrap());
        }
        assert_eq!(pool.bytes, 3 * BLOCK_BYTES as u64);
    }

    #[test]
    fn pieces_change_threads_with_the_owner_of_them_all() {
        let mut buf = Buf::zeroed(2 * BLOCK_BYTES).unwrap();
        buf[BLOCK_BYTES] = 9;
        let whole = buf.piece();
        let rest = whole.part(1, 1);
        let write = |lba, piece: Piece| {
            let blocks = piece.blocks;
            Write { lba, blocks, op: Op::Write(Place::Fresh, piece) }
        };
        let mut staged = Staged { writes: vec![write(0, whole), write(1, rest)], bufs: vec![buf] };
        for turn in 0..3 {
            let other = std::thread::spawn(move || {
                let Op::Write(_, rest) = &staged.writes[1].op else { unreachable!() };
                assert_eq!(rest.clone().as_ref()[0], 9);
                let more = rest.part(0, 1);
                staged.writes.push(write(turn, more));
                staged
            });
            staged = other.join().unwrap();
            assert_eq!(staged.bufs[0].shared().pieces.load(Ordering::Relaxed), 3 + turn as usize);
        }
        staged.writes.clear();
        staged.bufs[0][0] = 1;
    }
}
