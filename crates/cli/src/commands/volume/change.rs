//! `rio volume rename` and `rio volume grow`

use riopipe::{MemberAddr, OpenError, OpenOptions, Volume, VolumeInfo};

use super::view::VolumeView;
use crate::{
    args::{
        volume::Open,
        volume_life::{Grow, Rename},
    },
    connect::{members_and_options, open_failure},
    failure::{Code, Failure},
    known_volumes::Places,
    output::Output,
};

pub(super) fn rename(args: &Rename, output: &Output) -> Result<(), Failure> {
    let Rename { open, new_name } = args;
    change(open, output, |members, options| {
        let info = Volume::rename(&open.name, new_name, members, options)?;
        let places = Places::of(open.members.volumes_file.as_deref());
        // The volume is renamed, so a failure is only a note.
        if let Err(error) = places.rename(&open.name, new_name, &info.id.to_string()) {
            output
                .note(format!("note: the entry of volume {:?} is not renamed: {error}", open.name));
        }
        Ok(info)
    })
}

pub(super) fn grow(args: &Grow, output: &Output) -> Result<(), Failure> {
    change(&args.open, output, |members, options| Volume::grow(&args.open.name, members, options))
}

fn change(
    args: &Open,
    output: &Output,
    change: impl FnOnce(&[MemberAddr], &OpenOptions) -> Result<VolumeInfo, OpenError>,
) -> Result<(), Failure> {
    let (addresses, connect) = members_and_options(Some(&args.name), &args.members)?;
    let options = OpenOptions {
        take_over: args.take_over,
        wait_for_lease: args.wait,
        accept_lost_log: args.accept_lost_log,
        connect,
        ..OpenOptions::default()
    };
    let failure = |error| match error {
        OpenError::Name => Failure::new(Code::Usage, error.to_string()),
        error => open_failure(&error),
    };
    let info = change(&addresses, &options).map_err(failure)?;
    let (info, outlook) =
        Volume::examine(Some(&info.name), &addresses, &options.connect).map_err(failure)?;
    output.result(&VolumeView::found(&info, &outlook))
}
