//! Memory of Python objects that the library reads into, or copies from. All of this crate's `unsafe` is here and in `buf`.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use riopipe::{ReadExtent, ReadMemory};
use riopipe_capi::{Failure, check_disjoint};

use crate::error::raise;

/// The memory of an object, as bytes: of `bytes`, a `bytearray`, a `memoryview`, an array. While this exists, the object
/// neither moves nor frees it.
pub(crate) struct Memory(PyUntypedBuffer);

impl Memory {
    /// Gets the memory of `object`.
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("the memory has gaps: it must be contiguous"));
        }
        // Such an array has addresses of objects.
        if buffer.format().to_bytes().contains(&b'O') {
            return Err(PyBufferError::new_err("the memory has Python objects, and not bytes"));
        }
        Ok(Self(buffer))
    }

    /// The length, bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len_bytes()
    }

    /// Copies all bytes to `into`, which has as many.
    pub(crate) fn copy_to(&self, _py: Python<'_>, into: &mut [u8]) {
        assert_eq!(into.len(), self.len(), "the caller has made room for all");
        // SAFETY: the memory is contiguous and has so many bytes, as was checked when it was taken. No other code of Python
        // runs meanwhile, since this thread has the lock of the interpreter. `into` is memory of Rust.
        unsafe {
            std::ptr::copy_nonoverlapping(self.0.buf_ptr().cast(), into.as_mut_ptr(), self.len());
        }
    }
}

/// Writable memory, for blocks from `lba` on.
pub(crate) struct Target {
    lba: u64,
    memory: Memory,
}

impl Target {
    /// Gets the memory of `object`.
    pub(crate) fn new(lba: u64, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let memory = Memory::new(object)?;
        if memory.0.readonly() {
            return Err(PyBufferError::new_err("the memory for a read is read-only"));
        }
        Ok(Self { lba, memory })
    }
}

/// Writable memory of a submitted read. The object stays alive, and its memory where it is, until this is dropped.
pub(crate) struct Submitted {
    memory: Memory,
    /// The object.
    object: Py<PyAny>,
}

impl Submitted {
    /// The object, whose memory is its own again.
    pub(crate) fn into_object(self) -> Py<PyAny> {
        self.object
    }
}

impl Target {
    /// The memory for a submitted read of `object`, from which this was made, and the first block.
    pub(crate) fn submitted(self, object: Py<PyAny>) -> (u64, Submitted) {
        (self.lba, Submitted { memory: self.memory, object })
    }
}

impl ReadMemory for Submitted {
    fn length(&self) -> usize {
        self.memory.len()
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        debug_assert!(offset + bytes.len() <= self.memory.len(), "they lie within the length");
        // SAFETY: the memory is writable, contiguous and has so many bytes, as was checked when it was taken. It stays
        // where it is until it is released, when this is dropped. Code of Python that uses it meanwhile may read anything,
        // as in `read_into`.
        unsafe {
            let to = self.memory.0.buf_ptr().cast::<u8>().add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }
}

/// Calls `read` with the memory of all targets, without the lock of the interpreter.
pub(crate) fn read_into<T: Send>(
    py: Python<'_>,
    targets: &[Target],
    read: impl FnOnce(&mut [ReadExtent<'_>]) -> Result<T, Failure> + Send,
) -> PyResult<T> {
    let areas = targets.iter().map(|t| (t.memory.0.buf_ptr().addr(), t.memory.len()));
    check_disjoint(areas).map_err(raise)?;
    let mut extents: Vec<_> = targets
        .iter()
        .map(|target| {
            let (bytes, length) = (target.memory.0.buf_ptr().cast::<u8>(), target.memory.len());
            let into = match length {
                0 => &mut [][..],
                // SAFETY: the memory is writable, contiguous and has so many bytes, as was checked when it was taken. It
                // stays where it is until it is released, after the call. It overlaps no other extent, as was checked
                // above. Code of Python that uses it meanwhile, in another thread, may read anything, as with
                // `socket.recv_into`; the library reads nothing from it.
                _ => unsafe { std::slice::from_raw_parts_mut(bytes, length) },
            };
            ReadExtent { lba: target.lba, into }
        })
        .collect();
    py.detach(|| read(&mut extents)).map_err(raise)
}
