//! An unmount while a program writes without a pause.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use riopipe_fs_core::fs::Fs;
use riopipe_fs_core::storage::{StorageError, StreamNo};
use riopipe_fs_core::{FsError, Ino};

use crate::calls::{NOW, file, options, root};
use crate::hooked::{Hooked, Hooks};
use crate::memory::{check_clean, image_of};

const BLOCKS: u64 = 65_536;

/// The calls of the storage after which an unmount counts as one without an end. It needs some tens.
const CALLS_MAX: u64 = 1000;

/// Lets the writer make a whole attempt whenever the unmount calls the main stream.
#[derive(Default)]
struct Turns {
    is_unmounting: AtomicBool,
    /// The writer ends.
    is_over: AtomicBool,
    /// The writes that were tried.
    attempts: AtomicU64,
    /// The calls of the main stream during the unmount.
    calls: AtomicU64,
}

impl Hooks for Turns {
    fn before(&self, stream: StreamNo) -> Result<(), StorageError> {
        if stream != StreamNo(0) || !self.is_unmounting.load(Ordering::Relaxed) {
            return Ok(());
        }
        if self.calls.fetch_add(1, Ordering::Relaxed) > CALLS_MAX {
            self.is_over.store(true, Ordering::Relaxed);
        }
        // The first of two may have begun earlier.
        let later = self.attempts.load(Ordering::Relaxed) + 2;
        while self.attempts.load(Ordering::Relaxed) < later && !self.is_over.load(Ordering::Relaxed)
        {
            thread::yield_now();
        }
        Ok(())
    }
}

/// An unmount repeats until nothing is new. So programs must not change anything once it has begun.
#[test]
fn an_unmount_ends_beside_a_program_that_writes_without_a_pause() {
    let storage = Hooked::<Turns>::new(image_of(BLOCKS, &[]), BLOCKS);
    let turns = &storage.hooks;
    let (fs, _) = Fs::mount(Arc::clone(&storage) as _, options(), NOW).unwrap();
    let f = fs.create(&root(), Ino::ROOT, b"f", &file(0o600), NOW).unwrap();
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut count = 0_u64;
            let mut refused = None;
            let mut is_accepted_later = false;
            while !turns.is_over.load(Ordering::Relaxed) {
                match fs.write(&root(), f.ino, 0, &(count + 1).to_le_bytes(), NOW) {
                    Ok(_) => {
                        is_accepted_later |= refused.is_some();
                        count += 1;
                    }
                    Err(error) => refused = Some(error),
                }
                turns.attempts.fetch_add(1, Ordering::Relaxed);
            }
            (count, refused, is_accepted_later)
        });
        while turns.attempts.load(Ordering::Relaxed) < 2 {
            thread::yield_now();
        }
        turns.is_unmounting.store(true, Ordering::Relaxed);
        let unmounted = fs.unmount(NOW);
        turns.is_over.store(true, Ordering::Relaxed);
        let (count, refused, is_accepted_later) = writer.join().unwrap();
        unmounted.unwrap();
        let calls = turns.calls.load(Ordering::Relaxed);
        assert!(calls <= CALLS_MAX, "the unmount went on as long as the program wrote");
        assert_eq!((refused, is_accepted_later), (Some(FsError::ReadOnly), false));

        // All that was accepted is there.
        let image = storage.memory.image();
        check_clean(&image, BLOCKS);
        let (fs, _) = Fs::mount(Hooked::<Turns>::new(image, BLOCKS), options(), NOW).unwrap();
        let mut data = [0; 8];
        fs.read(f.ino, 0, &mut data, NOW).unwrap();
        assert_eq!(u64::from_le_bytes(data), count);
    });
}
