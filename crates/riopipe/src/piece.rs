//! Buffers, and references to parts of them while they are in flight.
//!
//! ```text
//! Buf ── owns ──▶ SharedBytes { bytes, piece_count } ◀── refer to ── Piece, Piece, …
//! ```
//!
//! The life of a buffer:
//!
//! 1. The caller takes a [`Buf`] from the stream's [`BufPool`], and fills it.
//! 2. The stream stages it in a group. The driver gets [`Piece`]s of it, and splits and clones
//!    them.
//! 3. [`KeptBufs`] keeps it until no replay needs its bytes.
//! 4. When no piece is left, it goes back to the pool.
//!
//! The pieces are counted without locked instructions, because all pieces of a buffer are in one
//! stream, and a stream is with one thread at a time. A write would need six locked instructions.
//! Each of them waits until all earlier stores have left the processor.

use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use riopipe_media::{AlignedBuf, BufChunk};
use riopipe_order::attribute::Seq;
use riopipe_order::engine::Payload;

use crate::BLOCK_BYTES;

/// The bytes of a buffer, and the number of pieces that refer to them.
struct SharedBytes {
    bytes: AlignedBuf,
    /// The thread that has the pieces changes this with plain stores. Other threads only check
    /// whether it is 0.
    piece_count: AtomicUsize,
}

/// A buffer for writes: whole blocks, aligned to 4 KiB. A write takes the buffer, because a replay
/// may need the bytes until they are durable. Afterwards the stream uses the buffer again.
pub struct Buf(NonNull<SharedBytes>);

// SAFETY: a buffer owns its bytes. Pieces in another thread may refer to the same bytes and the
// same count. The count is atomic, and no thread writes to the bytes while there are pieces.
unsafe impl Send for Buf {}
// SAFETY: a shared reference only reads the bytes and the count.
unsafe impl Sync for Buf {}

impl Buf {
    /// A zeroed buffer of `len` bytes; `None` if there is not so much memory.
    pub(crate) fn zeroed(len: usize) -> Option<Self> {
        // The blocks of a buffer are counted in 32 bits (`blocks`).
        u32::try_from(len / BLOCK_BYTES).ok()?;
        AlignedBuf::try_zeroed(len).map(Self::new)
    }

    fn new(bytes: AlignedBuf) -> Self {
        let shared = SharedBytes { bytes, piece_count: AtomicUsize::new(0) };
        Self(NonNull::from(Box::leak(Box::new(shared))))
    }

    fn shared(&self) -> &SharedBytes {
        // SAFETY: the `SharedBytes` live until this buffer is dropped, and no code makes a `&mut`
        // to all of them.
        unsafe { self.0.as_ref() }
    }

    /// Its length in blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        (self.len() / BLOCK_BYTES) as u32
    }

    /// Makes the first piece: all bytes of the buffer. All other pieces are made from that piece.
    ///
    /// # Panics
    /// If the buffer has pieces already.
    pub(crate) fn first_piece(&mut self) -> Piece {
        assert!(self.is_unique(), "the pieces of a buffer descend from one");
        self.shared().piece_count.store(1, Ordering::Relaxed);
        let bytes: &[u8] = self;
        // The pointer comes from a slice of all bytes, so it is valid for all of them. It is only
        // used for reads.
        let first_byte = NonNull::from(bytes).cast();
        let bytes = PieceBytes { shared: self.0, first_byte };
        Piece { bytes: Some(bytes), blocks: self.blocks() }
    }

    /// Whether the buffer has no pieces. Then it may be written to and reused.
    pub(crate) fn is_unique(&self) -> bool {
        // The drop of a piece releases the count, and this acquires it. So all accesses through
        // pieces, also those of other threads, happen before.
        self.shared().piece_count.load(Ordering::Acquire) == 0
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
        // The caller moves a buffer into a group before the buffer gets pieces, and gets it back
        // only after its pieces are dropped.
        assert!(self.is_unique(), "a buffer in the caller's hands has no pieces");
        // SAFETY: there are no pieces. While `&mut self` is borrowed, no code can make a piece or
        // read the bytes.
        unsafe { &mut (*self.0.as_ptr()).bytes }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        if self.is_unique() {
            // SAFETY: `Box::leak` made the pointer, and no piece refers to the bytes.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        } else {
            // The bytes are not freed, because the pieces would then point to freed memory. This
            // only happens in a panic: the owner of a buffer and its pieces drops the pieces first.
            debug_assert!(std::thread::panicking(), "a buffer outlives its pieces");
        }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len())
    }
}

/// A reference to whole blocks of a [`Buf`]. While there is a piece, the bytes neither move nor
/// change. So the stream sends the right bytes even if a target answers before it has received all
/// of them (trap T18).
///
/// A piece is not `Send`, because only one thread at a time may count the pieces of a buffer. The
/// pieces of a buffer change threads only together, inside a stream: first in
/// [`Staged`](crate::staged::Staged), then in [`StreamShell`](crate::stream_shell::StreamShell).
pub(crate) struct Piece {
    /// `None` once the bytes were [taken](Payload::take).
    bytes: Option<PieceBytes>,
    blocks: u32,
}

/// The place of the bytes of a piece.
#[derive(Clone, Copy)]
struct PieceBytes {
    /// The buffer.
    shared: NonNull<SharedBytes>,
    first_byte: NonNull<u8>,
}

impl Piece {
    /// Makes another piece: `blocks` blocks from block `first_block` of this piece.
    fn new_piece(&self, first_block: u32, blocks: u32) -> Self {
        let end = first_block.checked_add(blocks);
        assert!(end.is_some_and(|end| end <= self.blocks), "a part lies within its piece");
        let bytes = self.bytes.map(|PieceBytes { shared, first_byte }| {
            // SAFETY: the buffer outlives its pieces, and this is one of them.
            let piece_count = unsafe { &shared.as_ref().piece_count };
            // A load and a store are enough, because one thread has all pieces. The count can't
            // wrap, because each piece takes more than one byte of memory.
            piece_count.store(piece_count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            // SAFETY: the first block lies within this piece, as the assertion above has checked.
            let first_byte = unsafe { first_byte.add(first_block as usize * BLOCK_BYTES) };
            PieceBytes { shared, first_byte }
        });
        Self { bytes, blocks }
    }
}

impl Clone for Piece {
    fn clone(&self) -> Self {
        self.new_piece(0, self.blocks)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Some(PieceBytes { shared, .. }) = self.bytes {
            // SAFETY: the buffer outlives its pieces, and this is one of them. After the store
            // below, another thread may free the buffer, so the reference is not used any more.
            let piece_count = unsafe { &shared.as_ref().piece_count };
            piece_count.store(piece_count.load(Ordering::Relaxed) - 1, Ordering::Release);
        }
    }
}

impl Payload for Piece {
    fn part(&self, first_block: u32, blocks: u32) -> Self {
        self.new_piece(first_block, blocks)
    }

    fn take(&mut self, blocks: u32) -> Self {
        debug_assert_eq!(blocks, self.blocks, "all blocks of the piece are taken");
        Self { bytes: self.bytes.take(), blocks: std::mem::take(&mut self.blocks) }
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref().map_or(&[], |bytes| {
            let len = self.blocks as usize * BLOCK_BYTES;
            // SAFETY: these bytes are in the buffer, which outlives this piece. No thread writes to
            // them while there are pieces.
            unsafe { std::slice::from_raw_parts(bytes.first_byte.as_ptr(), len) }
        })
    }
}

impl fmt::Debug for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Piece({} blocks)", self.blocks)
    }
}

/// A value that can only be accessed through `&mut`. A shared reference to it gives no access, so
/// it is `Sync` even if the value is not. The staged writes of a stream are such a value. They must
/// not prevent that the stream is `Sync`, because a future with a reference to the stream may move
/// to another thread only then.
#[derive(Default)]
pub(crate) struct Exclusive<T>(T);

// SAFETY: a shared reference gives no access to the value.
unsafe impl<T: Send> Sync for Exclusive<T> {}

impl<T> Exclusive<T> {
    pub(crate) fn get_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// A stream that has taken more new bytes than this gets further buffers from chunks. On a drive with
/// a volatile cache a stream keeps megabytes until a FLUSH has covered them. Most other streams never
/// need so much, so they should not have a chunk.
const BYTES_BEFORE_CHUNKS: u64 = 1 << 20;

/// Larger buffers are not cut from chunks.
const CUT_BYTES_MAX: usize = BufChunk::BYTES / 4;

/// Buffers of a stream that are ready for reuse.
#[derive(Debug, Default)]
pub(crate) struct BufPool {
    /// The bytes of all new buffers that were not cut from chunks.
    bytes_without_chunk: u64,
    /// The chunk from which new buffers are cut.
    chunk: Option<BufChunk>,
    /// The buffers, by their length. A stream uses few different lengths, so a list is fast enough.
    by_length: Vec<SameLengthBufs>,
    /// The bytes of all buffers in the pool.
    bytes: u64,
    /// The limit of `bytes`.
    bytes_max: u64,
}

/// The buffers of one length in a pool.
#[derive(Debug)]
struct SameLengthBufs {
    /// The length of each buffer, bytes.
    len: usize,
    bufs: Vec<Buf>,
}

impl BufPool {
    /// A pool that keeps at most `bytes_max` bytes.
    pub(crate) fn new(bytes_max: u64) -> Self {
        Self { bytes_max, ..Self::default() }
    }

    /// Takes a buffer of `len` bytes out of the pool, with the content of its last use, or makes a
    /// zeroed one. `None` if there is not so much memory.
    pub(crate) fn take(&mut self, len: usize) -> Option<Buf> {
        if let Some(list) = self.bufs_of_length(len)
            && let Some(buf) = list.pop()
        {
            self.bytes -= len as u64;
            return Some(buf);
        }
        if self.bytes_without_chunk > BYTES_BEFORE_CHUNKS
            && len <= CUT_BYTES_MAX
            && let Some(bytes) = self.cut(len)
        {
            return Some(Buf::new(bytes));
        }
        let buf = Buf::zeroed(len)?;
        self.bytes_without_chunk += len as u64;
        Some(buf)
    }

    /// Cuts a buffer from the chunk, or from a new one. `None` if there is no memory for a chunk.
    fn cut(&mut self, len: usize) -> Option<AlignedBuf> {
        if let Some(bytes) = self.chunk.as_mut().and_then(|chunk| chunk.cut(len)) {
            return Some(bytes);
        }
        self.chunk = BufChunk::allocate();
        self.chunk.as_mut()?.cut(len)
    }

    /// Puts a buffer into the pool. Drops it if it has pieces, or if the pool has no space.
    pub(crate) fn put_back(&mut self, buf: Buf) {
        let len = buf.len();
        let has_space = self.bytes + len as u64 <= self.bytes_max;
        if !has_space || !buf.is_unique() {
            return;
        }
        self.bytes += len as u64;
        match self.bufs_of_length(len) {
            Some(list) => list.push(buf),
            None => self.by_length.push(SameLengthBufs { len, bufs: vec![buf] }),
        }
    }

    fn bufs_of_length(&mut self, len: usize) -> Option<&mut Vec<Buf>> {
        self.by_length.iter_mut().find(|list| list.len == len).map(|list| &mut list.bufs)
    }
}

/// The buffers of submitted groups: their bytes are being sent, or may have to be sent again. The
/// owner drops the pieces first.
#[derive(Debug, Default)]
pub(crate) struct KeptBufs {
    /// The buffers that a replay may need, oldest group first.
    by_group: VecDeque<GroupBuf>,
    /// The buffers that no replay needs, but of which some bytes are still being sent. A target may
    /// answer a write before it has received all bytes (trap T18).
    still_sending: Vec<Buf>,
}

/// A buffer, and the group that has written it.
#[derive(Debug)]
struct GroupBuf {
    seq: Seq,
    buf: Buf,
}

impl KeptBufs {
    /// Keeps the buffers of a group.
    pub(crate) fn keep(&mut self, seq: Seq, bufs: impl Iterator<Item = Buf>) {
        self.by_group.extend(bufs.map(|buf| GroupBuf { seq, buf }));
    }

    /// Returns the buffers of groups up to `last_unneeded` to the pool, as soon as they have no
    /// pieces.
    pub(crate) fn recycle(&mut self, last_unneeded: Seq, pool: &mut BufPool) {
        if !self.still_sending.is_empty() {
            for buf in self.still_sending.extract_if(.., |buf| buf.is_unique()) {
                pool.put_back(buf);
            }
        }
        while self.by_group.front().is_some_and(|oldest| oldest.seq <= last_unneeded) {
            let Some(GroupBuf { buf, .. }) = self.by_group.pop_front() else { break };
            if buf.is_unique() {
                pool.put_back(buf);
            } else {
                self.still_sending.push(buf);
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
        let mut whole = buf.first_piece();
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
        let _part = buf.first_piece().part(1, 1).part(1, 1);
    }

    #[test]
    #[should_panic = "descend from one"]
    fn there_is_one_first_piece() {
        let mut buf = Buf::zeroed(BLOCK_BYTES).unwrap();
        let _piece = buf.first_piece();
        let _second = buf.first_piece();
    }

    #[test]
    #[should_panic = "has no pieces"]
    fn bytes_in_flight_are_not_written_to() {
        let mut buf = Buf::zeroed(BLOCK_BYTES).unwrap();
        let _piece = buf.first_piece();
        buf[0] = 1;
    }

    #[test]
    fn t18_a_buffer_that_is_still_referred_to_is_not_handed_out() {
        let (mut pool, mut kept) = (BufPool::new(1 << 20), KeptBufs::default());
        let mut buf = pool.take(BLOCK_BYTES).unwrap();
        let (address, piece) = (buf.as_ptr(), buf.first_piece());
        let sending = piece.clone();
        kept.keep(Seq(7), [buf].into_iter());
        drop(piece);
        kept.recycle(Seq(6), &mut pool);
        assert_eq!((kept.by_group.len(), kept.still_sending.len()), (1, 0), "it may be replayed");
        kept.recycle(Seq(7), &mut pool);
        assert_ne!(pool.take(BLOCK_BYTES).unwrap().as_ptr(), address, "a piece of it is left");
        drop(sending);
        kept.recycle(Seq(7), &mut pool);
        assert_eq!((kept.by_group.len(), kept.still_sending.len()), (0, 0));
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
            assert!(BufPool::new(u64::MAX).take(len).is_none(), "{len}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no madvise")]
    fn a_stream_that_keeps_much_gets_its_buffers_from_chunks() {
        let mut pool = BufPool::new(16 << 20);
        let take = |pool: &mut BufPool, bytes: usize| -> Vec<Buf> {
            (0..bytes / BLOCK_BYTES).map(|_| pool.take(BLOCK_BYTES).unwrap()).collect()
        };
        let few = take(&mut pool, 1 << 20);
        assert!(pool.chunk.is_none(), "a stream with few buffers has no chunk");
        let many = take(&mut pool, 5 << 20);
        assert!(pool.chunk.is_some());
        assert_eq!(pool.bytes_without_chunk, (1 << 20) + BLOCK_BYTES as u64);
        let addresses: std::collections::BTreeSet<usize> =
            few.iter().chain(&many).map(|buf| buf.as_ptr() as usize).collect();
        assert_eq!(addresses.len(), few.len() + many.len(), "no two buffers share bytes");
        many.into_iter().for_each(|buf| pool.put_back(buf));
        let again = take(&mut pool, 5 << 20);
        assert!(again.iter().all(|buf| addresses.contains(&(buf.as_ptr() as usize))), "reused");
        let large = pool.take(CUT_BYTES_MAX + BLOCK_BYTES).unwrap();
        assert_eq!(large.len(), CUT_BYTES_MAX + BLOCK_BYTES);
    }

    #[test]
    fn the_pool_is_bounded() {
        let mut pool = BufPool::new(3 * BLOCK_BYTES as u64);
        for _ in 0..5 {
            pool.put_back(Buf::zeroed(BLOCK_BYTES).unwrap());
        }
        assert_eq!(pool.bytes, 3 * BLOCK_BYTES as u64);
    }

    #[test]
    fn pieces_change_threads_with_the_owner_of_them_all() {
        let mut buf = Buf::zeroed(2 * BLOCK_BYTES).unwrap();
        buf[BLOCK_BYTES] = 9;
        let whole = buf.first_piece();
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
            assert_eq!(
                staged.bufs[0].shared().piece_count.load(Ordering::Relaxed),
                3 + turn as usize
            );
        }
        staged.writes.clear();
        staged.bufs[0][0] = 1;
    }
}
