//! The event that the subsystem begins to shut down (Base §3.6.3, §5.2). The other events are those of
//! [`Events`](crate::target::events::Events).

use riopipe_nvme::command::Status;
use riopipe_nvme::feature::event;

use super::Admin;
use crate::outbox::Outbox;
use crate::target::context::Context;
use crate::target::env::TargetEnv;

impl Admin {
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
}
