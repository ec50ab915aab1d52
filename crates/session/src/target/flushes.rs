//! The FLUSHes of one drive, over all cores: how many are in flight, and how many have failed (T22,
//! T29).
//!
//! A drive may report lost data only once: to the FLUSH that fails. Another FLUSH that ends a
//! moment later succeeds, although writes that it should have made durable are lost. The core of
//! the second FLUSH may receive the success before the core of the first one has received the
//! failure. So a success is *in doubt* when other FLUSHes of the drive are in flight. The doubt is
//! resolved when each of these is *accounted for*: the core that sent that FLUSH has received its
//! completion and, if it failed, has added it to `failures`.
//!
//! While cores send new FLUSHes all the time, there may be no moment without a FLUSH in flight. So
//! each FLUSH belongs to a round, and a doubt waits only for rounds:
//!
//! 1. A new FLUSH joins the current round.
//! 2. When all FLUSHes of the *previous* round are accounted for, the current round ends. It
//!    becomes the previous one, and a new round begins.
//!
//! A FLUSH of the previous round is accounted for when one more round has ended, and a FLUSH of the
//! current round when two more have ended. New FLUSHes do not delay that.
//!
//! Each FLUSH changes one atomic word twice: when it begins and when it ends. `tests/flushes.rs`
//! compiles this file with the atomics of a model checker, which tries every interleaving.

use super::sync::{AtomicU64, Ordering};

/// The FLUSHes of one drive. The [module](self) explains rounds and doubts.
#[derive(Debug)]
pub(super) struct DriveFlushes {
    /// The encoded [`Rounds`].
    rounds: AtomicU64,
    /// How many FLUSHes have failed, as far as their cores know.
    failures: AtomicU64,
}

/// The FLUSHes in flight at a drive, by round. In the atomic word they have these bits:
///
/// ```text
/// bit 63       55   54    53         27 26          0
///    +-----------+---------+-----------+-------------+
///    |   round   | awaited |  current  |  previous   |
///    +-----------+---------+-----------+-------------+
/// ```
#[derive(Clone, Copy, Debug)]
struct Rounds {
    /// The number of the current round, which new FLUSHes join. It has 9 bits and wraps around.
    round: u64,
    /// A connection waits for the end of the current round.
    is_awaited: bool,
    /// How many FLUSHes of the current round are in flight. 27 bits are enough: each FLUSH has the
    /// slot of a command, and a target has far fewer slots.
    current_count: u64,
    /// How many FLUSHes of the previous round are in flight.
    previous_count: u64,
}

/// The width of each of the two counts in the word.
const COUNT_BITS: u32 = 27;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;
/// The place of the bit `is_awaited` in the word.
const AWAITED_SHIFT: u32 = 2 * COUNT_BITS;
/// The place of the round's number in the word.
const ROUND_SHIFT: u32 = AWAITED_SHIFT + 1;
const ROUND_MASK: u64 = (1 << 9) - 1;

impl Rounds {
    const fn decode(word: u64) -> Self {
        Self {
            round: word >> ROUND_SHIFT,
            is_awaited: word >> AWAITED_SHIFT & 1 != 0,
            current_count: word >> COUNT_BITS & COUNT_MASK,
            previous_count: word & COUNT_MASK,
        }
    }

    const fn encode(self) -> u64 {
        self.round << ROUND_SHIFT
            | (self.is_awaited as u64) << AWAITED_SHIFT
            | self.current_count << COUNT_BITS
            | self.previous_count
    }

    /// How many FLUSHes are in flight.
    const fn in_flight_count(self) -> u64 {
        self.current_count + self.previous_count
    }

    /// Whether every FLUSH for which the doubt waits is accounted for.
    const fn resolves(self, doubt: Doubt) -> bool {
        // If the number of the round has wrapped around since the doubt began, the computed
        // distance is too short, and never too long. So a doubt is never resolved too early. The
        // doubt does get resolved, because rounds keep ending as long as some FLUSH is in flight.
        let ended_rounds = self.round.wrapping_sub(doubt.round) & ROUND_MASK;
        self.in_flight_count() == 0 || ended_rounds >= doubt.rounds_to_end
    }

    /// The state after a FLUSH that has joined round `round` has ended. If no FLUSH of the previous
    /// round is left in flight, the current round ends.
    const fn after_end_of_flush(mut self, round: u64) -> RoundsAfterEnd {
        if round == self.round {
            self.current_count -= 1;
        } else {
            self.previous_count -= 1;
        }
        if self.previous_count > 0 {
            return RoundsAfterEnd { rounds: self, must_wake: false };
        }
        let rounds = Self {
            round: self.round.wrapping_add(1) & ROUND_MASK,
            is_awaited: false,
            current_count: 0,
            previous_count: self.current_count,
        };
        RoundsAfterEnd { rounds, must_wake: self.is_awaited }
    }
}

/// The result of [`Rounds::after_end_of_flush`].
struct RoundsAfterEnd {
    rounds: Rounds,
    /// A round has ended for which connections wait.
    must_wake: bool,
}

/// A FLUSH in flight. Its core passes it back to [`DriveFlushes::end`].
#[derive(Debug)]
pub(super) struct Ticket {
    /// The round that the FLUSH has joined.
    round: u64,
}

/// The doubt about a FLUSH that has succeeded while other FLUSHes of the drive were in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doubt {
    /// The current round when the FLUSH ended.
    round: u64,
    /// How many rounds must end before the other FLUSHes are accounted for: 1, or 2 if one of them
    /// belongs to the current round.
    rounds_to_end: u64,
}

impl DriveFlushes {
    pub(super) fn new() -> Self {
        Self { rounds: AtomicU64::new(0), failures: AtomicU64::new(0) }
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
        // Adds one to `current_count`.
        let before = self.rounds.fetch_add(1 << COUNT_BITS, Ordering::AcqRel);
        Ticket { round: Rounds::decode(before).round }
    }

    /// Notes that a FLUSH has come back. A FLUSH that failed must have been added to
    /// [`failures`](Self::failures) before. Calls `wake` if a round ends for which connections
    /// wait.
    ///
    /// Returns the doubt if a success of this FLUSH is in doubt. `None` means that `failures` has
    /// every failure that concerns this FLUSH.
    pub(super) fn end(&self, ticket: Ticket, wake: impl FnOnce()) -> Option<Doubt> {
        let after = |word| Rounds::decode(word).after_end_of_flush(ticket.round);
        // The update always succeeds, because its closure always returns a value to store.
        let before = self
            .rounds
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
                Some(after(word).rounds.encode())
            })
            .unwrap_or_else(|word| word);
        let RoundsAfterEnd { rounds, must_wake } = after(before);
        if must_wake {
            wake();
        }
        if rounds.in_flight_count() == 0 {
            return None;
        }
        let rounds_to_end = if rounds.current_count == 0 { 1 } else { 2 };
        Some(Doubt { round: rounds.round, rounds_to_end })
    }

    /// Whether a success is still in doubt. If it is, calls `register`, which must put the
    /// connection on the list of the connections that `wake` wakes. The [`end`](Self::end) that
    /// ends the current round calls `wake`, and then the connection must check again.
    ///
    /// `register` may also be called if the result is false. The connection is then woken without
    /// need.
    pub(super) fn is_still_in_doubt(&self, doubt: Doubt, register: impl FnOnce()) -> bool {
        if Rounds::decode(self.rounds.load(Ordering::Acquire)).resolves(doubt) {
            return false;
        }
        // The connection is registered before `is_awaited` is set. So the thread that clears
        // `is_awaited` finds the connection on the list.
        register();
        let marked = self.rounds.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
            let rounds = Rounds::decode(word);
            if rounds.resolves(doubt) {
                return None;
            }
            Some(Rounds { is_awaited: true, ..rounds }.encode())
        });
        marked.is_ok()
    }
}
