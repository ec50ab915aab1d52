//! A target while it serves: signals, the control socket, and the service manager.

use std::{path::PathBuf, thread, time::Instant};

use riopipe_target::{ReloadOptions, Running};

use super::{
    ana, config,
    drain::{DrainView, Draining},
    reload::ReloadView,
    reload_failure,
    watchdog::Watchdog,
};
use crate::{
    args::target::Serve,
    control_socket::{Client, ControlSocket, Request},
    failure::{Code, Failure},
    interrupt::{CHECK_INTERVAL, Received, Stop},
    service_manager::ServiceManager,
};

/// The sources of events to which a target reacts while it serves.
pub(super) struct Service<'a> {
    pub(super) args: &'a Serve,
    pub(super) signals: Stop,
    pub(super) control: Option<ControlSocket>,
    pub(super) manager: ServiceManager,
    /// The target takes no new hosts, and ends when its volumes are closed.
    pub(super) draining: Option<Draining>,
}

/// The reason why a target ends.
#[derive(Clone, Debug)]
pub(super) enum End {
    /// A signal with this name.
    Signal(&'static str),
    /// A reactor has ended.
    ReactorEnded,
    /// It was drained, or the time for that is over.
    Drained(DrainView),
}

impl Service<'_> {
    /// Serves until the target is to end.
    pub(super) fn run(&mut self, running: &mut Running) -> End {
        self.manager.is_ready(&status(running));
        let mut watchdog = self.manager.watchdog().map(|time| Watchdog::new(time, Instant::now()));
        let end = loop {
            match self.signals.received() {
                Some(Received::Stop(signal)) => break End::Signal(signal),
                Some(Received::Reload) => self.reload_unasked(running),
                None => {}
            }
            if let Some((request, client)) = self.control.as_ref().and_then(ControlSocket::request)
            {
                self.carry_out(&request, client, running);
            }
            running.tend();
            let drained = self.draining.as_mut().and_then(|draining| draining.check(running));
            if let Some(drained) = drained {
                break End::Drained(drained);
            }
            let state = match self.draining {
                Some(_) => format!("draining, {}", status(running)),
                None => status(running),
            };
            self.manager.status(&state);
            if let Some(watchdog) = &mut watchdog
                && watchdog.sees_life(running, Instant::now())
            {
                self.manager.is_alive();
            }
            if !running.is_alive() {
                break End::ReactorEnded;
            }
            thread::sleep(CHECK_INTERVAL);
        };
        self.manager.is_stopping(match end {
            End::Signal(_) | End::Drained(_) => {
                "stopping: operations in flight finish, and the log is written back"
            }
            End::ReactorEnded => "stopping: a reactor has ended",
        });
        end
    }

    /// Carries out the request of a client.
    fn carry_out(&mut self, request: &Request, client: Client, running: &mut Running) {
        match request {
            Request::Ana { set, group } => {
                match ana::set(running, set.as_ref(), *group) {
                    Ok(view) => client.done(view),
                    Err(failure) => client.fail(&failure),
                };
            }
            &Request::Reload { dry_run, force } => {
                match self.reload(running, ReloadOptions { dry_run, force }) {
                    Ok(view) => client.done(view),
                    Err(failure) => client.fail(&failure),
                };
            }
            &Request::Drain { limit_ms } => match &mut self.draining {
                Some(draining) => draining.join(limit_ms, client),
                None => self.draining = Some(Draining::begin(running, limit_ms, client)),
            },
        }
    }

    /// Takes over the configuration because of SIGHUP. The log has the result.
    fn reload_unasked(&mut self, running: &mut Running) {
        match self.reload(running, ReloadOptions::default()) {
            Ok(view) if view.is_empty() => {
                tracing::info!("SIGHUP: the configuration is the same: nothing has changed");
            }
            Ok(_) => tracing::info!("SIGHUP: the configuration is taken over"),
            Err(failure) => {
                tracing::error!("SIGHUP: the target serves as before: {failure}");
            }
        }
    }

    fn reload(
        &mut self,
        running: &mut Running,
        options: ReloadOptions,
    ) -> Result<ReloadView, Failure> {
        if self.args.config.is_none() {
            let message = "the target was started without a configuration file, so there is none \
                           to read again";
            return Err(Failure::new(Code::Usage, message).hint("start it with -c FILE"));
        }
        if !options.dry_run {
            self.manager.is_reloading();
        }
        let reloaded = config(self.args).and_then(|config| {
            running.reload(&config, options).map_err(|error| reload_failure(&error))
        });
        if !options.dry_run {
            self.manager.is_ready(&status(running));
        }
        reloaded.map(|reloaded| ReloadView::of(reloaded, options.dry_run))
    }
}

/// The path of the control socket: of the configuration, or in the folder that systemd has made
/// for the unit.
pub(super) fn control_path(configured: Option<&str>) -> Option<PathBuf> {
    let of_unit = || {
        let folders = std::env::var("RUNTIME_DIRECTORY").ok()?;
        // systemd separates several folders by colons.
        let folder = folders.split(':').next().filter(|folder| !folder.is_empty())?;
        Some(PathBuf::from(folder).join("target.sock"))
    };
    configured.map(PathBuf::from).or_else(of_unit)
}

/// The state of a target, in one line for the service manager.
fn status(running: &Running) -> String {
    let addresses: Vec<String> = running.addresses().iter().map(ToString::to_string).collect();
    format!(
        "serving {} at {}, {}",
        counted(running.promises().len(), "namespace"),
        addresses.join(", "),
        counted(running.connections(), "connection")
    )
}

fn counted(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}
