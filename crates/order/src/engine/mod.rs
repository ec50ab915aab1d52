//! The methods to keep order, behind one trait ([`Engine`]).
//!
//! An engine is the initiator's half of an ordered stream. The caller drives it:
//!
//! ```text
//!   groups of writes --> admit
//!                        next_request --> requests to each server
//!        completions --> on_request_done
//!                        poll --> marks: how far the stream is complete, and how far durable
//! ```
//!
//! | engine | order is kept by |
//! |---|---|
//! | [`None`](none::NoOrder) | nothing: the upper bound for the other engines |
//! | [`Sync`](sync::Sync) | waiting for the transfer, then FLUSH, then the next group |
//! | [`Linux`](linux::Linux) | transfer, PREFLUSH, commit block with FUA, as JBD2 on Linux |
//! | [`Horae`](horae::Horae) | metadata in the targets' logs before the data is sent; joint FLUSH |
//! | [`Barrier`](barrier::Barrier) | the drive's cache barrier |
//! | [`Opimq`](opimq::Opimq) | the drive: stream and epoch in the command, a queue for each core |
//! | [`Rio`](rio::Rio) | attributes, the target's log and gate, in-order completion |

pub mod barrier;
mod base;
mod credits;
mod group_place;
pub mod horae;
mod kind;
pub mod linux;
pub mod none;
pub mod opimq;
mod redirect;
mod request_table;
pub mod rio;
mod sent;
pub mod sync;
mod window;

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use crate::attribute::{Attribute, Flags, Kind, Member, Seq};
use crate::following::{FollowWay, SharedFollowing};
use crate::topology::{Extent, PreparePart, Topology};
use crate::write_order::{EpochId, WriteOrder};

pub use kind::{Capabilities, EngineKind};
pub use redirect::Redirection;

/// A handle on payload bytes. The bytes stay where they are, and a clone costs a counted reference.
/// If a write is split, each part gets a handle on its own bytes.
pub trait Payload: Clone + fmt::Debug {
    /// A handle on `blocks` blocks of the payload, from block `first_block` on.
    #[must_use]
    fn part(&self, first_block: u32, blocks: u32) -> Self;

    /// A handle on all `blocks` blocks of the payload. The caller does not use `self` afterwards,
    /// so an implementation may move its reference out.
    #[must_use]
    fn take(&mut self, blocks: u32) -> Self {
        self.part(0, blocks)
    }
}

/// The caller's declaration about the old content of a write's blocks: whether recovery may still
/// need it. The declaration decides whether an undo may zero the blocks (trap T11). There is no
/// default, because only the caller knows the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// No state to which the volume may still recover needs the old content: the blocks were free
    /// at the *released* mark, not merely freed a moment ago. Undo may zero the blocks.
    Fresh,
    /// The write overwrites live data. Undo does not touch the blocks, and recovery lists them
    /// after a crash. Engine `horae` redirects the write if the volume has a prepare area: recovery
    /// then rolls it back.
    InPlace,
    /// For every state to which the volume may still recover, the new content serves as well as the
    /// old. An example is the last block of a log that is written again with more records behind
    /// the old ones, where each record has a number and a checksum.
    ///
    /// After a crash each block holds the content of the prefix or that of a later extension. Undo
    /// does not touch the blocks, and recovery does not list them. If the write that was extended
    /// is [fresh](Self::Fresh) and beyond the prefix, undo zeroes it, and the extension with it.
    Extend,
}

impl Place {
    /// The flag of an entry with this place.
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
    /// Whether the write, or its undo, destroys the old content of the blocks. For such a write no
    /// state to which the volume may still recover may need that content (trap T11).
    #[must_use]
    #[inline]
    pub const fn is_fresh(&self) -> bool {
        matches!(self, Self::Write(Place::Fresh, _) | Self::Discard)
    }
}

/// One write of a group, in volume blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write<P> {
    /// The first block on the volume.
    pub lba: u64,
    /// The number of blocks, at least 1.
    pub blocks: u32,
    /// The effect on the blocks.
    pub op: Op<P>,
}

/// The progress of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Every group up to this one is complete on all targets.
    pub complete: Seq,
    /// Every group up to this one is durable, if the media keep the assumptions about them.
    pub durable: Seq,
}

/// The identity of a request: its place in the request table. A place is used again once its
/// request is complete and, if it could have been replayed, released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub u32);

/// One request to one drive.
#[derive(Clone, Debug)]
pub struct Request<P> {
    /// The group of the request; the first one if the request was merged over several groups.
    pub seq: Seq,
    /// The number of whole groups that the request covers.
    pub span: u16,
    /// The number of entries of the group.
    pub num: u16,
    /// The index of this entry in the group, below `num`.
    pub index: u16,
    /// The drive.
    pub member: Member,
    /// The server that has the drive.
    pub server: u16,
    /// The effect on the drive.
    pub kind: Kind,
    /// The flags of the entry: boundary, flush, place, split.
    pub flags: Flags,
    /// The first block on the drive.
    pub lba: u64,
    /// The number of blocks; 0 for a flush.
    pub blocks: u32,
    /// The caller's tag of the last group of the request.
    pub tag: u64,
    /// The path on which the request travels.
    pub path: Path,
    /// Force Unit Access: when the write completes, its blocks are durable. It covers no other
    /// write.
    pub fua: bool,
    /// The place of a write in the order that its drive keeps. Only the engines that need such a
    /// drive ([`Capabilities::drive_order`]) set it.
    pub order: WriteOrder,
    /// The epoch before which a FLUSH makes all epochs of its stream durable. `None`: an ordinary
    /// FLUSH.
    pub flush_before: Option<EpochId>,
    /// The first block of the request's data in the prepare area, on the drive; 0 if the request is
    /// not redirected.
    prepared_lba: u64,
    /// The payload, in order of the blocks. Each merged write has a piece of its own.
    pub pieces: Vec<P>,
    /// Whether the request is in use and not complete.
    is_incomplete: bool,
    /// Whether the request waits to be sent again, or was sent again and has not ended.
    is_replayed: bool,
}

/// The path on which a request travels to its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// A command to the drive: Write, Write Zeroes or Flush.
    Data,
    /// The ordering metadata of a request, which the server appends to its log. The drive gets
    /// nothing. Engine `horae` sends it before the request itself.
    Control,
    /// A record in the server's log that all groups up to the request's seq are durable, and that
    /// their entries are not needed any more.
    Flushed,
    /// A record in the server's log that all groups up to the request's seq are durable. Their
    /// entries stay.
    Persisted,
    /// A command to the drive that brings redirected updates home: the Write of one, or the Flush
    /// after all of them.
    Home,
    /// A record in the server's log that all redirected updates up to the request's seq are durable
    /// at home, so that the entries up to it are not needed any more.
    Released,
}

impl<P> Request<P> {
    /// The last group that the request covers.
    #[must_use]
    pub fn seq_end(&self) -> Seq {
        Seq(self.seq.0 + u64::from(self.span) - 1)
    }

    /// The first block on the drive to which the data of the request goes.
    #[must_use]
    pub const fn data_lba(&self) -> u64 {
        if self.prepared_lba > 0 { self.prepared_lba } else { self.lba }
    }

    /// Whether the data of the request goes to the prepare area.
    #[must_use]
    pub const fn is_redirected(&self) -> bool {
        self.prepared_lba > 0
    }

    /// The blocks of the request at home.
    const fn extent(&self) -> Extent {
        Extent { member: self.member, lba: self.lba, blocks: self.blocks, offset: 0 }
    }

    /// Whether the request touches a block of this extent.
    fn touches(&self, extent: &Extent) -> bool {
        self.extent().touches(extent)
    }

    /// The ordering attribute with which the request travels.
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
    /// The numbers that go with the attribute, if this is an ordered request.
    pub ordered: Option<OrderedDispatch>,
}

/// The numbers that an ordered request takes with it to its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderedDispatch {
    /// The place of the request among the stream's entries on the server, from 1 in each binding.
    pub ordinal: u32,
    /// The released mark. The server may use the log slots of all groups up to it again.
    pub released: Seq,
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
    /// Another stream's FLUSH of the same drive failed. Unflushed data of this stream on that drive
    /// may be lost, because a drive reports such a loss only once (trap T22).
    SharedFlush,
    /// The target's log of the stream differs from what the initiator sent to the target.
    LogMismatch,
    /// The target came back, and its log or a drive is another one than before (trap T27).
    Changed,
    /// A stream has failed with which this one shares a group that is not durable: the group has
    /// this stream as its follower, or is of this stream and has the other one as its follower.
    OtherStream,
}

/// The first failure of a stream. It poisons the stream: no later group is reported complete
/// (promise P6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The first group that the failure affects.
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
    /// The slots of the ordering log of a server.
    Log {
        /// The server.
        server: u16,
    },
    /// The memory for requests that may have to be replayed.
    Memory,
    /// The stream's part of the prepare area of a drive, to which engine `horae` redirects updates
    /// in place.
    PrepareArea {
        /// The drive.
        member: Member,
    },
    /// The stream follows a group of another one, which is not durable yet
    /// ([`FollowWay::Waits`]).
    Followed,
}

/// Why a group is refused. A refused group changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no space for the group now. There will be when earlier groups are released.
    Full(Bound),
    /// The group can never fit.
    TooLarge(Bound),
    /// The group would have more entries than a group can count.
    TooManyEntries,
    /// The group has no writes and is not to be durable, so it has no meaning.
    Empty,
    /// The follower of the group is not open, is being closed, has failed, or is the stream itself.
    NoFollower,
    /// The stream has failed.
    Poisoned(Failure),
}

/// A stream's engine: one method to keep order.
///
/// The owner calls [`admit`](Self::admit) for each group. Then it takes the requests that may go to
/// each server ([`next_request`](Self::next_request)), reports the end of each
/// ([`on_request_done`](Self::on_request_done)), and reads the marks ([`poll`](Self::poll)). No
/// call waits, reads a clock, or allocates per request in steady state.
pub trait Engine<P: Payload>: base::HasBase<P> {
    /// Admits a group, whole or not at all, and returns its seq. If `durable` is set, the group
    /// becomes durable without a later group. The payloads are [taken](Payload::take) out of
    /// `writes`; a refusal may have taken some of them, too.
    ///
    /// # Errors
    /// [`Refusal`] names the bound that the group exceeds, or the failure of the stream.
    fn admit(&mut self, writes: &mut [Write<P>], tag: u64, durable: bool) -> Result<Seq, Refusal>;

    /// Admits a group that a stream with this [number](Limits::stream_number) follows, and returns
    /// how it does. The follower is one of the streams that [share](Self::share) their state.
    ///
    /// # Errors
    /// As [`admit`](Self::admit).
    fn admit_followed(
        &mut self,
        writes: &mut [Write<P>],
        tag: u64,
        durable: bool,
        follower: u16,
    ) -> Result<(Seq, FollowWay), Refusal> {
        let _ = (follower, durable);
        // The follower waits until the group is durable.
        self.admit(writes, tag, true).map(|seq| (seq, FollowWay::Waits))
    }

    /// Gives the engine the state that all streams of the volume share. It is called once, before
    /// any other call.
    fn share(&mut self, following: &Arc<SharedFollowing>) {
        let _ = following;
    }

    /// Notes whether the owner closes the stream. Then the engine makes durable what the stream
    /// follows, before it is [idle](Self::is_idle).
    fn set_closing(&mut self, is_closing: bool) {
        let _ = is_closing;
    }

    /// Checks whether a group of one write of `blocks` blocks at volume block `lba` fits into all
    /// bounds once nothing else is in flight. With `durable`, the group is durable, and each drive
    /// may need a FLUSH. The place of the write is not known: it may be in place. The caller has
    /// checked that the blocks lie within the volume. Nothing changes.
    ///
    /// # Errors
    /// The refusal that [`admit`](Self::admit) would return for such a group; never
    /// [`Refusal::Full`].
    fn check_write(&self, lba: u64, blocks: u32, durable: bool) -> Result<(), Refusal> {
        let _ = durable;
        self.base().check_write(lba, blocks)
    }

    /// Notes the core on which the caller runs.
    fn set_core(&mut self, core: u32) {
        let _ = core;
    }

    /// Whether a request has its place in the order of a drive, and has not left the engine. Other
    /// streams may wait for it there.
    fn has_numbered_unsent(&self) -> bool {
        false
    }

    /// The number of queues that the stream has to each server
    /// ([`Capabilities::queues_per_server`]).
    fn queues_per_server(&self) -> u16 {
        1
    }

    /// Takes the next request that may go to a server now. The caller must send it. With several
    /// queues to each server, `server` is the number of the queue among all: server × queues per
    /// server + queue.
    fn next_request(&mut self, server: u16) -> Option<Dispatch> {
        let id = self.base_mut().queues[usize::from(server)].pop_front()?;
        Some(Dispatch { id, ordered: None })
    }

    /// A request that [`next_request`](Self::next_request) has returned and that has not ended.
    fn request(&self, id: RequestId) -> &Request<P> {
        self.base().request(id)
    }

    /// Handles the end of a request that [`next_request`](Self::next_request) has returned since
    /// the last [`suspend`](Self::suspend) of its server.
    fn on_request_done(&mut self, id: RequestId, result: Result<(), Cause>);

    /// Notes that the connection to a server is lost. Returns whether the engine can replay the
    /// requests that the server may have lost.
    ///
    /// - If it can, the engine gives out nothing for that server until [`resume`](Self::resume),
    ///   and expects no [`on_request_done`](Self::on_request_done) for the requests in flight
    ///   there. It admits groups as before, within the bounds.
    /// - If it cannot, or if the stream has failed, nothing changes. The caller
    ///   [`poison`](Self::poison)s the stream.
    ///
    /// The call may come at any time, also during a replay.
    fn suspend(&mut self, server: u16) -> bool {
        let _ = server;
        false
    }

    /// Notes that the stream is bound to a suspended server again, by the same owner, and that the
    /// caller has the list of the server's log. `is_durable` returns whether the list shows the
    /// entry with this (first) seq and index *durable*. It is not enough that the entry is there.
    ///
    /// - Ordinals start at 1 again.
    /// - An entry that is durable there counts as complete.
    /// - [`next_request`](Self::next_request) returns all other requests that were given out for
    ///   this server and are not released. They come unchanged, in their first order, and before
    ///   anything new. A later flush entry covers them only because of that order (trap T4, promise
    ///   P7).
    /// - The replayed entries keep their slots in the server's log, so they need no credits.
    ///
    /// On a stream that has failed meanwhile, nothing is sent again.
    fn resume(&mut self, server: u16, is_durable: &mut dyn FnMut(Seq, u16) -> bool) {
        let _ = (server, is_durable);
    }

    /// Calls `visit` for each request that was given out for a server and is not released, in the
    /// order in which it was given out, with ordinal 0. Beyond the released mark the server's log
    /// may hold the entries of these requests and no others.
    fn visit_sent(&self, server: u16, visit: &mut dyn FnMut(&Attribute)) {
        let _ = (server, visit);
    }

    /// Whether requests to this server wait to be sent again, or are in flight again. Until they
    /// have ended, the server's blocks may hold older content than before, so reads must wait
    /// (promise P9).
    fn is_replaying(&self, server: u16) -> bool {
        let _ = server;
        false
    }

    /// The number of requests that were queued to be sent again since the stream began. For
    /// reports.
    fn replayed_count(&self) -> u64 {
        0
    }

    /// The marks. With this call all groups up to them count as delivered to the caller, so they
    /// can be released (trap T1).
    fn poll(&mut self) -> Marks;

    /// Asks the engine to make all groups up to `seq` durable without waiting for a later group.
    fn ask_durable(&mut self, seq: Seq);

    /// Asks the engine to bring all redirected updates up to `seq` home, so that the groups up to it
    /// can be released.
    fn ask_home(&mut self, seq: Seq) {
        let _ = seq;
    }

    /// The group of the oldest redirected update of the stream that is not home; `None`: all are, or
    /// the stream has failed.
    fn oldest_redirected(&self) -> Option<Seq> {
        None
    }

    /// The next change of the blocks that the stream has redirected. The caller makes the changes
    /// visible to all readers of the volume, in order, before it does anything else with the stream.
    fn next_redirection(&mut self) -> Option<Redirection<P>> {
        None
    }

    /// Whether blocks of the prepare area wait for readers: the engine uses them again only after
    /// [`note_oldest_read`](Self::note_oldest_read).
    fn awaits_reads(&self) -> bool {
        false
    }

    /// Notes the oldest group of the stream of which a read of the prepare area is in flight, in any
    /// stream of the volume; `None`: there is no such read.
    fn note_oldest_read(&mut self, oldest: Option<Seq>) {
        let _ = oldest;
    }

    /// The seq up to which the engine has freed the payload of the groups.
    fn payload_freed_up_to(&self) -> Seq {
        self.base().window.freed_up_to()
    }

    /// The released mark: all groups up to it are complete, durable and delivered. The targets may
    /// drop their log entries (trap T1).
    fn released(&self) -> Seq {
        self.base().window.released()
    }

    /// The last group that was admitted.
    fn last_admitted(&self) -> Seq {
        self.base().window.last()
    }

    /// The failure that poisoned the stream, if one did.
    fn failure(&self) -> Option<Failure> {
        self.base().failure
    }

    /// Poisons the stream, for a reason outside a single request.
    fn poison(&mut self, failure: Failure) {
        self.base_mut().poison(failure);
    }

    /// Handles the failure of another stream's FLUSH of `member`. It poisons this stream if the
    /// stream has unflushed writes on that drive, because they may be lost (trap T22).
    fn on_flush_failed_elsewhere(&mut self, member: Member) {
        if let Some(failure) = self.base().failure_by_shared_flush(member) {
            self.poison(failure);
        }
    }

    /// Whether an incomplete write touches these volume blocks. A read of them must wait (promise
    /// P9).
    fn has_pending_write(&self, lba: u64, blocks: u32) -> bool {
        self.base().has_pending_write(lba, blocks)
    }

    /// Whether nothing is in flight: every request is complete, and no replay is queued or in
    /// flight.
    fn is_idle(&self) -> bool {
        // A group that waits to be sent or to be flushed has a request that is not complete.
        self.base().incomplete_count() == 0
    }
}

/// The bounds and options of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most payload bytes in flight or kept for a replay. This bounds the initiator's memory
    /// (trap T14).
    pub kept_bytes_max: u64,
    /// Whether adjacent requests are merged.
    pub merge: bool,
    /// Whole groups are merged only while at least so many requests are in flight, counting those
    /// that wait to be sent. A request that is merged into another one saves work, but there is one
    /// message less in flight: with few of them one side waits for the other. Writes of one group
    /// are merged in any case.
    pub merge_from: u32,
    /// The most blocks of a merged write: as many as travel in the command itself. A larger request
    /// would wait until the target asks for its data, and all writes that were merged into it would
    /// wait, too. Discards have no data, so they have no such bound.
    pub merged_blocks_max: u32,
    /// The mark from which the stream continues. The first group has the next seq.
    pub start: Seq,
    /// The number of the stream in commands, for an engine whose commands name it; never 0. Each
    /// opening of a stream has another number, so that a drive does not take one for the other.
    pub stream_number: u16,
    /// The stream's part of the volume's prepare area.
    pub prepare: PreparePart,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            kept_bytes_max: 64 << 20,
            merge: true,
            merge_from: 0,
            merged_blocks_max: u32::MAX,
            start: Seq::ZERO,
            stream_number: 1,
            prepare: PreparePart::default(),
        }
    }
}

// An engine can move to another thread if its payloads can. The trait `Engine` does not demand
// that, because the library's payloads move only together with the object that owns all of them.
// The code of that object relies on this check.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<none::NoOrder<()>>();
    is_send::<sync::Sync<()>>();
    is_send::<linux::Linux<()>>();
    is_send::<horae::Horae<()>>();
    is_send::<barrier::Barrier<()>>();
    is_send::<opimq::Opimq<()>>();
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
        EngineKind::Linux => Box::new(linux::Linux::new(topology, limits)),
        EngineKind::Horae => Box::new(horae::Horae::new(topology, limits)),
        EngineKind::Barrier => Box::new(barrier::Barrier::new(topology, limits)),
        EngineKind::Opimq => Box::new(opimq::Opimq::new(topology, limits)),
        EngineKind::Rio => Box::new(rio::Rio::new(topology, limits)),
    }
}

#[cfg(test)]
mod tests;
