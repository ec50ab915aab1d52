//! Rio's extension of NVMe over Fabrics, version 1: the commands and fields that it adds.
//!
//! A target that has the extension reports this in the vendor area of Identify Controller
//! ([`Extension`]). The initiator never sets any of these fields in commands to other targets
//! (trap T17).
//!
//! * An **ordered request** is a Write, Write Zeroes or Flush command with Directive Type Fh
//!   (vendor specific). Its attribute is in command dwords that NVMe leaves free on namespaces
//!   without metadata and protection information ([`put_attribute`]). The paper used CDW12 19:16,
//!   which NVMe 2.x uses for CETYPE.
//! * **Claim**, **status**, **directory** and **release** are vendor specific admin commands about
//!   the owner of a volume, its generation, and its logs. **List** and **settle** are those of a recovery.
//! * **Order** is a vendor specific I/O command with the attribute of an ordered request and no data:
//!   the target only appends it to the log of the stream (engine `horae`).
//! * A Write to a drive that itself keeps an order names its place in that order ([`put_order`];
//!   engines `barrier` and `opimq`). Identify Namespace has the order that a drive keeps.
//! * **Bind** and **mark** are vendor specific I/O commands. Bind attaches a stream to a
//!   connection. Mark sends the released mark of the stream when no ordered request is due that
//!   carries the mark.
//!
//! docs/wire-format.md draws every byte.

use riopipe_order::attribute::Seq;
pub use riopipe_order::block_device::BLOCK_BYTES;

mod claim;
mod commands;
mod directory;
mod drive_order;
mod extension;
pub mod list;
mod ordered_request;
pub mod retry;
pub mod status;
mod volume_status;

pub use claim::{CLAIM_LEN, CLAIM_NAMESPACES_MAX, Claim, STREAMS_MAX, in_order};
pub use commands::{
    ADMIN_CLAIM, ADMIN_DIRECTORY, ADMIN_LIST, ADMIN_RELEASE, ADMIN_SETTLE, ADMIN_STATUS, IO_BIND,
    IO_LIST, IO_MARK, IO_ORDER, ListRequest, ReleaseRequest, bind_command, bind_resumes,
    bind_stream, claim_command, directory_command, discard_command, durable_command, list_command,
    list_request, mark_command, mark_keeps_entries, mark_of, order_command, own_list_command,
    release_command, release_request, resume_command, settle_command, status_command, volume_of,
};
pub use directory::{DIRECTORY_LEN, LogDirectory, LogVolume};
pub use drive_order::{
    NAMESPACE_MAGIC, NAMESPACE_OFFSET, SEQUENCE, drive_order_of, flush_before_of, order_of,
    put_drive_order, put_flush_before, put_order,
};
pub use extension::{EXTENSION_MAGIC, EXTENSION_OFFSET, EXTENSION_VERSION, Extension};
pub use ordered_request::{
    BadAttribute, DTYPE_ORDERED, OrderMetadata, attribute, is_ordered, order_metadata,
    put_attribute, put_prepared_block,
};
pub(crate) use ordered_request::{directive_type, without_attribute};
pub use volume_status::{STATUS_LEN, VolumeStatus};

/// The highest seq that is accepted from a peer. A stream that counts from 1 never comes near it,
/// and arithmetic on it never overflows (trap T18).
pub const SEQ_MAX: Seq = Seq(1 << 62);

/// The 16 bytes at `offset`.
pub(crate) fn array_at(bytes: &[u8], offset: usize) -> [u8; 16] {
    let mut array = [0; 16];
    array.copy_from_slice(&bytes[offset..offset + 16]);
    array
}

/// The largest transfer of a write with a place in an order, of a stream or of a drive, bytes. It
/// is smaller than the largest transfer of a target (MDTS), because such a write is never carried
/// out in pieces.
pub const ORDERED_BYTES_MAX: u32 = 1 << 20;

/// The little-endian number at `offset`.
pub(crate) fn u16_at(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes([bytes[offset], bytes[offset + 1]])
}

/// The little-endian number at `offset`.
pub(crate) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from(u16_at(bytes, offset)) | u32::from(u16_at(bytes, offset + 2)) << 16
}

/// The little-endian number at `offset`.
pub(crate) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from(u32_at(bytes, offset)) | u64::from(u32_at(bytes, offset + 4)) << 32
}
