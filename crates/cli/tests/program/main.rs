//! The program as a user starts it, with real targets on loopback.

mod addresses;
mod alerts;
mod faults;
mod foreign_content;
mod help;
mod identity;
mod known;
mod locks;
mod log_dump;
mod loss;
mod lost_log;
mod measure;
mod pages;
mod refusals;
mod replacing;
mod serve;
mod signals;
mod site;
mod stat;
mod storage_faults;
mod streams;
mod undone;
mod unread;
mod volume_life;
mod volume_stat;
mod volumes;
