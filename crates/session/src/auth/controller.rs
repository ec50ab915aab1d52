//! The controller's side of an authentication.
//!
//! ```text
//! Idle ─Negotiate→ (DH value) → Chosen ─receive: Challenge→ Challenged
//!      ─Reply→ (shared secret) → Verified ─receive: Success1→ Idle, or AwaitsSuccess2 ─Success2→ Idle
//! any  ─what is wrong→ Failed ─receive: Failure1→ the connection ends
//! ```
//!
//! The steps in brackets are jobs for the shell, and exist only with a DH exchange.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

use riopipe_nvme::auth::{AuthFailure, AuthMessage, Challenge, GroupId, HashId, Negotiate, Reply};
use riopipe_nvme::dhchap_secret::DhchapSecret;
use zeroize::Zeroizing;

use super::Random;
use super::dh::{DhDone, DhJob, Exponent, random_exponent};
use super::response::{Exchange, Side};

/// The rules of a target for authentication, of all hosts.
#[derive(Clone)]
pub struct AuthRules {
    /// The secret with which the target proves its own identity; `None` if it cannot.
    pub controller: Option<DhchapSecret>,
    /// The hash functions that are allowed, the preferred one first.
    pub hashes: Vec<HashId>,
    /// The DH groups that are allowed, the preferred one first.
    pub groups: Vec<GroupId>,
    /// Random bytes, for challenges and private exponents.
    pub random: Random,
}

impl AuthRules {
    /// All hash functions and DH groups, the cheapest first: secrets have at least 256 random bits, so an
    /// exchange without Diffie-Hellman keeps them.
    #[must_use]
    pub fn new(random: Random) -> Self {
        Self {
            controller: None,
            hashes: HashId::ALL.to_vec(),
            groups: GroupId::ALL.to_vec(),
            random,
        }
    }
}

impl fmt::Debug for AuthRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { controller, hashes, groups, random: _ } = self;
        f.debug_struct("AuthRules")
            .field("controller", controller)
            .field("hashes", hashes)
            .field("groups", groups)
            .finish_non_exhaustive()
    }
}

/// The result of a message that the host has sent.
#[derive(Debug)]
pub enum Sent {
    /// The host must receive the next message.
    Accepted,
    /// The shell must carry out this job, and pass its result to [`ControllerAuth::on_dh_done`].
    Job(DhJob),
    /// The host accepts the controller. The authentication has succeeded.
    Succeeded,
    /// The transaction has failed for this reason. The host gets the message from
    /// [`ControllerAuth::on_receive`].
    Failed(&'static str),
    /// The host has ended the transaction.
    GivenUp(AuthFailure),
}

/// The result of a request for the next message.
#[derive(Debug)]
pub enum Received {
    /// A job is running. Ask again after [`ControllerAuth::on_dh_done`].
    Wait,
    /// This message.
    Message(Vec<u8>),
    /// This message, and the authentication has succeeded with it.
    Success(Vec<u8>),
    /// This message about a failure. After it the connection must end. The reason is set if no earlier
    /// call has returned it.
    Failure(Vec<u8>, Option<&'static str>),
}

/// The controller's side of the authentications of one queue.
pub struct ControllerAuth {
    hostnqn: String,
    subnqn: String,
    /// The number of the present transaction, or of the last one.
    transaction: u16,
    state: State,
    jobs: u64,
}

enum State {
    Idle,
    /// A job computes the own DH value.
    ComputesValue {
        choice: Choice,
        exponent: Exponent,
    },
    /// The host may receive its challenge.
    Chosen {
        choice: Choice,
        exponent: Exponent,
        dh_value: Vec<u8>,
    },
    /// The host has got its challenge.
    Challenged(Challenged),
    /// A job computes the shared secret.
    ComputesSecret {
        challenged: Challenged,
        answer: Answer,
    },
    /// The host's response is right, and it may receive Success1.
    Verified {
        hash: HashId,
        answer: Answer,
        shared_secret: Zeroizing<Vec<u8>>,
    },
    /// The host has to report whether it accepts the controller.
    AwaitsSuccess2,
    Failed(AuthFailure),
}

#[derive(Clone, Copy)]
struct Choice {
    hash: HashId,
    group: GroupId,
}

struct Challenged {
    choice: Choice,
    exponent: Exponent,
    challenge: Vec<u8>,
    sequence: u32,
}

/// The parts of a Reply.
struct Answer {
    response: Vec<u8>,
    /// C2; `None` if the controller need not prove its identity.
    challenge: Option<Vec<u8>>,
    sequence: u32,
}

const WRONG_RESPONSE: &str =
    "its response to the challenge is wrong: it has another secret than the one configured here";
const OUT_OF_TURN: &str = "it sent a message of the authentication out of turn";
const MALFORMED: &str = "it sent a malformed message of the authentication";

impl ControllerAuth {
    /// The authentications of a queue of this host and this subsystem.
    #[must_use]
    pub fn new(hostnqn: &str, subnqn: &str) -> Self {
        Self {
            hostnqn: hostnqn.into(),
            subnqn: subnqn.into(),
            transaction: 0,
            state: State::Idle,
            jobs: 0,
        }
    }

    /// The host's NQN.
    #[must_use]
    pub fn hostnqn(&self) -> &str {
        &self.hostnqn
    }

    /// Whether a transaction is running.
    #[must_use]
    pub const fn is_running(&self) -> bool {
        !matches!(self.state, State::Idle)
    }

    /// Whether a job is running.
    #[must_use]
    pub const fn is_computing(&self) -> bool {
        matches!(self.state, State::ComputesValue { .. } | State::ComputesSecret { .. })
    }

    /// Takes in a message of Authentication Send. `secret` is the host's.
    pub fn on_sent(&mut self, data: &[u8], secret: &DhchapSecret, rules: &AuthRules) -> Sent {
        let state = core::mem::replace(&mut self.state, State::Idle);
        let Ok((message, transaction)) = AuthMessage::decode(data) else {
            return self.fail(AuthFailure::Payload, MALFORMED);
        };
        if let AuthMessage::Negotiate(offer) = message {
            self.transaction = transaction;
            return self.on_negotiate(&offer, rules);
        }
        if transaction != self.transaction {
            return self.fail(AuthFailure::Message, OUT_OF_TURN);
        }
        match (state, message) {
            (_, AuthMessage::Failure2(failure)) => Sent::GivenUp(failure),
            (State::Challenged(challenged), AuthMessage::Reply(reply)) => {
                self.on_reply(challenged, &reply, secret, rules)
            }
            (State::AwaitsSuccess2, AuthMessage::Success2) => Sent::Succeeded,
            _ => self.fail(AuthFailure::Message, OUT_OF_TURN),
        }
    }

    /// The next message for the host.
    pub fn on_receive(&mut self, rules: &AuthRules) -> Received {
        match core::mem::replace(&mut self.state, State::Idle) {
            state @ (State::ComputesValue { .. } | State::ComputesSecret { .. }) => {
                self.state = state;
                Received::Wait
            }
            State::Chosen { choice, exponent, dh_value } => {
                let mut challenge = vec![0; choice.hash.len_bytes()];
                (rules.random)(&mut challenge);
                let mut sequence = [0; 4];
                (rules.random)(&mut sequence);
                let sequence = u32::from_le_bytes(sequence).max(1);
                let message = AuthMessage::Challenge(Challenge {
                    hash: choice.hash as u8,
                    group: choice.group as u8,
                    sequence,
                    challenge: &challenge,
                    dh_value: &dh_value,
                })
                .encode(self.transaction, choice.hash.len_bytes());
                self.state =
                    State::Challenged(Challenged { choice, exponent, challenge, sequence });
                Received::Message(message)
            }
            State::Verified { hash, answer, shared_secret } => {
                self.success1(hash, &answer, &shared_secret, rules)
            }
            State::Failed(failure) => self.failure1(failure, None),
            State::Idle | State::Challenged(_) | State::AwaitsSuccess2 => {
                self.failure1(AuthFailure::Message, Some(OUT_OF_TURN))
            }
        }
    }

    /// Takes in the result of a job. A result of a job that is not needed any more is ignored. Returns the
    /// reason if the transaction has failed.
    pub fn on_dh_done(&mut self, done: DhDone, secret: &DhchapSecret) -> Option<&'static str> {
        if done.number != self.jobs {
            return None;
        }
        match (core::mem::replace(&mut self.state, State::Idle), done.value) {
            (State::ComputesValue { choice, exponent }, Ok(value)) => {
                self.state = State::Chosen { choice, exponent, dh_value: value.to_vec() };
                None
            }
            (State::ComputesSecret { challenged, answer }, Ok(shared_secret)) => {
                self.verify(&challenged, answer, shared_secret, secret)
            }
            (_, Err(_)) => {
                self.state = State::Failed(AuthFailure::Payload);
                Some("its Diffie-Hellman value is not valid")
            }
            (state, Ok(_)) => {
                self.state = state;
                None
            }
        }
    }

    fn on_negotiate(&mut self, offer: &Negotiate, rules: &AuthRules) -> Sent {
        if offer.secure_channel {
            return self.fail(
                AuthFailure::Concatenation,
                "it wants a secure channel (TLS), which there is not",
            );
        }
        let Some(hashes) = &offer.hashes else {
            return self.fail(AuthFailure::Protocol, "it offers no DH-HMAC-CHAP");
        };
        let Some(hash) = rules.hashes.iter().copied().find(|hash| hashes.contains(hash)) else {
            return self.fail(AuthFailure::Hash, "it offers no hash function that is allowed here");
        };
        let Some(group) = rules.groups.iter().copied().find(|group| offer.groups.contains(group))
        else {
            let why = "it offers no Diffie-Hellman group that is allowed here";
            return self.fail(AuthFailure::Group, why);
        };
        let choice = Choice { hash, group };
        let exponent = random_exponent(rules.random);
        if group == GroupId::Null {
            self.state = State::Chosen { choice, exponent, dh_value: Vec::new() };
            return Sent::Accepted;
        }
        let job = self.job(group, exponent.clone(), None);
        self.state = State::ComputesValue { choice, exponent };
        Sent::Job(job)
    }

    fn on_reply(
        &mut self,
        challenged: Challenged,
        reply: &Reply<'_>,
        secret: &DhchapSecret,
        rules: &AuthRules,
    ) -> Sent {
        let Choice { hash, group } = challenged.choice;
        if reply.response.len() != hash.len_bytes() || reply.dh_value.len() != group.len_bytes() {
            return self.fail(AuthFailure::Payload, MALFORMED);
        }
        // A host that has sent back the target's own challenge would get the response that it lacks.
        if reply.challenge.is_some_and(|challenge| challenge == challenged.challenge) {
            return self.fail(AuthFailure::Failed, "it sent the target's own challenge back");
        }
        let wants_proof = reply.challenge.is_some() && reply.sequence != 0;
        if wants_proof && rules.controller.is_none() {
            let why =
                "it wants the target to authenticate, and no secret of the target is configured";
            return self.fail(AuthFailure::Failed, why);
        }
        let answer = Answer {
            response: reply.response.to_vec(),
            challenge: reply.challenge.filter(|_| wants_proof).map(<[u8]>::to_vec),
            sequence: reply.sequence,
        };
        if group == GroupId::Null {
            return match self.verify(&challenged, answer, Zeroizing::default(), secret) {
                None => Sent::Accepted,
                Some(why) => Sent::Failed(why),
            };
        }
        let peer_value = Box::from(reply.dh_value);
        let job = self.job(group, challenged.exponent.clone(), Some(peer_value));
        self.state = State::ComputesSecret { challenged, answer };
        Sent::Job(job)
    }

    /// Checks the host's response. Returns the reason if it is wrong.
    fn verify(
        &mut self,
        challenged: &Challenged,
        answer: Answer,
        shared_secret: Zeroizing<Vec<u8>>,
        secret: &DhchapSecret,
    ) -> Option<&'static str> {
        let exchange = Exchange {
            hash: challenged.choice.hash,
            side: Side::Host,
            hostnqn: &self.hostnqn,
            subnqn: &self.subnqn,
            transaction: self.transaction,
            sequence: challenged.sequence,
            challenge: &challenged.challenge,
        };
        if !exchange.is_response(&answer.response, secret, &shared_secret) {
            self.state = State::Failed(AuthFailure::Failed);
            return Some(WRONG_RESPONSE);
        }
        self.state = State::Verified { hash: challenged.choice.hash, answer, shared_secret };
        None
    }

    fn success1(
        &mut self,
        hash: HashId,
        answer: &Answer,
        shared_secret: &[u8],
        rules: &AuthRules,
    ) -> Received {
        let Some(challenge) = &answer.challenge else {
            let message = AuthMessage::Success1 { response: None };
            return Received::Success(message.encode(self.transaction, hash.len_bytes()));
        };
        // The secret may have been removed since the Reply.
        let Some(secret) = &rules.controller else {
            return self
                .failure1(AuthFailure::Failed, Some("the secret of the target was removed"));
        };
        let response = Exchange {
            hash,
            side: Side::Controller,
            hostnqn: &self.hostnqn,
            subnqn: &self.subnqn,
            transaction: self.transaction,
            sequence: answer.sequence,
            challenge,
        }
        .response(secret, shared_secret);
        self.state = State::AwaitsSuccess2;
        let message = AuthMessage::Success1 { response: Some(&response) };
        Received::Message(message.encode(self.transaction, hash.len_bytes()))
    }

    fn failure1(&mut self, failure: AuthFailure, why: Option<&'static str>) -> Received {
        self.state = State::Failed(failure);
        Received::Failure(AuthMessage::Failure1(failure).encode(self.transaction, 0), why)
    }

    fn fail(&mut self, failure: AuthFailure, why: &'static str) -> Sent {
        self.state = State::Failed(failure);
        Sent::Failed(why)
    }

    fn job(&mut self, group: GroupId, exponent: Exponent, peer_value: Option<Box<[u8]>>) -> DhJob {
        self.jobs += 1;
        DhJob { number: self.jobs, group, exponent, peer_value }
    }
}

impl fmt::Debug for ControllerAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControllerAuth").field("hostnqn", &self.hostnqn).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
