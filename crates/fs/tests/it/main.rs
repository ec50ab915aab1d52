//! Volumes as storage, on real sockets and files.

mod image;
mod shared_stream;
mod support;
mod volume;
