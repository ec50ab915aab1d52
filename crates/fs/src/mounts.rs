//! The mounts of RioFS that this process sees, from `/proc/self/mountinfo`.
//!
//! No request is sent to the file system itself: it may be without a server, or wait for a target.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{UnmountFlags, unmount};

/// The type of the mounts.
pub(crate) const TYPE: &str = "fuse.riofs";
/// The kernel's list of mounts.
const MOUNTINFO: &str = "/proc/self/mountinfo";

/// A mount of RioFS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountPoint {
    /// The directory.
    pub directory: PathBuf,
    /// The volume, or the path of the image.
    pub source: OsString,
    /// The number of the device, as `major:minor`. No two mounts have the same at one time.
    pub device: String,
    /// The user that has mounted it.
    pub owner: u32,
}

impl MountPoint {
    /// All mounts of RioFS, the newest one last.
    ///
    /// # Errors
    /// The list can't be read.
    pub fn all() -> io::Result<Vec<Self>> {
        let list = fs::read(MOUNTINFO)?;
        Ok(list.split(|byte| *byte == b'\n').filter_map(Self::parse).collect())
    }

    /// The mount on a directory, the newest one if there are several.
    ///
    /// # Errors
    /// The list can't be read.
    pub fn on(directory: &Path) -> io::Result<Option<Self>> {
        let directory = absolute(directory)?;
        Ok(Self::all()?.into_iter().rfind(|mount| mount.directory == directory))
    }

    /// The mounts of a place: of a directory, of an image, or of a volume by its name.
    ///
    /// # Errors
    /// The list can't be read.
    pub fn of(place: &str) -> io::Result<Vec<Self>> {
        if let Some(mount) = Self::on(Path::new(place))? {
            return Ok(vec![mount]);
        }
        let mut mounts = Self::all()?;
        // A bind mount of it is the same file system.
        mounts.sort_by(|one, other| one.device.cmp(&other.device));
        mounts.dedup_by(|one, other| one.device == other.device);
        let image = fs::canonicalize(place).ok();
        mounts.retain(|mount| {
            mount.source == *place
                || image.as_ref().is_some_and(|image| mount.source == *image.as_os_str())
        });
        Ok(mounts)
    }

    /// Unmounts it. If programs use it, the error is [`io::ErrorKind::ResourceBusy`].
    ///
    /// # Errors
    /// The system refuses, or `fusermount3` is missing, by which users other than root unmount.
    pub fn unmount(&self) -> io::Result<()> {
        // Another process may have unmounted it, and may have another mount there now.
        if !self.is_there() {
            return Ok(());
        }
        if rustix::process::geteuid().is_root() {
            return Ok(unmount(&self.directory, UnmountFlags::empty())?);
        }
        match fusermount(&[], &self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(error),
            Err(_) if self.is_there() => Err(io::ErrorKind::ResourceBusy.into()),
            _ => Ok(()),
        }
    }

    /// Takes it out of the directory tree, also if programs use it or no process serves it.
    ///
    /// # Errors
    /// As [`unmount`](Self::unmount).
    pub fn take_off(&self) -> io::Result<()> {
        if !self.is_there() {
            return Ok(());
        }
        match rustix::process::geteuid().is_root() {
            true => Ok(unmount(&self.directory, UnmountFlags::DETACH)?),
            false => fusermount(&["-z"], &self.directory),
        }
    }

    fn is_there(&self) -> bool {
        let found = Self::on(&self.directory);
        found.is_ok_and(|found| found.is_some_and(|found| found.device == self.device))
    }

    /// Parses a line: `36 35 0:53 / /mnt rw,nosuid - fuse.riofs disk.img rw,user_id=0`, with any
    /// number of fields before the dash. `None`: another file system.
    fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let device = String::from_utf8(fields.nth(2)?.to_vec()).ok()?;
        let directory = fields.nth(1)?;
        let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
        if fields.next()? != TYPE.as_bytes() {
            return None;
        }
        let source = OsString::from_vec(unescape(fields.next()?));
        let options = String::from_utf8_lossy(fields.next()?);
        let owner = options.split(',').find_map(|option| option.strip_prefix("user_id="));
        Some(Self {
            directory: OsString::from_vec(unescape(directory)).into(),
            source,
            device,
            owner: owner?.parse().ok()?,
        })
    }
}

/// Unmounts by the program that users other than root need.
fn fusermount(options: &[&str], directory: &Path) -> io::Result<()> {
    let mut command = Command::new("fusermount3");
    let status = command.args(["-u", "-q"]).args(options).arg("--").arg(directory).status()?;
    match status.success() {
        true => Ok(()),
        false => Err(io::Error::other("fusermount3 -u has failed")),
    }
}

/// The path without symbolic links. The last component is not asked for: its file system may not
/// answer.
fn absolute(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => {
            let parent = fs::canonicalize(parent).unwrap_or_else(|_| parent.to_owned());
            let direct = parent.join(name);
            // A symbolic link to the directory. It is not on the file system itself.
            match fs::read_link(&direct) {
                Ok(_) => Ok(fs::canonicalize(&direct).unwrap_or(direct)),
                Err(_) => Ok(direct),
            }
        }
        _ => Ok(fs::canonicalize(&path).unwrap_or(path)),
    }
}

/// Spaces and others are octal numbers: `\040`.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, others)) = rest.split_first() {
        match rest {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', others @ ..] => {
                plain.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = others;
            }
            _ => {
                plain.push(byte);
                rest = others;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_mount() {
        let line = b"412 29 0:57 / /srv/my\\040files rw,nosuid,nodev,relatime shared:9 master:2 - \
            fuse.riofs /srv/disk,\\0401.img rw,user_id=1000,group_id=1000,default_permissions";
        let mount = MountPoint::parse(line).unwrap();
        assert_eq!(mount.directory, Path::new("/srv/my files"));
        assert_eq!(mount.source, "/srv/disk, 1.img");
        assert_eq!((mount.device.as_str(), mount.owner), ("0:57", 1000));
    }

    #[test]
    fn other_lines_are_no_mounts() {
        for line in [
            &b""[..],
            b"412 29",
            b"23 29 0:21 / /proc rw,nosuid shared:12 - proc proc rw",
            b"412 29 0:57 / /mnt rw - fuse.other /srv/disk.img rw,user_id=0,group_id=0",
            b"412 29 0:57 / /mnt rw - fuse.riofs /srv/disk.img",
        ] {
            assert_eq!(MountPoint::parse(line), None);
        }
    }

    #[test]
    fn octal_numbers_are_bytes() {
        assert_eq!(unescape(b"a\\040b\\134\\011\\303\\244\\9\\"), b"a b\\\t\xc3\xa4\\9\\");
    }
}
