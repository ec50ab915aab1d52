//! The bytes that a session must send, in order: headers that it wrote itself, and payloads that it
//! passes through.
//!
//! ```text
//! segments:       | header 0..72 | payload A | payload B | header 72..96 | …
//!                        ↓                                       ↓
//! header buffer:  [ 0 ........ 72 ............................. 96 ]
//! ```
//!
//! Payloads are never copied: the shell gathers the slices into one `sendmsg`. All headers lie in
//! one buffer, which is reused. So nothing is allocated in steady state.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::ops::Range;

use riopipe_nvme::command::{Cqe, Sqe};
use riopipe_nvme::pdu::Tx;

/// The number of sent bytes in the header buffer from which on its rest may be moved to the front.
const COMPACT_BYTES: usize = 64 * 1024;

/// A part of the bytes to be sent. The start of its range moves up as bytes are sent.
#[derive(Debug)]
enum Segment<P> {
    /// A range of the header buffer.
    Header(Range<usize>),
    /// A range of a payload. The payload is dropped once the whole range is sent.
    Payload(P, Range<usize>),
}

impl<P> Segment<P> {
    fn unsent_range(&mut self) -> &mut Range<usize> {
        match self {
            Self::Header(range) | Self::Payload(_, range) => range,
        }
    }
}

/// Bytes and payloads to be sent, in order.
#[derive(Debug)]
pub struct Outbox<P> {
    /// The header buffer: the bytes that the session itself has written.
    headers: Vec<u8>,
    /// The segments that are not wholly sent, in order.
    segments: VecDeque<Segment<P>>,
    /// The number of bytes left to send, in all segments.
    unsent_bytes: usize,
    /// The number of bytes sent since the outbox was created.
    sent_bytes: u64,
}

impl<P> Default for Outbox<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P> Outbox<P> {
    /// An empty outbox.
    #[must_use]
    pub const fn new() -> Self {
        Self { headers: Vec::new(), segments: VecDeque::new(), unsent_bytes: 0, sent_bytes: 0 }
    }

    /// Whether nothing is left to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// The number of bytes left to send, including payloads.
    #[must_use]
    pub const fn len_bytes(&self) -> usize {
        self.unsent_bytes
    }

    /// The position behind the last appended byte. Positions count all bytes that were ever
    /// appended.
    #[must_use]
    pub(crate) const fn end(&self) -> u64 {
        self.sent_bytes + self.unsent_bytes as u64
    }

    /// Whether all bytes before the position `end` are sent.
    #[must_use]
    pub(crate) const fn has_sent(&self, end: u64) -> bool {
        self.sent_bytes >= end
    }

    /// The number of slices that [`Outbox::slices`] yields.
    #[must_use]
    pub fn len_slices(&self) -> usize {
        self.segments.len()
    }

    /// Appends the bytes that `write` appends to the vector. `write` must not change the bytes that
    /// the vector has already.
    #[inline]
    pub fn push_bytes<R>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        let start = self.headers.len();
        let result = write(&mut self.headers);
        self.append_headers_from(start);
        result
    }

    /// Appends a command capsule with `data_len` bytes of data to follow.
    #[inline(always)]
    pub(crate) fn push_command(&mut self, tx: &Tx, sqe: &Sqe, data_len: u32) {
        let start = self.headers.len();
        tx.capsule_cmd(sqe, data_len, &mut self.headers);
        self.append_headers_from(start);
    }

    /// Appends a response capsule.
    #[inline(always)]
    pub(crate) fn push_response(&mut self, tx: &Tx, cqe: &Cqe) {
        let start = self.headers.len();
        tx.capsule_resp(cqe, &mut self.headers);
        self.append_headers_from(start);
    }

    /// Adds the bytes of the header buffer from `start` on to the bytes to be sent. They join the
    /// last segment if they continue it.
    #[inline(always)]
    fn append_headers_from(&mut self, start: usize) {
        let end = self.headers.len();
        debug_assert!(start <= end);
        if start < end {
            self.unsent_bytes += end - start;
            match self.segments.back_mut() {
                Some(Segment::Header(range)) if range.end == start => range.end = end,
                _ => self.segments.push_back(Segment::Header(start..end)),
            }
        }
    }

    /// Drops all bytes and payloads; the memory is kept for later bytes.
    pub fn clear(&mut self) {
        self.headers.clear();
        self.segments.clear();
        self.sent_bytes = self.end();
        self.unsent_bytes = 0;
    }

    /// Removes the first `count` bytes after they were sent. Payloads that are wholly sent are
    /// dropped.
    ///
    /// # Panics
    /// If fewer bytes are left.
    pub fn consume(&mut self, count: usize) {
        assert!(count <= self.unsent_bytes, "{count} bytes sent of {}", self.unsent_bytes);
        self.unsent_bytes -= count;
        self.sent_bytes += count as u64;
        let mut remaining = count;
        while remaining > 0 {
            // `unsent_bytes` is the sum of all ranges. So while bytes remain, there is a segment.
            let Some(segment) = self.segments.front_mut() else { break };
            let range = segment.unsent_range();
            let removed = remaining.min(range.len());
            range.start += removed;
            remaining -= removed;
            if range.start == range.end {
                self.segments.pop_front();
            }
        }
        if self.segments.is_empty() {
            self.headers.clear();
        } else {
            self.compact();
        }
    }

    /// Removes the sent bytes from the header buffer, if they are at least [`COMPACT_BYTES`] and
    /// half of the buffer. Under steady load the outbox may never be empty, and the header buffer
    /// must not grow without limit. Each call moves at most as many bytes as it removes, so the
    /// cost per byte is constant.
    fn compact(&mut self) {
        let first_unsent = self.segments.iter().find_map(|segment| match segment {
            Segment::Header(range) => Some(range.start),
            Segment::Payload(..) => None,
        });
        let sent_headers = first_unsent.unwrap_or(self.headers.len());
        if sent_headers < COMPACT_BYTES || sent_headers < self.headers.len() / 2 {
            return;
        }
        self.headers.drain(..sent_headers);
        for segment in &mut self.segments {
            if let Segment::Header(range) = segment {
                range.start -= sent_headers;
                range.end -= sent_headers;
            }
        }
    }
}

impl<P: AsRef<[u8]>> Outbox<P> {
    /// Appends a whole payload.
    #[inline]
    pub fn push_payload(&mut self, payload: P) {
        let len = payload.as_ref().len();
        self.push_slice(payload, 0..len);
    }

    /// Appends the `range` of a payload.
    ///
    /// # Panics
    /// When it is sent, if the range is not inside the payload.
    #[inline]
    pub fn push_slice(&mut self, payload: P, range: Range<usize>) {
        if !range.is_empty() {
            self.unsent_bytes += range.len();
            self.segments.push_back(Segment::Payload(payload, range));
        }
    }

    /// The bytes to be sent, in order.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        self.segments.iter().map(|segment| match segment {
            Segment::Header(range) => &self.headers[range.clone()],
            Segment::Payload(payload, range) => &payload.as_ref()[range.clone()],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::rc::Rc;
    use alloc::vec;

    fn all<P: AsRef<[u8]>>(out: &Outbox<P>) -> Vec<u8> {
        out.slices().flatten().copied().collect()
    }

    #[test]
    fn adjacent_bytes_become_one_slice() {
        let mut out: Outbox<Vec<u8>> = Outbox::new();
        out.push_bytes(|b| b.extend(b"ab"));
        out.push_bytes(|b| b.extend(b"cd"));
        out.push_bytes(|_| ());
        assert_eq!(out.len_slices(), 1);
        out.push_payload(vec![1, 2, 3]);
        out.push_payload(vec![]);
        out.push_bytes(|b| b.extend(b"ef"));
        assert_eq!(out.len_slices(), 3);
        assert_eq!(out.len_bytes(), 9);
        assert_eq!(all(&out), b"abcd\x01\x02\x03ef");
    }

    #[test]
    fn any_partial_send_leaves_the_rest_and_drops_the_sent_part() {
        for n in 0..=9 {
            let payload = Rc::new([1u8, 2, 3, 4]);
            let mut out: Outbox<RcBuf> = Outbox::new();
            out.push_bytes(|b| b.extend(b"ab"));
            out.push_slice(RcBuf(payload.clone()), 1..4);
            out.push_bytes(|b| b.extend(b"cdef"));
            out.consume(n);
            assert_eq!(all(&out), b"ab\x02\x03\x04cdef"[n..]);
            assert_eq!(out.len_bytes(), 9 - n);
            assert_eq!(Rc::strong_count(&payload), if n < 5 { 2 } else { 1 });
            out.push_bytes(|b| b.extend(b"z"));
            assert_eq!(all(&out).last(), Some(&b'z'));
        }
    }

    struct RcBuf(Rc<[u8; 4]>);
    impl AsRef<[u8]> for RcBuf {
        fn as_ref(&self) -> &[u8] {
            &self.0[..]
        }
    }

    #[test]
    fn the_header_buffer_stays_small_although_never_empty() {
        let mut out: Outbox<Vec<u8>> = Outbox::new();
        let mut next_in = 0u32;
        let mut next_out = 0u32;
        for round in 0..40_000u32 {
            for _ in 0..3 {
                out.push_bytes(|b| b.extend(next_in.to_le_bytes()));
                next_in += 1;
                if round % 7 == 0 {
                    out.push_payload(next_in.to_le_bytes().to_vec());
                    next_in += 1;
                }
            }
            while out.len_bytes() > 40 {
                let got: Vec<u8> = out.slices().flatten().take(4).copied().collect();
                assert_eq!(got, next_out.to_le_bytes());
                next_out += 1;
                out.consume(4);
            }
        }
        assert!(next_out > 100_000);
        assert!(out.headers.capacity() < 8 * COMPACT_BYTES, "{}", out.headers.capacity());
    }
    #[test]
    fn the_header_buffer_stays_small_although_much_is_sent_at_once() {
        let mut out: Outbox<Vec<u8>> = Outbox::new();
        for _ in 0..100 {
            out.push_bytes(|b| b.resize(b.len() + 2 * COMPACT_BYTES, 7));
            out.consume(out.len_bytes() - 10);
        }
        assert!(out.headers.capacity() < 8 * COMPACT_BYTES, "{}", out.headers.capacity());
    }
}
