//! The ids of connections, and of their operations at the drives.

/// The id of one connection, unique in an incarnation of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// The id of a device operation of a connection. The environment passes it back with the result.
///
/// | bits | content |
/// |---|---|
/// | 63:16 | the key of the connection, by which the environment finds the connection again |
/// | 15:0 | the slot of the command in the connection's table of commands |
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

impl OpId {
    /// The number of bits of the slot.
    pub const SLOT_BITS: u32 = 16;

    /// The slot in the id of an operation that belongs to no command. Its result is not used. A
    /// table of commands is smaller.
    pub(super) const NO_COMMAND: u16 = u16::MAX;
    /// The slot in the id of an operation that begins a stream of a drive anew for the next host.
    pub(super) const STREAM_BEGUN: u16 = u16::MAX - 1;

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
