//! How an open volume recognises a target and its drives after a connection was lost.
//!
//! When a volume is opened, it reads properties from its targets. They decide how it keeps its
//! promises: where a FLUSH is needed, which log has its entries, which blocks are its own. So a
//! target that comes back is checked again before any command is sent to its drives (traps T19,
//! T27).

use alloc::vec::Vec;
use core::cmp::Ordering;

use riopipe_order::attribute::VolumeId;
use riopipe_order::probe::{self, Plant};

use super::attach::{Controller, Namespace};
use crate::label::{Label, LabelError};

/// A target as a volume found it when it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownTarget {
    volume: VolumeId,
    /// The owner's generation.
    generation: u32,
    /// The identity of its log region; `None`: the target does not have the extension.
    region: Option<[u8; 16]>,
    /// Whether the target reported a volatile write cache, which it does for all its drives or
    /// none.
    has_volatile_cache: bool,
    drives: Vec<KnownDrive>,
}

/// A drive of the volume, as the volume found it when it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KnownDrive {
    nsid: u32,
    nguid: [u8; 16],
    uuid: Option<[u8; 16]>,
    block_size: u32,
    /// The number of blocks that the volume needs there.
    needed_blocks: u64,
    /// The number of the member, as the label gives it.
    member_index: u16,
}

/// A drive of a volume on a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriveOfVolume {
    /// Its namespace.
    pub nsid: u32,
    /// The number of the member, as its label gives it.
    pub index: u16,
    /// The number of blocks that the volume needs there, from the first one on.
    pub blocks: u64,
}

/// The property of a target that has changed when the target came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Changed {
    /// The target has another ordering log, or none.
    #[error(
        "the target came back with another ordering log: no replay can restore the entries of the \
         old one. Let it serve the log that it had, and open the volume again"
    )]
    Region,
    /// A drive is missing.
    #[error(
        "the target came back without namespace {0}, a drive of the volume: let it serve that \
         again, and open the volume again"
    )]
    Missing(u32),
    /// Another drive has taken its place.
    #[error(
        "the target came back with another drive as namespace {0} (its NGUID or UUID differs): \
         let it serve the volume's drive there, and open the volume again"
    )]
    Replaced(u32),
    /// The size of its blocks has changed.
    #[error(
        "namespace {nsid} came back with blocks of {now} bytes instead of {was}: let the target \
         serve it as it was, and open the volume again"
    )]
    BlockSize {
        /// The namespace.
        nsid: u32,
        /// The bytes of a block when the volume was opened.
        was: u32,
        /// The bytes of a block now.
        now: u32,
    },
    /// The drive has become too small.
    #[error(
        "namespace {nsid} came back with {now} blocks, of which the volume needs {needed}: let \
         the target serve all of it, and open the volume again"
    )]
    Shrunk {
        /// The namespace.
        nsid: u32,
        /// The number of blocks that the volume needs.
        needed: u64,
        /// The number of blocks that it has now.
        now: u64,
    },
    /// The drive may now lose completed writes in a power cut, and was protected against that
    /// before.
    #[error(
        "namespace {0} came back with a volatile write cache and was protected against power loss \
         before: completed writes counted as durable without a FLUSH, and do not any more. Open \
         the volume again: it is then flushed first"
    )]
    Unprotected(u32),
    /// Its label has the generation of a newer owner (trap T8).
    #[error(
        "a newer owner has taken the volume over: the label of namespace {0} has its generation. \
         Close the volume; this owner's waiting groups are not written any more"
    )]
    TakenOver(u32),
    /// Its label has the generation of an earlier owner. This owner wrote its own generation there
    /// when it opened the volume. So the drive is an older copy (trap T27).
    #[error(
        "namespace {0} came back as it was before the volume was opened (its label has an earlier \
         generation): an older copy of the drive is in its place. Let the target serve the right \
         one there, and open the volume again"
    )]
    Older(u32),
    /// Its label is missing, or is not the volume's.
    #[error(
        "namespace {0} came back as a drive that does not hold the volume any more (its label is \
         gone, or another's): let the target serve the volume's drive there, and open the volume \
         again"
    )]
    Label(u32),
}

impl KnownTarget {
    /// The properties that must be found again on a target that serves these drives of a volume,
    /// for the owner with this generation. A drive that the controller doesn't have is left out:
    /// opening the volume has refused such a drive.
    #[must_use]
    pub fn new(
        volume: VolumeId,
        generation: u32,
        controller: &Controller,
        drives: impl IntoIterator<Item = DriveOfVolume>,
    ) -> Self {
        let drives = drives.into_iter().filter_map(|drive| {
            let namespace = find_namespace(controller, drive.nsid)?;
            Some(KnownDrive {
                nsid: drive.nsid,
                nguid: namespace.nguid,
                uuid: namespace.uuid,
                block_size: namespace.block_size,
                needed_blocks: drive.blocks,
                member_index: drive.index,
            })
        });
        Self {
            volume,
            generation,
            region: controller.extension.map(|extension| extension.region),
            has_volatile_cache: controller.vwc,
            drives: drives.collect(),
        }
    }

    /// The namespaces of the volume's drives, whose labels must be [checked](Self::check_label),
    /// too.
    pub fn namespaces(&self) -> impl Iterator<Item = u32> + '_ {
        self.drives.iter().map(|drive| drive.nsid)
    }

    /// Checks that the target still has its properties: its log, its drives, and the effect of a
    /// power cut on completed writes. A drive may have grown, and may have become protected against
    /// power loss.
    ///
    /// # Errors
    /// [`Changed`]: the target must get no command that the volume still depends on.
    pub fn check(&self, controller: &Controller) -> Result<(), Changed> {
        if controller.extension.map(|extension| extension.region) != self.region {
            return Err(Changed::Region);
        }
        for drive in &self.drives {
            let nsid = drive.nsid;
            let found = find_namespace(controller, nsid).ok_or(Changed::Missing(nsid))?;
            let has_same_uuid = drive.uuid.is_none() || found.uuid == drive.uuid;
            if found.nguid != drive.nguid || !has_same_uuid {
                return Err(Changed::Replaced(nsid));
            }
            if found.block_size != drive.block_size {
                return Err(Changed::BlockSize {
                    nsid,
                    was: drive.block_size,
                    now: found.block_size,
                });
            }
            if found.blocks < drive.needed_blocks {
                return Err(Changed::Shrunk {
                    nsid,
                    needed: drive.needed_blocks,
                    now: found.blocks,
                });
            }
            if controller.vwc
                && !self.has_volatile_cache
                && !probe::is_bug_planted(Plant::T27AssumeProtection)
            {
                return Err(Changed::Unprotected(nsid));
            }
        }
        Ok(())
    }

    /// Checks the label that was read from a drive: it must still be the volume's, and have the
    /// generation of this owner. A target that keeps no log of the volume forgets the volume's
    /// owners when it is started again. Then only the labels record the last owner (trap T8).
    ///
    /// # Errors
    /// [`Changed::Label`], [`Changed::Older`], [`Changed::TakenOver`].
    pub fn check_label(&self, nsid: u32, found: &Result<Label, LabelError>) -> Result<(), Changed> {
        let drive = self.drives.iter().find(|drive| drive.nsid == nsid);
        let (Ok(label), Some(drive)) = (found, drive) else { return Err(Changed::Label(nsid)) };
        if label.volume != self.volume || label.index != drive.member_index {
            return Err(Changed::Label(nsid));
        }
        match label.generation.cmp(&self.generation) {
            Ordering::Less => Err(Changed::Older(nsid)),
            Ordering::Equal => Ok(()),
            Ordering::Greater => Err(Changed::TakenOver(nsid)),
        }
    }
}

/// The namespace with this identifier, if the controller has it.
fn find_namespace(controller: &Controller, nsid: u32) -> Option<&Namespace> {
    controller.namespaces.iter().find(|namespace| namespace.nsid == nsid)
}

#[cfg(test)]
mod tests;
