//! A storage in memory that records what it was promised, and gives all states after a crash.
//!
//! Blocks are shared between states: a state is the few blocks in which it differs from a base
//! image. Each block has a hash, so equal states are found by one number.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use riopipe_fs_core::storage::{
    GroupSeq, Placement, Storage, StorageError, StreamMarks, StreamNo, WriteGroup,
};
use riopipe_fs_core::{BLOCK_BYTES, Block, BlockNo};

use super::random::Random;

pub(crate) const ZERO: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

/// The hash of a block's content.
pub(crate) fn hash_of(block: &Block) -> u64 {
    let mut hash = 0x9e37_79b9_7f4a_7c15_u64;
    for word in block.as_chunks::<8>().0 {
        hash = (hash ^ u64::from_le_bytes(*word)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^= hash >> 29;
    }
    hash
}

/// The content of a block, and its hash.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    pub(crate) data: Arc<Block>,
    pub(crate) hash: u64,
}

impl Content {
    pub(crate) fn new(data: Arc<Block>) -> Self {
        let hash = hash_of(&data);
        Self { data, hash }
    }
}

/// The image from which states differ.
#[derive(Debug)]
pub(crate) struct Base {
    blocks: Vec<Content>,
}

impl Base {
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let zero = Content::new(Arc::new(ZERO));
        let content = |block: &Block| {
            if *block == ZERO { zero.clone() } else { Content::new(Arc::new(*block)) }
        };
        Self { blocks: bytes.as_chunks().0.iter().map(content).collect() }
    }

    /// The base with the blocks of a state.
    pub(crate) fn with(&self, state: &Overlay) -> Self {
        let mut blocks = self.blocks.clone();
        for (&at, content) in &state.blocks {
            blocks[at as usize] = content.clone();
        }
        Self { blocks }
    }

    /// The base with old content in blocks that are not in use.
    pub(crate) fn with_garbage(&self, free: &[u64]) -> Self {
        let garbage = Content::new(Arc::new([0xab; BLOCK_BYTES]));
        let mut blocks = self.blocks.clone();
        for &at in free {
            let block = &mut blocks[at as usize];
            if *block.data == ZERO {
                *block = garbage.clone();
            }
        }
        Self { blocks }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }
}

/// A state: the blocks that differ from the base.
#[derive(Clone, Debug, Default)]
pub(crate) struct Overlay {
    blocks: BTreeMap<u64, Content>,
    hash: u64,
}

impl Overlay {
    pub(crate) fn read<'a>(&'a self, base: &'a Base, at: u64) -> &'a Block {
        &self.blocks.get(&at).unwrap_or(&base.blocks[at as usize]).data
    }

    fn write(&mut self, base: &Base, at: u64, content: &Content) {
        let mix = |hash: u64| {
            let mixed =
                (hash ^ at.wrapping_mul(0xc4ce_b9fe_1a85_ec53)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed ^ mixed >> 32
        };
        let old = if content.hash == base.blocks[at as usize].hash {
            self.blocks.remove(&at)
        } else {
            self.hash = self.hash.wrapping_add(mix(content.hash));
            self.blocks.insert(at, content.clone())
        };
        if let Some(old) = old {
            self.hash = self.hash.wrapping_sub(mix(old.hash));
        }
    }

    /// Equal states have equal hashes.
    pub(crate) const fn hash(&self) -> u64 {
        self.hash
    }

    /// Writes the state into a file.
    pub(crate) fn save(&self, base: &Base, path: &std::path::Path) {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::create(path).unwrap();
        file.set_len(base.blocks() * BLOCK_BYTES as u64).unwrap();
        for at in 0..base.blocks() {
            let block = self.read(base, at);
            if *block != ZERO {
                file.write_all_at(block, at * BLOCK_BYTES as u64).unwrap();
            }
        }
    }
}

/// A submitted group that is not durable.
#[derive(Debug)]
struct Pending {
    seq: u64,
    writes: Vec<(u64, Placement, Content)>,
}

/// A moment at which a crash may come: what is durable, and the groups of each stream that are not.
#[derive(Clone, Debug)]
pub(crate) struct Boundary {
    /// The step of the program.
    pub(crate) step: usize,
    durable: Arc<Overlay>,
    streams: Vec<Vec<Arc<Pending>>>,
}

/// A choice for one stream: the groups that are kept, and a bit for each write beyond them.
type Choice = (usize, u64);

/// The choices for each stream that are not all taken.
const CHOICES_MAX: u64 = 256;

impl Boundary {
    /// Visits the states that the storage may be in after a crash: all if there are `limit` at
    /// most, and otherwise the extreme ones and some that `random` chooses.
    pub(crate) fn states(
        &self,
        base: &Base,
        limit: u64,
        random: &mut Random,
        visit: &mut dyn FnMut(Overlay),
    ) {
        let choices: Vec<Vec<Choice>> =
            self.streams.iter().map(|groups| choices(groups, random)).collect();
        let all = choices.iter().fold(1_u64, |all, stream| all.saturating_mul(stream.len() as u64));
        for number in 0..all.min(limit) {
            let mut rest = number;
            let state = choices.iter().map(|stream| {
                let len = stream.len() as u64;
                let index = if all <= limit {
                    let index = rest % len;
                    rest /= len;
                    index
                } else if number < 3 {
                    // All nothing, all everything, all groups.
                    number.min(len - 1)
                } else {
                    random.below(len)
                };
                stream[index as usize]
            });
            visit(self.state(base, state));
        }
    }

    fn state(&self, base: &Base, choices: impl Iterator<Item = Choice>) -> Overlay {
        let zero = Content::new(Arc::new(ZERO));
        let mut state = (*self.durable).clone();
        for (groups, (kept, mut bits)) in self.streams.iter().zip(choices) {
            for (index, group) in groups.iter().enumerate() {
                for (at, placement, content) in &group.writes {
                    if index < kept {
                        state.write(base, *at, content);
                        continue;
                    }
                    match (bits & 1, placement) {
                        (0, _) => {}
                        // Recovery zeroes fresh blocks beyond the prefix.
                        (_, Placement::Fresh) => state.write(base, *at, &zero),
                        (_, Placement::InPlace) => state.write(base, *at, content),
                    }
                    bits = bits.rotate_right(1);
                }
            }
        }
        state
    }
}

/// The choices of a stream. The first three are: no group, no write; no group, every write; every
/// group.
fn choices(groups: &[Arc<Pending>], random: &mut Random) -> Vec<Choice> {
    if groups.is_empty() {
        return vec![(0, 0)];
    }
    let mut list = vec![(0, 0), (0, !0), (groups.len(), 0)];
    let mut writes = 0;
    for kept in (0..groups.len()).rev() {
        writes += groups[kept].writes.len();
        if writes <= 6 {
            list.extend((0..1_u64 << writes).map(|bits| (kept, bits)));
        } else {
            list.extend([(kept, 0), (kept, !0)]);
            list.extend((0..16).map(|_| (kept, random.below(u64::MAX))));
        }
        if list.len() as u64 >= CHOICES_MAX {
            break;
        }
    }
    list
}

#[derive(Debug, Default)]
struct Stream {
    last: u64,
    durable: u64,
    pending: Vec<Arc<Pending>>,
}

#[derive(Debug)]
struct State {
    /// The content that reads return.
    current: Overlay,
    /// The content of all durable groups.
    durable: Arc<Overlay>,
    streams: Vec<Stream>,
    /// The recorded moments, if they are wanted.
    boundaries: Option<Vec<Boundary>>,
    step: usize,
}

/// How groups that nothing waits for become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Only when they are waited for.
    Lazy,
    /// As soon as they are submitted.
    Eager,
}

/// A function that runs in the middle of a wait for the durability of a group.
pub(crate) type Hook = Box<dyn FnOnce() + Send>;

/// The storage. See the [module](self).
pub(crate) struct Recorder {
    base: Arc<Base>,
    progress: Progress,
    state: Mutex<State>,
    hook: Mutex<Option<(StreamNo, u32, Hook)>>,
}

impl Recorder {
    pub(crate) fn new(
        base: &Arc<Base>,
        state: Overlay,
        streams: usize,
        progress: Progress,
    ) -> Arc<Self> {
        let state = State {
            current: state.clone(),
            durable: Arc::new(state),
            streams: (0..streams).map(|_| Stream::default()).collect(),
            boundaries: None,
            step: 0,
        };
        let base = Arc::clone(base);
        Arc::new(Self { base, progress, state: Mutex::new(state), hook: Mutex::new(None) })
    }

    /// The content that reads return.
    pub(crate) fn current(&self) -> Overlay {
        self.state.lock().unwrap().current.clone()
    }

    /// Begins to record.
    pub(crate) fn record(&self) {
        self.state.lock().unwrap().boundaries = Some(Vec::new());
    }

    /// The next step of the program begins.
    pub(crate) fn set_step(&self, step: usize) {
        let mut state = self.state.lock().unwrap();
        state.step = step;
        state.note(true);
    }

    /// The recorded moments.
    pub(crate) fn boundaries(&self) -> Vec<Boundary> {
        let mut state = self.state.lock().unwrap();
        state.note(true);
        state.boundaries.take().unwrap_or_default()
    }

    /// Runs `hook` once, in the middle of wait `number` for the durability of a stream.
    pub(crate) fn on_wait(&self, stream: StreamNo, number: u32, hook: Hook) {
        *self.hook.lock().unwrap() = Some((stream, number, hook));
    }

    /// Whether the hook has run.
    pub(crate) fn has_run(&self) -> bool {
        self.hook.lock().unwrap().is_none()
    }
}

impl State {
    /// Records this moment.
    fn note(&mut self, always: bool) {
        let Self { streams, durable, boundaries, step, .. } = self;
        let Some(boundaries) = boundaries else { return };
        if always || streams.iter().any(|stream| !stream.pending.is_empty()) {
            let streams = streams.iter().map(|stream| stream.pending.clone()).collect();
            boundaries.push(Boundary { step: *step, durable: Arc::clone(durable), streams });
        }
    }

    fn make_durable(&mut self, base: &Base, stream: StreamNo, seq: u64) {
        let Self { streams, durable, .. } = self;
        let stream = &mut streams[usize::from(stream.0)];
        stream.durable = stream.durable.max(seq);
        let limit = stream.durable;
        for group in stream.pending.extract_if(.., |group| group.seq <= limit) {
            for (at, _, content) in &group.writes {
                Arc::make_mut(durable).write(base, *at, content);
            }
        }
    }
}

impl Storage for Recorder {
    fn blocks(&self) -> u64 {
        self.base.blocks()
    }

    fn streams(&self) -> u16 {
        self.state.lock().unwrap().streams.len() as u16
    }

    fn read(&self, first: BlockNo, into: &mut [u8]) -> Result<(), StorageError> {
        let state = self.state.lock().unwrap();
        for (at, block) in (first.0..).zip(into.as_chunks_mut::<BLOCK_BYTES>().0) {
            *block = *state.current.read(&self.base, at);
        }
        Ok(())
    }

    fn submit(&self, stream: StreamNo, group: WriteGroup) -> Result<GroupSeq, StorageError> {
        let mut state = self.state.lock().unwrap();
        let seq = state.streams[usize::from(stream.0)].last + 1;
        let mut pending = Pending { seq, writes: Vec::with_capacity(group.writes.len()) };
        for write in group.writes {
            let at = write.at.0;
            // The checker of T11 and T15, as the library has it.
            for (number, other) in state.streams.iter().enumerate() {
                let groups = other.pending.iter();
                if groups.flat_map(|group| &group.writes).any(|write| write.0 == at) {
                    super::promise(number == usize::from(stream.0), || format!("T15: block {at}"));
                    let is_in_place = write.placement == Placement::InPlace;
                    super::promise(is_in_place, || format!("T11: block {at} is not fresh"));
                }
            }
            let content = Content::new(write.data);
            state.current.write(&self.base, at, &content);
            pending.writes.push((at, write.placement, content));
        }
        let entry = &mut state.streams[usize::from(stream.0)];
        entry.last = seq;
        entry.pending.push(Arc::new(pending));
        state.note(false);
        if self.progress == Progress::Eager {
            state.make_durable(&self.base, stream, seq);
        }
        Ok(GroupSeq(seq))
    }

    fn marks(&self, stream: StreamNo) -> StreamMarks {
        let state = self.state.lock().unwrap();
        let stream = &state.streams[usize::from(stream.0)];
        let (complete, durable) = (GroupSeq(stream.last), GroupSeq(stream.durable));
        StreamMarks { complete, durable, released: durable }
    }

    fn wait_complete(&self, _: StreamNo, _: GroupSeq) -> Result<(), StorageError> {
        Ok(())
    }

    fn wait_durable(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        let hook = {
            let mut hook = self.hook.lock().unwrap();
            match &mut *hook {
                Some((on, 0, _)) if *on == stream => hook.take(),
                Some((on, number, _)) if *on == stream => {
                    *number -= 1;
                    None
                }
                _ => None,
            }
        };
        if let Some((_, _, hook)) = hook {
            hook();
        }
        let mut state = self.state.lock().unwrap();
        state.make_durable(&self.base, stream, seq.0);
        Ok(())
    }
}
