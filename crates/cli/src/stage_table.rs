//! The time of ordered writes in each stage, as a table.

use riopipe_lab::{
    table::{Align, Table},
    terminal::{Colour, Terminal},
    units,
};
use riopipe_metrics::StageStat;

/// Width in columns of a bar for the whole time.
const BAR: f64 = 20.0;

/// A line for each stage. A share is that of the time of all stages shown, which belong to one
/// side.
#[must_use]
pub fn render(stages: &[StageStat], terminal: &Terminal) -> String {
    let mut table = Table::new(&[
        ("stage", Align::Left),
        ("samples", Align::Right),
        ("p50", Align::Right),
        ("p99", Align::Right),
        ("p99.9", Align::Right),
        ("max", Align::Right),
        ("share", Align::Right),
        ("", Align::Left),
    ]);
    for stage in stages {
        let time = |ns: u64| if stage.count == 0 { "-".into() } else { units::time(ns as f64) };
        table.row([
            stage.stage.replace('_', " "),
            stage.count.to_string(),
            time(stage.p50_ns),
            time(stage.p99_ns),
            time(stage.p999_ns),
            time(stage.max_ns),
            format!("{:.1} %", stage.share * 100.0),
            terminal.paint(Colour::Green, &bar(stage.share, terminal.unicode)),
        ]);
    }
    table.render(terminal)
}

fn bar(share: f64, unicode: bool) -> String {
    let length = (share.clamp(0.0, 1.0) * BAR).round() as usize;
    if unicode { "█" } else { "#" }.repeat(length)
}

#[cfg(test)]
mod tests {
    use riopipe_metrics::with_shares;

    use super::*;

    /// Counts, times and shares are aligned; a stage without values shows no time of 0.
    #[test]
    fn a_line_for_each_stage() {
        let distribution = |filled: &[(u64, u64)]| {
            let sum = filled.iter().map(|(ns, count)| ns * count).sum();
            let max = filled.last().map_or(0, |last| last.0);
            riopipe::stages::Distribution::from_filled(filled, sum, max)
        };
        let stages = with_shares([
            ("log_append", distribution(&[(15, 100), (1503, 1)])),
            ("device", distribution(&[])),
        ]);
        assert_eq!(
            render(&stages, &Terminal::PLAIN),
            "stage       samples    p50    p99    p99.9      max    share\n\
             ----------------------------------------------------------------------------------\n\
             log append      101  15 ns  15 ns  1.50 µs  1.50 µs  100.0 %  ####################\n\
             device            0      -      -        -        -    0.0 %\n"
        );
    }
}
