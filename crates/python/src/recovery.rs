//! The findings of a recovery.

use pyo3::prelude::*;
use riopipe::InPlaceRange;

/// A range of blocks that a group has written: seq, first block, number of blocks.
pub(crate) type Written = (u64, u64, u64);

/// A range as Python has it.
pub(crate) fn written(range: &InPlaceRange) -> Written {
    (range.seq.0, range.range.lba, range.range.blocks)
}

/// The findings when a volume was opened.
#[pyclass(frozen, get_all, module = "riopipe")]
pub(crate) struct Recovery {
    volume: String,
    is_nothing: bool,
    streams: Vec<Py<StreamRecovery>>,
    torn: u64,
    text: String,
}

impl Recovery {
    pub(crate) fn new(py: Python<'_>, recovery: &riopipe::Recovery) -> PyResult<Self> {
        let streams =
            recovery.streams.iter().map(|stream| Py::new(py, StreamRecovery::from(stream)));
        Ok(Self {
            volume: recovery.volume.clone(),
            is_nothing: recovery.is_nothing(),
            streams: streams.collect::<PyResult<_>>()?,
            torn: recovery.torn,
            text: recovery.to_string(),
        })
    }
}

#[pymethods]
impl Recovery {
    fn __str__(&self) -> &str {
        &self.text
    }

    /// The findings for stream `id`; `None` if the volume has no such stream, or no ordering log.
    fn stream(&self, py: Python<'_>, id: u16) -> Option<Py<StreamRecovery>> {
        self.streams
            .iter()
            .find(|stream| stream.get().stream == id)
            .map(|stream| stream.clone_ref(py))
    }
}

/// The findings for one stream.
#[pyclass(frozen, get_all, eq, module = "riopipe")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StreamRecovery {
    stream: u16,
    last: u64,
    tag: u64,
    kept: u64,
    dropped: u64,
    replayed: u64,
    undone_blocks: u64,
    found: u32,
    in_place: Vec<Written>,
    in_doubt: Vec<Written>,
    acknowledge: bool,
    log_given_up: bool,
}

impl From<&riopipe::StreamRecovery> for StreamRecovery {
    fn from(found: &riopipe::StreamRecovery) -> Self {
        Self {
            stream: found.stream.0,
            last: found.last.0,
            tag: found.tag,
            kept: found.kept,
            dropped: found.dropped,
            replayed: found.replayed,
            undone_blocks: found.undone_blocks(),
            found: found.found,
            in_place: found.in_place.iter().map(written).collect(),
            in_doubt: found.in_doubt.iter().map(written).collect(),
            acknowledge: found.acknowledge,
            log_given_up: found.log_given_up,
        }
    }
}

#[pymethods]
impl StreamRecovery {
    fn __repr__(&self) -> String {
        let Self { stream, last, tag, undone_blocks, .. } = self;
        format!(
            "StreamRecovery(stream={stream}, last={last}, tag={tag}, undone_blocks={undone_blocks})"
        )
    }
}
