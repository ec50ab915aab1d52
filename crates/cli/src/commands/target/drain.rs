//! `rio target drain`

use std::time::{Duration, Instant};

use riopipe_lab::terminal::Terminal;
use riopipe_target::{OpenVolume, Running, VolumeUse};
use serde::{Deserialize, Serialize};

use crate::{
    args::target::Drain,
    control_socket::{Client, Request, Waiting, ask},
    failure::{Code, Failure},
    output::{Output, Report},
};

/// Interval in which clients learn how much time is left, if nothing else changes.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

pub(super) fn run(args: &Drain, output: &Output) -> Result<(), Failure> {
    let limit_ms = u64::try_from(args.limit.as_millis()).unwrap_or(u64::MAX);
    let on_waiting = |waiting: &Waiting| {
        for what in &waiting.waits_for {
            output.note(format!("rio: the target waits for {what}"));
        }
        output.note(format!("rio: {} s are left", waiting.left_ms / 1000));
    };
    let view: DrainView = ask(&args.control.control, &Request::Drain { limit_ms }, on_waiting)?;
    output.result(&view)?;
    match view.open_volumes.is_empty() {
        true => Ok(()),
        false => Err(view.failure()),
    }
}

/// A target that has ended after draining.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct DrainView {
    schema: String,
    /// Whether all volumes were closed.
    drained: bool,
    seconds: f64,
    /// The volumes that were open at the end.
    open_volumes: Vec<OpenVolumeView>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct OpenVolumeView {
    volume: String,
    owner: String,
    /// Absent if the owner is not connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
}

impl OpenVolumeView {
    fn of(open: &OpenVolume) -> Self {
        let (owner, address) = match &open.usage {
            VolumeUse::Open { hostnqn, address } => (hostnqn.clone(), Some(address.clone())),
            VolumeUse::Reserved { owner, .. } => (owner.clone(), None),
            VolumeUse::Unrecovered => (String::new(), None),
        };
        Self { volume: open.volume.to_string(), owner, address }
    }
}

impl DrainView {
    /// The failure if volumes were open, also of the target itself.
    pub(super) fn failure(&self) -> Failure {
        let volumes: Vec<String> = self
            .open_volumes
            .iter()
            .map(|open| format!("volume {} of {}", open.volume, open.owner))
            .collect();
        let message = format!(
            "the target has ended while volumes were open, because the time for draining was over: \
             {}",
            volumes.join(", ")
        );
        let hint = "their owners go on if the target is back within their loss timeout";
        Failure::new(Code::Volume, message).hint(hint)
    }

    /// Whether all volumes were closed.
    pub(super) const fn is_drained(&self) -> bool {
        self.drained
    }
}

impl Report for DrainView {
    fn text(&self, _: &Terminal) -> String {
        match self.drained {
            true => format!("The target is drained and has ended, after {:.1} s.\n", self.seconds),
            false => format!("The target has ended, after {:.1} s.\n", self.seconds),
        }
    }
}

/// A target that is being drained.
pub(super) struct Draining {
    begun: Instant,
    limit: Duration,
    clients: Vec<Client>,
    /// The last report to the clients, and its time.
    reported: Option<(Vec<String>, Instant)>,
}

impl Draining {
    /// Begins to drain the target.
    pub(super) fn begin(running: &Running, limit_ms: u64, client: Client) -> Self {
        tracing::info!(limit_ms, "draining: no new hosts are taken");
        running.drain();
        let limit = Duration::from_millis(limit_ms);
        Self { begun: Instant::now(), limit, clients: vec![client], reported: None }
    }

    /// Another client asks for it. The shorter time counts.
    pub(super) fn join(&mut self, limit_ms: u64, client: Client) {
        self.limit = self.limit.min(self.begun.elapsed() + Duration::from_millis(limit_ms));
        self.clients.push(client);
        self.reported = None;
    }

    /// Checks whether the target may end now, and returns the result then.
    pub(super) fn check(&mut self, running: &Running) -> Option<DrainView> {
        let open = running.open_volumes();
        let passed = self.begun.elapsed();
        if open.is_empty() || passed >= self.limit {
            return Some(DrainView {
                schema: "rio-target-drain/1".into(),
                drained: open.is_empty(),
                seconds: passed.as_secs_f64(),
                open_volumes: open.iter().map(OpenVolumeView::of).collect(),
            });
        }
        let left_ms = u64::try_from((self.limit - passed).as_millis()).unwrap_or(u64::MAX);
        // The rest of a lease changes all the time.
        let what = |open: &OpenVolume| match &open.usage {
            VolumeUse::Reserved { owner, .. } => {
                format!("volume {}, which is reserved for {owner}", open.volume)
            }
            _ => open.to_string(),
        };
        let waits_for: Vec<String> = open.iter().map(what).collect();
        let is_due = self
            .reported
            .as_ref()
            .is_none_or(|(known, since)| *known != waits_for || since.elapsed() >= REPORT_INTERVAL);
        if is_due {
            tracing::info!(left_ms, "draining: waits for {}", waits_for.join("; "));
            let waiting = Waiting { waits_for: waits_for.clone(), left_ms };
            self.clients.retain(|client| client.waiting(waiting.clone()));
            self.reported = Some((waits_for, Instant::now()));
        }
        None
    }

    /// Informs the clients of the result, when the target has ended.
    pub(super) fn end(&self, result: Result<&DrainView, &Failure>) {
        for client in &self.clients {
            match result {
                Ok(view) => client.done(view),
                Err(failure) => client.fail(failure),
            };
        }
    }
}
