//! The file under a drive or a log, found without opening it: whether opening would create it,
//! whether that could succeed, and whether two specifications name the same file.

use std::ffi::OsStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::fstatvfs;

use crate::drive_spec::DriveSpec;
use crate::error::OpenError;
use crate::log::spec::LogSpec;
use crate::medium::parent_directory;
use crate::pci::SYSFS;

/// The file or device that a specification names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediumPlace {
    path: String,
    /// The size in bytes that a new file would get.
    size: Option<u64>,
    /// Whether the space of a new file is reserved.
    reserves: bool,
}

/// The file or device that the specification of a drive names; `None` for a drive in memory.
///
/// # Errors
/// [`OpenError::Spec`].
pub fn place_of_drive(spec: &str) -> Result<Option<MediumPlace>, OpenError> {
    let (path, size, reserves) = match DriveSpec::parse(spec)? {
        DriveSpec::Memory { .. } | DriveSpec::ModelInMemory { .. } => return Ok(None),
        DriveSpec::File { path, size, sparse, .. } => (path, size, !sparse),
        DriveSpec::Device { path, .. } => (path, None, false),
        DriveSpec::ModelInFile { path, size, .. } => (path, size, true),
    };
    Ok(Some(MediumPlace { path: path.into_owned(), size, reserves }))
}

/// The file or device that the specification of a log names; `None` for a log in memory.
///
/// # Errors
/// [`OpenError::Spec`].
pub fn place_of_log(spec: &str) -> Result<Option<MediumPlace>, OpenError> {
    let (path, size) = match LogSpec::parse(spec)? {
        LogSpec::Memory { .. } => return Ok(None),
        LogSpec::Mapped { path, size, .. } | LogSpec::Blocks { path, size } => (path, size),
        LogSpec::Device { path, .. } => (path, None),
        LogSpec::DriveMemory { address } => {
            let directory = address.directory(Path::new(SYSFS));
            (directory.to_string_lossy().into_owned().into(), None)
        }
    };
    Ok(Some(MediumPlace { path: path.into_owned(), size, reserves: true }))
}

/// The file that opening `spec`, of a drive or of a log, would create: the specification has a size,
/// and the file does not exist or is empty. `None` also for a specification that is wrong, which
/// opening it reports.
#[must_use]
pub fn file_to_create(spec: &str) -> Option<MediumPlace> {
    let place = place_of_drive(spec).or_else(|_| place_of_log(spec)).ok()??;
    place.would_be_created().then_some(place)
}

/// Whether opening the file at `path` with `size` would create the file, or fill an empty one.
pub(crate) fn would_create(path: &str, size: Option<u64>) -> bool {
    size.is_some() && (is_missing(path) || is_empty_file(path))
}

fn is_missing(path: &str) -> bool {
    std::fs::metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

fn is_empty_file(path: &str) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() == 0)
}

/// The identity of a file: two names with the same one are one file.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Identity {
    File {
        device: u64,
        inode: u64,
    },
    /// A block device has the same number under every name.
    Device(u64),
    /// The file does not exist: its directory, and its name there.
    Missing {
        directory: (u64, u64),
        name: PathBuf,
    },
}

impl MediumPlace {
    /// The path.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The size in bytes of the specification, which a new file would get.
    #[must_use]
    pub fn size(&self) -> Option<u64> {
        self.size
    }

    /// Whether opening the medium would create a file. An empty file counts as one that does not
    /// exist: it would get its size and its space.
    #[must_use]
    pub fn would_be_created(&self) -> bool {
        would_create(&self.path, self.size)
    }

    /// Whether the medium is a file that exists, and is empty.
    #[must_use]
    pub fn is_empty_file(&self) -> bool {
        is_empty_file(&self.path)
    }

    /// Whether both name the same file or device, also by a symbolic or a hard link. A file that
    /// can't be inspected is like no other.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let one = self.identity();
        one.is_some() && one == other.identity()
    }

    fn identity(&self) -> Option<Identity> {
        match std::fs::metadata(&self.path) {
            Ok(found) if found.file_type().is_block_device() => {
                Some(Identity::Device(found.rdev()))
            }
            Ok(found) => {
                let (device, inode) = device_and_inode(&found);
                Some(Identity::File { device, inode })
            }
            Err(_) => {
                let directory = std::fs::metadata(parent_directory(&self.path)).ok()?;
                let name: &OsStr = Path::new(&self.path).file_name()?;
                Some(Identity::Missing {
                    directory: device_and_inode(&directory),
                    name: name.into(),
                })
            }
        }
    }

    /// Checks that the file could be created, without creating it: its directory (or the file, if
    /// there is an empty one) can be written, and the file system takes files of its size and has
    /// the space for it.
    ///
    /// # Errors
    /// The first problem found.
    pub fn check_creation(&self) -> Result<(), OpenError> {
        let os_error =
            |source| OpenError::Os { path: self.path.clone(), doing: "create it", source };
        let Some(size) = self.size else { return Ok(()) };
        let directory = parent_directory(&self.path);
        let is_directory = std::fs::metadata(directory).map_err(os_error)?.is_dir();
        if !is_directory {
            return Err(os_error(io::ErrorKind::NotADirectory.into()));
        }
        let is_empty_file = self.is_empty_file();
        if is_empty_file {
            OpenOptions::new().read(true).write(true).open(&self.path).map_err(|source| {
                OpenError::Os { path: self.path.clone(), doing: "open it", source }
            })?;
        }
        // A file without a name, which is gone when it is closed.
        let nameless = OpenOptions::new()
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_TMPFILE)
            .open(directory);
        match nameless {
            Ok(file) => check_size(&file, size).map_err(os_error)?,
            // Not every file system has such files. A file that exists needs no new name.
            Err(error) if is_empty_file || is_without_nameless_files(&error) => {}
            Err(error) => return Err(os_error(error)),
        }
        let free = File::open(directory).and_then(|directory| free_bytes(&directory));
        match free {
            Ok(free) if self.reserves && free < size => Err(OpenError::Size {
                path: self.path.clone(),
                problem: format!(
                    "it would have {size} bytes, and its file system has {free} bytes free: choose \
                     a smaller size, or free space"
                ),
            }),
            _ => Ok(()),
        }
    }
}

fn device_and_inode(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// Checks that the file may have this size, which takes no space.
fn check_size(file: &File, size: u64) -> io::Result<()> {
    file.set_len(size)
}

fn is_without_nameless_files(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL))
}

/// The bytes that this user may take on the file system.
fn free_bytes(directory: &File) -> io::Result<u64> {
    let found = fstatvfs(directory)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drive(path: &Path, options: &str) -> MediumPlace {
        place_of_drive(&format!("file:{}{options}", path.display())).unwrap().unwrap()
    }

    #[test]
    fn only_a_missing_or_empty_file_with_a_size_is_created() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(path("here"), "x").unwrap();
        std::fs::write(path("empty"), "").unwrap();
        for (before, after) in [
            ("file:", ",size=1M"),
            ("dax:", ",size=1M"),
            ("block:", ",size=1M"),
            ("ssd:flash,size=1M,file=", ",seed=1"),
        ] {
            let of = |name: &str| file_to_create(&format!("{before}{}{after}", path(name)));
            assert_eq!(of("here"), None, "{before}");
            for (name, is_empty_file) in [("new", false), ("empty", true)] {
                let place = of(name).unwrap();
                assert_eq!((place.path(), place.is_empty_file()), (&*path(name), is_empty_file));
            }
        }
        assert_eq!(file_to_create(&format!("file:{}", path("empty"))), None, "it has no size");
        for spec in ["mem:1M", "ssd:flash,size=1M", "tape:9", "file:/no such file", "size=1M"] {
            assert_eq!(file_to_create(spec), None, "{spec}");
        }
    }

    #[test]
    fn one_file_has_many_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["a", "b"] {
            std::fs::write(path(name), [0; 4096]).unwrap();
        }
        std::os::unix::fs::symlink(path("a"), path("soft")).unwrap();
        std::fs::hard_link(path("a"), path("hard")).unwrap();
        std::os::unix::fs::symlink(folder.path(), path("folder")).unwrap();
        let a = drive(&path("a"), "");
        for same in ["a", "soft", "hard", "./a", "folder/a"] {
            assert!(a.is_same(&drive(&path(same), "")), "{same}");
        }
        assert!(!a.is_same(&drive(&path("b"), "")));
        // Files that do not exist yet.
        let new = drive(&path("new"), ",size=1M");
        assert!(new.is_same(&drive(&path("folder/new"), "")) && new.would_be_created());
        assert!(!new.is_same(&drive(&path("newer"), "")));
        assert!(!a.would_be_created() && !drive(&path("new"), "").would_be_created());
        let log = place_of_log(&format!("dax:{},size=1M", path("new").display())).unwrap();
        assert!(new.is_same(&log.unwrap()));
        assert_eq!(place_of_drive("mem:1M").unwrap(), None);
        assert_eq!(place_of_log("mem:1M").unwrap(), None);
        // A drive's memory is no file, and never the same as one.
        let memory = place_of_log("pci:00:04.0").unwrap().unwrap();
        assert!(!memory.would_be_created() && !memory.is_same(&a));
        assert_eq!(memory.path(), "/sys/bus/pci/devices/0000:00:04.0");
    }

    #[test]
    fn what_can_not_be_created_is_found_without_creating_it() {
        let folder = tempfile::tempdir().unwrap();
        let check = |options: &str| drive(&folder.path().join("d"), options).check_creation();
        check(",size=1M").unwrap();
        std::fs::write(folder.path().join("empty"), "").unwrap();
        let empty = drive(&folder.path().join("empty"), ",size=1M");
        empty.check_creation().unwrap();
        assert!(empty.is_empty_file(), "the check fills nothing");
        std::fs::remove_file(empty.path()).unwrap();
        // More than any file system has free, and more than any takes.
        check(",size=4194304T").unwrap_err();
        check(",size=4194304T,sparse").unwrap_err();
        let missing = drive(&folder.path().join("no/d"), ",size=1M").check_creation().unwrap_err();
        assert!(missing.to_string().contains("no/d: can't create it"), "{missing}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
