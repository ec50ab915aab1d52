//! Volumes as storage, on real sockets and files.

mod barrier_mode;
mod calls;
mod fsync_stages;
mod image;
mod mount;
mod permissions;
mod shared_stream;
mod support;
mod volume;
