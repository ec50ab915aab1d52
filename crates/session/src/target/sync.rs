//! What [`flushes`](super::flushes) is made of; its model check (`tests/flushes.rs`) puts a
//! checker's in its place.

pub(super) use core::sync::atomic::{AtomicU64, Ordering};
