//! The calls of a program that runs in the initiator's process, beside the events: a file system on
//! the volume, or a plain device. Each call is one of the library. A call that waits is begun here, and ends while
//! events are handled.

use riopipe_order::attribute::Seq;
use riopipe_order::engine::Refusal;
use riopipe_session::initiator::stream::ReadExtent;
use riopipe_session::initiator::stream_driver::Until;

use super::application::{Call, Process, Reading};
use super::stream::Stream;
use super::{Client, State};
use crate::block::BLOCK;
use crate::core::Core;
use crate::oracle::Drives;
use crate::scenario::Place;

/// The marks of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamMarks {
    pub(crate) complete: Seq,
    pub(crate) durable: Seq,
    pub(crate) released: Seq,
}

/// Why a group was not submitted.
#[derive(Debug)]
pub(crate) enum NotSubmitted {
    /// There is no space now. There will be some after a wait.
    Full,
    /// The stream has failed, or does not take such a group.
    Refused(String),
}

/// A write of adjacent blocks: the first block of the volume, the place, and the names of the
/// contents.
pub(crate) type NamedWrite = (u64, Place, Vec<u64>);

impl Client {
    /// Whether a program may use all streams: the volume is open, and they are bound everywhere.
    pub(crate) fn is_usable(&self) -> bool {
        let begun = |stream: &Option<Stream>| {
            stream.as_ref().is_some_and(|it| it.has_begun() && !it.failed)
        };
        matches!(self.state, State::Running)
            && self.recovery.is_none()
            && !self.closing
            && self.streams.iter().all(begun)
    }

    /// Whether a stream has failed, or could not be opened.
    pub(crate) fn has_failed_stream(&self) -> bool {
        let is_failed = |stream: &Stream| !stream.is_reader && stream.has_failed();
        self.streams.iter().flatten().any(is_failed)
    }

    /// The last group of a stream, or why the stream can't be used.
    pub(crate) fn last(&mut self, stream: u16) -> Result<Seq, String> {
        self.stream(stream).map(|driver| driver.last())
    }

    fn stream(
        &mut self,
        id: u16,
    ) -> Result<
        &mut riopipe_session::initiator::stream_driver::StreamDriver<crate::payload::Payload>,
        String,
    > {
        let stream = self.streams.get_mut(usize::from(id)).and_then(Option::as_mut);
        let driver = stream.and_then(Stream::driver);
        driver.ok_or_else(|| format!("stream {id} has failed"))
    }

    /// Receives what has arrived for a stream that no call uses, and returns its marks.
    pub(crate) fn marks(
        &mut self,
        id: u16,
        drives: &Drives<'_>,
        core: &mut Core,
    ) -> Option<StreamMarks> {
        let volume = self.volume.as_mut()?;
        let stream = self.streams.get_mut(usize::from(id))?.as_mut()?;
        let driver = stream.driver()?;
        if driver.released() < driver.last() && !stream.is_in_call() {
            stream.enter_call();
            stream.round(core);
            if stream.check_marks(&mut volume.ownership_checker, drives, core)
                && let Some(driver) = stream.driver()
            {
                driver.reclaim();
            }
            self.advance_streams(drives, core);
        }
        self.known_marks(id)
    }

    /// The marks of a stream as they are known.
    pub(crate) fn known_marks(&mut self, id: u16) -> Option<StreamMarks> {
        let driver = self.stream(id).ok()?;
        let marks = driver.delivered();
        let released = driver.released();
        Some(StreamMarks { complete: marks.complete, durable: marks.durable, released })
    }

    /// The owner of a stream polls it: receives what has arrived, and takes its marks. `None`: it has
    /// failed.
    pub(crate) fn poll(
        &mut self,
        id: u16,
        drives: &Drives<'_>,
        core: &mut Core,
    ) -> Option<StreamMarks> {
        let volume = self.volume.as_mut()?;
        let stream = self.streams.get_mut(usize::from(id))?.as_mut()?;
        stream.driver()?;
        stream.enter_call();
        stream.round(core);
        if stream.check_marks(&mut volume.ownership_checker, drives, core)
            && let Some(driver) = stream.driver()
        {
            driver.marks_reported();
            driver.reclaim();
        }
        self.advance_streams(drives, core);
        self.known_marks(id)
    }

    /// Another thread interrupts the owner of a stream: a wait ends, the present one or the next.
    pub(crate) fn interrupt(&mut self, id: u16, drives: &Drives<'_>, core: &mut Core) {
        let end = self.end();
        let (Some(volume), Some(Some(stream))) =
            (&mut self.volume, self.streams.get_mut(usize::from(id)))
        else {
            return;
        };
        let Some(driver) = stream.driver() else { return };
        driver.wake();
        if stream.is_in_call() {
            let ownership_checker = &mut volume.ownership_checker;
            let mut process = Process { end, ownership_checker, drives };
            stream.continue_call(&mut process, core);
            self.advance_streams(drives, core);
        }
    }

    /// Submits a group, which another stream may follow.
    pub(crate) fn submit(
        &mut self,
        id: u16,
        writes: &[NamedWrite],
        (durable, follower): (bool, Option<u16>),
        drives: &Drives<'_>,
        core: &mut Core,
    ) -> Result<Seq, NotSubmitted> {
        let end = self.end();
        let failed = || NotSubmitted::Refused(format!("stream {id} has failed"));
        let volume = self.volume.as_mut().ok_or_else(failed)?;
        let stream = self.streams.get_mut(usize::from(id)).and_then(Option::as_mut);
        let stream = stream.filter(|stream| !stream.failed).ok_or_else(failed)?;
        stream.enter_call();
        let tag = core.tags + 1;
        let mut process = Process { end, ownership_checker: &mut volume.ownership_checker, drives };
        let admitted = stream.submit_named(writes, tag, (durable, follower), &mut process, core);
        if let Ok(seq) = &admitted {
            core.tags = tag;
            let full = stream.driver().is_some_and(|driver| driver.should_send());
            if full || core.rng.one_in(2) {
                stream.round(core);
                stream.check_marks(&mut volume.ownership_checker, drives, core);
                if let Some(driver) = stream.driver() {
                    driver.reclaim();
                }
            }
            debug_assert!(!durable || stream.failed || stream.sent >= *seq);
        }
        let result = match admitted {
            Ok(seq) => Ok(seq),
            Err(Refusal::Full(_)) => Err(NotSubmitted::Full),
            Err(Refusal::Poisoned(failure)) => {
                let why = format!("{failure:?}");
                stream.has_failed_with(failure, core);
                Err(NotSubmitted::Refused(why))
            }
            Err(other) => Err(NotSubmitted::Refused(format!("{other:?}"))),
        };
        self.advance_streams(drives, core);
        result
    }

    /// Begins to wait, until a time in ns at the latest. The wait has ended when
    /// [`is_in_call`](Self::is_in_call) is false.
    pub(crate) fn begin_wait(
        &mut self,
        id: u16,
        (until, deadline): (Until, Option<u64>),
        drives: &Drives<'_>,
        core: &mut Core,
    ) -> Result<(), String> {
        let end = self.end();
        let driver = self.stream(id)?;
        driver.begin_wait(until).map_err(|error| format!("{error:?}"))?;
        let (Some(volume), Some(Some(stream))) =
            (&mut self.volume, self.streams.get_mut(usize::from(id)))
        else {
            return Err(format!("stream {id} has failed"));
        };
        stream.enter_call();
        stream.call = Call::Wait { until, deadline };
        let mut process = Process { end, ownership_checker: &mut volume.ownership_checker, drives };
        stream.continue_call(&mut process, core);
        self.advance_streams(drives, core);
        Ok(())
    }

    /// Whether a stream is in a call that waits.
    pub(crate) fn is_in_call(&self, id: u16) -> bool {
        self.streams.get(usize::from(id)).and_then(Option::as_ref).is_some_and(Stream::is_in_call)
    }

    /// Begins to read blocks beside the streams. Returns false if that is not possible now.
    pub(crate) fn begin_read(
        &mut self,
        block: u32,
        blocks: u32,
        drives: &Drives<'_>,
        core: &mut Core,
    ) -> bool {
        let end = self.end();
        let (Some(volume), Some(Some(reader))) = (&mut self.volume, self.streams.last_mut()) else {
            return false;
        };
        if reader.is_in_call() || reader.is_to_be_replaced() || reader.driver().is_none() {
            return false;
        }
        let due = core.oracle.read_begins(reader.era, reader.id, block, blocks);
        let bytes = vec![0; blocks as usize * BLOCK];
        reader.abandon_read();
        reader.reading = Reading { due, bytes, ..Reading::default() };
        let now = core.now;
        let Some(driver) = reader.driver() else { return false };
        let slot = driver.begin_read(&[ReadExtent { lba: block.into(), blocks }], None, now);
        reader.reading.slots.push((slot, 0));
        reader.enter_call();
        reader.call = Call::Read;
        let mut process = Process { end, ownership_checker: &mut volume.ownership_checker, drives };
        reader.continue_call(&mut process, core);
        self.advance_streams(drives, core);
        true
    }

    /// The bytes of the read, once it has ended. `Some(None)`: it has failed, and may be begun
    /// again.
    pub(crate) fn take_read(&mut self, core: &Core) -> Option<Option<Vec<u8>>> {
        let Some(Some(reader)) = self.streams.last_mut() else { return Some(None) };
        if reader.is_in_call() {
            return None;
        }
        if reader.reading.ended.take() != Some(true) {
            return Some(None);
        }
        let mut bytes = core::mem::take(&mut reader.reading.bytes);
        core.block_bytes.fill_in(&mut bytes);
        Some(Some(bytes))
    }
}
