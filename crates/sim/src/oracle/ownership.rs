//! Whose the volume is, and what nobody else may do to it (T8, T21, T25).

use super::blocks::Block;
use super::{Oracle, Promise, Where};
use crate::block::Content;
use crate::core::MS;
use crate::scenario::Scenario;

/// Who has the volume.
#[derive(Debug)]
pub(super) struct Ownership {
    /// The owner, until it gives the volume back.
    owner: Option<usize>,
    generation: u32,
    /// The highest generation in any claim that was sent, and in any that may fence an owner.
    claimed: u32,
    claimed_over: u32,
    /// The highest generation of a claim that might fence an owner and was given back: nobody keeps
    /// the volume then.
    over_given_back: u32,
    /// When each initiator was heard last by each machine.
    heard: [Vec<u64>; 3],
    /// How long an owner keeps the volume after it was heard last, ns.
    lease: u64,
    /// Which machines have said that they have the volume back.
    given_back: Vec<bool>,
}

impl Ownership {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let never = || vec![0; scenario.machines.len()];
        Self {
            owner: None,
            generation: 0,
            claimed: 0,
            claimed_over: 0,
            over_given_back: 0,
            heard: [never(), never(), never()],
            // At least; targets add what it takes to notice a loss. Who can't go on has none.
            lease: match scenario.volume.engine.is_logged() {
                true => u64::from(scenario.client.loss_ms) * MS,
                false => 0,
            },
            given_back: vec![false; scenario.machines.len()],
        }
    }

    pub(super) const fn generation(&self) -> u32 {
        self.generation
    }

    /// It has it now.
    pub(super) fn has_it(&mut self, client: usize, generation: u32, now: u64) {
        self.heard[client].fill(now);
        self.owner = Some(client);
        self.given_back.fill(false);
        self.generation = generation;
    }

    /// Whether the owner's lease runs on a machine, on any of them (T25).
    fn is_leased(&self, machine: Option<usize>, now: u64) -> bool {
        let Some(heard) = self.owner.map(|owner| &self.heard[owner]) else { return false };
        let mut of = heard.iter().enumerate().filter(|(at, _)| machine.is_none_or(|m| m == *at));
        of.any(|(_, heard)| now < heard + self.lease)
    }

    /// Whether somebody has it.
    pub(super) const fn is_owned(&self) -> bool {
        self.owner.is_some()
    }

    /// What is wrong with somebody's having the volume now, taken over or not.
    pub(super) fn robs(&self, took: bool, now: u64) -> Option<String> {
        let is_free = self.over_given_back > self.generation;
        (!took && !is_free && self.is_leased(None, now)).then(|| {
            "the volume was taken from an owner whose lease runs, and nobody said take-over".into()
        })
    }

    /// Whether the owner may have lost the volume on some target. It is not enough that somebody
    /// wants the volume, or asks for it and is refused: one owner lives undisturbed until a claim
    /// with a higher generation is on its way that may fence it (T8): by take-over, or because its
    /// lease is over somewhere (T25). From then on the owner may be fenced on one target after the
    /// other, also if whoever claims dies before it has the volume.
    pub(super) fn is_challenged(&self, now: u64) -> bool {
        let some = self.claimed > self.generation;
        let leased_everywhere = self
            .owner
            .is_some_and(|owner| self.heard[owner].iter().all(|heard| now < heard + self.lease));
        self.claimed_over > self.generation || some && !leased_everywhere
    }
}

impl Oracle {
    /// An initiator sends a claim of the volume with this generation, and may fence an owner or not.
    pub fn claims(&mut self, generation: u32, take_over: bool) {
        let Ownership { claimed, claimed_over, .. } = &mut self.ownership;
        *claimed = generation.max(*claimed);
        if take_over {
            *claimed_over = generation.max(*claimed_over);
        }
    }

    /// An initiator that could not open the volume gives back what it may have claimed, and may have
    /// fenced an owner.
    pub fn gives_back_claim(&mut self, generation: u32) {
        let given_back = &mut self.ownership.over_given_back;
        *given_back = generation.max(*given_back);
    }

    /// A machine's target has heard of an initiator.
    pub fn heard(&mut self, client: usize, machine: usize, now: u64) {
        let Ownership { heard, lease, .. } = &mut self.ownership;
        let heard = &mut heard[client][machine];
        // Once its lease may be over there, it has to be let back in.
        if now < *heard + *lease {
            *heard = now;
        }
    }

    /// A machine's target has let the owner back in.
    pub fn resumed(&mut self, client: usize, machine: usize, now: u64) {
        self.ownership.heard[client][machine] = now;
    }

    /// The owner gives the volume back. From now on each machine may have it back.
    pub fn gives_back(&mut self) {
        self.ownership.owner = None;
    }

    /// A machine has said that it has the volume back.
    pub fn given_back(&mut self, machine: usize) {
        self.ownership.given_back[machine] = true;
    }

    /// Whether plain writes of the volume's drives on a machine must be taken: it has said that it
    /// has the volume back, nobody has claimed it since, and nothing waits there for anybody (T21).
    #[must_use]
    pub fn is_welcome(&self, machine: usize) -> bool {
        let Ownership { owner, generation, claimed, ref given_back, .. } = self.ownership;
        owner.is_none()
            && claimed <= generation
            && given_back[machine]
            && !self.logless[machine]
            && self.unacknowledged.iter().all(Vec::is_empty)
    }

    /// A plain writer was refused because the drive is somebody's.
    pub fn turned_away(&mut self, at: Where, welcome: bool) {
        if welcome {
            let what = format!("a plain writer may not write {at}, though nobody has its volume");
            self.broken(Promise::P8, what);
        }
    }

    /// Whether nobody has the volume since it was given back, and nobody has claimed it.
    #[must_use]
    pub const fn is_free(&self) -> bool {
        let Ownership { owner, generation, claimed, .. } = &self.ownership;
        owner.is_none() && *claimed <= *generation
    }

    /// Whether plain writes of the volume's drives on a machine must be refused: its owner is there
    /// or may come back within its lease (T25), or it has left something that waits for recovery
    /// (T21). While somebody takes the volume over, this is between the two.
    #[must_use]
    pub fn is_in_use(&self, machine: usize, now: u64) -> bool {
        !self.ownership.is_challenged(now)
            && !self.logless[machine]
            && (self.promised.is_held(machine)
                || self.ownership.is_leased(Some(machine), now)
                || self.is_unrecovered(machine))
    }

    /// Whether a write of a group is done on a machine, and some other of it or of an earlier one is
    /// not: the group can't have been released.
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
        self.eras[self.current].iter().zip(last).any(|(history, last)| {
            let Some(last) = last else { return false };
            let open = |(block, number): &(u32, u64)| {
                !done(*number) && !self.blocks[*block as usize].discards(*number)
            };
            let (from, to) = (history.upto(history.complete), history.upto(last));
            history.groups[..to].iter().skip(from).any(|group| group.writes.iter().any(open))
        })
    }

    /// A plain writer's write of a block has come to a machine that has no reason to refuse it.
    pub fn may_intrude(&mut self, at: Where, content: Content) {
        self.promised.frees();
        if let Some(block) = self.blocks.iter_mut().find(|block| block.at == at)
            && block.alien.last() != Some(&content)
        {
            block.alien.push(content);
        }
        self.outside.retain(|(there, _)| *there != at);
    }

    /// A plain writer was told that its block is written.
    pub fn intruded(&mut self, at: Where, _content: Content, free: bool) {
        if !free {
            let what = format!("a plain writer wrote {at}, though its volume is in use");
            self.broken(Promise::P5, what);
        }
    }

    /// And that it is durable: from now on it has to be there, unless the volume has found an owner
    /// meanwhile.
    pub fn intruded_durably(&mut self, at: Where, content: Content) {
        if let Some(block) = self.blocks.iter_mut().find(|block| block.at == at)
            && !self.logless[at.machine]
            && block.alien == [content]
            && block.writes.iter().all(|wr| wr.number < content)
        {
            block.hold(content);
        }
    }

    /// A plain reader has read a block. While nobody has the volume, and nobody has claimed it
    /// since it was given back, all of it is there to be read.
    pub fn looked_at(&mut self, at: Where, found: Content, free: bool) {
        let Ownership { owner, generation, claimed, .. } = self.ownership;
        if !free
            || owner.is_some()
            || generation == 0
            || claimed > generation
            || !self.lost.is_empty()
        {
            return;
        }
        let block = self.blocks.iter().find(|block| block.at == at);
        if let Some(block) = block.filter(|block| !block.may_hold_last(found)) {
            let what = format!(
                "a plain reader found {} in {at}, which nobody has ({})",
                super::Named(found),
                block.describe()
            );
            self.broken(Promise::P5, what);
        }
    }
}
