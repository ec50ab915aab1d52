//! A volume from the owner's side: opened, recovered, used by streams, made.
//!
//! - [`opening`]: from the addresses of its members to an open volume; [`creation`] makes one;
//! - [`recovery`]: the times of one attempt to recover something; [`streams`]: such an attempt over
//!   the targets of an open volume, and the release of the volume;
//! - [`state`]: which streams are open, over which queues, and from where each goes on;
//! - [`block_ownership`]: the ownership checker: whether the caller keeps its duties between streams (T11,
//!   T15);
//! - [`members`], [`ranges`]: the layout that follows from the drives and their labels.

pub mod block_ownership;
mod calls;
pub mod creation;
pub mod error;
mod labels;
pub mod members;
pub mod opening;
pub mod ranges;
pub mod recovery;
pub mod saving;
pub mod state;
pub mod streams;

pub use calls::Associations;
