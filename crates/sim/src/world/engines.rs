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
            let conn = self.owner().and_then(|owner| self.clients[owner].holds(machine));
            let there = conn.is_some_and(|conn| {
                let conn = self.core.net.conn(conn);
                conn.client.is_some() && conn.server == Some(machine)
            });
            self.core.oracle.holds(machine, there);
        }
    }
}
