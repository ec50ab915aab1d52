//! The connections of an association, as the program around it drives them.

use alloc::boxed::Box;

use riopipe_nvme::fabrics::DISCOVERY_NQN;
use riopipe_order::probe::{self, Plant};

use super::queues::DRIVES_COMMANDS;
use super::{
    Association, AssociationError, ConnectFailure, ConnectionEnd, ControlQueue, State, is_overdue,
};
use crate::initiator::attach::Attach;
use crate::initiator::discover::Discover;
use crate::initiator::endpoint::{ConnectionId, Endpoint};
use crate::initiator::queue_pair::{QpConfig, QueuePair};
use crate::outbox::Outbox;

impl<P: AsRef<[u8]> + Clone> Endpoint for Association<P> {
    type Piece = P;

    fn wants_connection(&self) -> Option<ConnectionId> {
        self.wanted_queue().map(ConnectionId::Control)
    }

    fn connected(&mut self, connection: ConnectionId, is_local: bool, now: u64) {
        let Some(queue) = self.queue_of(connection) else { return };
        let outbox = &mut self.outboxes[queue as usize];
        // It may hold bytes that were not sent on an earlier connection.
        outbox.clear();
        let deadline = now.saturating_add(self.config.answer_ns);
        match queue {
            ControlQueue::Discovery => {
                let config = self.config.admin_queue_config(DISCOVERY_NQN.into(), is_local);
                let mut discover = Box::new(Discover::new(QpConfig { kato_ms: 0, ..config }));
                discover.start(outbox);
                self.state = State::Discovering { discover, deadline };
            }
            ControlQueue::Admin => {
                let config = self.config.admin_queue_config(self.subnqn().into(), is_local);
                let mut attach = Box::new(Attach::new(config.clone(), self.config.io_queues));
                attach.start(&mut self.outboxes[queue as usize]);
                self.admin_config = Some(config);
                self.state = State::Attaching { attach, deadline };
            }
            ControlQueue::Drives => {
                let Some(queue_config) = self.io_queue(self.drives.qid(), DRIVES_COMMANDS) else {
                    return;
                };
                let pair = QueuePair::open(queue_config);
                self.drives.start(pair, deadline, &mut self.outboxes[queue as usize]);
            }
        }
    }

    fn connect_failed(&mut self, connection: ConnectionId, failure: ConnectFailure, _: u64) {
        match self.queue_of(connection) {
            Some(ControlQueue::Drives) => self.fail_drives_queue(failure.into()),
            Some(_) => self.end_with_error(failure.into()),
            None => {}
        }
    }

    fn is_open(&self, queue: ControlQueue) -> bool {
        match (queue, &self.state) {
            (ControlQueue::Discovery, State::Discovering { .. })
            | (ControlQueue::Admin, State::Attaching { .. } | State::Attached { .. }) => true,
            (ControlQueue::Drives, State::Attached { .. }) => self.drives.is_open(),
            _ => false,
        }
    }

    fn need(&self, queue: ControlQueue, buf: &[u8]) -> usize {
        match (queue, &self.state) {
            (ControlQueue::Discovery, State::Discovering { discover, .. }) => discover.need(buf),
            (ControlQueue::Admin, State::Attaching { attach, .. }) => attach.need(buf),
            (ControlQueue::Admin, State::Attached { admin, .. }) => admin.need(buf),
            (ControlQueue::Drives, _) => self.drives.need(buf),
            _ => 0,
        }
    }

    fn outbox(&mut self, queue: ControlQueue) -> &mut Outbox<P> {
        &mut self.outboxes[queue as usize]
    }

    fn received(&mut self, queue: ControlQueue, bytes: &[u8], now: u64) -> usize {
        if !bytes.is_empty() {
            self.note_received(now);
        }
        let received = match queue {
            ControlQueue::Discovery => self.receive_discovery(bytes, now),
            ControlQueue::Admin => self.receive_admin(bytes, now),
            ControlQueue::Drives => self.receive_drives(bytes, now),
        };
        match received {
            Ok(used) => used,
            Err(error) => {
                match queue {
                    ControlQueue::Drives => self.on_drives_queue_error(error, now),
                    ControlQueue::Discovery | ControlQueue::Admin => self.end_with_error(error),
                }
                bytes.len()
            }
        }
    }

    fn closed(&mut self, queue: ControlQueue, end: ConnectionEnd, now: u64) {
        if !self.is_open(queue) {
            return;
        }
        self.outboxes[queue as usize].clear();
        let error_of = |end| match end {
            ConnectionEnd::Closed => AssociationError::Closed,
            ConnectionEnd::Broken(why) => AssociationError::Broken(why),
        };
        match (queue, &self.state) {
            (ControlQueue::Drives, _) => self.fail_drives_queue(error_of(end)),
            (_, State::Attached { keep_alive, .. }) => {
                let loss = keep_alive.loss_at(now);
                // A target that drops the association closes the connection. It may also reset it,
                // so a missing Keep Alive explains a broken connection, too.
                let target_dropped_it = end == ConnectionEnd::Closed || loss.ran_out();
                let error =
                    if target_dropped_it { AssociationError::Dropped(loss) } else { error_of(end) };
                self.end_with_error(error);
            }
            (_, State::Attaching { attach, .. }) => {
                let cut_short = attach.unfinished_authentication().map(AssociationError::Session);
                self.end_with_error(cut_short.unwrap_or_else(|| error_of(end)));
            }
            _ => self.end_with_error(error_of(end)),
        }
    }

    fn timeout(&mut self, now: u64) {
        let answer_ns = self.config.answer_ns;
        let admin_answer_ns = self.admin_answer_ns();
        let overdue_ns = match &mut self.state {
            State::Discovering { discover, deadline } => {
                discover.tick(now, &mut self.outboxes[ControlQueue::Discovery as usize]);
                (now >= *deadline).then_some(answer_ns)
            }
            State::Attaching { attach, deadline } => {
                attach.tick(now, &mut self.outboxes[ControlQueue::Admin as usize]);
                (now >= *deadline).then_some(answer_ns)
            }
            State::Attached { admin, keep_alive } => {
                if keep_alive.is_due(now) {
                    keep_alive.record_sent(now);
                    self.commands_sent += 1;
                    let outbox = &mut self.outboxes[ControlQueue::Admin as usize];
                    admin.keep_alive(self.commands_sent, now, outbox);
                }
                if probe::is_bug_planted(Plant::P8KeepAliveUnanswered) {
                    admin.drop_keep_alives();
                }
                is_overdue(admin, admin_answer_ns, now).then_some(admin_answer_ns)
            }
            _ => None,
        };
        if let State::Attached { admin, .. } = &self.state
            && self.silence_ends(admin).is_some_and(|end| now >= end)
        {
            let silence_ns = now.saturating_sub(self.last_received);
            return self.end_with_error(AssociationError::Silent(silence_ns));
        }
        if let Some(limit_ns) = overdue_ns {
            return self.end_with_error(AssociationError::TimedOut(limit_ns));
        }
        if self.drives.check_time(answer_ns, now) {
            self.fail_drives_queue(AssociationError::TimedOut(answer_ns));
        }
    }

    fn deadline(&self) -> Option<u64> {
        let admin_deadline = match &self.state {
            State::Discovering { discover, deadline } => {
                Some(discover.next_deadline().map_or(*deadline, |at| at.min(*deadline)))
            }
            State::Attaching { attach, deadline } => {
                Some(attach.next_deadline().map_or(*deadline, |at| at.min(*deadline)))
            }
            State::Attached { admin, keep_alive } => {
                let answer_ns = self.admin_answer_ns();
                let answer_due = admin.stalled_since().map(|since| since.saturating_add(answer_ns));
                let silence_ends = self.silence_ends(admin);
                [keep_alive.next_due(), answer_due, silence_ends].into_iter().flatten().min()
            }
            _ => None,
        };
        let drives_deadline = self.drives.deadline(self.config.answer_ns);
        [admin_deadline, drives_deadline].into_iter().flatten().min()
    }
}
