//! Extended attributes of images: those of mke2fs and debugfs are read, and those that this crate
//! set are read by debugfs and pass e2fsck.

use std::collections::BTreeMap;
use std::fs::File;

use riopipe_fs_core::acl::{Access, Acl, AclEntry, AclKind, Subject};
use riopipe_fs_core::xattr::{SetMode, acl, get, list, remove, remove_block, set, set_acl};
use riopipe_fs_core::{BlockKind, FsError, Ino, MetaBlocks};

use crate::edit::Edit;
use crate::extents::ino_of;
use crate::image::Image;

/// An image with two empty files and a directory.
fn with_files(options: &[&str]) -> (Image, [Ino; 3]) {
    let image = Image::new(64, options);
    let source = image.dir().join("empty");
    File::create(&source).expect("a file");
    let source = source.display();
    image.debugfs(&format!("write {source} one\nwrite {source} two\nmkdir dir\n"));
    let inos = ["one", "two", "dir"].map(|name| ino_of(&image, name));
    (image, inos)
}

/// An attribute as debugfs reads it.
fn by_debugfs(image: &Image, path: &str, name: &str) -> Vec<u8> {
    let out = image.dir().join("value");
    // debugfs writes no file for a value that it does not find.
    let _ = std::fs::remove_file(&out);
    image.debugfs(&format!("ea_get -f {} {path} {name}\n", out.display()));
    std::fs::read(out).expect("a value")
}

fn set_by_debugfs(image: &Image, path: &str, name: &str, value: &[u8]) {
    let source = image.dir().join("value");
    std::fs::write(&source, value).expect("written");
    let output = image.debugfs(&format!("ea_set -f {} {path} {name}\n", source.display()));
    assert!(!output.contains("ea_set:"), "{output}");
}

/// Values of which some are in the inode and some in the block.
fn values() -> BTreeMap<String, Vec<u8>> {
    [
        ("user.a", 5),
        ("user.empty", 0),
        ("user.large", 700),
        ("trusted.t", 31),
        ("security.selinux", 40),
        ("user.b", 1000),
        ("user.name-of-many-letters", 3),
        ("user.c", 130),
    ]
    .into_iter()
    .map(|(name, len)| (name.into(), (0..len).map(|i| (i * 7) as u8).collect()))
    .collect()
}

fn assert_values(image: &Image, ino: Ino, values: &BTreeMap<String, Vec<u8>>) {
    let edit = Edit::new(image);
    let disk = edit.inode(ino);
    for (name, value) in values {
        assert_eq!(get(ino, &disk, &edit, name.as_bytes()).as_ref(), Ok(value), "{name}");
    }
    let names = String::from_utf8(list(ino, &disk, &edit, true).expect("a list")).expect("text");
    let mut names: Vec<_> = names.split_terminator('\0').collect();
    names.sort_unstable();
    assert_eq!(names, values.keys().collect::<Vec<_>>());
}

#[test]
fn attributes_of_debugfs_are_read() {
    for options in crate::extents::OPTIONS {
        let (image, [one, ..]) = with_files(options);
        for (name, value) in values() {
            set_by_debugfs(&image, "one", &name, &value);
        }
        image.assert_clean();
        assert_values(&image, one, &values());
    }
}

#[test]
fn attributes_that_mke2fs_copies_are_read() {
    let scratch = tempfile::TempDir::new().expect("a directory");
    let path = scratch.path().join("file");
    File::create(&path).expect("a file");
    let values: BTreeMap<_, _> =
        values().into_iter().filter(|(name, _)| name.starts_with("user.")).collect();
    for (name, value) in &values {
        rustix::fs::setxattr(&path, name, value, rustix::fs::XattrFlags::empty())
            .expect("the directory for temporary files has attributes of users");
    }
    let tree = scratch.path().to_str().expect("a plain path");
    let image = Image::new(64, &["-d", tree]);
    let ino = ino_of(&image, "file");
    assert_values(&image, ino, &values);
    let edit = Edit::new(&image);
    assert_eq!(get(ino, &edit.inode(ino), &edit, b"user.none"), Err(FsError::NoAttribute));
}

#[test]
fn attributes_pass_e2fsck_and_are_read_by_debugfs() {
    for options in crate::extents::OPTIONS {
        let (image, [one, ..]) = with_files(options);
        let mut values = values();
        for (name, value) in &values {
            let mut edit = Edit::new(&image);
            edit.change(one, |inode, edit| {
                set(inode, edit, name.as_bytes(), value, SetMode::Create).expect("space");
            });
            edit.finish();
            image.assert_clean();
        }
        assert_values(&image, one, &values);
        for (name, value) in &values {
            assert_eq!(by_debugfs(&image, "one", name), *value, "{name}");
        }
        // Changes: shorter and longer, and some are removed.
        let mut edit = Edit::new(&image);
        edit.change(one, |inode, edit| {
            for (name, len) in [("user.a", 900), ("user.b", 2), ("user.large", 699)] {
                let value = vec![9; len];
                set(inode, edit, name.as_bytes(), &value, SetMode::Replace).expect("space");
                values.insert(name.into(), value);
            }
            for name in ["user.c", "user.empty", "trusted.t"] {
                remove(inode, edit, name.as_bytes()).expect("it is there");
                values.remove(name);
            }
        });
        edit.finish();
        image.assert_clean();
        assert_values(&image, one, &values);
        for (name, value) in &values {
            assert_eq!(by_debugfs(&image, "one", name), *value, "{name}");
        }
        let mut edit = Edit::new(&image);
        edit.change(one, |inode, edit| {
            for name in values.keys() {
                remove(inode, edit, name.as_bytes()).expect("it is there");
            }
            assert_eq!((inode.disk.xattr_block.0, inode.disk.sectors), (0, 0));
        });
        edit.finish();
        image.assert_clean();
        assert_values(&image, one, &BTreeMap::new());
    }
}

#[test]
fn bytes_beyond_ascii_in_a_name_have_the_right_hash() {
    let (image, [one, ..]) = with_files(&[]);
    let mut edit = Edit::new(&image);
    edit.change(one, |inode, edit| {
        set(inode, edit, "user.größe-ÿ".as_bytes(), &[1; 300], SetMode::Any).expect("space");
    });
    edit.finish();
    image.assert_clean();
}

#[test]
fn a_shared_block_passes_e2fsck() {
    let (image, [one, two, _]) = with_files(&[]);
    let mut edit = Edit::new(&image);
    let at = edit.change(one, |inode, edit| {
        set(inode, edit, b"user.shared", &[5; 500], SetMode::Any).expect("space");
        inode.disk.xattr_block
    });
    edit.change(two, |inode, edit| {
        edit.edit(at, BlockKind::Xattr).expect("a block")[4] = 2;
        inode.disk.xattr_block = at;
        inode.disk.sectors += 8;
    });
    edit.finish();
    image.assert_clean();

    let mut edit = Edit::new(&image);
    edit.change(two, |inode, edit| {
        set(inode, edit, b"user.more", &[6; 500], SetMode::Any).expect("space");
        assert_ne!(inode.disk.xattr_block, at);
    });
    edit.finish();
    image.assert_clean();
    assert_eq!(by_debugfs(&image, "one", "user.shared"), [5; 500]);
    assert_eq!(by_debugfs(&image, "two", "user.shared"), [5; 500]);
    assert_eq!(by_debugfs(&image, "two", "user.more"), [6; 500]);

    let mut edit = Edit::new(&image);
    for ino in [one, two] {
        edit.change(ino, |inode, edit| remove_block(inode, edit).expect("a good block"));
    }
    edit.finish();
    image.assert_clean();
}

#[test]
fn access_lists_have_the_form_of_e2fsprogs() {
    let (image, [one, two, dir]) = with_files(&[]);
    let entry = |subject, access| AclEntry { subject, access };
    let list = Acl::new(vec![
        entry(Subject::Owner, Access::READ | Access::WRITE),
        entry(Subject::User(1000), Access::all()),
        entry(Subject::OwningGroup, Access::READ),
        entry(Subject::Group(100_000), Access::EXECUTE),
        entry(Subject::Mask, Access::READ | Access::WRITE),
        entry(Subject::Other, Access::empty()),
    ])
    .expect("a valid list");
    // libext2fs converts lists between the two forms, too.
    set_by_debugfs(&image, "one", "system.posix_acl_access", &list.to_user());
    let mut edit = Edit::new(&image);
    assert_eq!(acl(one, &edit.inode(one), &edit, AclKind::Access), Ok(Some(list.clone())));
    edit.change(two, |inode, edit| {
        set_acl(inode, edit, AclKind::Access, Some(&list)).expect("space");
        assert_eq!(inode.disk.mode & 0o777, 0o660);
    });
    edit.change(dir, |inode, edit| {
        let name = b"system.posix_acl_default";
        set(inode, edit, name, &list.to_user(), SetMode::Any).expect("space");
    });
    edit.finish();
    image.assert_clean();
    // debugfs writes another id into entries without one, so the bytes differ.
    for (path, name) in [("two", "system.posix_acl_access"), ("dir", "system.posix_acl_default")] {
        let read = by_debugfs(&image, path, name);
        assert_eq!(Acl::from_user(&read), Ok(Some(list.clone())), "{path}");
    }
}
