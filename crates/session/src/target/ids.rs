//! The ids of connections, and of their operations at the drives.

/// The id of one connection, unique in an incarnation of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// Names a device operation of a connection. The environment keeps it and hands it back. The upper
/// 48 bits are the `key` that the connection was given, so that it is found again. The lower 16 are
/// the connection's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

impl OpId {
    /// Bits that belong to the connection.
    pub const SLOT_BITS: u32 = 16;

    /// The key of the connection.
    #[must_use]
    #[inline]
    pub const fn key(self) -> u64 {
        self.0 >> Self::SLOT_BITS
    }

    #[inline]
    pub(super) const fn new(key: u64, slot: u16) -> Self {
        Self(key << Self::SLOT_BITS | slot as u64)
    }

    #[inline]
    pub(super) const fn slot(self) -> u16 {
        self.0 as u16
    }
}
