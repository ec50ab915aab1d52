//! Several places of a volume that one call reads.

use std::ffi::{c_int, c_void};

use riopipe::ReadExtent;

use crate::error::{RiopError, guard};
use crate::failure::Failure;
use crate::handle;
use crate::memory::{argument, array, array_mut};
use crate::reader::RiopReader;
use crate::stream::RiopStream;
use crate::time::limit;

/// Blocks to read, and the memory for them. See `riop_extent` in `riopipe.h`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RiopExtent {
    /// The first block.
    pub lba: u64,
    /// The memory for the blocks.
    pub into: *mut c_void,
    /// The number of bytes.
    pub length: usize,
}

/// The extents as Rust has them. Their memory must be disjoint: two references to the same bytes are not sound.
///
/// # Safety
/// `extents` points to `count` extents that do not change during the call. The memory of each one is null, or the
/// function's to write for `'a`.
unsafe fn extents<'a>(
    extents: *const RiopExtent,
    count: usize,
) -> Result<Vec<ReadExtent<'a>>, Failure> {
    // SAFETY: as the caller has promised.
    let extents = unsafe { array(extents, count, "extents") }?;
    check_disjoint(extents.iter().map(|extent| (extent.into.addr(), extent.length)))?;
    extents
        .iter()
        .map(|extent| {
            // SAFETY: as the caller has promised. The read only writes to this memory, and no two areas overlap.
            let into = unsafe { array_mut(extent.into.cast::<u8>(), extent.length, "into") }?;
            Ok(ReadExtent { lba: extent.lba, into })
        })
        .collect()
}

/// Checks that areas of memory, each with its address and its length in bytes, do not overlap.
///
/// # Errors
/// [`RIOP_ARGUMENT`](crate::RIOP_ARGUMENT): two of them do.
pub fn check_disjoint(areas: impl Iterator<Item = (usize, usize)>) -> Result<(), Failure> {
    let mut areas: Vec<_> = areas.filter(|(_, length)| *length > 0).collect();
    areas.sort_unstable();
    let overlap = areas.windows(2).any(|two| two[1].0 - two[0].0 < two[0].1);
    if overlap {
        return Err(argument("two extents have the same memory".to_owned()));
    }
    Ok(())
}

/// Reads several extents at once, with all writes that the stream has submitted.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_read_many(
    stream: *mut RiopStream,
    extents: *const RiopExtent,
    count: usize,
    timeout_ms: i64,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let mut open = handle::exclusive(stream)?;
            let mut extents = self::extents(extents, count)?;
            Ok(open.stream.read_many(&mut extents, limit(timeout_ms))?)
        })
    }
}

/// Reads several extents at once, with all groups that were complete when the read began.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_reader_read_many(
    reader: *const RiopReader,
    extents: *const RiopExtent,
    count: usize,
    timeout_ms: i64,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let reader = handle::shared(reader)?;
            let mut extents = self::extents(extents, count)?;
            Ok(reader.read_many(&mut extents, limit(timeout_ms))?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_that_share_a_byte_are_refused_in_any_order() {
        let of = |areas: &[(usize, usize)]| check_disjoint(areas.iter().copied()).is_ok();
        // They touch, and an empty one is nowhere.
        assert!(
            of(&[]) && of(&[(8, 4)]) && of(&[(8, 4), (12, 4), (4, 4)]) && of(&[(8, 4), (9, 0)])
        );
        // To the end of the address space.
        assert!(of(&[(usize::MAX - 3, 4), (usize::MAX - 7, 4)]));
        for pair in [[(8, 4), (11, 1)], [(8, 4), (8, 4)], [(8, 9), (10, 2)], [(8, 1), (0, 9)]] {
            let [one, other] = pair;
            assert!(!of(&[one, other]) && !of(&[other, one]), "{pair:?}");
            assert!(!of(&[(100, 1), one, (0, 0), other]), "{pair:?}");
        }
        assert!(!of(&[(0, usize::MAX), (usize::MAX - 1, 1)]));
    }
}
