//! Test-only switches, compiled in by the feature `probe`.
//!
//! A [`Plant`] removes one defence of the modelled drive. The oracle of `tests/plants` must then
//! see a broken promise. At most one is set in a process. Without the feature,
//! [`is_bug_planted`] is constantly false: not an instruction is left.

macro_rules! plants {
    ($($(#[$doc:meta])* $variant:ident,)*) => {
        /// A plant: a defence of the modelled drive that is removed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Plant {
            $($(#[$doc])* $variant,)*
        }

        impl Plant {
            /// All plants.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];
        }
    };
}

plants! {
    /// A drive with a cache barrier writes its cache back in any order.
    BarrierIgnoredByWriteBack,
    /// A drive with a cache barrier recovers every block that had reached the medium, also behind
    /// one that had not.
    BarrierIgnoredByRecovery,
    /// A drive with a cache barrier completes writes of a later epoch before those of an earlier
    /// one.
    BarrierOvertaken,
    /// A dual-stream write is mapped when one of its streams allows it.
    DualMappedByOneStream,
    /// A page of a dual-stream write waits in the list of its own stream only.
    SiblingForgotten,
    /// A page of a dual-stream write is mapped by each of the two lists in which it waits.
    SiblingsMappedTwice,
    /// The upper bits of an epoch are those of the epoch that is mapped next.
    EpochNotWidened,
    /// When the table of epochs is full, the oldest epoch counts as mapped.
    ForcedEpoch,
    /// Streams share a place in the table if the lower 7 bits of their numbers are equal.
    StreamsShareAPlace,
    /// When the table of delayed mappings is full, what does not fit is mapped at once.
    ForcedMapping,
    /// A FLUSH of a stream does not wait for epochs that have not arrived.
    FlushOvertakesEpoch,
    /// An epoch counts as mapped when its pages are, although its barrier has not come.
    EpochEndedEarly,
    /// A barrier is taken in while another write of its epoch is held back.
    BarrierPassesHeldWrite,
    /// On a drive with a cache barrier, a write that has failed does not stop later epochs.
    BarrierFailureForgotten,
    /// A write that has failed does not stop its streams.
    FailedWriteForgotten,
    /// With power-loss protection, a write completes although it is not mapped.
    CompletedUnmapped,
}

#[cfg(feature = "probe")]
mod state {
    use super::Plant;
    use core::sync::atomic::{AtomicU32, Ordering};

    /// Index of the planted bug plus one; 0 for none.
    static PLANTED: AtomicU32 = AtomicU32::new(0);

    /// Whether this bug is planted.
    #[must_use]
    #[inline]
    pub fn is_bug_planted(plant: Plant) -> bool {
        PLANTED.load(Ordering::Relaxed) == plant as u32 + 1
    }

    /// Plants a bug in this process, or takes it out again.
    pub fn plant(plant: Option<Plant>) {
        PLANTED.store(plant.map_or(0, |plant| plant as u32 + 1), Ordering::Relaxed);
    }
}

#[cfg(not(feature = "probe"))]
mod state {
    use super::Plant;

    /// Whether this bug is planted: never, without the feature `probe`.
    #[must_use]
    #[inline(always)]
    pub const fn is_bug_planted(_: Plant) -> bool {
        false
    }
}

pub use state::*;
