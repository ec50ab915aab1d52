//! A time for messages, in seconds.

use core::fmt;
use core::time::Duration;

/// A time that is shown in seconds with one decimal, rounded: `5.0 s`.
///
/// Messages about one loss come from several places, each of which has read the clock on its own.
/// Rounded, they agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seconds(pub Duration);

impl Seconds {
    /// The time of this number of nanoseconds.
    #[must_use]
    pub const fn of_ns(ns: u64) -> Self {
        Self(Duration::from_nanos(ns))
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = (self.0.as_millis() + 50) / 100;
        write!(f, "{}.{} s", tenths / 10, tenths % 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn times_are_rounded_to_a_tenth() {
        for (ms, text) in [(0, "0.0 s"), (49, "0.0 s"), (50, "0.1 s"), (4_999, "5.0 s")] {
            assert_eq!(Seconds(Duration::from_millis(ms)).to_string(), text);
        }
        assert_eq!(Seconds::of_ns(61_250_000_000).to_string(), "61.3 s");
    }
}
