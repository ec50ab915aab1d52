//! The kernel's cache of mapped files. A store changes a page there. It reaches the file system as
//! a write of the whole page, at any later time, in any order.

use std::collections::BTreeMap;

use riopipe_fs_core::fs::Fs;
use riopipe_fs_core::{BLOCK_BYTES, Block, Ino};
use riopipe_fs_testkit::path::resolve;

use super::NOW;
use super::program::{Change, root};

/// When the pages of a store are written back, at the latest. A sync of the file writes them first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Back {
    /// At once, in the order of the stores.
    InOrder,
    /// At once, the last one first.
    Reversed,
    /// The last one at once, and the first one after the next change.
    Split,
    /// After the next change.
    Later,
}

/// A page: the number of the inode, and the offset in bytes.
type Page = (u32, u64);

/// The dirty pages.
#[derive(Debug, Default)]
pub(crate) struct Mapped {
    dirty: BTreeMap<Page, (u32, Box<Block>)>,
    /// The pages of the last store, in their order.
    stored: Vec<Page>,
}

/// The bytes of a page below the end of the file.
fn len_in(size: u64, at: u64) -> usize {
    size.saturating_sub(at).min(BLOCK_BYTES as u64) as usize
}

impl Mapped {
    /// All dirty pages.
    pub(crate) fn all(&self) -> Vec<Page> {
        self.dirty.keys().copied().collect()
    }

    /// The dirty pages of a file.
    pub(crate) fn of(&self, ino: Ino) -> Vec<Page> {
        self.dirty.keys().copied().filter(|page| page.0 == ino.0).collect()
    }

    /// The pages of the last store that are written back at once; the last one is the first.
    pub(crate) fn chosen(&self, back: Back) -> Vec<Page> {
        let mut pages = self.stored.clone();
        match back {
            Back::InOrder => pages.reverse(),
            Back::Reversed => {}
            Back::Split => drop(pages.drain(..pages.len().saturating_sub(1))),
            Back::Later => pages.clear(),
        }
        pages
    }

    /// Stores into the first two pages of a file. Returns whether it has such pages.
    pub(crate) fn store(&mut self, fs: &Fs, path: &str, number: usize, _: Back) -> bool {
        self.stored.clear();
        let Ok(ino) = resolve(fs, path) else { return false };
        let Ok(attr) = fs.attr(ino) else { return false };
        if attr.mode & 0xf000 != 0x8000 || attr.size == 0 {
            return false;
        }
        for at in (0..attr.size.min(2 * BLOCK_BYTES as u64)).step_by(BLOCK_BYTES) {
            let page = (ino.0, at);
            let (_, data) = self.dirty.entry(page).or_insert_with(|| {
                let mut data = Box::new([0; BLOCK_BYTES]);
                fs.read(ino, at, &mut data[..], NOW).unwrap();
                (attr.generation, data)
            });
            // A part of the page, so that the rest must come from the file.
            let len = len_in(attr.size, at);
            data[len / 2..len]
                .fill(b'a' + (number as u8 % 8) * 3 + (at / BLOCK_BYTES as u64) as u8);
            self.stored.push(page);
        }
        true
    }

    /// The other calls change the cache, too.
    pub(crate) fn changed(&mut self, fs: &Fs, change: Change) {
        let Ok(ino) = resolve(fs, change.path()) else { return };
        for (&(_, at), (_, data)) in self.dirty.iter_mut().filter(|((of, _), _)| *of == ino.0) {
            match change {
                Change::Write(_, first, len) => {
                    let end = (first + len as u64).min(at + BLOCK_BYTES as u64);
                    let first = first.max(at);
                    if first < end {
                        let part = &mut data[(first - at) as usize..(end - at) as usize];
                        fs.read(ino, first, part, NOW).unwrap();
                    }
                }
                Change::Truncate(_, size) => data[len_in(size, at)..].fill(0),
                _ => {}
            }
        }
        if let Change::Truncate(_, size) = change {
            self.dirty.retain(|&(of, at), _| of != ino.0 || at < size);
        }
    }

    /// Writes a page back, if it is still dirty. Returns whether the file system got a write.
    pub(crate) fn write_back(&mut self, fs: &Fs, page: Page) -> bool {
        let Some((generation, data)) = self.dirty.remove(&page) else { return false };
        let (ino, at) = (Ino(page.0), page.1);
        // Deleted files have no pages.
        let Ok(attr) = fs.attr(ino) else { return false };
        let len = len_in(attr.size, at);
        if attr.generation != generation || len == 0 {
            return false;
        }
        // On a full image there may be no space for it, and the kernel drops the page.
        fs.write(&root(), ino, at, &data[..len], NOW).is_ok()
    }
}
