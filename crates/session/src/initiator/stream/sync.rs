//! The atomics of [`barrier`](super::barrier). Its model check (`tests/barrier.rs`) replaces them
//! with those of a checker.

pub(super) use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
