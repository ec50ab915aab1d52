//! A file server's load with the shares of calls that `dbench` has.
//!
//! Each client has a directory of its own. An operation is one pass: of 14 opens of files 3 make new
//! ones; 7 writes and 22 reads; 3 files are removed, and in every second pass one is renamed; one
//! `fsync` (*Flush*). The shares are those of dbench's usual load file. Its calls for attributes and
//! lists of directories are missing, since they change nothing on the drive.

use std::io;

use super::{BarrierFiles, FsLoad, Numbers};
use crate::harness::{self, SideCpu, Worker};
use crate::latency::Latencies;
use crate::sample::Sample;

/// The files of a client at the beginning, and that of a pass.
const FILES: u64 = 32;
const NEW_FILES: usize = 3;
const OPENS: usize = 11;
const READS: usize = 22;
/// The writes to each new file, and the largest one, bytes.
const WRITES: [usize; NEW_FILES] = [3, 2, 2];
const WRITE_BYTES_MAX: u64 = 16 << 10;

/// One client.
struct Client<F> {
    files: F,
    /// The numbers of the files: from the oldest one to before the next one.
    oldest: u64,
    next: u64,
    passes: u64,
    numbers: Numbers,
    data: Vec<u8>,
    buf: Vec<u8>,
}

fn name(number: u64) -> String {
    format!("file-{number}")
}

impl<F: BarrierFiles> Client<F> {
    fn new(files: F, seed: u64) -> io::Result<Self> {
        let data = vec![0x5a; WRITE_BYTES_MAX as usize];
        for number in 0..FILES {
            let file = files.create(&name(number))?;
            files.append(&file, &data[..data.len() / 2])?;
        }
        let numbers = Numbers::new(seed);
        Ok(Self { files, oldest: 0, next: FILES, passes: 0, numbers, data, buf: Vec::new() })
    }

    /// Returns the bytes that were written.
    fn pass(&mut self) -> io::Result<u64> {
        let mut bytes = 0;
        for (number, writes) in WRITES.into_iter().enumerate() {
            let new = name(self.next);
            let is_renamed = number == 0 && self.passes.is_multiple_of(2);
            let first = if is_renamed { format!("{new}.tmp") } else { new.clone() };
            let file = self.files.create(&first)?;
            for _ in 0..writes {
                let size = 1 + self.numbers.below(WRITE_BYTES_MAX) as usize;
                self.files.append(&file, &self.data[..size])?;
                bytes += size as u64;
            }
            if number + 1 == NEW_FILES {
                self.files.sync(&file, false)?;
            }
            drop(file);
            if is_renamed {
                self.files.rename(&first, &new)?;
            }
            self.next += 1;
        }
        for _ in 0..OPENS {
            let chosen = self.oldest + self.numbers.below(self.next - self.oldest);
            let file = self.files.open(&name(chosen))?;
            for _ in 0..READS / OPENS {
                self.files.read_all(&file, &mut self.buf)?;
            }
        }
        for _ in 0..NEW_FILES {
            self.files.remove(&name(self.oldest))?;
            self.oldest += 1;
        }
        self.passes += 1;
        Ok(bytes)
    }
}

/// Runs the load: each thread is a client.
///
/// # Errors
/// The file system fails.
pub fn dbench(
    files: &impl BarrierFiles,
    load: &FsLoad,
    cpu: impl Fn() -> SideCpu,
) -> io::Result<Sample> {
    let work = |thread: u32, worker: &Worker<'_>| -> io::Result<Latencies> {
        let directory = files.directory(&format!("container-{thread}"))?;
        let mut client = Client::new(directory, 1 + u64::from(thread))?;
        worker.repeat(|| Ok(()), || client.pass())
    };
    harness::run(load.window, load.threads, cpu, work)
}

#[cfg(test)]
mod tests {
    use super::super::recorded_files::{Call, Recorded};
    use super::*;

    #[test]
    fn two_passes_have_the_shares_of_the_load_file() {
        let files = Recorded::default();
        let mut client = Client::new(files.directory("a").unwrap(), 1).unwrap();
        let made = files.calls().len();
        client.pass().unwrap();
        client.pass().unwrap();
        let calls = &files.calls()[made..];
        let count = |is: fn(&&Call) -> bool| calls.iter().filter(is).count();
        assert_eq!(count(|call| matches!(call, Call::Create(_) | Call::Open(_))), 28);
        assert_eq!(count(|call| matches!(call, Call::Write(..))), 14);
        assert_eq!(count(|call| matches!(call, Call::Read(_))), 44);
        assert_eq!(count(|call| matches!(call, Call::Remove(_))), 6);
        assert_eq!(count(|call| matches!(call, Call::Rename(..))), 1);
        assert_eq!(count(|call| matches!(call, Call::Sync(_))), 2);
        assert_eq!(client.next - client.oldest, FILES);
    }
}
