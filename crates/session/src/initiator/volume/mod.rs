//! A volume from the owner's side: opened, recovered, used by streams, made.
//!
//! - [`opening`]: from the addresses of its members to an open volume; [`creation`] makes one;
//! - [`survey`]: the volumes of some targets; [`deletion`] deletes one;
//! - [`recovery`]: one attempt to recover a volume or streams, with its times; [`streams`]: such an
//!   attempt over the targets of an open volume, and the release of the volume;
//! - [`saving`], [`undone`]: the data that recovery zeroes, saved before and written back later;
//! - [`state`]: the open streams, their queues, and the group after which each stream continues;
//! - [`block_ownership`]: the ownership checker, which checks that the caller keeps its duties
//!   between streams (traps T11, T15);
//! - [`members`], [`ranges`]: the layout that follows from the drives and their labels.

pub mod block_ownership;
mod calls;
pub mod creation;
pub mod deletion;
pub mod error;
mod labels;
pub mod members;
pub mod opening;
pub mod ranges;
pub mod recovery;
pub mod saving;
pub mod state;
pub mod streams;
pub mod survey;
pub mod undone;

pub use calls::Associations;
