//! The target's end of a connection, as a pure state machine.
//!
//! A [`TargetConn`] takes bytes and finished device operations, and gives device operations and
//! bytes. Everything outside it, drives and clock included, is a [`TargetEnv`]. Connections share
//! [`Shared`]. The environment keeps it behind a lock that the hot path never takes.
//!
//! A [`TargetCore`] has the connections of one processor core: it decides what happens between
//! their sockets and the drives. The same code serves real sockets and drives (crate
//! `riopipe-target`) and simulated ones (crate `riopipe-sim`).

mod access;
mod admin;
mod ana;
mod arrival;
mod batch;
mod block_locks;
mod budget;
mod capsule;
mod closed;
mod commands;
mod compare;
mod conn;
mod context;
mod control_path;
mod copy;
mod core;
mod dataset;
mod drive_order;
mod env;
mod epoch_streams;
mod epoch_use;
mod error_log;
mod events;
mod flushes;
mod flushing;
mod fused;
mod guard;
mod identity;
mod ids;
mod lba;
pub mod limits;
mod locking;
mod modify;
mod namespace;
mod ordered;
mod plain;
mod reservations;
mod reserve;
mod reserved_access;
mod rights;
mod shared;
mod sync;
mod tracer;
mod transfer;
mod verify;
mod volumes;
mod writers;

pub use self::core::{
    Action, BoundedDevice, ConnKey, Connection, CoreConfig, Input, Interest, Message,
    PendingLimits, Place, Places, QueueCounts, TargetCore, Transport,
};
pub use access::{Access, HostAccess};
pub use ana::{ANA_GROUP_MAX, PortState};
pub use closed::Closed;
pub use conn::TargetConn;
pub use env::{Event, TargetEnv, WrongDigest, status_of};
pub use identity::{DiscoveryPort, Identity, LocalAddress};
pub use ids::{ConnId, OpId};
pub use lba::LbaSize;
pub use namespace::{
    NSID_MAX, Namespace, NamespaceConfig, NamespaceIdError, NamespaceState, Namespaces,
};
pub use shared::{
    AttachError, Change, ChangeError, Controller, FenceScope, Notice, OpenVolume, PortChange,
    PortInUse, Shared,
};
pub use volumes::{
    Found, LabelledDrive, LogFill, Opened, Owner, Split, VolumeFill, VolumeInUse, VolumeUsage,
    VolumeUse, Volumes,
};
