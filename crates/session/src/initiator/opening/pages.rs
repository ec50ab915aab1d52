//! The lists of all partitions, put together from their pages.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use riopipe_order::attribute::StreamId;
use riopipe_order::entry::Position;
use riopipe_order::ordering_log::SLOTS_MAX;
use riopipe_order::recovery::{ListedEntry, StreamList};

use crate::wire::list::{PAGE_BYTES_MAX, Page, RECORD_BYTES, capacity};

/// Bytes of a first page when the number of entries is not known.
const FIRST_PAGE_BYTES: usize = 32 << 10;

/// The part of one partition that has been read.
#[derive(Debug)]
struct PartialList {
    list: StreamList,
    /// The number of torn slots.
    torn: u32,
    /// The number of live entries that the target has announced for the whole partition.
    live: u32,
}

/// The pages that have been read of all partitions.
#[derive(Debug, Default)]
pub(super) struct Lists {
    partials: BTreeMap<(StreamId, u16), PartialList>,
}

impl Lists {
    /// Adds the page of `stream` on `server` that starts at `from`. Returns the start of the next
    /// page if there is one.
    ///
    /// # Errors
    /// The page is not one that a target sends by the protocol; the text describes why.
    pub(super) fn add_page(
        &mut self,
        server: u16,
        stream: StreamId,
        from: Position,
        page: Page,
    ) -> Result<Option<Position>, &'static str> {
        let ascends = |pair: &[ListedEntry]| pair[0].position < pair[1].position;
        // No count of a real log comes near the end of 64 bits.
        let after = |last: &ListedEntry| Position(last.position.0.saturating_add(1));
        let after = page.entries.last().map_or(from, after);
        if page.stream != stream
            || page.entries.first().is_some_and(|first| first.position < from)
            || !page.entries.windows(2).all(ascends)
            || page.more && (page.entries.is_empty() || page.next < after)
        {
            return Err("a page of the log's list that was not requested");
        }
        let Page { released, newest_tag, settled, in_doubt, torn, live, .. } = page;
        let partial = self.partials.entry((stream, server)).or_insert_with(|| PartialList {
            list: StreamList {
                server,
                released,
                newest_tag,
                settled,
                in_doubt,
                entries: Vec::new(),
            },
            torn,
            live,
        });
        let list = &mut partial.list;
        if (list.released, list.newest_tag, list.settled, list.in_doubt, partial.torn, partial.live)
            != (released, newest_tag, settled, in_doubt, torn, live)
        {
            return Err("the log's list changed while it was read");
        }
        let read = list.entries.len() + page.entries.len();
        // A log has a largest length, but a hostile target could send pages without end (trap T18).
        let announced = live as usize;
        if live > SLOTS_MAX || read > announced || page.more != (read < announced) {
            return Err("a list of the log whose length is not the stated one, or is not possible");
        }
        list.entries.extend(page.entries);
        Ok(page.more.then_some(page.next))
    }

    /// The length of the next page to request, in bytes: space for the missing entries if their
    /// number is known, else for `expected` entries; `most` is the limit.
    pub(super) fn page_bytes(
        &self,
        server: u16,
        stream: StreamId,
        expected: Option<usize>,
        most: usize,
    ) -> usize {
        let read = self.partials.get(&(stream, server));
        let missing =
            read.map(|partial| (partial.live as usize).saturating_sub(partial.list.entries.len()));
        let entries = missing.or(expected).unwrap_or(capacity(FIRST_PAGE_BYTES)).max(1);
        let most = capacity(most.min(PAGE_BYTES_MAX)).max(1);
        (1 + entries.min(most)) * RECORD_BYTES
    }

    /// The lists of a stream on `servers`.
    pub(super) fn lists_of(&self, stream: StreamId, servers: &[u16]) -> Vec<StreamList> {
        let list_on = |server: &u16| Some(self.partials.get(&(stream, *server))?.list.clone());
        servers.iter().filter_map(list_on).collect()
    }

    /// Whether a partition has entries or torn slots that no recovery has settled.
    pub(super) fn is_unsettled(&self, stream: StreamId, server: u16) -> bool {
        let partial = self.partials.get(&(stream, server));
        partial.is_some_and(|p| !p.list.settled && (!p.list.entries.is_empty() || p.torn > 0))
    }

    /// The numbers of entries and of torn slots in all partitions.
    pub(super) fn counts(&self) -> (u64, u64) {
        self.partials.values().fold((0, 0), |(entries, torn), p| {
            (entries + p.list.entries.len() as u64, torn + u64::from(p.torn))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use riopipe_order::attribute::{Attribute, Flags, GroupTag, Kind, Member, Seq, VolumeId};

    /// The first page of a list that claims `live` entries.
    fn first(live: u32) -> Page {
        let attribute = Attribute {
            seq: Seq(1),
            span: 1,
            num: 1,
            index: 0,
            ordinal: 1,
            member: Member(0),
            kind: Kind::Write,
            flags: Flags::BOUNDARY,
            lba: 0,
            blocks: 1,
            tag: 0,
        };
        let position = Position(0);
        let entry =
            ListedEntry { position, attribute, incarnation: 1, persisted: true, durable: true };
        Page {
            volume: VolumeId([7; 16]),
            stream: StreamId(0),
            more: true,
            settled: false,
            in_doubt: false,
            released: Seq::ZERO,
            newest_tag: GroupTag::NONE,
            next: Position(1),
            torn: 0,
            live,
            entries: alloc::vec![entry],
        }
    }

    #[test]
    fn t18_a_list_is_as_long_as_a_log_can_be_and_no_longer() {
        let take = |live| Lists::default().add_page(0, StreamId(0), Position(0), first(live));
        assert_eq!(take(SLOTS_MAX), Ok(Some(Position(1))));
        assert!(take(SLOTS_MAX + 1).is_err());
        assert!(take(1).is_err(), "there can't be more");
    }
}
