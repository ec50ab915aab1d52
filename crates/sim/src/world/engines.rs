//! The events of a volume without an ordering log that the oracle needs.

use super::World;

impl World {
    /// Reports to the oracle the machines with an association of the owner. A log's lease can't
    /// show that: there is no lease, and a target that has lost the owner is free at once (trap
    /// T25).
    pub(super) fn note_holders(&mut self) {
        if self.core.is_logged() {
            return;
        }
        for machine in 0..self.machines.len() {
            let owner = self.owner();
            let conn = owner.and_then(|owner| self.clients[owner].holds(machine));
            // A connection may remain for a while after the target has ended its association.
            let ended = core::mem::take(&mut self.machines[machine].env.ended);
            let cntlid = owner.and_then(|owner| self.clients[owner].cntlid(machine));
            if cntlid.is_some_and(|cntlid| ended.contains(&cntlid)) {
                self.ended[machine] = conn;
            }
            let is_associated = conn.filter(|_| conn != self.ended[machine]).is_some_and(|conn| {
                let conn = self.core.net.conn(conn);
                conn.client.is_some() && conn.server == Some(machine)
            });
            self.core.oracle.holds(machine, is_associated);
        }
    }
}
