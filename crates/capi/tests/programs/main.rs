//! C and C++ programs that use the library, against a target in this process.
//!
//! The libraries are installed as `make install-c` does it, and each program in `tests/c` is compiled with them. The
//! programs run plainly, with the static library, and with the sanitizers of the compiler. A check that this machine can't
//! make is reported as not tested.

mod installed;
mod site;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;

use installed::{Build, Installed, skip};
use site::{HOST, Site};

/// Runs a program on the members of a site, with these arguments before them.
fn run(build: &Build, program: &str, args: &[&str], site: &Site) -> String {
    let mut command = build.command(program);
    command.args(args).arg(site.member());
    let output = command.stdin(Stdio::null()).output().expect("the program starts");
    let (out, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} ({build:?}): {}\n{out}{errors}", output.status);
    out.into_owned()
}

fn passes(build: &Build, program: &str, args: &[&str], site: &Site) {
    let out = run(build, program, args, site);
    assert!(out.ends_with(&format!("{program}: passed\n")), "{program}: {out}");
}

/// All programs that need no help during their run.
fn all_pass(build: &Build) {
    let site = Site::new();
    passes(build, "volume", &[], &site);
    site.create("v");
    passes(build, "threads", &["v"], &site);
    passes(build, "reads", &["v"], &site);
    passes(build, "event_loop", &["v"], &site);
    run(build, "crash", &["write", "v"], &site);
    passes(build, "crash", &["recover", "v"], &site);
}

#[test]
fn programs_run_with_the_shared_library() {
    all_pass(&Build::shared(Installed::get()));
}

#[test]
fn programs_run_with_the_static_library() {
    let site = Site::new();
    passes(&Build::with_static_library(Installed::get()), "volume", &[], &site);
}

#[test]
fn programs_run_with_sanitizers() {
    match Build::sanitized(Installed::get()) {
        Ok(build) => all_pass(&build),
        Err(why) => skip(&format!("programs with AddressSanitizer and UBSan: {why}")),
    }
}

#[test]
fn a_program_in_cplusplus_runs() {
    let build = Build::shared(Installed::get());
    let site = Site::new();
    site.create("v");
    if !installed::has_cplusplus() {
        return skip("a program in C++: there is no c++");
    }
    passes(&build, "cplusplus", &["v"], &site);
}

/// The example of the documentation is the one that runs here.
#[test]
fn the_example_of_the_page_runs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("../../docs/c-api.md")).unwrap();
    let example = std::fs::read_to_string(root.join("tests/c/example.c")).unwrap();
    let shown = page.split("```c\n").nth(1).expect("the page has an example");
    let shown = shown.split("```").next().unwrap();
    assert!(shown == example, "docs/c-api.md does not show tests/c/example.c as it is");
    let site = Site::new();
    site.create("v");
    let out = run(&Build::shared(Installed::get()), "example", &["v"], &site);
    assert!(out.contains("durable up to group 2\nread back: rc\n"), "{out}");
}

/// With the right secrets a program gets its volume. With others, or without one, it gets an error that names
/// authentication and has no secret.
#[test]
fn a_program_authenticates() {
    let shared = Build::shared(Installed::get());
    let sanitized = Build::sanitized(Installed::get());
    for build in [Some(&shared), sanitized.as_ref().ok()].into_iter().flatten() {
        let site = Site::that_demands_authentication();
        let files = ["host", "targets", "wrong", "shared"].map(|name| site.path(name));
        let mut args = vec![HOST];
        args.extend(files.iter().map(String::as_str));
        passes(build, "secrets", &args, &site);
    }
}

/// A stream whose target dies fails with an error, and the program frees everything.
#[test]
fn a_program_survives_its_target() {
    let shared = Build::shared(Installed::get());
    let sanitized = Build::sanitized(Installed::get());
    for build in [Some(&shared), sanitized.as_ref().ok()].into_iter().flatten() {
        let mut site = Site::new();
        site.create("v");
        let mut command = build.command("lost");
        command.args(["v", &site.member()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut program = command.spawn().expect("the program starts");
        let mut lines = BufReader::new(program.stdout.take().unwrap()).lines();
        let mut line = || lines.next().map(Result::unwrap);
        assert_eq!(line().as_deref(), Some("ready"), "{build:?}");
        site.kill();
        program.stdin.take().unwrap().write_all(b"\n").unwrap();
        assert_eq!(line().as_deref(), Some("lost: passed"), "{build:?}");
        let status = program.wait().unwrap();
        assert!(status.success(), "{build:?}: {status}");
    }
}

/// The shared library has the soname with which programs are linked, and exports the functions of the header and nothing else.
#[test]
fn the_shared_library_exports_the_header() {
    let installed = Installed::get();
    let header = std::fs::read_to_string(installed.prefix().join("include/riopipe.h")).unwrap();
    let symbols = installed.tool("nm", &["-D", "--defined-only"]);
    let mut functions = 0;
    for line in symbols.lines() {
        let mut words = line.split_whitespace().rev();
        let (name, kind) = (words.next().unwrap(), words.next().unwrap());
        let is_declared = kind == "T" && header.contains(&format!("{name}("));
        // Rust's own, which rustc exports from each library of this kind.
        let is_rusts = name == "rust_eh_personality";
        assert!(is_declared || is_rusts, "{line}");
        functions += usize::from(is_declared);
    }
    assert!(functions > 40, "{symbols}");
    let dynamic = installed.tool("readelf", &["-d"]);
    assert!(dynamic.contains("Library soname: [libriopipe.so.0]"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
    let link = std::fs::read_link(installed.prefix().join("lib/libriopipe.so.0")).unwrap();
    assert_eq!(link.to_str(), Some(concat!("libriopipe.so.", env!("CARGO_PKG_VERSION"))));
}
