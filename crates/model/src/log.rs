//! The stores of ordering logs: [`mapped`] memory, written word by word, and [`block`] devices,
//! written block by block.

pub mod block;
pub mod mapped;
