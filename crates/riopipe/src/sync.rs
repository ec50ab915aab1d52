//! The types of all state that threads share in `watched.rs`. A model check (`tests/threads.rs`)
//! replaces them by the checker's types.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
pub(crate) use std::sync::{Mutex, MutexGuard};

pub(crate) use crate::lock::lock;
