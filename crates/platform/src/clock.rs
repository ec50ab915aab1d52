//! Clocks: time since boot for deadlines, CPU time for measuring the cost of work.

use std::io;
use std::num::NonZeroU64;

use rustix::thread::{gettid, set_current_timer_slack};
use rustix::time::{ClockId, Timespec, clock_gettime};

/// Monotonic time in nanoseconds (`CLOCK_MONOTONIC`, read without a system call on all usual
/// machines): the one clock that streams, drives and reactors share. Only differences have a
/// meaning.
#[inline]
#[must_use]
pub fn now_ns() -> u64 {
    nanoseconds(clock_gettime(ClockId::Monotonic))
}

/// CPU time that the calling thread has used, in nanoseconds. A system call, about 200 ns: read it
/// at the ends of a run, not inside.
#[must_use]
pub fn thread_cpu_ns() -> u64 {
    nanoseconds(clock_gettime(ClockId::ThreadCPUTime))
}

/// CPU time that all threads of process `pid` have used, in nanoseconds. An initiator can so
/// account for a target that runs beside it.
///
/// # Errors
/// `NotFound`, if there is no such process.
pub fn process_cpu_ns(pid: u32) -> io::Result<u64> {
    // The kernel's encoding of a process's clock: CPUCLOCK_SCHED.
    cpu_clock(!pid.cast_signed() << 3 | 2).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("there is no process {pid}"))
    })
}

/// The CPU clock of one thread, readable from any other thread of the process.
#[derive(Clone, Copy, Debug)]
pub struct CpuClock(libc::clockid_t);

impl CpuClock {
    /// The calling thread's clock.
    #[must_use]
    pub fn of_this_thread() -> Self {
        Self::of_thread(gettid().as_raw_nonzero().get().cast_unsigned())
    }

    /// The clock of the thread of this process whose kernel id is `tid`, as in `/proc/self/task`.
    #[must_use]
    pub fn of_thread(tid: u32) -> Self {
        // The kernel's encoding (CPUCLOCK_PERTHREAD and CPUCLOCK_SCHED), which pthreads use as
        // well.
        Self(!tid.cast_signed() << 3 | 6)
    }

    /// CPU time the thread has used, in nanoseconds; `None` once the thread has ended.
    #[must_use]
    pub fn used_ns(&self) -> Option<u64> {
        cpu_clock(self.0)
    }
}

/// Makes the calling thread's sleeps end on time. The kernel may otherwise add 50 µs to every
/// timeout, too much for a modelled drive that answers within 10 µs.
pub fn fine_timers() {
    // It can't fail for a positive value, and if it did, the thread would merely sleep longer.
    let _ = set_current_timer_slack(Some(NonZeroU64::MIN));
}

/// A process's or a thread's CPU clock, which rustix has no name for; `None` when there is no such
/// process or thread (any more).
fn cpu_clock(clock: libc::clockid_t) -> Option<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the answer and outlives the call.
    let code = unsafe { libc::clock_gettime(clock, &raw mut time) };
    (code == 0).then(|| nanoseconds(Timespec { tv_sec: time.tv_sec, tv_nsec: time.tv_nsec }))
}

fn nanoseconds(time: Timespec) -> u64 {
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn burn_until(clock: &CpuClock, ns: u64) {
        let start = clock.used_ns().unwrap();
        while clock.used_ns().unwrap() < start + ns {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn time_never_goes_back() {
        let mut last = now_ns();
        assert!(last > 0);
        for _ in 0..10_000 {
            let now = now_ns();
            assert!(now >= last);
            last = now;
        }
    }

    #[test]
    fn a_thread_clock_counts_its_own_work_only() {
        let mine = CpuClock::of_this_thread();
        let before = (thread_cpu_ns(), process_cpu_ns(std::process::id()).unwrap());
        let theirs = std::thread::spawn(|| {
            let clock = CpuClock::of_this_thread();
            burn_until(&clock, 20_000_000);
            let used = clock.used_ns().unwrap();
            (clock, used)
        });
        let (clock, used) = theirs.join().unwrap();
        assert!(used >= 20_000_000);
        // This thread only joined: 20 ms of the other's work must not count here …
        assert!(mine.used_ns().unwrap() - before.0 < 20_000_000);
        // … but must count in the process's clock.
        assert!(process_cpu_ns(std::process::id()).unwrap() - before.1 >= 20_000_000);
        assert_eq!(clock.used_ns(), None, "the thread has ended");
    }

    #[test]
    fn a_thread_is_found_by_its_kernel_id() {
        let tid = gettid().as_raw_nonzero().get().cast_unsigned();
        let before = CpuClock::of_this_thread().used_ns().unwrap();
        let same = CpuClock::of_thread(tid).used_ns().unwrap();
        let after = CpuClock::of_this_thread().used_ns().unwrap();
        assert!((before..=after).contains(&same), "{before} {same} {after}");
        assert_eq!(CpuClock::of_thread(0x7fff_fff0).used_ns(), None);
    }

    #[test]
    fn a_missing_process_is_named() {
        // Beyond the kernel's largest possible pid (2^22).
        let error = process_cpu_ns(0x7fff_fff0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(error.to_string().contains("2147483632"));
    }
}
