//! A device: an open volume with a thread for each of its streams.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use riopipe::{BLOCK_BYTES, EngineKind, ReaderOptions, Stream, StreamOptions, Volume, VolumeInfo};
use riopipe_media::Geometry;
use riopipe_session::initiator::plain_device::{Layout, PlainDevice};

use crate::drive::VolumeDrive;
use crate::error::{CloseError, DeviceError};
use crate::reads;
use crate::shared::Shared;
use crate::stream_thread;

/// The most blocks of a group: 1 MiB. A target also cuts large commands into pieces of this size.
const PART_BLOCKS: u32 = 256;
/// The streams that a device uses, unless the options name a number.
const STREAMS_MAX: u16 = 8;

/// The options of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceOptions {
    /// The streams to use, from stream 0 on; `None`: all of the volume, but at most 8. More streams
    /// take more connections and threads.
    pub streams: Option<u16>,
    /// The reads that are carried out at the same time, 1 to 64. Each has a thread, and a connection to
    /// every target.
    pub readers: usize,
    /// How long a target may owe an answer. After that its connection is given up.
    pub timeout: Duration,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        let StreamOptions { timeout, .. } = StreamOptions::default();
        Self { streams: None, readers: 4, timeout }
    }
}

/// The in-place updates of a stream that a crash had left in doubt, and that opening the device has
/// acknowledged: their blocks may hold the old content or the new. That is all that a host may expect
/// of writes that it had not flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acknowledged {
    /// The stream.
    pub stream: u16,
    /// The number of blocks.
    pub blocks: u64,
}

/// A volume as a plain block device. It must be [closed](Self::close): dropping it is a crash.
pub struct Device {
    shared: Arc<Shared>,
    streams: Vec<JoinHandle<Result<(), String>>>,
    readers: Vec<JoinHandle<()>>,
    /// `None` once it is closed.
    volume: Option<Volume>,
    acknowledged: Vec<Acknowledged>,
}

impl Device {
    /// Makes a device of a volume that this process has opened: acknowledges the lists of in-place
    /// updates, opens the streams, and starts the threads.
    ///
    /// # Errors
    /// [`DeviceError`]; the volume is closed, or recovered when it is opened again.
    pub fn open(volume: Volume, options: &DeviceOptions) -> Result<Self, DeviceError> {
        if volume.engine() == EngineKind::None {
            return Err(DeviceError::NoOrder);
        }
        let has = volume.info().streams;
        let wanted = options.streams.unwrap_or(has.min(STREAMS_MAX));
        if wanted == 0 || wanted > has {
            return Err(DeviceError::TooFewStreams { wanted, streams: has });
        }
        let acknowledged = acknowledge(&volume)?;
        let stream_options = StreamOptions { timeout: options.timeout, ..StreamOptions::default() };
        let open = |stream| {
            let opened = volume.stream(stream, &stream_options);
            opened.map_err(|source| DeviceError::Stream { stream, source })
        };
        let mut streams: Vec<Stream> = (0..wanted).map(open).collect::<Result<_, _>>()?;
        let info = volume.info();
        let part_blocks_max = part_blocks_max(&mut streams, volume.blocks(), info.unit_blocks)?;
        let stripe_blocks = u64::from(info.unit_blocks) * info.members.len() as u64;
        let layout = Layout::new(streams.len(), stripe_blocks, part_blocks_max)?;
        let last = streams.iter().map(Stream::last);
        let decisions = PlainDevice::new(layout, last).on_engine(volume.engine());
        let wakers = streams.iter().map(Stream::waker).collect();
        let geometry = geometry(&volume);
        let shared = Arc::new(Shared::new(decisions, wakers, geometry));
        let reader_options = ReaderOptions {
            concurrent: options.readers,
            timeout: options.timeout,
            ..ReaderOptions::default()
        };
        let reader = volume.reader(&reader_options);
        let mut device = Self {
            shared: Arc::clone(&shared),
            streams: Vec::new(),
            readers: Vec::new(),
            volume: Some(volume),
            acknowledged,
        };
        for (index, stream) in streams.into_iter().enumerate() {
            let shared = Arc::clone(&shared);
            let run = move || stream_thread::run(&shared, index, stream);
            device.streams.push(spawn(format!("stream-{index}"), run)?);
        }
        for index in 0..options.readers.max(1) {
            let (shared, reader) = (Arc::clone(&shared), reader.clone());
            let run = move || reads::run(&shared, &reader);
            device.readers.push(spawn(format!("reader-{index}"), run)?);
        }
        Ok(device)
    }

    /// The device as a drive: for a target, or for any other user of drives. The drive may outlive the
    /// device, and all its operations fail then.
    #[must_use]
    pub fn drive(&self) -> Arc<VolumeDrive> {
        Arc::new(VolumeDrive::new(Arc::clone(&self.shared)))
    }

    /// The volume's properties, as they were when it was opened.
    ///
    /// # Panics
    /// Never: the volume is there until the device is closed.
    #[must_use]
    pub fn info(&self) -> &VolumeInfo {
        self.volume.as_ref().expect("only `close` and `drop` take it").info()
    }

    /// The lists that opening the device has acknowledged.
    #[must_use]
    pub fn acknowledged(&self) -> &[Acknowledged] {
        &self.acknowledged
    }

    /// Why the device has failed: all its writes and flushes fail, and reads of blocks whose newest content
    /// may be lost. `None`: it has not.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.shared.failure()
    }

    /// Makes all writes durable, and closes the streams and the volume. Requests in flight may
    /// be done or fail.
    ///
    /// # Errors
    /// [`CloseError`]: writes that were not flushed may be lost.
    pub fn close(mut self) -> Result<(), CloseError> {
        let failed = self.end_threads(true);
        if let Some(why) = self.shared.failure() {
            return Err(CloseError::Failed(why.to_owned()));
        }
        if let Some(why) = failed {
            return Err(CloseError::Stream(why));
        }
        let Some(volume) = self.volume.take() else { return Ok(()) };
        volume.close().map_err(|error| CloseError::Volume(error.to_string()))
    }

    /// Ends all threads. Returns the first failure of a stream.
    fn end_threads(&mut self, in_order: bool) -> Option<String> {
        self.shared.end_threads(in_order);
        let mut failed = None;
        for thread in self.streams.drain(..) {
            let ended = thread.join().unwrap_or_else(|_| Err("its thread has panicked".to_owned()));
            if let Err(why) = ended {
                failed.get_or_insert(why);
            }
        }
        for thread in self.readers.drain(..) {
            // A panic was reported when it happened.
            let _ = thread.join();
        }
        // Nothing carries these out any more.
        self.shared.end_all();
        failed
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.volume.is_some() {
            self.end_threads(false);
        }
    }
}

fn spawn<T: Send + 'static>(
    name: String,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>, DeviceError> {
    thread::Builder::new().name(name).spawn(run).map_err(DeviceError::Thread)
}

/// Acknowledges the lists of in-place updates of all streams. Such a block has the old content or the
/// new, which is what a host expects of a write that it has not flushed.
fn acknowledge(volume: &Volume) -> Result<Vec<Acknowledged>, DeviceError> {
    let mut acknowledged = Vec::new();
    for stream in 0..volume.info().streams {
        let pending = volume.in_place(stream);
        if !pending.is_empty() {
            volume
                .acknowledge(stream)
                .map_err(|source| DeviceError::Acknowledge { stream, source })?;
            let blocks = pending.iter().map(|pending| pending.range.blocks).sum();
            acknowledged.push(Acknowledged { stream, blocks });
        }
    }
    Ok(acknowledged)
}

/// The most blocks of a group that all streams take once earlier groups are released (traps T13, T14).
fn part_blocks_max(
    streams: &mut [Stream],
    blocks: u64,
    unit_blocks: u32,
) -> Result<u32, DeviceError> {
    let mut part = PART_BLOCKS.min(u32::try_from(blocks).unwrap_or(PART_BLOCKS)).max(1);
    loop {
        // From the last block of a stripe unit on, it reaches into most units.
        let lba = u64::from(unit_blocks.saturating_sub(1)).min(blocks.saturating_sub(part.into()));
        let check = |stream: &mut Stream| stream.check_write(lba, part, true);
        match streams.iter_mut().try_for_each(check) {
            Ok(()) => return Ok(part),
            Err(_) if part > 1 => part /= 2,
            Err(why) => return Err(DeviceError::TooSmall(why)),
        }
    }
}

fn geometry(volume: &Volume) -> Geometry {
    let info = volume.info();
    Geometry {
        block_size: BLOCK_BYTES as u32,
        blocks: volume.blocks(),
        // A host then flushes. Where the drives have no cache, that costs no round trip.
        volatile_cache: true,
        atomic_block: true,
        describe: format!(
            "volume {:?}, {} MiB, engine {}",
            info.name,
            (volume.blocks() * BLOCK_BYTES as u64) >> 20,
            volume.engine()
        ),
    }
}
