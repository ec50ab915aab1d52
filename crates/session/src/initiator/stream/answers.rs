//! The answers of a target on a stream's connection: data and completions, as the queue pair
//! decodes them.

use riopipe_nvme::command::{Cqe, Status};
use riopipe_nvme::digest::Crc32c;
use riopipe_order::attribute::Kind;
use riopipe_order::engine::{Cause, Engine, Path, Payload, Request, RequestId};

use super::barrier::{FlushFailures, HandledFailures, Participant};
use super::connection::Listing;
use super::reading::{ReadSlot, Readings};
use super::rejoin::{SetUpEvent, ends_connection};
use super::tracer::Tracer;
use super::{Purpose, ReadSink, StreamConfig};

/// Handles the answers that arrive from `server` in one call. It borrows all parts of the session
/// that answers change, apart from the queue pair that decodes the answers.
pub(super) struct AnswerHandler<'a, P> {
    pub(super) server: u16,
    pub(super) config: &'a StreamConfig,
    pub(super) engine: &'a mut dyn Engine<P>,
    pub(super) readings: &'a mut Readings,
    pub(super) crc32c: Crc32c,
    pub(super) flush_failures: &'a FlushFailures,
    pub(super) handled_failures: &'a mut HandledFailures,
    pub(super) tracer: &'a mut Tracer,
    // The state of the connection to the server.
    pub(super) listing: &'a mut Listing,
    pub(super) participant: &'a mut Participant,
    pub(super) reads_in_flight: &'a mut u32,
    pub(super) marks_in_flight: &'a mut u32,
    pub(super) mark_refused: &'a mut Option<Status>,
    /// The event for the set-up of the connection, which the session handles after the call.
    pub(super) set_up_event: Option<SetUpEvent>,
}

impl<P: Payload + AsRef<[u8]>> AnswerHandler<'_, P> {
    /// Handles data of a command. `offset` is its place in the data of the command, in bytes.
    /// `sink` gets the bytes of reads, with the slot of their read and their offset in it.
    #[inline]
    pub(super) fn on_data(
        &mut self,
        purpose: Purpose,
        offset: usize,
        bytes: &[u8],
        sink: &mut ReadSink<'_>,
    ) {
        match purpose {
            // The queue pair drops bytes beyond the requested ones, so the range is in the page.
            Purpose::List => {
                self.listing.page[offset..offset + bytes.len()].copy_from_slice(bytes);
            }
            Purpose::Read { slot, number, part } => {
                let found = self.readings.find_part(slot, number, part, self.server);
                if let Some((reading, index)) = found {
                    reading.check_data(index, offset, bytes, self.crc32c);
                    sink(slot, reading.parts[index].offset + offset, bytes);
                }
            }
            Purpose::Request(_) | Purpose::Bind | Purpose::Mark => {}
        }
    }

    /// Handles the completion of a command.
    #[inline]
    pub(super) fn on_completion(&mut self, purpose: Purpose, cqe: Cqe) {
        let status = cqe.status();
        match purpose {
            Purpose::Request(id) => self.on_request_completion(id, status),
            Purpose::Read { slot, number, part } => {
                self.on_read_completion(slot, number, part, status);
            }
            Purpose::Bind => self.set_up_event = Some(SetUpEvent::BindAnswered(cqe)),
            Purpose::List => self.set_up_event = Some(SetUpEvent::ListAnswered(cqe)),
            Purpose::Mark => self.on_mark_completion(status),
        }
    }

    /// Reports the result of a request to the engine.
    #[inline]
    fn on_request_completion(&mut self, id: RequestId, status: Status) {
        self.tracer.on_answered(id);
        if !status.is_ok() {
            return self.on_failed_request(id, status);
        }
        if has_flush(self.engine.request(id)) {
            // When another stream's FLUSH failed, the drive may have dropped data of this stream.
            // This successful FLUSH then covers nothing (trap T22). So the engine learns of the
            // failures first.
            let Self { flush_failures, handled_failures, engine, .. } = self;
            flush_failures
                .for_each_new(handled_failures, |member| engine.on_flush_failed_elsewhere(member));
        }
        self.engine.on_request_done(id, Ok(()));
    }

    /// Handles a request that the target has not carried out. If the connection does not carry the
    /// stream any more, the request is replayed on the next one. Otherwise the engine gets the
    /// failure.
    fn on_failed_request(&mut self, id: RequestId, status: Status) {
        // With an engine that binds its streams, the target reports a failed FLUSH to every stream
        // there (trap T22). With other engines, this session must report the failure to the other
        // streams, also if its own connection ends.
        let request = self.engine.request(id);
        let must_report = has_flush(request)
            && !self.config.engine.capabilities().orders_at_target
            && is_drive_failure(status);
        if must_report {
            self.flush_failures.record(request.member);
        }
        let connection_ends =
            ends_connection(status) || matches!(self.set_up_event, Some(SetUpEvent::Broken(_)));
        if connection_ends && self.config.loss_ns > 0 {
            // The engine gets no result of this request and of those that the target refuses after
            // it, so that it replays all of them.
            self.set_up_event.get_or_insert(SetUpEvent::Broken(status));
        } else {
            self.engine.on_request_done(id, Err(Cause::Status(status.code())));
        }
    }

    /// Ends a part of a read.
    fn on_read_completion(&mut self, slot: ReadSlot, number: u32, part: u32, status: Status) {
        *self.reads_in_flight -= 1;
        if *self.reads_in_flight == 0 {
            self.participant.end_read();
        }
        self.readings.end_part(slot, number, part, self.server, status);
    }

    /// Records the target's answer to a released mark.
    fn on_mark_completion(&mut self, status: Status) {
        *self.marks_in_flight -= 1;
        if ends_connection(status) && self.config.loss_ns > 0 {
            self.set_up_event.get_or_insert(SetUpEvent::Broken(status));
        } else if !status.is_ok() {
            *self.mark_refused = Some(status);
        }
    }
}

/// Whether the request is a FLUSH, or a write with FUA. A target may carry out FUA as a FLUSH of the
/// drive behind the write. The status does not show which of the two failed.
fn has_flush<P>(request: &Request<P>) -> bool {
    matches!(request.path, Path::Data | Path::Home) && (request.kind == Kind::Flush || request.fua)
}

/// Whether a FLUSH ended with this status because the drive failed. The data in the drive's cache
/// may then be lost. A refusal does not show that the drive failed.
fn is_drive_failure(status: Status) -> bool {
    status.sct() == Status::SCT_MEDIA
        || status.is(Status::INTERNAL)
        || status.is(Status::CAPACITY_EXCEEDED)
        || status.is(Status::POWER_LOSS)
}
