//! The FLUSHes of one drive, over all cores: how many are under way, and how many have failed
//! (T22, T29).
//!
//! A drive may tell of lost data once only: to the FLUSH that fails. Another FLUSH that ends a
//! moment later is called good, though what it was to cover is gone, and its core may hear of its
//! success before the other core has heard of the failure. So a success is *in doubt* until every
//! FLUSH that was under way when it was heard of is *accounted for*: its core has heard of its end,
//! and counted it if it failed.
//!
//! That none is under way at all may never be seen, if there is always a new one. So FLUSHes belong
//! to rounds: a new one joins the current round, and a round ends when all those of the round
//! before it are accounted for. Whatever is under way now is accounted for two ends of rounds
//! later, and new ones do not put that off.
//!
//! A FLUSH costs two changes of one word. `tests/flushes.rs` compiles this file with a model
//! checker's atomics and tries every interleaving.

use super::sync::{AtomicU64, Ordering};

/// See the [module](self).
#[derive(Debug)]
pub(super) struct FlushBoard {
    /// See [`Word`].
    word: AtomicU64,
    failures: AtomicU64,
}

/// The state of a drive's FLUSHes: changed as a whole.
#[derive(Clone, Copy, Debug)]
struct Word {
    /// The round that a FLUSH joins now; 9 bits, so that it wraps.
    round: u64,
    /// Somebody waits for the end of a round.
    awaited: bool,
    /// FLUSHes of the current round under way. Each has a command's slot, of which a target has
    /// far fewer than 2²⁷.
    current: u64,
    /// Those of the round before.
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
        // The distance never looks longer than it is: a wrap makes nobody believe too early. And
        // while some FLUSH is under way there is another end of a round to come.
        self.current + self.previous == 0
            || (self.round.wrapping_sub(doubt.round) & ROUND) >= doubt.ends
    }
}

/// A FLUSH under way.
#[derive(Debug)]
pub(super) struct Ticket {
    round: u64,
}

/// A FLUSH has succeeded while others were under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doubt {
    /// The round at that time.
    round: u64,
    /// How many rounds must end until the others are accounted for.
    ends: u64,
}

impl FlushBoard {
    pub(super) fn new() -> Self {
        Self { word: AtomicU64::new(0), failures: AtomicU64::new(0) }
    }

    /// How many FLUSHes are known to have failed.
    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }

    /// A FLUSH has failed: before its [`end`](Self::end).
    pub(super) fn fail(&self) {
        self.failures.fetch_add(1, Ordering::Release);
    }

    /// A FLUSH is about to be submitted.
    pub(super) fn begin(&self) -> Ticket {
        let before = self.word.fetch_add(1 << COUNT_BITS, Ordering::AcqRel);
        Ticket { round: Word::of(before).round }
    }

    /// A FLUSH has come back, and was counted if it failed. A success is in doubt if it says so;
    /// otherwise all [`failures`](Self::failures) that matter to it are counted. `wake` is called
    /// if those who wait are to look again.
    pub(super) fn end(&self, ticket: Ticket, wake: impl FnOnce()) -> Option<Doubt> {
        // The closure always says what to store.
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

    /// What becomes of the word, and whether somebody waited for it.
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

    /// Whether a success is in doubt still. If so, who has registered is woken by the
    /// [`end`](Self::end) after which it is worth asking again; who has not been told to wait may
    /// be woken for nothing.
    pub(super) fn wait(&self, doubt: Doubt, register: impl FnOnce()) -> bool {
        if Word::of(self.word.load(Ordering::Acquire)).is_over(doubt) {
            return false;
        }
        // Registered first: whoever takes the mark from the word finds the registration.
        register();
        let marked = self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
            let word = Word::of(word);
            (!word.is_over(doubt)).then(|| Word { awaited: true, ..word }.bits())
        });
        marked.is_ok()
    }
}
