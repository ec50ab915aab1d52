//! The specifications that name drives.

use std::borrow::Cow;

use crate::error::OpenError;
use crate::spec::Spec;
use crate::ssd::Profile;

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
sizes are whole numbers of 4096-byte blocks, written like 64M or 10G; a comma in a path is
written twice";

/// A parsed specification of a drive.
pub(crate) enum DriveSpec<'a> {
    /// `mem:`
    Memory { bytes: u64, lazy: bool },
    /// `file:`
    File { path: Cow<'a, str>, size: Option<u64>, sparse: bool, threads: bool },
    /// `block:`
    Device { path: Cow<'a, str>, plp: bool, threads: bool },
    /// `ssd:` in memory.
    ModelInMemory { profile: &'static Profile, bytes: u64, seed: u64, lazy: bool },
    /// `ssd:` in a file.
    ModelInFile { profile: &'static Profile, path: Cow<'a, str>, size: Option<u64>, seed: u64 },
}

impl<'a> DriveSpec<'a> {
    pub(crate) fn parse(text: &'a str) -> Result<Self, OpenError> {
        let mut spec = Spec::parse(text, DRIVE_HELP)?;
        match spec.kind {
            "mem" => {
                let bytes = spec.block_aligned_size(&spec.what)?;
                let lazy = spec.switch("lazy")?;
                spec.finish()?;
                Ok(Self::Memory { bytes, lazy })
            }
            "file" => {
                let size = spec.size("size")?;
                let sparse = spec.switch("sparse")?;
                let threads = take_io_threads(&mut spec)?;
                let path = spec.path()?;
                spec.finish()?;
                Ok(Self::File { path, size, sparse, threads })
            }
            "block" => {
                let plp = spec.switch("plp")?;
                let threads = take_io_threads(&mut spec)?;
                let path = spec.path()?;
                spec.finish()?;
                Ok(Self::Device { path, plp, threads })
            }
            "ssd" => Self::finish_modelled(spec),
            kind => Err(spec.error(format!("unknown kind of drive {kind:?}"))),
        }
    }

    /// Reads the rest of an `ssd:` specification.
    fn finish_modelled(mut spec: Spec<'a>) -> Result<Self, OpenError> {
        let profile = Profile::named(&spec.what).ok_or_else(|| {
            spec.error(format!("no modelled drive {:?}: flash or optane", spec.what))
        })?;
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
        match (file, size) {
            (Some(path), size) => Ok(Self::ModelInFile { profile, path, size, seed }),
            (None, Some(bytes)) => Ok(Self::ModelInMemory { profile, bytes, seed, lazy }),
            (None, None) => Err(spec.error("a modelled drive in memory needs size=")),
        }
    }
}

/// Removes the option `io`. Returns whether threads are to be used in place of io_uring.
fn take_io_threads(spec: &mut Spec<'_>) -> Result<bool, OpenError> {
    match spec.option("io").as_deref() {
        None | Some("uring") => Ok(false),
        Some("threads") => Ok(true),
        Some(other) => Err(spec.error(format!("io={other:?} is neither uring nor threads"))),
    }
}
