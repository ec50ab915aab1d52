//! A connection's use of the streams of drives with an order-preserving FTL: the translation of its
//! commands, and the end of the use.

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_order::block_device::{self, BlockDevice, IoError, Submitted};
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::write_order::{DriveOrder, EpochId, WriteOrder};

use super::context::Context;
use super::env::TargetEnv;
use super::epoch_streams::{DriveStream, EpochStreams, HostStream, Role, UsedStreams};
use super::ids::OpId;
use super::plain::PlainIo;
use crate::wire;

/// The streams of drives that a connection uses, by namespace index.
#[derive(Debug, Default)]
pub(super) struct EpochUse {
    drives: Vec<UsedStreams>,
    /// The streams that drives begin anew because this connection was the last that used them, each
    /// with its namespace index.
    ending: Vec<(usize, u16)>,
    /// How many of these operations have not come back.
    ending_count: u32,
    has_left: bool,
}

impl EpochUse {
    fn of(&mut self, ns_index: usize) -> &mut UsedStreams {
        if self.drives.len() <= ns_index {
            self.drives.resize_with(ns_index + 1, UsedStreams::default);
        }
        &mut self.drives[ns_index]
    }

    /// Calls `visit` for each stream that the connection uses.
    fn for_each(&self, association: u64, mut visit: impl FnMut(usize, HostStream, Role)) {
        for (ns_index, used) in self.drives.iter().enumerate() {
            used.iter().for_each(|used| {
                visit(ns_index, HostStream { association, stream: used.stream }, used.role);
            });
        }
    }
}

impl PlainIo {
    /// The place of a write in its drive's order, with the streams of the drive.
    ///
    /// # Errors
    /// All streams of the drive are in use.
    pub(super) fn order_on_drive<E: TargetEnv>(
        &mut self,
        context: &Context<E>,
        ns_index: usize,
        order: WriteOrder,
        env: &mut E,
    ) -> Result<WriteOrder, Status> {
        let WriteOrder::Epochs(write) = order else { return Ok(order) };
        self.join_stream(context, ns_index, write.own.stream, Role::Own, env)?;
        if let Some(follower) = write.follower {
            self.join_stream(context, ns_index, follower.stream, Role::Follower, env)?;
        }
        let translated = self.epochs.of(ns_index).translate(write);
        translated.map(WriteOrder::Epochs).ok_or(Status::INTERNAL)
    }

    /// The stream of the drive that stands for a stream of the host.
    fn join_stream<E: TargetEnv>(
        &mut self,
        context: &Context<E>,
        ns_index: usize,
        stream: u16,
        role: Role,
        env: &mut E,
    ) -> Result<DriveStream, Status> {
        let used = self.epochs.of(ns_index);
        let host = HostStream { association: context.association(), stream };
        if let Some(drive) = used.find(stream) {
            if role == Role::Own && used.becomes_own(stream) {
                env.with_shared(|shared| shared.epoch_streams(ns_index).becomes_own(host));
            }
            return Ok(drive);
        }
        let failures = context.namespaces.at(ns_index).state.flush_failures();
        let join = |streams: &mut EpochStreams| streams.join(host, role, failures);
        let joined = env.with_shared(|shared| join(shared.epoch_streams(ns_index)));
        let drive = joined.ok_or(wire::status::DRIVE_STREAMS_FULL)?;
        used.add(stream, role, drive);
        Ok(drive)
    }

    /// The epoch of the drive before which a FLUSH covers everything; `None` for a plain FLUSH.
    ///
    /// # Errors
    /// The drive keeps no epochs, or all its streams are in use.
    pub(super) fn flush_before<E: TargetEnv>(
        &mut self,
        context: &Context<E>,
        sqe: &Sqe,
        ns_index: usize,
        env: &mut E,
    ) -> Result<Option<(EpochId, u64)>, Status> {
        let invalid = Status::INVALID_FIELD.with_dnr();
        let Some(before) = wire::flush_before_of(sqe).ok_or(invalid)? else { return Ok(None) };
        // The host relies on the order (trap T17).
        if context.namespaces.at(ns_index).config.order != DriveOrder::Epochs {
            return Err(invalid);
        }
        let drive = self.join_stream(context, ns_index, before.stream, Role::Own, env)?;
        Ok(Some((drive.epoch(before.epoch), drive.failures)))
    }

    /// Ends the use of the streams by a connection that is closed. If a stream has no connection of
    /// its own any more, no further write of it will come, so the drive ends it: nothing waits for
    /// such a write any more.
    pub(super) fn close_streams<E: TargetEnv>(&mut self, context: &Context<E>, env: &mut E) {
        self.epochs.for_each(context.association(), |ns_index, host, role| {
            let close = |streams: &mut EpochStreams| streams.close(host, role);
            let closed = env.with_shared(|shared| close(shared.epoch_streams(ns_index)));
            if let Some(drive) = closed
                && !probe::is_bug_planted(Plant::OpimqStreamNotBegun)
            {
                let op = OpId::new(context.key, OpId::NO_COMMAND);
                let _ = env.device(ns_index).start_stream(op.0, drive.begin());
            }
        });
    }

    /// Leaves the streams, because all operations of the connection have come back. If no other
    /// connection uses a stream, the drive begins it anew for the next host: a write that another
    /// core had gathered for the drive may have come there after the stream was ended. Returns
    /// whether the drive has done that.
    pub(super) fn leave_streams<E: TargetEnv>(
        &mut self,
        context: &Context<E>,
        env: &mut E,
    ) -> bool {
        if core::mem::replace(&mut self.epochs.has_left, true) {
            return self.epochs.ending_count == 0;
        }
        let mut left = Vec::new();
        self.epochs.for_each(context.association(), |ns_index, host, _| {
            let drive = env.with_shared(|shared| shared.epoch_streams(ns_index).leave(host));
            left.extend(drive.map(|drive| (ns_index, drive)));
        });
        for (ns_index, drive) in left {
            self.epochs.ending.push((ns_index, drive.stream));
            if probe::is_bug_planted(Plant::OpimqStreamNotBegun) {
                continue;
            }
            probe::count_rare(Rare::OpimqStreamBegun);
            let op = OpId::new(context.key, OpId::STREAM_BEGUN);
            if let Submitted::Pending = env.device(ns_index).start_stream(op.0, drive.begin()) {
                self.epochs.ending_count += 1;
            }
        }
        self.free_streams_if_ended(env)
    }

    /// Takes in that a drive has begun a stream anew, or has lost its power, which does the same.
    pub(super) fn on_stream_begun<E: TargetEnv>(&mut self, env: &mut E) {
        self.epochs.ending_count = self.epochs.ending_count.saturating_sub(1);
        self.free_streams_if_ended(env);
    }

    /// Frees the streams that the connection has left, if the drives have begun all of them anew.
    fn free_streams_if_ended<E: TargetEnv>(&mut self, env: &mut E) -> bool {
        if self.epochs.ending_count > 0 {
            return false;
        }
        for (ns_index, stream) in self.epochs.ending.drain(..) {
            env.with_shared(|shared| shared.epoch_streams(ns_index).ended(stream));
        }
        true
    }

    /// The place of a write of this connection in its drive's order, with the streams of the drive.
    /// The write has passed [`order_on_drive`](Self::order_on_drive).
    pub(super) fn translated_order(&mut self, sqe: &Sqe, ns_index: usize) -> Option<WriteOrder> {
        match wire::order_of(sqe)? {
            WriteOrder::Epochs(write) => {
                self.epochs.of(ns_index).translate(write).map(WriteOrder::Epochs)
            }
            order => Some(order),
        }
    }
}

/// Whether a FLUSH has failed because of a write of its stream, or because the stream has ended. The
/// drive has lost nothing then.
pub(super) fn is_stream_failure(error: &IoError) -> bool {
    matches!(
        error.cause(),
        block_device::Cause::StreamFailed { .. } | block_device::Cause::StreamRestarted { .. }
    )
}
