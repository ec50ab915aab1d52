//! The example alerts for Prometheus, and the dashboard for Grafana: each metric and each label that
//! they use exists.

use std::collections::BTreeSet;

use riopipe::{OpenOptions, StreamOptions, Volume};
use riopipe_fs::mount_stat::MountStat;
use serde_json::Value;

use crate::site::Site;

const ALERTS: &str = include_str!("../../../../contrib/prometheus/rio-alerts.yml");
const DASHBOARD: &str = include_str!("../../../../contrib/grafana/rio.json");
/// Labels that Prometheus adds.
const LABELS_OF_PROMETHEUS: [&str; 2] = ["instance", "job"];

/// The names in the samples of a page.
fn names(page: &str) -> impl Iterator<Item = &str> {
    page.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split(['{', ' ']).next().unwrap_or_default())
}

/// The pages of a target, of an open volume, and of a file system.
fn pages() -> [String; 3] {
    let site = Site::new(1, "mem:16M,lazy");
    site.create();
    let members = [site.address(0).parse().unwrap()];
    let (volume, _) = Volume::open("v", &members, &OpenOptions::default()).unwrap();
    let stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let target = site.targets[0].as_ref().unwrap();
    // Times of fsyncs are on the page of a file system that has had some.
    let times = target.stat().stages.into_iter().take(1).collect();
    let file_system = MountStat { total: times, ..MountStat::default() };
    let pages = [
        target.stat_source().open_metrics().unwrap(),
        volume.stat_source().open_metrics().unwrap(),
        file_system.open_metrics().unwrap(),
    ];
    stream.close().unwrap();
    volume.close().unwrap();
    pages
}

/// The names of metrics in an expression.
fn names_in(expression: &str) -> impl Iterator<Item = &str> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("rio_") || word.starts_with("process_"))
}

#[test]
fn every_metric_of_the_example_alerts_exists() {
    let pages = pages();
    let exist: BTreeSet<&str> = pages.iter().flat_map(|page| names(page)).collect();
    let mut used = 0;
    for line in ALERTS.lines().filter_map(|line| line.trim().strip_prefix("expr: ")) {
        for name in names_in(line) {
            assert!(exist.contains(name), "{name} is in no page: {exist:?}");
            used += 1;
        }
    }
    let count = |key: &str| ALERTS.lines().filter(|line| line.trim().starts_with(key)).count();
    assert!(used >= count("- alert: ") && used > 10, "{used}");
    for key in ["expr: ", "labels: {severity: ", "annotations:", "summary: "] {
        assert_eq!(count(key), count("- alert: "), "{key}");
    }
}

/// The labels between braces: `{{volume}}` of a legend.
fn labels_in(legend: &str) -> impl Iterator<Item = &str> {
    legend.split("{{").skip(1).filter_map(|rest| rest.split("}}").next())
}

#[test]
fn every_metric_and_label_of_the_dashboard_exists() {
    let pages = pages();
    let exist: BTreeSet<&str> = pages.iter().flat_map(|page| names(page)).collect();
    // Labels of metrics that have no sample here, such as those of file systems, are on its page.
    let has_label = |metrics: &[&str], label: &str| {
        let with_label = format!("{label}=\"");
        let is_line = |line: &&str| metrics.iter().any(|metric| line.starts_with(metric));
        LABELS_OF_PROMETHEUS.contains(&label)
            || pages
                .iter()
                .flat_map(|page| page.lines())
                .filter(is_line)
                .any(|line| line.split(['{', ',']).any(|part| part.starts_with(&with_label)))
    };
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let (mut used, mut ids) = (BTreeSet::new(), BTreeSet::new());
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "an id is used twice: {panel}");
        if panel["type"] == "row" {
            continue;
        }
        let title = panel["title"].as_str().unwrap();
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{title}");
        for target in targets {
            let expression = target["expr"].as_str().unwrap();
            let metrics: Vec<&str> = names_in(expression).collect();
            for name in &metrics {
                assert!(exist.contains(name), "{title}: {name} is in no page");
                used.insert(*name);
            }
            for label in labels_in(target["legendFormat"].as_str().unwrap()) {
                assert!(has_label(&metrics, label), "{title}: no label {label:?} in {metrics:?}");
                // What is summed keeps only the labels that it names.
                let is_kept = |by: &str| by.split([',', ' ', ')']).any(|kept| kept == label);
                let mut sums = expression
                    .split("by (")
                    .skip(1)
                    .map(|rest| rest.split(')').next().unwrap_or_default());
                assert!(sums.all(is_kept), "{title}: {label:?} is summed away");
            }
        }
    }
    let variables = dashboard["templating"]["list"].to_string();
    assert!(names_in(&variables).all(|name| exist.contains(name)), "{variables}");
    // The exposition changes more often than the dashboard. What it has of a target is shown.
    assert!(used.len() > 30, "{used:?}");
    for counter in ["rio_writes_total", "rio_drive_errors_total", "rio_log_fullest_stream_ratio"] {
        assert!(used.contains(counter), "{counter}");
    }
}
