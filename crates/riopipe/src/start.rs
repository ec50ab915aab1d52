//! Starting a stream or a reader, in the thread of the call that opens it.
//!
//! The [`StreamStart`] decides each step: which connection to make, when to drive the connections,
//! and when to pause. This file makes the connections and sleeps. When the stream is bound on all
//! targets, the driver, the connections and the volume become a [`StreamShell`].

use std::sync::Arc;
use std::time::Duration;

use riopipe_net::{now_ns, relax};
use riopipe_order::attribute::StreamId;
use riopipe_order::engine::EngineKind;
use riopipe_session::initiator::association::ConnectFailure;
use riopipe_session::initiator::queue_pair::QueuePair;
use riopipe_session::initiator::reconnect::ConnectRequest;
use riopipe_session::initiator::stream::StreamConfig;
use riopipe_session::initiator::stream_driver::{
    MERGE_FROM, StartError, StartStep, StreamShared, StreamSpec, StreamStart,
};

use crate::association::open_socket;
use crate::call_error::CallError;
use crate::connections::{ConnectionError, Connections, poll_error};
use crate::dial::Dialer;
use crate::error::{RecoverError, StreamError};
use crate::open_volume::{OpenVolume, Server};
use crate::options::{ReaderOptions, StreamOptions};
use crate::piece::Piece;
use crate::redirections::LockedRedirections;
use crate::stream_handle::{StreamHandle, StreamMessage};
use crate::stream_shell::StreamShell;
use crate::time::nanos;

/// Connects a stream to all targets and binds it there.
pub(crate) fn start(
    volume: &Arc<OpenVolume>,
    stream: StreamId,
    qids: &[u16],
    options: &StreamOptions,
    handle: &Arc<StreamHandle>,
) -> Result<StreamShell, StreamError> {
    let spec = stream_spec(volume, stream, qids, options);
    volume.stream_handles.add(stream, handle);
    run_start(volume, spec, volume.connect_options.timeout, handle)
}

/// Connects a reader of the volume to all targets. A reader is a stream that only reads, so it
/// needs no engine and is not bound.
pub(crate) fn start_reading(
    volume: &Arc<OpenVolume>,
    reader: StreamId,
    qids: &[u16],
    options: &ReaderOptions,
    timeout: Duration,
    handle: &Arc<StreamHandle>,
) -> Result<StreamShell, StreamError> {
    let options = StreamOptions {
        queue_depth: options.queue_depth,
        timeout: options.timeout,
        ..StreamOptions::default()
    };
    let mut spec = stream_spec(volume, reader, qids, &options);
    spec.config.engine = EngineKind::None;
    spec.reads_only = true;
    run_start(volume, spec, timeout, handle)
}

/// Makes the connections that the [`StreamStart`] requests, and drives it until the stream is bound
/// on all targets.
fn run_start(
    volume: &Arc<OpenVolume>,
    spec: StreamSpec,
    timeout: Duration,
    handle: &Arc<StreamHandle>,
) -> Result<StreamShell, StreamError> {
    let mut run = StartRun::new(volume, spec, timeout, handle);
    loop {
        run.handle_messages()?;
        match run.start.step(now_ns()) {
            StartStep::Connect(request) => run.connect_or_postpone(&request)?,
            StartStep::Drive => run.drive()?,
            StartStep::Pause(until) => {
                run.connections.close_all();
                std::thread::sleep(Duration::from_nanos(until.saturating_sub(now_ns())));
            }
            StartStep::Ready => break,
            StartStep::Failed(error) => return Err(run.start_error(error)),
        }
    }
    let driver = run.start.into_driver().expect("a stream that is ready has been bound");
    Ok(StreamShell::new(Arc::clone(volume), driver, run.connections))
}

/// A start of a stream that is in progress.
struct StartRun<'a> {
    volume: &'a OpenVolume,
    stream: StreamId,
    handle: &'a Arc<StreamHandle>,
    /// The time limit of the whole start, ns.
    deadline: u64,
    start: StreamStart<Piece>,
    connections: Connections,
    /// The last error of a connection. The error that `start` returns does not contain it.
    last_connection_error: Option<CallError>,
}

impl<'a> StartRun<'a> {
    fn new(
        volume: &'a OpenVolume,
        spec: StreamSpec,
        timeout: Duration,
        handle: &'a Arc<StreamHandle>,
    ) -> Self {
        let stream = spec.config.stream;
        let shared = StreamShared {
            flush_failures: Arc::clone(&volume.flush_failures),
            read_barrier: Arc::clone(&volume.read_barrier),
            stream_numbers: Arc::clone(&volume.stream_numbers),
            redirections: Arc::<LockedRedirections>::clone(&volume.redirections),
            following: Arc::clone(&volume.following),
        };
        let begun = now_ns();
        Self {
            volume,
            stream,
            handle,
            deadline: begun.saturating_add(nanos(timeout)),
            connections: Connections::new(spec.qids.len(), Arc::clone(handle)),
            start: StreamStart::new(spec, shared, nanos(timeout), begun),
            last_connection_error: None,
        }
    }

    /// Handles the messages of the targets' threads.
    fn handle_messages(&mut self) -> Result<(), StreamError> {
        for message in self.handle.take_messages() {
            match message {
                StreamMessage::AssociationEnded { server, .. } => {
                    self.start.association_ended(server as u16, now_ns());
                }
                StreamMessage::GiveUp { server, .. } => {
                    self.refuse_lost_target(&self.volume.servers[server])?;
                }
                // An earlier incarnation of the stream requested this connection.
                StreamMessage::Connected { .. } => {}
            }
        }
        Ok(())
    }

    /// Makes a connection that the start requests. If the target is unreachable, the start requests
    /// the connection again later.
    fn connect_or_postpone(&mut self, request: &ConnectRequest) -> Result<(), StreamError> {
        match self.connect(request) {
            Ok(()) => Ok(()),
            Err(ConnectStepError::Unreachable(error)) => {
                self.last_connection_error = Some(error);
                self.start.put_off(request.link, now_ns());
                Ok(())
            }
            Err(ConnectStepError::Failed(error)) => Err(error),
        }
    }

    /// Makes a connection that the start requests, before the deadline of the start.
    fn connect(&mut self, request: &ConnectRequest) -> Result<(), ConnectStepError> {
        let remaining = Duration::from_nanos(self.deadline.saturating_sub(now_ns()));
        let index = usize::from(request.server);
        let server = &self.volume.servers[index];
        self.refuse_lost_target(server).map_err(ConnectStepError::Failed)?;
        // The queue is made before the connection. If the association ends in between, the stream
        // gets a message, because `create_io_queue` has registered its handle.
        let queue = server.target.create_io_queue(request, self.handle);
        let queue = queue.map_err(ConnectStepError::Unreachable)?;
        let dialer = Dialer::new(&self.volume.connect_options).within(remaining);
        let socket = open_socket(&server.addr, &dialer).map_err(|error| {
            ConnectStepError::Unreachable(ConnectFailure(error.to_string()).into())
        })?;
        self.connections.open(usize::from(request.link), socket).map_err(|error| {
            let (stream, target) = (request.stream, server.name.clone());
            let source = poll_error(error);
            ConnectStepError::Failed(StreamError::Target { stream, target, source })
        })?;
        self.start.connected(request.link, QueuePair::open(queue), now_ns());
        Ok(())
    }

    /// Sends and receives once. If nothing was sent or received, sleeps until there is an event.
    fn drive(&mut self) -> Result<(), StreamError> {
        let Some(driver) = self.start.driver() else { return Ok(()) };
        let worked = self.connections.receive_and_send(driver, now_ns(), &mut |_, _, _| ());
        let ConnectionError { link, error } = match worked {
            Ok(true) => {
                relax();
                return Ok(());
            }
            Ok(false) => {
                self.handle.sleep(self.start.deadline(now_ns()));
                return Ok(());
            }
            Err(error) => error,
        };
        match error {
            CallError::Session(error) => {
                self.start.failed(link as u16, Some(error), now_ns());
                Ok(())
            }
            // Another attempt would meet the same error.
            CallError::Nonsense(_) | CallError::Exhausted(_) => {
                let server = usize::from(driver.server_of(link as u16));
                Err(self.target_error(server, error))
            }
            error => {
                self.last_connection_error = Some(error);
                self.start.failed(link as u16, None, now_ns());
                Ok(())
            }
        }
    }

    /// Returns an error if the target is lost for good, or for longer than the loss timeout. The
    /// start does not wait for such a target, because the wait would only hide the reason of the
    /// loss (traps T8, T27).
    fn refuse_lost_target(&self, server: &Server) -> Result<(), StreamError> {
        match server.target.absence() {
            Some(absence) if absence.for_good => {
                Err(RecoverError::absent(&server.name, absence).into())
            }
            Some(absence) if absence.given_up => Err(StreamError::Target {
                stream: self.stream,
                target: server.name.clone(),
                source: CallError::Unreachable(absence.why),
            }),
            _ => Ok(()),
        }
    }

    /// The error of the call for an error of the start.
    fn start_error(&mut self, error: StartError) -> StreamError {
        match error {
            StartError::Ended { server, error } => {
                let session_error = error.map(CallError::Session);
                let source = session_error.or(self.last_connection_error.take());
                self.target_error(usize::from(server), source.unwrap_or(CallError::Closed))
            }
            StartError::Refused(refused) => {
                let source = CallError::Status(refused.status);
                self.target_error(usize::from(refused.server), source)
            }
            StartError::TimedOut { server, after_ns } => {
                let source = CallError::TimedOut(Duration::from_nanos(after_ns));
                self.target_error(usize::from(server), source)
            }
        }
    }

    /// The error of the call for an error at a target.
    fn target_error(&self, server: usize, source: CallError) -> StreamError {
        let target = self.volume.server_name(server);
        // The absence of the target explains more than the end of a connection to it.
        match self.volume.servers[server].target.absence() {
            Some(absence) => RecoverError::absent(&target, absence).into(),
            None => StreamError::Target { stream: self.stream, target, source },
        }
    }
}

/// Why a connection could not be made.
enum ConnectStepError {
    /// The target is unreachable now. A later attempt may succeed.
    Unreachable(CallError),
    /// A later attempt would fail, too.
    Failed(StreamError),
}

fn stream_spec(
    volume: &OpenVolume,
    stream: StreamId,
    qids: &[u16],
    options: &StreamOptions,
) -> StreamSpec {
    StreamSpec {
        config: StreamConfig {
            volume: volume.id,
            stream,
            generation: volume.generation,
            engine: if options.orderless { EngineKind::None } else { volume.engine },
            start: volume.last_seq(stream),
            nsids: volume.nsids.clone(),
            queue_depth: options.queue_depth,
            timeout_ns: nanos(options.timeout),
            loss_ns: nanos(volume.connect_options.loss_timeout),
        },
        topology: volume.topology.clone(),
        kept_bytes_max: options.kept_bytes_max,
        merge: options.merge,
        merge_from: MERGE_FROM,
        qids: qids.to_vec(),
        reads_only: false,
    }
}
