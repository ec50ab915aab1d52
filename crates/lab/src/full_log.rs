//! A full log region, as a crash in the worst moment would leave it: for measuring recovery (Rio
//! paper §6.5).

use std::path::Path;

use riopipe_media::spec::escape_commas;
use riopipe_media::{LogStore, PartError, boot_id, open_log};
use riopipe_order::{
    attribute::{Attribute, Flags, Kind, Member, StreamId},
    entry::{Origin, PartitionId},
    log_region::{Class, HEADER_BYTES, VolumeRecord, inspect},
    ordering_log::{StreamLog, partition_bytes},
};
use riopipe_platform::crc32c;
use riopipe_session::label::DATA_START;

/// The place of a log in its volume.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Number of this target.
    pub target: u32,
    /// Number of targets of the volume.
    pub targets: u32,
    /// Number of members on each target.
    pub drives: u32,
    /// Number of blocks of each member that entries may name.
    pub blocks: u64,
}

/// The reason why a log could not be filled.
#[derive(Debug, thiserror::Error)]
pub enum FillError {
    /// The region can't be opened.
    #[error(transparent)]
    Open(#[from] riopipe_media::OpenError),
    /// A part of the region is not available.
    #[error(transparent)]
    Part(#[from] PartError),
    /// The region does not belong to one volume with an owner.
    #[error("the log region is not that of a single volume: {0}")]
    Region(String),
    /// A partition refused an entry.
    #[error("partition of stream {stream}: {what}")]
    Partition {
        /// The stream.
        stream: u16,
        /// The partition's error.
        what: String,
    },
}

/// Fills every partition of the only volume in the region at `path` with entries of single 4 KiB
/// writes. All count as durable, except the first of each stream on target 0: the hole after which
/// recovery undoes everything. Returns the number of entries.
///
/// Adjacent entries are two blocks apart, so that no two undo operations can be merged.
///
/// # Errors
/// [`FillError`]; no target may serve the log.
pub fn fill(path: &Path, place: Place) -> Result<u64, FillError> {
    let store = open_log(&format!("file:{}", escape_commas(&path.display().to_string())))?;
    let record = only_volume(&store)?;
    let mut entries = 0;
    for stream in (0..record.streams).map(StreamId) {
        entries += fill_partition(&store, &record, stream, place)?;
    }
    Ok(entries)
}

fn only_volume(store: &LogStore) -> Result<VolumeRecord, FillError> {
    let header = store.part(0..HEADER_BYTES)?;
    match inspect(&header, store.len(), boot_id()?, crc32c) {
        Class::Ours(header) if header.volumes.len() == 1 => {
            let mut volumes = header.volumes;
            // There is exactly one volume.
            volumes.pop().ok_or_else(|| FillError::Region("no volume".into()))
        }
        other => Err(FillError::Region(format!("{other:?}"))),
    }
}

fn fill_partition(
    store: &LogStore,
    record: &VolumeRecord,
    stream: StreamId,
    place: Place,
) -> Result<u64, FillError> {
    let fault = |what: String| FillError::Partition { stream: stream.0, what };
    let range = record.partition(stream).ok_or_else(|| fault("not there".into()))?;
    debug_assert_eq!(range.len(), partition_bytes(record.slots));
    let id = PartitionId { volume: record.id, stream };
    let (mut log, scan) =
        StreamLog::open(store.part(range)?, id, crc32c).map_err(|e| fault(e.to_string()))?;
    let origin = Origin { generation: record.generation, incarnation: scan.origin.incarnation };
    log.start(origin, scan.released).map_err(|e| fault(e.to_string()))?;
    let targets = u64::from(place.targets);
    for slot in 0..u64::from(record.slots) {
        let number = slot * targets + u64::from(place.target);
        let drive = slot % u64::from(place.drives);
        // Each stream has a part of each drive of its own.
        let on_drive = u64::from(stream.0) * u64::from(record.slots) + slot;
        let attribute = Attribute {
            seq: scan.released.plus(number + 1),
            span: 1,
            num: 1,
            index: 0,
            ordinal: slot as u32 + 1,
            member: Member((drive * targets) as u8 + place.target as u8),
            kind: Kind::Write,
            flags: Flags::BOUNDARY,
            lba: DATA_START + 2 * on_drive % place.blocks,
            blocks: 1,
            tag: number + 1,
        };
        let position = log.append(&attribute).map_err(|e| fault(e.to_string()))?;
        if attribute.seq > scan.released.next() {
            log.persist(position);
        }
    }
    log.fence().map_err(|e| fault(e.to_string()))?;
    Ok(record.slots.into())
}
