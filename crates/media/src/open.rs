//! From a specification to a drive.

use std::sync::Arc;

use crate::drive::{BLOCK_SIZE, Drive};
use crate::error::OpenError;
use crate::mem::Mem;
use crate::spec::Spec;
use crate::ssd::{Model, Profile, Ssd};

/// The kinds of drive and their options, as shown with every complaint about a specification.
pub const DRIVE_HELP: &str = "drives are:
  mem:SIZE[,lazy]                     this process's memory (gone with it); lazy: taken on first use
  ssd:flash,size=SIZE[,seed=N][,lazy]
  ssd:optane,size=SIZE[,seed=N][,lazy]
                                      a modelled drive in memory: flash without power-loss
                                      protection, or Optane";

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
        "ssd" => {
            let profile = Profile::named(spec.what).ok_or_else(|| {
                spec.wrong(format!("no modelled drive {:?}: flash or optane", spec.what))
            })?;
            let bytes = spec.size("size")?;
            let seed = match spec.option("seed") {
                None => 0,
                Some(text) => text
                    .parse()
                    .map_err(|_| spec.wrong(format!("seed {text:?} is not a number")))?,
            };
            let lazy = spec.switch("lazy")?;
            spec.finish()?;
            let bytes = bytes.ok_or_else(|| spec.wrong("a modelled drive needs size="))?;
            let model = Model::new(profile, bytes / BLOCK_SIZE as u64, seed, !lazy)?;
            Ok(Arc::new(Ssd::new(profile, model, "in memory", None)))
        }
        kind => Err(spec.wrong(format!("unknown kind of drive {kind:?}"))),
    }
}
