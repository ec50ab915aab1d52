//! One connection of the NBD protocol, without I/O: bytes come in, requests and bytes come out.

use riopipe_media::{AlignedBuf, BLOCK_BYTES, BLOCKS_MAX};

/// Begins the greeting of the server ("NBDMAGIC").
const GREETING: u64 = 0x4e42_444d_4147_4943;
/// Ends it, and begins each option of the client ("IHAVEOPT").
const OPTION: u64 = 0x4948_4156_454f_5054;
/// Begins the reply to an option.
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// Begins a request.
const REQUEST: u32 = 0x2560_9513;
/// Begins a simple reply.
const REPLY: u32 = 0x6744_6698;

/// Handshake flags of both sides: fixed newstyle, and no 124 zero bytes after `NBD_OPT_EXPORT_NAME`.
const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;

/// Options of the client.
const EXPORT_NAME: u32 = 1;
const ABORT: u32 = 2;
const LIST: u32 = 3;
const INFO: u32 = 6;
const GO: u32 = 7;

/// Types of replies to options.
const ACK: u32 = 1;
const SERVER: u32 = 2;
const INFORMATION: u32 = 3;
const UNSUPPORTED: u32 = 1 << 31 | 1;
const INVALID: u32 = 1 << 31 | 3;
const UNKNOWN: u32 = 1 << 31 | 6;

/// Pieces of information about an export.
const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// Transmission flags: `HAS_FLAGS`, `SEND_FLUSH`, `SEND_FUA`, `SEND_TRIM`, `SEND_WRITE_ZEROES`,
/// `CAN_MULTI_CONN`. A flush on one connection covers what completed on all of them.
const TRANSMISSION: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 8;
/// The command flag for Force Unit Access. `NO_HOLE` makes no difference here: zeroes are zeroes.
const FUA: u16 = 1;
/// The command flags that a client may set here: FUA, and `NO_HOLE` of Write Zeroes.
const COMMAND_FLAGS: u16 = 3;

/// Error numbers on the wire.
const EIO: u32 = 5;
const EINVAL: u32 = 22;

/// The longest data of an option. A name has at most 4096 bytes.
const OPTION_BYTES_MAX: u32 = 8192;
/// The longest data of a request.
const DATA_BYTES_MAX: u32 = BLOCKS_MAX as u32 * BLOCK_BYTES as u32;
/// The bytes of the header of a request.
const HEADER_BYTES: usize = 28;

/// A command of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Read,
    Write,
    Flush,
    /// Trim.
    Deallocate,
    WriteZeroes,
}

/// A request whose blocks are whole, with its data if it is a write.
pub(super) struct Request {
    /// The client's name for it.
    pub(super) handle: u64,
    pub(super) command: Command,
    pub(super) lba: u64,
    pub(super) blocks: u64,
    pub(super) is_fua: bool,
    pub(super) data: Option<AlignedBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The client is to send its flags.
    Flags,
    /// The client sends options.
    Options { no_zeroes: bool },
    /// The client sends requests.
    Transmission,
    /// The client has ended the connection in order, or has violated the protocol.
    Ended,
}

/// A connection.
pub(super) struct Protocol {
    phase: Phase,
    /// The name of the export. The empty name stands for it, too.
    name: String,
    /// The size of the export, bytes.
    bytes: u64,
    received: Vec<u8>,
    /// How many of the received bytes are consumed.
    consumed: usize,
    to_send: Vec<u8>,
}

impl Protocol {
    /// A new connection, with the greeting to send.
    pub(super) fn new(name: &str, bytes: u64) -> Self {
        let mut to_send = GREETING.to_be_bytes().to_vec();
        to_send.extend(OPTION.to_be_bytes());
        to_send.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
        Self {
            phase: Phase::Flags,
            name: name.to_owned(),
            bytes,
            received: Vec::new(),
            consumed: 0,
            to_send,
        }
    }

    /// The bytes to send. The caller removes those that it has sent.
    pub(super) const fn unsent(&mut self) -> &mut Vec<u8> {
        &mut self.to_send
    }

    /// Whether the client has chosen the export.
    pub(super) const fn is_transmitting(&self) -> bool {
        matches!(self.phase, Phase::Transmission)
    }

    /// Whether nothing more is to be received.
    pub(super) const fn has_ended(&self) -> bool {
        matches!(self.phase, Phase::Ended)
    }

    /// Takes bytes from the client.
    pub(super) fn receive(&mut self, bytes: &[u8]) {
        self.received.drain(..std::mem::take(&mut self.consumed));
        self.received.extend_from_slice(bytes);
    }

    /// The next request that has come completely. Options and bad requests are answered by the way.
    pub(super) fn next_request(&mut self) -> Option<Request> {
        loop {
            let before = (self.consumed, self.phase);
            match self.phase {
                Phase::Flags => self.take_flags(),
                Phase::Options { no_zeroes } => self.take_option(no_zeroes),
                Phase::Transmission => {
                    if let Some(request) = self.take_request() {
                        return Some(request);
                    }
                }
                Phase::Ended => return None,
            }
            if before == (self.consumed, self.phase) {
                return None;
            }
        }
    }

    /// Answers a request: with the data of a read.
    pub(super) fn reply(&mut self, handle: u64, result: Result<Option<&[u8]>, ()>) {
        match result {
            Ok(data) => {
                self.reply_header(handle, 0);
                self.to_send.extend_from_slice(data.unwrap_or_default());
            }
            Err(()) => self.reply_header(handle, EIO),
        }
    }

    fn reply_header(&mut self, handle: u64, error: u32) {
        self.to_send.extend(REPLY.to_be_bytes());
        self.to_send.extend(error.to_be_bytes());
        self.to_send.extend(handle.to_be_bytes());
    }

    /// The bytes that are received and not consumed.
    fn rest(&self) -> &[u8] {
        &self.received[self.consumed..]
    }

    fn take_flags(&mut self) {
        let Some(flags) = self.rest().first_chunk().map(|bytes| u32::from_be_bytes(*bytes)) else {
            return;
        };
        self.consumed += 4;
        let known = u32::from(FIXED_NEWSTYLE | NO_ZEROES);
        self.phase = match flags & !known {
            0 => Phase::Options { no_zeroes: flags & u32::from(NO_ZEROES) != 0 },
            // "The server MUST close the TCP connection if it does not recognize the client's flags."
            _ => Phase::Ended,
        };
    }

    fn take_option(&mut self, no_zeroes: bool) {
        let rest = self.rest();
        let Some(magic) = be64(rest, 0) else { return };
        let (Some(option), Some(len)) = (be32(rest, 8), be32(rest, 12)) else { return };
        if magic != OPTION || len > OPTION_BYTES_MAX {
            self.phase = Phase::Ended;
            return;
        }
        let end = 16 + len as usize;
        let Some(data) = rest.get(16..end).map(<[u8]>::to_vec) else { return };
        self.consumed += end;
        match option {
            EXPORT_NAME if self.is_name(&data) => {
                self.to_send.extend(self.bytes.to_be_bytes());
                self.to_send.extend(TRANSMISSION.to_be_bytes());
                if !no_zeroes {
                    self.to_send.extend([0; 124]);
                }
                self.phase = Phase::Transmission;
            }
            // There is no other way to refuse it.
            EXPORT_NAME => self.phase = Phase::Ended,
            ABORT => {
                self.option_reply(option, ACK, &[]);
                self.phase = Phase::Ended;
            }
            LIST if data.is_empty() => {
                let mut entry = (self.name.len() as u32).to_be_bytes().to_vec();
                entry.extend(self.name.as_bytes());
                self.option_reply(option, SERVER, &entry);
                self.option_reply(option, ACK, &[]);
            }
            LIST => self.option_reply(option, INVALID, &[]),
            INFO | GO => self.answer_go(option, &data),
            _ => self.option_reply(option, UNSUPPORTED, &[]),
        }
    }

    /// Answers `NBD_OPT_INFO` and `NBD_OPT_GO`.
    fn answer_go(&mut self, option: u32, data: &[u8]) {
        let name = be32(data, 0).and_then(|len| data.get(4..)?.get(..len as usize));
        let Some(name) = name else { return self.option_reply(option, INVALID, &[]) };
        let wanted = &data[4 + name.len()..];
        let count = wanted.first_chunk().map(|bytes| usize::from(u16::from_be_bytes(*bytes)));
        if count.is_none_or(|count| wanted.len() != 2 + 2 * count) {
            return self.option_reply(option, INVALID, &[]);
        }
        if !self.is_name(name) {
            return self.option_reply(
                option,
                UNKNOWN,
                b"there is one export, with the volume's name",
            );
        }
        let mut export = INFO_EXPORT.to_be_bytes().to_vec();
        export.extend(self.bytes.to_be_bytes());
        export.extend(TRANSMISSION.to_be_bytes());
        self.option_reply(option, INFORMATION, &export);
        // A client that does not ask for it may use smaller blocks, and gets an error then.
        let mut sizes = INFO_BLOCK_SIZE.to_be_bytes().to_vec();
        for size in [BLOCK_BYTES as u32, BLOCK_BYTES as u32, DATA_BYTES_MAX] {
            sizes.extend(size.to_be_bytes());
        }
        self.option_reply(option, INFORMATION, &sizes);
        self.option_reply(option, ACK, &[]);
        if option == GO {
            self.phase = Phase::Transmission;
        }
    }

    fn is_name(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }

    fn option_reply(&mut self, option: u32, kind: u32, data: &[u8]) {
        self.to_send.extend(OPTION_REPLY.to_be_bytes());
        for word in [option, kind, data.len() as u32] {
            self.to_send.extend(word.to_be_bytes());
        }
        self.to_send.extend_from_slice(data);
    }

    /// Takes one request. `None`: it has not come completely, or it was answered, or the connection has
    /// ended.
    fn take_request(&mut self) -> Option<Request> {
        let rest = self.rest();
        let header: &[u8; HEADER_BYTES] = rest.first_chunk()?;
        let (magic, flags_and_kind) = (be32(header, 0)?, be32(header, 4)?);
        let (handle, offset, len) = (be64(header, 8)?, be64(header, 16)?, be32(header, 24)?);
        let (flags, kind) = ((flags_and_kind >> 16) as u16, flags_and_kind as u16);
        let command = match kind {
            0 => Some(Command::Read),
            1 => Some(Command::Write),
            3 => Some(Command::Flush),
            4 => Some(Command::Deallocate),
            6 => Some(Command::WriteZeroes),
            _ => None,
        };
        let has_too_much = command == Some(Command::Write) && len > DATA_BYTES_MAX;
        // Number 2 ends the connection in order. Too much data is not received only to be refused.
        if magic != REQUEST || kind == 2 || has_too_much {
            self.phase = Phase::Ended;
            return None;
        }
        let data_len = if command == Some(Command::Write) { len as usize } else { 0 };
        let data = rest.get(HEADER_BYTES..HEADER_BYTES + data_len)?;
        let is_whole = offset.is_multiple_of(BLOCK_BYTES as u64)
            && (len as usize).is_multiple_of(BLOCK_BYTES)
            && offset.checked_add(len.into()).is_some_and(|end| end <= self.bytes);
        let is_good = match command {
            Some(Command::Flush) => flags & !COMMAND_FLAGS == 0,
            Some(Command::Read) => {
                is_whole && len > 0 && len <= DATA_BYTES_MAX && flags & !COMMAND_FLAGS == 0
            }
            Some(_) => is_whole && len > 0 && flags & !COMMAND_FLAGS == 0,
            None => false,
        };
        let data = (is_good && data_len > 0).then(|| AlignedBuf::copy_of(data));
        self.consumed += HEADER_BYTES + data_len;
        match command {
            Some(command) if is_good => Some(Request {
                handle,
                command,
                lba: offset / BLOCK_BYTES as u64,
                blocks: u64::from(len) / BLOCK_BYTES as u64,
                is_fua: flags & FUA != 0,
                data,
            }),
            _ => {
                self.reply_header(handle, EINVAL);
                None
            }
        }
    }
}

/// The 32-bit number at byte `at`.
fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
}

/// The 64-bit number at byte `at`.
fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|bytes| u64::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use riopipe_testkit::Random;

    use super::*;

    const BYTES: u64 = 1 << 20;

    fn option(option: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = OPTION.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes
    }

    fn go(name: &str) -> Vec<u8> {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend([0, 1, 0, 3]);
        option(GO, &data)
    }

    fn request(flags: u16, kind: u16, offset: u64, len: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = REQUEST.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(77_u64.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes.extend(data);
        bytes
    }

    /// A connection that transmits.
    fn transmitting() -> Protocol {
        let mut protocol = Protocol::new("v", BYTES);
        protocol.receive(&3_u32.to_be_bytes());
        protocol.receive(&go("v"));
        assert!(protocol.next_request().is_none());
        assert!(protocol.is_transmitting());
        protocol.unsent().clear();
        protocol
    }

    fn error_of(protocol: &mut Protocol) -> Option<u32> {
        let sent = std::mem::take(protocol.unsent());
        be32(&sent, 4)
    }

    #[test]
    fn the_handshake_works_byte_by_byte() {
        let mut protocol = Protocol::new("v", BYTES);
        assert_eq!(&protocol.unsent()[..16], b"NBDMAGICIHAVEOPT");
        protocol.unsent().clear();
        let bytes = [3_u32.to_be_bytes().to_vec(), option(8, &[]), option(LIST, &[]), go("")];
        for byte in bytes.concat() {
            assert!(!protocol.is_transmitting());
            protocol.receive(&[byte]);
            assert!(protocol.next_request().is_none());
        }
        assert!(protocol.is_transmitting() && !protocol.has_ended());
        let sent = std::mem::take(protocol.unsent());
        assert_eq!((be64(&sent, 0), be32(&sent, 12)), (Some(OPTION_REPLY), Some(UNSUPPORTED)));
        assert_eq!((be32(&sent, 20 + 12), &sent[20 + 24..20 + 25]), (Some(SERVER), &b"v"[..]));
    }

    #[test]
    fn an_old_client_gets_its_zeroes() {
        for (flags, len) in [(1_u32, 8 + 2 + 124), (3, 8 + 2)] {
            let mut protocol = Protocol::new("v", BYTES);
            protocol.unsent().clear();
            protocol.receive(&flags.to_be_bytes());
            protocol.receive(&option(EXPORT_NAME, b"v"));
            assert!(protocol.next_request().is_none() && protocol.is_transmitting());
            assert_eq!(protocol.unsent().len(), len);
        }
    }

    #[test]
    fn requests_have_whole_blocks_and_their_data() {
        let mut protocol = transmitting();
        let data = vec![7; 8192];
        protocol.receive(&request(FUA, 1, 4096, 8192, &data));
        protocol.receive(&request(0, 3, 0, 0, &[]));
        let write = protocol.next_request().unwrap();
        assert_eq!((write.command, write.lba, write.blocks), (Command::Write, 1, 2));
        assert!(write.is_fua && write.handle == 77 && write.data.unwrap()[..] == data[..]);
        assert_eq!(protocol.next_request().unwrap().command, Command::Flush);
        protocol.reply(77, Ok(Some(&data)));
        assert_eq!(protocol.unsent().len(), 16 + 8192);
        protocol.unsent().clear();
        protocol.reply(77, Err(()));
        assert_eq!(error_of(&mut protocol), Some(EIO));
    }

    #[test]
    fn bad_requests_are_refused_and_the_next_one_is_taken() {
        let end = BYTES - 4096;
        let bad = [
            request(0, 0, 512, 4096, &[]),
            request(0, 0, 0, 512, &[]),
            request(0, 0, 0, 0, &[]),
            request(0, 0, end, 8192, &[]),
            request(0, 0, u64::MAX - 4095, 8192, &[]),
            request(0, 6, end, 8192, &[]),
            request(0, 1, 512, 4096, &[1; 4096]),
            request(0, 1, BYTES, 4096, &[1; 4096]),
            request(0, 99, 0, 4096, &[]),
            request(1 << 9, 0, 0, 4096, &[]),
        ];
        for (number, bytes) in bad.iter().enumerate() {
            let mut protocol = transmitting();
            protocol.receive(bytes);
            protocol.receive(&request(0, 4, end, 4096, &[]));
            let next = protocol.next_request().expect("the good one follows");
            assert_eq!((next.command, next.lba), (Command::Deallocate, 255), "{number}");
            assert_eq!(error_of(&mut protocol), Some(EINVAL), "{number}");
        }
    }

    #[test]
    fn what_violates_the_protocol_ends_the_connection() {
        let flags = |flags: u32| flags.to_be_bytes().to_vec();
        let begun = [
            flags(1 << 7),
            [flags(3), vec![0; 16]].concat(),
            [flags(3), OPTION.to_be_bytes().to_vec(), vec![0xff; 8]].concat(),
            [flags(3), option(EXPORT_NAME, b"another")].concat(),
            [flags(3), option(ABORT, &[])].concat(),
            [flags(3), go("v"), vec![9; HEADER_BYTES]].concat(),
            [flags(3), go("v"), request(0, 2, 0, 0, &[])].concat(),
            [flags(3), go("v"), request(0, 1, 0, u32::MAX, &[])].concat(),
        ];
        for (number, bytes) in begun.iter().enumerate() {
            let mut protocol = Protocol::new("v", BYTES);
            protocol.receive(bytes);
            assert!(protocol.next_request().is_none() && protocol.has_ended(), "{number}");
        }
        let mut protocol = Protocol::new("v", BYTES);
        protocol.receive(&[flags(3), go("another"), option(GO, &[0, 0, 0, 9, 1])].concat());
        assert!(protocol.next_request().is_none() && !protocol.has_ended());
        let sent = &protocol.unsent()[18..];
        assert_eq!(be32(sent, 12), Some(UNKNOWN));
    }

    #[test]
    fn random_bytes_never_panic() {
        for seed in 0..3000 {
            let mut random = Random(seed);
            let mut protocol = match random.one_in(2) {
                true => transmitting(),
                false => Protocol::new("v", BYTES),
            };
            for _ in 0..random.below(12) {
                let mut bytes = match random.below(5) {
                    0 => 3_u32.to_be_bytes().to_vec(),
                    1 => go("v"),
                    2 => option(random.below(10) as u32, &[0; 6]),
                    3 => request(0, random.below(8) as u16, 0, 4096, &[5; 4096]),
                    _ => (0..random.below(60)).map(|_| random.next() as u8).collect(),
                };
                if random.one_in(2) && !bytes.is_empty() {
                    let place = random.index(bytes.len());
                    bytes[place] ^= 1 << random.below(8);
                }
                protocol.receive(&bytes);
                while protocol.next_request().is_some() {}
            }
        }
    }
}
