//! Opening the drive that a specification names.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use riopipe_order::block_device::BLOCK_BYTES;

use crate::disk::DiskDrive;
use crate::drive::Drive;
use crate::error::OpenError;
use crate::medium::{LOCK_WAIT_SHORT, LockWait, Medium, Reserve};
use crate::mem::MemDrive;
use crate::spec::Spec;
use crate::ssd::{self as modelled, Profile, Ssd};

/// The kinds of drive and their options, as shown with every error in a specification.
pub const DRIVE_HELP: &str = "drives are:
  mem:SIZE[,lazy]
      this process's memory, gone with it; lazy: taken on first use
  file:PATH[,size=SIZE][,sparse][,io=threads]
      a file; size= is its size, with which it can be created, and reserves its space, sparse
      doesn't reserve;
      io=threads does without io_uring
  block:PATH[,plp][,io=threads]
      a block device, all of it; plp: its completed writes survive a power cut although it
      reports a volatile cache
  ssd:flash,size=SIZE[,file=PATH][,seed=N][,lazy]
  ssd:optane,size=SIZE[,file=PATH][,seed=N][,lazy]
      a modelled drive, flash without power-loss protection or Optane; in memory, or in a file
sizes are whole numbers of 4096-byte blocks, written like 64M or 10G";

/// The path of the file that opening `spec`, of a drive or of a log, would create: the specification
/// has a size, and the file does not exist. `None` also for a specification that is wrong, which
/// opening it reports.
pub fn file_to_create(spec: &str) -> Option<String> {
    let mut spec = Spec::parse(spec, DRIVE_HELP).ok()?;
    let path = match spec.kind {
        "file" | "dax" | "block" => spec.what,
        "ssd" => spec.option("file")?,
        _ => return None,
    };
    spec.size("size").ok()??;
    match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Some(path.to_owned()),
        _ => None,
    }
}

/// Opens (or creates) the drive that `spec` names; [`DRIVE_HELP`] lists the kinds.
///
/// A file or device is locked; a second process that opens it is refused (trap T8).
pub fn open_drive(spec: &str) -> Result<Arc<dyn Drive>, OpenError> {
    open_drive_within(spec, LOCK_WAIT_SHORT)
}

/// [`open_drive`], with a wait of at most `lock_wait` for another process that has the drive
/// locked. A killed process keeps its locks until its last write has landed (trap T8).
pub fn open_drive_within(spec: &str, lock_wait: Duration) -> Result<Arc<dyn Drive>, OpenError> {
    let lock_wait = LockWait::within(lock_wait);
    let mut spec = Spec::parse(spec, DRIVE_HELP)?;
    match spec.kind {
        "mem" => {
            let bytes = spec.block_aligned_size(spec.what)?;
            let lazy = spec.switch("lazy")?;
            spec.finish()?;
            Ok(Arc::new(MemDrive::new(bytes, !lazy)?))
        }
        "file" => {
            let size = spec.size("size")?;
            let sparse = spec.switch("sparse")?;
            let threads = take_io_threads(&mut spec)?;
            let path = spec.path()?;
            spec.finish()?;
            let reserve = if sparse { Reserve::No } else { Reserve::Try };
            let medium = Medium::file(path, size, reserve, true, lock_wait)?;
            Ok(Arc::new(DiskDrive::new(medium, None, threads)))
        }
        "block" => {
            let plp = spec.switch("plp")?;
            let threads = take_io_threads(&mut spec)?;
            let path = spec.path()?;
            spec.finish()?;
            let medium = Medium::device(path, lock_wait)?;
            Ok(Arc::new(DiskDrive::new(medium, plp.then_some(false), threads)))
        }
        "ssd" => open_modelled(spec, lock_wait),
        kind => Err(spec.error(format!("unknown kind of drive {kind:?}"))),
    }
}

/// Opens the modelled drive of an `ssd:` specification, in memory or in a file.
fn open_modelled(mut spec: Spec<'_>, lock_wait: LockWait) -> Result<Arc<dyn Drive>, OpenError> {
    let profile = Profile::named(spec.what)
        .ok_or_else(|| spec.error(format!("no modelled drive {:?}: flash or optane", spec.what)))?;
    let size = spec.size("size")?;
    let file = spec.option("file");
    let seed = match spec.option("seed") {
        None => 0,
        Some(text) => {
            text.parse().map_err(|_| spec.error(format!("seed {text:?} is not a number")))?
        }
    };
    let lazy = spec.switch("lazy")?;
    spec.finish()?;
    if let Some(path) = file {
        let medium = Medium::file(path, size, Reserve::Try, false, lock_wait)?;
        // The model keeps the file, and with it the lock.
        let file = Arc::new(medium.file);
        let model = modelled::in_file(profile, Arc::clone(&file), medium.len, seed)?;
        return Ok(Arc::new(Ssd::new(profile, model, &format!("in {path}"), Some(file))));
    }
    let bytes = size.ok_or_else(|| spec.error("a modelled drive in memory needs size="))?;
    let model = modelled::in_memory(profile, bytes / BLOCK_BYTES as u64, seed, !lazy)?;
    Ok(Arc::new(Ssd::new(profile, model, "in memory", None)))
}

/// Removes the option `io`. Returns whether threads are to be used in place of io_uring.
fn take_io_threads(spec: &mut Spec<'_>) -> Result<bool, OpenError> {
    match spec.option("io") {
        None | Some("uring") => Ok(false),
        Some("threads") => Ok(true),
        Some(other) => Err(spec.error(format!("io={other:?} is neither uring nor threads"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_file_with_a_size_is_created() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(path("here"), "").unwrap();
        for (before, after) in [
            ("file:", ",size=1M"),
            ("dax:", ",size=1M"),
            ("block:", ",size=1M"),
            ("ssd:flash,size=1M,file=", ",seed=1"),
        ] {
            let of = |name: &str| file_to_create(&format!("{before}{}{after}", path(name)));
            assert_eq!((of("here"), of("new")), (None, Some(path("new"))), "{before}");
        }
        for spec in ["mem:1M", "ssd:flash,size=1M", "tape:9", "file:/no such file", "size=1M"] {
            assert_eq!(file_to_create(spec), None, "{spec}");
        }
    }
}
