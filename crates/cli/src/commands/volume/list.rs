//! `rio volume list`, and `rio volume show` of a volume whose members are not all given.

use riopipe::{
    ConnectOptions, ListError, ListedVolume, MemberAddr, OpenError, Volume, VolumeList,
    cause::AssembleError,
};
use riopipe_lab::{
    table::{Align, Table},
    terminal::Terminal,
    units,
};
use serde::Serialize;

use crate::{
    args::{volume::Members, volume_life::List},
    connect::{attach_failure, call_code, connect_options, known_failure, members},
    failure::{Code, Failure},
    known_volumes::Places,
    output::{Output, Report},
};

pub(super) fn run(args: &List, output: &Output) -> Result<(), Failure> {
    let addresses = members(&drives(&args.members)?)?;
    let list = Volume::list(&addresses, &connect_options(&args.members.connect)?)
        .map_err(|error| list_failure(&error))?;
    output.result(&ListView { schema: "rio-volume-list/1", list })
}

/// The drives that name the targets: those given, else all drives of known volumes.
fn drives(args: &Members) -> Result<Vec<String>, Failure> {
    if !args.members.is_empty() {
        return Ok(args.members.clone());
    }
    let known = Places::of(args.volumes_file.as_deref()).list();
    let known = known.map_err(|error| known_failure(&error))?;
    Ok(known.into_values().flat_map(|(volume, _)| volume.members).collect())
}

/// The failure of a search on targets.
pub(super) fn list_failure(error: &ListError) -> Failure {
    match error {
        ListError::Attach(error) => attach_failure(error),
        ListError::Call { source, .. } => Failure::new(call_code(source), error.to_string()),
        _ => Failure::new(Code::Failed, error.to_string()),
    }
}

/// The properties that the labels of the given members have of a volume that could not be inspected
/// because others of its members were not given; `None` if that is not the cause.
pub(super) fn part_of_volume(
    given: &[MemberAddr],
    connect: &ConnectOptions,
    error: &OpenError,
) -> Option<PartView> {
    let is_part = matches!(
        error,
        OpenError::Assemble {
            error: AssembleError::Count { .. } | AssembleError::Order { .. },
            ..
        }
    );
    if !is_part {
        return None;
    }
    let list = Volume::list(given, connect).ok()?;
    let has = |volume: &ListedVolume, addr: &MemberAddr| {
        volume.members.iter().any(|member| member.addr.as_ref() == Some(addr))
    };
    let volume = list.volumes.into_iter().find(|volume| given.iter().all(|at| has(volume, at)))?;
    (volume.members.len() > given.len()).then_some(PartView { schema: "rio-volume-part/1", volume })
}

/// The volumes and logs of targets.
#[derive(Debug, Serialize)]
struct ListView {
    schema: &'static str,
    #[serde(flatten)]
    list: VolumeList,
}

fn bytes_or_nothing(bytes: Option<u64>) -> String {
    bytes.map(units::bytes).unwrap_or_default()
}

impl Report for ListView {
    fn text(&self, terminal: &Terminal) -> String {
        let mut text = String::new();
        if self.list.volumes.is_empty() {
            text += "No volume.\n";
        } else {
            let mut table = Table::new(&[
                ("volume", Align::Left),
                ("id", Align::Left),
                ("size", Align::Right),
                ("engine", Align::Left),
                ("streams", Align::Right),
                ("members found", Align::Right),
                ("in logs", Align::Right),
                ("state", Align::Left),
            ]);
            for volume in &self.list.volumes {
                let found = volume.members.iter().filter(|member| member.addr.is_some()).count();
                let has_label = volume.name.is_some();
                table.row([
                    volume.name.clone().unwrap_or_default(),
                    volume.id.to_string(),
                    if has_label { units::bytes(volume.bytes) } else { String::new() },
                    volume.engine.map(|engine| engine.to_string()).unwrap_or_default(),
                    volume.streams.to_string(),
                    if has_label {
                        format!("{found} of {}", volume.members.len())
                    } else {
                        String::new()
                    },
                    units::bytes(
                        volume.logs.iter().map(|log| log.bytes).fold(0, u64::saturating_add),
                    ),
                    volume.state.to_owned(),
                ]);
            }
            text += &table.render(terminal);
        }
        text.push('\n');
        let mut table = Table::new(&[
            ("target", Align::Left),
            ("log", Align::Left),
            ("size", Align::Right),
            ("free", Align::Right),
            ("largest part", Align::Right),
            ("drives without a volume", Align::Left),
        ]);
        for target in &self.list.targets {
            let drives = target.drives.iter().map(|drive| match drive.problem {
                None => format!("ns={}", drive.addr.nsid),
                Some(_) if drive.copied => format!("ns={} (copied label)", drive.addr.nsid),
                Some(_) => format!("ns={} (label can't be read)", drive.addr.nsid),
            });
            table.row([
                target.addr.to_string(),
                target.log.to_owned(),
                bytes_or_nothing(target.log_bytes),
                bytes_or_nothing(target.log_free_bytes),
                bytes_or_nothing(target.log_gap_bytes),
                drives.collect::<Vec<_>>().join(", "),
            ]);
        }
        text += &table.render(terminal);
        if self.list.volumes.iter().any(|volume| volume.name.is_none()) {
            text += "\nA volume without a name has partitions in logs, but no label on these targets: \
                     `rio volume delete ID --force` frees them.\n";
        }
        text
    }
}

/// A volume, as the labels of some of its members describe it.
#[derive(Debug, Serialize)]
pub(super) struct PartView {
    schema: &'static str,
    #[serde(flatten)]
    volume: ListedVolume,
}

impl Report for PartView {
    fn text(&self, terminal: &Terminal) -> String {
        let volume = &self.volume;
        let found = volume.members.iter().filter(|member| member.addr.is_some()).count();
        let engine = volume.engine.map(|engine| engine.to_string()).unwrap_or_default();
        let mut text = format!(
            "Volume {:?}, as far as these members tell: {}, engine {engine}, {} streams, generation \
             {}\nid {}, {found} of {} members are here: opening it needs all\n\n",
            volume.name.as_deref().unwrap_or_default(),
            units::bytes(volume.bytes),
            volume.streams,
            volume.generation,
            volume.id,
            volume.members.len(),
        );
        let mut table =
            Table::new(&[("", Align::Right), ("member", Align::Left), ("nguid", Align::Left)]);
        for member in &volume.members {
            let addr = match (&member.addr, member.labelled) {
                (Some(addr), true) => addr.to_string(),
                (Some(addr), false) => format!("{addr} (its label was erased)"),
                (None, _) => "missing: not on these targets".to_owned(),
            };
            table.row([member.index.to_string(), addr, member.nguid.clone()]);
        }
        text += &table.render(terminal);
        text
    }
}
