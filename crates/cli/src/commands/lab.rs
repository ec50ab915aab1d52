//! `rio lab …`: the papers' figures, measured on this machine and drawn again.

mod measure;
mod objects;
mod others;
mod picture;
mod programs;
mod queue;
mod store;

use std::path::PathBuf;

use riopipe_lab::{
    figures::{
        article, block,
        catalogue::{self, Block, Entry, Experiment},
        draw::{self, Theme},
        figure::Figure,
    },
    machine::Machine,
    table::{Align, Table},
    terminal::{Colour, Terminal},
    units,
};
use serde::Serialize;

use crate::{
    args::lab::{Lab, Run as Args},
    failure::{Code, Failure},
    interrupt::Interrupt,
    output::{Output, Report},
    progress::Progress,
};
use measure::Bench;
use store::Store;

pub(super) fn run(command: Lab, output: &Output) -> Result<(), Failure> {
    match command {
        Lab::List => output.result(&Listed { figures: catalogue::all().collect() }),
        Lab::Run(args) => output.result(&measure(&args, output)?),
    }
}

/// The figures of the command line, in the order of the catalogue.
fn chosen(ids: &[String]) -> Result<Vec<&'static Entry>, Failure> {
    for id in ids.iter().filter(|id| *id != "all") {
        if catalogue::named(id).is_none() {
            let known: Vec<_> = catalogue::all().map(|entry| entry.id).collect();
            return Err(Failure::new(Code::Usage, format!("no figure {id:?}"))
                .hint(format!("there are: {}, and all", known.join(", "))));
        }
    }
    let is_chosen = |entry: &&Entry| ids.iter().any(|id| id == "all" || id == entry.id);
    Ok(catalogue::all().filter(is_chosen).collect())
}

fn measure(args: &Args, output: &Output) -> Result<Measured, Failure> {
    let entries = chosen(&args.ids)?;
    let store = Store::open(&args.out)?;
    let interrupt = Interrupt::watch(output)?;
    let mut done = Vec::new();
    for entry in entries {
        done.push(figure(entry, args, &store, &interrupt, output)?);
    }
    // The page has all figures of the folder, also those of earlier runs.
    let figures = store.figures();
    let page = article::page(&figures)
        .map_err(|error| Failure::new(Code::Failed, "no report").because(&error))?;
    let report = store.write("index.html", page.as_bytes())?;
    Ok(Measured { figures: done, report })
}

/// One figure: from the folder if it is complete there, else measured and stored.
fn figure(
    entry: &'static Entry,
    args: &Args,
    store: &Store,
    interrupt: &Interrupt,
    output: &Output,
) -> Result<Figure, Failure> {
    if !args.again
        && let Some(figure) = store.complete(entry.id, args.quick)
    {
        output.note(format!("{}: measured already; --again measures it again", entry.id));
        return Ok(figure);
    }
    let figure = match &entry.experiment {
        Experiment::Block(block) => ordered_writes(entry, block, args, store, interrupt, output)?,
        Experiment::FileSystem(load) => others::file_system(entry, load, args, interrupt, output)?,
        Experiment::Program(program) => {
            programs::measure(entry, program, args.quick, interrupt, output)?
        }
        Experiment::QueueOverTime(experiment) => {
            queue::measure(entry, experiment, args.quick, interrupt, output)?
        }
        Experiment::Recovery => others::recovery(entry, args, interrupt, output)?,
    };
    store.write_complete(&figure)?;
    let svg = draw::whole(&figure, Theme::Light)
        .map_err(|error| Failure::new(Code::Failed, "no picture").because(&error))?;
    store.write(&format!("{}.svg", entry.id), svg.as_bytes())?;
    let png = picture::png(&svg)?;
    store.write(&format!("{}.png", entry.id), &png)?;
    Ok(figure)
}

/// A figure of ordered writes, from the first missing point on.
fn ordered_writes(
    entry: &Entry,
    experiment: &Block,
    args: &Args,
    store: &Store,
    interrupt: &Interrupt,
    output: &Output,
) -> Result<Figure, Failure> {
    // Described before the runs: afterwards the load includes our own.
    let mut bench = Bench::new(experiment, args.quick, Machine::this(), interrupt)?;
    if !args.again {
        bench.go_on_from(store.partial(entry.id));
    }
    let progress = Progress::steps(output, entry.id, bench.steps());
    while let Some(what) = bench.next() {
        progress.set_message(format!("{}: {what}", entry.id));
        let measured = bench.measure_next(&mut || progress.step())?;
        store.write_partial(entry.id, measured)?;
    }
    Ok(block::figure(entry, experiment, &bench.into_measured()))
}

/// The list of figures.
#[derive(Debug, Serialize)]
struct Listed {
    figures: Vec<&'static Entry>,
}

impl Report for Listed {
    fn text(&self, terminal: &Terminal) -> String {
        let mut table =
            Table::new(&[("id", Align::Left), ("source", Align::Left), ("title", Align::Left)]);
        for entry in &self.figures {
            table.row([
                terminal.paint(Colour::Bold, entry.id),
                entry.source.to_owned(),
                entry.title.to_owned(),
            ]);
        }
        table.render(terminal)
    }
}

/// The measured figures, and the path of the report.
#[derive(Debug, Serialize)]
struct Measured {
    figures: Vec<Figure>,
    report: PathBuf,
}

impl Report for Measured {
    fn text(&self, terminal: &Terminal) -> String {
        let mut text = String::new();
        for figure in &self.figures {
            text += &format!(
                "{} {}\n\n",
                terminal.paint(Colour::Bold, &figure.title),
                terminal.paint(Colour::Grey, &format!("({}, {})", figure.id, figure.source))
            );
            text += &claims(figure, terminal);
            text += &format!("\n{}\n\n", figure.verdict.sentence);
        }
        text += &format!("report: {}\n", self.report.display());
        text
    }
}

fn claims(figure: &Figure, terminal: &Terminal) -> String {
    let mut table = Table::new(&[
        ("mean over the points", Align::Left),
        ("paper", Align::Right),
        ("expected", Align::Right),
        ("here", Align::Right),
    ]);
    let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), units::ratio);
    for claim in &figure.claims {
        table.row([
            claim.what.clone(),
            number(claim.paper),
            number(claim.expected),
            number(claim.here),
        ]);
    }
    table.render(terminal)
}
