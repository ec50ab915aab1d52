//! `rio volume write
//! read
//! verify`: a local file in a volume.

use std::{
    io,
    path::{Path, PathBuf},
    time::Instant,
};

use riopipe::SubmitErrorKind;
use riopipe_lab::{terminal::Terminal, units};
use serde::Serialize;

use super::with_store;
use crate::{
    args::volume::{Read, Verify, Write},
    failure::{Code, Failure},
    file_copy::{self, Comparison, CopyError, Source, Watch, WriteOptions},
    file_header::Header,
    interrupt::Interrupt,
    output::{Output, Report},
    progress::Progress,
    standard_stream::StandardStream,
    volume_store::StoreError,
};

pub(super) fn write(args: &Write, output: &Output) -> Result<(), Failure> {
    let (copied, engine, seconds) = with_store(&args.open, output, |store, volume, interrupt| {
        let mut watch = Bar::new(output, "writing", interrupt);
        let begun = Instant::now();
        let options = WriteOptions {
            name: args.stored_name.clone(),
            group_bytes: args.group as usize,
            force: args.force,
        };
        let copied = open(&args.file)
            .and_then(|mut source| file_copy::write(store, &mut source, &options, &mut watch))
            .map_err(|error| copy_failure(&error))?;
        Ok((copied, volume.engine(), begun.elapsed().as_secs_f64()))
    })?;
    output.result(&Transfer {
        schema: "rio-volume-write/1",
        volume: args.open.name.clone(),
        engine: engine.name(),
        file: FileView::of(&copied.header),
        path: args.file.clone(),
        groups: copied.groups,
        seconds,
        bytes_per_s: rate(copied.header.length, seconds),
        written: true,
    })
}

pub(super) fn read(args: &Read, output: &Output) -> Result<(), Failure> {
    let (copied, path, engine, seconds) =
        with_store(&args.open, output, |store, volume, interrupt| {
            let mut watch = Bar::new(output, "reading", interrupt);
            let begun = Instant::now();
            let read = match args.file.as_deref().filter(|path| is_standard(path)) {
                Some(path) => StandardStream::of(&io::stdout())
                    .map_err(CopyError::Output)
                    .and_then(|mut stdout| file_copy::read_to(store, &mut stdout, &mut watch))
                    .map(|copied| (copied, path.to_owned())),
                None => file_copy::read(store, args.file.as_deref(), args.force, &mut watch),
            };
            let (copied, path) = read.map_err(|error| copy_failure(&error))?;
            Ok((copied, path, volume.engine(), begun.elapsed().as_secs_f64()))
        })?;
    let is_beside_bytes = is_standard(&path);
    let result = Transfer {
        schema: "rio-volume-read/1",
        volume: args.open.name.clone(),
        engine: engine.name(),
        file: FileView::of(&copied.header),
        path,
        groups: copied.groups,
        seconds,
        bytes_per_s: rate(copied.header.length, seconds),
        written: false,
    };
    match is_beside_bytes {
        true => {
            output.result_beside_bytes(&result);
            Ok(())
        }
        false => output.result(&result),
    }
}

pub(super) fn verify(args: &Verify, output: &Output) -> Result<(), Failure> {
    let comparison = with_store(&args.open, output, |store, _, interrupt| {
        let mut watch = Bar::new(output, "comparing", interrupt);
        args.file
            .as_deref()
            .map(open)
            .transpose()
            .and_then(|mut local| file_copy::verify(store, local.as_mut(), &mut watch))
            .map_err(|error| copy_failure(&error))
    })?;
    let verified = Verified {
        schema: "rio-volume-verify/1",
        volume: args.open.name.clone(),
        verified: comparison.is_equal(),
        file: FileView::of(&comparison.header),
        checksum_ok: comparison.checksum_ok,
        path: args.file.clone(),
        local_bytes: comparison.local_length,
        differing_bytes: comparison.differing,
        first_difference: comparison.first_difference,
    };
    output.result(&verified)?;
    match comparison.is_equal() {
        true => Ok(()),
        false => Err(Failure::new(Code::Differs, difference(args, &comparison))),
    }
}

/// Whether this path stands for standard input or output.
fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

/// Opens a file, or standard input.
fn open(path: &Path) -> Result<Source, CopyError<StoreError>> {
    match is_standard(path) {
        false => Source::open(path),
        true => StandardStream::of(&io::stdin())
            .map(|stdin| Source::stream(Path::new("standard input"), stdin))
            .map_err(|source| CopyError::Source { path: path.to_owned(), source }),
    }
}

fn difference(args: &Verify, comparison: &Comparison) -> String {
    let name = comparison.header.name.to_string_lossy();
    let volume = &args.open.name;
    match (&args.file, comparison.first_difference) {
        (Some(path), Some(at)) => {
            format!("{name:?} on volume {volume:?} and {} differ from byte {at} on", path.display())
        }
        _ => format!(
            "{name:?} on volume {volume:?} is damaged: its bytes don't have the checksum that its \
             header has"
        ),
    }
}

/// The exit code of a failed copy.
pub(crate) fn copy_failure(error: &CopyError<StoreError>) -> Failure {
    let code = match error {
        CopyError::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => Code::Unread,
        CopyError::Source { .. }
        | CopyError::NotAFile(_)
        | CopyError::Name(_)
        | CopyError::Changed { .. }
        | CopyError::Output(_)
        | CopyError::Exists(_)
        | CopyError::Irreplaceable(_)
        | CopyError::ChangedWhileCompared { .. }
        | CopyError::Destination { .. }
        | CopyError::Folder { .. } => Code::Failed,
        CopyError::TooLarge { .. }
        | CopyError::TooLong { .. }
        | CopyError::Foreign
        | CopyError::Newer(_) => Code::Volume,
        CopyError::Damaged(_)
        | CopyError::NoFile
        | CopyError::Unfinished(_)
        | CopyError::Checksum { .. }
        | CopyError::ChecksumOfStream { .. } => Code::Differs,
        CopyError::Interrupted => Code::Interrupted,
        CopyError::Group {
            source:
                StoreError::Submit(SubmitErrorKind::TooLarge(_) | SubmitErrorKind::TooManyEntries),
            ..
        } => Code::Usage,
        CopyError::Group { .. } | CopyError::Store(_) => Code::Storage,
    };
    let failure = Failure::new(code, error.to_string());
    match error {
        CopyError::Foreign => failure.hint(
            "if nothing there is needed, `rio volume write --force` overwrites it with a file",
        ),
        CopyError::Group { fits: Some(fits), .. } if code == Code::Usage => {
            failure.hint(format!("--group {} fits", size_option(*fits)))
        }
        CopyError::Group { fits: None, .. } if code == Code::Usage => {
            failure.hint("no size fits: create the volume with more --slots, or with a larger log")
        }
        CopyError::NotAFile(path) => failure.hint(format!(
            "to copy a device or a pipe, let the shell open it: `rio volume write … - < {}`",
            path.display()
        )),
        CopyError::Name(_) => failure.hint("--name gives the file another name in the volume"),
        CopyError::Irreplaceable(path) => failure.hint(format!(
            "to write into a device or a pipe, let the shell open it: `rio volume read … - > {}`",
            path.display()
        )),
        _ => failure,
    }
}

/// A number of bytes, whole blocks, as an option takes it.
fn size_option(bytes: usize) -> String {
    match bytes.is_multiple_of(1 << 20) {
        true => format!("{}M", bytes >> 20),
        false => format!("{}K", bytes >> 10),
    }
}

fn rate(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { bytes as f64 / seconds } else { 0.0 }
}

/// A progress bar that also observes Ctrl-C.
pub(crate) struct Bar<'a> {
    output: &'a Output,
    what: &'static str,
    interrupt: &'a Interrupt,
    progress: Option<Progress>,
}

impl<'a> Bar<'a> {
    pub(crate) fn new(output: &'a Output, what: &'static str, interrupt: &'a Interrupt) -> Self {
        Self { output, what, interrupt, progress: None }
    }
}

impl Watch for Bar<'_> {
    fn progress(&mut self, done: u64, total: Option<u64>) {
        let new = || match total {
            Some(total) => Progress::bytes(self.output, self.what, total),
            None => Progress::bytes_without_total(self.output, self.what),
        };
        self.progress.get_or_insert_with(new).at(done);
    }

    fn stop(&self) -> bool {
        self.interrupt.requested()
    }
}

/// A file in results.
#[derive(Debug, Serialize)]
pub(crate) struct FileView {
    name: String,
    bytes: u64,
    /// CRC-64/NVME, hexadecimal.
    checksum: String,
}

impl FileView {
    pub(crate) fn of(header: &Header) -> Self {
        Self {
            name: header.name.to_string_lossy().into_owned(),
            bytes: header.length,
            checksum: format!("{:016x}", header.checksum),
        }
    }
}

#[derive(Debug, Serialize)]
struct Transfer {
    schema: &'static str,
    volume: String,
    engine: &'static str,
    file: FileView,
    path: PathBuf,
    groups: u64,
    seconds: f64,
    bytes_per_s: f64,
    #[serde(skip)]
    written: bool,
}

impl Report for Transfer {
    fn text(&self, _: &Terminal) -> String {
        let size = units::bytes(self.file.bytes);
        let rate = units::bytes(self.bytes_per_s as u64);
        let (volume, path) = (&self.volume, self.path.display());
        let what = match self.written {
            true if is_standard(&self.path) => format!(
                "standard input is on volume {volume:?} as {:?}: {size} in {} ordered groups",
                self.file.name, self.groups
            ),
            true => {
                format!("{path} is on volume {volume:?}: {size} in {} ordered groups", self.groups)
            }
            false if is_standard(&self.path) => format!(
                "{:?} of volume {volume:?} went to standard output: {size}, checksum right",
                self.file.name
            ),
            false => format!("{path} is back from volume {volume:?}: {size}, checksum right"),
        };
        format!("{what}, {:.1} s, {rate}/s\n", self.seconds)
    }
}

#[derive(Debug, Serialize)]
struct Verified {
    schema: &'static str,
    volume: String,
    verified: bool,
    file: FileView,
    checksum_ok: bool,
    path: Option<PathBuf>,
    local_bytes: Option<u64>,
    differing_bytes: u64,
    first_difference: Option<u64>,
}

impl Report for Verified {
    fn text(&self, _: &Terminal) -> String {
        let size = units::bytes(self.file.bytes);
        let name = &self.file.name;
        let volume = &self.volume;
        let checksum = if self.checksum_ok { "right" } else { "WRONG" };
        let mut text = format!("{name:?} on volume {volume:?}: {size}, checksum {checksum}\n");
        if let Some(path) = &self.path {
            text += &match (self.first_difference, self.local_bytes) {
                (None, _) => format!("{}: equal, byte for byte\n", path.display()),
                (Some(at), length) => format!(
                    "{}: DIFFERS from byte {at} on; {} bytes differ, {} bytes long\n",
                    path.display(),
                    self.differing_bytes,
                    length.unwrap_or_default(),
                ),
            };
        }
        text
    }
}
