//! A second volume in the same logs. It has its own owner, drives, streams and oracle.
//!
//! The initiators use one volume each: the one that is in [`Core`]. So the second volume's state is
//! put there while its owner acts.

use riopipe_order::attribute::VolumeId;

use super::{World, map};
use crate::client::{Client, Refused, SECOND_VOLUME};
use crate::core::{Core, Ev, MS};
use crate::machine::FIRST_GENERATION;
use crate::oracle::{Drives, Oracle, Where};
use crate::scenario::{Scenario, Step, VolumeSpec};

/// The second volume.
const VOLUME: VolumeId = VolumeId(*b"second of volume");
/// The name of the second volume.
const NAME: &str = "second";
/// The number of its first write. So its contents differ from those of the first volume.
const NUMBERS: usize = 1 << 16;

/// The part of [`Core`] that belongs to one volume.
pub(crate) struct Side {
    pub(crate) id: VolumeId,
    pub(crate) name: &'static str,
    pub(crate) oracle: Oracle,
    pub(crate) map: Vec<Where>,
    pub(crate) steps: Vec<(Vec<usize>, usize)>,
    pub(crate) volume: VolumeSpec,
    pub(crate) list: Vec<Step>,
    pub(crate) label_generation: u32,
}

/// The second volume and its owner.
pub(super) struct SecondVolume {
    pub(super) side: Side,
    pub(super) client: Client,
    /// The number of times that it releases its volume, or is killed, before its steps are done.
    restarts_left: u32,
    done: bool,
}

impl SecondVolume {
    /// The second volume of a scenario, if it has one.
    pub(super) fn of(scenario: &Scenario) -> Result<Option<Self>, String> {
        let Some(spec) = &scenario.second_volume else { return Ok(None) };
        let (volume, list) = (spec.volume.clone(), spec.steps.clone());
        let scenario_of_second = Scenario { volume, steps: list, ..scenario.clone() };
        let map = map(&scenario_of_second)?;
        let mut oracle = Oracle::new(&scenario_of_second, &map);
        oracle.number_from(NUMBERS);
        let side = Side {
            id: VOLUME,
            name: NAME,
            oracle,
            map,
            steps: Core::steps_of(&scenario_of_second),
            volume: scenario_of_second.volume,
            list: scenario_of_second.steps,
            label_generation: FIRST_GENERATION,
        };
        let client = Client::new(SECOND_VOLUME);
        Ok(Some(Self { side, client, restarts_left: spec.lives, done: false }))
    }

    /// Whether a drive belongs to its volume.
    pub(super) fn has(&self, machine: usize, drive: usize) -> bool {
        self.side.volume.members.contains(&(machine, drive))
    }
}

impl World {
    /// Runs an action for the second volume, if there is one.
    pub(super) fn with_second_volume<T>(
        &mut self,
        act: impl FnOnce(&mut Client, &Drives<'_>, &mut Core) -> T,
    ) -> Option<T> {
        let Self { core, machines, second_volume, .. } = self;
        let second_volume = second_volume.as_mut()?;
        core.swap(&mut second_volume.side);
        let done = act(&mut second_volume.client, &Drives(machines), core);
        core.swap(&mut second_volume.side);
        Some(done)
    }

    /// Reports an event of the logs to the oracles of all volumes.
    pub(super) fn each_oracle(&mut self, mut report: impl FnMut(&mut Oracle, u64)) {
        let now = self.core.now;
        report(&mut self.core.oracle, now);
        if let Some(second_volume) = &mut self.second_volume {
            report(&mut second_volume.side.oracle, now);
        }
    }

    /// Does the operator's work for the second volume: starts its owner again, decides how to
    /// answer refusals, and closes it when all is done.
    pub(super) fn supervise_second_volume(&mut self) {
        let Some(second_volume) =
            self.second_volume.as_mut().filter(|second_volume| !second_volume.done)
        else {
            return;
        };
        let SecondVolume { client, side, restarts_left, done } = second_volume;
        if !side.oracle.has_lost_log() {
            client.set_may_accept_lost(false);
        }
        if !client.is_up() {
            return;
        }
        match client.take_refused() {
            None | Some(Refused::Other) => {}
            Some(Refused::Drives) => return self.put_drives_back(),
            // Only an earlier process of its own owner can have it.
            Some(Refused::Owned) => client.set_may_take_over(true),
            Some(Refused::Log(machine)) => {
                return self.handle_refused_log_of_second_volume(machine);
            }
            Some(Refused::OldLog) => return self.put_logs_back(),
            Some(Refused::LogFailed(machine)) => return self.repair_log(machine),
        }
        let faults_stopped = self.faults_stopped_at.is_some();
        if client.is_over() {
            let closed = client.is_closed();
            if closed
                && (faults_stopped || *restarts_left == 0)
                && side.steps.iter().all(|(s, begun)| *begun >= s.len())
            {
                *done = true;
                side.oracle.check_end(&Drives(&self.machines));
                self.core.trace(|| "the second volume is closed".into());
                return self.crash_second_volume(true);
            }
            return self.restart_second_volume();
        }
        if client.is_broken() || client.is_fenced() {
            return self.restart_second_volume();
        }
        let (chance, may_fault) = (self.core.rng.below(400), *restarts_left > 0 && !faults_stopped);
        let Some(work) = self.with_second_volume(|client, _, core| client.has_work(core)) else {
            return;
        };
        let Some(second_volume) = &mut self.second_volume else { return };
        match chance {
            0..4 if may_fault => {
                second_volume.restarts_left -= 1;
                self.restart_second_volume();
            }
            4..12 if may_fault => {
                second_volume.restarts_left -= 1;
                second_volume.client.close();
            }
            _ if !work => second_volume.client.close(),
            _ => {}
        }
    }

    fn handle_refused_log_of_second_volume(&mut self, machine: usize) {
        if self.machines.iter().any(|machine| machine.right_log.is_some()) {
            return self.put_logs_back();
        }
        self.core.trace(|| format!("the second volume's log on target {machine} is given up"));
        if let Some(second_volume) = &mut self.second_volume {
            second_volume.side.oracle.log_lost(machine);
            second_volume.client.set_may_accept_lost(true);
        }
        self.give_up_log(machine);
    }

    fn restart_second_volume(&mut self) {
        self.crash_second_volume(true);
        self.core.after(MS, Ev::StartClient(SECOND_VOLUME));
    }

    /// Ends the process of the second volume's initiator at its present point.
    pub(super) fn crash_second_volume(&mut self, notified: bool) {
        let Some(second_volume) = self.second_volume.as_mut().filter(|it| it.client.is_up()) else {
            return;
        };
        second_volume.client.kill();
        self.core.trace(|| "the second volume's initiator dies".into());
        self.break_connections(SECOND_VOLUME, notified);
    }

    /// Whether the second volume is closed, or there is none.
    pub(super) fn second_volume_is_done(&self) -> bool {
        self.second_volume.as_ref().is_none_or(|second_volume| second_volume.done)
    }

    /// Reports a broken promise of the second volume as one of the run.
    pub(super) fn check_second_volume(&mut self) {
        let Some(second_volume) = &self.second_volume else { return };
        if let Some(violation) = second_volume.side.oracle.violation() {
            let (promise, what) = (violation.promise, format!("second volume: {}", violation.what));
            self.core.oracle.broken(promise, what);
        }
    }

    /// The progress of the second volume, formatted for people.
    pub(super) fn describe_second_volume(&mut self) -> String {
        let text = self.with_second_volume(|client, _, core| client.describe(core));
        text.map_or_else(String::new, |text| format!(" second volume: {text};"))
    }
}

#[cfg(test)]
mod tests {
    use crate::draw::draw;
    use crate::oracle::Promise;

    #[test]
    fn volumes_with_a_log_in_common_are_checked_apart() {
        let mut second = 0;
        for seed in 0..300 {
            let scenario = draw(seed);
            let Some(spec) = &scenario.second_volume else { continue };
            second += 1;
            assert!(spec.volume.members.iter().all(|m| !scenario.volume.members.contains(m)));
            let outcome = super::super::run(&scenario, None);
            assert_eq!(outcome.violation.map(|v| v.promise), None::<Promise>, "seed {seed}");
        }
        assert!(second > 5, "{second} of 300 have a second volume");
    }
}
