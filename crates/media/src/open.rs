//! Opening the drive that a specification names.

use std::sync::Arc;
use std::time::Duration;

use riopipe_order::block_device::BLOCK_BYTES;

use crate::disk::{DiskDrive, survival_of_file};
use crate::drive::Drive;
use crate::drive_spec::DriveSpec;
use crate::error::OpenError;
use crate::medium::{LOCK_WAIT_SHORT, LockWait, Medium, Reserve};
use crate::mem::MemDrive;
use crate::ssd::{self as modelled, Ssd};
use crate::survival::Survival;
use crate::watched::Watched;

/// Opens (or creates) the drive that `spec` names; [`DRIVE_HELP`](crate::DRIVE_HELP) lists the
/// kinds.
///
/// A file or device is locked; a second process that opens it is refused (trap T8).
pub fn open_drive(spec: &str) -> Result<Arc<dyn Drive>, OpenError> {
    open_drive_within(spec, LOCK_WAIT_SHORT)
}

/// [`open_drive`], with a wait of at most `lock_wait` for another process that has the drive
/// locked. A killed process keeps its locks until its last write has landed (trap T8).
pub fn open_drive_within(spec: &str, lock_wait: Duration) -> Result<Arc<dyn Drive>, OpenError> {
    open(DriveSpec::parse(spec)?, lock_wait)
}

/// [`open_drive`] for an inspection: a drive in memory takes its memory only when it is used.
pub fn inspect_drive(spec: &str) -> Result<Arc<dyn Drive>, OpenError> {
    let mut spec = DriveSpec::parse(spec)?;
    if let DriveSpec::Memory { lazy, .. } | DriveSpec::ModelInMemory { lazy, .. } = &mut spec {
        *lazy = true;
    }
    open(spec, LOCK_WAIT_SHORT)
}

/// The survival of the drive that `spec` would create, and whether the drive would have a volatile
/// cache; `None` for a drive that opening never creates.
pub fn properties_once_created(spec: &str) -> Result<Option<(Survival, bool)>, OpenError> {
    Ok(match DriveSpec::parse(spec)? {
        DriveSpec::File { .. } => Some((survival_of_file(), true)),
        DriveSpec::ModelInFile { profile, order, .. } => {
            Some((modelled::survival(profile, order.kind, true), !profile.plp))
        }
        DriveSpec::Memory { .. } | DriveSpec::Device { .. } | DriveSpec::ModelInMemory { .. } => {
            None
        }
    })
}

fn open(spec: DriveSpec<'_>, lock_wait: Duration) -> Result<Arc<dyn Drive>, OpenError> {
    let lock_wait = LockWait::within(lock_wait);
    match spec {
        DriveSpec::Memory { bytes, lazy } => Ok(Arc::new(MemDrive::new(bytes, !lazy)?)),
        DriveSpec::File { path, size, sparse, threads } => {
            let reserve = if sparse { Reserve::No } else { Reserve::Try };
            let medium = Medium::file(&path, size, reserve, true, lock_wait)?;
            Ok(Arc::new(DiskDrive::new(medium, None, threads)))
        }
        DriveSpec::Device { path, plp, threads } => {
            let medium = Medium::device(&path, lock_wait)?;
            Ok(Arc::new(DiskDrive::new(medium, plp.then_some(false), threads)))
        }
        DriveSpec::ModelInMemory { profile, order, bytes, seed, lazy } => {
            let blocks = bytes / BLOCK_BYTES as u64;
            let model = modelled::in_memory(profile, order, blocks, seed, !lazy)?;
            Ok(Arc::new(Ssd::new(profile, order, model, "in memory", None)))
        }
        DriveSpec::ModelInFile { profile, order, path, size, seed } => {
            let medium = Medium::file(&path, size, Reserve::Try, false, lock_wait)?;
            // The model keeps the file, and with it the lock.
            let file = Arc::new(Watched::new(medium));
            let model = modelled::in_file(profile, order, Arc::clone(&file), seed)?;
            Ok(Arc::new(Ssd::new(profile, order, model, &format!("in {path}"), Some(file))))
        }
    }
}
