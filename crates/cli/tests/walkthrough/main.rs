//! A walk through the tutorial and the operator's guide: each command that these pages show is
//! carried out, and prints what they show.
//!
//! The commands run on *machines*: network namespaces with a shell and a folder each, joined by a
//! bridge, with the addresses that the pages use. In a fenced block of the kind `console`, the
//! prompt names the machine, and the lines up to the next prompt are what the command prints:
//!
//! ```text
//! app$ rio volume show orders
//! Volume "orders" is made: … engine rio
//! …
//! ```
//!
//! In them `…` stands for any text, and a line of `…` alone for any number of lines. Spaces in a
//! row count as one, and box lines are left out. A command that fails is followed by `echo $?`. A
//! command that ends with `&` goes on; the walk waits until it has printed its lines.
//!
//! `WALK_PAGE=tutorial` walks through one page only, and `WALK_SHOW=1` shows what each command
//! prints, to write a page.

mod machine;
mod page;

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use machine::Network;
use page::Page;

/// The pages, in the order in which they are walked through.
const PAGES: [&str; 2] = ["tutorial", "operators-guide"];
/// Set in the process that is inside of the namespaces.
const INSIDE: &str = "RIO_WALKTHROUGH_INSIDE";

fn main() {
    // The arguments that cargo and IDEs pass to any test program.
    if std::env::args().any(|arg| arg == "--list") {
        return println!("walkthrough: test");
    }
    if std::env::var_os(INSIDE).is_some() {
        return walk_all();
    }
    let namespaces = ["--user", "--map-root-user", "--net", "--mount", "--pid", "--fork"];
    let new_root = |program: &str| {
        let mut command = Command::new("unshare");
        command.args(namespaces).args(["--kill-child", "--mount-proc", program]);
        command.stdin(Stdio::null());
        command
    };
    let mut try_it = new_root("ip");
    try_it.args(["link", "add", "try", "type", "bridge"]);
    match try_it.output() {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr);
            return println!("walkthrough: not run, no network namespaces here: {}", why.trim());
        }
        Err(error) => return println!("walkthrough: not run, no unshare(1) here: {error}"),
    }
    let error =
        new_root(std::env::current_exe().unwrap().to_str().unwrap()).env(INSIDE, "1").exec();
    panic!("can't start again inside of the namespaces: {error}");
}

fn walk_all() {
    let only = std::env::var("WALK_PAGE").ok();
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    for name in PAGES.into_iter().filter(|name| only.as_deref().is_none_or(|only| only == *name)) {
        let path = docs.join(format!("{name}.md"));
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let page = Page::parse(&text).unwrap_or_else(|error| panic!("docs/{name}.md: {error}"));
        let mut network = Network::new();
        for step in &page.steps {
            let machine = network.machine(&step.machine);
            let result = machine.run(step);
            if std::env::var_os("WALK_SHOW").is_some() {
                let prompt = format!("{}$ {}", step.machine, step.command);
                println!("{prompt}\n{}", machine.last_printed().join("\n"));
            }
            if let Err(problem) = result {
                panic!(
                    "docs/{name}.md, line {}: {}$ {}\n{problem}",
                    step.line, step.machine, step.command
                );
            }
        }
        let failures = network.unchecked_failures();
        assert!(failures.is_empty(), "docs/{name}.md: the last commands failed: {failures:?}");
        println!("walkthrough: docs/{name}.md: {} commands did what it shows", page.steps.len());
    }
}
