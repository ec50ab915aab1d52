//! The methods to keep order, behind one trait ([`Engine`]).
//!
//! An engine is the initiator's half of an ordered stream. Groups go in. Requests come out, in the
//! order and with the attributes that the engine's method needs. Completions go back in. Two marks
//! show the caller how far the stream is complete and how far it is durable.
//!
//! | engine | order is kept by |
//! |---|---|
//! | [`None`](none::NoOrder) | nothing: the ceiling |
//! | [`Sync`](sync::Sync) | waiting for the transfer, then FLUSH, then the next group (Linux) |
//! | [`Rio`](rio::Rio) | attributes, the target's log and gate, in-order completion |

mod base;
mod credits;
mod kind;
pub mod none;
pub mod rio;
mod sent;
pub mod sync;
mod window;

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use crate::attribute::{Attribute, Flags, Kind, Member, Seq};
use crate::topology::{Extent, Topology};

pub use kind::{Capabilities, EngineKind};

/// A handle on payload bytes that stay where they are (cheap to clone: a counted reference).
/// Cutting a write in two cuts its handle.
pub trait Payload: Clone + fmt::Debug {
    /// The part that starts `first_block` blocks in and has `blocks` blocks.
    #[must_use]
    fn part(&self, first_block: u32, blocks: u32) -> Self;

    /// All of it, `blocks` blocks. The caller needs no other reference to them here.
    #[must_use]
    fn take(&mut self, blocks: u32) -> Self {
        self.part(0, blocks)
    }
}

/// The caller's declaration about the old content of a write's blocks: whether recovery may still
/// need it (T11). There is no default, because only the caller knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// No state that the volume may still recover to needs the old content. It was free as of the
    /// *released* mark, not merely freed a moment ago. Undo may zero the blocks.
    Fresh,
    /// Live data is overwritten. Undo leaves it alone, and recovery lists it after a crash.
    InPlace,
    /// For every state that the volume may still recover to, the new content serves as well as the
    /// old. An example is the tail of a log that is written again with more records behind the old
    /// ones, where each record has a number and a checksum. After a crash each block holds the
    /// content of the prefix or that of a later extension. Undo leaves it alone, and recovery does
    /// not list it. If the extended content was [fresh](Self::Fresh) and is beyond the prefix, too,
    /// it is zeroed with that.
    Extend,
}

impl Place {
    /// The flag of an entry with this place (T11).
    #[must_use]
    #[inline]
    pub const fn flag(self) -> Flags {
        match self {
            Self::Fresh => Flags(0),
            Self::InPlace => Flags::IN_PLACE,
            Self::Extend => Flags::EXTEND,
        }
    }
}

/// The effect of a write of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op<P> {
    /// Writes the payload.
    Write(Place, P),
    /// Makes the blocks read as zeroes. The old content must be as dispensable as for
    /// [`Place::Fresh`].
    Discard,
}

impl<P> Op<P> {
    /// Whether the old content of the blocks is lost for good. Then no state that the volume may
    /// still recover to may need it (T11).
    #[must_use]
    #[inline]
    pub const fn is_fresh(&self) -> bool {
        matches!(self, Self::Write(Place::Fresh, _) | Self::Discard)
    }
}

/// One write of a group, in volume blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write<P> {
    /// First block on the volume.
    pub lba: u64,
    /// Blocks, at least 1.
    pub blocks: u32,
    /// The effect.
    pub op: Op<P>,
}

/// The progress of a stream: the last group that is complete, and the last that is durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Every group up to this is complete on all targets (P3: in order, each once).
    pub complete: Seq,
    /// Every group up to this is durable, if the media keep the assumptions about them.
    pub durable: Seq,
}

/// The number of a request in flight. A number is used again once its request is done and, where it
/// may have to be replayed, released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub u32);

/// One request to one drive.
#[derive(Clone, Debug)]
pub struct Request<P> {
    /// The (first) group it belongs to.
    pub seq: Seq,
    /// How many whole groups it covers.
    pub span: u16,
    /// How many entries its group has.
    pub num: u16,
    /// Which entry of its group it is.
    pub index: u16,
    /// The drive.
    pub member: Member,
    /// The server that has the drive.
    pub server: u16,
    /// Its effect on the drive.
    pub kind: Kind,
    /// Boundary, flush, in place, split.
    pub flags: Flags,
    /// First block on the drive.
    pub lba: u64,
    /// Blocks; 0 for a flush.
    pub blocks: u32,
    /// The caller's tag of the (last) group.
    pub tag: u64,
    /// Its payload, in order of the blocks.
    pub pieces: Vec<P>,
    /// Whether it is in use and not complete.
    is_incomplete: bool,
    /// Whether it is to be sent again, or was sent again and has not ended.
    is_replayed: bool,
}

impl<P> Request<P> {
    /// The last group it covers.
    #[must_use]
    pub fn seq_end(&self) -> Seq {
        Seq(self.seq.0 + u64::from(self.span) - 1)
    }

    /// Whether it touches these blocks.
    fn touches(&self, extent: &Extent) -> bool {
        self.member == extent.member
            && self.lba < extent.lba + u64::from(extent.blocks)
            && extent.lba < self.lba + u64::from(self.blocks)
    }

    /// The ordering attribute with which it travels.
    #[must_use]
    pub fn attribute(&self, ordinal: u32) -> Attribute {
        Attribute {
            seq: self.seq,
            span: self.span,
            num: self.num,
            index: self.index,
            ordinal,
            member: self.member,
            kind: self.kind,
            flags: self.flags,
            lba: self.lba,
            blocks: self.blocks,
            tag: self.tag,
        }
    }
}

/// A request that may be sent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dispatch {
    /// The request.
    pub id: RequestId,
    /// For ordered requests: the place among the stream's entries on its server, and the released
    /// mark to send with it.
    pub ordered: Option<(u32, Seq)>,
}

/// The cause of a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The target answered with this NVMe status.
    Status(u16),
    /// The connection to the target is gone.
    Disconnected,
    /// The target did not answer in time.
    TimedOut,
    /// Another stream's FLUSH of the same drive failed; this stream's unflushed data there may be
    /// gone (T22).
    SharedFlush,
    /// The target's log of the stream differs from what was sent to it (T18, T19).
    LogMismatch,
    /// The target came back, and its log or a drive has changed (T27).
    Changed,
}

/// A stream's first failure, which poisons it (P6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The first group that it touches.
    pub seq: Seq,
    /// The drive.
    pub member: Member,
    /// Whether a FLUSH failed, alone or behind a write.
    pub flush: bool,
    /// The cause.
    pub cause: Cause,
}

/// The bound that a group exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The ordering log of this server (T13).
    Log {
        /// The server.
        server: u16,
    },
    /// The memory for requests that may have to be replayed (T14).
    Memory,
}

/// Why a group is refused. A refused group changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no space right now; there will be.
    Full(Bound),
    /// The group can never fit.
    TooLarge(Bound),
    /// More entries than a group can count.
    TooManyEntries,
    /// A group without writes that is not durable has no meaning.
    Empty,
    /// The stream has failed.
    Poisoned(Failure),
}

/// A stream's engine: one method to keep order.
///
/// The owner calls [`admit`](Self::admit) for each group, then takes what may go to each server
/// ([`next`](Self::next)), reports each end ([`done`](Self::done)), and reads the marks
/// ([`poll`](Self::poll)). No call waits, allocates per request in steady state, or reads a clock.
pub trait Engine<P: Payload>: base::HasBase<P> {
    /// Takes a group, whole or not at all. The payloads are [taken](Payload::take) out of `writes`,
    /// also of some that are then refused.
    ///
    /// # Errors
    /// [`Refusal`] names the bound that was hit, or the failure of the stream.
    fn admit(&mut self, writes: &mut [Write<P>], tag: u64, durable: bool) -> Result<Seq, Refusal>;

    /// The next request that may go to `server` now. The caller must send it.
    fn next(&mut self, server: u16) -> Option<Dispatch> {
        let id = self.base_mut().queues[usize::from(server)].pop_front()?;
        Some(Dispatch { id, ordered: None })
    }

    /// A request that was returned by [`next`](Self::next) and is not done.
    fn request(&self, id: RequestId) -> &Request<P> {
        self.base().request(id)
    }

    /// Reports the end of a request that [`next`](Self::next) has returned since the last
    /// [`suspend`](Self::suspend) of its server.
    fn done(&mut self, id: RequestId, result: Result<(), Cause>);

    /// Notes that the connection to a server is lost. If the engine can replay, it returns true.
    /// Then it gives out nothing for that server until [`resume`](Self::resume), and expects no
    /// [`done`](Self::done) for the requests in flight there; groups are admitted as before, within
    /// the bounds. If the engine cannot replay, or the stream has failed, it returns false and
    /// nothing changes: the caller [`poison`](Self::poison)s the stream.
    ///
    /// The call may come at any time, also during a replay.
    fn suspend(&mut self, server: u16) -> bool {
        let _ = server;
        false
    }

    /// Notes that the stream is bound to a suspended server again, by the same owner, and that the
    /// server has read its log. `durable` returns whether the server found the entry with this
    /// (first) seq and index *durable*, not merely there.
    ///
    /// Ordinals start at 1 again. An entry that is durable there counts as complete. Everything
    /// else that was given out for this server and is not released comes again from
    /// [`next`](Self::next), as it was, in the order in which it first did, before anything new
    /// (P7, T4). Entries keep their slots in the server's log, so no credits are needed (T13).
    ///
    /// On a stream that has failed meanwhile, nothing is sent again.
    fn resume(&mut self, server: u16, durable: &mut dyn FnMut(Seq, u16) -> bool) {
        let _ = (server, durable);
    }

    /// Visits the requests that were given out for a server and may have to be sent again, in that
    /// order, with ordinal 0. The server's log may hold these beyond the released mark.
    fn visit_sent(&self, server: u16, visit: &mut dyn FnMut(&Attribute)) {
        let _ = (server, visit);
    }

    /// Whether requests to this server wait to be sent again, or are in flight again. Until they
    /// have ended, its blocks may hold older content than they did before (P9).
    fn replaying(&self, server: u16) -> bool {
        let _ = server;
        false
    }

    /// How many requests were queued to be sent again since the stream began. For reports.
    fn replayed(&self) -> u64 {
        0
    }

    /// The marks. They count as delivered with this call (T1).
    fn poll(&mut self) -> Marks;

    /// Asks that all groups up to `seq` become durable without waiting for a later group.
    fn ask_durable(&mut self, seq: Seq);

    /// Returns the seq up to which the payload of groups is no longer needed (T14).
    fn kept_after(&self) -> Seq {
        self.base().window.forgotten()
    }

    /// The seq up to which the stream is complete, durable and delivered. Attributes up to it may
    /// be dropped (T1).
    fn released(&self) -> Seq {
        self.base().window.released()
    }

    /// The last group admitted.
    fn last(&self) -> Seq {
        self.base().window.last()
    }

    /// The failure that poisoned the stream, if one did.
    fn failure(&self) -> Option<Failure> {
        self.base().failure
    }

    /// Fails the whole stream, for a reason outside a single request (P6).
    fn poison(&mut self, failure: Failure) {
        self.base_mut().poison(failure);
    }

    /// Notes that another stream's FLUSH of `member` failed (T22). This poisons the stream if it
    /// has unflushed writes there.
    fn flush_failed_elsewhere(&mut self, member: Member) {
        if let Some(failure) = self.base().affected_by_flush(member) {
            self.poison(failure);
        }
    }

    /// Whether an incomplete write touches these volume blocks (P9).
    fn writes_pending(&self, lba: u64, blocks: u32) -> bool {
        self.base().writes_pending(lba, blocks)
    }

    /// Whether nothing is in flight: every request is complete, and no replay is queued or in
    /// flight.
    fn is_idle(&self) -> bool {
        // A group that waits, or is flushed, has a request that has not ended.
        self.base().incomplete() == 0
    }
}

/// The bounds and options of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Payload bytes that may be held for replay, or in flight (T14).
    pub kept_bytes_max: u64,
    /// Whether adjacent requests are merged (T16).
    pub merge: bool,
    /// Blocks that writes are merged up to: as many as go with their command. A larger merged
    /// request would wait until the target asks for its data, and everything that was merged would
    /// wait with it (T16 bounds it, too). Discards have no data.
    pub merged_blocks_max: u32,
    /// The mark from which the stream continues. Its first group is the next seq.
    pub start: Seq,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            kept_bytes_max: 64 << 20,
            merge: true,
            merged_blocks_max: u32::MAX,
            start: Seq::ZERO,
        }
    }
}

// An engine may move to another thread if its payloads may. The trait does not demand this, because
// the library's payloads move only together with the object that owns them all. That owner relies
// on this check.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<none::NoOrder<()>>();
    is_send::<sync::Sync<()>>();
    is_send::<rio::Rio<()>>();
};

/// Makes an engine of this kind.
#[must_use]
pub fn engine<P: Payload + 'static>(
    kind: EngineKind,
    topology: Topology,
    limits: Limits,
) -> Box<dyn Engine<P>> {
    match kind {
        EngineKind::None => Box::new(none::NoOrder::new(topology, limits)),
        EngineKind::Sync => Box::new(sync::Sync::new(topology, limits)),
        EngineKind::Rio => Box::new(rio::Rio::new(topology, limits)),
    }
}

#[cfg(test)]
mod tests;
