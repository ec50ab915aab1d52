//! The standard path of the target, against a host written from the specification.

mod world;

use peer::{Digests, HOSTID, HOSTNQN, Sqe};
use riopipe_order::attribute::StreamId;
use riopipe_order::block_device::{Cause, Gone};
use riopipe_order::entry::Position;
use riopipe_session::auth::tls::Demand;
use riopipe_session::target::limits::{CONNECTION_BYTES, QUEUE_ENTRIES_MAX};
use riopipe_session::target::{Access, Closed, DiscoveryPort};
use riopipe_session::wire;
use riopipe_testkit::peer;
use world::{
    BLOCKS, SUBNQN, VOLUME, What, World, block, identity, io_error, pattern, riopipe_bytes,
};

#[test]
fn handshake_agrees_on_what_the_host_asks_for() {
    for (header, data) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut w = World::new(&[false]);
        let at = w.accept();
        w.send(at, &peer::icreq(Digests { header, data }, 0));
        let r = w.next(at).unwrap();
        assert_eq!((r.kind, r.header.len(), r.u16(8)), (0x01, 128, 0));
        assert_eq!(r.header[10], 0, "CPDA");
        assert_eq!(r.header[11], u8::from(header) | u8::from(data) << 1);
        assert!(r.u32(12) >= 128 * 1024, "MAXH2CDATA {}", r.u32(12));
    }
}

#[test]
fn digests_that_the_target_insists_on_are_not_optional() {
    for wanted in 0..4 {
        let mut identity = identity();
        identity.require_header_digest = wanted & 1 != 0;
        identity.require_data_digest = wanted & 2 != 0;
        let mut w = World::with(&[false], identity, world::Parts::default());
        for offered in 0..4 {
            let digests = Digests { header: offered & 1 != 0, data: offered & 2 != 0 };
            let at = w.accept();
            w.send(at, &peer::icreq(digests, 0));
            if wanted & !offered == 0 {
                assert_eq!(w.next(at).unwrap().kind, 0x01, "{wanted} of {offered}");
                continue;
            }
            let term = w.next(at).unwrap();
            // Fatal error status 6, unsupported parameter; the information is the field's offset.
            assert_eq!((term.kind, term.u16(8), term.u32(10)), (0x03, 6, 11));
            assert_eq!(term.data, peer::icreq(digests, 0)[..128]);
            assert!(matches!(w.links[at].closed, Some(Closed::Protocol(_))));
        }
    }
}

#[test]
fn every_byte_may_arrive_alone() {
    let mut w = World::new(&[false]);
    let at = w.accept();
    let digests = Digests { header: true, data: true };
    for byte in peer::icreq(digests, 0) {
        w.send(at, &[byte]);
    }
    assert_eq!(w.next(at).unwrap().kind, 0x01);
    w.links[at].digests = digests;
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, 0xffff);
    for byte in peer::capsule(digests, &peer::connect(9, 0, 31, 0).0, &data) {
        w.send(at, &[byte]);
    }
    let done = w.next(at).unwrap().completion();
    assert_eq!((done.cid, done.status, done.sqid), (9, 0, 0));
}

#[test]
fn host_alignment_is_kept() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    for hpda in [0, 1, 15, 31] {
        let io = w.initialize(Digests { header: true, data: true }, hpda);
        let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
        assert_eq!(w.call(io, peer::connect(0, u16::from(hpda % 16) + 1, 15, 0), &data).status, 0);
        // `parse` checks where the data begins.
        assert_eq!(w.fetch(io, peer::read(1, 1, 0, 1)).0, vec![0; 4096]);
        w.hang_up(io);
    }
}

#[test]
fn connect_is_refused_for_what_is_wrong_with_it() {
    let good = || peer::connect_data(SUBNQN, HOSTNQN, HOSTID, 0xffff);
    let named = |sub: &str, host: &str| peer::connect_data(sub, host, HOSTID, 0xffff);
    let connect = |qid, sqsize| peer::connect(3, qid, sqsize, 0);
    let unterminated = {
        let mut d = good();
        d[256..512].fill(b'n');
        d
    };
    // (command, data, status, result: offset of the field, bit 16 if in the data)
    let cases: Vec<(&str, Sqe, Vec<u8>, u16, u64)> = vec![
        ("format", connect(0, 31).byte(40, 1), good(), 0x180, 0),
        ("queue of one", connect(0, 0), good(), 0x182, 44),
        ("queue too long", connect(0, 4095), good(), 0x182, 44),
        (
            "other subsystem",
            connect(0, 31),
            named("nqn.2026-01.io.example:b", HOSTNQN),
            0x182,
            0x10100,
        ),
        ("no NQN", connect(0, 31), named("drives", HOSTNQN), 0x182, 0x10100),
        ("no subsystem", connect(0, 31), named("", HOSTNQN), 0x182, 0x10100),
        ("no NQN of the host", connect(0, 31), named(SUBNQN, "host"), 0x182, 0x10200),
        ("name without end", connect(0, 31), unterminated, 0x182, 0x10100),
        (
            "static controller",
            connect(0, 31),
            peer::connect_data(SUBNQN, HOSTNQN, HOSTID, 5),
            0x182,
            0x10010,
        ),
        (
            "no controller",
            connect(1, 31),
            peer::connect_data(SUBNQN, HOSTNQN, HOSTID, 77),
            0x182,
            0x10010,
        ),
        ("short data", connect(0, 31).inline(512), good()[..512].to_vec(), 0x182, 0x10000),
        (
            "long data",
            connect(0, 31).inline(2048),
            [good(), vec![0; 1024]].concat(),
            0x182,
            0x10000,
        ),
        ("data elsewhere", connect(0, 31).transport(1024), vec![], 0x11, 0),
        ("not connect", Sqe::new(0x06, 3, 0).inline(0), vec![], 0x0c, 0),
        ("not connect, either", peer::property_get(3, 0, true), vec![], 0x0c, 0),
    ];
    for (what, sqe, data, status, result) in cases {
        let mut w = World::new(&[false]);
        let at = w.initialize(Digests::default(), 0);
        let done = w.call(at, sqe, &data);
        assert_eq!((done.status, done.result), (status, result), "{what}");
        // The connection is as good as before.
        assert_eq!(w.call(at, peer::connect(4, 0, 31, 0), &good()).status, 0, "{what}");
    }
}

#[test]
fn io_queues_need_their_own_enabled_controller() {
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin();
    let mut refused = |hostnqn: &str, hostid, qid| {
        let at = w.initialize(Digests::default(), 0);
        let data = peer::connect_data(SUBNQN, hostnqn, hostid, cntlid);
        w.call(at, peer::connect(0, qid, 31, 0), &data).status
    };
    assert_eq!(refused(HOSTNQN, HOSTID, 1), 0);
    assert_eq!(refused(HOSTNQN, HOSTID, 1), 0x0c, "the queue is there already");
    assert_eq!(refused(HOSTNQN, HOSTID, 17), 0x182, "beyond what was granted");
    assert_eq!(refused(HOSTNQN, [1; 16], 2), 0x184, "another host id");
    assert_eq!(refused("nqn.2014-08.org.nvmexpress:uuid:x", HOSTID, 2), 0x184, "another host");
    assert_eq!(w.call(admin, peer::property_set(2, 0x14, 0), &[]).status, 0);
    let at = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    assert_eq!(w.call(at, peer::connect(0, 2, 31, 0), &data).status, 0x0c, "disabled");
    assert!(
        w.host.log.iter().any(|e| e.contains("Refused") && e.contains("not enabled")),
        "a message has the reason"
    );
}

#[test]
fn only_allowed_hosts_get_in() {
    let mut w = World::with(&[false], identity(), world::Parts::default());
    w.host.shared.set_access(Access::by_name(["nqn.2026-01.io.example:friend".into()]));
    let at = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, 0xffff);
    let done = w.call(at, peer::connect(0, 0, 31, 0), &data);
    assert_eq!((done.status, done.dnr), (0x184, true));
    assert!(w.host.log.iter().any(|e| e.contains("not on the list of allowed hosts")));
    let data = peer::connect_data(SUBNQN, "nqn.2026-01.io.example:friend", HOSTID, 0xffff);
    assert_eq!(w.call(at, peer::connect(0, 0, 31, 0), &data).status, 0);
}

#[test]
fn controller_properties_show_when_it_is_ready() {
    let mut w = World::new(&[false]);
    let at = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, 0xffff);
    w.call(at, peer::connect(0, 0, 31, 0), &data);
    let cap = w.call(at, peer::property_get(1, 0, true), &[]).result;
    assert_eq!(cap & 0xffff, u64::from(QUEUE_ENTRIES_MAX) - 1, "MQES, from 0");
    assert_eq!(cap >> 16 & 1, 1, "CQR");
    assert_eq!(cap >> 37 & 1, 1, "CSS: NVM");
    assert_eq!(cap >> 48 & 0xf, 0, "MPSMIN: 4 KiB");
    assert_eq!(w.call(at, peer::property_get(1, 8, false), &[]).result, 0x2_0000);
    assert_eq!(w.call(at, peer::property_get(1, 0x68, false), &[]).result, 0x1_0001, "CRTO");
    w.call(at, peer::property_set(1, 0x14, 0), &[]);
    assert_eq!(w.call(at, peer::property_get(1, 0x1c, false), &[]).result, 0);
    assert_eq!(w.call(at, peer::identify(1, 1, 0), &[]).status, 0x0c, "not enabled");
    assert_eq!(w.call(at, peer::property_get(1, 0, false), &[]).status, 0x02, "CAP has 8 bytes");
    assert_eq!(w.call(at, peer::property_get(1, 0x1000, false), &[]).status, 0x02);
    w.call(at, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
    assert_eq!(w.call(at, peer::property_get(1, 0x1c, false), &[]).result, 1, "ready");
    w.call(at, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
    assert_eq!(w.call(at, peer::property_get(1, 0x1c, false), &[]).result, 1, "as it was");
    assert_eq!(w.call(at, peer::property_get(1, 0x14, false), &[]).result, peer::CC_ENABLE.into());
    assert_eq!(w.call(at, peer::property_set(1, 0x1c, 0), &[]).status, 0x02, "CSTS is read only");
    // Normal shutdown: complete at once.
    w.call(at, peer::property_set(1, 0x14, peer::CC_ENABLE | 1 << 14), &[]);
    assert_eq!(w.call(at, peer::property_get(1, 0x1c, false), &[]).result >> 2 & 3, 2);
    w.call(at, peer::property_set(1, 0x14, 0), &[]);
    assert_eq!(w.call(at, peer::property_get(1, 0x1c, false), &[]).result, 0);
    // A page size that it doesn't have: fatal.
    w.call(at, peer::property_set(1, 0x14, peer::CC_ENABLE | 1 << 7), &[]);
    assert_eq!(w.call(at, peer::property_get(1, 0x1c, false), &[]).result, 2);
}

#[test]
fn a_reset_controller_loses_its_io_queues() {
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    w.call(admin, peer::property_set(1, 0x14, 0), &[]);
    assert_eq!(w.links[io].closed, Some(Closed::Ended("its controller was disabled")));
    w.call(admin, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
    w.io(cntlid, 1);
}

#[test]
fn identify_describes_controller_and_namespaces() {
    let mut w = World::new(&[true, false]);
    let (at, cntlid) = w.admin();
    let (id, _) = w.fetch(at, peer::identify(1, 0x01, 0));
    assert_eq!(&id[4..11], b"RIO0001");
    assert_eq!(&id[24..34], b"Rio target");
    assert_eq!(id[77], 11, "MDTS: 8 MiB");
    assert_eq!(u16::from_le_bytes([id[78], id[79]]), cntlid);
    assert_eq!(id[111], 1, "an I/O controller");
    assert_eq!((id[512], id[513]), (0x66, 0x44));
    assert_eq!(id[516], 2, "NN");
    assert_eq!(id[540], 2, "MNAN");
    assert_eq!(u16::from_le_bytes([id[514], id[515]]), QUEUE_ENTRIES_MAX, "MAXCMD");
    assert_eq!(id[76], 0b1010, "CMIC: other controllers have the namespaces, too; ANA");
    assert_eq!(id[96], 0b100_0001, "CTRATT: long host ids, keep alive by traffic");
    assert_eq!(id[260], 0b11, "FRMW: one slot, read only");
    assert_eq!(id[1804] & 1, 1, "OFCS: queues may be disconnected");
    assert_eq!(id[520] & 0b1100, 0b1100, "write zeroes, dataset management");
    assert_eq!(id[525], 0b101, "a volatile write cache; FLUSH takes one namespace");
    assert_eq!((&id[64..67], &id[80..84]), (&b"0.1"[..], &[0, 0, 2, 0][..]), "firmware, version");
    assert_eq!(id[1803], 1, "MSDBD");
    let mut kept = World::new(&[false, false]);
    let (other, _) = kept.admin();
    assert_eq!(kept.fetch(other, peer::identify(1, 0x01, 0)).0[525] & 1, 0, "and none");
    assert_eq!(u16::from_le_bytes([id[320], id[321]]), 1, "KAS: steps of 100 ms");
    assert_eq!(id[259], 3, "AERL: four event requests");
    assert_eq!(id[261] & 0b111, 0b111, "log pages: SMART by namespace, effects, offsets");
    assert_eq!(id[536] & 3, 1, "SGLs");
    assert_eq!(&id[768..768 + SUBNQN.len()], SUBNQN.as_bytes());
    let capsule = u32::from_le_bytes(id[1792..1796].try_into().unwrap()) * 16;
    assert!(capsule >= 64 + 32 * 1024, "in-capsule data");
    assert_eq!(&id[3072..3080], b"RIOPIPE\x01");
    let (list, _) = w.fetch(at, peer::identify(1, 0x02, 0));
    assert_eq!(&list[..12], [1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    let (list, _) = w.fetch(at, peer::identify(1, 0x02, 1));
    assert_eq!(&list[..8], [2, 0, 0, 0, 0, 0, 0, 0]);
    let (ns, _) = w.fetch(at, peer::identify(1, 0x00, 2));
    assert_eq!(u64::from_le_bytes(ns[..8].try_into().unwrap()), BLOCKS);
    assert_eq!(ns[128 + 2], 12, "LBADS: 4096");
    assert_eq!(u64::from_le_bytes(ns[8..16].try_into().unwrap()), BLOCKS, "NCAP");
    assert_eq!(u64::from_le_bytes(ns[16..24].try_into().unwrap()), BLOCKS, "NUSE");
    assert_eq!(ns[30], 1, "NMIC: shared");
    let (pages, _) = w.fetch(at, peer::get_log(1, 0, 0, 1024));
    let there: Vec<usize> = (0..256).filter(|lid| pages[4 * lid] & 1 != 0).collect();
    assert_eq!(there, [0, 1, 2, 3, 4, 5, 0x0c, 0x80]);
    let (smart, _) = w.fetch(at, peer::get_log(1, 2, 0, 512));
    assert_eq!(u16::from_le_bytes([smart[1], smart[2]]), 300, "kelvin");
    assert_eq!((smart[3], smart[4]), (100, 10), "spare, and its threshold");
    assert_eq!(ns[33], 0b1001, "deallocated blocks read as zeroes (T10); DEAC");
    assert_eq!(&ns[104..120], [2; 16]);
    let (descriptors, _) = w.fetch(at, peer::identify(1, 0x03, 1));
    assert_eq!(&descriptors[..4], [2, 16, 0, 0]);
    assert_eq!(&descriptors[4..20], [1; 16]);
    assert_eq!(&descriptors[20..24], [3, 16, 0, 0]);
    assert_eq!(&descriptors[24..40], [0x11; 16]);
    assert_eq!(&descriptors[40..45], [4, 1, 0, 0, 0]);
    for (cns, nsid) in
        [(0x05, 1), (0x06, 0), (0x07, 0), (0x08, 1), (0x10, 0), (0x11, 1), (0x13, 0), (0x1c, 0)]
    {
        assert_eq!(w.fetch(at, peer::identify(1, cns, nsid)).1.status, 0, "CNS {cns:#x}");
    }
    assert_eq!(w.call(at, peer::identify(1, 0x55, 0), &[]).status, 0x02);
    assert_eq!(w.call(at, peer::identify(1, 1, 0).transport(512), &[]).status, 0x0f, "too small");
}

#[test]
fn log_pages_come_in_pieces() {
    let mut w = World::new(&[false]);
    let (at, _) = w.admin();
    let (smart, _) = w.fetch(at, peer::get_log(1, 0x02, 0, 512));
    assert_eq!(smart[3], 100, "spare");
    let (firmware, _) = w.fetch(at, peer::get_log(1, 0x03, 0, 512));
    assert_eq!(&firmware[8..11], b"0.1");
    let (effects, _) = w.fetch(at, peer::get_log(1, 0x05, 1024, 64));
    assert_eq!(effects[4] & 1, 1, "write is supported");
    assert_eq!(w.fetch(at, peer::get_log(1, 0x01, 0, 64)).1.status, 0);
    assert_eq!(w.fetch(at, peer::get_log(1, 0x04, 0, 4096)).1.status, 0);
    assert_eq!(w.call(at, peer::get_log(1, 0x70, 0, 1024), &[]).status, 0x109);
    assert_eq!(w.call(at, peer::get_log(1, 0x02, 1024, 64), &[]).status, 0x02, "beyond the end");
    let huge = peer::get_log(1, 0x02, 0, 64).dword(11, 0xffff);
    assert_eq!(w.call(at, huge, &[]).status, 0x02);
    let (smart, done) = w.fetch(at, peer::get_log(1, 0x02, 0, CONNECTION_BYTES as u32));
    assert_eq!((smart.len(), done.status), (CONNECTION_BYTES, 0), "the longest part of a log page");
}

#[test]
fn features_and_keep_alive() {
    let mut w = World::new(&[true]);
    let (at, _) = w.admin();
    let set = |fid: u32, value| Sqe::new(0x09, 7, 0).dword(10, fid).dword(11, value);
    let get = |fid: u32| Sqe::new(0x0a, 7, 0).dword(10, fid);
    let queues = w.call(at, set(0x07, 0x001f_001f), &[]);
    assert_eq!((queues.status, queues.result), (0, 0x000f_000f), "16 of 32");
    assert_eq!(w.call(at, set(0x07, 0x0001_0001), &[]).result, 0x0001_0001);
    for none in [0xffff_ffff, 0x0001_ffff, 0xffff_0001] {
        assert_eq!(w.call(at, set(0x07, none), &[]).status, 0x02);
    }
    assert_eq!(w.call(at, set(0x07, 0xfffe_fffe), &[]).result, 0x000f_000f);
    assert_eq!(w.call(at, set(0x06, 1), &[]).status, 0);
    for (state, status) in [(0, 0), (1, 0x02), (0x20, 0)] {
        assert_eq!(w.call(at, set(0x02, state), &[]).status, status, "power state {state:#x}");
    }
    let mut kept = World::new(&[false]);
    let (other, _) = kept.admin();
    assert_eq!(kept.call(other, set(0x06, 1), &[]).status, 0x02, "there is no cache");
    assert_eq!(kept.call(other, get(0x06), &[]).status, 0x02);
    assert_eq!(w.call(at, get(0x06), &[]).result, 1, "the cache is on");
    assert_eq!(w.call(at, set(0x06, 0), &[]).status, 0x10e, "and can't be turned off");
    w.call(at, set(0x0f, 4321), &[]);
    assert_eq!(w.call(at, get(0x0f), &[]).result, 4400, "in steps of 100 ms");
    w.call(at, set(0x0b, 0x100), &[]);
    assert_eq!(w.call(at, get(0x0b), &[]).result, 0x100);
    assert_eq!(w.call(at, set(0x0b, 1).byte(43, 0x80), &[]).status, 0x10d, "not saveable");
    assert_eq!(w.call(at, get(0x7e), &[]).status, 0x02);
    assert_eq!(w.call(at, Sqe::new(0x18, 7, 0), &[]).status, 0);
    let hostid = get(0x81).dword(11, 1).transport(16);
    assert_eq!(w.fetch(at, hostid).0, HOSTID);
    assert_eq!(w.call(at, hostid.dword(11, 0), &[]).status, 0x02, "not in 64 bits");
    assert_eq!(w.call(at, Sqe::new(0x99, 7, 0), &[]).status, 0x01, "no such command");
}

#[test]
fn the_number_of_queues_is_agreed_on_before_the_first_io_queue() {
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin();
    let set = Sqe::new(0x09, 7, 0).dword(10, 0x07).dword(11, 0x0001_0001);
    assert_eq!(w.call(admin, set, &[]).status, 0);
    let io = w.io(cntlid, 1);
    let done = w.call(admin, set, &[]);
    assert_eq!((done.status, done.dnr), (0x0c, true));
    assert_eq!(w.call(admin, set.dword(11, 0xffff_ffff), &[]).status, 0x02, "never valid");
    let get = Sqe::new(0x0a, 7, 0).dword(10, 0x07);
    assert_eq!(w.call(admin, get, &[]).result, 0x000f_000f, "it may be read");
    // A controller reset ends the I/O queues.
    w.call(admin, peer::property_set(1, 0x14, 0), &[]);
    assert!(w.links[io].closed.is_some());
    w.call(admin, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
    assert_eq!(w.call(admin, set, &[]).status, 0);
}

#[test]
fn other_commands_may_not_be_part_of_a_fused_operation() {
    let mut w = World::new(&[false]);
    let at = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, 0xffff);
    let fused = |sqe: Sqe, fuse: u8| sqe.byte(1, sqe.0[1] | fuse);
    for fuse in 1..=3 {
        let connect = fused(peer::connect(3, 0, 31, 0), fuse);
        assert_eq!(w.call(at, connect, &data).status, 0x02, "before Connect");
    }
    let (admin, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    let commands = [
        (admin, peer::identify(1, 1, 0)),
        (admin, peer::get_log(1, 2, 0, 512)),
        (admin, Sqe::new(0x0a, 1, 0).dword(10, 0x07)),
        (admin, Sqe::new(0x0c, 1, 0)),
        (admin, Sqe::new(0x18, 1, 0)),
        (admin, peer::property_get(1, 0, true)),
    ];
    for (queue, sqe) in commands {
        for fuse in 1..=3 {
            let done = w.call(queue, fused(sqe, fuse), &[]);
            assert_eq!((done.status, done.dnr), (0x02, true), "opcode {:#x}", sqe.0[0]);
        }
    }
    // Compare and Write is the only fused operation.
    for sqe in [peer::read(1, 1, 0, 1), peer::flush(1, 1)] {
        for fuse in [1, 3] {
            let done = w.call(io, fused(sqe, fuse), &[]);
            assert_eq!((done.status, done.dnr), (0x02, true), "opcode {:#x}", sqe.0[0]);
        }
    }
    assert!(w.host.drives[0].history.is_empty());
}

#[test]
fn an_io_queue_has_no_fabrics_command_but_disconnect() {
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    // Property Set and Get, Connect, the authentication commands, and unknown types.
    for fctype in [0x00, 0x04, 0x01, 0x05, 0x06, 0x07, 0x7f, 0xff] {
        let done = w.call(io, Sqe::new(0x7f, 1, fctype), &[]);
        assert_eq!((done.status, done.dnr), (0x01, true), "type {fctype:#x}");
    }
    assert_eq!(w.call(admin, Sqe::new(0x7f, 1, 0x01), &[]).status, 0x0c, "it is connected");
    assert_eq!(w.call(io, Sqe::new(0x7f, 1, 0x08), &[]).status, 0);
    assert!(w.links[io].closed.is_some());
}

#[test]
fn event_requests_are_held_and_can_be_aborted() {
    let mut w = World::new(&[false]);
    let (at, _) = w.admin();
    for cid in 20..24 {
        w.command(at, Sqe::new(0x0c, cid, 0), &[]);
        assert_eq!(w.next(at), None, "held");
    }
    assert_eq!(w.call(at, Sqe::new(0x0c, 24, 0), &[]).status, 0x105, "one too many");
    w.command(at, Sqe::new(0x08, 30, 0).dword(10, 22 << 16), &[]);
    let answers = w.completions(at);
    assert_eq!((answers[0].cid, answers[0].status), (22, 0x07));
    assert_eq!((answers[1].cid, answers[1].status, answers[1].result), (30, 0, 0));
    let done = w.call(at, Sqe::new(0x08, 31, 0).dword(10, 99 << 16 | 1), &[]);
    assert_eq!((done.status, done.result), (0, 1), "nothing to abort");
    for target in [22 << 16, 21 << 16 | 1] {
        assert_eq!(w.call(at, Sqe::new(0x08, 31, 0).dword(10, target), &[]).result, 1);
    }
    // A reset forgets those that are held, and what was set.
    w.call(at, Sqe::new(0x09, 7, 0).dword(10, 0x0b).dword(11, 0x100), &[]);
    w.call(at, Sqe::new(0x09, 7, 0).dword(10, 0x04).dword(11, 300), &[]);
    let features = |w: &mut World| {
        [0x0b, 0x04].map(|fid| w.call(at, Sqe::new(0x0a, 7, 0).dword(10, fid), &[]).result)
    };
    assert_eq!(features(&mut w), [0x100, 300]);
    w.call(at, peer::property_set(1, 0x14, 0), &[]);
    w.call(at, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
    assert_eq!(features(&mut w), [0, 0xffff]);
    for cid in 20..24 {
        w.command(at, Sqe::new(0x0c, cid, 0), &[]);
        assert_eq!(w.next(at), None, "held anew");
    }
}

#[test]
fn a_discovery_controller_has_no_volumes_and_few_features() {
    let mut w = World::new(&[true]);
    let (admin, _) = w.admin();
    let claim = w.first_claim();
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
    let at = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(peer::DISCOVERY_NQN, HOSTNQN, HOSTID, 0xffff);
    w.call(at, peer::connect(0, 0, 31, 0), &data);
    w.call(at, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
    let (id, _) = w.fetch(at, peer::identify(1, 1, 0));
    assert_eq!((id[259], id[261] & 0b100), (3, 0b100), "AERL, LPA");
    assert_eq!((id[514], id[515]), (64, 0), "MAXCMD");
    assert_eq!(u16::from_le_bytes([id[320], id[321]]), 1, "KAS");
    // Its log pages: the list of pages, and the one page.
    let (pages, _) = w.fetch(at, peer::get_log(1, 0, 0, 1024));
    let there: Vec<usize> = (0..256).filter(|lid| pages[4 * lid] & 1 != 0).collect();
    assert_eq!(there, [0x00, 0x70]);
    for lid in [0x01, 0x02, 0x03, 0x04, 0x05] {
        assert_eq!(w.call(at, peer::get_log(1, lid, 0, 512), &[]).status, 0x109, "{lid:#x}");
    }
    // It is not among those that have namespaces.
    let (list, _) = w.fetch(admin, peer::identify(1, 0x13, 0));
    assert_eq!(list[..2], [1, 0]);
    assert_eq!(w.fetch(admin, peer::identify(1, 0x08, 1)).0[14] & 1, 1, "NSTAT: ready");
    // Any host may connect to it.
    let page = vec![0; 4096];
    let commands = [
        (wire::claim_command(), &claim.encode()[..]),
        (wire::settle_command(), &page),
        (wire::list_command(VOLUME, StreamId(0), Position(0), 4096), &[]),
        (wire::status_command(VOLUME), &[]),
        (wire::release_command(VOLUME, true), &[]),
    ];
    for (command, data) in commands {
        let sqe = riopipe_bytes(&command).cid(9);
        let sqe = if data.is_empty() { sqe.transport(4096) } else { sqe.inline(4096) };
        assert_eq!(w.call(at, sqe, data).status, 0x01);
    }
    assert!(w.status(admin).own);
    for fid in [0x06, 0x07, 0x04, 0x81] {
        let set = Sqe::new(0x09, 7, 0).dword(10, fid).dword(11, 1);
        assert_eq!(w.call(at, set, &[]).status, 0x02, "{fid:#x}");
        assert_eq!(w.call(at, Sqe::new(0x0a, 7, 0).dword(10, fid), &[]).status, 0x02, "{fid:#x}");
    }
}

#[test]
fn t18_a_host_that_sends_nothing_loses_its_association() {
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin_as(HOSTNQN, HOSTID, 1000);
    let io = w.io(cntlid, 1);
    assert_eq!(w.host.shared.connections(), 2);
    w.host.now += 900_000_000;
    w.fetch(io, peer::read(1, 1, 0, 1));
    w.host.now += 900_000_000;
    w.tick();
    assert_eq!(w.links[admin].closed, None, "traffic on any queue shows that the host is alive");
    w.host.now += 200_000_000;
    w.tick();
    assert_eq!(w.links[admin].closed, Some(Closed::Stalled("the keep alive timer expired")));
    assert!(w.links[io].closed.is_some(), "its queues go with it");
    assert_eq!(w.host.shared.connections(), 0);
    assert_eq!(w.host.shared.controllers().count(), 0);
}

#[test]
fn blocks_are_written_read_zeroed_and_flushed() {
    let mut w = World::new(&[false, true]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    assert_eq!(w.call(io, peer::write(1, 2, 5, 8), &pattern(1, 8)).status, 0);
    let (data, done) = w.fetch(io, peer::read(2, 2, 4, 3));
    assert_eq!((done.cid, done.status), (2, 0));
    assert_eq!(data, [vec![0; 4096], block(1), block(2)].concat());
    assert_eq!(w.call(io, peer::write_zeroes(3, 2, 5, 2, false), &[]).status, 0);
    assert_eq!(w.call(io, peer::write_zeroes(3, 2, 8, 1, true), &[]).status, 0);
    let history = &w.host.drives[1].history;
    assert_eq!(history[2], (5, What::Zero { blocks: 2, deallocate: false }));
    assert_eq!(history[3], (8, What::Zero { blocks: 1, deallocate: true }));
    assert_eq!(w.host.drives[1].block(5), vec![0; 4096]);
    assert_eq!(w.host.drives[1].block(7), block(3));
    assert_eq!(w.call(io, peer::flush(4, 2), &[]).status, 0);
    assert_eq!(w.host.drives[1].history.last().unwrap().1, What::Flush);
    // Two ranges of dataset management; an empty one is skipped.
    let mut ranges = vec![0; 48];
    ranges[4] = 1;
    ranges[8] = 7;
    ranges[20] = 2;
    ranges[24] = 9;
    let dsm = Sqe::new(0x09, 5, 2).inline(48).dword(10, 2).dword(11, 4);
    assert_eq!(w.call(io, dsm, &ranges).status, 0);
    assert_eq!(w.host.drives[1].block(7), vec![0; 4096]);
    assert_eq!(w.host.drives[1].block(10), vec![0; 4096]);
    assert_eq!(w.host.drives[1].block(11), block(7));
}

#[test]
fn ranges_are_zeroed_one_after_the_other_until_the_host_is_gone() {
    for gone in [false, true] {
        let mut w = World::new(&[false]);
        let (_, cntlid) = w.admin();
        let io = w.io(cntlid, 1);
        assert_eq!(w.call(io, peer::write(1, 1, 0, 3), &pattern(1, 3)).status, 0);
        let mut ranges = vec![0; 48];
        for (i, range) in ranges.chunks_mut(16).enumerate() {
            range[4] = 1;
            range[8] = i as u8;
        }
        w.host.drives[0].holds = true;
        w.command(io, Sqe::new(0x09, 5, 1).inline(48).dword(10, 2).dword(11, 4), &ranges);
        w.complete(0, 0);
        assert_eq!((w.next(io), w.host.drives[0].pending[0].lba), (None, 1));
        if gone {
            w.hang_up(io);
            w.complete_all(0);
            assert_eq!(w.host.drives[0].block(2), block(3), "nothing new is begun");
            assert!(w.links[io].conn.is_drained());
        } else {
            w.complete_all(0);
            assert_eq!(w.next(io).unwrap().completion().status, 0);
            assert_eq!(w.host.drives[0].block(2), vec![0; 4096]);
        }
    }
}

#[test]
fn ranges_beyond_the_end_change_nothing() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    for (lba, blocks) in [(BLOCKS - 1, 2), (BLOCKS, 1), (u64::MAX, 1), (u64::MAX - 6, 7)] {
        // A range that is good comes first.
        let mut ranges = Vec::new();
        for (lba, blocks) in [(0, 1u32), (lba, blocks)] {
            ranges.extend([0; 4]);
            ranges.extend(blocks.to_le_bytes());
            ranges.extend(lba.to_le_bytes());
        }
        let dsm = Sqe::new(0x09, 5, 1).inline(32).dword(10, 1).dword(11, 4);
        assert_eq!(w.call(io, dsm, &ranges).status, 0x80, "{lba:#x}");
    }
    assert!(w.host.drives[0].history.is_empty());
}

#[test]
fn ranges_that_are_only_hints_change_nothing() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    assert_eq!(w.call(io, peer::write(1, 1, 0, 1), &block(1)).status, 0);
    let mut range = vec![0; 16];
    range[4] = 1;
    // Integral dataset for read and for write, but not deallocate.
    let hint = Sqe::new(0x09, 2, 1).inline(16).dword(10, 0).dword(11, 0b11);
    assert_eq!(w.call(io, hint, &range).status, 0);
    assert_eq!(w.host.drives[0].block(0), block(1));
}

#[test]
fn pages_of_the_nvm_command_set_and_of_no_other() {
    let mut w = World::new(&[false]);
    let (first, _) = w.admin();
    let (second, cntlid) = w.admin();
    assert_eq!(
        w.fetch(first, peer::identify(1, 0x05, 1)).0,
        [0; 4096],
        "no protection information"
    );
    assert_eq!(w.fetch(first, peer::identify(1, 0x1c, 0)).0[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    for cns in [0x05, 0x06, 0x07] {
        let zoned = peer::identify(1, cns, u32::from(cns != 0x06)).dword(11, 2 << 24);
        assert_eq!(w.call(first, zoned, &[]).status, 0x02, "{cns:#x}");
    }
    // Controllers from an id on.
    for cns in [0x12, 0x13] {
        let nsid = u32::from(cns == 0x12);
        let all = w.fetch(second, peer::identify(1, cns, nsid)).0;
        assert_eq!(u16::from_le_bytes([all[0], all[1]]), 2);
        let from = u32::from(cns) | u32::from(cntlid) << 16;
        let some = w.fetch(second, peer::identify(1, cns, nsid).dword(10, from)).0;
        assert_eq!((some[0], u16::from_le_bytes([some[2], some[3]])), (1, cntlid));
    }
    // Commands, and which of them change blocks.
    let effects = w.fetch(first, peer::get_log(1, 0x05, 0, 4096)).0;
    let of = |opcode: usize| u32::from_le_bytes(effects[opcode..opcode + 4].try_into().unwrap());
    assert_eq!([0x00, 0x01, 0x02, 0x08, 0x09, 0x05].map(|c| of(1024 + 4 * c)), [1, 3, 1, 3, 3, 1]);
    assert_eq!([0x02, 0x06, 0x0c, 0x01].map(|c| of(4 * c)), [1, 1, 1, 0]);
    // The current value of a feature can be read; no other of its values is kept.
    let feature = |select: u32| Sqe::new(0x0a, 1, 0).dword(10, 0x0f | select << 8);
    assert_eq!(w.call(first, feature(0), &[]).status, 0);
    for select in 1..8 {
        assert_eq!(w.call(first, feature(select), &[]).status, 0x02, "{select}");
    }
    // A command set that does not exist cannot be selected.
    w.call(first, peer::property_set(1, 0x14, 0), &[]);
    w.call(first, peer::property_set(1, 0x14, peer::CC_ENABLE | 1 << 4), &[]);
    assert_eq!(w.call(first, peer::property_get(1, 0x1c, false), &[]).result, 2, "fatal");
}

#[test]
fn a_page_of_ranges_may_be_longer_than_its_ranges() {
    // As Linux sends each of its discards: 4 KiB, of which dword 10 gives the part that counts.
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    assert_eq!(w.call(io, peer::write(1, 1, 0, 4), &pattern(1, 4)).status, 0);
    let mut page = vec![0; 4096];
    page[4] = 1;
    page[8] = 2;
    // Bytes in the form of a range behind the last one are no range.
    page[20] = 1;
    let dsm = |len| Sqe::new(0x09, 2, 1).inline(len).dword(10, 0).dword(11, 4);
    assert_eq!(w.call(io, dsm(4096), &page).status, 0);
    assert_eq!(w.host.drives[0].block(0), block(1));
    assert_eq!(w.host.drives[0].block(2), vec![0; 4096]);
    // The same, asked for.
    page[8] = 3;
    w.command(io, dsm(0).transport(4096), &[]);
    let r2t = w.next(io).unwrap();
    assert_eq!((r2t.kind, r2t.u32(12), r2t.u32(16)), (0x09, 0, 4096));
    w.send(io, &peer::h2c_data(Digests::default(), 2, r2t.u16(10), 0, &page, true));
    assert_eq!(w.next(io).unwrap().completion().status, 0);
    assert_eq!(w.host.drives[0].block(3), vec![0; 4096]);
    page.resize(8192, 0);
    assert_eq!(w.call(io, dsm(8192), &page).status, 0x0f, "more than there can be ranges");
    assert_eq!(w.call(io, dsm(8), &page[..8]).status, 0x0f, "less than the ranges");
}

#[test]
fn what_is_wrong_with_a_command_is_reported() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    let one = block(1);
    let last = BLOCKS - 1;
    let cases: Vec<(&str, Sqe, &[u8], u16)> = vec![
        ("namespace 0", peer::write(1, 0, 0, 1), &one, 0x0b),
        ("namespace 2", peer::read(1, 2, 0, 1), &[], 0x0b),
        ("beyond the end", peer::write(1, 1, BLOCKS, 1), &one, 0x80),
        ("across the end", peer::read(1, 1, last, 2), &[], 0x80),
        ("far beyond", peer::write(1, 1, u64::MAX, 1), &one, 0x80),
        ("zeroes beyond", peer::write_zeroes(1, 1, last, 2, true), &[], 0x80),
        ("more than MDTS", peer::write_r2t(1, 1, 0, 2049), &[], 0x02),
        ("more than MDTS, read", peer::read(1, 1, 0, 2049), &[], 0x02),
        ("too little data", peer::write(1, 1, 0, 2).inline(4096), &one, 0x0f),
        ("too little announced", peer::write(1, 1, 0, 1).inline(512), &one, 0x0f),
        ("data beside the point", peer::write_r2t(1, 1, 0, 1), &one, 0x0f),
        ("offset", peer::write(1, 1, 0, 1).byte(24, 4), &one, 0x16),
        ("other descriptor", peer::write(1, 1, 0, 1).byte(39, 0x40), &one, 0x11),
        ("read of another length", peer::read(1, 1, 0, 1).transport(8192), &[], 0x0f),
        ("read into the capsule", peer::read(1, 1, 0, 1).inline(4096), &[], 0x11),
        ("write uncorrectable", peer::read(1, 1, 0, 1).byte(0, 4), &[], 0x01),
        ("fused", peer::write(1, 1, 0, 1).byte(1, 0x41), &one, 0x02),
        ("a directive", peer::write(1, 1, 0, 1).byte(50, 0x10), &one, 0x02),
        ("flush of all", peer::flush(1, 0xffff_ffff), &[], 0x0b),
        ("admin command", Sqe::new(0x06, 1, 0), &[], 0x01),
        ("property on an I/O queue", peer::property_get(1, 0, true), &[], 0x01),
        ("property set on an I/O queue", peer::property_set(1, 0x14, 0), &[], 0x01),
        ("connect again", peer::connect(1, 1, 31, 0), &[], 0x01),
    ];
    for (what, sqe, data, status) in cases {
        assert_eq!(w.call(io, sqe, data).status, status, "{what}");
    }
    assert!(w.host.drives[0].history.is_empty(), "nothing reached the drive");
    w.call(io, peer::write(1, 1, last, 1), &one);
    assert_eq!(w.host.drives[0].block(last), one, "the last block is there");
    assert_eq!(w.fetch(io, peer::read(1, 1, 0, 256)).0.len(), 1 << 20, "as much as fits one piece");
}

#[test]
fn large_writes_are_asked_for() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    let data = pattern(3, 256);
    w.command(io, peer::write_r2t(8, 1, 100, 256), &[]);
    let r2t = w.next(io).unwrap();
    assert_eq!((r2t.kind, r2t.u16(8), r2t.u32(12), r2t.u32(16)), (0x09, 8, 0, 1 << 20));
    let mut at = 0;
    for piece in data.chunks(128 * 1024) {
        assert_eq!(w.next(io), None, "not before it is all there");
        let last = at + piece.len() == data.len();
        w.send(io, &peer::h2c_data(Digests::default(), 8, r2t.u16(10), at as u32, piece, last));
        at += piece.len();
    }
    assert_eq!(w.next(io).unwrap().completion().status, 0);
    assert_eq!(w.host.drives[0].history, [(100, What::Write(data))]);
}

#[test]
fn reads_need_no_response_where_the_host_has_turned_flow_control_off() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    let done = w.call(io, peer::connect(0, 1, 31, 0).byte(46, 4), &data);
    assert_eq!((done.status, done.sqhd), (0, 0xffff), "accepted");
    w.command(io, peer::read(1, 1, 0, 1), &[]);
    let read = w.next(io).unwrap();
    assert_eq!((read.kind, read.flags & 0b1100), (0x07, 0b1100), "last, success");
    assert_eq!(w.next(io), None);
}

#[test]
fn the_submission_queue_head_moves_and_wraps() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    assert_eq!(w.call(io, peer::connect(0, 1, 2, 0), &data).sqhd, 0);
    let heads: Vec<u16> =
        (0..4).map(|cid| w.call(io, peer::write(cid, 1, 0, 1), &block(0)).sqhd).collect();
    assert_eq!(heads, [1, 2, 0, 1]);
}

#[test]
fn a_write_through_the_cache_is_followed_by_a_flush() {
    let mut w = World::new(&[true, false]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    for drive in &mut w.host.drives {
        drive.holds = true;
    }
    let fua = |nsid| peer::write(1, nsid, 0, 1).byte(51, 0x40);
    w.command(io, fua(1), &block(1));
    w.complete(0, 0);
    assert_eq!(w.next(io), None, "not durable yet");
    assert_eq!(w.host.drives[0].pending[0].what, What::Flush);
    w.complete(0, 0);
    assert_eq!(w.next(io).unwrap().completion().status, 0);
    w.command(io, fua(2), &block(1));
    w.complete(1, 0);
    assert_eq!(w.next(io).unwrap().completion().status, 0, "no cache, no flush");
    // The same on drives that finish at once.
    for (drive, flushes) in [(0, 1), (1, 0)] {
        w.host.drives[drive].holds = false;
        w.host.drives[drive].history.clear();
        assert_eq!(w.call(io, fua(drive as u32 + 1), &block(1)).status, 0);
        let history = &w.host.drives[drive].history;
        let found = history.iter().filter(|(_, what)| *what == What::Flush).count();
        assert_eq!((history.len(), found), (1 + flushes, flushes));
    }
}

#[test]
fn drive_errors_reach_the_host() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    w.host.drives[0].failing = true;
    assert_eq!(w.call(io, peer::write(1, 1, 0, 1), &block(1)).status, 0x280);
    assert_eq!(w.call(io, peer::read(1, 1, 0, 1), &[]).status, 0x281);
    assert_eq!(w.call(io, peer::flush(1, 1), &[]).status, 0x280);
    w.host.drives[0].failing = false;
    w.host.drives[0].holds = true;
    w.command(io, peer::write(1, 1, 0, 1), &block(1));
    w.fail(0, 0);
    assert_eq!(w.next(io).unwrap().completion().status, 0x280);
    // Each by its name, also of a FLUSH that was to cover something.
    let mut w = World::new(&[true]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    for (cause, status, dnr) in [
        (Cause::OutOfRange { capacity: 1 }, 0x080, true),
        (Cause::NoSpace("full".into()), 0x081, true),
        (Cause::Vanished(Gone::Deleted), 0x2c0, true),
        (Cause::PowerLost, 0x005, false),
        (Cause::Failed("broken".into()), 0x280, false),
        (Cause::QueueFull { depth: 1 }, 0x280, false),
    ] {
        w.host.drives[0].holds = false;
        assert_eq!(w.call(io, peer::write(1, 1, 0, 1), &block(1)).status, 0);
        w.host.drives[0].holds = true;
        w.command(io, peer::flush(1, 1), &[]);
        w.fail_with(0, 0, io_error(cause.clone()));
        let done = w.next(io).unwrap().completion();
        assert_eq!((done.status, done.dnr), (status, dnr), "{cause:?}");
    }
}

#[test]
fn a_damaged_payload_fails_its_command_only() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.initialize(Digests { header: true, data: true }, 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    w.call(io, peer::connect(0, 1, 31, 0), &data);
    let mut bytes = peer::capsule(w.links[io].digests, &peer::write(1, 1, 0, 1).0, &block(1));
    *bytes.last_mut().unwrap() ^= 1;
    w.send(io, &bytes);
    assert_eq!(w.next(io).unwrap().completion().status, 0x22, "transient transport error");
    assert!(w.host.drives[0].history.is_empty());
    w.command(io, peer::write_r2t(2, 1, 0, 2), &[]);
    let ttag = w.next(io).unwrap().u16(10);
    let digests = w.links[io].digests;
    let mut bytes = peer::h2c_data(digests, 2, ttag, 0, &block(1), false);
    *bytes.last_mut().unwrap() ^= 1;
    w.send(io, &bytes);
    assert_eq!(w.next(io), None, "the rest is still to come");
    w.send(io, &peer::h2c_data(digests, 2, ttag, 4096, &block(1), true));
    assert_eq!(w.next(io).unwrap().completion().status, 0x22);
    assert!(w.host.drives[0].history.is_empty());
    assert_eq!(w.call(io, peer::write(3, 1, 0, 1), &block(1)).status, 0);
}

#[test]
fn disconnect_ends_an_io_queue() {
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    let mut disconnect = Sqe::new(0x7f, 1, 0);
    disconnect.0[4] = 0x08;
    assert_eq!(w.call(admin, disconnect, &[]).status, 0x185, "not the admin queue");
    for at in [40, 41] {
        assert_eq!(w.call(io, disconnect.byte(at, 1), &[]).status, 0x180, "another format");
    }
    assert_eq!(w.call(io, disconnect, &[]).status, 0);
    assert!(w.links[io].closed.is_some());
    w.io(cntlid, 1);
}

#[test]
fn discovery_lists_the_ports_to_hosts_that_may_use_them() {
    let mut w = World::with(&[false], identity(), world::Parts::default());
    w.host.shared.set_access(Access::by_name([HOSTNQN.into()]));
    let port = |portid, traddr: &str, ipv6| DiscoveryPort {
        portid,
        traddr: traddr.into(),
        trsvcid: "4420".into(),
        ipv6,
        discovery_only: false,
        tls: match portid {
            1 => None,
            2 => Some(Demand::Allowed),
            _ => Some(Demand::Required),
        },
    };
    w.host.shared.set_ports(vec![
        port(1, "10.0.0.1", false),
        port(2, "fe80::1", true),
        port(3, "10.0.0.1", false),
    ]);
    let log_of = |w: &mut World, hostnqn: &str| {
        let at = w.initialize(Digests::default(), 0);
        let data = peer::connect_data(peer::DISCOVERY_NQN, hostnqn, HOSTID, 0xffff);
        assert_eq!(w.call(at, peer::connect(0, 0, 31, 0), &data).status, 0);
        w.call(at, peer::property_set(1, 0x14, peer::CC_ENABLE), &[]);
        let (id, _) = w.fetch(at, peer::identify(1, 1, 0));
        assert_eq!(id[111], 2, "a discovery controller");
        assert_eq!(&id[768..768 + 36], peer::DISCOVERY_NQN.as_bytes());
        assert_eq!(w.call(at, peer::identify(1, 2, 0), &[]).status, 0x02);
        let (header, _) = w.fetch(at, peer::get_log(2, 0x70, 0, 1024));
        let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap());
        let (generation, count) = (number(0), number(8));
        let entries = if count == 0 {
            Vec::new()
        } else {
            w.fetch(at, peer::get_log(3, 0x70, 1024, count as u32 * 1024)).0
        };
        (count, entries, generation)
    };
    let (count, entries, generation) = log_of(&mut w, HOSTNQN);
    assert_eq!(count, 3);
    assert_eq!(entries[..3], [3, 1, 2], "TCP, IPv4, an NVM subsystem");
    // TREQ: bits 1:0 must mean nothing about a secure channel, or nvme-cli's connect-all starts
    // TLS.
    assert_eq!((entries[3], entries[768]), (1 << 2, 0), "no SQ flow control; no TLS");
    assert_eq!(entries[1024..1027], [3, 2, 2], "IPv6");
    let of_port = |port: usize| (entries[1024 * (port - 1) + 3], entries[1024 * (port - 1) + 768]);
    assert_eq!(of_port(2), (1 << 2 | 2, 2), "TLS 1.3 is not required");
    assert_eq!(of_port(3), (1 << 2 | 1, 2), "TLS 1.3 is required");
    assert_eq!(&entries[32..36], b"4420");
    assert_eq!(&entries[256..256 + SUBNQN.len()], SUBNQN.as_bytes());
    assert_eq!(&entries[512..520], b"10.0.0.1");
    assert_eq!(&entries[6..8], [0xff, 0xff], "dynamic controllers");
    assert_eq!(log_of(&mut w, "nqn.2026-01.io.example:other").0, 0);
    assert_eq!(log_of(&mut w, HOSTNQN).2, generation);
    w.host.shared.set_ports(vec![port(1, "10.0.0.1", false)]);
    let (count, _, changed) = log_of(&mut w, HOSTNQN);
    assert_eq!(count, 1);
    assert_ne!(changed, generation, "a host that has read the old log is to read it again");
}
