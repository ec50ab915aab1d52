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
