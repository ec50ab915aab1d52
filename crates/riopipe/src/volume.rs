//! An open volume: opening, recovering and releasing it, and the streams and readers that it makes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use riopipe_metrics::StatSource;
use riopipe_order::attribute::StreamId;
use riopipe_order::engine::EngineKind;
use riopipe_session::initiator::volume::opening::VolumeChange;
use riopipe_session::initiator::volume::state::Reserved;
use riopipe_session::{stages, wire};

use crate::addr::MemberAddr;
use crate::background::BackgroundThread;
use crate::create::{self, CreateOptions};
use crate::create_error::CreateError;
use crate::error::{
    AcknowledgeError, CloseError, OpenError, RecoverError, StreamError, StreamOptionsError,
};
use crate::failure::Exhausted;
use crate::identity::ConnectOptions;
use crate::info::{Outlook, VolumeInfo};
use crate::lock::lock;
use crate::open::{self, OpenRequest, Opened};
use crate::open_volume::OpenVolume;
use crate::options::{QUEUE_DEPTH_MAX, ReaderOptions, StreamOptions};
use crate::reader::Reader;
use crate::recovery::{InPlaceRange, Recovery, StreamRecovery};
use crate::start::start;
use crate::stat::{VolumeStat, VolumeStatSource};
use crate::stream::Stream;
use crate::stream_handle::StreamHandle;
use crate::stream_shell::StreamShell;
use crate::survey::{self, DeleteError, DeletedVolume, ListError, VolumeList};

/// The options for opening a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// The engine. `None`: the one for which the volume was created.
    pub engine: Option<EngineKind>,
    /// Fence an owner that is alive, or that may still come back (traps T8, T25).
    pub take_over: bool,
    /// How long to wait for a volume that is owned. When an owner's connection is lost, its targets
    /// keep the volume for it for its [`loss_timeout`](ConnectOptions::loss_timeout) and a little
    /// longer, 45 s by default; then the volume is free. Zero: an owned volume is refused at once.
    pub wait_for_lease: Duration,
    /// Give up an ordering log that is missing, damaged, or older than the labels (trap T24), or
    /// that contradicts the others. The order of the writes that were in flight last is then not
    /// known (trap T19). So nothing is undone, on any target, and the writes in doubt are listed
    /// (trap T26).
    pub accept_lost_log: bool,
    /// Check the caller's duties T11 and T15, at some cost. Debug builds always do.
    pub check_ownership: bool,
    /// The options of the connections.
    pub connect: ConnectOptions,
}

/// The options for recovering a volume by hand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoverOptions {
    /// Only report what recovery would do. Nothing is changed, not even a generation.
    pub dry_run: bool,
    /// Save the data that is about to be zeroed in this file, which must not exist yet
    /// ([`undone`](crate::undone) reads it).
    pub save_undone: Option<PathBuf>,
    /// Acknowledge the lists of in-place updates that the recovery returns: the targets drop them.
    /// The caller checks these blocks from the returned lists.
    pub acknowledge: bool,
    /// Fence an owner that is alive, or that may still come back (traps T8, T25). With
    /// [`dry_run`](Self::dry_run), inspect the volume of an owner that may still come back.
    pub take_over: bool,
    /// How long to wait for a volume that is owned, as [`OpenOptions::wait_for_lease`].
    pub wait_for_lease: Duration,
    /// Give up an ordering log that is lost, damaged or older than the labels (traps T19, T24,
    /// T26).
    pub accept_lost_log: bool,
    /// The options of the connections.
    pub connect: ConnectOptions,
}

/// The progress of a recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecoverProgress {
    /// The current step, such as `list`, `undo` or `flush`.
    pub step: &'static str,
    /// Commands of the step that are done; in step `list`, log partitions that were read.
    pub done: usize,
    /// All commands of the step; in step `list`, all log partitions.
    pub total: usize,
}

/// An ordered volume over one or more drives. This process owns it until [`close`](Self::close), or
/// until the volume and all its streams and readers are dropped.
#[derive(Debug)]
pub struct Volume {
    open_volume: Arc<OpenVolume>,
    background: Arc<BackgroundThread>,
}

impl Volume {
    /// Creates a volume of `members`, in this order: log partitions at every target with an
    /// ordering log, and labels on every drive.
    ///
    /// # Errors
    /// [`CreateError`]. The steps that were done are undone as far as the targets allow.
    pub fn create(
        name: &str,
        members: &[MemberAddr],
        options: &CreateOptions,
    ) -> Result<VolumeInfo, CreateError> {
        create::create(name, members, options)
    }

    /// Reads the properties of the volume that `members` make, without claiming it.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn inspect(
        members: &[MemberAddr],
        connect: &ConnectOptions,
    ) -> Result<VolumeInfo, OpenError> {
        open::inspect(None, members, connect).map(|(info, _)| info)
    }

    /// As [`inspect`](Self::inspect), and decides what [`open`](Self::open) would meet now: the same
    /// decision is made, and nothing is changed. `name` is the name that the volume must have, if
    /// there is one. A volume with a log that is lost, or with the label of another drive, can be
    /// inspected, although opening refuses it.
    ///
    /// # Errors
    /// [`OpenError`]: not even the properties of the volume are known.
    pub fn examine(
        name: Option<&str>,
        members: &[MemberAddr],
        connect: &ConnectOptions,
    ) -> Result<(VolumeInfo, Outlook), OpenError> {
        open::inspect(name, members, connect)
    }

    /// Lists the volumes that are on the targets of `members`: those with labels on any of the
    /// targets' drives, and those with partitions in the targets' logs. Nothing is claimed. The
    /// namespaces of `members` do not matter.
    ///
    /// # Errors
    /// [`ListError`]: a target can't be reached, or refuses.
    pub fn list(members: &[MemberAddr], connect: &ConnectOptions) -> Result<VolumeList, ListError> {
        survey::list(members, connect)
    }

    /// Deletes a volume with all its data: frees its partitions in the logs of the targets of
    /// `members`, and then erases the labels of its drives there. `name` is its name, or its id. The
    /// namespaces of `members` do not matter: the volume's drives are found by their labels.
    ///
    /// With `force`, a volume that has an owner is taken from it, and members may be missing. A
    /// volume of which only logs are left has no members that could be found, so it needs `force`.
    ///
    /// # Errors
    /// [`DeleteError`]. A deletion that was cut off may be repeated.
    pub fn delete(
        name: &str,
        members: &[MemberAddr],
        force: bool,
        connect: &ConnectOptions,
    ) -> Result<DeletedVolume, DeleteError> {
        survey::delete(name, members, force, connect)
    }

    /// Erases the labels of `members`, and touches no log. This is for a drive that was left over
    /// from a volume. A drive whose volume is there is refused: all members of the volume are on
    /// these targets, or a log of them has partitions of it. With `force` it is not refused.
    ///
    /// # Errors
    /// [`DeleteError`].
    pub fn wipe(
        members: &[MemberAddr],
        force: bool,
        connect: &ConnectOptions,
    ) -> Result<DeletedVolume, DeleteError> {
        survey::wipe(members, force, connect)
    }

    /// Opens the volume `name` and becomes its owner. `members` are the volume's drives, in its
    /// order. After a crash the volume is recovered first: the returned [`Recovery`] has the last
    /// group of each stream, with the caller's tag of that group.
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
    ///         eprintln!("check blocks {:?}", update.range);
    ///     }
    ///     volume.acknowledge(0)?;
    /// }
    /// // Every group up to this tag is there, and no fresh block of a later group.
    /// replay(found.tag);
    /// let mut log = volume.stream(0, &StreamOptions::default())?;
    /// let record = log.buf(4096)?;
    /// log.group().write(0, record, Place::Fresh).tag(found.tag + 1).submit()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`OpenError`]: a member is missing, belongs to another volume, or is out of order; an owner
    /// is alive; a log is not the one that the labels name; the recovery failed. In each case the
    /// next attempt finds the same volume and the same prefixes.
    pub fn open(
        name: &str,
        members: &[MemberAddr],
        options: &OpenOptions,
    ) -> Result<(Self, Recovery), OpenError> {
        Self::open_with(name, members, options, VolumeChange::default())
    }

    /// Opens the volume, and changes its labels by the way.
    fn open_with(
        name: &str,
        members: &[MemberAddr],
        options: &OpenOptions,
        change: VolumeChange,
    ) -> Result<(Self, Recovery), OpenError> {
        let mut request = OpenRequest {
            engine: options.engine,
            take_over: options.take_over,
            wait_for_lease: options.wait_for_lease,
            accept_lost_log: options.accept_lost_log,
            check_ownership: options.check_ownership,
            connect: &options.connect,
            save_undone: None,
            change,
            progress: &mut |_| (),
        };
        let Opened { volume: open_volume, background, recovery } =
            open::open(name, members, &mut request)?;
        Ok((Self { open_volume, background }, recovery))
    }

    /// Gives a volume another name. The volume is opened for that, which recovers it after a crash,
    /// and released again. After a crash in the middle it has the new name. The returned
    /// [`Recovery`] is that of the opening.
    ///
    /// # Errors
    /// As [`open`](Self::open), and [`OpenError::Name`].
    pub fn rename(
        name: &str,
        new_name: &str,
        members: &[MemberAddr],
        options: &OpenOptions,
    ) -> Result<(VolumeInfo, Recovery), OpenError> {
        let change = VolumeChange { name: Some(new_name.into()), grow: false };
        Self::change(name, members, options, change)
    }

    /// Grows a volume to the size of its smallest drive, in whole stripe units. All data stays in
    /// its place, and the new blocks follow the old ones. Their content is undefined. The volume is
    /// opened for that, which recovers it after a crash, and released again. After a crash in the
    /// middle it has the old size or the new one. The returned [`Recovery`] is that of the opening.
    ///
    /// # Errors
    /// As [`open`](Self::open), and [`OpenError::NothingToGrow`].
    pub fn grow(
        name: &str,
        members: &[MemberAddr],
        options: &OpenOptions,
    ) -> Result<(VolumeInfo, Recovery), OpenError> {
        Self::change(name, members, options, VolumeChange { name: None, grow: true })
    }

    /// Opens the volume with a change, and releases it.
    fn change(
        name: &str,
        members: &[MemberAddr],
        options: &OpenOptions,
        change: VolumeChange,
    ) -> Result<(VolumeInfo, Recovery), OpenError> {
        let new_name = change.name.clone();
        let (volume, recovery) = Self::open_with(name, members, options, change)?;
        volume.release_unused()?;
        match (open::inspect(None, members, &options.connect), new_name) {
            (Ok((info, _)), _) => Ok((info, recovery)),
            // The labels have the new name already.
            (Err(_), Some(name)) => Ok((VolumeInfo { name, ..volume.info().clone() }, recovery)),
            (Err(error), None) => Err(error),
        }
    }

    /// Releases a volume of which no stream was opened.
    fn release_unused(&self) -> Result<(), RecoverError> {
        let timeout = self.open_volume.connect_options.timeout;
        self.release(timeout).map_err(|error| match error {
            CloseError::Call { target, source } => {
                RecoverError::Call { target, doing: "releasing the volume", source }
            }
            CloseError::StreamsOpen(_) => unreachable!("no stream was opened"),
        })
    }

    /// Recovers a volume by hand, as opening it would, and releases it. With
    /// [`dry_run`](RecoverOptions::dry_run) it only reports what there is to recover. It calls
    /// `progress` to report how far it is.
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
            change: VolumeChange::default(),
            progress: &mut |at| {
                let (step, done, total) = (at.phase.name(), at.done, at.total);
                progress(RecoverProgress { step, done, total });
            },
        };
        if options.dry_run {
            return open::dry_run(name, members, &mut request);
        }
        let Opened { volume: open_volume, background, mut recovery } =
            open::open(name, members, &mut request)?;
        let volume = Self { open_volume, background };
        if options.acknowledge {
            volume.acknowledge_all(&mut recovery)?;
        }
        volume.release_unused()?;
        Ok(recovery)
    }

    /// Acknowledges all lists of `recovery`, and records that in it.
    fn acknowledge_all(&self, recovery: &mut Recovery) -> Result<(), RecoverError> {
        for stream in recovery.streams.iter_mut().filter(|stream| stream.acknowledge) {
            self.acknowledge(stream.stream.0).map_err(|error| match error {
                AcknowledgeError::Recover(error) => error,
                AcknowledgeError::NotPending { .. } => {
                    unreachable!("only lists that wait to be acknowledged are acknowledged")
                }
            })?;
            stream.acknowledge = false;
        }
        Ok(())
    }

    /// The properties of the volume, as they were when it was opened.
    #[must_use]
    pub fn info(&self) -> &VolumeInfo {
        &self.open_volume.info
    }

    /// The size of the volume, in blocks of 4096 bytes.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.open_volume.topology.blocks()
    }

    /// The time that groups have spent in each stage of the initiator since the volume was opened,
    /// for all streams together. About one group in [`stages::ONE_IN`] is traced. Any thread may
    /// call this at any time; no stream waits for it.
    #[must_use]
    pub fn stages(&self) -> Vec<(stages::Stage, stages::Distribution)> {
        self.open_volume.stages.snapshot().collect()
    }

    /// The figures of the open volume: its targets, the marks of its open streams, and the time
    /// that their groups have spent in each stage. Any thread may call this at any time; no stream
    /// waits for it.
    #[must_use]
    pub fn stat(&self) -> VolumeStat {
        self.open_volume.stat(self.background.published_marks())
    }

    /// The same figures for a server of metrics: as OpenMetrics text for Prometheus, and as the
    /// JSON of [`stat`](Self::stat), which `rio volume stat` reads at `/stat`. The library has no
    /// HTTP server: pass this to the server of the program.
    ///
    /// It does not keep the volume open. After the volume and all its streams are gone, it returns
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
        let volume = Arc::downgrade(&self.open_volume);
        Arc::new(VolumeStatSource { volume, background: Arc::downgrade(&self.background) })
    }

    /// The engine with which the volume was opened. It may differ from the one for which the volume
    /// was created ([`Recovery::fallback`]).
    #[must_use]
    pub fn engine(&self) -> EngineKind {
        self.open_volume.engine
    }

    /// Opens stream `id`; ids count from 0, and keep their meaning after a restart. If the stream
    /// was open in this process before, and was dropped without a close, it is recovered first
    /// ([`Stream::recovery`] returns the findings). Other streams continue meanwhile.
    ///
    /// # Errors
    /// [`StreamError`].
    pub fn stream(&self, id: u16, options: &StreamOptions) -> Result<Stream, StreamError> {
        let stream = StreamId(id);
        let volume = &self.open_volume;
        if !(1..=QUEUE_DEPTH_MAX).contains(&options.queue_depth) {
            return Err(StreamOptionsError::QueueDepth.into());
        }
        if options.kept_bytes_max < wire::BLOCK_BYTES as u64 {
            return Err(StreamOptionsError::KeptBytes.into());
        }
        if options.orderless && volume.engine != EngineKind::Barrier {
            return Err(StreamOptionsError::Orderless(volume.engine).into());
        }
        let reserved = volume.reserve(stream)?;
        // If the start fails, the reservation ends here. After a start, the drop of the `Stream`
        // ends it. It may only end once, because another thread may open the stream again right
        // after that.
        let started = Self::start_reserved(volume, stream, &reserved, options)
            .inspect_err(|_| volume.on_stream_dropped(stream))?;
        let StartedStream { shell, handle, recovery } = started;
        let background = Arc::clone(&self.background);
        Ok(Stream::new(Arc::clone(volume), background, shell, handle, options, recovery)?)
    }

    /// Recovers a reserved stream if it needs that, and connects it to all targets.
    fn start_reserved(
        volume: &Arc<OpenVolume>,
        stream: StreamId,
        reserved: &Reserved,
        options: &StreamOptions,
    ) -> Result<StartedStream, StreamError> {
        let mut recovery = None;
        if reserved.unrecovered {
            let stream_recovery = volume.recover_stream(stream)?;
            volume.on_stream_recovered(&stream_recovery);
            if let Some(pending) = stream_recovery.pending() {
                return Err(StreamError::InPlacePending { stream, updates: pending.len() });
            }
            recovery = Some(stream_recovery);
        }
        let handle = StreamHandle::new(volume.last_seq(stream), volume.servers.len());
        let handle = handle.map_err(|_| Exhausted::Descriptors)?;
        let shell = start(volume, stream, &reserved.qids, options, &handle)
            .inspect_err(|_| volume.remove_stream_from_targets(stream, &handle))?;
        Ok(StartedStream { shell, handle, recovery })
    }

    /// Makes a reader: a handle by which any thread reads the volume, beside its streams and
    /// without waiting for them. Its connections are made when they are first needed.
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
        Reader::new(Arc::clone(&self.open_volume), options)
    }

    /// The writes beyond the last group of stream `id` that wait to be
    /// [acknowledged](Self::acknowledge): in-place updates, and, if a log was given up, fresh and
    /// extending writes in doubt. These blocks may hold the old content or the new (traps T11,
    /// T26). Empty if none waits.
    #[must_use]
    pub fn in_place(&self, id: u16) -> Vec<InPlaceRange> {
        lock(&self.open_volume.state).pending(StreamId(id)).map(<[_]>::to_vec).unwrap_or_default()
    }

    /// Acknowledges the in-place updates of a recovered stream, once the caller has checked them.
    /// The targets drop the list, and the stream can be opened (trap T9).
    ///
    /// # Errors
    /// [`AcknowledgeError`].
    pub fn acknowledge(&self, id: u16) -> Result<(), AcknowledgeError> {
        self.open_volume.acknowledge_stream(StreamId(id))
    }

    /// Releases the volume, so that any initiator may open it. All streams must have been closed.
    /// Waits for an answer for [`ConnectOptions::timeout`] at most, and for a target that is
    /// unreachable for [`ConnectOptions::loss_timeout`] at most.
    ///
    /// # Errors
    /// [`NotClosed`], with the volume: streams are still open, or a target did not release it.
    pub fn close(self) -> Result<(), NotClosed> {
        let ConnectOptions { timeout, loss_timeout, .. } = self.open_volume.connect_options;
        // A target that is unreachable for longer than the loss timeout ends the wait.
        self.close_within(timeout.max(loss_timeout))
    }

    /// As [`close`](Self::close), but waits for the targets for `timeout` at most.
    ///
    /// # Errors
    /// As [`close`](Self::close).
    pub fn close_within(self, timeout: Duration) -> Result<(), NotClosed> {
        self.release(timeout).map_err(|error| NotClosed { error, back: self })
    }

    fn release(&self, timeout: Duration) -> Result<(), CloseError> {
        let open_count = lock(&self.open_volume.state).open_streams();
        if open_count > 0 {
            return Err(CloseError::StreamsOpen(open_count));
        }
        self.open_volume.release(timeout)
    }
}

/// A stream that is connected to all targets.
struct StartedStream {
    shell: StreamShell,
    handle: Arc<StreamHandle>,
    /// The findings of the stream's own recovery, if it had one.
    recovery: Option<StreamRecovery>,
}

/// A volume that was not closed, and the reason. It is as before, and may be closed again. Nothing
/// more is written on targets that have released it already.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct NotClosed {
    /// The reason.
    #[source]
    pub error: CloseError,
    /// The volume.
    pub back: Volume,
}

impl NotClosed {
    /// See [`CloseError::is_retryable`].
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.error.is_retryable()
    }
}
