//! A comparison as text: for each point a table of its contenders, at the end the ratios of all
//! points.

use crate::{
    report::{EngineFigures, Point, Report, colour_of, plus_minus},
    table::{Align, Table},
    terminal::{Colour, Terminal},
    units,
};

/// The ratios shown in the summary: name in the report, heading.
const COLUMNS: [(&str, &str); 11] = [
    ("none_over_floor", "none/floor"),
    ("rio_over_none", "rio/none"),
    ("rio_cpu_over_none", "CPU"),
    ("rio_dax_over_none", "dax"),
    ("rio_block_over_none", "block"),
    ("rio_merged_over_none", "merged"),
    ("rio_over_sync", "rio/sync"),
    ("rio_over_linux", "rio/linux"),
    ("rio_over_horae", "rio/horae"),
    ("rio_over_barrier", "rio/barrier"),
    ("rio_over_opimq", "rio/opimq"),
];

/// The meaning of headings in the summary that need one.
const LEGEND: &str = "\
CPU: time per write on both sides with rio over that with none, in runs of
their own in which both sides sleep while they wait. dax, block: rio with such
a log over none. merged: rio with merging over none without, on the same
sequential writes (from batches of 2 on: the same batches).
";

/// The text; each line ends with a newline.
#[must_use]
pub fn render(report: &Report, terminal: &Terminal) -> String {
    let mut text = terminal.paint(Colour::Grey, &report.machine.line()) + "\n";
    for point in &report.points {
        text += "\n";
        text += &render_point(point, terminal);
    }
    if report.points.iter().any(|point| !point.ratios.is_empty()) {
        text += "\n";
        text += &ratios(&report.points, terminal);
    }
    if let Some(line) = report.host_line() {
        text += &format!("\n{}\n", terminal.paint(Colour::Grey, &line));
    }
    if let Some(warning) = report.machine.warning() {
        text += &format!("\n{}\n", terminal.paint(Colour::Red, &warning));
    }
    text
}

/// The speed with both sides sleeping, if that was run; lines are no longer than `width`.
fn asleep(point: &Point, width: usize) -> String {
    let mut lines = vec!["  writes/s if both sides sleep while they wait:".to_owned()];
    let speed = |figures: &EngineFigures| Some(figures.blocking.as_ref()?.writes_per_s);
    let mut comma = "";
    for (name, figures) in &point.engines {
        let Some(speed) = speed(figures) else { return String::new() };
        let next = format!(" {name} {}", units::count(speed));
        let last = lines.last_mut().filter(|line| line.len() + next.len() + 1 < width);
        match last {
            Some(line) => *line += &format!("{comma}{next}"),
            None => {
                if let Some(line) = lines.last_mut() {
                    *line += comma;
                }
                lines.push(format!("   {next}"));
            }
        }
        comma = ",";
    }
    lines.join("\n") + "\n"
}

/// One line for each point, and the meaning of the headings.
fn ratios(points: &[Point], terminal: &Terminal) -> String {
    let heading = "Ratios of the same round: median, and below it the interval";
    format!(
        "{}\n\n{}\n{}\n",
        terminal.paint(Colour::Bold, heading),
        summary(points, terminal),
        terminal.paint(Colour::Grey, LEGEND.trim_end())
    )
}

fn render_point(point: &Point, terminal: &Terminal) -> String {
    let mut text = terminal.paint(Colour::Bold, &point.workload);
    if point.beyond_cores {
        text += " (more threads than cores)";
    }
    text += "\n\n";
    let mut table = Table::new(&[
        ("", Align::Left),
        ("writes/s", Align::Right),
        ("±", Align::Right),
        ("p50", Align::Right),
        ("p99", Align::Right),
        ("p99.9", Align::Right),
        ("CPU/op", Align::Right),
        ("writer", Align::Right),
        ("target", Align::Right),
    ]);
    let time = |ns: f64| units::time(ns);
    for (name, figures) in &point.engines {
        table.row([
            terminal.paint(colour_of(name), name),
            units::count(figures.writes_per_s),
            plus_minus(figures.writes_per_s, figures.writes_per_s_interval),
            time(figures.latency.p50_ns as f64),
            time(figures.latency.p99_ns as f64),
            time(figures.latency.p999_ns as f64),
            time(figures.cpu_ns_per_write),
            time(figures.initiator_cpu_ns_per_write),
            figures.target_cpu_ns_per_write.map(time).unwrap_or_default(),
        ]);
    }
    text += &table.render(terminal);
    text += &terminal.paint(Colour::Grey, &asleep(point, terminal.width));
    text
}

/// The ratios that were measured at any point.
fn summary(points: &[Point], terminal: &Terminal) -> String {
    let is_measured = |name: &str| points.iter().any(|point| point.ratios.contains_key(name));
    let measured: Vec<(&str, &str)> =
        COLUMNS.into_iter().filter(|(name, _)| is_measured(name)).collect();
    let mut columns = vec![("", Align::Left)];
    columns.extend(measured.iter().map(|(_, heading)| (*heading, Align::Right)));
    let mut table = Table::new(&columns);
    for point in points {
        let mut row = vec![name_of(point)];
        for (name, _) in &measured {
            let ratio = point.ratios.get(*name).map(|ratio| units::ratio(*ratio));
            row.push(ratio.unwrap_or_default());
        }
        table.row(row);
        // On a line below, so that lines stay short.
        let mut row = vec![String::new()];
        for (name, _) in &measured {
            let ends = point.ratio_intervals.get(*name);
            let ends = ends.map(|ends| ends.map(units::ratio).join("-"));
            row.push(ends.map(|ends| terminal.paint(Colour::Grey, &ends)).unwrap_or_default());
        }
        table.row(row);
    }
    table.render(terminal)
}

fn name_of(point: &Point) -> String {
    let beyond = if point.beyond_cores { "*" } else { "" };
    let mut text = format!("depth {}, {} KiB", point.queue_depth, point.size / 1024);
    if point.threads > 1 {
        text += &format!(", {} threads{beyond}", point.threads);
    }
    if point.batch > 1 {
        text += &format!(", batch {}", point.batch);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        machine::Machine,
        report::{BlockingFigures, RATIOS, tests::rounds},
        workload::Workload,
    };

    #[test]
    fn speeds_with_sleeping_are_wrapped() {
        let mut point = Point::new(&Workload::random_4k(1, 1), 2, &rounds(), &[]);
        assert_eq!(asleep(&point, 80), "");
        for figures in point.engines.values_mut() {
            figures.blocking = Some(BlockingFigures { writes_per_s: 17.0, ..Default::default() });
        }
        assert_eq!(
            asleep(&point, 60),
            "  writes/s if both sides sleep while they wait: none 17,\n    rio 17, sync 17\n"
        );
    }

    #[test]
    fn every_point_has_its_table_and_its_line() {
        let points = [1, 32].map(|queue_depth| {
            let mut workload = Workload::random_4k(4, queue_depth);
            workload.seed = 5;
            Point::new(&workload, 2, &rounds(), &RATIOS)
        });
        let machine = Machine { cpu: "Test CPU".to_owned(), cores: 2, ..Machine::default() };
        let text = render(&Report::new(machine, points.to_vec()), &Terminal::PLAIN);
        for part in [
            "Test CPU, 2 cores",
            "rand 4 KiB, queue depth 32, 4 threads (more threads than cores)",
            "depth 1, 4 KiB, 4 threads*",
            "rio/none",
            "0.95-0.95",
            "CPU/op",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        // No floor was run, and no run with sleeping.
        assert!(!text.contains("none/floor") && !text.contains("if both sides sleep"), "{text}");
    }
}
