//! Workloads: sizes, places, groups, and writes in flight.

use std::{fmt, ops::Range, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::access::Access;

/// Length of a logical block in bytes, with the width of the lengths here.
pub const BLOCK: u32 = riopipe::BLOCK_BYTES as u32;

/// The place of a write relative to the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Directly behind it.
    #[serde(rename = "seq")]
    Sequential,
    /// Anywhere in the thread's area; every place once before any repeats.
    #[serde(rename = "rand")]
    Random,
}

/// The form of the groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Shape {
    /// All writes are alike.
    Uniform {
        /// The places of the writes.
        pattern: Pattern,
        /// Bytes per write, whole blocks.
        size: u32,
        /// Number of adjacent writes before the next place, which merging can use (the batch size
        /// of the paper's Figure 12).
        batch: u32,
        /// Writes per group. Divides `batch`, or is a multiple of it.
        group: u32,
    },
    /// The metadata journal of the paper's §3.1: a group of two adjacent 4 KiB blocks (description
    /// and metadata), then a group of one behind it (the commit record), repeated through the
    /// thread's private area.
    Journal,
}

/// A whole workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// The form of the groups.
    pub shape: Shape,
    /// Whether the groups are written or read.
    #[serde(default)]
    pub access: Access,
    /// Writes in flight per thread, counted as submitted (before merging).
    pub queue_depth: u32,
    /// Number of threads, each with its own stream and its own area.
    pub threads: u32,
    /// The seed of the random places.
    pub seed: u64,
}

/// The reason why a workload is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkloadError {
    /// The size is not a whole number of blocks.
    #[error("a write of {size} bytes is not a whole number of 4096-byte blocks; use 4K, 8K, … 64K")]
    Size {
        /// Requested size in bytes.
        size: u32,
    },
    /// A parameter is zero.
    #[error("{what} must be at least 1")]
    Zero {
        /// Name of the parameter.
        what: &'static str,
    },
    /// Batches and groups would end inside of one another.
    #[error(
        "a group of {group} writes does not fit batches of {batch}: one must be a multiple of the \
         other"
    )]
    GroupAcrossBatches {
        /// Number of writes per group.
        group: u32,
        /// Number of writes per batch.
        batch: u32,
    },
    /// A single group has more writes than may be in flight.
    #[error(
        "queue depth {queue_depth} is less than one group of {group} writes; raise it to {group}"
    )]
    Shallow {
        /// Number of writes in flight.
        queue_depth: u32,
        /// Number of writes in one group.
        group: u32,
    },
    /// The volume is too small for the threads' areas.
    #[error(
        "{threads} threads need at least {need} blocks between them, the volume has {have}; use a \
         larger volume or fewer threads"
    )]
    VolumeTooSmall {
        /// Number of threads.
        threads: u32,
        /// Number of blocks needed.
        need: u64,
        /// Number of blocks of the volume.
        have: u64,
    },
}

impl Workload {
    /// The paper's journal workload (§3.1).
    #[must_use]
    pub fn journal(threads: u32, queue_depth: u32) -> Self {
        Self { shape: Shape::Journal, access: Access::Write, queue_depth, threads, seed: 1 }
    }

    /// Random 4 KiB writes, each a group of its own: the paper's Figure 10.
    #[must_use]
    pub fn random_4k(threads: u32, queue_depth: u32) -> Self {
        Self {
            shape: Shape::Uniform { pattern: Pattern::Random, size: BLOCK, batch: 1, group: 1 },
            access: Access::Write,
            queue_depth,
            threads,
            seed: 1,
        }
    }

    /// Checks the parameters.
    ///
    /// # Errors
    /// [`WorkloadError`], which names the parameter to change.
    pub fn check(&self) -> Result<(), WorkloadError> {
        let zero = |what| Err(WorkloadError::Zero { what });
        if self.threads == 0 {
            return zero("the number of threads");
        }
        if self.queue_depth == 0 {
            return zero("the queue depth");
        }
        if let Shape::Uniform { size, batch, group, .. } = self.shape {
            if size == 0 || !size.is_multiple_of(BLOCK) {
                return Err(WorkloadError::Size { size });
            }
            if batch == 0 {
                return zero("the batch size");
            }
            if group == 0 {
                return zero("the group size");
            }
            if !batch.is_multiple_of(group) && !group.is_multiple_of(batch) {
                return Err(WorkloadError::GroupAcrossBatches { group, batch });
            }
            if self.queue_depth < group {
                return Err(WorkloadError::Shallow { queue_depth: self.queue_depth, group });
            }
        }
        Ok(())
    }

    /// The private area of thread `thread` (from 0) on a volume of `volume_blocks`: equal shares,
    /// each at least as large as the writes in flight and one group more.
    ///
    /// # Errors
    /// [`WorkloadError::VolumeTooSmall`].
    ///
    /// # Panics
    /// If `thread` is not below the number of threads.
    pub fn area(&self, thread: u32, volume_blocks: u64) -> Result<Range<u64>, WorkloadError> {
        assert!(thread < self.threads);
        let share = volume_blocks / u64::from(self.threads);
        let unit = self.unit_blocks();
        let need = unit * (u64::from(self.queue_depth) + 1);
        if share < need {
            return Err(WorkloadError::VolumeTooSmall {
                threads: self.threads,
                need: need.saturating_mul(u64::from(self.threads)),
                have: volume_blocks,
            });
        }
        let start = share * u64::from(thread);
        Ok(start..start + share / unit * unit)
    }

    /// Number of blocks that are always written next to one another: a batch, or a journal
    /// transaction.
    #[must_use]
    pub fn unit_blocks(&self) -> u64 {
        match self.shape {
            Shape::Uniform { size, batch, .. } => u64::from(size / BLOCK) * u64::from(batch),
            Shape::Journal => 3,
        }
    }

    /// Number of blocks in the largest write: the size of a buffer.
    #[must_use]
    pub fn write_blocks_max(&self) -> u32 {
        match self.shape {
            Shape::Uniform { size, .. } => size / BLOCK,
            Shape::Journal => 2,
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.access {
            Access::Write => {}
            access => write!(f, "{access}, ")?,
        }
        match self.shape {
            Shape::Journal => write!(f, "journal (2 blocks, then 1)")?,
            Shape::Uniform { pattern, size, batch, group } => {
                write!(f, "{pattern} {} KiB", size / 1024)?;
                if batch > 1 {
                    write!(f, ", batches of {batch}")?;
                }
                if group > 1 {
                    write!(f, ", groups of {group}")?;
                }
            }
        }
        write!(f, ", queue depth {}", self.queue_depth)?;
        match self.threads {
            1 => write!(f, ", 1 thread"),
            n => write!(f, ", {n} threads"),
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sequential => "seq",
            Self::Random => "rand",
        })
    }
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "seq" | "sequential" => Ok(Self::Sequential),
            "rand" | "random" => Ok(Self::Random),
            _ => Err(format!("unknown pattern {text:?}: seq or rand")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uniform(size: u32, batch: u32, group: u32, queue_depth: u32) -> Workload {
        Workload {
            shape: Shape::Uniform { pattern: Pattern::Random, size, batch, group },
            access: Access::Write,
            queue_depth,
            threads: 2,
            seed: 0,
        }
    }

    #[test]
    fn invalid_workloads_are_refused_with_a_remedy() {
        let cases = [
            (uniform(0, 1, 1, 1), "4096"),
            (uniform(5000, 1, 1, 1), "5000"),
            (uniform(4096, 0, 1, 1), "batch"),
            (uniform(4096, 1, 0, 1), "group"),
            (uniform(4096, 4, 3, 8), "multiple"),
            (uniform(4096, 1, 4, 3), "raise it to 4"),
            (uniform(4096, 1, 1, 0), "queue depth"),
            (Workload { threads: 0, ..uniform(4096, 1, 1, 1) }, "threads"),
        ];
        for (workload, word) in cases {
            let error = workload.check().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        uniform(65536, 4, 2, 8).check().unwrap();
        uniform(4096, 2, 8, 8).check().unwrap();
        Workload::journal(12, 1).check().unwrap();
    }

    #[test]
    fn areas_are_private_and_on_the_volume() {
        let workload = uniform(8192, 3, 3, 4);
        let areas = [0, 1].map(|t| workload.area(t, 1000).unwrap());
        assert_eq!(areas, [0..498, 500..998]);
        assert!(areas.iter().all(|a| (a.end - a.start) % 6 == 0));
        let error = workload.area(0, 59).unwrap_err();
        assert_eq!(error, WorkloadError::VolumeTooSmall { threads: 2, need: 60, have: 59 });
        workload.area(0, 60).unwrap();
    }

    #[test]
    fn workloads_are_displayed_as_text() {
        assert_eq!(
            uniform(4096, 16, 1, 32).to_string(),
            "rand 4 KiB, batches of 16, queue depth 32, 2 threads"
        );
        assert_eq!(
            Workload::journal(1, 8).to_string(),
            "journal (2 blocks, then 1), queue depth 8, 1 thread"
        );
        let read = Workload { access: Access::Read, ..Workload::journal(1, 8) };
        assert!(read.to_string().starts_with("read, journal"));
        assert_eq!("seq".parse(), Ok(Pattern::Sequential));
        assert!("zig".parse::<Pattern>().unwrap_err().contains("zig"));
    }
}
