//! The record of the owner's calls, and of the interrupts of its waits. The owner and the
//! background driver exchange it: only the thread that holds the stream's ownership flag uses it.

/// The record that the owner and the background driver keep for each other.
#[derive(Debug, Default)]
pub struct Attention {
    /// The number of calls of the owner so far.
    call_count: u64,
    /// Whether the background driver has taken the stream over and sleeps until the stream has an
    /// event. The owner's next call must then wake it.
    taken_over: bool,
    /// Whether another thread has interrupted the owner, and the interrupt has not ended a wait
    /// yet.
    is_interrupted: bool,
}

impl Attention {
    /// Counts a call of the owner. Returns whether the background driver must be woken, so that it
    /// notices when the owner stops calling again.
    #[inline]
    pub fn called(&mut self) -> bool {
        self.call_count += 1;
        core::mem::take(&mut self.taken_over)
    }

    /// Interrupts the owner: ends its present wait, or its next one if it does not wait now.
    pub fn wake(&mut self) {
        self.is_interrupted = true;
    }

    /// Whether another thread has interrupted the owner.
    pub(super) const fn is_woken(&self) -> bool {
        self.is_interrupted
    }

    /// Clears the interrupt. Returns whether there was one.
    pub(super) fn clear_woken(&mut self) -> bool {
        core::mem::take(&mut self.is_interrupted)
    }

    /// Checks whether the owner has called since the background driver's last check, when the
    /// number of calls was `last_count`. Returns the present number if so. The owner then drives
    /// the stream itself.
    pub fn check(&mut self, last_count: u64) -> Option<u64> {
        if self.call_count == last_count {
            return None;
        }
        self.taken_over = false;
        Some(self.call_count)
    }

    /// Records that the background driver drives the stream from now on.
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
