//! Redirected updates of engine `horae` are copied home by recovery, also if that is cut off at any
//! command, and again.

use riopipe_order::attribute::{Attribute, Flags, Seq};
use riopipe_order::entry::Position;
use riopipe_session::initiator::opening::{Mode, OpeningError, Outcome};
use riopipe_session::wire;

use crate::world::{
    Driver, PREPARE, Past, Random, START, World, entry, nsid_of, old, open, server_of, sqe_of,
};

/// A redirected update of block `lba` of the data area of a member, with its data in block `prepared` of the
/// prepare area.
fn redirected(seq: u64, member: u8, lba: u64, prepared: u32) -> Attribute {
    let a = entry(seq, member, lba, 1);
    let flags = a.flags.with(Flags::IN_PLACE).with(Flags::REDIRECTED);
    Attribute { flags, ordinal: prepared, ..a }
}

fn content(seq: u64) -> u32 {
    0xa000 + seq as u32
}

/// A1 → B2 → A3 on one block of member 0, with B on member 2 of another server, and a fourth update
/// that is not durable. The commit of the first three was cut off: any of the homes may have the old
/// content or the new one.
fn cut_off_in_a_commit(seed: u64) -> World {
    let mut random = Random(seed);
    let caches = random.below(16);
    let mut world = World::new(2, 1, |member| caches >> member & 1 == 1);
    let updates = [(1, 0, 10, 0), (2, 2, 11, 0), (3, 0, 10, 1), (4, 0, 10, 2)];
    let history = updates.map(|(seq, member, lba, prepared)| Past {
        stream: 0,
        attribute: redirected(seq, member, lba, prepared),
        durable: seq <= 3,
    });
    for (past, (seq, member, _, prepared)) in history.iter().zip(updates) {
        // `play` writes to the home. Here the data is in the area.
        world.play(&[Past { durable: false, ..*past }], &mut Random(u64::MAX));
        let server = server_of(member);
        let listed = world.targets[server].partitions[0].entries.last_mut().unwrap();
        listed.position = Position(seq);
        (listed.durable, listed.persisted) = (past.durable, past.durable);
        let drive = world.targets[server].drives.get_mut(&nsid_of(member)).unwrap();
        let home = past.attribute.lba;
        drive.medium.insert(home, old(member, home - START));
        drive.cache.remove(&home);
        drive.medium.insert(START - u64::from(PREPARE) + u64::from(prepared), content(seq));
    }
    for (member, lba, seq) in [(0u8, 10, 3), (2, 11, 2)] {
        if random.below(2) == 0 {
            let drives = &mut world.targets[server_of(member)].drives;
            drives.get_mut(&nsid_of(member)).unwrap().write(START + lba, content(seq));
        }
    }
    world
}

/// Checks that the updates of the prefix are durable at home, the newest of each block.
fn check_homes(world: &World) {
    let home = |member, lba| world.drive(member).medium.get(&(START + lba)).copied();
    assert_eq!(home(0, 10), Some(content(3)), "the newest update of the prefix");
    assert_eq!(home(2, 11), Some(content(2)));
}

/// Opens, and cuts the opening off at its `cut`th command.
fn run(world: &mut World, initiator: u32, cut: usize, power: usize) -> Option<Outcome> {
    let mut driver = Driver::new(world, initiator, Mode::Open(world.intent()));
    while driver.calls < cut {
        let last = driver.calls + 1 == cut;
        if !driver.step(world, last).unwrap() {
            return Some(driver.opening.into_outcome());
        }
        if driver.log.last().is_some_and(|(_, call)| sqe_of(call).opcode() == wire::ADMIN_SETTLE) {
            check_homes(world);
        }
    }
    driver.lose(world);
    world.initiators_die();
    let mut random = Random(cut as u64 * 31 + u64::from(initiator));
    for server in (0..2).filter(|server| power >> server & 1 == 1) {
        world.power_cut(server, &mut random);
    }
    None
}

#[test]
fn t9_redirected_updates_are_copied_wherever_it_is_cut_off_and_again() {
    let mut cuts = 0;
    for (seed, power) in (0..4).flat_map(|seed| [(seed, 0), (seed, 1), (seed, 3)]) {
        for first in 1.. {
            let mut world = cut_off_in_a_commit(seed);
            if run(&mut world, 7, first, power).is_some() {
                break;
            }
            for second in 1.. {
                let mut again = world.clone();
                let is_over = run(&mut again, 8, second, 3 - power).is_some();
                cuts += 1;
                let outcome = if is_over { None } else { Some(open(&mut again, 9).unwrap()) };
                check_homes(&again);
                if let Some(outcome) = &outcome {
                    let plan = &outcome.streams[0].plan;
                    assert_eq!((plan.k, &plan.in_place[..]), (Seq(3), &[][..]));
                    assert!(!outcome.streams[0].pending);
                }
                if is_over {
                    break;
                }
            }
        }
    }
    assert!(cuts > 1000, "{cuts}");
}

#[test]
fn t19_an_update_outside_of_the_prepare_area_is_never_copied() {
    let mut world = World::new(1, 1, |_| true);
    let attribute = Attribute { blocks: 2, ..redirected(1, 0, 10, PREPARE - 1) };
    world.play(&[Past { stream: 0, attribute, durable: true }], &mut Random(1));
    let error = open(&mut world, 7).unwrap_err();
    assert!(matches!(error, OpeningError::Outside { member: 0, .. }), "{error}");
}
