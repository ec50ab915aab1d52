//! Progress bars, on a terminal only.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::Output;

/// A bar on standard error, or nothing where nobody watches. Vanishes when dropped.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar over `total` bytes.
    #[must_use]
    pub fn bytes(output: &Output, what: &str, total: u64) -> Self {
        let template =
            "{msg}  {wide_bar} {bytes}/{total_bytes}  {binary_bytes_per_sec}  {eta} left";
        Self::new(output, what, total, template)
    }

    /// A bar over `total` steps, whose message [`Progress::say`] changes.
    #[must_use]
    pub fn steps(output: &Output, what: &str, total: u64) -> Self {
        Self::new(output, what, total, "{wide_bar} {pos}/{len}  {msg}")
    }

    fn new(output: &Output, what: &str, total: u64, template: &str) -> Self {
        let target = match output.shows_progress() {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        if output.shows_progress() {
            // A template that doesn't parse is seen at once by whoever changes it; the bar is an
            // ornament and not worth a panic.
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        bar.set_message(what.to_owned());
        Self(bar)
    }

    /// How much there is in all, where that is found out on the way.
    pub fn of(&self, total: u64) {
        self.0.set_length(total);
    }

    /// So far.
    pub fn at(&self, position: u64) {
        self.0.set_position(position);
    }

    /// One more step.
    pub fn step(&self) {
        self.0.inc(1);
    }

    /// What is going on.
    pub fn say(&self, what: impl Into<String>) {
        self.0.set_message(what.into());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
