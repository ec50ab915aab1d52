//! Features: bits of the superblock that name the parts of the format that an image uses.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

/// The three words of feature bits in a superblock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Features that a program may ignore.
    pub compat: u32,
    /// Features that a program must know.
    pub incompat: u32,
    /// Features that a program must know before it writes.
    pub ro_compat: u32,
}

/// Features that a program may ignore.
pub mod compat {
    /// There is a journal.
    pub const HAS_JOURNAL: u32 = 0x4;
    /// Inodes may have extended attributes.
    pub const EXT_ATTR: u32 = 0x8;
    /// Blocks are reserved for a longer table of group descriptors.
    pub const RESIZE_INODE: u32 = 0x10;
    /// Directories may have a hash tree.
    pub const DIR_INDEX: u32 = 0x20;
    /// At most two groups have a copy of the superblock. Refused.
    pub const SPARSE_SUPER2: u32 = 0x200;
    /// The journal may have an area for fast commits. Refused.
    pub const FAST_COMMIT: u32 = 0x400;
    /// Orphans are listed in a file.
    pub const ORPHAN_FILE: u32 = 0x1000;
}

/// Features that a program must know.
pub mod incompat {
    /// Directory entries have the type of the inode.
    pub const FILETYPE: u32 = 0x2;
    /// The journal must be replayed.
    pub const RECOVER: u32 = 0x4;
    /// Files have extent trees.
    pub const EXTENTS: u32 = 0x40;
    /// Block numbers may have more than 32 bits, and descriptors have 64 bytes.
    pub const IS_64BIT: u32 = 0x80;
    /// The bitmaps and inode tables of a group may lie in another one.
    pub const FLEX_BG: u32 = 0x200;
    /// The seed of metadata checksums is in the superblock.
    pub const CSUM_SEED: u32 = 0x2000;
    /// The file system is mounted by RioFS, or was when the machine stopped. The kernel and e2fsck
    /// would replay only the main journal and lose the rest; they don't know this bit, and refuse.
    /// No release of Linux uses the bit.
    pub const RIOFS_DIRTY: u32 = 0x4000_0000;
}

/// Features that a program must know before it writes.
pub mod ro_compat {
    /// Only some groups have a copy of the superblock.
    pub const SPARSE_SUPER: u32 = 0x1;
    /// Files may be larger than 2 GiB.
    pub const LARGE_FILE: u32 = 0x2;
    /// An inode may count its blocks in blocks instead of sectors.
    pub const HUGE_FILE: u32 = 0x8;
    /// Group descriptors have a checksum, and flags for parts that are not initialised.
    pub const GDT_CSUM: u32 = 0x10;
    /// A directory may have any number of subdirectories.
    pub const DIR_NLINK: u32 = 0x20;
    /// Inodes have fields after their first 128 bytes.
    pub const EXTRA_ISIZE: u32 = 0x40;
    /// All metadata has checksums.
    pub const METADATA_CSUM: u32 = 0x400;
    /// The orphan file has orphans.
    pub const ORPHAN_PRESENT: u32 = 0x1_0000;
}

/// How a mount takes a feature.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    Required,
    Accepted,
    Refused,
}
use Rule::{Accepted, Refused, Required};

/// Bit, name as in `mke2fs -O`, rule.
type Row = (u32, &'static str, Rule);

const COMPAT: &[Row] = &[
    (0x1, "dir_prealloc", Accepted),
    (0x2, "imagic_inodes", Accepted),
    (compat::HAS_JOURNAL, "has_journal", Required),
    (compat::EXT_ATTR, "ext_attr", Accepted),
    (compat::RESIZE_INODE, "resize_inode", Accepted),
    (compat::DIR_INDEX, "dir_index", Accepted),
    (compat::SPARSE_SUPER2, "sparse_super2", Refused),
    (compat::FAST_COMMIT, "fast_commit", Refused),
    (0x800, "stable_inodes", Accepted),
    (compat::ORPHAN_FILE, "orphan_file", Accepted),
];

const INCOMPAT: &[Row] = &[
    (0x1, "compression", Refused),
    (incompat::FILETYPE, "filetype", Required),
    (incompat::RECOVER, "needs_recovery", Accepted),
    (0x8, "journal_dev", Refused),
    (0x10, "meta_bg", Refused),
    (incompat::EXTENTS, "extent", Required),
    (incompat::IS_64BIT, "64bit", Accepted),
    (0x100, "mmp", Refused),
    (incompat::FLEX_BG, "flex_bg", Accepted),
    (0x400, "ea_inode", Refused),
    (0x1000, "dirdata", Refused),
    (incompat::CSUM_SEED, "metadata_csum_seed", Accepted),
    (0x4000, "large_dir", Refused),
    (0x8000, "inline_data", Refused),
    (0x1_0000, "encrypt", Refused),
    (0x2_0000, "casefold", Refused),
    (incompat::RIOFS_DIRTY, "riofs_dirty", Accepted),
];

const RO_COMPAT: &[Row] = &[
    (ro_compat::SPARSE_SUPER, "sparse_super", Required),
    (ro_compat::LARGE_FILE, "large_file", Required),
    (ro_compat::HUGE_FILE, "huge_file", Accepted),
    (ro_compat::GDT_CSUM, "uninit_bg", Accepted),
    (ro_compat::DIR_NLINK, "dir_nlink", Accepted),
    (ro_compat::EXTRA_ISIZE, "extra_isize", Required),
    (0x80, "snapshot", Refused),
    (0x100, "quota", Refused),
    (0x200, "bigalloc", Refused),
    (ro_compat::METADATA_CSUM, "metadata_csum", Accepted),
    (0x800, "replica", Refused),
    (0x1000, "read-only", Refused),
    (0x2000, "project", Refused),
    (0x4000, "shared_blocks", Refused),
    (0x8000, "verity", Refused),
    (ro_compat::ORPHAN_PRESENT, "orphan_present", Accepted),
];

/// The features because of which a file system can't be mounted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnsupportedFeatures {
    /// The image lacks these.
    pub missing: Vec<&'static str>,
    /// The image has these, which RioFS refuses.
    pub refused: Vec<&'static str>,
    /// The image has these bits, which RioFS does not know: `I24` is bit 24 of the incompatible
    /// ones, `R24` of the read-only compatible ones, as e2fsprogs names them with `FEATURE_`.
    pub unknown: Vec<String>,
}

impl Features {
    /// Checks that RioFS supports the features. Unknown bits of `compat` are accepted, since a
    /// program may ignore them.
    ///
    /// # Errors
    /// Features are missing, refused or unknown.
    pub fn check(self) -> Result<(), UnsupportedFeatures> {
        let mut bad = UnsupportedFeatures::default();
        for (bits, rows) in
            [(self.compat, COMPAT), (self.incompat, INCOMPAT), (self.ro_compat, RO_COMPAT)]
        {
            for &(bit, name, rule) in rows {
                match (rule, bits & bit != 0) {
                    (Required, false) => bad.missing.push(name),
                    (Refused, true) => bad.refused.push(name),
                    _ => {}
                }
            }
        }
        for (letter, bits, rows) in
            [('I', self.incompat, INCOMPAT), ('R', self.ro_compat, RO_COMPAT)]
        {
            for n in 0..u32::BITS {
                if bits & 1 << n != 0 && !rows.iter().any(|row| row.0 == 1 << n) {
                    bad.unknown.push(alloc::format!("{letter}{n}"));
                }
            }
        }
        if bad == UnsupportedFeatures::default() { Ok(()) } else { Err(bad) }
    }

    /// Whether a feature of [`compat`] is on.
    #[must_use]
    pub const fn has_compat(self, bit: u32) -> bool {
        self.compat & bit != 0
    }

    /// Whether a feature of [`incompat`] is on.
    #[must_use]
    pub const fn has_incompat(self, bit: u32) -> bool {
        self.incompat & bit != 0
    }

    /// Whether a feature of [`ro_compat`] is on.
    #[must_use]
    pub const fn has_ro_compat(self, bit: u32) -> bool {
        self.ro_compat & bit != 0
    }
}

impl fmt::Display for UnsupportedFeatures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        if !self.refused.is_empty() {
            write!(
                f,
                "RioFS does not support {}: make the file system with ",
                list(&self.refused)
            )?;
            write!(f, "mke2fs -O ^{}", self.refused.join(",^"))?;
            between = "; ";
        }
        if !self.missing.is_empty() {
            write!(f, "{between}RioFS needs {}: make the file system with ", list(&self.missing))?;
            write!(f, "mke2fs -O {}", self.missing.join(","))?;
            between = "; ";
        }
        if !self.unknown.is_empty() {
            write!(f, "{between}RioFS does not know the features ")?;
            for (n, name) in self.unknown.iter().enumerate() {
                write!(f, "{}FEATURE_{name}", if n == 0 { "" } else { ", " })?;
            }
            write!(f, ": dumpe2fs -h lists the features; make the file system without these")?;
        }
        Ok(())
    }
}

impl core::error::Error for UnsupportedFeatures {}

/// The names with commas, after the word for one or several.
fn list(names: &[&str]) -> String {
    let word = if names.len() == 1 { "the feature" } else { "the features" };
    alloc::format!("{word} {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use alloc::vec;

    fn plain() -> Features {
        Features {
            compat: compat::HAS_JOURNAL,
            incompat: incompat::FILETYPE | incompat::EXTENTS,
            ro_compat: ro_compat::SPARSE_SUPER | ro_compat::LARGE_FILE | ro_compat::EXTRA_ISIZE,
        }
    }

    #[test]
    fn the_least_image_and_every_accepted_feature_pass() {
        assert_eq!(plain().check(), Ok(()));
        let mut all = plain();
        for (word, rows) in [
            (&mut all.compat, COMPAT),
            (&mut all.incompat, INCOMPAT),
            (&mut all.ro_compat, RO_COMPAT),
        ] {
            *word |= rows.iter().filter(|row| row.2 != Refused).map(|row| row.0).sum::<u32>();
        }
        all.compat |= 0x8000_0000;
        assert_eq!(all.check(), Ok(()));
    }

    #[test]
    fn each_refusal_names_the_feature_and_the_remedy() {
        let mut features = plain();
        features.compat &= !compat::HAS_JOURNAL;
        features.ro_compat |= 0x200 | 1 << 24;
        features.incompat |= 0x100 | 1 << 25;
        let bad = features.check().expect_err("refused");
        assert_eq!(
            bad,
            UnsupportedFeatures {
                missing: vec!["has_journal"],
                refused: vec!["mmp", "bigalloc"],
                unknown: vec!["I25".into(), "R24".into()],
            }
        );
        assert_eq!(
            bad.to_string(),
            "RioFS does not support the features mmp, bigalloc: make the file system with mke2fs \
             -O ^mmp,^bigalloc; RioFS needs the feature has_journal: make the file system with \
             mke2fs -O has_journal; RioFS does not know the features FEATURE_I25, FEATURE_R24: \
             dumpe2fs -h lists the features; make the file system without these"
        );
    }
}
