//! Times for messages.

use core::fmt;
use core::time::Duration;

/// A time as a message shows it: whole microseconds or milliseconds, or seconds with one decimal at
/// most. Messages about one loss come from several places, each of which has read the clock on its
/// own. Rounded, they agree.
///
/// ```
/// use core::time::Duration;
/// use riopipe_session::rounded::Rounded;
/// assert_eq!(Rounded(Duration::from_nanos(2_999_836_886)).to_string(), "3 s");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounded(pub Duration);

/// Nanoseconds of a millisecond.
const MS: u128 = 1_000_000;

impl fmt::Display for Rounded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0.as_nanos();
        let in_units = |unit: u128| (ns + unit / 2) / unit;
        let (tenths, ms) = (in_units(100 * MS), in_units(MS));
        match (tenths % 10, ms) {
            (0, 1000..) => write!(f, "{} s", tenths / 10),
            (decimal, 1000..) => write!(f, "{}.{decimal} s", tenths / 10),
            (_, 1..) => write!(f, "{ms} ms"),
            (_, 0) => write!(f, "{} µs", in_units(1000)),
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn times_are_rounded() {
        for (ns, shown) in [
            (0, "0 µs"),
            (10_499, "10 µs"),
            (499_999, "500 µs"),
            (500_000, "1 ms"),
            (999_499_999, "999 ms"),
            (999_500_000, "1 s"),
            (1_549_999_999, "1.5 s"),
            (9_999_836_886, "10 s"),
            (86_400_000_000_000, "86400 s"),
        ] {
            assert_eq!(Rounded(Duration::from_nanos(ns)).to_string(), shown);
        }
    }
}
