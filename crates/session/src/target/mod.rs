//! The target's end of a connection, as a pure state machine.
//!
//! A [`TargetConn`] takes bytes and finished device operations and gives device operations and
//! bytes; everything outside it, drives and clock included, is a [`TargetEnv`]. What connections have
//! in common is [`Shared`], which the environment keeps behind a lock that the hot path never takes.
//!
//! A [`TargetCore`] has the connections of one processor core: it decides what happens between their
//! sockets and the drives. The same code serves real sockets and drives (crate `riopipe-target`) and
//! simulated ones (crate `riopipe-sim`).

mod admin;
mod binding;
mod bound;
mod budget;
mod claims;
mod conn;
mod core;
mod env;
mod fabrics;
mod flushes;
mod flushing;
mod identify;
mod io;
pub mod limits;
mod listing;
mod log_opening;
mod namespace;
mod ordered;
mod settlement;
mod shared;
mod slots;
mod stream;
mod sync;
mod tenure;
mod tracer;
mod transfer;
mod unlogged;
mod volume;
mod writers;

pub use self::core::{
    Action, BoundedDevice, ConnKey, Connection, CoreConfig, Input, Interest, Message, Place,
    Places, QueueCounts, TargetCore, Transport,
};
pub use claims::{Owner, Split, Volumes};
pub use conn::{Closed, LocalAddress, TargetConn};
pub use env::{Event, OpId, TargetEnv, status_of};
pub use log_opening::{Found, Opened};
pub use namespace::{
    NSID_MAX, Namespace, NamespaceConfig, NamespaceIdError, NamespaceState, Namespaces,
};
pub use shared::{AttachError, ConnId, Controller, DiscoveryPort, Identity, Notice, Shared};
