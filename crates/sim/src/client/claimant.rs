//! A host that does not use the volume. It claims volumes of its own on a drive, one after the
//! other, and releases each. The volumes that the target remembers because of it are bounded (trap
//! T28).

use riopipe_nvme::command::Status;
use riopipe_order::attribute::VolumeId;
use riopipe_session::initiator::association::AssociationConfig;
use riopipe_session::target::limits::LEASE_MS_MAX;
use riopipe_session::wire::{self as rio, Claim};

use super::server::{Server, TargetEvent, association};
use crate::core::Core;
use crate::machine::subnqn;
use crate::network::{ClientEnd, Role};
use crate::oracle::Promise;

/// The number of the first claimant. Initiators are counted from 0.
pub const FIRST: usize = 1_000;

/// One step with a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Claims it, with a longer lease than any target may grant.
    Forever,
    /// Claims it.
    Claim,
    /// Releases it.
    Release,
    /// Resumes the previous volume. The target has dropped it to make space for this one.
    Resume,
}

const STEPS: [Step; 4] = [Step::Forever, Step::Claim, Step::Release, Step::Resume];

/// A host that claims and releases volumes of its own, one after the other.
pub struct Claimant {
    index: usize,
    machine: usize,
    drive: usize,
    config: AssociationConfig,
    server: Server,
    /// The number of steps done.
    done: usize,
    /// The number of steps in all.
    steps: usize,
    /// The last volume but one that the host owned.
    before_previous: Option<u32>,
    /// The last volume that the host owned.
    previous: Option<u32>,
    asked: bool,
    over: bool,
}

impl Claimant {
    /// A claimant that has not begun. It claims `volumes` volumes.
    #[must_use]
    pub fn new(index: usize, machine: usize, drive: usize, volumes: u32) -> Self {
        let hostnqn = format!("nqn.2026-01.io.example:claimant{index}");
        let config = association(hostnqn, [0xdd; 16], subnqn(machine));
        let config = AssociationConfig { report_ns: None, ..config };
        Self {
            index: FIRST + index,
            machine,
            drive,
            config,
            server: Server::new(machine as u16),
            done: 0,
            steps: volumes as usize * STEPS.len(),
            before_previous: None,
            previous: None,
            asked: false,
            over: false,
        }
    }

    const fn end(&self) -> ClientEnd {
        ClientEnd { client: self.index, incarnation: 0, role: Role::Admin(self.machine as u16) }
    }

    /// Begins its first step.
    pub fn start(&mut self, core: &mut Core) {
        self.server.attach(self.config.clone(), self.end(), core);
        self.take_events(core);
    }

    /// Handles a deadline for its target.
    pub fn wake(&mut self, core: &mut Core) {
        if !self.over {
            self.server.wake(self.end(), core);
            self.take_events(core);
        }
    }

    /// Handles the event of its target. The claimant ends when the target is lost.
    fn take_events(&mut self, core: &mut Core) {
        while let Some(event) = self.server.event(core) {
            if matches!(event, TargetEvent::Lost { .. }) {
                return self.close(core);
            }
        }
        while let Some(status) = self.server.answer().filter(|_| !self.over) {
            self.answered(status, core);
        }
        if !self.over && self.server.is_up() && !core::mem::replace(&mut self.asked, true) {
            self.send_step(core);
        }
    }

    /// Whether it has done all its steps, or has ended before.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        self.over
    }

    fn step(&self) -> (Step, u32) {
        (STEPS[self.done % STEPS.len()], (self.done / STEPS.len()) as u32)
    }

    fn send_step(&mut self, core: &mut Core) {
        if self.done == self.steps {
            return self.close(core);
        }
        let (step, nth) = self.step();
        let claim = |nth: u32, resume, lease_ms| Claim {
            unlogged: true,
            resume,
            lease_ms,
            ..Claim::plain(id(self.index, nth), 1, 1, rio::in_order([self.drive as u32 + 1]))
        };
        let claim = match step {
            Step::Forever => claim(nth, false, LEASE_MS_MAX + 1),
            Step::Claim => claim(nth, false, 0),
            Step::Resume => claim(self.before_previous.unwrap_or(nth), true, 0),
            Step::Release => {
                let release = rio::release_command(id(self.index, nth), false);
                return self.server.send_command(release, &[], self.end(), core);
            }
        };
        self.server.send_command(rio::claim_command(), &claim.encode(), self.end(), core);
    }

    fn answered(&mut self, status: Status, core: &mut Core) {
        let (machine, (step, nth)) = (self.machine, self.step());
        let granted = status.is_ok();
        match step {
            Step::Forever if granted => {
                let what =
                    format!("target {machine} has granted a lease that is longer than the maximum");
                core.oracle.broken(Promise::P8, what);
            }
            Step::Resume if granted && self.before_previous.is_some() => {
                let what = format!(
                    "target {machine} has let an owner resume, although another owner has had its \
                     drive in between"
                );
                core.oracle.broken(Promise::P5, what);
            }
            Step::Claim if granted => {
                self.before_previous = self.previous.replace(nth);
            }
            _ => {}
        }
        self.done += 1;
        self.send_step(core);
    }

    /// Receives bytes of its connection.
    pub fn receive(&mut self, conn: usize, bytes: &[u8], core: &mut Core) {
        if !self.over {
            self.server.received(conn, bytes, self.end(), core);
            self.take_events(core);
        }
    }

    /// Ends the claimant: its connection has ended, or must end.
    pub fn close(&mut self, core: &mut Core) {
        if !core::mem::replace(&mut self.over, true) {
            self.server.leave(self.end(), core);
        }
    }
}

/// The id of a claimant's volume. No other volume has it.
fn id(claimant: usize, nth: u32) -> VolumeId {
    let mut id = *b"claimed .... ...";
    id[8..12].copy_from_slice(&(claimant as u32).to_le_bytes());
    id[12..].copy_from_slice(&nth.to_le_bytes());
    VolumeId(id)
}
