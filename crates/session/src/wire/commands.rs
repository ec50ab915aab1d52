//! The vendor specific commands of the extension: their opcodes, and functions that write and read
//! their fields.
//!
//! | command | queue | data | CDW2–3 | CDW10 | CDW11 | CDW12–15 |
//! |---|---|---|---|---|---|---|
//! | claim | admin | [`Claim`](super::Claim) to the target | | length | | |
//! | status | admin | [`VolumeStatus`](super::VolumeStatus) to the host | | length | | volume |
//! | directory | admin | [`LogDirectory`](super::LogDirectory) to the host | | length | | |
//! | release | admin | none | | bit 0 forget, bit 1 without owner | | volume |
//! | list | admin | [`list::Page`] to the host | position | length | stream | volume |
//! | settle | admin | [`list::Settle`] to the target | | length | | |
//! | bind | I/O | none | released mark | stream, bit 31 resume | generation | volume |
//! | mark | I/O | none | released mark | bit 0 durable, bit 1 keeps the entries | | |
//! | order | I/O | none | as in an ordered request | first block | first block | as in an ordered request, CDW13 7:0 kind |
//! | list | I/O | [`list::Page`] to the host | position | length | | |

use riopipe_nvme::command::Sqe;
use riopipe_order::attribute::{Kind, Seq, StreamId, VolumeId};
use riopipe_order::entry::Position;

use super::{CLAIM_LEN, DIRECTORY_LEN, STATUS_LEN, list, u32_at};

/// Admin: claim a volume. Bits 1:0 of each opcode are the direction of the data (NVMe Base, figure
/// "Opcode").
pub const ADMIN_CLAIM: u8 = 0xc1;
/// Admin: get the target's state of a volume.
pub const ADMIN_STATUS: u8 = 0xc2;
/// Admin: release a volume. With CDW10 bit 0, the target also forgets the volume and frees its log
/// partitions. With bit 1, too, a host may do that that is not the owner, if there is no owner.
pub const ADMIN_RELEASE: u8 = 0xc4;
/// Admin: get the volumes in the target's log, and the space in it.
pub const ADMIN_DIRECTORY: u8 = 0xca;
/// Admin: get one page of a partition's live entries, from the position in CDW2–3 on.
pub const ADMIN_LIST: u8 = 0xc6;
/// Admin: record the recovered seqs of streams.
pub const ADMIN_SETTLE: u8 = 0xc9;
/// I/O: bind this queue to a stream, which starts after the released mark in CDW2–3. With CDW10 bit
/// 31, the stream continues after a lost connection with the content of the log (promise P7). Dword
/// 0 of the completion is the number of log slots of the partition, dword 1 the target's
/// incarnation.
pub const IO_BIND: u8 = 0x84;
/// I/O: report the released mark in CDW2–3. With CDW10 bit 0, the mark must be durable before the
/// completion; this is used at a clean close, or if the log is full. With bit 1, the groups up to it
/// are durable and not released: the target records that in their entries, and keeps these. This
/// record is durable before the completion.
pub const IO_MARK: u8 = 0x88;
/// I/O: append the ordering metadata of a request to the log of the stream. The drive gets nothing.
/// With the completion the metadata is durable in the log. Except for the opcode and the kind
/// of the request in CDW13 7:0, the fields are those of an ordered request.
pub const IO_ORDER: u8 = 0x8c;
/// I/O: like [`ADMIN_LIST`], for the stream to which the queue is bound.
pub const IO_LIST: u8 = 0x8a;
/// CDW10 of [`IO_BIND`]: the stream continues with the content of the log.
const BIND_RESUME: u32 = 1 << 31;
/// CDW10 of [`ADMIN_RELEASE`]: the target also forgets the volume.
const RELEASE_FORGET: u32 = 1;
/// CDW10 of [`ADMIN_RELEASE`]: the volume has no owner. Only with [`RELEASE_FORGET`].
const RELEASE_WITHOUT_OWNER: u32 = 1 << 1;

/// The status command for a volume. Its data has [`STATUS_LEN`] bytes.
#[must_use]
pub fn status_command(volume: VolumeId) -> Sqe {
    let mut sqe = volume_command(ADMIN_STATUS, volume);
    sqe.set_dword(10, STATUS_LEN as u32);
    sqe
}

/// The claim command. Its data is made by [`Claim::encode`](super::Claim::encode).
#[must_use]
pub fn claim_command() -> Sqe {
    let mut sqe = Sqe::new(ADMIN_CLAIM, 0);
    sqe.set_dword(10, CLAIM_LEN as u32);
    sqe
}

/// The release command. With `forget`, the target also forgets the volume.
#[must_use]
pub fn release_command(volume: VolumeId, forget: bool) -> Sqe {
    let mut sqe = volume_command(ADMIN_RELEASE, volume);
    sqe.set_dword(10, if forget { RELEASE_FORGET } else { 0 });
    sqe
}

/// The release command of a host that is not the owner: the target forgets a volume that has no
/// owner.
#[must_use]
pub fn discard_command(volume: VolumeId) -> Sqe {
    let mut sqe = volume_command(ADMIN_RELEASE, volume);
    sqe.set_dword(10, RELEASE_FORGET | RELEASE_WITHOUT_OWNER);
    sqe
}

/// The fields of a release command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReleaseRequest {
    /// Whether the target also forgets the volume.
    pub forget: bool,
    /// Whether it forgets the volume although the sender is not the owner. The volume then must
    /// have no owner.
    pub without_owner: bool,
}

/// Reads the fields of a release command.
#[must_use]
pub fn release_request(sqe: &Sqe) -> ReleaseRequest {
    let has = |bit: u32| sqe.dword(10) & bit != 0;
    let forget = has(RELEASE_FORGET);
    ReleaseRequest { forget, without_owner: forget && has(RELEASE_WITHOUT_OWNER) }
}

/// The directory command. Its data has [`DIRECTORY_LEN`] bytes.
#[must_use]
pub fn directory_command() -> Sqe {
    let mut sqe = Sqe::new(ADMIN_DIRECTORY, 0);
    sqe.set_dword(10, DIRECTORY_LEN as u32);
    sqe
}

/// The bind command: the queue carries `stream` from now on. The stream starts after the group
/// `released`.
#[must_use]
pub fn bind_command(volume: VolumeId, stream: StreamId, generation: u32, released: Seq) -> Sqe {
    let mut sqe = volume_command(IO_BIND, volume);
    put_mark(&mut sqe, released);
    sqe.set_dword(10, u32::from(stream.0));
    sqe.set_dword(11, generation);
    sqe
}

/// The bind command of an owner that comes back: the stream continues with the content of the log,
/// and the owner replays the requests that are not durable (promise P7).
#[must_use]
pub fn resume_command(volume: VolumeId, stream: StreamId, generation: u32, released: Seq) -> Sqe {
    let mut sqe = bind_command(volume, stream, generation, released);
    sqe.set_dword(10, sqe.dword(10) | BIND_RESUME);
    sqe
}

/// Whether a bind command resumes: the stream continues with the content of the log.
#[must_use]
pub fn bind_resumes(sqe: &Sqe) -> bool {
    sqe.dword(10) & BIND_RESUME != 0
}

/// The stream that a bind command names.
#[must_use]
pub fn bind_stream(sqe: &Sqe) -> StreamId {
    StreamId(sqe.dword(10) as u16)
}

/// The list command of the admin queue, for a page of `len` bytes, at most
/// [`list::PAGE_BYTES_MAX`].
#[must_use]
pub fn list_command(volume: VolumeId, stream: StreamId, from: Position, len: usize) -> Sqe {
    let mut sqe = volume_command(ADMIN_LIST, volume);
    put_mark(&mut sqe, Seq(from.0));
    sqe.set_dword(10, len as u32);
    sqe.set_dword(11, u32::from(stream.0));
    sqe
}

/// The list command of an I/O queue, for the stream to which the queue is bound.
#[must_use]
pub fn own_list_command(from: Position, len: usize) -> Sqe {
    let mut sqe = Sqe::new(IO_LIST, 0);
    put_mark(&mut sqe, Seq(from.0));
    sqe.set_dword(10, len as u32);
    sqe
}

/// The page that a list command requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListRequest {
    /// The stream. Only the command of the admin queue has it.
    pub stream: StreamId,
    /// The position of the first entry.
    pub from: Position,
    /// The length of the page, bytes.
    pub len: usize,
}

/// Reads the fields of a list command.
#[must_use]
pub fn list_request(sqe: &Sqe) -> ListRequest {
    ListRequest {
        stream: StreamId(sqe.dword(11) as u16),
        from: Position(mark_of(sqe).0),
        len: sqe.dword(10) as usize,
    }
}

/// The settle command. Its data is made by [`list::Settle::encode`].
#[must_use]
pub fn settle_command() -> Sqe {
    let mut sqe = Sqe::new(ADMIN_SETTLE, 0);
    sqe.set_dword(10, list::SETTLE_LEN as u32);
    sqe
}

/// The mark command: all groups of the stream up to `released` are released. With `durable`, the
/// mark is durable before the completion.
#[must_use]
pub fn mark_command(released: Seq, durable: bool) -> Sqe {
    let mut sqe = Sqe::new(IO_MARK, 0);
    put_mark(&mut sqe, released);
    sqe.set_dword(10, u32::from(durable));
    sqe
}

/// CDW10 of [`IO_MARK`]: the groups are durable, and their entries stay.
const MARK_KEEPS_ENTRIES: u32 = 1 << 1;

/// The mark command that records that all groups of the stream up to `durable` are durable, and
/// keeps their entries.
#[must_use]
pub fn durable_command(durable: Seq) -> Sqe {
    let mut sqe = mark_command(durable, false);
    sqe.set_dword(10, MARK_KEEPS_ENTRIES);
    sqe
}

/// Whether a mark command keeps the entries of the groups that it reports.
#[must_use]
pub fn mark_keeps_entries(sqe: &Sqe) -> bool {
    sqe.dword(10) & MARK_KEEPS_ENTRIES != 0
}

/// The order command for a request of this kind, without its attribute
/// ([`put_attribute`](super::put_attribute)).
#[must_use]
pub fn order_command(nsid: u32, kind: Kind, lba: u64, blocks: u32) -> Sqe {
    let mut sqe = Sqe::new(IO_ORDER, nsid);
    if kind != Kind::Flush {
        sqe.set_dwords(10, lba as u32, (lba >> 32) as u32);
        sqe.set_dword(12, blocks.wrapping_sub(1) & 0xffff);
    }
    sqe.set_dword(13, kind as u32);
    sqe
}

/// The volume's id in CDW12–15 of a vendor command.
#[must_use]
pub fn volume_of(sqe: &Sqe) -> VolumeId {
    let mut id = [0; 16];
    for (i, part) in id.chunks_exact_mut(4).enumerate() {
        part.copy_from_slice(&sqe.dword(12 + i).to_le_bytes());
    }
    VolumeId(id)
}

/// The 64-bit number in CDW2–3 of a vendor command: the released mark of bind and mark.
#[must_use]
pub fn mark_of(sqe: &Sqe) -> Seq {
    Seq(u64::from(sqe.dword(2)) | u64::from(sqe.dword(3)) << 32)
}

/// Writes a 64-bit number into CDW2–3.
fn put_mark(sqe: &mut Sqe, mark: Seq) {
    sqe.set_dword(2, mark.0 as u32);
    sqe.set_dword(3, (mark.0 >> 32) as u32);
}

/// A command with a volume's id in CDW12–15.
fn volume_command(opcode: u8, volume: VolumeId) -> Sqe {
    let mut sqe = Sqe::new(opcode, 0);
    for i in 0..4 {
        sqe.set_dword(12 + i, u32_at(&volume.0, 4 * i));
    }
    sqe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_fields_have_their_places_in_the_wire_format() {
        let volume = VolumeId(core::array::from_fn(|i| 0x80 + i as u8));
        let mark = Seq(0x8182_8384_8586_8788);
        let bind = bind_command(volume, StreamId(0x8102), 0x9192_9394, mark);
        let dwords = [2, 3, 10, 11, 12, 13, 14, 15].map(|i| bind.dword(i));
        let volume_dwords = [0x8382_8180, 0x8786_8584, 0x8b8a_8988, 0x8f8e_8d8c];
        assert_eq!(dwords[..4], [0x8586_8788, 0x8182_8384, 0x8102, 0x9192_9394]);
        assert_eq!(dwords[4..], volume_dwords);
        assert_eq!((bind_resumes(&bind), bind_stream(&bind)), (false, StreamId(0x8102)));
        assert_eq!(mark_of(&bind), mark);
        assert_eq!(volume_of(&bind), volume);
        let again = resume_command(volume, StreamId(0x8102), 0x9192_9394, mark);
        assert_eq!(again.dword(10), 0x8000_8102);
        assert_eq!((bind_resumes(&again), bind_stream(&again)), (true, StreamId(0x8102)));
        let list = list_command(volume, StreamId(0x8102), Position(mark.0), 0x8000_1000);
        let request =
            ListRequest { stream: StreamId(0x8102), from: Position(mark.0), len: 0x8000_1000 };
        assert_eq!(list_request(&list), request);
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
        let durable = durable_command(mark);
        assert_eq!((durable.opcode(), durable.dword(10), mark_of(&durable)), (IO_MARK, 2, mark));
        let keeps = [durable, mark_command(mark, true)].map(|sqe| mark_keeps_entries(&sqe));
        assert_eq!(keeps, [true, false]);
        let discard = discard_command(volume);
        assert_eq!((discard.opcode(), discard.dword(10)), (ADMIN_RELEASE, 3));
        assert_eq!(volume_of(&discard), volume);
        let (forget, without_owner) = (true, true);
        assert_eq!(release_request(&discard), ReleaseRequest { forget, without_owner });
        let mut neither = discard;
        neither.set_dword(10, 2);
        let (forget, without_owner) = (false, false);
        assert_eq!(release_request(&neither), ReleaseRequest { forget, without_owner });
        let directory = directory_command();
        assert_eq!((directory.opcode(), directory.dword(10)), (ADMIN_DIRECTORY, 4096));
        assert_eq!((claim_command().opcode(), claim_command().dword(10)), (ADMIN_CLAIM, 4096));
        assert_eq!((settle_command().opcode(), settle_command().dword(10)), (ADMIN_SETTLE, 4096));
    }
}
