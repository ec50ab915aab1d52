//! Devices on volumes of targets in this process.

mod crash;
mod plain;
mod site;
