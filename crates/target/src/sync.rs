//! The primitives below everything that reactors share; a model check replaces them by a checker's
//! (`tests/threads.rs`).

pub(crate) use std::sync::atomic::{AtomicU8, Ordering};
pub(crate) use std::sync::{Mutex, PoisonError};

pub(crate) use riopipe_net::Waker;
