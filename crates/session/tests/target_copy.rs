//! Copy: source ranges, one behind the other, to other blocks of the namespace.

mod world;

use riopipe_session::target::limits::{COPY_RANGE_BLOCKS_MAX, TRANSFER_BUDGET};
use riopipe_testkit::peer;
use world::{BLOCKS, What, World, block, pattern};

const SIZE_LIMIT: u16 = 0x183;
const OVERLAP: u16 = 0x187;
const GUARDED: u16 = riopipe_session::wire::status::GUARDED.code();

fn copy(w: &mut World, io: usize, cid: u16, to: u64, ranges: &[(u64, u32)]) {
    let (sqe, list) = peer::copy(cid, 1, to, ranges);
    w.command(io, sqe, &list);
}

/// Status and result of the only completion that has come.
fn outcome(w: &mut World, io: usize) -> (u16, u64) {
    let done = w.completions(io);
    assert_eq!(done.len(), 1, "{done:?}");
    (done[0].status, done[0].result)
}

fn fill(w: &mut World, lba: u64, seed: u8, blocks: usize) {
    for (number, block) in pattern(seed, blocks).chunks(4096).enumerate() {
        w.host.drives[0].overwrite(lba + number as u64, block.to_vec());
    }
}

#[test]
fn ranges_are_copied_one_behind_the_other() {
    let (mut w, io, _) = World::with_two_queues(false);
    fill(&mut w, 10, 1, 3);
    fill(&mut w, 20, 9, 2);
    copy(&mut w, io, 1, 100, &[(20, 2), (10, 3), (20, 1)]);
    assert_eq!(outcome(&mut w, io), (0, 0));
    let expected = [9, 10, 1, 2, 3, 9];
    for (number, seed) in (0..).zip(expected) {
        assert_eq!(w.host.drives[0].block(100 + number), block(seed), "{number}");
    }
    assert_eq!(w.host.drives[0].block(106), vec![0; 4096]);
    // The list is asked for.
    let (sqe, list) = peer::copy(2, 1, 200, &[(10, 3)]);
    w.command(io, sqe.transport(32), &[]);
    w.send_requested(io, 2, &list);
    assert_eq!(outcome(&mut w, io), (0, 0));
    assert_eq!(w.host.drives[0].block(202), block(3));
    assert!(w.links[io].conn.is_quiet());
}

#[test]
fn t28_a_copy_holds_one_piece_at_a_time() {
    let (mut w, io, _) = World::with_two_queues(false);
    fill(&mut w, 0, 1, 700);
    w.host.drives[0].holds = true;
    copy(&mut w, io, 1, 5000, &[(0, 600), (600, 100)]);
    let mut operations = Vec::new();
    while let [operation] = &w.host.drives[0].pending[..] {
        let what = match &operation.what {
            What::Write(bytes) => ("write", bytes.len() / 4096),
            What::Read(blocks) => ("read", *blocks as usize),
            other => panic!("{other:?}"),
        };
        operations.push((what.0, operation.lba, what.1));
        w.complete(0, 0);
    }
    let expected = [(0, 5000, 256), (256, 5256, 256), (512, 5512, 88), (600, 5600, 100)];
    let expected: Vec<_> = expected
        .iter()
        .flat_map(|(from, to, blocks)| [("read", *from, *blocks), ("write", *to, *blocks)])
        .collect();
    assert_eq!(operations, expected);
    assert_eq!(outcome(&mut w, io), (0, 0));
    assert_eq!(w.host.drives[0].block(5699), w.host.drives[0].block(699));
    // As many as the budget allows, and then the next one waits.
    let copies = (TRANSFER_BUDGET >> 20) as u16;
    for cid in 0..=copies {
        copy(&mut w, io, cid, 5000 + 300 * u64::from(cid), &[(0, 256)]);
    }
    assert_eq!(w.host.drives[0].pending.len(), usize::from(copies));
    w.complete_all(0);
    assert_eq!(w.completions(io).len(), usize::from(copies) + 1);
}

#[test]
fn all_is_checked_before_the_first_block_is_written() {
    let (mut w, io, _) = World::with_two_queues(false);
    let most = COPY_RANGE_BLOCKS_MAX;
    let cases = [
        (100, vec![(0, 1), (BLOCKS, 1)], 0x80),
        (BLOCKS - 1, vec![(0, 1), (1, 1)], 0x80),
        (u64::MAX, vec![(0, 1)], 0x80),
        (100, vec![(u64::MAX, 2)], 0x80),
        (5000, vec![(0, most + 1)], SIZE_LIMIT),
        (5000, vec![(0, most), (0, 1)], SIZE_LIMIT),
        (100, vec![(0, 1), (99, 2)], OVERLAP),
        (100, vec![(0, 1), (101, 1)], OVERLAP),
        (100, vec![(0, 1); 129], SIZE_LIMIT),
    ];
    for (to, ranges, status) in cases {
        copy(&mut w, io, 1, to, &ranges);
        assert_eq!(outcome(&mut w, io), (status, 0), "{to} {ranges:?}");
    }
    // Another format, a directive, a list of another length, no such namespace.
    let (sqe, list) = peer::copy(1, 1, 100, &[(0, 1)]);
    assert_eq!(w.call(io, sqe.byte(49, 1), &list).status, 0x02);
    assert_eq!(w.call(io, sqe.byte(50, 0x10), &list).status, 0x02);
    assert_eq!(w.call(io, sqe.byte(48, 1), &list).status, 0x0f);
    assert_eq!(w.call(io, sqe.dword(1, 2), &list).status, 0x0b);
    assert!(w.host.drives[0].history.is_empty());
    assert!(w.links[io].conn.is_quiet());
    // The most that is allowed: 128 ranges.
    copy(&mut w, io, 2, 5000, &[(7, 1); 128]);
    assert_eq!(outcome(&mut w, io), (0, 0));
}

#[test]
fn a_failure_names_the_range() {
    let (mut w, io, _) = World::with_two_queues(false);
    w.host.drives[0].holds = true;
    for (fail_at, expected) in [(0, (0x281, 0)), (1, (0x280, 0)), (4, (0x281, 1)), (5, (0x280, 1))]
    {
        copy(&mut w, io, 1, 5000, &[(0, 300), (300, 1)]);
        // Two pieces of the first range, then the second one: a read and a write each.
        for _ in 0..fail_at {
            w.complete(0, 0);
        }
        w.fail(0, 0);
        assert_eq!(outcome(&mut w, io), expected);
        assert!(w.host.drives[0].pending.is_empty());
    }
    assert!(w.links[io].conn.is_quiet());
}

#[test]
fn fua_and_flush_cover_a_copy() {
    let (mut w, io, other) = World::with_two_queues(true);
    let (sqe, list) = peer::copy(1, 1, 100, &[(0, 1)]);
    assert_eq!(w.call(io, sqe.byte(51, 0x40), &list).status, 0);
    assert_eq!(w.host.drives[0].history.last(), Some(&(0, What::Flush)));
    // A FLUSH of another connection has failed since: the copy may be lost (T22).
    assert_eq!(w.call(io, sqe, &list).status, 0);
    w.fail_a_flush(other);
    assert_eq!(w.call(io, peer::flush(2, 1), &[]).status, 0x280);
    assert_eq!(w.call(io, peer::flush(3, 1), &[]).status, 0);
}

#[test]
fn t21_a_copy_passes_the_guard_with_each_piece() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin_as("nqn.2014-08.org.nvmexpress:uuid:other", [9; 16], 0);
    let io = w.io_as("nqn.2014-08.org.nvmexpress:uuid:other", [9; 16], cntlid, 1);
    w.host.drives[0].holds = true;
    copy(&mut w, io, 1, 5000, &[(0, 300)]);
    w.complete(0, 0);
    w.complete(0, 0);
    // The second piece is being read.
    let (admin, _) = w.admin();
    let claim = w.first_claim();
    assert_eq!(w.claim(admin, &claim), None, "it waits for the read");
    w.complete_all(0);
    assert_eq!(outcome(&mut w, io), (GUARDED, 0));
    assert_eq!(w.completions(admin)[0].status, 0);
    copy(&mut w, io, 2, 5000, &[(0, 1)]);
    assert_eq!(outcome(&mut w, io), (GUARDED, 0));
}

/// A piece waits for a locked block with its data.
#[test]
fn a_copy_does_not_come_between_compare_and_write() {
    for is_locked_before in [true, false] {
        let (mut w, io, other) = World::with_two_queues(false);
        fill(&mut w, 0, 7, 2);
        w.host.drives[0].holds = true;
        let lock = |w: &mut World| {
            w.command(other, peer::compare(1, 1, 101, 1).first_half(), &[0; 4096]);
            w.command(other, peer::write(2, 1, 101, 1).second_half(), &block(1));
        };
        if is_locked_before {
            lock(&mut w);
            copy(&mut w, io, 1, 100, &[(0, 2)]);
            // The read of the copy ends first.
            w.complete(0, 1);
        } else {
            copy(&mut w, io, 1, 100, &[(0, 2)]);
            lock(&mut w);
            w.complete(0, 0);
        }
        let is_write = |what: &What| matches!(what, What::Write(_));
        let pending: Vec<_> = w.host.drives[0].pending.iter().map(|op| op.what.clone()).collect();
        assert!(!pending.iter().any(is_write), "{pending:?}");
        w.complete_all(0);
        assert_eq!(outcome(&mut w, io), (0, 0));
        let statuses: Vec<u16> = w.completions(other).iter().map(|done| done.status).collect();
        assert_eq!(statuses, [0, 0]);
        assert_eq!(w.host.drives[0].block(101), block(8), "the copy came last");
    }
}

#[test]
fn identify_announces_copy() {
    let mut w = World::new(&[false]);
    let (admin, _) = w.admin();
    let (controller, _) = w.fetch(admin, peer::identify(1, 1, 0));
    assert_eq!(controller[521] & 1, 1, "ONCS bit 8");
    assert_eq!(controller[534..536], [1, 0], "OCFS: format 0");
    let (namespace, _) = w.fetch(admin, peer::identify(1, 0, 1));
    assert_eq!(namespace[74..81], [0, 8, 0, 8, 0, 0, 127], "MSSRL, MCL, MSRC");
    let (effects, _) = w.fetch(admin, peer::get_log(2, 5, 0, 4096));
    assert_eq!(effects[1024 + 4 * 0x19..][..4], [3, 0, 0, 0], "it changes blocks");
}
