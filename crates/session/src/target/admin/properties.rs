//! The properties of a controller: NVMe's registers, which a host reads and writes with Fabrics
//! commands (Base §3.1.4). By writing CC, a host enables, shuts down and resets the controller.

use riopipe_nvme::command::{Sqe, Status};
use riopipe_nvme::fabrics::{Cap, Cc, Csts, VERSION_2_0, property};

use super::{Admin, change_events};
use crate::target::context::{Context, update_shared};
use crate::target::env::TargetEnv;
use crate::target::events::Events;
use crate::target::limits::QUEUE_ENTRIES_MAX;
use crate::target::shared::Notice;

/// The value of CRTO (Controller Ready Timeouts): 500 ms for each of the two timeouts.
const READY_TIMEOUTS: u64 = 1 << 16 | 1;
/// CC.CSS: the NVM command set.
const CSS_NVM: u8 = 0b000;
/// CC.CSS: all command sets that the controller supports.
const CSS_ALL_SUPPORTED: u8 = 0b110;
/// CC.IOSQES: an entry of a submission queue has 2⁶ bytes.
const SQ_ENTRY_LOG2: u8 = 6;
/// CC.IOCQES: an entry of a completion queue has 2⁴ bytes.
const CQ_ENTRY_LOG2: u8 = 4;

impl Admin {
    /// Carries out Property Get. Returns the status, and the value of the property.
    pub(in crate::target) fn property_get(&self, sqe: &Sqe) -> (Status, u64) {
        let value = match (sqe.property_offset(), sqe.property_size()) {
            (property::CAP, Some(8)) => capabilities().value(),
            (property::VS, Some(4)) => u64::from(VERSION_2_0),
            (property::CC, Some(4)) => u64::from(self.cc.0),
            (property::CSTS, Some(4)) => u64::from(self.csts.0),
            (property::CRTO, Some(4)) => READY_TIMEOUTS,
            _ => return (Status::INVALID_FIELD.with_dnr(), 0),
        };
        (Status::SUCCESS, value)
    }

    /// Carries out Property Set. A host may set only CC (Controller Configuration).
    pub(in crate::target) fn property_set<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
    ) -> Status {
        let Some(queue) = &context.queue else {
            return Status::INVALID_FIELD.with_dnr();
        };
        if (sqe.property_offset(), sqe.property_size()) != (property::CC, Some(4)) {
            return Status::INVALID_FIELD.with_dnr();
        }
        let (old, new) = (self.cc, Cc(sqe.property_value() as u32));
        self.cc = new;
        let cntlid = queue.cntlid;
        if new.enabled() && !old.enabled() {
            if !self.supports(new) {
                self.csts.0 |= Csts::FATAL;
                context.report_problem(
                    "the host enabled the controller with settings it does not have",
                    env,
                );
                return Status::SUCCESS;
            }
            self.csts = Csts(Csts::READY);
            update_shared(env, |shared| {
                if let Some(controller) = shared.controller_mut(cntlid) {
                    controller.enabled = true;
                }
            });
        }
        if new.shutdown() != 0 && old.shutdown() == 0 {
            // There is nothing to write back: a completed write is at the drive, and the host sends
            // a FLUSH to make it durable.
            disable(cntlid, env);
            self.csts = self.csts.with_shutdown_done();
        } else if !new.enabled() && old.enabled() {
            disable(cntlid, env);
            change_events(context, env, |events| *events = Events::default());
            self.csts = Csts(0);
            self.reset();
        }
        Status::SUCCESS
    }
}

impl Admin {
    /// Whether the controller can be enabled with this configuration: with pages of 4 KiB, a
    /// command set that it has, and queue entries of NVMe's sizes.
    fn supports(&self, cc: Cc) -> bool {
        let has_page_size = cc.mps() == 0;
        let has_command_set = matches!(cc.css(), CSS_NVM | CSS_ALL_SUPPORTED);
        let has_entry_sizes = (cc.iosqes(), cc.iocqes()) == (SQ_ENTRY_LOG2, CQ_ENTRY_LOG2);
        has_page_size && has_command_set && (self.is_discovery || has_entry_sizes)
    }
}

/// Disables a controller and closes its I/O queues.
fn disable<E: TargetEnv>(cntlid: u16, env: &mut E) {
    update_shared(env, |shared| {
        let Some(controller) = shared.controller_mut(cntlid) else {
            return;
        };
        controller.enabled = false;
        let queues: alloc::vec::Vec<_> = controller.queues.values().copied().collect();
        for queue in queues {
            shared.leave_notice(queue, Notice::Close("its controller was disabled"));
        }
    });
}

/// The property Controller Capabilities: the NVM command set, 4 KiB pages, ready within 500 ms.
const fn capabilities() -> Cap {
    Cap { mqes: QUEUE_ENTRIES_MAX - 1, timeout: 1, mpsmin: 0, css: 1 }
}
