//! The discovery log page, 70h (Base §5.16.1.23).

use alloc::string::String;

use crate::bytes::{ShortData, put_text, put_u16, put_u64, text_at, u16_at, u64_at, whole};
use crate::fabrics::NQN_MAX;

/// Bytes of the log's header.
pub const HEADER_LEN: usize = 1024;
/// Bytes of one record.
pub const ENTRY_LEN: usize = 1024;

/// Transport type TCP.
pub const TRTYPE_TCP: u8 = 3;
/// Address family IPv4.
pub const ADRFAM_IPV4: u8 = 1;
/// Address family IPv6.
pub const ADRFAM_IPV6: u8 = 2;
/// The record is a referral to another discovery service.
pub const SUBTYPE_REFERRAL: u8 = 1;
/// The record is a subsystem with namespaces.
pub const SUBTYPE_NVM: u8 = 2;
/// The record is the discovery subsystem that answers.
pub const SUBTYPE_CURRENT: u8 = 3;
/// TREQ bit 2: submission queue flow control may be turned off.
pub const TREQ_NO_SQ_FLOW: u8 = 1 << 2;
/// TREQ bits 1:0, 01b: a secure channel is required.
pub const TREQ_REQUIRED: u8 = 1;
/// TREQ bits 1:0, 10b: no secure channel required.
pub const TREQ_NOT_REQUIRED: u8 = 2;
/// SECTYPE: no TLS (TCP §3.7).
pub const SECTYPE_NONE: u8 = 0;
/// SECTYPE: TLS 1.3 or later.
pub const SECTYPE_TLS13: u8 = 2;

/// The header of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Generation counter. It changes whenever the log changes: records that were read under two
    /// values do not belong together.
    pub genctr: u64,
    /// Number of records that follow.
    pub numrec: u64,
    /// Format of the records; 0.
    pub recfmt: u16,
}

impl Header {
    /// The header as it is sent: 1024 bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        put_u64(&mut bytes, 0, self.genctr);
        put_u64(&mut bytes, 8, self.numrec);
        put_u16(&mut bytes, 16, self.recfmt);
        bytes
    }

    /// Reads a header from its first 18 bytes; the rest is reserved.
    ///
    /// # Errors
    /// [`ShortData`], if `data` has fewer than 18 bytes.
    pub fn decode(data: &[u8]) -> Result<Self, ShortData> {
        let bytes = whole::<18>(data, "discovery log header")?;
        Ok(Self { genctr: u64_at(bytes, 0), numrec: u64_at(bytes, 8), recfmt: u16_at(bytes, 16) })
    }
}

/// The offset of SECTYPE in a record: the first byte of TSAS.
const SECTYPE_AT: usize = 768;

/// One record: a subsystem and where to find it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Transport type; [`TRTYPE_TCP`].
    pub trtype: u8,
    /// Address family; [`ADRFAM_IPV4`] or [`ADRFAM_IPV6`].
    pub adrfam: u8,
    /// Kind of subsystem; [`SUBTYPE_NVM`] and others.
    pub subtype: u8,
    /// Transport requirements (TREQ): [`TREQ_REQUIRED`] and others.
    pub treq: u8,
    /// Security type of TCP, in TSAS (SECTYPE): [`SECTYPE_TLS13`] and others.
    pub sectype: u8,
    /// The subsystem port.
    pub portid: u16,
    /// The controller to connect to; FFFFh means any (dynamic controllers).
    pub cntlid: u16,
    /// Largest size of the admin submission queue, in entries.
    pub asqsz: u16,
    /// Port, as decimal digits.
    pub trsvcid: String,
    /// The subsystem's NQN.
    pub subnqn: String,
    /// Address, as text.
    pub traddr: String,
}

impl Entry {
    /// The record as it is sent: 1024 bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; ENTRY_LEN] {
        let mut bytes = [0; ENTRY_LEN];
        bytes[0] = self.trtype;
        bytes[1] = self.adrfam;
        bytes[2] = self.subtype;
        bytes[3] = self.treq;
        put_u16(&mut bytes, 4, self.portid);
        put_u16(&mut bytes, 6, self.cntlid);
        put_u16(&mut bytes, 8, self.asqsz);
        // ASCII fields are padded with spaces (Base §1.4.2). Hosts remove them.
        put_text(&mut bytes, 32, 32, &self.trsvcid, b' ');
        put_text(&mut bytes, 256, NQN_MAX, &self.subnqn, 0);
        put_text(&mut bytes, 512, 256, &self.traddr, b' ');
        // The transport specific part (TSAS) has one field for TCP.
        bytes[SECTYPE_AT] = self.sectype;
        bytes
    }

    /// Reads a record. Bytes of its text that are not printable ASCII become `?`.
    ///
    /// # Errors
    /// [`ShortData`], if `data` has fewer than 1024 bytes.
    pub fn decode(data: &[u8]) -> Result<Self, ShortData> {
        let bytes = whole::<ENTRY_LEN>(data, "discovery record")?;
        Ok(Self {
            trtype: bytes[0],
            adrfam: bytes[1],
            subtype: bytes[2],
            treq: bytes[3],
            portid: u16_at(bytes, 4),
            cntlid: u16_at(bytes, 6),
            asqsz: u16_at(bytes, 8),
            trsvcid: text_at(bytes, 32, 32),
            subnqn: text_at(bytes, 256, 256),
            traddr: text_at(bytes, 512, 256),
            sectype: bytes[SECTYPE_AT],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::prelude::v1::*;

    #[test]
    fn header_bytes() {
        let b = Header { genctr: 7, numrec: 2, recfmt: 0 }.encode();
        let mut want = [0u8; 1024];
        want[0] = 7;
        want[8] = 2;
        assert_eq!(b, want);
        assert_eq!(Header::decode(&want).unwrap(), Header { genctr: 7, numrec: 2, recfmt: 0 });
        assert_eq!(Header::decode(&[0; 17]).unwrap_err().have, 17);
    }

    #[test]
    fn entry_bytes() {
        let mut want = std::vec![0u8; 1024];
        want[..10].copy_from_slice(&[3, 1, 2, 4, 1, 0, 0xff, 0xff, 32, 0]);
        want[32..64].copy_from_slice(b"4420                            ");
        want[256..285].copy_from_slice(b"nqn.2026-01.io.example:drives");
        want[512..768].fill(b' ');
        want[512..521].copy_from_slice(b"127.0.0.1");
        want[768] = SECTYPE_TLS13;
        let entry = Entry::decode(&want).unwrap();
        assert_eq!(entry.traddr, "127.0.0.1");
        assert_eq!(entry.trsvcid, "4420");
        assert_eq!(entry.subnqn, "nqn.2026-01.io.example:drives");
        assert_eq!((entry.cntlid, entry.asqsz, entry.portid), (0xffff, 32, 1));
        assert_eq!(entry.sectype, SECTYPE_TLS13);
        assert_eq!(entry.encode()[..], want[..]);
    }
}
