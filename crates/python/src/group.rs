//! Groups of writes.

use std::sync::{Mutex, PoisonError, TryLockError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use riopipe_capi::Staged;

use crate::buf::Buf;
use crate::error::{busy, raise};
use crate::memory::Memory;
use crate::options::place;
use crate::stream::Stream;
use crate::time::{limit, sliced};

/// Writes that are not submitted yet, for one stream.
#[pyclass(frozen, module = "riopipe")]
pub(crate) struct Group {
    stream: Py<Stream>,
    staged: Mutex<Staged>,
    /// Whether the end of a `with` block submits it as durable.
    durable: bool,
    seq: Mutex<Option<u64>>,
}

impl Group {
    pub(crate) fn new(stream: Py<Stream>, durable: bool) -> Self {
        Self { stream, staged: Mutex::default(), durable, seq: Mutex::default() }
    }

    fn with<T>(&self, change: impl FnOnce(&mut Staged) -> T) -> PyResult<T> {
        match self.staged.try_lock() {
            Ok(mut staged) => Ok(change(&mut staged)),
            Err(TryLockError::Poisoned(poisoned)) => Ok(change(&mut poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => Err(raise(busy("group"))),
        }
    }
}

#[pymethods]
impl Group {
    /// Adds a write of `data` at block `lba`. A `Buf` is taken. Other bytes are copied into a new buffer of the stream.
    fn write<'py>(
        slf: Bound<'py, Self>,
        lba: u64,
        data: &Bound<'py, PyAny>,
        place: &str,
    ) -> PyResult<Bound<'py, Self>> {
        let place = self::place(place)?;
        let this = slf.get();
        let buf = match data.cast::<Buf>() {
            Ok(buf) => {
                // Nothing may fail behind this.
                this.with(|_| ())?;
                buf.get().take()?
            }
            Err(_) => {
                let memory = Memory::new(data)?;
                let (stream, length) = (this.stream.get(), memory.len());
                let mut buf = stream.with(slf.py(), |stream| Ok(stream.buf(length)?))?;
                memory.copy_to(slf.py(), &mut buf);
                buf
            }
        };
        this.with(|staged| staged.write(lba, place, buf))?;
        Ok(slf)
    }

    /// Adds a request that makes blocks read as zeroes.
    #[pyo3(signature = (lba, blocks=1))]
    fn discard(slf: Bound<'_, Self>, lba: u64, blocks: u32) -> PyResult<Bound<'_, Self>> {
        slf.get().with(|staged| staged.discard(lba, blocks))?.map_err(raise)?;
        Ok(slf)
    }

    /// Sets the tag of the group.
    fn tag(slf: Bound<'_, Self>, tag: u64) -> PyResult<Bound<'_, Self>> {
        slf.get().with(|staged| staged.tag(tag))?;
        Ok(slf)
    }

    /// Lets another stream follow the group.
    fn follower(slf: Bound<'_, Self>, stream: u16) -> PyResult<Bound<'_, Self>> {
        slf.get().with(|staged| staged.follower(stream))?;
        Ok(slf)
    }

    /// Submits the group, and returns its seq.
    #[pyo3(signature = (*, durable=None, timeout=None))]
    fn submit(&self, py: Python<'_>, durable: Option<bool>, timeout: Option<f64>) -> PyResult<u64> {
        let durable = durable.unwrap_or(self.durable);
        let mut staged = match self.staged.try_lock() {
            Ok(staged) => staged,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(raise(busy("group"))),
        };
        let stream = self.stream.get();
        let staged = &mut *staged;
        let seq = sliced(py, limit(timeout)?, |limit| {
            stream.call(|stream| staged.submit(stream, durable, Some(limit)))
        })?;
        *self.seq.lock().unwrap_or_else(PoisonError::into_inner) = Some(seq.0);
        Ok(seq.0)
    }

    /// The seq of the last submission.
    #[getter]
    fn seq(&self) -> PyResult<u64> {
        let seq = *self.seq.lock().unwrap_or_else(PoisonError::into_inner);
        seq.ok_or_else(|| PyValueError::new_err("the group was not submitted"))
    }

    /// Makes the group empty.
    fn reset(&self) -> PyResult<()> {
        self.with(Staged::reset)
    }

    fn __len__(&self) -> PyResult<usize> {
        self.with(|staged| staged.len())
    }

    /// An empty group is a group, too.
    fn __bool__(&self) -> bool {
        true
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// Submits the group if the block has ended without an exception; else makes it empty.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if kind.is_none() { self.submit(py, None, None).map(|_| ()) } else { self.reset() }
    }
}
