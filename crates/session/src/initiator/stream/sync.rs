//! The atomics of [`board`](super::board). Its model check (`tests/board.rs`) replaces them
//! with those of a checker.

pub(super) use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
