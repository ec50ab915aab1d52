//! Watches and wakers: what other threads, and event loops, do with a stream.

use std::future::Future;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake};

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use riopipe::{Seq, StreamWaker};
use riopipe_capi::Failure;
use rustix::event::{EventfdFlags, eventfd};

use crate::error::{closed, raise};
use crate::time::{Marks, limit, sliced};

/// The marks of a stream, for other threads.
#[pyclass(frozen, module = "riopipe")]
pub(crate) struct Watch(pub(crate) riopipe::Watch);

#[pymethods]
impl Watch {
    /// The marks that were published last.
    fn marks(&self, py: Python<'_>) -> Marks {
        py.detach(|| self.0.marks()).into()
    }

    /// The seq of the last group that is released.
    #[getter]
    fn released(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.0.released().0)
    }

    /// Whether the stream has failed.
    #[getter]
    fn has_failed(&self, py: Python<'_>) -> bool {
        py.detach(|| self.0.has_failed())
    }

    /// Blocks until group `seq` is complete.
    #[pyo3(signature = (seq, timeout=None))]
    fn wait_complete(&self, py: Python<'_>, seq: u64, timeout: Option<f64>) -> PyResult<Marks> {
        let limit = limit(timeout)?;
        let marks = sliced(py, limit, |limit| Ok(self.0.wait_complete(Seq(seq), Some(limit))?))?;
        Ok(marks.into())
    }

    /// Blocks until group `seq` is durable.
    #[pyo3(signature = (seq, timeout=None))]
    fn wait_durable(&self, py: Python<'_>, seq: u64, timeout: Option<f64>) -> PyResult<Marks> {
        let limit = limit(timeout)?;
        let marks = sliced(py, limit, |limit| Ok(self.0.wait_durable(Seq(seq), Some(limit))?))?;
        Ok(marks.into())
    }

    /// A coroutine that ends when group `seq` is complete.
    fn complete<'py>(&self, py: Python<'py>, seq: u64) -> PyResult<Bound<'py, PyAny>> {
        coroutine(py, self.0.complete(Seq(seq)))
    }

    /// A coroutine that ends when group `seq` is durable.
    fn durable<'py>(&self, py: Python<'py>, seq: u64) -> PyResult<Bound<'py, PyAny>> {
        coroutine(py, self.0.durable(Seq(seq)))
    }
}

fn coroutine(py: Python<'_>, wait: riopipe::MarkWait) -> PyResult<Bound<'_, PyAny>> {
    let fd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
        .map_err(|error| PyOSError::new_err(error.raw_os_error()))?;
    let wait = MarkWait { wait: Mutex::new(Some(wait)), signal: Arc::new(Signal(fd)) };
    py.import("riopipe._aio")?.getattr("wait")?.call1((wait,))
}

/// Makes a descriptor readable. The thread that moves the mark does this. It takes no lock of the interpreter, so it never
/// waits for Python.
struct Signal(OwnedFd);

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        // It fails only if the counter is full, and then the descriptor is readable already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// A wait for a mark, for an event loop.
#[pyclass(frozen, module = "riopipe")]
pub(crate) struct MarkWait {
    /// `None` once it has ended.
    wait: Mutex<Option<riopipe::MarkWait>>,
    signal: Arc<Signal>,
}

#[pymethods]
impl MarkWait {
    /// A descriptor that is readable when `poll` must be called.
    fn fileno(&self) -> i32 {
        self.signal.0.as_raw_fd()
    }

    /// The marks, if they have reached the group; else `None`.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<Marks>> {
        let poll = || -> Result<Option<Marks>, Failure> {
            // Before the poll: a later signal stays.
            let _ = rustix::io::read(&self.signal.0, &mut [0; 8]);
            let mut wait = self.wait.lock().unwrap_or_else(PoisonError::into_inner);
            let future = wait.as_mut().ok_or_else(|| closed("the wait has ended"))?;
            let waker = Arc::clone(&self.signal).into();
            match Pin::new(future).poll(&mut Context::from_waker(&waker)) {
                Poll::Pending => Ok(None),
                Poll::Ready(result) => {
                    *wait = None;
                    Ok(Some(result?.into()))
                }
            }
        };
        py.detach(poll).map_err(raise)
    }
}

/// Interrupts a wait of a stream's thread.
#[pyclass(frozen, module = "riopipe")]
pub(crate) struct Waker(pub(crate) StreamWaker);

#[pymethods]
impl Waker {
    /// Ends the present wait of the stream's thread, or its next one, with `Woken`.
    fn wake(&self, py: Python<'_>) {
        py.detach(|| self.0.wake());
    }
}
