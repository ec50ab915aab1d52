//! Asynchronous events (Base §5.2): the notice that namespaces have changed, with the Changed
//! Namespace List (Base §5.16.1.5), and the event that the subsystem begins to shut down.

use alloc::vec::Vec;

use riopipe_nvme::command::Status;
use riopipe_nvme::feature::event;
use riopipe_nvme::log_page;

use super::Admin;
use crate::outbox::Outbox;
use crate::target::context::Context;
use crate::target::env::TargetEnv;

/// The changes of namespaces that the host has not read.
#[derive(Debug, Default)]
pub(super) struct NamespaceEvents {
    /// The ids of the namespaces, in ascending order.
    changed_nsids: Vec<u32>,
    /// The host has got an event, and no other until it has read the list.
    is_masked: bool,
}

impl NamespaceEvents {
    /// Returns the Changed Namespace List. With `retain`, the event is still masked, and the list
    /// stays.
    pub(super) fn read(&mut self, retain: bool) -> [u8; 4096] {
        let page = log_page::changed_namespaces(&self.changed_nsids);
        if !retain {
            self.changed_nsids.clear();
            self.is_masked = false;
        }
        page
    }
}

impl Admin {
    /// Notes that the namespaces with these ids have come, gone or changed.
    pub(in crate::target) fn on_namespaces_changed<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        nsids: &[u32],
        outbox: &mut Outbox<E::Buf>,
    ) {
        if self.is_discovery {
            return;
        }
        let changed = &mut self.namespace_events.changed_nsids;
        for nsid in nsids {
            if let Err(place) = changed.binary_search(nsid) {
                changed.insert(place, *nsid);
            }
        }
        self.send_event(context, outbox);
    }

    /// Notes that the target is being drained, which a host sees as a normal shutdown of the NVM
    /// subsystem (Base §3.6.3): an event, and CSTS.
    pub(in crate::target) fn on_draining<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        outbox: &mut Outbox<E::Buf>,
    ) {
        if self.is_discovery {
            return;
        }
        self.csts = self.csts.with_subsystem_shutdown();
        let is_enabled = self.event_config & event::CONFIG_NORMAL_SHUTDOWN != 0;
        if is_enabled && !self.event_request_cids.is_empty() && !context.is_closing {
            let cid = self.event_request_cids.remove(0);
            let result = event::result(event::IMMEDIATE, event::NORMAL_SHUTDOWN, 0);
            context.send_completion(cid, Status::SUCCESS, result, outbox);
        }
    }

    /// Sends an event that is due, if the host has enabled it and has a request for it.
    pub(super) fn send_event<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        outbox: &mut Outbox<E::Buf>,
    ) {
        let events = &mut self.namespace_events;
        let is_due = self.event_config & event::CONFIG_NAMESPACE != 0
            && !events.is_masked
            && !events.changed_nsids.is_empty();
        if !is_due || self.event_request_cids.is_empty() || context.is_closing {
            return;
        }
        events.is_masked = true;
        let cid = self.event_request_cids.remove(0);
        let page = log_page::CHANGED_NAMESPACES;
        let result = event::result(event::NOTICE, event::NAMESPACE_CHANGED, page);
        context.send_completion(cid, Status::SUCCESS, result, outbox);
    }
}
