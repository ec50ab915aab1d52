//! The modelled SSD over memory or a file, on the monotonic clock.
//!
//! The drive itself is pure: [`riopipe_model::ssd`]. `ssd:` drives
//! ([`open_drive`](crate::open_drive)) put it behind a lock.

pub use riopipe_model::ssd::{
    Command, FLASH, OPTANE, PageList, PowerCut, Profile, QueueId, Timing,
};
use riopipe_order::block_device::BLOCK_BYTES;

use crate::error::OpenError;
use crate::mapping::Mapping;

mod drive;
mod pages;
#[cfg(test)]
mod tests;

pub(crate) use drive::Ssd;
pub use pages::DrivePages;

/// A modelled drive with its data.
pub type Model = riopipe_model::ssd::Model<DrivePages>;

/// A drive of `blocks` blocks, all zero, in memory. `seed` determines the spread of completion
/// times; `prefault` allocates the memory now.
///
/// # Errors
/// There is not enough memory.
pub fn in_memory(
    profile: &'static Profile,
    blocks: u64,
    seed: u64,
    prefault: bool,
) -> Result<Model, OpenError> {
    let pages = DrivePages::in_memory(blocks, profile.losable_blocks, prefault);
    model(profile, pages, blocks, seed)
}

/// A drive as of [`in_memory`] with its blocks in a mapped file.
pub(crate) fn in_file(
    profile: &'static Profile,
    file: Mapping,
    seed: u64,
) -> Result<Model, OpenError> {
    let blocks = (file.len() / BLOCK_BYTES) as u64;
    model(profile, DrivePages::in_file(file, profile.losable_blocks), blocks, seed)
}

fn model(
    profile: &'static Profile,
    pages: std::io::Result<DrivePages>,
    blocks: u64,
    seed: u64,
) -> Result<Model, OpenError> {
    let bytes = blocks.saturating_mul(BLOCK_BYTES as u64);
    let pages =
        pages.map_err(|source| OpenError::Memory { what: "a modelled drive", bytes, source })?;
    Ok(Model::new(profile, pages, seed))
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
            pages.into_iter().for_each(|page| {
                riopipe_model::ssd::Pages::release(model.pages_mut(), page);
            });
            return Err(OutOfPages);
        };
        model.pages().bytes().fill(page, block);
        pages.push(page);
    }
    model.submit(now, queue, op, Command::Write { lba, pages: PageList::Many(pages.into()) });
    Ok(())
}

/// A modelled drive has no page left for incoming data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the modelled drive has no page left: too many writes are in flight")]
pub struct OutOfPages;
