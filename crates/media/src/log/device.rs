//! The device (or file) under a `block:` log.
//!
//! [`DevicePart`] has the raw effects: reads, writes, and FLUSHes.
//! [`BlockPart`](riopipe_model::log::block::BlockPart) decides which blocks are written, and when.

use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use riopipe_model::log::block::{self, Blocks, Durability, FlushFailure};
use riopipe_order::region::RegionError;
use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags, pwritev2};

use crate::buf::AlignedBuf;
use crate::error::{OpenError, cause_of};
use crate::medium::Medium;

/// The device under a log, which all parts of the log share. The medium stays locked as long as any
/// part exists.
pub(super) struct BlockStore {
    pub(super) medium: Medium,
    /// The device has a volatile cache, so a completed write is not durable yet.
    is_volatile: bool,
    /// The system supports writes that are durable on completion (`RWF_DSYNC`, Linux 4.7).
    can_dsync: AtomicBool,
    /// Locked while a FLUSH is in flight; see [`FlushFailure`].
    flush_failure: Mutex<FlushFailure>,
}

impl BlockStore {
    /// A store over the medium's content, which is made durable first if the medium has a volatile
    /// cache (`is_volatile`).
    pub(super) fn open(medium: Medium, is_volatile: bool) -> Result<Arc<Self>, OpenError> {
        let path = medium.path.clone();
        let store = Arc::new(Self::new(medium, is_volatile)?);
        block::make_content_durable(&DevicePart(Arc::clone(&store))).map_err(|error| {
            OpenError::Os {
                path,
                doing: "make durable what it holds",
                source: io::Error::other(error.cause),
            }
        })?;
        store.drop_cached_pages();
        Ok(store)
    }

    /// Drops the log's pages from the page cache, so that the log is read from its device (trap
    /// T24).
    ///
    /// Without direct I/O, reads return the content of the page cache. If a write-back has failed
    /// for an earlier process, the cache still has the pages, marked clean, although the device
    /// never got them. A file system in memory keeps its pages, which are its content.
    fn drop_cached_pages(&self) {
        if !self.medium.direct {
            // A failure is ignored: there is no other system call for this.
            let _ = fadvise(&self.medium.file, 0, None, Advice::DontNeed);
        }
    }

    fn new(medium: Medium, is_volatile: bool) -> Result<Self, OpenError> {
        if usize::try_from(medium.len).is_err() {
            let problem = "larger than this machine can address".to_owned();
            return Err(OpenError::Size { path: medium.path, problem });
        }
        Ok(Self {
            medium,
            is_volatile,
            can_dsync: AtomicBool::new(true),
            flush_failure: Mutex::default(),
        })
    }

    pub(super) fn len(&self) -> usize {
        // `new` has checked the length.
        self.medium.len as usize
    }

    /// Writes `bytes` at byte `offset` of the device, with as many system calls as that needs.
    fn write_all_at(
        &self,
        mut bytes: &[u8],
        mut offset: u64,
        flags: ReadWriteFlags,
    ) -> io::Result<()> {
        while !bytes.is_empty() {
            match pwritev2(&self.medium.file, &[IoSlice::new(bytes)], offset, flags) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    bytes = &bytes[count..];
                    offset += count as u64;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// The error of a log, with the path of the device.
    #[cold]
    fn region_error(&self, error: &io::Error) -> RegionError {
        let path = &self.medium.path;
        RegionError::new(match error.raw_os_error().map(cause_of) {
            Some(cause) => format!("{path}: {cause}"),
            None => format!("{path}: {error}"),
        })
    }
}

/// The device as one part of the log accesses it.
#[derive(Clone)]
pub(super) struct DevicePart(pub(super) Arc<BlockStore>);

impl Blocks for DevicePart {
    type Mirror = AlignedBuf;
    type ReadError = io::Error;

    fn is_volatile(&self) -> bool {
        self.0.is_volatile
    }

    fn read(&self, range: Range<usize>) -> io::Result<AlignedBuf> {
        let mut mirror = AlignedBuf::zeroed(range.len());
        self.0.medium.file.read_exact_at(&mut mirror, range.start as u64)?;
        Ok(mirror)
    }

    /// Writes, and waits until the write has completed. A fence would wait for the write anyway.
    fn begin_write(
        &self,
        offset: usize,
        bytes: &[u8],
        durability: Durability,
    ) -> Result<(), RegionError> {
        let store = &*self.0;
        let must_be_durable = durability == Durability::OnCompletion;
        if must_be_durable && store.can_dsync.load(Ordering::Relaxed) {
            match store.write_all_at(bytes, offset as u64, ReadWriteFlags::DSYNC) {
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    store.can_dsync.store(false, Ordering::Relaxed);
                }
                result => return result.map_err(|error| store.region_error(&error)),
            }
        }
        store
            .write_all_at(bytes, offset as u64, ReadWriteFlags::empty())
            .map_err(|error| store.region_error(&error))?;
        if must_be_durable { self.flush() } else { Ok(()) }
    }

    fn complete(&self) -> Result<(), RegionError> {
        Ok(())
    }

    fn flush(&self) -> Result<(), RegionError> {
        self.0.medium.file.sync_data().map_err(|error| self.0.region_error(&error))
    }

    fn with_flush_lock<T>(&self, f: impl FnOnce(&mut FlushFailure) -> T) -> T {
        // A panic can't leave the record half changed: each statement changes all of it.
        f(&mut self.0.flush_failure.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};

    use riopipe_model::log::block::BlockPart;
    use riopipe_order::region::Region;

    use super::*;
    use crate::medium::Space;

    fn store(path: &str, flush: bool) -> BlockStore {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let path = path.to_owned();
        let medium =
            Medium { file, path, len: 65536, direct: false, space: Space::Reserved, device: true };
        BlockStore::new(medium, flush).unwrap()
    }

    /// Whether the first page of a file is in the page cache.
    fn is_cached(file: &File) -> bool {
        use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
        let mut resident = [0u8; 16];
        // SAFETY: a new mapping of 16 pages that the file has, which nothing accesses. It is
        // unmapped here. `resident` has a byte for each page.
        unsafe {
            let at = mmap(std::ptr::null_mut(), 65536, ProtFlags::READ, MapFlags::SHARED, file, 0)
                .unwrap();
            assert_eq!(libc::mincore(at, 65536, resident.as_mut_ptr()), 0);
            munmap(at, 65536).unwrap();
        }
        resident[0] & 1 == 1
    }

    #[test]
    fn t24_without_direct_io_a_log_is_read_from_its_device() {
        // Beside the test's program: the temporary directory is often a file system in memory.
        let program = std::env::current_exe().unwrap();
        let dir = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, [7; 65536]).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        assert!(is_cached(&file));
        // The pages of a file system in memory stay.
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        let stays = is_cached(&file);
        if stays {
            eprintln!("nothing was checked: the pages of {} stay in memory", path.display());
        }
        assert_eq!(std::fs::read(&path).unwrap(), [7; 65536]);
        assert!(is_cached(&file));
        for flush in [false, true] {
            let store = store(path.to_str().unwrap(), flush);
            let opened = BlockStore::open(store.medium, flush).unwrap();
            assert_eq!(is_cached(&opened.medium.file), stays, "flush: {flush}");
            assert_eq!(DevicePart(opened).read(0..4096).unwrap()[..], [7; 4096]);
        }
    }

    #[test]
    fn a_failure_names_the_device_and_the_cause() {
        for flush in [false, true] {
            let device = DevicePart(Arc::new(store("/dev/full", flush)));
            let durability = if flush { Durability::OnCompletion } else { Durability::AfterFlush };
            let error = device.begin_write(0, &[0; 4096], durability).unwrap_err();
            for part in ["/dev/full", "No space left"] {
                assert!(error.to_string().contains(part), "{error}");
            }
        }
    }

    #[test]
    fn runs_go_where_they_belong_with_and_without_flushes() {
        for flush in [false, true] {
            for can_dsync in [true, false] {
                // Two blocks that are near enough for one write, or so far apart that they are two.
                for blocks in [&[3][..], &[3, 9]] {
                    let file = tempfile::NamedTempFile::new().unwrap();
                    file.as_file().set_len(65536).unwrap();
                    let store = store(file.path().to_str().unwrap(), flush);
                    store.can_dsync.store(can_dsync, Ordering::Relaxed);
                    let mut part =
                        BlockPart::read(DevicePart(Arc::new(store)), 8192..65536).unwrap();
                    let mut expected = vec![0; 65536];
                    for &block in blocks {
                        part.write((block - 2) * 4096 + 64, &[block as u8; 128]);
                        expected[block * 4096 + 64..][..128].fill(block as u8);
                    }
                    part.fence().unwrap();
                    assert!(std::fs::read(file.path()).unwrap() == expected, "{flush} {blocks:?}");
                    let mut back = [0; 128];
                    part.read(4096 + 64, &mut back);
                    assert_eq!(back, [3; 128]);
                }
            }
        }
    }
}
