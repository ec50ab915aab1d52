//! Reading the data that recovery is about to zero, so that the program can save it.

use alloc::vec::Vec;

use riopipe_order::attribute::{StreamId, VolumeId};
use riopipe_order::topology::{Extent, Topology};

use super::ranges::{BlockRange, volume_ranges};
use crate::initiator::opening::Outcome;
use crate::wire::BLOCK_BYTES;

/// Number of blocks that are read and saved at a time.
const SAVE_BLOCKS: u64 = 32;

/// Blocks that recovery is about to zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UndoneExtent {
    /// The stream of the groups that wrote them.
    pub stream: StreamId,
    /// The blocks.
    pub range: BlockRange,
}

/// A step for the program, to save the data that will be zeroed. The program reports each step, and
/// nothing is zeroed before the last one is reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaveStep {
    /// Begin to save these blocks, in this order.
    Begin {
        /// The volume that they belong to.
        volume: VolumeId,
        /// The blocks.
        extents: Vec<UndoneExtent>,
    },
    /// Save these bytes: whole blocks, the next ones.
    Blocks(Vec<u8>),
    /// All bytes have been passed: make them durable.
    Finish,
}

/// A part of the blocks that are being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReadPart {
    pub(super) extent: Extent,
    /// The offset of its first byte in the whole.
    pub(super) at: usize,
    pub(super) len: usize,
}

/// The next action.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// These are to be read.
    Read(Vec<ReadPart>),
    /// The program must do this step.
    Step(SaveStep),
    /// Everything is saved.
    Over,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// Nothing has been done yet.
    Fresh,
    /// The blocks from this one of this extent on are next.
    Reading { extent: usize, lba: u64 },
    /// All has been read; the program makes it durable.
    Finishing,
}

/// The blocks to be saved, and the progress of saving them.
#[derive(Debug)]
pub(super) struct Saving {
    volume: VolumeId,
    /// All blocks that will be zeroed, stream after stream.
    extents: Vec<UndoneExtent>,
    state: State,
    /// The blocks that are being read.
    bytes: Vec<u8>,
    /// Parts of `bytes` that have not been read yet.
    owed: usize,
}

impl Saving {
    /// The saving of the data that `outcome` lists to be zeroed; `None` if nothing is.
    pub(super) fn new(volume: VolumeId, outcome: &Outcome, topology: &Topology) -> Option<Self> {
        let mut extents = Vec::new();
        for stream in outcome.streams.iter().map(|stream| &stream.plan) {
            let ranges = volume_ranges(topology, &stream.undo).into_iter();
            extents.extend(ranges.map(|range| UndoneExtent { stream: stream.stream, range }));
        }
        (!extents.is_empty()).then(|| Self {
            volume,
            extents,
            state: State::Fresh,
            bytes: Vec::new(),
            owed: 0,
        })
    }

    /// Continues when the last step is done and no read is in flight.
    pub(super) fn next(&mut self, topology: &Topology) -> Next {
        match self.state {
            State::Fresh => {
                let lba = self.extents[0].range.lba;
                self.state = State::Reading { extent: 0, lba };
                let (volume, extents) = (self.volume, self.extents.clone());
                Next::Step(SaveStep::Begin { volume, extents })
            }
            State::Reading { extent, .. } if extent == self.extents.len() => {
                self.state = State::Finishing;
                Next::Step(SaveStep::Finish)
            }
            // At most `SAVE_BLOCKS` blocks of one extent are read together.
            State::Reading { extent, lba } => {
                let BlockRange { lba: first, blocks } = self.extents[extent].range;
                let count = (first + blocks - lba).min(SAVE_BLOCKS);
                let mut parts = Vec::new();
                topology.map(lba, count as u32, |extent| {
                    let at = extent.offset as usize * BLOCK_BYTES;
                    let len = extent.blocks as usize * BLOCK_BYTES;
                    parts.push(ReadPart { extent, at, len });
                });
                self.bytes = alloc::vec![0; count as usize * BLOCK_BYTES];
                self.owed = parts.len();
                let end = lba + count;
                self.state = if end < first + blocks {
                    State::Reading { extent, lba: end }
                } else {
                    let next = self.extents.get(extent + 1).map_or(0, |next| next.range.lba);
                    State::Reading { extent: extent + 1, lba: next }
                };
                Next::Read(parts)
            }
            State::Finishing => Next::Over,
        }
    }

    /// A part has been read. Once all parts have arrived, the program saves them.
    pub(super) fn read(&mut self, at: usize, page: &[u8]) -> Option<SaveStep> {
        if let Some(part) = self.bytes.get_mut(at..at + page.len()) {
            part.copy_from_slice(page);
        }
        self.owed = self.owed.saturating_sub(1);
        (self.owed == 0).then(|| SaveStep::Blocks(core::mem::take(&mut self.bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::initiator::opening::StreamOutcome;
    use alloc::vec;
    use riopipe_order::attribute::{Member, Seq};
    use riopipe_order::recovery::{DriveExtent, StreamPlan};
    use riopipe_order::topology::{MemberInfo, ServerInfo};

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
            undo,
            in_place: Vec::new(),
            log_given_up: false,
            in_doubt: Vec::new(),
            settled: 0,
        };
        Outcome { streams: vec![StreamOutcome { plan, pending: false }], ..Outcome::default() }
    }

    #[test]
    fn nothing_to_zero_is_nothing_to_keep() {
        assert!(Saving::new(VolumeId([9; 16]), &outcome(Vec::new()), &topology()).is_none());
    }

    #[test]
    fn each_block_is_read_once_in_order_and_kept_before_the_next() {
        let topology = topology();
        let at = |member, lba, blocks| DriveExtent { member: Member(member), lba, blocks };
        // Volume blocks 0 to 47, and 70.
        let undo = vec![at(0, 256, 32), at(1, 256, 16), at(0, 256 + 38, 1)];
        let mut saving = Saving::new(VolumeId([9; 16]), &outcome(undo), &topology).unwrap();
        let mut kept = Vec::new();
        let mut begun = None;
        loop {
            match saving.next(&topology) {
                Next::Step(SaveStep::Begin { extents, .. }) => begun = Some(extents),
                Next::Step(SaveStep::Finish) => break,
                Next::Step(SaveStep::Blocks(_)) => unreachable!("nothing has been read"),
                Next::Over => unreachable!("the program has not finished"),
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
        assert_eq!(saving.next(&topology), Next::Over);
        let ranges: Vec<_> = begun.unwrap().iter().map(|e| (e.range.lba, e.range.blocks)).collect();
        assert_eq!(ranges, [(0, 48), (70, 1)]);
        assert_eq!(kept, (0..48).chain([70]).collect::<Vec<u8>>());
    }
}
