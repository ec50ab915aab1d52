//! From a specification to a drive.

use std::sync::Arc;

use crate::drive::Drive;
use crate::error::OpenError;
use crate::mem::Mem;
use crate::spec::Spec;

/// The kinds of drive and their options, as shown with every complaint about a specification.
pub const DRIVE_HELP: &str = "drives are:
  mem:SIZE[,lazy]                     this process's memory (gone with it); lazy: taken on first use";

/// Opens (or creates) the drive that `spec` names; [`DRIVE_HELP`] lists the kinds.
pub fn open_drive(spec: &str) -> Result<Arc<dyn Drive>, OpenError> {
    let mut spec = Spec::parse(spec, DRIVE_HELP)?;
    match spec.kind {
        "mem" => {
            let bytes = spec.blocks(spec.what)?;
            let lazy = spec.switch("lazy")?;
            spec.finish()?;
            Ok(Arc::new(Mem::new(bytes, !lazy)?))
        }
        kind => Err(spec.wrong(format!("unknown kind of drive {kind:?}"))),
    }
}
