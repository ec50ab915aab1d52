//! Pictures of a comparison: for each axis one SVG with speed, CPU time and latency.
//!
//! All steps on an axis have the same width (its values double). Bars at the points of the first
//! panel are confidence intervals; in the grey area there are more threads than cores.

use std::{
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
};

use plotters::{
    coord::{
        Shift,
        ranged1d::{AsRangedCoord, KeyPointHint, NoDefaultFormatting, ValueFormatter},
    },
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::{
    report::{EngineFigures, Point},
    steps::Steps,
    sweep::{Axis, Sweep},
};

const SIZE: (u32, u32) = (1380, 470);
const LEGEND_HEIGHT: u32 = 34;
const FONT: &str = "sans-serif";

/// The reason why a picture could not be drawn or stored.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// The folder, or a file in it, can't be written.
    #[error("can't write {path}: {source}", path = path.display())]
    Write {
        /// Path of the file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Drawing failed, by a bug.
    #[error("can't draw {axis}: {why}")]
    Draw {
        /// Axis of the picture.
        axis: Axis,
        /// The library's error.
        why: String,
    },
}

/// Draws each axis of the sweep into `folder` (created if missing) as `depth.svg`, `threads.svg`,
/// …; returns the files. Files with these names are overwritten.
///
/// # Errors
/// [`PlotError`].
pub fn write(
    folder: &Path,
    points: &[Point],
    sweep: &Sweep,
    caption: &str,
) -> Result<Vec<PathBuf>, PlotError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| PlotError::Write { path, source }
    };
    fs::create_dir_all(folder).map_err(failed(folder))?;
    let mut files = Vec::new();
    for axis in sweep.axes() {
        let along = sweep.along(axis, points);
        let picture = draw(axis, &along, caption)
            .map_err(|error| PlotError::Draw { axis, why: error.to_string() })?;
        let path = folder.join(format!("{}.svg", axis.name()));
        fs::write(&path, picture).map_err(failed(&path))?;
        files.push(path);
    }
    Ok(files)
}

type Drawn<T> = Result<T, DrawingAreaErrorKind<io::Error>>;

/// One figure of all contenders.
struct Panel {
    title: &'static str,
    of: fn(&EngineFigures) -> f64,
    interval: Option<fn(&EngineFigures) -> [f64; 2]>,
    logarithmic: bool,
}

const PANELS: [Panel; 3] = [
    Panel {
        title: "thousand writes per second",
        of: |figures| figures.writes_per_s / 1e3,
        interval: Some(|figures| figures.writes_per_s_interval.map(|value| value / 1e3)),
        logarithmic: false,
    },
    Panel {
        title: "CPU time per write, both sides, µs",
        of: |figures| figures.cpu_ns_per_write / 1e3,
        interval: None,
        logarithmic: true,
    },
    Panel {
        title: "99th percentile of latency, µs",
        of: |figures| figures.latency.p99_ns as f64 / 1e3,
        interval: None,
        logarithmic: true,
    },
];

/// The picture of one axis, as SVG.
fn draw(axis: Axis, points: &[&Point], caption: &str) -> Drawn<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (head, rest) = root.split_vertically(LEGEND_HEIGHT);
        legend(&head, points, caption)?;
        for (panel, area) in PANELS.iter().zip(rest.split_evenly((1, PANELS.len()))) {
            // The two kinds of scale are different types.
            let (low, high) = panel.range(points);
            if panel.logarithmic {
                panel.draw(&area, axis, points, Decades { low, high })?;
            } else {
                panel.draw(&area, axis, points, 0.0..high)?;
            }
        }
        root.present()?;
    }
    Ok(svg)
}

fn legend(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    points: &[&Point],
    caption: &str,
) -> Drawn<()> {
    let (width, _) = area.dim_in_pixel();
    let style = TextStyle::from((FONT, 14).into_font()).pos(Pos::new(HPos::Left, VPos::Center));
    let mut x = 60;
    for name in contenders(points) {
        let colour = colour_of(name);
        area.draw(&PathElement::new([(x, 17), (x + 22, 17)], colour.stroke_width(3)))?;
        area.draw(&Text::new(name.to_owned(), (x + 28, 17), style.clone()))?;
        x += 52 + 8 * name.len() as i32;
    }
    let faint = BLACK.mix(0.6);
    let right = style.pos(Pos::new(HPos::Right, VPos::Center)).color(&faint);
    area.draw(&Text::new(caption.to_owned(), (width as i32 - 12, 17), right))?;
    Ok(())
}

impl Panel {
    /// The range from below the smallest value to a little above the largest.
    fn range(&self, points: &[&Point]) -> (f64, f64) {
        let values = points.iter().flat_map(|point| point.engines.values()).flat_map(|figures| {
            let [low, high] = self.interval.map_or([(self.of)(figures); 2], |of| of(figures));
            [low, high, (self.of)(figures)]
        });
        let values: Vec<f64> = values.filter(|value| *value > 0.0).collect();
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(0.0, f64::max);
        if high == 0.0 {
            return (0.1, 1.0);
        }
        // From a power of ten on, so that there are labels.
        (10f64.powf((low / 1.1).log10().floor()), high * 1.08)
    }

    fn draw<Y>(
        &self,
        area: &DrawingArea<SVGBackend<'_>, Shift>,
        axis: Axis,
        points: &[&Point],
        y: Y,
    ) -> Drawn<()>
    where
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let end = points.len() as f64 - 0.7;
        let (low, high) = self.range(points);
        let mut chart = ChartBuilder::on(area)
            .caption(self.title, (FONT, 16))
            .margin(10)
            .x_label_area_size(42)
            .y_label_area_size(56)
            .build_cartesian_2d(Steps(points.len()), y)?;
        let beyond = points.iter().position(|point| point.beyond_cores);
        if let Some(first) = beyond {
            let from = first as f64 - 0.5;
            let bottom = if self.logarithmic { low } else { 0.0 };
            let corners = [(from.max(-0.3), bottom), (end, high)];
            chart.draw_series([Rectangle::new(corners, BLACK.mix(0.08).filled())])?;
            let faint = BLACK.mix(0.6);
            let style = TextStyle::from((FONT, 12).into_font())
                .color(&faint)
                .pos(Pos::new(HPos::Right, VPos::Top));
            let place = (end, high);
            chart.draw_series([Text::new("more threads than cores", place, style)])?;
        }
        let value_of = |point: &&Point| match axis {
            Axis::Size => axis.of(point) / 1024,
            _ => axis.of(point),
        };
        let names: Vec<String> = points.iter().map(|point| value_of(point).to_string()).collect();
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc(axis.title())
            .x_label_formatter(&|x| names.get(x.round() as usize).cloned().unwrap_or_default())
            .y_label_formatter(&|value| label(*value))
            .label_style((FONT, 13))
            .draw()?;
        for name in contenders(points) {
            let colour = colour_of(name);
            let figures: Vec<_> = points
                .iter()
                .enumerate()
                .filter_map(|(x, point)| Some((x as f64, point.engines.get(name)?)))
                .filter(|(_, figures)| (self.of)(figures) > 0.0)
                .collect();
            let line = figures.iter().map(|(x, figures)| (*x, (self.of)(figures)));
            chart.draw_series([PathElement::new(
                line.clone().collect::<Vec<_>>(),
                colour.stroke_width(2),
            )])?;
            chart.draw_series(line.map(|at| Circle::new(at, 3, colour.filled())))?;
            if let Some(interval) = self.interval {
                chart.draw_series(figures.iter().map(|(x, figures)| {
                    let [low, high] = interval(figures);
                    PathElement::new([(*x, low), (*x, high)], colour.mix(0.6).stroke_width(1))
                }))?;
            }
        }
        Ok(())
    }
}

/// A logarithmic scale, labelled at 1, 2 and 5 of each decade.
struct Decades {
    low: f64,
    high: f64,
}

impl Ranged for Decades {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (bottom, top): (i32, i32)) -> i32 {
        let share = (value / self.low).ln() / (self.high / self.low).ln();
        bottom + (share * f64::from(top - bottom)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        let decades = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        let steps = decades.flat_map(|decade| [1.0, 2.0, 5.0].map(|n| n * 10f64.powi(decade)));
        steps.filter(|step| (self.low..=self.high).contains(step)).collect()
    }

    fn range(&self) -> Range<f64> {
        self.low..self.high
    }
}

impl ValueFormatter<f64> for Decades {}

/// All contenders that ran at any of these points.
fn contenders<'a>(points: &[&'a Point]) -> Vec<&'a str> {
    let mut names: Vec<&str> =
        points.iter().flat_map(|point| point.engines.keys().map(String::as_str)).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn label(value: f64) -> String {
    if value.fract() == 0.0 || value >= 100.0 { format!("{value:.0}") } else { format!("{value}") }
}

fn colour_of(contender: &str) -> RGBColor {
    match contender {
        "floor" => RGBColor(130, 130, 130),
        "none" => RGBColor(31, 100, 200),
        "none_seq" => RGBColor(120, 180, 240),
        "rio" => RGBColor(20, 140, 60),
        "rio_dax" => RGBColor(0, 170, 170),
        "rio_block" => RGBColor(140, 120, 20),
        "rio_merged" => RGBColor(240, 130, 20),
        _ => RGBColor(200, 40, 50),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{RATIOS, tests::rounds};

    #[test]
    fn a_picture_per_axis_with_all_contenders_and_values() {
        let sweep = Sweep::new([Some(vec![1, 32]), Some(vec![1, 4]), Some(vec![4096]), None]);
        let points: Vec<Point> = sweep
            .workloads(1)
            .iter()
            .map(|workload| Point::new(workload, 2, &rounds(), &RATIOS))
            .collect();
        let threads = draw(Axis::Threads, &sweep.along(Axis::Threads, &points), "a & b").unwrap();
        for part in ["<svg", "sync", "rio", "none", "more threads than cores", "a &amp; b"] {
            assert!(threads.contains(part), "no {part:?} in {threads}");
        }
        let depth = draw(Axis::Depth, &sweep.along(Axis::Depth, &points), "").unwrap();
        assert!(depth.contains("queue depth"));
        assert!(!depth.contains("more threads"));
        for panel in &PANELS {
            assert!(depth.contains(panel.title));
        }
    }

    #[test]
    fn decades_are_labelled_within_the_range_only() {
        let scale = Decades { low: 0.7, high: 30.0 };
        let labels: Vec<_> = scale.key_points(10usize).into_iter().map(label).collect();
        assert_eq!(labels, ["1", "2", "5", "10", "20"]);
        assert_eq!(scale.map(&0.7, (400, 0)), 400);
        assert_eq!(scale.map(&30.0, (400, 0)), 0);
    }

    #[test]
    fn no_points_give_an_empty_picture() {
        assert!(draw(Axis::Batch, &[], "").unwrap().contains("<svg"));
    }

    #[test]
    fn a_folder_that_cannot_be_created_is_reported() {
        let sweep = Sweep::new([Some(vec![1, 2]), None, None, None]);
        let error = write(Path::new("/proc/no/such"), &[], &sweep, "").unwrap_err();
        assert!(error.to_string().contains("/proc/no/such"), "{error}");
    }
}
