//! The FLUSHes of one drive, over all cores: how many are in flight, and how many have failed (T22,
//! T29).
//!
//! A drive may report lost data only once: to the FLUSH that fails. Another FLUSH that ends a
//! moment later succeeds, although writes that it should have made durable are lost. The core of the
//! second FLUSH may receive the success before the core of the first one has received the failure.
//! So a success is *in doubt* when other FLUSHes of the drive are in flight. The doubt is resolved
//! when each of these is *accounted for*: the core that sent that FLUSH has received its completion
//! and, if it failed, has added it to `failures`.
//!
//! While cores send new FLUSHes all the time, there may be no moment without a FLUSH in flight. So
//! each FLUSH belongs to a round, and a doubt waits only for rounds:
//!
//! 1. A new FLUSH joins the current round.
//! 2. When all FLUSHes of the *previous* round are accounted for, the current round ends. It becomes
//!    the previous one, and a new round begins.
//!
//! A FLUSH of the previous round is accounted for when one more round has ended, and a FLUSH of the
//! current round when two more have ended. New FLUSHes do not delay that.
//!
//! Each FLUSH changes one atomic word twice: when it begins and when it ends. `tests/flushes.rs` compiles this file with a model
//! checker's atomics and tries every interleaving.

use super::sync::{AtomicU64, Ordering};

/// The FLUSHes of one drive; see the [module](self).
#[derive(Debug)]
pub(super) struct DriveFlushes {
    /// A [`Word`].
    word: AtomicU64,
    /// How many FLUSHes have failed, as far as their cores know.
    failures: AtomicU64,
}

/// The state of a drive's FLUSHes, in one atomic word:
///
/// ```text
/// bit 63       55   54    53         27 26          0
///    +-----------+---------+-----------+-------------+
///    |   round   | awaited |  current  |  previous   |
///    +-----------+---------+-----------+-------------+
/// ```
#[derive(Clone, Copy, Debug)]
struct Word {
    /// The number of the current round, which new FLUSHes join. It has 9 bits and wraps around.
    round: u64,
    /// A connection waits for the end of the current round.
    awaited: bool,
    /// How many FLUSHes of the current round are in flight. 27 bits are enough: each FLUSH has the
    /// slot of a command, and a target has far fewer slots.
    current: u64,
    /// How many FLUSHes of the previous round are in flight.
    previous: u64,
}

/// The width of `current` and of `previous` in the word.
const COUNT_BITS: u32 = 27;
/// The mask of a count.
const COUNT: u64 = (1 << COUNT_BITS) - 1;
/// The mask of a round's number.
const ROUND: u64 = (1 << 9) - 1;

impl Word {
    const fn of(word: u64) -> Self {
        Self {
            round: word >> (2 * COUNT_BITS + 1),
            awaited: word >> (2 * COUNT_BITS) & 1 != 0,
            current: word >> COUNT_BITS & COUNT,
            previous: word & COUNT,
        }
    }

    const fn bits(self) -> u64 {
        self.round << (2 * COUNT_BITS + 1)
            | (self.awaited as u64) << (2 * COUNT_BITS)
            | self.current << COUNT_BITS
            | self.previous
    }

    /// Whether every FLUSH for which the doubt waits is accounted for.
    const fn resolves(self, doubt: Doubt) -> bool {
        // If the number of the round has wrapped around since the doubt began, the computed
        // distance is too short, and never too long. So a doubt is never resolved too early. It is
        // resolved at last, because a round ends again as long as some FLUSH is in flight.
        self.current + self.previous == 0
            || (self.round.wrapping_sub(doubt.round) & ROUND) >= doubt.rounds_to_end
    }
}

/// A FLUSH in flight. Its core passes it back to [`DriveFlushes::end`].
#[derive(Debug)]
pub(super) struct Ticket {
    /// The round that the FLUSH has joined.
    round: u64,
}

/// The doubt of a FLUSH that has succeeded while others were in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doubt {
    /// The current round at that time.
    round: u64,
    /// How many rounds must end before the others are accounted for: 1, or 2 if one of them belongs
    /// to the current round.
    rounds_to_end: u64,
}

impl DriveFlushes {
    pub(super) fn new() -> Self {
        Self { word: AtomicU64::new(0), failures: AtomicU64::new(0) }
    }

    /// The number of FLUSHes that are known to have failed.
    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }

    /// Adds a failed FLUSH to [`failures`](Self::failures). Must be called before the
    /// [`end`](Self::end) of that FLUSH.
    pub(super) fn count_failure(&self) {
        self.failures.fetch_add(1, Ordering::Release);
    }

    /// Notes that a FLUSH is about to be submitted.
    pub(super) fn begin(&self) -> Ticket {
        let before = self.word.fetch_add(1 << COUNT_BITS, Ordering::AcqRel);
        Ticket { round: Word::of(before).round }
    }

    /// Notes that a FLUSH has come back and, if it failed, was added to
    /// [`failures`](Self::failures). Returns the doubt if a success of this FLUSH is in doubt.
    /// `None`: `failures` has every failure that concerns this FLUSH. Calls `wake` if connections
    /// wait for the round that has ended.
    pub(super) fn end(&self, ticket: Ticket, wake: impl FnOnce()) -> Option<Doubt> {
        // The closure always returns a value to store.
        let before = self
            .word
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
                Some(Self::ended(Word::of(word), &ticket).0.bits())
            })
            .unwrap_or_else(|word| word);
        let (after, wakes) = Self::ended(Word::of(before), &ticket);
        if wakes {
            wake();
        }
        if after.current + after.previous == 0 {
            return None;
        }
        Some(Doubt { round: after.round, rounds_to_end: if after.current == 0 { 1 } else { 2 } })
    }

    /// The state after the end of a FLUSH, and whether connections are to be woken.
    const fn ended(mut word: Word, ticket: &Ticket) -> (Word, bool) {
        if ticket.round == word.round {
            word.current -= 1;
        } else {
            word.previous -= 1;
        }
        if word.previous > 0 {
            return (word, false);
        }
        let next = word.round.wrapping_add(1) & ROUND;
        (Word { round: next, awaited: false, current: 0, previous: word.current }, word.awaited)
    }

    /// Whether a success is still in doubt. If so, calls `register`, which must put the connection on
    /// the list of those that `wake` wakes. The [`end`](Self::end) that ends the current round calls
    /// `wake`, and the connection checks again. `register` may also be called if the result is false.
    /// The connection is then woken without need.
    pub(super) fn is_still_in_doubt(&self, doubt: Doubt, register: impl FnOnce()) -> bool {
        if Word::of(self.word.load(Ordering::Acquire)).resolves(doubt) {
            return false;
        }
        // First register, then set `awaited`. So the thread that clears `awaited` finds the
        // connection on the list.
        register();
        let marked = self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
            let word = Word::of(word);
            (!word.resolves(doubt)).then(|| Word { awaited: true, ..word }.bits())
        });
        marked.is_ok()
    }
}
