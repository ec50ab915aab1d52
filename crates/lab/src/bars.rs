//! Horizontal bars.

use crate::{
    table::{Align, pad},
    terminal::{Colour, Terminal, width_of},
};

/// One bar.
#[derive(Clone, Debug)]
pub struct Bar {
    /// Text before the bar.
    pub name: String,
    /// The value, which determines the length.
    pub value: f64,
    /// Text behind the bar: the value as people read it.
    pub label: String,
    /// Colour of the bar.
    pub colour: Colour,
}

/// Bars below one another, the longest as wide as the terminal allows, all from zero.
#[must_use]
pub fn render(bars: &[Bar], terminal: &Terminal) -> String {
    let widest = |text: fn(&Bar) -> &str| bars.iter().map(|b| width_of(text(b))).max().unwrap_or(0);
    let names = widest(|bar| &bar.name);
    let labels = widest(|bar| &bar.label);
    // "  name  ████  label"
    let width = terminal.width.saturating_sub(names + labels + 6).max(4);
    let longest = bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
    bars.iter()
        .map(|bar| {
            let share = if longest > 0.0 { (bar.value / longest).clamp(0.0, 1.0) } else { 0.0 };
            format!(
                "  {}  {}  {}\n",
                pad(&bar.name, names, Align::Left),
                terminal.paint(bar.colour, &blocks(share, width, terminal.unicode)),
                bar.label
            )
        })
        .collect()
}

/// `share` of `width` columns, in eighths of a column if the terminal can show them. A value above
/// zero is always visible.
fn blocks(share: f64, width: usize, unicode: bool) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let steps = if unicode { 8 } else { 1 };
    let mut length = (share * (width * steps) as f64).round() as usize;
    if share > 0.0 {
        length = length.max(1);
    }
    if unicode { "█".repeat(length / 8) + EIGHTHS[length % 8] } else { "#".repeat(length) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bars(values: &[(&str, f64)]) -> Vec<Bar> {
        values
            .iter()
            .map(|&(name, value)| Bar {
                name: name.to_owned(),
                value,
                label: format!("{value} k/s"),
                colour: Colour::Green,
            })
            .collect()
    }

    const NARROW: Terminal = Terminal { width: 40, ..Terminal::PLAIN };

    #[test]
    fn lengths_are_in_proportion_and_fit() {
        let text = render(&bars(&[("sync", 0.01), ("rio", 50.0), ("none", 100.0)]), &NARROW);
        assert_eq!(
            text,
            "  sync  #  0.01 k/s\n\
             \x20 rio   ###########  50 k/s\n\
             \x20 none  ######################  100 k/s\n"
        );
        assert!(text.lines().all(|line| width_of(line) <= 40));
    }

    #[test]
    fn eighths_where_they_can_be_shown() {
        let unicode = Terminal { unicode: true, ..NARROW };
        let text = render(&bars(&[("a", 1.0), ("b", 64.0)]), &unicode);
        // 26 columns: 208 eighths, of which 1/64 is 3.25.
        assert!(text.lines().next().unwrap().contains("  ▍  "), "{text}");
        assert!(text.lines().all(|line| width_of(line) <= 40));
    }

    #[test]
    fn no_bars_render_as_no_text() {
        assert_eq!(render(&[], &NARROW), "");
        let text = render(&bars(&[("a", 0.0)]), &NARROW);
        assert!(!text.contains('#'), "{text}");
    }
}
