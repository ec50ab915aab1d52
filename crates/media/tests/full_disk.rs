//! Full disks. This is a process of its own, since it limits the size of its files.

use std::path::Path;

use riopipe_media::{BLOCK_BYTES, Blocking, Cause, OpenError, open_drive, open_log};

/// The checks for a file system with `space` bytes left, but not twice as many.
fn fills_up(dir: &Path, space: u64) {
    let path = dir.join("drive");
    let name = path.display();
    for io in ["uring", "threads"] {
        // Space reserved first: refused at once, and no file remains.
        let refused = open_drive(&format!("file:{name},size={},io={io}", 2 * space)).err().unwrap();
        assert!(matches!(refused, OpenError::Os { .. }), "{refused}");
        let text = refused.to_string();
        assert!(text.contains("reserve its space"), "{text}");
        assert!(text.contains("smaller size") || text.contains("over a limit"), "{text}");
        assert!(!path.exists(), "an unfinished file remains");

        // Space not reserved: the write that finds no space fails, the others succeed.
        let spec = format!("file:{name},size={},sparse,io={io}", 2 * space);
        let drive = match open_drive(&spec) {
            Ok(drive) => drive,
            // Under RLIMIT_FSIZE even a hole is too long.
            Err(OpenError::Os { .. }) => continue,
            Err(error) => panic!("{error}"),
        };
        let mut queue = Blocking::new(&*drive).unwrap();
        queue.write(0, &[1; BLOCK_BYTES]).unwrap();
        let blocks = drive.geometry().blocks;
        let (lba, error) = (1..blocks)
            .find_map(|lba| Some((lba, queue.write(lba, &[2; BLOCK_BYTES]).err()?)))
            .expect("a full disk fails a write");
        assert!(matches!(error.cause(), Cause::NoSpace(_)), "{error}");
        assert!(error.to_string().contains("free space there"), "{error}");
        assert_eq!(queue.read(0, 1).unwrap()[..], [1; BLOCK_BYTES]);
        // Recovery can undo the write.
        queue.write_zeroes(lba, 1).unwrap();
        assert_eq!(queue.read(lba, 1).unwrap()[..], [0; BLOCK_BYTES]);
        drop((queue, drive));
        std::fs::remove_file(&path).unwrap();
    }
    modelled_fills_up(&path, space);
    let log = open_log(&format!("file:{name},size={}", 2 * space)).err().unwrap();
    assert!(log.to_string().contains("reserve its space"), "{log}");
}

/// A modelled drive in an existing file, whose space is not reserved.
fn modelled_fills_up(path: &Path, space: u64) {
    for profile in ["flash", "optane"] {
        let file = std::fs::File::create_new(path).unwrap();
        if file.set_len(2 * space).is_err() {
            // Under RLIMIT_FSIZE even a hole is too long.
            return std::fs::remove_file(path).unwrap();
        }
        let drive = open_drive(&format!("ssd:{profile},file={}", path.display())).unwrap();
        let mut queue = Blocking::new(&*drive).unwrap();
        queue.write(0, &[1; BLOCK_BYTES]).unwrap();
        let (lba, error) = (1..drive.geometry().blocks)
            .find_map(|lba| Some((lba, queue.write(lba, &[2; BLOCK_BYTES]).err()?)))
            .expect("a full disk fails a write");
        assert!(matches!(error.cause(), Cause::NoSpace(_)), "{error}");
        assert_eq!(queue.read(0, 1).unwrap()[..], [1; BLOCK_BYTES]);
        queue.write_zeroes(lba, 1).unwrap();
        queue.deallocate(lba, 1).unwrap();
        assert_eq!(queue.read(lba, 1).unwrap()[..], [0; BLOCK_BYTES]);
        drop((queue, drive));
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_full_file_system() {
    let dir = tempfile::tempdir().unwrap();
    // A mount of this thread's own; without the right to mount, the other test remains.
    let mounted = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                if let Err(error) = mount_small(dir.path()) {
                    eprintln!("not tested, can't mount a small file system: {error}");
                    return;
                }
                fills_up(dir.path(), 128 << 10);
            })
            .join()
    });
    mounted.unwrap();
}

#[test]
fn a_limit_on_the_size_of_files() {
    let dir = tempfile::tempdir().unwrap();
    let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
    // SAFETY: a valid limit. The signal's default would end the process; a server ignores it.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0);
    }
    fills_up(dir.path(), 1 << 20);

    // An existing file that is long enough, of which only the first part may be written.
    let path = dir.path().join("long");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let drive = open_drive(&format!("file:{}", path.display())).unwrap();
    Blocking::new(&*drive).unwrap().write(255, &[1; BLOCK_BYTES]).unwrap();
}

fn mount_small(at: &Path) -> std::io::Result<()> {
    let at = std::ffi::CString::new(at.to_str().unwrap()).unwrap();
    let check = |code| match code {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    };
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    let null = std::ptr::null();
    // SAFETY: all strings end in zero. The mount is visible to this thread only.
    unsafe {
        check(libc::unshare(libc::CLONE_NEWNS))?;
        check(libc::mount(null, c"/".as_ptr(), null, flags, null.cast()))?;
        let (kind, options) = (c"tmpfs".as_ptr(), c"size=128k".as_ptr());
        check(libc::mount(kind, at.as_ptr(), kind, 0, options.cast()))
    }
}
