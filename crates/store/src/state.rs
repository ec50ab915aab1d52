//! All decisions of the store, without I/O: which blocks a transaction gets, in which order data
//! and records are written, when a block is free again, and the state that a log replays to.
//!
//! This module uses `alloc` only. It has no clock, no socket and no thread.
//!
//! ```text
//! prepare ──▶ [ item, item, item ] ──▶ next_record ──▶ the log
//!                  │ next_group
//!                  ▼
//!             the data stream ──▶ on_data_durable
//! ```

mod record;
mod space;
mod table;

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use record::{Change, HEAD_BYTES, Head};
use space::Space;
use table::{Object, Table};

pub(crate) use record::{EMPTY, Malformed};

/// Bytes of a block.
pub(crate) const BLOCK: usize = 4096;

/// The longest name of an object, in bytes.
pub(crate) const NAME_BYTES_MAX: usize = 255;

/// Reads a block of the volume.
pub(crate) type ReadBlock<'a, E> = dyn FnMut(u64, &mut [u8]) -> Result<(), E> + 'a;

/// One change of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Put { name: String, bytes: Vec<u8> },
    Write { name: String, offset: u64, bytes: Vec<u8> },
    Remove { name: String },
}

/// The limits of a store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// A change with this many bytes at most is in the record of its transaction.
    pub(crate) inline: usize,
    /// Bytes of a record.
    pub(crate) record: usize,
    /// Bytes of a snapshot.
    pub(crate) snapshot: usize,
    /// Bytes that may wait in the ordering queue before transactions are refused.
    pub(crate) queue: usize,
    /// Bytes that may wait in the log's own queue before transactions are refused.
    pub(crate) log_queue: usize,
    /// Blocks of one group of the data stream.
    pub(crate) group: usize,
}

/// The space of the log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogSpace {
    /// Blocks of the ring.
    pub(crate) blocks: u64,
    /// Free blocks of the ring.
    pub(crate) free: u64,
    /// Bytes that are appended and not in blocks yet.
    pub(crate) queued: usize,
}

impl LogSpace {
    /// Blocks that records of transactions may still take. A quarter of the ring stays for the
    /// next snapshot, which has an eighth at most, and for groups that do not fill their blocks.
    fn for_records(self) -> u64 {
        self.free.saturating_sub(log_blocks(self.queued) + self.blocks / 4)
    }
}

/// An upper bound of the blocks that a record takes: each has more than 4000 bytes of records.
fn log_blocks(bytes: usize) -> u64 {
    (bytes / 4000 + 2) as u64
}

/// The reason why a transaction is refused. Nothing has changed then.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused<E> {
    /// There is no object of this name.
    Unknown { name: String },
    /// The write begins beyond the object's end, or ends beyond all numbers.
    Range { name: String, offset: u64, len: usize, size: u64 },
    /// The name is empty or too long.
    Name { bytes: usize },
    /// The record would be longer than a record of the log can be.
    TooLarge { bytes: usize, max: usize },
    /// The table of objects would be larger than a snapshot can be.
    TableFull { bytes: usize, max: usize },
    /// The changes up to the one that is refused need more blocks than are free; `pending` more are free once earlier transactions are
    /// durable.
    Space { needed: u64, free: u64, pending: u64 },
    /// The log has no space before its next checkpoint.
    Log,
    /// Too much waits in the ordering queue, or in the log's own queue.
    Busy,
    /// An old block that the change needs could not be read.
    Read(E),
}

/// The content of a block that is not on the drive, or not known to be.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    bytes: Arc<Vec<u8>>,
    at: usize,
    /// Whether the log's record has the content.
    is_inline: bool,
}

impl Held {
    /// The bytes of the block. Zeroes follow, up to 4096.
    pub(crate) fn bytes(&self) -> &[u8] {
        let end = self.bytes.len().min(self.at + BLOCK);
        &self.bytes[self.at..end]
    }

    /// Copies the block from byte `skip` on, with its zeroes.
    pub(crate) fn copy(&self, skip: usize, into: &mut [u8]) {
        let bytes = self.bytes().get(skip..).unwrap_or(&[]);
        let len = bytes.len().min(into.len());
        into[..len].copy_from_slice(&bytes[..len]);
        into[len..].fill(0);
    }
}

/// A group of the data stream. All of its blocks are fresh, and none is twice in it: a block is
/// given again only when it is durable.
#[derive(Debug)]
pub(crate) struct Group {
    /// The items whose blocks it has. The order of records keeps the order of transactions, so
    /// their data needs none.
    pub(crate) items: Vec<u64>,
    /// The blocks, in ascending order.
    pub(crate) blocks: Vec<(u64, Held)>,
    /// Whether it is submitted as a durable group, because no other group waits.
    pub(crate) is_durable: bool,
}

/// A record for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    Transaction(Vec<u8>),
    Checkpoint(Vec<u8>),
}

/// A transaction or a checkpoint in the ordering queue.
#[derive(Debug)]
struct Item {
    number: u64,
    entry: Entry,
    /// The blocks of its data that are in no group.
    blocks: VecDeque<(u64, Held)>,
    /// Number of groups that have blocks of it and are not submitted.
    unsubmitted: usize,
    /// The seq of its last group.
    last_seq: Option<u64>,
    /// The blocks that it writes.
    written: Vec<u64>,
    /// The bytes that it keeps in memory.
    bytes: usize,
    log_blocks: u64,
}

/// Blocks that a transaction has freed.
#[derive(Debug)]
struct Freed {
    number: u64,
    /// The Lsn of the transaction's record, once it is appended.
    lsn: Option<u64>,
    lbas: Vec<u64>,
}

/// A part of a read.
#[derive(Debug)]
pub(crate) enum Part {
    /// The bytes are in memory.
    Held(Held),
    /// The bytes are in this block of the volume.
    Home(u64),
}

/// A read that is not done.
#[derive(Debug)]
pub(crate) struct ReadPlan {
    /// The number of the last transaction that changed the object.
    changed: u64,
    /// The blocks, in order.
    pub(crate) parts: Vec<Part>,
    /// Bytes of the first block that are not asked for.
    pub(crate) skip: usize,
    /// Bytes that are asked for.
    pub(crate) len: usize,
}

/// The reason why a read is refused.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReadRefused {
    /// There is no object of this name.
    Unknown,
    /// The bytes are not within the object.
    Range { offset: u64, len: usize, size: u64 },
}

/// The state of a store.
#[derive(Debug)]
pub(crate) struct State {
    limits: Limits,
    lba: u64,
    blocks: u64,
    table: Table,
    space: Space,
    /// The content of blocks that can't be read from the drive yet.
    held: BTreeMap<u64, Held>,
    /// The ordering queue: what is not in the log yet, in order.
    queue: VecDeque<Item>,
    /// The items in it that have blocks which are in no group.
    to_send: VecDeque<u64>,
    queued_bytes: usize,
    queued_log_blocks: u64,
    /// Blocks that are free once the record that freed them is durable, in the order of records.
    freed: VecDeque<Freed>,
    freed_blocks: u64,
    /// The data stream is durable up to this seq.
    data_durable: u64,
    /// The number of the last transaction or checkpoint.
    last: u64,
}

impl State {
    /// The state of a new store on these blocks of a volume.
    pub(crate) fn new(lba: u64, blocks: u64, limits: Limits) -> Self {
        Self {
            limits,
            lba,
            blocks,
            table: Table::default(),
            space: Space::new(lba, blocks),
            held: BTreeMap::new(),
            queue: VecDeque::new(),
            to_send: VecDeque::new(),
            queued_bytes: 0,
            queued_log_blocks: 0,
            freed: VecDeque::new(),
            freed_blocks: 0,
            data_durable: 0,
            last: 0,
        }
    }

    /// The state in a snapshot.
    pub(crate) fn of_snapshot(bytes: &[u8], limits: Limits) -> Result<Self, Malformed> {
        let (head, objects) = record::decode_snapshot(bytes)?;
        let mut state = Self::new(head.lba, head.blocks, limits);
        state.last = head.number;
        for (name, size, lbas) in objects {
            let are_free = lbas.iter().all(|lba| state.space.take(*lba));
            let fits = lbas.len() as u64 == size.div_ceil(BLOCK as u64);
            let object = Object { size, lbas, changed: head.number };
            if !are_free || !fits || state.table.insert(name, object).is_some() {
                return Err(Malformed);
            }
        }
        Ok(state)
    }

    /// Applies a record of the log, after a snapshot and in the order of the log. A block that a
    /// record frees may be in a later record. All records that are found are durable.
    pub(crate) fn replay(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        let Some((number, changes)) = record::decode(bytes)? else { return Ok(()) };
        let mut freed = Vec::new();
        for change in &changes {
            if let Change::Store { lbas, .. } = change
                && !lbas.iter().all(|lba| self.space.take(*lba))
            {
                return Err(Malformed);
            }
            freed.extend(self.apply(number, change)?);
        }
        for lba in freed {
            self.space.release(lba);
        }
        self.last = number;
        Ok(())
    }

    /// Applies a change whose blocks are taken. Returns the blocks that it has freed.
    fn apply(&mut self, number: u64, change: &Change) -> Result<Vec<u64>, Malformed> {
        let freed = self.table.apply(number, change).ok_or(Malformed)?;
        for lba in &freed {
            self.held.remove(lba);
        }
        if let Change::Store { lbas, inline: Some(bytes), .. } = change {
            if bytes.len().div_ceil(BLOCK) != lbas.len() {
                return Err(Malformed);
            }
            self.hold(lbas, bytes, true);
        }
        Ok(freed)
    }

    fn hold(&mut self, lbas: &[u64], bytes: &Arc<Vec<u8>>, is_inline: bool) {
        for (index, lba) in lbas.iter().enumerate() {
            let bytes = Arc::clone(bytes);
            self.held.insert(*lba, Held { bytes, at: index * BLOCK, is_inline });
        }
    }

    /// The data place: its first block, and its blocks.
    pub(crate) fn place(&self) -> (u64, u64) {
        (self.lba, self.blocks)
    }

    /// Names of all objects, with their sizes.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (&str, u64)> {
        self.table.objects.iter().map(|(name, object)| (name.as_str(), object.size))
    }

    /// Size of an object.
    pub(crate) fn size(&self, name: &str) -> Option<u64> {
        self.table.get(name).map(|object| object.size)
    }

    /// Plans a read of these bytes of an object: from an offset on, so many; `None`: all.
    pub(crate) fn plan_read(
        &self,
        name: &str,
        range: Option<(u64, usize)>,
    ) -> Result<ReadPlan, ReadRefused> {
        let object = self.table.get(name).ok_or(ReadRefused::Unknown)?;
        let size = object.size;
        let (offset, len) = range.unwrap_or((0, usize::try_from(size).unwrap_or(usize::MAX)));
        let end = offset.checked_add(len as u64).filter(|end| *end <= size);
        let refused = ReadRefused::Range { offset, len, size };
        let end = end.and_then(|end| usize::try_from(end).ok()).ok_or(refused)?;
        // It is not beyond `end`.
        let from = offset as usize;
        let first = from / BLOCK;
        let lbas = object.lbas.get(first..end.div_ceil(BLOCK).max(first)).unwrap_or(&[]);
        let part = |lba: &u64| self.held.get(lba).cloned().map_or(Part::Home(*lba), Part::Held);
        let parts = lbas.iter().map(part).collect();
        Ok(ReadPlan { changed: object.changed, parts, skip: from - first * BLOCK, len })
    }

    /// Whether the blocks of a planned read still had its content when they were read: otherwise
    /// they may have been freed and written again meanwhile.
    pub(crate) fn is_current(&self, name: &str, plan: &ReadPlan) -> bool {
        self.table.get(name).is_some_and(|object| object.changed == plan.changed)
    }

    /// Free blocks, and those that are free once earlier transactions are durable.
    pub(crate) fn free_blocks(&self) -> (u64, u64) {
        (self.space.free(), self.freed_blocks)
    }

    /// Puts a transaction into the ordering queue, and returns its number. `read` reads an old
    /// block that a change replaces in part.
    pub(crate) fn prepare<E>(
        &mut self,
        ops: &[Op],
        log: LogSpace,
        read: &mut ReadBlock<'_, E>,
    ) -> Result<u64, Refused<E>> {
        if self.queued_bytes > self.limits.queue || log.queued > self.limits.log_queue {
            return Err(Refused::Busy);
        }
        let number = self.last + 1;
        let mut draft = Draft::default();
        let drafted = self.draft(&mut draft, number, ops, read);
        let record = record::encode(number, &draft.changes);
        let log_blocks = log_blocks(record.len());
        if let Err(refused) = drafted.and_then(|()| self.check(&draft, &record, log_blocks, log)) {
            for lba in draft.allocated {
                self.space.release(lba);
            }
            return Err(refused);
        }
        let (mut freed, mut written) = (Vec::new(), Vec::new());
        let mut large = draft.large.iter();
        for change in &draft.changes {
            // The change fits: the draft has the same objects, and has applied the same change.
            freed.extend(self.apply(number, change).unwrap_or_default());
            if let Change::Store { lbas, inline: None, .. } = change
                && let Some(bytes) = large.next()
            {
                self.hold(lbas, bytes, false);
                for (index, lba) in lbas.iter().enumerate() {
                    let (bytes, at) = (Arc::clone(bytes), index * BLOCK);
                    written.push((*lba, Held { bytes, at, is_inline: false }));
                }
            }
        }
        if !freed.is_empty() {
            self.freed_blocks += freed.len() as u64;
            self.freed.push_back(Freed { number, lsn: None, lbas: freed });
        }
        self.push(Entry::Transaction(record), written, log_blocks);
        Ok(number)
    }

    /// Takes all decisions about a transaction. Of this state it changes only the free blocks: the
    /// draft has those that it took.
    fn draft<E>(
        &mut self,
        draft: &mut Draft,
        number: u64,
        ops: &[Op],
        read: &mut ReadBlock<'_, E>,
    ) -> Result<(), Refused<E>> {
        for op in ops {
            let name = match op {
                Op::Put { name, .. } | Op::Write { name, .. } | Op::Remove { name } => name,
            };
            if draft.names.insert(name.clone())
                && let Some(object) = self.table.get(name)
            {
                draft.table.insert(name.clone(), object.clone());
            }
        }
        draft.bytes_before = draft.table.bytes;
        for op in ops {
            let change = match op {
                Op::Remove { name } => Change::Remove { name: name.clone() },
                Op::Put { name, bytes } => {
                    if name.is_empty() || name.len() > NAME_BYTES_MAX {
                        return Err(Refused::Name { bytes: name.len() });
                    }
                    let size = bytes.len() as u64;
                    self.store(draft, name, size, 0, true, bytes.clone())?
                }
                Op::Write { name, offset, bytes } => {
                    let (offset, len) = (*offset, bytes.len());
                    let object = draft.table.get(name);
                    let object = object.ok_or_else(|| Refused::Unknown { name: name.clone() })?;
                    let old_size = object.size;
                    let end = offset.checked_add(len as u64).filter(|_| offset <= old_size);
                    let range = end.and_then(|end| Some((end, usize::try_from(end).ok()?)));
                    let Some((end, end_byte)) = range else {
                        let (name, size) = (name.clone(), old_size);
                        return Err(Refused::Range { name, offset, len, size });
                    };
                    if bytes.is_empty() {
                        continue;
                    }
                    let size = old_size.max(end);
                    // Both are below `end_byte`, so they fit.
                    let (from, first) = (offset as usize, offset as usize / BLOCK);
                    let last = (end_byte - 1) / BLOCK;
                    let content_end = size.min((last as u64 + 1) * BLOCK as u64) as usize;
                    let mut content = vec![0; content_end - first * BLOCK];
                    // The new bytes cover a part of the first and of the last block at most.
                    let is_first_partial = !from.is_multiple_of(BLOCK);
                    let is_last_partial = end < old_size && !end_byte.is_multiple_of(BLOCK);
                    let mut old = Vec::new();
                    old.extend(is_first_partial.then_some(first));
                    old.extend((is_last_partial && !old.contains(&last)).then_some(last));
                    for block in old {
                        let lba = object.lbas[block];
                        let at = (block - first) * BLOCK;
                        let part_end = content.len().min(at + BLOCK);
                        let held = draft.held.get(&lba).or_else(|| self.held.get(&lba));
                        match held {
                            Some(held) => held.copy(0, &mut content[at..part_end]),
                            None => {
                                let mut bytes = vec![0; BLOCK];
                                read(lba, &mut bytes).map_err(Refused::Read)?;
                                content[at..part_end].copy_from_slice(&bytes[..part_end - at]);
                            }
                        }
                    }
                    let at = from - first * BLOCK;
                    content[at..at + len].copy_from_slice(bytes);
                    self.store(draft, name, size, first as u64, false, content)?
                }
            };
            let name = || match &change {
                Change::Store { name, .. } | Change::Remove { name } => name.clone(),
            };
            // A change that `store` made always fits; a removal needs the object.
            let freed = draft.table.apply(number, &change);
            let freed = freed.ok_or_else(|| Refused::Unknown { name: name() })?;
            for lba in freed {
                draft.held.remove(&lba);
            }
            draft.changes.push(change);
        }
        Ok(())
    }

    /// Takes blocks for new content of an object, from its block `first` on.
    #[allow(clippy::too_many_arguments, reason = "these are the fields of the change")]
    fn store<E>(
        &mut self,
        draft: &mut Draft,
        name: &str,
        size: u64,
        first: u64,
        is_last: bool,
        content: Vec<u8>,
    ) -> Result<Change, Refused<E>> {
        let needed = content.len().div_ceil(BLOCK) as u64;
        let Some(lbas) = self.space.allocate(needed) else {
            let (free, pending) = self.free_blocks();
            let taken = draft.allocated.len() as u64;
            return Err(Refused::Space { needed: needed + taken, free: free + taken, pending });
        };
        draft.allocated.extend_from_slice(&lbas);
        // Several changes may each be short, and too long together for one record.
        let inline_bytes = draft.inline_bytes + content.len();
        let is_inline =
            content.len() <= self.limits.inline && inline_bytes <= self.limits.record / 2;
        let content = Arc::new(content);
        for (index, lba) in lbas.iter().enumerate() {
            let (bytes, at) = (Arc::clone(&content), index * BLOCK);
            draft.held.insert(*lba, Held { bytes, at, is_inline });
        }
        let inline = if is_inline {
            draft.inline_bytes = inline_bytes;
            Some(content)
        } else {
            draft.large.push(content);
            None
        };
        Ok(Change::Store { name: name.into(), size, first, is_last, lbas, inline })
    }

    /// Whether the store may accept a drafted transaction.
    fn check<E>(
        &self,
        draft: &Draft,
        record: &[u8],
        log_blocks: u64,
        log: LogSpace,
    ) -> Result<(), Refused<E>> {
        let (bytes, max) = (record.len(), self.limits.record);
        if bytes > max {
            return Err(Refused::TooLarge { bytes, max });
        }
        let objects = self.table.bytes - draft.bytes_before + draft.table.bytes;
        let (bytes, max) = (HEAD_BYTES + objects, self.limits.snapshot);
        // Otherwise a full store could not even remove objects.
        let grows = draft.table.bytes > draft.bytes_before;
        if grows && bytes > max {
            return Err(Refused::TableFull { bytes, max });
        }
        if self.queued_log_blocks + log_blocks > log.for_records() {
            return Err(Refused::Log);
        }
        Ok(())
    }

    /// Adds an item to the ordering queue, with the blocks that it writes.
    fn push(&mut self, entry: Entry, blocks: Vec<(u64, Held)>, log_blocks: u64) {
        self.last += 1;
        let record = match &entry {
            Entry::Transaction(bytes) | Entry::Checkpoint(bytes) => bytes.len(),
        };
        let written: Vec<u64> = blocks.iter().map(|(lba, _)| *lba).collect();
        let bytes = record + written.len() * BLOCK;
        let number = self.last;
        if !blocks.is_empty() {
            self.to_send.push_back(number);
        }
        self.queued_bytes += bytes;
        self.queued_log_blocks += log_blocks;
        let (blocks, unsubmitted, last_seq) = (blocks.into(), 0, None);
        self.queue.push_back(Item {
            number,
            entry,
            blocks,
            unsubmitted,
            last_seq,
            written,
            bytes,
            log_blocks,
        });
    }

    /// Puts a checkpoint into the ordering queue: all content that only the log has is written to
    /// its blocks, and then the log gets a snapshot of the table as it is now.
    ///
    /// The blocks are fresh: until the snapshot is durable, each state to which the volume may
    /// recover has their content in the log.
    pub(crate) fn checkpoint(&mut self) -> u64 {
        let is_inline = |(_, held): &(&u64, &Held)| held.is_inline;
        let held = self.held.iter().filter(is_inline);
        let blocks = held.map(|(lba, held)| (*lba, held.clone())).collect();
        let number = self.last + 1;
        let head = Head { lba: self.lba, blocks: self.blocks, number };
        let objects = self.table.objects.iter();
        let objects = objects.map(|(name, object)| (name.as_str(), object.size, &object.lbas[..]));
        let snapshot = record::encode_snapshot(head, objects);
        // The quarter of the ring that transactions leave is for this record.
        self.push(Entry::Checkpoint(snapshot), blocks, 0);
        number
    }

    /// The place of an item in the queue. Numbers are consecutive.
    fn index(&self, number: u64) -> Option<usize> {
        let first = self.queue.front()?.number;
        usize::try_from(number.checked_sub(first)?).ok()
    }

    /// Whether data waits to be submitted.
    pub(crate) fn has_groups(&self) -> bool {
        !self.to_send.is_empty()
    }

    /// Takes out the next group for the data stream, with blocks of as many items as fit.
    pub(crate) fn next_group(&mut self) -> Option<Group> {
        let (mut items, mut blocks) = (Vec::new(), Vec::new());
        while blocks.len() < self.limits.group
            && let Some(number) = self.to_send.front().copied()
            && let Some(index) = self.index(number)
            && let Some(item) = self.queue.get_mut(index)
        {
            let count = item.blocks.len().min(self.limits.group - blocks.len());
            blocks.extend(item.blocks.drain(..count));
            item.unsubmitted += 1;
            items.push(number);
            if item.blocks.is_empty() {
                self.to_send.pop_front();
            }
        }
        blocks.sort_unstable_by_key(|(lba, _)| *lba);
        let is_durable = self.to_send.is_empty();
        (!blocks.is_empty()).then_some(Group { items, blocks, is_durable })
    }

    /// Notes the seq of a group.
    pub(crate) fn on_submitted(&mut self, group: &Group, seq: u64) {
        for number in &group.items {
            let index = self.index(*number);
            if let Some(item) = index.and_then(|index| self.queue.get_mut(index)) {
                item.unsubmitted -= 1;
                item.last_seq = Some(seq);
            }
        }
    }

    /// Notes that the groups of the data stream up to `seq` are durable.
    pub(crate) fn on_data_durable(&mut self, seq: u64) {
        self.data_durable = self.data_durable.max(seq);
    }

    /// Takes out the next record for the log, with its number. Records leave in the order of their
    /// numbers, and a record leaves only when its data is durable: streams have no order among
    /// them, so a crash could otherwise leave a record without its data.
    pub(crate) fn next_record(&mut self) -> Option<(u64, Entry)> {
        let item = self.queue.front()?;
        let is_durable = item.last_seq.is_none_or(|seq| seq <= self.data_durable);
        if !item.blocks.is_empty() || item.unsubmitted > 0 || !is_durable {
            return None;
        }
        let item = self.queue.pop_front()?;
        self.queued_bytes -= item.bytes;
        self.queued_log_blocks -= item.log_blocks;
        for lba in item.written {
            // No later transaction has put other content there: the block is free only when a
            // record is durable that comes after this one.
            self.held.remove(&lba);
        }
        Some((item.number, item.entry))
    }

    /// Notes the Lsn of a record.
    pub(crate) fn on_appended(&mut self, number: u64, lsn: u64) {
        if let Some(freed) = self.freed.iter_mut().find(|freed| freed.lsn.is_none())
            && freed.number == number
        {
            freed.lsn = Some(lsn);
        }
    }

    /// Notes that all records below this Lsn are durable. The blocks that they have freed may be
    /// written again: no state to which the volume may recover needs their content (trap T11).
    pub(crate) fn on_log_durable(&mut self, durable: u64) {
        while let Some(freed) = self.freed.front()
            && freed.lsn.is_some_and(|lsn| lsn < durable)
        {
            for lba in &freed.lbas {
                self.space.release(*lba);
            }
            self.freed_blocks -= freed.lbas.len() as u64;
            self.freed.pop_front();
        }
    }

    /// The Lsn of the first record that must be durable before more blocks are free.
    pub(crate) fn frees_at(&self) -> Option<u64> {
        self.freed.front().and_then(|freed| freed.lsn)
    }

    /// Whether everything is in the log.
    pub(crate) fn is_queue_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

/// The decisions about a transaction that is not accepted yet.
#[derive(Debug, Default)]
struct Draft {
    /// The names in the transaction.
    names: BTreeSet<String>,
    /// The objects with these names, after the changes so far.
    table: Table,
    /// Bytes of these objects in a snapshot, before any change.
    bytes_before: usize,
    /// The new content.
    held: BTreeMap<u64, Held>,
    changes: Vec<Change>,
    /// The content of each change that is not in the record, in order.
    large: Vec<Arc<Vec<u8>>>,
    /// Bytes of content in the record.
    inline_bytes: usize,
    /// The blocks that it took.
    allocated: Vec<u64>,
}

#[cfg(test)]
mod tests;
