//! The target's end of a connection, as a pure state machine.
//!
//! A [`TargetConn`] takes bytes and finished device operations, and gives device operations and
//! bytes. Everything outside it, drives and clock included, is a [`TargetEnv`]. Connections share
//! [`Shared`]. The environment keeps it behind a lock that the hot path never takes.
//!
//! A [`TargetCore`] has the connections of one processor core: it decides what happens between their
//! sockets and the drives. The same code serves real sockets and drives (crate `riopipe-target`) and
//! simulated ones (crate `riopipe-sim`).

mod admin;
mod arrival;
mod batch;
mod binding;
mod budget;
mod claims;
mod commands;
mod conn;
mod context;
mod controllers;
mod core;
mod dataset;
mod dispatch;
mod env;
mod fabrics;
mod fencing;
mod flushes;
mod flushing;
mod guard;
mod identify;
mod lease;
pub mod limits;
mod listing;
mod log_opening;
mod namespace;
mod notices;
mod ordered;
mod ownership;
mod plain;
mod properties;
mod release;
mod settlement;
mod shared;
mod standing;
mod sync;
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
pub use controllers::{AttachError, Controller};
pub use env::{Event, OpId, TargetEnv, status_of};
pub use log_opening::{Found, Opened};
pub use namespace::{
    NSID_MAX, Namespace, NamespaceConfig, NamespaceIdError, NamespaceState, Namespaces,
};
pub use notices::Notice;
pub use shared::{ConnId, DiscoveryPort, Identity, Shared};
