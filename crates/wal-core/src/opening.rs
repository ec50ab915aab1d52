//! Opening: finding the end of a log after a crash.
//!
//! ```text
//! the volume's tag → one block near the end
//! no tag, or the block is not there → binary search → one block near the end
//! that block → the last block that was durable when it was written → the chain from there → the end
//! → a check that no later block shows that the log was longer
//! ```
//!
//! After a crash the ring holds a prefix of the blocks written to it (promise P1). If the tag of
//! the stream's last group gives the end, one read confirms the end. Otherwise a binary search over
//! the headers finds a block of the log. The chain of blocks is then followed from the last block
//! that was durable when the found block was written.
//!
//! Engine `sync` may leave a hole in its last group. The log ends at such a hole, and blocks behind
//! the hole do not belong to the log.

use alloc::vec;

use riopipe_order::probe::{Plant, is_bug_planted};

use crate::format::{Anchor, BlockError, Header};
use crate::ring::Ring;
use crate::{BLOCK_BYTES, Crc32c, Lsn};

/// The end of a log, and the state in its last block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The number of the next block.
    pub number: u64,
    /// The Lsn of its first byte.
    pub lsn: Lsn,
    /// The epoch of the block before.
    pub epoch: u64,
    /// Records below this Lsn are dropped.
    pub trim: Lsn,
    /// The block that holds the byte `trim`.
    pub oldest: u64,
    /// The last checkpoint, unless it is dropped.
    pub checkpoint: Option<Lsn>,
    /// All blocks below this number were durable when the last one was written.
    pub settled: u64,
}

impl End {
    /// The end of a log that has just [begun](crate::format::begin).
    #[must_use]
    pub fn of_new(epoch: u64) -> Self {
        let (lsn, trim) = (Lsn::ZERO, Lsn::ZERO);
        Self { number: 1, lsn, epoch, trim, oldest: 0, checkpoint: None, settled: 1 }
    }

    /// The numbers of the blocks that were read after a crash, and that a power cut may still
    /// destroy unless the volume's recovery has flushed its drives. They are written again, and
    /// made durable, before any block behind them is written.
    #[must_use]
    pub fn unsettled(&self) -> core::ops::Range<u64> {
        self.settled..self.number
    }

    /// The blocks to be written again, in this order, for the reason given at
    /// [`unsettled`](Self::unsettled). The anchor is one of them as long as no block of the log shows that the log's creation was
    /// durable, because a crash may have interrupted the creation.
    pub fn to_settle(&self) -> impl Iterator<Item = Unsettled> + use<> {
        let anchor = (self.settled == 0).then_some(Unsettled::Anchor);
        let blocks = self.unsettled().map(Unsettled::Block);
        anchor.into_iter().chain(blocks).filter(|_| !is_bug_planted(Plant::W7NotSettled))
    }

    /// The end of a log whose last block has this header.
    fn after(last: &Header) -> Self {
        Self {
            number: last.number + 1,
            lsn: last.end(),
            epoch: last.epoch,
            trim: last.trim,
            oldest: last.oldest,
            checkpoint: last.checkpoint.filter(|lsn| *lsn >= last.trim),
            settled: last.settled,
        }
    }
}

/// A block that opening has read, and that is written again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsettled {
    /// The log's anchor.
    Anchor,
    /// The block with this number.
    Block(u64),
}

impl Unsettled {
    /// The volume block that holds it. `anchor` is the volume block of the log's anchor.
    #[must_use]
    pub fn lba(self, anchor: u64, ring: Ring) -> u64 {
        match self {
            Self::Anchor => anchor,
            Self::Block(number) => ring.lba(number),
        }
    }
}

/// Checks each block just before it is written again. A drive may have lost the content of the
/// block since opening has read it, because a FLUSH of another stream has failed.
#[derive(Clone, Copy, Debug)]
pub struct Settling {
    end: End,
    log: u64,
    crc: Crc32c,
    /// The header of the block that was checked last.
    last: Option<Header>,
}

/// A block is not the one that opening has read. No record that was reported durable is lost. The
/// log must be opened again, and ends earlier then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a drive has lost what was found of the log and had not been durable: open the log again, it ends \
     earlier then"
)]
pub struct Changed;

impl Settling {
    /// The check of the blocks of a log that ends at `end`, before the first of them.
    #[must_use]
    pub fn new(end: End, log: u64, crc: Crc32c) -> Self {
        Self { end, log, crc, last: None }
    }

    /// Checks the next block of [`End::to_settle`], whose content was read again.
    ///
    /// # Errors
    /// [`Changed`].
    pub fn check(&mut self, unsettled: Unsettled, content: &[u8]) -> Result<(), Changed> {
        match unsettled {
            Unsettled::Anchor => self.check_anchor(content),
            Unsettled::Block(number) => self.check_block(number, content),
        }
    }

    fn check_anchor(&self, content: &[u8]) -> Result<(), Changed> {
        let anchor = Anchor::parse(content, self.crc).map_err(|_| Changed)?;
        if anchor.log == self.log { Ok(()) } else { Err(Changed) }
    }

    fn check_block(&mut self, number: u64, content: &[u8]) -> Result<(), Changed> {
        let header = Header::parse(content, self.log, self.crc).map_err(|_| Changed)?;
        let continues = self.last.is_none_or(|last| header.comes_after(&last));
        let is_last = number + 1 == self.end.number;
        let fits_end = !is_last || (header.end(), header.epoch) == (self.end.lsn, self.end.epoch);
        self.last = Some(header);
        if header.number == number && continues && fits_end { Ok(()) } else { Err(Changed) }
    }
}

/// The reason why the end of a log can't be determined. `E` is the error of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FindError<E> {
    /// A read failed.
    #[error(transparent)]
    Read(#[from] E),
    /// No block of the ring belongs to the log, and nothing shows that one ever did: a crash has
    /// interrupted its creation.
    #[error("the creation of the log was interrupted")]
    CreationCut,
    /// No block of the ring belongs to the log any more: all of them are damaged.
    #[error("all blocks of the log are lost or damaged")]
    Lost,
    /// A block is damaged, though later blocks, or the volume's tag, show that it was durable.
    #[error(
        "block {number} of the log was durable and can't be read as such any more: the records from \
         there on are lost or damaged"
    )]
    Damaged {
        /// Number of the block.
        number: u64,
    },
}

/// Number of blocks per read in a scan.
const READ_BLOCKS: u64 = 32;

/// Reads consecutive blocks of the ring, never beyond its end. Arguments: the first block's place
/// in the ring, and the destination.
pub type Read<'a, E> = dyn FnMut(u64, &mut [u8]) -> Result<(), E> + 'a;

/// Finds the end of a log.
///
/// `tag` is the caller's tag of the last group that the volume's recovery found, if there is one:
/// the number of the block after that group.
///
/// # Errors
/// [`FindError`].
pub fn find_end<E>(
    ring: Ring,
    log: u64,
    crc: Crc32c,
    tag: Option<u64>,
    read: &mut Read<'_, E>,
) -> Result<End, FindError<E>> {
    let mut search = Search { ring, log, crc, read };
    let known = match search.find_tagged_block(tag)? {
        Some(header) => header,
        None => search.find_newest_block(tag)?,
    };
    let end = search.follow_chain(&known)?;
    if tag.is_some_and(|tag| end.number < tag) {
        return Err(FindError::Damaged { number: end.number });
    }
    if tag != Some(end.number) {
        search.check_end(end.number)?;
    }
    Ok(end)
}

/// The search for the end of one log.
struct Search<'a, 'b, E> {
    ring: Ring,
    log: u64,
    crc: Crc32c,
    read: &'a mut Read<'b, E>,
}

impl<E> Search<'_, '_, E> {
    /// The header of the last block of the group with this tag, if the block is in its place.
    fn find_tagged_block(&mut self, tag: Option<u64>) -> Result<Option<Header>, FindError<E>> {
        match tag.and_then(|tag| tag.checked_sub(1)) {
            Some(number) => self.read_header(number),
            None => Ok(None),
        }
    }

    /// The header of a block near the end of the log. If the ring has no block of the log, the
    /// error is the reason.
    fn find_newest_block(&mut self, tag: Option<u64>) -> Result<Header, FindError<E>> {
        if let Some(header) = self.search_newest_lap()? {
            return Ok(header);
        }
        if tag.is_none() && self.was_creation_interrupted()? {
            return Err(FindError::CreationCut);
        }
        Err(FindError::Lost)
    }

    /// The header of block `number`, if that block is in its place.
    fn read_header(&mut self, number: u64) -> Result<Option<Header>, FindError<E>> {
        let found = self.read_header_at(number % self.ring.blocks())?;
        Ok(found.filter(|header| header.number == number))
    }

    /// The header of the block of this log in this place of the ring, if there is one.
    fn read_header_at(&mut self, place: u64) -> Result<Option<Header>, FindError<E>> {
        let mut block = [0; BLOCK_BYTES];
        (self.read)(place, &mut block)?;
        Ok(self.parse_header(place, &block))
    }

    /// The header of a block in this place of the ring, if it is a possible block of this log.
    fn parse_header(&self, place: u64, block: &[u8]) -> Option<Header> {
        let header = Header::parse(block, self.log, self.crc).ok()?;
        let (blocks, window) = (self.ring.blocks(), self.ring.window());
        let is_ours = header.number % blocks == place
            && header.number - header.oldest < blocks
            && header.number - header.settled <= window;
        is_ours.then_some(header)
    }

    /// Whether a crash may have interrupted the creation of this log, of which no block was found.
    /// In that case block 0 was never written, so its place does not even have a damaged block of a
    /// log.
    fn was_creation_interrupted(&mut self) -> Result<bool, FindError<E>> {
        let mut block = [0; BLOCK_BYTES];
        (self.read)(0, &mut block)?;
        let found = Header::parse(&block, self.log, self.crc);
        Ok(matches!(found, Err(BlockError::Blank | BlockError::Foreign(_))))
    }

    /// The header of a block near the end of the log, if the ring has a block of the log. Samples
    /// of a few places show the newest lap. A binary search then finds the last block of that lap.
    fn search_newest_lap(&mut self) -> Result<Option<Header>, FindError<E>> {
        const SAMPLES: u64 = 8;
        let blocks = self.ring.blocks();
        let mut newest: Option<Header> = None;
        for sample in 0..SAMPLES {
            newest = newer(newest, self.read_header_at(blocks * sample / SAMPLES)?);
        }
        if newest.is_none() {
            // The log is new, and a crash has undone its first blocks, or the log is damaged.
            self.scan(0, blocks, &mut |_, header| {
                newest = newer(newest, header);
                true
            })?;
        }
        let Some(mut last) = newest else { return Ok(None) };
        let mut beyond = last.number + blocks;
        while beyond - last.number > 1 {
            let middle = last.number + (beyond - last.number) / 2;
            match self.read_header(middle)? {
                Some(header) => last = header,
                None => beyond = middle,
            }
        }
        Ok(Some(last))
    }

    /// Follows the chain of blocks to its end, from the last block that was durable when `known`
    /// was written.
    fn follow_chain(&mut self, known: &Header) -> Result<End, FindError<E>> {
        let first = known.settled.saturating_sub(1);
        let mut last = self.read_header(first)?.ok_or(FindError::Damaged { number: first })?;
        let blocks = self.ring.blocks();
        self.scan(first + 1, blocks, &mut |_, header| {
            let next = header.filter(|header| header.comes_after(&last));
            last = next.unwrap_or(last);
            next.is_some()
        })?;
        Ok(End::after(&last))
    }

    /// Checks that no block behind the end shows that block `end` was durable. Otherwise block
    /// `end` is damaged, and the log does not end before it.
    fn check_end(&mut self, end: u64) -> Result<(), FindError<E>> {
        let mut is_damaged = false;
        self.scan(end + 1, self.ring.window(), &mut |number, header| {
            is_damaged =
                header.is_some_and(|header| header.number == number && header.settled > end);
            !is_damaged
        })?;
        if is_damaged { Err(FindError::Damaged { number: end }) } else { Ok(()) }
    }

    /// Reads the places of `count` blocks from block `number` on, until `keep_reading` returns
    /// false. `keep_reading` gets the number of each block, and the header in its place, if there
    /// is one.
    fn scan(
        &mut self,
        number: u64,
        count: u64,
        keep_reading: &mut dyn FnMut(u64, Option<Header>) -> bool,
    ) -> Result<(), FindError<E>> {
        let mut bytes = vec![0; READ_BLOCKS as usize * BLOCK_BYTES];
        let (mut next, end) = (number, number + count);
        while next < end {
            let place = next % self.ring.blocks();
            let run = READ_BLOCKS.min(end - next).min(self.ring.blocks() - place);
            let run_bytes = &mut bytes[..run as usize * BLOCK_BYTES];
            (self.read)(place, run_bytes)?;
            for (block, number) in run_bytes.chunks_exact(BLOCK_BYTES).zip(next..) {
                let header = self.parse_header(number % self.ring.blocks(), block);
                if !keep_reading(number, header) {
                    return Ok(());
                }
            }
            next += run;
        }
        Ok(())
    }
}

/// Of two headers, the one with the larger number.
fn newer(one: Option<Header>, other: Option<Header>) -> Option<Header> {
    one.into_iter().chain(other).max_by_key(|header| header.number)
}
