//! Extent trees of images: those that mke2fs made are read, and those that this crate made pass
//! e2fsck.

use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;

use riopipe_fs_core::extents::{
    Budget, END, Extent, Run, blocks_of_tree, for_each, insert, lookup, mark_unwritten,
    mark_written, remove, remove_some, replace, shift,
};
use riopipe_fs_core::{BLOCK_BYTES, BlockNo, Ino};

use crate::edit::Edit;
use crate::image::Image;

/// Options of mke2fs with and without checksums.
pub(crate) const OPTIONS: [&[&str]; 3] =
    [&[], &["-O", "^metadata_csum,uninit_bg"], &["-O", "metadata_csum_seed,^64bit"]];

/// The inode number of a path.
pub(crate) fn ino_of(image: &Image, path: &str) -> Ino {
    let text = image.debugfs(&format!("stat {path}\n"));
    let number = text.split("Inode: ").nth(1).expect("an inode").split_whitespace().next();
    Ino(number.expect("a number").parse().expect("a number"))
}

/// An image with an empty file.
fn with_file(options: &[&str]) -> (Image, Ino) {
    let image = Image::new(64, options);
    let source = image.dir().join("empty");
    File::create(&source).expect("a file");
    image.debugfs(&format!("write {} file\n", source.display()));
    let ino = ino_of(&image, "file");
    (image, ino)
}

fn extents_of(edit: &Edit<'_>, ino: Ino) -> Vec<Extent> {
    let mut all = Vec::new();
    let flow = for_each(ino, &edit.inode(ino), edit, 0..END, &mut |extent| {
        all.push(extent);
        ControlFlow::Continue(())
    });
    assert_eq!(flow, Ok(ControlFlow::Continue(())));
    all
}

#[test]
fn sparse_files_of_mke2fs_are_read() {
    let scratch = tempfile::TempDir::new().expect("a directory");
    let tree = scratch.path().join("tree");
    std::fs::create_dir(&tree).expect("a directory");
    // The number of pieces decides on the depth: 0, 1, 1.
    let files = [("few", 3), ("many", 300), ("more", 1300)];
    for (name, pieces) in files {
        let file = File::create(tree.join(name)).expect("a file");
        for i in 0..pieces {
            let block = [(i % 251) as u8 + 1; BLOCK_BYTES];
            file.write_all_at(&block, 3 * i * BLOCK_BYTES as u64).expect("written");
        }
    }
    for options in OPTIONS {
        let tree = tree.to_str().expect("a plain path");
        let image = Image::new(64, &[options, &["-d", tree][..]].concat());
        for (name, pieces) in files {
            let ino = ino_of(&image, name);
            let edit = Edit::new(&image);
            let extents = extents_of(&edit, ino);
            assert_eq!(extents.len() as u64, pieces);
            for (i, extent) in (0..).zip(extents) {
                assert_eq!((extent.logical, extent.len, extent.unwritten), (3 * i, 1, false));
                assert_eq!(image.read(extent.physical)[7], (i % 251) as u8 + 1);
                let disk = edit.inode(ino);
                let run = lookup(ino, &disk, &edit, 3 * i);
                assert_eq!(run, Ok(Run::Mapped(extent)));
                let run = lookup(ino, &disk, &edit, 3 * i + 2);
                let hole = if u64::from(i) + 1 < pieces { 1 } else { u32::MAX - 3 * i - 2 };
                assert_eq!(run, Ok(Run::Hole { logical: 3 * i + 2, len: hole }));
            }
            let mut nodes = 0;
            let _ = blocks_of_tree(ino, &edit.inode(ino), &edit, &mut |_| {
                nodes += 1;
                ControlFlow::Continue(())
            });
            assert_eq!(edit.inode(ino).sectors, 8 * (pieces + nodes));
        }
    }
}

#[test]
fn unwritten_extents_of_debugfs_are_read() {
    let (image, ino) = with_file(&[]);
    image.debugfs("fallocate file 10 19\n");
    let edit = Edit::new(&image);
    let extents = extents_of(&edit, ino);
    assert!(extents.iter().all(|extent| extent.unwritten));
    assert_eq!(extents.iter().map(|extent| extent.len).sum::<u32>(), 10);
}

/// e2fsck finds nothing, and debugfs counts the same blocks.
fn judge(image: &Image, ino: Ino) {
    image.assert_clean();
    let edit = Edit::new(image);
    let listed = image.debugfs(&format!("blocks <{ino}>\n"));
    let blocks = listed.lines().nth(1).expect("a line").split_whitespace().count() as u64;
    assert_eq!(blocks * 8, edit.inode(ino).sectors, "{listed}");
}

#[test]
fn trees_of_all_shapes_pass_e2fsck() {
    for options in OPTIONS {
        let (image, ino) = with_file(options);
        let step =
            |change: &dyn Fn(&mut riopipe_fs_core::open_inode::OpenInode<'_>, &mut Edit<'_>)| {
                let mut edit = Edit::new(&image);
                edit.change(ino, |inode, edit| {
                    change(inode, edit);
                    let mut end = 0;
                    let _ = for_each(inode.ino, inode.disk, edit, 0..END, &mut |extent| {
                        end = extent.end();
                        ControlFlow::Continue(())
                    });
                    inode.disk.size = end * BLOCK_BYTES as u64;
                });
                edit.finish();
                judge(&image, ino);
            };
        // From depth 0 to 1 and 2.
        for count in [1, 4, 5, 900, 1600] {
            step(&|inode, edit| {
                let first = match inode.disk.size / BLOCK_BYTES as u64 {
                    0 => 1,
                    end => end as u32 + 2,
                };
                for i in 0..count {
                    let extent = Extent {
                        logical: first + 3 * i,
                        len: 1,
                        physical: edit.data(1),
                        unwritten: i % 2 == 0,
                    };
                    insert(inode, edit, extent).expect("there is space");
                }
            });
        }
        // Every third block, then those between.
        step(&|inode, edit| {
            for i in 0..800 {
                let physical = edit.data(1);
                let extent = Extent { logical: 6 * i, len: 1, physical, unwritten: false };
                insert(inode, edit, extent).expect("there is space");
            }
        });
        step(&|inode, edit| mark_written(inode, edit, 100, 3000).expect("there is space"));
        step(&|inode, edit| mark_unwritten(inode, edit, 2000, 2000).expect("there is space"));
        step(&|inode, edit| shift(inode, edit, 2500, 700).expect("there is space"));
        step(&|inode, edit| remove(inode, edit, 2000, 3500).expect("nothing is cut"));
        step(&|inode, edit| shift(inode, edit, 3400, -1000).expect("there is a hole"));
        step(&|inode, edit| {
            let extent =
                Extent { logical: 990, len: 500, physical: edit.data(500), unwritten: false };
            replace(inode, edit, extent).expect("there is space");
            replace(inode, edit, extent).expect("nothing changes");
        });
        // A part of a long extent, in the middle.
        step(&|inode, edit| remove(inode, edit, 1100, 1200).expect("there is space"));
        step(&|inode, edit| {
            let end = remove_some(inode, edit, 3, END, Budget { blocks: 700, ..Budget::ALL })
                .expect("nothing is cut");
            assert!(end > 3);
        });
        step(&|inode, edit| remove(inode, edit, 6, END).expect("nothing is cut"));
        let edit = Edit::new(&image);
        let (disk, left) = (edit.inode(ino), extents_of(&edit, ino).len() as u64);
        assert_eq!((disk.i_block[6], disk.sectors), (0, 8 * left), "all nodes are freed");
        step(&|inode, edit| remove(inode, edit, 0, END).expect("nothing is cut"));
        assert_eq!(Edit::new(&image).inode(ino).sectors, 0);
    }
}

#[test]
fn the_checksum_of_a_node_is_verified() {
    let (image, ino) = with_file(&[]);
    let mut edit = Edit::new(&image);
    edit.change(ino, |inode, edit| {
        for i in 0..10 {
            let physical = edit.data(1);
            let extent = Extent { logical: 2 * i, len: 1, physical, unwritten: false };
            insert(inode, edit, extent).expect("there is space");
        }
    });
    edit.finish();
    let edit = Edit::new(&image);
    let mut node = BlockNo(0);
    let _ = blocks_of_tree(ino, &edit.inode(ino), &edit, &mut |at| {
        node = at;
        ControlFlow::Continue(())
    });
    let mut block = image.read(node);
    block[20] ^= 1;
    image.write(node, &block);
    assert!(lookup(ino, &edit.inode(ino), &edit, 0).is_err());
}
