//! The whole way as a user other than root.
//!
//! If the tests run as root, the program runs as the user with number 65534. The reason why a test does nothing is
//! printed.

use std::{
    fs::{self, File},
    os::unix::fs::chown,
    path::Path,
    process::{Command, Stdio},
};

use tempfile::TempDir;

use crate::{
    fs_life::check_with_e2fsck,
    site::{Done, finish, rio_in},
};

/// The user and the group that owns nothing on any machine.
const USER: u32 = 65_534;

/// A folder of a user, with the program.
struct User {
    folder: TempDir,
    is_other: bool,
}

impl User {
    /// `None`: it is not possible here.
    fn new() -> Option<Self> {
        let has = |program: &str, argument: &str| {
            let output = Command::new(program).arg(argument).output();
            output.is_ok_and(|output| output.status.success())
        };
        if !has("fusermount3", "--version") {
            eprintln!("skipped: fusermount3 is missing (apt-get install fuse3)");
            return None;
        }
        let is_root =
            fs::metadata("/proc/self").map(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0);
        let is_other = is_root.unwrap();
        if is_other && !has("setpriv", "--version") {
            eprintln!("skipped: setpriv is missing, by which root runs programs as another user");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let user = Self { folder, is_other };
        // Another user may not be able to reach the program where it is.
        fs::copy(env!("CARGO_BIN_EXE_rio"), user.path().join("rio")).unwrap();
        fs::create_dir(user.path().join("mnt")).unwrap();
        if is_other {
            for path in [user.path(), &user.path().join("mnt")] {
                chown(path, Some(USER), Some(USER)).unwrap();
            }
        }
        if user.run("test", &["-w", "/dev/fuse"]).code != 0 {
            eprintln!("skipped: the user may not use /dev/fuse");
            return None;
        }
        Some(user)
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Runs a program as the user.
    fn run(&self, program: &str, words: &[&str]) -> Done {
        let mut command = match self.is_other {
            true => {
                let mut command = Command::new("setpriv");
                command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
                command.arg(program);
                command
            }
            false => Command::new(program),
        };
        command.args(words).current_dir(self.path()).env("RIO_VOLUMES", "");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        finish(command.spawn().unwrap())
    }

    /// `rio fs …`
    fn fs(&self, words: &[&str]) -> Done {
        self.run("./rio", &[&["fs"], words, &["-o", "json"]].concat())
    }

    fn shell(&self, script: &str) -> Done {
        self.run("sh", &["-ec", script])
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // After a test that has failed.
        let mnt = self.path().join("mnt");
        let _ = Command::new("umount").args(["-q", "-l"]).arg(mnt).stderr(Stdio::null()).status();
    }
}

#[test]
fn a_user_makes_mounts_uses_and_checks_a_file_system() {
    let Some(user) = User::new() else { return };
    // A comma separates the options of fusermount3.
    let image = "disk, 1.img";
    user.fs(&["mkfs", image, "--size", "128M"]).ok();
    let mount = ["mount", image, "mnt", "--daemon", "--log", "log"];
    user.fs(&mount).ok();
    let done = user.shell(
        "mkdir mnt/folder; echo content > mnt/folder/file; sync mnt/folder/file; \
         ln -s file mnt/folder/link; mv mnt/folder/file mnt/folder/moved; chmod 600 mnt/folder/moved",
    );
    assert_eq!(done.code, 0, "{done:?}");
    let options = user.shell("grep \" $(pwd)/mnt fuse.riofs\" /proc/mounts").stdout;
    assert!(options.contains("nodev") && options.contains("nosuid"), "{options}");
    let done = user.shell("mknod mnt/null c 1 3");
    assert!(done.stderr.contains("Operation not permitted"), "{done:?}");
    let stat = user.fs(&["stat", "mnt"]).ok();
    assert_eq!((&stat["state"], &stat["fsyncs"]), (&"mounted".into(), &1.into()));
    if user.is_other {
        // Root can't read the mount, but may ask for its figures.
        assert!(fs::read_dir(user.path().join("mnt")).is_err());
        let asked = rio_in(user.path(), &["fs", "stat", image, "-o", "json"]).ok();
        assert_eq!(asked["mounted_unix_ms"], stat["mounted_unix_ms"]);
    }
    user.fs(&["umount", "mnt"]).ok();
    assert!(!user.path().join("disk, 1.img.rio").exists());
    check_with_e2fsck(&user.path().join(image));
    assert_eq!(user.fs(&["fsck", image]).ok()["clean"], true);
    user.fs(&mount).ok();
    let text = user.shell("cat mnt/folder/moved; stat -c %u mnt mnt/folder").stdout;
    assert!(text.starts_with("content\n"), "{text}");
    assert!(!user.is_other || text == "content\n65534\n65534\n", "{text}");
    user.fs(&["umount", image]).ok();
}

#[test]
fn a_user_unmounts_what_is_in_use_by_force_only() {
    let Some(user) = User::new() else { return };
    user.fs(&["mkfs", "disk.img", "--size", "128M"]).ok();
    user.fs(&["mount", "disk.img", "mnt", "--daemon", "--log", "log"]).ok();
    let done = user.shell(
        "exec 3> mnt/file; echo written >&3; ./rio fs umount mnt && exit 1; echo more >&3; \
         ./rio fs umount mnt --force; echo late >&3 && exit 2; exit 0",
    );
    assert_eq!(done.code, 0, "{done:?}");
    assert!(done.stderr.contains("is in use"), "{done:?}");
    check_with_e2fsck(&user.path().join("disk.img"));
    user.fs(&["mount", "disk.img", "mnt", "--daemon", "--log", "log"]).ok();
    assert_eq!(user.shell("cat mnt/file").stdout, "written\nmore\n");
    user.fs(&["umount", "mnt"]).ok();
}

#[test]
fn a_user_needs_fusermount3_and_a_directory_of_its_own() {
    let Some(user) = User::new() else { return };
    user.fs(&["mkfs", "disk.img", "--size", "128M"]).ok();
    let script = "PATH=/nothing exec ./rio fs mount disk.img mnt --daemon --log log -o json";
    // The program is searched for on the path, and then in the usual places.
    let done = user.shell(script);
    match done.code {
        0 => drop(user.fs(&["umount", "mnt"]).ok()),
        _ => drop(done.failed(1, &["fusermount3", "apt-get install fuse3"])),
    }
    user.fs(&["mount", "disk.img", "/", "--daemon", "--log", "log"])
        .failed(1, &["can't mount on /"]);
    if user.is_other {
        File::create(user.path().join("root.img")).unwrap().set_len(1 << 20).unwrap();
        user.fs(&["mount", "root.img", "mnt"]).failed(7, &["root.img", "needs permission"]);
    }
    assert_eq!(user.fs(&["stat", "disk.img"]).ok()["state"], "unmounted");
}
