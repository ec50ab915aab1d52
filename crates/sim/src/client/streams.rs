//! The threads of an initiator's process that drive its streams, and the connections that streams
//! ask for. An owner's thread drives its stream while it is in a call. The background driver's
//! thread drives the others.

use std::sync::Arc;

use riopipe_order::attribute::StreamId;
use riopipe_session::initiator::stream_driver::Finding;

use super::application::Process;
use super::stream::{Stream, StreamMessage};
use super::{Client, State};
use crate::core::{Core, Ev, US};
use crate::oracle::Drives;

impl Client {
    /// Receives bytes of a stream's connection, or its end.
    pub(super) fn arrives(
        &mut self,
        id: u16,
        conn: usize,
        bytes: Option<&[u8]>,
        drives: &Drives<'_>,
        core: &mut Core,
    ) {
        let Some(Some(stream)) = self.streams.get_mut(usize::from(id)) else { return };
        let Some(link) = stream.link_of(conn) else { return };
        stream.arrives(link, bytes);
        self.wake_stream(id, drives, core);
        self.advance_streams(drives, core);
    }

    /// Queues a message for every stream.
    pub(super) fn post(&mut self, message: impl Fn() -> StreamMessage) {
        for stream in self.streams.iter_mut().flatten() {
            stream.post(message());
        }
    }

    /// Wakes the thread that drives a stream.
    pub(super) fn wake_stream(&mut self, id: u16, drives: &Drives<'_>, core: &mut Core) {
        let end = self.end();
        let Some(volume) = &mut self.volume else { return };
        let Some(Some(stream)) = self.streams.get_mut(usize::from(id)) else { return };
        if stream.is_in_call() {
            let mut process =
                Process { end, ownership_checker: &mut volume.ownership_checker, drives };
            stream.continue_call(&mut process, core);
        } else if stream.has_begun() && self.background.has_taken_over(StreamId(id)) {
            self.wake_background(Some(id), drives, core);
        }
    }

    /// Runs the next step of a stream.
    pub fn act(&mut self, id: u16, drives: &Drives<'_>, core: &mut Core) {
        let end = self.end();
        let Some(volume) = &mut self.volume else { return };
        let Some(Some(stream)) = self.streams.get_mut(usize::from(id)) else { return };
        let mut process = Process { end, ownership_checker: &mut volume.ownership_checker, drives };
        stream.act(&mut process, core);
        let reads_apart = stream.reads_apart.take();
        if let Some((block, blocks)) = reads_apart
            && let Some(Some(reader)) = self.streams.last_mut()
        {
            reader.read_apart(block, blocks, &mut process, core);
        }
        self.watch(id, drives, core);
        self.advance_streams(drives, core);
    }

    /// Closes the streams whose owners are not in a call.
    pub(super) fn close_streams(&mut self, drives: &Drives<'_>, core: &mut Core) {
        let end = self.end();
        let Some(volume) = &mut self.volume else { return };
        for stream in self.streams.iter_mut().flatten().filter(|stream| !stream.is_reader) {
            let mut process =
                Process { end, ownership_checker: &mut volume.ownership_checker, drives };
            stream.close(&mut process, core);
        }
    }

    /// Wakes a thread as planned, though no event has come.
    pub fn wake_streams(&mut self, drives: &Drives<'_>, core: &mut Core) {
        if core.now < self.wakes_at {
            // The event that this wake was planned for has already come.
            return;
        }
        for id in 0..self.streams.len() as u16 {
            let deadline = self.streams[usize::from(id)].as_ref().and_then(Stream::deadline);
            if deadline.is_some_and(|at| at <= core.now) {
                self.wake_stream(id, drives, core);
            }
        }
        self.wake_background(None, drives, core);
        self.advance_streams(drives, core);
    }

    /// Wakes the background driver's thread, because an event may have come for a stream.
    pub(super) fn wake_background(
        &mut self,
        event_for: Option<u16>,
        drives: &Drives<'_>,
        core: &mut Core,
    ) {
        let Some(volume) = &mut self.volume else { return };
        let flush_ns = self.background.config().flush_ns;
        let has_event = |id: StreamId| event_for == Some(id.0);
        let stream_of = |id: StreamId| self.streams.get(usize::from(id.0)).and_then(Option::as_ref);
        let following = Arc::clone(&volume.shared.following);
        let is_awaited =
            |stream: &Stream, id| !stream.watchers.is_empty() || following.is_needed(id);
        let awaited = |id| stream_of(id).is_some_and(|stream| is_awaited(stream, id));
        for (id, turn) in self.background.due(core.now, has_event, awaited) {
            let Some(Some(stream)) = self.streams.get_mut(usize::from(id.0)) else { continue };
            let awaited = is_awaited(stream, id);
            if stream.is_in_call() {
                self.background.on_owner_in_call(id, awaited, core.now);
                stream.wakes_background |= awaited;
                continue;
            }
            let Some(attention) = stream.attention() else {
                self.background.remove(id);
                continue;
            };
            if self.background.check(id, turn, awaited, attention, core.now) == Finding::Drive {
                let next =
                    stream.run_background(flush_ns, &mut volume.ownership_checker, drives, core);
                self.background.on_driven(id, next);
            }
        }
    }

    /// Continues the start of streams, makes the connections that they ask for, and plans the next
    /// wake of a thread.
    pub(super) fn advance_streams(&mut self, drives: &Drives<'_>, core: &mut Core) {
        if !matches!(self.state, State::Running) {
            return;
        }
        for id in 0..self.streams.len() as u16 {
            self.continue_start(id, drives, core);
        }
        while self.calls_ended(drives, core)
            | self.connect_streams(core)
            | self.wake_followers(drives, core)
        {
            for id in 0..self.streams.len() as u16 {
                if self.streams[usize::from(id)].as_ref().is_some_and(Stream::has_messages) {
                    self.wake_stream(id, drives, core);
                }
            }
        }
        let streams = self.streams.iter().flatten().filter_map(Stream::deadline);
        let next = streams.chain(self.background.deadline()).min();
        let Some(next) = next.map(|at| at.max(core.now + US)) else { return };
        if next < self.wakes_at || self.wakes_at <= core.now {
            self.wakes_at = next;
            core.at(next, Ev::WakeStreams { client: self.index, incarnation: self.incarnation });
        }
    }

    /// Wakes the background driver if the end of an owner's call concerns it. Returns whether that
    /// happened.
    fn calls_ended(&mut self, drives: &Drives<'_>, core: &mut Core) -> bool {
        let mut ended = false;
        for stream in self.streams.iter_mut().flatten() {
            ended |= stream.call_ended();
        }
        if ended {
            self.wake_background(None, drives, core);
        }
        ended
    }

    /// Wakes the streams that another one has woken. Returns whether there were any.
    fn wake_followers(&mut self, drives: &Drives<'_>, core: &mut Core) -> bool {
        let woken = self.volume.as_ref().map(|volume| volume.woken.take()).unwrap_or_default();
        for stream in &woken {
            self.wake_stream(stream.0, drives, core);
        }
        if !woken.is_empty() {
            self.wake_background(None, drives, core);
        }
        !woken.is_empty()
    }

    fn continue_start(&mut self, id: u16, drives: &Drives<'_>, core: &mut Core) {
        let end = self.end();
        loop {
            let Some(stream) = &mut self.streams[usize::from(id)] else { return };
            if stream.has_begun() {
                return;
            }
            let Some(request) = stream.next_to_start(core) else { break };
            let server = &mut self.servers[usize::from(request.server)];
            match server.io_queue(request.qid, request.depth) {
                Some(queue) => stream.connect(&request, queue, end, core),
                None => stream.cannot_connect(request.link, core),
            }
        }
        if let (Some(stream), Some(volume)) = (&mut self.streams[usize::from(id)], &mut self.volume)
            && stream.has_begun()
        {
            let mut process =
                Process { end, ownership_checker: &mut volume.ownership_checker, drives };
            // A reader that no thread uses stays as it is until it is used.
            if !stream.is_reader {
                stream.start_steps(&mut process, core);
                self.background.add(StreamId(id));
            }
        }
    }

    /// Passes the streams' connect requests to the threads of their targets. Returns whether there
    /// were any, or whether a driven stream has got a message.
    fn connect_streams(&mut self, core: &mut Core) -> bool {
        let end = self.end();
        let mut asked = false;
        for stream in self.streams.iter_mut().flatten() {
            for request in stream.requests.drain(..) {
                asked = true;
                self.servers[usize::from(request.server)].request(request, end, core);
            }
        }
        for server in 0..self.servers.len() {
            self.take_events(server, core);
        }
        let has_taken_over = |stream: &Stream| self.background.has_taken_over(StreamId(stream.id));
        let driven = |stream: &Stream| stream.is_in_call() || has_taken_over(stream);
        asked || self.streams.iter().flatten().any(|s| s.has_messages() && driven(s))
    }
}
