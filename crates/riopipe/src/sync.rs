//! What crosses threads here is made of these; a model check puts the checker's in their place
//! (`tests/threads`).

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
pub(crate) use std::sync::{Mutex, MutexGuard};

pub(crate) use crate::shared::lock;
