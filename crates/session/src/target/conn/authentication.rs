//! Authentication of a queue (Base §8.3.5.5): after Connect, before anything else, and again whenever the
//! host wishes.
//!
//! Until the host is authenticated, its Connect has made nothing: it has no controller, no queue and no
//! notices, so it cannot disturb the host whose name it gives. What Connect asked for is done when the
//! authentication has succeeded.

use riopipe_nvme::auth::{CONNECT_ATR, MESSAGE_BYTES_MAX};
use riopipe_nvme::command::{Sgl, Sqe, Status};
use riopipe_nvme::fabrics::{Connect, ConnectData, fctype};

use super::TargetConn;
use super::fabrics::ConnectRefusal;
use crate::auth::controller::{ControllerAuth, Received, Sent};
use crate::outbox::Outbox;
use crate::target::access::Admission;
use crate::target::capsule::Capsule;
use crate::target::closed::Closed;
use crate::target::context::is_in_capsule;
use crate::target::env::{Event, TargetEnv};

/// The most bytes that an Authentication Receive may ask for. Linux asks for 4096.
const RECEIVE_BYTES_MAX: u32 = 16 << 10;
const _: () = assert!(MESSAGE_BYTES_MAX < RECEIVE_BYTES_MAX as usize);

/// A Connect that has been accepted, whose host has to authenticate.
#[derive(Debug)]
pub(super) struct AwaitedConnect {
    pub(super) fields: Connect,
    pub(super) data: ConnectData,
    /// The number of entries of the submission queue.
    pub(super) entries: u16,
    /// The id that the controller will have.
    pub(super) cntlid: u16,
}

/// The authentication of a queue.
#[derive(Debug)]
pub(super) struct Authentication {
    machine: ControllerAuth,
    /// The Connect that takes effect when the host is authenticated; `None` once it has.
    pub(super) awaited: Option<AwaitedConnect>,
    /// An Authentication Receive whose answer waits for an exponentiation.
    waiting: Option<Sqe>,
    /// The time at which the limit for the authentication begins, ns: that of Connect, and later that of the
    /// first message of the running transaction.
    pub(super) begun_at_ns: u64,
    /// The time since which an exponentiation is running, ns.
    computing_since_ns: Option<u64>,
}

impl Authentication {
    pub(super) fn new(data: &ConnectData, awaited: AwaitedConnect, now: u64) -> Self {
        Self {
            machine: ControllerAuth::new(&data.hostnqn, &data.subnqn),
            awaited: Some(awaited),
            waiting: None,
            begun_at_ns: now,
            computing_since_ns: None,
        }
    }

    /// Whether an exponentiation is running. The host cannot do anything meanwhile.
    pub(super) const fn is_computing(&self) -> bool {
        self.computing_since_ns.is_some()
    }

    /// Whether a transaction is running.
    pub(super) const fn is_running(&self) -> bool {
        self.machine.is_running()
    }

    /// Whether the next step is the host's, so that its time is limited.
    pub(super) const fn waits_for_host(&self) -> bool {
        !self.is_computing() && (self.awaited.is_some() || self.is_running())
    }

    pub(super) fn hostnqn(&self) -> &str {
        self.machine.hostnqn()
    }
}

/// The result of Connect for a host that must authenticate: the controller id, and AUTHREQ.
pub(super) fn result_with_auth(cntlid: u16) -> u64 {
    u64::from(cntlid) | CONNECT_ATR
}

impl<E: TargetEnv> TargetConn<E> {
    /// Carries out a command of a host that has connected and has to authenticate. Only authentication is
    /// allowed.
    pub(super) fn execute_before_authentication(
        &mut self,
        capsule: Capsule<'_>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let entries = self
            .authentication
            .as_ref()
            .and_then(|authentication| authentication.awaited.as_ref())
            .map_or(0, |awaited| awaited.entries);
        self.context.sqhd += 1;
        if self.context.sqhd >= entries {
            self.context.sqhd = 0;
        }
        let sqe = capsule.sqe;
        if sqe.opcode() == riopipe_nvme::command::admin::FABRICS && is_auth(sqe) {
            return self.execute_auth(capsule, env, outbox);
        }
        let status = Status::AUTHENTICATION_REQUIRED.with_dnr();
        self.context.send_completion(sqe.cid(), status, 0, outbox);
        Ok(())
    }

    /// Carries out an Authentication Send or Receive. A queue whose host need not authenticate has none.
    pub(super) fn execute_auth(
        &mut self,
        capsule: Capsule<'_>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let Capsule { sqe, data, is_digest_valid, .. } = capsule;
        let checked = match (&self.authentication, sqe.auth_len()) {
            (None, _) => Err(Status::INVALID_OPCODE.with_dnr()),
            _ if !is_digest_valid => Err(Status::TRANSIENT_TRANSPORT),
            (_, None) => Err(Status::INVALID_FIELD.with_dnr()),
            // One command after the other (Base §8.3.5.5.1).
            (Some(authentication), _) if authentication.waiting.is_some() => {
                Err(Status::SEQUENCE_ERROR.with_dnr())
            }
            (Some(_), Some(len)) => Ok(len),
        };
        let len = match checked {
            Ok(len) => len,
            Err(status) => {
                self.context.send_completion(sqe.cid(), status, 0, outbox);
                return Ok(());
            }
        };
        if sqe.fctype() == fctype::AUTH_RECV {
            return self.receive_auth(sqe, len, env, outbox);
        }
        // The data comes in the capsule, which every host does for so few bytes.
        let status = match is_in_capsule(sqe, len, data) {
            Ok(true) => return self.send_auth(sqe, data, env, outbox),
            Ok(false) => Status::SGL_TYPE_INVALID.with_dnr(),
            Err(status) => status,
        };
        self.context.send_completion(sqe.cid(), status, 0, outbox);
        Ok(())
    }

    /// Takes in a message of the host.
    fn send_auth(
        &mut self,
        sqe: &Sqe,
        message: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let now = env.now();
        let access = env.with_shared(|shared| alloc::sync::Arc::clone(shared.access()));
        let Some(authentication) = &mut self.authentication else { return Ok(()) };
        if authentication.awaited.is_none() && !authentication.is_running() {
            authentication.begun_at_ns = now;
        }
        let Admission::Authenticates(secret, rules) = access.admission(authentication.hostnqn())
        else {
            let why = "the secret of the host was removed";
            return self.end_authentication(sqe, why, env, outbox);
        };
        let sent = authentication.machine.on_sent(message, secret, rules);
        authentication.computing_since_ns = None;
        match sent {
            Sent::Accepted => {}
            Sent::Job(job) => {
                authentication.computing_since_ns = Some(now);
                let conn = self.context.id;
                env.with_shared(|shared| shared.await_dh(conn));
                env.exponentiate(conn, job);
            }
            Sent::Failed(why) => self.report_authentication_failure(why, env),
            Sent::GivenUp(failure) => {
                let why = alloc::format!("the host has given up the authentication: {failure}");
                return self.end_authentication(sqe, &why, env, outbox);
            }
            Sent::Succeeded => return self.complete_authentication(sqe, None, env, outbox),
        }
        self.context.send_completion(sqe.cid(), Status::SUCCESS, 0, outbox);
        Ok(())
    }

    /// Answers an Authentication Receive, now or when an exponentiation has ended.
    fn receive_auth(
        &mut self,
        sqe: &Sqe,
        len: u32,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let status = match sqe.sgl() {
            _ if len == 0 || len > RECEIVE_BYTES_MAX => Status::INVALID_FIELD.with_dnr(),
            Ok(Sgl::Transport { len: buffer }) if buffer == len => Status::SUCCESS,
            Ok(Sgl::Transport { .. }) => Status::SGL_LENGTH_INVALID.with_dnr(),
            Ok(Sgl::InCapsule { .. }) => Status::SGL_TYPE_INVALID.with_dnr(),
            Err(error) => error.status(),
        };
        if !status.is_ok() {
            self.context.send_completion(sqe.cid(), status, 0, outbox);
            return Ok(());
        }
        let access = env.with_shared(|shared| alloc::sync::Arc::clone(shared.access()));
        let Some(authentication) = &mut self.authentication else { return Ok(()) };
        let Some(rules) = &access.rules else {
            let why = "authentication was switched off";
            return self.end_authentication(sqe, why, env, outbox);
        };
        match authentication.machine.on_receive(rules) {
            Received::Wait => authentication.waiting = Some(*sqe),
            Received::Message(message) => self.send_message(sqe, len, message, outbox),
            Received::Success(message) => {
                return self.complete_authentication(sqe, Some((len, message)), env, outbox);
            }
            Received::Failure(message, why) => {
                if let Some(why) = why {
                    self.report_authentication_failure(why, env);
                }
                self.send_message(sqe, len, message, outbox);
                return Err(Closed::Ended("its authentication failed"));
            }
        }
        Ok(())
    }

    /// Takes in the result of an exponentiation, if one has ended.
    pub(super) fn on_exponentiation(
        &mut self,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let conn = self.context.id;
        let Some(authentication) = &mut self.authentication else { return Ok(()) };
        if !authentication.is_computing() {
            return Ok(());
        }
        let (done, access) = env.with_shared(|shared| {
            (shared.take_dh_done(conn), alloc::sync::Arc::clone(shared.access()))
        });
        let Some(done) = done else { return Ok(()) };
        let failure = match access.admission(authentication.hostnqn()) {
            Admission::Authenticates(secret, _) => authentication.machine.on_dh_done(done, secret),
            _ => return Err(Closed::Ended("the secret of the host was removed")),
        };
        if authentication.machine.is_computing() {
            return Ok(());
        }
        // The time of the exponentiation is the target's, not the host's.
        let now = env.now();
        if let Some(since) = authentication.computing_since_ns.take() {
            authentication.begun_at_ns += now.saturating_sub(since);
        }
        let waiting = authentication.waiting.take();
        if let Some(why) = failure {
            self.report_authentication_failure(why, env);
        }
        match waiting.as_ref().and_then(|sqe| Some((sqe, sqe.auth_len()?))) {
            Some((sqe, len)) => self.receive_auth(sqe, len, env, outbox),
            None => Ok(()),
        }
    }

    /// Ends a successful authentication: does what Connect has asked for. `success` is the message for an
    /// Authentication Receive, and the length of the host's buffer; `None` for an Authentication Send.
    fn complete_authentication(
        &mut self,
        sqe: &Sqe,
        success: Option<(u32, alloc::vec::Vec<u8>)>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let awaited = self.authentication.as_mut().and_then(|auth| auth.awaited.take());
        if let Some(awaited) = awaited
            && let Err(ConnectRefusal { status, result, why }) = self.attach(&awaited, env)
        {
            let (data, qid) = (&awaited.data, awaited.fields.qid);
            env.log(Event::Refused {
                peer: &self.context.peer,
                hostnqn: &data.hostnqn,
                subnqn: &data.subnqn,
                qid,
                why: &why,
                status,
            });
            self.context.send_completion(sqe.cid(), status, result, outbox);
            return Err(Closed::Ended("what its Connect asked for is not possible"));
        }
        match success {
            Some((len, message)) => self.send_message(sqe, len, message, outbox),
            None => self.context.send_completion(sqe.cid(), Status::SUCCESS, 0, outbox),
        }
        Ok(())
    }

    /// Ends the connection, because its authentication cannot go on.
    fn end_authentication(
        &mut self,
        sqe: &Sqe,
        why: &str,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        self.report_authentication_failure(why, env);
        self.context.send_completion(sqe.cid(), Status::SUCCESS, 0, outbox);
        Err(Closed::Ended("its authentication failed"))
    }

    /// Sends a message as the data of an Authentication Receive, with zeroes up to the length of the host's
    /// buffer.
    fn send_message(
        &mut self,
        sqe: &Sqe,
        len: u32,
        mut message: alloc::vec::Vec<u8>,
        outbox: &mut Outbox<E::Buf>,
    ) {
        if message.len() > len as usize {
            let status = Status::INVALID_FIELD.with_dnr();
            return self.context.send_completion(sqe.cid(), status, 0, outbox);
        }
        message.resize(len as usize, 0);
        self.context.send_page(sqe, &message, outbox);
    }

    /// Reports to the operator that the host has not authenticated.
    fn report_authentication_failure(&self, why: &str, env: &mut E) {
        let Some(authentication) = &self.authentication else { return };
        let qid = match (&authentication.awaited, &self.context.queue) {
            (Some(awaited), _) => awaited.fields.qid,
            (None, Some(queue)) => queue.qid,
            (None, None) => 0,
        };
        let (peer, hostnqn) = (&self.context.peer, authentication.hostnqn());
        env.log(Event::AuthenticationFailed { peer, hostnqn, qid, why });
    }
}

/// Whether a Fabrics command belongs to authentication.
pub(super) fn is_auth(sqe: &Sqe) -> bool {
    matches!(sqe.fctype(), fctype::AUTH_SEND | fctype::AUTH_RECV)
}
