//! Streams.

use std::any::Any;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use riopipe::{BLOCK_BYTES, ReadId, Seq, StreamFd, StreamNotClosed, Until};
use riopipe_capi::{Failure, RIOP_RANGE};

use crate::buf::Buf;
use crate::error::{busy, closed, raise};
use crate::group::Group;
use crate::memory::{Submitted, Target, read_into};
use crate::recovery::StreamRecovery;
use crate::time::{Marks, limit, sliced};
use crate::watch::{Waker, Watch};

/// An open stream of a volume.
#[pyclass(frozen, module = "riopipe")]
pub(crate) struct Stream {
    id: u16,
    open: Mutex<Option<Open>>,
}

struct Open {
    stream: riopipe::Stream,
    fd: Option<StreamFd>,
}

impl Stream {
    pub(crate) fn new(stream: riopipe::Stream) -> Self {
        Self { id: stream.id().0, open: Mutex::new(Some(Open { stream, fd: None })) }
    }

    /// Calls the stream, if no other thread does and it is open. The caller has released the lock of the interpreter.
    pub(crate) fn call<T>(
        &self,
        call: impl FnOnce(&mut riopipe::Stream) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.call_open(|open| call(&mut open.as_mut().ok_or_else(is_closed)?.stream))
    }

    fn call_open<T>(
        &self,
        call: impl FnOnce(&mut Option<Open>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        match self.open.try_lock() {
            Ok(mut open) => call(&mut open),
            Err(TryLockError::WouldBlock) => Err(busy("stream")),
            Err(TryLockError::Poisoned(_)) => Err(closed(
                "an earlier call has failed in the library (a panic): open the stream anew",
            )),
        }
    }

    /// Calls the stream without the lock of the interpreter.
    pub(crate) fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut riopipe::Stream) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        py.detach(|| self.call(call)).map_err(raise)
    }

    fn wait_until(&self, py: Python<'_>, until: Until, timeout: Option<f64>) -> PyResult<Marks> {
        let limit = limit(timeout)?;
        let marks =
            sliced(py, limit, |limit| self.call(|stream| Ok(stream.wait(until, Some(limit))?)))?;
        Ok(marks.into())
    }
}

fn is_closed() -> Failure {
    closed("the stream is closed")
}

#[pymethods]
impl Stream {
    /// The id of the stream.
    #[getter]
    fn id(&self) -> u16 {
        self.id
    }

    /// The seq of the last group that was submitted.
    #[getter]
    fn last(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |stream| Ok(stream.last().0))
    }

    /// The seq of the last group that is released.
    #[getter]
    fn released(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |stream| Ok(stream.released().0))
    }

    /// The findings of the stream's own recovery; `None` if there was none.
    #[getter]
    fn recovery(&self, py: Python<'_>) -> PyResult<Option<StreamRecovery>> {
        self.with(py, |stream| Ok(stream.recovery().map(StreamRecovery::from)))
    }

    /// Whether the stream is closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.call_open(|open| Ok(open.is_none()))).map_err(raise)
    }

    /// Takes a buffer of `length` bytes from the stream.
    // The type hints have the number, too.
    #[pyo3(signature = (length=4096))]
    fn buf(&self, py: Python<'_>, length: usize) -> PyResult<Buf> {
        self.with(py, |stream| Ok(Buf::new(stream.buf(length)?)))
    }

    /// Begins a group.
    #[pyo3(signature = (*, durable=false))]
    fn group(slf: Bound<'_, Self>, durable: bool) -> Group {
        Group::new(slf.unbind(), durable)
    }

    /// Sends, receives, and returns the marks, without waiting.
    fn poll(&self, py: Python<'_>) -> PyResult<Marks> {
        self.with(py, |stream| Ok(stream.poll()?.into()))
    }

    /// Sends the submitted groups, without waiting.
    fn send(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |stream| Ok(stream.send()?))
    }

    /// Waits until group `seq` and all earlier ones are complete.
    #[pyo3(signature = (seq, timeout=None))]
    fn wait_complete(&self, py: Python<'_>, seq: u64, timeout: Option<f64>) -> PyResult<Marks> {
        self.wait_until(py, Until::Complete(Seq(seq)), timeout)
    }

    /// Waits until group `seq` and all earlier ones are durable.
    #[pyo3(signature = (seq, timeout=None))]
    fn wait_durable(&self, py: Python<'_>, seq: u64, timeout: Option<f64>) -> PyResult<Marks> {
        self.wait_until(py, Until::Durable(Seq(seq)), timeout)
    }

    /// Waits until there is space for groups again.
    #[pyo3(signature = (timeout=None))]
    fn wait_space(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Marks> {
        self.wait_until(py, Until::Space, timeout)
    }

    /// Waits until nothing is in flight.
    #[pyo3(signature = (timeout=None))]
    fn wait_idle(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Marks> {
        self.wait_until(py, Until::Idle, timeout)
    }

    /// Waits until a mark has moved.
    #[pyo3(signature = (timeout=None))]
    fn wait_moved(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Marks> {
        self.wait_until(py, Until::Moved, timeout)
    }

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
        read_into(py, &targets, |extents| self.call(|stream| Ok(stream.read_many(extents, limit)?)))
    }

    /// Submits a read into the memory of a writable object, without waiting. Returns the number of the read.
    #[pyo3(signature = (lba, into, timeout=None))]
    fn submit_read(
        &self,
        py: Python<'_>,
        lba: u64,
        into: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let limit = limit(timeout)?;
        let (lba, memory) = Target::new(lba, into)?.submitted(into.clone().unbind());
        self.with(py, |stream| {
            let submitted = stream.submit_read(lba, memory, limit);
            Ok(submitted.map_err(|not_submitted| not_submitted.error)?.0)
        })
    }

    /// Takes the reads that have ended.
    fn read_ends(&self, py: Python<'_>) -> PyResult<Vec<ReadEnd>> {
        let ends = self
            .with(py, |stream| Ok(std::iter::from_fn(|| stream.take_read()).collect::<Vec<_>>()))?;
        Ok(ends.into_iter().map(|end| ReadEnd::new(py, end)).collect())
    }

    /// Waits until a submitted read has ended, or none is in flight.
    #[pyo3(signature = (timeout=None))]
    fn wait_read(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Marks> {
        self.wait_until(py, Until::ReadEnded, timeout)
    }

    /// Cancels a submitted read. Returns whether it was in flight.
    fn cancel_read(&self, py: Python<'_>, id: u64) -> PyResult<bool> {
        self.with(py, |stream| Ok(stream.cancel_read(ReadId(id))))
    }

    /// The descriptor for event loops.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        let fileno = || {
            self.call_open(|open| {
                let open = open.as_mut().ok_or_else(is_closed)?;
                if open.fd.is_none() {
                    open.fd = Some(open.stream.event_fd()?);
                }
                Ok(open.fd.as_ref().expect("it was set above").as_raw_fd())
            })
        };
        py.detach(fileno).map_err(raise)
    }

    /// The time until the next poll at the latest, seconds; `None` if there is no such time.
    fn next_deadline(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        self.with(py, |stream| {
            let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
            Ok(stream.next_deadline().map(|deadline| left(deadline).as_secs_f64()))
        })
    }

    /// Restarts a failed stream.
    fn reopen(&self, py: Python<'_>) -> PyResult<StreamRecovery> {
        self.with(py, |stream| Ok(StreamRecovery::from(&stream.reopen()?)))
    }

    /// Makes a watch.
    fn watch(&self, py: Python<'_>) -> PyResult<Watch> {
        self.with(py, |stream| Ok(Watch(stream.watch())))
    }

    /// Makes a waker.
    fn waker(&self, py: Python<'_>) -> PyResult<Waker> {
        self.with(py, |stream| Ok(Waker(stream.waker())))
    }

    /// Makes all groups durable and closes the stream. Returns the seq of the last group. Nothing happens if it is closed.
    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<u64>> {
        sliced(py, limit(timeout)?, |limit| self.close_within(limit))
    }

    /// Ends the stream at once, as a crash does.
    fn free(&self, py: Python<'_>) -> PyResult<()> {
        let free = |open: &mut Option<Open>| {
            *open = None;
            Ok(())
        };
        py.detach(|| self.call_open(free)).map_err(raise)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// Closes the stream. One that can't be closed is freed; that is an exception only if the block has none.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let result = self.close(py, None);
        if result.is_err() {
            self.free(py)?;
        }
        if kind.is_none() { result.map(|_| ()) } else { Ok(()) }
    }

    fn __repr__(&self) -> String {
        format!("<riopipe.Stream {}>", self.id)
    }
}

impl Stream {
    fn close_within(&self, limit: Duration) -> Result<Option<u64>, Failure> {
        self.call_open(|open| {
            let Some(Open { stream, fd }) = open.take() else { return Ok(None) };
            match stream.close_within(limit) {
                Ok(last) => Ok(Some(last.0)),
                Err(StreamNotClosed { error, back }) => {
                    *open = Some(Open { stream: *back, fd });
                    Err(error.into())
                }
            }
        })
    }
}

/// The end of a submitted read.
#[pyclass(frozen, get_all, module = "riopipe")]
pub(crate) struct ReadEnd {
    /// The number of the read.
    id: u64,
    /// The object with the memory.
    memory: Py<PyAny>,
    /// Why the read failed: a `riopipe.Error`; `None` after a success.
    error: Option<Py<PyAny>>,
}

impl ReadEnd {
    fn new(py: Python<'_>, end: riopipe::ReadEnd) -> Self {
        let riopipe::ReadEnd { id: ReadId(id), memory, result } = end;
        let memory: Box<dyn Any> = memory;
        let memory = memory.downcast::<Submitted>().expect("all reads of Python have such memory");
        let error = result.err().map(|error| raise(error).into_value(py).into_any());
        Self { id, memory: memory.into_object(), error }
    }
}

#[pymethods]
impl ReadEnd {
    fn __repr__(&self) -> String {
        let state = if self.error.is_some() { "failed" } else { "read" };
        format!("<riopipe.ReadEnd {} {state}>", self.id)
    }
}

/// An array of bytes for so many blocks.
pub(crate) fn blocks_array(py: Python<'_>, blocks: usize) -> PyResult<Bound<'_, PyByteArray>> {
    let length = blocks.checked_mul(BLOCK_BYTES).filter(|length| isize::try_from(*length).is_ok());
    let length = length.ok_or_else(|| {
        raise(Failure::new(RIOP_RANGE, format!("{blocks} blocks are more than any memory")))
    })?;
    PyByteArray::new_with(py, length, |_| Ok(()))
}

/// The memory of extents.
pub(crate) fn targets(extents: &[(u64, Bound<'_, PyAny>)]) -> PyResult<Vec<Target>> {
    extents.iter().map(|(lba, into)| Target::new(*lba, into)).collect()
}
