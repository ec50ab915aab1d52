//! The ways in which programs run: the journal, the storage, and the moment of write-back.

use riopipe_fs_core::fs::{JournalMode, MountOptions};

use super::recorder::{Device, Order, Progress, Release};

/// The streams: that of the main journal, and two for data.
pub(crate) const STREAMS: usize = 3;

/// A way in which a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setup {
    /// Mode `rio`; groups become durable when they are waited for.
    Lazy,
    /// Mode `rio`; groups become durable at once, and are released late.
    Eager,
    /// Mode `rio`; each write is submitted at once, and the background works after each change
    /// without a sync.
    Background,
    /// Mode `ext4`, on a drive that keeps no order between two FLUSHes.
    Ext4,
    /// Mode `barrier`, on a drive that keeps the order of groups; they become durable when they are
    /// waited for.
    Barrier,
    /// Mode `opimq`, on a drive that keeps the order of groups, and that of the main stream behind
    /// data; they become durable when they are waited for.
    Opimq,
}

impl Setup {
    pub(crate) const ALL: [Self; 6] =
        [Self::Lazy, Self::Eager, Self::Background, Self::Ext4, Self::Barrier, Self::Opimq];
    /// The setups of mode `rio` without a background.
    pub(crate) const RIO: [Self; 2] = [Self::Lazy, Self::Eager];

    pub(crate) const fn mode(self) -> JournalMode {
        match self {
            Self::Ext4 => JournalMode::Ext4,
            Self::Barrier => JournalMode::Barrier,
            Self::Opimq => JournalMode::Opimq,
            Self::Lazy | Self::Eager | Self::Background => JournalMode::Rio,
        }
    }

    /// Whether a barrier orders without a wait. Otherwise it is an `fsync`.
    pub(crate) fn has_barriers(self) -> bool {
        self.mode() != JournalMode::Ext4
    }

    pub(crate) fn device(self) -> Device {
        let device = Device::of_mode(self.mode(), STREAMS);
        match self {
            Self::Eager => Device { progress: Progress::Eager, release: Release::Late, ..device },
            _ => device,
        }
    }

    pub(crate) fn options(self, options: MountOptions) -> MountOptions {
        let dirty_pages_max = match self {
            Self::Background => 0,
            _ => options.dirty_pages_max,
        };
        MountOptions { mode: self.mode(), dirty_pages_max, ..options }
    }
}

impl Device {
    /// The storage for a mode: what its engine promises of a crash. `ext4` needs no order.
    pub(crate) fn of_mode(mode: JournalMode, streams: usize) -> Self {
        let order = match mode {
            JournalMode::Rio | JournalMode::Horae => Order::Streams,
            JournalMode::Barrier => Order::Groups,
            JournalMode::Opimq => Order::Followed,
            JournalMode::Ext4 => Order::Drive,
        };
        Self { order, ..Self::lazy(streams) }
    }
}
