//! Blocks for tests: each content is a name.

use alloc::vec;
use alloc::vec::Vec;

use riopipe_order::block_device::Cause;

use super::{ExchangeError, Pages};

/// The contents of the blocks. The name 0 stands for zeroes.
pub(super) struct Names {
    pub(super) blocks: Vec<u32>,
    /// Number of old contents for which there is still a page.
    pub(super) free_pages: usize,
    /// A block that can be neither written nor read.
    pub(super) failing: Option<u64>,
}

/// The error of the block that fails.
pub(super) fn no_space() -> Cause {
    Cause::NoSpace("a full disk".into())
}

impl Names {
    /// `blocks` blocks of zeroes, and as many pages for old contents as are needed.
    pub(super) fn zeroes(blocks: usize) -> Self {
        Self { blocks: vec![0; blocks], free_pages: 1 << 20, failing: None }
    }

    /// Blocks with these contents, and `free_pages` pages for old contents.
    pub(super) fn with_pages(blocks: &[u32], free_pages: usize) -> Self {
        Self { blocks: blocks.to_vec(), free_pages, failing: None }
    }
}

impl Pages for Names {
    type Page = u32;
    type Buf = Vec<u32>;
    const ZEROES: u32 = 0;

    fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    fn exchange(&mut self, lba: u64, page: u32, keep_old: bool) -> Result<u32, ExchangeError> {
        if self.failing == Some(lba) {
            return Err(ExchangeError::Medium(no_space()));
        }
        let block = &mut self.blocks[lba as usize];
        if keep_old && *block != Self::ZEROES {
            let left = self.free_pages.checked_sub(1);
            self.free_pages = left.ok_or(ExchangeError::OutOfPages)?;
        }
        let old = core::mem::replace(block, page);
        Ok(if keep_old { old } else { Self::ZEROES })
    }

    fn release(&mut self, page: u32) {
        self.free_pages += usize::from(page != Self::ZEROES);
    }

    fn read(&self, lba: u64, blocks: u64) -> Result<Vec<u32>, Cause> {
        if self.failing.is_some_and(|failing| (lba..lba + blocks).contains(&failing)) {
            return Err(no_space());
        }
        Ok(self.blocks[lba as usize..(lba + blocks) as usize].to_vec())
    }
}
