//! Binding a stream on all targets.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use riopipe_net::{now_ns, relax};
use riopipe_order::attribute::StreamId;
use riopipe_order::engine::{Limits, engine};
use riopipe_session::initiator::stream::{CONTROL_COMMANDS, StreamConfig, StreamSession};

use crate::BLOCK_BYTES;
use crate::association::open_socket;
use crate::error::{CallError, RecoverError, StreamError};
use crate::keeper::Server;
use crate::lanes::{Lanes, Side, Way};
use crate::shared::{Inner, is_passing, lock};
use crate::stream::{StreamOptions, nanos};

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(5);

/// Connects and binds; a target may still be taking leave of the stream's last connection.
pub(crate) fn lanes(
    volume: &Arc<Inner>,
    stream: StreamId,
    qids: &[u16],
    options: &StreamOptions,
    side: &Arc<Side>,
) -> Result<Lanes, StreamError> {
    let deadline = now_ns().saturating_add(nanos(volume.connect.timeout));
    loop {
        let away = |server: &Arc<Server>| Some((Arc::clone(server), server.desk.absence()?));
        if let Some((server, absence)) = volume.servers.iter().find_map(away) {
            // Waiting for one that will not come back would only hide why (T8, T27).
            if absence.for_good || now_ns() >= deadline {
                return Err(RecoverError::absent(&server.name, absence).into());
            }
            std::thread::sleep(PAUSE);
            continue;
        }
        match once(volume, stream, qids, options, side, deadline) {
            Err(StreamError::Target { source, .. })
                if is_passing(&source) && now_ns() < deadline =>
            {
                std::thread::sleep(PAUSE);
            }
            // The target has gone meanwhile: it is waited for above.
            Err(_) if volume.servers.iter().any(|server| server.desk.absence().is_some()) => {}
            Ok(None) => {}
            Ok(Some(lanes)) => return Ok(lanes),
            Err(error) => return Err(error),
        }
    }
}

/// One attempt; `None` if an association has ended meanwhile.
fn once(
    volume: &Arc<Inner>,
    stream: StreamId,
    qids: &[u16],
    options: &StreamOptions,
    side: &Arc<Side>,
    deadline: u64,
) -> Result<Option<Lanes>, StreamError> {
    let start = lock(&volume.marks)[usize::from(stream.0)];
    let mut ways = Vec::new();
    let mut queues = Vec::new();
    let mut depth = options.queue_depth;
    let mut in_capsule = u32::MAX;
    for (server, qid) in volume.servers.iter().zip(qids) {
        let commands = options.queue_depth + CONTROL_COMMANDS;
        // The number first, then whether it is one that stands: what ends after that changes it.
        let number = server.association_number.load(Ordering::SeqCst);
        if let Some(absence) = server.desk.absence() {
            return Err(RecoverError::absent(&server.name, absence).into());
        }
        let association = lock(&server.association);
        let queue = association.io_queue(*qid, commands);
        // A target that takes no data with commands asks for all of it anyway.
        in_capsule = match association.controller.in_capsule_bytes / BLOCK_BYTES as u32 {
            0 => in_capsule,
            blocks => in_capsule.min(blocks),
        };
        drop(association);
        let most = usize::from(queue.config().sqsize).saturating_sub(CONTROL_COMMANDS + 1);
        depth = depth.min(most.max(1));
        let socket = open_socket(&server.addr, &volume.connect)?;
        ways.push(Way { socket, qid: *qid, depth: commands, association: number });
        queues.push(queue);
    }
    let limits = Limits {
        kept_bytes_max: options.kept_bytes_max,
        merge: options.merge,
        merged_blocks_max: in_capsule,
        start,
    };
    let config = StreamConfig {
        volume: volume.id,
        stream,
        generation: volume.generation,
        engine: volume.engine,
        start,
        nsids: volume.nsids.clone(),
        queue_depth: depth,
        timeout_ns: nanos(options.timeout),
        loss_ns: nanos(volume.connect.loss_timeout),
    };
    let session = StreamSession::new(
        config,
        engine(volume.engine, volume.topology.clone(), limits),
        volume.topology.clone(),
        queues,
        Arc::clone(&volume.flush_failures),
        &volume.replay_board,
    );
    let fault = |server: usize, source: CallError| StreamError::Target {
        stream,
        target: volume.server_name(server),
        source,
    };
    let mut lanes = Lanes::new(Arc::clone(volume), Arc::clone(side), session, ways)
        .map_err(|(server, source)| fault(server, source))?;
    lanes.session.start(now_ns());
    loop {
        let worked = lanes.turn(&mut |_, _| ()).map_err(|(server, e)| fault(server, e))?;
        match lanes.session.is_ready() {
            Ok(true) if lanes.is_outdated() => return Ok(None),
            Ok(true) => return Ok(Some(lanes)),
            Ok(false) => {}
            Err(refused) => {
                let source = CallError::Status(refused.status);
                return Err(fault(usize::from(refused.server), source));
            }
        }
        if now_ns() >= deadline {
            return Err(fault(0, CallError::TimedOut(volume.connect.timeout)));
        }
        if worked {
            relax();
        } else {
            lanes.sleep(Some(deadline));
        }
    }
}
