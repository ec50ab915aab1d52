//! The commands of `ioctl` that RioFS has. `contrib/riofs` has them for programs.

/// The group of the commands.
const GROUP: u32 = b'r' as u32;
/// Order a file: its data, its fields and its names.
const BARRIER: u32 = command(0xa0);
/// Order the data of a file, and the fields that are needed to read it.
const DATA_BARRIER: u32 = command(0xa1);
/// Make the whole file system durable.
const SYNC_FS: u32 = command(0xa2);

/// A command without data, as `_IO` makes it in C.
const fn command(number: u32) -> u32 {
    GROUP << 8 | number
}

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// A barrier of one file.
    Barrier {
        /// Only the fields that are needed to read the data.
        data_only: bool,
    },
    /// Make everything durable.
    SyncFs,
}

impl Command {
    /// The command with this number, if RioFS has it.
    pub(super) fn of(number: u32) -> Option<Self> {
        match number {
            BARRIER => Some(Self::Barrier { data_only: false }),
            DATA_BARRIER => Some(Self::Barrier { data_only: true }),
            SYNC_FS => Some(Self::SyncFs),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_header() {
        assert_eq!([BARRIER, DATA_BARRIER, SYNC_FS], [0x72a0, 0x72a1, 0x72a2]);
        assert_eq!(Command::of(0x72a1), Some(Command::Barrier { data_only: true }));
        // FS_IOC_GETFLAGS
        assert_eq!(Command::of(0x8008_6601), None);
    }
}
