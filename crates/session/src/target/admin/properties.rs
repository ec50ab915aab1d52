//! A controller's properties: its capabilities, and whether it is enabled (Base §3.1.4).

use riopipe_nvme::command::{Sqe, Status};
use riopipe_nvme::fabrics::{Cap, Cc, Csts, VERSION_2_0, property};

use super::Admin;
use crate::target::context::{Context, update_shared};
use crate::target::env::TargetEnv;
use crate::target::limits::QUEUE_ENTRIES_MAX;
use crate::target::shared::Notice;

impl Admin {
    /// Property Get.
    pub(in crate::target) fn property_get(&self, sqe: &Sqe) -> (Status, u64) {
        let value = match (sqe.property_offset(), sqe.property_size()) {
            (property::CAP, Some(8)) => capabilities().value(),
            (property::VS, Some(4)) => u64::from(VERSION_2_0),
            (property::CC, Some(4)) => u64::from(self.cc.0),
            (property::CSTS, Some(4)) => u64::from(self.csts.0),
            (property::CRTO, Some(4)) => 1 << 16 | 1,
            _ => return (Status::INVALID_FIELD.with_dnr(), 0),
        };
        (Status::SUCCESS, value)
    }

    /// Property Set.
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
            let io = self.discovery || (new.iosqes(), new.iocqes()) == (6, 4);
            // Command set: NVM (000b) or all that are supported (110b).
            if new.mps() != 0 || !matches!(new.css(), 0 | 6) || !io {
                self.csts.0 |= Csts::FATAL;
                context.report_problem(
                    "the host enabled the controller with settings it does not have",
                    env,
                );
                return Status::SUCCESS;
            }
            self.csts = Csts(Csts::READY);
            update_shared(env, |shared| {
                if let Some(c) = shared.controller_mut(cntlid) {
                    c.enabled = true;
                }
            });
        }
        if new.shutdown() != 0 && old.shutdown() == 0 {
            // The controller holds nothing back. A completed write is at the drives, and a host
            // flushes to make it durable.
            disable(cntlid, env);
            self.csts.0 |= Csts::SHUTDOWN_DONE;
        } else if !new.enabled() && old.enabled() {
            disable(cntlid, env);
            self.csts = Csts(0);
            self.reset();
        }
        Status::SUCCESS
    }
}

/// Ends a controller's I/O queues.
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

/// Controller Capabilities: the NVM command set, 4 KiB pages, ready within 500 ms.
const fn capabilities() -> Cap {
    Cap { mqes: QUEUE_ENTRIES_MAX - 1, timeout: 1, mpsmin: 0, css: 1 }
}
