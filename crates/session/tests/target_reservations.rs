//! Reservations: how hosts register, acquire, preempt and release, and which commands are excluded.

mod world;

use riopipe_order::attribute::VolumeId;
use riopipe_session::wire;
use riopipe_testkit::peer::{self, Sqe};
use world::recovery::{RIVAL, RIVAL_ID};
use world::{VOLUME, World, attribute, block, flush_entry, ordered};

const CONFLICT: u16 = 0x83;
const INVALID_FIELD: u16 = 0x02;
/// The project's status: the volume of the namespace has an owner.
const GUARDED: u16 = wire::status::GUARDED.code();
/// The project's status: another owner has taken over the volume.
const STALE_GENERATION: u16 = wire::status::STALE_GENERATION.code();
/// The types.
const WRITE_EXCLUSIVE: u32 = 1;
const EXCLUSIVE_ACCESS: u32 = 2;
const WRITE_EXCLUSIVE_REGISTRANTS: u32 = 3;
const WRITE_EXCLUSIVE_ALL: u32 = 5;
const EXCLUSIVE_ACCESS_ALL: u32 = 6;
/// The actions of Acquire.
const ACQUIRE: u32 = 0;
const PREEMPT: u32 = 1;
const PREEMPT_AND_ABORT: u32 = 2;

/// Hosts with a queue each. The key of host `n` is `n`, beginning with 1.
struct Hosts {
    w: World,
    admins: Vec<usize>,
    ios: Vec<usize>,
}

fn name(number: usize) -> String {
    format!("nqn.2014-08.org.nvmexpress:uuid:host-{number}")
}

impl Hosts {
    fn new(count: usize) -> Self {
        let mut hosts = Self { w: World::new(&[false]), admins: vec![], ios: vec![] };
        for number in 1..=count {
            hosts.connect(number);
        }
        hosts
    }

    fn connect(&mut self, number: usize) -> usize {
        let id = [number as u8; 16];
        let (admin, cntlid) = self.w.admin_as(&name(number), id, 0);
        let io = self.w.io_as(&name(number), id, cntlid, 1);
        self.admins.push(admin);
        self.ios.push(io);
        io
    }

    fn call(&mut self, host: usize, (sqe, data): (Sqe, Vec<u8>)) -> u16 {
        self.w.call(self.ios[host - 1], sqe, &data).status
    }

    fn register(&mut self, host: usize) {
        assert_eq!(self.call(host, peer::register(1, 1, 0, 0, host as u64)), 0);
    }

    fn acquire(&mut self, host: usize, kind: u32) -> u16 {
        self.call(host, peer::acquire(1, 1, (ACQUIRE, kind), host as u64, 0))
    }

    fn preempt(&mut self, host: usize, kind: u32, key: u64) -> u16 {
        self.call(host, peer::acquire(1, 1, (PREEMPT, kind), host as u64, key))
    }

    fn release(&mut self, host: usize, kind: u32) -> u16 {
        self.call(host, peer::release(1, 1, (0, kind), host as u64))
    }

    /// Generation, type, and the registrants: key, and whether it is a holder.
    fn report(&mut self) -> (u32, u8, Vec<(u64, bool)>) {
        let bytes = self.w.fetch(self.ios[0], peer::report(1, 1, 4096)).0;
        let entries = bytes[64..].chunks(64).take(usize::from(bytes[5]));
        let entry = |entry: &[u8]| {
            assert_eq!(entry[..2], [0xff, 0xff], "the controllers are dynamic");
            let key = u64::from_le_bytes(entry[8..16].try_into().unwrap());
            assert_eq!(entry[16..32], [key as u8; 16], "the host identifier");
            (key, entry[2] == 1)
        };
        let generation = u32::from_le_bytes(bytes[..4].try_into().unwrap());
        (generation, bytes[4], entries.map(entry).collect())
    }

    /// Whether a host may read, and whether it may write, by all commands of each kind.
    fn access(&mut self, host: usize) -> (bool, bool) {
        let io = self.ios[host - 1];
        let w = &mut self.w;
        let zeroes = [0; 4096];
        w.command(io, peer::read(1, 1, 0, 1), &[]);
        let answer = w.next(io).unwrap();
        let may_read = answer.kind == 0x07;
        let read = if may_read { w.next(io).unwrap() } else { answer }.completion().status;
        let reads = [
            read,
            w.call(io, peer::compare(1, 1, 0, 1), &zeroes).status,
            w.call(io, peer::verify(1, 1, 0, 1), &[]).status,
        ];
        let (copy, list) = peer::copy(1, 1, 8, &[(0, 1)]);
        let deallocate = Sqe::new(0x09, 1, 1).inline(16).dword(11, 4);
        let range = [0, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0];
        let mut writes = vec![
            w.call(io, peer::write(1, 1, 0, 1), &zeroes).status,
            w.call(io, peer::write_zeroes(1, 1, 0, 1, false), &[]).status,
            w.call(io, deallocate, &range).status,
            // A hint about use.
            w.call(io, deallocate.dword(11, 1), &range).status,
            w.call(io, peer::flush(1, 1), &[]).status,
            w.call(io, copy, &list).status,
        ];
        w.command(io, peer::compare(1, 1, 0, 1).first_half(), &zeroes);
        w.command(io, peer::write(2, 1, 0, 1).second_half(), &zeroes);
        let halves = w.completions(io);
        writes.push(halves[0].status);
        assert_eq!(halves[1].status, if halves[0].status == 0 { 0 } else { 0x09 });
        for statuses in [&reads[..], &writes] {
            let first = statuses[0];
            assert!(first == 0 || first == CONFLICT, "{first:#x}");
            assert!(statuses.iter().all(|status| *status == first), "{statuses:x?}");
        }
        (reads[0] == 0, writes[0] == 0)
    }
}

#[test]
fn each_type_excludes_the_commands_of_others() {
    // By type: may a registrant, and may another host, read and write?
    let full = (true, true);
    let expected = [
        (1, (true, false), (true, false)),
        (2, (false, false), (false, false)),
        (3, full, (true, false)),
        (4, full, (false, false)),
        (5, full, (true, false)),
        (6, full, (false, false)),
    ];
    for (kind, registrant, other) in expected {
        let mut hosts = Hosts::new(3);
        hosts.register(1);
        hosts.register(2);
        for host in 1..=3 {
            assert_eq!(hosts.access(host), full, "registrations exclude no one");
        }
        assert_eq!(hosts.acquire(1, kind), 0);
        assert_eq!(hosts.access(1), full, "type {kind}");
        assert_eq!(hosts.access(2), registrant, "type {kind}");
        assert_eq!(hosts.access(3), other, "type {kind}");
        // Another association of each host has the same access, and a later one, too.
        for host in 1..=3 {
            let before = hosts.access(host);
            hosts.ios[host - 1] = hosts.connect(host);
            assert_eq!(hosts.access(host), before, "type {kind}, host {host}");
        }
        assert_eq!(hosts.report().1, kind as u8);
        assert_eq!(hosts.release(1, kind), 0);
        for host in 1..=3 {
            assert_eq!(hosts.access(host), full);
        }
    }
}

#[test]
fn a_host_registers_replaces_its_key_and_unregisters() {
    let mut hosts = Hosts::new(2);
    let register = |action, current, new| peer::register(1, 1, action, current, new);
    assert_eq!(hosts.report(), (0, 0, vec![]));
    assert_eq!(hosts.call(1, register(0, 0, 0)), INVALID_FIELD, "a key of 0");
    assert_eq!(hosts.call(1, register(1, 0, 0)), CONFLICT, "it is not registered");
    assert_eq!(hosts.call(1, register(2, 0, 1)), CONFLICT);
    assert_eq!(hosts.acquire(1, WRITE_EXCLUSIVE), CONFLICT);
    assert_eq!(hosts.release(1, WRITE_EXCLUSIVE), CONFLICT);
    hosts.register(1);
    hosts.register(1);
    assert_eq!(hosts.call(1, register(0, 0, 9)), CONFLICT, "it has another key");
    assert_eq!(hosts.call(1, register(2, 9, 1)), CONFLICT, "the current key is another one");
    assert_eq!(hosts.call(1, register(2, 1, 0)), INVALID_FIELD);
    assert_eq!(hosts.report().2, [(1, false)]);
    let any_key = 1 << 3;
    assert_eq!(hosts.call(1, register(2, 1, 0x0101)), 0);
    assert_eq!(hosts.call(1, register(2 | any_key, 9, 1)), 0);
    assert_eq!(hosts.call(1, register(1, 9, 0)), CONFLICT);
    assert_eq!(hosts.call(1, register(1 | any_key, 9, 0)), 0);
    assert_eq!(hosts.call(1, register(2 | any_key, 9, 1)), 0, "it registers by that");
    assert_eq!(hosts.report(), (6, 0, vec![(1, false)]));
    // By R2T.
    let (sqe, keys) = register(0, 0, 2);
    hosts.w.command(hosts.ios[1], sqe.transport(16), &[]);
    hosts.w.send_requested(hosts.ios[1], 1, &keys);
    assert_eq!(hosts.w.completions(hosts.ios[1])[0].status, 0);
    assert_eq!(hosts.report().2, [(1, false), (2, false)]);
    // Fields that make no sense.
    let (sqe, keys) = register(0, 0, 2);
    for dword in [3, 7, 1 << 30, 3 << 30] {
        assert_eq!(hosts.w.call(hosts.ios[1], sqe.dword(10, dword), &keys).status, INVALID_FIELD);
    }
    let (acquire, keys) = peer::acquire(1, 1, (0, 1), 2, 0);
    for dword in [0, 7 << 8, 3 | 1 << 8, 1 << 3 | 1 << 8] {
        let done = hosts.w.call(hosts.ios[1], acquire.dword(10, dword), &keys);
        assert_eq!(done.status, INVALID_FIELD, "{dword:#x}");
    }
    let (release, key) = peer::release(1, 1, (0, 1), 2);
    for dword in [0, 2, 1 << 3 | 1 << 8] {
        let done = hosts.w.call(hosts.ios[1], release.dword(10, dword), &key);
        assert_eq!(done.status, INVALID_FIELD, "{dword:#x}");
    }
    assert_eq!(hosts.w.call(hosts.ios[1], acquire.dword(1, 9), &keys).status, 0x0b);
    assert_eq!(hosts.w.call(hosts.ios[1], acquire.inline(8), &keys[..8]).status, 0x0f);
}

#[test]
fn a_reservation_has_one_holder_or_all_registrants_hold_it() {
    let mut hosts = Hosts::new(3);
    for host in 1..=3 {
        hosts.register(host);
    }
    assert_eq!(hosts.acquire(1, WRITE_EXCLUSIVE), 0);
    assert_eq!(hosts.acquire(1, WRITE_EXCLUSIVE), 0, "it has it already");
    assert_eq!(hosts.acquire(1, EXCLUSIVE_ACCESS), CONFLICT, "of another type");
    assert_eq!(hosts.acquire(2, WRITE_EXCLUSIVE), CONFLICT);
    assert_eq!(hosts.release(2, WRITE_EXCLUSIVE), 0, "it holds nothing");
    assert_eq!(hosts.release(1, EXCLUSIVE_ACCESS), CONFLICT);
    assert_eq!(hosts.report(), (3, 1, vec![(1, true), (2, false), (3, false)]));
    // The holder unregisters: the reservation ends.
    assert_eq!(hosts.call(1, peer::register(1, 1, 1, 1, 0)), 0);
    assert_eq!(hosts.report(), (4, 0, vec![(2, false), (3, false)]));
    // All registrants are holders.
    assert_eq!(hosts.acquire(2, WRITE_EXCLUSIVE_ALL), 0);
    assert_eq!(hosts.acquire(3, WRITE_EXCLUSIVE_ALL), 0);
    assert_eq!(hosts.report().2, [(2, true), (3, true)]);
    assert_eq!(hosts.call(2, peer::register(1, 1, 1, 2, 0)), 0);
    assert_eq!(hosts.report().2, [(3, true)], "one is left");
    assert_eq!(hosts.call(3, peer::register(1, 1, 1, 3, 0)), 0);
    assert_eq!(hosts.report().1, 0, "none is left");
    // Clear.
    hosts.register(1);
    hosts.register(2);
    assert_eq!(hosts.acquire(1, WRITE_EXCLUSIVE_REGISTRANTS), 0);
    assert_eq!(hosts.call(3, peer::release(1, 1, (1, 0), 3)), CONFLICT, "not registered");
    assert_eq!(hosts.call(2, peer::release(1, 1, (1, 0), 2)), 0);
    assert_eq!((hosts.report().1, hosts.report().2), (0, vec![]));
}

#[test]
fn preempting() {
    let new = || {
        let mut hosts = Hosts::new(3);
        for host in 1..=3 {
            hosts.register(host);
        }
        hosts
    };
    // Without a reservation, registrations end.
    let mut hosts = new();
    assert_eq!(hosts.preempt(1, WRITE_EXCLUSIVE, 9), CONFLICT, "no such key");
    assert_eq!(hosts.preempt(1, WRITE_EXCLUSIVE, 3), 0);
    assert_eq!(hosts.report(), (4, 0, vec![(1, false), (2, false)]));
    // The holder's key: the reservation passes over. Another key: only the registration ends.
    let mut hosts = new();
    assert_eq!(hosts.acquire(1, WRITE_EXCLUSIVE), 0);
    assert_eq!(hosts.preempt(2, EXCLUSIVE_ACCESS, 0), INVALID_FIELD);
    assert_eq!(hosts.preempt(2, EXCLUSIVE_ACCESS, 3), 0);
    assert_eq!(hosts.report().2, [(1, true), (2, false)]);
    assert_eq!(hosts.preempt(2, EXCLUSIVE_ACCESS, 1), 0);
    assert_eq!(hosts.report(), (5, 2, vec![(2, true)]));
    assert_eq!(hosts.access(1), (false, false));
    // Its own key: the type changes.
    assert_eq!(hosts.preempt(2, WRITE_EXCLUSIVE, 2), 0);
    assert_eq!(hosts.report(), (6, 1, vec![(2, true)]));
    // The holder preempts a registrant, and stays the holder.
    let mut hosts = new();
    assert_eq!(hosts.acquire(1, WRITE_EXCLUSIVE), 0);
    assert_eq!(hosts.preempt(1, WRITE_EXCLUSIVE, 2), 0);
    assert_eq!(hosts.report(), (4, 1, vec![(1, true), (3, false)]));
    // All registrants are holders: key 0 means all others.
    let mut hosts = new();
    assert_eq!(hosts.acquire(1, EXCLUSIVE_ACCESS_ALL), 0);
    assert_eq!(hosts.preempt(2, EXCLUSIVE_ACCESS_ALL, 3), 0);
    assert_eq!(hosts.report(), (4, 6, vec![(1, true), (2, true)]));
    assert_eq!(hosts.preempt(2, EXCLUSIVE_ACCESS_ALL, 3), CONFLICT);
    assert_eq!(hosts.preempt(2, WRITE_EXCLUSIVE, 0), 0);
    assert_eq!(hosts.report(), (5, 1, vec![(2, true)]));
    assert_eq!(hosts.preempt(3, WRITE_EXCLUSIVE, 2), CONFLICT, "it is not registered any more");
    // The host that has made the reservation is one of the holders, and stays.
    let mut hosts = new();
    assert_eq!(hosts.acquire(1, EXCLUSIVE_ACCESS_ALL), 0);
    assert_eq!(hosts.preempt(1, EXCLUSIVE_ACCESS_ALL, 0), 0);
    assert_eq!(hosts.report(), (4, 6, vec![(1, true)]));
    assert_eq!((hosts.access(1), hosts.access(2)), ((true, true), (false, false)));
}

/// A host that has preempted another one may rely on what it reads.
#[test]
fn t8_no_write_of_a_preempted_host_lands_later() {
    let mut hosts = Hosts::new(2);
    hosts.register(1);
    hosts.register(2);
    assert_eq!(hosts.acquire(1, WRITE_EXCLUSIVE), 0);
    let (old, new) = (hosts.ios[0], hosts.ios[1]);
    let w = &mut hosts.w;
    // One write waits for its data, and one is at the drive.
    w.command(old, peer::write_r2t(10, 1, 1, 1), &[]);
    w.host.drives[0].holds = true;
    w.command(old, peer::write(11, 1, 2, 1), &block(1));
    w.command(old, peer::read(12, 1, 3, 1), &[]);
    let (sqe, keys) = peer::acquire(1, 1, (PREEMPT_AND_ABORT, EXCLUSIVE_ACCESS), 2, 1);
    w.command(new, sqe, &keys);
    assert!(w.next(new).is_none(), "it waits for the write at the drive");
    // The change is made already, so new writes are refused, and an Abort comes too late.
    assert_eq!(w.host.drives[0].pending.len(), 2);
    let abort = Sqe::new(0x08, 9, 0).dword(10, 1 << 16 | 1);
    assert_eq!(w.call(hosts.admins[1], abort, &[]).result, 1);
    w.complete(0, 0);
    let done = w.completions(new);
    assert_eq!((done.len(), done[0].status), (1, 0), "the read changes no block");
    w.complete(0, 0);
    w.send_requested(old, 10, &block(3));
    let statuses: Vec<_> = w.completions(old).iter().map(|done| (done.cid, done.status)).collect();
    assert_eq!(statuses, [(11, 0), (12, CONFLICT), (10, CONFLICT)]);
    assert_eq!(w.host.drives[0].block(1), vec![0; 4096], "not written");
    assert_eq!(w.host.drives[0].block(2), block(1));
    assert!(w.links[new].conn.is_quiet() && w.links[old].conn.is_quiet());
    // The end of a connection does not leave the command of another one waiting (promise P8).
    let mut hosts = Hosts::new(2);
    hosts.register(2);
    let (old, new) = (hosts.ios[0], hosts.ios[1]);
    hosts.w.host.drives[0].holds = true;
    hosts.w.command(old, peer::write(11, 1, 2, 1), &block(1));
    let (sqe, keys) = peer::acquire(1, 1, (ACQUIRE, WRITE_EXCLUSIVE), 2, 0);
    hosts.w.command(new, sqe, &keys);
    hosts.w.hang_up(old);
    assert!(hosts.w.next(new).is_none());
    hosts.w.complete(0, 0);
    assert_eq!(hosts.w.completions(new)[0].status, 0);
}

/// An operation that changes no block may wait for other hosts, and must not keep a Preempt waiting.
#[test]
fn an_acquire_waits_only_for_what_may_change_the_namespace() {
    let mut w = World::new(&[true, false]);
    let [old, new] = [1, 2].map(|number| {
        let (_, cntlid) = w.admin_as(&name(number), [number as u8; 16], 0);
        w.io_as(&name(number), [number as u8; 16], cntlid, 1)
    });
    for nsid in [1, 2] {
        assert_eq!(w.call(old, peer::write(1, nsid, 0, 1), &block(1)).status, 0);
    }
    let (sqe, keys) = peer::register(1, 1, 0, 0, 2);
    assert_eq!(w.call(new, sqe, &keys).status, 0);
    w.host.drives[0].holds = true;
    w.host.drives[1].holds = true;
    // The FLUSH of a write with FUA, and commands that change nothing.
    w.command(old, peer::write(10, 1, 1, 1).byte(51, 0x40), &block(2));
    w.complete(0, 0);
    w.command(old, peer::flush(11, 1), &[]);
    w.command(old, peer::read(12, 1, 0, 1), &[]);
    w.command(old, peer::compare(13, 1, 0, 1), &block(1));
    w.command(old, peer::verify(14, 1, 0, 1), &[]);
    let (copy, list) = peer::copy(15, 1, 100, &[(0, 1)]);
    w.command(old, copy, &list);
    // Another namespace.
    w.command(old, peer::write(16, 2, 1, 1), &block(2));
    assert_eq!((w.host.drives[0].pending.len(), w.host.drives[1].pending.len()), (6, 1));
    let acquire = |action| peer::acquire(1, 1, (action, WRITE_EXCLUSIVE), 2, 0);
    let (sqe, keys) = acquire(ACQUIRE);
    w.command(new, sqe, &keys);
    let statuses: Vec<_> = w.completions(new).iter().map(|done| done.status).collect();
    assert_eq!(statuses, [0]);
    w.complete_all(0);
    w.complete_all(1);
    let mut statuses = Vec::new();
    while let Some(answer) = w.next(old) {
        // Beside the data of the Read.
        if answer.kind == 0x05 {
            statuses.push((answer.completion().cid, answer.completion().status));
        }
    }
    statuses.sort_unstable();
    let expected = [(10, 0), (11, 0), (12, 0), (13, 0), (14, 0), (15, CONFLICT), (16, 0)];
    assert_eq!(statuses, expected, "the Copy does not write what it has read");
}

/// A host that finds a reservation made may rely on it.
#[test]
fn t8_every_command_about_reservations_waits_for_the_same_writes() {
    let mut hosts = Hosts::new(3);
    hosts.register(2);
    hosts.register(3);
    let (old, new, third) = (hosts.ios[0], hosts.ios[1], hosts.ios[2]);
    let w = &mut hosts.w;
    w.host.drives[0].holds = true;
    w.command(old, peer::write(11, 1, 2, 1), &block(1));
    let (sqe, keys) = peer::acquire(1, 1, (ACQUIRE, WRITE_EXCLUSIVE), 2, 0);
    w.command(new, sqe, &keys);
    let (acquire, keys) = peer::acquire(2, 1, (ACQUIRE, WRITE_EXCLUSIVE), 3, 0);
    w.command(third, acquire, &keys);
    let (register, keys) = peer::register(3, 1, 0, 0, 3);
    w.command(third, register, &keys);
    w.command(third, peer::report(4, 1, 128), &[]);
    w.command(third, peer::report(5, 1, 128), &[]);
    assert!(w.next(new).is_none() && w.next(third).is_none(), "the write can still land");
    // A Report changes nothing, so it can be aborted.
    let abort = Sqe::new(0x08, 9, 0).dword(10, 5 << 16 | 1);
    assert_eq!(w.call(hosts.admins[2], abort, &[]).result, 0);
    w.complete(0, 0);
    assert_eq!(w.completions(new)[0].status, 0);
    let mut data = Vec::new();
    let mut statuses = Vec::new();
    while let Some(answer) = w.next(third) {
        match answer.kind {
            0x07 => data = answer.data,
            _ => statuses.push((answer.completion().cid, answer.completion().status)),
        }
    }
    statuses.sort_unstable();
    assert_eq!(statuses, [(2, CONFLICT), (3, 0), (4, 0), (5, 0x07)]);
    assert_eq!(data[4], WRITE_EXCLUSIVE as u8);
    // Nothing waits any more.
    assert_eq!(w.fetch(third, peer::report(6, 1, 128)).1.status, 0);
    assert!(w.links[third].conn.is_quiet() && w.links[new].conn.is_quiet());
}

/// Host 2 holds a reservation that registrants share. It was made before the volume had an owner.
struct Shared {
    w: World,
    owner: world::Owner,
    /// Another queue of the owner.
    second: usize,
    /// The queue of the holder.
    holder: usize,
}

impl Shared {
    fn new(volatile: bool) -> Self {
        let mut w = World::new(&[volatile]);
        let (_, cntlid) = w.admin_as(&name(2), [2; 16], 0);
        let holder = w.io_as(&name(2), [2; 16], cntlid, 1);
        let acquire = peer::acquire(1, 1, (ACQUIRE, WRITE_EXCLUSIVE_REGISTRANTS), 2, 0);
        for (sqe, keys) in [peer::register(1, 1, 0, 0, 2), acquire] {
            assert_eq!(w.call(holder, sqe, &keys).status, 0);
        }
        let owner = w.owner();
        let second = w.io(owner.cntlid, 2);
        Self { w, owner, second, holder }
    }
}

/// The owner of a volume needs the access, too: its ordered requests and those that wait.
#[test]
fn a_reservation_stands_against_ordered_writes() {
    let Shared { mut w, owner, second, holder } = Shared::new(false);
    let (sqe, keys) = peer::register(1, 1, 0, 0, 1);
    assert_eq!(w.call(second, sqe, &keys).status, 0);
    assert_eq!(w.call(owner.io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    // The second write of a block waits for the first one (T12).
    w.host.drives[0].holds = true;
    for (cid, seq) in [(2, 2), (3, 3)] {
        let sqe = ordered(
            cid,
            &riopipe_order::attribute::Attribute { lba: 7, ..attribute(seq, u64::from(cid)) },
            0,
        );
        w.command(owner.io, sqe, &block(cid as u8));
    }
    assert_eq!(w.host.drives[0].pending.len(), 1);
    // The owner ends its registration, and with it its access.
    let (sqe, keys) = peer::register(1, 1, 1, 1, 0);
    w.command(second, sqe, &keys);
    assert!(w.next(second).is_none(), "it waits for the first write");
    w.complete(0, 0);
    assert_eq!(w.completions(second)[0].status, 0);
    assert!(w.host.drives[0].pending.is_empty(), "the second is not written");
    let statuses: Vec<_> =
        w.completions(owner.io).iter().map(|done| (done.cid, done.status)).collect();
    assert_eq!(statuses, [(2, 0), (3, CONFLICT)]);
    // The stream has stopped (P6), and a new request is refused.
    let poisoned = wire::status::POISONED.code();
    assert_eq!(w.call(owner.io, ordered(4, &attribute(4, 4), 0), &block(4)).status, poisoned);
    // Neither may the holder of the reservation write the volume: it needs both.
    assert_eq!(w.call(holder, peer::write(5, 1, 0, 1), &block(5)).status, GUARDED);
    // An ordered request that comes after the reservation stops its stream.
    let Shared { mut w, owner, .. } = Shared::new(false);
    assert_eq!(w.call(owner.io, ordered(1, &attribute(1, 1), 0), &block(1)).status, CONFLICT);
    assert_eq!(w.call(owner.io, ordered(2, &attribute(2, 2), 0), &block(1)).status, poisoned);
    assert!(w.host.drives[0].history.is_empty());
}

/// It writes nothing, but it is a FLUSH of the drive.
#[test]
fn a_reservation_stands_against_ordered_flushes() {
    let Shared { mut w, owner, .. } = Shared::new(true);
    assert_eq!(w.call(owner.io, ordered(1, &flush_entry(1, 0), 0), &[]).status, CONFLICT);
    assert!(w.host.drives[0].history.is_empty());
    assert!(w.scan(0, 0).entries.is_empty(), "it is not in the log");
}

/// A plain host must not be able to stop a volume.
#[test]
fn t21_a_namespace_of_an_owner_is_not_reserved_by_others() {
    let mut w = World::new(&[false]);
    let owner = w.owner();
    let (_, cntlid) = w.admin_as(&name(2), [2; 16], 0);
    let other = w.io_as(&name(2), [2; 16], cntlid, 1);
    let second = w.io(owner.cntlid, 2);
    for (io, key) in [(second, 1), (other, 2)] {
        let (sqe, keys) = peer::register(1, 1, 0, 0, key);
        assert_eq!(w.call(io, sqe, &keys).status, 0, "it takes no access");
    }
    for action in [ACQUIRE, PREEMPT, PREEMPT_AND_ABORT] {
        let (sqe, keys) = peer::acquire(1, 1, (action, WRITE_EXCLUSIVE), 2, 1);
        assert_eq!(w.call(other, sqe, &keys).status, GUARDED, "action {action}");
    }
    assert_eq!(w.call(owner.io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    // The owner itself may exclude others, and preempt them.
    for (action, key) in [(ACQUIRE, 0), (PREEMPT, 2)] {
        let (sqe, keys) = peer::acquire(1, 1, (action, EXCLUSIVE_ACCESS), 1, key);
        assert_eq!(w.call(second, sqe, &keys).status, 0);
    }
    assert_eq!(w.call(other, peer::read(2, 1, 0, 1), &[]).status, CONFLICT);
    // The owner is gone, and its lease runs out (T25).
    let mut w = World::new(&[false]);
    w.lease_ms = 1000;
    let owner = w.owner();
    let (_, cntlid) = w.admin_as(&name(2), [2; 16], 0);
    let other = w.io_as(&name(2), [2; 16], cntlid, 1);
    let (sqe, register) = peer::register(1, 1, 0, 0, 2);
    assert_eq!(w.call(other, sqe, &register).status, 0);
    w.hang_up(owner.admin);
    let (acquire, keys) = peer::acquire(1, 1, (ACQUIRE, WRITE_EXCLUSIVE), 2, 0);
    assert_eq!(w.call(other, acquire, &keys).status, GUARDED);
    w.host.now += 1_000_000_001;
    assert_eq!(w.call(other, acquire, &keys).status, 0);
}

/// The owner of two volumes that has lost one of them still needs the access to read the other.
#[test]
fn a_fenced_owner_needs_the_access_to_read_its_other_volume() {
    let mut w = World::new(&[false, false]);
    let (_, cntlid) = w.admin_as(&name(2), [2; 16], 0);
    let holder = w.io_as(&name(2), [2; 16], cntlid, 1);
    let (admin, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    let claim = |w: &World, volume, nsid| wire::Claim {
        volume,
        members: wire::in_order([nsid]),
        ..w.first_claim()
    };
    let (sqe, keys) = peer::register(1, 2, 0, 0, 2);
    assert_eq!(w.call(holder, sqe, &keys).status, 0);
    let (sqe, keys) = peer::acquire(1, 2, (ACQUIRE, EXCLUSIVE_ACCESS), 2, 0);
    assert_eq!(w.call(holder, sqe, &keys).status, 0);
    let first = claim(&w, VOLUME, 1);
    let second = claim(&w, VolumeId([8; 16]), 2);
    for claim in [&first, &second] {
        assert_eq!(w.claim(admin, claim).unwrap().status, 0);
    }
    let (rival, _) = w.admin_as(RIVAL, RIVAL_ID, 0);
    let taken = wire::Claim { generation: 2, create: false, take_over: true, ..first };
    assert_eq!(w.claim(rival, &taken).unwrap().status, 0);
    assert_eq!(w.call(io, peer::verify(1, 1, 0, 1), &[]).status, STALE_GENERATION);
    assert_eq!(w.call(io, peer::verify(2, 2, 0, 1), &[]).status, CONFLICT);
    let (sqe, keys) = peer::release(1, 2, (0, EXCLUSIVE_ACCESS), 2);
    assert_eq!(w.call(holder, sqe, &keys).status, 0);
    assert_eq!(w.call(io, peer::verify(3, 2, 0, 1), &[]).status, 0, "it owns this volume");
}

#[test]
fn report_has_the_extended_structure_alone() {
    let mut hosts = Hosts::new(2);
    hosts.register(1);
    hosts.register(2);
    let io = hosts.ios[0];
    let report = peer::report(1, 1, 128);
    assert_eq!(hosts.w.call(io, report.dword(11, 0), &[]).status, 0x18, "EDS is clear");
    assert_eq!(hosts.w.call(io, report.dword(10, u32::MAX), &[]).status, INVALID_FIELD);
    assert_eq!(hosts.w.call(io, report.dword(1, 9), &[]).status, 0x0b);
    let bytes = hosts.w.fetch(io, report).0;
    assert_eq!((bytes.len(), bytes[5]), (128, 2), "one fits, and all are counted");
    assert_eq!(bytes[9], 0, "PTPLS: lost when the power is");
    // A part of the header is enough for a host that wants to know the number.
    let head = hosts.w.fetch(io, peer::report(2, 1, 8)).0;
    assert_eq!(head, bytes[..8]);
}

/// Reservations end with the process of the target, so they are not to persist.
#[test]
fn reservations_do_not_persist_through_power_loss() {
    let mut hosts = Hosts::new(1);
    let admin = hosts.admins[0];
    let set = |value: u32| Sqe::new(0x09, 1, 1).dword(10, 0x83).dword(11, value);
    let get = Sqe::new(0x0a, 1, 1).dword(10, 0x83);
    assert_eq!(hosts.w.call(admin, set(1), &[]).status, INVALID_FIELD);
    assert_eq!(hosts.w.call(admin, set(0), &[]).status, 0);
    assert_eq!(hosts.w.call(admin, set(0).dword(1, u32::MAX), &[]).status, 0);
    assert_eq!(hosts.w.call(admin, set(0).dword(1, 9), &[]).status, 0x0b);
    let got = hosts.w.call(admin, get, &[]);
    assert_eq!((got.status, got.result), (0, 0));
    let (sqe, keys) = peer::register(1, 1, 3 << 30, 0, 1);
    assert_eq!(hosts.w.call(hosts.ios[0], sqe, &keys).status, INVALID_FIELD, "CPTPL 11b");
    let (sqe, keys) = peer::register(1, 1, 2 << 30, 0, 1);
    assert_eq!(hosts.w.call(hosts.ios[0], sqe, &keys).status, 0, "CPTPL 10b: not to persist");
    let (namespace, _) = hosts.w.fetch(admin, peer::identify(1, 0, 1));
    assert_eq!(namespace[31], 0xfe, "RESCAP: all types, and nothing persists");
    let (common, _) = hosts.w.fetch(admin, peer::identify(1, 8, 1));
    assert_eq!(common[2], 0xfe);
    let (controller, _) = hosts.w.fetch(admin, peer::identify(1, 1, 0));
    assert_eq!(controller[520] & 1 << 5, 1 << 5, "ONCS");
    let (effects, _) = hosts.w.fetch(admin, peer::get_log(2, 5, 0, 4096));
    for opcode in [0x0d, 0x0e, 0x11, 0x15] {
        assert_eq!(effects[1024 + 4 * opcode..][..4], [1, 0, 0, 0], "{opcode:#x}");
    }
}

#[test]
fn a_host_without_an_identifier_has_no_reservations() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin_as(&name(1), [0; 16], 0);
    let io = w.io_as(&name(1), [0; 16], cntlid, 1);
    let (sqe, keys) = peer::register(1, 1, 0, 0, 1);
    assert_eq!(w.call(io, sqe, &keys).status, 0x0c);
}

/// The event comes by itself: the host does nothing meanwhile.
#[test]
fn an_event_request_that_waits_ends_with_the_change() {
    let mut hosts = Hosts::new(2);
    hosts.register(1);
    hosts.register(2);
    let admin = hosts.admins[1];
    hosts.w.command(admin, Sqe::new(0x0c, 50, 0), &[]);
    assert_eq!(hosts.acquire(1, WRITE_EXCLUSIVE_REGISTRANTS), 0);
    assert!(hosts.w.next(admin).is_none(), "that is no change for the other one");
    assert_eq!(hosts.release(1, WRITE_EXCLUSIVE_REGISTRANTS), 0);
    let event = hosts.w.next(admin).expect("an event").completion();
    assert_eq!((event.cid, event.result), (50, 0x0080_0006));
}

#[test]
fn registrants_are_informed_of_changes_by_others() {
    const AVAILABLE: u64 = 0x0080_0006;
    let mut hosts = Hosts::new(3);
    for host in 1..=3 {
        hosts.register(host);
    }
    // The notifications of a host: number, type, number of others, namespace.
    let informed = |hosts: &mut Hosts, host: usize| {
        let admin = hosts.admins[host - 1];
        hosts.w.command(admin, Sqe::new(0x0c, 50, 0), &[]);
        let event = hosts.w.completions(admin).first().map(|done| done.result);
        if event.is_none() {
            let abort = Sqe::new(0x08, 51, 0).dword(10, 50 << 16);
            hosts.w.command(admin, abort, &[]);
            hosts.w.completions(admin);
        }
        let mut notifications = Vec::new();
        loop {
            let (page, _) = hosts.w.fetch(admin, peer::get_log(5, 0x80, 0, 64));
            if page[8] == 0 {
                break;
            }
            assert_eq!(page[12..16], [1, 0, 0, 0], "the namespace");
            notifications.push((page[0], page[8], page[9]));
        }
        assert_eq!(event, (!notifications.is_empty()).then_some(AVAILABLE));
        notifications
    };
    // A reservation that registrants share ends.
    assert_eq!(hosts.acquire(1, WRITE_EXCLUSIVE_REGISTRANTS), 0);
    assert_eq!(hosts.release(1, WRITE_EXCLUSIVE_REGISTRANTS), 0);
    assert_eq!(informed(&mut hosts, 1), []);
    assert_eq!(informed(&mut hosts, 2), [(1, 2, 0)]);
    assert_eq!(informed(&mut hosts, 3), [(1, 2, 0)]);
    assert_eq!(informed(&mut hosts, 3), [], "it is read");
    // One that they do not share.
    assert_eq!(hosts.acquire(1, WRITE_EXCLUSIVE), 0);
    assert_eq!(hosts.release(1, WRITE_EXCLUSIVE), 0);
    assert_eq!(informed(&mut hosts, 2), []);
    // Host 2 preempts 1, and masks nothing; 3 masks preempted registrations.
    let mask = |value: u32| Sqe::new(0x09, 9, 1).dword(10, 0x82).dword(11, value);
    let admin = hosts.admins[2];
    assert_eq!(hosts.w.call(admin, mask(1), &[]).status, INVALID_FIELD);
    assert_eq!(hosts.w.call(admin, mask(2), &[]).status, 0);
    let get = Sqe::new(0x0a, 9, 1).dword(10, 0x82);
    assert_eq!(hosts.w.call(admin, get, &[]).result, 2);
    assert_eq!(hosts.preempt(2, WRITE_EXCLUSIVE, 1), 0);
    assert_eq!(hosts.preempt(2, WRITE_EXCLUSIVE, 3), 0);
    assert_eq!(informed(&mut hosts, 1), [(1, 1, 0)]);
    assert_eq!(informed(&mut hosts, 3), []);
    // All is cleared. Several notifications wait.
    hosts.register(1);
    hosts.register(3);
    assert_eq!(hosts.acquire(2, WRITE_EXCLUSIVE_ALL), 0);
    assert_eq!(hosts.preempt(2, EXCLUSIVE_ACCESS, 0), 0);
    hosts.register(1);
    assert_eq!(hosts.call(2, peer::release(1, 1, (1, 0), 2)), 0);
    assert_eq!(informed(&mut hosts, 1), [(2, 1, 1), (3, 3, 0)]);
    // More than are kept: the numbers show that some are missing.
    hosts.register(1);
    hosts.register(2);
    for _ in 0..70 {
        assert_eq!(hosts.acquire(1, WRITE_EXCLUSIVE_ALL), 0);
        assert_eq!(hosts.release(1, WRITE_EXCLUSIVE_ALL), 0);
    }
    let kept = informed(&mut hosts, 2);
    assert_eq!((kept.len(), kept[0].1, kept[0].2), (64, 2, 63));
    assert_eq!(kept[63].0 - kept[0].0, 63);
}

/// A host that has lost its connection repeats its Acquire on another one.
#[test]
fn t8_a_repeated_acquire_waits_for_the_same_writes() {
    let mut hosts = Hosts::new(2);
    hosts.register(2);
    let (old, new) = (hosts.ios[0], hosts.ios[1]);
    hosts.w.host.drives[0].holds = true;
    hosts.w.command(old, peer::write(11, 1, 2, 1), &block(1));
    let (sqe, keys) = peer::acquire(1, 1, (ACQUIRE, WRITE_EXCLUSIVE), 2, 0);
    hosts.w.command(new, sqe, &keys);
    assert!(hosts.w.next(new).is_none(), "it waits for the write at the drive");
    hosts.w.hang_up(new);
    let again = hosts.connect(2);
    hosts.w.command(again, sqe, &keys);
    assert_eq!(hosts.w.host.drives[0].pending.len(), 1);
    assert!(hosts.w.next(again).is_none(), "the write can still land");
    hosts.w.complete(0, 0);
    assert_eq!(hosts.w.completions(again)[0].status, 0);
}

/// The first write of a connection notes it as a writer. An Acquire on another core may come between
/// the check of the access and the note.
#[test]
fn t8_the_first_write_of_a_connection_does_not_land_after_an_acquire() {
    let mut hosts = Hosts::new(2);
    hosts.register(2);
    let new = hosts.ios[1];
    let (sqe, keys) = peer::acquire(1, 1, (ACQUIRE, WRITE_EXCLUSIVE), 2, 0);
    let capsule = peer::capsule(hosts.w.links[new].digests, &sqe.0, &keys);
    let acquired = std::rc::Rc::new(std::cell::Cell::new(false));
    let has_acquired = std::rc::Rc::clone(&acquired);
    assert_eq!(new, hosts.w.links.len() - 1);
    let mut other = hosts.w.links.pop().unwrap();
    hosts.w.host.before_lock = Some(Box::new(move |host| {
        other.conn.receive(&capsule, host, &mut other.out).unwrap();
        has_acquired.set(!other.out.is_empty());
    }));
    let status = hosts.call(1, (peer::write(11, 1, 2, 1), block(1)));
    assert!(acquired.get(), "the Acquire has completed");
    assert_eq!(status, CONFLICT);
    assert!(hosts.w.host.drives[0].history.is_empty(), "the write has landed all the same");
}
