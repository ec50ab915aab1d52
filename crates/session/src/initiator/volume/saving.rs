//! Reading the data that recovery is about to zero, so that the program can save it.
//!
//! ```text
//! Begin → (read blocks → Blocks) for every part of every extent → Finish → Saved
//! ```

use alloc::string::String;
use alloc::vec::Vec;

use riopipe_order::attribute::{Seq, StreamId, VolumeId};
use riopipe_order::topology::{Extent, Topology};

use super::ranges::{BlockRange, InPlaceRange, listed_ranges, newest_writes};
use crate::initiator::opening::Outcome;
use crate::label::Label;
use crate::wire::BLOCK_BYTES;

/// Number of blocks that are read and saved at a time.
const SAVE_BLOCKS: u64 = 32;

/// Blocks that recovery is about to zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UndoneExtent {
    /// The stream of the group that wrote them.
    pub stream: StreamId,
    /// The newest group that wrote them; the first one of a request that was merged from several.
    pub seq: Seq,
    /// The blocks.
    pub range: BlockRange,
}

/// A step for the program, to save the data that will be zeroed. The program reports each step, and
/// nothing is zeroed before the last one is reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaveStep {
    /// Begin to save these blocks. Their data follows in this order.
    Begin {
        /// The volume of the blocks.
        volume: VolumeId,
        /// The name of the volume.
        name: String,
        /// The generation of the owner that recovers the volume; 0 in a dry run.
        generation: u32,
        /// The blocks, each once.
        extents: Vec<UndoneExtent>,
    },
    /// Save these bytes. They are the next whole blocks.
    Blocks(Vec<u8>),
    /// All bytes have been passed: make them durable.
    Finish,
}

/// A part of the blocks that are being read: those that are adjacent on one drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReadPart {
    pub(super) extent: Extent,
    /// The offset of its first byte in the buffer, bytes.
    pub(super) at: usize,
    /// The number of bytes.
    pub(super) len: usize,
}

/// The next action of saving.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The opening must read these parts.
    Read(Vec<ReadPart>),
    /// The program must do this step.
    Step(SaveStep),
    /// Everything is saved.
    Saved,
}

/// The progress of saving.
#[derive(Debug, PartialEq, Eq)]
enum State {
    /// The program has not begun.
    NotBegun,
    /// The next blocks to be read begin at volume block `lba`, in the extent with this index.
    Reading { extent: usize, lba: u64 },
    /// All data has been passed to the program, which makes it durable.
    MakingDurable,
}

/// The blocks to be saved, and the progress of saving them.
#[derive(Debug)]
pub(super) struct Saving {
    volume: VolumeId,
    name: String,
    generation: u32,
    /// All blocks that will be zeroed, stream after stream.
    extents: Vec<UndoneExtent>,
    state: State,
    /// The buffer for the blocks that are being read.
    bytes: Vec<u8>,
    /// The number of parts of `bytes` that have not been read yet.
    unread_parts: usize,
}

impl Saving {
    /// The saving of the data that recovery will zero by `outcome`; `None` if it will zero nothing.
    /// `head` is a label of the volume, and `generation` the one of the owner.
    pub(super) fn new(
        head: &Label,
        generation: u32,
        outcome: &Outcome,
        topology: &Topology,
    ) -> Option<Self> {
        let mut extents = Vec::new();
        for plan in outcome.streams.iter().map(|stream| &stream.plan) {
            let writes = newest_writes(&listed_ranges(topology, &plan.undone_writes));
            extents.extend(writes.into_iter().map(|InPlaceRange { seq, range }| UndoneExtent {
                stream: plan.stream,
                seq,
                range,
            }));
        }
        (!extents.is_empty()).then(|| Self {
            volume: head.volume,
            name: head.name.clone(),
            generation,
            extents,
            state: State::NotBegun,
            bytes: Vec::new(),
            unread_parts: 0,
        })
    }

    /// The next action. The caller has done the last step, and has no read in flight.
    pub(super) fn next(&mut self, topology: &Topology) -> Next {
        match self.state {
            State::NotBegun => {
                let lba = self.extents[0].range.lba;
                self.state = State::Reading { extent: 0, lba };
                let (volume, generation) = (self.volume, self.generation);
                let (name, extents) = (self.name.clone(), self.extents.clone());
                Next::Step(SaveStep::Begin { volume, name, generation, extents })
            }
            State::Reading { extent, .. } if extent == self.extents.len() => {
                self.state = State::MakingDurable;
                Next::Step(SaveStep::Finish)
            }
            // At most `SAVE_BLOCKS` blocks of one extent are read together.
            State::Reading { extent, lba } => {
                let BlockRange { lba: first, blocks } = self.extents[extent].range;
                let count = (first + blocks - lba).min(SAVE_BLOCKS);
                let mut parts = Vec::new();
                topology.for_each_extent(lba, count as u32, |extent| {
                    let at = extent.offset as usize * BLOCK_BYTES;
                    let len = extent.blocks as usize * BLOCK_BYTES;
                    parts.push(ReadPart { extent, at, len });
                });
                self.bytes = alloc::vec![0; count as usize * BLOCK_BYTES];
                self.unread_parts = parts.len();
                let end = lba + count;
                self.state = if end < first + blocks {
                    State::Reading { extent, lba: end }
                } else {
                    let next = self.extents.get(extent + 1).map_or(0, |next| next.range.lba);
                    State::Reading { extent: extent + 1, lba: next }
                };
                Next::Read(parts)
            }
            State::MakingDurable => Next::Saved,
        }
    }

    /// Stores the data of the part at offset `at`. After the last part, returns the step by which the
    /// program saves them all.
    pub(super) fn read(&mut self, at: usize, page: &[u8]) -> Option<SaveStep> {
        if let Some(part) = self.bytes.get_mut(at..at + page.len()) {
            part.copy_from_slice(page);
        }
        self.unread_parts = self.unread_parts.saturating_sub(1);
        (self.unread_parts == 0).then(|| SaveStep::Blocks(core::mem::take(&mut self.bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::initiator::opening::StreamOutcome;
    use alloc::vec;
    use riopipe_order::attribute::Member;
    use riopipe_order::recovery::{DriveExtent, InPlace, StreamPlan, join};
    use riopipe_order::topology::{MemberInfo, ServerInfo};

    fn label() -> Label {
        crate::label::tests::label(0)
    }

    fn topology() -> Topology {
        let member = |server| MemberInfo {
            server,
            start: 256,
            blocks: 640,
            request_blocks_max: 32,
            volatile: false,
        };
        let servers = vec![ServerInfo { slots: 8 }; 2];
        Topology::new(vec![member(0), member(1)], servers, 16).unwrap()
    }

    fn outcome(undo: Vec<DriveExtent>) -> Outcome {
        let plan = StreamPlan {
            stream: StreamId(3),
            released: Seq(0),
            k: Seq(0),
            tag: 0,
            found: 1,
            kept: 0,
            dropped: 1,
            undo: join(undo.clone()),
            redirected: Vec::new(),
            undone_writes: (1..)
                .zip(undo)
                .map(|(seq, extent)| InPlace { seq: Seq(seq), extent })
                .collect(),
            in_place: Vec::new(),
            log_given_up: false,
            in_doubt: Vec::new(),
            settled: 0,
        };
        Outcome { streams: vec![StreamOutcome { plan, pending: false }], ..Outcome::default() }
    }

    #[test]
    fn nothing_to_zero_is_nothing_to_keep() {
        assert!(Saving::new(&label(), 7, &outcome(Vec::new()), &topology()).is_none());
    }

    #[test]
    fn each_block_is_read_once_in_order_and_kept_before_the_next() {
        let topology = topology();
        let at = |member, lba, blocks| DriveExtent { member: Member(member), lba, blocks };
        // Volume blocks 0 to 47, and 70.
        let undo = vec![at(0, 256, 32), at(1, 256, 16), at(0, 256 + 38, 1)];
        let mut saving = Saving::new(&label(), 7, &outcome(undo), &topology).unwrap();
        let mut kept = Vec::new();
        let mut begun = None;
        loop {
            match saving.next(&topology) {
                Next::Step(SaveStep::Begin { volume, name, generation, extents }) => {
                    assert_eq!((volume, name, generation), (label().volume, label().name, 7));
                    begun = Some(extents);
                }
                Next::Step(SaveStep::Finish) => break,
                Next::Step(SaveStep::Blocks(_)) => unreachable!("nothing has been read"),
                Next::Saved => unreachable!("the program has not finished"),
                Next::Read(parts) => {
                    assert!(!parts.is_empty());
                    let last = parts.len() - 1;
                    for (i, part) in parts.iter().enumerate() {
                        let mut page = vec![0; part.len];
                        for (j, block) in page.chunks_mut(BLOCK_BYTES).enumerate() {
                            let lba = part.extent.lba + j as u64;
                            let volume = topology.volume_block(part.extent.member, lba);
                            block[0] = volume.unwrap() as u8;
                        }
                        match saving.read(part.at, &page) {
                            Some(SaveStep::Blocks(bytes)) => {
                                assert_eq!(i, last);
                                kept.extend(bytes.chunks(BLOCK_BYTES).map(|block| block[0]));
                            }
                            step => assert!(step.is_none() && i < last, "{step:?}"),
                        }
                    }
                }
            }
        }
        assert_eq!(saving.next(&topology), Next::Saved);
        let ranges = begun.unwrap();
        let ranges: Vec<_> =
            ranges.iter().map(|e| (e.seq.0, e.range.lba, e.range.blocks)).collect();
        assert_eq!(ranges, [(1, 0, 16), (2, 16, 16), (1, 32, 16), (3, 70, 1)]);
        assert_eq!(kept, (0..48).chain([70]).collect::<Vec<u8>>());
    }
}
