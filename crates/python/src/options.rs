//! Options and addresses.

use std::path::PathBuf;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use riopipe::{EngineKind, MemberAddr, Place};

use crate::error::raise;
use crate::time::seconds;

/// The options of connections.
#[pyclass(frozen, module = "riopipe")]
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectOptions(pub(crate) riopipe::ConnectOptions);

#[pymethods]
impl ConnectOptions {
    #[new]
    #[pyo3(signature = (*, host_nqn=None, host_id=None, header_digest=false, data_digest=None, timeout=None,
                        keep_alive=None, loss_timeout=None, spin=None, dhchap_secret_file=None,
                        dhchap_ctrl_secret_file=None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        host_nqn: Option<String>,
        host_id: Option<&[u8]>,
        header_digest: bool,
        data_digest: Option<bool>,
        timeout: Option<f64>,
        keep_alive: Option<f64>,
        loss_timeout: Option<f64>,
        spin: Option<f64>,
        dhchap_secret_file: Option<PathBuf>,
        dhchap_ctrl_secret_file: Option<PathBuf>,
    ) -> PyResult<Self> {
        let mut options =
            riopipe::ConnectOptions { header_digest, data_digest, ..Default::default() };
        if let Some(nqn) = host_nqn {
            options.host_nqn = nqn;
        }
        if let Some(id) = host_id {
            options.host_id =
                id.try_into().map_err(|_| PyValueError::new_err("host_id has 16 bytes"))?;
        }
        let times = [
            (timeout, &mut options.timeout),
            (keep_alive, &mut options.keep_alive),
            (loss_timeout, &mut options.loss_timeout),
            (spin, &mut options.spin),
        ];
        for (given, place) in times {
            if let Some(given) = given {
                *place = seconds(given)?;
            }
        }
        let files = (dhchap_secret_file.as_deref(), dhchap_ctrl_secret_file.as_deref());
        options.dhchap = riopipe_capi::dhchap(files.0, files.1).map_err(raise)?;
        Ok(Self(options))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// The options of a connection that the caller gave, or the defaults.
pub(crate) fn connect(given: Option<&Bound<'_, ConnectOptions>>) -> riopipe::ConnectOptions {
    given.map(|options| options.get().0.clone()).unwrap_or_default()
}

/// The addresses of members.
pub(crate) fn members(members: &[String]) -> PyResult<Vec<MemberAddr>> {
    members.iter().map(|member| member.parse::<MemberAddr>().map_err(raise)).collect()
}

/// An engine by its name.
pub(crate) fn engine(name: Option<&str>) -> PyResult<Option<EngineKind>> {
    name.map(riopipe_capi::engine_named).transpose().map_err(raise)
}

/// A place by its name: a value of `riopipe.Place`.
pub(crate) fn place(name: &str) -> PyResult<Place> {
    match name {
        "fresh" => Ok(Place::Fresh),
        "in_place" => Ok(Place::InPlace),
        "extend" => Ok(Place::Extend),
        _ => Err(PyValueError::new_err(format!(
            "{name:?} is no place: Place.FRESH, Place.IN_PLACE or Place.EXTEND"
        ))),
    }
}
