//! Standard input and output as streams of bytes that don't keep the program from stopping.
//!
//! A signal does not end a read from a pipe without data. So each operation has a short time limit,
//! and then returns [`ErrorKind::WouldBlock`]. The caller stops, or repeats the operation.

use std::{
    fs::File,
    io::{self, ErrorKind, Read, Write},
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The longest time that an operation waits for the other end.
const WAIT: Duration = Duration::from_millis(100);
/// The most bytes that a pipe certainly takes without a wait when it has space: a page.
const PIPE_SPACE: usize = 4096;

/// A standard stream without a buffer.
#[derive(Debug)]
pub(crate) struct StandardStream {
    file: File,
    /// A regular file always has space.
    is_regular: bool,
}

impl StandardStream {
    /// The stream behind `standard`, such as [`io::stdin`].
    pub(crate) fn of(standard: &impl AsFd) -> io::Result<Self> {
        let file = File::from(standard.as_fd().try_clone_to_owned()?);
        let is_regular = file.metadata()?.is_file();
        Ok(Self { file, is_regular })
    }
}

fn wait(fd: BorrowedFd<'_>, events: PollFlags) -> io::Result<()> {
    let limit = Timespec { tv_sec: 0, tv_nsec: WAIT.subsec_nanos().into() };
    match poll(&mut [PollFd::from_borrowed_fd(fd, events)], Some(&limit))? {
        0 => Err(ErrorKind::WouldBlock.into()),
        // An error or the other end's end is found by the operation itself.
        _ => Ok(()),
    }
}

impl Read for StandardStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        wait(self.file.as_fd(), PollFlags::IN)?;
        self.file.read(into)
    }
}

impl Write for StandardStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.is_regular {
            return self.file.write(bytes);
        }
        wait(self.file.as_fd(), PollFlags::OUT)?;
        self.file.write(&bytes[..bytes.len().min(PIPE_SPACE)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
