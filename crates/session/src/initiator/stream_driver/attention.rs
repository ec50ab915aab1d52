//! The calls of a stream's owner, and the interrupts of its waits. The record is kept with the
//! stream, behind its ownership flag.

/// The record that the owner and the background driver keep for each other.
#[derive(Debug, Default)]
pub struct Attention {
    /// The number of calls of the owner.
    calls: u64,
    /// Whether the background driver has taken the stream over and sleeps until the stream has an
    /// event: then the owner's next call must wake it.
    taken_over: bool,
    /// Another thread has interrupted the owner, and the owner has not yet noticed it.
    woken: bool,
}

impl Attention {
    /// Counts a call of the owner. Returns whether the background driver must be woken, so that it
    /// notices when the owner stops calling again.
    #[inline]
    pub fn called(&mut self) -> bool {
        self.calls += 1;
        core::mem::take(&mut self.taken_over)
    }

    /// Another thread interrupts the owner: its present wait ends, or else its next one.
    pub fn wake(&mut self) {
        self.woken = true;
    }

    /// Whether another thread has interrupted the owner.
    pub(super) const fn is_woken(&self) -> bool {
        self.woken
    }

    /// The owner notices an interrupt. Returns whether there was one.
    pub(super) fn take_woken(&mut self) -> bool {
        core::mem::take(&mut self.woken)
    }

    /// The background driver checks for calls of the owner; `seen` is the result of the last check.
    /// Returns the number of calls if the owner has called since: then it drives the stream itself.
    pub fn check(&mut self, seen: u64) -> Option<u64> {
        (self.calls != seen).then(|| {
            self.taken_over = false;
            self.calls
        })
    }

    /// The background driver drives the stream from now on.
    pub fn take_over(&mut self) {
        self.taken_over = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_that_calls_is_let_alone_and_wakes_the_background_driver() {
        let mut attention = Attention::default();
        assert!(!attention.called(), "it is not taken over yet");
        let seen = attention.check(0).expect("the owner has called");
        assert_eq!(attention.check(seen), None, "the owner is not calling");
        attention.take_over();
        assert_eq!(attention.check(seen), None);
        assert!(attention.called(), "the owner calls again");
        assert!(!attention.called(), "reported once");
        assert!(attention.check(seen).is_some_and(|calls| calls != seen));
    }
}
