//! The properties of a volume.

use pyo3::prelude::*;

/// The properties of a volume.
#[pyclass(frozen, get_all, eq, module = "riopipe")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeInfo {
    name: String,
    id: String,
    blocks: u64,
    block_size: u32,
    unit_blocks: u32,
    streams: u16,
    generation: u32,
    engine: String,
    members: Vec<String>,
    unrecovered: u32,
}

impl From<&riopipe::VolumeInfo> for VolumeInfo {
    fn from(info: &riopipe::VolumeInfo) -> Self {
        Self {
            name: info.name.clone(),
            id: info.id.to_string(),
            blocks: info.blocks,
            block_size: info.block_size,
            unit_blocks: info.unit_blocks,
            streams: info.streams,
            generation: info.generation,
            engine: info.engine.name().to_owned(),
            members: info.members.iter().map(|member| member.addr.to_string()).collect(),
            unrecovered: info.members.iter().map(|member| member.unrecovered).max().unwrap_or(0),
        }
    }
}

#[pymethods]
impl VolumeInfo {
    fn __repr__(&self) -> String {
        let Self { name, blocks, streams, engine, .. } = self;
        format!("VolumeInfo(name={name:?}, blocks={blocks}, streams={streams}, engine={engine:?})")
    }
}
