//! What a run needs to know of a volume without an ordering log.

use super::World;

impl World {
    /// Tells the oracle on which machines the owner is there. A log's lease does not tell: there is
    /// none, and a target that has lost the owner is free at once (T25).
    pub(super) fn note_holders(&mut self) {
        if self.core.is_logged() {
            return;
        }
        for machine in 0..self.machines.len() {
            let owner = self.owner();
            let conn = owner.and_then(|owner| self.clients[owner].holds(machine));
            // A connection may be there for a while after the target has ended its association.
            let ended = core::mem::take(&mut self.machines[machine].env.ended);
            let cntlid = owner.and_then(|owner| self.clients[owner].cntlid(machine));
            if cntlid.is_some_and(|cntlid| ended.contains(&cntlid)) {
                self.ended[machine] = conn;
            }
            let there = conn.filter(|_| conn != self.ended[machine]).is_some_and(|conn| {
                let conn = self.core.net.conn(conn);
                conn.client.is_some() && conn.server == Some(machine)
            });
            self.core.oracle.holds(machine, there);
        }
    }
}
