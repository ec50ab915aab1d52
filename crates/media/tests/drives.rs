//! Every kind of drive must pass the same calls. `block:` is among them if this process may attach
//! a loop device.

mod common;

use std::sync::Arc;

use riopipe_media::{
    AlignedBuf, BLOCK_BYTES, BLOCKS_MAX, Blocking, Cause, Data, Done, Drive, JoinedDrive,
    OpenError, Queue, Submitted, open_drive,
};
use riopipe_platform::now_ns;

use common::LoopDevice;

const BLOCKS: u64 = 1024;

/// A drive of each kind that this machine has.
struct Drives {
    all: Vec<(String, Arc<dyn Drive>)>,
    /// The device is detached before the directory is deleted.
    _device: Option<LoopDevice>,
    _dirs: Vec<tempfile::TempDir>,
}

impl Drives {
    fn open() -> Drives {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().display().to_string();
        let mut dirs = vec![dir];
        let mut specs = vec![
            "mem:4M".to_owned(),
            "mem:4M,lazy".to_owned(),
            format!("file:{path}/uring,size=4M"),
            format!("file:{path}/threads,size=4M,io=threads"),
            format!("file:{path}/sparse,size=4M,sparse"),
            format!("file:{path}/sparse-threads,size=4M,sparse,io=threads"),
            "ssd:flash,size=4M,lazy".to_owned(),
            "ssd:optane,size=4M".to_owned(),
            "ssd:flash,size=4M,order=barrier".to_owned(),
            "ssd:optane,size=4M,order=op".to_owned(),
            format!("ssd:flash,size=4M,file={path}/flash"),
            format!("ssd:flash,size=4M,order=op,file={path}/op"),
            format!("ssd:optane,size=4M,file={path}/optane"),
        ];
        // A file system without FALLOC_FL_ZERO_RANGE, and without direct I/O before Linux 6.6.
        if let Ok(dir) = tempfile::tempdir_in("/dev/shm") {
            let path = dir.path().display();
            specs.push(format!("file:{path}/uring,size=4M"));
            specs.push(format!("file:{path}/threads,size=4M,io=threads"));
            dirs.push(dir);
        }
        let device = LoopDevice::over(&format!("{path}/under-the-device"), BLOCKS);
        if let Some(device) = &device {
            let name = device.name();
            specs.push(format!("block:{name}"));
        }
        let open = |spec: &str| open_drive(spec).unwrap_or_else(|error| panic!("{spec}: {error}"));
        let head = open(&format!("file:{path}/head,size=512K"));
        let body = open(&format!("file:{path}/body,size=3584K"));
        let joined: Arc<dyn Drive> = Arc::new(JoinedDrive::new(head, body));
        let all = specs
            .into_iter()
            .map(|spec| {
                let drive = open(&spec);
                (spec, drive)
            })
            .chain([("joined".to_owned(), joined)])
            .collect();
        Drives { all, _device: device, _dirs: dirs }
    }
}

fn pattern(seed: u64, blocks: u64) -> Vec<u8> {
    (0..blocks as usize * BLOCK_BYTES)
        .map(|i| (i as u64 / 8).wrapping_mul(0x9e37_79b9).wrapping_add(seed) as u8)
        .collect()
}

/// Waits for all operations in flight.
fn drain(queue: &mut dyn Queue) -> Vec<Done> {
    let mut done = Vec::new();
    queue.kick(now_ns());
    while queue.in_flight() > 0 {
        queue.poll(now_ns(), &mut done);
        std::thread::yield_now();
    }
    done
}

#[test]
fn a_write_is_read_back_and_adjacent_blocks_are_untouched() {
    let drives = Drives::open();
    for (name, drive) in &drives.all {
        assert_eq!(drive.geometry().blocks, BLOCKS, "{name}");
        assert_eq!(drive.geometry().plp(), !drive.geometry().volatile_cache);
        assert!(!drive.geometry().describe.is_empty(), "{name}");
        let mut drive = Blocking::new(&**drive).unwrap();
        assert!(drive.read(0, 8).unwrap().iter().all(|b| *b == 0), "{name}: starts as zeroes");
        for (lba, blocks) in [(0, 1), (1, 7), (BLOCKS - 3, 3), (100, 300)] {
            drive.write(lba, &pattern(lba, blocks)).unwrap();
        }
        drive.write(150, &pattern(7, 1)).unwrap();
        drive.flush().unwrap();
        assert_eq!(drive.read(0, 1).unwrap()[..], pattern(0, 1), "{name}");
        assert_eq!(drive.read(1, 7).unwrap()[..], pattern(1, 7), "{name}");
        assert_eq!(drive.read(BLOCKS - 3, 3).unwrap()[..], pattern(BLOCKS - 3, 3), "{name}");
        let mut expected = pattern(100, 300);
        expected[50 * BLOCK_BYTES..51 * BLOCK_BYTES].copy_from_slice(&pattern(7, 1));
        assert_eq!(drive.read(100, 300).unwrap()[..], expected, "{name}");
        for untouched in [8, 99, 400, BLOCKS - 4] {
            let block = drive.read(untouched, 1).unwrap();
            assert!(block.iter().all(|b| *b == 0), "{name}: block {untouched}");
        }
    }
}

#[test]
fn zeroed_and_deallocated_blocks_read_as_zeroes() {
    // T10.
    let drives = Drives::open();
    for (name, drive) in &drives.all {
        let mut drive = Blocking::new(&**drive).unwrap();
        for lba in [0, BLOCKS / 2] {
            drive.write(lba, &pattern(1, BLOCKS / 2)).unwrap();
        }
        drive.flush().unwrap();
        drive.write_zeroes(10, 5).unwrap();
        drive.deallocate(20, 700).unwrap();
        drive.deallocate(800, 1).unwrap();
        for lba in 0..BLOCKS {
            let zero = (10..15).contains(&lba) || (20..720).contains(&lba) || lba == 800;
            let block = drive.read(lba, 1).unwrap();
            assert_eq!(block.iter().all(|b| *b == 0), zero, "{name}: block {lba}");
        }
        drive.write(25, &pattern(3, 2)).unwrap();
        assert_eq!(drive.read(25, 2).unwrap()[..], pattern(3, 2), "{name}: written again");
    }
}

/// The size is needed at the first start only, and the space is that of the first start.
#[test]
fn a_file_that_is_served_again_is_described_as_reserved() {
    let dir = tempfile::tempdir().unwrap();
    let spec = format!("file:{}", dir.path().join("drive").display());
    let is_reserved = |options: &str| {
        let drive = open_drive(&format!("{spec}{options}")).unwrap();
        Blocking::new(&*drive).unwrap().deallocate(0, 256).unwrap();
        !drive.geometry().describe.contains("space not reserved")
    };
    for options in [",size=1M", "", ""] {
        assert!(is_reserved(options), "{options:?}");
    }
    assert!(!is_reserved(",sparse"));
    assert!(!is_reserved(""), "it has a hole now");
}

#[test]
fn many_in_flight_all_come_back_once_with_the_right_data() {
    let drives = Drives::open();
    for (name, drive) in &drives.all {
        let mut queue = drive.open_queue(64).unwrap();
        for round in 0..4 {
            let mut pending = 0;
            for op in 0..64 {
                let lba = (op * 13 + round) % BLOCKS;
                let bytes = pattern(lba, 1);
                let data = match op % 2 {
                    0 => Data::Borrowed(&bytes),
                    _ => Data::Owned(AlignedBuf::copy_of(&bytes)),
                };
                match queue.write(op, lba, data) {
                    Submitted::Pending => pending += 1,
                    Submitted::Done(result) => assert!(result.unwrap().is_none()),
                }
            }
            assert_eq!(queue.in_flight(), pending, "{name}");
            let mut ops: Vec<_> = drain(&mut *queue)
                .into_iter()
                .map(|done| (done.op, done.result.unwrap().is_none()).0)
                .collect();
            ops.sort_unstable();
            assert_eq!(ops, (64 - pending as u64..64).collect::<Vec<_>>(), "{name}");
            for op in 0..64 {
                let lba = (op * 13 + round) % BLOCKS;
                if let Submitted::Done(result) = queue.read(lba, lba, 1) {
                    assert_eq!(result.unwrap().unwrap()[..], pattern(lba, 1), "{name}");
                }
            }
            for done in drain(&mut *queue) {
                let buf = done.result.unwrap().unwrap();
                assert_eq!(buf[..], pattern(done.op, 1), "{name}: block {}", done.op);
            }
        }
    }
}

#[test]
fn blocks_beyond_the_drive_are_refused_and_nothing_is_touched() {
    let drives = Drives::open();
    for (name, drive) in &drives.all {
        let block = pattern(9, 1);
        let mut drive = Blocking::new(&**drive).unwrap();
        let out_of_range = Cause::OutOfRange { capacity: BLOCKS };
        for (lba, blocks) in [(BLOCKS, 1), (BLOCKS - 1, 2), (u64::MAX, 1), (u64::MAX - 1, 2)] {
            let bytes = pattern(9, blocks);
            let errors = [
                drive.write(lba, &bytes).unwrap_err(),
                drive.read(lba, blocks).unwrap_err(),
                drive.write_zeroes(lba, blocks).unwrap_err(),
                drive.deallocate(lba, blocks).unwrap_err(),
            ];
            for error in errors {
                assert_eq!(error.cause(), &out_of_range, "{name}: {error}");
            }
        }
        assert_eq!(drive.write_zeroes(0, u64::MAX).unwrap_err().cause(), &out_of_range, "{name}");
        for bytes in [&block[..0], &block[..512], &block[..4095]] {
            let error = drive.write(0, bytes).unwrap_err();
            assert!(matches!(error.cause(), Cause::BadLength { .. }), "{name}: {error}");
        }
        for blocks in [0, BLOCKS_MAX + 1, u64::MAX] {
            let error = drive.read(0, blocks).unwrap_err();
            assert!(matches!(error.cause(), Cause::BadLength { .. }), "{name}: {error}");
        }
        assert!(drive.read(BLOCKS - 1, 1).unwrap().iter().all(|b| *b == 0), "{name}");
    }
}

#[test]
fn one_more_than_the_depth_is_refused() {
    let drives = Drives::open();
    for (name, drive) in &drives.all {
        let mut queue = drive.open_queue(2).unwrap();
        let block = pattern(1, 1);
        let mut results = Vec::new();
        for op in 0..3 {
            results.push(queue.write(op, BLOCKS / 2 + op, Data::Borrowed(&block)));
        }
        match &results[..] {
            // `mem:` never has operations in flight.
            [Submitted::Done(Ok(None)), Submitted::Done(Ok(None)), Submitted::Done(Ok(None))] => {
                assert!(name.starts_with("mem"), "{name}");
            }
            [Submitted::Pending, Submitted::Pending, Submitted::Done(Err(error))] => {
                assert_eq!(error.cause(), &Cause::QueueFull { depth: 2 }, "{name}");
            }
            other => panic!("{name}: {other:?}"),
        }
        drain(&mut *queue);
        assert!(
            !matches!(queue.flush(9), Submitted::Done(Err(_))),
            "{name}: a place is free again"
        );
        drain(&mut *queue);
    }
}

#[test]
fn a_dropped_queue_has_finished_what_was_in_flight() {
    // T8: no write may land after its file has been unlocked.
    let drives = Drives::open();
    for (name, drive) in &drives.all {
        let per_op = BLOCKS / 16;
        let mut queue = drive.open_queue(16).unwrap();
        for op in 0..16 {
            let bytes = AlignedBuf::copy_of(&pattern(op, per_op));
            let _ = queue.write(op, op * per_op, Data::Owned(bytes));
        }
        queue.kick(now_ns());
        drop(queue);
        let mut drive = Blocking::new(&**drive).unwrap();
        for op in (0..16).rev() {
            let there = drive.read(op * per_op, per_op).unwrap();
            assert!(there[..] == pattern(op, per_op), "{name}: write {op}");
        }
    }
}

#[test]
fn a_queue_may_move_before_its_first_use_and_end_anywhere() {
    let drives = Drives::open();
    for (name, drive) in &drives.all {
        let mut queue = drive.open_queue(4).unwrap();
        let queue = std::thread::spawn(move || {
            let _ = queue.write(1, 1, Data::Owned(AlignedBuf::copy_of(&pattern(1, 1))));
            drain(&mut *queue);
            // Still in flight when the queue is dropped.
            let _ = queue.write(2, 2, Data::Owned(AlignedBuf::copy_of(&pattern(2, 1))));
            queue.kick(now_ns());
            queue
        });
        drop(queue.join().unwrap());
        let mut drive = Blocking::new(&**drive).unwrap();
        assert_eq!(drive.read(1, 1).unwrap()[..], pattern(1, 1), "{name}");
    }
}

#[test]
fn several_threads_share_a_drive_and_blocks_are_never_torn() {
    // M1, as far as a process can observe it.
    let drives = Drives::open();
    for (name, drive) in &drives.all {
        if !drive.geometry().atomic_block {
            continue;
        }
        std::thread::scope(|scope| {
            for thread in 0..3u8 {
                scope.spawn(move || {
                    let mut drive = Blocking::new(&**drive).unwrap();
                    // A copy in memory takes 0.2 µs: many attempts, to meet the middle of one.
                    let tries = if name.starts_with("mem") { 30_000 } else { 200 };
                    for i in 0..tries {
                        let lba = i % 2;
                        drive.write(lba, &[thread + 1; BLOCK_BYTES]).unwrap();
                        let block = drive.read(lba, 1).unwrap();
                        assert!(block.iter().all(|b| *b == block[0]), "{name}: torn");
                    }
                });
            }
        });
    }
}

/// The next queue reads the writes of the only queue, also if that one ended on another thread.
#[test]
fn an_only_queue_works_like_any_other() {
    let drives = Drives::open();
    for (name, drive) in &drives.all {
        let mut queue = drive.open_only_queue(4).unwrap();
        for (lba, blocks) in [(3, 1), (40, 9)] {
            let data = pattern(lba, blocks);
            let written = queue.write(lba, lba, Data::Borrowed(&data));
            let done = drain(&mut *queue);
            let result = match written {
                Submitted::Done(result) => result,
                Submitted::Pending => done.into_iter().next().unwrap().result,
            };
            assert!(result.is_ok(), "{name}: {result:?}");
        }
        let zeroed = queue.write_zeroes(1, 42, 2);
        let _ = (zeroed, drain(&mut *queue));
        std::thread::spawn(move || drop(queue)).join().unwrap();

        let mut expected = pattern(40, 9);
        expected[2 * BLOCK_BYTES..4 * BLOCK_BYTES].fill(0);
        let mut next = Blocking::new(&**drive).unwrap();
        assert_eq!(next.read(3, 1).unwrap()[..], pattern(3, 1), "{name}");
        assert_eq!(next.read(40, 9).unwrap()[..], expected, "{name}");
    }
}

#[test]
fn an_only_queue_of_memory_excludes_others() {
    let drive = open_drive("mem:4M").unwrap();
    let only = drive.open_only_queue(1).unwrap();
    for taken in [drive.open_queue(1), drive.open_only_queue(1)] {
        let error = taken.err().expect("it is in use").to_string();
        assert!(error.contains("mem:4194304") && error.contains("its only queue"), "{error}");
    }
    drop(only);
    // If others are open, it is an ordinary one, and more may be opened.
    let mut first = Blocking::new(&*drive).unwrap();
    let only = drive.open_only_queue(1).unwrap();
    let more = drive.open_queue(1).unwrap();
    first.write(0, &pattern(1, 1)).unwrap();
    drop((first, only));
    assert!(drive.open_only_queue(1).is_ok(), "one of several");
    assert!(drive.open_queue(1).is_ok(), "neither was the only queue");
    drop(more);
    let only = drive.open_only_queue(1).unwrap();
    assert!(drive.open_queue(1).is_err(), "all others are gone");
    drop(only);
    assert!(drive.open_queue(1).is_ok());
}

#[test]
fn a_wrong_specification_is_answered_with_the_right_forms() {
    for spec in [
        "",
        "mem",
        "mem:",
        "mem:1000",
        "mem:4M,fast",
        "mem:4M,lazy=yes",
        "floppy:/dev/fd0",
        "file:",
        "file:/tmp/x,size=1000",
        "file:/tmp/x,size=4M,size=4M",
        "file:/tmp/x,io=magic",
        "ssd:flash",
        "ssd:tape,size=4M",
        "ssd:flash,size=4M,seed=x",
        "ssd:flash,size=4M,order=fifo",
        "ssd:flash,size=4M,penalty=5",
    ] {
        match open_drive(spec).err() {
            Some(error @ OpenError::Spec { .. }) => {
                let text = error.to_string();
                assert!(text.contains("drives are:") && text.contains(spec), "{text}");
            }
            other => panic!("{spec}: {other:?}"),
        }
    }
    let too_much = open_drive("mem:8000000G").err();
    assert!(matches!(too_much, Some(OpenError::Memory { .. })), "{too_much:?}");
}
