//! `rio volume delete` and `rio volume wipe`

use riopipe::{DeleteError, DeletedVolume, Volume};
use riopipe_lab::{terminal::Terminal, units};
use serde::Serialize;

use super::list::list_failure;
use crate::{
    args::volume_life::{Delete, Wipe},
    connect::{connect_options, members, members_and_options},
    failure::{Code, Failure},
    known_volumes::Places,
    output::{Output, Report},
};

pub(super) fn run(args: &Delete, output: &Output) -> Result<(), Failure> {
    let (addresses, connect) = members_and_options(Some(&args.volume), &args.members)?;
    let deleted = Volume::delete(&args.volume, &addresses, args.force, &connect)
        .map_err(|error| failure(&format!("can't delete volume {:?}", args.volume), &error))?;
    if let Some(name) = &deleted.name {
        let places = Places::of(args.members.volumes_file.as_deref());
        // The volume is deleted, so a failure is only a note.
        if let Err(error) = places.forget(name, &deleted.id.to_string()) {
            output.note(format!("note: the entry of volume {name:?} is not removed: {error}"));
        }
    }
    output.result(&DeletedView { schema: "rio-volume-delete/1", deleted })
}

pub(super) fn wipe(args: &Wipe, output: &Output) -> Result<(), Failure> {
    let addresses = members(&args.members.members)?;
    let connect = connect_options(&args.members.connect);
    let deleted = Volume::wipe(&addresses, args.force, &connect)
        .map_err(|error| failure("can't erase the label", &error))?;
    output.result(&DeletedView { schema: "rio-volume-wipe/1", deleted })
}

fn failure(what: &str, error: &DeleteError) -> Failure {
    if let DeleteError::List(error) = error {
        return list_failure(error);
    }
    let failure = Failure::new(Code::Volume, what).because(error);
    match error {
        DeleteError::Unknown(_) | DeleteError::Ambiguous(_) => {
            failure.hint("`rio volume list -m TARGET` shows the volumes of a target, with their ids")
        }
        DeleteError::Missing { .. } => failure.hint(
            "name the missing members' targets with -m, too; --force deletes what is here, and leaves \
             the rest as it is",
        ),
        DeleteError::Owned { .. } => failure
            .hint("stop the program that has it open; --force takes it away, and its writes fail"),
        DeleteError::InUse { .. } => failure.hint(
            "`rio volume delete` deletes the whole volume; --force erases this label all the same, \
             and the volume can't be opened any more",
        ),
        DeleteError::UnreadableLabel { .. } => {
            failure.hint("--force erases it; the volume it may belong to is lost then")
        }
        _ => failure,
    }
}

/// The result of a deletion, or of erasing labels.
#[derive(Debug, Serialize)]
struct DeletedView {
    schema: &'static str,
    #[serde(flatten)]
    deleted: DeletedVolume,
}

impl Report for DeletedView {
    fn text(&self, _: &Terminal) -> String {
        let DeletedVolume { name, id, drives, logs, missing, .. } = &self.deleted;
        let volume =
            name.as_ref().map_or_else(|| id.to_string(), |name| format!("{name:?} ({id})"));
        let mut text = match self.schema {
            "rio-volume-wipe/1" => format!("Labels of volume {volume} are erased\n"),
            _ => format!("Volume {volume} is deleted\n"),
        };
        for drive in drives {
            text += &format!("  {drive}: label erased\n");
        }
        for log in logs {
            let bytes = units::bytes(log.bytes);
            text += &format!("  {}: {bytes} of the log are free again\n", log.target);
        }
        for member in missing {
            text += &format!("  member {member} was not found, and is as it was\n");
        }
        text
    }
}
