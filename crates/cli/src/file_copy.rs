//! A file in an ordered volume: copied in, copied out, compared.
//!
//! The volume holds one file. Order alone makes an interrupted copy harmless, so this is also the
//! smallest real use of it:
//!
//! 1. The header block is overwritten by one with the state "being copied", durably, before
//!    anything else. From here on an older file is gone, and no crash brings back a mixture.
//! 2. The bytes of the file follow as groups. None waits for the one before.
//! 3. The last group is the header with name, length and checksum, as a durable group. It is in the
//!    volume only if all groups before it are (promise P1): the only wait is the one for its
//!    durability.
//!
//! After a crash the volume holds the older file, no file, or the whole new one.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read},
    ops::DerefMut,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use riopipe::{BLOCK_BYTES, Place};

use crate::file_header::{
    self, Checksum, DATA_BLOCK, Found, HEADER_BLOCK, Header, NAME_MAX, blocks_for,
};

/// Bytes per read from the volume.
const READ_CHUNK: usize = 1 << 20;

/// The operations of an ordered volume that the copy needs. All addresses are in blocks of 4096
/// bytes.
pub trait Store {
    /// A buffer whose bytes are moved into a write.
    type Buf: DerefMut<Target = [u8]>;
    /// The error of an operation.
    type Error: std::error::Error;

    /// Size of the volume in blocks.
    fn blocks(&self) -> u64;

    /// Whether groups keep their order without a wait.
    fn keeps_order(&self) -> bool;

    /// A buffer of `len` bytes, whole blocks, of any content.
    ///
    /// # Errors
    /// If no group can take so many.
    fn buf(&mut self, len: usize) -> Result<Self::Buf, Self::Error>;

    /// Submits one group of one write. It may wait for space, but not for the write.
    ///
    /// # Errors
    /// An earlier write failed, or this one was refused.
    fn submit(&mut self, lba: u64, buf: Self::Buf, place: Place) -> Result<(), Self::Error>;

    /// Submits one durable group of one write.
    ///
    /// # Errors
    /// As [`Store::submit`].
    fn submit_durable(&mut self, lba: u64, buf: Self::Buf, place: Place)
    -> Result<(), Self::Error>;

    /// Waits until all submitted groups are durable.
    ///
    /// # Errors
    /// One of the groups failed.
    fn settle(&mut self) -> Result<(), Self::Error>;

    /// Reads whole blocks.
    ///
    /// # Errors
    /// The blocks can't be read.
    fn read(&mut self, lba: u64, into: &mut [u8]) -> Result<(), Self::Error>;
}

/// The observer of a copy.
pub trait Watch {
    /// Reports that `done` of the file's `total` bytes are done.
    fn progress(&mut self, done: u64, total: u64);

    /// Whether to stop here. The volume then holds no file, or the old one.
    fn stop(&self) -> bool;
}

/// The result of copying or checking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copied {
    /// The header of the file.
    pub header: Header,
    /// Number of groups; 0 if nothing was written.
    pub groups: u64,
}

/// The comparison of a volume's file with a local one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// The header of the volume's file.
    pub header: Header,
    /// Whether its bytes have the checksum in its header.
    pub checksum_ok: bool,
    /// Length of the local file in bytes; `None` without one.
    pub local_length: Option<u64>,
    /// Number of bytes that differ within the shorter length.
    pub differing: u64,
    /// Offset of the first difference, or of the first byte that only one file has.
    pub first_difference: Option<u64>,
}

impl Comparison {
    /// Whether the volume holds the expected file.
    #[must_use]
    pub fn is_equal(&self) -> bool {
        self.checksum_ok && self.first_difference.is_none()
    }
}

/// The reason why a file can't be copied or compared.
#[derive(Debug, thiserror::Error)]
pub enum CopyError<E: std::error::Error> {
    /// The local file can't be read.
    #[error("{}: {source}", path.display())]
    Source {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The path is a folder, a pipe or a device.
    #[error("{}: not a regular file; copy it to one first", .0.display())]
    NotAFile(PathBuf),
    /// The name is too long for the header.
    #[error("{}: its name has more than {NAME_MAX} bytes; give it a shorter one", .0.display())]
    Name(PathBuf),
    /// The file became longer or shorter during the copy.
    #[error(
        "{}: it had {began} bytes when the copy began and has {now} now; the volume holds no file; \
         copy it again when no program writes it", path.display()
    )]
    Changed {
        /// Path of the file.
        path: PathBuf,
        /// Its length at the start, in bytes.
        began: u64,
        /// Number of bytes read.
        now: u64,
    },
    /// The volume is too small.
    #[error(
        "the file needs {need} blocks of 4096 bytes, header included; the volume has {have}: make \
         a larger volume"
    )]
    TooLarge {
        /// Number of blocks needed.
        need: u64,
        /// Number of blocks of the volume.
        have: u64,
    },
    /// The volume holds something other than a copied file.
    #[error("the volume's first block holds something that no file copy wrote")]
    Foreign,
    /// The volume holds a newer format.
    #[error("the volume's file has format version {0}, newer than this program's 1; update rio")]
    Newer(u32),
    /// The header is damaged.
    #[error("the header of the volume's file is damaged: {0}; write the file again")]
    Damaged(&'static str),
    /// The volume holds no file.
    #[error("the volume holds no file; `rio volume write` puts one there")]
    NoFile,
    /// The copy was interrupted.
    #[error("the volume holds no file: a copy of {0:?} was begun and not finished; write it again")]
    Unfinished(std::ffi::OsString),
    /// The bytes have changed since they were written.
    #[error(
        "the volume's file {name:?} is damaged: its checksum is {found:016x}, its header has \
         {expected:016x}; nothing was kept of it"
    )]
    Checksum {
        /// Name of the file.
        name: std::ffi::OsString,
        /// The checksum in the header.
        expected: u64,
        /// The checksum of the bytes.
        found: u64,
    },
    /// The destination exists.
    #[error("{}: already there; --force replaces it", .0.display())]
    Exists(PathBuf),
    /// The destination is a device, a pipe or a socket, or a link to one, or to nothing.
    #[error("{}: not a regular file, so it is not replaced, not even with --force", .0.display())]
    Irreplaceable(PathBuf),
    /// The local file was made longer or shorter during the comparison.
    #[error(
        "{}: it was changed during the comparison ({began} bytes at the beginning, {now} now); compare \
         it again when no program writes it", path.display()
    )]
    ChangedWhileCompared {
        /// Path of the file.
        path: PathBuf,
        /// Its length at the start, in bytes.
        began: u64,
        /// Its length at the end, in bytes.
        now: u64,
    },
    /// The destination can't be written.
    #[error("{}: can't {doing}: {source}; nothing was left behind", path.display())]
    Destination {
        /// Path of the file.
        path: PathBuf,
        /// The operation that failed.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The file is there, and its folder can't be made durable.
    #[error(
        "{}: it is there, with the right checksum, but a power cut may undo its name: can't make the \
         folder durable: {source}", path.display()
    )]
    Folder {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// [`Watch::stop`] requested it.
    #[error("interrupted")]
    Interrupted,
    /// The volume failed.
    #[error("{0}")]
    Store(#[from] E),
}

/// Copies the local file `path` into the volume, in groups of `group_bytes` (whole blocks).
/// `force` overwrites a first block that no copy wrote.
///
/// # Errors
/// [`CopyError`]. Unless the error was found before anything was written, the volume then holds no
/// file.
pub fn write<S: Store>(
    store: &mut S,
    path: &Path,
    group_bytes: usize,
    force: bool,
    watch: &mut dyn Watch,
) -> Result<Copied, CopyError<S::Error>> {
    assert!(group_bytes > 0 && group_bytes.is_multiple_of(BLOCK_BYTES));
    let (mut file, length) = open_source(path)?;
    let name = path.file_name().unwrap_or(OsStr::new("file")).to_owned();
    if !file_header::is_plain_name(&name) {
        return Err(CopyError::Name(path.to_owned()));
    }
    let have = store.blocks();
    let need = blocks_for(length).unwrap_or(u64::MAX);
    if need > have {
        return Err(CopyError::TooLarge { need, have });
    }
    match find(store)? {
        Found::Foreign if !force => return Err(CopyError::Foreign),
        Found::Newer(version) if !force => return Err(CopyError::Newer(version)),
        _ => {}
    }

    // In place: until this is durable, a crash may restore a state with the older file, and undo
    // must not make a hole in it. Afterwards no state that the volume may recover to needs any of
    // its blocks.
    let mut buf = store.buf(BLOCK_BYTES)?;
    Header::encode_copying(&name, &mut buf);
    store.submit_durable(HEADER_BLOCK, buf, Place::InPlace)?;
    store.settle()?;
    let mut groups = 1;

    let source_error = |source| CopyError::Source { path: path.to_owned(), source };
    let mut checksum = Checksum::new();
    let mut done = 0;
    while done < length {
        let bytes = usize::try_from(length - done).unwrap_or(usize::MAX).min(group_bytes);
        let mut buf = store.buf(bytes.next_multiple_of(BLOCK_BYTES))?;
        let read = fill(&mut file, &mut buf[..bytes]).map_err(source_error)?;
        if read < bytes {
            let now = done + read as u64;
            return Err(CopyError::Changed { path: path.to_owned(), began: length, now });
        }
        buf[bytes..].fill(0);
        checksum.add(&buf[..bytes]);
        let lba = DATA_BLOCK + done / BLOCK_BYTES as u64;
        store.submit(lba, buf, Place::Fresh)?;
        groups += 1;
        done += bytes as u64;
        watch.progress(done, length);
        if watch.stop() {
            return Err(CopyError::Interrupted);
        }
    }
    if fill(&mut file, &mut [0; 1]).map_err(source_error)? > 0 {
        let now = file.metadata().map_or(length + 1, |meta| meta.len());
        return Err(CopyError::Changed { path: path.to_owned(), began: length, now });
    }

    if !store.keeps_order() {
        store.settle()?;
    }
    let header = Header { name, length, checksum: checksum.value() };
    let mut buf = store.buf(BLOCK_BYTES)?;
    header.encode(&mut buf);
    store.submit_durable(HEADER_BLOCK, buf, Place::Fresh)?;
    store.settle()?;
    Ok(Copied { header, groups: groups + 1 })
}

/// Copies the volume's file to `path`, or to its own name in the current folder. The name appears
/// only when the file is complete and its checksum right.
///
/// # Errors
/// [`CopyError`]; no file remains then.
pub fn read<S: Store>(
    store: &mut S,
    path: Option<&Path>,
    force: bool,
    watch: &mut dyn Watch,
) -> Result<(Copied, PathBuf), CopyError<S::Error>> {
    let header = whole(store)?;
    let path = match path {
        Some(folder) if folder.is_dir() => folder.join(&header.name),
        Some(path) => path.to_owned(),
        None => PathBuf::from(&header.name),
    };
    // The file behind a link is replaced, and the link stays.
    let path = match path.is_symlink() && path.is_file() {
        true => fs::canonicalize(&path).unwrap_or(path),
        false => path,
    };
    // An early check; the rename below decides.
    if let Ok(present) = path.symlink_metadata() {
        if !force {
            return Err(CopyError::Exists(path));
        }
        if !present.is_file() {
            return Err(CopyError::Irreplaceable(path));
        }
    }
    let failed = |doing| {
        let path = path.clone();
        move |source| CopyError::Destination { path, doing, source }
    };
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut temporary = tempfile::Builder::new()
        .prefix(".rio-")
        .permissions(fs::Permissions::from_mode(0o666))
        .tempfile_in(folder)
        .map_err(failed("create a file beside it"))?;
    let mut checksum = Checksum::new();
    each_chunk(store, header.length, |done, bytes| {
        checksum.add(bytes);
        io::Write::write_all(&mut temporary, bytes).map_err(failed("write it"))?;
        watch.progress(done, header.length);
        match watch.stop() {
            true => Err(CopyError::Interrupted),
            false => Ok(()),
        }
    })?;
    let found = checksum.value();
    if found != header.checksum {
        return Err(CopyError::Checksum { name: header.name, expected: header.checksum, found });
    }
    temporary.as_file().sync_all().map_err(failed("make it durable"))?;
    match force {
        true => temporary.persist(&path).map_err(|e| failed("give it its name")(e.error))?,
        false => temporary.persist_noclobber(&path).map_err(|error| match error.error.kind() {
            io::ErrorKind::AlreadyExists => CopyError::Exists(path.clone()),
            _ => failed("give it its name")(error.error),
        })?,
    };
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        Ok(()) => Ok((Copied { header, groups: 0 }, path)),
        Err(source) => Err(CopyError::Folder { path, source }),
    }
}

/// Reads the volume's file and compares it with its checksum and, if given, with a local file,
/// byte by byte.
///
/// # Errors
/// [`CopyError`], if there is nothing to compare; a difference is a result.
pub fn verify<S: Store>(
    store: &mut S,
    path: Option<&Path>,
    watch: &mut dyn Watch,
) -> Result<Comparison, CopyError<S::Error>> {
    let mut local = path.map(open_source).transpose()?;
    let header = whole(store)?;
    let mut checksum = Checksum::new();
    let mut expected = vec![0; READ_CHUNK];
    let (mut differing, mut first) = (0, None);
    // The bytes of the local file that were read.
    let mut compared = 0;
    each_chunk(store, header.length, |done, bytes| {
        checksum.add(bytes);
        if let (Some((file, _)), Some(path)) = (&mut local, path) {
            let expected = &mut expected[..bytes.len()];
            let read = fill(file, expected)
                .map_err(|source| CopyError::Source { path: path.to_owned(), source })?;
            compared += read as u64;
            let start = done - bytes.len() as u64;
            for (at, _) in
                bytes.iter().zip(&expected[..read]).enumerate().filter(|(_, (a, b))| a != b)
            {
                first.get_or_insert(start + at as u64);
                differing += 1;
            }
        }
        watch.progress(done, header.length);
        match watch.stop() {
            true => Err(CopyError::Interrupted),
            false => Ok(()),
        }
    })?;
    if let (Some((file, length)), Some(path)) = (&local, path) {
        // A shorter read than the length at the start, or another length now: a program writes it.
        let now = file.metadata().map_or(*length, |meta| meta.len());
        if compared < (*length).min(header.length) || now != *length {
            let (path, began) = (path.to_owned(), *length);
            return Err(CopyError::ChangedWhileCompared { path, began, now });
        }
    }
    let local_length = local.map(|(_, length)| length);
    if let Some(length) = local_length.filter(|length| *length != header.length) {
        first.get_or_insert(length.min(header.length));
    }
    let checksum_ok = checksum.value() == header.checksum;
    Ok(Comparison { header, checksum_ok, local_length, differing, first_difference: first })
}

/// Calls `each` with every piece of the file and the number of bytes so far.
fn each_chunk<S: Store>(
    store: &mut S,
    length: u64,
    mut each: impl FnMut(u64, &[u8]) -> Result<(), CopyError<S::Error>>,
) -> Result<(), CopyError<S::Error>> {
    let mut chunk = vec![0; READ_CHUNK];
    let mut done = 0;
    while done < length {
        let bytes = usize::try_from(length - done).unwrap_or(usize::MAX).min(READ_CHUNK);
        let blocks = &mut chunk[..bytes.next_multiple_of(BLOCK_BYTES)];
        store.read(DATA_BLOCK + done / BLOCK_BYTES as u64, blocks)?;
        done += bytes as u64;
        each(done, &chunk[..bytes])?;
    }
    Ok(())
}

fn find<S: Store>(store: &mut S) -> Result<Found, CopyError<S::Error>> {
    let mut block = [0; BLOCK_BYTES];
    store.read(HEADER_BLOCK, &mut block)?;
    Ok(file_header::decode(&block, store.blocks()))
}

fn whole<S: Store>(store: &mut S) -> Result<Header, CopyError<S::Error>> {
    Err(match find(store)? {
        Found::Whole(header) => return Ok(header),
        Found::Copying(name) => CopyError::Unfinished(name),
        Found::Blank => CopyError::NoFile,
        Found::Newer(version) => CopyError::Newer(version),
        Found::Damaged(why) => CopyError::Damaged(why),
        Found::Foreign => CopyError::Foreign,
    })
}

fn open_source<E: std::error::Error>(path: &Path) -> Result<(File, u64), CopyError<E>> {
    let failed = |source| CopyError::Source { path: path.to_owned(), source };
    // Checked before it is opened: opening a pipe would wait for its other end.
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Err(CopyError::NotAFile(path.to_owned()));
    }
    let file = File::open(path).map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    Ok((file, length))
}

/// Reads until `into` is full or the file ends; returns the number of bytes.
fn fill(file: &mut File, into: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < into.len() {
        match file.read(&mut into[done..]) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests;
