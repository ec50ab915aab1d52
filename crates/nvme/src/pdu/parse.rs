//! Decodes PDUs.
//!
//! [`Rx::parse`] has a fast path for the most frequent capsules, and checks all other PDUs in
//! these steps: type, flags, lengths, header digest, the type's own fields, data digest.

use super::{
    ADMIN_IN_CAPSULE, ALIGN_MAX, CAPSULE_CMD_LEN, CAPSULE_RESP_LEN, COMMON_LEN, DATA_LEN, DataHdr,
    DataHead, Fes, IC_LEN, IcReq, IcResp, Parsed, Pdu, PduError, R2t, Role, TERM_LEN, TERM_MAX,
    TermReq, flag, kind,
};
use crate::bytes::{u16_at, u32_at};
use crate::command::{Cqe, Sqe};
use crate::digest::{Crc32c, DIGEST_LEN};

/// The receiving half of a connection: the negotiated parameters, against which each PDU is
/// checked.
#[derive(Clone, Debug)]
pub struct Rx {
    /// The side that receives.
    pub role: Role,
    /// Whether the exchange of ICReq and ICResp is done. Before it no other PDU is allowed. After
    /// it these two are not allowed.
    pub connected: bool,
    /// Header digests are on.
    pub header_digest: bool,
    /// Data digests are on.
    pub data_digest: bool,
    /// Received data begins at a multiple of this many bytes: (CPDA + 1) × 4 at a controller, (HPDA
    /// + 1) × 4 at a host.
    pub align: u32,
    /// Largest in-capsule data of a command, in bytes.
    pub capsule_max: u32,
    /// Largest data of one received data PDU, in bytes: a controller's own MAXH2CDATA, or the space
    /// that a host has for a read.
    pub data_max: u32,
    /// CRC32C implementation for the digests.
    pub crc: Crc32c,
}

/// The expected form of a type of PDU.
struct Shape {
    /// Length of the header in bytes.
    header_len: usize,
    /// Whether the PDU may have data. Only then does PDO have a meaning.
    may_have_data: bool,
    /// Whether the PDU has digests, if they were negotiated.
    may_have_digests: bool,
    /// Largest length of the data in bytes.
    data_max: u32,
}

/// The header of a PDU, decoded and checked.
struct Head {
    pdu: Pdu,
    /// Where the data is in the buffer, as soon as it has arrived.
    data: core::ops::Range<usize>,
    /// Length of the whole PDU in bytes.
    len: usize,
    /// A digest follows the data.
    has_data_digest: bool,
}

impl Rx {
    /// A receiver before the connection is initialized.
    #[must_use]
    pub const fn new(role: Role, crc: Crc32c) -> Self {
        Self {
            role,
            connected: false,
            header_digest: false,
            data_digest: false,
            align: 4,
            capsule_max: ADMIN_IN_CAPSULE,
            data_max: 0,
            crc,
        }
    }

    /// Length in bytes of the PDU at the start of `buf`, or the number of bytes that are needed to
    /// know that length. The answer has a meaning only if [`Rx::parse`] has returned `Ok(None)` for
    /// `buf`. Then it is never more than the limits allow.
    #[must_use]
    pub fn need(&self, buf: &[u8]) -> usize {
        match buf.first_chunk::<COMMON_LEN>() {
            Some(common) => (u32_at(common, 4) as usize).max(COMMON_LEN),
            None => COMMON_LEN,
        }
    }

    /// Decodes the PDU at the start of `buf`; `None` if it is not complete yet.
    ///
    /// Each field is checked as soon as it is there. A PDU with a length beyond the limits is
    /// refused after its first eight bytes, so that no buffer grows for it.
    ///
    /// # Errors
    /// [`PduError`], if the specification does not allow the PDU here.
    #[inline]
    pub fn parse(&self, buf: &[u8]) -> Result<Option<Parsed>, PduError> {
        let Some(common) = buf.first_chunk::<COMMON_LEN>() else {
            return Ok(None);
        };
        // The two capsules of the fast path, in their simplest form. All others are checked in
        // full.
        if let Some(cqe) = self.plain_response(buf) {
            let (pdu, len) = (Pdu::CapsuleResp { cqe }, CAPSULE_RESP_LEN);
            return Ok(Some(Parsed { pdu, data: len..len, len, data_digest_ok: true }));
        }
        if let Some((sqe, len)) = self.plain_command(buf) {
            let (pdu, data) = (Pdu::CapsuleCmd { sqe }, CAPSULE_CMD_LEN..len);
            return Ok(Some(Parsed { pdu, data, len, data_digest_ok: true }));
        }
        self.parse_checked(buf, common)
    }

    /// The result of [`Rx::parse`], if it is a complete response capsule without digests, of
    /// [`CAPSULE_RESP_LEN`] bytes.
    ///
    /// This is the fast path of a host.
    #[must_use]
    #[inline(always)]
    pub fn plain_response(&self, buf: &[u8]) -> Option<Cqe> {
        const COMMON_HEADER: [u8; 8] =
            [kind::CAPSULE_RESP, 0, CAPSULE_RESP_LEN as u8, 0, 24, 0, 0, 0];
        let header = buf.first_chunk::<CAPSULE_RESP_LEN>()?;
        let is_plain = self.connected && !self.header_digest && !self.data_digest;
        if !is_plain || self.role != Role::Host || header[..8] != COMMON_HEADER {
            return None;
        }
        Some(Cqe(crate::bytes::array(header, 8)))
    }

    /// The result of [`Rx::parse`], if it is a complete command capsule with in-capsule data and
    /// without digests: the command, and the length of the PDU. The data begins at byte 72.
    ///
    /// This is the fast path of a controller. It copies the command once, directly from the buffer.
    #[must_use]
    #[inline(always)]
    pub fn plain_command(&self, buf: &[u8]) -> Option<(Sqe, usize)> {
        // The data begins right behind the header.
        const FIRST_DWORD: [u8; 4] =
            [kind::CAPSULE_CMD, 0, CAPSULE_CMD_LEN as u8, CAPSULE_CMD_LEN as u8];
        let header = buf.first_chunk::<CAPSULE_CMD_LEN>()?;
        let is_plain = self.connected && !self.header_digest && !self.data_digest;
        if !is_plain
            || self.role != Role::Controller
            || self.align > 8
            || header[..4] != FIRST_DWORD
        {
            return None;
        }
        let len = u32_at(header, 4);
        // A capsule without data, or with too much, is checked in full. Both wrapping subtractions
        // make one comparison enough: a length of 0 or below becomes a large number.
        let data_len = len.wrapping_sub(CAPSULE_CMD_LEN as u32);
        if data_len.wrapping_sub(1) >= self.capsule_max || buf.len() < len as usize {
            return None;
        }
        Some((Sqe(crate::bytes::array(header, 8)), len as usize))
    }

    /// The head of the data PDU at the start of `buf`, if its data begins there: a receiver may put
    /// the data where it belongs while the PDU still arrives. `None` for every other PDU, and while
    /// the head is not complete.
    ///
    /// The head has passed the checks of [`Rx::parse`], except that of the data digest.
    ///
    /// # Errors
    /// [`PduError`], if the specification does not allow the PDU here.
    pub fn data_head(&self, buf: &[u8]) -> Result<Option<DataHead>, PduError> {
        let Some(common) = buf.first_chunk::<COMMON_LEN>() else {
            return Ok(None);
        };
        if !matches!(common[0], kind::H2C_DATA | kind::C2H_DATA) {
            return Ok(None);
        }
        let Some(Head { pdu, data, has_data_digest, .. }) = self.parse_head(buf, common)? else {
            return Ok(None);
        };
        let (Pdu::H2cData(header) | Pdu::C2hData(header)) = pdu else {
            return Ok(None);
        };
        let is_complete = buf.len() >= data.start;
        Ok(is_complete.then_some(DataHead { header, len: data.start, has_data_digest }))
    }

    /// [`Rx::parse`] without the fast path.
    pub(super) fn parse_checked(
        &self,
        buf: &[u8],
        common: &[u8; COMMON_LEN],
    ) -> Result<Option<Parsed>, PduError> {
        let Some(head) = self.parse_head(buf, common)? else {
            return Ok(None);
        };
        let Head { pdu, data, len, has_data_digest } = head;
        if buf.len() < len {
            return Ok(None);
        }
        let data_digest_ok =
            !has_data_digest || u32_at(buf, data.end) == (self.crc)(0, &buf[data.clone()]);
        Ok(Some(Parsed { pdu, data, len, data_digest_ok }))
    }

    /// Decodes and checks the header of the PDU at the start of `buf`; `None` if the header is not
    /// complete yet.
    fn parse_head(&self, buf: &[u8], common: &[u8; COMMON_LEN]) -> Result<Option<Head>, PduError> {
        let [kind, flags, hlen, pdo, ..] = *common;
        let plen = u32_at(common, 4);
        let shape = self.shape(kind)?;

        // Of several errors, the answer names the one at the lowest offset (TCP §3.6.2.4): FLAGS is
        // at 1, HLEN at 2, PDO at 3, PLEN at 4.
        let has_header_digest = shape.may_have_digests && self.header_digest;
        let header_end = shape.header_len + if has_header_digest { DIGEST_LEN } else { 0 };
        if shape.may_have_digests {
            self.check_flags(kind, &shape, flags, plen as usize > header_end)?;
        }
        if usize::from(hlen) != shape.header_len {
            return Err(PduError::header(2, "header length does not fit the PDU type"));
        }
        let data = self.data_range(&shape, pdo, plen as usize, header_end)?;

        if buf.len() < header_end {
            return Ok(None);
        }
        if has_header_digest {
            let received = u32_at(buf, shape.header_len);
            if received != (self.crc)(0, &buf[..shape.header_len]) {
                return Err(PduError {
                    fes: Fes::HeaderDigest,
                    fei: received,
                    why: "the header does not match its digest",
                });
            }
        }
        let pdu = self.decode_specific(kind, flags, &buf[..shape.header_len], &data)?;

        let has_data_digest = self.data_digest && shape.may_have_digests && !data.is_empty();
        Ok(Some(Head { pdu, data, len: plen as usize, has_data_digest }))
    }

    /// The expected form of a PDU of type `kind`, if this role may receive it now.
    fn shape(&self, kind: u8) -> Result<Shape, PduError> {
        let is_controller = self.role == Role::Controller;
        let without_data = |header_len| Shape {
            header_len,
            may_have_data: false,
            may_have_digests: true,
            data_max: 0,
        };
        let with_data = |header_len, data_max| Shape {
            may_have_data: true,
            data_max,
            ..without_data(header_len)
        };
        let (is_for_this_role, shape) = match kind {
            kind::IC_REQ | kind::IC_RESP => {
                let shape = Shape { may_have_digests: false, ..without_data(IC_LEN) };
                (is_controller == (kind == kind::IC_REQ), shape)
            }
            kind::H2C_TERM_REQ | kind::C2H_TERM_REQ => {
                if is_controller != (kind == kind::H2C_TERM_REQ) {
                    return Err(PduError::sequence("a termination request of the other direction"));
                }
                // A termination request is allowed at any time.
                let data_max = (TERM_MAX - TERM_LEN) as u32;
                return Ok(Shape { may_have_digests: false, ..with_data(TERM_LEN, data_max) });
            }
            kind::CAPSULE_CMD => (is_controller, with_data(CAPSULE_CMD_LEN, self.capsule_max)),
            kind::CAPSULE_RESP => (!is_controller, without_data(CAPSULE_RESP_LEN)),
            kind::H2C_DATA | kind::C2H_DATA => {
                let shape = with_data(DATA_LEN, self.data_max);
                (is_controller == (kind == kind::H2C_DATA), shape)
            }
            kind::R2T => (!is_controller, without_data(DATA_LEN)),
            _ => return Err(PduError::header(0, "unknown PDU type")),
        };
        if !is_for_this_role {
            return Err(PduError::sequence("a PDU that only the other side may receive"));
        }
        let is_initialization = matches!(kind, kind::IC_REQ | kind::IC_RESP);
        if is_initialization && self.connected {
            return Err(PduError::sequence("the connection is already initialized"));
        }
        if !is_initialization && !self.connected {
            return Err(PduError::sequence("the connection is not initialized yet"));
        }
        Ok(shape)
    }

    /// Checks that the flags are as negotiated. Reserved bits are ignored.
    fn check_flags(
        &self,
        kind: u8,
        shape: &Shape,
        flags: u8,
        has_data: bool,
    ) -> Result<(), PduError> {
        if (flags & flag::HDGST != 0) != self.header_digest {
            return Err(PduError::header(1, "header digest flag is not what was negotiated"));
        }
        if shape.may_have_data && (flags & flag::DDGST != 0) != (self.data_digest && has_data) {
            return Err(PduError::header(1, "data digest flag is not what was negotiated"));
        }
        if kind == kind::C2H_DATA && flags & flag::SUCCESS != 0 && flags & flag::LAST == 0 {
            return Err(PduError::header(1, "SUCCESS without LAST_PDU"));
        }
        Ok(())
    }

    /// Checks PDO and PLEN, and returns the range of the data in the buffer.
    fn data_range(
        &self,
        shape: &Shape,
        pdo: u8,
        plen: usize,
        header_end: usize,
    ) -> Result<core::ops::Range<usize>, PduError> {
        if plen < header_end {
            return Err(PduError::header(4, "PDU length is less than its header"));
        }
        if plen == header_end {
            return Ok(header_end..header_end);
        }
        if !shape.may_have_data {
            return Err(PduError::header(4, "PDU length is more than its header"));
        }
        if !shape.may_have_digests {
            // The data of a termination request follows its header; PDO is reserved there.
            if plen - header_end > shape.data_max as usize {
                return Err(PduError::header(4, "a termination request has at most 152 bytes"));
            }
            return Ok(header_end..plen);
        }
        let pdo = usize::from(pdo);
        if pdo < header_end || pdo > (usize::from(ALIGN_MAX) + 1) * 4 {
            return Err(PduError::header(
                3,
                "data offset is inside the header or beyond 128 bytes",
            ));
        }
        if !(pdo as u32).is_multiple_of(self.align) {
            return Err(PduError::header(3, "data offset does not keep the agreed alignment"));
        }
        let trailer = if self.data_digest { DIGEST_LEN } else { 0 };
        if plen <= pdo + trailer {
            return Err(PduError::header(4, "PDU length leaves no space for data"));
        }
        let len = plen - (pdo + trailer);
        if len > shape.data_max as usize {
            // A host announces no limit. It never requests more than it has space for.
            return Err(match self.role {
                Role::Controller => PduError::limit("more data in one PDU than was agreed"),
                Role::Host => PduError::out_of_range("more data than any read asked for"),
            });
        }
        Ok(pdo..pdo + len)
    }

    /// Decodes the part of the header after the first eight bytes. `header` is the whole header.
    fn decode_specific(
        &self,
        kind: u8,
        flags: u8,
        header: &[u8],
        data: &core::ops::Range<usize>,
    ) -> Result<Pdu, PduError> {
        Ok(match kind {
            kind::IC_REQ => Pdu::IcReq(IcReq {
                pfv: u16_at(header, 8),
                hpda: header[10],
                header_digest: header[11] & 1 != 0,
                data_digest: header[11] & 2 != 0,
                maxr2t: u32_at(header, 12),
            })
            .checked()?,
            kind::IC_RESP => Pdu::IcResp(IcResp {
                pfv: u16_at(header, 8),
                cpda: header[10],
                header_digest: header[11] & 1 != 0,
                data_digest: header[11] & 2 != 0,
                maxh2cdata: u32_at(header, 12),
            })
            .checked()?,
            kind::H2C_TERM_REQ => Pdu::H2cTermReq(term_req(header)),
            kind::C2H_TERM_REQ => Pdu::C2hTermReq(term_req(header)),
            kind::CAPSULE_CMD => Pdu::CapsuleCmd { sqe: Sqe(crate::bytes::array(header, 8)) },
            kind::CAPSULE_RESP => Pdu::CapsuleResp { cqe: Cqe(crate::bytes::array(header, 8)) },
            kind::R2T => Pdu::R2t(decode_r2t(header)?),
            kind::C2H_DATA => Pdu::C2hData(DataHdr {
                // The transfer tag is reserved in this direction.
                ttag: 0,
                success: flags & flag::SUCCESS != 0,
                ..decode_data_header(flags, header, data.len())?
            }),
            _ => Pdu::H2cData(decode_data_header(flags, header, data.len())?),
        })
    }
}

/// Decodes the header of an R2T.
fn decode_r2t(header: &[u8]) -> Result<R2t, PduError> {
    let r2t = R2t {
        cccid: u16_at(header, 8),
        ttag: u16_at(header, 10),
        r2to: u32_at(header, 12),
        r2tl: u32_at(header, 16),
    };
    check_dwords(r2t.r2to, r2t.r2tl)?;
    if r2t.r2to.checked_add(r2t.r2tl).is_none() {
        return Err(PduError::out_of_range("an R2T beyond 4 GiB"));
    }
    Ok(r2t)
}

/// Decodes the header of an H2CData, with `data_len` bytes of data. That of a C2HData differs in
/// two fields.
fn decode_data_header(flags: u8, header: &[u8], data_len: usize) -> Result<DataHdr, PduError> {
    let hdr = DataHdr {
        cccid: u16_at(header, 8),
        ttag: u16_at(header, 10),
        datao: u32_at(header, 12),
        datal: u32_at(header, 16),
        last: flags & flag::LAST != 0,
        success: false,
    };
    check_dwords(hdr.datao, hdr.datal)?;
    if hdr.datal as usize != data_len {
        return Err(PduError::header(16, "data length is not what the PDU holds"));
    }
    if hdr.datao.checked_add(hdr.datal).is_none() {
        return Err(PduError::out_of_range("data beyond 4 GiB"));
    }
    Ok(hdr)
}

/// Checks that a transfer's offset and length are multiples of 4, and that the length is not 0.
fn check_dwords(offset: u32, len: u32) -> Result<(), PduError> {
    if !offset.is_multiple_of(4) {
        return Err(PduError::header(12, "data offset is not a multiple of 4"));
    }
    if len == 0 || !len.is_multiple_of(4) {
        return Err(PduError::header(16, "data length is zero or not a multiple of 4"));
    }
    Ok(())
}

/// Decodes the header of a termination request.
fn term_req(header: &[u8]) -> TermReq {
    TermReq { fes: u16_at(header, 8), fei: u32_at(header, 10) }
}

impl Pdu {
    /// Checks that the specification allows the parameters of an initialization PDU.
    fn checked(self) -> Result<Self, PduError> {
        let (pfv, align) = match &self {
            Self::IcReq(ic) => (ic.pfv, ic.hpda),
            Self::IcResp(ic) => (ic.pfv, ic.cpda),
            _ => return Ok(self),
        };
        if pfv != 0 {
            return Err(PduError::unsupported(8, "PDU format version is not 0"));
        }
        if align > ALIGN_MAX {
            return Err(PduError::header(10, "data alignment is beyond 128 bytes"));
        }
        let is_data_max_possible = match &self {
            Self::IcResp(ic) => {
                ic.maxh2cdata >= super::MAXH2CDATA_MIN && ic.maxh2cdata.is_multiple_of(4)
            }
            _ => true,
        };
        if !is_data_max_possible {
            return Err(PduError::header(12, "MAXH2CDATA is below 4096 or not a multiple of 4"));
        }
        Ok(self)
    }
}
