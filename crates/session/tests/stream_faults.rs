//! Streams and real target sessions in memory: connections cut at every byte, targets killed and
//! started again with and without their unflushed blocks, bytes and writes that come late. In the
//! end every block holds its last write, and every completion was reported once, in order (P3, P5,
//! P7, P8, P9).

mod stream_rig;
mod stream_world;

use riopipe_order::attribute::Seq;
use riopipe_order::engine::Cause;
use riopipe_order::engine::Place::{Fresh, InPlace};
use riopipe_testkit::{Random, peer};
use stream_rig::{MS, Shape};
use stream_world::What::{self, Discard, Put};
use stream_world::{Client, Pipe, World};

/// A fault of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blow {
    /// It breaks; bytes in transit get to the target later.
    Cut,
    /// The target's process dies.
    Kill,
    /// The target loses power.
    Power,
}

/// Two servers, one with a volatile cache; a log that comes around.
fn shape() -> Shape {
    Shape { members: vec![(0, false), (1, true)], slots: 8, depth: 4, ..Shape::of(1, false) }
}

/// The direction of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ToTarget,
    ToHost,
}

/// Blocks of a group, and whether it is to be durable.
type Group = (&'static [(u64, u32, What)], bool);

/// Overlaps, stripes, flushes.
const WRITES: [Group; 5] = [
    (&[(0, 1, Put(Fresh))], false),
    (&[(1, 1, Put(Fresh)), (2, 2, Put(InPlace))], false),
    (&[(0, 2, Put(InPlace))], true),
    (&[(1, 1, Put(InPlace))], false),
    (&[(1, 1, Put(InPlace)), (0, 1, Put(InPlace))], false),
];

/// The same without any payload, so that every byte can be tried.
const DISCARDS: [Group; 5] = [
    (&[(0, 2, Discard)], false),
    (&[(2, 2, Discard)], true),
    (&[(0, 1, Discard), (1, 1, Discard)], false),
    (&[(1, 1, Discard)], true),
    (&[(0, 4, Discard)], false),
];

/// A short workload whose connection to `server` gets a fault once `at` bytes have gone in one
/// direction on it. With `again`, not the first connection, but the one after, which replays.
/// Returns whether the fault came.
fn struck(groups: &[Group], server: usize, at: usize, way: Way, blow: Blow, again: bool) -> bool {
    let mut world = World::new(shape(), 1, at as u64);
    let mut zero = world.clients[0].pipes[server].as_ref().unwrap().delivered;
    let mut blows = 1 + usize::from(again);
    let mut groups = groups.iter();
    for round in 0..40 {
        if let Some((blocks, durable)) = groups.next() {
            assert!(world.submit(0, blocks, *durable));
        }
        world.pump(0);
        for to in 0..2 {
            // The first of two faults comes after two groups.
            let at = if blows == 2 { 2 * 4168 } else { at };
            let gone = |pipe: &Pipe| match way {
                Way::ToTarget => pipe.delivered.0 - zero.0,
                Way::ToHost => pipe.delivered.1 - zero.1,
            };
            let Some(pipe) = &world.clients[0].pipes[to] else { continue };
            let strike = to == server && blows > 0;
            let first = blows == 2 && round == 2;
            let left = if strike { at.saturating_sub(gone(pipe)) } else { usize::MAX };
            let (there, back) = match way {
                Way::ToTarget => (left, usize::MAX),
                Way::ToHost => (usize::MAX, left),
            };
            world.carry_to_target(0, to, there);
            world.carry_to_host(0, to, back);
            let Some(pipe) = &world.clients[0].pipes[to] else { continue };
            if strike && (first || blows == 1 && gone(pipe) == at) {
                blows -= 1;
                zero = (0, 0);
                match blow {
                    Blow::Cut => world.lose(0, server),
                    Blow::Kill | Blow::Power => {
                        world.restart(server, blow == Blow::Power);
                        world.come_back(server);
                        world.notice(0);
                    }
                }
            }
        }
        // Drives are slow: some operations are in flight when the fault comes.
        if round % 2 == 1 {
            for target in &mut world.targets {
                target.work_all();
            }
        }
        // Bytes in transit on a lost connection arrive late, while the next one is being set up.
        if round % 4 == 3 && !world.late.is_empty() {
            world.carry_late(0, usize::MAX);
        }
        world.poll(0);
        world.rejoin(0);
        world.now += MS;
    }
    world.check_all();
    blows == 0
}

/// A fault at every place: after steps of several bytes in the direction to a target with payloads,
/// after every byte otherwise.
fn strike_everywhere(way: Way, blow: Blow, again: bool) {
    for server in 0..2 {
        let sparse = |at: usize| match () {
            // A new connection begins with 128 bytes of ICReq and 1096 of Connect.
            () if again && at < 1200 => at.is_multiple_of(50),
            () if again => at < 1600 || at.is_multiple_of(97),
            () => at % 4168 < 80 || at.is_multiple_of(97),
        };
        for (groups, every) in
            [(WRITES, way == Way::ToHost), (DISCARDS, way == Way::ToHost || !again)]
        {
            let mut struck_at = 0;
            for at in (0..).filter(|at| every || sparse(*at)) {
                if !struck(&groups, server, at, way, blow, again) {
                    break;
                }
                struck_at += 1;
            }
            assert!(struck_at > 80, "{struck_at} places");
        }
    }
}

#[test]
fn p7_a_connection_may_break_after_any_byte_to_the_target() {
    strike_everywhere(Way::ToTarget, Blow::Cut, false);
}

#[test]
fn p7_a_connection_may_break_after_any_byte_from_the_target() {
    strike_everywhere(Way::ToHost, Blow::Cut, false);
}

#[test]
fn p7_a_target_may_die_after_any_byte_to_it() {
    strike_everywhere(Way::ToTarget, Blow::Kill, false);
}

#[test]
fn p7_a_target_may_lose_power_after_any_byte_to_it() {
    strike_everywhere(Way::ToTarget, Blow::Power, false);
}

#[test]
fn p7_a_target_may_lose_power_after_any_byte_from_it() {
    strike_everywhere(Way::ToHost, Blow::Power, false);
}

#[test]
fn p7_the_next_connection_may_break_after_any_byte_too() {
    strike_everywhere(Way::ToTarget, Blow::Cut, true);
    strike_everywhere(Way::ToHost, Blow::Cut, true);
}

#[test]
fn p7_a_target_may_lose_power_again_after_any_byte_of_the_replay() {
    strike_everywhere(Way::ToTarget, Blow::Power, true);
}

#[test]
fn t13_a_full_log_is_replayed_all_the_same() {
    for volatile in [false, true] {
        for power in [false, true] {
            let shape = Shape { slots: 8, ..Shape::of(1, volatile) };
            let mut world = World::new(shape, 1, 1);
            let mut groups = 0;
            while world.submit(0, &[(groups % 4, 1, Put(InPlace))], false) {
                groups += 1;
                world.pump(0);
                world.carry_to_target(0, 0, usize::MAX);
            }
            assert!(groups >= 6, "all slots but those kept for a flush");
            world.restart(0, power);
            world.come_back(0);
            world.check_all();
            // The log goes around after that.
            for group in 0..50 {
                world.submit(0, &[(group % 4, 1, Put(InPlace))], false);
                world.settle();
            }
            world.check_all();
        }
    }
}

#[test]
fn t8_p6_an_owner_that_did_not_call_while_another_came_writes_nothing_more() {
    for gone in [false, true] {
        let shape = Shape { in_capsule: 0, ..shape() };
        let mut world = World::new(shape, 2, 1);
        for stream in 0..2 {
            for lba in 0..4 {
                assert!(world.submit(stream, &[(4 * stream as u64 + lba, 1, Put(Fresh))], false));
            }
            world.pump(stream);
        }
        world.carry_to_target(0, 0, 100);
        if gone {
            world.lose(0, 0);
            world.lose(0, 1);
        }
        for target in &mut world.targets {
            target.claim(2, false);
        }
        let contents = |world: &World| {
            let drives = world.targets.iter().flat_map(|target| &target.media.drives);
            drives.map(|d| (0..64).map(|lba| d.block(lba)).collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        let before = contents(&world);
        world.settle();
        assert!(before == contents(&world), "the new owner may have read its list by now");
        for stream in 0..2 {
            let failure = world.clients[stream].failure.expect("it has been fenced");
            assert_eq!(failure.cause, Cause::Status(stream_rig::status::STALE_GENERATION));
            assert_eq!(failure.seq, Seq(1));
        }
    }
}

/// A run of faults drawn from a seed.
fn run(seed: u64) -> World {
    let mut draw = Random(seed);
    let mut members = vec![];
    let servers = 1 + draw.index(3) as u16;
    for server in 0..servers {
        for _ in 0..1 + draw.index(2) {
            members.push((server, draw.one_in(2)));
        }
    }
    let shape = Shape {
        members,
        slots: [8, 12, 24][draw.index(3)],
        depth: [1, 4, 16][draw.index(3)],
        merge: draw.one_in(2),
        in_capsule: [0, 4096, 8192][draw.index(3)],
        loss_ns: 1 << 50,
        start: if draw.one_in(4) { (1 << 32) - 20 } else { 0 },
        ..Shape::of(1, false)
    };
    let blocks = shape.topology().blocks().min(20);
    let mut world = World::new(shape, 2, seed);
    for _ in 0..600 {
        let client = draw.index(2);
        let server = draw.index(usize::from(servers));
        match draw.index(100) {
            0..15 => {
                // Each stream has blocks of its own.
                let own = blocks / 2 * client as u64;
                let group: Vec<_> = (0..1 + draw.index(3))
                    .map(|_| {
                        let len = 1 + draw.index(3) as u64;
                        let lba = own + draw.next() % (blocks / 2 - len);
                        let what = [Put(Fresh), Put(InPlace), Discard][draw.index(3)];
                        (lba, len as u32, what)
                    })
                    .collect();
                world.submit(client, &group, draw.one_in(6));
            }
            15..35 => {
                world.pump(client);
                world.carry_to_target(client, server, 1 + draw.index(9000));
            }
            35..50 => {
                world.carry_to_host(client, server, 1 + draw.index(400));
                world.end_read(client);
            }
            50..70 => {
                let Some(target) = world.targets.get_mut(server) else { continue };
                target.work(&mut world.random);
            }
            70..78 => world.poll(client),
            78..83 => {
                let lba = draw.next() % (blocks - 3);
                world.read(client, lba, 1 + draw.index(3) as u32);
            }
            83..87 => world.rejoin(client),
            87..90 => world.notice(client),
            90..93 => world.now += [MS, 10 * MS, 60 * MS][draw.index(3)],
            93 => world.lose(client, server),
            94 => {
                if draw.one_in(2) {
                    world.restart(server, draw.one_in(2));
                }
            }
            95 | 96 => world.come_back(server),
            97 => {
                if draw.one_in(3) {
                    world.targets[server].end_association();
                }
            }
            98 => {
                // The owner comes back by another association before the first has ended.
                if draw.one_in(3) && world.targets[server].owner.is_some() {
                    world.targets[server].claim(1, true);
                }
            }
            _ => {
                if !world.late.is_empty() {
                    let at = draw.index(world.late.len());
                    world.carry_late(at, 1 + draw.index(9000));
                }
            }
        }
    }
    for server in 0..usize::from(servers) {
        world.come_back(server);
    }
    world.check_all();
    world
}

#[test]
fn p7_p9_any_faults_in_any_order_cost_time_and_nothing_else() {
    let (mut reads, mut replays) = (0, 0);
    let mut groups = 0;
    for seed in 0..1000 {
        let world = run(seed);
        reads += world.clients.iter().map(|client| client.reads).sum::<usize>();
        let again = world.clients.iter().map(|client| client.session.engine().replayed_count());
        replays += again.sum::<u64>();
        let last = |client: &Client| client.session.engine().last_admitted().0 - world.shape.start;
        groups += world.clients.iter().map(last).sum::<u64>();
    }
    assert!(reads > 1500 && groups > 10_000, "{reads} reads, {groups} groups");
    assert!(replays > 10_000, "{replays} replays");
}
