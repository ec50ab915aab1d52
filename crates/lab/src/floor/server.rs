//! The server side of the floor.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use riopipe_media::{Data, Drive, Queue, Submitted};
use riopipe_net::{
    AdaptiveSpin, IdleStep, Interest, Listener, Poller, Received, RecvBuf, Socket, SpinPolicy,
    now_ns, pin_to_core,
};

use super::{
    FloorError,
    message::{HEADER_LEN, Header, push_answer},
};

/// Longest sleep before `stop` is checked.
const SLEEP_MAX: Duration = Duration::from_millis(20);

/// The listener's token; connections have their index.
const LISTENER: u64 = u64::MAX - 1;

/// Longest message accepted, in bytes: far above that of any workload.
const MESSAGE_MAX: usize = 4 << 20;

struct Connection {
    socket: Socket,
    input: RecvBuf,
    answers: Vec<u8>,
    /// Bytes of answers that are already sent.
    sent: usize,
    open: bool,
}

/// Serves `expected` connections from `queue` of `drive` until `stop`.
pub(super) fn serve(
    listener: &Listener,
    expected: usize,
    drive: &Arc<dyn Drive>,
    mut queue: Box<dyn Queue>,
    core: Option<usize>,
    spin: SpinPolicy,
    stop: &AtomicBool,
) -> Result<(), FloorError> {
    if let Some(core) = core {
        pin_to_core(core)?;
    }
    let poller = Poller::new()?;
    poller.add(listener, LISTENER, Interest::Read)?;
    let mut connections: Vec<Connection> = Vec::new();
    let mut spin = AdaptiveSpin::new(spin);
    let mut events = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let mut worked = false;
        // Checked in every round while a connection is missing: a busy one leaves no idle round.
        if connections.len() < expected
            && let Some(socket) = listener.accept()?
        {
            poller.add(&socket, connections.len() as u64, Interest::Read)?;
            connections.push(Connection {
                socket,
                input: RecvBuf::new(MESSAGE_MAX),
                answers: Vec::new(),
                sent: 0,
                open: true,
            });
            worked = true;
        }
        for connection in connections.iter_mut().filter(|c| c.open) {
            worked |= connection.turn(queue.as_mut(), drive)?;
            if !connection.open {
                poller.remove(&connection.socket)?;
            }
        }
        if worked {
            spin.on_work();
            continue;
        }
        match spin.on_idle(now_ns()) {
            IdleStep::Poll => spin.relax(),
            IdleStep::Sleep => {
                poller.wait(&mut events, Some(SLEEP_MAX))?;
            }
        }
    }
    Ok(())
}

impl Connection {
    /// Receives once, stores all complete messages, and answers them together. False if there was
    /// nothing to do.
    fn turn(&mut self, queue: &mut dyn Queue, drive: &Arc<dyn Drive>) -> Result<bool, FloorError> {
        let received = match self.input.fill(&self.socket)? {
            Received::Bytes(n) => n,
            Received::WouldBlock => 0,
            Received::Closed => {
                self.open = false;
                return Ok(true);
            }
        };
        let mut taken = 0;
        while let Some(header) = Header::parse(&self.input.data()[taken..]) {
            let len = header.len as usize;
            if !(HEADER_LEN..=MESSAGE_MAX).contains(&len) {
                return Err(FloorError::Protocol("a message of impossible length"));
            }
            let Some(payload) = self.input.data()[taken..].get(HEADER_LEN..len) else {
                self.input.reserve(len).map_err(|_| FloorError::Protocol("a message too large"))?;
                break;
            };
            match queue.write(u64::from(header.slot), header.lba, Data::Borrowed(payload)) {
                Submitted::Done(Ok(_)) => {}
                other => {
                    return Err(FloorError::Drive {
                        drive: drive.geometry().describe.clone(),
                        why: match other {
                            Submitted::Done(Err(error)) => error.to_string(),
                            _ => "a write was still in flight after the call".to_owned(),
                        },
                    });
                }
            }
            push_answer(header.slot, &mut self.answers);
            taken += len;
        }
        self.input.consume(taken);
        let sent = self.send()?;
        Ok(received + sent > 0)
    }

    fn send(&mut self) -> Result<usize, FloorError> {
        let sent = self.socket.send([&self.answers[self.sent..]])?;
        self.sent += sent;
        if self.sent == self.answers.len() {
            self.answers.clear();
            self.sent = 0;
        }
        Ok(sent)
    }
}
