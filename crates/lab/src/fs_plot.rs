//! Pictures of file systems: speed and latency against threads, latency against speed, and the
//! stages of an `fsync` as bars.

use std::io;
use std::ops::Range;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const SIZE: (u32, u32) = (1380, 440);
const BARS_WIDTH: u32 = 1100;
const BAR_HEIGHT: i32 = 34;
const HEAD_HEIGHT: u32 = 34;
const FONT: &str = "sans-serif";

/// A file system at one number of threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mark {
    /// Number of threads.
    pub threads: u32,
    /// Operations per second.
    pub ops_per_s: f64,
    /// Mean latency, µs.
    pub mean_us: f64,
    /// 99th percentile of the latency, µs.
    pub p99_us: f64,
}

/// A file system at some numbers of threads, in ascending order.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Its name.
    pub name: String,
    /// The points.
    pub marks: Vec<Mark>,
}

/// The stages of an operation of one file system.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// Its name.
    pub name: String,
    /// The stages in their order, and the time of each, µs.
    pub stages: Vec<(String, f64)>,
}

/// A picture could not be drawn, by a bug.
#[derive(Debug, thiserror::Error)]
#[error("can't draw: {0}")]
pub struct DrawError(String);

type Drawn<T> = Result<T, DrawingAreaErrorKind<io::Error>>;

/// Draws four panels: throughput, mean latency and 99th percentile against threads, and mean latency
/// against throughput. Returns the picture as SVG.
///
/// # Errors
/// [`DrawError`].
pub fn curves(curves: &[Curve], title: &str, caption: &str) -> Result<String, DrawError> {
    let mut svg = String::new();
    draw_curves(&mut svg, curves, title, caption).map_err(|error| DrawError(error.to_string()))?;
    Ok(svg)
}

/// Draws a bar for each file system, divided into its stages. Returns the picture as SVG.
///
/// # Errors
/// [`DrawError`].
pub fn bars(bars: &[Bar], title: &str, caption: &str) -> Result<String, DrawError> {
    let mut svg = String::new();
    draw_bars(&mut svg, bars, title, caption).map_err(|error| DrawError(error.to_string()))?;
    Ok(svg)
}

/// A panel: its title, its axes, and a point of a mark.
struct Panel {
    title: &'static str,
    x: &'static str,
    of: fn(&Mark) -> (f64, f64),
}

const PANELS: [Panel; 4] = [
    Panel {
        title: "thousand operations per second",
        x: "threads",
        of: |mark| (f64::from(mark.threads), mark.ops_per_s / 1e3),
    },
    Panel {
        title: "mean latency, µs",
        x: "threads",
        of: |mark| (f64::from(mark.threads), mark.mean_us),
    },
    Panel {
        title: "99th percentile of latency, µs",
        x: "threads",
        of: |mark| (f64::from(mark.threads), mark.p99_us),
    },
    Panel {
        title: "mean latency, µs, at a speed",
        x: "thousand operations per second",
        of: |mark| (mark.ops_per_s / 1e3, mark.mean_us),
    },
];

fn draw_curves(svg: &mut String, curves: &[Curve], title: &str, caption: &str) -> Drawn<()> {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (head, rest) = root.split_vertically(HEAD_HEIGHT);
    let names = curves.iter().map(|curve| (curve.name.as_str(), colour_of(&curve.name)));
    legend(&head, names, title, caption)?;
    for (panel, area) in PANELS.iter().zip(rest.split_evenly((1, PANELS.len()))) {
        let points = curves.iter().flat_map(|curve| &curve.marks).map(panel.of);
        let (x, y): (Vec<f64>, Vec<f64>) = points.unzip();
        let mut chart = ChartBuilder::on(&area)
            .caption(panel.title, (FONT, 16))
            .margin(10)
            .x_label_area_size(42)
            .y_label_area_size(56)
            .build_cartesian_2d(range(&x), range(&y))?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc(panel.x)
            .label_style((FONT, 13))
            .draw()?;
        for curve in curves {
            let colour = colour_of(&curve.name);
            let points: Vec<(f64, f64)> = curve.marks.iter().map(panel.of).collect();
            let line = PathElement::new(points.clone(), colour.stroke_width(2));
            chart.draw_series([line])?;
            chart.draw_series(points.iter().map(|at| Circle::new(*at, 3, colour.filled())))?;
        }
    }
    root.present()
}

/// From zero to a little above the largest value.
fn range(values: &[f64]) -> Range<f64> {
    let most = values.iter().copied().fold(0.0, f64::max);
    0.0..if most > 0.0 { most * 1.08 } else { 1.0 }
}

fn legend<'a>(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    names: impl Iterator<Item = (&'a str, RGBColor)>,
    title: &str,
    caption: &str,
) -> Drawn<()> {
    let (width, _) = area.dim_in_pixel();
    let style = TextStyle::from((FONT, 14).into_font()).pos(Pos::new(HPos::Left, VPos::Center));
    area.draw(&Text::new(title.to_owned(), (12, 17), style.clone()))?;
    let mut x = 30 + 8 * title.chars().count() as i32;
    for (name, colour) in names {
        area.draw(&PathElement::new([(x, 17), (x + 22, 17)], colour.stroke_width(3)))?;
        area.draw(&Text::new(name.to_owned(), (x + 28, 17), style.clone()))?;
        x += 48 + 8 * name.len() as i32;
    }
    let faint = BLACK.mix(0.6);
    let small = TextStyle::from((FONT, 11).into_font()).color(&faint);
    let right = small.pos(Pos::new(HPos::Right, VPos::Center));
    area.draw(&Text::new(caption.to_owned(), (width as i32 - 12, 17), right))
}

fn draw_bars(svg: &mut String, bars: &[Bar], title: &str, caption: &str) -> Drawn<()> {
    let stages = stages_of(bars);
    let lines = stages.len().div_ceil(4) as i32;
    let height = 80 + (BAR_HEIGHT + 16) * bars.len() as i32 + 22 * lines;
    let root = SVGBackend::with_string(svg, (BARS_WIDTH, height as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let (head, _) = root.split_vertically(HEAD_HEIGHT);
    legend(&head, std::iter::empty(), title, caption)?;
    let style = TextStyle::from((FONT, 14).into_font()).pos(Pos::new(HPos::Left, VPos::Center));
    let sum = |bar: &Bar| bar.stages.iter().map(|(_, us)| us).sum::<f64>();
    let longest = bars.iter().map(sum).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let (left, right) = (90, BARS_WIDTH as i32 - 110);
    let x_of = |us: f64| left + (us / longest * f64::from(right - left)).round() as i32;
    for (bar, top) in bars.iter().zip((50..).step_by(BAR_HEIGHT as usize + 16)) {
        let middle = top + BAR_HEIGHT / 2;
        root.draw(&Text::new(bar.name.clone(), (12, middle), style.clone()))?;
        let mut from = 0.0;
        for (name, us) in &bar.stages {
            let colour = stage_colour(&stages, name);
            let corners = [(x_of(from), top), (x_of(from + us), top + BAR_HEIGHT)];
            root.draw(&Rectangle::new(corners, colour.filled()))?;
            from += us;
        }
        let label = format!("{:.1} µs", sum(bar));
        root.draw(&Text::new(label, (x_of(from) + 8, middle), style.clone()))?;
    }
    let first = 66 + (BAR_HEIGHT + 16) * bars.len() as i32;
    for (number, name) in (0..).zip(&stages) {
        let (x, y) = (90 + 240 * (number % 4), first + 22 * (number / 4));
        let colour = stage_colour(&stages, name);
        root.draw(&Rectangle::new([(x, y - 6), (x + 14, y + 6)], colour.filled()))?;
        root.draw(&Text::new(name.clone(), (x + 20, y), style.clone()))?;
    }
    root.present()
}

/// All stages, in the order in which they occur.
fn stages_of(bars: &[Bar]) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for (name, _) in bars.iter().flat_map(|bar| &bar.stages) {
        if !all.contains(name) {
            all.push(name.clone());
        }
    }
    all
}

fn stage_colour(stages: &[String], name: &str) -> RGBColor {
    const COLOURS: [RGBColor; 12] = [
        RGBColor(31, 100, 200),
        RGBColor(150, 190, 240),
        RGBColor(20, 140, 60),
        RGBColor(140, 210, 150),
        RGBColor(240, 130, 20),
        RGBColor(250, 200, 140),
        RGBColor(200, 40, 50),
        RGBColor(240, 160, 160),
        RGBColor(110, 60, 170),
        RGBColor(190, 160, 220),
        RGBColor(120, 100, 40),
        RGBColor(170, 170, 170),
    ];
    let at = stages.iter().position(|stage| stage == name).unwrap_or(0);
    COLOURS[at % COLOURS.len()]
}

fn colour_of(name: &str) -> RGBColor {
    match name {
        "rio" => RGBColor(20, 140, 60),
        "horae" => RGBColor(202, 125, 20),
        "barrier" => RGBColor(140, 60, 160),
        "opimq" => RGBColor(0, 130, 130),
        "ext4" => RGBColor(200, 40, 50),
        "kernel_ext4" => RGBColor(240, 130, 20),
        _ => RGBColor(130, 130, 130),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(threads: u32) -> Mark {
        let n = f64::from(threads);
        Mark { threads, ops_per_s: 5e3 * n, mean_us: 40.0 * n, p99_us: 90.0 * n }
    }

    #[test]
    fn four_panels_with_all_file_systems() {
        let curve = |name: &str| Curve { name: name.to_owned(), marks: vec![mark(1), mark(4)] };
        let svg = curves(&[curve("ext4"), curve("rio")], "varmail & co", "two cores").unwrap();
        for part in ["ext4", "rio", "varmail &amp; co", "two cores"] {
            assert!(svg.contains(part), "no {part:?} in {svg}");
        }
        for panel in &PANELS {
            assert!(svg.contains(panel.title) && svg.contains(panel.x), "{}", panel.title);
        }
        assert!(svg.matches("<circle").count() >= 4 * 2 * 2);
    }

    #[test]
    fn a_bar_is_as_long_as_its_stages() {
        let bar = |name: &str, stages: &[(&str, f64)]| Bar {
            name: name.to_owned(),
            stages: stages.iter().map(|(name, us)| ((*name).to_owned(), *us)).collect(),
        };
        let all = [
            bar("ext4", &[("wait data", 100.0), ("wait commit", 104.0)]),
            bar("rio", &[("wait record", 100.0), ("wait data", 2.0)]),
        ];
        assert_eq!(stages_of(&all), ["wait data", "wait commit", "wait record"]);
        let svg = bars(&all, "fsync", "").unwrap();
        for part in ["204.0 µs", "102.0 µs", "wait record", "rio"] {
            assert!(svg.contains(part), "no {part:?} in {svg}");
        }
    }

    #[test]
    fn nothing_gives_an_empty_picture() {
        assert!(curves(&[], "", "").unwrap().contains("<svg"));
        assert!(bars(&[], "", "").unwrap().contains("<svg"));
    }
}
