//! The stores in which ordering logs rest: [`mapped`] memory, written by stores, and [`block`]
//! devices, written block by block.

pub mod block;
pub mod mapped;
