//! One connection of a target: bytes in, device operations and bytes out.
//!
//! `dispatch.rs` passes commands to the part that carries them out, `fabrics.rs` connects the
//! queue, and `fencing.rs` begins and ends its stream.

mod dispatch;
mod fabrics;
mod fencing;

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::Ordering;

use riopipe_nvme::Crc32c;
use riopipe_nvme::pdu::{CAPSULE_CMD_LEN, IcReq, IcResp, PduError, Role, Rx, Tx};
use riopipe_order::block_device::IoError;
use riopipe_order::probe::{self, Plant};

use self::fencing::Fences;
use super::admin::Admin;
use super::budget::Reservation;
use super::capsule::Capsule;
use super::closed::Closed;
use super::commands::Stage;
use super::context::{Context, update_shared};
use super::env::{Event, TargetEnv};
use super::identity::LocalAddress;
use super::ids::{ConnId, OpId};
use super::limits::{
    ADMIN_CAPSULE_BYTES, CONNECT_NS, CONNECTION_BYTES, DATA_STALL_NS, H2C_DATA_BYTES_MAX, STALL_NS,
    UNSENT_BYTES_MAX,
};
use super::ordered::OrderedQueue;
use super::plain::PlainIo;
use super::shared::{Notice, last_received};
use crate::outbox::Outbox;

/// One connection, from its ICReq to its last device operation.
///
/// A pure state machine. Bytes go in through [`receive`](Self::receive), finished device operations
/// through [`device_done`](Self::device_done), the clock through [`tick`](Self::tick), wake-ups
/// from other connections through [`noticed`](Self::noticed). Device operations go out through the
/// [`TargetEnv`], bytes through the [`Outbox`].
///
/// When any of them returns [`Closed`], or the socket fails, call [`close`](Self::close), keep
/// handing in `device_done`, and drop the connection once it [`is_drained`](Self::is_drained). Only
/// then is its stream free for another owner (T8).
pub struct TargetConn<E: TargetEnv> {
    /// The state that its parts share.
    context: Context<E>,
    /// The part that carries out plain I/O commands.
    plain: PlainIo,
    /// The part that carries a stream, from Bind until the stream is released.
    ordered: Option<Box<OrderedQueue<E>>>,
    /// The part that is an admin queue, if Connect has made the connection an admin queue.
    admin: Option<Box<Admin>>,
    rx: Rx,
    /// Nothing is received, because there is no memory for the answers.
    is_starved: bool,
    /// The fences that it has to acknowledge.
    fences: Fences,
    /// It is closed, and all of its operations have come back.
    drained: bool,
    /// The time at which the connection was accepted, ns.
    accepted: u64,
    /// The time from which the limit for the next PDU counts, ns: the connection was accepted, the
    /// last whole PDU was consumed, or the present one began.
    progress: u64,
    /// A PDU has begun and has not arrived completely.
    partial: bool,
    /// The time since which the peer takes no bytes although some wait for it, ns.
    unsent_since: Option<u64>,
    /// The address through which the host connected, until Connect.
    local: Option<LocalAddress>,
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
            rx: Rx::new(Role::Controller, crc),
            is_starved: false,
            fences: Fences::default(),
            drained: false,
            accepted: now,
            progress: now,
            partial: false,
            unsent_since: None,
            local: None,
        }
    }

    /// Sets the address through which the host connected. Discovery reports it for ports that
    /// listen on all addresses.
    #[must_use]
    pub fn with_local_address(mut self, local: Option<LocalAddress>) -> Self {
        self.local = local;
        self
    }

    /// The id given to [`TargetConn::new`].
    #[must_use]
    pub const fn id(&self) -> ConnId {
        self.context.id
    }

    /// Takes whole PDUs from the start of `buf`; returns how many bytes they were. The rest is the
    /// beginning of a PDU, or PDUs that must wait until the peer has taken its answers
    /// ([`wants_input`](Self::wants_input)).
    ///
    /// # Errors
    /// The connection must be closed, once the bytes in `outbox` have been sent.
    pub fn receive(
        &mut self,
        buf: &[u8],
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<usize, Closed> {
        let mut at = 0;
        let mut full = false;
        let end = loop {
            if outbox.len_bytes() > CONNECTION_BYTES && self.is_over_send_limit(outbox) {
                full = true;
                break Ok(());
            }
            let pdu = &buf[at..];
            if let Some((sqe, len)) = self.rx.plain_command(pdu) {
                let data = at + CAPSULE_CMD_LEN..at + len;
                let capsule = Capsule::new(&sqe, buf, data, true);
                if let Err(closed) = self.on_capsule(capsule, env, outbox) {
                    break Err(closed);
                }
                at += len;
                continue;
            }
            match self.rx.parse(pdu) {
                Ok(Some(parsed)) => {
                    if let Err(closed) = self.on_pdu(&parsed, buf, at, env, outbox) {
                        break Err(closed);
                    }
                    at += parsed.len;
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error.into()),
            }
        };
        if let Some(ordered) = &mut self.ordered {
            ordered.finish_batch(&mut self.context, buf, env, outbox);
        }
        let partial = !full && at < buf.len();
        let begins = partial && !self.partial;
        self.partial = partial;
        if begins {
            // The connection may have been idle for long before this PDU.
            self.progress = env.now();
        }
        if at > 0 {
            let now = env.now();
            self.progress = now;
            if let Some(queue) = &self.context.queue {
                last_received(&queue.last_received, now);
            }
            self.start_waiting_commands(env, outbox);
        }
        match end {
            Ok(()) => Ok(at),
            Err(closed) => {
                if let Closed::Protocol(error) = &closed {
                    outbox.push_bytes(|v| error.term_req().encode(Role::Host, &buf[at..], v));
                }
                Err(closed)
            }
        }
    }

    /// Bytes that the PDU at the start of `buf` needs in all, if its length is known already.
    #[must_use]
    pub fn need(&self, buf: &[u8]) -> usize {
        self.rx.need(buf)
    }

    /// The queue id that Connect gave to the connection: 0 for the admin queue.
    #[must_use]
    pub fn qid(&self) -> Option<u16> {
        self.context.queue.as_ref().map(|q| q.qid)
    }

    /// Whether no command is in flight, except held event requests.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.context.commands.in_use_count() == 0
    }

    /// Changes the key by which the environment knows the connection.
    ///
    /// # Panics
    /// If a device operation is in flight with the old one.
    pub fn set_key(&mut self, key: u64) {
        assert!(self.is_quiet(), "device operations carry the old key");
        self.context.key = key;
    }

    /// Whether more may be received: not while too much waits to be sent (T18).
    #[must_use]
    pub fn wants_input(&self, outbox: &Outbox<E::Buf>) -> bool {
        !self.context.is_closing && !self.is_starved && outbox.len_bytes() <= UNSENT_BYTES_MAX
    }

    /// Whether no further command may be taken, because too much waits to be sent. Sets `is_starved`.
    #[cold]
    fn is_over_send_limit(&mut self, outbox: &Outbox<E::Buf>) -> bool {
        let unsent = outbox.len_bytes();
        self.is_starved = unsent > CONNECTION_BYTES
            && !self.context.reservation.grow(self.context.held_bytes + unsent);
        self.is_starved || unsent > UNSENT_BYTES_MAX
    }

    /// Notes that some of `outbox` has been sent. Commands that waited for space may go on.
    pub fn sent(&mut self, env: &mut E, outbox: &mut Outbox<E::Buf>) {
        self.unsent_since = None;
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
    }

    /// Notes that the peer takes no more bytes at time `now`. From now on the connection waits for
    /// it, with a time limit (T28).
    pub const fn unsent(&mut self, now: u64) {
        if self.unsent_since.is_none() {
            self.unsent_since = Some(now);
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
        let Some(command) =
            self.context.commands.get_used(index).filter(|command| command.is_on_device())
        else {
            debug_assert!(false, "a completion of an operation that was not in flight");
            return;
        };
        if core::mem::take(&mut command.awaited_by_fence) {
            // The command may begin a second operation (a FLUSH, another range). A FLUSH writes
            // nothing new, and the guard checks a range before it begins.
            self.fences.operation_done();
        }
        self.on_device_result(index, result, env, outbox);
    }

    /// Ends a batch of one or more [`device_done`](Self::device_done), and must be called after
    /// it: persist words of the batch share one fence, and responses follow it (T7).
    pub fn batch_ended(&mut self, env: &mut E, outbox: &mut Outbox<E::Buf>) {
        if let Some(ordered) = &mut self.ordered {
            ordered.finish_batch(&mut self.context, &[], env, outbox);
        }
        self.start_waiting_commands(env, outbox);
        self.acknowledge_fences(env, outbox);
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
        let mut end = Ok(());
        for notice in env.with_shared(|shared| shared.take_notices(id)) {
            match notice {
                Notice::Close(why) => end = Err(Closed::Ended(why)),
                Notice::Fence { id, volume, claimed } => {
                    self.on_fence_raised(id, volume, claimed, env, outbox);
                }
                Notice::Fenced { id } => {
                    if let Some(admin) = &mut self.admin {
                        admin.on_fence_ended(&mut self.context, id, env, outbox);
                    }
                }
                Notice::FlushRoundEnded => self.resolve_doubts(env, outbox),
            }
        }
        if self.context.is_closing { Ok(()) } else { end }
    }

    /// Checks the time limits.
    ///
    /// # Errors
    /// A time limit has passed, and the connection must be closed.
    pub fn tick(&mut self, env: &mut E, outbox: &mut Outbox<E::Buf>) -> Result<(), Closed> {
        if self.context.is_closing {
            return Ok(());
        }
        let now = env.now();
        if outbox.is_empty() {
            self.unsent_since = None;
        } else if self.unsent_since.is_none() {
            self.unsent_since = Some(now);
        }
        match self.deadline() {
            Some((deadline, why)) if deadline <= now => Err(Closed::Stalled(why)),
            _ => Ok(()),
        }
    }

    /// When [`tick`](Self::tick) is due next, on the environment's clock.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        if self.context.is_closing { None } else { self.deadline().map(|d| d.0) }
    }

    /// The first time limit, and the reason to close the connection when it has passed.
    fn deadline(&self) -> Option<(u64, &'static str)> {
        let mut first = None;
        let mut add = |at: u64, why: &'static str| {
            if first.is_none_or(|(other, _)| at < other) {
                first = Some((at, why));
            }
        };
        if self.context.queue.is_none() {
            // Refused commands do not extend the time limit: a peer without rights would otherwise
            // keep its connection open (T28).
            let limit = (self.progress + STALL_NS).min(self.accepted + CONNECT_NS);
            add(limit, "no Fabrics Connect came in time");
        } else if self.partial {
            add(self.progress + STALL_NS, "the rest of a PDU did not come in time");
        } else if self.context.commands.in_use_count() > 0 && self.is_receiving() {
            add(self.progress + DATA_STALL_NS, "data that was asked for did not come in time");
        }
        if let Some(since) = self.unsent_since {
            add(since + DATA_STALL_NS, "the host does not take what it is sent");
        }
        if let (Some(queue), Some(admin)) = (&self.context.queue, &self.admin)
            && admin.kato_ms > 0
        {
            let last_received = queue.last_received.load(Ordering::Relaxed);
            add(
                last_received + u64::from(admin.kato_ms) * 1_000_000,
                "the keep alive timer expired",
            );
        }
        first
    }

    fn is_receiving(&self) -> bool {
        self.context.commands.any(|command| command.stage == Stage::Receiving)
    }

    /// Ends the connection, which is lost or must be closed. No new operation is begun. Device
    /// operations in flight still end with [`device_done`](Self::device_done).
    pub fn close(&mut self, why: &str, env: &mut E) {
        if self.context.is_closing {
            return;
        }
        self.context.is_closing = true;
        let queue = self.context.queue.as_ref();
        env.log(Event::Closed {
            hostnqn: queue.map_or("", |q| &q.hostnqn),
            cntlid: queue.map(|q| q.cntlid),
            qid: queue.map_or(0, |q| q.qid),
            why,
        });
        self.context.waiting_for_budget.clear();
        if let Some(ordered) = &mut self.ordered {
            ordered.end_stream(&mut self.context);
            // There is no peer to answer.
            ordered.finish_batch(&mut self.context, &[], env, &mut Outbox::new());
            if probe::planted(Plant::T8ReplayNoWait) {
                self.return_stream(env, &mut Outbox::new());
            }
        }
        for index in self.context.commands.indices_where(|command| !command.is_on_device()) {
            self.context.remove_command(index);
        }
        if self.context.queue.is_some() {
            let (id, association, now) = (self.context.id, self.context.association(), env.now());
            let admin = self.admin.as_ref();
            update_shared(env, |shared| {
                for volume in admin.iter().flat_map(|admin| admin.releasing()) {
                    shared.volumes.cancel_lease(volume, association);
                }
                shared.begin_detach(id, now);
            });
        }
        self.finish_if_idle(env);
    }

    /// Whether the connection is closed and has no command left, so that it may be dropped.
    #[must_use]
    pub const fn is_drained(&self) -> bool {
        self.drained
    }

    /// If no command is left, returns the stream's log and gives up everything else that the
    /// connection has. After this it may be dropped.
    fn finish_if_idle(&mut self, env: &mut E) {
        if self.drained || self.context.commands.in_use_count() > 0 {
            return;
        }
        self.return_stream(env, &mut Outbox::new());
        if self.context.queue.is_some() {
            let id = self.context.id;
            update_shared(env, |shared| shared.detach(id));
        }
        self.context.reservation = Reservation::default();
        self.drained = true;
    }

    /// Carries out an ICReq: sets the digests and the other parameters of the connection, and answers.
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
        if identity.require_header_digest && !request.header_digest
            || identity.require_data_digest && !request.data_digest
        {
            return Err(PduError::unsupported(11, "digests that this target insists on").into());
        }
        outbox.push_bytes(|v| {
            IcResp {
                pfv: 0,
                cpda: 0,
                header_digest: request.header_digest,
                data_digest: request.data_digest,
                maxh2cdata: H2C_DATA_BYTES_MAX,
            }
            .encode(v);
        });
        self.rx.connected = true;
        self.rx.header_digest = request.header_digest;
        self.rx.data_digest = request.data_digest;
        self.rx.capsule_max = ADMIN_CAPSULE_BYTES;
        self.rx.data_max = H2C_DATA_BYTES_MAX;
        self.context.tx.header_digest = request.header_digest;
        self.context.tx.data_digest = request.data_digest;
        self.context.tx.align = (u32::from(request.hpda) + 1) * 4;
        Ok(())
    }
}
