//! Starting a stream: the connections that its [`StreamStart`] requests.

use std::sync::Arc;
use std::time::Duration;

use riopipe_net::{ConnectError, now_ns, relax};
use riopipe_order::attribute::StreamId;
use riopipe_order::engine::EngineKind;
use riopipe_session::initiator::association::ConnectFailure;
use riopipe_session::initiator::queue_pair::QueuePair;
use riopipe_session::initiator::reconnect::ConnectRequest;
use riopipe_session::initiator::stream::StreamConfig;
use riopipe_session::initiator::stream_driver::{
    StartError, StartStep, StreamShared, StreamSpec, StreamStart,
};

use crate::association::open_socket;
use crate::call_error::CallError;
use crate::connections::{Connections, poll_error};
use crate::error::{RecoverError, StreamError};
use crate::options::{ReaderOptions, StreamOptions};
use crate::piece::Piece;
use crate::shared::{Inner, Server};
use crate::stream_handle::{StreamHandle, StreamMessage};
use crate::stream_shell::StreamShell;
use crate::time::nanos;

/// Connects a stream to all targets and binds it there.
pub(crate) fn start(
    volume: &Arc<Inner>,
    stream: StreamId,
    qids: &[u16],
    options: &StreamOptions,
    handle: &Arc<StreamHandle>,
) -> Result<StreamShell, StreamError> {
    let spec = spec(volume, stream, qids, options);
    start_with(volume, spec, volume.connect.timeout, handle)
}

/// Connects a reader of the volume to all targets.
pub(crate) fn start_reading(
    volume: &Arc<Inner>,
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
    let mut spec = spec(volume, reader, qids, &options);
    spec.config.engine = EngineKind::None;
    spec.reads_only = true;
    start_with(volume, spec, timeout, handle)
}

fn start_with(
    volume: &Arc<Inner>,
    spec: StreamSpec,
    timeout: Duration,
    handle: &Arc<StreamHandle>,
) -> Result<StreamShell, StreamError> {
    let stream = spec.config.stream;
    let shared = StreamShared {
        flush_failures: Arc::clone(&volume.flush_failures),
        read_barrier: Arc::clone(&volume.read_barrier),
    };
    let begun = now_ns();
    let deadline = begun.saturating_add(nanos(timeout));
    let mut start = StreamStart::new(spec, shared, nanos(timeout), begun);
    let mut connections = Connections::new(volume.servers.len(), Arc::clone(handle));
    let fault = |server: usize, source| {
        // The absence explains more than the end of a connection, or a failure to connect.
        if let Some(absence) = volume.servers[server].target.absence() {
            return RecoverError::absent(&volume.server_name(server), absence).into();
        }
        let target = volume.server_name(server);
        StreamError::Target { stream, target, source }
    };
    // The last error of a socket, which the session does not have.
    let mut met = None;
    loop {
        for message in handle.take_messages() {
            match message {
                StreamMessage::AssociationEnded { server } => {
                    start.association_ended(server as u16, now_ns());
                }
                StreamMessage::GiveUp { server, .. } => not_for_good(&volume.servers[server])?,
                // Requested by an earlier run of the stream.
                StreamMessage::Connected { .. } => {}
            }
        }
        match start.step(now_ns()) {
            StartStep::Connect(request) => {
                let at = request.server;
                let left = Duration::from_nanos(deadline.saturating_sub(now_ns()));
                match connect(volume, &mut start, &mut connections, handle, &request, left) {
                    Ok(()) => {}
                    Err(Unconnected::Unreachable(why)) => {
                        met = Some(why);
                        start.put_off(at, now_ns());
                    }
                    Err(Unconnected::Failed(error)) => return Err(error),
                }
            }
            StartStep::Drive => {
                let Some(driver) = start.driver() else { continue };
                match connections.round(driver, now_ns(), &mut |_, _| ()) {
                    Ok(true) => relax(),
                    Ok(false) => {
                        handle.sleep(start.deadline(now_ns()));
                    }
                    Err((server, CallError::Session(error))) => {
                        start.failed(server as u16, Some(error), now_ns());
                    }
                    Err((server, error @ (CallError::Nonsense(_) | CallError::Exhausted(_)))) => {
                        return Err(fault(server, error));
                    }
                    Err((server, error)) => {
                        met = Some(error);
                        start.failed(server as u16, None, now_ns());
                    }
                }
            }
            StartStep::Pause(until) => {
                connections.close_all();
                std::thread::sleep(Duration::from_nanos(until.saturating_sub(now_ns())));
            }
            StartStep::Ready => break,
            StartStep::Failed(StartError::Ended { server, error }) => {
                let of_session = error.map(CallError::Session);
                let source = of_session.or(met).unwrap_or(CallError::Closed);
                return Err(fault(usize::from(server), source));
            }
            StartStep::Failed(StartError::Refused(refused)) => {
                return Err(fault(usize::from(refused.server), CallError::Status(refused.status)));
            }
            StartStep::Failed(StartError::TimedOut { server, after_ns }) => {
                let source = CallError::TimedOut(Duration::from_nanos(after_ns));
                return Err(fault(usize::from(server), source));
            }
        }
    }
    let driver = start.into_driver().expect("a stream that is ready has been bound");
    Ok(StreamShell::new(Arc::clone(volume), driver, connections))
}

fn spec(volume: &Inner, stream: StreamId, qids: &[u16], options: &StreamOptions) -> StreamSpec {
    StreamSpec {
        config: StreamConfig {
            volume: volume.id,
            stream,
            generation: volume.generation,
            engine: volume.engine,
            start: volume.mark(stream),
            nsids: volume.nsids.clone(),
            queue_depth: options.queue_depth,
            timeout_ns: nanos(options.timeout),
            loss_ns: nanos(volume.connect.loss_timeout),
        },
        topology: volume.topology.clone(),
        kept_bytes_max: options.kept_bytes_max,
        merge: options.merge,
        qids: qids.to_vec(),
        reads_only: false,
    }
}

/// The caller does not wait for a target that is lost for good: a wait would only hide the reason
/// (T8, T27).
fn not_for_good(server: &Server) -> Result<(), StreamError> {
    match server.target.absence().filter(|absence| absence.for_good) {
        Some(absence) => Err(RecoverError::absent(&server.name, absence).into()),
        None => Ok(()),
    }
}

/// Why a connection could not be made.
enum Unconnected {
    /// The target is unreachable, or may become so.
    Unreachable(CallError),
    Failed(StreamError),
}

/// Makes a connection that the start requests, for `left` at most.
fn connect(
    volume: &Inner,
    start: &mut StreamStart<Piece>,
    connections: &mut Connections,
    handle: &Arc<StreamHandle>,
    request: &ConnectRequest,
    left: Duration,
) -> Result<(), Unconnected> {
    let at = usize::from(request.server);
    let server = &volume.servers[at];
    not_for_good(server).map_err(Unconnected::Failed)?;
    // Before the connection is begun: the stream gets a message when the association ends
    // meanwhile.
    let queue = server.target.io_queue(request, handle).map_err(Unconnected::Unreachable)?;
    let socket = open_socket(&server.addr, volume.connect.timeout.min(left));
    let unreachable =
        |error: ConnectError| Unconnected::Unreachable(ConnectFailure(error.to_string()).into());
    let socket = socket.map_err(unreachable)?;
    connections.open(at, socket).map_err(|error| {
        let (stream, target) = (request.stream, server.name.clone());
        Unconnected::Failed(StreamError::Target { stream, target, source: poll_error(error) })
    })?;
    start.connected(request.server, QueuePair::open(queue), now_ns());
    Ok(())
}
