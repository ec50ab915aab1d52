//! Lines that a separate thread writes: no caller ever waits for a reader, or fails without one.

use std::{
    io::{ErrorKind, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError},
    },
    thread,
    time::{Duration, Instant},
};

/// Largest number of lines that wait for a slow reader; others are lost, and counted.
const LINES_MAX: usize = 1024;
/// Interval in which the thread checks for more lines, and tries a failed sink again.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Pause between two attempts at a descriptor that another process made non-blocking.
const PAUSE: Duration = Duration::from_millis(10);

/// The sending end of the lines.
#[derive(Debug)]
pub(super) struct Lines {
    queue: SyncSender<Line>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Lost lines that no line in the queue reports.
    dropped: AtomicU64,
    /// Number of lines in the queue or being written.
    waiting: AtomicUsize,
}

#[derive(Debug)]
struct Line {
    text: Vec<u8>,
    /// Number of lines that were lost before this one.
    lost_before: u64,
}

impl Lines {
    /// Writes all lines to `sink`. From time to time it calls `more` for lines of its own.
    pub(super) fn start(
        sink: impl Write + Send + 'static,
        more: impl Fn() -> Vec<Vec<u8>> + Send + 'static,
    ) -> Self {
        let (queue, lines) = mpsc::sync_channel(LINES_MAX);
        let state = Arc::new(State::default());
        let writer = Writer { sink, lost: 0, state: Arc::clone(&state) };
        // Without a thread the queue has no receiver: every line is lost, and no caller waits.
        let _ = thread::Builder::new().name("log".to_owned()).spawn(|| writer.run(lines, more));
        Self { queue, state }
    }

    /// Queues a line, or several at once; at most one copy and one system call (to wake the
    /// thread).
    pub(super) fn push(&self, text: impl Into<Vec<u8>>) {
        let lost_before = self.state.dropped.swap(0, Ordering::Relaxed);
        self.state.waiting.fetch_add(1, Ordering::Relaxed);
        let line = Line { text: text.into(), lost_before };
        if let Err(TrySendError::Full(line) | TrySendError::Disconnected(line)) =
            self.queue.try_send(line)
        {
            self.state.waiting.fetch_sub(1, Ordering::Relaxed);
            self.state.dropped.fetch_add(line.lost_before + line.count(), Ordering::Relaxed);
        }
    }

    /// Whether everything that was queued is written.
    pub(super) fn is_idle(&self) -> bool {
        self.state.waiting.load(Ordering::Acquire) == 0
    }

    /// Waits until all is written, or nothing was for as long as `timeout`.
    pub(super) fn drain(&self, timeout: Duration) {
        // Reports the latest lost lines.
        self.push([]);
        let mut left = usize::MAX;
        let mut since = Instant::now();
        loop {
            let now = self.state.waiting.load(Ordering::Acquire);
            if now < left {
                (left, since) = (now, Instant::now());
            }
            if left == 0 || since.elapsed() >= timeout {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Line {
    /// An empty one only carries a count.
    fn count(&self) -> u64 {
        u64::from(!self.text.is_empty())
    }
}

/// The writing thread.
struct Writer<W> {
    sink: W,
    /// Lost lines that have not been reported.
    lost: u64,
    state: Arc<State>,
}

impl<W: Write> Writer<W> {
    fn run(mut self, lines: Receiver<Line>, more: impl Fn() -> Vec<Vec<u8>>) {
        let mut check_at = Instant::now() + CHECK_INTERVAL;
        loop {
            let next = match lines.try_recv() {
                Ok(line) => Ok(line),
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {
                    // No line follows the latest lost ones, which would report them.
                    self.lost += self.state.dropped.swap(0, Ordering::Relaxed);
                    self.report_lost();
                    lines.recv_timeout(check_at.saturating_duration_since(Instant::now()))
                }
            };
            match next {
                Ok(line) => {
                    self.put(&line);
                    self.state.waiting.fetch_sub(1, Ordering::Release);
                }
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if Instant::now() >= check_at {
                for text in more() {
                    self.put(&Line { text, lost_before: 0 });
                }
                check_at = Instant::now() + CHECK_INTERVAL;
            }
        }
    }

    fn put(&mut self, line: &Line) {
        self.lost += line.lost_before;
        if !self.report_lost() || !self.write(&line.text) {
            self.lost += line.count();
        }
    }

    /// Reports the number of lost lines, if any; returns whether that succeeded.
    fn report_lost(&mut self) -> bool {
        if self.lost == 0 {
            return true;
        }
        let message = format!(
            "{} lines of the log are missing here: standard error could not be written, or not \
             fast enough",
            self.lost
        );
        let text = super::own_line(&message, ("lost", self.lost));
        let is_written = self.write(text.as_bytes());
        if is_written {
            self.lost = 0;
        }
        is_written
    }

    /// Writes `text`; returns whether all of it was written. It may wait for the reader for any
    /// time.
    fn write(&mut self, mut text: &[u8]) -> bool {
        while !text.is_empty() {
            match self.sink.write(text) {
                Ok(0) => return false,
                Ok(n) => text = &text[n..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(PAUSE),
                // The reader is gone, or the disk is full: the next line is tried again.
                Err(_) => return false,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Mutex, MutexGuard},
    };

    use super::*;

    /// The written text, with a reader that can be blocked and that may fail.
    #[derive(Clone, Default)]
    struct Reader(Arc<Mutex<Read>>);

    #[derive(Default)]
    struct Read {
        text: String,
        /// Number of writes that will fail, and their error.
        fails: Option<(u32, i32)>,
    }

    impl Reader {
        fn lock(&self) -> MutexGuard<'_, Read> {
            self.0.lock().unwrap()
        }

        fn lines(&self) -> Vec<String> {
            self.lock().text.lines().map(str::to_owned).collect()
        }
    }

    impl Write for Reader {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut read = self.lock();
            if let Some((times @ 1.., error)) = read.fails {
                read.fails = Some((times - 1, error));
                return Err(io::Error::from_raw_os_error(error));
            }
            // Only a part at a time, as with a pipe that is nearly full.
            let some = bytes.len().min(100);
            read.text.push_str(std::str::from_utf8(&bytes[..some]).unwrap());
            Ok(some)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const TIMEOUT: Duration = Duration::from_secs(60);

    fn start(reader: &Reader) -> Lines {
        Lines::start(reader.clone(), Vec::new)
    }

    #[test]
    fn a_blocked_reader_delays_no_caller_and_lost_lines_are_counted() {
        let reader = Reader::default();
        let lines = start(&reader);
        let printed = 3 * LINES_MAX;
        {
            // While this is held, the thread is blocked, as the rest of this block would be.
            let _held = reader.lock();
            for n in 0..printed {
                lines.push(format!("line {n}\n"));
            }
            lines.drain(Duration::from_millis(10));
        }
        // Until the thread has run, there is no space for another line.
        lines.drain(TIMEOUT);
        lines.push("after\n");
        lines.drain(TIMEOUT);
        let read = reader.lines();
        let is_notice = |line: &&String| line.contains("are missing here");
        let kept: Vec<_> = read.iter().filter(|line| line.starts_with("line ")).collect();
        assert!((LINES_MAX..=LINES_MAX + 1).contains(&kept.len()), "{}", kept.len());
        // The thread may take its first line at any time, which makes space for one more.
        for (n, line) in kept.iter().enumerate().take(LINES_MAX) {
            assert_eq!(**line, format!("line {n}"));
        }
        let lost: usize = read
            .iter()
            .filter(is_notice)
            .map(|line| line.split(' ').nth(1).unwrap().parse::<usize>().unwrap())
            .sum();
        assert_eq!(kept.len() + lost, printed);
        let notice = read.iter().position(|line| is_notice(&line)).unwrap();
        assert!(notice < read.iter().position(|line| line == "after").unwrap());
    }

    #[test]
    fn a_missing_reader_or_a_full_disk_only_costs_lines() {
        for error in [libc::EPIPE, libc::ENOSPC, libc::EIO] {
            let reader = Reader::default();
            let lines = start(&reader);
            // Both the lines and the reports of lost lines fail.
            reader.lock().fails = Some((u32::MAX, error));
            for n in 0..20 {
                lines.push(format!("line {n}\n"));
            }
            lines.drain(TIMEOUT);
            assert_eq!(reader.lines(), [""; 0]);
            let Some((left, _)) = reader.lock().fails else { unreachable!("it was just set") };
            assert!(u32::MAX - left < 100, "{} tries for 20 lines", u32::MAX - left);
            reader.lock().fails = None;
            lines.push("again\n");
            lines.drain(TIMEOUT);
            let read = reader.lines();
            assert!(read[0].starts_with("rio: 20 lines of the log are missing here"), "{read:?}");
            assert_eq!(read[1..], ["again"]);
        }
    }

    #[test]
    fn a_non_blocking_descriptor_loses_no_lines() {
        let reader = Reader::default();
        let lines = start(&reader);
        reader.lock().fails = Some((3, libc::EAGAIN));
        lines.push("a\n");
        lines.push("b\n");
        lines.drain(TIMEOUT);
        assert_eq!(reader.lines(), ["a", "b"]);
    }
}
