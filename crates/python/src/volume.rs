//! Volumes.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use riopipe::{CreateOptions, NotClosed, OpenOptions, ReaderOptions, StreamOptions};
use riopipe_capi::Failure;

use crate::error::{closed, raise};
use crate::info::VolumeInfo;
use crate::options::{ConnectOptions, connect, engine, members};
use crate::reader::Reader;
use crate::recovery::{Recovery, Written, written};
use crate::stream::Stream;
use crate::time::{limit, seconds};

/// The limit of a close without one.
const LONGEST_CLOSE: Duration = Duration::from_secs(24 * 3600);

/// An open volume, which this process owns.
#[pyclass(frozen, module = "riopipe")]
pub(crate) struct Volume {
    open: Mutex<Option<riopipe::Volume>>,
    info: Py<VolumeInfo>,
    recovery: Py<Recovery>,
}

impl Volume {
    /// Calls the volume without the lock of the interpreter. Other calls wait meanwhile.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&riopipe::Volume) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        let call = || {
            let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            call(open.as_ref().ok_or_else(|| closed("the volume is closed"))?)
        };
        py.detach(call).map_err(raise)
    }
}

#[pymethods]
impl Volume {
    /// Opens a volume, and becomes its owner.
    #[staticmethod]
    #[pyo3(signature = (name, members, *, engine=None, take_over=false, accept_lost_log=false, check_ownership=false,
                        wait_for_lease=0.0, connect=None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn open(
        py: Python<'_>,
        name: String,
        members: Vec<String>,
        engine: Option<&str>,
        take_over: bool,
        accept_lost_log: bool,
        check_ownership: bool,
        wait_for_lease: f64,
        connect: Option<&Bound<'_, ConnectOptions>>,
    ) -> PyResult<Self> {
        let members = self::members(&members)?;
        let options = OpenOptions {
            engine: self::engine(engine)?,
            take_over,
            wait_for_lease: seconds(wait_for_lease)?,
            accept_lost_log,
            check_ownership,
            connect: self::connect(connect),
        };
        let opened = py.detach(|| riopipe::Volume::open(&name, &members, &options));
        let (volume, recovery) = opened.map_err(raise)?;
        Ok(Self {
            info: Py::new(py, VolumeInfo::from(volume.info()))?,
            recovery: Py::new(py, Recovery::new(py, &recovery)?)?,
            open: Mutex::new(Some(volume)),
        })
    }

    /// The properties, as they were when the volume was opened.
    #[getter]
    fn info(&self, py: Python<'_>) -> Py<VolumeInfo> {
        self.info.clone_ref(py)
    }

    /// The findings when the volume was opened.
    #[getter]
    fn recovery(&self, py: Python<'_>) -> Py<Recovery> {
        self.recovery.clone_ref(py)
    }

    /// The name of the engine that runs.
    #[getter]
    fn engine(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.with(py, |volume| Ok(volume.engine().name()))
    }

    /// The figures of the volume, as JSON.
    fn stat_json(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |volume| Ok(serde_json::to_string(&volume.stat())?))
    }

    /// Opens a stream.
    #[pyo3(signature = (id, *, kept_bytes_max=None, queue_depth=None, timeout=None, merge=true, orderless=false))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn stream(
        &self,
        py: Python<'_>,
        id: u16,
        kept_bytes_max: Option<u64>,
        queue_depth: Option<usize>,
        timeout: Option<f64>,
        merge: bool,
        orderless: bool,
    ) -> PyResult<Stream> {
        let default = StreamOptions::default();
        let options = StreamOptions {
            queue_depth: queue_depth.unwrap_or(default.queue_depth),
            kept_bytes_max: kept_bytes_max.unwrap_or(default.kept_bytes_max),
            merge,
            timeout: limit(timeout)?.unwrap_or(default.timeout),
            orderless,
        };
        self.with(py, |volume| Ok(Stream::new(volume.stream(id, &options)?)))
    }

    /// Makes a reader.
    #[pyo3(signature = (*, concurrent=None, queue_depth=None, timeout=None))]
    fn reader(
        &self,
        py: Python<'_>,
        concurrent: Option<usize>,
        queue_depth: Option<usize>,
        timeout: Option<f64>,
    ) -> PyResult<Reader> {
        let default = ReaderOptions::default();
        let options = ReaderOptions {
            concurrent: concurrent.unwrap_or(default.concurrent),
            queue_depth: queue_depth.unwrap_or(default.queue_depth),
            timeout: limit(timeout)?.unwrap_or(default.timeout),
        };
        self.with(py, |volume| Ok(Reader(volume.reader(&options))))
    }

    /// The writes of stream `id` that wait to be acknowledged.
    fn pending(&self, py: Python<'_>, id: u16) -> PyResult<Vec<Written>> {
        self.with(py, |volume| Ok(volume.in_place(id).iter().map(written).collect()))
    }

    /// Acknowledges these writes.
    fn acknowledge(&self, py: Python<'_>, id: u16) -> PyResult<()> {
        self.with(py, |volume| Ok(volume.acknowledge(id)?))
    }

    /// Releases the volume. Nothing happens if it is closed.
    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = limit(timeout)?.unwrap_or(LONGEST_CLOSE);
        let close = || {
            let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(volume) = open.take() else { return Ok(()) };
            volume.close_within(limit).map_err(|NotClosed { error, back }| {
                *open = Some(back);
                Failure::from(error)
            })
        };
        py.detach(close).map_err(raise)
    }

    /// Ends the use of the volume at once, as a crash does.
    fn free(&self, py: Python<'_>) {
        py.detach(|| drop(self.open.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// Closes the volume. One that can't be closed is freed; that is an exception only if the block has none.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let result = self.close(py, None);
        if result.is_err() {
            self.free(py);
        }
        if kind.is_none() { result } else { Ok(()) }
    }

    fn __repr__(&self) -> String {
        format!("<riopipe.Volume {:?}>", self.info.get())
    }
}

/// Creates a volume of the members, in this order.
#[pyfunction]
#[pyo3(signature = (name, members, *, engine=None, unit_blocks=None, streams=None, slots=0, prepare_blocks=None,
                    force=false, connect=None))]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
pub(crate) fn create(
    py: Python<'_>,
    name: String,
    members: Vec<String>,
    engine: Option<&str>,
    unit_blocks: Option<u32>,
    streams: Option<u16>,
    slots: u32,
    prepare_blocks: Option<u32>,
    force: bool,
    connect: Option<&Bound<'_, ConnectOptions>>,
) -> PyResult<VolumeInfo> {
    let members = self::members(&members)?;
    let default = CreateOptions::default();
    let options = CreateOptions {
        unit_blocks: unit_blocks.unwrap_or(default.unit_blocks),
        streams: streams.unwrap_or(default.streams),
        engine: self::engine(engine)?,
        slots,
        prepare_blocks,
        force,
        connect: self::connect(connect),
    };
    let created = py.detach(|| riopipe::Volume::create(&name, &members, &options));
    Ok(VolumeInfo::from(&created.map_err(raise)?))
}

/// Reads the properties of the volume that the members make, without claiming it.
#[pyfunction]
#[pyo3(signature = (members, *, connect=None))]
pub(crate) fn inspect(
    py: Python<'_>,
    members: Vec<String>,
    connect: Option<&Bound<'_, ConnectOptions>>,
) -> PyResult<VolumeInfo> {
    let (members, connect) = (self::members(&members)?, self::connect(connect));
    let found = py.detach(|| riopipe::Volume::inspect(&members, &connect));
    Ok(VolumeInfo::from(&found.map_err(raise)?))
}

/// Lists the volumes on the targets of the members, as JSON.
#[pyfunction]
#[pyo3(signature = (members, *, connect=None))]
pub(crate) fn list_json(
    py: Python<'_>,
    members: Vec<String>,
    connect: Option<&Bound<'_, ConnectOptions>>,
) -> PyResult<String> {
    let (members, connect) = (self::members(&members)?, self::connect(connect));
    let list = py.detach(|| {
        let list = riopipe::Volume::list(&members, &connect)?;
        Ok::<_, Failure>(serde_json::to_string(&list)?)
    });
    list.map_err(raise)
}

/// Deletes a volume with all its data.
#[pyfunction]
#[pyo3(signature = (name, members, *, force=false, connect=None))]
pub(crate) fn delete(
    py: Python<'_>,
    name: String,
    members: Vec<String>,
    force: bool,
    connect: Option<&Bound<'_, ConnectOptions>>,
) -> PyResult<()> {
    let (members, connect) = (self::members(&members)?, self::connect(connect));
    let deleted = py.detach(|| riopipe::Volume::delete(&name, &members, force, &connect));
    deleted.map(|_| ()).map_err(raise)
}
