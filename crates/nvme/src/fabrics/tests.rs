//! Fabrics commands byte by byte; the expected bytes come from the specification.

use super::*;
use std::vec;

fn entry(fields: &[(usize, &[u8])]) -> [u8; 64] {
    let mut b = [0; 64];
    for (at, bytes) in fields {
        b[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    b
}

#[test]
fn connect_bytes() {
    let c = Connect { recfmt: 0, qid: 3, sqsize: 127, cattr: CATTR_NO_SQ_FLOW, kato_ms: 120_000 };
    let sqe = Sqe::connect(&c);
    let want =
        entry(&[(0, &[0x7f]), (4, &[0x01]), (40, &[0, 0, 3, 0, 127, 0, 4, 0, 0xc0, 0xd4, 1, 0])]);
    assert_eq!(sqe.0, want);
    assert_eq!(sqe.fctype(), fctype::CONNECT);
    assert_eq!(sqe.connect_fields(), c);
}

#[test]
fn connect_data_bytes() {
    let mut want = vec![0u8; 1024];
    want[..16].copy_from_slice(b"0123456789abcdef");
    want[16..18].copy_from_slice(&[0xff, 0xff]);
    let (sub, host) = ("nqn.2026-01.io.example:drives", "nqn.2014-08.org.nvmexpress:uuid:1");
    want[256..256 + sub.len()].copy_from_slice(sub.as_bytes());
    want[512..512 + host.len()].copy_from_slice(host.as_bytes());
    let data = ConnectData::decode(&want).unwrap();
    assert_eq!((data.subnqn.as_str(), data.hostnqn.as_str()), (sub, host));
    assert_eq!((data.cntlid, &data.hostid), (CNTLID_ANY, b"0123456789abcdef"));
    assert_eq!(data.encode()[..], want[..]);

    // T18: the completion names the field in error as the specification demands.
    let bad = |at: usize, bytes: &[u8]| {
        let mut b = want.clone();
        b[at..at + bytes.len()].copy_from_slice(bytes);
        let e = ConnectData::decode(&b).unwrap_err();
        (e.offset, e.result())
    };
    assert_eq!(bad(256, &[b'x'; 256]), (256, 0x1_0100));
    assert_eq!(bad(256, b"iqn.2026"), (256, 0x1_0100));
    assert_eq!(bad(256, &[0]), (256, 0x1_0100));
    assert_eq!(bad(512, b"x"), (512, 0x1_0200));
    assert_eq!(bad(515, &[0xff]), (512, 0x1_0200));
    assert_eq!(ConnectData::decode(&want[..1023]).unwrap_err().offset, 0);
    // The host's name alone may be missing.
    let mut nameless = want.clone();
    nameless[512] = 0;
    assert_eq!(ConnectData::decode(&nameless).unwrap().hostnqn, "");
}

#[test]
fn properties() {
    let get = Sqe::property_get(property::CAP, true);
    assert_eq!(get.0, entry(&[(0, &[0x7f]), (4, &[4]), (40, &[1])]));
    assert_eq!((get.property_offset(), get.property_size()), (0, Some(8)));
    let set = Sqe::property_set(property::CC, false, 0x0046_0001);
    let want = entry(&[(0, &[0x7f]), (44, &[0x14, 0, 0, 0, 1, 0, 0x46, 0])]);
    assert_eq!(set.0, want);
    assert_eq!((set.property_value(), set.property_size()), (0x0046_0001, Some(4)));
    let mut odd = get;
    odd.0[40] = 2;
    assert_eq!(odd.property_size(), None);
    assert_eq!(Sqe::disconnect().0, entry(&[(0, &[0x7f]), (4, &[8])]));
}

#[test]
fn property_values() {
    // MQES 127, CQR, TO 15 × 500 ms, NVM command set.
    let cap = Cap { mqes: 127, timeout: 15, mpsmin: 0, css: 1 };
    assert_eq!(cap.value(), 0x0000_0020_0f01_007f);
    assert_eq!(Cap::from_value(0x0000_0020_0f01_007f), cap);
    assert_eq!(Cc::ENABLE.0, 0x0046_0001);
    assert!(Cc::ENABLE.enabled() && Cc::ENABLE.shutdown() == 0);
    assert_eq!((Cc::ENABLE.iosqes(), Cc::ENABLE.iocqes()), (6, 4));
    assert_eq!(Cc::ENABLE.with_shutdown().0, 0x0046_4001);
    assert!(Csts(0b1001).ready() && Csts(0b1001).shutdown_done() && !Csts(1).shutdown_done());
    assert!(Csts(2).fatal());
}

#[test]
fn names() {
    assert!(check_nqn(DISCOVERY_NQN).is_ok());
    assert!(
        check_nqn("nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6").is_ok()
    );
    for bad in ["", "nqn.", "nqn.2014-8.org", "nqn.2014-08.", "NQN.2014-08.org", "nqn.2014-08.a\nb"]
    {
        assert!(check_nqn(bad).is_err(), "{bad}");
    }
    let long = std::format!("nqn.2014-08.{}", "a".repeat(212));
    assert!(check_nqn(&long).is_err());
    assert!(check_nqn(&long[..223]).is_ok());
}
