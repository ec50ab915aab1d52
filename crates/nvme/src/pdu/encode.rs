//! Encodes PDUs: the header, its digest and the padding before the data. The caller sends the data.

use alloc::vec::Vec;

use super::{CAPSULE_CMD_LEN, CAPSULE_RESP_LEN, DATA_LEN, DataHdr, R2t, flag, kind};
use crate::bytes::{put, put_u16, put_u32, put_u64, u64_at};
use crate::command::{Cqe, Sqe};
use crate::digest::{Crc32c, DIGEST_LEN};

/// The sending half of a connection: the negotiated parameters, which each PDU follows.
///
/// The encoders of PDUs with data append everything that precedes the data. The caller sends the
/// data itself, and after it [`Tx::data_digest`], if there was any data.
#[derive(Clone, Debug)]
pub struct Tx {
    /// Header digests are on.
    pub header_digest: bool,
    /// Data digests are on.
    pub data_digest: bool,
    /// Data begins at a multiple of this many bytes: the peer's (CPDA or HPDA + 1) × 4.
    pub align: u32,
    /// CRC32C implementation for the digests.
    pub crc: Crc32c,
}

impl Tx {
    /// A sender without digests or alignment: the state before the connection is initialized.
    #[must_use]
    pub const fn new(crc: Crc32c) -> Self {
        Self { header_digest: false, data_digest: false, align: 4, crc }
    }

    /// Appends a command capsule up to its data; `data_len` bytes of in-capsule data follow (0:
    /// none).
    #[inline(always)]
    pub fn capsule_cmd(&self, sqe: &Sqe, data_len: u32, out: &mut Vec<u8>) {
        if !self.header_digest && !self.data_digest && self.align <= 8 {
            // The fast path of a host writes the command to the output buffer directly, without a
            // separate header.
            let header_len = CAPSULE_CMD_LEN as u32;
            let pdo_field = if data_len > 0 { header_len << 24 } else { 0 };
            // Type, flags, HLEN and PDO, one byte each; then PLEN.
            let first_dword = u32::from(kind::CAPSULE_CMD) | header_len << 16 | pdo_field;
            let plen = header_len + data_len;
            let common = u64::from(first_dword) | u64::from(plen) << 32;
            out.reserve(CAPSULE_CMD_LEN);
            out.extend_from_slice(&common.to_le_bytes());
            out.extend_from_slice(&sqe.0);
            return;
        }
        // The command is passed by value. A reference that leaves this function would force the
        // command into memory, and the wide loads above would wait for the small stores that built
        // it.
        self.capsule_cmd_with_digests(*sqe, data_len, out);
    }

    /// [`capsule_cmd`](Self::capsule_cmd) without the fast path.
    #[inline(never)]
    fn capsule_cmd_with_digests(&self, sqe: Sqe, data_len: u32, out: &mut Vec<u8>) {
        let mut header = [0; CAPSULE_CMD_LEN];
        put(&mut header, 8, &sqe.0);
        self.finish(kind::CAPSULE_CMD, 0, data_len, &mut header, out);
    }

    /// Appends a response capsule.
    #[inline(always)]
    pub fn capsule_resp(&self, cqe: &Cqe, out: &mut Vec<u8>) {
        if !self.header_digest {
            // The fast path of a controller builds the header in words, because a wide load after
            // small stores to the same bytes stalls the processor.
            let mut header = [0; CAPSULE_RESP_LEN];
            put(&mut header, 0, &[kind::CAPSULE_RESP, 0, CAPSULE_RESP_LEN as u8, 0, 24, 0, 0, 0]);
            put_u64(&mut header, 8, u64_at(&cqe.0, 0));
            put_u64(&mut header, 16, u64_at(&cqe.0, 8));
            out.extend_from_slice(&header);
            return;
        }
        self.capsule_resp_with_digest(cqe, out);
    }

    /// [`capsule_resp`](Self::capsule_resp) with a header digest.
    #[inline(never)]
    fn capsule_resp_with_digest(&self, cqe: &Cqe, out: &mut Vec<u8>) {
        let mut header = [0; CAPSULE_RESP_LEN];
        put(&mut header, 8, &cqe.0);
        self.finish(kind::CAPSULE_RESP, 0, 0, &mut header, out);
    }

    /// Appends a Ready to Transfer.
    pub fn r2t(&self, r2t: &R2t, out: &mut Vec<u8>) {
        let mut header = [0; DATA_LEN];
        put_u16(&mut header, 8, r2t.cccid);
        put_u16(&mut header, 10, r2t.ttag);
        put_u32(&mut header, 12, r2t.r2to);
        put_u32(&mut header, 16, r2t.r2tl);
        self.finish(kind::R2T, 0, 0, &mut header, out);
    }

    /// Appends the header of an H2CData; `hdr.datal` bytes follow.
    #[inline]
    pub fn h2c_data(&self, hdr: &DataHdr, out: &mut Vec<u8>) {
        self.data_header(kind::H2C_DATA, hdr, out);
    }

    /// Appends the header of a C2HData; `hdr.datal` bytes follow.
    #[inline]
    pub fn c2h_data(&self, hdr: &DataHdr, out: &mut Vec<u8>) {
        self.data_header(kind::C2H_DATA, hdr, out);
    }

    /// Appends the digest of the data of one PDU. `pieces` are the parts of the data, in order.
    /// Appends nothing if digests are off.
    #[inline]
    pub fn data_digest<'a>(&self, pieces: impl IntoIterator<Item = &'a [u8]>, out: &mut Vec<u8>) {
        if self.data_digest {
            let crc = pieces.into_iter().fold(0, |crc, piece| (self.crc)(crc, piece));
            out.extend_from_slice(&crc.to_le_bytes());
        }
    }

    /// Appends the header of a data PDU of either direction.
    fn data_header(&self, kind: u8, hdr: &DataHdr, out: &mut Vec<u8>) {
        let mut header = [0; DATA_LEN];
        put_u16(&mut header, 8, hdr.cccid);
        put_u16(&mut header, 10, hdr.ttag);
        put_u32(&mut header, 12, hdr.datao);
        put_u32(&mut header, 16, hdr.datal);
        let mut flags = 0;
        if hdr.last {
            flags |= flag::LAST;
        }
        if hdr.success {
            flags |= flag::SUCCESS;
        }
        self.finish(kind, flags, hdr.datal, &mut header, out);
    }

    /// Fills in the common header, and appends header, digest and padding.
    #[inline]
    fn finish<const N: usize>(
        &self,
        kind: u8,
        mut flags: u8,
        data_len: u32,
        header: &mut [u8; N],
        out: &mut Vec<u8>,
    ) {
        let mut header_end = N as u32;
        if self.header_digest {
            flags |= flag::HDGST;
            header_end += DIGEST_LEN as u32;
        }
        let mut data_start = header_end;
        let mut plen = header_end;
        if data_len > 0 {
            data_start = header_end.next_multiple_of(self.align);
            plen = data_start + data_len;
            if self.data_digest {
                flags |= flag::DDGST;
                plen += DIGEST_LEN as u32;
            }
        }
        // PDO is reserved, and zero, in a PDU without data.
        let pdo_field = if data_len > 0 { data_start as u8 } else { 0 };
        let first_dword = u32::from_le_bytes([kind, flags, N as u8, pdo_field]);
        put_u64(header, 0, u64::from(first_dword) | u64::from(plen) << 32);
        out.extend_from_slice(&header[..]);
        if self.header_digest {
            out.extend_from_slice(&(self.crc)(0, &header[..]).to_le_bytes());
        }
        if data_start > header_end {
            out.resize(out.len() + (data_start - header_end) as usize, 0);
        }
    }
}
