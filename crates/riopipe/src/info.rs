//! The properties of a volume, for people and programs.

use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;
use serde::{Serialize, Serializer};

/// A volume, as its labels and targets describe it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VolumeInfo {
    /// Its name.
    pub name: String,
    /// Its id.
    #[serde(serialize_with = "as_text")]
    pub id: VolumeId,
    /// Bytes of a block.
    pub block_size: u32,
    /// Blocks.
    pub blocks: u64,
    /// Blocks of a stripe unit.
    pub unit_blocks: u32,
    /// Streams.
    pub streams: u16,
    /// The owner's generation on the labels.
    pub generation: u32,
    /// The engine that it was made for.
    #[serde(serialize_with = "as_text")]
    pub engine: EngineKind,
    /// Its members, in order.
    pub members: Vec<MemberInfo>,
}

/// A member of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemberInfo {
    /// The address of the member.
    #[serde(serialize_with = "as_text")]
    pub addr: crate::MemberAddr,
    /// Its subsystem.
    pub nqn: String,
    /// Its NGUID, hexadecimal.
    pub nguid: String,
    /// Blocks of the namespace.
    pub blocks: u64,
    /// Whether it has a volatile write cache.
    pub volatile: bool,
    /// The ordering log of its target: `none`, `file`, `dax`, `block`, `pci`; `foreign` if the
    /// target doesn't have Rio's extension.
    pub log: String,
    /// Log slots per stream there.
    pub slots: u32,
    /// Host NQN of the volume's owner as this target sees it, if it has one.
    pub owner: Option<String>,
    /// Log entries that have not been recovered.
    pub unrecovered: u32,
    /// Whether the log is lost: with the target's last boot, or because it is older than the
    /// volume's labels.
    pub log_lost: bool,
}

fn as_text<T: std::fmt::Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}
