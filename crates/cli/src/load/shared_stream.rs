//! A stream that all writers share. One thread, the dispatcher, has the stream, and all groups go through
//! its queue: so the writers contend for it as in a stack with one queue.

use std::{
    collections::VecDeque,
    sync::{
        Arc, OnceLock,
        mpsc::{Receiver, Sender, TryRecvError, channel},
    },
};

use riopipe::{Seq, Stream, StreamWaker, Until, Watch};
use riopipe_lab::generator::Extent;
use riopipe_platform::CpuClock;

use super::{
    Queue,
    own_stream::{buffers, group},
};
use crate::failure::{Code, Failure};

/// A group of a writer.
struct Ask {
    writer: usize,
    extents: Vec<Extent>,
}

/// The thread that has the stream.
pub(super) struct Dispatcher {
    stream: Stream,
    asks: Receiver<Ask>,
    /// To each writer, the seqs of its groups.
    replies: Vec<Sender<Seq>>,
    clock: Clock,
}

/// The CPU time of the dispatcher.
#[derive(Clone, Default)]
pub(super) struct Clock(Arc<OnceLock<CpuClock>>);

impl Clock {
    pub(super) fn used_ns(&self) -> u64 {
        self.0.get().and_then(CpuClock::used_ns).unwrap_or(0)
    }
}

impl Dispatcher {
    /// The dispatcher, and a queue for each of so many writers.
    pub(super) fn new(stream: Stream, writers: u32) -> (Self, Vec<SharedStream>) {
        let (asking, asks) = channel();
        let (replies, answers): (Vec<_>, Vec<_>) = (0..writers).map(|_| channel()).unzip();
        let queue = |(writer, replies)| SharedStream {
            writer,
            asking: Some(asking.clone()),
            waker: stream.waker(),
            watch: stream.watch(),
            replies,
            in_flight: VecDeque::new(),
            submitted: 0,
            complete: 0,
        };
        let queues = answers.into_iter().enumerate().map(queue).collect();
        (Self { stream, asks, replies, clock: Clock::default() }, queues)
    }

    /// The clock that shows the CPU time of [`run`](Self::run).
    pub(super) fn clock(&self) -> Clock {
        self.clock.clone()
    }

    /// Submits what the writers ask for, until none is left, and closes the stream.
    pub(super) fn run(mut self) -> Result<(), Failure> {
        // It runs once, so the clock is not set.
        let _ = self.clock.0.set(CpuClock::of_this_thread());
        loop {
            match self.asks.try_recv() {
                Ok(Ask { writer, extents }) => {
                    let buffers = buffers(&mut self.stream, &extents)?;
                    let group = group(&mut self.stream, &extents, buffers.into_iter());
                    let seq = group
                        .submit_or_wait(None)
                        .map_err(|error| Failure::storage(&error.kind))?;
                    // A writer that has ended needs no answer.
                    let _ = self.replies[writer].send(seq);
                }
                Err(TryRecvError::Empty) => {
                    // Sends what was submitted. Sleeps on the queue and on the stream at once.
                    self.stream
                        .wait(Until::Woken, None)
                        .map_err(|error| Failure::storage(&error))?;
                }
                Err(TryRecvError::Disconnected) => {
                    return self
                        .stream
                        .close()
                        .map(|_| ())
                        .map_err(|error| Failure::storage(&error));
                }
            }
        }
    }
}

/// The queue of one writer to the dispatcher.
pub(super) struct SharedStream {
    writer: usize,
    /// `None` only while this is dropped.
    asking: Option<Sender<Ask>>,
    waker: StreamWaker,
    watch: Watch,
    replies: Receiver<Seq>,
    /// The groups whose seq is known, and that are not known to be complete.
    in_flight: VecDeque<Seq>,
    submitted: u64,
    complete: u64,
}

impl Queue for SharedStream {
    fn read(&mut self, _: &[Extent], _: &mut Vec<u8>) -> Result<(), Failure> {
        Err(Failure::new(Code::Usage, "writers that share a stream do not read"))
    }

    fn submit(&mut self, extents: &[Extent]) -> Result<bool, Failure> {
        let ask = Ask { writer: self.writer, extents: extents.to_vec() };
        let asking = self.asking.as_ref().ok_or_else(ended)?;
        asking.send(ask).map_err(|_| ended())?;
        self.submitted += 1;
        Ok(true)
    }

    fn wait(&mut self, groups: Option<u64>) -> Result<u64, Failure> {
        // The dispatcher sleeps on its stream: this ends that sleep, or the next one.
        self.waker.wake();
        let wanted = groups.unwrap_or(self.complete + 1).min(self.submitted);
        while self.complete + (self.in_flight.len() as u64) < wanted {
            self.in_flight.push_back(self.replies.recv().map_err(|_| ended())?);
        }
        self.in_flight.extend(self.replies.try_iter());
        let complete = match wanted.checked_sub(self.complete + 1) {
            Some(index) => {
                let seq = self.in_flight[index as usize];
                self.watch
                    .wait_complete(seq, None)
                    .map_err(|error| Failure::storage(&error))?
                    .complete
            }
            None => self.watch.marks().complete,
        };
        while self.in_flight.front().is_some_and(|seq| *seq <= complete) {
            self.in_flight.pop_front();
            self.complete += 1;
        }
        Ok(self.complete)
    }

    fn close(self) -> Result<(), Failure> {
        Ok(())
    }
}

impl Drop for SharedStream {
    fn drop(&mut self) {
        // Wakes the dispatcher, which ends when no writer has a queue any more.
        self.asking = None;
        self.waker.wake();
    }
}

/// The failure of a writer whose dispatcher has failed. The failure of the dispatcher is reported.
fn ended() -> Failure {
    Failure::new(Code::Storage, "the thread that has the stream has ended")
}
