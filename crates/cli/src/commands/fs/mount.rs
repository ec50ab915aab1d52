//! `rio fs mount`

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use riopipe_fs::{
    JournalMode,
    backing::{Backing, FsOptions, engine_of},
    control::{Control, Outcome},
    fuse::{FuseOptions, Mount, check_directory},
    mount_stat::MountStatSource,
};
use riopipe_lab::terminal::{Colour, Terminal};
use riopipe_metrics::FS_PORT;
use riopipe_platform::raise_descriptors_max;
use serde::Serialize;

use super::{
    daemon,
    failures::{close_failure, fuse_failure, mount_failure},
    open_backing,
    recovered::Recovered,
};
use crate::{
    args::fs::{Mode, Mount as Args},
    failure::{Code, Failure},
    interrupt::Stop,
    metrics_server::{MetricsAddress, MetricsError},
    output::{Output, Report},
};

/// The note on the first signal.
const UNMOUNTING: &str = "unmounting, until all is durable; a second signal ends the program at \
    once, and the next mount recovers what was durable";

pub(super) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    if args.daemon && !daemon::is_child() {
        return daemon::start(output);
    }
    let log = args.daemon.then(|| daemon::Log::open(args.log.as_deref())).transpose()?;
    raise_descriptors_max();
    let signals = Stop::watch()?;
    let metrics = args.metrics.as_deref().map(|address| MetricsAddress::take(address, FS_PORT));
    let metrics = metrics.transpose().map_err(MetricsError::into_failure)?;
    check_directory(&args.directory).map_err(|error| fuse_failure(&error))?;
    let backing = open_backing(&args.open, engine_of(journal_mode(args.mode)), output)?;
    let mut control = None;
    let mounted = serve(args, &backing, signals, (metrics, log), &mut control, output);
    let closed = backing.close().map_err(|error| close_failure(&error));
    let result = mounted.and(closed);
    if let Some(control) = control {
        let error = result.as_ref().err().map(ToString::to_string);
        control.end(Outcome { error });
    }
    result
}

/// The mode of the command line as that of the file system.
pub(in crate::commands) const fn journal_mode(mode: Mode) -> JournalMode {
    match mode {
        Mode::Rio => JournalMode::Rio,
        Mode::Horae => JournalMode::Horae,
        Mode::Barrier => JournalMode::Barrier,
        Mode::Opimq => JournalMode::Opimq,
        Mode::Ext4 => JournalMode::Ext4,
    }
}

/// Mounts the file system, and serves it until it is unmounted. `control` gets the end that answers
/// other processes.
fn serve(
    args: &Args,
    backing: &Backing,
    mut signals: Stop,
    (metrics, log): (Option<MetricsAddress>, Option<daemon::Log>),
    control: &mut Option<Control>,
    output: &Output,
) -> Result<(), Failure> {
    let mode = journal_mode(args.mode);
    let options = FsOptions {
        mode,
        read_only: args.read_only,
        accept_lost_records: args.open.accept_lost_log,
        commit_seconds: args.commit,
        dirty_limit_mib: args.dirty_limit,
    };
    let (fs, report) = backing.mount(&options).map_err(|error| mount_failure(&error))?;
    let place = match backing.image_path() {
        Some(path) => path.display().to_string(),
        None => args.open.name.clone(),
    };
    let fuse = FuseOptions {
        source: place.clone(),
        read_only: args.read_only,
        allow_other: args.allow_other,
        threads: args.threads,
    };
    let mount = match Mount::new(Arc::clone(&fs), &args.directory, &fuse) {
        Ok(mount) => mount,
        Err(error) => {
            // Nothing was changed, so this has nothing to write.
            let _ = riopipe_fs::fuse::unmount_unserved(&fs);
            return Err(fuse_failure(&error));
        }
    };
    let unmounter = mount.unmounter();
    let directory = args.directory.canonicalize().unwrap_or_else(|_| args.directory.clone());
    let source = Arc::new(MountStatSource::new(fs, backing, &place, &directory, mode));
    let listening = match unmounter.mount_point() {
        Some(mount) => Control::listen(mount, Arc::clone(&source)),
        None => Err(std::io::Error::other("the mount is not in the kernel's list")),
    };
    match listening {
        Ok(listening) => *control = Some(listening),
        Err(error) => output.note(format!(
            "note: `rio fs stat` and `rio fs umount` can't reach this process: {error}"
        )),
    }
    let listening = control.as_ref().map(Control::listening);
    let has_ended = Arc::new(AtomicBool::new(false));
    let on_end = Arc::clone(&has_ended);
    let server = thread::Builder::new()
        .name("riofs-serve".to_owned())
        .spawn(move || {
            mount.serve(|| {
                on_end.store(true, Ordering::Release);
                if let Some(listening) = listening {
                    listening.stop();
                }
            })
        })
        .map_err(|error| Failure::new(Code::Failed, "can't start a thread").because(&error))?;
    let metrics = metrics.map(|address| address.serve(source)).transpose();
    let printed = match &metrics {
        Ok(metrics) => output.result(&Mounted {
            schema: "rio-fs-mount/1",
            place,
            directory: args.directory.display().to_string(),
            mode: mode.name(),
            metrics: metrics.as_ref().map(|server| server.address().to_string()),
            recovered: Recovered::of(&report),
        }),
        Err(_) => Ok(()),
    };
    let (metrics, failed) = match metrics {
        Ok(metrics) => (metrics, None),
        Err(error) => (None, Some(error.into_failure())),
    };
    let detached = match log {
        Some(log) if failed.is_none() && printed.is_ok() => log.detach(),
        _ => Ok(()),
    };
    let is_unmounted = || has_ended.load(Ordering::Acquire);
    let is_asked = || control.as_ref().is_some_and(Control::is_unmount_requested);
    // The reader of standard output may have gone; programs still use the files.
    if failed.is_none()
        && detached.is_ok()
        && !matches!(&printed, Err(failure) if failure.code != Code::Unread)
    {
        match signals.wait_while(|| !is_unmounted() && !is_asked()) {
            Some(signal) => output.note(format!("rio: {signal}: {UNMOUNTING}")),
            None => signals.note_next(output, UNMOUNTING)?,
        }
    }
    // Later the directory, and even the number of the mount, may be those of another one.
    let unmounted = if is_unmounted() { Ok(false) } else { unmounter.unmount() };
    match unmounted {
        Ok(true) => output.note("note: programs still used files there; their next calls fail"),
        Ok(false) => {}
        Err(error) if !server.is_finished() => output.note(format!(
            "note: can't unmount {}: {error}: waiting until it is unmounted",
            args.directory.display()
        )),
        Err(_) => {}
    }
    let served = server.join();
    drop(metrics);
    let served = served.map_err(|_| Failure::new(Code::Failed, "the server has panicked"))?;
    served.map_err(|error| fuse_failure(&error))?;
    failed.map_or(Ok(()), Err)?;
    detached?;
    printed
}

/// A mounted file system.
#[derive(Debug, Serialize)]
struct Mounted {
    schema: &'static str,
    place: String,
    directory: String,
    mode: &'static str,
    /// The address of the metrics, if they are served.
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<String>,
    recovered: Recovered,
}

impl Report for Mounted {
    fn text(&self, terminal: &Terminal) -> String {
        let mut text = format!(
            "{} is mounted on {}, mode {}; {}\n",
            self.place,
            terminal.paint(Colour::Bold, &self.directory),
            self.mode,
            self.recovered.text()
        );
        if let Some(address) = &self.metrics {
            text += &format!("metrics: http://{address}/metrics\n");
        }
        text
    }
}
