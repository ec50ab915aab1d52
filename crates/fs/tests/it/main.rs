//! Volumes as storage, on real sockets and files.

mod calls;
mod fsync_stages;
mod image;
mod mount;
mod ordered_drives;
mod permissions;
mod shared_stream;
mod support;
mod volume;
