//! An ordered volume as a plain block device: directed tests, and random ones with an oracle that knows
//! for each block only which request wrote it last.

use std::collections::{BTreeMap, BTreeSet};

use riopipe_order::attribute::{Seq, StreamId};
use riopipe_order::engine::{EngineKind, Marks};
use riopipe_order::ownership::OwnershipChecker;
use riopipe_session::initiator::plain_device::{
    Content, Ended, Layout, LayoutError, Part, PlainDevice, Work,
};
use riopipe_testkit::Random;

/// Small ranges, so that requests cross them.
const STRIPE_BLOCKS: u64 = 1024;
const PART_BLOCKS_MAX: u32 = 256;

fn layout(streams: usize) -> Layout {
    Layout::new(streams, STRIPE_BLOCKS, PART_BLOCKS_MAX).unwrap()
}

fn device(streams: usize) -> PlainDevice<u64, u64> {
    PlainDevice::new(layout(streams), vec![Seq(0); streams])
}

fn done(token: u64) -> Ended<u64> {
    Ended { token, is_done: true }
}

fn failed(token: u64) -> Ended<u64> {
    Ended { token, is_done: false }
}

/// Marks of a stream that has all groups up to `complete`, and those up to `durable` durably.
fn marks(complete: u64, durable: u64) -> Marks {
    Marks { complete: Seq(complete), durable: Seq(durable) }
}

/// Takes the next work of a stream, which must be a part, and submits it as group `seq`.
fn submit(device: &mut PlainDevice<u64, u64>, stream: usize, seq: u64) -> Part<u64> {
    match device.next_work(stream) {
        Some(Work::Submit(part)) => {
            device.on_submitted(stream, Seq(seq));
            part
        }
        other => panic!("stream {stream} has {other:?}"),
    }
}

#[test]
fn a_range_has_whole_stripes_and_belongs_to_one_stream() {
    let layout = Layout::new(3, 384, 256).unwrap();
    assert_eq!(layout.range_blocks(), 1152, "the least whole stripes of 4 MiB");
    for (lba, stream) in [(0, 0), (1151, 0), (1152, 1), (2 * 1152, 2), (3 * 1152, 0)] {
        assert_eq!(layout.stream_of(lba), stream, "{lba}");
    }
    assert_eq!(layout.part_blocks(0, 1000), 256, "no larger than a group may be");
    assert_eq!(layout.part_blocks(1150, 1000), 2, "no farther than the range");
    assert_eq!(layout.part_blocks(7, 3), 3);
    assert_eq!(layout.part_blocks(7, u64::MAX), 256);
    assert_eq!(Layout::new(0, 1, 1), Err(LayoutError::NoStream));
    assert_eq!(Layout::new(1, 0, 1), Err(LayoutError::Empty));
    assert_eq!(Layout::new(1, 1, 0), Err(LayoutError::Empty));
    assert_eq!(Layout::new(2, u64::MAX, 1).unwrap().stream_of(u64::MAX - 1), 0);
}

#[test]
fn a_split_write_is_done_when_all_its_parts_are_complete() {
    let mut device = device(2);
    device.write(7, 1000, 48, 70, false);
    assert_eq!(device.take_to_wake(), BTreeSet::from([0, 1]));
    let first = submit(&mut device, 0, 1);
    let second = submit(&mut device, 1, 1);
    assert_eq!((first.lba, first.blocks, second.lba, second.blocks), (1000, 24, 1024, 24));
    assert_eq!(first.content, Content::Data { data: 70, first_block: 0 });
    assert_eq!(second.content, Content::Data { data: 70, first_block: 24 });
    device.on_marks(1, marks(1, 0), Seq(0));
    assert_eq!(device.take_ended(), [], "its other part is in flight");
    device.on_marks(0, marks(1, 0), Seq(0));
    assert_eq!(device.take_ended(), [done(7)]);
}

#[test]
fn a_flush_covers_what_was_complete_on_all_streams_and_members() {
    let mut device = device(3);
    for stream in 0..3 {
        device.write(stream, stream * 1024, 1, 0, false);
        submit(&mut device, stream as usize, 1);
    }
    device.on_marks(0, marks(1, 0), Seq(0));
    device.on_marks(1, marks(1, 0), Seq(0));
    device.take_ended();
    device.take_to_wake();
    device.flush(9);
    assert_eq!(device.take_to_wake(), BTreeSet::from([0, 1]), "stream 2 has nothing complete");
    assert_eq!(device.next_work(0), Some(Work::MakeDurable(Seq(1))));
    assert_eq!(device.next_work(0), None, "once");
    assert_eq!(device.next_work(1), Some(Work::MakeDurable(Seq(1))));
    assert_eq!(device.next_work(2), None);
    device.on_marks(0, marks(1, 1), Seq(1));
    assert_eq!(device.take_ended(), [], "stream 1 is not durable");
    device.on_marks(1, marks(1, 1), Seq(1));
    assert_eq!(device.take_ended(), [done(9)]);
    device.flush(10);
    assert_eq!(device.take_ended(), [done(10)], "nothing is complete and not durable");
}

#[test]
fn a_write_with_fua_is_done_when_all_its_parts_are_durable() {
    let mut device = device(2);
    device.write(7, 1023, 2, 70, true);
    assert!(submit(&mut device, 0, 1).is_durable && submit(&mut device, 1, 1).is_durable);
    device.on_marks(0, marks(1, 1), Seq(1));
    device.on_marks(1, marks(1, 0), Seq(0));
    assert_eq!(device.take_ended(), [], "complete is not enough");
    device.on_marks(1, marks(1, 1), Seq(1));
    assert_eq!(device.take_ended(), [done(7)]);
}

#[test]
fn writes_with_fua_share_flushes() {
    let mut device = device(1);
    for token in 1..=3 {
        device.write(token, token, 1, 0, true);
    }
    device.write(4, 4, 1, 0, false);
    let durable = |device: &mut _, seq| submit(device, 0, seq).is_durable;
    assert!(!durable(&mut device, 1) && !durable(&mut device, 2), "the third one is for all");
    assert!(durable(&mut device, 3) && !durable(&mut device, 4));
    for token in 5..=6 {
        device.write(token, token, 1, 0, true);
    }
    assert!(!durable(&mut device, 5) && !durable(&mut device, 6), "a flush is in flight");
    assert_eq!(device.next_work(0), None, "they wait for its end");
    device.on_marks(0, marks(6, 2), Seq(2));
    assert_eq!(device.take_ended(), [done(4), done(1), done(2)]);
    assert_eq!(device.next_work(0), None);
    device.take_to_wake();
    device.on_marks(0, marks(6, 4), Seq(4));
    assert_eq!(device.take_ended(), [done(3)], "that flush does not cover the later ones");
    assert_eq!(device.take_to_wake(), BTreeSet::from([0]), "no other mark may move");
    assert_eq!(device.next_work(0), Some(Work::MakeDurable(Seq(6))));
    assert_eq!(device.next_work(0), None, "once");
    device.on_marks(0, marks(6, 6), Seq(6));
    assert_eq!(device.take_ended(), [done(5), done(6)]);
}

#[test]
fn a_write_with_fua_before_one_without_space_gets_a_flush() {
    let mut device = device(1);
    device.write(1, 1, 1, 0, true);
    device.write(2, 2, 1, 0, true);
    assert!(!submit(&mut device, 0, 1).is_durable, "the second one is for both");
    let Some(Work::Submit(part)) = device.next_work(0) else { panic!("the second write") };
    device.on_no_space(0, part);
    assert_eq!(device.next_work(0), Some(Work::MakeDurable(Seq(1))), "it may make space, too");
    device.on_marks(0, marks(1, 1), Seq(1));
    device.on_space(0);
    assert_eq!(device.take_ended(), [done(1)]);
    assert!(submit(&mut device, 0, 2).is_durable);
}

#[test]
fn a_flush_passes_parts_that_have_no_space() {
    let mut device = device(1);
    device.write(1, 0, 1, 0, false);
    submit(&mut device, 0, 1);
    device.on_marks(0, marks(1, 0), Seq(0));
    device.write(2, 1, 1, 0, false);
    let Some(Work::Submit(part)) = device.next_work(0) else { panic!("the write") };
    device.on_no_space(0, part.clone());
    device.write(3, 2, 1, 0, false);
    assert_eq!(device.next_work(0), None, "neither it nor the one behind it is tried again");
    device.flush(4);
    assert_eq!(device.next_work(0), Some(Work::MakeDurable(Seq(1))), "it may be what makes space");
    device.on_marks(0, marks(1, 1), Seq(1));
    device.on_space(0);
    assert_eq!(submit(&mut device, 0, 2), part, "in the old order");
    assert_eq!(submit(&mut device, 0, 3).lba, 2);
}

#[test]
fn t11_zeroes_wait_until_older_writes_to_the_blocks_are_released() {
    let mut device = device(1);
    device.write(1, 10, 4, 0, false);
    device.write(2, 20, 4, 0, false);
    submit(&mut device, 0, 1);
    submit(&mut device, 0, 2);
    device.zero(3, 0, 10, false);
    assert_eq!(submit(&mut device, 0, 3).content, Content::Zeroes, "no block of them was written");
    device.zero(4, 13, 7, false);
    device.write(5, 30, 1, 0, false);
    assert_eq!(device.next_work(0), Some(Work::MakeDurable(Seq(1))), "group 2 has other blocks");
    assert_eq!(device.next_work(0), None, "what is behind it waits, too");
    device.on_marks(0, marks(3, 3), Seq(0));
    assert_eq!(device.next_work(0), None, "durable is not released");
    device.on_marks(0, marks(3, 3), Seq(1));
    assert_eq!(submit(&mut device, 0, 4).lba, 13);
    assert_eq!(submit(&mut device, 0, 5).lba, 30);
}

/// A crash of the device's process undoes a discard that is not released. A write over it that was complete
/// would be lost, and its host may live on.
#[test]
fn t11_a_write_waits_until_older_zeroes_of_its_blocks_are_released() {
    let mut device = device(1);
    device.zero(1, 10, 4, false);
    submit(&mut device, 0, 1);
    device.write(2, 14, 4, 0, false);
    assert_eq!(submit(&mut device, 0, 2).lba, 14, "other blocks");
    device.write(3, 13, 1, 0, false);
    assert_eq!(device.next_work(0), Some(Work::MakeDurable(Seq(1))));
    device.on_marks(0, marks(2, 2), Seq(0));
    assert_eq!(device.next_work(0), None, "durable is not released");
    device.on_marks(0, marks(2, 2), Seq(1));
    assert_eq!(submit(&mut device, 0, 3).lba, 13);
    device.write(4, 13, 1, 0, false);
    assert_eq!(submit(&mut device, 0, 4).lba, 13, "a write over a write does not wait");
}

/// The thread of a stream reports marks after it has asked for work. No further mark may move then.
#[test]
fn p8_a_part_that_need_not_wait_for_a_release_any_more_wakes_its_stream() {
    let mut device = device(2);
    device.write(1, 10, 1, 0, false);
    submit(&mut device, 0, 1);
    device.zero(2, 10, 1, false);
    assert_eq!(device.next_work(0), Some(Work::MakeDurable(Seq(1))));
    assert_eq!(device.next_work(0), None);
    device.take_to_wake();
    device.on_marks(0, marks(1, 1), Seq(0));
    assert_eq!(device.take_to_wake(), BTreeSet::new(), "it is not released");
    device.on_marks(0, marks(1, 1), Seq(1));
    assert_eq!(device.take_to_wake(), BTreeSet::from([0]));
    assert_eq!(submit(&mut device, 0, 2).content, Content::Zeroes);
}

/// A host that loses its connection during a long request for zeroes connects again, and writes. The request
/// goes on, and must not destroy what was written and flushed since.
#[test]
fn t8_zeroes_of_a_connection_before_do_not_destroy_later_writes() {
    let mut device = device(1);
    device.zero(1, 0, 20 * 256, false);
    device.write(2, 16 * 256 - 1, 2, 0, false);
    device.write(3, 16 * 256 - 2, 1, 0, false);
    for seq in 1..=16 {
        assert_eq!(submit(&mut device, 0, seq).content, Content::Zeroes);
    }
    let Some(Work::MakeDurable(_)) = device.next_work(0) else { panic!("write 3 is next") };
    device.on_marks(0, marks(1, 0), Seq(0));
    device.on_marks(0, marks(16, 16), Seq(16));
    let mut lbas = Vec::new();
    for seq in 17..=23 {
        lbas.push(match device.next_work(0) {
            Some(Work::Submit(part)) => (part.lba, matches!(part.content, Content::Zeroes)),
            Some(Work::MakeDurable(_)) => match device.next_work(0) {
                None => {
                    device.on_marks(0, marks(seq - 1, seq - 1), Seq(seq - 1));
                    let Some(Work::Submit(part)) = device.next_work(0) else { panic!("released") };
                    (part.lba, matches!(part.content, Content::Zeroes))
                }
                other => panic!("{other:?}"),
            },
            None => panic!("{lbas:?}"),
        });
        device.on_submitted(0, Seq(seq));
    }
    let at = |place| lbas.iter().position(|found| *found == place).unwrap();
    assert!(at((16 * 256, false)) > at((16 * 256, true)), "{lbas:?}");
    device.on_marks(0, marks(23, 23), Seq(23));
    let ended: BTreeSet<u64> = device.take_ended().iter().map(|ended| ended.token).collect();
    assert_eq!(ended, BTreeSet::from([1, 2, 3]));
}

#[test]
fn zeroes_of_a_whole_device_are_queued_piece_by_piece() {
    let mut device = device(2);
    let blocks = 1 << 40;
    device.zero(1, 0, blocks, false);
    let mut parts = 0;
    while let Some(Work::Submit(_)) = device.next_work(0) {
        parts += 1;
        device.on_submitted(0, Seq(parts));
    }
    let first = parts;
    assert!((1..=16).contains(&first), "{first}");
    device.on_marks(0, marks(first, 0), Seq(0));
    assert!(matches!(device.next_work(0), Some(Work::Submit(_))), "others follow");
    assert_eq!(device.take_ended(), []);
}

#[test]
fn p9_after_a_failure_blocks_that_were_not_released_are_not_read() {
    let mut device = device(2);
    device.write(1, 0, 4, 0, false);
    device.write(2, 1024, 4, 0, false);
    device.write(3, 8, 1, 0, false);
    submit(&mut device, 0, 1);
    submit(&mut device, 1, 1);
    device.on_marks(0, marks(1, 1), Seq(1));
    device.on_marks(1, marks(1, 0), Seq(0));
    let Some(Work::Submit(_)) = device.next_work(0) else { panic!("the third write") };
    device.write(4, 100, 1, 0, false);
    assert!(device.may_read(0, 2048), "it has not failed");
    device.fail();
    assert!(device.may_read(0, 8), "all of it is released");
    assert!(!device.may_read(1020, 5) && !device.may_read(1027, 1), "it is not released");
    assert!(device.may_read(1028, 1000) && device.may_read(9, 1000));
    assert!(!device.may_read(8, 1), "it was being submitted");
    assert!(device.may_read(100, 1), "it was with no stream");
    device.fail();
    assert!(!device.may_read(8, 1), "also after a second failure");
}

#[test]
fn writes_are_durable_when_they_are_done_if_the_engine_rolls_back() {
    for engine in EngineKind::ALL {
        let mut device = device(1).on_engine(engine);
        let expected = matches!(engine, EngineKind::Horae | EngineKind::Opimq);
        device.write(1, 0, 1, 0, false);
        assert_eq!(submit(&mut device, 0, 1).is_durable, expected, "{engine}");
        device.on_marks(0, marks(1, 1), Seq(1));
        device.zero(2, 8, 1, false);
        assert_eq!(submit(&mut device, 0, 2).is_durable, expected, "{engine}");
    }
}

#[test]
fn p6_the_first_failure_fails_all_requests_now_and_later() {
    let mut device = device(2);
    device.write(1, 0, 1, 0, false);
    device.write(2, 1024, 1, 0, false);
    submit(&mut device, 0, 1);
    submit(&mut device, 1, 1);
    device.write(3, 1, 1, 0, false);
    assert!(matches!(device.next_work(0), Some(Work::Submit(_))), "it is being submitted");
    device.on_marks(1, marks(1, 0), Seq(0));
    assert_eq!(device.take_ended(), [done(2)]);
    device.flush(4);
    device.fail();
    assert!(device.has_failed());
    assert_eq!(device.take_ended(), [failed(1), failed(3), failed(4)]);
    device.on_submitted(0, Seq(2));
    for stream in 0..2 {
        device.on_marks(stream, marks(2, 2), Seq(2));
        assert_eq!(device.next_work(stream), None);
    }
    assert_eq!(device.take_ended(), [], "none of them is done after all");
    device.write(5, 0, 1, 0, true);
    device.zero(6, 0, 1, false);
    device.flush(7);
    assert_eq!(device.take_ended(), [failed(5), failed(6), failed(7)]);
    assert_eq!(device.in_flight(), 0);
}

// --- Random runs ---------------------------------------------------------------------------

const BLOCKS: u64 = 6 * STRIPE_BLOCKS;

/// The effect of a request on a range of blocks. The *version* of a block is the number of the request
/// that wrote or zeroed it last; requests have numbers from 1 in the order in which they came.
#[derive(Clone, Copy, Debug)]
struct Effect {
    lba: u64,
    blocks: u64,
    version: u64,
    is_zero: bool,
}

impl Effect {
    fn blocks(&self) -> std::ops::Range<u64> {
        self.lba..self.lba + self.blocks
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.lba < other.blocks().end && other.lba < self.blocks().end
    }
}

/// A stream, as far as a device sees it: groups become complete, durable and released in order.
#[derive(Debug, Default)]
struct Stream {
    groups: Vec<Effect>,
    complete: u64,
    durable: u64,
    released: u64,
    /// The group up to which a flush was asked for.
    asked: u64,
    /// The marks that the device has received.
    passed: (u64, u64, u64),
}

impl Stream {
    fn last(&self) -> u64 {
        self.groups.len() as u64
    }

    /// The version of a block after the groups up to `seq`.
    fn version(&self, block: u64, seq: u64) -> u64 {
        let groups = self.groups[..seq as usize].iter().rev();
        groups
            .clone()
            .find(|group| group.blocks().contains(&block))
            .map_or(0, |group| group.version)
    }

    /// Moves the marks as far as they may go, or randomly less far.
    fn advance(&mut self, random: &mut Random, all: bool) {
        let mut upto = |from: u64, to: u64| match all {
            true => to,
            false => from + random.below(to.saturating_sub(from) + 1),
        };
        self.complete = upto(self.complete, self.last());
        self.durable = upto(self.durable, self.asked.min(self.complete)).max(self.durable);
        self.released = upto(self.released, self.durable);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Change { is_fua: bool, is_zero: bool },
    Flush,
}

#[derive(Debug)]
struct Asked {
    kind: Kind,
    effect: Effect,
    /// For a flush: the changes that had ended before it came.
    covers: Vec<u64>,
}

struct World {
    device: PlainDevice<u64, u64>,
    random: Random,
    streams: Vec<Stream>,
    /// The most groups of a stream that are not released.
    space: u64,
    checker: OwnershipChecker,
    requests: BTreeMap<u64, Asked>,
    /// All changes so far.
    changes: BTreeMap<u64, Effect>,
    /// The changes that have ended as done.
    ended: BTreeSet<u64>,
    /// For each block, the version that the host may count on after a crash.
    confirmed: BTreeMap<u64, u64>,
    has_failed: bool,
    /// The streams that had no space. Their threads try again after a while.
    full: BTreeSet<usize>,
    next: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let streams = 1 + random.index(3);
        let space = 1 + random.below(12);
        Self {
            device: device(streams),
            random,
            streams: (0..streams).map(|_| Stream::default()).collect(),
            space,
            checker: OwnershipChecker::new(),
            requests: BTreeMap::new(),
            changes: BTreeMap::new(),
            ended: BTreeSet::new(),
            confirmed: BTreeMap::new(),
            has_failed: false,
            full: BTreeSet::new(),
            next: 1,
        }
    }

    /// Gives the device a request. Half of them are around the end of a range.
    fn ask(&mut self) {
        let (random, token) = (&mut self.random, self.next);
        self.next += 1;
        let at = match random.one_in(2) {
            true => (1 + random.below(5)) * STRIPE_BLOCKS - random.below(8),
            false => random.below(BLOCKS),
        };
        let is_zero = random.one_in(6);
        let most = match random.below(8) {
            0 => 600,
            1 if is_zero => BLOCKS,
            _ => 16,
        };
        let blocks = (1 + random.below(most)).min(BLOCKS - at);
        let is_fua = random.one_in(6);
        let effect = Effect { lba: at, blocks, version: token, is_zero };
        if random.one_in(8) {
            let covers = self.ended.iter().copied().collect();
            self.requests.insert(token, Asked { kind: Kind::Flush, effect, covers });
            self.device.flush(token);
        } else {
            let kind = Kind::Change { is_fua, is_zero };
            self.requests.insert(token, Asked { kind, effect, covers: Vec::new() });
            self.changes.insert(token, effect);
            match is_zero {
                true => self.device.zero(token, at, blocks, is_fua),
                false => self.device.write(token, at, blocks as u32, token, is_fua),
            }
        }
        self.judge();
    }

    /// Does one piece of the work of a stream. Returns whether there was any.
    fn work(&mut self, index: usize) -> bool {
        let Some(work) = self.device.next_work(index) else { return false };
        let stream = &mut self.streams[index];
        let part = match work {
            Work::MakeDurable(Seq(seq)) => {
                assert!(seq <= stream.last(), "the group was submitted");
                stream.asked = stream.asked.max(seq);
                return true;
            }
            Work::Submit(part) => part,
        };
        if stream.last() - stream.released >= self.space {
            // The library flushes before a log or its memory is full (traps T1, T14).
            stream.asked = stream.last();
            self.full.insert(index);
            self.device.on_no_space(index, part);
            return true;
        }
        assert!(part.blocks <= PART_BLOCKS_MAX);
        let seq = Seq(stream.last() + 1);
        let released: Vec<u64> = self.streams.iter().map(|stream| stream.released).collect();
        let (id, is_fresh) = (StreamId(index as u16), matches!(part.content, Content::Zeroes));
        self.checker
            .check_write(id, part.lba, part.blocks, is_fresh, |id| Seq(released[id.0 as usize]))
            .unwrap_or_else(|violation| panic!("{violation}"));
        self.checker.record_write(id, part.lba, part.blocks, seq);
        let stream = &mut self.streams[index];
        let (lba, blocks) = (part.lba, u64::from(part.blocks));
        // The oracle finds the request by the blocks and the content alone, where it can.
        let version = match part.content {
            Content::Data { data, first_block } => {
                let effect = self.requests[&data].effect;
                assert_eq!(lba, effect.lba + u64::from(first_block), "the right part of the data");
                data
            }
            Content::Zeroes => {
                let is_it = |asked: &Asked| {
                    matches!(asked.kind, Kind::Change { is_zero: true, .. })
                        && asked.effect.lba <= lba
                        && lba + blocks <= asked.effect.lba + asked.effect.blocks
                };
                // The oldest one whose blocks do not have it yet.
                let newer = |version: &u64| {
                    (lba..lba + blocks).any(|block| stream.version(block, stream.last()) < *version)
                };
                let open = self.requests.iter().filter(|(_, asked)| is_it(asked));
                open.map(|(version, _)| *version).find(newer).expect("zeroes were asked for")
            }
        };
        if part.is_durable {
            stream.asked = stream.last() + 1;
        }
        let effect = Effect { lba, blocks, version, is_zero: is_fresh };
        let mut unreleased = stream.groups[stream.released as usize..].iter();
        assert!(
            !unreleased.any(|group| group.is_zero && group.overlaps(&effect)),
            "{effect:?} would be undone with the zeroes before it"
        );
        stream.groups.push(effect);
        self.device.on_submitted(index, seq);
        true
    }

    /// Passes the marks of a stream to the device. Returns whether they have moved.
    fn pass_marks(&mut self, index: usize) -> bool {
        let stream = &mut self.streams[index];
        let passed = (stream.complete, stream.durable, stream.released);
        let has_moved = stream.passed != passed;
        stream.passed = passed;
        let marks = marks(stream.complete, stream.durable);
        self.device.on_marks(index, marks, Seq(stream.released));
        self.device.on_space(index);
        self.judge();
        has_moved
    }

    fn stream_of(&self, block: u64) -> &Stream {
        &self.streams[self.device.layout().stream_of(block)]
    }

    /// Judges the requests that have ended.
    fn judge(&mut self) {
        for Ended { token, is_done } in self.device.take_ended() {
            let asked = self.requests.remove(&token).expect("it ends once");
            assert_eq!(is_done, !self.has_failed, "{asked:?}");
            if !is_done {
                continue;
            }
            match asked.kind {
                Kind::Flush => {
                    for version in &asked.covers {
                        let effect = self.changes[version];
                        self.confirm(effect);
                    }
                }
                Kind::Change { is_fua, .. } => {
                    let effect = asked.effect;
                    for block in effect.blocks() {
                        let stream = self.stream_of(block);
                        let seen = stream.version(block, stream.complete);
                        assert!(seen >= token, "block {block} of {asked:?} is not complete");
                    }
                    self.ended.insert(token);
                    if is_fua {
                        self.confirm(effect);
                    }
                }
            }
        }
    }

    /// Notes that the host may count on these blocks after a crash.
    fn confirm(&mut self, effect: Effect) {
        for block in effect.blocks() {
            let confirmed = self.confirmed.entry(block).or_default();
            *confirmed = effect.version.max(*confirmed);
        }
        for block in effect.blocks() {
            self.check_crash(block);
        }
    }

    /// Checks a block after a crash that takes all that is not durable.
    fn check_crash(&self, block: u64) {
        let stream = self.stream_of(block);
        let (left, confirmed) = (stream.version(block, stream.durable), self.confirmed[&block]);
        assert!(left >= confirmed, "block {block} has version {left}, confirmed is {confirmed}");
    }

    fn step(&mut self) {
        let index = self.random.index(self.streams.len());
        match self.random.below(8) {
            0..2 => self.ask(),
            2..5 => drop(self.work(index)),
            5..7 => self.streams[index].advance(&mut self.random, false),
            _ => drop(self.pass_marks(index)),
        }
    }

    /// Lets everything end. Only a stream that was woken, or had no space, is checked for work.
    fn settle(&mut self) {
        for _ in 0..100_000 {
            if self.requests.is_empty() {
                return;
            }
            let mut has_moved = false;
            for index in 0..self.streams.len() {
                self.streams[index].advance(&mut self.random, true);
                has_moved |= self.pass_marks(index);
            }
            let mut due = self.device.take_to_wake();
            due.extend(core::mem::take(&mut self.full));
            assert!(has_moved || !due.is_empty(), "these hang: {:?}", self.requests);
            for index in due {
                while self.work(index) {}
            }
        }
        panic!("these take without end: {:?}", self.requests);
    }
}

#[test]
fn random_requests_keep_what_they_confirm_and_end() {
    for seed in 0..400 {
        let mut world = World::new(seed);
        for _ in 0..250 {
            world.step();
        }
        for &block in world.confirmed.keys() {
            world.check_crash(block);
        }
        world.settle();
        for &block in world.confirmed.keys() {
            world.check_crash(block);
        }
        assert!(world.next > 20 && !world.confirmed.is_empty(), "seed {seed} did something");
    }
}

#[test]
fn random_failures_end_every_request_once() {
    for seed in 1000..1200 {
        let mut world = World::new(seed);
        for _ in 0..world.random.below(200) {
            world.step();
        }
        world.has_failed = true;
        world.device.fail();
        world.judge();
        assert!(world.requests.is_empty(), "{:?}", world.requests);
        for _ in 0..50 {
            world.step();
        }
        assert!(world.requests.is_empty(), "{:?}", world.requests);
    }
}
