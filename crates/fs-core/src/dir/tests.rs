use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::vec::Vec;
use core::ops::ControlFlow;

use proptest::prelude::*;

use super::check::check;
use super::hash::{WEAK_SEED, WEAKEST_SEED};
use super::*;
use crate::block::{BLOCK_BYTES, BlockNo};
use crate::extents;
use crate::format::inode::file_type;
use crate::testing::MemBlocks;

const INO: Ino = Ino(12);
const PARENT: Ino = Ino(2);

/// A directory and a model of it.
#[derive(Clone)]
struct Dir {
    blocks: MemBlocks,
    disk: DiskInode,
    model: BTreeMap<Vec<u8>, Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Form {
    dir_index: bool,
    checksums: bool,
    hash_version: u8,
    hash_seed: [u32; 4],
}

const TREE: Form = Form { dir_index: true, checksums: true, hash_version: 1, hash_seed: [1; 4] };

impl Dir {
    fn new(form: Form) -> Self {
        let mut blocks = MemBlocks::new();
        blocks.layout.dir_index = form.dir_index;
        if !form.checksums {
            blocks.layout.csum_seed = None;
        }
        blocks.layout.hash_version = form.hash_version;
        blocks.layout.hash_seed = form.hash_seed;
        // Names stand for their numbers.
        blocks.layout.inodes = u32::MAX;
        let mut disk = DiskInode::zeroed();
        disk.mode = file_type::DIRECTORY | 0o755;
        let mut open = OpenInode { ino: INO, disk: &mut disk };
        extents::init(&mut open);
        create_empty(&mut open, &mut blocks, PARENT).unwrap();
        Self { blocks, disk, model: BTreeMap::new() }
    }

    fn open(&mut self) -> (OpenInode<'_>, &mut MemBlocks) {
        (OpenInode { ino: INO, disk: &mut self.disk }, &mut self.blocks)
    }

    fn insert(&mut self, name: &[u8], entry: Entry) -> Result<(), FsError> {
        let (mut open, blocks) = self.open();
        insert(&mut open, blocks, name, entry.ino, entry.kind)?;
        self.model.insert(name.to_vec(), entry);
        Ok(())
    }

    fn remove(&mut self, name: &[u8]) {
        let (mut open, blocks) = self.open();
        let removed = remove(&mut open, blocks, name).unwrap();
        assert_eq!(removed, self.model.remove(name));
    }

    fn replace(&mut self, name: &[u8], entry: Entry) {
        let (mut open, blocks) = self.open();
        let replaced = replace(&mut open, blocks, name, entry.ino, entry.kind).unwrap();
        assert_eq!(replaced, self.model.get(name).copied());
        if let Some(old) = self.model.get_mut(name) {
            *old = entry;
        }
    }

    fn lookup(&self, name: &[u8]) -> Option<Entry> {
        lookup(INO, &self.disk, &self.blocks, name).unwrap()
    }

    fn check(&self) {
        assert_eq!(check(INO, &self.disk, &self.blocks), self.model);
        let empty = is_empty(INO, &self.disk, &self.blocks).unwrap();
        assert_eq!(empty, self.model.is_empty());
    }

    /// Up to `limit` names from `cookie` on, with the cookie after each.
    fn read(&self, cookie: u64, limit: usize) -> Vec<(Vec<u8>, Entry, u64)> {
        let mut items = Vec::new();
        let mut sink = |item: DirItem<'_>| {
            if items.len() == limit {
                return ControlFlow::Break(());
            }
            assert!(item.next_cookie < 1 << 63);
            let entry = Entry { ino: item.ino, kind: item.kind };
            items.push((item.name.to_vec(), entry, item.next_cookie));
            ControlFlow::Continue(())
        };
        read(INO, &self.disk, &self.blocks, cookie, &mut sink).unwrap();
        items
    }

    /// All names, read in steps of `limit`.
    fn read_all(&self, limit: usize) -> BTreeMap<Vec<u8>, Entry> {
        let mut all = BTreeMap::new();
        let mut cookie = 0;
        let mut number = 0;
        loop {
            let items = self.read(cookie, limit);
            let Some(last) = items.last() else { break };
            cookie = last.2;
            for (name, entry, _) in items {
                match number {
                    0 => assert_eq!((&name[..], entry.ino), (&b"."[..], INO)),
                    1 => assert_eq!((&name[..], entry.ino), (&b".."[..], PARENT)),
                    _ => assert!(all.insert(name, entry).is_none()),
                }
                number += 1;
            }
        }
        all
    }

    fn len(&self) -> u64 {
        self.disk.size / BLOCK_BYTES as u64
    }
}

fn regular(number: u32) -> Entry {
    Entry { ino: Ino(number + 1), kind: FileKind::REGULAR }
}

/// Name `number`, of a length that depends on it.
fn name(number: u32) -> Vec<u8> {
    let mut name = format!("{number:x}").into_bytes();
    let length = match number % 4 {
        0 => 255,
        1 => 120,
        2 => 30,
        _ => 0,
    };
    while name.len() < length {
        name.push(0x80 | number as u8);
    }
    name
}

#[derive(Clone, Debug)]
enum Step {
    Insert(u32),
    Remove(u32),
    Replace(u32, u8),
    Lookup(u32),
    Scan(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let number = 0..400_u32;
    let step = prop_oneof![
        10 => number.clone().prop_map(Step::Insert),
        4 => number.clone().prop_map(Step::Remove),
        1 => (number.clone(), 1..8_u8).prop_map(|(number, kind)| Step::Replace(number, kind)),
        2 => number.prop_map(Step::Lookup),
        5 => (1..20_usize).prop_map(Step::Scan),
    ];
    proptest::collection::vec(step, 0..700)
}

fn forms() -> impl Strategy<Value = Form> {
    let seed = prop_oneof![Just([0; 4]), Just([5, 6, 7, 8]), Just(WEAK_SEED)];
    let dir_index = prop_oneof![4 => Just(true), 1 => Just(false)];
    (dir_index, any::<bool>(), 0..6_u8, seed).prop_map(
        |(dir_index, checksums, hash_version, hash_seed)| Form {
            dir_index,
            checksums,
            hash_version,
            hash_seed,
        },
    )
}

/// A scan beside changes.
#[derive(Default)]
struct Scan {
    cookie: u64,
    /// The names that have existed since the scan began.
    steady: BTreeSet<Vec<u8>>,
    /// The names that were returned, and not removed since.
    returned: BTreeSet<Vec<u8>>,
}

impl Scan {
    fn begin(dir: &Dir) -> Self {
        Self { steady: dir.model.keys().cloned().collect(), ..Self::default() }
    }

    /// Reads on. Returns whether the scan has ended.
    fn step(&mut self, dir: &Dir, limit: usize) -> bool {
        let items = dir.read(self.cookie, limit);
        let ended = items.len() < limit;
        for (name, entry, cookie) in items {
            self.cookie = cookie;
            if name == b"." || name == b".." {
                continue;
            }
            assert_eq!(dir.model.get(&name), Some(&entry));
            assert!(self.returned.insert(name), "a name was returned twice");
        }
        if ended {
            assert!(self.steady.is_subset(&self.returned), "a name was left out");
        }
        ended
    }

    fn removed(&mut self, name: &[u8]) {
        self.steady.remove(name);
        self.returned.remove(name);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_directory_behaves_as_a_map(form in forms(), steps in steps()) {
        let mut dir = Dir::new(form);
        let mut scan = Scan::begin(&dir);
        for step in steps {
            match step {
                Step::Insert(number) => {
                    let name = name(number);
                    if dir.model.contains_key(&name) {
                        let (mut open, blocks) = dir.open();
                        let again = insert(&mut open, blocks, &name, Ino(1), FileKind::FIFO);
                        if form.dir_index {
                            prop_assert_eq!(again, Err(FsError::Exists));
                        } else if again.is_ok() {
                            // A list finds a place before it finds the name.
                            let (mut open, blocks) = dir.open();
                            remove(&mut open, blocks, &name).unwrap();
                            remove(&mut open, blocks, &name).unwrap();
                            dir.model.remove(&name);
                            scan.removed(&name);
                        }
                    } else {
                        dir.insert(&name, regular(number)).unwrap();
                    }
                }
                Step::Remove(number) => {
                    dir.remove(&name(number));
                    scan.removed(&name(number));
                }
                Step::Replace(number, kind) => {
                    let entry = Entry { ino: Ino(number + 1000), kind: FileKind(kind) };
                    dir.replace(&name(number), entry);
                }
                Step::Lookup(number) => {
                    let name = name(number);
                    prop_assert_eq!(dir.lookup(&name), dir.model.get(&name).copied());
                }
                Step::Scan(limit) => {
                    if scan.step(&dir, limit) {
                        scan = Scan::begin(&dir);
                    }
                }
            }
        }
        dir.check();
        for limit in [1, 7, 10_000] {
            prop_assert_eq!(&dir.read_all(limit), &dir.model);
        }
    }

    #[test]
    fn damage_is_reported(
        form in forms(),
        block in any::<prop::sample::Index>(),
        bytes in proptest::collection::vec(
            (prop_oneof![0..64_usize, 0..4096_usize], any::<u8>()), 1..4),
    ) {
        let mut dir = Dir::new(form);
        for number in 0..150 {
            dir.insert(&name(number), regular(number)).unwrap();
        }
        let logical = block.index(dir.len() as usize) as u32;
        dir.damage(logical, |block| for &(offset, byte) in &bytes {
            block[offset] = byte;
        });
        dir.use_all();
    }
}

impl Dir {
    /// Changes block `logical`.
    fn damage(&mut self, logical: u32, change: impl FnOnce(&mut crate::Block)) {
        let view = View::new(INO, &self.disk, &self.blocks).unwrap();
        let tree = view.is_tree();
        let at = view.place(logical).unwrap();
        let kinds = [view.leaf_kind(), view.index_kind()];
        let is_index = tree && self.blocks.kind(at) == kinds[1];
        change(self.blocks.edit(at, kinds[usize::from(is_index)]).unwrap());
    }

    /// Calls everything. The results do not matter, but each call ends without a panic.
    fn use_all(&mut self) {
        self.blocks.any_kind = true;
        let mut cookie = 0;
        for _ in 0..2000 {
            let mut last = None;
            let mut sink = |item: DirItem<'_>| {
                if last.is_some() {
                    return ControlFlow::Break(());
                }
                last = Some(item.next_cookie);
                ControlFlow::Continue(())
            };
            if read(INO, &self.disk, &self.blocks, cookie, &mut sink).is_err() {
                break;
            }
            let Some(next) = last else { break };
            assert!(next > cookie, "a scan goes on");
            cookie = next;
        }
        let _ = parent(INO, &self.disk, &self.blocks);
        let _ = is_empty(INO, &self.disk, &self.blocks);
        for number in 0..300 {
            let _ = lookup(INO, &self.disk, &self.blocks, &name(number));
            let (mut open, blocks) = self.open();
            let kind = FileKind::SOCKET;
            match number % 3 {
                0 => drop(remove(&mut open, blocks, &name(number))),
                1 => drop(replace(&mut open, blocks, &name(number), Ino(9), kind)),
                _ => drop(insert(&mut open, blocks, &name(number * 7), Ino(9), kind)),
            }
        }
    }
}

#[test]
fn a_new_directory_is_empty() {
    for form in [TREE, Form { checksums: false, ..TREE }, Form { dir_index: false, ..TREE }] {
        let dir = Dir::new(form);
        dir.check();
        assert_eq!(dir.disk.size, 4096);
        assert_eq!(parent(INO, &dir.disk, &dir.blocks), Ok(PARENT));
        assert_eq!(dir.lookup(b".").unwrap().ino, INO);
        assert_eq!(dir.lookup(b"..").unwrap().ino, PARENT);
        assert_eq!(dir.lookup(b"..."), None);
        assert!(dir.read_all(1).is_empty());
    }
}

#[test]
fn the_parent_can_be_replaced() {
    for entries in [0, 3000] {
        let mut dir = Dir::new(TREE);
        for number in 0..entries {
            dir.insert(&name(number), regular(number)).unwrap();
        }
        let (mut open, blocks) = dir.open();
        let directory = FileKind::DIRECTORY;
        let old = replace(&mut open, blocks, b"..", Ino(77), directory).unwrap().unwrap();
        assert_eq!(old, Entry { ino: PARENT, kind: directory });
        assert_eq!(parent(INO, &dir.disk, &dir.blocks), Ok(Ino(77)));
        dir.check();
    }
}

#[test]
fn wrong_arguments_are_refused() {
    let mut dir = Dir::new(TREE);
    let long = [b'x'; 256];
    let kind = FileKind::REGULAR;
    assert_eq!(dir.insert(&long, regular(1)), Err(FsError::NameTooLong));
    assert_eq!(dir.insert(&long[1..], regular(1)), Ok(()));
    for bad in [&b""[..], b"a/b", b"a\0b"] {
        assert_eq!(dir.insert(bad, regular(1)), Err(FsError::Invalid));
    }
    for kind in [FileKind::UNKNOWN, FileKind(8), FileKind(0xde)] {
        assert_eq!(dir.insert(b"kind", Entry { ino: Ino(1), kind }), Err(FsError::Invalid));
    }
    assert_eq!(dir.insert(b"ino", Entry { ino: Ino(0), kind }), Err(FsError::Invalid));
    assert_eq!(dir.insert(b".", regular(1)), Err(FsError::Exists));
    assert_eq!(dir.insert(b"..", regular(1)), Err(FsError::Exists));
    let found = lookup(INO, &dir.disk, &dir.blocks, &long);
    assert_eq!(found, Err(FsError::NameTooLong));
    let (mut open, blocks) = dir.open();
    assert_eq!(remove(&mut open, blocks, b"."), Err(FsError::Invalid));
    assert_eq!(remove(&mut open, blocks, b".."), Err(FsError::Invalid));
    assert_eq!(replace(&mut open, blocks, b".", Ino(1), kind), Err(FsError::Invalid));
    assert_eq!(replace(&mut open, blocks, b"..", Ino(1), kind), Err(FsError::Invalid));
    dir.disk.mode = file_type::REGULAR;
    let found = lookup(INO, &dir.disk, &dir.blocks, b"name");
    assert_eq!(found, Err(FsError::NotDirectory));
}

#[test]
fn two_hundred_thousand_names() {
    let mut dir = Dir::new(TREE);
    let name = |number: u32| format!("file-{number:08}-with-some-more-text").into_bytes();
    for number in 0..200_000 {
        dir.insert(&name(number), regular(number)).unwrap();
    }
    assert!(dir.len() > 600);
    dir.check();
    for number in (0..200_000).step_by(17) {
        assert_eq!(dir.lookup(&name(number)), Some(regular(number)));
    }
    assert_eq!(dir.read_all(1000), dir.model);
    let full = dir.len();
    for round in 0..2 {
        for number in 0..100_000 {
            dir.remove(&name(number + round * 100_000));
        }
        for number in 0..100_000 {
            dir.insert(&name(number + round * 100_000), regular(number)).unwrap();
        }
    }
    assert!(dir.len() < full + full / 4, "the space of removed entries is used again");
    for number in 0..200_000 {
        dir.remove(&name(number));
    }
    dir.check();
}

#[test]
fn a_tree_of_two_levels_becomes_full() {
    // Above all names of the test.
    const TOP: u32 = 0xf000_0000;
    let mut dir = Dir::new(TREE);
    let hasher = super::hash::Hasher::of_new(&dir.blocks.layout);
    let mut numbers = (0..).filter(|number| hasher.hash(&name(number * 4)).major < TOP);
    let mut insert_next = |dir: &mut Dir| {
        let number = numbers.next().unwrap();
        dir.insert(&name(number * 4), regular(number))
    };
    let has_two_levels = |dir: &Dir| {
        let view = View::new(INO, &dir.disk, &dir.blocks).unwrap();
        view.is_tree() && view.root().unwrap().has_nodes
    };
    while !has_two_levels(&dir) {
        insert_next(&mut dir).unwrap();
    }
    // All pairs of the root but one are taken. They lead nowhere.
    dir.damage(0, |block| {
        block[34..36].copy_from_slice(&506_u16.to_le_bytes());
        for pair in 1..506 {
            let hash = TOP + 2 * pair as u32;
            block[32 + 8 * pair..36 + 8 * pair].copy_from_slice(&hash.to_le_bytes());
            block[36 + 8 * pair] = 1;
        }
    });
    let before = dir.len();
    // This refusal comes before the first edit.
    let refused = loop {
        if let Err(error) = insert_next(&mut dir) {
            break error;
        }
    };
    assert_eq!(refused, FsError::NoSpace);
    // One node was split, and one of its halves was filled.
    assert!(dir.len() > before + 100);
    // Without the false pairs, everything is there.
    let view = View::new(INO, &dir.disk, &dir.blocks).unwrap();
    let nodes = (1..view.root().unwrap().index.count)
        .filter(|&slot| view.root().unwrap().index.hash(slot) <= TOP)
        .count() as u16;
    dir.damage(0, |block| block[34..36].copy_from_slice(&(nodes + 1).to_le_bytes()));
    dir.check();
}

#[test]
fn a_failed_insert_leaves_the_old_state_to_the_caller() {
    for dir_index in [true, false] {
        let mut dir = Dir::new(Form { dir_index, ..TREE });
        let mut failures = 0;
        for number in 0..3000 {
            for budget in 0.. {
                let before = dir.clone();
                dir.blocks.budget = budget;
                let inserted = dir.insert(&name(number), regular(number));
                if inserted.is_ok() {
                    break;
                }
                assert_eq!(inserted, Err(FsError::NoSpace));
                failures += 1;
                // As a transaction does it: the edits are dropped.
                dir = before;
            }
        }
        dir.check();
        assert!(failures > 70, "{failures}");
    }
}

#[test]
fn a_directory_becomes_a_tree_during_a_scan() {
    let mut dir = Dir::new(TREE);
    for number in 0..20 {
        dir.insert(&name(number), regular(number)).unwrap();
    }
    assert_eq!(dir.len(), 1);
    for limit in 1..22 {
        let mut dir = dir.clone();
        let mut scan = Scan::begin(&dir);
        scan.step(&dir, limit);
        for number in 100..400 {
            dir.insert(&name(number), regular(number)).unwrap();
        }
        assert!(dir.disk.flags.contains(InodeFlags::INDEX));
        while !scan.step(&dir, limit) {}
    }
}

#[test]
fn thousands_of_names_may_share_one_hash() {
    let seeds = [(0, WEAK_SEED), (1, WEAK_SEED), (2, WEAK_SEED), (1, WEAKEST_SEED)];
    for (hash_version, hash_seed) in seeds {
        let mut dir = Dir::new(Form { hash_version, hash_seed, ..TREE });
        for number in 0..3000 {
            dir.insert(&name(number), regular(number)).unwrap();
        }
        dir.check();
        for number in 0..3000 {
            assert_eq!(dir.lookup(&name(number)), Some(regular(number)));
            let (mut open, blocks) = dir.open();
            let again = insert(&mut open, blocks, &name(number), Ino(1), FileKind::FIFO);
            assert_eq!(again, Err(FsError::Exists));
        }
        assert_eq!(dir.read_all(50), dir.model);
        for number in (0..3000).step_by(2) {
            dir.remove(&name(number));
        }
        dir.check();
    }
}

/// The description of a tree, and the pairs of the root.
#[test]
fn a_damaged_root_is_refused() {
    let mut dir = Dir::new(TREE);
    for number in 0..300 {
        dir.insert(&name(number), regular(number)).unwrap();
    }
    let changes: [(usize, u8); 12] = [
        (4, 16),   // the length of `.`
        (8, b'x'), // its name
        (12, 0),   // the inode of `..`
        (16, 0),   // the length of `..`
        (24, 1),   // reserved
        (28, 3),   // the version of the hash
        (29, 9),   // the length of the description
        (30, 2),   // the levels
        (31, 1),   // flags
        (32, 1),   // the limit
        (35, 9),   // the count
        (36, 0),   // the first leaf is block 0
    ];
    for (offset, byte) in changes {
        let mut dir = dir.clone();
        dir.damage(0, |block| block[offset] = byte);
        let mut refused = 0;
        for number in 0..300 {
            match lookup(INO, &dir.disk, &dir.blocks, &name(number)) {
                Err(FsError::DamagedBlock { .. } | FsError::DamagedInode { .. }) => refused += 1,
                found => assert_eq!(found, Ok(Some(regular(number)))),
            }
        }
        assert!(refused > 0, "offset {offset}");
        dir.use_all();
    }
}

#[test]
fn damage_in_two_levels_is_reported() {
    let mut whole = Dir::new(TREE);
    for number in 0..9000 {
        whole.insert(&name(number * 4), regular(number)).unwrap();
    }
    whole.model.clear();
    let view = View::new(INO, &whole.disk, &whole.blocks).unwrap();
    let root = view.root().unwrap();
    assert!(root.has_nodes);
    let nodes: Vec<u32> = (0..root.index.count).map(|i| root.index.child(i).unwrap()).collect();
    let len = whole.len() as u32;
    let mut random = 1_u32;
    let mut next = |below: u32| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 8) % below
    };
    for _ in 0..100 {
        let mut dir = whole.clone();
        for _ in 0..3 {
            let logical = match next(3) {
                0 => 0,
                1 => nodes[next(nodes.len() as u32) as usize],
                _ => next(len),
            };
            let values = [0, 1, 2, len - 1, len, u32::MAX, next(len), next(u32::MAX)];
            let value = values[next(8) as usize];
            let range = if next(2) == 0 { 24 } else { 1024 };
            let offset = next(range) as usize * 4;
            let bytes = 2 * (1 + next(2) as usize);
            dir.damage(logical, |block| {
                block[offset..offset + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
            });
        }
        dir.use_all();
    }
}

#[test]
fn a_pointer_outside_the_directory_is_refused() {
    let mut dir = Dir::new(TREE);
    for number in 0..300 {
        dir.insert(&name(number), regular(number)).unwrap();
    }
    let beyond = dir.len() as u32;
    dir.damage(0, |block| block[36..40].copy_from_slice(&beyond.to_le_bytes()));
    let found = read(INO, &dir.disk, &dir.blocks, 0, &mut |_| ControlFlow::Continue(()));
    assert!(matches!(found, Err(FsError::DamagedInode { .. })), "{found:?}");
}

#[test]
fn a_size_that_no_directory_has_is_refused() {
    for size in [0, 100, 4097, 1 << 32, u64::MAX] {
        let mut dir = Dir::new(TREE);
        dir.disk.size = size;
        let found = lookup(INO, &dir.disk, &dir.blocks, b"name");
        assert!(matches!(found, Err(FsError::DamagedInode { .. })));
        dir.use_all();
    }
}

#[test]
fn freed_names_leave_no_bytes() {
    let mut dir = Dir::new(TREE);
    dir.insert(b"secret", regular(1)).unwrap();
    dir.remove(b"secret");
    let block = dir.blocks.sealed(BlockNo(1000));
    assert!(!block.windows(6).any(|bytes| bytes == b"secret"));
}
