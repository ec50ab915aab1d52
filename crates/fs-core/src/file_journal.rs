//! The file-level journals: what an `fsync` writes instead of a main commit (Rio §4.7).
//!
//! Each data stream has an *area* of blocks behind the main journal's log. An `fsync` writes one
//! [record](record::Record) there, on the inode's stream and after its data: the fields of the
//! inode, its changed extents, and the entries that lead to it. Records are logical. They contain
//! no image of a block that other inodes share.
//!
//! A record is *obsolete* when the main transaction that was running at its time is durable.
//! Recovery applies all others, in the order of their ids (`fs::recovery`).

pub mod area;
pub mod record;
pub mod table;
