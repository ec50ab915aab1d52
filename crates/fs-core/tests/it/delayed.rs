//! A storage whose groups complete and become durable some time later, in a thread of its own. Until
//! a group is complete, a read returns its old data or its new data.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use riopipe_fs_core::storage::{
    GroupSeq, Storage, StorageError, StreamMarks, StreamNo, WriteGroup,
};
use riopipe_fs_core::{BLOCK_BYTES, Block, BlockNo};

use crate::enumerate::random::Random;
use crate::memory::{Image, Memory};

/// The data of a block before a write that is in flight.
#[derive(Debug)]
struct Before {
    stream: usize,
    seq: u64,
    data: Box<Block>,
}

#[derive(Debug)]
struct State {
    last: Vec<u64>,
    complete: Vec<u64>,
    in_flight: BTreeMap<u64, Vec<Before>>,
    random: Random,
}

/// The storage. See the [module](self).
#[derive(Debug)]
pub(crate) struct Delayed {
    memory: Memory,
    state: Mutex<State>,
    changed: Condvar,
    is_stopped: AtomicBool,
}

impl Delayed {
    /// A storage, and the thread that advances its marks until [`stop`](Self::stop).
    pub(crate) fn new(
        image: Image,
        blocks: u64,
        streams: u16,
        seed: u64,
    ) -> (Arc<Self>, JoinHandle<()>) {
        let zeroes = vec![0; usize::from(streams)];
        let state = State {
            last: zeroes.clone(),
            complete: zeroes,
            in_flight: BTreeMap::new(),
            random: Random(seed),
        };
        let delayed = Arc::new(Self {
            memory: Memory::new(image, blocks, streams),
            state: Mutex::new(state),
            changed: Condvar::new(),
            is_stopped: AtomicBool::new(false),
        });
        let advancing = Arc::clone(&delayed);
        let thread = std::thread::spawn(move || {
            while !advancing.is_stopped.load(Ordering::Relaxed) {
                advancing.advance();
            }
        });
        (delayed, thread)
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }

    /// The content that reads return.
    pub(crate) fn image(&self) -> Image {
        self.memory.image()
    }

    fn advance(&self) {
        let pause = {
            let mut state = self.state.lock().unwrap();
            let State { last, complete, in_flight, random } = &mut *state;
            for stream in 0..last.len() {
                complete[stream] += random.below(last[stream] - complete[stream] + 1);
            }
            in_flight.retain(|_, writes| {
                writes.retain(|before| before.seq > complete[before.stream]);
                !writes.is_empty()
            });
            for (number, &complete) in complete.iter().enumerate() {
                let stream = StreamNo(number as u16);
                let durable = self.memory.marks(stream).durable.0;
                let next = durable + random.below(complete - durable + 1);
                self.memory.wait_durable(stream, GroupSeq(next)).unwrap();
            }
            random.below(300)
        };
        self.changed.notify_all();
        std::thread::sleep(std::time::Duration::from_micros(pause));
    }

    fn wait(&self, is_done: impl Fn(&State) -> bool) {
        let mut state = self.state.lock().unwrap();
        while !is_done(&state) {
            state = self.changed.wait(state).unwrap();
        }
    }
}

impl Storage for Delayed {
    fn blocks(&self) -> u64 {
        self.memory.blocks()
    }

    fn streams(&self) -> u16 {
        self.memory.streams()
    }

    fn read(&self, first: BlockNo, into: &mut [u8]) -> Result<(), StorageError> {
        let mut state = self.state.lock().unwrap();
        self.memory.read(first, into)?;
        let State { in_flight, random, .. } = &mut *state;
        for (index, block) in into.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().enumerate() {
            if let Some(writes) = in_flight.get(&(first.0 + index as u64)) {
                let choice = random.below(writes.len() as u64 + 1) as usize;
                if let Some(before) = writes.get(choice) {
                    *block = *before.data;
                }
            }
        }
        Ok(())
    }

    fn submit(&self, stream: StreamNo, group: WriteGroup) -> Result<GroupSeq, StorageError> {
        let mut state = self.state.lock().unwrap();
        let mut old = Vec::new();
        for write in &group.writes {
            let mut data = Box::new([0; BLOCK_BYTES]);
            self.memory.read(write.at, &mut data[..])?;
            old.push((write.at.0, data));
        }
        let seq = self.memory.submit(stream, group)?;
        let number = usize::from(stream.0);
        state.last[number] = seq.0;
        for (at, data) in old {
            let before = Before { stream: number, seq: seq.0, data };
            state.in_flight.entry(at).or_default().push(before);
        }
        Ok(seq)
    }

    fn marks(&self, stream: StreamNo) -> StreamMarks {
        let state = self.state.lock().unwrap();
        let complete = GroupSeq(state.complete[usize::from(stream.0)]);
        StreamMarks { complete, ..self.memory.marks(stream) }
    }

    fn wait_complete(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.wait(|state| state.complete[usize::from(stream.0)] >= seq.0);
        Ok(())
    }

    fn wait_durable(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.wait(|_| self.memory.marks(stream).durable >= seq);
        Ok(())
    }
}
