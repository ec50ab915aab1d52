//! Two drives as one: the blocks of a small *head*, and after them those of a *body*.
//!
//! A label takes the first blocks of a drive. With a head of its own for these blocks, a file can be
//! served as it is, as the body.
//!
//! The head is used only now and then, so operations on it finish within the call. All others are
//! those of the body, moved by the size of the head.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, PoisonError};

use riopipe_order::block_device::{BLOCK_BYTES, BlockDevice, IoError, Limits, Operation};

use crate::blocking::Blocking;
use crate::buf::AlignedBuf;
use crate::drive::{Data, Done, Drive, Geometry, Queue, Submitted};
use crate::error::OpenError;
use crate::identity::Carrier;
use crate::survival::Survival;

/// A drive of the blocks of two drives. Its identity is that of the head, and is stored with it.
pub struct JoinedDrive {
    head: Arc<dyn Drive>,
    body: Arc<dyn Drive>,
    geometry: Geometry,
    limits: Limits,
    /// Whether the head has writes that were not flushed. The lock is kept during a flush of the
    /// head, so that no other flush of the drive ends before it.
    is_head_dirty: Arc<Mutex<bool>>,
}

impl JoinedDrive {
    /// A drive of the blocks of `head`, followed by those of `body`.
    #[must_use]
    pub fn new(head: Arc<dyn Drive>, body: Arc<dyn Drive>) -> Self {
        let (first, second) = (head.geometry(), body.geometry());
        let geometry = Geometry {
            block_size: BLOCK_BYTES as u32,
            blocks: first.blocks.saturating_add(second.blocks),
            volatile_cache: first.volatile_cache || second.volatile_cache,
            atomic_block: first.atomic_block && second.atomic_block,
            describe: format!("{}, after the head: {}", second.describe, first.describe),
        };
        let limits = Limits::new(geometry.blocks, &Arc::from(geometry.describe.as_str()));
        Self { head, body, geometry, limits, is_head_dirty: Arc::default() }
    }

    fn join(&self, body: Box<dyn Queue>) -> Result<Box<dyn Queue>, OpenError> {
        Ok(Box::new(JoinedQueue {
            head: Blocking::new(self.head.as_ref())?,
            head_blocks: self.head.geometry().blocks,
            body,
            limits: self.limits.clone(),
            is_head_dirty: Arc::clone(&self.is_head_dirty),
            reads: Vec::new(),
        }))
    }
}

impl Drive for JoinedDrive {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn open_queue(&self, depth: usize) -> Result<Box<dyn Queue>, OpenError> {
        self.join(self.body.open_queue(depth)?)
    }

    fn open_only_queue(&self, depth: usize) -> Result<Box<dyn Queue>, OpenError> {
        self.join(self.body.open_only_queue(depth)?)
    }

    fn survives(&self) -> Survival {
        let (head, body) = (self.head.survives(), self.body.survives());
        Survival {
            process_kill: head.process_kill.min(body.process_kill),
            power_cut: head.power_cut.min(body.power_cut),
            note: if body.note.is_empty() { head.note } else { body.note },
        }
    }

    fn carrier(&self) -> Option<Carrier<'_>> {
        self.head.carrier()
    }
}

struct JoinedQueue {
    head: Blocking,
    head_blocks: u64,
    body: Box<dyn Queue>,
    limits: Limits,
    /// See [`JoinedDrive::is_head_dirty`].
    is_head_dirty: Arc<Mutex<bool>>,
    /// The reads in flight that begin in the head: the operation, and the blocks of the head.
    reads: Vec<(u64, AlignedBuf)>,
}

/// Some blocks of the head or of the body; perhaps none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    lba: u64,
    blocks: u64,
}

/// The parts in the head and in the body of `blocks` blocks from `lba` on, where the head has
/// `head_blocks` blocks. They are on the drive.
fn parts(head_blocks: u64, lba: u64, blocks: u64) -> (Part, Part) {
    let in_head = head_blocks.saturating_sub(lba).min(blocks);
    let in_body = Part { lba: lba.saturating_sub(head_blocks), blocks: blocks - in_head };
    (Part { lba, blocks: in_head }, in_body)
}

impl JoinedQueue {
    /// Changes the head, and records that it must be flushed.
    fn change_head(
        &mut self,
        change: impl FnOnce(&mut Blocking) -> Result<(), IoError>,
    ) -> Result<(), IoError> {
        let result = change(&mut self.head);
        *self.is_head_dirty.lock().unwrap_or_else(PoisonError::into_inner) = true;
        result
    }

    /// Flushes the head, if it has writes that were not flushed.
    fn flush_head(&mut self) -> Result<(), IoError> {
        let mut is_dirty = self.is_head_dirty.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_dirty {
            self.head.flush()?;
            *is_dirty = false;
        }
        Ok(())
    }

    /// Makes blocks read as zeroes, by `zero_head` and `zero_body`.
    fn zero(
        &mut self,
        what: Operation,
        (lba, blocks): (u64, u64),
        zero_head: impl FnOnce(&mut Blocking, Part) -> Result<(), IoError>,
        zero_body: impl FnOnce(&mut dyn Queue, Part) -> Submitted,
    ) -> Submitted {
        if let Err(error) = self.limits.extent(what, lba, blocks) {
            return Submitted::Done(Err(error));
        }
        let (head, body) = parts(self.head_blocks, lba, blocks);
        if head.blocks > 0
            && let Err(error) = self.change_head(|queue| zero_head(queue, head))
        {
            return Submitted::Done(Err(error));
        }
        match body.blocks {
            0 => Submitted::Done(Ok(None)),
            _ => zero_body(self.body.as_mut(), body),
        }
    }
}

/// The blocks of the head, followed by those of the body.
fn joined(head: &[u8], body: &[u8]) -> AlignedBuf {
    let mut whole = AlignedBuf::zeroed(head.len() + body.len());
    let (first, second) = whole.split_at_mut(head.len());
    first.copy_from_slice(head);
    second.copy_from_slice(body);
    whole
}

impl BlockDevice for JoinedQueue {
    type Buf = AlignedBuf;

    fn write(&mut self, op: u64, lba: u64, data: Data<'_>) -> Submitted {
        let len = data.bytes().len();
        if let Err(error) = self.limits.data(Operation::Write, lba, len) {
            return Submitted::Done(Err(error));
        }
        let (head, body) = parts(self.head_blocks, lba, (len / BLOCK_BYTES) as u64);
        if head.blocks == 0 {
            return self.body.write(op, body.lba, data);
        }
        let (first, second) = data.bytes().split_at(head.blocks as usize * BLOCK_BYTES);
        if let Err(error) = self.change_head(|queue| queue.write(head.lba, first)) {
            return Submitted::Done(Err(error));
        }
        match body.blocks {
            0 => Submitted::Done(Ok(None)),
            _ => self.body.write(op, body.lba, Data::Borrowed(second)),
        }
    }

    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        if let Err(error) = self.limits.blocks(Operation::Read, lba, blocks) {
            return Submitted::Done(Err(error));
        }
        let (head, body) = parts(self.head_blocks, lba, blocks);
        if head.blocks == 0 {
            return self.body.read(op, body.lba, blocks);
        }
        let first = match self.head.read(head.lba, head.blocks) {
            Ok(first) if body.blocks > 0 => first,
            result => return Submitted::Done(result.map(Some)),
        };
        match self.body.read(op, body.lba, body.blocks) {
            Submitted::Done(Ok(Some(second))) => Submitted::Done(Ok(Some(joined(&first, &second)))),
            Submitted::Pending => {
                self.reads.push((op, first));
                Submitted::Pending
            }
            done => done,
        }
    }

    fn flush(&mut self, op: u64) -> Submitted {
        match self.flush_head() {
            Ok(()) => self.body.flush(op),
            Err(error) => Submitted::Done(Err(error)),
        }
    }

    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.zero(
            Operation::WriteZeroes,
            (lba, blocks),
            |head, part| head.write_zeroes(part.lba, part.blocks),
            |body, part| body.write_zeroes(op, part.lba, part.blocks),
        )
    }

    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        self.zero(
            Operation::Deallocate,
            (lba, blocks),
            |head, part| head.deallocate(part.lba, part.blocks),
            |body, part| body.deallocate(op, part.lba, part.blocks),
        )
    }

    fn kick(&mut self, now: u64) {
        self.body.kick(now);
    }

    fn poll(&mut self, now: u64, done: &mut Vec<Done>) {
        let before = done.len();
        self.body.poll(now, done);
        if self.reads.is_empty() {
            return;
        }
        for done in &mut done[before..] {
            let place = self.reads.iter().position(|(op, _)| *op == done.op);
            let Some(place) = place else { continue };
            let (_, first) = self.reads.swap_remove(place);
            if let Ok(Some(second)) = &done.result {
                done.result = Ok(Some(joined(&first, second)));
            }
        }
    }

    fn next_deadline(&self) -> Option<u64> {
        self.body.next_deadline()
    }

    fn in_flight(&self) -> usize {
        self.body.in_flight()
    }
}

impl Queue for JoinedQueue {
    fn event_fd(&self) -> Option<RawFd> {
        self.body.event_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open_drive;

    /// Blocks that are filled with these bytes.
    fn blocks(bytes: &[u8]) -> Vec<u8> {
        bytes.iter().flat_map(|byte| [*byte; BLOCK_BYTES]).collect()
    }

    /// One byte of each block.
    fn bytes(blocks: &[u8]) -> Vec<u8> {
        blocks.chunks(BLOCK_BYTES).map(|block| block[77]).collect()
    }

    #[test]
    fn an_operation_is_cut_at_the_end_of_the_head() {
        let part = |lba, blocks| Part { lba, blocks };
        assert_eq!(parts(3, 1, 2), (part(1, 2), part(0, 0)));
        assert_eq!(parts(3, 2, 5), (part(2, 1), part(0, 4)));
        assert_eq!(parts(3, 3, 5), (part(3, 0), part(0, 5)));
        assert_eq!(parts(3, 9, 5), (part(9, 0), part(6, 5)));
    }

    #[test]
    fn the_blocks_of_the_body_follow_those_of_the_head() {
        let dir = tempfile::tempdir().unwrap();
        let open = |name: &str, kib: u64| {
            open_drive(&format!("file:{}/{name},size={kib}K", dir.path().display())).unwrap()
        };
        let (head, body) = (open("head", 16), open("body", 32));
        let drive = JoinedDrive::new(Arc::clone(&head), Arc::clone(&body));
        assert_eq!(drive.geometry().blocks, 12);
        let mut queue = Blocking::new(&drive).unwrap();
        queue.write(1, &blocks(&[11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21])).unwrap();
        queue.write(5, &blocks(&[35])).unwrap();
        queue.write(0, &blocks(&[30])).unwrap();
        queue.write_zeroes(2, 3).unwrap();
        queue.deallocate(8, 2).unwrap();
        queue.flush().unwrap();

        let expected = [30, 11, 0, 0, 0, 35, 16, 17, 0, 0, 20, 21];
        for (first, count) in [(0, 12), (0, 4), (3, 6), (4, 2), (2, 3), (11, 1)] {
            let read = queue.read(first, count).unwrap();
            assert_eq!(bytes(&read), expected[first as usize..][..count as usize]);
        }
        assert!(queue.read(11, 2).is_err() && queue.write(12, &blocks(&[1])).is_err());
        assert!(queue.write_zeroes(u64::MAX, 1).is_err() && queue.deallocate(10, 3).is_err());
        drop(queue);
        let read = |drive: &dyn Drive, count| Blocking::new(drive).unwrap().read(0, count).unwrap();
        assert_eq!(bytes(&read(head.as_ref(), 4)), expected[..4]);
        assert_eq!(bytes(&read(body.as_ref(), 8)), expected[4..]);
    }
}
