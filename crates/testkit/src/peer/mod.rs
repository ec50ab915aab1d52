//! A host written byte by byte from the specifications (NVM Express Base 2.0, TCP Transport 1.0),
//! with none of this project's encoders. It checks the bytes against the documents,
//! not against ourselves.

pub mod target;

/// The discovery subsystem's well-known name (Base §4.5).
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// The NQN of the scripted host.
pub const HOSTNQN: &str = "nqn.2014-08.org.nvmexpress:uuid:5a2b3c4d-0000-4000-8000-000000000001";
/// Its host identifier.
pub const HOSTID: [u8; 16] = *b"scripted-host-01";

/// CRC32C, bit by bit (reflected polynomial 82F63B78h).
pub fn crc32c(data: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

/// The digests that the connection agreed on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Digests {
    /// Headers have one.
    pub header: bool,
    /// Data has one.
    pub data: bool,
}

/// ICReq: 128 bytes (TCP Figure 12).
pub fn icreq(digests: Digests, hpda: u8) -> Vec<u8> {
    let mut p = vec![0; 128];
    p[0] = 0x00;
    p[2] = 128;
    p[4..8].copy_from_slice(&128u32.to_le_bytes());
    p[10] = hpda;
    p[11] = u8::from(digests.header) | u8::from(digests.data) << 1;
    p
}

/// A command capsule with in-capsule data.
pub fn capsule(digests: Digests, sqe: &[u8; 64], data: &[u8]) -> Vec<u8> {
    let mut header = vec![0; 8];
    header.extend_from_slice(sqe);
    pdu(digests, 0x04, 0, header, data)
}

/// H2CData for part of a command's data.
pub fn h2c_data(
    digests: Digests,
    cid: u16,
    ttag: u16,
    offset: u32,
    data: &[u8],
    last: bool,
) -> Vec<u8> {
    let mut header = vec![0; 24];
    header[8..10].copy_from_slice(&cid.to_le_bytes());
    header[10..12].copy_from_slice(&ttag.to_le_bytes());
    header[12..16].copy_from_slice(&offset.to_le_bytes());
    header[16..20].copy_from_slice(&(data.len() as u32).to_le_bytes());
    pdu(digests, 0x06, u8::from(last) << 2, header, data)
}

fn pdu(digests: Digests, kind: u8, flags: u8, mut header: Vec<u8>, data: &[u8]) -> Vec<u8> {
    let hlen = header.len();
    let pdo = hlen + if digests.header { 4 } else { 0 };
    let mut flags = flags | u8::from(digests.header);
    let mut plen = pdo + data.len();
    if !data.is_empty() && digests.data {
        flags |= 2;
        plen += 4;
    }
    header[0] = kind;
    header[1] = flags;
    header[2] = hlen as u8;
    header[3] = if data.is_empty() { 0 } else { pdo as u8 };
    header[4..8].copy_from_slice(&(plen as u32).to_le_bytes());
    let mut out = header.clone();
    if digests.header {
        out.extend_from_slice(&crc32c(&header).to_le_bytes());
    }
    out.extend_from_slice(data);
    if !data.is_empty() && digests.data {
        out.extend_from_slice(&crc32c(data).to_le_bytes());
    }
    out
}

/// A submission queue entry, built by hand.
#[derive(Clone, Copy)]
pub struct Sqe(pub [u8; 64]);

impl Sqe {
    /// A command on a namespace, without data.
    pub fn new(opcode: u8, cid: u16, nsid: u32) -> Self {
        let mut b = [0; 64];
        b[0] = opcode;
        // PSDT 01b: SGLs.
        b[1] = 0x40;
        b[2..4].copy_from_slice(&cid.to_le_bytes());
        b[4..8].copy_from_slice(&nsid.to_le_bytes());
        Self(b)
    }

    /// The data is in the capsule: SGL data block descriptor, offset subtype.
    pub fn inline(mut self, len: u32) -> Self {
        self.0[24..32].fill(0);
        self.0[32..36].copy_from_slice(&len.to_le_bytes());
        self.0[39] = 0x01;
        self
    }

    /// The data goes by the transport: transport SGL data block descriptor.
    pub fn transport(mut self, len: u32) -> Self {
        self.0[24..32].fill(0);
        self.0[32..36].copy_from_slice(&len.to_le_bytes());
        self.0[39] = 0x5a;
        self
    }

    /// With another command identifier.
    pub fn cid(mut self, cid: u16) -> Self {
        self.0[2..4].copy_from_slice(&cid.to_le_bytes());
        self
    }

    /// As the first half of a fused operation.
    pub fn first_half(mut self) -> Self {
        self.0[1] |= 1;
        self
    }

    /// As the second half of a fused operation.
    pub fn second_half(mut self) -> Self {
        self.0[1] |= 2;
        self
    }

    /// With another value in command dword `i`.
    pub fn dword(mut self, i: usize, value: u32) -> Self {
        self.0[4 * i..4 * i + 4].copy_from_slice(&value.to_le_bytes());
        self
    }

    /// With another value in byte `i`.
    pub fn byte(mut self, i: usize, value: u8) -> Self {
        self.0[i] = value;
        self
    }
}

/// Fabrics Connect (Base Figure 380).
pub fn connect(cid: u16, qid: u16, sqsize: u16, kato_ms: u32) -> Sqe {
    let mut sqe = Sqe::new(0x7f, cid, 0);
    sqe.0[4] = 0x01;
    sqe.0[42..44].copy_from_slice(&qid.to_le_bytes());
    sqe.0[44..46].copy_from_slice(&sqsize.to_le_bytes());
    sqe.0[48..52].copy_from_slice(&kato_ms.to_le_bytes());
    sqe.inline(1024)
}

/// The data of a Connect (Base Figure 381).
pub fn connect_data(subnqn: &str, hostnqn: &str, hostid: [u8; 16], cntlid: u16) -> Vec<u8> {
    let mut d = vec![0; 1024];
    d[0..16].copy_from_slice(&hostid);
    d[16..18].copy_from_slice(&cntlid.to_le_bytes());
    d[256..256 + subnqn.len()].copy_from_slice(subnqn.as_bytes());
    d[512..512 + hostnqn.len()].copy_from_slice(hostnqn.as_bytes());
    d
}

/// Property Get; `wide`: 8 bytes.
pub fn property_get(cid: u16, offset: u32, wide: bool) -> Sqe {
    let mut sqe = Sqe::new(0x7f, cid, 0);
    sqe.0[4] = 0x04;
    sqe.0[40] = u8::from(wide);
    sqe.0[44..48].copy_from_slice(&offset.to_le_bytes());
    sqe
}

/// Property Set of a 4-byte property.
pub fn property_set(cid: u16, offset: u32, value: u32) -> Sqe {
    let mut sqe = Sqe::new(0x7f, cid, 0);
    sqe.0[4] = 0x00;
    sqe.0[44..48].copy_from_slice(&offset.to_le_bytes());
    sqe.0[48..52].copy_from_slice(&value.to_le_bytes());
    sqe
}

/// CC: enabled, 64-byte submission and 16-byte completion entries.
pub const CC_ENABLE: u32 = 1 | 6 << 16 | 4 << 20;

/// Identify.
pub fn identify(cid: u16, cns: u8, nsid: u32) -> Sqe {
    Sqe::new(0x06, cid, nsid).transport(4096).dword(10, cns.into())
}

/// Get Log Page of `len` bytes.
pub fn get_log(cid: u16, lid: u8, offset: u32, len: u32) -> Sqe {
    let dwords = len / 4 - 1;
    Sqe::new(0x02, cid, 0)
        .transport(len)
        .dword(10, u32::from(lid) | dwords << 16)
        .dword(11, dwords >> 16)
        .dword(12, offset)
}

fn blocks(opcode: u8, cid: u16, nsid: u32, lba: u64, blocks: u32) -> Sqe {
    Sqe::new(opcode, cid, nsid)
        .dword(10, lba as u32)
        .dword(11, (lba >> 32) as u32)
        .dword(12, blocks - 1)
}

/// Read.
pub fn read(cid: u16, nsid: u32, lba: u64, count: u32) -> Sqe {
    blocks(0x02, cid, nsid, lba, count).transport(count * 4096)
}

/// Write with its data in the capsule.
pub fn write(cid: u16, nsid: u32, lba: u64, count: u32) -> Sqe {
    blocks(0x01, cid, nsid, lba, count).inline(count * 4096)
}

/// Write whose data is asked for.
pub fn write_r2t(cid: u16, nsid: u32, lba: u64, count: u32) -> Sqe {
    blocks(0x01, cid, nsid, lba, count).transport(count * 4096)
}

/// Compare with its data in the capsule.
pub fn compare(cid: u16, nsid: u32, lba: u64, count: u32) -> Sqe {
    blocks(0x05, cid, nsid, lba, count).inline(count * 4096)
}

/// Compare whose data is asked for.
pub fn compare_r2t(cid: u16, nsid: u32, lba: u64, count: u32) -> Sqe {
    blocks(0x05, cid, nsid, lba, count).transport(count * 4096)
}

/// Verify.
pub fn verify(cid: u16, nsid: u32, lba: u64, count: u32) -> Sqe {
    blocks(0x0c, cid, nsid, lba, count)
}

/// Copy of these source ranges (first block, blocks), with its list in the capsule.
pub fn copy(cid: u16, nsid: u32, destination: u64, ranges: &[(u64, u32)]) -> (Sqe, Vec<u8>) {
    let mut list = Vec::new();
    for (lba, count) in ranges {
        list.extend([0; 8]);
        list.extend(lba.to_le_bytes());
        list.extend(((count - 1) as u16).to_le_bytes());
        list.extend([0; 14]);
    }
    let sqe = blocks(0x19, cid, nsid, destination, ranges.len() as u32).inline(list.len() as u32);
    (sqe, list)
}

/// Reservation Register: action 0 registers, 1 unregisters, 2 replaces. With its data.
pub fn register(cid: u16, nsid: u32, action: u32, current: u64, new: u64) -> (Sqe, Vec<u8>) {
    (Sqe::new(0x0d, cid, nsid).dword(10, action).inline(16), keys(current, new))
}

/// Reservation Acquire: action 0 acquires, 1 preempts, 2 preempts and aborts. With its data.
pub fn acquire(
    cid: u16,
    nsid: u32,
    (action, kind): (u32, u32),
    current: u64,
    preempted: u64,
) -> (Sqe, Vec<u8>) {
    let sqe = Sqe::new(0x11, cid, nsid).dword(10, action | kind << 8).inline(16);
    (sqe, keys(current, preempted))
}

/// Reservation Release: action 0 releases, 1 clears. With its data.
pub fn release(cid: u16, nsid: u32, (action, kind): (u32, u32), current: u64) -> (Sqe, Vec<u8>) {
    let sqe = Sqe::new(0x15, cid, nsid).dword(10, action | kind << 8).inline(8);
    (sqe, current.to_le_bytes().into())
}

/// Reservation Report of `len` bytes, with the extended data structure.
pub fn report(cid: u16, nsid: u32, len: u32) -> Sqe {
    Sqe::new(0x0e, cid, nsid).dword(10, len / 4 - 1).dword(11, 1).transport(len)
}

fn keys(current: u64, other: u64) -> Vec<u8> {
    [current.to_le_bytes(), other.to_le_bytes()].concat()
}

/// Write Zeroes.
pub fn write_zeroes(cid: u16, nsid: u32, lba: u64, count: u32, deallocate: bool) -> Sqe {
    let mut sqe = blocks(0x08, cid, nsid, lba, count);
    sqe.0[51] |= u8::from(deallocate) << 1;
    sqe
}

/// Flush.
pub fn flush(cid: u16, nsid: u32) -> Sqe {
    Sqe::new(0x00, cid, nsid)
}

/// One PDU as received.
#[derive(Clone, PartialEq, Eq)]
pub struct Received {
    /// PDU type.
    pub kind: u8,
    /// FLAGS.
    pub flags: u8,
    /// The header, common part included, digest excluded.
    pub header: Vec<u8>,
    /// Its data, digest excluded.
    pub data: Vec<u8>,
}

impl std::fmt::Debug for Received {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (kind, header, len) = (self.kind, &self.header, self.data.len());
        write!(f, "PDU {kind:#04x}, header {header:02x?}, {len} bytes of data")
    }
}

impl Received {
    /// Two bytes of the header.
    pub fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.header[at..at + 2].try_into().unwrap())
    }

    /// Four bytes of the header.
    pub fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.header[at..at + 4].try_into().unwrap())
    }

    /// Of a response capsule: command, status (SCT and SC), result.
    pub fn completion(&self) -> Completion {
        assert_eq!(self.kind, 0x05, "a response capsule: {self:x?}");
        Completion {
            cid: self.u16(8 + 12),
            status: self.u16(8 + 14) >> 1 & 0x7ff,
            dnr: self.u16(8 + 14) >> 15 == 1,
            sqhd: self.u16(8 + 8),
            sqid: self.u16(8 + 10),
            result: u64::from(self.u32(8)) | u64::from(self.u32(12)) << 32,
        }
    }
}

/// A completion queue entry, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Command identifier.
    pub cid: u16,
    /// Status code type and status code, 11 bits.
    pub status: u16,
    /// Do not retry.
    pub dnr: bool,
    /// Submission queue head pointer.
    pub sqhd: u16,
    /// Submission queue identifier.
    pub sqid: u16,
    /// Dwords 0 and 1.
    pub result: u64,
}

/// Takes the first PDU off `bytes`, checking what the specification lets a host check.
pub fn parse(bytes: &mut Vec<u8>, digests: Digests, hpda: u8) -> Option<Received> {
    if bytes.len() < 8 {
        return None;
    }
    let plen = u32::from_le_bytes(bytes[4..8].try_into().unwrap()) as usize;
    if bytes.len() < plen {
        return None;
    }
    let pdu: Vec<u8> = bytes.drain(..plen).collect();
    let (kind, flags, hlen, pdo) = (pdu[0], pdu[1], usize::from(pdu[2]), usize::from(pdu[3]));
    let expected = match kind {
        0x01 => 128,
        0x03 | 0x05 | 0x07 | 0x09 => 24,
        other => panic!("a PDU of type {other:#x} that no controller sends: {pdu:x?}"),
    };
    assert_eq!(hlen, expected, "header length of type {kind:#x}");
    let header = pdu[..hlen].to_vec();
    let mut data = Vec::new();
    match kind {
        0x03 => data = pdu[hlen..].to_vec(),
        0x01 => assert_eq!(plen, 128),
        _ => {
            assert_eq!(flags & 1 == 1, digests.header, "HDGSTF as negotiated");
            let mut at = hlen;
            if digests.header {
                let digest = u32::from_le_bytes(pdu[at..at + 4].try_into().unwrap());
                assert_eq!(digest, crc32c(&header), "header digest");
                at += 4;
            }
            if kind == 0x07 {
                let align = (usize::from(hpda) + 1) * 4;
                assert!(pdo >= at && pdo.is_multiple_of(align), "data at {pdo}, HPDA {hpda}");
                let len = u32::from_le_bytes(pdu[16..20].try_into().unwrap()) as usize;
                data = pdu[pdo..pdo + len].to_vec();
                let mut end = pdo + len;
                assert_eq!(flags & 2 == 2, digests.data, "DDGSTF as negotiated");
                if digests.data {
                    let digest = u32::from_le_bytes(pdu[end..end + 4].try_into().unwrap());
                    assert_eq!(digest, crc32c(&data), "data digest");
                    end += 4;
                }
                assert_eq!(end, plen);
            } else {
                assert_eq!(at, plen, "nothing follows the header");
            }
        }
    }
    Some(Received { kind, flags, header, data })
}
