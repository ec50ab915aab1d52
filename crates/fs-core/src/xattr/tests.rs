use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;
use std::format;

use proptest::prelude::*;

use super::*;
use crate::acl::{Access, AclEntry, Subject};
use crate::format::inode::file_type;
use crate::testing::MemBlocks;

const INO: Ino = Ino(12);

struct File {
    disk: DiskInode,
    blocks: MemBlocks,
}

impl File {
    fn new() -> Self {
        let mut disk = DiskInode::zeroed();
        disk.mode = file_type::REGULAR | 0o644;
        disk.extra_isize = 32;
        Self { disk, blocks: MemBlocks::new() }
    }

    fn set(&mut self, name: &str, value: &[u8], mode: SetMode) -> Result<(), FsError> {
        let inode = &mut OpenInode { ino: INO, disk: &mut self.disk };
        set(inode, &mut self.blocks, name.as_bytes(), value, mode)
    }

    fn remove(&mut self, name: &str) -> Result<(), FsError> {
        let inode = &mut OpenInode { ino: INO, disk: &mut self.disk };
        remove(inode, &mut self.blocks, name.as_bytes())
    }

    fn get(&self, name: &str) -> Result<Vec<u8>, FsError> {
        get(INO, &self.disk, &self.blocks, name.as_bytes())
    }

    fn list(&self) -> Result<Vec<u8>, FsError> {
        list(INO, &self.disk, &self.blocks, true)
    }

    /// Makes more inodes use the block.
    fn share(&mut self, users: u32) {
        let block = self.blocks.edit(self.disk.xattr_block, BlockKind::Xattr).expect("a block");
        set_u32(block, 4, users);
    }

    fn check(&self, model: &BTreeMap<Vec<u8>, Vec<u8>>) {
        for (name, value) in model {
            let found = get(INO, &self.disk, &self.blocks, name);
            assert_eq!(found.as_ref(), Ok(value));
        }
        let all = self.list().expect("good attributes");
        let mut names: Vec<_> = all.split_inclusive(|byte| *byte == 0).collect();
        names.sort_unstable();
        let wanted: Vec<_> = model.keys().map(|name| [&name[..], &[0]].concat()).collect();
        let mut wanted: Vec<_> = wanted.iter().map(|name| &name[..]).collect();
        wanted.sort_unstable();
        assert_eq!(names, wanted);
        assert_eq!(self.disk.sectors, if self.disk.xattr_block.0 == 0 { 0 } else { 8 });
        assert_eq!(self.blocks.len() as u64 * 8, self.disk.sectors);
    }
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let prefix = prop::sample::select(vec!["user.", "trusted.", "security.", "system."]);
    (prefix, "[a-c]{1,2}|[a-c]{40}").prop_map(|(prefix, rest)| format!("{prefix}{rest}").into())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn attributes_are_those_of_a_model(
        ops in prop::collection::vec(
            (
                name(),
                prop_oneof![
                    1 => Just(None),
                    4 => prop::collection::vec(any::<u8>(), 0..30).prop_map(Some),
                    1 => prop::collection::vec(any::<u8>(), 0..2500).prop_map(Some),
                ],
                prop::sample::select(vec![SetMode::Any, SetMode::Create, SetMode::Replace]),
            ),
            1..60,
        ),
    ) {
        let mut file = File::new();
        let mut model = BTreeMap::new();
        for (name, value, mode) in ops {
            let before = (file.disk.clone(), file.blocks.clone());
            let had = model.contains_key(&name);
            let text = std::str::from_utf8(&name).expect("ASCII");
            let result = match &value {
                Some(value) => file.set(text, value, mode),
                None => file.remove(text),
            };
            match result {
                Ok(()) => {
                    prop_assert!(mode != SetMode::Create || !had || value.is_none());
                    prop_assert!(mode != SetMode::Replace || had);
                    match value {
                        Some(value) => _ = model.insert(name, value),
                        None => _ = model.remove(&name),
                    }
                }
                Err(FsError::Exists) => prop_assert!(had && mode == SetMode::Create),
                Err(FsError::NoAttribute) => prop_assert!(!had),
                Err(error) => {
                    prop_assert_eq!(error, FsError::NoSpace);
                    let bytes: usize =
                        model.iter().map(|(name, value)| name.len() + value.len() + 24).sum();
                    prop_assert!(bytes + value.map_or(0, |value| value.len() + 64) > 4000);
                    (file.disk, file.blocks) = before;
                }
            }
            file.check(&model);
        }
        for name in model.keys() {
            file.remove(std::str::from_utf8(name).expect("ASCII")).expect("it is there");
        }
        file.check(&BTreeMap::new());
    }

    #[test]
    fn damaged_attributes_are_refused_or_read(
        damage in prop::collection::vec((any::<bool>(), 0..200_usize, any::<u8>()), 1..6),
    ) {
        let mut file = File::new();
        for (name, len) in [("user.a", 10), ("user.long", 300), ("trusted.b", 7), ("user.c", 90)] {
            file.set(name, &vec![7; len], SetMode::Any).expect("space");
        }
        for (inside, at, byte) in damage {
            if inside {
                file.disk.attributes[at % 128] = byte;
            } else {
                let at = if at >= 150 { at + 3800 } else { at };
                let block = file.blocks.edit(file.disk.xattr_block, BlockKind::Xattr);
                block.expect("a block")[at] = byte;
            }
        }
        let _ = file.list();
        let _ = file.get("user.long");
        let _ = file.set("user.a", &[1; 60], SetMode::Any);
        let _ = file.set("system.posix_acl_access", &[2, 0, 0, 0], SetMode::Any);
        let _ = file.remove("user.long");
        let _ = file.remove("user.c");
    }
}

#[test]
fn small_values_are_in_the_inode_and_large_ones_in_a_block() {
    let mut file = File::new();
    file.set("user.small", b"abc", SetMode::Any).expect("space");
    assert_eq!((file.disk.xattr_block, file.blocks.len()), (BlockNo(0), 0));
    file.set("user.large", &[1; 200], SetMode::Any).expect("space");
    assert_eq!((file.disk.sectors, file.blocks.len()), (8, 1));
    file.set("user.small", &[2; 100], SetMode::Replace).expect("space");
    assert_eq!(file.disk.attributes, [0; 128], "it moved to the block");
    file.set("user.small", b"", SetMode::Any).expect("space");
    file.remove("user.large").expect("it is there");
    assert_eq!((file.disk.sectors, file.blocks.len()), (0, 0), "the block is freed");
    assert_eq!(file.get("user.small"), Ok(vec![]));
}

#[test]
fn a_shared_block_is_copied_before_it_changes() {
    let mut file = File::new();
    file.set("user.large", &[1; 200], SetMode::Any).expect("space");
    let shared = file.disk.xattr_block;
    file.share(3);
    let mut other = file.disk.clone();
    file.set("user.more", &[2; 200], SetMode::Any).expect("space");
    assert_ne!(file.disk.xattr_block, shared);
    assert_eq!((file.disk.sectors, file.blocks.len()), (8, 2));
    file.set("user.more", &[3; 200], SetMode::Any).expect("space");
    assert_eq!(file.blocks.len(), 2, "it is copied once");

    let found = get(INO, &other, &file.blocks, b"user.large");
    assert_eq!(found, Ok(vec![1; 200]));
    assert_eq!(get(INO, &other, &file.blocks, b"user.more"), Err(FsError::NoAttribute));
    let block = file.blocks.get(shared, BlockKind::Xattr).expect("a block");
    assert_eq!(u32_at(&block[..], 4), 2);
    drop(block);

    let mut third = other.clone();
    for (disk, left) in [(&mut other, 2), (&mut third, 1)] {
        remove_block(&mut OpenInode { ino: INO, disk }, &mut file.blocks).expect("a good block");
        assert_eq!((disk.sectors, disk.xattr_block, file.blocks.len()), (0, BlockNo(0), left));
    }
}

#[test]
fn no_free_block_is_an_error() {
    let mut file = File::new();
    file.blocks.budget = 0;
    file.set("user.small", b"abc", SetMode::Any).expect("space");
    let result = file.set("user.large", &[1; 200], SetMode::Any);
    assert_eq!(result, Err(FsError::NoSpace));
}

#[test]
fn names_and_modes_are_checked() {
    let mut file = File::new();
    let long = format!("user.{}", "n".repeat(251));
    for (name, error) in [
        ("", FsError::Range),
        (&long[..], FsError::Range),
        ("user.", FsError::Invalid),
        ("other.name", FsError::NotSupported),
        ("user", FsError::NotSupported),
    ] {
        assert_eq!(file.set(name, b"x", SetMode::Any), Err(error.clone()), "{name}");
        assert_eq!(file.get(name), Err(error.clone()), "{name}");
        assert_eq!(file.remove(name), Err(error), "{name}");
    }
    file.set(&long[..255], b"x", SetMode::Create).expect("the longest name");
    assert_eq!(file.set(&long[..255], b"x", SetMode::Create), Err(FsError::Exists));
    assert_eq!(file.set("user.b", b"x", SetMode::Replace), Err(FsError::NoAttribute));
    assert_eq!(file.remove("user.b"), Err(FsError::NoAttribute));
    assert_eq!(file.set("user.b", &[0; 5000], SetMode::Any), Err(FsError::NoSpace));
    assert_eq!(file.set("user.b", &[0; 70_000], SetMode::Any), Err(FsError::NoSpace));
    file.set("trusted.t", b"x", SetMode::Any).expect("space");
    let names = list(INO, &file.disk, &file.blocks, false).expect("good attributes");
    assert_eq!(names, [&long.as_bytes()[..255], &[0]].concat());
}

#[test]
fn damaged_attributes_are_errors() {
    let mut good = File::new();
    good.set("user.name", b"1234", SetMode::Any).expect("space");
    good.set("user.block", &[1; 200], SetMode::Any).expect("space");
    // In the inode the entry begins after the magic number.
    for (at, byte) in [(4, 255), (5, 9), (6, 0), (6, 94), (7, 1), (8, 1), (13, 1)] {
        let mut file = File { disk: good.disk.clone(), blocks: good.blocks.clone() };
        file.disk.attributes[at] = byte;
        let result = file.get("user.name");
        match at {
            // Another prefix, which is known to no reader.
            5 => assert_eq!(result, Err(FsError::NoAttribute)),
            _ => assert!(matches!(result, Err(FsError::DamagedInode { .. })), "{at}"),
        }
    }
    let at = good.disk.xattr_block;
    for (offset, byte) in [(0, 1), (4, 0), (8, 2), (35, 0x10), (36, 1), (41, 0xff)] {
        let mut file = File { disk: good.disk.clone(), blocks: good.blocks.clone() };
        file.blocks.edit(at, BlockKind::Xattr).expect("a block")[offset] = byte;
        let result = file.get("user.block");
        assert_eq!(result, Err(FsError::DamagedBlock { what: "attributes", block: at }));
        assert!(file.set("user.block", b"x", SetMode::Any).is_err());
        assert!(file.list().is_err());
    }
    good.disk.xattr_block = BlockNo(1 << 40);
    assert!(matches!(good.get("user.block"), Err(FsError::DamagedInode { .. })));
}

#[test]
fn access_lists_are_stored_only_if_the_mode_is_not_enough() {
    let entry = |subject, access| AclEntry { subject, access: Access::from_bits_retain(access) };
    let plain = Acl::new(vec![
        entry(Subject::Owner, 6),
        entry(Subject::OwningGroup, 4),
        entry(Subject::Other, 0),
    ])
    .expect("a valid list");
    let more = Acl::new(vec![
        entry(Subject::Owner, 7),
        entry(Subject::User(1000), 6),
        entry(Subject::OwningGroup, 5),
        entry(Subject::Mask, 6),
        entry(Subject::Other, 1),
    ])
    .expect("a valid list");
    let mut file = File::new();
    let name = "system.posix_acl_access";
    file.set(name, &more.to_user(), SetMode::Any).expect("space");
    assert_eq!(file.disk.mode, file_type::REGULAR | 0o761);
    assert_eq!(file.get(name), Ok(more.to_user()));
    assert_eq!(file.list(), Ok(b"system.posix_acl_access\0".to_vec()));
    file.set(name, &plain.to_user(), SetMode::Any).expect("space");
    assert_eq!(file.disk.mode, file_type::REGULAR | 0o640);
    assert_eq!(file.get(name), Err(FsError::NoAttribute));
    file.remove(name).expect("the kernel lets it pass");

    let default = "system.posix_acl_default";
    assert_eq!(file.set(default, &more.to_user(), SetMode::Any), Err(FsError::Access));
    file.disk.mode = file_type::DIRECTORY | 0o755;
    file.set(default, &plain.to_user(), SetMode::Any).expect("space");
    assert_eq!(file.disk.mode, file_type::DIRECTORY | 0o755);
    assert_eq!(file.get(default), Ok(plain.to_user()));
    assert_eq!(acl(INO, &file.disk, &file.blocks, AclKind::Default), Ok(Some(plain)));
    // A list without entries is none.
    file.set(default, &[2, 0, 0, 0], SetMode::Any).expect("removed");
    assert_eq!(file.list(), Ok(vec![]));
}
