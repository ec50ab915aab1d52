//! `ssd:` drives: the modelled SSD behind a lock, on the monotonic clock.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use riopipe_model::ssd::Pages;
use riopipe_order::block_device::{BLOCK_BYTES, BlockDevice, Cause, Limits, Operation};
use riopipe_platform::now_ns;

use crate::buf::AlignedBuf;
use crate::drive::{Data, Done, Drive, Geometry, Queue, Submitted};
use crate::error::OpenError;
use crate::ssd::pages::{Bytes, Frame};
use crate::ssd::{Command, Model, PageList, PowerCut, Profile, QueueId};
use crate::survival::{Kept, Survival};

/// Number of frames that a queue takes from the drive at once, so that it rarely takes the lock.
const RESERVE: usize = 64;

/// A modelled drive.
pub(crate) struct Ssd {
    model: Arc<Mutex<Model>>,
    bytes: Arc<Bytes>,
    geometry: Geometry,
    survival: Survival,
    name: Arc<str>,
    /// The locked file with the blocks, if there is one.
    _file: Option<std::fs::File>,
}

impl Ssd {
    /// Wraps a model. `place` describes where its blocks are ("in memory", "in /srv/a"); in a file they
    /// outlive the process.
    pub(crate) fn new(
        profile: &'static Profile,
        model: Model,
        place: &str,
        file: Option<std::fs::File>,
    ) -> Ssd {
        let cache = match profile.plp {
            true => "power-loss protection",
            false => "volatile cache",
        };
        let blocks = model.blocks();
        let mib = (blocks * BLOCK_BYTES as u64) >> 20;
        let describe =
            format!("modelled drive like a {}, {mib} MiB {place}, {cache}", profile.like);
        Ssd {
            bytes: Arc::clone(model.pages().bytes()),
            model: Arc::new(Mutex::new(model)),
            geometry: Geometry {
                block_size: BLOCK_BYTES as u32,
                blocks,
                volatile_cache: !profile.plp,
                atomic_block: true,
                describe,
            },
            survival: Survival {
                process_kill: match file {
                    Some(_) => Kept::Completed,
                    None => Kept::Nothing,
                },
                power_cut: Kept::Nothing,
                note: match profile.plp {
                    true => "modelled: a modelled power cut keeps what had completed",
                    false => "modelled: a modelled power cut keeps what was flushed",
                },
            },
            name: Arc::from(format!("ssd:{}", profile.name)),
            _file: file,
        }
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
            bytes: Arc::clone(&self.bytes),
            limits: Limits::new(self.geometry.blocks, &self.name),
            depth: depth.max(1),
            reserve: Vec::new(),
            staged: Vec::new(),
            in_flight: 0,
            next_due: u64::MAX,
        }))
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

struct SsdQueue {
    model: Arc<Mutex<Model>>,
    id: QueueId,
    bytes: Arc<Bytes>,
    limits: Limits,
    depth: usize,
    /// Frames of this queue's own, for incoming data.
    reserve: Vec<Frame>,
    /// Operations that wait for `kick`.
    staged: Vec<(u64, Command<Frame>)>,
    /// Operations in flight, including the staged ones.
    in_flight: usize,
    /// No operation of this queue is due earlier; `u64::MAX` if none is in flight.
    next_due: u64,
}

impl SsdQueue {
    fn stage(&mut self, op: u64, command: Command<Frame>) -> Submitted {
        self.staged.push((op, command));
        self.in_flight += 1;
        Submitted::Pending
    }

    #[inline]
    fn has_space(&self) -> Result<(), Cause> {
        match self.in_flight < self.depth {
            true => Ok(()),
            false => Err(Cause::QueueFull { depth: self.depth }),
        }
    }

    /// Checks an operation without data and the space for it, and stages it.
    fn stage_extent(&mut self, what: Operation, op: u64, lba: u64, blocks: u64) -> Submitted {
        if let Err(error) = self.limits.extent(what, lba, blocks) {
            return Submitted::Done(Err(error));
        }
        if let Err(cause) = self.has_space() {
            return Submitted::Done(Err(self.limits.error(what, lba, blocks, cause)));
        }
        self.stage(op, Command::Zeroes { what, lba, blocks })
    }

    /// Fills the reserve up to at least `count` frames.
    #[cold]
    fn refill(&mut self, count: usize) -> Result<(), Cause> {
        let mut model = lock(&self.model);
        while self.reserve.len() < count.max(RESERVE) {
            match model.pages_mut().allocate() {
                Some(frame) => self.reserve.push(frame),
                None if self.reserve.len() >= count => break,
                None => return Err(Cause::QueueFull { depth: self.depth }),
            }
        }
        Ok(())
    }
}

impl BlockDevice for SsdQueue {
    type Buf = AlignedBuf;

    fn write(&mut self, op: u64, lba: u64, data: Data<'_>) -> Submitted {
        let bytes = data.bytes();
        let blocks = bytes.len() / BLOCK_BYTES;
        if let Err(error) = self.limits.data(Operation::Write, lba, bytes.len()) {
            return Submitted::Done(Err(error));
        }
        let mut space = self.has_space();
        if space.is_ok() && self.reserve.len() < blocks {
            space = self.refill(blocks);
        }
        if let Err(cause) = space {
            let error = self.limits.error(Operation::Write, lba, blocks as u64, cause);
            return Submitted::Done(Err(error));
        }
        // Without the lock: this queue owns the frames until it passes them to the model.
        let frames = self.reserve.split_off(self.reserve.len() - blocks);
        for (frame, block) in frames.iter().zip(bytes.chunks_exact(BLOCK_BYTES)) {
            self.bytes.fill(*frame, block);
        }
        let pages = match frames[..] {
            [frame] => PageList::One(frame),
            _ => PageList::Many(frames.into()),
        };
        self.stage(op, Command::Write { lba, pages })
    }

    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        if let Err(error) = self.limits.blocks(Operation::Read, lba, blocks) {
            return Submitted::Done(Err(error));
        }
        if let Err(cause) = self.has_space() {
            let error = self.limits.error(Operation::Read, lba, blocks, cause);
            return Submitted::Done(Err(error));
        }
        self.stage(op, Command::Read { lba, blocks })
    }

    fn flush(&mut self, op: u64) -> Submitted {
        if let Err(cause) = self.has_space() {
            return Submitted::Done(Err(self.limits.error(Operation::Flush, 0, 0, cause)));
        }
        self.stage(op, Command::Flush)
    }

    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.stage_extent(Operation::WriteZeroes, op, lba, blocks)
    }

    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.stage_extent(Operation::Deallocate, op, lba, blocks)
    }

    fn kick(&mut self, now: u64) {
        if self.staged.is_empty() {
            return;
        }
        let mut model = lock(&self.model);
        for (op, command) in self.staged.drain(..) {
            model.submit(now, self.id, op, command);
        }
        // Refused operations (power off) are already among the completions.
        self.next_due = model.next_due().unwrap_or(now);
    }

    fn poll(&mut self, now: u64, done: &mut Vec<Done>) {
        if now < self.next_due {
            return;
        }
        let mut model = lock(&self.model);
        model.advance(now);
        self.in_flight -= model.take_done(self.id, done);
        self.next_due = match model.next_due() {
            Some(due) if self.in_flight > self.staged.len() => due,
            _ => u64::MAX,
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
    fn drop(&mut self) {
        self.kick(now_ns());
        let mut done = Vec::new();
        while self.in_flight > 0 {
            let now = now_ns();
            self.poll(now, &mut done);
            if self.in_flight > 0 {
                let wait = self.next_due.saturating_sub(now).min(1_000_000);
                std::thread::sleep(Duration::from_nanos(wait));
            }
        }
        let mut model = lock(&self.model);
        self.reserve.drain(..).for_each(|frame| model.pages_mut().release(frame));
        model.close_queue(self.id);
    }
}

/// The model stays consistent even if a thread panicked while it held the lock: no change of it
/// unwinds half-way.
fn lock(model: &Mutex<Model>) -> MutexGuard<'_, Model> {
    model.lock().unwrap_or_else(PoisonError::into_inner)
}
