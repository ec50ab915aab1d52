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
//!
//! The local end is a regular file, or a stream such as a pipe, whose length is known only at its
//! end ([`Source`]).

mod error;
mod source;

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, Write},
    ops::DerefMut,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use riopipe::{BLOCK_BYTES, Place};

pub use error::CopyError;
pub use source::Source;

use crate::file_header::{self, Checksum, DATA_BLOCK, Found, HEADER_BLOCK, Header, blocks_for};

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

    /// Checks whether a group of one write of `blocks` blocks at `lba` can ever be submitted, as a
    /// durable group or not. Nothing is written.
    ///
    /// # Errors
    /// The bound that the group exceeds.
    fn check(&mut self, lba: u64, blocks: u32, durable: bool) -> Result<(), Self::Error>;

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

    /// Number of bytes of the groups of [`Store::submit`] that are durable, as far as it is known.
    fn durable_bytes(&self) -> u64;

    /// Waits until all submitted groups are durable. Calls `progress` with
    /// [`Store::durable_bytes`] from time to time.
    ///
    /// # Errors
    /// One of the groups failed.
    fn settle(&mut self, progress: &mut dyn FnMut(u64)) -> Result<(), Self::Error>;

    /// Reads whole blocks.
    ///
    /// # Errors
    /// The blocks can't be read.
    fn read(&mut self, lba: u64, into: &mut [u8]) -> Result<(), Self::Error>;
}

/// The observer of a copy.
pub trait Watch {
    /// Reports that `done` of the file's `total` bytes are done: durable in the volume, or read from
    /// it. The total of a stream is unknown. A copy into a volume is done to the last byte only when
    /// all of it is durable, its header included.
    fn progress(&mut self, done: u64, total: Option<u64>);

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
    /// Length of the local file in bytes; `None` without one. Of a stream: the bytes that were read,
    /// at most one more than the volume's file has.
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

/// The way to write a file.
#[derive(Clone, Debug, Default)]
pub struct WriteOptions {
    /// Name of the file in the volume; `None`: that of the source.
    pub name: Option<OsString>,
    /// Bytes of the file in each group: whole blocks, at least one.
    pub group_bytes: usize,
    /// Overwrite a first block that no copy wrote.
    pub force: bool,
}

/// Copies `source` into the volume.
///
/// # Errors
/// [`CopyError`]. Unless the error was found before anything was written, the volume then holds no
/// file.
pub fn write<S: Store>(
    store: &mut S,
    source: &mut Source,
    options: &WriteOptions,
    watch: &mut dyn Watch,
) -> Result<Copied, CopyError<S::Error>> {
    let group_bytes = options.group_bytes;
    assert!(group_bytes > 0 && group_bytes.is_multiple_of(BLOCK_BYTES));
    let name = options.name.clone().unwrap_or_else(|| source.name().to_owned());
    if !file_header::is_plain_name(&name) {
        return Err(CopyError::Name(name));
    }
    let length = source.length();
    let have = store.blocks();
    let need = blocks_for(length.unwrap_or(0)).unwrap_or(u64::MAX);
    if need > have {
        return Err(CopyError::TooLarge { need, have });
    }
    let space = (have - DATA_BLOCK) * BLOCK_BYTES as u64;
    check_groups(store, length.unwrap_or(space), group_bytes)?;
    match find(store)? {
        Found::Foreign if !options.force => return Err(CopyError::Foreign),
        Found::Newer(version) if !options.force => return Err(CopyError::Newer(version)),
        _ => {}
    }

    // In place: until this is durable, a crash may restore a state with the older file, and undo
    // must not make a hole in it. Afterwards no state that the volume may recover to needs any of
    // its blocks.
    let mut buf = store.buf(BLOCK_BYTES)?;
    Header::encode_copying(&name, &mut buf);
    store.submit_durable(HEADER_BLOCK, buf, Place::InPlace)?;
    store.settle(&mut |_| ())?;
    let mut groups = 1;

    let mut checksum = Checksum::new();
    let mut done = 0;
    loop {
        let left = length.unwrap_or(space) - done;
        let bytes = usize::try_from(left).unwrap_or(usize::MAX).min(group_bytes);
        if bytes == 0 {
            break;
        }
        let mut buf = store.buf(bytes.next_multiple_of(BLOCK_BYTES))?;
        let read = source.fill(&mut buf[..bytes], watch)?;
        if read < bytes && length.is_some() {
            return Err(source.changed(done + read as u64));
        }
        if read == 0 {
            break;
        }
        let blocks = read.next_multiple_of(BLOCK_BYTES);
        if blocks < buf.len() {
            // The end of a stream.
            let mut shorter = store.buf(blocks)?;
            shorter[..read].copy_from_slice(&buf[..read]);
            buf = shorter;
        }
        buf[read..].fill(0);
        checksum.add(&buf[..read]);
        let lba = DATA_BLOCK + done / BLOCK_BYTES as u64;
        store.submit(lba, buf, Place::Fresh)?;
        groups += 1;
        done += read as u64;
        watch.progress(unfinished(store.durable_bytes(), done), length);
        if watch.stop() {
            return Err(CopyError::Interrupted);
        }
        if read < bytes {
            break;
        }
    }
    if source.fill(&mut [0; 1], watch)? > 0 {
        return Err(match length {
            Some(length) => source.changed(length + 1),
            None => CopyError::TooLong { space },
        });
    }

    let mut report = |durable| watch.progress(unfinished(durable, done), length);
    if !store.keeps_order() {
        store.settle(&mut report)?;
    }
    let header = Header { name, length: done, checksum: checksum.value() };
    let mut buf = store.buf(BLOCK_BYTES)?;
    header.encode(&mut buf);
    store.submit_durable(HEADER_BLOCK, buf, Place::Fresh)?;
    store.settle(&mut report)?;
    watch.progress(done, length);
    Ok(Copied { header, groups: groups + 1 })
}

/// The progress of a copy of which `durable` bytes are durable, and whose header is not. Groups are
/// whole blocks, so they may be longer than the `submitted` bytes of the file.
fn unfinished(durable: u64, submitted: u64) -> u64 {
    durable.min(submitted.saturating_sub(1))
}

/// Groups whose bounds are checked before anything is written. Their sizes on the drives repeat
/// with the stripes, long before as many.
const CHECKED_GROUPS_MAX: usize = 1 << 16;

/// Checks all groups of a file of `length` bytes, before the older file is given up for it.
fn check_groups<S: Store>(
    store: &mut S,
    length: u64,
    group_bytes: usize,
) -> Result<(), CopyError<S::Error>> {
    let mut check = |group_bytes: usize| {
        store.check(HEADER_BLOCK, 1, true)?;
        for first in (0..length).step_by(group_bytes).take(CHECKED_GROUPS_MAX) {
            let bytes = (length - first).min(group_bytes as u64);
            let blocks = bytes.div_ceil(BLOCK_BYTES as u64) as u32;
            store.check(DATA_BLOCK + first / BLOCK_BYTES as u64, blocks, false)?;
        }
        Ok(())
    };
    let Err(source) = check(group_bytes) else { return Ok(()) };
    let halves = |bytes: &usize| match bytes / 2 / BLOCK_BYTES * BLOCK_BYTES {
        0 => None,
        half => Some(half),
    };
    let mut smaller = std::iter::successors(halves(&group_bytes), halves);
    let fits = smaller.find(|bytes| check(*bytes).is_ok());
    Err(CopyError::Group { bytes: group_bytes, fits, source })
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
    check_destination(&path, force)?;
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
        temporary.write_all(bytes).map_err(failed("write it"))?;
        watch.progress(done, Some(header.length));
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
    // Again: the copy may have taken hours.
    check_destination(&path, force)?;
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

/// Checks, before the copy, whether its result may get the name `path`.
fn check_destination<E: std::error::Error>(path: &Path, force: bool) -> Result<(), CopyError<E>> {
    match path.symlink_metadata() {
        Ok(present) if !present.is_file() => Err(CopyError::Irreplaceable(path.to_owned())),
        Ok(_) if !force => Err(CopyError::Exists(path.to_owned())),
        _ => Ok(()),
    }
}

/// Copies the volume's file to a stream. After [`io::ErrorKind::WouldBlock`] the write is repeated,
/// unless [`Watch::stop`] is set.
///
/// # Errors
/// [`CopyError`]. The checksum is known only at the end: [`CopyError::ChecksumOfStream`] comes after
/// all bytes.
pub fn read_to<S: Store>(
    store: &mut S,
    to: &mut dyn Write,
    watch: &mut dyn Watch,
) -> Result<Copied, CopyError<S::Error>> {
    let header = whole(store)?;
    let mut checksum = Checksum::new();
    each_chunk(store, header.length, |done, bytes| {
        checksum.add(bytes);
        let mut rest = bytes;
        while !rest.is_empty() {
            if watch.stop() {
                return Err(CopyError::Interrupted);
            }
            match to.write(rest) {
                Ok(0) => return Err(CopyError::Output(io::ErrorKind::WriteZero.into())),
                Ok(written) => rest = &rest[written..],
                Err(error) if source::is_passing(&error) => {}
                Err(error) => return Err(CopyError::Output(error)),
            }
        }
        watch.progress(done, Some(header.length));
        Ok(())
    })?;
    to.flush().map_err(CopyError::Output)?;
    let found = checksum.value();
    if found != header.checksum {
        return Err(CopyError::ChecksumOfStream {
            name: header.name,
            expected: header.checksum,
            found,
        });
    }
    Ok(Copied { header, groups: 0 })
}

/// Reads the volume's file and compares it with its checksum and, if given, with a local file or a
/// stream, byte by byte.
///
/// # Errors
/// [`CopyError`], if there is nothing to compare; a difference is a result.
pub fn verify<S: Store>(
    store: &mut S,
    mut local: Option<&mut Source>,
    watch: &mut dyn Watch,
) -> Result<Comparison, CopyError<S::Error>> {
    let header = whole(store)?;
    let mut checksum = Checksum::new();
    let mut expected = vec![0; READ_CHUNK];
    let (mut differing, mut first) = (0, None);
    // The bytes of the local file that were read.
    let mut compared = 0;
    each_chunk(store, header.length, |done, bytes| {
        checksum.add(bytes);
        if let Some(local) = &mut local {
            let expected = &mut expected[..bytes.len()];
            let read = local.fill(expected, watch)?;
            compared += read as u64;
            let start = done - bytes.len() as u64;
            for (at, _) in
                bytes.iter().zip(&expected[..read]).enumerate().filter(|(_, (a, b))| a != b)
            {
                first.get_or_insert(start + at as u64);
                differing += 1;
            }
        }
        watch.progress(done, Some(header.length));
        match watch.stop() {
            true => Err(CopyError::Interrupted),
            false => Ok(()),
        }
    })?;
    let local_length = match local {
        None => None,
        Some(local) => Some(match local.length() {
            Some(began) => {
                // A shorter read than the length at the start, or another length now: a program
                // writes it.
                let now = local.length_now().unwrap_or(began);
                if compared < began.min(header.length) || now != began {
                    let path = local.path().to_owned();
                    return Err(CopyError::ChangedWhileCompared { path, began, now });
                }
                began
            }
            None => compared + local.fill(&mut [0; 1], watch)? as u64,
        }),
    };
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

#[cfg(test)]
mod tests;
