//! Blocks for tests: each content is a name.

use alloc::vec;
use alloc::vec::Vec;

use super::Pages;

/// The contents of the blocks. The name 0 stands for zeroes.
pub(super) struct Names {
    pub(super) blocks: Vec<u32>,
    /// Number of old contents for which there is still a page.
    free_pages: usize,
}

impl Names {
    /// `blocks` blocks of zeroes, and as many pages for old contents as are needed.
    pub(super) fn zeroes(blocks: usize) -> Self {
        Self { blocks: vec![0; blocks], free_pages: 1 << 20 }
    }

    /// Blocks with these contents, and `free_pages` pages for old contents.
    pub(super) fn with_pages(blocks: &[u32], free_pages: usize) -> Self {
        Self { blocks: blocks.to_vec(), free_pages }
    }
}

impl Pages for Names {
    type Page = u32;
    type Buf = Vec<u32>;
    const ZEROES: u32 = 0;

    fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    fn exchange(&mut self, lba: u64, page: u32, keep_old: bool) -> Option<u32> {
        let block = &mut self.blocks[lba as usize];
        if keep_old && *block != Self::ZEROES {
            self.free_pages = self.free_pages.checked_sub(1)?;
        }
        let old = core::mem::replace(block, page);
        Some(if keep_old { old } else { Self::ZEROES })
    }

    fn release(&mut self, page: u32) {
        self.free_pages += usize::from(page != Self::ZEROES);
    }

    fn read(&self, lba: u64, blocks: u64) -> Vec<u32> {
        self.blocks[lba as usize..(lba + blocks) as usize].to_vec()
    }
}
