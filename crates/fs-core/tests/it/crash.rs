//! Crashes: random programs are cut anywhere, in any state that the storage promises. Then the file
//! system is mounted again, and judged: by e2fsck, and by a model of what was synced.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use riopipe_fs_core::fs::{Fs, JournalMode, MountOptions, SetAttr};
use riopipe_fs_core::{BLOCK_BYTES, FsError, Ino};

use crate::calls::{NOW, dir, file, options, root};
use crate::enumerate::random::Random;
use crate::memory::{Image, Memory, check_clean, image_of};

type Path = String;

/// A file as the program knows it.
#[derive(Clone, Debug, Default)]
struct FileModel {
    /// Its contents since the last sync of it, the synced one first. The last one is the current.
    versions: Vec<Vec<u8>>,
    /// Whether its path has changed since that was synced. `fdatasync` does not sync it.
    is_moved: bool,
}

#[derive(Clone, Debug)]
enum Node {
    Dir,
    File(u64),
}

/// The tree as the program sees it, and what must be there after a crash.
#[derive(Clone, Debug, Default)]
struct Model {
    tree: BTreeMap<Path, Node>,
    files: BTreeMap<u64, FileModel>,
    next: u64,
    /// Paths that must lead to these files after a crash: they were synced there, and no name on
    /// the way was changed since.
    synced: BTreeMap<Path, u64>,
    /// Directories that must be there.
    synced_dirs: BTreeSet<Path>,
    /// Paths that may be there, besides the tree: they have existed since the last sync.
    possible: BTreeSet<Path>,
}

impl Model {
    fn forget_under(&mut self, path: &str) {
        let below = format!("{path}/");
        let is_in = |other: &str| other == path || other.starts_with(&below);
        self.synced.retain(|other, _| !is_in(other));
        self.synced_dirs.retain(|other| !is_in(other));
    }

    fn dirs(&self) -> Vec<Path> {
        let dirs = self.tree.iter().filter(|(_, node)| matches!(node, Node::Dir));
        std::iter::once(String::new()).chain(dirs.map(|(path, _)| path.clone())).collect()
    }

    fn sync_all(&mut self) {
        self.synced.clear();
        self.synced_dirs.clear();
        self.possible.clear();
        for (path, node) in &self.tree {
            self.possible.insert(path.clone());
            match node {
                Node::Dir => drop(self.synced_dirs.insert(path.clone())),
                Node::File(id) => drop(self.synced.insert(path.clone(), *id)),
            }
        }
        for file in self.files.values_mut() {
            file.is_moved = false;
            file.versions.drain(..file.versions.len() - 1);
        }
    }

    fn sync_file(&mut self, path: &str, id: u64, data_only: bool) {
        let file = self.files.get_mut(&id).unwrap();
        if data_only && file.is_moved {
            // Its data is durable, under a path that this model does not know.
            return;
        }
        file.is_moved = false;
        file.versions.drain(..file.versions.len() - 1);
        self.synced.insert(path.to_owned(), id);
        let mut above = path;
        while let Some((parent, _)) =
            above.rsplit_once('/').filter(|(parent, _)| !parent.is_empty())
        {
            self.synced_dirs.insert(parent.to_owned());
            above = parent;
        }
    }
}

fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap()
}

fn resolve(fs: &Fs, path: &str) -> Result<Ino, FsError> {
    let mut ino = Ino::ROOT;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        ino = fs.lookup(&root(), ino, name.as_bytes())?.ino;
    }
    Ok(ino)
}

/// One step of a random program.
fn step(fs: &Fs, model: &mut Model, random: &mut Random) {
    let dirs = model.dirs();
    let parent = dirs[random.below(dirs.len() as u64) as usize].clone();
    let name = ["a", "b", "c", "d", "e"][random.below(5) as usize];
    let path = format!("{parent}/{name}");
    let parent_ino = resolve(fs, &parent).unwrap();
    let node = model.tree.get(&path).cloned();
    let caller = root();
    let what = random.below(20);
    // Shown when the test fails.
    println!("{what} {path} {node:?}");
    match (what, node) {
        (0..=3, None) => {
            fs.create(&caller, parent_ino, name.as_bytes(), &file(0o644), NOW).unwrap();
            model.next += 1;
            let id = model.next;
            model.files.insert(id, FileModel { versions: vec![Vec::new()], is_moved: false });
            model.possible.insert(path.clone());
            model.tree.insert(path, Node::File(id));
        }
        (4, None) if parent.len() < 6 => {
            fs.create(&caller, parent_ino, name.as_bytes(), &dir(0o755), NOW).unwrap();
            model.possible.insert(path.clone());
            model.tree.insert(path, Node::Dir);
        }
        (0..=7, Some(Node::File(id))) => {
            let ino = resolve(fs, &path).unwrap();
            let file = model.files.get_mut(&id).unwrap();
            let mut content = file.versions.last().unwrap().clone();
            let at = match random.below(3) {
                0 => content.len(),
                1 => random.below(content.len() as u64 + 1) as usize,
                _ => random.below(20_000) as usize,
            };
            let len = [1, 100, 4096, 9000][random.below(4) as usize];
            let byte = 1 + random.below(255) as u8;
            content.resize(content.len().max(at + len), 0);
            content[at..at + len].fill(byte);
            fs.write(&caller, ino, at as u64, &content[at..at + len], NOW).unwrap();
            file.versions.push(content);
        }
        (8, Some(Node::File(id))) => {
            let ino = resolve(fs, &path).unwrap();
            let file = model.files.get_mut(&id).unwrap();
            let mut content = file.versions.last().unwrap().clone();
            let size = random.below(20_000);
            content.resize(size as usize, 0);
            let set = SetAttr { size: Some(size), ..SetAttr::default() };
            fs.set_attr(&caller, ino, &set, NOW).unwrap();
            file.versions.push(content);
        }
        (9..=13, Some(Node::File(id))) => {
            let ino = resolve(fs, &path).unwrap();
            let data_only = random.below(2) == 0;
            fs.fsync(ino, data_only, NOW).unwrap();
            model.sync_file(&path, id, data_only);
        }
        (14, Some(Node::File(_))) => {
            fs.unlink(&caller, parent_ino, name.as_bytes(), NOW).unwrap();
            model.tree.remove(&path);
            model.forget_under(&path);
        }
        (14, Some(Node::Dir)) => {
            let below = format!("{path}/");
            let is_empty = !model.tree.keys().any(|other| other.starts_with(&below));
            let result = fs.rmdir(&caller, parent_ino, name.as_bytes(), NOW);
            assert_eq!(result, if is_empty { Ok(()) } else { Err(FsError::NotEmpty) });
            if is_empty {
                model.tree.remove(&path);
                model.forget_under(&path);
            }
        }
        (15 | 16, Some(source)) => {
            let to_parent = dirs[random.below(dirs.len() as u64) as usize].clone();
            let to = format!("{to_parent}/{}", ["a", "b", "x"][random.below(3) as usize]);
            let below = format!("{path}/");
            if to == path || to_parent == path || to_parent.starts_with(&below) {
                return;
            }
            let is_dir = matches!(source, Node::Dir);
            match model.tree.get(&to) {
                Some(Node::Dir) => return,
                Some(Node::File(_)) if is_dir => return,
                _ => {}
            }
            let (_, new_name) = split(&to);
            let to_ino = resolve(fs, &to_parent).unwrap();
            fs.rename(&caller, parent_ino, name.as_bytes(), to_ino, new_name.as_bytes(), 0, NOW)
                .unwrap();
            model.forget_under(&path);
            model.forget_under(&to);
            let moved: Vec<_> = model
                .tree
                .iter()
                .filter(|(other, _)| **other == path || other.starts_with(&below))
                .map(|(other, node)| (other.clone(), node.clone()))
                .collect();
            for (old, node) in moved {
                if let Node::File(id) = node {
                    model.files.get_mut(&id).unwrap().is_moved = true;
                }
                model.tree.remove(&old);
                let new = format!("{to}{}", &old[path.len()..]);
                model.possible.insert(new.clone());
                model.tree.insert(new, node);
            }
        }
        (17, _) => {
            fs.sync(NOW).unwrap();
            model.sync_all();
        }
        (18, _) => drop(fs.tick(NOW).unwrap()),
        _ => {}
    }
}

/// Judges a file system after a crash.
fn judge(fs: &Fs, model: &Model) -> Result<(), String> {
    let mut found = BTreeMap::new();
    let mut todo = vec![(String::new(), Ino::ROOT)];
    while let Some((path, ino)) = todo.pop() {
        let mut items = Vec::new();
        fs.read_dir(ino, 0, &mut |item| {
            items.push((String::from_utf8(item.name.to_vec()).unwrap(), item.ino));
            ControlFlow::Continue(())
        })
        .map_err(|error| format!("reading {path}: {error}"))?;
        for (name, child) in items {
            if name == "." || name == ".." || name == "lost+found" {
                continue;
            }
            let path = format!("{path}/{name}");
            let attr = fs.attr(child).map_err(|error| format!("{path}: {error}"))?;
            if attr.mode & 0xf000 == 0x4000 {
                todo.push((path.clone(), child));
                found.insert(path, None);
            } else {
                let mut data = vec![0; attr.size as usize];
                let len = fs.read(child, 0, &mut data, NOW).map_err(|error| error.to_string())?;
                if len != data.len() {
                    return Err(format!("{path}: {len} bytes of {}", data.len()));
                }
                found.insert(path, Some(data));
            }
        }
    }
    for path in found.keys() {
        if !model.possible.contains(path) {
            return Err(format!("{path} is there, but was removed before the last sync"));
        }
    }
    for path in &model.synced_dirs {
        if !found.contains_key(path) {
            return Err(format!("the synced directory {path} is gone"));
        }
    }
    for (path, id) in &model.synced {
        let Some(Some(data)) = found.get(path) else {
            return Err(format!("the synced file {path} is gone"));
        };
        let versions = &model.files[id].versions;
        if !versions.iter().any(|version| version.len() == data.len()) {
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
            let is_known = versions.iter().any(had);
            if !is_known {
                return Err(format!("block {index} of {path} has content that it never had"));
            }
        }
    }
    Ok(())
}

/// A crash state, and what must be there.
struct Cut {
    image: Image,
    model: Model,
    step: usize,
}

const BLOCKS: u64 = 65_536;

fn run(seed: u64, image: &Image, steps: usize, mount: &MountOptions) -> u64 {
    let mut random = Random(seed);
    let memory = Arc::new(Memory::new(image.clone(), BLOCKS, 3));
    let (fs, _) = Fs::mount(memory.clone(), mount.clone(), NOW).unwrap();
    let mut model = Model::default();
    let mut cuts: Vec<Cut> = Vec::new();
    for number in 0..steps {
        let before = model.clone();
        let mut seeds = Random(random.below(u64::MAX));
        // States in the middle of a step are judged by what was synced before it.
        memory.record_cuts(2, seeds.below(u64::MAX));
        step(&fs, &mut model, &mut random);
        let mut between = before;
        between.possible.extend(model.possible.iter().cloned());
        for (path, id) in between.synced.clone() {
            // The step may have changed the name or the content.
            if !model.synced.contains_key(&path) {
                between.synced.remove(&path);
            } else if let (Some(old), Some(new)) =
                (between.files.get_mut(&id), model.files.get(&id))
            {
                old.versions.extend(new.versions.iter().cloned());
            }
        }
        between.synced_dirs.retain(|path| model.synced_dirs.contains(path));
        for image in memory.take_cuts() {
            cuts.push(Cut { image, model: between.clone(), step: number });
        }
        if random.below(4) == 0 {
            let image = memory.crash(&mut |n| seeds.below(n));
            cuts.push(Cut { image, model: model.clone(), step: number });
        }
    }
    let judged = cuts.len() as u64;
    for (number, cut) in cuts.into_iter().enumerate() {
        let memory = Arc::new(Memory::new(cut.image.clone(), BLOCKS, 3));
        let context = format!("seed {seed}, step {}, cut {number}", cut.step);
        let fail = |why: String| {
            let kept = std::env::temp_dir().join("riofs-cut.img");
            cut.image.save(&kept, BLOCKS);
            panic!("{context}: {why} (the image: {})", kept.display());
        };
        let mut options = mount.clone();
        options.epoch.0[0] ^= 0xff;
        let (fs, report) = match Fs::mount(memory.clone(), options, NOW) {
            Ok(mounted) => mounted,
            Err(error) => return fail(format!("mount: {error}")),
        };
        if let Err(why) = judge(&fs, &cut.model) {
            return fail(format!("{why}, after {report:?}"));
        }
        if let Err(error) = fs.unmount(NOW) {
            return fail(format!("unmount: {error}"));
        }
        // e2fsck takes most of the time.
        if number % 8 == 0 {
            check_clean(&memory.image(), BLOCKS);
        }
    }
    judged
}

#[test]
fn what_was_synced_is_there_after_any_crash() {
    run_seeds(JournalMode::Rio);
}

#[test]
fn what_was_synced_is_there_after_any_crash_in_mode_ext4() {
    run_seeds(JournalMode::Ext4);
}

fn run_seeds(mode: JournalMode) {
    let image = image_of(BLOCKS, &[]);
    let first = std::env::var("RIOFS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let seeds = std::env::var("RIOFS_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(6);
    let mut judged = 0;
    for seed in first..first + seeds {
        judged += run(seed, &image, 60, &MountOptions { mode, ..options() });
    }
    println!("{judged} states");
    assert!(judged > 0);
}
