//! The decision about the content of a place where a log region should be: open it, make a new
//! region there, give up the old one, or refuse it. The target calls [`decide`] when it starts.

use super::{
    Class, CreateError, HEADER_BYTES, LogKind, OpenError, PARTITION_ALIGN, RegionHeader, inspect,
};
use crate::region::{Crc32c, Region};

/// A place where a log region should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Size of the whole place in bytes.
    pub len: usize,
    /// The kind of medium on which the place is now.
    pub kind: LogKind,
    /// The running system's boot.
    pub boot: [u8; 16],
    /// Whether the place has the content that its last fence made durable. A drive can report that
    /// it could not restore its memory after a power cut: the content may then be an older one, or a
    /// mixture, and no checksum shows it (trap T24).
    pub is_restored: bool,
}

/// The decision about the content of the place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The region is opened for service.
    Open,
    /// The place is blank, and a new region is made.
    Create,
    /// The old region is given up, and a new region is made. If the old header is readable, it is
    /// the value here: its volumes get the same space in the new region (trap T26).
    GiveUp(Option<RegionHeader>),
    /// The content of the region is lost, and the region is left as it is. Its volumes are refused
    /// (trap T19), and plain hosts may not write their members (trap T21). Other namespaces are
    /// served.
    Lost(RegionHeader),
}

/// Why a place is not served at all. The place is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The place holds no region that this program can serve.
    #[error(transparent)]
    Region(#[from] OpenError),
    /// A new region can't be made.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// A new region would have no space for a volume.
    #[error(
        "{have} bytes are too small for an ordering log, which needs {need}: make it 2M or more"
    )]
    TooSmall {
        /// The size of the place in bytes.
        have: usize,
        /// The smallest possible size in bytes.
        need: usize,
    },
    /// The region was made on a medium of another kind, and it has volumes.
    #[error(transparent)]
    Kind(#[from] OtherKind),
    /// The medium may not have the content that it had before the last power cut (trap T24).
    #[error(
        "the medium reports that it may not have restored its content after a power cut or a reset: \
         the log may be an older one, or a mixture. Give it up (accept_lost_log) before the drive is \
         reset or switched off, which ends the report, not its cause"
    )]
    NotRestored,
}

/// A log region that was made on a medium of another kind than the one it is opened on.
///
/// The recorded kind decides whether the log is valid after a power cut. A region that records
/// `block` but was last served through a mapped file would show entries as durable, although no
/// fence had made them durable (trap T19).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it was made on {} and would be served {}: what a power cut leaves of it would not be known. \
     Serve it as before, or give it up (accept_lost_log)",
    describe_origin(*made), describe_use(*now)
)]
pub struct OtherKind {
    /// The kind that the region records.
    pub made: LogKind,
    /// The kind of the medium now.
    pub now: LogKind,
}

/// The medium on which a region of this kind was made, for the error message.
const fn describe_origin(kind: LogKind) -> &'static str {
    match kind {
        LogKind::File => "a mapped file (file:), or on something that a power cut empties",
        LogKind::Dax => "persistent memory (dax:)",
        LogKind::Block => "a block device (block:)",
        LogKind::Pci => "a drive's memory (pci:)",
    }
}

/// The way in which a region of this kind would be served, for the error message.
const fn describe_use(kind: LogKind) -> &'static str {
    match kind {
        LogKind::File => "from memory that a power cut empties",
        LogKind::Dax => "as persistent memory (dax:)",
        LogKind::Block => "as a block device (block:)",
        LogKind::Pci => "as a drive's memory (pci:)",
    }
}

/// The smallest size of a region in bytes: its header, and one partition of the smallest size.
pub const REGION_BYTES_MIN: usize = HEADER_BYTES + PARTITION_ALIGN;

/// Decides about the content of a place. `header` is the first [`HEADER_BYTES`] of the place, or
/// all of a smaller place. With `accept_lost`, a region that is not valid is given up.
///
/// # Errors
/// [`Refused`]: the reason, with advice. A region that cannot be read is never opened as one with
/// "nothing to undo", because then the undo of a crash would be missing (trap T19).
pub fn decide<R: Region>(
    header: &R,
    place: Place,
    accept_lost: bool,
    crc: Crc32c,
) -> Result<Decision, Refused> {
    let need = REGION_BYTES_MIN;
    if place.len < need && has_only_zeroes(header) {
        return Err(Refused::TooSmall { have: place.len, need });
    }
    match inspect(header, place.len, place.boot, crc) {
        // Nothing was there, or nothing of it is left. A volume whose label names a log that is not
        // here is refused (trap T19).
        Class::Blank => Ok(Decision::Create),
        // Any log in such a place is given up or refused, even if it is readable.
        Class::Ours(found) | Class::StaleBoot(found) if !place.is_restored => {
            if accept_lost || found.volumes.is_empty() {
                return Ok(Decision::GiveUp(Some(found)));
            }
            Err(Refused::NotRestored)
        }
        Class::StaleBoot(found) if accept_lost => Ok(Decision::GiveUp(Some(found))),
        Class::Damaged { .. } if accept_lost => Ok(Decision::GiveUp(None)),
        Class::Ours(found) | Class::StaleBoot(found) if found.kind != place.kind => {
            if accept_lost || found.volumes.is_empty() {
                return Ok(Decision::GiveUp(Some(found)));
            }
            Err(OtherKind { made: found.kind, now: place.kind }.into())
        }
        Class::StaleBoot(found) => Ok(Decision::Lost(found)),
        Class::Ours(_) => Ok(Decision::Open),
        Class::Newer { version } => Err(OpenError::Newer { version }.into()),
        Class::NotALog => Err(OpenError::NotALog.into()),
        Class::Damaged { what } => Err(OpenError::Damaged { what }.into()),
    }
}

fn has_only_zeroes<R: Region>(region: &R) -> bool {
    let mut word = [0; 8];
    (0..region.len()).step_by(word.len()).all(|offset| {
        region.read(offset, &mut word);
        word == [0; 8]
    })
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::attribute::{Member, VolumeId};
    use crate::log_region::{LogRegion, MemberNamespace, NewVolume};
    use crate::region::MemRegion;
    use riopipe_nvme::digest::soft as crc32c;

    const LEN: usize = 1 << 20;

    fn place(kind: LogKind, boot: u8) -> Place {
        Place { len: LEN, kind, boot: [boot; 16], is_restored: true }
    }

    /// A region of this kind, last served in boot 1, with a volume or without.
    fn made(kind: LogKind, has_volume: bool) -> MemRegion {
        let header = MemRegion::new(HEADER_BYTES);
        let mut region = LogRegion::create(header, LEN, [1; 16], [1; 16], kind, crc32c).unwrap();
        if has_volume {
            let members = vec![MemberNamespace { member: Member(0), nsid: 1 }];
            let id = VolumeId([7; 16]);
            let volume = NewVolume { id, streams: 1, slots: 64, members };
            region.add_volume(volume, |_, _| Ok(())).unwrap();
        }
        region.into_region()
    }

    fn decided(found: &MemRegion, place: Place, accept: bool) -> Result<&'static str, Refused> {
        decide(found, place, accept, crc32c).map(|decision| match decision {
            Decision::Open => "open",
            Decision::Create => "create",
            Decision::GiveUp(Some(_)) => "give up a known one",
            Decision::GiveUp(None) => "give up",
            Decision::Lost(_) => "lost",
        })
    }

    #[test]
    fn t19_each_content_of_a_place_has_its_decision() {
        let blank = MemRegion::new(HEADER_BYTES);
        let file = made(LogKind::File, true);
        let block = made(LogKind::Block, true);
        let mut torn = file.clone();
        torn.bytes_mut()[100] ^= 1;
        torn.bytes_mut()[4096 + 100] ^= 1;
        let mut other = blank.clone();
        other.bytes_mut()[5000] = 1;
        let here = place(LogKind::File, 1);
        let next = place(LogKind::File, 2);
        let device = place(LogKind::Block, 2);
        for (found, place, without, with) in [
            (&blank, here, Ok("create"), Ok("create")),
            (&file, here, Ok("open"), Ok("open")),
            (&file, next, Ok("lost"), Ok("give up a known one")),
            (&block, device, Ok("open"), Ok("open")),
            (
                &torn,
                here,
                Err(OpenError::Damaged { what: "neither header copy is readable" }.into()),
                Ok("give up"),
            ),
            (&other, here, Err(OpenError::NotALog.into()), Err(OpenError::NotALog.into())),
            (
                &block,
                here,
                Err(OtherKind { made: LogKind::Block, now: LogKind::File }.into()),
                Ok("give up a known one"),
            ),
            (
                &made(LogKind::Block, false),
                here,
                Ok("give up a known one"),
                Ok("give up a known one"),
            ),
        ] {
            assert_eq!(decided(found, place, false), without);
            assert_eq!(decided(found, place, true), with);
        }
    }

    #[test]
    fn t24_a_log_on_a_medium_that_was_not_restored_is_refused_or_given_up() {
        let lost = Place { is_restored: false, ..place(LogKind::Pci, 2) };
        let pci = made(LogKind::Pci, true);
        assert_eq!(decided(&pci, place(LogKind::Pci, 2), false), Ok("open"));
        assert_eq!(decided(&pci, lost, false), Err(Refused::NotRestored));
        assert_eq!(decided(&pci, lost, true), Ok("give up a known one"));
        // Without a volume nothing can be lost. On what is no log nothing changes.
        let given_up = Ok("give up a known one");
        assert_eq!(decided(&made(LogKind::Pci, false), lost, false), given_up);
        assert_eq!(decided(&MemRegion::new(HEADER_BYTES), lost, false), Ok("create"));
        let mut torn = pci.clone();
        torn.bytes_mut()[100] ^= 1;
        torn.bytes_mut()[4096 + 100] ^= 1;
        assert!(matches!(decided(&torn, lost, false), Err(Refused::Region(_))));
        assert_eq!(decided(&torn, lost, true), Ok("give up"));
    }

    #[test]
    fn a_place_without_space_is_refused_with_the_size_it_needs() {
        let small = Place { len: 4096, ..place(LogKind::File, 1) };
        let need = HEADER_BYTES + PARTITION_ALIGN;
        let too_small = Err(Refused::TooSmall { have: 4096, need });
        assert_eq!(decided(&MemRegion::new(4096), small, true), too_small);
        let mut other = MemRegion::new(4096);
        other.bytes_mut()[0] = 1;
        assert_eq!(decided(&other, small, true), Err(OpenError::NotALog.into()));
    }
}
