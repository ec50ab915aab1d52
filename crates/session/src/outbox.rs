//! The bytes that a session must send, in order: bytes that it wrote itself, and payloads that it
//! passes through.
//!
//! Payloads are never copied: the shell gathers the slices into one `sendmsg`. Headers share one
//! growing buffer, which is reused; in steady state nothing is allocated.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::ops::Range;

use riopipe_nvme::command::{Cqe, Sqe};
use riopipe_nvme::pdu::Tx;

/// The number of bytes sent out of the header buffer before its rest is moved to the front.
const COMPACT_BYTES: usize = 64 * 1024;

/// A piece of the bytes to be sent.
#[derive(Debug)]
enum Seg<P> {
    /// A range of the header buffer.
    Bytes(Range<usize>),
    /// A range of a payload; the payload is dropped once all of it is sent.
    Payload(P, Range<usize>),
}

impl<P> Seg<P> {
    fn range(&mut self) -> &mut Range<usize> {
        match self {
            Self::Bytes(range) | Self::Payload(_, range) => range,
        }
    }
}

/// Bytes and payloads to be sent, in order.
#[derive(Debug)]
pub struct Outbox<P> {
    /// The header buffer: the bytes that the session itself has written.
    bytes: Vec<u8>,
    /// The pieces to be sent, in order.
    segs: VecDeque<Seg<P>>,
    /// The number of bytes left to send, in all pieces.
    len: usize,
    /// The number of bytes sent since the beginning.
    sent: u64,
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
        Self { bytes: Vec::new(), segs: VecDeque::new(), len: 0, sent: 0 }
    }

    /// Whether nothing is left to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.segs.is_empty()
    }

    /// The number of bytes left to send, including payloads.
    #[must_use]
    pub const fn len_bytes(&self) -> usize {
        self.len
    }

    /// The position behind the last byte that was appended, counted from the first byte ever.
    #[must_use]
    pub(crate) const fn end(&self) -> u64 {
        self.sent + self.len as u64
    }

    /// Whether all bytes before this `end` are sent.
    #[must_use]
    pub(crate) const fn has_sent(&self, end: u64) -> bool {
        self.sent >= end
    }

    /// The number of slices that [`Outbox::slices`] yields.
    #[must_use]
    pub fn len_slices(&self) -> usize {
        self.segs.len()
    }

    /// Appends the bytes that `write` appends to the vector. `write` must not change the bytes that
    /// the vector has already.
    #[inline]
    pub fn push_bytes<R>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        let start = self.bytes.len();
        let result = write(&mut self.bytes);
        self.note_new(start);
        result
    }

    /// Appends a command capsule with `data_len` bytes of data to follow.
    #[inline(always)]
    pub(crate) fn push_command(&mut self, tx: &Tx, sqe: &Sqe, data_len: u32) {
        let start = self.bytes.len();
        tx.capsule_cmd(sqe, data_len, &mut self.bytes);
        self.note_new(start);
    }

    /// Appends a response capsule.
    #[inline(always)]
    pub(crate) fn push_response(&mut self, tx: &Tx, cqe: &Cqe) {
        let start = self.bytes.len();
        tx.capsule_resp(cqe, &mut self.bytes);
        self.note_new(start);
    }

    /// Notes that the bytes from `start` on were appended to the header buffer.
    #[inline(always)]
    fn note_new(&mut self, start: usize) {
        let end = self.bytes.len();
        debug_assert!(start <= end);
        if start < end {
            self.len += end - start;
            match self.segs.back_mut() {
                Some(Seg::Bytes(range)) if range.end == start => range.end = end,
                _ => self.segs.push_back(Seg::Bytes(start..end)),
            }
        }
    }

    /// Drops all bytes and payloads; the memory is kept for later bytes.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.segs.clear();
        self.sent = self.end();
        self.len = 0;
    }

    /// Takes the first `n` bytes off, after they were sent: payloads that are wholly sent are
    /// dropped.
    ///
    /// # Panics
    /// If fewer bytes are left.
    pub fn consume(&mut self, mut n: usize) {
        assert!(n <= self.len, "{n} bytes sent of {}", self.len);
        self.len -= n;
        self.sent += n as u64;
        while n > 0 {
            // `len` is the sum of all ranges, so as long as bytes are left there is a segment.
            let Some(seg) = self.segs.front_mut() else { break };
            let range = seg.range();
            let take = n.min(range.len());
            range.start += take;
            n -= take;
            if range.start == range.end {
                self.segs.pop_front();
            }
        }
        if self.segs.is_empty() {
            self.bytes.clear();
        } else {
            self.compact();
        }
    }

    /// Removes the sent bytes from the header buffer, if they are at least half of it. Under steady
    /// load the outbox may never be empty, and the header buffer must not grow without limit. Each
    /// call moves at most as many bytes as it removes, so the cost per byte is constant.
    fn compact(&mut self) {
        let sent = self
            .segs
            .iter()
            .find_map(|seg| match seg {
                Seg::Bytes(range) => Some(range.start),
                Seg::Payload(..) => None,
            })
            .unwrap_or(self.bytes.len());
        if sent < COMPACT_BYTES || sent < self.bytes.len() / 2 {
            return;
        }
        self.bytes.drain(..sent);
        for seg in &mut self.segs {
            if let Seg::Bytes(range) = seg {
                range.start -= sent;
                range.end -= sent;
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
            self.len += range.len();
            self.segs.push_back(Seg::Payload(payload, range));
        }
    }

    /// The bytes to be sent, in order.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        self.segs.iter().map(|seg| match seg {
            Seg::Bytes(range) => &self.bytes[range.clone()],
            Seg::Payload(payload, range) => &payload.as_ref()[range.clone()],
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
        assert!(out.bytes.capacity() < 8 * COMPACT_BYTES, "{}", out.bytes.capacity());
    }
    #[test]
    fn the_header_buffer_stays_small_although_much_is_sent_at_once() {
        let mut out: Outbox<Vec<u8>> = Outbox::new();
        for _ in 0..100 {
            out.push_bytes(|b| b.resize(b.len() + 2 * COMPACT_BYTES, 7));
            out.consume(out.len_bytes() - 10);
        }
        assert!(out.bytes.capacity() < 8 * COMPACT_BYTES, "{}", out.bytes.capacity());
    }
}
