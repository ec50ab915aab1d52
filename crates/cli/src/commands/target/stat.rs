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
    live::{self, Figures, SourceKind},
    output::Output,
    stage_table,
};

pub(super) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    live::show::<Stat>(&args.addr, args.watch, output)
}

impl Figures for Stat {
    const KIND: SourceKind = SourceKind::Target;

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
