//! Identify data structures (Base §5.17; NVM §4.1.5). All are 4096 bytes.

use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

use crate::bytes::{
    ShortData, array, put, put_text, put16, put32, put64, text_at, u16_at, u32_at, u64_at, whole,
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
/// ONCS bit: Dataset Management.
pub const ONCS_DSM: u16 = 1 << 2;
/// ONCS bit: Write Zeroes.
pub const ONCS_WRITE_ZEROES: u16 = 1 << 3;
/// ONCS bit: the Save field of Set Features and Select of Get Features.
pub const ONCS_SAVE_SELECT: u16 = 1 << 4;
/// CTRATT bit: 128-bit host identifiers.
pub const CTRATT_HOSTID_128: u32 = 1 << 0;
/// CTRATT bit: any command counts as a keep alive (traffic based keep alive).
pub const CTRATT_TBKAS: u32 = 1 << 6;
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
    /// Byte 524: format attributes.
    pub fna: u8,
    /// Byte 525: volatile write cache.
    pub vwc: u8,
    /// Byte 526: blocks written atomically in normal operation, less one.
    pub awun: u16,
    /// Byte 528: blocks written atomically across a power failure, less one.
    pub awupf: u16,
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

impl Controller {
    /// The structure as it is sent: 4096 bytes. The table at 2048 has one power state (active); the
    /// vendor specific area is zero.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        let mut b = [0; LEN];
        put16(&mut b, 0, self.vid);
        put16(&mut b, 2, self.ssvid);
        put_text(&mut b, 4, 20, &self.serial, b' ');
        put_text(&mut b, 24, 40, &self.model, b' ');
        put_text(&mut b, 64, 8, &self.firmware, b' ');
        b[72] = self.rab;
        put(&mut b, 73, &self.ieee);
        b[76] = self.cmic;
        b[77] = self.mdts;
        put16(&mut b, 78, self.cntlid);
        put32(&mut b, 80, self.version);
        put32(&mut b, 92, self.oaes);
        put32(&mut b, 96, self.ctratt);
        b[111] = self.cntrltype;
        put16(&mut b, 256, self.oacs);
        b[258] = self.acl;
        b[259] = self.aerl;
        b[260] = self.frmw;
        b[261] = self.lpa;
        b[262] = self.elpe;
        put16(&mut b, 320, self.kas);
        b[512] = self.sqes;
        b[513] = self.cqes;
        put16(&mut b, 514, self.maxcmd);
        put32(&mut b, 516, self.nn);
        put16(&mut b, 520, self.oncs);
        b[524] = self.fna;
        b[525] = self.vwc;
        put16(&mut b, 526, self.awun);
        put16(&mut b, 528, self.awupf);
        put32(&mut b, 536, self.sgls);
        put32(&mut b, 540, self.mnan);
        put_text(&mut b, 768, NQN_MAX, &self.subnqn, 0);
        put32(&mut b, 1792, self.ioccsz);
        put32(&mut b, 1796, self.iorcsz);
        put16(&mut b, 1800, self.icdoff);
        b[1802] = self.fcatt;
        b[1803] = self.msdbd;
        put16(&mut b, 1804, self.ofcs);
        b
    }

    /// Reads the structure.
    ///
    /// # Errors
    /// [`ShortData`], if `data` has fewer than 4096 bytes.
    pub fn decode(data: &[u8]) -> Result<Self, ShortData> {
        let b = whole::<LEN>(data, "identify controller")?;
        Ok(Self {
            vid: u16_at(b, 0),
            ssvid: u16_at(b, 2),
            serial: text_at(b, 4, 20),
            model: text_at(b, 24, 40),
            firmware: text_at(b, 64, 8),
            rab: b[72],
            ieee: array(b, 73),
            cmic: b[76],
            mdts: b[77],
            cntlid: u16_at(b, 78),
            version: u32_at(b, 80),
            oaes: u32_at(b, 92),
            ctratt: u32_at(b, 96),
            cntrltype: b[111],
            oacs: u16_at(b, 256),
            acl: b[258],
            aerl: b[259],
            frmw: b[260],
            lpa: b[261],
            elpe: b[262],
            kas: u16_at(b, 320),
            sqes: b[512],
            cqes: b[513],
            maxcmd: u16_at(b, 514),
            nn: u32_at(b, 516),
            oncs: u16_at(b, 520),
            fna: b[524],
            vwc: b[525],
            awun: u16_at(b, 526),
            awupf: u16_at(b, 528),
            sgls: u32_at(b, 536),
            mnan: u32_at(b, 540),
            subnqn: text_at(b, 768, 256),
            ioccsz: u32_at(b, 1792),
            iorcsz: u32_at(b, 1796),
            icdoff: u16_at(b, 1800),
            fcatt: b[1802],
            msdbd: b[1803],
            ofcs: u16_at(b, 1804),
        })
    }

    /// Largest in-capsule data of an I/O command, in bytes: the capsule less its queue entry.
    #[must_use]
    pub const fn in_capsule_bytes(&self) -> u32 {
        self.ioccsz.saturating_mul(16).saturating_sub(64)
    }

    /// Sets IOCCSZ for `bytes` of in-capsule data; `bytes` is a multiple of 16.
    pub const fn set_in_capsule_bytes(&mut self, bytes: u32) {
        self.ioccsz = (bytes + 64) / 16;
    }

    /// Largest data of one command in bytes, with memory pages of 2^(12 + `mpsmin`) bytes; `None`:
    /// no limit.
    #[must_use]
    pub const fn mdts_bytes(&self, mpsmin: u8) -> Option<u32> {
        if self.mdts == 0 {
            return None;
        }
        let shift = self.mdts as u32 + 12 + mpsmin as u32;
        Some(if shift >= 31 { 1 << 31 } else { 1 << shift })
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
    /// Byte 33: the content that deallocated blocks read as; [`DLFEAT_ZEROES`] and others.
    pub dlfeat: u8,
    /// Byte 34: blocks written atomically in normal operation, less one.
    pub nawun: u16,
    /// Byte 36: blocks written atomically across a power failure, less one.
    pub nawupf: u16,
    /// Byte 64: preferred write granularity in blocks, less one.
    pub npwg: u16,
    /// Byte 66: preferred write alignment in blocks, less one.
    pub npwa: u16,
    /// Byte 68: preferred deallocate granularity in blocks, less one.
    pub npdg: u16,
    /// Byte 70: preferred deallocate alignment in blocks, less one.
    pub npda: u16,
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
/// DLFEAT bits 2:0, 001b: deallocated blocks read as zeroes (T10).
pub const DLFEAT_ZEROES: u8 = 1;
/// DLFEAT bit: Write Zeroes may deallocate.
pub const DLFEAT_DEAC: u8 = 1 << 3;

impl Namespace {
    /// The structure as it is sent: 4096 bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        let mut b = [0; LEN];
        put64(&mut b, 0, self.nsze);
        put64(&mut b, 8, self.ncap);
        put64(&mut b, 16, self.nuse);
        b[24] = self.nsfeat;
        // NLBAF (25) and FLBAS (26) zero: one format, number 0, in use.
        b[30] = self.nmic;
        b[33] = self.dlfeat;
        put16(&mut b, 34, self.nawun);
        put16(&mut b, 36, self.nawupf);
        put16(&mut b, 64, self.npwg);
        put16(&mut b, 66, self.npwa);
        put16(&mut b, 68, self.npdg);
        put16(&mut b, 70, self.npda);
        b[99] = self.nsattr;
        put(&mut b, 104, &self.nguid);
        put(&mut b, 120, &self.eui64);
        put16(&mut b, 128, self.metadata);
        b[130] = self.lbads;
        b
    }

    /// Reads the structure, with the format in use.
    ///
    /// # Errors
    /// [`ShortData`], if `data` has fewer than 4096 bytes.
    pub fn decode(data: &[u8]) -> Result<Self, ShortData> {
        let b = whole::<LEN>(data, "identify namespace")?;
        // FLBAS: bits 3:0, and since Base 2.0 also bits 6:5 above them. The number is at most 63,
        // so it stays in bounds.
        let format = usize::from(b[26] & 0xf | (b[26] >> 5 & 3) << 4);
        let at = 128 + 4 * format;
        Ok(Self {
            nsze: u64_at(b, 0),
            ncap: u64_at(b, 8),
            nuse: u64_at(b, 16),
            nsfeat: b[24],
            nmic: b[30],
            dlfeat: b[33],
            nawun: u16_at(b, 34),
            nawupf: u16_at(b, 36),
            npwg: u16_at(b, 64),
            npwa: u16_at(b, 66),
            npdg: u16_at(b, 68),
            npda: u16_at(b, 70),
            nsattr: b[99],
            nguid: array(b, 104),
            eui64: array(b, 120),
            metadata: u16_at(b, at),
            lbads: b[at + 2],
        })
    }

    /// Block size in bytes; `None` if the format gives less than 512 bytes or more than 2 GiB
    /// (T18).
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
    let mut b = [0; LEN];
    let listed = sorted.into_iter().filter(|&nsid| nsid > after).take(LEN / 4);
    for (i, nsid) in listed.enumerate() {
        put32(&mut b, 4 * i, nsid);
    }
    b
}

/// The namespaces of a list. Stops at the first that is zero or does not ascend (T18).
///
/// # Errors
/// [`ShortData`], if `data` has fewer than 4096 bytes.
pub fn namespaces_of(data: &[u8]) -> Result<Vec<u32>, ShortData> {
    let b = whole::<LEN>(data, "namespace list")?;
    let mut last = 0;
    let ids = (0..LEN / 4).map(|i| u32_at(b, 4 * i));
    Ok(ids
        .take_while(|&nsid| {
            let up = nsid > last;
            last = nsid;
            up
        })
        .collect())
}

/// A list of controllers (CNS 12h, 13h): those of `sorted` from `first` on, at most 2047.
#[must_use]
pub fn controller_list(sorted: impl IntoIterator<Item = u16>, first: u16) -> [u8; LEN] {
    let mut b = [0; LEN];
    let mut count = 0;
    for cntlid in sorted.into_iter().filter(|&c| c >= first).take(LEN / 2 - 1) {
        count += 1;
        put16(&mut b, 2 * count, cntlid);
    }
    put16(&mut b, 0, count as u16);
    b
}

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
        let mut b = [0; LEN];
        let mut at = 0;
        let mut add = |kind: u8, id: &[u8]| {
            put(&mut b, at, &[kind, id.len() as u8]);
            put(&mut b, at + 4, id);
            at += 4 + id.len();
        };
        if let Some(id) = &self.eui64 {
            add(1, id);
        }
        if let Some(id) = &self.nguid {
            add(2, id);
        }
        if let Some(id) = &self.uuid {
            add(3, id);
        }
        if let Some(csi) = self.csi {
            add(4, &[csi]);
        }
        b
    }

    /// Reads the descriptors. Those of unknown type are skipped. The list ends at a length that is
    /// zero or that goes beyond the structure (T18).
    ///
    /// # Errors
    /// [`ShortData`], if `data` has fewer than 4096 bytes.
    pub fn decode(data: &[u8]) -> Result<Self, ShortData> {
        let mut rest = &whole::<LEN>(data, "namespace identification descriptors")?[..];
        let mut found = Self::default();
        while let Some((&[kind, len, _, _], tail)) = rest.split_first_chunk::<4>() {
            let len = usize::from(len);
            if len == 0 || len > tail.len() {
                break;
            }
            let (id, tail) = tail.split_at(len);
            match (kind, len) {
                (1, 8) => found.eui64 = Some(array(id, 0)),
                (2, 16) => found.nguid = Some(array(id, 0)),
                (3, 16) => found.uuid = Some(array(id, 0)),
                (4, 1) => found.csi = Some(id[0]),
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
        let mut b = [0; LEN];
        b[1] = self.wzsl;
        b[3] = self.dmrl;
        put32(&mut b, 4, self.dmrsl);
        put64(&mut b, 8, self.dmsl);
        b
    }

    /// Reads the structure.
    ///
    /// # Errors
    /// [`ShortData`], if `data` has fewer than 4096 bytes.
    pub fn decode(data: &[u8]) -> Result<Self, ShortData> {
        let b = whole::<LEN>(data, "identify controller of the NVM command set")?;
        Ok(Self { wzsl: b[1], dmrl: b[3], dmrsl: u32_at(b, 4), dmsl: u64_at(b, 8) })
    }
}

/// Identify Namespace of the NVM command set (CNS 05h, CSI 0; NVM §4.1.5.3): no storage tags, no
/// protection information.
#[must_use]
pub const fn nvm_namespace() -> [u8; LEN] {
    [0; LEN]
}

/// Identify Namespace, common to all command sets (CNS 08h, Base §5.17.2.8).
#[must_use]
pub fn common_namespace(nsfeat: u8, nmic: u8, nsattr: u8) -> [u8; LEN] {
    let mut b = [0; LEN];
    b[0] = nsfeat;
    b[1] = nmic;
    b[8] = nsattr;
    b[14] = 1; // NSTAT: ready
    b
}

/// Identify I/O Command Set (CNS 1Ch, Base §5.17.2.21): one combination, of the NVM command set
/// alone.
#[must_use]
pub const fn command_sets() -> [u8; LEN] {
    let mut b = [0; LEN];
    b[0] = 1 << CSI_NVM;
    b
}

#[cfg(test)]
mod tests;
