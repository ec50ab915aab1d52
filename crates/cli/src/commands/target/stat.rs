//! `rio target stat`

use riopipe_lab::{
    table::{Align, Table},
    terminal::{Colour, Terminal},
    units,
};
use riopipe_target::Stat;

use crate::{
    args::target::Stat as Args,
    failure::Failure,
    live::{self, Figures, ServedFigures, SourceKind},
    output::Output,
    stage_table,
};

pub(super) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    live::show::<Stat>(&args.addr, args.watch, output)
}

impl ServedFigures for Stat {
    const KIND: SourceKind = SourceKind::Target;
}

impl Figures for Stat {
    fn since(&self, before: &Self) -> Self {
        Self::since(self, before)
    }

    fn text(&self, before: Option<&Self>, terminal: &Terminal) -> String {
        let span = units::time(self.uptime_s * 1e9);
        let head = match before.is_some() {
            true => format!("{}: the last {span}", self.subnqn),
            false => format!("{} {}: serving for {span}", self.subnqn, self.version),
        };
        let mut text = format!(
            "{}, reactors: {}, queues connected: {}\n\n",
            terminal.paint(Colour::Bold, &head),
            self.reactors,
            self.connections
        );
        if self.log.bytes > 0 {
            let fullest = self.log.volumes.iter().map(|volume| {
                f64::from(volume.fullest_stream_slots) / f64::from(volume.stream_slots.max(1))
            });
            text += &format!(
                "log: {} of {} in use by {} volumes, fullest stream {:.0} %\n\n",
                units::bytes(self.log.used_bytes),
                units::bytes(self.log.bytes),
                self.log.volumes.len(),
                fullest.fold(0.0, f64::max) * 100.0,
            );
        }
        let mut table =
            Table::new(&[("count of", Align::Left), ("", Align::Right), ("per s", Align::Right)]);
        for (name, count) in self.counters.iter().filter(|(_, count)| **count > 0) {
            let rate = *count as f64 / self.uptime_s.max(1e-9);
            table.row([name.replace('_', " "), count.to_string(), units::count(rate)]);
        }
        if self.counters.values().any(|count| *count > 0) {
            text += &table.render(terminal);
            text.push('\n');
        }
        if let Some(table) = parts(self) {
            text += &table.render(terminal);
            text.push('\n');
        }
        match self.stages.iter().any(|stage| stage.count > 0) {
            true => text += &stage_table::render(&self.stages, terminal),
            false => {
                text += &format!(
                    "No ordered write was traced. Of many, one in {} is.\n",
                    self.sampled_one_in
                );
            }
        }
        text
    }
}

/// The traffic of each namespace, volume and host; `None` without any.
fn parts(stat: &Stat) -> Option<Table> {
    let mut table = Table::new(&[
        ("traffic of", Align::Left),
        ("connections", Align::Right),
        ("in", Align::Right),
        ("out", Align::Right),
        ("errors", Align::Right),
    ]);
    let drive = ["written_bytes", "read_bytes", "drive_errors"];
    let host = ["received_bytes", "sent_bytes", "problems"];
    let mut is_empty = true;
    for (kind, parts, names) in [
        ("namespace", &stat.namespaces, drive),
        ("volume", &stat.volumes, drive),
        ("host", &stat.hosts, host),
    ] {
        for part in parts {
            let [into, out, errors] =
                names.map(|name| part.counters.get(name).copied().unwrap_or(0));
            let connections = part.connections.unwrap_or(0);
            if into + out + errors == 0 && connections == 0 {
                continue;
            }
            is_empty = false;
            table.row([
                format!("{kind} {}", part.name),
                part.connections.map_or(String::new(), |count| count.to_string()),
                units::bytes(into),
                units::bytes(out),
                errors.to_string(),
            ]);
        }
    }
    (!is_empty).then_some(table)
}
