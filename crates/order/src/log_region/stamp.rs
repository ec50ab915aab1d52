//! The *synced* stamp: it makes a region on a mapped file valid in a later boot (trap T24).
//!
//! A power cut takes each page of a mapped file back to the moment at which the kernel last wrote
//! that page to the disk. So the header may be "closed" although the pages of the partitions are
//! older. Nothing in these bytes shows the difference. Therefore the header carries a stamp:
//!
//! 1. The target clears the stamp, durably, before it serves anything.
//! 2. At a clean stop, the target writes back all of the region.
//! 3. Then the target sets the stamp, durably.
//!
//! A region whose fences survive a power cut needs no stamp, because it holds all that was fenced.

use crate::probe::{self, Plant};
use crate::region::{Region, RegionError};

use super::{LogRegion, RegionHeader};

impl RegionHeader {
    /// Whether the region with this header is valid in this boot: no power cut has taken all or
    /// parts of the region back to an earlier moment.
    pub(super) fn is_valid(&self, boot: [u8; 16]) -> bool {
        self.boot == boot
            || self.kind.survives_power_cut()
            || self.synced
            // Without a volume there is nothing to recover. An initiator that expects a volume here
            // learns that the volume is missing.
            || self.volumes.is_empty()
            || probe::is_bug_planted(Plant::T24StampUnchecked)
    }
}

impl<R: Region> LogRegion<R> {
    /// Ends service by a clean stop: calls `write_back`, which makes header and partitions survive
    /// a power cut, and then sets the stamp. Afterwards the caller must store nothing in the
    /// region, and this module accepts no change.
    ///
    /// # Errors
    ///
    /// A part of the region could not be written back. The region stays without its stamp, and is
    /// valid in this boot only.
    pub fn close(
        &mut self,
        write_back: impl FnOnce() -> Result<(), RegionError>,
    ) -> Result<(), RegionError> {
        if let Some(error) = &self.write_refusal {
            return Err(error.clone());
        }
        if !self.header.kind.survives_power_cut() {
            let stamped = RegionHeader { synced: true, ..self.header.clone() };
            if probe::is_bug_planted(Plant::T24StampEarly) {
                self.write_header_back(stamped)?;
                write_back()?;
            } else {
                write_back()?;
                self.write_header_back(stamped)?;
            }
        }
        self.write_refusal = Some(RegionError::new("it is not served any more"));
        Ok(())
    }

    /// Begins an incarnation of the target with the content of `header`, without the stamp. The
    /// header is durable before this returns.
    pub(super) fn begin_incarnation(&mut self, header: RegionHeader) -> Result<(), RegionError> {
        if header.kind.survives_power_cut() || probe::is_bug_planted(Plant::T24StampKept) {
            return self.write_header(header);
        }
        self.write_header_back(RegionHeader { synced: false, ..header })
    }

    /// Writes both copies of the header, one after the other, and writes each back. So the change
    /// survives a power cut on every kind of medium.
    fn write_header_back(&mut self, header: RegionHeader) -> Result<(), RegionError> {
        self.write_both_copies(header, R::write_back)
    }
}
