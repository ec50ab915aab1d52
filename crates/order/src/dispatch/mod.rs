//! Two ways to keep order that need a drive which keeps order by itself
//! ([`write_order`](crate::write_order)). The host dispatches requests so that the drive learns the
//! order.
//!
//! - [`epoch_scheduler`]: one queue for all streams, with barrier reassignment (Barrier-Enabled IO
//!   Stack, FAST '18, §3.3).
//! - [`epoch_pinning`] and [`epoch_numbers`]: one queue for each core, with streams that move between
//!   cores, and epochs of two streams (OPIMQ, FAST '25).
//!
//! The target's half, for both, is [`arrivals`]: it submits the writes so that the drive learns the
//! same order.

pub mod arrivals;
pub mod epoch_numbers;
pub mod epoch_pinning;
pub mod epoch_scheduler;
