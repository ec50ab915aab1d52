//! Opens the ordering log of a target, or makes one, and reads the volumes in it.

use alloc::string::String;
use alloc::vec::Vec;

use riopipe_order::log_region::LogRegion;
use riopipe_order::log_region::opening::{Decision, Place, Refused, decide};
use riopipe_order::region::{Crc32c, Region};

use super::Volumes;
use super::volume::Split;

/// The content of the place of the log when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A valid log, with or without volumes.
    Log {
        /// Whether there are volumes in it.
        has_volumes: bool,
    },
    /// The place was empty, so a new log was made.
    Nothing,
    /// A log that was given up. A new log was made in its place.
    GivenUp,
    /// A log that is not valid. Its volumes can't be claimed, and its content is left unchanged.
    Lost,
}

/// The result of opening the place of a log.
pub struct Opened<R> {
    /// The volumes in the log.
    pub volumes: Volumes<R>,
    /// The content of the place when it was opened.
    pub found: Found,
    /// The problems because of which volumes can't be claimed, for the operator.
    pub problems: Vec<String>,
}

impl<R: Region> Volumes<R> {
    /// Opens the log at a place, or makes one there. `header` is the first
    /// [`HEADER_BYTES`](riopipe_order::log_region::HEADER_BYTES) of the place, and `split` returns
    /// parts of the rest. With `accept_lost`, a log that is not valid is given up. A new log gets
    /// the id `new_uuid`.
    ///
    /// # Errors
    /// The content is refused, or the log store has failed. Refused content is unchanged (trap
    /// T19).
    pub fn open(
        header: R,
        split: Split<R>,
        place: Place,
        accept_lost: bool,
        new_uuid: [u8; 16],
        crc: Crc32c,
    ) -> Result<Opened<R>, Refused> {
        let Place { len, kind, boot, .. } = place;
        let create = |header| LogRegion::create(header, len, new_uuid, boot, kind, crc);
        let (region, found, given_up) = match decide(&header, place, accept_lost, crc)? {
            Decision::Open => {
                let region = LogRegion::open(header, len, boot, crc)?;
                let has_volumes = !region.header().volumes.is_empty();
                (region, Found::Log { has_volumes }, None)
            }
            Decision::Create => (create(header)?, Found::Nothing, None),
            Decision::GiveUp(given_up) => (create(header)?, Found::GivenUp, given_up),
            Decision::Lost(header) => {
                let volumes = Self::with_lost_log(header, crc);
                return Ok(Opened { volumes, found: Found::Lost, problems: Vec::new() });
            }
        };
        let (volumes, problems) = Self::with_log(region, split, crc);
        let volumes = match given_up {
            Some(header) => volumes.after_loss(header),
            None => volumes,
        };
        Ok(Opened { volumes, found, problems })
    }
}
