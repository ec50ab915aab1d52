//! The decisions of recovery: which entries are durable, how far each stream reaches, and which
//! blocks must be undone (Rio paper §4.4).
//!
//! A target [`validate`]s the live entries of each of its partitions; the initiator merges the
//! lists of all targets and [`decide`]s. Nothing here changes anything.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use crate::attribute::{Attribute, Flags, Kind, Member, Seq, StreamId};
use crate::entry::Position;
use crate::group::{GroupCount, count_group};
use crate::ordering_log::LoggedEntry;
use crate::probe::{self, Plant, Rare};

/// For each live entry of a partition, in the order given: whether it is durable (T4).
///
/// An entry is durable if
///
/// - its persist word is set, or
/// - a persisted flush entry on the same drive comes later in stream order: the gate issued that
///   FLUSH after all earlier entries there had completed, without a failure among them, or
/// - a durable entry on the same drive comes later in stream order and overlaps it: the later one
///   was submitted only after this one had completed (T12).
///
/// The last rule applies whether or not the drive has a volatile cache now. While a drive has one,
/// only flush entries get a persist word there, and they cover all earlier entries anyway. So if
/// another entry has a persist word, the drive had no volatile cache *at that time*, and kept
/// completed writes. An owner that came back at that time has counted the overlapped entry as done,
/// and does not send it again. So the entry stays durable when the drive comes back without its
/// protection (T27).
///
/// An entry covers no entry of another drive or generation (live entries of a partition are of one
/// generation). It does cover entries of earlier incarnations within its generation. Within a
/// generation the owner replays everything that is not durable, in order, before anything new (P7).
/// So a later flush covers the replayed writes, too.
#[must_use]
pub fn validate(entries: &[LoggedEntry]) -> Vec<bool> {
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|&i| stream_order(&entries[i].attribute));
    let mut durable = vec![false; entries.len()];
    let mut flushed: Vec<Member> = Vec::new();
    // The blocks that later durable entries cover, by member: disjoint runs, first to end.
    let mut covered: BTreeMap<(u8, u64), u64> = BTreeMap::new();
    for &i in order.iter().rev() {
        let LoggedEntry { attribute: a, persisted, .. } = &entries[i];
        let is_covered_by_flush = flushed.contains(&a.member)
            || probe::planted(Plant::T4CoverOtherDrive) && !flushed.is_empty();
        let is_covered_by_overlap =
            overlaps(&covered, a) && !probe::planted(Plant::T12NoOverlapCover);
        durable[i] = *persisted || is_covered_by_flush || is_covered_by_overlap;
        if !persisted && is_covered_by_flush {
            probe::hit(Rare::CoveredByFlush);
        } else if !persisted && is_covered_by_overlap {
            probe::hit(Rare::CoveredByOverlap);
        }
        if *persisted && a.is_flush() && !flushed.contains(&a.member) {
            flushed.push(a.member);
        }
        if durable[i] {
            cover(&mut covered, a);
        }
    }
    durable
}

/// The order of a stream's entries on one server.
fn stream_order(a: &Attribute) -> (Seq, u16) {
    (a.seq, a.index)
}

/// Whether an entry touches a block of a covered run.
fn overlaps(covered: &BTreeMap<(u8, u64), u64>, a: &Attribute) -> bool {
    let end = a.lba.saturating_add(u64::from(a.blocks));
    let before = covered.range((a.member.0, 0)..(a.member.0, end)).next_back();
    before.is_some_and(|(_, &run_end)| run_end > a.lba)
}

/// Adds the blocks of an entry to the covered runs, and joins runs that touch.
fn cover(covered: &mut BTreeMap<(u8, u64), u64>, a: &Attribute) {
    let (mut first, mut end) = (a.lba, a.lba.saturating_add(u64::from(a.blocks)));
    while let Some((&key, &run_end)) =
        covered.range((a.member.0, 0)..=(a.member.0, end)).next_back()
    {
        if run_end < first {
            break;
        }
        (first, end) = (first.min(key.1), end.max(run_end));
        covered.remove(&key);
    }
    covered.insert((a.member.0, first), end);
}

/// One live entry as a target reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedEntry {
    /// Its position in the log.
    pub position: Position,
    /// Its attribute.
    pub attribute: Attribute,
    /// The incarnation of the target that appended it.
    pub incarnation: u32,
    /// Whether its persist word is set.
    pub persisted: bool,
    /// Whether it is durable, by [`validate`].
    pub durable: bool,
}

/// The content of one server's partition of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamList {
    /// The server, as the volume's topology counts them.
    pub server: u16,
    /// The last group that is released (T1).
    pub released: Seq,
    /// The newest group up to `released` of which the partition knows, and the caller's tag of it.
    pub tag: (Seq, u64),
    /// An earlier recovery has settled the partition. `released` is its k, and a listed entry has
    /// been undone or is an in-place update (T9).
    pub settled: bool,
    /// The content of this server's log was given up for the stream, and the stream has not been
    /// started since (T26).
    pub in_doubt: bool,
    /// The live entries.
    pub entries: Vec<ListedEntry>,
}

/// Blocks of one drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriveExtent {
    /// The drive.
    pub member: Member,
    /// First block on it.
    pub lba: u64,
    /// Blocks.
    pub blocks: u64,
}

/// An in-place update beyond the prefix: the blocks may hold the old content, the new, or, where a
/// fresh write beyond the prefix touched them too, zeroes (T11).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InPlace {
    /// Its (first) group.
    pub seq: Seq,
    /// Its blocks.
    pub extent: DriveExtent,
}

/// The plan of a recovery for one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamPlan {
    /// The stream.
    pub stream: StreamId,
    /// The largest released mark among the servers.
    pub released: Seq,
    /// The prefix: every group up to this is whole and durable (P1, P2).
    pub k: Seq,
    /// The caller's tag of group k; 0 if no log knows it (a stream that was never written).
    pub tag: u64,
    /// Entries listed by all servers, replayed copies and those up to `released` included.
    pub found: u32,
    /// How many groups beyond the released mark are kept.
    pub kept: u64,
    /// How many groups beyond k are dropped. At least one entry of each was found; of a request
    /// merged over several groups, all of them.
    pub dropped: u64,
    /// Fresh blocks of dropped groups, to be zeroed: sorted, adjacent ones joined.
    pub undo: Vec<DriveExtent>,
    /// In-place updates of dropped groups, in order of seq.
    pub in_place: Vec<InPlace>,
    /// Whether a log was given up. Then nothing is undone, on no server (T26).
    pub log_given_up: bool,
    /// Fresh blocks and extensions of dropped groups that are left because a log was given up, in
    /// order of seq. They may be of a group that was durable and confirmed.
    pub in_doubt: Vec<InPlace>,
    /// How many servers an earlier, interrupted recovery has settled.
    pub settled: u16,
}

impl StreamPlan {
    /// Whether no server lists anything.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.found == 0
    }

    /// How many blocks are zeroed.
    #[must_use]
    pub fn undone_blocks(&self) -> u64 {
        self.undo.iter().map(|extent| extent.blocks).sum()
    }
}

/// The advice about logs that are not valid (T26).
pub const ADVICE: &str = "put the right logs back, or open the volume with accept_lost_log: then \
    nothing is undone on any target, and what is in doubt is listed";

/// Why the lists give no prefix. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecideError {
    /// Entries of one group that cannot both be true (T6).
    #[error(
        "the logs contradict each other about group {seq} of stream {stream}: they are damaged, or \
         not all of this volume; {ADVICE}"
    )]
    Contradiction {
        /// The stream.
        stream: StreamId,
        /// The group.
        seq: Seq,
    },
    /// An entry for a drive that the reporting server does not have.
    #[error(
        "a target's log has an entry of stream {stream}, group {seq}, for member {member}, which is \
         not on that target; {ADVICE}"
    )]
    WrongServer {
        /// The stream.
        stream: StreamId,
        /// The group.
        seq: Seq,
        /// The server, as the volume counts them.
        server: u16,
        /// The member.
        member: u8,
    },
    /// A server was settled at another group than another one, or at one before the released mark
    /// of another. No stream starts before all are settled, so that cannot be (T9).
    #[error(
        "stream {stream} was settled at group {k} on one target, and is at {other} on another: \
         the logs are not all of this volume, or not of the same time; {ADVICE}"
    )]
    Settled {
        /// The stream.
        stream: StreamId,
        /// The group at which it was settled.
        k: Seq,
        /// The group of the other server.
        other: Seq,
    },
}

impl DecideError {
    /// The stream that the error is about.
    #[must_use]
    pub const fn stream(&self) -> StreamId {
        match self {
            Self::Contradiction { stream, .. }
            | Self::WrongServer { stream, .. }
            | Self::Settled { stream, .. } => *stream,
        }
    }
}

/// Merges the lists of all servers for one stream, and decides.
///
/// `server_of` returns the server of a drive; `None` for a drive that the volume does not have.
/// `lists` has one element for **every** server of the volume (T20).
///
/// Where a log was given up, part of the order is missing, and no undo is safe: a group behind a
/// gap in the remaining lists may have been confirmed. Then nothing is undone. Groups are counted
/// from the largest mark on, as long as the remaining lists show them whole. All entries beyond are
/// listed, whatever their place (T26). An entry that contradicts the others is then no error, but
/// it proves nothing.
///
/// # Errors
/// The lists cannot all be of this volume, or are damaged.
pub fn decide(
    stream: StreamId,
    lists: &[StreamList],
    server_of: impl Fn(Member) -> Option<u16>,
) -> Result<StreamPlan, DecideError> {
    let given_up = lists.iter().any(|list| list.in_doubt) && !probe::planted(Plant::T26UndoInDoubt);
    let readable: Vec<StreamList>;
    let lists = if given_up {
        probe::hit(Rare::LogInDoubt);
        // Entries for a drive that their server does not have are left out.
        let own_entries = |list: &StreamList| {
            let entries = list.entries.iter().copied();
            let is_own = |e: &ListedEntry| server_of(e.attribute.member) == Some(list.server);
            entries.filter(is_own).collect::<Vec<_>>()
        };
        let without_others =
            |list: &StreamList| StreamList { entries: own_entries(list), ..list.clone() };
        readable = lists.iter().map(without_others).collect();
        &readable[..]
    } else {
        check_servers(stream, lists, &server_of)?;
        lists
    };
    let marks = lists.iter().map(|list| list.released);
    let released = if probe::planted(Plant::T1SmallestMark) {
        marks.min().unwrap_or_default()
    } else {
        marks.max().unwrap_or_default()
    };
    let mut entries: Vec<&ListedEntry> = lists
        .iter()
        .flat_map(|list| &list.entries)
        .filter(|entry| entry.attribute.seq_end() > released)
        .collect();
    entries.sort_by_key(|entry| stream_order(&entry.attribute));
    let groups = Groups { released, entries: &entries };
    if !given_up {
        groups.check(stream)?;
    }
    let settled = if given_up {
        // A log that was given up may have been settled in its own time, long before the last
        // groups. If an attempt of this recovery settled it, its mark is k, and the other lists
        // show the same.
        lists.iter().any(|list| list.settled && !list.in_doubt).then_some(released)
    } else {
        settled_at(stream, lists, released)?
    };
    let k = match settled {
        // An earlier recovery has dealt with everything beyond this k. Nothing is counted again
        // (T9).
        Some(k) => {
            probe::hit(Rare::SettledBefore);
            k
        }
        None if given_up => {
            // A log that was given up proves nothing but its released mark. An older log may have
            // entries of groups whose numbers were given again since (T24, T26).
            let is_in_valid_log = |entry: &&ListedEntry| {
                let mut valid = lists.iter().filter(|list| !list.in_doubt);
                valid.any(|list| server_of(entry.attribute.member) == Some(list.server))
            };
            let entries: Vec<&ListedEntry> =
                entries.iter().copied().filter(is_in_valid_log).collect();
            Groups { released, entries: &entries }.prefix()
        }
        None => groups.prefix(),
    };
    let beyond = || groups.iter().filter(|group| group[0].attribute.seq > k);
    if beyond().next().is_some_and(|group| !is_whole(group, |_| true)) {
        probe::hit(Rare::PartialGroup);
    }
    if beyond().any(|group| is_whole(group, |entry| entry.durable)) {
        probe::hit(Rare::WholeBeyondK);
    }
    let Beyond { undo, in_place, in_doubt } = beyond_prefix(lists, k, given_up);
    Ok(StreamPlan {
        stream,
        released,
        k,
        tag: tag_of(lists, k),
        found: lists.iter().map(|list| list.entries.len() as u32).sum(),
        kept: k.0.saturating_sub(released.0),
        dropped: beyond().map(|group| u64::from(group[0].attribute.span)).sum(),
        undo,
        in_place,
        log_given_up: given_up,
        in_doubt,
        settled: lists.iter().filter(|list| list.settled).count() as u16,
    })
}

/// Whether every entry is for a drive of the server that reports it.
fn check_servers(
    stream: StreamId,
    lists: &[StreamList],
    server_of: impl Fn(Member) -> Option<u16>,
) -> Result<(), DecideError> {
    for list in lists {
        for ListedEntry { attribute: a, .. } in &list.entries {
            if server_of(a.member) != Some(list.server) {
                let (server, member) = (list.server, a.member.0);
                return Err(DecideError::WrongServer { stream, seq: a.seq, server, member });
            }
        }
    }
    Ok(())
}

/// The k that an interrupted recovery has recorded, if there was one.
fn settled_at(
    stream: StreamId,
    lists: &[StreamList],
    released: Seq,
) -> Result<Option<Seq>, DecideError> {
    let Some(first) = lists.iter().find(|list| list.settled) else {
        return Ok(None);
    };
    let k = first.released;
    if let Some(other) = lists.iter().find(|list| list.settled && list.released != k) {
        return Err(DecideError::Settled { stream, k, other: other.released });
    }
    if released > k {
        return Err(DecideError::Settled { stream, k, other: released });
    }
    Ok(Some(k))
}

/// The entries beyond the released mark, in stream order.
struct Groups<'a> {
    released: Seq,
    entries: &'a [&'a ListedEntry],
}

impl<'a> Groups<'a> {
    /// The entries, group by group. A request that was merged over several whole groups counts as
    /// one group.
    fn iter(&self) -> impl Iterator<Item = &'a [&'a ListedEntry]> + use<'a> {
        self.entries.chunk_by(|a, b| a.attribute.seq == b.attribute.seq)
    }

    /// Whether all entries can be true at once (T6).
    fn check(&self, stream: StreamId) -> Result<(), DecideError> {
        let mut last = Seq::ZERO;
        for group in self.iter() {
            let seq = group[0].attribute.seq;
            let count = count_group(group.iter().map(|entry| &entry.attribute));
            // A group is in one merged request, or in requests of its own, never in both: replay
            // keeps shapes (T6).
            if count == GroupCount::Contradictory || seq <= last {
                return Err(DecideError::Contradiction { stream, seq });
            }
            last = group[0].attribute.seq_end();
        }
        Ok(())
    }

    /// The last group before the first hole (P1): every group up to it is whole and durable
    /// everywhere.
    fn prefix(&self) -> Seq {
        let mut k = self.released;
        for group in self.iter() {
            let first = &group[0].attribute;
            // A request merged over groups on both sides of the mark is durable as a whole, because
            // the mark proves it.
            let is_durable = first.seq <= self.released || is_whole(group, |entry| entry.durable);
            let has_gap = first.seq > k.next() && !probe::planted(Plant::P1SkipGap);
            if has_gap || !is_durable {
                break;
            }
            // Where a log was given up, groups may overlap that can't both be true.
            k = k.max(first.seq_end());
        }
        k
    }
}

/// Whether those entries for which `which` is true are all entries of the group, and each counts
/// once (T6).
fn is_whole(entries: &[&ListedEntry], which: impl Fn(&ListedEntry) -> bool) -> bool {
    let counted = || entries.iter().filter(|e| which(e)).map(|e| &e.attribute);
    if probe::planted(Plant::T6IgnoreNum) {
        return counted().next().is_some();
    }
    if probe::planted(Plant::T6CountTwice) {
        return counted().next().is_some_and(|a| counted().count() >= usize::from(a.num));
    }
    count_group(counted()) == GroupCount::Whole
}

/// The blocks of the entries beyond the prefix; the fields are those of [`StreamPlan`].
#[derive(Default)]
struct Beyond {
    undo: Vec<DriveExtent>,
    in_place: Vec<InPlace>,
    in_doubt: Vec<InPlace>,
}

/// The blocks beyond the prefix: fresh ones to be zeroed, in-place updates to be listed (T11).
///
/// Extensions are neither zeroed nor listed: with the old or the new content of the block, the
/// prefix has all that it needs. If an extension extends a fresh write beyond the prefix, that
/// write is zeroed, and the extension with it. The log that has the extension also has the fresh
/// write, because all writes of a stream to one block are in one log, in their order.
///
/// Where a log was given up, fresh writes and extensions are listed instead (T26): k may be below
/// the state that the caller knows, and the content of the block may have been confirmed.
fn beyond_prefix(lists: &[StreamList], k: Seq, given_up: bool) -> Beyond {
    let Beyond { mut undo, mut in_place, mut in_doubt } = Beyond::default();
    for list in lists {
        for ListedEntry { attribute: a, .. } in &list.entries {
            if a.seq_end() <= k || a.kind == Kind::Flush {
                continue;
            }
            let blocks = u64::from(a.blocks);
            let extent = DriveExtent { member: a.member, lba: a.lba, blocks };
            let update = a.flags.has(Flags::IN_PLACE);
            let extension = a.flags.has(Flags::EXTEND);
            if update && !probe::planted(Plant::T11NotListed)
                || extension && probe::planted(Plant::T11ListExtensions)
            {
                probe::hit(Rare::InPlaceListed);
                in_place.push(InPlace { seq: a.seq, extent });
            }
            if given_up {
                if !update {
                    in_doubt.push(InPlace { seq: a.seq, extent });
                }
                continue;
            }
            let is_left_alone = update && !probe::planted(Plant::T11UndoInPlace)
                || extension && !probe::planted(Plant::T11UndoExtensions);
            if !is_left_alone && !list.settled {
                undo.push(extent);
            } else if extension {
                probe::hit(Rare::ExtensionLeft);
            }
        }
    }
    for listed in [&mut in_place, &mut in_doubt] {
        listed.sort_unstable();
        listed.dedup();
    }
    Beyond { undo: join(undo), in_place, in_doubt }
}

/// Sorts extents and joins those that touch or overlap.
#[must_use]
pub fn join(mut extents: Vec<DriveExtent>) -> Vec<DriveExtent> {
    extents.sort_unstable();
    let mut joined: Vec<DriveExtent> = Vec::new();
    for extent in extents {
        match joined.last_mut() {
            Some(last) if last.member == extent.member && extent.lba <= last.lba + last.blocks => {
                let end = (extent.lba + extent.blocks).max(last.lba + last.blocks);
                last.blocks = end - last.lba;
            }
            _ => joined.push(extent),
        }
    }
    joined
}

/// The caller's tag of the newest group up to k. A log that was given up may be older: beyond its own
/// mark it may have groups of another history under the same numbers (T26).
fn tag_of(lists: &[StreamList], k: Seq) -> u64 {
    let listed = lists.iter().flat_map(|list| {
        let end = if list.in_doubt { list.released } else { k };
        list.entries.iter().filter(move |entry| entry.attribute.seq_end() <= end)
    });
    let listed = listed.map(|e| (e.attribute.seq_end(), e.attribute.tag));
    let marked = lists.iter().map(|list| list.tag);
    let known = listed.chain(marked).filter(|(seq, _)| *seq <= k);
    known.max_by_key(|(seq, _)| *seq).map_or(0, |(_, tag)| tag)
}
