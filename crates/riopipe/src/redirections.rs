//! The lock of the record of redirected blocks, which all threads of a volume share.

use std::sync::Mutex;

use riopipe_session::initiator::stream::{Redirections, SharedRedirections};

use crate::lock::lock;

/// The blocks that the streams of a volume have redirected.
#[derive(Debug, Default)]
pub(crate) struct LockedRedirections(Mutex<Redirections>);

impl SharedRedirections for LockedRedirections {
    fn with(&self, change: &mut dyn FnMut(&mut Redirections)) {
        change(&mut lock(&self.0));
    }
}
