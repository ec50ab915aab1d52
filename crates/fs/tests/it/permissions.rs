//! Access lists, umask and groups through FUSE: other users than root make the calls.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{XattrFlags, setxattr};

use crate::mount::{Mounted, can_mount, check, has_program};
use crate::support::new_image;

/// The access list `user::rw-, user:1:rw-, group::---, mask::rw-, other::---` of a program.
fn list_for_user_1() -> Vec<u8> {
    let mut list = 2_u32.to_le_bytes().to_vec();
    let no_id = u32::MAX;
    for (tag, access, id) in
        [(1_u16, 6_u16, no_id), (2, 6, 1), (4, 0, no_id), (0x10, 6, no_id), (0x20, 0, no_id)]
    {
        list.extend(tag.to_le_bytes());
        list.extend(access.to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    list
}

/// Whether a program ends well for a user with one group and one other group.
fn runs_as(user: u32, other_group: u32, program: &[&str], path: &Path) -> bool {
    Command::new("setpriv")
        .args([format!("--reuid={user}"), format!("--regid={user}")])
        .arg(format!("--groups={other_group}"))
        .args(program)
        .arg(path)
        .output()
        .unwrap()
        .status
        .success()
}

/// A mount that all users may use. The image is in the folder that is returned.
fn mount_for_all() -> Option<(tempfile::TempDir, PathBuf, Mounted)> {
    if !can_mount() {
        return None;
    }
    if !rustix::process::geteuid().is_root() || !has_program("setpriv", "--version") {
        eprintln!("skipped: it needs root and setpriv");
        return None;
    }
    let (dir, image) = new_image();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let mounted = Mounted::new(&image);
    fs::set_permissions(&mounted.directory, Permissions::from_mode(0o777)).unwrap();
    if !runs_as(1, 1, &["ls"], &mounted.directory) {
        eprintln!("skipped: other users have no access to {}", mounted.directory.display());
        assert!(!mounted.unmount());
        return None;
    }
    Some((dir, image, mounted))
}

#[test]
fn an_access_list_gives_access() {
    let Some((_dir, image, mounted)) = mount_for_all() else { return };
    let file = mounted.directory.join("file");
    fs::write(&file, "text").unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
    assert!(!runs_as(1, 1, &["cat"], &file));
    let list = list_for_user_1();
    setxattr(&file, "system.posix_acl_access", &list, XattrFlags::empty()).unwrap();
    assert!(runs_as(1, 1, &["cat"], &file), "the list gives access");
    assert!(!runs_as(3, 3, &["cat"], &file), "to one user only");
    fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    assert!(!runs_as(1, 1, &["cat"], &file), "chmod changes the mask");
    assert!(!mounted.unmount());
    check(&image);
}

#[test]
fn the_umask_counts_only_without_a_default_list() {
    let Some((_dir, image, mounted)) = mount_for_all() else { return };
    let make = |name: &str| {
        let path = mounted.directory.join(name);
        let made = Command::new("sh").args(["-c", "umask 077; touch \"$0\""]).arg(&path).status();
        assert!(made.unwrap().success());
        path
    };
    assert_eq!(fs::metadata(make("plain")).unwrap().mode() & 0o777, 0o600);
    let list = list_for_user_1();
    setxattr(&mounted.directory, "system.posix_acl_default", &list, XattrFlags::empty()).unwrap();
    let heir = make("heir");
    assert_eq!(fs::metadata(&heir).unwrap().mode() & 0o777, 0o660);
    assert!(runs_as(1, 1, &["cat"], &heir));
    assert!(!mounted.unmount());
    check(&image);
}

#[test]
fn a_member_of_the_group_may_set_the_bit_for_it() {
    let Some((_dir, image, mounted)) = mount_for_all() else { return };
    let file = mounted.directory.join("file");
    fs::write(&file, "text").unwrap();
    let set_group_id = |group: u32| {
        chown(&file, Some(1), Some(7)).unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o755)).unwrap();
        assert!(runs_as(1, group, &["chmod", "2755"], &file));
        fs::metadata(&file).unwrap().mode() & 0o2000 != 0
    };
    assert!(set_group_id(7), "one of its other groups");
    assert!(!set_group_id(8));
    assert!(!mounted.unmount());
    check(&image);
}

/// The kernel leaves that to the file system, and marks no `fallocate` with it.
#[test]
fn changes_by_another_user_remove_the_set_id_bits() {
    let Some((_dir, image, mounted)) = mount_for_all() else { return };
    let file = mounted.directory.join("file");
    let left = |user: u32, program: &[&str]| {
        fs::write(&file, vec![1; 8192]).unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o6777)).unwrap();
        assert!(runs_as(user, user, program, &file), "{program:?}");
        fs::metadata(&file).unwrap().mode() & 0o7777
    };
    for program in [
        &["truncate", "-s", "100"][..],
        &["truncate", "-s", "20000"],
        &["fallocate", "-l", "20000"],
        &["fallocate", "--keep-size", "-l", "20000"],
        &["fallocate", "--punch-hole", "-l", "4096"],
        &["fallocate", "--zero-range", "-l", "4096"],
        &["sh", "-c", "echo >>$0"],
        &["sh", "-c", ": >$0"],
    ] {
        assert_eq!(left(1, program), 0o777, "{program:?}");
        assert_eq!(left(0, program), 0o6777, "root's {program:?}");
    }
    assert!(!mounted.unmount());
    check(&image);
}
