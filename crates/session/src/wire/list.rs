//! The data of recovery on the wire: pages of a partition's live entries, and the settlement.

use alloc::vec::Vec;

use riopipe_order::attribute::{Attribute, Flags, GroupTag, Kind, Member, Seq, StreamId, VolumeId};
use riopipe_order::entry::Position;
use riopipe_order::recovery::ListedEntry;

use super::{array_at, u32_at, u64_at};

/// Bytes of a page's header, and of each entry in it.
pub const RECORD_BYTES: usize = 64;
/// The most bytes of a page.
pub const PAGE_BYTES_MAX: usize = 128 << 10;

/// A page of a partition's live entries.
///
/// | byte | field |
/// |---|---|
/// | 0–15 | volume id |
/// | 16–17 | stream |
/// | 18 | flags: bit 0 more entries follow, bit 1 settled, bit 2 in doubt |
/// | 20–23 | entries in this page |
/// | 24–31 | released mark |
/// | 32–39 | newest group up to it that is known, |
/// | 40–47 | the caller's tag of it |
/// | 48–55 | position from which the next page continues |
/// | 56–59 | torn slots |
/// | 60–63 | live entries in all |
/// | 64– | the entries, 64 bytes each |
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The volume.
    pub volume: VolumeId,
    /// The stream.
    pub stream: StreamId,
    /// Whether there are entries that did not fit.
    pub more: bool,
    /// Whether an earlier recovery has settled the partition (T9).
    pub settled: bool,
    /// Whether the log's content for the stream was given up, and the stream has not been started
    /// since (T26).
    pub in_doubt: bool,
    /// The released mark.
    pub released: Seq,
    /// The newest group up to `released` that the partition records, and its tag.
    pub newest_tag: GroupTag,
    /// The position at which the next page starts.
    pub next: Position,
    /// The number of torn slots: their bytes are no whole entry.
    pub torn: u32,
    /// Live entries of the partition in all.
    pub live: u32,
    /// The entries, in order of position.
    pub entries: Vec<ListedEntry>,
}

impl Page {
    /// The bytes of the page on the wire: `len` bytes, of which the entries take as many as they
    /// need. The caller has checked that they fit ([`capacity`]).
    #[must_use]
    pub fn encode(&self, len: usize) -> Vec<u8> {
        debug_assert!(self.entries.len() <= capacity(len));
        let mut d = alloc::vec![0; len];
        d[0..16].copy_from_slice(&self.volume.0);
        d[16..18].copy_from_slice(&self.stream.0.to_le_bytes());
        d[18] = u8::from(self.more) | u8::from(self.settled) << 1 | u8::from(self.in_doubt) << 2;
        d[20..24].copy_from_slice(&(self.entries.len() as u32).to_le_bytes());
        d[24..32].copy_from_slice(&self.released.0.to_le_bytes());
        d[32..40].copy_from_slice(&self.newest_tag.seq.0.to_le_bytes());
        d[40..48].copy_from_slice(&self.newest_tag.tag.to_le_bytes());
        d[48..56].copy_from_slice(&self.next.0.to_le_bytes());
        d[56..60].copy_from_slice(&self.torn.to_le_bytes());
        d[60..64].copy_from_slice(&self.live.to_le_bytes());
        for (entry, record) in
            self.entries.iter().zip(d[RECORD_BYTES..].chunks_exact_mut(RECORD_BYTES))
        {
            put_entry(entry, record);
        }
        d
    }

    /// Reads a page; `None` if it is short or not valid (T18).
    #[must_use]
    pub fn decode(d: &[u8]) -> Option<Self> {
        if d.len() < RECORD_BYTES || d[18] & !0b111 != 0 {
            return None;
        }
        let count = u32_at(d, 20) as usize;
        if count > capacity(d.len()) {
            return None;
        }
        let records = d[RECORD_BYTES..].chunks_exact(RECORD_BYTES).take(count);
        let page = Self {
            volume: VolumeId(array_at(d, 0)),
            stream: StreamId(u16::from_le_bytes([d[16], d[17]])),
            more: d[18] & 1 != 0,
            settled: d[18] & 2 != 0,
            in_doubt: d[18] & 4 != 0,
            released: Seq(u64_at(d, 24)),
            newest_tag: GroupTag::new(Seq(u64_at(d, 32)), u64_at(d, 40)),
            next: Position(u64_at(d, 48)),
            torn: u32_at(d, 56),
            live: u32_at(d, 60),
            entries: records.map(entry_of).collect::<Option<_>>()?,
        };
        (page.released <= super::SEQ_MAX && page.newest_tag.seq <= super::SEQ_MAX).then_some(page)
    }
}

/// The number of entries that fit into a page of `len` bytes.
#[must_use]
pub const fn capacity(len: usize) -> usize {
    (len / RECORD_BYTES).saturating_sub(1)
}

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
fn put_entry(entry: &ListedEntry, r: &mut [u8]) {
    let a = &entry.attribute;
    r[0..8].copy_from_slice(&entry.position.0.to_le_bytes());
    r[8..16].copy_from_slice(&a.seq.0.to_le_bytes());
    r[16..24].copy_from_slice(&a.tag.to_le_bytes());
    r[24..32].copy_from_slice(&a.lba.to_le_bytes());
    r[32..36].copy_from_slice(&a.ordinal.to_le_bytes());
    r[36..40].copy_from_slice(&a.blocks.to_le_bytes());
    r[40..42].copy_from_slice(&a.num.to_le_bytes());
    r[42..44].copy_from_slice(&a.index.to_le_bytes());
    r[44..46].copy_from_slice(&a.span.to_le_bytes());
    r[46] = a.member.0;
    r[47] = a.kind as u8;
    r[48] = a.flags.0;
    r[49] = u8::from(entry.persisted) | u8::from(entry.durable) << 1;
    r[52..56].copy_from_slice(&entry.incarnation.to_le_bytes());
}

fn entry_of(r: &[u8]) -> Option<ListedEntry> {
    let u16_at = |at: usize| u16::from_le_bytes([r[at], r[at + 1]]);
    let attribute = Attribute {
        seq: Seq(u64_at(r, 8)),
        span: u16_at(44),
        num: u16_at(40),
        index: u16_at(42),
        ordinal: u32_at(r, 32),
        member: Member(r[46]),
        kind: Kind::from_code(r[47])?,
        flags: Flags(r[48]),
        lba: u64_at(r, 24),
        blocks: u32_at(r, 36),
        tag: u64_at(r, 16),
    };
    let sound = riopipe_order::entry::loggable(&attribute)
        && attribute.seq > Seq::ZERO
        && attribute.seq_end() <= super::SEQ_MAX
        && r[49] & !0b11 == 0;
    sound.then(|| ListedEntry {
        position: Position(u64_at(r, 0)),
        attribute,
        incarnation: u32_at(r, 52),
        persisted: r[49] & 1 != 0,
        durable: r[49] & 2 != 0,
    })
}

/// Length of a [`Settle`] on the wire, bytes.
pub const SETTLE_LEN: usize = 4096;
/// The most streams that one settle command takes.
pub const SETTLE_STREAMS_MAX: usize = 160;
const SETTLE_HEADER: usize = 32;
const SETTLE_RECORD: usize = 24;

/// The recovered seqs of some streams of a volume.
///
/// | byte | field |
/// |---|---|
/// | 0–15 | volume id |
/// | 16–19 | generation |
/// | 20–21 | streams that follow |
/// | 32– | for each: stream (2 bytes), flags (1: bit 0 keep the in-place list), 0 (5), k (8), tag (8) |
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
    /// Whether the entries that the log lists beyond k stay until they are acknowledged (T9).
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
        let mut d = alloc::vec![0; SETTLE_LEN];
        d[0..16].copy_from_slice(&self.volume.0);
        d[16..20].copy_from_slice(&self.generation.to_le_bytes());
        d[20..22].copy_from_slice(&(self.streams.len() as u16).to_le_bytes());
        let records = d[SETTLE_HEADER..].chunks_exact_mut(SETTLE_RECORD);
        for (stream, r) in self.streams.iter().zip(records) {
            r[0..2].copy_from_slice(&stream.stream.0.to_le_bytes());
            r[2] = u8::from(stream.keep);
            r[8..16].copy_from_slice(&stream.k.0.to_le_bytes());
            r[16..24].copy_from_slice(&stream.tag.to_le_bytes());
        }
        d
    }

    /// Reads a settlement; `None` if it is short or not valid (T18).
    #[must_use]
    pub fn decode(d: &[u8]) -> Option<Self> {
        if d.len() < SETTLE_LEN {
            return None;
        }
        let count = usize::from(u16::from_le_bytes([d[20], d[21]]));
        if count > SETTLE_STREAMS_MAX {
            return None;
        }
        let records = d[SETTLE_HEADER..].chunks_exact(SETTLE_RECORD).take(count);
        let streams = records.map(|r| {
            let is_valid = r[2] & !1 == 0 && u64_at(r, 8) <= super::SEQ_MAX.0;
            is_valid.then(|| SettleStream {
                stream: StreamId(u16::from_le_bytes([r[0], r[1]])),
                keep: r[2] & 1 != 0,
                k: Seq(u64_at(r, 8)),
                tag: u64_at(r, 16),
            })
        });
        Some(Self {
            volume: VolumeId(array_at(d, 0)),
            generation: u32_at(d, 16),
            streams: streams.collect::<Option<_>>()?,
        })
    }
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
