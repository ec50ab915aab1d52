//! The findings of a recovery.

use std::ffi::{CString, c_char, c_int};
use std::mem::size_of;
use std::ptr;

use riopipe::{InPlaceRange, Recovery, StreamRecovery};

use crate::codes::RIOP_NOT_FOUND;
use crate::error::{RiopError, guard, guard_value};
use crate::failure::Failure;
use crate::handle::{self, Handle, kind};
use crate::memory::{self, Structure, cstring};

/// The findings, and their text.
#[derive(Debug)]
pub struct Findings {
    recovery: Recovery,
    text: CString,
}

/// See `riop_recovery` in `riopipe.h`.
pub type RiopRecovery = Handle<Findings>;

kind!(Findings, b"riop-rec", "riop_recovery");

/// See `riop_stream_recovery` in `riopipe.h`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RiopStreamRecovery {
    /// The size of the structure, bytes.
    pub size: usize,
    /// The recovered seq.
    pub last: u64,
    /// The tag of that group.
    pub tag: u64,
    /// Groups that were not released, and are kept.
    pub kept: u64,
    /// Groups beyond the recovered seq of which something was found.
    pub dropped: u64,
    /// Requests that were sent again.
    pub replayed: u64,
    /// Blocks that were zeroed.
    pub undone_blocks: u64,
    /// The number of log entries that were found.
    pub found: u32,
    /// The number of ranges of updates in place beyond the recovered seq.
    pub in_place: u32,
    /// The number of ranges of writes in doubt.
    pub in_doubt: u32,
    /// 1: these ranges wait to be acknowledged.
    pub acknowledge: u32,
    /// 1: a log was given up.
    pub log_given_up: u32,
    /// Zero.
    pub reserved: u32,
}

// SAFETY: the structure is `repr(C)`, begins with its size, and has only numbers.
unsafe impl Structure for RiopStreamRecovery {
    const NAME: &'static str = "riop_stream_recovery";
}

impl From<&StreamRecovery> for RiopStreamRecovery {
    fn from(found: &StreamRecovery) -> Self {
        let count = |ranges: &[InPlaceRange]| u32::try_from(ranges.len()).unwrap_or(u32::MAX);
        Self {
            size: size_of::<Self>(),
            last: found.last.0,
            tag: found.tag,
            kept: found.kept,
            dropped: found.dropped,
            replayed: found.replayed,
            undone_blocks: found.undone_blocks(),
            found: found.found,
            in_place: count(&found.in_place),
            in_doubt: count(&found.in_doubt),
            acknowledge: found.acknowledge.into(),
            log_given_up: found.log_given_up.into(),
            reserved: 0,
        }
    }
}

/// Blocks that a group has written. See `riop_written` in `riopipe.h`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RiopWritten {
    /// The group.
    pub seq: u64,
    /// The first block.
    pub lba: u64,
    /// The number of blocks.
    pub blocks: u64,
}

impl From<InPlaceRange> for RiopWritten {
    fn from(written: InPlaceRange) -> Self {
        let InPlaceRange { seq, range } = written;
        Self { seq: seq.0, lba: range.lba, blocks: range.blocks }
    }
}

/// Makes the object of a recovery.
pub(crate) fn new(recovery: Recovery) -> *mut RiopRecovery {
    let text = cstring(recovery.to_string());
    handle::new(Findings { recovery, text })
}

/// The report as text, for people.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_recovery_text(recovery: *const RiopRecovery) -> *const c_char {
    // SAFETY: the caller keeps the rules.
    guard_value(c"".as_ptr(), || Ok(unsafe { handle::shared(recovery) }?.text.as_ptr()))
}

/// Whether there was nothing to recover.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_recovery_is_nothing(recovery: *const RiopRecovery) -> c_int {
    // SAFETY: the caller keeps the rules.
    guard_value(1, || Ok(unsafe { handle::shared(recovery) }?.recovery.is_nothing().into()))
}

/// The findings for a stream.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_recovery_stream(
    recovery: *const RiopRecovery,
    id: u16,
    found: *mut RiopStreamRecovery,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let findings = handle::shared(recovery)?;
            let stream = findings.recovery.stream(id).ok_or_else(|| {
                let text = format!(
                    "the recovery has no stream {id}: the volume has no such stream, or no log"
                );
                Failure::new(RIOP_NOT_FOUND, text)
            })?;
            memory::write(found, &stream.into())
        })
    }
}

/// Frees the findings.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_recovery_free(recovery: *mut RiopRecovery) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe { guard(ptr::null_mut(), || handle::free(recovery)) }
}
