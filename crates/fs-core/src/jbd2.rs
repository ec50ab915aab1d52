//! The main journal, in the format of jbd2: the kernel and e2fsck replay what RioFS has written,
//! and RioFS what the kernel has written.

pub mod format;
pub mod main_journal;
pub mod recovery;
pub mod writer;

pub use main_journal::{Checkpoint, Commit, MainJournal};
