//! Namespaces that come and go while a connection exists.
//!
//! The connection takes the new namespaces when it reads the notice. From then on, no command finds
//! a namespace that is gone. The commands that it has begun there end at the drive, as usual. Then
//! the connection acknowledges the change, and the drive may be closed.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::TargetConn;
use crate::target::context::update_shared;
use crate::target::env::TargetEnv;

/// The numbers of the changes that the connection knows of and has not acknowledged.
#[derive(Debug, Default)]
pub(super) struct KnownChanges(Vec<u64>);

impl<E: TargetEnv> TargetConn<E> {
    /// Takes the namespaces after the change with this number.
    pub(super) fn on_namespaces_changed(&mut self, number: u64, env: &mut E) {
        self.context.namespaces = env.with_shared(|shared| Arc::clone(shared.namespaces()));
        self.known_changes.0.push(number);
        self.acknowledge_changes(env);
    }

    /// Acknowledges the changes if no command uses a namespace that is gone.
    #[inline]
    pub(super) fn acknowledge_changes(&mut self, env: &mut E) {
        if self.known_changes.0.is_empty() || self.uses_retired_namespace() {
            return;
        }
        let (conn, numbers) = (self.context.id, core::mem::take(&mut self.known_changes.0));
        update_shared(env, |shared| {
            for number in numbers {
                shared.acknowledge_change(number, conn);
            }
        });
    }

    /// Whether a command is in flight on a namespace that was removed. Commands of an admin queue
    /// use no drive.
    fn uses_retired_namespace(&self) -> bool {
        let namespaces = &self.context.namespaces;
        self.admin.is_none()
            && self
                .context
                .commands
                .any(|command| namespaces.is_retired(usize::from(command.ns_index)))
    }
}
