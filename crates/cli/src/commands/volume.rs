//! `rio volume …`

mod attach;
mod change;
pub(super) mod copy;
mod delete;
mod list;
mod recover;
mod stat;
mod undone;
mod view;

use riopipe::{
    ConnectOptions, CreateOptions, OpenOptions, Recovery, StreamOptions, Volume, VolumeInfo,
};

use crate::{
    args::volume::{self as args, Create, Open, Show},
    connect::{
        connect_options, create_failure, engine_hint, known_volume, members, members_and_options,
        open_failure, stream_failure,
    },
    failure::{Code, Failure},
    interrupt::Interrupt,
    known_volumes::{Kept, Places},
    output::Output,
    volume_store::{STREAM, VolumeStore},
};

pub(super) fn run(command: args::Volume, output: &Output) -> Result<(), Failure> {
    match command {
        args::Volume::Create(args) => create(&args, output),
        args::Volume::Show(args) => show(&args, output),
        args::Volume::List(args) => list::run(&args, output),
        args::Volume::Delete(args) => delete::run(&args, output),
        args::Volume::Wipe(args) => delete::wipe(&args, output),
        args::Volume::Rename(args) => change::rename(&args, output),
        args::Volume::Grow(args) => change::grow(&args, output),
        args::Volume::Attach(args) => attach::run(&args, output),
        args::Volume::Stat(args) => stat::run(&args, output),
        args::Volume::Recover(args) => recover::run(&args, output),
        args::Volume::Undone(command) => undone::run(&command, output),
        args::Volume::Write(args) => copy::write(&args, output),
        args::Volume::Read(args) => copy::read(&args, output),
        args::Volume::Verify(args) => copy::verify(&args, output),
    }
}

fn create(args: &Create, output: &Output) -> Result<(), Failure> {
    let addresses = members(&args.members.members)?;
    let options = CreateOptions {
        unit_blocks: args.unit / riopipe::BLOCK_BYTES as u32,
        streams: args.streams,
        engine: args.engine,
        slots: args.slots,
        prepare_blocks: args.prepare_area.map(|bytes| bytes / riopipe::BLOCK_BYTES as u32),
        force: args.force,
        connect: connect_options(&args.members.connect)?,
    };
    let info = Volume::create(&args.name, &addresses, &options)
        .map_err(|error| create_failure(&args.name, &error))?;
    if !args.no_volumes_file {
        keep(&info, &args.members, output);
    }
    output.result(&view::VolumeView::created(&info))
}

/// Adds a volume to the file of known volumes. The volume exists, so a failure is only a note.
fn keep(info: &VolumeInfo, members: &args::Members, output: &Output) {
    let places = Places::of(members.volumes_file.as_deref());
    let name = &info.name;
    match places.keep(name, &known_volume(info, &members.connect)) {
        Ok(None) => {}
        Ok(Some(Kept { path, replaced })) => {
            let path = path.display();
            output
                .note(format!("note: {path} has its drives, so later commands need only the name"));
            if let Some(other) = replaced {
                let members = other.members.join(" ");
                output.note(format!("note: it had another volume {name:?} before, of {members}"));
            }
        }
        Err(error) => output.note(format!(
            "note: the drives are not kept, so later commands need them with -m: {error}"
        )),
    }
}

fn show(args: &Show, output: &Output) -> Result<(), Failure> {
    let name = args.name.as_deref();
    let (addresses, connect) = members_and_options(name, &args.members)?;
    let (info, outlook) = match Volume::examine(name, &addresses, &connect) {
        Ok(found) => found,
        Err(error) => match list::part_of_volume(&addresses, &connect, &error) {
            Some(part) => return output.result(&part),
            None => return Err(open_failure(&error)),
        },
    };
    if args.keep {
        keep(&info, &args.members, output);
    }
    output.result(&view::VolumeView::found(&info, &outlook))
}

/// The options of an opening, from the command line.
fn open_options(args: &Open, connect: ConnectOptions) -> OpenOptions {
    OpenOptions {
        take_over: args.take_over,
        wait_for_lease: args.wait,
        accept_lost_log: args.accept_lost_log,
        connect,
        ..OpenOptions::default()
    }
}

/// Prints what opening the volume has recovered, and why it has another engine than its own, if it has.
fn note_recovery(volume: &Volume, recovery: &Recovery, output: &Output) {
    if !recovery.is_nothing() {
        output.note(recovery.to_string());
    }
    if let Some(why) = &recovery.fallback {
        let engine = volume.engine();
        let hint = engine_hint(why).map(|hint| format!("; {hint}")).unwrap_or_default();
        output.note(format!("note: {why}{hint}; engine {engine}: {}", engine.promise()));
    }
}

/// Opens the volume, runs `f` on its first stream, and closes both in order, also after an error: a
/// dropped stream would leave a volume that needs recovery.
fn with_store<R>(
    args: &Open,
    output: &Output,
    work: impl FnOnce(&mut VolumeStore, &Volume, &Interrupt) -> Result<R, Failure>,
) -> Result<R, Failure> {
    let (addresses, connect) = members_and_options(Some(&args.name), &args.members)?;
    let options = open_options(args, connect);
    // A program that ends while it opens the volume may leave a lease. But the wait for another
    // owner may be long, and there is nothing to close before its end: a signal ends it at once.
    let early = args.wait.is_zero().then(|| Interrupt::watch(output)).transpose()?;
    let (volume, recovery) =
        Volume::open(&args.name, &addresses, &options).map_err(|error| open_failure(&error))?;
    let interrupt = early.map_or_else(|| Interrupt::watch(output), Ok)?;
    note_recovery(&volume, &recovery, output);
    let timeout = args.members.connect.io_timeout;
    let options = StreamOptions { timeout, ..StreamOptions::default() };
    let stream = volume.stream(STREAM, &options).map_err(|error| stream_failure(&error))?;
    let mut store = VolumeStore::new(&volume, stream, interrupt.clone());
    let result = interrupt.check().and_then(|()| work(&mut store, &volume, &interrupt));
    // The first failure is the cause; that of closing is its consequence.
    let closed = store.close().map_err(|error| Failure::storage(&error)).and_then(|()| {
        volume.close().map_err(|error| {
            Failure::new(Code::Storage, format!("can't close volume {:?}", args.name))
                .because(&error)
        })
    });
    let result = result?;
    closed?;
    Ok(result)
}
