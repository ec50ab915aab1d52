//! Asymmetric Namespace Access: a port in a state that refuses I/O refuses every I/O command, and hosts
//! are informed.

mod world;

use riopipe_nvme::ana::{self, AnaState};
use riopipe_session::target::{Change, DiscoveryPort, PortState};
use riopipe_testkit::peer::{self, Sqe};
use world::{Owner, World, block};

const INACCESSIBLE: u16 = 0x302;
const PERSISTENT_LOSS: u16 = 0x301;
const TRANSITION: u16 = 0x303;
/// The state *change* of ANA, as an event: notice 03h, log page 0Ch.
const ANA_EVENT: u64 = 0x0c_03_02;

fn set(w: &mut World, port: u16, group: u32, state: AnaState) {
    let conns = w.host.shared.set_ana_state(PortState { port, group, state });
    w.host.notices.extend(conns);
    w.deliver();
}

/// A controller of each of two ports: its admin queue and an I/O queue.
fn two_ports(drives: usize) -> (World, [(usize, usize); 2]) {
    let mut w = World::new(&vec![false; drives]);
    let ports = [1, 2].map(|port| {
        w.port = port;
        let (admin, cntlid) = w.admin();
        (admin, w.io(cntlid, 1))
    });
    (w, ports)
}

/// Every I/O command that names a namespace, with its data.
fn commands() -> Vec<(&'static str, Sqe, Vec<u8>)> {
    let range = [0, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0];
    let dsm = |attributes: u32| Sqe::new(0x09, 9, 1).inline(16).dword(11, attributes);
    let (copy, list) = peer::copy(9, 1, 100, &[(0, 1)]);
    let (register, keys) = peer::register(9, 1, 0, 0, 7);
    let (acquire, acquire_keys) = peer::acquire(9, 1, (0, 1), 7, 0);
    let (release, release_keys) = peer::release(9, 1, (0, 1), 7);
    vec![
        ("write", peer::write(9, 1, 5, 1), block(9)),
        ("write zeroes", peer::write_zeroes(9, 1, 5, 1, false), vec![]),
        ("flush", peer::flush(9, 1), vec![]),
        ("read", peer::read(9, 1, 5, 1), vec![]),
        ("compare", peer::compare(9, 1, 5, 1), block(1)),
        ("verify", peer::verify(9, 1, 5, 1), vec![]),
        ("deallocate", dsm(4), range.to_vec()),
        ("a hint", dsm(1), range.to_vec()),
        ("copy", copy, list),
        ("register", register, keys),
        ("acquire", acquire, acquire_keys),
        ("release", release, release_keys),
        ("report", peer::report(9, 1, 64), vec![]),
    ]
}

#[test]
fn a_state_that_refuses_io_refuses_every_command_of_its_port_alone() {
    let (mut w, [(admin, io), (other_admin, other_io)]) = two_ports(1);
    assert_eq!(w.call(other_io, peer::write(1, 1, 5, 1), &block(1)).status, 0);
    for (state, status) in [
        (AnaState::Inaccessible, INACCESSIBLE),
        (AnaState::PersistentLoss, PERSISTENT_LOSS),
        (AnaState::Change, TRANSITION),
    ] {
        set(&mut w, 1, 1, state);
        let before = w.host.drives[0].history.len();
        for (name, sqe, data) in commands() {
            let done = w.call(io, sqe, &data);
            assert_eq!((done.status, done.dnr), (status, false), "{name}, {state:?}");
        }
        w.command(io, peer::compare(9, 1, 5, 1).first_half(), &block(1));
        w.command(io, peer::write(10, 1, 5, 1).second_half(), &block(2));
        let halves: Vec<u16> = w.completions(io).iter().map(|done| done.status).collect();
        assert_eq!(halves, [status, 0x09]);
        assert_eq!(w.host.drives[0].history.len(), before, "no operation has begun");
        assert_eq!(w.host.drives[0].block(5), block(1));
        // Admin commands go on, and the other port.
        assert_eq!(w.fetch(admin, peer::identify(2, 0x00, 1)).1.status, 0);
        assert_eq!(w.call(other_io, peer::write(3, 1, 6, 1), &block(3)).status, 0);
        assert_eq!(w.fetch(other_io, peer::read(4, 1, 6, 1)).0, block(3));
        assert_eq!(w.fetch(other_admin, peer::identify(5, 0x00, 1)).1.status, 0);
        // A controller that is made now has the state, too.
        w.port = 1;
        let (_, cntlid) = w.admin();
        let late = w.io(cntlid, 1);
        assert_eq!(w.call(late, peer::write(1, 1, 5, 1), &block(9)).status, status);
    }
    for state in [AnaState::NonOptimized, AnaState::Optimized] {
        set(&mut w, 1, 1, state);
        assert_eq!(w.call(io, peer::write(6, 1, 5, 1), &block(4)).status, 0, "{state:?}");
    }
    assert!(w.links[io].conn.is_quiet());
}

/// Base §2.2.2: a controller is bound to one port. Else the states of the admin queue's port would hold for
/// commands that have come through another one.
#[test]
fn an_io_queue_is_connected_through_the_port_of_its_controller() {
    let mut w = World::new(&[false]);
    w.port = 1;
    let (admin, cntlid) = w.admin();
    w.port = 2;
    let at = w.initialize(peer::Digests::default(), 0);
    let data = peer::connect_data(world::SUBNQN, peer::HOSTNQN, peer::HOSTID, cntlid);
    let done = w.call(at, peer::connect(0, 1, 127, 0), &data);
    // Byte 16 of the data: the controller id.
    assert_eq!((done.status, done.dnr, done.result), (0x182, true, 1 << 16 | 16));
    assert!(w.host.log.iter().any(|line| line.contains("at port 1, and this queue at port 2")));
    // The refusal has taken nothing.
    w.port = 1;
    let io = w.io(cntlid, 1);
    assert_eq!(w.call(io, peer::write(1, 1, 5, 1), &block(1)).status, 0);
    assert_eq!(w.fetch(admin, peer::identify(2, 0x01, 0)).1.status, 0);
}

/// Commands that wait are refused when they go on. Those at the drive come back: a write is done, and the
/// data of a read is not sent.
#[test]
fn commands_in_flight_end_and_waiting_ones_are_refused() {
    let (mut w, [(_, io), _]) = two_ports(1);
    w.host.drives[0].holds = true;
    w.command(io, peer::write(1, 1, 5, 1), &block(1));
    w.command(io, peer::read(2, 1, 7, 1), &[]);
    w.command(io, peer::write_r2t(3, 1, 8, 1), &[]);
    let r2t = w.next(io).unwrap();
    set(&mut w, 1, 1, AnaState::Inaccessible);
    w.send_data(io, &r2t, &block(8));
    let refused = w.next(io).unwrap().completion();
    assert_eq!((refused.cid, refused.status), (3, INACCESSIBLE));
    w.complete_all(0);
    let done: Vec<(u16, u16)> = w.completions(io).iter().map(|d| (d.cid, d.status)).collect();
    assert_eq!(done, [(1, 0), (2, INACCESSIBLE)]);
    assert_eq!((w.host.drives[0].block(5), w.host.drives[0].block(8)), (block(1), vec![0; 4096]));
}

fn ana_log(w: &mut World, admin: usize, groups_only: bool) -> (u64, Vec<ana::AnaGroup>) {
    let sqe = peer::get_log(7, 0x0c, 0, 256);
    let sqe = if groups_only { sqe.byte(41, 1) } else { sqe };
    ana::decode(&w.fetch(admin, sqe).0).unwrap()
}

/// Namespaces 1 and 2 are in group 1, namespace 3 is in group 2.
#[test]
fn groups_have_states_of_their_own_and_the_log_page_lists_them() {
    let (mut w, [(admin, io), (other_admin, _)]) = two_ports(3);
    let groups = |log: &(u64, Vec<ana::AnaGroup>)| -> Vec<(u32, AnaState, Vec<u32>)> {
        log.1.iter().map(|group| (group.id, group.state, group.nsids.clone())).collect()
    };
    let first = ana_log(&mut w, admin, false);
    assert_eq!(first.0, 1, "0 would mean that changes are not counted");
    let optimized = AnaState::Optimized;
    assert_eq!(groups(&first), [(1, optimized, vec![1, 2]), (2, optimized, vec![3])]);
    set(&mut w, 1, 2, AnaState::Inaccessible);
    let second = ana_log(&mut w, admin, false);
    assert_eq!(groups(&second)[1], (2, AnaState::Inaccessible, vec![3]));
    assert_eq!((second.0, second.1[0].change_count, second.1[1].change_count), (first.0 + 1, 0, 1));
    assert_eq!(groups(&ana_log(&mut w, admin, true))[0], (1, optimized, vec![]));
    assert_eq!(groups(&ana_log(&mut w, other_admin, false)), groups(&first), "of another port");
    assert_eq!(w.call(io, peer::write(1, 1, 5, 1), &block(1)).status, 0);
    assert_eq!(w.call(io, peer::write(2, 3, 5, 1), &block(1)).status, INACCESSIBLE);
    // nvme-cli reads as much as there could be, in parts of 4096 bytes.
    let (rest, done) = w.fetch(admin, peer::get_log(8, 0x0c, 4096, 24));
    assert_eq!((done.status, rest), (0, vec![0; 24]));
    // The same state again is no change.
    set(&mut w, 1, 2, AnaState::Inaccessible);
    assert_eq!(ana_log(&mut w, admin, false).0, second.0);
    // Another configuration: what it does not name is optimized.
    let named = [PortState { port: 1, group: 1, state: AnaState::NonOptimized }];
    let conns = w.host.shared.set_ana_states(&named);
    w.host.notices.extend(conns);
    w.deliver();
    let states: Vec<AnaState> =
        ana_log(&mut w, admin, false).1.iter().map(|group| group.state).collect();
    assert_eq!(states, [AnaState::NonOptimized, optimized]);
    assert_eq!(w.host.shared.ana_states(), named, "no other one is listed");
    // The same configuration again is no change, not even for a moment.
    let before = ana_log(&mut w, admin, false);
    assert_eq!(w.host.shared.set_ana_states(&named), []);
    assert_eq!(ana_log(&mut w, admin, false), before);
    // Identify.
    let (page, _) = w.fetch(admin, peer::identify(3, 0x01, 0));
    assert_eq!(page[76], 1 << 3 | 1 << 1, "CMIC: ANA, several controllers");
    let port = |portid| DiscoveryPort {
        portid,
        traddr: "192.0.2.1".into(),
        trsvcid: "4420".into(),
        ipv6: false,
        discovery_only: false,
        tls: None,
    };
    w.host.shared.set_ports(vec![port(1), port(2)]);
    let (several, _) = w.fetch(admin, peer::identify(3, 0x01, 0));
    assert_eq!(several[76], page[76] | 1, "CMIC: several ports");
    assert_eq!(page[93] & 1 << 3, 1 << 3, "OAES bit 11");
    assert_eq!((page[342] > 0, page[343]), (true, 0xdf), "ANATT, ANACAP");
    assert_eq!((&page[344..348], &page[348..352]), (&[128, 0, 0, 0][..], &[128, 0, 0, 0][..]));
    let (page, _) = w.fetch(admin, peer::identify(4, 0x00, 3));
    assert_eq!(page[92..96], [2, 0, 0, 0], "ANAGRPID");
    let (page, _) = w.fetch(admin, peer::identify(5, 0x08, 3));
    assert_eq!(page[4..8], [2, 0, 0, 0]);
}

#[test]
fn a_change_is_an_event_for_the_controllers_of_the_port() {
    let (mut w, [(admin, _), (other, _)]) = two_ports(1);
    for queue in [admin, other] {
        let config = Sqe::new(0x09, 1, 0).dword(10, 0x0b).dword(11, 1 << 11);
        assert_eq!(w.call(queue, config, &[]).status, 0);
        w.command(queue, Sqe::new(0x0c, 2, 0), &[]);
    }
    // A host at the same port that has not enabled it, and one of discovery that has.
    w.port = 1;
    let (silent, _) = w.admin();
    w.command(silent, Sqe::new(0x0c, 2, 0), &[]);
    let discovery = w.initialize(peer::Digests::default(), 0);
    let data = peer::connect_data(peer::DISCOVERY_NQN, peer::HOSTNQN, peer::HOSTID, 0xffff);
    assert_eq!(w.call(discovery, peer::connect(0, 0, 31, 0), &data).status, 0);
    w.call(discovery, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
    let config = Sqe::new(0x09, 1, 0).dword(10, 0x0b).dword(11, 1 << 11);
    assert_eq!(w.call(discovery, config, &[]).status, 0);
    w.command(discovery, Sqe::new(0x0c, 2, 0), &[]);
    set(&mut w, 1, 1, AnaState::NonOptimized);
    let event = w.next(admin).unwrap().completion();
    assert_eq!((event.cid, event.status, event.result), (2, 0, ANA_EVENT));
    assert!(w.next(other).is_none(), "the other port has not changed");
    assert!(w.next(silent).is_none() && w.next(discovery).is_none());
    // Reported once, until the page is read.
    w.command(admin, Sqe::new(0x0c, 3, 0), &[]);
    set(&mut w, 1, 1, AnaState::Inaccessible);
    assert!(w.next(admin).is_none());
    ana_log(&mut w, admin, false);
    // The same state again is no event.
    set(&mut w, 1, 1, AnaState::Inaccessible);
    assert!(w.next(admin).is_none());
    set(&mut w, 1, 1, AnaState::Optimized);
    assert_eq!(w.next(admin).unwrap().completion().result, ANA_EVENT);
}

/// A namespace that comes has the state of its group.
#[test]
fn a_namespace_that_comes_gets_the_state_of_its_group() {
    let (mut w, [(admin, io), _]) = two_ports(1);
    set(&mut w, 1, 2, AnaState::Inaccessible);
    let before = ana_log(&mut w, admin, false);
    let mut config = w.host.shared.namespaces().at(0).config.clone();
    (config.nsid, config.ana_group, config.uuid, config.nguid) = (5, 2, [5; 16], [5; 16]);
    w.host.drives.push(world::Drive::default());
    let change = Change { added: vec![config], ..Change::default() };
    w.host.shared.change(change, w.host.now).unwrap();
    let conns = w.host.shared.take_conns_to_wake();
    w.host.notices.extend(conns);
    w.deliver();
    assert_eq!(w.call(io, peer::write(1, 5, 0, 1), &block(1)).status, INACCESSIBLE);
    let after = ana_log(&mut w, admin, false);
    assert_eq!((after.0, after.1.len()), (before.0 + 1, before.1.len() + 1), "another page");
    set(&mut w, 1, 2, AnaState::Optimized);
    assert_eq!(w.call(io, peer::write(2, 5, 0, 1), &block(1)).status, 0);
}

/// A reservation and a state refuse independently of one another.
#[test]
fn reservations_outlive_a_change_of_the_state() {
    let mut w = World::new(&[false]);
    let [one, other] = [1, 2].map(|number| {
        let name = format!("nqn.2014-08.org.nvmexpress:uuid:host-{number}");
        let (_, cntlid) = w.admin_as(&name, [number; 16], 0);
        w.io_as(&name, [number; 16], cntlid, 1)
    });
    let (sqe, keys) = peer::register(1, 1, 0, 0, 7);
    assert_eq!(w.call(one, sqe, &keys).status, 0);
    let (sqe, keys) = peer::acquire(2, 1, (0, 1), 7, 0);
    assert_eq!(w.call(one, sqe, &keys).status, 0);
    set(&mut w, 1, 1, AnaState::Inaccessible);
    assert_eq!(w.call(other, peer::write(3, 1, 0, 1), &block(1)).status, INACCESSIBLE);
    set(&mut w, 1, 1, AnaState::Optimized);
    assert_eq!(w.call(other, peer::write(3, 1, 0, 1), &block(1)).status, 0x83);
    assert_eq!(w.call(one, peer::write(3, 1, 0, 1), &block(1)).status, 0);
}

/// The other way around, and what the state refuses is not awaited for a reservation.
#[test]
fn a_state_outlives_a_change_of_reservations() {
    let mut w = World::new(&[false]);
    let [one, other] = [1, 2].map(|number| {
        let name = format!("nqn.2014-08.org.nvmexpress:uuid:host-{number}");
        w.port = number.into();
        let (_, cntlid) = w.admin_as(&name, [number; 16], 0);
        w.io_as(&name, [number; 16], cntlid, 1)
    });
    for host in [one, other] {
        let (sqe, keys) = peer::register(1, 1, 0, 0, 7);
        assert_eq!(w.call(host, sqe, &keys).status, 0);
    }
    // A third host that will lose its access.
    w.port = 1;
    let name = "nqn.2014-08.org.nvmexpress:uuid:host-3";
    let (_, cntlid) = w.admin_as(name, [3; 16], 0);
    let third = w.io_as(name, [3; 16], cntlid, 1);
    w.host.drives[0].holds = true;
    w.command(other, peer::write(2, 1, 9, 1), &block(9));
    set(&mut w, 2, 1, AnaState::Inaccessible);
    // Write Exclusive, Registrants Only: the second host may write, as far as reservations go.
    let (sqe, keys) = peer::acquire(2, 1, (0, 3), 7, 0);
    assert_eq!(w.call(one, sqe, &keys).status, 0, "its write in flight is not awaited");
    w.complete_all(0);
    w.host.drives[0].holds = false;
    assert_eq!(w.next(other).unwrap().completion().status, 0);
    assert_eq!(w.call(other, peer::write(3, 1, 0, 1), &block(1)).status, INACCESSIBLE);
    assert_eq!(w.call(third, peer::write(3, 1, 0, 1), &block(1)).status, 0x83);
    set(&mut w, 2, 1, AnaState::Optimized);
    assert_eq!(w.call(other, peer::write(3, 1, 0, 1), &block(1)).status, 0);
}

/// A Rio initiator is refused with the state, and an owner's ordered writes stop.
#[test]
fn a_volume_is_refused_at_a_port_without_access() {
    let mut w = World::new(&[false]);
    let (admin, _) = w.admin();
    set(&mut w, 1, 1, AnaState::Inaccessible);
    let claim = w.first_claim();
    let refused = w.claim(admin, &claim).unwrap();
    assert_eq!((refused.status, refused.dnr), (INACCESSIBLE, true));
    set(&mut w, 1, 1, AnaState::Optimized);
    let Owner { io, cntlid, .. } = w.owner();
    set(&mut w, 1, 1, AnaState::Inaccessible);
    let write = world::ordered(1, &world::attribute(1, 5), 0);
    assert_eq!(w.call(io, write, &block(1)).status, INACCESSIBLE);
    assert_eq!(w.host.drives[0].block(5), vec![0; 4096]);
    let second = w.io(cntlid, 2);
    assert_eq!(w.bind(second, 1, 1, 0).status, INACCESSIBLE);
}
