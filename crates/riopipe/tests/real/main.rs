//! Volumes against real targets, in this process, on real sockets.

mod crash;
mod lives;
mod reconnect;
mod recovery;
mod site;
mod volume;
