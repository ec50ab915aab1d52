//! NVMe/TCP protocol data units (TCP §3.6).
//!
//! ```text
//!  byte 0     1       2      3     4..8    8..HLEN        HLEN..    PDO..          PLEN-4..PLEN
//! +--------+-------+------+-----+------+---------------+---------+-----+--------+---------------+
//! | type   | flags | HLEN | PDO | PLEN | specific part | [HDGST] | PAD | [data] | [DDGST]       |
//! +--------+-------+------+-----+------+---------------+---------+-----+--------+---------------+
//! ```
//!
//! [`Rx`] takes PDUs apart, [`Tx`] puts them together. Neither copies data: a parsed PDU says where
//! its data is in the buffer, and an encoder ends where the data begins.

mod encode;
mod parse;
#[cfg(test)]
mod tests;

use alloc::vec::Vec;
use core::ops::Range;

pub use self::encode::Tx;
pub use self::parse::Rx;
use crate::bytes::{put, put16, put32};
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

/// Bytes of the common header.
pub const COMMON_LEN: usize = 8;
/// Header length of ICReq and ICResp.
pub const IC_LEN: usize = 128;
/// Header length of a command capsule.
pub const CAPSULE_CMD_LEN: usize = 72;
/// Header length of a response capsule.
pub const CAPSULE_RESP_LEN: usize = 24;
/// Header length of H2CData, C2HData and R2T.
pub const DATA_LEN: usize = 24;
/// Header length of a termination request.
pub const TERM_LEN: usize = 24;
/// Longest termination request: its header and a copy of the longest offending header.
pub const TERM_MAX: usize = 152;
/// In-capsule data that every controller takes on its admin queue, in bytes (TCP Figure 11).
pub const ADMIN_IN_CAPSULE: u32 = 8192;
/// Smallest MAXH2CDATA that a controller may state, in bytes (TCP §3.6.2.3).
pub const MAXH2CDATA_MIN: u32 = 4096;
/// Largest HPDA and CPDA: 128 bytes, as dwords less one.
pub const ALIGN_MAX: u8 = 31;

/// Who receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The host: gets ICResp, C2HTermReq, response capsules, C2HData and R2T.
    Host,
    /// The controller: gets ICReq, H2CTermReq, command capsules and H2CData.
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
    /// R2Ts that may be open for one command, less one.
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
    /// Most data in one H2CData, in bytes; at least 4096, a multiple of 4.
    pub maxh2cdata: u32,
}

/// Fatal Error Status of a termination request (TCP Figures 22 and 23).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Fes {
    /// A header field is wrong; the information is the field's offset in the PDU.
    InvalidHeader = 1,
    /// This PDU may not come now.
    Sequence = 2,
    /// The header digest is wrong; the information is the digest received.
    HeaderDigest = 3,
    /// Data beyond what the command or the R2T covers.
    OutOfRange = 4,
    /// More data, or more R2Ts, than was agreed (named *data transfer limit exceeded* toward the
    /// host, *R2T limit exceeded* toward the controller).
    LimitExceeded = 5,
    /// A parameter that the receiver does not support; the information is its offset in the PDU.
    Unsupported = 6,
}

impl Fes {
    /// The status with this code.
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

    /// The specification's name for it.
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

/// Why a connection must end: the Fatal Error Status and Information to send, and the reason in
/// words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {why} (FEI {fei:#x})", .fes.name())]
pub struct PduError {
    /// Fatal Error Status.
    pub fes: Fes,
    /// Fatal Error Information; what it means depends on the status.
    pub fei: u32,
    /// What is wrong.
    pub why: &'static str,
}

impl PduError {
    /// A header field at `offset` is wrong.
    #[must_use]
    #[cold]
    pub const fn header(offset: u32, why: &'static str) -> Self {
        Self { fes: Fes::InvalidHeader, fei: offset, why }
    }

    /// The PDU may not come now.
    #[must_use]
    #[cold]
    pub const fn sequence(why: &'static str) -> Self {
        Self { fes: Fes::Sequence, fei: 0, why }
    }

    /// Data beyond what was asked for.
    #[must_use]
    #[cold]
    pub const fn out_of_range(why: &'static str) -> Self {
        Self { fes: Fes::OutOfRange, fei: 0, why }
    }

    /// More than was agreed.
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

    /// The termination request that says so.
    #[must_use]
    pub const fn term_req(&self) -> TermReq {
        TermReq { fes: self.fes as u16, fei: self.fei }
    }
}

/// A termination request, in either direction (TCP §3.6.2.4, §3.6.2.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermReq {
    /// Fatal Error Status; [`Fes::from_code`] knows the standard ones.
    pub fes: u16,
    /// Fatal Error Information.
    pub fei: u32,
}

impl TermReq {
    /// Appends the PDU that goes to `to`, with a copy of the offending PDU's header: `offending`
    /// begins with that PDU and may be cut anywhere.
    ///
    /// Nothing is appended if that PDU is itself a termination request: a malformed one is ignored
    /// and the connection closed at once (TCP §3.5).
    pub fn encode(&self, to: Role, offending: &[u8], out: &mut Vec<u8>) {
        if let Some(&(kind::H2C_TERM_REQ | kind::C2H_TERM_REQ)) = offending.first() {
            return;
        }
        // HLEN says how long the offending header is, unless that is the lie.
        let claimed = offending.get(2).map_or(offending.len(), |&hlen| usize::from(hlen));
        let copy = &offending[..claimed.min(offending.len()).min(TERM_MAX - TERM_LEN)];
        let mut h = [0; TERM_LEN];
        h[0] = match to {
            Role::Host => kind::C2H_TERM_REQ,
            Role::Controller => kind::H2C_TERM_REQ,
        };
        h[2] = TERM_LEN as u8;
        put32(&mut h, 4, (TERM_LEN + copy.len()) as u32);
        put16(&mut h, 8, self.fes);
        put32(&mut h, 10, self.fei);
        out.extend_from_slice(&h);
        out.extend_from_slice(copy);
    }
}

impl IcReq {
    /// Appends the PDU.
    pub fn encode(&self, out: &mut Vec<u8>) {
        encode_ic(kind::IC_REQ, self.pfv, self.hpda, self.digests(), self.maxr2t, out);
    }

    const fn digests(&self) -> u8 {
        self.header_digest as u8 | (self.data_digest as u8) << 1
    }
}

impl IcResp {
    /// Appends the PDU.
    pub fn encode(&self, out: &mut Vec<u8>) {
        encode_ic(kind::IC_RESP, self.pfv, self.cpda, self.digests(), self.maxh2cdata, out);
    }

    const fn digests(&self) -> u8 {
        self.header_digest as u8 | (self.data_digest as u8) << 1
    }
}

fn encode_ic(kind: u8, pfv: u16, align: u8, digests: u8, max: u32, out: &mut Vec<u8>) {
    let mut h = [0; IC_LEN];
    put(&mut h, 0, &[kind, 0, IC_LEN as u8, 0]);
    put32(&mut h, 4, IC_LEN as u32);
    put16(&mut h, 8, pfv);
    h[10] = align;
    h[11] = digests;
    put32(&mut h, 12, max);
    out.extend_from_slice(&h);
}

/// Header of H2CData and C2HData (TCP §3.6.2.8, §3.6.2.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHdr {
    /// The command that the data belongs to.
    pub cccid: u16,
    /// The R2T that it answers; 0 in C2HData, where the field is reserved.
    pub ttag: u16,
    /// Where the data begins in the command's data, in bytes.
    pub datao: u32,
    /// Bytes of data.
    pub datal: u32,
    /// Nothing follows for this command (C2HData) or R2T (H2CData).
    pub last: bool,
    /// C2HData only: the command succeeded, no response capsule follows.
    pub success: bool,
}

/// Ready to Transfer (TCP §3.6.2.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct R2t {
    /// The command whose data is wanted.
    pub cccid: u16,
    /// The controller's name for this request; H2CData carries it.
    pub ttag: u16,
    /// Where the wanted data begins in the command's data, in bytes.
    pub r2to: u32,
    /// Bytes wanted.
    pub r2tl: u32,
}

/// A PDU, as its receiver reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pdu {
    /// Initialize Connection Request.
    IcReq(IcReq),
    /// Initialize Connection Response.
    IcResp(IcResp),
    /// The host ends the connection; the data is the header that it objects to.
    H2cTermReq(TermReq),
    /// The controller ends the connection; the data is the header that it objects to.
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

/// One whole PDU at the start of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// The header.
    pub pdu: Pdu,
    /// Where the data is in the buffer; empty if there is none.
    pub data: Range<usize>,
    /// Bytes of the whole PDU: the next one begins there.
    pub len: usize,
    /// Whether the data's digest is right, or digests are off. A wrong one is not fatal (TCP
    /// §3.5): the command fails with *transient transport error*.
    pub data_digest_ok: bool,
}
