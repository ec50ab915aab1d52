//! The file system under a scheduler that decides at each lock and each atomic number which thread
//! goes on (`shuttle`). Each scenario is small, and runs with many schedules.
//!
//! `cargo test -p riopipe-fs-core --features shuttle --test shuttle`

#[expect(dead_code, reason = "the test `it` uses the rest")]
#[path = "../it/enumerate.rs"]
mod enumerate;
#[expect(dead_code, reason = "the test `it` uses the rest")]
#[path = "../it/image.rs"]
mod image;

mod all;
mod barriers;
mod cache;
mod explore;
mod failure;
mod files;
mod names;
mod pages;
mod shared_block;
mod space;
mod sticky;
mod storage;
mod unmount;
