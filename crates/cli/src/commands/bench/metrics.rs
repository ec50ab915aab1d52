//! `rio bench run --metrics`: the volume under test tells what it is doing while it is written to.

use std::sync::{Arc, Mutex, PoisonError};

use riopipe::{MetricsEndpoint, MetricsError, MetricsSource, Volume};
use riopipe_metrics::Untold;

use crate::{
    failure::{Code, Failure},
    output::Output,
};

/// One address for one run's volume after the other's: between two, the last one tells that it was
/// closed.
pub(super) struct Metrics {
    current: Arc<Current>,
    _endpoint: MetricsEndpoint,
}

impl Metrics {
    /// Takes the address, and says where it is: port 0 stands for a free one.
    pub(super) fn at(address: &str, output: &Output) -> Result<Self, Failure> {
        let current = Arc::new(Current::default());
        let endpoint = MetricsEndpoint::bind(address, Arc::clone(&current) as _)
            .map_err(|error| failure(&error))?;
        let address = endpoint.address();
        output.note(format!(
            "the volume's figures: rio volume stat {address}, or http://{address}/metrics"
        ));
        Ok(Self { current, _endpoint: endpoint })
    }

    /// This is the volume from now on.
    pub(super) fn tell_of(&self, volume: &Volume) {
        *self.current.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(volume.figures());
    }
}

fn failure(error: &MetricsError) -> Failure {
    let code = match error {
        MetricsError::Address(_) => Code::Usage,
        MetricsError::Listen(_) | MetricsError::Poller(_) => Code::Media,
    };
    Failure::new(code, error.to_string())
}

/// Whatever volume was opened last.
#[derive(Default)]
struct Current(Mutex<Option<Arc<dyn MetricsSource>>>);

impl Current {
    fn volume(&self) -> Result<Arc<dyn MetricsSource>, Untold> {
        let volume = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        volume.ok_or(Untold::Gone("the volume has not been opened yet"))
    }
}

impl MetricsSource for Current {
    fn about(&self) -> &str {
        "A Rio volume's metrics"
    }

    fn open_metrics(&self) -> Result<String, Untold> {
        self.volume()?.open_metrics()
    }

    fn json(&self) -> Result<String, Untold> {
        self.volume()?.json()
    }
}
