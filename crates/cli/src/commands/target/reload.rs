//! `rio target reload`

use riopipe_lab::terminal::{Colour, Terminal};
use riopipe_target::{PortAddress, Reloaded, ServedDrive};
use serde::{Deserialize, Serialize};

use crate::{
    args::target::Reload,
    control_socket::{Request, ask},
    failure::Failure,
    output::{Output, Report},
};

pub(super) fn run(args: &Reload, output: &Output) -> Result<(), Failure> {
    let request = Request::Reload { dry_run: args.dry_run, force: args.force };
    let view: ReloadView = ask(&args.control.control, &request, |_| {})?;
    output.result(&view)
}

/// The changes of a reload, or those that it would make.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReloadView {
    schema: String,
    dry_run: bool,
    added_namespaces: Vec<NamespaceView>,
    removed_namespaces: Vec<NamespaceView>,
    /// `null` stands for any host.
    added_hosts: Vec<Option<String>>,
    removed_hosts: Vec<Option<String>>,
    /// The addresses that come, and those that go.
    added_addresses: Vec<AddressView>,
    removed_addresses: Vec<AddressView>,
    /// The ANA states of ports that come, and those that go, a sentence each.
    added_ana: Vec<String>,
    removed_ana: Vec<String>,
    created: Vec<String>,
    /// The volumes that needed a namespace or an address which has gone by force, a sentence each.
    forced: Vec<String>,
    /// The removed namespaces whose drives are not closed yet.
    closing: Vec<NamespaceView>,
}

#[derive(Debug, Serialize, Deserialize)]
struct NamespaceView {
    nsid: u32,
    drive: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct AddressView {
    /// Host and port.
    address: String,
    /// Whether it is meant for discovery only.
    discovery: bool,
}

impl AddressView {
    fn of(port: PortAddress) -> Self {
        Self { address: port.address, discovery: port.is_discovery }
    }

    fn text(&self) -> String {
        let kind = if self.discovery { "discovery address" } else { "address" };
        format!("{kind} {}", self.address)
    }
}

impl NamespaceView {
    fn of(served: ServedDrive) -> Self {
        Self { nsid: served.nsid, drive: served.drive }
    }
}

impl ReloadView {
    pub(super) fn of(reloaded: Reloaded, dry_run: bool) -> Self {
        let Reloaded { difference, created, forced, forced_ports, closing } = reloaded;
        let forced = forced.iter().map(ToString::to_string);
        let forced = forced.chain(forced_ports.iter().map(ToString::to_string)).collect();
        let addresses = |all: Vec<PortAddress>| all.into_iter().map(AddressView::of).collect();
        let views =
            |all: Vec<ServedDrive>| all.into_iter().map(NamespaceView::of).collect::<Vec<_>>();
        Self {
            schema: "rio-target-reload/1".into(),
            dry_run,
            added_namespaces: views(difference.added),
            removed_namespaces: views(difference.removed),
            added_hosts: difference.added_hosts,
            removed_hosts: difference.removed_hosts,
            added_addresses: addresses(difference.added_addresses),
            removed_addresses: addresses(difference.removed_addresses),
            added_ana: difference.added_ana.iter().map(ToString::to_string).collect(),
            removed_ana: difference.removed_ana.iter().map(ToString::to_string).collect(),
            created,
            forced,
            closing: views(closing),
        }
    }

    /// Whether nothing changes.
    pub(super) fn is_empty(&self) -> bool {
        let namespaces = self.added_namespaces.len() + self.removed_namespaces.len();
        let hosts = self.added_hosts.len() + self.removed_hosts.len();
        let addresses = self.added_addresses.len() + self.removed_addresses.len();
        namespaces + hosts + addresses + self.added_ana.len() + self.removed_ana.len() == 0
    }
}

impl Report for ReloadView {
    fn text(&self, terminal: &Terminal) -> String {
        if self.is_empty() {
            return "Nothing changes: the target serves this configuration.\n".into();
        }
        let mut text = String::new();
        let namespace = |view: &NamespaceView| format!("namespace {}: {}", view.nsid, view.drive);
        let host =
            |host: &Option<String>| format!("host: {}", host.as_deref().unwrap_or("any host"));
        let mut add = |sign: &str, colour: Colour, what: String| {
            text += &format!("{}\n", terminal.paint(colour, &format!("{sign} {what}")));
        };
        for view in &self.removed_namespaces {
            add("-", Colour::Red, namespace(view));
        }
        for view in &self.added_namespaces {
            add("+", Colour::Green, namespace(view));
        }
        for removed in &self.removed_hosts {
            add("-", Colour::Red, host(removed));
        }
        for added in &self.added_hosts {
            add("+", Colour::Green, host(added));
        }
        for removed in &self.removed_addresses {
            add("-", Colour::Red, removed.text());
        }
        for added in &self.added_addresses {
            add("+", Colour::Green, added.text());
        }
        for removed in &self.removed_ana {
            add("-", Colour::Red, removed.clone());
        }
        for added in &self.added_ana {
            add("+", Colour::Green, added.clone());
        }
        for path in &self.created {
            text += &format!("created: {path}\n");
        }
        for volume in &self.forced {
            text += &format!("forced: {volume}\n");
        }
        for view in &self.closing {
            text += &format!("not closed yet, operations are in flight: {}\n", namespace(view));
        }
        text += match self.dry_run {
            true => "Nothing has been changed (--dry-run).\n",
            false => "The target serves it now.\n",
        };
        text
    }
}
