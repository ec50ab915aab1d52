//! The Python module `riopipe._riopipe`: ordered volumes, streams and groups.
//!
//! The package `riopipe` (`python/riopipe`) has its names, its exceptions and its type hints; `docs/python.md` is the
//! introduction. This crate translates objects, and decides nothing: the library is [`riopipe`], and the codes of errors
//! and the groups that are not bound to a stream are those of the C interface ([`riopipe_capi`]).
//!
//! # Threads
//!
//! A call that may wait releases the lock of the interpreter (the GIL), so other threads of Python run meanwhile. While such a
//! call uses a stream, each other call on that stream is refused with `Busy`. A call that may wait long returns to the
//! interpreter a few times a second, so that Ctrl-C ends it.
//!
//! # Buffers
//!
//! A `Buf` has the bytes that are sent, and Python writes to them through the buffer protocol. A group takes
//! the buffer, because the stream needs the bytes until they are durable. It is refused while a `memoryview` of it is
//! alive, and afterwards no view of it can be made.

use pyo3::prelude::*;

mod buf;
mod error;
mod group;
mod info;
mod memory;
mod options;
mod reader;
mod recovery;
mod stream;
mod time;
mod volume;
mod watch;

/// The module.
#[pymodule]
fn _riopipe(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("BLOCK_BYTES", riopipe::BLOCK_BYTES)?;
    module.add("CODES", riopipe_capi::code_names().collect::<Vec<_>>())?;
    module.add_class::<buf::Buf>()?;
    module.add_class::<group::Group>()?;
    module.add_class::<info::VolumeInfo>()?;
    module.add_class::<options::ConnectOptions>()?;
    module.add_class::<reader::Reader>()?;
    module.add_class::<recovery::Recovery>()?;
    module.add_class::<recovery::StreamRecovery>()?;
    module.add_class::<stream::ReadEnd>()?;
    module.add_class::<stream::Stream>()?;
    module.add_class::<time::Marks>()?;
    module.add_class::<volume::Volume>()?;
    module.add_class::<watch::MarkWait>()?;
    module.add_class::<watch::Waker>()?;
    module.add_class::<watch::Watch>()?;
    module.add_function(wrap_pyfunction!(volume::create, module)?)?;
    module.add_function(wrap_pyfunction!(volume::delete, module)?)?;
    module.add_function(wrap_pyfunction!(volume::inspect, module)?)?;
    module.add_function(wrap_pyfunction!(volume::list_json, module)?)?;
    Ok(())
}
