//! The receive buffer: large, contiguous, and rarely moved.

use crate::socket::{LinkError, Received, Socket};

/// The least space for one receive, bytes. Receives beyond 128 KiB are not faster.
const RECV_SPACE_MIN: usize = 128 << 10;

/// From this length of a place outside on, bytes, few bytes behind it are received in the same call.
const LONG_SPACE: usize = 32 << 10;
/// The bytes behind a long place outside: the next message usually begins there, and most of it belongs
/// outside, too. What is received here must be copied there.
const BEHIND_LONG_SPACE: usize = 4 << 10;

/// The outcome of [`RecvBuf::fill_behind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filled {
    /// The outcome of the receive; the bytes are those of both places together.
    pub received: Received,
    /// The number of bytes in the place outside.
    pub outside_bytes: usize,
    /// All the space was filled, so more may have arrived.
    pub is_full: bool,
}

/// A message is larger than the buffer may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message of {need} bytes does not fit into a receive buffer of at most {max} bytes")]
pub struct BufFull {
    /// Length of the message in bytes.
    pub need: usize,
    /// Largest capacity of the buffer in bytes.
    pub max: usize,
}

/// Received bytes that are not consumed, in one piece.
///
/// ```text
/// bytes: [ consumed │ data (received, not consumed) │ space for the next receive ]
///        0          start                           end                   capacity
/// ```
///
/// A protocol consumes complete messages, and leaves the beginning of an incomplete one. The next
/// receive adds bytes after it. The data is moved to the front only when there is too little space after
/// it, so bytes are rarely copied. An empty buffer begins at the front again, so the same cached memory is
/// used again and again.
#[derive(Debug)]
pub struct RecvBuf {
    bytes: Vec<u8>,
    /// The offset of the first byte that is not consumed.
    start: usize,
    /// The offset after the last received byte.
    end: usize,
    /// The largest capacity, bytes.
    capacity_max: usize,
}

impl RecvBuf {
    /// Default capacity in bytes: 512 KiB.
    pub const DEFAULT_CAPACITY: usize = 512 << 10;

    /// A buffer of 512 KiB that may grow to `max` bytes (at least 512 KiB) for a single message.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Self::with_capacity(Self::DEFAULT_CAPACITY, max)
    }

    /// A buffer of `capacity` bytes (at least 256 KiB) that may grow to `max`.
    #[must_use]
    pub fn with_capacity(capacity: usize, max: usize) -> Self {
        let capacity = capacity.max(2 * RECV_SPACE_MIN);
        Self { bytes: vec![0; capacity], start: 0, end: 0, capacity_max: max.max(capacity) }
    }

    /// A buffer of `capacity` bytes for a peer that may not use more memory yet. It may grow to `max`
    /// bytes for a single message, and [`widen`](Self::widen) makes a buffer of the usual size of it.
    #[must_use]
    pub fn narrow(capacity: usize, max: usize) -> Self {
        Self { bytes: vec![0; capacity], start: 0, end: 0, capacity_max: max.max(capacity) }
    }

    /// Gives the buffer the size of [`RecvBuf::new`]. It keeps its data.
    pub fn widen(&mut self, max: usize) {
        let mut wide = Self::new(max.max(self.len()));
        wide.end = self.len();
        wide.bytes[..wide.end].copy_from_slice(self.data());
        *self = wide;
    }

    /// The bytes that were received and not consumed.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Length of [`data`](RecvBuf::data) in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether all bytes have been consumed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Current capacity in bytes.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.bytes.len()
    }

    /// Drops the first `n` bytes of [`data`](RecvBuf::data).
    ///
    /// # Panics
    /// If there are fewer bytes.
    pub fn consume(&mut self, n: usize) {
        assert!(n <= self.len(), "consumed {n} of {} bytes", self.len());
        self.start += n;
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Drops all bytes, for a new connection.
    pub fn clear(&mut self) {
        self.start = 0;
        self.end = 0;
    }

    /// Makes space for a whole message of `need` bytes. [`data`](RecvBuf::data) has the beginning of the
    /// message. The buffer grows if necessary. Without this, the beginning of a message may fill the
    /// buffer, and its rest could not be received.
    ///
    /// # Errors
    /// [`BufFull`], if the message is larger than the buffer may become: an error of the peer.
    pub fn reserve(&mut self, need: usize) -> Result<(), BufFull> {
        if need > self.capacity_max {
            return Err(BufFull { need, max: self.capacity_max });
        }
        let has_space_behind = self.start + need <= self.bytes.len();
        if !has_space_behind {
            self.compact();
        }
        if need > self.bytes.len() {
            let capacity = need.next_power_of_two().min(self.capacity_max).max(need);
            self.bytes.resize(capacity, 0);
        }
        Ok(())
    }

    /// Receives once, behind the bytes that are there.
    ///
    /// Returns `WouldBlock` if the buffer is full of one incomplete message: call
    /// [`reserve`](RecvBuf::reserve) for the message.
    ///
    /// # Errors
    /// [`LinkError`], if the connection is gone. Bytes received before stay.
    pub fn fill(&mut self, socket: &Socket) -> Result<Received, LinkError> {
        if self.bytes.len() - self.end < RECV_SPACE_MIN {
            self.compact();
        }
        let space = &mut self.bytes[self.end..];
        if space.is_empty() {
            return Ok(Received::WouldBlock);
        }
        let received = socket.recv(space)?;
        if let Received::Bytes(count) = received {
            self.end += count;
        }
        Ok(received)
    }

    /// Receives once: first into `space`, a place outside of the buffer where the next bytes belong,
    /// and the bytes behind them into the buffer. The buffer must be empty, unless `space` is.
    ///
    /// Without `space` it is [`fill`](RecvBuf::fill).
    ///
    /// # Errors
    /// [`LinkError`], if the connection is gone. Bytes received before stay.
    pub fn fill_behind(&mut self, space: &mut [u8], socket: &Socket) -> Result<Filled, LinkError> {
        if space.is_empty() {
            let received = self.fill(socket)?;
            return Ok(Filled { received, outside_bytes: 0, is_full: false });
        }
        debug_assert!(self.is_empty(), "the bytes of the buffer come first");
        let space_len = space.len();
        let behind = match space_len < LONG_SPACE {
            true => &mut self.bytes[..],
            false => {
                let len = BEHIND_LONG_SPACE.min(self.bytes.len());
                &mut self.bytes[..len]
            }
        };
        let whole_len = space_len + behind.len();
        let received = socket.recv_into_both(space, behind)?;
        let Received::Bytes(count) = received else {
            return Ok(Filled { received, outside_bytes: 0, is_full: false });
        };
        (self.start, self.end) = (0, count.saturating_sub(space_len));
        let is_full = count == whole_len;
        Ok(Filled { received, outside_bytes: count.min(space_len), is_full })
    }

    /// Moves the data to the front.
    fn compact(&mut self) {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::fd::AsFd, time::Duration};

    use super::*;
    use crate::{poller::wait_readable, socket::tests::pair};

    fn fill_soon(buf: &mut RecvBuf, from: &Socket) -> Received {
        assert!(wait_readable(from.as_fd(), Duration::from_secs(10)).unwrap());
        buf.fill(from).unwrap()
    }

    #[test]
    fn keeps_the_start_of_a_message_until_its_end_arrives() {
        let (near, far) = pair();
        let mut buf = RecvBuf::new(0);
        assert_eq!(buf.fill(&far).unwrap(), Received::WouldBlock);
        near.send([&b"whole|par"[..]]).unwrap();
        assert_eq!(fill_soon(&mut buf, &far), Received::Bytes(9));
        buf.consume(6);
        assert_eq!(buf.data(), b"par");
        near.send([&b"tial"[..]]).unwrap();
        assert_eq!(fill_soon(&mut buf, &far), Received::Bytes(4));
        assert_eq!(buf.data(), b"partial");
        buf.consume(7);
        assert!(buf.is_empty());
        drop(near);
        assert_eq!(fill_soon(&mut buf, &far), Received::Closed);
    }

    #[test]
    fn bytes_beyond_the_space_outside_come_into_the_buffer() {
        let (near, far) = pair();
        let mut buf = RecvBuf::new(0);
        let mut space = [0; 6];
        let filled = |received, outside_bytes| Filled { received, outside_bytes, is_full: false };
        let nothing = filled(Received::WouldBlock, 0);
        assert_eq!(buf.fill_behind(&mut space, &far).unwrap(), nothing);
        near.send([&b"out"[..]]).unwrap();
        assert!(wait_readable(far.as_fd(), Duration::from_secs(10)).unwrap());
        assert_eq!(buf.fill_behind(&mut space, &far).unwrap(), filled(Received::Bytes(3), 3));
        assert!(buf.is_empty() && &space[..3] == b"out");
        near.send([&b"side|inside"[..]]).unwrap();
        assert!(wait_readable(far.as_fd(), Duration::from_secs(10)).unwrap());
        let filled_both = filled(Received::Bytes(11), 3);
        assert_eq!(buf.fill_behind(&mut space[3..], &far).unwrap(), filled_both);
        assert_eq!((&space[..], buf.data()), (&b"outsid"[..], &b"e|inside"[..]));
        near.send([&b"!"[..]]).unwrap();
        assert!(wait_readable(far.as_fd(), Duration::from_secs(10)).unwrap());
        assert_eq!(buf.fill_behind(&mut [], &far).unwrap(), filled(Received::Bytes(1), 0));
        assert_eq!(buf.data(), b"e|inside!");
        buf.clear();
        drop(near);
        assert_eq!(buf.fill_behind(&mut space, &far).unwrap(), filled(Received::Closed, 0));
    }

    /// Most of what follows a long place outside belongs outside, too.
    #[test]
    fn little_is_received_behind_a_long_space_outside() {
        let (near, far) = pair();
        let mut buf = RecvBuf::new(0);
        let mut space = vec![0; LONG_SPACE];
        let data = vec![7; LONG_SPACE + 2 * BEHIND_LONG_SPACE];
        let mut sent = 0;
        while sent < data.len() {
            sent += near.send([&data[sent..]]).unwrap();
        }
        let mut whole = 0;
        while whole < LONG_SPACE {
            assert!(wait_readable(far.as_fd(), Duration::from_secs(10)).unwrap());
            let rest = LONG_SPACE - whole;
            let filled = buf.fill_behind(&mut space[whole..], &far).unwrap();
            whole += filled.outside_bytes;
            assert!(rest < LONG_SPACE || buf.len() <= BEHIND_LONG_SPACE);
            assert_eq!(filled.is_full, buf.len() == BEHIND_LONG_SPACE && rest == LONG_SPACE);
        }
        assert!(space.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn t28_a_narrow_buffer_takes_one_message_and_keeps_it_when_it_is_widened() {
        let (near, far) = pair();
        let mut buf = RecvBuf::narrow(8, 20);
        near.send([&b"0123456789abcdefghijklmno"[..]]).unwrap();
        assert_eq!(fill_soon(&mut buf, &far), Received::Bytes(8));
        assert_eq!(buf.fill(&far).unwrap(), Received::WouldBlock);
        assert_eq!(buf.reserve(21), Err(BufFull { need: 21, max: 20 }));
        buf.reserve(16).unwrap();
        assert_eq!(fill_soon(&mut buf, &far), Received::Bytes(8));
        buf.consume(4);
        buf.widen(0);
        assert_eq!(buf.data(), b"456789abcdef");
        assert_eq!(buf.capacity(), RecvBuf::DEFAULT_CAPACITY);
        assert_eq!(fill_soon(&mut buf, &far), Received::Bytes(9));
        assert_eq!(buf.data(), b"456789abcdefghijklmno");
    }

    #[test]
    fn any_mix_of_receives_and_consumes_yields_the_stream() {
        // Messages of different sizes, consumed whole, far more bytes than the buffer has. Every
        // path of the compaction is used, and a simple model (a plain Vec) gives the expected
        // bytes.
        let (near, far) = pair();
        let total = 8 << 20;
        let byte_at = |i: usize| (i as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0];
        let writer = std::thread::spawn(move || {
            let data: Vec<u8> = (0..total).map(byte_at).collect();
            let mut sent = 0;
            while sent < total {
                let n = near.send([&data[sent..]]).unwrap();
                if n == 0 {
                    crate::poller::wait_writable(near.as_fd(), Duration::from_secs(10)).unwrap();
                }
                sent += n;
            }
            near // closed only when the reader is done
        });
        let mut buf = RecvBuf::with_capacity(0, 0);
        let mut taken = 0;
        let mut size = 1;
        let mut compacted = false;
        while taken < total {
            let before = buf.start;
            assert!(matches!(fill_soon(&mut buf, &far), Received::Bytes(_)));
            compacted |= buf.start < before;
            while buf.len() >= size.min(total - taken) && taken < total {
                let message = size.min(total - taken);
                assert!(
                    buf.data()[..message].iter().enumerate().all(|(i, &b)| b == byte_at(taken + i)),
                    "wrong bytes at {taken}"
                );
                buf.consume(message);
                taken += message;
                size = size * 7 % 50_021 + 1;
            }
        }
        assert!(compacted, "the path was never taken");
        assert_eq!(buf.capacity(), 2 * RECV_SPACE_MIN, "never had to grow");
        drop(writer.join().unwrap());
    }

    #[test]
    fn a_full_buffer_would_block_and_grows_to_its_bound() {
        let (near, far) = pair();
        let mut buf = RecvBuf::with_capacity(0, 1 << 20);
        let data = vec![7; 900_000];
        let mut sent = 0;
        while buf.len() < buf.capacity() {
            sent += near.send([&data[sent..]]).unwrap();
            fill_soon(&mut buf, &far);
        }
        assert_eq!(buf.fill(&far).unwrap(), Received::WouldBlock, "no space left");
        assert_eq!(buf.reserve((1 << 20) + 1), Err(BufFull { need: (1 << 20) + 1, max: 1 << 20 }));
        buf.reserve(900_000).unwrap();
        assert!(buf.capacity() >= 900_000 && buf.capacity() <= 1 << 20);
        while buf.len() < 900_000 {
            sent += near.send([&data[sent..]]).unwrap();
            fill_soon(&mut buf, &far);
        }
        assert!(buf.data() == data);
    }

    #[test]
    #[should_panic(expected = "consumed 1 of 0")]
    fn consuming_missing_bytes_panics() {
        RecvBuf::new(0).consume(1);
    }
}
