//! `rio volume delete` and `rio volume wipe`

use riopipe::{ConnectOptions, DeleteError, DeletedVolume, ListedVolume, MemberAddr, Volume};
use riopipe_lab::{terminal::Terminal, units};
use serde::Serialize;

use super::list::list_failure;
use crate::{
    args::volume_life::{Delete, Wipe},
    connect::{another_volume, connect_options, members, unchecked_members},
    failure::{Code, Failure},
    known_volumes::Places,
    output::{Output, Report},
};

pub(super) fn run(args: &Delete, output: &Output) -> Result<(), Failure> {
    let (addresses, connect, known) = unchecked_members(Some(&args.volume), &args.members)?;
    if let Some(id) = &known {
        check_id(&args.volume, id, &addresses, &connect)?;
    }
    // Another volume of that name may be there in a moment: the id decides, if it is known.
    let volume = known.as_ref().unwrap_or(&args.volume);
    let deleted = Volume::delete(volume, &addresses, args.force, &connect)
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

/// Checks that the volume that is called `name` on the targets of `addresses` has this id, which is
/// that of the file of known volumes, and that the volume with the id is still called so.
fn check_id(
    name: &str,
    id: &str,
    addresses: &[MemberAddr],
    connect: &ConnectOptions,
) -> Result<(), Failure> {
    let list = Volume::list(addresses, connect).map_err(|error| list_failure(&error))?;
    let found = |is_it: &dyn Fn(&ListedVolume) -> bool| list.volumes.iter().find(|one| is_it(one));
    let is_called_so = |one: &ListedVolume| one.name.as_deref() == Some(name);
    let other = match found(&|one| one.id.to_string() == id) {
        Some(one) if one.name.is_none() || is_called_so(one) => return Ok(()),
        Some(one) => one,
        None => match found(&is_called_so) {
            Some(one) => one,
            // The deletion itself does not find it, and reports that.
            None => return Ok(()),
        },
    };
    Err(another_volume(name, id, other.name.as_deref().unwrap_or_default(), &other.id.to_string()))
}

pub(super) fn wipe(args: &Wipe, output: &Output) -> Result<(), Failure> {
    let addresses = members(&args.members.members)?;
    let connect = connect_options(&args.members.connect)?;
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
        DeleteError::Contradiction(_) => failure.hint(
            "nothing was erased; `rio volume wipe -m DRIVE --force` erases the label of the drive that \
             does not belong to the volume",
        ),
        DeleteError::Changed(_) => {
            failure.hint("`rio volume list -m TARGET` shows the volume that the drive has now")
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
