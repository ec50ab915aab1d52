//! A storage whose groups become complete and durable step by step, in a thread of the schedule.
//!
//! It keeps what the engine of the mode promises, and no more ([`Recorder`]). Until a group is complete,
//! a read returns its old data or its new data.

use std::collections::BTreeMap;
use std::sync::Arc;

use riopipe_fs_core::fs::JournalMode;
use riopipe_fs_core::storage::{
    GroupSeq, Storage, StorageError, StreamMarks, StreamNo, WriteGroup,
};
use riopipe_fs_core::{BLOCK_BYTES, Block, BlockNo};
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::{Condvar, Mutex, MutexGuard};

use crate::enumerate::recorder::{Base, Device, Overlay, Recorder};
use crate::enumerate::setup::STREAMS;

/// The stream of the main journal.
pub(crate) const MAIN: StreamNo = StreamNo(0);

/// The data of a block before a write that is in flight.
#[derive(Debug)]
struct Before {
    stream: usize,
    seq: u64,
    data: Box<Block>,
}

#[derive(Debug, Default)]
struct State {
    last: [u64; STREAMS],
    complete: [u64; STREAMS],
    durable: [u64; STREAMS],
    /// The groups that shall become durable.
    wanted: [u64; STREAMS],
    in_flight: BTreeMap<u64, Vec<Before>>,
    /// All is durable at once, without a thread: for the parts of a test that are not its subject.
    is_eager: bool,
    is_stopped: bool,
    /// The steps after which the storage fails.
    budget: Option<u32>,
    /// States after crashes at some moments of the schedule.
    cuts: Vec<Overlay>,
}

/// The moments of a schedule at which a crash may come, at most.
const CUTS_MAX: usize = 24;

/// The storage. See the [module](self).
pub(crate) struct Scheduled {
    base: Arc<Base>,
    recorder: Arc<Recorder>,
    state: Mutex<State>,
    /// Notified when marks have moved.
    moved: Condvar,
    /// Notified when there is something to do.
    work: Condvar,
}

fn failed() -> StorageError {
    StorageError("the storage was made to fail".to_owned())
}

impl State {
    fn has_failed(&self) -> bool {
        self.budget == Some(0)
    }
}

impl Scheduled {
    /// A storage with the blocks of `base`, for a mode. It is eager.
    pub(crate) fn new(base: &Arc<Base>, mode: JournalMode) -> Arc<Self> {
        let device = Device::of_mode(mode, STREAMS);
        let recorder = Recorder::new(base, Overlay::default(), device);
        let state = Mutex::new(State { is_eager: true, ..State::default() });
        let base = Arc::clone(base);
        Arc::new(Self { base, recorder, state, moved: Condvar::new(), work: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Makes the storage eager, or not any more.
    pub(crate) fn set_eager(&self, is_eager: bool) {
        let mut state = self.lock();
        state.is_eager = is_eager;
        for stream in 0..STREAMS {
            if is_eager {
                self.make_durable(&mut state, stream, u64::MAX);
            }
        }
        self.moved.notify_all();
    }

    /// The storage fails after so many steps.
    pub(crate) fn fail_after(&self, steps: u32) {
        self.lock().budget = Some(steps);
    }

    /// Whether it has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.lock().has_failed()
    }

    /// Ends [`advance`](Self::advance).
    pub(crate) fn stop(&self) {
        self.lock().is_stopped = true;
        self.work.notify_all();
    }

    /// States after a crash now.
    pub(crate) fn crash(&self, count: u64) -> Vec<Overlay> {
        self.recorder.record();
        let moment = self.recorder.boundaries().pop().expect("the moment now");
        let mut random = crate::enumerate::random::Random(thread_rng().r#gen());
        let mut states = Vec::new();
        moment.states(&self.base, count, &mut random, &mut |state| states.push(state));
        states
    }

    /// States after crashes at moments that the schedule has chosen.
    pub(crate) fn take_cuts(&self) -> Vec<Overlay> {
        std::mem::take(&mut self.lock().cuts)
    }

    /// A crash may come here.
    fn maybe_cut(&self, state: &mut State) {
        if state.cuts.len() < CUTS_MAX && thread_rng().gen_ratio(1, 4) {
            state.cuts.extend(self.crash(4));
        }
    }

    /// The content that reads return.
    pub(crate) fn current(&self) -> Overlay {
        self.recorder.current()
    }

    /// Completes groups and makes them durable, one step at a time, until the storage is stopped.
    pub(crate) fn advance(&self) {
        let mut state = self.lock();
        while !state.is_stopped {
            if !self.step(&mut state) {
                state = self.work.wait(state).unwrap();
                continue;
            }
            if let Some(budget) = &mut state.budget {
                *budget = budget.saturating_sub(1);
            }
            self.moved.notify_all();
            drop(state);
            state = self.lock();
        }
    }

    /// Does one of the next steps. Returns whether there was one.
    fn step(&self, state: &mut State) -> bool {
        if state.has_failed() {
            return false;
        }
        let mut random = thread_rng();
        let mut steps = Vec::new();
        for stream in 0..STREAMS {
            if state.complete[stream] < state.last[stream] {
                steps.push((stream, false));
            }
            let has_complete = state.durable[stream] < state.complete[stream];
            // What is not wanted may become durable, too.
            let is_wanted = state.durable[stream] < state.wanted[stream] || random.gen_ratio(1, 8);
            if has_complete && is_wanted {
                steps.push((stream, true));
            }
        }
        if steps.is_empty() {
            return false;
        }
        let (stream, is_durable) = steps[random.gen_range(0..steps.len())];
        if is_durable {
            let next = random.gen_range(state.durable[stream] + 1..=state.complete[stream]);
            self.make_durable(state, stream, next);
            self.maybe_cut(state);
        } else {
            state.complete[stream] =
                random.gen_range(state.complete[stream] + 1..=state.last[stream]);
            drop_complete(state);
        }
        true
    }

    fn make_durable(&self, state: &mut State, stream: usize, seq: u64) {
        let seq = seq.min(state.last[stream]);
        state.complete[stream] = state.complete[stream].max(seq);
        state.durable[stream] = state.durable[stream].max(seq);
        drop_complete(state);
        let made = self.recorder.wait_durable(StreamNo(stream as u16), GroupSeq(seq));
        made.expect("the recorder does not fail");
    }

    fn wait(
        &self,
        stream: StreamNo,
        seq: GroupSeq,
        is_reached: impl Fn(&State, usize) -> bool,
    ) -> Result<(), StorageError> {
        let stream = usize::from(stream.0);
        let mut state = self.lock();
        assert!(state.last[stream] >= seq.0, "a wait without an end");
        loop {
            if is_reached(&state, stream) {
                return Ok(());
            }
            if state.has_failed() {
                return Err(failed());
            }
            if state.is_eager {
                self.make_durable(&mut state, stream, seq.0);
                continue;
            }
            self.work.notify_all();
            state = self.moved.wait(state).unwrap();
        }
    }
}

fn drop_complete(state: &mut State) {
    let State { in_flight, complete, .. } = state;
    in_flight.retain(|_, writes| {
        writes.retain(|before| before.seq > complete[before.stream]);
        !writes.is_empty()
    });
}

impl Storage for Scheduled {
    fn blocks(&self) -> u64 {
        self.recorder.blocks()
    }

    fn streams(&self) -> u16 {
        self.recorder.streams()
    }

    fn read(&self, first: BlockNo, into: &mut [u8]) -> Result<(), StorageError> {
        let state = self.lock();
        self.recorder.read(first, into)?;
        for (index, block) in into.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().enumerate() {
            if let Some(writes) = state.in_flight.get(&(first.0 + index as u64))
                && let Some(before) = writes.get(thread_rng().gen_range(0..=writes.len()))
            {
                *block = *before.data;
            }
        }
        Ok(())
    }

    fn submit(&self, stream: StreamNo, group: WriteGroup) -> Result<GroupSeq, StorageError> {
        let mut state = self.lock();
        if state.has_failed() {
            return Err(failed());
        }
        let number = usize::from(stream.0);
        let flush = group.flush;
        let mut old = Vec::new();
        if !state.is_eager {
            for write in &group.writes {
                let mut data = Box::new([0; BLOCK_BYTES]);
                self.recorder.read(write.at, &mut data[..])?;
                old.push((write.at.0, data));
            }
        }
        let seq = self.recorder.submit(stream, group)?;
        state.last[number] = seq.0;
        for (at, data) in old {
            let before = Before { stream: number, seq: seq.0, data };
            state.in_flight.entry(at).or_default().push(before);
        }
        if flush {
            state.wanted[number] = seq.0;
        }
        if state.is_eager {
            state.complete[number] = seq.0;
        } else {
            self.maybe_cut(&mut state);
            self.work.notify_all();
        }
        Ok(seq)
    }

    fn marks(&self, stream: StreamNo) -> StreamMarks {
        let state = self.lock();
        let stream = usize::from(stream.0);
        let durable = GroupSeq(state.durable[stream]);
        StreamMarks { complete: GroupSeq(state.complete[stream]), durable, released: durable }
    }

    fn wait_complete(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.wait(stream, seq, |state, stream| state.complete[stream] >= seq.0)
    }

    fn wait_durable(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        {
            let wanted = &mut self.lock().wanted[usize::from(stream.0)];
            *wanted = seq.0.max(*wanted);
        }
        self.wait(stream, seq, |state, stream| state.durable[stream] >= seq.0)
    }
}
