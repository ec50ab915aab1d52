//! The owner of the volume, and the actions that are forbidden to all others (traps T8, T21, T25).

use super::blocks::Block;
use super::{Oracle, Promise, Where};
use crate::block::Content;
use crate::core::MS;
use crate::scenario::Scenario;

/// The state of the ownership of the volume.
#[derive(Debug)]
pub(super) struct Ownership {
    /// The owner, until it releases the volume.
    owner: Option<usize>,
    /// The last owner, if it has released the volume and there is no new one.
    former: Option<usize>,
    generation: u32,
    /// The highest generation in any claim that was sent, and in any that may fence an owner.
    claimed: u32,
    claimed_over: u32,
    /// The highest generation of a claim that might fence an owner and was released. The volume has
    /// no owner then.
    over_released: u32,
    /// For each initiator and machine, the time at which the machine last received something from
    /// it, ns.
    last_received: [Vec<u64>; 3],
    /// The time for which an owner keeps the volume after it was last received, ns.
    lease: u64,
    /// For each machine, whether it has answered that the volume is released.
    released: Vec<bool>,
}

impl Ownership {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let never = || vec![0; scenario.machines.len()];
        Self {
            owner: None,
            former: None,
            generation: 0,
            claimed: 0,
            claimed_over: 0,
            over_released: 0,
            last_received: [never(), never(), never()],
            // At least this long; targets add the time to notice a loss. An owner that can't resume
            // has no lease.
            lease: match scenario.volume.engine.replays() {
                true => u64::from(scenario.client.loss_ms) * MS,
                false => 0,
            },
            released: vec![false; scenario.machines.len()],
        }
    }

    pub(super) const fn generation(&self) -> u32 {
        self.generation
    }

    /// Notes the new owner.
    pub(super) fn new_owner(&mut self, client: usize, generation: u32, now: u64) {
        self.last_received[client].fill(now);
        self.owner = Some(client);
        self.former = None;
        self.released.fill(false);
        self.generation = generation;
    }

    /// Whether the owner's lease runs on a machine, or on any machine if `None` (trap T25).
    fn is_leased(&self, machine: Option<usize>, now: u64) -> bool {
        let Some(last_received) = self.owner.map(|owner| &self.last_received[owner]) else {
            return false;
        };
        let mut received =
            last_received.iter().enumerate().filter(|(at, _)| machine.is_none_or(|m| m == *at));
        received.any(|(_, last_received)| now < last_received + self.lease)
    }

    /// Whether the volume has an owner.
    pub(super) const fn is_owned(&self) -> bool {
        self.owner.is_some()
    }

    /// The violation, if an initiator becomes the owner now, by take-over or not.
    pub(super) fn claim_violation(&self, took: bool, now: u64) -> Option<String> {
        let is_free = self.over_released > self.generation;
        (!took && !is_free && self.is_leased(None, now)).then(|| {
            "the volume was claimed from an owner whose lease runs, without a take-over".into()
        })
    }

    /// Whether the owner may have lost the volume on some target. It is not enough that another
    /// initiator wants the volume, or asks for it and is refused. One owner continues undisturbed
    /// until a claim with a higher generation that may fence it is in flight (trap T8): by
    /// take-over, or because its lease is over somewhere (trap T25). From then on the owner may be
    /// fenced on one target after the other, also if the claiming initiator dies before it owns the
    /// volume.
    pub(super) fn may_be_fenced(&self, now: u64) -> bool {
        let is_claimed = self.claimed > self.generation;
        let leased_everywhere = self.owner.is_some_and(|owner| {
            self.last_received[owner].iter().all(|last_received| now < last_received + self.lease)
        });
        self.claimed_over > self.generation || is_claimed && !leased_everywhere
    }
}

impl Oracle {
    /// Notes that an initiator sends a claim of the volume with this generation. `take_over`: it
    /// may fence an owner.
    pub fn claims(&mut self, generation: u32, take_over: bool) {
        let Ownership { claimed, claimed_over, .. } = &mut self.ownership;
        *claimed = generation.max(*claimed);
        if take_over {
            *claimed_over = generation.max(*claimed_over);
        }
    }

    /// Notes that an initiator could not open the volume and releases its claim. The claim may have
    /// fenced an owner.
    pub fn releases_claim(&mut self, generation: u32) {
        let released = &mut self.ownership.over_released;
        *released = generation.max(*released);
    }

    /// Notes that a machine's target has received something from an initiator.
    pub fn received(&mut self, client: usize, machine: usize, now: u64) {
        let Ownership { last_received, lease, .. } = &mut self.ownership;
        let last_received = &mut last_received[client][machine];
        // Once its lease may be over there, it must resume first.
        if now < *last_received + *lease {
            *last_received = now;
        }
    }

    /// Notes that the owner has resumed on a machine's target.
    pub fn resumed(&mut self, client: usize, machine: usize, now: u64) {
        self.ownership.last_received[client][machine] = now;
    }

    /// Notes that an initiator releases the volume. If it is the owner, the volume may be free on
    /// each machine from now on. If another initiator has taken the volume over, nothing changes.
    pub fn releases(&mut self, client: usize) {
        let Ownership { owner, former, .. } = &mut self.ownership;
        if *owner == Some(client) {
            *former = owner.take();
        }
    }

    /// Notes that a machine has answered to an initiator that the volume is released. The answer
    /// may come after the volume has got another owner.
    pub fn released(&mut self, client: usize, machine: usize) {
        if self.ownership.former == Some(client) {
            self.ownership.released[machine] = true;
        }
    }

    /// Whether a machine must accept plain writes to the volume's drives: it has answered that the
    /// volume is released, the volume has not been claimed since, and no data waits there for
    /// recovery (trap T21).
    #[must_use]
    pub fn must_accept(&self, machine: usize) -> bool {
        let Ownership { owner, generation, claimed, ref released, .. } = self.ownership;
        owner.is_none()
            && claimed <= generation
            && released[machine]
            && !self.logless[machine]
            && self.unacknowledged.iter().all(Vec::is_empty)
    }

    /// Checks that a plain write was refused because the drive is in use.
    pub fn plain_write_refused(&mut self, at: Where, must_accept: bool) {
        if must_accept {
            let what = format!("a plain write of {at} was refused, although its volume is free");
            self.broken(Promise::P8, what);
        }
    }

    /// Whether the volume was released, and has been neither owned nor claimed since.
    #[must_use]
    pub const fn is_free(&self) -> bool {
        let Ownership { owner, generation, claimed, .. } = &self.ownership;
        owner.is_none() && *claimed <= *generation
    }

    /// Whether a machine must refuse plain writes to the volume's drives: its owner is there or may
    /// resume within its lease (trap T25), or it has left data that waits for recovery (trap T21).
    /// During a take-over, neither answer is certain.
    #[must_use]
    pub fn is_in_use(&self, machine: usize, now: u64) -> bool {
        !self.ownership.may_be_fenced(now)
            && !self.logless[machine]
            && (self.promised.is_held(machine)
                || self.ownership.is_leased(Some(machine), now)
                || self.is_unrecovered(machine))
    }

    /// Whether a write of a group is done on a machine while another write of that group or of an
    /// earlier one is not done. Then the group can't have been released.
    fn is_unrecovered(&self, machine: usize) -> bool {
        if !self.lost.is_empty() || !self.promised.is_logged() {
            return false;
        }
        let done = |number: u64| self.completed[number as usize];
        let here = |block: &&Block| block.at.machine == machine;
        let mut last = vec![None; self.eras[self.current].len()];
        for wr in self.blocks.iter().filter(here).flat_map(|block| &block.writes) {
            if done(wr.number) {
                let last = &mut last[usize::from(wr.stream)];
                *last = (*last).max(Some(wr.seq));
            }
        }
        (0..).zip(&self.eras[self.current]).zip(last).any(|((stream, history), last)| {
            let Some(last) = last else { return false };
            // Once its log is being settled, that may be done here, and not on another machine.
            if self.settling.contains(&stream) {
                return false;
            }
            let open = |(block, number): &(u32, u64)| {
                !done(*number) && !self.blocks[*block as usize].discards(*number)
            };
            let (from, to) = (history.upto(history.complete), history.upto(last));
            history.groups[..to].iter().skip(from).any(|group| group.writes.iter().any(open))
        })
    }

    /// Notes that the write of a plain host has arrived at a machine that has no reason to refuse
    /// it.
    pub fn plain_write_permitted(&mut self, at: Where, content: Content) {
        self.promised.frees();
        // What is in the prepare area may be copied to any block of its drive.
        let is_in_area = self.promised.redirects() && self.promised.is_in_area(at.lba);
        let may_have = |block: &&mut Block| {
            let is_of_drive = (block.at.machine, block.at.drive) == (at.machine, at.drive);
            block.at == at || is_in_area && is_of_drive
        };
        for block in self.blocks.iter_mut().filter(may_have) {
            if block.plain_contents.last() != Some(&content) {
                block.plain_contents.push(content);
            }
        }
        self.outside.retain(|(there, _)| *there != at);
    }

    /// Notes the answer to a plain host: its block is written.
    pub fn plain_write_done(&mut self, at: Where, _content: Content, free: bool) {
        if !free {
            let what = format!("a plain host wrote {at}, although its volume is in use");
            self.broken(Promise::P5, what);
        }
    }

    /// Notes that the block of a plain host is durable. From now on the block must hold this
    /// content, unless the volume has got an owner since.
    pub fn plain_flush_done(&mut self, at: Where, content: Content) {
        if let Some(block) = self.blocks.iter_mut().find(|block| block.at == at)
            && !self.logless[at.machine]
            && block.plain_contents == [content]
            && block.writes.iter().all(|wr| wr.number < content)
        {
            block.hold(content);
        }
    }

    /// The generation of the last owner.
    #[must_use]
    pub const fn generation(&self) -> u32 {
        self.ownership.generation
    }

    /// How often the FLUSH of a plain host has fixed the content of a block.
    #[must_use]
    pub fn held_count(&self, at: Where) -> u64 {
        self.blocks.iter().find(|block| block.at == at).map_or(0, |block| block.held_count)
    }

    /// Checks a block that a plain host has read. `since`: if the volume was free when the read
    /// arrived, the generation of its last owner then. If the volume has had no owner since, and is
    /// not claimed, everything must be readable there.
    ///
    /// `held_count` is that of the block when the read arrived. If another plain host has written
    /// and flushed the block since, the read may return the content before that: its answer may
    /// take longer than both.
    pub fn plain_read_done(
        &mut self,
        at: Where,
        found: Content,
        since: Option<u32>,
        held_count: u64,
    ) {
        let Ownership { owner, generation, claimed, .. } = self.ownership;
        if since != Some(generation)
            || owner.is_some()
            || generation == 0
            || claimed > generation
            || !self.lost.is_empty()
            || self.held_count(at) != held_count
        {
            return;
        }
        let block = self.blocks.iter().find(|block| block.at == at);
        if let Some(block) = block.filter(|block| !block.may_hold_last(found)) {
            let what = format!(
                "a plain host read {} from {at} of a free volume ({})",
                super::Named(found),
                block.describe()
            );
            self.broken(Promise::P5, what);
        }
    }
}
