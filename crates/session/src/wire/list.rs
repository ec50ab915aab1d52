//! The data of the recovery commands: [`Page`] is a page of a partition's live entries, which a
//! list command returns. [`Settle`] has the recovered seqs that a settle command records.

use alloc::vec::Vec;

use riopipe_order::attribute::{Attribute, Flags, GroupTag, Kind, Member, Seq, StreamId, VolumeId};
use riopipe_order::entry::Position;
use riopipe_order::recovery::ListedEntry;

use super::{SEQ_MAX, array_at, u16_at, u32_at, u64_at};

/// The bytes of a page's header, and of each entry in the page.
pub const RECORD_BYTES: usize = 64;
/// The most bytes of a page.
pub const PAGE_BYTES_MAX: usize = 128 << 10;

/// The flags of a [`Page`], in byte 18.
const PAGE_MORE: u8 = 1;
const PAGE_SETTLED: u8 = 1 << 1;
const PAGE_IN_DOUBT: u8 = 1 << 2;
const PAGE_FLAGS: u8 = PAGE_MORE | PAGE_SETTLED | PAGE_IN_DOUBT;

/// The flags of an entry in a page, in byte 49.
const ENTRY_PERSISTED: u8 = 1;
const ENTRY_DURABLE: u8 = 1 << 1;
const ENTRY_FLAGS: u8 = ENTRY_PERSISTED | ENTRY_DURABLE;

/// A page of a partition's live entries.
///
/// | byte | field |
/// |---|---|
/// | 0–15 | volume id |
/// | 16–17 | stream |
/// | 18 | flags: bit 0 more entries follow, bit 1 settled, bit 2 in doubt |
/// | 20–23 | entries in this page |
/// | 24–31 | released mark |
/// | 32–39 | seq of the newest known group that is not beyond the released mark |
/// | 40–47 | the caller's tag of that group |
/// | 48–55 | position from which the next page continues |
/// | 56–59 | torn slots |
/// | 60–63 | live entries of the partition, on all pages |
/// | 64– | the entries, 64 bytes each |
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The volume.
    pub volume: VolumeId,
    /// The stream.
    pub stream: StreamId,
    /// Whether more entries follow on further pages.
    pub more: bool,
    /// Whether an earlier recovery has settled the partition (trap T9).
    pub settled: bool,
    /// Whether the log's content for the stream was given up, and the stream has not started again
    /// (trap T26).
    pub in_doubt: bool,
    /// The released mark.
    pub released: Seq,
    /// The newest group up to `released` that the partition records, and its tag.
    pub newest_tag: GroupTag,
    /// The position at which the next page starts.
    pub next: Position,
    /// The number of torn slots, whose bytes are no whole entry.
    pub torn: u32,
    /// The number of live entries of the partition, on all pages.
    pub live: u32,
    /// The entries, in order of position.
    pub entries: Vec<ListedEntry>,
}

impl Page {
    /// The bytes of the page on the wire: `len` bytes. The caller must make sure that the entries
    /// fit ([`capacity`]).
    #[must_use]
    pub fn encode(&self, len: usize) -> Vec<u8> {
        debug_assert!(self.entries.len() <= capacity(len));
        let mut bytes = alloc::vec![0; len];
        bytes[0..16].copy_from_slice(&self.volume.0);
        bytes[16..18].copy_from_slice(&self.stream.0.to_le_bytes());
        bytes[18] = flag(self.more, PAGE_MORE)
            | flag(self.settled, PAGE_SETTLED)
            | flag(self.in_doubt, PAGE_IN_DOUBT);
        bytes[20..24].copy_from_slice(&(self.entries.len() as u32).to_le_bytes());
        bytes[24..32].copy_from_slice(&self.released.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.newest_tag.seq.0.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.newest_tag.tag.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.next.0.to_le_bytes());
        bytes[56..60].copy_from_slice(&self.torn.to_le_bytes());
        bytes[60..64].copy_from_slice(&self.live.to_le_bytes());
        let records = bytes[RECORD_BYTES..].chunks_exact_mut(RECORD_BYTES);
        for (entry, record) in self.entries.iter().zip(records) {
            encode_entry(entry, record);
        }
        bytes
    }

    /// Reads a page; `None` if it is short or not valid (trap T18).
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < RECORD_BYTES {
            return None;
        }
        let flags = bytes[18];
        let entry_count = u32_at(bytes, 20) as usize;
        if flags & !PAGE_FLAGS != 0 || entry_count > capacity(bytes.len()) {
            return None;
        }
        let released = Seq(u64_at(bytes, 24));
        let newest_tag = GroupTag::new(Seq(u64_at(bytes, 32)), u64_at(bytes, 40));
        let records = bytes[RECORD_BYTES..].chunks_exact(RECORD_BYTES).take(entry_count);
        let entries = records.map(decode_entry).collect::<Option<_>>()?;
        if released > SEQ_MAX || newest_tag.seq > SEQ_MAX {
            return None;
        }
        Some(Self {
            volume: VolumeId(array_at(bytes, 0)),
            stream: StreamId(u16_at(bytes, 16)),
            more: flags & PAGE_MORE != 0,
            settled: flags & PAGE_SETTLED != 0,
            in_doubt: flags & PAGE_IN_DOUBT != 0,
            released,
            newest_tag,
            next: Position(u64_at(bytes, 48)),
            torn: u32_at(bytes, 56),
            live: u32_at(bytes, 60),
            entries,
        })
    }
}

/// The number of entries that fit into a page of `len` bytes.
#[must_use]
pub const fn capacity(len: usize) -> usize {
    (len / RECORD_BYTES).saturating_sub(1)
}

/// Writes an entry into its record of a page.
///
/// | byte | field |
/// |---|---|
/// | 0–7 | position |
/// | 8–15 | seq |
/// | 16–23 | tag |
/// | 24–31 | first block |
/// | 32–35 | ordinal |
/// | 36–39 | blocks |
/// | 40–41 | num |
/// | 42–43 | index |
/// | 44–45 | span |
/// | 46 | member |
/// | 47 | kind |
/// | 48 | flags |
/// | 49 | bit 0 persisted, bit 1 durable |
/// | 52–55 | incarnation |
fn encode_entry(entry: &ListedEntry, record: &mut [u8]) {
    let attribute = &entry.attribute;
    record[0..8].copy_from_slice(&entry.position.0.to_le_bytes());
    record[8..16].copy_from_slice(&attribute.seq.0.to_le_bytes());
    record[16..24].copy_from_slice(&attribute.tag.to_le_bytes());
    record[24..32].copy_from_slice(&attribute.lba.to_le_bytes());
    record[32..36].copy_from_slice(&attribute.ordinal.to_le_bytes());
    record[36..40].copy_from_slice(&attribute.blocks.to_le_bytes());
    record[40..42].copy_from_slice(&attribute.num.to_le_bytes());
    record[42..44].copy_from_slice(&attribute.index.to_le_bytes());
    record[44..46].copy_from_slice(&attribute.span.to_le_bytes());
    record[46] = attribute.member.0;
    record[47] = attribute.kind as u8;
    record[48] = attribute.flags.0;
    record[49] = flag(entry.persisted, ENTRY_PERSISTED) | flag(entry.durable, ENTRY_DURABLE);
    record[52..56].copy_from_slice(&entry.incarnation.to_le_bytes());
}

/// Reads an entry from its record of a page; `None` if it is not valid (trap T18).
fn decode_entry(record: &[u8]) -> Option<ListedEntry> {
    let attribute = Attribute {
        seq: Seq(u64_at(record, 8)),
        span: u16_at(record, 44),
        num: u16_at(record, 40),
        index: u16_at(record, 42),
        ordinal: u32_at(record, 32),
        member: Member(record[46]),
        kind: Kind::from_code(record[47])?,
        flags: Flags(record[48]),
        lba: u64_at(record, 24),
        blocks: u32_at(record, 36),
        tag: u64_at(record, 16),
    };
    let flags = record[49];
    let is_valid = riopipe_order::entry::loggable(&attribute)
        && attribute.seq > Seq::ZERO
        && attribute.seq_end() <= SEQ_MAX
        && flags & !ENTRY_FLAGS == 0;
    is_valid.then(|| ListedEntry {
        position: Position(u64_at(record, 0)),
        attribute,
        incarnation: u32_at(record, 52),
        persisted: flags & ENTRY_PERSISTED != 0,
        durable: flags & ENTRY_DURABLE != 0,
    })
}

/// Length of a [`Settle`] on the wire, bytes.
pub const SETTLE_LEN: usize = 4096;
/// The most streams that one settle command takes.
pub const SETTLE_STREAMS_MAX: usize = 160;
/// The bytes of a [`Settle`]'s header.
const SETTLE_HEADER_BYTES: usize = 32;
/// The bytes of each stream in a [`Settle`].
const SETTLE_RECORD_BYTES: usize = 24;
/// The flag of a stream in a [`Settle`]: keep the in-place list.
const SETTLE_KEEP: u8 = 1;

/// The recovered seqs of some streams of a volume.
///
/// | byte | field |
/// |---|---|
/// | 0–15 | volume id |
/// | 16–19 | generation |
/// | 20–21 | number of streams |
/// | 32– | the streams, 24 bytes each |
///
/// | byte of a stream | field |
/// |---|---|
/// | 0–1 | stream |
/// | 2 | flags: bit 0 keep the in-place list |
/// | 8–15 | recovered seq, k |
/// | 16–23 | the caller's tag of group k |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settle {
    /// The volume.
    pub volume: VolumeId,
    /// The owner's generation.
    pub generation: u32,
    /// The streams, at most [`SETTLE_STREAMS_MAX`].
    pub streams: Vec<SettleStream>,
}

/// The recovered seq of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettleStream {
    /// The stream.
    pub stream: StreamId,
    /// Whether the log keeps its entries of in-place writes beyond k until the owner has
    /// acknowledged them (trap T9).
    pub keep: bool,
    /// The seq of the last group of the prefix, k.
    pub k: Seq,
    /// The caller's tag of group k.
    pub tag: u64,
}

impl Settle {
    /// The bytes of the settlement on the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        debug_assert!(self.streams.len() <= SETTLE_STREAMS_MAX);
        let mut bytes = alloc::vec![0; SETTLE_LEN];
        bytes[0..16].copy_from_slice(&self.volume.0);
        bytes[16..20].copy_from_slice(&self.generation.to_le_bytes());
        bytes[20..22].copy_from_slice(&(self.streams.len() as u16).to_le_bytes());
        let records = bytes[SETTLE_HEADER_BYTES..].chunks_exact_mut(SETTLE_RECORD_BYTES);
        for (settled, record) in self.streams.iter().zip(records) {
            record[0..2].copy_from_slice(&settled.stream.0.to_le_bytes());
            record[2] = u8::from(settled.keep) * SETTLE_KEEP;
            record[8..16].copy_from_slice(&settled.k.0.to_le_bytes());
            record[16..24].copy_from_slice(&settled.tag.to_le_bytes());
        }
        bytes
    }

    /// Reads a settlement; `None` if it is short or not valid (trap T18).
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < SETTLE_LEN {
            return None;
        }
        let stream_count = usize::from(u16_at(bytes, 20));
        if stream_count > SETTLE_STREAMS_MAX {
            return None;
        }
        let records = bytes[SETTLE_HEADER_BYTES..].chunks_exact(SETTLE_RECORD_BYTES);
        let streams = records.take(stream_count).map(decode_settle_stream);
        Some(Self {
            volume: VolumeId(array_at(bytes, 0)),
            generation: u32_at(bytes, 16),
            streams: streams.collect::<Option<_>>()?,
        })
    }
}

/// Reads a stream from its record of a settlement; `None` if it is not valid (trap T18).
fn decode_settle_stream(record: &[u8]) -> Option<SettleStream> {
    let (flags, k) = (record[2], Seq(u64_at(record, 8)));
    if flags & !SETTLE_KEEP != 0 || k > SEQ_MAX {
        return None;
    }
    Some(SettleStream {
        stream: StreamId(u16_at(record, 0)),
        keep: flags & SETTLE_KEEP != 0,
        k,
        tag: u64_at(record, 16),
    })
}

/// `bit` if the flag is set, else 0.
const fn flag(is_set: bool, bit: u8) -> u8 {
    if is_set { bit } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(position: u64) -> ListedEntry {
        ListedEntry {
            position: Position(position),
            attribute: Attribute {
                seq: Seq(0x2132_4354_6576_8798),
                span: 1,
                num: 0x3456,
                index: 0x1234,
                ordinal: 0x8192_a3b4,
                member: Member(4),
                kind: Kind::Write,
                flags: Flags::IN_PLACE,
                lba: 0x1234_5678_9abc,
                blocks: 65536,
                tag: 0x8192_a3b4_c5d6_e7f8,
            },
            incarnation: 0x9182_7364,
            persisted: false,
            durable: true,
        }
    }

    #[test]
    fn a_page_survives_the_wire() {
        let page = Page {
            volume: VolumeId([3; 16]),
            stream: StreamId(1023),
            more: true,
            settled: true,
            in_doubt: false,
            released: Seq(99),
            newest_tag: GroupTag::new(Seq(98), 0xdead),
            next: Position(1 << 33),
            torn: 0x0102_0304,
            live: 0x1112_1314,
            entries: alloc::vec![entry(1), entry(u64::MAX)],
        };
        let bytes = page.encode(4096);
        assert_eq!(bytes.len(), 4096);
        assert_eq!(Page::decode(&bytes), Some(page));
        // Several groups in one entry; each flag alone.
        let merged = Attribute { span: 0x0100, num: 1, index: 0, ..entry(1).attribute };
        let merged = ListedEntry { attribute: merged, persisted: true, durable: false, ..entry(1) };
        for (more, settled, in_doubt) in
            [(false, true, false), (true, false, false), (false, false, true)]
        {
            let entries = alloc::vec![merged];
            let page = Page { more, settled, in_doubt, entries, ..Page::default() };
            assert_eq!(Page::decode(&page.encode(128)), Some(page));
        }
        // Each place; none of this version has two.
        for flags in [Flags::default(), Flags::IN_PLACE, Flags::EXTEND, Flags::PLACE, Flags(0x20)] {
            let a = Attribute { flags, ..entry(1).attribute };
            let entries = alloc::vec![ListedEntry { attribute: a, ..entry(1) }];
            let page = Page { entries, ..Page::default() };
            let understood = flags != Flags::PLACE && flags != Flags(0x20);
            assert_eq!(Page::decode(&page.encode(128)), understood.then_some(page), "{flags:?}");
        }
    }

    #[test]
    fn t18_a_page_that_is_not_valid_is_refused() {
        let page = Page { entries: alloc::vec![entry(1)], ..Page::default() };
        let good = page.encode(256);
        assert!(Page::decode(&good).is_some());
        let refused = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            assert_eq!(Page::decode(&bytes), None, "byte {at} = {byte:#x}");
        };
        refused(20, 4); // more entries than fit
        refused(18, 8); // unknown flags
        refused(64 + 47, 9); // unknown kind
        refused(64 + 41, 0); // num not above index
        refused(64 + 15, 0xff); // a seq beyond all
        refused(31, 0xff); // a mark beyond all
        refused(39, 0xff); // a tag of a group beyond all
        refused(64 + 49, 4); // unknown flags of an entry
        let nothing = Attribute { seq: Seq::ZERO, ..entry(1).attribute };
        let nothing = ListedEntry { attribute: nothing, ..entry(1) };
        let page = Page { entries: alloc::vec![nothing], ..Page::default() };
        assert_eq!(Page::decode(&page.encode(256)), None, "before the first group");
        assert_eq!(Page::decode(&good[..63]), None);
    }

    #[test]
    fn a_settlement_survives_the_wire() {
        let stream = |n: u16| SettleStream {
            stream: StreamId(n),
            keep: n.is_multiple_of(2),
            k: Seq(u64::from(n) << 33),
            tag: u64::MAX - u64::from(n),
        };
        let settle = Settle {
            volume: VolumeId([9; 16]),
            generation: 77,
            streams: (0..SETTLE_STREAMS_MAX as u16).map(stream).collect(),
        };
        assert_eq!(Settle::decode(&settle.encode()), Some(settle.clone()));
        let mut bytes = settle.encode();
        bytes[20] = 0xff;
        assert_eq!(Settle::decode(&bytes), None, "T18: more streams than fit");
        assert_eq!(Settle::decode(&bytes[..100]), None);
    }
}
