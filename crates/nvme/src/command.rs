//! Submission and completion queue entries (Base §3.3.3).
//!
//! An [`Sqe`] is its 64 bytes: accessors read and write fields in place, constructors build the
//! commands that a host sends. The queue that sends a command sets its identifier and its data
//! pointer.

use core::fmt;

use crate::bytes::{put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};
pub use crate::status::Status;

/// Opcodes of admin commands (Base Figure 138) and of Fabrics commands.
pub mod admin {
    /// Get Log Page.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Identify.
    pub const IDENTIFY: u8 = 0x06;
    /// Abort.
    pub const ABORT: u8 = 0x08;
    /// Set Features.
    pub const SET_FEATURES: u8 = 0x09;
    /// Get Features.
    pub const GET_FEATURES: u8 = 0x0a;
    /// Asynchronous Event Request.
    pub const ASYNC_EVENT: u8 = 0x0c;
    /// Keep Alive.
    pub const KEEP_ALIVE: u8 = 0x18;
    /// Fabrics commands, distinguished by [`super::Sqe::fctype`].
    pub const FABRICS: u8 = 0x7f;
}

/// Opcodes of I/O commands of the NVM command set (NVM §3).
pub mod opcode {
    /// Flush.
    pub const FLUSH: u8 = 0x00;
    /// Write.
    pub const WRITE: u8 = 0x01;
    /// Read.
    pub const READ: u8 = 0x02;
    /// Write Uncorrectable.
    pub const WRITE_UNCORRECTABLE: u8 = 0x04;
    /// Compare.
    pub const COMPARE: u8 = 0x05;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    /// Verify.
    pub const VERIFY: u8 = 0x0c;
    /// Reservation Register.
    pub const RESERVATION_REGISTER: u8 = 0x0d;
    /// Reservation Report.
    pub const RESERVATION_REPORT: u8 = 0x0e;
    /// Reservation Acquire.
    pub const RESERVATION_ACQUIRE: u8 = 0x11;
    /// Reservation Release.
    pub const RESERVATION_RELEASE: u8 = 0x15;
    /// Copy.
    pub const COPY: u8 = 0x19;
}

/// A submission queue entry: 64 bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Sqe(pub [u8; 64]);

/// The place of a command's data (Base §4.1.2; TCP §3.3.2: only these two are used over TCP).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sgl {
    /// The data is in the command capsule: SGL Data Block descriptor with the *offset* subtype
    /// (01h).
    InCapsule {
        /// Bytes from the start of the capsule's data (ICDOFF is 0).
        offset: u64,
        /// Length of the data in bytes.
        len: u32,
    },
    /// The transport moves the data: Transport SGL Data Block descriptor (5Ah). A write's data goes
    /// by R2T and H2CData, a read's by C2HData.
    Transport {
        /// Length of the data in bytes.
        len: u32,
    },
}

impl Sgl {
    /// Length of the data in bytes.
    #[must_use]
    #[inline]
    #[allow(clippy::len_without_is_empty)]
    pub const fn len(self) -> u32 {
        match self {
            Self::InCapsule { len, .. } | Self::Transport { len } => len,
        }
    }
}

/// A data pointer that is not one of the two descriptors used over TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "SGL descriptor {0:#04x} is neither in-capsule data (01h) nor a transport data block (5ah)"
)]
pub struct SglError(pub u8);

impl SglError {
    /// The status that a command with this descriptor completes with.
    #[must_use]
    pub const fn status(self) -> Status {
        Status::SGL_TYPE_INVALID.with_dnr()
    }
}

const SGL_IN_CAPSULE: u8 = 0x01;
const SGL_TRANSPORT: u8 = 0x5a;
/// PSDT 01b: the data pointer is an SGL (required over fabrics).
const PSDT_SGL: u8 = 0b01 << 6;

/// DEAC of Write Zeroes, in dword 12: the drive may deallocate the blocks.
const CDW12_DEAC: u32 = 1 << 25;
/// FUA of a block command, in dword 12: the blocks are durable on completion.
const CDW12_FUA: u32 = 1 << 30;
/// AD of Dataset Management, in dword 11: deallocate the ranges.
const CDW11_DSM_DEALLOCATE: u32 = 1 << 2;

impl Default for Sqe {
    fn default() -> Self {
        Self([0; 64])
    }
}

impl Sqe {
    /// A command with this opcode and namespace. All other fields are zero.
    #[must_use]
    #[inline]
    pub const fn new(opcode: u8, nsid: u32) -> Self {
        let [nsid0, nsid1, nsid2, nsid3] = nsid.to_le_bytes();
        let mut bytes = [0; 64];
        let first_two_dwords = bytes.first_chunk_mut::<8>().expect("64 bytes are more than 8");
        *first_two_dwords = [opcode, 0, 0, 0, nsid0, nsid1, nsid2, nsid3];
        Self(bytes)
    }

    /// A command of which only the opcode is set.
    #[must_use]
    #[inline]
    pub const fn zeroed(opcode: u8) -> Self {
        Self::new(opcode, 0)
    }

    /// Write `blocks` (1 to 65536) logical blocks at `lba`.
    #[must_use]
    #[inline]
    pub fn write(nsid: u32, lba: u64, blocks: u32) -> Self {
        Self::blocks_command(opcode::WRITE, nsid, lba, blocks)
    }

    /// Read `blocks` (1 to 65536) logical blocks at `lba`.
    #[must_use]
    #[inline]
    pub fn read(nsid: u32, lba: u64, blocks: u32) -> Self {
        Self::blocks_command(opcode::READ, nsid, lba, blocks)
    }

    /// Flush: all writes that completed before become durable (NVM §3.2.1).
    #[must_use]
    #[inline]
    pub const fn flush(nsid: u32) -> Self {
        Self::new(opcode::FLUSH, nsid)
    }

    /// Write Zeroes; with `deallocate`, the drive may unmap the blocks if they then read as
    /// zeroes (CDW12 bit 25, DEAC).
    #[must_use]
    pub fn write_zeroes(nsid: u32, lba: u64, blocks: u32, deallocate: bool) -> Self {
        let mut sqe = Self::blocks_command(opcode::WRITE_ZEROES, nsid, lba, blocks);
        if deallocate {
            sqe.set_dword(12, sqe.dword(12) | CDW12_DEAC);
        }
        sqe
    }

    /// Dataset Management with the deallocate attribute (NVM §3.2.3); the data is `ranges` (1 to
    /// 256) times a [`DsmRange`].
    #[must_use]
    pub fn dsm_deallocate(nsid: u32, ranges: u32) -> Self {
        let mut sqe = Self::new(opcode::DATASET_MANAGEMENT, nsid);
        sqe.set_dword(10, ranges.wrapping_sub(1) & 0xff);
        sqe.set_dword(11, CDW11_DSM_DEALLOCATE);
        sqe
    }

    /// Identify the structure `cns` (Base Figure 273; constants in [`crate::identify::cns`]) of
    /// namespace `nsid`.
    #[must_use]
    pub fn identify(cns: u8, nsid: u32) -> Self {
        let mut sqe = Self::new(admin::IDENTIFY, nsid);
        sqe.set_dword(10, u32::from(cns));
        sqe
    }

    /// Get feature `fid`: its current value, in the completion's result.
    #[must_use]
    pub fn get_features(fid: u8) -> Self {
        let mut sqe = Self::new(admin::GET_FEATURES, 0);
        sqe.set_dword(10, u32::from(fid));
        sqe
    }

    /// Set feature `fid` to `value` (CDW11).
    #[must_use]
    pub fn set_features(fid: u8, value: u32) -> Self {
        let mut sqe = Self::new(admin::SET_FEATURES, 0);
        sqe.set_dword(10, u32::from(fid));
        sqe.set_dword(11, value);
        sqe
    }

    /// Get `len` bytes (a multiple of 4, at least 4) at byte `offset` (a multiple of 4) of log
    /// page `lid`.
    #[must_use]
    pub fn get_log_page(lid: u8, nsid: u32, offset: u64, len: u32) -> Self {
        let mut sqe = Self::new(admin::GET_LOG_PAGE, nsid);
        let dwords = (len / 4).wrapping_sub(1);
        sqe.set_dword(10, u32::from(lid) | dwords << 16);
        sqe.set_dword(11, dwords >> 16);
        put_u64(&mut sqe.0, 48, offset);
        sqe
    }

    /// Keep Alive.
    #[must_use]
    pub const fn keep_alive() -> Self {
        Self::new(admin::KEEP_ALIVE, 0)
    }

    /// Asynchronous Event Request.
    #[must_use]
    pub const fn async_event() -> Self {
        Self::new(admin::ASYNC_EVENT, 0)
    }

    /// Abort command `cid` of submission queue `sqid`.
    #[must_use]
    pub fn abort(sqid: u16, cid: u16) -> Self {
        let mut sqe = Self::new(admin::ABORT, 0);
        sqe.set_dword(10, u32::from(sqid) | u32::from(cid) << 16);
        sqe
    }

    #[inline]
    fn blocks_command(opcode: u8, nsid: u32, lba: u64, blocks: u32) -> Self {
        debug_assert!((1..=65536).contains(&blocks));
        let mut sqe = Self::new(opcode, nsid);
        put_u64(&mut sqe.0, 40, lba);
        put_u64(&mut sqe.0, 48, u64::from(blocks.wrapping_sub(1) & 0xffff));
        sqe
    }

    /// Bits 7:0 of dword 0.
    #[must_use]
    #[inline]
    pub const fn opcode(&self) -> u8 {
        self.0[0]
    }

    /// Fused operation, bits 9:8 of dword 0: 0 for a normal command.
    #[must_use]
    #[inline]
    pub const fn fuse(&self) -> u8 {
        self.0[1] & 3
    }

    /// The command's part in a fused operation (FUSE).
    #[must_use]
    pub const fn fused(&self) -> Fuse {
        match self.fuse() {
            0 => Fuse::None,
            1 => Fuse::First,
            2 => Fuse::Second,
            _ => Fuse::Reserved,
        }
    }

    /// Whether the command is the second half of a fused operation.
    #[must_use]
    #[inline]
    pub const fn is_second_half(&self) -> bool {
        self.fuse() == 2
    }

    /// Command identifier, bits 31:16 of dword 0.
    #[must_use]
    #[inline]
    pub const fn cid(&self) -> u16 {
        u16::from_le_bytes([self.0[2], self.0[3]])
    }

    /// Sets the command identifier.
    #[inline]
    pub fn set_cid(&mut self, cid: u16) {
        put_u16(&mut self.0, 2, cid);
    }

    /// Namespace identifier, dword 1.
    #[must_use]
    #[inline]
    pub fn nsid(&self) -> u32 {
        u32_at(&self.0, 4)
    }

    /// Dword `i` (0 to 15).
    ///
    /// # Panics
    /// If `i` is above 15.
    #[must_use]
    #[inline]
    pub fn dword(&self, i: usize) -> u32 {
        u32_at(&self.0, i * 4)
    }

    /// Sets dword `i` (0 to 15).
    ///
    /// # Panics
    /// If `i` is above 15.
    #[inline]
    pub fn set_dword(&mut self, i: usize, value: u32) {
        put_u32(&mut self.0, i * 4, value);
    }

    /// Sets dwords `i` and `i + 1` with one store.
    ///
    /// # Panics
    /// If `i` is above 14.
    #[inline]
    pub fn set_dwords(&mut self, i: usize, first: u32, second: u32) {
        put_u64(&mut self.0, i * 4, u64::from(first) | u64::from(second) << 32);
    }

    /// Starting LBA of a block command: dwords 10 and 11.
    #[must_use]
    #[inline]
    pub fn slba(&self) -> u64 {
        u64_at(&self.0, 40)
    }

    /// Number of logical blocks of a block command, 1 to 65536. Dword 12 bits 15:0 hold one less.
    #[must_use]
    #[inline]
    pub fn nlb(&self) -> u32 {
        u32::from(u16_at(&self.0, 48)) + 1
    }

    /// Sets the first block of a block command, and the number of its blocks, 1 to 65536.
    pub fn set_blocks(&mut self, lba: u64, blocks: u32) {
        debug_assert!((1..=65536).contains(&blocks));
        put_u64(&mut self.0, 40, lba);
        put_u16(&mut self.0, 48, blocks.wrapping_sub(1) as u16);
    }

    /// Force unit access, dword 12 bit 30: the blocks are durable on completion.
    #[must_use]
    #[inline]
    pub fn fua(&self) -> bool {
        self.dword(12) & CDW12_FUA != 0
    }

    /// Sets or clears force unit access.
    pub fn set_fua(&mut self, on: bool) {
        let others = self.dword(12) & !CDW12_FUA;
        self.set_dword(12, if on { others | CDW12_FUA } else { others });
    }

    /// DEAC of Write Zeroes, dword 12 bit 25.
    #[must_use]
    pub fn deac(&self) -> bool {
        self.dword(12) & CDW12_DEAC != 0
    }

    /// Protection information field (PRINFO), dword 12 bits 29:26.
    #[must_use]
    #[inline]
    pub fn prinfo(&self) -> u8 {
        (self.dword(12) >> 26) as u8 & 0xf
    }

    /// Number of ranges of Dataset Management, 1 to 256 (dword 10 bits 7:0 hold one less).
    #[must_use]
    pub fn dsm_ranges(&self) -> u32 {
        (self.dword(10) & 0xff) + 1
    }

    /// Whether Dataset Management asks to deallocate (AD, dword 11 bit 2).
    #[must_use]
    pub fn dsm_deallocates(&self) -> bool {
        self.dword(11) & CDW11_DSM_DEALLOCATE != 0
    }

    /// Number of source ranges of Copy, 1 to 256 (dword 12 bits 7:0 hold one less).
    #[must_use]
    pub fn copy_ranges(&self) -> u32 {
        (self.dword(12) & 0xff) + 1
    }

    /// Format of the source ranges of Copy, dword 12 bits 11:8.
    #[must_use]
    pub fn copy_format(&self) -> u8 {
        (self.dword(12) >> 8) as u8 & 0xf
    }

    /// CNS of Identify, dword 10 bits 7:0.
    #[must_use]
    pub fn cns(&self) -> u8 {
        self.0[40]
    }

    /// Controller identifier of Identify, dword 10 bits 31:16.
    #[must_use]
    pub fn identify_cntid(&self) -> u16 {
        u16_at(&self.0, 42)
    }

    /// Command set identifier of Identify, dword 11 bits 31:24.
    #[must_use]
    pub fn identify_csi(&self) -> u8 {
        self.0[47]
    }

    /// Feature identifier of Get and Set Features, dword 10 bits 7:0.
    #[must_use]
    pub fn fid(&self) -> u8 {
        self.0[40]
    }

    /// Select of Get Features (dword 10 bits 10:8): 0 current, 1 default, 2 saved, 3 supported
    /// capabilities.
    #[must_use]
    pub fn feature_select(&self) -> u8 {
        self.0[41] & 7
    }

    /// Save of Set Features (dword 10 bit 31).
    #[must_use]
    pub fn feature_save(&self) -> bool {
        self.0[43] & 0x80 != 0
    }

    /// Log page identifier of Get Log Page, dword 10 bits 7:0.
    #[must_use]
    pub fn lid(&self) -> u8 {
        self.0[40]
    }

    /// Retain asynchronous event, Get Log Page dword 10 bit 15.
    #[must_use]
    pub fn log_retain(&self) -> bool {
        self.0[41] & 0x80 != 0
    }

    /// Return Groups Only (RGO) of the log page Asymmetric Namespace Access: bit 0 of the Log Specific
    /// Parameter, dword 10 bit 8.
    #[must_use]
    pub fn log_groups_only(&self) -> bool {
        self.0[41] & 1 != 0
    }

    /// Bytes asked for by Get Log Page, at least 4, a multiple of 4.
    #[must_use]
    pub fn log_len(&self) -> u64 {
        let low = u64::from(u16_at(&self.0, 42));
        let high = u64::from(u16_at(&self.0, 44));
        (low | high << 16).wrapping_add(1) * 4
    }

    /// Byte offset of Get Log Page, dwords 12 and 13.
    #[must_use]
    pub fn log_offset(&self) -> u64 {
        u64_at(&self.0, 48)
    }

    /// The command that an Abort names (dword 10).
    #[must_use]
    pub fn abort_target(&self) -> AbortTarget {
        AbortTarget { sqid: u16_at(&self.0, 40), cid: u16_at(&self.0, 42) }
    }

    /// Type of a Fabrics command (byte 4; constants in [`crate::fabrics::fctype`]).
    #[must_use]
    pub const fn fctype(&self) -> u8 {
        self.0[4]
    }

    /// The data pointer. It has a meaning only in commands that have data: in others its bytes may
    /// be anything.
    ///
    /// # Errors
    /// The descriptor is of a type that is not used over TCP; see [`SglError::status`].
    #[inline]
    pub fn sgl(&self) -> Result<Sgl, SglError> {
        let len = u32_at(&self.0, 32);
        match self.0[39] {
            SGL_IN_CAPSULE => Ok(Sgl::InCapsule { offset: u64_at(&self.0, 24), len }),
            SGL_TRANSPORT => Ok(Sgl::Transport { len }),
            other => Err(SglError(other)),
        }
    }

    /// Sets the data pointer and marks it as an SGL (PSDT 01b).
    #[inline]
    pub fn set_sgl(&mut self, sgl: Sgl) {
        self.0[1] = self.0[1] & 0x3f | PSDT_SGL;
        let (address, len, kind) = match sgl {
            Sgl::InCapsule { offset, len } => (offset, len, SGL_IN_CAPSULE),
            Sgl::Transport { len } => (0, len, SGL_TRANSPORT),
        };
        put_u64(&mut self.0, 24, address);
        put_u64(&mut self.0, 32, u64::from(len) | u64::from(kind) << 56);
    }
}

impl fmt::Debug for Sqe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sqe({:02x}h cid {} nsid {}", self.opcode(), self.cid(), self.nsid())?;
        for i in 10..16 {
            write!(f, " {:08x}", self.dword(i))?;
        }
        f.write_str(")")
    }
}

/// The part of a command in a fused operation (Base Figure 87, FUSE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fuse {
    /// 00b: a normal command.
    None,
    /// 01b: the first command.
    First,
    /// 10b: the second command.
    Second,
    /// 11b.
    Reserved,
}

/// The command that an Abort names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbortTarget {
    /// Submission queue identifier.
    pub sqid: u16,
    /// Command identifier.
    pub cid: u16,
}

/// A completion queue entry: 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Cqe(pub [u8; 16]);

impl Cqe {
    /// The completion of command `cid` of submission queue `sqid`, whose head is now `sqhd`.
    #[must_use]
    #[inline]
    pub fn new(cid: u16, sqhd: u16, sqid: u16, status: Status, result: u64) -> Self {
        // Two wide stores. A wide load right after several small stores to the same bytes would
        // stall the processor.
        let ids = u64::from(sqhd) | u64::from(sqid) << 16 | u64::from(cid) << 32;
        let mut bytes = [0; 16];
        put_u64(&mut bytes, 0, result);
        put_u64(&mut bytes, 8, ids | u64::from(status.0 << 1) << 48);
        Self(bytes)
    }

    /// Dwords 0 and 1: the command's result.
    #[must_use]
    #[inline]
    pub fn result(&self) -> u64 {
        u64_at(&self.0, 0)
    }

    /// Submission queue head.
    #[must_use]
    #[inline]
    pub fn sqhd(&self) -> u16 {
        u16_at(&self.0, 8)
    }

    /// Submission queue identifier.
    #[must_use]
    #[inline]
    pub fn sqid(&self) -> u16 {
        u16_at(&self.0, 10)
    }

    /// Command identifier.
    #[must_use]
    #[inline]
    pub fn cid(&self) -> u16 {
        u16_at(&self.0, 12)
    }

    /// Status, without the phase tag (which is reserved over fabrics).
    #[must_use]
    #[inline]
    pub fn status(&self) -> Status {
        Status(u16_at(&self.0, 14) >> 1)
    }
}

impl fmt::Debug for Cqe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cqe")
            .field("cid", &self.cid())
            .field("status", &self.status())
            .field("result", &self.result())
            .finish_non_exhaustive()
    }
}

/// One range of Dataset Management: 16 bytes (NVM §3.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DsmRange {
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u32,
}

impl DsmRange {
    /// Length of an encoded range in bytes.
    pub const LEN: usize = 16;

    /// The range as bytes, context attributes zero.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        put_u32(&mut bytes, 4, self.blocks);
        put_u64(&mut bytes, 8, self.lba);
        bytes
    }

    /// The range that `bytes` encodes.
    #[must_use]
    pub fn decode(bytes: &[u8; Self::LEN]) -> Self {
        Self { blocks: u32_at(bytes, 4), lba: u64_at(bytes, 8) }
    }
}

#[cfg(test)]
mod tests;
