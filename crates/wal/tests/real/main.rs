//! Logs on real targets, over real sockets.

mod crash;
mod errors;
mod kv;
mod site;
mod together;
mod use_of;
mod wakers;
