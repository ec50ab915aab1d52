//! The asynchronous events of one controller (Base §5.2): what has changed that its host has not been
//! informed of, and what the host has been informed of and has not read yet.
//!
//! ```text
//! change ─→ noted ─→ reported by an event request ─→ log page read ─→ the next change is reported
//! ```
//!
//! An event is reported once, until the host reads its log page without *Retain Asynchronous Event*.
//! Without an event request it waits for the next one.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use riopipe_nvme::feature::event;
use riopipe_nvme::log_page;
use riopipe_nvme::reservation::{self, NOTIFICATION_LEN, Notification as Reservation};

use super::limits::RESERVATION_NOTIFICATIONS;

/// One kind of event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Notification {
    /// Nothing has changed since the log page was read.
    #[default]
    Idle,
    /// A change is to be reported.
    Pending,
    /// A change was reported, and the log page was not read yet.
    Reported,
}

impl Notification {
    /// Notes a change. It is not reported if the host has not enabled that.
    fn note(&mut self, is_enabled: bool) {
        if is_enabled && *self == Self::Idle {
            *self = Self::Pending;
        }
    }

    /// Takes the change that is to be reported now.
    fn take(&mut self) -> bool {
        let is_pending = *self == Self::Pending;
        if is_pending {
            *self = Self::Reported;
        }
        is_pending
    }
}

/// The events of a controller.
#[derive(Debug, Default)]
pub struct Events {
    /// The events that the host has enabled (Asynchronous Event Configuration).
    config: u32,
    /// The namespaces that have changed since the host read their list.
    changed_namespaces: BTreeSet<u32>,
    namespaces: Notification,
    ana: Notification,
    discovery: Notification,
    /// The notifications about reservations that the host has not read, the oldest first: number,
    /// change, namespace.
    reservations: VecDeque<(u64, Reservation, u32)>,
    /// How many of them there have been.
    reservation_count: u64,
    /// By namespace id: the changes of which the host is not informed.
    reservation_masks: BTreeMap<u32, u32>,
    reservation: Notification,
}

impl Events {
    /// Sets the events that the host has enabled.
    pub(super) fn configure(&mut self, config: u32) {
        self.config = config;
    }

    /// Notes that a namespace was added, removed, or has changed.
    pub(super) fn namespace_changed(&mut self, nsid: u32) {
        self.changed_namespaces.insert(nsid);
        self.namespaces.note(self.config & event::CONFIG_NAMESPACE != 0);
    }

    /// Notes that the ANA state of a group has changed.
    pub(super) fn ana_changed(&mut self) {
        self.ana.note(self.config & event::CONFIG_ANA != 0);
    }

    /// Notes that the discovery log page has changed.
    pub(super) fn discovery_changed(&mut self) {
        self.discovery.note(self.config & event::CONFIG_DISCOVERY != 0);
    }

    /// Notes a change of reservations that concerns the host.
    pub(super) fn reservation_changed(&mut self, nsid: u32, change: Reservation) {
        if self.reservation_mask(nsid) & change.mask_bit() != 0 {
            return;
        }
        self.reservation_count += 1;
        // The numbers show the host that it has missed some.
        if self.reservations.len() == RESERVATION_NOTIFICATIONS {
            self.reservations.pop_front();
        }
        self.reservations.push_back((self.reservation_count, change, nsid));
        self.reservation.note(true);
    }

    /// The changes of reservations of which the host is not informed.
    pub(super) fn reservation_mask(&self, nsid: u32) -> u32 {
        self.reservation_masks.get(&nsid).copied().unwrap_or(0)
    }

    /// Sets the changes of reservations of which the host is not informed.
    pub(super) fn mask_reservations(&mut self, nsid: u32, mask: u32) {
        self.reservation_masks.insert(nsid, mask);
    }

    /// The log page with the oldest notification about reservations.
    pub(super) fn reservation_page(&self) -> [u8; NOTIFICATION_LEN] {
        let others = self.reservations.len().saturating_sub(1);
        reservation::notification_page(self.reservations.front().copied(), others)
    }

    /// The result of an event request for the next event; `None` if there is none.
    pub(super) fn next(&mut self) -> Option<u64> {
        if self.namespaces.take() {
            let info = event::NAMESPACE_CHANGED;
            Some(event::result(event::NOTICE, info, log_page::CHANGED_NAMESPACES))
        } else if self.ana.take() {
            Some(event::result(event::NOTICE, event::ANA_CHANGED, log_page::ANA))
        } else if self.discovery.take() {
            let info = event::DISCOVERY_CHANGED;
            Some(event::result(event::NOTICE, info, log_page::DISCOVERY))
        } else if self.reservation.take() {
            let info = event::RESERVATION_AVAILABLE;
            Some(event::result(event::COMMAND_SET, info, log_page::RESERVATION))
        } else {
            None
        }
    }

    /// The namespaces that have changed, in ascending order.
    pub(super) fn changed_namespaces(&self) -> Vec<u32> {
        self.changed_namespaces.iter().copied().collect()
    }

    /// Notes that the host has read a log page up to the offset `end`, and does not retain its event.
    /// A host may read a page in parts, and retains the event until the last one.
    pub(super) fn on_read(&mut self, lid: u8, end: u64) {
        match lid {
            log_page::CHANGED_NAMESPACES => {
                // A list of too many has only one element, which stands for all.
                let returned = match self.changed_namespaces.len() {
                    count if count <= log_page::CHANGED_NAMESPACES_MAX => (end / 4) as usize,
                    count => count,
                };
                let rest = self.changed_namespaces.iter().skip(returned).copied().collect();
                self.changed_namespaces = rest;
                self.namespaces = Notification::Idle;
                if !self.changed_namespaces.is_empty() {
                    self.namespaces.note(self.config & event::CONFIG_NAMESPACE != 0);
                }
            }
            log_page::ANA => self.ana = Notification::Idle,
            log_page::DISCOVERY => self.discovery = Notification::Idle,
            log_page::RESERVATION => {
                self.reservations.pop_front();
                self.reservation = Notification::Idle;
            }
            _ => {}
        }
    }
}
