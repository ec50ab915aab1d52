//! The commands of a host to a drive that keeps an order, drawn from a seed.
//!
//! Streams dispatch epochs, one after the other and each as a whole. Each epoch, and each FLUSH,
//! goes into one of some queues. The queues reach the drive in any order among one another.

use riopipe_model::ssd::{FLASH, OPTANE, Order, Profile, Tables};
use riopipe_order::write_order::{DriveOrder, EpochId, EpochWrite, WriteOrder};
use riopipe_testkit::Random;

/// Flash whose cache can lose only the last few blocks.
const FORGIVING: Profile = Profile { losable_blocks: 4, ..FLASH };
/// The streams. The lower 7 bits of two are equal.
pub(crate) const STREAMS: [u16; 3] = [1, 129, 300];
/// Number of blocks that each stream writes, and that writes without an order write.
pub(crate) const REGION: u64 = 3;
/// Number of blocks of the drive.
pub(crate) const BLOCKS: u64 = REGION * (STREAMS.len() as u64 + 1);

/// A drive, and what is sent to it.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) profile: &'static Profile,
    pub(crate) order: Order,
    /// The number of the first epoch of each stream.
    pub(crate) first_epoch: u64,
    /// A block that can't be written.
    pub(crate) failing: Option<u64>,
    pub(crate) acts: Vec<Act>,
    /// The seed of the drive, and of the power cut.
    pub(crate) seed: u64,
}

#[derive(Debug, Clone)]
pub(crate) enum Act {
    Write(Write),
    Flush,
    /// A FLUSH of the epochs of a stream before this one.
    FlushEpochs {
        stream: u16,
        before: u64,
    },
    Wait {
        ns: u64,
    },
}

/// A write. `epochs` has its streams and epochs; on a drive with a cache barrier the stream is 0.
#[derive(Debug, Clone)]
pub(crate) struct Write {
    pub(crate) lba: u64,
    pub(crate) blocks: u64,
    pub(crate) epochs: Vec<(u16, u64)>,
    pub(crate) barrier: bool,
}

impl Write {
    pub(crate) fn order(&self) -> WriteOrder {
        let id = |&(stream, epoch): &(u16, u64)| EpochId { stream, epoch: epoch as u16 };
        match self.epochs[..] {
            [] => WriteOrder::Orderless,
            [(0, _)] => WriteOrder::Ordered { barrier: self.barrier },
            _ => WriteOrder::Epochs(EpochWrite {
                own: id(&self.epochs[0]),
                follower: self.epochs.get(1).map(id),
                barrier: self.barrier,
            }),
        }
    }
}

/// Number of queues.
const QUEUES: usize = 3;

/// A scenario of a drive with this order.
pub(crate) fn draw(kind: DriveOrder, seed: u64) -> Scenario {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let profile = [&FLASH, &FORGIVING, &FORGIVING, &OPTANE][random.index(4)];
    let small = Tables {
        streams: STREAMS.len(),
        epochs: 1 + random.below(3),
        entries: 1 + random.below(6),
    };
    let tables = if random.one_in(3) { Tables::PUBLISHED } else { small };
    let order = Order { tables, ..Order::of(kind, profile) };
    let first_epoch = if random.one_in(2) { 0 } else { 65_534 };
    let failing = random.one_in(6).then(|| random.below(BLOCKS));
    let mut acts = match kind {
        DriveOrder::Epochs => epochs(&mut random, first_epoch),
        DriveOrder::Barrier | DriveOrder::None => barriers(&mut random),
    };
    for _ in 0..acts.len() {
        let at = random.index(acts.len() + 1);
        let act = match random.below(6) {
            0 => Act::Flush,
            1 => Act::Write(orderless(&mut random)),
            2 | 3 => Act::Wait { ns: random.below(2_500_000) },
            _ => Act::Wait { ns: random.below(30_000) },
        };
        acts.insert(at, act);
    }
    Scenario { profile, order, first_epoch, failing, acts, seed }
}

/// A write of some blocks of a region.
fn extent(random: &mut Random, region: u64) -> (u64, u64) {
    let first = random.below(REGION);
    (region * REGION + first, 1 + random.below(REGION - first))
}

fn orderless(random: &mut Random) -> Write {
    let (lba, blocks) = extent(random, STREAMS.len() as u64);
    Write { lba, blocks, epochs: Vec::new(), barrier: false }
}

/// One sequence of epochs.
fn barriers(random: &mut Random) -> Vec<Act> {
    let mut acts = Vec::new();
    for epoch in 0..1 + random.below(8) {
        let writes = 1 + random.below(3);
        for index in 0..writes {
            let region = random.below(STREAMS.len() as u64);
            let (lba, blocks) = extent(random, region);
            let barrier = index == writes - 1;
            acts.push(Act::Write(Write { lba, blocks, epochs: vec![(0, epoch)], barrier }));
        }
    }
    acts
}

/// The epochs of several streams, which come over several queues.
fn epochs(random: &mut Random, first_epoch: u64) -> Vec<Act> {
    let mut next = [first_epoch; STREAMS.len()];
    let mut queues: [Vec<Act>; QUEUES] = Default::default();
    for _ in 0..2 + random.below(9) {
        let queue = random.index(QUEUES);
        let stream = random.index(STREAMS.len());
        if random.one_in(4) {
            let before = next[stream];
            queues[queue].push(Act::FlushEpochs { stream: STREAMS[stream], before });
            continue;
        }
        let follower = (stream + 1 + random.index(STREAMS.len() - 1)) % STREAMS.len();
        let own = (STREAMS[stream], next[stream]);
        let is_dual = random.one_in(3);
        let writes = 1 + random.below(3);
        for index in 0..writes {
            let (lba, blocks) = extent(random, stream as u64);
            let barrier = index == writes - 1;
            let mut epochs = vec![own];
            if is_dual && (barrier || random.one_in(2)) {
                epochs.push((STREAMS[follower], next[follower]));
            }
            queues[queue].push(Act::Write(Write { lba, blocks, epochs, barrier }));
        }
        next[stream] += 1;
        next[follower] += u64::from(is_dual);
    }
    merge(random, queues)
}

/// Merges queues in any order.
fn merge(random: &mut Random, queues: [Vec<Act>; QUEUES]) -> Vec<Act> {
    let mut queues = queues.map(|queue| queue.into_iter().peekable());
    let mut acts = Vec::new();
    while queues.iter_mut().any(|queue| queue.peek().is_some()) {
        // A queue often sends several of its commands in a row.
        let queue = random.index(QUEUES);
        acts.extend(queues[queue].by_ref().take(1 + random.index(4)));
    }
    acts
}
