//! The groups that are written, all of them up to a bound.

use riopipe_order::engine::Place;

/// Blocks of a stripe unit: each of the two drives has one.
pub(crate) const UNIT: u64 = 64;
/// The block of each drive that is written in place.
const IN_PLACE: u64 = 0;
/// The block of each drive that is extended where nothing fresh was written yet.
const TAIL: u64 = 11;

/// One write of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Write {
    /// Block of the volume.
    pub(crate) lba: u64,
    pub(crate) content: u64,
    pub(crate) place: Place,
}

impl Write {
    pub(crate) fn drive(&self) -> u8 {
        (self.lba / UNIT) as u8
    }

    pub(crate) fn on_drive(&self) -> u64 {
        self.lba % UNIT
    }
}

/// One group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) writes: Vec<Write>,
    pub(crate) durable: bool,
    pub(crate) tag: u64,
}

/// A write: fresh on a drive, in place there, or over the last fresh block there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Fresh(u64),
    InPlace(u64),
    Extend(u64),
}
use Kind::{Extend, Fresh, InPlace};

/// The shapes of a group.
pub(crate) type Shapes = &'static [&'static [Kind]];

/// Groups of fresh writes and updates in place.
pub(crate) const UPDATES: Shapes = &[
    &[Fresh(0), Fresh(1)],
    &[Fresh(1)],
    &[InPlace(0)],
    &[Fresh(0)],
    &[Fresh(1), InPlace(0)],
    &[Fresh(0), Fresh(0)],
    &[InPlace(1)],
    &[InPlace(0), InPlace(1)],
];

/// Groups of a log whose last block is written again and again.
pub(crate) const EXTENSIONS: Shapes =
    &[&[Fresh(0)], &[Extend(0)], &[Extend(0), Fresh(1)], &[Extend(0), InPlace(0)]];

/// All workloads of exactly `groups` groups, each of one of these shapes, durable or not.
pub(crate) fn all(groups: u32, shapes: Shapes) -> impl Iterator<Item = Vec<Group>> {
    let kinds = 2 * shapes.len() as u64;
    (0..kinds.pow(groups)).map(move |mut number| {
        let (mut fresh, mut content) = ([IN_PLACE + 1; 2], 0);
        let mut workload = Vec::new();
        for tag in 1..=u64::from(groups) {
            let kind = number % kinds;
            number /= kinds;
            let mut writes = Vec::new();
            for write in shapes[(kind / 2) as usize] {
                content += 1;
                let (drive, block, place) = match *write {
                    InPlace(drive) => (drive, IN_PLACE, Place::InPlace),
                    Extend(drive) => {
                        let last = fresh[drive as usize] - 1;
                        let block = if last == IN_PLACE { TAIL } else { last };
                        (drive, block, Place::Extend)
                    }
                    Fresh(drive) => {
                        let at = &mut fresh[drive as usize];
                        *at += 1;
                        (drive, *at - 1, Place::Fresh)
                    }
                };
                writes.push(Write { lba: drive * UNIT + block, content, place });
            }
            workload.push(Group { writes, durable: kind % 2 == 1, tag });
        }
        workload
    })
}
