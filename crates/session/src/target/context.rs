//! The state that all parts of a connection share: the queue that Connect made of the connection,
//! the table of commands in flight, and the sending of their completions.
//!
//! Each part (`admin`, `plain`, `ordered`) gets `&mut Context` and the [`Outbox`] with each
//! command. The part either sends the completion at once ([`Context::send_completion`]), or puts
//! the command into the table ([`Context::insert_command`]) and completes it later
//! ([`Context::complete_command`]).

use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::AtomicU64;

use riopipe_nvme::command::{Cqe, Sgl, Sqe, Status, opcode};
use riopipe_nvme::log_page::ErrorEntry;
use riopipe_nvme::pdu::{DataHdr, PduError, Tx};
use riopipe_order::probe::{self, Rare};

use super::block_locks::LockTicket;
use super::budget::Reservation;
use super::closed::Closed;
use super::commands::{Commands, Stage};
use super::env::{Event, TargetEnv, WrongDigest};
use super::error_log::NewErrors;
use super::ids::ConnId;
use super::lba::{Trim, is_translated, translate};
use super::namespace::{Namespace, Namespaces};
use super::reserved_access::ReservedAccess;
use super::rights::Rights;
use super::shared::Shared;
use super::transfer::OpenData;
use super::writers::NotedNamespaces;
use crate::outbox::Outbox;
use crate::wire;

/// The queue that Connect made of a connection.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) cntlid: u16,
    pub(super) association: u64,
    pub(super) qid: u16,
    pub(super) hostnqn: String,
    /// The host has switched submission queue flow control off. A completion then carries no valid
    /// SQHD, and the SUCCESS flag of read data may stand for a completion.
    pub(super) no_sq_flow: bool,
    /// The number of entries of the submission queue.
    pub(super) entries: u16,
    /// The time at which the association last received from the host.
    pub(super) last_received: Arc<AtomicU64>,
    pub(super) rights: Arc<Rights>,
    /// The access that reservations allow.
    pub(super) access: Arc<ReservedAccess>,
    pub(super) hostid: [u8; 16],
}

/// A command that has just been put into the table.
pub(super) struct InsertedCommand {
    /// The index of the command in the table.
    pub(super) index: u16,
    /// The index of the command's namespace.
    pub(super) ns_index: usize,
}

/// The state that all parts of a connection share.
pub(super) struct Context<E: TargetEnv> {
    pub(super) id: ConnId,
    /// The upper bits of every [`OpId`](super::ids::OpId) of the connection .
    /// The environment finds the connection by them.
    pub(super) key: u64,
    pub(super) tx: Tx,
    /// The host's address, as text; empty if there is none.
    pub(super) peer: String,
    /// `None` before Connect.
    pub(super) queue: Option<Queue>,
    /// The queue id that the connection gets when its host is authenticated; 0 before Connect.
    pub(super) awaited_qid: u16,
    /// The head of the submission queue, for completions.
    pub(super) sqhd: u16,
    /// The commands that have no completion yet.
    pub(super) commands: Commands<E::Buf>,
    pub(super) namespaces: Arc<Namespaces>,
    /// Commands that wait until the connection may hold their buffers, in order.
    pub(super) waiting_for_budget: VecDeque<u16>,
    /// When the connection requested data last, ns.
    pub(super) last_r2t_ns: u64,
    /// The data PDU that has come in part, and whose data goes straight to its command.
    pub(super) open_data: Option<OpenData>,
    /// Bytes of buffers held by commands.
    pub(super) held_bytes: usize,
    /// Memory reserved for these buffers, and for the bytes that wait to be sent (trap T28).
    pub(super) reservation: Reservation,
    /// The namespaces for which this connection is noted as a writer. A claim of one of them asks
    /// the connection to drain (trap T8).
    pub(super) noted_namespaces: NotedNamespaces,
    /// The locks of commands that have ended, each with its namespace index. They are released at the
    /// end of the event.
    pub(super) locks_to_release: Vec<(usize, LockTicket)>,
    /// The errors of this event. They are added to the log of the controller at its end.
    pub(super) new_errors: NewErrors,
    /// The owner of the stream that this connection carries, or carried last, has been fenced. The
    /// stream has ended (trap T8).
    pub(super) is_fenced: bool,
    /// The connection has ended: no operation begins, and no completion is sent.
    pub(super) is_closing: bool,
}

impl<E: TargetEnv> Context<E> {
    pub(super) fn new(id: ConnId, key: u64, tx: Tx) -> Self {
        Self {
            id,
            key,
            tx,
            peer: String::new(),
            queue: None,
            awaited_qid: 0,
            sqhd: 0,
            commands: Commands::new(0),
            namespaces: Arc::default(),
            waiting_for_budget: VecDeque::new(),
            last_r2t_ns: 0,
            open_data: None,
            held_bytes: 0,
            reservation: Reservation::default(),
            noted_namespaces: NotedNamespaces::default(),
            locks_to_release: Vec::new(),
            new_errors: NewErrors::default(),
            is_fenced: false,
            is_closing: false,
        }
    }

    /// The number of the host's association with the subsystem; 0 before Connect.
    #[inline]
    pub(super) fn association(&self) -> u64 {
        self.queue.as_ref().map_or(0, |queue| queue.association)
    }

    /// Sends the completion of a command that is not in the table. `result` is dwords 0 and 1.
    #[inline(never)]
    pub(super) fn send_completion(
        &mut self,
        cid: u16,
        status: Status,
        result: u64,
        outbox: &mut Outbox<E::Buf>,
    ) {
        self.send_completion_inlined(cid, status, result, outbox);
    }

    /// [`send_completion`](Self::send_completion), inlined for the hot path.
    #[inline(always)]
    pub(super) fn send_completion_inlined(
        &mut self,
        cid: u16,
        status: Status,
        result: u64,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let qid = self.queue.as_ref().map_or(self.awaited_qid, |queue| queue.qid);
        if !status.is_ok() {
            self.note_error(cid, qid, status);
        }
        let cqe = Cqe::new(cid, self.sqhd, qid, status, result);
        outbox.push_response(&self.tx, &cqe);
    }

    /// Takes a command out of the table and sends its completion.
    #[inline(never)]
    pub(super) fn complete_command(
        &mut self,
        index: u16,
        status: Status,
        result: u64,
        outbox: &mut Outbox<E::Buf>,
    ) {
        self.complete_command_inlined(index, status, result, outbox);
    }

    /// [`complete_command`](Self::complete_command), inlined for the hot path.
    #[inline(always)]
    pub(super) fn complete_command_inlined(
        &mut self,
        index: u16,
        status: Status,
        result: u64,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let cid = self.commands[index].sqe.cid();
        let failed = (!status.is_ok()).then(|| (self.commands[index].sqe, self.host_lba(index)));
        self.remove_command(index);
        if !self.is_closing {
            self.send_completion_inlined(cid, status, result, outbox);
            if let Some((sqe, lba)) = failed {
                self.describe_error(&sqe, lba);
            }
        }
    }

    /// Takes a command out of the table without a completion.
    #[inline(always)]
    pub(super) fn remove_command(&mut self, index: u16) {
        if self.commands[index].lock.is_some() {
            self.give_up_lock(index);
        }
        self.held_bytes -= self.commands.remove(index);
    }

    /// Sends `page` as the data of a command, and the completion. The command fails if the host's
    /// buffer is too short for the page.
    pub(super) fn send_page(&mut self, sqe: &Sqe, page: &[u8], outbox: &mut Outbox<E::Buf>) {
        let cid = sqe.cid();
        let status = check_page_buffer(sqe, page.len()).err().unwrap_or(Status::SUCCESS);
        if status.is_ok() && !page.is_empty() {
            let header = DataHdr {
                cccid: cid,
                ttag: 0,
                datao: 0,
                datal: page.len() as u32,
                last: true,
                success: false,
            };
            let tx = &self.tx;
            outbox.push_bytes(|bytes| {
                tx.c2h_data(&header, bytes);
                bytes.extend_from_slice(page);
                tx.data_digest([page], bytes);
            });
        }
        self.send_completion(cid, status, 0, outbox);
    }

    /// Notes a command that fails, for the Error Information log page.
    #[cold]
    fn note_error(&mut self, cid: u16, sqid: u16, status: Status) {
        let parameter = ErrorEntry::NO_PARAMETER;
        self.new_errors.push(ErrorEntry { sqid, cid, status, parameter, ..ErrorEntry::default() });
    }

    /// The first block of a command, as its host counts.
    #[cold]
    fn host_lba(&self, index: u16) -> u64 {
        let command = &self.commands[index];
        match self.namespaces.find(command.sqe.nsid()) {
            Some((_, namespace)) if is_translated(command.sqe.opcode()) => {
                command.trim.host_lba(&command.sqe, namespace.config.lba_size)
            }
            _ => command.sqe.slba(),
        }
    }

    /// Translates a command of a namespace whose blocks are smaller than those of its drive. `None`
    /// if there is nothing to translate.
    #[inline(always)]
    pub(super) fn translated(&self, sqe: &Sqe) -> Option<Result<(Sqe, Trim), Status>> {
        if self.namespaces.has_small_blocks() { self.translate_small(sqe) } else { None }
    }

    #[cold]
    fn translate_small(&self, sqe: &Sqe) -> Option<Result<(Sqe, Trim), Status>> {
        let (_, namespace) = self.namespaces.find(sqe.nsid())?;
        let size = namespace.config.lba_size;
        (size.is_small() && is_translated(sqe.opcode())).then(|| translate(sqe, size))
    }

    /// Adds to the newest error, if it is of this command, that the command was about blocks from
    /// `lba` on, as the host counts.
    #[cold]
    pub(super) fn describe_error(&mut self, sqe: &Sqe, lba: u64) {
        let qid = self.queue.as_ref().map_or(0, |queue| queue.qid);
        let Some(error) = self.new_errors.last_of(sqe.cid()) else { return };
        error.nsid = sqe.nsid();
        if qid != 0 && has_blocks(sqe) {
            error.lba = lba;
        }
    }

    /// Ends an event on this connection: passes on what concerns others.
    #[inline]
    pub(super) fn end_event(&mut self, env: &mut E) {
        self.release_locks(env);
        if !self.new_errors.is_empty() {
            let errors = self.new_errors.take();
            if let Some(queue) = &self.queue {
                env.with_shared(|shared| shared.add_errors(queue.cntlid, errors));
            }
        }
    }

    /// The index that the next command gets.
    ///
    /// # Errors
    /// The host has sent more commands than its submission queue has entries.
    #[inline]
    pub(super) fn next_index(&self) -> Result<u16, Closed> {
        self.commands.next_index().ok_or_else(|| {
            PduError::sequence("more commands outstanding than the submission queue has entries")
                .into()
        })
    }

    /// Puts a command of the namespace `ns_index` into the table. Returns its index.
    ///
    /// # Errors
    /// The host has sent more commands than its submission queue has entries.
    #[inline]
    pub(super) fn insert_command(
        &mut self,
        sqe: &Sqe,
        stage: Stage,
        ns_index: usize,
    ) -> Result<u16, Closed> {
        let index = self.next_index()?;
        self.commands.insert(sqe, stage, ns_index);
        Ok(index)
    }

    /// Puts a command into the table if `checked` is the index of its namespace. If `checked` is
    /// a status, the command is refused: sends the completion with that status and returns `None`.
    #[inline]
    pub(super) fn insert_or_refuse(
        &mut self,
        sqe: &Sqe,
        stage: Stage,
        checked: Result<usize, Status>,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<Option<InsertedCommand>, Closed> {
        match checked {
            Ok(ns_index) => {
                let index = self.insert_command(sqe, stage, ns_index)?;
                Ok(Some(InsertedCommand { index, ns_index }))
            }
            Err(status) => {
                self.send_completion(sqe.cid(), status, 0, outbox);
                Ok(None)
            }
        }
    }

    /// The namespace of a command, and the index of that namespace.
    #[inline]
    pub(super) fn namespace(&self, sqe: &Sqe) -> Result<(usize, &Namespace), Status> {
        self.namespaces.find(sqe.nsid()).ok_or(Status::INVALID_NAMESPACE.with_dnr())
    }

    /// Checks the namespace of a block command, and that its blocks exist. Returns the namespace's
    /// index.
    #[inline]
    pub(super) fn check_blocks(&self, sqe: &Sqe) -> Result<usize, Status> {
        let (index, namespace) = self.namespace(sqe)?;
        match sqe.slba().checked_add(u64::from(sqe.nlb())) {
            Some(end) if end <= namespace.config.blocks => Ok(index),
            _ => Err(Status::LBA_OUT_OF_RANGE.with_dnr()),
        }
    }

    /// Reports a problem of this connection to the operator of the target.
    pub(super) fn report_problem(&self, why: &str, env: &mut E) {
        if let Some(queue) = &self.queue {
            env.log(Event::Trouble {
                peer: &self.peer,
                hostnqn: &queue.hostnqn,
                cntlid: queue.cntlid,
                qid: queue.qid,
                why,
            });
        }
    }

    /// Reports to the operator that a PDU of the host had a wrong digest.
    #[cold]
    pub(super) fn report_digest_error(&self, digest: WrongDigest, env: &mut E) {
        let queue = self.queue.as_ref();
        env.log(Event::DigestError {
            peer: &self.peer,
            hostnqn: queue.map_or("", |queue| &queue.hostnqn),
            cntlid: queue.map(|queue| queue.cntlid),
            qid: queue.map_or(0, |queue| queue.qid),
            digest,
        });
    }

    /// Reports to the operator that a request was refused. `what` is the first part of the message,
    /// such as "claim refused".
    pub(super) fn report_refusal(&self, what: &str, status: Status, env: &mut E) {
        let meaning = wire::status::meaning(status).map_or_else(
            || alloc::format!("{what}: {status}"),
            |meaning| alloc::format!("{what}: {meaning}"),
        );
        self.report_problem(&meaning, env);
    }
}

/// Whether dwords 10 and 11 of an I/O command are its first block.
const fn has_blocks(sqe: &Sqe) -> bool {
    matches!(
        sqe.opcode(),
        opcode::READ
            | opcode::WRITE
            | opcode::COMPARE
            | opcode::WRITE_ZEROES
            | opcode::VERIFY
            | opcode::COPY
    )
}

/// Checks that a command has a buffer for a page of `len` bytes.
///
/// # Errors
/// The status with which the command fails.
pub(super) fn check_page_buffer(sqe: &Sqe, len: usize) -> Result<(), Status> {
    match sqe.sgl() {
        Ok(Sgl::Transport { len: space }) if space as usize >= len => Ok(()),
        Ok(Sgl::Transport { .. }) => Err(Status::SGL_LENGTH_INVALID.with_dnr()),
        Ok(Sgl::InCapsule { .. }) => Err(Status::SGL_TYPE_INVALID.with_dnr()),
        Err(error) => Err(error.status()),
    }
}

/// Whether the data of a command, `data_len` bytes, is in its capsule. If not, the target must
/// request the data by R2T. `data` is what the capsule has beside the command.
///
/// # Errors
/// The command's SGL describes neither case.
#[inline]
pub(super) fn is_in_capsule(sqe: &Sqe, data_len: u32, data: &[u8]) -> Result<bool, Status> {
    match sqe.sgl() {
        Ok(Sgl::InCapsule { offset, len }) => {
            if offset != 0 {
                Err(Status::SGL_OFFSET_INVALID.with_dnr())
            } else if len != data_len || data.len() != data_len as usize {
                Err(Status::SGL_LENGTH_INVALID.with_dnr())
            } else {
                Ok(true)
            }
        }
        Ok(Sgl::Transport { len }) if len == data_len && data.is_empty() => Ok(false),
        Ok(Sgl::Transport { .. }) => Err(Status::SGL_LENGTH_INVALID.with_dnr()),
        Err(error) => Err(error.status()),
    }
}

/// The status for a command of an owner that another owner has replaced (trap T8).
#[cold]
pub(super) fn fenced_owner() -> Status {
    probe::count_rare(Rare::FencedOwner);
    wire::status::STALE_GENERATION.with_dnr()
}

/// Calls `change` with the shared state of all connections. Then wakes each connection for which
/// `change` has left a notice.
pub(super) fn update_shared<E: TargetEnv, T>(
    env: &mut E,
    change: impl FnOnce(&mut Shared<E::Region>) -> T,
) -> T {
    let (result, conns_to_wake) = env.with_shared(|shared| {
        let result = change(shared);
        (result, shared.take_conns_to_wake())
    });
    for conn in conns_to_wake {
        env.notify(conn);
    }
    result
}
