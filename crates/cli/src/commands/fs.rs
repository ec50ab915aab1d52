//! `rio fs mkfs|mount|umount|fsck|stat`

mod daemon;
mod failures;
mod fsck;
mod mkfs;
mod mount;
mod recovered;
mod stat;
mod umount;

use std::path::Path;

use riopipe::{EngineKind, OpenOptions, Volume};
use riopipe_fs::{backing::Backing, control::AskError, image::ImageOptions, mounts::MountPoint};

pub(super) use self::mount::journal_mode;

use self::failures::backing_failure;
use crate::{
    args::{fs as args, volume::Open},
    connect::{members_and_options, open_failure},
    failure::{Code, Failure},
    output::Output,
};

pub(super) fn run(command: args::Fs, output: &Output) -> Result<(), Failure> {
    match command {
        args::Fs::Mkfs(args) => mkfs::run(&args, output),
        args::Fs::Mount(args) => mount::run(&args, output),
        args::Fs::Umount(args) => umount::run(&args, output),
        args::Fs::Fsck(args) => fsck::run(&args, output),
        args::Fs::Stat(args) => stat::run(&args, output),
    }
}

/// Whether a place is a file, and not a volume.
fn is_file(place: &str, members: &[String]) -> bool {
    members.is_empty() && (place.contains('/') || Path::new(place).exists())
}

/// Opens the volume or the file with a file system, and recovers the volume. Without an engine the
/// streams have that of the volume.
fn open_backing(
    open: &Open,
    engine: Option<EngineKind>,
    output: &Output,
) -> Result<Backing, Failure> {
    let note = |recovery: riopipe::Recovery| {
        if !recovery.is_nothing() {
            output.note(recovery.to_string());
        }
    };
    if is_file(&open.name, &open.members.members) {
        let options = ImageOptions { accept_lost_log: open.accept_lost_log, engine };
        let opened = Backing::of_image(Path::new(&open.name), &options);
        let (backing, recovery) =
            opened.map_err(|error| with_mounts(backing_failure(&error), &open.name))?;
        note(recovery);
        return Ok(backing);
    }
    let (members, connect) = members_and_options(Some(&open.name), &open.members)?;
    let options = OpenOptions {
        take_over: open.take_over,
        wait_for_lease: open.wait,
        accept_lost_log: open.accept_lost_log,
        engine,
        connect,
        ..OpenOptions::default()
    };
    let opened = Volume::open(&open.name, &members, &options);
    let (volume, recovery) =
        opened.map_err(|error| with_mounts(open_failure(&error), &open.name))?;
    note(recovery);
    Backing::of_volume(volume).map_err(|error| backing_failure(&error))
}

/// Adds where a file, or a volume of this name, is mounted: that may be why it can't be opened.
fn with_mounts(failure: Failure, place: &str) -> Failure {
    let mounts = MountPoint::of(place).unwrap_or_default();
    let Some(mount) = mounts.first() else { return failure };
    if !matches!(failure.code, Code::Media | Code::Volume) {
        return failure;
    }
    let directory = mount.directory.display();
    let unmount = format!("`rio fs umount {directory}` unmounts it, and waits until that is done");
    let hint = match &failure.hint {
        None => format!("it is mounted on {directory}: {unmount}"),
        // Another target may have a volume of the same name.
        Some(hint) => format!(
            "{hint}; or if it is the volume that is mounted on {directory} of this machine: {unmount}"
        ),
    };
    failure.hint(hint)
}

/// The only mount of a place; `None`: there is none.
fn mount_of(place: &str) -> Result<Option<MountPoint>, Failure> {
    let mounts = MountPoint::of(place)
        .map_err(|error| Failure::new(Code::Failed, "can't list the mounts").because(&error))?;
    match mounts.as_slice() {
        [] => Ok(None),
        [mount] => Ok(Some(mount.clone())),
        several => {
            let directories: Vec<_> =
                several.iter().map(|mount| mount.directory.display().to_string()).collect();
            Err(Failure::new(Code::Usage, format!("several mounts have the name {place}"))
                .hint(format!("give the directory: {}", directories.join(", "))))
        }
    }
}

/// The failure for a place that is not mounted.
fn not_mounted(place: &str) -> Failure {
    Failure::new(Code::Failed, format!("no file system of RioFS is mounted on {place}")).hint(
        "`findmnt -t fuse.riofs` lists the mounts of this machine: directories, and the volumes or \
         files",
    )
}

/// The failure of a question to the process that serves a mount.
fn ask_failure(error: &AskError) -> Failure {
    let code = match error {
        AskError::NotAllowed { .. } | AskError::Foreign { .. } => Code::Failed,
        _ => Code::Connection,
    };
    Failure::new(code, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_file_or_a_volume() {
        assert!(is_file("./new.img", &[]) && is_file("Cargo.toml", &[]));
        assert!(!is_file("files", &[]));
        assert!(!is_file("Cargo.toml", &["192.0.2.1".to_owned()]));
    }
}
