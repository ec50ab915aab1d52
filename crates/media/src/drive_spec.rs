//! The specifications that name drives.

use std::borrow::Cow;

use riopipe_order::write_order::DriveOrder;

use crate::error::OpenError;
use crate::spec::Spec;
use crate::ssd::{Order, Profile};

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
  ssd:flash,size=SIZE[,file=PATH][,order=ORDER[,penalty=PERCENT]][,seed=N][,lazy]
  ssd:optane,size=SIZE[,file=PATH][,order=ORDER[,penalty=PERCENT]][,seed=N][,lazy]
      a modelled drive, flash without power-loss protection or Optane; in memory, or in a file;
      order= is what it keeps by itself: none, barrier (a cache barrier) or op (an
      order-preserving FTL); penalty= is what that costs, 5 or 1.05 unless given
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
    ModelInMemory { profile: &'static Profile, order: Order, bytes: u64, seed: u64, lazy: bool },
    /// `ssd:` in a file.
    ModelInFile {
        profile: &'static Profile,
        order: Order,
        path: Cow<'a, str>,
        size: Option<u64>,
        seed: u64,
    },
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
        let order = take_order(&mut spec, profile)?;
        let lazy = spec.switch("lazy")?;
        spec.finish()?;
        match (file, size) {
            (Some(path), size) => Ok(Self::ModelInFile { profile, order, path, size, seed }),
            (None, Some(bytes)) => Ok(Self::ModelInMemory { profile, order, bytes, seed, lazy }),
            (None, None) => Err(spec.error("a modelled drive in memory needs size=")),
        }
    }
}

/// Removes the options `order` and `penalty`. Returns the order of the modelled drive.
fn take_order(spec: &mut Spec<'_>, profile: &Profile) -> Result<Order, OpenError> {
    let kind = match spec.option("order") {
        None => DriveOrder::None,
        Some(name) => DriveOrder::from_name(&name).ok_or_else(|| {
            spec.error(format!("order={name:?} is not one of none, barrier and op"))
        })?,
    };
    let order = Order::of(kind, profile);
    match spec.option("penalty") {
        None => Ok(order),
        Some(_) if kind == DriveOrder::None => {
            Err(spec.error("penalty= is the cost of an order: add order=barrier or order=op"))
        }
        Some(text) => match parse_percent(&text) {
            Some(penalty) => Ok(Order { penalty, ..order }),
            None => Err(spec.error(format!(
                "penalty={text:?} is not a number of percent from 0 to 100, such as 5 or 1.05"
            ))),
        },
    }
}

/// A number of percent with at most two decimals, in hundredths.
fn parse_percent(text: &str) -> Option<u32> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) || fraction.len() > 2 {
        return None;
    }
    let hundredths = format!("{whole}{fraction:0<2}").parse().ok()?;
    (hundredths <= Order::PENALTY_MAX).then_some(hundredths)
}

/// Removes the option `io`. Returns whether threads are to be used in place of io_uring.
fn take_io_threads(spec: &mut Spec<'_>) -> Result<bool, OpenError> {
    match spec.option("io").as_deref() {
        None | Some("uring") => Ok(false),
        Some("threads") => Ok(true),
        Some(other) => Err(spec.error(format!("io={other:?} is neither uring nor threads"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ssd::{FLASH, OPTANE};

    fn order_of(text: &str) -> Result<Order, String> {
        match DriveSpec::parse(text) {
            Ok(DriveSpec::ModelInMemory { order, .. } | DriveSpec::ModelInFile { order, .. }) => {
                Ok(order)
            }
            Ok(_) => Err("another kind of drive".into()),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn a_modelled_drive_keeps_the_order_that_its_specification_names() {
        let barrier = Order::of(DriveOrder::Barrier, &FLASH);
        let epochs = Order::of(DriveOrder::Epochs, &FLASH);
        for (text, order) in [
            ("ssd:flash,size=1M", Order::NONE),
            ("ssd:flash,size=1M,order=none", Order::NONE),
            ("ssd:flash,size=1M,order=barrier", barrier),
            ("ssd:flash,file=/a,order=barrier,penalty=5", barrier),
            ("ssd:flash,size=1M,order=op", epochs),
            ("ssd:flash,size=1M,order=op,penalty=1.05", epochs),
            ("ssd:flash,size=1M,order=op,penalty=0.1", Order { penalty: 10, ..epochs }),
            ("ssd:flash,size=1M,order=op,penalty=100", Order { penalty: 10_000, ..epochs }),
            ("ssd:optane,size=1M,order=barrier", Order::of(DriveOrder::Barrier, &OPTANE)),
        ] {
            assert_eq!(order_of(text), Ok(order), "{text}");
        }
        assert_eq!((barrier.penalty, epochs.penalty), (500, 105), "hundredths of a percent");
        for (options, part) in [
            ("order=fifo", "none, barrier and op"),
            ("penalty=5", "add order="),
            ("order=none,penalty=5", "add order="),
            ("order=op,penalty=x", "percent"),
            ("order=op,penalty=", "percent"),
            ("order=op,penalty=1.", "percent"),
            ("order=op,penalty=1.055", "percent"),
            ("order=op,penalty=101", "percent"),
            ("order=op,penalty=99999999999", "percent"),
        ] {
            let error = order_of(&format!("ssd:flash,size=1M,{options}")).unwrap_err();
            assert!(error.contains(part), "{options}: {error}");
        }
    }
}
