//! The copy on a volume in memory that can fail, and crash with every result that the promises allow.

use std::{io::Write, mem};

use super::*;

#[derive(Clone, Debug)]
struct Group {
    lba: u64,
    bytes: Vec<u8>,
    place: Place,
}

/// A volume with the promises of Rio: a crash leaves a prefix of groups.
#[derive(Debug)]
struct Memory {
    /// The durable content.
    durable: Vec<u8>,
    /// Groups that were submitted and not waited for.
    open: Vec<Group>,
    /// Number of these bytes that the copy has written, without headers.
    durable_bytes: u64,
    keeps_order: bool,
    /// The possible contents after a crash at each moment.
    crashes: Vec<Vec<u8>>,
    /// Number of groups before one fails.
    fails_after: Option<usize>,
    /// The most blocks of a group.
    group_blocks_max: u32,
}

#[derive(Debug, PartialEq, thiserror::Error)]
#[error("the volume failed")]
struct Failed;

impl Memory {
    fn new(blocks: usize) -> Self {
        Self {
            durable: vec![0; blocks * BLOCK_BYTES],
            open: Vec::new(),
            durable_bytes: 0,
            keeps_order: true,
            crashes: Vec::new(),
            fails_after: None,
            group_blocks_max: u32::MAX,
        }
    }

    fn apply(image: &mut [u8], group: &Group) {
        let at = group.lba as usize * BLOCK_BYTES;
        image[at..at + group.bytes.len()].copy_from_slice(&group.bytes);
    }

    /// Records the possible contents if the crash comes now: every prefix. Beyond it, fresh blocks
    /// are zeroed if they had landed, or untouched if not; in-place ones may be either. Of a volume
    /// without order: any subset of the groups that were not waited for.
    fn note_crashes(&mut self) {
        let n = self.open.len();
        if !self.keeps_order {
            for without in 0..n {
                let mut image = self.durable.clone();
                for (_, group) in self.open.iter().enumerate().filter(|(i, _)| *i != without) {
                    Self::apply(&mut image, group);
                }
                self.crashes.push(image);
            }
            return;
        }
        for k in 0..=n {
            let mut prefix = self.durable.clone();
            self.open[..k].iter().for_each(|group| Self::apply(&mut prefix, group));
            for landed in [false, true] {
                let mut image = prefix.clone();
                for group in self.open[k..].iter().filter(|_| landed) {
                    let group = match group.place {
                        Place::Fresh => {
                            &Group { bytes: vec![0; group.bytes.len()], ..group.clone() }
                        }
                        Place::InPlace | Place::Extend => group,
                    };
                    Self::apply(&mut image, group);
                }
                self.crashes.push(image);
            }
        }
    }
}

impl Store for Memory {
    type Buf = Vec<u8>;
    type Error = Failed;

    fn blocks(&self) -> u64 {
        (self.durable.len() / BLOCK_BYTES) as u64
    }

    fn keeps_order(&self) -> bool {
        self.keeps_order
    }

    fn check(&mut self, lba: u64, blocks: u32, _: bool) -> Result<(), Failed> {
        assert!(lba + u64::from(blocks) <= self.blocks());
        if blocks > self.group_blocks_max { Err(Failed) } else { Ok(()) }
    }

    fn buf(&mut self, len: usize) -> Result<Vec<u8>, Failed> {
        assert!(len.is_multiple_of(BLOCK_BYTES));
        Ok(vec![0xa5; len])
    }

    fn submit(&mut self, lba: u64, buf: Vec<u8>, place: Place) -> Result<(), Failed> {
        if let Some(left) = &mut self.fails_after {
            *left = left.checked_sub(1).ok_or(Failed)?;
        }
        assert!(lba as usize * BLOCK_BYTES + buf.len() <= self.durable.len());
        self.open.push(Group { lba, bytes: buf, place });
        self.note_crashes();
        Ok(())
    }

    fn submit_durable(&mut self, lba: u64, buf: Vec<u8>, place: Place) -> Result<(), Failed> {
        self.submit(lba, buf, place)
    }

    fn durable_bytes(&self) -> u64 {
        self.durable_bytes
    }

    /// The groups become durable one after the other.
    fn settle(&mut self, progress: &mut dyn FnMut(u64)) -> Result<(), Failed> {
        for group in mem::take(&mut self.open) {
            Self::apply(&mut self.durable, &group);
            if group.lba != HEADER_BLOCK {
                self.durable_bytes += group.bytes.len() as u64;
            }
            progress(self.durable_bytes);
        }
        self.crashes.push(self.durable.clone());
        Ok(())
    }

    fn read(&mut self, lba: u64, into: &mut [u8]) -> Result<(), Failed> {
        let mut image = self.durable.clone();
        self.open.iter().for_each(|group| Self::apply(&mut image, group));
        let at = lba as usize * BLOCK_BYTES;
        into.copy_from_slice(&image[at..at + into.len()]);
        Ok(())
    }
}

/// An observer that never stops the copy.
struct Unwatched;

impl Watch for Unwatched {
    fn progress(&mut self, _: u64, _: Option<u64>) {}

    fn stop(&self) -> bool {
        false
    }
}

/// An observer that calls a function after each step, and stops when that requests it.
struct Each<F>(F, bool);

impl<F: FnMut(u64) -> bool> Watch for Each<F> {
    fn progress(&mut self, done: u64, _: Option<u64>) {
        self.1 = (self.0)(done);
    }

    fn stop(&self) -> bool {
        self.1
    }
}

fn content(length: usize, salt: u8) -> Vec<u8> {
    (0..length).map(|i| (i.wrapping_mul(31) >> 3) as u8 ^ salt).collect()
}

fn file(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    (folder, path)
}

fn put(store: &mut Memory, path: &Path) -> Result<Copied, CopyError<Failed>> {
    put_watched(store, path, &mut Unwatched)
}

fn groups_of(group_bytes: usize) -> WriteOptions {
    WriteOptions { group_bytes, ..WriteOptions::default() }
}

fn put_watched(
    store: &mut Memory,
    path: &Path,
    watch: &mut dyn Watch,
) -> Result<Copied, CopyError<Failed>> {
    write(store, &mut Source::open(path)?, &groups_of(2 * BLOCK_BYTES), watch)
}

fn compare(
    store: &mut Memory,
    path: &Path,
    watch: &mut dyn Watch,
) -> Result<Comparison, CopyError<Failed>> {
    verify(store, Some(&mut Source::open(path)?), watch)
}

fn piped(bytes: &[u8]) -> Source {
    Source::stream(Path::new("standard input"), io::Cursor::new(bytes.to_vec()))
}

fn get(store: &mut Memory) -> Result<Vec<u8>, CopyError<Failed>> {
    let folder = tempfile::tempdir().unwrap();
    let (copied, path) = read(store, Some(folder.path()), false, &mut Unwatched)?;
    assert_eq!(path.file_name().unwrap(), copied.header.name);
    let entries = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(entries, 1, "only the file itself");
    Ok(fs::read(path).unwrap())
}

#[test]
fn files_of_all_lengths_come_back() {
    for length in [0, 1, 4095, 4096, 4097, 8192, 8193, 50_000] {
        let bytes = content(length, 1);
        let (_folder, path) = file("a file", &bytes);
        let mut store = Memory::new(16);
        let mut reported = Vec::new();
        let copied = put_watched(
            &mut store,
            &path,
            &mut Each(
                |n| {
                    reported.push(n);
                    false
                },
                false,
            ),
        )
        .unwrap();
        assert_eq!(copied.header.length, length as u64);
        assert_eq!(copied.groups, 2 + (length as u64).div_ceil(8192));
        assert_eq!(reported.last(), Some(&(length as u64)));
        assert_eq!(get(&mut store).unwrap(), bytes);
        let comparison = compare(&mut store, &path, &mut Unwatched).unwrap();
        assert!(comparison.is_equal(), "{comparison:?}");
    }
}

/// The purpose of the format: a crash at any moment leaves one whole file or none.
#[test]
fn a_crash_leaves_the_old_file_or_none_or_the_new_one() {
    for keeps_order in [true, false] {
        let (old, new) = (content(20_000, 1), content(30_000, 2));
        let (_folder, path) = file("old", &old);
        let mut store = Memory::new(16);
        put(&mut store, &path).unwrap();
        let (_folder, path) = file("new", &new);
        store.crashes.clear();
        store.keeps_order = keeps_order;
        put(&mut store, &path).unwrap();
        let (mut olds, mut nones, mut news) = (0, 0, 0);
        for image in mem::take(&mut store.crashes) {
            match get(&mut Memory { durable: image, ..Memory::new(0) }) {
                Ok(bytes) if bytes == old => olds += 1,
                Ok(bytes) if bytes == new => news += 1,
                Ok(_) => panic!("a mixture"),
                Err(CopyError::NoFile | CopyError::Unfinished(_)) => nones += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(olds > 0 && nones > 0 && news > 0, "{olds} {nones} {news}");
    }
}

#[test]
fn a_volume_that_fails_keeps_no_file() {
    let (_folder, path) = file("a", &content(30_000, 1));
    for fails_after in 0..6 {
        let mut store = Memory::new(16);
        put(&mut store, &path).unwrap();
        store.fails_after = Some(fails_after);
        assert!(matches!(put(&mut store, &path), Err(CopyError::Store(Failed))));
        match get(&mut store) {
            Ok(_) => assert_eq!(fails_after, 0, "nothing was overwritten yet"),
            Err(error) => assert!(matches!(error, CopyError::Unfinished(_)), "{error}"),
        }
    }
}

#[test]
fn a_file_that_does_not_fit_is_refused_before_anything_is_written() {
    let (_folder, path) = file("a", &content(4096 * 15 + 1, 1));
    let mut store = Memory::new(16);
    match put(&mut store, &path) {
        Err(CopyError::TooLarge { need: 17, have: 16 }) => {}
        other => panic!("{other:?}"),
    }
    assert!(store.crashes.is_empty());
}

#[test]
fn other_kinds_of_file_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = Memory::new(16);
    assert!(matches!(put(&mut store, folder.path()), Err(CopyError::NotAFile(_))));
    let gone = folder.path().join("gone");
    assert!(matches!(put(&mut store, &gone), Err(CopyError::Source { .. })));
    assert!(store.crashes.is_empty());
}

/// A store during whose copy another program writes the local file.
#[test]
fn a_file_that_changes_during_the_copy_is_noticed() {
    for grows in [true, false] {
        let (_folder, path) = file("a", &content(30_000, 1));
        let mut store = Memory::new(16);
        let mut first = true;
        let result = put_watched(
            &mut store,
            &path,
            &mut Each(
                |_| {
                    if mem::take(&mut first) {
                        let mut local = fs::OpenOptions::new().append(true).open(&path).unwrap();
                        match grows {
                            true => local.write_all(b"more").unwrap(),
                            false => local.set_len(9_000).unwrap(),
                        }
                    }
                    false
                },
                false,
            ),
        );
        assert!(matches!(result, Err(CopyError::Changed { began: 30_000, .. })), "{result:?}");
        assert!(matches!(get(&mut store), Err(CopyError::Unfinished(_))));
    }
}

/// Bytes that are only submitted may still be lost. The last one counts when the header is durable: until
/// then a crash leaves no file.
#[test]
fn progress_counts_what_is_durable() {
    for keeps_order in [true, false] {
        for length in [1, 8192, 30_000_u64] {
            let (_folder, path) = file("a", &content(length as usize, 1));
            let mut store = Memory { keeps_order, ..Memory::new(16) };
            let mut reported = Vec::new();
            let report = |done| {
                reported.push(done);
                false
            };
            put_watched(&mut store, &path, &mut Each(report, false)).unwrap();
            let groups = length.div_ceil(2 * BLOCK_BYTES as u64) as usize;
            assert_eq!(reported[..groups], vec![0; groups], "submitted, and nothing is durable");
            let (last, before) = reported.split_last().unwrap();
            assert_eq!(*last, length);
            assert!(before.is_sorted() && before.iter().all(|done| *done < length), "{before:?}");
            assert!(length < 8193 || before.iter().any(|done| *done > 0), "{before:?}");
        }
    }
}

#[test]
fn a_copy_that_is_stopped_leaves_no_file() {
    let (_folder, path) = file("a", &content(30_000, 1));
    let mut store = Memory::new(16);
    let mut groups = 0;
    let second = |_| {
        groups += 1;
        groups == 2
    };
    let stopped = put_watched(&mut store, &path, &mut Each(second, false));
    assert!(matches!(stopped, Err(CopyError::Interrupted)));
    assert_eq!(store.open.len(), 2, "nothing more was submitted");
    assert!(matches!(get(&mut store), Err(CopyError::Unfinished(_))));
    put(&mut store, &path).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let stopped = read(&mut store, Some(folder.path()), false, &mut Each(|_| true, false));
    assert!(matches!(stopped, Err(CopyError::Interrupted)));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_foreign_first_block_needs_force() {
    let (_folder, path) = file("a", b"bytes");
    let mut store = Memory::new(16);
    store.durable[..BLOCK_BYTES].fill(7);
    assert!(matches!(put(&mut store, &path), Err(CopyError::Foreign)));
    assert_eq!(store.durable[..BLOCK_BYTES], [7; BLOCK_BYTES]);
    let forced = WriteOptions { force: true, ..groups_of(BLOCK_BYTES) };
    write(&mut store, &mut Source::open::<Failed>(&path).unwrap(), &forced, &mut Unwatched)
        .unwrap();
    assert_eq!(get(&mut store).unwrap(), b"bytes");
}

#[test]
fn a_damaged_file_is_not_handed_out() {
    let (_folder, path) = file("a", &content(30_000, 1));
    let mut store = Memory::new(16);
    put(&mut store, &path).unwrap();
    store.durable[3 * BLOCK_BYTES + 5] ^= 1;
    assert!(matches!(get(&mut store), Err(CopyError::Checksum { .. })));
    let alone = verify(&mut store, None, &mut Unwatched).unwrap();
    assert!(!alone.checksum_ok && !alone.is_equal());
    assert_eq!(alone.local_length, None);
    let both = compare(&mut store, &path, &mut Unwatched).unwrap();
    assert_eq!((both.differing, both.first_difference), (1, Some(2 * 4096 + 5)));
}

#[test]
fn files_of_different_lengths_differ() {
    let (_folder, path) = file("a", &content(5000, 1));
    let mut store = Memory::new(16);
    put(&mut store, &path).unwrap();
    for length in [4000, 6000] {
        let (_folder, other) = file("b", &content(length, 1));
        let comparison = compare(&mut store, &other, &mut Unwatched).unwrap();
        assert!(comparison.checksum_ok && !comparison.is_equal());
        assert_eq!(comparison.differing, 0);
        assert_eq!(comparison.first_difference, Some(length.min(5000) as u64));
    }
}

#[test]
fn an_existing_file_is_replaced_only_by_force() {
    let (folder, path) = file("a", b"new");
    let mut store = Memory::new(16);
    put(&mut store, &path).unwrap();
    fs::write(&path, b"local").unwrap();
    let refused = read(&mut store, Some(folder.path()), false, &mut Unwatched);
    assert!(matches!(refused, Err(CopyError::Exists(p)) if p == path));
    assert_eq!(fs::read(&path).unwrap(), b"local");
    read(&mut store, Some(&path), true, &mut Unwatched).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

#[test]
fn only_a_regular_file_is_replaced_and_a_link_to_one_stays() {
    use std::os::unix::{fs::symlink, net::UnixListener};
    let (folder, path) = file("a", b"new");
    let mut store = Memory::new(16);
    put(&mut store, &path).unwrap();
    let [socket, nothing, link, fifo, to_fifo, into] =
        ["socket", "nothing", "link", "fifo", "to fifo", "into"]
            .map(|name| folder.path().join(name));
    let _listener = UnixListener::bind(&socket).unwrap();
    symlink(folder.path().join("missing"), &nothing).unwrap();
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    symlink(&fifo, &to_fifo).unwrap();
    // The file in a folder has the file's name, and there a folder has it already.
    let named = into.join("a");
    fs::create_dir_all(&named).unwrap();
    let null = PathBuf::from("/dev/null");
    for odd in [&socket, &nothing, &fifo, &to_fifo, &into, &null] {
        let at = if *odd == into { &named } else { odd };
        let before = at.symlink_metadata().unwrap().file_type();
        for force in [false, true] {
            let refused = read(&mut store, Some(odd), force, &mut Unwatched);
            assert!(matches!(refused, Err(CopyError::Irreplaceable(p)) if p == *at), "{odd:?}");
            assert_eq!(at.symlink_metadata().unwrap().file_type(), before);
        }
    }
    fs::write(&path, b"local").unwrap();
    symlink(&path, &link).unwrap();
    read(&mut store, Some(&link), true, &mut Unwatched).unwrap();
    assert!(link.is_symlink());
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

#[test]
fn a_local_file_that_changes_during_the_comparison_is_not_called_equal() {
    let (_folder, path) = file("a", &content(READ_CHUNK + 1, 1));
    let mut store = Memory::new(300);
    let mut source = Source::open::<Failed>(&path).unwrap();
    write(&mut store, &mut source, &groups_of(READ_CHUNK), &mut Unwatched).unwrap();
    for length in [10, READ_CHUNK as u64 + 5000] {
        let change = |_| {
            File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
            false
        };
        let result = compare(&mut store, &path, &mut Each(change, false));
        let Err(CopyError::ChangedWhileCompared { began, now, .. }) = result else {
            panic!("{result:?}")
        };
        assert_eq!((began, now), (READ_CHUNK as u64 + 1, length));
        fs::write(&path, content(READ_CHUNK + 1, 1)).unwrap();
    }
    // Its last byte is missing only while it is read.
    let restore = |done| {
        let is_end = done > READ_CHUNK as u64;
        let length = READ_CHUNK as u64 + u64::from(is_end);
        File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        false
    };
    let result = compare(&mut store, &path, &mut Each(restore, false));
    assert!(matches!(result, Err(CopyError::ChangedWhileCompared { .. })), "{result:?}");
}

#[test]
fn a_destination_that_cannot_be_written_is_named() {
    let (folder, path) = file("a", b"bytes");
    let mut store = Memory::new(16);
    put(&mut store, &path).unwrap();
    let nowhere = folder.path().join("no such folder").join("a");
    let error = read(&mut store, Some(&nowhere), false, &mut Unwatched).unwrap_err();
    assert!(error.to_string().contains("no such folder"), "{error}");
}

#[test]
fn an_empty_volume_is_reported() {
    let error = get(&mut Memory::new(16)).unwrap_err();
    assert!(matches!(error, CopyError::NoFile));
}

/// The older file survives a size of groups that can't be submitted.
#[test]
fn groups_that_do_not_fit_are_refused_before_the_older_file_is_gone() {
    let (old, new) = (content(5_000, 1), content(40_000, 2));
    let (_folder, path) = file("a", &old);
    let mut store = Memory::new(16);
    put(&mut store, &path).unwrap();
    store.crashes.clear();
    store.group_blocks_max = 3;
    let (_folder, path) = file("a", &new);
    for mut source in [Source::open::<Failed>(&path).unwrap(), piped(&new)] {
        let refused = write(&mut store, &mut source, &groups_of(8 << 12), &mut Unwatched);
        let Err(CopyError::Group { bytes: 32_768, fits: Some(8192), .. }) = refused else {
            panic!("{refused:?}")
        };
    }
    assert!(store.crashes.is_empty());
    assert_eq!(get(&mut store).unwrap(), old);
    // A short file has no group that large.
    let (_folder, path) = file("a", &new[..12_000]);
    let mut source = Source::open::<Failed>(&path).unwrap();
    write(&mut store, &mut source, &groups_of(8 << 12), &mut Unwatched).unwrap();
}

/// A pipe that brings a few bytes at a time, with pauses.
struct Trickle(io::Cursor<Vec<u8>>, bool);

impl io::Read for Trickle {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.1 = !self.1;
        if self.1 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let most = into.len().min(1_234);
        self.0.read(&mut into[..most])
    }
}

#[test]
fn a_stream_is_copied_in_and_out_and_compared() {
    for length in [0, 1, 4095, 4096, 8191, 8192, 8193, 15 * 4096] {
        let bytes = content(length, 1);
        let mut store = Memory::new(16);
        let mut source =
            Source::stream(Path::new("pipe"), Trickle(io::Cursor::new(bytes.clone()), false));
        let copied =
            write(&mut store, &mut source, &groups_of(2 * BLOCK_BYTES), &mut Unwatched).unwrap();
        assert_eq!(
            (copied.header.name.to_str(), copied.header.length),
            (Some("stdin"), length as u64)
        );
        assert_eq!(copied.groups, 2 + (length as u64).div_ceil(8192));
        let mut out = Vec::new();
        assert_eq!(read_to(&mut store, &mut out, &mut Unwatched).unwrap().header, copied.header);
        assert_eq!(out, bytes);
        let with = |bytes: &[u8], store: &mut Memory| {
            verify(store, Some(&mut piped(bytes)), &mut Unwatched).unwrap()
        };
        assert!(with(&bytes, &mut store).is_equal());
        let longer = with(&[&bytes[..], b"and more"].concat(), &mut store);
        assert_eq!(longer.local_length, Some(length as u64 + 1), "no more than that is read");
        assert_eq!(longer.first_difference, Some(length as u64));
        if let Some(shorter) = bytes.len().checked_sub(1) {
            let shorter = with(&bytes[..shorter], &mut store);
            assert_eq!(shorter.first_difference, Some(length as u64 - 1));
            assert_eq!(shorter.local_length, Some(length as u64 - 1));
        }
    }
}

#[test]
fn a_stream_that_is_too_long_leaves_no_file() {
    let mut store = Memory::new(16);
    let mut source = piped(&content(15 * 4096 + 1, 1));
    let result = write(&mut store, &mut source, &groups_of(2 * BLOCK_BYTES), &mut Unwatched);
    assert!(matches!(result, Err(CopyError::TooLong { space: 61_440 })), "{result:?}");
    assert!(matches!(get(&mut store), Err(CopyError::Unfinished(_))));
}

#[test]
fn a_silent_stream_does_not_keep_a_copy_from_stopping() {
    struct Silent;
    impl io::Read for Silent {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::WouldBlock.into())
        }
    }
    let mut store = Memory::new(16);
    let mut source = Source::stream(Path::new("pipe"), Silent);
    let mut stopped = Each(|_| true, true);
    let result = write(&mut store, &mut source, &groups_of(BLOCK_BYTES), &mut stopped);
    assert!(matches!(result, Err(CopyError::Interrupted)), "{result:?}");
}

#[test]
fn another_name_is_checked_before_anything_is_written() {
    let mut store = Memory::new(16);
    let name = |name: &str| WriteOptions { name: Some(name.into()), ..groups_of(BLOCK_BYTES) };
    for bad in ["", ".", "..", "a/b", &"n".repeat(256)] {
        let result = write(&mut store, &mut piped(b"a"), &name(bad), &mut Unwatched);
        assert!(matches!(result, Err(CopyError::Name(_))), "{bad}: {result:?}");
    }
    assert!(store.crashes.is_empty());
    let copied = write(&mut store, &mut piped(b"a"), &name("data.tar"), &mut Unwatched).unwrap();
    assert_eq!(copied.header.name, "data.tar");
}

#[test]
fn a_wrong_checksum_of_a_stream_is_an_error_after_its_bytes() {
    let (_folder, path) = file("a", &content(30_000, 1));
    let mut store = Memory::new(16);
    put(&mut store, &path).unwrap();
    store.durable[3 * BLOCK_BYTES + 5] ^= 1;
    let mut out = Vec::new();
    let result = read_to(&mut store, &mut out, &mut Unwatched);
    assert!(matches!(result, Err(CopyError::ChecksumOfStream { .. })), "{result:?}");
    assert_eq!(out.len(), 30_000);
}
