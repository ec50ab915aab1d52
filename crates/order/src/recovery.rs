//! The decisions of recovery (Rio paper §4.4). Nothing here changes a log or a drive.
//!
//! 1. Each target reads the live entries of its partitions, and [`validate`]s them: which of them
//!    are durable?
//! 2. The initiator takes the lists of all targets, and [`decide`]s for each stream: which group is
//!    the last of the prefix, and which blocks of the groups beyond it must be undone?

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::attribute::{Attribute, Flags, GroupTag, Kind, Member, Seq, StreamId};
use crate::entry::Position;
use crate::group::{GroupCount, count_group};
use crate::probe::{self, Plant, Rare};
pub use validation::validate;

mod validation;

/// The sort key for the order of a stream's entries on one server.
fn stream_order(attribute: &Attribute) -> (Seq, u16) {
    (attribute.seq, attribute.index)
}

/// A live entry, as a target reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedEntry {
    /// The position of the entry in its log.
    pub position: Position,
    /// The attribute.
    pub attribute: Attribute,
    /// The incarnation of the target that appended the entry.
    pub incarnation: u32,
    /// Whether the persist word is set.
    pub persisted: bool,
    /// Whether the entry is durable, by [`validate`].
    pub durable: bool,
}

/// The content of one server's partition of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamList {
    /// The server, by its index in the volume's topology.
    pub server: u16,
    /// The last group that is released.
    pub released: Seq,
    /// The newest group up to `released` that the partition knows, with the caller's tag.
    pub newest_tag: GroupTag,
    /// Whether an earlier recovery has settled the partition. Then `released` is the seq that it
    /// recovered, and a listed entry has been undone or is an in-place update.
    pub settled: bool,
    /// Whether the content of this server's log was given up for the stream, and the stream has not
    /// been started since (trap T26).
    pub in_doubt: bool,
    /// The live entries.
    pub entries: Vec<ListedEntry>,
}

impl StreamList {
    /// The list of a server whose log is lost: it has no entries and proves nothing.
    #[must_use]
    pub fn of_lost_log(server: u16) -> Self {
        Self {
            server,
            released: Seq::ZERO,
            newest_tag: GroupTag::NONE,
            settled: false,
            in_doubt: true,
            entries: Vec::new(),
        }
    }
}

/// Blocks of one drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriveExtent {
    /// The drive.
    pub member: Member,
    /// The first block on the drive.
    pub lba: u64,
    /// The number of blocks.
    pub blocks: u64,
}

/// An in-place update beyond the prefix. Its blocks may hold the old content or the new. If a fresh
/// write beyond the prefix touched them, too, they may hold zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InPlace {
    /// The group of the update; the first one if the entry covers several groups.
    pub seq: Seq,
    /// The blocks of the update.
    pub extent: DriveExtent,
}

/// A redirected update inside the prefix that may not be at its home. Its data is in the prepare
/// area of its drive, and is copied home.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Redirected {
    /// The drive, and the blocks at home.
    pub home: DriveExtent,
    /// The first block of the data, counted from the start of the prepare area.
    pub prepared_block: u32,
}

/// The plan of a recovery for one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamPlan {
    /// The stream.
    pub stream: StreamId,
    /// The largest released mark among the servers.
    pub released: Seq,
    /// The recovered seq: every group up to this one is whole and durable.
    pub k: Seq,
    /// The caller's tag of group k; 0 if no log knows it, because the stream was never written.
    pub tag: u64,
    /// The number of entries that all servers list, including replayed copies and entries up to
    /// `released`.
    pub found: u32,
    /// The number of groups beyond the released mark that are kept.
    pub kept: u64,
    /// The number of groups beyond k that are dropped. Only groups with at least one listed entry
    /// count. A request that was merged over several groups counts all of them.
    pub dropped: u64,
    /// The fresh blocks of dropped groups, which must be zeroed: sorted, adjacent ones joined.
    pub undo: Vec<DriveExtent>,
    /// The writes of which `undo` has the blocks, in order of seq.
    pub undone_writes: Vec<InPlace>,
    /// The redirected updates inside the prefix that are copied home. Each block is there once, with
    /// the newest update.
    pub redirected: Vec<Redirected>,
    /// The in-place updates of dropped groups, in order of seq. A redirected one is not there: its
    /// home is as it was.
    pub in_place: Vec<InPlace>,
    /// Whether a log was given up. Then no server undoes anything (trap T26).
    pub log_given_up: bool,
    /// The fresh blocks and the extensions of dropped groups that are left as they are because a
    /// log was given up, in order of seq. They may be of a group that was durable and confirmed.
    pub in_doubt: Vec<InPlace>,
    /// The number of servers that an earlier, interrupted recovery has settled.
    pub settled: u16,
}

impl StreamPlan {
    /// Whether no server lists an entry.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.found == 0
    }

    /// The number of blocks that are zeroed.
    #[must_use]
    pub fn undone_blocks(&self) -> u64 {
        self.undo.iter().map(|extent| extent.blocks).sum()
    }
}

/// The advice about logs that are not valid (trap T26).
pub const ADVICE: &str = "put the right logs back, or open the volume with accept_lost_log: then \
    nothing is undone on any target, and what is in doubt is listed";

/// Why the lists give no prefix. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecideError {
    /// Two entries of one group contradict each other: a group has one number of entries and one
    /// tag, and a replay changes no entry.
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
    /// An entry is for a drive that the reporting server does not have.
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
    /// Two servers were settled at different groups, or a server was settled at a group before the
    /// released mark of another. This cannot happen to logs of one volume, because no stream starts
    /// before all its logs are settled at one group.
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

/// Merges the lists of all servers for one stream, and decides what the recovery must do.
///
/// `server_of` returns the server of a drive, or `None` for a drive that the volume does not have.
/// `lists` must have one element for **every** server of the volume. Without the list of one
/// server, the prefix could end too late (trap T20).
///
/// If a log was given up, a part of the order is unknown, and no undo is safe: a group behind a gap
/// in the remaining lists may have been confirmed (trap T26). Then
///
/// - nothing is undone,
/// - the prefix goes from the largest released mark as far as the remaining lists show whole
///   groups,
/// - all entries beyond the prefix are listed, whatever their place,
/// - entries that contradict each other are no error, but they prove nothing.
///
/// # Errors
/// The lists cannot all be of this volume, or they are damaged.
pub fn decide(
    stream: StreamId,
    lists: &[StreamList],
    server_of: impl Fn(Member) -> Option<u16>,
) -> Result<StreamPlan, DecideError> {
    let given_up =
        lists.iter().any(|list| list.in_doubt) && !probe::is_bug_planted(Plant::T26UndoInDoubt);
    let readable_lists: Vec<StreamList>;
    let lists = if given_up {
        probe::count_rare(Rare::LogInDoubt);
        readable_lists =
            lists.iter().map(|list| without_foreign_entries(list, &server_of)).collect();
        &readable_lists[..]
    } else {
        check_servers(stream, lists, &server_of)?;
        lists
    };
    let released = largest_released(lists);
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
        settled_beside_given_up(lists, released)
    } else {
        settled_at(stream, lists, released)?
    };
    let k = match settled {
        // The earlier recovery has dealt with all groups beyond this seq. They are not counted
        // again, because it may have undone some of their entries already (trap T9).
        Some(k) => {
            probe::count_rare(Rare::SettledBefore);
            k
        }
        None if given_up => prefix_of_valid_logs(lists, &groups, &server_of),
        None => groups.prefix(),
    };
    let beyond = || groups.iter().filter(|group| group[0].attribute.seq > k);
    if beyond().next().is_some_and(|group| !is_whole(group, |_| true)) {
        probe::count_rare(Rare::PartialGroup);
    }
    if beyond().any(|group| is_whole(group, |entry| entry.durable)) {
        probe::count_rare(Rare::WholeBeyondK);
    }
    let BlocksBeyondPrefix { undone_writes, in_place, in_doubt } =
        blocks_beyond_prefix(lists, k, given_up);
    Ok(StreamPlan {
        stream,
        released,
        k,
        tag: tag_of(lists, k),
        found: lists.iter().map(|list| list.entries.len() as u32).sum(),
        kept: k.0.saturating_sub(released.0),
        dropped: beyond().map(|group| u64::from(group[0].attribute.span)).sum(),
        undo: join(undone_writes.iter().map(|write| write.extent).collect()),
        undone_writes,
        redirected: redirected_updates(lists, released, k),
        in_place,
        log_given_up: given_up,
        in_doubt,
        settled: lists.iter().filter(|list| list.settled).count() as u16,
    })
}

/// The list without the entries for drives that its server does not have.
fn without_foreign_entries(
    list: &StreamList,
    server_of: impl Fn(Member) -> Option<u16>,
) -> StreamList {
    let is_own = |entry: &ListedEntry| server_of(entry.attribute.member) == Some(list.server);
    let entries = list.entries.iter().copied().filter(is_own).collect();
    StreamList { entries, ..list.clone() }
}

/// The largest released mark among the servers. A mark on one server proves that the groups up to
/// it are durable on all of them (trap T1).
fn largest_released(lists: &[StreamList]) -> Seq {
    let marks = lists.iter().map(|list| list.released);
    let largest =
        if probe::is_bug_planted(Plant::T1SmallestMark) { marks.min() } else { marks.max() };
    largest.unwrap_or_default()
}

/// The seq that an interrupted recovery has recorded, where a log was given up; `None` if there was
/// no such recovery.
///
/// A log that was given up may have been settled in its own time, long before the last groups. So
/// its settled state alone proves nothing. If an attempt of this recovery settled it, another list
/// is settled, too, and `released` is the recorded seq.
fn settled_beside_given_up(lists: &[StreamList], released: Seq) -> Option<Seq> {
    let has_settled_list = lists.iter().any(|list| list.settled && !list.in_doubt);
    has_settled_list.then_some(released)
}

/// The prefix by the logs that were not given up. A log that was given up proves nothing but its
/// released mark: it may be an older copy, with entries of groups whose numbers were given again
/// since (traps T24, T26).
fn prefix_of_valid_logs(
    lists: &[StreamList],
    groups: &Groups<'_>,
    server_of: impl Fn(Member) -> Option<u16>,
) -> Seq {
    let is_in_valid_log = |entry: &&ListedEntry| {
        let mut valid_lists = lists.iter().filter(|list| !list.in_doubt);
        valid_lists.any(|list| server_of(entry.attribute.member) == Some(list.server))
    };
    let entries: Vec<&ListedEntry> =
        groups.entries.iter().copied().filter(is_in_valid_log).collect();
    Groups { released: groups.released, entries: &entries }.prefix()
}

/// Checks that every entry is for a drive of the server that reports the entry.
fn check_servers(
    stream: StreamId,
    lists: &[StreamList],
    server_of: impl Fn(Member) -> Option<u16>,
) -> Result<(), DecideError> {
    for list in lists {
        for ListedEntry { attribute, .. } in &list.entries {
            if server_of(attribute.member) != Some(list.server) {
                return Err(DecideError::WrongServer {
                    stream,
                    seq: attribute.seq,
                    server: list.server,
                    member: attribute.member.0,
                });
            }
        }
    }
    Ok(())
}

/// The seq that an interrupted recovery has recorded, if there was one.
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

    /// Checks that no two entries contradict each other.
    fn check(&self, stream: StreamId) -> Result<(), DecideError> {
        let mut last_checked = Seq::ZERO;
        for group in self.iter() {
            let seq = group[0].attribute.seq;
            let count = count_group(group.iter().map(|entry| &entry.attribute));
            // A group is in one merged request, or it has requests of its own. It cannot be in
            // both, because a replay changes no request.
            let is_in_earlier_request = seq <= last_checked;
            if count == GroupCount::Contradictory || is_in_earlier_request {
                return Err(DecideError::Contradiction { stream, seq });
            }
            last_checked = group[0].attribute.seq_end();
        }
        Ok(())
    }

    /// The last group of the prefix: every group up to it is whole and durable on all servers.
    fn prefix(&self) -> Seq {
        let mut k = self.released;
        for group in self.iter() {
            let first = &group[0].attribute;
            // If a request was merged over groups on both sides of the mark, the mark proves that
            // the whole request is durable.
            let is_durable = first.seq <= self.released || is_whole(group, |entry| entry.durable);
            let has_gap = first.seq > k.next() && !probe::is_bug_planted(Plant::P1SkipGap);
            if has_gap || !is_durable {
                break;
            }
            // If a log was given up, groups may overlap and contradict each other.
            k = k.max(first.seq_end());
        }
        k
    }
}

/// Whether the entries that `counts` accepts are all entries of the group. Copies of an entry count
/// once.
fn is_whole(entries: &[&ListedEntry], counts: impl Fn(&ListedEntry) -> bool) -> bool {
    let counted = || entries.iter().filter(|entry| counts(entry)).map(|entry| &entry.attribute);
    if probe::is_bug_planted(Plant::T6IgnoreNum) {
        return counted().next().is_some();
    }
    if probe::is_bug_planted(Plant::T6CountTwice) {
        return counted().next().is_some_and(|a| counted().count() >= usize::from(a.num));
    }
    count_group(counted()) == GroupCount::Whole
}

/// The blocks of the entries beyond the prefix. The fields are those of [`StreamPlan`].
#[derive(Default)]
struct BlocksBeyondPrefix {
    undone_writes: Vec<InPlace>,
    in_place: Vec<InPlace>,
    in_doubt: Vec<InPlace>,
}

/// Finds the blocks beyond the prefix: fresh ones, to be zeroed, and in-place updates, to be listed
/// (trap T11).
///
/// Extensions are neither zeroed nor listed: the prefix needs neither the old nor the new content
/// of their blocks. If an extension extends a fresh write beyond the prefix, the undo zeroes that
/// write, and the extension with it. The log that has the extension also has the fresh write,
/// because all writes of a stream to one block are in one log.
///
/// If a log was given up, fresh writes and extensions are listed as in doubt, and nothing is
/// zeroed: the prefix may end before the state that the caller knows, and the content of the blocks
/// may have been confirmed (trap T26).
fn blocks_beyond_prefix(lists: &[StreamList], k: Seq, given_up: bool) -> BlocksBeyondPrefix {
    let BlocksBeyondPrefix { mut undone_writes, mut in_place, mut in_doubt } =
        BlocksBeyondPrefix::default();
    for list in lists {
        for ListedEntry { attribute, .. } in &list.entries {
            if attribute.seq_end() <= k || attribute.kind == Kind::Flush {
                continue;
            }
            let seq = attribute.seq;
            let extent = DriveExtent {
                member: attribute.member,
                lba: attribute.lba,
                blocks: u64::from(attribute.blocks),
            };
            if attribute.flags.has(Flags::REDIRECTED) && !given_up {
                // Its home is as it was.
                continue;
            }
            let is_update = attribute.flags.has(Flags::IN_PLACE);
            let is_extension = attribute.flags.has(Flags::EXTEND);
            if is_update && !probe::is_bug_planted(Plant::T11NotListed)
                || is_extension && probe::is_bug_planted(Plant::T11ListExtensions)
            {
                probe::count_rare(Rare::InPlaceListed);
                in_place.push(InPlace { seq, extent });
            }
            if given_up {
                if !is_update {
                    in_doubt.push(InPlace { seq, extent });
                }
                continue;
            }
            let is_left_alone = is_update && !probe::is_bug_planted(Plant::T11UndoInPlace)
                || is_extension && !probe::is_bug_planted(Plant::T11UndoExtensions);
            if !is_left_alone && !list.settled {
                undone_writes.push(InPlace { seq, extent });
            } else if is_extension {
                probe::count_rare(Rare::ExtensionLeft);
            }
        }
    }
    for listed in [&mut undone_writes, &mut in_place, &mut in_doubt] {
        listed.sort_unstable();
        listed.dedup();
    }
    BlocksBeyondPrefix { undone_writes, in_place, in_doubt }
}

/// Finds the redirected updates that are to be copied home: those that are durable and behind the
/// released mark. Of several updates of a block the newest counts.
///
/// An entry up to the released mark is not needed: its update is durable at home. Nor is one of a
/// log that is settled: it was copied before. If a log was given up, k may end before the state that
/// the caller knows. Then the other logs' durable entries count, also those beyond k (trap T26).
fn redirected_updates(lists: &[StreamList], released: Seq, k: Seq) -> Vec<Redirected> {
    let given_up = lists.iter().any(|list| list.in_doubt);
    let valid_lists = lists.iter().filter(|list| !list.settled && !list.in_doubt);
    let mut entries: Vec<&ListedEntry> = valid_lists
        .flat_map(|list| &list.entries)
        .filter(|ListedEntry { attribute, durable, .. }| {
            let is_inside = attribute.seq_end() <= k || given_up && *durable;
            attribute.kind != Kind::Flush && attribute.seq_end() > released && is_inside
        })
        .collect();
    entries.sort_by_key(|entry| stream_order(&entry.attribute));
    if probe::is_bug_planted(Plant::HoraeOlderCopied) {
        entries.reverse();
    }
    if probe::is_bug_planted(Plant::HoraeNotCopied)
        || given_up && probe::is_bug_planted(Plant::HoraeNotCopiedInDoubt)
    {
        entries.clear();
    }
    let mut newest = BTreeMap::new();
    for ListedEntry { attribute, .. } in entries {
        for at in 0..attribute.blocks {
            let block = (attribute.member, attribute.lba + u64::from(at));
            match attribute.prepared_block() {
                Some(first) => newest.insert(block, first.saturating_add(at)),
                None => newest.remove(&block),
            };
        }
    }
    let mut redirected: Vec<Redirected> = Vec::new();
    for ((member, lba), prepared_block) in newest {
        match redirected.last_mut() {
            Some(Redirected { home, prepared_block: first })
                if home.member == member
                    && home.lba + home.blocks == lba
                    && u64::from(*first) + home.blocks == u64::from(prepared_block) =>
            {
                home.blocks += 1;
            }
            _ => redirected
                .push(Redirected { home: DriveExtent { member, lba, blocks: 1 }, prepared_block }),
        }
    }
    redirected
}

/// Sorts extents, and joins those that touch or overlap.
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

/// The caller's tag of the newest group up to k that a log knows; 0 if no log knows one.
///
/// A log that was given up may be an older copy. Beyond its released mark it may have groups of
/// another history under the same numbers, so their tags do not count (trap T26).
fn tag_of(lists: &[StreamList], k: Seq) -> u64 {
    let mut newest = GroupTag::NONE;
    for list in lists {
        let last_valid = if list.in_doubt { list.released } else { k };
        for entry in &list.entries {
            let group = GroupTag::of_last_group(&entry.attribute);
            if group.seq <= last_valid && group.seq <= k {
                newest = newer(newest, group);
            }
        }
    }
    for list in lists {
        if list.newest_tag.seq <= k {
            newest = newer(newest, list.newest_tag);
        }
    }
    newest.tag
}

/// The newer one of two groups; `second` if they are the same.
fn newer(first: GroupTag, second: GroupTag) -> GroupTag {
    if second.seq >= first.seq { second } else { first }
}
