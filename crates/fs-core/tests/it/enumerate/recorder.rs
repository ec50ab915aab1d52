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
use riopipe_fs_testkit::check::Image;
use riopipe_fs_testkit::hash::{hash_of, mix};

use super::random::Random;

pub(crate) const ZERO: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

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

    pub(crate) fn write(&mut self, base: &Base, at: u64, content: &Content) {
        let mix = |hash| mix(at, hash);
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

    /// The blocks that differ from the base.
    pub(crate) fn places(&self) -> impl Iterator<Item = u64> {
        self.blocks.keys().copied()
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

/// A state as an image.
pub(crate) struct Whole<'a> {
    pub(crate) base: &'a Base,
    pub(crate) state: &'a Overlay,
}

impl Image for Whole<'_> {
    fn read(&self, at: u64) -> &Block {
        self.state.read(self.base, at)
    }

    fn hash(&self, at: u64) -> u64 {
        self.state.blocks.get(&at).unwrap_or(&self.base.blocks[at as usize]).hash
    }
}

/// A submitted group that is not released.
#[derive(Debug)]
struct Pending {
    seq: u64,
    /// Its number among the groups of all streams.
    number: u64,
    /// Whether the main stream follows it.
    is_followed: bool,
    writes: Vec<(u64, Placement, Content)>,
}

/// A moment at which a crash may come: what is durable, and the groups of each stream that are not.
#[derive(Clone, Debug)]
pub(crate) struct Boundary {
    /// The step of the program.
    pub(crate) step: usize,
    order: Order,
    durable: Arc<Overlay>,
    /// The groups of each stream that are durable and not released.
    unreleased: Vec<Vec<Arc<Pending>>>,
    streams: Vec<Vec<Arc<Pending>>>,
}

/// A choice for one stream: the groups that are kept, and a bit for each write beyond them.
type Choice = (usize, u64);

/// The choices for each stream that are not all taken.
const CHOICES_MAX: u64 = 256;

/// The writes beyond the kept groups of which all subsets are taken.
const WRITES_MAX: usize = 6;

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
            self.streams.iter().map(|groups| self.choices(groups, random)).collect();
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
            let mut state: Vec<Choice> = state.collect();
            self.follow(&mut state);
            visit(self.state(base, &state, false));
            if self.unreleased.iter().any(|groups| !groups.is_empty()) {
                visit(self.state(base, &state, true));
            }
        }
    }

    /// With followed groups: the choices of the other streams have all that the main stream's choice
    /// is behind.
    fn follow(&self, choices: &mut [Choice]) {
        if self.order != Order::Followed {
            return;
        }
        let (kept, bits) = choices[0];
        let is_partly_there = |group: &Arc<Pending>| {
            let writes = group.writes.len().min(64) as u32;
            bits & (!0 >> (64 - writes.max(1))) != 0 && writes > 0
        };
        let seen = kept + usize::from(self.streams[0].get(kept).is_some_and(is_partly_there));
        let Some(last) = seen.checked_sub(1) else { return };
        let last = self.streams[0][last].number;
        for (choice, groups) in choices.iter_mut().zip(&self.streams).skip(1) {
            let is_before = |group: &Arc<Pending>| group.is_followed && group.number < last;
            let needed = groups.iter().rposition(is_before).map_or(0, |index| index + 1);
            choice.0 = choice.0.max(needed);
        }
    }

    /// Groups that are not released may be sent again at any time before the crash. Between two streams
    /// there is no order: with `is_reversed` the first stream's groups come last.
    fn state(&self, base: &Base, choices: &[Choice], is_reversed: bool) -> Overlay {
        let mut state = (*self.durable).clone();
        let mut streams: Vec<usize> = (0..choices.len()).collect();
        if is_reversed {
            streams.reverse();
        }
        for stream in streams {
            for group in &self.unreleased[stream] {
                group.writes.iter().for_each(|(at, _, content)| state.write(base, *at, content));
            }
            self.keep(base, &mut state, &self.streams[stream], choices[stream]);
        }
        state
    }

    fn keep(&self, base: &Base, state: &mut Overlay, groups: &[Arc<Pending>], choice: Choice) {
        let zero = Content::new(Arc::new(ZERO));
        let (kept, mut bits) = choice;
        for (index, group) in groups.iter().enumerate() {
            if index > kept && self.order.is_by_groups() {
                break;
            }
            for (at, placement, content) in &group.writes {
                if index < kept {
                    state.write(base, *at, content);
                    continue;
                }
                match (bits & 1, placement) {
                    (0, _) => {}
                    // Recovery zeroes fresh blocks beyond the prefix.
                    (_, Placement::Fresh) if self.order == Order::Streams => {
                        state.write(base, *at, &zero);
                    }
                    _ => state.write(base, *at, content),
                }
                bits = bits.rotate_right(1);
            }
        }
    }

    /// The choices of a stream. The first three are: no group, no write; no group, every write;
    /// every group.
    fn choices(&self, groups: &[Arc<Pending>], random: &mut Random) -> Vec<Choice> {
        if groups.is_empty() {
            return vec![(0, 0)];
        }
        let mut list = vec![(0, 0), (0, !0), (groups.len(), 0)];
        let mut writes = 0;
        for kept in (0..groups.len()).rev() {
            if self.order.is_by_groups() {
                writes = 0;
            }
            writes += groups[kept].writes.len();
            if writes <= WRITES_MAX {
                list.extend((0..1_u64 << writes).map(|bits| (kept, bits)));
            } else {
                list.extend([(kept, 0), (kept, !0)]);
                if self.order != Order::Streams {
                    // One write is there, or missing: a commit block without its blocks.
                    list.extend(
                        (0..writes.min(64)).flat_map(|n| [(kept, 1 << n), (kept, !(1 << n))]),
                    );
                }
                list.extend((0..16).map(|_| (kept, random.below(u64::MAX))));
            }
            if list.len() as u64 >= CHOICES_MAX {
                break;
            }
        }
        list
    }
}

#[derive(Debug, Default)]
struct Stream {
    last: u64,
    durable: u64,
    released: u64,
    unreleased: Vec<Arc<Pending>>,
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
    /// The number of groups so far.
    group_count: u64,
}

/// How groups that nothing waits for become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Only when they are waited for.
    Lazy,
    /// As soon as they are submitted.
    Eager,
}

/// The states that a crash may leave of groups that are not durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The promise of engine `rio`: of each stream a prefix of groups. Beyond it, fresh blocks have
    /// the old content or zeroes, and blocks in place the old or the new one.
    Streams,
    /// The promise of engine `barrier`: of each stream a prefix of groups, and some blocks of the
    /// next one.
    Groups,
    /// The promise of engine `opimq`: as [`Groups`](Self::Groups), and nothing of a group of the main
    /// stream is there without the groups before it that it follows.
    Followed,
    /// The promise of a drive: any subset of the blocks.
    Drive,
}

impl Order {
    /// Whether each group comes after the one before it, wholly.
    const fn is_by_groups(self) -> bool {
        matches!(self, Self::Groups | Self::Followed)
    }
}

/// When durable groups are released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Release {
    AtOnce,
    /// When later groups are waited for: a replay is in progress, and may send them again.
    Late,
}

/// The storage's behaviour.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device {
    pub(crate) streams: usize,
    pub(crate) progress: Progress,
    pub(crate) order: Order,
    pub(crate) release: Release,
    /// Whether a write of a block that another stream has not released is refused (trap T15).
    pub(crate) checks_owners: bool,
}

impl Device {
    pub(crate) const fn lazy(streams: usize) -> Self {
        let (progress, order, release) = (Progress::Lazy, Order::Streams, Release::AtOnce);
        Self { streams, progress, order, release, checks_owners: true }
    }
}

/// A function that runs in the middle of a wait for the durability of a group.
pub(crate) type Hook = Box<dyn FnOnce() + Send>;

/// The storage. See the [module](self).
pub(crate) struct Recorder {
    base: Arc<Base>,
    device: Device,
    state: Mutex<State>,
    hook: Mutex<Option<(StreamNo, u32, Hook)>>,
}

impl Recorder {
    pub(crate) fn new(base: &Arc<Base>, state: Overlay, device: Device) -> Arc<Self> {
        let state = State {
            current: state.clone(),
            durable: Arc::new(state),
            streams: (0..device.streams).map(|_| Stream::default()).collect(),
            boundaries: None,
            step: 0,
            group_count: 0,
        };
        let base = Arc::clone(base);
        Arc::new(Self { base, device, state: Mutex::new(state), hook: Mutex::new(None) })
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
        state.note(self.device.order, true);
    }

    /// The recorded moments.
    pub(crate) fn boundaries(&self) -> Vec<Boundary> {
        let mut state = self.state.lock().unwrap();
        state.note(self.device.order, true);
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
    fn note(&mut self, order: Order, always: bool) {
        let Self { streams, durable, boundaries, step, .. } = self;
        let Some(boundaries) = boundaries else { return };
        if always || streams.iter().any(|stream| !stream.pending.is_empty()) {
            let unreleased = streams.iter().map(|stream| stream.unreleased.clone()).collect();
            let streams = streams.iter().map(|stream| stream.pending.clone()).collect();
            let (step, durable) = (*step, Arc::clone(durable));
            boundaries.push(Boundary { step, order, durable, unreleased, streams });
        }
    }

    fn make_durable(&mut self, base: &Base, stream: StreamNo, seq: u64, release: Release) {
        let Self { streams, durable, .. } = self;
        if stream.0 == 0 {
            make_followed_durable(streams, durable, base, seq);
        }
        let stream = &mut streams[usize::from(stream.0)];
        stream.durable = stream.durable.max(seq);
        let limit = stream.durable;
        for group in stream.pending.extract_if(.., |group| group.seq <= limit) {
            for (at, _, content) in &group.writes {
                Arc::make_mut(durable).write(base, *at, content);
            }
            stream.unreleased.push(group);
        }
        if release == Release::AtOnce {
            stream.release();
        }
    }
}

/// Makes all groups durable that the main stream's groups up to `seq` are behind. Their streams do not
/// learn of it.
fn make_followed_durable(
    streams: &mut [Stream],
    durable: &mut Arc<Overlay>,
    base: &Base,
    seq: u64,
) {
    let main = streams[0].pending.iter().rfind(|group| group.seq <= seq);
    let Some(last) = main.map(|group| group.number) else { return };
    for stream in streams.iter_mut().skip(1) {
        let is_before = |group: &Arc<Pending>| group.is_followed && group.number < last;
        let covered = stream.pending.iter().rposition(is_before).map_or(0, |index| index + 1);
        for group in stream.pending.drain(..covered) {
            for (at, _, content) in &group.writes {
                Arc::make_mut(durable).write(base, *at, content);
            }
        }
    }
}

impl Stream {
    fn release(&mut self) {
        self.released = self.durable;
        self.unreleased.clear();
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
        state.group_count += 1;
        let mut pending = Pending {
            seq,
            number: state.group_count,
            is_followed: group.follower.is_some_and(|follower| {
                assert!(follower.0 == 0 && stream.0 > 0, "the main stream follows");
                self.device.order == Order::Followed
            }),
            writes: Vec::with_capacity(group.writes.len()),
        };
        for write in group.writes {
            let at = write.at.0;
            // The checker of T11 and T15, as the library has it.
            for (number, other) in state.streams.iter().enumerate() {
                let has = |group: &Arc<Pending>| group.writes.iter().any(|write| write.0 == at);
                if number != usize::from(stream.0) {
                    let is_held = other.pending.iter().chain(&other.unreleased).any(has);
                    let is_kept = !is_held || !self.device.checks_owners;
                    super::promise(is_kept, || format!("T15: block {at}"));
                } else if other.pending.iter().any(has) {
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
        state.note(self.device.order, false);
        if self.device.progress == Progress::Eager {
            state.make_durable(&self.base, stream, seq, self.device.release);
        }
        Ok(GroupSeq(seq))
    }

    fn marks(&self, stream: StreamNo) -> StreamMarks {
        let state = self.state.lock().unwrap();
        let stream = &state.streams[usize::from(stream.0)];
        let (complete, durable) = (GroupSeq(stream.last), GroupSeq(stream.durable));
        StreamMarks { complete, durable, released: GroupSeq(stream.released) }
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
        if state.streams[usize::from(stream.0)].durable < seq.0 {
            // A replay that was in progress has ended. On the main stream it ends at once: each
            // write of it that must be released is waited for, and followed by others.
            state.streams[usize::from(stream.0)].release();
            let release = if stream.0 == 0 { Release::AtOnce } else { self.device.release };
            state.make_durable(&self.base, stream, seq.0, release);
        }
        Ok(())
    }

    fn wait_released(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        self.wait_durable(stream, seq)?;
        self.state.lock().unwrap().streams[usize::from(stream.0)].release();
        Ok(())
    }
}
