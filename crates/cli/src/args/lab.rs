//! `rio lab …`

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// The papers' figures, measured on this machine and drawn again.
#[derive(Debug, Subcommand)]
pub enum Lab {
    /// List the figures
    #[command(after_help = "\
Examples:
  rio lab list
  rio lab list -o json | jq -r .figures[].id")]
    List,
    /// Measure figures, and write them as one page of HTML
    Run(Run),
}

/// Measure figures.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Each figure has targets of its own on loopback, with modelled drives in memory. At each point the
engines take turns, in several rounds. A figure keeps the axes of its paper, and shows our numbers
beside the paper's, what is expected from waits and device times, and whether the paper's conclusion
holds here.

Each point is stored as soon as it is measured. A run that was interrupted goes on where it stopped;
a figure that is complete is not measured again without --again.

Examples:
  rio lab list
  rio lab run rio-10b --quick                one figure, in a minute
  rio lab run all                            all figures, within an hour
  rio lab run rio-2a rio-2b --out report     into the folder report: report/index.html")]
pub struct Run {
    /// The figures, as `rio lab list` shows them, or all
    #[arg(value_name = "ID", required = true)]
    pub ids: Vec<String>,
    /// Few values and short runs
    #[arg(long)]
    pub quick: bool,
    /// The folder of the results: ID.json, ID.svg, ID.png and index.html
    #[arg(long, value_name = "FOLDER", default_value = "rio-lab")]
    pub out: PathBuf,
    /// Measure also what the folder has already
    #[arg(long)]
    pub again: bool,
}
