//! A host that sends no NQN in Connect, such as SPDK's `perf` unless a name is given.

mod world;

use riopipe_session::target::Access;
use riopipe_session::wire;
use riopipe_testkit::peer::{self, Digests, HOSTID, HOSTNQN};
use world::{SUBNQN, VOLUME, World, block, identity, riopipe_bytes};

const INVALID_FIELD: u16 = 0x02;
const INVALID_HOST: u16 = 0x184;

#[test]
fn a_host_without_a_name_reads_and_writes() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin_as("", HOSTID, 0);
    let io = w.io_as("", HOSTID, cntlid, 1);
    assert_eq!(w.call(io, peer::write(1, 1, 5, 1), &block(5)).status, 0);
    assert_eq!(w.fetch(io, peer::read(2, 1, 5, 1)).0, block(5));
    // The queues of a controller are of one host.
    let at = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    assert_eq!(w.call(at, peer::connect(0, 2, 31, 0), &data).status, INVALID_HOST);
}

#[test]
fn a_host_without_a_name_is_on_no_list_of_allowed_hosts() {
    let mut w = World::with(&[false], identity(), world::Parts::default());
    w.host.shared.set_access(Access::by_name([HOSTNQN.into()]));
    let at = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(SUBNQN, "", HOSTID, 0xffff);
    let done = w.call(at, peer::connect(0, 0, 31, 0), &data);
    assert_eq!((done.status, done.dnr), (INVALID_HOST, true));
    // It may ask for the subsystems, and gets none.
    let data = peer::connect_data(peer::DISCOVERY_NQN, "", HOSTID, 0xffff);
    assert_eq!(w.call(at, peer::connect(0, 0, 31, 0), &data).status, 0);
    w.call(at, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
    let (page, _) = w.fetch(at, peer::get_log(1, 0x70, 0, 1024));
    assert_eq!(page[8..16], [0; 8], "NUMREC");
}

#[test]
fn t8_a_host_without_a_name_owns_no_volume_and_ends_no_ownership() {
    let mut w = World::new(&[false]);
    let (nameless, _) = w.admin_as("", HOSTID, 0);
    let refused = w.claim(nameless, &w.first_claim()).unwrap();
    assert_eq!((refused.status, refused.dnr), (INVALID_FIELD, true));
    let reports = |w: &World| w.host.log.iter().filter(|e| e.contains("sent no NQN")).count();
    assert_eq!(reports(&w), 1, "the operator gets the reason");
    // The owner has the same host identifier.
    let owner = w.owner();
    let take_over = wire::Claim { take_over: true, ..w.next_claim(2) };
    let resume = wire::Claim { resume: true, ..w.next_claim(1) };
    for claim in [take_over, resume] {
        assert_eq!(w.claim(nameless, &claim).unwrap().status, INVALID_FIELD);
    }
    let release = |forget| riopipe_bytes(&wire::release_command(VOLUME, forget)).cid(52);
    let discard = riopipe_bytes(&wire::discard_command(VOLUME)).cid(52);
    for sqe in [release(false), release(true), discard] {
        assert_eq!(w.call(nameless, sqe, &[]).status, INVALID_FIELD);
    }
    assert_eq!(reports(&w), 6);
    assert_eq!(w.bind(owner.io, 1, 1, 0).status & 0x7ff, 0x709, "it carries stream 0 as before");
    assert_eq!(w.call(owner.admin, release(false), &[]).status, 0);
    // It may read what every host may read.
    assert!(!w.status(nameless).owned);
}
