//! Faults under a drive, and the errors with which the drive answers.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use riopipe_media::{
    BLOCK_BYTES, Blocking, Cause, Data, Gone, IoError, OpenError, Submitted, open_drive,
};
use riopipe_platform::now_ns;

/// The specifications of drives in a file, in each mode.
fn specs(path: &Path) -> [String; 3] {
    let path = path.display();
    [
        format!("file:{path},size=1M"),
        format!("file:{path},size=1M,io=threads"),
        format!("ssd:flash,size=1M,file={path}"),
    ]
}

fn scratch() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("drive");
    (dir, path)
}

fn gone(error: &IoError) -> Option<Gone> {
    match error.cause() {
        Cause::Vanished(gone) => Some(*gone),
        _ => None,
    }
}

#[test]
fn a_second_server_is_refused() {
    // T8. The lock lasts until the last queue is dropped.
    let (_dir, path) = scratch();
    for spec in specs(&path) {
        let drive = open_drive(&spec).unwrap();
        let refused = open_drive(&spec).err().unwrap();
        assert!(matches!(refused, OpenError::Locked { .. }), "{refused}");
        assert!(refused.to_string().contains("stop the other one first"), "{refused}");
        let queue = drive.open_queue(1).unwrap();
        drop(drive);
        assert!(open_drive(&spec).is_err(), "a queue still uses it");
        drop(queue);
        open_drive(&spec).unwrap();
    }
    let modelled = format!("ssd:flash,file={},size=1M", path.display());
    let _drive = open_drive(&modelled).unwrap();
    assert!(matches!(open_drive(&modelled).err(), Some(OpenError::Locked { .. })));
}

#[test]
fn a_flush_of_a_deleted_file_fails() {
    let (_dir, path) = scratch();
    for spec in specs(&path) {
        let drive = open_drive(&spec).unwrap();
        let mut queue = Blocking::new(&*drive).unwrap();
        queue.write(0, &[1; BLOCK_BYTES]).unwrap();
        queue.flush().unwrap();
        std::fs::remove_file(&path).unwrap();
        let error = queue.flush().unwrap_err();
        assert_eq!(gone(&error), Some(Gone::Deleted), "{error}");
        let error = queue.write(0, &[1; BLOCK_BYTES]).unwrap_err();
        assert_eq!(gone(&error), Some(Gone::Deleted), "{error}");
        assert!(error.to_string().contains("bring the medium back"), "{error}");
    }
}

#[test]
fn a_replaced_file_is_noticed_without_a_flush() {
    let (dir, path) = scratch();
    for spec in specs(&path) {
        let drive = open_drive(&spec).unwrap();
        let mut queue = drive.open_queue(1).unwrap();
        let other = dir.path().join("other");
        std::fs::write(&other, [0; BLOCK_BYTES]).unwrap();
        std::fs::rename(&other, &path).unwrap();
        // Time is an argument: a busy queue checks again once enough of it has passed.
        let mut later = now_ns();
        let refused = (0..3).find_map(|op| {
            let data = Data::Borrowed(&[1; BLOCK_BYTES]);
            match queue.write(op, 0, data) {
                Submitted::Done(result) => return result.err(),
                Submitted::Pending => queue.kick(now_ns()),
            }
            let mut done = Vec::new();
            while queue.in_flight() > 0 {
                later += 1_000_000_000;
                queue.poll(later, &mut done);
            }
            done.pop().unwrap().result.err()
        });
        assert_eq!(refused.as_ref().and_then(gone), Some(Gone::Deleted));
        drop((queue, drive));
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_file_cut_short_is_noticed() {
    let (_dir, path) = scratch();
    for spec in specs(&path) {
        let drive = open_drive(&spec).unwrap();
        let mut queue = Blocking::new(&*drive).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(64 * BLOCK_BYTES as u64).unwrap();
        let cut = Some(Gone::Truncated { bytes: 64 * BLOCK_BYTES as u64 });
        queue.read(63, 1).unwrap();
        let error = queue.read(63, 2).unwrap_err();
        assert_eq!(gone(&error), cut, "{error}");
        let error = queue.flush().unwrap_err();
        assert_eq!(gone(&error), cut, "{error}");
        drop((queue, drive));
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_file_of_another_size_is_refused() {
    let (_dir, path) = scratch();
    let name = path.display();
    assert!(matches!(
        open_drive(&format!("file:{name}")).err(),
        Some(OpenError::NoSuchFile { .. })
    ));
    for (bytes, spec) in [
        (8192, format!("file:{name},size=1M")),
        (2 << 20, format!("file:{name},size=1M")),
        (5000, format!("file:{name}")),
        (0, format!("file:{name}")),
        (8192, format!("ssd:flash,file={name},size=1M")),
    ] {
        std::fs::write(&path, vec![7; bytes]).unwrap();
        let refused = open_drive(&spec).err().unwrap();
        assert!(matches!(refused, OpenError::Size { .. }), "{refused}");
        assert_eq!(std::fs::read(&path).unwrap(), vec![7; bytes], "left alone");
    }
    std::fs::write(&path, vec![7; 8192]).unwrap();
    let drive = open_drive(&format!("file:{name}")).unwrap();
    assert_eq!(drive.geometry().blocks, 2);
    assert_eq!(Blocking::new(&*drive).unwrap().read(1, 1).unwrap()[..], [7; 4096]);
}

#[test]
fn other_kinds_of_file_are_refused_by_name() {
    let (dir, path) = scratch();
    let directory = dir.path().display();
    std::fs::write(&path, [0; BLOCK_BYTES]).unwrap();
    for (spec, words) in [
        (format!("file:{directory}"), "directory"),
        ("file:/dev/null".to_owned(), "not a regular file"),
        (format!("file:{directory}/no/such/place,size=1M"), "No such file"),
        (format!("block:{}", path.display()), "for a file write file:"),
        ("block:/dev/null".to_owned(), "not a block device"),
    ] {
        let text = open_drive(&spec).err().unwrap().to_string();
        assert!(text.contains(words), "{spec}: {text}");
    }
}

/// The default seccomp profiles of containers answer io_uring_setup with EPERM; so does this one,
/// for the thread that installs it.
#[test]
#[cfg(target_arch = "x86_64")]
fn threads_replace_a_forbidden_io_uring() {
    let (_dir, path) = scratch();
    let [spec, ..] = specs(&path);
    let allowed = open_drive(&spec).unwrap().geometry().describe.clone();
    std::thread::spawn(move || {
        forbid_io_uring();
        let drive = open_drive(&spec).unwrap();
        assert!(drive.geometry().describe.contains("threads"), "{}", drive.geometry().describe);
        let mut queue = Blocking::new(&*drive).unwrap();
        queue.write(3, &[5; BLOCK_BYTES]).unwrap();
        queue.flush().unwrap();
        assert_eq!(queue.read(3, 1).unwrap()[..], [5; BLOCK_BYTES]);
    })
    .join()
    .unwrap();
    if !allowed.contains("io_uring") {
        eprintln!("io_uring is forbidden on this machine anyway: {allowed}");
    }
}

#[cfg(target_arch = "x86_64")]
fn forbid_io_uring() {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        step(LOAD, 0, 0, 0),
        step(EQUAL, 0, 1, libc::SYS_io_uring_setup as u32),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program is valid for the call, and only restricts this thread.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter), 0);
    }
}
