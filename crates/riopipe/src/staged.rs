//! The writes of a group that is not submitted yet, and their buffers.

use riopipe_order::engine::{Op, Write};

use crate::piece::{Buf, Piece};

/// The writes of the group that a stream stages, and their buffers.
#[derive(Debug, Default)]
pub(crate) struct Staged {
    /// The writes. The field is above `bufs`, so that the pieces of the writes are dropped before their
    /// buffers.
    pub(crate) writes: Vec<Write<Piece>>,
    /// The buffers of those writes that have data, in the same order.
    pub(crate) bufs: Vec<Buf>,
}

impl Staged {
    /// Makes the writes complete again, so that the group can be submitted once more. The engine may take
    /// pieces out of writes before it refuses them
    /// ([`Engine::admit`](riopipe_order::engine::Engine::admit)).
    #[cold]
    pub(crate) fn restage(&mut self) {
        let mut bufs = self.bufs.iter_mut();
        for write in &mut self.writes {
            let Op::Write(place, _) = write.op else { continue };
            let Some(buf) = bufs.next() else { return };
            // This drops the old piece. A buffer must have no pieces when its first piece is made.
            write.op = Op::Discard;
            write.op = Op::Write(place, buf.first_piece());
        }
    }
}

// SAFETY: only the pieces are not `Send`, because only one thread at a time may count the pieces of a
// buffer. All pieces of the buffers in `bufs` are in `writes`: `Group::write` adds a buffer and its piece
// together, and `Stream::try_submit` and `Stream::unstage` remove them together, each within one call.
// So all pieces of a buffer change threads together.
unsafe impl Send for Staged {}
