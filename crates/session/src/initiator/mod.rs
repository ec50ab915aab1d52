//! The initiator's side of a connection.

pub mod attach;
mod bring_up;
pub mod discover;
pub mod keep_alive;
pub mod known;
pub mod opening;
pub mod queue_pair;
#[cfg(test)]
mod script;
pub mod stream;
