//! The streams of the simulated initiator as the storage of a file system.
//!
//! It makes no decision: [`WriteGroup::runs`] makes the writes of a group, [`Numbering`] the numbers,
//! and the stream drivers do the rest, as in the crate `riopipe-fs`. A wait handles events until it
//! has ended.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use riopipe_fs_core::block::BlockNo;
use riopipe_fs_core::storage::{
    GroupSeq, Numbering, Placement, Storage, StorageError, StreamMarks, StreamNo, WriteGroup,
    streams_used,
};
use riopipe_order::attribute::Seq;
use riopipe_session::initiator::stream_driver::Until;

use super::FsCounts;
use super::watch::{Watch, kind_of};
use crate::block::BLOCK;
use crate::client::Client;
use crate::client::process::{self, NamedWrite, NotSubmitted};
use crate::core::{Core, MS};
use crate::oracle::{Drives, Promise};
use crate::rng::Rng;
use crate::scenario::Place;
use crate::world::World;

thread_local! {
    /// The cluster of the run on this thread. The file system takes storages that any thread may
    /// use, and a cluster is for one thread only. So a storage finds the cluster here.
    static CLUSTER: RefCell<Option<World>> = const { RefCell::new(None) };
}

/// Makes a cluster the one of this thread.
pub(super) fn enter(world: World) {
    CLUSTER.set(Some(world));
}

/// Takes the cluster of this thread, at the end of its run.
///
/// # Panics
/// There is none.
pub(super) fn leave() -> World {
    CLUSTER.take().expect("the run has entered its cluster")
}

/// Calls the cluster of this thread.
///
/// # Panics
/// There is none.
pub(super) fn cluster<R>(call: impl FnOnce(&mut World) -> R) -> R {
    CLUSTER.with_borrow_mut(|world| call(world.as_mut().expect("the run has entered its cluster")))
}

/// The largest write in blocks.
const WRITE_BLOCKS_MAX: usize = 256;
/// A wait must end within this number of events after the faults have stopped (promise P8).
const WAIT_EVENTS: u64 = 60_000;
/// The pause before a read is begun again, ns.
const READ_AGAIN_NS: u64 = MS / 10;

/// The time after which a fenced owner gives a read up, ns.
const FENCED_NS: u64 = 1_000 * MS;

/// A process of an initiator, as the file system sees it.
#[derive(Clone, Copy)]
struct Process {
    client: usize,
    incarnation: u32,
}

/// The streams of one process of an initiator.
pub(super) struct ClusterStorage {
    process: Process,
    blocks: u64,
    numberings: Vec<Numbering>,
    delays: u8,
    rng: Mutex<Rng>,
    watch: Mutex<Watch>,
    has_failed: AtomicBool,
}

impl Process {
    /// Whether the process still runs.
    fn check(self, world: &World) -> Result<(), StorageError> {
        if world.core().oracle.violation().is_some() {
            return Err(StorageError("the run is over".into()));
        }
        match world.is_running(self.client, self.incarnation) {
            true => Ok(()),
            false => Err(StorageError("the process has died".into())),
        }
    }

    /// Handles events until `is_done` gives a result.
    fn wait_for<R>(
        self,
        world: &mut World,
        what: impl Fn() -> String,
        mut is_done: impl FnMut(&mut Client, &Drives<'_>, &mut Core) -> Option<Result<R, String>>,
    ) -> Result<R, StorageError> {
        let mut live_since = None;
        loop {
            self.check(world)?;
            if let Some(result) = world.with_client(self.client, &mut is_done) {
                return result.map_err(StorageError);
            }
            if world.have_faults_stopped() {
                let events = world.core().events;
                if events > *live_since.get_or_insert(events) + WAIT_EVENTS {
                    let what = format!("faults have stopped, but RioFS still waits for {}", what());
                    world.broken(Promise::P8, what);
                }
            }
            if !world.step() {
                return Err(StorageError("the run is over".into()));
            }
        }
    }

    /// Waits in a call of a stream.
    fn wait(self, world: &mut World, id: u16, until: Until) -> Result<(), StorageError> {
        let begun = world.with_client(self.client, |client, drives, core| {
            client.begin_wait(id, (until, None), drives, core)
        });
        begun.map_err(StorageError)?;
        let what = || format!("{until:?} of stream {id}");
        self.wait_for(world, what, |client, drives, core| {
            if client.is_in_call(id) {
                return None;
            }
            let marks = client.marks(id, drives, core);
            let is_reached = marks.is_some_and(|marks| match until {
                Until::Durable(seq) => marks.durable >= seq,
                Until::Complete(seq) => marks.complete >= seq,
                _ => true,
            });
            Some(if is_reached { Ok(()) } else { Err(format!("stream {id} has failed")) })
        })
    }

    /// Waits until groups of a stream, which are durable, are released.
    fn wait_released(self, world: &mut World, id: u16, seq: Seq) -> Result<(), StorageError> {
        let what = || format!("the release of group {} of stream {id}", seq.0);
        self.wait_for(world, what, |client, drives, core| match client.marks(id, drives, core) {
            None => Some(Err(format!("stream {id} has failed"))),
            Some(marks) => (marks.released >= seq).then_some(Ok(())),
        })
    }

    fn submit(self, world: &mut World, id: u16, group: &WriteGroup) -> Result<Seq, StorageError> {
        let core = world.core_mut();
        let writes = group.runs(WRITE_BLOCKS_MAX).into_iter().map(|run| {
            let names = run.blocks.iter().map(|block| {
                let name = core.oracle.next_number();
                core.block_bytes.record(name, &block[..]);
                name
            });
            let place = match run.placement {
                Placement::Fresh => Place::Fresh,
                Placement::InPlace => Place::InPlace,
            };
            (run.first.0, place, names.collect())
        });
        let writes: Vec<NamedWrite> = writes.collect();
        let (durable, follower) = (group.is_durable(), group.follower.map(|stream| stream.0));
        loop {
            let submitted = world.with_client(self.client, |client, drives, core| {
                client.submit(id, &writes, (durable, follower), drives, core)
            });
            match submitted {
                Ok(seq) => return Ok(seq),
                Err(NotSubmitted::Full) => self.wait(world, id, Until::Space)?,
                Err(NotSubmitted::Refused(why)) => return Err(StorageError(why)),
            }
        }
    }

    /// Reads blocks. An owner that was fenced gives up after `patience_ns`.
    fn read(
        self,
        world: &mut World,
        (first, blocks): (u32, u32),
        patience_ns: u64,
    ) -> Result<Vec<u8>, StorageError> {
        let (mut is_begun, mut not_before) = (false, 0);
        let since = world.core().now;
        let what = || format!("a read of {blocks} blocks from {first} on");
        self.wait_for(world, what, |client, drives, core| {
            // An owner that was fenced does not get connections any more.
            let is_stale = client.era() != Some(core.oracle.current());
            if is_stale && core.now >= since + patience_ns {
                return Some(Err("another owner has the volume".into()));
            }
            if !is_begun && core.now >= not_before {
                is_begun = client.begin_read(first, blocks, drives, core);
            }
            match client.take_read(core).filter(|_| is_begun)? {
                Some(bytes) => Some(Ok(bytes)),
                None => {
                    // The library begins it again with new connections.
                    (is_begun, not_before) = (false, core.now + READ_AGAIN_NS);
                    None
                }
            }
        })
    }
}

impl ClusterStorage {
    /// The streams of a process that has opened the volume. Before `delays` of 100 requests other
    /// events happen.
    pub(super) fn new(
        (client, incarnation): (usize, u32),
        delays: u8,
        rng: Rng,
    ) -> Result<Self, StorageError> {
        let process = Process { client, incarnation };
        let opened = cluster(|world| {
            let count = streams_used(world.core().scenario.volume.streams);
            let count = count.ok_or_else(|| "the volume has too few streams".to_owned())?;
            let last = |stream| {
                let last = world.with_client(client, |client, _, _| client.last(stream));
                last.map(|Seq(base)| Numbering { base })
            };
            let numberings: Result<Vec<_>, String> = (0..count).map(last).collect();
            numberings.map(|numberings| (numberings, world.core().map.len() as u64))
        });
        let (numberings, blocks) = opened.map_err(StorageError)?;
        Ok(Self {
            process,
            blocks,
            numberings,
            delays,
            rng: Mutex::new(rng),
            watch: Mutex::new(Watch::new(cluster(|world| world.core().replays.0))),
            has_failed: AtomicBool::new(false),
        })
    }

    fn marks_by(
        &self,
        stream: StreamNo,
        read: impl FnOnce(&mut Client, &Drives<'_>, &mut Core) -> Option<process::StreamMarks>,
    ) -> StreamMarks {
        let Ok(numbering) = self.numbering(stream) else { return StreamMarks::default() };
        let process = self.process;
        let marks = cluster(|world| {
            process.check(world).ok()?;
            world.with_client(process.client, read)
        });
        marks.map_or_else(StreamMarks::default, |marks| StreamMarks {
            complete: numbering.of_file_system(marks.complete.0),
            durable: numbering.of_file_system(marks.durable.0),
            released: numbering.of_file_system(marks.released.0),
        })
    }

    /// The marks without a receive.
    fn known_marks(&self, stream: StreamNo) -> StreamMarks {
        self.marks_by(stream, |client, _, _| client.known_marks(stream.0))
    }

    fn watch(&self) -> MutexGuard<'_, Watch> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The instance has ended: what it has counted.
    pub(super) fn ended(&self) -> FsCounts {
        let replays = cluster(|world| world.core().replays.0);
        self.watch().ended(self.has_failed(), replays)
    }

    fn numbering(&self, stream: StreamNo) -> Result<Numbering, StorageError> {
        let found = self.numberings.get(usize::from(stream.0)).copied();
        found.ok_or_else(|| StorageError(format!("there is no stream {}", stream.0)))
    }

    /// Makes a request of the process. Other events may happen before.
    fn request<R>(
        &self,
        request: impl FnOnce(Process, &mut World) -> Result<R, StorageError>,
    ) -> Result<R, StorageError> {
        let process = self.process;
        let events = {
            let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
            if rng.percent(self.delays.into()) { rng.below(30) } else { 0 }
        };
        let result = cluster(|world| {
            for _ in 0..events {
                process.check(world)?;
                world.step();
            }
            process.check(world)?;
            request(process, world)
        });
        if let Err(error) = &result
            && !self.has_failed.swap(true, Ordering::Relaxed)
        {
            cluster(|world| world.core_mut().trace(|| format!("the storage has failed: {error}")));
        }
        result
    }

    /// Waits until all blocks of the volume are at home, as the close of the volume does. Returns
    /// whether they are.
    pub(super) fn wait_home(&self) -> bool {
        (0..self.streams()).map(StreamNo).all(|stream| {
            let last = self.known_marks(stream).durable;
            self.wait_released(stream, last).is_ok()
        })
    }

    /// Whether a request has failed. Errors of the file system may come from that.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }
}

impl Storage for ClusterStorage {
    fn blocks(&self) -> u64 {
        self.blocks
    }

    fn streams(&self) -> u16 {
        self.numberings.len() as u16
    }

    fn read(&self, first: BlockNo, into: &mut [u8]) -> Result<(), StorageError> {
        let (first, blocks) = (first.0 as u32, (into.len() / BLOCK) as u32);
        // It waits only once.
        let patience_ns = if self.has_failed() { 0 } else { FENCED_NS };
        let bytes =
            self.request(|process, world| process.read(world, (first, blocks), patience_ns))?;
        into.copy_from_slice(&bytes);
        Ok(())
    }

    fn submit(&self, stream: StreamNo, group: WriteGroup) -> Result<GroupSeq, StorageError> {
        let numbering = self.numbering(stream)?;
        let (seq, replays) = self.request(|process, world| {
            let seq = process.submit(world, stream.0, &group)?;
            let core = world.core_mut();
            core.note_group(kind_of(group.content));
            Ok((seq, core.replays.0))
        })?;
        let seq = numbering.of_file_system(seq.0);
        self.watch().submitted(stream, &group, seq, replays);
        Ok(seq)
    }

    fn marks(&self, stream: StreamNo) -> StreamMarks {
        self.marks_by(stream, |client, drives, core| client.marks(stream.0, drives, core))
    }

    fn wait_complete(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        let seq = Seq(self.numbering(stream)?.of_volume(seq));
        self.request(|process, world| process.wait(world, stream.0, Until::Complete(seq)))
    }

    fn wait_durable(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        let of_volume = Seq(self.numbering(stream)?.of_volume(seq));
        let marks = self.known_marks(stream);
        self.request(|process, world| process.wait(world, stream.0, Until::Durable(of_volume)))?;
        self.watch().durable(stream, seq, marks.complete >= seq && marks.durable < seq);
        Ok(())
    }

    fn wait_released(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.wait_durable(stream, seq)?;
        let of_volume = Seq(self.numbering(stream)?.of_volume(seq));
        let was_durable = self.known_marks(stream).released < seq;
        self.request(|process, world| process.wait_released(world, stream.0, of_volume))?;
        self.watch().released(was_durable);
        Ok(())
    }
}
