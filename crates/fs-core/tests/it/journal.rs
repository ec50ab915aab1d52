//! The main journal on images: e2fsck replays a journal that RioFS has written, and RioFS one that
//! debugfs has written.

use std::collections::BTreeMap;
use std::sync::Arc;

use riopipe_fs_core::format::features::{Features, incompat};
use riopipe_fs_core::journal::format::{DamagedPart, JournalError, JournalSuperblock, MAGIC};
use riopipe_fs_core::journal::recovery::{LogEnd, Recovery, recover};
use riopipe_fs_core::journal::{Commit, MainJournal};
use riopipe_fs_core::storage::BlockWrite;
use riopipe_fs_core::{BLOCK_BYTES, Block, BlockNo};
use riopipe_nvme::digest::soft;

use crate::image::Image;

/// Features of file systems: with each shape of the journal's blocks that RioFS writes.
pub(crate) const OPTIONS: [&[&str]; 4] =
    [&[], &["-O", "^64bit"], &["-O", "^metadata_csum"], &["-O", "^metadata_csum,^64bit"]];

/// The number of blocks of the file: more than any descriptor block has.
const FILE_BLOCKS: usize = 600;

/// An image with the file `/file`, and the blocks of the file and of the journal.
pub(crate) struct Fixture {
    pub(crate) image: Image,
    pub(crate) file: Vec<BlockNo>,
    pub(crate) journal: Vec<BlockNo>,
}

pub(crate) fn content(value: u64) -> Block {
    let mut block = [0; BLOCK_BYTES];
    block[8..16].copy_from_slice(&value.to_le_bytes());
    block[BLOCK_BYTES - 8..].copy_from_slice(&(!value).to_le_bytes());
    if value.is_multiple_of(5) {
        block[..4].copy_from_slice(&MAGIC.to_be_bytes());
    }
    block
}

impl Fixture {
    pub(crate) fn new(options: &[&str]) -> Self {
        let source = tempfile::TempDir::new().expect("a directory");
        let data: Vec<u8> = (1..=FILE_BLOCKS as u64).flat_map(content).collect();
        std::fs::write(source.path().join("file"), data).expect("a file");
        let mut all = options.to_vec();
        all.extend(["-d", source.path().to_str().expect("a plain path")]);
        let image = Image::new(64, &all);
        let blocks = |path: &str| -> Vec<BlockNo> {
            let text = image.debugfs(&format!("blocks {path}\n"));
            let numbers = |line: &str| {
                line.split_whitespace().map(|number| number.parse().ok().map(BlockNo)).collect()
            };
            text.lines().filter_map(numbers).find(|found: &Vec<_>| !found.is_empty()).expect(path)
        };
        let (file, journal) = (blocks("/file"), blocks("<8>"));
        assert_eq!(file.len(), FILE_BLOCKS);
        assert!(journal.len() >= 1024);
        Self { image, file, journal }
    }

    pub(crate) fn superblock(&self) -> JournalSuperblock {
        let block = self.image.read(self.journal[0]);
        let blocks = self.journal.len() as u32;
        JournalSuperblock::decode(&self.image.layout(), &block, blocks).expect("a superblock")
    }

    pub(crate) fn recover(&self) -> Result<Recovery, JournalError> {
        let mut read = |n: u32| Ok(Arc::new(*self.image.read(self.journal[n as usize])));
        recover(&self.image.layout(), &self.superblock(), &mut read)
    }

    /// The value of a block after recovery; `None`: recovery does not write it.
    fn recovered(&self, recovery: &Recovery, at: BlockNo) -> Option<Arc<Block>> {
        let home = recovery.homes.iter().find(|home| home.at == at)?;
        let mut read = |n: u32| Ok(Arc::new(*self.image.read(self.journal[n as usize])));
        Some(recovery.load(home, &mut read).expect("loaded"))
    }

    /// Recovers as a mount does, and returns the journal.
    pub(crate) fn mount(&self) -> MainJournal {
        let recovery = self.recover().expect("recovered");
        let layout = self.image.layout();
        for home in &recovery.homes {
            let block = self.recovered(&recovery, home.at).expect("found");
            self.image.write(home.at, &block);
        }
        let superblock = recovery.emptied(&self.superblock());
        self.image.write(self.journal[0], &superblock.encode(&layout));
        MainJournal::new(&layout, &superblock, self.journal.clone(), &recovery)
            .expect("a journal that can be used")
    }

    pub(crate) fn write(&self, writes: impl IntoIterator<Item = BlockWrite>) {
        for write in writes {
            self.image.write(write.at, &write.data);
        }
    }

    pub(crate) fn set_needs_recovery(&self, needed: bool) {
        let mut superblock = self.image.superblock();
        let mut features = superblock.features();
        let bit = incompat::RECOVER;
        features.incompat = features.incompat & !bit | if needed { bit } else { 0 };
        superblock.set_features(Features { ..features });
        let mut block = self.image.read(BlockNo(0));
        superblock.encode(&mut block, soft);
        self.image.write(BlockNo(0), &block);
    }

    /// e2fsck replays the journal and finds nothing else.
    pub(crate) fn replay(&self) {
        let ended = self.image.repair();
        assert!(ended.output.contains("recovering journal"), "{}", ended.output);
        assert_eq!(ended.output.matches("Fix").count(), 0, "{}", ended.output);
        assert!(ended.code <= 1, "{ended:?}");
        self.image.assert_clean();
        assert_eq!(self.superblock().start(), 0);
    }

    fn values(&self) -> Vec<Box<Block>> {
        self.file.iter().map(|&at| self.image.read(at)).collect()
    }
}

/// Writes all parts of a commit, which is durable then.
pub(crate) fn commit(
    fixture: &Fixture,
    journal: &mut MainJournal,
    changes: &[(usize, u64)],
    revoked: &[usize],
) {
    let tid = journal.next();
    let Commit { start, body, commit } = encode(fixture, journal, changes, revoked);
    fixture.write(start.into_iter().chain(body).chain([commit]));
    journal.on_commit_durable(tid);
}

fn encode(
    fixture: &Fixture,
    journal: &mut MainJournal,
    changes: &[(usize, u64)],
    revoked: &[usize],
) -> Commit {
    while !journal.has_space(changes.len(), revoked.len()).expect("it fits") {
        checkpoint(fixture, journal, 150);
    }
    let blocks: Vec<_> = changes
        .iter()
        .map(|&(index, value)| (fixture.file[index], Arc::new(content(value))))
        .collect();
    let revoked: Vec<_> = revoked.iter().map(|&index| fixture.file[index]).collect();
    journal.encode_commit(journal.next(), &blocks, &revoked, 1_700_000_000).expect("encoded")
}

fn checkpoint(fixture: &Fixture, journal: &mut MainJournal, max: usize) {
    let plan = journal.plan_checkpoint(max);
    fixture.write(plan.writes.clone());
    journal.on_checkpoint_released(plan);
    fixture.write(journal.tail_update());
    journal.on_tail_released();
}

pub(crate) fn unmount(fixture: &Fixture, journal: &mut MainJournal) {
    while !journal.is_all_home() {
        checkpoint(fixture, journal, usize::MAX);
    }
    fixture.write(journal.empty());
    journal.on_tail_released();
}

/// Commits some transactions of several laps, with revokes, and keeps the expected values.
pub(crate) fn run(
    fixture: &Fixture,
    journal: &mut MainJournal,
    transactions: u64,
) -> BTreeMap<usize, u64> {
    let mut expected = BTreeMap::new();
    for n in 0..transactions {
        let changes: Vec<(usize, u64)> = (0..FILE_BLOCKS)
            .filter(|index| (*index as u64 * 7 + n) % 5 < 3)
            .map(|index| (index, 1000 + n * FILE_BLOCKS as u64 + index as u64))
            .collect();
        commit(fixture, journal, &changes, &[]);
        expected.extend(changes);
        // A block that is freed, and then written as data of a file, must keep the data.
        if n % 3 == 0 {
            let revoked = [n as usize % FILE_BLOCKS, (n as usize + 50) % FILE_BLOCKS];
            commit(fixture, journal, &[], &revoked);
            for index in revoked {
                fixture.image.write(fixture.file[index], &content(7));
                expected.insert(index, 7);
            }
        }
        if n % 7 == 6 {
            checkpoint(fixture, journal, 90);
        }
    }
    expected
}

fn assert_values(fixture: &Fixture, expected: &BTreeMap<usize, u64>) {
    for (&index, &value) in expected {
        let found = fixture.image.read(fixture.file[index]);
        assert!(*found == content(value), "block {index} of the file has version {value}");
    }
}

#[test]
fn e2fsck_replays_what_was_written() {
    for options in OPTIONS {
        let fixture = Fixture::new(options);
        fixture.image.assert_clean();
        let mut journal = fixture.mount();
        // More than ten laps of 1023 blocks.
        let expected = run(&fixture, &mut journal, 40);
        assert!(journal.not_home() > 0, "there is something to replay");
        // The last transaction has no commit block.
        let unfinished = encode(&fixture, &mut journal, &[(3, 1), (4, 1)], &[5]);
        fixture.write(unfinished.body);
        fixture.set_needs_recovery(true);

        let own = fixture.recover().expect("recovered");
        assert_eq!(own.end, LogEnd::Clean, "{options:?}");
        assert_eq!(own.last, Some(journal.next().on_drive() - 2));
        fixture.replay();
        assert_values(&fixture, &expected);
        // RioFS goes on where e2fsck has ended.
        let journal = fixture.mount();
        assert!(journal.next().on_drive() > own.last.expect("transactions"));
    }
}

#[test]
fn a_transaction_of_several_descriptors_arrives() {
    for options in OPTIONS {
        let fixture = Fixture::new(options);
        let mut journal = fixture.mount();
        for lap in 0..4 {
            let changes: Vec<_> =
                (0..FILE_BLOCKS).map(|index| (index, 10 + lap + index as u64)).collect();
            commit(&fixture, &mut journal, &changes, &[]);
        }
        fixture.set_needs_recovery(true);
        fixture.replay();
        let expected = (0..FILE_BLOCKS).map(|index| (index, 13 + index as u64)).collect();
        assert_values(&fixture, &expected);
    }
}

#[test]
fn an_unmounted_journal_is_clean_for_e2fsck() {
    for options in OPTIONS {
        let fixture = Fixture::new(options);
        let mut journal = fixture.mount();
        let expected = run(&fixture, &mut journal, 12);
        unmount(&fixture, &mut journal);
        fixture.image.assert_clean();
        assert_values(&fixture, &expected);
        let recovery = fixture.recover().expect("recovered");
        assert_eq!((recovery.end, recovery.homes.len()), (LogEnd::Empty, 0));
    }
}

/// e2fsck and dumpe2fs accept a journal that uses a part of its file, clean or not, and do not touch
/// the rest.
#[test]
fn a_shorter_journal_is_accepted() {
    for options in OPTIONS {
        let mut all = options.to_vec();
        all.extend(["-J", "size=8"]);
        let fixture = Fixture::new(&all);
        assert_eq!(fixture.journal.len(), 2048);
        let mut journal = fixture.mount();
        let too_short = journal.set_maxlen(1023).expect_err("refused");
        assert_eq!(too_short, JournalError::TooSmall { blocks: 1023, needed: 1024 });
        journal.set_maxlen(2049).expect_err("longer than the file");
        fixture.write([journal.set_maxlen(1200).expect("long enough")]);
        journal.on_tail_released();
        let behind = &fixture.journal[1200..];
        for &at in behind {
            fixture.image.write(at, &[0xa5; BLOCK_BYTES]);
        }
        fixture.image.assert_clean();
        assert_eq!(fixture.image.repair().code, 0, "e2fsck -fy has nothing to do");
        assert_eq!(fixture.superblock().maxlen(), 1200);
        let shown = fixture.image.tool("dumpe2fs", &["-h"]).output;
        assert!(shown.contains("Total journal blocks:     1200"), "{shown}");

        let mut journal = fixture.mount();
        let expected = run(&fixture, &mut journal, 30);
        fixture.set_needs_recovery(true);
        fixture.replay();
        assert_values(&fixture, &expected);
        assert_eq!(fixture.superblock().maxlen(), 1200);
        assert!(behind.iter().all(|&at| *fixture.image.read(at) == [0xa5; BLOCK_BYTES]));

        // And back to its full length.
        let mut journal = fixture.mount();
        fixture.write([journal.set_maxlen(2048).expect("as long as the file")]);
        journal.on_tail_released();
        commit(&fixture, &mut journal, &[(1, 5)], &[]);
        unmount(&fixture, &mut journal);
        fixture.image.assert_clean();
        assert_eq!(fixture.superblock().maxlen(), 2048);
    }
}

/// A script of debugfs that writes transactions into the journal.
struct Script<'f> {
    fixture: &'f Fixture,
    text: String,
    files: usize,
}

impl<'f> Script<'f> {
    fn new(fixture: &'f Fixture, open: &str) -> Self {
        Self { fixture, text: format!("{open}\n"), files: 0 }
    }

    /// A transaction that writes consecutive blocks of the file.
    fn write(&mut self, first: usize, values: &[u64], more: &str) {
        let path = self.fixture.image.dir().join(format!("data{}", self.files));
        self.files += 1;
        let data: Vec<u8> = values.iter().flat_map(|&value| content(value)).collect();
        std::fs::write(&path, data).expect("a file");
        let file = &self.fixture.file[first..first + values.len()];
        let list: Vec<String> = file.iter().map(|at| at.to_string()).collect();
        let (list, path) = (list.join(","), path.to_str().expect("a plain path"));
        self.text += &format!("jw {more} -b {list} {path}\n");
    }

    /// A transaction that revokes a block of the file.
    fn revoke(&mut self, index: usize) {
        self.text += &format!("jw -r {}\n", self.fixture.file[index]);
    }

    fn run(self) {
        let output = self.fixture.image.debugfs(&(self.text + "jc\n"));
        for bad in ["rror", "nvalid", "Usage"] {
            assert!(!output.contains(bad), "{output}");
        }
    }
}

/// Journals of debugfs with all kinds of checksums, with 64 bits and without.
const BY_DEBUGFS: [(&[&str], &str); 6] = [
    (&[], "jo -c -v 3"),
    (&[], "jo -c -v 2"),
    (&[], "jo"),
    (&["-O", "^64bit"], "jo -c -v 3"),
    (&["-O", "^64bit"], "jo -c -v 2"),
    (&["-O", "^64bit,^metadata_csum"], "jo"),
];

#[test]
fn journals_of_debugfs_are_replayed() {
    for (options, open) in BY_DEBUGFS {
        let fixture = Fixture::new(options);
        let before = fixture.values();
        let mut script = Script::new(&fixture, open);
        let values: Vec<u64> = (2000..2150).collect();
        script.write(0, &values, "");
        // Some begin with the magic number.
        script.write(10, &[15, 16, 20], "");
        script.revoke(2);
        script.revoke(11);
        script.write(11, &[30], "");
        script.revoke(12);
        script.write(160, &[31, 35], "");
        // This one has no commit block.
        script.write(161, &[40], "-c");
        script.run();
        assert!(fixture.superblock().start() != 0);

        let recovery = fixture.recover().expect("recovered");
        assert_eq!(recovery.transactions, 7, "{options:?} {open}");
        assert_eq!(recovery.last, Some(7));
        assert_eq!(recovery.next, 9);
        let mut journal = fixture.mount();
        let mut expected: BTreeMap<usize, u64> = (0..150).zip(2000..2150).collect();
        expected.extend([(10, 15), (11, 30), (160, 31), (161, 35)]);
        expected.remove(&2);
        expected.remove(&12);
        assert_values(&fixture, &expected);
        for (index, old) in before.iter().enumerate() {
            if !expected.contains_key(&index) {
                assert!(fixture.image.read(fixture.file[index]) == *old, "block {index} stays");
            }
        }
        // The journal goes on in its own shape.
        let more = run(&fixture, &mut journal, 5);
        fixture.set_needs_recovery(true);
        fixture.replay();
        expected.extend(more);
        assert_values(&fixture, &expected);
    }
}

/// The block of the journal that has this block of this transaction, counted from its beginning.
fn damage(fixture: &Fixture, index: u32, byte: usize) {
    let at = fixture.journal[index as usize];
    let mut block = fixture.image.read(at);
    block[byte] ^= 0x40;
    fixture.image.write(at, &block);
}

#[test]
fn damage_is_found_and_an_unfinished_commit_is_not_damage() {
    // Three transactions of four blocks: descriptor, two copies, commit.
    let log = || {
        let fixture = Fixture::new(&[]);
        let mut script = Script::new(&fixture, "jo -c -v 3");
        for n in 0..3 {
            script.write(0, &[50 + 2 * n, 51 + 2 * n], "");
        }
        script.run();
        assert_eq!(fixture.superblock().start(), 1);
        fixture
    };
    let fixture = log();
    let recovery = fixture.recover().expect("recovered");
    assert_eq!((recovery.transactions, recovery.head), (3, 13));
    let restored = |index: u32, byte: usize| {
        damage(&fixture, index, byte);
        let found = fixture.recover();
        damage(&fixture, index, byte);
        found
    };
    let is_damaged = |index, byte, what, sequence| {
        let found = restored(index, byte).expect_err("damaged");
        assert_eq!(found, JournalError::DamagedTransaction { what, sequence });
    };
    // The commit of the last transaction.
    let recovery = restored(12, 100).expect("recovered");
    assert_eq!((recovery.transactions, recovery.next), (2, 4));
    assert_eq!(recovery.end, LogEnd::Unfinished(DamagedPart::Commit(12)));
    assert!(*fixture.recovered(&recovery, fixture.file[0]).expect("found") == content(52));
    // A commit block, or a descriptor, before the end.
    is_damaged(8, 100, DamagedPart::Commit(8), 2);
    is_damaged(5, 100, DamagedPart::Descriptor(5), 2);
    // The last descriptor, whose commit is there.
    is_damaged(9, 100, DamagedPart::Descriptor(9), 3);
    is_damaged(10, 100, DamagedPart::Copy(fixture.file[0]), 3);
    // A copy that no recovery needs.
    let recovery = restored(6, 100).expect("recovered");
    assert_eq!(recovery.transactions, 3);
    // A block without its header ends the log.
    let recovery = restored(5, 0).expect("recovered");
    assert_eq!((recovery.transactions, recovery.end), (1, LogEnd::Clean));
    let recovery = restored(5, 11).expect("recovered");
    assert_eq!((recovery.transactions, recovery.end), (1, LogEnd::Clean));
}
