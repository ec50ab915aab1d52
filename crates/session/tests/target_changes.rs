//! Namespaces, hosts and ports that come and go while the target serves, and its draining.

mod world;

use std::sync::Arc;

use peer::{HOSTID, HOSTNQN, Sqe};
use riopipe_nvme::ana::AnaState;
use riopipe_order::attribute::Member;
use riopipe_order::log_region::MemberNamespace;
use riopipe_order::write_order::DriveOrder;
use riopipe_session::target::{
    Access, Change, ChangeError, Closed, DiscoveryPort, LabelledDrive, NamespaceConfig,
    NamespaceIdError, PortChange, PortState, VolumeUse,
};
use riopipe_session::wire;
use riopipe_testkit::peer;
use world::recovery::{RIVAL, RIVAL_ID};
use world::{BLOCKS, Drive, VOLUME, World, block, pattern};

const INVALID_NAMESPACE: u16 = 0x0b;
const GUARDED: u16 = 0x70a;
/// The result of the event: a notice, namespace attribute changed, log page 04h.
const NAMESPACE_CHANGED: u64 = 0x0004_0002;

fn config(nsid: u32, id: u8) -> NamespaceConfig {
    NamespaceConfig {
        nsid,
        blocks: BLOCKS,
        lba_size: Default::default(),
        ana_group: 1,
        nguid: [id; 16],
        uuid: [id; 16],
        volatile: false,
        order: DriveOrder::None,
    }
}

fn removal(nsids: &[u32]) -> Change {
    Change { removed: nsids.to_vec(), ..Change::default() }
}

/// Changes the subsystem, and lets the connections read their notices.
fn change(w: &mut World, change: Change) -> Result<u64, ChangeError> {
    let now = w.host.now;
    for _ in &change.added {
        w.host.drives.push(Drive::default());
    }
    let changed = w.host.shared.change(change, now);
    wake(w);
    changed
}

fn wake(w: &mut World) {
    w.host.notices.extend(w.host.shared.take_conns_to_wake());
    w.deliver();
}

fn read(nsid: u32) -> Sqe {
    peer::read(1, nsid, 0, 1)
}

/// The Changed Namespace List. With `retain`, the event stays.
fn changed_list(w: &mut World, admin: usize, retain: bool) -> Vec<u32> {
    let mut sqe = peer::get_log(9, 0x04, 0, 4096);
    if retain {
        let dword = u32::from_le_bytes(sqe.0[40..44].try_into().unwrap());
        sqe = sqe.dword(10, dword | 1 << 15);
    }
    let (page, done) = w.fetch(admin, sqe);
    assert_eq!(done.status, 0);
    let ids = page.chunks(4).map(|id| u32::from_le_bytes(id.try_into().unwrap()));
    ids.take_while(|id| *id != 0).collect()
}

fn active_ids(w: &mut World, admin: usize) -> Vec<u32> {
    let (page, _) = w.fetch(admin, peer::identify(1, 0x02, 0));
    let ids = page.chunks(4).map(|id| u32::from_le_bytes(id.try_into().unwrap()));
    ids.take_while(|id| *id != 0).collect()
}

#[test]
fn a_command_that_was_begun_ends_before_its_namespace_is_retired() {
    let mut w = World::new(&[false, false]);
    let (admin, cntlid) = w.admin();
    let [io, other] = [1, 2].map(|qid| w.io(cntlid, qid));
    w.host.drives[1].holds = true;
    w.command(io, read(2).cid(7), &[]);
    let number = change(&mut w, removal(&[2])).unwrap();
    assert!(!w.host.shared.is_retired(number), "a read is at the drive");
    for queue in [io, other] {
        assert_eq!(w.call(queue, read(2), &[]).status, INVALID_NAMESPACE);
        assert_eq!(w.fetch(queue, read(1)).1.status, 0, "the other one stays");
    }
    assert_eq!(active_ids(&mut w, admin), [1]);
    w.complete(1, 0);
    let data = w.next(io).unwrap();
    assert_eq!((data.kind, w.next(io).unwrap().completion().status), (0x07, 0));
    assert!(w.host.shared.is_retired(number));
}

#[test]
fn a_host_that_does_not_send_its_data_is_ended() {
    let mut w = World::new(&[false, false]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    w.command(io, peer::write(3, 2, 0, 4).transport(16384), &[]);
    assert_eq!(w.next(io).unwrap().kind, 0x09, "an R2T");
    let number = change(&mut w, removal(&[2])).unwrap();
    w.tick();
    assert!(!w.host.shared.is_retired(number), "its data is awaited");
    w.host.shared.end_users(number);
    wake(&mut w);
    assert!(matches!(w.links[io].closed, Some(Closed::Ended(why)) if why.contains("removed")));
    assert!(w.host.shared.is_retired(number));
}

#[test]
fn an_idle_connection_keeps_no_namespace() {
    let mut w = World::new(&[false, false]);
    let (admin, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    // Neither a command of the admin queue nor one on another namespace is in the way.
    w.command(admin, Sqe::new(0x0c, 20, 0), &[]);
    w.host.drives[1].holds = true;
    w.command(io, read(2).cid(7), &[]);
    let number = change(&mut w, removal(&[1])).unwrap();
    assert!(w.host.shared.is_retired(number));
    assert!(w.links[io].closed.is_none());
}

#[test]
fn a_namespace_comes_and_hosts_learn_of_it() {
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    let features = |fid: u32, value: u32| Sqe::new(0x09, 7, 0).dword(10, fid).dword(11, value);
    let (id, _) = w.fetch(admin, peer::identify(1, 1, 0));
    assert_eq!(u32::from_le_bytes(id[92..96].try_into().unwrap()) & 1 << 8, 1 << 8, "OAES");
    assert_eq!(w.call(admin, features(0x0b, 1 << 8), &[]).status, 0);
    w.command(admin, Sqe::new(0x0c, 20, 0), &[]);
    let added = |nsid| Change { added: vec![config(nsid, 9)], ..Change::default() };
    change(&mut w, added(5)).unwrap();
    let event = w.next(admin).unwrap().completion();
    assert_eq!((event.cid, event.status, event.result), (20, 0, NAMESPACE_CHANGED));
    assert_eq!(active_ids(&mut w, admin), [1, 5]);
    let written = peer::write(1, 5, 0, 1).inline(4096);
    assert_eq!(w.call(io, written, &block(3)).status, 0);
    assert_eq!(w.fetch(io, read(5)).0, block(3));
    assert_eq!(w.host.drives[1].block(0), block(3), "the new drive");
    // Until the host has read the list, there is no second event.
    w.command(admin, Sqe::new(0x0c, 21, 0), &[]);
    change(&mut w, removal(&[5])).unwrap();
    assert_eq!(w.next(admin), None);
    assert_eq!(changed_list(&mut w, admin, true), [5]);
    change(&mut w, added(6)).unwrap();
    assert_eq!(w.next(admin), None, "the list was retained");
    assert_eq!(changed_list(&mut w, admin, false), [5, 6]);
    assert_eq!(changed_list(&mut w, admin, false), [0; 0]);
    change(&mut w, removal(&[6])).unwrap();
    assert_eq!(w.next(admin).unwrap().completion().cid, 21);
    // A request that comes later gets the event that waits for it.
    assert_eq!(changed_list(&mut w, admin, false), [6]);
    change(&mut w, added(6)).unwrap();
    let late = w.call(admin, Sqe::new(0x0c, 22, 0), &[]);
    assert_eq!((late.cid, late.result), (22, NAMESPACE_CHANGED));
    // A host that has not enabled events gets none.
    assert_eq!(changed_list(&mut w, admin, false), [6]);
    assert_eq!(w.call(admin, features(0x0b, 0), &[]).status, 0);
    w.command(admin, Sqe::new(0x0c, 23, 0), &[]);
    change(&mut w, removal(&[6])).unwrap();
    assert_eq!(w.next(admin), None);
}

#[test]
fn an_id_that_is_used_again_is_another_namespace() {
    let mut w = World::new(&[false, false]);
    let (admin, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    w.host.drives[1].overwrite(0, block(1));
    w.host.drives[1].holds = true;
    w.command(io, read(2).cid(7), &[]);
    let number = change(&mut w, removal(&[2])).unwrap();
    change(&mut w, Change { added: vec![config(2, 9)], ..Change::default() }).unwrap();
    w.host.drives[2].overwrite(0, block(2));
    assert_eq!(w.fetch(io, read(2)).0, block(2), "the new drive");
    let (page, _) = w.fetch(admin, peer::identify(1, 0, 2));
    assert_eq!(page[104..120], [9; 16], "its NGUID");
    w.complete(1, 0);
    assert_eq!(w.next(io).unwrap().data, block(1), "the old drive");
    assert!(w.host.shared.is_retired(number));
}

#[test]
fn a_change_that_makes_no_sense_changes_nothing() {
    let mut w = World::new(&[false, false]);
    let (admin, _) = w.admin();
    let before = Arc::clone(w.host.shared.namespaces());
    for (nsid, error) in [(1, NamespaceIdError::Twice(1)), (0, NamespaceIdError::OutOfRange(0))] {
        let access = Some(Access::by_name([RIVAL.to_owned()]));
        let wrong = Change { access, added: vec![config(7, 7), config(nsid, 9)], ..removal(&[2]) };
        assert_eq!(change(&mut w, wrong), Err(ChangeError::NamespaceId(error)));
    }
    assert!(Arc::ptr_eq(&before, w.host.shared.namespaces()));
    assert!(w.host.shared.allows(HOSTNQN) && w.links[admin].closed.is_none());
}

#[test]
fn t21_a_namespace_of_an_open_volume_stays_unless_it_is_forced() {
    let mut w = World::new(&[false, false]);
    w.lease_ms = 60_000;
    let owner = w.owner();
    let access = Some(Access::by_name([RIVAL.to_owned()]));
    let refused = Change { access, ..removal(&[2]) };
    let Err(ChangeError::InUse(volumes)) = change(&mut w, refused) else { panic!("not refused") };
    assert_eq!((volumes[0].nsid, volumes[0].volume), (2, VOLUME));
    assert!(matches!(&volumes[0].usage, VolumeUse::Open { hostnqn, .. } if hostnqn == HOSTNQN));
    assert_eq!(volumes, w.host.shared.volumes_in_use(&[2], w.host.now));
    assert!(w.host.shared.allows(HOSTNQN), "nothing of the change is done");
    assert!(w.links[owner.io].closed.is_none() && active_ids(&mut w, owner.admin) == [1, 2]);

    // An owner without a connection has a lease.
    w.hang_up(owner.io);
    w.hang_up(owner.admin);
    let Err(ChangeError::InUse(volumes)) = change(&mut w, removal(&[2])) else { panic!("allowed") };
    assert!(matches!(&volumes[0].usage, VolumeUse::Reserved { owner, .. } if owner == HOSTNQN));

    // When the lease is over and nothing is to be recovered, the volume needs nothing.
    w.host.now += 61_000_000_000;
    let number = change(&mut w, removal(&[2])).unwrap();
    assert!(w.host.shared.is_retired(number));
    // Not even its owner can open it without the member.
    let (admin, _) = w.admin();
    let claim = w.next_claim(2);
    assert_ne!(w.claim(admin, &claim).unwrap().status, 0);
}

#[test]
fn t21_a_forced_removal_ends_the_owner_and_guards_the_rest() {
    let mut w = World::new(&[false, false]);
    w.lease_ms = 60_000;
    let owner = w.owner();
    let (_, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let rival = w.io_as(RIVAL, RIVAL_ID, cntlid, 1);
    let forced = Change { force: true, ..removal(&[2]) };
    let number = change(&mut w, forced).unwrap();
    assert!(w.host.shared.is_retired(number));
    assert!(w.links[owner.io].closed.is_some() && w.links[owner.admin].closed.is_some());
    assert!(w.links[rival].closed.is_none(), "another host has nothing to do with it");
    let written = |nsid| peer::write(1, nsid, 0, 1).inline(4096);
    assert_eq!(w.call(rival, written(1), &block(1)).status, GUARDED);
    // The drive comes back, at another place, and its label names the volume.
    let place = MemberNamespace { member: Member(1), nsid: 4 };
    let found = vec![LabelledDrive { volume: VOLUME, place, is_own: true }];
    let added = vec![config(4, 2), config(5, 9)];
    change(&mut w, Change { added, found, ..Change::default() }).unwrap();
    assert_eq!(w.call(rival, written(4), &block(1)).status, GUARDED);
    assert_eq!(w.call(rival, written(1), &block(1)).status, GUARDED, "the first guard stays");
    assert_eq!(w.call(rival, written(5), &block(1)).status, 0, "no volume's");
    // The owner opens it there, when its lease is over.
    w.host.now += 61_000_000_000;
    let (admin, _) = w.admin();
    let members = vec![MemberNamespace { member: Member(0), nsid: 1 }, place];
    let claim = wire::Claim { members, ..w.next_claim(2) };
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
}

#[test]
fn a_host_that_may_not_connect_any_more_is_ended() {
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    let (rival, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let discovery = w.initialize(peer::Digests::default(), 0);
    let data = peer::connect_data(peer::DISCOVERY_NQN, HOSTNQN, HOSTID, 0xffff);
    assert_eq!(w.call(discovery, peer::connect(0, 0, 31, 0), &data).status, 0);
    let hosts = |access: Arc<Access>| Change { access: Some(access), ..Change::default() };
    let generation = w.host.shared.discovery_generation();
    change(&mut w, hosts(Access::by_name([RIVAL.to_owned()]))).unwrap();
    for ended in [admin, io] {
        assert!(w.links[ended].closed.is_some(), "{ended}");
    }
    for stays in [rival, discovery] {
        assert!(w.links[stays].closed.is_none(), "{stays}");
    }
    let changed = w.host.shared.discovery_generation();
    assert_ne!(changed, generation);
    change(&mut w, hosts(Access::by_name([RIVAL.to_owned()]))).unwrap();
    assert_eq!(w.host.shared.discovery_generation(), changed, "the same hosts are no change");
    let at = w.initialize(peer::Digests::default(), 0);
    let data = peer::connect_data(world::SUBNQN, HOSTNQN, HOSTID, 0xffff);
    assert_eq!(w.call(at, peer::connect(0, 0, 31, 0), &data).status, 0x184);
    w.io_as(RIVAL, RIVAL_ID, cntlid, 1);
    change(&mut w, hosts(Arc::default())).unwrap();
    assert_eq!(w.call(at, peer::connect(0, 0, 31, 0), &data).status, 0);
}

fn port(portid: u16) -> DiscoveryPort {
    DiscoveryPort {
        portid,
        traddr: "192.0.2.1".into(),
        trsvcid: (4419 + portid).to_string(),
        ipv6: false,
        discovery_only: false,
        tls: None,
    }
}

fn ports(listed: &[u16], removed: &[u16]) -> Change {
    let listed = listed.iter().map(|id| port(*id)).collect();
    let ports = PortChange { listed, removed: removed.to_vec() };
    Change { ports: Some(ports), ..Change::default() }
}

#[test]
fn a_port_that_goes_ends_its_controllers_and_takes_no_others() {
    let mut w = World::new(&[false]);
    change(&mut w, ports(&[1, 2], &[])).unwrap();
    let [first, second] = [1, 2].map(|id| {
        w.port = id;
        let (admin, cntlid) = w.admin();
        (admin, w.io(cntlid, 1), cntlid)
    });
    w.port = 2;
    let waiting = w.initialize(peer::Digests::default(), 0);
    // A discovery controller at the port that stays learns of it; one at the other port ends.
    let discovery = |w: &mut World, id: u16| {
        w.port = id;
        let at = w.initialize(peer::Digests::default(), 0);
        let data = peer::connect_data(peer::DISCOVERY_NQN, HOSTNQN, HOSTID, 0xffff);
        assert_eq!(w.call(at, peer::connect(0, 0, 31, 0), &data).status, 0);
        w.call(at, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
        w.call(at, Sqe::new(0x09, 7, 0).dword(10, 0x0b).dword(11, 1 << 31), &[]);
        w.command(at, Sqe::new(0x0c, 8, 0), &[]);
        at
    };
    let [stays, goes] = [1, 2].map(|id| discovery(&mut w, id));
    // A write at the drive comes back, and is on the drive.
    w.host.drives[0].holds = true;
    w.command(second.1, peer::write(1, 1, 5, 1), &block(7));
    let generation = w.host.shared.discovery_generation();
    change(&mut w, ports(&[1], &[2])).unwrap();
    for ended in [second.0, second.1, goes] {
        assert!(w.links[ended].closed.is_some(), "{ended}");
    }
    for left in [first.0, first.1, stays] {
        assert!(w.links[left].closed.is_none(), "{left}");
    }
    w.complete_all(0);
    assert_eq!(w.host.drives[0].block(5), block(7));
    w.host.drives[0].holds = false;
    assert_eq!(w.host.shared.discovery_generation(), generation + 1);
    let event = w.next(stays).unwrap().completion();
    assert_eq!((event.cid, event.result), (8, 0x0070_f002));
    assert_eq!(w.fetch(stays, peer::get_log(9, 0x70, 0, 1024)).0[8], 1, "one record");
    // The listener had accepted this connection before.
    for subnqn in [world::SUBNQN, peer::DISCOVERY_NQN] {
        let data = peer::connect_data(subnqn, HOSTNQN, HOSTID, 0xffff);
        let done = w.call(waiting, peer::connect(0, 0, 31, 0), &data);
        assert_eq!((done.status, done.dnr), (0x181, false), "it may come back elsewhere");
    }
    assert_eq!(w.call(first.1, peer::write(1, 1, 6, 1), &block(8)).status, 0);
    w.port = 1;
    w.io(first.2, 2);
}

#[test]
fn a_port_with_an_owner_stays_unless_it_is_forced() {
    let mut w = World::new(&[false]);
    w.port = 2;
    change(&mut w, ports(&[1, 2], &[])).unwrap();
    let owner = w.owner();
    let error = change(&mut w, ports(&[1], &[2])).unwrap_err();
    let text = error.to_string();
    for words in [HOSTNQN, "192.0.2.1:4421", "close it there first"] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    assert!(w.links[owner.io].closed.is_none());
    assert_eq!(w.host.shared.identity().ports.len(), 2, "nothing has changed");
    assert_eq!(change(&mut w, ports(&[2], &[1])), Ok(2), "it is not at that one");
    change(&mut w, Change { force: true, ..ports(&[], &[2]) }).unwrap();
    assert!(w.links[owner.io].closed.is_some() && w.links[owner.admin].closed.is_some());
}

/// One change, and its states count as soon as its ports do.
#[test]
fn the_states_of_ports_change_with_the_rest() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    let state = |port| PortState { port, group: 1, state: AnaState::Inaccessible };
    let wrong = Change { ana: Some(vec![state(1)]), added: vec![config(1, 9)], ..ports(&[], &[1]) };
    assert!(change(&mut w, wrong).is_err());
    assert_eq!(w.call(io, peer::write(1, 1, 5, 1), &block(1)).status, 0, "nothing has changed");
    let two = Change { ana: Some(vec![state(1), state(2)]), ..ports(&[1, 2], &[]) };
    change(&mut w, two).unwrap();
    assert_eq!(w.call(io, peer::write(1, 1, 5, 1), &block(1)).status, 0x302);
    w.port = 2;
    let (_, cntlid) = w.admin();
    let other = w.io(cntlid, 1);
    assert_eq!(w.call(other, peer::write(1, 1, 5, 1), &block(1)).status, 0x302);
    change(&mut w, Change { ana: Some(vec![state(2)]), ..Change::default() }).unwrap();
    assert_eq!(w.call(io, peer::write(1, 1, 5, 1), &block(1)).status, 0);
    assert_eq!(w.call(other, peer::write(1, 1, 5, 1), &block(1)).status, 0x302);
}

#[test]
fn a_write_in_pieces_ends_on_the_namespace_where_it_began() {
    let mut w = World::new(&[false, false]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    let data = pattern(1, 512);
    w.command(io, peer::write(3, 2, 0, 512).transport(512 * 4096), &[]);
    let first = w.next(io).unwrap();
    w.send_data(io, &first, &data);
    let number = change(&mut w, removal(&[2])).unwrap();
    assert!(!w.host.shared.is_retired(number), "a piece is to come");
    while let Some(pdu) = w.next(io) {
        if pdu.kind == 0x09 {
            w.send_data(io, &pdu, &data);
        } else {
            assert_eq!(pdu.completion().status, 0);
        }
    }
    assert_eq!(w.host.drives[1].block(511), data[511 * 4096..]);
    assert!(w.host.shared.is_retired(number));
}

/// The result of the event: immediate, normal NVM subsystem shutdown, no log page.
const NORMAL_SHUTDOWN: u64 = 3;

#[test]
fn a_target_that_is_drained_takes_no_new_hosts_and_informs_the_others() {
    let mut w = World::new(&[false]);
    w.lease_ms = 60_000;
    let owner = w.owner();
    let (plain, cntlid) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let io = w.io_as(RIVAL, RIVAL_ID, cntlid, 1);
    let configure = Sqe::new(0x09, 7, 0).dword(10, 0x0b).dword(11, 1 << 15);
    assert_eq!(w.call(plain, configure, &[]).status, 0);
    for admin in [plain, owner.admin] {
        w.command(admin, Sqe::new(0x0c, 20, 0), &[]);
    }
    let csts = |w: &mut World, at| w.call(at, peer::property_get(1, 0x1c, false), &[]).result;
    assert_eq!(csts(&mut w, plain), 1);
    for _ in 0..2 {
        w.host.shared.drain();
        wake(&mut w);
    }
    let event = w.next(plain).unwrap().completion();
    assert_eq!((event.cid, event.status, event.result), (20, 0, NORMAL_SHUTDOWN));
    assert_eq!(w.next(owner.admin), None, "it has not enabled the event");
    // Ready, a shutdown of the subsystem is in progress.
    assert_eq!(csts(&mut w, plain), 1 | 1 << 2 | 1 << 6);
    // Those that are there go on, also with a new queue.
    assert_eq!(w.call(io, peer::write(1, 1, 0, 1), &block(1)).status, GUARDED);
    assert_eq!(w.fetch(io, read(1)).1.status, 0);
    w.io(owner.cntlid, 2);
    let connect = |w: &mut World, host: &str, id| {
        let at = w.initialize(peer::Digests::default(), 0);
        let data = peer::connect_data(world::SUBNQN, host, id, 0xffff);
        w.call(at, peer::connect(0, 0, 31, 0), &data)
    };
    let refused = connect(&mut w, "nqn.2026-01.io.example:third", [3; 16]);
    assert_eq!((refused.status, refused.dnr), (0x181, false), "Connect busy: try again");
    // The owner of an open volume may come back, to close it.
    assert_eq!(w.host.shared.open_volumes(w.host.now).len(), 1);
    w.hang_up(owner.io);
    w.hang_up(owner.admin);
    assert_eq!(w.host.shared.open_volumes(w.host.now).len(), 1, "it is away for a moment");
    assert_eq!(connect(&mut w, HOSTNQN, HOSTID).status, 0);
    w.host.now += 61_000_000_000;
    assert_eq!(w.host.shared.open_volumes(w.host.now), []);
    assert_eq!(connect(&mut w, HOSTNQN, HOSTID).status, 0x181);
    // A host that shuts its controller down sees that it is complete.
    w.call(plain, peer::property_set(1, 0x14, peer::CC_ENABLE | 1 << 14), &[]);
    assert_eq!(csts(&mut w, plain) >> 2 & 3, 2);
}
