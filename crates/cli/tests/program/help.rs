//! Every command has help, and reports the error in a command line.

use std::process::Output;

use clap::CommandFactory;
use riopipe_cli::args::Cli;

use crate::site::program;

fn rio(args: &[&str]) -> Output {
    program().args(args).output().unwrap()
}

/// All commands, as words: `["volume", "create"]`.
fn commands(of: &clap::Command, path: &[String], found: &mut Vec<Vec<String>>) {
    for command in of.get_subcommands() {
        let mut path = path.to_vec();
        path.push(command.get_name().to_owned());
        commands(command, &path, found);
        found.push(path);
    }
}

fn all_commands() -> Vec<Vec<String>> {
    let mut found = Vec::new();
    commands(&Cli::command(), &[], &mut found);
    found
}

#[test]
fn every_command_has_help_and_every_leaf_has_examples() {
    let all = all_commands();
    assert!(all.len() >= 16, "{all:?}");
    for path in &all {
        let mut args: Vec<&str> = path.iter().map(String::as_str).collect();
        args.push("--help");
        let output = rio(&args);
        assert!(output.status.success(), "{args:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("Usage: rio"), "{args:?}: {text}");
        let is_leaf = !all.iter().any(|other| other.len() > path.len() && other.starts_with(path));
        assert!(!is_leaf || text.contains("Examples:"), "{args:?} has no examples:\n{text}");
    }
}

/// The parser must accept the commands in the examples.
#[test]
fn every_example_parses() {
    let mut tried = 0;
    for path in all_commands() {
        let mut args: Vec<&str> = path.iter().map(String::as_str).collect();
        args.push("--help");
        let text = String::from_utf8(rio(&args).stdout).unwrap();
        for line in text.lines().skip_while(|line| *line != "Examples:").skip(1) {
            let Some(example) = line.strip_prefix("  rio ") else { continue };
            // An explanation follows several spaces, a redirection or a pipe one space.
            let example = example.split("   ").next().unwrap_or_default();
            let words = example.split_whitespace().take_while(|w| !matches!(*w, ">" | "|"));
            let parsed = Cli::command().try_get_matches_from(["rio"].into_iter().chain(words));
            assert!(parsed.is_ok(), "rio {example}: {}", parsed.unwrap_err());
            tried += 1;
        }
    }
    assert!(tried > 15, "only {tried} examples were found");
}

#[test]
fn an_invalid_command_line_is_a_usage_error() {
    for args in [
        &["frobnicate"][..],
        &["volume", "create", "name"],
        &["volume", "create", "name", "-m", "a", "--unit", "5000"],
        &["volume", "create", "name", "-m", "a", "--engine", "fast"],
        &["volume", "write", "name", "file", "-m", "a", "--group", "1"],
        &["discover"],
        &["discover", "-a", "host", "-s", "70000"],
        &["discover", "-a", "host", "-t", "pigeon"],
        &["discover", "-a", "host", "-q", "not-an-nqn"],
        &["discover", "-a", "host", "-I", "not-an-id"],
        &["bench", "run", "--engine", "none,turbo"],
        &["bench", "run", "--depth", "0"],
        &["bench", "run", "--volume", "v", "-m", "a"],
        &["bench", "compare", "--quick", "--depth", "1"],
        &["bench", "compare", "--engine", "fastest"],
        &["bench", "compare", "--wait", "poll"],
        &["bench", "floor", "--rtt", "100"],
        &["bench", "floor", "--drive", "disk:7"],
        &["bench", "run", "--drive", "disk:7", "--time", "0.1"],
        &["bench", "run", "--log", "tape:0", "--time", "0.1"],
        &["target", "serve", "-s", "0", "--drive", "disk:7"],
        &["target", "check", "-s", "0", "--drive", "disk:7", "--quiet", "-o", "json", "--bogus"],
        &["target", "identity", "disk:7"],
        &["log", "dump", "tape:0"],
        &["bench", "floor", "--bandwidth", "fast"],
        &["demo", "--time", "0"],
        &["demo", "-v", "--quiet"],
        &["completions", "cmd.exe"],
    ] {
        let output = rio(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty(), "{args:?}");
        assert!(!output.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn a_wrong_engine_names_the_right_ones_and_their_promises() {
    let output = rio(&["bench", "run", "--engine", "fast"]);
    let text = String::from_utf8(output.stderr).unwrap();
    for word in ["fast", "rio", "sync", "none", "never a hole"] {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let output = rio(&["completions", shell]);
        assert!(output.status.success());
        let script = String::from_utf8(output.stdout).unwrap();
        for word in ["volume", "verify", "discover", "take-over"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let output = rio(&["manual", folder.path().to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    for path in all_commands().iter().filter(|path| path[0] != "sim") {
        let file = format!("rio-{}.1", path.join("-"));
        let page = std::fs::read_to_string(folder.path().join(&file));
        let page = page.unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(page.contains(".TH rio") && page.contains("SYNOPSIS"), "{file}: {page}");
    }
    assert!(folder.path().join("rio.1").exists());
    let nowhere = rio(&["manual", "/nowhere/man1"]);
    assert_eq!(nowhere.status.code(), Some(1));
}

#[test]
fn nothing_is_coloured_without_a_terminal() {
    for args in [&["--help"][..], &["volume", "--help"], &["frobnicate"]] {
        let output = rio(args);
        let all = [output.stdout, output.stderr].concat();
        assert!(!all.contains(&0x1b), "{args:?}");
    }
}
