//! Reads and writes of more than a connection's own share of the memory are carried out in pieces.

mod world;

use riopipe_order::write_order::DriveOrder;
use riopipe_session::target::Volumes;
use riopipe_session::target::limits::{
    CONNECTION_BYTES, DATA_STALL_NS, TRANSFER_BUDGET, TRANSFER_BYTES_MAX,
};
use riopipe_session::wire::ORDERED_BYTES_MAX;
use riopipe_testkit::peer::{self, Digests, HOSTID, HOSTNQN, Sqe};
use world::recovery::{RIVAL, RIVAL_ID};
use world::{Owner, Parts, SUBNQN, What, World, attribute, block, crc, identity, ordered, pattern};

/// Blocks of a piece, and of a transfer of four pieces.
const PIECE_BLOCKS: usize = CONNECTION_BYTES / 4096;
const BLOCKS: u32 = 4 * PIECE_BLOCKS as u32;
/// Blocks of the largest transfer.
const BLOCKS_MAX: u32 = TRANSFER_BYTES_MAX / 4096;

/// A host with one I/O queue, whose PDUs have these digests.
fn host(w: &mut World, digests: Digests) -> usize {
    let (_, cntlid) = w.admin();
    let io = w.initialize(digests, 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    assert_eq!(w.call(io, peer::connect(0, 1, 127, 0), &data).status, 0);
    io
}

/// The blocks of a drive from `lba` on.
fn content(w: &World, lba: u64, blocks: u32) -> Vec<u8> {
    (lba..lba + u64::from(blocks)).flat_map(|lba| w.host.drives[0].block(lba)).collect()
}

#[test]
fn large_writes_and_reads_are_exact() {
    for data_digest in [false, true] {
        let mut w = World::new(&[false]);
        let io = host(&mut w, Digests { header: false, data: data_digest });
        // Whole pieces, and one block more or less.
        for blocks in [BLOCKS_MAX, PIECE_BLOCKS as u32 + 1, 2 * PIECE_BLOCKS as u32 - 1] {
            let data = pattern(blocks as u8, blocks as usize);
            w.command(io, peer::write_r2t(1, 1, 100, blocks), &[]);
            let mut sent = 0;
            while sent < data.len() as u32 {
                let (from, len) = w.send_requested(io, 1, &data);
                assert_eq!(from, sent);
                assert!(len as usize <= CONNECTION_BYTES);
                sent += len;
            }
            assert_eq!(w.next(io).unwrap().completion().status, 0);
            assert!(content(&w, 100, blocks) == data, "{blocks} blocks");

            w.command(io, peer::read(2, 1, 100, blocks), &[]);
            let mut read = Vec::new();
            while read.len() < data.len() {
                let pdu = w.next(io).expect("data");
                assert_eq!((pdu.kind, pdu.u16(8), pdu.u32(12)), (0x07, 2, read.len() as u32));
                read.extend_from_slice(&pdu.data);
                assert_eq!(pdu.flags & 0x04 != 0, read.len() == data.len(), "LAST_PDU");
            }
            assert_eq!(w.next(io).unwrap().completion().status, 0);
            assert!(read == data, "{blocks} blocks");
            assert_eq!(w.next(io), None);
        }
        let too_long = w.call(io, peer::read(3, 1, 0, BLOCKS_MAX + 1), &[]);
        assert_eq!((too_long.status, too_long.dnr), (0x02, true));
        let too_long = w.call(io, peer::write_r2t(4, 1, 0, BLOCKS_MAX + 1), &[]);
        assert_eq!((too_long.status, too_long.dnr), (0x02, true));
    }
}

/// Without flow control of the queue the last data carries the success.
#[test]
fn only_the_last_data_of_a_read_carries_its_success() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin();
    let io = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    let no_flow_control = peer::connect(0, 1, 127, 0).byte(46, 0x04);
    assert_eq!(w.call(io, no_flow_control, &data).status, 0);
    w.command(io, peer::read(2, 1, 0, BLOCKS), &[]);
    let flags: Vec<u8> = std::iter::from_fn(|| w.next(io)).map(|pdu| pdu.flags & 0x0c).collect();
    assert_eq!(flags, [0, 0, 0, 0x0c], "LAST_PDU and SUCCESS");
}

/// A connection without any memory but its own share carries out each command. It never holds more.
#[test]
fn t28_a_large_command_needs_no_more_than_the_own_share() {
    let mut w = World::new(&[false]);
    // Enough for the capsules of a small queue, and for nothing else.
    w.host.shared.set_memory(128 << 10);
    let (_, cntlid) = w.admin();
    let io = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    assert_eq!(w.call(io, peer::connect(0, 1, 3, 0), &data).status, 0);
    let data = pattern(1, BLOCKS as usize);
    w.command(io, peer::write_r2t(1, 1, 0, BLOCKS), &[]);
    w.command(io, peer::read(2, 1, 0, BLOCKS), &[]);
    for piece in 0..4 {
        w.send_requested(io, 1, &data);
        let is_read = |(_, what): &(u64, What)| matches!(what, What::Read(_));
        assert!(piece == 3 || !w.host.drives[0].history.iter().any(is_read), "the read waits");
    }
    assert_eq!(w.next(io).unwrap().completion().status, 0);
    // The host takes nothing. Data of one piece waits to be sent, and no more is read.
    w.links[io].reading = false;
    w.command(io, peer::read(3, 1, 0, BLOCKS), &[]);
    assert!(w.links[io].out.len_bytes() <= CONNECTION_BYTES + 4096);
    w.resume_reading(io);
    for _ in 0..20 {
        w.send(io, &[]);
    }
    let read: Vec<u8> = std::iter::from_fn(|| w.next(io)).flat_map(|pdu| pdu.data).collect();
    assert!(read == [&data[..], &data[..]].concat());
}

/// Another host claims the volume between two pieces of a plain write. The rest is refused.
#[test]
fn t21_no_piece_of_a_plain_write_lands_behind_a_claim() {
    let mut w = World::new(&[false]);
    let io = host(&mut w, Digests::default());
    let data = pattern(1, BLOCKS as usize);
    w.command(io, peer::write_r2t(1, 1, 0, BLOCKS), &[]);
    w.send_requested(io, 1, &data);
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let claim = w.first_claim();
    assert_eq!(w.claim(rival, &claim).unwrap().status, 0);
    w.send_requested(io, 1, &data);
    assert_ne!(w.next(io).unwrap().completion().status, 0);
    let writes = w.host.drives[0].history.iter().filter(|(_, what)| matches!(what, What::Write(_)));
    assert_eq!(writes.count(), 1);
}

/// A drive fails a piece. The write ends there, and what follows is not requested.
#[test]
fn a_write_ends_with_the_piece_that_fails() {
    let mut w = World::new(&[false]);
    let io = host(&mut w, Digests::default());
    let data = pattern(1, BLOCKS as usize);
    w.command(io, peer::write_r2t(1, 1, 0, BLOCKS), &[]);
    w.send_requested(io, 1, &data);
    w.host.drives[0].failing = true;
    w.send_requested(io, 1, &data);
    assert_eq!(w.next(io).unwrap().completion().status, 0x280);
    w.host.drives[0].failing = false;
    w.command(io, peer::read(2, 1, 0, BLOCKS), &[]);
    assert_eq!(std::iter::from_fn(|| w.next(io)).count(), 5, "four pieces and the completion");
}

/// A write whose first piece has landed is not aborted: an aborted command has had no effect.
#[test]
fn a_command_in_pieces_is_aborted_before_its_first_piece_only() {
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    let abort = |cid: u16| Sqe::new(0x08, 900, 0).dword(10, u32::from(cid) << 16 | 1);
    let data = pattern(1, BLOCKS as usize);
    w.command(io, peer::write_r2t(1, 1, 0, BLOCKS), &[]);
    w.send_requested(io, 1, &data);
    assert_eq!(w.call(admin, abort(1), &[]).result, 1, "not aborted");
    for _ in 1..4 {
        w.send_requested(io, 1, &data);
    }
    assert_eq!(w.next(io).unwrap().completion().status, 0);
    w.command(io, peer::write_r2t(2, 1, 0, BLOCKS), &[]);
    assert_eq!(w.call(admin, abort(2), &[]).result, 0, "aborted");
    // The requested data comes nevertheless, and is dropped.
    w.send_requested(io, 2, &data);
    assert_eq!(w.next(io).unwrap().completion().status, 0x07);
    assert_eq!(w.call(io, peer::write(3, 1, 0, 1), &block(1)).status, 0);
}

/// Writes with a place in an order are never in pieces. Larger ones are refused.
#[test]
fn ordered_writes_are_not_in_pieces() {
    let mut w = World::new(&[false]);
    let Owner { io, .. } = w.owner();
    let large = riopipe_order::attribute::Attribute {
        blocks: ORDERED_BYTES_MAX / 4096 + 1,
        ..attribute(1, 0)
    };
    let sqe = ordered(1, &large, 0).transport(large.blocks * 4096);
    assert_eq!(w.call(io, sqe, &[]).status, 0x02);

    let mut w = World::over_ordered(
        &[true],
        DriveOrder::Barrier,
        identity(),
        Parts::default(),
        Volumes::without_log(crc),
    );
    let io = host(&mut w, Digests::default());
    // Epoch 0 of the drive's sequence.
    let mut write = riopipe_nvme::command::Sqe::write(1, 0, ORDERED_BYTES_MAX / 4096 + 1);
    let order = riopipe_order::write_order::WriteOrder::Ordered { barrier: false };
    riopipe_session::wire::put_order(&mut write, order);
    let sqe = world::riopipe_bytes(&write).cid(1).transport(ORDERED_BYTES_MAX + 4096);
    assert_eq!(w.call(io, sqe, &[]).status, 0x02);
}

/// All pieces count against the budget of the connection.
#[test]
fn large_commands_share_the_budget_of_their_connection() {
    let mut w = World::new(&[false]);
    let io = host(&mut w, Digests::default());
    for cid in 1..=16 {
        w.command(io, peer::write_r2t(cid, 1, 0, BLOCKS), &[]);
    }
    let requested = std::iter::from_fn(|| w.next(io)).map(|r2t| r2t.u32(16) as usize);
    assert_eq!(requested.sum::<usize>(), TRANSFER_BUDGET);
}

/// The drive takes long for a piece. The time limit for the data of the next one begins with its R2T.
#[test]
fn the_time_limit_for_a_piece_begins_with_its_r2t() {
    let (mut w, io, _) = World::with_two_queues(false);
    let data = pattern(1, BLOCKS as usize);
    w.command(io, peer::write_r2t(1, 1, 0, BLOCKS), &[]);
    w.host.drives[0].holds = true;
    w.send_requested(io, 1, &data);
    w.host.now += DATA_STALL_NS + 1;
    w.tick();
    assert!(w.links[io].closed.is_none(), "it waits for the drive");
    w.complete(0, 0);
    w.tick();
    assert!(w.links[io].closed.is_none(), "{:?}", w.links[io].closed);
}

/// A read whose connection is closed between two pieces, and while one is at the drive.
#[test]
fn a_connection_that_closes_between_pieces_drains() {
    for kind in ["read waits", "read at drive", "write receives", "write at drive"] {
        let (mut w, io, _) = World::with_two_queues(true);
        let data = pattern(1, BLOCKS as usize);
        w.host.drives[0].holds = kind.ends_with("at drive");
        if kind.starts_with("read") {
            w.links[io].reading = false;
            w.host.shared.set_memory(128 << 10);
            w.command(io, peer::read(1, 1, 0, BLOCKS), &[]);
            if kind == "read at drive" {
                w.complete(0, 0);
            }
        } else {
            w.command(io, peer::write_r2t(1, 1, 0, BLOCKS).byte(51, 0x40), &[]);
            w.send_requested(io, 1, &data);
        }
        w.hang_up(io);
        w.complete_all(0);
        assert!(w.links[io].conn.is_drained(), "{kind}");
    }
}

/// Large reads and small ones of a queue share its memory: none starves.
#[test]
fn many_large_reads_do_not_starve_a_small_one() {
    let mut w = World::new(&[false]);
    w.host.shared.set_memory(128 << 10);
    let (_, cntlid) = w.admin();
    let io = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    assert_eq!(w.call(io, peer::connect(0, 1, 3, 0), &data).status, 0);
    w.links[io].reading = false;
    w.command(io, peer::read(1, 1, 0, BLOCKS), &[]);
    w.command(io, peer::read(2, 1, 0, BLOCKS), &[]);
    w.command(io, peer::read(3, 1, 0, 1), &[]);
    w.resume_reading(io);
    for _ in 0..40 {
        w.send(io, &[]);
    }
    let mut ended = Vec::new();
    let mut next = [0u32; 4];
    while let Some(pdu) = w.next(io) {
        if pdu.kind == 0x07 {
            let cid = usize::from(pdu.u16(8));
            assert_eq!(pdu.u32(12), next[cid]);
            next[cid] += pdu.data.len() as u32;
        } else {
            ended.push(pdu.completion().cid);
        }
    }
    assert_eq!(ended.len(), 3, "{ended:?}");
}
