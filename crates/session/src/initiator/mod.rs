//! The initiator's side of a connection.

pub mod association;
pub mod attach;
mod bring_up;
pub mod discover;
pub mod endpoint;
pub mod keep_alive;
pub mod known;
pub mod manager;
pub mod opening;
pub mod plain_device;
pub mod queue_pair;
pub mod reconnect;
#[cfg(test)]
mod script;
#[cfg(test)]
mod scripted_target;
pub mod stream;
pub mod stream_driver;
pub mod volume;
