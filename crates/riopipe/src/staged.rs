//! The writes of a group before the group is submitted, and their buffers.

use riopipe_order::engine::{Op, Write};

use crate::piece::{Buf, Piece};

/// The writes of the group that a stream stages, and their buffers.
#[derive(Debug, Default)]
pub(crate) struct Staged {
    /// The writes. Their pieces refer to `bufs`, so they are dropped before these.
    pub(crate) writes: Vec<Write<Piece>>,
    pub(crate) bufs: Vec<Buf>,
}

impl Staged {
    /// Makes the writes whole again after a refusal: the engine takes pieces out of writes that it
    /// then refuses ([`Engine::admit`](riopipe_order::engine::Engine::admit)).
    #[cold]
    pub(crate) fn restage(&mut self) {
        let mut bufs = self.bufs.iter_mut();
        for write in &mut self.writes {
            if let Op::Write(place, _) = write.op
                && let Some(buf) = bufs.next()
            {
                // The old piece goes first: a buffer has one piece that is made from it.
                write.op = Op::Discard;
                write.op = Op::Write(place, buf.piece());
            }
        }
    }
}

// SAFETY: each piece is all of a buffer in `bufs`, which is not `Send` because the counts of its
// buffer take one thread at a time. All pieces of these buffers are here: they come with the buffer
// (`Group::write`) and leave with it (`Stream::admit`, `Stream::unstage`), within one call on the
// stream. So they change threads together.
unsafe impl Send for Staged {}
