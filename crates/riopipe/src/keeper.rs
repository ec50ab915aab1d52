//! One thread for each target of an open volume: it keeps the association alive, sets it up again
//! when it was lost (P7), and makes the connections that streams ask for, so that no stream ever
//! waits for a connection to be made.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use riopipe_net::{Interest, Poller, Socket, Waker, now_ns};
use riopipe_nvme::command::Status;
use riopipe_order::attribute::StreamId;
use riopipe_order::engine::Cause;
use riopipe_session::initiator::known::{Changed, KnownTarget};
use riopipe_session::initiator::queue_pair::QueuePair;
use riopipe_session::wire::{self, Claim};

use crate::addr::MemberAddr;
use crate::association::{Association, CallData, open_socket};
use crate::drive_io::{Drives, read_label};
use crate::error::CallError;
use crate::housekeeper::Housekeeper;
use crate::identity::ConnectOptions;
use crate::lanes::{Mail, Side};
use crate::piece::Piece;
use crate::shared::lock;
use crate::stream::nanos;

/// How long to wait before trying again, at first and at most, ns.
const BACK_OFF_NS: u64 = 10_000_000;
const BACK_OFF_NS_MAX: u64 = 1_000_000_000;
/// The poller's name of the admin connection.
const ADMIN: u64 = 0;

/// One target of an open volume.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) name: String,
    pub(crate) addr: MemberAddr,
    pub(crate) association: Mutex<Association>,
    /// Counts the ends and beginnings of the association: a connection that was begun when it was
    /// another must not be used. A target counts its controllers anew in each of its lives, so a
    /// late Connect may get into the next association, before anybody has looked whether the target
    /// is still what it was (T27).
    pub(crate) association_number: AtomicU64,
    pub(crate) queues_granted: u16,
    /// How the volume is taken here again by the same owner; `None` where the target doesn't speak
    /// the extension.
    pub(crate) claim: Option<Claim>,
    /// What must be found here again.
    pub(crate) known: KnownTarget,
    pub(crate) desk: Desk,
}

/// What streams and the volume leave for the keeper, and what it tells them.
#[derive(Debug)]
pub(crate) struct Desk {
    waker: Waker,
    state: Mutex<DeskState>,
}

#[derive(Debug, Default)]
struct DeskState {
    stop: bool,
    wanted: Vec<Wanted>,
    absence: Option<Absence>,
}

/// Why a target is away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Absence {
    pub(crate) since: u64,
    pub(crate) why: String,
    /// It will not be tried again.
    pub(crate) for_good: bool,
}

/// A stream that wants a connection.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) stream: StreamId,
    pub(crate) side: Arc<Side>,
    pub(crate) qid: u16,
    pub(crate) depth: usize,
    /// How often it has had one in vain.
    pub(crate) attempts: u32,
}

impl Desk {
    pub(crate) fn new(poller: &Poller) -> Self {
        Self { waker: poller.waker(), state: Mutex::default() }
    }

    /// Asks for a connection.
    pub(crate) fn want(&self, wanted: Wanted) {
        lock(&self.state).wanted.push(wanted);
        self.waker.wake();
    }

    /// The volume is gone.
    pub(crate) fn stop(&self) {
        lock(&self.state).stop = true;
        self.waker.wake();
    }

    /// Why the target is away, if it is.
    pub(crate) fn absence(&self) -> Option<Absence> {
        lock(&self.state).absence.clone()
    }

    fn is_stopped(&self) -> bool {
        lock(&self.state).stop
    }
}

/// Why a target could not be taken again.
#[derive(Debug)]
enum Again {
    /// It may work later.
    Later(String),
    /// It will not.
    Refused(String, Cause),
}

pub(crate) struct Keeper {
    pub(crate) server: Arc<Server>,
    /// Which of the volume's servers it is.
    pub(crate) index: usize,
    pub(crate) volume: String,
    pub(crate) connect: ConnectOptions,
    pub(crate) streams: Arc<Housekeeper>,
    pub(crate) poller: Poller,
    /// Requests for connections, each with the time before which it is not served.
    pub(crate) waiting: Vec<(u64, Wanted)>,
}

impl Keeper {
    pub(crate) fn start(self) {
        let builder = std::thread::Builder::new().name("riopipe-keeper".into());
        let (volume, target) = (self.volume.clone(), self.server.name.clone());
        if let Err(error) = builder.spawn(move || self.run()) {
            tracing::error!(%volume, %target, %error, "no thread to keep the target's connection alive");
        }
    }

    fn run(mut self) {
        self.watch();
        let mut events = Vec::new();
        let mut next = self.next();
        loop {
            let due = self.waiting.iter().map(|(at, _)| *at).min().map_or(next, |at| at.min(next));
            let sleep = Duration::from_nanos(due.saturating_sub(now_ns()));
            if let Err(error) = self.poller.wait(&mut events, Some(sleep)) {
                tracing::error!(%error, "the keeper cannot wait for events");
                std::thread::sleep(Duration::from_millis(100));
            }
            if !self.read_desk() {
                return;
            }
            let now = now_ns();
            // Nobody but us asks anything there: what comes by itself is the end, most likely.
            let heard = events.iter().any(|event| event.token == ADMIN);
            let served = self.waiting.iter().any(|(at, _)| *at <= now);
            if !heard && !served && now < next {
                continue;
            }
            if let Err(error) = self.ping()
                && !self.come_back(&error)
            {
                return;
            }
            next = self.next();
            self.serve();
        }
    }

    /// Takes in what lies on the desk; false when the volume is gone.
    fn read_desk(&mut self) -> bool {
        let mut state = lock(&self.server.desk.state);
        let now = now_ns();
        let wanted = state.wanted.drain(..).map(|wanted| {
            let rest = if wanted.attempts == 0 { 0 } else { back_off(wanted.attempts) };
            (now.saturating_add(rest), wanted)
        });
        self.waiting.extend(wanted);
        !state.stop
    }

    fn watch(&self) {
        let association = lock(&self.server.association);
        let admin = association.admin();
        let (socket, _) = admin.waits_for();
        if let Err(error) = self.poller.add(socket, ADMIN, Interest::Read) {
            tracing::error!(%error, "cannot watch the admin connection");
        }
    }

    /// When the target is to be told next.
    fn next(&self) -> u64 {
        lock(&self.server.association).admin().keep_alive_next().unwrap_or(u64::MAX)
    }

    /// Tells the target that the owner lives.
    fn ping(&self) -> Result<(), CallError> {
        let told = lock(&self.server.association).admin().tell();
        match told {
            Ok(_) => Ok(()),
            // A target that hangs may come to itself; without replay there is nothing to gain.
            Err(CallError::TimedOut(_) | CallError::Behind(_))
                if self.connect.loss_timeout.is_zero() =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// The association is lost: sets it up again, however long that takes. False when there is
    /// nothing left to do for this thread.
    fn come_back(&mut self, error: &CallError) -> bool {
        let (volume, target) = (self.volume.clone(), self.server.name.clone());
        let since = now_ns();
        let absence = Absence { since, why: error.to_string(), for_good: false };
        lock(&self.server.desk.state).absence = Some(absence.clone());
        self.association_changes();
        lock(&self.server.association).admin().hang_up();
        if self.connect.loss_timeout.is_zero() {
            tracing::warn!(
                %volume, %target, %error,
                "lost the target; no time is given for it to come back"
            );
            self.refuse(Absence { for_good: true, ..absence }, Cause::Disconnected);
            return false;
        }
        tracing::warn!(
            %volume, %target, %error, loss_timeout = ?self.connect.loss_timeout,
            "lost the target; trying to reach it again"
        );
        let mut given_up = false;
        for attempt in 1.. {
            if !self.sleep(back_off(attempt)) {
                return false;
            }
            let away = now_ns().saturating_sub(since);
            match self.attach_again() {
                Ok(association) => {
                    // Before any connection of the new one is handed out.
                    self.association_changes();
                    *lock(&self.server.association) = association;
                    lock(&self.server.desk.state).absence = None;
                    self.watch();
                    tracing::info!(
                        %volume, %target, after_ms = away / 1_000_000, attempts = attempt,
                        "the target is back"
                    );
                    return true;
                }
                Err(Again::Refused(why, cause)) => {
                    tracing::error!(%volume, %target, %why, "the target will not have this owner back");
                    self.refuse(Absence { since, why, for_good: true }, cause);
                    return false;
                }
                Err(Again::Later(why)) => {
                    tracing::debug!(%volume, %target, attempt, %why, "the target is still away");
                    let absence = Absence { since, why, for_good: false };
                    lock(&self.server.desk.state).absence = Some(absence);
                }
            }
            if !given_up && away >= nanos(self.connect.loss_timeout) {
                given_up = true;
                tracing::error!(
                    %volume, %target, away_ms = away / 1_000_000,
                    "given up: the streams fail; when the target comes back they can be reopened"
                );
            }
        }
        false
    }

    /// The association has ended, or there is another: tells every stream. One that is just being
    /// opened sees it by the number.
    fn association_changes(&self) {
        self.server.association_number.fetch_add(1, Ordering::SeqCst);
        for charge in self.streams.streams() {
            charge.side.post(Mail::Ended { server: self.index });
        }
    }

    /// Sleeps; false when the volume is gone meanwhile.
    fn sleep(&mut self, ns: u64) -> bool {
        let until = now_ns().saturating_add(ns);
        let mut events = Vec::new();
        loop {
            if !self.read_desk() {
                return false;
            }
            let left = until.saturating_sub(now_ns());
            if left == 0 {
                return true;
            }
            // Only a lack of memory makes this fail; then it is tried again.
            let _ = self.poller.wait(&mut events, Some(Duration::from_nanos(left)));
        }
    }

    /// Tells every stream that the target is gone for good.
    fn refuse(&mut self, absence: Absence, cause: Cause) {
        lock(&self.server.desk.state).absence = Some(absence);
        for charge in self.streams.streams() {
            charge.side.post(Mail::GiveUp { server: self.index, cause });
        }
    }

    fn attach_again(&self) -> Result<Association, Again> {
        let later = |error: &dyn std::error::Error| Again::Later(error.to_string());
        let association =
            Association::attach(&self.server.addr, &self.connect).map_err(|e| later(&e))?;
        self.recognise(&association)?;
        if self.server.desk.is_stopped() {
            return Err(Again::Later("the volume is being closed".into()));
        }
        if let Some(claim) = &self.server.claim {
            let data = claim.encode();
            let claimed = association.admin().call(wire::claim_command(), CallData::Bytes(&data));
            if let Err(error) = claimed {
                return Err(match &error {
                    CallError::Status(status) if is_final(*status) => {
                        Again::Refused(error.to_string(), Cause::Status(status.code()))
                    }
                    _ => later(&error),
                });
            }
        }
        Ok(association)
    }

    /// Looks whether the target and its drives are still what the volume has found (T19, T27).
    fn recognise(&self, association: &Association) -> Result<(), Again> {
        let known = &self.server.known;
        let refused = |changed: Changed| {
            let cause = match changed {
                Changed::Overtaken(_) => Cause::Status(wire::status::STALE_GENERATION.code()),
                _ => Cause::Changed,
            };
            Again::Refused(changed.to_string(), cause)
        };
        let later = |error: &dyn std::error::Error| Again::Later(error.to_string());
        known.check(&association.controller).map_err(refused)?;
        let mut drives = Drives::open(association, &self.connect).map_err(|e| later(&e))?;
        for nsid in known.namespaces() {
            let label = read_label(drives.queue(), nsid).map_err(|e| later(&e))?;
            known.check_label(nsid, &label).map_err(refused)?;
        }
        Ok(())
    }

    /// Makes the connections that are due.
    fn serve(&mut self) {
        let now = now_ns();
        for (at, wanted) in std::mem::take(&mut self.waiting) {
            if at > now {
                self.waiting.push((at, wanted));
                continue;
            }
            match self.connect(&wanted) {
                Ok((socket, queue)) => {
                    let server = self.index;
                    wanted.side.post(Mail::Link { server, socket, queue: Box::new(queue) });
                }
                Err(error) => {
                    tracing::debug!(
                        volume = %self.volume, stream = %wanted.stream, target = %self.server.name,
                        %error, "no connection for a stream"
                    );
                    let attempts = wanted.attempts + 1;
                    let at = now_ns().saturating_add(back_off(attempts));
                    self.waiting.push((at, Wanted { attempts, ..wanted }));
                }
            }
        }
    }

    fn connect(
        &self,
        wanted: &Wanted,
    ) -> Result<(Socket, QueuePair<Piece>), riopipe_net::ConnectError> {
        let socket = open_socket(&self.server.addr, &self.connect)?;
        let queue = lock(&self.server.association).io_queue(wanted.qid, wanted.depth);
        Ok((socket, queue))
    }
}

/// Whether a claim that was refused so will always be.
fn is_final(status: Status) -> bool {
    let passing = [wire::status::STREAM_BUSY, wire::status::LOG_FAILED];
    !passing.iter().any(|one| status.is(*one))
        && (status.dnr() || wire::status::meaning(status).is_some())
}

/// How long to wait before attempt `attempts` + 1, ns: doubled each time, and not quite the same
/// for everybody.
fn back_off(attempts: u32) -> u64 {
    let base = BACK_OFF_NS.saturating_mul(1 << attempts.saturating_sub(1).min(20));
    let base = base.min(BACK_OFF_NS_MAX);
    // Up to a quarter less: the low bits of the clock differ from process to process.
    base - base / 4 * (now_ns() / 64 % 1024) / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_and_are_bounded() {
        for attempts in 1..100 {
            let wait = back_off(attempts);
            assert!((BACK_OFF_NS * 3 / 4..=BACK_OFF_NS_MAX).contains(&wait), "{attempts}: {wait}");
        }
        assert!(back_off(50) > 70 * BACK_OFF_NS);
    }

    #[test]
    fn t8_who_has_been_overtaken_does_not_try_again() {
        assert!(is_final(wire::status::STALE_GENERATION.with_dnr()));
        assert!(is_final(wire::status::OWNED));
        assert!(!is_final(wire::status::STREAM_BUSY));
        assert!(!is_final(Status::INTERNAL));
    }
}
