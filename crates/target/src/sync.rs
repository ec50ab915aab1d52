//! What crosses reactors is made of these; a model check puts the checker's in their place
//! (`tests/threads.rs`).

pub(crate) use std::sync::atomic::{AtomicU8, Ordering};
pub(crate) use std::sync::{Mutex, PoisonError};

pub(crate) use riopipe_net::Waker;
