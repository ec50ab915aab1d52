//! Idle costs nothing: a target without work, and an open volume with an unused stream, take almost no
//! CPU time. The test is a process of its own, because it counts the CPU time of the whole process.

#[allow(dead_code, reason = "shared with the other tests of real targets")]
#[path = "real/site.rs"]
mod site;

use std::thread;
use std::time::{Duration, Instant};

use riopipe::{StreamOptions, Until, Volume};
use riopipe_platform::process_cpu_ns;
use site::{create_options, members, open_options, target, write};
use tempfile::TempDir;

#[test]
fn an_idle_target_and_an_idle_initiator_use_under_one_percent_of_a_core() {
    let log = TempDir::new().unwrap();
    let target = target(&["mem:16M", "mem:16M"], Some(&log));
    let members = members(&[&target], 2);
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let last = write(&mut stream, 0, 40, 1, true);
    stream.wait(Until::Durable(last), None).unwrap();
    // The background thread polls a last time, and all threads go to sleep. The time until then depends
    // on the machine, and waking up costs more on a busy one. So there are several attempts.
    let used = || process_cpu_ns(std::process::id()).unwrap();
    let mut shares = (0..20).map(|_| {
        let (before, begun) = (used(), Instant::now());
        thread::sleep(Duration::from_secs(3));
        (used() - before) as f64 / begun.elapsed().as_nanos() as f64
    });
    // All threads are counted: two reactors, a thread for each target, the background thread, the
    // stream's owner.
    let mut seen = Vec::new();
    let is_idle = |share: f64| {
        seen.push(format!("{:.3} % of a core", share * 100.0));
        share < 0.01
    };
    assert!(shares.any(is_idle), "{seen:?}");
    println!("{seen:?}");

    stream.close().unwrap();
    volume.close().unwrap();
    target.stop().unwrap();
}
