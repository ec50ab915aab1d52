//! What crash tests share.

use std::time::Duration;

use riopipe::{ConnectOptions, OpenOptions};

use crate::site::connect;

/// With no time for a lost target to come back.
pub(crate) fn impatient() -> OpenOptions {
    let connect = ConnectOptions { loss_timeout: Duration::ZERO, ..connect() };
    OpenOptions { connect, ..OpenOptions::default() }
}
