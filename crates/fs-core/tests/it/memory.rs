//! A storage in memory that keeps exactly what the engine `rio` promises, or `barrier`, or `opimq`, and
//! no more.
//!
//! It records every group. [`Memory::crash`] gives a state after a crash: of each stream a prefix
//! that has at least the durable groups. Of the writes beyond it with engine `rio` those in place may
//! be there or not, and fresh blocks have their old content or read as zeroes. With engine `barrier`
//! some of the next group's writes are there, and none of the others. With engine `opimq` groups of the main
//! stream are there only with the groups that they follow.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use riopipe_fs_core::storage::{
    GroupSeq, Placement, Storage, StorageError, StreamMarks, StreamNo, WriteGroup,
};
use riopipe_fs_core::{BLOCK_BYTES, Block, BlockNo};
use rustix::fs::{SeekFrom, seek};

const ZERO: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

/// Blocks, sparse.
#[derive(Clone, Debug, Default)]
pub(crate) struct Image(BTreeMap<u64, Arc<Block>>);

impl Image {
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let blocks = bytes.as_chunks::<BLOCK_BYTES>().0.iter().enumerate();
        let full = blocks.filter(|(_, block)| **block != ZERO);
        Self(full.map(|(at, block)| (at as u64, Arc::new(*block))).collect())
    }

    /// The image in a file, of which the holes are not read.
    pub(crate) fn of_file(path: &std::path::Path) -> Self {
        Self::from_file(&File::open(path).unwrap())
    }

    /// The blocks of a sparse file that are not zero.
    pub(crate) fn from_file(file: &File) -> Self {
        let (mut image, mut end) = (Self::default(), 0);
        while let Ok(first) = seek(file, SeekFrom::Data(end)) {
            end = seek(file, SeekFrom::Hole(first)).unwrap();
            for at in first / BLOCK_BYTES as u64..end.div_ceil(BLOCK_BYTES as u64) {
                let mut block = ZERO;
                file.read_exact_at(&mut block, at * BLOCK_BYTES as u64).unwrap();
                if block != ZERO {
                    image.write(at, Arc::new(block));
                }
            }
        }
        image
    }

    pub(crate) fn read(&self, at: u64) -> Block {
        self.0.get(&at).map_or(ZERO, |block| **block)
    }

    pub(crate) fn write(&mut self, at: u64, block: Arc<Block>) {
        self.0.insert(at, block);
    }

    /// The blocks that were written, with their numbers.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (u64, &Block)> {
        self.0.iter().map(|(at, block)| (*at, &**block))
    }

    /// Writes the image into a file.
    pub(crate) fn save(&self, path: &std::path::Path, blocks: u64) {
        let file = File::create(path).unwrap();
        file.set_len(blocks * BLOCK_BYTES as u64).unwrap();
        for (at, block) in &self.0 {
            file.write_all_at(&**block, at * BLOCK_BYTES as u64).unwrap();
        }
    }
}

/// A group that is not released.
#[derive(Clone, Debug)]
struct Pending {
    seq: u64,
    /// Its number among the groups of all streams.
    number: u64,
    /// Whether the main stream follows it.
    is_followed: bool,
    /// The old content of each block beside the write.
    writes: Vec<(u64, Placement, Arc<Block>)>,
}

#[derive(Clone, Debug, Default)]
struct Stream {
    last: u64,
    durable: u64,
    pending: Vec<Pending>,
}

/// The storage. See the [module](self).
#[derive(Debug)]
pub(crate) struct Memory {
    blocks: u64,
    state: Mutex<State>,
}

#[derive(Clone, Debug)]
struct State {
    /// The content that reads return.
    current: Image,
    /// The content of all released groups.
    released: Image,
    streams: Vec<Stream>,
    /// It keeps what engines `barrier` and `opimq` promise.
    has_barriers: bool,
    /// The number of groups so far.
    group_count: u64,
    /// Groups may still be submitted; then everything fails.
    budget: u64,
    /// The calls that have waited.
    waits: u64,
    /// The calls that have read.
    reads: u64,
    cuts: Vec<Image>,
    /// How many more cuts are recorded, and the seed of their choices.
    cuts_left: u32,
    cut_seed: u64,
}

impl Memory {
    pub(crate) fn new(image: Image, blocks: u64, streams: u16) -> Self {
        let state = State {
            current: image.clone(),
            released: image,
            streams: vec![Stream::default(); usize::from(streams)],
            has_barriers: false,
            group_count: 0,
            budget: u64::MAX,
            waits: 0,
            reads: 0,
            cuts: Vec::new(),
            cuts_left: 0,
            cut_seed: 0,
        };
        Self { blocks, state: Mutex::new(state) }
    }

    /// Lets the storage keep what engines `barrier` and `opimq` promise.
    pub(crate) fn with_barriers(self) -> Self {
        self.state.lock().unwrap().has_barriers = true;
        self
    }

    /// Lets the storage fail after `groups` more groups.
    pub(crate) fn fail_after(&self, groups: u64) {
        self.state.lock().unwrap().budget = groups;
    }

    /// The number of calls that have waited so far.
    pub(crate) fn waits(&self) -> u64 {
        self.state.lock().unwrap().waits
    }

    /// The number of calls that have read so far.
    pub(crate) fn reads(&self) -> u64 {
        self.state.lock().unwrap().reads
    }

    /// The content that reads return.
    pub(crate) fn image(&self) -> Image {
        self.state.lock().unwrap().current.clone()
    }

    /// Records up to `count` states after crashes in the middle of the calls that follow.
    pub(crate) fn record_cuts(&self, count: u32, seed: u64) {
        let mut state = self.state.lock().unwrap();
        state.cuts_left = count;
        state.cut_seed = seed;
    }

    /// The recorded states.
    pub(crate) fn take_cuts(&self) -> Vec<Image> {
        std::mem::take(&mut self.state.lock().unwrap().cuts)
    }

    /// A state after a crash now. `choose(n)` returns a number below `n`.
    pub(crate) fn crash(&self, choose: &mut dyn FnMut(u64) -> u64) -> Image {
        self.state.lock().unwrap().crash(choose)
    }

    /// The state after a crash that leaves what is durable, and nothing else.
    pub(crate) fn durable_image(&self) -> Image {
        self.state.lock().unwrap().released.clone()
    }
}

impl State {
    fn crash(&self, choose: &mut dyn FnMut(u64) -> u64) -> Image {
        let mut image = self.released.clone();
        // The last group of the main stream of which something is there.
        let mut seen = 0;
        for (number, stream) in self.streams.iter().enumerate() {
            let mut prefix = stream.durable + choose(stream.last - stream.durable + 1);
            prefix = prefix.max(stream.followed_before(seen));
            for group in &stream.pending {
                if self.has_barriers && group.seq > prefix + 1 {
                    break;
                }
                if number == 0 {
                    seen = group.number;
                }
                for (at, placement, data) in &group.writes {
                    if group.seq <= prefix {
                        image.write(*at, Arc::clone(data));
                    } else if self.has_barriers || *placement == Placement::InPlace {
                        if choose(2) == 0 {
                            image.write(*at, Arc::clone(data));
                        }
                    } else if choose(2) == 0 {
                        image.write(*at, Arc::new(ZERO));
                    }
                }
            }
        }
        image
    }

    /// Records a state, if some are wanted and chance has it.
    fn maybe_cut(&mut self) {
        if self.cuts_left == 0 {
            return;
        }
        let mut random = crate::enumerate::random::Random(self.cut_seed);
        let is_taken = random.below(3) == 0;
        if is_taken {
            self.cuts_left -= 1;
            let cut = self.crash(&mut |n| random.below(n));
            self.cuts.push(cut);
        }
        self.cut_seed = random.below(u64::MAX);
    }

    fn make_durable(&mut self, stream: StreamNo, seq: u64) {
        let Self { streams, released, .. } = self;
        let main = streams[0].pending.iter().rfind(|group| stream.0 == 0 && group.seq <= seq);
        let seen = main.map_or(0, |group| group.number);
        for (number, other) in streams.iter_mut().enumerate() {
            let durable = if number == usize::from(stream.0) {
                other.durable = other.durable.max(seq);
                other.durable
            } else {
                // Its stream does not learn of it.
                other.followed_before(seen)
            };
            for group in other.pending.extract_if(.., |group| group.seq <= durable) {
                for (at, _, data) in group.writes {
                    released.write(at, data);
                }
            }
        }
    }
}

impl Stream {
    /// The last pending group before group `number` of the main stream, which follows it; 0 if there is
    /// none.
    fn followed_before(&self, number: u64) -> u64 {
        let is_before = |group: &&Pending| group.is_followed && group.number < number;
        self.pending.iter().rfind(is_before).map_or(0, |group| group.seq)
    }
}

impl Storage for Memory {
    fn blocks(&self) -> u64 {
        self.blocks
    }

    fn streams(&self) -> u16 {
        self.state.lock().unwrap().streams.len() as u16
    }

    fn read(&self, first: BlockNo, into: &mut [u8]) -> Result<(), StorageError> {
        let mut state = self.state.lock().unwrap();
        state.reads += 1;
        let (blocks, rest) = into.as_chunks_mut::<BLOCK_BYTES>();
        assert!(rest.is_empty() && first.0 + blocks.len() as u64 <= self.blocks);
        for (index, block) in blocks.iter_mut().enumerate() {
            *block = state.current.read(first.0 + index as u64);
        }
        Ok(())
    }

    fn submit(&self, stream: StreamNo, group: WriteGroup) -> Result<GroupSeq, StorageError> {
        let mut state = self.state.lock().unwrap();
        if state.budget == 0 {
            return Err(StorageError("the storage was made to fail".to_owned()));
        }
        state.budget -= 1;
        // The checker of T11 and T15, as the library has it.
        for write in &group.writes {
            assert!(write.at.0 < self.blocks, "a write out of range: {}", write.at);
            for (number, other) in state.streams.iter().enumerate() {
                let holds = |pending: &Pending| pending.writes.iter().any(|w| w.0 == write.at.0);
                if other.pending.iter().any(holds) {
                    assert_eq!(number, usize::from(stream.0), "T15: block {}", write.at);
                    assert_eq!(write.placement, Placement::InPlace, "T11: block {}", write.at);
                }
            }
        }
        let seq = state.streams[usize::from(stream.0)].last + 1;
        state.group_count += 1;
        let (number, is_followed) = (state.group_count, group.follower.is_some());
        let mut pending = Pending { seq, number, is_followed, writes: Vec::new() };
        for write in group.writes {
            state.current.write(write.at.0, Arc::clone(&write.data));
            pending.writes.push((write.at.0, write.placement, write.data));
        }
        let entry = &mut state.streams[usize::from(stream.0)];
        entry.last = seq;
        entry.pending.push(pending);
        state.maybe_cut();
        Ok(GroupSeq(seq))
    }

    fn marks(&self, stream: StreamNo) -> StreamMarks {
        let state = self.state.lock().unwrap();
        let stream = &state.streams[usize::from(stream.0)];
        let (complete, durable) = (GroupSeq(stream.last), GroupSeq(stream.durable));
        StreamMarks { complete, durable, released: durable }
    }

    fn wait_complete(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        let state = self.state.lock().unwrap();
        assert!(state.streams[usize::from(stream.0)].last >= seq.0, "a wait without an end");
        Ok(())
    }

    fn wait_durable(&self, stream: StreamNo, seq: GroupSeq) -> Result<(), StorageError> {
        let mut state = self.state.lock().unwrap();
        assert!(state.streams[usize::from(stream.0)].last >= seq.0, "a wait without an end");
        if state.budget == 0 {
            return Err(StorageError("the storage was made to fail".to_owned()));
        }
        state.waits += 1;
        state.make_durable(stream, seq.0);
        Ok(())
    }
}

/// An image of `blocks` blocks with a journal of 32 MiB, made by mke2fs.
pub(crate) fn image_of(blocks: u64, options: &[&str]) -> Image {
    let mut all = vec!["-J", "size=32"];
    all.extend(options);
    let made = crate::image::Image::new((blocks * BLOCK_BYTES as u64) >> 20, &all);
    Image::of_file(&made.path())
}

/// Panics unless e2fsck finds nothing.
pub(crate) fn check_clean(image: &Image, blocks: u64) {
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("image");
    image.save(&path, blocks);
    let path = path.to_str().unwrap();
    let ended = crate::image::run("e2fsck", &["-f", "-n", path], None);
    if ended.code != 0 {
        let kept = std::env::temp_dir().join("riofs-failed.img");
        image.save(&kept, blocks);
        panic!("e2fsck of {}: {}", kept.display(), ended.output);
    }
}
