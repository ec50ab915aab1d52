//! The properties of a volume.

use std::ffi::c_char;
use std::mem::size_of;

use riopipe::VolumeInfo;

use crate::memory::Structure;

/// See `riop_volume_info` in `riopipe.h`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RiopVolumeInfo {
    /// The size of the structure, bytes.
    pub size: usize,
    /// The size of the volume, in blocks.
    pub blocks: u64,
    /// The size of a block, bytes.
    pub block_size: u32,
    /// The size of a stripe unit, in blocks.
    pub unit_blocks: u32,
    /// The number of streams.
    pub streams: u32,
    /// The number of members.
    pub members: u32,
    /// The generation on the labels.
    pub generation: u32,
    /// The greatest number of log entries that wait for recovery on one target.
    pub unrecovered: u32,
    /// The id.
    pub id: [u8; 16],
    /// The name of the engine for which the volume was created, with a zero byte at its end.
    pub engine: [c_char; 16],
    /// The name of the volume, with a zero byte at its end.
    pub name: [c_char; 72],
}

// SAFETY: the structure is `repr(C)`, begins with its size, and has only numbers.
unsafe impl Structure for RiopVolumeInfo {
    const NAME: &'static str = "riop_volume_info";
}

impl From<&VolumeInfo> for RiopVolumeInfo {
    fn from(info: &VolumeInfo) -> Self {
        Self {
            size: size_of::<Self>(),
            blocks: info.blocks,
            block_size: info.block_size,
            unit_blocks: info.unit_blocks,
            streams: info.streams.into(),
            members: u32::try_from(info.members.len()).unwrap_or(u32::MAX),
            generation: info.generation,
            unrecovered: info.members.iter().map(|member| member.unrecovered).max().unwrap_or(0),
            id: info.id.0,
            engine: chars(info.engine.name()),
            name: chars(&info.name),
        }
    }
}

/// The text in an array, with at least one zero byte at its end. A text that is too long is cut.
fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut chars = [0; N];
    let bytes = text.bytes().take(N - 1);
    chars.iter_mut().zip(bytes).for_each(|(to, from)| *to = from as c_char);
    chars
}
