//! `rio bench run --metrics`: the volume under test serves its metrics while it is written to.

use std::sync::{Arc, Mutex, PoisonError};

use riopipe::{StatError, StatSource, Volume};
use riopipe_metrics::VOLUME_PORT;

use crate::{
    failure::Failure,
    metrics_server::{MetricsAddress, MetricsError, MetricsServer},
    output::Output,
};

/// One address for the volumes of all runs, in their order. Between two runs, the last volume
/// reports that it was closed.
pub(super) struct Metrics {
    current: Arc<Current>,
    _server: MetricsServer,
}

impl Metrics {
    /// Listens on the address, and prints it: port 0 stands for a free one.
    pub(super) fn at(address: &str, output: &Output) -> Result<Self, Failure> {
        let current = Arc::new(Current::default());
        let server = MetricsAddress::take(address, VOLUME_PORT)
            .and_then(|address| address.serve(Arc::clone(&current) as _))
            .map_err(MetricsError::into_failure)?;
        let address = server.address();
        output.note(format!(
            "the volume's figures: rio volume stat {address}, or http://{address}/metrics"
        ));
        Ok(Self { current, _server: server })
    }

    /// Serves the metrics of this volume from now on.
    pub(super) fn serve_volume(&self, volume: &Volume) {
        *self.current.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(volume.stat_source());
    }
}

/// The volume that was opened last.
#[derive(Default)]
struct Current(Mutex<Option<Arc<dyn StatSource>>>);

impl Current {
    fn volume(&self) -> Result<Arc<dyn StatSource>, StatError> {
        let volume = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        volume.ok_or(StatError::Gone("the volume has not been opened yet"))
    }
}

impl StatSource for Current {
    fn about(&self) -> &str {
        "A Rio volume's metrics"
    }

    fn open_metrics(&self) -> Result<String, StatError> {
        self.volume()?.open_metrics()
    }

    fn json(&self) -> Result<String, StatError> {
        self.volume()?.json()
    }

    fn health(&self) -> Result<(), StatError> {
        self.volume()?.health()
    }
}
