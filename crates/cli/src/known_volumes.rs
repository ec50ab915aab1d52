//! The file of known volumes: the drives of each volume by the volume's name, so that a command
//! needs only the name.
//!
//! ```toml
//! version = 1
//!
//! [volumes.journal]
//! id = "6f1c5f6e-4b0a-4a43-9a2b-0d6c6d3f6a10"
//! members = ["192.0.2.10:4420,ns=1", "192.0.2.11:4420,ns=1"]
//! data-digest = "on"
//! ```
//!
//! `rio volume create` adds an entry to the user's own file. Commands search a name there, and then
//! in the file of the system, which is only read. An option or a variable of the environment names
//! another file instead of both ([`Places::of`]).
//!
//! A change of the file is atomic: the new content is written under another name and made durable
//! before it gets the name of the file. A lock file beside it keeps two changes apart.

use std::{
    collections::BTreeMap,
    env,
    ffi::OsString,
    fmt::Write as _,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, ErrorKind, Write as _},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

/// The variable that names the file.
pub const VARIABLE: &str = "RIO_VOLUMES";
/// The file of the system.
const SYSTEM_FILE: &str = "/etc/rio/volumes.toml";
/// The version of the format.
const VERSION: u32 = 1;
/// The longest wait for another process that changes the file.
const LOCK_WAIT: Duration = Duration::from_secs(10);
/// The comment at the start of the file.
const HEAD: &str = "# The volumes that rio knows by name. `rio volume create` adds to it, and rewrites \
                    it: other comments are lost.\n";

/// A known volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct KnownVolume {
    /// The volume's id. `None`: an entry that a user has written without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The members in order, each as `-m` takes it.
    pub members: Vec<String>,
    /// The host NQN to connect with, if it was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostnqn: Option<String>,
    /// The host id to connect with, if it was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostid: Option<String>,
    /// Whether headers are protected by a digest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hdr_digest: bool,
    /// Whether data is protected by a digest, if that was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_digest: Option<StoredDigest>,
}

/// The use of data digests, as a file of known volumes has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoredDigest {
    /// Always.
    On,
    /// Never.
    Off,
}

/// The content of a file.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    #[serde(default)]
    version: Option<u32>,
    #[serde(default)]
    volumes: BTreeMap<String, KnownVolume>,
}

/// The version of a file, whatever else is in it.
#[derive(Deserialize)]
struct VersionOnly {
    version: Option<u32>,
}

/// Why the file of known volumes could not be read or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KnownError {
    /// The file can't be read.
    #[error("can't read the known volumes in {}: {source}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The file can't be written.
    #[error("can't write the known volumes in {}: {source}", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// Not a regular file.
    #[error("{} is not a regular file, so it can't hold the known volumes", .0.display())]
    NotAFile(PathBuf),
    /// The content is no list of volumes.
    #[error("{}, line {line}, column {column}: {problem}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, from 1, in characters.
        column: usize,
        /// The problem there.
        problem: String,
    },
    /// A later version of the program has written it.
    #[error("{} has version {version}, newer than this program reads: upgrade rio", .path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// Another process has the lock for too long.
    #[error("{} is being changed by another process; its lock was not free within 10 s", .0.display())]
    Locked(PathBuf),
    /// The new name of a volume has an entry already.
    #[error("{} has another volume {name:?} already", .path.display())]
    NameTaken {
        /// The file.
        path: PathBuf,
        /// The name.
        name: String,
    },
    /// There is no place for the file.
    #[error("no file for the known volumes: neither HOME nor XDG_CONFIG_HOME is set")]
    NoPlace,
}

/// The files of known volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// The file that commands read and change; `None`: none.
    own: Option<PathBuf>,
    /// The file that commands only read; `None`: none.
    system: Option<PathBuf>,
    /// Whether the user wants no file at all.
    is_disabled: bool,
}

/// The result of [`Places::keep`].
#[derive(Debug, PartialEq, Eq)]
pub struct Kept {
    /// The file.
    pub path: PathBuf,
    /// The entry of another volume of this name, which was replaced.
    pub replaced: Option<KnownVolume>,
}

impl Places {
    /// The files that the command line and the environment name: the file of `--volumes-file`, or
    /// else that of [`VARIABLE`], or else the user's own and the one of the system. If the variable
    /// is empty, no file is used.
    #[must_use]
    pub fn of(volumes_file: Option<&Path>) -> Self {
        Self::from(volumes_file, |name| env::var_os(name))
    }

    fn from(volumes_file: Option<&Path>, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let only = |path: PathBuf| Self { own: Some(path), system: None, is_disabled: false };
        if let Some(path) = volumes_file {
            return only(path.into());
        }
        if let Some(path) = variable(VARIABLE) {
            return match path.is_empty() {
                true => Self { own: None, system: None, is_disabled: true },
                false => only(path.into()),
            };
        }
        // A relative path in one of these variables counts as none, by the XDG specification.
        let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let config =
            absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")));
        Self {
            own: config.map(|folder| folder.join("rio/volumes.toml")),
            system: Some(SYSTEM_FILE.into()),
            is_disabled: false,
        }
    }

    /// The files, in the order in which a name is searched.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.own.iter().chain(&self.system).map(PathBuf::as_path)
    }

    /// The entry of a volume; `None` if no file has one.
    ///
    /// # Errors
    /// A file can't be read, or is damaged.
    pub fn find(&self, name: &str) -> Result<Option<KnownVolume>, KnownError> {
        for path in self.paths() {
            if let Some(found) = read(path)?.volumes.remove(name) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// All entries by name, each with its file. An entry of the user's own file hides one of the
    /// same name in the file of the system.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub fn list(&self) -> Result<BTreeMap<String, (KnownVolume, PathBuf)>, KnownError> {
        let mut all = BTreeMap::new();
        for path in self.paths() {
            for (name, volume) in read(path)?.volumes {
                all.entry(name).or_insert_with(|| (volume, path.to_owned()));
            }
        }
        Ok(all)
    }

    /// Adds a volume to the file, or replaces the entry of this name. `None`: the user wants no
    /// file.
    ///
    /// # Errors
    /// The file can't be read or changed. It is as it was.
    pub fn keep(&self, name: &str, volume: &KnownVolume) -> Result<Option<Kept>, KnownError> {
        if self.is_disabled {
            return Ok(None);
        }
        let path = self.own.as_deref().ok_or(KnownError::NoPlace)?;
        let old =
            change(path, |volumes| Ok((volumes.insert(name.to_owned(), volume.clone()), true)))?;
        let replaced = old.filter(|old| old.id != volume.id);
        Ok(Some(Kept { path: path.to_owned(), replaced }))
    }

    /// Removes the entry of a volume with this name and id from the user's own file. An entry
    /// without an id counts as that volume's. Returns whether there was one.
    ///
    /// # Errors
    /// As [`keep`](Self::keep).
    pub fn forget(&self, name: &str, id: &str) -> Result<bool, KnownError> {
        let Some(path) = self.own.as_deref().filter(|path| path.exists()) else { return Ok(false) };
        change(path, |volumes| {
            let is_it = volumes.get(name).is_some_and(|volume| volume.is(id));
            if is_it {
                volumes.remove(name);
            }
            Ok((is_it, is_it))
        })
    }

    /// Gives the entry of the volume with this name and id a new name, in the user's own file. An
    /// entry without an id counts as that volume's. Returns whether there was one.
    ///
    /// # Errors
    /// As [`keep`](Self::keep). Also, another volume has an entry of the new name.
    pub fn rename(&self, old: &str, new: &str, id: &str) -> Result<bool, KnownError> {
        let Some(path) = self.own.as_deref().filter(|path| path.exists()) else { return Ok(false) };
        change(path, |volumes| {
            let is_it = volumes.get(old).is_some_and(|volume| volume.is(id));
            if !is_it || old == new {
                return Ok((is_it, false));
            }
            if volumes.get(new).is_some_and(|other| !other.is(id)) {
                return Err(KnownError::NameTaken { path: path.into(), name: new.into() });
            }
            if let Some(volume) = volumes.remove(old) {
                volumes.insert(new.to_owned(), volume);
            }
            Ok((true, true))
        })
    }
}

impl KnownVolume {
    /// Whether this is the entry of the volume with this id, as far as it is known.
    fn is(&self, id: &str) -> bool {
        self.id.as_deref().is_none_or(|own| own == id)
    }
}

/// The content of a file; a file that does not exist has no volumes.
fn read(path: &Path) -> Result<Content, KnownError> {
    let failed = |source| KnownError::Read { path: path.into(), source };
    match fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => return Err(KnownError::NotAFile(path.into())),
        Ok(_) => {}
        // A home that is no folder, as the one of a system user, has no such file.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(Content::default());
        }
        Err(error) => return Err(failed(error)),
    }
    let bytes = fs::read(path).map_err(failed)?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        damaged(path, &String::from_utf8_lossy(valid), valid.len(), "not UTF-8".to_owned())
    })?;
    // A later version may have fields that this one does not know, so the version is read first.
    let version = toml::from_str::<VersionOnly>(&text).ok().and_then(|head| head.version);
    if let Some(version) = version.filter(|version| *version > VERSION) {
        return Err(KnownError::Newer { path: path.into(), version });
    }
    toml::from_str(&text).map_err(|error: toml::de::Error| {
        let at = error.span().map_or(0, |span| span.start);
        damaged(path, &text, at, error.message().to_owned())
    })
}

/// The error of a file with a problem at byte `at` of `text`.
fn damaged(path: &Path, text: &str, at: usize, problem: String) -> KnownError {
    let before = text.get(..at).unwrap_or(text);
    let line = 1 + before.matches('\n').count();
    let column = 1 + before.chars().rev().take_while(|c| *c != '\n').count();
    KnownError::Damaged { path: path.into(), line, column, problem }
}

/// Changes the volumes in a file. `edit` returns its result, and whether it has changed anything.
fn change<T>(
    path: &Path,
    edit: impl FnOnce(&mut BTreeMap<String, KnownVolume>) -> Result<(T, bool), KnownError>,
) -> Result<T, KnownError> {
    let failed = |source| KnownError::Write { path: path.into(), source };
    // The file behind a link is replaced, and not the link.
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let folder = match path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        Some(folder) => folder,
        None => Path::new("."),
    };
    fs::create_dir_all(folder).map_err(failed)?;
    let _lock = lock(path)?;
    let mut content = read(path)?;
    let (result, has_changed) = edit(&mut content.volumes)?;
    if has_changed {
        content.version = Some(VERSION);
        replace(path, folder, &content).map_err(failed)?;
    }
    Ok(result)
}

/// Locks the file against changes by others. The lock file stays: a lock on a file that another
/// process removes would have no effect.
fn lock(path: &Path) -> Result<File, KnownError> {
    let failed = |source| KnownError::Write { path: path.into(), source };
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o644);
    let file = options.open(&name).map_err(failed)?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if begun.elapsed() < LOCK_WAIT => {
                thread::sleep(Duration::from_millis(10));
            }
            Err(TryLockError::WouldBlock) => return Err(KnownError::Locked(path.into())),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
    }
}

/// Replaces the file by one with this content, so that a crash leaves the old one or the new.
fn replace(path: &Path, folder: &Path, content: &Content) -> io::Result<()> {
    let mut text = HEAD.to_owned();
    let body = toml::to_string(content).map_err(io::Error::other)?;
    // Writing to a string can't fail.
    let _ = write!(text, "{body}");
    let mode = fs::metadata(path).map_or(0o644, |metadata| metadata.permissions().mode());
    let mut file = tempfile::Builder::new()
        .prefix(".volumes-")
        .permissions(fs::Permissions::from_mode(mode & 0o777))
        .tempfile_in(folder)?;
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests;
