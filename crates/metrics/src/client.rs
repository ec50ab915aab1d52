//! One who asks: from the connection to the answer's last byte.

use std::time::Instant;

use riopipe_net::{Interest, LinkError, Received, Socket};

use crate::http::{HEAD_BYTES_MAX, respond};
use crate::source::Source;

/// So much of the input is taken at a time.
const CHUNK: usize = 2 << 10;

/// What is being waited for.
#[derive(Debug)]
enum State {
    /// The rest of the request; so much of it is here.
    Asks(Vec<u8>),
    /// Room for the rest of the answer, of which so much has been sent.
    IsTold(Vec<u8>, usize),
    /// The end. Closing over unread input would take the answer back.
    Leaves,
}

/// A connection, and how far it is.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) socket: Socket,
    /// Its name at the poller.
    pub(crate) token: u64,
    /// When it is given up.
    pub(crate) deadline: Instant,
    state: State,
}

impl Client {
    pub(crate) fn new(socket: Socket, token: u64, deadline: Instant) -> Self {
        Self { socket, token, deadline, state: State::Asks(Vec::new()) }
    }

    /// Goes on as far as it goes now; returns what to wait for, or `None` at the end.
    pub(crate) fn go_on(&mut self, source: &dyn Source) -> Result<Option<Interest>, LinkError> {
        loop {
            match &mut self.state {
                State::Asks(head) => {
                    let mut chunk = [0; CHUNK];
                    let room = CHUNK.min(HEAD_BYTES_MAX - head.len());
                    match self.socket.recv(&mut chunk[..room])? {
                        Received::Bytes(count) => head.extend_from_slice(&chunk[..count]),
                        Received::WouldBlock => return Ok(Some(Interest::Read)),
                        Received::Closed => return Ok(None),
                    }
                    // A head that is full has an answer in any case.
                    if let Some(answer) = respond(head, source) {
                        self.state = State::IsTold(answer, 0);
                    }
                }
                State::IsTold(answer, sent) => {
                    match self.socket.send([&answer[*sent..]])? {
                        0 => return Ok(Some(Interest::Write)),
                        more => *sent += more,
                    }
                    if *sent == answer.len() {
                        self.socket.finish_sending();
                        self.state = State::Leaves;
                    }
                }
                // One look at a time: who never ends must not keep others waiting.
                State::Leaves => {
                    return match self.socket.recv(&mut [0; CHUNK])? {
                        Received::Closed => Ok(None),
                        Received::Bytes(_) | Received::WouldBlock => Ok(Some(Interest::Read)),
                    };
                }
            }
        }
    }
}
