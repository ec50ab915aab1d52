//! Lines that a thread of its own writes: whoever has something to say never waits for a reader,
//! and never fails because there is none.

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

/// Lines that may wait for a slow reader; more are lost, and counted.
const LINES_MAX: usize = 1024;
/// How often it is looked whether there is more to say, and whether it can be said again.
const LOOK: Duration = Duration::from_secs(5);
/// Between two tries at a descriptor that somebody made non-blocking.
const PAUSE: Duration = Duration::from_millis(10);

/// The end at which lines go in.
#[derive(Debug)]
pub(super) struct Lines {
    queue: SyncSender<Line>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Lines that found no room, and that no line in the queue tells of.
    dropped: AtomicU64,
    /// Lines that are in the queue or being written.
    waiting: AtomicUsize,
}

#[derive(Debug)]
struct Line {
    text: Vec<u8>,
    /// Lines that found no room before this one.
    lost_before: u64,
}

impl Lines {
    /// Writes what is said to `sink`. Now and then `more` is asked for lines of its own.
    pub(super) fn start(
        sink: impl Write + Send + 'static,
        more: impl Fn() -> Vec<Vec<u8>> + Send + 'static,
    ) -> Self {
        let (queue, lines) = mpsc::sync_channel(LINES_MAX);
        let state = Arc::new(State::default());
        let writer = Writer { sink, lost: 0, state: Arc::clone(&state) };
        // Without a thread the queue has no other end: every line is lost, and nobody waits.
        let _ = thread::Builder::new().name("log".to_owned()).spawn(|| writer.run(lines, more));
        Self { queue, state }
    }

    /// Says a line, or several at once; at most one copy and one system call (to wake the thread).
    pub(super) fn say(&self, text: impl Into<Vec<u8>>) {
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

    /// Waits until all has been written, or nothing was for as long as `patience`.
    pub(super) fn drain(&self, patience: Duration) {
        // Tells of what was lost last.
        self.say([]);
        let mut left = usize::MAX;
        let mut since = Instant::now();
        loop {
            let now = self.state.waiting.load(Ordering::Acquire);
            if now < left {
                (left, since) = (now, Instant::now());
            }
            if left == 0 || since.elapsed() >= patience {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Line {
    /// An empty one only brings a count.
    fn count(&self) -> u64 {
        u64::from(!self.text.is_empty())
    }
}

/// The thread.
struct Writer<W> {
    sink: W,
    /// Lines that were lost and of which nobody has been told.
    lost: u64,
    state: Arc<State>,
}

impl<W: Write> Writer<W> {
    fn run(mut self, lines: Receiver<Line>, more: impl Fn() -> Vec<Vec<u8>>) {
        let mut look_at = Instant::now() + LOOK;
        loop {
            let next = match lines.try_recv() {
                Ok(line) => Ok(line),
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {
                    // What was lost last has no line after it that would tell.
                    self.lost += self.state.dropped.swap(0, Ordering::Relaxed);
                    self.tell();
                    lines.recv_timeout(look_at.saturating_duration_since(Instant::now()))
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
            if Instant::now() >= look_at {
                for text in more() {
                    self.put(&Line { text, lost_before: 0 });
                }
                look_at = Instant::now() + LOOK;
            }
        }
    }

    fn put(&mut self, line: &Line) {
        self.lost += line.lost_before;
        if !self.tell() || !self.write(&line.text) {
            self.lost += line.count();
        }
    }

    /// Says how many lines were lost, if any; whether that is no secret any more.
    fn tell(&mut self) -> bool {
        if self.lost == 0 {
            return true;
        }
        let text = format!(
            "rio: {} lines of the log are missing here: standard error could not be written, or not \
             fast enough\n",
            self.lost
        );
        let told = self.write(text.as_bytes());
        if told {
            self.lost = 0;
        }
        told
    }

    /// Whether all of it was written. It may wait for the reader as long as that takes.
    fn write(&mut self, mut text: &[u8]) -> bool {
        while !text.is_empty() {
            match self.sink.write(text) {
                Ok(0) => return false,
                Ok(n) => text = &text[n..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(PAUSE),
                // Nobody reads any more, or the disk is full: the next line is tried again.
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

    /// What was written, by a reader that can be held up and that may fail.
    #[derive(Clone, Default)]
    struct Reader(Arc<Mutex<Read>>);

    #[derive(Default)]
    struct Read {
        text: String,
        /// Writes that fail from now on, with this error.
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
            // Not all at once, as with a pipe that is nearly full.
            let some = bytes.len().min(100);
            read.text.push_str(std::str::from_utf8(&bytes[..some]).unwrap());
            Ok(some)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const PATIENCE: Duration = Duration::from_secs(60);

    fn start(reader: &Reader) -> Lines {
        Lines::start(reader.clone(), Vec::new)
    }

    #[test]
    fn nobody_waits_for_a_reader_that_does_not_read_and_what_is_lost_is_counted() {
        let reader = Reader::default();
        let lines = start(&reader);
        let said = 3 * LINES_MAX;
        {
            // Whoever holds this holds up the thread, and would hold up the rest of this block.
            let _held = reader.lock();
            for n in 0..said {
                lines.say(format!("line {n}\n"));
            }
            lines.drain(Duration::from_millis(10));
        }
        lines.say("after\n");
        lines.drain(PATIENCE);
        let read = reader.lines();
        let is_notice = |line: &&String| line.contains("are missing here");
        let kept: Vec<_> = read.iter().filter(|line| line.starts_with("line ")).collect();
        assert!((LINES_MAX..=LINES_MAX + 1).contains(&kept.len()), "{}", kept.len());
        for (n, line) in kept.iter().enumerate() {
            assert_eq!(**line, format!("line {n}"));
        }
        let lost: usize = read
            .iter()
            .filter(is_notice)
            .map(|line| line.split(' ').nth(1).unwrap().parse::<usize>().unwrap())
            .sum();
        assert_eq!(kept.len() + lost, said);
        let notice = read.iter().position(|line| is_notice(&line)).unwrap();
        assert!(notice < read.iter().position(|line| line == "after").unwrap());
    }

    #[test]
    fn a_reader_that_is_gone_or_a_full_disk_costs_lines_and_nothing_else() {
        for error in [libc::EPIPE, libc::ENOSPC, libc::EIO] {
            let reader = Reader::default();
            let lines = start(&reader);
            // What is said, and what is said of what was lost, fails.
            reader.lock().fails = Some((u32::MAX, error));
            for n in 0..20 {
                lines.say(format!("line {n}\n"));
            }
            lines.drain(PATIENCE);
            assert_eq!(reader.lines(), [""; 0]);
            let Some((left, _)) = reader.lock().fails else { unreachable!("it was just set") };
            assert!(u32::MAX - left < 100, "{} tries for 20 lines", u32::MAX - left);
            reader.lock().fails = None;
            lines.say("again\n");
            lines.drain(PATIENCE);
            let read = reader.lines();
            assert!(read[0].starts_with("rio: 20 lines of the log are missing here"), "{read:?}");
            assert_eq!(read[1..], ["again"]);
        }
    }

    #[test]
    fn a_descriptor_that_somebody_made_non_blocking_loses_nothing() {
        let reader = Reader::default();
        let lines = start(&reader);
        reader.lock().fails = Some((3, libc::EAGAIN));
        lines.say("a\n");
        lines.say("b\n");
        lines.drain(PATIENCE);
        assert_eq!(reader.lines(), ["a", "b"]);
    }
}
