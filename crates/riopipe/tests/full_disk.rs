//! A disk that becomes full during one stream's write. A limit on file sizes replaces the full disk;
//! it holds for the whole process, so the test is a process of its own.

#[path = "real/site.rs"]
mod site;

use std::time::Duration;

use riopipe::{StreamOptions, Until, Volume};
use tempfile::TempDir;

use site::{check, create_options, members, open_options, target, write};

/// P6: only the stream whose write failed is poisoned; T22 is about failed FLUSHes.
#[test]
fn p6_other_streams_continue_when_one_meets_a_full_disk_and_is_reopened() {
    let (log, dir) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let spec = format!("file:{}/drive,size=64M,io=threads", dir.path().display());
    let target = target(&[&spec], Some(&log));
    let members = members(&[&target], 1);
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    let mut a = volume.stream(0, &StreamOptions::default()).unwrap();
    let mut b = volume.stream(1, &StreamOptions::default()).unwrap();
    let seq = write(&mut b, 100, 1, 1, false);
    b.wait(Until::Complete(seq), None).unwrap();

    let limit = libc::rlimit { rlim_cur: 32 << 20, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: ignoring a signal and setting a limit touch no memory but `limit`, which outlives
    // the call.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit), 0);
    }
    write(&mut a, 12_000, 1, 1, false); // at 47 MiB: beyond the limit
    write(&mut a, 200, 1, 1, true); // a FLUSH behind it, refused by the gate
    let failure = loop {
        match a.poll() {
            Ok(_) => std::thread::sleep(Duration::from_millis(1)),
            Err(failure) => break failure,
        }
    };
    assert!(failure.to_string().contains("stream 0"), "{failure}");
    for _ in 0..50 {
        let _ = a.poll();
        std::thread::sleep(Duration::from_millis(1));
    }
    let seq = write(&mut b, 300, 1, 1, true);
    b.wait(Until::Durable(seq), Some(Duration::from_secs(120))).unwrap();
    check(&mut b, 300, 1, 1);

    // There is space again, and the failed stream is reopened. Its caller must first acknowledge the
    // in-place updates that may be there or not (T11).
    let error = b.reopen().unwrap_err();
    assert!(error.to_string().contains("has not failed"), "{error}");
    let limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
    let error = a.reopen().unwrap_err();
    assert!(error.to_string().contains("acknowledge"), "{error}");
    let listed: Vec<u64> =
        a.recovery().unwrap().in_place.iter().map(|update| update.range.lba).collect();
    assert!(listed.contains(&12_000), "{listed:?}");
    let seq = write(&mut b, 301, 1, 2, true);
    b.wait(Until::Durable(seq), Some(Duration::from_secs(120))).unwrap();
    volume.acknowledge(0).unwrap();
    let found = a.reopen().unwrap();
    assert_eq!(found.last, riopipe::Seq::ZERO, "{found}");
    let seq = write(&mut a, 12_000, 1, 3, true);
    a.wait(Until::Durable(seq), Some(Duration::from_secs(120))).unwrap();
    check(&mut a, 12_000, 1, 3);
    a.close().unwrap();
    b.close().unwrap();
    volume.close().unwrap();
}
