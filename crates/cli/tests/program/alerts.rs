//! The example alerts for Prometheus: each metric that they use exists.

use std::collections::BTreeSet;

use riopipe::{OpenOptions, StreamOptions, Volume};
use riopipe_fs::mount_stat::MountStat;

use crate::site::Site;

const ALERTS: &str = include_str!("../../../../contrib/prometheus/rio-alerts.yml");

/// The names in the samples of a page.
fn names(page: &str) -> impl Iterator<Item = &str> {
    page.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split(['{', ' ']).next().unwrap_or_default())
}

#[test]
fn every_metric_of_the_example_alerts_exists() {
    let site = Site::new(1, "mem:16M,lazy");
    site.create();
    let members = [site.address(0).parse().unwrap()];
    let (volume, _) = Volume::open("v", &members, &OpenOptions::default()).unwrap();
    let stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let target = site.targets[0].as_ref().unwrap();
    let pages = [
        target.stat_source().open_metrics().unwrap(),
        volume.stat_source().open_metrics().unwrap(),
        MountStat::default().open_metrics().unwrap(),
    ];
    let exist: BTreeSet<&str> = pages.iter().flat_map(|page| names(page)).collect();
    let mut used = 0;
    for line in ALERTS.lines().filter_map(|line| line.trim().strip_prefix("expr: ")) {
        let words = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        for name in words.filter(|word| word.starts_with("rio_") || word.starts_with("process_")) {
            assert!(exist.contains(name), "{name} is in no page: {exist:?}");
            used += 1;
        }
    }
    let count = |key: &str| ALERTS.lines().filter(|line| line.trim().starts_with(key)).count();
    assert!(used >= count("- alert: ") && used > 10, "{used}");
    for key in ["expr: ", "labels: {severity: ", "annotations:", "summary: "] {
        assert_eq!(count(key), count("- alert: "), "{key}");
    }
    stream.close().unwrap();
    volume.close().unwrap();
}
