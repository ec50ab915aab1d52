//! The ext4 on-disk format. Numbers are little endian; the kernel's documentation calls the
//! structures `ext4_super_block`, `ext4_group_desc`, `ext4_inode` and so on.

pub(crate) mod bytes;
pub mod checksum;
pub mod features;
pub mod group_desc;
pub mod inode;
pub mod layout;
pub mod orphan_file;
pub mod superblock;
