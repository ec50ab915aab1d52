//! The results of the demo, as JSON, and as a table, bars and one sentence.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    bars::{self, Bar},
    latency::{Latencies, LatencySummary},
    machine::Machine,
    report::{Figure, Ratio, colour_of, plus_minus, ratios_of, render_ratios},
    rounds::Rounds,
    sample::Sample,
    stats::Estimate,
    table::{Align, Table},
    terminal::{Colour, Terminal},
    units,
    workload::Workload,
};

/// Version of the JSON format.
pub const SCHEMA: &str = "rio-demo/1";

/// The demo's ratios, of groups per second.
const RATIOS: [Ratio; 2] = [
    Ratio { name: "rio_over_sync", over: "rio", under: "sync", figure: Figure::Groups },
    Ratio { name: "rio_over_none", over: "rio", under: "none", figure: Figure::Groups },
];

/// The order in which the engines are shown: slowest first, the upper bound last.
const ORDER: [&str; 3] = ["sync", "rio", "none"];

/// The whole result of the demo.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DemoReport {
    /// The name and version of this format: [`SCHEMA`].
    pub schema: String,
    /// The machine that it ran on.
    pub machine: Machine,
    /// Description of the drives.
    pub drives: String,
    /// Whether the file copied through the volume was read back unchanged.
    pub verified: bool,
    /// Size of that file in bytes.
    pub file_bytes: u64,
    /// Description of the workload.
    pub workload: String,
    /// Number of runs of each engine.
    pub rounds: usize,
    /// Figures by engine.
    pub engines: BTreeMap<String, DemoFigures>,
    /// Medians of round-by-round ratios of groups per second.
    pub ratios: BTreeMap<String, f64>,
    /// Their 95 % confidence intervals.
    pub ratio_intervals: BTreeMap<String, [f64; 2]>,
}

/// Figures of one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DemoFigures {
    /// Ordered groups per second: the median of the rounds.
    pub groups_per_s: f64,
    /// Its 95 % confidence interval.
    pub groups_per_s_interval: [f64; 2],
    /// Latency from submission to completion.
    pub latency: LatencySummary,
}

impl DemoReport {
    /// The report of interleaved rounds of the engines `none`, `sync` and `rio`.
    #[must_use]
    pub fn new(
        machine: Machine,
        drives: &str,
        file: (u64, bool),
        workload: &Workload,
        rounds: &Rounds<Sample>,
    ) -> Self {
        let (ratios, ratio_intervals) = ratios_of(rounds, &RATIOS);
        Self {
            schema: SCHEMA.to_owned(),
            machine,
            drives: drives.to_owned(),
            file_bytes: file.0,
            verified: file.1,
            workload: workload.to_string(),
            rounds: rounds.iter().map(|(_, s)| s.len()).max().unwrap_or(0),
            engines: rounds
                .iter()
                .map(|(name, samples)| (name.to_owned(), DemoFigures::of(samples)))
                .collect(),
            ratios,
            ratio_intervals,
        }
    }

    /// The report as text.
    #[must_use]
    pub fn render(&self, terminal: &Terminal) -> String {
        let mut text = format!(
            "{}\n{}\n\n",
            terminal.paint(Colour::Bold, &format!("Ordered groups per second: {}", self.workload)),
            terminal.paint(
                Colour::Grey,
                &format!("on {}, {} rounds, interleaved", self.drives, self.rounds)
            ),
        );
        let mut table = Table::new(&[
            ("engine", Align::Left),
            ("groups/s", Align::Right),
            ("±", Align::Right),
            ("p50", Align::Right),
            ("p99", Align::Right),
            ("keeps order", Align::Left),
        ]);
        for (name, figures) in self.in_order() {
            table.row([
                terminal.paint(colour_of(name), name),
                units::count(figures.groups_per_s),
                plus_minus(figures.groups_per_s, figures.groups_per_s_interval),
                units::time(figures.latency.p50_ns as f64),
                units::time(figures.latency.p99_ns as f64),
                keeps_order(name).to_owned(),
            ]);
        }
        text += &table.render(terminal);
        text.push('\n');
        let bars: Vec<Bar> = self
            .in_order()
            .map(|(name, figures)| Bar {
                name: name.to_owned(),
                value: figures.groups_per_s,
                label: units::per_second(figures.groups_per_s),
                colour: colour_of(name),
            })
            .collect();
        text += &bars::render(&bars, terminal);
        text += &render_ratios(&self.ratios, &self.ratio_intervals);
        if let Some(meaning) = self.meaning() {
            text += &format!("\n{}\n", wrap(&meaning, terminal.width));
        }
        if let Some(warning) = self.machine.warning() {
            text += &format!("{}\n", terminal.paint(Colour::Red, &wrap(&warning, terminal.width)));
        }
        text
    }

    /// The result in one sentence; `None` if an engine is missing.
    #[must_use]
    pub fn meaning(&self) -> Option<String> {
        let over_sync = *self.ratios.get("rio_over_sync")?;
        let over_none = *self.ratios.get("rio_over_none")?;
        let free = if over_none >= 0.98 {
            "order is free here".to_owned()
        } else {
            format!("order costs {:.0} % here", (1.0 - over_none) * 100.0)
        };
        let sync = if over_sync >= 1.0 {
            format!(
                "waiting for a flush after every group, as without it, would be {} times slower",
                units::ratio(over_sync)
            )
        } else {
            // Only possible with a drive whose flush costs nothing.
            format!(
                "waiting after every group would be {} times as fast",
                units::ratio(1.0 / over_sync)
            )
        };
        Some(format!(
            "With rio, {free}: it writes at {:.0} % of the speed of writes without any order, and \
             {sync}.",
            over_none * 100.0
        ))
    }

    fn in_order(&self) -> impl Iterator<Item = (&str, &DemoFigures)> {
        ORDER.iter().filter_map(|&name| self.engines.get(name).map(|figures| (name, figures)))
    }
}

impl DemoFigures {
    fn of(samples: &[Sample]) -> Self {
        let speeds: Vec<f64> = samples.iter().map(Sample::groups_per_s).collect();
        let mut latencies = Latencies::new();
        for sample in samples {
            latencies.add(&sample.latencies);
        }
        let speed = Estimate::of(&speeds);
        Self {
            groups_per_s: speed.map_or(0.0, |e| e.value),
            groups_per_s_interval: speed.map_or([0.0; 2], |e| [e.low, e.high]),
            latency: latencies.summary(),
        }
    }
}

fn keeps_order(engine: &str) -> &'static str {
    match engine {
        "none" => "no: the ceiling",
        "sync" => "by waiting for each group's flush",
        "rio" => "without waiting",
        _ => "",
    }
}

fn wrap(text: &str, width: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last().map_or(0, |line| line.chars().count());
        if line > 0 && line + 1 + word.chars().count() > width {
            lines.push(String::new());
        }
        // Never empty: begun with one line.
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::rounds;

    fn report() -> DemoReport {
        DemoReport::new(
            Machine::default(),
            "two modelled flash drives",
            (1 << 20, true),
            &Workload::journal(1, 32),
            &rounds(),
        )
    }

    #[test]
    fn json_has_its_documented_fields_and_can_be_parsed() {
        let json = serde_json::to_value(report()).unwrap();
        for engine in ["none", "sync", "rio"] {
            assert!(json["engines"][engine]["groups_per_s"].is_f64(), "{engine}");
        }
        for ratio in ["rio_over_sync", "rio_over_none"] {
            assert!(json["ratios"][ratio].is_f64(), "{ratio}");
        }
        assert_eq!(json["verified"], true);
        assert_eq!(serde_json::from_value::<DemoReport>(json).unwrap(), report());
    }

    #[test]
    fn text_has_table_bars_and_one_sentence() {
        let text = report().render(&Terminal::PLAIN);
        for part in [
            "journal (2 blocks, then 1)",
            "engine  groups/s",
            "without waiting",
            "rio / sync = 380",
            "With rio, order costs 5 % here",
            "380 times slower",
            "######",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
        let places: Vec<_> =
            ["\nsync ", "\nrio ", "\nnone "].iter().map(|name| text.find(name).unwrap()).collect();
        assert!(places.is_sorted());
    }

    #[test]
    fn the_sentence_agrees_with_the_numbers() {
        let mut report = report();
        let mut with = |sync, none| {
            report.ratios.insert("rio_over_sync".to_owned(), sync);
            report.ratios.insert("rio_over_none".to_owned(), none);
            report.meaning().unwrap()
        };
        assert!(with(41.3, 0.99).contains("order is free here"));
        assert!(with(41.3, 0.99).contains("41.3 times slower"));
        assert!(with(0.5, 0.8).contains("order costs 20 %"));
        assert!(with(0.5, 0.8).contains("2.00 times as fast"));
        report.ratios.clear();
        assert_eq!(report.meaning(), None, "nothing to compare");
    }

    #[test]
    fn wrapping_loses_no_word() {
        let text = "one two three four five";
        assert_eq!(wrap(text, 9), "one two\nthree\nfour five");
        assert_eq!(wrap(text, 80), text);
        assert_eq!(wrap("overlongword b", 5), "overlongword\nb");
    }
}
