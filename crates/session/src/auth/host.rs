//! The host's side of an authentication.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use riopipe_nvme::auth::{AuthFailure, AuthMessage, GroupId, HashId, Negotiate, Reply};
use riopipe_nvme::dhchap_secret::DhchapSecret;
use zeroize::Zeroizing;

use super::Random;
use super::dh::{public_value, random_exponent, shared_secret};
use super::response::{Exchange, Side};

/// The secrets of a host, and its source of random bytes.
#[derive(Clone)]
pub struct HostSecrets {
    /// The host's own secret: it proves the host's identity to the target.
    pub host: DhchapSecret,
    /// The secret of the target: with it, the host makes the target prove its identity, too.
    pub controller: Option<DhchapSecret>,
    /// Random bytes, for challenges and private exponents.
    pub random: Random,
}

impl fmt::Debug for HostSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostSecrets(not shown)")
    }
}

/// Why the host could not authenticate, or does not accept the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostAuthError {
    /// The controller has refused it.
    #[error("the target refused it: {0}")]
    Refused(AuthFailure),
    /// The controller has closed the connection before the end of the transaction, without a reason.
    #[error(
        "the target closed the connection before the authentication had ended: it has no secret for this \
         host, or another one"
    )]
    Closed,
    /// The host has given it up for this reason, and informs the controller.
    #[error("{0}")]
    GivenUp(&'static str, AuthFailure),
}

/// The next step of the host.
#[derive(Debug)]
pub enum HostStep {
    /// Send this message with Authentication Send, and then receive the next one.
    SendAndReceive(Vec<u8>),
    /// Send this message with Authentication Send. The authentication has ended with its success.
    SendLast(Vec<u8>),
    /// The authentication has succeeded.
    Done,
}

/// The host's side of one transaction.
pub struct HostAuth {
    secrets: Arc<HostSecrets>,
    hostnqn: String,
    subnqn: String,
    transaction: u16,
    state: State,
}

enum State {
    /// Negotiate has been sent.
    Negotiating,
    /// A Reply has been sent.
    Replied(Replied),
    Ended,
}

/// The values that the controller's response is computed from.
struct Replied {
    hash: HashId,
    sequence: u32,
    /// C2; `None` if the controller need not prove its identity.
    challenge: Option<Vec<u8>>,
    shared_secret: Zeroizing<Vec<u8>>,
}

impl HostAuth {
    /// Begins a transaction for a queue of this host and this subsystem. Returns it with its first message.
    #[must_use]
    pub fn begin(secrets: Arc<HostSecrets>, hostnqn: &str, subnqn: &str) -> (Self, Vec<u8>) {
        let mut transaction = [0; 2];
        (secrets.random)(&mut transaction);
        let auth = Self {
            secrets,
            hostnqn: hostnqn.into(),
            subnqn: subnqn.into(),
            transaction: u16::from_le_bytes(transaction),
            state: State::Negotiating,
        };
        let offer = Negotiate {
            secure_channel: false,
            hashes: Some(HashId::ALL.to_vec()),
            groups: GroupId::ALL.to_vec(),
        };
        let message = AuthMessage::Negotiate(offer).encode(auth.transaction, 0);
        (auth, message)
    }

    /// Takes in the message that Authentication Receive has read. An exponentiation runs within this call
    /// if the controller has chosen a DH group.
    ///
    /// # Errors
    /// [`HostAuthError`]. Of [`HostAuthError::GivenUp`] the message to the controller is
    /// [`failure`](Self::failure).
    pub fn on_received(&mut self, data: &[u8]) -> Result<HostStep, HostAuthError> {
        let state = core::mem::replace(&mut self.state, State::Ended);
        let malformed =
            HostAuthError::GivenUp("the target sent a malformed message", AuthFailure::Payload);
        let (message, transaction) = AuthMessage::decode(data).map_err(|_| malformed)?;
        if let AuthMessage::Failure1(failure) = message {
            return Err(HostAuthError::Refused(failure));
        }
        let out_of_turn =
            HostAuthError::GivenUp("the target sent a message out of turn", AuthFailure::Message);
        if transaction != self.transaction {
            return Err(out_of_turn);
        }
        match (state, message) {
            (State::Negotiating, AuthMessage::Challenge(challenge)) => {
                let hash = HashId::from_code(challenge.hash)
                    .filter(|hash| challenge.challenge.len() == hash.len_bytes())
                    .ok_or(HostAuthError::GivenUp(
                        "the target chose an unknown hash",
                        AuthFailure::Hash,
                    ))?;
                let group = GroupId::from_code(challenge.group).ok_or(HostAuthError::GivenUp(
                    "the target chose an unknown Diffie-Hellman group",
                    AuthFailure::Group,
                ))?;
                let exponent = random_exponent(self.secrets.random);
                let shared = shared_secret(group, &exponent, challenge.dh_value).map_err(|_| {
                    HostAuthError::GivenUp(
                        "the target's Diffie-Hellman value is not valid",
                        AuthFailure::Payload,
                    )
                })?;
                let dh_value = public_value(group, &exponent);
                let response = Exchange {
                    hash,
                    side: Side::Host,
                    hostnqn: &self.hostnqn,
                    subnqn: &self.subnqn,
                    transaction,
                    sequence: challenge.sequence,
                    challenge: challenge.challenge,
                }
                .response(&self.secrets.host, &shared);
                let own_challenge = self.secrets.controller.as_ref().map(|_| {
                    let mut bytes = alloc::vec![0; hash.len_bytes()];
                    (self.secrets.random)(&mut bytes);
                    bytes
                });
                let mut sequence = [0; 4];
                (self.secrets.random)(&mut sequence);
                // 0 stands for a challenge without authentication of the controller.
                let sequence = u32::from_le_bytes(sequence).max(1);
                let reply = Reply {
                    response: &response,
                    challenge: own_challenge.as_deref(),
                    sequence,
                    dh_value: &dh_value,
                };
                let message = AuthMessage::Reply(reply).encode(transaction, hash.len_bytes());
                self.state = State::Replied(Replied {
                    hash,
                    sequence,
                    challenge: own_challenge,
                    shared_secret: shared,
                });
                Ok(HostStep::SendAndReceive(message))
            }
            (State::Replied(replied), AuthMessage::Success1 { response }) => {
                let (Some(challenge), Some(secret)) =
                    (&replied.challenge, &self.secrets.controller)
                else {
                    return Ok(HostStep::Done);
                };
                let exchange = Exchange {
                    hash: replied.hash,
                    side: Side::Controller,
                    hostnqn: &self.hostnqn,
                    subnqn: &self.subnqn,
                    transaction,
                    sequence: replied.sequence,
                    challenge,
                };
                let is_right = response.is_some_and(|found| {
                    exchange.is_response(found, secret, &replied.shared_secret)
                });
                if !is_right {
                    return Err(HostAuthError::GivenUp(
                        "the target could not prove its identity: it has another secret than the one \
                         given here for it",
                        AuthFailure::Failed,
                    ));
                }
                Ok(HostStep::SendLast(AuthMessage::Success2.encode(transaction, 0)))
            }
            _ => Err(out_of_turn),
        }
    }

    /// The message that informs the controller that the host has given up.
    #[must_use]
    pub fn failure(&self, failure: AuthFailure) -> Vec<u8> {
        AuthMessage::Failure2(failure).encode(self.transaction, 0)
    }
}

impl fmt::Debug for HostAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostAuth").field("transaction", &self.transaction).finish_non_exhaustive()
    }
}
