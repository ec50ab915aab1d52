//! Volumes against real targets, in this process, on real sockets.

mod crash;
mod given_up;
mod late;
mod lease;
mod lives;
mod lost_log;
mod metrics;
mod reconnect;
mod recovery;
mod reopen;
mod site;
mod slow;
mod volume;
