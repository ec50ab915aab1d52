//! Rio's engine: everything is sent at once, with an ordering attribute each; the targets log,
//! the initiator completes in order (Rio paper §4).

use super::base::Base;
use super::credits::Credits;
use super::{
    Bound, Cause, Dispatch, Engine, Failure, Limits, Marks, Payload, Refusal, Request, RequestId,
    Write,
};
use crate::attribute::{Member, Seq};
use crate::topology::Topology;

/// The `rio` engine of one stream.
#[derive(Debug)]
pub struct Rio<P> {
    base: Base<P>,
    credits: Credits,
    /// The last ordinal given on each server (T5: dense per stream and server).
    ordinals: alloc::vec::Vec<u32>,
    /// The last group with a joint FLUSH.
    flushed: Seq,
    /// A flush that the engine itself put in, until it is released: it alone may use the slots
    /// reserved for flushes, so there is one at a time (T13).
    forced: Option<Seq>,
    /// Up to here somebody waits for durability.
    wanted: Seq,
    /// The last tag seen: a forced flush repeats it, so that recovery never loses it.
    tag: u64,
    /// How many flushes were forced, for the curious.
    forced_count: u64,
}

/// Whether a group flushes, and for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flush {
    No,
    /// The caller wants the group durable.
    Asked,
    /// The engine makes room.
    Forced,
}

impl<P: Payload> Rio<P> {
    /// The engine of a new stream.
    #[must_use]
    pub fn new(topology: Topology, limits: Limits) -> Self {
        let servers = topology.servers().len();
        Self {
            credits: Credits::new(&topology),
            ordinals: alloc::vec![0; servers],
            flushed: limits.start,
            forced: None,
            wanted: limits.start,
            tag: 0,
            forced_count: 0,
            base: Base::new(topology, limits),
        }
    }

    /// Flushes that the engine put in because nobody asked for one (T1).
    #[must_use]
    pub fn forced_flushes(&self) -> u64 {
        self.forced_count
    }

    fn any_dirty(&self) -> bool {
        self.base.dirty.iter().any(Option::is_some)
    }

    /// Takes the shaped and numbered group in.
    fn commit(&mut self, flush: Flush, bytes: u64) -> Seq {
        let base = &mut self.base;
        let requests = base.shaped.len() as u32;
        let seq = base.window.last().next();
        base.note_dirty(seq);
        if flush != Flush::No {
            base.dirty.fill(None);
            self.flushed = seq;
        }
        // Without volatile caches, or with none dirty, what is complete is durable.
        let vouches = base.dirty.iter().all(Option::is_none);
        let opened = match flush {
            // Overlapped: nobody waits for it, so it holds up no completion.
            Flush::Forced => base.window.open_silent(requests),
            Flush::No | Flush::Asked => base.window.open(requests, vouches, bytes),
        };
        debug_assert_eq!(opened, seq);
        if let Some(server) = base.merge_into_tail() {
            self.credits.stretch(server, seq);
        } else {
            for index in 0..base.shaped.len() {
                let server = base.request(base.shaped[index]).server;
                self.credits.take(server, seq);
            }
            base.enqueue();
        }
        seq
    }

    /// Without PLP nothing is released until flushed: when nobody flushes, do it before the log
    /// or the replay memory fills, overlapped with the writing (T1, T14).
    fn force_flush(&mut self) {
        if self.forced.is_some() || self.base.failure.is_some() || !self.any_dirty() {
            return;
        }
        let seq = self.base.window.last().next();
        self.base.add_joint_flush(seq, self.tag);
        // As many entries as there are dirty members at most: they fit the reserve.
        if self.base.number().is_ok() {
            self.forced = Some(seq);
            self.forced_count += 1;
            self.commit(Flush::Forced, 0);
        }
    }

    fn reclaim(&mut self) {
        let released = self.base.window.released();
        self.credits.release(released);
        self.base.window.forget(released);
        if self.forced.is_some_and(|seq| seq <= released) {
            self.forced = None;
        }
        if self.wanted > self.flushed {
            // Asked for while another forced flush had the reserve.
            self.force_flush();
        }
    }

    fn pressed(&self) -> bool {
        self.credits.half_used()
            || self.base.window.kept_bytes() * 2 >= self.base.limits.kept_bytes_max
    }

    fn shape(&mut self, writes: &[Write<P>], tag: u64, durable: bool) -> Result<(), Refusal> {
        let base = &mut self.base;
        let seq = base.window.last().next();
        base.per_server.fill(0);
        base.shape(writes, seq, tag)?;
        if durable {
            base.add_joint_flush(seq, tag);
            if base.shaped.is_empty() {
                // Nothing to flush anywhere, but the group must be on record.
                base.add_flush(Member(0), seq, tag);
            }
        }
        base.number()?;
        if let Err((bound, never)) = self.credits.check(&base.per_server) {
            base.unshape();
            return Err(if never { Refusal::TooLarge(bound) } else { Refusal::Full(bound) });
        }
        Ok(())
    }
}

impl<P: Payload + Send> Engine<P> for Rio<P> {
    fn admit(&mut self, writes: &[Write<P>], tag: u64, durable: bool) -> Result<Seq, Refusal> {
        let bytes = self.base.vet(writes, durable)?;
        if self.pressed() {
            self.force_flush();
        }
        if !self.base.has_room(bytes) {
            // What is kept may be all that nobody flushed.
            self.force_flush();
            return Err(Refusal::Full(Bound::Memory));
        }
        if let Err(refusal) = self.shape(writes, tag, durable) {
            if matches!(refusal, Refusal::Full(_)) {
                self.force_flush();
            }
            return Err(refusal);
        }
        self.tag = tag;
        Ok(self.commit(if durable { Flush::Asked } else { Flush::No }, bytes))
    }

    fn next(&mut self, server: u16) -> Option<Dispatch> {
        let id = self.base.queues[usize::from(server)].pop_front()?;
        let ordinal = &mut self.ordinals[usize::from(server)];
        *ordinal = ordinal.wrapping_add(1);
        Some(Dispatch { id, ordered: Some((*ordinal, self.base.window.released())) })
    }

    fn request(&self, id: RequestId) -> &Request<P> {
        self.base.request(id)
    }

    fn done(&mut self, id: RequestId, result: Result<(), Cause>) {
        match result {
            Ok(()) => {
                let request = self.base.request(id);
                let (first, last) = (request.seq, request.seq_end());
                self.base.window.request_done(first, last);
            }
            Err(cause) => self.base.fail(id, cause),
        }
        self.base.retire(id);
    }

    fn poll(&mut self) -> Marks {
        let marks = self.base.window.deliver();
        self.reclaim();
        marks
    }

    fn ask_durable(&mut self, seq: Seq) {
        self.wanted = self.wanted.max(seq.min(self.base.window.last()));
        if self.wanted > self.flushed {
            self.force_flush();
        }
    }

    fn kept_after(&self) -> Seq {
        self.base.window.forgotten()
    }

    fn released(&self) -> Seq {
        self.base.window.released()
    }

    fn last(&self) -> Seq {
        self.base.window.last()
    }

    fn failure(&self) -> Option<Failure> {
        self.base.failure
    }

    fn poison(&mut self, failure: Failure) {
        self.base.poison(failure);
    }

    fn flush_failed_elsewhere(&mut self, member: Member) {
        if let Some(failure) = self.base.harmed_by_flush(member) {
            self.poison(failure);
        }
    }

    fn writes_pending(&self, lba: u64, blocks: u32) -> bool {
        self.base.writes_pending(lba, blocks)
    }

    fn is_idle(&self) -> bool {
        self.base.live() == 0
    }
}
