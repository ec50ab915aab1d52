//! Clocks: time since boot for deadlines, CPU time for measuring what work costs.

use std::io;

/// Monotonic time in nanoseconds (`CLOCK_MONOTONIC`, read without a system call on any usual
/// machine). Only differences mean anything.
#[must_use]
pub fn now_ns() -> u64 {
    // CLOCK_MONOTONIC exists on every Linux, so the call cannot fail.
    read(libc::CLOCK_MONOTONIC).unwrap_or(0)
}

/// CPU time the calling thread has used, in nanoseconds. A system call, about 200 ns: read it at
/// the ends of a run, not inside.
#[must_use]
pub fn thread_cpu_ns() -> u64 {
    read(libc::CLOCK_THREAD_CPUTIME_ID).unwrap_or(0)
}

/// CPU time all threads of process `pid` have used, in nanoseconds; works across processes, so
/// that an initiator can account for a target that runs beside it.
///
/// # Errors
/// `NotFound` when there is no such process.
pub fn process_cpu_ns(pid: u32) -> io::Result<u64> {
    let mut clock: libc::clockid_t = 0;
    // SAFETY: `clock` is a valid place for the answer and outlives the call.
    let code = unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &raw mut clock) };
    match code {
        0 => read(clock),
        libc::ESRCH => {
            Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no process {pid}")))
        }
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// The CPU clock of one thread, readable from any other thread of the process.
#[derive(Clone, Copy, Debug)]
pub struct CpuClock(libc::clockid_t);

impl CpuClock {
    /// The calling thread's clock.
    ///
    /// # Errors
    /// None that a Linux kernel is known to give; passed on if one does.
    pub fn of_this_thread() -> io::Result<Self> {
        let mut clock: libc::clockid_t = 0;
        // SAFETY: `pthread_self` is the calling thread, hence alive; `clock` outlives the call.
        let code = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) };
        match code {
            0 => Ok(Self(clock)),
            code => Err(io::Error::from_raw_os_error(code)),
        }
    }

    /// The clock of the thread of this process whose kernel id is `tid`, as in `/proc/self/task`.
    #[must_use]
    pub fn of_thread(tid: u32) -> Self {
        // The kernel's encoding (CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED), which pthreads use as well.
        Self(!tid.cast_signed() << 3 | 6)
    }

    /// CPU time the thread has used, in nanoseconds; `None` once the thread has ended.
    #[must_use]
    pub fn used_ns(&self) -> Option<u64> {
        read(self.0).ok()
    }
}

/// Makes the calling thread's sleeps end on time: the kernel may otherwise add 50 µs to every
/// timeout, which a modelled drive that answers within 10 µs would not survive.
pub fn fine_timers() {
    // SAFETY: PR_SET_TIMERSLACK takes one integer and touches no memory of ours. It cannot fail
    // for a positive value, and if it did we would merely sleep longer.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
}

fn read(clock: libc::clockid_t) -> io::Result<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the answer and outlives the call.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
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
    fn a_thread_is_charged_for_its_own_work_only() {
        let mine = CpuClock::of_this_thread().unwrap();
        let before = (thread_cpu_ns(), process_cpu_ns(std::process::id()).unwrap());
        let theirs = std::thread::spawn(|| {
            let clock = CpuClock::of_this_thread().unwrap();
            burn_until(&clock, 20_000_000);
            let used = clock.used_ns().unwrap();
            (clock, used)
        });
        let (clock, used) = theirs.join().unwrap();
        assert!(used >= 20_000_000);
        // This thread only joined; 20 ms of the other's work must not show here …
        assert!(mine.used_ns().unwrap() - before.0 < 20_000_000);
        // … but must in the process's clock.
        assert!(process_cpu_ns(std::process::id()).unwrap() - before.1 >= 20_000_000);
        assert_eq!(clock.used_ns(), None, "the thread has ended");
    }

    #[test]
    fn a_thread_is_found_by_its_kernel_id() {
        // SAFETY: no arguments, no failure.
        let tid = unsafe { libc::gettid() }.cast_unsigned();
        let before = CpuClock::of_this_thread().unwrap().used_ns().unwrap();
        let same = CpuClock::of_thread(tid).used_ns().unwrap();
        let after = CpuClock::of_this_thread().unwrap().used_ns().unwrap();
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
