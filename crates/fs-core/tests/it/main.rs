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
mod failure;
mod format;
mod fsx;
mod groups;
mod hooked;
mod idle;
mod image;
mod journal;
mod kernel;
mod large;
mod limits;
mod many;
mod memory;
#[path = "enumerate/named.rs"]
mod named_crashes;
mod pages;
mod recovered;
#[path = "enumerate/sequences.rs"]
mod sequences;
mod states;
mod threads;
mod tree;
mod unmount;
mod xattr;
