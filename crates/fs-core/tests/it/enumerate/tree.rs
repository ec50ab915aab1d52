//! A file system as programs see it: all inodes with their names and content.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use riopipe_fs_core::format::inode::file_type;
use riopipe_fs_core::fs::{Caller, Fs};
use riopipe_fs_core::{BLOCK_BYTES, Block, FsError, Ino};
use riopipe_fs_testkit::hash::hash_of;

use super::NOW;

/// An inode: its number, and the generation, which differs between the uses of a number.
pub(crate) type Id = (u32, u32);

/// An inode as programs see it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Node {
    pub(crate) mode: u16,
    /// Its names, in order.
    pub(crate) paths: Vec<String>,
    pub(crate) size: u64,
    /// The hashes of its blocks; the last one is filled up with zeroes.
    pub(crate) blocks: Vec<u64>,
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub(crate) target: Vec<u8>,
}

impl Node {
    pub(crate) const fn is_file(&self) -> bool {
        self.mode & file_type::MASK == file_type::REGULAR
    }
}

pub(crate) type Tree = BTreeMap<Id, Node>;

/// The content of all blocks that were seen, by their hashes.
#[derive(Debug, Default)]
pub(crate) struct Contents(Mutex<HashMap<u64, Arc<Block>>>);

impl Contents {
    fn add(&self, block: &Block) -> u64 {
        let hash = hash_of(block);
        self.0.lock().unwrap().entry(hash).or_insert_with(|| Arc::new(*block));
        hash
    }

    pub(crate) fn get(&self, hash: u64) -> Arc<Block> {
        Arc::clone(&self.0.lock().unwrap()[&hash])
    }
}

/// Reads everything.
pub(crate) fn read_tree(fs: &Fs, contents: &Contents) -> Result<Tree, String> {
    let mut tree = Tree::new();
    let mut todo = vec![(String::new(), Ino::ROOT)];
    while let Some((path, ino)) = todo.pop() {
        let failed = |error: FsError| format!("reading {path}/: {error}");
        let mut items = Vec::new();
        fs.read_dir(ino, 0, &mut |item| {
            items.push((String::from_utf8_lossy(item.name).into_owned(), item.ino));
            ControlFlow::Continue(())
        })
        .map_err(failed)?;
        for (name, child) in items {
            if name == "." || name == ".." || name == "lost+found" {
                continue;
            }
            let path = format!("{path}/{name}");
            let node =
                read_node(fs, child, contents).map_err(|error| format!("{path}: {error}"))?;
            let (id, node) = node;
            if node.mode & file_type::MASK == file_type::DIRECTORY {
                todo.push((path.clone(), child));
            }
            let paths = &mut tree.entry(id).or_insert(node).paths;
            paths.push(path);
            paths.sort();
        }
    }
    Ok(tree)
}

fn read_node(fs: &Fs, ino: Ino, contents: &Contents) -> Result<(Id, Node), FsError> {
    let attr = fs.attr(ino)?;
    let mut node = Node { mode: attr.mode, ..Node::default() };
    match attr.mode & file_type::MASK {
        file_type::REGULAR => {
            let size = attr.size as usize;
            node.size = attr.size;
            let mut data = vec![0; size.next_multiple_of(BLOCK_BYTES)];
            fs.read(ino, 0, &mut data[..size], NOW)?;
            node.blocks = data.as_chunks().0.iter().map(|block| contents.add(block)).collect();
        }
        file_type::SYMLINK => node.target = fs.read_link(ino)?,
        _ => {}
    }
    let names = fs.list_xattr(&Caller::default(), ino)?;
    for name in names.split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        node.xattrs.push((name.to_vec(), fs.get_xattr(ino, name)?));
    }
    node.xattrs.sort();
    Ok(((ino.0, attr.generation), node))
}
