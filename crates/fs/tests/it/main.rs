//! Volumes as storage, on real sockets and files.

mod image;
mod mount;
mod shared_stream;
mod support;
mod volume;
