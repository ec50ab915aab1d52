//! Tests of the whole crate, on images that mke2fs makes and e2fsck checks.

mod barriers;
mod bounds;
mod calls;
mod crash;
mod damage;
mod delayed;
mod dir;
mod edit;
mod enumerate;
mod extents;
mod format;
mod fsx;
mod groups;
mod image;
mod journal;
mod kernel;
mod limits;
mod memory;
#[path = "enumerate/named.rs"]
mod named_crashes;
mod recovered;
#[path = "enumerate/sequences.rs"]
mod sequences;
mod states;
mod threads;
mod tree;
mod xattr;
