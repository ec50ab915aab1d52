//! Images: made by mke2fs, changed by debugfs, checked by e2fsck.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use riopipe_fs_core::format::layout::Layout;
use riopipe_fs_core::format::superblock::Superblock;
use riopipe_fs_core::{BLOCK_BYTES, Block, BlockNo};
use riopipe_nvme::digest::soft;
use tempfile::TempDir;

/// An image in a directory of its own, which is deleted at the end.
pub(crate) struct Image {
    dir: TempDir,
    file: File,
}

/// The end of a program: its exit code and all its output.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) output: String,
}

impl Image {
    /// An image of `mib` MiB, sparse, with blocks of 4096 bytes and inodes of 256, made by
    /// `mke2fs -t ext4` with more options, such as `&["-O", "^64bit"]`.
    pub(crate) fn new(mib: u64, options: &[&str]) -> Self {
        let dir = TempDir::new().expect("a directory");
        let path = dir.path().join("image");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .expect("a new file");
        file.set_len(mib << 20).expect("a sparse file");
        let image = Self { dir, file };
        // A small journal keeps the tests fast.
        let mut all = vec!["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256"];
        if !options.contains(&"-J") {
            all.extend(["-J", "size=4"]);
        }
        all.extend(options);
        let path = image.path();
        all.push(path.to_str().expect("a plain path"));
        let ended = run("mke2fs", &all, None);
        assert_eq!(ended.code, 0, "mke2fs {options:?}: {}", ended.output);
        image
    }

    /// The file of the image.
    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// The directory of the image, for other files of the test.
    pub(crate) fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// Runs a program of e2fsprogs with the image as its last argument.
    pub(crate) fn tool(&self, program: &str, options: &[&str]) -> Ended {
        let path = self.path();
        let mut all = options.to_vec();
        all.push(path.to_str().expect("a plain path"));
        run(program, &all, None)
    }

    /// Runs commands of debugfs, one a line, which may write to the image.
    pub(crate) fn debugfs(&self, commands: &str) -> String {
        let script = self.dir.path().join("script");
        std::fs::write(&script, commands).expect("a script");
        let ended = self.tool("debugfs", &["-w", "-f", script.to_str().expect("a plain path")]);
        assert_eq!(ended.code, 0, "debugfs: {}", ended.output);
        ended.output
    }

    /// `e2fsck -f -n`: checks everything and changes nothing. Exit code 0 is a clean image.
    pub(crate) fn check(&self) -> Ended {
        self.tool("e2fsck", &["-f", "-n"])
    }

    /// `e2fsck -f -y`: recovers the journal, and repairs. With exit code 0 nothing was changed.
    pub(crate) fn repair(&self) -> Ended {
        self.tool("e2fsck", &["-f", "-y"])
    }

    /// Panics unless e2fsck finds nothing.
    pub(crate) fn assert_clean(&self) {
        let ended = self.check();
        assert_eq!(ended.code, 0, "e2fsck: {}", ended.output);
    }

    /// Block `at`.
    pub(crate) fn read(&self, at: BlockNo) -> Box<Block> {
        let mut block = Box::new([0; BLOCK_BYTES]);
        self.file.read_exact_at(&mut block[..], at.0 * BLOCK_BYTES as u64).expect("in the image");
        block
    }

    /// Writes block `at`.
    pub(crate) fn write(&self, at: BlockNo, block: &Block) {
        self.file.write_all_at(block, at.0 * BLOCK_BYTES as u64).expect("written");
    }

    /// The superblock.
    pub(crate) fn superblock(&self) -> Superblock {
        Superblock::decode(&self.read(BlockNo(0)), soft).expect("a superblock")
    }

    /// The layout.
    pub(crate) fn layout(&self) -> Layout {
        self.superblock().layout(soft).expect("a layout")
    }
}

/// Runs a program of e2fsprogs, from `PATH` or from `/usr/sbin`, with texts in English.
pub(crate) fn run(program: &str, arguments: &[&str], input: Option<&str>) -> Ended {
    assert!(input.is_none_or(|text| text.len() < 4096), "the text fits into a pipe");
    let start = |name: &str| {
        Command::new(name)
            .args(arguments)
            .env("LC_ALL", "C")
            // Images with equal options are equal.
            .env("E2FSPROGS_FAKE_TIME", "1700000000")
            .env("DEBUGFS_PAGER", "cat")
            .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
    };
    let mut child = match start(program) {
        Err(e) if e.kind() == ErrorKind::NotFound => start(&format!("/usr/sbin/{program}")),
        other => other,
    }
    .unwrap_or_else(|e| panic!("{program} of e2fsprogs, which scripts/setup installs: {e}"));
    if let Some(text) = input {
        use std::io::Write as _;
        child.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("written");
    }
    let Output { status, stdout, stderr } = child.wait_with_output().expect("its end");
    let output = String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr);
    Ended { code: status.code().unwrap_or(-1), output }
}
