//! Files with barriers, and what a program asks of its calls.

use std::io;

use super::Files;

/// The bytes of a page of the page cache.
pub(super) const PAGE_BYTES: usize = 4096;

/// The files of one directory, whose order can be kept without waiting.
pub trait BarrierFiles: Files + Sized {
    /// Makes a new, empty directory in this one.
    ///
    /// # Errors
    /// The directory exists, or the file system fails.
    fn directory(&self, name: &str) -> io::Result<Self>;

    /// Renames a file. One with the new name is replaced.
    ///
    /// # Errors
    /// There is no such file, or the file system fails.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Writes at a place of a file.
    ///
    /// # Errors
    /// The file system fails.
    fn write_at(&self, file: &Self::File, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Calls `fbarrier`, or `fdatabarrier` with `data_only`: what the file has now is durable before
    /// what comes later.
    ///
    /// # Errors
    /// The file system fails.
    fn barrier(&self, file: &Self::File, data_only: bool) -> io::Result<()>;
}

/// The guarantee that a program asks of the calls that keep its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guarantee {
    /// Each is `fsync` or `fdatasync`, as in the original program.
    Durable,
    /// One that only keeps order is a barrier. The last one of a transaction makes it durable.
    DurableAtEnd,
    /// Each is a barrier.
    Ordered,
}

impl Guarantee {
    /// The call between two parts of a transaction: it only has to keep their order.
    pub(super) fn between<F: BarrierFiles>(
        self,
        files: &F,
        file: &F::File,
        data_only: bool,
    ) -> io::Result<()> {
        match self {
            Self::Durable => files.sync(file, data_only),
            Self::DurableAtEnd | Self::Ordered => files.barrier(file, data_only),
        }
    }

    /// The call at the end of a transaction.
    pub(super) fn end<F: BarrierFiles>(
        self,
        files: &F,
        file: &F::File,
        data_only: bool,
    ) -> io::Result<()> {
        match self {
            Self::Durable | Self::DurableAtEnd => files.sync(file, data_only),
            Self::Ordered => files.barrier(file, data_only),
        }
    }
}

/// Writes the whole pages in which these bytes are, as the page cache does: a program may write a few
/// bytes only.
pub(super) fn write_pages<F: BarrierFiles>(
    files: &F,
    file: &F::File,
    offset: u64,
    bytes: usize,
) -> io::Result<()> {
    static ZEROES: [u8; 64 * PAGE_BYTES] = [0; 64 * PAGE_BYTES];
    let page = PAGE_BYTES as u64;
    let (mut at, end) = (offset / page * page, (offset + bytes as u64).next_multiple_of(page));
    while at < end {
        let now = ZEROES.len().min((end - at) as usize);
        files.write_at(file, at, &ZEROES[..now])?;
        at += now as u64;
    }
    Ok(())
}

/// Makes a file of this size, with its content, and makes it durable.
pub(super) fn preallocate<F: BarrierFiles>(
    files: &F,
    name: &str,
    bytes: usize,
) -> io::Result<F::File> {
    let file = files.create(name)?;
    write_pages(files, &file, 0, bytes)?;
    files.sync(&file, false)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::super::recorded_files::{Call, Recorded};
    use super::*;

    #[test]
    fn whole_pages_are_written() {
        let files = Recorded::default();
        let file = files.create("a").unwrap();
        write_pages(&files, &file, 512, 4104).unwrap();
        write_pages(&files, &file, 8192, 4096).unwrap();
        write_pages(&files, &file, 0, 65 * PAGE_BYTES).unwrap();
        let write = |at, bytes| Call::Write("a".to_owned(), at, bytes);
        let rest = write(64 * PAGE_BYTES as u64, PAGE_BYTES);
        let expected = [write(0, 8192), write(8192, 4096), write(0, 64 * PAGE_BYTES), rest];
        assert_eq!(files.calls()[1..], expected);
    }

    #[test]
    fn a_guarantee_chooses_the_calls() {
        let calls = |guarantee: Guarantee| {
            let files = Recorded::default();
            let file = files.create("a").unwrap();
            guarantee.between(&files, &file, true).unwrap();
            guarantee.end(&files, &file, true).unwrap();
            let is_sync = |call: &Call| matches!(call, Call::Sync(_));
            files.calls()[1..].iter().map(is_sync).collect::<Vec<_>>()
        };
        assert_eq!(calls(Guarantee::Durable), [true, true]);
        assert_eq!(calls(Guarantee::DurableAtEnd), [false, true]);
        assert_eq!(calls(Guarantee::Ordered), [false, false]);
    }
}
