//! Random operations on names and attributes, compared with a model: their results, their errors,
//! the links, the times. `RIOFS_SEED`, `RIOFS_SEEDS` and `RIOFS_STEPS` change the size of the test.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use riopipe_fs_core::acl::{Access, Acl, AclEntry, AclKind, Subject};
use riopipe_fs_core::format::inode::Time;
use riopipe_fs_core::fs::{
    Caller, Fs, MountOptions, NewInode, RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT, SetAttr,
};
use riopipe_fs_core::xattr::SetMode;
use riopipe_fs_core::{FsError, Ino};

use crate::calls::{Mounted, NOW, options, root};
use crate::enumerate::random::Random;
use crate::fsx::number;
use crate::memory::{Image, Memory, check_clean, image_of};

const BLOCKS: u64 = 32_768;
const DIR: u16 = 0o040_000;
const FILE: u16 = 0o100_000;
const LINK: u16 = 0o120_000;
const CHAR: u16 = 0o020_000;
const FIFO: u16 = 0o010_000;

type Id = usize;

#[derive(Clone, Debug, Default)]
struct Node {
    ino: Ino,
    mode: u16,
    links: u32,
    refs: u64,
    rdev: u32,
    /// Of a directory.
    entries: BTreeMap<Vec<u8>, Id>,
    parent: Id,
    /// Of a file or a symbolic link.
    content: Vec<u8>,
    attributes: BTreeMap<Vec<u8>, Vec<u8>>,
    mtime: Time,
    ctime: Time,
    crtime: Time,
}

impl Node {
    fn is_dir(&self) -> bool {
        self.mode & 0xf000 == DIR
    }
}

struct Test {
    memory: Arc<Memory>,
    fs: Fs,
    nodes: BTreeMap<Id, Node>,
    next: Id,
    now: Time,
    random: Random,
    mounts: u8,
}

const TOP: Id = 0;

impl Test {
    fn new(image: &Image, seed: u64) -> Self {
        let memory = Arc::new(Memory::new(image.clone(), BLOCKS, 3));
        let (fs, _) = Fs::mount(memory.clone(), options(), NOW).unwrap();
        fs.rmdir(&root(), Ino::ROOT, b"lost+found", NOW).unwrap();
        let attr = fs.attr(Ino::ROOT).unwrap();
        let top = Node {
            ino: Ino::ROOT,
            mode: attr.mode,
            links: 2,
            refs: 1,
            mtime: NOW,
            ctime: NOW,
            crtime: attr.times.crtime,
            ..Node::default()
        };
        let nodes = BTreeMap::from([(TOP, top)]);
        Self { memory, fs, nodes, next: 1, now: NOW, random: Random(seed), mounts: 0 }
    }

    fn pick(&mut self, wanted: impl Fn(&Node) -> bool) -> Id {
        let found: Vec<Id> =
            self.nodes.iter().filter(|(_, node)| wanted(node)).map(|(id, _)| *id).collect();
        // There is always the top.
        if found.is_empty() { TOP } else { found[self.random.below(found.len() as u64) as usize] }
    }

    /// Most often a directory, sometimes another inode or a removed one.
    fn dir(&mut self) -> Id {
        match self.random.below(20) {
            0 => self.pick(|_| true),
            _ => self.pick(|node| node.is_dir() && node.links > 0),
        }
    }

    fn name(&mut self) -> Vec<u8> {
        let n = self.random.below(14);
        let mut name = format!("name {n}").into_bytes();
        if n.is_multiple_of(3) {
            name.resize(255, b'x');
        }
        name
    }

    /// The error of any use of names in a directory.
    fn check_dir(&self, dir: Id) -> Result<&Node, FsError> {
        let node = &self.nodes[&dir];
        match (node.is_dir(), node.links) {
            (false, _) => Err(FsError::NotDirectory),
            (true, 0) => Err(FsError::NotFound),
            _ => Ok(node),
        }
    }

    fn entry(&self, dir: Id, name: &[u8]) -> Result<Option<Id>, FsError> {
        Ok(self.check_dir(dir)?.entries.get(name).copied())
    }

    fn node(&mut self, id: Id) -> &mut Node {
        self.nodes.get_mut(&id).unwrap()
    }

    fn touch(&mut self, dir: Id) {
        let now = self.now;
        let node = self.node(dir);
        (node.mtime, node.ctime) = (now, now);
    }

    fn changed(&mut self, id: Id) {
        let now = self.now;
        self.node(id).ctime = now;
    }

    /// A name of an inode is gone.
    fn unlinked(&mut self, id: Id) {
        self.changed(id);
        let node = self.node(id);
        node.links = if node.is_dir() { 0 } else { node.links - 1 };
        self.maybe_gone(id);
    }

    fn maybe_gone(&mut self, id: Id) {
        let Node { links, refs, ino, .. } = self.nodes[&id];
        if links == 0 && refs == 0 {
            self.nodes.remove(&id);
            assert_eq!(self.fs.attr(ino).map(|attr| attr.ino), Err(FsError::Stale(ino)));
        }
    }

    fn is_below(&self, mut id: Id, above: Id) -> bool {
        loop {
            if id == above {
                return true;
            }
            if id == TOP {
                return false;
            }
            id = self.nodes[&id].parent;
        }
    }

    fn step(&mut self) {
        self.now.seconds += 1;
        self.now.nanos = (self.now.nanos + 1) % 1_000_000_000;
        match self.random.below(100) {
            0..25 => self.create(),
            25..35 => self.unlink(),
            35..43 => self.rmdir(),
            43..48 => self.link(),
            48..65 => self.rename(),
            65..70 => self.lookup(),
            70..76 => self.forget(),
            76..82 => self.set_attr(),
            82..89 => self.attribute(),
            89..95 => self.content(),
            95..98 => self.sync(),
            98 => self.compare_all(),
            _ => self.remount(),
        }
    }

    fn create(&mut self) {
        let (dir, mut name) = (self.dir(), self.name());
        let mut expected = self.entry(dir, &name).and_then(|found| match found {
            Some(_) => Err(FsError::Exists),
            None => Ok(()),
        });
        if self.random.below(30) == 0 && expected.is_ok() {
            name = vec![b'y'; 256];
            expected = Err(FsError::NameTooLong);
        }
        let kind = [DIR, DIR, FILE, FILE, LINK, CHAR, FIFO][self.random.below(7) as usize];
        let target = vec![b't'; 1 + self.random.below(200) as usize];
        let rdev = if kind == CHAR { 0x0010_0503 + self.random.below(3) as u32 * 0x100 } else { 0 };
        let mode = kind | self.random.below(0o1000) as u16;
        let content = if kind == LINK { target } else { Vec::new() };
        let new = NewInode { mode, rdev, target: &content };
        let made = self.fs.create(&root(), self.nodes[&dir].ino, &name, &new, self.now);
        assert_eq!(made.as_ref().map(drop), expected.as_ref().map(drop), "create");
        let Ok(made) = made else { return };
        // A directory inherits the set-group-ID bit.
        let inherited = if kind == DIR { self.nodes[&dir].mode & 0o2000 } else { 0 };
        let mode = mode | inherited;
        let id = self.next;
        self.next += 1;
        let now = self.now;
        let node = Node {
            ino: made.ino,
            mode,
            links: if kind == DIR { 2 } else { 1 },
            refs: 1,
            rdev,
            parent: dir,
            content,
            mtime: now,
            ctime: now,
            crtime: now,
            ..Node::default()
        };
        self.nodes.insert(id, node);
        self.node(dir).entries.insert(name, id);
        self.node(dir).links += u32::from(kind == DIR);
        self.touch(dir);
        self.compare(id);
        self.compare(dir);
    }

    fn unlink(&mut self) {
        let (dir, name) = (self.dir(), self.name());
        let expected = self.entry(dir, &name).and_then(|found| match found {
            None => Err(FsError::NotFound),
            Some(id) if self.nodes[&id].is_dir() => Err(FsError::IsDirectory),
            Some(id) => Ok(id),
        });
        let done = self.fs.unlink(&root(), self.nodes[&dir].ino, &name, self.now);
        assert_eq!(done, expected.clone().map(drop), "unlink");
        if let Ok(id) = expected {
            self.node(dir).entries.remove(&name);
            self.touch(dir);
            self.unlinked(id);
            self.compare(dir);
        }
    }

    fn rmdir(&mut self) {
        let (dir, name) = (self.dir(), self.name());
        let expected = self.entry(dir, &name).and_then(|found| match found {
            None => Err(FsError::NotFound),
            Some(id) if !self.nodes[&id].is_dir() => Err(FsError::NotDirectory),
            Some(id) if !self.nodes[&id].entries.is_empty() => Err(FsError::NotEmpty),
            Some(id) => Ok(id),
        });
        let done = self.fs.rmdir(&root(), self.nodes[&dir].ino, &name, self.now);
        assert_eq!(done, expected.clone().map(drop), "rmdir");
        if let Ok(id) = expected {
            self.node(dir).entries.remove(&name);
            self.node(dir).links -= 1;
            self.touch(dir);
            self.unlinked(id);
            self.compare(dir);
        }
    }

    fn link(&mut self) {
        let (dir, name) = (self.dir(), self.name());
        let id = self.pick(|_| true);
        let node = &self.nodes[&id];
        let expected = self.entry(dir, &name).and_then(|found| {
            if found.is_some() {
                Err(FsError::Exists)
            } else if node.is_dir() {
                Err(FsError::NotPermitted)
            } else if node.links == 0 {
                Err(FsError::NotFound)
            } else {
                Ok(())
            }
        });
        if id == dir {
            return;
        }
        let done = self.fs.link(&root(), node.ino, self.nodes[&dir].ino, &name, self.now);
        assert_eq!(done.map(drop), expected, "link");
        if expected.is_ok() {
            self.node(dir).entries.insert(name, id);
            self.touch(dir);
            self.node(id).links += 1;
            self.node(id).refs += 1;
            self.changed(id);
            self.compare(id);
        }
    }

    /// The source and the target of a rename, as Linux checks them.
    fn check_rename(
        &self,
        (from, name): (Id, &[u8]),
        (to, new_name): (Id, &[u8]),
        flags: u32,
    ) -> Result<(Id, Option<Id>), FsError> {
        let exchange = flags & RENAME_EXCHANGE != 0;
        if exchange && flags != RENAME_EXCHANGE {
            return Err(FsError::Invalid);
        }
        self.check_dir(from)?;
        self.check_dir(to)?;
        let source = self.entry(from, name)?.ok_or(FsError::NotFound)?;
        let target = self.entry(to, new_name)?;
        if flags & RENAME_NOREPLACE != 0 && target.is_some() {
            return Err(FsError::Exists);
        }
        if exchange && target.is_none() {
            return Err(FsError::NotFound);
        }
        if self.is_below(to, source) {
            return Err(FsError::Invalid);
        }
        let Some(target) = target else { return Ok((source, None)) };
        if self.is_below(from, target) {
            return Err(if exchange { FsError::Invalid } else { FsError::NotEmpty });
        }
        let (old, new) = (&self.nodes[&source], &self.nodes[&target]);
        if !exchange && source != target {
            match (old.is_dir(), new.is_dir()) {
                (true, false) => return Err(FsError::NotDirectory),
                (false, true) => return Err(FsError::IsDirectory),
                (true, true) if !new.entries.is_empty() => return Err(FsError::NotEmpty),
                _ => {}
            }
        }
        Ok((source, Some(target)))
    }

    fn rename(&mut self) {
        let (from, name, to, new_name) = (self.dir(), self.name(), self.dir(), self.name());
        let flags = match self.random.below(12) {
            0..3 => RENAME_EXCHANGE,
            3 => RENAME_NOREPLACE,
            4 => RENAME_WHITEOUT,
            5 => RENAME_WHITEOUT | RENAME_NOREPLACE,
            6 => RENAME_EXCHANGE | RENAME_WHITEOUT,
            _ => 0,
        };
        let expected = self.check_rename((from, &name), (to, &new_name), flags);
        let (from_ino, to_ino) = (self.nodes[&from].ino, self.nodes[&to].ino);
        let done = self.fs.rename(&root(), from_ino, &name, to_ino, &new_name, flags, self.now);
        assert_eq!(done, expected.clone().map(drop), "rename with flags {flags}");
        let Ok((source, target)) = expected else { return };
        if target == Some(source) {
            return;
        }
        let moves = |test: &mut Self, id: Id, from: Id, to: Id| {
            if test.nodes[&id].is_dir() {
                test.node(from).links -= 1;
                test.node(to).links += 1;
                test.node(id).parent = to;
            }
        };
        self.node(from).entries.remove(&name);
        self.node(to).entries.insert(new_name, source);
        moves(self, source, from, to);
        self.touch(from);
        self.touch(to);
        self.changed(source);
        if let Some(target) = target {
            if flags & RENAME_EXCHANGE != 0 {
                self.node(from).entries.insert(name.clone(), target);
                moves(self, target, to, from);
                self.changed(target);
            } else {
                if self.nodes[&target].is_dir() {
                    self.node(to).links -= 1;
                }
                self.unlinked(target);
            }
        }
        if flags & RENAME_WHITEOUT != 0 {
            let made = self.fs.lookup(&root(), from_ino, &name).unwrap();
            let id = self.next;
            self.next += 1;
            let now = self.now;
            let times = (now, now, now);
            let node = Node {
                ino: made.ino,
                mode: CHAR,
                links: 1,
                refs: 1,
                parent: from,
                mtime: times.0,
                ctime: times.1,
                crtime: times.2,
                ..Node::default()
            };
            self.nodes.insert(id, node);
            self.node(from).entries.insert(name, id);
            self.compare(id);
        }
        self.compare(source);
        self.compare(from);
        self.compare(to);
    }

    fn lookup(&mut self) {
        let (dir, name) = (self.dir(), self.name());
        let expected = self.entry(dir, &name).and_then(|found| found.ok_or(FsError::NotFound));
        let found = self.fs.lookup(&root(), self.nodes[&dir].ino, &name);
        let expected_ino = expected.clone().map(|id| self.nodes[&id].ino);
        assert_eq!(found.map(|attr| attr.ino), expected_ino, "lookup");
        if let Ok(id) = expected {
            self.node(id).refs += 1;
        }
    }

    fn forget(&mut self) {
        let id = self.pick(|node| node.refs > 0);
        let Node { refs, ino, .. } = self.nodes[&id];
        if id != TOP {
            let count = 1 + self.random.below(refs);
            self.fs.forget(ino, count);
            self.node(id).refs -= count;
            self.maybe_gone(id);
        }
    }

    fn set_attr(&mut self) {
        let id = self.pick(|node| node.mode & 0xf000 != LINK);
        let mode = self.random.below(0o10000) as u16;
        let mtime = Time { seconds: 1000 + self.random.below(1 << 32) as i64, nanos: 7 };
        let sets_time = self.random.below(2) == 0;
        let set =
            SetAttr { mode: Some(mode), mtime: sets_time.then_some(mtime), ..SetAttr::default() };
        self.fs.set_attr(&root(), self.nodes[&id].ino, &set, self.now).unwrap();
        let node = self.node(id);
        node.mode = node.mode & 0xf000 | mode;
        if sets_time {
            node.mtime = mtime;
        }
        self.changed(id);
        self.compare(id);
    }

    fn attribute(&mut self) {
        let id = self.pick(|_| true);
        let name = format!("user.{}", self.random.below(5)).into_bytes();
        let len = [3, 40, 900][self.random.below(3) as usize];
        let value = vec![self.random.below(255) as u8; len];
        let ino = self.nodes[&id].ino;
        let has = self.nodes[&id].attributes.contains_key(&name);
        let how = [SetMode::Any, SetMode::Create, SetMode::Replace][self.random.below(3) as usize];
        let (done, expected) = if self.random.below(3) == 0 {
            let expected = if has { Ok(()) } else { Err(FsError::NoAttribute) };
            let done = self.fs.remove_xattr(&root(), ino, &name, self.now);
            if done.is_ok() {
                self.node(id).attributes.remove(&name);
            }
            (done, expected)
        } else {
            let expected = match (how, has) {
                (SetMode::Create, true) => Err(FsError::Exists),
                (SetMode::Replace, false) => Err(FsError::NoAttribute),
                _ => Ok(()),
            };
            let done = self.fs.set_xattr(&root(), ino, &name, &value, how, self.now);
            if done == Err(FsError::NoSpace) {
                // More than a block of attributes.
                return;
            }
            if done.is_ok() {
                self.node(id).attributes.insert(name, value);
            }
            (done, expected)
        };
        assert_eq!(done, expected, "an attribute");
        if done.is_ok() {
            self.changed(id);
            self.compare(id);
        }
    }

    fn content(&mut self) {
        let id = self.pick(|node| node.mode & 0xf000 == FILE || node.is_dir());
        let data = vec![self.random.below(255) as u8; self.random.below(9000) as usize + 1];
        let ino = self.nodes[&id].ino;
        let done = self.fs.write(&root(), ino, 100, &data, self.now);
        if self.nodes[&id].is_dir() {
            assert_eq!(done, Err(FsError::IsDirectory));
            return;
        }
        assert_eq!(done, Ok(data.len()));
        let content = &mut self.node(id).content;
        content.resize(content.len().max(100 + data.len()), 0);
        content[100..100 + data.len()].copy_from_slice(&data);
        self.touch(id);
        self.compare(id);
    }

    fn sync(&mut self) {
        match self.random.below(3) {
            0 => self.fs.sync(self.now).unwrap(),
            1 => {
                self.now.seconds += 10;
                self.fs.tick(self.now).unwrap();
            }
            _ => {
                let id = self.pick(|_| true);
                self.fs.fsync(self.nodes[&id].ino, false, self.now).unwrap();
            }
        }
    }

    fn compare(&self, id: Id) {
        let Some(node) = self.nodes.get(&id) else { return };
        let attr = self.fs.attr(node.ino).unwrap();
        let context = format!("inode {id}: {node:?}");
        assert_eq!(
            (attr.mode, attr.links, attr.rdev),
            (node.mode, node.links, node.rdev),
            "{context}"
        );
        let times = (attr.times.mtime, attr.times.ctime, attr.times.crtime);
        assert_eq!(times, (node.mtime, node.ctime, node.crtime), "{context}");
        if !node.is_dir() {
            assert_eq!(attr.size, node.content.len() as u64, "{context}");
        }
    }

    /// Compares everything about all inodes.
    fn compare_all(&mut self) {
        for (id, node) in &self.nodes {
            self.compare(*id);
            let ino = node.ino;
            let mut names: Vec<&[u8]> = node.attributes.keys().map(Vec::as_slice).collect();
            let list = self.fs.list_xattr(&root(), ino).unwrap();
            let mut listed: Vec<&[u8]> =
                list.split(|byte| *byte == 0).filter(|name| !name.is_empty()).collect();
            names.sort_unstable();
            listed.sort_unstable();
            assert_eq!(listed, names);
            for (name, value) in &node.attributes {
                assert_eq!(self.fs.get_xattr(ino, name).as_ref(), Ok(value));
            }
            match node.mode & 0xf000 {
                DIR if node.links > 0 => {
                    let mut found = BTreeMap::new();
                    self.fs
                        .read_dir(ino, 0, &mut |item| {
                            found.insert(item.name.to_vec(), item.ino);
                            ControlFlow::Continue(())
                        })
                        .unwrap();
                    assert_eq!(found.remove(&b"."[..]), Some(ino));
                    assert_eq!(found.remove(&b".."[..]), Some(self.nodes[&node.parent].ino));
                    let inos = |(name, id): (&Vec<u8>, &Id)| (name.clone(), self.nodes[id].ino);
                    assert_eq!(found, node.entries.iter().map(inos).collect());
                }
                LINK => assert_eq!(self.fs.read_link(ino).as_ref(), Ok(&node.content)),
                FILE => {
                    let mut data = vec![0; node.content.len() + 1];
                    let len = self.fs.read(ino, 0, &mut data, self.now).unwrap();
                    assert!(data[..len] == node.content, "the content of inode {ino}");
                }
                _ => {}
            }
        }
    }

    fn remount(&mut self) {
        self.fs.unmount(self.now).unwrap();
        check_clean(&self.memory.image(), BLOCKS);
        self.mounts += 1;
        let mut options = options();
        options.epoch.0[0] = self.mounts;
        self.memory = Arc::new(Memory::new(self.memory.image(), BLOCKS, 3));
        (self.fs, _) = Fs::mount(self.memory.clone(), options, self.now).unwrap();
        self.nodes.retain(|_, node| node.links > 0);
        for (id, node) in &mut self.nodes {
            node.refs = u64::from(*id == TOP);
        }
        self.compare_all();
    }
}

#[test]
fn names_and_attributes_are_those_of_the_model() {
    let image = image_of(BLOCKS, &["-N", "4000"]);
    let first = number("RIOFS_SEED", 1);
    for seed in first..first + number("RIOFS_SEEDS", 3) {
        println!("seed {seed}");
        let mut test = Test::new(&image, seed);
        for _ in 0..number("RIOFS_STEPS", 1500) {
            test.step();
        }
        test.compare_all();
        test.remount();
    }
}

#[test]
fn a_read_only_file_system_refuses_every_change() {
    let mut test = Test::new(&image_of(BLOCKS, &[]), 7);
    for _ in 0..300 {
        test.step();
    }
    test.fs.unmount(test.now).unwrap();
    let image = test.memory.image();
    let mut options: MountOptions = options();
    options.read_only = true;
    let memory = Arc::new(Memory::new(image.clone(), BLOCKS, 3));
    memory.fail_after(0);
    let (fs, _) = Fs::mount(memory, options, test.now).unwrap();
    let caller = root();
    let now = test.now;
    let refused = |result: Result<(), FsError>| assert_eq!(result, Err(FsError::ReadOnly));
    let new = NewInode { mode: FILE | 0o644, rdev: 0, target: b"" };
    refused(fs.create(&caller, Ino::ROOT, b"new", &new, now).map(drop));
    let (top, file) = (test.nodes[&TOP].clone(), test.pick(|node| node.mode & 0xf000 == FILE));
    let (name, id) = top.entries.iter().next().unwrap();
    refused(fs.rename(&caller, Ino::ROOT, name, Ino::ROOT, b"new", 0, now));
    refused(if test.nodes[id].is_dir() {
        fs.set_attr(&caller, test.nodes[id].ino, &SetAttr::default(), now).map(drop)
    } else {
        fs.unlink(&caller, Ino::ROOT, name, now)
    });
    let ino = test.nodes[&file].ino;
    refused(fs.write(&caller, ino, 0, b"data", now).map(drop));
    refused(fs.link(&caller, ino, Ino::ROOT, b"new", now).map(drop));
    refused(fs.set_xattr(&caller, ino, b"user.x", b"", SetMode::Any, now));
    refused(fs.fallocate(ino, 0, 0, 1, now));
    let size = SetAttr { size: Some(1), ..SetAttr::default() };
    refused(fs.set_attr(&caller, ino, &size, now).map(drop));
    fs.sync(now).unwrap();
    fs.fsync(ino, false, now).unwrap();
    fs.tick(now).unwrap();
    test.fs = fs;
    test.nodes.retain(|_, node| node.links > 0);
    test.compare_all();
    test.fs.unmount(now).unwrap();
}

/// The user-space form of an access control list.
fn acl(entries: &[(Subject, Access)]) -> Vec<u8> {
    let entry = |&(subject, access)| AclEntry { subject, access };
    Acl::new(entries.iter().map(entry).collect()).unwrap().to_user()
}

const RWX: Access = Access::all();
const RX: Access = Access::READ.union(Access::EXECUTE);
const RW: Access = Access::READ.union(Access::WRITE);

#[test]
fn new_files_inherit_the_default_access_control_list() {
    let m = Mounted::new(BLOCKS, &[]);
    let fs = &m.fs;
    let caller = Caller { uid: 7, gid: 70, umask: 0o077, ..root() };
    let make = |parent, name: &[u8], mode, target: &[u8]| {
        fs.create(&caller, parent, name, &NewInode { mode, rdev: 0, target }, NOW).unwrap()
    };
    let get = |ino, kind: AclKind| fs.get_xattr(ino, kind.name());
    let none = Err(FsError::NoAttribute);
    let plain = make(Ino::ROOT, b"plain", FILE | 0o666, b"");
    assert_eq!(plain.mode, FILE | 0o600, "the umask");
    let d = make(Ino::ROOT, b"dir", DIR | 0o777, b"");
    assert_eq!(d.mode, DIR | 0o700);
    let default = acl(&[
        (Subject::Owner, RWX),
        (Subject::User(1000), RWX),
        (Subject::OwningGroup, RX),
        (Subject::Mask, RWX),
        (Subject::Other, Access::READ),
    ]);
    let set = |ino, kind: AclKind, value: &[u8]| {
        fs.set_xattr(&caller, ino, kind.name(), value, SetMode::Any, NOW)
    };
    set(d.ino, AclKind::Default, &default).unwrap();
    assert_eq!(set(plain.ino, AclKind::Default, &default), Err(FsError::Access));

    // The umask does not count; the mode that the program wants limits owner, mask and others.
    let f = make(d.ino, b"file", FILE | 0o662, b"");
    assert_eq!(f.mode, FILE | 0o660);
    let inherited = acl(&[
        (Subject::Owner, RW),
        (Subject::User(1000), RWX),
        (Subject::OwningGroup, RX),
        (Subject::Mask, RW),
        (Subject::Other, Access::empty()),
    ]);
    assert_eq!(get(f.ino, AclKind::Access), Ok(inherited));
    assert_eq!(get(f.ino, AclKind::Default), none);
    let sub = make(d.ino, b"sub", DIR | 0o777, b"");
    assert_eq!(sub.mode, DIR | 0o774);
    assert_eq!(get(sub.ino, AclKind::Access), Ok(default.clone()));
    assert_eq!(get(sub.ino, AclKind::Default), Ok(default));
    let link = make(d.ino, b"link", LINK | 0o777, b"target");
    assert_eq!((link.mode, get(link.ino, AclKind::Access)), (LINK | 0o777, none.clone()));

    // chmod changes the mask, and the list that getfacl shows.
    let mode = SetAttr { mode: Some(0o4751), ..SetAttr::default() };
    assert_eq!(fs.set_attr(&caller, f.ino, &mode, NOW).unwrap().mode, FILE | 0o4751);
    let changed = acl(&[
        (Subject::Owner, RWX),
        (Subject::User(1000), RWX),
        (Subject::OwningGroup, RX),
        (Subject::Mask, RX),
        (Subject::Other, Access::EXECUTE),
    ]);
    assert_eq!(get(f.ino, AclKind::Access), Ok(changed));

    // A list that the mode expresses is not stored.
    let simple = acl(&[
        (Subject::Owner, RW),
        (Subject::OwningGroup, Access::READ),
        (Subject::Other, Access::READ),
    ]);
    let e = make(Ino::ROOT, b"simple", DIR | 0o777, b"");
    set(e.ino, AclKind::Default, &simple).unwrap();
    let f = make(e.ino, b"file", FILE | 0o666, b"");
    assert_eq!((f.mode, get(f.ino, AclKind::Access)), (FILE | 0o644, none));

    // A list with many entries needs a block of its own.
    let mut many = vec![(Subject::Owner, RWX)];
    many.extend((0..60).map(|user| (Subject::User(user), RX)));
    many.extend([(Subject::OwningGroup, RX), (Subject::Mask, RWX), (Subject::Other, RX)]);
    let many = acl(&many);
    set(d.ino, AclKind::Default, &many).unwrap();
    let sub = make(d.ino, b"many", DIR | 0o777, b"");
    assert_eq!(get(sub.ino, AclKind::Default), Ok(many));
    let f = make(sub.ino, b"file", FILE | 0o640, b"");
    fs.set_attr(&caller, f.ino, &mode, NOW).unwrap();
    fs.fsync(f.ino, false, NOW).unwrap();
    let value = get(f.ino, AclKind::Access).unwrap();
    let crashed = Mounted::of(m.memory.crash(&mut |_| 0), BLOCKS);
    assert_eq!(crashed.fs.get_xattr(f.ino, AclKind::Access.name()), Ok(value));
    crashed.check();
    fs.unlink(&caller, sub.ino, b"file", NOW).unwrap();
    m.check();
}

#[test]
fn set_group_id_needs_the_group() {
    let m = Mounted::new(BLOCKS, &[]);
    let fs = &m.fs;
    let new = |mode| NewInode { mode, rdev: 0, target: b"" };
    let d = fs.create(&root(), Ino::ROOT, b"dir", &new(DIR | 0o2777), NOW).unwrap();
    let set = SetAttr { gid: Some(50), ..SetAttr::default() };
    assert_eq!(fs.set_attr(&root(), d.ino, &set, NOW).unwrap().mode, DIR | 0o2777);
    let (member, other) = (
        Caller { uid: 1, gid: 9, groups: vec![50], ..root() },
        Caller { uid: 1, gid: 9, ..root() },
    );
    let mode = SetAttr { mode: Some(0o2755), ..SetAttr::default() };
    for (caller, name, expected) in [(member, b"a", 0o2755), (other, b"b", 0o755)] {
        let f = fs.create(&caller, d.ino, name, &new(FILE | 0o2755), NOW).unwrap();
        assert_eq!((f.gid, f.mode), (50, FILE | expected));
        assert_eq!(fs.set_attr(&caller, f.ino, &mode, NOW).unwrap().mode, FILE | expected);
        // A write by another user than root removes the bits.
        fs.write(&caller, f.ino, 0, b"data", NOW).unwrap();
        assert_eq!(fs.attr(f.ino).unwrap().mode, FILE | 0o755);
    }
    m.check();
}
