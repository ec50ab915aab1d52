//! Rio's extension of NVMe over Fabrics, version 1: the commands and fields that it adds.
//!
//! A target that has the extension reports it in the vendor area of Identify Controller
//! ([`Extension`]); none of these fields is ever set in commands to any other target (T17).
//!
//! * An **ordered request** is a Write, Write Zeroes or Flush command with Directive Type Fh
//!   (vendor specific) whose attribute travels in command dwords that NVMe leaves free on
//!   namespaces without metadata and protection information ([`put_attribute`]). The paper used
//!   CDW12 19:16, which NVMe 2.x gave to CETYPE.
//! * **Claim**, **status** and **release** are vendor specific admin commands about the owner of a
//!   volume, its generation, and the content of its logs.
//! * **Bind** and **mark** are vendor specific I/O commands. Bind attaches a stream to a
//!   connection. Mark sends the released mark of the stream when no other command is due that
//!   carries it.
//!
//! docs/wire-format.md draws every byte.

use riopipe_order::attribute::Seq;
pub use riopipe_order::block_device::BLOCK_BYTES;

mod claim;
mod commands;
mod extension;
pub mod list;
mod ordered_request;
pub mod retry;
pub mod status;
mod volume_status;

pub use claim::{CLAIM_LEN, CLAIM_NAMESPACES_MAX, Claim, STREAMS_MAX, in_order};
pub use commands::{
    ADMIN_CLAIM, ADMIN_LIST, ADMIN_RELEASE, ADMIN_SETTLE, ADMIN_STATUS, IO_BIND, IO_LIST, IO_MARK,
    bind_command, bind_resumes, bind_stream, claim_command, list_command, list_of, mark_command,
    mark_of, own_list_command, release_command, resume_command, settle_command, status_command,
    volume_of,
};
pub use extension::{EXTENSION_MAGIC, EXTENSION_OFFSET, EXTENSION_VERSION, Extension};
pub use ordered_request::{BadAttribute, DTYPE_ORDERED, attribute, is_ordered, put_attribute};
pub(crate) use ordered_request::{directive_type, without_attribute};
pub use volume_status::{STATUS_LEN, VolumeStatus};

/// The highest seq that is accepted from a peer. Counting from 1 never comes near it, and
/// arithmetic on it never wraps (T18).
pub const SEQ_MAX: Seq = Seq(1 << 62);

fn array_at(d: &[u8], at: usize) -> [u8; 16] {
    let mut a = [0; 16];
    a.copy_from_slice(&d[at..at + 16]);
    a
}

fn u32_at(d: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([d[at], d[at + 1], d[at + 2], d[at + 3]])
}

fn u64_at(d: &[u8], at: usize) -> u64 {
    u64::from(u32_at(d, at)) | u64::from(u32_at(d, at + 4)) << 32
}
