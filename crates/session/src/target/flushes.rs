//! The FLUSHes of one drive, over all cores: how many are in flight, and how many have failed (T22,
//! T29).
//!
//! A drive may report lost data only once: to the FLUSH that fails. Another FLUSH that ends a
//! moment later succeeds, although the writes that it was to cover are lost. Its core may receive
//! the success before the other core has received the failure. So a success is *in doubt* until
//! every FLUSH that was in flight when it was received is *accounted for*: the core of that FLUSH
//! has received its end, and has counted it if it failed.
//!
//! If there is always a new FLUSH, there may be no moment without one in flight. So FLUSHes belong
//! to rounds. A new one joins the current round. A round ends when all those of the round before it
//! are accounted for. A FLUSH that is in flight now is accounted for two ends of rounds later, and
//! new ones do not delay that.
//!
//! A FLUSH costs two changes of one word. `tests/flushes.rs` compiles this file with a model
//! checker's atomics and tries every interleaving.

use super::sync::{AtomicU64, Ordering};

/// The FLUSHes of one drive; see the [module](self).
#[derive(Debug)]
pub(super) struct DriveFlushes {
    /// The bits of a [`Word`].
    word: AtomicU64,
    failures: AtomicU64,
}

/// The state of a drive's FLUSHes. It is always changed as a whole.
#[derive(Clone, Copy, Debug)]
struct Word {
    /// The round that a FLUSH joins now; 9 bits, so that it wraps.
    round: u64,
    /// A connection waits for the end of a round.
    awaited: bool,
    /// FLUSHes of the current round in flight. Each has a command's slot, of which a target has far
    /// fewer than 2²⁷.
    current: u64,
    /// FLUSHes of the previous round in flight.
    previous: u64,
}

const COUNT_BITS: u32 = 27;
const COUNT: u64 = (1 << COUNT_BITS) - 1;
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

    const fn is_over(self, doubt: Doubt) -> bool {
        // If the number of the round has wrapped, the computed distance is too short, never too
        // long. So no doubt ends too early. It still ends: while some FLUSH is in flight, another
        // end of a round will come.
        self.current + self.previous == 0
            || (self.round.wrapping_sub(doubt.round) & ROUND) >= doubt.ends
    }
}

/// A FLUSH in flight.
#[derive(Debug)]
pub(super) struct Ticket {
    round: u64,
}

/// The doubt of a FLUSH that has succeeded while others were in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doubt {
    /// The round at that time.
    round: u64,
    /// How many rounds must end until the others are accounted for.
    ends: u64,
}

impl DriveFlushes {
    pub(super) fn new() -> Self {
        Self { word: AtomicU64::new(0), failures: AtomicU64::new(0) }
    }

    /// The number of FLUSHes that are known to have failed.
    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }

    /// Counts a failed FLUSH. To be called before its [`end`](Self::end).
    pub(super) fn fail(&self) {
        self.failures.fetch_add(1, Ordering::Release);
    }

    /// Notes that a FLUSH is about to be submitted.
    pub(super) fn begin(&self) -> Ticket {
        let before = self.word.fetch_add(1 << COUNT_BITS, Ordering::AcqRel);
        Ticket { round: Word::of(before).round }
    }

    /// Notes that a FLUSH has come back, and was counted if it failed. The result shows whether a
    /// success is in doubt. Otherwise all [`failures`](Self::failures) that matter to it are
    /// counted. `wake` is called if the waiting connections are to check again.
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
        Some(Doubt { round: after.round, ends: if after.current == 0 { 1 } else { 2 } })
    }

    /// The state after the end of a FLUSH, and whether a connection waited for it.
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

    /// Whether a success is still in doubt. If so, a registered connection is woken by the next
    /// [`end`](Self::end) after which it is worth asking again. A connection that does not have to
    /// wait may be woken for nothing.
    pub(super) fn wait(&self, doubt: Doubt, register: impl FnOnce()) -> bool {
        if Word::of(self.word.load(Ordering::Acquire)).is_over(doubt) {
            return false;
        }
        // The connection is registered first. So the thread that clears `awaited` finds it
        // registered.
        register();
        let marked = self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
            let word = Word::of(word);
            (!word.is_over(doubt)).then(|| Word { awaited: true, ..word }.bits())
        });
        marked.is_ok()
    }
}
