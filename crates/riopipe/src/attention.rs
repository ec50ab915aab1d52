//! Whether a stream's owner looks after it: kept with the stream, behind its ownership flag.

/// What the owner leaves for the housekeeper, and the housekeeper for the owner.
#[derive(Debug, Default)]
pub(crate) struct Attention {
    /// Calls of the owner so far.
    calls: u64,
    /// Whether the housekeeper has taken the stream over and sleeps until something happens to
    /// it: then the owner's next call has to wake it.
    minded: bool,
}

impl Attention {
    /// The owner calls. Returns whether the housekeeper must be woken, so that it notices when
    /// the owner goes away again.
    #[inline]
    pub(crate) fn called(&mut self) -> bool {
        self.calls += 1;
        std::mem::take(&mut self.minded)
    }

    /// The housekeeper looks; `seen` is what the last look returned. `Some` when the owner has
    /// called since: it looks after the stream itself.
    pub(crate) fn look(&mut self, seen: u64) -> Option<u64> {
        (self.calls != seen).then(|| {
            self.minded = false;
            self.calls
        })
    }

    /// The housekeeper minds the stream from now on.
    pub(crate) fn mind(&mut self) {
        self.minded = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_who_calls_is_let_alone_and_wakes_who_minds() {
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
