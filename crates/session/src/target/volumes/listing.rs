//! The list command of a recovery: sends the validated entries of one partition, page by page (trap
//! T4).
//!
//! The first request reads and validates the whole partition into a [`Listing`]. Each further
//! request takes the next page from the same `Listing`, so that the log is not read once for every
//! page.

use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_order::attribute::{GroupTag, Seq};
use riopipe_order::entry::{PartitionId, Position};
use riopipe_order::ordering_log::{LogError, StreamLog};
use riopipe_order::recovery::{ListedEntry, validate};
use riopipe_order::region::Region;

use super::Volumes;
use super::refusal::Refusal;
use super::volume::Partition;
use crate::wire;
use crate::wire::list::{PAGE_BYTES_MAX, Page, RECORD_BYTES, capacity};

/// The entries of one partition as they were when the first page was requested.
pub(in crate::target) struct Listing {
    id: PartitionId,
    /// Whether an earlier recovery has settled the partition.
    is_settled: bool,
    /// The released mark.
    released: Seq,
    /// The newest group up to `released` that the partition records, and the caller's tag of it.
    newest_tag: GroupTag,
    /// The number of torn slots.
    torn_count: u32,
    /// The entries, in order of position.
    entries: Vec<ListedEntry>,
    /// The position at which the next page begins.
    next_position: Position,
}

impl Listing {
    /// Reads and validates a partition.
    fn read<R: Region>(log: &StreamLog<R>) -> Result<Self, LogError> {
        let scan = log.scan()?;
        let durable = validate(&scan.entries);
        let entries = scan.entries.iter().zip(durable).map(|(entry, durable)| ListedEntry {
            position: entry.position,
            attribute: entry.attribute,
            incarnation: entry.origin.incarnation,
            persisted: entry.persisted,
            durable,
        });
        Ok(Self {
            id: log.id(),
            is_settled: scan.settled,
            released: scan.released,
            newest_tag: scan.newest_tag,
            torn_count: scan.torn,
            entries: entries.collect(),
            next_position: Position(0),
        })
    }

    /// Makes a page of `len` bytes: the entries from position `from` on, as many as fit.
    fn make_page(&mut self, from: Position, len: usize) -> Page {
        let first = self.entries.partition_point(|entry| entry.position < from);
        let end = self.entries.len().min(first + capacity(len));
        let entries = self.entries[first..end].to_vec();
        let after_last = entries.last().map(|entry| Position(entry.position.0 + 1));
        self.next_position = after_last.unwrap_or(from);
        Page {
            volume: self.id.volume,
            stream: self.id.stream,
            more: end < self.entries.len(),
            settled: self.is_settled,
            // A stream that a connection carries has been started, so it is not in doubt (trap
            // T26). For a partition at rest, `Volumes::list` sets this.
            in_doubt: false,
            released: self.released,
            newest_tag: self.newest_tag,
            next: self.next_position,
            torn: self.torn_count,
            live: self.entries.len() as u32,
            entries,
        }
    }

    /// Whether the page of partition `id` from position `from` is the next page of this listing.
    fn is_continued_by(&self, id: PartitionId, from: Position) -> bool {
        from != Position(0) && self.id == id && self.next_position == from
    }
}

/// Returns the page of a partition that begins at position `from`. Takes the page from `listing` if
/// it is the next one there. Otherwise reads the log anew.
pub(in crate::target) fn read_page<R: Region>(
    listing: &mut Option<Listing>,
    log: &StreamLog<R>,
    from: Position,
    len: usize,
) -> Result<Page, LogError> {
    let mut current = match listing.take() {
        Some(current) if current.is_continued_by(log.id(), from) => current,
        _ => Listing::read(log)?,
    };
    let page = current.make_page(from, len);
    // The listing is kept until its last page.
    *listing = Some(current).filter(|_| page.more);
    Ok(page)
}

impl<R: Region> Volumes<R> {
    /// Returns a page of a partition that is at rest. The owner may read it, and any host may while
    /// no owner is present.
    pub(in crate::target) fn list(
        &mut self,
        id: PartitionId,
        association: u64,
        from: Position,
        len: usize,
    ) -> Result<Page, Refusal> {
        let Self { list, listing, .. } = self;
        let refuse = |status: Status| Err(Refusal::do_not_retry(status));
        let Some(volume) = list.iter().find(|volume| volume.id == id.volume) else {
            return refuse(wire::status::UNKNOWN_VOLUME);
        };
        let owner = volume.lease.owner();
        if owner.is_some() && !volume.is_owned_by(association) {
            return refuse(wire::status::NOT_OWNER);
        }
        if volume.is_log_lost {
            return refuse(wire::status::LOG_LOST);
        }
        if volume.partitions.is_empty() {
            return refuse(wire::status::NO_LOG);
        }
        let Some(partition) = volume.partitions.get(usize::from(id.stream.0)) else {
            return refuse(wire::status::NO_SUCH_STREAM);
        };
        // No list is read before the operations in flight at the claim have come back (trap T8).
        if owner.is_some() && !volume.is_drained {
            return Err(Refusal::retry_later(wire::status::STREAM_BUSY));
        }
        match partition {
            Partition::Bound { .. } => Err(Refusal::retry_later(wire::status::STREAM_BUSY)),
            Partition::Damaged => refuse(wire::status::LOG_LOST),
            Partition::AtRest { log, .. } => {
                let in_doubt = volume.is_in_doubt(log);
                read_page(listing, log, from, len)
                    .map(|page| Page { in_doubt, ..page })
                    .map_err(|error| Refusal { status: status_of_unreadable(&error), result: 0 })
            }
        }
    }
}

/// The status for a partition that can't be listed. After a failed fence, a part of the content
/// that can still be read may be gone when the target starts again. So no recovery may use that
/// content.
pub(in crate::target) fn status_of_unreadable(error: &LogError) -> Status {
    match error {
        LogError::Region(_) => wire::status::LOG_FAILED,
        _ => wire::status::LOG_LOST.with_dnr(),
    }
}

/// Checks the length of a page that a host requests: it has a limit, and must be whole records
/// (trap T18).
pub(in crate::target) const fn check_page_len(len: usize) -> Result<(), Status> {
    if len == 0 || len > PAGE_BYTES_MAX || !len.is_multiple_of(RECORD_BYTES) {
        Err(Status::INVALID_FIELD.with_dnr())
    } else {
        Ok(())
    }
}
