//! Streams of engines without an ordering log (`sync`, `none`): nothing is sent again over a new
//! connection, and nothing is undone. A stream whose connection is lost has failed, and begins anew
//! behind what it knows to be durable, once no write of its last life is under way anywhere: a
//! target takes the same queue again only then (T8).

use riopipe_order::attribute::StreamId;

use super::Client;
use crate::core::{Core, US};

/// How long until a stream is tried again whose queue a target did not take, ns.
const RETRY_NS: u64 = 500 * US;

/// An owner that is kept out from its own drives so often in a row takes that for an answer.
const GUARDED_MAX: u32 = 8;

impl Client {
    /// Closes a failed stream, to be started once more.
    pub(super) fn begin_anew(&mut self, id: u16, core: &mut Core) {
        let Some(mut stream) = self.streams[usize::from(id)].take() else { return };
        stream.drop_connections(core);
        self.background.remove(StreamId(id));
        // A lost association is kept out as well as an owner that was overtaken; the next ones aren't.
        self.guarded = if stream.guarded { self.guarded + 1 } else { 0 };
        self.fenced |= self.guarded > GUARDED_MAX;
        // Of an engine without a log nothing else is known to be there (P2).
        let last = stream.durable();
        if let Some(volume) = &mut self.volume {
            volume.state.recovered(StreamId(id), last, None);
        }
        if stream.has_begun() || stream.anew {
            self.anew.insert(id);
        }
        self.retry_at = core.now + RETRY_NS;
        core.trace(|| format!("stream {id}: begins anew behind group {last}"));
    }
}
