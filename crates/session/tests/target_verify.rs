//! Verify: the blocks are read, and no data goes to the host.

mod world;

use riopipe_session::target::limits::TRANSFER_BUDGET;
use riopipe_testkit::peer::{self, Sqe};
use world::recovery::{RIVAL, RIVAL_ID};
use world::{What, World};

const UNRECOVERED_READ: u16 = 0x281;

#[test]
fn the_blocks_are_read_in_pieces_and_not_sent() {
    let (mut w, io, _) = World::with_two_queues(false);
    assert_eq!(w.call(io, peer::verify(1, 1, 7, 600), &[]).status, 0);
    let read = [(7, What::Read(256)), (263, What::Read(256)), (519, What::Read(88))];
    assert_eq!(w.host.drives[0].history, read);
    // The drive takes its time.
    w.host.drives[0].holds = true;
    w.command(io, peer::verify(2, 1, 7, 600), &[]);
    for _ in 0..3 {
        assert!(w.next(io).is_none());
        w.complete(0, 0);
    }
    assert_eq!(w.next(io).unwrap().completion().status, 0);
    assert!(w.links[io].conn.is_quiet());
}

#[test]
fn a_block_that_cannot_be_read_ends_it() {
    let (mut w, io, _) = World::with_two_queues(false);
    w.host.drives[0].holds = true;
    w.command(io, peer::verify(1, 1, 0, 600), &[]);
    w.complete(0, 0);
    w.fail(0, 0);
    assert_eq!(w.next(io).unwrap().completion().status, UNRECOVERED_READ);
    assert!(w.host.drives[0].pending.is_empty());
    w.host.drives[0].holds = false;
    w.host.drives[0].failing = true;
    assert_eq!(w.call(io, peer::verify(2, 1, 0, 1), &[]).status, UNRECOVERED_READ);
    assert_eq!(w.call(io, peer::verify(3, 1, world::BLOCKS - 1, 2), &[]).status, 0x80);
    assert_eq!(w.call(io, peer::verify(4, 2, 0, 1), &[]).status, 0x0b);
    assert_eq!(w.call(io, peer::verify(5, 1, 0, 2049), &[]).status, 0x02, "VSL");
    assert!(w.links[io].conn.is_quiet());
}

/// A Verify of 8 MiB holds one piece at a time.
#[test]
fn t28_a_verify_is_charged_for_its_piece() {
    let (mut w, io, _) = World::with_two_queues(false);
    w.host.drives[0].holds = true;
    let verifies = (TRANSFER_BUDGET >> 20) as u16;
    for cid in 0..=verifies {
        w.command(io, peer::verify(cid, 1, 0, 2048), &[]);
    }
    assert_eq!(w.host.drives[0].pending.len(), usize::from(verifies), "one waits");
    w.complete_all(0);
    let done = w.completions(io);
    assert_eq!(done.len(), usize::from(verifies) + 1);
    assert!(done.iter().all(|done| done.status == 0));
}

/// A fenced host gets no answer about blocks that the new owner may have changed.
#[test]
fn t8_a_fenced_host_may_not_verify() {
    let mut w = World::new(&[false]);
    let owner = w.owner();
    let own = w.io(owner.cntlid, 2);
    assert_eq!(w.call(own, peer::verify(1, 1, 0, 1), &[]).status, 0);
    w.host.drives[0].holds = true;
    w.command(own, peer::verify(2, 1, 0, 1), &[]);
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let claim = riopipe_session::wire::Claim { take_over: true, ..w.next_claim(2) };
    w.claim(rival, &claim);
    w.complete_all(0);
    let fenced = riopipe_session::wire::status::STALE_GENERATION.code();
    assert_eq!(w.completions(own)[0].status, fenced, "it had begun before");
    assert_eq!(w.call(own, peer::verify(3, 1, 0, 1), &[]).status, fenced);
    assert_eq!(w.call(own, peer::compare(4, 1, 0, 1), &[0; 4096]).status, fenced);
}

#[test]
fn identify_announces_verify() {
    let mut w = World::new(&[false]);
    let (admin, _) = w.admin();
    let (controller, _) = w.fetch(admin, peer::identify(1, 1, 0));
    assert_eq!(controller[520] & 1 << 7, 1 << 7, "ONCS");
    let limits = Sqe::new(0x06, 1, 0).transport(4096).dword(10, 0x06);
    assert_eq!(w.fetch(admin, limits).0[0], 11, "VSL: 8 MiB");
    let (effects, _) = w.fetch(admin, peer::get_log(2, 5, 0, 4096));
    assert_eq!(effects[1024 + 4 * 0x0c..][..4], [1, 0, 0, 0]);
}
