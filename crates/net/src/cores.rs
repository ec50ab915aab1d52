//! The cores on which a thread may run.

use std::io;

use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// The reason why a thread could not be pinned.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    /// The core does not exist, or this process may not use it.
    #[error("cannot pin to core {core}: this process may use {allowed:?} only")]
    NotAllowed {
        /// The requested core.
        core: usize,
        /// The cores that this process may use.
        allowed: Vec<usize>,
    },
    /// The kernel refused the request.
    #[error("cannot pin to core {core}: {source}")]
    Kernel {
        /// The requested core.
        core: usize,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Pins the calling thread to one core. Threads that it starts later inherit this.
///
/// # Errors
/// [`PinError`], if the core does not exist or the process may not use it (containers often have a
/// subset).
pub fn pin_to_core(core: usize) -> Result<(), PinError> {
    if core >= CpuSet::MAX_CPU {
        return Err(not_allowed(core));
    }
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).map_err(|error| match error {
        Errno::INVAL => not_allowed(core),
        error => PinError::Kernel { core, source: error.into() },
    })
}

/// The cores on which the calling thread may run, in ascending order. Never empty: core 0 is
/// assumed if the kernel gives no answer.
#[must_use]
pub fn allowed_cores() -> Vec<usize> {
    sched_getaffinity(None).map_or_else(
        |_| vec![0],
        |set| (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect(),
    )
}

/// The core on which the calling thread runs now. It may move to another one at any time.
#[must_use]
#[inline]
pub fn current_core() -> u32 {
    sched_getcpu() as u32
}

fn not_allowed(core: usize) -> PinError {
    PinError::NotAllowed { core, allowed: allowed_cores() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_to_each_core_it_may_use() {
        let cores = allowed_cores();
        assert!(!cores.is_empty());
        for core in cores {
            let seen = std::thread::spawn(move || {
                pin_to_core(core).unwrap();
                allowed_cores()
            });
            assert_eq!(seen.join().unwrap(), [core]);
        }
    }

    #[test]
    fn a_missing_core_is_refused_with_the_list_of_cores() {
        for core in [1023, 1024, usize::MAX] {
            if allowed_cores().contains(&core) {
                continue;
            }
            let error = pin_to_core(core).unwrap_err();
            let PinError::NotAllowed { allowed, .. } = &error else {
                panic!("{error}");
            };
            assert_eq!(allowed, &allowed_cores());
            assert!(error.to_string().contains(&core.to_string()));
        }
    }
}
