//! A command capsule, as it lies in the receive buffer.

use core::ops::Range;

use riopipe_nvme::command::Sqe;

/// One command capsule in the receive buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capsule<'a> {
    /// The command.
    pub(super) sqe: &'a Sqe,
    /// The in-capsule data of the command.
    pub(super) data: &'a [u8],
    /// The offset of `data` in the receive buffer, bytes.
    pub(super) data_offset: usize,
    /// Whether the digest of the data is right, or there is none.
    pub(super) is_digest_valid: bool,
}

impl<'a> Capsule<'a> {
    /// The capsule of `sqe`. `data` is the range of the in-capsule data in the receive buffer
    /// `buf`.
    #[inline]
    pub(super) fn new(
        sqe: &'a Sqe,
        buf: &'a [u8],
        data: Range<usize>,
        is_digest_valid: bool,
    ) -> Self {
        Self { sqe, data_offset: data.start, data: &buf[data], is_digest_valid }
    }
}
