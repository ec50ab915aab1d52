//! The atomics of [`flushes`](super::flushes). Its model check (`tests/flushes.rs`) puts those of a
//! checker in their place.

pub(super) use core::sync::atomic::{AtomicU64, Ordering};
