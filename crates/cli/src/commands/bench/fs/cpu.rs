//! The CPU time of the threads of this process, by side.

use std::fs;

use riopipe_lab::harness::SideCpu;
use riopipe_platform::CpuClock;

/// The side to which a thread belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// It is counted elsewhere (workers), or belongs to no side.
    None,
    Initiator,
    Target,
}

/// The side of a thread with this name. Threads of FUSE and of the background belong to the
/// initiator.
fn side_of(name: &str) -> Side {
    // The harness reads the clocks of the workers. The link models a network. The others report
    // progress and signals.
    const NONE: [&str; 3] = ["writer ", "link", "rio-signals"];
    if NONE.iter().any(|none| name.starts_with(none)) {
        Side::None
    } else if name.starts_with("reactor-") || name.starts_with("rio-io-") {
        Side::Target
    } else {
        Side::Initiator
    }
}

/// The CPU time of the threads that are not workers, so far.
pub(super) fn side_cpu() -> SideCpu {
    let mut cpu = SideCpu::default();
    let this_process = std::process::id();
    let Ok(tasks) = fs::read_dir("/proc/self/task") else { return cpu };
    for task in tasks.flatten() {
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let Some(tid) = task.file_name().to_str().and_then(|tid| tid.parse().ok()) else {
            continue;
        };
        // The main thread measures.
        if tid == this_process {
            continue;
        }
        // Not the kernel's statistics, which are up to a tick old.
        let used = || CpuClock::of_thread(tid).used_ns().unwrap_or(0);
        match side_of(name.trim_end()) {
            Side::None => {}
            Side::Initiator => cpu.initiator_ns += used(),
            Side::Target => cpu.target_ns = Some(cpu.target_ns.unwrap_or(0) + used()),
        }
    }
    cpu
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_has_its_side() {
        for name in ["reactor-0", "rio-io-3"] {
            assert_eq!(side_of(name), Side::Target, "{name}");
        }
        for name in ["riofs-tick", "fuser-2", "riopipe-bg", "flusher"] {
            assert_eq!(side_of(name), Side::Initiator, "{name}");
        }
        for name in ["writer 1", "link"] {
            assert_eq!(side_of(name), Side::None, "{name}");
        }
    }

    #[test]
    fn a_thread_of_the_background_is_counted() {
        let before = side_cpu().initiator_ns;
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let (worked, has_worked) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name("riofs-tick".to_owned()).spawn(move || {
            let begun = riopipe_platform::thread_cpu_ns();
            while riopipe_platform::thread_cpu_ns() - begun < 20_000_000 {}
            worked.send(()).unwrap();
            let _ = wait.recv();
        });
        has_worked.recv().unwrap();
        let used = side_cpu().initiator_ns - before;
        drop(done);
        thread.unwrap().join().unwrap();
        assert!(used >= 20_000_000, "{used} ns");
    }
}
