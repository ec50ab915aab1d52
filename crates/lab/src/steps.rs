//! The horizontal scale of a picture whose values double.

use std::ops::Range;

use plotters::{
    coord::ranged1d::{KeyPointHint, NoDefaultFormatting, ValueFormatter},
    prelude::Ranged,
};

/// The horizontal scale: this number of steps of equal width, each with a label.
pub(crate) struct Steps(pub(crate) usize);

impl Ranged for Steps {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (left, right): (i32, i32)) -> i32 {
        let range = self.range();
        let share = (value - range.start) / (range.end - range.start);
        left + (share * f64::from(right - left)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        (0..self.0).map(|step| step as f64).collect()
    }

    fn range(&self) -> Range<f64> {
        -0.3..self.0 as f64 - 0.7
    }
}

impl ValueFormatter<f64> for Steps {}
