//! Which cores a thread may run on.

use std::{io, mem};

/// Why a thread could not be pinned.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    /// The core does not exist or is not among those this process was given.
    #[error("cannot pin to core {core}: this process may use {allowed:?} only")]
    NotAllowed {
        /// The core asked for.
        core: usize,
        /// The cores this process was started with.
        allowed: Vec<usize>,
    },
    /// The kernel refused.
    #[error("cannot pin to core {core}: {source}")]
    Kernel {
        /// The core asked for.
        core: usize,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Binds the calling thread to one core. Threads that it starts later inherit the binding.
///
/// # Errors
/// When the core is not there or the process may not use it (containers often get a subset).
pub fn pin_to_core(core: usize) -> Result<(), PinError> {
    let mut set = empty_set();
    if core >= libc::CPU_SETSIZE as usize {
        return Err(not_allowed(core));
    }
    // SAFETY: `core` is below CPU_SETSIZE, so the bit lies inside `set`.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: pid 0 is the calling thread; `set` is whole and outlives the call.
    let code = unsafe { libc::sched_setaffinity(0, mem::size_of_val(&set), &raw const set) };
    if code == 0 {
        return Ok(());
    }
    let source = io::Error::last_os_error();
    match source.raw_os_error() {
        Some(libc::EINVAL) => Err(not_allowed(core)),
        _ => Err(PinError::Kernel { core, source }),
    }
}

/// The cores the calling thread may run on, in ascending order. Never empty: when the kernel
/// doesn't tell, core 0 is assumed.
#[must_use]
pub fn allowed_cores() -> Vec<usize> {
    let mut set = empty_set();
    // SAFETY: pid 0 is the calling thread; `set` is a valid place for the answer.
    let code = unsafe { libc::sched_getaffinity(0, mem::size_of_val(&set), &raw mut set) };
    if code != 0 {
        return vec![0];
    }
    (0..libc::CPU_SETSIZE as usize)
        // SAFETY: every `core` is below CPU_SETSIZE, so the bit lies inside `set`.
        .filter(|&core| unsafe { libc::CPU_ISSET(core, &set) })
        .collect()
}

fn not_allowed(core: usize) -> PinError {
    PinError::NotAllowed { core, allowed: allowed_cores() }
}

fn empty_set() -> libc::cpu_set_t {
    // SAFETY: a cpu_set_t is an array of integers, for which all zeroes is the empty set.
    unsafe { mem::zeroed() }
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
    fn a_core_that_is_not_there_is_refused_with_those_that_are() {
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
