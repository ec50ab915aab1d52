//! PDUs byte by byte. The expected bytes come from the specification, never from the encoders; the
//! digests were computed with an independent bitwise CRC32C.

use super::*;
use crate::command::Status;
use crate::digest::soft;
use riopipe_testkit::hex;
use std::vec::Vec;

fn rx(role: Role) -> Rx {
    Rx { connected: true, data_max: 1 << 20, ..Rx::new(role, soft) }
}

fn with_digests(role: Role) -> Rx {
    Rx { header_digest: true, data_digest: true, ..rx(role) }
}

fn one(rx: &Rx, bytes: &[u8]) -> Parsed {
    let parsed = rx.parse(bytes).unwrap().expect("a whole PDU");
    assert_eq!(parsed.len, bytes.len());
    for cut in 0..bytes.len() {
        assert_eq!(rx.parse(&bytes[..cut]), Ok(None), "cut at {cut}");
        assert!(rx.need(&bytes[..cut]) > cut && rx.need(&bytes[..cut]) <= bytes.len());
    }
    parsed
}

/// TCP §3.6.2.2 and §3.6.2.3: 128 bytes, no digests, PDO reserved.
fn ic(kind: u8, fields: &str) -> Vec<u8> {
    let mut b = hex("00 00 80 00 80000000");
    b[0] = kind;
    b.extend(hex(fields));
    b.resize(128, 0);
    b
}

#[test]
fn icreq() {
    let bytes = ic(0x00, "0000 03 03 0f000000");
    let want = IcReq { pfv: 0, hpda: 3, header_digest: true, data_digest: true, maxr2t: 15 };
    let parsed = one(&Rx::new(Role::Controller, soft), &bytes);
    assert_eq!(parsed.pdu, Pdu::IcReq(want));
    let mut out = Vec::new();
    want.encode(&mut out);
    assert_eq!(out, bytes);
}

#[test]
fn icresp() {
    let bytes = ic(0x01, "0000 01 02 00000200");
    let want =
        IcResp { pfv: 0, cpda: 1, header_digest: false, data_digest: true, maxh2cdata: 0x20000 };
    assert_eq!(one(&Rx::new(Role::Host, soft), &bytes).pdu, Pdu::IcResp(want));
    let mut out = Vec::new();
    want.encode(&mut out);
    assert_eq!(out, bytes);
}

/// A write of one block at LBA 11223344h, command 5, namespace 1, 8 bytes in the capsule.
const WRITE_SQE: &str = "01 40 0500 01000000 00000000 00000000 0000000000000000
    0000000000000000 08000000 000000 01
    44332211 00000000 00000000 00000000 00000000 00000000";

fn write_sqe() -> Sqe {
    let mut sqe = Sqe::write(1, 0x1122_3344, 1);
    sqe.set_cid(5);
    sqe.set_sgl(crate::command::Sgl::InCapsule { offset: 0, len: 8 });
    sqe
}

#[test]
fn a_command_capsule_with_data() {
    let mut bytes = hex("04 00 48 48 50000000");
    bytes.extend(hex(WRITE_SQE));
    bytes.extend(b"abcdefgh");
    let parsed = one(&rx(Role::Controller), &bytes);
    assert_eq!(parsed.pdu, Pdu::CapsuleCmd { sqe: write_sqe() });
    assert_eq!(&bytes[parsed.data], b"abcdefgh");
    assert!(parsed.data_digest_ok);

    let mut out = Vec::new();
    Tx::new(soft).capsule_cmd(&write_sqe(), 8, &mut out);
    assert_eq!(out, bytes[..72]);
}

#[test]
fn a_command_capsule_with_digests_and_padding() {
    // CPDA 3: data at multiples of 16 bytes. Header 72, digest 4, 4 of padding, data at 80.
    let mut bytes = hex("04 03 48 50 5c000000");
    bytes.extend(hex(WRITE_SQE));
    bytes.extend(hex("c0baed25 00000000"));
    bytes.extend(b"abcdefgh");
    bytes.extend(hex("b721940a"));
    let rx = Rx { align: 16, ..with_digests(Role::Controller) };
    let parsed = one(&rx, &bytes);
    assert_eq!(parsed.pdu, Pdu::CapsuleCmd { sqe: write_sqe() });
    assert_eq!(&bytes[parsed.data], b"abcdefgh");
    assert!(parsed.data_digest_ok);

    let tx = Tx { header_digest: true, data_digest: true, align: 16, crc: soft };
    let mut out = Vec::new();
    tx.capsule_cmd(&write_sqe(), 8, &mut out);
    assert_eq!(out, bytes[..80]);
    out.extend(b"abcdefgh");
    tx.data_digest([&b"abc"[..], b"defgh"], &mut out);
    assert_eq!(out, bytes);

    // A wrong data digest is not fatal (TCP §3.5).
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    assert!(!rx.parse(&bytes).unwrap().unwrap().data_digest_ok);
    // A wrong header digest is fatal; the information is the digest received.
    bytes[40] ^= 1;
    let e = rx.parse(&bytes).unwrap_err();
    assert_eq!((e.fes, e.fei), (Fes::HeaderDigest, 0x25ed_bac0));
}

#[test]
fn a_command_capsule_without_data() {
    // Flush, command 9, namespace 2, an empty transport SGL.
    let mut bytes = hex("04 00 48 00 48000000 00 40 0900 02000000");
    bytes.resize(72, 0);
    bytes[8 + 39] = 0x5a;
    let mut sqe = Sqe::flush(2);
    sqe.set_cid(9);
    sqe.set_sgl(crate::command::Sgl::Transport { len: 0 });
    let parsed = one(&rx(Role::Controller), &bytes);
    assert_eq!((parsed.pdu, parsed.data.len()), (Pdu::CapsuleCmd { sqe }, 0));
    let mut out = Vec::new();
    Tx::new(soft).capsule_cmd(&sqe, 0, &mut out);
    assert_eq!(out, bytes);
    // Some hosts state a data offset although there is no data; the field is reserved then.
    bytes[3] = 72;
    assert_eq!(one(&rx(Role::Controller), &bytes).data.len(), 0);
}

#[test]
fn a_response_capsule() {
    let cqe = Cqe::new(0x2a, 7, 1, Status::SUCCESS, 0x1234_5678);
    let plain = hex("05 00 18 00 18000000 78563412 00000000 0700 0100 2a00 0000");
    assert_eq!(one(&rx(Role::Host), &plain).pdu, Pdu::CapsuleResp { cqe });
    let mut out = Vec::new();
    Tx::new(soft).capsule_resp(&cqe, &mut out);
    assert_eq!(out, plain);

    let mut digested = hex("05 01 18 00 1c000000");
    digested.extend(&plain[8..]);
    digested.extend(hex("07e9fb8f"));
    assert_eq!(one(&with_digests(Role::Host), &digested).pdu, Pdu::CapsuleResp { cqe });
    let mut out = Vec::new();
    Tx { header_digest: true, data_digest: true, ..Tx::new(soft) }.capsule_resp(&cqe, &mut out);
    assert_eq!(out, digested);

    // Status LBA out of range, do not retry: (4000h | 80h) << 1.
    let failed = hex("05 00 18 00 18000000 00000000 00000000 0000 0000 0100 0081");
    let Pdu::CapsuleResp { cqe } = one(&rx(Role::Host), &failed).pdu else { panic!() };
    assert_eq!(cqe.status(), Status::LBA_OUT_OF_RANGE.with_dnr());
}

#[test]
fn r2t() {
    let bytes = hex("09 00 18 00 18000000 0300 0700 00200000 00100000 00000000");
    let want = R2t { cccid: 3, ttag: 7, r2to: 0x2000, r2tl: 0x1000 };
    assert_eq!(one(&rx(Role::Host), &bytes).pdu, Pdu::R2t(want));
    let mut out = Vec::new();
    Tx::new(soft).r2t(&want, &mut out);
    assert_eq!(out, bytes);
}

#[test]
fn h2c_data() {
    // LAST_PDU; 4 bytes at offset 16 of command 3, transfer 7.
    let mut bytes = hex("06 04 18 18 1c000000 0300 0700 10000000 04000000 00000000");
    bytes.extend([1, 2, 3, 4]);
    let want = DataHdr { cccid: 3, ttag: 7, datao: 16, datal: 4, last: true, success: false };
    let parsed = one(&rx(Role::Controller), &bytes);
    assert_eq!(parsed.pdu, Pdu::H2cData(want));
    assert_eq!(bytes[parsed.data], [1, 2, 3, 4]);
    let mut out = Vec::new();
    Tx::new(soft).h2c_data(&want, &mut out);
    assert_eq!(out, bytes[..24]);
}

#[test]
fn c2h_data() {
    // LAST_PDU, SUCCESS and both digests.
    let mut bytes = hex("07 0f 18 1c 24000000 0900 0000 00100000 04000000 00000000 499c89db");
    bytes.extend([1, 2, 3, 4]);
    bytes.extend(hex("f48c3029"));
    let want = DataHdr { cccid: 9, ttag: 0, datao: 4096, datal: 4, last: true, success: true };
    let parsed = one(&with_digests(Role::Host), &bytes);
    assert_eq!(parsed.pdu, Pdu::C2hData(want));
    assert_eq!(bytes[parsed.data.clone()], [1, 2, 3, 4]);
    assert!(parsed.data_digest_ok);
    let tx = Tx { header_digest: true, data_digest: true, ..Tx::new(soft) };
    let mut out = Vec::new();
    tx.c2h_data(&want, &mut out);
    assert_eq!(out, bytes[..28]);
}

#[test]
fn termination_requests() {
    // The header of an R2T with a wrong length, as FES 1 at offset 2.
    let offending = hex("09 00 19 00 18000000 0300 0700 00200000 00100000 00000000 ff");
    let e = rx(Role::Host).parse(&offending).unwrap_err();
    assert_eq!((e.fes, e.fei), (Fes::InvalidHeader, 2));
    let mut out = Vec::new();
    e.term_req().encode(Role::Controller, &offending, &mut out);
    let mut want = hex("02 00 18 00 31000000 0100 02000000 00000000000000000000");
    want.extend(&offending);
    assert_eq!(out, want);
    let parsed = one(&Rx::new(Role::Controller, soft), &out);
    assert_eq!(parsed.pdu, Pdu::H2cTermReq(TermReq { fes: 1, fei: 2 }));
    assert_eq!(out[parsed.data], offending);

    // Toward the host, of a PDU that is cut short; also while digests are on: it has none.
    let mut out = Vec::new();
    TermReq { fes: 3, fei: 0xdead_beef }.encode(Role::Host, &[4, 0, 72], &mut out);
    assert_eq!(out, hex("03 00 18 00 1b000000 0300 efbeadde 00000000000000000000 04 00 48"));
    let parsed = one(&with_digests(Role::Host), &out);
    assert_eq!(parsed.pdu, Pdu::C2hTermReq(TermReq { fes: 3, fei: 0xdead_beef }));

    // A termination request is never answered with another one.
    for kind in [2, 3] {
        let mut out = Vec::new();
        TermReq { fes: 1, fei: 4 }.encode(Role::Host, &[kind, 0, 24, 0, 255, 0, 0, 0], &mut out);
        assert!(out.is_empty());
    }

    // The answer never has more than 152 bytes, for any length that the header claims.
    let mut out = Vec::new();
    TermReq { fes: 1, fei: 2 }.encode(Role::Host, &[0xff; 600], &mut out);
    assert_eq!(out.len(), 152);
}

/// T18: each form of a malformed PDU, and its answer.
#[test]
fn t18_malformed_pdus_get_the_status_of_the_specification() {
    use Fes::{HeaderDigest, InvalidHeader, LimitExceeded, OutOfRange, Sequence, Unsupported};
    let host = rx(Role::Host);
    let ctrl = Rx { capsule_max: 8192, data_max: 8192, ..rx(Role::Controller) };
    let fresh_host = Rx::new(Role::Host, soft);
    let fresh_ctrl = Rx::new(Role::Controller, soft);
    let ctrl_d = Rx { capsule_max: 8192, data_max: 8192, ..with_digests(Role::Controller) };
    let host_d = with_digests(Role::Host);
    let aligned = Rx { align: 16, ..ctrl.clone() };

    // Name, receiver, bytes (zeroes follow, up to PLEN), answer.
    let cases: &[(&str, &Rx, &str, Fes, u32)] = &[
        ("unknown type", &host, "08 00 18 00 18000000", InvalidHeader, 0),
        ("unknown type", &ctrl, "ff 00 18 00 18000000", InvalidHeader, 0),
        ("capsule before ICReq", &fresh_ctrl, "04 00 48 00 48000000", Sequence, 0),
        ("response before ICResp", &fresh_host, "05 00 18 00 18000000", Sequence, 0),
        ("second ICReq", &ctrl, "00 00 80 00 80000000", Sequence, 0),
        ("second ICResp", &host, "01 00 80 00 80000000", Sequence, 0),
        ("ICReq to a host", &fresh_host, "00 00 80 00 80000000", Sequence, 0),
        ("ICResp to a controller", &fresh_ctrl, "01 00 80 00 80000000", Sequence, 0),
        ("capsule to a host", &host, "04 00 48 00 48000000", Sequence, 0),
        ("response to a controller", &ctrl, "05 00 18 00 18000000", Sequence, 0),
        ("C2HData to a controller", &ctrl, "07 04 18 18 1c000000", Sequence, 0),
        ("H2CData to a host", &host, "06 04 18 18 1c000000", Sequence, 0),
        ("R2T to a controller", &ctrl, "09 00 18 00 18000000", Sequence, 0),
        ("H2CTermReq to a host", &host, "02 00 18 00 18000000", Sequence, 0),
        ("C2HTermReq to a controller", &ctrl, "03 00 18 00 18000000", Sequence, 0),
        ("ICReq version 1", &fresh_ctrl, "00 00 80 00 80000000 0100", Unsupported, 8),
        ("ICReq HPDA 32", &fresh_ctrl, "00 00 80 00 80000000 0000 20", InvalidHeader, 10),
        ("ICReq HLEN", &fresh_ctrl, "00 00 7f 00 80000000", InvalidHeader, 2),
        ("ICReq too short", &fresh_ctrl, "00 00 80 00 7f000000", InvalidHeader, 4),
        ("ICReq too long", &fresh_ctrl, "00 00 80 00 81000000", InvalidHeader, 4),
        (
            "ICResp MAXH2CDATA below 4096",
            &fresh_host,
            "01 00 80 00 80000000 0000 00 00 fc0f0000",
            InvalidHeader,
            12,
        ),
        (
            "ICResp MAXH2CDATA not in dwords",
            &fresh_host,
            "01 00 80 00 80000000 0000 00 00 02100000",
            InvalidHeader,
            12,
        ),
        ("ICResp version 1", &fresh_host, "01 00 80 00 80000000 0100", Unsupported, 8),
        ("capsule HLEN", &ctrl, "04 00 47 48 50000000", InvalidHeader, 2),
        ("capsule PLEN inside header", &ctrl, "04 00 48 48 47000000", InvalidHeader, 4),
        ("capsule PLEN 0", &ctrl, "04 00 48 48 00000000", InvalidHeader, 4),
        ("capsule PDO inside header", &ctrl, "04 00 48 44 50000000", InvalidHeader, 3),
        ("capsule PDO 0 with data", &ctrl, "04 00 48 00 50000000", InvalidHeader, 3),
        ("capsule PDO beyond 128", &ctrl, "04 00 48 84 90000000", InvalidHeader, 3),
        ("capsule PDO misaligned", &ctrl, "04 00 48 49 50000000", InvalidHeader, 3),
        ("capsule PDO against CPDA", &aligned, "04 00 48 48 50000000", InvalidHeader, 3),
        ("capsule PDO at the end", &ctrl, "04 00 48 50 50000000", InvalidHeader, 4),
        ("capsule PDO beyond the end", &ctrl, "04 00 48 54 50000000", InvalidHeader, 4),
        ("capsule beyond 8 KiB", &ctrl, "04 00 48 48 49200000", LimitExceeded, 0),
        ("capsule of 4 GiB", &ctrl, "04 00 48 48 ffffffff", LimitExceeded, 0),
        ("header digest unasked for", &ctrl, "04 01 48 00 4c000000", InvalidHeader, 1),
        ("data digest unasked for", &ctrl, "04 02 48 48 50000000", InvalidHeader, 1),
        ("data digest without data", &ctrl, "04 02 48 00 48000000", InvalidHeader, 1),
        ("header digest missing", &ctrl_d, "04 00 48 00 48000000", InvalidHeader, 1),
        ("no space for the header digest", &ctrl_d, "04 01 48 00 48000000", InvalidHeader, 4),
        ("data digest missing", &ctrl_d, "04 01 48 4c 54000000", InvalidHeader, 1),
        ("PDO on the header digest", &ctrl_d, "04 03 48 48 58000000", InvalidHeader, 3),
        ("no space for the data digest", &ctrl_d, "04 03 48 4c 50000000", InvalidHeader, 4),
        ("half a data digest", &ctrl_d, "04 03 48 4c 4e000000", InvalidHeader, 4),
        ("wrong header digest", &ctrl_d, "04 01 48 00 4c000000", HeaderDigest, 0),
        ("wrong header digest", &host_d, "05 01 18 00 1c000000", HeaderDigest, 0),
        ("response HLEN", &host, "05 00 17 00 18000000", InvalidHeader, 2),
        ("response with data", &host, "05 00 18 18 1c000000", InvalidHeader, 4),
        ("response of 4 GiB", &host, "05 00 18 18 ffffffff", InvalidHeader, 4),
        ("R2T HLEN", &host, "09 00 00 00 18000000", InvalidHeader, 2),
        ("R2T with data", &host, "09 00 18 18 1c000000", InvalidHeader, 4),
        ("R2T of nothing", &host, "09 00 18 00 18000000 0000", InvalidHeader, 16),
        (
            "R2T beyond 4 GiB",
            &host,
            "09 00 18 00 18000000 0000 0000 fcffffff 08000000",
            OutOfRange,
            0,
        ),
        ("H2CData without data", &ctrl, "06 04 18 18 18000000", InvalidHeader, 16),
        (
            "H2CData DATAO not in dwords",
            &ctrl,
            "06 04 18 18 1c000000 0000 0000 02000000 04000000",
            InvalidHeader,
            12,
        ),
        (
            "C2HData DATAL not in dwords",
            &host,
            "07 04 18 18 1b000000 0000 0000 00000000 03000000",
            InvalidHeader,
            16,
        ),
        (
            "R2T R2TO not in dwords",
            &host,
            "09 00 18 00 18000000 0000 0000 01000000 04000000",
            InvalidHeader,
            12,
        ),
        (
            "R2T R2TL not in dwords",
            &host,
            "09 00 18 00 18000000 0000 0000 00000000 05000000",
            InvalidHeader,
            16,
        ),
        ("several errors: FLAGS before HLEN", &ctrl, "04 01 47 00 4c000000", InvalidHeader, 1),
        ("several errors: HLEN before PDO", &ctrl, "04 00 47 01 50000000", InvalidHeader, 2),
        ("several errors: PDO before PLEN", &ctrl, "04 00 48 01 49000000", InvalidHeader, 3),
        (
            "H2CData DATAL too long",
            &ctrl,
            "06 04 18 18 1c000000 0000 0000 00000000 08000000",
            InvalidHeader,
            16,
        ),
        (
            "H2CData DATAL too short",
            &ctrl,
            "06 04 18 18 20000000 0000 0000 00000000 04000000",
            InvalidHeader,
            16,
        ),
        (
            "H2CData beyond 4 GiB",
            &ctrl,
            "06 04 18 18 1c000000 0000 0000 fcffffff 04000000",
            OutOfRange,
            0,
        ),
        ("H2CData beyond MAXH2CDATA", &ctrl, "06 04 18 18 1c200000", LimitExceeded, 0),
        ("C2HData beyond any read", &host, "07 04 18 18 1c001000", OutOfRange, 0),
        ("C2HData SUCCESS without LAST", &host, "07 08 18 18 1c000000", InvalidHeader, 1),
        ("termination request too long", &host, "03 00 18 00 99000000", InvalidHeader, 4),
        ("termination request too short", &host, "03 00 18 00 17000000", InvalidHeader, 4),
        ("termination request HLEN", &host, "03 00 10 00 18000000", InvalidHeader, 2),
    ];
    for (name, rx, bytes, fes, fei) in cases {
        let mut bytes = hex(bytes);
        let claimed = u32::from_le_bytes(bytes[4..8].try_into().unwrap()) as usize;
        bytes.resize(bytes.len().max(claimed.min(16384)), 0);
        let e = rx.parse(&bytes).expect_err(name);
        assert_eq!((e.fes, e.fei), (*fes, *fei), "{name}: {e}");
    }
}

/// T18: lengths are judged on the first 8 bytes, so that no buffer grows for a PDU that is refused.
#[test]
fn t18_lengths_are_judged_on_the_first_eight_bytes() {
    for (rx, bytes) in [
        (rx(Role::Host), "07 04 18 18 ffffff7f"),
        (rx(Role::Controller), "04 00 48 48 ffffff7f"),
        (rx(Role::Controller), "06 04 18 18 ffffff7f"),
        (rx(Role::Host), "05 00 18 00 ffffff7f"),
        (Rx::new(Role::Controller, soft), "00 00 80 00 ffffff7f"),
    ] {
        assert!(rx.parse(&hex(bytes)).is_err(), "{bytes}");
    }
}

/// The fast path through `parse` and the full check agree, for every negotiated setting.
#[test]
fn the_fast_path_agrees_with_the_full_check() {
    let roles = [Role::Controller, Role::Host];
    let bits = |set: u32| [set & 1 != 0, set & 2 != 0, set & 4 != 0];
    for (role, head) in
        roles.into_iter().flat_map(|r| ["04 00 48 48", "05 00 18 00"].map(|h| (r, h)))
    {
        for ([connected, header_digest, data_digest], align) in
            (0..8).map(bits).flat_map(|bits| [4, 8, 16].map(|align| (bits, align)))
        {
            let rx = Rx { connected, header_digest, data_digest, align, ..rx(role) };
            let rx = Rx { capsule_max: 64, ..rx };
            for (plen, have) in (0..200u32).flat_map(|plen| [100, 200].map(|have| (plen, have))) {
                let mut bytes = hex(head);
                bytes.extend(plen.to_le_bytes());
                bytes.resize(have, 0x5a);
                let long = rx.parse_checked(&bytes, bytes.first_chunk().unwrap());
                assert_eq!(rx.parse(&bytes), long, "{rx:?}: {plen} of {have}");
                if let Some((sqe, len)) = rx.plain_command(&bytes) {
                    let pdu = Pdu::CapsuleCmd { sqe };
                    let parsed = Parsed { pdu, data: 72..len, len, data_digest_ok: true };
                    assert_eq!(Ok(Some(parsed)), long, "{rx:?}: {plen} of {have}");
                }
            }
        }
    }
}

#[test]
fn each_flag_bit_has_one_meaning() {
    for (bits, header_digest, data_digest) in
        [(0, false, false), (1, true, false), (2, false, true), (3, true, true)]
    {
        let mut bytes = ic(0x00, "0000 00 00 00000000");
        bytes[11] = bits;
        let Pdu::IcReq(ic_req) = one(&Rx::new(Role::Controller, soft), &bytes).pdu else {
            panic!()
        };
        assert_eq!((ic_req.header_digest, ic_req.data_digest), (header_digest, data_digest));
        let mut bytes = ic(0x01, "0000 00 00 00100000");
        bytes[11] = bits;
        let Pdu::IcResp(ic_resp) = one(&Rx::new(Role::Host, soft), &bytes).pdu else { panic!() };
        assert_eq!((ic_resp.header_digest, ic_resp.data_digest), (header_digest, data_digest));
    }
    for (flags, last, success) in [("00", false, false), ("04", true, false), ("0c", true, true)] {
        let text = "18 18 1c000000 0300 0000 10000000 04000000 00000000 01020304";
        let bytes = hex(&std::format!("07 {flags} {text}"));
        let Pdu::C2hData(hdr) = one(&rx(Role::Host), &bytes).pdu else { panic!() };
        assert_eq!((hdr.last, hdr.success), (last, success), "{flags}");
        // SUCCESS is a reserved bit in the other direction.
        let bytes = hex(&std::format!("06 {flags} {text}"));
        let Pdu::H2cData(hdr) = one(&rx(Role::Controller), &bytes).pdu else { panic!() };
        assert_eq!((hdr.last, hdr.success), (last, false), "{flags}");
    }
    let bytes = hex("06 08 18 18 1c000000 0300 0000 10000000 04000000 00000000 01020304");
    assert!(rx(Role::Controller).parse(&bytes).is_ok(), "not a success without a last one");
}

#[test]
fn values_just_within_a_limit_are_accepted() {
    // Data at byte 128, the largest alignment.
    let mut bytes = hex("04 00 48 80 88000000");
    bytes.extend(hex(WRITE_SQE));
    bytes.resize(136, 7);
    let far = Rx { align: 128, ..rx(Role::Controller) };
    assert_eq!(one(&far, &bytes).data, 128..136);
    let bytes = ic(0x00, "0000 1f 00 00000000");
    let Pdu::IcReq(ic_req) = one(&Rx::new(Role::Controller, soft), &bytes).pdu else { panic!() };
    assert_eq!(ic_req.hpda, 31);
    let bytes = ic(0x01, "0000 00 00 00100000");
    let Pdu::IcResp(ic_resp) = one(&Rx::new(Role::Host, soft), &bytes).pdu else { panic!() };
    assert_eq!(ic_resp.maxh2cdata, 4096);

    let mut longest = Vec::new();
    TermReq { fes: 1, fei: 2 }.encode(Role::Controller, &[0xff; 600], &mut longest);
    assert_eq!(one(&Rx::new(Role::Controller, soft), &longest).data, 24..152);
    longest[4] += 1;
    assert!(Rx::new(Role::Controller, soft).parse(&longest).is_err());
}

#[test]
fn a_status_is_known_by_its_code() {
    let codes: Vec<_> = (0..=7).map(|code| Fes::from_code(code).map(|fes| fes as u16)).collect();
    let known = (1..=6).map(Some);
    assert_eq!(codes, [None].into_iter().chain(known).chain([None]).collect::<Vec<_>>());
}
