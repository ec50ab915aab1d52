#![no_std]
//! TBD
extern crate alloc;
