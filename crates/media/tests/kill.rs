//! `kill -9` of a process that writes to a drive in a file: each block holds one write, whole
//! (assumption M1).

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use riopipe_media::{BLOCK_BYTES, Data, Submitted, open_drive_within};
use riopipe_platform::now_ns;

/// The variable with the specification of the drive that a writer's process writes.
const WRITER: &str = "RIO_TEST_KILLED_WRITER";
/// Number of blocks of one write. The larger it is, the more of its time a writer copies.
const BLOCKS: usize = 256;
/// Longest life of a writer's process that is not killed.
const WRITER_LIMIT: Duration = Duration::from_secs(300);

/// Each of these drives writes a block as a whole, also when its process is killed meanwhile.
#[test]
fn t8_m1_a_killed_process_leaves_whole_blocks() {
    let folder = tempfile::tempdir().unwrap();
    for (kind, spec, rounds) in [("file", "file:{}", 40), ("optane", "ssd:optane,file={}", 400_u64)]
    {
        let path = folder.path().join(kind);
        let file = std::fs::File::create_new(&path).unwrap();
        file.set_len((BLOCKS * BLOCK_BYTES) as u64).unwrap();
        let spec = spec.replace("{}", path.to_str().unwrap());
        for round in 0..rounds {
            let mut writer = Writer::start(&spec);
            let seen = first_byte(&path);
            while first_byte(&path) == seen {
                assert!(writer.0.try_wait().unwrap().is_none(), "the writer has ended by itself");
            }
            std::thread::sleep(Duration::from_micros(round * 37 % 500));
            drop(writer);
            let mut bytes = vec![0; BLOCKS * BLOCK_BYTES];
            file.read_exact_at(&mut bytes, 0).unwrap();
            for (lba, block) in bytes.chunks_exact(BLOCK_BYTES).enumerate() {
                assert!(
                    block.iter().all(|byte| *byte == block[0]),
                    "{spec}, round {round}: block {lba} holds parts of two writes"
                );
            }
        }
    }
}

/// A process of this program that writes to a drive. It is killed when this is dropped.
struct Writer(Child);

impl Writer {
    fn start(spec: &str) -> Writer {
        let mut writer = Command::new(std::env::current_exe().unwrap());
        writer.args(["--exact", "write_until_killed", "--nocapture"]).env(WRITER, spec);
        Writer(writer.stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// The first byte of a file.
fn first_byte(path: &Path) -> u8 {
    let mut byte = [0];
    std::fs::File::open(path).unwrap().read_exact_at(&mut byte, 0).unwrap();
    byte[0]
}

/// The writer's process. In the process of the tests this does nothing.
#[test]
fn write_until_killed() {
    let Ok(spec) = std::env::var(WRITER) else { return };
    // A killed process keeps its lock until its writes have ended.
    let drive = open_drive_within(&spec, Duration::from_secs(60)).unwrap();
    let mut queue = drive.open_queue(1).unwrap();
    let mut done = Vec::new();
    let begun = Instant::now();
    // Two processes in a row begin with different bytes.
    for byte in std::iter::successors(Some(now_ns() as u8), |byte| Some(byte.wrapping_add(1))) {
        let bytes = vec![byte; BLOCKS * BLOCK_BYTES];
        assert!(matches!(queue.write(0, 0, Data::Borrowed(&bytes)), Submitted::Pending));
        queue.kick(now_ns());
        while queue.in_flight() > 0 {
            queue.poll(now_ns(), &mut done);
        }
        done.drain(..).for_each(|done| assert!(done.result.is_ok()));
        assert!(begun.elapsed() < WRITER_LIMIT, "nothing has killed this process");
    }
}
