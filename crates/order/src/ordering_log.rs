//! The ordering log of one stream on one server: a circular log of attributes (paper §4.3.2).
//!
//! [`StreamLog`] keeps one *partition* of a log region: a mark area and a ring of 64-byte slots
//! (`docs/log-format.md`). The target appends each ordered request's attribute and fences before
//! it submits the write, stores the persist word and fences before it answers (T7), and forgets
//! an entry only when the initiator has released it *and* the mark that says so is durable (T1).

use alloc::vec;
use alloc::vec::Vec;

use crate::attribute::{Attribute, Seq};
use crate::entry::{ENTRY_BYTES, Entry, Life, PartitionId, Position, Unsettled, encode, loggable};
use crate::region::{Crc32c, Region, RegionError};
pub use error::{AppendError, BindError, Damage, FormatError, LogError};
use mark::{MARK_BYTES, Mark};
pub use scan::{LoggedEntry, Scan};
use scan::{SLOTS_AT, read_mark, scan};

mod error;
mod mark;
mod scan;

use error::TooSmall;

/// Bytes that a partition with this many slots takes.
#[must_use]
pub const fn partition_bytes(slots: u32) -> usize {
    SLOTS_AT + slots as usize * ENTRY_BYTES
}

/// Fewest slots of a partition.
pub const SLOTS_MIN: u32 = 4;
/// Most slots of a partition: positions of one lap must fit well inside 32 bits.
pub const SLOTS_MAX: u32 = 1 << 24;

#[derive(Debug)]
enum State {
    Unbound,
    Bound,
    Failed(RegionError),
}

/// One partition: the log of one stream on one server.
#[derive(Debug)]
pub struct StreamLog<R> {
    region: R,
    crc: Crc32c,
    seed: u32,
    slots: u32,
    state: State,
    /// For each slot, the last group of the entry appended there.
    seqs: Vec<Seq>,
    /// The next append.
    next: u64,
    next_slot: u32,
    /// Appends stop here: the durable mark's head plus `slots`, or 0 while nothing may be appended.
    limit: u64,
    /// The first position not released, in memory.
    head: u64,
    head_slot: u32,
    /// Everything before is durable.
    fenced: u64,
    /// The first position of this binding.
    bound_from: u64,
    released: Seq,
    /// The mark as it is durable.
    durable: Mark,
}

impl<R: Region> StreamLog<R> {
    /// Makes a new, empty partition of the whole region, durable before it returns. Whatever the
    /// region held is gone.
    ///
    /// # Errors
    ///
    /// [`FormatError::TooSmall`] for less than [`SLOTS_MIN`] slots, or the region failed.
    pub fn format(
        mut region: R,
        id: PartitionId,
        generation: u32,
        crc: Crc32c,
    ) -> Result<Self, FormatError> {
        let slots = slots_of(&region)?;
        // The marks go first and come back last: a crash in between leaves a blank partition,
        // never new marks over old entries.
        const ZEROES: [u8; 4096] = [0; 4096];
        let len = partition_bytes(slots);
        for at in (0..len).step_by(ZEROES.len()) {
            region.write(at, &ZEROES[..ZEROES.len().min(len - at)]);
            if at == 0 {
                region.fence()?;
            }
        }
        region.fence()?;
        let mark = Mark {
            number: 0,
            released: Seq::ZERO,
            head: 0,
            life: Life { generation, incarnation: 0 },
            id,
            slots,
        };
        let mut log = Self::with(region, mark, crc);
        log.write_mark_twice(mark)?;
        Ok(log)
    }

    /// Reads an existing partition. Nothing is written; appending needs [`start`](Self::start)
    /// or [`resume`](Self::resume) first.
    ///
    /// # Errors
    ///
    /// See [`LogError`]: whatever is not surely this partition, whole, is refused (T19).
    pub fn open(region: R, id: PartitionId, crc: Crc32c) -> Result<(Self, Scan), LogError> {
        let slots = slots_of(&region)?;
        let mark = read_mark(&region, id, slots, crc)?;
        let (found, slots) = scan(&region, &mark, crc)?;
        let mut log = Self::with(region, mark, crc);
        for seq in slots.seqs {
            log.note(seq.unwrap_or(Seq::ZERO));
        }
        log.advance();
        log.fenced = log.next;
        log.bound_from = log.next;
        Ok((log, found))
    }

    fn with(region: R, mark: Mark, crc: Crc32c) -> Self {
        let slot = (mark.head % u64::from(mark.slots)) as u32;
        Self {
            region,
            crc,
            seed: mark.id.seed(crc),
            slots: mark.slots,
            state: State::Unbound,
            seqs: vec![Seq::ZERO; mark.slots as usize],
            next: mark.head,
            next_slot: slot,
            limit: 0,
            head: mark.head,
            head_slot: slot,
            fenced: mark.head,
            bound_from: mark.head,
            released: mark.released,
            durable: mark,
        }
    }

    /// Begins anew: every entry so far is dead, groups up to `released` are done with. To be
    /// called on a clean log, or when recovery has undone and flushed everywhere (T9). Durable
    /// before it returns.
    ///
    /// Group numbers go on across generations; `released` is taken as it is.
    ///
    /// # Errors
    ///
    /// The generation is older than the log's, or the region failed.
    pub fn start(&mut self, life: Life, released: Seq) -> Result<(), BindError> {
        self.check_life(life)?;
        if life.generation < self.durable.life.generation {
            return Err(BindError::Generation {
                given: life.generation,
                current: self.durable.life.generation,
            });
        }
        self.repair(false)?;
        self.head = self.next;
        self.head_slot = self.next_slot;
        self.released = released;
        self.bind(life)
    }

    /// Goes on after the target's restart or a lost connection, with the same owner: the entries
    /// beyond the released mark stay, the owner replays what was not durable (P7, T4).
    ///
    /// # Errors
    ///
    /// Another generation than the log's, an older incarnation, or the region failed.
    pub fn resume(&mut self, life: Life) -> Result<(), BindError> {
        self.check_life(life)?;
        if life.generation != self.durable.life.generation {
            return Err(BindError::Generation {
                given: life.generation,
                current: self.durable.life.generation,
            });
        }
        self.repair(true)?;
        self.bind(life)
    }

    /// Appends an entry with its persist word unset. Durable after the next
    /// [`fence`](Self::fence), and only then may the write be submitted.
    ///
    /// # Errors
    ///
    /// See [`AppendError`]; the log is unchanged.
    #[inline]
    pub fn append(&mut self, attribute: &Attribute) -> Result<Position, AppendError> {
        if !loggable(attribute) {
            return Err(AppendError::Unloggable { seq: attribute.seq });
        }
        if self.next >= self.limit {
            self.make_room()?;
        }
        let position = Position(self.next);
        self.put(
            position,
            self.next_slot,
            Some(*attribute),
            Unsettled::of(self.next - self.fenced),
        );
        self.note(attribute.seq_end());
        Ok(position)
    }

    /// Says that the entry's data is durable (and, for a flushed entry, that of the earlier ones
    /// it vouches for, T4). Durable after the next [`fence`](Self::fence), and only then may the
    /// completion be sent (T7).
    ///
    /// # Panics
    ///
    /// If the entry was not appended in this binding.
    #[inline]
    pub fn persist(&mut self, position: Position) {
        assert!(
            (self.bound_from..self.next).contains(&position.0),
            "{position:?} was not appended in this binding"
        );
        // An initiator that released an entry before it was complete gets no say in the next lap.
        if self.next - position.0 <= u64::from(self.slots) {
            let slot = (position.0 % u64::from(self.slots)) as u32;
            self.region.write_word(offset(slot), self.durable.life.stamp(position));
        }
    }

    /// Makes all appends, persist words and marks so far durable.
    ///
    /// # Errors
    ///
    /// The region failed. The log is unusable from then on: what was appended since the last
    /// fence must not be submitted, what was persisted not be answered (P6).
    #[inline]
    pub fn fence(&mut self) -> Result<(), RegionError> {
        // A mark that frees a good part of the ring rides along, so that appends need not stop
        // for a fence of their own when they come around.
        if let State::Failed(error) = &self.state {
            return Err(error.clone());
        }
        if self.head - self.durable.head >= u64::from(self.slots / 8).max(1) {
            return self.write_mark();
        }
        self.fence_region()?;
        self.fenced = self.next;
        Ok(())
    }

    /// Takes note that groups up to `mark` are complete on all servers, durable and delivered
    /// (T1). Made durable only when slots are needed; smaller marks than before are ignored.
    #[inline]
    pub fn release(&mut self, mark: Seq) {
        if mark > self.released {
            self.released = mark;
            self.advance();
        }
    }

    /// Like [`release`](Self::release), but durable before it returns: for an orderly close.
    ///
    /// # Errors
    ///
    /// The region failed.
    pub fn release_now(&mut self, mark: Seq) -> Result<(), RegionError> {
        self.release(mark);
        if let State::Failed(error) = &self.state {
            return Err(error.clone());
        }
        if self.released > self.durable.released || self.head > self.durable.head {
            self.write_mark()?;
        }
        Ok(())
    }

    /// Lists the live entries as they are now.
    ///
    /// # Errors
    ///
    /// See [`LogError`].
    pub fn scan(&self) -> Result<Scan, LogError> {
        let now = Mark { head: self.head, released: self.released, ..self.durable };
        Ok(scan(&self.region, &now, self.crc)?.0)
    }

    /// How many entries the partition can hold.
    #[must_use]
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// How many appends will succeed before more is released (T13).
    #[must_use]
    pub const fn free(&self) -> u32 {
        self.slots - (self.next - self.head) as u32
    }

    /// The released mark as last noted, durable or not.
    #[must_use]
    pub const fn released(&self) -> Seq {
        self.released
    }

    /// The generation and incarnation of the binding.
    #[must_use]
    pub const fn life(&self) -> Life {
        self.durable.life
    }

    /// Whose partition it is.
    #[must_use]
    pub const fn id(&self) -> PartitionId {
        self.durable.id
    }

    /// The region behind it.
    #[must_use]
    pub const fn region(&self) -> &R {
        &self.region
    }

    /// Gives the region back.
    #[must_use]
    pub fn into_region(self) -> R {
        self.region
    }

    #[cold]
    fn make_room(&mut self) -> Result<(), AppendError> {
        match &self.state {
            State::Unbound => return Err(AppendError::Unbound),
            State::Failed(error) => return Err(error.clone().into()),
            State::Bound => {}
        }
        if self.head == self.durable.head {
            return Err(AppendError::Full { slots: self.slots, released: self.released });
        }
        self.write_mark()?;
        Ok(())
    }

    fn check_life(&self, life: Life) -> Result<(), BindError> {
        if let State::Failed(error) = &self.state {
            return Err(error.clone().into());
        }
        let current = self.durable.life.incarnation;
        if life.incarnation < current {
            return Err(BindError::Incarnation { given: life.incarnation, current });
        }
        Ok(())
    }

    /// Cleans up after torn appends, so that later scans can tell new damage from old: holes
    /// among live entries become voids, persist words of older laps 0, other torn slots blank.
    fn repair(&mut self, keep: bool) -> Result<(), RegionError> {
        let mark = Mark { head: self.head, released: self.released, ..self.durable };
        // A damaged partition cannot have been opened, so what a scan refuses now is the
        // region's fault.
        let (_, slots) = scan(&self.region, &mark, self.crc)
            .map_err(|_| RegionError::new("it does not hold what was written to it"))?;
        for slot in slots.torn {
            self.region.write(offset(slot), &[0; ENTRY_BYTES]);
        }
        if keep {
            for position in slots.alien {
                self.region.write_word(offset(self.slot_of(position)), 0);
            }
            let holes = (self.head..).zip(slots.seqs);
            for (position, _) in holes.filter(|(_, seq)| seq.is_none()) {
                let position = Position(position);
                self.put(position, self.slot_of(position), None, Unsettled::UNKNOWN);
            }
        }
        self.fence_region()
    }

    fn bind(&mut self, life: Life) -> Result<(), BindError> {
        self.write_mark_twice(Mark {
            life,
            head: self.head,
            released: self.released,
            ..self.durable
        })?;
        self.fenced = self.next;
        self.bound_from = self.next;
        self.limit = self.head + u64::from(self.slots);
        self.state = State::Bound;
        Ok(())
    }

    /// Writes both copies, one after the other: rare changes that must survive the loss of one.
    fn write_mark_twice(&mut self, mark: Mark) -> Result<(), RegionError> {
        for _ in 0..2 {
            self.put_mark(mark)?;
        }
        Ok(())
    }

    /// Makes the mark durable as it is in memory, and everything else with it.
    #[cold]
    fn write_mark(&mut self) -> Result<(), RegionError> {
        let mark = Mark { head: self.head, released: self.released, ..self.durable };
        self.put_mark(mark)?;
        self.fenced = self.next;
        if matches!(self.state, State::Bound) {
            self.limit = self.head + u64::from(self.slots);
        }
        Ok(())
    }

    fn put_mark(&mut self, mark: Mark) -> Result<(), RegionError> {
        let mark = Mark { number: self.durable.number + 1, ..mark };
        let at = (mark.number % 2) as usize * MARK_BYTES;
        self.region.write(at, &mark.encode(self.crc));
        self.fence_region()?;
        self.durable = mark;
        Ok(())
    }

    #[inline]
    fn fence_region(&mut self) -> Result<(), RegionError> {
        self.region.fence().inspect_err(|error| {
            self.state = State::Failed(error.clone());
            self.limit = 0;
        })
    }

    #[inline]
    fn put(
        &mut self,
        position: Position,
        slot: u32,
        attribute: Option<Attribute>,
        unsettled: Unsettled,
    ) {
        let entry = Entry { position, life: self.durable.life, unsettled, attribute };
        self.region.write(offset(slot), &encode(&entry, self.seed, self.crc));
    }

    /// Moves the head over what is released.
    #[inline]
    fn advance(&mut self) {
        while self.head < self.next && self.seqs[self.head_slot as usize] <= self.released {
            self.head += 1;
            self.head_slot = self.after(self.head_slot);
        }
    }

    /// Counts an entry as appended.
    #[inline]
    fn note(&mut self, seq_end: Seq) {
        self.seqs[self.next_slot as usize] = seq_end;
        self.next += 1;
        self.next_slot = self.after(self.next_slot);
    }

    #[inline]
    const fn slot_of(&self, position: Position) -> u32 {
        (position.0 % self.slots as u64) as u32
    }

    #[inline]
    const fn after(&self, slot: u32) -> u32 {
        if slot + 1 == self.slots { 0 } else { slot + 1 }
    }
}

fn slots_of<R: Region>(region: &R) -> Result<u32, TooSmall> {
    let have = region.len();
    let slots = have.saturating_sub(SLOTS_AT) / ENTRY_BYTES;
    if slots < SLOTS_MIN as usize {
        let need = partition_bytes(SLOTS_MIN);
        return Err(TooSmall { have, need });
    }
    Ok(slots.min(SLOTS_MAX as usize) as u32)
}

#[inline]
const fn offset(slot: u32) -> usize {
    SLOTS_AT + slot as usize * ENTRY_BYTES
}
