//! Where Rio stands to the other ways: its throughput over theirs, by the drives and targets.

use super::{
    block,
    figure::{Curve, Figure},
};

/// The other ways, in the order of the columns. A file system has its own name for some.
const OTHERS: [(&str, &[&str]); 5] = [
    ("Linux", &["Linux", "ext4"]),
    ("HORAE", &["HORAE", "HoraeFS"]),
    ("barrier", &["barrier"]),
    ("OPIMQ", &["OPIMQ"]),
    ("orderless", &["orderless"]),
];

/// The names of Rio.
const RIO: &[&str] = &["Rio", "RioFS"];

/// The rows: the drives and targets, and the figures that have them.
const ROWS: [(&str, &[&str]); 5] = [
    ("one flash drive", &["rio-10a"]),
    ("one Optane drive", &["rio-10b"]),
    ("two drives of one target", &["rio-10c"]),
    ("two targets with two drives each", &["rio-10d"]),
    ("a file system on one Optane drive", &["rio-13", "rio-15a", "rio-15b"]),
];

/// The number of first rows that are about ordered writes without a file system.
const BLOCK_ROWS: usize = 4;

/// The paper's averages of ordered writes, by column: "two orders of magnitude and 4.9×" (Rio, abstract).
const PAPER: [Option<f64>; OTHERS.len()] = [Some(100.0), Some(4.9), None, None, None];

/// The throughput of Rio over that of each other way.
#[derive(Clone, Debug, PartialEq)]
pub struct Standing {
    /// The rows that were measured.
    pub rows: Vec<Row>,
    /// The geometric means of the rows of ordered writes, if all of these rows were measured.
    pub mean: Option<Row>,
    /// The averages that the paper states for ordered writes.
    pub paper: Row,
}

/// The ratios of one set-up.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Its name.
    pub name: &'static str,
    /// For each of [`others`], the geometric mean of the ratios at all points; `None` if it was not
    /// measured there.
    pub ratios: [Option<f64>; OTHERS.len()],
}

/// The names of the other ways, in the order of the columns.
#[must_use]
pub fn others() -> [&'static str; OTHERS.len()] {
    OTHERS.map(|(name, _)| name)
}

impl Standing {
    /// The standing in these figures; `None` if none of them compares Rio with another way.
    #[must_use]
    pub fn of(figures: &[Figure]) -> Option<Self> {
        let measured: Vec<(usize, Row)> = ROWS
            .iter()
            .enumerate()
            .filter_map(|(at, (name, ids))| Some((at, row(name, ids, figures)?)))
            .collect();
        let blocks: Vec<&Row> =
            measured.iter().filter(|(at, _)| *at < BLOCK_ROWS).map(|(_, row)| row).collect();
        let mean = (blocks.len() == BLOCK_ROWS).then(|| Row {
            name: "mean without the file system",
            ratios: std::array::from_fn(|other| {
                block::mean(blocks.iter().map(|row| row.ratios[other]))
            }),
        });
        let paper = Row { name: "the Rio paper, on average", ratios: PAPER };
        let rows: Vec<Row> = measured.into_iter().map(|(_, row)| row).collect();
        if rows.is_empty() { None } else { Some(Self { rows, mean, paper }) }
    }
}

/// The row of the figures `ids`; `None` if none of them compares Rio with another way.
fn row(name: &'static str, ids: &[&str], figures: &[Figure]) -> Option<Row> {
    let figures: Vec<&Figure> =
        figures.iter().filter(|figure| ids.contains(&figure.id.as_str())).collect();
    let ratios = OTHERS.map(|(_, names)| {
        block::mean(figures.iter().flat_map(|figure| ratios(figure, names)).map(Some))
    });
    ratios.iter().any(Option::is_some).then_some(Row { name, ratios })
}

/// The ratios of Rio to another way at the points of a figure. Its first panel has the throughput.
fn ratios(figure: &Figure, names: &[&str]) -> Vec<f64> {
    let curve = |names: &[&str]| -> Option<&Curve> {
        figure.panels.first()?.curves.iter().find(|curve| names.contains(&curve.name.as_str()))
    };
    let (Some(rio), Some(other)) = (curve(RIO), curve(names)) else { return Vec::new() };
    let both = rio.values.iter().zip(&other.values);
    both.filter_map(|(rio, other)| Some(rio.as_ref()?.median / other.as_ref()?.median)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{
        catalogue,
        figure::{Panel, Value},
    };

    /// A figure of the catalogue with these curves in its first panel.
    fn figure(id: &str, curves: &[(&str, &[f64])]) -> Figure {
        let entry = catalogue::named(id).unwrap();
        let value = |median: &f64| Some(Value { median: *median, interval: None });
        let curve = |(name, values): &(&str, &[f64])| Curve {
            name: (*name).to_owned(),
            values: values.iter().map(value).collect(),
            expected: Vec::new(),
        };
        let panel = Panel { curves: curves.iter().map(curve).collect(), ..Panel::default() };
        Figure { panels: vec![panel], ..Figure::of(entry) }
    }

    fn rounded(row: &Row) -> Vec<Option<u64>> {
        row.ratios.iter().map(|ratio| ratio.map(|ratio| (ratio * 100.0).round() as u64)).collect()
    }

    #[test]
    fn the_ratios_are_means_over_points_and_figures() {
        let on_flash = figure(
            "rio-10a",
            &[("Linux", &[1.0, 1.0]), ("Rio", &[2.0, 8.0]), ("orderless", &[4.0, 8.0])],
        );
        let appends = figure("rio-13", &[("ext4", &[1.0]), ("RioFS", &[4.0])]);
        let varmail = figure("rio-15a", &[("ext4", &[1.0]), ("RioFS", &[9.0])]);
        let standing = Standing::of(&[on_flash, appends, varmail]).unwrap();
        let names: Vec<&str> = standing.rows.iter().map(|row| row.name).collect();
        assert_eq!(names, ["one flash drive", "a file system on one Optane drive"]);
        assert_eq!(rounded(&standing.rows[0]), [Some(400), None, None, None, Some(71)]);
        assert_eq!(rounded(&standing.rows[1]), [Some(600), None, None, None, None]);
        assert_eq!(standing.mean, None, "two of the four are missing");
    }

    #[test]
    fn the_mean_has_the_ways_that_each_set_up_has() {
        let of = |id, ratio: f64| figure(id, &[("HORAE", &[1.0]), ("Rio", &[ratio])]);
        let mut all = vec![of("rio-10a", 2.0), of("rio-10b", 8.0), of("rio-10c", 4.0)];
        all.push(figure("rio-10d", &[("HORAE", &[1.0]), ("Rio", &[4.0]), ("orderless", &[4.0])]));
        let mean = Standing::of(&all).unwrap().mean.unwrap();
        assert_eq!(rounded(&mean), [None, Some(400), None, None, None]);
    }

    #[test]
    fn the_rows_are_figures_of_the_catalogue() {
        for id in ROWS.iter().flat_map(|(_, ids)| *ids) {
            assert!(catalogue::named(id).is_some(), "{id}");
        }
        assert_eq!(Standing::of(&[]), None);
    }
}
