//! The counts of a file system's run: they show what its seeds have seen.

macro_rules! counts {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// The work of a file system in a run, and the rare paths in it.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct FsCounts {
            $($(#[doc = $doc])* pub $name: u64,)*
        }

        impl FsCounts {
            /// All counts with their names.
            #[must_use]
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }
        }

        impl core::ops::AddAssign for FsCounts {
            fn add_assign(&mut self, other: Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counts! {
    /// The calls of the program that have succeeded.
    calls,
    /// The main commits.
    commits,
    /// Calls of `fsync` that needed a main commit.
    fallbacks,
    /// Barriers.
    barriers,
    /// The mounts.
    mounts,
    /// The mounts that found a file system that had not been unmounted.
    recoveries,
    /// The transactions of the main journal that mounts have replayed.
    transactions,
    /// The file-level records that mounts have applied.
    records,
    /// The instances that ended because their storage had failed.
    failures,
    /// Failures while a file-level record was not durable.
    cut_records,
    /// Failures while a main commit was not durable.
    cut_commits,
    /// Failures while blocks that were written home were not durable.
    cut_checkpoints,
    /// Failures in a mount that had to recover. The next mount recovers again.
    cut_recoveries,
    /// Failures in an unmount.
    cut_unmounts,
    /// Replays of targets under a mounted file system.
    replays,
    /// Waits until what was complete, but not durable, was durable.
    durable_waits,
    /// Waits until what was durable, but not released, was released.
    release_waits,
    /// Blocks that passed from one stream to another.
    handed_blocks,
    /// Mounted file systems under which a target was replayed after a block had passed.
    replays_after_handed,
}
