//! The fixed structures of images that mke2fs and debugfs made: decoded, verified, and encoded
//! again to the same bytes.

use crate::image::Image;
use riopipe_fs_core::format::checksum::{seal, verify};
use riopipe_fs_core::format::features::incompat::RIOFS_DIRTY;
use riopipe_fs_core::format::features::ro_compat::ORPHAN_PRESENT;
use riopipe_fs_core::format::group_desc::{GroupDesc, GroupFlags};
use riopipe_fs_core::format::inode::{DiskInode, INODE_BYTES, InodeFlags};
use riopipe_fs_core::format::layout::Layout;
use riopipe_fs_core::format::orphan_file;
use riopipe_fs_core::{BLOCK_BYTES, Block, BlockKind, BlockNo, Ino};
use riopipe_nvme::digest::soft;

/// Sets of options with every kind of descriptor and checksum.
const OPTIONS: [&[&str]; 7] = [
    &[],
    &["-O", "^64bit"],
    &["-O", "^metadata_csum,uninit_bg"],
    &["-O", "^metadata_csum,uninit_bg,^64bit"],
    &["-O", "^metadata_csum,^uninit_bg"],
    &["-O", "metadata_csum_seed,orphan_file", "-G", "4"],
    &["-O", "^flex_bg,^resize_inode"],
];

/// The 256 bytes of an inode, and the block and offset of them.
fn raw_inode(image: &Image, layout: &Layout, ino: Ino) -> (BlockNo, usize, [u8; INODE_BYTES]) {
    let (group, index) = layout.group_of_inode(ino);
    let (at, offset) = layout.descriptor_at(group);
    let desc = GroupDesc::decode(layout, &image.read(at)[offset..]);
    let per_block = layout.inodes_per_block();
    let at = BlockNo(desc.inode_table.0 + u64::from(index / per_block));
    let offset = (index % per_block) as usize * INODE_BYTES;
    let mut raw = [0; INODE_BYTES];
    raw.copy_from_slice(&image.read(at)[offset..offset + INODE_BYTES]);
    (at, offset, raw)
}

fn inode(image: &Image, layout: &Layout, ino: Ino) -> DiskInode {
    DiskInode::decode(&raw_inode(image, layout, ino).2, layout, ino).expect("a valid inode")
}

/// The inode number of a path.
fn ino_of(image: &Image, path: &str) -> Ino {
    let text = image.debugfs(&format!("stat {path}\n"));
    let number = text.split("Inode: ").nth(1).expect("an inode").split_whitespace().next();
    Ino(number.expect("a number").parse().expect("a number"))
}

/// The first block of the first extent in `i_block` or in a node.
fn first_pointer(node: &[u8]) -> BlockNo {
    let depth = u16::from_le_bytes([node[6], node[7]]);
    let word = |at: usize| u32::from_le_bytes(node[at..at + 4].try_into().expect("4 bytes"));
    let low = if depth == 0 { word(12 + 8) } else { word(12 + 4) };
    BlockNo(u64::from(low))
}

/// Block `at` passes, and its seal is exactly the one that e2fsprogs wrote.
fn assert_sealed(image: &Image, layout: &Layout, at: BlockNo, kind: BlockKind) {
    let block = image.read(at);
    verify(layout, at, kind, &block).expect("verified");
    let mut again: Box<Block> = block.clone();
    seal(layout, at, kind, &mut again);
    assert!(again == block, "{kind:?} in {at}");
    again[BLOCK_BYTES / 2] ^= 1;
    if layout.csum_seed.is_some() && matches!(kind, BlockKind::DirLeaf(_) | BlockKind::Xattr) {
        verify(layout, at, kind, &again).expect_err("a changed block");
    }
}

#[test]
fn superblock_and_descriptors_of_every_kind_survive() {
    for options in OPTIONS {
        let image = Image::new(300, options);
        let layout = image.layout();
        let block = image.read(BlockNo(0));
        let mut again = block.clone();
        again[1024..2048].fill(0);
        image.superblock().encode(&mut again, soft);
        assert!(again == block, "{options:?}");

        assert_eq!(layout.blocks, 300 << 8, "{options:?}");
        for group in 0..layout.groups {
            let (at, offset) = layout.descriptor_at(group);
            let block = image.read(at);
            let raw = &block[offset..offset + usize::from(layout.descriptor_bytes)];
            assert!(GroupDesc::verify(&layout, group, raw), "{options:?}: group {group}");
            let mut desc = GroupDesc::decode(&layout, raw);
            for (uninit, at) in [
                (GroupFlags::BLOCK_UNINIT, desc.block_bitmap),
                (GroupFlags::INODE_UNINIT, desc.inode_bitmap),
            ] {
                if desc.flags.contains(uninit) {
                    continue;
                }
                let bitmap = image.read(at);
                if uninit == GroupFlags::BLOCK_UNINIT {
                    assert!(desc.verify_block_bitmap(&layout, &bitmap), "{options:?}: {group}");
                    desc.seal_block_bitmap(&layout, &bitmap);
                } else {
                    assert!(desc.verify_inode_bitmap(&layout, &bitmap), "{options:?}: {group}");
                    desc.seal_inode_bitmap(&layout, &bitmap);
                }
            }
            let mut again = raw.to_vec();
            again[0x1e..0x20].fill(0);
            desc.encode(&layout, group, &mut again);
            assert_eq!(again, raw, "{options:?}: group {group}");
        }
    }
}

#[test]
fn inodes_survive() {
    for options in OPTIONS {
        let image = Image::new(64, options);
        let data = image.dir().join("data");
        std::fs::write(&data, vec![b'x'; 10_000]).expect("a file");
        image.debugfs(&format!(
            "write {} file\nsif file uid 70000\nsif file gid 80000\nsif file mtime @0x90000000\n\
             ea_set file user.small value\nsymlink link target\nmkdir dir\n",
            data.display()
        ));
        let layout = image.layout();
        let file = inode(&image, &layout, ino_of(&image, "/file"));
        assert_eq!((file.uid, file.gid, file.size), (70_000, 80_000, 10_000));
        assert_eq!(file.sectors, 24);
        assert!(file.is_regular() && file.flags.contains(InodeFlags::EXTENTS));
        assert!(inode(&image, &layout, ino_of(&image, "/link")).is_symlink());
        assert!(inode(&image, &layout, ino_of(&image, "/dir")).is_dir());
        for ino in 1..30 {
            let (_, _, raw) = raw_inode(&image, &layout, Ino(ino));
            let decoded = DiskInode::decode(&raw, &layout, Ino(ino)).expect("valid");
            // Inodes of mke2fs without fields in the second half get fields.
            if raw[0x80] > 0 {
                let mut again = raw;
                again[0x7c..0x7e].fill(0);
                decoded.encode(&mut again, &layout, Ino(ino));
                assert_eq!(again, raw, "{options:?}: inode {ino}");
            }
        }
        image.assert_clean();
    }
}

#[test]
fn an_inode_that_the_crate_encodes_passes_e2fsck() {
    let image = Image::new(64, &[]);
    image.debugfs("mknod pipe p\n");
    let layout = image.layout();
    let ino = ino_of(&image, "/pipe");
    let (at, offset, mut raw) = raw_inode(&image, &layout, ino);
    let mut disk = inode(&image, &layout, ino);
    disk.uid = 123_456;
    disk.mtime.seconds = 1 << 33;
    disk.mtime.nanos = 17;
    disk.extra_isize = 32;
    disk.encode(&mut raw, &layout, ino);
    let mut block = image.read(at);
    block[offset..offset + INODE_BYTES].copy_from_slice(&raw);
    image.write(at, &block);
    image.assert_clean();
    let text = image.debugfs("stat /pipe\n");
    assert!(text.contains("User: 123456"), "{text}");
    assert!(text.contains("2242"), "the year of the time: {text}");
}

#[test]
fn metadata_blocks_have_the_checksums_of_e2fsprogs() {
    for options in OPTIONS {
        let image = Image::new(64, options);
        // A file of single blocks far apart has more extents than fit into the inode.
        let mut script = String::new();
        let block = image.dir().join("block");
        std::fs::write(&block, vec![1; 10]).expect("a file");
        script += &format!("write {} holes\n", block.display());
        for n in 1..100 {
            script += &format!("fallocate holes {0} {0}\n", n * 10);
        }
        let value = "v".repeat(300);
        script += &format!("ea_set holes user.large {value}\n");
        let big = image.dir().join("big");
        std::fs::write(&big, "w".repeat(2000)).expect("a file");
        script += &format!("ea_set -f {} holes user.larger\n", big.display());
        script += "mkdir many\n";
        image.debugfs(&script);
        let mut script = String::from("cd many\n");
        for n in 0..3000 {
            script += &format!("write /dev/null a-name-that-is-rather-long-so-that-blocks-{n}\n");
        }
        image.debugfs(&script);
        // Builds the hash trees of directories.
        let ended = image.tool("e2fsck", &["-f", "-y", "-D"]);
        assert!(ended.code <= 1, "{}", ended.output);
        let layout = image.layout();

        let ino = ino_of(&image, "/holes");
        let holes = inode(&image, &layout, ino);
        let seed = layout.inode_seed(ino, holes.generation);
        assert_eq!(holes.i_block[6], 1, "{options:?}: the depth of the tree");
        let node = first_pointer(&holes.i_block);
        assert_sealed(&image, &layout, node, BlockKind::ExtentNode(seed));
        assert_ne!(holes.xattr_block, BlockNo(0));
        assert_sealed(&image, &layout, holes.xattr_block, BlockKind::Xattr);

        let root = inode(&image, &layout, Ino::ROOT);
        let seed = layout.inode_seed(Ino::ROOT, root.generation);
        assert_sealed(&image, &layout, first_pointer(&root.i_block), BlockKind::DirLeaf(seed));

        let ino = ino_of(&image, "/many");
        let many = inode(&image, &layout, ino);
        let seed = layout.inode_seed(ino, many.generation);
        assert!(many.flags.contains(InodeFlags::INDEX), "{options:?}");
        let first = if many.i_block[6] == 0 {
            first_pointer(&many.i_block)
        } else {
            first_pointer(&image.read(first_pointer(&many.i_block))[..])
        };
        assert_sealed(&image, &layout, first, BlockKind::DirIndex(seed));
    }
}

#[test]
fn e2fsck_refuses_an_image_with_the_private_bit() {
    let image = Image::new(64, &[]);
    let mut sb = image.superblock();
    let mut features = sb.features();
    features.incompat |= RIOFS_DIRTY;
    sb.set_features(features);
    let mut block = image.read(BlockNo(0));
    sb.encode(&mut block, soft);
    image.write(BlockNo(0), &block);
    let before = block;
    for ended in [image.check(), image.repair(), image.tool("e2fsck", &["-p"])] {
        assert_eq!(ended.code, 8, "{}", ended.output);
        assert!(ended.output.contains("FEATURE_I30"), "{}", ended.output);
    }
    assert!(image.read(BlockNo(0)) == before);
    image.layout();
}

#[test]
fn e2fsck_finds_the_orphans_that_the_crate_puts_into_the_orphan_file() {
    for options in [&["-O", "orphan_file"][..], &["-O", "orphan_file,^metadata_csum,uninit_bg"]] {
        let image = Image::new(600, options);
        image.debugfs("mknod pipe p\nmknod other p\n");
        let layout = image.layout();
        let file = layout.orphan_file.expect("an orphan file");
        let disk = inode(&image, &layout, file);
        let kind = BlockKind::OrphanFile(layout.inode_seed(file, disk.generation));
        let at = first_pointer(&disk.i_block);
        assert_sealed(&image, &layout, at, kind);
        assert_eq!(orphan_file::orphans(&layout, at, &image.read(at)), Ok(Vec::new()));

        let mut block = image.read(at);
        let orphan = ino_of(&image, "/pipe");
        let (place, offset, mut raw) = raw_inode(&image, &layout, orphan);
        let mut disk = inode(&image, &layout, orphan);
        disk.links = 0;
        disk.encode(&mut raw, &layout, orphan);
        let mut table = image.read(place);
        table[offset..offset + INODE_BYTES].copy_from_slice(&raw);
        image.write(place, &table);
        image.debugfs("unlink pipe\n");
        orphan_file::fill(&mut block, &[orphan]);
        seal(&layout, at, kind, &mut block);
        image.write(at, &block);
        let mut sb = image.superblock();
        let mut features = sb.features();
        features.ro_compat |= ORPHAN_PRESENT;
        sb.set_features(features);
        let mut block = image.read(BlockNo(0));
        sb.encode(&mut block, soft);
        image.write(BlockNo(0), &block);

        let ended = image.repair();
        let text = format!("Clearing orphaned inode {orphan} ");
        assert!(ended.output.contains(&text), "{options:?}: {}", ended.output);
        image.assert_clean();
        assert_sealed(&image, &layout, at, kind);
        assert_eq!(orphan_file::orphans(&layout, at, &image.read(at)), Ok(Vec::new()));
    }
}
