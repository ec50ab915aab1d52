//! Streams of engines without an ordering log (`sync`, `none`). Nothing is replayed over a new
//! connection, and nothing is undone. A stream whose connection is lost has failed. It begins again
//! behind its durable mark, once no write of its last use is in flight anywhere: a target accepts
//! the same queue again only then (trap T8).

use riopipe_order::attribute::StreamId;

use super::Client;
use crate::core::{Core, US};

/// The time until a stream whose queue a target did not accept is tried again, ns.
const RETRY_NS: u64 = 500 * US;

/// After this number of refusals in a row by its own drives, an owner counts as fenced.
const GUARDED_MAX: u32 = 8;

impl Client {
    /// Closes a failed stream, to be started once more.
    pub(super) fn begin_anew(&mut self, id: u16, core: &mut Core) {
        let Some(mut stream) = self.streams[usize::from(id)].take() else { return };
        stream.drop_connections(core);
        self.background.remove(StreamId(id));
        // The writes of a lost association are refused, and so are those of a fenced owner. The
        // writes of the next association are not.
        self.guarded = if stream.guarded { self.guarded + 1 } else { 0 };
        self.fenced |= self.guarded > GUARDED_MAX;
        // With an engine without a log, only the durable groups are known to be there (promise P2).
        let last = stream.durable();
        if let Some(volume) = &mut self.volume {
            volume.state.on_stream_recovered(StreamId(id), last, None);
        }
        if stream.has_begun() || stream.opened_before {
            self.opened_before.insert(id);
        }
        self.retry_at = core.now + RETRY_NS;
        core.trace(|| format!("stream {id}: begins anew behind group {last}"));
    }
}
