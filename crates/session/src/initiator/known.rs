//! How an open volume recognises a target and its drives after a connection was lost (T19, T27).
//!
//! The properties that a volume reads from its targets when it is opened decide how it keeps its
//! promises: where a FLUSH is needed, which log has its entries, which blocks are its own. A target
//! that comes back is therefore checked again before any command is sent to its drives.

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
    /// Its log region, if the extension names one.
    region: Option<[u8; 16]>,
    /// Whether it reported a volatile cache for its drives. It reports that for all drives or none.
    volatile: bool,
    drives: Vec<KnownDrive>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct KnownDrive {
    nsid: u32,
    nguid: [u8; 16],
    uuid: Option<[u8; 16]>,
    block_size: u32,
    /// The number of blocks that the volume needs there.
    blocks: u64,
    /// The number of the member, as the label gives it.
    index: u16,
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

/// The changed property of a target that has come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Changed {
    /// Another ordering log, or none.
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
    /// Its blocks are of another size.
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
    /// In a power cut it may now lose completed writes, which it could not before.
    #[error(
        "namespace {0} came back with a volatile write cache and was protected against power loss \
         before: completed writes counted as durable without a FLUSH, and do not any more. Open \
         the volume again: it is then flushed first"
    )]
    Unprotected(u32),
    /// Its label has the generation of a newer owner (T8).
    #[error(
        "a newer owner has taken the volume over: the label of namespace {0} has its generation. \
         Close the volume; this owner's waiting groups are not written any more"
    )]
    TakenOver(u32),
    /// Its label has the generation of an earlier owner. This owner had written its own generation
    /// there before it relied on anything (T27).
    #[error(
        "namespace {0} came back as it was before the volume was opened (its label has an earlier \
         generation): an older copy of the drive is in its place. Let the target serve the right \
         one there, and open the volume again"
    )]
    Older(u32),
    /// Its label is not the volume's.
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
            let namespace = find(controller, drive.nsid)?;
            Some(KnownDrive {
                nsid: drive.nsid,
                nguid: namespace.nguid,
                uuid: namespace.uuid,
                block_size: namespace.block_size,
                blocks: drive.blocks,
                index: drive.index,
            })
        });
        Self {
            volume,
            generation,
            region: controller.extension.map(|extension| extension.region),
            volatile: controller.vwc,
            drives: drives.collect(),
        }
    }

    /// The namespaces of the volume's drives, whose labels must be [checked](Self::check_label),
    /// too.
    pub fn namespaces(&self) -> impl Iterator<Item = u32> + '_ {
        self.drives.iter().map(|drive| drive.nsid)
    }

    /// Checks that the target still has its properties: its log, its drives, and the effect of a
    /// power cut on completed writes. A drive that is protected now and was not, or has grown, is
    /// accepted: the volume continues as before.
    ///
    /// # Errors
    /// [`Changed`]: the target must get no command that the volume still depends on.
    pub fn check(&self, now: &Controller) -> Result<(), Changed> {
        if now.extension.map(|extension| extension.region) != self.region {
            return Err(Changed::Region);
        }
        for drive in &self.drives {
            let nsid = drive.nsid;
            let found = find(now, nsid).ok_or(Changed::Missing(nsid))?;
            if found.nguid != drive.nguid || drive.uuid.is_some() && found.uuid != drive.uuid {
                return Err(Changed::Replaced(nsid));
            }
            if found.block_size != drive.block_size {
                let (was, now) = (drive.block_size, found.block_size);
                return Err(Changed::BlockSize { nsid, was, now });
            }
            if found.blocks < drive.blocks {
                return Err(Changed::Shrunk { nsid, needed: drive.blocks, now: found.blocks });
            }
            if now.vwc && !self.volatile && !probe::planted(Plant::T27AssumeProtection) {
                return Err(Changed::Unprotected(nsid));
            }
        }
        Ok(())
    }

    /// Checks that the label on a drive is still the volume's, and has the generation of neither a
    /// newer nor an older owner. A target that keeps no log of the volume loses the record of its
    /// owners when it is started again: then only the labels record the last owner (T8).
    ///
    /// # Errors
    /// [`Changed::Label`], [`Changed::Older`], [`Changed::TakenOver`].
    pub fn check_label(&self, nsid: u32, found: &Result<Label, LabelError>) -> Result<(), Changed> {
        let ours = |label: &Label, drive: &KnownDrive| {
            label.volume == self.volume && label.index == drive.index
        };
        let drive = self.drives.iter().find(|drive| drive.nsid == nsid);
        match (found, drive) {
            (Ok(label), Some(drive)) if ours(label, drive) => {
                match label.generation.cmp(&self.generation) {
                    Ordering::Less => Err(Changed::Older(nsid)),
                    Ordering::Equal => Ok(()),
                    Ordering::Greater => Err(Changed::TakenOver(nsid)),
                }
            }
            _ => Err(Changed::Label(nsid)),
        }
    }
}

fn find(controller: &Controller, nsid: u32) -> Option<&Namespace> {
    controller.namespaces.iter().find(|namespace| namespace.nsid == nsid)
}

#[cfg(test)]
mod tests;
