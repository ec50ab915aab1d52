//! Asynchronous events, the log pages that belong to them, and the error log.

mod world;

use riopipe_session::target::limits::ERROR_ENTRIES;
use riopipe_session::target::{Access, ConnId, DiscoveryPort};
use riopipe_testkit::peer::{self, Digests, HOSTID, HOSTNQN, Sqe};
use world::{World, block};

const NAMESPACE_NOTICE: u64 = 0x0004_0002;
const DISCOVERY_NOTICE: u64 = 0x0070_f002;
const ENABLE_NAMESPACE: u32 = 1 << 8;
const ENABLE_DISCOVERY: u32 = 1 << 31;
const RETAIN: u32 = 1 << 15;

fn event_request(cid: u16) -> Sqe {
    Sqe::new(0x0c, cid, 0)
}

fn enable(w: &mut World, admin: usize, events: u32) {
    let set = Sqe::new(0x09, 7, 0).dword(10, 0x0b).dword(11, events);
    assert_eq!(w.call(admin, set, &[]).status, 0);
}

fn deliver(w: &mut World, conns: Vec<ConnId>) {
    w.host.notices.extend(conns);
    w.deliver();
}

fn namespace_changed(w: &mut World, nsid: u32) {
    let conns = w.host.shared.namespace_changed(nsid);
    deliver(w, conns);
}

/// The namespaces of the Changed Namespace List.
fn changed(w: &mut World, admin: usize, retain: bool) -> Vec<u32> {
    let sqe = peer::get_log(8, 0x04, 0, 4096);
    let dword = 0x04 | 1023 << 16 | if retain { RETAIN } else { 0 };
    let (page, _) = w.fetch(admin, sqe.dword(10, dword));
    let nsids = page.chunks(4).map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap()));
    nsids.take_while(|nsid| *nsid != 0).collect()
}

/// The results of the event requests that have completed.
fn events(w: &mut World, admin: usize) -> Vec<(u16, u64)> {
    w.completions(admin).iter().map(|done| (done.cid, done.result)).collect()
}

#[test]
fn a_changed_namespace_is_reported_once_until_the_list_is_read() {
    let mut w = World::new(&[false]);
    let (admin, _) = w.admin();
    let (id, _) = w.fetch(admin, peer::identify(1, 1, 0));
    // Bit 11: changes of the ANA state. Bit 15: the normal shutdown of the subsystem, with which a
    // target drains.
    assert_eq!(id[92..96], (ENABLE_NAMESPACE | 1 << 11 | 1 << 15).to_le_bytes(), "OAES");
    enable(&mut w, admin, ENABLE_NAMESPACE);
    for cid in [20, 21] {
        w.command(admin, event_request(cid), &[]);
    }
    namespace_changed(&mut w, 7);
    assert_eq!(events(&mut w, admin), [(20, NAMESPACE_NOTICE)]);
    namespace_changed(&mut w, 3);
    assert_eq!(events(&mut w, admin), [], "the host knows already");
    assert_eq!(changed(&mut w, admin, true), [3, 7]);
    namespace_changed(&mut w, 7);
    assert_eq!(events(&mut w, admin), [], "the event was retained");
    assert_eq!(changed(&mut w, admin, false), [3, 7]);
    assert_eq!(changed(&mut w, admin, false), [], "it is read");
    namespace_changed(&mut w, 5);
    assert_eq!(events(&mut w, admin), [(21, NAMESPACE_NOTICE)]);
    assert_eq!(changed(&mut w, admin, false), [5]);
    // Without an event request, the event waits for one.
    namespace_changed(&mut w, 9);
    assert_eq!(events(&mut w, admin), []);
    w.command(admin, event_request(22), &[]);
    assert_eq!(events(&mut w, admin), [(22, NAMESPACE_NOTICE)]);
    assert_eq!(changed(&mut w, admin, false), [9]);
}

/// A change that the host has not read stays in the list.
#[test]
fn only_what_was_read_leaves_the_list() {
    let mut w = World::new(&[false]);
    let (admin, _) = w.admin();
    enable(&mut w, admin, ENABLE_NAMESPACE);
    // Another core adds a change directly after the page was taken.
    namespace_changed(&mut w, 3);
    w.host.before_lock = Some(Box::new(|host| {
        host.before_lock = Some(Box::new(|host| {
            let conns = host.shared.namespace_changed(7);
            host.notices.extend(conns);
        }));
    }));
    assert_eq!(changed(&mut w, admin, false), [3]);
    assert_eq!(changed(&mut w, admin, false), [7]);
    // The host has no buffer for the page.
    namespace_changed(&mut w, 5);
    let page = peer::get_log(8, 0x04, 0, 4096);
    assert_eq!(w.call(admin, page.transport(64), &[]).status, 0x0f);
    // It reads the first element alone. The rest is reported again.
    namespace_changed(&mut w, 6);
    assert_eq!(w.fetch(admin, peer::get_log(8, 0x04, 0, 4)).0, [5, 0, 0, 0]);
    w.command(admin, event_request(20), &[]);
    assert_eq!(events(&mut w, admin), [(20, NAMESPACE_NOTICE)]);
    assert_eq!(changed(&mut w, admin, false), [6]);
    // More than the list has space for: one element stands for all.
    for nsid in 1..=1025 {
        namespace_changed(&mut w, nsid);
    }
    assert_eq!(changed(&mut w, admin, false), [u32::MAX]);
    assert_eq!(changed(&mut w, admin, false), []);
}

#[test]
fn each_controller_has_its_own_list_and_settings() {
    let mut w = World::new(&[false]);
    let (one, _) = w.admin();
    let (other, _) = w.admin();
    enable(&mut w, one, ENABLE_NAMESPACE);
    for admin in [one, other] {
        w.command(admin, event_request(20), &[]);
    }
    namespace_changed(&mut w, 2);
    assert_eq!(events(&mut w, one), [(20, NAMESPACE_NOTICE)]);
    assert_eq!(events(&mut w, other), [], "it has not enabled the event");
    assert_eq!(changed(&mut w, one, false), [2]);
    assert_eq!(changed(&mut w, other, false), [2], "the list is there all the same");
    let (late, _) = w.admin();
    assert_eq!(changed(&mut w, late, false), [], "it knows the namespaces as they are");
    // A reset begins anew.
    namespace_changed(&mut w, 4);
    w.call(one, peer::property_set(1, 0x14, 0), &[]);
    w.call(one, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
    assert_eq!(changed(&mut w, one, false), []);
    w.command(one, event_request(20), &[]);
    namespace_changed(&mut w, 4);
    assert_eq!(events(&mut w, one), [], "the event is not enabled any more");
}

#[test]
fn a_persistent_discovery_controller_reports_a_changed_log() {
    let mut w = World::new(&[false]);
    let (io_admin, _) = w.admin();
    let at = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(peer::DISCOVERY_NQN, HOSTNQN, HOSTID, 0xffff);
    assert_eq!(w.call(at, peer::connect(0, 0, 31, 2000), &data).status, 0);
    w.call(at, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
    let (id, _) = w.fetch(at, peer::identify(1, 1, 0));
    assert_eq!(id[92..96], ENABLE_DISCOVERY.to_le_bytes(), "OAES");
    enable(&mut w, at, ENABLE_DISCOVERY);
    enable(&mut w, io_admin, ENABLE_DISCOVERY);
    w.command(at, event_request(20), &[]);
    w.command(io_admin, event_request(20), &[]);
    let port = DiscoveryPort {
        portid: 1,
        traddr: "10.0.0.1".into(),
        trsvcid: "4420".into(),
        ipv6: false,
        discovery_only: false,
        tls: None,
    };
    let conns = w.host.shared.set_ports(vec![port]);
    deliver(&mut w, conns);
    assert_eq!(events(&mut w, at), [(20, DISCOVERY_NOTICE)]);
    assert_eq!(events(&mut w, io_admin), [], "an I/O controller has no discovery log");
    namespace_changed(&mut w, 1);
    // The log is read with the event retained, and then without.
    w.command(at, event_request(21), &[]);
    let log = peer::get_log(2, 0x70, 0, 1024);
    let retained = log.dword(10, 0x70 | 255 << 16 | RETAIN);
    assert_eq!(w.fetch(at, retained).0[8], 1, "one port");
    let conns = w.host.shared.discovery_changed();
    deliver(&mut w, conns);
    assert_eq!(events(&mut w, at), []);
    let generation = |page: &[u8]| u64::from_le_bytes(page[..8].try_into().unwrap());
    let before = generation(&w.fetch(at, log).0);
    let conns = w.host.shared.discovery_changed();
    deliver(&mut w, conns);
    assert_eq!(events(&mut w, at), [(21, DISCOVERY_NOTICE)]);
    let between = generation(&w.fetch(at, log).0);
    // The hosts that may connect: the log of a host depends on them.
    w.command(at, event_request(22), &[]);
    let conns = w.host.shared.set_access(Access::by_name([]));
    deliver(&mut w, conns);
    assert_eq!(events(&mut w, at), [(22, DISCOVERY_NOTICE)]);
    let page = w.fetch(at, log).0;
    assert_eq!((before < between, between < generation(&page)), (true, true));
    assert_eq!(page[8], 0, "this host may not connect any more");
    // It is kept as long as its host keeps it alive.
    for _ in 0..5 {
        w.host.now += 1_500_000_000;
        w.tick();
        assert_eq!(w.call(at, Sqe::new(0x18, 3, 0), &[]).status, 0);
    }
    w.host.now += 2_500_000_000;
    w.tick();
    assert!(w.links[at].closed.is_some(), "the keep alive timer has expired");
}

fn errors(w: &mut World, admin: usize) -> Vec<(u64, u16, u16, u16, u64, u32)> {
    let len = (ERROR_ENTRIES * 64) as u32;
    let (page, done) = w.fetch(admin, peer::get_log(9, 0x01, 0, len));
    assert_eq!(done.status, 0);
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let entry = |entry: &[u8]| {
        let two = |at: usize| number(&entry[at..at + 2]) as u16;
        assert_eq!(two(14), 0xffff, "the parameter is not known");
        assert_eq!(entry[29], 3, "TCP");
        let (lba, nsid) = (number(&entry[16..24]), number(&entry[24..28]) as u32);
        (number(&entry[..8]), two(8), two(10), two(12) >> 1 & 0x7ff, lba, nsid)
    };
    page.chunks(64).filter(|bytes| bytes[..8] != [0; 8]).map(entry).collect()
}

#[test]
fn the_error_log_has_the_newest_errors_of_the_controller() {
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin();
    let (id, _) = w.fetch(admin, peer::identify(1, 1, 0));
    assert_eq!(usize::from(id[262]) + 1, ERROR_ENTRIES, "ELPE");
    let io = w.io(cntlid, 1);
    assert_eq!(errors(&mut w, admin), []);
    assert_eq!(w.call(admin, peer::identify(5, 0x55, 0), &[]).status, 0x02);
    assert_eq!(w.call(io, peer::read(6, 1, world::BLOCKS, 1), &[]).status, 0x80);
    w.host.drives[0].failing = true;
    assert_eq!(w.call(io, peer::write(7, 1, 42, 1), &block(1)).status, 0x280);
    assert_eq!(w.call(io, peer::flush(8, 1), &[]).status, 0x280);
    w.host.drives[0].failing = false;
    assert_eq!(w.call(io, peer::write(9, 1, 42, 1), &block(1)).status, 0);
    let expected = [
        (4, 1, 8, 0x280, 0, 1),
        (3, 1, 7, 0x280, 42, 1),
        (2, 1, 6, 0x80, world::BLOCKS, 1),
        (1, 0, 5, 0x02, 0, 0),
    ];
    assert_eq!(errors(&mut w, admin), expected);
    let (smart, _) = w.fetch(admin, peer::get_log(1, 2, 0, 512));
    assert_eq!(smart[176], 4, "the number of errors");
    // Another controller has its own.
    let (other, _) = w.admin();
    assert_eq!(errors(&mut w, other), []);
    // More than are kept, all in one packet.
    let capsules: Vec<u8> = (0..100)
        .flat_map(|cid| {
            let sqe = peer::read(cid, 1, world::BLOCKS + u64::from(cid), 1);
            peer::capsule(Digests::default(), &sqe.0, &[])
        })
        .collect();
    w.send(io, &capsules);
    assert_eq!(w.completions(io).len(), 100);
    let kept = errors(&mut w, admin);
    assert_eq!(kept.len(), ERROR_ENTRIES);
    for (number, entry) in (0..).zip(kept) {
        let cid = 99 - number;
        let lba = world::BLOCKS + u64::from(cid);
        assert_eq!(entry, (104 - u64::from(number), 1, cid, 0x80, lba, 1));
    }
}

#[test]
fn telemetry_is_refused() {
    let mut w = World::new(&[false]);
    let (admin, _) = w.admin();
    for lid in [0x07, 0x08] {
        let done = w.call(admin, peer::get_log(1, lid, 0, 512), &[]);
        assert_eq!((done.status, done.dnr), (0x109, true), "{lid:#x}");
    }
    let (id, _) = w.fetch(admin, peer::identify(1, 1, 0));
    assert_eq!(id[261] & 1 << 3, 0, "LPA");
}
