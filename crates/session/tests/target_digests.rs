//! The target's reports of wrong digests.

mod world;

use riopipe_testkit::peer::{self, Digests, HOSTID, HOSTNQN};
use world::{SUBNQN, World, block};

const BOTH: Digests = Digests { header: true, data: true };
const TRANSIENT_TRANSPORT: u16 = 0x22;

fn io_queue(w: &mut World) -> usize {
    let (_, cntlid) = w.admin();
    let io = w.initialize(BOTH, 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    assert_eq!(w.call(io, peer::connect(0, 1, 15, 0), &data).status, 0);
    io
}

fn reports(w: &World) -> Vec<&String> {
    w.host.log.iter().filter(|event| event.contains("DigestError")).collect()
}

/// The PDU with another last byte.
fn changed(mut pdu: Vec<u8>) -> Vec<u8> {
    *pdu.last_mut().unwrap() ^= 1;
    pdu
}

#[test]
fn a_wrong_data_digest_is_reported_with_its_command() {
    let mut w = World::new(&[false]);
    let io = io_queue(&mut w);
    assert_eq!(w.call(io, peer::write(1, 1, 0, 1), &block(1)).status, 0);
    assert!(reports(&w).is_empty());
    w.send(io, &changed(peer::capsule(BOTH, &peer::write(7, 1, 0, 1).0, &block(2))));
    assert_eq!(w.next(io).unwrap().completion().status, TRANSIENT_TRANSPORT);
    let [report] = reports(&w)[..] else { panic!("{:?}", w.host.log) };
    assert!(report.contains("Data { cid: 7, opcode: Some(1) }"), "{report}");
    assert!(report.contains(HOSTNQN) && report.contains("qid: 1"), "{report}");
    // Of a transfer in pieces, each piece counts.
    w.command(io, peer::write_r2t(8, 1, 0, 3), &[]);
    let ttag = w.next(io).unwrap().u16(10);
    for piece in 0..3u32 {
        let pdu = peer::h2c_data(BOTH, 8, ttag, piece * 4096, &block(3), piece == 2);
        w.send(io, &if piece == 1 { pdu } else { changed(pdu) });
    }
    assert_eq!(w.next(io).unwrap().completion().status, TRANSIENT_TRANSPORT);
    assert_eq!(reports(&w).len(), 3);
    assert!(reports(&w)[2].contains("Data { cid: 8, opcode: Some(1) }"));
}

#[test]
fn a_wrong_header_digest_is_reported_and_ends_the_connection() {
    let mut w = World::new(&[false]);
    let io = io_queue(&mut w);
    let mut pdu = peer::capsule(BOTH, &peer::read(7, 1, 0, 1).0, &[]);
    pdu[72] ^= 1;
    w.send(io, &pdu);
    assert!(w.links[io].closed.is_some());
    let [report] = reports(&w)[..] else { panic!("{:?}", w.host.log) };
    assert!(report.contains("digest: Header") && report.contains("qid: 1"), "{report}");
    // Another violation of the protocol is no wrong digest.
    let other = w.accept();
    w.send(other, &[0x80; 128]);
    assert!(w.links[other].closed.is_some());
    assert_eq!(reports(&w).len(), 1);
}

/// The data of Connect has a digest, too.
#[test]
fn a_wrong_digest_before_connect_is_reported() {
    let mut w = World::new(&[false]);
    let at = w.initialize(BOTH, 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, 0xffff);
    w.send(at, &changed(peer::capsule(BOTH, &peer::connect(3, 0, 31, 0).0, &data)));
    assert_eq!(w.next(at).unwrap().completion().status, TRANSIENT_TRANSPORT);
    let [report] = reports(&w)[..] else { panic!("{:?}", w.host.log) };
    assert!(report.contains("cntlid: None") && report.contains("cid: 3"), "{report}");
    assert_eq!(w.call(at, peer::connect(4, 0, 31, 0), &data).status, 0);
}
