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
pub(in crate::commands) fn side_cpu() -> SideCpu {
    let mut cpu = SideCpu::default();
    let this_process = std::process::id();
    let Ok(tasks) = fs::read_dir("/proc/self/task") else { return cpu };
    for task in tasks.flatten() {
        let name = task.file_name();
        let Some(tid) = name.to_str().and_then(|tid| tid.parse().ok()) else { continue };
        // The main thread measures.
        if tid != this_process {
            count(&mut cpu, tid);
        }
    }
    cpu
}

/// How often the workers have given up their cores so far, as a thread that waits does.
pub(in crate::commands) fn worker_switches() -> u64 {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks.filter_map(|task| switches(&fs::read_to_string(task.path().join("status")).ok()?)).sum()
}

/// The same of one thread, from its status in `/proc`; `None`: it is no worker.
fn switches(status: &str) -> Option<u64> {
    let of = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    of("Name:")?.trim().starts_with("writer ").then_some(())?;
    of("voluntary_ctxt_switches:")?.trim().parse().ok()
}

/// Adds the CPU time of one thread of this process to its side.
fn count(cpu: &mut SideCpu, tid: u32) {
    let name = fs::read_to_string(format!("/proc/self/task/{tid}/comm")).unwrap_or_default();
    // Not the kernel's statistics, which are up to a tick old.
    let used = || CpuClock::of_thread(tid).used_ns().unwrap_or(0);
    match side_of(name.trim_end()) {
        Side::None => {}
        Side::Initiator => cpu.initiator_ns += used(),
        Side::Target => cpu.target_ns = Some(cpu.target_ns.unwrap_or(0) + used()),
    }
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
    fn a_worker_that_waits_gives_up_its_core() {
        let status = |name| {
            format!("Name:\t{name}\nvoluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t3\n")
        };
        assert_eq!(switches(&status("writer 3")), Some(17));
        assert_eq!(switches(&status("reactor-0")), None);
        let before = worker_switches();
        let thread = std::thread::Builder::new().name("writer 7".to_owned()).spawn(|| {
            for _ in 0..20 {
                std::thread::sleep(std::time::Duration::from_micros(50));
            }
            worker_switches()
        });
        assert!(thread.unwrap().join().unwrap() >= before + 20);
    }

    /// The sum over all threads cannot be judged here: threads of other tests begin and end.
    #[test]
    fn a_thread_of_the_background_is_counted() {
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let (worked, has_worked) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name("riofs-tick".to_owned()).spawn(move || {
            let begun = riopipe_platform::thread_cpu_ns();
            while riopipe_platform::thread_cpu_ns() - begun < 20_000_000 {}
            // `thread-self` leads to `PID/task/TID`.
            let this_thread = fs::read_link("/proc/thread-self").unwrap();
            let tid = this_thread.file_name().unwrap().to_str().unwrap().parse().unwrap();
            worked.send(tid).unwrap();
            let _ = wait.recv();
        });
        let tid = has_worked.recv().unwrap();
        let (mut one, all) = (SideCpu::default(), side_cpu());
        count(&mut one, tid);
        drop(done);
        thread.unwrap().join().unwrap();
        assert!(one.initiator_ns >= 20_000_000, "{} ns", one.initiator_ns);
        assert_eq!(one.target_ns, None);
        // The thread is among those that the sum visits.
        assert!(all.initiator_ns >= 20_000_000, "{} ns", all.initiator_ns);
    }
}
