//! The properties of a volume, for people and programs.

use std::fmt::Display;

use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;
use serde::{Serialize, Serializer};

/// A volume, as its labels and targets describe it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VolumeInfo {
    /// The name of the volume.
    pub name: String,
    /// The id of the volume: 16 random bytes.
    #[serde(serialize_with = "as_text")]
    pub id: VolumeId,
    /// The size of a block, bytes.
    pub block_size: u32,
    /// The size of the volume, in blocks.
    pub blocks: u64,
    /// The size of a stripe unit, in blocks.
    pub unit_blocks: u32,
    /// The number of streams.
    pub streams: u16,
    /// The generation on the labels: that of the last owner.
    pub generation: u32,
    /// The engine for which the volume was created.
    #[serde(serialize_with = "as_text")]
    pub engine: EngineKind,
    /// The members of the volume, in order.
    pub members: Vec<MemberInfo>,
}

/// A member of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemberInfo {
    /// The address of the member.
    #[serde(serialize_with = "as_text")]
    pub addr: crate::MemberAddr,
    /// The NQN of the target's subsystem.
    pub nqn: String,
    /// The NGUID of the namespace, hexadecimal.
    pub nguid: String,
    /// The size of the namespace, in blocks.
    pub blocks: u64,
    /// Whether the drive has a volatile write cache.
    pub volatile: bool,
    /// The kind of the target's ordering log: `none`, `file`, `dax`, `block`, `pci`; `foreign` if the
    /// target does not have Rio's extension.
    pub log: String,
    /// Log slots for each stream on this target.
    pub slots: u32,
    /// The host NQN of the volume's owner on this target, if another initiator owns it.
    pub owner: Option<String>,
    /// The number of log entries on this target that have not been recovered.
    pub unrecovered: u32,
    /// Whether the target's log is lost: since its last boot, or because it is older than the volume's
    /// labels.
    pub log_lost: bool,
}

/// Serialises a value as its text.
pub(crate) fn as_text<T: Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

/// Serialises a value as its text, or as null.
pub(crate) fn as_text_or_null<T: Display, S: Serializer>(
    value: &Option<T>,
    to: S,
) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => to.collect_str(value),
        None => to.serialize_none(),
    }
}

/// Serialises values as a list of their texts.
pub(crate) fn as_texts<T: Display, S: Serializer>(values: &[T], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(values.iter().map(ToString::to_string))
}
