//! The lists for recovery: the validated entries of one partition, page by page (T4).

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::attribute::Seq;
use riopipe_order::entry::{PartitionId, Position};
use riopipe_order::ordering_log::{LogError, StreamLog};
use riopipe_order::recovery::{ListedEntry, validate};
use riopipe_order::region::Region;

use super::admin::Admin;
use super::claims::{Refusal, Volumes};
use super::context::{Context, fenced_owner, shared};
use super::env::TargetEnv;
use super::ordered::OrderedQueue;
use super::volume::Partition;
use crate::outbox::Outbox;
use crate::wire;
use crate::wire::list::{PAGE_BYTES_MAX, Page, RECORD_BYTES, capacity};

/// The entries of one partition as they were when the first page was asked for.
pub(super) struct Listing {
    id: PartitionId,
    settled: bool,
    released: Seq,
    tag: (Seq, u64),
    torn: u32,
    entries: Vec<ListedEntry>,
    /// The position at which the next page begins.
    next: Position,
}

impl Listing {
    /// Reads and validates a partition.
    fn of<R: Region>(log: &StreamLog<R>) -> Result<Self, LogError> {
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
            settled: scan.settled,
            released: scan.released,
            tag: scan.tag,
            torn: scan.torn,
            entries: entries.collect(),
            next: Position(0),
        })
    }

    /// A page of `len` bytes with the entries at `from` and behind.
    fn page(&mut self, from: Position, len: usize) -> Page {
        let first = self.entries.partition_point(|entry| entry.position < from);
        let end = self.entries.len().min(first + capacity(len));
        let entries = self.entries[first..end].to_vec();
        let last = entries.last().map(|entry| Position(entry.position.0 + 1));
        self.next = last.unwrap_or(from);
        Page {
            volume: self.id.volume,
            stream: self.id.stream,
            more: end < self.entries.len(),
            settled: self.settled,
            // For a partition at rest, the caller replaces this. A stream that a connection carries
            // has been started, and so is not in doubt (T26).
            in_doubt: false,
            released: self.released,
            tag: self.tag,
            next: self.next,
            torn: self.torn,
            live: self.entries.len() as u32,
            entries,
        }
    }

    /// Whether this is a later page of the same reading.
    fn goes_on(&self, id: PartitionId, from: Position) -> bool {
        from != Position(0) && self.id == id && self.next == from
    }
}

/// A page of a partition, from the rest of the last reading or from a new one.
pub(super) fn page<R: Region>(
    listing: &mut Option<Listing>,
    log: &StreamLog<R>,
    from: Position,
    len: usize,
) -> Result<Page, LogError> {
    let mut found = match listing.take() {
        Some(found) if found.goes_on(log.id(), from) => found,
        _ => Listing::of(log)?,
    };
    let page = found.page(from, len);
    // Kept as long as a host reads it, so that a long list is not read again for each page.
    *listing = Some(found).filter(|_| page.more);
    Ok(page)
}

impl<R: Region> Volumes<R> {
    /// A page of a partition that is at rest: for the owner, or for any host while no owner is
    /// present.
    pub(super) fn list(
        &mut self,
        id: PartitionId,
        assoc: u64,
        from: Position,
        len: usize,
    ) -> Result<Page, Refusal> {
        let Self { list, listing, .. } = self;
        let refuse = |status: Status| Err((status.with_dnr(), 0));
        let Some(volume) = list.iter().find(|v| v.id == id.volume) else {
            return refuse(wire::status::UNKNOWN_VOLUME);
        };
        let owner = volume.lease.owner();
        if owner.is_some() && !volume.is_owned_by(assoc) {
            return refuse(wire::status::NOT_OWNER);
        }
        if volume.lost {
            return refuse(wire::status::LOG_LOST);
        }
        if volume.partitions.is_empty() {
            return refuse(wire::status::NO_LOG);
        }
        let Some(partition) = volume.partitions.get(usize::from(id.stream.0)) else {
            return refuse(wire::status::NO_SUCH_STREAM);
        };
        // No list is read before the operations in flight at the claim have come back (T8).
        if owner.is_some() && !volume.entered {
            return Err((wire::status::STREAM_BUSY, 0));
        }
        match partition {
            Partition::Bound { .. } => Err((wire::status::STREAM_BUSY, 0)),
            Partition::Damaged => refuse(wire::status::LOG_LOST),
            Partition::Home { log, .. } => {
                let in_doubt = volume.in_doubt(log);
                page(listing, log, from, len)
                    .map(|page| Page { in_doubt, ..page })
                    .map_err(|error| (unreadable(&error), 0))
            }
        }
    }
}

impl Admin {
    /// List: a page of a partition.
    pub(super) fn list<E: TargetEnv>(
        cx: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        out: &mut Outbox<E::Buf>,
    ) {
        let (stream, from, len) = wire::list_of(sqe);
        let id = PartitionId { volume: wire::volume_of(sqe), stream };
        let assoc = cx.assoc();
        let page = match check_len(len) {
            Err(status) => Err((status, 0)),
            Ok(()) if sqe.dword(11) > u32::from(u16::MAX) => {
                Err((wire::status::NO_SUCH_STREAM.with_dnr(), 0))
            }
            Ok(()) => shared(env, |s| s.list(id, assoc, from, len)),
        };
        match page {
            Ok(page) => cx.send_page(sqe, &page.encode(len), out),
            Err((status, result)) => cx.respond(sqe.cid(), status, result, out),
        }
    }
}

impl<E: TargetEnv> OrderedQueue<E> {
    /// List: a page of the stream that this queue carries.
    pub(super) fn list(&mut self, cx: &mut Context<E>, sqe: &Sqe, out: &mut Outbox<E::Buf>) {
        let (_, from, len) = wire::list_of(sqe);
        let page = match check_len(len) {
            _ if cx.is_fenced => Err(fenced_owner()),
            Err(status) => Err(status),
            Ok(()) => {
                page(&mut self.listing, &self.log, from, len).map_err(|error| unreadable(&error))
            }
        };
        match page {
            Ok(page) => cx.send_page(sqe, &page.encode(len), out),
            Err(status) => cx.respond(sqe.cid(), status, 0, out),
        }
    }
}

/// The answer for a partition that cannot be listed. After a failed fence, the content of now may
/// differ from the content after the next start of the target, so no decision may use it.
fn unreadable(error: &LogError) -> Status {
    match error {
        LogError::Region(_) => wire::status::LOG_FAILED,
        _ => wire::status::LOG_LOST.with_dnr(),
    }
}

/// T18: a page has a header, whole entries, and an end.
const fn check_len(len: usize) -> Result<(), Status> {
    if len == 0 || len > PAGE_BYTES_MAX || !len.is_multiple_of(RECORD_BYTES) {
        Err(Status::INVALID_FIELD.with_dnr())
    } else {
        Ok(())
    }
}
