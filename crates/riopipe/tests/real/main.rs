//! Volumes against real targets, in this process, on real sockets.

mod crash;
mod lives;
mod site;
mod volume;
