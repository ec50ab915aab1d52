//! `ssd:` drives: the modelled SSD behind a lock, on the monotonic clock.
//!
//! All queues of a drive share the model. To take the lock seldom, a queue
//!
//! - copies the data of a write into frames of its own, which it has taken from the drive before,
//! - collects operations, and submits them together in [`kick`](BlockDevice::kick),
//! - asks for no completions before the time at which the next one is due.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use riopipe_model::ssd::Pages;
use riopipe_order::block_device::{BLOCK_BYTES, BlockDevice, Cause, Limits, Operation};
use riopipe_order::write_order::{DriveOrder, EpochId, WriteOrder};
use riopipe_platform::now_ns;

use crate::buf::AlignedBuf;
use crate::drive::{Data, Done, Drive, Geometry, Queue, Submitted};
use crate::error::OpenError;
use crate::identity::Carrier;
use crate::ssd::pages::{Frame, FrameMemory};
use crate::ssd::{Command, Model, Order, PageList, PowerCut, Profile, QueueId};
use crate::survival::{Kept, Survival};
use crate::watched::{CHECK_INTERVAL_NS, Watched};

/// Number of frames that a queue takes from the drive at once, so that it seldom takes the lock.
const RESERVED_FRAMES: usize = 64;
/// Time in ns after which a queue asks again for the completions of operations that wait for those
/// of other queues, so that it is not known when they are due.
const WAITING_POLL_NS: u64 = 50_000;
/// Longest sleep in ns of a dropped queue that waits for its operations.
const DROP_SLEEP_MAX_NS: u64 = 1_000_000;

/// A modelled drive.
pub(crate) struct Ssd {
    model: Arc<Mutex<Model>>,
    /// The memory of the model's frames.
    frame_memory: Arc<FrameMemory>,
    geometry: Geometry,
    order: DriveOrder,
    survival: Survival,
    name: Arc<str>,
    /// The file with the blocks, if there is one.
    file: Option<Arc<Watched>>,
}

impl Ssd {
    /// A drive with this model. `place` describes where its blocks are ("in memory", "in /srv/a").
    /// The blocks outlive the process if they are in a file.
    pub(crate) fn new(
        profile: &'static Profile,
        order: Order,
        model: Model,
        place: &str,
        file: Option<Arc<Watched>>,
    ) -> Ssd {
        let cache = match profile.plp {
            true => "power-loss protection",
            false => "volatile cache",
        };
        let blocks = model.blocks();
        let mib = (blocks * BLOCK_BYTES as u64) >> 20;
        let order = order.kind;
        let kept = match order {
            DriveOrder::None => "",
            DriveOrder::Barrier => ", cache barrier",
            DriveOrder::Epochs => ", order-preserving FTL",
        };
        let describe =
            format!("modelled drive like a {}, {mib} MiB {place}, {cache}{kept}", profile.like);
        Ssd {
            frame_memory: Arc::clone(model.pages().frame_memory()),
            model: Arc::new(Mutex::new(model)),
            geometry: Geometry {
                block_size: BLOCK_BYTES as u32,
                blocks,
                volatile_cache: !profile.plp,
                atomic_block: true,
                describe,
            },
            order,
            survival: survival(profile, order, file.is_some()),
            name: Arc::from(format!("ssd:{}", profile.name)),
            file,
        }
    }
}

/// The survival of a modelled drive, in a file or in memory.
pub(crate) const fn survival(profile: &Profile, order: DriveOrder, is_in_file: bool) -> Survival {
    Survival {
        process_kill: match is_in_file {
            true => Kept::Completed,
            false => Kept::Nothing,
        },
        power_cut: Kept::Nothing,
        note: match (profile.plp, order) {
            (true, _) => "modelled: a modelled power cut keeps what had completed",
            (false, DriveOrder::None) => "modelled: a modelled power cut keeps what was flushed",
            (false, DriveOrder::Barrier) => {
                "modelled: a modelled power cut keeps what was flushed, and of ordered writes a \
                 prefix of epochs"
            }
            (false, DriveOrder::Epochs) => {
                "modelled: a modelled power cut keeps what was flushed, and of each stream a \
                 prefix of epochs"
            }
        },
    }
}

impl Drive for Ssd {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn open_queue(&self, depth: usize) -> Result<Box<dyn Queue>, OpenError> {
        Ok(Box::new(SsdQueue {
            id: lock(&self.model).open_queue(),
            model: Arc::clone(&self.model),
            frame_memory: Arc::clone(&self.frame_memory),
            limits: Limits::new(self.geometry.blocks, &self.name),
            depth: depth.max(1),
            reserved: Vec::new(),
            staged: Vec::new(),
            in_flight: 0,
            next_due: u64::MAX,
            file: self.file.clone(),
            last_check: 0,
        }))
    }

    fn carrier(&self) -> Option<Carrier<'_>> {
        self.file.as_deref().map(|watched| Carrier::new(&watched.file))
    }

    fn order(&self) -> DriveOrder {
        self.order
    }

    fn survives(&self) -> Survival {
        self.survival
    }

    fn power_cut(&self, seed: u64) -> Option<PowerCut> {
        let mut model = lock(&self.model);
        Some(model.power_cut(now_ns(), seed))
    }

    fn power_on(&self) {
        lock(&self.model).power_on();
    }
}

/// A queue of a modelled drive.
struct SsdQueue {
    model: Arc<Mutex<Model>>,
    id: QueueId,
    frame_memory: Arc<FrameMemory>,
    limits: Limits,
    /// Largest number of operations in flight.
    depth: usize,
    /// Frames that this queue owns, for the data of later writes.
    reserved: Vec<Frame>,
    /// The operations that wait for `kick`, in their order.
    staged: Vec<StagedOperation>,
    /// Number of operations in flight, including the staged ones.
    in_flight: usize,
    /// A time in ns before which no operation of this queue is due; `u64::MAX` if none is in
    /// flight.
    next_due: u64,
    /// The file with the blocks, if there is one.
    file: Option<Arc<Watched>>,
    /// Time of the last check of the file in ns.
    last_check: u64,
}

/// An operation that the model does not have yet.
struct StagedOperation {
    op: u64,
    command: Command<Frame>,
}

impl SsdQueue {
    fn stage(&mut self, op: u64, command: Command<Frame>) -> Submitted {
        self.staged.push(StagedOperation { op, command });
        self.in_flight += 1;
        Submitted::Pending
    }

    /// Checks that one more operation may be in flight, and that the file was not found gone. The
    /// depth is no limit for operations on streams of epochs: one that is held back must not keep
    /// out the one for which it waits.
    #[inline]
    fn check_admission(&self, has_epochs: bool) -> Result<(), Cause> {
        if self.in_flight >= self.depth && !has_epochs {
            return Err(Cause::QueueFull { depth: self.depth });
        }
        match self.file.as_ref().and_then(|file| file.gone()) {
            Some(gone) => Err(Cause::Vanished(gone)),
            None => Ok(()),
        }
    }

    /// Checks and stages an operation that makes blocks read as zeroes.
    fn stage_zeroing(&mut self, what: Operation, op: u64, lba: u64, blocks: u64) -> Submitted {
        if let Err(error) = self.limits.extent(what, lba, blocks) {
            return Submitted::Done(Err(error));
        }
        if let Err(cause) = self.check_admission(false) {
            return Submitted::Done(Err(self.limits.error(what, lba, blocks, cause)));
        }
        self.stage(op, Command::Zeroes { what, lba, blocks })
    }

    /// Checks and stages a flush.
    fn stage_flush(&mut self, op: u64, command: Command<Frame>) -> Submitted {
        // A flush of a deleted file must not succeed, because nothing in it will be found again.
        if let Some(file) = &self.file {
            let _ = file.check();
        }
        let has_epochs = matches!(command, Command::FlushEpochs { .. });
        if let Err(cause) = self.check_admission(has_epochs) {
            return Submitted::Done(Err(self.limits.error(Operation::Flush, 0, 0, cause)));
        }
        self.stage(op, command)
    }

    /// Time at which the queue must ask the model again, which has operations of the queue in
    /// flight.
    fn next_poll(model: &Model, now: u64) -> u64 {
        let next_due = model.next_due().unwrap_or(u64::MAX);
        match model.has_waiting() {
            true => next_due.min(now + WAITING_POLL_NS),
            false => next_due,
        }
    }

    /// Takes frames from the drive, until this queue has at least `count`.
    #[cold]
    fn reserve_frames(&mut self, count: usize) -> Result<(), Cause> {
        let mut model = lock(&self.model);
        while self.reserved.len() < count.max(RESERVED_FRAMES) {
            match model.pages_mut().allocate() {
                Some(frame) => self.reserved.push(frame),
                None if self.reserved.len() >= count => break,
                None => return Err(Cause::QueueFull { depth: self.depth }),
            }
        }
        Ok(())
    }
}

impl BlockDevice for SsdQueue {
    type Buf = AlignedBuf;

    fn write(&mut self, op: u64, lba: u64, data: Data<'_>) -> Submitted {
        self.write_in_order(op, lba, data, WriteOrder::Orderless)
    }

    fn write_in_order(
        &mut self,
        op: u64,
        lba: u64,
        data: Data<'_>,
        order: WriteOrder,
    ) -> Submitted {
        let bytes = data.bytes();
        let blocks = bytes.len() / BLOCK_BYTES;
        if let Err(error) = self.limits.data(Operation::Write, lba, bytes.len()) {
            return Submitted::Done(Err(error));
        }
        let mut admitted = self.check_admission(matches!(order, WriteOrder::Epochs(_)));
        if admitted.is_ok() && self.reserved.len() < blocks {
            admitted = self.reserve_frames(blocks);
        }
        if let Err(cause) = admitted {
            let error = self.limits.error(Operation::Write, lba, blocks as u64, cause);
            return Submitted::Done(Err(error));
        }
        // The copy needs no lock, because this queue owns the frames until it passes them to the
        // model.
        let frames = self.reserved.split_off(self.reserved.len() - blocks);
        for (frame, block) in frames.iter().zip(bytes.chunks_exact(BLOCK_BYTES)) {
            self.frame_memory.fill(*frame, block);
        }
        let pages = match frames[..] {
            [frame] => PageList::One(frame),
            _ => PageList::Many(frames.into()),
        };
        self.stage(op, Command::Write { lba, pages, order })
    }

    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        if let Err(error) = self.limits.blocks(Operation::Read, lba, blocks) {
            return Submitted::Done(Err(error));
        }
        if let Err(cause) = self.check_admission(false) {
            let error = self.limits.error(Operation::Read, lba, blocks, cause);
            return Submitted::Done(Err(error));
        }
        self.stage(op, Command::Read { lba, blocks })
    }

    fn flush(&mut self, op: u64) -> Submitted {
        self.stage_flush(op, Command::Flush)
    }

    fn flush_epochs(&mut self, op: u64, before: EpochId) -> Submitted {
        self.stage_flush(op, Command::FlushEpochs { before })
    }

    fn start_stream(&mut self, op: u64, first: EpochId) -> Submitted {
        match self.check_admission(true) {
            Ok(()) => self.stage(op, Command::StartStream { first }),
            Err(cause) => {
                Submitted::Done(Err(self.limits.error(Operation::StartStream, 0, 0, cause)))
            }
        }
    }

    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.stage_zeroing(Operation::WriteZeroes, op, lba, blocks)
    }

    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.stage_zeroing(Operation::Deallocate, op, lba, blocks)
    }

    fn kick(&mut self, now: u64) {
        if self.staged.is_empty() {
            return;
        }
        let mut model = lock(&self.model);
        for StagedOperation { op, command } in self.staged.drain(..) {
            model.submit(now, self.id, op, command);
        }
        // If nothing is due and nothing waits, the drive has refused the operations: it has no
        // power, or does not keep their order. Their completions can be taken at once.
        self.next_due = match Self::next_poll(&model, now) {
            u64::MAX => now,
            next_poll => next_poll,
        };
    }

    fn poll(&mut self, now: u64, done: &mut Vec<Done>) {
        if now < self.next_due {
            return;
        }
        if let Some(file) = &self.file
            && now.saturating_sub(self.last_check) >= CHECK_INTERVAL_NS
        {
            self.last_check = now;
            // The check remembers a failure, so that all later operations fail.
            let _ = file.check();
        }
        let mut model = lock(&self.model);
        model.advance(now);
        self.in_flight -= model.take_done(self.id, done);
        let has_submitted_operations = self.in_flight > self.staged.len();
        self.next_due = match has_submitted_operations {
            true => Self::next_poll(&model, now),
            false => u64::MAX,
        };
    }

    fn next_deadline(&self) -> Option<u64> {
        (self.next_due != u64::MAX).then_some(self.next_due)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Queue for SsdQueue {
    fn event_fd(&self) -> Option<RawFd> {
        None
    }
}

impl Drop for SsdQueue {
    /// Waits until the operations in flight have completed, and returns the reserved frames.
    fn drop(&mut self) {
        self.kick(now_ns());
        let mut done = Vec::new();
        while self.in_flight > 0 {
            let now = now_ns();
            // What waits for operations that may never come would keep the queue for ever.
            lock(&self.model).end_waiting_of(now, self.id);
            self.next_due = self.next_due.min(now);
            self.poll(now, &mut done);
            if self.in_flight > 0 {
                let wait_ns = self.next_due.saturating_sub(now).min(DROP_SLEEP_MAX_NS);
                std::thread::sleep(Duration::from_nanos(wait_ns));
            }
        }
        let mut model = lock(&self.model);
        for frame in self.reserved.drain(..) {
            model.pages_mut().release(frame);
        }
        model.close_queue(self.id);
    }
}

/// Locks the model, also after a panic of a thread that held the lock. The model is then still
/// consistent, because nothing that may panic leaves a change half done.
fn lock(model: &Mutex<Model>) -> MutexGuard<'_, Model> {
    model.lock().unwrap_or_else(PoisonError::into_inner)
}
