//! Blocks and inodes are allocated and freed on images of mke2fs. e2fsck then finds nothing but
//! blocks and inodes in use without a file.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::image::Image;
use riopipe_fs_core::format::inode::{DiskInode, INODE_BYTES, Time, file_type};
use riopipe_fs_core::groups::{Claim, FreedBatch, Groups};
use riopipe_fs_core::{Block, BlockNo, FsError, Ino};
use riopipe_nvme::digest::soft;

/// Writes the changed groups and the superblock.
fn commit(image: &Image, groups: &Groups) {
    for (at, block) in groups.render() {
        image.write(at, &block);
    }
    let mut sb = image.superblock();
    sb.set_free_blocks(groups.counts().free_blocks);
    sb.set_free_inodes(groups.counts().free_inodes);
    let mut block = image.read(BlockNo(0));
    sb.encode(&mut block, soft);
    image.write(BlockNo(0), &block);
}

/// The lines of e2fsck, except for the passes, and for blocks and inodes in use without a file.
fn complaints(image: &Image) -> Vec<String> {
    let ended = image.tool("e2fsck", &["-f", "-n"]);
    let is_expected = |line: &str| {
        let starts = [
            "e2fsck ",
            "Pass ",
            "Block bitmap differences: ",
            "Inode bitmap differences: ",
            "Fix? no",
            "Directories count wrong for group",
        ];
        line.is_empty()
            || starts.iter().any(|start| line.starts_with(start))
            || line.contains("WARNING: Filesystem still has errors")
            || line.contains(" files (")
    };
    ended.output.lines().filter(|line| !is_expected(line)).map(str::to_owned).collect()
}

/// Sets of options with every form of bitmaps and descriptors.
const OPTIONS: [&[&str]; 8] = [
    &[],
    &["-O", "^64bit"],
    &["-O", "^flex_bg"],
    &["-O", "^metadata_csum,uninit_bg"],
    &["-O", "^metadata_csum,uninit_bg,^64bit"],
    &["-O", "^metadata_csum,^uninit_bg"],
    &["-O", "metadata_csum_seed,^resize_inode", "-G", "4", "-g", "8192"],
    &["-O", "^flex_bg,^metadata_csum,^uninit_bg,^64bit,^resize_inode", "-N", "1000"],
];

#[test]
fn all_that_is_allocated_and_freed_again_leaves_a_clean_image() {
    for options in OPTIONS {
        let image = Image::new(1000, options);
        let layout = image.layout();
        let read = |at| Ok::<_, FsError>(Arc::from(image.read(at)));
        let groups = Groups::open(&layout, &read).expect("valid");
        let before = groups.counts();
        assert_eq!(before.free_blocks, image.superblock().free_blocks(), "{options:?}");
        assert_eq!(before.free_inodes, image.superblock().free_inodes(), "{options:?}");

        let mut runs = Vec::new();
        let mut inodes = Vec::new();
        for n in 0..400 {
            let goal = groups.rotor(n % 8, 8);
            let run = groups.allocate_blocks(goal, 1 + u32::from(n), Claim::User, 0, &read);
            runs.push(run.expect("free blocks"));
            let is_dir = n % 5 == 0;
            let parent = if n % 3 == 0 { Ino::ROOT } else { Ino(1 + u32::from(n)) };
            inodes.push((groups.allocate_inode(parent, is_dir, &read).expect("free"), is_dir));
        }
        commit(&image, &groups);
        let found = complaints(&image);
        assert!(found.is_empty(), "{options:?}: {found:?}");
        let text = image.tool("dumpe2fs", &[]);
        assert!(!text.output.contains("EXPECTED"), "{options:?}: {}", text.output);
        assert_bitmaps_agree(&image, &groups, options);

        let mut batch = FreedBatch::default();
        for (first, blocks) in runs {
            groups.prepare_free_blocks(first, blocks, &read).expect("in use");
            groups.free_blocks(first, blocks, &mut batch);
        }
        for (ino, is_dir) in inodes {
            groups.prepare_free_inode(ino, &read).expect("in use");
            groups.free_inode(ino, is_dir, &mut batch);
        }
        commit(&image, &groups);
        image.assert_clean();
        assert_eq!(groups.counts(), before, "{options:?}");
        groups.reuse(batch);
        assert!(!groups.has_blocked());
    }
}

/// The free blocks in the superblock, in the descriptors and in the bitmaps agree as dumpe2fs reads
/// them.
fn assert_bitmaps_agree(image: &Image, groups: &Groups, options: &[&str]) {
    let text = image.tool("dumpe2fs", &[]).output;
    let number = |line: &str, before: &str| -> u64 {
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words.windows(2).position(|w| w.join(" ") == before).expect("two words");
        words[at - 1].parse().expect("a number")
    };
    let (mut blocks, mut inodes, mut listed) = (0, 0, 0);
    for line in text.lines() {
        if line.contains(" free blocks, ") {
            blocks += number(line, "free blocks,");
            inodes += number(&line.replace(',', ""), "free inodes");
        }
        if let Some(ranges) = line.trim().strip_prefix("Free blocks: ") {
            // The first such line is the number in the superblock.
            if line.starts_with(' ') {
                for range in ranges.split(", ").filter(|range| !range.is_empty()) {
                    let (first, last) = range.split_once('-').unwrap_or((range, range));
                    let number = |text: &str| text.parse::<u64>().expect("a block");
                    listed += number(last) - number(first) + 1;
                }
            }
        }
    }
    assert_eq!(blocks, groups.counts().free_blocks, "{options:?}");
    assert_eq!(listed, groups.counts().free_blocks, "{options:?}");
    assert_eq!(inodes, u64::from(groups.counts().free_inodes), "{options:?}");
}

/// New inodes, which are put into the inode table and are found by e2fsck, which lists them as
/// without a directory entry. The inode tables had other bytes before.
#[test]
fn blocks_of_inode_tables_that_were_never_initialised_get_zeroes() {
    for options in [&[][..], &["-O", "^metadata_csum,uninit_bg"]] {
        let options: Vec<&str> =
            options.iter().copied().chain(["-E", "lazy_itable_init=1"]).collect();
        let image = Image::new(600, &options);
        let layout = image.layout();
        let written: RefCell<BTreeMap<BlockNo, Arc<Block>>> = RefCell::default();
        let read = |at| Ok::<_, FsError>(Arc::from(image.read(at)));
        let groups = Groups::open(&layout, &read).expect("valid");
        // Fill every block that was never initialised with bytes that are not zero.
        for index in (1..=layout.inodes).step_by(layout.inodes_per_block() as usize) {
            let place = groups.inode_place(Ino(index));
            if place.is_fresh {
                image.write(place.block, &[0xa5; 4096]);
            }
        }
        let mut inodes = Vec::new();
        for n in 0..300 {
            let ino = groups.allocate_inode(Ino(1 + n * 97), false, &read).expect("free");
            if n % 4 == 1 {
                groups.unallocate_inode(ino, false);
            } else {
                inodes.push(ino);
            }
        }
        for &ino in &inodes {
            let place = groups.inode_place(ino);
            let mut written = written.borrow_mut();
            let block = written.entry(place.block).or_insert_with(|| {
                if place.is_fresh {
                    Arc::new([0; 4096])
                } else {
                    Arc::from(image.read(place.block))
                }
            });
            let raw = &mut Arc::make_mut(block)[place.offset..place.offset + INODE_BYTES];
            let time = Time { seconds: 1_700_000_000, nanos: 0 };
            let disk = DiskInode {
                mode: file_type::FIFO | 0o644,
                links: 1,
                extra_isize: 32,
                atime: time,
                ctime: time,
                mtime: time,
                crtime: time,
                ..DiskInode::zeroed()
            };
            disk.encode(raw.try_into().expect("256 bytes"), &layout, ino);
        }
        for (at, block) in written.borrow().iter() {
            image.write(*at, block);
        }
        commit(&image, &groups);
        for &ino in &inodes {
            assert!(!groups.inode_place(ino).is_fresh);
        }
        let found = complaints(&image);
        let unattached = found.iter().filter(|l| l.starts_with("Unattached inode")).count();
        assert_eq!(unattached, inodes.len(), "{found:?}");
        let others: Vec<_> = found
            .iter()
            .filter(|l| !l.starts_with("Unattached inode") && !l.starts_with("Connect to"))
            .collect();
        assert!(others.is_empty(), "{others:?}");
        // e2fsck makes a clean image of it, and had to do nothing but to connect the inodes.
        assert_eq!(image.repair().code, 1);
        image.assert_clean();
    }
}

#[test]
fn a_large_sparse_image() {
    for options in [&[][..], &["-O", "^metadata_csum,uninit_bg,^64bit"]] {
        // More than 1 TiB. Few inodes keep the check fast.
        let options: Vec<&str> = options.iter().copied().chain(["-i", "4194304"]).collect();
        let image = Image::new(1100 << 10, &options);
        let layout = image.layout();
        assert_eq!(layout.groups, 8800);
        let read = |at| Ok::<_, FsError>(Arc::from(image.read(at)));
        let groups = Groups::open(&layout, &read).expect("valid");
        let before = groups.counts();
        assert_eq!(before.free_blocks, image.superblock().free_blocks());
        let mut batch = FreedBatch::default();
        let mut runs = Vec::new();
        for stream in 0..64 {
            let goal = groups.rotor(stream, 64);
            let run = groups.allocate_blocks(goal, 20_000, Claim::User, 0, &read).expect("free");
            assert_eq!(run.1, 20_000);
            runs.push(run);
            let ino = groups.allocate_inode(Ino::ROOT, true, &read).expect("free");
            groups.free_inode(ino, true, &mut batch);
        }
        let last = layout.first_block(layout.groups - 1);
        runs.push(groups.allocate_blocks(last, 1, Claim::User, 0, &read).expect("free"));
        commit(&image, &groups);
        for (first, blocks) in runs {
            groups.free_blocks(first, blocks, &mut batch);
        }
        commit(&image, &groups);
        assert_eq!(groups.counts(), before);
        image.assert_clean();
    }
}
