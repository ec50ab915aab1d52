//! Reads that are submitted, and end later.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::ptr;

use riopipe::{ReadEnd, ReadId, ReadMemory};

use crate::codes::{RIOP_NOT_FOUND, RIOP_OK};
use crate::error::{self, RiopError, guard};
use crate::failure::Failure;
use crate::handle;
use crate::memory::{array_mut, place, put};
use crate::stream::RiopStream;
use crate::time::limit;

/// The end of a submitted read. See `riop_read_end` in `riopipe.h`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RiopReadEnd {
    /// The number of the read in its stream.
    pub id: u64,
    /// The caller's tag of the read.
    pub tag: u64,
    /// The memory of the read.
    pub into: *mut c_void,
    /// The number of bytes.
    pub length: usize,
    /// Why the read failed; null after a success.
    pub error: *mut RiopError,
    /// The code of the error.
    pub code: c_int,
    /// Zero.
    pub reserved: u32,
}

/// Memory of the caller, which the library writes to until the read has ended.
struct CallerMemory {
    into: *mut u8,
    length: usize,
    tag: u64,
}

// SAFETY: the caller has left the memory to the library until the end of the read, for any of its threads.
unsafe impl Send for CallerMemory {}

impl ReadMemory for CallerMemory {
    fn length(&self) -> usize {
        self.length
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        debug_assert!(offset + bytes.len() <= self.length, "they lie within the length");
        // SAFETY: the bytes lie within the caller's memory, by the contract of `put`. No other code uses the memory, as the
        // caller has promised, so it does not overlap `bytes`, which are the library's.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.into.add(offset), bytes.len()) };
    }
}

/// Submits a read of blocks, without waiting for it.
///
/// # Safety
/// See the [rules](crate#safety). The memory belongs to the library until the end of the read was returned, or until the
/// stream was closed or freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_submit_read(
    stream: *mut RiopStream,
    lba: u64,
    into: *mut c_void,
    length: usize,
    tag: u64,
    timeout_ms: i64,
    id: *mut u64,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let mut open = handle::exclusive(stream)?;
            let into = into.cast::<u8>();
            // Only the check: no reference to the memory outlives this call.
            array_mut(into, length, "into")?;
            let memory = CallerMemory { into, length, tag };
            let submitted = open.stream.submit_read(lba, memory, limit(timeout_ms));
            let ReadId(number) = submitted.map_err(|not_submitted| not_submitted.error)?;
            put(id, number);
            Ok(())
        })
    }
}

/// Takes the ends of submitted reads.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_read_ends(
    stream: *mut RiopStream,
    ends: *mut RiopReadEnd,
    capacity: usize,
    count: *mut usize,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let mut open = handle::exclusive(stream)?;
            let count = place(count, "count")?;
            // Each place is written below before it is counted, and not read.
            let places = array_mut(ends, capacity, "ends")?;
            let mut taken = 0;
            for place in places {
                let Some(end) = open.stream.take_read() else { break };
                *place = of_end(end);
                taken += 1;
            }
            put(count, taken);
            Ok(())
        })
    }
}

/// The end of a read, as C has it.
fn of_end(end: ReadEnd) -> RiopReadEnd {
    let ReadEnd { id: ReadId(id), memory, result } = end;
    let memory: Box<dyn Any> = memory;
    let memory = memory.downcast::<CallerMemory>().expect("all reads of C have such memory");
    let failure = result.err().map(Failure::from);
    RiopReadEnd {
        id,
        tag: memory.tag,
        into: memory.into.cast(),
        length: memory.length,
        code: failure.as_ref().map_or(RIOP_OK, |failure| failure.code),
        error: failure.map_or(ptr::null_mut(), error::new),
        reserved: 0,
    }
}

/// Cancels a submitted read.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_cancel_read(
    stream: *mut RiopStream,
    id: u64,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || match handle::exclusive(stream)?.stream.cancel_read(ReadId(id)) {
            true => Ok(()),
            false => {
                Err(Failure::new(RIOP_NOT_FOUND, format!("no read with id {id} is in flight")))
            }
        })
    }
}
