//! Identify data structures (Base §5.17; NVM §4.1.5). All are 4096 bytes.
//!
//! The documentation of each field begins with its byte offset in the structure. The encoder and
//! the decoder of the structure use these offsets.

use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

use crate::bytes::{
    ShortData, array, put, put_text, put_u16, put_u32, put_u64, text_at, u16_at, u32_at, u64_at,
    whole,
};
use crate::fabrics::NQN_MAX;

/// Length of every identify structure in bytes.
pub const LEN: usize = 4096;
/// The vendor specific area of Identify Controller, in bytes; it holds the controller's part of the
/// Rio extension.
pub const CONTROLLER_VENDOR: Range<usize> = 3072..4096;
/// The vendor specific area of Identify Namespace.
pub const NAMESPACE_VENDOR: Range<usize> = 384..4096;

/// Values of CNS, which selects the structure (Base Figure 273).
pub mod cns {
    /// Identify Namespace of the NVM command set.
    pub const NAMESPACE: u8 = 0x00;
    /// Identify Controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active namespaces above the NSID of the command.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// The identifiers of a namespace.
    pub const NAMESPACE_DESCRIPTORS: u8 = 0x03;
    /// The part of Identify Namespace that is specific to a command set.
    pub const COMMAND_SET_NAMESPACE: u8 = 0x05;
    /// The part of Identify Controller that is specific to a command set.
    pub const COMMAND_SET_CONTROLLER: u8 = 0x06;
    /// Active namespaces that use a command set.
    pub const COMMAND_SET_ACTIVE_NAMESPACES: u8 = 0x07;
    /// The part of Identify Namespace that is common to all command sets.
    pub const COMMON_NAMESPACE: u8 = 0x08;
    /// Allocated namespaces above the NSID of the command.
    pub const ALLOCATED_NAMESPACES: u8 = 0x10;
    /// Identify Namespace of an allocated namespace, attached or not.
    pub const ALLOCATED_NAMESPACE: u8 = 0x11;
    /// Controllers to which a namespace is attached.
    pub const NAMESPACE_CONTROLLERS: u8 = 0x12;
    /// Controllers of the subsystem.
    pub const CONTROLLERS: u8 = 0x13;
    /// Combinations of command sets that a controller supports.
    pub const COMMAND_SETS: u8 = 0x1c;
}

/// Command set identifier of the NVM command set.
pub const CSI_NVM: u8 = 0;
/// NSID that addresses all namespaces.
pub const NSID_ALL: u32 = 0xffff_ffff;

/// CNTRLTYPE: an I/O controller.
pub const CNTRLTYPE_IO: u8 = 1;
/// CNTRLTYPE: a discovery controller.
pub const CNTRLTYPE_DISCOVERY: u8 = 2;
/// ONCS bit: Compare.
pub const ONCS_COMPARE: u16 = 1 << 0;
/// FUSES bit: the fused operation Compare and Write.
pub const FUSES_COMPARE_AND_WRITE: u16 = 1 << 0;
/// ONCS bit: Dataset Management.
pub const ONCS_DSM: u16 = 1 << 2;
/// ONCS bit: Write Zeroes.
pub const ONCS_WRITE_ZEROES: u16 = 1 << 3;
/// ONCS bit: the Save field of Set Features and Select of Get Features.
pub const ONCS_SAVE_SELECT: u16 = 1 << 4;
/// ONCS bit: reservations.
pub const ONCS_RESERVATIONS: u16 = 1 << 5;
/// ONCS bit: Verify.
pub const ONCS_VERIFY: u16 = 1 << 7;
/// ONCS bit: Copy.
pub const ONCS_COPY: u16 = 1 << 8;
/// OCFS bit: Copy with source ranges of format 0.
pub const OCFS_FORMAT_0: u16 = 1 << 0;
/// CTRATT bit: 128-bit host identifiers.
pub const CTRATT_HOSTID_128: u32 = 1 << 0;
/// CTRATT bit: any command counts as a keep alive (traffic based keep alive).
pub const CTRATT_TBKAS: u32 = 1 << 6;
/// LPA bit: the SMART log page takes the id of a namespace.
pub const LPA_SMART_OF_NAMESPACE: u8 = 1 << 0;
/// LPA bit: the Commands Supported and Effects log page.
pub const LPA_EFFECTS: u8 = 1 << 1;
/// LPA bit: Get Log Page supports offsets, and lengths beyond 12 bits of dwords.
pub const LPA_EXTENDED: u8 = 1 << 2;
/// VWC bit: the controller has a volatile write cache.
pub const VWC_PRESENT: u8 = 1 << 0;
/// VWC bits 2:1, 11b: FLUSH supports NSID FFFFFFFFh.
pub const VWC_FLUSH_ALL: u8 = 3 << 1;
/// VWC bits 2:1, 10b: FLUSH does not support NSID FFFFFFFFh.
pub const VWC_FLUSH_ONE: u8 = 2 << 1;
/// SGLS: SGLs are supported, without alignment needs, with offsets for in-capsule data.
pub const SGLS_TCP: u32 = 1 << 0 | 1 << 20;
/// OFCS bit: Disconnect.
pub const OFCS_DISCONNECT: u16 = 1 << 0;

/// Identify Controller (Base Figure 275): the fields that Rio sets or reads. All others are zero.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Controller {
    /// Byte 0: PCI vendor.
    pub vid: u16,
    /// Byte 2: PCI subsystem vendor.
    pub ssvid: u16,
    /// Byte 4, 20 bytes: serial number.
    pub serial: String,
    /// Byte 24, 40 bytes: model.
    pub model: String,
    /// Byte 64, 8 bytes: firmware revision.
    pub firmware: String,
    /// Byte 72: recommended arbitration burst, as a power of two.
    pub rab: u8,
    /// Byte 73: IEEE OUI, low byte first.
    pub ieee: [u8; 3],
    /// Byte 76: bit 1 is set if the subsystem has several controllers.
    pub cmic: u8,
    /// Byte 77: the largest data of a command is 2^this memory pages (CAP.MPSMIN); 0: no limit.
    pub mdts: u8,
    /// Byte 78: controller identifier.
    pub cntlid: u16,
    /// Byte 80: version, as in the VS property.
    pub version: u32,
    /// Byte 92: asynchronous events that can be enabled.
    pub oaes: u32,
    /// Byte 96: attributes.
    pub ctratt: u32,
    /// Byte 111: kind of controller.
    pub cntrltype: u8,
    /// Byte 256: optional admin commands.
    pub oacs: u16,
    /// Byte 258: Abort commands that may run at once, less one.
    pub acl: u8,
    /// Byte 259: Asynchronous Event Requests that may be open, less one.
    pub aerl: u8,
    /// Byte 260: firmware slots.
    pub frmw: u8,
    /// Byte 261: log page attributes.
    pub lpa: u8,
    /// Byte 262: error log entries, less one.
    pub elpe: u8,
    /// Byte 320: granularity of the keep alive timer in 100 ms; 0: no keep alive.
    pub kas: u16,
    /// Byte 342: longest time of a change of the ANA state, in seconds.
    pub anatt: u8,
    /// Byte 343: abilities of asymmetric namespace access ([`crate::ana`]).
    pub anacap: u8,
    /// Byte 344: largest ANA group identifier.
    pub anagrpmax: u32,
    /// Byte 348: most ANA groups.
    pub nanagrpid: u32,
    /// Byte 512: size of submission queue entries, required (3:0) and largest (7:4), as powers of
    /// two: 66h.
    pub sqes: u8,
    /// Byte 513: size of completion queue entries: 44h.
    pub cqes: u8,
    /// Byte 514: most commands outstanding per queue.
    pub maxcmd: u16,
    /// Byte 516: largest namespace identifier.
    pub nn: u32,
    /// Byte 520: optional NVM commands.
    pub oncs: u16,
    /// Byte 522: fused operations; [`FUSES_COMPARE_AND_WRITE`].
    pub fuses: u16,
    /// Byte 524: format attributes.
    pub fna: u8,
    /// Byte 525: volatile write cache.
    pub vwc: u8,
    /// Byte 526: blocks written atomically in normal operation, less one.
    pub awun: u16,
    /// Byte 528: blocks written atomically across a power failure, less one.
    pub awupf: u16,
    /// Byte 532: blocks of the largest Compare and Write, less one.
    pub acwu: u16,
    /// Byte 534: formats of the source ranges of Copy; [`OCFS_FORMAT_0`].
    pub ocfs: u16,
    /// Byte 536: SGL support.
    pub sgls: u32,
    /// Byte 540: most namespaces.
    pub mnan: u32,
    /// Byte 768, 256 bytes: the subsystem's NQN.
    pub subnqn: String,
    /// Byte 1792: I/O queue command capsule size in 16 bytes, at least 4.
    pub ioccsz: u32,
    /// Byte 1796: I/O queue response capsule size in 16 bytes, at least 1.
    pub iorcsz: u32,
    /// Byte 1800: offset of in-capsule data in 16 bytes; 0 over TCP.
    pub icdoff: u16,
    /// Byte 1802: bit 0 clear: controllers are dynamic.
    pub fcatt: u8,
    /// Byte 1803: most SGL data block descriptors per capsule.
    pub msdbd: u8,
    /// Byte 1804: optional Fabrics commands.
    pub ofcs: u16,
}

/// Unit of IOCCSZ and IORCSZ in bytes.
const CAPSULE_UNIT: u32 = 16;
/// Length of a submission queue entry in bytes. Each command capsule begins with one.
const SQE_LEN: u32 = 64;

impl Controller {
    /// The structure as it is sent: 4096 bytes. The table at 2048 has one power state (active); the
    /// vendor specific area is zero.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        put_u16(&mut bytes, 0, self.vid);
        put_u16(&mut bytes, 2, self.ssvid);
        put_text(&mut bytes, 4, 20, &self.serial, b' ');
        put_text(&mut bytes, 24, 40, &self.model, b' ');
        put_text(&mut bytes, 64, 8, &self.firmware, b' ');
        bytes[72] = self.rab;
        put(&mut bytes, 73, &self.ieee);
        bytes[76] = self.cmic;
        bytes[77] = self.mdts;
        put_u16(&mut bytes, 78, self.cntlid);
        put_u32(&mut bytes, 80, self.version);
        put_u32(&mut bytes, 92, self.oaes);
        put_u32(&mut bytes, 96, self.ctratt);
        bytes[111] = self.cntrltype;
        put_u16(&mut bytes, 256, self.oacs);
        bytes[258] = self.acl;
        bytes[259] = self.aerl;
        bytes[260] = self.frmw;
        bytes[261] = self.lpa;
        bytes[262] = self.elpe;
        put_u16(&mut bytes, 320, self.kas);
        bytes[342] = self.anatt;
        bytes[343] = self.anacap;
        put_u32(&mut bytes, 344, self.anagrpmax);
        put_u32(&mut bytes, 348, self.nanagrpid);
        bytes[512] = self.sqes;
        bytes[513] = self.cqes;
        put_u16(&mut bytes, 514, self.maxcmd);
        put_u32(&mut bytes, 516, self.nn);
        put_u16(&mut bytes, 520, self.oncs);
        put_u16(&mut bytes, 522, self.fuses);
        bytes[524] = self.fna;
        bytes[525] = self.vwc;
        put_u16(&mut bytes, 526, self.awun);
        put_u16(&mut bytes, 528, self.awupf);
        put_u16(&mut bytes, 532, self.acwu);
        put_u16(&mut bytes, 534, self.ocfs);
        put_u32(&mut bytes, 536, self.sgls);
        put_u32(&mut bytes, 540, self.mnan);
        put_text(&mut bytes, 768, NQN_MAX, &self.subnqn, 0);
        put_u32(&mut bytes, 1792, self.ioccsz);
        put_u32(&mut bytes, 1796, self.iorcsz);
        put_u16(&mut bytes, 1800, self.icdoff);
        bytes[1802] = self.fcatt;
        bytes[1803] = self.msdbd;
        put_u16(&mut bytes, 1804, self.ofcs);
        bytes
    }

    /// Reads the structure.
    ///
    /// # Errors
    /// [`ShortData`], if `data` has fewer than 4096 bytes.
    pub fn decode(data: &[u8]) -> Result<Self, ShortData> {
        let bytes = whole::<LEN>(data, "identify controller")?;
        Ok(Self {
            vid: u16_at(bytes, 0),
            ssvid: u16_at(bytes, 2),
            serial: text_at(bytes, 4, 20),
            model: text_at(bytes, 24, 40),
            firmware: text_at(bytes, 64, 8),
            rab: bytes[72],
            ieee: array(bytes, 73),
            cmic: bytes[76],
            mdts: bytes[77],
            cntlid: u16_at(bytes, 78),
            version: u32_at(bytes, 80),
            oaes: u32_at(bytes, 92),
            ctratt: u32_at(bytes, 96),
            cntrltype: bytes[111],
            oacs: u16_at(bytes, 256),
            acl: bytes[258],
            aerl: bytes[259],
            frmw: bytes[260],
            lpa: bytes[261],
            elpe: bytes[262],
            kas: u16_at(bytes, 320),
            anatt: bytes[342],
            anacap: bytes[343],
            anagrpmax: u32_at(bytes, 344),
            nanagrpid: u32_at(bytes, 348),
            sqes: bytes[512],
            cqes: bytes[513],
            maxcmd: u16_at(bytes, 514),
            nn: u32_at(bytes, 516),
            oncs: u16_at(bytes, 520),
            fuses: u16_at(bytes, 522),
            fna: bytes[524],
            vwc: bytes[525],
            awun: u16_at(bytes, 526),
            awupf: u16_at(bytes, 528),
            acwu: u16_at(bytes, 532),
            ocfs: u16_at(bytes, 534),
            sgls: u32_at(bytes, 536),
            mnan: u32_at(bytes, 540),
            subnqn: text_at(bytes, 768, 256),
            ioccsz: u32_at(bytes, 1792),
            iorcsz: u32_at(bytes, 1796),
            icdoff: u16_at(bytes, 1800),
            fcatt: bytes[1802],
            msdbd: bytes[1803],
            ofcs: u16_at(bytes, 1804),
        })
    }

    /// Largest in-capsule data of an I/O command, in bytes: the capsule less its queue entry.
    #[must_use]
    pub const fn in_capsule_bytes(&self) -> u32 {
        self.ioccsz.saturating_mul(CAPSULE_UNIT).saturating_sub(SQE_LEN)
    }

    /// Sets IOCCSZ for `bytes` of in-capsule data; `bytes` is a multiple of 16.
    pub const fn set_in_capsule_bytes(&mut self, bytes: u32) {
        self.ioccsz = (bytes + SQE_LEN) / CAPSULE_UNIT;
    }

    /// Largest data of one command in bytes, with memory pages of 2^(12 + `mpsmin`) bytes; `None`:
    /// no limit.
    #[must_use]
    pub const fn mdts_bytes(&self, mpsmin: u8) -> Option<u32> {
        if self.mdts == 0 {
            return None;
        }
        let exponent = self.mdts as u32 + 12 + mpsmin as u32;
        // Larger limits do not fit the result.
        Some(if exponent >= 31 { 1 << 31 } else { 1 << exponent })
    }
}

/// Identify Namespace of the NVM command set (NVM §4.1.5.1), with one format.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Namespace {
    /// Byte 0: size in blocks.
    pub nsze: u64,
    /// Byte 8: capacity in blocks: as many may be allocated.
    pub ncap: u64,
    /// Byte 16: allocated blocks.
    pub nuse: u64,
    /// Byte 24: features; [`NSFEAT_OPTPERF`] and others.
    pub nsfeat: u8,
    /// Byte 30: bit 0 is set if several controllers may be attached to the namespace.
    pub nmic: u8,
    /// Byte 31: reservations; [`RESCAP`](crate::reservation::RESCAP).
    pub rescap: u8,
    /// Byte 33: the content that deallocated blocks read as; [`DLFEAT_ZEROES`] and others.
    pub dlfeat: u8,
    /// Byte 34: blocks written atomically in normal operation, less one.
    pub nawun: u16,
    /// Byte 36: blocks written atomically across a power failure, less one.
    pub nawupf: u16,
    /// Byte 38: blocks of the largest Compare and Write, less one.
    pub nacwu: u16,
    /// Byte 40: no write within so many blocks, less one, is torn in normal operation; a longer one
    /// that crosses their boundary may be. 0: there is no such boundary.
    pub nabsn: u16,
    /// Byte 44: the same across a power failure.
    pub nabspf: u16,
    /// Byte 64: preferred write granularity in blocks, less one.
    pub npwg: u16,
    /// Byte 66: preferred write alignment in blocks, less one.
    pub npwa: u16,
    /// Byte 68: preferred deallocate granularity in blocks, less one.
    pub npdg: u16,
    /// Byte 70: preferred deallocate alignment in blocks, less one.
    pub npda: u16,
    /// Byte 74: blocks of the largest source range of a Copy.
    pub mssrl: u16,
    /// Byte 76: blocks of the largest Copy.
    pub mcl: u32,
    /// Byte 80: source ranges of a Copy at most, less one.
    pub msrc: u8,
    /// Byte 92: ANA group identifier; 0: none.
    pub anagrpid: u32,
    /// Byte 99: attributes; bit 0: write protected.
    pub nsattr: u8,
    /// Byte 104: globally unique identifier; zero: none.
    pub nguid: [u8; 16],
    /// Byte 120: extended unique identifier; zero: none.
    pub eui64: [u8; 8],
    /// LBADS of the format in use: a block has 2^this bytes.
    pub lbads: u8,
    /// MS of the format in use: bytes of metadata per block.
    pub metadata: u16,
}

/// NSFEAT bit: NAWUN and NAWUPF are valid.
pub const NSFEAT_ATOMICS: u8 = 1 << 1;
/// NSFEAT bit: reads of deallocated blocks may be reported as errors; not used.
pub const NSFEAT_DAE: u8 = 1 << 2;
/// NSFEAT bit: the preferred granularities are valid.
pub const NSFEAT_OPTPERF: u8 = 1 << 4;
/// DLFEAT bits 2:0, 001b: deallocated blocks read as zeroes.
pub const DLFEAT_ZEROES: u8 = 1;
/// DLFEAT bit: Write Zeroes may deallocate.
pub const DLFEAT_DEAC: u8 = 1 << 3;

/// Offset of the first LBA format in Identify Namespace.
const FORMATS_AT: usize = 128;
/// Length of an LBA format: metadata bytes per block (2 bytes), LBADS (1), relative performance
/// (1).
const FORMAT_LEN: usize = 4;

impl Namespace {
    /// The structure as it is sent: 4096 bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        put_u64(&mut bytes, 0, self.nsze);
        put_u64(&mut bytes, 8, self.ncap);
        put_u64(&mut bytes, 16, self.nuse);
        bytes[24] = self.nsfeat;
        // NLBAF (25) and FLBAS (26) zero: one format, number 0, in use.
        bytes[30] = self.nmic;
        bytes[31] = self.rescap;
        bytes[33] = self.dlfeat;
        put_u16(&mut bytes, 34, self.nawun);
        put_u16(&mut bytes, 36, self.nawupf);
        put_u16(&mut bytes, 38, self.nacwu);
        put_u16(&mut bytes, 40, self.nabsn);
        // NABO (42) is zero: the boundaries begin with block 0.
        put_u16(&mut bytes, 44, self.nabspf);
        put_u16(&mut bytes, 64, self.npwg);
        put_u16(&mut bytes, 66, self.npwa);
        put_u16(&mut bytes, 68, self.npdg);
        put_u16(&mut bytes, 70, self.npda);
        put_u16(&mut bytes, 74, self.mssrl);
        put_u32(&mut bytes, 76, self.mcl);
        bytes[80] = self.msrc;
        put_u32(&mut bytes, 92, self.anagrpid);
        bytes[99] = self.nsattr;
        put(&mut bytes, 104, &self.nguid);
        put(&mut bytes, 120, &self.eui64);
        put_u16(&mut bytes, FORMATS_AT, self.metadata);
        bytes[FORMATS_AT + 2] = self.lbads;
        bytes
    }

    /// Reads the structure, with the format in use.
    ///
    /// # Errors
    /// [`ShortData`], if `data` has fewer than 4096 bytes.
    pub fn decode(data: &[u8]) -> Result<Self, ShortData> {
        let bytes = whole::<LEN>(data, "identify namespace")?;
        // FLBAS, byte 26: the low bits of the format's number are bits 3:0, and since Base 2.0 the
        // high bits are bits 6:5. The number is at most 63, so the format is within the structure.
        let format = usize::from(bytes[26] & 0xf | (bytes[26] >> 5 & 3) << 4);
        let format_at = FORMATS_AT + FORMAT_LEN * format;
        Ok(Self {
            nsze: u64_at(bytes, 0),
            ncap: u64_at(bytes, 8),
            nuse: u64_at(bytes, 16),
            nsfeat: bytes[24],
            nmic: bytes[30],
            rescap: bytes[31],
            dlfeat: bytes[33],
            nawun: u16_at(bytes, 34),
            nawupf: u16_at(bytes, 36),
            nacwu: u16_at(bytes, 38),
            nabsn: u16_at(bytes, 40),
            nabspf: u16_at(bytes, 44),
            npwg: u16_at(bytes, 64),
            npwa: u16_at(bytes, 66),
            npdg: u16_at(bytes, 68),
            npda: u16_at(bytes, 70),
            anagrpid: u32_at(bytes, 92),
            nsattr: bytes[99],
            mssrl: u16_at(bytes, 74),
            mcl: u32_at(bytes, 76),
            msrc: bytes[80],
            nguid: array(bytes, 104),
            eui64: array(bytes, 120),
            metadata: u16_at(bytes, format_at),
            lbads: bytes[format_at + 2],
        })
    }

    /// Block size in bytes; `None` if the format gives less than 512 bytes or more than 2 GiB,
    /// which no real drive has.
    #[must_use]
    pub const fn block_size(&self) -> Option<u32> {
        match self.lbads {
            9..=31 => Some(1 << self.lbads),
            _ => None,
        }
    }
}

/// A list of namespaces (CNS 02h, 07h, 10h): those of `sorted` that are greater than `after`, at
/// most 1024.
#[must_use]
pub fn namespace_list(sorted: impl IntoIterator<Item = u32>, after: u32) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    let listed = sorted.into_iter().filter(|&nsid| nsid > after).take(LEN / 4);
    for (index, nsid) in listed.enumerate() {
        put_u32(&mut bytes, 4 * index, nsid);
    }
    bytes
}

/// The namespaces of a list. The list ends at the first element that is not above the one before
/// it: zero fills the rest of a list, and a hostile list need not ascend.
///
/// # Errors
/// [`ShortData`], if `data` has fewer than 4096 bytes.
pub fn namespaces_of(data: &[u8]) -> Result<Vec<u32>, ShortData> {
    let bytes = whole::<LEN>(data, "namespace list")?;
    let mut nsids = Vec::new();
    let mut last = 0;
    for nsid in (0..LEN / 4).map(|index| u32_at(bytes, 4 * index)) {
        if nsid <= last {
            break;
        }
        nsids.push(nsid);
        last = nsid;
    }
    Ok(nsids)
}

/// A list of controllers (CNS 12h, 13h): those of `sorted` from `first` on, at most 2047.
#[must_use]
pub fn controller_list(sorted: impl IntoIterator<Item = u16>, first: u16) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    let mut count = 0;
    for cntlid in sorted.into_iter().filter(|&cntlid| cntlid >= first).take(LEN / 2 - 1) {
        count += 1;
        put_u16(&mut bytes, 2 * count, cntlid);
    }
    put_u16(&mut bytes, 0, count as u16);
    bytes
}

/// Types of namespace identification descriptors (Base Figure 277).
mod descriptor {
    pub(super) const EUI64: u8 = 1;
    pub(super) const NGUID: u8 = 2;
    pub(super) const UUID: u8 = 3;
    pub(super) const CSI: u8 = 4;
}

/// Length of the header of a descriptor: type, length of the identifier, 2 reserved bytes.
const DESCRIPTOR_HEADER_LEN: usize = 4;

/// The identifiers of a namespace (CNS 03h, Base Figure 277).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Descriptors {
    /// Extended unique identifier (type 1).
    pub eui64: Option<[u8; 8]>,
    /// Globally unique identifier (type 2).
    pub nguid: Option<[u8; 16]>,
    /// UUID (type 3).
    pub uuid: Option<[u8; 16]>,
    /// Command set identifier (type 4).
    pub csi: Option<u8>,
}

impl Descriptors {
    /// The descriptors as they are sent: 4096 bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        let mut end = 0;
        let mut append = |kind: u8, id: &[u8]| {
            put(&mut bytes, end, &[kind, id.len() as u8]);
            put(&mut bytes, end + DESCRIPTOR_HEADER_LEN, id);
            end += DESCRIPTOR_HEADER_LEN + id.len();
        };
        if let Some(id) = &self.eui64 {
            append(descriptor::EUI64, id);
        }
        if let Some(id) = &self.nguid {
            append(descriptor::NGUID, id);
        }
        if let Some(id) = &self.uuid {
            append(descriptor::UUID, id);
        }
        if let Some(csi) = self.csi {
            append(descriptor::CSI, &[csi]);
        }
        bytes
    }

    /// Reads the descriptors. Descriptors of unknown type are skipped. The list ends at a length
    /// that is zero or that goes beyond the structure.
    ///
    /// # Errors
    /// [`ShortData`], if `data` has fewer than 4096 bytes.
    pub fn decode(data: &[u8]) -> Result<Self, ShortData> {
        let mut rest = &whole::<LEN>(data, "namespace identification descriptors")?[..];
        let mut found = Self::default();
        while let Some((&[kind, len, _, _], tail)) =
            rest.split_first_chunk::<DESCRIPTOR_HEADER_LEN>()
        {
            let len = usize::from(len);
            if len == 0 || len > tail.len() {
                break;
            }
            let (id, tail) = tail.split_at(len);
            match (kind, len) {
                (descriptor::EUI64, 8) => found.eui64 = Some(array(id, 0)),
                (descriptor::NGUID, 16) => found.nguid = Some(array(id, 0)),
                (descriptor::UUID, 16) => found.uuid = Some(array(id, 0)),
                (descriptor::CSI, 1) => found.csi = Some(id[0]),
                _ => {}
            }
            rest = tail;
        }
        Ok(found)
    }
}

/// Identify Controller of the NVM command set (CNS 06h, CSI 0; NVM §4.1.5.4): the limits that MDTS
/// does not give.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct NvmController {
    /// Byte 0: the largest Verify covers 2^this memory pages; 0: no limit.
    pub vsl: u8,
    /// Byte 1: the largest Write Zeroes covers 2^this memory pages; 0: no limit.
    pub wzsl: u8,
    /// Byte 3: largest number of ranges of a Dataset Management; 0: no limit.
    pub dmrl: u8,
    /// Byte 4: largest number of blocks of one range; 0: no limit.
    pub dmrsl: u32,
    /// Byte 8: largest number of blocks of all ranges; 0: no limit.
    pub dmsl: u64,
}

impl NvmController {
    /// The structure as it is sent: 4096 bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[0] = self.vsl;
        bytes[1] = self.wzsl;
        bytes[3] = self.dmrl;
        put_u32(&mut bytes, 4, self.dmrsl);
        put_u64(&mut bytes, 8, self.dmsl);
        bytes
    }

    /// Reads the structure.
    ///
    /// # Errors
    /// [`ShortData`], if `data` has fewer than 4096 bytes.
    pub fn decode(data: &[u8]) -> Result<Self, ShortData> {
        let bytes = whole::<LEN>(data, "identify controller of the NVM command set")?;
        Ok(Self {
            vsl: bytes[0],
            wzsl: bytes[1],
            dmrl: bytes[3],
            dmrsl: u32_at(bytes, 4),
            dmsl: u64_at(bytes, 8),
        })
    }
}

/// Identify Namespace of the NVM command set (CNS 05h, CSI 0; NVM §4.1.5.3): no storage tags, no
/// protection information.
#[must_use]
pub const fn nvm_namespace() -> [u8; LEN] {
    [0; LEN]
}

/// NSTAT: the namespace is ready.
const NSTAT_READY: u8 = 1;

/// Identify Namespace, common to all command sets (CNS 08h, Base §5.17.2.8).
#[must_use]
pub fn common_namespace(nsfeat: u8, nmic: u8, rescap: u8, anagrpid: u32, nsattr: u8) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    bytes[0] = nsfeat;
    bytes[1] = nmic;
    bytes[2] = rescap;
    put_u32(&mut bytes, 4, anagrpid);
    bytes[8] = nsattr;
    bytes[14] = NSTAT_READY;
    bytes
}

/// Identify I/O Command Set (CNS 1Ch, Base §5.17.2.21): one combination, of the NVM command set
/// alone.
#[must_use]
pub const fn command_sets() -> [u8; LEN] {
    let mut bytes = [0; LEN];
    bytes[0] = 1 << CSI_NVM;
    bytes
}

#[cfg(test)]
mod tests;
