//! Stores on real targets, over real sockets.

mod crash;
mod site;
mod use_of;
