//! The specifications that name logs.

use std::borrow::Cow;

use crate::error::OpenError;
use crate::pci::PciAddress;
use crate::spec::Spec;

/// The kinds of log and their options, as shown with every error in a specification.
pub const LOG_HELP: &str = "logs are:
  file:PATH[,size=SIZE]
      a mapped file: survives the process, not the power; with size= it can be created
  dax:PATH[,size=SIZE]
      a file on persistent memory (a file system mounted with -o dax): survives the power
  block:PATH[,plp]
      a small block device, all of it: survives the power. Without power-loss protection it is
      flushed with every fence; plp: it has it although it reports a volatile cache
  block:PATH[,size=SIZE]
      the same in a file, to try it out: each fence waits for the file system
  pci:ADDRESS
      the memory of an NVMe drive (its Persistent Memory Region) by the drive's PCI address, such as
      0000:41:00.0: survives the power
  mem:SIZE
      this process's memory, gone with it
sizes are whole numbers of 4096-byte blocks, written like 2M; a comma in a path is written twice";

/// A parsed specification of a log.
pub(crate) enum LogSpec<'a> {
    /// `mem:`
    Memory { bytes: u64 },
    /// `file:` and `dax:`
    Mapped { path: Cow<'a, str>, size: Option<u64>, dax: bool },
    /// `block:` on a block device.
    Device { path: Cow<'a, str>, plp: bool },
    /// `block:` in a file.
    Blocks { path: Cow<'a, str>, size: Option<u64> },
    /// `pci:`
    DriveMemory { address: PciAddress },
}

impl<'a> LogSpec<'a> {
    pub(crate) fn parse(text: &'a str) -> Result<Self, OpenError> {
        let mut spec = Spec::parse(text, LOG_HELP)?;
        match spec.kind {
            "mem" => {
                let bytes = spec.block_aligned_size(&spec.what)?;
                spec.finish()?;
                Ok(Self::Memory { bytes })
            }
            kind @ ("file" | "dax") => {
                let size = spec.size("size")?;
                let path = spec.path()?;
                spec.finish()?;
                Ok(Self::Mapped { path, size, dax: kind == "dax" })
            }
            "block" => Self::finish_block(spec),
            "pci" => {
                if spec.size("size")?.is_some() {
                    return Err(
                        spec.error("size= is for a file: a drive's memory is used as a whole")
                    );
                }
                let address =
                    PciAddress::parse(&spec.what).map_err(|problem| spec.error(problem))?;
                spec.finish()?;
                Ok(Self::DriveMemory { address })
            }
            kind => Err(spec.error(format!("unknown kind of log {kind:?}"))),
        }
    }

    /// Reads the rest of a `block:` specification, which names a block device or a file.
    fn finish_block(mut spec: Spec<'a>) -> Result<Self, OpenError> {
        let size = spec.size("size")?;
        let plp = spec.switch("plp")?;
        let path = spec.path()?;
        spec.finish()?;
        // A path that does not exist shall become a file if it has a size.
        let is_file = std::fs::metadata(&*path).map_or(size.is_some(), |found| found.is_file());
        if is_file {
            if plp {
                return Err(spec.error("plp is for a device: a file never counts as protected"));
            }
            return Ok(Self::Blocks { path, size });
        }
        if size.is_some() {
            return Err(spec.error(
                "size= is for a file: a device is used as a whole (make a partition of the size \
                 that you want)",
            ));
        }
        Ok(Self::Device { path, plp })
    }
}
