//! The blocks of a volume that engine `horae` has redirected, and the reads of them.
//!
//! The newest content of a redirected block is in the prepare area of its drive. All streams and
//! readers of the volume in this process share the record, because each of them must read it there
//! (promise P9). Readers also note which part of the area they read. A stream uses blocks of its
//! part again only when no read of them is in flight.
//!
//! A drive that has failed a FLUSH may have lost blocks of the area, and then they have what another
//! block of the volume has held (trap T22). The owner may learn of that later than a reader reads
//! there. So the record has a checksum of each redirected block, and a reader compares.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use riopipe_nvme::digest::Crc32c;
use riopipe_order::attribute::{Member, Seq, StreamId};
use riopipe_order::engine::Redirection;
use riopipe_order::probe::{self, Rare};
use riopipe_order::topology::Extent;

use super::reading::ReadSlot;
use crate::wire::BLOCK_BYTES;

/// Access to the [`Redirections`] that the streams of a volume share. The program has the lock.
pub trait SharedRedirections: Send + Sync + core::fmt::Debug {
    /// Calls `change` while no other thread has access.
    fn with(&self, change: &mut dyn FnMut(&mut Redirections));
}

/// The place of the newest content of a redirected block.
#[derive(Clone, Copy, Debug)]
struct Place {
    stream: StreamId,
    /// The group and the index of the update.
    id: (Seq, u16),
    /// The block in the prepare area, on the drive.
    prepared_lba: u64,
    /// The CRC32C of the content. `None` if the drive cannot lose it.
    checksum: Option<u32>,
}

/// The redirected blocks of a volume, and the reads of the prepare area that are in flight.
#[derive(Debug, Default)]
pub struct Redirections {
    /// By member and block at home.
    places: BTreeMap<(Member, u64), Place>,
    /// The updates whose blocks in the area are being read, with the number of these reads.
    reads: BTreeMap<(StreamId, Seq), u32>,
    /// How often a stream has rolled back: places that were found before may not count any more.
    roll_backs: u64,
}

/// A part of an extent to read: adjacent blocks on the drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// The first block on the drive: at home, or in the prepare area.
    pub(super) lba: u64,
    pub(super) blocks: u32,
    /// The number of blocks of the extent before this part.
    pub(super) offset: u32,
    /// The checksums of the blocks, if they are in the prepare area; empty at home. `None`: the block
    /// need not be checked.
    pub(super) checksums: Vec<Option<u32>>,
}

impl Part {
    /// A whole extent at home.
    pub(super) const fn at_home(extent: &Extent) -> Self {
        Self { lba: extent.lba, blocks: extent.blocks, offset: 0, checksums: Vec::new() }
    }
}

/// The reads of the prepare area that belong to one read of a stream.
#[derive(Debug, Default)]
pub(super) struct AreaReads(Vec<(StreamId, Seq)>);

impl AreaReads {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Redirections {
    /// Makes a change of `stream`.
    pub(super) fn apply<P: AsRef<[u8]>>(
        &mut self,
        stream: StreamId,
        change: Redirection<P>,
        crc32c: Crc32c,
    ) {
        match change {
            Redirection::Prepared { id, member, lba, prepared_lba, blocks, pieces } => {
                // A commit has the payload of a durable update. No drive loses that one.
                let mut contents =
                    pieces.iter().flat_map(|piece| piece.as_ref().chunks(BLOCK_BYTES));
                for at in 0..u64::from(blocks) {
                    let content = contents.next();
                    // A block passes to another stream only when the update of the last one is
                    // home (trap T15).
                    let known = self.places.get(&(member, lba + at));
                    if known.is_none_or(|known| known.stream != stream || known.id < id) {
                        let checksum = content.map(|content| crc32c(0, content));
                        let place = Place { stream, id, prepared_lba: prepared_lba + at, checksum };
                        self.places.insert((member, lba + at), place);
                    }
                }
            }
            Redirection::Home(up_to) => {
                self.places.retain(|_, place| place.stream != stream || place.id.0 > up_to);
            }
            Redirection::RolledBack(durable) => {
                self.places.retain(|_, place| place.stream != stream || place.id.0 <= durable);
                self.roll_backs += 1;
            }
        }
    }

    /// Forgets what a stream has redirected: its logs have been recovered, so that the updates of
    /// its prefix are home and the others are rolled back.
    pub fn forget(&mut self, stream: StreamId) {
        self.places.retain(|_, place| place.stream != stream);
        self.roll_backs += 1;
    }

    /// Splits an extent that is to be read into parts at home and parts in the prepare area, and
    /// notes the latter in `reads` until [`end_reads`](Self::end_reads).
    pub(super) fn begin_read(&mut self, extent: &Extent, reads: &mut AreaReads) -> Vec<Part> {
        let Extent { member, lba, blocks, .. } = *extent;
        let end = lba + u64::from(blocks);
        let redirected = self.places.range((member, lba)..(member, end));
        let mut redirected = redirected.map(|((_, block), place)| (*block, *place)).peekable();
        let mut parts: Vec<Part> = Vec::new();
        for block in lba..end {
            let place = redirected.next_if(|(at, _)| *at == block).map(|(_, place)| place);
            if let Some(Place { stream, id, .. }) = place {
                probe::count_rare(Rare::RedirectedRead);
                let read = (stream, id.0);
                if reads.0.last() != Some(&read) {
                    reads.0.push(read);
                    *self.reads.entry(read).or_default() += 1;
                }
            }
            let at = place.map_or(block, |place| place.prepared_lba);
            let checksum = place.map(|place| place.checksum);
            match parts.last_mut() {
                Some(part)
                    if part.lba + u64::from(part.blocks) == at
                        && part.checksums.is_empty() == checksum.is_none() =>
                {
                    part.blocks += 1;
                    part.checksums.extend(checksum);
                }
                _ => parts.push(Part {
                    lba: at,
                    blocks: 1,
                    offset: (block - lba) as u32,
                    checksums: checksum.into_iter().collect(),
                }),
            }
        }
        parts
    }

    /// Notes that reads of the prepare area have ended.
    pub(super) fn end_reads(&mut self, reads: &mut AreaReads) {
        for read in reads.0.drain(..) {
            if let Some(count) = self.reads.get_mut(&read) {
                *count -= 1;
                if *count == 0 {
                    self.reads.remove(&read);
                }
            }
        }
    }

    /// The oldest group of a stream of which the prepare area is being read.
    pub(super) fn oldest_read(&self, stream: StreamId) -> Option<Seq> {
        let mut of_stream = self.reads.range((stream, Seq::ZERO)..=(stream, Seq(u64::MAX)));
        of_stream.next().map(|((_, seq), _)| *seq)
    }
}

/// A stream's access to the redirections of its volume.
#[derive(Debug)]
pub(super) struct RedirectionAccess {
    shared: Arc<dyn SharedRedirections>,
    /// The reads of the prepare area that are in flight in this stream, by slot.
    reads: BTreeMap<u16, AreaReads>,
    pub(super) crc32c: Crc32c,
}

impl RedirectionAccess {
    pub(super) fn new(shared: Arc<dyn SharedRedirections>, crc32c: Crc32c) -> Self {
        Self { shared, reads: BTreeMap::new(), crc32c }
    }

    /// How often streams have rolled back.
    pub(super) fn count_roll_backs(&self) -> u64 {
        let mut count = 0;
        self.shared.with(&mut |redirections| count = redirections.roll_backs);
        count
    }

    pub(super) fn with(&self, change: &mut dyn FnMut(&mut Redirections)) {
        self.shared.with(change);
    }

    /// The parts of an extent that the read of a slot is to read. Its reads of the area count until
    /// [`end_reads`](Self::end_reads).
    pub(super) fn begin_read(&mut self, slot: ReadSlot, extent: &Extent) -> Vec<Part> {
        let mut area_reads = self.reads.remove(&slot.0).unwrap_or_default();
        let mut parts = Vec::new();
        let begin = &mut |redirections: &mut Redirections| {
            parts = redirections.begin_read(extent, &mut area_reads);
        };
        self.shared.with(begin);
        if !area_reads.is_empty() {
            self.reads.insert(slot.0, area_reads);
        }
        parts
    }

    /// Notes that the reads of the prepare area have ended for each slot that is not in flight.
    pub(super) fn end_reads(&mut self, is_in_flight: impl Fn(ReadSlot) -> bool) {
        let Self { shared, reads, .. } = self;
        reads.retain(|slot, area_reads| {
            let stays = is_in_flight(ReadSlot(*slot));
            if !stays {
                shared.with(&mut |redirections| redirections.end_reads(area_reads));
            }
            stays
        });
    }
}

impl Drop for RedirectionAccess {
    fn drop(&mut self) {
        self.end_reads(|_| false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: StreamId = StreamId(0);
    const B: StreamId = StreamId(1);

    /// An update whose blocks have the contents `seq`, `seq` + 1, and so on.
    fn prepared(seq: u64, lba: u64, prepared_lba: u64, blocks: u32) -> Redirection<Vec<u8>> {
        let contents = (seq..).take(blocks as usize);
        let pieces = contents.map(|content| [content as u8; BLOCK_BYTES].to_vec()).collect();
        let (id, member) = ((Seq(seq), 0), Member(0));
        Redirection::Prepared { id, member, lba, prepared_lba, blocks, pieces }
    }

    /// Checksums that name the contents.
    fn first_byte(_: u32, block: &[u8]) -> u32 {
        block[0].into()
    }

    impl Redirections {
        fn note(&mut self, stream: StreamId, change: Redirection<Vec<u8>>) {
            self.apply(stream, change, first_byte);
        }
    }

    fn read(redirections: &mut Redirections, lba: u64, blocks: u32) -> (Vec<Part>, AreaReads) {
        let mut reads = AreaReads::default();
        let extent = Extent { member: Member(0), lba, blocks, offset: 0 };
        (redirections.begin_read(&extent, &mut reads), reads)
    }

    /// A part at home.
    fn part(lba: u64, blocks: u32, offset: u32) -> Part {
        Part { lba, blocks, offset, checksums: Vec::new() }
    }

    /// A part in the prepare area, of blocks with these checksums.
    fn redirected<const BLOCKS: usize>(lba: u64, checksums: [u32; BLOCKS], offset: u32) -> Part {
        let checksums = checksums.map(Some).to_vec();
        Part { lba, blocks: BLOCKS as u32, offset, checksums }
    }

    #[test]
    fn p9_a_read_that_straddles_redirected_blocks_finds_each_where_it_is() {
        let mut redirections = Redirections::default();
        redirections.note(A, prepared(1, 102, 8, 2));
        redirections.note(A, prepared(2, 103, 10, 1));
        redirections.note(B, prepared(1, 106, 20, 1));
        let (parts, _) = read(&mut redirections, 100, 8);
        let expected = [
            part(100, 2, 0),
            redirected(8, [1], 2),
            redirected(10, [2], 3),
            part(104, 2, 4),
            redirected(20, [1], 6),
            part(107, 1, 7),
        ];
        assert_eq!(parts, expected);
    }

    #[test]
    fn adjacent_blocks_at_home_and_in_the_area_are_parts_of_their_own() {
        let mut redirections = Redirections::default();
        redirections.note(A, prepared(1, 20, 8, 2));
        redirections.note(A, prepared(2, 22, 12, 1));
        redirections.note(A, prepared(3, 24, 23, 1));
        let expected = [
            redirected(8, [1, 2], 0),
            redirected(12, [2], 2),
            part(23, 1, 3),
            redirected(23, [3], 4),
            part(25, 1, 5),
        ];
        assert_eq!(read(&mut redirections, 20, 6).0, expected);
    }

    #[test]
    fn p9_the_newest_update_counts_whatever_ends_first() {
        let mut redirections = Redirections::default();
        redirections.note(A, prepared(3, 7, 12, 1));
        redirections.note(A, prepared(2, 7, 11, 1));
        assert_eq!(read(&mut redirections, 7, 1).0, [redirected(12, [3], 0)]);
        redirections.note(A, Redirection::Home(Seq(2)));
        assert_eq!(read(&mut redirections, 7, 1).0, [redirected(12, [3], 0)]);
        redirections.note(A, Redirection::Home(Seq(3)));
        assert_eq!(read(&mut redirections, 7, 1).0, [part(7, 1, 0)]);
    }

    #[test]
    fn p9_the_area_is_free_when_its_reads_have_ended() {
        let mut redirections = Redirections::default();
        redirections.note(A, prepared(3, 7, 12, 1));
        redirections.note(A, prepared(5, 9, 13, 1));
        let (_, mut first) = read(&mut redirections, 7, 3);
        let (_, mut second) = read(&mut redirections, 9, 1);
        assert_eq!(redirections.oldest_read(A), Some(Seq(3)));
        assert_eq!(redirections.oldest_read(B), None);
        redirections.end_reads(&mut first);
        assert_eq!(redirections.oldest_read(A), Some(Seq(5)));
        redirections.end_reads(&mut second);
        assert_eq!(redirections.oldest_read(A), None);
    }

    #[test]
    fn p9_a_failed_stream_leaves_only_what_is_durable() {
        let mut redirections = Redirections::default();
        redirections.note(A, prepared(1, 7, 11, 1));
        redirections.note(A, prepared(2, 7, 12, 1));
        redirections.note(A, prepared(3, 8, 13, 1));
        redirections.note(B, prepared(5, 9, 20, 1));
        redirections.note(A, Redirection::RolledBack(Seq(1)));
        redirections.note(A, prepared(1, 7, 11, 1));
        let expected = [redirected(11, [1], 0), part(8, 1, 1), redirected(20, [5], 2)];
        assert_eq!(read(&mut redirections, 7, 3).0, expected);
    }

    #[test]
    fn what_a_recovered_stream_had_redirected_is_forgotten() {
        let mut redirections = Redirections::default();
        redirections.note(A, prepared(3, 7, 12, 1));
        redirections.note(B, prepared(3, 8, 20, 1));
        redirections.forget(A);
        assert_eq!(read(&mut redirections, 7, 2).0, [part(7, 1, 0), redirected(20, [3], 1)]);
    }
}
