//! Opening the ordering log.

use std::sync::Arc;

use riopipe_media::{LogPart, LogStore, boot_id, open_log};
use riopipe_order::log_region::{
    Class, CreateError, HEADER_BYTES, LogKind, LogRegion, OpenError, inspect,
};
use riopipe_order::region::RegionError;
use riopipe_session::target::{Split, Volumes};

use crate::crc::crc32c;

/// Why the ordering log was not opened.
#[derive(Debug, thiserror::Error)]
pub enum LogOpenError {
    /// The place where it should be.
    #[error(transparent)]
    Store(#[from] riopipe_media::OpenError),
    /// What is there (T19).
    #[error(transparent)]
    Region(#[from] OpenError),
    /// A new one can't be made.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// A part of it.
    #[error(transparent)]
    Part(#[from] riopipe_media::PartError),
}

/// Opens the log that `spec` names, if any, and the volumes in it; `describe` gets a line about
/// it for people.
pub(crate) fn open_volumes(
    spec: Option<&str>,
    accept_lost: bool,
    describe: &mut Vec<String>,
) -> Result<(Volumes<LogPart>, Option<Arc<LogStore>>), LogOpenError> {
    let Some(spec) = spec else {
        describe.push("no ordering log: engine rio can't run here".into());
        return Ok((Volumes::without_log(crc32c), None));
    };
    let store = Arc::new(open_log(spec)?);
    let boot = boot_id()?;
    let (len, header) = (store.len(), store.part(0..HEADER_BYTES.min(store.len()))?);
    let mut what = "";
    let region = match inspect(&header, len, boot, crc32c) {
        Class::Blank => create(header, len, boot, spec)?,
        Class::StaleBoot(_) | Class::Damaged { .. } if accept_lost => {
            tracing::warn!(log = spec, "the log was given up and made anew (--accept-lost-log)");
            create(header, len, boot, spec)?
        }
        Class::StaleBoot(found) => {
            // Served, but its volumes are refused and their members guarded: the other
            // namespaces need not suffer (T19, T21).
            tracing::error!(
                log = spec,
                "the log is of another boot and volumes in it were not closed: they are refused \
                 until the loss is accepted (--accept-lost-log)"
            );
            describe.push(format!("ordering log: {}, of another boot: LOST", store.describe()));
            return Ok((Volumes::with_lost_log(found, crc32c), Some(store)));
        }
        Class::Ours(found) => {
            what = if found.volumes.is_empty() { "" } else { ", with volumes" };
            LogRegion::open(header, len, boot, crc32c)?
        }
        Class::Newer { .. } | Class::NotALog | Class::Damaged { .. } => {
            LogRegion::open(header, len, boot, crc32c)?
        }
    };
    describe.push(format!("ordering log: {}{what}", store.describe()));
    let parts = Arc::clone(&store);
    let split: Split<LogPart> =
        Box::new(move |range| parts.part(range).map_err(|e| RegionError::new(e.to_string())));
    let (volumes, problems) = Volumes::with_log(region, split, crc32c);
    for problem in problems {
        tracing::error!(log = spec, problem, "a volume is refused");
    }
    Ok((volumes, Some(store)))
}

fn create(
    header: LogPart,
    len: usize,
    boot: [u8; 16],
    spec: &str,
) -> Result<LogRegion<LogPart>, LogOpenError> {
    let kind = if spec.starts_with("dax:") { LogKind::Dax } else { LogKind::File };
    Ok(LogRegion::create(header, len, random_id(), boot, kind, crc32c)?)
}

/// A name for a new log region: random, from the kernel.
fn random_id() -> [u8; 16] {
    let mut id = [0u8; 16];
    // SAFETY: the 16 bytes are valid for writing; up to 256 bytes are never cut short, and the
    // flags ask for nothing unusual.
    let got = unsafe { libc::getrandom(id.as_mut_ptr().cast(), id.len(), 0) };
    if got != id.len() as isize {
        // Before the kernel's pool is ready: the clock will do for a name.
        id[..8].copy_from_slice(&riopipe_media::now().to_le_bytes());
        id[8..12].copy_from_slice(&std::process::id().to_le_bytes());
    }
    id
}
