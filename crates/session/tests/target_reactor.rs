//! The questions of a reactor to a connection: how much to receive, when to check it again, and
//! whether it may be moved.

mod world;

use peer::{Digests, HOSTID, HOSTNQN};
use riopipe_session::target::limits::{DATA_STALL_NS, STALL_NS};
use riopipe_testkit::peer;
use world::{World, block};

const MS: u64 = 1_000_000;

/// How long until a connection has to be checked.
fn due(w: &World, at: usize) -> Option<u64> {
    w.links[at].conn.next_deadline().map(|due| due - w.host.now)
}

#[test]
fn a_connection_reports_when_it_is_to_be_checked_again() {
    let mut w = World::new(&[false]);
    let at = w.accept();
    assert_eq!(due(&w, at), Some(STALL_NS), "a host is to connect");
    w.host.now += 5;
    w.send(at, &peer::icreq(Digests::default(), 0));
    assert_eq!(due(&w, at), Some(STALL_NS));
    let (admin, cntlid) = w.admin_as(HOSTNQN, HOSTID, 1000);
    assert_eq!(due(&w, admin), Some(1000 * MS), "it is to send a keep-alive");
    let io = w.io(cntlid, 1);
    assert_eq!(due(&w, io), None, "at rest");
    // Half a PDU after a long rest, and a few bytes more.
    w.host.now += 2 * STALL_NS;
    let bytes = peer::capsule(Digests::default(), &peer::write(1, 1, 0, 1).0, &block(1));
    assert_eq!(w.links[io].conn.need(&bytes[..8]), bytes.len());
    w.send(io, &bytes[..40]);
    assert_eq!(due(&w, io), Some(STALL_NS), "its time begins now");
    w.host.now += 3;
    w.send(io, &bytes[40..50]);
    assert_eq!(due(&w, io), Some(STALL_NS - 3), "only a whole one counts");
    w.send(io, &bytes[50..]);
    assert_eq!(due(&w, io), None);
    // Requested data.
    w.command(io, peer::write_r2t(2, 1, 0, 4), &[]);
    assert_eq!(due(&w, io), Some(DATA_STALL_NS));
    let r2t = std::iter::from_fn(|| w.next(io)).last().unwrap();
    let data = [block(1), block(2), block(3), block(4)].concat();
    w.send(io, &peer::h2c_data(Digests::default(), 2, r2t.u16(10), 0, &data, true));
    // Answers that are not taken. The earliest deadline counts.
    w.links[io].reading = false;
    w.command(io, peer::read(3, 1, 0, 1), &[]);
    w.tick();
    assert_eq!(due(&w, io), Some(DATA_STALL_NS));
    w.send(io, &bytes[..40]);
    assert_eq!(due(&w, io), Some(STALL_NS));
    w.host.now += DATA_STALL_NS - STALL_NS + 1;
    w.send(io, &bytes[40..]);
    w.send(io, &bytes[..40]);
    assert_eq!(due(&w, io), Some(STALL_NS - 1));
    w.hang_up(io);
    assert_eq!(due(&w, io), None);
}

#[test]
fn the_drive_may_take_its_time() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    w.host.drives[0].holds = true;
    w.command(io, peer::write(1, 1, 0, 1), &block(1));
    assert_eq!(due(&w, io), None);
}

#[test]
fn a_connection_may_be_moved_while_it_is_quiet() {
    let mut w = World::new(&[false]);
    let at = w.accept();
    assert_eq!(w.links[at].conn.qid(), None);
    let (admin, cntlid) = w.admin();
    assert_eq!(w.links[admin].conn.qid(), Some(0));
    let io = w.io(cntlid, 3);
    assert_eq!(w.links[io].conn.qid(), Some(3));
    w.host.drives[0].holds = true;
    w.command(io, peer::write(1, 1, 0, 1), &block(1));
    assert!(!w.links[io].conn.is_quiet());
    w.complete(0, 0);
    assert!(w.links[io].conn.is_quiet());
    w.links[io].conn.set_key(77);
    w.command(io, peer::write(2, 1, 0, 1), &block(1));
    assert_eq!(w.host.drives[0].pending[0].op.key(), 77);
}

#[test]
#[should_panic(expected = "device operations carry the old key")]
fn a_connection_is_not_moved_under_its_operations() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    w.host.drives[0].holds = true;
    w.command(io, peer::write(1, 1, 0, 1), &block(1));
    w.links[io].conn.set_key(77);
}
