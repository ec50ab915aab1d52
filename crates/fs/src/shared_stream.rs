//! A stream that many threads use: they submit groups, and wait for marks.
//!
//! A [`Stream`] belongs to one thread at a time. Threads take it in turns, in the order in which
//! they came ([`State::next_turn`]). A thread that waits for a mark keeps the stream while it waits
//! and drives it itself, because a hop to another thread costs more than the rest of an `fsync`.
//! It is then the *driver*. There are three rules:
//!
//! - A thread that comes while the driver waits interrupts that wait. The driver gives the stream to
//!   it, and takes the next turn after it.
//! - Other threads that wait for a mark sleep. The driver waits for the lowest mark of all, and wakes
//!   them as their marks are reached.
//! - A driver whose own mark is reached ends its turn, and wakes the sleepers, so that one of them
//!   becomes the driver.
//!
//! Each turn of a driver does at least one round of work, so that the marks move even if threads
//! submit without a pause.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use riopipe::{
    BLOCK_BYTES, Buf, Marks, Place, Seq, Stream, StreamFailure, StreamId, StreamWaker,
    SubmitErrorKind, Until, WaitError,
};
use riopipe_fs_core::storage::{
    GroupSeq, Numbering, Placement, StorageError, StreamMarks, WriteGroup,
};

/// The largest write in blocks. Adjacent blocks become one write up to this size.
const WRITE_BLOCKS_MAX: usize = 256;

/// A stream for any number of threads. See the module for its rules.
#[derive(Debug)]
pub(crate) struct SharedStream {
    /// Interrupts the driver.
    waker: StreamWaker,
    numbering: Numbering,
    state: Mutex<State>,
    /// Notified when a turn has ended.
    turn_ended: Condvar,
    /// Notified when marks have moved, when the driver has ended, or when the stream has failed.
    moved: Condvar,
}

#[derive(Debug)]
struct State {
    /// `None` while a thread has it, and after the close.
    stream: Option<Box<Stream>>,
    /// The turn that a thread gets next.
    next_turn: u64,
    /// The turn that may use the stream now.
    turn: u64,
    /// Whether a thread drives the stream for all that wait.
    has_driver: bool,
    /// Whether the driver waits on the stream now, so that it must be interrupted.
    driver_waits: bool,
    /// The last group that was submitted.
    last: Seq,
    marks: StreamMarks,
    /// The groups that threads wait for, with the kind of mark.
    waiting: Vec<Wanted>,
    /// How many of these threads sleep. Without one, nothing need be notified: each notification is
    /// a system call.
    sleeping: usize,
    /// The failure of the stream, or its close. It ends all calls.
    ended: Option<StorageError>,
}

/// A mark that a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Complete(GroupSeq),
    Durable(GroupSeq),
}

impl Wanted {
    fn is_reached(self, marks: &StreamMarks) -> bool {
        match self {
            Self::Complete(seq) => marks.complete >= seq,
            Self::Durable(seq) => marks.durable >= seq,
        }
    }

    const fn seq(self) -> GroupSeq {
        match self {
            Self::Complete(seq) | Self::Durable(seq) => seq,
        }
    }
}

impl SharedStream {
    pub(crate) fn new(stream: Stream) -> Self {
        let base = stream.last();
        Self {
            waker: stream.waker(),
            numbering: Numbering { base: base.0 },
            state: Mutex::new(State {
                stream: Some(Box::new(stream)),
                next_turn: 0,
                turn: 0,
                has_driver: false,
                driver_waits: false,
                last: base,
                marks: StreamMarks::default(),
                waiting: Vec::new(),
                sleeping: 0,
                ended: None,
            }),
            turn_ended: Condvar::new(),
            moved: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn, and takes the stream.
    fn take<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
    ) -> (MutexGuard<'a, State>, Result<Box<Stream>, StorageError>) {
        let turn = state.next_turn;
        state.next_turn += 1;
        if state.driver_waits {
            // The driver finds this turn when it has the lock again.
            state.driver_waits = false;
            self.waker.wake();
        }
        while state.turn != turn {
            state = self.turn_ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let taken = match &state.ended {
            Some(ended) => Err(ended.clone()),
            None => state.stream.take().ok_or_else(closed),
        };
        if taken.is_err() {
            self.end_turn(&mut state);
        }
        (state, taken)
    }

    /// Puts the stream back, and ends the turn.
    fn put_back(&self, state: &mut State, stream: Box<Stream>) {
        state.stream = Some(stream);
        self.end_turn(state);
    }

    fn end_turn(&self, state: &mut State) {
        state.turn += 1;
        if state.turn != state.next_turn {
            self.turn_ended.notify_all();
        }
    }

    /// Records marks of the stream, and wakes the threads whose marks are reached.
    fn on_marks(&self, state: &mut State, marks: Marks, released: Seq) {
        let marks = StreamMarks {
            complete: self.group_seq(marks.complete),
            durable: self.group_seq(marks.durable),
            released: self.group_seq(released),
        };
        if marks != state.marks {
            let old = std::mem::replace(&mut state.marks, marks);
            let is_newly_reached =
                |wanted: &Wanted| wanted.is_reached(&marks) && !wanted.is_reached(&old);
            if state.sleeping > 0 && state.waiting.iter().any(is_newly_reached) {
                self.moved.notify_all();
            }
        }
    }

    /// Records the failure of the stream, and wakes all threads.
    #[cold]
    fn on_failure(&self, state: &mut State, failure: &StreamFailure) -> StorageError {
        let error = state.ended.get_or_insert_with(|| StorageError(failure.to_string())).clone();
        self.moved.notify_all();
        error
    }

    /// The number that the file system uses for a group.
    fn group_seq(&self, seq: Seq) -> GroupSeq {
        self.numbering.of_file_system(seq.0)
    }

    fn seq(&self, seq: GroupSeq) -> Seq {
        Seq(self.numbering.of_volume(seq))
    }

    /// Submits a group. Waits for its turn and for space, not for the group.
    pub(crate) fn submit(&self, group: &WriteGroup) -> Result<GroupSeq, StorageError> {
        let (state, taken) = self.take(self.lock());
        drop(state);
        let mut stream = taken?;
        let submitted = submit_on(&mut stream, group);
        let mut state = self.lock();
        let result = match submitted {
            Ok(seq) => {
                state.last = seq;
                Ok(self.group_seq(seq))
            }
            Err(SubmitFailure::Stream(failure)) => Err(self.on_failure(&mut state, &failure)),
            Err(SubmitFailure::Group(text)) => Err(StorageError(text)),
        };
        self.put_back(&mut state, stream);
        result
    }

    /// The marks. If not all groups are released, and no other thread has the stream, the answers
    /// that have arrived are received first.
    pub(crate) fn marks(&self) -> StreamMarks {
        let mut state = self.lock();
        let is_idle = state.turn == state.next_turn && state.ended.is_none();
        if is_idle && state.marks.released < self.group_seq(state.last) {
            let (locked, taken) = self.take(state);
            state = locked;
            if let Ok(mut stream) = taken {
                drop(state);
                let polled = stream.poll();
                let released = stream.released();
                state = self.lock();
                match polled {
                    Ok(marks) => self.on_marks(&mut state, marks, released),
                    Err(failure) => drop(self.on_failure(&mut state, &failure)),
                }
                self.put_back(&mut state, stream);
            }
        }
        state.marks
    }

    /// The marks, as the last call has left them.
    pub(crate) fn seen_marks(&self) -> StreamMarks {
        self.lock().marks
    }

    /// The error of a stream that has failed.
    pub(crate) fn check(&self) -> Result<(), StorageError> {
        self.lock().ended.clone().map_or(Ok(()), Err)
    }

    pub(crate) fn wait_complete(&self, seq: GroupSeq) -> Result<(), StorageError> {
        self.wait(Wanted::Complete(seq))
    }

    pub(crate) fn wait_durable(&self, seq: GroupSeq) -> Result<(), StorageError> {
        self.wait(Wanted::Durable(seq))
    }

    fn wait(&self, wanted: Wanted) -> Result<(), StorageError> {
        let mut state = self.lock();
        if wanted.is_reached(&state.marks) {
            return Ok(());
        }
        if self.seq(wanted.seq()) > state.last {
            let text = format!("group {} was not submitted", wanted.seq().0);
            return Err(StorageError(text));
        }
        state.waiting.push(wanted);
        if state.driver_waits && !state.is_covered(wanted) {
            // The driver waits for a later mark, or for one of the other kind.
            state.driver_waits = false;
            self.waker.wake();
        }
        let result = loop {
            if wanted.is_reached(&state.marks) {
                break Ok(());
            }
            if let Some(ended) = &state.ended {
                break Err(ended.clone());
            }
            if state.has_driver {
                state.sleeping += 1;
                state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.sleeping -= 1;
                continue;
            }
            state.has_driver = true;
            state = self.drive(state, wanted);
            state.has_driver = false;
            // One of the other threads that wait becomes the driver.
            if state.sleeping > 0 {
                self.moved.notify_all();
            }
        };
        if let Some(place) = state.waiting.iter().position(|other| *other == wanted) {
            state.waiting.swap_remove(place);
        }
        result
    }

    /// Drives the stream until `wanted` is reached or the stream has failed.
    fn drive<'a>(&'a self, state: MutexGuard<'a, State>, wanted: Wanted) -> MutexGuard<'a, State> {
        let (mut state, taken) = self.take(state);
        let Ok(mut stream) = taken else { return state };
        loop {
            // Another thread may have received the answers during the wait for the turn.
            if wanted.is_reached(&state.marks) {
                self.put_back(&mut state, stream);
                return state;
            }
            // Other threads have come since the last wait, which must not delay them.
            let others_wait = state.next_turn - state.turn > 1;
            let until = self.until(&state);
            state.driver_waits = !others_wait;
            drop(state);
            let waited = match others_wait {
                true => stream.poll().map_err(WaitError::Failed),
                false => stream.wait(until, None),
            };
            let waited = match waited {
                // The marks may have moved before the interrupt.
                Err(WaitError::Woken) => stream.poll().map_err(WaitError::Failed),
                waited => waited,
            };
            let released = stream.released();
            state = self.lock();
            state.driver_waits = false;
            match waited {
                Ok(marks) => self.on_marks(&mut state, marks, released),
                Err(WaitError::Failed(failure)) => drop(self.on_failure(&mut state, &failure)),
                Err(error) => {
                    // The group was submitted, and there is no deadline, so no other error occurs.
                    state.ended = Some(StorageError(error.to_string()));
                    self.moved.notify_all();
                }
            }
            if wanted.is_reached(&state.marks) || state.ended.is_some() {
                self.put_back(&mut state, stream);
                return state;
            }
            if state.next_turn - state.turn > 1 {
                self.put_back(&mut state, stream);
                let (locked, taken) = self.take(state);
                state = locked;
                let Ok(next) = taken else { return state };
                stream = next;
            }
        }
    }

    /// The mark for which the driver waits: the lowest that any thread waits for.
    fn until(&self, state: &State) -> Until {
        let open = state.waiting.iter().filter(|wanted| !wanted.is_reached(&state.marks));
        let (mut complete, mut durable) = (None::<GroupSeq>, None::<GroupSeq>);
        for wanted in open {
            match *wanted {
                Wanted::Complete(seq) => {
                    complete = Some(complete.map_or(seq, |lowest| lowest.min(seq)));
                }
                Wanted::Durable(seq) => {
                    durable = Some(durable.map_or(seq, |lowest| lowest.min(seq)));
                }
            }
        }
        match (complete, durable) {
            // A durable group is complete.
            (Some(complete), Some(durable)) if durable <= complete => {
                Until::Durable(self.seq(durable))
            }
            (Some(complete), _) => Until::Complete(self.seq(complete)),
            (None, Some(durable)) => Until::Durable(self.seq(durable)),
            (None, None) => Until::Moved,
        }
    }

    /// Makes all groups durable, and closes the stream. Later calls fail.
    pub(crate) fn close(&self) -> Result<(), StorageError> {
        let (mut state, taken) = self.take(self.lock());
        let stream = match taken {
            Ok(stream) => stream,
            Err(error) => {
                // After a failure the stream can only be dropped.
                drop(state.stream.take());
                return Err(error);
            }
        };
        drop(state);
        let result = stream.close().map_err(|failure| StorageError(failure.to_string()));
        let mut state = self.lock();
        state.ended = Some(result.as_ref().err().cloned().unwrap_or_else(closed));
        if let Ok(last) = result {
            let all = self.group_seq(last);
            state.marks = StreamMarks { complete: all, durable: all, released: all };
        }
        self.end_turn(&mut state);
        self.moved.notify_all();
        result.map(drop)
    }
}

impl State {
    /// Whether the mark that the driver waits for comes no later than this one.
    fn is_covered(&self, wanted: Wanted) -> bool {
        let others = &self.waiting[..self.waiting.len().saturating_sub(1)];
        others.iter().any(|other| {
            !other.is_reached(&self.marks)
                && std::mem::discriminant(other) == std::mem::discriminant(&wanted)
                && other.seq() <= wanted.seq()
        })
    }
}

fn closed() -> StorageError {
    StorageError("the volume has been closed".to_owned())
}

/// Why a group was not submitted.
enum SubmitFailure {
    /// The stream has failed.
    Stream(StreamFailure),
    /// The group can't be admitted.
    Group(String),
}

/// Copies the blocks of a group into buffers of the stream, and submits them. Adjacent blocks with
/// one placement become one write.
fn submit_on(stream: &mut Stream, group: &WriteGroup) -> Result<Seq, SubmitFailure> {
    let mut staged: Vec<(u64, Buf, Place)> = Vec::new();
    for run in group.runs(WRITE_BLOCKS_MAX) {
        let mut buf = stream
            .buf(run.blocks.len() * BLOCK_BYTES)
            .map_err(|error| SubmitFailure::Group(error.to_string()))?;
        for (place, block) in buf.chunks_exact_mut(BLOCK_BYTES).zip(&run.blocks) {
            place.copy_from_slice(&block[..]);
        }
        let place = match run.placement {
            Placement::Fresh => Place::Fresh,
            Placement::InPlace => Place::InPlace,
        };
        staged.push((run.first.0, buf, place));
    }
    let mut next = stream.group();
    for (lba, buf, place) in staged {
        next = next.write(lba, buf, place);
    }
    if let Some(follower) = group.follower {
        next = next.follower(StreamId(follower.0));
    }
    let submitted = match group.is_durable() {
        true => next.submit_durable_or_wait(None),
        false => next.submit_or_wait(None),
    };
    submitted.map_err(|error| match error.kind {
        SubmitErrorKind::Poisoned(failure) => SubmitFailure::Stream(failure),
        kind => SubmitFailure::Group(kind.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::thread;
    use std::time::Duration;

    use riopipe::StreamOptions;
    use riopipe_fs_core::block::BlockNo;
    use riopipe_fs_core::storage::BlockWrite;

    use super::*;
    use crate::image::{Image, ImageOptions, Opened};
    use crate::mkfs::{BYTES_MIN, MkfsOptions, make_in_file};

    #[test]
    fn a_wait_ends_although_another_thread_has_received_the_last_answer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.img");
        let options = MkfsOptions { size: Some(BYTES_MIN), ..MkfsOptions::default() };
        make_in_file(&path, &options).unwrap();
        let Opened { image, volume, .. } = Image::open(&path, &ImageOptions::default()).unwrap();
        let stream = volume.stream(1, &StreamOptions::default()).unwrap();
        let shared = Arc::new(SharedStream::new(stream));
        let write = BlockWrite {
            at: BlockNo(24_000),
            data: Arc::new([1; BLOCK_BYTES]),
            placement: Placement::Fresh,
        };
        let group = WriteGroup { writes: vec![write], flush: true, ..WriteGroup::default() };
        let seq = shared.submit(&group).unwrap();

        // This thread has the turn, and receives all answers. The other one waits for its turn.
        let (state, taken) = shared.take(shared.lock());
        let mut stream = taken.unwrap();
        drop(state);
        let (ended, has_ended) = mpsc::channel();
        let waits = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || ended.send(shared.wait_durable(seq)))
        };
        while {
            let state = shared.lock();
            state.next_turn - state.turn < 2
        } {
            thread::yield_now();
        }
        let marks = stream.wait(Until::Durable(shared.seq(seq)), None).unwrap();
        let released = stream.released();
        let mut state = shared.lock();
        shared.on_marks(&mut state, marks, released);
        shared.put_back(&mut state, stream);
        drop(state);

        has_ended.recv_timeout(Duration::from_secs(120)).unwrap().unwrap();
        waits.join().unwrap().unwrap();
        shared.close().unwrap();
        drop(volume);
        image.close().unwrap();
    }
}
