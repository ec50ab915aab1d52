//! A process that can start no more threads. A limit on its address space replaces that limit; it
//! holds for the whole process, so the test is a process of its own.

#[path = "real/site.rs"]
mod site;

use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::Builder;

use riopipe::{Exhausted, StreamError, StreamOptions, Volume};
use tempfile::TempDir;

use site::{check, create_options, members, open_options, target, write};

const STACK: u64 = 1 << 30;

/// Without its thread, nothing would flush an idle stream of the volume.
#[test]
fn a_stream_without_a_background_thread_is_refused() {
    const VARIABLE: &str = "RUST_MIN_STACK";
    // Stacks are so large that no other allocation meets the limit. The library reads the variable
    // when it starts the first thread, so it must be there from the beginning.
    if std::env::var(VARIABLE).is_err() {
        let test = std::env::current_exe().unwrap();
        let status = Command::new(test).env(VARIABLE, STACK.to_string()).status().unwrap();
        return assert!(status.success(), "{status}");
    }
    let log = TempDir::new().unwrap();
    let target = target(&["mem:64M"], Some(&log));
    let members = members(&[&target], 1);
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();

    // The stacks of threads that have ended are used again, so threads take them all first.
    let (end, ended) = channel::<()>();
    let ended = Arc::new(Mutex::new(ended));
    let refused = (0..100).find_map(|_| {
        limit(used() + STACK / 2);
        let started = |ended: Arc<Mutex<Receiver<()>>>| {
            Builder::new().spawn(move || ended.lock().unwrap().recv())
        };
        while started(Arc::clone(&ended)).is_ok() {}
        // If it succeeds, another thread has ended in this moment.
        let stream = volume.stream(0, &StreamOptions::default());
        stream.map(|stream| stream.close().unwrap()).err()
    });
    let error = refused.expect("no thread can be started");
    drop(end);
    assert!(matches!(error, StreamError::Exhausted(Exhausted::Threads)), "{error:?}");
    limit(libc::RLIM_INFINITY);

    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    write(&mut stream, 100, 1, 1, true);
    check(&mut stream, 100, 1, 1);
    stream.close().unwrap();
    volume.close().unwrap();
}

/// The address space of this process, bytes.
fn used() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    // SAFETY: it reads a constant of the system.
    pages * unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64
}

fn limit(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the call reads `limit`, which outlives it, and touches no other memory.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
}
