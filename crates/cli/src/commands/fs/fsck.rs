//! `rio fs fsck`

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use riopipe_fs::{
    MountError,
    backing::{Backing, FsOptions},
    core::storage::Storage,
    exported_file::ExportedFile,
    fuse::unmount_unserved,
    mkfs::find_e2fs_program,
};
use riopipe_lab::terminal::Terminal;
use serde::Serialize;

use super::{
    failures::{close_failure, fuse_failure, mount_failure},
    open_backing,
    recovered::Recovered,
};
use crate::{
    args::fs::Fsck as Args,
    failure::{Code, Failure},
    interrupt::Interrupt,
    output::{Output, Report},
};

/// Interval in which the end of e2fsck and an interrupt are checked for.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

pub(super) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let program = (!args.hand_back).then(e2fsck).transpose()?;
    let interrupt = Interrupt::watch(output)?;
    let backing = open_backing(&args.open, None, output)?;
    let checked = check(args, &backing, program.as_deref(), &interrupt, output);
    let closed = backing.close().map_err(|error| close_failure(&error));
    let Findings { recovered, errors, errors_cleared, verdict, given_up } = checked?;
    closed?;
    let place = args.open.name.clone();
    let is_clean = !given_up && verdict.as_ref().is_none_or(|verdict| verdict.is_clean);
    output.result(&Checked {
        schema: "rio-fs-fsck/2",
        place: place.clone(),
        handed_back: recovered.is_some(),
        clean: verdict.as_ref().map(|_| is_clean),
        recovered,
        errors,
        errors_cleared,
        e2fsck: verdict.map(|verdict| verdict.text),
    })?;
    match is_clean {
        true => Ok(()),
        false => {
            let what =
                if given_up { "the recovery was given up" } else { "e2fsck has found damage" };
            Err(Failure::new(Code::Differs, what).hint(match program {
                Some(_) if Path::new(&place).is_file() => format!("`e2fsck -f {place}` repairs it"),
                _ => "copy what can be read to another file system".to_owned(),
            }))
        }
    }
}

/// Why a mount has failed, without an advice to run what runs here anyway.
fn reason(error: &MountError) -> String {
    match error {
        MountError::Damaged { error, .. } => error.to_string(),
        other => other.to_string(),
    }
}

fn e2fsck() -> Result<PathBuf, Failure> {
    find_e2fs_program("e2fsck").ok_or_else(|| {
        Failure::new(Code::Failed, "e2fsck is missing")
            .hint("it is in the package e2fsprogs (apt-get install e2fsprogs)")
    })
}

/// The state of a file system.
struct Findings {
    /// `None`: it can't be recovered.
    recovered: Option<Recovered>,
    /// Errors that the superblock recorded, if it could be recovered.
    errors: Option<u64>,
    /// Whether the record was cleared.
    errors_cleared: bool,
    verdict: Option<Verdict>,
    /// Whether the recovery was given up.
    given_up: bool,
}

/// Recovers the file system, hands it back, and checks it with the program, if there is one. A file
/// system that can't be recovered is only checked, if nothing waits for a recovery, or if that is
/// given up.
fn check(
    args: &Args,
    backing: &Backing,
    program: Option<&Path>,
    interrupt: &Interrupt,
    output: &Output,
) -> Result<Findings, Failure> {
    let accept_lost_records = args.open.accept_lost_log;
    let options = FsOptions { accept_lost_records, ..FsOptions::default() };
    let mut given_up = false;
    let (report, errors) = match (backing.mount(&options), program) {
        (Ok((fs, report)), _) => {
            unmount_unserved(&fs).map_err(|error| fuse_failure(&error))?;
            (Some(report), Some(fs.load().errors))
        }
        (Err(error), Some(_)) if backing.needs_recovery() == Some(false) => {
            output.note(format!("note: it can't be mounted: {}", reason(&error)));
            (None, None)
        }
        (Err(error), Some(_)) if error.is_damage() && args.open.accept_lost_log => {
            output.note(format!("note: the recovery is given up: {}", reason(&error)));
            backing.give_up_recovery().map_err(|error| mount_failure(&error))?;
            given_up = true;
            (None, None)
        }
        (Err(error), _) => return Err(mount_failure(&error)),
    };
    interrupt.check()?;
    let recovered = report.as_ref().map(Recovered::of);
    let Some(program) = program else {
        let errors_cleared = false;
        return Ok(Findings { recovered, errors, errors_cleared, verdict: None, given_up });
    };
    // The image is locked, so nothing else changes it.
    let verdict = match backing.image_path() {
        Some(path) => judge(program, path, interrupt)?,
        None => {
            let folder = tempfile::tempdir().map_err(|error| {
                Failure::new(Code::Failed, "can't make a temporary directory").because(&error)
            })?;
            let storage = Arc::clone(backing.storage()) as Arc<dyn Storage>;
            let file = ExportedFile::new(storage, folder.path());
            let file = file.map_err(|error| fuse_failure(&error))?;
            let verdict = judge(program, file.path(), interrupt);
            file.close().map_err(|error| fuse_failure(&error))?;
            verdict?
        }
    };
    // As e2fsck does it, if it may change something.
    let has_record = errors > Some(0) || report.is_some_and(|report| report.has_error);
    let errors_cleared = verdict.is_clean && recovered.is_some() && has_record;
    if errors_cleared {
        backing.clear_errors().map_err(|error| mount_failure(&error))?;
    }
    Ok(Findings { recovered, errors, errors_cleared, verdict: Some(verdict), given_up })
}

/// The judgement of e2fsck.
struct Verdict {
    is_clean: bool,
    text: String,
}

/// Checks a file, and changes nothing.
fn judge(program: &Path, file: &Path, interrupt: &Interrupt) -> Result<Verdict, Failure> {
    let failed = |error: io::Error| Failure::new(Code::Failed, "can't run e2fsck").because(&error);
    let mut command = Command::new(program);
    command.arg("-fn").arg("--").arg(file).stdin(Stdio::null());
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(failed)?;
    let stdout = child.stdout.take().map(read_all);
    let stderr = child.stderr.take().map(read_all);
    let status = wait(&mut child, interrupt)?;
    let text = |reader: Option<thread::JoinHandle<String>>| {
        reader.and_then(|reader| reader.join().ok()).unwrap_or_default()
    };
    let (text, errors) = (text(stdout), text(stderr));
    match status.code() {
        Some(0) => Ok(Verdict { is_clean: true, text }),
        // 4: errors were left, because none may be corrected.
        Some(4) => Ok(Verdict { is_clean: false, text }),
        // It could not read the file system at all, or not even begin.
        Some(8 | 12) => Ok(Verdict { is_clean: false, text: text + &errors }),
        _ => Err(Failure::new(Code::Failed, format!("e2fsck has failed ({status}): {errors}"))),
    }
}

fn read_all(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn wait(child: &mut Child, interrupt: &Interrupt) -> Result<ExitStatus, Failure> {
    loop {
        if let Err(failure) = interrupt.check() {
            let _ = child.kill();
            let _ = child.wait();
            return Err(failure);
        }
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) => thread::sleep(CHECK_INTERVAL),
            Err(error) => {
                return Err(Failure::new(Code::Failed, "can't wait for e2fsck").because(&error));
            }
        }
    }
}

/// A file system that was checked, or handed back.
#[derive(Debug, Serialize)]
struct Checked {
    schema: &'static str,
    place: String,
    /// Whether any ext4 can use it now, with all that the journals had.
    handed_back: bool,
    /// The judgement of e2fsck; absent with `--hand-back`.
    #[serde(skip_serializing_if = "Option::is_none")]
    clean: Option<bool>,
    /// Null: it could not be recovered.
    recovered: Option<Recovered>,
    /// Errors that the superblock recorded, since the last check that found no damage. Null: it
    /// could not be recovered.
    errors: Option<u64>,
    /// Whether this check has cleared that record.
    errors_cleared: bool,
    /// The output of e2fsck.
    #[serde(skip_serializing_if = "Option::is_none")]
    e2fsck: Option<String>,
}

impl Report for Checked {
    fn text(&self, _: &Terminal) -> String {
        let mut recovered = self.recovered.as_ref().map_or("not recovered".into(), Recovered::text);
        if let Some(errors @ 1..) = self.errors {
            recovered += &match (self.errors_cleared, self.clean) {
                (true, _) => format!("; {errors} recorded errors cleared"),
                (false, None) => format!("; {errors} errors recorded: a check clears that"),
                (false, Some(_)) => format!("; {errors} errors recorded"),
            };
        }
        match (self.clean, &self.e2fsck) {
            (None, _) => format!("{}: handed back to any ext4; {recovered}\n", self.place),
            (Some(true), _) => format!("{}: clean; {recovered}\n", self.place),
            (Some(false), e2fsck) => format!(
                "{}\n{}: damaged; {recovered}\n",
                e2fsck.as_deref().unwrap_or_default().trim_end(),
                self.place
            ),
        }
    }
}
