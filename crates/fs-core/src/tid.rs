//! Numbers of main transactions.

use core::fmt;

/// The number of a main transaction, jbd2's `tid` without its wrap: the low 32 bits are on the
/// drive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tid(pub u64);

impl Tid {
    /// The next transaction.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// The transaction with the number `on_drive` that is not older than this one, and less than
    /// 2^32 transactions newer.
    #[must_use]
    pub const fn not_before(self, on_drive: u32) -> Self {
        Self(self.0 + on_drive.wrapping_sub(self.0 as u32) as u64)
    }

    /// The number on the drive.
    #[must_use]
    pub const fn on_drive(self) -> u32 {
        self.0 as u32
    }
}

impl fmt::Display for Tid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_on_the_drive_wrap() {
        assert_eq!(Tid(7).not_before(7), Tid(7));
        assert_eq!(Tid(7).not_before(9), Tid(9));
        assert_eq!(Tid(0xffff_fff0).not_before(3), Tid(0x1_0000_0003));
        assert_eq!(Tid(0x1_0000_0003).not_before(2), Tid(0x2_0000_0002));
    }
}
