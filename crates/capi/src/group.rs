//! Groups: writes are staged in a group, which is then submitted to a stream whole.

use std::ffi::c_int;
use std::ptr;
use std::time::Duration;

use riopipe::{Buf, Place, Seq, Stream, StreamId, SubmitError};

use crate::buf::RiopBuf;
use crate::codes::RIOP_RANGE;
use crate::error::{RiopError, guard};
use crate::failure::Failure;
use crate::handle::{self, Handle, NotConsumed, kind};
use crate::memory::{argument, place, put};
use crate::stream::RiopStream;
use crate::time::limit;

/// No state to which the volume may still recover needs the old content.
pub const RIOP_FRESH: u32 = 1;
/// The old content may still be needed.
pub const RIOP_IN_PLACE: u32 = 2;
/// The new content serves as well as the old for each of these states.
pub const RIOP_EXTEND: u32 = 3;

/// A group is submitted as durable.
pub const RIOP_DURABLE: u32 = 1;

/// Writes that are not submitted yet.
#[derive(Debug, Default)]
pub struct Staged {
    requests: Vec<Request>,
    tag: u64,
    follower: Option<StreamId>,
}

/// One request of a group.
#[derive(Debug)]
enum Request {
    Write {
        lba: u64,
        place: Place,
        /// `None` only while the group is being submitted.
        buf: Option<Buf>,
    },
    Discard {
        lba: u64,
        blocks: u32,
    },
}

/// See `riop_group` in `riopipe.h`.
pub type RiopGroup = Handle<Staged>;

kind!(Staged, b"riop-grp", "riop_group");

impl Staged {
    /// Adds a write of `buf` at volume block `lba`.
    pub fn write(&mut self, lba: u64, place: Place, buf: Buf) {
        self.requests.push(Request::Write { lba, place, buf: Some(buf) });
    }

    /// Adds a request that makes `blocks` blocks from volume block `lba` on read as zeroes.
    ///
    /// # Errors
    /// [`RIOP_RANGE`]: there are no blocks.
    pub fn discard(&mut self, lba: u64, blocks: u32) -> Result<(), Failure> {
        if blocks == 0 {
            return Err(Failure::new(RIOP_RANGE, "a discard has at least one block".into()));
        }
        self.requests.push(Request::Discard { lba, blocks });
        Ok(())
    }

    /// Sets the caller's tag.
    pub fn tag(&mut self, tag: u64) {
        self.tag = tag;
    }

    /// Lets stream `id` follow the group.
    pub fn follower(&mut self, id: u16) {
        self.follower = Some(StreamId(id));
    }

    /// The number of writes and discards.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there are no writes and discards.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Submits the group, and waits for space for `timeout` at most; `None` means without limit. After a success the
    /// group is empty; after a failure it is as before.
    ///
    /// # Errors
    /// The error of the submission.
    ///
    /// # Panics
    /// If a submission of the group has panicked before: then its buffers are lost.
    pub fn submit(
        &mut self,
        stream: &mut Stream,
        durable: bool,
        timeout: Option<Duration>,
    ) -> Result<Seq, Failure> {
        let mut next = stream.group().tag(self.tag);
        for request in &mut self.requests {
            next = match request {
                Request::Write { lba, place, buf } => {
                    let buf = buf.take().expect("each write of a staged group has its buffer");
                    next.write(*lba, buf, *place)
                }
                Request::Discard { lba, blocks } => next.discard(*lba, *blocks),
            };
        }
        if let Some(follower) = self.follower {
            next = next.follower(follower);
        }
        let submitted = match durable {
            false => next.submit_or_wait(timeout),
            true => next.submit_durable_or_wait(timeout),
        };
        match submitted {
            Ok(seq) => {
                self.reset();
                Ok(seq)
            }
            Err(SubmitError { kind, bufs }) => {
                self.restore(bufs);
                Err(kind.into())
            }
        }
    }

    /// Puts the buffers of a group that was refused back to their writes.
    fn restore(&mut self, bufs: Vec<Buf>) {
        let mut bufs = bufs.into_iter();
        for request in &mut self.requests {
            if let Request::Write { buf, .. } = request {
                *buf = bufs.next();
            }
        }
    }

    /// Makes the group empty, and drops its buffers.
    pub fn reset(&mut self) {
        self.requests.clear();
        self.tag = 0;
        self.follower = None;
    }
}

/// Makes an empty group.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_group_new(
    group: *mut *mut RiopGroup,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let group = place(group, "group")?;
            put(group, handle::new(Staged::default()));
            Ok(())
        })
    }
}

/// Adds a write, which takes the buffer.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_group_write(
    group: *mut RiopGroup,
    lba: u64,
    buf: *mut RiopBuf,
    place: u32,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let mut staged = handle::exclusive(group)?;
            let place = match place {
                RIOP_FRESH => Place::Fresh,
                RIOP_IN_PLACE => Place::InPlace,
                RIOP_EXTEND => Place::Extend,
                _ => {
                    let text =
                        format!("{place} is no place: RIOP_FRESH, RIOP_IN_PLACE or RIOP_EXTEND");
                    return Err(argument(text));
                }
            };
            let buf = handle::consume(buf, Ok::<_, NotConsumed<Buf>>)?;
            staged.write(lba, place, buf);
            Ok(())
        })
    }
}

/// Adds a request that makes blocks read as zeroes.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_group_discard(
    group: *mut RiopGroup,
    lba: u64,
    blocks: u32,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe { guard(error, || handle::exclusive(group)?.discard(lba, blocks)) }
}

/// Sets the tag of the group.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_group_tag(
    group: *mut RiopGroup,
    tag: u64,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            handle::exclusive(group)?.tag(tag);
            Ok(())
        })
    }
}

/// Lets another stream follow the group.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_group_follower(
    group: *mut RiopGroup,
    id: u16,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            handle::exclusive(group)?.follower(id);
            Ok(())
        })
    }
}

/// Submits the group to a stream. After a success the group is empty; after a failure it is as before.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_group_submit(
    group: *mut RiopGroup,
    stream: *mut RiopStream,
    flags: u32,
    timeout_ms: i64,
    seq: *mut u64,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let mut staged = handle::exclusive(group)?;
            let mut open = handle::exclusive(stream)?;
            if flags & !RIOP_DURABLE != 0 {
                return Err(argument(format!("the flags {flags:#x} have more than RIOP_DURABLE")));
            }
            let durable = flags & RIOP_DURABLE != 0;
            let submitted = staged.submit(&mut open.stream, durable, limit(timeout_ms))?;
            put(seq, submitted.0);
            Ok(())
        })
    }
}

/// Makes a group empty, and frees its buffers.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_group_reset(
    group: *mut RiopGroup,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            handle::exclusive(group)?.reset();
            Ok(())
        })
    }
}

/// Frees a group and its buffers.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_group_free(group: *mut RiopGroup) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe { guard(ptr::null_mut(), || handle::free(group)) }
}
