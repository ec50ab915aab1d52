//! Buffers for writes, with the buffer protocol.

use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::error::{closed, raise};

/// A buffer for a write: whole blocks, aligned to 4 KiB. `memoryview(buf)` is its memory, from which it is sent.
#[pyclass(frozen, module = "riopipe")]
pub(crate) struct Buf(Mutex<State>);

struct State {
    /// `None` once a group has taken it.
    buf: Option<riopipe::Buf>,
    /// The views of Python that are alive.
    views: usize,
}

impl Buf {
    pub(crate) fn new(buf: riopipe::Buf) -> Self {
        Self(Mutex::new(State { buf: Some(buf), views: 0 }))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        // No code panics while it has the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the buffer for a write. Refused while there are views: they would show memory that is sent, or is used again.
    pub(crate) fn take(&self) -> PyResult<riopipe::Buf> {
        let mut state = self.state();
        if state.views > 0 {
            return Err(PyBufferError::new_err(format!(
                "{} views of the buffer are alive: release them (memoryview.release, or `with`) before the write",
                state.views
            )));
        }
        state.buf.take().ok_or_else(|| raise(taken()))
    }
}

fn taken() -> riopipe_capi::Failure {
    closed("the buffer is in a group, or was written: take a new one from the stream")
}

#[pymethods]
impl Buf {
    fn __len__(&self) -> PyResult<usize> {
        self.state().buf.as_ref().map(|buf| buf.len()).ok_or_else(|| raise(taken()))
    }

    /// Fills a view of Python.
    ///
    /// # Safety
    /// `view` is that of the interpreter.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        let mut state = this.state();
        let Some(buf) = state.buf.as_mut() else {
            return Err(PyBufferError::new_err(taken().text));
        };
        let (bytes, length) = (buf.as_mut_ptr(), buf.len());
        // The length of a buffer is that of memory, so it fits.
        let length = length as ffi::Py_ssize_t;
        // SAFETY: the memory lives and stays where it is until the buffer is taken or dropped. It is not taken while there are
        // views, which are counted, and not dropped, because the view refers to this object. No code of Rust uses the
        // bytes meanwhile.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), bytes.cast(), length, 0, flags) };
        if filled != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        state.views += 1;
        Ok(())
    }

    /// Releases a view of Python.
    ///
    /// # Safety
    /// The view is one of this object.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.state().views -= 1;
    }
}
