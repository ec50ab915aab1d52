//! Abort ends a command that has had no effect yet, wherever it waits.

mod world;

use riopipe_order::write_order::DriveOrder;
use riopipe_session::target::Volumes;
use riopipe_session::target::limits::{
    ABORTED_TRANSFERS_MAX, ABORTS_MAX, CONNECTION_BYTES, TRANSFER_BUDGET,
};
use riopipe_session::wire;
use riopipe_testkit::peer::{self, Digests, HOSTID, HOSTNQN, Received, Sqe};
use world::recovery::{RIVAL, RIVAL_ID};
use world::{Parts, SUBNQN, World, attribute, block, crc, identity, ordered, pattern};

const ABORT_REQUESTED: u16 = 0x07;
const ABORT_LIMIT: u16 = 0x103;
/// Blocks of the largest transfer that is not in pieces.
const BLOCKS_MAX: u32 = (CONNECTION_BYTES / 4096) as u32;
/// How many such transfers a connection may hold at once.
const TRANSFERS: u16 = (TRANSFER_BUDGET / CONNECTION_BYTES) as u16;

/// A host with one I/O queue.
struct Host {
    w: World,
    admin: usize,
    io: usize,
}

impl Host {
    fn new() -> Self {
        Self::over(World::new(&[false]))
    }

    fn over(mut w: World) -> Self {
        let (admin, cntlid) = w.admin();
        let io = w.io(cntlid, 1);
        Self { w, admin, io }
    }

    fn send_abort(&mut self, cid: u16) {
        let sqe = Sqe::new(0x08, 900 + cid, 0).dword(10, u32::from(cid) << 16 | 1);
        self.w.command(self.admin, sqe, &[]);
    }

    /// Asks for an abort. Returns whether it was carried out.
    fn abort(&mut self, cid: u16) -> bool {
        self.send_abort(cid);
        let done = self.w.next(self.admin).expect("an answer").completion();
        assert_eq!((done.cid, done.status), (900 + cid, 0));
        done.result == 0
    }

    /// Asks for an abort that must be carried out.
    fn abort_for_sure(&mut self, cid: u16) {
        assert!(self.abort(cid), "{cid}");
        let done = self.w.next(self.io).expect("the completion of the command").completion();
        assert_eq!((done.cid, done.status), (cid, ABORT_REQUESTED));
    }

    fn command(&mut self, sqe: Sqe, data: &[u8]) {
        self.w.command(self.io, sqe, data);
    }

    /// A write of the largest size, whose data is asked for.
    fn write(&mut self, cid: u16) {
        self.command(peer::write_r2t(cid, 1, 0, BLOCKS_MAX), &[]);
    }

    /// The R2Ts that have come: command and transfer tag.
    fn r2ts(&mut self) -> Vec<(u16, u16)> {
        let r2t = |pdu: Received| {
            assert_eq!(pdu.kind, 0x09, "an R2T: {pdu:?}");
            (pdu.u16(8), pdu.u16(10))
        };
        std::iter::from_fn(|| self.w.next(self.io)).map(r2t).collect()
    }

    /// Sends the data of a transfer, and nothing follows the completion.
    fn finish(&mut self, (cid, ttag): (u16, u16), blocks: u32) {
        self.send_data((cid, ttag), blocks);
        let done = self.w.next(self.io).expect("a completion").completion();
        assert_eq!((done.cid, done.status), (cid, 0));
    }

    fn send_data(&mut self, (cid, ttag): (u16, u16), blocks: u32) {
        let data = pattern(cid as u8, blocks as usize);
        let mut at = 0;
        for piece in data.chunks(128 * 1024) {
            let last = at + piece.len() == data.len();
            let pdu = peer::h2c_data(Digests::default(), cid, ttag, at as u32, piece, last);
            self.w.send(self.io, &pdu);
            at += piece.len();
        }
    }

    /// Checks that the connection holds nothing: it may hold as many of the largest transfers as at
    /// its beginning, and as many commands.
    fn check_nothing_is_held(&mut self) {
        for cid in 1000..1000 + TRANSFERS + 1 {
            self.write(cid);
        }
        let first = self.r2ts();
        assert_eq!(first.len(), usize::from(TRANSFERS), "the whole budget is free");
        for transfer in first {
            self.finish(transfer, BLOCKS_MAX);
            if let [waiting] = self.r2ts()[..] {
                self.finish(waiting, BLOCKS_MAX);
            }
        }
        assert!(self.w.links[self.io].conn.is_quiet());
        assert_eq!(self.w.links[self.io].closed, None);
    }
}

#[test]
fn a_command_that_waits_for_memory_is_aborted() {
    let mut host = Host::new();
    for cid in 0..TRANSFERS {
        host.write(cid);
    }
    let transfers = host.r2ts();
    assert_eq!(transfers.len(), usize::from(TRANSFERS));
    host.write(20);
    host.command(peer::read(21, 1, 0, BLOCKS_MAX), &[]);
    host.write(22);
    assert!(host.r2ts().is_empty(), "they wait");
    host.abort_for_sure(21);
    host.abort_for_sure(20);
    assert!(!host.abort(20), "once");
    // The identifiers are free, and the order of the others is as it was.
    host.write(20);
    host.finish(transfers[0], BLOCKS_MAX);
    let [(22, ttag)] = host.r2ts()[..] else { panic!("22 is next") };
    host.finish((22, ttag), BLOCKS_MAX);
    let [(20, ttag)] = host.r2ts()[..] else { panic!("20 is last") };
    host.finish((20, ttag), BLOCKS_MAX);
    for transfer in &transfers[1..] {
        host.finish(*transfer, BLOCKS_MAX);
    }
    assert_eq!(host.w.host.drives[0].history.len(), usize::from(TRANSFERS) + 2);
    host.check_nothing_is_held();
}

/// A command that waits first, and is too large, holds up smaller ones.
#[test]
fn those_behind_an_aborted_command_go_on() {
    let mut host = Host::new();
    for cid in 0..TRANSFERS - 1 {
        host.write(cid);
    }
    host.command(peer::write_r2t(30, 1, 0, BLOCKS_MAX / 2), &[]);
    let transfers = host.r2ts();
    assert_eq!(transfers.len(), usize::from(TRANSFERS));
    host.write(31);
    host.command(peer::write_r2t(32, 1, 0, 1), &[]);
    assert!(host.r2ts().is_empty(), "the small one waits behind the large one");
    assert!(host.abort(31));
    let done = host.w.next(host.io).unwrap().completion();
    assert_eq!((done.cid, done.status), (31, ABORT_REQUESTED));
    let [small] = host.r2ts()[..] else { panic!("it has its R2T at once") };
    host.finish(small, 1);
    for (cid, ttag) in transfers {
        host.finish((cid, ttag), if cid == 30 { BLOCKS_MAX / 2 } else { BLOCKS_MAX });
    }
    host.check_nothing_is_held();
}

#[test]
fn a_command_that_waits_for_its_data_is_aborted() {
    let mut host = Host::new();
    for cid in 0..TRANSFERS {
        host.write(cid);
    }
    let transfers = host.r2ts();
    host.write(40);
    // One has no data yet, of the other a piece has come.
    let (cid, ttag) = transfers[1];
    let piece = pattern(cid as u8, 2);
    let pdu = peer::h2c_data(Digests::default(), cid, ttag, 0, &piece, false);
    host.w.send(host.io, &pdu);
    assert!(host.abort(transfers[0].0));
    let done = host.w.next(host.io).unwrap().completion();
    assert_eq!((done.cid, done.status), (0, ABORT_REQUESTED));
    let [next] = host.r2ts()[..] else { panic!("its memory is free at once") };
    assert_eq!(next.0, 40);
    host.abort_for_sure(cid);
    assert!(!host.abort(0) && !host.abort(cid), "once");
    // The identifier may be used again, before the late data of the old command has come.
    host.command(peer::write_r2t(0, 1, 77, 1), &[]);
    let [again] = host.r2ts()[..] else { panic!("an R2T") };
    assert_ne!(again.1, transfers[0].1, "late data is distinct");
    host.send_data(transfers[0], BLOCKS_MAX);
    let rest = pattern(cid as u8, BLOCKS_MAX as usize);
    for (i, piece) in rest[8192..].chunks(120 * 1024).enumerate() {
        let at = 8192 + i * 120 * 1024;
        let last = at + piece.len() == rest.len();
        let pdu = peer::h2c_data(Digests::default(), cid, ttag, at as u32, piece, last);
        host.w.send(host.io, &pdu);
    }
    assert_eq!(host.w.next(host.io), None, "it is dropped");
    assert!(host.w.host.drives[0].history.is_empty(), "nothing was written");
    host.finish(again, 1);
    host.finish(next, BLOCKS_MAX);
    for transfer in &transfers[2..] {
        host.finish(*transfer, BLOCKS_MAX);
    }
    host.check_nothing_is_held();
}

/// A wrong digest of late data fails no later command.
#[test]
fn late_data_with_a_wrong_digest_is_dropped_too() {
    let digests = Digests { header: true, data: true };
    let mut w = World::new(&[false]);
    let (admin, cntlid) = w.admin();
    let io = w.initialize(digests, 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    assert_eq!(w.call(io, peer::connect(0, 1, 3, 0), &data).status, 0);
    let mut host = Host { w, admin, io };
    for cid in 0..20 {
        host.command(peer::write_r2t(cid, 1, 0, 1), &[]);
        let [(_, ttag)] = host.r2ts()[..] else { panic!("an R2T") };
        host.abort_for_sure(cid);
        let mut late = peer::h2c_data(digests, cid, ttag, 0, &block(1), true);
        *late.last_mut().unwrap() ^= 1;
        host.w.send(io, &late);
        host.command(peer::write_r2t(cid, 1, 0, 1), &[]);
        let [(_, ttag)] = host.r2ts()[..] else { panic!("an R2T") };
        host.w.send(io, &peer::h2c_data(digests, cid, ttag, 0, &block(2), true));
        assert_eq!(host.w.next(io).unwrap().completion().status, 0);
    }
}

#[test]
fn t28_transfers_of_aborted_commands_have_a_bound() {
    let mut host = Host::new();
    let mut aborted = Vec::new();
    for cid in 0..ABORTED_TRANSFERS_MAX {
        host.write(cid);
        aborted.extend(host.r2ts());
        host.abort_for_sure(cid);
    }
    // Their data does not come. Commands beyond the bound go on.
    host.write(50);
    let [transfer] = host.r2ts()[..] else { panic!("an R2T") };
    assert!(!host.abort(50));
    host.finish(transfer, BLOCKS_MAX);
    // The connection has as many commands as before, and waits for nothing.
    for cid in 100..228 {
        host.command(peer::write_r2t(cid, 1, 0, 1), &[]);
    }
    let transfers = host.r2ts();
    assert_eq!(transfers.len(), 128);
    for transfer in transfers {
        host.finish(transfer, 1);
    }
    host.w.host.now += 3_600_000_000_000;
    host.w.tick();
    assert_eq!(host.w.links[host.io].closed, None);
    // When the data of one has come, another can be aborted.
    host.send_data(aborted[2], BLOCKS_MAX);
    host.write(51);
    host.r2ts();
    host.abort_for_sure(51);
    host.check_nothing_is_held();
    // One command more than the queue has entries.
    for cid in 100..229 {
        host.command(peer::write_r2t(cid, 1, 0, 1), &[]);
    }
    assert!(host.w.links[host.io].closed.is_some());
}

/// T18: the data of an aborted command is checked as that of any other.
#[test]
fn t18_wrong_data_of_an_aborted_command_ends_the_connection() {
    for (offset, len) in [(4096, 4096), (0, 16384)] {
        let mut host = Host::new();
        host.command(peer::write_r2t(1, 1, 0, 2), &[]);
        let [(_, ttag)] = host.r2ts()[..] else { panic!("an R2T") };
        host.abort_for_sure(1);
        let data = vec![0; len];
        host.w.send(host.io, &peer::h2c_data(Digests::default(), 1, ttag, offset, &data, true));
        assert!(host.w.links[host.io].closed.is_some());
    }
}

#[test]
fn a_connection_with_an_aborted_transfer_ends_as_any_other() {
    let mut host = Host::new();
    host.write(1);
    host.r2ts();
    host.abort_for_sure(1);
    host.write(1);
    host.w.hang_up(host.io);
    assert!(host.w.links[host.io].conn.is_drained());
}

#[test]
fn an_operation_that_waits_for_the_drive_is_aborted() {
    let mut host = Host::new();
    let drive = &mut host.w.host.drives[0];
    (drive.holds, drive.is_full) = (true, true);
    host.command(peer::read(1, 1, 0, BLOCKS_MAX), &[]);
    host.command(peer::write(2, 1, 0, 1), &block(2));
    host.command(peer::write_r2t(3, 1, 8, 1), &[]);
    let [transfer] = host.r2ts()[..] else { panic!("an R2T") };
    host.send_data(transfer, 1);
    host.command(peer::write_zeroes(4, 1, 16, 1, true), &[]);
    assert_eq!(host.w.host.drives[0].pending.len(), 4);
    for cid in [3, 1, 4, 2] {
        host.abort_for_sure(cid);
        assert!(!host.abort(cid), "once");
    }
    assert!(host.w.host.drives[0].pending.is_empty());
    // What the drive has, and what is not one operation, runs to its end.
    host.w.host.drives[0].is_full = false;
    host.command(peer::write(5, 1, 0, 1), &block(5));
    assert!(!host.abort(5));
    host.w.host.drives[0].is_full = true;
    host.command(peer::flush(6, 1), &[]);
    assert!(!host.abort(6));
    host.w.complete_all(0);
    let done = host.w.completions(host.io);
    assert_eq!(
        done.iter().map(|done| (done.cid, done.status)).collect::<Vec<_>>(),
        [(5, 0), (6, 0)]
    );
    let drive = &mut host.w.host.drives[0];
    (drive.holds, drive.is_full) = (false, false);
    host.check_nothing_is_held();
}

/// T8: a fence waits for operations in flight. One that was taken back is not in flight any more.
#[test]
fn t8_an_aborted_operation_does_not_hold_up_a_fence() {
    let mut host = Host::new();
    // Only connections that have written are waited for.
    host.command(peer::write(1, 1, 0, 1), &block(1));
    host.w.completions(host.io);
    let drive = &mut host.w.host.drives[0];
    (drive.holds, drive.is_full) = (true, true);
    host.command(peer::write(2, 1, 0, 1), &block(2));
    host.command(peer::write(3, 1, 0, 1), &block(3));
    let (rival, _) = host.w.admin_as(RIVAL, RIVAL_ID, 0);
    let claim = host.w.first_claim();
    assert_eq!(host.w.claim(rival, &claim), None, "it waits");
    host.abort_for_sure(2);
    assert_eq!(host.w.next(rival), None, "for one more");
    host.abort_for_sure(3);
    assert_eq!(host.w.next(rival).expect("the claim's answer").completion().status, 0);
    assert_eq!(host.w.host.drives[0].block(0), block(1));
}

#[test]
fn a_write_with_a_place_in_an_order_is_not_aborted() {
    // In a stream: at the drive, at the gate, and while its data comes.
    let mut w = World::new(&[false]);
    let owner = w.owner();
    let mut host = Host { w, admin: owner.admin, io: owner.io };
    let drive = &mut host.w.host.drives[0];
    (drive.holds, drive.is_full) = (true, true);
    for seq in 1..=2 {
        host.command(ordered(seq as u16, &attribute(seq, 9), 0), &block(seq as u8));
    }
    host.command(ordered(3, &attribute(3, 20), 0).transport(4096), &[]);
    let [transfer] = host.r2ts()[..] else { panic!("an R2T") };
    for cid in 1..=3 {
        assert!(!host.abort(cid), "{cid}");
    }
    host.send_data(transfer, 1);
    host.w.complete_all(0);
    let done = host.w.completions(host.io);
    assert!(done.len() == 3 && done.iter().all(|done| done.status == 0), "{done:?}");
    // On a drive that keeps an order.
    let volumes = Volumes::without_log(crc);
    let order = DriveOrder::Barrier;
    let w = World::over_ordered(&[true], order, identity(), Parts::default(), volumes);
    let mut host = Host::over(w);
    let drive = &mut host.w.host.drives[0];
    (drive.holds, drive.is_full) = (true, true);
    let in_order = |sqe: Sqe| sqe.dword(2, 0xffff);
    host.command(in_order(peer::write(1, 1, 0, 1)), &block(1));
    host.command(in_order(peer::write_r2t(2, 1, 8, 1)), &[]);
    host.command(in_order(peer::write(3, 1, 16, 1)), &block(3));
    let [transfer] = host.r2ts()[..] else { panic!("an R2T") };
    for cid in 1..=3 {
        assert!(!host.abort(cid), "{cid}");
    }
    host.send_data(transfer, 1);
    host.w.complete_all(0);
    let done = host.w.completions(host.io);
    assert!(done.len() == 3 && done.iter().all(|done| done.status == 0), "{done:?}");
}

#[test]
fn p8_every_abort_is_answered() {
    let mut host = Host::new();
    // The command is there, and the queue of the command ends before it reads the notice.
    host.write(1);
    host.r2ts();
    host.w.hold_mail = true;
    host.send_abort(1);
    assert_eq!(host.w.next(host.admin), None, "the other queue has not answered");
    host.w.hold_mail = false;
    host.w.hang_up(host.io);
    let done = host.w.next(host.admin).expect("an answer").completion();
    assert_eq!((done.status, done.result), (0, 1), "not aborted");
    // A queue that does not exist, and a command that does not.
    assert!(!host.abort(1));
    assert!(host.w.links[host.admin].conn.is_quiet());
}

/// The connection ends while an operation is in flight, so it still reads notices.
#[test]
fn a_connection_that_ends_aborts_nothing() {
    let mut host = Host::new();
    host.w.host.drives[0].holds = true;
    host.command(peer::read(1, 1, 0, 1), &[]);
    host.w.hang_up(host.io);
    host.w.host.drives[0].is_full = true;
    assert!(!host.abort(1));
    host.w.complete_all(0);
    assert!(host.w.links[host.io].conn.is_drained());
}

#[test]
fn t28_aborts_in_flight_have_a_bound() {
    let mut host = Host::new();
    let (id, _) = host.w.fetch(host.admin, peer::identify(1, 1, 0));
    assert_eq!(usize::from(id[258]), ABORTS_MAX - 1, "ACL");
    host.w.hold_mail = true;
    for cid in 0..ABORTS_MAX as u16 {
        host.send_abort(cid);
    }
    assert_eq!(host.w.next(host.admin), None);
    host.send_abort(90);
    let done = host.w.next(host.admin).expect("an answer").completion();
    assert_eq!((done.cid, done.status), (990, ABORT_LIMIT));
    host.w.hold_mail = false;
    host.w.deliver();
    assert_eq!(host.w.completions(host.admin).len(), ABORTS_MAX);
    assert!(!host.abort(5), "and further ones");
}

/// On the admin queue a claim waits for its data.
#[test]
fn an_admin_command_that_waits_for_its_data_is_aborted() {
    let mut w = World::new(&[false]);
    let (admin, _) = w.admin();
    let claim = w.first_claim();
    let sqe = Sqe(wire::claim_command().0).byte(1, 0x40).cid(50).transport(4096);
    w.command(admin, sqe, &[]);
    let r2t = w.next(admin).unwrap();
    assert_eq!((r2t.kind, r2t.u16(8)), (0x09, 50));
    w.command(admin, Sqe::new(0x08, 60, 0).dword(10, 50 << 16), &[]);
    let done = w.completions(admin);
    let of = |i: usize| (done[i].cid, done[i].status, done[i].result);
    assert_eq!((of(0), of(1)), ((50, ABORT_REQUESTED, 0), (60, 0, 0)));
    let late = peer::h2c_data(Digests::default(), 50, r2t.u16(10), 0, &claim.encode(), true);
    w.send(admin, &late);
    assert_eq!(w.next(admin), None);
    assert!(w.host.shared.volumes().owner(claim.volume).is_none());
    assert_eq!(w.claim(admin, &claim).unwrap().status, 0);
}
