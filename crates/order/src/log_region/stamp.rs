//! The *synced* stamp: what makes a region believable after another boot although its fences do
//! not survive the power (T24).
//!
//! A power cut takes a mapped file back to what the kernel had written back, and each of its pages
//! to a moment of its own: a header may say "closed" over partitions from before. Nothing in such
//! bytes tells. So the header carries a stamp that is set when service ends in good order, after
//! all of the region has been written back, and cleared, durably, before anything is served. A
//! region whose fences survive the power needs none: what it holds is what was fenced.

use crate::probe::{self, Plant};
use crate::region::{Region, RegionError};

use super::{LogRegion, RegionHeader};

impl RegionHeader {
    /// Whether what it heads can be believed in this boot: nothing in between has taken it back to
    /// an earlier moment, or parts of it to several.
    pub(super) fn is_believable(&self, boot: [u8; 16]) -> bool {
        self.boot == boot
            || self.kind.survives_power_cut()
            || self.synced
            // Whoever misses a volume here learns that it is missing.
            || self.volumes.is_empty()
            || probe::planted(Plant::T24StampUnchecked)
    }
}

impl<R: Region> LogRegion<R> {
    /// Ends service in good order: `write_back` makes all of the region survive the power, header
    /// and partitions, and then the header says so. Nothing may be stored anywhere in the region
    /// any more, and nothing is taken by this module.
    ///
    /// # Errors
    ///
    /// Something could not be written back: the region stays without its stamp, and is good for
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

    /// Begins a life of the target over what `header` says; the stamp is gone, durably, before
    /// this returns.
    pub(super) fn begin(&mut self, header: RegionHeader) -> Result<(), RegionError> {
        if header.kind.survives_power_cut() || probe::planted(Plant::T24StampKept) {
            return self.change(header);
        }
        self.change_for_good(RegionHeader { synced: false, ..header })
    }

    /// A change that survives the power on every kind of medium, one copy after the other.
    fn change_for_good(&mut self, header: RegionHeader) -> Result<(), RegionError> {
        self.put(header, R::write_back)
    }
}
