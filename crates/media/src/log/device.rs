//! The device (or file) under a `block:` log.

use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use riopipe_order::region::RegionError;

use super::block::Blocks;
use crate::error::{OpenError, cause_of};
use crate::medium::Medium;

/// Locked for as long as any part lives.
pub(super) struct BlockStore {
    pub(super) medium: Medium,
    /// Completed is not durable here: each fence ends with a FLUSH.
    flush: bool,
    /// A write may be asked to be durable by itself (`RWF_DSYNC`, Linux 4.7).
    can_dsync: AtomicBool,
    /// The first failed FLUSH or flushed write: what any part had written before it may be gone,
    /// and the next FLUSH wouldn't tell (T22). Held during each of them, so that none that began
    /// before is believed after.
    flushing: Mutex<Option<RegionError>>,
}

impl BlockStore {
    /// A store over what the medium holds, made durable first if it has a volatile cache.
    pub(super) fn open(medium: Medium, flush: bool) -> Result<Self, OpenError> {
        if flush {
            // The last process may have died between a write and its FLUSH: what it wrote is still
            // read, and lost with the power. It must not be decided upon before it is durable.
            let durable = medium.file.sync_data();
            durable.map_err(|source| OpenError::Os {
                path: medium.path.clone(),
                doing: "make durable what it holds",
                source,
            })?;
        }
        Self::new(medium, flush)
    }

    fn new(medium: Medium, flush: bool) -> Result<Self, OpenError> {
        if usize::try_from(medium.len).is_err() {
            let problem = "larger than this machine can address".to_owned();
            return Err(OpenError::Size { path: medium.path, problem });
        }
        Ok(Self { medium, flush, can_dsync: AtomicBool::new(true), flushing: Mutex::new(None) })
    }

    pub(super) fn len(&self) -> usize {
        // Checked in `new`.
        self.medium.len as usize
    }

    /// Writes one run; `flags` are those of `pwritev2(2)`.
    fn put(&self, mut bytes: &[u8], mut offset: u64, flags: libc::c_int) -> io::Result<()> {
        while !bytes.is_empty() {
            let part =
                libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
            let fd = self.medium.file.as_raw_fd();
            // SAFETY: one iovec over `bytes`, which are only read, until the call returns.
            let done = unsafe { libc::pwritev2(fd, &raw const part, 1, offset as i64, flags) };
            match usize::try_from(done) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(done) => {
                    bytes = &bytes[done..];
                    offset += done as u64;
                }
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    fn put_durably(&self, bytes: &[u8], base: u64, runs: &[Range<usize>]) -> io::Result<()> {
        if let [run] = runs
            && self.can_dsync.load(Ordering::Relaxed)
        {
            let at = base + run.start as u64;
            match self.put(&bytes[run.clone()], at, libc::RWF_DSYNC) {
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    self.can_dsync.store(false, Ordering::Relaxed);
                }
                done => return done,
            }
        }
        for run in runs {
            self.put(&bytes[run.clone()], base + run.start as u64, 0)?;
        }
        self.medium.file.sync_data()
    }

    #[cold]
    fn explain(&self, error: &io::Error) -> RegionError {
        let path = &self.medium.path;
        RegionError::new(match error.raw_os_error().map(cause_of) {
            Some(cause) => format!("{path}: {cause}"),
            None => format!("{path}: {error}"),
        })
    }
}

impl Blocks for BlockStore {
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.medium.file.read_exact_at(into, offset)
    }

    fn write(&self, bytes: &[u8], base: u64, runs: &[Range<usize>]) -> Result<(), RegionError> {
        if !self.flush {
            // One after the other: more than one run is rare (the ring comes around, or a mark
            // rides along).
            return runs.iter().try_for_each(|run| {
                self.put(&bytes[run.clone()], base + run.start as u64, 0)
                    .map_err(|error| self.explain(&error))
            });
        }
        // What it guards is whole after each statement.
        let mut failed = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &*failed {
            return Err(error.clone());
        }
        self.put_durably(bytes, base, runs).map_err(|error| {
            let error = self.explain(&error);
            *failed = Some(error.clone());
            error
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;

    #[allow(clippy::single_range_in_vec_init, reason = "one run, not its blocks")]
    const ONE: [Range<usize>; 1] = [0..4096];

    fn store(path: &str, flush: bool) -> BlockStore {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let path = path.to_owned();
        let medium = Medium { file, path, len: 65536, direct: false, reserved: true, device: true };
        BlockStore::new(medium, flush).unwrap()
    }

    #[test]
    fn a_failure_says_which_device_and_why() {
        for flush in [false, true] {
            let error = store("/dev/full", flush).write(&[0; 4096], 0, &ONE).unwrap_err();
            for part in ["/dev/full", "No space left"] {
                assert!(error.to_string().contains(part), "{error}");
            }
        }
    }

    #[test]
    fn t22_after_a_failed_flush_no_part_is_believed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let good = || store(file.path().to_str().unwrap(), true).medium;
        for (flush, goes_on) in [(true, false), (false, true)] {
            let mut store = store("/dev/full", flush);
            store.write(&[1; 4096], 0, &ONE).unwrap_err();
            // The device works again, but what a volatile cache held for others may be gone.
            store.medium = good();
            let other = store.write(&[2; 8192], 4096, &[0..4096, 4096..8192]);
            assert_eq!(other.is_ok(), goes_on, "{other:?}");
        }
    }

    #[test]
    fn runs_go_where_they_belong_with_and_without_flushes() {
        let bytes: Vec<u8> = (0..4 * 4096).map(|at| (at / 4096 + 1) as u8).collect();
        for flush in [false, true] {
            for can_dsync in [true, false] {
                for runs in [&ONE[..], &[0..4096, 8192..16384]] {
                    let file = tempfile::NamedTempFile::new().unwrap();
                    file.as_file().set_len(65536).unwrap();
                    let store = store(file.path().to_str().unwrap(), flush);
                    store.can_dsync.store(can_dsync, Ordering::Relaxed);
                    store.write(&bytes, 12288, runs).unwrap();
                    let mut expected = vec![0; 65536];
                    for run in runs {
                        expected[12288 + run.start..12288 + run.end]
                            .copy_from_slice(&bytes[run.clone()]);
                    }
                    assert!(std::fs::read(file.path()).unwrap() == expected, "{flush} {runs:?}");
                    let mut back = vec![0; 8192];
                    store.read(12288, &mut back).unwrap();
                    assert!(back == expected[12288..20480]);
                }
            }
        }
    }
}
