//! The counts of a device's run: they show what its seeds have seen.

macro_rules! counts {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// The work of plain devices in a run, and the rare paths in it.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct DeviceCounts {
            $($(#[doc = $doc])* pub $name: u64,)*
        }

        impl DeviceCounts {
            /// All counts with their names.
            #[must_use]
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }
        }

        impl core::ops::AddAssign for DeviceCounts {
            fn add_assign(&mut self, other: Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counts! {
    /// The times that the volume was attached.
    attached,
    /// The times that it was detached in order.
    detached,
    /// The requests that have succeeded.
    requests,
    /// Flushes that have succeeded.
    flushes,
    /// Writes and zeroes with FUA that have succeeded.
    fua,
    /// Reads that were checked.
    reads,
    /// Reads of blocks in doubt, which failed.
    reads_in_doubt,
    /// The groups that the requests became.
    parts,
    /// The groups that were submitted as durable ones.
    durable_parts,
    /// The flushes that streams were asked for.
    asked,
    /// The parts for which a stream had no space.
    full,
    /// The devices that have failed.
    failures,
    /// The requests that were in flight when their device ended.
    cut,
    /// The attachments after which all that had completed had to be there.
    lived_on,
}
