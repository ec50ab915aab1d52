//! Whether a stream's owner looks after it: kept with the stream, behind its ownership flag.

/// What the owner leaves for the background driver, and the background driver for the owner.
#[derive(Debug, Default)]
pub struct Attention {
    /// Calls of the owner so far.
    calls: u64,
    /// Whether the background driver has taken the stream over and sleeps until something happens
    /// to it: then the owner's next call has to wake it.
    taken_over: bool,
    /// Another thread has called the owner, who has not noticed yet.
    woken: bool,
}

impl Attention {
    /// The owner calls. Returns whether the background driver must be woken, so that it notices
    /// when the owner goes away again.
    #[inline]
    pub fn called(&mut self) -> bool {
        self.calls += 1;
        core::mem::take(&mut self.taken_over)
    }

    /// Another thread calls the owner: its wait ends, or the next one does.
    pub fn wake(&mut self) {
        self.woken = true;
    }

    /// Whether another thread has called the owner.
    pub(super) const fn is_woken(&self) -> bool {
        self.woken
    }

    /// The owner notices that another thread has called; whether one has.
    pub(super) fn take_woken(&mut self) -> bool {
        core::mem::take(&mut self.woken)
    }

    /// The background driver looks; `seen` is what the last look returned. `Some` when the owner
    /// has called since: it looks after the stream itself.
    pub fn look(&mut self, seen: u64) -> Option<u64> {
        (self.calls != seen).then(|| {
            self.taken_over = false;
            self.calls
        })
    }

    /// The background driver looks after the stream from now on.
    pub fn mind(&mut self) {
        self.taken_over = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_that_calls_is_let_alone_and_wakes_the_background_driver() {
        let mut attention = Attention::default();
        assert!(!attention.called(), "nobody minds it yet");
        let seen = attention.look(0).expect("the owner has called");
        assert_eq!(attention.look(seen), None, "the owner is elsewhere");
        attention.mind();
        assert_eq!(attention.look(seen), None);
        assert!(attention.called(), "back again");
        assert!(!attention.called(), "told once");
        assert!(attention.look(seen).is_some_and(|calls| calls != seen));
    }
}
