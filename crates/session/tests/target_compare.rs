//! Compare, and the fused operation Compare and Write: atomic with regard to the commands of all
//! connections.

mod world;

use riopipe_order::write_order::DriveOrder;
use riopipe_session::target::Volumes;
use riopipe_testkit::Random;
use riopipe_testkit::peer::{self, Digests, Sqe};
use world::{Parts, What, World, block, crc, identity, pattern};

const COMPARE_FAILED: u16 = 0x285;
const FUSED_FAILED: u16 = 0x09;
const FUSED_MISSING: u16 = 0x0a;
const INVALID_FIELD: u16 = 0x02;
const ABORTED: u16 = 0x07;
/// The project's status: the volume of the namespace has an owner.
const GUARDED: u16 = riopipe_session::wire::status::GUARDED.code();

/// Sends Compare and Write of block `lba`: `old` is to become `new`.
fn send_pair(w: &mut World, io: usize, cid: u16, lba: u64, old: &[u8], new: &[u8]) {
    w.command(io, peer::compare(cid, 1, lba, 1).first_half(), old);
    w.command(io, peer::write(cid + 1, 1, lba, 1).second_half(), new);
}

/// The statuses of the completions that have come, each with its command.
fn statuses(w: &mut World, io: usize) -> Vec<(u16, u16)> {
    w.completions(io).iter().map(|done| (done.cid, done.status)).collect()
}

fn pending(w: &World) -> Vec<What> {
    w.host.drives[0].pending.iter().map(|operation| operation.what.clone()).collect()
}

/// Two hosts with an I/O queue each.
fn two_hosts() -> (World, usize, usize) {
    let mut w = World::new(&[false]);
    let [one, other] = [1, 2].map(|number| {
        let (name, id) = (format!("nqn.2014-08.org.nvmexpress:uuid:host-{number}"), [number; 16]);
        let (_, cntlid) = w.admin_as(&name, id, 0);
        w.io_as(&name, id, cntlid, 1)
    });
    (w, one, other)
}

#[test]
fn compare_finds_whether_the_content_is_the_expected_one() {
    let (mut w, io, _) = World::with_two_queues(false);
    assert_eq!(w.call(io, peer::write(1, 1, 5, 2), &pattern(3, 2)).status, 0);
    assert_eq!(w.call(io, peer::compare(2, 1, 5, 2), &pattern(3, 2)).status, 0);
    let done = w.call(io, peer::compare(3, 1, 5, 2), &pattern(4, 2));
    assert_eq!((done.status, done.dnr), (COMPARE_FAILED, true));
    let mut last_byte = pattern(3, 2);
    last_byte[8191] ^= 1;
    assert_eq!(w.call(io, peer::compare(4, 1, 5, 2), &last_byte).status, COMPARE_FAILED);
    // The data is asked for.
    for (cid, seed, status) in [(5, 3, 0), (6, 9, COMPARE_FAILED)] {
        w.command(io, peer::compare_r2t(cid, 1, 5, 2), &[]);
        w.send_requested(io, cid, &pattern(seed, 2));
        assert_eq!(statuses(&mut w, io), [(cid, status)]);
    }
    // Blocks that are not there, and data of another length.
    assert_eq!(w.call(io, peer::compare_r2t(7, 1, world::BLOCKS, 1), &[]).status, 0x80);
    assert_eq!(w.call(io, peer::compare(8, 1, 0, 2).inline(4096), &block(0)).status, 0x0f);
    assert_eq!(w.call(io, peer::compare_r2t(9, 7, 0, 1), &[]).status, 0x0b);
    w.host.drives[0].failing = true;
    assert_eq!(w.call(io, peer::compare(10, 1, 5, 1), &block(3)).status, 0x281, "read error");
    assert!(w.links[io].conn.is_quiet());
}

/// The host's data and the content take the share of one connection together.
#[test]
fn a_large_compare_is_carried_out_in_pieces() {
    const BLOCKS: usize = 512;
    let (mut w, io, _) = World::with_two_queues(false);
    let content = pattern(1, BLOCKS);
    for (lba, block) in content.chunks(4096).enumerate() {
        w.host.drives[0].overwrite(lba as u64, block.to_vec());
    }
    w.command(io, peer::compare_r2t(1, 1, 0, BLOCKS as u32), &[]);
    for piece in 0..4 {
        assert_eq!(w.send_requested(io, 1, &content), (piece << 19, 1 << 19));
    }
    assert_eq!(statuses(&mut w, io), [(1, 0)]);
    // The third piece differs, so the fourth is not asked for.
    let mut other = content;
    other[5 << 18] ^= 1;
    w.command(io, peer::compare_r2t(2, 1, 0, BLOCKS as u32), &[]);
    for _ in 0..3 {
        w.send_requested(io, 2, &other);
    }
    assert_eq!(statuses(&mut w, io), [(2, COMPARE_FAILED)]);
    assert!(w.links[io].conn.is_quiet());
}

/// Each Compare counts twice: two take what four writes of the same size would.
#[test]
fn t28_a_compare_is_charged_for_both_copies() {
    let (mut w, io, _) = World::with_two_queues(false);
    for cid in 0..9 {
        w.command(io, peer::compare_r2t(cid, 1, 0, 128), &[]);
    }
    let r2ts = std::iter::from_fn(|| w.next(io)).count();
    assert_eq!(r2ts, 8, "8 MiB: the budget of a connection");
}

#[test]
fn compare_and_write_writes_only_over_the_expected_content() {
    let (mut w, io, _) = World::with_two_queues(false);
    assert_eq!(w.call(io, peer::write(1, 1, 5, 1), &block(1)).status, 0);
    send_pair(&mut w, io, 10, 5, &block(1), &block(2));
    assert_eq!(statuses(&mut w, io), [(10, 0), (11, 0)]);
    assert_eq!(w.host.drives[0].block(5), block(2));
    send_pair(&mut w, io, 12, 5, &block(1), &block(3));
    assert_eq!(statuses(&mut w, io), [(12, COMPARE_FAILED), (13, FUSED_FAILED)]);
    assert_eq!(w.host.drives[0].block(5), block(2), "not written");
    // Both data by R2T, in any order.
    for (cid, first_in_capsule, second_in_capsule) in
        [(20, false, false), (22, true, false), (24, false, true)]
    {
        let (old, new) = (w.host.drives[0].block(5), block(cid as u8));
        match first_in_capsule {
            true => w.command(io, peer::compare(cid, 1, 5, 1).first_half(), &old),
            false => w.command(io, peer::compare_r2t(cid, 1, 5, 1).first_half(), &[]),
        }
        assert!(w.next(io).is_none(), "no data is asked for before the pair is whole");
        match second_in_capsule {
            true => w.command(io, peer::write(cid + 1, 1, 5, 1).second_half(), &new),
            false => w.command(io, peer::write_r2t(cid + 1, 1, 5, 1).second_half(), &[]),
        }
        let r2ts: Vec<_> = std::iter::from_fn(|| w.next(io)).collect();
        for r2t in r2ts.iter().rev() {
            w.send_data(io, r2t, if r2t.u16(8) == cid { &old } else { &new });
        }
        assert_eq!(statuses(&mut w, io), [(cid, 0), (cid + 1, 0)]);
        assert_eq!(w.host.drives[0].block(5), new);
    }
    assert!(w.links[io].conn.is_quiet());
    // The locks are gone: a write goes on at once.
    assert_eq!(w.call(io, peer::write(30, 1, 5, 1), &block(7)).status, 0);
}

#[test]
fn half_of_a_fused_operation_alone_fails() {
    let (mut w, io, _) = World::with_two_queues(false);
    let old = vec![0; 4096];
    // The second half alone.
    w.command(io, peer::write(1, 1, 5, 1).second_half(), &block(1));
    assert_eq!(statuses(&mut w, io), [(1, FUSED_MISSING)]);
    // The first half, and then another command, which is carried out.
    w.command(io, peer::compare(2, 1, 5, 1).first_half(), &old);
    assert!(w.next(io).is_none());
    w.command(io, peer::read(3, 1, 0, 1), &[]);
    assert_eq!(w.next(io).unwrap().completion().status, FUSED_MISSING);
    assert_eq!(w.next(io).unwrap().kind, 0x07);
    w.completions(io);
    // Its late second half comes alone.
    w.command(io, peer::write(4, 1, 5, 1).second_half(), &block(1));
    assert_eq!(statuses(&mut w, io), [(4, FUSED_MISSING)]);
    // Two first halves.
    w.command(io, peer::compare(5, 1, 5, 1).first_half(), &old);
    send_pair(&mut w, io, 6, 5, &old, &block(2));
    assert_eq!(statuses(&mut w, io), [(5, FUSED_MISSING), (6, 0), (7, 0)]);
    // An identifier that is in use, as that of the second half.
    w.command(io, peer::compare(8, 1, 5, 1).first_half(), &block(2));
    w.command(io, peer::write(8, 1, 5, 1).second_half(), &block(3));
    assert_eq!(statuses(&mut w, io), [(8, FUSED_FAILED), (8, 0x03)]);
    assert_eq!(w.host.drives[0].block(5), block(2));
    assert!(w.links[io].conn.is_quiet());
}

#[test]
fn halves_that_make_no_sense_fail_both() {
    let (mut w, io, _) = World::with_two_queues(false);
    let first = || peer::compare(1, 1, 5, 1).first_half();
    let second = || peer::write(2, 1, 5, 1).second_half();
    let blocks = |sqe: Sqe| sqe.dword(12, 1).transport(8192);
    let cases: [(Sqe, Sqe, [u16; 2]); 7] = [
        (first(), peer::write(2, 1, 6, 1).second_half(), [FUSED_FAILED, INVALID_FIELD]),
        (first(), blocks(second()), [FUSED_FAILED, INVALID_FIELD]),
        (blocks(first()), blocks(second()), [0x14, FUSED_FAILED]),
        (peer::write(1, 1, 5, 1).first_half(), second(), [INVALID_FIELD, FUSED_FAILED]),
        (first(), peer::compare(2, 1, 5, 1).second_half(), [FUSED_FAILED, INVALID_FIELD]),
        (peer::compare(1, 9, 5, 1).first_half(), second(), [0x0b, FUSED_FAILED]),
        (
            first(),
            peer::write(2, 1, 5, 1).byte(50, 0x10).second_half(),
            [FUSED_FAILED, INVALID_FIELD],
        ),
    ];
    for (first, second, expected) in cases {
        for sqe in [first, second] {
            let data = if sqe.0[39] == 0x01 { vec![0; 4096] } else { vec![] };
            w.command(io, sqe, &data);
        }
        let [one, other] = expected;
        assert_eq!(statuses(&mut w, io), [(1, one), (2, other)]);
    }
    // FUSE 11b is reserved.
    let sqe = peer::write(3, 1, 5, 1).first_half().second_half();
    assert_eq!(w.call(io, sqe, &block(1)).status, INVALID_FIELD);
    assert!(w.host.drives[0].history.is_empty(), "nothing was read or written");
    assert!(w.links[io].conn.is_quiet());
}

#[test]
fn t21_the_drive_fails_one_half_or_the_other() {
    let (mut w, io, _) = World::with_two_queues(true);
    w.host.drives[0].holds = true;
    send_pair(&mut w, io, 1, 5, &[0; 4096], &block(1));
    w.fail(0, 0);
    assert_eq!(statuses(&mut w, io), [(1, 0x281), (2, FUSED_FAILED)]);
    send_pair(&mut w, io, 3, 5, &[0; 4096], &block(1));
    w.complete(0, 0);
    w.fail(0, 0);
    assert_eq!(statuses(&mut w, io), [(3, FUSED_FAILED), (4, 0x280)]);
    // With FUA, both halves complete after the FLUSH.
    w.command(io, peer::compare(5, 1, 5, 1).first_half(), &[0; 4096]);
    w.command(io, peer::write(6, 1, 5, 1).byte(51, 0x40).second_half(), &block(2));
    w.complete(0, 0);
    w.complete(0, 0);
    assert_eq!(pending(&w), [What::Flush]);
    assert!(w.next(io).is_none());
    w.complete(0, 0);
    assert_eq!(statuses(&mut w, io), [(5, 0), (6, 0)]);
}

/// A write of another host neither comes between the read and the write, nor is lost.
#[test]
fn no_command_changes_the_block_between_compare_and_write() {
    let old = vec![0; 4096];
    let zeroes = peer::write_zeroes(50, 1, 4, 3, false);
    let deallocate = Sqe::new(0x09, 50, 1).inline(16).dword(11, 4);
    let range = [0, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0];
    let writes: [(Sqe, Vec<u8>); 4] = [
        (peer::write(50, 1, 4, 2), pattern(9, 2)),
        (peer::write_r2t(50, 1, 5, 1), block(9)),
        (zeroes, vec![]),
        (deallocate, range.to_vec()),
    ];
    for (sqe, data) in writes {
        let send_write = |w: &mut World, io: usize| {
            if sqe.0[39] == 0x5a {
                w.command(io, sqe, &[]);
                w.send_requested(io, 50, &data);
            } else {
                w.command(io, sqe, &data);
            }
        };
        // The write comes while the block is locked: it waits.
        let (mut w, one, other) = two_hosts();
        // Also before the other host is noted as a writer.
        w.host.drives[0].holds = true;
        send_pair(&mut w, one, 1, 5, &old, &block(1));
        assert_eq!(pending(&w), [What::Read(1)]);
        send_write(&mut w, other);
        assert_eq!(pending(&w), [What::Read(1)], "the write waits");
        w.complete(0, 0);
        assert_eq!(pending(&w), [What::Write(block(1))]);
        w.complete(0, 0);
        assert_eq!(statuses(&mut w, one), [(1, 0), (2, 0)]);
        assert_eq!(w.host.drives[0].pending.len(), 1, "now it goes on");
        w.complete_all(0);
        assert_eq!(statuses(&mut w, other), [(50, 0)]);
        assert_ne!(w.host.drives[0].block(5), block(1));
        // The write is in flight when the block is to be locked: the lock waits for it.
        let (mut w, one, other) = two_hosts();
        w.host.drives[0].holds = true;
        send_write(&mut w, other);
        send_pair(&mut w, one, 1, 5, &old, &block(1));
        assert!(!pending(&w).contains(&What::Read(1)), "the lock waits");
        w.complete(0, 0);
        assert_eq!(pending(&w), [What::Read(1)]);
        w.complete_all(0);
        let is_unchanged = !matches!(sqe.0[0], 0x01);
        let expected = if is_unchanged { [0, 0] } else { [COMPARE_FAILED, FUSED_FAILED] };
        assert_eq!(statuses(&mut w, one), [(1, expected[0]), (2, expected[1])]);
        assert_eq!(w.host.drives[0].block(5) == block(1), is_unchanged);
    }
}

#[test]
fn commands_on_other_blocks_and_reads_do_not_wait() {
    let (mut w, one, other) = two_hosts();
    w.host.drives[0].holds = true;
    w.command(other, peer::write(1, 1, 100, 1), &block(1));
    send_pair(&mut w, one, 1, 5, &[0; 4096], &block(1));
    assert_eq!(pending(&w).len(), 2, "an operation on another block is not waited for");
    w.command(other, peer::write(2, 1, 4, 1), &block(2));
    w.command(other, peer::write(3, 1, 6, 1), &block(3));
    w.command(other, peer::read(4, 1, 5, 1), &[]);
    assert_eq!(pending(&w).len(), 5);
    w.complete_all(0);
    assert_eq!(statuses(&mut w, one), [(1, 0), (2, 0)]);
}

/// A write in pieces waits with the piece of the locked block alone.
#[test]
fn a_piece_of_a_write_waits() {
    let (mut w, one, other) = two_hosts();
    let data = pattern(1, 512);
    w.command(other, peer::write_r2t(1, 1, 0, 512), &[]);
    w.host.drives[0].holds = true;
    send_pair(&mut w, one, 1, 300, &[0; 4096], &block(1));
    w.send_requested(other, 1, &data);
    assert_eq!(pending(&w).len(), 2);
    w.complete(0, 1);
    w.send_requested(other, 1, &data);
    assert_eq!(pending(&w), [What::Read(1)], "the second piece waits");
    w.complete_all(0);
    assert_eq!(statuses(&mut w, one), [(1, 0), (2, 0)]);
    assert_eq!(statuses(&mut w, other), [(1, 0)]);
    assert_eq!(w.host.drives[0].block(300), data[300 * 4096..301 * 4096]);
}

/// A host may take its time with the data of the next piece.
#[test]
fn a_write_between_two_pieces_locks_nothing() {
    let (mut w, one, other) = two_hosts();
    let data = pattern(1, 512);
    w.command(other, peer::write_r2t(1, 1, 0, 512), &[]);
    w.host.drives[0].holds = true;
    send_pair(&mut w, one, 1, 5, &[0; 4096], &block(1));
    w.send_requested(other, 1, &data);
    assert_eq!(pending(&w), [What::Read(1)], "the first piece waits");
    w.complete_all(0);
    assert_eq!(statuses(&mut w, one), [(1, 0), (2, 0)]);
    let r2t = w.next(other).expect("the second piece is requested");
    send_pair(&mut w, one, 3, 5, &data[5 * 4096..6 * 4096], &block(2));
    assert_eq!(pending(&w), [What::Read(1)]);
    w.complete_all(0);
    assert_eq!(statuses(&mut w, one), [(3, 0), (4, 0)]);
    w.send_data(other, &r2t, &data);
    w.complete_all(0);
    assert_eq!(statuses(&mut w, other), [(1, 0)]);
}

/// Many hosts add to one counter, and nothing but Compare and Write keeps their sums right.
#[test]
fn no_update_of_any_host_is_lost() {
    for seed in 0..40 {
        let mut random = Random(seed);
        let mut w = World::new(&[false]);
        let ios: Vec<usize> = (1..=4)
            .map(|number| {
                let name = format!("nqn.2014-08.org.nvmexpress:uuid:host-{number}");
                let (_, cntlid) = w.admin_as(&name, [number; 16], 0);
                w.io_as(&name, [number; 16], cntlid, 1)
            })
            .collect();
        w.host.drives[0].holds = true;
        let counter = |n: u64| {
            let mut bytes = vec![0; 4096];
            bytes[..8].copy_from_slice(&n.to_le_bytes());
            bytes
        };
        // By host: the value that it expects on the drive.
        let mut expected = [0u64; 4];
        let (mut cids, mut added) = ([0u16; 4], 0);
        for _ in 0..400 {
            let host = random.below(4) as usize;
            let drive = &w.host.drives[0];
            let is_idle = w.links[ios[host]].conn.is_quiet();
            if is_idle && random.below(2) == 0 {
                let (old, new) = (counter(expected[host]), counter(expected[host] + 1));
                send_pair(&mut w, ios[host], cids[host], 5, &old, &new);
                cids[host] = (cids[host] + 2) % 1000;
            } else if !drive.pending.is_empty() {
                let at = random.below(drive.pending.len() as u64) as usize;
                w.complete(0, at);
            }
            for host in 0..4 {
                match statuses(&mut w, ios[host])[..] {
                    [] => {}
                    [(_, 0), (_, 0)] => {
                        added += 1;
                        expected[host] += 1;
                    }
                    [(_, COMPARE_FAILED), (_, FUSED_FAILED)] => expected[host] += 1,
                    ref other => panic!("seed {seed}: {other:?}"),
                }
            }
        }
        w.complete_all(0);
        for io in ios {
            added += u64::from(matches!(statuses(&mut w, io)[..], [(_, 0), (_, 0)]));
            assert!(w.links[io].conn.is_quiet(), "seed {seed}: it waits without end");
        }
        assert!(added > 10, "seed {seed}: {added} is too few to show anything");
        assert_eq!(w.host.drives[0].block(5), counter(added), "seed {seed}");
    }
}

/// Commands that wait go on, in the order in which they came (promise P8).
#[test]
fn the_end_of_a_connection_frees_its_locks() {
    let (mut w, one, other) = two_hosts();
    w.host.drives[0].holds = true;
    send_pair(&mut w, one, 1, 5, &[0; 4096], &block(1));
    send_pair(&mut w, other, 1, 5, &block(1), &block(2));
    w.command(other, peer::write(3, 1, 5, 1), &block(3));
    w.complete(0, 0);
    assert_eq!(pending(&w), [What::Write(block(1))]);
    w.hang_up(one);
    assert_eq!(pending(&w).len(), 1, "the write is still at the drive, and the block locked");
    w.complete(0, 0);
    assert_eq!(pending(&w), [What::Read(1)]);
    w.complete(0, 0);
    assert_eq!(pending(&w), [What::Write(block(2))]);
    w.complete(0, 0);
    assert_eq!(pending(&w), [What::Write(block(3))]);
    w.complete(0, 0);
    assert_eq!(statuses(&mut w, other), [(1, 0), (2, 0), (3, 0)]);
    // A connection that ends while its own pair waits.
    let (mut w, one, other) = two_hosts();
    w.host.drives[0].holds = true;
    send_pair(&mut w, one, 1, 5, &[0; 4096], &block(1));
    send_pair(&mut w, other, 1, 5, &block(1), &block(2));
    w.hang_up(other);
    w.complete_all(0);
    assert_eq!(statuses(&mut w, one), [(1, 0), (2, 0)]);
    w.host.drives[0].holds = false;
    assert_eq!(w.call(one, peer::write(9, 1, 5, 1), &block(4)).status, 0, "nothing is locked");
}

/// Hundreds of locks of one connection would keep all others busy.
#[test]
fn t28_a_connection_locks_one_block_at_a_time() {
    let (mut w, one, other) = two_hosts();
    w.host.drives[0].holds = true;
    let zeroes = vec![0; 4096];
    send_pair(&mut w, one, 10, 5, &zeroes, &block(1));
    send_pair(&mut w, one, 20, 6, &zeroes, &block(2));
    send_pair(&mut w, one, 30, 5, &block(1), &block(3));
    assert_eq!(pending(&w), [What::Read(1)], "the others wait");
    // The block of the second pair is not locked yet.
    w.command(other, peer::write(1, 1, 6, 1), &block(9));
    assert_eq!(pending(&w).len(), 2);
    w.complete_all(0);
    let expected = [(10, 0), (11, 0), (20, COMPARE_FAILED), (21, FUSED_FAILED), (30, 0), (31, 0)];
    assert_eq!(statuses(&mut w, one), expected);
    assert_eq!(w.host.drives[0].block(5), block(3));
    assert!(w.links[one].conn.is_quiet() && w.links[other].conn.is_quiet());
    // On a drive that completes operations at once, too.
    w.host.drives[0].holds = false;
    for cid in [40, 50] {
        send_pair(&mut w, one, cid, 5, &block(3), &block(3));
        assert_eq!(statuses(&mut w, one), [(cid, 0), (cid + 1, 0)]);
    }
    // Those that wait when the connection ends are not begun.
    let (mut w, one, _) = two_hosts();
    w.host.drives[0].holds = true;
    for cid in [10, 20] {
        send_pair(&mut w, one, cid, 5, &zeroes, &block(4));
    }
    w.hang_up(one);
    w.complete(0, 0);
    assert!(pending(&w).is_empty());
    assert!(w.links[one].conn.is_drained());
    assert_eq!(w.host.drives[0].block(5), zeroes);
}

#[test]
fn a_write_that_waits_for_its_blocks_is_aborted() {
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin();
    let [one, other] = [1, 2].map(|qid| w.io(cntlid, qid));
    w.host.drives[0].holds = true;
    send_pair(&mut w, one, 1, 5, &[0; 4096], &block(1));
    w.command(other, peer::write(3, 1, 5, 1), &block(3));
    let abort = |cid: u32, qid: u32| Sqe::new(0x08, 100, 0).dword(10, cid << 16 | qid);
    assert_eq!(w.call(admin, abort(3, 2), &[]).result, 0, "aborted");
    assert_eq!(statuses(&mut w, other), [(3, ABORTED)]);
    for half in [1, 2] {
        assert_eq!(w.call(admin, abort(half, 1), &[]).result, 1, "half of a fused operation");
    }
    w.complete_all(0);
    assert_eq!(statuses(&mut w, one), [(1, 0), (2, 0)]);
    assert_eq!(w.host.drives[0].block(5), block(1));
}

/// Ordered requests do not wait for locks, so neither is there while the other is.
#[test]
fn t21_compare_and_write_is_refused_where_ordered_requests_may_come() {
    let mut w = World::new(&[false]);
    let owner = w.owner();
    let (_, cntlid) = w.admin_as("nqn.2014-08.org.nvmexpress:uuid:other", [9; 16], 0);
    let other = w.io_as("nqn.2014-08.org.nvmexpress:uuid:other", [9; 16], cntlid, 1);
    let own = w.io(owner.cntlid, 2);
    for io in [own, other] {
        send_pair(&mut w, io, 1, 5, &[0; 4096], &block(1));
        assert_eq!(statuses(&mut w, io), [(1, GUARDED), (2, FUSED_FAILED)]);
    }
    assert_eq!(w.call(own, peer::compare(3, 1, 5, 1), &[0; 4096]).status, 0);
    // The volume is claimed between the read and the write.
    let (mut w, one, other) = two_hosts();
    w.host.drives[0].holds = true;
    for io in [one, other] {
        send_pair(&mut w, io, 1, 5, &[0; 4096], &block(1));
    }
    let (admin, _) = w.admin();
    let claim = w.first_claim();
    assert_eq!(w.claim(admin, &claim), None, "it waits for the read");
    w.complete_all(0);
    for io in [one, other] {
        assert_eq!(statuses(&mut w, io), [(1, FUSED_FAILED), (2, GUARDED)]);
    }
    assert_eq!(w.completions(admin)[0].status, 0);
    assert_eq!(w.host.drives[0].block(5), vec![0; 4096]);
    // A drive that keeps an order itself.
    let volumes = Volumes::without_log(crc);
    let parts = Parts::default();
    let mut w = World::over_ordered(&[true], DriveOrder::Barrier, identity(), parts, volumes);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    send_pair(&mut w, io, 1, 5, &[0; 4096], &block(1));
    assert_eq!(statuses(&mut w, io), [(1, INVALID_FIELD), (2, FUSED_FAILED)]);
}

#[test]
fn a_damaged_half_fails_both() {
    let digests = Digests { header: false, data: true };
    for damaged in 0..2 {
        let mut w = World::new(&[false]);
        let (_, cntlid) = w.admin();
        let io = w.initialize(digests, 0);
        let data = peer::connect_data(world::SUBNQN, peer::HOSTNQN, peer::HOSTID, cntlid);
        assert_eq!(w.call(io, peer::connect(0, 1, 127, 0), &data).status, 0);
        let halves = [
            (peer::compare(1, 1, 5, 1).first_half(), vec![0; 4096]),
            (peer::write(2, 1, 5, 1).second_half(), block(1)),
        ];
        for (number, (sqe, data)) in halves.into_iter().enumerate() {
            let mut bytes = peer::capsule(digests, &sqe.0, &data);
            if number == damaged {
                bytes[1000] ^= 1;
            }
            w.send(io, &bytes);
        }
        let mut expected = [(1, FUSED_FAILED), (2, FUSED_FAILED)];
        expected[damaged].1 = 0x22;
        assert_eq!(statuses(&mut w, io), expected);
        // By R2T.
        let sqes =
            [peer::compare_r2t(3, 1, 5, 1).first_half(), peer::write_r2t(4, 1, 5, 1).second_half()];
        for sqe in sqes {
            w.command(io, sqe, &[]);
        }
        for (number, data) in [vec![0; 4096], block(1)].into_iter().enumerate() {
            let r2t = w.next(io).expect("an R2T");
            let mut bytes = peer::h2c_data(digests, r2t.u16(8), r2t.u16(10), 0, &data, true);
            if number == damaged {
                bytes[1000] ^= 1;
            }
            w.send(io, &bytes);
        }
        let mut expected = [(3, FUSED_FAILED), (4, FUSED_FAILED)];
        expected[damaged].1 = 0x22;
        assert_eq!(statuses(&mut w, io), expected);
        assert!(w.host.drives[0].history.is_empty());
        assert!(w.links[io].conn.is_quiet());
    }
}

#[test]
fn without_memory_both_halves_fail() {
    let (mut w, io, _) = World::with_two_queues(false);
    w.host.no_memory = true;
    send_pair(&mut w, io, 1, 5, &[0; 4096], &block(1));
    assert_eq!(statuses(&mut w, io), [(1, 0x06), (2, FUSED_FAILED)]);
    assert_eq!(w.call(io, peer::compare(3, 1, 5, 1), &block(0)).status, 0x06);
    w.host.no_memory = false;
    send_pair(&mut w, io, 1, 5, &[0; 4096], &block(1));
    assert_eq!(statuses(&mut w, io), [(1, 0), (2, 0)]);
}

#[test]
fn identify_announces_compare_and_the_fused_operation() {
    let mut w = World::new(&[false]);
    let (admin, _) = w.admin();
    let (controller, _) = w.fetch(admin, peer::identify(1, 1, 0));
    assert_eq!(controller[520] & 1, 1, "ONCS");
    assert_eq!(controller[522..524], [1, 0], "FUSES");
    assert_eq!(controller[532..534], [0, 0], "ACWU: one block");
    let (effects, _) = w.fetch(admin, peer::get_log(2, 5, 0, 4096));
    assert_eq!(effects[1024 + 4 * 5..][..4], [1, 0, 0, 0], "Compare changes nothing");
}
