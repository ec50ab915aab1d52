//! A target's end of one connection, written byte by byte from the specifications and
//! docs/wire-format.md: it takes a host's commands apart and answers as a test asks.

/// A command that the host has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// The 64 bytes of its submission queue entry.
    pub sqe: Vec<u8>,
    /// The data in its capsule.
    pub data: Vec<u8>,
}

fn le(bytes: &[u8], at: usize, len: usize) -> u64 {
    (0..len).rev().fold(0, |value, i| value << 8 | u64::from(bytes[at + i]))
}

impl Command {
    /// Opcode.
    pub fn opcode(&self) -> u8 {
        self.sqe[0]
    }

    /// Command identifier.
    pub fn cid(&self) -> u16 {
        le(&self.sqe, 2, 2) as u16
    }

    /// Command dword `i`.
    pub fn dword(&self, i: usize) -> u32 {
        le(&self.sqe, 4 * i, 4) as u32
    }

    /// CDW2–3: the 64-bit mark of bind and mark, the position of a list.
    pub fn mark(&self) -> u64 {
        le(&self.sqe, 8, 8)
    }

    /// Whether it carries an ordering attribute.
    pub fn is_ordered(&self) -> bool {
        matches!(self.opcode(), 0x00 | 0x01 | 0x08) && self.dword(12) >> 20 & 0xf == 0xf
    }

    /// Of an ordered request: (seq, index), which name it.
    pub fn name(&self) -> (u32, u16) {
        (self.dword(2), (self.dword(5) >> 16) as u16)
    }

    /// Of an ordered request.
    pub fn ordinal(&self) -> u32 {
        self.dword(3)
    }

    /// The command without what a replay may change: identifier, ordinal, released mark.
    pub fn shape(&self) -> Self {
        let mut shape = self.clone();
        shape.sqe[2..4].fill(0);
        shape.sqe[12..20].fill(0);
        shape
    }
}

/// The commands of the host on one connection, and the answers to it.
#[derive(Default)]
pub struct Script {
    input: Vec<u8>,
    /// Sent to the host, not taken yet.
    pub output: Vec<u8>,
    /// Commands that no test has taken yet.
    pub commands: Vec<Command>,
}

impl Script {
    /// Takes what the host has sent; answers ICReq and Connect by itself.
    pub fn take(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
        while self.input.len() >= 8 && self.input.len() >= le(&self.input, 4, 4) as usize {
            let len = le(&self.input, 4, 4) as usize;
            let pdu: Vec<u8> = self.input.drain(..len).collect();
            match pdu[0] {
                0x00 => {
                    let mut icresp = vec![0; 128];
                    icresp[..8].copy_from_slice(&[1, 0, 128, 0, 128, 0, 0, 0]);
                    icresp[12..16].copy_from_slice(&[0, 0, 2, 0]);
                    self.output.extend(icresp);
                }
                0x04 => {
                    let data = if pdu[3] == 0 { vec![] } else { pdu[usize::from(pdu[3])..].into() };
                    let command = Command { sqe: pdu[8..72].into(), data };
                    if command.opcode() == 0x7f {
                        self.answer(&command, 0, 1);
                    } else {
                        self.commands.push(command);
                    }
                }
                // Data that the target has asked for.
                0x06 => {}
                other => panic!("PDU {other:#x} was not expected"),
            }
        }
    }

    /// A completion with this status (SCT and SC) and result.
    pub fn answer(&mut self, command: &Command, status: u16, result: u64) {
        let out = &mut self.output;
        out.extend([5, 0, 24, 0, 24, 0, 0, 0]);
        out.extend(result.to_le_bytes());
        out.extend([0, 0, 0, 0]);
        out.extend(command.cid().to_le_bytes());
        out.extend((status << 1).to_le_bytes());
    }

    /// Asks for the first `len` bytes of a command's data.
    pub fn ask_for_data(&mut self, command: &Command, len: u32) {
        let out = &mut self.output;
        out.extend([9, 0, 24, 0, 24, 0, 0, 0]);
        out.extend(command.cid().to_le_bytes());
        out.extend([0; 6]);
        out.extend(len.to_le_bytes());
        out.extend([0; 4]);
    }

    /// Data, then success; cut or padded to what was asked for.
    pub fn answer_data(&mut self, command: &Command, mut data: Vec<u8>) {
        data.resize(le(&command.sqe, 32, 4) as usize, 0);
        self.answer_pieces(command, &data, data.len());
    }

    /// Data in pieces of `len` bytes, then success.
    pub fn answer_pieces(&mut self, command: &Command, data: &[u8], len: usize) {
        let out = &mut self.output;
        for (piece, at) in data.chunks(len).zip((0..).step_by(len)) {
            let last = if at + piece.len() == data.len() { 4 } else { 0 };
            out.extend([7, last, 24, 24]);
            out.extend((24 + piece.len() as u32).to_le_bytes());
            out.extend(command.cid().to_le_bytes());
            out.extend([0; 2]);
            out.extend((at as u32).to_le_bytes());
            out.extend((piece.len() as u32).to_le_bytes());
            out.extend([0; 4]);
            out.extend(piece);
        }
        self.answer(command, 0, 0);
    }
}

/// A page of a target's list.
#[derive(Clone, Debug)]
pub struct Page {
    /// The volume's id.
    pub volume: [u8; 16],
    /// The stream's number.
    pub stream: u16,
    /// More pages follow.
    pub more: bool,
    /// A recovery has settled the stream.
    pub settled: bool,
    /// The released mark.
    pub released: u64,
    /// The position to go on from.
    pub next: u64,
    /// The entries, encoded.
    pub entries: Vec<[u8; 64]>,
}

impl Page {
    /// Its bytes (docs/wire-format.md).
    pub fn encode(&self) -> Vec<u8> {
        let mut d = vec![0; 64];
        d[0..16].copy_from_slice(&self.volume);
        d[16..18].copy_from_slice(&self.stream.to_le_bytes());
        d[18] = u8::from(self.more) | u8::from(self.settled) << 1;
        d[20..24].copy_from_slice(&(self.entries.len() as u32).to_le_bytes());
        d[24..32].copy_from_slice(&self.released.to_le_bytes());
        d[48..56].copy_from_slice(&self.next.to_le_bytes());
        d[60..64].copy_from_slice(&(self.entries.len() as u32).to_le_bytes());
        for entry in &self.entries {
            d.extend(entry);
        }
        d
    }
}

/// The entry that a target lists for an ordered request at a position of its log; wire numbers
/// are taken as they are.
pub fn listed(command: &Command, position: u64, durable: bool) -> [u8; 64] {
    let mut r = [0; 64];
    let flush = command.opcode() == 0x00;
    let blocks = if flush { 0 } else { (command.dword(12) & 0xffff) + 1 };
    let lba = if flush { 0 } else { le(&command.sqe, 40, 8) };
    r[0..8].copy_from_slice(&position.to_le_bytes());
    r[8..16].copy_from_slice(&u64::from(command.dword(2)).to_le_bytes());
    r[16..24].copy_from_slice(&le(&command.sqe, 56, 8).to_le_bytes());
    r[24..32].copy_from_slice(&lba.to_le_bytes());
    r[32..36].copy_from_slice(&command.ordinal().to_le_bytes());
    r[36..40].copy_from_slice(&blocks.to_le_bytes());
    r[40..42].copy_from_slice(&(command.dword(5) as u16).to_le_bytes());
    r[42..44].copy_from_slice(&((command.dword(5) >> 16) as u16).to_le_bytes());
    r[44..46].copy_from_slice(&((command.dword(13) >> 24) as u16 + 1).to_le_bytes());
    r[46] = (command.dword(13) >> 8) as u8;
    r[47] = match command.opcode() {
        0x01 => 1,
        0x08 => 2,
        _ => 3,
    };
    r[48] = (command.dword(13) >> 16) as u8;
    r[49] = u8::from(durable) | u8::from(durable) << 1;
    r[52..56].copy_from_slice(&1u32.to_le_bytes());
    r
}
