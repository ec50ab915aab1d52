use alloc::vec;

use proptest::prelude::*;

use super::*;

fn entry(subject: Subject, access: u8) -> AclEntry {
    AclEntry { subject, access: Access::from_bits_retain(access) }
}

fn list(entries: &[(Subject, u8)]) -> Acl {
    Acl::new(entries.iter().map(|(subject, access)| entry(*subject, *access)).collect())
        .expect("a valid list")
}

const FILE: Permissions = Permissions { mode: file_type::REGULAR | 0o640, uid: 10, gid: 20 };

fn caller(uid: u32, groups: &[u32]) -> Caller<'_> {
    Caller { uid, gid: 99, groups }
}

#[test]
fn the_mode_decides_without_a_list() {
    for (caller, want, granted) in [
        (caller(10, &[]), Access::READ | Access::WRITE, true),
        (caller(10, &[20]), Access::EXECUTE, false),
        (caller(11, &[20]), Access::READ, true),
        (caller(11, &[20]), Access::WRITE, false),
        (Caller { uid: 11, gid: 20, groups: &[] }, Access::READ, true),
        (caller(11, &[]), Access::READ, false),
        (caller(11, &[]), Access::empty(), true),
        (caller(0, &[]), Access::READ | Access::WRITE, true),
        (caller(0, &[]), Access::EXECUTE, false),
    ] {
        assert_eq!(may(caller, FILE, None, want), granted, "{caller:?} {want:?}");
    }
    // The owner has the bits of the owner, even if others have more.
    let odd = Permissions { mode: file_type::REGULAR | 0o007, ..FILE };
    assert!(!may(caller(10, &[20]), odd, None, Access::READ));
    assert!(!may(caller(11, &[20]), odd, None, Access::READ));
    assert!(may(caller(11, &[]), odd, None, Access::all()));
    assert!(may(caller(0, &[]), odd, None, Access::EXECUTE));
    let directory = Permissions { mode: file_type::DIRECTORY, ..FILE };
    assert!(may(caller(0, &[]), directory, None, Access::all()));
}

#[test]
fn a_list_decides_by_user_then_groups_then_others() {
    let acl = list(&[
        (Subject::Owner, 4),
        (Subject::User(30), 7),
        (Subject::User(31), 0),
        (Subject::OwningGroup, 4),
        (Subject::Group(40), 2),
        (Subject::Group(41), 6),
        (Subject::Mask, 6),
        (Subject::Other, 1),
    ]);
    let inode = Permissions { mode: file_type::REGULAR | 0o461, ..FILE };
    let (read, write, run) = (Access::READ, Access::WRITE, Access::EXECUTE);
    for (caller, want, granted) in [
        (caller(10, &[41]), read, true),
        (caller(10, &[41]), write, false),
        (caller(30, &[]), read | write, true),
        // The mask takes it.
        (caller(30, &[]), run, false),
        // A user with an entry does not get what groups and others have.
        (caller(31, &[41]), read, false),
        (caller(31, &[]), run, false),
        (caller(32, &[20]), read, true),
        (caller(32, &[20, 40]), read, true),
        (caller(32, &[20, 40]), write, true),
        // No group has both.
        (caller(32, &[20, 40]), read | write, false),
        (caller(32, &[20, 41]), read | write, true),
        // A member of a group is not one of the others.
        (caller(32, &[20]), run, false),
        (caller(32, &[]), run, true),
        (caller(32, &[]), read, false),
        (caller(0, &[]), read | write | run, true),
    ] {
        assert_eq!(may(caller, inode, Some(&acl), want), granted, "{caller:?} {want:?}");
    }
}

#[test]
fn lists_that_are_not_valid_are_refused() {
    let (owner, group, other) =
        (entry(Subject::Owner, 7), entry(Subject::OwningGroup, 5), entry(Subject::Other, 0));
    let (user, mask) = (entry(Subject::User(1), 7), entry(Subject::Mask, 7));
    for bad in [
        vec![],
        vec![owner, group],
        vec![owner, other],
        vec![group, other],
        vec![group, owner, other],
        vec![owner, owner, group, other],
        vec![owner, user, group, other],
        vec![owner, group, mask, mask, other],
        vec![owner, entry(Subject::User(u32::MAX), 7), group, mask, other],
    ] {
        assert_eq!(Acl::new(bad.clone()), Err(FsError::Invalid), "{bad:?}");
    }
    for good in [
        vec![owner, group, other],
        vec![owner, group, mask, other],
        vec![owner, user, user, group, mask, other],
    ] {
        Acl::new(good).expect("a valid list");
    }
}

#[test]
fn forms_of_user_space_that_are_damaged_are_refused() {
    assert_eq!(Acl::from_user(&[]), Err(FsError::Invalid));
    assert_eq!(Acl::from_user(&[1, 0, 0, 0]), Err(FsError::NotSupported));
    assert_eq!(Acl::from_user(&[2, 0, 0, 0]), Ok(None));
    let good = list(&[(Subject::Owner, 7), (Subject::OwningGroup, 5), (Subject::Other, 1)]);
    let raw = good.to_user();
    assert_eq!(raw.len(), 4 + 3 * 8);
    for len in 5..raw.len() {
        assert_eq!(Acl::from_user(&raw[..len]), Err(FsError::Invalid), "{len}");
    }
    for (at, byte) in [(4, 3), (5, 1), (6, 8), (7, 1)] {
        let mut bad = raw.clone();
        bad[at] = byte;
        assert_eq!(Acl::from_user(&bad), Err(FsError::Invalid), "{at}");
    }
    assert_eq!(Acl::from_disk(&[]), Some(None));
    assert_eq!(Acl::from_disk(&[1, 0, 0, 0]), Some(None));
    assert_eq!(Acl::from_disk(&[2, 0, 0, 0]), None);
    assert_eq!(Acl::from_disk(&[1, 0, 0]), None);
    let raw = good.to_disk();
    assert_eq!(raw.len(), 4 + 3 * 4);
    for len in 5..raw.len() {
        assert_eq!(Acl::from_disk(&raw[..len]), None, "{len}");
    }
}

#[test]
fn new_files_inherit_the_default_list() {
    // Without users and groups, the modes are combined, and no list is stored.
    let plain = list(&[(Subject::Owner, 7), (Subject::OwningGroup, 5), (Subject::Other, 1)]);
    let mode = file_type::REGULAR | 0o1666;
    assert_eq!(plain.inherit(mode), (file_type::REGULAR | 0o1640, None));
    let more = list(&[
        (Subject::Owner, 7),
        (Subject::User(30), 7),
        (Subject::OwningGroup, 7),
        (Subject::Mask, 7),
        (Subject::Other, 5),
    ]);
    let wanted = list(&[
        (Subject::Owner, 6),
        (Subject::User(30), 7),
        (Subject::OwningGroup, 7),
        (Subject::Mask, 4),
        (Subject::Other, 0),
    ]);
    let mode = file_type::REGULAR | 0o640;
    assert_eq!(more.inherit(mode), (mode, Some(wanted)));
}

fn acl() -> impl Strategy<Value = Acl> {
    let ids = || prop::collection::vec((0..50_u32, 0..8_u8), 0..4);
    (ids(), ids(), any::<bool>(), [0..8_u8, 0..8_u8, 0..8_u8, 0..8_u8]).prop_map(
        |(users, groups, mask, [owner, group, most, other])| {
            let mask = mask || !users.is_empty() || !groups.is_empty();
            let mut all = vec![entry(Subject::Owner, owner)];
            all.extend(users.into_iter().map(|(id, access)| entry(Subject::User(id), access)));
            all.push(entry(Subject::OwningGroup, group));
            all.extend(groups.into_iter().map(|(id, access)| entry(Subject::Group(id), access)));
            all.extend(mask.then(|| entry(Subject::Mask, most)));
            all.push(entry(Subject::Other, other));
            Acl::new(all).expect("a valid list")
        },
    )
}

proptest! {
    #[test]
    fn forms_are_read_as_they_were_written(acl in acl()) {
        prop_assert_eq!(Acl::from_user(&acl.to_user()), Ok(Some(acl.clone())));
        prop_assert_eq!(Acl::from_disk(&acl.to_disk()), Some(Some(acl)));
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
        let _ = Acl::from_user(&[&[2, 0, 0, 0], &bytes[..]].concat());
        let _ = Acl::from_disk(&[&[1, 0, 0, 0], &bytes[..]].concat());
        let _ = Acl::from_user(&bytes);
        let _ = Acl::from_disk(&bytes);
    }

    #[test]
    fn chmod_sets_the_mode(acl in acl(), mode in 0..0o1000_u16) {
        let mut changed = acl.clone();
        changed.chmod(mode);
        prop_assert_eq!(changed.mode(), mode);
        prop_assert!(Acl::new(changed.entries().to_vec()).is_ok());
        prop_assert_eq!(changed.is_mode(), acl.is_mode());
    }

    /// A list that the mode expresses allows what the mode allows.
    #[test]
    fn a_plain_list_is_the_mode(
        mode in 0..0o1000_u16, uid in 8..12_u32, group in 18..22_u32, want in 0..8_u8,
    ) {
        let acl = list(&[
            (Subject::Owner, (mode >> 6) as u8 & 7),
            (Subject::OwningGroup, (mode >> 3) as u8 & 7),
            (Subject::Other, mode as u8 & 7),
        ]);
        prop_assert!(acl.is_mode() && acl.mode() == mode);
        let inode = Permissions { mode: file_type::REGULAR | mode, uid: 10, gid: 20 };
        let (groups, want) = ([group], Access::from_bits_retain(want));
        let caller = Caller { uid, gid: 99, groups: &groups };
        let by_list = may(caller, inode, Some(&acl), want);
        prop_assert_eq!(by_list, may(caller, inode, None, want));
    }
}
