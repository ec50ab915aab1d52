//! `rio manual`

use std::{fs, io, path::Path};

use clap_mangen::Man;

use crate::{
    args,
    failure::{Code, Failure},
    output::Output,
};

pub(super) fn run(folder: &Path, output: &Output) -> Result<(), Failure> {
    let mut command = args::command();
    command.build();
    let mut names = Vec::new();
    write_pages(&command, "rio", folder, &mut names).map_err(|error| {
        Failure::new(Code::Failed, format!("{}: no page was written", folder.display()))
            .because(&error)
    })?;
    names.sort();
    output.raw((names.join("\n") + "\n").as_bytes())
}

/// Writes the page of a command and those of its subcommands, and adds their names.
fn write_pages(
    command: &clap::Command,
    name: &str,
    folder: &Path,
    names: &mut Vec<String>,
) -> io::Result<()> {
    for sub in
        command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help")
    {
        write_pages(sub, &format!("{name}-{}", sub.get_name()), folder, names)?;
    }
    let file = format!("{name}.1");
    let page = command.clone().display_name(name.to_owned());
    let mut text = Vec::new();
    Man::new(page).source(format!("rio {}", env!("CARGO_PKG_VERSION"))).render(&mut text)?;
    fs::write(folder.join(&file), text)?;
    names.push(file);
    Ok(())
}
