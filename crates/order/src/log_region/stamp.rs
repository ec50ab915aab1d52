//! The *synced* stamp: it makes a region valid in a later boot although its fences do not survive a
//! power cut (T24).
//!
//! A power cut takes each page of a mapped file back to the moment at which the kernel last wrote
//! it back. So a header may have "closed" over partitions that are older. Nothing in such bytes
//! shows this. Therefore the header carries a stamp. It is set at a clean stop, after all of the
//! region has been written back. It is cleared, durably, before anything is served. A region whose
//! fences survive a power cut needs no stamp: it holds all that was fenced.

use crate::probe::{self, Plant};
use crate::region::{Region, RegionError};

use super::{LogRegion, RegionHeader};

impl RegionHeader {
    /// Whether the region with this header is valid in this boot: no power cut in between has taken
    /// it, or parts of it, back to an earlier moment.
    pub(super) fn is_valid(&self, boot: [u8; 16]) -> bool {
        self.boot == boot
            || self.kind.survives_power_cut()
            || self.synced
            // An initiator that misses a volume here learns that it is missing.
            || self.volumes.is_empty()
            || probe::planted(Plant::T24StampUnchecked)
    }
}

impl<R: Region> LogRegion<R> {
    /// Ends service by a clean stop: `write_back` makes all of the region survive a power cut,
    /// header and partitions, and then the header gets the stamp. Afterwards nothing may be stored
    /// anywhere in the region, and this module accepts no change.
    ///
    /// # Errors
    ///
    /// Something could not be written back: the region stays without its stamp, and is valid in
    /// this boot only.
    pub fn close(
        &mut self,
        write_back: impl FnOnce() -> Result<(), RegionError>,
    ) -> Result<(), RegionError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if !self.header.kind.survives_power_cut() {
            let stamped = RegionHeader { synced: true, ..self.header.clone() };
            if probe::planted(Plant::T24StampEarly) {
                self.change_for_good(stamped)?;
                write_back()?;
            } else {
                write_back()?;
                self.change_for_good(stamped)?;
            }
        }
        self.failed = Some(RegionError::new("it is not served any more"));
        Ok(())
    }

    /// Begins an incarnation of the target with the content of `header`, without the stamp, durable
    /// before it returns.
    pub(super) fn begin(&mut self, header: RegionHeader) -> Result<(), RegionError> {
        if header.kind.survives_power_cut() || probe::planted(Plant::T24StampKept) {
            return self.write_header(header);
        }
        self.change_for_good(RegionHeader { synced: false, ..header })
    }

    /// A change that survives a power cut on every kind of medium, one copy after the other.
    fn change_for_good(&mut self, header: RegionHeader) -> Result<(), RegionError> {
        self.write_both_copies(header, R::write_back)
    }
}
