//! Log pages (Base §5.16.1). The discovery log has [a module of its own](crate::discovery).

use alloc::vec::Vec;

use crate::bytes::{
    ShortData, put, put_text, put_u16, put_u32, put_u64, u16_at, u32_at, u64_at, whole,
};
use crate::command::{Status, admin, opcode};

/// Supported Log Pages.
pub const SUPPORTED: u8 = 0x00;
/// Error Information.
pub const ERROR: u8 = 0x01;
/// SMART / Health Information.
pub const SMART: u8 = 0x02;
/// Firmware Slot Information.
pub const FIRMWARE: u8 = 0x03;
/// Changed Namespace List.
pub const CHANGED_NAMESPACES: u8 = 0x04;
/// Commands Supported and Effects.
pub const EFFECTS: u8 = 0x05;
/// Telemetry Host-Initiated.
pub const TELEMETRY_HOST: u8 = 0x07;
/// Telemetry Controller-Initiated.
pub const TELEMETRY_CONTROLLER: u8 = 0x08;
/// Asymmetric Namespace Access ([`crate::ana`]).
pub const ANA: u8 = 0x0c;
/// Discovery.
pub const DISCOVERY: u8 = 0x70;

/// Reservation Notification.
pub const RESERVATION: u8 = 0x80;

/// Supported Log Pages: 1024 bytes, one dword per page, bit 0 set for each page of `pages`.
#[must_use]
pub fn supported(pages: &[u8]) -> [u8; 1024] {
    let mut bytes = [0; 1024];
    for &lid in pages {
        bytes[4 * usize::from(lid)] = 1;
    }
    bytes
}

/// One entry of the Error Information page: 64 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ErrorEntry {
    /// Byte 0: number of this error, counted from 1 since the controller was made; 0: no entry.
    pub count: u64,
    /// Byte 8: submission queue identifier.
    pub sqid: u16,
    /// Byte 10: command identifier.
    pub cid: u16,
    /// Byte 12: status of the command.
    pub status: Status,
    /// Byte 14: the parameter in error: byte of the command in 7:0, bit in 10:8; [`NO_PARAMETER`](Self::NO_PARAMETER): none.
    pub parameter: u16,
    /// Byte 16: first block in error.
    pub lba: u64,
    /// Byte 24: namespace identifier.
    pub nsid: u32,
}

impl ErrorEntry {
    /// Length of an entry in bytes.
    pub const LEN: usize = 64;
    /// The parameter of an error that concerns no single one.
    pub const NO_PARAMETER: u16 = 0xffff;

    /// The entry as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        put_u64(&mut bytes, 0, self.count);
        put_u16(&mut bytes, 8, self.sqid);
        put_u16(&mut bytes, 10, self.cid);
        put_u16(&mut bytes, 12, self.status.0 << 1);
        put_u16(&mut bytes, 14, self.parameter);
        put_u64(&mut bytes, 16, self.lba);
        put_u32(&mut bytes, 24, self.nsid);
        bytes[29] = crate::discovery::TRTYPE_TCP;
        bytes
    }

    /// Reads an entry.
    ///
    /// # Errors
    /// [`ShortData`], if `data` has fewer than 64 bytes.
    pub fn decode(data: &[u8]) -> Result<Self, ShortData> {
        let bytes = whole::<{ Self::LEN }>(data, "error log entry")?;
        Ok(Self {
            count: u64_at(bytes, 0),
            sqid: u16_at(bytes, 8),
            cid: u16_at(bytes, 10),
            status: Status(u16_at(bytes, 12) >> 1),
            parameter: u16_at(bytes, 14),
            lba: u64_at(bytes, 16),
            nsid: u32_at(bytes, 24),
        })
    }
}

/// SMART / Health Information: 512 bytes. Counters are 128 bits on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Smart {
    /// Byte 0: critical warnings.
    pub critical_warning: u8,
    /// Byte 1: temperature in kelvin.
    pub temperature: u16,
    /// Byte 3: spare capacity left, in percent.
    pub spare: u8,
    /// Byte 4: spare capacity below which the controller warns, in percent.
    pub spare_threshold: u8,
    /// Byte 5: the part of the drive's endurance that is used, in percent.
    pub used: u8,
    /// Byte 32: data read, in units of 512,000 bytes, rounded up.
    pub data_read: u64,
    /// Byte 48: data written, in units of 512,000 bytes, rounded up.
    pub data_written: u64,
    /// Byte 64: number of read commands.
    pub reads: u64,
    /// Byte 80: number of write commands.
    pub writes: u64,
    /// Byte 112: number of power cycles: here, starts of the target.
    pub power_cycles: u64,
    /// Byte 128: hours since the start.
    pub power_on_hours: u64,
    /// Byte 144: number of shutdowns without notice.
    pub unsafe_shutdowns: u64,
    /// Byte 160: number of media errors.
    pub media_errors: u64,
    /// Byte 176: number of error log entries over the controller's life.
    pub error_entries: u64,
}

impl Smart {
    /// Length of the page in bytes.
    pub const LEN: usize = 512;

    /// The page as it is sent: 512 bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = self.critical_warning;
        put_u16(&mut bytes, 1, self.temperature);
        bytes[3] = self.spare;
        bytes[4] = self.spare_threshold;
        bytes[5] = self.used;
        put_u64(&mut bytes, 32, self.data_read);
        put_u64(&mut bytes, 48, self.data_written);
        put_u64(&mut bytes, 64, self.reads);
        put_u64(&mut bytes, 80, self.writes);
        put_u64(&mut bytes, 112, self.power_cycles);
        put_u64(&mut bytes, 128, self.power_on_hours);
        put_u64(&mut bytes, 144, self.unsafe_shutdowns);
        put_u64(&mut bytes, 160, self.media_errors);
        put_u64(&mut bytes, 176, self.error_entries);
        bytes
    }

    /// Reads the page. Only the low 64 bits of each counter are read.
    ///
    /// # Errors
    /// [`ShortData`], if `data` has fewer than 512 bytes.
    pub fn decode(data: &[u8]) -> Result<Self, ShortData> {
        let bytes = whole::<{ Self::LEN }>(data, "SMART log page")?;
        Ok(Self {
            critical_warning: bytes[0],
            temperature: u16_at(bytes, 1),
            spare: bytes[3],
            spare_threshold: bytes[4],
            used: bytes[5],
            data_read: u64_at(bytes, 32),
            data_written: u64_at(bytes, 48),
            reads: u64_at(bytes, 64),
            writes: u64_at(bytes, 80),
            power_cycles: u64_at(bytes, 112),
            power_on_hours: u64_at(bytes, 128),
            unsafe_shutdowns: u64_at(bytes, 144),
            media_errors: u64_at(bytes, 160),
            error_entries: u64_at(bytes, 176),
        })
    }
}

/// Firmware Slot Information: 512 bytes, slot 1 active with `revision` (8 characters).
#[must_use]
pub fn firmware(revision: &str) -> [u8; 512] {
    let mut bytes = [0; 512];
    bytes[0] = 1;
    put_text(&mut bytes, 8, 8, revision, b' ');
    bytes
}

/// The most namespaces of a Changed Namespace List.
pub const CHANGED_NAMESPACES_MAX: usize = 1024;
/// The first element of a Changed Namespace List if more namespaces have changed.
const TOO_MANY_CHANGED: u32 = 0xffff_ffff;

/// Changed Namespace List: 4096 bytes. More than 1024 namespaces are encoded as FFFFFFFFh alone.
#[must_use]
pub fn changed_namespaces(nsids: &[u32]) -> [u8; 4096] {
    let mut bytes = [0; 4096];
    if nsids.len() > CHANGED_NAMESPACES_MAX {
        put_u32(&mut bytes, 0, TOO_MANY_CHANGED);
    } else {
        for (index, &nsid) in nsids.iter().enumerate() {
            put_u32(&mut bytes, 4 * index, nsid);
        }
    }
    bytes
}

/// The namespaces of a Changed Namespace List; `None` if the list had no space for all.
///
/// # Errors
/// [`ShortData`], if `data` has fewer than 4096 bytes.
pub fn changed_namespaces_of(data: &[u8]) -> Result<Option<Vec<u32>>, ShortData> {
    let bytes = whole::<4096>(data, "changed namespace list")?;
    if u32_at(bytes, 0) == TOO_MANY_CHANGED {
        return Ok(None);
    }
    let nsids = (0..CHANGED_NAMESPACES_MAX).map(|index| u32_at(bytes, 4 * index));
    Ok(Some(nsids.take_while(|&nsid| nsid != 0).collect()))
}

/// CSUPP: the controller supports the command.
const CSUPP: u32 = 1 << 0;
/// LBCC: the command may change the content of blocks.
const LBCC: u32 = 1 << 1;

/// Offset of the I/O commands in Commands Supported and Effects. The admin commands begin at byte
/// 0.
const IO_EFFECTS_AT: usize = 1024;

/// Commands Supported and Effects: 4096 bytes, one dword per opcode.
///
/// `has_io_queues` is whether the controller has I/O queues. A discovery controller has none.
#[must_use]
pub fn effects(has_io_queues: bool) -> [u8; 4096] {
    let mut bytes = [0; 4096];
    let common = [admin::GET_LOG_PAGE, admin::IDENTIFY, admin::KEEP_ALIVE, admin::ASYNC_EVENT];
    let features = [admin::SET_FEATURES, admin::GET_FEATURES, admin::ABORT];
    for code in common.into_iter().chain(features) {
        put_u32(&mut bytes, 4 * usize::from(code), CSUPP);
    }
    if has_io_queues {
        for (code, effect) in [
            (opcode::FLUSH, CSUPP),
            (opcode::WRITE, CSUPP | LBCC),
            (opcode::READ, CSUPP),
            (opcode::COMPARE, CSUPP),
            (opcode::VERIFY, CSUPP),
            (opcode::RESERVATION_REGISTER, CSUPP),
            (opcode::RESERVATION_REPORT, CSUPP),
            (opcode::RESERVATION_ACQUIRE, CSUPP),
            (opcode::RESERVATION_RELEASE, CSUPP),
            (opcode::WRITE_ZEROES, CSUPP | LBCC),
            (opcode::COPY, CSUPP | LBCC),
            (opcode::DATASET_MANAGEMENT, CSUPP | LBCC),
        ] {
            put_u32(&mut bytes, IO_EFFECTS_AT + 4 * usize::from(code), effect);
        }
    }
    bytes
}

/// The part of a page that Get Log Page asks for: `len` bytes from `offset` on. Bytes beyond the
/// end of the page are zero.
///
/// # Errors
/// [`OffsetBeyond`], if `offset` is beyond the end; the command completes with *invalid field*
/// (Base §5.16).
pub fn slice(page: &[u8], offset: u64, len: u32) -> Result<Vec<u8>, OffsetBeyond> {
    let Some(rest) = usize::try_from(offset).ok().and_then(|start| page.get(start..)) else {
        return Err(OffsetBeyond);
    };
    let mut part = alloc::vec![0; len as usize];
    let available = part.len().min(rest.len());
    put(&mut part, 0, &rest[..available]);
    Ok(part)
}

/// A log page offset beyond the page's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the offset is beyond the end of the log page")]
pub struct OffsetBeyond;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_entry_bytes() {
        let mut want = [0u8; 64];
        want[0] = 5;
        want[8..16].copy_from_slice(&[1, 0, 0x34, 0x12, 0x00, 0x05, 0xff, 0xff]);
        want[16] = 9;
        want[24] = 2;
        want[29] = 3;
        let entry = ErrorEntry::decode(&want).unwrap();
        assert_eq!(entry.status, Status::WRITE_FAULT);
        assert_eq!((entry.cid, entry.lba, entry.nsid), (0x1234, 9, 2));
        assert_eq!(entry.encode(), want);
    }

    #[test]
    fn smart_bytes() {
        let mut want = [0u8; 512];
        want[1..6].copy_from_slice(&[0x2c, 0x01, 100, 10, 3]);
        want[32] = 1;
        want[48] = 2;
        want[64] = 3;
        want[80] = 4;
        want[112] = 5;
        want[128] = 6;
        want[144] = 7;
        want[160] = 8;
        want[176] = 9;
        let smart = Smart::decode(&want).unwrap();
        assert_eq!(smart.temperature, 300);
        assert_eq!((smart.data_written, smart.writes, smart.error_entries), (2, 4, 9));
        assert_eq!(smart.encode(), want);
    }

    #[test]
    fn small_pages() {
        let fw = firmware("0.1.0");
        assert_eq!(&fw[..16], b"\x01\0\0\0\0\0\0\x000.1.0   ");
        assert!(fw[16..].iter().all(|&c| c == 0));

        let pages = supported(&[SUPPORTED, ERROR, DISCOVERY]);
        assert_eq!(pages.iter().map(|&c| usize::from(c)).sum::<usize>(), 3);
        assert_eq!((pages[0], pages[4], pages[0x1c0]), (1, 1, 1));

        let fx = effects(true);
        assert_eq!(fx[1024 + 4], 3, "write changes content");
        assert_eq!(fx[1024], 1, "flush does not");
        assert_eq!(fx[4 * 6], 1, "identify");
        assert!(effects(false)[1024..].iter().all(|&c| c == 0));

        let changed = changed_namespaces(&[1, 7]);
        assert_eq!(&changed[..12], &[1, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(changed_namespaces_of(&changed).unwrap(), Some(alloc::vec![1, 7]));
        let many = changed_namespaces(&[1; 1025]);
        assert_eq!(&many[..8], &[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
        assert_eq!(changed_namespaces_of(&many).unwrap(), None);
    }

    #[test]
    fn a_slice_is_padded_with_zeroes() {
        assert_eq!(slice(&[1, 2, 3, 4, 5], 4, 4).unwrap(), [5, 0, 0, 0]);
        assert_eq!(slice(&[1, 2], 2, 4).unwrap(), [0; 4]);
        assert_eq!(slice(&[1, 2], 3, 4), Err(OffsetBeyond));
        assert_eq!(slice(&[1, 2], u64::MAX, 4), Err(OffsetBeyond));
    }
}
