//! Fabrics commands and properties (Base §3.1.3, §6).

use alloc::string::String;

use crate::bytes::{array, put, put_text, put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};
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
/// Length of the Connect command's data in bytes.
pub const CONNECT_DATA_LEN: usize = 1024;
/// Length of a field for a name in the Connect command's data, in bytes.
const NQN_FIELD_LEN: usize = 256;
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
    /// NQN of the host. Some hosts, such as SPDK's `perf`, send none unless their user gives one: it
    /// is empty then.
    pub hostnqn: String,
}

impl ConnectData {
    /// The data as it is sent: 1024 bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; CONNECT_DATA_LEN] {
        let mut bytes = [0; CONNECT_DATA_LEN];
        put(&mut bytes, 0, &self.hostid);
        put_u16(&mut bytes, 16, self.cntlid);
        put_text(&mut bytes, 256, NQN_MAX, &self.subnqn, 0);
        put_text(&mut bytes, 512, NQN_MAX, &self.hostnqn, 0);
        bytes
    }

    /// Reads the data of a Connect.
    ///
    /// # Errors
    /// [`ConnectInvalid`], if `data` is too short or if a name is not a NUL-terminated NQN of at
    /// most 223 bytes (trap T18). Only the host's may be empty. The command completes with *connect: invalid parameters*.
    pub fn decode(data: &[u8]) -> Result<Self, ConnectInvalid> {
        let bytes: &[u8; CONNECT_DATA_LEN] = data.first_chunk().ok_or(ConnectInvalid {
            offset: 0,
            in_data: true,
            why: "the connect data is shorter than 1024 bytes",
        })?;
        Ok(Self {
            hostid: array(bytes, 0),
            cntlid: u16_at(bytes, 16),
            subnqn: nqn_field(bytes, 256)?,
            hostnqn: match bytes[512] {
                0 => String::new(),
                _ => nqn_field(bytes, 512)?,
            },
        })
    }
}

/// Reads the NQN in the field at offset `at` of the Connect data.
fn nqn_field(bytes: &[u8; CONNECT_DATA_LEN], at: usize) -> Result<String, ConnectInvalid> {
    let invalid = |why| ConnectInvalid { offset: at as u16, in_data: true, why };
    let field = &bytes[at..at + NQN_FIELD_LEN];
    let Some(end) = field.iter().position(|&byte| byte == 0) else {
        return Err(invalid("the name has no NUL at its end"));
    };
    let name = core::str::from_utf8(&field[..end]).map_err(|_| invalid("the name is not UTF-8"))?;
    check_nqn(name).map_err(|error| invalid(error.0))?;
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
    // `d` stands for a digit.
    let date_pattern = b"dddd-dd.";
    let matches_pattern = |(byte, &pattern): (u8, &u8)| match pattern {
        b'd' => byte.is_ascii_digit(),
        literal => byte == literal,
    };
    let has_date_and_domain =
        rest.len() > date_pattern.len() && rest.bytes().zip(date_pattern).all(matches_pattern);
    if !has_date_and_domain {
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
    pub fn connect(connect: &Connect) -> Self {
        let mut sqe = Self::fabrics(fctype::CONNECT);
        put_u16(&mut sqe.0, 40, connect.recfmt);
        put_u16(&mut sqe.0, 42, connect.qid);
        put_u16(&mut sqe.0, 44, connect.sqsize);
        sqe.0[46] = connect.cattr;
        put_u32(&mut sqe.0, 48, connect.kato_ms);
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
        put_u32(&mut sqe.0, 44, offset);
        sqe
    }

    /// Property Set of the 4- or 8-byte (`wide`) property at `offset`.
    #[must_use]
    pub fn property_set(offset: u32, wide: bool, value: u64) -> Self {
        let mut sqe = Self::fabrics(fctype::PROPERTY_SET);
        sqe.0[40] = u8::from(wide);
        put_u32(&mut sqe.0, 44, offset);
        put_u64(&mut sqe.0, 48, value);
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

    pub(crate) fn fabrics(fctype: u8) -> Self {
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
    /// The property's value. CQR is set, because over fabrics all queues are contiguous. MPSMAX is
    /// the same as MPSMIN.
    #[must_use]
    pub const fn value(&self) -> u64 {
        const CQR: u64 = 1 << 16;
        let page_size = (self.mpsmin & 0xf) as u64;
        self.mqes as u64
            | CQR
            | (self.timeout as u64) << 24
            | (self.css as u64) << 37
            | page_size << 48
            | page_size << 52
    }

    /// The fields of a property value.
    #[must_use]
    pub const fn from_value(value: u64) -> Self {
        Self {
            mqes: value as u16,
            timeout: (value >> 24) as u8,
            css: (value >> 37) as u8,
            mpsmin: (value >> 48) as u8 & 0xf,
        }
    }
}

/// Controller Configuration (Base §3.1.3.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Cc(pub u32);

impl Cc {
    /// Enabled, NVM command set, 4 KiB pages, round robin, entries of 64 and 16 bytes: the value
    /// that a host writes to enable a controller.
    pub const ENABLE: Self = Self(Self::EN | 6 << 16 | 4 << 20);

    /// EN, bit 0.
    const EN: u32 = 1 << 0;

    /// Whether the controller is enabled (EN).
    #[must_use]
    pub const fn enabled(self) -> bool {
        self.0 & Self::EN != 0
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
    /// SHST, bits 3:2: the state of a shutdown.
    const SHST: u32 = 3 << 2;
    /// SHST 01b: shutdown processing occurs.
    const SHUTDOWN_OCCURS: u32 = 1 << 2;
    /// SHST 10b: shutdown complete.
    pub const SHUTDOWN_DONE: u32 = 2 << 2;
    /// ST, bit 6: the shutdown that SHST reports is one of the whole NVM subsystem.
    const SUBSYSTEM_SHUTDOWN: u32 = 1 << 6;

    /// This status, with a shutdown that is complete.
    #[must_use]
    pub const fn with_shutdown_done(self) -> Self {
        Self(self.0 & !Self::SHST | Self::SHUTDOWN_DONE)
    }

    /// This status, with a shutdown of the whole subsystem that occurs, unless a shutdown has been
    /// reported already.
    #[must_use]
    pub const fn with_subsystem_shutdown(self) -> Self {
        match self.0 & Self::SHST {
            0 => Self(self.0 | Self::SHUTDOWN_OCCURS | Self::SUBSYSTEM_SHUTDOWN),
            _ => self,
        }
    }

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
        self.0 & Self::SHST == Self::SHUTDOWN_DONE
    }
}

#[cfg(test)]
mod tests;
