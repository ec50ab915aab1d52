//! The engines by name, with their capabilities.

use core::fmt;

use crate::write_order::DriveOrder;

use super::{barrier, horae, linux, none, opimq, rio, sync};

/// An engine, by its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// Keeps no order at all. Its throughput is the upper bound for the other engines.
    None,
    /// Transfer, FLUSH, next group.
    Sync,
    /// The method of a journal on Linux: transfer, PREFLUSH, commit block with FUA.
    Linux,
    /// HORAE's method: ordering metadata on a control path, before the data.
    Horae,
    /// The barrier-enabled stack: the drive's cache barrier keeps the order.
    Barrier,
    /// OPIMQ's method: streams and epochs on drives that keep their order, with a queue for each
    /// core.
    Opimq,
    /// Rio's method: ordering attributes and ordering logs.
    Rio,
}

impl EngineKind {
    /// All engines, in the order that tables print them.
    pub const ALL: [Self; 7] =
        [Self::Sync, Self::Linux, Self::Horae, Self::Barrier, Self::Opimq, Self::Rio, Self::None];

    /// The engine of a new volume, unless the caller of the creation chooses another one.
    pub const PREFERRED: Self = Self::Rio;

    /// The engine of a volume where [`PREFERRED`](Self::PREFERRED) cannot run (trap T17).
    pub const FALLBACK: Self = Self::Sync;

    /// The capabilities of the engine.
    #[must_use]
    #[inline]
    pub const fn capabilities(self) -> Capabilities {
        match self {
            Self::None => none::CAPABILITIES,
            Self::Sync => sync::CAPABILITIES,
            Self::Linux => linux::CAPABILITIES,
            Self::Horae => horae::CAPABILITIES,
            Self::Barrier => barrier::CAPABILITIES,
            Self::Opimq => opimq::CAPABILITIES,
            Self::Rio => rio::CAPABILITIES,
        }
    }

    /// The name of the engine in options and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Sync => "sync",
            Self::Linux => "linux",
            Self::Horae => "horae",
            Self::Barrier => "barrier",
            Self::Opimq => "opimq",
            Self::Rio => "rio",
        }
    }

    /// The engine of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// The promise of the engine, in one sentence.
    #[must_use]
    pub const fn promise(self) -> &'static str {
        match self {
            Self::None => "no order: after a crash any subset of the unflushed writes may be there",
            Self::Sync => {
                "groups in order, each durable before the next starts; a group cut by a crash may be there in part"
            }
            Self::Linux => {
                "groups in order; the group cut by a crash may be there in part, but the last write of a durable group only behind all others"
            }
            Self::Horae => {
                "after a crash the prefix of whole groups that the last joint FLUSH covered, never a hole; with a prepare area updates in place behind it are rolled back"
            }
            Self::Barrier => {
                "after a crash a prefix of the groups; the group behind it may be there in part"
            }
            Self::Opimq => {
                "after a crash a prefix of groups; the group cut by it may be there in part"
            }
            Self::Rio => "after a crash a prefix of whole groups, never a hole",
        }
    }
}

/// The properties of an engine that the code of streams and volumes must know: what the engine
/// promises, and what it needs. Each engine defines its own value, beside its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether a group is there after a crash only if all groups before it are.
    pub keeps_order: bool,
    /// Whether the next group is sent only once the one before is durable. With such an engine, more
    /// than one group in flight gains nothing.
    pub is_serial: bool,
    /// Whether a group counts as complete only once it is durable.
    pub completes_durable: bool,
    /// Whether the engine's entries are in the targets' ordering logs. Such a volume needs space in
    /// the logs, its released marks must reach the targets so that slots become free (trap T1), and
    /// recovery finds a prefix and undoes the rest.
    pub keeps_log: bool,
    /// Whether a stream is bound to its connection before it sends anything, because the target
    /// appends its entries to a log.
    pub needs_binding: bool,
    /// Whether the target keeps the order of the stream's commands. It then decides which streams a
    /// failed FLUSH stops (trap T22).
    pub orders_at_target: bool,
    /// Whether a lost connection costs time only, because the engine sends again the requests that
    /// are not durable (promise P7).
    pub can_replay: bool,
    /// The order that each drive of the volume must keep by itself
    /// ([`DriveOrder::None`] if any drive serves).
    pub drive_order: DriveOrder,
    /// The number of queues, each with a connection of its own, that a stream has to each server.
    pub queues_per_server: u16,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
