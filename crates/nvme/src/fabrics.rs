//! Fabrics commands and properties (Base §3.1.3, §6).

use alloc::string::String;

use crate::bytes::{array, put, put_text, put16, put32, put64, u16_at, u32_at, u64_at};
use crate::command::{Sqe, admin};

/// Types of Fabrics command (Base §6).
pub mod fctype {
    /// Property Set.
    pub const PROPERTY_SET: u8 = 0x00;
    /// Connect.
    pub const CONNECT: u8 = 0x01;
    /// Property Get.
    pub const PROPERTY_GET: u8 = 0x04;
    /// Authentication Send.
    pub const AUTH_SEND: u8 = 0x05;
    /// Authentication Receive.
    pub const AUTH_RECV: u8 = 0x06;
    /// Disconnect.
    pub const DISCONNECT: u8 = 0x08;
}

/// Offsets of controller properties, in bytes (Base §3.1.3).
pub mod property {
    /// Controller Capabilities, 8 bytes ([`super::Cap`]).
    pub const CAP: u32 = 0x00;
    /// Version, 4 bytes.
    pub const VS: u32 = 0x08;
    /// Controller Configuration, 4 bytes ([`super::Cc`]).
    pub const CC: u32 = 0x14;
    /// Controller Status, 4 bytes ([`super::Csts`]).
    pub const CSTS: u32 = 0x1c;
    /// NVM Subsystem Reset, 4 bytes, optional.
    pub const NSSR: u32 = 0x20;
    /// Controller Ready Timeouts, 4 bytes, optional.
    pub const CRTO: u32 = 0x68;
}

/// The well-known NQN of the discovery subsystem.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// Port of NVMe/TCP connections to I/O controllers.
pub const IO_PORT: u16 = 4420;
/// Port of NVMe/TCP connections to discovery controllers.
pub const DISCOVERY_PORT: u16 = 8009;
/// Longest NVMe qualified name, in bytes, without its NUL (Base §4.5).
pub const NQN_MAX: usize = 223;
/// Controller identifier in Connect by which a host asks for any controller.
pub const CNTLID_ANY: u16 = 0xffff;
/// Bytes of the Connect command's data.
pub const CONNECT_DATA_LEN: usize = 1024;
/// Version property of Base 2.0.
pub const VERSION_2_0: u32 = 0x0002_0000;
/// Version property of Base 1.4.
pub const VERSION_1_4: u32 = 0x0001_0400;

/// CATTR bit 2: the host asks for no submission queue flow control; SQHD is then FFFFh.
pub const CATTR_NO_SQ_FLOW: u8 = 1 << 2;

/// The fields of a Connect command (Base §6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Connect {
    /// Record format; 0.
    pub recfmt: u16,
    /// Queue to create; 0 is the admin queue and creates the controller.
    pub qid: u16,
    /// Entries of the submission queue, *less one*, as on the wire.
    pub sqsize: u16,
    /// Attributes; [`CATTR_NO_SQ_FLOW`].
    pub cattr: u8,
    /// Keep Alive Timeout in milliseconds; 0: none. Admin queue only.
    pub kato_ms: u32,
}

/// The field of a Connect that is wrong: the completion's result (Base §6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("byte {offset} of the connect {}: {why}", if *.in_data { "data" } else { "command" })]
pub struct ConnectInvalid {
    /// Offset of the field in bytes.
    pub offset: u16,
    /// True: the field is in the data (IATTR bit 0). False: it is in the command.
    pub in_data: bool,
    /// The defect, in words.
    pub why: &'static str,
}

impl ConnectInvalid {
    /// The completion's result, with [`crate::command::Status::CONNECT_INVALID`].
    #[must_use]
    pub const fn result(&self) -> u64 {
        connect_invalid(self.offset, self.in_data)
    }
}

/// Result of a Connect refused with *invalid parameters*: IPO and IATTR.
#[must_use]
pub const fn connect_invalid(offset: u16, in_data: bool) -> u64 {
    offset as u64 | (in_data as u64) << 16
}

/// The data of a Connect command: 1024 bytes (Base §6.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectData {
    /// Host identifier.
    pub hostid: [u8; 16],
    /// Controller wanted; [`CNTLID_ANY`] on the admin queue of a dynamic controller.
    pub cntlid: u16,
    /// NQN of the subsystem.
    pub subnqn: String,
    /// NQN of the host.
    pub hostnqn: String,
}

impl ConnectData {
    /// The data as it is sent: 1024 bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; CONNECT_DATA_LEN] {
        let mut b = [0; CONNECT_DATA_LEN];
        put(&mut b, 0, &self.hostid);
        put16(&mut b, 16, self.cntlid);
        put_text(&mut b, 256, NQN_MAX, &self.subnqn, 0);
        put_text(&mut b, 512, NQN_MAX, &self.hostnqn, 0);
        b
    }

    /// Reads the data of a Connect.
    ///
    /// # Errors
    /// [`ConnectInvalid`], if `data` is too short or if a name is not a NUL-terminated NQN of at
    /// most 223 bytes (T18). The command completes with *connect: invalid parameters*.
    pub fn decode(data: &[u8]) -> Result<Self, ConnectInvalid> {
        let b: &[u8; CONNECT_DATA_LEN] = data.first_chunk().ok_or(ConnectInvalid {
            offset: 0,
            in_data: true,
            why: "the connect data is shorter than 1024 bytes",
        })?;
        Ok(Self {
            hostid: array(b, 0),
            cntlid: u16_at(b, 16),
            subnqn: nqn_field(b, 256)?,
            hostnqn: nqn_field(b, 512)?,
        })
    }
}

fn nqn_field(b: &[u8; CONNECT_DATA_LEN], at: usize) -> Result<String, ConnectInvalid> {
    let invalid = |why| ConnectInvalid { offset: at as u16, in_data: true, why };
    let field = &b[at..at + 256];
    let end =
        field.iter().position(|&c| c == 0).ok_or(invalid("the name has no NUL at its end"))?;
    let name = core::str::from_utf8(&field[..end]).map_err(|_| invalid("the name is not UTF-8"))?;
    check_nqn(name).map_err(|e| invalid(e.0))?;
    Ok(String::from(name))
}

/// The reason for which a string is not an NVMe qualified name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NqnError(pub &'static str);

/// Checks an NVMe qualified name (Base §4.5): `nqn.yyyy-mm.reversed.domain[:anything]`, or
/// `nqn.2014-08.org.nvmexpress:uuid:…`.
///
/// # Errors
/// [`NqnError`], with the rule that `name` breaks.
pub fn check_nqn(name: &str) -> Result<(), NqnError> {
    if name.len() > NQN_MAX {
        return Err(NqnError("the name is longer than 223 bytes"));
    }
    let Some(rest) = name.strip_prefix("nqn.") else {
        return Err(NqnError("the name does not begin with \"nqn.\""));
    };
    let shape = b"dddd-dd.";
    let dated = rest.len() > shape.len()
        && rest.bytes().zip(shape).all(|(c, &s)| match s {
            b'd' => c.is_ascii_digit(),
            s => c == s,
        });
    if !dated {
        return Err(NqnError("\"nqn.\" is not followed by year-month and a domain"));
    }
    if name.chars().any(char::is_control) {
        return Err(NqnError("the name has control characters"));
    }
    Ok(())
}

impl Sqe {
    /// A Connect command; its data is a [`ConnectData`].
    #[must_use]
    pub fn connect(c: &Connect) -> Self {
        let mut sqe = Self::fabrics(fctype::CONNECT);
        put16(&mut sqe.0, 40, c.recfmt);
        put16(&mut sqe.0, 42, c.qid);
        put16(&mut sqe.0, 44, c.sqsize);
        sqe.0[46] = c.cattr;
        put32(&mut sqe.0, 48, c.kato_ms);
        sqe
    }

    /// The fields of a Connect command.
    #[must_use]
    pub fn connect_fields(&self) -> Connect {
        Connect {
            recfmt: u16_at(&self.0, 40),
            qid: u16_at(&self.0, 42),
            sqsize: u16_at(&self.0, 44),
            cattr: self.0[46],
            kato_ms: u32_at(&self.0, 48),
        }
    }

    /// Property Get of the 4- or 8-byte (`wide`) property at `offset`; the result is its value.
    #[must_use]
    pub fn property_get(offset: u32, wide: bool) -> Self {
        let mut sqe = Self::fabrics(fctype::PROPERTY_GET);
        sqe.0[40] = u8::from(wide);
        put32(&mut sqe.0, 44, offset);
        sqe
    }

    /// Property Set of the 4- or 8-byte (`wide`) property at `offset`.
    #[must_use]
    pub fn property_set(offset: u32, wide: bool, value: u64) -> Self {
        let mut sqe = Self::fabrics(fctype::PROPERTY_SET);
        sqe.0[40] = u8::from(wide);
        put32(&mut sqe.0, 44, offset);
        put64(&mut sqe.0, 48, value);
        sqe
    }

    /// Disconnect: deletes the I/O queue on which it is sent.
    #[must_use]
    pub fn disconnect() -> Self {
        Self::fabrics(fctype::DISCONNECT)
    }

    /// Offset of a Property Get or Set.
    #[must_use]
    pub fn property_offset(&self) -> u32 {
        u32_at(&self.0, 44)
    }

    /// Size of a Property Get or Set (ATTRIB bits 2:0) in bytes: 4 or 8; `None` if it is neither.
    #[must_use]
    pub fn property_size(&self) -> Option<u32> {
        match self.0[40] & 7 {
            0 => Some(4),
            1 => Some(8),
            _ => None,
        }
    }

    /// Value of a Property Set. Of a 4-byte property, only the low half counts.
    #[must_use]
    pub fn property_value(&self) -> u64 {
        u64_at(&self.0, 48)
    }

    fn fabrics(fctype: u8) -> Self {
        Self::new(admin::FABRICS, u32::from(fctype))
    }
}

/// Controller Capabilities (Base §3.1.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Cap {
    /// Most entries of an I/O queue, *less one* (MQES, bits 15:0).
    pub mqes: u16,
    /// Longest time to become ready, in units of 500 ms (TO, bits 31:24).
    pub timeout: u8,
    /// The smallest memory page is 2^(12 + this) bytes (MPSMIN, bits 51:48): the unit of MDTS.
    pub mpsmin: u8,
    /// Command sets supported (CSS, bits 44:37); bit 0 is the NVM command set.
    pub css: u8,
}

impl Cap {
    /// The property's value, with CQR (contiguous queues, required over fabrics).
    #[must_use]
    pub const fn value(&self) -> u64 {
        self.mqes as u64
            | 1 << 16
            | (self.timeout as u64) << 24
            | (self.css as u64) << 37
            | ((self.mpsmin & 0xf) as u64) << 48
            | ((self.mpsmin & 0xf) as u64) << 52
    }

    /// The fields of a property value.
    #[must_use]
    pub const fn from_value(v: u64) -> Self {
        Self {
            mqes: v as u16,
            timeout: (v >> 24) as u8,
            css: (v >> 37) as u8,
            mpsmin: (v >> 48) as u8 & 0xf,
        }
    }
}

/// Controller Configuration (Base §3.1.3.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Cc(pub u32);

impl Cc {
    /// Enabled, NVM command set, 4 KiB pages, round robin, entries of 64 and 16 bytes: the value
    /// that a host writes to enable a controller.
    pub const ENABLE: Self = Self(1 | 6 << 16 | 4 << 20);

    /// EN, bit 0.
    #[must_use]
    pub const fn enabled(self) -> bool {
        self.0 & 1 != 0
    }

    /// SHN, bits 15:14: 0 none, 1 normal, 2 abrupt shutdown.
    #[must_use]
    pub const fn shutdown(self) -> u8 {
        (self.0 >> 14) as u8 & 3
    }

    /// This configuration with SHN set to a normal shutdown.
    #[must_use]
    pub const fn with_shutdown(self) -> Self {
        Self(self.0 & !(3 << 14) | 1 << 14)
    }

    /// IOSQES, bits 19:16: I/O submission entries have 2^this bytes; 6.
    #[must_use]
    pub const fn iosqes(self) -> u8 {
        (self.0 >> 16) as u8 & 0xf
    }

    /// IOCQES, bits 23:20: I/O completion entries have 2^this bytes; 4.
    #[must_use]
    pub const fn iocqes(self) -> u8 {
        (self.0 >> 20) as u8 & 0xf
    }

    /// MPS, bits 10:7: a memory page has 2^(12 + this) bytes.
    #[must_use]
    pub const fn mps(self) -> u8 {
        (self.0 >> 7) as u8 & 0xf
    }

    /// CSS, bits 6:4: command set selected; 0 is NVM, 6 all supported.
    #[must_use]
    pub const fn css(self) -> u8 {
        (self.0 >> 4) as u8 & 7
    }
}

/// Controller Status (Base §3.1.3.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Csts(pub u32);

impl Csts {
    /// RDY, bit 0.
    pub const READY: u32 = 1;
    /// CFS, bit 1: controller fatal status; only a reset clears it.
    pub const FATAL: u32 = 1 << 1;
    /// SHST, bits 3:2, 10b: shutdown complete.
    pub const SHUTDOWN_DONE: u32 = 2 << 2;

    /// Whether the controller is ready.
    #[must_use]
    pub const fn ready(self) -> bool {
        self.0 & Self::READY != 0
    }

    /// Whether the controller reports a fatal failure (CFS).
    #[must_use]
    pub const fn fatal(self) -> bool {
        self.0 & Self::FATAL != 0
    }

    /// Whether a requested shutdown is complete.
    #[must_use]
    pub const fn shutdown_done(self) -> bool {
        self.0 & 3 << 2 == Self::SHUTDOWN_DONE
    }
}

#[cfg(test)]
mod tests;
