//! A running target on real sockets, used by the scripted host.

mod host;

use riopipe_testkit::{attribute, peer};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use host::{Queue, TIMEOUT, pattern, wait_until};
use peer::{CC_ENABLE, Digests, HOSTID, HOSTNQN, Sqe};
use riopipe_order::attribute::{Attribute, Seq, StreamId, VolumeId};
use riopipe_session::wire;
use riopipe_target::{AnaError, AnaState, Config, ReloadOptions, Running, Target};

/// The option for a log in the file `log` of a directory.
fn log_in(dir: &Path) -> String {
    format!("file:{},size=1M", dir.join("log").display())
}

/// A target whose log and one drive are files of a directory.
fn in_files(dir: &Path) -> Config {
    let drive = format!("file:{},size=16M", dir.join("drive").display());
    Config { log: Some(log_in(dir)), ..Config::on_loopback(&[&drive]) }
}

#[test]
fn writes_are_read_back_with_and_without_digests() {
    let target = Target::start(&Config::on_loopback(&["mem:64M"])).unwrap();
    for (header, data) in [(false, false), (true, false), (true, true)] {
        let digests = Digests { header, data };
        let (_admin, cntlid) = Queue::admin(&target, digests);
        let mut io = Queue::io(&target, digests, cntlid, 1);
        // In the capsule.
        let bytes = pattern(1, 4096);
        assert_eq!(io.call(peer::write(1, 1, 7, 1), &bytes).status, 0);
        let (read, done) = io.fetch(peer::read(2, 1, 7, 1));
        assert_eq!(done.status, 0);
        assert!(read == bytes);
        // By R2T, in two pieces.
        let bytes = pattern(2, 200 * 1024);
        io.command(peer::write_r2t(3, 1, 100, 50), &[]);
        let r2t = io.next().unwrap();
        assert_eq!((r2t.kind, r2t.u16(8), r2t.u32(12), r2t.u32(16)), (0x09, 3, 0, 200 * 1024));
        let (one, two) = bytes.split_at(128 * 1024);
        io.send(&peer::h2c_data(digests, 3, r2t.u16(10), 0, one, false));
        io.send(&peer::h2c_data(digests, 3, r2t.u16(10), one.len() as u32, two, true));
        assert_eq!(io.next().unwrap().completion().status, 0);
        let (read, _) = io.fetch(peer::read(4, 1, 100, 50));
        assert!(read == bytes);
    }
    target.stop().unwrap();
}

#[test]
fn wrong_digests_are_counted() {
    let target = Target::start(&Config::on_loopback(&["mem:16M"])).unwrap();
    let digests = Digests { header: true, data: true };
    let (_admin, cntlid) = Queue::admin(&target, digests);
    let mut io = Queue::io(&target, digests, cntlid, 1);
    let counts = || {
        let stat = target.stat();
        ["header_digest_errors", "data_digest_errors"].map(|name| stat.counters[name])
    };
    let changed_at_end = |mut bytes: Vec<u8>| {
        *bytes.last_mut().unwrap() ^= 1;
        bytes
    };
    assert_eq!(io.call(peer::write(1, 1, 7, 1), &pattern(1, 4096)).status, 0);
    assert_eq!(counts(), [0, 0]);
    // In the capsule.
    let capsule = peer::capsule(digests, &peer::write(1, 1, 7, 1).0, &pattern(2, 4096));
    io.send(&changed_at_end(capsule.clone()));
    assert_eq!(io.next().unwrap().completion().status, 0x22);
    wait_until(|| counts() == [0, 1], "the capsule is counted");
    // By R2T: each piece has a digest of its own.
    io.command(peer::write_r2t(3, 1, 100, 3), &[]);
    let ttag = io.next().unwrap().u16(10);
    for piece in 0..3u32 {
        let data = pattern(piece as u8, 4096);
        let pdu = peer::h2c_data(digests, 3, ttag, piece * 4096, &data, piece == 2);
        io.send(&if piece == 1 { pdu } else { changed_at_end(pdu) });
    }
    assert_eq!(io.next().unwrap().completion().status, 0x22);
    wait_until(|| counts() == [0, 3], "two pieces are counted");
    // The digest of a header is behind its 72 bytes.
    let mut bytes = capsule;
    bytes[72] ^= 1;
    io.send(&bytes);
    let term = io.next().unwrap();
    assert_eq!((term.kind, term.u16(8)), (0x03, 3), "it ends the connection");
    wait_until(|| counts() == [1, 3], "the header is counted");
    target.stop().unwrap();
}

#[test]
fn an_abort_reaches_its_command_on_each_reactor() {
    let config = Config { reactors: Some(2), ..Config::on_loopback(&["mem:16M"]) };
    let target = Target::start(&config).unwrap();
    let (mut admin, cntlid) = Queue::admin(&target, Digests::default());
    // One queue on each reactor.
    let queues: Vec<Queue> =
        (1..=2).map(|qid| Queue::io(&target, Digests::default(), cntlid, qid)).collect();
    for (qid, mut io) in (1..).zip(queues) {
        io.command(peer::write_r2t(7, 1, 0, 1), &[]);
        let r2t = io.next().unwrap();
        assert_eq!(r2t.kind, 0x09);
        let abort = Sqe::new(0x08, 9, 0).dword(10, 7 << 16 | qid);
        let done = admin.call(abort, &[]);
        assert_eq!((done.status, done.result), (0, 0), "queue {qid}");
        let aborted = io.next().unwrap().completion();
        assert_eq!((aborted.cid, aborted.status), (7, 0x07));
        // Data that the host has sent meanwhile is dropped.
        let late = pattern(1, 4096);
        io.send(&peer::h2c_data(Digests::default(), 7, r2t.u16(10), 0, &late, true));
        assert!(io.fetch(peer::read(7, 1, 0, 1)).0 == vec![0; 4096]);
        let done = admin.call(abort, &[]);
        assert_eq!((done.status, done.result), (0, 1), "it has ended");
    }
    target.stop().unwrap();
}

#[test]
fn several_hosts_share_the_reactors() {
    let config = Config { reactors: Some(2), ..Config::on_loopback(&["mem:64M", "mem:16M"]) };
    let target = Target::start(&config).unwrap();
    std::thread::scope(|scope| {
        for host in 0..4u64 {
            let target = &target;
            scope.spawn(move || {
                let (_admin, cntlid) = Queue::admin(target, Digests::default());
                let mut queues: Vec<Queue> =
                    (1..=3).map(|qid| Queue::io(target, Digests::default(), cntlid, qid)).collect();
                for round in 0..50u64 {
                    for (i, queue) in queues.iter_mut().enumerate() {
                        let lba = host * 1000 + i as u64 * 100 + round;
                        let bytes = pattern(lba as u8, 4096);
                        assert_eq!(queue.call(peer::write(1, 1, lba, 1), &bytes).status, 0);
                        assert!(queue.fetch(peer::read(2, 1, lba, 1)).0 == bytes);
                    }
                }
            });
        }
    });
    wait_until(|| target.connections() == 0, "all connections have ended");
    target.stop().unwrap();
}

/// The locks that clusters keep in a block: hosts on both reactors add to one counter at once.
#[test]
fn compare_and_write_is_atomic_across_reactors() {
    const HOSTS: u64 = 4;
    const ROUNDS: u64 = 100;
    let dir = tempfile::tempdir().unwrap();
    let file = format!("file:{},size=16M", dir.path().join("drive").display());
    for drive in ["mem:16M", &file] {
        let config = Config { reactors: Some(2), ..Config::on_loopback(&[drive]) };
        let target = Target::start(&config).unwrap();
        let counter = |n: u64| {
            let mut bytes = vec![0; 4096];
            bytes[..8].copy_from_slice(&n.to_le_bytes());
            bytes
        };
        std::thread::scope(|scope| {
            for _ in 0..HOSTS {
                let target = &target;
                scope.spawn(move || {
                    let (_admin, cntlid) = Queue::admin(target, Digests::default());
                    let mut io = Queue::io(target, Digests::default(), cntlid, 1);
                    let (mut expected, mut added) = (0, 0);
                    while added < ROUNDS {
                        io.command(peer::compare(1, 1, 7, 1).first_half(), &counter(expected));
                        let write = peer::write(2, 1, 7, 1).second_half();
                        let second = counter(expected + 1);
                        io.command(write, &second);
                        let halves = [0; 2].map(|_| io.next().unwrap().completion().status);
                        match halves {
                            [0, 0] => (expected, added) = (expected + 1, added + 1),
                            [0x285, 0x09] => {
                                let (block, _) = io.fetch(peer::read(3, 1, 7, 1));
                                expected = u64::from_le_bytes(block[..8].try_into().unwrap());
                            }
                            other => panic!("{other:x?}"),
                        }
                    }
                });
            }
        });
        let (_admin, cntlid) = Queue::admin(&target, Digests::default());
        let mut io = Queue::io(&target, Digests::default(), cntlid, 1);
        assert!(io.fetch(peer::read(1, 1, 7, 1)).0 == counter(HOSTS * ROUNDS), "{drive}");
        drop((_admin, io));
        target.stop().unwrap();
    }
}

/// Connections on several reactors write logical blocks of 512 bytes that share a block of the drive.
#[test]
fn small_blocks_that_share_a_block_of_the_drive_are_all_there() {
    const ROUNDS: u8 = 60;
    for drive in ["mem:16M", "file"] {
        let dir = tempfile::tempdir().unwrap();
        let spec = format!("file:{},size=16M", dir.path().join("d").display());
        let mut config = Config::on_loopback(&[if drive == "file" { &spec } else { drive }]);
        config.reactors = Some(4);
        config.namespaces[0].lba_size = Some(512);
        let target = Target::start(&config).unwrap();
        let (_admin, cntlid) = Queue::admin(&target, Digests::default());
        let sqe = |code: u8, cid: u16, lba: u32| Sqe::new(code, cid, 1).dword(10, lba).dword(12, 0);
        let queues = (1..=8).map(|qid| Queue::io(&target, Digests::default(), cntlid, qid));
        let queues: Vec<Queue> = queues.collect();
        std::thread::scope(|scope| {
            for (lba, mut queue) in (8..).zip(queues) {
                scope.spawn(move || {
                    for round in 1..=ROUNDS {
                        let data = [round; 512];
                        let done = queue.call(sqe(0x01, 1, lba).inline(512), &data);
                        assert_eq!(done.status, 0);
                        let (back, done) = queue.fetch(sqe(0x02, 2, lba).transport(512));
                        assert_eq!((done.status, &back[..]), (0, &data[..]), "block {lba}");
                    }
                });
            }
        });
        target.stop().unwrap();
    }
}

#[test]
fn a_drive_of_a_volume_or_with_an_order_has_no_small_blocks() {
    let mut config = Config::on_loopback(&["ssd:flash,size=16M,order=barrier"]);
    config.namespaces[0].lba_size = Some(512);
    let error = Target::start(&config).err().unwrap().to_string();
    assert!(error.contains("namespace 1: lba_size = 512: the drive keeps an order"), "{error}");
    let report = riopipe_target::check(&config);
    assert!(report.problems.iter().any(|problem| problem.what.contains("keeps an order")));
    config.namespaces[0].lba_size = Some(1024);
    let error = Target::start(&config).err().unwrap().to_string();
    assert!(error.contains("lba_size 1024; give 4096, or 512"), "{error}");
}

#[test]
fn commands_sent_together_are_answered_together() {
    let target = Target::start(&Config::on_loopback(&["mem:16M"])).unwrap();
    let (_admin, cntlid) = Queue::admin(&target, Digests::default());
    let mut io = Queue::io(&target, Digests::default(), cntlid, 1);
    let mut bytes = Vec::new();
    for cid in 0..100 {
        let sqe = peer::write(cid, 1, u64::from(cid), 1);
        bytes.extend(peer::capsule(Digests::default(), &sqe.0, &pattern(cid as u8, 4096)));
    }
    io.send(&bytes);
    let mut cids: Vec<u16> = (0..100).map(|_| io.next().unwrap().completion().cid).collect();
    cids.sort_unstable();
    assert_eq!(cids, (0..100).collect::<Vec<u16>>());
}

#[test]
fn file_drives_keep_what_was_written_over_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let config =
        Config { subnqn: Some("nqn.2026-01.io.example:restart".into()), ..in_files(dir.path()) };
    let bytes = pattern(5, 8 * 4096);
    let mut uuids = Vec::new();
    for round in 0..2 {
        let target = Target::start(&config).unwrap();
        let (mut admin, cntlid) = Queue::admin(&target, Digests::default());
        uuids.push(admin.fetch(peer::identify(1, 3, 1)).0);
        let mut io = Queue::io(&target, Digests::default(), cntlid, 1);
        if round == 0 {
            assert_eq!(io.call(peer::write(1, 1, 100, 8), &bytes).status, 0);
            assert_eq!(io.call(peer::flush(2, 1), &[]).status, 0);
            let locked = Target::start(&config).err().expect("the files are locked (T8)");
            assert!(locked.to_string().contains("in use"), "{locked}");
            target.kill();
        } else {
            assert!(io.fetch(peer::read(1, 1, 100, 8)).0 == bytes);
            target.stop().unwrap();
        }
    }
    assert_eq!(uuids[0], uuids[1], "names are stable");
}

#[test]
fn ordered_writes_are_in_a_log_that_outlives_a_killed_target() {
    let dir = tempfile::tempdir().unwrap();
    let config = in_files(dir.path());
    let (target, _admin, cntlid) = owned(&config);
    let mut io = bound(&target, cntlid, 0, 1);
    for seq in 1..=20u64 {
        let (sqe, data) = (ordered(seq, seq + 7), pattern(seq as u8, 4096));
        assert_eq!(io.call(sqe, &data).status, 0);
    }
    target.kill();
    // After a restart the volume needs recovery, its member is guarded, and generations are kept.
    let target = Target::start(&config).unwrap();
    let (mut admin, cntlid) = Queue::admin(&target, Digests::default());
    let status = status(&mut admin);
    assert!(status.known && status.unrecovered && !status.owned);
    assert_eq!((status.generation, status.live_entries), (1, 20));
    let mut io = Queue::io(&target, Digests::default(), cntlid, 1);
    assert_eq!(io.call(peer::write(1, 1, 8, 1), &pattern(0, 4096)).status, 0x70a);
    assert!(io.fetch(peer::read(2, 1, 8, 1)).0 == pattern(1, 4096));
    target.stop().unwrap();
}

#[test]
fn a_clean_end_leaves_nothing_to_recover() {
    let dir = tempfile::tempdir().unwrap();
    let config = in_files(dir.path());
    let (target, _admin, cntlid) = owned(&config);
    let mut io = bound(&target, cntlid, 0, 1);
    assert_eq!(io.call(ordered(1, 9), &pattern(1, 4096)).status, 0);
    let mark = wire::mark_command(Seq(1), false);
    assert_eq!(io.call(rio(&mark, 4), &[]).status, 0);
    // Stopped while it has an owner: connections end, and the volume is closed even so.
    target.stop().unwrap();
    assert!(io.next().is_none(), "the connection has ended");
    let target = Target::start(&config).unwrap();
    let (mut admin, cntlid) = Queue::admin(&target, Digests::default());
    let found = status(&mut admin);
    assert!(found.known && !found.unrecovered);
    assert_eq!(found.released[0], Seq(1));
    own(&mut admin, 2, false);
    let _io = bound(&target, cntlid, 0, 2);
    target.stop().unwrap();
}

#[test]
fn t8_a_take_over_crosses_reactors() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        log: Some(log_in(dir.path())),
        reactors: Some(2),
        // A slow drive: writes are in flight when the other owner comes.
        ..Config::on_loopback(&["ssd:flash,size=16M"])
    };
    let (target, _admin, cntlid) = owned(&config);
    let mut queues = [0, 1].map(|stream| bound(&target, cntlid, stream, 1));
    let mut other_owner = Queue::open(target.addresses()[0], Digests::default());
    let data =
        peer::connect_data(target.subnqn(), "nqn.2026-01.io.example:other_owner", [9; 16], 0xffff);
    assert_eq!(other_owner.call(peer::connect(0, 0, 31, 0), &data).status, 0);
    assert_eq!(other_owner.call(peer::property_set(1, 0x14, CC_ENABLE), &[]).status, 0);
    for io in &mut queues {
        for seq in 1..=30u64 {
            io.command(ordered(seq, seq), &pattern(seq as u8, 4096));
        }
    }
    let take = wire::Claim { take_over: true, ..claim(2, false) };
    let sqe = peer::Sqe(wire::claim_command().0).byte(1, 0x40).inline(4096);
    assert_eq!(other_owner.call(sqe, &take.encode()).status, 0);
    // From now on no write of the old owner reaches the drive.
    for io in &mut queues {
        let statuses: Vec<u16> = (0..30).map(|_| io.next().unwrap().completion().status).collect();
        assert!(statuses.iter().all(|s| matches!(s, 0 | 0x702)), "{statuses:x?}");
        assert_eq!(io.call(ordered(31, 31), &pattern(0, 4096)).status, 0x702);
    }
    assert!(status(&mut other_owner).own);
    target.stop().unwrap();
}

#[test]
fn p7_the_owner_of_a_killed_target_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let config = in_files(dir.path());
    let (target, _admin, cntlid) = owned(&config);
    let mut io = bound(&target, cntlid, 0, 1);
    for seq in 1..=20u64 {
        assert_eq!(io.call(ordered(seq, seq), &pattern(seq as u8, 4096)).status, 0);
    }
    target.kill();
    let target = Target::start(&config).unwrap();
    let (mut admin, cntlid) = Queue::admin(&target, Digests::default());
    come_back(&mut admin, 1);
    let mut io = Queue::io(&target, Digests::default(), cntlid, 1);
    let refused = wire::bind_command(VOLUME, StreamId(0), 1, Seq(0));
    assert_eq!(io.call(rio(&refused, 3), &[]).status, 0x704, "not over an existing group");
    bind_again(&mut io);
    let page = own_list(&mut io);
    assert_eq!((page.live, page.entries.len()), (20, 20));
    assert!(page.entries.iter().all(|e| !e.durable), "the drive was never flushed");
    for seq in 1..=20u64 {
        assert_eq!(io.call(ordered(seq, seq), &pattern(seq as u8, 4096)).status, 0);
    }
    assert_eq!(own_list(&mut io).live, 20, "replayed writes are not logged again");
    target.stop().unwrap();
}

/// All connections count, on all reactors; one that ends on any of them makes space for another.
#[test]
fn t28_connections_are_counted_over_all_reactors() {
    let config = Config { reactors: Some(2), connections: 5, ..Config::on_loopback(&["mem:1M"]) };
    let target = Target::start(&config).unwrap();
    let (_admin, cntlid) = Queue::admin(&target, Digests::default());
    // Half of them are on the second reactor.
    let mut queues: Vec<Queue> =
        (1..=4).map(|qid| Queue::io(&target, Digests::default(), cntlid, qid)).collect();
    for qid in 1..=4 {
        let mut stream = TcpStream::connect(target.addresses()[0]).unwrap();
        stream.write_all(&peer::icreq(Digests::default(), 0)).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let waits = stream.read(&mut [0; 128]).unwrap_err();
        assert_eq!(waits.kind(), std::io::ErrorKind::WouldBlock, "{qid}");
        assert_eq!(target.connections(), 5);
        let gone = queues.remove(0);
        drop(gone);
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut icresp = [0; 128];
        stream.read_exact(&mut icresp).unwrap();
        assert_eq!(icresp[0], 0x01);
        drop(stream);
        let mut again = Queue::open(target.addresses()[0], Digests::default());
        let data = peer::connect_data(target.subnqn(), HOSTNQN, HOSTID, cntlid);
        assert_eq!(again.call(peer::connect(0, qid, 31, 0), &data).status, 0);
        queues.push(again);
    }
    target.stop().unwrap();
}

/// A connection that has not passed Connect gives way to a newer one.
#[test]
fn t28_the_limits_on_connections_that_are_not_admitted_are_those_of_the_configuration() {
    for (per_address, total) in [(2, 100), (100, 2)] {
        let config = Config {
            pending_connections_per_address: per_address,
            pending_connections: total,
            ..Config::on_loopback(&["mem:1M"])
        };
        let target = Target::start(&config).unwrap();
        // An admitted one does not count.
        let (mut admin, cntlid) = Queue::admin(&target, Digests::default());
        let address = target.addresses()[0];
        let [mut oldest, _middle, mut newest] =
            [0; 3].map(|_| Queue::open(address, Digests::default()));
        assert!(oldest.next().is_none(), "closed");
        let data = peer::connect_data(target.subnqn(), HOSTNQN, HOSTID, cntlid);
        assert_eq!(newest.call(peer::connect(0, 1, 31, 0), &data).status, 0);
        // Now one fewer is pending.
        let mut again = Queue::open(address, Digests::default());
        assert_eq!(again.call(peer::connect(0, 2, 31, 0), &data).status, 0);
        assert_eq!(admin.fetch(peer::identify(1, 0x01, 0)).1.status, 0);
        target.stop().unwrap();
    }
}

#[test]
fn t8_a_stream_that_is_bound_again_waits_across_reactors() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        log: Some(log_in(dir.path())),
        reactors: Some(2),
        // A slow drive: writes are in flight when the owner comes back.
        ..Config::on_loopback(&["ssd:flash,size=16M"])
    };
    let (target, mut admin, cntlid) = owned(&config);
    let mut old = bound(&target, cntlid, 0, 1);
    // The target does not learn that this connection is dead.
    for round in 2..=6 {
        for seq in 1..=30u64 {
            old.command(ordered(seq, seq), &pattern(round, 4096));
        }
        let mut io = Queue::io(&target, Digests::default(), cntlid, u16::from(round));
        bind_again(&mut io);
        let page = own_list(&mut io);
        assert!(page.live <= 30);
        old = io;
    }
    // Nor that a whole association is.
    old.command(ordered(1, 1), &pattern(0, 4096));
    let (mut again, cntlid) = Queue::admin(&target, Digests::default());
    come_back(&mut again, 1);
    let last = std::iter::from_fn(|| admin.next()).count();
    assert_eq!(last, 0, "the old association has ended without an answer");
    while old.next().is_some() {}
    let mut io = Queue::io(&target, Digests::default(), cntlid, 1);
    bind_again(&mut io);
    assert!(status(&mut again).own);
    target.stop().unwrap();
}

#[test]
fn discovery_answers_on_every_port() {
    let config =
        Config { discovery: vec!["127.0.0.1:0".into()], ..Config::on_loopback(&["mem:16M"]) };
    let target = Target::start(&config).unwrap();
    for address in [target.addresses()[0], target.discovery_addresses()[0]] {
        let mut queue = Queue::open(address, Digests::default());
        let data = peer::connect_data(peer::DISCOVERY_NQN, HOSTNQN, HOSTID, 0xffff);
        assert_eq!(queue.call(peer::connect(0, 0, 31, 0), &data).status, 0);
        queue.call(peer::property_set(1, 0x14, CC_ENABLE), &[]);
        let (log, _) = queue.fetch(peer::get_log(2, 0x70, 0, 2048));
        assert_eq!(log[8], 1, "one record");
        let text = |at: usize, len: usize| {
            String::from_utf8_lossy(&log[at..at + len]).trim_matches(['\0', ' ']).to_owned()
        };
        assert_eq!(text(1024 + 256, 256), target.subnqn());
        assert_eq!(text(1024 + 512, 256), "127.0.0.1");
        assert_eq!(text(1024 + 32, 32), target.addresses()[0].port().to_string());
    }
    target.stop().unwrap();
}

/// Ports come and go while hosts on both reactors go on.
#[test]
fn ports_come_and_go() {
    let addresses = |all: &[&str]| all.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
    let (one, two, three) = ("127.0.0.1:0", "127.0.0.2:0", "127.0.0.3:0");
    let mut config = Config { reactors: Some(2), ..Config::on_loopback(&["mem:16M"]) };
    config.subnqn = Some("nqn.2026-11.com.example:ports".into());
    config.listen = addresses(&[one, two]);
    let mut target = Target::start(&config).unwrap();
    let [first, second] = [0, 1].map(|at| target.addresses()[at]);
    // A host at each port, with a queue on each reactor.
    let hosts = [first, second].map(|address| {
        let (admin, cntlid) = Queue::admin_at(&target, address);
        let queues = [1, 2].map(|qid| Queue::io_at(&target, address, cntlid, qid));
        (admin, queues)
    });
    let [(mut lost, mut lost_queues), (mut admin, mut queues)] = hosts;

    // One address can't be listened on: nothing changes.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken_at = taken.local_addr().unwrap().to_string();
    config.listen = addresses(&[two, three, &taken_at]);
    let error = target.reload(&config, ReloadOptions::default()).unwrap_err().to_string();
    assert!(error.contains(&taken_at) && error.contains("taken"), "{error}");
    assert_eq!(target.addresses(), [first, second]);
    assert_eq!(lost_queues[0].call(peer::write(1, 1, 1, 1), &pattern(1, 4096)).status, 0);

    config.listen = addresses(&[two, three]);
    let dry = ReloadOptions { dry_run: true, ..ReloadOptions::default() };
    let found = target.reload(&config, dry).unwrap().difference.to_string();
    assert_eq!(found, format!("- address {one}\n+ address {three}\n"));
    assert_eq!(target.addresses(), [first, second]);
    target.reload(&config, ReloadOptions::default()).unwrap();
    assert_eq!(target.addresses()[0], second);
    let third = target.addresses()[1];
    assert_eq!(third.ip().to_string(), "127.0.0.3");
    assert!(lost.next().is_none() && lost_queues.iter_mut().all(|queue| queue.next().is_none()));
    let refused = TcpStream::connect(first).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    let (_admin, cntlid) = Queue::admin_at(&target, third);
    queues = queues.map(|mut queue| {
        assert_eq!(queue.call(peer::write(1, 1, 2, 1), &pattern(2, 4096)).status, 0);
        queue
    });
    let mut io = Queue::io_at(&target, third, cntlid, 1);
    assert!(io.fetch(peer::read(1, 1, 2, 1)).0 == pattern(2, 4096));
    // An I/O queue of another port is refused.
    let mut stray = Queue::open(second, Digests::default());
    let data = peer::connect_data(target.subnqn(), HOSTNQN, HOSTID, cntlid);
    assert_eq!(stray.call(peer::connect(0, 2, 127, 0), &data).status, 0x182);

    // The places are those of the addresses now; the ids of the ports stay.
    for port in [0, 3] {
        let error = target.set_ana(port, None, AnaState::Inaccessible).unwrap_err();
        assert_eq!(error, AnaError::Port { port, ports: 2 });
    }
    for group in [0, 129] {
        let error = target.set_ana(1, Some(group), AnaState::Inaccessible).unwrap_err();
        assert_eq!(error, AnaError::Group(group));
    }
    assert_eq!(target.ana_states(), []);
    target.set_ana(1, None, AnaState::Inaccessible).unwrap();
    assert_eq!(target.ana_states()[0].port, 1);
    assert_eq!(queues[1].call(peer::write(1, 1, 3, 1), &pattern(3, 4096)).status, 0x302);
    assert_eq!(io.call(peer::write(1, 1, 3, 1), &pattern(3, 4096)).status, 0);
    assert_eq!(admin.fetch(peer::identify(1, 0x01, 0)).1.status, 0);
    let mut queue = Queue::open(third, Digests::default());
    let data = peer::connect_data(peer::DISCOVERY_NQN, HOSTNQN, HOSTID, 0xffff);
    assert_eq!(queue.call(peer::connect(0, 0, 31, 0), &data).status, 0);
    queue.call(peer::property_set(1, 0x14, CC_ENABLE), &[]);
    let (log, _) = queue.fetch(peer::get_log(2, 0x70, 0, 3072));
    let port_ids = [1024, 2048].map(|at| u16::from_le_bytes([log[at + 4], log[at + 5]]));
    assert_eq!((log[8], port_ids), (2, [2, 3]));
    // The first address again, with the port that it had: a new port.
    config.listen = addresses(&[&first.to_string(), two, three]);
    target.reload(&config, ReloadOptions::default()).unwrap();
    assert_eq!(target.addresses(), [first, second, third]);
    assert_eq!(target.ana_states(), [], "a reload sets the states of the configuration");
    let (log, _) = queue.fetch(peer::get_log(3, 0x70, 0, 2048));
    assert_eq!((log[8], log[1024 + 4]), (3, 4));
    target.stop().unwrap();
}

#[test]
fn t18_a_bad_peer_loses_its_connection_and_others_are_not_affected() {
    let target = Target::start(&Config::on_loopback(&["mem:16M"])).unwrap();
    let (_admin, cntlid) = Queue::admin(&target, Digests::default());
    let mut good = Queue::io(&target, Digests::default(), cntlid, 1);
    for i in 0..20u8 {
        let mut bad = TcpStream::connect(target.addresses()[0]).unwrap();
        bad.set_read_timeout(Some(TIMEOUT)).unwrap();
        bad.write_all(&[i.wrapping_mul(37) | 0x80; 300]).unwrap();
        let mut last_words = Vec::new();
        bad.read_to_end(&mut last_words).unwrap();
        assert_eq!(last_words[0], 0x03, "a termination request");
        // Half a PDU, then the connection closes.
        let mut aborted = TcpStream::connect(target.addresses()[0]).unwrap();
        aborted.write_all(&peer::icreq(Digests::default(), 0)[..100]).unwrap();
        drop(aborted);
        assert_eq!(good.call(peer::write(1, 1, i.into(), 1), &pattern(i, 4096)).status, 0);
    }
    target.stop().unwrap();
}

#[test]
fn a_peer_killed_in_mid_write_leaves_its_claim_to_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { log: Some(log_in(dir.path())), ..Config::on_loopback(&["mem:16M"]) };
    let (target, admin, cntlid) = owned(&config);
    let mut io = bound(&target, cntlid, 0, 1);
    let bytes = peer::capsule(Digests::default(), &ordered(1, 1).0, &pattern(1, 4096));
    io.send(&bytes[..2000]);
    drop((io, admin));
    wait_until(|| target.connections() == 0, "the association has ended");
    let (mut admin, _) = Queue::admin(&target, Digests::default());
    own(&mut admin, 2, false);
    let found = status(&mut admin);
    assert!(found.own && !found.unrecovered, "the write never came");
    target.stop().unwrap();
}

#[test]
fn an_idle_target_wakes_up() {
    // It sleeps at once when there is nothing to do.
    let config = Config { spin_us: Some(0), ..Config::on_loopback(&["mem:16M"]) };
    let target = Target::start(&config).unwrap();
    let (_admin, cntlid) = Queue::admin(&target, Digests::default());
    let mut io = Queue::io(&target, Digests::default(), cntlid, 1);
    for i in 0..20u8 {
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(io.call(peer::write(1, 1, i.into(), 1), &pattern(i, 4096)).status, 0);
    }
    assert!(target.is_alive());
    target.stop().unwrap();
}

/// Even a reactor that sleeps at once notices its end.
#[test]
fn a_host_that_does_not_read_cannot_keep_a_target_from_stopping() {
    let config = Config { spin_us: Some(0), grace_ms: 50, ..Config::on_loopback(&["mem:64M"]) };
    let target = Target::start(&config).unwrap();
    let (_admin, cntlid) = Queue::admin(&target, Digests::default());
    let mut io = Queue::io(&target, Digests::default(), cntlid, 1);
    for cid in 0..100 {
        io.command(peer::read(cid, 1, 0, 256), &[]);
    }
    // 100 MiB are more than the sockets hold.
    assert_eq!(io.next().expect("data").kind, 0x07);
    target.stop().unwrap();
}

#[test]
fn a_log_that_vanishes_stops_its_streams() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let config = Config { log: Some(log_in(dir.path())), ..Config::on_loopback(&["mem:16M"]) };
    let (target, _admin, cntlid) = owned(&config);
    let mut io = bound(&target, cntlid, 0, 1);
    std::fs::remove_file(&log).unwrap();
    let mut seq = 0;
    let mut last = 0;
    wait_until(
        || {
            seq += 1;
            let sqe = ordered_released(seq, 1, seq - 1);
            last = io.call(sqe, &pattern(1, 4096)).status;
            last != 0
        },
        "the stream notices",
    );
    assert_eq!(last, 0x711, "the log failed");
    assert_eq!(
        io.call(peer::write(1, 1, 1, 1), &pattern(2, 4096)).status,
        0,
        "the drive still works"
    );
    assert!(target.stop().is_err(), "it can't be written back");
}

/// No host is connected, so no stream could fail.
#[test]
fn an_idle_target_is_unhealthy_once_its_log_is_gone() {
    for kind in ["file", "block"] {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let spec = format!("{kind}:{},size=1M", log.display());
        let config = Config { log: Some(spec), ..Config::on_loopback(&["mem:16M"]) };
        let target = Target::start(&config).unwrap();
        let source = target.stat_source();
        source.health().unwrap();
        std::fs::remove_file(&log).unwrap();
        let error = source.health().unwrap_err().to_string();
        assert!(error.contains("deleted, replaced or cut short"), "{error}");
    }
}

/// Nothing else is active: neither the other reactor, nor a host with keep-alives.
#[test]
fn each_reactor_notices_by_itself_that_the_log_is_gone() {
    for busy in [0, 1] {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            log: Some(log_in(dir.path())),
            reactors: Some(2),
            ..Config::on_loopback(&["mem:16M"])
        };
        let (target, _admin, cntlid) = owned(&config);
        // One queue on each reactor.
        let mut queues = [0, 1].map(|stream| bound(&target, cntlid, stream, 1));
        std::fs::remove_file(dir.path().join("log")).unwrap();
        let mut seq = 0;
        wait_until(
            || {
                seq += 1;
                let sqe = ordered_released(seq, seq % 1000, seq - 1);
                queues[busy].call(sqe, &pattern(0, 4096)).status != 0
            },
            "no write to a deleted log is reported durable",
        );
        let other = ordered(1, 1);
        assert_ne!(queues[1 - busy].call(other, &pattern(0, 4096)).status, 0, "on no reactor");
        assert!(target.stop().is_err(), "it can't be written back");
    }
}

const VOLUME: VolumeId = VolumeId([7; 16]);

fn rio(sqe: &riopipe_nvme::command::Sqe, cid: u16) -> Sqe {
    let cid = cid.to_le_bytes();
    Sqe(sqe.0).byte(1, 0x40).byte(2, cid[0]).byte(3, cid[1])
}

fn claim(generation: u32, create: bool) -> wire::Claim {
    wire::Claim {
        create,
        slots: 64,
        ..wire::Claim::plain(VOLUME, generation, 2, wire::in_order([1]))
    }
}

fn own(admin: &mut Queue, generation: u32, create: bool) {
    let sqe = rio(&wire::claim_command(), 9).inline(4096);
    assert_eq!(admin.call(sqe, &claim(generation, create).encode()).status, 0);
}

/// A target, and the admin queue and controller of a host that has made the volume there.
fn owned(config: &Config) -> (Running, Queue, u16) {
    let target = Target::start(config).unwrap();
    let (mut admin, cntlid) = Queue::admin(&target, Digests::default());
    own(&mut admin, 1, true);
    (target, admin, cntlid)
}

/// Claims the volume once more, as its owner.
fn come_back(admin: &mut Queue, generation: u32) {
    let sqe = rio(&wire::claim_command(), 9).inline(4096);
    let claim = wire::Claim { resume: true, ..claim(generation, false) };
    assert_eq!(admin.call(sqe, &claim.encode()).status, 0);
}

/// Binds stream 0 again, as soon as its old connection is gone.
fn bind_again(io: &mut Queue) {
    let sqe = wire::resume_command(VOLUME, StreamId(0), 1, Seq(0));
    let mut last = 0;
    wait_until(
        || {
            last = io.call(rio(&sqe, 3), &[]).status;
            last != 0x709
        },
        "the old connection is gone",
    );
    assert_eq!(last, 0);
}

fn own_list(io: &mut Queue) -> wire::list::Page {
    let len = wire::list::PAGE_BYTES_MAX;
    let sqe = wire::own_list_command(riopipe_order::entry::Position(0), len);
    wire::list::Page::decode(&io.fetch(rio(&sqe, 4).transport(len as u32)).0).unwrap()
}

/// An I/O queue that carries a stream.
fn bound(target: &Running, cntlid: u16, stream: u16, generation: u32) -> Queue {
    let mut io = Queue::io(target, Digests::default(), cntlid, stream + 1);
    let sqe = wire::bind_command(VOLUME, StreamId(stream), generation, Seq(0));
    assert_eq!(io.call(rio(&sqe, 3), &[]).status, 0);
    io
}

fn status(admin: &mut Queue) -> wire::VolumeStatus {
    let sqe = rio(&wire::status_command(VOLUME), 8).transport(wire::STATUS_LEN as u32);
    wire::VolumeStatus::decode(&admin.fetch(sqe).0).unwrap()
}

fn ordered(seq: u64, lba: u64) -> Sqe {
    ordered_released(seq, lba, 0)
}

fn ordered_released(seq: u64, lba: u64, released: u64) -> Sqe {
    let attribute = Attribute { tag: seq, ..attribute(seq, lba) };
    let mut sqe = riopipe_nvme::command::Sqe(peer::write(seq as u16, 1, lba, 1).0);
    wire::put_attribute(&mut sqe, &attribute, Seq(released));
    Sqe(sqe.0)
}
