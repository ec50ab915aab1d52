//! An open volume: who owns what, and the streams that come from it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use riopipe_metrics::StatSource;
use riopipe_order::attribute::StreamId;
use riopipe_order::engine::EngineKind;
use riopipe_session::{stages, wire};

use crate::addr::MemberAddr;
use crate::create::{self, CreateOptions};
use crate::error::{
    AcknowledgeError, CloseError, CreateError, NotClosed, OpenError, RecoverError, StreamError,
    StreamOptionsError,
};
use crate::failure::Exhausted;
use crate::identity::ConnectOptions;
use crate::info::VolumeInfo;
use crate::open::{self, OpenRequest};
use crate::reader::{Reader, ReaderOptions};
use crate::recovery::{InPlaceRange, Recovery};
use crate::shared::{Inner, lock};
use crate::start::start;
use crate::stat::{VolumeStat, VolumeStatSource};
use crate::stream::{Stream, StreamOptions};
use crate::stream_shell::StreamHandle;

/// How a volume is to be opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// The engine; `None`: what the volume was made for.
    pub engine: Option<EngineKind>,
    /// Fence an owner that is alive, or that may still come back (T8, T25).
    pub take_over: bool,
    /// How long to wait for a volume that is owned. When an owner's connection is lost, its volume
    /// stays its own for its [`loss_timeout`](ConnectOptions::loss_timeout) and a little longer,
    /// 45 s unless told otherwise; then it is free. Zero: an owned volume is refused at once.
    pub wait_for_lease: Duration,
    /// Give up an ordering log that is not there any more, is damaged, is older than the labels
    /// (T24), or does not fit the others, and with it the knowledge of what was under way last
    /// (T19). Nothing is undone then, on any target, and what is in doubt is listed (T26).
    pub accept_lost_log: bool,
    /// Check the caller's duties T11 and T15, at some cost. Debug builds always do.
    pub check_ownership: bool,
    /// How to connect.
    pub connect: ConnectOptions,
}

/// How a volume is to be recovered by hand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoverOptions {
    /// Only tell what recovery would do. Nothing is changed, not even a generation.
    pub dry_run: bool,
    /// Keep what is about to be zeroed in this file, which must not be there yet
    /// ([`undone`](crate::undone) reads it).
    pub save_undone: Option<PathBuf>,
    /// Drop the lists of in-place updates that the recovery returns: somebody looks at them.
    pub acknowledge: bool,
    /// Fence an owner that is alive, or that may still come back (T8, T25). With
    /// [`dry_run`](Self::dry_run), look at the volume of an owner that is away.
    pub take_over: bool,
    /// How long to wait for a volume that is owned, as [`OpenOptions::wait_for_lease`].
    pub wait_for_lease: Duration,
    /// Give up an ordering log that is lost, damaged or older than the labels (T19, T24, T26).
    pub accept_lost_log: bool,
    /// How to connect.
    pub connect: ConnectOptions,
}

/// How far a recovery is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecoverProgress {
    /// What is being done, as `list`, `undo` or `flush`.
    pub step: &'static str,
    /// Parts of it that are done.
    pub done: usize,
    /// Of how many.
    pub total: usize,
}

/// An ordered volume over one or more drives, owned by this process as long as it, or a stream of
/// it, is there.
#[derive(Debug)]
pub struct Volume {
    inner: Arc<Inner>,
}

impl Volume {
    /// Makes a volume of `members`, in this order: labels on every drive, and room in every
    /// target's ordering log.
    ///
    /// # Errors
    /// [`CreateError`]; what was begun is taken back as far as the targets allow.
    pub fn create(
        name: &str,
        members: &[MemberAddr],
        options: &CreateOptions,
    ) -> Result<VolumeInfo, CreateError> {
        create::create(name, members, options)
    }

    /// Looks at the volume that `members` make, without taking it.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn inspect(
        members: &[MemberAddr],
        connect: &ConnectOptions,
    ) -> Result<VolumeInfo, OpenError> {
        open::inspect(members, connect)
    }

    /// Opens the volume `name`, whose members are given in its order, and becomes its owner. What
    /// a crash has left is recovered first: the returned [`Recovery`] tells for each stream how far
    /// it reaches, with the caller's tag of its last group.
    ///
    /// ```no_run
    /// use riopipe::{OpenOptions, Place, StreamOptions, Volume};
    ///
    /// // How a database opens its log: the tag of each group is its log sequence number.
    /// # fn replay(_: u64) {}
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let members = ["10.0.0.1:4420".parse()?, "10.0.0.2:4420".parse()?];
    /// let (volume, recovery) = Volume::open("db", &members, &OpenOptions::default())?;
    /// if !recovery.is_nothing() {
    ///     eprintln!("{recovery}");
    /// }
    /// let found = recovery.stream(0).ok_or("the volume has no stream 0")?;
    /// if found.acknowledge {
    ///     // Pages that were being overwritten: each may be old or new, or torn between blocks.
    ///     for update in &found.in_place {
    ///         eprintln!("look at blocks {:?}", update.range);
    ///     }
    ///     volume.acknowledge(0)?;
    /// }
    /// // Everything up to here is there, and no fresh block of anything later.
    /// replay(found.tag);
    /// let mut log = volume.stream(0, &StreamOptions::default())?;
    /// let record = log.buf(4096)?;
    /// log.group().write(0, record, Place::Fresh).tag(found.tag + 1).submit()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`OpenError`]: a member that is missing, foreign or out of order; an owner that is alive; a
    /// log that is not the one that is due; a recovery that can't be done. Whatever it is, opening
    /// again finds the same.
    pub fn open(
        name: &str,
        members: &[MemberAddr],
        options: &OpenOptions,
    ) -> Result<(Self, Recovery), OpenError> {
        let mut request = OpenRequest {
            engine: options.engine,
            take_over: options.take_over,
            wait_for_lease: options.wait_for_lease,
            accept_lost_log: options.accept_lost_log,
            check_ownership: options.check_ownership,
            connect: &options.connect,
            save_undone: None,
            progress: &mut |_| (),
        };
        let (inner, recovery) = open::open(name, members, &mut request)?;
        Ok((Self { inner }, recovery))
    }

    /// Recovers a volume by hand, as opening it would, and gives it back; or only tells what there
    /// is to recover.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn recover(
        name: &str,
        members: &[MemberAddr],
        options: &RecoverOptions,
        progress: &mut dyn FnMut(RecoverProgress),
    ) -> Result<Recovery, OpenError> {
        let mut request = OpenRequest {
            engine: None,
            take_over: options.take_over,
            wait_for_lease: options.wait_for_lease,
            accept_lost_log: options.accept_lost_log,
            check_ownership: false,
            connect: &options.connect,
            save_undone: options.save_undone.as_deref(),
            progress: &mut |at| {
                let (step, done, total) = (at.phase.name(), at.done, at.total);
                progress(RecoverProgress { step, done, total });
            },
        };
        if options.dry_run {
            return open::dry_run(name, members, &mut request);
        }
        let (inner, mut recovery) = open::open(name, members, &mut request)?;
        let volume = Self { inner };
        for found in recovery.streams.iter_mut().filter(|found| found.acknowledge) {
            if options.acknowledge {
                volume.acknowledge(found.stream.0).map_err(|error| match error {
                    AcknowledgeError::Recover(error) => error,
                    AcknowledgeError::NotPending { .. } => {
                        unreachable!("only those that wait for it are acknowledged")
                    }
                })?;
                found.acknowledge = false;
            }
        }
        volume.release(volume.inner.connect.timeout).map_err(|error| match error {
            CloseError::Call { target, source } => {
                RecoverError::Call { target, doing: "giving the volume back", source }
            }
            CloseError::StreamsOpen(_) => unreachable!("no stream was opened"),
        })?;
        Ok(recovery)
    }

    /// What it is.
    #[must_use]
    pub fn info(&self) -> &VolumeInfo {
        &self.inner.info
    }

    /// Its size in blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.inner.topology.blocks()
    }

    /// Where the time of its groups has gone since it was opened: of about one in
    /// [`stages::ONE_IN`], the times spent in each of an initiator's stages, for all streams
    /// together. May be asked at any time, from any thread; no stream waits for it.
    #[must_use]
    pub fn stages(&self) -> Vec<(stages::Stage, stages::Distribution)> {
        self.inner.stages.snapshot().collect()
    }

    /// What it is doing: its targets, how far its open streams are, and where the time of their
    /// groups has gone. May be asked at any time, from any thread; no stream waits for it.
    #[must_use]
    pub fn stat(&self) -> VolumeStat {
        self.inner.stat()
    }

    /// The same figures for a server of metrics, as OpenMetrics text for Prometheus and as the JSON
    /// of [`stat`](Self::stat), which `rio volume stat` shows at `/stat`. The library serves nothing
    /// itself: give this to the HTTP server that the program has.
    ///
    /// It does not keep the volume open. Once the volume and all its streams are gone, it answers
    /// [`StatError::Gone`](crate::StatError::Gone).
    ///
    /// ```no_run
    /// use riopipe::{OpenOptions, Volume};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let members = ["10.0.0.1:4420".parse()?];
    /// let (volume, _) = Volume::open("db", &members, &OpenOptions::default())?;
    /// let figures = volume.stat_source();
    /// // In the handler of `GET /metrics`:
    /// let page = figures.open_metrics()?;
    /// # drop(page);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn stat_source(&self) -> Arc<dyn StatSource> {
        Arc::new(VolumeStatSource(Arc::downgrade(&self.inner)))
    }

    /// The engine that runs.
    #[must_use]
    pub fn engine(&self) -> EngineKind {
        self.inner.engine
    }

    /// Opens a stream. Its id means the same after a restart. If its last life in this process
    /// ended without a close, it is recovered first ([`Stream::recovery`] tells what was found);
    /// other streams go on meanwhile.
    ///
    /// # Errors
    /// [`StreamError`].
    pub fn stream(&self, id: u16, options: &StreamOptions) -> Result<Stream, StreamError> {
        let stream = StreamId(id);
        let inner = &self.inner;
        if !(1..=1024).contains(&options.queue_depth) {
            return Err(StreamOptionsError::QueueDepth.into());
        }
        if options.kept_bytes_max < wire::BLOCK_BYTES as u64 {
            return Err(StreamOptionsError::KeptBytes.into());
        }
        let reserved = inner.reserve(stream)?;
        let started = (|| {
            let mut recovery = None;
            if reserved.unrecovered {
                let found = inner.recover_stream(stream)?;
                inner.stream_recovered(&found);
                if let Some(pending) = found.pending() {
                    let updates = pending.len();
                    return Err(StreamError::InPlacePending { stream, updates });
                }
                recovery = Some(found);
            }
            let handle =
                StreamHandle::new(inner.mark(stream)).map_err(|_| Exhausted::Descriptors)?;
            let shell = start(inner, stream, &reserved.qids, options, &handle)
                .inspect_err(|_| inner.forget_stream(stream, &handle))?;
            Ok(Stream::new(Arc::clone(inner), shell, handle, options, recovery))
        })();
        if started.is_err() {
            inner.stream_dropped(stream);
        }
        started
    }

    /// Reads the volume from any thread, beside its streams and without waiting for them. Connections
    /// are made when they are first needed.
    ///
    /// ```no_run
    /// use riopipe::{OpenOptions, ReaderOptions, Volume};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let members = ["10.0.0.1:4420".parse()?];
    /// let (volume, _) = Volume::open("db", &members, &OpenOptions::default())?;
    /// let reader = volume.reader(&ReaderOptions::default());
    /// let threads = (0..4).map(|n| {
    ///     let reader = reader.clone();
    ///     std::thread::spawn(move || {
    ///         let mut page = vec![0; 4096];
    ///         reader.read(100 + n, &mut page, None).map(|()| page)
    ///     })
    /// });
    /// let pages = threads.map(|thread| thread.join().expect("no reader panics"));
    /// let pages = pages.collect::<Result<Vec<_>, _>>()?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn reader(&self, options: &ReaderOptions) -> Reader {
        Reader::new(Arc::clone(&self.inner), options)
    }

    /// The writes beyond a stream's last group that wait to be [acknowledged](Self::acknowledge):
    /// in-place updates, and where a log was given up, fresh and extending writes in doubt. These blocks may hold
    /// the old content or the new (T11, T26).
    #[must_use]
    pub fn in_place(&self, id: u16) -> Vec<InPlaceRange> {
        lock(&self.inner.state).pending(StreamId(id)).map(<[_]>::to_vec).unwrap_or_default()
    }

    /// Says that the in-place updates of a recovered stream have been looked at: the targets forget
    /// the list, and the stream can be opened (T9).
    ///
    /// # Errors
    /// [`AcknowledgeError`].
    pub fn acknowledge(&self, id: u16) -> Result<(), AcknowledgeError> {
        self.inner.acknowledge_stream(StreamId(id))
    }

    /// Gives the volume back, so that anyone may open it. All streams must have been closed. A target
    /// that is away is waited for, for as long as [`ConnectOptions::timeout`].
    ///
    /// # Errors
    /// [`NotClosed`], with the volume: it is refused while streams are open, and fails at a target.
    pub fn close(self) -> Result<(), NotClosed> {
        let timeout = self.inner.connect.timeout;
        self.close_within(timeout)
    }

    /// As [`close`](Self::close), and waits for the targets at most for `timeout`.
    ///
    /// # Errors
    /// As [`close`](Self::close).
    pub fn close_within(self, timeout: Duration) -> Result<(), NotClosed> {
        self.release(timeout).map_err(|error| NotClosed { error, back: self })
    }

    fn release(&self, timeout: Duration) -> Result<(), CloseError> {
        let open = lock(&self.inner.state).open_streams();
        if open > 0 {
            return Err(CloseError::StreamsOpen(open));
        }
        self.inner.release(timeout)
    }
}
