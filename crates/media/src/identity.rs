//! The difference between a drive and its copies (the inode of its file, or the identifier of its
//! device), and the places where the identity of a drive can be stored.
//!
//! The decision which identity a drive gets is in `riopipe_session::drive_identity`.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use riopipe_order::block_device::BLOCK_BYTES;
use rustix::fs::{SeekFrom, XattrFlags, fgetxattr, fsetxattr, fstatfs, fstatvfs, seek};
use rustix::io::Errno;

use crate::buf::AlignedBuf;

/// The name of the attribute.
const ATTRIBUTE: &str = "user.rio.id";
/// The largest content of the attribute that is read, bytes.
const ATTRIBUTE_BYTES_MAX: usize = 4096;

/// Identifiers of emulated devices, in parts: the same in every virtual machine, or on every machine
/// that serves drives with the iSCSI target tgt.
const SHARED_IDENTIFIERS: [&str; 4] = ["QEMU", "nvme.1b36-", "eui.525400", "t10.IET "];

/// That which a copy of a drive does not share with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Physical {
    /// The drive is in a file.
    File {
        /// The number of the file's inode.
        inode: u64,
        /// The time at which the file was made, ns since 1970; 0 if the file system does not
        /// report it.
        birth_ns: u64,
        /// The id of the file system, which its copy by files does not have; 0 if it is not known.
        file_system: u64,
    },
    /// The drive is a block device that reports a unique identifier, such as a WWID.
    Device(String),
    /// The drive is a block device without a unique identifier.
    Nameless,
}

/// The attribute of a file that has the identity of the drive in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attribute {
    /// Its content.
    Content(Vec<u8>),
    /// The file does not have the attribute.
    Absent,
    /// The file system stores no attributes of this kind.
    Unsupported,
}

/// The file or block device of a drive, for the drive's identity.
#[derive(Clone, Copy, Debug)]
pub struct Carrier<'a> {
    file: &'a File,
}

impl<'a> Carrier<'a> {
    pub(crate) fn new(file: &'a File) -> Self {
        Self { file }
    }

    /// That which a copy of the drive does not share with it.
    ///
    /// # Errors
    /// The file can't be inspected.
    pub fn physical(self) -> io::Result<Physical> {
        let metadata = self.file.metadata()?;
        if metadata.file_type().is_block_device() {
            let device = metadata.rdev();
            let (major, minor) = (libc::major(device), libc::minor(device));
            let directory = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
            return Ok(device_identifier(&directory).map_or(Physical::Nameless, Physical::Device));
        }
        let birth = metadata.created().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let birth_ns = birth.and_then(|time| u64::try_from(time.as_nanos()).ok()).unwrap_or(0);
        let file_system = file_system_id(self.file);
        Ok(Physical::File { inode: metadata.ino(), birth_ns, file_system })
    }

    /// The identity that is stored in the file's attribute.
    ///
    /// # Errors
    /// The attribute can't be read.
    pub fn attribute(self) -> io::Result<Attribute> {
        let mut content = vec![0; ATTRIBUTE_BYTES_MAX];
        match fgetxattr(self.file, ATTRIBUTE, content.as_mut_slice()) {
            Ok(len) => {
                content.truncate(len);
                Ok(Attribute::Content(content))
            }
            Err(Errno::NODATA) => Ok(Attribute::Absent),
            Err(Errno::NOTSUP | Errno::PERM) => Ok(Attribute::Unsupported),
            Err(error) => Err(error.into()),
        }
    }

    /// Stores an identity in the file's attribute, durably. Returns whether the file can have the
    /// attribute. If not, nothing was stored: the file system has no such attributes, or no space
    /// for one.
    ///
    /// # Errors
    /// The attribute can't be written.
    pub fn set_attribute(self, content: &[u8]) -> io::Result<bool> {
        match fsetxattr(self.file, ATTRIBUTE, content, XattrFlags::empty()) {
            Ok(()) => self.file.sync_all().map(|()| true),
            Err(Errno::NOTSUP | Errno::PERM | Errno::NOSPC | Errno::DQUOT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads blocks of the drive, past its queues. Only before the drive is in use.
    ///
    /// # Errors
    /// The blocks can't be read, or the drive is too small.
    pub fn read(self, lba: u64, blocks: usize) -> io::Result<AlignedBuf> {
        let mut buf = AlignedBuf::zeroed(blocks * BLOCK_BYTES);
        self.file.read_exact_at(&mut buf, lba * BLOCK_BYTES as u64)?;
        Ok(buf)
    }

    /// Writes a block of the drive that begins with `bytes`, the rest zero, durably. Past the
    /// drive's queues: only before the drive is in use.
    ///
    /// # Errors
    /// The block can't be written.
    pub fn write_block(self, lba: u64, bytes: &[u8]) -> io::Result<()> {
        let mut buf = AlignedBuf::zeroed(BLOCK_BYTES);
        buf[..bytes.len()].copy_from_slice(bytes);
        self.file.write_all_at(&buf, lba * BLOCK_BYTES as u64)?;
        self.file.sync_all()
    }

    /// Whether something may have been written to the drive. Reserved space is not content.
    #[must_use]
    pub fn has_content(self) -> bool {
        !matches!(seek(self.file, SeekFrom::Data(0)), Err(Errno::NXIO))
    }
}

/// The id of the file system that has this file, if it is a hash of a UUID that is stored in the file
/// system; else 0. Other file systems have an id that follows from the number of their device, which
/// another file system may have later. They report the time at which a file was made.
fn file_system_id(file: &File) -> u64 {
    /// The type of ext2, ext3 and ext4.
    const EXT: u64 = 0xef53;
    let is_ext = fstatfs(file).is_ok_and(|status| status.f_type as u64 == EXT);
    if is_ext { fstatvfs(file).map_or(0, |status| status.f_fsid) } else { 0 }
}

/// The unique identifier of the block device with this directory in sysfs, if it has one. A
/// partition has that of its disk and its own start.
fn device_identifier(directory: &Path) -> Option<String> {
    let read = |name: &str| {
        let text = std::fs::read_to_string(directory.join(name)).ok()?;
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        (!text.is_empty()).then_some(text)
    };
    if read("partition").is_some() {
        let start = read("start")?;
        // The directory is a link; the one above it is that of the disk.
        let disk = std::fs::canonicalize(directory).ok()?;
        return Some(format!("{} from {start}", device_identifier(disk.parent()?)?));
    }
    // The serial number of a virtio disk (`serial`) does not count: operators choose it freely.
    let known = ["wwid", "device/wwid", "dm/uuid", "md/uuid", "device/serial", "device/cid"];
    let is_unique = |text: &String| SHARED_IDENTIFIERS.iter().all(|shared| !text.contains(shared));
    // The serial number of a device whose WWID is not unique is not unique either.
    known.iter().find_map(|name| read(name)).filter(is_unique)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(files: &[(&str, &str)]) -> Option<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        device_identifier(&folder.path().join("disk"))
    }

    #[test]
    fn a_device_has_the_identifier_that_its_hardware_reports() {
        assert_eq!(device(&[("disk/wwid", "eui.0025388b\n")]).as_deref(), Some("eui.0025388b"));
        let padded =
            [("disk/device/wwid", "t10.ATA   Disk  S1\n"), ("disk/device/serial", "other")];
        assert_eq!(device(&padded).as_deref(), Some("t10.ATA Disk S1"));
        assert_eq!(device(&[("disk/device/serial", "\n")]), None);
        let serial = ("disk/device/serial", "QM00001");
        let emulated = [("disk/wwid", "t10.QEMU HARDDISK drive-scsi0"), serial];
        assert_eq!(device(&emulated), None, "the same in each virtual machine");
        assert_eq!(device(&[("disk/device/wwid", "t10.IET     00010001"), serial]), None);
        assert_eq!(device(&[("disk/serial", "data")]), None, "an operator chose it");
    }

    #[test]
    fn a_partition_is_named_by_its_disk_and_its_start() {
        let folder = tempfile::tempdir().unwrap();
        let partition = folder.path().join("disk/part");
        std::fs::create_dir_all(&partition).unwrap();
        std::fs::write(partition.join("partition"), "2").unwrap();
        std::fs::write(partition.join("start"), "2048\n").unwrap();
        let link = folder.path().join("8:2");
        std::os::unix::fs::symlink(&partition, &link).unwrap();
        assert_eq!(device_identifier(&link), None);
        std::fs::write(folder.path().join("disk/wwid"), "naa.5").unwrap();
        assert_eq!(device_identifier(&link).as_deref(), Some("naa.5 from 2048"));
    }

    #[test]
    fn a_file_is_recognised_after_a_move_and_reserved_space_is_no_content() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drive");
        let spec = format!("file:{},size=64K", path.display());
        let moved = folder.path().join("moved");
        let drive = crate::open_drive(&spec).unwrap();
        let carrier = drive.carrier().unwrap();
        assert!(!carrier.has_content());
        let physical = carrier.physical().unwrap();
        let takes_attribute = carrier.set_attribute(b"id").unwrap();
        carrier.write_block(2, b"block").unwrap();
        assert!(carrier.has_content());
        drop(drive);
        std::fs::rename(&path, &moved).unwrap();
        std::fs::copy(&moved, &path).unwrap();
        let open = |path: &Path| crate::open_drive(&format!("file:{}", path.display())).unwrap();
        let (drive, copy) = (open(&moved), open(&path));
        let (carrier, copy) = (drive.carrier().unwrap(), copy.carrier().unwrap());
        assert_eq!(carrier.physical().unwrap(), physical);
        assert_ne!(copy.physical().unwrap(), physical);
        if takes_attribute {
            assert_eq!(carrier.attribute().unwrap(), Attribute::Content(b"id".into()));
            assert_eq!(copy.attribute().unwrap(), Attribute::Absent);
        }
        assert_eq!(copy.read(2, 1).unwrap()[..6], *b"block\0");
    }
}
