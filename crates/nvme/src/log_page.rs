//! Log pages (Base §5.16.1). The discovery log has [a module of its own](crate::discovery).

use alloc::vec::Vec;

use crate::bytes::{ShortData, put, put_text, put16, put32, put64, u16_at, u32_at, u64_at, whole};
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
/// Discovery.
pub const DISCOVERY: u8 = 0x70;

/// Supported Log Pages: 1024 bytes, one dword per page, bit 0 set for each page of `pages`.
#[must_use]
pub fn supported(pages: &[u8]) -> [u8; 1024] {
    let mut b = [0; 1024];
    for &lid in pages {
        b[4 * usize::from(lid)] = 1;
    }
    b
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
    /// Byte 14: the parameter in error: byte of the command in 7:0, bit in 10:8; FFFFh: none.
    pub parameter: u16,
    /// Byte 16: first block in error.
    pub lba: u64,
    /// Byte 24: namespace identifier.
    pub nsid: u32,
}

impl ErrorEntry {
    /// Length of an entry in bytes.
    pub const LEN: usize = 64;

    /// The entry as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        put64(&mut b, 0, self.count);
        put16(&mut b, 8, self.sqid);
        put16(&mut b, 10, self.cid);
        put16(&mut b, 12, self.status.0 << 1);
        put16(&mut b, 14, self.parameter);
        put64(&mut b, 16, self.lba);
        put32(&mut b, 24, self.nsid);
        b[29] = crate::discovery::TRTYPE_TCP;
        b
    }

    /// Reads an entry.
    ///
    /// # Errors
    /// [`ShortData`], if `data` has fewer than 64 bytes.
    pub fn decode(data: &[u8]) -> Result<Self, ShortData> {
        let b = whole::<{ Self::LEN }>(data, "error log entry")?;
        Ok(Self {
            count: u64_at(b, 0),
            sqid: u16_at(b, 8),
            cid: u16_at(b, 10),
            status: Status(u16_at(b, 12) >> 1),
            parameter: u16_at(b, 14),
            lba: u64_at(b, 16),
            nsid: u32_at(b, 24),
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
    /// Byte 5: life used, in percent.
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
        let mut b = [0; Self::LEN];
        b[0] = self.critical_warning;
        put16(&mut b, 1, self.temperature);
        b[3] = self.spare;
        b[4] = self.spare_threshold;
        b[5] = self.used;
        put64(&mut b, 32, self.data_read);
        put64(&mut b, 48, self.data_written);
        put64(&mut b, 64, self.reads);
        put64(&mut b, 80, self.writes);
        put64(&mut b, 112, self.power_cycles);
        put64(&mut b, 128, self.power_on_hours);
        put64(&mut b, 144, self.unsafe_shutdowns);
        put64(&mut b, 160, self.media_errors);
        put64(&mut b, 176, self.error_entries);
        b
    }

    /// Reads the page. Of each counter, the low 64 bits are taken.
    ///
    /// # Errors
    /// [`ShortData`], if `data` has fewer than 512 bytes.
    pub fn decode(data: &[u8]) -> Result<Self, ShortData> {
        let b = whole::<{ Self::LEN }>(data, "SMART log page")?;
        Ok(Self {
            critical_warning: b[0],
            temperature: u16_at(b, 1),
            spare: b[3],
            spare_threshold: b[4],
            used: b[5],
            data_read: u64_at(b, 32),
            data_written: u64_at(b, 48),
            reads: u64_at(b, 64),
            writes: u64_at(b, 80),
            power_cycles: u64_at(b, 112),
            power_on_hours: u64_at(b, 128),
            unsafe_shutdowns: u64_at(b, 144),
            media_errors: u64_at(b, 160),
            error_entries: u64_at(b, 176),
        })
    }
}

/// Firmware Slot Information: 512 bytes, slot 1 active with `revision` (8 characters).
#[must_use]
pub fn firmware(revision: &str) -> [u8; 512] {
    let mut b = [0; 512];
    b[0] = 1;
    put_text(&mut b, 8, 8, revision, b' ');
    b
}

/// Changed Namespace List: 4096 bytes. More than 1024 namespaces are encoded as FFFFFFFFh alone.
#[must_use]
pub fn changed_namespaces(nsids: &[u32]) -> [u8; 4096] {
    let mut b = [0; 4096];
    if nsids.len() > 1024 {
        put32(&mut b, 0, 0xffff_ffff);
    } else {
        for (i, &nsid) in nsids.iter().enumerate() {
            put32(&mut b, 4 * i, nsid);
        }
    }
    b
}

/// The namespaces of a Changed Namespace List; `None` if the list had no space for all.
///
/// # Errors
/// [`ShortData`], if `data` has fewer than 4096 bytes.
pub fn changed_namespaces_of(data: &[u8]) -> Result<Option<Vec<u32>>, ShortData> {
    let b = whole::<4096>(data, "changed namespace list")?;
    if u32_at(b, 0) == 0xffff_ffff {
        return Ok(None);
    }
    Ok(Some((0..1024).map(|i| u32_at(b, 4 * i)).take_while(|&nsid| nsid != 0).collect()))
}

/// CSUPP: the controller supports the command.
const CSUPP: u32 = 1 << 0;
/// LBCC: the command may change the content of blocks.
const LBCC: u32 = 1 << 1;

/// Commands Supported and Effects: 4096 bytes, one dword per opcode. Admin commands begin at byte
/// 0, I/O commands at byte 1024.
///
/// `io_queues` is whether the controller has I/O queues; a discovery controller has none.
#[must_use]
pub fn effects(io_queues: bool) -> [u8; 4096] {
    let mut b = [0; 4096];
    let common = [admin::GET_LOG_PAGE, admin::IDENTIFY, admin::KEEP_ALIVE, admin::ASYNC_EVENT];
    let features = [admin::SET_FEATURES, admin::GET_FEATURES, admin::ABORT];
    for code in common.into_iter().chain(features) {
        put32(&mut b, 4 * usize::from(code), CSUPP);
    }
    if io_queues {
        for (code, effect) in [
            (opcode::FLUSH, CSUPP),
            (opcode::WRITE, CSUPP | LBCC),
            (opcode::READ, CSUPP),
            (opcode::WRITE_ZEROES, CSUPP | LBCC),
            (opcode::DATASET_MANAGEMENT, CSUPP | LBCC),
        ] {
            put32(&mut b, 1024 + 4 * usize::from(code), effect);
        }
    }
    b
}

/// The part of a page that Get Log Page asks for: `len` bytes from `offset` on. Bytes beyond the
/// end of the page are zero.
///
/// # Errors
/// [`OffsetBeyond`], if `offset` is beyond the end; the command completes with *invalid field*
/// (Base §5.16).
pub fn slice(page: &[u8], offset: u64, len: u32) -> Result<Vec<u8>, OffsetBeyond> {
    let start = usize::try_from(offset).ok().filter(|&o| o <= page.len()).ok_or(OffsetBeyond)?;
    let mut out = alloc::vec![0; len as usize];
    let n = out.len().min(page.len() - start);
    put(&mut out, 0, &page[start..start + n]);
    Ok(out)
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
