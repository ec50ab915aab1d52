//! The operations of a workload: writes, reads, or both.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::permutation::mix;

/// The operations of a workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Access {
    /// All are writes.
    #[default]
    Write,
    /// All are reads.
    Read,
    /// Each group is read or written.
    Mixed {
        /// How many of 100 groups are read; from 1 to 99.
        reads: u8,
    },
}

/// A text that names no [`Access`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?}: give write, read, or mixed with the reads of 100 operations, as in mixed:70")]
pub struct AccessError(String);

impl Access {
    /// Whether the group with this number is read. The same seed gives the same choice.
    #[must_use]
    pub const fn is_read(self, seed: u64, group: u64) -> bool {
        match self {
            Self::Write => false,
            Self::Read => true,
            Self::Mixed { reads } => mix(seed ^ group.rotate_left(32)) % 100 < reads as u64,
        }
    }

    /// The name of its operations, in the plural.
    #[must_use]
    pub const fn operations(self) -> &'static str {
        match self {
            Self::Write => "writes",
            Self::Read => "reads",
            Self::Mixed { .. } => "operations",
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write => f.write_str("write"),
            Self::Read => f.write_str("read"),
            Self::Mixed { reads } => write!(f, "mixed:{reads}"),
        }
    }
}

impl FromStr for Access {
    type Err = AccessError;

    fn from_str(text: &str) -> Result<Self, AccessError> {
        let error = || AccessError(text.to_owned());
        match text {
            "write" => Ok(Self::Write),
            "read" => Ok(Self::Read),
            _ => {
                let reads = text.strip_prefix("mixed:").and_then(|reads| reads.parse().ok());
                reads
                    .filter(|reads| (1..100).contains(reads))
                    .map(|reads| Self::Mixed { reads })
                    .ok_or_else(error)
            }
        }
    }
}

impl From<Access> for String {
    fn from(access: Access) -> Self {
        access.to_string()
    }
}

impl TryFrom<String> for Access {
    type Error = AccessError;

    fn try_from(text: String) -> Result<Self, AccessError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for access in [Access::Write, Access::Read, Access::Mixed { reads: 70 }] {
            assert_eq!(access.to_string().parse(), Ok(access));
        }
        for wrong in ["", "mixed", "mixed:", "mixed:0", "mixed:100", "mixed:-1", "rw"] {
            assert!(wrong.parse::<Access>().unwrap_err().to_string().contains("mixed:70"));
        }
    }

    #[test]
    fn so_many_groups_are_read() {
        let read =
            |access: Access, seed| (0..10_000u64).filter(move |group| access.is_read(seed, *group));
        assert_eq!(read(Access::Write, 1).count(), 0);
        assert_eq!(read(Access::Read, 1).count(), 10_000);
        let mixed = Access::Mixed { reads: 70 };
        let count = read(mixed, 1).count();
        assert!((6_800..7_200).contains(&count), "{count}");
        assert!(read(mixed, 1).eq(read(mixed, 1)) && !read(mixed, 1).eq(read(mixed, 2)));
    }
}
