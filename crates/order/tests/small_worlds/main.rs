//! Small worlds, all of them: two targets with a drive each, up to four groups of up to two writes,
//! one crash at every step, every log and every subset of lost writes that the media allow.
//!
//! The engine, the gates, the logs and recovery's decisions are the real ones. After each crash the
//! promises are checked against the submitted groups. A power cut may leave any subset of the
//! writes that were not flushed, block by block. The test does not go through all subsets one after
//! the other. It checks each block with *everything* that the block may hold. This gives the same
//! result and is counted as such.
//!
//! `cargo test -p riopipe-order --test small_worlds -- full` takes more shapes of groups. With
//! `--features probe` the name of a plant removes a defence, and the run must fail.

mod media;
#[path = "../common/table_gate.rs"]
mod table_gate;
mod workload;
mod world;

use std::{collections::BTreeSet, process::exit, sync::Mutex, thread};

use media::Words;
pub(crate) use riopipe_nvme::digest::soft as crc32c;
use riopipe_order::{attribute::Seq, engine::Place, recovery::StreamPlan};
use workload::{Group, UNIT};
use world::{Action, World, is_listed, is_undone};

/// Which drives have a volatile cache.
const CACHES: [[bool; 2]; 3] = [[true, true], [false, false], [true, false]];

/// The number of schedules. A schedule is the order of steps that may happen in several orders.
const SCHEDULES: usize = 4;

/// Counts of the checked cases.
#[derive(Default)]
struct Counts {
    worlds: u64,
    steps: u64,
    crashes: u64,
    /// Crash states: logs times subsets of lost writes.
    states: u64,
    replays: u64,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.iter().any(|arg| arg == "--list") {
        return println!("small_worlds: test");
    }
    let full = args.iter().any(|arg| arg == "full");
    // With the feature `probe`: one defence removed. The test must report it.
    #[cfg(feature = "probe")]
    riopipe_order::probe::plant(
        args.iter().find_map(|arg| riopipe_order::probe::Plant::from_name(arg)),
    );
    // Groups, and shapes of each: first with updates in place, then with extensions.
    let bounds: [&[(u32, usize)]; 2] = match full {
        true => [&[(1, 8), (2, 8), (3, 5), (4, 2)], &[(1, 4), (2, 4), (3, 3), (4, 2)]],
        false => [&[(1, 8), (2, 6), (3, 2), (4, 1)], &[(1, 4), (2, 4), (3, 2)]],
    };
    // The first thread that fails ends all.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        hook(panic);
        exit(1);
    }));
    let work = Mutex::new(
        [workload::UPDATES, workload::EXTENSIONS]
            .into_iter()
            .zip(bounds)
            .flat_map(|(all, bounds)| bounds.iter().map(|(groups, some)| (*groups, &all[..*some])))
            .flat_map(|(groups, shapes)| workload::all(groups, shapes))
            .collect::<Vec<_>>(),
    );
    let total = Mutex::new(Counts::default());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                let mut counts = Counts::default();
                loop {
                    let next = work.lock().unwrap().pop();
                    let Some(groups) = next else { break };
                    explore(&groups, &mut counts);
                }
                let mut total = total.lock().unwrap();
                total.worlds += counts.worlds;
                total.steps += counts.steps;
                total.crashes += counts.crashes;
                total.states += counts.states;
                total.replays += counts.replays;
            });
        }
    });
    let Counts { worlds, steps, crashes, states, replays } = total.into_inner().unwrap();
    println!(
        "small worlds (groups, shapes: {bounds:?}): {worlds} worlds, {steps} steps, {crashes} crashes, \
         {states} states after them, {replays} crashes of one target alone; all clean"
    );
}

/// One workload, on all drives, in all orders, with all crashes.
fn explore(groups: &[Group], counts: &mut Counts) {
    for caches in CACHES {
        for schedule in 0..SCHEDULES {
            let what = Case { groups, caches, schedule };
            counts.worlds += 1;
            let steps = what.run(u32::MAX, |world| what.crash_now(world, counts));
            counts.steps += u64::from(steps);
            for step in 0..steps {
                what.targets_crash_at(step, counts);
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Case<'a> {
    groups: &'a [Group],
    caches: [bool; 2],
    schedule: usize,
}

impl Case<'_> {
    /// Runs from the start up to `steps` steps or the end; calls `each` before every step and at
    /// the end. Returns the number of steps.
    fn run(&self, steps: u32, mut each: impl FnMut(&World)) -> u32 {
        let mut world = self.world();
        each(&world);
        self.go_on(&mut world, steps, &mut each);
        world.steps
    }

    fn world(&self) -> World {
        World::new(self.caches, self.groups, self.schedule != 1)
    }

    fn go_on(&self, world: &mut World, steps: u32, each: &mut dyn FnMut(&World)) {
        let mut waiting = [true; 2];
        while world.steps < steps {
            let mut actions = world.actions(waiting);
            actions.sort_by_key(|action| rank(*action, self.schedule));
            let Some(action) = actions.first().copied() else {
                if world.ask_durable() {
                    waiting = [true; 2];
                    continue;
                }
                return;
            };
            if !world.act(action) {
                // Nothing arrived, so that was no step.
                world.steps -= 1;
                let (Action::Arrive(t)
                | Action::Submit(t)
                | Action::Finish(t, _)
                | Action::Answer(t)) = action
                else {
                    unreachable!("a group can always be admitted");
                };
                waiting[t] = false;
                continue;
            }
            if matches!(action, Action::Admit | Action::Answer(_)) {
                waiting = [true; 2];
            }
            each(world);
        }
    }

    /// The initiator dies, alone or with one target's power, or with both.
    fn crash_now(&self, world: &World, counts: &mut Counts) {
        for power in [[false, false], [true, false], [false, true], [true, true]] {
            counts.crashes += 1;
            let cuts = [0, 1].map(|t| if power[t] { world.log_cuts(t) } else { 1 });
            let drives = [0, 1].map(|t| {
                let drive = world.drive(t);
                if power[t] { drive.power_cut() } else { drive.drained() }
            });
            let states = drives.iter().map(media::Drive::states).product::<u64>();
            for first in 0..cuts[0] {
                for second in 0..cuts[1] {
                    let cut = [first, second];
                    let logs = [0, 1].map(|t| world.log(t, power[t].then_some(cut[t])));
                    counts.states += states;
                    let plan = world.plan(&logs);
                    self.judge(world, &plan, &drives);
                    self.again(world, &plan, &logs);
                }
            }
        }
    }

    /// P1, P2, P4, P5: the content after recovery is the prefix, whole and exact.
    fn judge(&self, world: &World, plan: &StreamPlan, drives: &[media::Drive; 2]) {
        let k = plan.k;
        if k < world.marks.durable {
            self.fail(world, plan, &format!("P2: {} was reported durable", world.marks.durable));
        }
        let last = world.submitted.range(..=k).next_back();
        if last.map_or(0, |(_, group)| group.tag) != plan.tag {
            self.fail(world, plan, &format!("the tag of group {k} is {}", plan.tag));
        }
        for drive in 0..2u8 {
            for block in 0..UNIT.min(12) {
                let mut want = 0;
                let mut left = BTreeSet::new();
                let mut extended = BTreeSet::new();
                let (mut fresh_beyond, mut updated_beyond) = (false, false);
                for (seq, group) in &world.submitted {
                    for w in &group.writes {
                        if w.drive() != drive || w.on_drive() != block {
                            continue;
                        }
                        match (*seq <= k, w.place) {
                            (true, _) => want = w.content,
                            (false, Place::Fresh) => fresh_beyond = true,
                            (false, Place::InPlace) => {
                                updated_beyond = true;
                                left.insert(w.content);
                            }
                            // No block is extended and updated in place here.
                            (false, Place::Extend) => {
                                extended.insert(w.content);
                            }
                        }
                    }
                }
                let mut found = drives[usize::from(drive)].may_hold(block);
                if is_undone(plan, drive, block) {
                    if !fresh_beyond {
                        self.fail(world, plan, &format!("P5: block {drive}:{block} is undone"));
                    }
                    found = BTreeSet::from([0]);
                }
                let listed = is_listed(plan, drive, block);
                if listed && !updated_beyond {
                    self.fail(world, plan, &format!("P1: block {drive}:{block} is listed"));
                }
                for content in found {
                    let listed = left.contains(&content) && listed;
                    // An extension beyond the prefix contains the content of the prefix.
                    let extends = extended.contains(&content) && !fresh_beyond;
                    if content != want && !listed && !extends {
                        let what =
                            format!("P1, P5: block {drive}:{block} may hold {content}, not {want}");
                        self.fail(world, plan, &what);
                    }
                }
            }
        }
    }

    /// T9: a recovery that dies after settling only one log is run again and finds the same.
    fn again(&self, world: &World, plan: &StreamPlan, logs: &[Words; 2]) {
        let keep = !plan.in_place.is_empty();
        for done in 0..2 {
            let mut half = logs.clone();
            half[done] = World::settled(&half[done], plan.k, plan.tag, keep);
            let second = world.plan(&half);
            if second.k != plan.k || second.tag != plan.tag || second.in_place != plan.in_place {
                self.fail(
                    world,
                    &second,
                    &format!("T9: run again it is {}, not {}", second.k, plan.k),
                );
            }
        }
    }

    /// P7: one target loses power at this step and comes back. Nothing is lost, and everything
    /// ends.
    fn targets_crash_at(&self, step: u32, counts: &mut Counts) {
        for t in 0..2 {
            let mut which = 0;
            loop {
                let mut world = self.world();
                self.go_on(&mut world, step, &mut |_| ());
                let cuts = world.log_cuts(t);
                counts.replays += 1;
                let (durable, before) = (world.marks.durable, world.marks.complete);
                world.target_crashes(t, which);
                self.go_on(&mut world, u32::MAX, &mut |_| ());
                let last = *world.submitted.keys().next_back().unwrap_or(&Seq::ZERO);
                let marks = world.marks;
                if marks.durable < last || marks.durable < durable || marks.complete < before {
                    panic!(
                        "P7, P8: step {step}, target {t}, log {which}: {marks:?} {}",
                        self.text()
                    );
                }
                let logs = [0, 1].map(|t| world.log(t, None));
                let drives = [0, 1].map(|t| world.drive(t).power_cut());
                let plan = world.plan(&logs);
                self.judge(&world, &plan, &drives);
                which += 1;
                if which >= cuts {
                    break;
                }
            }
        }
    }

    fn text(&self) -> String {
        format!("caches {:?}, schedule {}, groups {:#?}", self.caches, self.schedule, self.groups)
    }

    fn fail(&self, world: &World, plan: &StreamPlan, what: &str) -> ! {
        eprintln!("after {} steps: {what}\n{plan:#?}\n{}", world.steps, self.text());
        exit(1)
    }
}

/// The order of steps: groups or requests first, one target or the other, old operations or new
/// ones.
fn rank(action: Action, schedule: usize) -> (usize, usize) {
    let (kind, target, op) = match action {
        Action::Admit => (0, 0, 0),
        Action::Arrive(t) => (1, t, 0),
        Action::Submit(t) => (2, t, 0),
        Action::Finish(t, op) => (3, t, op),
        Action::Answer(t) => (4, t, 0),
    };
    match schedule {
        // Everything is sent before anything comes back: the most that can be merged and lost.
        0 => (kind * 100 + target * 20 + op, 0),
        // An operation that can be finished is finished first: the marks are as far as they can be.
        1 => ((4 - kind) * 100 + target * 20 + op, 0),
        // The second target first, the newest operations first.
        2 => (kind * 100 + (1 - target) * 20 + (19 - op.min(19)), 0),
        // One target to the end before the other begins.
        _ => (if kind == 0 { 0 } else { 1 + target }, (4 - kind) * 20 + (19 - op.min(19))),
    }
}
