//! What [`board`](super::board) is made of; its model check (`tests/board.rs`) puts a checker's in
//! its place.

pub(super) use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
