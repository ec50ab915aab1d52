//! Inodes.

use crate::block::BlockNo;

/// The length of `i_block`, in bytes: the root of the extent tree, the target of a short symbolic
/// link, or the number of a device.
pub const I_BLOCK_BYTES: usize = 60;

/// A time, in seconds and nanoseconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// Seconds; the format has 34 bits, from 1901 to 2446.
    pub seconds: i64,
    /// Nanoseconds, below 1,000,000,000.
    pub nanos: u32,
}

/// An inode as it is on the drive, decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskInode {
    /// Type and permissions (`i_mode`).
    pub mode: u16,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The size in bytes.
    pub size: u64,
    /// The time of the last access.
    pub atime: Time,
    /// The time of the last change of the inode.
    pub ctime: Time,
    /// The time of the last change of the data.
    pub mtime: Time,
    /// The time of creation.
    pub crtime: Time,
    /// The time of deletion, or the next inode of the orphan list.
    pub dtime: u32,
    /// The number of hard links.
    pub links: u16,
    /// The number of 512-byte sectors of all blocks of the inode.
    pub sectors: u64,
    /// `i_flags`; see [`InodeFlags`].
    pub flags: InodeFlags,
    /// Distinguishes the uses of an inode number.
    pub generation: u32,
    /// Changes with each change of the file.
    pub version: u64,
    /// The block of extended attributes; 0 if there is none.
    pub xattr_block: BlockNo,
    /// `i_block`.
    pub i_block: [u8; I_BLOCK_BYTES],
    /// The bytes after the first 128 that fields use (`i_extra_isize`).
    pub extra_isize: u16,
    /// The project.
    pub projid: u32,
    /// The bytes of the inode from `128 + extra_isize` on: extended attributes. The first
    /// `128 - extra_isize` of the array are used.
    pub attributes: [u8; 128],
}

bitflags::bitflags! {
    /// Flags of an inode (`i_flags`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct InodeFlags: u32 {
        /// Writes are synchronous.
        const SYNC = 0x8;
        /// The file can't be changed.
        const IMMUTABLE = 0x10;
        /// The file can only be appended to.
        const APPEND = 0x20;
        /// No dump.
        const NODUMP = 0x40;
        /// The time of access is not updated.
        const NOATIME = 0x80;
        /// The directory has a hash tree.
        const INDEX = 0x1000;
        /// File data goes through the journal.
        const JOURNAL_DATA = 0x4000;
        /// Changes of the directory are synchronous.
        const DIRSYNC = 0x1_0000;
        /// The directory is the top of a hierarchy, for the Orlov allocator.
        const TOPDIR = 0x2_0000;
        /// Blocks are counted in blocks instead of sectors.
        const HUGE_FILE = 0x4_0000;
        /// The inode has an extent tree.
        const EXTENTS = 0x8_0000;
        /// Other bits are kept.
        const _ = !0;
    }
}

/// The types of inodes: the upper bits of `mode`.
pub mod file_type {
    /// The bits of the type.
    pub const MASK: u16 = 0xf000;
    /// Named pipe.
    pub const FIFO: u16 = 0x1000;
    /// Character device.
    pub const CHARACTER: u16 = 0x2000;
    /// Directory.
    pub const DIRECTORY: u16 = 0x4000;
    /// Block device.
    pub const BLOCK: u16 = 0x6000;
    /// Regular file.
    pub const REGULAR: u16 = 0x8000;
    /// Symbolic link.
    pub const SYMLINK: u16 = 0xa000;
    /// Socket.
    pub const SOCKET: u16 = 0xc000;
}

impl DiskInode {
    /// An inode with every field zero, as a free one is.
    #[must_use]
    pub const fn zeroed() -> Self {
        const ZERO: Time = Time { seconds: 0, nanos: 0 };
        Self {
            mode: 0,
            uid: 0,
            gid: 0,
            size: 0,
            atime: ZERO,
            ctime: ZERO,
            mtime: ZERO,
            crtime: ZERO,
            dtime: 0,
            links: 0,
            sectors: 0,
            flags: InodeFlags::empty(),
            generation: 0,
            version: 0,
            xattr_block: BlockNo(0),
            i_block: [0; I_BLOCK_BYTES],
            extra_isize: 0,
            projid: 0,
            attributes: [0; 128],
        }
    }

    /// The type bits of the mode.
    #[must_use]
    pub const fn file_type(&self) -> u16 {
        self.mode & file_type::MASK
    }

    /// Whether this is a directory.
    #[must_use]
    pub const fn is_dir(&self) -> bool {
        self.file_type() == file_type::DIRECTORY
    }

    /// Whether this is a regular file.
    #[must_use]
    pub const fn is_regular(&self) -> bool {
        self.file_type() == file_type::REGULAR
    }

    /// Whether this is a symbolic link.
    #[must_use]
    pub const fn is_symlink(&self) -> bool {
        self.file_type() == file_type::SYMLINK
    }
}
