//! The set-up of a queue pair: ICReq, ICResp, Connect.

use riopipe_nvme::auth::{CONNECT_ASCR, CONNECT_ATR};
use riopipe_nvme::command::{Cqe, Sqe, Status};
use riopipe_nvme::fabrics::{Connect, ConnectData, DISCOVERY_NQN};
use riopipe_nvme::pdu::{ADMIN_IN_CAPSULE, IcReq, IcResp, PduError};

use super::{Data, Event, QpConfig, QueuePair, QueueState, SessionError};
use crate::outbox::Outbox;

/// The offset of the digest flags (DGST) in an ICResp PDU.
const ICRESP_DGST_OFFSET: u32 = 11;

impl<P: AsRef<[u8]> + Clone, T: Copy> QueuePair<P, T> {
    /// Sends ICReq. Connect follows when the ICResp has arrived. [`Event::Ready`] reports that the
    /// queue exists.
    pub fn start(&mut self, outbox: &mut Outbox<P>) {
        if self.state != QueueState::Idle {
            return;
        }
        self.state = QueueState::Initializing;
        let icreq = IcReq {
            pfv: 0,
            hpda: 0,
            header_digest: self.config.header_digest,
            data_digest: self.config.data_digest,
            // The field counts from 0: 0 allows one R2T.
            maxr2t: self.config.maxr2t.max(1) - 1,
        };
        outbox.push_bytes(|bytes| icreq.encode(bytes));
    }

    /// Handles the ICResp: sets the parameters of the connection, and sends Connect.
    pub(super) fn on_icresp(
        &mut self,
        icresp: &IcResp,
        outbox: &mut Outbox<P>,
    ) -> Result<(), SessionError> {
        if self.state != QueueState::Initializing {
            return Err(PduError::sequence("an ICResp that was not asked for").into());
        }
        self.check_digests(icresp)?;
        self.rx.connected = true;
        self.rx.header_digest = icresp.header_digest;
        self.rx.data_digest = icresp.data_digest;
        self.tx.header_digest = icresp.header_digest;
        self.tx.data_digest = icresp.data_digest;
        // CPDA counts units of 4 bytes from 0.
        self.tx.align = (u32::from(icresp.cpda) + 1) * 4;
        self.maxh2cdata = icresp.maxh2cdata;
        self.state = QueueState::Connecting;
        self.send_connect(outbox);
        Ok(())
    }

    /// Checks that the target grants exactly the digests that the host has requested.
    fn check_digests(&self, icresp: &IcResp) -> Result<(), SessionError> {
        if icresp.header_digest && !self.config.header_digest
            || icresp.data_digest && !self.config.data_digest
        {
            let error = PduError::header(ICRESP_DGST_OFFSET, "digests that were not asked for");
            return Err(error.into());
        }
        if self.config.header_digest && !icresp.header_digest {
            return Err(SessionError::NoDigests("header"));
        }
        if self.config.data_digest && !icresp.data_digest {
            return Err(SessionError::NoDigests("data"));
        }
        Ok(())
    }

    /// Sends the Fabrics Connect command, which creates the queue.
    fn send_connect(&mut self, outbox: &mut Outbox<P>) {
        let sqe = Sqe::connect(&Connect {
            recfmt: 0,
            qid: self.config.qid,
            // The field counts from 0. The queue has one entry more than slots.
            sqsize: self.slots.len() as u16,
            // No SQ flow control is needed, because fewer commands are in flight than the queue has
            // entries.
            cattr: 0,
            kato_ms: self.config.kato_ms,
        });
        let connect_data = ConnectData {
            hostid: self.config.hostid,
            cntlid: self.config.cntlid,
            subnqn: self.config.subnqn.clone(),
            hostnqn: self.config.hostnqn.clone(),
        }
        .encode();
        // The data of Connect is always in the capsule (Base §6.3), also if I/O commands may carry
        // less.
        let io_limit = core::mem::replace(&mut self.in_capsule_max, ADMIN_IN_CAPSULE);
        let sent = self.send_command(sqe, None, Data::Bytes(&connect_data), outbox);
        self.in_capsule_max = io_limit;
        debug_assert!(sent.is_ok(), "the queue was empty");
    }

    /// Handles the completion of a command that is not the caller's: Connect, or one of the
    /// authentication.
    #[cold]
    pub(super) fn on_setup_completion(
        &mut self,
        cqe: &Cqe,
        outbox: &mut Outbox<P>,
        on_event: &mut impl FnMut(Event<'_, T>),
    ) -> Result<(), SessionError> {
        match self.state {
            QueueState::Authenticating => self.on_auth_completion(cqe, outbox, on_event),
            _ => self.on_connect_completion(cqe, outbox, on_event),
        }
    }

    /// Handles the completion of Connect.
    fn on_connect_completion(
        &mut self,
        cqe: &Cqe,
        outbox: &mut Outbox<P>,
        on_event: &mut impl FnMut(Event<'_, T>),
    ) -> Result<(), SessionError> {
        // For an I/O queue the status reports a controller of another host.
        if cqe.status().is(Status::CONNECT_INVALID_HOST) && self.config.qid == 0 {
            let QpConfig { hostnqn, subnqn, .. } = &self.config;
            let (hostnqn, subnqn) = (hostnqn.clone(), subnqn.clone());
            return Err(SessionError::HostNotAllowed { hostnqn, subnqn });
        }
        if !cqe.status().is_ok() {
            return Err(SessionError::Refused {
                qid: self.config.qid,
                subnqn: self.config.subnqn.clone(),
                status: cqe.status(),
                result: cqe.result(),
            });
        }
        // CNTLID is in bits 15:0 of the result.
        let cntlid = cqe.result() as u16;
        if cqe.result() & CONNECT_ASCR != 0 {
            return Err(SessionError::SecureChannel { subnqn: self.config.subnqn.clone() });
        }
        if cqe.result() & CONNECT_ATR != 0 {
            let Some(secrets) = self.config.secrets.clone() else {
                return Err(SessionError::Authentication {
                    hostnqn: self.config.hostnqn.clone(),
                    subnqn: self.config.subnqn.clone(),
                });
            };
            self.authenticate(&secrets, cntlid, outbox);
            return Ok(());
        }
        // A host that wants proof of the target's identity does not go on without.
        if self.config.secrets.as_ref().is_some_and(|secrets| secrets.controller.is_some())
            && self.config.subnqn != DISCOVERY_NQN
        {
            return Err(SessionError::NoProof { subnqn: self.config.subnqn.clone() });
        }
        self.cntlid = cntlid;
        self.state = QueueState::Ready;
        on_event(Event::Ready { cntlid: self.cntlid });
        Ok(())
    }
}
