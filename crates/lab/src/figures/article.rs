//! Figures as one page of HTML: nothing is loaded from elsewhere, and it can be read on paper.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::{
    draw::{self, DrawError, Theme},
    figure::{Claim, Figure, Holds},
    standing::{self, Row, Standing},
};
use crate::units;

/// The style sheet. A page follows the reader's system; paper is always white.
const STYLE: &str = include_str!("article.css");

/// The page of `figures`.
///
/// # Errors
/// [`DrawError`].
pub fn page(figures: &[Figure]) -> Result<String, DrawError> {
    let sections = figures.iter().map(section).collect::<Result<Vec<Markup>, _>>()?;
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { "The cost of order: the papers' figures, measured here" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { "The cost of order" }
                    p.lead {
                        "Software needs one write on the drive before another. These are the figures of the papers on \
                         storage order, measured again on one machine, with every way to keep order on the same stack."
                    }
                    (machine(figures))
                }
                @if let Some(standing) = Standing::of(figures) { (where_rio_stands(&standing)) }
                (overview(figures))
                main { @for section in &sections { (section) } }
                footer { p { "Made by " code { "rio lab run" } ". How to read and repeat it: docs/lab.md." } }
            }
        }
    };
    Ok(page.into_string())
}

fn machine(figures: &[Figure]) -> Markup {
    let mut lines: Vec<String> = figures.iter().map(|figure| figure.machine.line()).collect();
    lines.sort_unstable();
    lines.dedup();
    let busy = figures.iter().filter(|figure| figure.machine.warning().is_some()).count();
    html! {
        @for line in &lines { p.machine { "Measured on " (line) "." } }
        @if figures.iter().any(|figure| figure.quick) {
            p.machine { "Some figures are from a quick run: few values, short runs." }
        }
        @if busy > 0 {
            p.warning {
                "The machine was not quiet when " (busy) " of these figures began: absolute numbers are too low, \
                 ratios less so."
            }
        }
    }
}

fn where_rio_stands(standing: &Standing) -> Markup {
    let line = |row: &Row| {
        html! {
            tr {
                td { (row.name) }
                @for ratio in row.ratios { td.number { (ratio_or_dash(ratio)) } }
            }
        }
    };
    html! {
        div id="standing" {
            h2 { "Where Rio stands" }
            p {
                "The throughput of ordered writes with Rio, over that of each other way: the geometric mean over the \
                 points of the figures. Above 1 Rio is faster. A drive keeps an order for its own writes only, so \
                 barrier and OPIMQ are not measured on several drives."
            }
            table.claims {
                thead { tr { th { "Rio over" } @for other in standing::others() { th { (other) } } } }
                tbody {
                    @for row in &standing.rows { (line(row)) }
                    @if let Some(mean) = &standing.mean { (line(mean)) }
                    (line(&standing.paper))
                }
            }
        }
    }
}

fn ratio_or_dash(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), units::ratio)
}

fn overview(figures: &[Figure]) -> Markup {
    html! {
        nav {
            h2 { "Does the conclusion hold here?" }
            table.overview {
                tbody {
                    @for figure in figures {
                        tr {
                            td { a href=(format!("#{}", figure.id)) { (figure.title) } }
                            td.source { (figure.source) }
                            td { (badge(figure.verdict.holds)) }
                        }
                    }
                }
            }
        }
    }
}

fn badge(holds: Holds) -> Markup {
    let (class, text) = match holds {
        Holds::Yes => ("yes", "holds"),
        Holds::InPart => ("part", "in part"),
        Holds::No => ("no", "does not hold"),
        Holds::NotMeasured => ("none", "not measured"),
    };
    html! { span class=(format!("badge {class}")) { (text) } }
}

fn section(figure: &Figure) -> Result<Markup, DrawError> {
    let mut pictures = Vec::new();
    for panel in &figure.panels {
        let [light, dark] = [Theme::Light, Theme::Dark].map(|theme| draw::panel(panel, theme));
        pictures.push((&panel.title, light?, dark?));
    }
    Ok(html! {
        section id=(figure.id) {
            h2 { (figure.title) " " (badge(figure.verdict.holds)) }
            p.source { (figure.source) " · " code { "rio lab run " (figure.id) } }
            p { (figure.question) }
            figure {
                div.panels {
                    @for (title, light, dark) in &pictures {
                        div.light role="img" aria-label=(title) { (PreEscaped(light)) }
                        div.dark role="img" aria-label=(title) { (PreEscaped(dark)) }
                    }
                }
                figcaption { (legend(figure)) p { (figure.setup) "." } }
            }
            p.verdict { (figure.verdict.sentence) }
            (claims(&figure.claims))
            details open[false] {
                summary { "What to expect, and what differs from the paper" }
                p { (figure.model) }
                ul { @for item in &figure.differs { li { (item) "." } } }
            }
        }
    })
}

/// The colours of the contenders, in both themes.
fn legend(figure: &Figure) -> Markup {
    let curves = figure.lines();
    let swatch = |theme: Theme, name: &str| {
        let colour = theme.colour(name);
        format!("background:#{:02x}{:02x}{:02x}", colour.0, colour.1, colour.2)
    };
    html! {
        p.legend {
            @for curve in curves {
                span.entry {
                    span.swatch.light style=(swatch(Theme::Light, &curve.name)) {}
                    span.swatch.dark style=(swatch(Theme::Dark, &curve.name)) {}
                    (curve.name)
                    @if curve.values.iter().all(Option::is_none) { " (not measured)" }
                }
            }
            @if curves.iter().any(|curve| !curve.expected.is_empty()) {
                span.entry { span.dashes {} "what the model expects" }
            }
        }
    }
}

fn claims(claims: &[Claim]) -> Markup {
    html! {
        table.claims {
            thead { tr { th { "mean over the points" } th { "paper" } th { "expected here" } th { "here" } } }
            tbody {
                @for claim in claims {
                    tr {
                        td { (claim.what) }
                        td.number { (ratio_or_dash(claim.paper)) }
                        td.number { (ratio_or_dash(claim.expected)) }
                        td class=(format!("number {}", class_of(claim))) { (ratio_or_dash(claim.here)) }
                    }
                }
            }
        }
    }
}

fn class_of(claim: &Claim) -> &'static str {
    match claim.holds() {
        Some(true) => "yes",
        Some(false) => "no",
        None => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        figures::figure::{Curve, Form, Panel, SCHEMA, Value, Verdict},
        machine::Machine,
    };

    fn example() -> Figure {
        let value = Value { median: 2.0, interval: None };
        let claims = vec![Claim {
            what: "Rio / Linux".to_owned(),
            paper: Some(9.4),
            expected: Some(8.0),
            here: Some(7.5),
            at_least: 2.0,
        }];
        Figure {
            schema: SCHEMA.to_owned(),
            id: "rio-10b".to_owned(),
            title: "Threads <and> order".to_owned(),
            source: "Rio".to_owned(),
            question: "How fast?".to_owned(),
            quick: true,
            machine: Machine { cpu: "Test CPU".to_owned(), load: 2.0, ..Machine::default() },
            setup: "One target".to_owned(),
            differs: vec!["a smaller machine".to_owned()],
            panels: vec![Panel {
                form: Form::Lines,
                title: "writes".to_owned(),
                axis: "threads".to_owned(),
                ticks: vec!["1".to_owned()],
                within_cores: 1,
                curves: vec![
                    Curve {
                        name: "Rio".to_owned(),
                        values: vec![Some(value)],
                        expected: vec![2.0],
                    },
                    Curve {
                        name: "Linux".to_owned(),
                        values: vec![Some(Value { median: 0.3, interval: None })],
                        expected: Vec::new(),
                    },
                ],
            }],
            verdict: Verdict::of("Rio is faster", &claims),
            claims,
            model: "A thread waits.".to_owned(),
            points: Vec::new(),
        }
    }

    #[test]
    fn the_page_has_all_and_loads_nothing() {
        let page = page(&[example()]).unwrap();
        for part in [
            "<!DOCTYPE html>",
            "Threads &lt;and&gt; order",
            "id=\"rio-10b\"",
            "href=\"#rio-10b\"",
            "Test CPU",
            "not quiet",
            "It holds here: Rio is faster",
            "Where Rio stands",
            "one Optane drive",
            "6.67",
            "9.40",
            "7.50",
            "a smaller machine",
            "A thread waits.",
            "prefers-color-scheme: dark",
            "@media print",
        ] {
            assert!(page.contains(part), "no {part:?} in {page}");
        }
        // The name space of SVG is a name, not an address that is loaded.
        let addresses = page.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
        assert!(!addresses.contains("http"), "{addresses}");
        assert!(!page.contains("<script"));
    }

    #[test]
    fn a_page_without_figures_is_a_page() {
        let page = page(&[]).unwrap();
        assert!(page.contains("</html>") && !page.contains("Where Rio stands"));
    }
}
