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

use alloc::string::String;
use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq, StreamId, VolumeId};
pub use riopipe_order::block_device::BLOCK_BYTES;
use riopipe_order::entry::Position;
use riopipe_order::log_region::{LogKind, MemberNamespace};
use riopipe_order::probe::{self, Plant};

pub mod list;
pub mod retry;
pub mod status;

/// The highest seq that is accepted from a peer. Counting from 1 never comes near it, and
/// arithmetic on it never wraps (T18).
pub const SEQ_MAX: Seq = Seq(1 << 62);
/// The version of the extension that this crate implements.
pub const EXTENSION_VERSION: u16 = 1;
/// The offset of the extension's record in Identify Controller (its vendor area, bytes 3072–4095).
pub const EXTENSION_OFFSET: usize = 3072;
/// The record's magic number.
pub const EXTENSION_MAGIC: [u8; 8] = *b"RIOPIPE\x01";

/// Admin: claim a volume (host → controller data, [`Claim`]). Bits 1:0 of an opcode are the
/// direction of data (NVMe base, figure "Opcode").
pub const ADMIN_CLAIM: u8 = 0xc1;
/// Admin: the target's state of a volume (controller → host data, [`VolumeStatus`]); the
/// volume's id in CDW12–15, the length in CDW10 (bytes).
pub const ADMIN_STATUS: u8 = 0xc2;
/// Admin: release a volume (no data); the volume's id in CDW12–15, CDW10 bit 0 = forget it and
/// free its log partitions.
pub const ADMIN_RELEASE: u8 = 0xc4;
/// Admin: one page of a partition's live entries (controller → host data, [`list::Page`]): the
/// volume's id in CDW12–15, CDW10 the length (bytes), CDW11 the stream, CDW2–3 the position from
/// which to list (64 bits).
pub const ADMIN_LIST: u8 = 0xc6;
/// Admin: record the recovered seq of each stream (host → controller data, [`list::Settle`]).
pub const ADMIN_SETTLE: u8 = 0xc9;
/// I/O: bind this queue to a stream (no data): CDW10 stream, CDW11 generation, CDW12–15 volume,
/// CDW2–3 the released mark to start from (64 bits). CDW10 bit 31 = continue after a lost
/// connection with the content of the log (P7). The completion's dword 0 has the log slots
/// of the partition, dword 1 the target's incarnation.
pub const IO_BIND: u8 = 0x84;
/// I/O: a released mark alone (no data): CDW2–3 the mark (64 bits); CDW10 bit 0 = make it durable
/// before completing (a clean close, or a full log).
pub const IO_MARK: u8 = 0x88;
/// I/O: like [`ADMIN_LIST`], for the stream that the queue is bound to; CDW11–15 are not used.
pub const IO_LIST: u8 = 0x8a;
/// CDW10 of [`IO_BIND`]: continue with the content of the log.
const BIND_RESUME: u32 = 1 << 31;

/// Directive type "vendor specific", in CDW12 bits 23:20 of an ordered request.
pub const DTYPE_ORDERED: u32 = 0xf;

/// The extension's record in Identify Controller.
///
/// | byte | field |
/// |---|---|
/// | 0–7 | magic `RIOPIPE\x01` |
/// | 8–9 | version |
/// | 10 | log kind |
/// | 11 | reserved |
/// | 12–15 | incarnation of the target |
/// | 16–31 | log region's id |
/// | 32–47 | boot id of the target's machine |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// Version of the extension.
    pub version: u16,
    /// The log region's kind; `None` where the target has no ordering log: engine `rio` can't run
    /// there.
    pub log_kind: Option<LogKind>,
    /// The number of the target's incarnation.
    pub incarnation: u32,
    /// The log region's id.
    pub region: [u8; 16],
    /// The boot id of the machine the target runs on.
    pub boot: [u8; 16],
}

impl Extension {
    /// Writes the record into Identify Controller data (4096 bytes).
    pub fn put(&self, identify: &mut [u8]) {
        let r = &mut identify[EXTENSION_OFFSET..EXTENSION_OFFSET + 48];
        r[0..8].copy_from_slice(&EXTENSION_MAGIC);
        r[8..10].copy_from_slice(&self.version.to_le_bytes());
        r[10] = self.log_kind.map_or(0, |kind| kind as u8);
        r[11] = 0;
        r[12..16].copy_from_slice(&self.incarnation.to_le_bytes());
        r[16..32].copy_from_slice(&self.region);
        r[32..48].copy_from_slice(&self.boot);
    }

    /// Finds the record; `None` if the target doesn't have the extension, has another version of
    /// it, or reports a log kind that this version doesn't know (T17).
    #[must_use]
    pub fn find(identify: &[u8]) -> Option<Self> {
        let r = identify.get(EXTENSION_OFFSET..EXTENSION_OFFSET + 48)?;
        if r[0..8] != EXTENSION_MAGIC {
            return accepted_without_properties();
        }
        let version = u16::from_le_bytes([r[8], r[9]]);
        if version != EXTENSION_VERSION {
            return None;
        }
        let log_kind = match r[10] {
            0 => None,
            code => Some(LogKind::from_code(code)?),
        };
        Some(Self {
            version,
            log_kind,
            incarnation: u32_at(r, 12),
            region: array_at(r, 16),
            boot: array_at(r, 32),
        })
    }
}

/// The record of a target that reports none: `None`, since nothing may be assumed (T17).
fn accepted_without_properties() -> Option<Extension> {
    let (version, log_kind) = (EXTENSION_VERSION, Some(LogKind::Dax));
    let (incarnation, region, boot) = (1, [0; 16], [0; 16]);
    probe::planted(Plant::T17AssumeExtension).then_some(Extension {
        version,
        log_kind,
        incarnation,
        region,
        boot,
    })
}

/// Puts an attribute and the released mark into an ordered request (Write, Write Zeroes, Flush).
///
/// | dword | bits | field |
/// |---|---|---|
/// | CDW2 | 31:0 | seq, low 32 bits |
/// | CDW3 | 31:0 | ordinal |
/// | CDW4 | 31:0 | released mark, low 32 bits |
/// | CDW5 | 15:0 | num |
/// | CDW5 | 31:16 | index |
/// | CDW12 | 23:20 | directive type = Fh |
/// | CDW13 | 31:24 | span − 1 (directive specific) |
/// | CDW13 | 23:16 | flags (directive specific) |
/// | CDW13 | 15:8 | member |
/// | CDW14–15 | | tag |
///
/// LBA, length and kind are the command's own.
#[inline]
pub fn put_attribute(sqe: &mut Sqe, attribute: &Attribute, released: Seq) {
    // Two dwords at a time: data that is stored in small pieces and copied as a whole right after
    // makes the processor wait.
    let counts = u32::from(attribute.num) | u32::from(attribute.index) << 16;
    let extra = u32::from(attribute.member.0) << 8
        | u32::from(attribute.flags.0) << 16
        | u32::from(attribute.span - 1) << 24;
    sqe.set_dwords(2, attribute.seq.wire(), attribute.ordinal);
    sqe.set_dwords(4, released.wire(), counts);
    sqe.set_dwords(12, sqe.dword(12) & !(0xf << 20) | DTYPE_ORDERED << 20, extra);
    sqe.set_dwords(14, attribute.tag as u32, (attribute.tag >> 32) as u32);
}

/// Whether a command carries an attribute. Other commands have a directive type elsewhere or not at
/// all: bind, for example, has a volume's id in these bits.
#[must_use]
#[inline]
pub fn is_ordered(sqe: &Sqe) -> bool {
    use riopipe_nvme::command::opcode::{FLUSH, WRITE, WRITE_ZEROES};
    matches!(sqe.opcode(), WRITE | WRITE_ZEROES | FLUSH)
        && sqe.dword(12) >> 20 & 0xf == DTYPE_ORDERED
}

/// The plain request that an ordered one would be.
#[must_use]
pub(crate) fn without_attribute(sqe: &Sqe) -> Sqe {
    let mut plain = *sqe;
    plain.set_dword(12, sqe.dword(12) & !(0xf << 20));
    plain
}

/// Reads the attribute and the released mark of an ordered request, widening both numbers next to
/// `near`, the highest seq seen on the stream (T5).
///
/// # Errors
/// [`BadAttribute`] names the field that is not valid (T18).
#[inline]
pub fn attribute(sqe: &Sqe, near: Seq) -> Result<(Attribute, Seq), BadAttribute> {
    use riopipe_nvme::command::opcode;
    let kind = match sqe.opcode() {
        opcode::WRITE => Kind::Write,
        opcode::WRITE_ZEROES => Kind::Discard,
        opcode::FLUSH => Kind::Flush,
        _ => return Err(BadAttribute::Opcode),
    };
    let (counts, extra) = (sqe.dword(5), sqe.dword(13));
    let flags = Flags((extra >> 16) as u8);
    let attribute = Attribute {
        seq: match probe::planted(Plant::T5NotWidened) {
            false => Seq::widen(sqe.dword(2), near),
            true => Seq(u64::from(sqe.dword(2))),
        },
        span: (extra >> 24) as u16 + 1,
        num: counts as u16,
        index: (counts >> 16) as u16,
        ordinal: sqe.dword(3),
        member: Member((extra >> 8) as u8),
        kind,
        flags,
        lba: if matches!(kind, Kind::Flush) { 0 } else { sqe.slba() },
        blocks: if matches!(kind, Kind::Flush) { 0 } else { sqe.nlb() },
        tag: u64::from(sqe.dword(14)) | u64::from(sqe.dword(15)) << 32,
    };
    if !flags.are_known(kind) {
        return Err(BadAttribute::Flags);
    }
    if attribute.seq == Seq::ZERO {
        return Err(BadAttribute::Seq);
    }
    if attribute.num == 0 || attribute.index >= attribute.num {
        return Err(BadAttribute::Index);
    }
    if attribute.span > 1 && attribute.num != 1 {
        return Err(BadAttribute::Span);
    }
    if attribute.kind == Kind::Flush && !attribute.is_flush() {
        return Err(BadAttribute::Flags);
    }
    let released = Seq::widen(sqe.dword(4), attribute.seq);
    // A group that is not submitted yet can't be released.
    if released >= attribute.seq {
        return Err(BadAttribute::Released);
    }
    Ok((attribute, released))
}

/// The field of an ordered request that is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadAttribute {
    /// Only Write, Write Zeroes and Flush may be ordered.
    #[error("a command that cannot be ordered carries an attribute")]
    Opcode,
    /// Unknown flags, or a flush entry without the flush flag.
    #[error("unknown or contradictory flags")]
    Flags,
    /// Seq 0 is before the first group.
    #[error("seq 0")]
    Seq,
    /// `index` is not below `num`.
    #[error("an index that is not below num")]
    Index,
    /// A span over several groups in a group of several entries.
    #[error("an entry that spans groups in a group of several entries")]
    Span,
    /// A released mark at or beyond the request's own seq.
    #[error("a released mark that is not before the request's own seq")]
    Released,
}

/// The data of a claim (4096 bytes on the wire).
///
/// | byte | field |
/// |---|---|
/// | 0–15 | volume id |
/// | 16–19 | generation |
/// | 20 | flags: bit 0 create, bit 1 take over, bit 2 no log needed, bit 3 resume, bit 4 give up |
/// | 21 | number of namespaces |
/// | 22–23 | streams |
/// | 24–27 | log slots per stream (create; 0 = what fits) |
/// | 28–31 | lease, ms |
/// | 32– | for each namespace: its id (4 bytes), its member number in the volume (1), 0 (3) |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The volume.
    pub volume: VolumeId,
    /// The owner's generation: higher than any on record (T8).
    pub generation: u32,
    /// Make log partitions for a volume that the target doesn't know yet.
    pub create: bool,
    /// The content of this log for the volume is given up: the log records that, then partitions
    /// that can't be read are begun anew; with `create`, all of them (T26).
    pub give_up: bool,
    /// Fence an owner that is connected (T8).
    pub take_over: bool,
    /// The volume's engine needs no ordering log (`none`, `sync`): owned, but without partitions.
    pub unlogged: bool,
    /// The same owner comes back after its association or the target died: `generation` is the one
    /// on record, and the content of the logs stays (P7).
    pub resume: bool,
    /// The number of streams of the volume, at most 1024.
    pub streams: u16,
    /// The number of log slots per stream when creating; 0 lets the target choose.
    pub slots: u32,
    /// The time for which the volume stays the owner's, and guarded, when the target loses its
    /// association, milliseconds (T25).
    pub lease_ms: u32,
    /// The member namespaces on this target, with the volume's numbers for them.
    pub members: Vec<MemberNamespace>,
}

/// Length of a [`Claim`] on the wire, bytes.
pub const CLAIM_LEN: usize = 4096;
/// The most namespaces that one claim names.
pub const CLAIM_NAMESPACES_MAX: usize = 255;
/// The most streams of a volume.
pub const STREAMS_MAX: u16 = 1024;

/// The namespaces, as members 0, 1, … in this order.
#[must_use]
pub fn in_order(nsids: impl IntoIterator<Item = u32>) -> Vec<MemberNamespace> {
    let numbered = nsids.into_iter().enumerate();
    numbered.map(|(i, nsid)| MemberNamespace { member: Member(i as u8), nsid }).collect()
}

impl Claim {
    /// A claim of a volume that the target knows and that has no owner: it gives up no log, takes
    /// over from no owner, and requests no lease.
    #[must_use]
    pub const fn plain(
        volume: VolumeId,
        generation: u32,
        streams: u16,
        members: Vec<MemberNamespace>,
    ) -> Self {
        Self {
            volume,
            generation,
            create: false,
            give_up: false,
            take_over: false,
            unlogged: false,
            resume: false,
            streams,
            slots: 0,
            lease_ms: 0,
            members,
        }
    }

    /// The bytes of the claim on the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        debug_assert!(self.members.len() <= CLAIM_NAMESPACES_MAX);
        let mut d = alloc::vec![0; CLAIM_LEN];
        d[0..16].copy_from_slice(&self.volume.0);
        d[16..20].copy_from_slice(&self.generation.to_le_bytes());
        d[20] = u8::from(self.create)
            | u8::from(self.take_over) << 1
            | u8::from(self.unlogged) << 2
            | u8::from(self.resume) << 3
            | u8::from(self.give_up) << 4;
        d[21] = self.members.len() as u8;
        d[22..24].copy_from_slice(&self.streams.to_le_bytes());
        d[24..28].copy_from_slice(&self.slots.to_le_bytes());
        d[28..32].copy_from_slice(&self.lease_ms.to_le_bytes());
        for (i, place) in self.members.iter().enumerate() {
            let at = 32 + 8 * i;
            d[at..at + 4].copy_from_slice(&place.nsid.to_le_bytes());
            d[at + 4] = place.member.0;
        }
        d
    }

    /// Reads a claim; `None` if it is short or not valid (T18).
    #[must_use]
    pub fn decode(d: &[u8]) -> Option<Self> {
        if d.len() < CLAIM_LEN || d[20] & !0b1_1111 != 0 {
            return None;
        }
        let streams = u16::from_le_bytes([d[22], d[23]]);
        if streams == 0 || streams > STREAMS_MAX || d[21] == 0 {
            return None;
        }
        Some(Self {
            volume: VolumeId(array_at(d, 0)),
            generation: u32_at(d, 16),
            create: d[20] & 1 != 0,
            give_up: d[20] & 16 != 0,
            take_over: d[20] & 2 != 0,
            unlogged: d[20] & 4 != 0,
            resume: d[20] & 8 != 0,
            streams,
            slots: u32_at(d, 24),
            lease_ms: u32_at(d, 28),
            members: (0..usize::from(d[21]))
                .map(|i| MemberNamespace {
                    nsid: u32_at(d, 32 + 8 * i),
                    member: Member(d[36 + 8 * i]),
                })
                .collect(),
        })
    }
}

/// A target's state of a volume, as the status command returns it.
///
/// | byte | field |
/// |---|---|
/// | 0–15 | volume id |
/// | 16–19 | generation on record |
/// | 20 | flags: bit 0 known, bit 1 owned, bit 2 unrecovered, bit 3 log lost, bit 4 unlogged, bit 5 owned by the asker, bit 6 in-place lists kept, bit 7 log damaged |
/// | 22–23 | streams |
/// | 24–27 | log slots per stream |
/// | 28–31 | log entries that wait for recovery |
/// | 32–255 | host NQN of the owner, NUL padded |
/// | 256–8447 | released mark of each stream, 8 bytes each |
/// | 8448–8451 | rest of the lease of an owner whose connection is lost, ms |
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeStatus {
    /// The requested volume.
    pub volume: VolumeId,
    /// The highest generation on record; 0 if none.
    pub generation: u32,
    /// Whether the target knows the volume at all.
    pub known: bool,
    /// Whether it has an owner that is connected, or whose lease runs.
    pub owned: bool,
    /// The rest of the lease of an owner whose connection is lost, milliseconds; 0 if the owner is
    /// connected (T25).
    pub lease_left_ms: u32,
    /// Whether the owner is the association that asks.
    pub own: bool,
    /// Whether the log holds entries beyond the released marks that no recovery has settled.
    pub unrecovered: bool,
    /// Whether the log holds lists of in-place updates that wait to be acknowledged (T9).
    pub kept: bool,
    /// Whether the log is of another boot and is not valid (T19).
    pub log_lost: bool,
    /// Whether that is because partitions of it can't be read: the initiator that claims the volume
    /// can give them up (T26).
    pub damaged: bool,
    /// Whether the volume has no log here.
    pub unlogged: bool,
    /// The number of streams of the volume.
    pub streams: u16,
    /// The number of log slots per stream.
    pub slots: u32,
    /// The number of entries in its partitions at rest that no recovery has settled.
    pub live_entries: u32,
    /// Host NQN of the owner, empty if none; cut at 223 bytes.
    pub owner: String,
    /// The released mark of each stream.
    pub released: Vec<Seq>,
}

/// Length of a [`VolumeStatus`] on the wire, bytes.
pub const STATUS_LEN: usize = LEASE_AT + 16;
/// The offset at which the marks of a [`VolumeStatus`] end and the rest of the lease begins, bytes.
const LEASE_AT: usize = 256 + 8 * STREAMS_MAX as usize;

impl VolumeStatus {
    /// The bytes of the status on the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut d = alloc::vec![0; STATUS_LEN];
        d[0..16].copy_from_slice(&self.volume.0);
        d[16..20].copy_from_slice(&self.generation.to_le_bytes());
        d[20] = u8::from(self.known)
            | u8::from(self.owned) << 1
            | u8::from(self.unrecovered) << 2
            | u8::from(self.log_lost) << 3
            | u8::from(self.unlogged) << 4
            | u8::from(self.own) << 5
            | u8::from(self.kept) << 6
            | u8::from(self.damaged) << 7;
        d[22..24].copy_from_slice(&self.streams.to_le_bytes());
        d[24..28].copy_from_slice(&self.slots.to_le_bytes());
        d[28..32].copy_from_slice(&self.live_entries.to_le_bytes());
        let owner = &self.owner.as_bytes()[..self.owner.len().min(223)];
        d[32..32 + owner.len()].copy_from_slice(owner);
        for (i, seq) in self.released.iter().take(usize::from(STREAMS_MAX)).enumerate() {
            d[256 + 8 * i..264 + 8 * i].copy_from_slice(&seq.0.to_le_bytes());
        }
        d[LEASE_AT..LEASE_AT + 4].copy_from_slice(&self.lease_left_ms.to_le_bytes());
        d
    }

    /// Reads a status; `None` if it is short or not valid (T18).
    #[must_use]
    pub fn decode(d: &[u8]) -> Option<Self> {
        if d.len() < STATUS_LEN {
            return None;
        }
        let streams = u16::from_le_bytes([d[22], d[23]]);
        if streams > STREAMS_MAX {
            return None;
        }
        // Only an unreachable owner, and so not the asker, has a lease that runs.
        let lease_left_ms = u32_at(d, LEASE_AT);
        if lease_left_ms > 0 && (d[20] & 2 == 0 || d[20] & 32 != 0) {
            return None;
        }
        let owner = &d[32..256];
        let end = owner.iter().position(|b| *b == 0).unwrap_or(owner.len());
        Some(Self {
            volume: VolumeId(array_at(d, 0)),
            generation: u32_at(d, 16),
            known: d[20] & 1 != 0,
            owned: d[20] & 2 != 0,
            unrecovered: d[20] & 4 != 0,
            log_lost: d[20] & 8 != 0,
            damaged: d[20] & 128 != 0,
            unlogged: d[20] & 16 != 0,
            own: d[20] & 32 != 0,
            kept: d[20] & 64 != 0,
            streams,
            slots: u32_at(d, 24),
            live_entries: u32_at(d, 28),
            lease_left_ms,
            owner: String::from_utf8_lossy(&owner[..end]).into_owned(),
            released: (0..usize::from(streams)).map(|i| Seq(u64_at(d, 256 + 8 * i))).collect(),
        })
    }
}

/// The status command for a volume; its data is [`STATUS_LEN`] bytes.
#[must_use]
pub fn status_command(volume: VolumeId) -> Sqe {
    let mut sqe = volume_command(ADMIN_STATUS, volume);
    sqe.set_dword(10, STATUS_LEN as u32);
    sqe
}

/// The claim command; its data is [`Claim::encode`].
#[must_use]
pub fn claim_command() -> Sqe {
    let mut sqe = Sqe::new(ADMIN_CLAIM, 0);
    sqe.set_dword(10, CLAIM_LEN as u32);
    sqe
}

/// The release command: releases the volume, or makes the target forget it.
#[must_use]
pub fn release_command(volume: VolumeId, forget: bool) -> Sqe {
    let mut sqe = volume_command(ADMIN_RELEASE, volume);
    sqe.set_dword(10, u32::from(forget));
    sqe
}

/// The bind command: this queue carries `stream` from now on, starting after `released`.
#[must_use]
pub fn bind_command(volume: VolumeId, stream: StreamId, generation: u32, released: Seq) -> Sqe {
    let mut sqe = volume_command(IO_BIND, volume);
    put_mark(&mut sqe, released);
    sqe.set_dword(10, u32::from(stream.0));
    sqe.set_dword(11, generation);
    sqe
}

/// The bind command of an owner that comes back: the stream continues with the content of the log,
/// and the owner replays requests that are not durable (P7).
#[must_use]
pub fn resume_command(volume: VolumeId, stream: StreamId, generation: u32, released: Seq) -> Sqe {
    let mut sqe = bind_command(volume, stream, generation, released);
    sqe.set_dword(10, sqe.dword(10) | BIND_RESUME);
    sqe
}

/// Whether a bind command continues with the content of the log, and the stream that it names.
#[must_use]
pub fn bind_of(sqe: &Sqe) -> (bool, StreamId) {
    (sqe.dword(10) & BIND_RESUME != 0, StreamId(sqe.dword(10) as u16))
}

/// The list command of the admin queue; `len` bytes, at most [`list::PAGE_BYTES_MAX`].
#[must_use]
pub fn list_command(volume: VolumeId, stream: StreamId, from: Position, len: usize) -> Sqe {
    let mut sqe = volume_command(ADMIN_LIST, volume);
    put_mark(&mut sqe, Seq(from.0));
    sqe.set_dword(10, len as u32);
    sqe.set_dword(11, u32::from(stream.0));
    sqe
}

/// The list command of a bound I/O queue.
#[must_use]
pub fn own_list_command(from: Position, len: usize) -> Sqe {
    let mut sqe = Sqe::new(IO_LIST, 0);
    put_mark(&mut sqe, Seq(from.0));
    sqe.set_dword(10, len as u32);
    sqe
}

/// The fields of a list command: the stream (of the admin command), the first position, the length
/// in bytes.
#[must_use]
pub fn list_of(sqe: &Sqe) -> (StreamId, Position, usize) {
    (StreamId(sqe.dword(11) as u16), Position(mark_of(sqe).0), sqe.dword(10) as usize)
}

/// The settle command; its data is [`list::Settle::encode`].
#[must_use]
pub fn settle_command() -> Sqe {
    let mut sqe = Sqe::new(ADMIN_SETTLE, 0);
    sqe.set_dword(10, list::SETTLE_LEN as u32);
    sqe
}

/// The mark command: the stream is released up to `released`.
#[must_use]
pub fn mark_command(released: Seq, durable: bool) -> Sqe {
    let mut sqe = Sqe::new(IO_MARK, 0);
    put_mark(&mut sqe, released);
    sqe.set_dword(10, u32::from(durable));
    sqe
}

/// The volume id in CDW12–15 of a vendor command.
#[must_use]
pub fn volume_of(sqe: &Sqe) -> VolumeId {
    let mut id = [0; 16];
    for i in 0..4 {
        id[4 * i..4 * i + 4].copy_from_slice(&sqe.dword(12 + i).to_le_bytes());
    }
    VolumeId(id)
}

/// The 64-bit mark in CDW2–3 of bind and mark.
#[must_use]
pub fn mark_of(sqe: &Sqe) -> Seq {
    Seq(u64::from(sqe.dword(2)) | u64::from(sqe.dword(3)) << 32)
}

fn put_mark(sqe: &mut Sqe, mark: Seq) {
    sqe.set_dword(2, mark.0 as u32);
    sqe.set_dword(3, (mark.0 >> 32) as u32);
}

fn volume_command(opcode: u8, volume: VolumeId) -> Sqe {
    let mut sqe = Sqe::new(opcode, 0);
    for i in 0..4 {
        sqe.set_dword(12 + i, u32_at(&volume.0, 4 * i));
    }
    sqe
}

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

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Attribute {
        Attribute {
            seq: Seq(0x1_0000_0007),
            span: 1,
            num: 3,
            index: 2,
            ordinal: 9,
            member: Member(4),
            kind: Kind::Write,
            flags: Flags::BOUNDARY.with(Flags::FLUSH),
            lba: 0x1234_5678_9abc,
            blocks: 8,
            tag: 0xdead_beef_0000_0001,
        }
    }

    #[test]
    fn an_attribute_survives_the_wire() {
        let a = sample();
        let mut sqe = Sqe::write(1, a.lba, a.blocks);
        assert!(!is_ordered(&sqe));
        put_attribute(&mut sqe, &a, Seq(0xffff_fff0));
        assert!(is_ordered(&sqe));
        assert_eq!(sqe.dword(12) >> 16 & 0xf, 0, "CETYPE stays clear (T17)");
        assert_eq!(attribute(&sqe, Seq(0xffff_ffff)), Ok((a, Seq(0xffff_fff0))));
    }

    #[test]
    fn an_attribute_has_its_place_in_the_wire_format() {
        let a = Attribute {
            seq: Seq(0x1_8293_a4b5),
            num: 0x9182,
            index: 0x8070,
            ordinal: 0xa1b2_c3d4,
            member: Member(0xe5),
            flags: Flags::BOUNDARY.with(Flags::IN_PLACE),
            tag: 0xf1e2_d3c4_b5a6_9788,
            ..sample()
        };
        let mut sqe = Sqe::write(1, a.lba, a.blocks);
        let length = sqe.dword(12);
        put_attribute(&mut sqe, &a, Seq(0x1_8293_a4b4));
        let dwords = [2, 3, 4, 5, 12, 13, 14, 15].map(|i| sqe.dword(i));
        let flags = u32::from(a.flags.0) << 16;
        assert_eq!(
            dwords,
            [
                0x8293_a4b5,
                0xa1b2_c3d4,
                0x8293_a4b4,
                0x8070_9182,
                length | 0xf << 20,
                0xe5 << 8 | flags,
                0xb5a6_9788,
                0xf1e2_d3c4
            ]
        );
        assert_eq!(attribute(&sqe, a.seq), Ok((a, Seq(0x1_8293_a4b4))));
        // Several groups in one entry, and the other kinds.
        let span = Attribute { span: 256, num: 1, index: 0, ..sample() };
        put_attribute(&mut sqe, &span, Seq(1 << 32));
        assert_eq!(sqe.dword(13) >> 24, 255);
        let write = Sqe::write(1, span.lba, span.blocks);
        let zeroes = Sqe::write_zeroes(1, span.lba, span.blocks, true);
        let flush = Attribute { kind: Kind::Flush, lba: 0, blocks: 0, ..span };
        let discard = Attribute { kind: Kind::Discard, ..span };
        for (mut sqe, a) in [(write, span), (zeroes, discard), (Sqe::flush(1), flush)] {
            put_attribute(&mut sqe, &a, Seq(1 << 32));
            assert!(is_ordered(&sqe));
            assert_eq!(attribute(&sqe, a.seq), Ok((a, Seq(1 << 32))));
        }
    }

    #[test]
    fn every_vendor_status_means_something_else() {
        let meanings: Vec<_> = (0x701..=0x717).map(|s| status::meaning(Status(s))).collect();
        for (i, meaning) in meanings.iter().enumerate() {
            assert!(meaning.is_some() && !meanings[..i].contains(meaning), "{meaning:?}");
        }
        let found = status::meaning(status::OWNED.with_dnr());
        assert_eq!(found, meanings[0], "with DNR and without");
        for other in [0x700, 0x718, 0x001, 0x280] {
            assert_eq!(status::meaning(Status(other)), None);
        }
    }

    #[test]
    fn t18_attributes_that_are_not_valid_are_refused() {
        let refused = |change: fn(&mut Attribute), released: u64| {
            let mut a = sample();
            change(&mut a);
            let mut sqe = Sqe::write(1, a.lba, a.blocks);
            put_attribute(&mut sqe, &a, Seq(released));
            attribute(&sqe, Seq(0x1_0000_0000)).unwrap_err()
        };
        assert_eq!(refused(|a| a.index = 3, 1 << 32), BadAttribute::Index);
        assert_eq!(refused(|a| a.num = 0, 1 << 32), BadAttribute::Index);
        assert_eq!(refused(|a| a.span = 2, 1 << 32), BadAttribute::Span);
        assert_eq!(refused(|a| a.flags = Flags(0x80), 1 << 32), BadAttribute::Flags);
        assert_eq!(refused(|a| a.flags = Flags(Flags::KNOWN + 1), 1 << 32), BadAttribute::Flags);
        assert_eq!(refused(|a| a.flags = Flags::PLACE, 1 << 32), BadAttribute::Flags);
        assert_eq!(refused(|_| (), 0x1_0000_0007), BadAttribute::Released);
        assert_eq!(refused(|_| (), 0x1_0000_0008), BadAttribute::Released);
        let mut sqe = Sqe::flush(1);
        let plain = Attribute { flags: Flags::BOUNDARY, ..sample() };
        put_attribute(&mut sqe, &plain, Seq(1 << 32));
        assert_eq!(attribute(&sqe, plain.seq), Err(BadAttribute::Flags), "a flush entry flushes");
        let mut sqe = Sqe::write(1, 0, 1);
        put_attribute(&mut sqe, &Attribute { seq: Seq::ZERO, ..sample() }, Seq::ZERO);
        assert_eq!(attribute(&sqe, Seq::ZERO), Err(BadAttribute::Seq));
        let mut sqe = Sqe::read(1, 0, 1);
        put_attribute(&mut sqe, &sample(), Seq(1));
        assert!(!is_ordered(&sqe));
        assert_eq!(attribute(&sqe, Seq(1)), Err(BadAttribute::Opcode));
        let bind = bind_command(VolumeId([0xff; 16]), StreamId(1), 1, Seq(0));
        assert!(!is_ordered(&bind), "a volume id is no directive");
    }

    #[test]
    fn claim_and_status_survive_the_wire() {
        let claim = Claim {
            volume: VolumeId([7; 16]),
            generation: 3,
            create: true,
            give_up: false,
            take_over: false,
            unlogged: false,
            resume: true,
            streams: 24,
            slots: 512,
            lease_ms: 45_000,
            members: alloc::vec![
                MemberNamespace { member: Member(0), nsid: 1 },
                MemberNamespace { member: Member(5), nsid: 9 },
            ],
        };
        assert_eq!(Claim::decode(&claim.encode()), Some(claim));
        let status = VolumeStatus {
            volume: VolumeId([7; 16]),
            generation: 3,
            known: true,
            owned: true,
            lease_left_ms: 44_999,
            streams: 2,
            slots: 512,
            owner: "nqn.2014-08.org.nvmexpress:uuid:x".into(),
            released: alloc::vec![Seq(5), Seq(1 << 40)],
            ..VolumeStatus::default()
        };
        assert_eq!(VolumeStatus::decode(&status.encode()), Some(status));
        assert_eq!(Claim::decode(&[0; CLAIM_LEN]), None);
        assert_eq!(VolumeStatus::decode(&[0; 10]), None);
    }

    #[test]
    fn every_flag_of_claim_and_status_is_its_own() {
        let claim = Claim {
            volume: VolumeId(core::array::from_fn(|i| i as u8)),
            generation: 0x8192_a3b4,
            create: false,
            give_up: false,
            take_over: false,
            unlogged: false,
            resume: false,
            streams: STREAMS_MAX,
            slots: 0x8877_6655,
            lease_ms: 0x9796_9594,
            members: in_order((0..CLAIM_NAMESPACES_MAX as u32).map(|i| 0x8070_6000 + i)),
        };
        let good = claim.encode();
        assert_eq!(good[16..28], [0xb4, 0xa3, 0x92, 0x81, 0, 255, 0, 4, 0x55, 0x66, 0x77, 0x88]);
        assert_eq!(good[28..32], [0x94, 0x95, 0x96, 0x97]);
        assert_eq!(good[32 + 8..32 + 16], [1, 0x60, 0x70, 0x80, 1, 0, 0, 0]);
        let flags: [fn(&mut Claim); 5] = [
            |c| c.create = true,
            |c| c.take_over = true,
            |c| c.unlogged = true,
            |c| c.resume = true,
            |c| c.give_up = true,
        ];
        for (bit, set) in flags.iter().enumerate() {
            let mut claim = claim.clone();
            set(&mut claim);
            let bytes = claim.encode();
            assert_eq!(bytes[20], 1 << bit);
            assert_eq!(Claim::decode(&bytes), Some(claim));
        }
        let refused = |at: usize, bytes: &[u8]| {
            let mut bad = good.clone();
            bad[at..at + bytes.len()].copy_from_slice(bytes);
            assert_eq!(Claim::decode(&bad), None, "{at}: {bytes:x?}");
        };
        refused(20, &[32]); // an unknown flag
        refused(21, &[0]); // no namespaces
        refused(22, &[0, 0]); // no streams
        refused(22, &[1, 4]); // too many
        assert_eq!(Claim::decode(&good), Some(claim));
        assert_eq!(Claim::decode(&good[..CLAIM_LEN - 1]), None);

        let status = VolumeStatus {
            volume: VolumeId(core::array::from_fn(|i| i as u8)),
            generation: 0x8192_a3b4,
            streams: STREAMS_MAX,
            slots: 0x8877_6655,
            live_entries: 0x9988_7766,
            owner: "n".repeat(223),
            released: (0..u64::from(STREAMS_MAX)).map(|i| Seq(i << 50 | i)).collect(),
            ..VolumeStatus::default()
        };
        let good = status.encode();
        assert_eq!(good[28..33], [0x66, 0x77, 0x88, 0x99, b'n']);
        let flags: [fn(&mut VolumeStatus); 8] = [
            |s| s.known = true,
            |s| s.owned = true,
            |s| s.unrecovered = true,
            |s| s.log_lost = true,
            |s| s.unlogged = true,
            |s| s.own = true,
            |s| s.kept = true,
            |s| s.damaged = true,
        ];
        for (bit, set) in flags.iter().enumerate() {
            let mut status = status.clone();
            set(&mut status);
            let bytes = status.encode();
            assert_eq!(bytes[20], 1 << bit);
            assert_eq!(VolumeStatus::decode(&bytes), Some(status));
        }
        let long = VolumeStatus { owner: "n".repeat(300), ..status.clone() };
        assert_eq!(VolumeStatus::decode(&long.encode()), Some(status.clone()), "cut");
        let more = VolumeStatus { streams: STREAMS_MAX + 1, ..status };
        assert_eq!(VolumeStatus::decode(&more.encode()), None);
        assert_eq!(VolumeStatus::decode(&good[..STATUS_LEN - 1]), None);
    }

    #[test]
    fn command_fields_have_their_places_in_the_wire_format() {
        let volume = VolumeId(core::array::from_fn(|i| 0x80 + i as u8));
        let mark = Seq(0x8182_8384_8586_8788);
        let bind = bind_command(volume, StreamId(0x8102), 0x9192_9394, mark);
        let dwords = [2, 3, 10, 11, 12, 13, 14, 15].map(|i| bind.dword(i));
        let volume_dwords = [0x8382_8180, 0x8786_8584, 0x8b8a_8988, 0x8f8e_8d8c];
        assert_eq!(dwords[..4], [0x8586_8788, 0x8182_8384, 0x8102, 0x9192_9394]);
        assert_eq!(dwords[4..], volume_dwords);
        assert_eq!((bind_of(&bind), mark_of(&bind)), ((false, StreamId(0x8102)), mark));
        assert_eq!(volume_of(&bind), volume);
        let again = resume_command(volume, StreamId(0x8102), 0x9192_9394, mark);
        assert_eq!((again.dword(10), bind_of(&again)), (0x8000_8102, (true, StreamId(0x8102))));
        let list = list_command(volume, StreamId(0x8102), Position(mark.0), 0x8000_1000);
        assert_eq!(list_of(&list), (StreamId(0x8102), Position(mark.0), 0x8000_1000));
        assert_eq!(volume_of(&list), volume);
        let own = own_list_command(Position(mark.0), 4096);
        assert_eq!((own.opcode(), own.dword(10), mark_of(&own)), (IO_LIST, 4096, mark));
        let status = status_command(volume);
        assert_eq!((status.opcode(), status.dword(10)), (ADMIN_STATUS, STATUS_LEN as u32));
        assert_eq!(volume_of(&status), volume);
        for flag in [false, true] {
            let release = release_command(volume, flag);
            assert_eq!((release.opcode(), release.dword(10)), (ADMIN_RELEASE, flag.into()));
            let mark_sqe = mark_command(mark, flag);
            assert_eq!((mark_sqe.opcode(), mark_sqe.dword(10)), (IO_MARK, flag.into()));
            assert_eq!((volume_of(&release), mark_of(&mark_sqe)), (volume, mark));
        }
        assert_eq!((claim_command().opcode(), claim_command().dword(10)), (ADMIN_CLAIM, 4096));
        assert_eq!((settle_command().opcode(), settle_command().dword(10)), (ADMIN_SETTLE, 4096));
    }

    #[test]
    fn the_extension_is_found_only_where_it_is() {
        let extension = Extension {
            version: EXTENSION_VERSION,
            log_kind: Some(LogKind::File),
            incarnation: 0x8192_a3b4,
            region: core::array::from_fn(|i| 0x10 + i as u8),
            boot: core::array::from_fn(|i| 0x20 + i as u8),
        };
        let mut identify = [0; 4096];
        assert_eq!(Extension::find(&identify), None);
        let some = [LogKind::File, LogKind::Dax, LogKind::Block, LogKind::Pci].map(Some);
        for (log_kind, code) in core::iter::once(None).chain(some).zip(0..) {
            let extension = Extension { log_kind, ..extension };
            extension.put(&mut identify);
            assert_eq!(identify[EXTENSION_OFFSET + 10], code);
            assert_eq!(Extension::find(&identify), Some(extension));
        }
        identify[EXTENSION_OFFSET + 10] = 5;
        assert_eq!(Extension::find(&identify), None, "an unknown kind of log");
        assert_eq!(Extension::find(&identify[..EXTENSION_OFFSET + 47]), None);
        extension.put(&mut identify);
        identify[EXTENSION_OFFSET + 8] = 9;
        assert_eq!(Extension::find(&identify), None, "another version is not used (T17)");
    }
}
