//! An image of the kernel's kind, in which two inodes share the block with their attributes.

use std::sync::Arc;

use riopipe_fs_core::format::checksum::seal;
use riopipe_fs_core::format::inode::{DiskInode, INODE_BYTES};
use riopipe_fs_core::format::superblock::Superblock;
use riopipe_fs_core::storage::{BlockWrite, Placement, Storage, WriteGroup};
use riopipe_fs_core::{Block, BlockKind, BlockNo, Ino};

use crate::enumerate::crc32c;
use crate::enumerate::recorder::{Device, Overlay, Progress, Recorder};
use crate::enumerate::setup::STREAMS;
use crate::enumerate::world::World;
use crate::explore::find_alone;
use crate::storage::MAIN;

/// The world in which the second file has the attributes of the first one, and their block.
pub(crate) fn share(world: &Arc<World>, first: &'static str, second: &'static str) -> Arc<World> {
    let [first, second] = [first, second].map(|name| find_alone(world, name));
    let state = Overlay::default();
    let read = |at: BlockNo| *state.read(&world.base, at.0);
    let layout = Superblock::decode(&read(BlockNo(0)), crc32c).unwrap().layout(crc32c).unwrap();
    let place = |ino: Ino| {
        let desc = riopipe_fs_core::format::group_desc::GroupDesc::decode(
            &layout,
            &read(layout.descriptor_at(0).0)[..usize::from(layout.descriptor_bytes)],
        );
        let index = ino.0 - 1;
        (BlockNo(desc.inode_table.0 + u64::from(index / 16)), index as usize % 16)
    };
    let inode = |block: &mut Block, index: usize, ino, change: &dyn Fn(&mut DiskInode)| {
        let raw = &mut block.as_chunks_mut::<INODE_BYTES>().0[index];
        let mut disk = DiskInode::decode(raw, &layout, ino).unwrap();
        change(&mut disk);
        disk.encode(raw, &layout, ino);
        disk.xattr_block
    };
    let ((at, index), (second_at, second_index)) = (place(first), place(second));
    assert_eq!(at, second_at, "the table is small");
    let mut table = read(at);
    let shared = inode(&mut table, index, first, &|_| ());
    assert_ne!(shared, BlockNo(0), "the attributes are in a block");
    inode(&mut table, second_index, second, &|disk| {
        disk.xattr_block = shared;
        disk.sectors += 8;
    });
    let mut attributes = read(shared);
    attributes[4] = 2;
    seal(&layout, shared, BlockKind::Xattr, &mut attributes);

    let device = Device { progress: Progress::Eager, ..Device::lazy(STREAMS) };
    let recorder = Recorder::new(&world.base, state, device);
    let write =
        |at, data: Block| BlockWrite { at, data: Arc::new(data), placement: Placement::InPlace };
    let writes = vec![write(at, table), write(shared, attributes)];
    recorder.submit(MAIN, WriteGroup { writes, flush: true, ..WriteGroup::default() }).unwrap();
    World::of(Arc::new(world.base.with(&recorder.current())), world.effort)
}
