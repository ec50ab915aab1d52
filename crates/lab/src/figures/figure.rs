//! A finished figure: panels, claims and the verdict.

use serde::{Deserialize, Serialize};

use super::catalogue::Entry;
use crate::{machine::Machine, report::Point};

/// Version of the JSON format.
pub const SCHEMA: &str = "rio-lab/1";

/// A figure of a paper as measured here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// The name and version of this format: [`SCHEMA`].
    pub schema: String,
    /// Its name in the catalogue.
    pub id: String,
    /// Its title.
    pub title: String,
    /// The paper and its number there.
    pub source: String,
    /// The question that it answers.
    pub question: String,
    /// Whether only some values were measured, with short runs.
    pub quick: bool,
    /// The machine.
    pub machine: Machine,
    /// The runs, in a sentence.
    pub setup: String,
    /// The differences to the paper's set-up.
    pub differs: Vec<String>,
    /// The panels, from left to right.
    pub panels: Vec<Panel>,
    /// The paper's numbers, and ours.
    pub claims: Vec<Claim>,
    /// How the expected numbers follow from waits and device times.
    pub model: String,
    /// Whether the paper's conclusion holds here.
    pub verdict: Verdict,
    /// The measured points, of ordered writes on a volume.
    pub points: Vec<Point>,
}

impl Figure {
    /// The figure of `entry` without any content.
    #[must_use]
    pub fn of(entry: &Entry) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            id: entry.id.to_owned(),
            title: entry.title.to_owned(),
            source: entry.source.to_owned(),
            question: entry.question.to_owned(),
            quick: false,
            machine: Machine::default(),
            setup: String::new(),
            differs: Vec::new(),
            panels: Vec::new(),
            claims: Vec::new(),
            model: String::new(),
            verdict: Verdict::of("", &[]),
            points: Vec::new(),
        }
    }

    /// The lines or bars that the legend names; empty for stacked bars, which have their names below
    /// them.
    #[must_use]
    pub fn lines(&self) -> &[Curve] {
        let lines = self.panels.first().filter(|panel| panel.form != Form::Stacked);
        lines.map(|panel| panel.curves.as_slice()).unwrap_or_default()
    }
}

/// The form of a panel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// A line for each curve, over the ticks.
    #[default]
    Lines,
    /// A horizontal bar for each tick, divided into the curves.
    Stacked,
    /// A group of bars for each tick, where ticks have no order: one bar for each curve.
    Bars,
}

/// One picture.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Panel {
    /// Its form.
    #[serde(default)]
    pub form: Form,
    /// The title of the vertical axis.
    pub title: String,
    /// The title of the horizontal axis.
    pub axis: String,
    /// The values on the horizontal axis.
    pub ticks: Vec<String>,
    /// The number of ticks, from the left, at which each thread has a core.
    pub within_cores: usize,
    /// The lines.
    pub curves: Vec<Curve>,
}

/// One line of a panel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// The name of the contender.
    pub name: String,
    /// One for each tick; `None`: not measured.
    pub values: Vec<Option<Value>>,
    /// The values of the model, one for each tick; empty without a model.
    pub expected: Vec<f64>,
}

/// A measured value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// The median.
    pub median: f64,
    /// The interval, if there is one.
    pub interval: Option<[f64; 2]>,
}

/// A number of the paper beside ours.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    /// The compared contenders and value.
    pub what: String,
    /// The paper's number, if it states one.
    pub paper: Option<f64>,
    /// The number of the model, if it has one.
    pub expected: Option<f64>,
    /// Our number; `None` if a contender was not measured.
    pub here: Option<f64>,
    /// From here on our number supports the paper's conclusion.
    pub at_least: f64,
}

impl Claim {
    /// Whether our number supports the conclusion; `None` if there is no number.
    #[must_use]
    pub fn holds(&self) -> Option<bool> {
        self.here.map(|here| here >= self.at_least)
    }
}

/// Whether the paper's conclusion holds here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// In a word.
    pub holds: Holds,
    /// In a sentence.
    pub sentence: String,
}

/// Whether a conclusion holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Holds {
    /// All claims that were measured support it.
    Yes,
    /// Some do.
    InPart,
    /// None does.
    No,
    /// Nothing was measured that could support it.
    NotMeasured,
}

impl Verdict {
    /// The verdict on `conclusion`, from the claims.
    #[must_use]
    pub fn of(conclusion: &str, claims: &[Claim]) -> Self {
        let judged: Vec<(&Claim, bool)> =
            claims.iter().filter_map(|claim| Some((claim, claim.holds()?))).collect();
        let (yes, no): (Vec<_>, Vec<_>) = judged.iter().partition(|(_, holds)| *holds);
        let list = |claims: &[(&Claim, bool)]| {
            let text = |(claim, _): &(&Claim, bool)| {
                format!("{} {}", claim.what, crate::units::ratio(claim.here.unwrap_or(0.0)))
            };
            claims.iter().map(text).collect::<Vec<_>>().join(", ")
        };
        let (holds, begin, shown) = match (yes.is_empty(), no.is_empty()) {
            (true, true) => (Holds::NotMeasured, "Not measured", String::new()),
            (false, true) => (Holds::Yes, "It holds here", list(&yes)),
            (true, false) => (Holds::No, "It does not hold here", list(&no)),
            (false, false) => {
                (Holds::InPart, "It holds here in part", format!("not for {}", list(&no)))
            }
        };
        let shown = if shown.is_empty() { shown } else { format!(" ({shown})") };
        // A conclusion may name a contender without a measurement.
        let open: Vec<&str> =
            claims.iter().filter(|one| one.here.is_none()).map(|one| one.what.as_str()).collect();
        let open = match open.is_empty() || judged.is_empty() {
            true => String::new(),
            false => format!(" Not measured: {}.", open.join("; ")),
        };
        Self { holds, sentence: format!("{begin}: {conclusion}{shown}.{open}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(here: Option<f64>) -> Claim {
        Claim {
            what: "Rio / Linux".to_owned(),
            paper: Some(9.4),
            expected: None,
            here,
            at_least: 2.0,
        }
    }

    #[test]
    fn a_verdict_follows_from_the_claims() {
        let of = |claims: &[Option<f64>]| {
            let claims: Vec<Claim> = claims.iter().map(|here| claim(*here)).collect();
            Verdict::of("Rio is faster", &claims)
        };
        assert_eq!(of(&[]).holds, Holds::NotMeasured);
        assert_eq!(of(&[None]).holds, Holds::NotMeasured);
        let yes = of(&[Some(2.0), None]);
        assert_eq!(yes.holds, Holds::Yes);
        let sentence =
            "It holds here: Rio is faster (Rio / Linux 2.00). Not measured: Rio / Linux.";
        assert_eq!(yes.sentence, sentence);
        assert_eq!(of(&[Some(1.9)]).holds, Holds::No);
        let part = of(&[Some(9.0), Some(1.5)]);
        assert_eq!(part.holds, Holds::InPart);
        assert_eq!(
            part.sentence,
            "It holds here in part: Rio is faster (not for Rio / Linux 1.50)."
        );
    }
}
