//! NVMe/TCP protocol data units (TCP §3.6).
//!
//! ```text
//!  byte 0     1       2      3     4..8    8..HLEN        HLEN..    PDO..          PLEN-4..PLEN
//! +--------+-------+------+-----+------+---------------+---------+-----+--------+---------------+
//! | type   | flags | HLEN | PDO | PLEN | specific part | [HDGST] | PAD | [data] | [DDGST]       |
//! +--------+-------+------+-----+------+---------------+---------+-----+--------+---------------+
//! ```
//!
//! [`Rx`] decodes PDUs, and [`Tx`] encodes them. Neither copies data: a decoded PDU has the range
//! of its data in the buffer, and an encoder ends where the data begins.

mod encode;
mod parse;
#[cfg(test)]
mod tests;

use alloc::vec::Vec;
use core::ops::Range;

pub use self::encode::Tx;
pub use self::parse::Rx;
use crate::bytes::{put, put_u16, put_u32};
use crate::command::{Cqe, Sqe};

/// Types of PDU (TCP Figure 10).
pub mod kind {
    /// Initialize Connection Request.
    pub const IC_REQ: u8 = 0x00;
    /// Initialize Connection Response.
    pub const IC_RESP: u8 = 0x01;
    /// Host to Controller Terminate Connection Request.
    pub const H2C_TERM_REQ: u8 = 0x02;
    /// Controller to Host Terminate Connection Request.
    pub const C2H_TERM_REQ: u8 = 0x03;
    /// Command Capsule.
    pub const CAPSULE_CMD: u8 = 0x04;
    /// Response Capsule.
    pub const CAPSULE_RESP: u8 = 0x05;
    /// Host to Controller Data Transfer.
    pub const H2C_DATA: u8 = 0x06;
    /// Controller to Host Data Transfer.
    pub const C2H_DATA: u8 = 0x07;
    /// Ready to Transfer.
    pub const R2T: u8 = 0x09;
}

/// Flag bits of the common header.
pub mod flag {
    /// HDGSTF: a header digest follows the header.
    pub const HDGST: u8 = 1 << 0;
    /// DDGSTF: a data digest follows the data.
    pub const DDGST: u8 = 1 << 1;
    /// LAST_PDU: the last data of its command (C2HData) or of its R2T (H2CData).
    pub const LAST: u8 = 1 << 2;
    /// SUCCESS: the command succeeded and no response capsule follows (C2HData).
    pub const SUCCESS: u8 = 1 << 3;
}

/// Length of the common header in bytes.
pub const COMMON_LEN: usize = 8;
/// Header length of ICReq and ICResp in bytes.
pub const IC_LEN: usize = 128;
/// Header length of a command capsule in bytes.
pub const CAPSULE_CMD_LEN: usize = 72;
/// Header length of a response capsule in bytes.
pub const CAPSULE_RESP_LEN: usize = 24;
/// Header length of H2CData, C2HData and R2T in bytes.
pub const DATA_LEN: usize = 24;
/// Header length of a termination request in bytes.
pub const TERM_LEN: usize = 24;
/// Largest length of a termination request in bytes: its header and a copy of the longest offending
/// header.
pub const TERM_MAX: usize = 152;
/// In-capsule data that every controller accepts on its admin queue, in bytes (TCP Figure 11).
pub const ADMIN_IN_CAPSULE: u32 = 8192;
/// Smallest MAXH2CDATA that a controller may announce, in bytes (TCP §3.6.2.3).
pub const MAXH2CDATA_MIN: u32 = 4096;
/// Largest HPDA and CPDA: 128 bytes, as dwords less one.
pub const ALIGN_MAX: u8 = 31;

/// The side of a connection that receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The host: receives ICResp, C2HTermReq, response capsules, C2HData and R2T.
    Host,
    /// The controller: receives ICReq, H2CTermReq, command capsules and H2CData.
    Controller,
}

/// Initialize Connection Request (TCP §3.6.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcReq {
    /// PDU format version; 0 is the only one.
    pub pfv: u16,
    /// Host PDU data alignment: the data of C2HData begins at a multiple of (this + 1) dwords.
    pub hpda: u8,
    /// The host wants header digests.
    pub header_digest: bool,
    /// The host wants data digests.
    pub data_digest: bool,
    /// Number of R2Ts that may be open for one command, less one.
    pub maxr2t: u32,
}

/// Initialize Connection Response (TCP §3.6.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcResp {
    /// PDU format version; 0 is the only one.
    pub pfv: u16,
    /// Controller PDU data alignment: the data of command capsules and H2CData begins at a
    /// multiple of (this + 1) dwords.
    pub cpda: u8,
    /// Header digests are on.
    pub header_digest: bool,
    /// Data digests are on.
    pub data_digest: bool,
    /// Largest data of one H2CData, in bytes; at least 4096, a multiple of 4.
    pub maxh2cdata: u32,
}

/// Fatal Error Status of a termination request (TCP Figures 22 and 23).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Fes {
    /// A header field is wrong; the information is the field's offset in the PDU.
    InvalidHeader = 1,
    /// The PDU is not allowed at this point.
    Sequence = 2,
    /// The header digest is wrong; the information is the digest received.
    HeaderDigest = 3,
    /// Data beyond the range of the command or of the R2T.
    OutOfRange = 4,
    /// More data, or more R2Ts, than was negotiated. Toward the host the name is *data transfer
    /// limit exceeded*, toward the controller *R2T limit exceeded*.
    LimitExceeded = 5,
    /// The receiver does not support a parameter; the information is its offset in the PDU.
    Unsupported = 6,
}

impl Fes {
    /// The status with code `code`.
    #[must_use]
    pub const fn from_code(code: u16) -> Option<Self> {
        match code {
            1 => Some(Self::InvalidHeader),
            2 => Some(Self::Sequence),
            3 => Some(Self::HeaderDigest),
            4 => Some(Self::OutOfRange),
            5 => Some(Self::LimitExceeded),
            6 => Some(Self::Unsupported),
            _ => None,
        }
    }

    /// The name of the status in the specification.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::InvalidHeader => "invalid PDU header field",
            Self::Sequence => "PDU sequence error",
            Self::HeaderDigest => "header digest error",
            Self::OutOfRange => "data transfer out of range",
            Self::LimitExceeded => "transfer limit exceeded",
            Self::Unsupported => "unsupported parameter",
        }
    }
}

/// The reason for ending a connection: the Fatal Error Status and Information to send, and the
/// reason in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {why} (FEI {fei:#x})", .fes.name())]
pub struct PduError {
    /// Fatal Error Status.
    pub fes: Fes,
    /// Fatal Error Information; its meaning depends on the status.
    pub fei: u32,
    /// The defect, in words.
    pub why: &'static str,
}

impl PduError {
    /// The header field at `offset` is wrong.
    #[must_use]
    #[cold]
    pub const fn header(offset: u32, why: &'static str) -> Self {
        Self { fes: Fes::InvalidHeader, fei: offset, why }
    }

    /// The PDU is not allowed at this point.
    #[must_use]
    #[cold]
    pub const fn sequence(why: &'static str) -> Self {
        Self { fes: Fes::Sequence, fei: 0, why }
    }

    /// The data is beyond the requested range.
    #[must_use]
    #[cold]
    pub const fn out_of_range(why: &'static str) -> Self {
        Self { fes: Fes::OutOfRange, fei: 0, why }
    }

    /// The PDU exceeds a negotiated limit.
    #[must_use]
    #[cold]
    pub const fn limit(why: &'static str) -> Self {
        Self { fes: Fes::LimitExceeded, fei: 0, why }
    }

    /// The parameter at `offset` is not supported.
    #[must_use]
    #[cold]
    pub const fn unsupported(offset: u32, why: &'static str) -> Self {
        Self { fes: Fes::Unsupported, fei: offset, why }
    }

    /// The termination request that reports this error.
    #[must_use]
    pub const fn term_req(&self) -> TermReq {
        TermReq { fes: self.fes as u16, fei: self.fei }
    }
}

/// A termination request, in either direction (TCP §3.6.2.4, §3.6.2.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermReq {
    /// Fatal Error Status; [`Fes::from_code`] decodes the standard ones.
    pub fes: u16,
    /// Fatal Error Information.
    pub fei: u32,
}

impl TermReq {
    /// Appends the PDU that goes to `to`, with a copy of the offending PDU's header. `offending`
    /// begins with that PDU and may be cut anywhere.
    ///
    /// Nothing is appended if that PDU is itself a termination request. A malformed one is ignored
    /// and the connection closed at once (TCP §3.5).
    pub fn encode(&self, to: Role, offending: &[u8], out: &mut Vec<u8>) {
        if let Some(&(kind::H2C_TERM_REQ | kind::C2H_TERM_REQ)) = offending.first() {
            return;
        }
        // HLEN gives the length of the offending header, unless HLEN itself is wrong.
        let claimed_len = offending.get(2).map_or(offending.len(), |&hlen| usize::from(hlen));
        let copy = &offending[..claimed_len.min(offending.len()).min(TERM_MAX - TERM_LEN)];
        let mut header = [0; TERM_LEN];
        header[0] = match to {
            Role::Host => kind::C2H_TERM_REQ,
            Role::Controller => kind::H2C_TERM_REQ,
        };
        header[2] = TERM_LEN as u8;
        put_u32(&mut header, 4, (TERM_LEN + copy.len()) as u32);
        put_u16(&mut header, 8, self.fes);
        put_u32(&mut header, 10, self.fei);
        out.extend_from_slice(&header);
        out.extend_from_slice(copy);
    }
}

impl IcReq {
    /// Appends the PDU to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        encode_ic(kind::IC_REQ, self.pfv, self.hpda, self.digests(), self.maxr2t, out);
    }

    const fn digests(&self) -> u8 {
        self.header_digest as u8 | (self.data_digest as u8) << 1
    }
}

impl IcResp {
    /// Appends the PDU to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        encode_ic(kind::IC_RESP, self.pfv, self.cpda, self.digests(), self.maxh2cdata, out);
    }

    const fn digests(&self) -> u8 {
        self.header_digest as u8 | (self.data_digest as u8) << 1
    }
}

/// Appends an ICReq or ICResp. `digests` has bit 0 for header digests and bit 1 for data digests.
/// `limit` is MAXR2T or MAXH2CDATA.
fn encode_ic(kind: u8, pfv: u16, align: u8, digests: u8, limit: u32, out: &mut Vec<u8>) {
    let mut header = [0; IC_LEN];
    put(&mut header, 0, &[kind, 0, IC_LEN as u8, 0]);
    put_u32(&mut header, 4, IC_LEN as u32);
    put_u16(&mut header, 8, pfv);
    header[10] = align;
    header[11] = digests;
    put_u32(&mut header, 12, limit);
    out.extend_from_slice(&header);
}

/// Header of H2CData and C2HData (TCP §3.6.2.8, §3.6.2.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHdr {
    /// Identifier of the command that the data belongs to.
    pub cccid: u16,
    /// Transfer tag of the R2T that the data answers; 0 in C2HData, where the field is reserved.
    pub ttag: u16,
    /// Offset of this data in the command's data, in bytes.
    pub datao: u32,
    /// Length of this data in bytes.
    pub datal: u32,
    /// These are the last data of the command (C2HData) or of the R2T (H2CData).
    pub last: bool,
    /// C2HData only: the command succeeded, and no response capsule follows.
    pub success: bool,
}

/// Ready to Transfer (TCP §3.6.2.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct R2t {
    /// Identifier of the command whose data is requested.
    pub cccid: u16,
    /// The controller's tag for this request; H2CData carries it.
    pub ttag: u16,
    /// Offset of the requested data in the command's data, in bytes.
    pub r2to: u32,
    /// Length of the requested data in bytes.
    pub r2tl: u32,
}

/// A decoded PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pdu {
    /// Initialize Connection Request.
    IcReq(IcReq),
    /// Initialize Connection Response.
    IcResp(IcResp),
    /// The host ends the connection; the data is the header that it rejects.
    H2cTermReq(TermReq),
    /// The controller ends the connection; the data is the header that it rejects.
    C2hTermReq(TermReq),
    /// A command; the data is in-capsule data.
    CapsuleCmd {
        /// The command.
        sqe: Sqe,
    },
    /// A completion.
    CapsuleResp {
        /// The completion.
        cqe: Cqe,
    },
    /// Data of a write.
    H2cData(DataHdr),
    /// Data of a read.
    C2hData(DataHdr),
    /// A request for data of a write.
    R2t(R2t),
}

/// The head of a data PDU at the start of a buffer: everything before its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHead {
    /// The header.
    pub header: DataHdr,
    /// Length in bytes of the header, its digest and the padding: the data begins there.
    pub len: usize,
    /// A digest of 4 bytes follows the data.
    pub has_data_digest: bool,
}

/// One complete PDU at the start of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// The header.
    pub pdu: Pdu,
    /// Range of the data in the buffer; empty if the PDU has none.
    pub data: Range<usize>,
    /// Length of the whole PDU in bytes: the next PDU begins there.
    pub len: usize,
    /// True if the data's digest is right or digests are off. A wrong digest is not fatal (TCP
    /// §3.5): the command completes with *transient transport error*.
    pub data_digest_ok: bool,
}
