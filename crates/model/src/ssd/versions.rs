//! The contents of a drive that keeps an order: each block's newest content in its place, and the
//! contents beneath it that a power cut may restore.
//!
//! ```text
//! a block:  durable ─▶ version ─▶ … ─▶ newest version
//!                                      in its place
//! ```

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use super::{ExchangeError, Pages, PowerCut};

/// The number of a version: versions are numbered as their writes complete.
pub(super) type VersionId = u64;

/// The blocks of a drive, and the versions of those that have contents which are not durable. `T`
/// is the place of a version in the order of the drive.
pub(super) struct Versions<P: Pages, T> {
    pages: P,
    /// The blocks with versions.
    blocks: BTreeMap<u64, Block<P::Page, T>>,
    /// The number of the next version.
    next: VersionId,
}

/// A block with versions.
struct Block<Page, T> {
    /// The durable content; `None` if it is in the block's place.
    durable: Option<Page>,
    /// The versions over it, each to be durable after those before it.
    versions: Vec<Version<Page, T>>,
}

/// A content of a block that is not durable.
struct Version<Page, T> {
    id: VersionId,
    /// The content; `None` if it is in the block's place.
    page: Option<Page>,
    place: T,
}

impl<P: Pages, T: Copy> Versions<P, T> {
    pub(super) const fn new(pages: P) -> Self {
        Self { pages, blocks: BTreeMap::new(), next: 0 }
    }

    pub(super) const fn pages(&self) -> &P {
        &self.pages
    }

    pub(super) const fn pages_mut(&mut self) -> &mut P {
        &mut self.pages
    }

    /// The number that the next version gets.
    pub(super) const fn next_id(&self) -> VersionId {
        self.next
    }

    /// Puts a new version of a block over its other ones, or beneath those for which `is_later`
    /// holds.
    ///
    /// # Errors
    /// Nothing has changed, and `page` still belongs to the caller.
    pub(super) fn put(
        &mut self,
        lba: u64,
        page: P::Page,
        place: T,
        is_later: impl Fn(&T) -> bool,
    ) -> Result<VersionId, ExchangeError> {
        let id = self.next;
        if let Some(block) = self.blocks.get_mut(&lba)
            && let Some(at) = block.versions.iter().position(|version| is_later(&version.place))
        {
            block.versions.insert(at, Version { id, page: Some(page), place });
        } else {
            let old = self.pages.exchange(lba, page, true)?;
            let block = self.blocks.entry(lba).or_insert_with(Block::empty);
            match block.versions.last_mut() {
                Some(newest) => newest.page = Some(old),
                None => block.durable = Some(old),
            }
            block.versions.push(Version { id, page: None, place });
        }
        self.next += 1;
        Ok(id)
    }

    /// Puts the version of a write that was in flight when the power was cut. No block
    /// has it before [`settle`](Self::settle).
    pub(super) fn land(
        &mut self,
        lba: u64,
        page: P::Page,
        place: T,
        is_later: impl Fn(&T) -> bool,
    ) -> VersionId {
        let id = self.next;
        let block = self.blocks.entry(lba).or_insert_with(Block::empty);
        let later = block.versions.iter().position(|version| is_later(&version.place));
        let at = later.unwrap_or(block.versions.len());
        block.versions.insert(at, Version { id, page: Some(page), place });
        self.next += 1;
        id
    }

    /// Makes a version durable, and with it the block: what was beneath the version is forgotten.
    /// A version that is no longer known has a durable one over it.
    pub(super) fn make_durable(&mut self, lba: u64, id: VersionId) {
        let Some(block) = self.blocks.get_mut(&lba) else { return };
        let Some(at) = block.versions.iter().position(|version| version.id == id) else { return };
        let older = block.durable.take();
        let mut beneath: Vec<_> = block.versions.drain(..=at).map(|version| version.page).collect();
        // The last one that was drained is the version itself.
        block.durable = beneath.pop().flatten();
        let is_done = block.versions.is_empty();
        for page in older.into_iter().chain(beneath.into_iter().flatten()) {
            self.pages.release(page);
        }
        if is_done {
            self.blocks.remove(&lba);
        }
    }

    /// Removes a version, as if it had never been written.
    pub(super) fn lose(&mut self, lba: u64, id: VersionId) {
        let Some(block) = self.blocks.get_mut(&lba) else { return };
        let Some(at) = block.versions.iter().position(|version| version.id == id) else { return };
        match block.versions.remove(at).page {
            Some(page) => self.pages.release(page),
            // It was in the block's place, so it was the newest one. The content beneath it takes
            // the place.
            None => {
                let beneath = match block.versions.last_mut() {
                    Some(newest) => newest.page.take(),
                    None => block.durable.take(),
                };
                if let Some(page) = beneath {
                    Self::put_in_place(&mut self.pages, lba, page);
                }
            }
        }
        if self.blocks.get(&lba).is_some_and(|block| block.versions.is_empty()) {
            self.blocks.remove(&lba);
        }
    }

    /// The newest version of each block that has versions.
    pub(super) fn newest(&self) -> BTreeMap<u64, VersionId> {
        let newest = |block: &Block<P::Page, T>| block.versions.last().map(|version| version.id);
        self.blocks.iter().filter_map(|(lba, block)| Some((*lba, newest(block)?))).collect()
    }

    /// The contents of a block beneath its newest one, oldest first.
    pub(super) fn older_contents(&self, lba: u64) -> impl Iterator<Item = P::Page> {
        self.blocks.get(&lba).into_iter().flat_map(|block| {
            block.durable.into_iter().chain(block.versions.iter().filter_map(|v| v.page))
        })
    }

    /// Ends a power cut: of each block the uppermost version that `survives` is durable, or the
    /// durable content if none does. `newest` has the newest versions before the cut, and
    /// `landed_from` is the number of the first version that was in flight.
    pub(super) fn settle(
        &mut self,
        survives: impl Fn(VersionId) -> bool,
        newest: &BTreeMap<u64, VersionId>,
        landed_from: VersionId,
    ) -> PowerCut {
        let mut cut = PowerCut::default();
        for (lba, mut block) in core::mem::take(&mut self.blocks) {
            let at = block.versions.iter().rposition(|version| survives(version.id));
            let (winner, kept) = match at {
                Some(at) => (Some(block.versions[at].id), block.versions[at].page.take()),
                None => (None, block.durable.take()),
            };
            let was_newest = newest.get(&lba).copied();
            match winner {
                Some(id) if id >= landed_from => cut.blocks_landed += 1,
                Some(id) if Some(id) == was_newest => cut.blocks_kept += 1,
                _ => cut.blocks_lost += u64::from(was_newest.is_some()),
            }
            let rest = block.versions.into_iter().filter_map(|version| version.page);
            for page in block.durable.into_iter().chain(rest) {
                self.pages.release(page);
            }
            if let Some(page) = kept {
                Self::put_in_place(&mut self.pages, lba, page);
            }
        }
        cut
    }

    /// Replaces the content in a block's place. A block that can't be written keeps its content.
    fn put_in_place(pages: &mut P, lba: u64, page: P::Page) {
        let unneeded = pages.exchange(lba, page, false).unwrap_or(page);
        pages.release(unneeded);
    }
}

impl<Page, T> Block<Page, T> {
    const fn empty() -> Self {
        Self { durable: None, versions: vec![] }
    }
}
