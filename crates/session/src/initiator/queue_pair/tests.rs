//! A queue pair against a scripted target. All bytes that the target sends, and all that the queue
//! pair must send, are written byte by byte from the specification; the encoders of `riopipe-nvme`
//! are not used for either.

use super::*;
use alloc::sync::Arc;
use riopipe_nvme::digest::soft;
use riopipe_testkit::{Random, hex};
use std::format;
use std::string::ToString;
use std::vec;

type Payload = Arc<[u8]>;

/// The copy of an event.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Ready(u16),
    Data(u64, u32, Vec<u8>),
    Done(u64, Status),
}

fn config() -> QpConfig {
    QpConfig {
        hostnqn: "nqn.2014-08.org.nvmexpress:uuid:1".into(),
        hostid: *b"0123456789abcdef",
        subnqn: "nqn.2026-01.io.example:drives".into(),
        qid: 1,
        cntlid: 0x0102,
        sqsize: 4,
        kato_ms: 0,
        header_digest: false,
        data_digest: false,
        crc: soft,
        maxr2t: 1,
        data_max: 16384,
        incarnation: None,
        secrets: None,
    }
}

/// ICResp: version 0, CPDA and digests as given, MAXH2CDATA 4096.
fn icresp(cpda: u8, digests: u8) -> Vec<u8> {
    let mut b = hex("01 00 80 00 80000000 0000 00 00 00100000");
    b[10] = cpda;
    b[11] = digests;
    b.resize(128, 0);
    b
}

/// A response capsule without digest: result, command, status (SCT and SC).
fn resp(cid: u16, status: u16, result: u32) -> Vec<u8> {
    let mut b = hex("05 00 18 00 18000000");
    b.extend(result.to_le_bytes());
    b.extend([0; 4]);
    b.extend([0, 0, 1, 0]);
    b.extend(cid.to_le_bytes());
    b.extend((status << 1).to_le_bytes());
    b
}

/// C2HData without digests. Flags: 4 last, 8 success.
fn c2h(flags: u8, cid: u16, datao: u32, data: &[u8]) -> Vec<u8> {
    let mut b = vec![7, flags, 24, 24];
    b.extend((24 + data.len() as u32).to_le_bytes());
    b.extend(cid.to_le_bytes());
    b.extend([0, 0]);
    b.extend(datao.to_le_bytes());
    b.extend((data.len() as u32).to_le_bytes());
    b.extend([0; 4]);
    b.extend(data);
    b
}

fn r2t(cid: u16, ttag: u16, r2to: u32, r2tl: u32) -> Vec<u8> {
    let mut b = hex("09 00 18 00 18000000");
    b.extend(cid.to_le_bytes());
    b.extend(ttag.to_le_bytes());
    b.extend(r2to.to_le_bytes());
    b.extend(r2tl.to_le_bytes());
    b.extend([0; 4]);
    b
}

/// A queue pair and its socket's two ends.
struct Rig {
    qp: QueuePair<Payload>,
    out: Outbox<Payload>,
    /// Bytes that were sent, and that no test has read yet.
    wire: Vec<u8>,
    seen: Vec<Seen>,
}

impl Rig {
    fn new(config: QpConfig) -> Self {
        Self { qp: QueuePair::new(config), out: Outbox::new(), wire: Vec::new(), seen: Vec::new() }
    }

    /// Connected with the given digests and CPDA; Connect was command 0.
    fn ready(config: QpConfig, cpda: u8) -> Self {
        let digests = u8::from(config.header_digest) | u8::from(config.data_digest) << 1;
        let mut rig = Self::new(config);
        rig.qp.start(&mut rig.out);
        rig.sent();
        rig.get(&icresp(cpda, digests)).unwrap();
        rig.sent();
        let mut answer = resp(0, 0, 0x0102);
        if digests & 1 != 0 {
            answer[1] |= 1;
            answer[4] = 28;
            let digest = soft(0, &answer);
            answer.extend(digest.to_le_bytes());
        }
        rig.get(&answer).unwrap();
        assert_eq!(rig.seen(), [Seen::Ready(0x0102)]);
        assert!(!rig.qp.is_closed());
        rig
    }

    fn send(&mut self) {
        self.wire.extend(self.out.slices().flatten());
        self.out.consume(self.out.len_bytes());
    }

    /// The bytes that were sent since the last call.
    fn sent(&mut self) -> Vec<u8> {
        self.send();
        core::mem::take(&mut self.wire)
    }

    fn seen(&mut self) -> Vec<Seen> {
        core::mem::take(&mut self.seen)
    }

    /// Sends everything, then receives these bytes.
    fn get(&mut self, bytes: &[u8]) -> Result<usize, SessionError> {
        self.send();
        self.get_early(bytes)
    }

    /// Receives these bytes although not everything is sent.
    fn get_early(&mut self, bytes: &[u8]) -> Result<usize, SessionError> {
        let seen = &mut self.seen;
        self.qp.receive(bytes, &mut self.out, |event| {
            seen.push(match event {
                Event::Ready { cntlid } => Seen::Ready(cntlid),
                Event::Data { context, offset, bytes } => {
                    Seen::Data(context, offset, bytes.to_vec())
                }
                Event::Done { context, cqe } => Seen::Done(context, cqe.status()),
            });
        })
    }

    fn submit(&mut self, sqe: Sqe, user: u64, data: Data<'_, Payload>) -> u16 {
        self.qp.submit(sqe, user, data, &mut self.out).unwrap().0
    }

    /// The target breaks the protocol with `bytes`. Returns the fields of the termination request.
    fn broken(&mut self, bytes: &[u8]) -> (u16, u32) {
        self.sent();
        let e = self.get(bytes).expect_err("it must be refused");
        assert!(matches!(e, SessionError::Protocol(_)), "{e}");
        let plen = |b: &[u8]| u32::from_le_bytes(b[4..8].try_into().unwrap()) as usize;
        let mut sent = self.sent();
        // Data that was requested before the error may come first.
        while sent[0] == 6 {
            sent.drain(..plen(&sent));
        }
        assert_eq!(sent[..4], [2, 0, 24, 0], "H2CTermReq");
        assert_eq!(plen(&sent), sent.len(), "and nothing after it");
        assert!(self.qp.is_closed() && self.qp.space() == 0);
        assert_eq!(
            self.get(&resp(0, 0, 0)),
            Err(SessionError::Closed),
            "nothing is received after"
        );
        let fei = u32::from_le_bytes(sent[10..14].try_into().unwrap());
        (u16::from_le_bytes([sent[8], sent[9]]), fei)
    }
}

#[test]
fn the_handshake_byte_by_byte() {
    let mut rig = Rig::new(QpConfig { qid: 0, cntlid: 0xffff, kato_ms: 5000, ..config() });
    assert_eq!(rig.qp.space(), 0);
    rig.qp.start(&mut rig.out);
    rig.qp.start(&mut rig.out);
    let mut icreq = hex("00 00 80 00 80000000");
    icreq.resize(128, 0);
    assert_eq!(rig.sent(), icreq, "one ICReq, however often it is started");
    assert_eq!(
        rig.qp.submit(Sqe::flush(1), 0, Data::None, &mut rig.out),
        Err(SubmitError::NotReady)
    );

    assert_eq!(rig.get(&icresp(0, 0)), Ok(128));
    let mut connect = hex("04 00 48 48 48040000");
    let mut sqe = vec![0; 64];
    sqe[0] = 0x7f;
    sqe[1] = 0x40;
    sqe[4] = 0x01;
    sqe[32..40].copy_from_slice(&hex("00040000 000000 01"));
    sqe[40..52].copy_from_slice(&hex("0000 0000 0300 00 00 88130000"));
    connect.extend(&sqe);
    let mut data = vec![0; 1024];
    data[..16].copy_from_slice(b"0123456789abcdef");
    data[16..18].copy_from_slice(&[0xff, 0xff]);
    data[256..285].copy_from_slice(b"nqn.2026-01.io.example:drives");
    data[512..545].copy_from_slice(b"nqn.2014-08.org.nvmexpress:uuid:1");
    connect.extend(&data);
    assert_eq!(rig.sent(), connect);
    assert!(!rig.qp.is_ready());
    assert_eq!(rig.qp.outstanding().count(), 0, "Connect is not the caller's");

    assert_eq!(rig.get(&resp(0, 0, 0x0007)), Ok(24));
    assert_eq!(rig.seen(), [Seen::Ready(7)]);
    assert_eq!((rig.qp.cntlid(), rig.qp.space(), rig.qp.in_flight()), (7, 3, 0));
}

#[test]
fn an_io_queue_has_no_keep_alive() {
    let io = QpConfig { kato_ms: 5000, ..config() }.io_queue(7, 3, 31);
    assert_eq!((io.cntlid, io.qid, io.sqsize, io.kato_ms), (7, 3, 31, 0));
}

#[test]
fn a_write_in_its_capsule() {
    let mut rig = Rig::ready(config(), 0);
    rig.qp.set_in_capsule(8192);
    let pieces: [Payload; 2] = [vec![1; 4096].into(), vec![2; 4096].into()];
    let cid = rig.submit(Sqe::write(1, 0x10, 16), 77, Data::Write(&pieces));
    assert_eq!(cid, 4, "slot 0 for the second time");
    // Header, piece, piece: nothing is copied.
    assert_eq!(rig.out.slices().map(<[u8]>::len).collect::<Vec<_>>(), [72, 4096, 4096]);
    assert_eq!(Arc::strong_count(&pieces[0]), 2);
    let mut want = hex(
        "04 00 48 48 48200000  01 40 0400 01000000 00000000 00000000 0000000000000000
         0000000000000000 00200000 000000 01 10000000 00000000 0f000000 00000000 00000000 00000000",
    );
    want.extend([1; 4096]);
    want.extend([2; 4096]);
    assert_eq!(rig.sent(), want);
    assert_eq!(Arc::strong_count(&pieces[0]), 1, "sent pieces are dropped");
    assert_eq!(rig.qp.outstanding().collect::<Vec<_>>(), [77]);
    rig.get(&resp(4, 0, 0)).unwrap();
    assert_eq!(rig.seen(), [Seen::Done(77, Status::SUCCESS)]);
    assert_eq!(rig.qp.in_flight(), 0);
}

#[test]
fn a_write_whose_data_the_target_requests() {
    // CPDA 1: data at multiples of 8 bytes; MAXH2CDATA 4096.
    let mut rig = Rig::ready(config(), 1);
    let bytes: Vec<u8> = (0..12288u32).map(|i| (i / 7) as u8).collect();
    let pieces: [Payload; 3] =
        [bytes[..1000].into(), bytes[1000..9000].into(), bytes[9000..].into()];
    assert_eq!(rig.submit(Sqe::write(1, 0, 24), 5, Data::Write(&pieces)), 4);
    let sent = rig.sent();
    assert_eq!(sent.len(), 72);
    assert_eq!(sent[8 + 32..8 + 40], hex("00300000 000000 5a"), "transport data block");

    rig.get(&r2t(4, 9, 0, 6144)).unwrap();
    let mut want = hex("06 00 18 18 18100000 0400 0900 00000000 00100000 00000000");
    want.extend(&bytes[..4096]);
    want.extend(hex("06 04 18 18 18080000 0400 0900 00100000 00080000 00000000"));
    want.extend(&bytes[4096..6144]);
    assert_eq!(rig.sent(), want);
    assert_eq!(Arc::strong_count(&pieces[2]), 2, "not yet requested");

    rig.get(&r2t(4, 10, 6144, 6144)).unwrap();
    let mut want = hex("06 00 18 18 18100000 0400 0a00 00180000 00100000 00000000");
    want.extend(&bytes[6144..10240]);
    want.extend(hex("06 04 18 18 18080000 0400 0a00 00280000 00080000 00000000"));
    want.extend(&bytes[10240..]);
    assert_eq!(rig.sent(), want);
    assert!(pieces.iter().all(|p| Arc::strong_count(p) == 1));
    rig.get(&resp(4, 0, 0)).unwrap();
    assert_eq!(rig.seen(), [Seen::Done(5, Status::SUCCESS)]);
}

#[test]
fn a_write_refused_before_its_data_is_requested() {
    let mut rig = Rig::ready(config(), 0);
    let piece: [Payload; 1] = [vec![0; 4096].into()];
    rig.submit(Sqe::write(1, 0, 8), 5, Data::Write(&piece));
    rig.get(&resp(4, 0x080, 0)).unwrap();
    assert_eq!(rig.seen(), [Seen::Done(5, Status::LBA_OUT_OF_RANGE)]);
    assert_eq!(Arc::strong_count(&piece[0]), 1, "it is dropped");
    assert_eq!(rig.qp.in_flight(), 0);
    // T18: the identifier that the slot will have next is not in flight yet.
    assert_eq!(rig.broken(&r2t(8, 0, 0, 4096)), (1, 8));
}

#[test]
fn reads_with_and_without_a_response() {
    let mut rig = Rig::ready(config(), 0);
    assert_eq!(rig.submit(Sqe::read(1, 3, 1), 1, Data::Read(16)), 4);
    assert_eq!(rig.submit(Sqe::read(1, 4, 1), 2, Data::Read(8)), 1);
    let sent = rig.sent();
    assert_eq!(sent.len(), 144);
    assert_eq!(sent[8 + 32..8 + 40], hex("10000000 000000 5a"));

    let mut bytes = c2h(0, 4, 0, b"01234567");
    bytes.extend(c2h(12, 1, 0, b"abcdefgh"));
    bytes.extend(c2h(4, 4, 8, b"89abcdef"));
    bytes.extend(resp(4, 0, 0));
    bytes.extend(hex("05 00 18"));
    assert_eq!(rig.get(&bytes), Ok(bytes.len() - 3), "the beginning of the next stays");
    assert_eq!(
        rig.seen(),
        [
            Seen::Data(1, 0, b"01234567".to_vec()),
            Seen::Data(2, 0, b"abcdefgh".to_vec()),
            Seen::Done(2, Status::SUCCESS),
            Seen::Data(1, 8, b"89abcdef".to_vec()),
            Seen::Done(1, Status::SUCCESS),
        ]
    );
    // A read that fails in the middle is an answer like any other.
    assert_eq!(rig.submit(Sqe::read(1, 3, 1), 3, Data::Read(16)), 8);
    rig.get(&c2h(4, 8, 0, b"01234567")).unwrap();
    rig.get(&resp(8, 0x281, 0)).unwrap();
    assert_eq!(rig.seen()[1], Seen::Done(3, Status::UNRECOVERED_READ));
}

#[test]
fn pieces_of_pdus_at_any_size_give_the_same_events() {
    let mut stream = c2h(0, 4, 0, b"01234567");
    stream.extend(c2h(12, 4, 8, b"89abcdef"));
    stream.extend(resp(1, 0, 3));
    for step in 1..40 {
        let mut rig = Rig::ready(config(), 0);
        rig.submit(Sqe::read(1, 3, 1), 1, Data::Read(16));
        rig.submit(Sqe::flush(1), 2, Data::None);
        let mut buf = Vec::new();
        for chunk in stream.chunks(step) {
            buf.extend(chunk);
            let used = rig.get(&buf).unwrap();
            buf.drain(..used);
            assert!(rig.qp.need(&buf) > buf.len());
        }
        assert!(buf.is_empty());
        let seen = rig.seen();
        assert_eq!(seen.len(), 4);
        assert_eq!(seen[2..], [Seen::Done(1, Status::SUCCESS), Seen::Done(2, Status::SUCCESS)]);
    }
}

fn digested() -> QpConfig {
    QpConfig { header_digest: true, data_digest: true, ..config() }
}

/// Puts digests on a PDU whose data begins at `data` (0: none).
fn digest(mut bytes: Vec<u8>, data: usize) -> Vec<u8> {
    let hlen = usize::from(bytes[2]);
    bytes[1] |= if data > 0 { 3 } else { 1 };
    let grown = bytes.len() as u32 + if data > 0 { 8 } else { 4 };
    bytes[4..8].copy_from_slice(&grown.to_le_bytes());
    if data > 0 {
        bytes[3] += 4;
        let crc = soft(0, &bytes[data..]);
        bytes.extend(crc.to_le_bytes());
    }
    let crc = soft(0, &bytes[..hlen]);
    bytes.splice(hlen..hlen, crc.to_le_bytes());
    bytes
}

#[test]
fn digests_both_ways() {
    let mut rig = Rig::ready(digested(), 0);
    rig.qp.set_in_capsule(4096);
    let pieces: [Payload; 2] = [b"1234"[..].into(), b"56789abc"[..].into()];
    rig.submit(Sqe::write(1, 0, 1), 1, Data::Write(&pieces));
    let sent = rig.sent();
    assert_eq!(sent[..8], hex("04 03 48 4c 5c000000"));
    assert_eq!(sent[72..76], soft(0, &sent[..72]).to_le_bytes());
    assert_eq!(&sent[76..88], b"123456789abc");
    assert_eq!(sent[88..], hex("1a54a092"), "CRC32C of 123456789abc");

    rig.qp.set_in_capsule(0);
    assert_eq!(rig.submit(Sqe::write(1, 0, 1), 2, Data::Write(&pieces)), 1);
    rig.sent();
    rig.get(&digest(r2t(1, 3, 0, 12), 0)).unwrap();
    let sent = rig.sent();
    assert_eq!(sent[..8], hex("06 07 18 1c 2c000000"));
    assert_eq!(sent[24..28], soft(0, &sent[..24]).to_le_bytes());
    assert_eq!(&sent[28..40], b"123456789abc");
    assert_eq!(sent[40..], hex("1a54a092"));

    assert_eq!(rig.submit(Sqe::read(1, 0, 1), 3, Data::Read(12)), 2);
    rig.get(&digest(c2h(12, 2, 0, b"123456789abc"), 24)).unwrap();
    assert_eq!(
        rig.seen(),
        [Seen::Data(3, 0, b"123456789abc".to_vec()), Seen::Done(3, Status::SUCCESS)]
    );
}

#[test]
fn t18_corrupted_data_fails_its_command_and_nothing_else() {
    for success in [false, true] {
        let mut rig = Rig::ready(digested(), 0);
        rig.submit(Sqe::read(1, 0, 1), 1, Data::Read(8));
        let mut bytes = digest(c2h(if success { 12 } else { 4 }, 4, 0, b"12345678"), 24);
        let last = bytes.len() - 1;
        bytes[last] ^= 0x10;
        rig.get(&bytes).unwrap();
        if !success {
            rig.get(&digest(resp(4, 0, 0), 0)).unwrap();
        }
        assert_eq!(rig.seen(), [Seen::Done(1, Status::TRANSIENT_TRANSPORT)], "no data is shown");
        assert!(rig.qp.is_ready());
    }
}

#[test]
fn t18_a_wrong_header_digest_ends_the_connection() {
    let mut rig = Rig::ready(digested(), 0);
    rig.submit(Sqe::flush(1), 1, Data::None);
    let mut bytes = digest(resp(4, 0, 0), 0);
    bytes[24..28].copy_from_slice(&[1, 2, 3, 4]);
    assert_eq!(rig.broken(&bytes), (3, 0x0403_0201));
    assert_eq!(rig.qp.outstanding().collect::<Vec<_>>(), [1], "it may have been done or not");
}

#[test]
fn p7_a_queue_that_the_target_gives_up_keeps_its_commands_for_the_next() {
    let mut rig = Rig::ready(config(), 0);
    rig.submit(Sqe::flush(1), 1, Data::None);
    rig.submit(Sqe::flush(1), 2, Data::None);
    // Command Aborted due to SQ Deletion: 08h of the generic statuses.
    let error = rig.get(&resp(4, 0x08, 0)).unwrap_err();
    assert_eq!(error, SessionError::QueueDeleted);
    assert!(rig.seen().is_empty() && rig.qp.is_closed());
    let mut outstanding: Vec<u64> = rig.qp.outstanding().collect();
    outstanding.sort_unstable();
    assert_eq!(outstanding, [1, 2]);
}

/// T18: a target that sends wrong replies to commands. In flight: read 4 of 16 bytes,
/// transfer-write 1 of 8192, in-capsule write 2; 0 was Connect.
#[test]
fn t18_hostile_targets_get_a_termination_request() {
    const HEADER: u16 = 1;
    const SEQUENCE: u16 = 2;
    const RANGE: u16 = 4;
    const LIMIT: u16 = 5;
    let join = |pdus: &[Vec<u8>]| pdus.concat();
    let cases: Vec<(&str, Vec<u8>, (u16, u32))> = vec![
        ("a completion without a command", resp(3, 0, 0), (HEADER, 20)),
        ("a completion of a far identifier", resp(0xffff, 0, 0), (HEADER, 20)),
        ("Connect completes again", resp(0, 0, 0), (HEADER, 20)),
        ("a completion that comes twice", join(&[resp(2, 0, 0), resp(2, 0, 0)]), (HEADER, 20)),
        ("a read without its data", resp(4, 0, 0), (SEQUENCE, 0)),
        ("a read with half its data", join(&[c2h(4, 4, 0, &[0; 8]), resp(4, 0, 0)]), (SEQUENCE, 0)),
        ("SUCCESS after half the data", c2h(12, 4, 0, &[0; 8]), (SEQUENCE, 0)),
        ("a write without asking for data", resp(1, 0, 0), (SEQUENCE, 0)),
        ("a write after half the data", join(&[r2t(1, 0, 0, 4096), resp(1, 0, 0)]), (SEQUENCE, 0)),
        ("data for no command", c2h(4, 9, 0, &[0; 8]), (HEADER, 8)),
        ("data for a write", c2h(4, 1, 0, &[0; 8]), (SEQUENCE, 0)),
        ("data that leaves a gap", c2h(4, 4, 8, &[0; 8]), (SEQUENCE, 0)),
        (
            "data that overlaps",
            join(&[c2h(0, 4, 0, &[0; 8]), c2h(4, 4, 4, &[0; 8])]),
            (SEQUENCE, 0),
        ),
        ("data twice", join(&[c2h(0, 4, 0, &[0; 8]), c2h(0, 4, 0, &[0; 8])]), (SEQUENCE, 0)),
        (
            "data after LAST_PDU",
            join(&[c2h(4, 4, 0, &[0; 8]), c2h(4, 4, 8, &[0; 8])]),
            (SEQUENCE, 0),
        ),
        ("data beyond the read", c2h(4, 4, 0, &[0; 20]), (RANGE, 0)),
        (
            "data beyond the end of the read",
            join(&[c2h(0, 4, 0, &[0; 16]), c2h(4, 4, 16, &[0; 4])]),
            (RANGE, 0),
        ),
        (
            "data after SUCCESS",
            join(&[c2h(12, 4, 0, &[0; 16]), c2h(12, 4, 0, &[0; 16])]),
            (HEADER, 8),
        ),
        (
            "data whose length lies",
            {
                let mut b = c2h(4, 4, 0, &[0; 8]);
                b[16] = 12;
                b
            },
            (HEADER, 16),
        ),
        (
            "a PDU length that lies",
            {
                let mut b = c2h(4, 4, 0, &[0; 8]);
                b[4] = 20;
                b
            },
            (HEADER, 4),
        ),
        ("R2T for no command", r2t(9, 0, 0, 8), (HEADER, 8)),
        ("R2T for a read", r2t(4, 0, 0, 8), (SEQUENCE, 0)),
        ("R2T for data that went with the capsule", r2t(2, 0, 0, 8), (SEQUENCE, 0)),
        ("R2T beyond the write", r2t(1, 0, 0, 8196), (RANGE, 0)),
        (
            "R2T beyond the end of the write",
            join(&[r2t(1, 0, 0, 8192), r2t(1, 0, 8192, 4)]),
            (RANGE, 0),
        ),
        ("R2T that leaves a gap", r2t(1, 0, 4096, 4096), (SEQUENCE, 0)),
        ("R2T twice", join(&[r2t(1, 0, 0, 4096), r2t(1, 0, 0, 4096)]), (SEQUENCE, 0)),
        (
            "two R2Ts at once where one was allowed",
            join(&[r2t(1, 0, 0, 4096), r2t(1, 1, 4096, 4096)]),
            (LIMIT, 0),
        ),
        ("a second ICResp", icresp(0, 0), (SEQUENCE, 0)),
        ("an ICReq", hex("00 00 80 00 80000000"), (SEQUENCE, 0)),
        ("a command", hex("04 00 48 00 48000000"), (SEQUENCE, 0)),
        ("an unknown PDU", hex("0b 00 18 00 18000000"), (HEADER, 0)),
        ("a response with a digest that is off", hex("05 01 18 00 1c000000"), (HEADER, 1)),
    ];
    for (name, bytes, want) in cases {
        let mut rig = Rig::ready(config(), 0);
        rig.qp.set_in_capsule(4096);
        assert_eq!(rig.submit(Sqe::read(1, 0, 1), 10, Data::Read(16)), 4);
        let big: [Payload; 1] = [vec![0; 8192].into()];
        assert_eq!(rig.submit(Sqe::write(1, 0, 16), 11, Data::Write(&big)), 1);
        let small: [Payload; 1] = [vec![0; 4096].into()];
        assert_eq!(rig.submit(Sqe::write(1, 0, 8), 12, Data::Write(&small)), 2);
        assert_eq!(rig.broken(&bytes), want, "{name}");
        assert_eq!(Arc::strong_count(&big[0]), 1, "{name}: its data is dropped");
        let done = rig.seen.iter().filter(|s| matches!(s, Seen::Done(..))).count();
        assert_eq!(rig.qp.outstanding().count(), 3 - done, "{name}: the rest may be replayed");
    }
}

/// T18: an answer to a command that was not sent can't be genuine; and the bytes that wait to be
/// sent would grow without a bound, since each answer makes space for another command.
#[test]
fn t18_nothing_is_answered_before_it_was_sent() {
    let piece: [Payload; 1] = [vec![0; 8192].into()];
    let small: [Payload; 1] = [vec![1; 512].into()];
    // Commands 4, 1 and 2: a read, a write by R2T, and a write whose data goes with it.
    let busy = |sent: usize| {
        let mut rig = Rig::ready(QpConfig { maxr2t: 2, ..config() }, 0);
        rig.qp.set_in_capsule(4096);
        rig.submit(Sqe::read(1, 3, 1), 0, Data::Read(16));
        rig.submit(Sqe::write(1, 0, 16), 1, Data::Write(&piece));
        rig.submit(Sqe::write(1, 0, 1), 2, Data::Write(&small));
        rig.out.consume(sent);
        rig
    };
    let all = 3 * 72 + 512;
    let cases = [
        ("a completion", resp(2, 0, 0), all),
        ("a refusal", resp(2, 0x080, 0), all - 512),
        ("a refusal of a transfer", resp(1, 0x080, 0), 2 * 72),
        ("data", c2h(4, 4, 0, &[0; 16]), 72),
        ("an R2T", r2t(1, 0, 0, 8192), 2 * 72),
    ];
    for (what, pdu, needs) in cases {
        let error = busy(needs - 1).get_early(&pdu).expect_err(what);
        assert!(error.to_string().contains("sent"), "{what}: {error}");
        assert!(busy(needs).get_early(&pdu).is_ok(), "{what}, in time");
    }
    // A transfer is complete once all its data has been sent; it may fail before.
    let transfer = |more: usize, status: u16| {
        let mut rig = busy(all);
        rig.get_early(&r2t(1, 0, 0, 4096)).unwrap();
        rig.get_early(&r2t(1, 0, 4096, 4096)).expect("two at a time were allowed");
        rig.out.consume(more);
        rig.get_early(&resp(1, status, 0))
    };
    let data = 2 * (24 + 4096);
    assert!(transfer(data - 1, 0).is_err());
    assert!(transfer(data, 0).is_ok());
    assert!(transfer(0, 0x080).is_ok());
}

#[test]
fn t18_the_handshake_in_the_wrong_order() {
    let fresh = || {
        let mut rig = Rig::new(config());
        rig.qp.start(&mut rig.out);
        rig
    };
    assert_eq!(fresh().broken(&resp(0, 0, 0)), (2, 0));
    assert_eq!(fresh().broken(&c2h(4, 0, 0, &[0; 8])), (2, 0));
    assert_eq!(fresh().broken(&r2t(0, 0, 0, 8)), (2, 0));
    assert_eq!(fresh().broken(&icresp(0, 1)), (1, 11), "digests that were not asked for");
    assert_eq!(fresh().broken(&icresp(32, 0)), (1, 10));
    let mut small = icresp(0, 0);
    small[13] = 0;
    assert_eq!(fresh().broken(&small), (1, 12), "MAXH2CDATA 0");
    // Before ICReq was sent.
    let mut rig = Rig::new(config());
    assert_eq!(rig.broken(&icresp(0, 0)), (2, 0));
    // While Connect is in flight, no other command can be completed, and no data requested.
    for (bytes, want) in [(resp(1, 0, 0), 1), (r2t(0, 0, 0, 8), 2), (c2h(4, 0, 0, &[0; 8]), 2)] {
        let mut rig = fresh();
        rig.get(&icresp(0, 0)).unwrap();
        let (fes, _) = rig.broken(&bytes);
        assert_eq!(fes, want);
        assert_eq!(rig.qp.outstanding().count(), 0);
    }
}

#[test]
fn refusals_name_the_field_and_the_reason() {
    let refused = |status: u16, result: u32| {
        let mut rig = Rig::new(config());
        rig.qp.start(&mut rig.out);
        rig.get(&icresp(0, 0)).unwrap();
        rig.sent();
        let e = rig.get(&resp(0, status, result)).unwrap_err();
        assert!(rig.out.is_empty(), "no protocol error, no termination request");
        assert!(rig.qp.is_closed());
        e.to_string()
    };
    assert_eq!(
        refused(0x184 | 0x4000, 0),
        "the target refused queue 1 of nqn.2026-01.io.example:drives: \
         connect: host not allowed (1/84h, do not retry)"
    );
    assert!(refused(0x182, 0x1_0100).ends_with("(1/82h): no such subsystem"));
    assert!(refused(0x182, 0x1_0010).ends_with("(1/82h): the controller id"));
    assert!(refused(0x182, 0x0_002a).ends_with("(1/82h): the queue id"));
    assert!(refused(0x182, 0x0_0030).ends_with("(1/82h): byte 48 of the connect command"));
    assert!(refused(0, 0x2_0001).contains("to authenticate, and no secret"));
    assert!(refused(0, 0x4_0001).contains("a secure channel"));

    let mut rig = Rig::new(digested());
    rig.qp.start(&mut rig.out);
    let icreq = rig.sent();
    assert_eq!(icreq[11], 3, "both digests are asked for");
    assert_eq!(rig.get(&icresp(0, 2)), Err(SessionError::NoDigests("header")));
    let mut rig = Rig::new(digested());
    rig.qp.start(&mut rig.out);
    assert_eq!(rig.get(&icresp(0, 1)), Err(SessionError::NoDigests("data")));

    let mut rig = Rig::ready(config(), 0);
    rig.submit(Sqe::flush(1), 9, Data::None);
    rig.sent();
    let e = rig.get(&hex("03 00 18 00 18000000 0500 00000000 00000000000000000000")).unwrap_err();
    assert_eq!(
        format!("{e}"),
        "the target ended the connection: transfer limit exceeded (FES 0x5, FEI 0x0)"
    );
    assert!(rig.out.is_empty());
    assert_eq!(rig.qp.outstanding().collect::<Vec<_>>(), [9]);
}

/// A malformed termination request ends the connection without an answer (TCP §3.5).
#[test]
fn t18_termination_requests_are_not_answered() {
    for bytes in ["03 00 18 00 99000000", "03 00 18 00 17000000", "03 00 20 00 18000000"] {
        let mut rig = Rig::ready(config(), 0);
        rig.sent();
        assert!(matches!(rig.get(&hex(bytes)), Err(SessionError::Protocol(_))));
        assert!(rig.out.is_empty() && rig.qp.is_closed());
    }
}

#[test]
fn commands_that_cannot_be_sent_are_refused_whole() {
    let mut rig = Rig::ready(config(), 0);
    let submit = |rig: &mut Rig, data: Data<'_, Payload>| {
        rig.qp.submit(Sqe::flush(1), 0, data, &mut rig.out)
    };
    assert_eq!(
        submit(&mut rig, Data::Bytes(&[0; 4])),
        Err(SubmitError::TooLong { len: 4, max: 0 }),
        "an I/O capsule whose size is not known yet takes nothing"
    );
    assert_eq!(
        submit(&mut rig, Data::Read(16388)),
        Err(SubmitError::TooLong { len: 16388, max: 16384 })
    );
    assert_eq!(submit(&mut rig, Data::Read(9)), Err(SubmitError::Misaligned { len: 9 }));
    let odd: [Payload; 1] = [vec![0; 9].into()];
    assert_eq!(submit(&mut rig, Data::Write(&odd)), Err(SubmitError::Misaligned { len: 9 }));
    for _ in 0..3 {
        submit(&mut rig, Data::None).unwrap();
    }
    rig.sent();
    assert_eq!(submit(&mut rig, Data::None), Err(SubmitError::Full));
    assert!(rig.out.is_empty());
    assert_eq!((rig.qp.space(), rig.qp.in_flight()), (0, 3));
    rig.qp.close();
    assert_eq!(submit(&mut rig, Data::None), Err(SubmitError::NotReady));
}

/// T18: whatever a target sends, damaged or not, no panic, and no command is done twice.
#[test]
fn t18_damaged_streams_never_confuse_it() {
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let (mut ended, mut survived) = (0, 0);
    for _ in 0..20_000 {
        let bits = random.next();
        let config = if bits & 1 == 0 { config() } else { digested() };
        let mut rig = Rig::ready(QpConfig { maxr2t: 2, ..config }, 0);
        rig.submit(Sqe::read(1, 0, 1), 0, Data::Read(16));
        let piece: [Payload; 1] = [vec![0; 9000].into()];
        rig.submit(Sqe::write(1, 0, 16), 1, Data::Write(&piece));
        rig.submit(Sqe::flush(1), 2, Data::None);
        let mut pdus = vec![
            c2h(0, 4, 0, &[7; 8]),
            c2h(if bits & 2 == 0 { 4 } else { 12 }, 4, 8, &[7; 8]),
            r2t(1, 3, 0, 8000),
            r2t(1, 3, 8000, 1000),
            resp(1, 0, 0),
            resp(2, 0, 0),
        ];
        let (a, b) = (random.index(pdus.len()), random.index(pdus.len()));
        pdus.swap(a, b);
        let mut pdus: Vec<Vec<u8>> = pdus
            .into_iter()
            .map(|pdu| match bits & 1 {
                0 => pdu,
                _ if pdu[0] == 7 => digest(pdu, 24),
                _ => digest(pdu, 0),
            })
            .collect();
        for _ in 0..random.below(3) {
            let pdu = random.index(pdus.len());
            let at = random.index(pdus[pdu].len());
            pdus[pdu][at] ^= 1 << random.below(8);
        }
        // In two parts, between which everything is sent.
        let late = pdus.split_off(4);
        let mut stream = Vec::new();
        let mut get = |part: Vec<Vec<u8>>| {
            stream.extend(part.concat());
            let used = rig.get(&stream)?;
            assert!(used <= stream.len());
            stream.drain(..used);
            Ok::<(), SessionError>(())
        };
        match get(pdus).and_then(|()| get(late)) {
            Ok(()) => survived += 1,
            Err(_) => {
                assert!(rig.qp.is_closed());
                ended += 1;
            }
        }
        let mut done = [0; 3];
        for seen in rig.seen() {
            if let Seen::Done(user, _) = seen {
                done[user as usize] += 1;
            }
        }
        for user in rig.qp.outstanding() {
            done[user as usize] += 1;
        }
        assert_eq!(done, [1, 1, 1], "each command is either done, once, or outstanding");
    }
    assert!(ended > 3_000 && survived > 3_000, "{ended} ended, {survived} survived");
}
