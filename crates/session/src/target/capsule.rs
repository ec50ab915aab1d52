//! A command capsule, as it lies in the receive buffer.

use core::ops::Range;

use riopipe_nvme::command::Sqe;

/// One command capsule in the receive buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capsule<'a> {
    pub(super) sqe: &'a Sqe,
    /// Its in-capsule data.
    pub(super) data: &'a [u8],
    /// Where that data begins in the receive buffer, in bytes.
    pub(super) data_at: usize,
    pub(super) digest_ok: bool,
}

impl<'a> Capsule<'a> {
    /// The capsule of `sqe`, with its data at `data` in the receive buffer `buf`.
    #[inline]
    pub(super) fn new(sqe: &'a Sqe, buf: &'a [u8], data: Range<usize>, digest_ok: bool) -> Self {
        Self { sqe, data_at: data.start, data: &buf[data], digest_ok }
    }
}
