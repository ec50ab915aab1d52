//! Reads the header of a log region, and decides whether the region may be served.

use super::codec::{HeaderCopy, decode};
use super::header::RegionHeader;
use super::{HEADER_BYTES, HEADER_COPY_BYTES};
use crate::region::{Crc32c, Region};

/// The classes of content at the start of a region. Only one of them may be served (trap T19).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Class {
    /// All zero: never used, or erased.
    Blank,
    /// A log region of this version, fit for service.
    Ours(RegionHeader),
    /// A `file:` log of another boot that has volumes and was not written back when its service
    /// ended. A power cut may have left its pages as they were at different moments. So nothing in
    /// the log is valid, not even that a volume was closed (trap T24).
    StaleBoot(RegionHeader),
    /// A log region of a later version.
    Newer {
        /// Its version.
        version: u32,
    },
    /// Something else altogether.
    NotALog,
    /// A log region without a usable header: both copies are unreadable, or they contradict each
    /// other or the size of the region.
    Damaged {
        /// The damage.
        what: &'static str,
    },
}

/// Reads a region's header and returns its class.
///
/// `header` covers at least the first [`HEADER_BYTES`] of the region. `len` is the size of the
/// whole region in bytes. `boot` is the boot of the running system.
#[must_use]
pub fn inspect<R: Region>(header: &R, len: usize, boot: [u8; 16], crc: Crc32c) -> Class {
    if header.len() < HEADER_BYTES {
        return Class::NotALog;
    }
    let mut copies = [0, HEADER_COPY_BYTES].map(|offset| read_header_copy(header, offset, crc));
    for copy in &copies {
        if let HeaderCopy::Newer { version } = *copy {
            return Class::Newer { version };
        }
    }
    sort_newest_first(&mut copies);
    match copies {
        [HeaderCopy::Whole(a), HeaderCopy::Whole(b)] if a.number == b.number && a != b => {
            Class::Damaged { what: "its two header copies contradict each other" }
        }
        [HeaderCopy::Whole(newest), _] => classify_whole(newest, len, boot),
        [HeaderCopy::Blank, HeaderCopy::Blank] => Class::Blank,
        [HeaderCopy::Foreign, HeaderCopy::Foreign | HeaderCopy::Blank]
        | [HeaderCopy::Blank, HeaderCopy::Foreign] => Class::NotALog,
        _ => Class::Damaged { what: "neither header copy is readable" },
    }
}

/// Reads the copy of the header at this offset.
pub(super) fn read_header_copy<R: Region>(region: &R, offset: usize, crc: Crc32c) -> HeaderCopy {
    let mut bytes = [0; HEADER_COPY_BYTES];
    region.read(offset, &mut bytes);
    decode(&bytes, crc)
}

/// Sorts the copies: whole ones first, the newest of them first. The others keep their order.
fn sort_newest_first(copies: &mut [HeaderCopy; 2]) {
    copies.sort_by_key(|copy| match copy {
        HeaderCopy::Whole(header) => core::cmp::Reverse(header.number.saturating_add(1)),
        _ => core::cmp::Reverse(0),
    });
}

/// The class of a region with this header, which is whole.
fn classify_whole(header: RegionHeader, len: usize, boot: [u8; 16]) -> Class {
    if header.len != len as u64 {
        Class::Damaged { what: "its size is not the one it was made with" }
    } else if header.is_valid(boot) {
        Class::Ours(header)
    } else {
        Class::StaleBoot(header)
    }
}
