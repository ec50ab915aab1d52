//! A medium that is checked now and then, because its file may be deleted or cut short while it is
//! served. Bytes that are written to a deleted file are lost.

use std::ops::Deref;
use std::sync::OnceLock;

use riopipe_order::block_device::Gone;

use crate::medium::Medium;

/// Interval in ns at which a queue with operations in flight checks that its file still exists.
pub(crate) const CHECK_INTERVAL_NS: u64 = 100_000_000;

/// A medium, and whether it was found gone.
pub(crate) struct Watched {
    medium: Medium,
    /// Set once the medium is found gone. All later operations fail.
    gone: OnceLock<Gone>,
}

impl Watched {
    pub(crate) const fn new(medium: Medium) -> Self {
        Self { medium, gone: OnceLock::new() }
    }

    /// Checks that the medium still exists, and remembers if it does not.
    pub(crate) fn check(&self) -> Result<(), Gone> {
        if let Some(gone) = self.gone.get() {
            return Err(*gone);
        }
        self.medium.check().inspect_err(|gone| {
            tracing::error!(path = self.medium.path, "{gone}");
            // Another thread may have set a reason before. Either reason is right.
            let _ = self.gone.set(*gone);
        })
    }

    /// The reason for which all operations fail, if there is one.
    pub(crate) fn gone(&self) -> Option<Gone> {
        self.gone.get().copied()
    }
}

impl Deref for Watched {
    type Target = Medium;

    fn deref(&self) -> &Medium {
        &self.medium
    }
}
