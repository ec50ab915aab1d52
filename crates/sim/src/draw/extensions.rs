//! Writes that extend the content of their blocks (trap T11).

use super::coincidence::{at, cluster, drive};
use crate::drive::DriveFault;
use crate::rng::Rng;
use crate::scenario::{Op, Place, Scenario, Step, What, WriteOp};

/// Of 100 seeds, the number that are about logs whose last block is extended. The themes of other
/// seeds do not affect which seeds these are.
const TAILS: u64 = 3;
/// Separates these random numbers from the others of the seed.
const SALT: u64 = 0x7461_696c_735f_6f66;

/// The scenario of a seed that is about extended blocks.
pub(super) fn draw(seed: u64) -> Option<Scenario> {
    let mut rng = Rng::new(seed ^ SALT);
    rng.percent(TAILS).then(|| tails_of_logs(&mut rng))
}

/// Makes some writes extend the content of their blocks, in one of four runs.
pub(super) fn choose(scenario: &mut Scenario, rng: &mut Rng) {
    if !rng.one_in(4) {
        return;
    }
    // Runs without updates in place show entries in the list that need not be there.
    let (updates, fresh) = *rng.pick(&[(30, 10), (100, 20), (100, 60)]);
    let other_steps = scenario.second_volume.iter_mut().flat_map(|other| &mut other.steps);
    for step in scenario.steps.iter_mut().chain(other_steps) {
        let Op::Group { writes, .. } = &mut step.op else { continue };
        for WriteOp(_, _, place) in writes {
            let share = match place {
                Place::InPlace => updates,
                Place::Fresh => fresh,
                Place::Extend | Place::Discard => 0,
            };
            if rng.percent(share) {
                *place = Place::Extend;
            }
        }
    }
}

/// Logs of records, one for each stream. The last block is written again with each record, until it
/// is full. Other blocks of the group lie on another target. A target or an initiator dies
/// meanwhile (trap T11).
fn tails_of_logs(rng: &mut Rng) -> Scenario {
    let mut scenario = cluster(24, rng);
    drive(&mut scenario).plp = rng.one_in(2);
    drive(&mut scenario).latency_us = *rng.pick(&[10, 60, 300]);
    scenario.client.merge = rng.one_in(2);
    scenario.volume.streams = *rng.pick(&[1, 2]);
    // The number of blocks of a stripe unit, and so of a log, on one target.
    scenario.volume.unit = *rng.pick(&[1, 4, 12]);
    if rng.percent(70) {
        scenario.machines.push(scenario.machines[0].clone());
        scenario.volume.members.push((1, 0));
    }
    let streams = u64::from(scenario.volume.streams);
    let each = 24 * scenario.machines.len() as u64 / streams;
    let (records, beside) = (rng.range(2, 8), *rng.pick(&[0, 30, 60]));
    let mut written = vec![0; scenario.volume.streams.into()];
    for _ in 0..rng.range(40, 110) {
        let stream = rng.below(streams) as u16;
        let (first, at) = (u64::from(stream) * each, &mut written[usize::from(stream)]);
        let block = |nth: u64| (first + nth % each) as u32;
        let place = if *at % records == 0 { Place::Fresh } else { Place::Extend };
        let mut writes = vec![WriteOp(block(*at / records), 1, place)];
        if rng.percent(beside) {
            let far = block(*at / records + each / 2 + rng.below(each / 2 - 1));
            writes.push(WriteOp(far, 1, Place::Fresh));
        }
        *at += 1;
        scenario.steps.push(Step { stream, op: Op::Group { writes, durable: rng.percent(15) } });
    }
    let mut event = 60;
    for _ in 0..rng.range(1, 4) {
        event += rng.range(40, 300);
        let machine = rng.index(scenario.machines.len());
        let (effects, fences, down_us) = (rng.below(4) as u32, false, 200);
        let what = match rng.below(6) {
            0 | 1 => What::KillClient { down_us },
            2 | 3 => What::BlackOut { down_us },
            4 => What::Kill { machine, effects, fences, down_us },
            _ => What::Drive { machine, drive: 0, fault: DriveFault::Write },
        };
        scenario.faults.push(at(event, what));
    }
    scenario
}
