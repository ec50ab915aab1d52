//! Devices on volumes of targets in this process.

mod crash;
mod nbd;
mod plain;
mod site;
