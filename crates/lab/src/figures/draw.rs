//! A panel as SVG, for a light and a dark page.
//!
//! All steps of the horizontal axis have the same width, since values double. A thin bar at a point is
//! its interval. A dashed line is what the model expects. In the shaded part there are more threads than cores.

use std::io;

use plotters::{
    coord::{Shift, types::RangedCoordf64},
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::figure::{Curve, Figure, Form, Panel};
use crate::steps::Steps;

/// Size of a panel of lines, pixels. Bars need less height.
const SIZE: (u32, u32) = (430, 320);
/// Height of a bar with its distance to the next one, and of a line of names, pixels.
const BAR_HEIGHT: i32 = 34;
const NAME_HEIGHT: i32 = 18;
/// Names of parts on one line.
const NAME_COLUMNS: usize = 2;
/// Height of the title and the names of a whole figure, pixels.
const HEAD_HEIGHT: u32 = 60;
const FONT: &str = "sans-serif";

/// The page on which a panel lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Theme {
    /// Dark on white: also for paper.
    Light,
    /// Bright on dark.
    Dark,
}

impl Theme {
    fn ink(self) -> RGBColor {
        match self {
            Self::Light => RGBColor(34, 38, 44),
            Self::Dark => RGBColor(216, 220, 226),
        }
    }

    fn paper(self) -> RGBColor {
        match self {
            Self::Light => WHITE,
            Self::Dark => RGBColor(24, 27, 32),
        }
    }

    /// The colour of the part of a bar.
    fn part(self, number: usize) -> RGBColor {
        const PARTS: [(u8, u8, u8); 10] = [
            (35, 95, 190),
            (240, 150, 40),
            (20, 130, 70),
            (200, 60, 50),
            (140, 60, 160),
            (0, 150, 160),
            (170, 130, 60),
            (220, 110, 160),
            (110, 120, 130),
            (150, 170, 60),
        ];
        let (r, g, b) = PARTS[number % PARTS.len()];
        RGBColor(r, g, b)
    }

    /// The colour of a contender.
    #[must_use]
    pub fn colour(self, name: &str) -> RGBColor {
        let [light, dark] = match name {
            "Linux" => [(192, 57, 43), (240, 120, 105)],
            "HORAE" | "HoraeFS" => [(202, 125, 20), (245, 180, 80)],
            "ext4" => [(192, 57, 43), (240, 120, 105)],
            "Rio" | "RioFS" => [(20, 130, 70), (90, 205, 135)],
            "Rio w/o merge" => [(110, 170, 60), (165, 220, 120)],
            "orderless" => [(35, 95, 190), (115, 170, 250)],
            "orderless w/o merge" => [(110, 120, 200), (165, 175, 245)],
            "barrier" | "BarrierFS" => [(140, 60, 160), (205, 140, 225)],
            "BarrierFS, order only" => [(90, 40, 110), (170, 110, 190)],
            "RioFS, order only" => [(110, 170, 60), (165, 220, 120)],
            "ext4, RAID 0" => [(140, 90, 60), (210, 160, 120)],
            "HoraeFS, RAID 0" => [(130, 90, 40), (200, 160, 110)],
            "Linux, 3 drives" => [(140, 90, 60), (210, 160, 120)],
            "HORAE, 3 drives" => [(130, 90, 40), (200, 160, 110)],
            "Rio, 3 drives" => [(110, 170, 60), (165, 220, 120)],
            "OPEXT4" => [(190, 50, 120), (240, 130, 190)],
            "barrier, a queue each" => [(90, 40, 110), (170, 110, 190)],
            "HORAE, redirected" => [(130, 90, 40), (200, 160, 110)],
            "OPIMQ" => [(190, 50, 120), (240, 130, 190)],
            "OPIMQ, threads move" => [(120, 30, 80), (200, 90, 150)],
            "orderless, threads move" => [(110, 120, 200), (165, 175, 245)],
            _ => [(0, 130, 140), (80, 200, 210)],
        };
        let (r, g, b) = if self == Self::Light { light } else { dark };
        RGBColor(r, g, b)
    }
}

/// A picture could not be drawn, by a bug.
#[derive(Debug, thiserror::Error)]
#[error("can't draw {what:?}: {why}")]
pub struct DrawError {
    what: String,
    why: String,
}

type Drawn<T> = Result<T, DrawingAreaErrorKind<io::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Axes = Cartesian2d<Steps, RangedCoordf64>;

/// Draws one panel; returns SVG.
///
/// # Errors
/// [`DrawError`].
pub fn panel(panel: &Panel, theme: Theme) -> Result<String, DrawError> {
    let mut svg = String::new();
    let drawn =
        on_page(&mut svg, (SIZE.0, height_of(panel)), theme, |page| draw(page, panel, theme));
    drawn.map_err(|error| DrawError { what: panel.title.clone(), why: error.to_string() })?;
    Ok(svg)
}

/// Draws all panels of a figure with its title and the names of the contenders, for a page that has
/// no other text; returns SVG.
///
/// # Errors
/// [`DrawError`].
pub fn whole(figure: &Figure, theme: Theme) -> Result<String, DrawError> {
    let mut svg = String::new();
    let panels = figure.panels.len().max(1);
    let height = figure.panels.iter().map(height_of).max().unwrap_or(SIZE.1);
    let width = (SIZE.0 * panels as u32).max(head_width(figure));
    let size = (width, height + HEAD_HEIGHT);
    let drawn = on_page(&mut svg, size, theme, |page| {
        let (head, rest) = page.split_vertically(HEAD_HEIGHT);
        draw_head(&head, figure, theme)?;
        let areas = rest.split_evenly((1, panels));
        areas.iter().zip(&figure.panels).try_for_each(|(area, panel)| draw(area, panel, theme))
    });
    drawn.map_err(|error| DrawError { what: figure.id.clone(), why: error.to_string() })?;
    Ok(svg)
}

fn height_of(panel: &Panel) -> u32 {
    let (bars, names) = (panel.ticks.len(), panel.curves.len().div_ceil(NAME_COLUMNS));
    match panel.form {
        Form::Lines | Form::Bars => SIZE.1,
        Form::Stacked => 60 + BAR_HEIGHT as u32 * bars as u32 + NAME_HEIGHT as u32 * names as u32,
    }
}

fn on_page(
    svg: &mut String,
    size: (u32, u32),
    theme: Theme,
    draw: impl FnOnce(&Area<'_>) -> Drawn<()>,
) -> Drawn<()> {
    let page = SVGBackend::with_string(svg, size).into_drawing_area();
    page.fill(&theme.paper())?;
    draw(&page)?;
    page.present()
}

/// The width that the title and the names need, by the usual width of a letter.
fn head_width(figure: &Figure) -> u32 {
    let letters = |text: &str| text.chars().count() as u32;
    let title = 28 + 9 * letters(&title(figure));
    let names: u32 = figure.lines().iter().map(|curve| name_width(curve) as u32).sum();
    title.max(28 + names)
}

fn title(figure: &Figure) -> String {
    format!("{} ({})", figure.title, figure.source)
}

/// The width of a name with its line.
fn name_width(curve: &Curve) -> i32 {
    56 + 8 * curve.name.chars().count() as i32
}

fn draw_head(area: &Area<'_>, figure: &Figure, theme: Theme) -> Drawn<()> {
    let ink = theme.ink();
    let style = |size: u32| {
        TextStyle::from((FONT, size).into_font())
            .color(&ink)
            .pos(Pos::new(HPos::Left, VPos::Center))
    };
    area.draw(&Text::new(title(figure), (14, 18), style(17)))?;
    let mut x = 14;
    for curve in figure.lines() {
        let colour = theme.colour(&curve.name);
        area.draw(&PathElement::new([(x, 44), (x + 22, 44)], colour.stroke_width(3)))?;
        area.draw(&Text::new(curve.name.clone(), (x + 28, 44), style(13)))?;
        x += name_width(curve);
    }
    Ok(())
}

fn draw(area: &Area<'_>, panel: &Panel, theme: Theme) -> Drawn<()> {
    match panel.form {
        Form::Lines => draw_lines(area, panel, theme),
        Form::Stacked => draw_stacked(area, panel, theme),
        Form::Bars => draw_bars(area, panel, theme),
    }
}

/// A group of bars for each tick. Each bar has its value above it, since a bar may be much shorter than
/// the longest one.
fn draw_bars(area: &Area<'_>, panel: &Panel, theme: Theme) -> Drawn<()> {
    /// The width of a group, in steps of the axis.
    const GROUP: f64 = 0.56;
    let ink = theme.ink();
    let text = |size: u32| TextStyle::from((FONT, size).into_font()).color(&ink);
    // There is space for the values above.
    let high = highest(panel) * 1.2;
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, text(15))
        .margin(8)
        .x_label_area_size(38)
        .y_label_area_size(50)
        .build_cartesian_2d(Steps(panel.ticks.len().max(1)), 0.0..high)?;
    draw_mesh(&mut chart, panel, theme)?;
    let width = GROUP / panel.curves.len().max(1) as f64;
    let above = TextStyle::from((FONT, 10).into_font().transform(FontTransform::Rotate270))
        .color(&ink)
        .pos(Pos::new(HPos::Left, VPos::Center));
    for (number, curve) in panel.curves.iter().enumerate() {
        let colour = theme.colour(&curve.name);
        for (tick, value) in points(curve) {
            let from = tick - GROUP / 2.0 + width * number as f64;
            let corners = [(from, 0.0), (from + width * 0.9, value.median)];
            chart.draw_series([Rectangle::new(corners, colour.filled())])?;
            let place = (from + width * 0.45, value.median + high * 0.01);
            chart.draw_series([Text::new(label(value.median), place, above.clone())])?;
        }
    }
    Ok(())
}

/// The axes with their names, and the horizontal lines.
fn draw_mesh(
    chart: &mut ChartContext<'_, SVGBackend<'_>, Axes>,
    panel: &Panel,
    theme: Theme,
) -> Drawn<()> {
    let ink = theme.ink();
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(ink.mix(0.15))
        .axis_style(ink.mix(0.6))
        .x_desc(&panel.axis)
        .x_label_formatter(&|x| panel.ticks.get(x.round() as usize).cloned().unwrap_or_default())
        .y_labels(6)
        .y_label_formatter(&|value| label(*value))
        .label_style(TextStyle::from((FONT, 12).into_font()).color(&ink))
        .draw()
}

/// A bar for each tick. The names of its parts are below, in their order.
fn draw_stacked(area: &Area<'_>, panel: &Panel, theme: Theme) -> Drawn<()> {
    let (ink, (width, _)) = (theme.ink(), area.dim_in_pixel());
    let style = |size: u32, at: HPos| {
        TextStyle::from((FONT, size).into_font()).color(&ink).pos(Pos::new(at, VPos::Center))
    };
    let middle = (width / 2) as i32;
    area.draw(&Text::new(panel.title.clone(), (middle, 18), style(15, HPos::Center)))?;
    let value = |curve: &Curve, tick: usize| {
        curve.values.get(tick).copied().flatten().map_or(0.0, |value| value.median)
    };
    let sum = |tick| panel.curves.iter().map(|curve| value(curve, tick)).sum::<f64>();
    let longest = (0..panel.ticks.len()).map(sum).fold(f64::MIN_POSITIVE, f64::max);
    let names = panel.ticks.iter().map(|tick| tick.chars().count()).max().unwrap_or(0) as i32;
    let (left, right) = (16 + 7 * names, width as i32 - 60);
    let x_of = |value: f64| left + (value / longest * f64::from(right - left)).round() as i32;
    for (tick, name) in panel.ticks.iter().enumerate() {
        let top = 40 + BAR_HEIGHT * tick as i32;
        area.draw(&Text::new(name.clone(), (left - 8, top + 12), style(12, HPos::Right)))?;
        let mut from = 0.0;
        for (part, curve) in panel.curves.iter().enumerate() {
            let to = from + value(curve, tick);
            let corners = [(x_of(from), top), (x_of(to), top + 24)];
            area.draw(&Rectangle::new(corners, theme.part(part).filled()))?;
            from = to;
        }
        let text = label(sum(tick));
        area.draw(&Text::new(text, (x_of(from) + 6, top + 12), style(12, HPos::Left)))?;
    }
    let below = 52 + BAR_HEIGHT * panel.ticks.len() as i32;
    for (part, curve) in panel.curves.iter().enumerate() {
        let x = 16 + (part % NAME_COLUMNS) as i32 * (width as i32 / NAME_COLUMNS as i32);
        let y = below + NAME_HEIGHT * (part / NAME_COLUMNS) as i32;
        let corners = [(x, y - 5), (x + 12, y + 5)];
        area.draw(&Rectangle::new(corners, theme.part(part).filled()))?;
        area.draw(&Text::new(curve.name.clone(), (x + 18, y), style(12, HPos::Left)))?;
    }
    Ok(())
}

fn draw_lines(area: &Area<'_>, panel: &Panel, theme: Theme) -> Drawn<()> {
    let ink = theme.ink();
    let text = |size: u32| TextStyle::from((FONT, size).into_font()).color(&ink);
    let steps = panel.ticks.len().max(1);
    let high = highest(panel) * 1.1;
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, text(15))
        .margin(8)
        .x_label_area_size(38)
        .y_label_area_size(50)
        .build_cartesian_2d(Steps(steps), 0.0..high)?;
    if panel.within_cores < panel.ticks.len() {
        let from = panel.within_cores as f64 - 0.5;
        let corners = [(from.max(-0.3), 0.0), (steps as f64 - 0.7, high)];
        chart.draw_series([Rectangle::new(corners, ink.mix(0.07).filled())])?;
        let faint = ink.mix(0.7);
        let style = TextStyle::from((FONT, 11).into_font())
            .color(&faint)
            .pos(Pos::new(HPos::Right, VPos::Top));
        let place = (steps as f64 - 0.75, high * 0.99);
        chart.draw_series([Text::new("more threads than cores", place, style)])?;
    }
    draw_mesh(&mut chart, panel, theme)?;
    for curve in &panel.curves {
        let colour = theme.colour(&curve.name);
        let expected: Vec<(f64, f64)> =
            curve.expected.iter().enumerate().map(|(x, y)| (x as f64, *y)).collect();
        let dashes = DashedLineSeries::new(expected, 4, 4, colour.mix(0.7).stroke_width(1));
        chart.draw_series(dashes)?;
        let points: Vec<(f64, f64)> = points(curve).map(|(x, value)| (x, value.median)).collect();
        chart.draw_series([PathElement::new(points.clone(), colour.stroke_width(2))])?;
        chart.draw_series(points.iter().map(|at| Circle::new(*at, 3, colour.filled())))?;
        let bars = points_with_interval(curve);
        chart.draw_series(bars.map(|(x, [from, to])| {
            PathElement::new([(x, from), (x, to)], colour.mix(0.6).stroke_width(1))
        }))?;
    }
    Ok(())
}

fn points(curve: &Curve) -> impl Iterator<Item = (f64, super::figure::Value)> {
    let values = curve.values.iter().enumerate();
    values.filter_map(|(x, value)| Some((x as f64, (*value)?)))
}

fn points_with_interval(curve: &Curve) -> impl Iterator<Item = (f64, [f64; 2])> {
    points(curve).filter_map(|(x, value)| Some((x, value.interval?)))
}

/// The highest value of a panel; 1 without values.
fn highest(panel: &Panel) -> f64 {
    let of = |curve: &Curve| {
        let measured = points(curve).map(|(_, value)| value.median);
        let high = measured.chain(points_with_interval(curve).map(|(_, [_, to])| to));
        high.chain(curve.expected.iter().copied()).fold(0.0, f64::max)
    };
    match panel.curves.iter().map(of).fold(0.0, f64::max) {
        high if high > 0.0 => high,
        _ => 1.0,
    }
}

/// A number of the vertical axis, without superfluous digits.
fn label(value: f64) -> String {
    match value {
        _ if value.abs() >= 10.0 => format!("{value:.0}"),
        _ => {
            let text = format!("{value:.2}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::figure::Value;

    fn example(values: Vec<Option<Value>>) -> Panel {
        Panel {
            form: Form::Lines,
            title: "thousand writes & more".to_owned(),
            axis: "threads".to_owned(),
            ticks: vec!["1".to_owned(), "12".to_owned()],
            within_cores: 1,
            curves: vec![Curve { name: "Rio".to_owned(), values, expected: vec![2.0, 3.0] }],
        }
    }

    #[test]
    fn a_panel_has_its_text_and_both_themes_differ() {
        let value = Value { median: 2.0, interval: Some([1.0, 3.0]) };
        let panel = example(vec![Some(value), None]);
        let light = super::panel(&panel, Theme::Light).unwrap();
        for part in ["<svg", "thousand writes &amp; more", "threads", "12", "more threads than"] {
            assert!(light.contains(part), "no {part:?} in {light}");
        }
        assert_ne!(light, super::panel(&panel, Theme::Dark).unwrap());
    }

    #[test]
    fn nothing_measured_is_an_empty_panel() {
        let mut panel = example(vec![None, None]);
        panel.curves[0].expected.clear();
        assert!(super::panel(&panel, Theme::Dark).unwrap().contains("<svg"));
        panel.ticks.clear();
        assert!(super::panel(&panel, Theme::Light).unwrap().contains("<svg"));
    }

    #[test]
    fn bars_have_their_names_and_sums() {
        let part = |name: &str, values: [f64; 2]| Curve {
            name: name.to_owned(),
            values: values.map(|median| Some(Value { median, interval: None })).to_vec(),
            expected: Vec::new(),
        };
        let panel = Panel {
            form: Form::Stacked,
            title: "time, µs".to_owned(),
            ticks: vec!["ext4".to_owned(), "RioFS".to_owned()],
            curves: vec![part("dispatch", [10.0, 12.0]), part("wait", [110.0, 30.0])],
            ..Panel::default()
        };
        let svg = super::panel(&panel, Theme::Light).unwrap();
        for text in ["time, µs", "ext4", "RioFS", "dispatch", "wait", "120", "42"] {
            assert!(svg.contains(&format!("{text}\n")), "no {text:?} in {svg}");
        }
        assert_eq!(svg.matches("<rect").count(), 1 + 4 + 2);
    }

    #[test]
    fn each_tick_has_a_bar_of_each_curve_with_its_value() {
        let curve = |name: &str, values: [Option<f64>; 2]| Curve {
            name: name.to_owned(),
            values: values.map(|v| v.map(|median| Value { median, interval: None })).to_vec(),
            expected: Vec::new(),
        };
        let panel = Panel {
            form: Form::Bars,
            title: "thousand operations".to_owned(),
            ticks: vec!["PERSIST".to_owned(), "WAL".to_owned()],
            curves: vec![curve("ext4", [Some(0.5), Some(2.5)]), curve("RioFS", [Some(7.5), None])],
            ..Panel::default()
        };
        let svg = super::panel(&panel, Theme::Light).unwrap();
        for text in ["PERSIST", "WAL", "0.5", "2.5", "7.5"] {
            assert!(svg.contains(&format!("{text}\n")), "no {text:?} in {svg}");
        }
        assert_eq!(svg.matches("<rect").count(), 1 + 3);
    }

    #[test]
    fn a_picture_is_wide_enough_for_its_title() {
        let mut figure = Figure::of(crate::figures::catalogue::named("barrier-10a").unwrap());
        figure.panels = vec![example(vec![None, None])];
        let svg = whole(&figure, Theme::Light).unwrap();
        let width = svg.split("width=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
        assert!(width.parse::<u32>().unwrap() > 9 * title(&figure).len() as u32, "{width}");
    }

    #[test]
    fn labels_are_short() {
        assert_eq!([0.0, 0.5, 2.0, 12.5, 150.0].map(label), ["0", "0.5", "2", "12", "150"]);
    }
}
