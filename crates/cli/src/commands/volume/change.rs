//! `rio volume rename` and `rio volume grow`

use riopipe::{MemberAddr, OpenError, OpenOptions, Recovery, Volume, VolumeInfo};

use super::view::VolumeView;
use crate::{
    args::{
        volume::Open,
        volume_life::{Grow, Rename},
    },
    connect::{members_and_options, open_failure},
    failure::{Code, Failure},
    known_volumes::{KnownVolume, Places},
    output::Output,
};

pub(super) fn rename(args: &Rename, output: &Output) -> Result<(), Failure> {
    let Rename { open, new_name } = args;
    change(open, output, |members, options| {
        let places = Places::of(open.members.volumes_file.as_deref());
        let is_in_labels = has_new_name(args, &places, members, options);
        let name = if is_in_labels { new_name } else { &open.name };
        let (info, recovery) = Volume::rename(name, new_name, members, options)?;
        // The volume is renamed, so a failure is only a note.
        if let Err(error) = places.rename(&open.name, new_name, &info.id.to_string()) {
            output
                .note(format!("note: the entry of volume {:?} is not renamed: {error}", open.name));
        }
        Ok((info, recovery))
    })
}

/// Whether an earlier rename was cut off between the labels and the file of known volumes: the volume
/// has the new name, and it is the one of the entry with the old name. Then the rename is completed.
fn has_new_name(
    args: &Rename,
    places: &Places,
    members: &[MemberAddr],
    options: &OpenOptions,
) -> bool {
    let Ok(Some(KnownVolume { id: Some(id), .. })) = places.find(&args.open.name) else {
        return false;
    };
    // If it can't be inspected, the opening finds why.
    Volume::inspect(members, &options.connect)
        .is_ok_and(|info| info.name == args.new_name && info.id.to_string() == id)
}

pub(super) fn grow(args: &Grow, output: &Output) -> Result<(), Failure> {
    change(&args.open, output, |members, options| Volume::grow(&args.open.name, members, options))
}

fn change(
    args: &Open,
    output: &Output,
    change: impl FnOnce(&[MemberAddr], &OpenOptions) -> Result<(VolumeInfo, Recovery), OpenError>,
) -> Result<(), Failure> {
    let (addresses, connect) = members_and_options(Some(&args.name), &args.members)?;
    let options = super::open_options(args, connect);
    let failure = |error| match error {
        OpenError::Name => Failure::new(Code::Usage, error.to_string()),
        error => open_failure(&error),
    };
    let (info, recovery) = change(&addresses, &options).map_err(failure)?;
    if !recovery.is_nothing() {
        output.note(recovery.to_string());
    }
    let (info, outlook) =
        Volume::examine(Some(&info.name), &addresses, &options.connect).map_err(failure)?;
    output.result(&VolumeView::found(&info, &outlook))
}
