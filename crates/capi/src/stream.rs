//! Streams.

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::ptr;
use std::time::Duration;

use riopipe::{
    Seq, Stream, StreamFd, StreamNotClosed, StreamRecovery, StreamWaker, Until, WaitError,
};

use crate::codes::RIOP_NOT_FOUND;
use crate::error::{RiopError, guard};
use crate::failure::Failure;
use crate::handle::{self, Handle, kind};
use crate::memory::{self, argument, array_mut, place, put};
use crate::options::{self, RiopStreamOptions};
use crate::recovery::RiopStreamRecovery;
use crate::time::{RiopMarks, limit, ms_until};
use crate::volume::RiopVolume;

/// The group and all earlier ones are complete.
pub const RIOP_UNTIL_COMPLETE: u32 = 1;
/// The group and all earlier ones are durable.
pub const RIOP_UNTIL_DURABLE: u32 = 2;
/// There is space for groups again.
pub const RIOP_UNTIL_SPACE: u32 = 3;
/// Nothing is in flight.
pub const RIOP_UNTIL_IDLE: u32 = 4;
/// A mark has moved.
pub const RIOP_UNTIL_MOVED: u32 = 5;
/// Another thread has called a waker.
pub const RIOP_UNTIL_WOKEN: u32 = 6;

/// A submitted read has ended, or none is in flight.
pub const RIOP_UNTIL_READ: u32 = 7;

/// An open stream, and its descriptor if the caller has requested one.
#[derive(Debug)]
pub struct OpenStream {
    pub(crate) stream: Stream,
    fd: Option<StreamFd>,
}

/// See `riop_stream` in `riopipe.h`.
pub type RiopStream = Handle<OpenStream>;
/// See `riop_waker` in `riopipe.h`.
pub type RiopWaker = Handle<StreamWaker>;

kind!(OpenStream, b"riop-str", "riop_stream");
kind!(StreamWaker, b"riop-wak", "riop_waker");

/// One attempt of a close without a limit.
const ONE_CLOSE: Duration = Duration::from_secs(3600);

/// The condition of a wait.
pub(crate) fn until(until: u32, seq: u64) -> Result<Until, Failure> {
    match until {
        RIOP_UNTIL_COMPLETE => Ok(Until::Complete(Seq(seq))),
        RIOP_UNTIL_DURABLE => Ok(Until::Durable(Seq(seq))),
        RIOP_UNTIL_SPACE => Ok(Until::Space),
        RIOP_UNTIL_IDLE => Ok(Until::Idle),
        RIOP_UNTIL_MOVED => Ok(Until::Moved),
        RIOP_UNTIL_WOKEN => Ok(Until::Woken),
        RIOP_UNTIL_READ => Ok(Until::ReadEnded),
        _ => Err(argument(format!("there is no condition {until} for a wait (RIOP_UNTIL_…)"))),
    }
}

/// Closes a stream. With no limit, it waits until the stream is closed or fails.
fn close(stream: Stream, timeout: Option<Duration>) -> Result<Seq, StreamNotClosed> {
    let mut stream = stream;
    loop {
        match stream.close_within(timeout.unwrap_or(ONE_CLOSE)) {
            Err(StreamNotClosed { error: WaitError::Deadline(_), back }) if timeout.is_none() => {
                stream = *back;
            }
            closed => return closed,
        }
    }
}

/// Opens a stream of a volume.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_open(
    volume: *const RiopVolume,
    id: u16,
    options: *const RiopStreamOptions,
    stream: *mut *mut RiopStream,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let volume = handle::shared(volume)?;
            let options = options::stream(options)?;
            let stream = place(stream, "stream")?;
            let opened = volume.stream(id, &options)?;
            put(stream, handle::new(OpenStream { stream: opened, fd: None }));
            Ok(())
        })
    }
}

/// Sends, receives, and returns the marks, without waiting.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_poll(
    stream: *mut RiopStream,
    marks: *mut RiopMarks,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let polled = handle::exclusive(stream)?.stream.poll()?;
            put(marks, polled.into());
            Ok(())
        })
    }
}

/// Sends the submitted groups, without waiting.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_send(
    stream: *mut RiopStream,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe { guard(error, || Ok(handle::exclusive(stream)?.stream.send()?)) }
}

/// Waits for a condition.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_wait(
    stream: *mut RiopStream,
    until: u32,
    seq: u64,
    timeout_ms: i64,
    marks: *mut RiopMarks,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let until = self::until(until, seq)?;
            let mut open = handle::exclusive(stream)?;
            let reached = open.stream.wait(until, limit(timeout_ms))?;
            put(marks, reached.into());
            Ok(())
        })
    }
}

/// Reads blocks, with all writes that the stream has submitted.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_read(
    stream: *mut RiopStream,
    lba: u64,
    into: *mut c_void,
    length: usize,
    timeout_ms: i64,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let mut open = handle::exclusive(stream)?;
            // The read only writes to this memory.
            let into = array_mut(into.cast::<u8>(), length, "into")?;
            Ok(open.stream.read(lba, into, limit(timeout_ms))?)
        })
    }
}

/// The seq of the last group that was submitted.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_last(
    stream: *mut RiopStream,
    seq: *mut u64,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let last = handle::exclusive(stream)?.stream.last();
            put(place(seq, "seq")?, last.0);
            Ok(())
        })
    }
}

/// The seq of the last group that is released.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_released(
    stream: *mut RiopStream,
    seq: *mut u64,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let released = handle::exclusive(stream)?.stream.released();
            put(place(seq, "seq")?, released.0);
            Ok(())
        })
    }
}

/// The descriptor for event loops.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_event_fd(
    stream: *mut RiopStream,
    fd: *mut c_int,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let mut open = handle::exclusive(stream)?;
            let place = place(fd, "fd")?;
            if open.fd.is_none() {
                open.fd = Some(open.stream.event_fd()?);
            }
            let event_fd = open.fd.as_ref().expect("it was set above");
            put(place, event_fd.as_raw_fd());
            Ok(())
        })
    }
}

/// The time until the next poll at the latest.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_next_deadline(
    stream: *mut RiopStream,
    timeout_ms: *mut i64,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let open = handle::exclusive(stream)?;
            let place = place(timeout_ms, "timeout_ms")?;
            put(place, ms_until(open.stream.next_deadline()));
            Ok(())
        })
    }
}

/// Restarts a failed stream.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_reopen(
    stream: *mut RiopStream,
    found: *mut RiopStreamRecovery,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let mut open = handle::exclusive(stream)?;
            if !found.is_null() {
                memory::check_results(found)?;
            }
            let recovery = open.stream.reopen()?;
            match found.is_null() {
                true => Ok(()),
                false => memory::write(found, &(&recovery).into()),
            }
        })
    }
}

/// The findings of the stream's own recovery.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_recovery_of(
    stream: *mut RiopStream,
    found: *mut RiopStreamRecovery,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let open = handle::exclusive(stream)?;
            let recovery: &StreamRecovery = open.stream.recovery().ok_or_else(|| {
                Failure::new(RIOP_NOT_FOUND, "the stream had no recovery of its own".into())
            })?;
            memory::write(found, &recovery.into())
        })
    }
}

/// Makes all groups durable, closes the stream, and frees it.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_close(
    stream: *mut RiopStream,
    timeout_ms: i64,
    last: *mut u64,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let closed = handle::consume(stream, |OpenStream { stream, fd }| {
                close(stream, limit(timeout_ms)).map_err(|StreamNotClosed { error, back }| {
                    Box::new((OpenStream { stream: *back, fd }, error.into()))
                })
            })?;
            put(last, closed.0);
            Ok(())
        })
    }
}

/// Frees a stream without closing it.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_stream_free(stream: *mut RiopStream) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe { guard(ptr::null_mut(), || handle::free(stream)) }
}

/// Makes a waker of a stream.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_waker_new(
    stream: *mut RiopStream,
    waker: *mut *mut RiopWaker,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let open = handle::exclusive(stream)?;
            let waker = place(waker, "waker")?;
            put(waker, handle::new(open.stream.waker()));
            Ok(())
        })
    }
}

/// Interrupts the present wait of the stream's owner, or its next one.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_waker_wake(
    waker: *const RiopWaker,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            handle::shared(waker)?.wake();
            Ok(())
        })
    }
}

/// Frees a waker.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_waker_free(waker: *mut RiopWaker) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe { guard(ptr::null_mut(), || handle::free(waker)) }
}
