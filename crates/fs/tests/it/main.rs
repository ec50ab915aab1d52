//! Volumes as storage, on real sockets and files.

mod calls;
mod image;
mod mount;
mod shared_stream;
mod support;
mod volume;
