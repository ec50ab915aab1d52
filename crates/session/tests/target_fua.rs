//! Writes with FUA (Force Unit Access): a drive that has FUA makes them durable itself, and on any other drive
//! a FLUSH follows.

mod world;

use riopipe_testkit::peer::{self, Sqe};
use world::{What, World, block, pattern};

/// The blocks of a write in several pieces.
const BLOCKS: u32 = 600;

/// The commands with FUA, and the number of operations that each becomes.
fn commands() -> [(Sqe, usize); 3] {
    let with_fua = |sqe: Sqe| sqe.byte(51, 0x40);
    [
        (with_fua(peer::write(1, 1, 50, 1)), 1),
        (with_fua(peer::write_r2t(1, 1, 100, BLOCKS)), 3),
        (peer::write_zeroes(1, 1, 60, 3, true).byte(51, 0x42), 1),
    ]
}

/// Carries out a command. Returns its status.
fn call(w: &mut World, at: usize, sqe: Sqe, operations: usize) -> u16 {
    if operations == 1 {
        let data = if sqe.0[0] == 0x01 { block(7) } else { Vec::new() };
        return w.call(at, sqe, &data).status;
    }
    let data = pattern(1, BLOCKS as usize);
    w.command(at, sqe, &[]);
    for _ in 0..operations {
        w.send_requested(at, 1, &data);
    }
    w.next(at).unwrap().completion().status
}

#[test]
fn a_drive_with_fua_gets_it_and_no_flush() {
    let mut w = World::new(&[true]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    w.host.drives[0].has_fua = true;
    for (sqe, operations) in commands() {
        let drive = &mut w.host.drives[0];
        drive.durable = 0;
        drive.history.clear();
        assert_eq!(call(&mut w, io, sqe, operations), 0);
        let drive = &w.host.drives[0];
        assert_eq!((drive.durable, drive.history.len()), (operations, operations));
        assert!(drive.history.iter().all(|(_, what)| *what != What::Flush));
    }
    // Without FUA, as before.
    w.host.drives[0].durable = 0;
    assert_eq!(w.call(io, peer::write(2, 1, 50, 1), &block(8)).status, 0);
    assert_eq!(w.host.drives[0].durable, 0);
}

#[test]
fn on_a_drive_without_fua_a_flush_follows() {
    let mut w = World::new(&[true]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    for (sqe, operations) in commands() {
        w.host.drives[0].history.clear();
        assert_eq!(call(&mut w, io, sqe, operations), 0);
        let drive = &w.host.drives[0];
        assert_eq!(drive.history.last().map(|(_, what)| what.clone()), Some(What::Flush));
        assert_eq!((drive.durable, drive.history.len()), (0, operations + 1));
    }
}

/// No FLUSH follows when the drive ends the write later, either.
#[test]
fn no_flush_follows_a_write_with_fua_that_ends_later() {
    let mut w = World::new(&[true]);
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    w.host.drives[0].has_fua = true;
    w.host.drives[0].holds = true;
    w.command(io, peer::write(1, 1, 50, 1).byte(51, 0x40), &block(7));
    assert!(w.next(io).is_none(), "it is at the drive");
    w.host.drives[0].holds = false;
    w.complete_all(0);
    assert_eq!(w.next(io).unwrap().completion().status, 0);
    assert_eq!((w.host.drives[0].durable, w.host.drives[0].history.len()), (1, 1), "no FLUSH");
}
