//! `rio fs mkfs`

use std::path::Path;

use riopipe::{OpenOptions, Volume};
use riopipe_fs::mkfs::{Made, MkfsOptions, make_in_file, make_on_volume};
use riopipe_lab::{terminal::Terminal, units};
use serde::Serialize;

use super::{failures::mkfs_failure, is_file};
use crate::{
    args::fs::Mkfs as Args,
    connect::{members_and_options, open_failure},
    failure::{Code, Failure},
    output::{Output, Report},
    progress::Progress,
};

pub(super) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let options = MkfsOptions { size: args.size, force: args.force, label: args.label.clone() };
    let place = &args.place;
    let made = if args.size.is_some() || is_file(place, &args.members.members) {
        if !args.members.members.is_empty() {
            return Err(Failure::new(Code::Usage, "--size is for a file, and -m for a volume"));
        }
        make_in_file(Path::new(place), &options)
    } else {
        let (members, connect) = members_and_options(Some(place), &args.members)?;
        let open = OpenOptions { take_over: args.take_over, connect, ..OpenOptions::default() };
        let (volume, recovery) =
            Volume::open(place, &members, &open).map_err(|error| open_failure(&error))?;
        if !recovery.is_nothing() {
            output.note(recovery.to_string());
        }
        let bar = Progress::steps(output, "making the file system", 0);
        let made = make_on_volume(&volume, &options, &mut |done, all| {
            bar.of(all);
            bar.at(done);
        });
        drop(bar);
        let closed = volume.close();
        let made = made.map_err(|error| mkfs_failure(&error))?;
        closed.map_err(|error| {
            Failure::new(Code::Storage, "the volume was not closed").because(&error)
        })?;
        Ok(made)
    };
    let made = made.map_err(|error| mkfs_failure(&error))?;
    output.result(&MadeView::of(place, &made))
}

/// A new file system.
#[derive(Debug, Serialize)]
struct MadeView {
    schema: &'static str,
    place: String,
    bytes: u64,
    journal_bytes: u64,
    uuid: String,
}

impl MadeView {
    fn of(place: &str, made: &Made) -> Self {
        Self {
            schema: "rio-fs-mkfs/1",
            place: place.to_owned(),
            bytes: made.bytes,
            journal_bytes: made.journal_bytes,
            uuid: made.uuid.clone(),
        }
    }
}

impl Report for MadeView {
    fn text(&self, _: &Terminal) -> String {
        format!(
            "{}: ext4, {}, of which the journal takes {}, UUID {}\n",
            self.place,
            units::bytes(self.bytes),
            units::bytes(self.journal_bytes),
            self.uuid
        )
    }
}
