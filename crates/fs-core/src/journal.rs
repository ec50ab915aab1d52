//! The main journal, in the format of jbd2: the kernel and e2fsck replay a journal that RioFS has
//! written, and RioFS one that they have written.
//!
//! The journal is a file of the file system. Its first block has its superblock; the others are a
//! ring with transactions. A transaction is a revoke block for each some hundred revoked blocks, a
//! descriptor block for each some hundred blocks of metadata, with their copies behind it, and a
//! commit block. A transaction counts once its commit block is there.
//!
//! - [`format`](mod@format) has the blocks byte by byte;
//! - [`recovery`] finds the transactions after a crash;
//! - [`writer`] turns a transaction into blocks;
//! - [`main_journal`] is the state of the journal of a mounted file system.

pub mod format;
pub mod main_journal;
pub mod recovery;
mod ring;
pub mod writer;

#[cfg(test)]
mod tests;

pub use format::{JournalError, JournalSuperblock};
pub use main_journal::{Checkpoint, Commit, MainJournal};
pub use recovery::{Recovery, recover};
