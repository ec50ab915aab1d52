//! The result, as text and as JSON.

use std::collections::BTreeMap;

use riopipe_sim::{
    attempt::Fault,
    runner::{Explained, Plan, PlantResult, Summary},
};
use serde_json::{Value, json};

use super::output;

pub(super) fn text(summary: &Summary, plan: &Plan, enough: bool) {
    for failure in &summary.failures {
        output::line(format_args!("seed {}: {}", failure.seed, failure.fault));
        let (options, seed) = (plan.options, failure.seed);
        output::line(format_args!("  to see all of it: rio sim {options}--seed {seed} --trace"));
    }
    output::line(format_args!(
        "{} seeds from {} on, {} failed; {} events, {} crashes, {} recoveries; {:.0} seeds/s, {:.1} s",
        summary.seeds,
        plan.first,
        summary.failures.len(),
        summary.events,
        summary.crashes,
        summary.recoveries,
        summary.seeds_per_s(),
        summary.elapsed.as_secs_f64(),
    ));
    let fs = &summary.fs;
    if fs.mounts > 0 {
        let counts: Vec<String> = (fs.named().iter())
            .map(|(name, count)| format!("{count} {}", name.replace('_', " ")))
            .collect();
        output::line(format_args!("RioFS: {}", counts.join(", ")));
    }
    let device = &summary.device;
    if device.attached > 0 {
        let counts: Vec<String> = (device.named().iter())
            .map(|(name, count)| format!("{count} {}", name.replace('_', " ")))
            .collect();
        output::line(format_args!("devices: {}", counts.join(", ")));
    }
    let untaken = summary.never_taken();
    if enough && !untaken.is_empty() {
        output::line(format_args!("never taken: {}", untaken.join(", ")));
    }
}

pub(super) fn json(summary: &Summary, plan: &Plan) {
    let failures: Vec<Value> = summary
        .failures
        .iter()
        .map(|failure| {
            let (promise, what) = match &failure.fault {
                Fault::Broken(violation) => (violation.promise.name(), violation.what.clone()),
                Fault::Panicked(what) => ("panic", what.clone()),
                fault @ Fault::Endless(_) => ("endless", fault.to_string()),
            };
            json!({
                "seed": failure.seed, "promise": promise, "what": what,
                "command": format!("rio sim {}--seed {} --trace", plan.options, failure.seed),
                // The scenario of a seed changes from version to version; this text does not.
                "scenario": (plan.draw)(failure.seed).to_text(),
            })
        })
        .collect();
    print(&json!({
        "schema": "rio-sim/2",
        "first": plan.first,
        "seeds": summary.seeds,
        "failed": summary.failures.len(),
        "failures": failures,
        "crashes": summary.crashes,
        "recoveries": summary.recoveries,
        "events": summary.events,
        "seeds_per_s": summary.seeds_per_s(),
        "seconds": summary.elapsed.as_secs_f64(),
        "fs": summary.fs.named().into_iter().collect::<BTreeMap<_, _>>(),
        "device": summary.device.named().into_iter().collect::<BTreeMap<_, _>>(),
        "rare": summary.rare,
        "never_taken": summary.never_taken(),
    }));
}

pub(super) fn explained(small: &Explained, name: &str) {
    for line in &small.trace {
        output::line(format_args!("{line}"));
    }
    output::line(format_args!("{}", small.fault));
    let which = if name.starts_with("seed ") { "" } else { "scenario " };
    output::line(format_args!("to see all of it: rio sim --{which}{name} --trace"));
    output::line(format_args!(
        "the small scenario, for rio sim --scenario FILE:\n{}",
        small.scenario.to_text()
    ));
}

pub(super) fn plant_result(result: &PlantResult) {
    let name = result.plant.name();
    match (&result.failure, result.caught_after) {
        (Some((seed, violation)), Some(after)) => output::line(format_args!(
            "{name:<28} caught after {after:>5} seeds: seed {seed}, {}",
            violation.promise.name()
        )),
        _ => output::line(format_args!(
            "{name:<28} NOT CAUGHT in {} seeds ({} panicked or never ended)",
            result.seeds, result.other
        )),
    }
}

pub(super) fn plants(results: &[PlantResult], plan: &Plan) {
    let mut traps: BTreeMap<String, Value> = BTreeMap::new();
    for result in results {
        let name = result.plant.name();
        let entry = json!({
            "caught_after_seeds": result.caught_after,
            "seeds": result.seeds,
            "panicked_or_endless": result.other,
            "promise": result.failure.as_ref().map(|(_, violation)| violation.promise.name()),
            "what": result.failure.as_ref().map(|(_, violation)| &violation.what),
            "seed": result.failure.as_ref().map(|(seed, _)| seed),
            "seconds": result.elapsed.as_secs_f64(),
        });
        let trap = name.split('-').next().unwrap_or_default().to_owned();
        let group = traps.entry(trap).or_insert_with(|| json!({ "plants": {} }));
        group["plants"][name] = entry;
    }
    for group in traps.values_mut() {
        // A trap is caught when all of its plants are. Its number of seeds is that of the last
        // plant.
        let caught = group["plants"].as_object().map(|plants| {
            plants.values().map(|plant| plant["caught_after_seeds"].as_u64()).collect::<Vec<_>>()
        });
        let all: Option<Vec<u64>> = caught.unwrap_or_default().into_iter().collect();
        group["caught_after_seeds"] = json!(all.and_then(|all| all.into_iter().max()));
    }
    print(&json!({
        "schema": "rio-sim/2",
        "first": plan.first,
        "limit": plan.seeds,
        "uncaught": results
            .iter()
            .filter(|result| result.caught_after.is_none())
            .map(|result| result.plant.name())
            .collect::<Vec<_>>(),
        "plants": traps,
    }));
}

fn print(value: &Value) {
    output::line(format_args!("{value:#}"));
}
