//! One connection of a target: bytes in, device operations and bytes out.
//!
//! ```text
//! socket → receive → dispatch.rs ─┬─ fabrics.rs  Connect, Disconnect
//!                                 ├─ admin       commands of the admin queue
//!                                 ├─ plain       commands outside of streams
//!                                 └─ ordered     the requests of a stream
//! drives → device_done → dispatch.rs → the part that has submitted the operation
//! ```
//!
//! `fencing.rs` begins and ends the stream of the connection. `aborting.rs` aborts commands that have
//! not begun. `authentication.rs` makes the host prove its identity. `retiring.rs` ends the use of
//! namespaces that were removed.

mod aborting;
mod authentication;
mod dispatch;
mod fabrics;
mod fencing;
mod retiring;

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use core::sync::atomic::Ordering;

use riopipe_nvme::Crc32c;
use riopipe_nvme::digest::DIGEST_LEN;
use riopipe_nvme::pdu::{CAPSULE_CMD_LEN, Fes, IcReq, IcResp, PduError, Role, Rx, Tx};
use riopipe_order::block_device::IoError;
use riopipe_order::probe::{self, Plant};

use self::authentication::Authentication;
use self::fencing::Fences;
use self::retiring::KnownChanges;
use super::admin::Admin;
use super::budget::Reservation;
use super::capsule::Capsule;
use super::closed::Closed;
use super::commands::{Command, Stage};
use super::context::{Context, update_shared};
use super::env::{Event, TargetEnv, WrongDigest};
use super::identity::LocalAddress;
use super::ids::{ConnId, OpId};
use super::limits::{
    ADMIN_CAPSULE_BYTES, AUTHENTICATION_NS, CONNECT_NS, CONNECTION_BYTES, DATA_STALL_NS,
    H2C_DATA_BYTES_MAX, SEND_FIRST_BYTES, STALL_NS, UNSENT_BYTES_MAX,
};
use super::ordered::OrderedQueue;
use super::plain::PlainIo;
use super::shared::{DriveChange, Notice, note_received};
use crate::auth::tls::KeyOwner;
use crate::outbox::Outbox;

/// The first byte of a session of TLS: the type of a record with a handshake message (RFC 8446 §5.1).
const TLS_HANDSHAKE: u8 = 22;
/// Nanoseconds per millisecond.
const NS_PER_MS: u64 = 1_000_000;

/// One connection, from its ICReq to its last device operation.
///
/// A pure state machine. Bytes go in through [`receive`](Self::receive), finished device operations
/// through [`device_done`](Self::device_done), the clock through [`tick`](Self::tick), wake-ups
/// from other connections through [`noticed`](Self::noticed). Device operations go out through the
/// [`TargetEnv`], bytes through the [`Outbox`].
///
/// When any of them returns [`Closed`], or the socket fails, call [`close`](Self::close), keep
/// handing in `device_done`, and drop the connection once it [`is_drained`](Self::is_drained). Only
/// then is its stream free for another owner (trap T8).
pub struct TargetConn<E: TargetEnv> {
    /// The state that all parts of the connection share.
    context: Context<E>,
    /// The part that carries out plain I/O commands.
    plain: PlainIo,
    /// The part that carries a stream, from Bind until the log of the stream is returned.
    ordered: Option<Box<OrderedQueue<E>>>,
    /// The part that carries out admin commands, if Connect has made the connection an admin queue.
    admin: Option<Box<Admin>>,
    /// The authentication of the host, if it has to authenticate.
    authentication: Option<Box<Authentication>>,
    rx: Rx,
    /// There is no memory for more completions and read data, so the connection takes no input.
    is_starved: bool,
    /// Whole PDUs have been left in the input, because bytes must be sent first.
    input_waits: bool,
    /// The fences that the connection has to acknowledge.
    fences: Fences,
    /// The changes of the namespaces that the connection has to acknowledge.
    known_changes: KnownChanges,
    /// The connection is closed, and all of its device operations have come back.
    is_drained: bool,
    /// The time at which the connection was accepted, ns.
    accepted_at_ns: u64,
    /// The time of the last progress of the input, ns: the connection was accepted, a whole PDU was
    /// consumed, or a new PDU began. The time limit for the next PDU begins at this time.
    input_progress_ns: u64,
    /// The input ends with a PDU that has not arrived completely.
    has_partial_pdu: bool,
    /// The time since which bytes wait to be sent and the peer takes none, ns.
    unsent_since_ns: Option<u64>,
    /// The address of this target through which the host connected. Connect takes it.
    local_address: Option<LocalAddress>,
    /// The owner of the key by which TLS secures the connection; `None` without TLS.
    secured_by: Option<Box<KeyOwner>>,
}

/// A time limit of a connection.
struct Deadline {
    /// The time at which the limit has passed, ns.
    at_ns: u64,
    /// The reason to close the connection when the limit has passed.
    reason: &'static str,
}

/// How far [`TargetConn::receive`] has come with its input.
struct ReceivedPdus {
    /// How many bytes of the input were handled: whole PDUs, and parts of a data PDU.
    consumed_bytes: usize,
    /// The end of any PDU was among them.
    has_ended_pdu: bool,
    /// Too much waits to be sent, so the rest of the input must wait until bytes have been sent.
    is_over_send_limit: bool,
    /// The error after which the connection must be closed.
    outcome: Result<(), Closed>,
}

impl<E: TargetEnv> TargetConn<E> {
    /// A connection that has just been accepted. `id` is unique in an incarnation of the target;
    /// `key` (48 bits) comes back in every [`OpId`].
    #[must_use]
    pub fn new(id: ConnId, key: u64, crc: Crc32c, now: u64) -> Self {
        Self {
            context: Context::new(id, key, Tx::new(crc)),
            plain: PlainIo::default(),
            ordered: None,
            admin: None,
            authentication: None,
            rx: Rx::new(Role::Controller, crc),
            is_starved: false,
            input_waits: false,
            fences: Fences::default(),
            known_changes: KnownChanges::default(),
            is_drained: false,
            accepted_at_ns: now,
            input_progress_ns: now,
            has_partial_pdu: false,
            unsent_since_ns: None,
            local_address: None,
            secured_by: None,
        }
    }

    /// Sets the address through which the host connected. Discovery reports it for ports that
    /// listen on all addresses.
    #[must_use]
    pub fn with_local_address(mut self, local_address: Option<LocalAddress>) -> Self {
        self.local_address = local_address;
        self
    }

    /// Notes that TLS secures the connection, and that the host has proved to have this key. The shell calls
    /// this before it passes on the first byte.
    pub(super) fn secured(&mut self, owner: KeyOwner) {
        self.secured_by = Some(Box::new(owner));
    }

    /// Sets the address of the host, for the operator and for other hosts that ask for the owner of
    /// a volume.
    #[must_use]
    pub fn with_peer(mut self, peer: String) -> Self {
        self.context.peer = peer;
        self
    }

    /// The id given to [`TargetConn::new`].
    #[must_use]
    pub const fn id(&self) -> ConnId {
        self.context.id
    }

    /// Handles the whole PDUs at the start of `buf`, and the data of a data PDU as far as it has come.
    /// Returns how many bytes these are. The rest of `buf` is the beginning of a PDU, or PDUs that
    /// must wait until bytes in `outbox` have been sent ([`input_waits`](Self::input_waits)).
    ///
    /// # Errors
    /// The connection must be closed, once the bytes in `outbox` have been sent.
    pub fn receive(
        &mut self,
        buf: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<usize, Closed> {
        let ReceivedPdus { consumed_bytes, has_ended_pdu, is_over_send_limit, outcome } =
            self.receive_pdus(buf, env, outbox);
        if let Some(ordered) = &mut self.ordered {
            ordered.finish_batch(&mut self.context, buf, env, outbox);
        }
        self.input_waits = is_over_send_limit;
        let has_rest = consumed_bytes < buf.len() || self.context.open_data.is_some();
        let has_partial_pdu = !is_over_send_limit && has_rest;
        let begins_pdu = has_partial_pdu && !self.has_partial_pdu;
        self.has_partial_pdu = has_partial_pdu;
        if begins_pdu {
            // The connection may have been idle for a long time before this PDU.
            self.input_progress_ns = env.now();
        }
        // Parts of a data PDU are no progress: they must not extend its time limit (trap T28).
        if has_ended_pdu {
            let now = env.now();
            self.input_progress_ns = now;
            if let Some(queue) = &self.context.queue {
                note_received(&queue.last_received, now);
            }
            self.start_waiting_commands(env, outbox);
            self.acknowledge_changes(env);
        }
        self.context.end_event(env);
        if let Err(Closed::Protocol(error)) = &outcome {
            if error.fes == Fes::HeaderDigest {
                self.context.report_digest_error(WrongDigest::Header, env);
            }
            let refused = &buf[consumed_bytes..];
            outbox.push_bytes(|bytes| error.term_req().encode(Role::Host, refused, bytes));
        }
        outcome.map(|()| consumed_bytes)
    }

    /// Handles the whole PDUs at the start of `buf`, until too much waits to be sent or an error
    /// ends the connection.
    #[inline(always)]
    fn receive_pdus(
        &mut self,
        buf: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> ReceivedPdus {
        let mut at = 0;
        let mut has_ended_pdu = false;
        let mut is_over_send_limit = false;
        let outcome = loop {
            if outbox.len_bytes() > SEND_FIRST_BYTES
                && at < buf.len()
                && self.must_send_first(outbox)
            {
                is_over_send_limit = true;
                break Ok(());
            }
            let pdu = &buf[at..];
            if let Some(input) = self.context.continue_data(pdu, self.rx.crc) {
                at += input.taken_bytes;
                let Some(end) = input.end else { break Ok(()) };
                has_ended_pdu = true;
                self.on_data_end(&end, env, outbox);
                continue;
            }
            // The fast path: a command capsule that needs no check of digests.
            if let Some((sqe, len)) = self.rx.plain_command(pdu) {
                let data = at + CAPSULE_CMD_LEN..at + len;
                let capsule = Capsule::new(&sqe, buf, data, true);
                if let Err(closed) = self.on_capsule(capsule, env, outbox) {
                    break Err(closed);
                }
                at += len;
                has_ended_pdu = true;
                continue;
            }
            match self.rx.parse(pdu) {
                Ok(Some(parsed)) => {
                    if let Err(closed) = self.on_pdu(&parsed, buf, at, env, outbox) {
                        break Err(closed);
                    }
                    at += parsed.len;
                    has_ended_pdu = true;
                }
                Ok(None) => match self.open_data_pdu(pdu) {
                    Ok(0) => break Ok(()),
                    Ok(head_len) => at += head_len,
                    Err(error) => break Err(error.into()),
                },
                Err(error) => {
                    self.report_tls(pdu, env);
                    break Err(error.into());
                }
            }
        };
        ReceivedPdus { consumed_bytes: at, has_ended_pdu, is_over_send_limit, outcome }
    }

    /// Reports a host that begins with TLS, which no PDU of NVMe/TCP begins like. The connection is one without
    /// TLS, or its bytes would not come here.
    #[cold]
    fn report_tls(&self, pdu: &[u8], env: &mut E) {
        if !self.is_admitted() && pdu.first() == Some(&TLS_HANDSHAKE) {
            let why = "the host begins a handshake of TLS, and this port has no TLS";
            env.log(Event::NotAdmitted { peer: &self.context.peer, why });
        }
    }

    /// Opens the data PDU at the start of `pdu`, of which not all has come. Returns the length of its
    /// head; 0 if it is no data PDU, or its data can't go straight to its command.
    #[inline(never)]
    fn open_data_pdu(&mut self, pdu: &[u8]) -> Result<usize, PduError> {
        let Some(head) = self.rx.data_head(pdu)? else { return Ok(0) };
        Ok(if self.context.open_data(&head)? { head.len } else { 0 })
    }

    /// The memory for the next input, if that is known to be data of a command: the shell may receive
    /// it there, and reports it with [`data_arrived`](Self::data_arrived). The slice is empty
    /// otherwise.
    ///
    /// All input so far must have been consumed.
    pub fn data_space(&mut self) -> &mut [u8] {
        self.context.data_space()
    }

    /// Notes that the first `bytes` bytes of [`data_space`](Self::data_space) have been received
    /// there. A call of [`receive`](Self::receive) with the input behind them, if there is any, must
    /// follow.
    pub fn data_arrived(&mut self, bytes: usize) {
        self.context.data_arrived(bytes);
    }

    /// Bytes that the PDU at the start of `buf` needs in all, if its length is known already.
    #[must_use]
    pub fn need(&self, buf: &[u8]) -> usize {
        // Of a data PDU that is open, only its digest can be left.
        if self.context.open_data.is_some() { DIGEST_LEN } else { self.rx.need(buf) }
    }

    /// The queue id that Connect gave to the connection: 0 for the admin queue.
    #[must_use]
    pub fn qid(&self) -> Option<u16> {
        self.context.queue.as_ref().map(|queue| queue.qid)
    }

    /// The address of the host, as text; empty if there is none.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.context.peer
    }

    /// Whether the host has passed everything that it must before it may use the queue.
    #[must_use]
    pub fn is_admitted(&self) -> bool {
        self.context.queue.is_some()
    }

    /// Whether no command is in flight. Event requests that wait for an event do not count.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.context.commands.in_use_count() == 0
    }

    /// Changes the key by which the environment knows the connection.
    ///
    /// # Panics
    /// If a command is in flight, because its device operation would carry the old key.
    pub fn set_key(&mut self, key: u64) {
        assert!(self.is_quiet(), "device operations carry the old key");
        self.context.key = key;
    }

    /// Whether the connection takes more input. It takes none while too much waits to be sent
    /// (trap T18).
    #[must_use]
    pub fn wants_input(&self, outbox: &Outbox<E::Buf>) -> bool {
        !self.context.is_closing && !self.is_starved && outbox.len_bytes() <= UNSENT_BYTES_MAX
    }

    /// Whether the last [`receive`](Self::receive) has left whole PDUs in its input, because bytes must
    /// be sent first. The shell calls it again when bytes have been sent, or the socket takes none.
    #[must_use]
    pub const fn input_waits(&self) -> bool {
        self.input_waits
    }

    /// Whether bytes must be sent before the next PDU is handled.
    #[cold]
    fn must_send_first(&mut self, outbox: &Outbox<E::Buf>) -> bool {
        // The socket takes no bytes: the host may have space for them only after its next commands.
        let is_blocked = self.unsent_since_ns.is_some();
        !is_blocked || outbox.len_bytes() > CONNECTION_BYTES && self.is_over_send_limit(outbox)
    }

    /// Whether so much waits to be sent that no further command may be taken. Also reserves the
    /// memory for these bytes, and sets `is_starved` if there is none.
    #[cold]
    fn is_over_send_limit(&mut self, outbox: &Outbox<E::Buf>) -> bool {
        let unsent_bytes = outbox.len_bytes();
        self.is_starved = unsent_bytes > CONNECTION_BYTES
            && !self.context.reservation.grow(self.context.held_bytes + unsent_bytes);
        self.is_starved || unsent_bytes > UNSENT_BYTES_MAX
    }

    /// Notes that some bytes of `outbox` have been sent. Commands that waited for the memory of
    /// these bytes may continue.
    pub fn sent(&mut self, env: &mut E, outbox: &mut Outbox<E::Buf>) {
        self.unsent_since_ns = None;
        if self.is_starved {
            self.is_over_send_limit(outbox);
        }
        if let Some(ordered) = &mut self.ordered
            && ordered.tracer.awaits_socket()
            && outbox.is_empty()
        {
            env.traced(&ordered.tracer.on_sent(env.instant()));
        }
        self.start_waiting_commands(env, outbox);
        self.context.end_event(env);
    }

    /// Notes that the socket takes no more bytes at time `now`. The connection waits for the peer
    /// from now on, with a time limit (trap T28).
    pub const fn unsent(&mut self, now: u64) {
        if self.unsent_since_ns.is_none() {
            self.unsent_since_ns = Some(now);
        }
    }

    /// Takes in the result of a device operation that was in flight, as
    /// [`BlockDevice::poll`](riopipe_order::block_device::BlockDevice::poll) has returned it.
    pub fn device_done(
        &mut self,
        op: OpId,
        result: Result<Option<E::Buf>, IoError>,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let index = op.slot();
        if index == OpId::NO_COMMAND {
            return;
        }
        if index == OpId::STREAM_BEGUN {
            return self.plain.on_stream_begun(env);
        }
        let Some(command) =
            self.context.commands.get_used(index).filter(|command| command.is_on_device())
        else {
            debug_assert!(false, "a completion of an operation that was not in flight");
            return;
        };
        // The command may begin a second operation: a FLUSH, or another range of blocks. No fence need
        // wait for the second operation, because a FLUSH writes nothing new, and the guard checks each
        // range before it begins.
        self.fences.on_operation_done(index, command);
        self.on_device_result(index, result, env, outbox);
    }

    /// Ends a batch of one or more [`device_done`](Self::device_done), and must be called after
    /// them. The persist words of the batch share one fence of the log. The completions follow the
    /// fence (trap T7).
    pub fn batch_ended(&mut self, env: &mut E, outbox: &mut Outbox<E::Buf>) {
        if let Some(ordered) = &mut self.ordered {
            ordered.finish_batch(&mut self.context, &[], env, outbox);
        }
        self.start_waiting_commands(env, outbox);
        self.context.end_event(env);
        self.acknowledge_fences(env, outbox);
        self.acknowledge_changes(env);
        if self.context.is_closing {
            self.finish_if_idle(env);
        }
    }

    /// Reads the notices that other connections have left for this one.
    ///
    /// # Errors
    /// The connection must be closed.
    pub fn noticed(&mut self, env: &mut E, outbox: &mut Outbox<E::Buf>) -> Result<(), Closed> {
        let id = self.context.id;
        let mut end = match self.context.is_closing {
            false => self.on_exponentiation(env, outbox),
            true => Ok(()),
        };
        for notice in env.with_shared(|shared| shared.take_notices(id)) {
            match notice {
                Notice::Close(why) => end = Err(Closed::Ended(why)),
                Notice::Fence { id, volume, scope } => {
                    self.on_fence_raised(id, volume, scope, env, outbox);
                }
                Notice::Drain { id, ns_index, blocks } => {
                    self.on_drain(id, ns_index, &blocks, env, outbox);
                }
                Notice::BlocksLocked { ticket } => {
                    self.plain.on_blocks_locked(&mut self.context, ticket, env, outbox);
                    self.batch_ended(env, outbox);
                }
                Notice::Event => {
                    if let Some(admin) = &mut self.admin {
                        admin.report_events(&mut self.context, env, outbox);
                    }
                }
                Notice::Fenced { id } => {
                    if let Some(admin) = &mut self.admin {
                        admin.on_fence_ended(&mut self.context, id, env, outbox);
                    }
                }
                Notice::DriveChanged(DriveChange::FlushRound) => self.resolve_doubts(env, outbox),
                Notice::DriveChanged(DriveChange::Sequence) => {
                    self.plain.on_sequence_changed(&mut self.context, env, outbox);
                    self.batch_ended(env, outbox);
                }
                Notice::Draining => {
                    if let Some(admin) = &mut self.admin {
                        admin.on_draining(&mut self.context, outbox);
                    }
                }
                Notice::NamespacesChanged { number } => self.on_namespaces_changed(number, env),
                Notice::Abort { id, cid, admin } => {
                    let is_aborted = self.abort_command(cid, env, outbox);
                    update_shared(env, |shared| shared.end_abort(admin, id, is_aborted));
                }
                Notice::AbortEnded { id, is_aborted } => {
                    if let Some(admin) = &mut self.admin {
                        admin.on_abort_ended(&mut self.context, id, is_aborted, outbox);
                    }
                }
            }
        }
        self.context.end_event(env);
        if self.context.is_closing { Ok(()) } else { end }
    }

    /// Checks the time limits. All input that had arrived at time `read_until` (ns) has been passed in: a
    /// limit that ends later has not passed yet, because input in time may be unread.
    ///
    /// # Errors
    /// A time limit has passed, and the connection must be closed.
    pub fn tick(
        &mut self,
        read_until: u64,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        if self.context.is_closing {
            return Ok(());
        }
        self.acknowledge_changes(env);
        let now = env.now();
        if outbox.is_empty() {
            self.unsent_since_ns = None;
        } else if self.unsent_since_ns.is_none() {
            self.unsent_since_ns = Some(now);
        }
        match self.first_deadline() {
            Some(Deadline { at_ns, reason }) if at_ns <= now.min(read_until) => {
                if !self.is_admitted() {
                    env.log(Event::NotAdmitted { peer: &self.context.peer, why: reason });
                }
                Err(Closed::Stalled(reason))
            }
            _ => Ok(()),
        }
    }

    /// When [`tick`](Self::tick) is due next, on the environment's clock.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        if self.context.is_closing {
            return None;
        }
        self.first_deadline().map(|deadline| deadline.at_ns)
    }

    /// The time limit that passes first; `None` if the connection waits for nothing.
    fn first_deadline(&self) -> Option<Deadline> {
        let mut first: Option<Deadline> = None;
        let mut add = |at_ns: u64, reason: &'static str| {
            if first.as_ref().is_none_or(|other| at_ns < other.at_ns) {
                first = Some(Deadline { at_ns, reason });
            }
        };
        let authentication = self.authentication.as_deref();
        if self.context.queue.is_none() && authentication.is_none() {
            // Refused commands do not extend the limit from the accept to Connect. Otherwise a peer
            // that may not connect could keep its connection open without end (trap T28).
            let limit = (self.input_progress_ns + STALL_NS).min(self.accepted_at_ns + CONNECT_NS);
            let why = match self.rx.connected {
                false => "no ICReq came in time",
                true => "no Fabrics Connect came in time",
            };
            add(limit, why);
        } else if self.has_partial_pdu {
            add(self.input_progress_ns + STALL_NS, "the rest of a PDU did not come in time");
        } else if self.context.commands.in_use_count() > 0 && self.awaits_data() {
            // Behind a slow drive the request may be newer than the last input.
            let begin = self.input_progress_ns.max(self.context.last_r2t_ns);
            add(begin + DATA_STALL_NS, "data that was asked for did not come in time");
        }
        if let Some(authentication) = authentication.filter(|it| it.waits_for_host()) {
            let limit = authentication.begun_at_ns + AUTHENTICATION_NS;
            add(limit, "the host did not authenticate in time");
        }
        if let Some(since) = self.unsent_since_ns {
            add(since + DATA_STALL_NS, "the host does not take what it is sent");
        }
        if let (Some(queue), Some(admin)) = (&self.context.queue, &self.admin)
            && admin.kato_ms > 0
        {
            let last_received = queue.last_received.load(Ordering::Relaxed);
            let keep_alive_ns = u64::from(admin.kato_ms) * NS_PER_MS;
            add(last_received + keep_alive_ns, "the keep alive timer expired");
        }
        first
    }

    /// Whether the data of any command is still to arrive by R2T.
    fn awaits_data(&self) -> bool {
        self.context.commands.any(|command| command.stage == Stage::Receiving)
    }

    /// Ends the connection, because it is lost or must be closed. No operation begins from now on.
    /// The device operations in flight still end with [`device_done`](Self::device_done).
    pub fn close(&mut self, why: &str, env: &mut E) {
        if self.context.is_closing {
            return;
        }
        self.context.is_closing = true;
        let queue = self.context.queue.as_ref();
        let claimed = self.authentication.as_deref().map_or("", Authentication::hostnqn);
        env.log(Event::Closed {
            peer: &self.context.peer,
            hostnqn: queue.map_or(claimed, |queue| &queue.hostnqn),
            cntlid: queue.map(|queue| queue.cntlid),
            qid: queue.map_or(0, |queue| queue.qid),
            why,
        });
        if self.authentication.take().is_some() {
            let id = self.context.id;
            env.with_shared(|shared| shared.forget_dh(id));
        }
        self.context.waiting_for_budget.clear();
        self.plain.waiting_for_lock.clear();
        self.plain.close_streams(&self.context, env);
        if let Some(ordered) = &mut self.ordered {
            ordered.end_stream(&mut self.context);
            // There is no peer, so the completions go into an outbox that is dropped.
            ordered.finish_batch(&mut self.context, &[], env, &mut Outbox::new());
            if probe::is_bug_planted(Plant::T8ReplayNoWait) {
                self.return_stream(env, &mut Outbox::new());
            }
        }
        let is_at_rest =
            |command: &Command<E::Buf>| !command.is_on_device() && command.stage != Stage::Aborted;
        for index in self.context.commands.indices_where(is_at_rest) {
            self.context.remove_command(index);
        }
        self.context.end_event(env);
        if self.context.queue.is_some() {
            let (id, association, now) = (self.context.id, self.context.association(), env.now());
            let admin = self.admin.as_ref();
            update_shared(env, |shared| {
                for volume in admin.iter().flat_map(|admin| admin.volumes_in_release()) {
                    shared.volumes.cancel_lease(volume, association);
                }
                shared.begin_detach(id, now);
            });
        }
        self.finish_if_idle(env);
    }

    /// Whether the connection is closed and all of its commands have ended. Then it may be dropped.
    #[must_use]
    pub const fn is_drained(&self) -> bool {
        self.is_drained
    }

    /// If no command is in flight, returns the log of the stream and frees everything else that the
    /// closed connection has.
    fn finish_if_idle(&mut self, env: &mut E) {
        if self.is_drained || self.context.commands.in_use_count() > 0 {
            return;
        }
        if !self.plain.leave_streams(&self.context, env) {
            return;
        }
        self.return_stream(env, &mut Outbox::new());
        if self.context.queue.is_some() {
            let id = self.context.id;
            update_shared(env, |shared| shared.detach(id));
        }
        self.context.reservation = Reservation::default();
        self.is_drained = true;
    }

    /// Handles an ICReq (Initialize Connection Request): sets the digests and the other parameters
    /// of the connection, and sends the ICResp.
    fn on_ic_req(
        &mut self,
        request: &IcReq,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        if request.pfv != 0 {
            return Err(PduError::unsupported(8, "an unknown PDU format version").into());
        }
        let identity = env.with_shared(|shared| Arc::clone(shared.identity()));
        let lacks_header_digest = identity.require_header_digest && !request.header_digest;
        let lacks_data_digest = identity.require_data_digest && !request.data_digest;
        if lacks_header_digest || lacks_data_digest {
            return Err(PduError::unsupported(11, "digests that this target insists on").into());
        }
        let response = IcResp {
            pfv: 0,
            cpda: 0,
            header_digest: request.header_digest,
            data_digest: request.data_digest,
            maxh2cdata: H2C_DATA_BYTES_MAX,
        };
        outbox.push_bytes(|bytes| response.encode(bytes));
        self.rx.connected = true;
        self.rx.header_digest = request.header_digest;
        self.rx.data_digest = request.data_digest;
        self.rx.capsule_max = ADMIN_CAPSULE_BYTES;
        self.rx.data_max = H2C_DATA_BYTES_MAX;
        self.context.tx.header_digest = request.header_digest;
        self.context.tx.data_digest = request.data_digest;
        // HPDA counts dwords, and 0 stands for one dword.
        self.context.tx.align = (u32::from(request.hpda) + 1) * 4;
        Ok(())
    }
}
