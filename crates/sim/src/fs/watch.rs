//! Notes what a file system requests of its storage, for the [counts](FsCounts).

use std::collections::BTreeMap;

use riopipe_fs_core::storage::{Content, GroupSeq, StreamNo, WriteGroup};

use super::FsCounts;
use crate::scenario::GroupKind;

/// The kind of a group.
pub(super) const fn kind_of(content: Content) -> GroupKind {
    match content {
        Content::Data => GroupKind::Data,
        Content::Record => GroupKind::Record,
        Content::Journal => GroupKind::Journal,
        Content::Commit => GroupKind::Commit,
        Content::Home => GroupKind::Home,
    }
}

/// The requests of one instance so far.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// The last group of each kind that was submitted, by stream.
    last: BTreeMap<(StreamNo, GroupKind), GroupSeq>,
    /// The last group of each stream for whose durability a wait has ended.
    durable: BTreeMap<StreamNo, GroupSeq>,
    /// The stream that has written a block last.
    writers: BTreeMap<u64, StreamNo>,
    /// The number of replays when the instance began, and when a block passed to another stream for
    /// the first time.
    replays: (u32, Option<u32>),
    counts: FsCounts,
}

impl Watch {
    pub(super) fn new(replays: u32) -> Self {
        Self { replays: (replays, None), ..Self::default() }
    }

    pub(super) fn submitted(
        &mut self,
        stream: StreamNo,
        group: &WriteGroup,
        seq: GroupSeq,
        replays: u32,
    ) {
        self.last.insert((stream, kind_of(group.content)), seq);
        for write in &group.writes {
            let before = self.writers.insert(write.at.0, stream);
            if before.is_some_and(|before| before != stream) {
                self.counts.handed_blocks += 1;
                self.replays.1.get_or_insert(replays);
            }
        }
    }

    pub(super) fn durable(&mut self, stream: StreamNo, seq: GroupSeq, was_complete: bool) {
        self.counts.durable_waits += u64::from(was_complete);
        let last = self.durable.entry(stream).or_default();
        *last = seq.max(*last);
    }

    pub(super) const fn released(&mut self, was_durable: bool) {
        self.counts.release_waits += was_durable as u64;
    }

    /// The instance has ended.
    pub(super) fn ended(&mut self, has_failed: bool, replays: u32) -> FsCounts {
        let (begun, handed) = self.replays;
        self.counts.replays = u64::from(replays - begun);
        self.counts.replays_after_handed = u64::from(handed.is_some_and(|handed| replays > handed));
        let is_cut = |kinds: &[GroupKind]| {
            let is_open = |((stream, kind), seq): (&(StreamNo, GroupKind), &GroupSeq)| {
                kinds.contains(kind) && self.durable.get(stream).is_none_or(|durable| durable < seq)
            };
            u64::from(has_failed && self.last.iter().any(is_open))
        };
        self.counts.cut_records = is_cut(&[GroupKind::Record]);
        self.counts.cut_commits = is_cut(&[GroupKind::Journal, GroupKind::Commit]);
        self.counts.cut_checkpoints = is_cut(&[GroupKind::Home]);
        core::mem::take(&mut self.counts)
    }
}
