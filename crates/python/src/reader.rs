//! Readers: any thread reads a volume beside its streams.

use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::memory::read_into;
use crate::stream::{blocks_array, targets};
use crate::time::limit;

/// Reads a volume beside its streams. Any number of threads may use it at the same time.
#[pyclass(frozen, module = "riopipe")]
pub(crate) struct Reader(pub(crate) riopipe::Reader);

#[pymethods]
impl Reader {
    /// Reads `blocks` blocks from block `lba` on.
    #[pyo3(signature = (lba, blocks=1, timeout=None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        lba: u64,
        blocks: usize,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let bytes = blocks_array(py, blocks)?;
        self.read_into(py, lba, bytes.as_any(), timeout)?;
        Ok(bytes)
    }

    /// Reads into the memory of a writable object.
    #[pyo3(signature = (lba, into, timeout=None))]
    fn read_into(
        &self,
        py: Python<'_>,
        lba: u64,
        into: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.read_many(py, vec![(lba, into.clone())], timeout)
    }

    /// Reads several extents at once.
    #[pyo3(signature = (extents, timeout=None))]
    fn read_many(
        &self,
        py: Python<'_>,
        extents: Vec<(u64, Bound<'_, PyAny>)>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let limit = limit(timeout)?;
        let targets = targets(&extents)?;
        read_into(py, &targets, |extents| Ok(self.0.read_many(extents, limit)?))
    }
}
