//! Authentication of the host, between Connect and the first command (Base §8.3.5.5).

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use riopipe_nvme::auth::MESSAGE_BYTES_MAX;
use riopipe_nvme::command::{Cqe, Sqe};
use riopipe_nvme::pdu::ADMIN_IN_CAPSULE;

use super::{Data, Event, QueuePair, QueueState, SessionError};
use crate::auth::host::{HostAuth, HostAuthError, HostSecrets, HostStep};
use crate::outbox::Outbox;

/// The bytes that an Authentication Receive asks for. Linux asks for as many.
const RECEIVE_BYTES: u32 = 4096;
const _: () = assert!(MESSAGE_BYTES_MAX <= RECEIVE_BYTES as usize);

/// The authentication of a queue.
#[derive(Debug)]
pub(super) struct Authentication {
    machine: HostAuth,
    /// The controller's id, as Connect has returned it.
    cntlid: u16,
    /// The message that is being received.
    message: Vec<u8>,
    command: Command,
}

/// The command in flight.
#[derive(Debug)]
enum Command {
    /// Authentication Send, and Authentication Receive after it.
    Send,
    /// Authentication Receive.
    Receive,
    /// Authentication Send, with which the authentication succeeds.
    SendLast,
    /// Authentication Send of a failure.
    SendFailure(HostAuthError),
}

impl<P: AsRef<[u8]> + Clone, T: Copy> QueuePair<P, T> {
    /// Begins the authentication, after Connect.
    pub(super) fn authenticate(
        &mut self,
        secrets: &Arc<HostSecrets>,
        cntlid: u16,
        outbox: &mut Outbox<P>,
    ) {
        let (hostnqn, subnqn) = (&self.config.hostnqn, &self.config.subnqn);
        let (machine, message) = HostAuth::begin(Arc::clone(secrets), hostnqn, subnqn);
        self.state = QueueState::Authenticating;
        let message_buf = vec![0; RECEIVE_BYTES as usize];
        let command = Command::Send;
        self.authentication =
            Some(Box::new(Authentication { machine, cntlid, message: message_buf, command }));
        self.send_auth(&message, outbox);
    }

    /// Sends a message. Its data is always in the capsule, which may have more of it than that of an I/O
    /// command.
    fn send_auth(&mut self, message: &[u8], outbox: &mut Outbox<P>) {
        let io_limit = core::mem::replace(&mut self.in_capsule_max, ADMIN_IN_CAPSULE);
        let sqe = Sqe::auth_send(message.len() as u32);
        let sent = self.send_command(sqe, None, Data::Bytes(message), outbox);
        self.in_capsule_max = io_limit;
        debug_assert!(sent.is_ok(), "the queue was empty");
    }

    /// Takes in data of a message.
    pub(super) fn on_auth_data(&mut self, offset: u32, data: &[u8]) {
        if let Some(authentication) = &mut self.authentication {
            // The slot has checked that the data is within the requested bytes.
            let start = offset as usize;
            authentication.message[start..start + data.len()].copy_from_slice(data);
        }
    }

    /// Handles the completion of a command of the authentication, and sends the next one.
    #[cold]
    pub(super) fn on_auth_completion(
        &mut self,
        cqe: &Cqe,
        outbox: &mut Outbox<P>,
        on_event: &mut impl FnMut(Event<'_, T>),
    ) -> Result<(), SessionError> {
        let Some(mut authentication) = self.authentication.take() else {
            return Err(SessionError::Closed);
        };
        if let Command::SendFailure(error) = authentication.command {
            return Err(self.not_authenticated(error));
        }
        if !cqe.status().is_ok() {
            return Err(SessionError::Refused {
                qid: self.config.qid,
                subnqn: self.config.subnqn.clone(),
                status: cqe.status(),
                result: cqe.result(),
            });
        }
        let message = match authentication.command {
            Command::SendLast => return self.authenticated(&authentication, on_event),
            Command::Send | Command::SendFailure(_) => {
                authentication.command = Command::Receive;
                authentication.message.fill(0);
                let sqe = Sqe::auth_receive(RECEIVE_BYTES);
                let sent = self.send_command(sqe, None, Data::Read(RECEIVE_BYTES), outbox);
                debug_assert!(sent.is_ok(), "the queue was empty");
                self.authentication = Some(authentication);
                return Ok(());
            }
            Command::Receive => match authentication.machine.on_received(&authentication.message) {
                Ok(HostStep::Done) => return self.authenticated(&authentication, on_event),
                Ok(HostStep::SendAndReceive(message)) => {
                    authentication.command = Command::Send;
                    message
                }
                Ok(HostStep::SendLast(message)) => {
                    authentication.command = Command::SendLast;
                    message
                }
                Err(error @ (HostAuthError::Refused(_) | HostAuthError::Closed)) => {
                    return Err(self.not_authenticated(error));
                }
                Err(error @ HostAuthError::GivenUp(_, failure)) => {
                    authentication.command = Command::SendFailure(error);
                    authentication.machine.failure(failure)
                }
            },
        };
        self.authentication = Some(authentication);
        self.send_auth(&message, outbox);
        Ok(())
    }

    fn authenticated(
        &mut self,
        authentication: &Authentication,
        on_event: &mut impl FnMut(Event<'_, T>),
    ) -> Result<(), SessionError> {
        self.cntlid = authentication.cntlid;
        self.state = QueueState::Ready;
        on_event(Event::Ready { cntlid: self.cntlid });
        Ok(())
    }

    /// The error of an authentication that the end of the connection has cut short; `None` if none is under
    /// way. A target may close the connection as soon as it has read that this host has given up; then the
    /// reason is this host's own.
    pub(crate) fn unfinished_authentication(&self) -> Option<SessionError> {
        let authentication = self.authentication.as_ref()?;
        Some(self.not_authenticated(match authentication.command {
            Command::SendFailure(error) => error,
            _ => HostAuthError::Closed,
        }))
    }

    fn not_authenticated(&self, why: HostAuthError) -> SessionError {
        SessionError::NotAuthenticated { subnqn: self.config.subnqn.clone(), why }
    }
}
