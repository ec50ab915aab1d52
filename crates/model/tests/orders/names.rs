//! Blocks for tests: each content is a name.

use riopipe_model::ssd::{ExchangeError, Pages};
use riopipe_order::block_device::Cause;

/// The contents of the blocks. The name 0 stands for zeroes.
pub(crate) struct Names {
    pub(crate) blocks: Vec<u32>,
    /// A block that can be neither written nor read.
    pub(crate) failing: Option<u64>,
}

impl Names {
    pub(crate) fn new(blocks: u64, failing: Option<u64>) -> Self {
        Self { blocks: vec![0; blocks as usize], failing }
    }
}

/// The error of the block that fails.
fn failed() -> Cause {
    Cause::Failed("a broken block".into())
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
            return Err(ExchangeError::Medium(failed()));
        }
        let old = core::mem::replace(&mut self.blocks[lba as usize], page);
        Ok(if keep_old { old } else { Self::ZEROES })
    }

    fn release(&mut self, _page: u32) {}

    fn read(&self, lba: u64, blocks: u64) -> Result<Vec<u32>, Cause> {
        Ok(self.blocks[lba as usize..(lba + blocks) as usize].to_vec())
    }
}
