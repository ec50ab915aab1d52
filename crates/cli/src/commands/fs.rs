//! `rio fs mkfs|mount|fsck|stat`

mod failures;
mod fsck;

use std::{path::Path, thread};

use riopipe::{OpenOptions, Volume};
use riopipe_fs::{
    JournalMode, MountReport,
    backing::{Backing, FsOptions},
    fuse::{FuseOptions, Mount},
    image::{ImageOptions, ImageState, image_state},
    mkfs::{Made, MkfsOptions, make_in_file, make_on_volume},
};
use riopipe_lab::{
    terminal::{Colour, Terminal},
    units,
};
use riopipe_platform::raise_descriptors_max;
use serde::Serialize;

use self::failures::{
    backing_failure, close_failure, fuse_failure, image_failure, mkfs_failure, mount_failure,
};
use crate::{
    args::fs as args,
    connect::{members_and_options, open_failure},
    failure::{Code, Failure},
    interrupt,
    output::{Output, Report},
    progress::Progress,
};

pub(super) fn run(command: args::Fs, output: &Output) -> Result<(), Failure> {
    match command {
        args::Fs::Mkfs(args) => mkfs(&args, output),
        args::Fs::Mount(args) => mount(&args, output),
        args::Fs::Fsck(args) => fsck::run(&args, output),
        args::Fs::Stat(args) => stat(&args, output),
    }
}

/// Whether a place is a file, and not a volume.
fn is_file(place: &str, members: &[String]) -> bool {
    members.is_empty() && (place.contains('/') || Path::new(place).exists())
}

fn mkfs(args: &args::Mkfs, output: &Output) -> Result<(), Failure> {
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

fn mount(args: &args::Mount, output: &Output) -> Result<(), Failure> {
    raise_descriptors_max();
    let signals = interrupt::Stop::watch()?;
    let open = &args.open;
    let backing = if is_file(&open.name, &open.members.members) {
        let options = ImageOptions { accept_lost_log: open.accept_lost_log };
        let (backing, recovery) = Backing::of_image(Path::new(&open.name), &options)
            .map_err(|error| backing_failure(&error))?;
        if !recovery.is_nothing() {
            output.note(recovery.to_string());
        }
        backing
    } else {
        let (members, connect) = members_and_options(Some(&open.name), &open.members)?;
        let options = OpenOptions {
            take_over: open.take_over,
            wait_for_lease: open.wait,
            accept_lost_log: open.accept_lost_log,
            connect,
            ..OpenOptions::default()
        };
        let (volume, recovery) =
            Volume::open(&open.name, &members, &options).map_err(|error| open_failure(&error))?;
        if !recovery.is_nothing() {
            output.note(recovery.to_string());
        }
        Backing::of_volume(volume).map_err(|error| backing_failure(&error))?
    };
    let mounted = serve(args, &backing, signals, output);
    let closed = backing.close().map_err(|error| close_failure(&error));
    mounted.and(closed)
}

/// Mounts the file system, and serves it until it is unmounted.
fn serve(
    args: &args::Mount,
    backing: &Backing,
    signals: interrupt::Stop,
    output: &Output,
) -> Result<(), Failure> {
    let options = FsOptions {
        mode: match args.mode {
            args::Mode::Rio => JournalMode::Rio,
            args::Mode::Ext4 => JournalMode::Ext4,
        },
        read_only: args.read_only,
        commit_seconds: args.commit,
    };
    let (fs, report) = backing.mount(&options).map_err(|error| mount_failure(&error))?;
    let fuse = FuseOptions {
        source: args.open.name.clone(),
        read_only: args.read_only,
        allow_other: args.allow_other,
        threads: args.threads,
    };
    let mount = match Mount::new(fs.clone(), &args.directory, &fuse) {
        Ok(mount) => mount,
        Err(error) => {
            // Nothing was changed, so this has nothing to write.
            let _ = riopipe_fs::fuse::unmount_unserved(&fs);
            return Err(fuse_failure(&error));
        }
    };
    let printed = output.result(&Mounted {
        schema: "rio-fs-mount/1",
        place: args.open.name.clone(),
        directory: args.directory.display().to_string(),
        mode: match args.mode {
            args::Mode::Rio => "rio",
            args::Mode::Ext4 => "ext4",
        },
        recovered: Recovered::of(&report),
    });
    let unmounter = mount.unmounter();
    let server = thread::Builder::new()
        .name("riofs-serve".to_owned())
        .spawn(move || mount.serve())
        .map_err(|error| Failure::new(Code::Failed, "can't start a thread").because(&error))?;
    // The reader of standard output may have gone; programs still use the files.
    if !matches!(&printed, Err(failure) if failure.code != Code::Unread)
        && let Some(signal) = signals.wait_while(|| !server.is_finished())
    {
        output.note(format!("rio: {signal}: unmounting; a second signal ends the program at once"));
    }
    let detached = unmounter.unmount();
    match detached {
        Ok(true) => output.note("note: programs still used files there; their next calls fail"),
        Ok(false) => {}
        Err(error) if !server.is_finished() => output.note(format!(
            "note: can't unmount {}: {error}: waiting until it is unmounted",
            args.directory.display()
        )),
        Err(_) => {}
    }
    let served = server.join();
    let served = served.map_err(|_| Failure::new(Code::Failed, "the server has panicked"))?;
    served.map_err(|error| fuse_failure(&error))?;
    printed
}

fn stat(args: &args::Stat, output: &Output) -> Result<(), Failure> {
    let state = image_state(&args.file).map_err(|error| image_failure(&error))?;
    output.result(&StateView::of(&args.file, &state))
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

/// A recovery of a file system.
#[derive(Clone, Debug, Serialize)]
struct Recovered {
    /// Main transactions that were replayed.
    transactions: u64,
    /// File-level records that were applied.
    records: u64,
    /// Deleted files that were still open.
    orphans: u64,
}

impl Recovered {
    fn of(report: &MountReport) -> Self {
        Self { transactions: report.replayed, records: report.records, orphans: report.orphans }
    }

    fn text(&self) -> String {
        match (self.transactions, self.records, self.orphans) {
            (0, 0, 0) => "nothing to recover".to_owned(),
            (transactions, records, orphans) => format!(
                "recovered: {transactions} transactions, {records} files, {orphans} deleted files"
            ),
        }
    }
}

/// A mounted file system.
#[derive(Debug, Serialize)]
struct Mounted {
    schema: &'static str,
    place: String,
    directory: String,
    mode: &'static str,
    recovered: Recovered,
}

impl Report for Mounted {
    fn text(&self, terminal: &Terminal) -> String {
        format!(
            "{} is mounted on {}, mode {}; {}\n",
            self.place,
            terminal.paint(Colour::Bold, &self.directory),
            self.mode,
            self.recovered.text()
        )
    }
}

/// The state of a file.
#[derive(Debug, Serialize)]
struct StateView {
    schema: &'static str,
    file: String,
    state: &'static str,
    bytes: u64,
    uuid: String,
}

impl StateView {
    fn of(file: &Path, state: &ImageState) -> Self {
        Self {
            schema: "rio-fs-stat/1",
            file: file.display().to_string(),
            state: match (state.is_in_use, state.is_dirty) {
                (true, _) => "mounted",
                (false, true) => "unrecovered",
                (false, false) => "unmounted",
            },
            bytes: state.bytes,
            uuid: state.uuid.clone(),
        }
    }
}

impl Report for StateView {
    fn text(&self, _: &Terminal) -> String {
        format!("{}: {}, {}, UUID {}\n", self.file, self.state, units::bytes(self.bytes), self.uuid)
    }
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
