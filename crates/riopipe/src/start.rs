//! Binding a stream on all targets.

use std::sync::Arc;
use std::time::Duration;

use riopipe_net::{now_ns, relax};
use riopipe_order::attribute::StreamId;
use riopipe_order::engine::{Limits, engine};
use riopipe_session::initiator::stream::{CONTROL_COMMANDS, StreamConfig, StreamSession};

use crate::BLOCK_BYTES;
use crate::association::open_socket;
use crate::error::{CallError, RecoverError, StreamError};
use crate::lanes::{Lanes, Side, Way};
use crate::shared::{Inner, is_passing};
use crate::stream::{StreamOptions, nanos};

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
        for server in &volume.servers {
            // Waiting for it would only hide why (T8, T27).
            if let Some(absence) = server.target.absence().filter(|absence| absence.for_good) {
                return Err(RecoverError::absent(&server.name, absence).into());
            }
        }
        match once(volume, stream, qids, options, side, deadline) {
            Err(StreamError::Target { source, .. })
                if is_passing(&source) && now_ns() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return other,
        }
    }
}

fn once(
    volume: &Arc<Inner>,
    stream: StreamId,
    qids: &[u16],
    options: &StreamOptions,
    side: &Arc<Side>,
    deadline: u64,
) -> Result<Lanes, StreamError> {
    let start = volume.mark(stream);
    let mut ways = Vec::new();
    let mut queues = Vec::new();
    let mut depth = options.queue_depth;
    let mut in_capsule = u32::MAX;
    for (server, qid) in volume.servers.iter().zip(qids) {
        let commands = options.queue_depth + CONTROL_COMMANDS;
        let (queue, in_capsule_bytes) =
            server.target.io_queue(*qid, commands).map_err(|source| StreamError::Target {
                stream,
                target: server.name.clone(),
                source,
            })?;
        // A target that takes no data with commands asks for all of it anyway.
        in_capsule = match in_capsule_bytes / BLOCK_BYTES as u32 {
            0 => in_capsule,
            blocks => in_capsule.min(blocks),
        };
        let most = usize::from(queue.config().sqsize).saturating_sub(CONTROL_COMMANDS + 1);
        depth = depth.min(most.max(1));
        let socket = open_socket(&server.addr, &volume.connect)?;
        ways.push(Way { socket, qid: *qid, depth: commands });
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
            Ok(true) => return Ok(lanes),
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
