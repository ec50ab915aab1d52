//! The modelled SSD over memory or a file, on the monotonic clock.
//!
//! [`riopipe_model::ssd`] is the model itself: a pure state machine. [`DrivePages`] stores its blocks.
//! `ssd:` drives ([`open_drive`](crate::open_drive)) put the model behind a lock.

use std::sync::Arc;

use riopipe_model::ssd::Pages as _;
pub use riopipe_model::ssd::{
    Command, FLASH, OPTANE, Order, PageList, PowerCut, Profile, QueueId, Tables, Timing,
};
use riopipe_order::block_device::BLOCK_BYTES;
use riopipe_order::write_order::WriteOrder;

use crate::error::OpenError;
use crate::watched::Watched;

mod drive;
mod pages;
#[cfg(test)]
mod tests;

pub(crate) use drive::{Ssd, survival};
use pages::BlockFile;
pub use pages::DrivePages;

/// A modelled drive with its data.
pub type Model = riopipe_model::ssd::Model<DrivePages>;

/// A drive of `blocks` blocks, all zero, in memory, that keeps `order`. `seed` determines the spread of completion
/// times; `prefault` allocates the memory now.
///
/// # Errors
/// There is not enough memory.
pub fn in_memory(
    profile: &'static Profile,
    order: Order,
    blocks: u64,
    seed: u64,
    prefault: bool,
) -> Result<Model, OpenError> {
    let pages = DrivePages::in_memory(blocks, order.kept_max(profile), prefault)
        .map_err(|source| out_of_memory(blocks, source))?;
    Ok(Model::with_order(profile, order, pages, seed))
}

/// A drive whose blocks are in a file. `seed` determines the spread of completion times.
pub(crate) fn in_file(
    profile: &'static Profile,
    order: Order,
    file: Arc<Watched>,
    seed: u64,
) -> Result<Model, OpenError> {
    let blocks = file.len / BLOCK_BYTES as u64;
    let pages = DrivePages::in_file(BlockFile::new(file), order.kept_max(profile))
        .map_err(|source| out_of_memory(blocks, source))?;
    Ok(Model::with_order(profile, order, pages, seed))
}

/// The error that there is no memory for a drive of `blocks` blocks.
fn out_of_memory(blocks: u64, source: std::io::Error) -> OpenError {
    let bytes = blocks.saturating_mul(BLOCK_BYTES as u64);
    OpenError::Memory { what: "a modelled drive", bytes, source }
}

/// Submits a write of whole blocks, copied into pages of the drive.
///
/// # Errors
/// So many blocks are in flight that the drive has no page left; nothing was submitted.
pub fn write(
    model: &mut Model,
    now: u64,
    queue: QueueId,
    op: u64,
    lba: u64,
    bytes: &[u8],
) -> Result<(), OutOfPages> {
    let mut pages = Vec::with_capacity(bytes.len() / BLOCK_BYTES);
    for block in bytes.chunks_exact(BLOCK_BYTES) {
        let Some(page) = model.pages_mut().allocate() else {
            for page in pages {
                model.pages_mut().release(page);
            }
            return Err(OutOfPages);
        };
        model.pages().frame_memory().fill(page, block);
        pages.push(page);
    }
    let (pages, order) = (PageList::Many(pages.into()), WriteOrder::Orderless);
    model.submit(now, queue, op, Command::Write { lba, pages, order });
    Ok(())
}

/// A modelled drive has no page left for incoming data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the modelled drive has no page left: too many writes are in flight")]
pub struct OutOfPages;
