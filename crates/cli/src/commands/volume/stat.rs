//! `rio volume stat`

use riopipe::{StreamStat, VolumeStat};
use riopipe_lab::{
    table::{Align, Table},
    terminal::{Colour, Terminal},
    units,
};

use crate::{
    args::volume::Stat as Args,
    failure::Failure,
    live::{self, Figures, ServedFigures, SourceKind},
    output::Output,
    stage_table,
};

pub(super) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    live::show::<VolumeStat>(&args.addr, args.watch, output)
}

impl ServedFigures for VolumeStat {
    const KIND: SourceKind = SourceKind::Volume;
}

impl Figures for VolumeStat {
    fn since(&self, before: &Self) -> Self {
        Self::since(self, before)
    }

    fn text(&self, before: Option<&Self>, terminal: &Terminal) -> String {
        let Self { volume, engine, generation, .. } = self;
        let span = units::time(self.uptime_s * 1e9);
        let head = match before.is_some() {
            true => format!("{volume}: the last {span}"),
            false => format!("{volume} {}: open for {span}", self.version),
        };
        let targets: Vec<String> = self
            .targets
            .iter()
            .map(|target| match target.connected {
                true => target.address.clone(),
                false => {
                    format!("{} {}", target.address, terminal.paint(Colour::Red, "(unreachable)"))
                }
            })
            .collect();
        let mut text = format!(
            "{}, engine {engine}, generation {generation}, targets: {}\n\n",
            terminal.paint(Colour::Bold, &head),
            targets.join(", ")
        );
        text += &match self.streams.is_empty() {
            true => "No stream is open.\n".to_owned(),
            false => streams(self, before, terminal),
        };
        text.push('\n');
        match self.stages.iter().any(|stage| stage.count > 0) {
            true => text += &stage_table::render(&self.stages, terminal),
            false => text += &format!("No group was traced: one in {} is.\n", self.sampled_one_in),
        }
        text
    }
}

fn streams(now: &VolumeStat, before: Option<&VolumeStat>, terminal: &Terminal) -> String {
    let mut table = Table::new(&[
        ("stream", Align::Left),
        ("complete", Align::Right),
        ("durable", Align::Right),
        ("not yet", Align::Right),
        ("groups/s", Align::Right),
        ("", Align::Left),
    ]);
    for stream in &now.streams {
        let rate = rate(stream, now, before);
        table.row([
            stream.id.to_string(),
            stream.complete.to_string(),
            stream.durable.to_string(),
            stream.complete.saturating_sub(stream.durable).to_string(),
            rate.map_or_else(|| "-".to_owned(), units::count),
            match stream.failed {
                true => terminal.paint(Colour::Red, "failed"),
                false => String::new(),
            },
        ]);
    }
    table.render(terminal)
}

/// Groups per second that became complete between two readings. The marks alone do not suffice:
/// they continue from those of the volume's last owner.
fn rate(stream: &StreamStat, now: &VolumeStat, before: Option<&VolumeStat>) -> Option<f64> {
    let before = before.filter(|before| now.is_same_opening(before))?;
    let before = before.streams.iter().find(|then| then.id == stream.id)?;
    let groups = stream.complete.checked_sub(before.complete)?;
    Some(groups as f64 / now.uptime_s.max(1e-9))
}

#[cfg(test)]
mod tests {
    use riopipe::TargetStat;

    use super::*;

    fn stat(uptime_s: f64, complete: u64) -> VolumeStat {
        let target = |port: u16, connected| TargetStat {
            address: format!("127.0.0.1:{port}"),
            subnqn: "nqn.2026-11.com.example:d".into(),
            connected,
        };
        VolumeStat {
            schema: VolumeStat::SCHEMA.into(),
            volume: "journal".into(),
            engine: "rio".into(),
            generation: 7,
            version: "0.1.0".into(),
            opened_unix_ms: 1_000,
            uptime_s,
            targets: vec![target(1, true), target(2, false)],
            streams: vec![
                StreamStat { id: 0, complete, durable: 500, failed: false },
                StreamStat { id: 12, complete: 9, durable: 9, failed: true },
            ],
            sampled_one_in: 256,
            stages: Vec::new(),
        }
    }

    #[test]
    fn a_line_for_each_stream() {
        let before = stat(2.0, 1_000);
        assert_eq!(
            before.text(None, &Terminal::PLAIN),
            "journal 0.1.0: open for 2.00 s, engine rio, generation 7, targets: 127.0.0.1:1, \
             127.0.0.1:2 (unreachable)\n\n\
             stream  complete  durable  not yet  groups/s\n\
             ----------------------------------------------------\n\
             0           1000      500      500         -\n\
             12             9        9        0         -  failed\n\n\
             No group was traced: one in 256 is.\n"
        );
        let since = Figures::since(&stat(4.0, 5_000), &before);
        let text = since.text(Some(&before), &Terminal::PLAIN);
        assert!(text.starts_with("journal: the last 2.00 s, engine rio"), "{text}");
        let rate = units::count(2_000.0);
        let line = text.lines().find(|line| line.starts_with("0 ")).unwrap();
        assert!(line.trim_end().ends_with(&rate), "no {rate:?} in {line:?}");
        // Opened again since: its start is unknown.
        let again = VolumeStat { generation: 8, ..stat(1.0, 9_000) };
        assert_eq!(rate_of(&again, &before), None);
    }

    fn rate_of(now: &VolumeStat, before: &VolumeStat) -> Option<f64> {
        rate(&now.streams[0], now, Some(before))
    }
}
