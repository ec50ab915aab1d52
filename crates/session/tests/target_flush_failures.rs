//! A failed FLUSH on a drive with a volatile cache may lose writes of every connection. Each FLUSH that
//! covers such a write answers for it (T22), also beside writes in pieces and writes with FUA.

mod world;

use riopipe_order::write_order::{DriveOrder, EpochId};
use riopipe_session::target::Volumes;
use riopipe_session::target::limits::{CONNECTION_BYTES, DATA_STALL_NS, H2C_DATA_BYTES_MAX};
use riopipe_session::wire;
use riopipe_testkit::peer::{self, Digests, HOSTID, HOSTNQN, Received};
use world::{Parts, SUBNQN, World, block, crc, identity, pattern, riopipe_bytes};

/// Blocks of a transfer of four pieces.
const BLOCKS: u32 = 4 * (CONNECTION_BYTES / 4096) as u32;

fn send_requested(w: &mut World, io: usize, cid: u16, whole: &[u8]) {
    let r2t = w.next(io).expect("an R2T");
    assert_eq!((r2t.kind, r2t.u16(8)), (0x09, cid), "{r2t:?}");
    send_data(w, io, &r2t, whole);
}

fn send_data(w: &mut World, io: usize, r2t: &Received, whole: &[u8]) {
    let cid = r2t.u16(8);
    let (tag, from, len) = (r2t.u16(10), r2t.u32(12), r2t.u32(16));
    let digests = w.links[io].digests;
    for at in (from..from + len).step_by(H2C_DATA_BYTES_MAX as usize) {
        let end = (at + H2C_DATA_BYTES_MAX).min(from + len);
        let data = &whole[at as usize..end as usize];
        w.send(io, &peer::h2c_data(digests, cid, tag, at, data, end == from + len));
    }
}

fn two(volatile: bool) -> (World, usize, usize) {
    let mut w = World::new(&[volatile]);
    let (_, cntlid) = w.admin();
    let [io, other] = [w.io(cntlid, 1), w.io(cntlid, 2)];
    (w, io, other)
}

fn fail_a_flush(w: &mut World, other: usize) {
    w.host.drives[0].failing = true;
    assert_eq!(w.call(other, peer::flush(1, 1), &[]).status, 0x280);
    w.host.drives[0].failing = false;
}

/// The error of a write with FUA concerns its own block alone. The FLUSH behind it must still report
/// the other writes that are lost.
#[test]
fn t22_a_failed_write_with_fua_does_not_hide_what_its_queue_has_lost() {
    let (mut w, io, other) = two(true);
    assert_eq!(w.call(io, peer::write(1, 1, 50, 1), &block(1)).status, 0);
    w.host.drives[0].holds = true;
    w.command(io, peer::write(2, 1, 60, 1).byte(51, 0x40), &block(2));
    w.host.drives[0].holds = false;
    fail_a_flush(&mut w, other); // block 50 may be lost
    w.complete_all(0);
    let fua = w.next(io).unwrap().completion();
    assert_eq!((fua.cid, fua.status), (2, 0x280));
    assert_eq!(w.call(io, peer::flush(3, 1), &[]).status, 0x280, "block 50 is lost");
}

/// A FLUSH of the host's own queue fails between two pieces of a write.
#[test]
fn t22_an_own_flush_that_fails_between_pieces() {
    let (mut w, io, _) = two(true);
    let data = pattern(1, BLOCKS as usize);
    w.command(io, peer::write_r2t(1, 1, 0, BLOCKS), &[]);
    send_requested(&mut w, io, 1, &data);
    let r2t = w.next(io).unwrap();
    w.host.drives[0].failing = true;
    assert_eq!(w.call(io, peer::flush(2, 1), &[]).status, 0x280); // piece 0 may be lost
    w.host.drives[0].failing = false;
    send_data(&mut w, io, &r2t, &data);
    send_requested(&mut w, io, 1, &data);
    send_requested(&mut w, io, 1, &data);
    assert_eq!(w.next(io).unwrap().completion().status, 0, "the write");
    // The first FLUSH was answered before the write: it covers nothing of it.
    assert_eq!(w.call(io, peer::flush(3, 1), &[]).status, 0x280, "piece 0 is lost");
}

/// The same with a write that is in one piece, held by the drive: right already.
#[test]
fn t22_an_own_flush_that_fails_while_a_write_is_at_the_drive() {
    let (mut w, io, _) = two(true);
    w.host.drives[0].holds = true;
    w.command(io, peer::write(1, 1, 50, 1), &block(1));
    w.host.drives[0].holds = false;
    w.host.drives[0].failing = true;
    assert_eq!(w.call(io, peer::flush(2, 1), &[]).status, 0x280);
    w.host.drives[0].failing = false;
    w.complete_all(0);
    assert_eq!(w.next(io).unwrap().completion().status, 0, "the write");
    assert_eq!(w.call(io, peer::flush(3, 1), &[]).status, 0x280);
}

/// A successful FLUSH between two pieces; then a FLUSH of another queue fails.
#[test]
fn t22_a_good_flush_between_pieces_then_a_failure_elsewhere() {
    let (mut w, io, other) = two(true);
    let data = pattern(1, BLOCKS as usize);
    w.command(io, peer::write_r2t(1, 1, 0, BLOCKS), &[]);
    send_requested(&mut w, io, 1, &data);
    let r2t = w.next(io).unwrap();
    assert_eq!(w.call(io, peer::flush(2, 1), &[]).status, 0);
    send_data(&mut w, io, &r2t, &data); // piece 1, not flushed
    fail_a_flush(&mut w, other);
    send_requested(&mut w, io, 1, &data);
    send_requested(&mut w, io, 1, &data);
    assert_eq!(w.next(io).unwrap().completion().status, 0, "the write");
    assert_eq!(w.call(io, peer::flush(3, 1), &[]).status, 0x280, "piece 1 is lost");
}

/// A FLUSH of another queue fails between two pieces; a FLUSH of the own queue, sent before the
/// write has ended, reports it. The next FLUSH, behind the write, is the only one that covers it.
#[test]
fn t22_a_reported_failure_does_not_hide_the_loss_of_a_piece() {
    let (mut w, io, other) = two(true);
    let data = pattern(1, BLOCKS as usize);
    w.command(io, peer::write_r2t(1, 1, 0, BLOCKS), &[]);
    send_requested(&mut w, io, 1, &data);
    fail_a_flush(&mut w, other); // piece 0 may be lost
    let r2t = w.next(io).unwrap();
    assert_eq!(w.call(io, peer::flush(2, 1), &[]).status, 0x280);
    send_data(&mut w, io, &r2t, &data);
    send_requested(&mut w, io, 1, &data);
    send_requested(&mut w, io, 1, &data);
    assert_eq!(w.next(io).unwrap().completion().status, 0, "the write");
    assert_eq!(w.call(io, peer::flush(3, 1), &[]).status, 0x280, "piece 0 is lost");
}

/// A FLUSH in flight reports a failure. It was sent before a write that is lost, too, so the host
/// may not conclude anything about that write. The FLUSH behind the write must report it.
#[test]
fn t22_a_flush_does_not_answer_for_a_write_behind_it() {
    let (mut w, io, other) = two(true);
    assert_eq!(w.call(io, peer::write(1, 1, 50, 1), &block(1)).status, 0);
    w.host.drives[0].holds = true;
    w.command(io, peer::flush(2, 1), &[]);
    w.host.drives[0].holds = false;
    assert_eq!(w.call(io, peer::write(3, 1, 60, 1), &block(3)).status, 0);
    fail_a_flush(&mut w, other); // blocks 50 and 60 may be lost
    w.complete_all(0);
    let flush = w.next(io).unwrap().completion();
    assert_eq!((flush.cid, flush.status), (2, 0x280));
    assert_eq!(w.call(io, peer::flush(4, 1), &[]).status, 0x280, "block 60 is lost");
    // Reported, and not again.
    assert_eq!(w.call(io, peer::flush(5, 1), &[]).status, 0);
}

/// The same, with the write at the drive when the failure is reported.
#[test]
fn t22_a_flush_does_not_answer_for_a_write_in_flight() {
    let (mut w, io, other) = two(true);
    w.host.drives[0].holds = true;
    w.command(io, peer::write(1, 1, 60, 1), &block(3));
    w.host.drives[0].holds = false;
    fail_a_flush(&mut w, other); // block 60 may be lost
    assert_eq!(w.call(io, peer::flush(2, 1), &[]).status, 0x280);
    w.complete_all(0);
    assert_eq!(w.next(io).unwrap().completion().status, 0, "the write");
    assert_eq!(w.call(io, peer::flush(4, 1), &[]).status, 0x280, "block 60 is lost");
    assert_eq!(w.call(io, peer::flush(5, 1), &[]).status, 0);
}

/// The drive takes long for a piece. The time limit for the data of the next one begins with its R2T.
#[test]
fn the_time_limit_for_a_piece_begins_with_its_r2t() {
    let (mut w, io, _) = two(false);
    let data = pattern(1, BLOCKS as usize);
    w.command(io, peer::write_r2t(1, 1, 0, BLOCKS), &[]);
    w.host.drives[0].holds = true;
    send_requested(&mut w, io, 1, &data);
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
        let (mut w, io, _) = two(true);
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
            send_requested(&mut w, io, 1, &data);
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

/// A FLUSH of a stream's epochs covers no write without an order, so it does not answer for one.
#[test]
fn t22_a_flush_of_epochs_does_not_hide_the_loss_of_a_plain_write() {
    let volumes = Volumes::without_log(crc);
    let mut w =
        World::over_ordered(&[true], DriveOrder::Epochs, identity(), Parts::default(), volumes);
    let (_, cntlid) = w.admin();
    let [io, other] = [w.io(cntlid, 1), w.io(cntlid, 2)];
    let flush_epochs = |cid| {
        let mut sqe = riopipe_nvme::command::Sqe::flush(1);
        wire::put_flush_before(&mut sqe, EpochId { stream: 1, epoch: 5 });
        riopipe_bytes(&sqe).cid(cid)
    };
    assert_eq!(w.call(io, flush_epochs(1), &[]).status, 0);
    assert_eq!(w.call(io, peer::write(2, 1, 50, 1), &block(1)).status, 0);
    fail_a_flush(&mut w, other); // block 50 may be lost
    assert_eq!(w.call(io, flush_epochs(3), &[]).status, 0x280, "its epochs may be lost");
    assert_eq!(w.call(io, peer::flush(4, 1), &[]).status, 0x280, "block 50 is lost");
}
