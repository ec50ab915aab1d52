//! Progress bars, on a terminal only.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{output::Output, terminal::Terminal};

/// A bar on standard error, or nothing if it is not shown. It vanishes when dropped.
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

    /// A count of bytes on standard error, whose total is not known.
    #[must_use]
    pub fn bytes_without_total(output: &Output, what: &str) -> Self {
        let template = "{msg}  {spinner}  {bytes}  {binary_bytes_per_sec}";
        let progress = Self::new(output, what, 0, template);
        progress.0.unset_length();
        progress
    }

    /// A bar over `total` steps, with a message that [`Progress::set_message`] changes.
    #[must_use]
    pub fn steps(output: &Output, what: &str, total: u64) -> Self {
        Self::new(output, what, total, "{wide_bar} {pos}/{len}  {msg}")
    }

    fn new(output: &Output, what: &str, total: u64, template: &str) -> Self {
        let target = match output.shows_progress() {
            true => ProgressDrawTarget::term_like(Box::<Terminal>::default()),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        if output.shows_progress() {
            // A template that doesn't parse is noticed when it is changed; the bar is not worth a
            // panic.
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        bar.set_message(what.to_owned());
        Self(bar)
    }

    /// Sets the total, if it becomes known later.
    pub fn of(&self, total: u64) {
        self.0.set_length(total);
    }

    /// Sets the position.
    pub fn at(&self, position: u64) {
        self.0.set_position(position);
    }

    /// Advances by one step.
    pub fn step(&self) {
        self.0.inc(1);
    }

    /// Sets the message.
    pub fn set_message(&self, what: impl Into<String>) {
        self.0.set_message(what.into());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
