//! What the modelled drive holds, what it would still lose, and what it loses.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;

use riopipe_order::block_device::BLOCK_SIZE;

use crate::mapping::Mapping;
use crate::ssd::PowerCut;
use crate::ssd::frames::{Frame, Frames, ZEROES};
use riopipe_model::seed::Seed;

/// Frames beyond the drive's own and the losable ones: for writes that are under way.
const UNDERWAY_FRAMES: u64 = 1 << 17;

/// The blocks of a modelled drive.
///
/// In memory it works as a flash translation layer: a write brings a new frame, and the old one
/// is kept until a flush covers the write, so that losing the write is to point back. With a file
/// the newest content is in the file, in its place, and the old ones are in frames.
pub(crate) struct Store {
    frames: Frames,
    home: Home,
    /// Completed writes that a power cut may lose, oldest first: which block, and what it held
    /// before.
    losable: VecDeque<(u32, Frame)>,
    /// How many writes were taken off the front of `losable`, ever.
    settled: u64,
    losable_max: usize,
}

enum Home {
    Memory(Vec<Frame>),
    File(Mapping),
}

/// A place in the sequence of completed writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position(u64);

impl Store {
    /// `blocks` blocks of zeroes in memory. At most `losable_max` completed writes may be lost;
    /// 0 with power-loss protection.
    pub(crate) fn in_memory(blocks: u64, losable_max: u64, prefault: bool) -> io::Result<Store> {
        let own = u32::try_from(blocks + losable_max).map_err(|_| too_large())?;
        let count = u32::try_from(blocks + losable_max + UNDERWAY_FRAMES)
            .ok()
            .filter(|count| *count < ZEROES)
            .ok_or_else(too_large)?;
        Ok(Store {
            frames: Frames::new(count, if prefault { own } else { 0 })?,
            home: Home::Memory(vec![ZEROES; blocks as usize]),
            losable: VecDeque::new(),
            settled: 0,
            losable_max: losable_max as usize,
        })
    }

    /// The blocks of a mapped file.
    pub(crate) fn in_file(file: Mapping, losable_max: u64) -> io::Result<Store> {
        let blocks = (file.len() / BLOCK_SIZE) as u64;
        if blocks >= u64::from(ZEROES) {
            return Err(too_large());
        }
        let count = u32::try_from(losable_max + UNDERWAY_FRAMES).map_err(|_| too_large())?;
        Ok(Store {
            frames: Frames::new(count, 0)?,
            home: Home::File(file),
            losable: VecDeque::new(),
            settled: 0,
            losable_max: losable_max as usize,
        })
    }

    pub(crate) fn blocks(&self) -> u64 {
        match &self.home {
            Home::Memory(map) => map.len() as u64,
            Home::File(file) => (file.len() / BLOCK_SIZE) as u64,
        }
    }

    /// The frames' memory, to fill those that [`Store::allocate`] has handed out.
    pub(crate) fn bytes(&self) -> &Arc<crate::ssd::frames::Bytes> {
        self.frames.bytes()
    }

    /// A frame for a block on its way in. `None`: too many are under way.
    pub(crate) fn allocate(&mut self) -> Option<Frame> {
        self.frames.allocate()
    }

    /// Takes back a frame that was not put.
    pub(crate) fn release(&mut self, frame: Frame) {
        self.frames.release(frame);
    }

    /// Completes the write of one block: `frame` (or [`ZEROES`]) becomes its content.
    pub(crate) fn put(&mut self, lba: u64, frame: Frame) {
        let old = match &mut self.home {
            Home::Memory(map) => std::mem::replace(&mut map[lba as usize], frame),
            Home::File(_) => self.exchange(lba, frame),
        };
        if self.losable_max == 0 {
            self.frames.release(old);
            return;
        }
        self.losable.push_back((lba as u32, old));
        if self.losable.len() > self.losable_max {
            self.settle(Position(self.settled + 1));
        }
    }

    /// Copies a block out as it is now.
    pub(crate) fn read(&self, lba: u64, to: &mut [u8]) {
        match &self.home {
            Home::Memory(map) => self.frames.bytes().copy_out(map[lba as usize], to),
            // SAFETY: `place` is a whole block inside the mapping; the drive's lock is held, so
            // nobody writes it.
            Home::File(file) => unsafe {
                std::ptr::copy_nonoverlapping(place(file, lba), to.as_mut_ptr(), to.len());
            },
        }
    }

    /// What a flush that is submitted now must cover: all writes completed so far (M2).
    pub(crate) fn position(&self) -> Position {
        Position(self.settled + self.losable.len() as u64)
    }

    /// Makes all writes before `upto` durable.
    pub(crate) fn settle(&mut self, upto: Position) {
        while self.settled < upto.0 {
            // `upto` came from `position`, so there are that many; a power cut in between has
            // settled all of them.
            let Some((_, old)) = self.losable.pop_front() else {
                break;
            };
            self.frames.release(old);
            self.settled += 1;
        }
    }

    /// Loses power with `underway` blocks in flight (a frame each, or [`ZEROES`]).
    ///
    /// Each block ends up with one of: what was durable, any completed write not yet durable, any
    /// write in flight. What is left is durable.
    pub(crate) fn power_cut(&mut self, underway: &[(u64, Frame)], seed: u64) -> PowerCut {
        // For each block all contents it may have: the durable one first, then completed writes
        // as they completed, the newest being NOW; then those in flight.
        let mut contents: BTreeMap<u64, Vec<Content>> = BTreeMap::new();
        for (lba, old) in self.losable.drain(..) {
            contents.entry(u64::from(lba)).or_default().push(Content::Frame(old));
            self.settled += 1;
        }
        for list in contents.values_mut() {
            list.push(Content::Now);
        }
        for (lba, frame) in underway {
            contents.entry(*lba).or_insert_with(|| vec![Content::Now]).push(Content::Frame(*frame));
        }

        let mut random = Seed::new(seed);
        let fate = Fate::choose(&mut random);
        let mut cut = PowerCut::default();
        for (lba, list) in contents {
            let now = list.iter().position(|c| matches!(c, Content::Now));
            // Every list has a `Now`: pushed in one of the two loops above.
            let now = now.expect("the block's content now is among its contents");
            let kept = fate.pick(&mut random, list.len(), now);
            if kept == now {
                cut.blocks_kept += u64::from(now > 0);
            } else {
                cut.blocks_lost += u64::from(kept < now);
                cut.blocks_landed += u64::from(kept > now);
            }
            for (index, content) in list.into_iter().enumerate() {
                match content {
                    Content::Frame(frame) if index == kept => {
                        let replaced = match &mut self.home {
                            Home::Memory(map) => std::mem::replace(&mut map[lba as usize], frame),
                            Home::File(_) => self.exchange(lba, frame),
                        };
                        self.frames.release(replaced);
                    }
                    Content::Frame(frame) => self.frames.release(frame),
                    Content::Now => {}
                }
            }
        }
        cut
    }

    /// Puts a frame's content into the file and the file's into the frame; returns the frame that
    /// holds the latter. With power-loss protection nobody asks for the old content.
    fn exchange(&mut self, lba: u64, frame: Frame) -> Frame {
        let Home::File(file) = &self.home else {
            unreachable!("only a store in a file exchanges");
        };
        let place = place(file, lba);
        let mut old = [0u8; BLOCK_SIZE];
        // SAFETY: `place` is a whole block inside the mapping, and the drive's lock is held.
        unsafe { std::ptr::copy_nonoverlapping(place, old.as_mut_ptr(), BLOCK_SIZE) };
        let mut new = [0u8; BLOCK_SIZE];
        self.frames.bytes().copy_out(frame, &mut new);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(new.as_ptr(), place, BLOCK_SIZE) };
        if self.losable_max == 0 {
            return frame;
        }
        let keeper = match frame {
            ZEROES if old.iter().all(|byte| *byte == 0) => return ZEROES,
            ZEROES => {
                // Zeroes bring no frame along. If none is left, the oldest writes are written
                // back: a drive under pressure does no less.
                while self.frames.is_exhausted() && !self.losable.is_empty() {
                    self.settle(Position(self.settled + 1));
                }
                match self.frames.allocate() {
                    Some(keeper) => keeper,
                    // All frames are in flight: this block's old content can't be kept.
                    None => return ZEROES,
                }
            }
            frame => frame,
        };
        self.frames.bytes().fill(keeper, &old);
        keeper
    }
}

/// One content that a block may have after a power cut.
enum Content {
    Frame(Frame),
    /// The newest completed one, where it is now.
    Now,
}

/// The overall severity of a cut: the extremes are chosen often, since they find most.
enum Fate {
    AllDurableOnly,
    AllNow,
    AllLatest,
    Each { keep_quarters: u64 },
}

impl Fate {
    fn choose(random: &mut Seed) -> Fate {
        match random.below(8) {
            0 => Fate::AllDurableOnly,
            1 => Fate::AllNow,
            2 => Fate::AllLatest,
            _ => Fate::Each { keep_quarters: random.below(4) },
        }
    }

    /// Which of `count` contents stays; `now` is the newest completed one.
    fn pick(&self, random: &mut Seed, count: usize, now: usize) -> usize {
        match self {
            Fate::AllDurableOnly => 0,
            Fate::AllNow => now,
            Fate::AllLatest => count - 1,
            Fate::Each { keep_quarters } if random.below(4) < *keep_quarters => now,
            Fate::Each { .. } => random.below(count as u64) as usize,
        }
    }
}

fn place(file: &Mapping, lba: u64) -> *mut u8 {
    let offset = lba as usize * BLOCK_SIZE;
    assert!(offset + BLOCK_SIZE <= file.len());
    file.start().wrapping_add(offset)
}

fn too_large() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOMEM)
}
