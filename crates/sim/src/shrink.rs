//! Makes a failing scenario smaller while it still fails in the same way.

use crate::scenario::{DeviceSpec, FsSpec, Op, Scenario, What};

/// The maximum number of runs for one shrinking.
const RUNS_MAX: u32 = 800;

struct Shrinker<'a> {
    best: Scenario,
    fails: &'a mut dyn FnMut(&Scenario) -> bool,
    left: u32,
}

/// The smallest scenario that was found and that still `fails`.
#[must_use]
pub fn shrink(scenario: &Scenario, fails: &mut dyn FnMut(&Scenario) -> bool) -> Scenario {
    let mut shrinker = Shrinker { best: scenario.clone(), fails, left: RUNS_MAX };
    loop {
        let before = shrinker.best.clone();
        shrinker.machines();
        shrinker.faults();
        shrinker.steps();
        shrinker.details();
        if shrinker.best == before || shrinker.left == 0 {
            return shrinker.best;
        }
    }
}

impl Shrinker<'_> {
    /// Accepts a smaller scenario if it still fails.
    fn take(&mut self, candidate: Scenario) -> bool {
        if self.left == 0 || candidate == self.best {
            return false;
        }
        self.left -= 1;
        let fails = (self.fails)(&candidate);
        if fails {
            self.best = candidate;
        }
        fails
    }

    /// Leaves out machines, members of the volume, and logs of records, the last ones first.
    fn machines(&mut self) {
        for at in (0..self.best.machines.len()).rev() {
            if let Some(fewer) = without_machine(&self.best, at) {
                self.take(fewer);
            }
        }
        for at in (0..self.best.volume.members.len()).rev() {
            let mut fewer = self.best.clone();
            let (machine, drive) = fewer.volume.members.remove(at);
            // The oracle would take a plain host there for one that writes a drive of the volume.
            fewer.faults.retain(|fault| {
                !matches!(fault.what, What::PlainHost { machine: at, drive: on, .. }
                    if (at, on) == (machine, drive))
            });
            // No draw has a machine without a member. Initiators claim the volume there, too, and
            // would be refused for ever.
            if fewer.volume.members.iter().any(|(other, _)| *other == machine) {
                self.take(fewer);
            }
        }
        for at in (0..self.best.logs.len()).rev() {
            let mut fewer = self.best.clone();
            fewer.logs.remove(at);
            self.take(fewer);
        }
    }

    fn faults(&mut self) {
        let mut at = 0;
        while at < self.best.faults.len() {
            let mut fewer = self.best.clone();
            fewer.faults.remove(at);
            if !self.take(fewer) {
                at += 1;
            }
        }
    }

    /// Drops runs of steps, the longest first.
    fn steps(&mut self) {
        let mut len = self.best.steps.len().next_power_of_two() / 2;
        while len > 0 {
            let mut at = 0;
            while at < self.best.steps.len() {
                let mut fewer = self.best.clone();
                let end = (at + len).min(fewer.steps.len());
                fewer.steps.drain(at..end);
                if !self.take(fewer) {
                    at += len;
                }
            }
            len /= 2;
        }
    }

    /// Simplifies the rest.
    fn details(&mut self) {
        for at in (0..self.best.volume.orderless.len()).rev() {
            let mut simpler = self.best.clone();
            simpler.volume.orderless.remove(at);
            self.take(simpler);
        }
        for at in 0..self.best.steps.len() {
            if let Op::Append(bytes, records) = self.best.steps[at].op {
                self.take_step(at, Op::Append(bytes, 1));
                self.take_step(at, Op::Append(bytes / 8, records));
            }
            if let Op::Followed { writes, durable, .. } = self.best.steps[at].op.clone() {
                self.take_step(at, Op::Group { writes, durable });
            }
            let Op::Group { writes, durable } = self.best.steps[at].op.clone() else { continue };
            for write in 0..writes.len() {
                let mut fewer = writes.clone();
                fewer.remove(write);
                self.take_step(at, Op::Group { writes: fewer, durable });
                let mut shorter = writes.clone();
                shorter[write].1 = 1;
                self.take_step(at, Op::Group { writes: shorter, durable });
            }
            if durable {
                self.take_step(at, Op::Group { writes, durable: false });
            }
        }
        for at in 0..self.best.faults.len() {
            let mut simpler = self.best.clone();
            match &mut simpler.faults[at].what {
                What::Kill { effects, fences, .. } | What::PowerCut { effects, fences, .. } => {
                    (*effects, *fences) = (0, false);
                }
                _ => {}
            }
            self.take(simpler);
        }
        self.file_system();
        self.device();
        let mut alone = self.best.clone();
        alone.second_volume = None;
        self.take(alone);
        let mut plain = self.best.clone();
        plain.client.digests = false;
        plain.client.keep_alive_ms = 0;
        plain.net.split = 0;
        self.take(plain);
        let mut unmerged = self.best.clone();
        unmerged.client.merge = false;
        self.take(unmerged);
    }

    /// Shortens the program on a file system, and leaves out what happens beside its calls.
    fn file_system(&mut self) {
        let mut less = self.best.fs.map_or(0, |fs| fs.calls) / 2;
        while less > 0 {
            let is_taken = self.take_file_system(|fs| fs.calls = fs.calls.saturating_sub(less));
            less = if is_taken { less } else { less / 2 };
        }
        self.take_file_system(|fs| fs.pauses = 0);
        self.take_file_system(|fs| fs.remounts = 0);
        self.take_file_system(|fs| fs.delays = 0);
    }

    /// Shortens the work of a host of a device, and leaves out what happens beside its requests.
    fn device(&mut self) {
        let mut less = self.best.device.map_or(0, |device| device.requests) / 2;
        while less > 0 {
            let shorten = |device: &mut DeviceSpec| {
                device.requests = device.requests.saturating_sub(less);
            };
            let is_taken = self.take_device(shorten);
            less = if is_taken { less } else { less / 2 };
        }
        self.take_device(|device| device.pauses = 0);
        self.take_device(|device| device.detaches = 0);
        self.take_device(|device| device.delays = 0);
        self.take_device(|device| device.reads = 0);
        self.take_device(|device| device.zeroes = 0);
        self.take_device(|device| device.fua = 0);
    }

    fn take_device(&mut self, change: impl FnOnce(&mut DeviceSpec)) -> bool {
        let mut simpler = self.best.clone();
        if let Some(device) = &mut simpler.device {
            change(device);
        }
        simpler != self.best && self.take(simpler)
    }

    fn take_file_system(&mut self, change: impl FnOnce(&mut FsSpec)) -> bool {
        let mut simpler = self.best.clone();
        if let Some(fs) = &mut simpler.fs {
            change(fs);
        }
        self.take(simpler)
    }

    fn take_step(&mut self, at: usize, op: Op) {
        if at < self.best.steps.len() {
            let mut simpler = self.best.clone();
            simpler.steps[at].op = op;
            self.take(simpler);
        }
    }
}

/// The same scenario without a machine. Returns `None` if the volume has no other machine.
fn without_machine(scenario: &Scenario, at: usize) -> Option<Scenario> {
    let mut fewer = scenario.clone();
    fewer.machines.remove(at);
    let leave_out = |members: &mut Vec<(usize, usize)>| {
        members.retain(|(machine, _)| *machine != at);
        members.iter_mut().for_each(|(machine, _)| *machine -= usize::from(*machine > at));
        !members.is_empty()
    };
    fewer.second_volume = fewer.second_volume.and_then(|mut second| {
        let is_there = leave_out(&mut second.volume.members);
        is_there.then_some(second)
    });
    fewer.faults.retain_mut(|fault| match fault.what.machine() {
        None => true,
        Some(machine) => {
            let is_there = *machine != at;
            *machine -= usize::from(*machine > at);
            is_there
        }
    });
    leave_out(&mut fewer.volume.members).then_some(fewer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attempt::{Bounded, RUN_LIMIT};
    use crate::draw::draw;
    use crate::scenario::{Fault, When};

    #[test]
    fn a_cluster_shrinks_to_the_machine_that_matters() {
        let large = |seed: &u64| draw(*seed).machines.len() == 8;
        let mut scenario = draw((1..).find(large).expect("a few seeds have eight machines"));
        scenario.machines[5].blocks += 96;
        let kill = What::Kill { machine: 5, effects: 3, fences: false, down_us: 10 };
        scenario.faults.push(Fault { when: When::Event(100), what: kill });
        let most = scenario.machines[5].blocks;
        // The run itself must also work with the rest.
        let mut bounded = Bounded::new(RUN_LIMIT);
        let small = shrink(&scenario, &mut |smaller| {
            let is_killed = smaller.faults.iter().any(|fault| match fault.what {
                What::Kill { machine, .. } => smaller.machines[machine].blocks == most,
                _ => false,
            });
            is_killed && bounded.run(smaller, None).1.is_none()
        });
        assert_eq!((small.machines.len(), small.faults.len()), (1, 1));
        assert!(small.steps.is_empty(), "{:?}", small.steps);
    }

    #[test]
    fn each_machine_that_is_left_keeps_a_member_of_the_volume() {
        let four = |seed: &u64| draw(*seed).machines.len() == 4;
        let mut scenario = draw((1..).find(four).expect("a few seeds have four machines"));
        scenario.volume.members.push((0, 1));
        let plain = What::PlainHost { machine: 0, drive: 1, lba: 9, more: 0, forgets: false };
        scenario.faults.push(Fault { when: When::Event(u32::MAX), what: plain });
        let small = shrink(&scenario, &mut |smaller| {
            for fault in &smaller.faults {
                if let What::PlainHost { machine, drive, .. } = fault.what {
                    assert!(smaller.volume.members.contains(&(machine, drive)), "{fault:?}");
                }
            }
            smaller.machines.len() > 1
        });
        assert_eq!((small.machines.len(), small.volume.members.len()), (2, 2));
        let has_member = |machine| small.volume.members.iter().any(|(at, _)| *at == machine);
        assert!(has_member(0) && has_member(1), "{:?}", small.volume.members);
    }
}
