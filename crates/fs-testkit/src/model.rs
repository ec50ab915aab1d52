//! A file system as its program knows it, and what must be there after a crash.
//!
//! A file may have any of the contents that it has had since it was last made durable, block by
//! block, because overwrites have no order among themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use riopipe_fs_core::format::inode::{Time, file_type};
use riopipe_fs_core::fs::Fs;
use riopipe_fs_core::{BLOCK_BYTES, FsError, Ino};

/// A path from the root on: `/a/x`. The root is the empty path.
pub type Path = String;

/// The number of a file. No two files of a program have the same.
pub type FileId = u64;

/// The end of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Node {
    /// A directory.
    Dir,
    /// A regular file.
    File(FileId),
}

/// All paths that were found, each with the content of the file, or `None` for a directory.
pub type Found = BTreeMap<Path, Option<Vec<u8>>>;

/// The contents of a file since it was last made durable.
#[derive(Clone, Debug, Default)]
struct FileModel {
    /// The moment of the last change of its content or of its own name.
    changed: u64,
    /// The number of the first version in the list.
    first: usize,
    /// The versions, the durable one first. The last one is the current.
    versions: Vec<Vec<u8>>,
}

impl FileModel {
    fn new(content: Vec<u8>, changed: u64) -> Self {
        Self { changed, first: 0, versions: vec![content] }
    }

    fn last(&self) -> usize {
        self.first + self.versions.len() - 1
    }

    /// Earlier versions than this one can't be there any more.
    fn drop_before(&mut self, version: usize) {
        let old = version.saturating_sub(self.first).min(self.versions.len() - 1);
        self.versions.drain(..old);
        self.first += old;
    }

    /// Whether the file may have this content after a crash.
    fn judge(&self, path: &str, data: &[u8]) -> Result<(), String> {
        if !self.versions.iter().any(|version| version.len() == data.len()) {
            return Err(format!("{path} has {} bytes, which it never had", data.len()));
        }
        for (index, block) in data.chunks(BLOCK_BYTES).enumerate() {
            let at = index * BLOCK_BYTES;
            let had = |version: &Vec<u8>| {
                let end = version.len().min(at + block.len());
                let part = version.get(at..end).unwrap_or_default();
                // Behind the end of a version there were zeroes.
                block[..part.len()] == *part && block[part.len()..].iter().all(|&byte| byte == 0)
            };
            if !self.versions.iter().any(had) {
                let start = &block[..block.len().min(8)];
                return Err(format!(
                    "block {index} of {path} has a content that it never had: {start:?}"
                ));
            }
        }
        Ok(())
    }
}

/// A barrier that no later sync has made durable.
#[derive(Clone, Debug)]
struct Barrier {
    /// The path, unless a name on the way has changed since.
    path: Option<Path>,
    file: FileId,
    version: usize,
    moment: u64,
}

/// The tree as the program sees it, and what must be there after a crash.
#[derive(Clone, Debug, Default)]
pub struct Model {
    tree: BTreeMap<Path, Node>,
    files: BTreeMap<FileId, FileModel>,
    next: FileId,
    /// Paths that must lead to these files after a crash: they were synced there, and no name on
    /// the way was changed since.
    synced: BTreeMap<Path, FileId>,
    /// Directories that must be there.
    synced_dirs: BTreeSet<Path>,
    /// All nodes to which each path has led since everything was last made durable. Each may be
    /// there.
    possible: BTreeMap<Path, BTreeSet<Node>>,
    barriers: Vec<Barrier>,
    /// Counts the changes and the barriers.
    moment: u64,
    /// Files whose names have changed since they were last made durable. `fdatasync` is not about
    /// these names.
    renamed: BTreeSet<FileId>,
    /// Files to which a moved directory leads, and when that was. Until such a file
    /// is changed, nothing of it has to be made durable by an `fsync`, and the directory's name
    /// belongs to another one.
    moved: BTreeMap<FileId, u64>,
}

impl Model {
    /// The tree after a mount: all that was found is durable.
    #[must_use]
    pub fn of(found: &Found) -> Self {
        let mut model = Self::default();
        for (path, content) in found {
            let node = match content {
                None => Node::Dir,
                Some(data) => Node::File(model.add_file(data.clone())),
            };
            model.tree.insert(path.clone(), node);
        }
        model.sync_all();
        model
    }

    fn add_file(&mut self, content: Vec<u8>) -> FileId {
        self.next += 1;
        self.moment += 1;
        self.files.insert(self.next, FileModel::new(content, self.moment));
        self.next
    }

    /// Notes that the content of a file changes, or its own name.
    fn touch(&mut self, file: FileId) -> Option<&mut FileModel> {
        self.moment += 1;
        let file = self.files.get_mut(&file)?;
        file.changed = self.moment;
        Some(file)
    }

    /// All directories, the root first.
    #[must_use]
    pub fn dirs(&self) -> Vec<Path> {
        let dirs = self.tree.iter().filter(|(_, node)| matches!(node, Node::Dir));
        std::iter::once(String::new()).chain(dirs.map(|(path, _)| path.clone())).collect()
    }

    /// The paths of all files.
    #[must_use]
    pub fn files(&self) -> Vec<Path> {
        let files = self.tree.iter().filter(|(_, node)| matches!(node, Node::File(_)));
        files.map(|(path, _)| path.clone()).collect()
    }

    /// The blocks that files and directories use at most.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        let blocks = |node: &Node| match node {
            Node::Dir => 1,
            // Its contents of before are freed by a commit.
            Node::File(file) => self.content(*file).len().div_ceil(BLOCK_BYTES) as u64,
        };
        self.tree.values().map(blocks).sum()
    }

    /// The node at a path.
    #[must_use]
    pub fn node(&self, path: &str) -> Option<Node> {
        self.tree.get(path).copied()
    }

    /// Whether a directory has no entry.
    #[must_use]
    pub fn is_empty(&self, path: &str) -> bool {
        let below = format!("{path}/");
        !self.tree.keys().any(|other| other.starts_with(&below))
    }

    /// The content of a file as the program sees it.
    #[must_use]
    pub fn content(&self, file: FileId) -> &[u8] {
        let versions = self.files.get(&file).map(|file| &file.versions);
        versions.and_then(|versions| versions.last()).map_or(&[], Vec::as_slice)
    }

    /// Everything as the program sees it.
    #[must_use]
    pub fn now(&self) -> Found {
        let content = |node: &Node| match node {
            Node::Dir => None,
            Node::File(file) => Some(self.content(*file).to_vec()),
        };
        self.tree.iter().map(|(path, node)| (path.clone(), content(node))).collect()
    }

    fn forget_under(&mut self, path: &str) {
        let below = format!("{path}/");
        let is_in = |other: &str| other == path || other.starts_with(&below);
        self.synced.retain(|other, _| !is_in(other));
        self.synced_dirs.retain(|other| !is_in(other));
        for barrier in &mut self.barriers {
            barrier.path.take_if(|path| is_in(path));
        }
    }

    fn insert(&mut self, path: Path, node: Node) {
        self.possible.entry(path.clone()).or_default().insert(node);
        self.tree.insert(path, node);
    }

    pub(crate) fn create(&mut self, path: &str) {
        let file = self.add_file(Vec::new());
        self.insert(path.to_owned(), Node::File(file));
    }

    pub(crate) fn make_dir(&mut self, path: &str) {
        self.insert(path.to_owned(), Node::Dir);
    }

    pub(crate) fn change(&mut self, path: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let Some(Node::File(file)) = self.node(path) else { return };
        let mut content = self.content(file).to_vec();
        change(&mut content);
        if let Some(file) = self.touch(file) {
            file.versions.push(content);
        }
    }

    pub(crate) fn remove(&mut self, path: &str) {
        self.tree.remove(path);
        self.forget_under(path);
    }

    pub(crate) fn rename(&mut self, path: &str, to: &str) {
        self.moment += 1;
        self.forget_under(path);
        self.forget_under(to);
        let below = format!("{path}/");
        let is_moved = |other: &str| other == path || other.starts_with(&below);
        let moved: Vec<Path> = self.tree.keys().filter(|other| is_moved(other)).cloned().collect();
        for old in moved {
            if let Some(node) = self.tree.remove(&old) {
                if let Node::File(file) = node {
                    self.renamed.insert(file);
                    if old == path {
                        self.touch(file);
                    } else {
                        self.moved.insert(file, self.moment);
                    }
                }
                self.insert(format!("{to}{}", &old[path.len()..]), node);
            }
        }
    }

    fn must_be_at(&mut self, path: &str, file: FileId) {
        self.synced.insert(path.to_owned(), file);
        let mut above = path;
        while let Some((parent, _)) =
            above.rsplit_once('/').filter(|(parent, _)| !parent.is_empty())
        {
            self.synced_dirs.insert(parent.to_owned());
            above = parent;
        }
    }

    /// A change at this moment is made durable, and all earlier barriers with it.
    fn keep_barriers_before(&mut self, moment: u64) {
        let earlier = self.barriers.extract_if(.., |barrier| barrier.moment < moment);
        for Barrier { path, file, version, .. } in earlier.collect::<Vec<_>>() {
            if let Some(file) = self.files.get_mut(&file) {
                file.drop_before(version);
            }
            if let Some(path) = path {
                self.must_be_at(&path, file);
            }
        }
    }

    pub(crate) fn sync_file(&mut self, path: &str, data_only: bool) {
        let Some(Node::File(id)) = self.node(path) else { return };
        let Some(file) = self.files.get_mut(&id) else { return };
        file.drop_before(file.last());
        let changed = file.changed;
        self.keep_barriers_before(changed);
        if self.has_durable_name_after_sync(id, data_only) {
            self.renamed.remove(&id);
            self.moved.remove(&id);
            self.must_be_at(path, id);
        }
    }

    /// Whether a sync of a file is also about all names that lead to it.
    fn has_durable_name_after_sync(&self, file: FileId, data_only: bool) -> bool {
        let changed = self.files.get(&file).map_or(0, |file| file.changed);
        let is_only_moved = self.moved.get(&file).is_some_and(|moved| *moved >= changed);
        !is_only_moved && (!data_only || !self.renamed.contains(&file))
    }

    pub(crate) fn barrier(&mut self, path: &str, data_only: bool) {
        let Some(Node::File(file)) = self.node(path) else { return };
        let Some(version) = self.files.get(&file).map(FileModel::last) else { return };
        let is_named = self.has_durable_name_after_sync(file, data_only);
        self.moment += 1;
        let (path, moment) = (is_named.then(|| path.to_owned()), self.moment);
        self.barriers.push(Barrier { path, file, version, moment });
    }

    /// Everything is durable.
    pub fn sync_all(&mut self) {
        self.barriers.clear();
        self.renamed.clear();
        self.moved.clear();
        self.synced.clear();
        self.synced_dirs.clear();
        self.possible.clear();
        for (path, node) in &self.tree {
            self.possible.insert(path.clone(), BTreeSet::from([*node]));
            match node {
                Node::Dir => drop(self.synced_dirs.insert(path.clone())),
                Node::File(file) => drop(self.synced.insert(path.clone(), *file)),
            }
        }
        for file in self.files.values_mut() {
            file.drop_before(file.last());
        }
    }

    /// The model for the middle of a call, given the model `after` it.
    #[must_use]
    pub fn during(&self, after: &Self) -> Self {
        let mut between = self.clone();
        for (path, nodes) in &after.possible {
            between.possible.entry(path.clone()).or_default().extend(nodes);
        }
        // The call may have changed the name, or the content.
        between.synced.retain(|path, _| after.synced.contains_key(path));
        between.synced_dirs.retain(|path| after.synced_dirs.contains(path));
        for (id, new) in &after.files {
            match between.files.get_mut(id) {
                Some(old) => {
                    let known = old.last() + 1;
                    old.versions
                        .extend_from_slice(&new.versions[known.max(new.first) - new.first..]);
                }
                None => drop(between.files.insert(*id, new.clone())),
            }
        }
        between
    }

    /// Judges what a mount has found after a crash.
    ///
    /// # Errors
    /// The first promise that was broken.
    pub fn judge(&self, found: &Found) -> Result<(), String> {
        for path in &self.synced_dirs {
            if !matches!(found.get(path), Some(None)) {
                return Err(format!("the synced directory {path} is gone"));
            }
        }
        for (path, id) in &self.synced {
            let Some(Some(data)) = found.get(path) else {
                return Err(format!("the synced file {path} is gone"));
            };
            self.files.get(id).map_or(Ok(()), |file| file.judge(path, data))?;
        }
        for (path, content) in found {
            let Some(nodes) = self.possible.get(path) else {
                return Err(format!("{path} is there, but was removed before the last sync"));
            };
            let Some(data) = content else {
                if nodes.contains(&Node::Dir) {
                    continue;
                }
                return Err(format!("{path} is a directory, which it never was"));
            };
            let files = nodes.iter().filter_map(|node| match node {
                Node::Dir => None,
                Node::File(id) => self.files.get(id),
            });
            let mut why = format!("{path} is a file, which it never was");
            let is_known = |file: &FileModel| file.judge(path, data).map_err(|it| why = it).is_ok();
            if !files.into_iter().any(is_known) {
                return Err(why);
            }
        }
        Ok(())
    }
}

/// Reads everything but `lost+found`.
///
/// # Errors
/// A file or directory that can't be read.
pub fn read_all(fs: &Fs, now: Time) -> Result<Found, FsError> {
    let mut found = Found::new();
    let mut todo = vec![(String::new(), Ino::ROOT)];
    while let Some((path, ino)) = todo.pop() {
        let mut items = Vec::new();
        fs.read_dir(ino, 0, &mut |item| {
            items.push((String::from_utf8_lossy(item.name).into_owned(), item.ino));
            ControlFlow::Continue(())
        })?;
        for (name, child) in items {
            if name == "." || name == ".." || name == "lost+found" {
                continue;
            }
            let path = format!("{path}/{name}");
            let attr = fs.attr(child)?;
            if attr.mode & file_type::MASK == file_type::DIRECTORY {
                todo.push((path.clone(), child));
                found.insert(path, None);
            } else {
                let mut data = vec![0; attr.size as usize];
                let len = fs.read(child, 0, &mut data, now)?;
                data.truncate(len);
                found.insert(path, Some(data));
            }
        }
    }
    Ok(found)
}
