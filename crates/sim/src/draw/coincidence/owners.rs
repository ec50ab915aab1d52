//! Coincidences in which the volume gets another owner, or a plain host writes its drives.

use super::{FIRST, at, cluster, drive, write};
use crate::network::NetSpec;
use crate::rng::Rng;
use crate::scenario::{Ends, Engine, Fault, Op, Place, Scenario, Step, What, When};

/// A target comes back and gets the marks of the streams. The volume gets another owner before the
/// marks are durable, and the target dies before all streams have started (trap T9).
pub(super) fn taken_over_while_coming_back(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    drive(&mut scenario).plp = true;
    scenario.volume.streams = 4;
    scenario.volume.slots = 64;
    scenario.client.think_ns = 200_000;
    for _ in 0..110 {
        let (stream, block) = (rng.below(4) as u16, rng.below(24) as u32);
        scenario.steps.push(write(stream, block, 1, Place::Fresh, rng.percent(90)));
    }
    let (machine, effects, fences, down_us) = (0, 0, false, 10);
    scenario.net = NetSpec { delay_min: 10_000, delay_max: 20_000, split: 0 };
    scenario.faults.push(at(rng.range(100, 300), What::Kill { machine, effects, fences, down_us }));
    let when = When::Replay(0, rng.below(5) as u32);
    scenario.faults.push(Fault { when, what: What::TakeOver { for_us: 40_000 } });
    let when = When::Recovery(1, rng.range(66, 88) as u32);
    let kill = What::Kill { machine, effects, fences, down_us };
    scenario.faults.push(Fault { when, what: kill });
    scenario
}

/// An owner reads slowly the blocks that it has written and not made durable. The volume is taken
/// over, and these blocks are undone (trap T8, promise P9).
pub(super) fn reads_of_a_fenced_owner(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(12, rng);
    (drive(&mut scenario).latency_us, drive(&mut scenario).slow) = (300, 30);
    scenario.volume.streams = 2;
    scenario.volume.slots = 64;
    for _ in 0..25 {
        let block = rng.below(6) as u32;
        scenario.steps.push(write(0, block, 2, Place::Fresh, rng.percent(10)));
        scenario.steps.push(Step { stream: 0, op: Op::WaitComplete });
        for _ in 0..2 {
            scenario.steps.push(Step { stream: 1, op: Op::Read(rng.below(6) as u32, 2) });
        }
    }
    let mut event = 60;
    for _ in 0..4 {
        event += rng.range(40, 300);
        let for_us = *rng.pick(&[0, 0, 200]);
        scenario.faults.push(at(event, What::TakeOver { for_us }));
    }
    scenario
}

/// A reader of the volume reads very slowly the blocks that its owner has written and not made
/// durable. Meanwhile the volume is taken over, and these blocks are undone (trap T8, promise P9).
pub(super) fn reads_that_outlive_the_owner(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(8, rng);
    (drive(&mut scenario).latency_us, drive(&mut scenario).slow) = (500, 15);
    scenario.volume.slots = 64;
    scenario.client.flush_us = 200_000;
    for block in 0..4 {
        scenario.steps.push(write(0, block, 1, Place::Fresh, false));
    }
    scenario.steps.push(Step { stream: 0, op: Op::WaitComplete });
    for _ in 0..40 {
        scenario.steps.push(Step { stream: 0, op: Op::ReadApart(rng.below(4) as u32, 1) });
        scenario.steps.push(Step { stream: 0, op: Op::Pause(500) });
    }
    scenario.faults.push(at(rng.range(100, 300), What::TakeOver { for_us: 0 }));
    scenario
}

/// The admin connection of an owner breaks while another initiator takes the volume over. A reader
/// of the volume is on a core that is busy, and learns late of the end of its association (trap T8,
/// promise P9).
pub(super) fn reads_that_outlive_the_association(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(4, rng);
    (drive(&mut scenario).plp, drive(&mut scenario).at_once) = (true, 90);
    scenario.machines[0].cores = 3;
    scenario.volume.slots = 64;
    scenario.client.flush_us = 200_000;
    scenario.client.think_ns = 0;
    scenario.net = NetSpec { delay_min: 500, delay_max: 1_500, split: 0 };
    for _ in 0..40 {
        scenario.steps.push(write(0, 0, 4, Place::Fresh, false));
        scenario.steps.push(Step { stream: 0, op: Op::WaitComplete });
        for _ in 0..8 {
            scenario.steps.push(Step { stream: 0, op: Op::ReadApart(rng.below(4) as u32, 1) });
            scenario.steps.push(Step { stream: 0, op: Op::Pause(*rng.pick(&[5, 20, 40])) });
        }
    }
    let mut event = 60;
    for nth in 1..6 {
        event += rng.range(40, 160);
        scenario.faults.push(at(event, What::TakeOver { for_us: 0 }));
        let when = When::Recovery(nth, rng.below(12) as u32);
        let cut = What::Cut { nth: 0, ends: Ends::Server };
        scenario.faults.push(Fault { when, what: cut });
    }
    scenario
}

/// An owner is fenced while it is unreachable, and the volume is released before the owner learns
/// of that. The requests that it has sent arrive when the volume is free (trap T8).
pub(super) fn taken_over_and_released(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(12, rng);
    scenario.volume.streams = 2;
    scenario.volume.slots = 64;
    scenario.volume.engine = *rng.pick(&[Engine::Rio, Engine::Sync, Engine::Linux, Engine::None]);
    for _ in 0..60 {
        let block = rng.below(12) as u32;
        scenario.steps.push(write(0, block, 1, Place::Fresh, rng.percent(20)));
        scenario.steps.push(Step { stream: 1, op: Op::Read(rng.below(12) as u32, 1) });
    }
    let mut event = 60;
    for _ in 0..3 {
        event += rng.range(40, 300);
        let for_us = *rng.pick(&[500, 2_000, 5_000]);
        scenario.faults.push(at(event, What::TakeOver { for_us }));
        event += rng.range(40, 200);
        let for_us = *rng.pick(&[5_000, 20_000]);
        scenario.faults.push(at(event, What::Release { for_us }));
    }
    scenario
}

/// Between two events a plain host writes one of the first `blocks` blocks, and asks for six
/// further operations.
fn plain_writes(scenario: &mut Scenario, blocks: u64, (first, last): (u64, u64), rng: &mut Rng) {
    let lba = FIRST + rng.below(blocks) as u32;
    let what = What::PlainHost { machine: 0, drive: 0, lba, more: 6, forgets: false };
    scenario.faults.push(at(rng.range(first, last), what));
}

/// An owner without a log is fenced while its writes are slow. The next owner ends while its claim
/// waits for them. Just then another host writes the same blocks (traps T8, T21).
pub(super) fn writes_that_outlive_two_owners(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(4, rng);
    (drive(&mut scenario).latency_us, drive(&mut scenario).slow) = (200, *rng.pick(&[20, 40]));
    scenario.volume.slots = 64;
    scenario.volume.engine = *rng.pick(&[Engine::Sync, Engine::Linux, Engine::None]);
    scenario.client.think_ns = *rng.pick(&[0, 20_000]);
    for _ in 0..110 {
        scenario.steps.push(write(0, rng.below(4) as u32, 1, Place::Fresh, false));
    }
    let event = rng.range(50, 100);
    scenario.faults.push(at(event, What::TakeOver { for_us: *rng.pick(&[0, 500]) }));
    let when = When::Recovery(1, rng.range(4, 40) as u32);
    scenario.faults.push(Fault { when, what: What::TakeOver { for_us: 20_000 } });
    for _ in 0..3 {
        plain_writes(&mut scenario, 4, (event + 10, event + 100), rng);
    }
    scenario
}

/// An owner is fenced and does not know it: its streams are still connected. The next owner cannot
/// reach all targets and releases the volume. Just then another host writes there (traps T8, T21).
pub(super) fn released_before_the_fenced_owner_leaves(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(12, rng);
    let second = scenario.machines[0].clone();
    scenario.machines.push(second);
    scenario.volume.members = vec![(0, 0), (1, 0)];
    scenario.volume.slots = 64;
    scenario.client.think_ns = *rng.pick(&[0, 20_000]);
    for _ in 0..rng.range(40, 80) {
        scenario.steps.push(write(0, rng.below(24) as u32, 2, Place::Fresh, rng.percent(10)));
    }
    let event = rng.range(80, 200);
    scenario.faults.push(at(event, What::TakeOver { for_us: *rng.pick(&[0, 500]) }));
    let (machine, effects, fences, down_us) = (1, 0, false, *rng.pick(&[200, 5_000]));
    let when = When::Recovery(1, rng.range(8, 30) as u32);
    let kill = What::Kill { machine, effects, fences, down_us };
    scenario.faults.push(Fault { when, what: kill });
    for _ in 0..6 {
        plain_writes(&mut scenario, 12, (event + 10, event + 150), rng);
    }
    scenario
}

/// A target stops while the volume is being closed. Another target has released it, and is started
/// again before the first one is back. Just then another host writes there (trap T25).
pub(super) fn closed_while_one_is_down(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    let second = scenario.machines[0].clone();
    scenario.machines.push(second);
    scenario.volume.members = vec![(0, 0), (1, 0)];
    scenario.volume.engine = *rng.pick(&[Engine::Rio, Engine::Sync, Engine::Linux, Engine::None]);
    scenario.client.retry_us = *rng.pick(&[0, 200]);
    for _ in 0..rng.range(4, 10) {
        let block = rng.below(24) as u32;
        scenario.steps.push(write(0, block, 1, Place::Fresh, rng.percent(60)));
    }
    scenario.steps.push(Step { stream: 0, op: Op::WaitDurable });
    let mut event = rng.range(150, 300);
    scenario.faults.push(at(event, What::Release { for_us: 5_000 }));
    let stop = What::Stop { machine: 0, off: true, cut: 0, down_us: 20_000 };
    scenario.faults.push(at(event + rng.range(3, 13), stop));
    event += rng.range(12, 24);
    let kill = What::Kill { machine: 1, effects: 0, fences: false, down_us: 10 };
    scenario.faults.push(at(event, kill));
    for _ in 0..4 {
        event += rng.range(10, 50);
        let lba = FIRST + rng.below(24) as u32;
        let what = What::PlainHost { machine: 1, drive: 0, lba, more: 0, forgets: false };
        scenario.faults.push(at(event, what));
    }
    scenario
}

/// Hosts that have not claimed the volume ask a target to forget its log, and write (traps T18,
/// T21).
pub(super) fn commands_of_plain_hosts(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    scenario.client.think_ns = *rng.pick(&[5_000, 200_000]);
    for _ in 0..rng.range(20, 110) {
        let block = rng.below(24) as u32;
        scenario.steps.push(write(0, block, 1, Place::Fresh, rng.percent(20)));
    }
    for _ in 0..rng.range(1, 3) {
        let (lba, more) = (FIRST + rng.below(24) as u32, rng.below(4) as u32);
        let what = What::PlainHost { machine: 0, drive: 0, lba, more, forgets: true };
        scenario.faults.push(at(rng.range(60, 500), what));
    }
    scenario
}

/// An owner with durable blocks loses its connections for a moment, and just then another host
/// writes there (traps T21, T25).
pub(super) fn plain_hosts_while_the_owner_is_unreachable(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    drive(&mut scenario).plp = rng.one_in(2);
    scenario.client.think_ns = *rng.pick(&[20_000, 200_000]);
    scenario.client.retry_us = *rng.pick(&[0, 200]);
    for _ in 0..rng.range(20, 80) {
        let block = rng.below(24) as u32;
        scenario.steps.push(write(0, block, 1, Place::Fresh, rng.percent(60)));
    }
    let mut event = rng.range(60, 200);
    for _ in 0..3 {
        let (nth, ends) = (rng.below(4) as u32, *rng.pick(&[Ends::Both, Ends::Server]));
        scenario.faults.push(at(event, What::Cut { nth, ends }));
        let (lba, more) = (FIRST + rng.below(24) as u32, rng.below(4) as u32);
        let what = What::PlainHost { machine: 0, drive: 0, lba, more, forgets: false };
        scenario.faults.push(at(event + rng.range(1, 12), what));
        event += rng.range(60, 200);
    }
    scenario
}
