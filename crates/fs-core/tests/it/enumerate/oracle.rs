//! The judge of a tree after a crash: it knows all trees before, and the syncs.

use std::collections::BTreeMap;
use std::sync::Arc;

use riopipe_fs_core::BLOCK_BYTES;

use super::recorder::ZERO;
use super::setup::Setup;
use super::tree::{Contents, Id, Node, Tree};

/// The moment from which on each part of an inode must be as it was.
#[derive(Clone, Copy, Debug, Default)]
struct Since {
    names: usize,
    data: usize,
    fields: usize,
}

/// The trees after each call of a program, and what was synced when.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    setup: Setup,
    trees: Vec<Arc<Tree>>,
    /// Everything is durable as it was at this moment.
    all: usize,
    /// In modes without records: all names and fields are.
    committed: usize,
    since: BTreeMap<Id, Since>,
    barriers: Vec<(Id, usize)>,
    /// The directories that were synced, and when.
    dirs: Vec<(String, usize)>,
}

impl Expected {
    pub(crate) fn new(first: Tree, setup: Setup) -> Self {
        Self {
            setup,
            trees: vec![Arc::new(first)],
            all: 0,
            committed: 0,
            since: BTreeMap::new(),
            barriers: Vec::new(),
            dirs: Vec::new(),
        }
    }

    /// The trees of another moment, and the syncs of this one.
    pub(crate) fn with_trees_of(&self, other: &Self) -> Self {
        Self { trees: other.trees.clone(), ..self.clone() }
    }

    /// The tree after one more call.
    pub(crate) fn push(&mut self, tree: Tree) {
        self.trees.push(Arc::new(tree));
    }

    /// The last tree.
    pub(crate) fn tree(&self) -> &Tree {
        &self.trees[self.last()]
    }

    fn last(&self) -> usize {
        self.trees.len() - 1
    }

    /// All inodes of all trees.
    pub(crate) fn ids(&self) -> Vec<Id> {
        let mut ids: Vec<Id> = self.trees.iter().flat_map(|tree| tree.keys().copied()).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Everything was synced.
    pub(crate) fn sync(&mut self) {
        self.all = self.last();
    }

    /// Everything was synced as it was `before`.
    pub(crate) fn sync_as(&mut self, before: &Self) {
        self.all = self.all.max(before.last());
    }

    /// A file was synced; with `data_only` by `fdatasync`.
    pub(crate) fn fsync(&mut self, id: Id, data_only: bool, before: &Self) {
        let last = before.last();
        let born = self.trees.iter().position(|tree| tree.contains_key(&id)).unwrap_or(last);
        let since = self.since.entry(id).or_default();
        since.data = since.data.max(last);
        if data_only {
            since.names = since.names.max(born);
        } else {
            since.names = since.names.max(last);
            since.fields = since.fields.max(last);
        }
        self.sync_barriers(before);
        if !data_only {
            self.commit(last, |tree| tree.get(&id));
        }
    }

    /// Barriers are ordered before what is durable now.
    fn sync_barriers(&mut self, before: &Self) {
        for &(id, moment) in &before.barriers {
            Self::ordered(&mut self.since, id, moment);
        }
    }

    fn ordered(since: &mut BTreeMap<Id, Since>, id: Id, moment: usize) {
        let since = since.entry(id).or_default();
        since.data = since.data.max(moment);
        since.names = since.names.max(moment);
        since.fields = since.fields.max(moment);
    }

    /// Without records, a commit contains all that was done before. So when the last change of
    /// something is durable, all names and fields are as they were then, or later.
    fn commit<'t, T: PartialEq>(&'t mut self, last: usize, part: impl Fn(&'t Tree) -> T) {
        let trees = &self.trees[..=last];
        let changed = trees.windows(2).rposition(|pair| part(&pair[0]) != part(&pair[1]));
        self.committed = self.committed.max(changed.map_or(0, |before| before + 1));
    }

    /// A directory was synced: its fields, its own names, and all names that are or were in it.
    pub(crate) fn fsync_dir(&mut self, id: Id, path: &str, before: &Self) {
        let last = before.last();
        let since = self.since.entry(id).or_default();
        (since.names, since.fields) = (since.names.max(last), since.fields.max(last));
        let dir = format!("{path}/");
        self.sync_barriers(before);
        self.commit(last, |tree| {
            let names = |node| names_in(Some(node), &dir).len();
            let ids = tree.iter().filter(|(_, node)| names(node) > 0);
            (
                tree.get(&id),
                ids.map(|(&id, node)| (id, names_in(Some(node), &dir).join("/")))
                    .collect::<Vec<_>>(),
            )
        });
        self.dirs.push((dir, last));
    }

    /// A barrier of a file.
    pub(crate) fn barrier(&mut self, id: Id, before: &Self) {
        self.barriers.push((id, before.last()));
    }

    fn since(&self, id: Id) -> Since {
        let Since { names, data, fields } = self.since.get(&id).copied().unwrap_or_default();
        let all = self.all;
        Since { names: names.max(all), data: data.max(all), fields: fields.max(all) }
    }

    /// The syncs, with the barriers before anything that a sync has begun to make durable.
    fn with_barriers(&self, found: &Tree, contents: &Contents) -> Self {
        let mut with = self.clone();
        for &(id, moment) in &self.barriers {
            if self.is_newer(found, moment, contents) {
                Self::ordered(&mut with.since, id, moment);
            }
        }
        with
    }

    /// Whether something is there that was not there at or before a moment.
    fn is_newer(&self, found: &Tree, moment: usize, contents: &Contents) -> bool {
        let trees = &self.trees[..=moment];
        let is_new = |(id, node): (&Id, &Node)| {
            let versions: Vec<&Node> = trees.iter().filter_map(|tree| tree.get(id)).collect();
            let is_old = |other: &&Node| is_same_apart_from_data(other, node);
            !versions.iter().any(is_old) || judge_blocks(node, versions, contents).is_err()
        };
        let is_gone = |id: &Id| {
            let from = self.since(*id).names;
            let mut kept = trees.iter().skip(from);
            from <= moment && !found.contains_key(id) && kept.all(|tree| tree.contains_key(id))
        };
        found.iter().any(is_new) || self.ids().iter().any(is_gone)
    }

    /// The versions of an inode from a moment on; `None` for a moment at which it has no name.
    fn versions(&self, id: Id, from: usize) -> impl Iterator<Item = Option<&Node>> + Clone {
        self.trees[from.min(self.last())..].iter().map(move |tree| tree.get(&id))
    }

    /// Judges what a recovery has left.
    pub(crate) fn judge(&self, found: &Tree, contents: &Contents) -> Result<(), String> {
        match self.setup {
            // The background writes data back that a barrier is not ordered before.
            Setup::Background => self.judge_parts(found, contents),
            Setup::Lazy | Setup::Eager => {
                self.with_barriers(found, contents).judge_parts(found, contents)
            }
            Setup::Ext4 => {
                self.judge_commit(found)?;
                self.judge_parts(found, contents)
            }
            Setup::Barrier | Setup::Opimq => {
                let with = self.with_barriers(found, contents);
                with.judge_commit(found)?;
                with.judge_parts(found, contents)
            }
        }
    }

    /// Without records all names and fields are those of one moment.
    fn judge_commit(&self, found: &Tree) -> Result<(), String> {
        let is_same = |tree: &Arc<Tree>| {
            let mut both = tree.iter().zip(found);
            tree.len() == found.len()
                && both.all(|((id, node), (other, found))| {
                    id == other && is_same_apart_from_data(node, found)
                })
        };
        if self.trees[self.committed.max(self.all)..].iter().any(is_same) {
            return Ok(());
        }
        Err("all names and fields together are not those of one moment since the last commit"
            .into())
    }

    fn judge_parts(&self, found: &Tree, contents: &Contents) -> Result<(), String> {
        for (&id, node) in found {
            self.judge_node(id, node, contents)
                .map_err(|why| format!("inode {} ({}): {why}", id.0, node.paths.join(", ")))?;
        }
        for id in self.ids() {
            let is_needed = self.versions(id, self.since(id).names).all(|node| node.is_some());
            if is_needed && !found.contains_key(&id) {
                let version = self.versions(id, 0).flatten().last();
                let paths = version.map(|node| node.paths.join(", ")).unwrap_or_default();
                return Err(format!("inode {} ({paths}) is gone", id.0));
            }
            for (dir, from) in &self.dirs {
                let mut versions = self.versions(id, *from).map(|node| names_in(node, dir));
                let names = names_in(found.get(&id), dir);
                if !versions.any(|version| version == names) {
                    let names = names.join(", ");
                    return Err(format!("inode {} has the names {names} in {dir}", id.0));
                }
            }
        }
        Ok(())
    }

    fn judge_node(&self, id: Id, node: &Node, contents: &Contents) -> Result<(), String> {
        let since = self.since(id);
        let mut names = self.versions(id, since.names).flatten();
        let mut fields = self.versions(id, since.fields).flatten();
        let is_known =
            |version: &Node| version.paths == node.paths && version.target == node.target;
        if !names.any(is_known) {
            return Err("it did not have these names since the last sync of them".into());
        }
        if !fields.any(|version| version.xattrs == node.xattrs && version.mode == node.mode) {
            return Err("its attributes or mode are not those that were synced, or later".into());
        }
        if node.is_file() { self.judge_data(id, node, since.data, contents) } else { Ok(()) }
    }

    fn judge_data(
        &self,
        id: Id,
        node: &Node,
        since: usize,
        contents: &Contents,
    ) -> Result<(), String> {
        let versions = self.versions(id, since).flatten().collect();
        judge_blocks(node, versions, contents)?;
        for &(_, moment) in self.barriers.iter().filter(|(of, _)| *of == id) {
            let before = self.trees[..=moment].iter().filter_map(|tree| tree.get(&id));
            if !before.clone().any(|version| version.size == node.size) {
                let versions = self.versions(id, moment.max(since)).flatten().collect();
                judge_blocks(node, versions, contents)
                    .map_err(|why| format!("it has the size after a barrier, but {why}"))?;
            }
        }
        Ok(())
    }
}

fn is_same_apart_from_data(one: &Node, other: &Node) -> bool {
    (&one.paths, &one.target, &one.xattrs, one.mode)
        == (&other.paths, &other.target, &other.xattrs, other.mode)
}

/// The names of an inode in a directory.
fn names_in<'n>(node: Option<&'n Node>, dir: &str) -> Vec<&'n str> {
    let names = node.map_or(&[][..], |node| &node.paths);
    names
        .iter()
        .filter_map(|path| path.strip_prefix(dir))
        .filter(|name| !name.contains('/'))
        .collect()
}

/// Each block must be as one of the versions has it. Behind the end of a version there are zeroes:
/// its own end, and that of each later one up to the version whose size was found. What a truncate
/// has removed never comes back.
fn judge_blocks(node: &Node, versions: Vec<&Node>, contents: &Contents) -> Result<(), String> {
    let Some(found) = versions.iter().position(|version| version.size == node.size) else {
        return Err(format!("it has {} bytes, which it did not have", node.size));
    };
    let end_of = |number: usize| {
        let later = versions[number..=number.max(found)].iter();
        later.map(|version| version.size).min().unwrap_or(0) as usize
    };
    for (index, &hash) in node.blocks.iter().enumerate() {
        let start = index * BLOCK_BYTES;
        let block = contents.get(hash);
        let len = (node.size as usize - start).min(BLOCK_BYTES);
        let is_known = versions.iter().enumerate().any(|(number, version)| {
            let end = end_of(number).saturating_sub(start).min(len);
            let is_same = version
                .blocks
                .get(index)
                .is_none_or(|&other| other == hash || contents.get(other)[..end] == block[..end]);
            is_same && block[end..len] == ZERO[end..len]
        });
        if !is_known {
            let start = &block[..len.min(8)];
            return Err(format!("block {index} has a content that it did not have: {start:?}"));
        }
    }
    Ok(())
}
