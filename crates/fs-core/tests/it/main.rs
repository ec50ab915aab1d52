//! Tests of the whole crate, on images that mke2fs makes and e2fsck checks.

mod dir;
mod format;
mod groups;
mod image;
